"""Which order the rows of each reduction of a call are combined in, decided when the call is planned.

In strict numerics that is torch's for torch's own ops, where it is known; else torch's kernel stays. A user's
reductions and fast numerics have the canonical order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import prod
from typing import Any, TypeAlias

import torch

from fuser import torch_ops as ops
from fuser.application import Application
from fuser.arg_spec import DescribedValue, row_limits
from fuser.cpu.aten_orders import moments_order, sum_order
from fuser.cuda.aten_orders import GpuSize, Layout, coalesce, find_schedule, scan_chunk
from fuser.errors import UnsupportedError
from fuser.function import Function
from fuser.graph import FusionGroup, Section
from fuser.kernel_spec import CPU_SHORT_ROW
from fuser.layout import is_contiguous
from fuser.orders import ANY_ORDER, FAST_ORDERS, KEPT_ORDERS, RowOrder, Schedule
from fuser.row_access import ODD_ROW, most_kept, stretches
from fuser.tensor_desc import TensorDesc

__all__ = [
    "HALF_VECTOR_BYTES",
    "Orders",
    "find_orders",
    "gpu_size",
    "keeps_columns",
    "order_of_section",
    "torchs_order",
]

# For each reduction of a group whose bits depend on it: torch's order, or None for the canonical one.
Orders: TypeAlias = Mapping[int, RowOrder | None]
# A bound on alignment that every address of torch's allocator has.
VECTOR_BYTES = 16
# Of those that begin at a multiple of this fast numerics make vectors.
HALF_VECTOR_BYTES = 8
# Rows of so many elements fill a GPU's processor.
LONG_ROW = 1 << 15
# Rows of an odd length that fast numerics add up in torch's order: of more elements, and of so many bytes at most.
# Measured on an H100.
SHORT_ODD, ODD_BYTES = 128, 4096
# Of columns on the CPU: those that fit in one vector, and those of which there are many, both long; wide elements.
FEW_COLUMNS_BYTES, MANY_COLUMNS_BYTES, MANY_ELEMENTS, WIDE_BYTES = 32, 2048, 1 << 15, 4


def find_orders(group: FusionGroup, values: Sequence[DescribedValue], device: torch.device) -> Orders:
    """Return the order of each reduction that has one; those that any order serves are left out.

    Raises:
        UnsupportedError: a reduction of torch's has bits, or an error, that only torch's kernel has. Its
            ``application`` says which one.
    """
    orders: dict[int, RowOrder | None] = {}
    are_aligned = all(item.desc.is_aligned for item in values[: len(group.inputs)])
    for index, item in enumerate(group.applications):
        reduction = item.function.reduction
        if reduction is None:
            continue
        op = ops.REDUCTIONS.get(item.function.op or "")
        desc = values[item.tensors[0]].desc
        if op is None and not reduction.order and any(values[value].desc.dtype for value in item.tensors):
            # A user's may take several, which broadcast: the first need not have all dimensions, nor be a tensor.
            orders[index] = None
            continue
        if desc.dtype is None:
            # No kernel reads a number along dimensions.
            raise UnsupportedError(f"{item.function.name!r} of a number", application=index)
        dims = reduction.normalize_dims(len(desc.shape))
        # Why only torch's kernel serves, and whether that is what strict numerics ask for.
        reason, is_expected = "", True
        if op is not None and op.needs_elements and any(desc.shape[dim] == 0 for dim in dims):
            reason, is_expected = f"op {op.name!r} on nothing", False
        elif reduction.order == "welford" and (0 in desc.shape or prod(desc.shape[dim] for dim in dims) == 1):
            # Whose moments there may be none of: torch's kernel says so.
            reason = f"op {item.function.name!r} of rows of one element"
        elif reduction.scans and 0 not in desc.shape and not _is_scanned(desc, dims, device):
            reason = f"op {item.function.name!r} of rows that torch has another kernel for"
        elif (
            device.type == "cpu"
            and item.tensors[0] < len(group.inputs)
            and _suits_torch(group, item.function.op, desc, dims)
        ):
            reason = f"op {item.function.name!r} of rows or columns that torch is as fast with"
        elif (
            0 in desc.shape
            or reduction.order in ANY_ORDER
            or (op is not None and ops.dtype_kind(desc.dtype) in op.exact)
        ):
            # Nothing is added, or any order serves.
            continue
        elif group.is_strict or reduction.order in FAST_ORDERS:
            value, name = _find_source(group, values, item, reduction.order, device)
            desc = values[value].desc
            source = value if value < len(group.inputs) else -1
            order = torchs_order(item.function, desc, dims, device, source, name, are_aligned=are_aligned)
            given = [values[value].desc for value in item.tensors]
            if reduction.order.startswith("batch_norm") and any(
                own.strides != desc.strides for own in given if own.shape == desc.shape
            ):
                # ATen has another kernel for tensors of different layouts.
                order = None
            if order is not None and not group.is_strict and _suits_tree(reduction.order, order, desc, dims, device):
                order = None
            if order is None and not group.is_strict:
                continue
            if order is None:
                reason = f"op {item.function.name!r} on {desc.dtype} in torch's own order"
            orders[index] = order
        if reason:
            raise UnsupportedError(reason, application=index, is_expected=is_expected)
    return orders


def _find_source(
    group: FusionGroup, values: Sequence[DescribedValue], item: Application, name: str, device: torch.device
) -> tuple[int, str]:
    # The value that torch's kernel reads where a reduction has an order of this name, and the name of that kernel's.
    producers, value = group.producers(), item.tensors[0]
    if name in {"softmax", "softmax_cast"}:
        # Of what is added the order depends on what it is made of.
        value = group.applications[producers[value]].tensors[0]
    if name.endswith("_cast"):
        # Of what torch converts in the same kernel, on what that converts.
        origin = group.applications[producers[value]].tensors[0]
        dtypes = [values[at].desc.dtype for at in (origin, value)]
        is_whole = dtypes == [torch.float16, torch.float32] and device.type == "cuda"
        value, name = (origin, name) if is_whole else (value, name.removesuffix("_cast"))
    return _converted(group, values, value), name


def _converted(group: FusionGroup, values: Sequence[DescribedValue], value: int) -> int:
    # What is converted to the dtype that it has is no tensor of its own in torch: where it lies in memory counts.
    producers = group.producers()
    while value >= len(group.inputs):
        item = group.applications[producers[value]]
        if item.function.op != "convert" or values[item.tensors[0]].desc.dtype is not values[value].desc.dtype:
            break
        value = item.tensors[0]
    return value


def order_of_section(section: Section, orders: Orders) -> RowOrder | None:
    """Return torch's order where a section keeps it, with the section's own number of the value it is read from."""
    found = next((orders[index] for index in section.applications if orders.get(index)), None)
    if found is None or found.source < 0:
        return found
    return found._replace(source=section.inputs.index(found.source))


@cache
def gpu_size(device: torch.device) -> GpuSize:
    """Return what of a device ATen's schedules depend on; without a GPU, that of an H100."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return GpuSize()
    properties: Any = torch.cuda.get_device_properties(device)
    return GpuSize(properties.multi_processor_count, properties.max_threads_per_multi_processor)


