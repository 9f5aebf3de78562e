"""Operators: what an expression is worth, by C++'s rules for types."""

from __future__ import annotations

import re
from typing import Any

import torch

from fuser.cxx.nodes import (
    Assign,
    Binary,
    Conditional,
    Expression,
    Index,
    InitList,
    Lambda,
    Literal,
    Name,
    Step,
    Unary,
)
from fuser.eager.conversions import Converter
from fuser.eager.masks import Condition
from fuser.eager.storage import (
    Closure,
    Fixed,
    Location,
    NoTranslation,
    Pointer,
    Scope,
    Thing,
    choose,
)
from fuser.eager.values import Value, binary, both, common_type, constant, convert, either, unary

__all__ = ["Evaluator"]

_SUFFIX = re.compile(
    r"(?P<digits>0[xX][\da-fA-F.']+(?:[pP][+-]?\d+)?|0[bB][01']+|[\d.']+(?:[eE][+-]?\d+)?)(?P<suffix>\w*)"
)


_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}


def _character(inner: str) -> int:
    if not inner.startswith("\\"):
        return ord(inner)
    body = inner[1:]
    if body[0] in "x01234567":
        return int(body.removeprefix("x"), 16 if body[0] == "x" else 8)
    return ord(_ESCAPES.get(body, body))


class Evaluator(Converter):
    """Evaluates every expression but calls."""

    def _literal(self, node: Literal) -> Thing:
        text = node.text
        if text in {"true", "false"}:
            return Value(torch.bool, text == "true")
        if text.startswith("'"):
            return constant(_character(text[1:-1]), torch.int8)
        if text[0].isdigit() or text[0] == ".":
            return _number(text)
        raise NoTranslation("a text" if text.startswith('"') else text)

    def _load_name(self, node: Name) -> Thing:
        return self.load(self._locate_name(node))

    def _unary(self, node: Unary) -> Thing:
        if node.operator == "*":
            return self.load(self.locate(node))
        if node.operator == "&":
            return self._address(node.operand)
        found = self.value(node.operand)
        self.at(node.place)
        return unary(node.operator, found)

    def _address(self, node: Expression) -> Pointer:
        if isinstance(node, Index):
            base, at = self.evaluate(node.array), self.value(node.index)
            if isinstance(base, Pointer):
                return self._advance(base, "+", at)
        location = self.locate(node)
        return Pointer((location,), constant(0, torch.int64), location.type)

    def _advance(self, pointer: Pointer, operator: str, count: Value) -> Pointer:
        offset = binary(operator, pointer.offset, convert(count, torch.int64))
        return Pointer(pointer.targets, offset, pointer.element, pointer.view)

    def _binary(self, node: Binary) -> Thing:
        if node.operator == ",":
            self.evaluate(node.left)
            return self.evaluate(node.right)
        if node.operator in {"&&", "||"}:
            return self._short_circuit(node)
        left, right = self.evaluate(node.left), self.evaluate(node.right)
        self.at(node.place)
        return self.combine(node.operator, left, right)

    def combine(self, operator: str, left: Thing, right: Thing) -> Thing:
        """Apply a binary operator to two things."""
        if isinstance(left, Value) and isinstance(right, Value):
            return binary(operator, left, right)
        if isinstance(right, Pointer) and operator == "+":
            left, right = right, left
        if isinstance(left, Pointer) and isinstance(right, Value) and operator in {"+", "-"}:
            return self._advance(left, operator, right)
        if isinstance(left, Pointer) and isinstance(right, Pointer) and left.targets is right.targets:
            return binary(operator, left.offset, right.offset)
        own = self.call_operator(operator, (Fixed(left, self.mask), Fixed(right, self.mask)))
        if own is not None:
            return own
        raise NoTranslation(f"the operator {operator} on something that is no number")

    def _short_circuit(self, node: Binary) -> Value:
        left = self.condition(node.left)
        is_and = node.operator == "&&"
        if isinstance(left, bool) and not self.is_dry:
            return Value(torch.bool, self.condition(node.right) if left is is_and else left)
        with self.branch(Condition(left), is_and):
            right = self.condition(node.right)
        self.at(node.place)
        return Value(torch.bool, (both if is_and else either)(left, right))

    def _conditional(self, node: Conditional) -> Thing:
        found = self.condition(node.condition)
        if self.is_dry or isinstance(found, bool):
            taken, other = (node.yes, node.no) if found else (node.no, node.yes)
            thing = self.evaluate(taken)
            kind = self.static_type(other)
            if isinstance(thing, Value) and isinstance(kind, torch.dtype) and kind is not thing.dtype:
                return convert(thing, common_type(thing.dtype, kind))
            return thing
        condition = Condition(found)
        with self.branch(condition):
            yes = self.evaluate(node.yes)
        with self.branch(condition, False):
            no = self.evaluate(node.no)
        self.at(node.place)
        if isinstance(yes, Value) and isinstance(no, Value) and yes.dtype is not no.dtype:
            kind = common_type(yes.dtype, no.dtype)
            yes, no = convert(yes, kind), convert(no, kind)
        return choose(found, yes, no)

    def assign(self, node: Assign) -> Location:
        """Run an assignment; return what it assigned to."""
        if isinstance(node.value, InitList):
            location = self.locate(node.target)
            self.write(location, self.initialise(location.type, node.value))
            return location
        thing = self.evaluate(node.value)
        location = self.locate(node.target)
        if node.operator:
            old = self.load(location)
            self.at(node.place)
            thing = self.combine(node.operator, old, thing)
        self.at(node.place)
        self.write(location, thing)
        return location

    def step(self, node: Step) -> Thing:
        """Run ``++`` or ``--``; return its value."""
        location = self.locate(node.target)
        old = self.load(location)
        self.at(node.place)
        new = self.convert(self.combine(node.operator, old, constant(1, torch.int32)), location.type)
        self.write(location, new)
        return new if node.is_prefix else old

    def _closure(self, node: Lambda) -> Closure:
        scope = Scope(self.scope)
        if node.default == "=":
            for name in _names_in(node.function):
                found = self.scope.find(name)
                if isinstance(found, Location) and self.globals.find(name) is not found:
                    scope.names[name] = self.copy(found)
        for capture in node.captures:
            if capture.value is not None:
                scope.names[capture.name] = self.copy(Fixed(self.evaluate(capture.value)))
            elif not capture.by_reference:
                found = self.scope.find(capture.name)
                if isinstance(found, Location):
                    scope.names[capture.name] = self.copy(found)
        return Closure(node, scope)


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


def _names_in(node: Any) -> set[str]:
    # Every name that an expression or statement mentions.
    if isinstance(node, Name):
        return {node.name}
    if isinstance(node, tuple):
        return set().union(*map(_names_in, node))
    fields = getattr(node, "__dataclass_fields__", ())
    return set().union(*(_names_in(getattr(node, field)) for field in fields))
