"""The numbers of a launch that follow from sizes: fields of the argument struct, and the shape of a CUDA grid.

Computed once per plan; nothing here is per call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from fuser.codegen import KernelSource
from fuser.layout import IterationSpace

__all__ = ["Launch", "divider", "launch_shape", "pack_geometry", "step_counts"]


@dataclass(frozen=True, slots=True)
class Launch:
    """How a kernel is launched over one loop nest."""

    # CUDA: blocks, threads of a block (both one-dimensional), dynamic shared memory (tiles are static: 0 so far).
    grid: int = 1
    block: int = 1
    shared_bytes: int = 0
    # CPU: whether there is enough work for torch's threads.
    is_parallel: bool = False


def launch_shape(source: KernelSource, sizes: Sequence[int]) -> Launch:
    """Return the launch of a CUDA kernel over a space of these sizes, innermost first; none of them is 0."""
    tuning = source.tuning
    steps = prod(step_counts(source, sizes))
    per_block = 1 if tuning.tile else tuning.block * tuning.unroll
    return Launch(grid=-(-steps // per_block), block=tuning.block)


def step_counts(source: KernelSource, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return along each dimension how many vectors there are; for a kernel with tiles, how many tiles."""
    tile = source.tuning.tile
    lengths = (tile, tile) if tile else (source.vector,)
    return tuple(-(-size // length) for size, length in zip(sizes, (*lengths, *(1,) * len(sizes)), strict=False))


def pack_geometry(source: KernelSource, space: IterationSpace) -> tuple[int, ...]:
    """Return the values of the struct's geometry fields, in their order: each is 8 bytes."""
    counts = step_counts(source, space.sizes)
    fields = {
        "size": space.sizes,
        "count": counts,
        # Nothing is divided where a reduced dimension has no element.
        "divide": tuple(divider(count or 1) for count in counts[:-1]),
        "stride": tuple(stride for operand in space.strides for stride in operand),
    }
    return tuple(value for field in source.geometry for value in fields[field])


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
