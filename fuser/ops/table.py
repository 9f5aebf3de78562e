"""The table of torch's own pointwise ops: what a row says, and how rows are made."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fuser.cxx.functor import Functor, parse_functor
from fuser.dtypes import DTYPES, is_continuous, is_representable
from fuser.function import Function, Promotion
from fuser.ops.calls import OpCall

__all__ = [
    "ANY_REAL",
    "BITS",
    "FLOAT",
    "OPS",
    "REAL",
    "WIDE_UNDER_AUTOCAST",
    "Op",
    "cast_function",
    "convert_function",
    "define",
    "define_test",
    "define_unary_float",
    "dtype_kind",
    "holds_number",
    "op_call",
    "overloads",
    "parse_entry",
    "unlike_cuda",
]


class Op(NamedTuple):
    """One row of the table."""

    name: str
    # Parses the text, once: importing fuser parses none of the table.
    make_function: Callable[[], Function]
    # The eager reference: called with the tensors in order and the scalars by name.
    eager: Callable[..., Any]
    # Kinds of common dtype (see dtype_kind) that the functor serves; others run in eager torch.
    kinds: frozenset[str]
    # Whether torch refuses tensors of different dtypes.
    same_dtypes: bool = False

    @property
    def function(self) -> Function:
        """The functor with its typing rules."""
        return self.make_function()


OPS: dict[str, Op] = {}
# What torch.autocast runs in float32 on CUDA (ATen's autocast_mode.h); on the CPU it leaves the table's ops alone.
WIDE_UNDER_AUTOCAST = frozenset(
    "acos asin cosh exp expm1 log log10 log1p log2 pow pow_number reciprocal rsqrt sinh softplus tan"
    " mse_loss smooth_l1_loss huber_loss".split()
)

_LIMITED = {torch.uint16, torch.uint32, torch.uint64} | {
    dtype for dtype in DTYPES if dtype.is_floating_point and dtype.itemsize == 1
}

FLOAT = frozenset({"float"})
REAL = frozenset({"int", "float"})
ANY_REAL = frozenset({"bool", "int", "float"})
BITS = frozenset({"bool", "int"})


def dtype_kind(dtype: torch.dtype) -> str:
    """Return "bool", "int", "float" or "complex"; "limited" where torch stores and casts, and has few other ops."""
    if dtype in _LIMITED:
        return "limited"
    if dtype.is_complex:
        return "complex"
    if dtype.is_floating_point:
        return "float"
    return "bool" if dtype is torch.bool else "int"


def holds_number(dtype: torch.dtype, number: Any) -> bool:
    """Whether torch makes the dtype of a number without an error, and a kernel the same one."""
    if dtype.is_floating_point and dtype.itemsize > 1:
        is_alike = isinstance(number, int | float)
    elif dtype is torch.bool or type(number) is bool:
        is_alike = dtype is torch.bool and type(number) is bool
    else:
        is_alike = type(number) is int and not is_continuous(dtype)
    return is_alike and is_representable(number, dtype)


def define(
    name: str,
    parameters: str,
    body: str | Callable[[], str],
    eager: Callable[..., Any],
    *,
    kinds: frozenset[str] = FLOAT,
    scalars: tuple[str, ...] = (),
    promotion: Promotion = Promotion.DEFAULT,
    unpromoted: tuple[str, ...] = (),
    out_dtype: torch.dtype | None = None,
    numbers_have_layout: bool = True,
    same_dtypes: bool = False,
    is_contiguous: bool = False,
    is_in_place: bool = False,
    result: str = "T",
) -> None:
    """Add a row: the functor's parameters and body as C++, and what Op and Function say of it.

    A body that depends on the torch that is there is a function, which is called when the op is first met.
    """

    @functools.cache
    def make_function() -> Function:
        text = body if isinstance(body, str) else body()
        return Function(
            functor=parse_entry(name, parameters, text, scalars, "bool" if out_dtype is torch.bool else result),
            op=name,
            promotion=promotion,
            unpromoted=unpromoted,
            out_dtypes=() if out_dtype is None else (out_dtype,),
            numbers_have_layout=numbers_have_layout,
            is_contiguous=is_contiguous,
            is_in_place=is_in_place,
        )

    OPS[name] = Op(name, make_function, eager, kinds, same_dtypes)


def parse_entry(name: str, parameters: str, body: str, scalars: tuple[str, ...] = (), result: str = "T") -> Functor:
    """Parse the functor of a row; a body that says S has the dtype's storage type there (fast numerics: T)."""
    template = "typename T, typename S = T" if "<S>" in body else "typename T"
    # The entry is named aten_*, so that it hides no C++ function its body calls.
    return parse_functor(f"template <{template}> {result} aten_{name}({parameters}) {{ {body} }}", scalars)


