"""How a CUDA kernel whose rows keep torch's order walks its operands: the threads of a row follow from the order."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from fuser.access import GATHER_VECTOR, VECTOR_BYTES, Access, Tuning, Walk, dense_width
from fuser.graph import FusionGroup
from fuser.kernel_spec import RowSpec
from fuser.layout import IterationSpace
from fuser.orders import RowOrder, Schedule
from fuser.row_space import count_accumulators, reduction_levels

__all__ = ["plan_ordered_walk"]

# Threads of a block where a row has fewer, and bytes of rows that the threads of a block keep in registers, of each
# at most.
BLOCK = 128
BLOCK_BYTES = 1 << 17
KEPT_BYTES = 512
# Bytes that a thread has in flight where rows are too long for that.
IN_FLIGHT_BYTES = 128
MAX_UNROLL = 8
# Of shared memory, for the accumulators of a block's threads.
SHARED_BYTES, ACCUMULATOR_BYTES = 48 * 1024, 8
# Bytes of a row that one of torch's threads keeps alone, and how many do it together otherwise.
WARP, SPLIT_BYTES, MAX_SPLIT = 32, 256, 4
# Threads that a GPU wants.
ENOUGH_THREADS = 1 << 16
# Of columns of which torch's threads take neighbouring elements: bytes of a row that a block reads, threads in all below
# which each has more in flight, blocks that a GPU wants, and elements for which it is worth to clear what they share.
SEGMENT, FEW_THREADS, ENOUGH_BLOCKS, MANY_ELEMENTS = 128, 8192, 256, 1 << 22


def plan_ordered_walk(
    group: FusionGroup,
    space: IterationSpace,
    rows: RowSpec,
    values: Sequence[int],
    itemsizes: Sequence[int],
    aligned: Sequence[bool],
) -> Walk:
    """Decide how the operands of one call are read and written.

    Args:
        group: the kernel's.
        space: the loop nest; operands are outputs first, counters last.
        rows: what is reduced of it.
        values: of the group, which each operand is, and each counter after them.
        itemsizes: bytes of an element of each operand.
        aligned: whether each operand starts at a multiple of VECTOR_BYTES.
    """
    order = rows.order
    assert order is not None, "it has one"
    is_row = [rows.is_row[value] for value in values]
    # The operand whose address says where vectors begin.
    source = values.index(order.source) if order.source >= 0 else -1
    moving = [
        slot
        for slot, strides in enumerate(space.strides[: len(itemsizes)])
        if strides[rows.inner] and (rows.is_across or not is_row[slot])
    ]
    # What the first pass reads stays in registers.
    first = _read_first(group)
    slots = [slot for slot in moving if slot >= len(group.outputs) and values[slot] in first]
    own = [itemsizes[slot] for slot in slots] or [4]
    if order.is_across:
        levels = reduction_levels(group)
        is_one_pass = max(levels) == 1 and all(rows.is_row[value] for value in group.outputs if levels[value])
        vector, tuning = _across(
            space, rows, max(own), order, is_one_pass=is_one_pass, accumulators=count_accumulators(group)
        )
    else:
        vector, tuning = _along(space, rows, own, order)
    widths = {slot: dense_width(space.strides[slot], rows.inner, itemsizes[slot], aligned[slot]) for slot in moving}
    if order.has_edges:
        # Rows begin anywhere, vectors where those of the source are aligned.
        length, kept = prod(space.sizes[: rows.reduced]), rows.reduced
        known = space.strides[source][kept:] if source >= 0 else _stacked(space.sizes[kept:], length)
        for slot in moving:
            strides = space.strides[slot][kept:]
            is_like = aligned[slot] and (source < 0 or aligned[source]) and space.strides[slot][0] == 1
            span = order.schedule.vector
            is_like = is_like and not any((a - b) % span for a, b in zip(strides, known, strict=True))
            widths[slot] = VECTOR_BYTES // itemsizes[slot] if is_like or slot == source else 1
    return Walk(
        space, vector, tuple(Access(min(widths.get(slot, 1), vector)) for slot in range(len(space.strides))), tuning
    )


def _read_first(group: FusionGroup) -> set[int]:
    # The inputs that reductions need that need no other one.
    levels, producers = reduction_levels(group), group.producers()
    stack = [
        value
        for item in group.applications
        if item.function.reduction and not any(levels[value] for value in item.tensors)
        for value in item.tensors
    ]
    found: set[int] = set()
    while stack:
        value = stack.pop()
        if value not in found:
            found.add(value)
            stack += group.applications[producers[value]].tensors if producers[value] >= 0 else ()
    return found


def _along(space: IterationSpace, rows: RowSpec, itemsizes: Sequence[int], order: RowOrder) -> tuple[int, Tuning]:
    bytes_per_element = sum(itemsizes)
    schedule = order.schedule
    team, vector = schedule.x * schedule.y, schedule.vector
    length, multiple = prod(space.sizes[: rows.reduced]), 0
    if schedule == Schedule(WARP, schedule.y, accumulators=1):
        # Of threads that take one element each, one does what neighbours do.
        vector = VECTOR_BYTES // max(itemsizes)
        count = prod(space.sizes[rows.reduced :])
        while vector > 1 and (count * team < ENOUGH_THREADS * vector or (rows.reduced > 1 and space.sizes[0] % vector)):
            vector //= 2
        team, multiple = team // vector, 0 if length % vector or vector == 1 else vector
    steps = -(-length // (vector * team * schedule.blocks))
    may_split = schedule.accumulators == vector and team == WARP
    if may_split and steps * vector * bytes_per_element > SPLIT_BYTES:
        # Where a thread would keep too much, several share its vectors, and its accumulators.
        # No access is narrower than a word.
        least = max(4 // min(itemsizes), 1)
        while vector > least and team < MAX_SPLIT * WARP and steps * vector * bytes_per_element > SPLIT_BYTES // 2:
            vector, team = vector // 2, team * 2
    threads = team // WARP
    if schedule.vector > 1 == schedule.accumulators and threads * steps * vector * bytes_per_element <= SPLIT_BYTES:
        # A warp does what several of torch's do, as far as its threads can keep what they read.
        team = WARP
    else:
        threads = 1
    block = max(team, BLOCK) if schedule.blocks == 1 else team
    most = min(KEPT_BYTES, BLOCK_BYTES // block) // (vector * bytes_per_element)
    if steps <= most and schedule.blocks == 1:
        # In eight sizes to a power of two.
        step = max((1 << max(steps - 1, 0).bit_length()) // 8, 1)
        unroll = max(-(-steps // step) * step, 1) * threads
        return vector, Tuning(block=block, unroll=unroll, team=team, is_resident=True, multiple=multiple)
    unroll = 1
    while unroll < MAX_UNROLL and 2 * unroll * vector * bytes_per_element <= IN_FLIGHT_BYTES:
        unroll *= 2
    # Elements go to a thread's accumulators in turn.
    unroll = max(unroll, schedule.accumulators if schedule.vector == 1 else 1)
    piece = int(schedule.blocks > 1)
    return vector, Tuning(block=block, unroll=unroll, team=team, piece=piece, multiple=multiple)


def _across(
    space: IterationSpace, rows: RowSpec, itemsize: int, order: RowOrder, *, is_one_pass: bool, accumulators: int
) -> tuple[int, Tuning]:
    width, threads = space.sizes[rows.reduced], order.schedule.y
    vector = min(VECTOR_BYTES // itemsize, MAX_UNROLL, 1 << max(width - 1, 0).bit_length())
    if any(operand[rows.inner] > 1 for operand in space.strides):
        vector = min(vector, GATHER_VECTOR)
    if order.schedule.vector > 1:
        # Few threads: more elements of each are in flight, and they spread over many blocks.
        unroll = order.schedule.vector
        if vector > 1 and width // vector * threads < FEW_THREADS:
            vector, unroll = vector // 2, 2 * unroll
        team = min(SEGMENT // (vector * itemsize), WARP) if threads > 1 else WARP
        team = min(team, 1 << max(-(-width // vector) - 1, 0).bit_length())
        blocks, piece = -(-width // (team * vector)), 1
        is_large = is_one_pass and prod(space.sizes[: rows.reduced]) * width >= MANY_ELEMENTS
        while is_large and blocks * piece < ENOUGH_BLOCKS and team * threads > WARP * piece and piece < threads:
            piece *= 2
        return vector, Tuning(block=team * threads // piece, unroll=unroll, team=team, piece=piece if piece > 1 else 0)
    team = min(max(BLOCK // threads, 32), 1 << max(-(-width // vector) - 1, 0).bit_length())
    while team * threads * vector * accumulators * ACCUMULATOR_BYTES > SHARED_BYTES and team > 1:
        team //= 2
    unroll = MAX_UNROLL if vector <= GATHER_VECTOR else order.schedule.accumulators
    return vector, Tuning(block=team * threads, unroll=unroll, team=team, piece=int(order.schedule.blocks > 1))


def _stacked(sizes: Sequence[int], length: int) -> tuple[int, ...]:
    strides = [length]
    for size in sizes[:-1]:
        strides.append(strides[-1] * size)
    return tuple(strides)
