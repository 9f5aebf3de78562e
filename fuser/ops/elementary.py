"""Arithmetic, elementary functions, rounding, logic and selection."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from fuser.cxx.functor import parse_functor
from fuser.function import Function, Promotion
from fuser.ops.table import (
    ANY_REAL,
    BITS,
    FLOAT,
    OPS,
    REAL,
    define,
    define_test,
    define_unary_float,
    parse_entry,
    unlike_cuda,
)


def _eager_add(a: Any, b: Any, *, alpha: Any) -> Any:
    # torch.add takes no number first, and torch.rsub no bool.
    if isinstance(a, torch.Tensor):
        return torch.add(a, b, alpha=alpha)
    return torch.add(b, a) if alpha == 1 else torch.rsub(b, int(a) if isinstance(a, bool) else a, alpha=-alpha)


def _eager_sub(a: Any, b: Any, *, minus_alpha: Any) -> Any:
    is_tensor = isinstance(a, torch.Tensor)
    return torch.sub(a, b, alpha=-minus_alpha) if is_tensor else torch.rsub(b, a, alpha=-minus_alpha)


# --- arithmetic -------------------------------------------------------------------------------------------------
def _scaled_sum(alpha: str) -> str:
    # On the CPU alpha is a number of the dtype.
    return unlike_cuda(f"return fuser_multiply_add(fuser_round<S>({alpha}), b, a);", f"return a + {alpha} * b;")


define("add", "T a, T b, T alpha", _scaled_sum("alpha"), _eager_add, kinds=ANY_REAL, scalars=("alpha",))
# ATen adds with the negated alpha, and so do the bindings below.
define("sub", "T a, T b, T minus_alpha", _scaled_sum("minus_alpha"), _eager_sub, kinds=REAL, scalars=("minus_alpha",))
define("mul", "T a, T b", "return a * b;", operator.mul, kinds=ANY_REAL)
define("div", "T a, T b", "return a / b;", torch.div, kinds=ANY_REAL, promotion=Promotion.INT_TO_FLOAT)
# ATen's CUDA kernel multiplies by the reciprocal, in double, when the divisor is one number; its CPU kernel divides.
define(
    "div_number",
    "T a, double b",
    "\n#ifdef __CUDACC__\nreturn a * T(1.0 / b);\n#else\nreturn a / T(b);\n#endif\n",
    torch.div,
    kinds=ANY_REAL,
    promotion=Promotion.INT_TO_FLOAT,
    unpromoted=("b",),
)
define("neg", "T x", unlike_cuda("return fuser_negate(x);", "return -x;"), torch.neg, kinds=REAL)
define("abs", "T x", "return abs(x);", torch.abs, kinds=REAL)
define("reciprocal", "T x", "return T(1) / x;", torch.reciprocal, kinds=ANY_REAL, promotion=Promotion.INT_TO_FLOAT)
define("square", "T x", "return x * x;", torch.square, kinds=REAL)

# --- elementary functions ---------------------------------------------------------------------------------------
UNARY_FLOAT = tuple(
    "exp exp2 expm1 log log10 log1p log2 sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf"
    " erfc".split()
)
for _name in UNARY_FLOAT:
    define_unary_float(_name, f"return {_name}(x);", getattr(torch, _name))
define_unary_float("sigmoid", "return T(1) / (T(1) + exp(-x));", torch.sigmoid)
define("atan2", "T a, T b", "return atan2(a, b);", torch.atan2, kinds=ANY_REAL, promotion=Promotion.INT_TO_FLOAT)
define("hypot", "T a, T b", "return hypot(a, b);", torch.hypot)
define(
    "logaddexp",
    "T a, T b",
    "return (a == T(INFINITY) || a == -T(INFINITY)) && a == b ? a : (a > b ? a : b) + log1p(exp(-fabs(a - b)));",
    torch.logaddexp,
)
# gcc makes pow(a, 0.5) a square root, which has other values at -0 and -infinity.
define(
    "pow",
    "T a, T b",
    "\n#ifndef __CUDACC__\nif (b == T(0.5) && (a == T(0) || a == -T(INFINITY))) return fabs(a);\n#endif\n"
    "return pow(a, b);",
    torch.pow,
    numbers_have_layout=False,
)
# ATen has formulas for these exponents, and looks for the last three after it has rounded the exponent to the dtype.
_ROUNDED_FIRST: dict[complex, str] = {
    2: "a * a",
    3: "fuser_bfloat16_step<S>(a * a) * a",
    -2: "T(1) / fuser_bfloat16_step<S>(a * a)",
}
_POWERS: dict[complex, str] = {0: "T(1)", 1: "a", 0.5: "sqrt(a)", -0.5: "rsqrt(a)", -1: "T(1) / a", **_ROUNDED_FIRST}
# Of a zero and of minus infinity, as pow itself.
_ROOTS: dict[complex, str] = {0.5: "fabs(a)", -0.5: "T(1) / fabs(a)"}
# Of an exponent that only a call knows.
define(
    "pow_number",
    "T a, T b",
    "\n#ifdef __CUDACC__\nT e = fuser_round<S>(b); "
    + " ".join(f"if ({'e' if k in _ROUNDED_FIRST else 'b'} == T({k})) return {text};" for k, text in _POWERS.items())
    + " return pow(a, e);\n#else\nreturn fuser_power<S>(a, b);\n#endif\n",
    torch.pow,
    numbers_have_layout=False,
    # gcc asks whether the exponent is a constant once this is inlined: inlined late, others pass for one, too.
    result="__forceinline__ T",
)


def power_function(exponent: complex) -> Function:
    """Return the op ``pow_number`` for an exponent that the program's text has: ATen's formula, or pow itself."""
    general = OPS["pow_number"].function
    if exponent in _POWERS:
        # Entries' names tell derivatives which formula it is: aten_pow_minus_0_5.
        name = f"pow_{exponent:g}".replace("-", "minus_").replace(".", "_")
        text = f"return {_POWERS[exponent]};"
        if exponent in _ROOTS:
            # Of half, ATen's CPU kernel has none.
            is_other = "fuser_is_half<S> && (a == T(0) || a == -T(INFINITY))"
            text = unlike_cuda(f"if ({is_other}) return {_ROOTS[exponent]}; {text}", text)
        return replace(general, functor=parse_entry(name, "T a, T b", text))
    if any(abs(exponent - other) < 1 / 64 for other in _ROUNDED_FIRST):
        # In bfloat16 it may be one of them.
        return general
    # The derivative of this one is a formula, too.
    name = "pow_4" if exponent == 4 else "pow_any"
    return replace(general, functor=parse_entry(name, "T a, T b", "return pow(a, fuser_round<S>(b));"))


def is_first_power(function: Function) -> bool:
    """Whether it is that of the exponent 1: a copy."""
    return function.op == "pow_number" and function.functor.entry == "aten_pow_1"


# --- rounding and signs -----------------------------------------------------------------------------------------
for _name in ("floor", "ceil", "trunc"):
    define(_name, "T x", f"return {_name}(x);", getattr(torch, _name))
define("round", "T x", "return nearbyint(x);", torch.round)
define("frac", "T x", "return x - trunc(x);", torch.frac)
define("sign", "T x", "return T(int(T(0) < x) - int(x < T(0)));", torch.sign, kinds=REAL)
# The same, but of complex numbers, which stay torch's.
define("sgn", "T x", "return T(int(T(0) < x) - int(x < T(0)));", torch.sgn, kinds=REAL)
define(
    "copysign",
    "T a, T b",
    "return copysign(a, b);",
    torch.copysign,
    kinds=ANY_REAL,
    promotion=Promotion.INT_TO_FLOAT,
)
define("fmod", "T a, T b", "return fmod(a, b);", torch.fmod)
define(
    "remainder",
    "T a, T b",
    "T r = fmod(a, b); if (r != T(0) && (b < T(0)) != (r < T(0))) r += b; return r;",
    torch.remainder,
)


# --- multiply-adds ----------------------------------------------------------------------------------------------
def _of_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    # Of a function that takes no number in place of a tensor.
    def call(a: Any, *others: Any, **scalars: Any) -> Any:
        tensors = (item if isinstance(item, torch.Tensor) else a.new_full((), item) for item in others)
        return function(a, *tensors, **scalars)

    return call


define(
    "addcmul",
    "T a, T b, T c, T value",
    unlike_cuda(
        "return fuser_multiply_add<T>(value * b, c, a);",
        # Times 1, ATen's kernel adds the product before it is rounded.
        "T x = value == T(1) ? b : value; T y = value == T(1) ? c : b * c; return a + x * y;",
    ),
    _of_tensors(torch.addcmul),
    kinds=REAL,
    scalars=("value",),
)
define(
    "addcdiv",
    "T a, T b, T c, T value",
    unlike_cuda("return a + value * b / c;", "return a + value * (b / c);"),
    _of_tensors(torch.addcdiv),
    scalars=("value",),
)
define(
    "lerp",
    "T a, T b, T weight",
    unlike_cuda(
        "bool is_small = fabs(weight) < T(0.5);"
        " return fuser_multiply_add(is_small ? weight : weight - T(1), b - a, is_small ? a : b);",
        "return fabs(weight) < T(0.5) ? a + weight * (b - a) : b - (b - a) * (T(1) - weight);",
    ),
    torch.lerp,
    numbers_have_layout=False,
    same_dtypes=True,
)

# --- tests and logic --------------------------------------------------------------------------------------------
define_test("isnan", "T x", "return x != x;", torch.isnan, FLOAT)
define_test("isinf", "T x", "return fabs(x) == T(INFINITY);", torch.isinf, FLOAT)
define_test("isfinite", "T x", "return fabs(x) < T(INFINITY);", torch.isfinite, FLOAT)
define_test("logical_not", "T x", "return !x;", torch.logical_not)
define_test("logical_and", "T a, T b", "return a && b;", torch.logical_and)
define_test("logical_or", "T a, T b", "return a || b;", torch.logical_or)
define_test("logical_xor", "T a, T b", "return !a != !b;", torch.logical_xor)
# ~true is true in C++; all bits of T(-1) are set, of a bool too.
define("bitwise_not", "T x", "return x ^ T(-1);", torch.bitwise_not, kinds=BITS)
for _name, _symbol in (("and", "&"), ("or", "|"), ("xor", "^")):
    define(f"bitwise_{_name}", "T a, T b", f"return a {_symbol} b;", getattr(torch, f"bitwise_{_name}"), kinds=BITS)

# --- selection; NaN wins, as in torch ---------------------------------------------------------------------------
define(
    "where",
    "bool condition, T a, T b",
    "return condition ? a : b;",
    torch.where,
    kinds=ANY_REAL | {"complex"},
    unpromoted=("condition",),
)
define(
    "masked_fill",
    "T x, bool mask, T value",
    "return mask ? value : x;",
    torch.masked_fill,
    scalars=("value",),
    unpromoted=("mask",),
    # ATen fills a contiguous copy.
    is_contiguous=True,
)
for _name, _symbol in (("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="), ("eq", "=="), ("ne", "!=")):
    define_test(_name, "T a, T b", f"return a {_symbol} b;", getattr(operator, _name))
# Of two zeros ATen's CUDA kernels take the positive one for the larger; its vectors on the CPU, and its CUDA kernels of
# lists, the second one.
_MORE, _LESS = "return a != a || a > b ? a : b;", "return a != a || a < b ? a : b;"
_LARGER = unlike_cuda(_MORE, "return a != a ? a : b != b ? b : max(a, b);")
_SMALLER = unlike_cuda(_LESS, "return a != a ? a : b != b ? b : min(a, b);")
_OF_LISTS = {"maximum": _MORE, "clamp_min": _MORE, "minimum": _LESS, "clamp_max": _LESS}
define("maximum", "T a, T b", _LARGER, torch.maximum, kinds=ANY_REAL)
define("minimum", "T a, T b", _SMALLER, torch.minimum, kinds=ANY_REAL)
define("clamp_min", "T a, T b", _LARGER, torch.clamp_min, kinds=REAL, numbers_have_layout=False)
define("clamp_max", "T a, T b", _SMALLER, torch.clamp_max, kinds=REAL, numbers_have_layout=False)
define(
    "clamp",
    "T x, T low, T high",
    "if (x != x || low != low) return x != x ? x : low;"
    + unlike_cuda(
        "T y = x > low ? x : low; return y < high ? y : high;",
        "return high != high ? high : min(max(x, low), high);",
    ),
    torch.clamp,
    kinds=REAL,
    numbers_have_layout=False,
)


def of_lists(function: Function) -> Function:
    """Return what ATen's CUDA kernels of lists have for an op: another functor for largest and smallest elements."""
    text = _OF_LISTS.get(function.op or "")
    if text is None:
        return function
    return replace(function, functor=parse_entry(function.functor.entry.removeprefix("aten_"), "T a, T b", text))


# What equals a bound stays as it is: a zero keeps its sign. Step by step: of two conditions joined, about bounds that
# are rounded, gcc makes no vectors.
_WITHIN_NUMBERS = {
    "clamp": "T y = x < low ? low : x; y = low != low ? low : y;"
    "y = high < y ? high : y; return high != high ? high : y;",
    "clamp_min": "return a < b || b != b ? b : a;",
    "clamp_max": "return b < a || b != b ? b : a;",
}


@functools.cache
def clamp_to_numbers(name: str) -> Function:
    """Return ``clamp``, ``clamp_min`` or ``clamp_max`` for bounds that are numbers.

    On the CPU they take the other one of two equal zeros than tensors; the gradient at a bound is another one since
    torch 2.15.
    """
    general = OPS[name].function
    head, _, body = general.functor.source.partition("{")
    text = f"{head.replace(f'aten_{name}(', f'aten_{name}_number(')}{{"
    return replace(
        general, functor=parse_functor(text + unlike_cuda(_WITHIN_NUMBERS[name], body.rpartition("}")[0]) + "}")
    )
