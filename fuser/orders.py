"""Orders in which torch's own kernels combine the elements of a row, as plain values.

Strict numerics promise torch's bits, so that a kernel keeps the order of the op that it stands for; where that is not
known, torch's kernel stays. Which order an op has on a device is worked out from shapes (fuser.cuda.aten_orders).
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ANY_ORDER", "COLUMN_ORDERS", "FAST_ORDERS", "KEPT_ORDERS", "RowOrder", "Schedule"]

# Names (Reduction.order) of where the order does not count: of "pick", which takes one element of a row, nor of "any";
# or is free: of "powers", the sum of e to the power of what each element is less than the largest, in fast numerics.
ANY_ORDER = frozenset(("any", "pick", "powers"))
# Those that fast numerics may have, too: of what takes fewer walks then, or rows that begin anywhere.
_SOFTMAX_ORDERS = tuple(f"{op}{form}" for op in ("softmax", "log_softmax") for form in ("", "_backward", "_cast"))
_NORM_ORDERS = ("batch_norm", "batch_norm_planes", "batch_norm_sums", "group_norm_sums", "group_norm_batch")
FAST_ORDERS = frozenset((*_NORM_ORDERS, *_SOFTMAX_ORDERS, "sum", "norm", "welford"))
# By type of device, the orders that kernels keep, for some shapes at least.
KEPT_ORDERS: dict[str, frozenset[str]] = {
    "cuda": frozenset(
        (
            *ANY_ORDER, "layer_norm", "rms_norm", "layer_norm_dx", "rms_norm_dx",
            *FAST_ORDERS, "gamma_beta", "batch_norm_plane_sums", "group_norm", "nll_loss", "scan",
        )
    ),
    "cpu": frozenset(("sum", "scan", "welford")),
}  # fmt: skip
# Those of what is added up across the rows of an op.
COLUMN_ORDERS = frozenset({"gamma_beta", "group_norm_batch", "batch_norm", "batch_norm_sums"})


class Schedule(NamedTuple):
    """Which thread adds which elements of a row, and how what threads have becomes one.

    A row belongs to ``slots`` threads: x side by side, y times that in a block, in several blocks. Each has some
    accumulators, which start at the identity. With vectors of V elements, vector j goes to slot ``j % slots``, its
    elements in turn to each of the accumulators; what lies before the first vector that is aligned in memory goes
    to accumulator 0 of the first slots before all else, what lies after the last one after all else; in an order whose
    rows have no such edges the last vector may be a part of one. Without vectors, element n goes to slot
    ``n % slots``, in turn to each of its accumulators. Then a thread combines its
    accumulators in order; what threads have is combined by halves (slot i with slot i + half), along x first, then
    along y; and of blocks, by the threads of one: thread i takes those of blocks i, i + x * y, ..., and halves come
    again, along y first.
    """

    x: int
    y: int = 1
    blocks: int = 1
    accumulators: int = 4
    vector: int = 1
    is_even: bool = False
    # Whether what threads have is combined in their order instead: along x first, then along y.
    is_serial: bool = False
    # Whether it is combined in pairs instead: slot i with slot i + 1, then with slot i + 2, ...; along x first.
    rises: bool = False
    # Elements along the innermost of several dimensions are numbered as if there were a multiple of so many; 0: as they
    # are.
    pitch: int = 0

    @property
    def slots(self) -> int:
        """Threads of a row."""
        return self.x * self.y * self.blocks


class RowOrder(NamedTuple):
    """How a kernel's rows are combined: what reductions have in common that share a kernel in torch's order."""

    schedule: Schedule
    # Whether neighbouring rows are computed side by side.
    is_across: bool = False
    # Whether rows begin, or end, between vectors.
    has_edges: bool = False
    # Whether the last vector of a row is a part of one.
    is_ragged: bool = False
    # Then the value whose address says where vectors begin; -1: rows lie one behind the other from an aligned place.
    source: int = -1
    # Whether a thread may have any slots, in any of several blocks: they come to plain sums, one of each.
    spreads: bool = False
    # Of running totals, ``schedule.x`` is the number of elements of a chunk, which the prelude's cuda_scans.h takes: 1
    # where each is added to all before it.
    # Whether it is that of sums on the CPU (fuser.cpu.rows_ordered): of vectors of ``schedule.x`` lanes, to each of
    # which ``schedule.vector`` elements are added together. Others there have one element after another.
    is_cascade: bool = False
