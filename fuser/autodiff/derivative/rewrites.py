"""Local simplifications: each gives the same value on every input, signs of zeros and NaN included."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from fuser.autodiff.derivative.expression import Builder, Expr

__all__ = ["rewrite"]


def rewrite(op: str, operands: tuple[Expr, ...], dtype: torch.dtype, builder: Builder) -> Expr | None:
    """Return something simpler than ``op(*operands)``, or None."""
    rule = _REWRITES.get(op)
    return rule(operands, dtype, builder) if rule is not None else None


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
        return builder.emit("where", mask.args[0], b, a)
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
        return a
    for one, other in ((a, b), (b, a)):
        if one.is_constant:
            return _truth(other) if one.args[0] else builder.constant(False, torch.bool)
        if one.op == "logical_not" and one.operands[0] is other:
            return builder.constant(False, torch.bool)
    return None


def _logical_or(operands: tuple[Expr, ...], dtype: torch.dtype, builder: Builder) -> Expr | None:
    a, b = operands
    if a is b:
        return a
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


def _bitwise(op: str) -> Callable[[tuple[Expr, ...], torch.dtype, Builder], Expr | None]:
    # On bools it is the logical operation.
    def apply(operands: tuple[Expr, ...], dtype: torch.dtype, builder: Builder) -> Expr | None:
        return builder.emit(f"logical_{op}", *operands) if dtype is torch.bool else None

    return apply


def _logical_not(operands: tuple[Expr, ...], dtype: torch.dtype, builder: Builder) -> Expr | None:
    (a,) = operands
    return a.operands[0] if a.op == "logical_not" else None


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


def _involution(op: str) -> Callable[[tuple[Expr, ...], torch.dtype, Builder], Expr | None]:
    def apply(operands: tuple[Expr, ...], dtype: torch.dtype, builder: Builder) -> Expr | None:
        return operands[0].args[0] if operands[0].op == op else None

    return apply


def _part(place: int) -> Callable[[tuple[Expr, ...], torch.dtype, Builder], Expr | None]:
    # A component of complex(a, b), of a real number made complex, of a conjugate.
    def apply(operands: tuple[Expr, ...], dtype: torch.dtype, builder: Builder) -> Expr | None:
        (z,) = operands
        if z.op == "complex":
            part: Expr = z.operands[place]
            return part
        if z.op == "convert" and not z.operands[0].dtype.is_complex:
            return z.operands[0].to(dtype) if place == 0 else builder.constant(0, dtype)
        if z.op == "conj_physical":
            part = z.operands[0].call("imag" if place else "real")
            return -part if place else part
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
_REWRITES: dict[str, Callable[[tuple[Expr, ...], torch.dtype, Builder], Expr | None]] = {
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
