"""Differentiable calls: a group inside torch.autograd.Function, with the groups of its derivatives.

A gradient is computed in the shape of the outputs it comes from, then summed to the shape of its input. Every derived
group goes through ``run`` again, so that derivatives of any order and torch.func's transforms work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

from fuser import library
from fuser.application import Application
from fuser.autodiff.case import Case, Pass, check_eager, find_case
from fuser.autodiff.opaque import call_opaque, push_forward
from fuser.autodiff.pull_back import eager_function, pull_back_eagerly
from fuser.autodiff.sums import run_in_parts
from fuser.compiler import register, registered
from fuser.dtypes import Rank
from fuser.errors import GradientError, UntranslatableError
from fuser.function import Function
from fuser.graph import GroupBuilder
from fuser.kernel_spec import KernelSpec, Typing, ValueLayout, infer_layouts
from fuser.launcher import record_through, untraced
from fuser.layout import Shape, holds
from fuser.ops import convert_function
from fuser.route import (
    GroupCall,
    call,
    differentiate_parts,
    is_transformed,
    requires_grad,
    run,
    run_below,
)

__all__ = ["differentiate", "differentiate_operator", "transform_operator"]


def differentiate(made: GroupCall) -> Sequence[torch.Tensor]:
    """Run a group so that autograd, forward AD and torch.func's transforms can differentiate it.

    Args:
        made: a call with strided tensors and Python numbers, and no ``out=``.

    Raises:
        GradientError: an input requires grad and the group has no derivative.
    """
    case = find_case(made.spec, made.inputs)
    if is_transformed():
        results: tuple[torch.Tensor, ...] = _Transformed.apply(case, *made.inputs)  # type: ignore[no-untyped-call]
        return results[: case.output_count]
    serve = partial(_call_case, case)
    if made.launcher is not None:
        record_through(made.launcher, serve, made.inputs, made.tensors, made.scalars, default_dtype=case.default_dtype)
    value = serve(*made.inputs)
    return (value,) if isinstance(value, torch.Tensor) else value


def _call_case(case: Case, *inputs: Any) -> Any:
    # A tensor, or a tuple of tensors for several outputs.
    results = _apply(case, *inputs)
    return results[0] if case.output_count == 1 else results[: case.output_count]


class _Recorded(torch.autograd.Function):
    """``apply(case, *inputs)`` returns the outputs, and after them what the backward pass wants to have saved."""

    @staticmethod
    def forward(ctx: Any, case: Case, *inputs: Any) -> tuple[torch.Tensor, ...]:
        results = run_below(case.spec, case.launcher, inputs)
        _save(ctx, case, inputs, results, case.read)
        return tuple(results)

    @staticmethod
    @untraced
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, *_find_gradients(ctx, grads)


# torch.autograd.Function.apply serves transforms, too, and takes its time for it.
_apply: Callable[..., tuple[torch.Tensor, ...]] = super(torch.autograd.Function, _Recorded).apply


class _Transformed(torch.autograd.Function):
    """The same for torch.func's transforms and forward AD, which may ask for anything."""

    @staticmethod
    def forward(case: Case, *inputs: Any) -> tuple[torch.Tensor, ...]:
        # Also where the operator is called in turn.
        with torch._C._AutoDispatchBelowAutograd():
            return tuple(run_below(case.spec, case.launcher, inputs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        case, *values = inputs
        ctx.save_for_forward(*_save(ctx, case, values, output, case.read))

    @staticmethod
    @untraced
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, *_find_gradients(ctx, grads)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Any) -> tuple[torch.Tensor | None, ...]:
        return _find_tangents(ctx, tangents)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], case: Case, *inputs: Any) -> tuple[Any, Any]:
        return _run_batch(case, info.batch_size, in_dims[1:], inputs)


def _save(
    ctx: Any, case: Case, inputs: Sequence[Any], outputs: Sequence[torch.Tensor], read: Sequence[int]
) -> list[torch.Tensor]:
    # For _find_gradients: what it reads, and the shape of each input and output. Returns the tensors.
    ctx.set_materialize_grads(False)
    if case.constant_outputs:
        ctx.mark_non_differentiable(*[outputs[slot] for slot in case.constant_outputs])
    ctx.case = case
    tensors = [inputs[slot] for slot in read] + [outputs[slot] for slot in case.kept_outputs]
    ctx.save_for_backward(*tensors)
    ctx.saved = (*read, *case.kept)
    ctx.numbers = {slot: inputs[slot] for slot in case.numbers}
    ctx.shapes = [inputs[slot].shape for slot in case.wanted]
    ctx.out_shapes = [item.shape for item in outputs]
    ctx.sum_shape = None if case.sum is None else case.sum.shape(inputs)
    return tensors


