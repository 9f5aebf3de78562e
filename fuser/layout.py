"""Shapes and strides as torch's TensorIterator handles them, on integers that may be symbols. Strides are in elements.

Follows ``aten/src/ATen/TensorIterator.cpp``: broadcasting, the order of dimensions, the strides of a new output and
the merging of dimensions. Nothing here sees a tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import cmp_to_key
from math import prod
from typing import Any, NamedTuple

import torch

from fuser.errors import ShapeError

__all__ = [
    "IterationSpace",
    "broadcast_shapes",
    "broadcast_strides",
    "build_iteration_space",
    "contiguous_strides",
    "has_channels_last_format",
    "holds",
    "infer_output_strides",
    "is_contiguous",
    "is_dense",
]

Shape = tuple[int, ...]
Strides = tuple[int, ...]


def holds(found: Any, *, is_asserted: bool = False) -> bool:
    """Return what a comparison of sizes says, which may be symbols.

    Of sizes that data decide (``x[x > 0]``) nobody knows: as for torch, they are none that they need not be. What is
    asserted is found out when the program runs.
    """
    if found is True or found is False:
        # Nearly always, and asked for each dimension of each operand.
        return found
    if not isinstance(found, torch.SymBool):
        return bool(found)
    # Symbols have imported it; it takes long.
    from torch.fx.experimental.symbolic_shapes import expect_true, guard_or_false  # noqa: PLC0415

    return bool(expect_true(found) if is_asserted else guard_or_false(found))


def _at_least_one(size: Any) -> Any:
    return torch.sym_max(size, 1) if isinstance(size, torch.SymInt) else max(size, 1)  # type: ignore[no-untyped-call]


def _are_equal(one: Sequence[int], other: Sequence[int]) -> bool:
    return len(one) == len(other) and all(map(holds, map(operator.eq, one, other)))


class IterationSpace(NamedTuple):
    """The loop nest of one kernel: merged dimensions, innermost first."""

    sizes: Shape
    # One tuple per operand, as long as ``sizes``.
    strides: tuple[Strides, ...]
    # How many of the dimensions, the first ones, are reduced.
    reduced: int = 0
    # The element of each operand's memory at which it begins; none where all begin at the first.
    offsets: tuple[int, ...] = ()
    # After how many elements of the innermost dimension operands that repeat begin anew; 0 where none does.
    period: int = 0

    @property
    def numel(self) -> int:
        """Number of elements visited."""
        return prod(self.sizes)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write: the results of nothing are values too."""
        return prod(self.sizes[self.reduced :]) == 0


def broadcast_shapes(shapes: Sequence[Shape]) -> Shape:
    """Return the common shape; raises ShapeError in torch's wording."""
    result: list[int] = []
    for shape in shapes:
        if len(shape) > len(result):
            result = [1] * (len(shape) - len(result)) + result
        for back in range(1, len(shape) + 1):
            have, new = result[-back], shape[-back]
            if holds(have == 1):
                result[-back] = new
            elif not holds(new == 1) and not holds(new == have, is_asserted=True):
                raise ShapeError(
                    f"The size of tensor a ({have}) must match the size of tensor b ({new}) "
                    f"at non-singleton dimension {len(result) - back}"
                )
    return tuple(result)


def broadcast_strides(shape: Shape, strides: Strides, to: Shape) -> Strides:
    """Return the strides that read a tensor of ``shape`` as if it had shape ``to``: 0 where it is repeated."""
    lead = len(to) - len(shape)
    own = tuple(
        0 if holds(size == 1) and not holds(wanted == 1) else stride
        for size, stride, wanted in zip(shape, strides, to[lead:], strict=True)
    )
    return (0,) * lead + own


