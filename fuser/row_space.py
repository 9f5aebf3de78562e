"""How the values of a group with reductions lie over the loop nest of a kernel: what it has per element, what per row.

A *row* is what one result of a reduction is made of: the elements along the reduced dimensions, at one place of the
others. All reductions of a kernel reduce the same dimensions of one shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fuser.graph import FusionGroup
from fuser.kernel_spec import ValueLayout
from fuser.layout import IterationSpace, Shape, Strides, broadcast_shapes, broadcast_strides, build_iteration_space

__all__ = ["RowShape", "build_row_space", "count_accumulators", "find_row_shape", "reduction_levels"]


@dataclass(frozen=True, slots=True)
class RowShape:
    """The shape that a kernel with reductions walks over, and how each value of its group lies there."""

    shape: Shape
    # The reduced dimensions, ascending.
    dims: tuple[int, ...]
    # For each value whether it is one per row, not per element.
    is_row: tuple[bool, ...]
    # For each value whether its dimensions are those that are not reduced, as in results without ``keepdim``.
    is_squeezed: tuple[bool, ...]

    def strides(self, value: int, shape: Shape, strides: Strides) -> Strides:
        """Return the strides that read a value as if it had the whole shape."""
        if not self.is_squeezed[value]:
            return broadcast_strides(shape, strides, self.shape)
        kept = tuple(size for dim, size in enumerate(self.shape) if dim not in self.dims)
        own = iter(broadcast_strides(shape, strides, kept))
        return tuple(0 if dim in self.dims else next(own) for dim in range(len(self.shape)))


def find_row_shape(group: FusionGroup, layouts: Sequence[ValueLayout]) -> RowShape | None:
    """Return how a group's values lie over the rows of one kernel; None if no single kernel makes them all.

    Args:
        group: has a reduction.
        layouts: shape and strides of each of its values.
    """
    found = {
        (shape, item.function.reduction.normalize_dims(len(shape)))
        for item in group.applications
        if item.function.reduction
        for shape in [broadcast_shapes([layouts[value].shape for value in item.tensors])]
    }
    if len(found) != 1:
        return None
    shape, dims = found.pop()
    squeezed = _find_squeezed(group, layouts, dims)
    if squeezed is None:
        return None
    kept = tuple(size for dim, size in enumerate(shape) if dim not in dims)
    if any(is_one and len(item.shape) > len(kept) for is_one, item in zip(squeezed, layouts, strict=True)):
        # It meets a result without keepdim, and has more dimensions.
        return None
    padded = [_pad(layouts[value].shape, shape, dims, is_squeezed) for value, is_squeezed in enumerate(squeezed)]
    for own in padded:
        if len(own) != len(shape) or any(size not in (1, whole) for size, whole in zip(own, shape, strict=True)):
            return None
    is_row = tuple(all(own[dim] == 1 for dim in dims) for own in padded)
    for value in group.outputs:
        # Whoever writes an element must be the one that has it.
        own = tuple(size for dim, size in enumerate(padded[value]) if dim not in dims)
        if own != kept if is_row[value] else padded[value] != shape:
            return None
    return RowShape(shape, dims, is_row, squeezed)


def _find_squeezed(
    group: FusionGroup, layouts: Sequence[ValueLayout], dims: tuple[int, ...]
) -> tuple[bool, ...] | None:
    # Where the reduced dimensions come first, a shape without them broadcasts as it is.
    is_leading = dims == tuple(range(len(dims)))
    squeezed: list[bool | None] = [None if layouts[value].shape else False for value in range(len(group.inputs))]
    for item in group.applications:
        reduction = item.function.reduction
        own = [value for value in item.tensors if layouts[value].shape]
        made = reduction is None and any(squeezed[value] for value in own)
        if any(squeezed[value] is (not made) for value in own):
            return None
        for value in own:
            squeezed[value] = made
        if reduction is not None:
            made = not (reduction.keepdim or is_leading)
        squeezed += [made] * item.function.num_outputs
    return tuple(bool(item) for item in squeezed)


def _pad(own: Shape, shape: Shape, dims: tuple[int, ...], is_squeezed: bool) -> Shape:
    # A value's shape with a 1 for each dimension that it lacks.
    if not is_squeezed:
        return (1,) * (len(shape) - len(own)) + own
    own = (1,) * (len(shape) - len(dims) - len(own)) + own
    sizes = iter(own)
    return tuple(1 if dim in dims else next(sizes) for dim in range(len(shape)))


def reduction_levels(group: FusionGroup) -> list[int]:
    """Return how many reductions lie before each value of a group, on the longest way."""
    levels = [0] * len(group.inputs)
    for item in group.applications:
        level = max(levels[value] for value in item.tensors) + (item.function.reduction is not None)
        levels += [level] * item.function.num_outputs
    return levels


def count_accumulators(group: FusionGroup) -> int:
    """Return how many accumulators a group's reductions have in all."""
    return sum(len(item.function.reduction.identity) for item in group.applications if item.function.reduction)


def build_row_space(rows: RowShape, operands: Sequence[Strides]) -> IterationSpace:
    """Return the loop nest: the reduced dimensions, innermost first, then the others.

    Args:
        rows: what is walked over.
        operands: strides of each operand over the whole shape.
    """
    kept = [dim for dim in range(len(rows.shape)) if dim not in rows.dims]
    # Elements are numbered row-major along the reduced dimensions, whatever lies densely.
    reduced = _merge(
        [(rows.shape[dim], tuple(operand[dim] for operand in operands)) for dim in reversed(rows.dims)], len(operands)
    )
    outer = build_iteration_space(
        tuple(rows.shape[dim] for dim in kept), [tuple(operand[dim] for dim in kept) for operand in operands]
    )
    return IterationSpace(
        (*(size for size, _ in reduced), *outer.sizes),
        tuple((*(own[index] for _, own in reduced), *strides) for index, strides in enumerate(outer.strides)),
        reduced=len(reduced),
    )


def _merge(dims: Sequence[tuple[int, Strides]], count: int) -> list[tuple[int, Strides]]:
    # Innermost first; a neighbour that every operand walks into without a jump becomes one with it.
    merged: list[tuple[int, Strides]] = []
    for size, strides in dims:
        if size == 1:
            continue
        if merged and all(outer == inner * merged[-1][0] for outer, inner in zip(strides, merged[-1][1], strict=True)):
            merged[-1] = (merged[-1][0] * size, merged[-1][1])
        else:
            merged.append((size, strides))
    return merged or [(1, (0,) * count)]
