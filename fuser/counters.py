"""Counters of one process: what was launched, compiled, found ready, and what fell back to eager torch and why."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

__all__ = ["count", "count_fallback", "reset_stats", "stats"]

_lock = threading.Lock()
_counts = {"launches": 0, "compiles": 0, "cache_hits": 0}
_fallbacks: dict[str, int] = {}
_sources: dict[str, Callable[[], int]] = {}


def stats() -> dict[str, Any]:
    """Return a copy of the counters.

    Returns:
        ``launches``: kernels launched; ``compiles``: compiler runs; ``cache_hits``: kernels that a new kind of call
        found ready, in memory or on disk; ``fallbacks``: reason -> number of calls that ran in eager torch for it.
    """
    with _lock:
        totals = {name: value + (_sources[name]() if name in _sources else 0) for name, value in _counts.items()}
        return {**totals, "fallbacks": dict(_fallbacks)}


def reset_stats() -> None:
    """Set every counter to zero."""
    with _lock:
        for name in _counts:
            _counts[name] = -_sources[name]() if name in _sources else 0
        _fallbacks.clear()


def add_source(name: str, total: Callable[[], int]) -> None:
    """Add a counter kept elsewhere to one of these: ``total`` returns it, counted from the start of the process."""
    with _lock:
        _sources[name] = total
        _counts[name] -= total()


def count(name: str, times: int = 1) -> None:
    """Add to one counter."""
    with _lock:
        _counts[name] += times


def count_fallback(reason: str) -> None:
    """Record one call that ran in eager torch."""
    with _lock:
        _fallbacks[reason] = _fallbacks.get(reason, 0) + 1
