"""The constants of C and C++ that functors may name, and ``std::numeric_limits``: what limits.h declares."""

from __future__ import annotations

import math
from typing import Any

import torch

from fuser.eager.data import Value, constant

__all__ = ["find_constant", "find_limit"]

# digits10 and max_digits10.
_DECIMAL = {torch.float32: (6, 9), torch.float64: (15, 17)}
# By their C++ types. Digits of their own, not what math.log2(math.e) and the like give here.
_CONSTANTS: dict[torch.dtype, dict[str, float]] = {
    torch.float32: {
        "INFINITY": math.inf,
        "POS_INFINITY": math.inf,
        "NEG_INFINITY": -math.inf,
        "NAN": math.nan,
        "FLT_MAX": torch.finfo(torch.float32).max,
        "FLT_MIN": torch.finfo(torch.float32).smallest_normal,
        "FLT_EPSILON": torch.finfo(torch.float32).eps,
    },
    torch.float64: {
        "M_E": 2.7182818284590452354,
        "M_LOG2E": 1.4426950408889634074,
        "M_LOG10E": 0.43429448190325182765,
        "M_LN2": 0.69314718055994530942,
        "M_LN10": 2.30258509299404568402,
        "M_PI": 3.14159265358979323846,
        "M_PI_2": 1.57079632679489661923,
        "M_PI_4": 0.78539816339744830962,
        "M_1_PI": 0.31830988618379067154,
        "M_2_PI": 0.63661977236758134308,
        "M_2_SQRTPI": 1.12837916709551257390,
        "M_SQRT2": 1.41421356237309504880,
        "M_SQRT1_2": 0.70710678118654752440,
        "DBL_MAX": torch.finfo(torch.float64).max,
        "DBL_MIN": torch.finfo(torch.float64).smallest_normal,
        "DBL_EPSILON": torch.finfo(torch.float64).eps,
    },
    torch.int32: {
        "INT_MAX": 2**31 - 1, "INT_MIN": -(2**31), "INT32_MAX": 2**31 - 1, "INT32_MIN": -(2**31), "INT8_MAX": 127,
        "INT8_MIN": -128, "UINT8_MAX": 255, "INT16_MAX": 32767, "INT16_MIN": -32768, "UINT16_MAX": 65535,
    },
    torch.uint32: {"UINT_MAX": 2**32 - 1, "UINT32_MAX": 2**32 - 1},
    torch.int64: {
        "LLONG_MAX": 2**63 - 1, "LLONG_MIN": -(2**63), "INT64_MAX": 2**63 - 1, "INT64_MIN": -(2**63),
    },
    torch.uint64: {"ULLONG_MAX": 2**64 - 1, "UINT64_MAX": 2**64 - 1},
}  # fmt: skip


def find_constant(name: str) -> Value | None:
    """Return the constant of that name, None if there is none."""
    for dtype, values in _CONSTANTS.items():
        if name in values:
            return constant(values[name], dtype)
    return None


def find_limit(member: str, kind: Any) -> Value | None:
    """Return ``std::numeric_limits<kind>::member``, the result where it is a function; None where there is none."""
    if not isinstance(kind, torch.dtype) or kind.is_complex:
        return constant(False, torch.bool) if member == "is_specialized" else None
    limits = _float_limits(kind) if kind.is_floating_point else _integer_limits(kind)
    found = limits.get(member)
    if found is None:
        return None
    is_of_kind = member in {"max", "min", "lowest", "epsilon", "denorm_min", "infinity", "quiet_NaN"}
    dtype = kind if is_of_kind else torch.bool if isinstance(found, bool) else torch.int32
    return constant(found, dtype)


def _float_limits(kind: torch.dtype) -> dict[str, float]:
    info = torch.finfo(kind)
    digits = 1 - round(math.log2(info.eps))
    return {
        "max": info.max, "min": info.smallest_normal, "lowest": info.min, "epsilon": info.eps,
        "denorm_min": info.smallest_normal * info.eps, "infinity": math.inf, "quiet_NaN": math.nan,
        "is_specialized": True, "is_integer": False, "is_exact": False, "is_iec559": True, "is_signed": True,
        "has_infinity": True, "has_quiet_NaN": True, "radix": 2, "digits": digits, "digits10": _DECIMAL[kind][0],
        "max_digits10": _DECIMAL[kind][1], "min_exponent": 1 + round(math.log2(info.smallest_normal)),
        "max_exponent": round(math.log2(info.max)),
    }  # fmt: skip


def _integer_limits(kind: torch.dtype) -> dict[str, float]:
    low, high = (0, 1) if kind is torch.bool else (torch.iinfo(kind).min, torch.iinfo(kind).max)
    digits = high.bit_length()
    return {
        "max": high, "min": low, "lowest": low, "epsilon": 0, "denorm_min": 0, "infinity": 0, "quiet_NaN": 0,
        "is_specialized": True, "is_integer": True, "is_exact": True, "is_iec559": False, "is_signed": low < 0,
        "has_infinity": False, "has_quiet_NaN": False, "radix": 2, "digits": digits,
        "digits10": digits * 30103 // 100000, "max_digits10": 0, "min_exponent": 0, "max_exponent": 0,
    }  # fmt: skip
