"""CPU loops are vectors, and float16 has torch's bits in them, at every conversion and rounding."""

from __future__ import annotations

import functools
import platform
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from vectorised import find_loops

import fuser
from fuser.config import config
from fuser.cpu.backend import CpuBackend, find_compiler
from fuser.kernel_source import KernelSource

pytestmark = pytest.mark.cpu

ALL = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.float16)


def assert_same_numbers(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.dtype is wanted.dtype
    whole = torch.int16 if got.dtype is torch.float16 else torch.int32
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.view(whole).masked_fill(got.isnan(), 0), wanted.view(whole).masked_fill(got.isnan(), 0))


@pytest.mark.parametrize("step", [1, 3])
def test_conversions_of_all_values(step: int) -> None:
    # Neighbours in memory, and others, which are read one by one.
    x = ALL.repeat_interleave(step)[::step]
    assert_same_numbers(fuser.fuse(lambda x: x.float())(x), x.float())
    # Every number with less bits than half has, and what lies around the middle to the next one.
    ends = torch.tensor([0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF])
    bits = (torch.arange(-(1 << 18), 1 << 18)[:, None] * (1 << 13) + ends).to(torch.int32)
    wide = bits.view(torch.float32).flatten().repeat_interleave(step)[::step]
    assert_same_numbers(fuser.fuse(lambda x: x.half())(wide), wide.half())


def test_every_step_of_a_chain_is_rounded() -> None:
    def chain(x: Any, y: Any) -> Any:
        product = x * y
        return product, product * 1e-3 + x, -(x * 1e-4) * y

    torch.manual_seed(0)
    # The last: products around the first number that is infinite.
    for y in (*(ALL[torch.randperm(ALL.numel())] for _ in range(8)), (65520 / ALL.float()).half()):
        for got, wanted in zip(fuser.fuse(chain)(ALL, y), chain(ALL, y), strict=True):
            assert_same_numbers(got, wanted)


needs_gcc = pytest.mark.skipif(
    platform.machine() != "x86_64" or find_compiler(config.cxx).is_clang, reason="gcc's vectors"
)


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> list[KernelSource]:
    """What is compiled meanwhile."""
    found: list[KernelSource] = []
    build = CpuBackend.compile

    def compile_kernel(self: CpuBackend, source: KernelSource, target: str) -> Any:
        found.append(source)
        return build(self, source, target)

    monkeypatch.setattr(CpuBackend, "compile", compile_kernel)
    return found


@needs_gcc
@pytest.mark.parametrize(
    ("dtype", "function"),
    [
        (torch.float16, lambda x: x * x - x),
        (torch.bfloat16, lambda x: x.clamp(0.1, 0.7)),
        (torch.bfloat16, lambda x: (x > 0) * x),
        (torch.bool, lambda x: torch.where(x, 1.5, 2)),
        (torch.bfloat16, lambda x: F.mish(x).where((x > 0) & (x < 1), 0.0)),
        pytest.param(torch.float32, lambda x: torch.xlogy(x, x.abs()), marks=pytest.mark.slow),
        pytest.param(torch.bool, lambda x: x * 1.5, marks=pytest.mark.slow),
        pytest.param(torch.float16, lambda x: F.hardshrink(x, 0.1), marks=pytest.mark.slow),
        pytest.param(torch.float16, lambda x: torch.ops.aten.sigmoid_backward(x, x), marks=pytest.mark.slow),
    ],
)
def test_loops_are_vectors(
    dtype: torch.dtype, function: Callable[..., Any], sources: list[KernelSource], tmp_path: Path
) -> None:
    """Else they take up to ninety times as long as eager torch."""
    # A factor that makes kernels of their own.
    fuser.fuse(lambda x: function(x) * 1.375)(torch.ones(40, dtype=dtype))
    (source,) = sources
    done, missed = find_loops(source, tmp_path)
    assert done, source.text
    assert not done & missed, source.text


STEPS: tuple[Callable[[Any, Any], Any], ...] = (
    lambda x, _: x.abs(), lambda x, _: F.relu(x), lambda x, _: F.gelu(x), lambda x, _: F.hardtanh(x),
    lambda x, _: F.softshrink(x), lambda x, _: F.elu(x), lambda x, _: F.logsigmoid(x), lambda x, _: x.int().to(x.dtype),
    lambda x, _: x.isnan().to(x.dtype), lambda x, _: x.frac(), lambda x, _: torch.exp2(x), lambda x, _: x**3,
    lambda x, _: x.half().to(x.dtype), lambda x, y: torch.fmax(x, y), lambda x, y: torch.minimum(x, y),
    lambda x, y: x * (y > 0), lambda x, y: torch.where((x > 0) & (y < 1), x, 0.0), lambda x, y: torch.hypot(x, y),
    lambda x, y: x.masked_fill(y > 0, 0.5), lambda x, y: torch.xlogy(x, y.abs()), lambda x, y: torch.addcmul(x, x, y),
)  # fmt: skip


@needs_gcc
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("numerics", ["strict", "fast"])
def test_loops_of_chains_are_vectors(
    dtype: torch.dtype, numerics: str, sources: list[KernelSource], tmp_path: Path
) -> None:
    drawn = random.Random(f"{dtype} {numerics}")
    for _ in range(12):
        steps = drawn.choices(STEPS, k=drawn.randint(2, 5))
        chain = fuser.fuse(lambda x, y, steps=steps: functools.reduce(lambda made, step: step(made, y), steps, x) + y)
        with config.patch(numerics=numerics):
            chain(torch.ones(40, dtype=dtype), torch.ones(40, dtype=dtype))
    assert len(sources) > 9
    for source in sources:
        done, missed = find_loops(source, tmp_path)
        assert done, source.text
        assert not done & missed, source.text
