"""torch's own pointwise ops as functors: one table, which the FX passes read and the tests walk.

Each functor follows the ATen CUDA kernel of its op (``aten/src/ATen/native/cuda``), operation by operation, so that
its results have the same bits. The ways a program can name an op (``torch.add``, ``operator.add``, ``x.add``,
``aten.add.Tensor``, ``torch.nn.ReLU``) are bound to the table by ``bind_function``, ``bind_method``, ``bind_module``.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody uses

from fuser.dtypes import DTYPES
from fuser.functor import parse_functor
from fuser.graph import Function, Promotion

__all__ = [
    "OPS",
    "WIDE_UNDER_AUTOCAST",
    "Call",
    "Op",
    "bind_function",
    "bind_method",
    "bind_module",
    "has_hooks",
    "op_functions",
]

NUMBER_TYPES = (bool, int, float, complex)


@dataclass(frozen=True, slots=True)
class Op:
    """One row of the table."""

    name: str
    # Parses the text, once: importing fuser parses none of the table.
    make_function: Callable[[], Function]
    # The eager reference: called with the tensors in order and the scalars by name.
    eager: Callable[..., Any]
    # Kinds of common dtype (see dtype_kind) that the functor serves; others run in eager torch.
    kinds: frozenset[str]

    @property
    def function(self) -> Function:
        """The functor with its typing rules."""
        return self.make_function()


@dataclass(frozen=True, slots=True)
class Call:
    """An op and what it is called with: tensors may be anything the caller passes on, also another Call."""

    function: Function
    tensors: tuple[Any, ...]
    scalars: Mapping[str, Any] = field(default_factory=dict)


OPS: dict[str, Op] = {}
# What torch.autocast runs in float32 on CUDA (ATen's autocast_mode.h); on the CPU it leaves the table's ops alone.
WIDE_UNDER_AUTOCAST = frozenset({"exp", "expm1", "log", "log1p", "log2", "reciprocal", "rsqrt", "pow", "pow_number"})

_LIMITED = {torch.uint16, torch.uint32, torch.uint64} | {
    dtype for dtype in DTYPES if dtype.is_floating_point and dtype.itemsize == 1
}

FLOAT = frozenset({"float"})
REAL = frozenset({"int", "float"})
ANY_REAL = frozenset({"bool", "int", "float"})


def dtype_kind(dtype: torch.dtype) -> str:
    """Return "bool", "int", "float" or "complex"; "limited" where torch stores and casts, and has few other ops."""
    if dtype in _LIMITED:
        return "limited"
    if dtype.is_complex:
        return "complex"
    if dtype.is_floating_point:
        return "float"
    return "bool" if dtype is torch.bool else "int"


def op_functions(name: str) -> Op:
    """Return the row of an op; raises KeyError for an unknown name."""
    return OPS[name]


def _define(
    name: str,
    parameters: str,
    body: str,
    eager: Callable[..., Any],
    *,
    kinds: frozenset[str] = FLOAT,
    scalars: tuple[str, ...] = (),
    promotion: Promotion = Promotion.DEFAULT,
    unpromoted: tuple[str, ...] = (),
    out_dtype: torch.dtype | None = None,
    numbers_have_layout: bool = True,
) -> None:
    result = "bool" if out_dtype is torch.bool else "T"
    # The entry is named aten_*, so that it hides no C++ function its body calls.
    code = f"template <typename T> {result} aten_{name}({parameters}) {{ {body} }}"

    @functools.cache
    def make_function() -> Function:
        return Function(
            functor=parse_functor(code, scalars),
            op=name,
            promotion=promotion,
            unpromoted=unpromoted,
            out_dtypes=() if out_dtype is None else (out_dtype,),
            numbers_have_layout=numbers_have_layout,
        )

    OPS[name] = Op(name, make_function, eager, kinds)


def _define_unary_float(name: str, body: str, eager: Callable[..., Any]) -> None:
    _define(name, "T x", body, eager, kinds=ANY_REAL, promotion=Promotion.INT_TO_FLOAT)


def _define_comparison(name: str, symbol: str, eager: Callable[..., Any]) -> None:
    _define(name, "T a, T b", f"return a {symbol} b;", eager, kinds=ANY_REAL, out_dtype=torch.bool)


def _eager_add(a: Any, b: Any, *, alpha: Any) -> Any:
    # torch.add takes no number first, and torch.rsub no bool.
    if isinstance(a, torch.Tensor):
        return torch.add(a, b, alpha=alpha)
    return torch.add(b, a) if alpha == 1 else torch.rsub(b, int(a) if isinstance(a, bool) else a, alpha=-alpha)


def _eager_sub(a: Any, b: Any, *, minus_alpha: Any) -> Any:
    is_tensor = isinstance(a, torch.Tensor)
    return torch.sub(a, b, alpha=-minus_alpha) if is_tensor else torch.rsub(b, a, alpha=-minus_alpha)


# --- arithmetic -------------------------------------------------------------------------------------------------
_define("add", "T a, T b, T alpha", "return a + alpha * b;", _eager_add, kinds=ANY_REAL, scalars=("alpha",))
# ATen adds with the negated alpha, and so do the bindings below.
_define(
    "sub", "T a, T b, T minus_alpha", "return a + minus_alpha * b;", _eager_sub, kinds=REAL, scalars=("minus_alpha",)
)
_define("mul", "T a, T b", "return a * b;", operator.mul, kinds=ANY_REAL)
_define("div", "T a, T b", "return a / b;", torch.div, kinds=ANY_REAL, promotion=Promotion.INT_TO_FLOAT)
# ATen's CUDA kernel multiplies by the reciprocal when the divisor is one number; its CPU kernel divides.
_define(
    "div_number",
    "T a, T b",
    "\n#ifdef __CUDACC__\nreturn a * (T(1) / b);\n#else\nreturn a / b;\n#endif\n",
    torch.div,
    kinds=ANY_REAL,
    promotion=Promotion.INT_TO_FLOAT,
)
_define("neg", "T x", "return -x;", torch.neg, kinds=REAL)
_define("abs", "T x", "return x < T(0) ? -x : (x == T(0) ? T(0) : x);", torch.abs, kinds=REAL)
_define("reciprocal", "T x", "return T(1) / x;", torch.reciprocal, kinds=ANY_REAL, promotion=Promotion.INT_TO_FLOAT)
_define("square", "T x", "return x * x;", torch.square, kinds=REAL)

# --- elementary functions ---------------------------------------------------------------------------------------
for _name in ("exp", "expm1", "log", "log1p", "log2", "sqrt", "rsqrt", "sin", "cos", "tanh", "erf"):
    _define_unary_float(_name, f"return {_name}(x);", getattr(torch, _name))
_define_unary_float("sigmoid", "return T(1) / (T(1) + exp(-x));", torch.sigmoid)
_define("floor", "T x", "return floor(x);", torch.floor)
_define("ceil", "T x", "return ceil(x);", torch.ceil)
# gcc makes pow(a, 0.5) a square root, which has other values at -0 and -infinity.
_define(
    "pow",
    "T a, T b",
    "\n#ifndef __CUDACC__\nif (b == T(0.5) && (a == T(0) || a == -T(INFINITY))) return fabs(a);\n#endif\n"
    "return pow(a, b);",
    torch.pow,
    numbers_have_layout=False,
)
# ATen computes these exponents by multiplication.
_define(
    "pow_number",
    "T a, T b",
    "if (b == T(2)) return a * a; if (b == T(3)) return a * a * a; if (b == T(-2)) return T(1) / (a * a);"
    " if (b == T(0.5)) return sqrt(a); if (b == T(-0.5)) return rsqrt(a); if (b == T(-1)) return T(1) / a;"
    " return pow(a, b);",
    torch.pow,
    numbers_have_layout=False,
)

# --- selection; NaN wins, as in torch ---------------------------------------------------------------------------
_define(
    "where",
    "bool condition, T a, T b",
    "return condition ? a : b;",
    torch.where,
    kinds=ANY_REAL | {"complex"},
    unpromoted=("condition",),
)
for _name, _symbol in (("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="), ("eq", "=="), ("ne", "!=")):
    _define_comparison(_name, _symbol, getattr(operator, _name))
_define("maximum", "T a, T b", "return a != a || a > b ? a : b;", torch.maximum, kinds=ANY_REAL)
_define("minimum", "T a, T b", "return a != a || a < b ? a : b;", torch.minimum, kinds=ANY_REAL)
_define(
    "clamp_min",
    "T x, T low",
    "return x != x || x > low ? x : low;",
    torch.clamp_min,
    kinds=REAL,
    numbers_have_layout=False,
)
_define(
    "clamp_max",
    "T x, T high",
    "return x != x || x < high ? x : high;",
    torch.clamp_max,
    kinds=REAL,
    numbers_have_layout=False,
)
_define(
    "clamp",
    "T x, T low, T high",
    "if (x != x || low != low) return x != x ? x : low; T y = x > low ? x : low;"
    " return high != high || y > high ? high : y;",
    torch.clamp,
    kinds=REAL,
    numbers_have_layout=False,
)

# --- activations and their derivatives --------------------------------------------------------------------------
_define("relu", "T x", "return x != x || x > T(0) ? x : T(0);", torch.relu, kinds=REAL)
_define("silu", "T x", "return x / (T(1) + exp(-x));", F.silu)
_define("gelu", "T x", f"return x * T(0.5) * (T(1) + erf(x * T({math.sqrt(0.5)!r})));", F.gelu)
_BETA = f"T({math.sqrt(2) * (2 / math.sqrt(math.pi)) * 0.5!r})"
_define(
    "gelu_tanh",
    "T x",
    f"T inner = {_BETA} * (x + T(0.044715) * (x * x * x)); return T(0.5) * x * (T(1) + tanh(inner));",
    lambda x: F.gelu(x, approximate="tanh"),
)
_ATEN = torch.ops.aten
# ATen's iterator has the operands in this order, which decides the strides of the result.
_define(
    "threshold_backward",
    "T x, T g, T threshold",
    "return x <= threshold ? T(0) : g;",
    lambda x, g, threshold: _ATEN.threshold_backward(g, x, threshold),
    kinds=REAL,
    scalars=("threshold",),
)
_define("sigmoid_backward", "T g, T y", "return g * (T(1) - y) * y;", _ATEN.sigmoid_backward)
# As the GPU's compiler contracts it; without fma nearly all digits go where y is near 1.
_define("tanh_backward", "T g, T y", "return g * fma(-y, y, T(1));", _ATEN.tanh_backward)
_define(
    "silu_backward",
    "T g, T x",
    "T s = T(1) / (T(1) + exp(-x)); return g * s * (T(1) + x * (T(1) - s));",
    _ATEN.silu_backward,
)
_define(
    "gelu_backward",
    "T g, T x",
    f"T cdf = T(0.5) * (T(1) + erf(x * T({math.sqrt(0.5)!r})));"
    f" T pdf = exp(T(-0.5) * x * x) * T({(2 / math.sqrt(math.pi)) * math.sqrt(0.5) * 0.5!r});"
    " return g * (cdf + x * pdf);",
    _ATEN.gelu_backward,
)
_define(
    "gelu_tanh_backward",
    "T g, T x",
    f"T square = x * x; T inner = {_BETA} * (x + T(0.044715) * (square * x)); T t = tanh(inner);"
    f" T left = T(0.5) * x; T right = T(1) + t; T slope = {_BETA} * (T(1) + T(3) * T(0.044715) * square);"
    " return g * (T(0.5) * right + left * ((T(1) - t * t) * slope));",
    lambda g, x: _ATEN.gelu_backward(g, x, approximate="tanh"),
)


@functools.cache
def cast_function(dtype: torch.dtype) -> Function:
    """Return the identity with a result of ``dtype``: ``x.to(dtype)``."""
    functor = parse_functor("template <typename T> T aten_to(T x) { return x; }")
    return Function(functor, op="to", out_dtypes=(dtype,))


OPS["to"] = Op(
    "to",
    functools.partial(cast_function, torch.float32),
    lambda x, dtype=torch.float32: _ATEN._to_copy.default(x, dtype=dtype),
    ANY_REAL | {"complex", "limited"},
)


# --- how programs name the ops ----------------------------------------------------------------------------------
Binder = Callable[..., "Call | None"]


def bind_function(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
    """Return the table's call for ``target(*args, **kwargs)``, or None when the table has none.

    ``target`` is a torch function, a Python operator or an ATen overload; arguments are Python numbers or opaque
    stand-ins for tensors (FX nodes).
    """
    try:
        binder = _functions().get(target)
    except TypeError:  # unhashable
        return None
    return _bind(binder, args, kwargs)


def bind_method(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
    """Return the table's call for ``args[0].name(*args[1:], **kwargs)``, or None when the table has none."""
    return _bind(_methods().get(name), args, kwargs)


