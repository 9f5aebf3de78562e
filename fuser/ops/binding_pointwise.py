"""The names under which programs call torch's pointwise ops of one step, and which op each call is."""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody uses

from fuser.ops.calls import (
    Binder,
    OpCall,
    answer,
    asking_of_numbers,
    is_constant,
    is_number,
    known_of,
    tensor_first,
)
from fuser.ops.elementary import UNARY_FLOAT, clamp_to_numbers, power_function
from fuser.ops.table import OPS, cast_function, convert_function, dtype_kind, holds_number
from fuser.ops.table import op_call as _call
from fuser.ops.table import overloads as _overloads

__all__ = ["pointwise_functions", "pointwise_methods"]

_ATEN = torch.ops.aten


@functools.cache
def pointwise_methods() -> dict[str, Binder]:
    """Return what binds each method of tensors that has a row of the table, by its name."""
    found: dict[str, Binder] = {
        **{name: _unary(name) for name in _UNARY},
        **{name: _binary(name) for name in _BINARY},
        **{name: _binary_of_tensors(name) for name in _OF_TENSORS},
        **{f"__{name}__": _binary(name) for name in (*_COMPARISONS, "mul")},
        **{f"__{name.removeprefix('bitwise_')}__": _binary(name) for name in _BITWISE},
        **{name: _convert_to(dtype) for name, dtype in _CONVERSIONS.items()},
        "__rmul__": _binary("mul"), "__invert__": _unary("bitwise_not"), "__mod__": _binary("remainder"),
        "add": _bind_add, "__add__": _bind_add, "__radd__": _bind_add,
        "sub": _bind_sub, "subtract": _bind_sub, "__sub__": _bind_sub, "__rsub__": _bind_rsub,
        "div": _bind_div, "divide": _bind_div, "true_divide": _bind_div, "__truediv__": _bind_div,
        "pow": _bind_pow, "__pow__": _bind_pow,
        "clamp": _bind_clamp, "clip": _bind_clamp, "clamp_min": _bind_clamp_min, "clamp_max": _bind_clamp_max,
        "where": _bind_where_method, "relu": _unary("relu"), "masked_fill": _bind_masked_fill,
        "addcmul": _bind_addcmul, "addcdiv": _bind_addcdiv, "lerp": _bind_lerp, "to": _bind_to,
    }  # fmt: skip
    return found | {alias: found[name] for alias, name in _ALIASES.items()}


