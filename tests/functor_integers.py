"""Functors, part six: integers, bits, and floating-point numbers as bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from functor_case import BOOL, INTS, Case

SIGNED = (torch.int8, torch.int32, torch.int64)
FEW = (torch.uint8, torch.int32)


def _each(function: Callable[..., int]) -> Callable[..., Any]:
    """Make a reference from a function of Python integers; results wrap to 64 bits."""

    def apply(*tensors: Any) -> Any:
        tensors = torch.broadcast_tensors(*tensors)
        rows = zip(*(item.reshape(-1).tolist() for item in tensors), strict=True)
        values = [(function(*row) + 2**63) % 2**64 - 2**63 for row in rows]
        return torch.tensor(values, dtype=torch.int64).reshape(tensors[0].shape)

    return apply


def _xorshift(x: int) -> int:
    h = (x ^ 0x9E3779B9) & 0xFFFFFFFF
    h ^= h << 13 & 0xFFFFFFFF
    h ^= h >> 17
    return h ^ (h << 5 & 0xFFFFFFFF)


def _splitmix(x: int) -> int:
    z = (x + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return (z ^ z >> 31) % 2**64


def _morton(x: int, y: int) -> int:
    return sum((x >> n & 1) << 2 * n | (y >> n & 1) << 2 * n + 1 for n in range(8))


def _crc(x: int) -> int:
    # Long division by x^8 + x^2 + x + 1.
    rest = (x & 0xFF) << 8
    for place in range(15, 7, -1):
        if rest >> place & 1:
            rest ^= 0x107 << place - 8
    return rest


def _weekday(day: int, month: int) -> int:
    lengths = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]
    return (day + sum(lengths[: month % 12])) % 7


def _tally(x: int) -> int:
    digits = [x >> 2 * n & 3 for n in range(4)]
    return max(digits.count(value) for value in range(4)) * 10 + digits.count(3)


def _digits(x: int) -> int:
    size = int(str(abs(x))[::-1]) % 251
    return size if x > 0 else -size


def _rsqrt_bits(x: Any) -> Any:
    return 1 / x.sqrt()


def _to_half(x: Any) -> Any:
    return x.float().half().double()


def _exponent(x: Any) -> Any:
    return torch.floor(torch.log2(x.abs()))


INTEGERS: tuple[Case, ...] = (
    Case(
        "xorshift",
        """template <typename T> T xorshift(T x) {
          // G. Marsaglia, "Xorshift RNGs" (2003)
          uint32_t h = static_cast<uint32_t>(x) ^ 0x9e3779b9u;
          h ^= h << 13;
          h ^= h >> 17;
          h ^= h << 5;
          return static_cast<T>(h);
        }""",
        _each(_xorshift),
        domain=(-100, 100),
        dtypes=INTS,
        is_differentiable=False,
    ),
    Case(
        "splitmix",
        """template <typename T> T splitmix(T x) {
          // G. Steele, D. Lea, C. Flood, "Fast Splittable Pseudorandom Number Generators" (2014)
          uint64_t z = uint64_t(x) + 0x9e3779b97f4a7c15ull;
          z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
          z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
          return T(z ^ (z >> 31));
        }""",
        _each(_splitmix),
        domain=(-100, 100),
        dtypes=SIGNED,
        is_differentiable=False,
    ),
    Case(
        "popcount",
        """template <typename T> T popcount(T x) {
          // Sums of neighbouring bits, pairs and fours, as in H. Warren, "Hacker's Delight".
          unsigned v = (unsigned)x & 0xffffU;
          v = v - ((v >> 1) & 0x5555);
          v = (v & 0x3333) + ((v >> 2) & 0x3333);
          v = (v + (v >> 4)) & 0x0f0f;
          return T((v + (v >> 8)) & 0x1f);
        }""",
        _each(lambda x: (x & 0xFFFF).bit_count()),
        domain=(-100, 100),
        dtypes=FEW,
        is_differentiable=False,
    ),
    Case(
        "intrinsics",
        """template <typename T> T intrinsics(T x) {
          const unsigned v = (unsigned)x;
          const int count = __popc(v) + __clz((int)v) * 2 + __ffs((int)v);
          return T(count + (int)(__brev(v) >> 28) + (int)__umulhi(v, 0x90000000u) % 100);
        }""",
        _each(
            lambda x: (
                (x % 2**32).bit_count()
                + 2 * (32 - (x % 2**32).bit_length())
                + (x & -x).bit_length()
                + (int(f"{x % 2**32:032b}"[::-1], 2) >> 28)
                + (x % 2**32 * 0x90000000 >> 32) % 100
            )
        ),
        # Not below 0: __umulhi then gives more than an int holds.
        domain=(0, 100),
        dtypes=FEW,
        is_differentiable=False,
    ),
    Case(
        "morton",
        """template <typename T> uint32_t spread(T x) {
          uint32_t v = uint32_t(x) & 0xffu;
          v = (v | v << 4) & 0x0f0fu;
          v = (v | v << 2) & 0x3333u;
          return (v | v << 1) & 0x5555u;
        }
        template <typename T> T morton(T x, T y) { return static_cast<T>(spread(x) | spread(y) << 1); }""",
        _each(_morton),
        tensors=2,
        domain=(0, 127),
        dtypes=FEW,
        is_differentiable=False,
    ),
    Case(
        "crc",
        """template <typename T> T crc(T x) {
          uint8_t rest = (uint8_t)x;
          for (int n = 0; n < 8; ++n) {
            if (rest & 0x80) rest = (rest << 1) ^ 0x07;
            else rest <<= 1;
          }
          return (T)rest;
        }""",
        _each(_crc),
        domain=(-100, 100),
        dtypes=(torch.uint8, torch.int16),
        is_differentiable=False,
    ),
    Case(
        "square_root",
        """template <typename T> T square_root(T x) {
          int root = 0;
          for (int bit = 1 << 3; bit; bit >>= 1) {
            const int next = root | bit;
            if (next * next <= int(x)) root = next;
          }
          return T(root);
        }""",
        lambda x: torch.floor(torch.sqrt(x.double())).long(),
        domain=(0, 127),
        dtypes=(torch.int8, torch.int64),
        is_differentiable=False,
    ),
    Case(
        "digits",
        """template <typename T> T digits(T x) {
          int rest = x, reversed = 0;
          do {
            reversed = reversed * 10 + rest % 10;
            rest /= 10;
          } while (rest);
          return T(reversed % 251);
        }""",
        _each(_digits),
        domain=(-127, 127),
        dtypes=SIGNED,
        is_total=False,
        is_differentiable=False,
        depends_on_data=True,
    ),
    Case(
        "fibonacci",
        """template <typename T> int number(T n) {
          return n < T(2) ? int(n) : number<T>(n - T(1)) + number<T>(n - T(2));
        }
        template <typename T> T fibonacci(T n) { return T(number(n)); }""",
        _each(lambda n: (0, 1, 1, 2, 3, 5, 8, 13)[n]),
        domain=(0, 7),
        dtypes=FEW,
        is_total=False,
        is_differentiable=False,
        depends_on_data=True,
    ),
    Case(
        "weekday",
        """template <typename T> T weekday(T day, T month) {
          static const short lengths[12] = {31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31};
          short before[12];
          before[0] = 0;
          for (int m = 1; m < 12; m++) before[m] = before[m - 1] + lengths[m - 1];
          return T((day + before[month % 12]) % 7);
        }""",
        _each(_weekday),
        tensors=2,
        domain=(0, 100),
        dtypes=(torch.int16, torch.int32),
        is_total=False,
        is_differentiable=False,
    ),
    Case(
        "tally",
        """template <typename T> T tally(T x) {
          // How often the most frequent of four digits occurs, and the digit 3.
          int count[4] = {0};
          for (int n = 0; n < 8; n += 2) count[(x >> n) & 3]++;
          int most = count[0];
          for (int value = 1; value < 4; ++value) most = max(most, count[value]);
          return T(most * 10 + count[3]);
        }""",
        _each(_tally),
        domain=(0, 127),
        dtypes=FEW,
        is_differentiable=False,
    ),
    Case(
        "average",
        "template <typename T> T average(T a, T b) { return (a & b) + ((a ^ b) >> 1); }",
        lambda a, b: (a + b) >> 1,
        tensors=2,
        domain=(-127, 127),
        dtypes=INTS,
        is_differentiable=False,
    ),
    Case(
        "majority",
        "template <typename T> T majority(T a, T b, T c) { return (a & b) | (a & c) | (b & c); }",
        lambda a, b, c: (a & b) | (a & c) | (b & c),
        tensors=3,
        domain=(-127, 127),
        dtypes=(*BOOL, torch.uint8),
        is_differentiable=False,
    ),
    Case(
        "to_half",
        """template <typename T> T to_half(T x) {
          // Round to nearest, ties to even: to multiples of 2^(e - 10), and of 2^-24 below 2^-14.
          const unsigned bits = __float_as_uint(x), sign = bits & 0x80000000u;
          unsigned size = bits ^ sign;
          if (size > 0x7f800000u) return T(NAN);
          if (size < 0x38800000u) {
            const float shifted = __fadd_rn(__uint_as_float(size), 0.5f);
            size = __float_as_uint(__fsub_rn(shifted, 0.5f));
          } else {
            size = (size + 0x0fffu + ((size >> 13) & 1u)) & 0xffffe000u;
            if (size > 0x477fe000u) size = 0x7f800000u;
          }
          return __uint_as_float(size | sign);
        }""",
        _to_half,
        dtypes=(torch.float32, torch.bfloat16),
        ulps=0,
        # Bits.
        is_differentiable=False,
    ),
    Case(
        "rsqrt_bits",
        """template <typename T> T rsqrt_bits(T x) {
          // A first guess by halving the exponent, then Newton's method.
          int bits = __float_as_int(x);
          bits = 0x5f3759df - (bits >> 1);
          float y = __int_as_float(bits);
          for (int n = 0; n < 4; n++) y *= 1.5f - 0.5f * x * y * y;
          return y;
        }""",
        _rsqrt_bits,
        domain=(0.1, 9.0),
        dtypes=(torch.float32, torch.float16),
        # Bits.
        is_differentiable=False,
    ),
    Case(
        "exponent",
        """template <typename T> T exponent(T x) {
          if (sizeof(T) == 4) return T(int((__float_as_uint(float(x)) >> 23) & 0xff) - 127);
          return T(int((__double_as_longlong(x) >> 52) & 0x7ff) - 1023);
        }""",
        _exponent,
        domain=(0.01, 9.0),
        dtypes=(torch.float32, torch.float64),
        ulps=0,
        # Bits.
        is_differentiable=False,
    ),
)
