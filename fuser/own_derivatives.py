"""``fuser.differentiable``: a forward and a backward function of the user's as one differentiable function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, overload

import torch
from torch.utils._pytree import tree_leaves

from fuser.errors import ArgumentError, GradientError, describe_type, shows_users_frames
from fuser.jit_function import JitFunction, R
from fuser.route import has_derivative

__all__ = ["DifferentiableFunction", "differentiable"]

if TYPE_CHECKING:
    from typing_extensions import ParamSpec

    P = ParamSpec("P", default=...)
else:
    from typing import ParamSpec

    P = ParamSpec("P")

Saved = Sequence[int | str] | Callable[..., Any]


@overload
def differentiable(  # type: ignore[overload-overlap]
    forward: JitFunction[R],
    backward: JitFunction[Any],
    *,
    save_for_backward: Saved | None = None,
    num_grad_inputs: int | None = None,
) -> JitFunction[R]: ...
@overload
def differentiable(
    forward: Callable[P, R],
    backward: Callable[..., Any],
    *,
    save_for_backward: Saved | None = None,
    num_grad_inputs: int | None = None,
) -> DifferentiableFunction[P, R]: ...
@shows_users_frames
def differentiable(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    *,
    save_for_backward: Saved | None = None,
    num_grad_inputs: int | None = None,
) -> JitFunction | DifferentiableFunction:
    """Give a function a derivative of your own, where the one derived from its text is not what you want.

    ``backward`` is called with the saved tensors, then the gradient of every output (zeros for an output that has
    none), and by name those of the forward call's scalars that it has, too. It returns one gradient per input.

    Args:
        forward: a functor, a fused function, or any function of tensors.
        backward: likewise. If both are functors, the pair fuses with its neighbours, forward and backward.
        save_for_backward: which tensors ``backward`` takes: names of the forward functor's parameters and ``"out"``
            (``"out0"``, ``"out1"``, ...); or slots among the inputs and, after them, the outputs; or a function of
            (inputs, outputs), two tuples, that returns some of them. None: all inputs.
        num_grad_inputs: how many of the first inputs have a gradient; None: all.

    Returns:
        A function that is called as ``forward`` is.

    Raises:
        ArgumentError: the functors do not fit together, or a name or slot is unknown.
    """
    for name, function in (("forward", forward), ("backward", backward)):
        if not callable(function):
            raise ArgumentError(f"differentiable: {name} must be a function, got {describe_type(function)}")
    if num_grad_inputs is not None and (isinstance(num_grad_inputs, bool) or not isinstance(num_grad_inputs, int)):
        raise ArgumentError(f"differentiable: num_grad_inputs must be an int, got {describe_type(num_grad_inputs)}")
    if num_grad_inputs is not None and num_grad_inputs < 0:
        raise ArgumentError(f"differentiable: num_grad_inputs must not be negative, got {num_grad_inputs}")
    if not (save_for_backward is None or callable(save_for_backward) or isinstance(save_for_backward, list | tuple)):
        kind = describe_type(save_for_backward)
        raise ArgumentError(f"differentiable: save_for_backward must be a list of names or slots, got {kind}")
    if isinstance(forward, JitFunction) and isinstance(backward, JitFunction):
        functor = forward.function.functor
        saved = _find_places(save_for_backward, _parameter_names(forward), len(functor.tensors), functor.num_outputs)
        return forward.with_backward(backward, saved, num_grad_inputs)
    return DifferentiableFunction(forward, backward, save_for_backward, num_grad_inputs)


class DifferentiableFunction(Generic[P, R]):
    """What ``differentiable`` makes of two functions that are not both functors. Threads may share it."""

    def __init__(
        self,
        forward: Callable[P, R],
        backward: Callable[..., Any],
        save_for_backward: Saved | None,
        num_grad_inputs: int | None,
    ) -> None:
        self.forward = forward
        self.backward = backward
        self.num_grad_inputs = num_grad_inputs
        self._saved = save_for_backward
        # torch.fx writes calls by these names.
        functools.update_wrapper(self, forward, updated=())
        self.__name__ = self.__qualname__ = getattr(forward, "__name__", "forward")
        self.__module__ = "fuser.functors"

    def __call__(self, *inputs: P.args, **scalars: P.kwargs) -> R:
        """Run the forward function; its result is differentiated by the backward function."""
        made: R
        if torch.overrides.has_torch_function(inputs):
            made = torch.overrides.handle_torch_function(self, inputs, *inputs, **scalars)
            return made
        lost = [f"the scalar {name!r}" for name, value in scalars.items() if _holds_derivative(value)]
        lost += [
            f"what is in input {slot}, which is no tensor but a {describe_type(item)} of some"
            for slot, item in enumerate(inputs)
            if isinstance(item, list | tuple | dict) and _holds_derivative(item)
        ]
        if lost:
            raise GradientError(f"{self.__name__}: its backward function makes no gradient of {lost[0]}")
        results = _Paired.apply(self, scalars, *inputs)  # type: ignore[no-untyped-call]
        made = results[0] if len(results) == 1 else results
        return made

    def find_places(self, inputs: int, outputs: int) -> tuple[int, ...]:
        """Return the slots of the saved tensors among so many inputs and outputs."""
        return _find_places(self._saved, _parameter_names(self.forward)[:inputs], inputs, outputs)

    def __repr__(self) -> str:
        return f"<fuser.differentiable {self.__name__}>"


class _Paired(torch.autograd.Function):
    """``apply(function, scalars, *inputs)``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(function: DifferentiableFunction, scalars: Mapping[str, Any], *inputs: Any) -> tuple[torch.Tensor, ...]:
        results = function.forward(*inputs, **scalars)
        if isinstance(results, torch.Tensor):
            results = (results,)
        if not isinstance(results, tuple | list):
            raise ArgumentError(
                f"the forward function {function.__name__} returned {describe_type(results)}, not a tensor"
            )
        # torch takes no argument for a result where it is saved, too.
        return tuple(item.view_as(item) if any(item is x for x in inputs) else item for item in results)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.function, ctx.scalars, *values = inputs
        ctx.input_count = len(values)
        ctx.shapes = [item.shape if isinstance(item, torch.Tensor) else None for item in values]
        slots = ctx.function.find_places(len(values), len(output))
        chosen = [[*values, *output][slot] for slot in slots]
        ctx.save_for_backward(*[item if isinstance(item, torch.Tensor) else None for item in chosen])
        ctx.numbers = [None if isinstance(item, torch.Tensor) else item for item in chosen]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        taken = _scalar_names(ctx.function.backward)
        scalars = {name: value for name, value in ctx.scalars.items() if taken is None or name in taken}
        saved = [number if item is None else item for item, number in zip(ctx.saved_tensors, ctx.numbers, strict=True)]
        made = ctx.function.backward(*saved, *grads, **scalars)
        gradients = list(made) if isinstance(made, tuple | list) else [made]
        count = ctx.function.num_grad_inputs
        expected = ctx.input_count if count is None else min(count, ctx.input_count)
        what = f"the backward function of {ctx.function.__name__} returned"
        if len(gradients) != expected:
            raise ArgumentError(f"{what} {len(gradients)} gradients, not {expected}")
        gradients += [None] * (ctx.input_count - expected)
        found: list[torch.Tensor | None] = []
        for slot, (gradient, shape) in enumerate(zip(gradients, ctx.shapes, strict=True)):
            if not (gradient is None or isinstance(gradient, torch.Tensor)):
                raise ArgumentError(f"{what} {describe_type(gradient)} for input {slot}, not a tensor")
            # An input that was broadcast has the sum.
            if gradient is not None and shape is not None:
                if not _can_sum_to(shape, gradient.shape):
                    sizes = f"of shape {tuple(gradient.shape)} for input {slot}, whose shape is {tuple(shape)}"
                    raise ArgumentError(f"{what} a gradient {sizes}")
                gradient = gradient.sum_to_size(shape)
            found.append(gradient)
        return None, None, *found


