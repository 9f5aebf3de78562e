"""Formulas over values, written with Python's operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch

from fuser.eager.data import WHOLE_FUNCTIONS, Value, constant, emit, storage_dtype
from fuser.eager.promotion import common_type, convert
from fuser.eager.values import binary, both, either, negate, select, unary

__all__ = [
    "Formula",
    "Term",
    "anchored",
    "apply",
    "bits_of",
    "detach",
    "float_of_bits",
    "is_finite",
    "polynomial",
    "power_of_two",
    "product_error",
    "through_double",
    "two_sum",
    "where",
]

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """A value with operators: C++'s, but that a Python number is a constant of the other operand's type.

    On bools `&`, `|` and `~` are the logical operators.
    """

    value: Value

    @property
    def dtype(self) -> torch.dtype:
        """The C++ type."""
        return self.value.dtype

    def to(self, dtype: torch.dtype) -> Term:
        """Return static_cast<dtype>."""
        return Term(convert(self.value, dtype))

    def __add__(self, other: Operand) -> Term:
        return _operate("+", self, other)

    def __radd__(self, other: float) -> Term:
        return _operate("+", other, self)

    def __sub__(self, other: Operand) -> Term:
        return _operate("-", self, other)

    def __rsub__(self, other: float) -> Term:
        return _operate("-", other, self)

    def __mul__(self, other: Operand) -> Term:
        return _operate("*", self, other)

    def __rmul__(self, other: float) -> Term:
        return _operate("*", other, self)

    def __truediv__(self, other: Operand) -> Term:
        return _operate("/", self, other)

    def __rtruediv__(self, other: float) -> Term:
        return _operate("/", other, self)

    def __lshift__(self, other: Operand) -> Term:
        return _operate("<<", self, other)

    def __rlshift__(self, other: int) -> Term:
        return _operate("<<", other, self)

    def __rshift__(self, other: Operand) -> Term:
        return _operate(">>", self, other)

    def __and__(self, other: Operand) -> Term:
        if self.dtype is torch.bool:
            return Term(Value(torch.bool, both(self.value.data, _term(other, torch.bool).value.data)))
        return _operate("&", self, other)

    def __or__(self, other: Operand) -> Term:
        if self.dtype is torch.bool:
            return Term(Value(torch.bool, either(self.value.data, _term(other, torch.bool).value.data)))
        return _operate("|", self, other)

    def __xor__(self, other: Operand) -> Term:
        return _operate("^", self, other)

    def __invert__(self) -> Term:
        if self.dtype is torch.bool:
            return Term(Value(torch.bool, negate(self.value.data)))
        return Term(unary("~", self.value))

    def __neg__(self) -> Term:
        return Term(unary("-", self.value))

    def __abs__(self) -> Term:
        return apply(aten.abs.default, self)

    def __lt__(self, other: Operand) -> Term:
        return _operate("<", self, other)

    def __le__(self, other: Operand) -> Term:
        return _operate("<=", self, other)

    def __gt__(self, other: Operand) -> Term:
        return _operate(">", self, other)

    def __ge__(self, other: Operand) -> Term:
        return _operate(">=", self, other)

    def equals(self, other: Operand) -> Term:
        """Return `self == other` (Python's own == compares identities)."""
        return _operate("==", self, other)

    def differs(self, other: Operand) -> Term:
        """Return `self != other`."""
        return _operate("!=", self, other)


Operand: TypeAlias = Term | float
Formula: TypeAlias = Callable[..., Term]


def _term(operand: Operand, dtype: torch.dtype) -> Term:
    return operand if isinstance(operand, Term) else Term(constant(operand, dtype))


def _operate(op: str, a: Operand, b: Operand) -> Term:
    dtype = a.dtype if isinstance(a, Term) else b.dtype if isinstance(b, Term) else torch.float64
    return Term(binary(op, _term(a, dtype).value, _term(b, dtype).value))


def apply(op: Any, *operands: Operand, dtype: torch.dtype | None = None, **kwargs: Any) -> Term:
    """Call an ATen overload on operands of one type; `dtype` is the result's where it is another."""
    of = next(operand.dtype for operand in operands if isinstance(operand, Term))
    result = dtype or of
    args = (_term(operand, of).value.stored for operand in operands)
    return Term(Value(result, emit(op, *args, dtype=storage_dtype(result), **kwargs)))


def where(mask: Term, a: Operand, b: Operand) -> Term:
    """Return `mask ? a : b`; of a number and a term the term gives the type, of two terms both have it."""
    of = a.dtype if isinstance(a, Term) else b.dtype if isinstance(b, Term) else torch.float64
    x, y = _term(a, of), _term(b, of)
    if x.dtype is not y.dtype:
        common = common_type(x.dtype, y.dtype)
        x, y = x.to(common), y.to(common)
    return Term(select(mask.value.data, x.value, y.value))


def detach(x: Term) -> Term:
    """Return x as a constant of differentiation."""
    return x if x.value.is_constant else apply(aten.detach.default, x)


def anchored(base: Term, exact: Term) -> Term:
    """Return `exact`, with the derivatives of `base`.

    For a short formula that is differentiable but loses some digits, and a long one that is not meant to be
    differentiated. The two may differ by their rounding errors only; the sign of a zero, infinities and NaN are base's.
    """
    lost = detach(exact - base)
    # False also for NaN.
    return where(abs(lost) > 0.0, base + lost, base)


def is_finite(x: Term) -> Term:
    """Whether a real number is finite."""
    return abs(x) < float("inf")


def polynomial(x: Term, coefficients: tuple[float, ...]) -> Term:
    """Evaluate by Horner's rule; the coefficient of the highest power comes first."""
    result: Operand = coefficients[0]
    for coefficient in coefficients[1:]:
        result = result * x + coefficient
    assert isinstance(result, Term)
    return result


def two_sum(a: Term, b: Term) -> tuple[Term, Term]:
    """Return the rounded sum and its error, exact (D. E. Knuth)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def product_error(x: Term, y: Term, product: Term) -> Term:
    """Return x y - product, exact, for the rounded product.

    NaN where a factor of 2^996 or more cannot be split; not exact where the error is a denormal (T. J. Dekker, "A
    floating-point technique for extending the available precision", 1971).
    """
    (xh, xl), (yh, yl) = _split(x), _split(y)
    return ((xh * yh - product) + xh * yl + xl * yh) + xl * yl


def _split(x: Term) -> tuple[Term, Term]:
    large = x * 134217729.0
    high = large - (large - x)
    return high, x - high


def bits_of(x: Term) -> Term:
    """Return the bits of a float as the signed integer of its size, as a constant of differentiation."""
    return apply(aten.view.dtype, detach(x), dtype=_INTEGER[x.dtype])


def float_of_bits(bits: Term) -> Term:
    """Return the double of the bits of an int64."""
    return apply(aten.view.dtype, bits, dtype=torch.float64)


_INTEGER = {torch.float32: torch.int32, torch.float64: torch.int64}


def power_of_two(exponent: Term) -> Term:
    """Return the double 2^exponent, exact, for an int64 from -1022 to 1023."""
    if exponent.value.is_constant:
        return Term(constant(2.0**exponent.value.data, torch.float64))
    return float_of_bits((exponent + 1023) << 52)


def through_double(formula: Formula) -> Formula:
    """Compute float32 results in float64, where the formula is written for the one precision or would lose digits.

    An operation of ATen stays as it is in a graph that is to be differentiated.
    """
    is_operation = isinstance(formula, partial) and formula.func is apply

    def computed(*terms: Term) -> Term:
        is_wide = all(term.dtype is not torch.float32 for term in terms)
        if is_wide or (is_operation and WHOLE_FUNCTIONS.get()):
            return formula(*terms)
        wide = (term.to(torch.float64) if term.dtype is torch.float32 else term for term in terms)
        return formula(*wide).to(torch.float32)

    return computed
