"""Activation functions and their derivatives."""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody uses

from fuser.ops.table import REAL, define, unlike_cuda
from fuser.plain_torch import plain_torch

_ATEN = torch.ops.aten

# --- activations and their derivatives --------------------------------------------------------------------------
define(
    "relu",
    "T x",
    # A zero keeps its sign on the CPU.
    unlike_cuda("return x < T(0) ? T(0) : x;", "return x != x || x > T(0) ? x : T(0);"),
    torch.relu,
    kinds=REAL,
)
define("silu", "T x", "return x / (T(1) + exp(-x));", F.silu)
define("gelu", "T x", f"return x * T(0.5) * (T(1) + erf(x * T({math.sqrt(0.5)!r})));", F.gelu)
_BETA = f"T({math.sqrt(2) * (2 / math.sqrt(math.pi)) * 0.5!r})"
define(
    "gelu_tanh",
    "T x",
    f"T inner = {_BETA} * (x + T(0.044715) * (x * x * x)); return T(0.5) * x * (T(1) + tanh(inner));",
    lambda x: F.gelu(x, approximate="tanh"),
)
define(
    "leaky_relu",
    "T x, T negative_slope",
    "return x > T(0) ? x : x * negative_slope;",
    F.leaky_relu,
    scalars=("negative_slope",),
)
# The general form of ELU, SELU and CELU.
define(
    "elu",
    "T x, T alpha, T scale, T input_scale",
    # NaN goes the way that it goes in torch's derivative.
    unlike_cuda("bool is_low = x < T(0);", "bool is_low = x <= T(0);")
    + "return is_low ? expm1(x * input_scale) * (alpha * scale) : x * scale;",
    _ATEN.elu,
    scalars=("alpha", "scale", "input_scale"),
)
define(
    "softplus",
    "T x, T beta, T threshold",
    "return x * beta > threshold ? x : log1p(exp(x * beta)) / beta;",
    F.softplus,
    scalars=("beta", "threshold"),
)
define("mish", "T x", "return x * tanh(log1p(exp(x)));", F.mish)
define(
    "hardtanh",
    "T x, T min_val, T max_val",
    unlike_cuda(
        "T low = fuser_round<S>(min_val), high = fuser_round<S>(max_val);"
        " T y = x < low ? low : x; return y > high ? high : y;",
        "if (x != x || min_val != min_val) return x != x ? x : min_val;"
        " return max_val != max_val ? max_val : min(max(x, min_val), max_val);",
    ),
    F.hardtanh,
    scalars=("min_val", "max_val"),
)
# Of a double, too, ATen's CUDA kernels take the sixth as a float; its CPU kernels divide.
_GATE = "T y = x + T(3); y = y < T(0) ? T(0) : y; y = T(6) < y ? T(6) : y;"
_SIXTH = "T(1.0f / 6.0f)"
define("hardsigmoid", "T x", _GATE + unlike_cuda("return y / T(6);", f"return y * {_SIXTH};"), F.hardsigmoid)
define("hardswish", "T x", _GATE + unlike_cuda("return x * y / T(6);", f"return x * y * {_SIXTH};"), F.hardswish)
# ATen's iterator has the operands in this order, which decides the strides of the result.
define(
    "threshold_backward",
    "T x, T g, T threshold",
    # On CUDA it is a number of the dtype.
    "\n#ifdef __CUDACC__\nthreshold = fuser_round<S>(threshold);\n#endif\nreturn x <= threshold ? T(0) : g;",
    lambda x, g, threshold: _ATEN.threshold_backward(g, x, threshold),
    kinds=REAL,
    scalars=("threshold",),
)
define(
    "sigmoid_backward",
    "T g, T y",
    "return fuser_half_step<S>(g * fuser_half_step<S>(T(1) - y)) * y;",
    _ATEN.sigmoid_backward,
)
# On the CPU as the GPU's compiler contracts it for float; without fma nearly all digits go where y is near 1.
define(
    "tanh_backward",
    "T g, T y",
    "\n#ifdef __CUDACC__\nreturn g * fuser_round<S>(T(1) - fuser_round<S>(y * y));\n"
    "#else\nreturn g * fma(-y, y, T(1));\n#endif\n",
    _ATEN.tanh_backward,
)
define(
    "silu_backward",
    "T g, T x",
    "T s = T(1) / (T(1) + exp(-x)); return g * s * (T(1) + x * (T(1) - s));",
    _ATEN.silu_backward,
)
define(
    "gelu_backward",
    "T g, T x",
    f"T cdf = T(0.5) * (T(1) + erf(x * T({math.sqrt(0.5)!r})));"
    f" T pdf = exp(T(-0.5) * x * x) * T({(2 / math.sqrt(math.pi)) * math.sqrt(0.5) * 0.5!r});"
    " return g * (cdf + x * pdf);",
    _ATEN.gelu_backward,
)
define(
    "gelu_tanh_backward",
    "T g, T x",
    f"T square = x * x; T inner = {_BETA} * (x + T(0.044715) * (square * x)); T t = tanh(inner);"
    f" T left = T(0.5) * x; T right = T(1) + t; T slope = {_BETA} * (T(1) + T(3) * T(0.044715) * square);"
    " return g * (T(0.5) * right + left * (T(1) - t * t) * slope);",
    lambda g, x: _ATEN.gelu_backward(g, x, approximate="tanh"),
)


