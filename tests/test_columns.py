"""Sums along columns from the walk of a kernel over rows: loops on emulated threads, against eager torch in double."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from cuda_emulation import run_emulated
from reduction_cases import ADD, VALUE

import fuser
from fuser import columns, planner
from fuser.combining import Reduction
from fuser.compiler import register
from fuser.function import Function
from fuser.graph import FusionGroup, GroupBuilder
from fuser.ops import OPS, reduction_function
from fuser.ops.composites import composite_function

F32, BF16 = torch.float32, torch.bfloat16
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _few_pieces(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(columns, "column_pieces", lambda *_: 3)
    with fuser.config.patch(numerics="fast"):
        yield


def norm_group(rank: int, length: int, *, has_mean: bool, mask: tuple[bool, ...] = (True, True, True)) -> FusionGroup:
    builder = GroupBuilder()
    names = ["grad_out", "input", *["mean"] * has_mean, "rstd", "weight", *["bias"] * has_mean]
    name = "native_layer_norm_backward" if has_mean else "_fused_rms_norm_backward"
    function = composite_function(name, ((length,), rank, True, has_mean, has_mean, mask[: 2 + has_mean]))
    return builder.build(builder.apply(function, [builder.add_input(item) for item in names]))


def norm_inputs(shape: Sequence[int], dtype: torch.dtype, *, has_mean: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(len(shape))
    x, grad = (torch.randn(*shape, generator=generator).to(dtype) for _ in range(2))
    mean, rstd = x.float().mean(-1, keepdim=True), 1 / (x.float().std(-1, keepdim=True) + 1)
    weight, bias = torch.rand(2, shape[-1], generator=generator).to(dtype)
    return [grad, x, *[mean] * has_mean, rstd, weight, *[bias] * has_mean]


def norm_gradients(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    has_mean = len(inputs) == 6
    grad, x, *mean, rstd, weight = (item.double() for item in inputs[: 4 + has_mean])
    outer = tuple(range(x.dim() - 1))
    xhat, loss = (x - mean[0] if has_mean else x) * rstd, grad * weight
    dx = loss - xhat * (loss * xhat).mean(-1, keepdim=True) - has_mean * loss.mean(-1, keepdim=True)
    return [dx * rstd, (grad * xhat).sum(outer), *[grad.sum(outer)] * has_mean]


def plan_rows(group: FusionGroup, inputs: Sequence[torch.Tensor]) -> list[Any]:
    """Return the row specs of a call's kernels."""
    return [args.rows for _, args in planner.plan_texts(register(group), inputs, CUDA)]


def check(group: FusionGroup, inputs: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    assert [rows.pieces for rows in plan_rows(group, inputs)] == [3, 0], "a walk over rows, and one over pieces"
    found = [run_emulated(group, inputs, descending=descending) for descending in (False, True)]
    for one, other, true in zip(*found, wanted, strict=True):
        assert torch.equal(one, other), "the order of blocks has a say"
        size = true.double().square().mean().sqrt()
        distance = (one.double() - true).abs().max() / size
        assert one.shape == true.shape
        assert distance <= 16 * torch.finfo(one.dtype).eps, f"{distance} of {tuple(one.shape)}"


# A warp has a row, or a block; threads with many rows, which they add four at a time; teams without a row; lengths
# that are no multiple of a vector, or of all vectors.
SHAPES = ((1003, 64), (3, 20, 776), (7, 64), (11, 2051), (40, 1024), (9, 4096), (33, 50))


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (SHAPES[0], F32),
        (SHAPES[1], BF16),
        *(pytest.param(shape, dtype, marks=pytest.mark.slow) for shape in SHAPES for dtype in (F32, BF16)),
    ],
)
def test_gradients_of_a_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    has_mean = dtype is F32
    inputs = norm_inputs(shape, dtype, has_mean=has_mean)
    check(norm_group(len(shape), shape[-1], has_mean=has_mean), inputs, norm_gradients(inputs))


def spelled_out(builder: GroupBuilder) -> list[int]:
    """The same of a norm that is spelled out: what columns add needs what a row comes to."""
    g, x = (builder.add_input(name) for name in "gx")
    (square,) = builder.apply(OPS["mul"].function, [x, x])
    (total,) = builder.apply(reduction_function("sum", (-1,), keepdim=True), [square])
    (scale,) = builder.apply(OPS["rsqrt"].function, [total])
    (value,) = builder.apply(OPS["mul"].function, [x, scale])
    (product,) = builder.apply(OPS["mul"].function, [value, g])
    (column,) = builder.apply(reduction_function("sum", (0,), keepdim=True), [product])
    return [value, *builder.apply(OPS["neg"].function, [column])]


