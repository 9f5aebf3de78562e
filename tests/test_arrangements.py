"""Views of what is computed, tensors put together, parts written back: bits and strides of eager, fewer launches."""

from __future__ import annotations

import math
import pickle
import random
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from cuda_emulation import run_emulated
from graph_checks import compare as compare_graphs
from graph_checks import trace
from torch.fx.experimental.proxy_tensor import make_fx

import fuser
from fuser import view_steps
from fuser.compiler import register
from fuser.cxx.functor import parse_functor
from fuser.function import Function
from fuser.fx.backend import compile_graph
from fuser.graph import GroupBuilder
from fuser.in_parts import run_around
from fuser.ops import OPS
from fuser.planner import plan_texts
from fuser.sections import cut_around

pytestmark = pytest.mark.cpu


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def channels_last(*shape: int) -> torch.Tensor:
    return draw(*shape).to(memory_format=torch.channels_last)


def rope(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = q.shape[-1] // 2
    return q * cos + torch.cat((-q[..., half:], q[..., :half]), -1) * sin


def rope_in_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1)


def turn_every_two(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * sin


def gate(x: torch.Tensor) -> torch.Tensor:
    a, b = (x * 2).chunk(2, -1)
    # As cells of recurrent networks have them.
    c, d = (x + 1).unsafe_chunk(2, -1)
    return a.relu() * b + c * d


def put(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x * 2
    z[:, 1:3] = y
    z[0] = 1
    return z + 1


def write_columns(x: torch.Tensor) -> torch.Tensor:
    z = x * 2
    z[:, 0] = 3
    z[..., -1] = -1
    return z


def write_numbers(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x * 2
    z[:, 1] = 3
    z[1:3].zero_()
    z[:, 2:4].fill_(0.5)
    z[y > 0] = -1
    return z * y + x.new_zeros(7) + x.new_full((4, 1), 2) * x.new_ones(7)


def write_inside(x: torch.Tensor) -> torch.Tensor:
    z = x * 2
    z[:, 1:-1, 1:-1] = x[:, 1:-1, 1:-1].neg()
    return z + 1


def windows(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    rolled = (x * 2).roll((-1, 3), (1, 2)).view(2, 2, 3, 2, 4, 5).transpose(2, 3).reshape(-1, 12, 5) + y
    return rolled.view(2, 2, 2, 3, 4, 5).transpose(2, 3).reshape(2, 6, 8, 5).roll((1, -3), (1, 2)) + x


def put_back(x: torch.Tensor) -> torch.Tensor:
    return x.view(2, 2, 2, 3, 4, 5).transpose(2, 3).reshape(2, 6, 8, 5)


# What is compiled, its inputs, and how many launches its forward pass takes.
CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], int]] = {
    "rope": (rope, (draw(2, 4, 16, 8), draw(16, 8), draw(16, 8)), 1),
    "rope of a transposed tensor": (rope, (draw(2, 16, 4, 8).transpose(1, 2), draw(16, 8), draw(16, 8)), 1),
    "rope in pairs": (rope_in_pairs, (draw(4, 12), draw(4, 6), draw(4, 6)), 1),
    "every second turned": (turn_every_two, (draw(2, 3, 8), draw(3, 8), draw(3, 8)), 0),
    "a gate": (gate, (draw(4, 10),), 1),
    "stack": (lambda x, y: torch.stack([x * 2, y + 1], 1) * 3, (draw(4, 10), draw(4, 10)), 1),
    "pad": (lambda x, y: F.pad(x * 2, (1, 2)) + y, (draw(4, 7), draw(4, 10)), 3),
    "pad on one side": (lambda x, y: F.pad(x * 2, (0, 0, 4, 0), value=0.5) * y, (draw(4, 7), draw(8, 7)), 1),
    "a transposed copy": (lambda x, y: (x * 2).t()[1:4].contiguous() + y, (draw(4, 7), draw(3, 4)), 1),
    "unequal parts": (lambda x, y: torch.cat([x.abs(), y], 0) * 2, (draw(4, 7), draw(3, 7)), 2),
    "one number": (lambda x: torch.where(x > 0, x, torch.full_like(x, 0.1)) + torch.zeros(7), (draw(4, 7),), 1),
    "select": (lambda x, y: (x * 2)[:, 1] * y.neg(), (draw(4, 7), draw(4)), 2),
    "another shape": (lambda x, y: (x * 2).view(2, 2, 7)[1] * y.neg(), (draw(4, 7), draw(2, 7)), 2),
    "unbind and cat": (lambda x: torch.cat(torch.unbind(x * 3, 1), 0) + 1, (draw(4, 3, 7),), 1),
    "slices": (lambda x, y: (x * 2)[1:3, 2:].relu() + (x * 2)[:2, :5] * y, (draw(4, 7), draw(2, 5)), 0),
    "every second": (lambda x, y: (x * 2)[:, 1::2] + y, (draw(4, 7), draw(4, 3)), 1),
    "a slice's gradient": (
        lambda x, y: torch.ops.aten.slice_backward(x * 2, [4, 8], 1, 3, 8, 2) + y,
        (draw(4, 3), draw(4, 8)),
        2,
    ),
    "written into": (put, (draw(4, 7), draw(4, 2)), 0),
    "columns of numbers": (write_columns, (draw(4, 7),), 1),
    "numbers written into": (write_numbers, (draw(4, 7), draw(4, 7)), 0),
    "a transposed tensor where a mask is": (
        lambda x, y: (x.t() * 2).index_put((y > 0,), y.detach().sum()) * y,
        (draw(5, 7), draw(7, 5)),
        0,
    ),
    "written into, from behind": (
        lambda x, y: torch.slice_scatter((x * 2).select_scatter(y[:, 0].neg(), 1, -1), y * 3, -1, -6, -4) + 1,
        (draw(4, 7), draw(4, 2)),
        3,
    ),
    "written into, inside": (write_inside, (draw(2, 5, 6),), 0),
    "written into, channels last": (
        lambda x: torch.slice_scatter(x * 2, x[:, 1:3].neg(), 1, 0, 2) + 1,
        (channels_last(2, 4, 5, 3),),
        0,
    ),
    "repeated": (lambda x, y: (x.t() * 2).repeat(2, 1, 3) + y, (draw(5, 7), draw(7, 15)), 0),
    "pixels shuffled": (lambda x, y: F.pixel_shuffle(x * 2, 2) + y, (draw(2, 8, 3, 5), draw(6, 10)), 0),
    "pixels put back": (lambda x, y: F.pixel_unshuffle(x * 2, 2) * y, (draw(2, 3, 4, 6), draw(12, 1, 1)), 0),
    "channels shuffled": (lambda x: F.channel_shuffle(x * 2, 3) + 1, (draw(2, 6, 3, 5),), 0),
    "pixels shuffled, channels last": (lambda x: F.pixel_shuffle(x * 2, 2) + 1, (channels_last(2, 8, 3, 5),), 0),
    "cropped": (lambda x, y: F.pad(x * 2, (-1, 0, -2, -1)) + y, (draw(2, 4, 7), draw(1, 6)), 0),
    "moved by one": (lambda x, y: F.pad(x, (0, 0, 1, -1)) * y + x, (draw(2, 4, 7), draw(7)), 2),
    "cropped and padded, channels last": (lambda x: F.pad(x * 2, (-1, 2)) + 1, (channels_last(2, 3, 5, 4),), 0),
    "below the diagonal": (lambda x: (x * 2).tril(1) + x.triu(), (draw(5, 7),), 1),
    "a mask of numbers": (
        lambda x: (lambda places, ends: torch.where(places[None] <= ends[:, None], x, -1.0) * places)(
            torch.arange(7, device=x.device), torch.arange(3, 13, 2, device=x.device)
        ),
        (draw(5, 7),),
        1,
    ),
    "numbers in parts": (
        lambda x: torch.cat([x * 2, x.t()], 1) + torch.arange(14, device=x.device).view(2, 7).flatten(),
        (draw(7, 7),),
        1,
    ),
    "one of many": (lambda x: F.one_hot(x.detach().abs().long(), 9) * x[..., None], (draw(5, 7),), 0),
    "expand": (lambda x, y: (x * 2).expand(4, 7)[1:] * y, (draw(1, 7), draw(3, 7)), 1),
    "two dtypes": (lambda x, y: torch.cat([x.half() * 2, y.half()], 1).float() * 3, (draw(4, 7), draw(4, 9)), 2),
    "a view of a part": (lambda x, y: (x * 2).view(4, 6, 2).permute(2, 0, 1)[0] + y, (draw(4, 12), draw(4, 6)), 1),
    "a view across parts": (lambda x, y: torch.stack([x * 2, y], -1).flatten(-2) + 1, (draw(4, 6), draw(4, 6)), 1),
    "channels last": (
        lambda x, y: torch.cat([x * 2, y], 1) * 2,
        (channels_last(2, 4, 3, 3), channels_last(2, 4, 3, 3)),
        1,
    ),
    "channels last and not": (
        lambda x, y: torch.cat([x * 2, y], 1).to(memory_format=torch.channels_last) * 2,
        (draw(2, 4, 3, 3), channels_last(2, 4, 3, 3)),
        0,
    ),
    "made channels last": (
        lambda x, y: (x * 2).contiguous(memory_format=torch.channels_last) * y,
        (draw(2, 4, 3, 3), channels_last(2, 4, 3, 3)),
        1,
    ),
    "made channels last in three dimensions": (
        lambda x: (x * 2).clone(memory_format=torch.channels_last_3d).abs(),
        (draw(2, 3, 1, 4, 5),),
        1,
    ),
    "rolled": (lambda x: (x * 2).roll((2, -9), (0, 1)) + x, (draw(5, 7),), 4),
    "rolled twice along one": (lambda x: (x * 2).roll((2, -1), (1, -1)) * 3, (draw(5, 7),), 2),
    "rolled by all of it": (lambda x: (x * 2).roll((5, 1), (0, 1)) * 3, (draw(5, 7),), 2),
    "a transposed tensor, rolled": (lambda x: x.t().roll(2, 0) * 3, (draw(5, 7),), 0),
    "windows of what is rolled": (windows, (draw(2, 6, 8, 5), draw(12, 5)), 0),
    "windows put back": (
        lambda x, y: put_back(x) + y,
        (draw(8, 12, 5), draw(2, 6, 8, 5)),
        1,
    ),
    "windows put back, more arithmetic": (
        lambda x, y, z: ((put_back(x * 2) * z + y).view(2, 48, 5).relu() + 1).view(2, 6, 8, 5) * y,
        (draw(8, 12, 5), draw(2, 6, 8, 5), draw(2, 1, 1, 1)),
        2,
    ),
    "windows put back beside a transposed tensor": (
        lambda x, y: put_back(x) + y.transpose(1, 2),
        (draw(8, 12, 5), draw(2, 8, 6, 5)),
        1,
    ),
    "windows put back twice": (lambda x, y: put_back(x) * put_back(y.neg()), (draw(8, 12, 5), draw(8, 12, 5)), 2),
    "windows put back, and a part": (lambda x: (put_back(x) + 1)[:, 1:, 2:] * 2, (draw(8, 12, 5),), 0),
    "windows put back into more": (lambda x, y: put_back(x) + y, (draw(8, 12, 5), draw(3, 2, 6, 8, 5)), 0),
    "windows put back and opened": (
        lambda x: put_back(x * 2).view(2, 2, 3, 2, 4, 5).abs() + 1,
        (draw(8, 12, 5),),
        2,
    ),
    "windows put back, then put together": (
        lambda x, y: torch.cat([put_back(x) * 2, y], -1) + 1,
        (draw(8, 12, 5), draw(2, 6, 8, 5)),
        1,
    ),
    "heads side by side": (lambda x, y: x.transpose(1, 2).reshape(2, 6, 20) + y, (draw(2, 4, 6, 5), draw(6, 20)), 1),
    "dimensions merged otherwise": (
        lambda x, y: x.transpose(1, 2).reshape(2, 12, 10) * 2 + y,
        (draw(2, 4, 6, 5), draw(12, 1)),
        0,
    ),
    "a part that is empty": (lambda x, y: torch.cat([x * 2, y], 1) + 1, (draw(4, 7), draw(4, 0)), 0),
    "a sum of what is put together": (lambda x, y: torch.cat([x * 2, y], 0).sum(0), (draw(4, 7), draw(2, 7)), 0),
    "a copy of it elsewhere": (
        lambda x, y: (lambda v: (v * 2, v[:2] + 1, v @ v.t()))(torch.cat([x * 2, y], 0)),
        (draw(4, 7), draw(2, 7)),
        0,
    ),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", CASES, ids=str)
def test_equals_eager(name: str) -> None:
    compare(*CASES[name])


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_equals_eager_on_cuda(name: str, dtype: torch.dtype) -> None:
    function, inputs, _ = CASES[name]
    with torch.device("cuda"):
        compare(function, tuple(item.to("cuda", dtype) for item in inputs), 0)


@pytest.mark.cuda
@pytest.mark.parametrize("row", [2, 3, 10, 33, 1001])
def test_rows_repeat(row: int) -> None:
    """Rows that are short, or begin anywhere, are one dimension with what they meet; values are eager's."""
    fused = fuser.fuse(lambda x, m, s: (x - m) * s)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for rows in (1, 7, 4097):
            x, m, s = (torch.randn(shape, device="cuda").to(dtype) for shape in ((3, rows, row), (row,), (3, 1, row)))
            assert torch.equal(fused(x, m, s), (x - m) * s)
            for shape in ((3, rows, 1), (rows, 1), (3, 1, 1)):
                s = torch.randn(shape, device="cuda").to(dtype)
                assert torch.equal(fused(x, m, s), (x - m) * s)
                assert torch.equal(fused(x, s, x), (x - s) * x)


@pytest.mark.parametrize("shapes", [((5, 8, 1), ()), ((8, 1), (17,)), ((5, 8, 1), (5, 8, 17))], ids=str)
def test_elements_last_for_a_row_that_begins_anywhere(shapes: Any) -> None:
    function = parse_functor("template <typename T> T shift(T x, T s, T r) { return x * s + r; }")
    builder = GroupBuilder()
    group = builder.build(builder.apply(Function(function), [builder.add_input(name) for name in "xsr"]))
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        x, s, r = (torch.randint(0, 9, shape).to(dtype) for shape in ((5, 8, 17), *shapes))
        ((_, args),) = plan_texts(register(group), [x, s, r], torch.device("cuda"))
        assert "one for each row" in args.layout_class()
        assert args.vector * x.element_size() >= 4
        (made,) = run_emulated(group, [x, s, r], all_kernels=True)
        assert torch.equal(made, x * s + r), dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool])
