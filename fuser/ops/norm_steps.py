"""What the steps of torch's norms have in common: sums, moments, and what is normalised by them.

Statistics are of the accumulate type, as in ATen's CUDA kernels. In torch's order they come from one pass (Welford);
else from two, the mean and then the squares of what differs from it, which is as exact and takes fewer operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fuser.combining import Reduction
from fuser.cxx.functor import Functor, parse_functor
from fuser.function import Function, Promotion
from fuser.graph import GroupBuilder
from fuser.ops.composites import step
from fuser.ops.reductions import REDUCTIONS
from fuser.ops.table import cast_function

__all__ = ["NEXT_MOMENTS", "affine", "functor", "moments", "normalised_dx", "reduce_step", "rstd_of", "stored"]


def functor(text: str, scalars: tuple[str, ...] = (), num_outputs: int = 1) -> Functor:
    """Parse a text, which may be without its ``template <typename T>``."""
    head = "" if text.startswith("template") else "template <typename T> "
    return parse_functor(head + text, scalars, num_outputs)


_ADD = "T add(T a, T b) { return a + b; }"
_ADD_TWO = "void add_two(T a1, T a2, T b1, T b2, T& s1, T& s2) { s1 = a1 + b1; s2 = a2 + b2; }"


def reduce_step(
    mapped: Functor,
    dims: Sequence[int],
    finish: Functor | None = None,
    *,
    order: str = "",
    accumulate: Functor | None = None,
    combine: Functor | None = None,
    keepdim: bool = True,
    is_wide: bool = True,
    unpromoted: tuple[str, ...] = (),
) -> Function:
    """Return the step that adds up what ``mapped`` makes (one or two sums), with results of the accumulate type."""
    count = mapped.num_outputs
    combine = combine or (functor(_ADD) if count == 1 else functor(_ADD_TWO, num_outputs=2))
    counts = finish is not None and any(item.name == "count" for item in finish.tensors)
    zeros = (0,) * count
    reduction = Reduction(combine, zeros, finish, tuple(dims), keepdim, counts, order, accumulate, is_torchs=True)
    promotion = Promotion.DEFAULT_WIDE if is_wide else Promotion.DEFAULT
    return Function(mapped, promotion=promotion, unpromoted=unpromoted, reduction=reduction)


# --- moments -------------------------------------------------------------------------------------------------
_ONE = "void one(T x, T& m, T& s, T& n) { m = x; s = T(0); n = T(1); }"
# How ATen's kernels that count with a division add an element, with what their compiler contracts. A loop may give what
# divides without looking at what comes out, and looks itself.
NEXT_MOMENTS = """template <typename T, typename N> void next(T ma, T sa, N count, T x, T& m, T& s, T& n) {
  const T delta = x - ma;
  n = fuser_next(count);
  m = ma + fuser_next_share(delta, count);
  s = fma(delta, x - m, sa);
}"""


def moments(
    builder: GroupBuilder, x: int, dims: Sequence[int], order: str, kernel: Sequence[str] = ()
) -> tuple[int, int, int]:
    """Add the steps that make mean, biased variance and number of elements along some dimensions, which are kept.

    Args:
        builder: writes the steps.
        x: what they are of.
        dims: the dimensions.
        order: the name of torch's order; "" for the canonical one.
        kernel: how ATen's kernel in that order merges moments, and adds an element: texts. None: as those of ``var``.
    """
    if order:
        # Some count downwards.
        text = """void moments(T m, T s, T n, T& mean, T& var, T& count) {
          const T all = abs(n);
          mean = m; var = s / all; count = all;
        }"""
        finish = functor(text, num_outputs=3)
        mapped = functor(_ONE, num_outputs=3)
        texts = kernel or (REDUCTIONS["var"].combine, REDUCTIONS["var"].accumulate)
        merge, add = (functor(text, num_outputs=3) for text in texts)
        both = reduce_step(mapped, dims, finish, order=order, accumulate=add, combine=merge)
        mean, var, count = builder.apply(both, [x])
        return mean, var, count
    same = functor("T value(T x) { return x; }")
    # A quotient of fast numerics is corrected: all elements have its error. An infinite one has no remainder.
    text = """void mean_of(T total, int64_t count, T& mean, T& n) {
      n = T(count);
      const T first = total / n;
      mean = isinf(first) ? first : first + fma(-n, first, total) / n;
    }"""
    mean, count = builder.apply(reduce_step(same, dims, functor(text, num_outputs=2)), [x])
    squares = functor("T square_of(T x, T mean) { return (x - mean) * (x - mean); }")
    text = """T var_of(T total, int64_t count) {
      const T n = T(count), first = total / n;
      return isinf(first) ? first : first + fma(-n, first, total) / n;
    }"""
    finish = functor(text)
    (var,) = builder.apply(reduce_step(squares, dims, finish), [x, mean])
    return mean, var, count


def stored(builder: GroupBuilder, values: Sequence[int], dtype: str) -> list[int]:
    """Convert statistics to the dtype (by name) that torch keeps them in, where that is not the accumulate type."""
    return [builder.apply(cast_function(getattr(torch, dtype)), [value])[0] for value in values] if dtype else [*values]


def rstd_of(builder: GroupBuilder, var: int, eps: int) -> int:
    """Add the step that makes 1 / sqrt(var + eps)."""
    text = "T rstd_of(T var, double eps) { return rsqrt(var + T(eps)); }"
    return builder.apply(step(text, scalars=("eps",), promotion=Promotion.DEFAULT_WIDE), [var], [eps])[0]


def affine(name: str, value: str, taken: str, has_weight: bool, has_bias: bool, **rest: Any) -> Function:
    """Return the step ``value``, a text, times the weight, plus the bias, where they are there.

    Args:
        name: of the functor.
        value: in terms of what it takes.
        taken: its first parameters: x, and what is of the accumulate type.
        has_weight: whether it takes a weight last.
        has_bias: whether it takes a bias after that.
        **rest: further fields of the function.
    """
    parameters = taken + ", T weight" * has_weight + ", T bias" * has_bias
    value = f"weight * ({value})" if has_weight else value
    unpromoted = tuple(word for word in ("mean", "rstd", "weight", "bias") if f"T {word}" in parameters)
    text = f"T {name}({parameters}) {{ return {value}{' + bias' * has_bias}; }}"
    return step(text, unpromoted=unpromoted, **rest)


def normalised_dx(
    builder: GroupBuilder,
    values: Sequence[int],
    dims: Sequence[int],
    order: str,
    *,
    has_mean: bool = True,
    is_contiguous: bool = True,
) -> int:
    """Add the steps of the input's gradient, for what is normalised along some dimensions.

    Args:
        builder: writes the steps.
        values: the input, the output's gradient, the mean if there is one, 1 / deviation, the weight if there is one.
        dims: the dimensions.
        order: the name of torch's order; "" for the canonical one.
        has_mean: whether there is one.
        is_contiguous: whether the gradient lies row-major; else as the input does.
    """
    has_weight = len(values) == 4 + has_mean
    taken = "T x, T dy" + ", T mean" * has_mean + ", T rstd" + ", T weight" * has_weight
    loss = "dy * weight" if has_weight else "dy"
    centred = "(x - mean)" if has_mean else "x"
    sums = f"void sums({taken}, T& s1, T& s2) {{ s1 = {loss}; s2 = {loss} * {centred} * rstd; }}"
    totals = """void totals(T s1, T s2, int64_t count, T& first, T& second, T& n) {
      first = s1; second = s2; n = T(count);
    }"""
    # In one text, so that a compiler contracts what it contracts in ATen's.
    add = f"""void add_sums(T a1, T a2, {taken}, T& s1, T& s2) {{
      s1 = a1 + {loss};
      s2 = a2 + {loss} * {centred} * rstd;
    }}"""
    both = reduce_step(
        functor(sums, num_outputs=2),
        dims,
        functor(totals, num_outputs=3),
        order=order,
        accumulate=functor(add, num_outputs=2) if order else None,
    )
    totals_of = builder.apply(both, values)
    # Once for a row.
    share = step("T rstd_share(T n, T rstd) { return (T(1) / n) * rstd; }", promotion=Promotion.DEFAULT_WIDE)
    shared = builder.apply(share, [totals_of[-1], values[2 + has_mean]])
    text = f"""T norm_dx({taken}, T first, T second, T n, T share) {{
      T f = n * {"weight * dy" if has_weight else "dy"};
      f -= {centred} * rstd * second;{" f -= first;" * has_mean}
      return f * share;
    }}"""
    unpromoted = ("mean",) * has_mean + ("rstd", "first", "second", "n", "share")
    (dx,) = builder.apply(
        step(text, unpromoted=unpromoted, is_contiguous=is_contiguous), [*values, *totals_of, *shared]
    )
    return dx
