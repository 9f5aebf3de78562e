"""Pointwise ops that programs rarely name: shifts, rounded quotients, signs and steps."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody uses

from fuser.ops.calls import (
    Binder,
    OpCall,
    answer,
    asking,
    asking_of_numbers,
    is_constant,
    is_number,
    known_of,
    tensor_first,
)
from fuser.ops.table import ANY_REAL, FLOAT, OPS, REAL, define, define_test, define_unary_float, op_call, unlike_cuda

__all__ = ["further_functions", "further_methods"]

_ATEN = torch.ops.aten
_INT = frozenset({"int"})

define(
    "left_shift",
    "T a, T b",
    "int bits = 8 * sizeof(T); return b < T(0) || b >= bits ? T(0) : T(a << b);",
    torch.bitwise_left_shift,
    kinds=_INT,
)
define(
    "right_shift",
    "T a, T b",
    "int last = 8 * sizeof(T) - 1; return b >= T(0) && b <= last ? T(a >> b) : T(-1) < T(0) ? T(a >> last) : T(0);",
    torch.bitwise_right_shift,
    kinds=_INT,
)


def _eager_div_trunc(a: Any, b: Any) -> Any:
    return torch.div(a, b, rounding_mode="trunc")


define("div_trunc", "T a, T b", "return trunc(fuser_round<S>(a / b));", _eager_div_trunc)
# As ``div_number``, but for the reciprocal, which is not computed in double.
define(
    "div_trunc_number",
    "T a, double b",
    "\n#ifdef __CUDACC__\nreturn trunc(a * (T(1) / T(b)));\n#else\nreturn trunc(a / T(b));\n#endif\n",
    _eager_div_trunc,
    unpromoted=("b",),
)
define("fmax", "T a, T b", "return fmax(a, b);", torch.fmax)
define("fmin", "T a, T b", "return fmin(a, b);", torch.fmin)
define("heaviside", "T a, T b", "return a == T(0) ? b : T(a > T(0));", torch.heaviside, kinds=REAL, same_dtypes=True)
for _name, _symbol in (("tril", "<="), ("triu", ">=")):
    define(
        _name,
        "T x, int64_t row, int64_t column, int64_t diagonal",
        f"return column - row {_symbol} diagonal ? x : T(0);",
        # Its places are torch's own.
        lambda x, row, column, diagonal, _name=_name: getattr(torch, _name)(x, diagonal),  # noqa: ARG005
        kinds=ANY_REAL | {"complex"},
        scalars=("diagonal",),
        unpromoted=("row", "column"),
        is_contiguous=True,
    )


def _eager_masked_put(x: torch.Tensor, mask: torch.Tensor, value: Any) -> torch.Tensor:
    # What is written lies as what is there, and is where the tensors are, beside which one of the host is a number.
    made = torch.where(mask, value, x)
    return torch.empty_like(x.expand(made.shape), device=made.device).copy_(made)


define(
    "fill",
    "T x, T value",
    "return value;",
    lambda x, value: _eager_masked_put(x, x.new_ones((), dtype=torch.bool), value),
    kinds=ANY_REAL | {"complex"},
    unpromoted=("value",),
)
define(
    "masked_put",
    "T x, bool mask, T value",
    "return mask ? value : x;",
    _eager_masked_put,
    kinds=ANY_REAL | {"complex"},
    unpromoted=("mask", "value"),
)
for _name, _factor in (("deg2rad", math.pi / 180), ("rad2deg", 180 / math.pi)):
    define_unary_float(_name, f"return x * T({_factor!r});", getattr(torch, _name))
define_test("signbit", "T x", "return signbit(x);", torch.signbit, FLOAT)
define_test("isposinf", "T x", "return x == T(INFINITY);", torch.isposinf, FLOAT)
define_test("isneginf", "T x", "return x == -T(INFINITY);", torch.isneginf, FLOAT)
define(
    "nan_to_num",
    "T x, T nan, T posinf, T neginf",
    "return x != x ? nan : x == T(INFINITY) ? posinf : x == -T(INFINITY) ? neginf : x;",
    torch.nan_to_num,
    scalars=("nan", "posinf", "neginf"),
)
define(
    "logit_backward",
    "T g, T x",
    unlike_cuda("T slope = fuser_round<S>(x * fuser_round<S>(T(1) - x));", "T slope = x * (T(1) - x);")
    + "return x < T(0) || x > T(1) ? T(NAN) : g / slope;",
    _ATEN.logit_backward,
)


def further_methods() -> dict[str, Binder]:
    """Return what binds each method of tensors, by its name."""
    left, right = _bind("left_shift"), _bind("right_shift")
    return {
        "bitwise_left_shift": left, "__lshift__": left, "bitwise_right_shift": right, "__rshift__": right,
        "deg2rad": _bind_unary("deg2rad"), "rad2deg": _bind_unary("rad2deg"),
        "nan_to_num": _bind_nan_to_num, "hardshrink": _bind_hardshrink,
    }  # fmt: skip


def further_functions() -> dict[Any, Binder]:
    """Return what binds each overload, and function that has no method's name."""
    methods = further_methods()
    both = {
        "left_shift": "bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar bitwise_left_shift.Scalar_Tensor"
        " __lshift__.Tensor __lshift__.Scalar",
        "right_shift": "bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar bitwise_right_shift.Scalar_Tensor"
        " __rshift__.Tensor __rshift__.Scalar",
        # Not by torch's own name: it has no derivative, and torch says so.
        "heaviside": "heaviside.default",
        "maximum": "max.other", "minimum": "min.other", "remainder": "remainder.Scalar_Tensor",
        "bitwise_and": "bitwise_and.Scalar_Tensor", "bitwise_or": "bitwise_or.Scalar_Tensor",
        "bitwise_xor": "bitwise_xor.Scalar_Tensor __xor__.Tensor __xor__.Scalar",
        "prelu": "_prelu_kernel.default", "mish_backward": "mish_backward.default",
        "hardsigmoid_backward": "hardsigmoid_backward.default", "hardswish_backward": "hardswish_backward.default",
    }  # fmt: skip
    return {
        **{_overload(name): _bind(op) for op, names in both.items() for name in names.split()},
        operator.lshift: methods["__lshift__"],
        operator.rshift: methods["__rshift__"],
        **{_overload(f"div.{kind}_mode"): _bind_div_mode for kind in ("Tensor", "Scalar")},
        **{_overload(f"{name}.default"): methods[name] for name in _OVERLOADED},
        F.softshrink: _bind_softshrink,
        _ATEN.softshrink.default: _bind_softshrink,
        _ATEN.hardshrink_backward.default: _bind_shrink_backward,
        _ATEN.softshrink_backward.default: _bind_shrink_backward,
        torch.threshold: tensor_first(_bind_threshold),
        F.threshold: _bind_threshold,
        _ATEN.threshold.default: _bind_threshold,
        _ATEN.elu_backward.default: _bind_elu_backward,
        _ATEN.hardtanh_backward.default: _bind_hardtanh_backward,
        _ATEN.leaky_relu_backward.default: _bind_leaky_relu_backward,
        _ATEN.softplus_backward.default: _bind_softplus_backward,
        _ATEN.log_sigmoid_backward.default: _bind_log_sigmoid_backward,
        _ATEN.logit_backward.default: _bind_logit_backward,
        _ATEN.native_dropout_backward.default: _bind_dropout_backward,
    }


