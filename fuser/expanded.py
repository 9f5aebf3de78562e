"""A call's group as kernels have it: torch's larger ops in their steps, outputs in boxes, each value described."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch

from fuser import torch_ops as ops
from fuser.arg_spec import DescribedValue
from fuser.boxes import cut_boxes
from fuser.columns import cut_columns, find_columns
from fuser.combining import BATCH
from fuser.dtypes import Rank, dtype_info
from fuser.errors import UnsupportedError
from fuser.expansion import Expansion
from fuser.function import Function, View
from fuser.graph import FusionGroup
from fuser.kernel_spec import InputSpec, KernelSpec, ValueLayout, infer_layouts, infer_typing
from fuser.row_orders import HALF_VECTOR_BYTES, Orders, find_orders, gpu_size
from fuser.sections import FEW_ROWS, LONG_ROW
from fuser.tensor_desc import TensorDesc, common_device, input_specs, value_layouts
from fuser.view_steps import Steps, seen

__all__ = ["Expanded", "describe_values", "expand_call", "expand_in_order", "settle_orders"]

# torch's ops that have formulas for a number as their second operand, and what they are with one.
_OF_NUMBER = {"div": "div_number", "div_trunc": "div_trunc_number", "pow": "pow_number"}
# Rows of a loss that fill a GPU without sharing any.
MANY_ROWS = 512


class Expanded(NamedTuple):
    """A call's group, with the steps of torch's larger ops in their place, and what its values are."""

    # None where the group has none of them, and is what it was.
    spec: KernelSpec | None
    expansion: Expansion
    # Of the group with the steps.
    values: tuple[DescribedValue, ...]
    # Of the call, as torch gives them.
    outputs: tuple[TensorDesc, ...]
    # Of the group without the steps.
    whole: tuple[DescribedValue, ...]
    # Where outputs are cut into boxes: which of them each output of the group is part of, and which part.
    boxes: tuple[tuple[int, Steps], ...] = ()

    @property
    def group(self) -> FusionGroup:
        """With the steps."""
        return self.expansion.group

    @property
    def targets(self) -> Sequence[int]:
        """For each output of the group which one of the call's it is, or is part of."""
        return [target for target, _ in self.boxes] or range(len(self.outputs))

    def lay_out(self, outputs: Sequence[TensorDesc]) -> list[TensorDesc]:
        """Return tensors of the call's outputs as the group has them."""
        if self.boxes:
            return [seen(outputs[target], steps) for target, steps in self.boxes]
        return [
            _view(item, None if view is None else view.inverse)
            for item, view in zip(outputs, self.expansion.outputs, strict=True)
        ]


def expand_in_order(
    spec: KernelSpec, inputs: Sequence[TensorDesc], device: torch.device, layouts: Sequence[ValueLayout]
) -> tuple[Expanded, Orders]:
    """Expand a call's group, and find the orders of its reductions.

    Args:
        spec: the group's.
        inputs: one per input of the group.
        device: where the call is made.
        layouts: of all values of the group.

    Raises:
        UnsupportedError: an application has no kernel for these inputs.
    """
    # Fast numerics have steps in torch's order only where that is known.
    expanded, orders = settle_orders(expand_call(spec, inputs, device, layouts), device)
    for index, item in enumerate(expanded.group.applications):
        order = item.function.reduction.order if item.function.reduction else ""
        if (order.startswith(("batch_norm", "group_norm")) or "softmax" in order) and index not in orders:
            return settle_orders(expand_call(spec, inputs, device, layouts, in_order=False), device)
    return expanded, orders


def expand_call(
    spec: KernelSpec,
    inputs: Sequence[TensorDesc],
    device: torch.device,
    layouts: Sequence[ValueLayout],
    *,
    in_order: bool = True,
) -> Expanded:
    """Expand a call's group; arguments as in ``expand_in_order``. ``in_order``: with steps in torch's order.

    Raises:
        As ``expand_in_order``.
    """
    whole = _describe(spec.group, inputs, device, layouts)
    _check_sizes(spec.group, whole)
    outputs = tuple(whole[value].desc for value in spec.group.outputs)
    group = _take_numbers(spec.group, whole, device)
    if group.arranges:
        return _expand_boxes(group, inputs, device, layouts, whole)
    if not group.has_composite:
        views = [(slot, None) for slot in range(len(inputs))]
        same = Expansion(group, tuple(views), (None,) * len(outputs), tuple(range(len(group.applications))))
        return Expanded(spec if group is spec.group else None, same, tuple(whole), outputs, tuple(whole))
    forms = _ordered_forms(group, whole, device) if in_order else ()
    # Where torch's kernel would stay for its order, it stays for what else it does, too.
    expansion = ops.expand(group, forms, knows_sums=device.type == "cuda" or not group.is_strict)
    try:
        seen = [_view(inputs[slot], view) for slot, view in expansion.inputs]
    except UnsupportedError as error:
        # They meet something in the group.
        error.application = next(i for i, item in enumerate(spec.group.applications) if item.function.is_composite)
        raise
    values = _describe(
        expansion.group, seen, device, infer_layouts(expansion.group, value_layouts(seen)), expansion.origins
    )
    return Expanded(None, expansion, tuple(values), outputs, tuple(whole))


