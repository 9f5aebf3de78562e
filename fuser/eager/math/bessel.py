"""Bessel functions of integer order.

ATen's special_bessel_* give the derivatives only: in float64 their CPU versions are off by up to 1e-6 (torch 2.13). The
values come from the tables below: Chebyshev interpolation of the functions themselves, computed with 60 digits
(mpmath) and written as polynomials in x^2 / 18 - 1 up to 6 and in 72 / x^2 - 1 beyond.
"""

from __future__ import annotations

import math
from functools import partial

import torch

from fuser.eager.data import NeedsValuesError
from fuser.eager.math.real import constant_of, copysign
from fuser.eager.math.terms import Formula, Term, anchored, apply, detach, polynomial, through_double, where

__all__ = ["BESSEL", "bessel_j", "bessel_y"]

aten = torch.ops.aten
_INF = float("inf")

# The first zeros of J0 and J1, each as a double and what it lacks.
_ZEROS0 = ((2.404825557695773, -1.176691651530894e-16), (5.520078110286311, 8.088597146146722e-17))
_ZEROS1 = ((3.8317059702075125, -1.5269184090088067e-16), (7.015586669815619, -9.414165653410389e-17))
# J(n, x) / x^n without the factors of the zeros.
_J0 = (
    4.1935059407098375e-16, -1.787121683804456e-14, 6.531953886225115e-13, -2.0284528766570934e-11,
    5.263104137536587e-10, -1.1201566509491217e-08, 1.9115376799874176e-07, -2.540737306673268e-06,
    2.531415275789996e-05, -0.0001792287580749945, 0.0008320347890581551, -0.002204696491432354, 0.002430675493924603,
)  # fmt: skip
_J1 = (
    1.384056511960835e-17, -6.310834571582888e-16, 2.480415950650659e-14, -8.327552243312433e-13,
    2.3510412330712906e-11, -5.48591199142594e-10, 1.035665470275717e-08, -1.5395754280182552e-07,
    1.738806978912487e-06, -1.4194148437525609e-05, 7.766120861800151e-05, -0.00024978987935705466,
    0.0003483739060920107,
)  # fmt: skip
# Y0 - 2 / pi log(x) J0 and (Y1 - 2 / pi (log(x) J1 - 1 / x)) / x.
_Y0 = (
    -2.8960295201682197e-13, 1.2067675269644676e-11, -4.3003078100886693e-10, 1.2984096598856987e-08,
    -3.2628662532301996e-07, 6.692190488505585e-06, -0.000109313583751779, 0.0013775449763471475,
    -0.012825198728186068, 0.08279745527591624, -0.33360014135756944, 0.6673124865861597, -0.15182922873915472,
    -0.9446076120040159, 0.23144649403798057,
)  # fmt: skip
_Y1 = (
    -9.942987409033191e-15, 4.456361057924368e-13, -1.71890556072728e-11, 5.656791364049115e-10,
    -1.5629344089477673e-08, 3.562697071305039e-07, -6.557583028093706e-06, 9.484358330854674e-05,
    -0.0010400145152791316, 0.008229262792587386, -0.04363349674993546, 0.13647459877549867, -0.186212417521995,
    -0.026212367438516446, 0.15342210591925187,
)  # fmt: skip
# J + iY = sqrt(2 / (pi x)) exp(i (x - (2n + 1) pi / 4)) (P + 6i / x Q).
_P0 = (
    -9.136607615087875e-14, 1.6536109866084696e-13, 7.543714259078293e-14, -3.963959151107006e-14,
    -8.118102145379663e-13, 1.814268718946277e-12, -3.871191213773616e-12, 1.1475139795926316e-11,
    -3.682007833292912e-11, 1.2774187349591975e-10, -5.005100370294541e-10, 2.284051994422095e-09,
    -1.2683275771698633e-08, 9.16995319304267e-08, -9.640070169540624e-07, 1.801462057593961e-05,
    -0.0009371922699208154, 0.9990437217524405,
)  # fmt: skip
_Q0 = (
    -3.238414432786042e-14, 5.0907795976638604e-14, 7.929558893962367e-14, -1.0296850107736801e-13,
    -2.1460463444321742e-13, 3.345087962319055e-13, -1.6322590683159926e-13, 5.351366167437282e-13,
    -1.7964935389446867e-12, 4.5013015620642256e-12, -1.2065838357134982e-11, 3.569325070761805e-11,
    -1.1531751940769821e-10, 4.1465849783427927e-10, -1.7047795915651118e-09, 8.31443240543591e-09,
    -5.08082323039519e-08, 4.240191073407122e-07, -5.601709278720028e-06, 0.00015680723679626523, -0.0206704389555253,
)  # fmt: skip
_P1 = (
    9.640311584764908e-14, -1.7481929140705567e-13, -7.822609138657322e-14, 3.884796940977152e-14,
    8.644277617721246e-13, -1.9403236334665248e-12, 4.171490760315124e-12, -1.2411273849009271e-11,
    4.0006299170854035e-11, -1.3967858594162915e-10, 5.517276364090651e-10, -2.5450185892388773e-09,
    1.4348000365048968e-08, -1.0614576871448622e-07, 1.160293727983122e-06, -2.34981465308536e-05,
    0.0015766098524144703, 1.0016013920824152,
)  # fmt: skip
_Q1 = (
    3.396036514394265e-14, -5.345923050282544e-14, -8.290495526513074e-14, 1.0766812112571045e-13,
    2.2554570953837923e-13, -3.525726914680476e-13, 1.762419341115639e-13, -5.742759139134609e-13,
    1.920482314711316e-12, -4.82988727440274e-12, 1.3002544943010633e-11, -3.8636933343537416e-11,
    1.255191476870182e-10, -4.545121503723554e-10, 1.885797786192914e-09, -9.313161119834122e-09,
    5.796064638459898e-08, -4.980557873324498e-07, 6.945249136200885e-06, -0.0002216797952867409,
    0.062270807100537805,
)  # fmt: skip