def bind_module(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
    """Return the table's call for ``module(*args, **kwargs)``, or None when the table has none, or hooks are there."""
    if type(module) not in _MODULES or getattr(module, "inplace", False) or has_hooks(module):
        return None
    if isinstance(module, torch.nn.GELU):
        kwargs = {**kwargs, "approximate": module.approximate}
    return bind_function(_MODULES[type(module)], args, kwargs)


_MODULES: dict[type, Any] = {
    torch.nn.ReLU: F.relu,
    torch.nn.SiLU: F.silu,
    torch.nn.GELU: F.gelu,
    torch.nn.Sigmoid: torch.sigmoid,
    torch.nn.Tanh: torch.tanh,
}


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether a call of the module runs more than its ``forward``."""
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


def _bind(binder: Binder | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
    if binder is None:
        return None
    try:
        bound = inspect.signature(binder).bind(*args, **kwargs)
    except TypeError:  # an argument this table does not know (out=, dtype=, ...)
        return None
    call = binder(*bound.args, **bound.kwargs)
    return call if call is not None and all(_is_operand(value) for value in call.tensors) else None


def _is_operand(value: Any) -> bool:
    return value is not None and not isinstance(value, str | list | tuple | dict | torch.dtype)


def _call(name: str, *tensors: Any, **scalars: Any) -> Call:
    return Call(OPS[name].function, tensors, scalars)


def _unary(name: str) -> Binder:
    def bind(input: Any) -> Call:  # noqa: A002 - torch's own parameter name
        return _call(name, input)

    return bind


def _binary(name: str) -> Binder:
    def bind(input: Any, other: Any) -> Call:  # noqa: A002
        return _call(name, input, other)

    return bind


def _binary_of_tensors(name: str) -> Binder:
    def bind(input: Any, other: Any) -> Call | None:  # noqa: A002
        return None if isinstance(input, NUMBER_TYPES) or isinstance(other, NUMBER_TYPES) else _call(name, input, other)

    return bind


def _tensor_first(binder: Binder) -> Binder:
    # torch.add(2, x) is an error in torch, and stays one: the call is left to torch.
    @functools.wraps(binder)
    def bind(input: Any, *args: Any, **kwargs: Any) -> Call | None:  # noqa: A002
        return None if isinstance(input, NUMBER_TYPES) else binder(input, *args, **kwargs)

    return bind


def _bind_add(input: Any, other: Any, *, alpha: Any = 1) -> Call:  # noqa: A002
    return _call("add", input, other, alpha=alpha)


def _bind_sub(input: Any, other: Any, *, alpha: Any = 1) -> Call | None:  # noqa: A002
    return _call("sub", input, other, minus_alpha=-alpha) if isinstance(alpha, NUMBER_TYPES) else None


def _bind_rsub(input: Any, other: Any, alpha: Any = 1) -> Call | None:  # noqa: A002
    return _bind_sub(other, input, alpha=alpha)


def _bind_div(input: Any, other: Any, *, rounding_mode: Any = None) -> Call | None:  # noqa: A002
    if rounding_mode is not None:
        return None
    if isinstance(input, NUMBER_TYPES):
        # ``2 / x`` is x.reciprocal() * 2 in torch.
        return _call("mul", _call("reciprocal", other), input)
    return _call("div_number" if isinstance(other, NUMBER_TYPES) else "div", input, other)


def _bind_pow(input: Any, exponent: Any) -> Call:  # noqa: A002
    return _call("pow_number" if isinstance(exponent, NUMBER_TYPES) else "pow", input, exponent)


def _bind_clamp(input: Any, min: Any = None, max: Any = None) -> Call | None:  # noqa: A002
    if min is None and max is None:
        return None
    if min is None:
        return _call("clamp_max", input, max)
    if max is None:
        return _call("clamp_min", input, min)
    return _call("clamp", input, min, max)


def _bind_clamp_min(input: Any, min: Any) -> Call:  # noqa: A002
    return _call("clamp_min", input, min)


def _bind_clamp_max(input: Any, max: Any) -> Call:  # noqa: A002
    return _call("clamp_max", input, max)


def _bind_where(condition: Any, input: Any, other: Any) -> Call:  # noqa: A002
    return _call("where", condition, input, other)


def _bind_where_method(self: Any, condition: Any, other: Any) -> Call:
    return _call("where", condition, self, other)


_GELU = {"none": "gelu", "tanh": "gelu_tanh"}


def _bind_activation(name: str) -> Binder:
    def bind(input: Any, inplace: bool = False) -> Call | None:  # noqa: A002
        return None if inplace else _call(name, input)

    return bind


def _bind_gelu(input: Any, approximate: str = "none") -> Call | None:  # noqa: A002
    name = _GELU.get(approximate)
    return _call(name, input) if name else None


def _bind_gelu_backward(grad_output: Any, self: Any, *, approximate: str = "none") -> Call | None:
    name = _GELU.get(approximate)
    return _call(f"{name}_backward", grad_output, self) if name else None


def _bind_threshold_backward(grad_output: Any, self: Any, threshold: Any) -> Call:
    return _call("threshold_backward", self, grad_output, threshold=threshold)


def _bind_to_copy(self: Any, *, dtype: Any = None) -> Call | None:
    return Call(cast_function(dtype), (self,)) if isinstance(dtype, torch.dtype) else None


def _bind_convert(self: Any, dtype: torch.dtype) -> Call:
    return Call(cast_function(dtype), (self,))


def _overloads(*names: str) -> list[Any]:
    found = []
    for name in names:
        packet, _, overload = name.partition(".")
        found.append(getattr(getattr(_ATEN, packet), overload or "default"))
    return found


_UNARY = (
    "neg", "abs", "reciprocal", "square", "exp", "expm1", "log", "log1p", "log2", "sqrt", "rsqrt", "sin", "cos",
    "tanh", "erf", "sigmoid", "floor", "ceil",
)  # fmt: skip
_BINARY = ("mul", "lt", "le", "gt", "ge", "eq", "ne")


@functools.cache
def _methods() -> dict[str, Binder]:
    return {
        **{name: _unary(name) for name in _UNARY},
        **{name: _binary(name) for name in _BINARY},
        **{name: _binary_of_tensors(name) for name in ("maximum", "minimum")},
        **{f"__{name}__": _binary(name) for name in ("lt", "le", "gt", "ge", "eq", "ne", "mul")},
        "__rmul__": _binary("mul"),
        "add": _bind_add, "__add__": _bind_add, "__radd__": _bind_add,
        "sub": _bind_sub, "subtract": _bind_sub, "__sub__": _bind_sub, "__rsub__": _bind_rsub,
        "multiply": _binary("mul"), "negative": _unary("neg"), "absolute": _unary("abs"),
        "div": _bind_div, "divide": _bind_div, "true_divide": _bind_div, "__truediv__": _bind_div,
        "pow": _bind_pow, "__pow__": _bind_pow,
        "clamp": _bind_clamp, "clip": _bind_clamp, "clamp_min": _bind_clamp_min, "clamp_max": _bind_clamp_max,
        "where": _bind_where_method, "relu": _unary("relu"),
        "greater": _binary("gt"), "greater_equal": _binary("ge"), "less": _binary("lt"), "less_equal": _binary("le"),
        "not_equal": _binary("ne"),
    }  # fmt: skip


@functools.cache
def _functions() -> dict[Any, Binder]:
    # Built on first use: looking the ATen overloads up takes longer than importing the rest of fuser.
    return {
        **{
            getattr(torch, name): bind if name == "pow" else _tensor_first(bind)
            for name, bind in _methods().items()
            if hasattr(torch, name) and name != "where"
        },
        **{getattr(operator, name): _binary(name) for name in _BINARY},
        **{getattr(operator, name): _unary(name) for name in ("neg", "abs")},
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
        **{overload: _unary(name) for name in (*_UNARY, "relu", "silu") for overload in _overloads(name)},
        **{
            overload: _binary(name)
            for name in _BINARY
            for overload in _overloads(f"{name}.Tensor", f"{name}.Scalar")
        },
        **dict.fromkeys(_overloads("add.Tensor", "add.Scalar"), _bind_add),
        **dict.fromkeys(_overloads("sub.Tensor", "sub.Scalar"), _bind_sub),
        **dict.fromkeys(_overloads("rsub.Tensor", "rsub.Scalar"), _bind_rsub),
        **dict.fromkeys(_overloads("div.Tensor", "div.Scalar"), _bind_div),
        **dict.fromkeys(_overloads("pow.Tensor_Tensor", "pow.Tensor_Scalar", "pow.Scalar"), _bind_pow),
        **dict.fromkeys(_overloads("clamp", "clamp.Tensor"), _bind_clamp),
        **dict.fromkeys(_overloads("clamp_min", "clamp_min.Tensor"), _bind_clamp_min),
        **dict.fromkeys(_overloads("clamp_max", "clamp_max.Tensor"), _bind_clamp_max),
        **dict.fromkeys(
            _overloads("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar"), _bind_where
        ),
        **{overload: _binary(name) for name in ("maximum", "minimum") for overload in _overloads(name)},
        _ATEN.gelu.default: _bind_gelu,
        _ATEN.gelu_backward.default: _bind_gelu_backward,
        _ATEN.threshold_backward.default: _bind_threshold_backward,
        **{overload: _binary(name) for name in ("sigmoid_backward", "tanh_backward", "silu_backward")
           for overload in _overloads(name)},
        _ATEN._to_copy.default: _bind_to_copy,
        torch.ops.prims.convert_element_type.default: _bind_convert,
    }  # fmt: skip
