"""``python -m fuser cache``: what is kept between processes, and how to be rid of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from fuser.disk_cache import cache_folder, clear_cache, list_entries
from fuser.errors import CacheError

__all__ = ["ACTIONS", "run"]

# ELF's number of the machine that code is for, at its place in the file.
MACHINE = slice(18, 20)
CUDA = 190
DAY_S = 86400.0


def run(action: str) -> Iterator[str]:
    """Do one of ACTIONS; yield what to print.

    Raises:
        CacheError: there is no disk cache.
    """
    folder = cache_folder()
    if folder is None:
        raise CacheError("the disk cache is switched off")
    return ACTIONS[action](folder)


def _path(folder: Path) -> Iterator[str]:
    yield str(folder)


def _list(folder: Path) -> Iterator[str]:  # noqa: ARG001 - as the others
    for path, status in sorted(list_entries(), key=lambda item: item[1].st_mtime):
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(status.st_mtime))
        yield f"{path.name}  {_kind(path):<6}  {status.st_size:>9,} bytes  used {used}"


def _stats(folder: Path) -> Iterator[str]:
    entries = list_entries()
    kinds = Counter(_kind(path) for path, _ in entries)
    yield f"{folder}: {len(entries)} entries, {sum(status.st_size for _, status in entries):,} bytes"
    yield ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "nothing is kept"
    if entries:
        oldest = min(status.st_mtime for _, status in entries)
        yield f"unused for {(time.time() - oldest) / DAY_S:.0f} days at most"


def _clear(folder: Path) -> Iterator[str]:
    yield f"{folder}: {clear_cache()} entries removed"


def _kind(path: Path) -> str:
    try:
        with path.open("rb") as file:
            head = file.read(MACHINE.stop)
    except OSError:
        return "gone"
    if not head.startswith(b"\x7fELF"):
        return "note"
    return "CUDA" if int.from_bytes(head[MACHINE], "little") == CUDA else "CPU"


ACTIONS = {"path": _path, "list": _list, "stats": _stats, "clear": _clear}