def bias(builder: GroupBuilder) -> list[int]:
    """The gradients of an activation and of a bias before it: no row is reduced."""
    g, x = (builder.add_input(name) for name in "gx")
    (made,) = builder.apply(OPS["mul"].function, [g, x])
    return [made, *builder.apply(reduction_function("sum", (0, 1)), [made])]


@pytest.mark.cpu
def test_other_columns() -> None:
    g, x = (torch.randn(5, 3, 300, generator=torch.Generator().manual_seed(i)) for i in range(2))
    group, inputs = build(bias), [g, x]
    check(group, inputs, [g.double() * x.double(), (g.double() * x.double()).sum((0, 1))])
    g, x = g[:, 0], x[:, 0]
    value = x.double() * x.double().square().sum(-1, keepdim=True).rsqrt()
    check(build(spelled_out), [g, x], [value, -(value * g.double()).sum(0, keepdim=True)])


def build(write: Callable[[GroupBuilder], Sequence[int]]) -> FusionGroup:
    builder = GroupBuilder()
    return builder.build(write(builder))


def own(builder: GroupBuilder) -> list[int]:
    """A user's sum, whose order is fixed."""
    x = builder.add_input("x")
    column = Function(VALUE, reduction=Reduction(ADD, (0,), dims=(0,)))
    return [*builder.apply(reduction_function("sum", (1,)), [x]), *builder.apply(column, [x])]


def needed(builder: GroupBuilder) -> list[int]:
    """Rows of what columns come to."""
    x = builder.add_input("x")
    (column,) = builder.apply(reduction_function("sum", (0,), keepdim=True), [x])
    (product,) = builder.apply(OPS["mul"].function, [x, column])
    return list(builder.apply(reduction_function("sum", (1,)), [product]))


def alone(builder: GroupBuilder) -> list[int]:
    return list(builder.apply(reduction_function("sum", (0,)), [builder.add_input("x")]))


def both(builder: GroupBuilder) -> list[int]:
    x = builder.add_input("x")
    return [made for dim in (0, 1) for made in builder.apply(reduction_function("sum", (dim,)), [x])]


def averaged(builder: GroupBuilder) -> list[int]:
    """What is divided by how many elements there are."""
    x = builder.add_input("x")
    return [made for dim in (0, 1) for made in builder.apply(reduction_function("mean", (dim,)), [x])]


@pytest.mark.cpu
@pytest.mark.parametrize("write", [own, needed, alone, averaged])
def test_columns_with_a_kernel_of_their_own(write: Callable[[GroupBuilder], Sequence[int]]) -> None:
    x = torch.randn(400, 300)
    rows = plan_rows(build(write), [x])
    assert rows
    assert not any(item.pieces for item in rows if item)


@pytest.mark.cpu
def test_columns_that_lie_along_memory_are_rows() -> None:
    for x in (torch.randn(400, 300), torch.randn(300, 400).t()):
        first, last = plan_rows(build(both), [x])
        assert (first.pieces, first.is_across, last.pieces) == (3, False, 0)


@pytest.mark.cpu
def test_strict_numerics_keep_what_has_one_order() -> None:
    with fuser.config.patch(numerics="strict"):
        x = torch.randint(-9, 9, (50, 300))
        assert [rows.pieces for rows in plan_rows(build(both), [x])] == [3, 0]
        for found, wanted in zip(run_emulated(build(both), [x]), (x.sum(0), x.sum(1)), strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16])
@pytest.mark.parametrize(
    "shape",
    [(200000, 64), (7, 3001, 776), (20000, 1024), (5003, 4096), (60001, 50), (9000, 2051), (3000, 8192), (2111, 16384)],
)
def test_on_a_gpu(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    monkeypatch.undo()
    for has_mean in (True, False):
        with fuser.config.patch(numerics="fast"):
            inputs = [item.cuda() for item in norm_inputs(shape, dtype, has_mean=has_mean)]
            group = norm_group(len(shape), shape[-1], has_mean=has_mean)
            pieces = [rows.pieces for rows in plan_rows(group, inputs)]
            assert (pieces[0] > 0) == (shape[-1] <= 8192 or (dtype is not F32 and not has_mean)), pieces
            found = fuser.run_fusion(fuser.register_fusion(group), inputs)
            again = fuser.run_fusion(fuser.register_fusion(group), inputs)
        composite = group.applications[0].function
        eager = fuser.ops.composites.call_composite(composite, inputs, {})
        for one, other, torchs, true in zip(found, again, eager, norm_gradients(inputs), strict=True):
            assert torch.equal(one, other), "two runs differ"
            own, theirs = ((item.double() - true).square().mean().sqrt() for item in (one, torchs))
            size = true.square().mean().sqrt() * torch.finfo(dtype).eps
            # Both round each element once; another order of adding them may round otherwise.
            assert own <= max(1.1 * theirs, size), f"{own / size:.3f} roundings, torch {theirs / size:.3f}"
