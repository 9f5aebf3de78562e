"""Functions of real numbers: ATen's own, and what can be said in a few of its operations.

Each formula takes terms of one floating type and returns what the prelude's function of that name returns for it. A
formula that moves bits keeps its derivative: bits are taken of detached values only, where the derivative is zero.
"""

from __future__ import annotations

import math
from functools import partial

import torch

from fuser.eager.data import WHOLE_FUNCTIONS, constant
from fuser.eager.math.terms import (
    Formula,
    Term,
    anchored,
    apply,
    bits_of,
    detach,
    float_of_bits,
    is_finite,
    power_of_two,
    product_error,
    through_double,
    two_sum,
    where,
)

__all__ = [
    "BINARY",
    "CLASSIFY",
    "UNARY",
    "constant_of",
    "copysign",
    "fma",
    "frexp",
    "ilogb",
    "modf",
    "norm",
    "remquo",
    "round_away",
    "scale",
    "sincos",
    "sincospi",
]

aten = torch.ops.aten
_INF = float("inf")


# ---- rounding ----


def round_away(x: Term) -> Term:
    """Round to the nearest integer, halves away from zero."""
    whole = apply(aten.trunc.default, x)
    step = where(abs(x - whole) >= 0.5, constant_of(1.0, x), constant_of(0.0, x))
    return whole + copysign(step, x)


def constant_of(number: float, like: Term) -> Term:
    """Return a constant of another term's type."""
    return Term(constant(number, like.dtype))


def modf(x: Term) -> tuple[Term, Term]:
    """Return the fraction, with x's sign also when it is zero, and the whole part."""
    whole = apply(aten.trunc.default, x)
    return where(x.equals(whole), copysign(constant_of(0.0, x), x), x - whole), whole


# ---- exponents ----


def _exponent(x: Term) -> tuple[Term, Term, Term]:
    # x = scaled * 2^shift, and the exponent of `scaled`, which is normal: for finite x other than 0 in float64.
    small = abs(x) < 1.0
    scaled = where(small, x * 2.0**54, x)
    exponent = ((bits_of(scaled) >> 52) & 0x7FF) - 1023
    return scaled, where(small, Term(constant(-54, torch.int64)), 0), exponent


def _is_ordinary(x: Term) -> Term:
    return (abs(x) > 0.0) & is_finite(x)


def frexp(x: Term) -> tuple[Term, Term]:
    """Return m and the int e for x = m * 2^e with 1/2 <= |m| < 1; x and 0 for zero, infinities and NaN."""
    scaled, shift, exponent = _exponent(x.to(torch.float64))
    # The power in two parts: 2^-1024 is no normal number.
    mantissa = (scaled * 0.25) * power_of_two(1 - exponent)
    ordinary = _is_ordinary(x)
    return where(ordinary, mantissa.to(x.dtype), x), where(ordinary, exponent + shift + 1, 0).to(torch.int32)


def ilogb(x: Term) -> Term:
    """Return the exponent as int; INT_MIN for zero and NaN, INT_MAX for infinities."""
    x = x.to(torch.float64)
    _, shift, exponent = _exponent(x)
    special = where(abs(x).equals(_INF), Term(constant(2**31 - 1, torch.int64)), -(2**31))
    return where(_is_ordinary(x), exponent + shift, special).to(torch.int32)


@through_double
def logb(x: Term) -> Term:
    """Return the exponent as a float; -inf for zero."""
    _, shift, exponent = _exponent(x)
    a = abs(x)
    special = where(a.equals(0.0), constant_of(-_INF, x), apply(aten.floor.default, a))
    return where(_is_ordinary(x), (exponent + shift).to(torch.float64), special)


def scale(x: Term, exponent: Term) -> Term:
    """Return x * 2^exponent, rounded once."""
    n = exponent.to(torch.int64)
    if x.dtype is torch.float32:
        return (x.to(torch.float64) * power_of_two(_clamp(n, -300, 300))).to(torch.float32)
    # In steps that leave normal numbers normal as long as more is to come (as in musl's scalbn).
    for _ in range(2):
        step = where(n > 1023, constant_of(1023, n), where(n < -1022, constant_of(-969, n), 0))
        x = _times(x, step)
        n = n - step
    return _times(x, _clamp(n, -1022, 1023))


def _times(x: Term, exponent: Term) -> Term:
    if exponent.value.is_constant and exponent.value.data == 0:
        return x
    return x * power_of_two(exponent)


def _clamp(n: Term, low: int, high: int) -> Term:
    return where(n < low, constant_of(low, n), where(n > high, constant_of(high, n), n))


# ---- remainders ----


@through_double
def fmod(x: Term, y: Term) -> Term:
    """Return x - n y for n = trunc(x / y), exact."""
    if not (y.value.is_constant and abs(y.value.data) >= 1.0) and not WHOLE_FUNCTIONS.get():
        # ATen's is NaN where x / y overflows: first by a multiple of y. (Twice is not enough where |x / y| > 2^2023.)
        x = where(abs(y) < 1.0, apply(aten.fmod.Tensor, x, y * 2.0**1000), x)
    return apply(aten.fmod.Tensor, x, y)


