"""How a pass is timed: the device's own time, without what the host needs to enqueue the work."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import timing
from benchmarks.training.chains import Data

PASSES = ("forward", "backward", "both")
# Graphs that wait for their backward pass hold memory.
MAX_CALLS_PER_SAMPLE = 8
# How long the device is held up while the host enqueues a sample, in its clock cycles: a millisecond, then longer.
FIRST_HOLD, LONGEST_HOLD = 2**21, 2**28
MAX_ATTEMPTS = 12


@dataclass(frozen=True, slots=True)
class Pass:
    """What is timed: ``run`` of what ``prepare`` made, which is not timed."""

    prepare: Callable[[], Any]
    run: Callable[[Any], Any]


def make_passes(call: Callable[..., Tensor], data: Data) -> dict[str, Pass]:
    """Return the forward pass, the backward pass, and the two in a row."""

    def prepare_nothing() -> None:
        return None

    def run_forward(_: None) -> Tensor:
        return call(*data.inputs)

    def run_backward(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, data.wanted, data.grad)

    def run_both(_: None) -> tuple[Tensor, ...]:
        return torch.autograd.grad(call(*data.inputs), data.wanted, data.grad)

    return {
        "forward": Pass(prepare_nothing, run_forward),
        # No graph is retained: every backward pass has a forward pass of its own, as in training.
        "backward": Pass(partial(call, *data.inputs), run_backward),
        "both": Pass(prepare_nothing, run_both),
    }


class PassSampler:
    """Times one pass; may be asked for samples several times.

    On CUDA the device is held up by a kernel that does nothing until the host has enqueued a whole sample ("queued"),
    so that events around the sample see no gap that a slow host would leave. Where the host cannot get ahead, they do
    ("events"). On the CPU it is the wall clock ("wall").
    """

    def __init__(self, timed: Pass, device: torch.device) -> None:
        self._pass = timed
        self._is_cuda = device.type == "cuda"
        self.method = "queued" if self._is_cuda else "wall"
        self._hold = FIRST_HOLD
        self._time(1)
        call_s = min(self._time(1) for _ in range(3))
        self._calls = min(MAX_CALLS_PER_SAMPLE, timing.calls_for(call_s))

    def sample(self, budget_s: float) -> list[float]:
        """Return the time of one call in microseconds, at least three times."""
        self._time(self._calls)
        return timing.collect(lambda: self._time(self._calls) / self._calls * 1e6, budget_s)

    def _time(self, calls: int) -> float:
        if not self._is_cuda:
            return self._time_on_the_wall(calls)
        for _ in range(MAX_ATTEMPTS if self.method == "queued" else 1):
            taken_s, was_ahead = self._time_by_events(calls)
            if was_ahead:
                return taken_s
            self._hold = min(2 * self._hold, LONGEST_HOLD)
        self.method, self._hold = "events", 1
        return taken_s

    def _time_on_the_wall(self, calls: int) -> float:
        prepared = [self._pass.prepare() for _ in range(calls)]
        began = time.perf_counter()
        while prepared:
            self._pass.run(prepared.pop())
        return time.perf_counter() - began

    def _time_by_events(self, calls: int) -> tuple[float, bool]:
        # Also returns whether the device had not begun when everything was enqueued.
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        prepared = [self._pass.prepare() for _ in range(calls)]
        torch.cuda.synchronize()
        torch.cuda._sleep(self._hold)
        start.record()
        while prepared:
            self._pass.run(prepared.pop())
        end.record()
        was_ahead = not start.query()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3, was_ahead