def pointwise_functions() -> dict[Any, Binder]:
    """Return what binds each function and overload that has a row of the table and no method's name in torch."""
    return {
        **{getattr(operator, name): _binary(name) for name in _COMPARISONS},
        **{getattr(operator, name): _unary(name) for name in ("neg", "abs")},
        operator.mul: _bind_product,
        operator.and_: _binary("bitwise_and"),
        operator.or_: _binary("bitwise_or"),
        operator.xor: _binary("bitwise_xor"),
        operator.invert: _unary("bitwise_not"),
        operator.mod: _binary("remainder"),
        abs: _unary("abs"),
        operator.add: _bind_add,
        operator.sub: _bind_sub,
        operator.truediv: _bind_div,
        operator.pow: _bind_pow,
        torch.where: _bind_where,
        torch.rsub: tensor_first(_bind_rsub),
        F.relu: _bind_activation("relu"),
        F.silu: _bind_activation("silu"),
        F.sigmoid: _unary("sigmoid"),
        F.tanh: _unary("tanh"),
        F.gelu: _bind_gelu,
        F.leaky_relu: _bind_leaky_relu,
        F.elu: _bind_elu,
        F.selu: _bind_selu,
        torch.selu: _bind_selu,
        F.celu: _bind_celu,
        torch.celu: _bind_celu,
        F.softplus: _bind_softplus,
        F.mish: _bind_activation("mish"),
        F.hardtanh: _bind_hardtanh,
        F.relu6: _bind_relu6,
        F.hardsigmoid: _bind_activation("hardsigmoid"),
        F.hardswish: _bind_activation("hardswish"),
        F.softsign: _bind_softsign,
        F.tanhshrink: _bind_tanhshrink,
        **{overload: _unary(name) for name in (*_UNARY, *_UNARY_ACTIVATIONS) for overload in _overloads(name)},
        **{
            overload: _binary(name)
            for name in _BINARY
            for overload in _overloads(f"{name}.Tensor", f"{name}.Scalar")
        },
        **dict.fromkeys(_overloads("add.Tensor", "add.Scalar"), _bind_add),
        **dict.fromkeys(_overloads("sub.Tensor", "sub.Scalar"), _bind_sub),
        **dict.fromkeys(_overloads("rsub.Tensor", "rsub.Scalar"), _bind_rsub),
        **dict.fromkeys(_overloads("div.Tensor", "div.Scalar", "true_divide.Tensor"), _bind_div),
        **dict.fromkeys(_overloads("pow.Tensor_Tensor", "pow.Tensor_Scalar", "pow.Scalar"), _bind_pow),
        **dict.fromkeys(_overloads("clamp", "clamp.Tensor", "clip", "clip.Tensor"), _bind_clamp),
        **dict.fromkeys(_overloads("clamp_min", "clamp_min.Tensor"), _bind_clamp_min),
        **dict.fromkeys(_overloads("clamp_max", "clamp_max.Tensor"), _bind_clamp_max),
        **dict.fromkeys(
            _overloads("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar"), _bind_where
        ),
        **{overload: _binary_of_tensors(name) for name in _OF_TENSORS for overload in _overloads(name)},
        _ATEN.leaky_relu.default: _bind_leaky_relu,
        _ATEN.elu.default: _bind_scaled_elu,
        _ATEN.selu.default: _bind_selu,
        _ATEN.celu.default: _bind_celu,
        _ATEN.softplus.default: _bind_softplus,
        _ATEN.hardtanh.default: _bind_hardtanh,
        _ATEN.relu6.default: _bind_relu6,
        _ATEN.addcmul.default: _bind_addcmul,
        _ATEN.addcdiv.default: _bind_addcdiv,
        **dict.fromkeys(_overloads("lerp.Tensor", "lerp.Scalar"), _bind_lerp),
        _ATEN.masked_fill.Scalar: _bind_masked_fill,
        _ATEN.gelu.default: _bind_gelu,
        _ATEN.gelu_backward.default: _bind_gelu_backward,
        _ATEN.threshold_backward.default: _bind_threshold_backward,
        **{overload: _binary(name) for name in ("sigmoid_backward", "tanh_backward", "silu_backward")
           for overload in _overloads(name)},
        _ATEN._to_copy.default: _bind_to_copy,
        torch.ops.prims.convert_element_type.default: _bind_convert_element_type,
        _ATEN.to.dtype: _bind_to,
    }  # fmt: skip


_UNARY = (
    *UNARY_FLOAT, "neg", "abs", "reciprocal", "square", "sigmoid", "floor", "ceil", "trunc", "round", "frac", "sign",
    "isnan", "isinf", "isfinite", "logical_not", "bitwise_not", "sgn", "signbit", "isposinf", "isneginf",
)  # fmt: skip
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_BITWISE = ("bitwise_and", "bitwise_or", "bitwise_xor")
_UNARY_ACTIVATIONS = ("relu", "silu", "mish", "hardsigmoid", "hardswish")
# ATen has these for two tensors, and for a tensor and a number.
_BINARY = ("mul", *_COMPARISONS, *_BITWISE, "fmod", "remainder", "copysign")
_OF_TENSORS = (
    "maximum", "minimum", "atan2", "hypot", "logaddexp", "logical_and", "logical_or", "logical_xor", "fmax", "fmin",
)  # fmt: skip
# From the other names that torch has for an op.
_ALIASES = {
    "multiply": "mul", "negative": "neg", "absolute": "abs", "fix": "trunc", "arctan2": "atan2",
    "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne",
    **{f"arc{name[1:]}": name for name in ("asin", "acos", "atan", "asinh", "acosh", "atanh")},
}  # fmt: skip
_CONVERSIONS = {
    "float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16,
    "bool": torch.bool, "int": torch.int32, "long": torch.int64, "short": torch.int16, "char": torch.int8,
    "byte": torch.uint8,
}  # fmt: skip


def _unary(name: str) -> Binder:
    def bind(input: Any) -> OpCall:  # noqa: A002 - torch's own parameter name
        return _call(name, input)

    return bind


def _binary(name: str) -> Binder:
    def bind(input: Any, other: Any) -> OpCall:  # noqa: A002
        return _call(name, input, other)

    return bind


