"""The numbers of a launch that follow from sizes: fields of the argument struct, and the shape of a CUDA grid.

Computed once per plan; nothing here is per call.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

from fuser.kernel_source import KernelSource
from fuser.layout import IterationSpace
from fuser.orders import RowOrder
from fuser.row_access import MAX_CLUSTER

__all__ = [
    "MAX_NARROW_OFFSET",
    "Flat",
    "Launch",
    "divider",
    "launch_lists",
    "launch_shape",
    "pack_geometry",
    "workspace_bytes",
]

# Pieces of a row that are folded at a time, at least: as the prelude's fuser_turn.
TURN = 128
# What a grid has at most; blocks with more to do go round.
MAX_GRID = 2**31 - 1
# Offsets up to here fit an int with room for one block's worth of threads.
MAX_NARROW_OFFSET = 2**31 - 2**16


class Launch(NamedTuple):
    """How a kernel is launched over one loop nest."""

    # CUDA: blocks, threads of a block (both one-dimensional), dynamic shared memory (tiles are static).
    grid: int = 1
    block: int = 1
    shared_bytes: int = 0
    # Whether it may begin when all blocks of the launch before it have.
    follows: bool = False
    # Whether its clusters have more blocks than every GPU has room for: a kernel has to ask for them.
    asks: bool = False
    # CPU: whether there is enough work for torch's threads.
    is_parallel: bool = False


class Flat(NamedTuple):
    """How the launch of a linear kernel depends on the number of elements."""

    # CUDA: how many of them a block takes.
    chunk: int = 1
    # CPU: from how many on torch's threads share the work.
    parallel_from: int = 0
    # How many there may be.
    most: int = MAX_NARROW_OFFSET


def launch_shape(source: KernelSource, space: IterationSpace) -> Launch:
    """Return the launch of a CUDA kernel over a space that is not empty."""
    tuning = source.tuning
    if source.rows is not None:
        chunk = tuning.team * tuning.unroll * source.vector
        chunks = -(-prod(space.sizes[: space.reduced]) // chunk)
        return Launch(
            grid=min(_row_blocks(source, space.sizes), MAX_GRID),
            block=tuning.block,
            shared_bytes=(tuning.stretch or chunks * chunk) * source.held_bytes,
            follows=tuning.follows,
            asks=tuning.cluster > MAX_CLUSTER,
        )
    counts = _step_counts(source, space.sizes)
    if tuning.is_stacked:
        return Launch(grid=-(-counts[0] * -(-counts[1] // tuning.unroll) // tuning.block), block=tuning.block)
    steps = prod(counts)
    per_block = 1 if tuning.tile else tuning.block * tuning.unroll
    return Launch(grid=-(-steps // per_block), block=tuning.block)


def launch_lists(source: KernelSource, numels: Sequence[int]) -> tuple[Launch, tuple[int, ...]]:
    """Return the launch of a kernel over lists of tensors, and the first block of each position.

    Args:
        source: the kernel.
        numels: elements of each position, none of them empty.
    """
    blocks = list(accumulate((-(-numel // source.chunk) for numel in numels), initial=0))
    launch = Launch(grid=blocks[-1], block=source.tuning.block, is_parallel=sum(numels) > source.chunk)
    return launch, tuple(blocks[:-1])


def _row_blocks(source: KernelSource, sizes: Sequence[int]) -> int:
    # Blocks that take all rows of a kernel with reductions at once.
    tuning, rows = source.tuning, source.rows
    assert rows is not None, "it has reductions"
    if rows.pieces:
        return rows.pieces
    pieces = _pieces(source, sizes)
    if rows.is_across:
        return -(-prod(sizes[rows.reduced :]) // (tuning.team * source.vector)) * pieces
    blocks = -(-prod(sizes[rows.reduced :]) // (tuning.block // tuning.team)) * pieces * tuning.cluster
    return min(blocks, tuning.most_blocks or blocks)


def _pieces(source: KernelSource, sizes: Sequence[int]) -> int:
    # Blocks that share a row.
    tuning, rows = source.tuning, source.rows
    assert rows is not None, "it has reductions"
    if rows.order is not None:
        return max(rows.order.schedule.blocks, tuning.piece)
    return -(-prod(sizes[: rows.reduced]) // tuning.piece) if tuning.piece else 1


def workspace_bytes(source: KernelSource, sizes: Sequence[int]) -> int:
    """Return the size of the memory in which the blocks that share a row keep what they come to; 0 if none do.

    It has to be zero before the launch.
    """
    tuning, rows = source.tuning, source.rows
    if rows is None or not tuning.piece:
        return 0
    pieces = _pieces(source, sizes)
    if not (rows.is_across or rows.order):
        # As the prelude's fuser_notes has it.
        return 2 * source.accumulator_bytes * _row_blocks(source, sizes)
    across = tuning.team * source.vector if rows.is_across else 1
    # As its fuser_workspace has it.
    batches = 1
    if rows.order and rows.order.spreads:
        # A part for each of torch's threads.
        batches = rows.order.schedule.slots // pieces
    per_tile = 4 * (2 + -(-pieces // TURN)) + source.accumulator_bytes * across * (1 + pieces * batches)
    return per_tile * _row_blocks(source, sizes) // pieces


def _step_counts(source: KernelSource, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return along each dimension how many vectors there are; for a kernel with tiles, how many tiles."""
    tile = source.tuning.tile
    lengths = (tile, tile) if tile else (source.vector,)
    if source.tuning.begins_level:
        # A row may begin with one that is the last element of a vector.
        sizes = (sizes[0] + source.vector - 1, *sizes[1:])
    return tuple(-(-size // length) for size, length in zip(sizes, (*lengths, *(1,) * len(sizes)), strict=False))


def pack_geometry(source: KernelSource, space: IterationSpace) -> tuple[int, ...]:
    """Return the values of the struct's geometry fields, in their order: each is 8 bytes."""
    counts = _step_counts(source, space.sizes) if source.rows is None else _numbered(source.rows.order, space.sizes)
    fields = {
        "size": space.sizes,
        "count": counts,
        # Nothing is divided where a dimension has no element.
        "divide": tuple(divider(count or 1) for count in counts[:-1]),
        "offset": space.offsets,
        # Each block of a kernel over lists has its own.
        "begin": (0,),
        "period": (space.period, divider(space.period)) if space.period else (),
        "stride": tuple(stride for operand in space.strides for stride in operand),
    }
    return tuple(value for field in source.geometry for value in fields[field])


def _numbered(order: RowOrder | None, sizes: Sequence[int]) -> Sequence[int]:
    # As many as elements are numbered by along each dimension.
    pitch = order.schedule.pitch if order else 0
    return (-(-sizes[0] // pitch) * pitch, *sizes[1:]) if pitch else sizes


def divider(divisor: int) -> int:
    """Return multiplier and shift that divide a number below 2^31, as one field; 0 for a divisor beyond that.

    ``n / divisor == (n + high_half(n * multiplier)) >> shift``, for which see Granlund and Montgomery, "Division by
    invariant integers using multiplication" (1994). The multiplier is the field's low half, the shift its high half.
    """
    if divisor >= 2**31:
        return 0
    shift = (divisor - 1).bit_length()
    multiplier = (((1 << shift) - divisor) << 32) // divisor + 1
    return multiplier | shift << 32
