"""Running totals: torch.cumsum in groups, with torch's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_emulation import run_emulated

import fuser
from fuser import executor
from fuser.compiler import register
from fuser.config import config
from fuser.cuda.aten_orders import scan_chunk
from fuser.graph import FusionGroup, GroupBuilder
from fuser.ops import OPS, reduction_function
from fuser.planner import plan_texts
from fuser.tuning.table import candidates

OTHERS = (torch.bfloat16, torch.float64, torch.int32, torch.float16, torch.bool)
DTYPES = [torch.float32, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in OTHERS)]


def scan(dim: int = -1) -> FusionGroup:
    """``minimum(cumsum(x * y, dim), y)``, and the totals."""
    builder = GroupBuilder("strict")
    x, y = builder.add_input("x"), builder.add_input("y")
    (product,) = builder.apply(OPS["mul"].function, [x, y])
    (total,) = builder.apply(reduction_function("cumsum", (dim,)), [product])
    (less,) = builder.apply(OPS["minimum"].function, [total, y])
    return builder.build([less, total])


def draw(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    if not dtype.is_floating_point:
        return torch.randint(-100, 100, shape, device=device).to(dtype)
    return (torch.randn(shape, device=device) * torch.exp(2 * torch.randn(shape, device=device))).to(dtype)


# --- CUDA, by emulation ----------------------------------------------------------------------------------------------
def aten_scan(x: torch.Tensor) -> torch.Tensor:
    """ATen's order along rows on CUDA (ScanUtils.cuh), an addition of tensors at a time."""
    rows, length = x.shape
    chunk = scan_chunk(length, rows)
    padded = torch.nn.functional.pad(x, (0, -length % chunk)).view(rows, -1, chunk)
    total = torch.zeros_like(x[:, 0])
    for part in padded.unbind(1):
        part[:, 0] += total
        half = 1
        while half < chunk:
            runs = part.view(rows, -1, 2, half)
            runs[:, :, 1] += runs[:, :, 0, -1:].clone()
            half *= 2
        total = part[:, -1]
    return padded.reshape(rows, -1)[:, :length]


