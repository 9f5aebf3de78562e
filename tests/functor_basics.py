"""Functors, part one: the constructs of the language, one or two at a time."""

from __future__ import annotations

import math
from typing import Any

import torch
from functor_case import BOOL, FLOATS, INTS, Case


def _leaky(x: Any, slope: float) -> Any:
    return torch.where(x < 0, x * slope, x)


def _horner(x: Any) -> Any:
    return 1 + x * (-0.5 + x * (0.25 + x * (-0.125 + x * 0.0625)))


def _median3(a: Any, b: Any, c: Any) -> Any:
    return torch.stack(torch.broadcast_tensors(a, b, c)).sort(0).values[1]


def _bit_mix(a: Any, b: Any) -> Any:
    return ((a ^ b) & 0x3F) | (a & 1)


def _bit_count(x: Any) -> Any:
    return sum((x >> place) & 1 for place in range(7))


def _chop(x: Any) -> Any:
    return (x.float().view(torch.int32) & -65536).view(torch.float32).double()


def _steps(x: Any) -> Any:
    n, count = x.to(torch.int64), torch.zeros_like(x)
    for _ in range(20):
        running = n > 1
        count = count + running
        n = torch.where(running, torch.where(n % 2 == 0, n // 2, 3 * n + 1), n)
    return count


def _add_up(x: Any) -> Any:
    total, open_ = torch.zeros_like(x), torch.ones_like(x, dtype=torch.bool)
    for _ in range(6):
        total = torch.where(open_, total + x, total)
        open_ = open_ & (total <= 4)
    return total


def _branch(x: Any) -> Any:
    way = x.to(torch.int64) & 3
    return torch.where(way == 0, x, torch.where(way == 1, -x, torch.where(way == 2, x * x, torch.ones_like(x))))


def _smoothstep(x: Any, low: float, high: float) -> Any:
    t = ((x - low) / (high - low)).clamp(0, 1)
    return t * t * (3 - 2 * t)


def _rotate(x: Any, y: Any) -> Any:
    return 0.8 * x - 0.6 * y, 0.6 * x + 0.8 * y


def _pick(a: Any, b: Any, greater: bool) -> Any:
    return torch.maximum(a, b) if greater else torch.minimum(a, b)


BASICS: tuple[Case, ...] = (
    Case(
        "axpy",
        "template <typename T> T axpy(T x, T y, T alpha) { return alpha * x + y; }",
        lambda x, y, alpha: alpha * x + y,
        tensors=2,
        scalars={"alpha": 2},
        dtypes=FLOATS + INTS,
        ulps=16,
    ),
    Case(
        "relu",
        "template <typename T> T relu(T x) { return x > T(0) ? x : T(0); }",
        lambda x: x.clamp(min=0),
        dtypes=FLOATS + INTS,
        ulps=0,
    ),
    Case(
        "sigmoid",
        "template <typename T> T sigmoid(T x) { return T(1) / (T(1) + std::exp(-x)); }",
        torch.sigmoid,
    ),
    Case(
        "leaky",
        "template <typename T> T leaky(T x, T slope) {\n  if (x < T(0)) {\n    return x * slope;\n  }\n  return x;\n}",
        _leaky,
        scalars={"slope": 0.125},
    ),
    Case(
        "horner",
        """// A polynomial with a table of coefficients.
        template <typename T> T horner(T x) {
          const T table[5] = {T(1), T(-0.5), T(0.25), T(-0.125), T(0.0625)};
          T r = table[4];
          for (int i = 3; i >= 0; --i) r = r * x + table[i];
          return r;
        }""",
        _horner,
        ulps=32,
    ),
    Case(
        "newton",
        """template <typename T> T newton(T x) {
          T y = x > T(1) ? x : T(1);
          int n = 0;
          while (n < 9) { y = T(0.5) * (y + x / y); n++; }
          return y;
        }""",
        torch.sqrt,
        domain=(0.1, 10.0),
    ),
    Case(
        "hypotenuse",
        """template <typename T> T square(T v) { return v * v; }
        template <typename T> T hypotenuse(T a, T b) { return std::sqrt(square(a) + square<T>(b)); }""",
        torch.hypot,
        tensors=2,
    ),
    Case(
        "mix",
        """template <typename T> T mix(T a, T b, T w) {
          auto at = [&](T t) { return a + t * (b - a); };
          return at(w);
        }""",
        lambda a, b, w: a + w * (b - a),
        tensors=2,
        scalars={"w": 0.25},
    ),
    Case(
        "median3",
        """template <typename T> T median3(T a, T b, T c) {
          T v[3] = {a, b, c};
          for (int i = 0; i < 2; ++i)
            for (int j = 0; j < 2 - i; ++j)
              if (v[j] > v[j + 1]) { T t = v[j]; v[j] = v[j + 1]; v[j + 1] = t; }
          return v[1];
        }""",
        _median3,
        tensors=3,
        dtypes=FLOATS + INTS,
        ulps=0,
    ),
    Case(
        "divisor",
        """template <typename T> T divisor(T a, T b) {
          while (b != T(0)) { T t = a % b; a = b; b = t; }
          return a;
        }""",
        torch.gcd,
        tensors=2,
        domain=(0, 100),
        dtypes=INTS,
        is_total=False,
        is_differentiable=False,
        depends_on_data=True,
    ),
    Case(
        "bit_mix",
        "template <typename T> T bit_mix(T a, T b) { return ((a ^ b) & T(0x3f)) | (a & T(1)); }",
        _bit_mix,
        tensors=2,
        domain=(-100, 100),
        dtypes=INTS,
        is_differentiable=False,
    ),
    Case(
        "bit_count",
        """template <typename T> T bit_count(T x) {
          int n = 0;
          while (x != T(0)) { x = x & (x - T(1)); ++n; }
          return T(n);
        }""",
        _bit_count,
        domain=(0, 120),
        dtypes=INTS,
        is_differentiable=False,
        depends_on_data=True,
    ),
    Case(
        "chop",
        "template <typename T> T chop(T x) { return __uint_as_float(__float_as_uint(x) & 0xffff0000u); }",
        _chop,
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        ulps=0,
        # Bits.
        is_differentiable=False,
    ),
    Case(
        "quantise",
        """template <typename T> T quantise(T x, int64_t steps) {
          int64_t q = (int64_t)(x * T(steps));
          return static_cast<T>(q) / T(steps);
        }""",
        lambda x, steps: torch.trunc(x * steps) / steps,
        scalars={"steps": 8},
        is_total=False,
    ),
    Case(
        "wave",
        "template <typename T> void wave(T x, T& s, T& c) { s = sin(x); c = std::cos(x); }",
        lambda x: (torch.sin(x), torch.cos(x)),
        outputs=2,
    ),
    Case(
        "split",
        """template <typename T> T split(T a, T b, T& q, T& r) {
          q = a / b;
          r = a % b;
        }""",
        lambda a, b: (torch.div(a, b, rounding_mode="trunc"), torch.fmod(a, b)),
        tensors=2,
        outputs=2,
        domain=(1, 100),
        dtypes=INTS,
        is_total=False,
        is_differentiable=False,
    ),
    Case(
        "polar",
        """template <typename T> T polar(T x, T y, T scale, T& radius, T& angle) {
          radius = scale * sqrt(x * x + y * y);
          angle = atan2(y, x);
        }""",
        lambda x, y, scale: (scale * torch.hypot(x, y), torch.atan2(y, x)),
        tensors=2,
        outputs=2,
        scalars={"scale": 1.5},
        ulps=16,
    ),
    Case(
        "pick",
        "template <typename T> T pick(T a, T b, bool greater) { return (a > b) == greater ? a : b; }",
        _pick,
        tensors=2,
        scalars={"greater": True},
        dtypes=FLOATS + INTS,
        ulps=0,
    ),
    Case(
        "decay",
        "template <typename T> T decay(T x, double rate) { return static_cast<T>(x * std::exp(-rate)); }",
        lambda x, rate: x * math.exp(-rate),
        scalars={"rate": 0.3},
        ulps=2,
    ),
    Case(
        "softplus",
        "template <typename T> T softplus(T x, T limit) { return x > limit ? x : log1p(exp(x)); }",
        lambda x, limit: torch.where(x > limit, x, torch.log1p(torch.exp(x))),
        scalars={"limit": 20.0},
        domain=(-6.0, 30.0),
    ),
    Case(
        "gelu",
        "template <typename T> T gelu(T x) { return x * T(0.5) * (T(1) + std::erf(x * T(0.70710678118654752440))); }",
        torch.nn.functional.gelu,
    ),
    Case(
        "clip",
        "template <typename T> T clip(T x, T low, T high) { return std::fmin(std::fmax(x, low), high); }",
        lambda x, low, high: x.clamp(low, high),
        scalars={"low": -1.0, "high": 1.5},
        ulps=0,
    ),
    Case(
        "smoothstep",
        """template <typename T> T smoothstep(T x, T low, T high) {
          T t = (x - low) / (high - low);
          t = t < T(0) ? T(0) : (t > T(1) ? T(1) : t);
          return t * t * (T(3) - T(2) * t);
        }""",
        _smoothstep,
        scalars={"low": -1.0, "high": 1.0},
    ),
    Case(
        "steps",
        """template <typename T> T steps(T x) {
          int64_t n = static_cast<int64_t>(x);
          int count = 0;
          while (n > 1 && count < 20) {
            n = (n % 2 == 0) ? n / 2 : 3 * n + 1;
            ++count;
          }
          return T(count);
        }""",
        _steps,
        domain=(1, 60),
        dtypes=FLOATS + INTS,
        ulps=0,
        is_total=False,
    ),
    Case(
        "add_up",
        """template <typename T> T add_up(T x) {
          T total = T(0);
          for (int i = 0; i < 6; i++) {
            total += x;
            if (total > T(4)) break;
          }
          return total;
        }""",
        _add_up,
        domain=(0, 6),
        dtypes=FLOATS + INTS,
    ),
    Case(
        "branch",
        """template <typename T> T branch(T x) {
          switch (static_cast<int>(x) & 3) {
            case 0: return x;
            case 1: return -x;
            case 2: return x * x;
            default: return T(1);
          }
        }""",
        _branch,
        domain=(-6, 6),
        dtypes=FLOATS + INTS,
        is_total=False,
    ),
    Case(
        "inside",
        "template <typename T> bool inside(T x, T low, T high) { return low <= x && x < high; }",
        lambda x, low, high: ((low <= x) & (x < high)).to(x.dtype),
        scalars={"low": 1, "high": 3},
        dtypes=FLOATS + INTS,
        ulps=0,
        # A truth value.
        is_differentiable=False,
    ),
    Case(
        "differs",
        "template <typename T> T differs(T a, T b) { return T(a != b); }",
        lambda a, b: (a != b).to(a.dtype),
        tensors=2,
        dtypes=BOOL + INTS,
        is_differentiable=False,
    ),
    Case(
        "cube",
        """template <typename T> T power(T x, int n) { return n == 0 ? T(1) : x * power(x, n - 1); }
        template <typename T> T cube(T x) { return power<T>(x, 3); }""",
        lambda x: x * x * x,
        domain=(-4, 4),
        dtypes=FLOATS + INTS,
    ),
    Case(
        "patch",
        "template <typename T> T patch(T x, T fill) { return std::isnan(x) ? fill : x; }",
        lambda x, fill: torch.where(x.isnan(), fill, x),
        scalars={"fill": -1.0},
        ulps=0,
    ),
    Case(
        "macro",
        "#define TWICE(v) ((v) + (v))\ntemplate <typename T> T macro(T x) { return TWICE(x * x); }",
        lambda x: 2 * x * x,
        dtypes=FLOATS + INTS,
    ),
    Case(
        "rotate",
        """template <typename T> void rotate(T x, T y, T& u, T& v) {
          const T m[2][2] = {{T(0.8), T(-0.6)}, {T(0.6), T(0.8)}};
          T in[2] = {x, y}, out[2];
          for (int i = 0; i < 2; ++i) {
            out[i] = T(0);
            for (int j = 0; j < 2; ++j) out[i] += m[i][j] * in[j];
          }
          u = out[0];
          v = out[1];
        }""",
        _rotate,
        tensors=2,
        outputs=2,
    ),
)
