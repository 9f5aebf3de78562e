"""CUDA's integer functions, bit casts and conversions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from fuser.eager.math.real import constant_of, round_away
from fuser.eager.math.terms import Formula, Term, apply, bits_of, where

__all__ = ["BITS", "TO_INTEGER"]

aten = torch.ops.aten
_LETTERS = {"int": "i", "uint": "u", "ll": "l", "ull": "U", "float": "f", "double": "d"}
_TARGETS = (
    ("int", "i", torch.int32),
    ("uint", "u", torch.uint32),
    ("ll", "l", torch.int64),
    ("ull", "U", torch.uint64),
)


# ---- counting ----


def popcount(x: Term) -> Term:
    """Return how many bits of a uint32 are set, as int."""
    # H. S. Warren, Hacker's Delight, section 5-1; int64 has room for the sums.
    n = x.to(torch.int64)
    n = n - ((n >> 1) & 0x55555555)
    n = (n & 0x33333333) + ((n >> 2) & 0x33333333)
    n = (n + (n >> 4)) & 0x0F0F0F0F
    return (((n * 0x01010101) >> 24) & 0xFF).to(torch.int32)


def popcount_64(x: Term) -> Term:
    """Return how many bits of a uint64 are set, as int."""
    low, high = _halves(x)
    return popcount(low) + popcount(high)


def _halves(x: Term) -> tuple[Term, Term]:
    return x.to(torch.uint32), (x.to(torch.uint64) >> 32).to(torch.uint32)


def _exponent(n: Term) -> Term:
    # Of an int64 as double: 1023 for 1 and one more for each place; the number has few enough digits to be exact.
    return (bits_of(n.to(torch.float64)) >> 52) & 0x7FF


def count_leading_zeros(x: Term) -> Term:
    """Return the number of zeros above the highest bit of an int, as int."""
    n = x.to(torch.uint32).to(torch.int64)
    return where(n.equals(0), constant_of(32, n), 1054 - _exponent(n)).to(torch.int32)


def count_leading_zeros_64(x: Term) -> Term:
    """Return the number of zeros above the highest bit of a long long, as int."""
    # Without every bit below a set one the number does not round up to the next power of two.
    above = x & ~(x >> 1)
    zeros = where(x < 0, constant_of(0, x), where(x.equals(0), constant_of(64, x), 1086 - _exponent(above)))
    return zeros.to(torch.int32)


def find_first_set(x: Term) -> Term:
    """Return the place of the lowest set bit, from 1, as int; 0 if none is set."""
    n = x.to(torch.int64)
    return where(n.equals(0), constant_of(0, n), _exponent(n & -n) - 1022).to(torch.int32)


# ---- order of bits ----


def reverse_bits(x: Term) -> Term:
    """Return a uint32 with its bits in the opposite order."""
    n = x.to(torch.int64)
    for count, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF), (16, 0x0000FFFF)):
        n = ((n >> count) & mask) | ((n & mask) << count)
    return n.to(torch.uint32)


def reverse_bits_64(x: Term) -> Term:
    """Return a uint64 with its bits in the opposite order."""
    low, high = _halves(x)
    return (reverse_bits(low).to(torch.uint64) << 32) | reverse_bits(high).to(torch.uint64)


# ---- products ----


def _high(x: Term, y: Term) -> Term:
    return ((x.to(torch.uint64) * y.to(torch.uint64)) >> 32).to(torch.uint32)


def _high_signed(x: Term, y: Term) -> Term:
    return ((x.to(torch.int64) * y.to(torch.int64)) >> 32).to(torch.int32)


def _high_64(x: Term, y: Term) -> Term:
    (a, b), (c, d) = ((n & 0xFFFFFFFF, n >> 32) for n in (x, y))
    low, left, right = a * c, b * c, a * d
    middle = (low >> 32) + (left & 0xFFFFFFFF) + (right & 0xFFFFFFFF)
    return b * d + (left >> 32) + (right >> 32) + (middle >> 32)


def _high_signed_64(x: Term, y: Term) -> Term:
    u, v = x.to(torch.uint64), y.to(torch.uint64)
    return (_high_64(u, v) - where(x < 0, v, 0) - where(y < 0, u, 0)).to(torch.int64)


def _signed_24(x: Term) -> Term:
    return ((x.to(torch.int64) & 0xFFFFFF) ^ 0x800000) - 0x800000


def _product_24(x: Term, y: Term) -> Term:
    return (_signed_24(x) * _signed_24(y)).to(torch.int32)


def _unsigned_product_24(x: Term, y: Term) -> Term:
    return ((x.to(torch.int64) & 0xFFFFFF) * (y.to(torch.int64) & 0xFFFFFF)).to(torch.uint32)


# ---- several numbers at once ----


def _joined(low: Term, high: Term) -> Term:
    return (high.to(torch.uint64) << 32) | low.to(torch.uint64)


def _funnel(low: Term, high: Term, count: Term, *, leftwards: bool, clamps: bool) -> Term:
    n = count.to(torch.uint64)
    n = where(n < 32, n, constant_of(32, n)) if clamps else n & 31
    whole = _joined(low, high)
    return ((whole << n) >> 32 if leftwards else whole >> n).to(torch.uint32)


def _permute_bytes(low: Term, high: Term, which: Term) -> Term:
    whole, chosen = _joined(low, high), which.to(torch.uint64)
    made = (whole >> ((chosen & 7) * 8)) & 0xFF
    for slot in (1, 2, 3):
        made = made | (((whole >> (((chosen >> 4 * slot) & 7) * 8)) & 0xFF) << 8 * slot)
    return made.to(torch.uint32)


def _sum_of_differences(x: Term, y: Term, z: Term) -> Term:
    difference = x.to(torch.int64) - y.to(torch.int64)
    return (where(difference < 0, -difference, difference) + z.to(torch.int64)).to(torch.uint32)


def _average(x: Term, y: Term, dtype: torch.dtype, carry: int) -> Term:
    return ((x.to(torch.int64) + y.to(torch.int64) + carry) >> 1).to(dtype)


# ---- bit casts ----


def _cast_bits(x: Term, dtype: torch.dtype) -> Term:
    return apply(aten.view.dtype, x, dtype=dtype)


def _high_word(x: Term) -> Term:
    return (_cast_bits(x, torch.int64) >> 32).to(torch.int32)


def _low_word(x: Term) -> Term:
    return _cast_bits(x, torch.int64).to(torch.int32)


def _of_words(high: Term, low: Term) -> Term:
    bits = (high.to(torch.int64) << 32) | low.to(torch.uint32).to(torch.int64)
    return _cast_bits(bits, torch.float64)


# ---- conversions ----

_MODES: dict[str, Formula] = {
    "rn": partial(apply, aten.round.default),
    "rz": partial(apply, aten.trunc.default),
    "rd": partial(apply, aten.floor.default),
    "ru": partial(apply, aten.ceil.default),
}


def _saturate(rounded: Formula, dtype: torch.dtype) -> Formula:
    info = torch.iinfo(dtype)
    # Of 64 bits, double has not the largest number, but the next.
    low, above = float(info.min), float(info.max)

    def convert(x: Term) -> Term:
        y = rounded(x).to(torch.float64)
        is_inside = (y >= low) & (y < above)
        inside = where(is_inside, y, 0.0).to(dtype)
        nan_result = constant_of(0 if info.bits < 64 else 1 << 63, inside)
        positive = where(y > 0.0, constant_of(info.max, inside), nan_result)
        return where(is_inside, inside, where(y < 0.0, constant_of(info.min, inside), positive))

    return convert


def _rounded_to(rounded: Formula, dtype: torch.dtype) -> Formula:
    return lambda x: rounded(x).to(dtype)


# Names of the prelude with the types of parameters and result (see functions.py).
TO_INTEGER: dict[str, tuple[str, Formula]] = {
    "llrint": ("l", _rounded_to(_MODES["rn"], torch.int64)),
    "llround": ("l", _rounded_to(round_away, torch.int64)),
    "lrint": ("l", _rounded_to(_MODES["rn"], torch.int64)),
    "lround": ("l", _rounded_to(round_away, torch.int64)),
}

BITS: dict[str, tuple[str, str, Callable[..., Term]]] = {
    "__float_as_int": ("f", "i", partial(_cast_bits, dtype=torch.int32)),
    "__int_as_float": ("i", "f", partial(_cast_bits, dtype=torch.float32)),
    "__float_as_uint": ("f", "u", lambda x: _cast_bits(x, torch.int32).to(torch.uint32)),
    "__uint_as_float": ("u", "f", lambda x: _cast_bits(x.to(torch.int32), torch.float32)),
    "__double_as_longlong": ("d", "l", partial(_cast_bits, dtype=torch.int64)),
    "__longlong_as_double": ("l", "d", partial(_cast_bits, dtype=torch.float64)),
    "__double2hiint": ("d", "i", _high_word),
    "__double2loint": ("d", "i", _low_word),
    "__hiloint2double": ("ii", "d", _of_words),
    "__popc": ("u", "i", popcount),
    "__popcll": ("U", "i", popcount_64),
    "__clz": ("i", "i", count_leading_zeros),
    "__clzll": ("l", "i", count_leading_zeros_64),
    "__ffs": ("i", "i", find_first_set),
    "__ffsll": ("l", "i", find_first_set),
    "__brev": ("u", "u", reverse_bits),
    "__brevll": ("U", "U", reverse_bits_64),
    "__umulhi": ("uu", "u", _high),
    "__mulhi": ("ii", "i", _high_signed),
    "__umul64hi": ("UU", "U", _high_64),
    "__mul64hi": ("ll", "l", _high_signed_64),
    "__mul24": ("ii", "i", _product_24),
    "__umul24": ("uu", "u", _unsigned_product_24),
    "__funnelshift_l": ("uuu", "u", partial(_funnel, leftwards=True, clamps=False)),
    "__funnelshift_lc": ("uuu", "u", partial(_funnel, leftwards=True, clamps=True)),
    "__funnelshift_r": ("uuu", "u", partial(_funnel, leftwards=False, clamps=False)),
    "__funnelshift_rc": ("uuu", "u", partial(_funnel, leftwards=False, clamps=True)),
    "__byte_perm": ("uuu", "u", _permute_bytes),
    "__sad": ("iiu", "u", _sum_of_differences),
    "__usad": ("uuu", "u", _sum_of_differences),
    "__hadd": ("ii", "i", partial(_average, dtype=torch.int32, carry=0)),
    "__rhadd": ("ii", "i", partial(_average, dtype=torch.int32, carry=1)),
    "__uhadd": ("uu", "u", partial(_average, dtype=torch.uint32, carry=0)),
    "__urhadd": ("uu", "u", partial(_average, dtype=torch.uint32, carry=1)),
    **{
        f"__{source}2{target}_{mode}": (_LETTERS[source], letter, _saturate(rounded, dtype))
        for source in ("float", "double")
        for target, letter, dtype in _TARGETS
        for mode, rounded in _MODES.items()
    },
    **{
        f"__{source}2{target}_rn": (_LETTERS[source], _LETTERS[target], _rounded_to(lambda x: x, dtype))
        for source in ("int", "uint", "ll", "ull", "double")
        for target, dtype in (("float", torch.float32), ("double", torch.float64))
        if source != target
    },
}
