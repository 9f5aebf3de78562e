"""Counters of one process: what was launched, compiled, found ready, and what fell back to eager torch and why."""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable
from typing import Any

from fuser import log
from fuser.errors import FallbackWarning
from fuser.process import Lock

__all__ = [
    "Tally",
    "count",
    "count_fallback",
    "count_kept",
    "count_launch",
    "reset_stats",
    "stats",
    "tally_of",
    "warn_once",
]

_lock = Lock()


class Tally:
    """A counter that many threads add to without a lock: one step of CPython's is never cut in two."""

    def __init__(self) -> None:
        self._count = itertools.count()
        # Adds one.
        self.add: Callable[[], int] = self._count.__next__
        # How often it was read, which adds one, too, and what it had when it was set to zero.
        self._reads = 0
        self._start = 0

    def total(self, *, starts_again: bool = False) -> int:
        """Return how often ``add`` was called since it was set to zero, which it may be now; the lock is held."""
        total = next(self._count) - self._reads
        self._reads += 1
        start = self._start
        self._start = total if starts_again else start
        return total - start


_counts = {"launches": 0, "compiles": 0, "cache_hits": 0, "checks": 0}
_fallbacks: dict[str, Tally] = {}
# Reasons that were warned about.
_warned: set[str] = set()
# Where launches are counted.
_sources: list[Callable[[], int]] = []


def stats() -> dict[str, Any]:
    """Return a copy of the counters.

    Returns:
        ``launches``: kernels launched; ``compiles``: compiler runs; ``cache_hits``: kernels that a new kind of call
        found ready, in memory or on disk; ``checks``: orders of torch's reductions that were compared with torch's own
        kernel before their first use; ``kept``: reductions that strict numerics left to torch's kernel, whose order no
        kernel keeps for their shape; ``fallbacks``: reason -> number of calls that ran in eager torch for it.
    """
    with _lock():
        totals = {**_counts, "launches": _counts["launches"] + _count_launches(), "kept": _kept.total()}
        # The list is made in one step: calls add reasons meanwhile.
        fallbacks = {reason: tally.total() for reason, tally in list(_fallbacks.items())}
        return {**totals, "fallbacks": {reason: total for reason, total in fallbacks.items() if total}}


def reset_stats() -> None:
    """Set every counter to zero."""
    with _lock():
        _counts.update(dict.fromkeys(_counts, 0), launches=-_count_launches())
        _kept.total(starts_again=True)
        for tally in list(_fallbacks.values()):
            tally.total(starts_again=True)


def add_launches(total: Callable[[], int]) -> None:
    """Add launches that are counted elsewhere: ``total`` returns how many, from the start of the process."""
    with _lock():
        _sources.append(total)
        _counts["launches"] -= total()


def _count_launches() -> int:
    return sum(total() for total in _sources)


# Launches from Python are counted without a lock, which takes a fifth of the time of such a call.
_launched = Tally()
count_launch = _launched.add
add_launches(_launched.total)
# Likewise.
_kept = Tally()
count_kept = _kept.add


def count(name: str) -> None:
    """Add one to a counter."""
    with _lock():
        _counts[name] += 1


def tally_of(reason: str) -> Tally:
    """Return the counter of the calls that ran in eager torch for a reason."""
    return _fallbacks.get(reason) or _fallbacks.setdefault(reason, Tally())


def count_fallback(reason: str) -> None:
    """Record one call that ran in eager torch; the first one for each reason warns."""
    log.say("fallback", reason)
    tally_of(reason).add()
    warn_once(reason, f"runs in eager torch, without a kernel: {reason}", FallbackWarning)


def warn_once(reason: str, message: str, category: type[Warning]) -> None:
    """Warn, from the caller outside of fuser and torch, unless this reason was warned about before."""
    with _lock():
        is_new = reason not in _warned
        _warned.add(reason)
    if is_new:
        silence = f"warnings.filterwarnings('ignore', category={category.__module__}.{category.__name__})"
        warnings.warn(f"{message} (said once; silence it with {silence})", category, stacklevel=_depth_of_caller())


_BETWEEN = frozenset({"contextlib", "fuser", "torch"})


def _depth_of_caller() -> int:
    # The frame outside of fuser, as warnings.warn counts from the one that calls it; contextlib's is a decorator's of
    # fuser's, and torch's are those of a module's call, a compiled function's or a backward pass. Code that torch has
    # written is of no module.
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "torch").partition(".")[0] in _BETWEEN:
        depth, frame = depth + 1, frame.f_back
    return depth
