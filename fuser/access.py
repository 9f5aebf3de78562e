"""How a CUDA kernel walks its operands: elements per memory access, and which operands go through a tile.

Plain integers in, plain values out; a kernel's text depends on what comes out, sizes left out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import NamedTuple

from fuser.layout import IterationSpace

__all__ = [
    "DEFAULT_TUNING",
    "GATHER_VECTOR",
    "PICKING",
    "SINGLE",
    "STATIC_SHARED_BYTES",
    "VECTOR_BYTES",
    "Access",
    "Tuning",
    "Walk",
    "counted_widths",
    "dense_width",
    "is_askew",
    "plan_walk",
    "power_above",
    "power_below",
    "walk_singly",
]

# The widest memory access of a thread.
VECTOR_BYTES = 16
# Vectors that read some operand element by element are this long at most: a warp's threads then stay close together.
GATHER_VECTOR = 4
# Rows of fewer vectors have too many elements at their ends, which are moved one by one. Measured on an H100.
LEAST_LEVEL = 32
# A tile pays from this many elements along both of its dimensions.
MIN_TILED_SIZE = 32
# Shared memory that every GPU gives a block without being asked.
STATIC_SHARED_BYTES = 48 << 10
# Threads of a block that has to take a multiple of some number.
BLOCKS = (256, 192, 160, 224)
# Of a matrix whose rows are worth it that a thread has several.
MANY_ELEMENTS = 1 << 22


class Access(NamedTuple):
    """How a kernel reads or writes one operand."""

    # Elements that one memory access moves, along the dimension where the operand is dense.
    width: int = 1
    # Whether that is the second dimension instead of the innermost: the operand is read through a tile.
    is_transposed: bool = False
    # Of a kernel with reductions: whether it is read before the first one, although only a later pass needs it.
    is_early: bool = False
    # Whether all rows have it in common; of a kernel without reductions, all vectors of a thread.
    is_shared: bool = False


class Tuning(NamedTuple):
    """How a kernel divides its work; any choice gives the same values."""

    # Threads of a block.
    block: int = 256
    # Vectors that a thread has in flight; with tiles this follows from the others.
    unroll: int = 1
    # Side of the square tile that a block moves through shared memory; 0 where no operand needs one.
    tile: int = 0
    # Of a kernel with reductions: threads that take neighbours along the innermost dimension; 0 for others.
    team: int = 0
    # Whether ``unroll`` vectors of each of a team's threads are a whole row, so that it is read once.
    is_resident: bool = False
    # Whether a row that is too long for that stays in shared memory.
    is_held: bool = False
    # Elements of a row that a block takes, where several blocks share it; 0: whole rows.
    piece: int = 0
    # Vectors of a thread, the last ones, of which what passes keep waits in shared memory.
    spare: int = 0
    # Whether a thread's vectors lie one behind the other along the second dimension of two.
    is_stacked: bool = False
    # Whether each row's vectors begin where the output is aligned, the first and the last one being parts.
    begins_level: bool = False
    # Blocks of a cluster that share a row, each of which keeps its part, or goes over so many elements of it, which are
    # read from the cache when they are read again.
    cluster: int = 1
    stretch: int = 0
    # What the number of a row's elements is a multiple of, as far as the text relies on it: a vector, or all that its
    # threads take at a time. 0: it may be anything, and nothing.
    multiple: int = 0
    # Whether all rows in torch's order begin, and end, at multiples of 16 bytes.
    is_level: bool = False
    # Whether what a team takes at a time lies along the innermost of several dimensions of a row.
    is_straight: bool = False
    # Of rows in torch's order of planes, which its threads count as larger ones: how many of these a thread has vectors
    # of at a time, as many of each; in how many turns it has had all of them; and whether no plane is missing of the
    # last ones. 0: elements go by their number.
    planes: int = 0
    laps: int = 1
    has_all_planes: bool = False
    # Whether blocks have tables of functions, how many of them a processor has then, and how many there are at most.
    looks: bool = False
    resident: int = 0
    most_blocks: int = 0
    # Of a kernel without reductions: whether it begins where a launch before it ended, with what the cache still has.
    from_end: bool = False
    # Whether the next launch may begin once all of its blocks have, and whether that is this one (fuser.abreast).
    leads: bool = False
    follows: bool = False
    # Of a kernel over lists of tensors: how many times each thread of a block takes ``unroll`` vectors.
    turns: int = 1

    @property
    def share(self) -> int:
        """Elements of a tile for each thread."""
        return self.tile * self.tile // self.block

    @property
    def sharers(self) -> int:
        """Blocks that take a row's elements at a time."""
        return 1 if self.stretch else self.cluster

    def __str__(self) -> str:
        tile = f", tiles of {self.tile} x {self.tile}" if self.tile else f", {self.unroll} in flight"
        team = f", teams of {self.team}" if self.team else ""
        return f"blocks of {self.block}{team}{tile}"