# That every dtype has.
_LARGEST_OF_ALL = torch.finfo(torch.float16).max
# The methods whose overloads are "default".
_OVERLOADED = ("deg2rad", "rad2deg", "nan_to_num", "hardshrink")


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(_ATEN, packet), overload)


def _call(name: str, *tensors: Any, **scalars: Any) -> OpCall | None:
    return OpCall(OPS[name].function, tensors, scalars) if all(map(is_number, scalars.values())) else None


def _bind(name: str) -> Callable[..., OpCall | None]:
    def bind(input: Any, other: Any) -> OpCall | None:  # noqa: A002 - torch's own parameter name
        return _call(name, input, other)

    return bind


def _bind_unary(name: str) -> Callable[..., OpCall | None]:
    def bind(input: Any) -> OpCall | None:  # noqa: A002
        return _call(name, input)

    return bind


def _bind_div_mode(input: Any, other: Any, *, rounding_mode: Any = None) -> OpCall | None:  # noqa: A002
    # Floors have steps of their own.
    if rounding_mode != "trunc" or is_number(input) or isinstance(other, complex):
        return None
    return _call("div_trunc_number" if is_number(other) else "div_trunc", input, other)


@asking
def _bind_nan_to_num(input: Any, nan: Any = None, posinf: Any = None, neginf: Any = None) -> OpCall | None:  # noqa: A002
    found = known_of(input)
    if found is None or not found.dtype.is_floating_point:
        return None
    known = torch.finfo(found.dtype)
    return _call(
        "nan_to_num",
        input,
        nan=0.0 if nan is None else nan,
        posinf=known.max if posinf is None else posinf,
        neginf=known.min if neginf is None else neginf,
    )


