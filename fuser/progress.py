"""How far something long has come: one line on stderr that is written over, where that is a terminal."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from types import TracebackType

__all__ = ["Progress"]

WIDTH = 24
# What is faster than this shows nothing.
DELAY_S = 0.3


class Progress:
    """``with Progress("warm-up", 12) as bar: ... bar.advance("axpy")``. Threads may share it."""

    def __init__(self, title: str, total: int) -> None:
        self._title = title
        self._total = max(total, 1)
        self._done = 0
        self._began = time.monotonic()
        self._is_shown = sys.stderr is not None and sys.stderr.isatty()
        self._lock = threading.Lock()

    def __enter__(self) -> Progress:
        return self

    def advance(self, what: str) -> None:
        """One more is done: ``what``."""
        with self._lock:
            self._done += 1
            elapsed_s = time.monotonic() - self._began
            if self._is_shown and elapsed_s > DELAY_S:
                bar = "#" * (WIDTH * self._done // self._total)
                text = f"{self._title} [{bar:<{WIDTH}}] {self._done}/{self._total}, {elapsed_s:.0f} s  {what}"
                sys.stderr.write(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}")
                sys.stderr.flush()

    def clear(self) -> None:
        """Take the line away, for what is written meanwhile."""
        if self._is_shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave no trace of it."""
        self.clear()
