"""How things are timed: on the wall clock on a CPU, by events around graph replays on CUDA.

Throughput is the time of the work itself; host time is how long one call keeps Python busy.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from typing_extensions import override

Run = Callable[[], Any]
Wait = Callable[[Any], None]

# A sample lasts at least this long, or the clock's own noise shows.
MIN_SAMPLE_S = 2e-3
MAX_CALLS_PER_SAMPLE = 200
# Below the length of the driver's launch queue: a full queue would stop the host, and that is not the call's cost.
HOST_CALLS_PER_SAMPLE = 100
# Half a millisecond, in which the host queues its first calls.
HEAD_START_CYCLES = 1_000_000


@dataclass(frozen=True, slots=True)
class Timing:
    """Samples of the time of one call."""

    # "wall", "events" or "graph"
    method: str
    samples_us: tuple[float, ...]

    @property
    def median_us(self) -> float:
        """The middle sample."""
        return statistics.median(self.samples_us)

    def to_json(self) -> dict[str, Any]:
        """Return median, 10th and 90th percentile, and every sample, in microseconds."""
        return {**self.summarize(), "samples": [round(sample, 3) for sample in self.samples_us]}

    def summarize(self) -> dict[str, Any]:
        """Return median, 10th and 90th percentile, in microseconds."""
        return {
            "method": self.method,
            "median": round(self.median_us, 3),
            "p10": round(percentile(self.samples_us, 0.1), 3),
            "p90": round(percentile(self.samples_us, 0.9), 3),
        }


def percentile(samples: Sequence[float], fraction: float) -> float:
    """Return the sample below which about ``fraction`` of the samples lie."""
    ordered = sorted(samples)
    return ordered[round(fraction * (len(ordered) - 1))]


class Sampler(Protocol):
    """Times one callable; may be asked for samples several times."""

    method: str

    def sample(self, budget_s: float) -> list[float]:
        """Return the time of one call in microseconds, at least three times."""


def make_sampler(run: Run, wait: Wait, device: torch.device, on_torch_stream: bool, capturable: bool) -> Sampler:
    """Return the best sampler for ``run``: graph replay, then events, then the wall clock.

    ``wait`` blocks until a result of ``run`` is ready; ``on_torch_stream`` says that the work goes to torch's current
    stream, where events see it.
    """
    if device.type != "cuda" or not on_torch_stream:
        return WallSampler(run, wait)
    if capturable:
        try:
            return GraphSampler(run)
        except RuntimeError:
            torch.cuda.synchronize()
    return EventSampler(run)


class WallSampler(Sampler):
    """Times calls, waiting for the last one's result, on the host's clock."""

    method = "wall"

    def __init__(self, run: Run, wait: Wait) -> None:
        self._run = run
        self._wait = wait
        wait(run())
        self._calls = calls_for(self._time(1))

    @override
    def sample(self, budget_s: float) -> list[float]:
        self._time(1)
        return collect(lambda: self._time(self._calls) / self._calls * 1e6, budget_s)

    def _time(self, calls: int) -> float:
        began = time.perf_counter()
        for _ in range(calls - 1):
            self._run()
        self._wait(self._run())
        return time.perf_counter() - began


class EventSampler(Sampler):
    """Times calls by two events on torch's current stream; a host that is slower than the GPU shows in the result.

    The GPU waits before the first event, so that what the host does before the first kernel does not.
    """

    method = "events"

    def __init__(self, run: Run) -> None:
        self._run = run
        self._start, self._end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._time(3)
        self._calls = calls_for(self._time(3) / 3)

    @override
    def sample(self, budget_s: float) -> list[float]:
        self._time(1)
        return collect(lambda: self._time(self._calls) / self._calls * 1e6, budget_s)

    def _time(self, calls: int) -> float:
        torch.cuda._sleep(HEAD_START_CYCLES)
        self._start.record()
        for _ in range(calls):
            self._run()
        self._end.record()
        self._end.synchronize()
        return self._start.elapsed_time(self._end) * 1e-3


class GraphSampler(Sampler):
    """Times a CUDA graph of several calls, so that the host has no part in the result.

    Raises:
        RuntimeError: ``run`` cannot be captured.
    """

    method = "graph"

    def __init__(self, run: Run) -> None:
        # The graph holds addresses, not the memory and the kernels that its calls use.
        self._run = run
        self._calls = calls_for(EventSampler(run)._time(3) / 3)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=side):
            for _ in range(self._calls):
                run()
        self._replay = EventSampler(self._graph.replay)

    @override
    def sample(self, budget_s: float) -> list[float]:
        return [time_us / self._calls for time_us in self._replay.sample(budget_s)]


def calls_for(call_s: float) -> int:
    """Return how many calls of this length make one sample."""
    return max(1, min(MAX_CALLS_PER_SAMPLE, round(MIN_SAMPLE_S / max(call_s, 1e-7))))


def collect(take: Callable[[], float], budget_s: float, at_least: int = 3, at_most: int = 100) -> list[float]:
    """Take samples until the budget is spent."""
    samples: list[float] = []
    began = time.perf_counter()
    while len(samples) < at_least or (time.perf_counter() - began < budget_s and len(samples) < at_most):
        samples.append(take())
    return samples


def sample_host_us(run: Run, wait: Wait, device: torch.device, budget_s: float) -> list[float]:
    """Return how long one call keeps the host busy: until it is enqueued on CUDA, until it is done on a CPU."""
    enqueue_only = device.type == "cuda"

    def take() -> float:
        result = run()
        wait(result)
        began = time.perf_counter()
        for _ in range(HOST_CALLS_PER_SAMPLE):
            result = run()
            if not enqueue_only:
                wait(result)
        taken = time.perf_counter() - began
        wait(result)
        return taken / HOST_CALLS_PER_SAMPLE * 1e6

    for _ in range(3):
        take()
    return collect(take, budget_s)


def take_turns(samplers: Mapping[str, Sampler], rounds: int, budget_s: float) -> dict[str, float]:
    """Return the median time of each contestant, in microseconds: all are sampled in every round, one after another."""
    taken: dict[str, list[float]] = {name: [] for name in samplers}
    for _ in range(rounds):
        for name, sampler in samplers.items():
            taken[name] += sampler.sample(budget_s)
    return {name: statistics.median(samples) for name, samples in taken.items()}


def busy_time(profiler: Any) -> tuple[float, int]:
    """Return for how many microseconds a GPU had something to do, and how many kernels, copies and fills there were.

    Args:
        profiler: ``torch.profiler.profile`` of CUDA's activities. What runs beside something else does not count twice.
    """
    events = [event for event in profiler.events() if event.device_type.name == "CUDA"]
    busy, until = 0.0, -math.inf
    for begin, end in sorted((event.time_range.start, event.time_range.end) for event in events):
        busy += max(end - max(begin, until), 0.0)
        until = max(until, end)
    return busy, len(events)