def _check_sizes(group: FusionGroup, values: Sequence[DescribedValue]) -> None:
    # What torch warns of, or refuses, is torch's.
    for index, (item, made) in enumerate(zip(group.applications, group.value_offsets(), strict=True)):
        function, (first, *others) = item.function, (values[value].desc for value in item.tensors)
        result = values[made].desc
        is_odd = function.is_in_place and (result.shape != first.shape or result.dtype != first.dtype)
        if is_odd or (function.sizes_of and others[0].shape != first.shape):
            reason = f"op {function.op!r} with tensors of different sizes or dtypes"
            raise UnsupportedError(reason, application=index)


def _take_numbers(group: FusionGroup, values: Sequence[DescribedValue], device: torch.device) -> FusionGroup:
    taken = {
        index: replace(item, function=_of_number(item.function, [values[value].spec for value in item.tensors]))
        for index, item in enumerate(group.applications)
        if item.function.op in _OF_NUMBER and _counts_as_number(item.function, values[item.tensors[1]].spec, device)
    }
    if device.type == "cpu":
        taken |= {
            index: replace(item, function=_on_cpu(item.function))
            for index, item in enumerate(group.applications)
            if item.function.reduction and _adds_in_double(group, values[item.tensors[0]].desc.dtype)
        }
    if not taken:
        return group
    return replace(group, applications=tuple(taken.get(i, item) for i, item in enumerate(group.applications)), _key=[])


def _counts_as_number(function: Function, second: InputSpec, device: torch.device) -> bool:
    # ATen's CUDA kernels look whether it lies on the host, those of the CPU whether it has dimensions: they round a
    # truncated quotient only once then.
    if device.type == "cuda":
        return second.number is not None
    return function.op == "div_trunc" and second.rank is not Rank.TENSOR


def _of_number(function: Function, given: Sequence[InputSpec]) -> Function:
    operands, default = [(item.dtype, item.rank) for item in given], torch.get_default_dtype()
    taken = ops.OPS[_OF_NUMBER[str(function.op)]].function
    is_same = taken.common_dtype(operands, default) == function.common_dtype(operands, default)
    return taken if is_same else replace(taken, unpromoted=())


def _adds_in_double(group: FusionGroup, dtype: torch.dtype | None) -> bool:
    # Whether to follow torch's CPU kernels that do. To what is rounded to 16 bits it makes no difference, but to a few
    # last bits, where float32 holds the squares: not those of all bfloat16.
    return dtype in (torch.float32, torch.bfloat16) or (group.is_strict and dtype is torch.float16)


def _on_cpu(function: Function) -> Function:
    op, reduction = ops.REDUCTIONS.get(function.op or ""), function.reduction
    if op is None or reduction is None or not op.on_cpu:
        return function
    return ops.reduction_function(op.on_cpu, reduction.dims, reduction.keepdim)


def _ordered_forms(
    group: FusionGroup, values: Sequence[DescribedValue], device: torch.device
) -> tuple[tuple[Any, ...] | None, ...]:
    forms, is_strict = list[tuple[Any, ...] | None](), group.is_strict
    for index, item in enumerate(group.applications):
        given = [values[value].desc for value in item.tensors]
        dtypes, layouts = [desc.dtype for desc in given], [(desc.shape, desc.strides) for desc in given]
        form, is_ordered = None, item.function.is_composite and (is_strict or device.type == "cuda")
        if is_ordered and not is_strict and _is_long_loss(group, index, given):
            form = (*(item.function.form or ()), ops.ONE_WALK)
        elif is_ordered and not is_strict and _has_few_long_rows(item.function, given[0]):
            form = (*(item.function.form or ()), ops.SHARED_WALK)
        elif is_ordered:
            form = ops.ordered_form(item.function, dtypes, layouts, is_strict=is_strict)
        forms.append(form)
    return tuple(forms)


def _has_few_long_rows(function: Function, given: TensorDesc) -> bool:
    # Whether blocks of a GPU share the rows of a softmax, each walk over which is a launch of its own.
    last = len(given.shape) - 1
    if function.op not in {"_softmax", "_log_softmax"} or function.form not in ((-1,), (last,)) or last < 0:
        return False
    is_plain = given.dtype in (torch.float32, torch.bfloat16, torch.float16) and given.strides[last] == 1
    return is_plain and given.shape[last] > LONG_ROW and prod(given.shape[:last]) < FEW_ROWS


