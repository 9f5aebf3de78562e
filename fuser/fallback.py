"""The same computation in eager torch, operation by operation: for when a group cannot be compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from fuser import torch_ops as ops
from fuser.cxx.functor import Functor, Role
from fuser.dtypes import Rank, dtype_info, fits_in_word, number_dtype, number_kind, range_error, scalar_dtype
from fuser.errors import FallbackError, UnsupportedError, UntranslatableError
from fuser.function import Function
from fuser.graph import FusionGroup
from fuser.layout import Shape, broadcast_shapes, infer_output_strides

__all__ = ["Fallback", "call_derived", "each_its_own", "eager_version", "find_obstacle"]

# One of each kind of type that a functor may have been written for.
_SAMPLES = (torch.float32, torch.int32, torch.complex64)


class Fallback(NamedTuple):
    """A group as a sequence of eager calls.

    torch's ops run as themselves, functors as what the user gave, or else as what their text says.
    """

    group: FusionGroup

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the functors without an eager version; the fallback can run when there are none."""
        return tuple(dict.fromkeys(name for name, _ in self.obstacles))

    @property
    def is_given(self) -> bool:
        """Whether the user gave the eager version of every functor."""
        return all(item.function.op is not None or item.function.fallback for item in self.group.applications)

    @property
    def obstacles(self) -> tuple[tuple[str, UntranslatableError], ...]:
        """Each functor without an eager version, and what in its text has none."""
        found = []
        for function in dict.fromkeys(item.function for item in self.group.applications):
            if function.op is None and function.fallback is None:
                obstacles = filter(None, map(find_obstacle, function.functors))
                found += [(function.name, obstacle) for obstacle in obstacles]
        return tuple(found)

    def run(self, inputs: Sequence[Any], reason: str) -> list[torch.Tensor]:
        """Run the group on eager torch.

        Args:
            inputs: tensors and Python numbers, as many as the group has inputs.
            reason: why the group is not fused, for the message when it cannot run here either.

        Raises:
            FallbackError: a functor has no eager version.
        """
        return self.bind(reason)(inputs)

    def bind(self, reason: str) -> Callable[[Sequence[Any]], list[torch.Tensor]]:
        """Return ``run`` as a function of the inputs: what does not depend on them is looked up once."""
        steps = []
        for item in self.group.applications:
            names = (parameter.name for parameter in item.function.scalars)
            steps.append((item, eager_version(item.function), tuple(zip(names, item.scalars, strict=True))))
        outputs = self.group.outputs

        def run(inputs: Sequence[Any]) -> list[torch.Tensor]:
            values: list[Any] = list(inputs)
            for item, call, scalars in steps:
                tensors = [values[value] for value in item.tensors]
                try:
                    made = call(*tensors, **{name: values[value] for name, value in scalars})
                except (UntranslatableError, UnsupportedError) as error:
                    name = item.function.name
                    advice = "\ngive jit_fn(..., fallback=a function of the same tensors and scalars)"
                    raise FallbackError(
                        f"cannot fuse ({reason}), and {name!r} has no eager version to fall back to: {error}"
                        # A reduction takes none.
                        f"{'' if item.function.reduces else advice}"
                    ) from error
                values += [made] if item.function.num_outputs == 1 and isinstance(made, torch.Tensor) else list(made)
            return each_its_own([values[value] for value in outputs])

        return run


