"""The derivative of every function: what it makes of a gradient, as formulas.

They are those of torch's autograd (``tools/autograd/derivatives.yaml``), kinks included, unless a comment says
otherwise; torch has none for Bessel functions, whose are in Abramowitz and Stegun, 9.1.27, 9.1.28 and 9.6.27. ``cpp.f``
is the C++ function ``f`` where ATen has none, or another one, of that name.

In reverse mode complex operands and results come conjugated: every formula f has f(conj z) = conj f(z).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from operator import mul

from fuser.autodiff.derivative.expression import Expr
from fuser.autodiff.derivative.operations import BOOLEAN

__all__ = ["CONSTANT", "PARTIALS", "UNARY"]

_TWO_OVER_ROOT_PI = 2 / math.sqrt(math.pi)
_ROOT_TWO_PI = math.sqrt(2 * math.pi)

# No gradient for any operand.
CONSTANT = BOOLEAN | {
    "detach", "floor", "ceil", "trunc", "round", "div_trunc", "div_floor", "frexp_exponent", "bitwise_and",
    "bitwise_or", "bitwise_xor", "bitwise_not", "bitwise_left_shift", "bitwise_right_shift", "cpp.round", "cpp.logb",
    "cpp.ilogb",
}  # fmt: skip

# (gradient, operand, result) -> contribution.
UNARY: dict[str, Callable[[Expr, Expr, Expr], Expr]] = {
    "neg": lambda g, x, y: -g,
    "reciprocal": lambda g, x, y: -(g * (y * y)),
    "exp": lambda g, x, y: g * y,
    "exp2": lambda g, x, y: g * (y * math.log(2)),
    "cpp.exp10": lambda g, x, y: g * (y * math.log(10)),
    "expm1": lambda g, x, y: g * (y + 1),
    "log": lambda g, x, y: g / x,
    "log2": lambda g, x, y: g / (x * math.log(2)),
    "log10": lambda g, x, y: g / (x * math.log(10)),
    "log1p": lambda g, x, y: g / (x + 1),
    # Cheaper on a GPU than root and division.
    "sqrt": lambda g, x, y: g / (2 * y) if x.dtype.is_complex else g * (0.5 * x.call("rsqrt")),
    "rsqrt": lambda g, x, y: -0.5 * g * (y * y * y),
    "cpp.cbrt": lambda g, x, y: g / (3 * (y * y)),
    "cpp.rcbrt": lambda g, x, y: -(g * (y * y * (y * y))) / 3,
    "sin": lambda g, x, y: g * x.call("cos"),
    "cos": lambda g, x, y: -(g * x.call("sin")),
    "tan": lambda g, x, y: g * (1 + y * y),
    "cpp.sinpi": lambda g, x, y: g * (x.call("cpp.cospi") * math.pi),
    "cpp.cospi": lambda g, x, y: -(g * (x.call("cpp.sinpi") * math.pi)),
    "asin": lambda g, x, y: g * (1 - x * x).call("rsqrt"),
    "acos": lambda g, x, y: -(g * (1 - x * x).call("rsqrt")),
    "atan": lambda g, x, y: g / (x * x + 1),
    "sinh": lambda g, x, y: g * x.call("cosh"),
    "cosh": lambda g, x, y: g * x.call("sinh"),
    "tanh": lambda g, x, y: g * (1 - y * y),
    "asinh": lambda g, x, y: g * (x * x + 1).call("rsqrt"),
    # Two roots, where torch takes that of x^2 - 1: near 1 no digits cancel.
    "acosh": lambda g, x, y: g * ((x - 1).call("rsqrt") * (x + 1).call("rsqrt")),
    "atanh": lambda g, x, y: g / (1 - x * x),
    "erf": lambda g, x, y: g * ((-(x * x)).call("exp") * _TWO_OVER_ROOT_PI),
    "erfc": lambda g, x, y: -(g * ((-(x * x)).call("exp") * _TWO_OVER_ROOT_PI)),
    "erfinv": lambda g, x, y: g * ((y * y).call("exp") / _TWO_OVER_ROOT_PI),
    "cpp.erfcinv": lambda g, x, y: -(g * ((y * y).call("exp") / _TWO_OVER_ROOT_PI)),
    "special_erfcx": lambda g, x, y: g * (2 * x * y - _TWO_OVER_ROOT_PI),
    "special_ndtr": lambda g, x, y: g * ((-0.5 * x * x).call("exp") / _ROOT_TWO_PI),
    "special_ndtri": lambda g, x, y: g * ((0.5 * y * y).call("exp") * _ROOT_TWO_PI),
    "lgamma": lambda g, x, y: g * x.call("digamma"),
    "cpp.tgamma": lambda g, x, y: g * (y * x.call("digamma")),
    "digamma": lambda g, x, y: g * x.builder.emit("polygamma", 1, x),
    "sinc": lambda g, x, y: g * (((x * math.pi).call("cos") - y) / x).where(x.call("ne", 0), 0),
    "special_i0": lambda g, x, y: g * x.call("special_i1"),
    "special_i1": lambda g, x, y: g * (x.call("special_i0") - y / x).where(x.call("ne", 0), 0.5),
    "special_i0e": lambda g, x, y: g * (x.call("special_i1e") - x.call("sgn") * y),
    "special_i1e": lambda g, x, y: (
        g * (x.call("special_i0e") - y * (x.call("sgn") + 1 / x)).where(x.call("ne", 0), 0.5)
    ),
    "special_bessel_j0": lambda g, x, y: -(g * x.call("special_bessel_j1")),
    "special_bessel_j1": lambda g, x, y: g * (x.call("special_bessel_j0") - y / x).where(x.call("ne", 0), 0.5),
    "special_bessel_y0": lambda g, x, y: -(g * x.call("special_bessel_y1")),
    "special_bessel_y1": lambda g, x, y: g * (x.call("special_bessel_y0") - y / x),
    # The exponent is constant almost everywhere.
    "frexp_mantissa": lambda g, x, y: g.call("ldexp", -x.call("frexp_exponent")),
}

# Per operand: (gradient, result, *operands) -> contribution, or None.
PARTIALS: dict[str, tuple[Callable[..., Expr] | None, ...]] = {
    "add": (lambda g, y, a, b: g, lambda g, y, a, b: g),
    "sub": (lambda g, y, a, b: g, lambda g, y, a, b: -g),
    "mul": (lambda g, y, a, b: g * b, lambda g, y, a, b: g * a),
    "div": (lambda g, y, a, b: g / b, lambda g, y, a, b: _denominator(g, y, a, b)),
    "cpp.fma": (lambda g, y, a, b, c: g * b, lambda g, y, a, b, c: g * a, lambda g, y, a, b, c: g),
    "fmod": (lambda g, y, a, b: g, lambda g, y, a, b: -(g * (a / b).call("trunc"))),
    "remainder": (lambda g, y, a, b: g, lambda g, y, a, b: -(g * (a / b).call("floor"))),
    "cpp.remainder": (lambda g, y, a, b: g, lambda g, y, a, b: -(g * (a / b).call("round"))),
    "pow": (lambda g, y, a, b: _base(g, a, b), lambda g, y, a, b: _exponent(g, y, a, b)),
    "atan2": (lambda g, y, a, b: g * _turn(b, a, b), lambda g, y, a, b: -(g * _turn(a, a, b))),
    "logaddexp": (lambda g, y, a, b: g / ((b - a).call("exp") + 1), lambda g, y, a, b: g / ((a - b).call("exp") + 1)),
    "hypot": (lambda g, y, a, b: g * (a / y), lambda g, y, a, b: g * (b / y)),
    "cpp.norm3d": tuple(lambda g, y, *x, k=k: g * (x[k] / y) for k in range(3)),
    "cpp.norm4d": tuple(lambda g, y, *x, k=k: g * (x[k] / y) for k in range(4)),
    **{
        name: tuple(lambda g, y, *x, k=k: -(g * (x[k] * (y * y * y))) for k in range(count))
        for name, count in (("cpp.rhypot", 2), ("cpp.rnorm3d", 3), ("cpp.rnorm4d", 4))
    },
    # Also where the first operand is infinite, unlike torch's quotient; zero at zero, as there.
    "copysign": (lambda g, y, a, b: g * (a.call("sgn") * b.builder.constant(1, b.dtype).call("copysign", b)), None),
    "ldexp": (lambda g, y, a, b: g.call("ldexp", b), None),
    "cpp.jn": (None, lambda g, y, n, x: g * _slope_of_order(y, n, x, "cpp.jn").where(x.call("ne", 0), _at_zero(n, x))),
    "cpp.yn": (None, lambda g, y, n, x: g * _slope_of_order(y, n, x, "cpp.yn")),
}


def _turn(other: Expr, a: Expr, b: Expr) -> Expr:
    # Zero has no direction; its gradient is zero, and that of numbers whose squares are no more than zero.
    square = a * a + b * b
    return (other / square).where(square.call("ne", 0), 0)


def _denominator(g: Expr, y: Expr, a: Expr, b: Expr) -> Expr:
    return -(g * (y * y)) if a.is_constant and a.args[0] == 1 else -(g / b * y)


def _base(g: Expr, a: Expr, b: Expr) -> Expr:
    # A constant of a complex type equals these, too.
    exponent = next((number for number in (1, 2, 3, 4) if b.is_constant and b.args[0] == number), None)
    if exponent is not None:
        return g if exponent == 1 else g * (exponent * reduce(mul, [a] * (exponent - 1)))
    return (g * (b * a.call("pow", b - 1))).where(b.call("ne", 0), 0)


def _exponent(g: Expr, y: Expr, a: Expr, b: Expr) -> Expr:
    # 0 to a power has no logarithm, and none is needed.
    size = b.call("real") if b.dtype.is_complex else b
    is_zero = a.call("eq", 0).call("logical_and", size.call("ge", 0))
    return (g * (y * a.call("log"))).where(is_zero.call("logical_not"), 0)


def _slope_of_order(y: Expr, n: Expr, x: Expr, function: str) -> Expr:
    # CUDA has no functions of negative order.
    return n.to(x.dtype) / x * y - x.builder.emit(function, n + 1, x, dtype=x.dtype)


def _at_zero(n: Expr, x: Expr) -> Expr:
    return x.builder.constant(0.5, x.dtype).where(n.call("eq", 1), 0)
