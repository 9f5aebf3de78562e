"""Shapes and strides are those that torch's own pointwise ops give, over thousands of random layouts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from math import prod

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch._prims_common import suggest_memory_format

from fuser.errors import ShapeError
from fuser.layout import (
    Shape,
    broadcast_shapes,
    broadcast_strides,
    build_iteration_space,
    contiguous_strides,
    has_channels_last_format,
    infer_output_strides,
    is_contiguous,
)

Operand = tuple[Shape, tuple[int, ...]]
SIZES = st.sampled_from((0, 1, 1, 2, 2, 3, 4))


@st.composite
def views(draw: st.DrawFn, shape: Shape, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Draw a tensor that broadcasts to ``shape``: permuted, sliced, with gaps, expanded, with dimensions of size 1."""
    own = shape[draw(st.integers(0, len(shape))) if draw(st.integers(0, 3)) == 0 else 0 :]
    own = tuple(1 if draw(st.integers(0, 4)) == 0 else size for size in own)
    order = draw(st.permutations(range(len(own)))) if draw(st.booleans()) else list(range(len(own)))
    gaps = draw(st.integers(0, 3)) == 0
    steps = [draw(st.sampled_from((1, 1, 2, 3))) if gaps else 1 for _ in own]
    base = torch.empty([own[dim] * steps[dim] for dim in order], dtype=dtype)
    view = base[tuple(slice(None, None, steps[dim]) for dim in order)]
    view = view.permute([order.index(dim) for dim in range(len(own))])
    if draw(st.integers(0, 4)) == 0:
        lead = len(shape) - len(own)
        view = view.expand(shape[lead:])
    return view


@st.composite
def broadcastable(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...]) -> list[torch.Tensor]:
    """Draw tensors that broadcast together."""
    shape = tuple(draw(st.lists(SIZES, max_size=5)))
    return [draw(views(shape, dtype)) for dtype in dtypes]


def inferred(tensors: list[torch.Tensor]) -> Operand:
    shape = broadcast_shapes([tuple(item.shape) for item in tensors])
    return shape, infer_output_strides(shape, [(tuple(item.shape), item.stride()) for item in tensors])


@settings(max_examples=10 * settings().max_examples)
@given(broadcastable((torch.float32, torch.float32)))
def test_output_of_two(tensors: list[torch.Tensor]) -> None:
    wanted = torch.add(*tensors)
    assert inferred(tensors) == (tuple(wanted.shape), wanted.stride())


@settings(max_examples=10 * settings().max_examples)
@given(broadcastable((torch.bool, torch.float32, torch.float32)))
def test_output_of_three(tensors: list[torch.Tensor]) -> None:
    wanted = torch.where(*tensors)
    assert inferred(tensors) == (tuple(wanted.shape), wanted.stride())


@settings(max_examples=10 * settings().max_examples)
@given(broadcastable((torch.float32,)))
def test_output_of_one_and_a_number(tensors: list[torch.Tensor]) -> None:
    (x,) = tensors
    assert inferred([x]) == (tuple(torch.neg(x).shape), torch.neg(x).stride())
    assert inferred([x, torch.tensor(1.0)]) == (tuple(torch.add(x, 1.0).shape), torch.add(x, 1.0).stride())


@st.composite
def dense_pairs(draw: st.DrawFn) -> list[torch.Tensor]:
    """Draw two dense tensors of one shape; the strides of dimensions of size 1 can be anything."""
    shape = draw(st.lists(st.sampled_from((1, 1, 2, 3)), min_size=1, max_size=5))
    is_channels_last = len(shape) == 4 and draw(st.booleans())
    orders = [(0, 2, 3, 1) if is_channels_last else tuple(draw(st.permutations(range(len(shape)))))] * 2
    if draw(st.integers(0, 3)) == 0:
        orders[1] = tuple(range(len(shape)))
    tensors = []
    odd = [draw(st.sampled_from((1, 2, 3, 7, 60))) for _ in shape]
    for order in orders:
        strides, step = [0] * len(shape), 1
        for dim in reversed(order):
            strides[dim], step = step, step * shape[dim]
        if draw(st.booleans()):
            strides = [other if size == 1 else own for size, own, other in zip(shape, strides, odd, strict=True)]
        tensors.append(torch.empty_strided(shape, strides))
    return tensors


