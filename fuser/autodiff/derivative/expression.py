"""Typed expressions: what derivatives are computed on, between a translated functor and the text of its derivative.

An expression is one operation of the vocabulary of typed graphs on other expressions; equal ones are one object, so
that a computation is a DAG without duplicates. A ``Builder`` makes them, and simplifies each as it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from fuser.autodiff.derivative.operations import Number, count_static, fold, result_dtype, typed_number

__all__ = ["REWRITES", "Builder", "Expr", "topological"]

Place = tuple[int, int] | None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Expr:
    """One operation. Made by a Builder only; compares by identity."""

    # "input", "constant", "convert" (static_cast to ``dtype``), "bit_cast", or the ATen op's name: "mul", "where".
    op: str
    # Expressions, after the operation's static arguments; of an input its name, of a constant its value.
    args: tuple[Any, ...]
    # The C++ type, as a torch dtype.
    dtype: torch.dtype
    builder: Builder
    # Line and column (from 1) in the user's text.
    place: Place = None

    @property
    def operands(self) -> tuple[Expr, ...]:
        """The arguments that are expressions."""
        if self.op in {"input", "constant"}:
            return ()
        return self.args[count_static(self.op) :]

    @property
    def is_constant(self) -> bool:
        """Whether this is a number."""
        return self.op == "constant"

    def equals(self, value: Number) -> bool:
        """Whether this is the number ``value``, with its sign if it is zero."""
        return self.op == "constant" and repr(self.args[0]) == repr(typed_number(value, self.dtype))

    def call(self, op: str, *others: Operand) -> Expr:
        """Return ``op(self, *others)``; numbers among the others are of this expression's type."""
        return self.builder.emit(op, self, *others)

    def to(self, dtype: torch.dtype) -> Expr:
        """Return the static_cast to ``dtype``."""
        return self.builder.emit("convert", self, dtype=dtype)

    def where(self, mask: Expr, other: Operand) -> Expr:
        """Return ``mask ? self : other``."""
        return self.builder.emit("where", mask, self, other)

    def __repr__(self) -> str:
        # The operands' operations only: a DAG written out as a tree has no end.
        args = ", ".join(arg.op if isinstance(arg, Expr) else repr(arg) for arg in self.args)
        return f"{self.op}({args}): {str(self.dtype).removeprefix('torch.')}"

    def __add__(self, other: Operand) -> Expr:
        return self.call("add", other)

    def __radd__(self, other: Operand) -> Expr:
        return self.builder.emit("add", other, self)

    def __sub__(self, other: Operand) -> Expr:
        return self.call("sub", other)

    def __rsub__(self, other: Operand) -> Expr:
        return self.builder.emit("sub", other, self)

    def __mul__(self, other: Operand) -> Expr:
        return self.call("mul", other)

    def __rmul__(self, other: Operand) -> Expr:
        return self.builder.emit("mul", other, self)

    def __truediv__(self, other: Operand) -> Expr:
        return self.call("div", other)

    def __rtruediv__(self, other: Operand) -> Expr:
        return self.builder.emit("div", other, self)

    def __neg__(self) -> Expr:
        return self.call("neg")


Operand = Expr | Number


