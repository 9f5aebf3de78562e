"""Functors, part two: special functions, with loops, tables and recursion.

Formulas are numbered as in the Digital Library of Mathematical Functions (DLMF, https://dlmf.nist.gov).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from functor_case import Case
from torch import Tensor


def _integral(integrand: Callable[[Tensor], Tensor]) -> Tensor:
    """Integrate from 0 to 1 by the double exponential rule; the integrand gets its points in a new last dimension."""
    u = torch.arange(-76, 77, dtype=torch.float64) / 24
    point = torch.sigmoid(math.pi * torch.sinh(u))
    weight = math.pi / 24 * torch.cosh(u) * point * torch.sigmoid(-math.pi * torch.sinh(u))
    return (integrand(point) * weight).sum(-1)


def _digamma(x: Any) -> Any:
    # torch's own loses digits beside the poles.
    rest = x - torch.round(x)
    mirrored = torch.digamma(1 - x) - math.pi / torch.tan(math.pi * rest)
    return torch.where((x < 0) & (rest != 0), mirrored, torch.digamma(x))


def _incomplete_gamma(a: Any, x: Any) -> Any:
    return torch.special.gammainc(a, x), torch.special.gammaincc(a, x)


def _bessel_j(x: Any) -> Any:
    # DLMF 10.9.2, by a rule that is exact for periodic functions. (torch.special.bessel_j0 is off by 3e-7.)
    angle = math.pi * (torch.arange(64, dtype=torch.float64) + 0.5) / 64
    phase = x.unsqueeze(-1) * torch.sin(angle)
    return torch.cos(phase).mean(-1), torch.cos(angle - phase).mean(-1)


def _bessel_i(x: Any) -> Any:
    return torch.special.i0(x), torch.special.i1(x)


def _elliptic(m: Any) -> Any:
    def root(point: Tensor) -> Tensor:
        return torch.sqrt(1 - m.unsqueeze(-1) * torch.sin(math.pi / 2 * point) ** 2)

    return math.pi / 2 * _integral(lambda point: 1 / root(point)), math.pi / 2 * _integral(root)


def _mean(x: Any, y: Any) -> Any:
    # Gauss: the mean is pi/2 over the integral of 1 / sqrt(x^2 cos^2 + y^2 sin^2) over a quarter of the circle.
    def integrand(point: Tensor) -> Tensor:
        angle = math.pi / 2 * point
        return torch.rsqrt((x.unsqueeze(-1) * torch.cos(angle)) ** 2 + (y.unsqueeze(-1) * torch.sin(angle)) ** 2)

    return 1 / _integral(integrand)


def _dilogarithm(x: Any) -> Any:
    return _integral(lambda point: -torch.log1p(-x.unsqueeze(-1) * point) / point)


def _exponential_integral(x: Any) -> Any:
    return _integral(lambda point: torch.exp(-x.unsqueeze(-1) / point) / point)


SPECIAL: tuple[Case, ...] = (
    Case(
        "digamma",
        """template <typename T> T shifted(T x) {
          // DLMF 5.5.2 up to 10, then 5.11.2: B_2k / 2k.
          const T table[7] = {T(1.0 / 12), T(-1.0 / 120), T(1.0 / 252), T(-1.0 / 240),
                              T(1.0 / 132), T(-691.0 / 32760), T(1.0 / 12)};
          T sum = T(0);
          while (x < T(10)) {
            sum -= T(1) / x;
            x += T(1);
          }
          const T y = T(1) / (x * x);
          T tail = T(0);
          for (int k = 6; k >= 0; --k) tail = y * (table[k] + tail);
          return sum + std::log(x) - T(0.5) / x - tail;
        }
        template <typename T> T digamma(T x) {
          if (x == T(0)) return std::copysign(T(INFINITY), -x);
          if (x > T(0)) return shifted(x);
          // DLMF 5.5.4; the tangent of pi times the distance to the nearest pole.
          const T rest = x - std::floor(x + T(0.5));
          if (rest == T(0)) return T(NAN);
          return shifted(T(1) - x) - T(3.14159265358979323846) / std::tan(T(3.14159265358979323846) * rest);
        }""",
        _digamma,
        domain=(-3.0, 8.0),
        ulps=32,
        depends_on_data=True,
    ),
    Case(
        "trigamma",
        """template <typename T> T trigamma(T x) {
          // DLMF 5.15.5 twelve times, then 5.15.8: B_2k.
          const T table[6] = {T(1.0 / 6), T(-1.0 / 30), T(1.0 / 42), T(-1.0 / 30), T(5.0 / 66), T(-691.0 / 2730)};
          T sum = T(0);
          for (int k = 0; k < 12; ++k) {
            const T y = x + T(k);
            sum += T(1) / (y * y);
          }
          const T z = T(1) / (x + T(12)), w = z * z;
          T tail = T(0);
          for (int k = 5; k >= 0; --k) tail = w * (table[k] + tail);
          return sum + z + T(0.5) * w + z * tail;
        }""",
        lambda x: torch.special.zeta(torch.full_like(x, 2.0), x),
        domain=(0.2, 15.0),
        ulps=16,
    ),
    Case(
        "hurwitz",
        """template <typename T> T hurwitz(T s, T a) {
          // Euler and Maclaurin's sum, as DLMF 25.11.7 after ten terms of the series: B_2j / (2j)!.
          const T table[9] = {T(8.3333333333333333e-2), T(-1.3888888888888889e-3), T(3.3068783068783069e-5),
                              T(-8.2671957671957672e-7), T(2.0876756987868099e-8), T(-5.2841901386874932e-10),
                              T(1.3382536530684679e-11), T(-3.3896802963225829e-13), T(8.5860620562778446e-15)};
          const T epsilon = sizeof(T) == 8 ? T(1.1e-16) : T(6e-8);
          T sum = std::pow(a, -s);
          for (int n = 1; n < 10; ++n) sum += std::pow(a + T(n), -s);
          const T x = a + T(10), power = std::pow(x, -s);
          sum += power * (x / (s - T(1)) + T(0.5));
          T factor = s * power / x;
          for (int j = 0; j < 9; ++j) {
            const T term = factor * table[j];
            sum += term;
            if (std::fabs(term) < epsilon * std::fabs(sum)) break;
            factor *= (s + T(2 * j + 1)) * (s + T(2 * j + 2)) / (x * x);
          }
          return sum;
        }""",
        torch.special.zeta,
        tensors=2,
        domain=(1.2, 8.0),
        ulps=32,
        is_total=False,
    ),
    Case(
        "scaled_erfc",
        """template <typename T> T scaled_erfc(T x) {
          if (x < T(2)) return std::exp(x * x) * std::erfc(x);
          // The continued fraction DLMF 7.9.3, from its 50th term back.
          T fraction = x;
          for (int k = 50; k > 0; --k) fraction = x + T(0.5) * T(k) / fraction;
          return T(0.56418958354775628695) / fraction;
        }""",
        torch.special.erfcx,
        domain=(-2.5, 9.0),
        ulps=32,
    ),
    Case(
        "incomplete_gamma",
        """template <typename T> T lower(T a, T x) {
          // DLMF 8.11.4
          const T epsilon = sizeof(T) == 8 ? T(1.1e-16) : T(6e-8);
          T n = a, term = T(1) / a, sum = term;
          do {
            n += T(1);
            term *= x / n;
            sum += term;
          } while (term > epsilon * sum && n < a + T(400));
          return sum;
        }
        template <typename T> T upper(T a, T x) {
          // The continued fraction DLMF 8.9.2, contracted, by W. J. Lentz's method (1976).
          const T epsilon = sizeof(T) == 8 ? T(2.3e-16) : T(1.2e-7);
          T b = x + T(1) - a, c = T(1e30), d = T(1) / b, product = d;
          for (int n = 1; n < 400; n++) {
            const T numerator = T(n) * (a - T(n));
            b += T(2);
            d = T(1) / (numerator * d + b);
            c = b + numerator / c;
            product *= c * d;
            if (std::fabs(c * d - T(1)) <= epsilon) break;
          }
          return product;
        }
        template <typename T> void incomplete_gamma(T a, T x, T& p, T& q) {
          const T scale = std::exp(a * std::log(x) - x - std::lgamma(a));
          if (x < a + T(1)) {
            p = scale * lower(a, x);
            q = T(1) - p;
          } else {
            q = scale * upper(a, x);
            p = T(1) - q;
          }
        }""",
        _incomplete_gamma,
        tensors=2,
        outputs=2,
        domain=(0.3, 12.0),
        ulps=128,
        is_total=False,
        depends_on_data=True,
    ),
    Case(
        "lanczos",
        """template <typename T> T lanczos(T x) {
          // log(gamma(x)) for x > 0. C. Lanczos (1964), g = 7 and nine terms, coefficients of P. Godfrey (2001).
          const double table[9] = {0.99999999999980993, 676.5203681218851, -1259.1392167224028, 771.32342877765313,
                                   -176.61502916214059, 12.507343278686905, -0.13857109526572012,
                                   9.9843695780195716e-6, 1.5056327351493116e-7};
          // DLMF 5.5.3
          const T pi = T(3.14159265358979323846);
          if (x < T(0.5)) return std::log(pi / std::sin(pi * x)) - lanczos(T(1) - x);
          const T y = x - T(1), t = y + T(7.5);
          T sum = T(table[0]);
          for (int k = 1; k < 9; ++k) sum += T(table[k]) / (y + T(k));
          return T(0.91893853320467274178) + (y + T(0.5)) * std::log(t) - t + std::log(sum);
        }""",
        torch.lgamma,
        domain=(0.05, 9.0),
        ulps=64,
        is_total=False,
        depends_on_data=True,
    ),
    Case(
        "bessel_j",
        """template <typename T> void bessel_j(T x, T& j0, T& j1) {
          if (std::fabs(x) < T(0.01)) {
            // DLMF 10.2.2
            const T y = x * x / T(4);
            j0 = T(1) - y * (T(1) - y / T(4));
            j1 = x / T(2) * (T(1) - y * (T(0.5) - y / T(12)));
            return;
          }
          // J. C. P. Miller's way: DLMF 10.6.1 backwards from order 36, scaled by 10.12.4.
          T above = T(0), here = T(1e-20), sum = T(0);
          for (int k = 36; k > 0; --k) {
            const T below = T(2 * k) / x * here - above;
            above = here;
            here = below;
            if (k % 2 == 1) sum += k == 1 ? here : T(2) * here;
            if (std::fabs(here) > T(1e10)) {
              above *= T(1e-10);
              here *= T(1e-10);
              sum *= T(1e-10);
            }
          }
          j0 = here / sum;
          j1 = above / sum;
        }""",
        _bessel_j,
        outputs=2,
        domain=(-8.0, 8.0),
        ulps=64,
        is_total=False,
    ),
    Case(
        "bessel_i",
        """template <typename T> void bessel_i(T x, T& i0, T& i1) {
          // DLMF 10.32.1 and 10.32.3 by the trapezoidal rule, which converges faster than any power of the step.
          const T cosine[8] = {T(0.98078528040323044913), T(0.92387953251128675613), T(0.83146961230254523708),
                               T(0.70710678118654752440), T(0.55557023301960222474), T(0.38268343236508977173),
                               T(0.19509032201612826785), T(0)};
          i0 = std::cosh(x);
          i1 = std::sinh(x);
          for (int k = 0; k < 8; k++) {
            const T c = cosine[k], weight = k == 7 ? T(1) : T(2);
            i0 += weight * std::cosh(x * c);
            i1 += weight * c * std::sinh(x * c);
          }
          i0 /= T(16);
          i1 /= T(16);
        }""",
        _bessel_i,
        outputs=2,
        domain=(-6.0, 6.0),
        ulps=16,
    ),
    Case(
        "elliptic",
        """template <typename T> void elliptic(T m, T& first, T& second) {
          // Complete integrals K and E of parameter m, DLMF 19.8.5 and 19.8.6.
          T a = T(1), b = std::sqrt(T(1) - m), c, sum = m / T(2), weight = T(0.5);
          do {
            c = (a - b) / T(2);
            const T mean = (a + b) / T(2);
            b = std::sqrt(a * b);
            a = mean;
            weight *= T(2);
            sum += weight * c * c;
          } while (std::fabs(c) > (sizeof(T) == 8 ? T(1e-9) : T(1e-5)) * a);
          first = T(1.57079632679489661923) / a;
          second = first * (T(1) - sum);
        }""",
        _elliptic,
        outputs=2,
        domain=(-2.0, 0.95),
        ulps=64,
        is_total=False,
        depends_on_data=True,
    ),
    Case(
        "mean",
        """template <typename T> T mean(T x, T y) {
          // The arithmetic-geometric mean, DLMF 19.8.1.
          const T difference = x - y;
          if (!(std::fabs(difference) > (sizeof(T) == 8 ? T(1e-9) : T(1e-4)) * x)) return (x + y) / T(2);
          return mean((x + y) / T(2), std::sqrt(x * y));
        }""",
        _mean,
        tensors=2,
        domain=(0.2, 5.0),
        ulps=32,
        is_total=False,
        depends_on_data=True,
    ),
    Case(
        "dilogarithm",
        """template <typename T> T series(T x) {
          // Powers of u = -log(1 - x): B_2k / (2k + 1)! (D. Zagier, "The Dilogarithm Function", 2007).
          const T table[8] = {T(2.7777777777777778e-2), T(-2.7777777777777778e-4), T(4.7241118669690098e-6),
                              T(-9.1857730746619636e-8), T(1.8978869988970999e-9), T(-4.0647616451442255e-11),
                              T(8.9216910204564526e-13), T(-1.9939295860721076e-14)};
          const T u = -std::log1p(-x), y = u * u;
          T tail = T(0);
          for (int k = 7; k >= 0; k--) tail = y * (table[k] + tail);
          return u * (T(1) - u / T(4) + tail);
        }
        template <typename T> T dilogarithm(T x) {
          const T sixth = T(1.64493406684822643647);
          // DLMF 25.12.4 and 25.12.6
          if (x < T(-1)) {
            const T log = std::log(-x);
            return -series(T(1) / x) - sixth - log * log / T(2);
          } else if (x <= T(0.5)) {
            return series(x);
          }
          return sixth - std::log(x) * std::log1p(-x) - series(T(1) - x);
        }""",
        _dilogarithm,
        domain=(-6.0, 0.98),
        ulps=16,
    ),
    Case(
        "exponential_integral",
        """template <typename T> T exponential_integral(T x) {
          T result;
          if (x < T(2)) {
            // DLMF 6.6.2
            T term = T(-1);
            result = T(-0.57721566490153286061) - std::log(x);
            for (int k = 1; k <= 24; ++k) {
              term *= -x / T(k);
              result += term / T(k);
            }
          } else {
            // DLMF 6.9.1, contracted
            T fraction = T(0);
            for (int k = 50; k > 0; --k) fraction = T(k * k) / (x + T(2 * k + 1) - fraction);
            result = std::exp(-x) / (x + T(1) - fraction);
          }
          return result;
        }""",
        _exponential_integral,
        domain=(0.05, 12.0),
        ulps=32,
    ),
)
