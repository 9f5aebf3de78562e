"""In which order torch's own CUDA kernels add the elements of a row, worked out from shapes as ATen works it out.

Read in aten/src/ATen/native/cuda (Reduce.cuh, layer_norm_kernel.cu, SoftMax.cu, Loss.cu) and measured on a GPU. Pure:
plain numbers in, a ``Schedule`` out. Whether torch as it is installed has this order is found by comparing bits
(fuser.order_check), never assumed.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import log2, prod
from typing import NamedTuple

from fuser.access import power_above, power_below
from fuser.layout import Shape, Strides
from fuser.orders import COLUMN_ORDERS, Schedule

__all__ = ["GpuSize", "Layout", "coalesce", "find_schedule", "scan_chunk", "sum_schedule"]

# Threads of a block of Reduce.cuh; elements that a thread has in flight where it reads one at a time.
MAX_THREADS = 512
IN_FLIGHT = 4
# Rows of so many elements are read in vectors.
SHORT_ROW = 128
# Elements of a thread from which warps, and blocks, share a row; and how few blocks leave to a thread.
MANY_PER_WARP, MANY, FEW = 16, 256, 16
# Of softmax: elements and bytes of rows that a warp has (twice as many forward), threads of a longer one, elements of
# each in registers; shared memory of a block, bytes of a vector.
SHORT_SOFTMAX, SHORT_SOFTMAX_BYTES, SOFTMAX_THREADS = 1024, 4096, 1024
MAX_REGISTERS, SHARED_BYTES, VECTOR_BYTES = 9, 48 * 1024, 16
FEW_COLUMNS = 64
WARP = 32
# Elements that a float counts.
MOST_COUNTED = 1 << 24
# ATen splits what is larger, and numbers the elements of the halves anew.
MAX_BYTES = 2**31 - 1


class GpuSize(NamedTuple):
    """What of a GPU ATen's schedules depend on."""

    processors: int = 132
    threads_per_processor: int = 2048


class Layout(NamedTuple):
    """A tensor as ATen's kernel walks it: (size, stride) of what is reduced, and of what is kept, innermost first."""

    reduced: tuple[tuple[int, int], ...]
    kept: tuple[tuple[int, int], ...]

    @property
    def length(self) -> int:
        """Elements of a row."""
        return prod(size for size, _ in self.reduced)

    @property
    def rows(self) -> int:
        """How many there are."""
        return prod(size for size, _ in self.kept)

    @property
    def is_along(self) -> bool:
        """Whether neighbours in memory belong to one row."""
        return not self.kept or not self.reduced or self.reduced[0][1] < self.kept[0][1]


def coalesce(shape: Shape, strides: Strides, dims: tuple[int, ...]) -> Layout:
    """Return the layout of a tensor that is reduced along some dimensions, as TensorIterator brings it in order.

    What is reduced comes in the order of its strides, what is kept as it lies in the (contiguous) result.
    """
    own = [(shape[dim], strides[dim], dim in dims) for dim in range(len(shape)) if shape[dim] != 1]
    reduced = sorted((stride, size) for size, stride, is_reduced in own if is_reduced)
    kept = [(size, stride) for size, stride, is_reduced in reversed(own) if not is_reduced]
    return Layout(_merge((size, stride) for stride, size in reduced), _merge(kept))