class Builder:
    """Makes expressions: equal ones once, simplified, those of constants evaluated."""

    def __init__(self, *, drops_detach: bool = False) -> None:
        # Whether ``detach``, which only differentiation sees, is the identity.
        self.drops_detach = drops_detach
        self._known: dict[Any, Expr] = {}

    def input(self, name: str, dtype: torch.dtype) -> Expr:
        """Return the input of that name."""
        return self._intern("input", (name,), dtype, None)

    def constant(self, value: Number, dtype: torch.dtype) -> Expr:
        """Return a number of type ``dtype``."""
        return self._intern("constant", (typed_number(value, dtype),), dtype, None)

    def leaf(self, item: Expr) -> Expr:
        """Return another builder's input or constant as one's own."""
        return self._intern(item.op, item.args, item.dtype, None)

    def emit(self, op: str, *args: Any, dtype: torch.dtype | None = None, place: Place = None) -> Expr:
        """Return ``op(*args)``, or something simpler that is equal to it on every input.

        Args:
            op: as in Expr.
            *args: static arguments, then expressions and numbers, which are of the type of the expressions.
            dtype: type of the result where it does not follow from the operands (convert, bit_cast).
            place: where in the user's text it comes from.
        """
        static = count_static(op)
        operands = self._typed(op, args[static:])
        kinds = [item.dtype for item in operands]
        made = dtype or result_dtype(op, kinds)
        rule = REWRITES.get(op)
        simpler = None if rule is None else rule(operands, made, self)
        if simpler is not None:
            return simpler
        if all(item.is_constant for item in operands):
            value = fold(op, args[:static], [item.args[0] for item in operands], kinds, made)
            if value is not None:
                return self.constant(value, made)
        return self._intern(op, (*args[:static], *operands), made, place)

    def copy(self, outputs: Sequence[Expr], instead: Callable[[Expr], Expr | None] | None = None) -> list[Expr]:
        """Return ``outputs``, which may be another builder's, made anew from their inputs.

        ``instead`` maps an expression to the one (of the old builder) that stands for it, or None; constants among
        what it returns may belong to either.
        """
        made: dict[Expr, Expr] = {}
        for item in topological(outputs, instead):
            other = instead(item) if instead is not None else None
            if other is not None:
                made[item] = self.constant(other.args[0], other.dtype) if other.is_constant else made[other]
            elif item.op in {"input", "constant"}:
                made[item] = self.leaf(item)
            else:
                args = (made[arg] if isinstance(arg, Expr) else arg for arg in item.args)
                made[item] = self.emit(item.op, *args, dtype=item.dtype, place=item.place)
        return [made[output] for output in outputs]

    def _typed(self, op: str, args: Sequence[Operand]) -> tuple[Expr, ...]:
        dtypes = [arg.dtype for arg in (args[1:] if op == "where" else args) if isinstance(arg, Expr)]
        return tuple(arg if isinstance(arg, Expr) else self.constant(arg, dtypes[0]) for arg in args)

    def _intern(self, op: str, args: tuple[Any, ...], dtype: torch.dtype, place: Place) -> Expr:
        key = (op, dtype, *(arg if isinstance(arg, Expr) else repr(arg) for arg in args))
        found = self._known.get(key)
        if found is None and op in {"add", "mul", "eq", "ne", "logical_and", "logical_or"}:
            found = self._known.get((op, dtype, *reversed(args)))
        if found is None:
            found = self._known[key] = Expr(op, args, dtype, self, place)
        return found


def topological(outputs: Iterable[Expr], instead: Callable[[Expr], Expr | None] | None = None) -> list[Expr]:
    """Return everything ``outputs`` are made of, operands first; what ``instead`` maps away is not looked into."""
    order: list[Expr] = []
    seen: set[Expr] = set()
    stack = [(output, False) for output in reversed(list(outputs))]
    while stack:
        item, is_ready = stack.pop()
        if is_ready:
            order.append(item)
        elif item not in seen:
            seen.add(item)
            stack.append((item, True))
            other = instead(item) if instead is not None else None
            below = item.operands if other is None else () if other.is_constant else (other,)
            stack += [(operand, False) for operand in reversed(below)]
    return order


# --- rewrites: each gives the same value on every input, signs of zeros and NaN included ---------------------------
# Takes the operands, the type of the result and the builder; returns something simpler, or None.
Rule: TypeAlias = Callable[[tuple[Expr, ...], torch.dtype, Builder], Expr | None]


def _add(operands: tuple[Expr, ...], dtype: torch.dtype, builder: Builder) -> Expr | None:
    a, b = operands
    if _is_exact_zero(a, dtype):
        return b
    if _is_exact_zero(b, dtype):
        return a
    if b.op == "neg":
        return a - b.operands[0]
    if a.op == "neg":
        return b - a.operands[0]
    return None


def _sub(operands: tuple[Expr, ...], dtype: torch.dtype, builder: Builder) -> Expr | None:
    a, b = operands
    # x - 0 is x, and 0 - x is not -x where x is zero.
    if b.equals(0) and not dtype.is_complex:
        return a
    return a + b.operands[0] if b.op == "neg" else None


