"""Functions that kernels look up have the bits of those that they compute, for every number of bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from cuda_emulation import run_emulated
from row_groups import reduce, text

import fuser
from fuser import columns, lookups, planner
from fuser.compiler import register
from fuser.cuda import backend
from fuser.debug import kernel_sources
from fuser.function import Function
from fuser.graph import FusionGroup, GroupBuilder
from fuser.ops import OPS, composite_function, reduction_function

BF16 = torch.bfloat16
GRADIENTS = ("gelu_backward", "gelu_tanh_backward", "mish_backward")


def activated(op: str) -> FusionGroup:
    """A function of a sum, what a row of it comes to, and its elements less that."""
    builder = GroupBuilder()
    x, y, alpha = builder.add_input("x"), builder.add_input("y"), builder.add_input("alpha", is_scalar=True, default=1)
    (z,) = builder.apply(OPS["add"].function, [x, y], [alpha])
    (made,) = builder.apply(OPS[op].function, [y, z] if op in GRADIENTS else [z])
    (total,) = builder.apply(reduce((1,), keepdim=True), [made])
    return builder.build([made, *builder.apply(OPS["sub"].function, [made, total], [alpha])])


def normalised() -> FusionGroup:
    """What layer_norm makes of gelu's results."""
    builder = GroupBuilder()
    x, eps = builder.add_input("x"), builder.add_input("eps", is_scalar=True, default=1e-5)
    (made,) = builder.apply(OPS["gelu"].function, [x])
    norm = composite_function("native_layer_norm", ((x_length,), False, False, "", True))
    return builder.build(builder.apply(norm, [made], [eps]))


x_length = 1024


def bias_gradient() -> FusionGroup:
    """The gradients of a bias before gelu, and of what it is added to."""
    builder = GroupBuilder()
    x, b, g = (builder.add_input(name) for name in "xbg")
    (z,) = builder.apply(OPS["add"].function, [x, b], [builder.add_input("alpha", is_scalar=True, default=1)])
    (dz,) = builder.apply(OPS["gelu_backward"].function, [g, z])
    return builder.build([dz, *builder.apply(reduction_function("sum", (0,)), [dz])])


def every_number(rows: int) -> torch.Tensor:
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(BF16).reshape(rows, -1).contiguous()


def both(group: FusionGroup, inputs: Sequence[Any], monkeypatch: pytest.MonkeyPatch) -> list[list[torch.Tensor]]:
    """Results with tables and without."""
    made, inputs = [], group.fill_inputs(inputs)
    for least, looks in ((0, True), (1 << 62, False)):
        monkeypatch.setattr(lookups, "LARGE", least)
        tunings = [args.tuning for _, args in planner.plan_texts(register(group), inputs, torch.device("cuda", 0))]
        assert tunings[0].looks == looks
        made.append(run_emulated(group, inputs, descending=looks, largest_grid=3))
    return made


def same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> None:
    for x, y in zip(one, other, strict=True):
        assert torch.equal(x.isnan(), y.isnan())
        assert torch.equal(x.nan_to_num(nan=7.0).view(torch.int16), y.nan_to_num(nan=7.0).view(torch.int16))


