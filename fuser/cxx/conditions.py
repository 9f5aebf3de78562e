"""Whether conditions of a text can hold together, as far as that is certain.

Data is what comes through parameters: signed numbers as large or small as you like, but for those declared otherwise,
and no NaN. What a text does with other variables it does the same way for all data; who knows how.
"""

from __future__ import annotations

import math
import operator
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from itertools import product
from typing import Any

from fuser.cxx.nodes import (
    Assign,
    Binary,
    Call,
    Cast,
    Expression,
    FunctionDefinition,
    Increment,
    Literal,
    Name,
    NamedType,
    Node,
    Parameter,
    PointerType,
    ReferenceType,
    TypeSyntax,
    Unary,
    number_in,
    parts,
    walk,
)
from fuser.cxx.preprocess import Place
from fuser.cxx.statements import Declarator, DoWhile, For, Program, RangeFor, While

__all__ = ["Conditions", "mentioned"]

# A condition, and whether it holds.
Fact = tuple[Expression, bool]

_UNARY: Mapping[str, Any] = {"-": operator.neg, "+": operator.pos, "!": operator.not_}
_BINARY: Mapping[str, Any] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "%": lambda left, right: left - right * math.trunc(left / right),
    "&": operator.and_,
    "|": operator.or_,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "&&": lambda left, right: bool(left and right),
    "||": lambda left, right: bool(left or right),
}
# Most numbers that are tried together.
_MOST = 4096


