"""The derivative of every operation: one linear map per operand, which serves reverse and forward mode.

The formulas are those of torch's autograd (``tools/autograd/derivatives.yaml``), kinks included, unless a comment says
otherwise. An operand without a map has no gradient: what is rounded, compared or converted to an integer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fuser.derivative.expression import BOOLEAN, Expr, is_continuous

__all__ = ["Edge", "Unsupported", "edges"]

_TWO_OVER_ROOT_PI = 2 / math.sqrt(math.pi)
# From a gradient (or, forward, a tangent) to what it contributes.
Map = Callable[[Expr], Expr]


class Unsupported(Exception):  # noqa: N818 - caught where the place in the text is known
    """An operation that has no derivative; says what it is."""


@dataclass(frozen=True, slots=True)
class Edge:
    """How a result depends on one operand."""

    operand: Expr
    map: Map
    # The condition under which it does, and whether it must be true or false.
    arm: tuple[Expr, bool] | None = None


# (gradient, operand, result) -> contribution. Reverse mode gives the conjugates of complex operands and results: every
# formula f has f(conj z) = conj f(z).
_UNARY: dict[str, Callable[[Expr, Expr, Expr], Expr]] = {
    "neg": lambda g, x, y: -g,
    "reciprocal": lambda g, x, y: -(g * (y * y)),
    "exp": lambda g, x, y: g * y,
    "exp2": lambda g, x, y: g * y * math.log(2),
    "expm1": lambda g, x, y: g * (y + 1),
    "log": lambda g, x, y: g / x,
    "log2": lambda g, x, y: g / (x * math.log(2)),
    "log10": lambda g, x, y: g / (x * math.log(10)),
    "log1p": lambda g, x, y: g / (x + 1),
    "sqrt": lambda g, x, y: g / (2 * y),
    "rsqrt": lambda g, x, y: -0.5 * g * (y * y * y),
    "sin": lambda g, x, y: g * x.call("cos"),
    "cos": lambda g, x, y: -(g * x.call("sin")),
    "tan": lambda g, x, y: g * (1 + y * y),
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
    "lgamma": lambda g, x, y: g * x.call("digamma"),
    "digamma": lambda g, x, y: g * x.builder.emit("polygamma", 1, x),
    "sinc": lambda g, x, y: (g * (((x * math.pi).call("cos") - y) / x)).where(x.call("ne", 0), 0),
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
    "special_erfcx": lambda g, x, y: g * (2 * x * y - _TWO_OVER_ROOT_PI),
    "special_ndtr": lambda g, x, y: g * ((-0.5 * x * x).call("exp") / math.sqrt(2 * math.pi)),
    "special_ndtri": lambda g, x, y: g * ((0.5 * y * y).call("exp") * math.sqrt(2 * math.pi)),
    # The exponent is constant almost everywhere.
    "frexp_mantissa": lambda g, x, y: g.call("ldexp", -x.call("frexp_exponent")),
}

# Per operand: (gradient, operand, operand, result) -> contribution, or None.
_Partial = Callable[[Expr, Expr, Expr, Expr], Expr]
_BINARY: dict[str, tuple[_Partial | None, _Partial | None]] = {
    "add": (lambda g, a, b, y: g, lambda g, a, b, y: g),
    "sub": (lambda g, a, b, y: g, lambda g, a, b, y: -g),
    "mul": (lambda g, a, b, y: g * b, lambda g, a, b, y: g * a),
    "div": (lambda g, a, b, y: g / b, lambda g, a, b, y: _denominator(g, a, b, y)),
    "fmod": (lambda g, a, b, y: g, lambda g, a, b, y: -(g * (a / b).call("trunc"))),
    "remainder": (lambda g, a, b, y: g, lambda g, a, b, y: -(g * (a / b).call("floor"))),
    "pow": (lambda g, a, b, y: _base(g, a, b), lambda g, a, b, y: _exponent(g, a, b, y)),
    "atan2": (lambda g, a, b, y: g * (b / (a * a + b * b)), lambda g, a, b, y: -(g * (a / (a * a + b * b)))),
    "hypot": (lambda g, a, b, y: g * (a / y), lambda g, a, b, y: g * (b / y)),
    # Also where the first operand is infinite, unlike torch's quotient; zero at zero, as there.
    "copysign": (lambda g, a, b, y: g * (a.call("sgn") * b.builder.constant(1, b.dtype).call("copysign", b)), None),
    "ldexp": (lambda g, a, b, y: g.call("ldexp", b), None),
}

# No gradient for any operand.
_CONSTANT = BOOLEAN | {
    "detach", "floor", "ceil", "trunc", "round", "div_trunc", "frexp_exponent", "bitwise_and", "bitwise_or",
    "bitwise_xor", "bitwise_not", "bitwise_left_shift", "bitwise_right_shift",
}  # fmt: skip


def edges(item: Expr, *, reverse: bool) -> Sequence[Edge]:
    """Return how the result of one operation depends on its operands, those without a gradient left out.

    Args:
        item: the operation.
        reverse: whether the maps take the result's gradient to the operands' (else: operands' tangents to the
            result's). They differ for complex numbers only: gradients follow torch's convention, grad * conj(df/dz).

    Raises:
        Unsupported: the operation has no derivative.
    """
    if item.op in _CONSTANT or item.op in {"input", "constant"}:
        return ()
    special = _SPECIAL[item.op](item, reverse) if item.op in _SPECIAL else None
    if special is not None:
        return special
    operands, result = item.operands, item
    if item.dtype.is_complex and reverse:
        operands, result = tuple(_conj(operand) for operand in operands), _conj(item)
    if item.op in _UNARY:
        unary, (x,) = _UNARY[item.op], operands
        return (Edge(item.operands[0], lambda g: unary(g, x, result)),)
    if item.op in _BINARY:
        return [
            Edge(operand, lambda g, partial=partial: partial(g, *operands, result))  # type: ignore[misc]
            for operand, partial in zip(item.operands, _BINARY[item.op], strict=True)
            if partial is not None
        ]
    raise Unsupported(item.op)


def _conj(value: Expr) -> Expr:
    return value.call("conj_physical")


def _denominator(g: Expr, a: Expr, b: Expr, y: Expr) -> Expr:
    if a.is_constant and a.args[0] == 1:
        return -(g * (y * y))
    return -(g / b * y)


def _base(g: Expr, a: Expr, b: Expr) -> Expr:
    if b.is_constant:
        exponent = b.args[0]
        if exponent in (1, 2, 3):
            return g if exponent == 1 else g * (2 * a) if exponent == 2 else g * (3 * (a * a))
        return g * (exponent * a.call("pow", b - 1))
    return (g * (b * a.call("pow", b - 1))).where(b.call("ne", 0), 0)


def _exponent(g: Expr, a: Expr, b: Expr, y: Expr) -> Expr:
    # 0 to a power has no logarithm, and none is needed.
    if b.dtype.is_complex:
        is_zero = a.call("eq", 0).call("logical_and", b.call("real").call("ge", 0))
    else:
        is_zero = a.call("eq", 0).call("logical_and", b.call("ge", 0))
    return (g * (y * a.call("log"))).where(is_zero.call("logical_not"), 0)


# --- selection ----------------------------------------------------------------------------------------------------
def _where(item: Expr, reverse: bool) -> Sequence[Edge]:
    mask, a, b = item.args
    return Edge(a, _same, (mask, True)), Edge(b, _same, (mask, False))


def _select(wins: Callable[[Expr, Expr], Expr]) -> Callable[[Expr, bool], Sequence[Edge]]:
    # One operand or the other is the result; ``wins`` says when it is the first.
    def apply(item: Expr, reverse: bool) -> Sequence[Edge]:
        a, b = item.args
        mask = wins(a, b)
        return Edge(a, _same, (mask, True)), Edge(b, _same, (mask, False))

    return apply


def _share(order: str) -> Callable[[Expr, bool], Sequence[Edge]]:
    # As _select, but at a tie half goes to each; NaN compares false and passes the gradient on to both.
    def apply(item: Expr, reverse: bool) -> Sequence[Edge]:
        a, b = item.args
        a_loses, b_loses, is_tie = a.call(order, b), b.call(order, a), a.call("eq", b)
        return (
            Edge(a, lambda g: (0.5 * g).where(is_tie, g), (a_loses, False)),
            Edge(b, lambda g: (0.5 * g).where(is_tie, g), (b_loses, False)),
        )

    return apply


def _same(g: Expr) -> Expr:
    return g


# --- conversions --------------------------------------------------------------------------------------------------
def _convert(item: Expr, reverse: bool) -> Sequence[Edge]:
    (x,) = item.args
    if not (is_continuous(item.dtype) and is_continuous(x.dtype)):
        return ()
    if not reverse:
        return (Edge(x, lambda t: t.to(item.dtype)),)
    if item.dtype.is_complex and not x.dtype.is_complex:
        return (Edge(x, lambda g: g.call("real").to(x.dtype)),)
    return (Edge(x, lambda g: g.to(x.dtype)),)


def _polygamma(item: Expr, reverse: bool) -> Sequence[Edge]:
    order, x = item.args
    return (Edge(x, lambda g: g * x.builder.emit("polygamma", order + 1, x)),)


def _bit_cast(item: Expr, reverse: bool) -> Sequence[Edge]:
    raise Unsupported("bit cast")


def _nextafter(item: Expr, reverse: bool) -> Sequence[Edge]:
    raise Unsupported("nextafter")


# --- between real and complex numbers: linear over the reals only -------------------------------------------------
def _complex_of(re: Expr | float, im: Expr | float, like: Expr) -> Expr:
    builder, dtype = like.builder, like.dtype.to_real()
    parts = [part if isinstance(part, Expr) else builder.constant(part, dtype) for part in (re, im)]
    return builder.emit("complex", *parts)


def _scaled(z: Expr, factor: Expr) -> Expr:
    return _complex_of(z.call("real") * factor, z.call("imag") * factor, z)


def _project(weight: Expr) -> Callable[[Expr], Expr]:
    # t -> Re(conj(weight) t)
    def apply(t: Expr) -> Expr:
        return weight.call("real") * t.call("real") + weight.call("imag") * t.call("imag")

    return apply


def _real_valued(item: Expr, reverse: bool, weight: Expr) -> Sequence[Edge]:
    # A real function of a complex number, whose gradient for 1 is ``weight``.
    (z,) = item.args
    if reverse:
        return (Edge(z, lambda g: _scaled(weight, g)),)
    return (Edge(z, _project(weight)),)


def _abs(item: Expr, reverse: bool) -> Sequence[Edge]:
    (x,) = item.args
    if x.dtype.is_complex:
        return _real_valued(item, reverse, x.call("sgn"))
    return (Edge(x, lambda g: g * x.call("sgn")),)


def _angle(item: Expr, reverse: bool) -> Sequence[Edge]:
    (z,) = item.args
    if not z.dtype.is_complex:
        return ()
    re, im = z.call("real"), z.call("imag")
    square = re * re + im * im
    is_zero = z.call("eq", 0)
    weight = _complex_of(-im / square, re / square, z)
    return _real_valued(item, reverse, z.builder.emit("where", is_zero, 0, weight))


def _sgn(item: Expr, reverse: bool) -> Sequence[Edge]:
    # z / |z| turns with z and keeps its length: what is left of a change is its part at right angles to it.
    (z,) = item.args
    if not z.dtype.is_complex:
        return ()
    along, length = _project(item), z.call("abs")

    def across(g: Expr) -> Expr:
        rest = g - _scaled(item, along(g))
        found = _complex_of(rest.call("real") / length, rest.call("imag") / length, z)
        return found.where(length.call("ne", 0), 0)

    return (Edge(z, across),)


def _real(item: Expr, reverse: bool) -> Sequence[Edge]:
    (z,) = item.args
    return (Edge(z, (lambda g: _complex_of(g, 0.0, z)) if reverse else (lambda t: t.call("real"))),)


def _imag(item: Expr, reverse: bool) -> Sequence[Edge]:
    (z,) = item.args
    return (Edge(z, (lambda g: _complex_of(0.0, g, z)) if reverse else (lambda t: t.call("imag"))),)


def _complex(item: Expr, reverse: bool) -> Sequence[Edge]:
    a, b = item.args
    if reverse:
        return Edge(a, lambda g: g.call("real")), Edge(b, lambda g: g.call("imag"))
    return Edge(a, lambda t: _complex_of(t, 0.0, item)), Edge(b, lambda t: _complex_of(0.0, t, item))


def _polar(item: Expr, reverse: bool) -> Sequence[Edge]:
    radius, angle = item.args
    towards = angle.builder.emit("complex", angle.call("cos"), angle.call("sin"))
    around = _complex_of(-item.call("imag"), item.call("real"), item)
    if reverse:
        return Edge(radius, _project(towards)), Edge(angle, _project(around))
    return Edge(radius, lambda t: _scaled(towards, t)), Edge(angle, lambda t: _scaled(around, t))


def _conj_physical(item: Expr, reverse: bool) -> Sequence[Edge]:
    return (Edge(item.args[0], _conj if item.dtype.is_complex else _same),)


# --- forms whose parts would overflow -----------------------------------------------------------------------------
def _division(item: Expr, reverse: bool) -> Sequence[Edge] | None:
    # n / (1 + exp(u)). Where exp(u) overflows the result and its derivative are zero, and exp's own is infinite.
    q = item.args[-1]
    e = _exponential(q)
    if e is None:
        return None
    sigmoid = item if item.op == "reciprocal" or item.args[0].equals(1) else 1 / q
    found = [Edge(e.args[0], lambda g: -(g * (item * (1 - sigmoid))))]
    return found if item.op == "reciprocal" else [Edge(item.args[0], lambda g: g * sigmoid), *found]


def _softplus(item: Expr, reverse: bool) -> Sequence[Edge] | None:
    # log(1 + exp(u)), whose derivative is 1 where exp(u) overflows.
    (x,) = item.args
    e = _exponential(x) if item.op == "log" else x if x.op == "exp" else None
    if e is None or item.dtype.is_complex:
        return None
    u = e.args[0]
    return (Edge(u, lambda g: g * (1 / (1 + (-u).call("exp")))),)


def _exponential(value: Expr) -> Expr | None:
    # exp(u) of 1 + exp(u).
    if value.op == "add" and not value.dtype.is_complex:
        for one, e in (value.args, value.args[::-1]):
            if one.equals(1) and e.op == "exp":
                found: Expr = e
                return found
    return None


_SPECIAL: dict[str, Callable[[Expr, bool], Sequence[Edge] | None]] = {
    "div": _division,
    "reciprocal": _division,
    "log": _softplus,
    "log1p": _softplus,
    "where": _where,
    # As the prelude's fmax: NaN loses, and the first of two equal operands is taken.
    "fmax": _select(lambda a, b: a.call("ge", b).call("logical_or", b.call("ne", b))),
    "fmin": _select(lambda a, b: a.call("le", b).call("logical_or", b.call("ne", b))),
    "maximum": _share("lt"),
    "minimum": _share("gt"),
    "convert": _convert,
    "bit_cast": _bit_cast,
    "polygamma": _polygamma,
    "nextafter": _nextafter,
    "abs": _abs,
    "angle": _angle,
    "sgn": _sgn,
    "real": _real,
    "imag": _imag,
    "complex": _complex,
    "polar": _polar,
    "conj_physical": _conj_physical,
}
