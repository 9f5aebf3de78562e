"""Functors, part five: functions of the prelude, and what the language adds to them."""

from __future__ import annotations

import math
from typing import Any

import torch
from functor_case import FLOATS, NARROW, Case


def _window(x: Any, kind: float) -> Any:
    kind, turn = int(kind), torch.cos(math.pi * x)
    if kind == 2:
        return 0.42 + 0.5 * turn + 0.08 * torch.cos(2 * math.pi * x)
    return {0: 0.5 + 0.5 * turn, 1: 0.54 + 0.46 * turn}.get(kind, torch.ones_like(x))


def _kaiser(x: Any, beta: float) -> Any:
    return torch.special.i0(beta * (1 - x * x).sqrt()) / torch.special.i0(torch.tensor(beta, dtype=torch.float64))


def _quantile(p: Any) -> Any:
    z = torch.special.ndtri(p)
    return z, torch.special.ndtr(z) + torch.erfinv(2 * p - 1)


def _two_sum(x: Any, y: Any) -> Any:
    total = (x + y).float().double()
    return total, (x - total) + y


def _mantissa(x: Any) -> Any:
    mantissa, exponent = torch.frexp(x)
    return mantissa + torch.ldexp(x, -exponent) + exponent % 2


def _spiral(radius: Any, turn: Any) -> Any:
    return radius * torch.cos(math.pi * turn), radius * torch.sin(math.pi * turn) + torch.fmod(turn, 1)


def _joukowski(x: Any, y: Any) -> Any:
    z = torch.complex(x, y) + 2.5
    w = torch.exp(0.3 * (z + 1 / z))
    return w.real, w.imag, w.abs()


def _sort(a: Any, b: Any, c: Any) -> Any:
    return tuple(torch.stack(torch.broadcast_tensors(a, b, c)).sort(0).values)


def _power(x: Any) -> Any:
    return x**13 / 4096 + x**2 / 4


def _odd_sum(x: Any) -> Any:
    terms = torch.stack([x / n for n in (1, 3, 5, 7)])
    return torch.where(terms.abs() < 2, terms, 0).sum(0)


