"""Functors, part three: numerical methods, with loops, arrays and lambdas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from functor_case import Case
from torch import Tensor


def _bisect(function: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """Find where a rising function crosses zero."""
    for _ in range(80):
        middle = (low + high) / 2
        is_below = function(middle) < 0
        low, high = torch.where(is_below, middle, low), torch.where(is_below, high, middle)
    return (low + high) / 2


def _lambert(x: Any) -> Any:
    return _bisect(lambda w: w * torch.exp(w) - x, torch.full_like(x, -1), torch.full_like(x, 4))


def _kepler(mean: Any, e: float) -> Any:
    return _bisect(lambda x: x - e * torch.sin(x) - mean, mean - 1, mean + 1)


def _cubic(p: Any, q: Any) -> Any:
    # Newton's method from beyond the largest root of t^3 + p t - |q|.
    t = 1 + p.abs() + q.abs()
    for _ in range(100):
        t = t - (t**3 + p * t - q.abs()) / (3 * t**2 + p)
    return torch.where(q < 0, t, -t)


def _catmull(t: Any, a: Any, b: Any) -> Any:
    # Hermite's form: the tangents are half the difference of the neighbours, 0 and 1 beyond the ends.
    start, end = b / 2, (1 - a) / 2
    return (
        (2 * t**3 - 3 * t**2 + 1) * a + (t**3 - 2 * t**2 + t) * start + (3 * t**2 - 2 * t**3) * b + (t**3 - t**2) * end
    )


def _solve(a: Any, b: Any, c: Any) -> Any:
    a, b, c = torch.broadcast_tensors(a, b, c)
    full = torch.full_like
    matrix = torch.stack(
        [full(a, 4), a, b, a, full(a, 5), c, b, c, full(a, 6)], -1
    ).reshape(*a.shape, 3, 3)  # fmt: skip
    right = torch.tensor([1.0, 2.0, 3.0], dtype=a.dtype).expand(*a.shape, 3)
    return tuple(torch.linalg.solve(matrix, right).unbind(-1))


def _noise(x: Any) -> Any:
    def lattice(n: Any) -> Any:
        h = n & 0xFFFFFFFF
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            # In two halves: a product of two 32-bit numbers does not fit into int64.
            h = h ^ (h >> shift)
            h = ((h & 0xFFFF) * factor + ((((h >> 16) * factor) & 0xFFFF) << 16)) & 0xFFFFFFFF
        return ((h ^ (h >> 16)) >> 8).double() / 2**24

    cell = torch.floor(x)
    t, n = x - cell, cell.long()
    return torch.lerp(lattice(n), lattice(n + 1), t * t * (3 - 2 * t))


def _lookup(x: Any) -> Any:
    table = torch.tensor([0.0, 1.0, 4.0, 9.0, 16.0, 25.0, 36.0], dtype=torch.float64)
    place = (x + 3).clamp(0, 6)
    n = place.long().clamp(max=5)
    return torch.lerp(table[n], table[n + 1], place - n)


def _runge(x: Any, rate: float) -> Any:
    # The logistic equation has a solution in closed form; the four steps come within 1e-4 of it, so do them here too.
    for _ in range(4):
        a = rate * x * (1 - x)
        b = rate * (x + a / 8) * (1 - x - a / 8)
        c = rate * (x + b / 8) * (1 - x - b / 8)
        d = rate * (x + c / 4) * (1 - x - c / 4)
        x = x + (a + 2 * b + 2 * c + d) / 24
    return x


def _escape(x: Any, y: Any) -> Any:
    u, v, count = torch.zeros_like(x), torch.zeros_like(y), torch.zeros_like(x)
    for _ in range(16):
        is_in = u * u + v * v <= 4
        count = count + is_in
        u, v = torch.where(is_in, u * u - v * v + x, u), torch.where(is_in, 2 * u * v + y, v)
    return count


NUMERICS: tuple[Case, ...] = (
    Case(
        "static_table",
        """constexpr float halves[8] = {.5, .25, .125, .0625, .1, .2, .3, .4};
        template <typename T> T static_table(T x) {
          // Inexact doubles in tables of floats, local and global.
          static const T tenths[8] = {T(.9), T(.8), T(.7), T(.6), T(.5), T(.4), T(.3), T(.2)};
          T sum = T(0);
          for (int k = 0; k < 8; ++k) sum += x * tenths[k] + T(halves[k]);
          return sum;
        }""",
        lambda x: 4.4 * x + torch.tensor([0.9375, 0.1, 0.2, 0.3, 0.4], dtype=torch.float32).double().sum(),
    ),
    Case(
        "legendre",
        """template <typename T> T legendre(T x, int degree) {
          // DLMF 18.9.1 for Legendre's polynomials
          if (degree <= 0) return T(1);
          T before = T(1), value = x;
          for (int n = 1; n < degree; n++) {
            const T next = (T(2 * n + 1) * x * value - T(n) * before) / T(n + 1);
            before = value;
            value = next;
          }
          return value;
        }""",
        lambda x, degree: torch.special.legendre_polynomial_p(x, degree),
        scalars={"degree": 5},
        domain=(-1.0, 1.0),
        is_total=False,
        depends_on_data=True,
    ),
    Case(
        "clenshaw",
        """template <typename T> T clenshaw(T x) {
          // exp on [-1, 1] as a sum of Chebyshev's polynomials (DLMF 10.35.2), summed as in 3.11(ii).
          constexpr int count = 15;
          const T c[count] = {
              T(1.2660658777520083356), T(1.1303182079849700544), T(0.27149533953407656237), T(0.044336849848663804953),
              T(5.4742404420937326503e-3), T(5.4292631191394375036e-4), T(4.4977322954295146655e-5),
              T(3.1984364624019905059e-6), T(1.992124806672795726e-7), T(1.1036771725517344326e-8),
              T(5.5058960796737472505e-10), T(2.4979566169849825227e-11), T(1.0391522306785700505e-12),
              T(3.9912633564144015129e-14), T(1.4237580108256571488e-15)};
          T b[count + 2];
          b[count] = b[count + 1] = T(0);
          for (int k = count - 1; k >= 0; --k) b[k] = c[k] + T(2) * x * b[k + 1] - b[k + 2];
          return (c[0] + b[0] - b[2]) / T(2);
        }""",
        torch.exp,
        domain=(-1.0, 1.0),
    ),
    Case(
        "lambert",
        """template <typename T> T lambert(T x) {
          // The root w of w exp(w) = x, DLMF 4.13, by E. Halley's method.
          if (x < T(-0.36)) return T(NAN);
          T w = std::log1p(x), step = T(1);
          int count = 0;
          while (std::fabs(step) > (sizeof(T) == 8 ? T(1e-12) : T(1e-5)) && count < 30) {
            const T e = std::exp(w), f = w * e - x;
            step = f / (e * (w + T(1)) - (w + T(2)) * f / (T(2) * w + T(2)));
            w -= step;
            ++count;
          }
          return w;
        }""",
        _lambert,
        domain=(-0.3, 30.0),
        ulps=32,
        is_total=False,
    ),
    Case(
        "kepler",
        """template <typename T> T kepler(T mean, T e) {
          // The eccentric anomaly x of x - e sin(x) = mean, by Newton's method.
          const T enough = sizeof(T) == 8 ? T(1e-11) : T(1e-4);
          T x = mean + e * std::sin(mean), step;
          for (step = T(1); std::fabs(step) > enough; x -= step) {
            step = (x - e * std::sin(x) - mean) / (T(1) - e * std::cos(x));
          }
          return x;
        }""",
        _kepler,
        scalars={"e": 0.4},
        domain=(-3.0, 3.0),
        ulps=16,
        is_total=False,
        depends_on_data=True,
    ),
    Case(
        "quadrature",
        """// Gauss and Legendre's rule of twelve points on [-1, 1], the positive half (DLMF 3.5(v)): points, weights.
        constexpr double rule[2][6] = {{0.12523340851146891547, 0.36783149899818019375, 0.58731795428661744730,
                                        0.76990267419430468704, 0.90411725637047485668, 0.98156063424671925069},
                                       {0.24914704581340278500, 0.23349253653835480876, 0.20316742672306592175,
                                        0.16007832854334622633, 0.10693932599531843096, 0.04717533638651182720}};
        template <typename F, typename T> T integrate(F function, T low, T high) {
          const T half = (high - low) / T(2), middle = (high + low) / T(2);
          T sum = T(0);
          auto add = [&sum, function](T point, T weight) { sum += weight * function(point); };
          for (int k = 0; k < 6; k++) {
            add(middle + half * T(rule[0][k]), T(rule[1][k]));
            add(middle - half * T(rule[0][k]), T(rule[1][k]));
          }
          return half * sum;
        }
        template <typename T> T quadrature(T x) {
          return T(1.12837916709551257390) * integrate([](T t) { return std::exp(-t * t); }, T(0), x);
        }""",
        torch.erf,
        domain=(-2.0, 2.0),
        ulps=32,
        is_total=False,
    ),
    Case(
        "cubic",
        """template <typename T> T cubic(T p, T q) {
          // The real root of t^3 + p t + q that is farthest from zero, DLMF 1.11(iii).
          const T sign = q < T(0) ? T(1) : T(-1);
          if (p == T(0)) return -std::cbrt(q);
          const T size = std::sqrt(std::fabs(p) / T(3)), ratio = T(1.5) * std::fabs(q) / (std::fabs(p) * size);
          T root;
          if (p > T(0)) {
            root = std::sinh(std::asinh(ratio) / T(3));
          } else if (ratio > T(1)) {
            root = std::cosh(std::acosh(ratio) / T(3));
          } else {
            root = std::cos(std::acos(ratio) / T(3));
          }
          return sign * T(2) * size * root;
        }""",
        _cubic,
        tensors=2,
        ulps=128,
        is_total=False,
    ),
    Case(
        "catmull",
        """template <typename T> T catmull(T t, T a, T b) {
          // The spline of E. Catmull and R. Rom (1974) through 0, a, b and 1.
          static const int matrix[4][4] = {{-1, 3, -3, 1}, {2, -5, 4, -1}, {-1, 0, 1, 0}, {0, 2, 0, 0}};
          const T point[4] = {T(0), a, b, T(1)};
          T sum = T(0);
          for (int i = 0; i < 4; i++) {
            T row = 0;
            for (int j = 0; j < 4; j++) row += T(matrix[i][j]) * point[j];
            sum = sum * t + row;
          }
          return sum / T(2);
        }""",
        _catmull,
        tensors=3,
        ulps=64,
        is_total=False,
    ),
    Case(
        "solve",
        """template <typename T> void solve(T a, T b, T c, T& x, T& y, T& z) {
          // Gauss's elimination.
          T m[3][4] = {{T(4), a, b, T(1)}, {a, T(5), c, T(2)}, {b, c, T(6), T(3)}};
          for (int pivot = 0; pivot < 3; ++pivot) {
            for (int row = 0; row < 3; ++row) {
              if (row == pivot) continue;
              const T factor = m[row][pivot] / m[pivot][pivot];
              for (int column = pivot; column < 4; ++column) m[row][column] -= factor * m[pivot][column];
            }
          }
          x = m[0][3] / m[0][0];
          y = m[1][3] / m[1][1];
          z = m[2][3] / m[2][2];
        }""",
        _solve,
        tensors=3,
        outputs=3,
        domain=(-1.5, 1.5),
        ulps=16,
        is_total=False,
    ),
    Case(
        "runge",
        """template <typename T> T runge(T x, T rate) {
          // The logistic equation, four steps of W. Kutta's method.
          const T h = T(1) / 4;
          auto slope = [rate](T y) { return rate * y * (T(1) - y); };
          auto step = [&](T y) -> T {
            const T a = slope(y), b = slope(y + a * h / T(2)), c = slope(y + b * h / T(2)), d = slope(y + c * h);
            return y + h / T(6) * (a + T(2) * b + T(2) * c + d);
          };
          int left = 4;
          do x = step(x); while (--left);
          return x;
        }""",
        _runge,
        scalars={"rate": 1.5},
        domain=(0.05, 1.5),
        ulps=16,
        is_total=False,
    ),
    Case(
        "lookup",
        """template <typename T> T lookup(T x) {
          const T table[] = {T(0), T(1), T(4), T(9), T(16), T(25), T(36)};
          constexpr int last = sizeof(table) / sizeof(table[0]) - 1;
          T place = x + T(3);
          place = place < T(0) ? T(0) : place > T(last) ? T(last) : place;
          int n = static_cast<int>(place);
          if (n > last - 1) n = last - 1;
          return table[n] + (place - T(n)) * (table[n + 1] - table[n]);
        }""",
        _lookup,
        domain=(-4.0, 4.0),
        ulps=16,
        is_total=False,
    ),
    Case(
        "noise",
        """template <typename T> T lattice(int n) {
          // A number in [0, 1) for every integer; the hash is C. Wellons's lowbias32.
          unsigned h = static_cast<unsigned>(n);
          h ^= h >> 16;
          h *= 0x7feb352dU;
          h ^= h >> 15;
          h *= 0x846ca68bU;
          h ^= h >> 16;
          return T(h >> 8) / T(1 << 24);
        }
        template <typename T> T noise(T x) {
          const T cell = std::floor(x), t = x - cell;
          const T low = lattice<T>((int)cell), high = lattice<T>((int)cell + 1);
          return low + (high - low) * t * t * (T(3) - T(2) * t);
        }""",
        _noise,
        domain=(-20.0, 20.0),
        is_total=False,
    ),
    Case(
        "escape",
        """template <typename T> T escape(T x, T y) {
          // Steps until z^2 + c is farther from 0 than 2 (B. Mandelbrot).
          T u = T(0), v = T(0);
          int count = 0;
          while (true) {
            const T uu = u * u, vv = v * v;
            if (!(uu + vv <= T(4)) || count == 16) break;
            v = T(2) * u * v + y;
            u = uu - vv + x;
            count++;
          }
          return static_cast<T>(count);
        }""",
        _escape,
        tensors=2,
        domain=(-1.5, 1.0),
        # Sixteen squarings make rounding errors of float32 large enough to change counts.
        dtypes=(torch.float64,),
        ulps=0,
        is_total=False,
        depends_on_data=True,
    ),
)
