"""How the values of a group with reductions lie over the loop nest of a kernel: what it has per element, what per row.

A *row* is what one result of a reduction is made of: the elements along the reduced dimensions, at one place of the
others. All reductions of a kernel reduce the same dimensions of one shape, or, to pieces, all others of it: *columns*.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import prod
from typing import NamedTuple

from fuser.access import dense_width
from fuser.application import Application
from fuser.combining import Reduction
from fuser.graph import FusionGroup
from fuser.kernel_spec import RowSpec, ValueLayout
from fuser.layout import IterationSpace, Shape, Strides, broadcast_shapes, build_iteration_space

__all__ = [
    "RowShape",
    "build_row_space",
    "count_accumulators",
    "find_row_shape",
    "has_one_pass",
    "lies_across",
    "moving_widths",
    "reduction_levels",
    "written_last",
]


class RowShape(NamedTuple):
    """The shape that a kernel walks over, and how each value of its group lies there."""

    shape: Shape
    # The reduced dimensions, ascending.
    dims: tuple[int, ...]
    # For each value whether it is one per row, not per element.
    is_row: tuple[bool, ...]
    # For each dimension of each value the one that it lies along; None for one of size 1.
    axes: tuple[tuple[int | None, ...], ...]
    # Whether the reductions are running totals, which share a kernel with each other alone.
    scans: bool = False

    def strides(self, value: int, strides: Strides) -> Strides:
        """Return the strides that read a value as if it had the whole shape."""
        found = [0] * len(self.shape)
        for axis, stride in zip(self.axes[value], strides, strict=True):
            if axis is not None:
                found[axis] = stride
        return tuple(found)


def find_row_shape(group: FusionGroup, layouts: Sequence[ValueLayout]) -> RowShape | None:
    """Return how a group's values lie over the shape that one kernel walks over; None if no single kernel makes them.

    Args:
        group: the group. Without a reduction, its outputs have one shape.
        layouts: shape and strides of each of its values.
    """
    # No set: symbols would be asked for their hash (fuser.sizes).
    found = [
        (shape, dims, item.function.reduction.scans)
        for item in group.applications
        if item.function.reduction
        for shape in [broadcast_shapes([layouts[value].shape for value in item.tensors])]
        for dims in [_row_dims(item.function.reduction, len(shape))]
    ] or [(layouts[group.outputs[0]].shape, (), False)]
    shape, dims, scans = found[0]
    if any(item != found[0] for item in found):
        return None
    known = _Axes(group, layouts, shape)
    axes = known.find()
    if axes is None:
        return None
    is_row = tuple(all(axis not in dims for axis in own) for own in axes)
    kept, row = (tuple(size for dim, size in enumerate(shape) if (dim in dims) == is_in) for is_in in (False, True))
    for value in group.outputs:
        # Whoever writes an element must be the one that has it.
        whole = row if value in known.pieces else kept if is_row[value] else shape
        if tuple(size for size in known.shapes[value] if size != 1) != tuple(size for size in whole if size != 1):
            return None
    return RowShape(shape, dims, is_row, axes, scans)


def _row_dims(reduction: Reduction, rank: int) -> tuple[int, ...]:
    """Return the dimensions of a shape along which a kernel that makes a reduction has its rows."""
    dims = reduction.normalize_dims(rank)
    return tuple(dim for dim in range(rank) if dim not in dims) if reduction.pieces else dims


class _Axes:
    """Finds which dimension of a shape each dimension of each value lies along.

    Dimensions that an application takes side by side, or hands on, lie along the same one: they are joined, those of
    what is reduced with the dimensions of the shape. What no reduction has to do with is aligned at the end.
    """

    def __init__(self, group: FusionGroup, layouts: Sequence[ValueLayout], shape: Shape) -> None:
        self.group, self.shape = group, shape
        self.shapes = [item.shape for item in layouts]
        made = zip(group.applications, group.value_offsets(), strict=True)
        self.pieces = {value for item, value in made if item.function.reduction and item.function.reduction.pieces}
        for value in self.pieces:
            # Whoever has a row's element has one piece of its column.
            self.shapes[value] = (1, *self.shapes[value][1:])
        # Of the shape itself, then of the values: what is joined points to one of its set, those of the shape first.
        self.starts: list[int] = []
        count = len(shape)
        for own in self.shapes:
            self.starts.append(count)
            count += len(own)
        self.parents = list(range(count))

    def find(self) -> tuple[tuple[int | None, ...], ...] | None:
        for item, offset in zip(self.group.applications, self.group.value_offsets(), strict=True):
            for value in range(offset, offset + item.function.num_outputs):
                self._join_application(item, value)
        rank = len(self.shape)
        for value in (*self.group.outputs, *range(len(self.shapes))):
            own = self.shapes[value]
            for dim in range(len(own)):
                axis = rank - len(own) + dim
                if own[dim] != 1 and axis >= 0 and self._find(self.starts[value] + dim) >= rank:
                    self._join(axis, self.starts[value] + dim)
        if any(self._find(axis) != axis for axis in range(rank)):
            # Two dimensions of the shape are one to some value.
            return None
        found = []
        for start, own in zip(self.starts, self.shapes, strict=True):
            ends = [None if size == 1 else self._find(start + dim) for dim, size in enumerate(own)]
            known = [end for end in ends if end is not None]
            if len({*known}) < len(known) or any(
                end is not None and (end >= rank or self.shape[end] != size)
                for end, size in zip(ends, own, strict=True)
            ):
                return None
            found.append(tuple(ends))
        return tuple(found)

    def _join_application(self, item: Application, made: int) -> None:
        function, result = item.function, self.starts[made]
        reduction = function.reduction
        if reduction is not None:
            own = reduction.normalize_dims(len(self.shape))
            kept = [dim for dim in range(len(self.shape)) if dim not in own or reduction.keepdim or reduction.scans]
            for dim, axis in enumerate(kept, start=bool(reduction.pieces)):
                if self.shapes[made][dim] != 1:
                    self._join(axis, result + dim)
            for value in item.tensors:
                self._join_ends(value, 0, len(self.shape), self.shape)
        elif function.is_view:
            (value,) = item.tensors
            for dim, source in enumerate(function.view_dims(len(self.shapes[value]))):
                if source is not None and self.shapes[value][source] != 1:
                    self._join(self.starts[value] + source, result + dim)
        else:
            for value in item.tensors:
                self._join_ends(value, result, len(self.shapes[made]), self.shapes[made])

    def _join_ends(self, value: int, start: int, rank: int, shape: Shape) -> None:
        # The last dimensions of a value with those of what it broadcasts to: what is repeated lies along none.
        lead = rank - len(self.shapes[value])
        for dim, size in enumerate(self.shapes[value]):
            if size == shape[lead + dim] != 1:
                self._join(start + lead + dim, self.starts[value] + dim)

    def _join(self, one: int, other: int) -> None:
        first, second = sorted((self._find(one), self._find(other)))
        self.parents[second] = first

    def _find(self, item: int) -> int:
        while self.parents[item] != item:
            self.parents[item] = item = self.parents[self.parents[item]]
        return item


def lies_across(sizes: Shape, reduced: Collection[int], operands: Iterable[Strides]) -> bool:
    """Whether most of what a kernel reads and writes lies densely across rows, not along them.

    Args:
        sizes: of the dimensions that it walks over.
        reduced: those that it reduces.
        operands: strides along them.
    """
    along, across = 0, 0
    for strides in operands:
        elements = prod(size for size, stride in zip(sizes, strides, strict=True) if stride)
        dense = [dim for dim, stride in enumerate(strides) if stride == 1 and sizes[dim] > 1]
        along += elements * any(dim in reduced for dim in dense)
        across += elements * any(dim not in reduced for dim in dense)
    return across > along


def reduction_levels(group: FusionGroup) -> list[int]:
    """Return how many reductions lie before each value of a group, on the longest way."""
    levels = [0] * len(group.inputs)
    for item in group.applications:
        reduction = item.function.reduction
        level = max(levels[value] for value in item.tensors) + (reduction is not None and not reduction.pieces)
        levels += [level] * item.function.num_outputs
    return levels


def has_one_pass(group: FusionGroup, rows: RowSpec) -> bool:
    """Whether nothing is computed per element after a reduction."""
    levels = reduction_levels(group)
    return max(levels) == 1 and all(rows.is_row[value] for value in group.outputs if levels[value])


def written_last(group: FusionGroup, rows: RowSpec) -> tuple[bool, ...]:
    """Return for each output whether it has elements, each of which is written after all passes that read its row."""
    reductions = {index: own for index, item in enumerate(group.applications) if (own := item.function.reduction)}
    if rows.scans or any(own.order == "pick" for own in reductions.values()):
        # One of these is read by all threads of a row, at no known time.
        return (False,) * len(group.outputs)
    levels, producers = reduction_levels(group), group.producers()
    full = {value for value in group.outputs if not (rows.is_row[value] or producers[value] in reductions)}
    walked = [levels[value] for index in reductions for value in group.applications[index].tensors]
    last = max([*walked, *(levels[value] for value in full)])
    return tuple(value in full and levels[value] == last for value in group.outputs)


def moving_widths(
    space: IterationSpace, rows: RowSpec, is_row: Sequence[bool], itemsizes: Sequence[int], aligned: Sequence[bool]
) -> dict[int, int]:
    """Return the widest access (``dense_width``) of each operand that a thread moves along from element to element.

    Args:
        space: the loop nest; operands are outputs first, counters last.
        rows: what is reduced of it.
        is_row: for each operand whether it is one per row.
        itemsizes: bytes of an element of each operand in memory.
        aligned: whether each of them starts at a multiple of VECTOR_BYTES.
    """
    return {
        slot: dense_width(space.strides[slot], rows.inner, itemsize, is_aligned)
        for slot, (itemsize, is_aligned) in enumerate(zip(itemsizes, aligned, strict=True))
        if space.strides[slot][rows.inner] and (rows.is_across or not is_row[slot])
    }


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