class Conditions:
    """The conditions of one function, and what its variables depend on."""

    def __init__(self, program: Program, function: FunctionDefinition) -> None:
        nodes = list(walk((program.globals, function), unevaluated=False))
        declared = [node for node in nodes if isinstance(node, Declarator)]
        variables: list[Declarator | Parameter] = [*declared, *function.parameters]
        self.kinds = {item.name: item.type for item in variables}
        # What each variable was made of.
        self.sources: dict[str, set[str]] = {item.name: {item.name} for item in function.parameters}
        # Those that may get another value than their first.
        self.changed: set[str] = set()
        looped = {
            id(part) for node in nodes if isinstance(node, For | While | DoWhile | RangeFor) for part in walk(node)
        }
        assigned: list[tuple[Set[str], frozenset[str], Place]] = []
        for node in nodes:
            match node:
                case Declarator(_, name, kind, value, bindings):
                    made = mentioned(value)
                    for item in (name, *bindings):
                        self.sources.setdefault(item, {item}).update(made)
                    if isinstance(kind, ReferenceType | PointerType):
                        self.changed |= made
                        for item in made:
                            self.sources.setdefault(item, {item}).add(name)
                case Assign(_, sign, target, value):
                    if not sign:
                        place = (0, 0) if id(node) in looped else node.place
                        assigned.append((mentioned(target), mentioned(value), place))
                    self.changed |= mentioned(target)
                    for item in mentioned(target):
                        self.sources.setdefault(item, {item}).update(mentioned(value))
                case Increment(_, _, target) | Unary(_, "&", target):
                    self.changed |= mentioned(target)
                case Call(_, called, arguments) if not (isinstance(called, Name) and called.name in program.externals):
                    self.changed |= mentioned((called, arguments))
        names = [item.name for item in variables]
        self.values = {
            item.name: item.value
            for item in declared
            if item.value is not None and item.name not in self.changed and names.count(item.name) == 1
        }
        parameters = {item.name for item in function.parameters}
        self.data = {name for name in self.sources if not parameters.isdisjoint(self._origins({name}))}
        # Data that get the value of something else, and where: from there on, who knows. In a loop, everywhere.
        self.mixed: dict[str, Place] = {}
        again = frozenset[str]().union(*(target for target, _, _ in assigned))
        assigned += [
            (frozenset({item.name}) & again, mentioned(item.value), item.place) for item in declared if item.value
        ]
        while mixed := {
            name: place
            for target, given, place in assigned
            if not given & self.data - self.mixed.keys()
            for name in target & self.data
            if place < self.mixed.get(name, (sys.maxsize, 0))
        }:
            self.mixed |= mixed
        # Names of whatever is no number that can be computed here.
        self.unknown: dict[object, frozenset[str]] = {}

    def decides(self, condition: Expression) -> bool:
        """Whether data decides a condition whatever everything else is."""
        if isinstance(condition, Binary) and condition.operator in {"&&", "||"}:
            return self.decides(condition.left) and self.decides(condition.right)
        if isinstance(condition, Unary) and condition.operator == "!":
            return self.decides(condition.operand)
        names = mentioned(condition) & self.sources.keys()
        data = {name for name in names & self.data if self.mixed.get(name, condition.place) >= condition.place}
        # What is compared with a counter is as large as you like.
        counters = {item.name for item in parts(condition) if isinstance(item, Name)}
        is_compared = isinstance(condition, Binary) and condition.operator in {"<", "<=", ">", ">="}
        return bool(data) and not names & self.changed - data - (counters if is_compared else set())

    def always(self, condition: Expression) -> bool:
        """Whether a condition holds whatever everything is."""
        return not self._unknown_of(condition) and self._holds([(condition, True)], {})

    def meet(self, facts: Iterable[Fact]) -> bool:
        """Whether it is certain that there are numbers for which all facts hold."""
        groups: list[tuple[set[object], list[Fact]]] = []
        counts: dict[str, int] = defaultdict(int)
        for fact in facts:
            unknown, together = self._unknown_of(fact[0]), [fact]
            for name in set().union(*(self.unknown[item] for item in unknown)) & self.changed:
                counts[name] += 1
            for group in [group for group in groups if not group[0].isdisjoint(unknown)]:
                groups.remove(group)
                unknown, together = unknown | group[0], together + group[1]
            groups.append((unknown, together))
        origins = [self._origins(self.unknown[item]) for unknown, _ in groups for item in unknown]
        are_apart = len(set().union(*origins)) == sum(map(len, origins))
        return are_apart and max(counts.values(), default=0) < 2 and all(self._try(*group) for group in groups)

    def _try(self, unknown: set[object], facts: list[Fact]) -> bool:
        literals = {number_in(node.text) for fact, _ in facts for node in walk(fact) if isinstance(node, Literal)}
        near = {number + step for number in literals | {0} if number is not None for step in (-1, 0, 1)}
        order = list(unknown)
        numbers = sorted(near, key=abs) if len(near) ** len(order) <= _MOST else ()
        return any(
            self._holds(facts, dict(zip(order, tried, strict=True))) for tried in product(numbers, repeat=len(order))
        )

    def _holds(self, facts: Iterable[Fact], given: dict[object, Any]) -> bool:
        try:
            return all(bool(self._value(condition, given)) is holds for condition, holds in facts)
        except (ArithmeticError, KeyError, TypeError, ValueError):
            # No such number has this type, or C++ leaves open what it is.
            return False

    def _unknown_of(self, condition: Expression) -> set[object]:
        given: dict[object, Any] = defaultdict(int)
        self._holds([(condition, True)], given)
        return set(given)

    def _value(self, item: Expression, given: dict[object, Any]) -> Any:
        match item:
            case Literal(_, text) if (number := number_in(text)) is not None:
                return number
            case Name(_, name, (), False, "") if name in self.values:
                return _convert(self._value(self.values[name], given), self.kinds[name])
            case Cast(_, kind, (value,)):
                return _convert(self._value(value, given), kind)
            case Unary(_, sign, operand) if sign in _UNARY:
                return _UNARY[sign](self._value(operand, given))
            case Binary(_, sign, left, right) if sign in _BINARY:
                return _BINARY[sign](self._value(left, given), self._value(right, given))
        shape = _shape(item)
        self.unknown.setdefault(shape, mentioned(item) & self.sources.keys())
        if isinstance(item, Name) and item.name in self.kinds:
            return _convert(given[shape], self.kinds[item.name])
        return given[shape]

    def _origins(self, names: Iterable[str]) -> set[str]:
        found, rest = set(), list(names)
        while rest:
            name = rest.pop()
            if name in self.sources and name not in found:
                found.add(name)
                rest += self.sources[name]
        return found


def mentioned(item: object) -> frozenset[str]:
    """Return the names in a tree, or in a tuple of trees, but for those that are never evaluated."""
    return frozenset(part.name for part in walk(item, unevaluated=False) if isinstance(part, Name))


def _convert(number: Any, kind: TypeSyntax) -> Any:
    name = kind.name if isinstance(kind, NamedType) else ""
    if name == "bool":
        return bool(number)
    if ("unsigned" in name or name.startswith("uint") or name == "size_t") and number < 0:
        raise ValueError
    is_whole = name.endswith("_t") or not {"unsigned", "int", "long", "short", "char"}.isdisjoint(name.split())
    return math.trunc(number) if is_whole else number


def _shape(item: object) -> object:
    # What is equal for equal trees at different places.
    if isinstance(item, tuple):
        return tuple(map(_shape, item))
    return (type(item), *map(_shape, parts(item)[1:])) if isinstance(item, Node) else item