def _holds_derivative(value: Any) -> bool:
    return any(isinstance(item, torch.Tensor) and has_derivative(item) for item in tree_leaves(value))


def _can_sum_to(shape: torch.Size, wider: torch.Size) -> bool:
    rest = len(wider) - len(shape)
    return rest >= 0 and all(size in (1, wide) for size, wide in zip(shape, wider[rest:], strict=True))


def _find_places(saved: Saved | None, names: Sequence[str], count: int, outputs: int) -> tuple[int, ...]:
    # Of ``count`` inputs, the first of which have names.
    if saved is None:
        return tuple(range(count))
    if callable(saved):
        slots = [_Place(number) for number in range(count + outputs)]
        chosen = list(_flatten(saved(tuple(slots[:count]), tuple(slots[count:]))))
        if not all(isinstance(item, _Place) for item in chosen):
            raise ArgumentError("save_for_backward must return some of the inputs and outputs it is given")
        return tuple(item.number for item in chosen)
    known = {name: slot for slot, name in enumerate(names)}
    known |= {f"out{slot}": count + slot for slot in range(outputs)} | {"out": count}
    found = []
    for item in [saved] if isinstance(saved, str) else saved:
        slot = known.get(item) if isinstance(item, str) else item
        if isinstance(slot, bool) or not isinstance(slot, int) or not 0 <= slot < count + outputs:
            raise ArgumentError(f"save_for_backward: there is no {item!r} among {', '.join(known)}")
        found.append(slot)
    return tuple(found)


class _Place:
    """Stands for an input or output while ``save_for_backward`` chooses."""

    def __init__(self, number: int) -> None:
        self.number = number


def _flatten(items: Any) -> Iterator[Any]:
    if isinstance(items, tuple | list):
        for item in items:
            yield from _flatten(item)
    else:
        yield items


def _parameter_names(function: Callable[..., Any]) -> list[str]:
    # Of those that an input may be given to. What ``*args`` take have none.
    if isinstance(function, JitFunction):
        return [parameter.name for parameter in function.function.functor.tensors]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in _parameters(function) or () if parameter.kind in positional]


def _scalar_names(function: Callable[..., Any]) -> tuple[str, ...] | None:
    # None: takes any.
    if isinstance(function, JitFunction):
        return function.scalar_names
    parameters = _parameters(function)
    if parameters is None or any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return tuple(parameter.name for parameter in parameters)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    # None: unknown, as those of ``torch.exp`` and other functions that are not written in Python.
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:
        return None
