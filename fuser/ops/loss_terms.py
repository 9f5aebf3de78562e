"""Losses element by element: what each pair of an input and a target comes to, and the gradients.

ATen's kernels compute some of them in the dtype itself, step by step, and some of their CPU kernels others: which
steps are rounded is part of the op.
"""

from __future__ import annotations

import torch

from fuser.function import Promotion
from fuser.ops.table import ANY_REAL, define, unlike_cuda

__all__ = ["MEAN", "NONE", "SUM"]

# How torch numbers the ways to reduce a loss.
NONE, MEAN, SUM = 0, 1, 2

_ATEN = torch.ops.aten


def _rounded(text: str) -> str:
    # R rounds a step to the dtype; on the CPU, H does of half alone and B of bfloat16.
    steps = {"R(": "fuser_round<S>(", "H(": "fuser_half_step<S>(", "B(": "fuser_bfloat16_step<S>("}
    for short, name in steps.items():
        text = text.replace(short, name)
    return text


def _reduction_of(x: torch.Tensor, g: torch.Tensor, norm: float, whole: float = 1.0) -> int:
    # What a factor stands for in the eager op: of a mean, it is divided by the number of elements.
    if norm != whole:
        return MEAN
    return NONE if g.shape == x.shape else SUM


define(
    "mse_loss",
    "T x, T y",
    _rounded("T d = R(x - y); return d * d;"),
    lambda x, y: _ATEN.mse_loss(x, y, NONE),
    same_dtypes=True,
)
# In the gradients, ATen's iterator has the operands in this order, and a result that lies row-major.
define(
    "mse_loss_backward",
    "T x, T y, T g, T norm",
    _rounded("return R(R(norm) * R(x - y)) * g;"),
    lambda x, y, g, norm: _ATEN.mse_loss_backward(g, x, y, _reduction_of(x, g, norm, 2.0)),
    scalars=("norm",),
    same_dtypes=True,
    is_contiguous=True,
)
# On CUDA the difference is rounded and the rest is wide: the absolute value is a float's.
define(
    "smooth_l1_loss",
    "T x, T y, T beta",
    _rounded(
        unlike_cuda(
            "T b = H(beta), z = fabs(H(x - y)); return z < b ? H(H(T(0.5) * z) * z) / b : z - H(T(0.5) * b);",
            "T b = R(beta), z = fabs(R(x - y)); return z < b ? T(0.5) * z * z / b : z - R(T(0.5) * b);",
        )
    ),
    lambda x, y, beta: _ATEN.smooth_l1_loss(x, y, NONE, beta),
    scalars=("beta",),
    same_dtypes=True,
)
define(
    "smooth_l1_loss_backward",
    "T x, T y, T g, T norm, T beta",
    _rounded(
        unlike_cuda(
            "T d = x - y; T s = fabs(d) >= beta ? (d > T(0) ? T(1) : T(-1)) : d / beta; return norm * s * g;",
            "T n = R(norm), b = R(beta), d = R(x - y); return d < -b ? -n * g : d > b ? n * g : R(R(n * d) * g) / b;",
        )
    ),
    lambda x, y, g, norm, beta: _ATEN.smooth_l1_loss_backward(g, x, y, _reduction_of(x, g, norm), beta),
    scalars=("norm", "beta"),
    same_dtypes=True,
    is_contiguous=True,
)
define(
    "huber_loss",
    "T x, T y, T delta",
    _rounded(
        unlike_cuda(
            "T b = B(delta), z = fabs(B(x - y)); return z < b ? B(T(0.5) * z) * z : b * B(z - B(T(0.5) * b));",
            "T b = R(delta), z = fabs(R(x - y)); return z < b ? T(0.5) * z * z : b * (z - R(T(0.5) * b));",
        )
    ),
    lambda x, y, delta: _ATEN.huber_loss(x, y, NONE, delta),
    scalars=("delta",),
    same_dtypes=True,
)
define(
    "huber_loss_backward",
    "T x, T y, T g, T norm, T delta",
    _rounded(
        "T n = R(norm), b = R(delta), d = R(x - y);"
        + unlike_cuda(
            "T s = fabs(d) >= b ? (d > T(0) ? b : -b) : d; return R(n * s) * g;",
            "return d < -b ? R(-n * g) * b : d > b ? R(n * g) * b : R(n * d) * g;",
        )
    ),
    lambda x, y, g, norm, delta: _ATEN.huber_loss_backward(g, x, y, _reduction_of(x, g, norm), delta),
    scalars=("norm", "delta"),
    same_dtypes=True,
    is_contiguous=True,
)
# These two lie as the input does. Of what is no probability the loss is NaN, for which torch's kernel stops the device.
define(
    "binary_cross_entropy",
    "T x, T y",
    _rounded(
        "T a = R(log(x)), b = R(log1p(-x)); a = a < T(-100) ? T(-100) : a; b = b < T(-100) ? T(-100) : b;"
        " return R(R(y - T(1)) * b) - R(y * a);"
    ),
    lambda x, y: _ATEN.binary_cross_entropy(x, y, None, NONE),
    same_dtypes=True,
    is_in_place=True,
)
define(
    "binary_cross_entropy_backward",
    "T x, T y, T g",
    _rounded("T d = R(R(T(1) - x) * x), least = R(T(1e-12f)); return R(g * R(x - y)) / (d < least ? least : d);"),
    lambda x, y, g: _ATEN.binary_cross_entropy_backward(g, x, y, None, NONE),
    same_dtypes=True,
    is_in_place=True,
)
# At zero the slope is a half: no absolute value says so.
define(
    "log_sigmoid",
    "T x",
    "T low = x < T(0) ? x : T(0); T least = x < T(0) ? x : -x; return low - log1p(exp(least));",
    _ATEN.log_sigmoid,
)
define(
    "xlogy",
    "T x, T y",
    unlike_cuda("T l = fuser_round<S>(log(y));", "T l = log(y);") + "return (x == T(0)) & (y == y) ? T(0) : x * l;",
    torch.xlogy,
    kinds=ANY_REAL,
    promotion=Promotion.INT_TO_FLOAT,
)