def test_written_numbers_are_values_of_groups(dtype: torch.dtype) -> None:
    aten = torch.ops.aten

    def function(x: torch.Tensor, mask: torch.Tensor) -> Any:
        z = torch.where(mask, x, aten.fill(x, torch.ones((), dtype=dtype)))
        z = aten.index_put(z, [~mask], torch.full((), 3, dtype=dtype))
        new = torch.where(mask, x.new_ones(6, dtype=torch.float32), x.new_zeros((4, 1), dtype=torch.float32))
        return torch.where(mask, z, new), aten.zero(z), aten.fill(z, dtype is torch.bool or 3)

    x = torch.randn(4, 6).to(dtype)
    given = (x, torch.arange(24).view(6, 4).t() % 3 > 0)
    fused = fuser.fx.fuse_graph(make_fx(function)(*given))
    names = {node.target._opname for node in fused.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    assert not names & {"fill", "zero", "index_put", "new_zeros", "new_ones"}
    for got, wanted in zip(fused(*given), function(*given), strict=True):
        assert torch.equal(got, wanted)
        assert (got.dtype, got.stride()) == (wanted.dtype, wanted.stride())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_mask_is_filled_with_any_number_that_the_dtype_holds(dtype: torch.dtype) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).masked_fill(x > 0, torch.finfo(dtype).min) + 1

    x = draw(4, 7).to(dtype)
    fused = fuser.fx.fuse_graph(make_fx(function)(x))
    assert not fused.graph.find_nodes(op="call_function", target=torch.ops.aten.masked_fill.Scalar)
    assert torch.equal(fused(x), function(x))


