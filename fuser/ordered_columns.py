"""Columns beside the rows of a kernel, in torch's orders: the gradients of a norm's weights with that of its input.

Of a column 32 of torch's threads add runs of eight rows in turn; those of a row's 128 threads are four warps. So 32
clusters of four blocks keep both orders (fuser.cuda.rows_columns_ordered), and what clusters have is combined by
halves, in another launch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from fuser.arg_spec import DescribedValue
from fuser.graph import FusionGroup
from fuser.ordered_access import RUN
from fuser.orders import RowOrder, Schedule
from fuser.row_access import RowLimits
from fuser.row_space import reduction_levels

__all__ = ["find_ordered_columns", "orders_of_pieces"]

# How torch's kernels take rows, and many rows' columns; and how pieces are combined.
_ROWS = RowOrder(Schedule(32, 4, accumulators=1, vector=4))
_COLUMNS = RowOrder(Schedule(1, 32, accumulators=1, vector=RUN), is_across=True)
_HALVES = RowOrder(Schedule(1, 32, accumulators=1), is_across=True)
# Elements of a row that the threads of a cluster take, one of each, and how many rows have that order of columns.
STEP, LEAST_ROWS = 1024, 256


def find_ordered_columns(
    group: FusionGroup, values: Sequence[DescribedValue], orders: Mapping[int, RowOrder | None], limits: RowLimits
) -> dict[int, int]:
    """Return the reductions of columns that a kernel over rows makes as well, and in how many pieces.

    Args:
        group: the group of a call on a GPU.
        values: what its values are.
        orders: of its reductions.
        limits: the GPU's.
    """
    reductions = {index: item for index, item in enumerate(group.applications) if item.function.reduction}
    columns, rows = (
        [index for index in reductions if (order := orders.get(index)) and order.schedule == wanted.schedule]
        for wanted in (_COLUMNS, _ROWS)
    )
    if not columns or not rows or len(columns) + len(rows) < len(reductions) or limits.clusters < _ROWS.schedule.y:
        return {}
    shapes = [item.desc.shape for item in values]
    shape = shapes[reductions[rows[0]].tensors[0]]
    if any(type(size) is not int for size in shape):
        return {}
    levels, last = reduction_levels(group), len(shape) - 1
    for index, item in reductions.items():
        assert item.function.reduction is not None, "it is one"
        dims = item.function.reduction.normalize_dims(len(shape))
        is_like = dims == ((last,) if index in rows else tuple(range(last)))
        if not is_like or any(levels[value] for value in item.tensors):
            return {}
    # What columns are made of waits in shared memory: elements of each row, or what rows have.
    needed = _sources(group, [value for index in columns for value in reductions[index].tensors])
    full = [values[value].desc for value in group.used_inputs() if shapes[value] == shape]
    is_plain = all(shapes[value] == shape or shapes[value][-1:] in ((), (1,)) for value in needed)
    is_dense = all(item.strides[-1] == 1 and item.is_aligned for item in full)
    held_bytes = sum(item.dtype.itemsize for item in full if item.dtype is not None)
    fits = 3 * RUN * (shape[-1] // _ROWS.schedule.y) * held_bytes <= limits.shared_bytes
    is_long = shape[-1] % STEP == 0 and prod(shape[:-1]) >= LEAST_ROWS
    return dict.fromkeys(columns, _COLUMNS.schedule.y) if is_plain and is_dense and fits and is_long else {}


def orders_of_pieces(
    sources: Sequence[int], orders: Mapping[int, RowOrder | None], pieces: Mapping[int, int]
) -> dict[int, RowOrder | None]:
    """Return the orders of a group that ``cut_columns`` made of one, from which its applications come."""
    found: dict[int, RowOrder | None] = {}
    for index, source in enumerate(sources):
        if source in pieces:
            found[index] = _HALVES if index and sources[index - 1] == source else _ROWS
        elif source in orders:
            found[index] = orders[source]
    return found


def _sources(group: FusionGroup, values: Sequence[int]) -> set[int]:
    # The inputs that some values are made of.
    producers, found, stack = group.producers(), set[int](), list(values)
    while stack:
        value = stack.pop()
        maker = producers[value]
        found |= {value} if maker < 0 else set()
        stack += group.applications[maker].tensors if maker >= 0 else ()
    return found