def remainder(x: Term, y: Term) -> Term:
    """Return x - n y for the integer n nearest to x / y (even in a tie), exact (IEEE 754)."""
    negative, a = _sign_and_size(x)
    p = abs(y)
    # fmod leaves less than 2p; where that overflows, finite x is less than it already. Of the two comparisons with
    # half of p, the one by doubling is exact for tiny p, the one by halving for large p.
    twice, half, tiny = p + p, 0.5 * p, p < 4 * torch.finfo(x.dtype).tiny
    a = where(twice.equals(_INF), a, fmod(a, twice))
    once = where(tiny, a + a > p, a > half)
    a = where(once, a - p, a)
    again = once & where(tiny, a + a >= p, a >= half)
    a = where(again, a - p, a)
    return where(is_finite(x), where(negative, -a, a), constant_of(math.nan, x))


def remquo(x: Term, y: Term) -> tuple[Term, Term]:
    """Return the remainder and, as int, a number from 0 to 8 with the quotient's last three bits, and its sign."""
    rest = remainder(x, y)
    negative, a = _sign_and_size(detach(x))
    p = abs(detach(y))
    eight = 8.0 * p
    a = where(eight.equals(_INF), a, fmod(a, eight))
    quotient = apply(aten.round.default, (a - where(negative, -detach(rest), detach(rest))) / p)
    last = where(is_finite(quotient), quotient, 0.0).to(torch.int32)
    minus = negative.differs(_is_negative(y))
    return rest, where(minus, -last, last)


def _is_negative(x: Term) -> Term:
    return apply(aten.signbit.default, x, dtype=torch.bool)


def _sign_and_size(x: Term) -> tuple[Term, Term]:
    # The absolute value with a derivative at zero, too.
    negative = _is_negative(x)
    return negative, where(negative, -x, x)


# ---- powers ----


def power(x: Term, y: Term) -> Term:
    """Return x^y. The exponents that the compiler knows how to replace are replaced, as the prelude does."""
    if y.value.is_constant:
        if y.value.data == 2.0:
            return x * x
        if y.value.data == -1.0:
            return apply(aten.reciprocal.default, x)
        if y.value.data == 0.5:
            return apply(aten.sqrt.default, x)
    return apply(aten.pow.Tensor_Tensor, x, y)


def exp10(x: Term) -> Term:
    """Return 10^x."""
    return apply(aten.pow.Tensor_Tensor, 10.0, x)


@through_double
def cbrt(x: Term) -> Term:
    """Return the cube root."""
    root = copysign(apply(aten.pow.Tensor_Tensor, abs(x), 1.0 / 3.0), x)
    # 1/3 is no double: one step of Newton's method. Nothing is lost for zero and infinity, where the step is NaN.
    step = detach((x / (root * root) - root) / 3.0)
    return where(abs(step) > 0.0, root + step, root)


def rcbrt(x: Term) -> Term:
    """Return 1 / cbrt(x)."""
    return apply(aten.reciprocal.default, cbrt(x))


def norm(*parts: Term) -> Term:
    """Return the square root of the sum of two to four squares."""
    pairs = [_hypot(*parts[at : at + 2]) for at in range(0, len(parts), 2)]
    return _hypot(*pairs)


def _hypot(x: Term, y: Term | None = None) -> Term:
    return x if y is None else apply(aten.hypot.default, x, y)


def fma(x: Term, y: Term, z: Term) -> Term:
    """Return x y + z, rounded once."""
    x, y, z = _together(x, y, z)
    product = x * y
    base = product + z
    exact = _fma_float(x, y, z) if x.dtype is torch.float32 else _fma_double(x, y, z, product, base)
    return where(is_finite(base), anchored(base, exact), detach(exact))


def _fma_float(x: Term, y: Term, z: Term) -> Term:
    # In double the product is exact, and a sum that is rounded to odd can be rounded again.
    wide = [term.to(torch.float64) for term in (x, y, z)]
    return _to_odd(*two_sum(wide[0] * wide[1], wide[2])).to(torch.float32)


def _fma_double(x: Term, y: Term, z: Term, product: Term, base: Term) -> Term:
    # S. Boldo, G. Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd",
    # IEEE Transactions on Computers 57 (2008). The product's error is lost where it is a denormal, and not found where
    # it cannot be split (beyond 2^996).
    low = product_error(x, y, product)
    upper, lower = two_sum(z, low)
    total, error = two_sum(product, upper)
    rest = _to_odd(*two_sum(error, lower))
    return where((abs(low) > 0.0) & is_finite(rest), total + rest, base)


def _to_odd(total: Term, error: Term) -> Term:
    # Of the two doubles around a sum that is not exact, the one that is odd.
    bits = bits_of(total)
    away = where(error > 0.0, constant_of(1, bits), -1) * where(total < 0.0, constant_of(-1, bits), 1)
    odd = where((abs(error) > 0.0) & (bits & 1).equals(0), bits + away, bits)
    return float_of_bits(odd)


