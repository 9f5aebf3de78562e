"""The benchmark of forward and backward passes: its records have their form, and whoever is wrong is only a record."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.training import __main__ as command
from benchmarks.training import chains, contestants, measure, report, sampling

CPU = torch.device("cpu")
TIMING_KEYS = {"method", "median", "p10", "p90", "count"}
CHAINS = pytest.mark.parametrize("chain", chains.CHAINS.values(), ids=lambda chain: chain.name)


def settings_for(*names: str, chain: str = "swiglu") -> measure.Settings:
    return measure.Settings(CPU, (chain,), ("float32",), 256, names, ("eager_mul",)).shorten()


def as_contestant(function: Callable[..., Any], *, is_fuser: bool = False) -> contestants.Contestant:
    return contestants.Contestant("other", lambda chain: function, is_fuser=is_fuser)


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return chains.compute_swiglu(x, y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad


def break_off(*inputs: Tensor) -> Tensor:
    raise MemoryError("gone\nwith a second line")


@pytest.mark.cpu
def test_a_quick_run_writes_json_of_the_documented_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    options = ["--quick", "--device", "cpu", "--size", "256", "--no-plot", "--out", str(out)]
    assert command.main([*options, "--peers", "eager", "fuser"]) == 0
    document = json.loads(out.read_text())
    assert set(document) == {"schema", "environment", "settings", "throughput", "host"}
    assert document["schema"] == report.SCHEMA
    assert document["environment"]["versions"]["torch"] == torch.__version__
    places = {(record["chain"], record["dtype"], record["pass"]) for record in document["throughput"]}
    assert places == {
        (chain, dtype, name) for chain in chains.CHAINS for dtype in chains.DTYPES for name in sampling.PASSES
    }
    for record in [*document["throughput"], *document["host"]]:
        assert record["status"] == "ok"
        assert set(record["time_us"]) == TIMING_KEYS
        assert record["time_us"]["p10"] <= record["time_us"]["median"] <= record["time_us"]["p90"]
    for record in document["throughput"]:
        if record["peer"] != "copy":
            assert record["error_eps"] <= record["tolerance_eps"]
            assert record["ratio_to_copy"] > 0
            assert record["ratio_to_inductor"] is None
    launched = {r["pass"]: r["launches"] for r in document["throughput"] if r["peer"] == "fuser"}
    assert launched == {"forward": 1, "backward": 1, "both": 2}
    assert [(record["pass"], record["peer"]) for record in document["host"]] == [
        (name, peer) for name in ("forward", "both") for peer in ("eager_mul", "fuser")
    ]
    assert "x torch.mul" in capsys.readouterr().out


def test_only_summaries_of_samples_are_kept() -> None:
    *_, document = command.run(settings_for("eager"), lambda _: None)
    assert len(json.dumps(document["throughput"])) < 4000


@pytest.mark.parametrize(
    ("contestant", "status", "reason"),
    [
        (as_contestant(chains.compute_swiglu), "ok", None),
        (as_contestant(WrongGradient.apply), "wrong", "eps from float64, 16 allowed"),
        (as_contestant(lambda x, y: chains.compute_swiglu(x, y) * torch.nan), "wrong", "inf eps"),
        (as_contestant(break_off), "failed", "MemoryError: gone"),
    ],
)
def test_who_does_not_deliver_is_recorded(
    monkeypatch: pytest.MonkeyPatch, contestant: contestants.Contestant, status: str, reason: str | None
) -> None:
    monkeypatch.setitem(contestants.CONTESTANTS, "other", contestant)
    *_, document = command.run(settings_for("eager", "other"), lambda _: None)
    json.dumps(document, allow_nan=False)
    for record in document["throughput"]:
        assert record["status"] == (status if record["peer"] == "other" else "ok")
        assert ("time_us" in record) == (record["status"] == "ok")
        if record["status"] != "ok":
            assert reason in record["reason"]
    report.print_tables(document)


def test_a_fuser_that_runs_eagerly_is_wrong_and_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    import fuser

    before = fuser.override_can_fuse_on_cpu(False)
    try:
        *_, document = command.run(settings_for("fuser"), lambda _: None)
    finally:
        fuser.override_can_fuse_on_cpu(before)
    own = [record for record in document["throughput"] if record["peer"] == "fuser"]
    assert {record["status"] for record in own} == {"wrong"}
    assert "not fused" in own[0]["reason"]
    assert command.has_own_failure(document)


@CHAINS
def test_bytes_count_inputs_gradients_and_results_once(chain: chains.TrainingChain) -> None:
    expected = {"swiglu": (3, 5), "gelu": (2, 3), "loss": (4, 6)}[chain.name]
    assert chain.arrays_moved() == {"forward": expected[0], "backward": expected[1], "both": sum(expected)}
    assert set(chain.wanted) | set(chain.read) <= set(chain.names)


@pytest.mark.cpu
@CHAINS
def test_functors_and_torch_operations_are_the_same_function(chain: chains.TrainingChain) -> None:
    data = chains.make_data(chain.names, chain.wanted, 512, torch.float32, CPU)
    errors, _ = measure.check_call(chain.compose(), data, measure.compute_reference(chain.compute, data))
    assert max(errors) <= 4


@pytest.mark.cpu
@pytest.mark.parametrize("name", [name for name in contestants.HOST_CONTESTANTS if name != "inductor"])
def test_everybody_on_the_host_multiplies(name: str) -> None:
    data = chains.make_data(("x", "y"), ("x", "y"), 64, torch.float32, CPU)
    call = contestants.HOST_CONTESTANTS[name].build()
    errors, _ = measure.check_call(call, data, measure.compute_reference(torch.mul, data))
    assert max(errors) <= measure.HOST_TOLERANCE_EPS


def test_every_backward_pass_has_a_forward_pass_of_its_own() -> None:
    data = chains.make_data(("x", "y"), ("x", "y"), 64, torch.float32, CPU)
    backward = sampling.make_passes(torch.mul, data)["backward"]
    out = backward.prepare()
    backward.run(out)
    with pytest.raises(RuntimeError, match="second time"):
        backward.run(out)


def test_results_are_named_after_the_device() -> None:
    assert command.default_name({"type": "cpu", "name": "AMD EPYC"}, quick=False) == "training_cpu.json"
    assert command.default_name({"type": "cuda", "name": "NVIDIA H200"}, quick=False) == "training_h200.json"
    assert command.default_name({"type": "cuda", "name": "NVIDIA H200"}, quick=True) == "training_h200_quick.json"


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    *_, document = command.run(settings_for("eager"), lambda _: None)
    report.save_plot(document, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("late", "method", "hold"), [(0, "queued", 1), (3, "queued", 8), (10**6, "events", None)])
def test_on_cuda_the_device_waits_until_everything_is_enqueued(
    monkeypatch: pytest.MonkeyPatch, late: int, method: str, hold: int | None
) -> None:
    left, holds, events = [late], list[int](), list[str]()

    class FakeEvent:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            events.append("record")

        def query(self) -> bool:
            left[0] -= 1
            return left[0] >= 0

        def synchronize(self) -> None:
            events.append("synchronize")

        def elapsed_time(self, end: FakeEvent) -> float:
            return 4.0

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("prepared"))
    monkeypatch.setattr(torch.cuda, "_sleep", holds.append, raising=False)
    timed = sampling.Pass(lambda: events.append("prepare"), lambda _: events.append("run"))
    sampler = sampling.PassSampler(timed, torch.device("cuda"))
    assert sampler.method == method
    assert events[:7] == ["prepare", "prepared", "record", "run", "record", "synchronize", "prepare"]
    if hold is not None:
        assert holds[-1] == hold * sampling.FIRST_HOLD
    # 4 ms a call: one call is a sample.
    assert sampler.sample(0.0) == [4000.0] * 3