def _is_long_loss(group: FusionGroup, index: int, given: Sequence[TensorDesc]) -> bool:
    # Whether a loss is all that reads a log_softmax of many long rows of 16 bits: one walk is enough then.
    function = group.applications[index].function
    if function.op != "_log_softmax" or function.form not in ((1,), (-1,)) or len(given[0].shape) != 2:
        return False
    rows, classes = given[0].shape
    dtype = given[0].dtype or torch.float32
    if rows < MANY_ROWS or classes <= BATCH or not dtype_info(dtype).is_narrow:
        return False
    if classes * dtype.itemsize % HALF_VECTOR_BYTES:
        return False
    made = group.value_offsets()[index]
    readers = {reader.function.op for reader in group.applications if made in reader.tensors}
    return readers == {"nll_loss_forward"} and made not in group.outputs


def _expand_boxes(
    group: FusionGroup,
    inputs: Sequence[TensorDesc],
    device: torch.device,
    layouts: Sequence[ValueLayout],
    whole: Sequence[DescribedValue],
) -> Expanded:
    count = len(inputs)
    typing = infer_typing(group, [item.spec for item in whole[:count]], torch.get_default_dtype())
    cut = cut_boxes(group, whole[:count], typing, layouts)
    given, own = [item for _, item, _ in cut.inputs], cut.group
    values = _describe(
        own, given, device, infer_layouts(own, value_layouts(given)), specs=[item for _, _, item in cut.inputs]
    )
    outputs = tuple(whole[value].desc for value in group.outputs)
    for (target, steps), value in reversed([*zip(cut.outputs, own.outputs, strict=True)]):
        # Others read it where it is written.
        values[value] = values[value]._replace(desc=seen(outputs[target], steps))
    views = tuple((slot, None) for slot, _, _ in cut.inputs)
    origin = next(index for index, item in enumerate(group.applications) if item.function.arranges)
    same = Expansion(own, views, (None,) * len(own.outputs), (origin,) * len(own.applications))
    return Expanded(None, same, tuple(values), outputs, tuple(whole), cut.outputs)


def _view(desc: TensorDesc, view: View | None) -> TensorDesc:
    if view is None or desc.dtype is None:
        return desc
    shape, strides = view.apply(desc.shape, desc.strides)
    return desc._replace(shape=shape, strides=strides)


def _describe(
    group: FusionGroup,
    inputs: Sequence[TensorDesc],
    device: torch.device,
    layouts: Sequence[ValueLayout],
    origins: Sequence[int] = (),
    specs: Sequence[InputSpec] = (),
) -> list[DescribedValue]:
    # The inputs, then what the applications make, as it would lie in memory.
    specs = specs or input_specs(inputs, device)
    try:
        typing = infer_typing(group, specs, torch.get_default_dtype())
    except UnsupportedError as error:
        error.application = origins[error.application] if origins else error.application
        raise
    made = list(zip(typing.values, typing.ranks, layouts, strict=True))[len(inputs) :]
    return [DescribedValue(*item) for item in zip(inputs, specs, strict=True)] + [
        DescribedValue(
            TensorDesc(torch.Tensor, dtype, layout.shape, layout.strides, device),
            InputSpec(dtype, rank, ndim=len(layout.shape)),
        )
        for dtype, rank, layout in made
    ]


def settle_orders(expanded: Expanded, device: torch.device) -> tuple[Expanded, Orders]:
    """Return the orders of a group's reductions, and the group: those with a walk in common are in two steps.

    Raises:
        UnsupportedError: there is no order that is torch's.
    """
    group, origins = expanded.group, expanded.expansion.origins
    try:
        orders = find_orders(group, expanded.values, device)
    except UnsupportedError as error:
        error.application = origins[error.application]
        raise
    if device.type != "cuda" or any(orders.values()):
        return expanded, orders
    columns = find_columns(group, expanded.values, orders, gpu_size(device).processors)
    if not columns:
        return expanded, orders
    inputs = [item.desc for item in expanded.values[: len(group.inputs)]]
    typing = infer_typing(group, input_specs(inputs, device), torch.get_default_dtype())
    cut, sources = cut_columns(group, typing, columns)
    values = _describe(cut, inputs, device, infer_layouts(cut, value_layouts(inputs)))
    expansion = expanded.expansion._replace(group=cut, origins=tuple(origins[index] for index in sources))
    found = {index: orders[source] for index, source in enumerate(sources) if source in orders}
    return expanded._replace(spec=None, expansion=expansion, values=tuple(values)), found


def describe_values(group: FusionGroup, inputs: Sequence[TensorDesc]) -> list[TensorDesc]:
    """Return what the values of a group are in a call: its inputs, then what its applications make.

    Raises:
        UnsupportedError: an application has no dtype for them.
    """
    layouts = infer_layouts(group, value_layouts(inputs))
    return [item.desc for item in _describe(group, inputs, common_device(group, inputs), layouts)]
