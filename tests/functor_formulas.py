"""Functors, part four: formulas of learning, physics, geometry and colour."""

from __future__ import annotations

import math
from typing import Any

import torch
from functor_case import Case
from torch.nn import functional


def _huber(x: Any, y: Any, delta: float) -> Any:
    error = (x - y).abs()
    return torch.where(error <= delta, error**2 / 2, delta * error - delta**2 / 2)


def _focal(logit: Any, label: Any, gamma: float) -> Any:
    p = torch.where(label > 0, torch.sigmoid(logit), torch.sigmoid(-logit))
    return -torch.log(p) * (1 - p) ** gamma


def _adam(p: Any, g: Any, m: Any, v: Any, rate: float, beta1: float, beta2: float) -> Any:
    m = torch.lerp(m, g, 1 - beta1)
    v = beta2 * v + (1 - beta2) * g.square()
    return p - rate * m / (v.sqrt() + 1e-8), m, v


def _lennard_jones(r: Any, cutoff: float) -> Any:
    a = (1 / r) ** 6
    return torch.where(r < cutoff, 4 * (a**2 - a), 0), torch.where(r < cutoff, 24 * (2 * a**2 - a) / r, 0)


def _hsv(h: Any, s: Any, v: Any) -> Any:
    # f(n) = v - v s max(0, min(k, 4 - k, 1)) with k = n + 6 h modulo 6, at n = 5, 3, 1.
    ks = [torch.remainder(n + 6 * h, 6) for n in (5, 3, 1)]
    return tuple(v - v * s * torch.minimum(torch.minimum(k, 4 - k), torch.ones_like(k)).clamp(min=0) for k in ks)


def _lab(t: Any) -> Any:
    return torch.where(t > (6 / 29) ** 3, t.abs() ** (1 / 3), t * 841 / 108 + 4 / 29)


def _quaternion(w: Any, x: Any, y: Any, z: Any, a: Any, b: Any, c: Any) -> Any:
    n = w * w + x * x + y * y + z * z
    return (
        ((w * w + x * x - y * y - z * z) * a + 2 * (x * y - w * z) * b + 2 * (x * z + w * y) * c) / n,
        (2 * (x * y + w * z) * a + (w * w - x * x + y * y - z * z) * b + 2 * (y * z - w * x) * c) / n,
        (2 * (x * z - w * y) * a + 2 * (y * z + w * x) * b + (w * w - x * x - y * y + z * z) * c) / n,
    )


def _harmonics(x: Any, y: Any, z: Any) -> Any:
    azimuth, cosine = torch.atan2(y, x), z / (x * x + y * y + z * z).sqrt()
    sine = (1 - cosine**2).sqrt()
    scale = math.sqrt(15 / math.pi) / 4
    return (
        scale * sine**2 * torch.sin(2 * azimuth),
        2 * scale * sine * cosine * torch.sin(azimuth),
        math.sqrt(5 / math.pi) / 4 * (3 * cosine**2 - 1),
        2 * scale * sine * cosine * torch.cos(azimuth),
        scale * sine**2 * torch.cos(2 * azimuth),
    )


def _fake_quant(x: Any, scale: float, bits: int) -> Any:
    top = 2 ** (bits - 1) - 1
    return torch.round(x / scale).clamp(-top - 1, top) * scale