SINGLE = Access()
DEFAULT_TUNING = Tuning()
# Of single elements that are chosen by their place.
PICKING = Tuning(block=128, unroll=4)


class Walk(NamedTuple):
    """What ``plan_walk`` decides for one call."""

    # The space given; where tiles are used, the tile's other dimension comes second.
    space: IterationSpace
    # Elements of the innermost dimension that one thread computes together.
    vector: int = 1
    # One per operand, outputs first.
    accesses: tuple[Access, ...] = ()
    tuning: Tuning = DEFAULT_TUNING


def plan_walk(
    space: IterationSpace,
    itemsizes: Sequence[int],
    aligned: Sequence[bool],
    num_outputs: int,
    repeated: Collection[int] = (),
    *,
    rounds: bool = True,
) -> Walk:
    """Decide how the operands of one call are read and written.

    Args:
        space: the loop nest; operands are outputs first, and counters, which have no memory, last.
        itemsizes: bytes of an element of each operand in memory.
        aligned: whether each of them starts at a multiple of VECTOR_BYTES.
        num_outputs: how many of the operands are outputs.
        repeated: operands that begin anew after each ``space.period`` elements.
        rounds: whether values are rounded between functors (strict numerics), which takes registers.
    """
    space, tiled = _bring_tile_forward(space, itemsizes, num_outputs)
    in_memory = space.strides[: len(itemsizes)]
    moving = [slot for slot, strides in enumerate(in_memory) if strides[0] and slot not in tiled]
    widths = {slot: dense_width(space.strides[slot], 0, itemsizes[slot], aligned[slot]) for slot in moving}
    # What the rows of a large matrix have in common a thread reads once for several.
    common = {slot for slot in moving if in_memory[slot] == (1, 0)}
    if tiled or prod(space.sizes) < MANY_ELEMENTS or any(strides[0] > 1 for strides in space.strides):
        common = set()
    wide = [itemsizes[slot] for slot in moving if slot not in common]
    vector = VECTOR_BYTES // max(wide, default=VECTOR_BYTES)
    may_be_level = num_outputs == 1 and not (tiled or common or space.period)
    begins_level = may_be_level and _can_be_level(space, itemsizes, vector, widths)
    # Outputs are written whole vectors at a time; an input that cannot be read so is read in pieces.
    vector = min([vector, *(widths[slot] for slot in moving if slot < num_outputs and not begins_level)])
    widths |= counted_widths(space, len(itemsizes), 0)
    if any(space.strides[slot][0] > 1 for slot in moving):
        vector = min(vector, GATHER_VECTOR)
    tuning = _default_tuning(space, vector, [itemsizes[slot] for slot in moving], rounds)
    if begins_level:
        tuning = Tuning(block=128, begins_level=True)
    if tiled:
        sizes = [itemsizes[slot] for slot in tiled]
        tuning = Tuning(block=128 if max(sizes) == 1 else 256, tile=_tile_side(sizes))
        vector = min(vector, tuning.share)
    if common:
        tuning = Tuning(block=128, unroll=4, is_stacked=True)
    elif repeated and len(space.sizes) == 1 and space.numel >= MANY_ELEMENTS:
        # Where a block takes whole periods at a time, all vectors of a thread begin at the same place of one.
        block = next((size for size in BLOCKS if size * vector % space.period == 0), 0)
        if block:
            common, tuning = {*repeated}, Tuning(block=block, unroll=4)
    accesses = []
    for slot, strides in enumerate(space.strides):
        if slot in tiled:
            width = min(dense_width(strides, 1, itemsizes[slot], aligned[slot]), tuning.share)
            accesses.append(Access(width, is_transposed=True))
        else:
            accesses.append(Access(min(widths.get(slot, 1), vector), is_shared=slot in common))
    return Walk(space, vector, tuple(accesses), tuning)


def walk_singly(walk: Walk) -> Walk:
    """Return a walk whose threads take one element each: what they read in loops lies beside what neighbours read."""
    # What all vectors of a thread have in common rests on how they lie, which is given up here.
    accesses = tuple(item._replace(width=1, is_shared=False) for item in walk.accesses)
    return walk._replace(vector=1, accesses=accesses, tuning=Tuning())


