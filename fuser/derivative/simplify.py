"""Makes a derivative small: what the rules could not see while they wrote one expression at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fuser.derivative.demand import Demand
from fuser.derivative.expression import Builder, Expr, topological

__all__ = ["simplify"]

# Each round can uncover more; the second seldom does.
_MAX_ROUNDS = 4


def simplify(outputs: Sequence[Expr]) -> list[Expr]:
    """Return equal expressions without detach, dead code, duplicates, and selections whose outcome is known."""
    outputs = Builder(drops_detach=True).copy(outputs)
    size = len(topological(outputs))
    for _ in range(_MAX_ROUNDS):
        outputs = _resolve_selections(outputs)
        before, size = size, len(topological(outputs))
        if size == before:
            break
    return list(outputs)


def _resolve_selections(outputs: Sequence[Expr]) -> list[Expr]:
    # Inside ``m ? f(m ? a : b) : c`` the inner selection is a.
    demand = Demand(topological(outputs), outputs)
    builder = Builder(drops_detach=True)

    def instead(item: Expr) -> Expr | None:
        if item.is_constant or item not in demand:
            return None
        if item.dtype is torch.bool:
            truth = demand.decides(item, item)
            return _part(item, demand) if truth is None else item.builder.constant(truth, torch.bool)
        if item.op == "where":
            truth = demand.decides(item, item.args[0])
            chosen: Expr | None = None if truth is None else item.args[1 if truth else 2]
            return chosen
        return None

    return builder.copy(outputs, instead)


def _part(item: Expr, demand: Demand) -> Expr | None:
    # Inside ``a ? ... : ...`` a condition a && b is b.
    if item.op not in {"logical_and", "logical_or"}:
        return None
    neutral = item.op == "logical_and"
    for one, other in (item.args, item.args[::-1]):
        if demand.decides(item, one) is neutral:
            found: Expr = other
            return found
    return None
