"""C++ operators on constants, tensors and nodes of a graph.

The rules are C++'s for the types of LP64, on data as ATen has it. Where C++ leaves a result open (overflow of signed
integers, shifts by more than the width, division by zero) the result is any value and nothing traps. (Kernels that
trap are written around it: cxx/division.py.)
"""

from __future__ import annotations

from typing import Any

import torch

from fuser.dtypes import is_continuous
from fuser.eager.data import WHOLE_FUNCTIONS, Data, Value, constant, emit, is_number, storage_dtype
from fuser.eager.promotion import common_type, convert, mask_to, promote_integer, shift_right_unsigned

__all__ = ["binary", "both", "either", "join_complex", "negate", "select", "split_complex", "unary"]

aten = torch.ops.aten

_TOP = -(2**63)
_ARITHMETIC = {"+": aten.add.Tensor, "-": aten.sub.Tensor, "*": aten.mul.Tensor, "/": aten.div.Tensor}
_BITWISE = {"&": aten.bitwise_and.Tensor, "|": aten.bitwise_or.Tensor, "^": aten.bitwise_xor.Tensor}
_COMPARISONS = {
    "<": aten.lt.Tensor,
    "<=": aten.le.Tensor,
    ">": aten.gt.Tensor,
    ">=": aten.ge.Tensor,
    "==": aten.eq.Tensor,
    "!=": aten.ne.Tensor,
}
# How an operator reads with its operands exchanged.
_SWAPPED = {"+": "+", "*": "*", "&": "&", "|": "|", "^": "^", "==": "==", "!=": "!="}
_SWAPPED |= {"<": ">", ">": "<", "<=": ">=", ">=": "<="}


# ---- operators ----


def unary(op: str, a: Value) -> Value:
    """Apply "-", "+", "~" or "!".

    Raises:
        TypeError: C++ has no such operator for the type.
    """
    if op == "!":
        return Value(torch.bool, negate(convert(a, torch.bool).data))
    a = convert(a, promote_integer(a.dtype))
    if op == "+":
        return a
    is_integer = not is_continuous(a.dtype)
    if op == "~" and not is_integer:
        raise TypeError(f"no operator ~ for {_name(a.dtype)}")
    if a.is_constant:
        return constant(-a.data if op == "-" else ~a.data, a.dtype)
    data = emit(aten.neg.default if op == "-" else aten.bitwise_not.default, a.data, dtype=storage_dtype(a.dtype))
    return Value(a.dtype, mask_to(data, a.dtype))


def binary(op: str, a: Value, b: Value) -> Value:
    """Apply `+ - * / % << >> & | ^ < <= > >= == != && ||`, the last two on both operands.

    Raises:
        TypeError: C++ has no such operator for the types.
    """
    if op in ("&&", "||"):
        combine = both if op == "&&" else either
        return Value(torch.bool, combine(convert(a, torch.bool).data, convert(b, torch.bool).data))
    if op in ("<<", ">>"):
        return _shift(op, a, b)
    dtype = common_type(a.dtype, b.dtype)
    is_integer = not is_continuous(dtype)
    if (op in "%&|^" and not is_integer) or (op in ("<", "<=", ">", ">=") and dtype.is_complex):
        raise TypeError(f"no operator {op} for {_name(a.dtype)} and {_name(b.dtype)}")
    if dtype.is_complex:
        return _complex(op, a, b, dtype)
    if a.dtype is b.dtype is torch.bool and not (a.is_constant and b.is_constant) and op in "&|^==!=":
        result = _operate(op, a, b, torch.bool)
        return result if op in _COMPARISONS else convert(result, dtype)
    a, b = convert(a, dtype), convert(b, dtype)
    if a.is_constant and b.is_constant:
        return _of_numbers(op, a.data, b.data, dtype)
    return _operate(op, a, b, dtype)


def _operate(op: str, a: Value, b: Value, dtype: torch.dtype) -> Value:
    # Operands of one real type, one of them at least no constant.
    if a.is_constant and op in _SWAPPED:
        op, a, b = _SWAPPED[op], b, a
    x, y = a.stored, b.stored
    if op in _COMPARISONS:
        if dtype is torch.uint64 and op not in ("==", "!="):
            x, y = _flip(x), _flip(y)
        return Value(torch.bool, emit(_COMPARISONS[op], x, y, dtype=torch.bool))
    stored = storage_dtype(dtype)
    if op in "/%" and not dtype.is_floating_point:
        return Value(dtype, _divide_uint64(op, x, y) if dtype is torch.uint64 else _divide(op, x, y, dtype))
    return Value(dtype, mask_to(emit((_ARITHMETIC | _BITWISE)[op], x, y, dtype=stored), dtype))


