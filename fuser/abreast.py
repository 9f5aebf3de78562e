"""Launches that run side by side: what one of them reads, the other one finds in the GPU's cache.

The gradients of a norm are sums along rows, and in torch's order other sums along columns, of the same elements: two
kernels, which go through all rows in the same order. Started together, whichever is ahead reads from memory, and the
other one catches up with it. The kernel over columns comes first: its few blocks are all on the GPU at once, as has to
be before the next launch may begin, and leave room for blocks of the other one.

Note [What may run side by side]. The first launch is an ordinary one: it begins when all that the stream had before it
has ended, and so does the second one, which begins after it. Both read what was written before either, and write to
tensors that are the call's own and were allocated before either, so neither finds nor spoils anything of the other. The
last block of the second one waits for the end of the first one (``fuser_await_former``): whatever comes later in the
stream, a kernel, a copy, an event or a free tensor's next use, waits for the second one alone, and finds both done.
What another thread launches between the two is waited for in the same way, and knows nothing of this call's tensors.
PTX promises what earlier launches wrote behind the wait alone: that the second one reads it before that rests on the
first one being an ordinary launch, which begins when all before it has ended and can be seen.
So there is no third kernel that begins early, ``out=`` is not written to (plans of several launches are copied to it),
and where the driver has no such launches, as on GPUs before compute capability 9.0, the two run one after another.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import NamedTuple

from fuser.access import Tuning
from fuser.kernel_spec import ArgSpec

__all__ = ["Kernel", "side_by_side"]

# What all threads of the kernel over columns have in flight. With less it waits for memory; with more it runs ahead and
# what it has read is gone when the other one needs it. Gradients on an H200, in us: one after the other, then with 2, 4
# and 8 MiB: of a layer_norm of [32768, 2048] bfloat16 169, 128, 125, 166; of a rms_norm 168, 183, 117, 162; of a
# layer_norm of [32768, 4096] with 4, 8 and 16 MiB 316, 260, 302, 302.
IN_FLIGHT_BYTES = 4 << 20


class Kernel(NamedTuple):
    """One kernel of a call."""

    args: ArgSpec
    # Tensors, by number.
    reads: Collection[int]
    writes: Collection[int]
    # Of all it reads that is as large as what it walks over, in a row of neighbours.
    row_bytes: int


def side_by_side(kernels: Sequence[Kernel]) -> list[tuple[int, Tuning]]:
    """Return in which order a call's kernels are launched, as indices, and the tuning of each.

    Those that go along with each other follow each other in ``kernels``.
    """
    found = [(index, kernel.args.tuning) for index, kernel in enumerate(kernels)]
    for at, (rows, columns) in enumerate(pairwise(kernels)):
        # A kernel is one or the other, so no two pairs have one in common.
        if _go_together(rows, columns):
            found[at] = at + 1, columns.args.tuning._replace(leads=True, unroll=_unroll(columns))
            found[at + 1] = at, rows.args.tuning._replace(follows=True)
    return found


def _unroll(columns: Kernel) -> int:
    # Each of torch's threads has so many of its elements in flight: whole vectors of its schedule, and one at least for
    # each of its accumulators, to which they go in turn.
    rows, unroll = columns.args.rows, columns.args.tuning.unroll
    assert rows is not None, "it goes along with another one"
    assert rows.order is not None, "it keeps torch's"
    schedule = rows.order.schedule
    each = columns.row_bytes * schedule.y * schedule.blocks
    while unroll % (2 * max(schedule.vector, schedule.accumulators)) == 0 and unroll // 2 * each >= IN_FLIGHT_BYTES:
        unroll //= 2
    return unroll


def _go_together(rows: Kernel, columns: Kernel) -> bool:
    # Whether neither touches what the other one writes, and both read the same.
    own, other = rows.args.rows, columns.args.rows
    if own is None or other is None or own.order is None or other.order is None:
        return False
    tuning = rows.args.tuning
    is_apart = own.order.schedule.blocks == 1 and not (tuning.piece or tuning.cluster > 1)
    # Blocks that go from row to row would wait for room, and their rows with them.
    is_apart = is_apart and not tuning.most_blocks
    touched = [{*kernel.reads, *kernel.writes} for kernel in (rows, columns)]
    is_apart = is_apart and touched[0].isdisjoint(columns.writes) and touched[1].isdisjoint(rows.writes)
    return other.is_across and not own.is_across and is_apart and not set(rows.reads).isdisjoint(columns.reads)