# ---- orders 0 and 1 ----


def _near(a: Term, order: int) -> tuple[Term, Term]:
    # J and Y for 0 < a <= 6.
    t = a * a * (1 / 18) - 1.0
    j = polynomial(t, _J1 if order else _J0)
    for zero, rest in _ZEROS1 if order else _ZEROS0:
        j = j * (((a - zero) - rest) * (a + zero))
    log = apply(aten.log.default, a)
    if order == 0:
        return j, polynomial(t, _Y0) + (2 / math.pi) * log * j
    j = j * a
    return j, polynomial(t, _Y1) * a + (2 / math.pi) * (log * j - 1.0 / a)


def _far(a: Term, order: int) -> tuple[Term, Term]:
    # J and Y for a >= 6. The phase x - pi / 4 is not rounded: its sine and cosine are sums of those of x.
    r = 6.0 / a
    t = r * r * 2.0 - 1.0
    p, q = polynomial(t, _P1 if order else _P0), r * polynomial(t, _Q1 if order else _Q0)
    sine, cosine = apply(aten.sin.default, a), apply(aten.cos.default, a)
    c, s = (sine - cosine, -(sine + cosine)) if order else (cosine + sine, sine - cosine)
    size = apply(aten.rsqrt.default, a) * math.sqrt(1 / math.pi)
    return size * (p * c - q * s), size * (p * s + q * c)


def _first_kind(x: Term, order: int) -> Term:
    a = abs(detach(x))
    value = where(a < 6.0, _near(a, order)[0], _far(a, order)[0])
    if order == 0:
        base, at_infinity = apply(aten.special_bessel_j0.default, x), constant_of(0.0, x)
    else:
        value = where(detach(x) < 0.0, -value, value)
        base, at_infinity = apply(aten.special_bessel_j1.default, x), copysign(constant_of(0.0, x), x)
    return where(a.equals(_INF), at_infinity, where(a < 0.001, base, anchored(base, value)))


def _second_kind(x: Term, order: int) -> Term:
    a = abs(detach(x))
    value = where(a < 6.0, _near(a, order)[1], _far(a, order)[1])
    op = aten.special_bessel_y1.default if order else aten.special_bessel_y0.default
    return where(x.equals(_INF), constant_of(0.0, x), anchored(apply(op, x), value))


# ---- any order ----


def bessel_j(order: Term, x: Term) -> Term:
    """Return the Bessel function of the first kind; where the order is data, as many steps are taken as it needs.

    Raises:
        NeedsValuesError: the order is a node of a graph.
    """
    if x.dtype is torch.float32:
        return bessel_j(order, x.to(torch.float64)).to(torch.float32)
    n, most = _order(order)
    a = where(x < 0.0, -x, x)
    j0, j1 = _first_kind(a, 0), _first_kind(a, 1)
    # Upwards where x is larger than the order, by continued fraction else (Abramowitz and Stegun 9.1.27 and 9.1.73).
    # Neither sees an argument of the other.
    limit = n.to(x.dtype)
    is_large = a >= limit
    large, small = where(is_large, a, where(limit < 1.0, constant_of(1.0, x), limit)), where(is_large, limit, a)
    below, upward = j0, where(n.equals(0), j0, j1)
    ratio, product = constant_of(0.0, x), constant_of(1.0, x)
    for k in range(1, most):
        following = upward * (2.0 * k / large) - below
        below, upward = upward, where(n > k, following, upward)
    for k in range(most + 16 + 4 * math.isqrt(most), 0, -1):
        ratio = small / (2.0 * k - small * ratio)
        if 2 <= k <= most:
            product = where(n >= k, product * ratio, product)
    first = where(abs(j0) > abs(j1), j0 * ratio, j1)
    downward = where(n.equals(0), j0, first * product)
    value = where(is_large, upward, downward)
    odd = (n & 1).equals(1) & (x < 0.0).differs(order < 0)
    return where(odd, -value, value)


def bessel_y(order: Term, x: Term) -> Term:
    """Return the Bessel function of the second kind; as `bessel_j`."""
    if x.dtype is torch.float32:
        return bessel_y(order, x.to(torch.float64)).to(torch.float32)
    n, most = _order(order)
    below = _second_kind(x, 0)
    value = where(n.equals(0), below, _second_kind(x, 1))
    for k in range(1, most):
        following = where(value.equals(-_INF), value, value * (2.0 * k / x) - below)
        below, value = value, where(n > k, following, value)
    odd = (n & 1).equals(1) & (order < 0)
    return where(odd, -value, value)


def _order(order: Term) -> tuple[Term, int]:
    # The absolute value, as int64, and the largest one.
    n = order.to(torch.int64)
    n = where(n < 0, -n, n)
    data = n.value.data
    if isinstance(data, torch.fx.Node):
        raise NeedsValuesError("the order of a Bessel function")
    return n, int(data.max().item()) if isinstance(data, torch.Tensor) and data.numel() else int(data)


BESSEL: dict[str, Formula] = {
    "j0": through_double(partial(_first_kind, order=0)),
    "j1": through_double(partial(_first_kind, order=1)),
    "y0": through_double(partial(_second_kind, order=0)),
    "y1": through_double(partial(_second_kind, order=1)),
}