def one_by_one(x: torch.Tensor, dim: int) -> torch.Tensor:
    found = [torch.zeros_like(x.select(dim, 0))]
    for part in x.unbind(dim):
        found.append(found[-1] + part)
    return torch.stack(found[1:], dim)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((3, 5000), torch.float32), ((40, 100), torch.bfloat16), ((600, 7), torch.float32),
        pytest.param((2, 20000), torch.float64, marks=pytest.mark.slow),
        pytest.param((33, 65), torch.float16, marks=pytest.mark.slow),
        pytest.param((1100, 3), torch.bfloat16, marks=pytest.mark.slow),
        pytest.param((9, 4096), torch.float16, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_cuda_loops_along_rows_keep_atens_order(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, y = draw(shape, dtype), draw((shape[1],), dtype)
    for descending in (False, True):
        less, total = run_emulated(scan(), [x, y], descending=descending)
        # Long rows of float16 may come to infinities of both signs.
        torch.testing.assert_close(total, aten_scan(x * y), rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(less, torch.minimum(total, y), rtol=0, atol=0, equal_nan=True)


# Teams of several warps that have a row at once, and that go over it.
@pytest.mark.parametrize(("shape", "dtype"), [((5, 1500), torch.float32), ((3, 20000), torch.bfloat16)], ids=str)
def test_rows_of_one_block_share_no_memory(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, y = draw(shape, dtype), draw((shape[1],), dtype)
    wanted = run_emulated(scan(), [x, y])
    ((_, args),) = plan_texts(register(scan()), [x, y], torch.device("cuda", 0))
    found = candidates(args)
    assert args.tuning.team > 32
    assert any(tuning.block > tuning.team for tuning in found)
    for tuning in found:
        made = run_emulated(scan(), [x, y], block=tuning.block)
        assert all(map(torch.equal, made, wanted)), f"a block of {tuning.block}"


def test_cuda_loops_take_a_number_for_each_row() -> None:
    for shape in ((40, 100), (300, 7)):
        x, y = draw(shape, torch.float32), draw((shape[0], 1), torch.float32)
        less, total = run_emulated(scan(), [x, y])
        assert torch.equal(total, aten_scan(x * y))
        assert torch.equal(less, torch.minimum(total, y))


def test_cuda_loops_make_running_totals_of_running_totals() -> None:
    builder = GroupBuilder("strict")
    value = builder.add_input("x")
    for _ in range(2):
        (value,) = builder.apply(reduction_function("cumsum", (-1,)), [value])
    given = draw((2, 3000), torch.float32)
    (total,) = run_emulated(builder.build([value]), [given])
    assert torch.equal(total, aten_scan(aten_scan(given)))


@pytest.mark.parametrize("shape", [(3, 9, 132), pytest.param((2, 40, 7), marks=pytest.mark.slow)])
def test_cuda_loops_across_rows_add_one_by_one(shape: tuple[int, ...]) -> None:
    x, y = draw(shape, torch.bfloat16), draw(shape[-1:], torch.bfloat16)
    less, total = run_emulated(scan(-2), [x, y])
    assert torch.equal(total, one_by_one(x * y, -2))
    assert torch.equal(less, torch.minimum(total, y))


# --- on a device -----------------------------------------------------------------------------------------------------
def around(x: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.relu(torch.cumsum(x * 2, dim)) + x


def twice(x: torch.Tensor, dim: int) -> torch.Tensor:
    return (x + 1).cumsum(dim).cumsum(dim) * 0.5


def beside_a_sum(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.cumsum(dim) * x.sum(dim, keepdim=True)


def widened(x: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.cumsum(x, dim, dtype=torch.float32) + 1


def compare(function: Callable[[torch.Tensor, int], torch.Tensor], x: torch.Tensor, dim: int) -> dict[str, Any]:
    """Compare with eager torch: value, dtype and strides; return what was counted."""
    fused, wanted = fuser.fuse(lambda x: function(x, dim)), function(x, dim)
    fuser.reset_stats()
    got = fused(x)
    assert got.dtype is wanted.dtype
    assert got.stride() == wanted.stride()
    assert torch.equal(got, wanted), (function.__name__, x.shape, x.dtype, dim)
    return fuser.stats()


CASES = (
    ((5, 1000), -1), ((130, 51), 1), ((3, 7, 33), 1), ((4, 30, 5), 0), ((1000,), 0), ((10, 1), 1), ((0, 5), 1),
    ((5, 0), 1), ((), 0), ((2, 1, 9), 1), ((70, 8), 1), ((3, 40, 31), 2),
)  # fmt: skip


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_cpu_kernels_have_atens_bits(dtype: torch.dtype) -> None:
    for shape, dim in CASES:
        assert not compare(around, draw(shape, dtype), dim)["fallbacks"]
    assert compare(around, draw((5, 1000), dtype), -1)["launches"] == 1
    compare(around, draw((50, 40), dtype).t(), 1)
    for function in (twice, beside_a_sum, widened):
        compare(function, draw((13, 100), dtype), 1)
        compare(function, draw((65, 31), dtype), 1)


@pytest.mark.cpu
@pytest.mark.parametrize("shape", [(9, 300), (70, 20), (31, 20), (2, 33, 5)], ids=str)
def test_cpu_kernels_take_a_number_for_each_row(shape: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.int32):
        factor = draw((*shape[:-1], 1), dtype)
        stats = compare(lambda x, dim: (x * factor).cumsum(dim) + factor, draw(shape, dtype), -1)  # noqa: B023
        assert not stats["fallbacks"]


@pytest.mark.parametrize("device", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("cpu", "cuda")])
def test_fast_kernels_are_no_farther_from_the_truth(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = draw((300, 700), torch.bfloat16, device)
    monkeypatch.setattr(config, "numerics", "fast")
    got, truth = fuser.fuse(around)(x, 1).double(), around(x.double(), 1)
    assert (got - truth).norm() <= (around(x, 1).double() - truth).norm()


@pytest.mark.cpu
def test_a_kept_call_is_not_looked_at_again() -> None:
    # Whether or not grad mode is on: what is made anew each time describes its tensors.
    fused, x = fuser.fuse(lambda x: x.sum(0) * 2), torch.randn(50, 3)
    for is_on in (True, False):
        with torch.set_grad_enabled(is_on):
            fused(x)
            before = fuser.stats()["kept"]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(executor, "describe", None)
                assert torch.equal(fused(x), x.sum(0) * 2)
            assert fuser.stats()["kept"] == before + 1
    grown = x.clone().requires_grad_()
    assert fused(grown).requires_grad


@pytest.mark.cpu
def test_gradients_are_atens() -> None:
    x = draw((33, 500), torch.float32).requires_grad_()
    wanted = around(x, -1)
    gradient = torch.randn_like(wanted)
    expected = torch.autograd.grad(wanted, x, gradient)
    for fused in (fuser.fuse(around), torch.compile(around, backend="fuser")):
        got = fused(x, -1)
        assert torch.equal(got, wanted)
        assert torch.equal(*torch.autograd.grad(got, x, gradient), *expected)


@pytest.mark.cpu
def test_transforms_know_that_a_running_total_keeps_its_dimension() -> None:
    def ours(x: torch.Tensor) -> torch.Tensor:
        return (x * x).cumsum(-1)

    x = draw((3, 2, 4), torch.float64)
    v = torch.randn_like(x)
    for wrap in (lambda f: f, torch.vmap):
        got, wanted = wrap(fuser.fuse(ours)), wrap(ours)
        torch.testing.assert_close(torch.func.jvp(got, (x,), (v,)), torch.func.jvp(wanted, (x,), (v,)))
        for_got, for_wanted = (torch.func.grad(lambda x, f=f: (f(x) * v).sum())(x) for f in (got, wanted))
        torch.testing.assert_close(for_got, for_wanted)


@pytest.mark.cpu
def test_errors_and_what_has_no_kernel() -> None:
    x = torch.randn(3, 4)
    with pytest.raises(IndexError, match="Dimension out of range"):
        fuser.fuse(lambda x: x.cumsum(2) * 2)(x)
    for function in (lambda x: x.cumsum(1, dtype=torch.int32) + 1, lambda x: torch.complex(x, x).cumsum(0)):
        assert torch.equal(fuser.fuse(function)(x), function(x))


@pytest.mark.cpu
def test_a_group_of_running_totals_is_written_down_and_read() -> None:
    group = FusionGroup.from_json(scan().to_json())
    assert group == scan()
    x, y = draw((3, 50), torch.float32), draw((50,), torch.float32)
    total = fuser.run_fusion(fuser.register_fusion(group), [x, y])[1]
    assert torch.equal(total, (x * y).cumsum(-1))
    batched = torch.vmap(fuser.fuse(lambda x: x.cumsum(0) * 2))(x)
    assert torch.equal(batched, x.cumsum(1) * 2)


GPU_CASES = (
    *CASES, ((1024, 1024), -1), ((4096, 1000), -1), ((3, 70001), 1), ((100000, 8), 1), ((1 << 20, 3), 1),
    ((600, 31), 1), ((257, 12345), 1), ((64, 32768), 1), ((2, 1 << 17), 1), ((8, 300, 132), 1), ((3000, 77), 0),
    ((40, 513, 1), 1), ((5, 6, 2048), -1), ((70000, 40), -1), ((16, 16384), -1), ((2, 3), 1),
)  # fmt: skip


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES)
def test_cuda_kernels_have_atens_bits(dtype: torch.dtype) -> None:
    for shape, dim in GPU_CASES:
        assert not compare(around, draw(shape, dtype, "cuda"), dim)["fallbacks"]
    for shape, dim in (((64, 3000), 1), ((5000, 100), 1), ((7, 40000), 1), ((4, 300, 64), 1)):
        # Of sums that half holds.
        x = (draw(shape, dtype, "cuda") / 64).to(dtype)
        for function in (around, twice, beside_a_sum, widened):
            assert not compare(function, x, dim)["fallbacks"]
        compare(around, x[..., 1:], dim)
        compare(around, x.mT, dim)
        assert compare(around, x, dim)["kept"] == 0
