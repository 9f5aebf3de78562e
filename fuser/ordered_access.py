"""How a CUDA kernel whose rows keep torch's order walks its operands: the threads of a row follow from the order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from math import prod

from fuser.access import GATHER_VECTOR, VECTOR_BYTES, Access, Tuning, Walk, counted_widths, power_above, power_below
from fuser.graph import FusionGroup
from fuser.kernel_spec import RowSpec
from fuser.layout import IterationSpace
from fuser.orders import RowOrder, Schedule
from fuser.row_space import count_accumulators, has_one_pass, moving_widths, reduction_levels

__all__ = ["plan_ordered_walk", "step_of", "waiting_parts", "warps_beside"]

# Threads of a block where a row has fewer, and at most; bytes of rows that the threads of a block keep in registers, of
# each at most.
BLOCK, MAX_BLOCK = 128, 1024
BLOCK_BYTES = 1 << 17
KEPT_BYTES = 512
# Bytes that a thread has in flight where rows are too long for that.
IN_FLIGHT_BYTES = 128
MAX_UNROLL = 8
# Of the shared memory that every block has, for what passes keep.
SPARE_BYTES = 44 * 1024
# Of shared memory, for the accumulators of a block's threads.
SHARED_BYTES, ACCUMULATOR_BYTES, MOMENTS = 48 * 1024, 8, 3
# Bytes of a row that one of torch's threads keeps alone, and how many do it together otherwise.
WARP, SPLIT_BYTES, MAX_SPLIT = 32, 256, 4
# Where a thread may have several of torch's: bytes of all that it stands for, and elements at least and at most;
# elements where a warp has a row, and where so few threads have single ones of several operands; of a block that could
# share its row, threads at least and at most, and bytes of it (of losses, measured on an H200).
SPREAD_BYTES, LEAST_SPREAD, MOST_SPREAD, FEW_ELEMENTS = 128, 32, 64, 8
# The most where all of them are single elements of two bytes, or some are. Measured on an H200.
MOST_SINGLE, MOST_WITH_SINGLES = 40, 48
LONE_ELEMENTS, LONE_TEAM = 4, 16
LEAST_TEAM, MOST_TEAM, CLUSTER_BYTES, SMALL_BYTES = 64, 256, 1 << 16, 36 << 10
# Of few rows whose elements each of torch's threads adds one after another: blocks that share one at most, threads of
# each, elements from which they do, in rounds of torch's threads, and rows up to which.
MOST_PIECES, CHAIN_BLOCK, LONG_CHAIN, FEW_CHAINS = 128, 288, 16, 64
# Bytes that a thread of such a block puts into shared memory for each tile, of which there are two.
CHAIN_BYTES = 64
# Bytes of a row that a thread reads at once where a later pass needs part of them.
EARLY_BYTES = 512
# Vectors and bytes that a thread reads which does the work of several of torch's, and lanes of a warp of torch's that
# are threads of their own.
FEW_VECTORS, FEW_BYTES, LANES = 12, 384, 8
# Threads that a GPU wants, and how many processors share them; elements that one keeps where each takes its time, and
# bytes that no access should be below.
ENOUGH_THREADS, PROCESSORS, MOST_ELEMENTS, WORD = 1 << 16, 128, 32, 4
# Of columns whose elements torch's threads take in runs: bytes of a row that a block reads, threads in all up to which
# each has more in flight, and how many at most; blocks that a GPU wants, and elements, or elements of a
# column, for which it is worth to clear what they share.
SEGMENT, FEW_THREADS, MOST_ROWS, ENOUGH_BLOCKS, MANY_ELEMENTS, LONG_COLUMN = 128, 1 << 14, 32, 256, 1 << 21, 2048


def plan_ordered_walk(
    group: FusionGroup,
    space: IterationSpace,
    rows: RowSpec,
    values: Sequence[int],
    itemsizes: Sequence[int],
    aligned: Sequence[bool],
    clusters: int,
) -> Walk:
    """Decide how the operands of one call are read and written.

    Args:
        group: the kernel's.
        space: the loop nest; operands are outputs first, counters last.
        rows: what is reduced of it.
        values: of the group, which each operand is, and each counter after them.
        itemsizes: bytes of an element of each operand.
        aligned: whether each operand starts at a multiple of VECTOR_BYTES.
        clusters: how many blocks may share a row and write to each other's shared memory.
    """
    order = rows.order
    assert order is not None, "it has one"
    is_row = [rows.is_row[value] for value in values]
    widths = moving_widths(space, rows, is_row, itemsizes, aligned)
    moving = [*widths]
    # What the first pass reads stays in registers.
    first = _read_first(group)
    slots = [slot for slot in moving if slot >= len(group.outputs) and values[slot] in first]
    own = [itemsizes[slot] for slot in slots] or [4]
    early: list[int] = []
    is_one_pass = has_one_pass(group, rows)
    if order.is_across:
        # What else there is of each element.
        others = sum(not is_row[slot] for slot in moving) - 1
        writes = any(slot < len(group.outputs) and not is_row[slot] for slot in moving)
        each = [itemsizes[slot] for slot in slots if not is_row[slot]] or [4]
        vector, tuning = _across(
            space,
            rows,
            each,
            order,
            others,
            is_one_pass=is_one_pass,
            writes=writes,
            accumulators=count_accumulators(group),
        )
    elif order.spreads and is_one_pass and _is_chained(space, rows, order):
        vector, tuning = _chained(space, rows, own, order, count_accumulators(group))
    elif order.spreads:
        kept_bytes = 4 if _keeps(group, rows) else 0
        # What writes no elements waits more for others than for memory, and the less the smaller blocks are.
        is_lone = own == [2] and all(rows.is_row[value] for value in group.outputs)
        most_bytes = SMALL_BYTES if is_lone else CLUSTER_BYTES
        is_level = all(_is_level(space, rows, slot, itemsizes[slot], aligned[slot]) for slot in slots)
        reads_several = sum(_is_own(space, rows, slot) for slot in slots) > 1
        spread = partial(_spread, reads_several=reads_several, is_level=is_level)
        vector, tuning = spread(space, rows, own, order, kept_bytes, most_bytes, clusters)
        # What later passes read of every row does not wait for the first one, if there is room.
        late = [slot for slot in moving if slot >= len(group.outputs) and slot not in slots]
        late = [slot for slot in late if _is_own(space, rows, slot)]
        wide = [*own, *(itemsizes[slot] for slot in late)]
        wider, other = spread(space, rows, wide, order, kept_bytes, most_bytes, clusters)
        if late and other.is_resident and other.unroll * wider * sum(wide) <= EARLY_BYTES:
            early, vector, tuning = late, wider, other
        tuning = tuning._replace(is_level=is_level and order.has_edges)
    else:
        # What only adds up keeps no row; what counts is told the counts by the text, if all of a row is there.
        adds = [item.function.reduction.accumulate for item in group.applications if item.function.reduction]
        streams = is_one_pass and not any(item.name == "count" for add in adds if add for item in add.tensors)
        # Elements that are written one by one are neighbours' work: of those of one thread each would take an access.
        written = [widths[slot] for slot in moving if slot < len(group.outputs) and not is_row[slot]]
        widest = min(written, default=VECTOR_BYTES) if count_accumulators(group) == 1 else VECTOR_BYTES
        vector, tuning = _along(space, rows, own, order, streams=streams, widest=widest)
    if rows.reduced == 1 and tuning.is_resident and not (order.has_edges or order.is_across):
        # No bounds are checked where there are none to cross.
        whole = tuning.team * tuning.cluster * tuning.unroll * vector
        tuning = tuning._replace(multiple=tuning.multiple if space.sizes[0] % whole else whole)
    if order.has_edges:
        source = values.index(order.source) if order.source >= 0 else -1
        alike = _find_alike(space, rows, order, moving, aligned, source)
        widths = {slot: VECTOR_BYTES // itemsizes[slot] if slot in alike else 1 for slot in moving}
    else:
        widths |= counted_widths(space, len(itemsizes), rows.inner)
    accesses = [Access(min(widths.get(slot, 1), vector), is_early=slot in early) for slot in range(len(space.strides))]
    return Walk(space, vector, tuple(accesses), tuning)


def _find_alike(
    space: IterationSpace, rows: RowSpec, order: RowOrder, moving: Sequence[int], aligned: Sequence[bool], source: int
) -> set[int]:
    # Of rows that begin anywhere: the operands whose vectors are aligned where those of the source are, whose address
    # says where vectors begin; -1: there is none.
    kept, span = rows.reduced, order.schedule.vector
    known = space.strides[source][kept:] if source >= 0 else _stacked(space.sizes[kept:], prod(space.sizes[:kept]))
    alike = {
        slot
        for slot in moving
        if aligned[slot] and (source < 0 or aligned[source]) and space.strides[slot][0] == 1
        if not any((a - b) % span for a, b in zip(space.strides[slot][kept:], known, strict=True))
    }
    return alike | {source}


def _is_level(space: IterationSpace, rows: RowSpec, slot: int, itemsize: int, is_aligned: bool) -> bool:
    # Whether every row of an operand begins, and ends, at a multiple of 16 bytes.
    vector, (inner, *outer) = VECTOR_BYTES // itemsize, space.strides[slot]
    is_whole = not any(step % vector for step in (space.sizes[0], *outer))
    return is_aligned and rows.reduced == 1 == inner and is_whole


def _is_own(space: IterationSpace, rows: RowSpec, slot: int) -> bool:
    # Whether each row has elements of its own.
    return all(space.strides[slot][rows.reduced :]) or prod(space.sizes[rows.reduced :]) == 1


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


def _along(
    space: IterationSpace, rows: RowSpec, itemsizes: Sequence[int], order: RowOrder, *, streams: bool, widest: int
) -> tuple[int, Tuning]:
    bytes_per_element = sum(itemsizes)
    schedule = order.schedule
    team, vector = schedule.x * schedule.y, schedule.vector
    length, multiple, most = prod(space.sizes[: rows.reduced]), 0, KEPT_BYTES // bytes_per_element
    if schedule.pitch:
        length = length // space.sizes[0] * -(-space.sizes[0] // schedule.pitch) * schedule.pitch
    if schedule.vector == schedule.accumulators == schedule.blocks == 1 and (schedule.x == WARP or team < WARP):
        # Of threads that take one element each, one does what neighbours do.
        vector, most = _neighbours(space, rows, max(itemsizes), schedule), min(most, MOST_ELEMENTS)
        if length <= most * team and (max(itemsizes) < WORD or length > 2 * WARP):
            vector = min(vector, widest)
        # Single elements are whole where planes are counted as larger ones: then each is there, or none of it.
        is_whole = length % vector == 0 and (vector > 1 or schedule.pitch > 0)
        team, multiple = team // vector, vector if is_whole else 0
    steps = -(-length // (vector * team * schedule.blocks))
    may_split = schedule.accumulators == vector and team == WARP and not streams
    if streams:
        most = min(most, IN_FLIGHT_BYTES // bytes_per_element)
    if may_split and steps * vector * bytes_per_element > SPLIT_BYTES:
        # Where a thread would keep too much, several share its vectors, and its accumulators.
        # No access is narrower than a word.
        least = max(4 // min(itemsizes), 1)
        while vector > least and team < MAX_SPLIT * WARP and steps * vector * bytes_per_element > SPLIT_BYTES // 2:
            vector, team = vector // 2, team * 2
    block = max(team, BLOCK) if schedule.blocks == 1 else team
    most = min(most, BLOCK_BYTES // block // bytes_per_element) // vector
    unroll, is_kept = 0, steps <= most and schedule.blocks == 1
    if is_kept and schedule.vector > 1 == schedule.accumulators:
        # A warp, or a part of one, does what torch's threads do, as far as it can keep what it reads.
        for few in (8, 16, WARP):
            own = _vectors_of(-(-length // vector), few, schedule)
            is_enough = few == WARP or prod(space.sizes[rows.reduced :]) * few >= ENOUGH_THREADS
            if is_enough and own <= FEW_VECTORS and own * vector * bytes_per_element <= FEW_BYTES:
                team, unroll, block = few, own, BLOCK
                break
    if is_kept:
        step = step_of(steps)
        unroll = unroll or max(-(-steps // step) * step, 1)
        tuning = Tuning(block=block, unroll=unroll, team=team, is_resident=True, multiple=multiple)
        return vector, _by_planes(space, rows, vector, tuning, schedule, most)
    unroll, is_few = 1, prod(space.sizes[rows.reduced :]) * team <= ENOUGH_THREADS
    # Few threads take more at a time, the more where each access is narrow.
    most = 4 * MAX_UNROLL if is_few else MAX_UNROLL
    in_flight = IN_FLIGHT_BYTES * (2 if vector * max(itemsizes) <= WORD else 1)
    while unroll < most and 2 * unroll * vector * bytes_per_element <= in_flight:
        unroll *= 2
    while (
        unroll > 2 * MAX_UNROLL
        and multiple
        and not schedule.pitch
        and rows.reduced > 1
        and space.sizes[0] % (unroll * team * vector)
    ):
        # As many as lie along one dimension.
        unroll //= 2
    # Elements go to a thread's accumulators in turn.
    unroll = max(unroll, schedule.accumulators if schedule.vector == 1 else 1)
    piece, chunk = int(schedule.blocks > 1), unroll * team * vector
    is_straight = multiple > 0 and rows.reduced > 1 and space.sizes[0] % chunk == 0
    multiple = chunk if is_straight else multiple
    tuning = Tuning(
        block=block,
        unroll=unroll,
        team=team,
        piece=piece,
        multiple=multiple,
        is_straight=is_straight,
        resident=max(ENOUGH_THREADS // PROCESSORS // block, 1) if is_few and not piece else 0,
    )
    # Vectors that lie in known places take less to be on their way.
    most = max(2 * in_flight // (vector * bytes_per_element), 1)
    return vector, _by_planes(space, rows, vector, tuning, schedule, most)


def _by_planes(
    space: IterationSpace, rows: RowSpec, vector: int, tuning: Tuning, schedule: Schedule, most: int
) -> Tuning:
    # The same, where threads go from plane to plane. ``most``: vectors of a thread at a time.
    if not schedule.pitch or rows.reduced != 2:
        return tuning
    width, count = space.sizes[:2]
    chunk = tuning.team * vector
    # Threads take several planes side by side, or parts of one in turn.
    beside, groups = chunk // schedule.pitch, -(-width // chunk)
    laps = 1 if tuning.is_resident else -(-groups // most)
    each, planes = -(-groups // laps), -(-count // beside)
    if tuning.is_resident:
        step = step_of(planes)
        planes = -(-planes // step) * step
    else:
        planes = min(planes, max(tuning.unroll // each, 1))
    # Where all is read at once to ask takes little, and each answer would be a kernel.
    has_all = not tuning.is_resident and count % (planes * beside) == 0
    return tuning._replace(unroll=planes * each, planes=planes, laps=laps, has_all_planes=has_all)


def waiting_parts(order: RowOrder) -> int:
    """Return how many parts of a reduction wait for others in a block's shared memory, at most."""
    schedule = order.schedule
    if not order.spreads or order.is_across:
        return schedule.x * schedule.y if order.is_across else max(schedule.x * schedule.y, BLOCK)
    # What two passes in turn come to, of as many rows as a block may have, and of each slot that is not asked by lanes.
    return 2 * (BLOCK // LEAST_TEAM) * (schedule.y + schedule.slots * schedule.is_serial)


def step_of(count: int, vector: int = 2) -> int:
    """Return of what a thread's number of vectors is a multiple.

    There are eight sizes to a power of two, or 16 where a vector is one element.
    """
    return max(power_above(count) // (8 if vector > 1 else 16), 1)


def warps_beside(team: int, schedule: Schedule) -> int:
    """Return of how many of torch's warps the threads of a row do the work side by side, if they do that of several."""
    return min(schedule.y, max(team // LANES, 1))


def _vectors_of(vectors: int, team: int, schedule: Schedule) -> int:
    # How many of a row's vectors a thread has at most.
    # No divmod: sizes may be symbols.
    rounds, rest = vectors // schedule.slots, vectors % schedule.slots
    warps = warps_beside(team, schedule)
    lanes, together = team // warps, warps * schedule.x
    apart = schedule.x // lanes
    last = min(-(-(rest % together) // lanes), apart)
    return rounds * (schedule.slots // team) + rest // together * apart + last


def _keeps(group: FusionGroup, rows: RowSpec) -> bool:
    # Whether what a reduction adds up is made of what another one came to, and needed again.
    levels = reduction_levels(group)
    uses = Counter(value for item in group.applications for value in item.tensors)
    reductions = [(item.function.reduction, item) for item in group.applications if item.function.reduction]
    added = {value for reduction, item in reductions if reduction.order != "pick" for value in item.tensors}
    return any(levels[value] and not rows.is_row[value] and uses[value] > 1 for value in added)


def _is_chained(space: IterationSpace, rows: RowSpec, order: RowOrder) -> bool:
    # Whether blocks share what torch's threads do, one element after another, for few long rows.
    schedule, length = order.schedule, prod(space.sizes[: rows.reduced])
    is_long = schedule.is_even and length >= LONG_CHAIN * schedule.slots * schedule.vector
    is_plain = not (schedule.is_serial or order.has_edges) and rows.reduced == 1
    return is_long and is_plain and prod(space.sizes[rows.reduced :]) <= FEW_CHAINS


def _chained(
    space: IterationSpace, rows: RowSpec, itemsizes: Sequence[int], order: RowOrder, accumulators: int
) -> tuple[int, Tuning]:
    vector = order.schedule.vector
    pieces = power_below(max(order.schedule.slots // WARP, MOST_PIECES // prod(space.sizes[rows.reduced :])))
    # What is added up of an element: the first accumulator is of its type, any other may be a place.
    part = max(*itemsizes, 4) + 8 * (accumulators - 1)
    unroll = max(CHAIN_BYTES // (vector * part), 1)
    return vector, Tuning(block=CHAIN_BLOCK, unroll=unroll, team=CHAIN_BLOCK, piece=pieces, resident=1)


def _spread(
    space: IterationSpace,
    rows: RowSpec,
    itemsizes: Sequence[int],
    order: RowOrder,
    kept_bytes: int,
    most_bytes: int,
    clusters: int,
    *,
    reads_several: bool,
    is_level: bool,
) -> tuple[int, Tuning]:
    # ``kept_bytes``: of what takes the place of an element between passes. ``most_bytes``: of a row in a block.
    # ``reads_several``: whether each row has several operands of its own. ``is_level``: whether they begin, and end,
    # with whole vectors.
    schedule, length, bytes_per_element = order.schedule, prod(space.sizes[: rows.reduced]), sum(itemsizes)
    vector, team, cluster = schedule.vector, schedule.slots, 1
    # Vectors of one of torch's threads; of even ones the last is whole, too.
    whole = vector * schedule.slots
    steps = length // whole if schedule.is_even else -(-length // whole)
    # After whole rounds of vectors there is room for another one, of single elements.
    has_singles = order.has_edges and schedule.is_even and not is_level
    each = (max(steps, 1) + has_singles) * vector
    # What is kept of vectors takes their place.
    own_bytes = bytes_per_element if vector > 1 else max(bytes_per_element, kept_bytes)
    most = min(max(SPREAD_BYTES // own_bytes, LEAST_SPREAD), MOST_WITH_SINGLES if has_singles else MOST_SPREAD)
    if vector == 1:
        # Neighbours, whose elements come with one access: a word at least, and not too many.
        least = 4 // min(itemsizes) if each <= LEAST_SPREAD else 1
        widest = min(VECTOR_BYTES // max(itemsizes), schedule.x, max(most // each, least))
        while 2 * vector <= widest and length % (2 * vector) == 0:
            vector, team, each = 2 * vector, team // 2, 2 * each
    if vector == schedule.vector or schedule.y == 1:
        # Others, as far apart as there are threads. Warps stay whole, but for rows of a single one.
        least = 1 if schedule.y == 1 else LEAST_TEAM
        is_lone = schedule.y == 1 and vector == 1 and reads_several
        few = most if schedule.y > 1 else FEW_ELEMENTS
        is_single = vector == 1 and schedule.y > 1
        few = MOST_SINGLE if is_single and bytes_per_element == 2 else few
        # The more rows of single elements a warp reads at once, the more lines of memory that takes.
        while team > least:
            twice = -(-2 * length // team) if is_single else 2 * each
            if twice > (LONE_ELEMENTS if is_lone and team <= LONE_TEAM else few):
                break
            team, each = team // 2, 2 * each
    # Blocks share a row that fills a processor's registers, if warps of theirs have slots of their own.
    held_bytes = max(bytes_per_element, kept_bytes)
    is_large = schedule.y > 1 and each * team * held_bytes >= most_bytes
    while is_large and cluster < clusters and team > LEAST_TEAM:
        cluster, team = cluster * 2, team // 2
        is_large = each * team * held_bytes >= most_bytes or team > MOST_TEAM
    multiple = 0 if vector == schedule.vector or space.sizes[0] % vector else vector
    threads = team * cluster
    steps = steps * (schedule.slots // threads) if schedule.is_even else -(-length // (threads * vector))
    block = max(team, BLOCK) if cluster == 1 else team
    if steps <= min(KEPT_BYTES, BLOCK_BYTES // block) // (vector * bytes_per_element):
        step = step_of(steps, vector)
        unroll = max(-(-steps // step) * step, 1)
        if length == unroll * threads * vector and rows.reduced == 1 and not order.has_edges:
            multiple = length
        # Twice what narrow elements take may wait in shared memory, half of it or as much as has room there.
        is_much = kept_bytes > bytes_per_element and kept_bytes * unroll * vector > SPREAD_BYTES * 2
        spare = min(unroll // 2, SPARE_BYTES // (block * vector * max(kept_bytes, 1)))
        spare = spare if is_much and vector * kept_bytes % VECTOR_BYTES == 0 else 0
        return vector, Tuning(
            block=block, unroll=unroll, team=team, is_resident=True, cluster=cluster, multiple=multiple, spare=spare
        )
    # What is read again comes from as many threads as there are, and as it takes for each to have its slots in turn.
    unroll = power_below(min(IN_FLIGHT_BYTES // (2 * vector * bytes_per_element), MAX_UNROLL))
    threads = max(threads, whole // (unroll * vector))
    return vector, Tuning(block=max(threads, BLOCK), unroll=unroll, team=threads, multiple=multiple)


def _neighbours(space: IterationSpace, rows: RowSpec, itemsize: int, schedule: Schedule) -> int:
    # How many of torch's threads, which take one element each, are one of ours.
    length, count, team = prod(space.sizes[: rows.reduced]), prod(space.sizes[rows.reduced :]), schedule.slots
    vector = widest = min(VECTOR_BYTES // itemsize, schedule.x)
    if length == schedule.x and length * itemsize == 2 * VECTOR_BYTES:
        # A whole row.
        vector = widest = length
    while vector > 1 and vector * itemsize > WORD and length * vector > MOST_ELEMENTS * team:
        vector //= 2
    if length * vector > MOST_ELEMENTS * team:
        # Too long to be kept.
        vector = widest
    while vector > 1 and (count * team < ENOUGH_THREADS * vector or (rows.reduced > 1 and space.sizes[0] % vector)):
        vector //= 2
    return vector


def _across(
    space: IterationSpace,
    rows: RowSpec,
    itemsizes: Sequence[int],
    order: RowOrder,
    others: int,
    *,
    is_one_pass: bool,
    writes: bool,
    accumulators: int,
) -> tuple[int, Tuning]:
    width, count = space.sizes[rows.reduced], prod(space.sizes[rows.reduced :])
    threads, itemsize = order.schedule.y, max(itemsizes)
    vector = min(VECTOR_BYTES // itemsize, MAX_UNROLL, power_above(width))
    if (others or accumulators > 1 or order.schedule.blocks > 1) and order.schedule.accumulators > 1:
        # More threads compute than only add, and more blocks combine what blocks came to, each for fewer columns.
        vector = min(vector, GATHER_VECTOR)
    while width % vector:
        # Neighbouring threads read neighbours, where one cannot.
        vector //= 2
    if any(operand[rows.inner] > 1 for operand in space.strides):
        vector = min(vector, GATHER_VECTOR)
    enough = FEW_THREADS // order.schedule.blocks if is_one_pass else ENOUGH_THREADS
    while vector > 1 and order.schedule.vector == 1 and count * threads < enough * vector:
        # The more threads, the more often they go through their rows.
        vector //= 2
    if order.schedule.vector > 1:
        # Few threads: more elements of each are in flight, and they spread over many blocks.
        unroll = order.schedule.vector
        while vector > 1 and count // vector * threads <= FEW_THREADS and unroll < MOST_ROWS:
            vector, unroll = vector // 2, 2 * unroll
        if vector == 2 and count * threads <= FEW_THREADS:
            # What each computes takes longer than to read it.
            vector = 1
        team = min(SEGMENT // (vector * itemsize), WARP) if threads > 1 else WARP
        team = min(team, power_above(-(-count // vector)))
        blocks, piece = -(-count // (team * vector)), 1
        length = prod(space.sizes[: rows.reduced])
        is_large = is_one_pass and (length * count >= MANY_ELEMENTS or length >= LONG_COLUMN)
        while is_large and blocks * piece < ENOUGH_BLOCKS and team * threads > 2 * WARP * piece and piece < threads:
            piece *= 2
        block = team * threads // piece
        while block * unroll * vector * itemsize > BLOCK_BYTES // 2 and unroll > order.schedule.vector:
            # Large blocks have few registers for each thread.
            unroll //= 2
        return vector, Tuning(block=block, unroll=unroll, team=team, piece=piece if piece > 1 else 0)
    team = min(max(BLOCK // threads, WARP), MAX_BLOCK // threads, power_above(-(-count // vector)))
    while team * threads * vector * accumulators * ACCUMULATOR_BYTES > SHARED_BYTES and team * vector > 1:
        team, vector = (team // 2, vector) if team > 1 else (team, vector // 2)
    least = max(order.schedule.accumulators, GATHER_VECTOR)
    is_light = vector <= GATHER_VECTOR and MAX_UNROLL * vector * sum(itemsizes) <= IN_FLIGHT_BYTES
    # What is written takes registers that more elements in flight would; so do moments, but where many blocks add up.
    is_simple = not writes and (accumulators < MOMENTS or order.schedule.blocks > 1)
    is_narrow = not is_one_pass and MAX_UNROLL * vector * sum(itemsizes) <= WORD * MAX_UNROLL
    unroll = MAX_UNROLL if is_light and (is_simple or is_narrow) else least
    return vector, Tuning(block=team * threads, unroll=unroll, team=team, piece=int(order.schedule.blocks > 1))


def _stacked(sizes: Sequence[int], length: int) -> tuple[int, ...]:
    strides = [length]
    for size in sizes[:-1]:
        strides.append(strides[-1] * size)
    return tuple(strides)
