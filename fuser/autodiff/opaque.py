"""Functions that run on plain tensors only, made differentiable to any order by torch itself.

An interpreter that asks its tensors for values cannot run on what torch.func's transforms wrap. Here a transform sees
one function; underneath, plain tensors go in, and its derivative is another such function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad

from fuser.launcher import untraced

__all__ = ["call_opaque", "pull_back", "push_forward"]

TensorFunction = Callable[..., tuple[torch.Tensor, ...]]


def call_opaque(function: TensorFunction, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Call a function of tensors so that autograd and transforms see one operation.

    Args:
        function: takes plain tensors, returns a tuple of floating or complex ones, and is made of ops that torch
            differentiates.
        *tensors: its arguments; integral ones have no gradient.
    """
    results: tuple[torch.Tensor, ...] = _Opaque.apply(function, *tensors)  # type: ignore[no-untyped-call]
    return results


def pull_back(function: TensorFunction, wanted: Sequence[int], count: int, *tensors: Any) -> tuple[torch.Tensor, ...]:
    """Return the gradients of the arguments ``wanted``; ``tensors`` are the ``count`` arguments, then the gradients."""
    arguments, gradients = list(tensors[:count]), tensors[count:]
    chosen = partial(_with_arguments, function, tuple(wanted), arguments)
    _, gradients_of = torch.func.vjp(chosen, *(arguments[slot] for slot in wanted))[:2]
    found: tuple[torch.Tensor, ...] = gradients_of(tuple(gradients))
    return found


def push_forward(function: TensorFunction, given: Sequence[int], count: int, *tensors: Any) -> tuple[torch.Tensor, ...]:
    """Return the tangents of the results; ``tensors`` are the ``count`` arguments, then the tangents of ``given``."""
    arguments, tangents = list(tensors[:count]), tensors[count:]
    chosen = partial(_with_arguments, function, tuple(given), arguments)
    # Not torch.func.jvp, which torch refuses inside forward AD. The gradients are linear in what they are pulled back
    # from, and the derivative of that, pulled back from tangents, is what pushes them forward.
    results, gradients_of = torch.func.vjp(chosen, *(arguments[slot] for slot in given))[:2]
    _, tangents_of = torch.func.vjp(gradients_of, tuple(map(torch.zeros_like, results)))[:2]
    found: tuple[torch.Tensor, ...] = tangents_of(tuple(tangents))[0]
    return found


class _Opaque(torch.autograd.Function):
    """``apply(function, *tensors)``."""

    @staticmethod
    def forward(function: TensorFunction, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if forward_ad._current_level >= 0:
            # Without tangents: a transform inside switches forward AD on again, for functions that know none, too.
            tensors = tuple(item.detach() for item in tensors)
        made = function(*tensors)
        # torch takes no argument for a result: a derivative may pass its gradient on.
        return tuple(item.clone() if any(item is x for x in tensors) else item for item in made)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:  # noqa: ARG004
        ctx.function, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    @untraced
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensors = ctx.saved_tensors
        wanted = [slot for slot, needs in enumerate(ctx.needs_input_grad[1:]) if needs]
        derivative = partial(pull_back, ctx.function, wanted, len(tensors))
        found = dict(zip(wanted, call_opaque(derivative, *tensors, *gradients), strict=True))
        return None, *[found.get(slot) for slot in range(len(tensors))]

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        tensors = ctx.saved_tensors
        given = [slot for slot, tangent in enumerate(tangents) if tangent is not None]
        derivative = partial(push_forward, ctx.function, given, len(tensors))
        return call_opaque(derivative, *tensors, *[tangent for tangent in tangents if tangent is not None])

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], function: TensorFunction, *tensors: torch.Tensor
    ) -> tuple[Any, Any]:
        # Sums over broadcast dimensions are among what these functions do: elements of the batch go one by one.
        rows = [
            call_opaque(
                function,
                *[x if dim is None else x.select(dim, row) for x, dim in zip(tensors, in_dims[1:], strict=True)],
            )
            for row in range(info.batch_size)
        ]
        results = tuple(torch.stack(items) for items in zip(*rows, strict=True))
        return results, (0,) * len(results)


def _with_arguments(
    function: TensorFunction, slots: tuple[int, ...], arguments: Sequence[Any], *chosen: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    items = list(arguments)
    for slot, item in zip(slots, chosen, strict=True):
        items[slot] = item
    return tuple(function(*items))