def keeps_columns(length: int, width: int, device: torch.device) -> bool:
    """Return whether torch's order is known in which a norm's backward adds up so many rows of a width."""
    layout = Layout(((length, width),), ((width, 1),))
    return find_schedule("gamma_beta", layout, 4, gpu_size(device), is_aligned=True) is not None


def torchs_order(
    function: Function,
    desc: TensorDesc,
    dims: tuple[int, ...],
    device: torch.device,
    source: int,
    name: str = "",
    *,
    are_aligned: bool = True,
) -> RowOrder | None:
    """Return the order of one of torch's reductions on a device; None where it is not known.

    Args:
        function: the reduction.
        desc: of what is reduced.
        dims: along what, ascending.
        device: where.
        source: the group's input that is reduced; -1 for what would be a tensor of its own.
        name: of the order, if it is not the reduction's.
        are_aligned: whether all of the group's inputs are, on which the kernels of ATen's larger ops depend.
    """
    reduction = function.reduction
    assert reduction is not None, "it is one"
    assert desc.dtype is not None, "numbers are not reduced"
    name = name or reduction.order
    if name not in KEPT_ORDERS.get(device.type, ()) or not desc.dtype.is_floating_point:
        return None
    if name.startswith("group_norm") and max(dims, default=0) > 2 and prod(desc.shape[3:]) == 1:
        # ATen has other kernels where a channel of a batch is one element, as for tensors of two dimensions.
        return None
    reduced = [desc.strides[dim] for dim in dims if desc.shape[dim] != 1]
    if reduced != sorted(reduced, reverse=True):
        # ATen numbers elements by their strides.
        return None
    layout, size = coalesce(desc.shape, desc.strides, dims), desc.dtype.itemsize
    if reduction.scans:
        return _scan_order(desc, dims[0], layout, device)
    if device.type == "cpu":
        is_plain = sum(desc.shape[dim] != 1 and dim not in dims for dim in range(len(desc.shape))) <= 1
        if name == "welford":
            return moments_order(layout.rows)
        return sum_order(function.op or "", layout.reduced, layout.kept, size, is_plain=is_plain)
    if "softmax" in name and not is_contiguous(desc.shape, desc.strides):
        # ATen copies it first.
        return None
    finds_vectors, is_softmax = name in {"sum", "norm", "welford"}, "softmax" in name
    if finds_vectors or (is_softmax and "backward" not in name):
        # Four elements of eight bytes may lie between vectors; softmax has fewer then.
        are_aligned = source < 0 or (desc.is_aligned and (4 * size <= VECTOR_BYTES or is_softmax))
    elif is_softmax and not are_aligned:
        return None
    schedule = find_schedule(name, layout, size, gpu_size(device), is_aligned=are_aligned)
    if schedule is None:
        return None
    if not (finds_vectors or is_softmax):
        return RowOrder(schedule, not layout.is_along, is_ragged=layout.length % schedule.vector > 0)
    if schedule.vector == 1:
        return RowOrder(schedule, is_across=not layout.is_along, spreads=is_softmax)
    is_aligned = source < 0 or (desc.is_aligned and schedule.vector * size <= VECTOR_BYTES)
    whole = schedule.vector * (schedule.slots if schedule.is_even else 1)
    is_whole = layout.length % whole == 0 and not any(stride % schedule.vector for _, stride in layout.kept)
    if is_aligned and is_whole:
        return RowOrder(schedule, spreads=is_softmax)
    if source < 0 and not _is_stacked(layout):
        return None
    return RowOrder(schedule, has_edges=True, source=source, spreads=is_softmax)


