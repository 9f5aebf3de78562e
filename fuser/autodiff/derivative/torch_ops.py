"""torch's own ops whose derivative is not that of their functor's text.

Where two operands are equal the text takes one of them, and torch shares the gradient or gives it to the input; the
text of ``pow`` has cases that avoid a rounding, and those have no say in the derivative. Each op is given as what is
differentiated in place of its text.
"""

from __future__ import annotations

from collections.abc import Callable

from fuser.autodiff.derivative.expression import Expr

__all__ = ["DIFFERENTIATED_AS"]


def _clamp(x: Expr, low: Expr, high: Expr) -> Expr:
    # Bounds count as inside. What is not beyond a bound has no gradient: NaN, and x below low where low is high.
    inside = x.call("ge", low).call("logical_and", x.call("le", high))
    below = x.call("lt", low).call("logical_and", low.call("lt", high))
    above = x.call("gt", high).call("logical_or", high.call("lt", low))
    bound = high.where(above, low.where(below, x.call("detach")))
    return x.where(inside, bound)


def _clamp_one(inside: str, beyond: str) -> Callable[[Expr, Expr], Expr]:
    return lambda x, bound: x.where(x.call(inside, bound), bound.where(x.call(beyond, bound), x.call("detach")))


def _pow_number(a: Expr, b: Expr) -> Expr:
    # Multiplications where a power would be slow; the exponent is the same number on all lanes.
    cube = (a * a * a).where(b.call("eq", 3), a.call("pow", b))
    return (a * a).where(b.call("eq", 2), cube)


def _hardsigmoid(x: Expr) -> Expr:
    return (x / 6).where(x.call("gt", -3).call("logical_and", x.call("lt", 3)), 0)


def _hardswish(x: Expr) -> Expr:
    above = (x * (x + 3) / 6).where(x.call("lt", 3), x)
    return above.where(x.call("le", -3).call("logical_not"), 0)


# By the entry's name in the table, from the tensor parameters, in order, to what is differentiated; its value on a tie
# or a kink does not matter.
DIFFERENTIATED_AS: dict[str, Callable[..., Expr]] = {
    "abs": lambda x: x.call("abs"),
    "div_number": lambda a, b: a / b,
    "maximum": lambda a, b: a.call("maximum", b),
    "minimum": lambda a, b: a.call("minimum", b),
    "clamp": _clamp,
    "clamp_min": _clamp_one("ge", "lt"),
    "clamp_max": _clamp_one("le", "gt"),
    "hardsigmoid": _hardsigmoid,
    "hardswish": _hardswish,
    "logaddexp": lambda a, b: a.call("logaddexp", b),
    "pow": lambda a, b: a.call("pow", b),
    "pow_number": _pow_number,
    "pow_any": lambda a, b: a.call("pow", b),
    "pow_0": lambda a, b: a.call("detach"),
    **{f"pow_{k}": lambda a, b, k=k: a.call("pow", k) for k in (1, 2, 3)},
    "pow_minus_2": lambda a, b: (1 / a) * (1 / a),
    # Without what the text has for its digits.
    "sigmoid_backward": lambda g, y: g * (1 - y) * y,
    "tanh_backward": lambda g, y: g * (1 - y * y),
}
