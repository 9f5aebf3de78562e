"""What profilers see: one event per launch, named after its functors, and none of fuser's work when nobody profiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import profiler

import fuser
from fuser import launcher
from fuser.plan import MAX_NAMES
from fuser.python_launcher import PythonLauncher
from fuser.route import call

pytestmark = pytest.mark.cpu

AXPY = fuser.create_jit_fn("template <typename T> T axpy(T x, T y, T alpha) { return alpha * x + y; }", alpha=1.0)


@fuser.fuse
def chain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.relu(AXPY(x, y, alpha=2.0))


@pytest.fixture(params=["c", "python"])
def axpy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a functor that each kind of launcher replays."""
    if request.param == "c":
        if launcher._c is None:
            pytest.skip("fuser was installed without a C compiler")
        return AXPY
    monkeypatch.setattr(launcher, "_c", None)
    replayer = PythonLauncher((), ())
    return lambda x, y, alpha=1.0: call(AXPY.spec(2), replayer, (x, y, alpha))


def events(work: Callable[[], Any]) -> list[str]:
    """Return the names of fuser's events in some work."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    found = [event for event in profile.events() if event.name.startswith("fuser::")]
    return [event.name for event in sorted(found, key=lambda event: event.time_range.start)]


def test_each_launch_is_an_event_with_the_names_of_its_functors(axpy: Callable[..., Any]) -> None:
    x, y = torch.randn(2, 37)
    expected = 3 * x + y
    for _ in range(3):
        # Planned, then replayed.
        assert events(lambda: axpy(x, y, alpha=3.0)) == ["fuser::axpy"]
        assert torch.equal(axpy(x, y, alpha=3.0), expected)
        assert events(lambda: chain(x, y)) == ["fuser::axpy+relu"]
    assert events(lambda: (axpy(x, y), chain(x, y), axpy(x, y))) == ["fuser::axpy", "fuser::axpy+relu", "fuser::axpy"]


def test_a_replay_is_an_event_of_its_own_call(axpy: Callable[..., Any]) -> None:
    x = torch.randn(37)
    axpy(x, x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with profiler.record_function("outer"):
            axpy(x, x)
        torch.ones(3)
    names = {event.name: event.cpu_parent.name if event.cpu_parent else "" for event in profile.events()}
    assert names["fuser::axpy"] == "outer"
    # It ended.
    assert names["aten::ones"] == ""


def test_a_backward_pass_has_the_names_of_the_derivatives() -> None:
    x = torch.randn(37, requires_grad=True)
    for _ in range(2):
        assert events(lambda: AXPY(x, x).sum().backward()) == ["fuser::axpy", "fuser::axpy_backward"]


def test_a_long_name_ends() -> None:
    @fuser.fuse
    def many(x: torch.Tensor) -> torch.Tensor:
        for _ in range(MAX_NAMES + 3):
            x = torch.sin(x)
        return x

    assert events(lambda: many(torch.randn(5))) == ["fuser::" + "sin+" * MAX_NAMES + "3 more"]


def test_each_launch_of_a_group_that_was_cut_has_its_own_event() -> None:
    @fuser.fuse
    def wide(*tensors: torch.Tensor) -> torch.Tensor:
        total = tensors[0]
        for tensor in tensors[1:]:
            total = torch.maximum(total, tensor)
        return total

    tensors = [torch.randn(5) for _ in range(100)]
    for _ in range(2):
        fuser.reset_stats()
        found = events(lambda: wide(*tensors))
        assert len(found) == fuser.stats()["launches"] == 2


def test_without_a_profiler_no_event_is_made(axpy: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    # The one flag that torch's profilers set decides, for a planned call and for a replayed one.
    def work() -> None:
        monkeypatch.setattr(profiler, "_is_profiler_enabled", False)
        axpy(torch.randn(41), torch.randn(41))
        axpy(torch.randn(41), torch.randn(41))
        chain(torch.randn(41), torch.randn(41))

    assert events(work) == []


def test_an_event_that_cannot_be_made_stops_no_call(axpy: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    # Somebody asks for events, and there is no profiler.
    x = torch.randn(37)
    axpy(x, x)
    monkeypatch.setattr(profiler, "_is_profiler_enabled", True)
    assert torch.equal(axpy(x, x), x + x)


@pytest.mark.cuda
def test_an_event_spans_its_kernel_on_a_gpu() -> None:
    x = torch.randn(37, device="cuda")
    AXPY(x, x)
    for _ in range(2):
        with torch.profiler.profile() as profile:
            AXPY(x, x)
            torch.cuda.synchronize()
        found = [event for event in profile.events() if event.name == "fuser::axpy"]
        assert found
        assert sum(len(event.kernels) for event in found) == 1


@pytest.mark.cuda
def test_nvtx_ranges_are_emitted() -> None:
    # What emit_nvtx shows is torch's: it makes a range of each event. Here: that a call inside it runs.
    x = torch.randn(37, device="cuda")
    with profiler.emit_nvtx():
        assert profiler._is_profiler_enabled
        assert torch.equal(AXPY(x, x), x + x)
        assert torch.equal(AXPY(x, x), x + x)
