"""Statements but loops: declarations, branches, and what leaves a function."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from fuser.cxx.builtin_types import AUTO, VOID
from fuser.cxx.nodes import (
    ArrayType,
    Block,
    Call,
    Expression,
    FunctionDefinition,
    InitList,
    Member,
    Name,
    ReferenceType,
    Statement,
)
from fuser.cxx.statements import (
    Alias,
    Break,
    Continue,
    Declaration,
    Declarator,
    DoWhile,
    Evaluate,
    For,
    If,
    RangeFor,
    Return,
    Struct,
    Switch,
    While,
)
from fuser.eager.calls import bind_parts, construct, convert_implicitly, copy_closure, fill, initialise
from fuser.eager.data import PLACE, Value
from fuser.eager.loops import run_do, run_for, run_range, run_while
from fuser.eager.masks import NONE, Frame, LaneCondition, Mask, any_of, both_of
from fuser.eager.resolve import instantiate, resolve, resolve_argument
from fuser.eager.state import Scope, State
from fuser.eager.storage import Closure, Fixed, Location, NoTranslation, Thing, choose, make_location
from fuser.eager.types import ArrayOf, ClassType, CppType, argument_key
from fuser.eager.values import binary, either
from fuser.eager.walk import decide, evaluate, locate, number_of, run, run_all, run_block

__all__ = ["RUN"]

# Returns that are kept apart, where tensors have values.
_MAX_RESULTS = 4


def _run_declaration(state: State, node: Declaration) -> None:
    for item in node.declarators:
        PLACE.set(item.place)
        if item.bindings:
            assert item.value is not None, "the grammar wants one"
            bind_parts(state, item, locate(state, item.value))
        else:
            state.scope.names[item.name] = _declare(state, item)


def _declare(state: State, item: Declarator) -> Location:
    # The location of a new variable.
    spelled, value = item.type, item.value
    if isinstance(spelled, ReferenceType) and value is not None:
        location = locate(state, value)
        if not isinstance(location, Fixed):
            return location
        may_copy = spelled.is_const or spelled.is_rvalue or isinstance(location.thing, Closure)
        if not may_copy or _gives_place(state, value):
            # C++ has a place there, which others may write to.
            PLACE.set(item.place)
            raise NoTranslation("a reference to what a function returns")
        return Fixed(convert_implicitly(state, location.thing, resolve(state, spelled)), state.mask)
    if isinstance(spelled, ArrayType) and spelled.size is None and isinstance(value, InitList):
        kind: CppType = ArrayOf(resolve(state, spelled.element), len(value.values))
    else:
        kind = resolve(state, spelled)
    if value is None:
        return _declare_only(state, kind)
    thing = evaluate(state, value) if kind is AUTO else initialise(state, kind, value)
    if isinstance(thing, Closure):
        return Fixed(copy_closure(state, thing))
    location = make_location(thing.type if kind is AUTO else kind, state.frames[-1])
    PLACE.set(item.place)
    location.store(state, thing)
    return location


def _gives_place(state: State, node: Expression) -> bool:
    # Whether it calls what returns a reference.
    functions: tuple[FunctionDefinition, ...] = ()
    called = node.function if isinstance(node, Call) else None
    if isinstance(called, Member):
        kind = locate(state, called.value).type
        functions = kind.named(called.name) if isinstance(kind, ClassType) else ()
    elif isinstance(called, Name):
        found = state.scope.find(called.name)
        is_lambda = isinstance(found, Fixed) and isinstance(found.thing, Closure)
        functions = (found.thing.syntax.function,) if is_lambda else state.program.functions.get(called.name, ())
    return any(isinstance(item.result, ReferenceType) for item in functions)


def _declare_only(state: State, kind: CppType) -> Location:
    # Without an initialiser.
    location = make_location(kind, state.frames[-1])
    if isinstance(kind, ClassType) and kind.struct.constructors:
        location.store(state, construct(state, kind, ()))
    elif isinstance(kind, ClassType) and any(field.value is not None for field in kind.struct.fields):
        location.store(state, fill(state, kind, []))
    return location


def _run_alias(state: State, node: Alias) -> None:
    state.scope.names[node.name] = node if node.template else resolve(state, node.type)


def _run_struct(state: State, node: Struct) -> None:
    if node.special is not None:
        key = argument_key([resolve_argument(state, item) for item in node.special])
        state.globals.names.setdefault(f"{node.name}<>", {})[key] = node
        return
    state.scope.names[node.name] = node if node.template else instantiate(state, node, [], state.scope.types())


def _run_evaluate(state: State, node: Evaluate) -> None:
    if node.expression is not None:
        evaluate(state, node.expression)


def _run_if(state: State, node: If) -> None:
    with state.within(Scope(state.scope)):
        found = decide(state, node.condition)
        if isinstance(found, bool):
            taken = node.yes if found else node.no
            if taken is not None:
                run_block(state, (taken,))
            return
        condition = LaneCondition(found)
        with state.branch(condition):
            run_block(state, (node.yes,))
        if node.no is not None:
            with state.branch(condition, False):
                run_block(state, (node.no,))


def _run_return(state: State, node: Return) -> None:
    function = next(frame for frame in reversed(state.frames) if frame.kind == "function")
    kind: CppType = function.result
    if node.value is not None and kind is not VOID:
        if kind is AUTO and not isinstance(node.value, InitList):
            thing = evaluate(state, node.value)
        else:
            thing = initialise(state, kind, node.value)
        PLACE.set(node.place)
        _add_result(state, function, thing)
    elif node.value is not None:
        evaluate(state, node.value)
    state.leave("function")


def _jump(state: State, node: Statement, *kinds: str) -> None:
    inside = itertools.takewhile(lambda frame: frame.kind != "function", reversed(state.frames))
    if not any(frame.kind in kinds for frame in inside):
        PLACE.set(node.place)
        raise NoTranslation(f"{type(node).__name__.lower()} outside of what it could leave")
    state.leave(*kinds)


def _add_result(state: State, function: Frame, thing: Thing) -> None:
    function.results.append((state.mask, thing))
    if state.graph is None and len(function.results) > _MAX_RESULTS:
        (first, one), (second, other), *rest = function.results
        merged = choose(both_of(function.entry.beyond(first)), one, other)
        either_of = LaneCondition(either(any_of([first]), any_of([second])))
        function.results = [(function.entry.extend(either_of), merged), *rest]


def _run_switch(state: State, node: Switch) -> None:
    with state.within(Scope(state.scope)):
        if node.condition.declaration is not None:
            run(state, node.condition.declaration)
        value = number_of(state, node.condition.value)
        with state.inside("switch") as frame:
            labels = [
                [None if item is None else number_of(state, item) for item in items] for items, _ in node.sections
            ]
            if value.is_constant:
                for _, statements in node.sections[_first_section(value, labels) :]:
                    run_all(state, statements)
            else:
                _switch_on_data(state, frame, node, value, labels)


def _first_section(value: Value, labels: list[list[Value | None]]) -> int:
    # The section whose label a constant is, else the default one, else none of them.
    for number, items in enumerate(labels):
        if any(item is not None and item.data == value.data for item in items):
            return number
    return next((number for number, items in enumerate(labels) if None in items), len(labels))


def _switch_on_data(state: State, frame: Frame, node: Switch, value: Value, labels: list[list[Value | None]]) -> None:
    tests = [[LaneCondition(binary("==", value, item).data) for item in items if item is not None] for items in labels]
    # Lanes that come from the section before, None for none.
    falling: Any = None
    for number, (_, statements) in enumerate(node.sections):
        if frame.mask is NONE:
            return
        others = None if None not in labels[number] else tests[:number] + tests[number + 1 :]
        entering, mask = _enter_section(frame.mask, tests[number], others)
        if falling is not None:
            entering = either(falling, entering)
            mask = frame.mask if entering is True else frame.mask.extend(LaneCondition(entering))
        with state.inside("branch", mask) as inner:
            run_all(state, statements)
        falling = None if inner.mask is NONE else entering


def _enter_section(
    mask: Mask, tests: list[LaneCondition], others: list[list[LaneCondition]] | None
) -> tuple[Any, Mask]:
    # Which lanes of a mask a section's labels take, as data and as a mask; the default section's are all ``others``
    # that no other section's label takes.
    if others is not None:
        found = mask
        for test in itertools.chain.from_iterable(others):
            found = found.extend(test, False)
        return both_of(mask.beyond(found)), found
    entering: Any = False
    for test in tests:
        entering = either(entering, test.data)
    return entering, mask.extend(tests[0] if len(tests) == 1 else LaneCondition(entering))


RUN: Mapping[type, Callable[[State, Any], None]] = {
    Block: lambda state, node: run_block(state, node.statements),
    Declaration: _run_declaration,
    Alias: _run_alias,
    Struct: _run_struct,
    Evaluate: _run_evaluate,
    If: _run_if,
    For: run_for,
    While: run_while,
    DoWhile: run_do,
    RangeFor: run_range,
    Switch: _run_switch,
    Break: lambda state, node: _jump(state, node, "loop", "switch"),
    Continue: lambda state, node: _jump(state, node, "body"),
    Return: _run_return,
}
