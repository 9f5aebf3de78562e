"""Functions of complex numbers, by the prelude's formulas.

Those follow W. Kahan, "Branch Cuts for Complex Elementary Functions" (1987), part by part; ATen's own functions differ
in digits of the smaller part and for infinities and NaN. Where derivatives are wanted ATen's functions stand for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from fuser.eager.data import WHOLE_FUNCTIONS
from fuser.eager.math.real import constant_of, copysign
from fuser.eager.math.terms import Term, apply, where
from fuser.eager.values import join_complex, split_complex

__all__ = ["COMPLEX"]

aten = torch.ops.aten
_INF = float("inf")
_LOG_2 = math.log(2)

_exp = partial(apply, aten.exp.default)
_sin = partial(apply, aten.sin.default)
_cos = partial(apply, aten.cos.default)
_log = partial(apply, aten.log.default)
_sqrt = partial(apply, aten.sqrt.default)
_sinh = partial(apply, aten.sinh.default)
_cosh = partial(apply, aten.cosh.default)
_asinh = partial(apply, aten.asinh.default)
_atan2 = partial(apply, aten.atan2.default)
_hypot = partial(apply, aten.hypot.default)
_log1p = partial(apply, aten.log1p.default)


# ---- parts ----


def _parts(z: Term) -> tuple[Term, Term]:
    # A real number is a complex one without imaginary part.
    if not z.dtype.is_complex:
        return z, constant_of(0, z)
    re, im = split_complex(z.value)
    return Term(re), Term(im)


def _join(re: Term, im: Term) -> Term:
    return Term(join_complex(re.value, im.value))


def construct(re: Term, im: Term | None = None) -> Term:
    """Return std::complex(re, im), of two real numbers of one type, or what is complex already."""
    if re.dtype.is_complex:
        return re
    return _join(re, constant_of(0, re) if im is None else im)


def real(z: Term) -> Term:
    """Return the real part."""
    return _parts(z)[0]


def imag(z: Term) -> Term:
    """Return the imaginary part."""
    return _parts(z)[1]


def polar(size: Term, angle: Term | None = None) -> Term:
    """Return the complex number of an absolute value and an angle."""
    return construct(size) if angle is None else _join(size * _cos(angle), size * _sin(angle))


def norm(z: Term) -> Term:
    """Return the square of the absolute value."""
    re, im = _parts(z)
    return re * re + im * im


def project(z: Term) -> Term:
    """Return z, or infinity with the sign of the imaginary part where a part is infinite."""
    re, im = _parts(z)
    infinite = abs(re).equals(_INF) | abs(im).equals(_INF)
    return _join(where(infinite, constant_of(_INF, re), re), where(infinite, copysign(constant_of(0.0, im), im), im))


def absolute(z: Term) -> Term:
    """Return |z|."""
    return apply(aten.abs.default, z, dtype=z.dtype.to_real()) if _is_differentiated(z) else _hypot(*_parts(z))


def argument(z: Term) -> Term:
    """Return the angle of z."""
    re, im = _parts(z)
    return _atan2(im, re)


def conjugate(z: Term) -> Term:
    """Return the conjugate."""
    return apply(aten.conj_physical.default, z) if z.dtype.is_complex else construct(z)


def _is_differentiated(*terms: Term) -> bool:
    if WHOLE_FUNCTIONS.get():
        return True
    tensors = (term.value.data for term in terms)
    return torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors)


# ---- exponential and logarithm ----


def _log_abs(x: Term, y: Term) -> Term:
    # log |z| without overflow or underflow of |z|, and by log1p where |z| is close to one.
    x, y = abs(x), abs(y)
    most, least = where(x < y, y, x), where(x < y, x, y)
    is_near = (most > 0.5) & (most < 2.0) & (most * most + least * least < 3.0)
    near = 0.5 * _log1p((most - 1.0) * (most + 1.0) + least * least)
    large, small = most > 1e30, most < 1e-30
    scale = where(large, constant_of(0.0625, x), where(small, constant_of(33554432.0, x), 1.0))
    shift = where(large, constant_of(4 * _LOG_2, x), where(small, constant_of(-25 * _LOG_2, x), 0.0))
    return where(is_near, near, _log(_hypot(x * scale, y * scale)) + shift)


def log(z: Term) -> Term:
    """Return the logarithm."""
    re, im = _parts(z)
    return _join(_log_abs(re, im), _atan2(im, re))


def _scaled_log(factor: float) -> Callable[[Term], Term]:
    def scaled(z: Term) -> Term:
        re, im = _parts(log(z))
        return _join(re * factor, im * factor)

    return scaled


def power(z: Term, w: Term) -> Term:
    """Return z^w."""
    if _is_differentiated(z, w):
        return apply(aten.pow.Tensor_Tensor, z, w)
    result = _exp(w * log(z))
    zero = z.equals(0.0) & (real(w) > 0.0)
    return where(w.equals(0.0), constant_of(1.0, z), where(zero, constant_of(0.0, z), result))


# ---- hyperbolic functions; the trigonometric ones turn them by i ----


def sinh(z: Term) -> Term:
    """Return the hyperbolic sine."""
    x, y = _parts(z)
    x_zero, y_zero = x.equals(0.0), y.equals(0.0)
    re = where(y_zero, _sinh(x), where(x_zero, x, _sinh(x) * _cos(y)))
    return _join(re, where(y_zero, y, where(x_zero, _sin(y), _cosh(x) * _sin(y))))


def cosh(z: Term) -> Term:
    """Return the hyperbolic cosine."""
    x, y = _parts(z)
    x_zero, y_zero = x.equals(0.0), y.equals(0.0)
    re = where(y_zero, _cosh(x), where(x_zero, _cos(y), _cosh(x) * _cos(y)))
    im = where(x_zero, x * copysign(constant_of(1.0, y), y), _sinh(x) * _sin(y))
    return _join(re, where(y_zero, copysign(constant_of(1.0, x), x) * y, im))


def tanh(z: Term) -> Term:
    """Return the hyperbolic tangent."""
    x, y = _parts(z)
    # Beyond the limit the real part is 1 to the last bit.
    is_large = abs(x) > (11.0 if x.dtype is torch.float32 else 22.0)
    e = _exp(-abs(x))
    far = where(abs(y).equals(_INF), copysign(constant_of(0.0, y), y), 4.0 * _sin(y) * _cos(y) * e * e)
    tangent, sine = apply(aten.tan.default, y), _sinh(x)
    beta, rho = 1.0 + tangent * tangent, _sqrt(1.0 + sine * sine)
    below = 1.0 + beta * sine * sine
    re = where(is_large, copysign(constant_of(1.0, x), x), beta * rho * sine / below)
    return _join(re, where(is_large, far, tangent / below))


def _turn(z: Term) -> Term:
    re, im = _parts(z)
    return _join(-im, re)


def _turn_back(z: Term) -> Term:
    re, im = _parts(z)
    return _join(im, -re)


# ---- inverse functions ----


def _is_huge(x: Term, y: Term) -> Term:
    # Where 1 - z and 1 + z are -z and z to the last bit, the inverse functions are log(2z) but for a rotation.
    limit = 1e8 if x.dtype is torch.float32 else 1e16
    return (abs(x) > limit) | (abs(y) > limit)


def _roots(re: Term, im: Term, *, turned: bool = False) -> tuple[Term, Term, Term, Term]:
    # Parts of sqrt(1 - z) and sqrt(1 + z), or of sqrt(z - 1) and sqrt(z + 1).
    first = _join(re - 1.0, im) if turned else _join(1.0 - re, -im)
    return (*_parts(_sqrt(first)), *_parts(_sqrt(_join(re + 1.0, im))))


def asin(z: Term) -> Term:
    """Return the inverse sine."""
    x, y = _parts(z)
    a, b, c, d = _roots(x, y)
    is_huge, size = _is_huge(x, y), _log_abs(x, y) + _LOG_2
    re = where(is_huge, _atan2(x, abs(y)), _atan2(x, a * c - b * d))
    return _join(re, where(is_huge, copysign(size, y), _asinh(a * d - b * c)))


def acos(z: Term) -> Term:
    """Return the inverse cosine."""
    x, y = _parts(z)
    a, b, c, d = _roots(x, y)
    is_huge, size = _is_huge(x, y), _log_abs(x, y) + _LOG_2
    re = where(is_huge, _atan2(abs(y), x), 2.0 * _atan2(a, c))
    return _join(re, where(is_huge, -copysign(size, y), _asinh(c * b - d * a)))


def acosh(z: Term) -> Term:
    """Return the inverse hyperbolic cosine."""
    x, y = _parts(z)
    a, b, c, d = _roots(x, y, turned=True)
    is_huge = _is_huge(x, y)
    re = where(is_huge, _log_abs(x, y) + _LOG_2, _asinh(a * c + b * d))
    return _join(re, where(is_huge, _atan2(y, x), 2.0 * _atan2(b, c)))


def atanh(z: Term) -> Term:
    """Return the inverse hyperbolic tangent."""
    re, y = _parts(z)
    x = abs(re)
    is_huge, size = _is_huge(x, y), _hypot(x, y)
    far = where(size.equals(_INF), copysign(constant_of(0.0, re), re), re / size / size)
    # Near the poles at 1 and -1 the square of the distance would underflow, and the logarithm is far from zero.
    distance = _hypot(1.0 - x, y)
    at_pole = 0.5 * _log(_hypot(1.0 + x, y) / distance)
    near = where(distance < 0.125, at_pole, 0.25 * _log1p(4.0 * x / (distance * distance)))
    angle = 0.5 * _atan2(2.0 * y, (1.0 - x) * (1.0 + x) - y * y)
    half_pi = copysign(constant_of(math.pi / 2, y), y)
    return _join(where(is_huge, far, copysign(near, re)), where(is_huge, half_pi, angle))


# ---- the table ----

_FORMULAS: dict[str, Callable[[Term], Term]] = {
    "acos": acos,
    "acosh": acosh,
    "asin": asin,
    "asinh": lambda z: _turn_back(asin(_turn(z))),
    "atan": lambda z: _turn_back(atanh(_turn(z))),
    "atanh": atanh,
    "cos": lambda z: cosh(_turn(z)),
    "cosh": cosh,
    "exp": _exp,
    "log": log,
    "log10": _scaled_log(1 / math.log(10)),
    "log2": _scaled_log(1 / _LOG_2),
    "sin": lambda z: _turn_back(sinh(_turn(z))),
    "sinh": sinh,
    "sqrt": _sqrt,
    "tan": lambda z: _turn_back(tanh(_turn(z))),
    "tanh": tanh,
}


def _elementary(name: str, z: Term) -> Term:
    return apply(getattr(aten, name).default, z) if _is_differentiated(z) else _FORMULAS[name](z)


COMPLEX: dict[str, Callable[..., Term]] = {
    "abs": absolute,
    "arg": argument,
    "complex": construct,
    "conj": conjugate,
    "imag": imag,
    "norm": norm,
    "polar": polar,
    "pow": power,
    "proj": project,
    "real": real,
    **{name: partial(_elementary, name) for name in _FORMULAS},
}
