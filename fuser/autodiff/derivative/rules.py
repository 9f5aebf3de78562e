"""The derivative of every operation: one linear map per operand, which serves reverse and forward mode.

An operand without a map has no gradient: what is rounded, compared or converted to an integer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from fuser.autodiff.derivative.expression import Expr
from fuser.autodiff.derivative.formulas import CONSTANT, PARTIALS, UNARY
from fuser.dtypes import is_continuous

__all__ = ["Edge", "Unsupported", "edges"]

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


def edges(item: Expr, *, reverse: bool) -> Sequence[Edge]:
    """Return how the result of one operation depends on its operands, those without a gradient left out.

    Args:
        item: the operation.
        reverse: whether the maps take the result's gradient to the operands' (else: operands' tangents to the
            result's). They differ for complex numbers only: gradients follow torch's convention, grad * conj(df/dz).

    Raises:
        Unsupported: the operation has no derivative.
    """
    if item.op in CONSTANT or item.op in {"input", "constant"}:
        return ()
    special = _SPECIAL[item.op](item, reverse) if item.op in _SPECIAL else None
    if special is not None:
        return special
    operands, result = item.operands, item
    if item.dtype.is_complex and reverse:
        operands, result = tuple(_conj(operand) for operand in operands), _conj(item)
    if item.op in UNARY:
        unary, (x,) = UNARY[item.op], operands
        return (Edge(item.operands[0], lambda g: unary(g, x, result)),)
    if item.op in PARTIALS:
        return [
            Edge(operand, partial(_apply, formula, result, operands))
            for operand, formula in zip(item.operands, PARTIALS[item.op], strict=True)
            if formula is not None
        ]
    raise Unsupported(item.op)


def _apply(formula: Callable[..., Expr], result: Expr, operands: tuple[Expr, ...], g: Expr) -> Expr:
    return formula(g, result, *operands)


def _conj(value: Expr) -> Expr:
    return value.call("conj_physical")


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


def _fdim(item: Expr, reverse: bool) -> Sequence[Edge]:
    a, b = item.args
    is_less = a.call("le", b)
    return Edge(a, _same, (is_less, False)), Edge(b, lambda g: -g, (is_less, False))


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
    # Where exp(u) is small, 1 - sigmoid would have few digits left.
    rest = (e * sigmoid).where(e.call("lt", 1), 1 - sigmoid)
    found = [Edge(e.args[0], lambda g: -(g * (item * rest)))]
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
    "cpp.fdim": _fdim,
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
