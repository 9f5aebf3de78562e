"""Functors as functions that torch's autograd can differentiate, run from their translations: no compiler needed.

Also the expressions that derivatives are, in eager torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fuser.autodiff.derivative import Derived, forward_functor, reverse_functor
from fuser.autodiff.derivative.expression import Expr, topological
from fuser.autodiff.derivative.operations import apply, count_static
from fuser.cxx.functor import Functor, Role
from fuser.eager.translation import translate

Types = tuple[torch.dtype, ...]


def argument_types(functor: Functor, compute: torch.dtype, **scalars: Any) -> Types:
    """Return the C++ type of each argument for tensors of ``compute`` and the given scalars (floats, if not given)."""
    kinds = {bool: torch.bool, int: torch.int64, float: torch.float64}
    return tuple(
        compute if item.role is Role.TENSOR else kinds[type(scalars.get(item.name, 1.0))]
        for item in functor.parameters
        if item.role is not Role.OUTPUT
    )


def derived_types(derived: Derived, types: Types, compute: torch.dtype) -> Types:
    """Return the types of a derived functor's arguments."""
    return tuple(compute if kind == "grad" else types[place] for kind, place in derived.arguments)


def run(functor: Functor, compute: torch.dtype, types: Types, arguments: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """Compute a functor's outputs in eager torch; differentiable as often as one likes."""
    return Apply.apply(functor, compute, types, *arguments)  # type: ignore[no-any-return, no-untyped-call]


class Apply(torch.autograd.Function):
    """A functor, its gradient functor, and that one's."""

    @staticmethod
    def forward(
        ctx: Any, functor: Functor, compute: torch.dtype, types: Types, *arguments: Any
    ) -> tuple[torch.Tensor, ...]:
        ctx.what = functor, compute, types
        tensors = [item for item in arguments if isinstance(item, torch.Tensor)]
        ctx.save_for_backward(*tensors)
        ctx.others = [None if isinstance(item, torch.Tensor) else item for item in arguments]
        shape = torch.broadcast_shapes(*(item.shape for item in tensors))
        results = translate(functor, compute, types).run(*arguments)
        results = tuple(item.expand(shape).clone() for item in results)
        ctx.mark_non_differentiable(*(item for item in results if not (item.is_floating_point() or item.is_complex())))
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        functor, compute, types = ctx.what
        tensors = iter(ctx.saved_tensors)
        arguments = [next(tensors) if item is None else item for item in ctx.others]
        wanted = tuple(place for place in range(len(arguments)) if ctx.needs_input_grad[place + 3])
        outputs = tuple(place for place, item in enumerate(gradients) if item is not None)
        derived = reverse_functor(functor, compute, types, wanted=wanted, outputs=outputs)
        given = [gradients[place] for place in outputs]
        results: tuple[torch.Tensor, ...] = ()
        if derived.functor is not None:
            bound = [given[k] if kind == "grad" else arguments[k] for kind, k in derived.arguments]
            results = run(derived.functor, compute, derived_types(derived, types, compute), tuple(bound))
        found: list[Any] = [None] * len(arguments)
        for place, number in zip(wanted, derived.results, strict=True):
            if number is not None:
                # Each argument has been given in full size, or is a number for all.
                found[place] = results[number].to(arguments[place].dtype).sum_to_size(arguments[place].shape)
        return (None, None, None, *found)


def tangents_of(
    functor: Functor, compute: torch.dtype, types: Types, arguments: tuple[Any, ...], tangents: dict[int, torch.Tensor]
) -> list[torch.Tensor | None]:
    """Return the tangent of each output for those of some arguments."""
    derived = forward_functor(functor, compute, types, given=tuple(tangents))
    if derived.functor is None:
        return [None] * len(derived.results)
    given = list(tangents.values())
    bound = tuple(given[k] if kind == "grad" else arguments[k] for kind, k in derived.arguments)
    results = run(derived.functor, compute, derived_types(derived, types, compute), bound)
    return [None if number is None else results[number] for number in derived.results]


def evaluate(outputs: Sequence[Expr], inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Run expressions in eager torch."""
    values: dict[Expr, torch.Tensor] = {}
    for item in topological(outputs):
        if item.op == "input":
            values[item] = inputs[item.args[0]]
        elif item.op == "constant":
            values[item] = torch.scalar_tensor(item.args[0], dtype=item.dtype)
        else:
            static = item.args[: count_static(item.op)]
            values[item] = apply(item.op, static, [values[operand] for operand in item.operands], item.dtype)
    return [values[output] for output in outputs]