def _binary_of_tensors(name: str) -> Binder:
    def bind(input: Any, other: Any) -> OpCall | None:  # noqa: A002
        return None if is_number(input) or is_number(other) else _call(name, input, other)

    return bind


def _bind_product(input: Any, other: Any) -> OpCall:  # noqa: A002
    # ``2 * x`` is x.mul(2) in torch.
    return _call("mul", other, input) if is_number(input) else _call("mul", input, other)


def _bind_add(input: Any, other: Any, *, alpha: Any = 1) -> OpCall | None:  # noqa: A002
    # torch has its own error for a bool, where the result is none.
    return None if isinstance(alpha, bool) else _call("add", input, other, alpha=alpha)


def _bind_sub(input: Any, other: Any, *, alpha: Any = 1) -> OpCall | None:  # noqa: A002
    is_plain = is_constant(alpha) and not isinstance(alpha, bool)
    return _call("sub", input, other, minus_alpha=-alpha) if is_plain else None


def _bind_rsub(input: Any, other: Any, alpha: Any = 1) -> OpCall | None:  # noqa: A002
    return _bind_sub(other, input, alpha=alpha)


def _bind_div(input: Any, other: Any, *, rounding_mode: Any = None) -> OpCall | None:  # noqa: A002
    if rounding_mode is not None:
        return None
    if is_number(input):
        # ``2 / x`` is x.reciprocal() * 2 in torch.
        return _call("mul", _call("reciprocal", other), input)
    # A complex number that is no constant is found when the dtypes are.
    is_real = is_number(other) and not isinstance(other, complex)
    return _call("div_number" if is_real else "div", input, other)


def _bind_pow(input: Any, exponent: Any) -> OpCall:  # noqa: A002
    if is_constant(exponent):
        return OpCall(power_function(exponent), (input, exponent))
    return _call("pow_number" if is_number(exponent) else "pow", input, exponent)


def _bind_clamp(input: Any, min: Any = None, max: Any = None) -> OpCall | None:  # noqa: A002
    if min is None and max is None:
        return None
    if min is None:
        return _bind_clamp_max(input, max)
    if max is None:
        return _bind_clamp_min(input, min)
    # torch has its own error for a number beside a tensor.
    return None if is_number(min) != is_number(max) else _call_clamp("clamp", input, min, max)


def _bind_clamp_min(input: Any, min: Any) -> OpCall:  # noqa: A002
    return _call_clamp("clamp_min", input, min)


def _bind_clamp_max(input: Any, max: Any) -> OpCall:  # noqa: A002
    return _call_clamp("clamp_max", input, max)


def _call_clamp(name: str, input: Any, *bounds: Any) -> OpCall:  # noqa: A002
    if all(map(is_number, bounds)):
        return OpCall(clamp_to_numbers(name), (input, *bounds))
    return _call(name, input, *bounds)


def _bind_where(condition: Any, input: Any, other: Any) -> OpCall:  # noqa: A002
    return _call("where", condition, input, other)


def _bind_where_method(self: Any, condition: Any, other: Any) -> OpCall:
    return _call("where", condition, self, other)


_GELU = {"none": "gelu", "tanh": "gelu_tanh"}


def _bind_activation(name: str) -> Binder:
    def bind(input: Any, inplace: bool = False) -> OpCall | None:  # noqa: A002
        return None if inplace else _call(name, input)

    return bind


def _bind_gelu(input: Any, approximate: str = "none") -> OpCall | None:  # noqa: A002
    name = _GELU.get(approximate)
    return _call(name, input) if name else None


def _bind_leaky_relu(input: Any, negative_slope: Any = 0.01, inplace: bool = False) -> OpCall | None:  # noqa: A002
    return None if inplace else _call("leaky_relu", input, negative_slope=negative_slope)


def _bind_elu(input: Any, alpha: Any = 1.0, inplace: bool = False) -> OpCall | None:  # noqa: A002
    return None if inplace else _bind_scaled_elu(input, alpha)


