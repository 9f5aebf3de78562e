"""How a CUDA kernel with reductions walks its operands: threads of a row, vectors of a thread, what stays in registers.

Row lengths count as the power of two above them, so that a kernel serves a class of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from fuser.access import (
    GATHER_VECTOR,
    STATIC_SHARED_BYTES,
    VECTOR_BYTES,
    Access,
    Tuning,
    Walk,
    counted_widths,
    dense_width,
    power_above,
    power_below,
)
from fuser.combining import BATCH, Reduction
from fuser.graph import FusionGroup
from fuser.kernel_spec import RowSpec
from fuser.layout import IterationSpace
from fuser.row_space import count_accumulators, has_one_pass, moving_widths

__all__ = [
    "MAX_CLUSTER", "ODD_ROW", "PARTS_BYTES", "RowLimits", "column_pieces", "most_kept", "persistent_blocks",
    "plan_row_walk", "stacked_bytes", "stretches",
]  # fmt: skip

WARP = 32
MAX_BLOCK = 1024
# Blocks of a cluster that every GPU has room for that has clusters at all; kernels have to ask for more.
MAX_CLUSTER = 8
# Bytes of a row that a thread keeps in registers.
KEPT_BYTES = 128
MAX_UNROLL = 8
# And of a row that blocks share, where a processor is full of threads; threads of a block at least. Measured on H200.
SHARED_BYTES, SHARED_TEAM = 64, 512
# Batches of a row that a block of a cluster may have: the fewer, the more blocks fill each other's pauses.
SHARED_BATCHES = (1, 2, 4)
# Blocks that share a row which no block can hold: bytes of it that each is to have, and the threads of those that have
# more than so many, or read them from the cache when they read them again. Bytes that a thread reads side by side, also
# from the cache. Measured on an H200. Elements of a row at most, and accumulators: parts of all wait in shared memory.
STRETCH_BYTES, LONG_STRETCH_BYTES = 50_000, 66_000
STRETCHING_BLOCK = 512
HOLDING_BYTES, STRETCHING_BYTES = 64, 128
MOST_STRETCHED, MOST_STRETCHED_ACCUMULATORS = 1 << 20, 4
# Elements of a row that a thread computes with, pass by pass.
KEPT_ELEMENTS = 64
# More of them than this are many.
LONG_SHARE = 32
# Rows of so many elements are short, of which a thread has few bytes.
SHORT_ROW, SHORT_BYTES = 256, 64
# Rows up to which vectors of half the length are worth it where those are whole, or single elements where no vectors
# are, of which a thread keeps so many. Measured on an H200.
EVEN_ROW, ODD_ROW, ODD_UNROLL = 8192, 1024, 32
# Rows of words, where they begin between vectors, that are taken as such if they are shorter than the first of these,
# or longer than the second and no longer than the third. Measured on an H200.
WORDS = 64, 256, 512
# Fewer blocks leave some of a large GPU's processors idle: they share rows then. Of those that have rows side by side
# this many run at a time. Tiles that read memory as fast as more of them do, which have more pieces to add up: measured
# on an H100.
ENOUGH_BLOCKS = 512
ENOUGH_TILES = 132
# Elements of a row that a block takes at least.
SHORTEST_PIECE = 512
# Bytes that a thread reads side by side where its rows are neighbours.
IN_FLIGHT_BYTES = 128
# Results of columns that the threads of a block keep, which goes from row to row, and how many threads it has where
# they have a row together at most: the more there are, the fewer pieces. Measured on an H100.
MOST_COLUMNS = 1 << 14
PERSISTENT_BLOCK = 384
# Vectors that a thread has at most; bytes of shared memory for what a block's rows come to, beside that where its teams
# add up what they have of columns.
MOST_PERSISTENT, PARTS_BYTES = 4, 2 << 10
# Threads of a multiprocessor that have registers for one vector of each operand, or for several: where a block has one
# long row, and elsewhere. Measured on an H200.
PERSISTENT_THREADS = ((1152, 640), (1024, 512))
# Threads that walk over a row of which all that they ask for is read elsewhere, and vectors that each has in flight.
# Measured on an H200.
STREAMING_BLOCK, STREAMING_UNROLL = 512, 4
# The same where powers are added up in one walk.
POWERS_BLOCK, POWERS_UNROLL = 256, 8
# Rows that are worth a second piece on a processor.
ROWS_OF_TEAM = 4
# Elements of rows that lie side by side for which a block is enough.
FEW_TO_ADD = 2048
# And for which a thread is.
FEW_TO_SHARE = 32
# Rows of a block that takes one element of each.
PICKERS = 128
# Accumulators that wait in shared memory for the other threads of a block, a few bytes each; and of the largest type
# for which there is room.
MAX_WAITING, MOST_WAITING = 2048, 3072


class RowLimits(NamedTuple):
    """What a device has for kernels with reductions."""

    # Shared memory that a block may hold a row in.
    shared_bytes: int
    # How many blocks may share a row and write to each other's shared memory; 1 where none do.
    clusters: int
    # How many multiprocessors it has.
    processors: int = 132
    # As ``clusters``, of blocks that take no more than half of a multiprocessor.
    halves: int = 1


def plan_row_walk(
    group: FusionGroup,
    space: IterationSpace,
    rows: RowSpec,
    values: Sequence[int],
    itemsizes: Sequence[int],
    aligned: Sequence[bool],
    limits: RowLimits,
) -> Walk:
    """Decide how the operands of one call with reductions are read and written.

    Args:
        group: the kernel's.
        space: the loop nest; operands are outputs first, counters last.
        rows: what is reduced of it.
        values: of the group, which each operand is, and each counter after them.
        itemsizes: bytes of an element of each operand.
        aligned: whether each operand starts at a multiple of VECTOR_BYTES.
        limits: the device's.
    """
    inner, is_row = rows.inner, [rows.is_row[value] for value in values]
    producers = group.producers()
    makers = [group.applications[producers[value]].function.reduction for value in group.outputs]
    pieces = {slot for slot, reduction in enumerate(makers) if reduction and reduction.pieces}
    widths = moving_widths(space, rows, is_row, itemsizes, aligned)
    widths = {slot: width for slot, width in widths.items() if slot not in pieces}
    moving = [*widths]
    # Places that a reduction takes are compared: neighbours are one and the next, not what differs in some bits.
    added = [item for item in group.applications if item.function.reduction and item.function.reduction.order != "pick"]
    taken = {value for item in added for value in item.tensors}
    counted = {} if pieces else counted_widths(space, len(itemsizes), inner)
    widths |= {slot: width for slot, width in counted.items() if values[slot] not in taken}
    wide = [itemsizes[slot] for slot in moving if not is_row[slot]] or [itemsizes[slot] for slot in moving]
    widest = max(wide, default=VECTOR_BYTES)
    vector = VECTOR_BYTES // widest
    if any(space.strides[slot][inner] > 1 for slot in moving if not is_row[slot]):
        vector = min(vector, GATHER_VECTOR)
    vector = min(vector, power_above(space.sizes[inner]))
    may_share = has_one_pass(group, rows)
    if rows.is_across:
        read_bytes = sum(itemsizes[slot] for slot in moving if slot >= len(group.outputs) and not is_row[slot])
        vector, tuning = _across(space, rows, vector, count_accumulators(group), read_bytes, may_share=may_share)
    else:
        vector = _vector_along(space, rows, vector, widest, stays_wide=bool(pieces) or may_share)
        for slot in pieces:
            length = prod(space.sizes[: rows.reduced])
            widths[slot] = dense_width((*space.strides[slot], length), inner, itemsizes[slot], aligned[slot])
        # What every row has of its own, and is read.
        outer = [any(space.strides[slot][rows.reduced :]) or prod(space.sizes[rows.reduced :]) == 1 for slot in moving]
        own = [slot for slot, is_own in zip(moving, outer, strict=True) if slot >= len(group.outputs) and is_own]
        read_bytes = sum(itemsizes[slot] for slot in own)
        # A kernel that holds its rows holds all that it reads again.
        held_bytes = sum(itemsizes[slot] for slot in moving if slot >= len(group.outputs))
        limits = limits._replace(shared_bytes=limits.shared_bytes * read_bytes // max(held_bytes, 1))
        tuning = _tune_along(group, space, rows, vector, read_bytes, limits)
        word = max(4 // widest, 1)
        narrowest = min((widths[slot] for slot in moving if not is_row[slot]), default=vector)
        if not (pieces or may_share) and rows.reduced == 1 and 1 < word <= narrowest <= vector // 4:
            words = _tune_along(group, space, rows, word, read_bytes, limits)
            if _are_fuller(words, word, tuning, vector, space.sizes[0]):
                vector, tuning = word, words
        chunk = tuning.team * tuning.unroll * vector
        multiple = _multiple(prod(space.sizes[: rows.reduced]), vector, tuning)
        is_straight = rows.reduced > 1 and multiple == chunk * tuning.sharers and space.sizes[0] % chunk == 0
        tuning = tuning._replace(multiple=multiple, is_straight=is_straight)
    shared = {slot for slot in moving if not any(space.strides[slot][rows.reduced :])}
    accesses = tuple(
        Access(min(widths.get(slot, 1), vector), is_shared=slot in shared) for slot in range(len(space.strides))
    )
    return Walk(space, vector, accesses, tuning)


def stretches(length: int, vector: int, limits: RowLimits) -> bool:
    """Return whether blocks may go over a row of several passes together, which no block can hold.

    Args:
        length: elements of the row.
        vector: elements that lie side by side.
        limits: the device's.
    """
    # Each has whole batches.
    return limits.halves > 1 and vector >= GATHER_VECTOR and BATCH < length <= MOST_STRETCHED


def most_kept(vector: int, itemsize: int, clusters: int) -> int:
    """Return how many elements of a row registers hold from pass to pass, of one operand.

    Args:
        vector: elements that lie side by side.
        itemsize: bytes of each.
        clusters: how many blocks may share a row.
    """
    return clusters * min(MAX_BLOCK * _most_unroll(vector, itemsize) * vector, SHARED_BATCHES[-1] * BATCH)


def _most_unroll(vector: int, bytes_per_element: int) -> int:
    # Vectors of a thread: what there is per element between passes takes registers, too.
    most = power_below(KEPT_BYTES // max(vector * bytes_per_element, 1))
    return min(most, max(KEPT_ELEMENTS // vector, 1), ODD_UNROLL if vector == 1 else MAX_UNROLL)


def _vector_along(space: IterationSpace, rows: RowSpec, vector: int, itemsize: int, *, stays_wide: bool) -> int:
    # How many elements of a row lie side by side; ``itemsize``: the largest.
    length, half = prod(space.sizes[: rows.reduced]), vector // 2
    # A short row of whole vectors is worth shorter ones.
    if length <= EVEN_ROW and length % vector and half and length % half == 0 and half * itemsize >= 8:
        vector = half
    if length <= ODD_ROW and length % 2 and not stays_wide:
        # To put vectors together takes longer than to read what few threads share.
        vector = 1
    # A vector's elements lie beside each other.
    while rows.reduced > 1 and space.sizes[0] % vector:
        vector //= 2
    return vector


def _tune_along(
    group: FusionGroup, space: IterationSpace, rows: RowSpec, vector: int, bytes_per_element: int, limits: RowLimits
) -> Tuning:
    reductions = _reductions(group)
    if _only_picks(group, rows):
        return Tuning(block=PICKERS, team=1, is_resident=True)
    if any(reduction.pieces for reduction in reductions):
        return _persistent(prod(space.sizes[: rows.reduced]), vector)
    if any(reduction.order == "powers" for reduction in reductions):
        return _streaming(vector, POWERS_BLOCK, POWERS_UNROLL)
    may_share, accumulators = has_one_pass(group, rows), count_accumulators(group)
    combines = not all(reduction.order == "pick" for reduction in reductions)
    return _along(space, rows, vector, accumulators, bytes_per_element, limits, may_share=may_share, combines=combines)


def _are_fuller(words: Tuning, word: int, vectors: Tuning, vector: int, length: int) -> bool:
    # Whether threads that take words have less to do in vain than those that put vectors together from what lies
    # around them.
    if not (words.is_resident and vectors.is_resident) or words.cluster > 1 or vectors.cluster > 1:
        return False
    taken, other = words.team * words.unroll * word, vectors.team * vectors.unroll * vector
    is_better = length < WORDS[0] or WORDS[1] < length <= WORDS[2]
    return is_better or 10 * taken <= 9 * other


def _multiple(length: int, vector: int, tuning: Tuning) -> int:
    # No bounds are checked where there are none to cross.
    whole = tuning.team * tuning.unroll * vector * tuning.sharers
    return next((size for size in (whole, vector) if length and length % size == 0), 0)


def _only_picks(group: FusionGroup, rows: RowSpec) -> bool:
    # Whether one element of a row is all that is read: nobody walks for it.
    is_alone = all(rows.is_row[value] for value in group.outputs)
    return is_alone and all(reduction.order == "pick" for reduction in _reductions(group))


def _reductions(group: FusionGroup) -> list[Reduction]:
    return [item.function.reduction for item in group.applications if item.function.reduction]


def _along(
    space: IterationSpace,
    rows: RowSpec,
    vector: int,
    accumulators: int,
    bytes_per_element: int,
    limits: RowLimits,
    *,
    may_share: bool,
    combines: bool,
) -> Tuning:
    length = prod(space.sizes[: rows.reduced])
    if may_share and length > 2 * BATCH and prod(space.sizes[rows.reduced :]) < ENOUGH_BLOCKS:
        # Blocks have a batch each, so short that others have much on its way while one of them ends.
        unroll = min(max(power_below(SHARED_BYTES // max(vector * bytes_per_element, 1)), 1), MAX_UNROLL)
        team = min(max(BATCH // (vector * unroll), SHARED_TEAM), MAX_BLOCK)
        return Tuning(block=team, unroll=BATCH // (vector * team), team=team, piece=BATCH)
    # A single pass wants many threads.
    is_light = may_share and accumulators == 1
    most = _most_unroll(vector, bytes_per_element)
    most = min(most, 4) if is_light else most
    steps = -(-length // vector)
    if steps <= WARP * most:
        return _short(length, vector, bytes_per_element, most)
    if not combines:
        # Nobody waits for others: a row's elements come one after another.
        unroll = min(most, STREAMING_UNROLL)
        team = min(_team(steps, unroll), STREAMING_BLOCK)
        return Tuning(block=team, unroll=unroll, team=team)
    # The fewer threads of a row wait for each other, the better, and the fewer have nothing to do.
    unroll = min((most, max(most // 2, 1)), key=lambda unroll: unroll * _team(steps, unroll))
    if is_light and 4 * most * _team(steps, most) <= 5 * unroll * _team(steps, unroll):
        # What is on its way counts for more.
        unroll = most
    team = _team(steps, unroll)
    alone = Tuning(block=team, unroll=unroll, team=team, is_resident=True)
    if team <= (MAX_BLOCK // 2 if may_share else MAX_BLOCK // 4):
        return alone
    is_few = accumulators <= MOST_STRETCHED_ACCUMULATORS
    is_stretched = not may_share and is_few and stretches(length, vector, limits)
    if not may_share:
        # Other blocks have to fill a block's pauses: those of clusters are shorter. They have whole batches each, the
        # fewer the better, but several warps; few threads of a light block have nothing to do.
        is_long = unroll * vector > LONG_SHARE and limits.clusters > 1
        for batches in SHARED_BATCHES:
            share = batches * BATCH // (most * vector)
            blocks = -(-length // (batches * BATCH))
            is_full = is_long or team > MAX_BLOCK or 5 * length >= 4 * blocks * batches * BATCH
            if is_full and blocks <= limits.clusters and 8 * WARP <= share <= MAX_BLOCK:
                if is_stretched and rows.reduced > 1 and share > STRETCHING_BLOCK // 2:
                    # Small blocks that hold planes are faster than large ones that keep them.
                    return _stretched(length, vector, bytes_per_element, limits)
                return Tuning(block=share, unroll=most, team=share, is_resident=True, cluster=blocks)
        if team <= MAX_BLOCK and not is_long:
            return alone
    held = None if may_share or vector < GATHER_VECTOR else _held(length, vector, bytes_per_element, limits)
    if held is not None:
        return held
    if is_stretched:
        return _stretched(length, vector, bytes_per_element, limits)
    return _streaming(vector, MAX_BLOCK // 2, 4)


def _short(length: int, vector: int, bytes_per_element: int, most: int) -> Tuning:
    # What there is to do for a row is shared by few threads, of at most so many vectors, if it is not one of each.
    steps = -(-length // vector)
    is_shared = WARP // 4 < steps <= WARP or (vector == 1 and length <= SHORT_ROW)
    unroll = max(min(most, 4, SHORT_BYTES // max(vector * bytes_per_element, 1)), 1) if is_shared else 1
    while unroll * unroll > power_above(steps):
        # As many threads as each has vectors: one for the sum of each.
        unroll //= 2
    team = min(power_above(-(-steps // unroll)), WARP)
    return Tuning(block=256, unroll=power_above(-(-steps // team)), team=team, is_resident=True)


def _held(length: int, vector: int, bytes_per_element: int, limits: RowLimits) -> Tuning | None:
    # Chunks are whole batches. A row that takes more than half of a processor's shared memory has all its threads.
    for team in (MAX_BLOCK // 2, MAX_BLOCK):
        unroll = max(BATCH // (team * vector), 4 * (MAX_BLOCK // 2) // team)
        chunk = team * vector * unroll
        if -(-length // chunk) * chunk * bytes_per_element <= limits.shared_bytes * team // MAX_BLOCK:
            return Tuning(block=team, unroll=unroll, team=team, is_held=True)
    return None


def _stretched(length: int, vector: int, bytes_per_element: int, limits: RowLimits) -> Tuning:
    # Blocks go over a row together, and several of a processor fill each other's pauses: few rows are under way at a
    # time, and what is read again is in shared memory, or still in the cache.
    blocks = min(max(-(-length * bytes_per_element // STRETCH_BYTES), 2), limits.halves)
    own_bytes = -(-length // blocks) * bytes_per_element
    team = STRETCHING_BLOCK if own_bytes > LONG_STRETCH_BYTES else STRETCHING_BLOCK // 2
    in_flight = HOLDING_BYTES if own_bytes <= limits.shared_bytes // 2 else STRETCHING_BYTES
    unroll = max(power_below(in_flight // max(vector * bytes_per_element, 1)), BATCH // (team * vector))
    stretch = _stretch(length, blocks, team * unroll * vector)
    # As much is on its way as there may be, but for blocks that would have nothing to do.
    while team * unroll * vector > BATCH and 9 * stretch * blocks > 10 * length:
        unroll //= 2
        stretch = _stretch(length, blocks, team * unroll * vector)
    is_held = stretch * bytes_per_element <= limits.shared_bytes // 2
    blocks = -(-length // stretch)
    return Tuning(block=team, unroll=unroll, team=team, is_held=is_held, cluster=blocks, stretch=stretch)


def _stretch(length: int, blocks: int, chunk: int) -> int:
    # Elements of each of so many blocks: whole chunks.
    return -(-length // (blocks * chunk)) * chunk


def _streaming(vector: int, block: int, unroll: int) -> Tuning:
    # Chunks are whole batches.
    team = MAX_BLOCK if vector < GATHER_VECTOR else block
    return Tuning(block=team, unroll=max(BATCH // (team * vector), unroll), team=team)


def _persistent(length: int, vector: int) -> Tuning:
    # A thread keeps what its columns come to, from row to row: few vectors', so that much of other rows is on its way.
    steps, found = -(-length // vector), []
    for unroll in (2, 1, 4, 8, 16, 32):
        # Threads that take so many vectors: less than a warp, or whole ones.
        team = -(-steps // unroll)
        team = power_above(team) if team <= WARP else _team(steps, unroll)
        block = team * power_below(PERSISTENT_BLOCK // team)
        found.append(Tuning(block=block, unroll=unroll, team=team, is_resident=True))
    # Of as many rows at a time those whose threads all have something.
    best = max(found[:2], key=lambda tuning: (_rows_at_a_time(tuning), -tuning.team * tuning.unroll))
    return next(tuning for tuning in (best, *found[2:]) if persistent_blocks(tuning))


def _rows_at_a_time(tuning: Tuning) -> int:
    return persistent_blocks(tuning) * (tuning.block // tuning.team)


def persistent_blocks(tuning: Tuning) -> int:
    """Return how many blocks a multiprocessor has registers for, where threads keep what their columns come to."""
    light, heavy = PERSISTENT_THREADS[tuning.block > tuning.team or tuning.block <= PERSISTENT_BLOCK]
    return (light if tuning.unroll == 1 else heavy) // tuning.block


def stacked_bytes(tuning: Tuning, vector: int, part_bytes: Sequence[int]) -> int:
    """Return the shared memory in which a block's teams add up what their columns come to.

    Args:
        tuning: the kernel's.
        vector: elements that lie side by side.
        part_bytes: what each result of a column takes.
    """
    return tuning.block * vector * sum(part_bytes) if tuning.block > tuning.team else 0


def column_pieces(length: int, rows: int, itemsizes: Sequence[int], part_bytes: Sequence[int], processors: int) -> int:
    """Return into how many pieces columns are cut by a kernel that makes them beside its rows; 0: it does not.

    Args:
        length: elements of a row.
        rows: how many there are.
        itemsizes: of the tensors of such elements.
        part_bytes: what each result of a column takes.
        processors: of the GPU.
    """
    vector = VECTOR_BYTES // max(itemsizes)
    if length < WARP or length * len(part_bytes) > MOST_COLUMNS:
        return 0
    tuning = _persistent(length, vector)
    if tuning.unroll > MOST_PERSISTENT or stacked_bytes(tuning, vector, part_bytes) > STATIC_SHARED_BYTES - PARTS_BYTES:
        return 0
    most = rows // (tuning.block // tuning.team)
    if most < processors:
        return 0
    # A number of the group that is made, also where sizes are symbols.
    return processors * int(max(min(persistent_blocks(tuning), most // (ROWS_OF_TEAM * processors)), 1))


def _team(steps: int, unroll: int) -> int:
    # Threads that take so many vectors: warps in eight sizes to a power of two.
    warps = -(-steps // (unroll * WARP))
    step = max(power_above(warps) // 16, 1)
    return -(-warps // step) * step * WARP


def _across(
    space: IterationSpace, rows: RowSpec, vector: int, accumulators: int, bytes_per_element: int, *, may_share: bool
) -> tuple[int, Tuning]:
    length, width = prod(space.sizes[: rows.reduced]), space.sizes[rows.reduced]
    count = prod(space.sizes[rows.reduced :])
    # Each of a thread's rows has parts that wait for others. All threads have whole vectors: to ask what each has keeps
    # those behind waiting.
    vector = min(vector, GATHER_VECTOR)
    while vector > 1 and (vector * accumulators > 2 * GATHER_VECTOR or width % vector):
        vector //= 2
    block = 256
    while block > WARP and block * vector * accumulators > MAX_WAITING:
        block //= 2
    unroll = min(max(power_below(IN_FLIGHT_BYTES // max(vector * bytes_per_element, 1)), 4), 16)
    if length <= FEW_TO_SHARE:
        # A thread has a row's elements alone.
        team = block = min(block, power_above(-(-count // vector)))
    else:
        team = min(WARP, power_above(-(-count // vector)))
        # As many threads of a batch as have several elements each.
        block = min(block, team * max(power_above(min(length, BATCH)) // 8, 1))
    # Narrower vectors, and more threads for each row, where there is little for each.
    most = MAX_BLOCK // 2 if length > FEW_TO_SHARE else block
    while most > block and most * accumulators > MOST_WAITING:
        most //= 2
    while length <= FEW_TO_ADD and (vector > 1 or block < most):
        if -(-count // (team * vector)) >= ENOUGH_BLOCKS // 4:
            break
        vector = max(vector // 2, 1)
        block = min(2 * block, most)
    tiles = -(-count // (team * vector))
    may_share = may_share and length > FEW_TO_ADD
    piece = 0
    if may_share and tiles < ENOUGH_TILES and length > SHORTEST_PIECE:
        piece = BATCH
        while piece > SHORTEST_PIECE and tiles * -(-length // piece) < ENOUGH_TILES:
            piece //= 2
    # What a thread has of a batch.
    unroll = min(unroll, max(power_above(-(-min(piece or BATCH, length) // (block // team))), 4))
    return vector, Tuning(block=block, unroll=unroll, team=team, piece=piece)