def _divide(op: str, x: Data, y: Data, dtype: torch.dtype) -> Data:
    # torch raises for a zero denominator, and the machine traps where the quotient -INT_MIN is out of range: both
    # kinds of denominator become 1, and x / -1 is -x.
    stored = storage_dtype(dtype)
    minus = False if is_number(y) and y != -1 else emit(aten.eq.Tensor, y, -1, dtype=torch.bool)
    zero = False if is_number(y) and y != 0 else emit(aten.eq.Tensor, y, 0, dtype=torch.bool)
    if dtype is torch.uint32:
        minus = False
    y = _choose(either(zero, minus), 1, y, stored)
    if op == "%":
        return emit(aten.fmod.Tensor, x, y, dtype=stored)
    quotient = emit(aten.div.Tensor_mode, x, y, dtype=stored, rounding_mode="trunc")
    return quotient if minus is False else _choose(minus, emit(aten.neg.default, x, dtype=stored), quotient, stored)


def _divide_uint64(op: str, x: Data, y: Data) -> Data:
    # By signed division (H. S. Warren, Hacker's Delight, section 9-3): half of x is not negative, and twice its
    # quotient is right or one too small. A denominator of 2^63 and more goes into x once or not at all.
    zero = emit(aten.eq.Tensor, y, 0, dtype=torch.bool)
    high = emit(aten.lt.Tensor, y, 0, dtype=torch.bool)
    safe = _choose(either(zero, high), 1, y, torch.int64)
    half = emit(aten.div.Tensor_mode, shift_right_unsigned(x, 1), safe, dtype=torch.int64, rounding_mode="trunc")
    twice = emit(aten.bitwise_left_shift.Tensor, half, 1, dtype=torch.int64)
    estimate = _choose(high, 0, twice, torch.int64)
    divisor = _choose(zero, 1, y, torch.int64)
    rest = emit(aten.sub.Tensor, x, emit(aten.mul.Tensor, estimate, divisor, dtype=torch.int64), dtype=torch.int64)
    again = emit(aten.ge.Tensor, _flip(rest), _flip(divisor), dtype=torch.bool)
    if op == "%":
        return _choose(again, emit(aten.sub.Tensor, rest, divisor, dtype=torch.int64), rest, torch.int64)
    return emit(aten.add.Tensor, estimate, emit(aten._to_copy.default, again, dtype=torch.int64), dtype=torch.int64)


def _flip(data: Data) -> Data:
    # In this order int64 compares as uint64.
    return emit(aten.bitwise_xor.Tensor, data, _TOP, dtype=torch.int64)


def _shift(op: str, a: Value, b: Value) -> Value:
    a = convert(a, promote_integer(a.dtype))
    if any(is_continuous(v.dtype) for v in (a, b)):
        raise TypeError(f"no operator {op} for {_name(a.dtype)} and {_name(b.dtype)}")
    if a.is_constant and b.is_constant:
        inside = 0 <= b.data < 8 * a.dtype.itemsize
        if op == "<<":
            return constant(a.data << b.data if inside else 0, a.dtype)
        return constant(a.data >> b.data if inside else -(a.stored < 0), a.dtype)
    stored = storage_dtype(a.dtype)
    x, count = a.stored, convert(b, stored).data
    if op == "<<":
        return Value(a.dtype, mask_to(emit(aten.bitwise_left_shift.Tensor, x, count, dtype=stored), a.dtype))
    if a.dtype is torch.uint64:
        return Value(a.dtype, shift_right_unsigned(x, count))
    return Value(a.dtype, emit(aten.bitwise_right_shift.Tensor, x, count, dtype=stored))


