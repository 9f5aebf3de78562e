"""How a CUDA kernel of running totals walks its operands: the threads of a row, and what each has of it at a time."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from fuser.access import GATHER_VECTOR, VECTOR_BYTES, Access, Tuning, Walk, power_above
from fuser.kernel_spec import RowSpec
from fuser.layout import IterationSpace
from fuser.row_space import moving_widths

__all__ = ["CHUNK", "plan_scan_walk"]

# Elements of a row that are taken at a time, in no order of torch's.
CHUNK = 1024
WARP, BLOCK, MAX_BLOCK = 32, 128, 256
# What a thread has of a row at most, and vectors at least; threads of a row at least, where it has them; and threads of
# all rows that a GPU wants, by the bytes of an element: those of a row repeat what they add from chunk to chunk.
MOST_BYTES, FEW_VECTORS, FEW_THREADS = 128, 2, 8
ENOUGH_THREADS, ENOUGH_OF_WIDE, WIDE_BYTES = 1 << 17, 1 << 18, 4
# Of columns: elements that a thread reads ahead, and threads up to which each has one column.
AHEAD, FEW_COLUMNS = 32, 1 << 15


def plan_scan_walk(
    space: IterationSpace,
    rows: RowSpec,
    is_row: Sequence[bool],
    itemsizes: Sequence[int],
    aligned: Sequence[bool],
) -> Walk:
    """Decide how the operands of one call are read and written; arguments as of ``row_access.plan_row_walk``."""
    widths = moving_widths(space, rows, is_row, itemsizes, aligned)
    vector = VECTOR_BYTES // max((itemsizes[slot] for slot in widths), default=VECTOR_BYTES)
    if any(space.strides[slot][rows.inner] > 1 for slot in widths):
        vector = min(vector, GATHER_VECTOR)
    length, width = space.sizes[0], space.sizes[rows.reduced]
    count = prod(space.sizes[rows.reduced :])
    vector = min(vector, power_above(width if rows.is_across else length))
    if rows.is_across:
        while vector > 1 and (count < FEW_COLUMNS * vector or width % vector):
            vector //= 2
        team = min(BLOCK, max(power_above(-(-width // vector)), WARP))
        tuning = Tuning(block=team, unroll=AHEAD, team=team)
    else:
        chunk = rows.order.schedule.x if rows.order is not None else min(CHUNK, power_above(length))
        steps, widest = power_above(-(-length // vector)), max((itemsizes[slot] for slot in widths), default=1)
        # What is read in small pieces is read by more threads, whose pieces lie closer together.
        least = FEW_THREADS * (2 if any(width < vector for width in widths.values()) else 1)
        team = min(max(least, chunk // vector), max(steps // FEW_VECTORS, 1), WARP)
        most = MOST_BYTES // max(widest, 4) // vector
        unroll = max(min(steps // team, most), chunk // (team * vector), 1)
        enough = ENOUGH_OF_WIDE if widest >= WIDE_BYTES else ENOUGH_THREADS
        while team * unroll < steps and team < MAX_BLOCK and count * team < enough:
            team *= 2
        multiple = next((size for size in (team * unroll * vector, vector) if length % size == 0), 0)
        block = BLOCK if team <= WARP else team
        tuning = Tuning(block=block, unroll=unroll, team=team, multiple=multiple)
    accesses = tuple(Access(min(widths.get(slot, 1), vector)) for slot in range(len(space.strides)))
    return Walk(space, vector, accesses, tuning)
