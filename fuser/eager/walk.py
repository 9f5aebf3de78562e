"""Steps through syntax: whoever is in charge of a kind of it is found in the state's tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fuser.cxx.nodes import Expression, Statement
from fuser.cxx.statements import Condition, Declaration, Struct
from fuser.eager.data import PLACE, Value, constant
from fuser.eager.masks import NONE
from fuser.eager.promotion import convert
from fuser.eager.state import Scope, State
from fuser.eager.storage import Fixed, Location, NoTranslation, Pointer, SubstitutionError, Thing, parts_of
from fuser.eager.types import ArrayOf, CppType

__all__ = [
    "class_scope",
    "decide",
    "evaluate",
    "load",
    "locate",
    "number_of",
    "run",
    "run_all",
    "run_block",
    "static_type",
    "truth_of",
]


def run(state: State, statement: Statement) -> None:
    """Run a statement for the lanes that are there."""
    if state.mask is not NONE:
        PLACE.set(statement.place)
        state.tables.run[type(statement)](state, statement)


def run_all(state: State, statements: Sequence[Statement]) -> None:
    """Run statements one after another."""
    for statement in statements:
        run(state, statement)


def run_block(state: State, statements: Sequence[Statement]) -> None:
    """Run statements in a scope of their own."""
    with state.within(Scope(state.scope)):
        run_all(state, statements)


def class_scope(state: State, struct: Struct, bindings: Mapping[str, Any]) -> Scope:
    """Return what a class has without an object, for template arguments by name: those, its types, its constants."""
    scope = Scope(state.globals, dict(bindings))
    with state.within(scope):
        for alias in struct.aliases:
            run(state, alias)
        for item in struct.constants:
            run(state, Declaration(item.place, (item,)))
    return scope


def evaluate(state: State, node: Expression) -> Thing:
    """Return what an expression is worth."""
    PLACE.set(node.place)
    found: Thing = state.tables.evaluate[type(node)](state, node)
    return found


def locate(state: State, node: Expression) -> Location:
    """Return where an expression lives; what has no place of its own gets one that cannot be written."""
    PLACE.set(node.place)
    find = state.tables.locate.get(type(node))
    found: Location | None = None if find is None else find(state, node)
    return Fixed(evaluate(state, node), state.mask) if found is None else found


def number_of(state: State, node: Expression) -> Value:
    """Return the number that an expression is."""
    found = evaluate(state, node)
    if not isinstance(found, Value):
        PLACE.set(node.place)
        raise NoTranslation("arithmetic with something that is no number")
    return found


def truth_of(state: State, node: Expression) -> Any:
    """Return an expression as bool data."""
    found = number_of(state, node)
    PLACE.set(node.place)
    return convert(found, torch.bool).data


def decide(state: State, node: Condition) -> Any:
    """Return the condition of a statement as bool data."""
    if node.declaration is not None:
        run(state, node.declaration)
    return truth_of(state, node.value)


def static_type(state: State, node: Expression) -> CppType | None:
    """Return the type of an expression without evaluating it; None if that takes more."""
    with state.dry():
        try:
            return evaluate(state, node).type
        except (NoTranslation, TypeError, RecursionError, SubstitutionError):
            return None


def load(state: State, location: Location) -> Thing:
    """Return the value at a location; an array's is a pointer to its first element."""
    if isinstance(location.type, ArrayOf):
        return Pointer(parts_of(location), constant(0, torch.int64), location.type.element)
    return location.load(state)
