"""The ways a program can name an op: torch's functions and methods, Python's operators, ATen overloads, modules."""

from __future__ import annotations

import functools
import inspect
import math
import operator
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody uses

from fuser.function import Function
from fuser.ops.binding_arrangements import arrangement_functions
from fuser.ops.binding_reductions import reduction_functions, reduction_methods
from fuser.ops.binding_whole import whole_functions
from fuser.ops.calls import (
    ASKING,
    Binder,
    OpCall,
    asking,
    device_type_of,
    find_numerics,
    is_constant,
    is_number,
    known_of,
)
from fuser.ops.composites import keeps_bits
from fuser.ops.elementary import UNARY_FLOAT, clamp_to_numbers, power_function
from fuser.ops.further import further_functions
from fuser.ops.softmax import softmax_functions, softmax_methods
from fuser.ops.table import OPS, cast_function, convert_function, dtype_kind
from fuser.ops.table import op_call as _call
from fuser.ops.table import overloads as _overloads
from fuser.ops.views import bind_item, bind_reshape, bind_squeeze, bind_unsqueeze

__all__ = [
    "bind_function",
    "bind_method",
    "bind_module",
    "find_settled",
    "has_hooks",
    "needs_known",
]

_ATEN = torch.ops.aten


def bind_function(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> OpCall | None:
    """Return the table's call for ``target(*args, **kwargs)``, or None when the table has none.

    ``target`` is a torch function, a Python operator or an ATen overload; arguments are Python numbers or opaque
    stand-ins for tensors (FX nodes).
    """
    return _bind(_find_binder(target), args, _torchs_names(target, kwargs))


def bind_method(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> OpCall | None:
    """Return the table's call for ``args[0].name(*args[1:], **kwargs)``, or None when the table has none."""
    return _bind(_find_binder(name), args, _torchs_names(getattr(torch.Tensor, name, None), kwargs))


def bind_module(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> OpCall | None:
    """Return the table's call for ``module(*args, **kwargs)``, or None when the table has none, or hooks are there."""
    found = _MODULES.get(type(module))
    if found is None or getattr(module, "inplace", False) or has_hooks(module):
        return None
    function, names = found
    return bind_function(function, args, {**kwargs, **{name: getattr(module, name) for name in names}})


# What a module calls, and the attributes it passes on by name.
_MODULES: dict[type, tuple[Any, tuple[str, ...]]] = {
    torch.nn.ReLU: (F.relu, ()),
    torch.nn.SiLU: (F.silu, ()),
    torch.nn.GELU: (F.gelu, ("approximate",)),
    torch.nn.Sigmoid: (torch.sigmoid, ()),
    torch.nn.Tanh: (torch.tanh, ()),
    torch.nn.LeakyReLU: (F.leaky_relu, ("negative_slope",)),
    torch.nn.ELU: (F.elu, ("alpha",)),
    torch.nn.SELU: (F.selu, ()),
    torch.nn.CELU: (F.celu, ("alpha",)),
    torch.nn.Softplus: (F.softplus, ("beta", "threshold")),
    torch.nn.Mish: (F.mish, ()),
    torch.nn.Hardtanh: (F.hardtanh, ("min_val", "max_val")),
    torch.nn.ReLU6: (F.relu6, ()),
    torch.nn.Hardsigmoid: (F.hardsigmoid, ()),
    torch.nn.Hardswish: (F.hardswish, ()),
    torch.nn.Softmax: (F.softmax, ("dim",)),
    torch.nn.LogSoftmax: (F.log_softmax, ("dim",)),
    torch.nn.Softmin: (F.softmin, ("dim",)),
    torch.nn.Softsign: (F.softsign, ()),
    torch.nn.Tanhshrink: (F.tanhshrink, ()),
}


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether a call of the module runs more than its ``forward``."""
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


def _bind(binder: Binder | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> OpCall | None:
    if binder is None:
        return None
    try:
        bound = _signature(binder).bind(*args, **kwargs)
    except TypeError:  # an argument this table does not know (out=, dtype=, ...)
        return None
    call = binder(*bound.args, **bound.kwargs)
    if call is not None and find_numerics() == "strict" and not _keeps_bits(call, device_type_of(call)):
        return None
    return call if call is not None and all(_is_operand(value) for value in call.tensors) else None


def _keeps_bits(call: OpCall, device_type: str) -> bool:
    parts = (item for item in call.tensors if isinstance(item, OpCall))
    return keeps_bits(call.function, device_type) and all(_keeps_bits(item, device_type) for item in parts)


# Parameters of ops that are no numbers a kernel could be given: they decide which kernel it is.
_SETTLED = frozenset("dim keepdim normalized_shape num_groups ord p correction unbiased training".split())


def _torchs_names(target: Any, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    # Functions of torch's that are not Python's take numpy's names, too; ``out=None`` says nothing.
    if not kwargs or not isinstance(
        target, types.BuiltinFunctionType | types.MethodDescriptorType | types.FunctionType
    ):
        return kwargs
    aliases = {} if isinstance(target, types.FunctionType) else {"axis": "dim", "keepdims": "keepdim"}
    return {aliases.get(name, name): item for name, item in kwargs.items() if name != "out" or item is not None}


def _find_binder(target: Any) -> Binder | None:
    # Of a function, or of a method by its name.
    if isinstance(target, str):
        return _methods().get(target)
    if isinstance(target, torch._ops.OpOverloadPacket):
        # Those of its overloads that the table has are one op.
        overloads = (getattr(target, name) for name in target.overloads())  # type: ignore[no-untyped-call]
        return next((found for item in overloads if (found := _functions().get(item))), None)
    try:
        return _functions().get(target)
    except TypeError:  # unhashable
        return None


def needs_known(target: Any) -> bool:
    """Whether which op a call of a function is depends on its tensors' dtypes, dimensions and devices."""
    return _find_binder(target) in ASKING


def find_settled(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that decide which op of the table a call is: dimensions, say; none for other functions.

    Args:
        target: a function, or the name of a method.
        args: by position, the method's tensor first.
        kwargs: by name.
    """
    binder = _find_binder(target)
    kwargs = _torchs_names(getattr(torch.Tensor, target, None) if isinstance(target, str) else target, kwargs)
    names = _SETTLED & {*_signature(binder).parameters} if binder else ()
    if not names:
        return []
    try:
        bound = _signature(binder).bind_partial(*args, **kwargs).arguments
    except TypeError:
        return []
    return [bound[name] for name in names if name in bound]


# Of the table's binders, which live as long as the process.
_signature = functools.cache(inspect.signature)


def _is_operand(value: Any) -> bool:
    return value is not None and not isinstance(value, str | list | tuple | dict | torch.dtype)


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


def _tensor_first(binder: Binder) -> Binder:
    # torch.add(2, x) is an error in torch, and stays one: the call is left to torch.
    @functools.wraps(binder)
    def bind(input: Any, *args: Any, **kwargs: Any) -> OpCall | None:  # noqa: A002
        return None if is_number(input) else binder(input, *args, **kwargs)

    return asking(bind) if binder in ASKING else bind


def _bind_add(input: Any, other: Any, *, alpha: Any = 1) -> OpCall:  # noqa: A002
    return _call("add", input, other, alpha=alpha)


def _bind_sub(input: Any, other: Any, *, alpha: Any = 1) -> OpCall | None:  # noqa: A002
    return _call("sub", input, other, minus_alpha=-alpha) if is_constant(alpha) else None


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
    return _call_clamp("clamp", input, min, max)


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


def _bind_hardtanh(input: Any, min_val: Any = -1.0, max_val: Any = 1.0, inplace: bool = False) -> OpCall | None:  # noqa: A002
    # torch has its own error for bounds in the wrong order.
    is_refused = inplace or not (is_constant(min_val) and is_constant(max_val)) or min_val > max_val
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


def _bind_masked_fill(input: Any, mask: Any, value: Any) -> OpCall | None:  # noqa: A002
    # torch refuses a number that the dtype cannot hold: these every dtype of the op can.
    known = known_of(input)
    is_safe = (
        is_constant(value)
        and not isinstance(value, complex)
        and (not math.isfinite(value) or abs(value) <= 65504)
        and (known is None or dtype_kind(known.dtype) in OPS["masked_fill"].kinds)
    )
    return _call("masked_fill", input, mask, value=value) if is_safe else None


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


# --- views ------------------------------------------------------------------------------------------------------
def _bind_view(bind: Callable[..., Function | tuple[Function, ...] | None]) -> Binder:
    @functools.wraps(bind)
    def bind_call(input: Any, *args: Any, **kwargs: Any) -> OpCall | None:  # noqa: A002
        found = None if is_number(input) else bind(input, *args, **kwargs)
        call = input
        for function in found if isinstance(found, tuple) else (found,):
            call = None if function is None else OpCall(function, (call,))
        return None if call is input else call

    return bind_call


def _either(first: Binder, second: Binder) -> Binder:
    @functools.wraps(first)
    def bind(*args: Any, **kwargs: Any) -> OpCall | None:
        return first(*args, **kwargs) or second(*args, **kwargs)

    return bind


_UNARY = (
    *UNARY_FLOAT, "neg", "abs", "reciprocal", "square", "sigmoid", "floor", "ceil", "trunc", "round", "frac", "sign",
    "isnan", "isinf", "isfinite", "logical_not", "bitwise_not",
)  # fmt: skip
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_BITWISE = ("bitwise_and", "bitwise_or", "bitwise_xor")
_UNARY_ACTIVATIONS = ("relu", "silu", "mish", "hardsigmoid", "hardswish")
# ATen has these for two tensors, and for a tensor and a number.
_BINARY = ("mul", *_COMPARISONS, *_BITWISE, "fmod", "remainder", "copysign")
_OF_TENSORS = (
    "maximum", "minimum", "atan2", "hypot", "logaddexp", "logical_and", "logical_or", "logical_xor",
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


_VIEWS: dict[str, Callable[..., Any]] = {
    "unsqueeze": bind_unsqueeze, "squeeze": bind_squeeze, "view": bind_reshape, "reshape": bind_reshape,
}  # fmt: skip


@functools.cache
def _methods() -> dict[str, Binder]:
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
        **reduction_methods(),
        **softmax_methods(),
        **{name: _bind_view(bind) for name, bind in _VIEWS.items()},
        "addcmul": _bind_addcmul, "addcdiv": _bind_addcdiv, "lerp": _bind_lerp, "to": _bind_to,
    }  # fmt: skip
    return found | {alias: found[name] for alias, name in _ALIASES.items()}


@functools.cache
def _functions() -> dict[Any, Binder]:
    # Built on first use: looking the ATen overloads up takes longer than importing the rest of fuser.
    arranged = arrangement_functions()
    return {
        **arranged,
        **further_functions(),
        **whole_functions(),
        **softmax_functions(),
        **reduction_functions(),
        **{
            getattr(torch, name): bind if name == "pow" else _tensor_first(bind)
            for name, bind in _methods().items()
            # torch.float and its like are dtypes.
            if callable(getattr(torch, name, None)) and name != "where"
        },
        **{getattr(operator, name): _binary(name) for name in (*_COMPARISONS, "mul")},
        **{getattr(operator, name): _unary(name) for name in ("neg", "abs")},
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
        torch.rsub: _tensor_first(_bind_rsub),
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
        **{overload: _binary(name) for name in _OF_TENSORS for overload in _overloads(name)},
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
        _ATEN.unsqueeze.default: _bind_view(bind_unsqueeze),
        **dict.fromkeys(_overloads("squeeze.dim", "squeeze.dims"), _bind_view(bind_squeeze)),
        **dict.fromkeys(
            _overloads("view", "reshape", "_unsafe_view"),
            _either(_bind_view(bind_reshape), arranged[_ATEN.view.default]),
        ),
        operator.getitem: _bind_view(bind_item),
        _ATEN._to_copy.default: _bind_to_copy,
        torch.ops.prims.convert_element_type.default: _bind_convert_element_type,
        _ATEN.to.dtype: _bind_to,
    }  # fmt: skip