def unlike_cuda(cpu: str, plain: str) -> str:
    """Write statements in which ATen's CPU kernels differ from its CUDA kernels, whose formula is the plain one.

    Whoever reads the text, to derive it say, reads the plain one.
    """
    return f"\n#ifdef FUSER_CPU\n{cpu}\n#else\n {plain}\n#endif\n"


def define_unary_float(name: str, body: str, eager: Callable[..., Any]) -> None:
    """Add a function of one tensor, which makes floats of integers."""
    define(name, "T x", body, eager, kinds=ANY_REAL, promotion=Promotion.INT_TO_FLOAT)


def define_test(
    name: str, parameters: str, body: str, eager: Callable[..., Any], kinds: frozenset[str] = ANY_REAL
) -> None:
    """Add an op whose result is a bool."""
    define(name, parameters, body, eager, kinds=kinds, out_dtype=torch.bool)


# --- conversions, a function for each dtype ---------------------------------------------------------------------
def cast_function(dtype: torch.dtype) -> Function:
    """Return the identity with a result of ``dtype``, always a copy: ``aten._to_copy(x, dtype=dtype)``."""
    return _identity("to", dtype)


def convert_function(dtype: torch.dtype) -> Function:
    """Return ``x.to(dtype)``: as ``cast_function``, but what has the dtype already keeps its strides."""
    return _identity("convert", dtype)


@functools.cache
def _identity(op: str, dtype: torch.dtype) -> Function:
    functor = parse_functor("template <typename T> T aten_to(T x) { return x; }")
    return Function(functor, op=op, out_dtypes=(dtype,))


def _eager_cast(x: torch.Tensor, dtype: torch.dtype = torch.float32) -> Any:
    return torch.ops.aten._to_copy.default(x, dtype=dtype)


def _eager_convert(x: torch.Tensor, dtype: torch.dtype = torch.float32) -> Any:
    return x.to(dtype)


_EVERY_KIND = ANY_REAL | {"complex", "limited"}
OPS["to"] = Op("to", functools.partial(cast_function, torch.float32), _eager_cast, _EVERY_KIND)
OPS["convert"] = Op("convert", functools.partial(convert_function, torch.float32), _eager_convert, _EVERY_KIND)


def op_call(name: str, *tensors: Any, **scalars: Any) -> OpCall:
    """Return the call of an op of the table."""
    return OpCall(OPS[name].function, tensors, scalars)


def overloads(*names: str) -> list[Any]:
    """Return ATen overloads by their names, such as ``add.Tensor``; without a dot, the default one."""
    found = []
    for name in names:
        packet, _, overload = name.partition(".")
        found.append(getattr(getattr(torch.ops.aten, packet), overload or "default"))
    return found


# --- copies ----------------------------------------------------------------------------------------------------------
define("clone", "T x", "return x;", torch.clone, kinds=_EVERY_KIND)
define(
    "contiguous",
    "T x",
    "return x;",
    lambda x: torch.clone(x, memory_format=torch.contiguous_format),
    kinds=_EVERY_KIND,
    is_contiguous=True,
)
