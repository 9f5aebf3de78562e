"""Functors and fused functions on DTensors: shards as of torch's own ops, and the bits of one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import dtensor_cases
import pytest
import torch

pytestmark = pytest.mark.cpu


def run_ranks(device: str, folder: Path, chosen: str) -> dict[str, list[str]]:
    """Run the cases in a job of two ranks; return what each rank says of each case."""
    command = [sys.executable, dtensor_cases.__file__, device, "2", str(folder), chosen]
    said = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600).stdout
    written = [folder / f"{rank}.json" for rank in range(2)]
    assert all(path.exists() for path in written), said
    found = [json.loads(path.read_text(encoding="utf-8")) for path in written]
    return {name: [item[name] for item in found] for name in found[0]}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return what two processes with gloo found."""
    return run_ranks("cpu", tmp_path_factory.mktemp("gloo"), "quick")


@pytest.mark.parametrize("name", dtensor_cases.CASES)
def test_two_processes(name: str, outcome: dict[str, list[str]]) -> None:
    assert outcome[name] == ["", ""], "\n".join(outcome[name])


@pytest.mark.slow
def test_two_processes_at_length(tmp_path: Path) -> None:
    found = run_ranks("cpu", tmp_path, "all")
    assert not {name: texts for name, texts in found.items() if any(texts)}


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus(tmp_path: Path) -> None:
    found = run_ranks("cuda", tmp_path, "all")
    assert not {name: texts for name, texts in found.items() if any(texts)}