FORMULAS: tuple[Case, ...] = (
    Case(
        "swiglu",
        """template <typename T> T silu(T x) { return x / (T(1) + std::exp(-x)); }
        template <typename T> T swiglu(T gate, T value) { return silu(gate) * value; }""",
        lambda gate, value: functional.silu(gate) * value,
        tensors=2,
    ),
    Case(
        "gelu_tanh",
        """#define SQRT_2_OVER_PI 0.79788456080286535588
        #define CUBIC(x) ((x) + 0.044715 * (x) * (x) * (x))
        template <typename T> T gelu_tanh(T x) {
          return T(0.5) * x * (T(1) + std::tanh(T(SQRT_2_OVER_PI * CUBIC(x))));
        }""",
        lambda x: functional.gelu(x, approximate="tanh"),
    ),
    Case(
        "log_add_exp",
        """template <typename T> T log_add_exp(T a, T b) {
          if (std::isinf(a) && a == b) return a;
          const T high = a < b ? b : a;
          return high + std::log1p(std::exp(-std::fabs(a - b)));
        }""",
        torch.logaddexp,
        tensors=2,
        domain=(-30.0, 30.0),
    ),
    Case(
        "huber",
        """template <typename T> T huber(T x, T y, T delta) {
          T error = std::abs(x - y);
          if (error <= delta)
            return T(0.5) * error * error;
          else
            return delta * (error - T(0.5) * delta);
        }""",
        _huber,
        tensors=2,
        scalars={"delta": 1.25},
    ),
    Case(
        "focal",
        """template <typename T> T log_sigmoid(T x) {
          return x < T(0) ? x - std::log1p(std::exp(x)) : -std::log1p(std::exp(-x));
        }
        template <typename T> T focal(T logit, T label, T gamma) {
          const bool is_positive = label > T(0);
          const T margin = is_positive ? logit : -logit;
          return -log_sigmoid(margin) * std::exp(gamma * log_sigmoid(-margin));
        }""",
        _focal,
        tensors=2,
        scalars={"gamma": 2.0},
    ),
    Case(
        "adam",
        """template <typename T>
        void adam(T p, T g, T m, T v, T rate, T beta1, T beta2, T& new_p, T& new_m, T& new_v) {
          new_m = beta1 * m + (T(1) - beta1) * g;
          new_v = beta2 * v + (T(1) - beta2) * g * g;
          new_p = p - rate * new_m / (std::sqrt(new_v) + T(1e-8));
        }""",
        _adam,
        tensors=4,
        outputs=3,
        scalars={"rate": 0.125, "beta1": 0.875, "beta2": 0.75},
        domain=(0.05, 3.0),
        is_total=False,
    ),
    Case(
        "fake_quant",
        """template <typename T> T fake_quant(T x, T scale, int64_t bits) {
          const T top = T((int64_t(1) << (bits - 1)) - 1);
          return min(max(std::rint(x / scale), -top - T(1)), top) * scale;
        }""",
        _fake_quant,
        scalars={"scale": 0.25, "bits": 4},
        ulps=0,
        is_total=False,
    ),
    Case(
        "lennard_jones",
        """template <typename T> T lennard_jones(T r, T cutoff, T& energy, T& force) {
          energy = force = T(0);
          if (r >= cutoff) return;
          const T inverse = T(1) / r, square = inverse * inverse, sixth = square * square * square;
          energy = T(4) * sixth * (sixth - T(1));
          force = T(24) * sixth * (T(2) * sixth - T(1)) * inverse;
        }""",
        _lennard_jones,
        outputs=2,
        scalars={"cutoff": 2.5},
        domain=(0.9, 3.0),
        ulps=64,
        is_total=False,
    ),
    Case(
        "quaternion",
        """template <typename T> void cross(const T (&a)[3], const T (&b)[3], T (&result)[3]) {
          for (int i = 0; i < 3; ++i) {
            const int j = (i + 1) % 3, k = (i + 2) % 3;
            result[i] = a[j] * b[k] - a[k] * b[j];
          }
        }
        template <typename T>
        void quaternion(T w, T x, T y, T z, T a, T b, T c, T& out_a, T& out_b, T& out_c) {
          // v + 2 u x (u x v + w v) / |q|^2
          const T u[3] = {x, y, z}, v[3] = {a, b, c};
          const T scale = T(2) / (w * w + x * x + y * y + z * z);
          T inner[3], outer[3];
          cross(u, v, inner);
          for (int i = 0; i < 3; ++i) inner[i] += w * v[i];
          cross(u, inner, outer);
          out_a = a + scale * outer[0];
          out_b = b + scale * outer[1];
          out_c = c + scale * outer[2];
        }""",
        _quaternion,
        tensors=7,
        outputs=3,
        ulps=32,
        is_total=False,
    ),
    Case(
        "harmonics",
        """template <typename T>
        void harmonics(T x, T y, T z, T& m2, T& m1, T& zero, T& p1, T& p2) {
          // Real spherical harmonics of degree 2.
          const T scale = T(1.09254843059207907054), inverse = rsqrt(x * x + y * y + z * z);
          x *= inverse, y *= inverse, z *= inverse;
          m2 = scale * x * y;
          m1 = scale * y * z;
          zero = T(0.31539156525252000603) * (T(3) * z * z - T(1));
          p1 = scale * x * z;
          p2 = T(0.5) * scale * (x + y) * (x - y);
        }""",
        _harmonics,
        tensors=3,
        outputs=5,
        ulps=16,
        is_total=False,
    ),
    Case(
        "hsv",
        """template <typename T> void hsv(T hue, T s, T v, T& red, T& green, T& blue) {
          const T turn = hue * T(6);
          const int sector = static_cast<int>(std::floor(turn));
          const T f = turn - T(sector), p = v * (T(1) - s), q = v * (T(1) - s * f), t = v * (T(1) - s * (T(1) - f));
          switch (sector % 6) {
            case 0: red = v; green = t; blue = p; break;
            case 1: red = q; green = v; blue = p; break;
            case 2: red = p; green = v; blue = t; break;
            case 3: red = p; green = q; blue = v; break;
            case 4: red = t; green = p; blue = v; break;
            default: red = v; green = p; blue = q;
          }
        }""",
        _hsv,
        tensors=3,
        outputs=3,
        domain=(0.0, 1.0),
        ulps=16,
        is_total=False,
    ),
    Case(
        "lab",
        """template <typename T> T lab(T t) {
          // CIE 1976 L*a*b*
          constexpr double delta = 6.0 / 29;
          return t > T(delta * delta * delta) ? std::cbrt(t) : t / T(3 * delta * delta) + T(4.0 / 29);
        }""",
        _lab,
        domain=(0.0, 1.0),
    ),
)