@settings(max_examples=10 * settings().max_examples)
@given(dense_pairs())
def test_output_of_dense_tensors(tensors: list[torch.Tensor]) -> None:
    for operands in (tensors, tensors[:1], [tensors[0], tensors[0]]):
        wanted = torch.add(*operands) if len(operands) == 2 else torch.neg(*operands)
        assert inferred(operands)[1] == wanted.stride()


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_channels_last(memory_format: torch.memory_format) -> None:
    x = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    same = torch.empty(2, 3, 4, 5).to(memory_format=memory_format)
    for other in (same, torch.empty(3, 1, 1), torch.empty(1, 3, 4, 1)):
        for pair in ([x, other], [other, x]):
            assert inferred(pair)[1] == torch.add(*pair).stride()
    volume = torch.empty(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d)
    assert inferred([volume, volume])[1] == torch.add(volume, volume).stride()


def test_layouts_measured_on_jiterator() -> None:
    square = torch.empty(4, 4)
    assert inferred([square.t()])[1] == (1, 4)
    assert inferred([square, square.t()])[1] == (4, 1)
    assert inferred([torch.empty(2, 3, 4).permute(2, 0, 1)])[1] == (1, 12, 4)
    assert inferred([torch.empty(1, 3).expand(2, 3)])[1] == (3, 1)
    assert inferred([torch.empty(4, 6)[:, ::2]])[1] == (3, 1)


@settings(max_examples=10 * settings().max_examples)
@given(st.lists(SIZES, max_size=4), st.lists(SIZES, max_size=4))
def test_broadcasting_says_what_torch_says(left: list[int], right: list[int]) -> None:
    assert outcome(lambda: broadcast_shapes([tuple(left), tuple(right)]), ShapeError) == outcome(
        lambda: tuple(torch.add(torch.empty(left), torch.empty(right)).shape), RuntimeError
    )


def outcome(function: Callable[[], Shape], kind: type[Exception]) -> Shape | str:
    """Return the result, or the error's text."""
    try:
        return function()
    except kind as error:
        return str(error)


@settings(max_examples=5 * settings().max_examples)
@given(broadcastable((torch.float32,) * 3))
def test_broadcast_strides(tensors: list[torch.Tensor]) -> None:
    shape = broadcast_shapes([tuple(item.shape) for item in tensors])
    for item in tensors:
        found = broadcast_strides(tuple(item.shape), item.stride(), shape)
        wanted = item.expand(shape).stride()
        # Only where a step is ever taken can a stride be seen.
        assert [s for size, s in zip(shape, found, strict=True) if size > 1] == [
            s for size, s in zip(shape, wanted, strict=True) if size > 1
        ]


def offsets(sizes: Shape, all_strides: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the offsets of all operands at every point of a loop nest."""
    return [
        tuple(sum(i * stride for i, stride in zip(at, strides, strict=True)) for strides in all_strides)
        for at in itertools.product(*map(range, sizes))
    ]


@settings(max_examples=10 * settings().max_examples)
@given(broadcastable((torch.float32, torch.float32)))
def test_iteration_space(tensors: list[torch.Tensor]) -> None:
    shape, out = inferred(tensors)
    strides = [out, *(broadcast_strides(tuple(item.shape), item.stride(), shape) for item in tensors)]
    space = build_iteration_space(shape, strides)
    assert space.numel == prod(shape)
    assert sorted(offsets(space.sizes, list(space.strides))) == sorted(offsets(shape, strides))
    assert space.sizes == (1,) or 1 not in space.sizes
    # Nothing is left to merge, and the output is written from the inside out.
    for inner in range(len(space.sizes) - 1):
        assert any(own[inner + 1] != own[inner] * space.sizes[inner] for own in space.strides)
    if 0 not in shape:
        assert list(space.strides[0]) == sorted(space.strides[0])


@pytest.mark.parametrize(
    ("shapes", "rank"),
    [
        ([(4, 5, 6), (4, 5, 6)], 1),
        ([(4, 5, 6), (6,)], 2),
        ([(4, 5, 6), (4, 1, 1)], 2),
        ([(4, 5, 6), (1, 5, 1)], 3),
        ([(4, 5, 6), ()], 1),
        ([(1, 1), (1,)], 1),
    ],
)
def test_dimensions_merge(shapes: list[Shape], rank: int) -> None:
    shape = broadcast_shapes(shapes)
    strides = [contiguous_strides(shape), *(broadcast_strides(own, contiguous_strides(own), shape) for own in shapes)]
    assert len(build_iteration_space(shape, strides).sizes) == rank


@settings(max_examples=5 * settings().max_examples)
@given(broadcastable((torch.float32,)))
def test_is_contiguous(tensors: list[torch.Tensor]) -> None:
    (x,) = tensors
    assert is_contiguous(tuple(x.shape), x.stride()) == x.is_contiguous()
    assert contiguous_strides(tuple(x.shape)) == torch.empty(x.shape).stride()
    assert has_channels_last_format(tuple(x.shape), x.stride()) == (suggest_memory_format(x) != torch.contiguous_format)