@pytest.mark.cpu
@pytest.mark.parametrize("op", [pytest.param("gelu", marks=pytest.mark.slow), "gelu_backward"])
def test_every_number(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = every_number(64)
    inputs = [x, torch.randn(64, 1024).to(BF16) if op in GRADIENTS else torch.zeros_like(x)]
    same(*both(activated(op), inputs, monkeypatch))


@pytest.mark.parametrize(
    ("source", "numerics", "found"),
    [
        ("T f(T g, T x) { return g * erf(x) + g * T(2); }", "fast", {1: lookups.Lookup(1, 0)}),
        ("T f(T g, T x) { return g * erf(x) + g * T(2); }", "strict", {}),
        ("T f(T g, T x) { return g * (erf(x) + T(2)); }", "strict", {1: lookups.Lookup(1, 0)}),
        ("T f(T g, T x) { return g * (erf(x) + T(2)) * x; }", "strict", {}),
        ("T f(T g, T x) { return (g + T(1)) * erf(x); }", "fast", {}),
        ("T f(T x, T g) { return g * (erf(x) + T(2)); }", "fast", {}),
        ("T f(T g, T x) { while (x > T(1)) x /= T(2); return g * (erf(x) + x); }", "fast", {}),
        ("T f(T g, T x) { T t[2] = {x, x}; return g * (erf(x) + t[int(x)]); }", "fast", {}),
        ("T f(T g, T x) { return g * (fabs(x) + T(2)); }", "fast", {}),
    ],
)
def test_what_is_looked_up(source: str, numerics: str, found: dict[int, lookups.Lookup]) -> None:
    builder = GroupBuilder(numerics)
    g, x, y, alpha = (builder.add_input(name, is_scalar=name == "alpha") for name in ("g", "x", "y", "alpha"))
    (z,) = builder.apply(OPS["add"].function, [x, y], [alpha])
    made = builder.apply(Function(text(source)), [g, z])
    group = builder.build([*made, *builder.apply(reduce((1,)), made)])
    assert lookups.find_lookups(group, [BF16] * 8, [False] * 8) == found


@pytest.mark.slow
def test_rows_of_several_warps(monkeypatch: pytest.MonkeyPatch) -> None:
    # Threads of a block that are no multiple of a row's would have a part of one.
    x = torch.randn(13, 3000).to(BF16)
    with fuser.config.patch(numerics="fast"):
        same(*both(activated("gelu"), [x, torch.zeros_like(x)], monkeypatch))


@pytest.mark.cpu
def test_in_torchs_order(monkeypatch: pytest.MonkeyPatch) -> None:
    same(*both(normalised(), [torch.randn(64, 1024).to(BF16)], monkeypatch))


@pytest.mark.slow
@pytest.mark.parametrize("numerics", ["strict", "fast"])
def test_along_columns(numerics: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "column_pieces", lambda *_: 3)
    inputs = [every_number(64), torch.randn(1024).to(BF16) * 0, torch.randn(64, 1024).to(BF16)]
    inputs[0] = inputs[0].nan_to_num(nan=0.0).clamp(-100, 100)
    with fuser.config.patch(numerics=numerics):
        same(*both(bias_gradient(), inputs, monkeypatch))


def gated_gradients() -> FusionGroup:
    """The gradients of three factors along columns, two of which go through slow functions."""
    builder = GroupBuilder("fast")
    x, g, *factors = (builder.add_input(name) for name in "xgabc")
    values, grads = [x], [g]
    for factor, op in zip(factors, ("gelu_backward", "mish_backward", "relu"), strict=True):
        values += builder.apply(OPS["mul"].function, [x, factor])
        grads += builder.apply(OPS[op].function, [g, values[-1]] if op in GRADIENTS else [values[-1]])
    sums = [builder.apply(reduction_function("sum", (0,)), [grad])[0] for grad in grads[1:]]
    return builder.build([*grads[1:], *sums])


@pytest.mark.nvrtc
def test_columns_leave_room_for_tables() -> None:
    # Rows of several teams: what three columns come to takes half of the shared memory that a kernel gets.
    with fuser.config.patch(numerics="fast"):
        x, g = (torch.empty_strided((1 << 15, 1024), (1024, 1), dtype=BF16, device="meta") for _ in range(2))
        factors = [torch.empty(1024, dtype=BF16, device="meta") for _ in range(3)]
        group = gated_gradients()
        source, _ = kernel_sources(register(group), [x, g, *factors], "cuda")
    assert source.text.count("fuser_fill<") == 1
    backend.compile_cubin(source, "sm_90")


def test_unrounded_gradients_are_looked_up() -> None:
    builder = GroupBuilder("fast")
    g, x = builder.add_input("g"), builder.add_input("x")
    (made,) = builder.apply(OPS["gelu_backward"].function, [g, x])
    group = builder.build([made, *builder.apply(reduce((1,)), [made])])
    for dtype, found in ((torch.float32, {0: lookups.Lookup(1, 0)}), (torch.float64, {})):
        assert lookups.find_lookups(group, [BF16, BF16, dtype, dtype], [False] * 3 + [True]) == found