def _mul(operands: tuple[Expr, ...], dtype: torch.dtype, builder: Builder) -> Expr | None:
    a, b = operands
    if dtype.is_complex:
        return None
    for one, other in ((a, b), (b, a)):
        if one.equals(1):
            return other
        if one.equals(-1):
            return -other
        if one.op == "neg" and other.is_constant:
            return one.operands[0] * builder.emit("neg", other)
    if a.op == "neg" and b.op == "neg":
        return builder.emit("mul", a.operands[0], b.operands[0])
    if a.op == "neg":
        return -(a.operands[0] * b)
    return -(a * b.operands[0]) if b.op == "neg" else None


def _div(operands: tuple[Expr, ...], dtype: torch.dtype, builder: Builder) -> Expr | None:
    a, b = operands
    if dtype.is_complex:
        return None
    if b.equals(1):
        return a
    if b.equals(-1):
        return -a
    if a.op == "neg":
        return a.operands[0] / -b if b.is_constant else -(a.operands[0] / b)
    if b.op == "neg":
        return -a / b.operands[0] if a.is_constant else -(a / b.operands[0])
    return None


def _neg(operands: tuple[Expr, ...], dtype: torch.dtype, builder: Builder) -> Expr | None:
    (a,) = operands
    if a.op == "neg":
        inner: Expr = a.operands[0]
        return inner
    if a.op in {"mul", "div"} and not dtype.is_complex:
        # The sign goes to a constant factor.
        left, right = a.args
        if left.is_constant:
            return builder.emit(a.op, -left, right)
        if right.is_constant:
            return builder.emit(a.op, left, -right)
    return None


def _where(operands: tuple[Expr, ...], dtype: torch.dtype, builder: Builder) -> Expr | None:
    mask, a, b = operands
    if mask.is_constant:
        return a if mask.args[0] else b
    if a is b:
        return a
    if mask.op == "logical_not":
        return builder.emit("where", _truth(mask.operands[0]), b, a)
    if dtype is torch.bool:
        if a.is_constant:
            return mask.call("logical_or", b) if a.args[0] else mask.call("logical_not").call("logical_and", b)
        if b.is_constant:
            return mask.call("logical_not").call("logical_or", a) if b.args[0] else mask.call("logical_and", a)
    # -x and -y selected are -(the selected).
    if a.op == "neg" and b.op == "neg":
        return -builder.emit("where", mask, a.operands[0], b.operands[0])
    # The second of two selections with one condition sees one side of the first only.
    if a.op == "where" and a.operands[0] is mask:
        return builder.emit("where", mask, a.operands[1], b)
    if b.op == "where" and b.operands[0] is mask:
        return builder.emit("where", mask, a, b.operands[2])
    return None


def _logical_and(operands: tuple[Expr, ...], dtype: torch.dtype, builder: Builder) -> Expr | None:
    a, b = operands
    if a is b:
        return _truth(a)
    for one, other in ((a, b), (b, a)):
        if one.is_constant:
            return _truth(other) if one.args[0] else builder.constant(False, torch.bool)
        if one.op == "logical_not" and one.operands[0] is other:
            return builder.constant(False, torch.bool)
    return None


def _logical_or(operands: tuple[Expr, ...], dtype: torch.dtype, builder: Builder) -> Expr | None:
    a, b = operands
    if a is b:
        return _truth(a)
    for one, other in ((a, b), (b, a)):
        if one.is_constant:
            return builder.constant(True, torch.bool) if one.args[0] else _truth(other)
        if one.op == "logical_not" and one.operands[0] is other:
            return builder.constant(True, torch.bool)
    return None


def _logical_xor(operands: tuple[Expr, ...], dtype: torch.dtype, builder: Builder) -> Expr | None:
    for one, other in (operands, operands[::-1]):
        if one.is_constant:
            return other.call("logical_not") if one.args[0] else _truth(other)
    return None


def _bitwise(op: str) -> Rule:
    # On bools it is the logical operation.
    def apply(operands: tuple[Expr, ...], dtype: torch.dtype, builder: Builder) -> Expr | None:
        return builder.emit(f"logical_{op}", *operands) if dtype is torch.bool else None

    return apply


