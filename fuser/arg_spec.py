"""What one kernel's text depends on beside its group, and its loop nest, from descriptions of its operands."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from fuser.access import PICKING, SINGLE, VECTOR_BYTES, Walk, plan_walk, walk_singly
from fuser.config import config
from fuser.cxx.functor import EntryParameter
from fuser.dtypes import dtype_info, number_dtype, number_kind
from fuser.geometry import MAX_NARROW_OFFSET
from fuser.graph import FusionGroup
from fuser.kernel_spec import (
    CPU_LANES,
    CPU_LONG_ROW,
    CPU_SHORT_ROW,
    ArgSpec,
    InputSpec,
    RowSpec,
    index_strides,
    infer_layouts,
    infer_typing,
)
from fuser.layout import IterationSpace, Shape, Strides, broadcast_strides, build_iteration_space
from fuser.lookups import find_lookups, look_up_in
from fuser.ordered_access import plan_ordered_walk
from fuser.orders import RowOrder
from fuser.row_access import MAX_CLUSTER, RowLimits, plan_row_walk
from fuser.row_space import RowShape, build_row_space, find_row_shape, lies_across
from fuser.scan_access import plan_scan_walk
from fuser.tensor_desc import TensorDesc, value_layouts

__all__ = ["DescribedValue", "build_arg_spec", "rounds_between", "row_limits", "starts_abreast"]

# Half a vector.
CPU_FEW_COLUMNS_BYTES = 32
# Rows of fewer elements than this leave a GPU's vectors half empty; longer ones are read whole where they are aligned.
GPU_SHORT_ROW = 32
# Elements of a row, or of as many as are computed side by side, of which values may be kept from pass to pass.
MAX_KEPT = 1 << 17
# Shared memory of a block where the device is not here to be asked, and how much of it is not for rows.
SHARED_BYTES = 232448
SHARED_FOR_PARTS = 24 << 10
# Multiprocessors of a GPU that is not here.
PROCESSORS = 132


class DescribedValue(NamedTuple):
    """One value that a kernel reads or writes: how it lies in memory, and what it counts as in typing."""

    desc: TensorDesc
    spec: InputSpec


def build_arg_spec(
    group: FusionGroup,
    inputs: Sequence[DescribedValue],
    outputs: Sequence[TensorDesc],
    device_type: str,
    order: RowOrder | None,
) -> tuple[ArgSpec, IterationSpace]:
    """Return what one kernel's text depends on, and its loop nest.

    Args:
        group: the kernel's group, canonical; its outputs all have one shape, unless it has reductions.
        inputs: one per input of the group.
        outputs: one per output of the group.
        device_type: "cuda" or "cpu".
        order: torch's, that its reductions keep; None: the canonical one.
    """
    used = group.used_inputs()
    pointers = [index for index in used if inputs[index].spec.number is None and not inputs[index].spec.is_counter]
    operands = [*outputs, *(inputs[index].desc for index in pointers)]
    counters = _describe_counters(group, inputs)
    given = [index for index in used if inputs[index].spec.is_counter]
    counters += [inputs[index].desc for index in given]
    rows = None
    values = [*group.outputs, *pointers, *group.index_values(), *given]
    if group.has_reduction:
        walk, rows = _walk_rows(group, inputs, operands, counters, values, device_type, order)
        inner = [min(operand[rows.inner], 2) for operand in walk.space.strides]
    else:
        walk, inner = _walk_elements(group, inputs, operands, counters, values, device_type)
    space = walk.space
    offsets = tuple(item.offset for item in (*operands, *counters))
    has_offsets = any(offsets)
    if has_offsets:
        space = space._replace(offsets=offsets)
    by_index = dict(zip(pointers, inner[len(outputs) : len(operands)], strict=True))
    numbers = _declared_kinds(group, inputs)
    filled: list[InputSpec | None] = [None] * len(inputs)
    if counters:
        # What gives nothing but a shape has a weight in the promotion of the index.
        filled = [InputSpec(torch.float32, item.spec.rank) for item in inputs]
    for index in used:
        spec = inputs[index].spec
        if index in numbers:
            filled[index] = _pass_number(inputs[index], numbers[index])
        else:
            ndim = spec.ndim if group.reshapes else 0
            own = by_index.get(index, 0)
            filled[index] = InputSpec(spec.dtype, spec.rank, spec.number, own, ndim, spec.is_counter)
    args = ArgSpec(
        device_type=device_type,
        inputs=tuple(filled),
        outputs=tuple(_written_classes(inner[: len(outputs)], space, rows, values)),
        counters=tuple(inner[len(operands) :]),
        rank=len(space.sizes),
        vector=walk.vector,
        wide_index=max(_reach(space), space.numel) > MAX_NARROW_OFFSET,
        default_dtype=torch.get_default_dtype(),
        settings=config.code_key(**({} if group.numerics is None else {"numerics": group.numerics})),
        accesses=walk.accesses,
        tuning=walk.tuning,
        rows=rows,
        has_offsets=has_offsets,
    )
    return args, space


def _written_classes(
    inner: Sequence[int], space: IterationSpace, rows: RowSpec | None, values: Sequence[int]
) -> Sequence[int]:
    # Of the outputs. What neighbours have in common is read once for all; written, it has a place for each of them,
    # which is the same: what was expanded, and is passed on to another kernel as it lay. A row has one place for each
    # of its own results.
    if space.sizes[rows.inner if rows else 0] == 1:
        return inner
    row_results = rows.is_row if rows and not rows.is_across else ()
    return [own or (0 if row_results and row_results[value] else 2) for own, value in zip(inner, values, strict=False)]


def rounds_between(group: FusionGroup, *, is_strict: bool) -> bool:
    """Whether a kernel rounds values on their way from one functor to the next."""
    return is_strict and len(group.applications) > 1


def _walk_elements(
    group: FusionGroup,
    inputs: Sequence[DescribedValue],
    operands: Sequence[TensorDesc],
    counters: Sequence[TensorDesc],
    values: Sequence[int],
    device_type: str,
) -> tuple[Walk, list[int]]:
    # Of a kernel without reductions, and the class of each operand's and counter's inner stride.
    count = len(group.outputs)
    walked = [*operands, *counters]
    if group.reshapes:
        strides = _find_rows(group, inputs, walked, values)[1]
    else:
        strides = [broadcast_strides(item.shape, item.strides, operands[0].shape) for item in walked]
    space = _loop_nest(operands[0].shape, strides)
    repeated = lasting = frozenset[int]()
    if device_type == "cuda":
        space, repeated, lasting = _lengthen_rows(space, operands, count)
    inner = _inner_classes(space, device_type)
    inner = [3 if slot in repeated else 4 if slot in lasting else own for slot, own in enumerate(inner)]
    # What repeats is read element by element.
    read = [item._replace(is_aligned=item.is_aligned and slot not in repeated) for slot, item in enumerate(operands)]
    rounds = rounds_between(group, is_strict=group.is_strict)
    walk = _walk(space, read, count, device_type, repeated, rounds=rounds)
    if group.picks:
        # Neighbours read neighbours, of whichever part.
        walk = Walk(space, accesses=(SINGLE,) * len(space.strides), tuning=PICKING)
    elif group.adds_up and not walk.tuning.tile:
        walk = walk_singly(walk)
    return walk, inner


def _describe_counters(group: FusionGroup, inputs: Sequence[DescribedValue]) -> list[TensorDesc]:
    # Each index of elements as an operand: the tensor whose element at an offset would be the offset.
    values = group.index_values()
    if not values:
        return []
    layouts = infer_layouts(group, value_layouts([item.desc for item in inputs]))
    makers = group.producers()
    return [
        TensorDesc(
            torch.Tensor,
            torch.int64,
            layouts[value].shape,
            index_strides(group.applications[makers[value]].function, layouts[value].shape),
        )
        for value in values
    ]


def _loop_nest(shape: Shape, strides: Sequence[Strides]) -> IterationSpace:
    space = build_iteration_space(shape, strides)
    # One element of everything: the dense kernel serves.
    return IterationSpace((1,), ((1,),) * len(strides)) if space.numel == 1 else space


def _lengthen_rows(
    space: IterationSpace, operands: Sequence[TensorDesc], count: int
) -> tuple[IterationSpace, frozenset[int], frozenset[int]]:
    """Make one dimension of the two innermost ones where rows are short, or begin anywhere.

    Args:
        space: the loop nest of a CUDA kernel.
        operands: what it reads and writes; counters, which are not among them, come last in the nest.
        count: how many of them are outputs.

    Returns:
        The loop nest, the operands that have one row, which then repeats, and those that have one element for each row,
        which then lasts for a period.
    """
    row, none = space.sizes[0], (space, frozenset[int](), frozenset[int]())
    if len(space.sizes) < 2 or row == 1:
        return none
    kinds = [strides[:2] for strides in space.strides]
    repeated = frozenset(slot for slot, kind in enumerate(kinds[: len(operands)]) if kind == (1, 0))
    lasting = frozenset(slot for slot, kind in enumerate(kinds[: len(operands)]) if kind == (0, 1))
    dense = {slot for slot, kind in enumerate(kinds) if kind == (1, row)}
    single = {slot for slot, kind in enumerate(kinds) if kind == (0, 0)}
    is_known = len(repeated | lasting | dense | single) == len(kinds)
    if not (repeated or lasting) or not is_known or not dense.issuperset(range(count)):
        return none
    sizes = [item.dtype.itemsize for slot, item in enumerate(operands) if slot in dense and item.dtype is not None]
    is_whole = row * min(sizes) % VECTOR_BYTES == 0
    # Long rows that all have in common are read once for several. Of what lasts a vector meets two elements at most.
    if row >= GPU_SHORT_ROW and (is_whole or (repeated and lasting)):
        return none
    if lasting and (row < VECTOR_BYTES or (is_whole and not repeated)):
        return none
    merged = (row * space.sizes[1], *space.sizes[2:])
    strides = tuple((own[0], *own[2:]) for own in space.strides)
    return IterationSpace(merged, strides, period=row), repeated, lasting


def _find_rows(
    group: FusionGroup, inputs: Sequence[DescribedValue], operands: Sequence[TensorDesc], values: Sequence[int]
) -> tuple[RowShape, list[Strides]]:
    # How the values lie, and the strides of each operand over the whole shape; ``values`` are those the operands are.
    rows = find_row_shape(group, infer_layouts(group, value_layouts([item.desc for item in inputs])))
    assert rows is not None, "the group was cut into what has one"
    return rows, [rows.strides(value, item.strides) for value, item in zip(values, operands, strict=True)]


def _walk_rows(
    group: FusionGroup,
    inputs: Sequence[DescribedValue],
    operands: Sequence[TensorDesc],
    counters: Sequence[TensorDesc],
    values: Sequence[int],
    device_type: str,
    order: RowOrder | None,
) -> tuple[Walk, RowSpec]:
    # ``values``: which value of the group each operand is, and each counter.
    rows, strides = _find_rows(group, inputs, [*operands, *counters], values)
    space = build_row_space(rows, strides)
    in_memory = zip(space.strides[: len(operands)], values, strict=False)
    full = [own for own, value in in_memory if not rows.is_row[value]]
    is_across = lies_across(space.sizes, range(space.reduced), full)
    if device_type == "cuda":
        pieces = max(item.function.reduction.pieces for item in group.applications if item.function.reduction)
        is_across = (is_across and not pieces) if order is None else order.is_across
        spec = RowSpec(space.reduced, rows.is_row, is_across, order=order, pieces=pieces, scans=rows.scans)
        sizes = [item.dtype.itemsize for item in operands if item.dtype is not None]
        aligned = [item.is_aligned for item in operands]
        if rows.scans:
            return plan_scan_walk(space, spec, [rows.is_row[value] for value in values], sizes, aligned), spec
        if order is None:
            walk = plan_row_walk(group, space, spec, values, sizes, aligned, row_limits(operands[0].device))
        else:
            limits = row_limits(operands[0].device)
            walk = plan_ordered_walk(group, space, spec, values, sizes, aligned, limits.clusters)
        if any(item.dtype is torch.bfloat16 for item in operands) and _looks_up(group, inputs, spec):
            # Those of which each row has its own.
            first, last, own = len(group.outputs), len(operands), walk.space.strides
            each = sum(not rows.is_row[values[slot]] and any(own[slot][spec.reduced :]) for slot in range(first, last))
            walk = look_up_in(walk, spec, each, row_limits(operands[0].device).processors)
        return walk, spec._replace(keeps=walk.tuning.is_resident)
    # Rows of a few elements are better computed side by side, too.
    is_short = space.sizes[0] < CPU_SHORT_ROW <= space.sizes[space.reduced]
    # And columns are better walked down one after another where they are too few for vectors across them.
    narrowest = min(item.dtype.itemsize for item in operands if item.dtype is not None)
    is_few = space.sizes[space.reduced] * narrowest < CPU_FEW_COLUMNS_BYTES
    if rows.scans:
        is_flat = is_short and not counters and set(space.strides) == {(1, space.sizes[0])}
        is_across = (is_across and not is_few) if order is None else ((is_across or is_short) and not is_flat)
        return Walk(space), RowSpec(space.reduced, rows.is_row, is_across, order=order, scans=True, is_flat=is_flat)
    is_across = ((is_across and not is_few) or is_short) if order is None else order.is_across
    length = math.prod(space.sizes[: space.reduced])
    keeps = length * (CPU_LANES if is_across else 1) <= MAX_KEPT
    is_long = order is None and not is_across and length >= CPU_LONG_ROW
    return Walk(space), RowSpec(space.reduced, rows.is_row, is_across, keeps, order, is_long=is_long)


def _looks_up(group: FusionGroup, inputs: Sequence[DescribedValue], rows: RowSpec) -> bool:
    typing = infer_typing(group, [item.spec for item in inputs], torch.get_default_dtype())
    return bool(find_lookups(group, typing.values, rows.is_row))


def starts_abreast(device: torch.device) -> bool:
    """Return whether a launch may begin before the one before it has ended: on GPUs that have clusters."""
    return device.type == "cuda" and row_limits(device).clusters > 1


@cache
def row_limits(device: torch.device | None) -> RowLimits:
    """Return what a device has for kernels with reductions; without one, an H100."""
    # A block gets so much shared memory if it asks; part of it kernels need for combining.
    if device is None or not torch.cuda.is_available():
        return RowLimits(SHARED_BYTES - SHARED_FOR_PARTS, MAX_CLUSTER, PROCESSORS, 2 * MAX_CLUSTER)
    properties: Any = torch.cuda.get_device_properties(device)
    clusters = MAX_CLUSTER if properties.major >= 9 else 1
    return RowLimits(
        properties.shared_memory_per_block_optin - SHARED_FOR_PARTS,
        clusters,
        properties.multi_processor_count,
        # As much as a cluster of whole ones, which these GPUs take if they are asked.
        2 * clusters if properties.major in (9, 10) else clusters,
    )


def _inner_classes(space: IterationSpace, device_type: str) -> list[int]:
    inner = [min(operand[0], 2) for operand in space.strides]
    if device_type == "cpu" and len(space.sizes) > 1 and space.sizes[0] < CPU_SHORT_ROW:
        # Vector loops of a few elements: kernels gather them into longer ones, like operands without a dense row.
        return [2] * len(inner)
    return inner


def _walk(
    space: IterationSpace,
    operands: Sequence[TensorDesc],
    num_outputs: int,
    device_type: str,
    repeated: Collection[int],
    *,
    rounds: bool,
) -> Walk:
    if device_type != "cuda":
        return Walk(space)
    sizes = [item.dtype.itemsize for item in operands if item.dtype is not None]
    return plan_walk(space, sizes, [item.is_aligned for item in operands], num_outputs, repeated, rounds=rounds)


def _reach(space: IterationSpace) -> int:
    return max(
        sum((size - 1) * stride for size, stride in zip(space.sizes, operand, strict=True)) for operand in space.strides
    )


# --- numbers ---------------------------------------------------------------------------------------------------------
def _declared_kinds(group: FusionGroup, inputs: Sequence[DescribedValue]) -> dict[int, set[type | None]]:
    # Of each input that functors take as a scalar, the kinds of number that their parameters are.
    found: dict[int, set[type | None]] = {}
    if not any(item.scalars for item in group.applications):
        return found
    typing = infer_typing(group, [item.spec for item in inputs], torch.get_default_dtype())
    for application, common in zip(group.applications, typing.common, strict=True):
        function = application.function
        for value, parameter in zip(application.scalars, function.scalars, strict=True):
            function.check_kind(parameter, inputs[value].spec.number or float, common)
            kind = _declared_kind(parameter, function.functor.template_parameters, common)
            found.setdefault(value, set()).add(kind)
    return found


def _declared_kind(parameter: EntryParameter, template: Sequence[str], common: torch.dtype) -> type | None:
    # None for a type that C++ deduces from the argument, and for any that is not listed.
    if template and parameter.type == template[0]:
        return None if common is torch.uint64 else number_kind(dtype_info(common).compute_dtype)
    return _DECLARED.get(parameter.type)


# Without those of 64 bits that have no sign: -1 must come as an integer, 1e19 as a double.
_INTEGERS = {
    "char", "signed char", "unsigned char", "short", "unsigned short", "int", "unsigned", "unsigned int", "long",
    "long long", "int8_t", "int16_t", "int32_t", "int64_t", "uint8_t", "uint16_t", "uint32_t",
}  # fmt: skip
_DECLARED: dict[str, type] = {
    "bool": bool, "float": float, "double": float, **dict.fromkeys(_INTEGERS, int),
    **dict.fromkeys(("std::complex<T>", "std::complex<float>", "std::complex<double>"), complex),
}  # fmt: skip


def _pass_number(number: DescribedValue, declared: set[type | None]) -> InputSpec:
    """Return what a scalar is passed to a kernel as.

    As its parameter is declared, so that ``1``, ``1.0`` and ``True`` share a kernel, wherever C++ would convert the
    number to the same value: no complex number to a real one, and no integer that a double does not hold.
    """
    kind = number.spec.number
    wanted = next(iter(declared)) if len(declared) == 1 else None
    if wanted is None or kind in (None, complex) or not number.desc.fits_double:
        return number.spec
    return InputSpec(number_dtype(wanted, torch.get_default_dtype()), number.spec.rank, wanted)
