"""Which expressions depend on an input differentiably, and which have lost that in their bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fuser.autodiff.derivative.expression import Expr
from fuser.autodiff.derivative.operations import BOOLEAN
from fuser.autodiff.derivative.rules import Edge, Unsupported, edges
from fuser.dtypes import is_continuous
from fuser.errors import NotDifferentiableError

__all__ = ["Activity"]


class Activity:
    """The part of a computation through which gradients flow.

    Args:
        order: expressions, operands first.
        inputs: those with respect to which is differentiated.
        reverse: as for ``edges``.

    Raises:
        NotDifferentiableError: an operation that depends on ``inputs`` has no derivative.
    """

    def __init__(self, order: Sequence[Expr], inputs: frozenset[Expr], *, reverse: bool) -> None:
        self._edges: dict[Expr, Sequence[Edge]] = {}
        self._inputs = inputs
        # Integers made from the bits of something active, with the bit cast.
        casts: dict[Expr, Expr] = {}
        for item in order:
            origin = next((casts[operand] for operand in item.operands if operand in casts), None)
            if item.op == "bit_cast" and item.args[0] in self and not is_continuous(item.dtype):
                casts[item] = item
            elif origin is not None and item.op not in BOOLEAN:
                if is_continuous(item.dtype):
                    raise NotDifferentiableError("a bit cast", origin.place or item.place)
                casts[item] = origin
            elif any(operand in self for operand in item.operands):
                self._add(item, reverse)

    def __contains__(self, item: Expr) -> bool:
        return item in self._inputs or item in self._edges

    def edges(self, item: Expr) -> Sequence[Edge]:
        """Return the edges to active operands."""
        return self._edges.get(item, ())

    def uses(self, item: Expr) -> Iterator[tuple[Expr, tuple[Expr, bool] | None]]:
        """Yield the active operands, each with the condition under which it is used."""
        for edge in self.edges(item):
            yield edge.operand, edge.arm

    def _add(self, item: Expr, reverse: bool) -> None:
        try:
            found = [edge for edge in edges(item, reverse=reverse) if edge.operand in self]
        except Unsupported as error:
            raise NotDifferentiableError(str(error), item.place) from None
        if found:
            self._edges[item] = found