# ---- trigonometry ----


def sincos(x: Term) -> tuple[Term, Term]:
    """Return sine and cosine."""
    return apply(aten.sin.default, x), apply(aten.cos.default, x)


def sinpi(x: Term) -> Term:
    """Return sin(pi x)."""
    negative, a = _sign_and_size(x)
    rest, sign = _half_turns(a)
    # Adding zero makes the zeros of a positive argument positive.
    value = sign * apply(aten.sin.default, rest * math.pi) + 0.0
    return where(negative, -value, value)


def cospi(x: Term) -> Term:
    """Return cos(pi x)."""
    rest, sign = _half_turns(x)
    a = abs(rest)
    near = apply(aten.cos.default, rest * math.pi)
    far = apply(aten.sin.default, (0.5 - a) * math.pi)
    return sign * where(a <= 0.25, near, far) + 0.0


def _half_turns(x: Term) -> tuple[Term, Term]:
    # What is left of x less the nearest integer n, exact, and (-1)^n.
    whole = apply(aten.round.default, x)
    return x - whole, 1.0 - 2.0 * abs(apply(aten.fmod.Tensor, whole, 2.0))


def sincospi(x: Term) -> tuple[Term, Term]:
    """Return sin(pi x) and cos(pi x)."""
    return sinpi(x), cospi(x)


# ---- hyperbolic functions ----


def cosh(x: Term) -> Term:
    """Return the hyperbolic cosine."""
    return _near_overflow(aten.cosh.default, x)


def sinh(x: Term) -> Term:
    """Return the hyperbolic sine."""
    return _near_overflow(aten.sinh.default, x)


def _near_overflow(op: torch._ops.OpOverload, x: Term) -> Term:
    # ATen's overflow with exp(x), which is twice as large. Neither formula sees an argument of the other.
    if WHOLE_FUNCTIONS.get():
        return apply(op, x)
    limit = 88.0 if x.dtype is torch.float32 else 709.0
    large = abs(x) > limit
    # The difference is exact.
    far = apply(aten.exp.default, where(large, abs(x), limit) - 10.0) * (0.5 * math.exp(10))
    return where(
        large,
        far if op is aten.cosh.default else copysign(far, x),
        apply(op, where(large, constant_of(0.0, x), x)),
    )


# ---- choices ----


def copysign(x: Term, y: Term) -> Term:
    """Return x with the sign of y."""
    if WHOLE_FUNCTIONS.get():
        return apply(aten.copysign.Tensor, x, y)
    # ATen's does not take a number of another device, beside meta tensors.
    size = abs(x)
    return where(_is_negative(y), -size, size)


def fdim(x: Term, y: Term) -> Term:
    """Return x - y where that is positive, else 0."""
    return where(x <= y, 0.0, x - y)


def _classify(op: torch._ops.OpOverload) -> Formula:
    return partial(apply, op, dtype=torch.bool)


CLASSIFY: dict[str, Formula] = {
    "isfinite": is_finite,
    "isinf": _classify(aten.isinf.default),
    "isnan": _classify(aten.isnan.default),
    "signbit": _classify(aten.signbit.default),
}

# Names of the prelude that are ATen's own, and where ATen has another name for the same.
_SAME = (
    "acos acosh asin asinh atan atanh ceil cos erf erfc exp exp2 expm1 floor log log10 log1p log2 rsqrt sin sqrt tan "
    "tanh trunc"
)
_RENAMED = {"fabs": "abs", "rint": "round", "nearbyint": "round"}

UNARY: dict[str, Formula] = {
    **{name: partial(apply, getattr(aten, name).default) for name in _SAME.split()},
    **{name: partial(apply, getattr(aten, other).default) for name, other in _RENAMED.items()},
    "cbrt": cbrt,
    "cosh": cosh,
    "cospi": cospi,
    "exp10": exp10,
    "logb": logb,
    "rcbrt": rcbrt,
    "round": round_away,
    "sinh": sinh,
    "sinpi": sinpi,
}


def _nextafter(x: Term, y: Term) -> Term:
    return apply(aten.nextafter.default, *_together(x, y))


def _together(*terms: Term) -> list[Term]:
    # The same numbers on one device: not all of ATen takes a number of the CPU beside a tensor of another device.
    one = None
    for term in terms[1:]:
        zero = apply(aten.eq.Tensor, terms[0], term, dtype=torch.bool).to(term.dtype) * 0.0
        one = zero + 1.0 if one is None else zero + one
    assert one is not None, "there are two"
    return [term * one for term in terms]


BINARY: dict[str, Formula] = {
    "atan2": partial(apply, aten.atan2.default),
    "copysign": copysign,
    "fdim": fdim,
    "fmax": partial(apply, aten.fmax.default),
    "fmin": partial(apply, aten.fmin.default),
    "fmod": fmod,
    "hypot": _hypot,
    "nextafter": _nextafter,
    "pow": power,
    "remainder": remainder,
}
