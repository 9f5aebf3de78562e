"""layer_norm and rms_norm with their backward ops, in the steps of ATen's CUDA kernels (layer_norm_kernel.cu).

Forms: the normalised shape (None for a size that is known at run time only), the rank of the input where it counts,
whether there are a weight and a bias, and what else the op has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from fuser.function import Promotion
from fuser.graph import FusionGroup, GroupBuilder
from fuser.layout import Shape
from fuser.ops.composites import COMPOSITES, Composite, Form, only_wanted, optional_input, step
from fuser.ops.norm_steps import affine, functor, moments, normalised_dx, reduce_step, rstd_of, stored

__all__: list[str] = []


def _last_dims(sizes: Sequence[Any]) -> range:
    return range(-len(sizes), 0)


# ATen's moments of rows that it reads in vectors (cuWelfordCombine, cuWelfordOnlineSum). It names first what comes
# second: a compiler contracts the first product of a sum.
_MERGE = """void merge(T ma, T sa, T na, T mb, T sb, T nb, T& m, T& s, T& n) {
  const T delta = ma - mb;
  n = na + nb;
  m = s = T(0);
  if (n > T(0)) {
    const T coef = T(1) / n, share_b = nb * coef, share_a = na * coef;
    m = share_b * mb + share_a * ma;
    s = sb + sa + delta * delta * nb * share_a;
  }
}"""
_NEXT = """void next(T ma, T sa, T count, T x, T& m, T& s, T& n) {
  const T delta = x - ma;
  n = count + T(1);
  m = ma + delta * (T(1) / n);
  s = sa + delta * (x - m);
}"""


def _is_vectorized(sizes: Sequence[Any]) -> bool:
    # Whether ATen reads rows in vectors, as far as their length says; of one that is not known it is assumed.
    return None in sizes or prod(sizes) % 4 == 0


def _check_normalised(form: Form, shapes: Mapping[str, Shape]) -> str:
    sizes, own = form[0], shapes["input"]
    given = own[len(own) - len(sizes) :]
    fits = len(own) >= len(sizes) > 0 and all(size in (None, actual) for size, actual in zip(sizes, given, strict=True))
    if not fits:
        wanted = ", ".join(["*", *map(str, sizes)])
        return f"Given normalized_shape={list(sizes)}, expected input with shape [{wanted}], but got {list(own)}"
    for name in ("weight", "bias"):
        if name in shapes and shapes[name] != given:
            return f"Expected {name} to be of same shape as normalized_shape, but got {list(shapes[name])}"
    for name in ("mean", "rstd"):
        if name in shapes and prod(shapes[name]) != prod(own[: len(own) - len(sizes)]):
            return f"{name} of shape {list(shapes[name])} for input of shape {list(own)}"
    if "grad_out" in shapes and shapes["grad_out"] != own:
        return f"grad_out of shape {list(shapes['grad_out'])} for input of shape {list(own)}"
    return ""


def _layer_norm_steps(form: Form, is_ordered: bool) -> FusionGroup:
    sizes, has_weight, has_bias, dtype, is_alone = form
    builder = GroupBuilder()
    x = builder.add_input("input")
    further = [builder.add_input(name) for name in ["weight"] * has_weight + ["bias"] * has_bias]
    eps = builder.add_input("eps", is_scalar=True)
    order = "layer_norm" if is_ordered else ""
    kernel = (_MERGE, _NEXT) if _is_vectorized(sizes) else ()
    mean, var, _ = moments(builder, x, _last_dims(sizes), order, kernel)
    rstd = rstd_of(builder, var, eps)
    normalise = affine(
        "layer_norm", "rstd * (x - mean)", "T x, T mean, T rstd", has_weight, has_bias, is_contiguous=True
    )
    (out,) = builder.apply(normalise, [x, mean, rstd, *further])
    return builder.build([out] if is_alone else [out, *stored(builder, [mean, rstd], dtype)])


def _sizes_of(form: Form, tensor: torch.Tensor) -> list[int]:
    return list(tensor.shape[tensor.dim() - len(form[0]) :])


def _eager_layer_norm(form: Form, input: Any, weight: Any = None, bias: Any = None, *, eps: Any) -> Any:  # noqa: A002
    function: Any = torch.nn.functional.layer_norm if form[-1] else torch.native_layer_norm
    return function(input, _sizes_of(form, input), weight, bias, eps)


COMPOSITES["native_layer_norm"] = Composite(
    "native_layer_norm", _layer_norm_steps, _eager_layer_norm, _check_normalised
)


def _gradient_steps(form: Form, is_ordered: bool) -> FusionGroup:
    # Of layer_norm, and of rms_norm, which has no mean.
    sizes, rank, has_weight, has_bias, has_mean, mask = form
    builder = GroupBuilder()
    grad, x = builder.add_input("grad_out"), builder.add_input("input")
    mean = optional_input(builder, "mean", has_mean)
    rstd = builder.add_input("rstd")
    weight = optional_input(builder, "weight", has_weight)
    if has_bias:
        builder.add_input("bias")
    taken = "T dy, T x" + ", T mean" * has_mean + ", T rstd"
    own = [grad, x, *mean, rstd]
    statistics = ("mean", "rstd")[1 - has_mean :]
    centred = "(x - mean)" if has_mean else "x"
    order = ("layer_norm_dx" if has_mean else "rms_norm_dx") if is_ordered else ""
    made: list[int] = []
    if mask[0]:
        made.append(
            normalised_dx(builder, [x, grad, *mean, rstd, *weight], _last_dims(sizes), order, has_mean=has_mean)
        )
    outer = range(rank - len(sizes))
    for is_wanted, name, value, inputs in (
        (mask[1], "dgamma", f"dy * {centred} * rstd", own),
        (len(mask) > 2 and mask[2], "dbeta", "dy", own[:1]),
    ):
        if is_wanted:
            given = taken if len(inputs) > 1 else "T dy"
            mapped = functor(f"T {name}({given}) {{ return {value}; }}")
            add = functor(f"T add_{name}(T total, {given}) {{ return total + {value}; }}") if is_ordered else None
            rest = tuple(statistics if len(inputs) > 1 else ())
            column = reduce_step(
                mapped, outer, order="gamma_beta", accumulate=add, keepdim=False, is_wide=False, unpromoted=rest
            )
            made += builder.apply(column, inputs)
    return builder.build(made)


def _eager_layer_norm_backward(
    form: Form,
    grad_out: Any,
    input: Any,  # noqa: A002
    mean: Any,
    rstd: Any,
    weight: Any = None,
    bias: Any = None,
) -> Any:
    made = torch.ops.aten.native_layer_norm_backward.default(
        grad_out, input, _sizes_of(form, input), mean, rstd, weight, bias, list(form[-1])
    )
    return only_wanted(made, form[-1])


COMPOSITES["native_layer_norm_backward"] = Composite(
    "native_layer_norm_backward",
    _gradient_steps,
    _eager_layer_norm_backward,
    _check_normalised,
    frozenset({"mean", "rstd"}),
)


def _rms_norm_steps(form: Form, is_ordered: bool) -> FusionGroup:
    sizes, has_weight, has_eps, is_alone = form
    builder = GroupBuilder()
    x = builder.add_input("input")
    weight = optional_input(builder, "weight", has_weight)
    eps = optional_input(builder, "eps", has_eps, is_scalar=True)
    # Without one, that of the accumulate type.
    own = "T(eps)" if has_eps else "(sizeof(T) == 8 ? T(2.220446049250313e-16) : T(1.1920928955078125e-07))"
    taken = ", double eps" * has_eps
    if is_ordered and not _is_vectorized(sizes):
        # From the moments, as ATen has it.
        mean, var, _ = moments(builder, x, _last_dims(sizes), "rms_norm")
        text = f"T rms_rstd(T var, T mean{taken}) {{ return rsqrt(var + mean * mean + {own}); }}"
        finish = step(text, scalars=("eps",) * has_eps, promotion=Promotion.DEFAULT_WIDE)
        (rstd,) = builder.apply(finish, [var, mean], eps)
    else:
        squares = reduce_step(
            functor("T square_of(T x) { return x * x; }"),
            _last_dims(sizes),
            functor(
                f"T rms_rstd(T total, int64_t count{taken}) {{ return rsqrt(total / T(count) + {own}); }}",
                ("eps",) * has_eps,
            ),
            order="rms_norm" if is_ordered else "",
            accumulate=functor("T add_square(T total, T x) { return total + x * x; }") if is_ordered else None,
        )
        (rstd,) = builder.apply(squares, [x], eps)
    # Of channels last torch.rms_norm, unlike its kernel, makes the same.
    lies = {"keeps_format" if is_alone else "is_contiguous": True}
    normalise = affine("rms_norm", "rstd * x", "T x, T rstd", has_weight, False, **lies)
    (out,) = builder.apply(normalise, [x, rstd, *weight])
    return builder.build([out] if is_alone else [out, rstd])


def _eager_rms_norm(form: Form, input: Any, weight: Any = None, *, eps: Any = None) -> Any:  # noqa: A002
    function: Any = torch.nn.functional.rms_norm if form[-1] else torch.ops.aten._fused_rms_norm.default
    return function(input, _sizes_of(form, input), weight, eps)


def _eager_rms_norm_backward(form: Form, grad_out: Any, input: Any, rstd: Any, weight: Any = None) -> Any:  # noqa: A002
    made = torch.ops.aten._fused_rms_norm_backward.default(
        grad_out, input, _sizes_of(form, input), rstd, weight, list(form[-1])
    )
    return only_wanted(made, form[-1])


COMPOSITES["_fused_rms_norm"] = Composite("_fused_rms_norm", _rms_norm_steps, _eager_rms_norm, _check_normalised)
COMPOSITES["_fused_rms_norm_backward"] = Composite(
    "_fused_rms_norm_backward",
    _gradient_steps,
    _eager_rms_norm_backward,
    _check_normalised,
    frozenset({"rstd"}),
)
