"""What fuser knows of torch dtypes: C++ names, compute types, and torch's promotion rules."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from enum import IntEnum
from functools import reduce
from typing import Any, NamedTuple

import torch

from fuser.errors import ArgumentError, UnsupportedError
from fuser.process import is_of_signal_handler

# Integers up to here, and their negatives, are doubles.
MAX_EXACT_INTEGER = 2**53

__all__ = [
    "DTYPES",
    "MAX_EXACT_INTEGER",
    "DTypeInfo",
    "Rank",
    "cpp_scalar_type",
    "dtype_info",
    "fits_in_word",
    "is_continuous",
    "is_representable",
    "number_dtype",
    "number_kind",
    "number_of_dtype",
    "plain_number",
    "promote",
    "range_error",
    "scalar_dtype",
    "to_floating",
]


class DTypeInfo(NamedTuple):
    """One torch dtype as generated code sees it."""

    dtype: torch.dtype
    # C++ type of an element in memory.
    storage: str
    # dtype a functor computes in (its ``T``): half, bfloat16 and float8 in float, complex32 in complex64.
    compute_dtype: torch.dtype
    # C++ name of the compute type.
    compute: str
    # Prelude feature that declares the storage type and its conversions, if one is needed.
    feature: str | None = None

    @property
    def is_narrow(self) -> bool:
        """Whether a value in the compute type must be rounded to become one of this dtype."""
        return self.compute_dtype is not self.dtype


def _native(dtype: torch.dtype, name: str, feature: str | None = None) -> DTypeInfo:
    return DTypeInfo(dtype, name, dtype, name, feature)


def _narrow(dtype: torch.dtype, storage: str, feature: str) -> DTypeInfo:
    return DTypeInfo(dtype, storage, torch.float32, "float", feature)


DTYPES: dict[torch.dtype, DTypeInfo] = {
    info.dtype: info
    for info in (
        _native(torch.bool, "bool"),
        _native(torch.uint8, "uint8_t"),
        _native(torch.uint16, "uint16_t"),
        _native(torch.uint32, "uint32_t"),
        _native(torch.uint64, "uint64_t"),
        _native(torch.int8, "int8_t"),
        _native(torch.int16, "int16_t"),
        _native(torch.int32, "int32_t"),
        _native(torch.int64, "int64_t"),
        _native(torch.float32, "float"),
        _native(torch.float64, "double"),
        _narrow(torch.float16, "fuser_half", "half"),
        _narrow(torch.bfloat16, "fuser_bfloat16", "bfloat16"),
        _narrow(torch.float8_e4m3fn, "fuser_float8_e4m3fn", "float8"),
        _narrow(torch.float8_e5m2, "fuser_float8_e5m2", "float8"),
        _narrow(torch.float8_e4m3fnuz, "fuser_float8_e4m3fnuz", "float8"),
        _narrow(torch.float8_e5m2fnuz, "fuser_float8_e5m2fnuz", "float8"),
        _narrow(torch.float8_e8m0fnu, "fuser_float8_e8m0fnu", "float8"),
        _native(torch.complex64, "std::complex<float>", "complex"),
        _native(torch.complex128, "std::complex<double>", "complex"),
        DTypeInfo(torch.complex32, "fuser_complex_half", torch.complex64, "std::complex<float>", "complex"),
    )
}


def dtype_info(dtype: torch.dtype) -> DTypeInfo:
    """Return the row of ``dtype``; raises UnsupportedError for dtypes no kernel can hold (quantized, bits)."""
    info = DTYPES.get(dtype)
    if info is None:
        raise UnsupportedError(f"dtype {dtype} has no C++ counterpart")
    return info


class Rank(IntEnum):
    """How much weight a value has in promotion, strongest first (torch: result_type's three categories)."""

    TENSOR = 0
    ZERO_DIM = 1
    NUMBER = 2


def promote(operands: Iterable[tuple[torch.dtype, Rank]]) -> torch.dtype:
    """Return torch's promotion of the operands.

    Follows ``at::native::result_type``: tensors with dimensions win over 0-dim tensors, which win over Python
    numbers, unless the weaker one is of a higher category (bool < integer < floating < complex).

    Raises:
        UnsupportedError: torch does not promote these dtypes (float8 or unsigned mixtures).
    """
    given = list(operands)
    if all(dtype is given[0][0] for dtype, _ in given[1:]):
        # Most calls.
        return given[0][0]
    by_rank: dict[Rank, list[torch.dtype]] = {rank: [] for rank in Rank}
    for dtype, rank in given:
        by_rank[rank].append(dtype)
    try:
        results = [reduce(torch.promote_types, dtypes) for dtypes in by_rank.values() if dtypes]
        return reduce(lambda weaker, stronger: _combine(stronger, weaker), reversed(results))
    except RuntimeError as error:
        if is_of_signal_handler(error):
            raise
        raise UnsupportedError(f"torch does not promote these dtypes: {str(error).splitlines()[0]}") from None


def _combine(stronger: torch.dtype, weaker: torch.dtype) -> torch.dtype:
    if stronger.is_complex:
        return stronger
    if stronger.is_floating_point:
        return stronger.to_complex() if weaker.is_complex else stronger
    if weaker.is_complex:
        # Also for uint16 to uint64, which torch.promote_types refuses to mix with complex.
        return weaker
    if stronger is torch.bool or weaker.is_floating_point:
        return torch.promote_types(stronger, weaker)
    return stronger


def is_continuous(dtype: torch.dtype) -> bool:
    """Whether a dtype is a floating-point or complex one, whose values have derivatives."""
    return dtype.is_floating_point or dtype.is_complex


def to_floating(dtype: torch.dtype, default: torch.dtype) -> torch.dtype:
    """Return ``dtype``, or ``default`` (torch's default dtype) in place of an integral one."""
    return dtype if is_continuous(dtype) else default


def number_dtype(kind: type, default: torch.dtype) -> torch.dtype:
    """Return the dtype torch gives a Python number of this type in promotion; ``default`` is torch's default dtype."""
    if kind is bool:
        return torch.bool
    if kind is int:
        return torch.int64
    if kind is float:
        return default
    # Not bcomplex32, which torch 2.15 has and makes of no number.
    return torch.complex64 if default is torch.bfloat16 else default.to_complex()


def fits_in_word(number: Any) -> bool:
    """Whether a Python number is no integer that has no place in 64 bits."""
    return not isinstance(number, int) or -(2**63) <= number < 2**63


def range_error(name: str, number: int) -> ArgumentError:
    """Return what is raised for an integer that does not fit; ``name`` says whose it is."""
    # Python writes out no more than some thousand digits.
    shown = f"={number}" if number.bit_length() <= 1024 else f", an integer of {number.bit_length()} bits,"
    return ArgumentError(f"{name}{shown} does not fit in 64 bits")


def number_kind(dtype: torch.dtype) -> type:
    """Return the Python type of the numbers of a dtype."""
    if dtype.is_complex:
        return complex
    if dtype.is_floating_point:
        return float
    return bool if dtype is torch.bool else int


def is_representable(number: bool | int | float | complex, dtype: torch.dtype) -> bool:
    """Whether a Python number is one of a dtype's, but for rounding; the ends of integers are infinite."""
    if isinstance(number, complex):
        if dtype.is_complex:
            part = dtype.to_real()
            return is_representable(number.real, part) and is_representable(number.imag, part)
        return number.imag == 0 and is_representable(number.real, dtype)
    # An int may be too large to be asked as a float.
    is_finite = isinstance(number, int) or math.isfinite(number)
    if is_continuous(dtype):
        return not is_finite or abs(number) <= torch.finfo(dtype).max
    if not is_finite:
        return not math.isnan(number)
    if number != int(number):
        return False
    return number in (0, 1) if dtype is torch.bool else torch.iinfo(dtype).min <= number <= torch.iinfo(dtype).max


def scalar_dtype(number: Any) -> torch.dtype:
    """Return the C++ type that a functor gets a scalar as, as a dtype: of a Python number or a 0-dim tensor."""
    if not isinstance(number, torch.Tensor):
        return number_dtype(type(number), torch.float64)
    if number.dtype is torch.bool:
        return torch.bool
    if number.is_complex():
        return torch.complex128
    return torch.float64 if number.is_floating_point() else torch.int64


def number_of_dtype(number: bool | int | float | complex, dtype: torch.dtype) -> bool | int | float | complex:
    """Return a representable number as one of the Python type that a dtype's have."""
    kind = number_kind(dtype)
    plain = number.real if isinstance(number, complex) and kind is not complex else number
    if kind is int and not math.isfinite(plain.real):
        return torch.iinfo(dtype).max if plain.real > 0 else torch.iinfo(dtype).min
    if kind is bool:
        return plain.real > 0
    made: int | float | complex = kind(plain)
    return made


def cpp_scalar_type(kind: type) -> str:
    """Return the C++ type a Python number is passed as: bool, int64_t, double or std::complex<double>."""
    return {bool: "bool", int: "int64_t", float: "double", complex: "std::complex<double>"}[kind]


def plain_number(item: Any) -> Any:
    """Return a NumPy scalar as the Python number that torch takes it for, and anything else as it is."""
    # Python's own first, of which Dynamo knows no more than the type; then tensors: asking an abstract class takes its
    # time. NumPy says of all its numbers but bool that they are some.
    if type(item) in (float, int, bool, complex):
        return item
    if isinstance(item, torch.Tensor) or not (isinstance(item, numbers.Number) or _is_numpy_bool(type(item))):
        return item
    return item.item() if hasattr(item, "item") else item


def _is_numpy_bool(kind: type) -> bool:
    return kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_")
