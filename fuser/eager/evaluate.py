"""Expressions but calls: what they are worth, by C++'s rules for types."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fuser.cxx.builtin_types import AUTO, VOID
from fuser.cxx.nodes import (
    Assign,
    Binary,
    Call,
    Cast,
    Conditional,
    Expression,
    Increment,
    Index,
    InitList,
    Lambda,
    Literal,
    Member,
    Name,
    SizeOf,
    TypeSyntax,
    Unary,
    walk,
)
from fuser.eager.call_expressions import call
from fuser.eager.calls import call_operator, convert_implicitly, copy_of, initialise, write
from fuser.eager.data import PLACE, Value, constant
from fuser.eager.locations import LOCATE as PLAIN_LOCATIONS
from fuser.eager.locations import advance
from fuser.eager.masks import LaneCondition
from fuser.eager.promotion import common_type, convert
from fuser.eager.resolve import resolve
from fuser.eager.state import Scope, State
from fuser.eager.storage import Closure, Fixed, Location, NoTranslation, Pointer, Thing, choose
from fuser.eager.types import ArrayOf, ClassType, CppType, PointerTo, describe_type
from fuser.eager.values import binary, both, either, unary
from fuser.eager.walk import evaluate, load, locate, number_of, static_type, truth_of

__all__ = ["EVALUATE", "LOCATE"]

_SUFFIX = re.compile(
    r"(?P<digits>0[xX][\da-fA-F.']+(?:[pP][+-]?\d+)?|0[bB][01']+|[\d.']+(?:[eE][+-]?\d+)?)(?P<suffix>\w*)"
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}


def _literal(_: State, node: Literal) -> Thing:
    text = node.text
    if text in {"true", "false"}:
        return Value(torch.bool, text == "true")
    if text.startswith("'"):
        return constant(_character(text[1:-1]), torch.int8)
    if text[0].isdigit() or text[0] == ".":
        return _number(text)
    raise NoTranslation("a text" if text.startswith('"') else text)


def _unary(state: State, node: Unary) -> Thing:
    if node.operator == "*":
        return _load(state, node)
    if node.operator == "&":
        return _address(state, node.operand)
    found = evaluate(state, node.operand)
    PLACE.set(node.place)
    if isinstance(found, Value):
        return unary(node.operator, found)
    own = call_operator(state, node.operator, (Fixed(found, state.mask),))
    return _wanted(own, node.operator)


def _address(state: State, node: Expression) -> Pointer:
    if isinstance(node, Index):
        base, at = evaluate(state, node.array), number_of(state, node.index)
        if isinstance(base, Pointer):
            return advance(base, "+", at)
    location = locate(state, node)
    return Pointer((location,), constant(0, torch.int64), location.type)


def _binary(state: State, node: Binary) -> Thing:
    if node.operator == ",":
        evaluate(state, node.left)
        return evaluate(state, node.right)
    if node.operator in {"&&", "||"}:
        return _short_circuit(state, node)
    # A long sum leans to the left, more deeply than Python calls itself.
    links = [node]
    while isinstance(left := links[-1].left, Binary) and left.operator not in {",", "&&", "||"}:
        links.append(left)
    found = evaluate(state, left)
    for link in reversed(links):
        right = evaluate(state, link.right)
        PLACE.set(link.place)
        found = _combine(state, link.operator, found, right)
    return found


def _combine(state: State, operator: str, left: Thing, right: Thing) -> Thing:
    if isinstance(left, Value) and isinstance(right, Value):
        return binary(operator, left, right)
    if isinstance(right, Pointer) and operator == "+":
        left, right = right, left
    if isinstance(left, Pointer) and isinstance(right, Value) and operator in {"+", "-"}:
        return advance(left, operator, right)
    if isinstance(left, Pointer) and isinstance(right, Pointer) and left.targets is right.targets:
        return binary(operator, left.offset, right.offset)
    own = call_operator(state, operator, (Fixed(left, state.mask), Fixed(right, state.mask)))
    return _wanted(own, operator)


def _wanted(own: Thing | None, operator: str) -> Thing:
    # What the functor's own operator made, which there has to be.
    if own is None:
        raise NoTranslation(f"the operator {operator} on something that is no number")
    return own


def _short_circuit(state: State, node: Binary) -> Value:
    left = truth_of(state, node.left)
    is_and = node.operator == "&&"
    if isinstance(left, bool) and not state.is_dry:
        return Value(torch.bool, truth_of(state, node.right) if left is is_and else left)
    with state.branch(LaneCondition(left), is_and):
        right = truth_of(state, node.right)
    PLACE.set(node.place)
    return Value(torch.bool, (both if is_and else either)(left, right))


def _choose_one(state: State, node: Conditional) -> Thing:
    found = truth_of(state, node.condition)
    if state.is_dry or isinstance(found, bool):
        taken, other = (node.yes, node.no) if found else (node.no, node.yes)
        thing = evaluate(state, taken)
        kind = static_type(state, other)
        if isinstance(thing, Value) and isinstance(kind, torch.dtype) and kind is not thing.dtype:
            return convert(thing, common_type(thing.dtype, kind))
        return thing
    condition = LaneCondition(found)
    with state.branch(condition):
        yes = evaluate(state, node.yes)
    with state.branch(condition, False):
        no = evaluate(state, node.no)
    PLACE.set(node.place)
    if isinstance(yes, Value) and isinstance(no, Value) and yes.dtype is not no.dtype:
        kind = common_type(yes.dtype, no.dtype)
        yes, no = convert(yes, kind), convert(no, kind)
    return choose(found, yes, no)


def _assign(state: State, node: Assign) -> Location:
    # Returns what it assigned to.
    if isinstance(node.value, InitList):
        location = locate(state, node.target)
        write(state, location, initialise(state, location.type, node.value))
        return location
    thing = evaluate(state, node.value)
    location = locate(state, node.target)
    if node.operator and isinstance(location.type, ClassType):
        operator = f"{node.operator}="
        PLACE.set(node.place)
        _wanted(call_operator(state, operator, (location, Fixed(thing, state.mask))), operator)
        return location
    if node.operator:
        old = load(state, location)
        PLACE.set(node.place)
        thing = _combine(state, node.operator, old, thing)
    PLACE.set(node.place)
    write(state, location, thing)
    return location


def _step(state: State, node: Increment) -> Thing:
    location = locate(state, node.target)
    if isinstance(location.type, ClassType):
        operator = node.operator * 2
        # The one behind takes an int, which says so.
        behind = () if node.is_prefix else (Fixed(constant(0, torch.int32), state.mask),)
        PLACE.set(node.place)
        return _wanted(call_operator(state, operator, (location, *behind)), operator)
    old = load(state, location)
    PLACE.set(node.place)
    new = convert_implicitly(state, _combine(state, node.operator, old, constant(1, torch.int32)), location.type)
    write(state, location, new)
    return new if node.is_prefix else old


def _closure(state: State, node: Lambda) -> Closure:
    scope = Scope(state.scope)
    if node.default == "=":
        for name in {item.name for item in walk(node.function) if isinstance(item, Name)}:
            found = state.scope.find(name)
            if isinstance(found, Location) and state.globals.find(name) is not found:
                scope.names[name] = copy_of(state, found)
    for capture in node.captures:
        if capture.value is not None:
            scope.names[capture.name] = copy_of(state, Fixed(evaluate(state, capture.value)))
        elif not capture.by_reference:
            found = state.scope.find(capture.name)
            if isinstance(found, Location):
                scope.names[capture.name] = copy_of(state, found)
    return Closure(node, scope)


def _cast(state: State, node: Cast) -> Thing:
    kind = resolve(state, node.type)
    if kind is VOID:
        for item in node.values:
            evaluate(state, item)
        return constant(0, torch.int32)
    if len(node.values) == 1 and not isinstance(node.values[0], InitList) and not isinstance(kind, ClassType):
        thing = evaluate(state, node.values[0])
        PLACE.set(node.place)
        return convert_implicitly(state, thing, kind)
    return initialise(state, kind, InitList(node.place, node.values))


def _size_of(state: State, node: SizeOf) -> Value:
    operand = node.operand
    kind: CppType | None
    if isinstance(operand, TypeSyntax):
        kind = resolve(state, operand)
    elif isinstance(operand, Name | Index | Member):
        with state.dry():
            kind = locate(state, operand).type
    else:
        kind = static_type(state, operand)
    if kind is None:
        raise NoTranslation("sizeof of this expression")
    return constant(_size(kind), torch.uint64)


def _number(text: str) -> Value:
    match = _SUFFIX.fullmatch(text)
    if match is None:
        raise NoTranslation(f"the number {text}")
    digits, suffix = match["digits"].replace("'", ""), match["suffix"].lower()
    is_hex = digits[:2] in {"0x", "0X"}
    is_float = "." in digits or ("p" in digits.lower() if is_hex else "e" in digits.lower() or "f" in suffix)
    if is_float:
        number = float.fromhex(digits) if is_hex else float(digits)
        return constant(number, torch.float32 if suffix == "f" else torch.float64)
    is_octal = len(digits) > 1 and digits[0] == "0" and digits.isdigit()
    whole = int(digits, 8) if is_octal else int(digits, 0)
    kinds = [torch.int32, torch.uint32, torch.int64, torch.uint64]
    if "l" in suffix:
        kinds = [torch.int64, torch.uint64]
    if "u" in suffix:
        kinds = [kind for kind in kinds if not kind.is_signed]
    elif not (is_hex or is_octal or digits[:2] in {"0b", "0B"}):
        kinds = [kind for kind in kinds if kind.is_signed]
    fitting = [kind for kind in kinds if whole <= torch.iinfo(kind).max]
    return constant(whole, (fitting or kinds[-1:])[0])


def _character(inner: str) -> int:
    if not inner.startswith("\\"):
        return ord(inner)
    body = inner[1:]
    if body[0] in "x01234567":
        return int(body.removeprefix("x"), 16 if body[0] == "x" else 8)
    return ord(_ESCAPES.get(body, body))


def _size(kind: CppType) -> int:
    match kind:
        case torch.dtype():
            return kind.itemsize
        case ArrayOf(element, length):
            return length * _size(element)
        case PointerTo():
            return 8
    raise NoTranslation(f"sizeof {describe_type(kind)}")


def _load(state: State, node: Expression) -> Thing:
    return load(state, locate(state, node))


def _locate_step(state: State, node: Increment) -> Location | None:
    if not node.is_prefix:
        return None
    _step(state, node)
    return locate(state, node.target)


def _locate_last(state: State, node: Binary) -> Location | None:
    if node.operator != ",":
        return None
    evaluate(state, node.left)
    return locate(state, node.right)


EVALUATE: Mapping[type, Callable[[State, Any], Thing]] = {
    Literal: _literal,
    Name: _load,
    Unary: _unary,
    Binary: _binary,
    Assign: _load,
    Increment: _step,
    Conditional: _choose_one,
    Call: call,
    Cast: _cast,
    Index: _load,
    Member: _load,
    InitList: lambda state, node: initialise(state, AUTO, node),
    SizeOf: _size_of,
    Lambda: _closure,
}
LOCATE: Mapping[type, Callable[[State, Any], Location | None]] = {
    **PLAIN_LOCATIONS,
    Assign: _assign,
    Increment: _locate_step,
    Binary: _locate_last,
}
