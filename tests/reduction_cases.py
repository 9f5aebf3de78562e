"""Groups with reductions, and the canonical order of reductions in eager torch, one level of the tree at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser.combining import Reduction
from fuser.cxx.functor import Functor, parse_functor
from fuser.function import Function
from fuser.graph import FusionGroup, GroupBuilder
from fuser.ops import OPS

BATCH = 8192


def functor(text: str, scalars: tuple[str, ...] = (), num_outputs: int = 1) -> Functor:
    """Parse a text without its template line."""
    return parse_functor(f"template <typename T> {text}", scalars, num_outputs)


VALUE = functor("T value(T x) { return x; }")
ADD = functor("T add(T a, T b) { return a + b; }")
LARGER = functor("T larger(T a, T b) { return a != a || a > b ? a : b; }")
# Neither order of two parts is the other: what comes first stays first.
FOLLOW = functor("void follow(T a, T b, T c, T d, T& e, T& f) { e = a * c; f = c * b + d; }", num_outputs=2)
PAIR = functor("void pair(T x, T y, T& a, T& b) { a = x; b = y; }", num_outputs=2)
ONE = functor("void one(T x, T& m, T& s, T& n) { m = x; s = T(0); n = T(1); }", num_outputs=3)
MERGE = functor(
    "void merge(T m, T s, T n, T m2, T s2, T n2, T& a, T& b, T& c) {"
    " c = n + n2; T d = m2 - m; T share = c > T(0) ? n2 / c : T(0);"
    " a = m + d * share; b = s + s2 + d * d * n * share; }",
    num_outputs=3,
)
MOMENTS = functor("void moments(T m, T s, T n, T& mean, T& var) { mean = m; var = s / n; }", num_outputs=2)
FIRST = functor("void first(T x, int64_t i, T& v, int64_t& at) { v = x; at = i; }", num_outputs=2)
PICK = functor(
    "void pick(T a, int64_t i, T b, int64_t j, T& v, int64_t& at) {"
    " bool left = a > b || (a == b && i < j); v = left ? a : b; at = left ? i : j; }",
    num_outputs=2,
)
WHERE = functor("int64_t where(T v, int64_t at) { return at; }")
INFINITY = float("inf")


def total(dims: tuple[int, ...] | None = None, keepdim: bool = False) -> Function:
    """Return the sum, in its accumulator's dtype."""
    return Function(VALUE, reduction=Reduction(ADD, (0,), None, dims, keepdim))


def largest(dims: tuple[int, ...] | None = None, keepdim: bool = False) -> Function:
    """Return the maximum."""
    return Function(VALUE, reduction=Reduction(LARGER, (-INFINITY,), None, dims, keepdim))


def mean_and_variance(dims: tuple[int, ...] | None = None, keepdim: bool = False) -> Function:
    """Return Welford's mean and variance: three accumulators, two results."""
    return Function(ONE, reduction=Reduction(MERGE, (0, 0, 0), MOMENTS, dims, keepdim))


def place_of_largest(dims: tuple[int, ...] | None = None) -> Function:
    """Return argmax of a tensor and the places of its elements."""
    reduction = Reduction(PICK, (-INFINITY, 2**62), WHERE, dims)
    return Function(FIRST, unpromoted=("i",), out_dtypes=(torch.int64,), reduction=reduction)


def composition(dims: tuple[int, ...] | None = None) -> Function:
    """Return the composition of affine maps, which is associative and not commutative."""
    return Function(PAIR, reduction=Reduction(FOLLOW, (1, 0), None, dims))


def alone(function: Function, count: int = 1) -> FusionGroup:
    """Return a group of one application."""
    builder = GroupBuilder()
    return builder.build(builder.apply(function, [builder.add_input(f"x{slot}") for slot in range(count)]))


def softmax(dims: tuple[int, ...]) -> FusionGroup:
    """Return softmax, its sum and its maximum: two reductions, one after the other, and work between and after."""
    builder = GroupBuilder()
    x, minus = builder.add_input("x"), builder.add_input("minus_alpha", is_scalar=True, default=-1)
    (top,) = builder.apply(largest(dims, keepdim=True), [x])
    (power,) = builder.apply(OPS["exp"].function, builder.apply(OPS["sub"].function, [x, top], [minus]))
    (bottom,) = builder.apply(total(dims, keepdim=True), [power])
    (share,) = builder.apply(OPS["div"].function, [power, bottom])
    return builder.build([share, bottom, top])


def normalised(dims: tuple[int, ...]) -> FusionGroup:
    """Return a layer norm with weight and bias, after a multiplication of two inputs; it returns the mean, too."""
    builder = GroupBuilder()
    x, y, weight, bias = (builder.add_input(name) for name in ("x", "y", "weight", "bias"))
    (product,) = builder.apply(OPS["mul"].function, [x, y])
    mean, var = builder.apply(mean_and_variance(dims, keepdim=True), [product])
    scale = functor("T scale(T x, T m, T v, T w, T b) { return (x - m) / sqrt(v + T(1e-5)) * w + b; }")
    return builder.build([*builder.apply(Function(scale), [product, mean, var, weight, bias]), mean])


def in_order(
    parts: Sequence[torch.Tensor], combine: Callable[..., Any], identity: Sequence[float]
) -> list[torch.Tensor]:
    """Combine along the last dimension in the canonical order, on whole tensors in eager torch.

    Args:
        parts: the accumulators of each element.
        combine: takes accumulators of two parts and returns those of both.
        identity: of each accumulator.
    """
    found = [torch.full(part.shape[:-1], value, dtype=part.dtype) for part, value in zip(parts, identity, strict=True)]
    for begin in range(0, parts[0].shape[-1], BATCH):
        level = [part[..., begin : begin + BATCH] for part in parts]
        size = 1 << (level[0].shape[-1] - 1).bit_length()
        missing = size - level[0].shape[-1]
        level = [
            torch.nn.functional.pad(part, (0, missing), value=value) if missing else part
            for part, value in zip(level, identity, strict=True)
        ]
        while level[0].shape[-1] > 1:
            level = list(combine(*[part[..., 0::2] for part in level], *[part[..., 1::2] for part in level]))
        found = list(combine(*found, *[part[..., 0] for part in level]))
    return found
