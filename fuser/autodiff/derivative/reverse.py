"""Reverse mode over expressions."""

from __future__ import annotations

from collections.abc import Sequence

from fuser.autodiff.derivative.activity import Activity
from fuser.autodiff.derivative.demand import Demand, Masked, sum_masked
from fuser.autodiff.derivative.expression import Expr, topological

__all__ = ["differentiate_reverse"]


def differentiate_reverse(
    outputs: Sequence[Expr], gradients: Sequence[Expr], wanted: Sequence[Expr]
) -> list[Expr | None]:
    """Return the gradient of each of ``wanted`` (inputs) for the gradients of ``outputs``; None where it is zero.

    Raises:
        NotDifferentiableError: an operation in between has no derivative.
    """
    builder = outputs[0].builder
    order = topological(outputs)
    activity = Activity(order, frozenset(wanted), reverse=True)
    # A gradient is asked for on all lanes.
    demand = Demand(order, [*outputs, *wanted], activity.uses)
    contributions: dict[Expr, list[Masked]] = {}
    for output, gradient in zip(outputs, gradients, strict=True):
        contributions.setdefault(output, []).append((0, gradient))
    found: dict[Expr, Expr] = {}
    for item in reversed(order):
        if item not in activity or item not in contributions:
            continue
        gradient = sum_masked(contributions.pop(item), demand[item], demand.masks, builder)
        found[item] = gradient
        for edge in activity.edges(item):
            # Note [Masks at the edges]
            masked = demand.through(item, edge.arm), edge.map(gradient)
            contributions.setdefault(edge.operand, []).append(masked)
    return [found.get(item) for item in wanted]
