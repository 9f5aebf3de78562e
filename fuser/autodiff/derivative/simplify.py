"""Makes a derivative small: what the rules could not see while they wrote one expression at a time."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from fuser.autodiff.derivative.demand import Demand
from fuser.autodiff.derivative.expression import Builder, Expr, topological

__all__ = ["multiply_by_reciprocals", "simplify"]

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


def multiply_by_reciprocals(outputs: Sequence[Expr], scalars: Collection[str], varying: Collection[str]) -> list[Expr]:
    """Return outputs where what depends on ``varying`` inputs is not divided by what follows from ``scalars`` alone.

    It is multiplied by the reciprocal, which is the same for all elements: one rounding more, as in torch's own
    division of a tensor by a number on CUDA. Real numbers only.
    """
    read: dict[Expr, frozenset[str]] = {}
    for item in topological(outputs):
        own = frozenset(item.args[:1]) if item.op == "input" else frozenset[str]()
        read[item] = own.union(*(read[operand] for operand in item.operands))
    chosen = {
        item
        for item in read
        if item.op == "div"
        and not item.dtype.is_complex
        and not read[item.operands[0]].isdisjoint(varying)
        and not item.operands[1].is_constant
        and read[item.operands[1]].issubset(scalars)
    }

    if not chosen:
        return list(outputs)

    def instead(item: Expr) -> Expr | None:
        return item.operands[0] * (1 / item.operands[1]) if item in chosen else None

    return Builder(drops_detach=True).copy(outputs, instead)


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
