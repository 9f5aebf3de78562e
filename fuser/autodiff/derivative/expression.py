"""Typed expressions: what derivatives are computed on, between a translated functor and the text of its derivative.

An expression is one operation of the vocabulary of typed graphs on other expressions; equal ones are one object, so
that a computation is a DAG without duplicates. A ``Builder`` makes them, and simplifies each as it is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from fuser.autodiff.derivative.rewrites import rewrite
from fuser.eager.math.functions import NamedFunction

__all__ = [
    "BOOLEAN",
    "Builder",
    "Expr",
    "Number",
    "Operand",
    "count_static",
    "evaluate",
    "is_continuous",
    "topological",
]

Number = bool | int | float | complex
Place = tuple[int, int] | None

COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})
# Operations whose result is bool.
BOOLEAN = COMPARISONS | {"logical_and", "logical_or", "logical_xor", "logical_not", "signbit", "isnan", "isinf"}
# Operations that make a real number of a complex one, and the other way round.
_TO_REAL = frozenset({"abs", "real", "imag", "angle"})
_TO_COMPLEX = frozenset({"complex", "polar"})
# Leading arguments that are plain integers.
_STATIC = {"polygamma": 1}
# ATen overloads that are not called "default".
_OVERLOADS = {
    **{name: f"{name}.Tensor" for name in (
        "add", "sub", "mul", "div", "fmod", "remainder", "bitwise_and", "bitwise_or", "bitwise_xor", "copysign",
        "bitwise_left_shift", "bitwise_right_shift", "ldexp", *COMPARISONS,
    )},
    "pow": "pow.Tensor_Tensor",
    "where": "where.self",
}  # fmt: skip


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
        made = dtype or _result_dtype(op, operands)
        simpler = rewrite(op, operands, made, self)
        if simpler is not None:
            return simpler
        if all(item.is_constant for item in operands):
            value = _fold(op, args[:static], operands, made)
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


def is_continuous(dtype: torch.dtype) -> bool:
    """Whether values of a type have derivatives: it is a floating point or complex one."""
    return dtype.is_floating_point or dtype.is_complex


def count_static(op: str) -> int:
    """Return how many leading arguments of ``op`` are plain integers."""
    return _STATIC.get(op, 0)


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


def evaluate(outputs: Sequence[Expr], inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Run expressions in eager torch."""
    values: dict[Expr, torch.Tensor] = {}
    for item in topological(outputs):
        if item.op == "input":
            values[item] = inputs[item.args[0]]
        elif item.op == "constant":
            values[item] = torch.scalar_tensor(item.args[0], dtype=item.dtype)
        else:
            static = item.args[: count_static(item.op)]
            values[item] = _apply(item.op, static, [values[operand] for operand in item.operands], item.dtype)
    return [values[output] for output in outputs]


def typed_number(value: Number, dtype: torch.dtype) -> Number:
    """Return ``value`` as the Python number that stands for it in ``dtype``."""
    if dtype.is_complex:
        return complex(value)
    if isinstance(value, complex):
        value = value.real
    if dtype.is_floating_point:
        value = float(value)
        return _round_float(value) if dtype is torch.float32 else value
    return bool(value) if dtype is torch.bool else int(value)


def _round_float(value: float) -> float:
    return float(torch.scalar_tensor(value, dtype=torch.float32).item())


def _result_dtype(op: str, operands: tuple[Expr, ...]) -> torch.dtype:
    dtype = operands[1 if op == "where" else 0].dtype
    if op in BOOLEAN:
        return torch.bool
    if op == "frexp_exponent":
        return torch.int32
    if op in _TO_REAL and dtype.is_complex:
        return dtype.to_real()
    return dtype.to_complex() if op in _TO_COMPLEX else dtype


@cache
def _overload(op: str) -> Callable[..., Any]:
    packet, _, overload = _OVERLOADS.get(op, op).partition(".")
    found: Callable[..., Any] = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return found


def _apply(op: str, static: tuple[Any, ...], tensors: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    if op == "convert":
        (tensor,) = tensors
        return (tensor.real if tensor.is_complex() and not dtype.is_complex else tensor).to(dtype)
    if op == "bit_cast":
        return tensors[0].view(dtype)
    if op in {"frexp_mantissa", "frexp_exponent"}:
        return torch.frexp(tensors[0])[op == "frexp_exponent"]
    if op.startswith("cpp."):
        function = NamedFunction(op.removeprefix("cpp."), tuple(tensor.dtype for tensor in tensors))
        return function(*tensors)  # type: ignore[no-any-return]
    if op == "div_trunc":
        return torch.div(*tensors, rounding_mode="trunc")
    result: torch.Tensor = _overload(op)(*static, *tensors)
    return result


def _fold(op: str, static: tuple[Any, ...], operands: tuple[Expr, ...], dtype: torch.dtype) -> Number | None:
    values = [operand.args[0] for operand in operands]
    if op == "convert" and not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool):
        # Out of range is left to the compiled text.
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        if isinstance(values[0], complex) or not math.isfinite(values[0]) or not low <= int(values[0]) <= high:
            return None
    if op in {"div_trunc", "fmod", "remainder"} and not dtype.is_floating_point and values[1] == 0:
        return None
    tensors = [torch.scalar_tensor(item.args[0], dtype=item.dtype) for item in operands]
    with torch.no_grad():
        value: Number = _apply(op, static, tensors, dtype).item()
    return value