def _of_numbers(op: str, x: Any, y: Any, dtype: torch.dtype) -> Value:
    compare = {"<": x < y, "<=": x <= y, ">": x > y, ">=": x >= y, "==": x == y, "!=": x != y}
    if op in compare:
        return Value(torch.bool, compare[op])
    if op in _BITWISE:
        return constant({"&": x & y, "|": x | y, "^": x ^ y}[op], dtype)
    if op in "+-*":
        # float32: double holds enough for the second rounding to change nothing (S. Figueroa, 1995).
        return constant(x + y if op == "+" else x - y if op == "-" else x * y, dtype)
    if dtype.is_floating_point:
        return constant(x / y, dtype) if y != 0 else Value(dtype, emit(aten.div.Tensor, x, y, dtype=dtype))
    y = y or 1
    quotient = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
    return constant(quotient if op == "/" else x - quotient * y, dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- complex numbers ----


def split_complex(value: Value) -> tuple[Value, Value]:
    """Return the real and the imaginary part of a complex number."""
    part = value.dtype.to_real()
    if value.is_constant:
        return Value(part, value.data.real), Value(part, value.data.imag)
    return (
        Value(part, emit(aten.real.default, value.data, dtype=part)),
        Value(part, emit(aten.imag.default, value.data, dtype=part)),
    )


def join_complex(re: Value, im: Value) -> Value:
    """Return the complex number of two parts of one type."""
    dtype = re.dtype.to_complex()
    if re.is_constant and im.is_constant:
        return constant(complex(re.data, im.data), dtype)
    # ATen's takes no number of another device beside a tensor.
    a, b = (
        emit(aten.full_like.default, other.data, part.data, dtype=part.dtype) if part.is_constant else part.data
        for part, other in ((re, im), (im, re))
    )
    return Value(dtype, emit(aten.complex.default, a, b, dtype=dtype))


def _complex(op: str, a: Value, b: Value, dtype: torch.dtype) -> Value:
    is_mixed = not (a.dtype.is_complex and b.dtype.is_complex)
    if is_mixed and not (op == "/" and b.dtype.is_complex):
        return _complex_and_real(op, a, b, dtype)
    a, b = convert(a, dtype), convert(b, dtype)
    if op in ("==", "!="):
        return Value(torch.bool, emit(_COMPARISONS[op], a.data, b.data, dtype=torch.bool))
    if op in "+-" and not WHOLE_FUNCTIONS.get():
        # ATen multiplies b by a complex 1 first, which makes infinities NaN.
        parts = zip(split_complex(a), split_complex(b), strict=True)
        re, im = (binary(op, x, y) for x, y in parts)
        return join_complex(re, im)
    result = Value(dtype, emit(_ARITHMETIC[op], a.data, b.data, dtype=dtype))
    return result if op == "*" or WHOLE_FUNCTIONS.get() else _check_quotient(result, a, b)


def _check_quotient(quotient: Value, a: Value, b: Value) -> Value:
    # Divided by zero, the parts become infinite one by one.
    is_zero = emit(aten.eq.Tensor, b.data, 0, dtype=torch.bool)
    if is_zero is False:
        return quotient
    parts = zip(split_complex(a), split_complex(b), strict=True)
    re, im = (binary("/", x, y) for x, y in parts)
    return select(is_zero, join_complex(re, im), quotient)


def _complex_and_real(op: str, a: Value, b: Value, dtype: torch.dtype) -> Value:
    # Part by part: infinities, NaN and negative zeros come out otherwise when the real number becomes complex first.
    if a.dtype.is_complex:
        (re, im), v = split_complex(a), convert(b, dtype.to_real())
        if op in ("==", "!="):
            re, im = binary(op, re, v), binary(op, im, constant(0, im.dtype))
            return binary("&&" if op == "==" else "||", re, im)
        return join_complex(binary(op, re, v), binary(op, im, v) if op in "*/" else im)
    (re, im), v = split_complex(b), convert(a, dtype.to_real())
    if op == "-":
        return join_complex(binary("-", v, re), unary("-", im))
    return _complex_and_real(op, b, a, dtype)


# ---- masks ----


def both(a: Data, b: Data) -> Data:
    """Return `a and b` of bool data."""
    if is_number(a) or is_number(b):
        return (b if a else False) if is_number(a) else (a if b else False)
    return emit(aten.logical_and.default, a, b, dtype=torch.bool)


def either(a: Data, b: Data) -> Data:
    """Return `a or b` of bool data."""
    if is_number(a) or is_number(b):
        return (True if a else b) if is_number(a) else (True if b else a)
    return emit(aten.logical_or.default, a, b, dtype=torch.bool)


def negate(a: Data) -> Data:
    """Return `not a` of bool data."""
    return not a if is_number(a) else emit(aten.logical_not.default, a, dtype=torch.bool)


def select(mask: Data, a: Value, b: Value) -> Value:
    """Return `mask ? a : b` for bool data and two values of one type."""
    assert a.dtype is b.dtype, (a.dtype, b.dtype)
    if is_number(mask):
        return a if mask else b
    return Value(a.dtype, _choose(mask, a.stored, b.stored, storage_dtype(a.dtype)))


def _choose(mask: Data, x: Data, y: Data, dtype: torch.dtype) -> Data:
    if is_number(mask):
        return x if mask else y
    if x is y:
        return x
    if dtype is torch.bool and is_number(x) and is_number(y):
        return x if x is y else mask if x else negate(mask)
    return emit(aten.where.self, mask, x, y, dtype=dtype)
