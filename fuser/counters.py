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

__all__ = ["count", "count_fallback", "count_launch", "reset_stats", "stats", "warn_once"]

_lock = Lock()
_counts = {"launches": 0, "compiles": 0, "cache_hits": 0, "checks": 0, "kept": 0}
_fallbacks: dict[str, int] = {}
# Reasons that were warned about.
_warned: set[str] = set()
_sources: dict[str, list[Callable[[], int]]] = {}


def stats() -> dict[str, Any]:
    """Return a copy of the counters.

    Returns:
        ``launches``: kernels launched; ``compiles``: compiler runs; ``cache_hits``: kernels that a new kind of call
        found ready, in memory or on disk; ``checks``: orders of torch's reductions that were compared with torch's own
        kernel before their first use; ``kept``: reductions that strict numerics left to torch's kernel, whose order no
        kernel keeps for their shape; ``fallbacks``: reason -> number of calls that ran in eager torch for it.
    """
    with _lock():
        totals = {name: value + _count_elsewhere(name) for name, value in _counts.items()}
        return {**totals, "fallbacks": dict(_fallbacks)}


def reset_stats() -> None:
    """Set every counter to zero."""
    with _lock():
        for name in _counts:
            _counts[name] = -_count_elsewhere(name)
        _fallbacks.clear()


def add_source(name: str, total: Callable[[], int]) -> None:
    """Add a counter kept elsewhere to one of these: ``total`` returns it, counted from the start of the process."""
    with _lock():
        _sources.setdefault(name, []).append(total)
        _counts[name] -= total()


def _count_elsewhere(name: str) -> int:
    return sum(total() for total in _sources.get(name, ()))


# Launches from Python are counted without a lock, which takes a fifth of the time of such a call. What comes next is in
# the text of such a counter.
_launched = itertools.count()
count_launch = _launched.__next__
add_source("launches", lambda: int(repr(_launched)[6:-1]))


def count(name: str, times: int = 1) -> None:
    """Add to one counter."""
    with _lock():
        _counts[name] += times


def count_fallback(reason: str) -> None:
    """Record one call that ran in eager torch; the first one for each reason warns."""
    log.say("fallback", reason)
    with _lock():
        _fallbacks[reason] = _fallbacks.get(reason, 0) + 1
    warn_once(reason, f"runs in eager torch, without a kernel: {reason}", FallbackWarning)


def warn_once(reason: str, message: str, category: type[Warning]) -> None:
    """Warn, from the caller outside of fuser, unless this reason was warned about before."""
    with _lock():
        is_new = reason not in _warned
        _warned.add(reason)
    if is_new:
        silence = f"warnings.filterwarnings('ignore', category={category.__module__}.{category.__name__})"
        warnings.warn(f"{message} (said once; silence it with {silence})", category, stacklevel=_depth_of_caller())


def _depth_of_caller() -> int:
    # The frame outside of fuser, as warnings.warn counts from the one that calls it.
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "fuser":
        depth, frame = depth + 1, frame.f_back
    return depth