def each_its_own(results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors, copies of those that come again: equal applications are merged, but each makes one of its own."""
    if len(results) == 1:
        return [*results]
    firsts = {id(item): slot for slot, item in reversed([*enumerate(results)])}
    return [item if firsts[id(item)] == slot else item.clone() for slot, item in enumerate(results)]


def find_obstacle(functor: Functor) -> UntranslatableError | None:
    """Return what keeps a functor's text from having an eager version; None when it has one for some dtype."""
    from fuser.eager.translation import translate  # noqa: PLC0415 - as below

    first = None
    for compute in _SAMPLES:
        types = tuple(compute if item.role is Role.TENSOR else torch.float64 for item in functor.inputs)
        try:
            translate(functor, compute, types)
        except UntranslatableError as error:
            first = first or error.with_traceback(None)
        else:
            return None
    return first


def call_derived(function: Function, tensors: Sequence[Any], scalars: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Call a functor as its text says, in eager torch: promotion, rounding, shapes and strides are the kernel's.

    Args:
        function: the functor with its typing rules.
        tensors: tensors and Python numbers, as for a call of it.
        scalars: value of each scalar by its name: Python numbers or 0-dim tensors.

    Raises:
        UntranslatableError: its text has no eager version for these dtypes.
        UnsupportedError: torch does not promote the dtypes, or lacks an operation for tensors of this layout.
    """
    # The translation is a third of fuser, and many programs need none of it.
    from fuser.eager.translation import cast, translate  # noqa: PLC0415
    from fuser.eager_reduction import EagerReduction  # noqa: PLC0415

    default = torch.get_default_dtype()
    common = function.common_dtype([_operand(item, default) for item in tensors], default)
    compute = dtype_info(common).compute_dtype
    # Numbers that a kernel does not take: Python's would lose their imaginary part here, or bits.
    bound = [*zip(function.functor.tensors, tensors, strict=False)]
    for parameter in function.scalars:
        bound.append((parameter, scalars[parameter.name]))
        function.check_kind(parameter, number_kind(scalar_dtype(scalars[parameter.name])), common)
    for parameter, item in bound:
        if not fits_in_word(item):
            raise range_error(f"{function.name}: {parameter.name or 'a parameter without a name'}", item)
    arguments, types = _convert_arguments(function, tensors, scalars, compute, default)
    given = [item for item in tensors if isinstance(item, torch.Tensor)]
    needs_grad = torch.is_grad_enabled() and any(
        isinstance(item, torch.Tensor) and item.requires_grad for item in arguments
    )
    is_traced = torch._C._functorch.peek_interpreter_stack() is not None
    is_differentiable = needs_grad or is_traced
    translation = translate(function.functor, compute, tuple(types), differentiable=is_differentiable)
    reduction: EagerReduction | None = None
    if function.reduction is not None:
        reduction = EagerReduction(function.reduction, compute, scalars, differentiable=is_differentiable)
    dtypes = function.result_dtypes(common)
    abstract = next((item for item in given if item.is_meta or isinstance(item, FakeTensor)), None)
    is_graph = translation.graph_module is not None and (reduction is None or reduction.is_graph)
    if not is_graph and abstract is not None:
        # There are no values for the interpreter to go by.
        shape = _common_shape(given)
        shape = shape if reduction is None else reduction.reduction.reduce_shape(shape)
        return tuple(torch.empty(shape, dtype=dtype, device=abstract.device) for dtype in dtypes)
    try:
        computed = translation.run(*arguments)
        if reduction is not None:
            made = reduction.run(computed, _common_shape(given))
            return tuple(cast(raw, dtype) for raw, dtype in zip(made, dtypes, strict=True))
    except UntranslatableError:
        raise
    except (NotImplementedError, RuntimeError) as error:
        if all(item.layout is torch.strided and not item.is_nested for item in given):
            raise
        # What torch cannot do to such a tensor is no error in the functor.
        raise UnsupportedError(str(error).splitlines()[0]) from error
    results: list[torch.Tensor] = []
    for raw, dtype in zip(computed, dtypes, strict=True):
        result = _lay_out(cast(raw, dtype), tensors)
        is_shared = any(_share_memory(result, other) for other in (*given, *results))
        results.append(result.clone() if is_shared else result)
    return tuple(results)


def _convert_arguments(
    function: Function, tensors: Sequence[Any], scalars: dict[str, Any], compute: torch.dtype, default: torch.dtype
) -> tuple[list[Any], list[torch.dtype]]:
    # What a functor's parameters are bound to, in their order, and of which types.
    from fuser.eager.translation import cast  # noqa: PLC0415 - as in call_derived

    arguments: list[Any] = []
    types: list[torch.dtype] = []
    rest = list(tensors)
    for parameter in function.functor.parameters:
        if parameter.role is Role.SCALAR:
            number = scalars[parameter.name]
            types.append(scalar_dtype(number))
            arguments.append(number.to(types[-1]) if isinstance(number, torch.Tensor) else number)
        elif parameter.role is Role.TENSOR and rest:
            item = rest.pop(0)
            is_promoted = parameter.name not in function.unpromoted
            types.append(compute if is_promoted else dtype_info(_operand(item, default)[0]).compute_dtype)
            arguments.append(cast(item, types[-1]))
    return arguments, types


def eager_version(function: Function) -> Callable[..., Any]:
    """Return what calls a function in eager torch: it takes its tensors by position, and its scalars by name."""
    if function.is_index:
        return partial(_number_elements, function)
    if function.is_view:
        return partial(ops.eager_view, function)
    if function.arranges:
        return lambda *tensors: ops.eager_arrangement(function, tensors)
    if function.is_composite:
        return lambda *tensors, **scalars: ops.call_composite(function, tensors, scalars)
    if function.op is not None and function.reduction is not None:
        dims, keepdim, eager = function.reduction.dims, function.reduction.keepdim, ops.REDUCTIONS[function.op].eager
        # The numbers of elements come second where a kernel finds places.
        return lambda x, *_, **scalars: eager(x, dims, keepdim, **scalars)
    if function.asks_sizes:
        return lambda *tensors, **scalars: ops.call_of_sizes(function, tensors, scalars)
    if function.op is not None:
        conversion = {"dtype": function.out_dtypes[0]} if function.is_conversion else {}
        return partial(ops.OPS[function.op].eager, **conversion)
    if function.backward is not None:
        # Also torch's own derivative of a group is to be the one that the user wrote.
        return lambda *tensors, **scalars: _HandWritten.apply(function, scalars, *tensors)  # type: ignore[no-untyped-call]
    return function.fallback or (lambda *tensors, **scalars: call_derived(function, tensors, scalars))


def _number_elements(function: Function, *tensors: Any) -> torch.Tensor:
    given = [item for item in tensors if isinstance(item, torch.Tensor)]
    return _lay_out(ops.eager_index(function, given), given)


class _HandWritten(torch.autograd.Function):
    """``apply(function, scalars, *tensors)`` of a function with a backward functor."""

    generate_vmap_rule = True

    @staticmethod
    def forward(function: Function, scalars: dict[str, Any], *tensors: Any) -> Any:
        results = eager_version(replace(function, backward=None))(*tensors, **scalars)
        return (results,) if isinstance(results, torch.Tensor) else tuple(results)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.function, ctx.scalars, *tensors = inputs
        ctx.inputs = [item if not isinstance(item, torch.Tensor) else item.shape for item in tensors]
        ctx.save_for_backward(*[item if isinstance(item, torch.Tensor) else None for item in (*tensors, *output)])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        from fuser.eager.translation import cast  # noqa: PLC0415 - as above

        backward = ctx.function.backward
        numbers = [*ctx.inputs, *gradients]
        values = [numbers[i] if item is None else item for i, item in enumerate(ctx.saved_tensors)]
        scalars = {parameter.name: ctx.scalars[parameter.name] for parameter in backward.functor.scalars}
        first = {"tensor": 0, "output": len(ctx.inputs), "gradient": len(ctx.saved_tensors)}
        values += gradients
        taken = [values[first[kind] + slot] for kind, slot in backward.operands(ctx.function.functor)]
        derivative = Function(backward.functor, unpromoted=backward.unpromoted(ctx.function))
        made = dict(zip(backward.targets, call_derived(derivative, taken, scalars), strict=True))
        found = [made.get(slot) for slot in range(len(ctx.inputs))]
        return (
            None,
            None,
            *[
                cast(grad.sum_to_size(shape), values[i].dtype)
                if isinstance(shape, torch.Size) and grad is not None
                else None
                for i, (grad, shape) in enumerate(zip(found, ctx.inputs, strict=True))
            ],
        )


def _operand(item: Any, default: torch.dtype) -> tuple[torch.dtype, Rank]:
    if isinstance(item, torch.Tensor):
        # Only the number of dimensions counts, which nested tensors have too.
        return item.dtype, Rank.TENSOR if item.dim() else Rank.ZERO_DIM
    return number_dtype(type(item), default), Rank.NUMBER


def _common_shape(given: Sequence[torch.Tensor]) -> Shape:
    return broadcast_shapes([tuple(item.shape) for item in given])


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(torch._C._is_alias_of(one, other))  # type: ignore[attr-defined]


def _lay_out(result: torch.Tensor, operands: Sequence[Any]) -> torch.Tensor:
    # The shape is that of all tensors, also of those the result does not depend on; the strides are the kernel's.
    given = [item for item in operands if isinstance(item, torch.Tensor)]
    if any(item.is_nested for item in given):
        return result
    shape = _common_shape(given)
    device = next((item.device for item in given if item.dim()), result.device)
    if result.device != device:
        result = result.to(device)
    if result.shape != shape:
        result = result.expand(shape).clone(memory_format=torch.contiguous_format)
    if torch._C._functorch.is_legacy_batchedtensor(result):
        # Nothing can be copied from a batch into one tensor.
        return result
    is_plain = all(item.layout is torch.strided for item in (result, *given))
    if not is_plain or torch._C._functorch.peek_interpreter_stack() is not None:
        return result
    # A number lies as a tensor without dimensions does.
    layouts = [(tuple(item.shape), item.stride()) if isinstance(item, torch.Tensor) else ((), ()) for item in operands]
    strides = infer_output_strides(tuple(shape), layouts)
    if result.stride() == strides or any(isinstance(size, torch.SymInt) for size in shape):
        return result
    return torch.empty_strided(shape, strides, dtype=result.dtype, device=device).copy_(result)
