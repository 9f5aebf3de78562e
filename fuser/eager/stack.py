"""Room for recursion."""

from __future__ import annotations

import sys

from fuser.process import Lock

__all__ = ["MAX_DEPTH", "deep_stack"]

# Calls of a functor's functions inside each other.
MAX_DEPTH = 64


class DeepStack:
    """Lets Python's stack grow as a recursion needs it, while any thread is inside.

    A call of the functor takes up to two dozen of Python's own. Those take no room on the machine's stack, only the
    limit is in the way; it holds for all threads.
    """

    def __init__(self) -> None:
        self.lock = Lock()
        self.inside = 0
        self.before = 0

    def __enter__(self) -> None:
        with self.lock():
            if self.inside == 0:
                self.before = sys.getrecursionlimit()
                sys.setrecursionlimit(self.before + 30 * MAX_DEPTH)
            self.inside += 1

    def __exit__(self, *_: object) -> None:
        with self.lock():
            self.inside -= 1
            if self.inside == 0:
                sys.setrecursionlimit(self.before)


deep_stack = DeepStack()