# --- derivatives that only graphs call ------------------------------------------------------------------------------
def _where_nan_differs(cuda: str, cpu: str) -> str:
    # ATen's CPU kernels choose among vectors, and NaN goes another way there.
    return f"\n#ifdef __CUDACC__\n{cuda}\n#else\n{cpu}\n#endif\n"


define(
    "elu_backward",
    "T g, T x, T alpha, T scale, T input_scale",
    "T negative = alpha * scale;"
    + _where_nan_differs("bool is_low = x <= T(0);", "bool is_low = !(x > T(0));")
    + "return is_low ? g * input_scale * negative * exp(x * input_scale) : g * scale;",
    lambda g, x, alpha, scale, input_scale: _ATEN.elu_backward(g, alpha, scale, input_scale, False, x),
    scalars=("alpha", "scale", "input_scale"),
)
# Of what the op returned, as calls in place keep it, with a scale of 1: of another, alpha times the scale, which is an
# argument of ATen's kernel, would be contracted with the sum here.
define(
    "elu_result_backward",
    "T g, T y, T alpha, T input_scale",
    _where_nan_differs("bool is_low = y <= T(0);", "bool is_low = !(y > T(0));")
    + "return is_low ? g * input_scale * (y + alpha) : g;",
    lambda g, y, alpha, input_scale: _ATEN.elu_backward(g, alpha, 1, input_scale, True, y),
    scalars=("alpha", "input_scale"),
)
define(
    "hardtanh_backward",
    "T g, T x, T min_val, T max_val",
    _where_nan_differs(
        "return x <= min_val || x >= max_val ? T(0) : g;", "return x > min_val && x < max_val ? g : T(0);"
    ),
    _ATEN.hardtanh_backward,
    scalars=("min_val", "max_val"),
)
define(
    "hardsigmoid_backward",
    "T g, T x",
    "return x > T(-3) && x < T(3) ? g * T(1.0f / 6.0f) : T(0);",
    _ATEN.hardsigmoid_backward,
)
define(
    "hardswish_backward",
    "T g, T x",
    _where_nan_differs("bool is_high = !(x < T(3));", "bool is_high = x >= T(3);")
    + "return x <= T(-3) ? T(0) : is_high ? g : g * (x / T(3) + T(0.5));",
    _ATEN.hardswish_backward,
)
define(
    "leaky_relu_backward",
    "T x, T g, T negative_slope",
    "return x > T(0) ? g : g * negative_slope;",
    lambda x, g, negative_slope: _ATEN.leaky_relu_backward(g, x, negative_slope, False),
    scalars=("negative_slope",),
)
define(
    "softplus_backward",
    "T g, T x, T beta, T threshold",
    "T z = exp(x * beta); return x * beta > threshold ? g : g * z / (z + T(1));",
    _ATEN.softplus_backward,
    scalars=("beta", "threshold"),
)
define(
    "mish_backward",
    "T g, T x",
    "T s = T(1) / (T(1) + exp(-x)); T t = tanh(log1p(exp(x))); return g * (t + x * s * (T(1) - t * t));",
    _ATEN.mish_backward,
    same_dtypes=True,
)
# Its result lies as the gradient does.
define(
    "log_sigmoid_backward",
    "T g, T x",
    "bool is_low = x < T(0); T most = is_low ? T(1) : T(0); T sign = is_low ? T(1) : -T(1);"
    # On the CPU the forward op has kept it in the dtype.
    + unlike_cuda("T z = fuser_round<S>(exp(-fabs(x)));", "T z = exp(-fabs(x));")
    + "return g * (most - sign * (z / (T(1) + z)));",
    # The buffer as torch has it: its exponential is not always torch.exp's.
    lambda g, x: _ATEN.log_sigmoid_backward(g, x, _ATEN.log_sigmoid_forward(torch.detach(x))[1]),
)
# Bounds are numbers of the dtype.
define(
    "hardshrink",
    "T x, T lambd",
    "T bound = fuser_round<S>(lambd); return x >= -bound && x <= bound ? T(0) : x;",
    _ATEN.hardshrink,
    scalars=("lambd",),
)


