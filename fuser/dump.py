"""``FUSER_DUMP``: a folder for each kernel, with what it was made from and what it became."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path

from fuser.config import config
from fuser.counters import warn_once
from fuser.errors import CacheWarning
from fuser.kernel_source import KernelSource
from fuser.process import is_of_signal_handler

__all__ = ["dump"]

LONGEST_NAMES = 80


def dump(source: KernelSource, files: Mapping[str, str | bytes]) -> None:
    """Write files into a kernel's folder, if there is to be one; a folder that cannot be written to warns once."""
    if config.dump is None:
        return
    title = f"{_name_of_file(source)}-{hashlib.sha256(source.text.encode()).hexdigest()[:12]}"
    try:
        folder = Path(config.dump, title).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    # Without a home folder "~" is a RuntimeError.
    except (OSError, RuntimeError) as error:
        if is_of_signal_handler(error):
            raise
        warn_once(f"dump {config.dump}", f"FUSER_DUMP={config.dump}: {error}", CacheWarning)


def _name_of_file(source: KernelSource) -> str:
    # The locale says which letters one may have; groups may have hundreds of functors.
    encoding = sys.getfilesystemencoding()
    names = "-".join(functor.entry for functor in source.functors).encode(encoding, "replace")
    return names[:LONGEST_NAMES].decode(encoding, "ignore")
