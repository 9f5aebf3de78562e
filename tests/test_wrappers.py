"""What people put around a compiled model: activation checkpoints, autocast, compiled autograd, DDP and FSDP2."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from distributed_steps import Block
from torch.utils.checkpoint import checkpoint

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.slow]


def checkpointed(module: Block, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(module, checkpoint(module, x, use_reentrant=False), use_reentrant=False)


def under_autocast(module: Block, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        return F.relu(module(x) * 2).float() + x


def train(function: Callable[..., Any], backend: str, device: str) -> list[torch.Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, x = Block().to(device), torch.randn(16, 32, device=device, requires_grad=True)
    compiled = torch.compile(function, backend=backend)
    found = []
    for _ in range(2):
        y = compiled(module, x)
        found += [y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])]
    return found


DEVICES = [pytest.param("cpu", marks=pytest.mark.cpu), pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("function", [checkpointed, under_autocast])
def test_bits_are_kept(function: Callable[..., Any], device: str) -> None:
    wanted, made = train(function, "aot_eager", device), train(function, "fuser", device)
    assert [torch.equal(*pair) for pair in zip(made, wanted, strict=True)] == [True] * len(wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_autograd(device: str) -> None:
    found = []
    for backend in ("aot_eager", "fuser"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        module, x = Block().to(device), torch.randn(16, 32, device=device)
        compiled = torch.compile(module, backend=backend)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)):
            compiled(x).square().sum().backward()
        found.append([item.grad for item in module.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_ranks(kind: str, device: str, tmp_path: Path) -> None:
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    script = Path(__file__).with_name("distributed_steps.py")
    command = [sys.executable, str(script)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), device, kind],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank, process in enumerate(ranks):
        out, error = process.communicate(timeout=300)
        assert process.returncode == 0, error[-3000:]
        assert out.split("\n")[-2] == f"{rank} True True {{}}"
