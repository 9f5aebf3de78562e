"""Under which conditions a value is used: what keeps gradients of untaken branches out, and masks few.

A *literal* is a bool expression or its negation. The *demand* of an expression is the set of literals that hold
whenever its value can reach an output: ``log(x)`` in ``x > 0 ? log(x) : y`` is demanded under ``x > 0``. Sets of
literals are Python integers, one bit each; they contain what they imply (``a && b`` brings ``a`` and ``b``).

Note [Masks at the edges]
A gradient is kept right only on the lanes on which its expression is demanded, and may be anything elsewhere (NaN from
0 * infinity, say). Where a contribution passes from an expression to an operand that is demanded more widely, the lanes
in between are masked. On the way through a branch nothing is masked, and nothing of an untaken branch ever leaves it.
Only uses through which a gradient flows count: ``log(x) < 5`` does not widen the demand for ``log(x)``. What two
branches share and others do not use is demanded under the disjunction of their conditions. All this is known from the
uses of values, not from the form of a text, so it holds for every order of derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from operator import and_

import torch

from fuser.autodiff.derivative.expression import Builder, Expr

__all__ = ["Demand", "Masked", "Masks", "sum_masked"]

# A condition, and whether it must be true or false; None: no condition.
Arm = tuple[Expr, bool] | None
# An operand, and when it is used.
Use = tuple[Expr, Arm]
# A value with the literals under which it counts; it is zero elsewhere.
Masked = tuple[int, Expr]


class Masks:
    """Numbers the literals of bool expressions: ``2 k`` for the k-th expression, ``2 k + 1`` for its negation."""

    def __init__(self) -> None:
        self._numbers: dict[Expr, int] = {}
        self._masks: list[Expr] = []
        # (m, a, b) for literals with m == a && b.
        self._conjunctions: list[tuple[int, int, int]] = []
        # What each literal implies, itself included.
        self._closures: list[int] = []

    def number(self, mask: Expr, truth: bool) -> int:
        """Return the number of the literal that says ``mask`` is ``truth``."""
        while mask.op == "logical_not":
            mask, truth = mask.args[0], not truth
        if mask not in self._numbers:
            self._add(mask)
        return 2 * self._numbers[mask] + (not truth)

    def closure(self, mask: Expr, truth: bool) -> int:
        """Return the set of what holds where ``mask`` is ``truth``."""
        return self._closures[self.number(mask, truth)]

    def implied(self, literal: int) -> int:
        """Return the set of what one literal implies."""
        return self._closures[literal]

    def propagate(self, known: int, relevant: int) -> int:
        """Return a set of literals with what follows from them together.

        Args:
            known: literals that hold.
            relevant: those one wants to know about.
        """
        chosen = [item for item in self._conjunctions if relevant & (1 << item[0] | 1 << (item[0] ^ 1))]
        before = 0
        while before != known:
            before = known
            for both, a, b in chosen:
                if known >> a & 1 and known >> b & 1:
                    known |= self._closures[both]
                elif known >> (both ^ 1) & 1:
                    for one, other in ((a, b), (b, a)):
                        known |= self._closures[other ^ 1] if known >> one & 1 else 0
        return known

    def expression(self, literal: int, builder: Builder) -> Expr:
        """Return one literal as a bool expression."""
        mask = self._masks[literal // 2]
        return builder.emit("logical_not", mask) if literal % 2 else mask

    def _add(self, mask: Expr) -> None:
        # Operands first: every literal is numbered after those it implies.
        closures = {
            truth: [self.closure(operand, truth) for operand in mask.operands] if mask.op == op else []
            for truth, op in ((True, "logical_and"), (False, "logical_or"))
        }
        self._numbers[mask] = slot = len(self._masks)
        self._masks.append(mask)
        if mask.op in {"logical_and", "logical_or"}:
            is_and = mask.op == "logical_and"
            self._conjunctions.append(
                (2 * slot + (not is_and), self.number(mask.args[0], is_and), self.number(mask.args[1], is_and))
            )
        for truth in (True, False):
            closure = 1 << (2 * slot + (not truth))
            for below in closures[truth]:
                closure |= below
            self._closures.append(closure)
        # Whatever denies what a literal implies denies the literal.
        for literal in (2 * slot, 2 * slot + 1):
            denied = sum(1 << (other ^ 1) for other in _bits(self._closures[literal]) if other != literal)
            for other, closure in enumerate(self._closures) if denied else ():
                if closure & denied:
                    self._closures[other] |= 1 << (literal ^ 1)


class Demand:
    """Under which literals the expressions of a computation count.

    Args:
        order: expressions, operands first.
        outputs: those that count unconditionally.
        edges: the operands through which a gradient flows, with the condition under which it does, if there is one;
            then the demand is that for gradients. None: every operand, and the demand is that for values.
    """

    def __init__(
        self, order: Sequence[Expr], outputs: Iterable[Expr], edges: Callable[[Expr], Iterable[Use]] | None = None
    ) -> None:
        self.masks = Masks()
        self._literals: dict[Expr, int] = {}
        for item in order:
            if item.dtype is torch.bool:
                self.masks.number(item, True)
        uses: dict[Expr, set[int]] = {output: {0} for output in outputs}
        for item in reversed(order):
            if item not in uses:
                continue
            self._literals[item] = self._join(uses[item], item, is_exact=edges is not None)
            if edges is None:
                found = self._uses(item)
            else:
                found = [(operand, self.through(item, arm)) for operand, arm in edges(item)]
            for operand, literals in found:
                uses.setdefault(operand, set()).add(literals)

    def __getitem__(self, item: Expr) -> int:
        return self._literals[item]

    def __contains__(self, item: Expr) -> bool:
        return item in self._literals

    def through(self, item: Expr, arm: Arm) -> int:
        """Return the literals that hold where ``item`` counts and its arm is taken."""
        return self._literals[item] if arm is None else self._literals[item] | self.masks.closure(*arm)

    def decides(self, item: Expr, mask: Expr) -> bool | None:
        """Return what ``mask`` is wherever ``item`` is demanded; None when it can be either."""
        for truth in (True, False):
            if self._literals[item] >> self.masks.number(mask, truth) & 1:
                return truth
        return None

    def _join(self, uses: set[int], item: Expr, *, is_exact: bool) -> int:
        shared = reduce(and_, uses)
        if not is_exact or shared in uses or not item.operands:
            return shared
        true = item.builder.constant(True, torch.bool)
        cases = [(literals, true) for literals in sorted(uses)]
        mask = sum_masked(cases, shared, self.masks, item.builder, join="logical_or")
        return shared if mask is true else shared | self.masks.closure(mask, True)

    def _uses(self, item: Expr) -> list[tuple[Expr, int]]:
        literals = self._literals[item]
        if item.op == "where":
            mask, a, b = item.args
            return [(mask, literals), (a, self.through(item, (mask, True))), (b, self.through(item, (mask, False)))]
        if item.op in {"logical_and", "logical_or"}:
            a, b = item.args
            return [(a, literals), (b, self.through(item, (a, item.op == "logical_and")))]
        if item.op in {"div_trunc", "fmod", "remainder"} and not item.dtype.is_floating_point:
            # An integer division must not meet a zero on any lane: what guards it is always needed.
            return [(operand, 0) for operand in item.operands]
        return [(operand, literals) for operand in item.operands]


def sum_masked(
    contributions: Sequence[Masked], context: int, masks: Masks, builder: Builder, join: str = "add"
) -> Expr:
    """Return the sum; contributions that exclude each other become branches of one selection.

    Args:
        contributions: at least one.
        context: literals that hold wherever the sum counts.
        masks: numbers the literals.
        builder: makes the expressions.
        join: the operation that puts two together.
    """
    contributions = [(literals & ~context, value) for literals, value in contributions]
    always = [value for literals, value in contributions if not literals]
    sometimes = [item for item in contributions if item[0]]
    terms = always[:1]
    for value in always[1:]:
        terms[0] = terms[0].call(join, value)
    while sometimes:
        literal = _most_telling(sometimes, masks)
        branches: list[Expr | int] = []
        for sign in (literal, literal ^ 1):
            side = [item for item in sometimes if item[0] >> sign & 1]
            known = masks.propagate(context | masks.implied(sign), _union(side))
            branches.append(sum_masked(side, known, masks, builder, join) if side else 0)
        terms.append(builder.emit("where", masks.expression(literal, builder), *branches))
        sometimes = [item for item in sometimes if not item[0] & (1 << literal | 1 << (literal ^ 1))]
    total = terms[0]
    for term in terms[1:]:
        total = total.call(join, term)
    return total


def _most_telling(contributions: Sequence[Masked], masks: Masks) -> int:
    # The literal that most of them hold or deny, and of several the first: conditions come before what is made of them.
    counts: dict[int, int] = {}
    for literals, _ in contributions:
        for slot in _bits(literals):
            counts[slot & ~1] = counts.get(slot & ~1, 0) + 1
    most = max(counts.values())
    candidates = [literal for literal, count in counts.items() if count == most]
    if most > 1:
        return min(candidates)

    def settled(literal: int) -> int:
        sides = (masks.implied(literal), masks.implied(literal ^ 1))
        return sum((literals & sides[not literals >> literal & 1]).bit_count() for literals, _ in contributions)

    # Nothing to share: the one that leaves the fewest conditions.
    return max(candidates, key=lambda literal: (settled(literal), literal))


def _union(contributions: Sequence[Masked]) -> int:
    union = 0
    for literals, _ in contributions:
        union |= literals
    return union


def _bits(literals: int) -> Iterator[int]:
    while literals:
        lowest = literals & -literals
        yield lowest.bit_length() - 1
        literals ^= lowest