def _logical_not(operands: tuple[Expr, ...], dtype: torch.dtype, builder: Builder) -> Expr | None:
    (a,) = operands
    return _truth(a.operands[0]) if a.op == "logical_not" else None


def _eq(operands: tuple[Expr, ...], dtype: torch.dtype, builder: Builder) -> Expr | None:
    truth = _compared_truth(operands)
    return None if truth is None else truth.call("logical_not")


def _ne(operands: tuple[Expr, ...], dtype: torch.dtype, builder: Builder) -> Expr | None:
    return _compared_truth(operands)


def _compared_truth(operands: tuple[Expr, ...]) -> Expr | None:
    a, b = operands
    return _as_truth(a) if b.is_constant and b.args[0] == 0 else None


def _as_truth(value: Expr) -> Expr | None:
    # A bool, or 0 and 1 made from bools, as a bool: in C++ the result of & and | on them is an int.
    if value.dtype is torch.bool:
        return value
    if value.op == "convert" and value.operands[0].dtype is torch.bool:
        return value.operands[0]
    if value.op in {"bitwise_and", "bitwise_or"}:
        left, right = (_as_truth(operand) for operand in value.operands)
        if left is not None and right is not None:
            return value.builder.emit(value.op.replace("bitwise", "logical"), left, right)
    return None


def _convert(operands: tuple[Expr, ...], dtype: torch.dtype, builder: Builder) -> Expr | None:
    (a,) = operands
    if a.dtype is dtype:
        return a
    if dtype is torch.bool and not a.is_constant:
        return a.call("ne", 0)
    if a.op == "convert":
        inner: Expr = a.operands[0]
        if inner.dtype is torch.bool or (inner.dtype, a.dtype) in _WIDENINGS:
            return inner.to(dtype)
    return None


def _detach(operands: tuple[Expr, ...], dtype: torch.dtype, builder: Builder) -> Expr | None:
    return operands[0] if builder.drops_detach or operands[0].is_constant else None


def _involution(op: str) -> Rule:
    def apply(operands: tuple[Expr, ...], dtype: torch.dtype, builder: Builder) -> Expr | None:
        return operands[0].args[0] if operands[0].op == op else None

    return apply


def _part(slot: int) -> Rule:
    # A component of complex(a, b), of a real number made complex, of a conjugate.
    def apply(operands: tuple[Expr, ...], dtype: torch.dtype, builder: Builder) -> Expr | None:
        (z,) = operands
        if z.op == "complex":
            part: Expr = z.operands[slot]
            return part
        if z.op == "convert" and not z.operands[0].dtype.is_complex:
            return z.operands[0].to(dtype) if slot == 0 else builder.constant(0, dtype)
        if z.op == "conj_physical":
            part = z.operands[0].call("imag" if slot else "real")
            return -part if slot else part
        return None

    return apply


def _truth(value: Expr) -> Expr:
    return value if value.dtype is torch.bool else value.call("ne", 0)


def _is_exact_zero(value: Expr, dtype: torch.dtype) -> bool:
    # What can be added to anything: only the negative zero in floating point.
    return value.equals(-0.0 if dtype.is_floating_point else 0) and not dtype.is_complex


# Conversions that keep every value, so that a second one may start from the first one's operand.
_WIDENINGS = {
    (torch.float32, torch.float64),
    (torch.complex64, torch.complex128),
    (torch.float32, torch.complex64),
    (torch.float64, torch.complex128),
    (torch.float32, torch.complex128),
    (torch.int32, torch.int64),
    (torch.int32, torch.float64),
    (torch.int8, torch.int32),
    (torch.int16, torch.int32),
    (torch.uint8, torch.int32),
}
REWRITES: dict[str, Rule] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "neg": _neg,
    "where": _where,
    **{f"bitwise_{op}": _bitwise(op) for op in ("and", "or", "xor", "not")},
    "logical_and": _logical_and,
    "logical_or": _logical_or,
    "logical_xor": _logical_xor,
    "logical_not": _logical_not,
    "eq": _eq,
    "ne": _ne,
    "convert": _convert,
    "detach": _detach,
    "conj_physical": _involution("conj_physical"),
    "real": _part(0),
    "imag": _part(1),
}
