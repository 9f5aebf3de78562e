"""The benchmark harness: its records have their form, and a peer that is absent, wrong or broken is only a record."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from benchmarks import __main__ as command
from benchmarks import apart, chains, check, compile_time, python_launcher, report, sweep, timing
from benchmarks.peers import PEERS, Absent, Peer, Unsupported
from benchmarks.peers.array_peers import Jax
from benchmarks.peers.triton_peer import print_flat_kernel, print_tiled_kernel

CPU = torch.device("cpu")
TIMING_KEYS = {"method", "median", "p10", "p90", "samples"}


class FakePeer(Peer):
    """Multiplies the right result; never asked for more than it says."""

    name = "fake"
    label = "fake"
    factor = 1.0

    def build(self, chain: chains.Chain, inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
        run = chain.compose(chains.TORCH_OPS)
        return lambda: run(*inputs) * self.factor


class WrongPeer(FakePeer):
    factor = 1.001


class NanPeer(FakePeer):
    factor = float("nan")


class AbsentPeer(FakePeer):
    def load(self) -> None:
        raise Absent("not installed in /some/machine/folder/lib.so")


class UnsupportedPeer(FakePeer):
    @override
    def build(self, chain: chains.Chain, inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
        raise Unsupported("no such dtype")


class BrokenPeer(FakePeer):
    @override
    def build(self, chain: chains.Chain, inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
        raise MemoryError("gone\nwith a second line")


def settings_for(*peers: str, chain: str = "six") -> sweep.Settings:
    return sweep.Settings(CPU, (chain,), (256,), peers, rounds=1, budget_s=0.001, compile_times=False)


def statuses(monkeypatch: pytest.MonkeyPatch, **peers: type[Peer]) -> dict[str, dict[str, Any]]:
    """Run the given peers beside eager, and return their records."""
    for name, peer in peers.items():
        monkeypatch.setitem(PEERS, name, peer)
    settings = settings_for("eager", *peers)
    *_, document = command.measure(settings, lambda _: None)
    return {record["peer"]: record for record in document["throughput"]}


@pytest.fixture
def _a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    # As on a machine with a GPU, where the driver's own launch is timed, too.
    monkeypatch.setattr(sweep, "find_floor", lambda device: lambda calls: 1.0)


@pytest.mark.usefixtures("_a_driver")
def test_a_quick_run_writes_json_of_the_documented_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    assert command.main(["--quick", "--device", "cpu", "--peers", "eager", "--no-plot", "--out", str(out)]) == 0
    document = json.loads(out.read_text())
    assert set(document) == {"schema", "environment", "settings", "absent", "throughput", "host", "compile"}
    assert document["schema"] == report.SCHEMA
    assert document["environment"]["device"]["type"] == "cpu"
    assert document["environment"]["versions"]["torch"] == torch.__version__
    assert {record["chain"] for record in document["throughput"]} == set(chains.CHAINS)
    for record in document["throughput"]:
        if record["peer"] == "eager" and record["dtype"] == "float8_e4m3fn":
            assert record["status"] == "unsupported"
            continue
        assert record["status"] == "ok"
        assert set(record["time_us"]) == TIMING_KEYS
        assert record["time_us"]["p10"] <= record["time_us"]["median"] <= record["time_us"]["p90"]
        assert record["bytes_moved"] > 0
        if record["peer"] != "copy":
            assert record["error_eps"] <= record["tolerance_eps"]
            assert record["ratio_to_eager"] == 1.0
            assert record["ratio_to_copy"] > 0
    timed = [record["peer"] for record in document["host"]]
    assert timed == ["eager_add", "driver_launch", "eager"] * len(sweep.HOST_CHAINS)
    printed = capsys.readouterr().out
    assert "torch eager" in printed
    assert "cuLaunchKernel alone" in printed


def test_the_result_names_no_path_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    record = statuses(monkeypatch, absent=AbsentPeer)["absent"]
    assert record["status"] == "absent"
    assert record["reason"] == "not installed in lib.so"


@pytest.mark.parametrize(
    ("peer", "status", "reason"),
    [
        (FakePeer, "ok", None),
        (WrongPeer, "wrong", "eps from float64, 32 allowed"),
        (NanPeer, "wrong", "inf eps"),
        (UnsupportedPeer, "unsupported", "no such dtype"),
        (BrokenPeer, "failed", "MemoryError: gone"),
    ],
)
def test_a_peer_that_does_not_deliver_is_recorded(
    monkeypatch: pytest.MonkeyPatch, peer: type[Peer], status: str, reason: str | None
) -> None:
    records = statuses(monkeypatch, other=peer)
    assert records["eager"]["status"] == "ok"
    assert records["other"]["status"] == status
    assert ("time_us" in records["other"]) == (status == "ok")
    if reason is not None:
        assert reason in records["other"]["reason"]


def test_a_wrong_fuser_fails_the_run_and_a_wrong_peer_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, failed in (("other", False), ("fuser_other", True)):
        monkeypatch.setitem(PEERS, name, WrongPeer)
        *_, document = command.measure(settings_for("eager", name), lambda _: None)
        assert command.has_own_failure(document) is failed


@pytest.mark.cpu
def test_calls_without_the_c_launcher_are_timed_beside_torchs(capsys: pytest.CaptureFixture[str]) -> None:
    record = python_launcher.measure_python_launcher("add", 64, CPU, turns=1, budget_s=0.001)
    assert record["status"] == "ok", record
    assert set(record["time_us"]) == TIMING_KEYS
    assert record["ratio_to_eager_add"] > 0
    common = {"chain": "add", "elements": 64}
    mark = {"peer": "eager_add", "status": "ok", "time_us": record["time_us"]}
    host = [{**common, **mark}, {**common, "peer": "fuser_python", **record}]
    report.print_tables({"throughput": [], "host": host, "compile": [], "absent": {}})
    assert "fuser, no C launcher" in capsys.readouterr().out


def test_a_compiler_is_timed_with_empty_caches_and_with_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = []

    def run(module: str, options: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
        assert (module, options) == ("benchmarks.compile_time", {"peer": "fuser", "device": "cpu"})
        folder = Path(environment["FUSER_CACHE_DIR"])
        folders.append(folder)
        found = len(list(folder.iterdir()))
        (folder / str(found)).touch()
        return {"status": "ok", "first_ms": 20.0 - found, "second_ms": 10.0 - found}

    monkeypatch.setattr(compile_time, "run_apart", run)
    record = compile_time.measure_compile("fuser", CPU)
    assert record == {
        "status": "ok", "first_ms": 20.0, "second_ms": 10.0, "cached_first_ms": 19.0, "cached_second_ms": 9.0
    }  # fmt: skip
    assert len(set(folders)) == 1
    assert not folders[0].exists()


def test_a_process_apart_that_fails_is_a_record() -> None:
    record = apart.run_apart("benchmarks.compile_time", {"peer": "nobody", "device": "cpu"})
    assert record["status"] == "failed"
    assert "nobody" in record["reason"]


def test_absent_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(Absent, match="jax cannot be imported"):
        Jax(CPU)
    _, absent = sweep.load_peers(settings_for("jiterator", "jax"))
    assert absent["jiterator"] == "does not run on cpu"
    assert set(absent) == {"jiterator", "jax"}


@pytest.mark.parametrize("chain", chains.CHAINS.values(), ids=lambda chain: chain.name)
def test_inputs_are_random_bounded_and_never_near_zero(chain: chains.Chain) -> None:
    inputs = chains.make_inputs(chain, 4096, CPU)
    assert len(inputs) == len(chain.names) == len(chain.layouts)
    for values in inputs:
        assert values.dtype == chain.dtype
        sizes = values.abs() if values.is_complex() else values.float().abs()
        assert 1 / 64 <= sizes.min() < sizes.max() <= 4
    assert all(torch.equal(a, b) for a, b in zip(inputs, chains.make_inputs(chain, 4096, CPU), strict=True))


def test_bytes_count_a_broadcast_vector_once() -> None:
    inputs = chains.make_inputs(chains.CHAINS["row"], 64 * 64, CPU)
    assert chains.count_bytes(inputs) == 4 * (64 * 64 + 64 + 64 + 64 * 64)


def test_the_error_is_infinite_for_another_shape_or_dtype() -> None:
    reference = torch.ones(4, dtype=torch.float64)
    assert check.measure_error_eps(torch.ones(4), reference, torch.float32) == 0
    assert check.measure_error_eps(torch.ones(4, 1), reference, torch.float32) == float("inf")
    assert check.measure_error_eps(torch.ones(4), reference, torch.bfloat16) == float("inf")
    assert check.measure_error_eps(torch.full((4,), torch.nan), reference, torch.float32) == float("inf")


def test_every_text_says_the_same_computation() -> None:
    six = chains.CHAINS["six"]
    expression = chains.print_expression(six, chains.text_ops("sigmoid({0})", "tanh({0})", "2.0"))
    inputs = dict(zip(six.names, (x.double() for x in chains.make_inputs(six, 64, CPU)), strict=True))
    result = eval(expression, {**inputs, "sigmoid": torch.sigmoid, "tanh": torch.tanh})
    torch.testing.assert_close(result, check.compute_reference(six, tuple(inputs.values())))


@pytest.mark.parametrize("chain", chains.CHAINS.values(), ids=lambda chain: chain.name)
def test_triton_kernels_are_python(chain: chains.Chain) -> None:
    source = print_flat_kernel(chain) if chain.is_flat else print_tiled_kernel(chain)
    compile(source, "kernel", "exec")


def test_percentiles_are_samples() -> None:
    result = timing.Timing("wall", (5.0, 1.0, 3.0, 2.0, 4.0))
    assert result.median_us == 3.0
    assert (timing.percentile(result.samples_us, 0.1), timing.percentile(result.samples_us, 0.9)) == (1.0, 5.0)


@pytest.mark.usefixtures("_a_driver")
def test_the_plot_is_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    *_, document = command.measure(settings_for("eager"), lambda _: None)
    document["compile"] = [{"peer": "eager", "status": "ok", "first_ms": 3.0, "second_ms": 0.5}]
    report.save_plot(document, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", sorted(item.stem for item in Path(apart.__file__).parent.glob("[a-z]*.py")))
def test_every_module_can_be_imported(name: str) -> None:
    try:
        importlib.import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as error:
        # Peers are optional.
        if error.name not in {"triton", "cupy", "jax", "transformers", "timm", "matplotlib"}:
            raise


def test_what_runs_beside_something_else_counts_once() -> None:
    """Kernels that overlap, follow one another or lie within another, out of order; the host's events do not count."""

    def event(kind: str, begin: float, end: float) -> SimpleNamespace:
        return SimpleNamespace(device_type=SimpleNamespace(name=kind), time_range=SimpleNamespace(start=begin, end=end))

    times = [(10.0, 14.0), (0.0, 4.0), (3.0, 6.0), (4.0, 5.0), (6.0, 7.0)]
    events = [event("CPU", 0.0, 99.0), *(event("CUDA", *pair) for pair in times)]
    assert timing.busy_time(SimpleNamespace(events=lambda: events)) == (11.0, 5)
