"""Functions of complex numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from fuser.eager.real import constant_of
from fuser.eager.terms import Term, apply, where
from fuser.eager.values import join_complex, split_complex

__all__ = ["COMPLEX"]

aten = torch.ops.aten
_INF = float("inf")


def parts_of(z: Term) -> tuple[Term, Term]:
    """Return real and imaginary part; a real number is a complex one without imaginary part."""
    if not z.dtype.is_complex:
        return z, constant_of(0, z)
    re, im = split_complex(z.value)
    return Term(re), Term(im)


def complex_of(re: Term, im: Term) -> Term:
    """Return the complex number of two parts."""
    return Term(join_complex(re.value, im.value))


def construct(re: Term, im: Term | None = None) -> Term:
    """Return std::complex(re, im), of two real numbers of one type, or what is complex already."""
    if re.dtype.is_complex:
        return re
    return complex_of(re, constant_of(0, re) if im is None else im)


def polar(size: Term, angle: Term | None = None) -> Term:
    """Return the complex number of an absolute value and an angle."""
    if angle is None:
        return construct(size)
    return complex_of(size * apply(aten.cos.default, angle), size * apply(aten.sin.default, angle))


def norm(z: Term) -> Term:
    """Return the square of the absolute value."""
    re, im = parts_of(z)
    return re * re + im * im


def project(z: Term) -> Term:
    """Return z, or infinity with the sign of the imaginary part where a part is infinite."""
    re, im = parts_of(z)
    infinite = abs(re).equals(_INF) | abs(im).equals(_INF)
    return complex_of(
        where(infinite, constant_of(_INF, re), re), where(infinite, apply(aten.copysign.Tensor, 0.0, im), im)
    )


def absolute(z: Term) -> Term:
    """Return |z|."""
    re, im = parts_of(z)
    return apply(aten.hypot.default, re, im)


def argument(z: Term) -> Term:
    """Return the angle of z."""
    re, im = parts_of(z)
    return apply(aten.atan2.default, im, re)


def conjugate(z: Term) -> Term:
    """Return the conjugate."""
    return apply(aten.conj_physical.default, z) if z.dtype.is_complex else construct(z)


def power(z: Term, w: Term) -> Term:
    """Return z^w."""
    return apply(aten.pow.Tensor_Tensor, z, w)


COMPLEX: dict[str, Callable[..., Term]] = {
    "abs": absolute,
    "arg": argument,
    "complex": construct,
    "conj": conjugate,
    "imag": lambda z: parts_of(z)[1],
    "norm": norm,
    "polar": polar,
    "pow": power,
    "proj": project,
    "real": lambda z: parts_of(z)[0],
    **{
        name: partial(apply, getattr(aten, name).default)
        for name in "exp log log2 log10 sqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh".split()
    },
}
