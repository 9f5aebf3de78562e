"""How a CUDA kernel of running totals walks its operands: the threads of a row, and what each has of it at a time."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from fuser.access import GATHER_VECTOR, VECTOR_BYTES, Access, Tuning, Walk, dense_width
from fuser.kernel_spec import RowSpec
from fuser.layout import IterationSpace

__all__ = ["CHUNK", "plan_scan_walk"]

# Elements of a row that are taken at a time, in no order of torch's.
CHUNK = 1024
WARP, BLOCK, MAX_BLOCK = 32, 128, 256
# What a thread has of a row at most, and vectors at least; threads of all rows from which on a warp is enough for each.
# Measured on an H200.
MOST_BYTES, FEW_VECTORS, ENOUGH_THREADS = 128, 2, 1 << 18
# Of columns: elements that a thread reads ahead, and threads up to which each has one column.
AHEAD, FEW_THREADS = 8, 1 << 15


def plan_scan_walk(
    space: IterationSpace,
    rows: RowSpec,
    is_row: Sequence[bool],
    itemsizes: Sequence[int],
    aligned: Sequence[bool],
) -> Walk:
    """Decide how the operands of one call are read and written; arguments as of ``row_access.plan_row_walk``."""
    moving = [
        slot
        for slot, strides in enumerate(space.strides[: len(itemsizes)])
        if strides[rows.inner] and (rows.is_across or not is_row[slot])
    ]
    widths = {slot: dense_width(space.strides[slot], rows.inner, itemsizes[slot], aligned[slot]) for slot in moving}
    vector = VECTOR_BYTES // max((itemsizes[slot] for slot in moving), default=VECTOR_BYTES)
    if any(space.strides[slot][rows.inner] > 1 for slot in moving):
        vector = min(vector, GATHER_VECTOR)
    length, width = space.sizes[0], space.sizes[rows.reduced]
    count = prod(space.sizes[rows.reduced :])
    vector = min(vector, _above(width if rows.is_across else length))
    if rows.is_across:
        while vector > 1 and (count < FEW_THREADS * vector or width % vector):
            vector //= 2
        team = min(BLOCK, max(_above(-(-width // vector)), WARP))
        tuning = Tuning(block=team, unroll=AHEAD, team=team)
    else:
        chunk = rows.order.schedule.x if rows.order is not None else min(CHUNK, _above(length))
        steps = _above(-(-length // vector))
        most = MOST_BYTES // max([4, *(itemsizes[slot] for slot in moving)])
        unroll = max(min(steps // WARP, most // vector), min(FEW_VECTORS, steps), chunk // (WARP * vector))
        team = min(max(steps // unroll, 1), WARP)
        while team >= WARP and team * unroll < steps and team < MAX_BLOCK and count * team < ENOUGH_THREADS:
            team *= 2
        tuning = Tuning(block=max(team, BLOCK) if team <= WARP else team, unroll=unroll, team=team)
        whole = tuning.team * unroll * vector
        multiple = next((size for size in (whole, vector) if length % size == 0), 0)
        tuning = Tuning(block=tuning.block, unroll=unroll, team=team, multiple=multiple)
    accesses = tuple(Access(min(widths.get(slot, 1), vector)) for slot in range(len(space.strides)))
    return Walk(space, vector, accesses, tuning)


def _above(size: int) -> int:
    # The smallest power of two that is no less.
    return 1 << max(size - 1, 0).bit_length()
