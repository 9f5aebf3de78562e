"""Operations that C++ has no function for: as other operations, or as functions that the text brings along.

A function of the text loops a constant number of times, so that it is a plain graph and can be differentiated again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import cache

from fuser.autodiff.derivative.expression import Expr

__all__ = ["LOWERINGS", "helper_text"]

# B_2, B_4, ...
_BERNOULLI = [
    Fraction(1, 6), Fraction(-1, 30), Fraction(1, 42), Fraction(-1, 30), Fraction(5, 66), Fraction(-691, 2730),
    Fraction(7, 6), Fraction(-3617, 510), Fraction(43867, 798),
]  # fmt: skip

_MANTISSA = "template <typename T> T $name(T x) { int e; return frexp(x, &e); }"
_EXPONENT = "template <typename T> int $name(T x) { int e; frexp(x, &e); return e; }"
# Abramowitz and Stegun 6.3.5, 6.3.7 and 6.3.18. The sum of 1 / (z + k) is one quotient.
_DIGAMMA = """template <typename T> T $name(T x) {
  const bool reflect = x <= T(0);
  const T z = reflect ? T(1) - x : x;
  const bool shift = z < T(10);
  T above = T(0), below = T(1);
  for (int k = 0; k < 10; ++k) {
    above = above * (z + T(k)) + below;
    below = below * (z + T(k));
  }
  const T w = shift ? z + T(10) : z;
  const T q = T(1) / (w * w);
  const T series = $series;
  const T y = log(w) - T(0.5) / w - series - (shift ? above / below : T(0));
  const T whole = rint(x);
  if (reflect && x == whole) return x < T(0) ? T(NAN) : T(-1) / x;
  return reflect ? y - T(3.141592653589793) / tan(T(3.141592653589793) * (x - whole)) : y;
}"""
# The Hurwitz zeta function by Euler and Maclaurin's formula, and the reflection formula: Abramowitz and Stegun 6.4.10,
# 6.4.7 and 23.2.
_POLYGAMMA = """template <typename T> T $name(T x) {
  const bool reflect = x <= T(0);
  const T z = reflect ? T(1) - x : x;
  T sum = T(0);
  for (int k = 0; k < 10; ++k) {
    const T r = T(1) / (z + T(k));
    sum += $power;
  }
  const T r = T(1) / (z + T(10));
  const T q = r * r;
  const T tail = $tail;
  const T y = $factor * (sum + $below * (T($first) + r * (T(0.5) + r * tail)));
  const T whole = rint(x);
  if (reflect && x == whole) return $pole;
  if (!reflect) return y;
  const T c = T(1) / tan(T(3.141592653589793) * (x - whole));
  return $reflected;
}"""


@cache
def helper_text(op: str, order: int) -> str:
    """Return a function template with ``$name`` for its name.

    Args:
        op: "digamma", "polygamma" (of ``order``), "frexp_mantissa" or "frexp_exponent".
        order: which derivative of digamma.
    """
    if op == "frexp_mantissa":
        return _MANTISSA
    if op == "frexp_exponent":
        return _EXPONENT
    if op == "digamma":
        series = [_float(b / (2 * j)) for j, b in enumerate(_BERNOULLI, 1)]
        return _DIGAMMA.replace("$series", f"q * ({_horner(series, 'q')})")
    assert op == "polygamma", "no other operation has a function"
    return _polygamma(order)


def _polygamma(n: int) -> str:
    # zeta(s, z) = sum + w^(1-s) (1/(s-1) + 1/(2 w) + ...) with s = n + 1, w = z + 10, r = 1 / w.
    s = n + 1
    tail, rising = [], Fraction(1)
    for j, b in enumerate(_BERNOULLI, 1):
        # s (s+1) ... (s + 2j - 2)
        rising = Fraction(math.prod(range(s, s + 2 * j - 1)))
        tail.append(_float(b * rising / math.factorial(2 * j)))
    sign = 1 if n % 2 else -1
    # polygamma(n, x) = (-1)^n polygamma(n, 1 - x) - pi d^n/dx^n cot(pi x)
    cotangent = [f"T({-coefficient * math.pi ** (n + 1)!r})" for coefficient in _cotangent(n)]
    return (
        _POLYGAMMA.replace("$power", " * ".join(["r"] * s))
        .replace("$tail", _horner(tail, "q"))
        .replace("$factor", f"T({sign * math.factorial(n)})")
        .replace("$below", " * ".join(["r"] * n))
        .replace("$first", repr(1 / n))
        .replace("$pole", "T(INFINITY)" if n % 2 else "T(NAN)")
        .replace("$reflected", f"{'-' if n % 2 else ''}y + ({_horner(cotangent, 'c')})")
    )


def _cotangent(n: int) -> list[int]:
    # Coefficients of the n-th derivative of cot as a polynomial of cot, whose own derivative is -(1 + cot^2).
    coefficients = [0, 1]
    for _ in range(n):
        slopes = [power * coefficient for power, coefficient in enumerate(coefficients)][1:]
        coefficients = [0] * (len(slopes) + 2)
        for power, slope in enumerate(slopes):
            coefficients[power] -= slope
            coefficients[power + 2] -= slope
    return coefficients


def _horner(coefficients: list[str], variable: str) -> str:
    text = coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        text = f"{coefficient} + {variable} * ({text})" if " " in text else f"{coefficient} + {variable} * {text}"
    return text


def _float(value: Fraction) -> str:
    return f"T({float(value)!r})"


# --- in terms of others -------------------------------------------------------------------------------------------
def _sgn(x: Expr) -> Expr:
    if not x.dtype.is_complex:
        return x.call("gt", 0).to(x.dtype) - x.call("lt", 0).to(x.dtype)
    length = x.call("abs")
    parts = [x.call(part) / length for part in ("real", "imag")]
    unit = parts[0].call("complex", parts[1])
    return unit.where(length.call("ne", 0), 0)


def _rsqrt(x: Expr) -> Expr | None:
    return 1 / x.call("sqrt") if x.dtype.is_complex else None


def _exp2(x: Expr) -> Expr | None:
    return (x * math.log(2)).call("exp") if x.dtype.is_complex else None


def _remainder(a: Expr, b: Expr) -> Expr:
    # fmod has the sign of a, and this the sign of b.
    rest = a.call("fmod", b)
    differs = rest.call("lt", 0).call("ne", b.call("lt", 0))
    return (rest + b).where(differs.call("logical_and", rest.call("ne", 0)), rest)


def _sinc(x: Expr) -> Expr:
    angle = x * math.pi
    return (angle.call("sin") / angle).where(x.call("ne", 0), 1)


def _scaled(function: str) -> Callable[[Expr], Expr]:
    return lambda x: x.call(function) * (-x.call("abs")).call("exp")


LOWERINGS: dict[str, Callable[..., Expr | None]] = {
    "reciprocal": lambda x: 1 / x,
    "sgn": _sgn,
    "rsqrt": _rsqrt,
    "exp2": _exp2,
    "isnan": lambda x: x.call("ne", x),
    "isinf": lambda x: x.call("abs").call("eq", math.inf),
    # NaN wins.
    "maximum": lambda a, b: a.where(a.call("ne", a).call("logical_or", a.call("gt", b)), b),
    "minimum": lambda a, b: a.where(a.call("ne", a).call("logical_or", a.call("lt", b)), b),
    "remainder": _remainder,
    "div_floor": lambda a, b: (a / b).call("floor"),
    "sinc": _sinc,
    "special_i0e": _scaled("special_i0"),
    "special_i1e": _scaled("special_i1"),
}