def find_schedule(order: str, layout: Layout, itemsize: int, gpu: GpuSize, *, is_aligned: bool) -> Schedule | None:
    """Return the schedule of one of ATen's orders, by its name; arguments and result as of ``sum_schedule``."""
    if order in {"sum", "norm"}:
        return sum_schedule(layout, itemsize, gpu, is_aligned=is_aligned, widens=order == "sum")
    if order == "welford":
        return sum_schedule(layout, itemsize, gpu, is_aligned=is_aligned, in_flight=2, widens=False)
    if order in COLUMN_ORDERS:
        return _column_schedule(order, layout, gpu)
    length = layout.length
    if order.startswith("batch_norm_plane"):
        return _planes_schedule(layout, rises=order == "batch_norm_planes")
    if "softmax" in order and not layout.is_along:
        return _across_softmax_schedule(layout)
    # These are of rows that lie one behind the other.
    is_stacked = not layout.reduced or layout.reduced == ((length, 1),)
    is_stacked = is_stacked and (not layout.kept or layout.kept == ((layout.rows, length),))
    if not is_stacked or not length or not layout.rows:
        return None
    # layer_norm_kernel.cu: vectors of four whatever the dtype, added element by element.
    if order in {"layer_norm_dx", "rms_norm_dx"}:
        return Schedule(32, 4, accumulators=1, vector=4)
    if order in {"layer_norm", "rms_norm"}:
        if length % 4:
            return Schedule(32, 16, accumulators=1)
        return Schedule(32, 4, accumulators=1, vector=4) if is_aligned and itemsize < 8 and length <= 1 << 24 else None
    if order in {"group_norm", "group_norm_sums"}:
        # group_norm_kernel.cu: a warp or 16 of them, one element at a time, as far as they count.
        if length >= MOST_COUNTED << 4:
            return None
        return Schedule(32, 1 if length < MAX_THREADS else 16, accumulators=1)
    if order == "nll_loss":
        # Loss.cu: a block for all rows, of a sixteenth of them rounded to a power of two.
        rounded = 1 << round(log2(max(length // 16, 1)))
        return Schedule(min(max(rounded, WARP), 1024), accumulators=1)
    return _softmax_schedule(order, length, itemsize, is_aligned=is_aligned)


def _column_schedule(order: str, layout: Layout, gpu: GpuSize) -> Schedule | None:
    length, width = layout.length, layout.rows
    is_stacked = len(layout.kept) == 1 and layout.kept[0][1] == 1 and layout.reduced in ((), ((length, width),))
    if not is_stacked or not length:
        return None
    if length == 1:
        # Nothing is added.
        return Schedule(1, accumulators=1)
    if order == "group_norm_batch":
        return Schedule(1, 1 if length <= 128 else 32, accumulators=1)
    if order.startswith("batch_norm"):
        return _channels_schedule(length, width)
    # layer_norm_kernel.cu: eight rows of a thread at a time. ATen rounds what blocks come to where very many rows are
    # shared by some.
    if length > 1 << 16 and width // 32 < gpu.processors // 2:
        return None
    return Schedule(1, 1 if length < 64 else 8 if length < 128 else 16 if length < 256 else 32, 1, 1, 8)


def _channels_schedule(length: int, width: int) -> Schedule | None:
    # Normalization.cuh, of channels that lie side by side.
    if length * width > MAX_BYTES or length >= MOST_COUNTED:
        return None
    height = min(power_below(-(-length // 16)), MAX_THREADS // min(power_below(width), 32))
    blocks = min(-(-length // (16 * height)), 128)
    return Schedule(1, height, blocks if blocks >= 8 else 1)


def _planes_schedule(layout: Layout, *, rises: bool) -> Schedule | None:
    # Normalization.cuh, of channels that are planes: a block for each, as many threads as a plane has elements, and so
    # many planes side by side as there are threads left.
    if not (layout.reduced and layout.kept) or layout.reduced[0][1] != 1 or layout.length >= MOST_COUNTED:
        return None
    plane = layout.reduced[0][0]
    threads = min(max(power_above(plane), WARP), MAX_THREADS)
    pitch = threads if plane % threads and len(layout.reduced) > 1 else 0
    return Schedule(WARP, MAX_THREADS // WARP, accumulators=1, rises=rises, pitch=pitch)


def _across_softmax_schedule(layout: Layout) -> Schedule:
    # SoftMax.cu, spatial: threads share a column where there are few beside each other.
    length, width, threads = layout.length, min(layout.kept[0][0], SOFTMAX_THREADS), 1
    if width <= FEW_COLUMNS <= length:
        threads = power_below(min(SOFTMAX_THREADS // width, length))
    return Schedule(1, threads, accumulators=1)


def _softmax_schedule(order: str, length: int, itemsize: int, *, is_aligned: bool) -> Schedule:
    # Elements that are converted first stay in shared memory only.
    is_forward, is_plain = "backward" not in order, order in {"softmax", "log_softmax"}
    # PersistentSoftmax.cuh: a warp for each row.
    if length <= SHORT_SOFTMAX * (1 + is_plain) and length * itemsize <= SHORT_SOFTMAX_BYTES * (1 + is_plain):
        return Schedule(power_above(min(length, WARP)), accumulators=1)
    # SoftMax.cu: a block.
    vector = VECTOR_BYTES // itemsize
    threads = SOFTMAX_THREADS
    if not is_forward:
        threads = max(power_above(min(length // vector, threads) // 2), WARP)
    elif is_plain and -(-length // threads) <= MAX_REGISTERS:
        return Schedule(WARP, threads // WARP, accumulators=1)
    room = (SHARED_BYTES - threads // WARP * max(itemsize, 4)) // itemsize
    is_held = is_aligned and length % vector == 0 and length < room
    is_serial = not (is_held or is_forward)
    return Schedule(WARP, threads // WARP, accumulators=1, vector=vector, is_even=not is_held, is_serial=is_serial)


def sum_schedule(
    layout: Layout,
    itemsize: int,
    gpu: GpuSize,
    *,
    is_aligned: bool = True,
    in_flight: int = IN_FLIGHT,
    widens: bool = True,
) -> Schedule | None:
    """Return the order of ATen's sums and means (Reduce.cuh); None where it is not known.

    Args:
        layout: of what is added.
        itemsize: bytes of one element in memory.
        gpu: the device.
        is_aligned: whether the tensor begins at a multiple of four elements, and of 16 bytes.
        in_flight: elements that a thread has in flight; four but for the moments.
        widens: whether vectors of 16 bits have twice as many, as those of sums and means do.
    """
    length, rows = layout.length, layout.rows
    if length <= 1 or not rows:
        return Schedule(1)
    pairs = (*layout.reduced, *layout.kept)
    if any(stride <= 0 for _, stride in pairs):
        return None
    if sum((size - 1) * stride for size, stride in pairs) * itemsize >= MAX_BYTES:
        found = {
            sum_schedule(half, itemsize, gpu, is_aligned=is_aligned, in_flight=in_flight, widens=widens)
            for half in _halves(layout)
        }
        return found.pop() if len(found) == 1 else None
    vector, across, most = 1, 1, MAX_THREADS
    if layout.is_along:
        is_dense = len(layout.reduced) == 1 and layout.reduced[0][1] == 1
        vector = in_flight * (1 + (widens and itemsize == 2)) if is_dense and length >= SHORT_ROW else 1
        inner, outer = length // vector, rows
    else:
        if layout.kept[0][1] == 1:
            if not is_aligned:
                return None
            across = _output_vector(layout)
        most = MAX_THREADS // across
        inner, outer = rows // across, length
    inner, outer = power_below(min(inner, most)), power_below(min(outer, most))
    width = min(inner, 32)
    height = min(outer, most // width)
    width = min(inner, most // height)
    step = width if layout.is_along else 1
    each = -(-length // step)
    shares = each >= min(height * MANY_PER_WARP, MANY)
    if shares:
        each = -(-length // (step * height))
    blocks = 1
    outputs = (1 if layout.is_along else width) * (1 if shares else height)
    grid = -(-(rows // across) // outputs)
    target = gpu.processors * (gpu.threads_per_processor // (width * height))
    if shares and each >= MANY and grid <= target:
        blocks = max(min(-(-target // grid), -(-each // FEW)), -(-each // MANY))
    accumulators = vector if vector > 1 else in_flight
    if widens and layout.is_along and vector == 1 and each <= in_flight:
        # Of a sum each would have one element: they come to what they do one after another.
        accumulators = 1
    return Schedule(step, height if shares else 1, blocks, accumulators, vector)


def scan_chunk(length: int, rows: int) -> int:
    """Return how many elements of a row ATen's scans take at a time (ScanUtils.cuh), two for each thread."""
    # In unsigned arithmetic of 32 bits: of very many short rows, a difference below zero wraps.
    threads = (9 + (length - 1).bit_length() - (rows - 1).bit_length()) % 2**32 // 2
    return 2 << min(max(threads, 4), 9)


def _halves(layout: Layout) -> tuple[Layout, ...]:
    # What ATen takes one after another; nothing where it cuts rows.
    reach = [(size - 1) * stride for size, stride in (*layout.reduced, *layout.kept)]
    if not layout.kept or reach[-1] < max(reach):
        return ()
    size, stride = layout.kept[-1]
    return tuple(Layout(layout.reduced, (*layout.kept[:-1], (own, stride))) for own in (size // 2, size - size // 2))


def _output_vector(layout: Layout) -> int:
    # Neighbouring results of a thread: as many as every row's begin at a multiple of.
    vector = 4
    for number in (layout.kept[0][0], *(stride for _, stride in (*layout.reduced, *layout.kept[1:]))):
        while number % vector:
            vector //= 2
    return vector


def _merge(dims: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for size, stride in dims:
        if merged and stride == merged[-1][0] * merged[-1][1]:
            merged[-1] = (merged[-1][0] * size, merged[-1][1])
        else:
            merged.append((size, stride))
    return tuple(merged)
