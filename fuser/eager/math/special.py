"""The gamma function, the error functions with their inverses, and modified Bessel functions.

Where ATen's own function loses digits it still gives the derivative, and a correction the digits (`anchored`).
"""

from __future__ import annotations

import math
from functools import partial

import torch

from fuser.eager.math.real import constant_of, copysign, sinpi
from fuser.eager.math.terms import (
    Formula,
    Term,
    anchored,
    apply,
    detach,
    polynomial,
    product_error,
    through_double,
    where,
)

__all__ = ["SPECIAL"]

aten = torch.ops.aten
_INF = float("inf")
_exp = partial(apply, aten.exp.default)
_log = partial(apply, aten.log.default)
_erfc = partial(apply, aten.erfc.default)

# B(2k) / (2k (2k - 1)) for k = 10 to 1: Stirling's series (Abramowitz and Stegun 6.1.41).
_STIRLING = (
    -174611 / 125400, 43867 / 244188, -3617 / 122400, 1 / 156, -691 / 360360, 1 / 1188, -1 / 1680, 1 / 1260, -1 / 360,
    1 / 12,
)  # fmt: skip


# ---- gamma ----


@through_double
def tgamma(x: Term) -> Term:
    """Return the gamma function."""
    a = abs(x)
    sine = sinpi(a)
    negative = x < 0.0
    # The sign between two poles; at the poles there is none.
    sign = where(
        negative, where(sine > 0.0, constant_of(-1.0, x), where(sine < 0.0, 1.0, constant_of(math.nan, x))), 1.0
    )
    base = sign * _exp(apply(aten.lgamma.default, x))
    first, second = _gamma_factors(a)
    # Reflection as gamma(-a) = -pi / (a sin(pi a) gamma(a)): no argument is rounded.
    exact = where(negative, math.pi / sine / first / second / -a, first * second)
    return where(x.equals(0.0), apply(aten.reciprocal.default, x), anchored(base, exact))


def _gamma_factors(a: Term) -> tuple[Term, Term]:
    # gamma(a) for a > 0, in two factors, neither of which overflows before 1 / gamma(a) vanishes.
    # Small arguments are moved to where lgamma is less than 4, by exact factors.
    is_tiny, is_middle = a < 0.5, a >= 4.0
    moved = where(is_tiny, a + 1.0, where(is_middle, a - 3.0, a))
    product = where(is_middle, (a - 1.0) * (a - 2.0) * (a - 3.0), constant_of(1.0, a))
    small = _exp(apply(aten.lgamma.default, moved)) * product
    small = where(is_tiny, small / a, small)
    # Large ones by Stirling's formula: exponent and argument of both functions are exact.
    r = 1.0 / a
    series = polynomial(r * r, _STIRLING) * r
    half = apply(aten.pow.Tensor_Tensor, a, 0.5 * a - 0.25)
    rest = half * _exp(-a) * (math.sqrt(2 * math.pi) * _exp(series))
    large = a >= 8.0
    return where(large, half, small), where(large, rest, 1.0)


# ---- error functions ----


@through_double
def erfcx(x: Term) -> Term:
    """Return exp(x^2) erfc(x)."""
    base = apply(aten.special_erfcx.default, x)
    # On the left it is 2 exp(x^2), and the rounding of x^2 counts.
    lost = base * product_error(x, x, x * x)
    return where((x < 0.0) & (base < _INF), base + detach(lost), base)


@through_double
def normcdf(x: Term) -> Term:
    """Return the normal distribution's cumulative function."""
    root, rest = -0.70710678118654752440, 4.833646656726456726e-17
    z = x * root
    # Far out, erfc magnifies the rounding of its argument by the argument: it is taken back to first order.
    lost = product_error(x, constant_of(root, x), z) + x * rest
    correction = detach(0.56418958354775628695 * _exp(-z * z) * lost)
    plain = 0.5 * _erfc(z)
    return where((z > -6.0) & (z < 28.0), plain - correction, plain)


@through_double
def erfcinv(y: Term) -> Term:
    """Return the inverse of erfc."""
    # 1 - y is exact in the second half. erfinv sees no argument of the first, where its derivative can be infinite.
    near_zero = y < 0.5
    tail = apply(aten.special_ndtri.default, 0.5 * y) * -math.sqrt(0.5)
    return where(near_zero, tail, apply(aten.erfinv.default, where(near_zero, constant_of(0.0, y), 1.0 - y)))


# ---- modified Bessel functions ----


@through_double
def bessel_i0(x: Term) -> Term:
    """Return the modified Bessel function of order 0."""
    a = abs(x)
    inside = where(a > 700.0, constant_of(0.0, x), x)
    return where(a > 700.0, _bessel_i_far(a, 0), apply(aten.special_i0.default, inside))


@through_double
def bessel_i1(x: Term) -> Term:
    """Return the modified Bessel function of order 1."""
    a = abs(x)
    inside = where(a > 700.0, constant_of(0.0, x), x)
    near = where(x.equals(0.0), 0.5 * x, apply(aten.special_i1.default, inside))
    return where(a > 700.0, copysign(_bessel_i_far(a, 1), x), near)


def _bessel_i_far(a: Term, order: int) -> Term:
    # Abramowitz and Stegun 9.7.1. ATen's functions overflow with exp(x), some way before the result.
    x = where(a > 700.0, where(a > 1e4, constant_of(1e4, a), a), 700.0)
    coefficients = [1.0]
    for k in range(1, 6):
        coefficients.insert(0, coefficients[0] * ((2 * k - 1) ** 2 - 4 * order**2) / (8 * k))
    series, square = polynomial(1.0 / x, tuple(coefficients)), 2 * math.pi * x
    # exp(x) overflows before the result, and so would derivatives of the product.
    base = _exp(x + _log(series) - 0.5 * _log(square))
    return anchored(base, _exp(x - 10.0) * (series * apply(aten.rsqrt.default, square) * math.exp(10)))


SPECIAL: dict[str, Formula] = {
    "cyl_bessel_i0": bessel_i0,
    "cyl_bessel_i1": bessel_i1,
    "erfcinv": erfcinv,
    "erfcx": erfcx,
    "erfinv": through_double(partial(apply, aten.erfinv.default)),
    "lgamma": through_double(partial(apply, aten.lgamma.default)),
    "normcdf": normcdf,
    "normcdfinv": through_double(partial(apply, aten.special_ndtri.default)),
    "tgamma": tgamma,
}