def _suits_torch(group: FusionGroup, op: str | None, desc: TensorDesc, dims: tuple[int, ...]) -> bool:
    # Columns of a tensor in memory that ATen's CPU kernels take in vectors: sums of few, maxima of many. And running
    # totals of short rows by themselves that nothing converts, which it adds up as it reads them.
    layout, size = coalesce(desc.shape, desc.strides, dims), desc.dtype.itemsize if desc.dtype else 0
    if op == "cumsum" and layout.is_along and len(group.applications) == 1:
        return desc.dtype is torch.float64 and layout.length < CPU_SHORT_ROW and prod(desc.shape) >= MANY_ELEMENTS
    if layout.is_along or prod(desc.shape) < MANY_ELEMENTS:
        return False
    width = layout.kept[0][0] * size
    if op in {"amax", "amin"}:
        return size >= WIDE_BYTES and width >= MANY_COLUMNS_BYTES
    return op in {"sum", "mean"} and not group.is_strict and width <= FEW_COLUMNS_BYTES


def _suits_tree(name: str, order: RowOrder, desc: TensorDesc, dims: tuple[int, ...], device: torch.device) -> bool:
    # Whether fast numerics are faster in the canonical order than in ATen's.
    assert desc.dtype is not None, "numbers are not reduced"
    layout, size = coalesce(desc.shape, desc.strides, dims), desc.dtype.itemsize
    if "softmax" in name:
        # Rows that begin between vectors are put together from them; ATen's threads have an element each.
        is_longer = "backward" in name and ODD_ROW < layout.length < LONG_ROW
        return is_longer or order.is_across or layout.length * size % HALF_VECTOR_BYTES == 0
    if name in {"sum", "norm", "welford"}:
        # A tree's neighbours lie in one thread, or lanes are asked for them: of rows that begin anywhere ATen's threads
        # have every so many elements.
        is_odd = layout.length % 2 == 1 and SHORT_ODD < layout.length <= ODD_BYTES // size
        return device.type != "cuda" or not layout.is_along or not is_odd
    if name != "batch_norm_planes":
        return False
    # A thread adds one element after another there, in one walk. Several walks are faster where a row stays near, and
    # where there are fewer rows than processors.
    plane, limits = layout.reduced[0][0], row_limits(device)
    vector = min(VECTOR_BYTES // size, plane & -plane)
    is_kept = layout.length <= most_kept(vector, size, limits.clusters) or stretches(layout.length, vector, limits)
    return is_kept or layout.rows < limits.processors


def _is_scanned(desc: TensorDesc, dims: tuple[int, ...], device: torch.device) -> bool:
    # Whether there is something to add up, and no library's kernel for one row. Of complex floats, torch's sums on the
    # CPU are complex doubles.
    assert desc.dtype is not None, "numbers are not reduced"
    length = prod(desc.shape[dim] for dim in dims)
    return length > 1 and not desc.dtype.is_complex and (device.type == "cpu" or prod(desc.shape) > length)


def _scan_order(desc: TensorDesc, dim: int, layout: Layout, device: torch.device) -> RowOrder | None:
    if device.type == "cpu":
        return RowOrder(Schedule(1))
    if dim < len(desc.shape) - 1:
        # One element after another.
        return RowOrder(Schedule(1), is_across=True) if layout.kept[0][1] == 1 else None
    # What is not dense ATen copies first, as fast as a kernel would gather it.
    chunk = min(scan_chunk(layout.length, layout.rows), 1 << (layout.length - 1).bit_length())
    return RowOrder(Schedule(chunk)) if desc.strides[dim] == 1 else None


def _is_stacked(layout: Layout) -> bool:
    # Whether rows lie one behind the other.
    return not layout.kept or (len(layout.kept) == 1 and layout.kept[0][1] == layout.length)
