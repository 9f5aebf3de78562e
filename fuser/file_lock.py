"""Locks between processes that end with their holder, wait for a while at most, and do without where there are none.

A lock is one byte of an open file. It belongs to the descriptor: threads of one process exclude each other too. One
file serves for everything, and nothing is left behind in it.
"""

from __future__ import annotations

import os
import struct
import time

from fuser.process import is_of_signal_handler

__all__ = ["release", "take"]

LONGEST_POLL_S = 0.02


def take(descriptor: int, byte: int, timeout_s: float) -> None:
    """Lock a byte, which need not be in the file. Returns without it after the time-out, or if there are no locks."""
    deadline, pause_s = time.monotonic() + timeout_s, 0.001
    while not _set(descriptor, byte, is_held=True):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return
        # What a signal handler raises here leaves: whoever waits can be interrupted.
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, LONGEST_POLL_S)


def release(descriptor: int, byte: int) -> None:
    """Give a byte back. Closing is not enough if the process was forked meanwhile: the child has the file open too."""
    _set(descriptor, byte, is_held=False)


def _set(descriptor: int, byte: int, *, is_held: bool) -> bool:
    """Return False if somebody else has it. Where there are no locks, everybody has them."""
    import fcntl  # noqa: PLC0415 - POSIX only

    if not hasattr(fcntl, "F_OFD_SETLK"):
        return True
    kind = fcntl.F_WRLCK if is_held else fcntl.F_UNLCK
    # struct flock of 64-bit Linux: type, whence, start, length, process.
    request = struct.pack("hhqqi0q", kind, os.SEEK_SET, byte, 1, 0)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, request)
    except OSError as error:
        if is_of_signal_handler(error):
            raise
        return not isinstance(error, BlockingIOError)
    return True