@pytest.mark.parametrize("number", [1e6, -1e39, 1j, 3, -math.inf])
def test_numbers_that_a_dtype_does_not_hold_are_torchs_to_refuse(number: complex) -> None:
    aten, x = torch.ops.aten, torch.zeros(4, dtype=torch.float16)

    def function(x: torch.Tensor) -> Any:
        return aten.fill(aten.neg(x), number)

    graph = trace(lambda call, x: call(aten.fill.Scalar, call(aten.neg.default, x), 3), [x])
    for node in graph.graph.find_nodes(op="call_function", target=aten.fill.Scalar):
        node.update_arg(1, number)
    fused = fuser.fx.fuse_graph(graph)
    try:
        wanted = function(x)
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=re.escape(str(error))):
            fused(x)
    else:
        assert torch.equal(fused(x), wanted)


def compare(function: Callable[..., Any], inputs: tuple[torch.Tensor, ...], launches: int) -> None:
    """Compare results and gradients with aot_eager's; and the launches of the forward pass, unless 0 is given."""
    outcomes = []
    for backend in ("fuser", "aot_eager"):
        torch._dynamo.reset()
        given = [item.detach().requires_grad_() for item in inputs]
        before = fuser.stats()["launches"]
        made = torch.compile(function, backend=backend, dynamic=False)(*given)
        results = made if isinstance(made, tuple) else (made,)
        if backend == "fuser" and launches:
            assert fuser.stats()["launches"] - before == launches
        torch.autograd.backward(results, [torch.ones_like(item).cumsum(-1) for item in results])
        outcomes.append([*results, *(item.grad for item in given)])
    for got, wanted in zip(*outcomes, strict=True):
        assert torch.equal(got, wanted)
        assert got.stride() == wanted.stride()


