"""torch's own ops whose derivative is not that of their functor's text.

Where two operands are equal the text takes one of them, and torch shares the gradient or gives it to the input; the
text of ``pow`` has cases that avoid a rounding, and those have no say in the derivative. Each op is given as what is
differentiated in place of its text.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from fuser.autodiff.derivative.expression import Expr
from fuser.plain_torch import plain_torch

__all__ = ["DIFFERENTIATED_AS"]


def _clamp(x: Expr, low: Expr, high: Expr) -> Expr:
    if not _shares_at_bounds():
        return _clamp_number(x, low, high)
    # What compares false is inside, NaN too. At one of two different bounds the gradient is shared.
    is_ordered, are_apart = low.call("le", high), low.call("lt", high)
    is_low = x.call("eq", low).call("logical_and", are_apart)
    is_high = x.call("eq", high).call("logical_and", are_apart)
    is_inside = x.call("lt", low).call("logical_or", x.call("gt", high)).call("logical_not")
    is_below = x.call("lt", low).call("logical_and", is_ordered)
    is_above = x.call("gt", high).call("logical_and", is_ordered).call("logical_or", high.call("lt", low))
    own = (x / 2).where(is_low.call("logical_or", is_high), x.where(is_inside, 0))
    return own + low.where(is_below, (low / 2).where(is_low, 0)) + high.where(is_above, (high / 2).where(is_high, 0))


def _clamp_number(x: Expr, low: Expr, high: Expr) -> Expr:
    # What is not beyond a bound has no gradient: NaN, and x below low where low is high.
    above_low, below_high = ("gt", "lt") if _shares_at_bounds() else ("ge", "le")
    inside = x.call(above_low, low).call("logical_and", x.call(below_high, high))
    below = x.call("lt", low).call("logical_and", low.call("lt", high))
    above = x.call("gt", high).call("logical_or", high.call("lt", low))
    bound = high.where(above, low.where(below, x.call("detach")))
    return x.where(inside, bound)


def _clamp_min(x: Expr, low: Expr) -> Expr:
    return x.call("maximum", low) if _shares_at_bounds() else _clamp_min_number(x, low)


def _clamp_max(x: Expr, high: Expr) -> Expr:
    return x.call("minimum", high) if _shares_at_bounds() else _clamp_max_number(x, high)


def _clamp_min_number(x: Expr, low: Expr) -> Expr:
    inside = x.call("gt" if _shares_at_bounds() else "ge", low)
    return x.where(inside, low.where(x.call("lt", low), x.call("detach")))


def _clamp_max_number(x: Expr, high: Expr) -> Expr:
    inside = x.call("lt" if _shares_at_bounds() else "le", high)
    return x.where(inside, high.where(x.call("gt", high), x.call("detach")))


@cache
def _shares_at_bounds() -> bool:
    """Whether torch shares the gradient at a bound that is a tensor, as of equal operands of fmax and fmin.

    It then drops the gradient at a bound that is a number.

    Torch 2.15 does; earlier versions give it to what is clamped. Asked of the torch that is there.
    """
    with plain_torch():
        x = torch.ones(1, device="cpu", requires_grad=True)
        (gradient,) = torch.autograd.grad(torch.clamp_min(x, torch.ones(1, device="cpu")), x)
        return gradient.item() != 1


def _share_equal(a: Expr, b: Expr, chosen: Expr) -> Expr:
    return (a / 2 + b / 2).where(a.call("eq", b), chosen) if _shares_at_bounds() else chosen


def _pow_number(a: Expr, b: Expr) -> Expr:
    # Multiplications where a power would be slow; the exponent is the same number on all lanes.
    cube = (a * a * a).where(b.call("eq", 3), a.call("pow", b))
    return (a * a).where(b.call("eq", 2), cube)


def _hardsigmoid(x: Expr) -> Expr:
    return (x / 6).where(x.call("gt", -3).call("logical_and", x.call("lt", 3)), 0)


def _hardswish(x: Expr) -> Expr:
    above = (x * (x + 3) / 6).where(x.call("lt", 3), x)
    return above.where(x.call("le", -3).call("logical_not"), 0)


def _hardtanh(x: Expr, low: Expr, high: Expr) -> Expr:
    # On a bound there is none.
    low, high = low.to(x.dtype), high.to(x.dtype)
    above = x.where(x.call("le", low).call("logical_not"), low)
    return above.where(above.call("ge", high).call("logical_not"), high)


def _sigmoid(x: Expr) -> Expr:
    return 1 / ((-x).call("exp") + 1)


def _elu_backward(g: Expr, x: Expr, alpha: Expr, scale: Expr, input_scale: Expr) -> Expr:
    # Zero has the value of what is below, and no second derivative.
    alpha, scale, input_scale = (item.to(x.dtype) for item in (alpha, scale, input_scale))
    curved = x.where(x.call("lt", 0), x.call("detach"))
    below = g * input_scale * (alpha * scale) * (curved * input_scale).call("exp")
    return (g * scale).where(x.call("gt", 0), below)


def _elu_result_backward(g: Expr, y: Expr, alpha: Expr, input_scale: Expr) -> Expr:
    # As above.
    curved = y.where(y.call("lt", 0), y.call("detach"))
    return g.where(y.call("gt", 0), g * input_scale.to(y.dtype) * (curved + alpha.to(y.dtype)))


def _softplus_backward(g: Expr, x: Expr, beta: Expr, threshold: Expr) -> Expr:
    # On the threshold the value is the curve's, and the second derivative is zero.
    beta, threshold = beta.to(x.dtype), threshold.to(x.dtype)
    scaled = x * beta
    slope = _sigmoid(scaled.call("detach").where(scaled.call("eq", threshold), scaled))
    return g.where(scaled.call("gt", threshold), g * slope)


def _log_sigmoid_backward(g: Expr, x: Expr) -> Expr:
    # The text has the absolute value of x, which has no derivative at zero. Both sides keep their digits.
    return (g - g * _sigmoid(x)).where(x.call("lt", 0), g * _sigmoid(-x))


def _smooth_l1(x: Expr, y: Expr, beta: Expr) -> Expr:
    size, beta = (x - y).call("abs"), beta.to(x.dtype)
    return (size - beta * 0.5).where(size.call("ge", beta), size * size * 0.5 / beta)


def _huber(x: Expr, y: Expr, delta: Expr) -> Expr:
    size, delta = (x - y).call("abs"), delta.to(x.dtype)
    return (delta * (size - delta * 0.5)).where(size.call("ge", delta), size * size * 0.5)


def _clipped_slope(g: Expr, x: Expr, y: Expr, norm: Expr, bound: Expr) -> Expr:
    # On a bound torch takes the slope for that beyond it.
    d, norm, bound = x - y, norm.to(x.dtype), bound.to(x.dtype)
    end = bound.where(d.call("gt", 0), -bound)
    return norm * end.where(d.call("abs").call("ge", bound), d) * g


def _binary_cross_entropy(x: Expr, y: Expr) -> Expr:
    least = (x.call("log"), (-x).call("log1p"))
    own, other = (item.where(item.call("gt", -100), -100) for item in least)
    return (y - 1) * other - y * own


def _binary_cross_entropy_backward(x: Expr, y: Expr, g: Expr) -> Expr:
    product = (1 - x) * x
    return g * (x - y) / product.where(product.call("lt", 1e-12).call("logical_not"), 1e-12)


def _xlogy(x: Expr, y: Expr) -> Expr:
    # Of what is nothing the slope is none, whatever the logarithm.
    is_nothing, log = x.call("eq", 0).call("logical_and", y.call("le", 0)), y.call("log")
    return (x.call("detach") * log).where(is_nothing, x * log)


# By the entry's name in the table, from the parameters, tensors and scalars, in order, to what is differentiated; its
# value on a tie or a kink does not matter.
DIFFERENTIATED_AS: dict[str, Callable[..., Expr]] = {
    "abs": lambda x: x.call("abs"),
    "div_number": lambda a, b: a / b,
    "maximum": lambda a, b: a.call("maximum", b),
    "minimum": lambda a, b: a.call("minimum", b),
    "fmax": lambda a, b: _share_equal(a, b, a.call("fmax", b)),
    "fmin": lambda a, b: _share_equal(a, b, a.call("fmin", b)),
    "clamp": _clamp,
    "clamp_min": _clamp_min,
    "clamp_max": _clamp_max,
    "clamp_number": _clamp_number,
    "clamp_min_number": _clamp_min_number,
    "clamp_max_number": _clamp_max_number,
    "hardsigmoid": _hardsigmoid,
    "hardswish": _hardswish,
    "hardtanh": _hardtanh,
    "logaddexp": lambda a, b: a.call("logaddexp", b),
    "pow": lambda a, b: a.call("pow", b),
    "pow_number": _pow_number,
    "pow_any": lambda a, b: a.call("pow", b),
    "pow_0": lambda a, b: a.call("detach"),
    **{f"pow_{k}": lambda a, b, k=k: a.call("pow", k) for k in (1, 2, 3, 4)},
    "pow_minus_2": lambda a, b: (1 / a) * (1 / a),
    "elu_backward": _elu_backward,
    "elu_result_backward": _elu_result_backward,
    "softplus_backward": _softplus_backward,
    "log_sigmoid_backward": _log_sigmoid_backward,
    "mse_loss": lambda x, y: (x - y) * (x - y),
    "mse_loss_backward": lambda x, y, g, norm: norm.to(x.dtype) * (x - y) * g,
    "smooth_l1_loss": _smooth_l1,
    "smooth_l1_loss_backward": lambda x, y, g, norm, beta: _clipped_slope(g, x, y, norm, beta) / beta.to(x.dtype),
    "huber_loss": _huber,
    "huber_loss_backward": lambda x, y, g, norm, delta: _clipped_slope(g, x, y, norm, delta),
    "binary_cross_entropy": _binary_cross_entropy,
    "binary_cross_entropy_backward": _binary_cross_entropy_backward,
    "xlogy": _xlogy,
    # Without what the text has for its digits.
    "sigmoid_backward": lambda g, y: g * (1 - y) * y,
    "tanh_backward": lambda g, y: g * (1 - y * y),
}
