"""Call expressions: the functor's own functions, closures, members of objects, and the functions that torch has."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fuser.cxx.functor import MATH_FUNCTIONS
from fuser.cxx.nodes import Call, Expression, Member, Name, NamedType, TypeSyntax
from fuser.eager.calls import call_functions, call_operator, members_of, write
from fuser.eager.data import PLACE, Value, constant
from fuser.eager.locations import find_limit_named, follow, point_at, pun
from fuser.eager.math import functions
from fuser.eager.promotion import convert
from fuser.eager.resolve import resolve
from fuser.eager.state import State
from fuser.eager.storage import Closure, Location, NoTranslation, Thing
from fuser.eager.types import ClassType, describe_type
from fuser.eager.walk import class_scope, load, locate, number_of

__all__ = ["BESIDE_NUMBERS", "call"]

# Functions that write through pointers, and how many of them (the last arguments).
_WRITERS = {"frexp": 1, "modf": 1, "remquo": 1, "sincos": 2, "sincospi": 2}
_IN_STD = frozenset({"max", "min", "clamp"})
# Functions that say something and compute nothing.
_IGNORED = frozenset({"assert", "printf", "__builtin_assume", "__syncthreads"})
# Functions that are no functions of numbers.
BESIDE_NUMBERS = _IGNORED | {"memcpy"}


def call(state: State, node: Call) -> Thing:
    """Return what a call expression is worth."""
    function = node.function
    if isinstance(function, Member):
        return _call_member(state, node, function)
    if not isinstance(function, Name):
        return _call_closure(state, node, function)
    if function.member:
        return _call_static(state, node, function)
    if not function.in_std and state.scope.find(function.name) is not None:
        return _call_closure(state, node, function)
    candidates = state.program.functions.get(function.name, ())
    # What fuser's own texts define under such a name, torch has.
    is_ours = function.name.startswith("fuser_") and functions.is_known(function.name)
    if candidates and not function.in_std and not is_ours:
        explicit = [
            resolve(state, item) if isinstance(item, TypeSyntax) else number_of(state, item)
            for item in function.arguments
        ]
        operands = _operands_of(state, node)
        if explicit or not _is_shadowed(state, function.name, operands):
            return call_functions(state, candidates, explicit, operands, state.globals)
    return _call_beside_argument(state, node, function) or _call_builtin(state, node, function)


def _call_beside_argument(state: State, node: Call, function: Name) -> Thing | None:
    # A function that stands in the namespace of an argument's class needs no more than its name.
    if not any(name.endswith(f"::{function.name}") for name in state.program.functions):
        return None
    operands = _operands_of(state, node)
    kinds = {item.type.struct.name: None for item in operands if isinstance(item.type, ClassType)}
    names = [f"{name.rpartition('::')[0]}::{function.name}" for name in kinds]
    candidates = [item for name in names for item in state.program.functions.get(name, ())]
    return call_functions(state, candidates, (), operands, state.globals) if candidates else None


def _operands_of(state: State, node: Call) -> list[Location]:
    # As locations: parameters may be references.
    operands = [locate(state, item) for item in node.arguments]
    PLACE.set(node.place)
    return operands


def _is_shadowed(state: State, name: str, operands: Sequence[Location]) -> bool:
    # A function that is no template is preferred where it takes just these types.
    kinds = {operand.type for operand in operands}
    is_function = name in MATH_FUNCTIONS and name == state.program.entry.name
    return is_function and len(kinds) == 1 and kinds <= {torch.float32, torch.float64}


def _call_closure(state: State, node: Call, function: Expression) -> Thing:
    callee, operands = locate(state, function), _operands_of(state, node)
    own = call_operator(state, "()", (callee, *operands)) if isinstance(callee.type, ClassType) else None
    if own is not None:
        return own
    closure = load(state, callee)
    if not isinstance(closure, Closure):
        raise NoTranslation("a call of something that is no function")
    return call_functions(state, (closure.syntax.function,), (), operands, closure.scope)


def _call_member(state: State, node: Call, function: Member) -> Thing:
    base = locate(state, function.value)
    kind = base.type
    if isinstance(kind, ClassType):
        operands = _operands_of(state, node)
        return call_functions(state, kind.named(function.name), (), operands, members_of(state, base, kind))
    if isinstance(kind, torch.dtype) and kind.is_complex and function.name in {"real", "imag"}:
        return _complex_part(state, node, base, function.name)
    raise NoTranslation(f"the member {function.name!r} of {describe_type(kind)}")


def _call_static(state: State, node: Call, function: Name) -> Thing:
    limit = find_limit_named(state, function)
    if limit is not None and not node.arguments:
        return limit
    kind = resolve(state, NamedType(function.place, function.name, function.arguments))
    if not isinstance(kind, ClassType):
        raise NoTranslation(f"the member {function.member!r} of {describe_type(kind)}")
    operands = _operands_of(state, node)
    return call_functions(
        state, kind.named(function.member), (), operands, class_scope(state, kind.struct, dict(kind.bindings))
    )


def _complex_part(state: State, node: Call, base: Location, name: str) -> Thing:
    whole = base.load(state)
    assert isinstance(whole, Value), "complex numbers are numbers"
    if not node.arguments:
        return functions.call(name, [whole])
    given = convert(number_of(state, node.arguments[0]), whole.dtype.to_real())
    real, imaginary = functions.call("real", [whole]), functions.call("imag", [whole])
    pair = [given, imaginary] if name == "real" else [real, given]
    base.store(state, functions.call("complex", pair))
    return constant(0, torch.int32)


def _copy_bits(state: State, node: Call) -> Thing:
    # As one number of another type reads the bits of a number: memcpy(&i, &x, sizeof(i)).
    to, source = (point_at(state, follow(state, item)) for item in node.arguments[:2])
    count = number_of(state, node.arguments[2])
    PLACE.set(node.place)
    if not isinstance(to.type, torch.dtype) or not count.is_constant or count.data != to.type.itemsize:
        raise NoTranslation("memcpy of anything but one number")
    write(state, to, (source if source.type == to.type else pun(source, to.type)).load(state))
    return constant(0, torch.int32)


def _call_builtin(state: State, node: Call, function: Name) -> Thing:
    name = function.name
    if name in _IGNORED:
        return constant(0, torch.int32)
    if name in {"nan", "nanf"}:
        return functions.call(name, [])
    if name == "memcpy":
        return _copy_bits(state, node)
    writers = next((count for base, count in _WRITERS.items() if name in {base, f"{base}f"}), 0)
    given = node.arguments[: len(node.arguments) - writers]
    values = [number_of(state, item) for item in given]
    if function.arguments and isinstance(function.arguments[0], TypeSyntax):
        kind = resolve(state, function.arguments[0])
        values = [convert(value, kind) for value in values] if isinstance(kind, torch.dtype) else values
    targets = [point_at(state, follow(state, item)) for item in node.arguments[len(given) :]]
    PLACE.set(node.place)
    try:
        if not writers:
            return functions.call(f"std::{name}" if function.in_std and name in _IN_STD else name, values)
        results = functions.call_with_results(name, values)
    except KeyError:
        raise NoTranslation(f"the function {name!r}") from None
    for target, result in zip(targets, results[len(results) - writers :], strict=True):
        write(state, target, result)
    return results[0] if len(results) > writers else constant(0, torch.int32)
