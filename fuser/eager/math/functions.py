"""Every function that a functor may call: names, types of parameters and results, and what they compute.

Overloads are those of the prelude: functions of real numbers work in double for double and integer arguments and in
float else, one float argument among several pulling integers with it; names that end in f convert to float.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from fuser.dtypes import is_continuous
from fuser.eager.data import WHOLE_FUNCTIONS, Data, Value, add_node, as_node, constant, storage_dtype
from fuser.eager.math import real
from fuser.eager.math.bessel import BESSEL, bessel_j, bessel_y
from fuser.eager.math.bits import BITS, TO_INTEGER
from fuser.eager.math.complex import COMPLEX
from fuser.eager.math.special import SPECIAL
from fuser.eager.math.terms import Formula, Term, apply, where
from fuser.eager.promotion import common_type, convert, promote_integer
from fuser.eager.values import binary

__all__ = ["NamedFunction", "call", "call_with_results", "is_known"]

aten = torch.ops.aten

_TYPES = {
    "f": torch.float32,
    "d": torch.float64,
    "i": torch.int32,
    "l": torch.int64,
    "u": torch.uint32,
    "U": torch.uint64,
    "b": torch.bool,
}


@dataclass(frozen=True, slots=True)
class KnownFunction:
    """A function of real numbers.

    Types are letters: f, d float and double; i, l, u, U int, long long and their unsigned kinds; b bool; T the type
    that all arguments of a T promote to; ? the argument's own.
    """

    parameters: str
    # One letter for each result, the returned value first.
    results: str
    # From terms of the parameters' types to a term, or a tuple of them.
    formula: Callable[..., Any]
    # The name of the node it is in a graph that is to be differentiated; None where the formula serves there, too.
    whole: str | None = None


@dataclass(frozen=True, slots=True)
class NamedFunction:
    """The target of such a node. Called on tensors, it does what the formula does."""

    # As C++ has it; where all floats are float32, the form that ends in f is meant.
    name: str
    # C++ types of the arguments.
    types: tuple[torch.dtype, ...]

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, *data: Data) -> Data:  # noqa: D102 - said above
        function = _FUNCTIONS[self.name]
        arguments = [Value(dtype, item) for dtype, item in zip(self.types, data, strict=True)]
        return _compute(function.formula, arguments)[0].data


def call(name: str, arguments: Sequence[Value]) -> Value:
    """Call a function of one result.

    Args:
        name: as C++ has it, without namespace; "std::max", "std::min" and "std::clamp" differ from what is global.
        arguments: of any types; they are converted as by the prelude's overloads.

    Raises:
        KeyError: there is no function of this name.
        TypeError: it takes other arguments.
        NeedsValuesError: the function cannot be part of a graph with these arguments.
    """
    (result,) = call_with_results(name, arguments)
    return result


def call_with_results(name: str, arguments: Sequence[Value]) -> tuple[Value, ...]:
    """Call a function; return the value it returns, if any, and those it writes through pointers, in this order."""
    if any(value.dtype.is_complex for value in arguments) or name in _ONLY_COMPLEX:
        return (_call_complex(name, arguments),)
    function = _FUNCTIONS[name]
    if len(arguments) != len(function.parameters):
        raise TypeError(f"{name} takes {len(function.parameters)} arguments, got {len(arguments)}")
    promoted = [v.dtype for v, kind in zip(arguments, function.parameters, strict=True) if kind == "T"]
    of_t = _promote(promoted)
    dtypes = [
        of_t if kind == "T" else value.dtype if kind == "?" else _TYPES[kind]
        for value, kind in zip(arguments, function.parameters, strict=True)
    ]
    converted = [convert(v, dtype) for v, dtype in zip(arguments, dtypes, strict=True)]
    if WHOLE_FUNCTIONS.get() and any(isinstance(value.data, fx.Node) for value in converted):
        if name in _PAIRS:
            return tuple(call(part, converted) for part in _PAIRS[name])
        if function.whole is not None:
            return (_keep_whole(function, converted, of_t),)
    return _compute(function.formula, converted)


def _keep_whole(function: KnownFunction, arguments: Sequence[Value], of_t: torch.dtype) -> Value:
    assert function.whole is not None
    dtype = of_t if function.results == "T" else _TYPES[function.results]
    target = NamedFunction(function.whole, tuple(value.dtype for value in arguments))
    graph = next(value.data.graph for value in arguments if isinstance(value.data, fx.Node))
    return Value(dtype, add_node(graph, target, [as_node(graph, v) for v in arguments], storage_dtype(dtype)))


def is_known(name: str) -> bool:
    """Whether there is a function of this name."""
    return name in _FUNCTIONS or name in _ONLY_COMPLEX


def _promote(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    is_double = torch.float64 in dtypes or not any(dtype.is_floating_point for dtype in dtypes)
    return torch.float64 if is_double else torch.float32


def _compute(formula: Callable[..., Any], arguments: Sequence[Value]) -> tuple[Value, ...]:
    # Constants are computed as tensors would be, but for the arguments that select a formula: pow's exponent.
    all_constant = all(value.is_constant for value in arguments) and bool(arguments)
    with _disable_current_modes() if all_constant else nullcontext():
        terms = [Term(value) for value in arguments]
        if all_constant:
            first = next((i for i, v in enumerate(arguments) if is_continuous(v.dtype)), 0)
            terms[first] = _as_tensor(arguments[first])
        found = formula(*terms)
        values = tuple(term.value for term in (found if isinstance(found, tuple) else (found,)))
        return tuple(_as_constant(value) for value in values) if all_constant else values


def _as_tensor(value: Value) -> Term:
    dtype = storage_dtype(value.dtype)
    return Term(Value(value.dtype, aten.scalar_tensor.default(value.stored, dtype=dtype)))


def _as_constant(value: Value) -> Value:
    return value if value.is_constant else constant(value.data.item(), value.dtype)


def _call_complex(name: str, arguments: Sequence[Value]) -> Value:
    formula = COMPLEX[name]
    # Integers become double, and reals beside a complex number take its precision.
    kinds = [value.dtype for value in arguments if value.dtype.is_complex]
    precision = common_type(kinds[0], kinds[-1]).to_real() if kinds else _promote([v.dtype for v in arguments])
    converted = [
        convert(v, precision.to_complex() if (kinds and name == "pow") or v.dtype.is_complex else precision)
        for v in arguments
    ]
    return _compute(formula, converted)[0]


# ---- functions of any arithmetic type ----


def _absolute(x: Term) -> Term:
    dtype = promote_integer(x.dtype)
    return x.to(dtype) if dtype in (torch.uint32, torch.uint64) else abs(x.to(dtype))


def _extreme(op: Any, less: str) -> Formula:
    def choose(x: Term, y: Term) -> Term:
        dtype = common_type(x.dtype, y.dtype)
        x, y = x.to(dtype), y.to(dtype)
        if dtype is torch.uint64:
            return where(Term(binary(less, x.value, y.value)), x, y)
        return apply(op if dtype.is_floating_point else _INTEGER_EXTREMES[op], x, y)

    return choose


_INTEGER_EXTREMES = {aten.fmax.default: aten.maximum.default, aten.fmin.default: aten.minimum.default}


def _same_type(*terms: Term) -> list[Term]:
    dtypes = [term.dtype for term in terms]
    common = dtypes[0]
    for dtype in dtypes[1:]:
        common = common if dtype is common else common_type(common, dtype)
    return [term.to(common) for term in terms]


def _std_max(x: Term, y: Term) -> Term:
    x, y = _same_type(x, y)
    return where(x < y, y, x)


def _std_min(x: Term, y: Term) -> Term:
    x, y = _same_type(x, y)
    return where(y < x, y, x)


def _std_clamp(x: Term, low: Term, high: Term) -> Term:
    x, low, high = _same_type(x, low, high)
    return where(x < low, low, where(high < x, high, x))


# ---- CUDA's fast and rounding forms ----


def _operator(op: str) -> Formula:
    return lambda x, y: Term(binary(op, x.value, y.value))


def _saturate(x: Term) -> Term:
    return where(x > 0.0, where(x < 1.0, x, 1.0), 0.0)


def _reciprocal(formula: Formula) -> Formula:
    return lambda *terms: apply(aten.reciprocal.default, formula(*terms))


def _rsqrt_rounded(x: Term) -> Term:
    root = apply(aten.sqrt.default, x.to(torch.float64))
    return apply(aten.reciprocal.default, root).to(torch.float32)


# ---- the table ----

# What is more than one operation of ATen, and has a derivative that says so in a line.
_WHOLE = frozenset(
    "cbrt cospi cyl_bessel_i0 cyl_bessel_i1 erfcinv erfcx exp10 fma fuser_frexp_exponent fuser_frexp_mantissa ilogb "
    "j0 j1 jn ldexp logb norm3d norm4d normcdf rcbrt remainder rhypot rnorm3d rnorm4d round scalbln scalbn sinpi "
    "tgamma y0 y1 yn".split()
)
_PAIRS = dict.fromkeys(("sincospi", "sincospif"), ("sinpi", "cospi"))
_PAIRS |= dict.fromkeys(("frexp", "frexpf"), ("fuser_frexp_mantissa", "fuser_frexp_exponent"))


def _promoting() -> dict[str, KnownFunction]:
    # With a form for float, of the same name and an f.
    table = {name: KnownFunction("T", "T", formula) for name, formula in (real.UNARY | SPECIAL | BESSEL).items()}
    table |= {name: KnownFunction("TT", "T", formula) for name, formula in real.BINARY.items()}
    table |= {name: KnownFunction("T", kind, formula) for name, (kind, formula) in TO_INTEGER.items()}
    table["fma"] = KnownFunction("TTT", "T", real.fma)
    table["ilogb"] = KnownFunction("T", "i", real.ilogb)
    table |= dict.fromkeys(("ldexp", "scalbn"), KnownFunction("Ti", "T", real.scale))
    table["scalbln"] = KnownFunction("Tl", "T", real.scale)
    table["jn"] = KnownFunction("iT", "T", bessel_j)
    table["yn"] = KnownFunction("iT", "T", bessel_y)
    table["frexp"] = KnownFunction("T", "Ti", real.frexp)
    # Its results one by one.
    table["fuser_frexp_mantissa"] = KnownFunction("T", "T", lambda x: real.frexp(x)[0])
    table["fuser_frexp_exponent"] = KnownFunction("T", "i", lambda x: real.frexp(x)[1])
    table["modf"] = KnownFunction("T", "TT", real.modf)
    table["remquo"] = KnownFunction("TT", "Ti", real.remquo)
    table["sincos"] = KnownFunction("T", "TT", real.sincos)
    table["sincospi"] = KnownFunction("T", "TT", real.sincospi)
    table["nan"] = KnownFunction("", "d", lambda: Term(constant(math.nan, torch.float64)))
    table["fuser_digamma"] = KnownFunction("T", "T", partial(apply, aten.digamma.default))
    # NVRTC has these for double alone, so float arguments give double.
    table |= {name: KnownFunction("d" * count, "d", real.norm) for name, count in (("norm3d", 3), ("norm4d", 4))}
    for name, count in (("rhypot", 2), ("rnorm3d", 3), ("rnorm4d", 4)):
        table[name] = KnownFunction("d" * count, "d", _reciprocal(real.norm))
    return {name: replace(function, whole=name if name in _WHOLE else None) for name, function in table.items()}


def _float_form(function: KnownFunction) -> KnownFunction:
    def narrow(kinds: str) -> str:
        return kinds.replace("T", "f").replace("d", "f")

    if function.formula is _FUNCTIONS_OF_T["nan"].formula:
        return KnownFunction("", "f", lambda: Term(constant(math.nan, torch.float32)))
    return replace(function, parameters=narrow(function.parameters), results=narrow(function.results))


def _fast() -> dict[str, KnownFunction]:
    names = "cosf exp10f expf log10f log2f logf powf sinf sincosf tanf tanhf".split()
    table = {f"__{name}": _float_form(_FUNCTIONS_OF_T[name.removesuffix("f")]) for name in names}
    table |= dict.fromkeys(("__fdividef", "fdividef"), KnownFunction("ff", "f", _operator("/")))
    table["__saturatef"] = KnownFunction("f", "f", _saturate)
    table["__frsqrt_rn"] = KnownFunction("f", "f", _rsqrt_rounded)
    table["__fmaf_rn"] = KnownFunction("fff", "f", real.fma, "fma")
    table["__fma_rn"] = KnownFunction("ddd", "d", real.fma, "fma")
    for kind in "fd":
        for word, op in (("add", "+"), ("sub", "-"), ("mul", "*"), ("div", "/")):
            table[f"__{kind}{word}_rn"] = KnownFunction(kind * 2, kind, _operator(op))
        table[f"__{kind}rcp_rn"] = KnownFunction(kind, kind, _reciprocal(lambda x: x))
        table[f"__{kind}sqrt_rn"] = KnownFunction(kind, kind, real.UNARY["sqrt"])
    return table


_FUNCTIONS_OF_T = _promoting()
_FUNCTIONS: dict[str, KnownFunction] = {
    **_FUNCTIONS_OF_T,
    **{f"{name}f": _float_form(function) for name, function in _FUNCTIONS_OF_T.items()},
    **_fast(),
    **{name: KnownFunction("T", "b", formula) for name, formula in real.CLASSIFY.items()},
    **{name: KnownFunction(parameters, result, formula) for name, (parameters, result, formula) in BITS.items()},
    "abs": KnownFunction("?", "?", _absolute),
    "labs": KnownFunction("l", "l", abs),
    "llabs": KnownFunction("l", "l", abs),
    "max": KnownFunction("??", "?", _extreme(aten.fmax.default, ">")),
    "min": KnownFunction("??", "?", _extreme(aten.fmin.default, "<")),
    "std::max": KnownFunction("??", "?", _std_max),
    "std::min": KnownFunction("??", "?", _std_min),
    "std::clamp": KnownFunction("???", "?", _std_clamp),
}
_ONLY_COMPLEX = frozenset(COMPLEX) - _FUNCTIONS.keys()
