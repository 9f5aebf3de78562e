"""The operations that expressions are made of: types of their results, and what they compute on tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from fuser.dtypes import is_continuous
from fuser.eager.data import round_to
from fuser.eager.math.functions import NamedFunction

__all__ = [
    "BOOLEAN",
    "Number",
    "apply",
    "count_static",
    "fold",
    "result_dtype",
    "typed_number",
]

Number = bool | int | float | complex
COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})
# Operations whose result is bool.
BOOLEAN = COMPARISONS | {"logical_and", "logical_or", "logical_xor", "logical_not", "signbit", "isnan", "isinf"}
# Operations that make a real number of a complex one, and the other way round.
_TO_REAL = frozenset({"abs", "real", "imag", "angle"})
_TO_COMPLEX = frozenset({"complex", "polar"})
# Leading arguments that are plain integers.
_STATIC = {"polygamma": 1}
# ATen overloads that are not called "default".
_OVERLOADS = {
    **{name: f"{name}.Tensor" for name in (
        "add", "sub", "mul", "div", "fmod", "remainder", "bitwise_and", "bitwise_or", "bitwise_xor", "copysign",
        "bitwise_left_shift", "bitwise_right_shift", "ldexp", *COMPARISONS,
    )},
    "pow": "pow.Tensor_Tensor",
    "where": "where.self",
}  # fmt: skip


def count_static(op: str) -> int:
    """Return how many leading arguments of ``op`` are plain integers."""
    return _STATIC.get(op, 0)


def result_dtype(op: str, dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """Return the type of ``op`` on operands of these types, where it follows from them."""
    dtype = dtypes[1 if op == "where" else 0]
    if op in BOOLEAN:
        return torch.bool
    if op == "frexp_exponent":
        return torch.int32
    if op in _TO_REAL and dtype.is_complex:
        return dtype.to_real()
    return dtype.to_complex() if op in _TO_COMPLEX else dtype


def typed_number(value: Number, dtype: torch.dtype) -> Number:
    """Return ``value`` as the Python number that stands for it in ``dtype``."""
    return round_to(value.real if isinstance(value, complex) and not dtype.is_complex else value, dtype)  # type: ignore[no-any-return]


def apply(op: str, static: Sequence[Any], tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Run an operation in eager torch; its result is of type ``dtype``."""
    if op == "convert":
        (tensor,) = tensors
        return (tensor.real if tensor.is_complex() and not dtype.is_complex else tensor).to(dtype)
    if op == "bit_cast":
        return tensors[0].view(dtype)
    if op in {"frexp_mantissa", "frexp_exponent"}:
        return torch.frexp(tensors[0])[op == "frexp_exponent"]
    if op.startswith("cpp."):
        function = NamedFunction(op.removeprefix("cpp."), tuple(tensor.dtype for tensor in tensors))
        return function(*tensors)  # type: ignore[no-any-return]
    if op in {"add", "sub", "neg"} and dtype.is_complex:
        # Part by part, as in C++: ATen multiplies what it adds by a complex 1, which makes infinities NaN, and -0 is 0.
        return torch.view_as_complex(_overload(op)(*(torch.view_as_real(item.resolve_conj()) for item in tensors)))
    if op == "div_trunc":
        return torch.div(*tensors, rounding_mode="trunc")
    result: torch.Tensor = _overload(op)(*static, *tensors)
    return result


def fold(
    op: str, static: Sequence[Any], values: Sequence[Number], dtypes: Sequence[torch.dtype], dtype: torch.dtype
) -> Number | None:
    """Return an operation's result on numbers of ``dtypes``; None where it is left to the compiled text."""
    if op == "convert" and not (is_continuous(dtype) or dtype is torch.bool):
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        if isinstance(values[0], complex) or not math.isfinite(values[0]) or not low <= int(values[0]) <= high:
            return None
    if op in {"div_trunc", "fmod", "remainder"} and not dtype.is_floating_point and values[1] == 0:
        return None
    tensors = [torch.scalar_tensor(value, dtype=kind) for value, kind in zip(values, dtypes, strict=True)]
    with torch.no_grad():
        found: Number = apply(op, static, tensors, dtype).item()
    return found


@cache
def _overload(op: str) -> Callable[..., Any]:
    packet, _, overload = _OVERLOADS.get(op, op).partition(".")
    found: Callable[..., Any] = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return found
