"""Reductions along all dimensions but those of a kernel's rows, from the same walk over the elements.

The gradients of a norm are sums along rows and sums along columns of the same elements. A kernel whose blocks go from
row to row reads these once for both: each thread has the same columns of all its rows, and what they come to in
registers. So a block has a *piece* of each column, and another launch combines the pieces: one reduction becomes two.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import prod

import torch

from fuser.arg_spec import DescribedValue
from fuser.cxx.functor import parse_functor
from fuser.dtypes import dtype_info, is_continuous
from fuser.function import Function
from fuser.graph import FusionGroup, GroupBuilder
from fuser.kernel_spec import Typing
from fuser.layout import Shape, broadcast_shapes
from fuser.plain_texts import is_sum
from fuser.row_access import column_pieces
from fuser.row_space import lies_across

__all__ = ["cut_columns", "find_columns"]

_PIECE = "template <typename T> T piece(T x) { return x; }"


def find_columns(
    group: FusionGroup, values: Sequence[DescribedValue], fixed: Collection[int], processors: int
) -> dict[int, int]:
    """Return the reductions, as indices of applications, that a kernel over rows makes as well, and in how many pieces.

    Args:
        group: the group of a call on a GPU.
        values: what its values are.
        fixed: the reductions whose order is fixed.
        processors: multiprocessors of the GPU.
    """
    shapes = [item.desc.shape for item in values]
    # No dicts: symbols would be asked for their hash (fuser.sizes).
    found: list[tuple[Shape, tuple[int, ...], list[int]]] = []
    rows: list[tuple[Shape, tuple[int, ...], int]] = []
    for index, item in enumerate(group.applications):
        reduction = item.function.reduction
        if reduction is not None and not reduction.scans:
            shape = broadcast_shapes([shapes[value] for value in item.tensors])
            dims = reduction.normalize_dims(len(shape))
            rows.append((shape, dims, index))
            is_free = index not in fixed and is_sum(reduction.combine) and not reduction.counts
            if is_free and len(reduction.identity) == 1:
                rest = tuple(dim for dim in range(len(shape)) if dim not in dims)
                alike = (own for *key, own in found if key == [shape, rest])
                if (own := next(alike, None)) is not None:
                    own.append(index)
                else:
                    found.append((shape, rest, [index]))
    chosen: dict[int, int] = {}
    producers = group.producers()
    for shape, dims, columns in found:
        beside = {
            *(index for *key, index in rows if key == [shape, dims]),
            *(producers[v] for v in group.outputs if shapes[v] == shape),
        }
        given = [(item.desc, item.desc.dtype) for item in values[: len(group.inputs)]]
        # Numbers are no tensors of one element.
        full = [(desc, dtype.itemsize) for desc, dtype in given if dtype is not None and desc.shape == shape]
        is_along = full and not lies_across(shape, dims, [desc.strides for desc, _ in full])
        if is_along and beside - group.needing(columns) and not chosen.keys() & beside:
            sizes = [itemsize for _, itemsize in full]
            length = prod(shape[dim] for dim in dims)
            own = [_part_bytes(values[group.applications[index].tensors[0]].desc.dtype) for index in columns]
            pieces = column_pieces(length, prod(shape) // max(length, 1), sizes, own, processors)
            chosen |= dict.fromkeys(columns, pieces) if pieces else {}
    return chosen


def _part_bytes(dtype: torch.dtype | None) -> int:
    # What a sum of such elements takes in a kernel.
    return max(dtype.itemsize, 4) if dtype is not None and is_continuous(dtype) else 8


def cut_columns(group: FusionGroup, typing: Typing, pieces: Mapping[int, int]) -> tuple[FusionGroup, tuple[int, ...]]:
    """Put a reduction to pieces, and one of the pieces, in the place of each of some reductions.

    Args:
        group: the group.
        typing: of its values.
        pieces: of each such reduction, by its index.

    Returns:
        The group, and for each of its applications the one that it comes from.
    """
    builder, offsets = GroupBuilder(group.numerics), group.value_offsets()
    handles = [builder.add_input(item.name, is_scalar=item.is_scalar) for item in group.inputs]
    origins: list[int] = []
    for index, item in enumerate(group.applications):
        tensors, scalars = ([handles[value] for value in given] for given in (item.tensors, item.scalars))
        steps = [item.function]
        if index in pieces:
            dtypes = typing.values[offsets[index] : offsets[index] + item.function.num_outputs]
            steps = _steps(item.function, typing.common[index], dtypes, pieces[index])
        by_name = dict(zip((scalar.name for scalar in item.function.scalars), scalars, strict=True))
        for function in steps:
            own = [by_name[scalar.name] for scalar in function.scalars]
            tensors = list(builder.apply(function, tensors, own, item.name))
            origins.append(index)
        handles += tensors
    return builder.build([handles[value] for value in group.outputs]), tuple(origins)


def _steps(function: Function, common: torch.dtype, dtypes: Sequence[torch.dtype], pieces: int) -> list[Function]:
    reduction = function.reduction
    assert reduction is not None, "it is one"
    kept = dtype_info(common).compute_dtype
    first = reduction._replace(finish=None, accumulate=None, pieces=pieces)
    last = reduction._replace(accumulate=None, dims=(0,), keepdim=False)
    return [
        replace(function, reduction=first, out_dtypes=reduction.accumulators(kept)),
        Function(parse_functor(_PIECE), isolation=function.isolation, reduction=last, out_dtypes=tuple(dtypes)),
    ]
