"""Searches for the fastest tuning of the kernels that a call launches: on the device, with the call's own tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from fuser import log
from fuser.access import Tuning
from fuser.config import config
from fuser.errors import CompileError
from fuser.process import Lock
from fuser.progress import Progress
from fuser.tuning import table as tunings
from fuser.tuning.table import Candidate

__all__ = ["KernelTrials", "Trial", "TuningReport", "make_tuned", "tune"]

P = TypeVar("P")

_thread = threading.local()
# Two searches at a time would measure each other.
_search_lock = Lock()

# A winner has to be faster than the default by more than the noise of a measurement.
MIN_GAIN = 0.02
SAMPLES = 7
SAMPLE_MS = 2.0
MAX_CALLS = 200


@dataclass(frozen=True, slots=True)
class Trial:
    """One tuning, and the time of the whole call with it."""

    tuning: Tuning
    time_us: float


@dataclass(frozen=True, slots=True)
class KernelTrials:
    """What was tried for one kernel; the default comes first."""

    # Its functors.
    names: str
    trials: tuple[Trial, ...]
    chosen: Tuning

    def __str__(self) -> str:
        lines = [f"kernel of {self.names}"]
        for trial in self.trials:
            marks = [" default"] * (trial is self.trials[0]) + [" chosen"] * (trial.tuning == self.chosen)
            lines.append(f"  {trial.tuning!s:<40} {trial.time_us:10.2f} us{','.join(marks)}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class TuningReport:
    """What a search tried; prints as a table."""

    kernels: tuple[KernelTrials, ...] = ()
    # Why nothing was tried.
    reason: str = ""

    def __str__(self) -> str:
        return "\n".join(map(str, self.kernels)) if self.kernels else f"nothing tuned: {self.reason}"


def tune(run: Callable[[], Any]) -> TuningReport:
    """Try tunings for every kernel that ``run`` launches, keep the fastest ones, and tell what was tried.

    ``run`` is called many times, in a CUDA graph where it can be captured. Winners serve the kernel's whole layout
    class from now on, also in later processes.

    Raises:
        As ``run``.
    """
    if not torch.cuda.is_available():
        return TuningReport(reason="no CUDA device is available")
    if torch.cuda.is_current_stream_capturing():
        return TuningReport(reason="a CUDA graph is being captured")
    with _search_lock():
        with _searching(), tunings.record() as seen:
            # Plans are made anew, and seen.
            config.touch()
            run()
        found = tuple(dict.fromkeys(seen))
        if not found:
            return TuningReport(reason="the call launched no CUDA kernel of fuser's")
        return _search(found, run)


def make_tuned(make: Callable[[], P], run: Callable[[], Any]) -> P:
    """Return the plan that ``make`` makes; with ``config.autotune``, search first for what no search has seen yet.

    Args:
        make: makes the plan.
        run: makes the same call, into new outputs.
    """
    if not config.autotune or config.no_compile or getattr(_thread, "is_searching", False):
        return make()
    with tunings.record() as seen:
        plan = make()
    unknown = tuple(candidate for candidate in dict.fromkeys(seen) if not tunings.is_known(candidate))
    # While another thread searches, this one goes on: what that thread runs may wait for it.
    lock = _search_lock()
    if not unknown or torch.cuda.is_current_stream_capturing() or not lock.acquire(blocking=False):
        return plan
    try:
        _search(unknown, run)
    finally:
        lock.release()
    return make()


def _search(found: Sequence[Candidate], run: Callable[[], Any]) -> TuningReport:
    with _searching():
        kernels = tuple(_tune(candidate, run) for candidate in found)
    # Plans made meanwhile hold tunings that were only tried.
    config.touch()
    return TuningReport(kernels)


def _tune(candidate: Candidate, run: Callable[[], Any]) -> KernelTrials:
    trials = list[Trial]()
    choices = tunings.candidates(candidate.args)
    with Progress("autotune", len(choices)) as bar:
        for tuning in choices:
            with tunings.use(candidate, tuning), suppress(*_refusals(trials)):
                config.touch()
                trials.append(Trial(tuning, _time_us(run)))
            bar.advance(candidate.names)
    best = min(trials, key=lambda trial: trial.time_us)
    chosen = best.tuning if best.time_us < trials[0].time_us * (1 - MIN_GAIN) else trials[0].tuning
    tunings.keep(candidate, chosen)
    found = KernelTrials(candidate.names, tuple(trials), chosen)
    log.say("tuning", str(found))
    return found


def _refusals(trials: Sequence[Trial]) -> tuple[type[Exception], ...]:
    # For what the rows of a larger block wait with there may be no shared memory: that is no kernel then.
    return (CompileError,) if trials else ()


@contextmanager
def _searching() -> Iterator[None]:
    # A search plans calls of its own: they must not start another one.
    before = getattr(_thread, "is_searching", False)
    _thread.is_searching = True
    try:
        yield
    finally:
        _thread.is_searching = before


def _time_us(run: Callable[[], Any]) -> float:
    # The median time of one call on the device; of its launches alone, where they can be captured.
    run()
    torch.cuda.synchronize()
    calls = max(1, min(MAX_CALLS, round(SAMPLE_MS / max(_elapsed_ms(run, 1), 1e-3))))
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                run()
    except RuntimeError:
        torch.cuda.synchronize()
        samples = [_elapsed_ms(run, calls) / calls for _ in range(SAMPLES)]
    else:
        graph.replay()
        samples = [_elapsed_ms(graph.replay, 1) / calls for _ in range(SAMPLES)]
    import statistics  # noqa: PLC0415 - takes longer to import than most of fuser's files

    return statistics.median(samples) * 1e3


def _elapsed_ms(run: Callable[[], Any], times: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