def test_another_name_for_a_view_of_a_copy_leaves_the_copy_out() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.ops.aten.alias(put_back(x)) + y
        return found

    inputs = (draw(8, 12, 5), draw(2, 6, 8, 5))
    plain, fused = (make_fx(function)(*inputs) for _ in range(2))
    assert fused.graph.find_nodes(op="call_function", target=torch.ops.aten.alias.default)
    fuser.fx.fuse_graph(fused)
    assert not fused.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
    (module,) = fused.children()
    assert "contiguous" in str(module.group)
    assert torch.equal(fused(*inputs), plain(*inputs))


BOUND: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]] = {
    "a roll": (lambda x: torch.roll(x * 2, 1, 1) + 1, (draw(4, 6),), (draw(4, 8),)),
    "a transposed tensor, rolled": (lambda x: torch.roll(x * 2, 1, 1) + 1, (draw(4, 6),), (draw(6, 4).t(),)),
    "zeros": (lambda x, y: torch.zeros_like(x) + y * 2, (draw(4, 6), draw(4, 6)), (draw(4, 6).double(), draw(4, 6))),
    "new zeros": (lambda x, y: x.new_zeros(6) + y * 2, (draw(4, 6), draw(4, 6)), (draw(4, 6).double(), draw(4, 6))),
    "places of a mask": (
        lambda x, y: torch.ops.aten.index_put(x * 2, [y > 0], torch.ones(())) + 1,
        (draw(4, 6), draw(4, 6)),
        (draw(4, 6), draw(4)),
    ),
    "a repeated tensor": (lambda x: (x * 2).repeat(2, 3) + 1, (draw(4, 6),), (draw(4, 8),)),
    "shuffled pixels": (lambda x: F.pixel_shuffle(x * 2, 2) + 1, (draw(2, 4, 3, 5),), (channels_last(2, 4, 3, 5),)),
    # Sigmoids of other numbers may differ in a last bit on a CPU.
    "halves": (
        lambda x: F.glu(x * 2, 1) + 1,
        (torch.cat([draw(4, 3), torch.zeros(4, 3)], 1),),
        (torch.cat([draw(4, 4), torch.zeros(4, 4)], 1),),
    ),
    "a part written into": (
        lambda x, y: torch.slice_scatter(x * 2, y * 3, 1, 2, 4) + 1,
        (draw(4, 6), draw(4, 2)),
        (draw(4, 8), draw(4, 2)),
    ),
    "a stack": (lambda x, y: torch.stack([x * 2, y], 1) + 1, (draw(4, 6), draw(4, 6)), (draw(5, 3), draw(5, 3))),
    "a cat": (lambda x, y: torch.cat([x * 2, y], 1) + 1, (draw(4, 6), draw(4, 2)), (draw(5, 3), draw(5, 9))),
}


