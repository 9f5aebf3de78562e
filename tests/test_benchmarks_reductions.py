"""The benchmark of reductions: its cases agree with float64 on small shapes, and a peer that fails is only a record."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import reductions, shapes
from fuser.config import config

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _numerics(monkeypatch: pytest.MonkeyPatch) -> None:
    # The peers set it.
    monkeypatch.setattr(config, "numerics", config.numerics)


def record_of(name: str, *peers: str) -> dict[str, Any]:
    (case,) = reductions.chosen([name], is_quick=True)
    return reductions.measure(case, peers, CPU, 0.0, 1)


@pytest.mark.cpu
@pytest.mark.parametrize("name", ["column mean", "own amax + fp8", "own Welford [65536, 1024]"])
def test_peers_agree_with_float64(name: str) -> None:
    record = record_of(name, "eager", "fuser", "fuser fast")
    assert set(record["peers"]) == {"eager", "fuser", "fuser fast"}
    for item in record["peers"].values():
        # A value of float8 beside a boundary may round to its neighbour.
        assert item["error_eps"] <= (2 if "fp8" in name else 4)
        assert item["time_us"] > 0


def test_a_peer_that_fails_is_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no such /machine/path/file")

    monkeypatch.setattr(reductions, "triton_call", broken)
    record = record_of("own softmax [1, ", "eager", "triton", "cupy")
    assert record["peers"]["triton"] == {"failed": "RuntimeError: no such file"}
    assert "cupy" not in record["peers"], "it has none for this case"


def test_geometric_means() -> None:
    def record(case: str, ratio: float, *, is_backward: bool = False) -> dict[str, Any]:
        peers = {"fuser": {"ratio_to_inductor": ratio}, "cupy": {"failed": "so"}}
        return {"case": case, "is_backward": is_backward, "peers": peers}

    records = [record("a", 1.0), record("b", 4.0), record("own c", 3.0), record("d", 0.5, is_backward=True)]
    assert reductions.summarize(records) == {"fuser, forward": 2.0, "fuser, own": 3.0, "fuser, backward": 0.5}


def test_shapes_of_models_are_summarised() -> None:
    def record(case: str, *times: float, equal: bool = True) -> dict[str, Any]:
        peers: dict[str, Any] = {name: {"gpu_us": time} for name, time in zip(shapes.PEERS, times, strict=True)}
        peers["fuser"]["equal"] = equal
        return {"case": case, "is_backward": False, "peers": peers}

    failed = {"case": "c", "is_backward": True, "peers": {"eager": {"gpu_us": 1.0}, "fuser": {"failed": "so"}}}
    records = [record("a", 4.0, 1.0, 2.0, 2.0), record("b", 1.0, 4.0, 2.0, 8.0, equal=False), failed]
    found = shapes.summarize(records)
    assert found["fuser by eager"] == {"mean": 1.0, "cases": 2, "slowest": ["b: 4.00"]}
    assert found["fuser fast by inductor"]["mean"] == 0.5
    assert found["not equal"] == ["b"]
    names = [str(case) for case in shapes.find_cases()]
    assert len(set(names)) == len(names) > 200
