"""In which order torch's own CPU kernels add the elements of a row, worked out from shapes as ATen works it out.

Read in SumKernel.cpp, Reduce.h (aten/src/ATen/native/cpu) and TensorIteratorReduce.cpp, and measured. Pure: plain
numbers in, a ``RowOrder`` out; whether torch as it is installed has it is found by comparing bits (fuser.order_check).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from fuser.orders import RowOrder, Schedule

__all__ = ["moments_order", "sum_order"]

# Vectors that are added side by side.
QUARTER = 4
# SumKernel.cpp is not compiled for longer vectors.
VECTOR_BYTES = 32
# Of shorter rows, where there is more to do than to call it, torch's kernel is faster.
SHORTEST = 64
MANY = 1 << 15
# From so many elements on, threads share what comes to one number.
GRAIN = 32768


def sum_order(
    op: str, reduced: Sequence[tuple[int, int]], kept: Sequence[tuple[int, int]], itemsize: int, *, is_plain: bool
) -> RowOrder | None:
    """Return the order of a sum of floats; None where it is not known.

    Args:
        op: of fuser's table.
        reduced: (size, stride) of the dimensions that are reduced, merged.
        kept: the same of the others.
        itemsize: bytes of one element in memory.
        is_plain: whether one dimension is kept, at most.
    """
    if (
        op not in {"sum", "sum_wide", "mean", "nansum"}
        or len(reduced) > 1
        or any(stride <= 0 for _, stride in (*reduced, *kept))
    ):
        return None
    length, stride = reduced[0] if reduced else (1, 1)
    lanes = VECTOR_BYTES // max(itemsize, 4)
    if stride == 1:
        is_slower = length < SHORTEST and length * prod(size for size, _ in kept) > MANY
        if is_slower or (not kept and length >= GRAIN) or (op == "nansum" and itemsize == 2):
            return None
        # Of 16 bits, two vectors of floats are added first; a mean is that of floats.
        halves = 2 if op == "sum" and itemsize == 2 else 1
        return RowOrder(Schedule(lanes, vector=halves), is_cascade=True)
    # Columns that are no four vectors have another order, and which those are may depend on the number of threads. Of
    # 16 bits, torch's kernel is the faster one where it does not convert all of them first.
    if (
        (itemsize > 2 or op in {"mean", "sum_wide"})
        and is_plain
        and kept
        and kept[0][1] == 1
        and kept[0][0] % (QUARTER * lanes) == 0
    ):
        return RowOrder(Schedule(lanes), is_across=True, is_cascade=True)
    return None


def moments_order(rows: int) -> RowOrder | None:
    """Return the order of the variance of each of some rows; None where it is not known."""
    # What comes to one number has a kernel of its own, or threads share it.
    return RowOrder(Schedule(1), is_across=True) if rows > 1 else None