def _saved_values(ctx: Any) -> dict[int, Any]:
    # Not asked for where there are none: a second backward pass of ``x + y`` is fine, and the question is not.
    values: dict[int, Any] = dict(ctx.numbers)
    if ctx.saved:
        # What torch.func.vjp's function reads has outlived its transform: no record knows such a tensor.
        values |= zip(ctx.saved, map(torch._C._functorch.unwrap_if_dead, ctx.saved_tensors), strict=True)
    return values


def _find_gradients(ctx: Any, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    # Of the layouts that are not strided, autograd lets one through.
    if any(grad is not None and grad.is_sparse for grad in grads):
        try:
            # In eager torch, whose products keep it sparse.
            return _find_strided_gradients(ctx, grads)
        except RuntimeError:
            # What torch has no sparse operation for.
            grads = [grad.to_dense() if grad is not None and grad.is_sparse else grad for grad in grads]
    return _find_strided_gradients(ctx, grads)


def _find_strided_gradients(ctx: Any, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    case: Case = ctx.case
    values = _saved_values(ctx)
    found: list[torch.Tensor | None] = [None] * len(case.devices)
    shapes = dict(zip(case.wanted, ctx.shapes, strict=True))
    try:
        given = _by_shape(ctx.out_shapes, grads)
        passes = [case.backward(slots) for slots in given]
    except (GradientError, UntranslatableError) as error:
        check_eager(case.spec, error)
        return _find_eager_gradients(ctx, values, grads)
    if case.sum is not None:
        grads = [None if grad is None else case.sum.spread(grad, ctx.sum_shape) for grad in grads]
    for slots, backward in zip(given, passes, strict=True):
        if backward is None:
            continue
        # Where nobody differentiates it again, a kernel adds up what broadcast inputs have, too.
        made = () if torch.is_grad_enabled() or is_transformed() else ctx.sum_shape or ctx.out_shapes[slots[0]]
        targets = backward.derived.targets
        step = case.adding_up(backward, tuple(_broadcast_dims(case, slot, shapes[slot], made) for slot in targets))
        for target, result in zip(targets, _run_pass(step, grads, values), strict=True):
            part = result
            shape = shapes[target]
            if part.dim() != len(shape) or part.shape != shape:
                # Not Size.numel, which symbols do not survive.
                is_added_up = holds(part.numel() == math.prod(shape))
                part = part.view(shape) if is_added_up else part.sum_to_size(shape)
            if part.device != case.devices[target]:
                part = part.to(case.devices[target])
            before = found[target]
            found[target] = part if before is None else before + part
    rest = [slot for slot in shapes if found[slot] is None]
    # As torch has it: what is a step function of an input has a gradient, of zeros.
    reached = case.reached(tuple(slot for group in given for slot in group)) if rest else ()
    for slot in rest:
        if slot in reached:
            shape = shapes[slot]
            found[slot] = torch.zeros(shape, dtype=case.typing.values[slot], device=case.devices[slot])
    return found


def _broadcast_dims(case: Case, slot: int, shape: Shape, made: Shape) -> Shape:
    # Along which dimensions of a gradient as it is made that of an input is added up by a kernel: on CUDA.
    device, dtype = case.devices[slot], case.typing.values[slot]
    if device is None or device.type != "cuda" or not dtype.is_floating_point or 0 in made:
        return ()
    first = len(made) - len(shape)
    return tuple(dim for dim, size in enumerate(made) if dim < first or shape[dim - first] != size)


def _by_shape(shapes: Sequence[torch.Size], grads: Sequence[torch.Tensor | None]) -> list[tuple[int, ...]]:
    # Outputs of one shape are differentiated together: a gradient must not be summed as often as another is wide.
    if len(shapes) == 1:
        return [] if grads[0] is None else [(0,)]
    groups: list[tuple[torch.Size, list[int]]] = []
    for slot, (shape, grad) in enumerate(zip(shapes, grads, strict=True)):
        if grad is not None:
            group = next((slots for known, slots in groups if known == shape), None)
            if group is None:
                groups.append((shape, [slot]))
            else:
                group.append(slot)
    return [tuple(slots) for _, slots in groups]


def _find_tangents(ctx: Any, tangents: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    case: Case = ctx.case
    values = _saved_values(ctx)
    given = tuple(slot for slot, tangent in enumerate(tangents) if tangent is not None)
    try:
        forward = case.tangents(given)
    except (GradientError, UntranslatableError) as error:
        check_eager(case.spec, error)
        return _find_eager_tangents(case, values, given, tangents)
    found = dict(zip(forward.derived.targets, _run_pass(forward, tangents, values), strict=True)) if forward else {}
    made = []
    for slot, shape in enumerate(ctx.out_shapes):
        tangent = found.get(slot)
        if tangent is None and slot not in case.constant_outputs:
            dtype = case.typing.values[case.spec.group.outputs[slot]]
            tangent = values[case.wanted[0]].new_zeros((), dtype=dtype)
        made.append(None if tangent is None else tangent.expand(shape))
    return tuple(made)


def _find_eager_gradients(
    ctx: Any, values: Mapping[int, Any], grads: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    case: Case = ctx.case
    inputs = [values[slot] for slot in range(len(case.devices))]
    incoming = {slot: grad for slot in _continuous_outputs(case) if (grad := grads[slot]) is not None}
    wanted = [case.tensors.index(slot) for slot in case.wanted]
    made = pull_back_eagerly(case.spec, inputs, [*incoming], [*incoming.values()], wanted)
    reached = case.reached(tuple(incoming))
    found: list[torch.Tensor | None] = [None] * len(case.devices)
    for slot, gradient in zip(case.wanted, made, strict=True):
        found[slot] = gradient if slot in reached else None
    return found


def _find_eager_tangents(
    case: Case, values: Mapping[int, Any], given: tuple[int, ...], tangents: Sequence[Any]
) -> tuple[torch.Tensor | None, ...]:
    inputs = [values[slot] for slot in range(len(case.devices))]
    tensors = [values[slot] for slot in case.tensors]
    slots = _continuous_outputs(case)
    if not slots:
        return (None,) * len(case.spec.group.outputs)
    function = eager_function(case.spec, inputs, slots)
    derivative = partial(push_forward, function, [case.tensors.index(slot) for slot in given], len(tensors))
    made = call_opaque(derivative, *tensors, *[tangents[slot] for slot in given])
    found = dict(zip(slots, made, strict=True))
    return tuple(found.get(slot) for slot in range(len(case.spec.group.outputs)))


def _continuous_outputs(case: Case) -> list[int]:
    return [slot for slot in range(len(case.spec.group.outputs)) if slot not in case.constant_outputs]


def _run_pass(step: Pass, derivatives: Sequence[Any], values: Mapping[int, Any]) -> tuple[torch.Tensor, ...]:
    # The derivatives, differentiable in turn where somebody differentiates this formula.
    items = tuple(
        [derivatives[slot] if is_derivative else values[slot] for is_derivative, slot in step.derived.sources]
    )
    made = call(step.spec, step.launcher, items)
    return (made,) if isinstance(made, torch.Tensor) else made


def _run_batch(
    case: Case, batch_size: int, in_dims: Sequence[int | None], inputs: Sequence[Any]
) -> tuple[tuple[torch.Tensor, ...], tuple[int | None, ...]]:
    # The results, and where the batch is in each of them.
    group = case.spec.group
    if group.has_composite or group.arranges or (group.reshapes and len(group.names()) > 1):
        # What was reduced has fewer dimensions than what it meets, and arrangements number them: one after the other.
        def in_parts(*items: Any) -> tuple[torch.Tensor, ...]:
            return tuple(run_in_parts(case.spec, items))

        found: tuple[torch.Tensor, ...] = torch.func.vmap(in_parts, in_dims=tuple(in_dims))(*inputs)
        return found, (0,) * len(found)
    ranks = tuple(map(_rank, inputs, in_dims))
    # What is made of no input that has the batch does not have it either.
    has_batch = [dim is not None for dim in in_dims] if any(dim is not None for dim in in_dims) else [True] * len(ranks)
    for item in group.applications:
        has_batch += [any(has_batch[value] for value in item.tensors)] * item.function.num_outputs
    spec = _for_batch(case.spec, case.typing, ranks, tuple(has_batch))
    made = run(spec, _batch_inputs(batch_size, in_dims, inputs))
    if len(made) == 1 and len(group.used_inputs()) == len(group.inputs):
        return tuple(made), (0,)
    layouts = infer_layouts(group, _layouts_of_ones(ranks))
    results = [
        # Without the dimensions by which the widest input has more than those that it is made of.
        item.flatten(0, item.dim() - 1 - len(layouts[value].shape)) if has_batch[value] else item
        for value, item in zip(group.outputs, made, strict=True)
    ]
    return tuple(results), tuple(0 if has_batch[value] else None for value in group.outputs)


def _batch_inputs(batch_size: int, in_dims: Sequence[int | None], inputs: Sequence[Any]) -> list[Any]:
    # The batch comes first, and behind it the dimensions of an element, as many for each input.
    ranks = list(map(_rank, inputs, in_dims))
    widest = max(ranks)
    batched = []
    for item, dim, count in zip(inputs, in_dims, ranks, strict=True):
        if dim is None or not isinstance(item, torch.Tensor):
            batched.append(item)
            continue
        moved = item.movedim(dim, 0)
        batched.append(moved.reshape(moved.shape[0], *[1] * (widest - count), *moved.shape[1:]))
    if not any(dim is not None for dim in in_dims):
        batched[0] = batched[0].expand(batch_size, *batched[0].shape)
    return batched


def _rank(item: Any, batch_dim: int | None) -> int:
    # How many dimensions an element of the batch has.
    return item.dim() - (batch_dim is not None) if isinstance(item, torch.Tensor) else 0


def _layouts_of_ones(ranks: Sequence[int]) -> list[ValueLayout]:
    return [ValueLayout((1,) * rank, (1,) * rank) for rank in ranks]


@lru_cache(1024)
def _for_batch(spec: KernelSpec, typing: Typing, ranks: tuple[int, ...], has_batch: tuple[bool, ...]) -> KernelSpec:
    # The group for inputs with a dimension more at the front: indices and reductions go along those that were there,
    # and what has no dimension in an element of the batch has its weight in promotion, though it has one now.
    group = spec.group
    weak = {value for value, rank in enumerate(typing.ranks) if rank is Rank.ZERO_DIM and has_batch[value]}
    if not group.reshapes and not weak and not any(item.function.is_index for item in group.applications):
        return spec
    layouts = infer_layouts(group, _layouts_of_ones(ranks))
    builder = GroupBuilder(group.numerics)
    handles = [builder.add_input(item.name, is_scalar=item.is_scalar, default=item.default) for item in group.inputs]
    for index, item in enumerate(group.applications):
        tensors = [handles[value] for value in item.tensors]
        promoted = _promoted_slots(item, typing)
        dtypes = {typing.values[item.tensors[slot]] for slot in promoted}
        if len(dtypes) > 1 and any(item.tensors[slot] in weak for slot in promoted):
            common = typing.common[index]
            for slot in promoted:
                if typing.values[item.tensors[slot]] is not common:
                    (tensors[slot],) = builder.apply(convert_function(common), tensors[slot : slot + 1])
        rank = max(len(layouts[value].shape) for value in item.tensors)
        handles += builder.apply(
            _count_from_the_end(item.function, rank), tensors, [handles[value] for value in item.scalars], item.name
        )
    return register(builder.build([handles[value] for value in group.outputs]))


def _promoted_slots(item: Application, typing: Typing) -> list[int]:
    # The tensors that its dtype follows from.
    parameters = zip(item.tensors, item.function.tensor_parameters(len(item.tensors)), strict=True)
    return [
        slot
        for slot, (value, parameter) in enumerate(parameters)
        if parameter.name not in item.function.unpromoted and typing.ranks[value] is not Rank.NUMBER
    ]


def _count_from_the_end(function: Function, rank: int) -> Function:
    # Of tensors with so many dimensions in an element of the batch.
    if function.is_index:
        function = replace(function, dims=tuple(dim - rank for dim in function.index_dims(rank)))
    if function.is_view:
        whole = max(rank, function.result_rank(rank))
        function = replace(function, dims=tuple(dim % whole - whole for dim in function.dims or ()))
    if function.reduction is not None:
        dims = tuple(dim - rank for dim in function.reduction.normalize_dims(rank))
        function = replace(function, reduction=function.reduction._replace(dims=dims))
    return function


# --- the operator ------------------------------------------------------------------------------------------------
def differentiate_operator(group: str, kinds: str, *inputs: Any) -> Sequence[torch.Tensor]:
    """Run the operator so that autograd and forward AD can differentiate it (dispatch key Autograd)."""
    spec, values = registered(group), library.merge_inputs(kinds, *inputs)
    if is_transformed() or (torch.is_grad_enabled() and any(map(requires_grad, values))):

        def apply() -> Sequence[torch.Tensor]:
            case = find_case(spec, values, saves_results=False)
            results: tuple[torch.Tensor, ...] = _Transformed.apply(case, *values)  # type: ignore[no-untyped-call]
            return results

        return differentiate_parts(spec, values, apply)
    with torch._C._AutoDispatchBelowAutograd():
        replayed = library.replay_operator(group, values)
        return library.call_operator(spec, values) if replayed is None else replayed


def transform_operator(group: str, kinds: str, *inputs: Any) -> Sequence[torch.Tensor]:
    """Run the operator below torch.func's transforms (dispatch key FuncTorchDynamicLayerFrontMode)."""
    spec, values = registered(group), library.merge_inputs(kinds, *inputs)
    if is_transformed():
        return run(spec, values)
    plain = [_from_functional(item) if isinstance(item, torch.Tensor) else item for item in values]
    with retrieve_current_functorch_interpreter().lower():
        results = library.call_operator(spec, plain)
    return [torch._to_functional_tensor(item) for item in results]


def _from_functional(item: torch.Tensor) -> torch.Tensor:
    if not torch._is_functional_tensor(item):
        return item
    torch._functionalize_sync(item)
    return torch._from_functional_tensor(item)
