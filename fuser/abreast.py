"""Launches that run side by side: what one of them reads, the other one finds in the GPU's cache.

The gradients of a norm are sums along rows, and in torch's order other sums along columns, of the same elements: two
kernels, which go through all rows in the same order. Started together, whichever is ahead reads from memory, and the
other one catches up with it. The kernel over columns comes first: its few blocks are all on the GPU at once, as has to
be before the next launch may begin, and leave room for blocks of the other one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from fuser.access import Tuning
from fuser.kernel_spec import ArgSpec

__all__ = ["Kernel", "side_by_side"]

# Vectors that a thread of the kernel over columns has in flight: with more it runs ahead, and with more registers there
# is less room for the other one. Measured on an H200: gradients of a layer_norm [32768, 4096] of bfloat16 in 316 us one
# after the other, in 303 with 16, in 253 with 8.
AHEAD = 8


class Kernel(NamedTuple):
    """One kernel of a call."""

    args: ArgSpec
    # Values of the call's group.
    reads: Collection[int]
    writes: Collection[int]


def side_by_side(kernels: Sequence[Kernel]) -> list[tuple[int, Tuning]]:
    """Return in which order a call's kernels are launched, as indices, and the tuning of each.

    Those that go along with each other follow each other in ``kernels``.
    """
    found = [(index, kernel.args.tuning) for index, kernel in enumerate(kernels)]
    at = 0
    while at + 1 < len(found):
        rows, columns = kernels[at], kernels[at + 1]
        if _go_together(rows, columns):
            leader, follower = found[at + 1], found[at]
            found[at] = leader[0], replace(leader[1], leads=True, unroll=min(leader[1].unroll, AHEAD))
            found[at + 1] = follower[0], replace(follower[1], follows=True)
            at += 1
        at += 1
    return found


def _go_together(rows: Kernel, columns: Kernel) -> bool:
    # Whether neither reads what the other one writes, and both read the same.
    own, other = rows.args.rows, columns.args.rows
    if own is None or other is None or own.order is None or other.order is None:
        return False
    tuning = rows.args.tuning
    is_apart = own.order.schedule.blocks == 1 and not (tuning.piece or tuning.cluster > 1)
    # Blocks that go from row to row would wait for room, and their rows with them.
    is_apart = is_apart and not tuning.most_blocks
    reads = set(rows.reads) & set(columns.reads)
    writes = set(rows.writes) & set(columns.reads) | set(columns.writes) & set(rows.reads)
    return other.is_across and not own.is_across and is_apart and bool(reads) and not writes
