"""Whole models under torch.compile: bits of outputs, gradients and buffers, and the benchmark that measures them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch

from benchmarks import models, models_spread
from benchmarks.model_cases import CASES

OWN = ("unet", "dlrm", "gnn")


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_own_models_have_the_bits_of_aot_eager_on_a_cpu(name: str) -> None:
    """In bfloat16, where torch's functions on a CPU round to what fuser's round to; others are some ULP off there."""
    assert models.compare_bits(name, torch.bfloat16)["differ"] == 0


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_models_have_the_bits_of_aot_eager(name: str, dtype: torch.dtype) -> None:
    if name not in OWN:
        pytest.importorskip("timm" if CASES[name].make.__qualname__.startswith("timm") else "transformers")
    assert models.compare_bits(name, dtype)["differ"] == 0


def test_same_bits() -> None:
    x = torch.tensor([0.0, float("nan"), 1.0])
    assert models.same_bits(x, x.clone())
    assert not models.same_bits(x, torch.tensor([-0.0, float("nan"), 1.0])), "the sign of a zero"
    assert not models.same_bits(x, torch.tensor([0.0, 2.0, 1.0]))
    assert not models.same_bits(x, x.double())
    assert models.same_bits(x, torch.tensor([0.0, -float("nan"), 1.0])), "not that of a NaN"
    assert models.count_differing({"a": x}, {"a": x, "b": x}) == ["b"]


def test_parts_become_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def part(name: str, records: dict[str, object]) -> Path:
        path = tmp_path / name
        path.write_text(json.dumps({"schema": models.SCHEMA, "environment": {"host": name}, "records": records}))
        return path

    timed = {"eager": {"gpu_ms": 4.0}, "fuser": {"gpu_ms": 1.0}}
    parts = [
        part("a", {"gnn bfloat16": timed}),
        part("b", {"gnn bfloat16": {"bits": {"differ": 0}}, "unet bfloat16": {**timed, "fuser": {"gpu_ms": 4.0}}}),
    ]
    models.main(["--merge", *map(str, parts), "--out", str(tmp_path / "all.json")])
    merged = json.loads((tmp_path / "all.json").read_text())
    assert merged["environment"] == {"host": "a"}
    assert merged["records"]["gnn bfloat16"] == {**timed, "bits": {"differ": 0}}
    assert "gpu_ms             fuser            / eager            0.500 (2 models)" in capsys.readouterr().out


def test_a_model_that_takes_too_long_is_ended() -> None:
    began = time.monotonic()
    models_spread.run_until(began + 0.5, ["timeit", "-n1", "-r1", "__import__('time').sleep(60)"], os.environ)
    assert time.monotonic() - began < 30
