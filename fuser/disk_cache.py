"""Where compiled kernels live on disk. A cache that cannot be written never breaks a call: it is skipped."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from fuser.config import config

__all__ = ["cache_directory"]


def cache_directory(room: str) -> Path | None:
    """Return the writable directory of one room ("cuda", "cpu"), made if missing; None to do without a cache."""
    import platformdirs  # noqa: PLC0415 - only needed here

    if not config.disk_cache:
        return None
    return _writable(Path(config.cache_dir or platformdirs.user_cache_dir("fuser")) / room)


@cache
def _writable(directory: Path) -> Path | None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return directory
    except OSError:
        return None
