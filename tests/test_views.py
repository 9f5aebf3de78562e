"""Dimensions of size 1 that torch's views put in or take out, inside groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functors import draw
from graph_checks import compare, trace
from reduction_cases import VALUE, largest, total

import fuser
from fuser.cxx.functor import parse_functor
from fuser.errors import DimError, GroupError
from fuser.fallback import Fallback
from fuser.function import Function
from fuser.graph import FusionGroup, GroupBuilder
from fuser.ops import view_function

pytestmark = pytest.mark.cpu

MINUS = Function(parse_functor("template <typename T> T minus(T x, T y) { return x - y; }"))


def aliases(found: tuple[torch.Tensor, ...]) -> list[bool]:
    return [bool(torch._C._is_alias_of(one, other)) for one in found for other in found]  # type: ignore[attr-defined]


def check(function: Callable[..., Any], form: Callable[..., Any], *inputs: torch.Tensor) -> None:
    """Compare a fused function with ``form``, also in which results share memory."""
    got, wanted = function(*inputs), form(*inputs)
    got, wanted = (item if isinstance(item, tuple) else (item,) for item in (got, wanted))
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype
        assert one.stride() == other.stride()
    assert aliases(got) == aliases(wanted)


FORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "unsqueeze": lambda x: torch.relu(x - x.amin(-1).unsqueeze(-1)),
    "function": lambda x: x - torch.unsqueeze(torch.amax(x, 1), 1),
    "ellipsis": lambda x: x / x.abs().amax(-1)[..., None],
    "slice": lambda x: x / x.abs().amax(1)[:, None, :],
    "front": lambda x: x * 2 - x.abs().amax(0)[None],
    "ends": lambda x: x - (x * 2).amax((0, 2))[None, ..., None],
    "two": lambda x: (x.amax(-1)[..., None] - x.amin(-1).unsqueeze(2)) * x,
    "of all": lambda x: x - x.max()[None].unsqueeze(-1),
    "work between": lambda x: x - (x.amax(2) * 2).unsqueeze(2).relu(),
    "returned": lambda x: (lambda top: (top, x - top))((x + 1).amax(-1).unsqueeze(-1)),
    "returned twice": lambda x: (lambda top: (top, top[None], top[None, :, None], x - top[..., None]))((-x).amax(-1)),
}

# The others take as long again.
FEW = ("slice", "two", "of all", "returned twice")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in FEW else pytest.mark.slow) for name in FORMS])
def test_a_view_of_what_was_reduced_meets_what_it_was_reduced_from(name: str) -> None:
    form = FORMS[name]
    shapes = [draw((5, 4, 6), torch.float32)]
    if name.startswith("returned t"):
        shapes += [draw((3, 3, 3), torch.float16).transpose(0, 2), draw((1, 7, 1), torch.float64)]
    for x in shapes:
        function = fuser.fuse(form)
        fuser.reset_stats()
        check(function, form, x)
        assert fuser.stats()["launches"] == 1
        assert not fuser.stats()["fallbacks"]


@pytest.mark.parametrize(
    "form",
    [
        lambda x: x - x.amax(1).unsqueeze(1),
        pytest.param(lambda x: x - x.amax(1).view(-1, 1), marks=pytest.mark.slow),
        pytest.param(lambda x: x - x.amax(1).reshape(6, 1), marks=pytest.mark.slow),
        lambda x: x.amax(1) - x.amin(1, keepdim=True).squeeze(1),
        lambda x: (x.amax(1, keepdim=True).view(6), x - x.amax(1)[:, None]),
    ],
)
def test_in_graphs_that_know_their_shapes(form: Callable[..., Any]) -> None:
    x = draw((6, 9), torch.float32)
    compiled = torch.compile(form, backend="fuser")
    compiled(x)
    fuser.reset_stats()
    check(compiled, form, x)
    assert fuser.stats()["launches"] == 1
    assert not fuser.stats()["fallbacks"]


def test_other_views_and_what_writes_through_one_stay_torchs() -> None:
    def write(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        top = (x * 2).amax(1)
        column = top.unsqueeze(1)
        before = x - column
        top.add_(1)
        return before, x - column, column.to(torch.float32)

    x = draw((6, 9), torch.float32)
    check(fuser.fuse(write), write, x)

    def take(x: torch.Tensor) -> Any:
        top = (x * 2).amax(1)
        return x[:, None][0] + 1, top[2:4, None] + 1, top.unsqueeze(-1).to(torch.float32)

    check(fuser.fuse(take), take, x)
    with pytest.raises(IndexError, match="Dimension out of range"):
        fuser.fuse(lambda x: (x * 2).amax(1).unsqueeze(5) + x)(x)


@pytest.mark.slow
def test_with_derivatives() -> None:
    form = FORMS["two"]
    x = draw((5, 4, 6), torch.float64).requires_grad_()
    fused = fuser.fx.fuse_graph(torch.fx.symbolic_trace(form))
    for function in (fuser.fuse(form), fused):
        assert torch.equal(*(torch.autograd.grad(item(x).sum(), x)[0] for item in (function, form)))
        batch = torch.stack([x, x * 2])
        assert torch.equal(torch.vmap(function)(batch), torch.vmap(form)(batch))


# --- groups ----------------------------------------------------------------------------------------------------
def column_of(rank: int = 1) -> FusionGroup:
    """Return x - y.unsqueeze(-1), and no reduction."""
    builder = GroupBuilder()
    x, y = builder.add_input("x"), builder.add_input("y")
    (doubled,) = builder.apply(Function(VALUE), [y])
    (column,) = builder.apply(view_function("unsqueeze", (-1,)), [doubled])
    return builder.build(builder.apply(MINUS, [x, column]))


def test_views_in_kernels_without_a_reduction() -> None:
    group = column_of()
    key = fuser.register_fusion(group)
    for shape in ((4, 5), (5, 5), (3, 1), (0, 4), (2, 3, 4)):
        x = draw(shape, torch.float32)
        y = draw(shape[:-1], torch.float32)
        fuser.reset_stats()
        (got,) = fuser.run_fusion(key, [x, y])
        assert torch.equal(got, x - y.unsqueeze(-1))
        assert fuser.stats()["launches"] == (1 if x.numel() else 0)
        assert torch.equal(Fallback(group).run([x, y], "")[0], got)
    x, y = draw((2, 4, 4), torch.float32), draw((2, 4), torch.float32)
    (got,) = torch.vmap(lambda x, y: fuser.run_fusion(key, [x, y]))(x, y)
    assert torch.equal(got, x - y[..., None])
    x.requires_grad_()
    y.requires_grad_()
    grads = torch.autograd.grad(fuser.run_fusion(key, [x, y])[0].sum(), (x, y))
    assert torch.equal(grads[0], torch.ones_like(x))
    assert torch.equal(grads[1], torch.full_like(y, -4))


def test_a_value_along_two_dimensions_takes_two_launches() -> None:
    builder = GroupBuilder()
    x, y = builder.add_input("x"), builder.add_input("y")
    (row,) = builder.apply(MINUS, [y, x])
    (column,) = builder.apply(view_function("unsqueeze", (1,)), [row])
    key = fuser.register_fusion(builder.build(builder.apply(MINUS, [column, row])))
    x, y = draw((4,), torch.float32), draw((4,), torch.float32)
    fuser.reset_stats()
    (got,) = fuser.run_fusion(key, [x, y])
    assert torch.equal(got, (y - x)[:, None] - (y - x))
    assert fuser.stats()["launches"] > 1


@pytest.mark.parametrize("op", ["unsqueeze", "squeeze"])
def test_layouts_are_torchs(op: str) -> None:
    dims = ((0,), (-1,), (1, -1)) if op == "unsqueeze" else ((0,), (0, 2))
    for wanted in dims:
        builder = GroupBuilder()
        (view,) = builder.apply(view_function(op, wanted), builder.apply(Function(VALUE), [builder.add_input("x")]))
        group = builder.build(builder.apply(Function(VALUE), [view]))
        assert FusionGroup.from_json(group.to_json()) == group
        key = fuser.register_fusion(group)
        for x in (draw((1, 3, 1, 4), torch.float32), draw((1, 3, 1, 4), torch.float32).permute(0, 3, 2, 1)):
            (got,), (other,) = fuser.run_fusion(key, [x]), Fallback(group).run([x], "")
            assert got.shape == other.shape
            assert got.stride() == other.stride()
            assert torch.equal(got, other)


@pytest.mark.parametrize("shape", [(4, 1), (1, 1, 4, 1, 1)])
def test_dimensions_of_size_1_have_torchs_strides_where_those_of_a_tensor_are_odd(shape: tuple[int, ...]) -> None:
    """What is computed has them, too."""
    x, y = draw((1, 1, 4), torch.float32), draw((1,), torch.float32)

    def write(call: Callable[..., Any], x: Any, y: Any) -> Any:
        aten = torch.ops.aten
        turned = call(aten.permute.default, call(aten.neg.default, x), [0, 2, 1])
        return call(aten.add.Tensor, call(aten.view.default, turned, shape), y)

    assert compare(trace(write, [x, y]), [x, y], [], 0) == 1


def test_wrong_views() -> None:
    builder = GroupBuilder()
    x = builder.add_input("x")
    group = builder.build(builder.apply(view_function("unsqueeze", (3,)), builder.apply(largest((0,)), [x])))
    with pytest.raises(DimError, match="unsqueeze: Dimension out of range"):
        fuser.run_fusion(fuser.register_fusion(group), [torch.ones(2, 3)])
    builder = GroupBuilder()
    both = [builder.add_input("x"), builder.add_input("y")]
    with pytest.raises(GroupError):
        builder.build(builder.apply(view_function("squeeze", (0,)), both)).lint()


def test_sums_that_lie_otherwise_than_what_they_meet() -> None:
    # The weight meets what was reduced: it lies along the rows, wherever it was used before.
    builder = GroupBuilder()
    x, w = builder.add_input("x"), builder.add_input("w")
    (weight,) = builder.apply(Function(VALUE), [w])
    (sums,) = builder.apply(total((1,)), [x])
    (scaled,) = builder.apply(MINUS, [sums, weight])
    (column,) = builder.apply(view_function("unsqueeze", (1,)), [scaled])
    key = fuser.register_fusion(builder.build(builder.apply(MINUS, [x, column])))
    x, w = draw((4, 5), torch.float64), draw((4,), torch.float64)
    fuser.reset_stats()
    (got,) = fuser.run_fusion(key, [x, w])
    torch.testing.assert_close(got, x - (x.sum(1) - w)[:, None])
    assert fuser.stats()["launches"] == 1