def _is_held_by_all(number: Any) -> bool:
    # Of what is out of a dtype's range, or negative, torch says so.
    return not isinstance(number, complex) and 0 <= number <= _LARGEST_OF_ALL


@asking_of_numbers(_is_held_by_all, "lambd")
def _bind_softshrink(input: Any, lambd: Any = 0.5) -> OpCall | None:  # noqa: A002
    return _call("softshrink", input, lambd=lambd) if answer(_is_held_by_all, lambd) else None


def _bind_hardshrink(input: Any, lambd: Any = 0.5) -> OpCall | None:  # noqa: A002
    return _call("hardshrink", input, lambd=lambd)


def _bind_shrink_backward(grad_output: Any, input: Any, lambd: Any) -> OpCall | None:  # noqa: A002
    return _call("shrink_backward", grad_output, input, lambd=lambd)


def _bind_threshold(input: Any, threshold: Any, value: Any, inplace: bool = False) -> OpCall | None:  # noqa: A002
    return None if inplace else _call("threshold", input, threshold=threshold, value=value)


def _bind_elu_backward(
    grad_output: Any, alpha: Any, scale: Any, input_scale: Any, is_result: Any, self_or_result: Any
) -> OpCall | None:
    if is_result is False:
        return _call("elu_backward", grad_output, self_or_result, alpha=alpha, scale=scale, input_scale=input_scale)
    # torch has its own error for a negative alpha.
    is_told = is_result is True and scale == 1 and is_constant(alpha) and alpha >= 0
    return (
        _call("elu_result_backward", grad_output, self_or_result, alpha=alpha, input_scale=input_scale)
        if is_told
        else None
    )


def _bind_hardtanh_backward(grad_output: Any, self: Any, min_val: Any, max_val: Any) -> OpCall | None:
    return _call("hardtanh_backward", grad_output, self, min_val=min_val, max_val=max_val)


def _bind_leaky_relu_backward(grad_output: Any, self: Any, negative_slope: Any, self_is_result: Any) -> OpCall | None:
    # A result has the sign of what it is of, unless its slope is negative, for which torch has its own error.
    call = _call("leaky_relu_backward", self, grad_output, negative_slope=negative_slope)
    is_told = self_is_result is False or (is_constant(negative_slope) and negative_slope >= 0)
    return call if is_told else None


def _bind_softplus_backward(grad_output: Any, self: Any, beta: Any, threshold: Any) -> OpCall | None:
    return _call("softplus_backward", grad_output, self, beta=beta, threshold=threshold)


def _bind_log_sigmoid_backward(grad_output: Any, self: Any, buffer: Any) -> OpCall | None:  # noqa: ARG001
    return _call("log_sigmoid_backward", grad_output, self)


def _bind_logit_backward(grad_output: Any, self: Any, eps: Any = None) -> OpCall | None:
    return _call("logit_backward", grad_output, self) if eps is None else None


@asking
def _bind_dropout_backward(grad_output: Any, mask: Any, scale: Any) -> OpCall | None:
    known = known_of(grad_output)
    is_in_no_format = known and not known.is_contiguous and known.memory_format is torch.contiguous_format
    # CUDA's kernel writes that row-major; the CPU's keeps the strides.
    if known and is_in_no_format and known.device_type != "cpu":
        grad_output = op_call("contiguous", grad_output)
    return _call("native_dropout_backward", grad_output, mask, scale=scale)