def contiguous_strides(shape: Shape) -> Strides:
    """Return the strides of a new contiguous tensor of ``shape``."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * _at_least_one(shape[dim + 1])
    return tuple(strides)


def is_contiguous(shape: Shape, strides: Strides, order: Sequence[int] | None = None) -> bool:
    """Whether the elements lie densely with dimensions nested as in ``order`` (innermost last; default: as is)."""
    if any(holds(size == 0) for size in shape):
        return True
    expected = 1
    for dim in reversed(order if order is not None else range(len(shape))):
        if not holds(shape[dim] == 1):
            if not holds(strides[dim] == expected):
                return False
            expected *= shape[dim]
    return True


def has_channels_last_format(shape: Shape, strides: Strides) -> bool:
    """Whether the format that torch suggests for what is made like a tensor is one of channels last."""
    rank = len(shape)
    if rank not in (4, 5) or holds(strides[1] == 0):
        return False
    least = 0
    for dim in (1, *range(rank - 1, 1, -1), 0):
        # What could be row-major as well, is.
        if holds(shape[dim] == 0) or holds(strides[dim] < least) or (dim == 0 and holds(least == strides[1])):
            return False
        least = strides[dim] * _at_least_one(shape[dim])
    return True


def infer_output_strides(shape: Shape, operands: Sequence[tuple[Shape, Strides]]) -> Strides:
    """Return the strides torch's pointwise op gives its output.

    Args:
        shape: the broadcast shape.
        operands: shape and strides of each input, in order; Python numbers count as 0-dim tensors.
    """
    if all(_are_equal(own, shape) for own, _ in operands):
        fast = _fast_strides(shape, [strides for _, strides in operands])
        if fast is not None:
            return fast
    order = _dimension_order(shape, [broadcast_strides(own, strides, shape) for own, strides in operands])
    if order == list(range(len(shape) - 1, -1, -1)):
        return contiguous_strides(shape)
    strides = [0] * len(shape)
    step = 1
    for dim in order:
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


def build_iteration_space(shape: Shape, operands: Sequence[Strides]) -> IterationSpace:
    """Order and merge dimensions so that a kernel walks the operands with as few and as long loops as possible.

    Args:
        shape: the broadcast shape of the output.
        operands: strides of each operand over ``shape`` (0 where broadcast), outputs first: they decide the order.

    Returns:
        A space of one dimension or more; dimensions of size 1 are gone, and those along which each element is written
        where the one before it was; neighbours that every operand walks through without a jump are one.
    """
    order = [dim for dim in _dimension_order(shape, operands) if _is_walked(shape[dim], dim, operands)]
    sizes: list[int] = []
    strides: list[list[int]] = [[] for _ in operands]
    for dim in order:
        own = [operand[dim] for operand in operands]
        if sizes and all(outer == inner[-1] * sizes[-1] for outer, inner in zip(own, strides, strict=True)):
            sizes[-1] *= shape[dim]
            continue
        sizes.append(shape[dim])
        for operand, stride in zip(strides, own, strict=True):
            operand.append(stride)
    if not sizes:
        return IterationSpace((1,), ((0,),) * len(operands))
    return IterationSpace(tuple(sizes), tuple(tuple(operand) for operand in strides))


def _is_walked(size: int, dim: int, operands: Sequence[Strides]) -> bool:
    # What is converted to the dtype that it has lies as it did, also where it was expanded.
    return size != 1 and (any(operand[dim] != 0 for operand in operands) or size == 0)


def _fast_strides(shape: Shape, all_strides: Sequence[Strides]) -> Strides | None:
    # TensorIterator's fast set-up: all operands contiguous, or all channels_last, or all equally dense.
    if all(is_contiguous(shape, strides) for strides in all_strides):
        return contiguous_strides(shape)
    channels_last = _channels_last_order(shape)
    if channels_last and all(is_contiguous(shape, strides, channels_last) for strides in all_strides):
        return _strides_in_order(shape, channels_last)
    # No set: symbolic sizes have no hash.
    if all(_are_equal(strides, all_strides[0]) for strides in all_strides) and is_dense(shape, all_strides[0]):
        return all_strides[0]
    return None


def _channels_last_order(shape: Shape) -> tuple[int, ...] | None:
    # Only the four-dimensional format counts here: the five-dimensional one goes through "equally dense".
    return (0, 2, 3, 1) if len(shape) == 4 else None


def _strides_in_order(shape: Shape, order: Sequence[int]) -> Strides:
    strides = [0] * len(shape)
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        step *= _at_least_one(shape[dim])
    return tuple(strides)


def is_dense(shape: Shape, strides: Strides) -> bool:
    """Whether the elements lie densely without sharing memory: some order of the dimensions makes it contiguous."""
    if any(holds(size == 0) for size in shape):
        return True
    pairs = [(stride, size) for stride, size in zip(strides, shape, strict=True) if not holds(size < 2)]
    expected = 1
    for stride, size in sorted(pairs, key=cmp_to_key(_compare_strides)):
        if not holds(stride == expected):
            return False
        expected *= size
    return True


def _compare_strides(one: tuple[int, int], other: tuple[int, int]) -> int:
    return holds(one[0] > other[0]) - holds(one[0] < other[0])


def _dimension_order(shape: Shape, operands: Sequence[Strides]) -> list[int]:
    # TensorIteratorBase::reorder_dimensions: an insertion sort, innermost first, that allows ambiguous comparisons.
    order = list(range(len(shape) - 1, -1, -1))
    for start in range(1, len(order)):
        moving = start
        for before in range(start - 1, -1, -1):
            compared = _compare_dimensions(order[before], order[moving], shape, operands)
            if compared > 0:
                order[before], order[moving] = order[moving], order[before]
                moving = before
            elif compared < 0:
                break
    return order


def _compare_dimensions(dim0: int, dim1: int, shape: Shape, operands: Sequence[Strides]) -> int:
    for strides in operands:
        stride0, stride1 = strides[dim0], strides[dim1]
        if holds(stride0 == 0) or holds(stride1 == 0):
            continue
        if not holds(stride0 == stride1):
            return 1 if holds(stride0 > stride1) else -1
        if holds(shape[dim0] > shape[dim1]):
            return 1
    return 0
