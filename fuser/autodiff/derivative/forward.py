"""Forward mode over expressions."""

from __future__ import annotations

from collections.abc import Sequence

from fuser.autodiff.derivative.activity import Activity
from fuser.autodiff.derivative.demand import Demand, sum_masked
from fuser.autodiff.derivative.expression import Expr, topological

__all__ = ["differentiate_forward"]


def differentiate_forward(
    outputs: Sequence[Expr], given: Sequence[Expr], tangents: Sequence[Expr]
) -> list[Expr | None]:
    """Return the tangent of each of ``outputs`` for the tangents of ``given`` (inputs); None where it is zero.

    Raises:
        NotDifferentiableError: an operation in between has no derivative.
    """
    builder = outputs[0].builder
    order = topological(outputs)
    activity = Activity(order, frozenset(given), reverse=False)
    demand = Demand(order, outputs, activity.uses)
    found = dict(zip(given, tangents, strict=True))
    for item in order:
        if item not in demand:
            # It is computed, and no gradient of an output asks for it.
            continue
        # What an untaken branch makes of its operands' tangents is selected away with the branch.
        contributions = [
            (demand.through(item, edge.arm), edge.map(found[edge.operand])) for edge in activity.edges(item)
        ]
        if contributions:
            found[item] = sum_masked(contributions, demand[item], demand.masks, builder)
    return [found.get(output) for output in outputs]
