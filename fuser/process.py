"""Locks and threads that hang nobody: no forked child, no signal handler, and not the interpreter at its end."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import torch

__all__ = [
    "Lock",
    "Slots",
    "await_before_fork",
    "core_count",
    "ignoring",
    "is_forked",
    "is_of_current_handler",
    "is_of_signal_handler",
    "map_in_threads",
    "openmp_threads",
    "planning",
]

T = TypeVar("T")
V = TypeVar("V")

FORK_WAIT_S = 10.0
# Whose frames the traceback of an exception may have that is nobody else's.
_CALLED = sys.stdlib_module_names | {"fuser", "cuda", "platformdirs"}

# How often this process came out of a fork since fuser was imported.
_forks = 0
# What a fork waits for.
_awaited: list[Lock] = []
# Whether a fork has left OpenMP's threads behind.
_has_lost_threads = False


class Lock:
    """Gives, when called, what to hold: ``with lock():``.

    - One thread may hold it twice. A signal handler and ``__del__`` run inside whatever their thread was doing, so what
      is changed under it is whole between any two statements.
    - A forked child finds it free: whoever held it in the parent does not run there.
    - It is free when the interpreter ends, where daemon threads have stopped for good, whatever they held.
    """

    __slots__ = ("_forks", "_held")

    def __init__(self) -> None:
        self._forks = _forks
        self._held = threading.RLock()

    def __call__(self) -> threading.RLock:
        """Return what to hold. Interrupts do not come between taking it and the ``with`` that gives it back."""
        if sys.is_finalizing():
            return threading.RLock()
        if self._forks != _forks:
            self._forks, self._held = _forks, threading.RLock()
        return self._held


class Slots:
    """Gives, when called, one of some locks, in turn: no more threads than that go on at once."""

    def __init__(self, count: int) -> None:
        self._locks = [Lock() for _ in range(count)]
        self._turns = itertools.count()

    def __call__(self) -> threading.RLock:
        """Return what to hold, as ``Lock``."""
        return self._locks[next(self._turns) % len(self._locks)]()


# Held by a thread for as long as Python's work for a kernel takes. Threads that share Python in small slices come late
# to what others do for them, compilers and disks, and all at once.
planning = Lock()


def core_count() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_in_threads(function: Callable[[T], V], items: Sequence[T], count: int) -> list[V]:
    """Return what a function returns for each item, of which so many are worked on at a time.

    Raises:
        Exception: what it raised for the first item for which it did. What has begun then is waited for, but by an
            interrupt, after which it goes on; the rest is given up.
    """
    if len(items) < 2 or count < 2:
        return list(map(function, items))
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - takes milliseconds, of every import

    pool = ThreadPoolExecutor(min(count, len(items)), "fuser")
    try:
        try:
            results = pool.map(function, items)
        except RuntimeError:  # At its end the interpreter gives no threads any more.
            return list(map(function, items))
        return list(results)
    finally:
        # No variable here leads to the error, nor to what holds it: its traceback has this frame, and a cycle of them
        # would keep all that the callers' frames hold, tensors too, until the garbage collector comes.
        pool.shutdown(wait=isinstance(sys.exception(), Exception | None), cancel_futures=True)


def is_forked() -> bool:
    """Whether this process was forked since fuser was imported: locks of others may be held for good."""
    return _forks > 0


def await_before_fork(lock: Lock) -> None:
    """Let every fork wait until no thread holds a lock, or for some seconds.

    Of two that a thread holds at once, the one that it takes first is to be given here last.
    """
    _awaited.append(lock)


def _hold_awaited() -> None:
    while True:
        locks = tuple(_awaited)
        for lock in reversed(locks):
            lock().acquire(timeout=FORK_WAIT_S)
        if len(locks) == len(_awaited):
            return
        # Who was waited for has imported what has locks of its own, and may hold them by now.
        _release(locks)


def _release(locks: Sequence[Lock]) -> None:
    for lock in locks:
        # Not held where the wait was in vain.
        with suppress(RuntimeError):
            lock().release()


def is_of_signal_handler(error: BaseException) -> bool:
    """Whether a signal handler raised it: whatever its type, code of the user's has.

    To be asked where an exception was caught around code that calls nothing of the user's. What cannot be imported is
    nobody's handler.
    """
    trace = None if isinstance(error, ImportError) else error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_globals.get("__name__", "")
        # Operators are called through that one of torch's modules; others of torch's have signal handlers.
        if name.partition(".")[0] not in _CALLED and name != "torch._ops":
            return True
        trace = trace.tb_next
    return False


def is_of_current_handler(error: BaseException) -> bool:
    """Whether a signal handler raised it that is there now: where code of others is called, too."""
    handlers = filter(callable, map(signal.getsignal, signal.valid_signals()))
    codes = {getattr(item, "__code__", getattr(type(item).__call__, "__code__", None)) for item in handlers}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


class ignoring:  # noqa: N801 - as contextlib.suppress
    """Ignore exceptions of these kinds inside a ``with`` block, but those of signal handlers.

    No generator: its frame would be in the traceback, below one that holds the exception, and all that the callers
    have in their variables would wait for the garbage collector.
    """

    def __init__(self, *kinds: type[Exception]) -> None:
        self._kinds = kinds

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """Say whether the exception ends here."""
        return isinstance(error, self._kinds) and not is_of_signal_handler(error)


def openmp_threads() -> int:
    """Return how many threads a large kernel on the CPU may use: torch's thread count.

    In a child of a process that may have used several, in kernels or in torch's own operators, it is 1: OpenMP would
    wait for the parent's threads, which do not exist there.
    """
    return 1 if _has_lost_threads else torch.get_num_threads()


def _enter_child() -> None:
    global _forks, _has_lost_threads  # noqa: PLW0603 - one OpenMP per process
    _forks += 1
    _has_lost_threads = torch.get_num_threads() > 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold_awaited, after_in_parent=lambda: _release(_awaited), after_in_child=_enter_child)
