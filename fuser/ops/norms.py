"""layer_norm and rms_norm with their backward ops, in the steps of ATen's CUDA kernels (layer_norm_kernel.cu).

Forms: the normalised shape (None for a size that is known at run time only), the rank of the input where it counts,
whether there are a weight and a bias, and what else the op has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from fuser.graph import FusionGroup, GroupBuilder
from fuser.layout import Shape
from fuser.ops.composites import COMPOSITES, Composite, Form, only_wanted, optional_input
from fuser.ops.norm_steps import affine, functor, moments, normalised_dx, reduce_step, rstd_of, stored

__all__: list[str] = []


def _last_dims(sizes: Sequence[Any]) -> range:
    return range(-len(sizes), 0)


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
    mean, var, _ = moments(builder, x, _last_dims(sizes), "layer_norm" if is_ordered else "")
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
            mapped = functor(f"T {name}({taken if len(inputs) > 1 else 'T dy'}) {{ return {value}; }}")
            rest = statistics if len(inputs) > 1 else ()
            order = "gamma_beta" if has_mean else "rms_gamma"
            column = reduce_step(mapped, outer, order=order, keepdim=False, is_wide=False, unpromoted=tuple(rest))
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
    finish = (
        f"T rms_rstd(T total, int64_t count{', double eps' * has_eps}) {{ return rsqrt(total / T(count) + {own}); }}"
    )
    squares = reduce_step(
        functor("T square_of(T x) { return x * x; }"),
        _last_dims(sizes),
        functor(finish, ("eps",) * has_eps),
        order="rms_norm" if is_ordered else "",
        accumulate=functor("T add_square(T total, T x) { return total + x * x; }") if is_ordered else None,
    )
    (rstd,) = builder.apply(squares, [x], eps)
    normalise = affine("rms_norm", "rstd * x", "T x, T rstd", has_weight, False, is_contiguous=True)
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