@pytest.mark.parametrize("name", BOUND)
@pytest.mark.filterwarnings("ignore::fuser.errors.FallbackWarning")
def test_a_graph_of_known_sizes_is_right_for_others(name: str) -> None:
    function, inputs, others = BOUND[name]
    plain = make_fx(function)(*inputs)
    fused = fuser.fx.fuse_graph(make_fx(function)(*inputs))
    for module in (fused, pickle.loads(pickle.dumps(fused))):
        before = fuser.stats()
        for given in (inputs, others, inputs):
            found, wanted = module(*given), plain(*given)
            assert found.dtype == wanted.dtype
            assert torch.equal(found, wanted)
            assert found.stride() == wanted.stride()
        assert fuser.stats()["launches"] > before["launches"]
        assert sum(fuser.stats()["fallbacks"].values()) - sum(before["fallbacks"].values()) == (name != "a cat")


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_part_of_another_shape_is_torchs_to_refuse() -> None:
    function = lambda x: torch.slice_scatter(x * 2, x[:1, :2] + 1, 1, 0, 2) * 2  # noqa: E731
    with pytest.raises(RuntimeError, match="size equal to the slice of self"):
        torch.compile(function, backend="fuser", dynamic=False)(draw(4, 7))


@pytest.mark.parametrize("ends", [(0, 13), (1, 13), (2, 11)])
def test_every_second_of_a_gradient_lies_row_major(ends: tuple[int, int]) -> None:
    """Also where its dimension does not come out even, and the group returns it."""
    x = draw(2, -(-(ends[1] - ends[0]) // 2), 3)
    aten = torch.ops.aten

    def write(call: Callable[..., Any], x: Any) -> Any:
        return call(aten.slice_backward.default, call(aten.neg.default, x), [2, 13, 3], 1, *ends, 2)

    compare_graphs(trace(write, [x]), [x], [], 0)


@pytest.mark.usefixtures("fresh_dynamo")
def test_many_parts_are_halved_not_taken_out_one_by_one() -> None:
    # As a loop over a tensor's slices comes back: each step's gradient is put in its place, and all are added.
    def function(*parts: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(5, 48)
        carried = parts[0]
        for place, part in enumerate(parts):
            carried = carried * 0.5 + part
            total = total + F.pad(carried, (place, 47 - place))
        return total

    parts = [draw(5, 1) for _ in range(48)]
    compiled = torch.compile(function, backend="fuser")
    assert torch.equal(compiled(*parts), function(*parts))
    fuser.reset_stats()
    assert torch.equal(compiled(*parts), function(*parts))
    assert not fuser.stats()["fallbacks"]
    # One by one they would be 140.
    assert fuser.stats()["launches"] <= 24


def test_halves_meet_where_few_values_cross() -> None:
    builder = GroupBuilder()
    x = builder.add_input("x")
    wide = [builder.apply(OPS["neg"].function, [x])[0] for _ in range(1)]
    for _ in range(3):
        wide = [builder.apply(OPS["exp"].function, [value])[0] for value in wide * 2]
    while len(wide) > 1:
        (made,) = builder.apply(OPS["mul"].function, wide[:2])
        wide = [*wide[2:], made]
    group = builder.build(wide)
    first, second = cut_around(group, len(group.applications))
    assert len(first.outputs) == len(set(second.inputs) - {0})
    assert len(first.group.applications) + len(second.group.applications) == len(group.applications)


def test_what_no_later_part_reads_is_let_go() -> None:
    builder = GroupBuilder()
    x = builder.add_input("x")
    (before,) = builder.apply(OPS["neg"].function, [x])
    (obstacle,) = builder.apply(OPS["exp"].function, [before])
    group = builder.build(builder.apply(OPS["abs"].function, [obstacle]))
    alive: list[list[bool]] = []
    made: list[weakref.ref[torch.Tensor]] = []

    def run(_: object, inputs: list[Any]) -> list[torch.Tensor]:
        alive.append([item() is not None for item in made])
        result = inputs[0] + 1
        made.append(weakref.ref(result))
        return [result]

    run_around(register(group), 1, [torch.ones(3)], run)
    assert alive == [[], [True], [False, True]]


def test_expanded_tensors_lie_as_torchs() -> None:
    draw = random.Random(0)
    for _ in range(500):
        to = [draw.choice([0, 1, 2, 3]) for _ in range(draw.randint(0, 4))]
        shape = [draw.choice([size, size, 1, 2]) for size in to[draw.randint(0, len(to)) :]]
        strides = [draw.choice([0, 1, 2, 5, 7]) for _ in shape]
        x = torch.empty(100).as_strided(shape, strides)
        try:
            wanted: Any = tuple(x.expand(to).shape), x.expand(to).stride()
        except RuntimeError:
            wanted = None
        assert view_steps._expand(tuple(shape), tuple(strides), tuple(to)) == wanted


@pytest.mark.cpu
def test_an_alias_keeps_the_stride_of_a_dimension_of_size_one() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor]:
        seen = torch.ops.aten.alias(torch.logical_not(x))
        return (torch.logical_and(seen, x) + 1,)

    x = torch.randn(12).as_strided((2, 1, 6), (1, 2, 2))
    graph_module = make_fx(function, tracing_mode="fake")(x)
    (made,) = compile_graph(graph_module, "strict")([x])
    (wanted,) = function(x)
    assert made.stride() == wanted.stride()
    assert torch.equal(made, wanted)