def _bind_scaled_elu(input: Any, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> OpCall:  # noqa: A002
    return _call("elu", input, alpha=alpha, scale=scale, input_scale=input_scale)


# Klambauer et al., Self-Normalizing Neural Networks (2017), as many digits as ATen has.
_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946


def _bind_selu(input: Any, inplace: bool = False) -> OpCall | None:  # noqa: A002
    return None if inplace else _bind_scaled_elu(input, _SELU_ALPHA, _SELU_SCALE)


def _bind_celu(input: Any, alpha: Any = 1.0, inplace: bool = False) -> OpCall | None:  # noqa: A002
    # torch has its own error for a division by zero.
    is_refused = inplace or not is_constant(alpha) or alpha == 0
    return None if is_refused else _bind_scaled_elu(input, alpha, 1.0, 1.0 / alpha)


def _bind_softplus(input: Any, beta: Any = 1.0, threshold: Any = 20.0) -> OpCall:  # noqa: A002
    return _call("softplus", input, beta=beta, threshold=threshold)


def _are_ordered(low: Any, high: Any) -> bool:
    return not any(isinstance(item, complex) for item in (low, high)) and bool(low <= high)


@asking_of_numbers(_are_ordered, "min_val", "max_val")
def _bind_hardtanh(input: Any, min_val: Any = -1.0, max_val: Any = 1.0, inplace: bool = False) -> OpCall | None:  # noqa: A002
    # torch has its own error for bounds in the wrong order, and makes all elements NaN if one is.
    is_refused = inplace or not answer(_are_ordered, min_val, max_val)
    return None if is_refused else _call("hardtanh", input, min_val=min_val, max_val=max_val)


def _bind_relu6(input: Any, inplace: bool = False) -> OpCall | None:  # noqa: A002
    return _bind_hardtanh(input, 0.0, 6.0, inplace)


def _bind_softsign(input: Any) -> OpCall:  # noqa: A002
    return _call("div", input, _call("add", _call("abs", input), 1, alpha=1))


def _bind_tanhshrink(input: Any) -> OpCall:  # noqa: A002
    return _call("sub", input, _call("tanh", input), minus_alpha=-1)


def _bind_addcmul(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> OpCall:  # noqa: A002
    return _call("addcmul", input, tensor1, tensor2, value=value)


def _bind_addcdiv(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> OpCall:  # noqa: A002
    return _call("addcdiv", input, tensor1, tensor2, value=value)


def _bind_lerp(input: Any, end: Any, weight: Any) -> OpCall | None:  # noqa: A002
    return None if is_number(input) or is_number(end) else _call("lerp", input, end, weight)


def _fits(number: Any) -> bool:
    # torch refuses a number that the dtype cannot hold: these every dtype of floats can.
    if isinstance(number, complex):
        return False
    return bool(abs(number) <= 65504 or abs(number) == math.inf or number != number)


@asking_of_numbers(_fits, "value")
def _bind_masked_fill(input: Any, mask: Any, value: Any) -> OpCall | None:  # noqa: A002
    known = known_of(input)
    is_served = known is None or dtype_kind(known.dtype) in OPS["masked_fill"].kinds
    is_held = known is not None and is_constant(value) and holds_number(known.dtype, value)
    return _call("masked_fill", input, mask, value=value) if is_served and (is_held or answer(_fits, value)) else None


def _bind_gelu_backward(grad_output: Any, self: Any, *, approximate: str = "none") -> OpCall | None:
    name = _GELU.get(approximate)
    return _call(f"{name}_backward", grad_output, self) if name else None


def _bind_threshold_backward(grad_output: Any, self: Any, threshold: Any) -> OpCall:
    return _call("threshold_backward", self, grad_output, threshold=threshold)


def _bind_to_copy(self: Any, *, dtype: Any = None, layout: Any = None, device: Any = None) -> OpCall | None:
    # Autograd names all of them.
    stays = device is None or device == getattr(getattr(self, "meta", {}).get("val"), "device", None)
    is_cast = isinstance(dtype, torch.dtype) and layout in (None, torch.strided) and stays
    return OpCall(cast_function(dtype), (self,)) if is_cast else None


def _bind_convert_element_type(self: Any, dtype: torch.dtype) -> OpCall:
    return OpCall(cast_function(dtype), (self,))


def _bind_to(self: Any, dtype: Any, non_blocking: Any = False, copy: Any = False) -> OpCall | None:  # noqa: ARG001
    make = cast_function if copy is True else convert_function
    return OpCall(make(dtype), (self,)) if isinstance(dtype, torch.dtype) and type(copy) is bool else None


def _convert_to(dtype: torch.dtype) -> Binder:
    def bind(self: Any) -> OpCall:
        return OpCall(convert_function(dtype), (self,))

    return bind
