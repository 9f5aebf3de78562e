"""C++'s arithmetic types: promotion and conversions, on constants, tensors and nodes of a graph."""

from __future__ import annotations

import math
from typing import Any

import torch

from fuser.dtypes import is_continuous
from fuser.eager.data import Data, Value, emit, round_to, storage_dtype

__all__ = ["common_type", "convert", "mask_to", "promote_integer", "shift_right_unsigned"]

aten = torch.ops.aten

# Integer types by C++'s rank; smaller ones become int.
_RANK = (torch.int32, torch.uint32, torch.int64, torch.uint64)
_TOP = -(2**63)
_MASKS = {torch.uint16: 0xFFFF, torch.uint32: 0xFFFFFFFF}


def promote_integer(dtype: torch.dtype) -> torch.dtype:
    """Return the type of `+x`: int for bool and what is shorter than int."""
    if is_continuous(dtype) or dtype in _RANK:
        return dtype
    return torch.int32


def common_type(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """Return the type of `a + b`. A real number of any type takes a complex number's precision."""
    a, b = promote_integer(a), promote_integer(b)
    if a.is_complex or b.is_complex:
        return torch.promote_types(a, b) if a.is_complex and b.is_complex else a if a.is_complex else b
    if a.is_floating_point or b.is_floating_point:
        return torch.float64 if torch.float64 in (a, b) else torch.float32
    return max(a, b, key=_RANK.index)


# ---- conversions ----


def convert(value: Value, dtype: torch.dtype) -> Value:
    """Return static_cast<dtype>(value).

    Floats are cut off; out of the integer's range the result is the machine's (x86: the smallest of int32 or int64,
    cut to the type). A complex number loses its imaginary part, and is true if either part is.
    """
    source = value.dtype
    if source is dtype:
        return value
    if value.is_constant:
        return Value(dtype, _convert_number(value.data, source, dtype))
    if dtype is torch.bool:
        return Value(dtype, _as_bool(value.data))
    if source.is_complex and not dtype.is_complex:
        return convert(Value(source.to_real(), emit(aten.real.default, value.data, dtype=source.to_real())), dtype)
    if dtype.is_complex:
        part = value if source.is_complex else convert(value, dtype.to_real())
        return Value(dtype, _cast(part.data, dtype))
    if source.is_floating_point:
        return Value(dtype, _cast(value.data, dtype) if dtype.is_floating_point else _from_float(value, dtype))
    if dtype.is_floating_point:
        return Value(dtype, _from_uint64(value.data, dtype) if source is torch.uint64 else _cast(value.data, dtype))
    return Value(dtype, _between_integers(value.data, source, dtype))


def _convert_number(number: Any, source: torch.dtype, dtype: torch.dtype) -> Any:
    if source.is_complex and not dtype.is_complex and dtype is not torch.bool:
        number = number.real
    if not isinstance(number, float) or dtype is torch.bool or is_continuous(dtype):
        return round_to(number, dtype)
    if dtype is torch.uint64 and number >= 2.0**63:
        return round_to(_cut_off(number - 2.0**63, 63) ^ _TOP, dtype)
    return round_to(_cut_off(number, 31 if dtype.is_signed and dtype is not torch.int64 else 63), dtype)


def _cut_off(number: float, bits: int) -> int:
    return int(number) if math.isfinite(number) and -(2**bits) <= int(number) < 2**bits else -(2**bits)


def _cast(data: Data, dtype: torch.dtype) -> Data:
    return emit(aten._to_copy.default, data, dtype=dtype)


def _as_bool(data: Data) -> Data:
    # The int that C++ makes of a comparison becomes the comparison again.
    if isinstance(data, torch.fx.Node) and data.target is aten._to_copy.default:
        inner = data.args[0]
        if isinstance(inner, torch.fx.Node) and inner.meta["dtype"] is torch.bool:
            return inner
    return emit(aten.ne.Tensor, data, 0, dtype=torch.bool)


def _from_float(value: Value, dtype: torch.dtype) -> Data:
    data = value.data
    if dtype in (torch.int8, torch.int16):
        return _cast(_cast(data, torch.int32), dtype)
    if dtype is torch.uint8:
        return _cast(_cast(data, torch.int64), dtype)
    if dtype is torch.uint64:
        high = _cast(emit(aten.sub.Tensor, data, 2.0**63, dtype=value.dtype), torch.int64)
        flipped = emit(aten.bitwise_xor.Tensor, high, _TOP, dtype=torch.int64)
        is_high = emit(aten.ge.Tensor, data, 2.0**63, dtype=torch.bool)
        return emit(aten.where.self, is_high, flipped, _cast(data, torch.int64), dtype=torch.int64)
    stored = storage_dtype(dtype)
    return mask_to(_cast(data, stored), dtype)


def _from_uint64(data: Data, dtype: torch.dtype) -> Data:
    # Halved, the bit that is lost kept as sticky one, the upper half of the range is int64's.
    half = emit(aten.bitwise_or.Tensor, shift_right_unsigned(data, 1), _bit_and(data, 1), dtype=torch.int64)
    doubled = emit(aten.mul.Tensor, _cast(half, dtype), 2.0, dtype=dtype)
    is_high = emit(aten.lt.Tensor, data, 0, dtype=torch.bool)
    return emit(aten.where.self, is_high, doubled, _cast(data, dtype), dtype=dtype)


def _between_integers(data: Data, source: torch.dtype, dtype: torch.dtype) -> Data:
    stored = storage_dtype(dtype)
    if storage_dtype(source) is not stored:
        data = _cast(data, stored)
    fits = not source.is_signed and source.itemsize <= dtype.itemsize
    return data if fits else mask_to(data, dtype)


def _bit_and(data: Data, number: int) -> Data:
    return emit(aten.bitwise_and.Tensor, data, number, dtype=torch.int64)


def mask_to(data: Data, dtype: torch.dtype) -> Data:
    """Bring stored data that may have left the range of uint16 or uint32 back into it; others need nothing."""
    return _bit_and(data, _MASKS[dtype]) if dtype in _MASKS else data


def shift_right_unsigned(data: Data, count: Data) -> Data:
    """Return `data >> count` of stored uint64."""
    # The sign's copies are cut off: the mask keeps 64 - count bits.
    rest = emit(aten.sub.Tensor, 63, count, dtype=torch.int64)
    copies = emit(aten.bitwise_left_shift.Tensor, -2, rest, dtype=torch.int64)
    mask = emit(aten.bitwise_not.default, copies, dtype=torch.int64)
    shifted = emit(aten.bitwise_right_shift.Tensor, data, count, dtype=torch.int64)
    return emit(aten.bitwise_and.Tensor, shifted, mask, dtype=torch.int64)