def _softshrink() -> str:
    rounded = "T bound = fuser_round<S>(lambd);"
    # Since torch 2.15 ATen's CPU kernel rounds its bound to the dtype, too.
    with plain_torch():
        x = torch.full((64,), 1 / 3, dtype=torch.bfloat16, device="cpu")
        is_rounded = not _ATEN.softshrink(x, 1 / 3).any().item()
    bound = rounded if is_rounded else unlike_cuda("T bound = lambd;", rounded)
    return f"{bound} return x != x ? x : x > bound ? x - bound : x < -bound ? x + bound : T(0);"


define("softshrink", "T x, T lambd", _softshrink, _ATEN.softshrink, scalars=("lambd",))
define(
    "shrink_backward",
    "T g, T x, T lambd",
    "T bound = fuser_round<S>(lambd);"
    + _where_nan_differs("return x >= -bound && x <= bound ? T(0) : g;", "return x > bound || x < -bound ? g : T(0);"),
    _ATEN.hardshrink_backward,
    scalars=("lambd",),
)
define(
    "threshold",
    "T x, T threshold, T value",
    unlike_cuda(
        # What is compared is wider.
        "return x <= threshold ? fuser_round<S>(value) : x;",
        "return x <= fuser_round<S>(threshold) ? fuser_round<S>(value) : x;",
    ),
    _ATEN.threshold,
    kinds=REAL,
    scalars=("threshold", "value"),
)
define("prelu", "T x, T weight", "return x > T(0) ? x : weight * x;", _ATEN._prelu_kernel, same_dtypes=True)


def _alike(*operands: Any) -> tuple[Any, list[Any]]:
    # Memory for a result, and the operands with its shape and dtype: they may be broadcast, and lie otherwise.
    like = torch.empty_like(functools.reduce(operator.mul, operands))
    return like, [torch.broadcast_to(item, like.shape).to(like.dtype) for item in operands]


def _eager_glu(a: Any, b: Any) -> Any:
    like, halves = _alike(a, b)
    return like.copy_(F.glu(torch.stack(halves), 0)[0])


def _eager_glu_backward(half: int, g: Any, a: Any, b: Any) -> Any:
    like, (g, *halves) = _alike(g, a, b)
    return like.copy_(_ATEN.glu_backward(g[None], torch.stack(halves), 0)[half])


define("glu", "T a, T b", "return a * (T(1) / (T(1) + exp(-b)));", _eager_glu)
define(
    "glu_backward_first",
    "T g, T b",
    "return T(1) / (T(1) + exp(-b)) * g;",
    lambda g, b: _eager_glu_backward(0, g, b, b),
)
define(
    "glu_backward_second",
    "T g, T a, T b",
    "T s = T(1) / (T(1) + exp(-b)); return (T(1) - s) * s * g * a;",
    functools.partial(_eager_glu_backward, 1),
)
define(
    "native_dropout_backward",
    "T g, bool mask, T scale",
    "return T(mask) * g * scale;",
    _ATEN.native_dropout_backward,
    scalars=("scale",),
    unpromoted=("mask",),
)