PRELUDE: tuple[Case, ...] = (
    Case(
        "window",
        """template <typename T> T window(T x, int kind) {
          // Of J. von Hann, R. Hamming, R. Blackman, and none.
          T rest = T(0), first = T(0.5);
          switch (kind) {
            case 2:
              rest = T(0.08);
              // fall through
            case 0:
              break;
            case 1:
              first = T(0.46);
              break;
            default:
              return T(1);
          }
          const T c = cospi(x);
          return (T(1) - first - rest) + first * c + rest * (T(2) * c * c - T(1));
        }""",
        _window,
        scalars={"kind": 2},
        domain=(-1.0, 1.0),
    ),
    Case(
        "kaiser",
        """template <typename T> T kaiser(T x, T beta) {
          return cyl_bessel_i0(beta * std::sqrt(T(1) - x * x)) / cyl_bessel_i0(beta);
        }""",
        _kaiser,
        scalars={"beta": 2.5},
        domain=(-0.95, 0.95),
        ulps=16,
    ),
    Case(
        "quantile",
        """template <typename T> T quantile(T p, T& z, T& mixed) {
          z = normcdfinv(p);
          mixed = normcdf(z) + erfinv(T(2) * p - T(1));
        }""",
        _quantile,
        outputs=2,
        domain=(0.02, 0.98),
        ulps=32,
    ),
    Case(
        "gamma_ratio",
        """template <typename T> T gamma_ratio(T x, T y) {
          return tgamma(x) * std::exp(lgamma(y) - lgamma(x + y)) + fdim(x, y) * rcbrt(x) - std::fmod(x, y);
        }""",
        lambda x, y: (
            torch.lgamma(x).exp() * torch.exp(torch.lgamma(y) - torch.lgamma(x + y))
            + (x - y).clamp(min=0) / x ** (1 / 3)
            - torch.fmod(x, y)
        ),
        tensors=2,
        domain=(0.5, 5.0),
        ulps=64,
        is_total=False,
    ),
    Case(
        "joukowski",
        """// The map of N. Joukowski, and the exponential of it.
        template <typename T> void joukowski(T x, T y, T& u, T& v, T& size) {
          const std::complex<T> z(x + T(2.5), y);
          const std::complex<T> w = std::exp(T(0.3) * (z + T(1) / z));
          u = w.real();
          v = std::imag(w);
          size = std::abs(w);
        }""",
        _joukowski,
        tensors=2,
        outputs=3,
        domain=(-2.0, 2.0),
        ulps=32,
        is_total=False,
    ),
    Case(
        "spiral",
        """template <typename T> void spiral(T radius, T turn, T& x, T& y) {
          T sine, cosine, whole;
          sincospi(turn, &sine, &cosine);
          x = radius * cosine;
          y = radius * sine + modf(turn, &whole);
        }""",
        _spiral,
        tensors=2,
        outputs=2,
        ulps=32,
    ),
    Case(
        "mantissa",
        """template <typename T> T mantissa(T x) {
          int exponent;
          const T m = std::frexp(x, &exponent);
          return m + std::ldexp(x, -exponent) + T(exponent & 1);
        }""",
        _mantissa,
        domain=(0.01, 9.0),
        ulps=0,
        is_total=False,
    ),
    Case(
        "fast_sigmoid",
        "template <typename T> T fast_sigmoid(T x) { return __fdividef(1.0f, __fadd_rn(1.0f, __expf(-x))); }",
        torch.sigmoid,
        dtypes=NARROW,
        ulps=16,
    ),
    Case(
        "two_sum",
        """template <typename T> void two_sum(T x, T y, T& sum, T& error) {
          // The sum and what rounding took from it, by O. Moller and D. E. Knuth.
          sum = __fadd_rn(x, y);
          const float part = __fsub_rn(sum, x);
          error = __fadd_rn(__fsub_rn(x, __fsub_rn(sum, part)), __fsub_rn(y, part));
        }""",
        _two_sum,
        tensors=2,
        outputs=2,
        dtypes=(torch.float32,),
        ulps=0,
    ),
    Case(
        "literals",
        """template <typename T> T literals(T x) {
          // 0.1 is a double, 0.1f a float, 1 / 2 is 0, 7 / 2 is 3, 'a' is 97, 0x10 is 16, true is 1.
          return x * 0.1 + x * 0.25f + 1 / 2 + T(7 / 2) * x + ('a' - 0x10 - 0101 - 0b10000) * true + 1e-1L * 0u;
        }""",
        lambda x: 3.35 * x,
    ),
    Case(
        "power",
        """template <unsigned n, typename T> T raise(T x) {
          if constexpr (n == 0) {
            return T(1);
          } else {
            const T root = raise<n / 2>(x);
            return n % 2 ? x * root * root : root * root;
          }
        }
        template <typename T> T half(T x, T divisor = T(2)) { return x / divisor; }
        template <typename T> T power(T x) { return half(raise<13>(x), T(4096)) + half(half(raise<2>(x))); }""",
        _power,
        domain=(-2.0, 2.0),
        ulps=16,
    ),
    Case(
        "odd_sum",
        """template <typename T> T odd_sum(T x) {
          T sum = T(0);
          for (int n = 0; n < 8; ++n) {
            if (n % 2 == 0) continue;
            const T term = x / T(n);
            if (!(std::abs(term) < T(2))) continue;
            sum += term;
          }
          return sum;
        }""",
        _odd_sum,
    ),
    Case(
        "sort",
        """template <typename T> void order(T& low, T& high) {
          if (high < low) {
            const T kept = low;
            low = high;
            high = kept;
          }
        }
        template <typename T> void sort(T a, T b, T c, T& first, T& second, T& third) {
          T& x = first;
          x = a, second = b, third = c;
          order(x, second);
          order(second, third);
          order(x, second);
        }""",
        _sort,
        tensors=3,
        outputs=3,
        dtypes=(*FLOATS, torch.int32),
        ulps=0,
        is_total=False,
    ),
)