def _can_be_level(space: IterationSpace, itemsizes: Sequence[int], vector: int, widths: Mapping[int, int]) -> bool:
    # Whether rows of narrow elements are to be cut into vectors where the only output is aligned.
    is_dense = len(space.strides) == len(itemsizes) and all(strides[0] <= 1 for strides in space.strides)
    has_rows = len(space.sizes) > 1 and space.sizes[0] >= LEAST_LEVEL * vector
    has_words = 0 in widths and all(vector * itemsizes[slot] >= 4 for slot in widths)
    return is_dense and has_rows and has_words and is_askew(vector, widths[0], itemsizes[0])


def is_askew(vector: int, width: int, itemsize: int) -> bool:
    """Return whether narrow elements that follow each other are moved from and to anywhere in whole vectors.

    Args:
        vector: how many there are to a vector.
        width: how many of them one access may move otherwise.
        itemsize: bytes of each.
    """
    return 4 * width <= vector and itemsize < 4 <= vector * itemsize <= VECTOR_BYTES


def _default_tuning(space: IterationSpace, vector: int, itemsizes: Sequence[int], rounds: bool) -> Tuning:
    # Measured on an H200: short vectors need several in flight; two pay where each vector's place has to be worked out,
    # with elements of one byte, and of two bytes where registers are left. On an H100: narrow ones want small blocks.
    widest = max(itemsizes, default=VECTOR_BYTES)
    if vector * widest < VECTOR_BYTES:
        return Tuning(block=128 if widest < 4 else 256, unroll=min(4, VECTOR_BYTES // (vector * widest)))
    if any(strides[0] > 1 for strides in space.strides):
        return DEFAULT_TUNING
    if len(space.sizes) > 1:
        return Tuning(block=128, unroll=2)
    return Tuning(unroll=2) if widest == 1 or (widest == 2 and not rounds) else DEFAULT_TUNING


def _bring_tile_forward(
    space: IterationSpace, itemsizes: Sequence[int], num_outputs: int
) -> tuple[IterationSpace, frozenset[int]]:
    # The inputs that are dense along another dimension than the innermost, all along the same one, which is moved to
    # the second place.
    if space.sizes[0] < MIN_TILED_SIZE:
        return space, frozenset()
    by_dim: dict[int, list[int]] = {}
    for slot, strides in enumerate(space.strides[: len(itemsizes)]):
        if slot >= num_outputs and strides[0] > 1 and 1 in strides:
            by_dim.setdefault(strides.index(1), []).append(slot)
    by_dim = {dim: slots for dim, slots in by_dim.items() if space.sizes[dim] >= MIN_TILED_SIZE}
    if not by_dim:
        return space, frozenset()
    dim = max(by_dim, key=lambda dim: len(by_dim[dim]))
    order = [0, dim, *(other for other in range(1, len(space.sizes)) if other != dim)]
    moved = IterationSpace(
        tuple(space.sizes[at] for at in order),
        tuple(tuple(strides[at] for at in order) for strides in space.strides),
    )
    slots = by_dim[dim]
    while not _tile_side([itemsizes[slot] for slot in slots]):
        slots.pop()
    return moved, frozenset(slots)


def _tile_side(itemsizes: Sequence[int]) -> int:
    # The larger side whose tiles, with their padding, fit; 0 if none does.
    for side in (64, 32):
        if sum(side * (side * size + max(size, 4)) for size in itemsizes) <= STATIC_SHARED_BYTES:
            return side
    return 0


def power_above(number: int) -> int:
    """Return the smallest power of two that is no less."""
    return 1 << max(number - 1, 0).bit_length()


def power_below(number: int) -> int:
    """Return the largest power of two that is no more, or 1."""
    return 1 << max(number, 1).bit_length() - 1


def counted_widths(space: IterationSpace, first: int, dim: int) -> dict[int, int]:
    """Return for each counter how many neighbours along a dimension differ in its last bits only.

    Args:
        space: the loop nest.
        first: which of its operands is the first counter.
        dim: along which dimension.
    """
    return {slot: dense_width(space.strides[slot], dim, 1, True) for slot in range(first, len(space.strides))}


def dense_width(strides: Sequence[int], dim: int, itemsize: int, is_aligned: bool) -> int:
    """Return the elements of the widest access along a dimension that is aligned wherever the other ones lead."""
    if strides[dim] != 1 or not is_aligned:
        return 1
    width = VECTOR_BYTES // itemsize
    while any(stride % width for at, stride in enumerate(strides) if at != dim):
        width //= 2
    return width
