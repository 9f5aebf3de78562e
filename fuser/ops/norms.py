"""torch's norms and their backward ops, in the steps of ATen's CUDA kernels (layer_norm_kernel.cu, Normalization.cuh).

Statistics are of the accumulate type, as there. In torch's order they come from one pass (Welford); else from two, the
mean and then the squares of what differs from it, which is as exact and takes fewer operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from fuser.cxx.functor import Functor, parse_functor
from fuser.function import Function, Promotion, Reduction, View
from fuser.graph import FusionGroup, GroupBuilder
from fuser.layout import Shape
from fuser.ops.composites import COMPOSITES, Composite, Form, step, view
from fuser.ops.table import cast_function

__all__ = ["batch_norm_dims", "reduce_step"]


def _functor(text: str, scalars: tuple[str, ...] = (), num_outputs: int = 1) -> Functor:
    return parse_functor(f"template <typename T> {text}", scalars, num_outputs)


_ADD = "T add(T a, T b) { return a + b; }"
_ADD_TWO = "void add_two(T a1, T a2, T b1, T b2, T& s1, T& s2) { s1 = a1 + b1; s2 = a2 + b2; }"


def reduce_step(
    mapped: Functor,
    dims: Sequence[int],
    finish: Functor | None = None,
    *,
    order: str = "",
    combine: Functor | None = None,
    keepdim: bool = True,
    is_wide: bool = True,
    unpromoted: tuple[str, ...] = (),
) -> Function:
    """Return the step that adds up what ``mapped`` makes (one or two sums), with results of the accumulate type."""
    count = mapped.num_outputs
    combine = combine or (_functor(_ADD) if count == 1 else _functor(_ADD_TWO, num_outputs=2))
    counts = finish is not None and any(item.name == "count" for item in finish.tensors)
    reduction = Reduction(combine, (0,) * count, finish, tuple(dims), keepdim, counts, order)
    promotion = Promotion.DEFAULT_WIDE if is_wide else Promotion.DEFAULT
    return Function(mapped, promotion=promotion, unpromoted=unpromoted, reduction=reduction)


# --- statistics -------------------------------------------------------------------------------------------------
# A part without elements leaves the other as it is: ATen's own formula would round its mean again.
_MERGE = """void merge(T ma, T sa, T na, T mb, T sb, T nb, T& m, T& s, T& n) {
  n = na + nb;
  if (nb == T(0)) { m = ma; s = sa; }
  else if (na == T(0)) { m = mb; s = sb; }
  else {
    const T delta = mb - ma, coef = T(1) / n, share_a = na * coef, share_b = nb * coef;
    m = share_a * ma + share_b * mb;
    s = sa + sb + delta * delta * na * share_b;
  }
}"""
_ONE = "void one(T x, T& m, T& s, T& n) { m = x; s = T(0); n = T(1); }"


def moments(builder: GroupBuilder, x: int, dims: Sequence[int], order: str) -> tuple[int, int, int]:
    """Add the steps that make mean, biased variance and number of elements along some dimensions, which are kept.

    Args:
        builder: writes the steps.
        x: what they are of.
        dims: the dimensions.
        order: the name of torch's order; "" for the canonical one.
    """
    if order:
        text = "void moments(T m, T s, T n, T& mean, T& var, T& count) { mean = m; var = s / n; count = n; }"
        finish, merge = _functor(text, num_outputs=3), _functor(_MERGE, num_outputs=3)
        mapped = _functor(_ONE, num_outputs=3)
        mean, var, count = builder.apply(reduce_step(mapped, dims, finish, order=order, combine=merge), [x])
        return mean, var, count
    same = _functor("T value(T x) { return x; }")
    text = "void mean_of(T total, int64_t count, T& mean, T& n) { mean = total / T(count); n = T(count); }"
    mean, count = builder.apply(reduce_step(same, dims, _functor(text, num_outputs=2)), [x])
    squares = _functor("T square_of(T x, T mean) { return (x - mean) * (x - mean); }")
    finish = _functor("T var_of(T total, int64_t count) { return total / T(count); }")
    (var,) = builder.apply(reduce_step(squares, dims, finish), [x, mean])
    return mean, var, count


def _stored(builder: GroupBuilder, values: Sequence[int], dtype: str) -> list[int]:
    # On the CPU torch keeps statistics of half and bfloat16 in that dtype.
    return [builder.apply(cast_function(getattr(torch, dtype)), [value])[0] for value in values] if dtype else [*values]


def _rstd(builder: GroupBuilder, var: int, eps: int) -> int:
    text = "T rstd_of(T var, double eps) { return rsqrt(var + T(eps)); }"
    return builder.apply(step(text, scalars=("eps",), promotion=Promotion.DEFAULT_WIDE), [var], [eps])[0]


def _affine(name: str, value: str, taken: str, has_weight: bool, has_bias: bool, **rest: Any) -> Function:
    # What is normalised, times weight, plus bias.
    parameters = taken + ", T weight" * has_weight + ", T bias" * has_bias
    value = f"weight * ({value})" if has_weight else value
    unpromoted = tuple(word for word in ("mean", "rstd", "weight", "bias") if f"T {word}" in parameters)
    text = f"T {name}({parameters}) {{ return {value}{' + bias' * has_bias}; }}"
    return step(text, unpromoted=unpromoted, **rest)


# --- layer_norm and rms_norm ------------------------------------------------------------------------------------
# Forms: the normalised shape (None for a size that is known at run time only), the rank of the input, whether there are
# a weight and a bias, and what else the op has.
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
    affine = [builder.add_input(name) for name, is_there in (("weight", has_weight), ("bias", has_bias)) if is_there]
    eps = builder.add_input("eps", is_scalar=True)
    mean, var, _ = moments(builder, x, _last_dims(sizes), "layer_norm" if is_ordered else "")
    rstd = _rstd(builder, var, eps)
    normalise = _affine(
        "layer_norm", "rstd * (x - mean)", "T x, T mean, T rstd", has_weight, has_bias, is_contiguous=True
    )
    (out,) = builder.apply(normalise, [x, mean, rstd, *affine])
    return builder.build([out] if is_alone else [out, *_stored(builder, [mean, rstd], dtype)])


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
    mean = [builder.add_input("mean")] * has_mean
    rstd = builder.add_input("rstd")
    weight = [builder.add_input("weight")] * has_weight
    if has_bias:
        builder.add_input("bias")
    taken = "T dy, T x" + ", T mean" * has_mean + ", T rstd"
    own = [grad, x, *mean, rstd]
    statistics = ("mean", "rstd")[1 - has_mean :]
    centred = "(x - mean)" if has_mean else "x"
    loss = "dy * weight" if has_weight else "dy"
    orders = ("layer_norm_dx", "gamma_beta") if has_mean else ("rms_norm_dx", "rms_gamma")
    orders = orders if is_ordered else ("", "")
    made: list[int] = []
    if mask[0]:
        taken_too = taken + ", T weight" * has_weight
        two = f"void sums({taken_too}, T& s1, T& s2) {{ s1 = {loss}; s2 = {loss} * {centred} * rstd; }}"
        finish = """void totals(T s1, T s2, int64_t count, T& first, T& second, T& n) {
          first = s1; second = s2; n = T(count);
        }"""
        sums = reduce_step(
            _functor(two, num_outputs=2), _last_dims(sizes), _functor(finish, num_outputs=3), order=orders[0]
        )
        first, second, count = builder.apply(sums, [*own, *weight])
        text = f"""T norm_dx({taken_too}, T first, T second, T n) {{
          T f = {"n * weight * dy" if has_weight else "n * dy"};
          f -= {centred} * rstd * second;
          {"f -= first;" if has_mean else ""}
          return f * ((T(1) / n) * rstd);
        }}"""
        unpromoted = (*statistics, "first", "second", "n")
        dx = step(text, unpromoted=unpromoted, is_contiguous=True)
        made += builder.apply(dx, [*own, *weight, first, second, count])
    outer = range(rank - len(sizes))
    for is_wanted, name, value, inputs in (
        (mask[1], "dgamma", f"dy * {centred} * rstd", own),
        (len(mask) > 2 and mask[2], "dbeta", "dy", own[:1]),
    ):
        if is_wanted:
            mapped = _functor(f"T {name}({taken if len(inputs) > 1 else 'T dy'}) {{ return {value}; }}")
            rest = statistics if len(inputs) > 1 else ()
            column = reduce_step(mapped, outer, order=orders[1], keepdim=False, is_wide=False, unpromoted=tuple(rest))
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
    return [item for item, is_wanted in zip(made, form[-1], strict=True) if is_wanted]


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
    weight = [builder.add_input("weight")] * has_weight
    eps = [builder.add_input("eps", is_scalar=True)] * has_eps
    # Without one, that of the accumulate type.
    own = "T(eps)" if has_eps else "(sizeof(T) == 8 ? T(2.220446049250313e-16) : T(1.1920928955078125e-07))"
    finish = (
        f"T rms_rstd(T total, int64_t count{', double eps' * has_eps}) {{ return rsqrt(total / T(count) + {own}); }}"
    )
    squares = reduce_step(
        _functor("T square_of(T x) { return x * x; }"),
        _last_dims(sizes),
        _functor(finish, ("eps",) * has_eps),
        order="rms_norm" if is_ordered else "",
    )
    (rstd,) = builder.apply(squares, [x], eps)
    normalise = _affine("rms_norm", "rstd * x", "T x, T rstd", has_weight, False, is_contiguous=True)
    (out,) = builder.apply(normalise, [x, rstd, *weight])
    return builder.build([out] if is_alone else [out, rstd])


def _eager_rms_norm(form: Form, input: Any, weight: Any = None, *, eps: Any = None) -> Any:  # noqa: A002
    function: Any = torch.nn.functional.rms_norm if form[-1] else torch.ops.aten._fused_rms_norm.default
    return function(input, _sizes_of(form, input), weight, eps)


def _eager_rms_norm_backward(form: Form, grad_out: Any, input: Any, rstd: Any, weight: Any = None) -> Any:  # noqa: A002
    made = torch.ops.aten._fused_rms_norm_backward.default(
        grad_out, input, _sizes_of(form, input), rstd, weight, list(form[-1])
    )
    return [item for item, is_wanted in zip(made, form[-1], strict=True) if is_wanted]


COMPOSITES["_fused_rms_norm"] = Composite("_fused_rms_norm", _rms_norm_steps, _eager_rms_norm, _check_normalised)
COMPOSITES["_fused_rms_norm_backward"] = Composite(
    "_fused_rms_norm_backward",
    _gradient_steps,
    _eager_rms_norm_backward,
    _check_normalised,
    frozenset({"rstd"}),
)


# --- batch_norm -------------------------------------------------------------------------------------------------
def batch_norm_dims(rank: int) -> tuple[int, ...]:
    """Return the dimensions of an input that are reduced: all but the channels."""
    return (0, *range(2, rank))


def _batch_norm_steps(form: Form, is_ordered: bool) -> FusionGroup:
    # The rank of the input, whether there are weight and bias, whether its own statistics are used, and whether the
    # output is all that is asked for. Statistics have the shape of the channels.
    rank, has_weight, has_bias, is_training, is_alone = form
    builder = GroupBuilder()
    dims = batch_norm_dims(rank)
    channels = View(insert=dims)
    x = builder.add_input("input")
    names = ["weight"] * has_weight + ["bias"] * has_bias + ["running_mean", "running_var"]
    given = {name: builder.apply(view(channels), [builder.add_input(name)])[0] for name in names}
    momentum = [builder.add_input("momentum", is_scalar=True)] * is_training
    eps = builder.add_input("eps", is_scalar=True)
    further: list[int] = []
    if is_training:
        mean, var, count = moments(builder, x, dims, "batch_norm" if is_ordered else "")
        rstd = _rstd(builder, var, eps)
        blend = "T blend(T old, T now, double momentum) { return T(momentum) * now + (T(1) - T(momentum)) * old; }"
        unbiased = "T unbiased(T var, T n) { return var * (n / (n - T(1))); }"
        (now,) = builder.apply(step(unbiased), [var, count])
        blended = [
            builder.apply(step(blend, scalars=("momentum",), unpromoted=("now",)), [old, value], momentum)[0]
            for old, value in ((given["running_mean"], mean), (given["running_var"], now))
        ]
        further = [mean, rstd, *blended]
    else:
        mean = given["running_mean"]
        rstd = _rstd(builder, given["running_var"], eps)
    normalise = _affine("batch_norm", "(x - mean) * rstd", "T x, T mean, T rstd", has_weight, has_bias)
    (out,) = builder.apply(normalise, [x, mean, rstd, *(given[name] for name in ("weight", "bias") if name in given)])
    if is_alone:
        return builder.build([out])
    return builder.build([out, *(builder.apply(view(channels.inverse), [value])[0] for value in further)])


def _check_channels(form: Form, shapes: Mapping[str, Shape]) -> str:
    own = shapes["input"]
    if len(own) != form[0]:
        return f"expected an input of {form[0]} dimensions, but got {list(own)}"
    for name, shape in shapes.items():
        if name != "input" and shape != own[1:2]:
            return f"{name} should contain {own[1]} elements, but has the shape {list(shape)}"
    if form[3] and prod(own) == own[1]:
        return f"Expected more than 1 value per channel when training, got input size {list(own)}"
    return ""


def _eager_batch_norm(
    form: Form,
    input: Any,  # noqa: A002
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    eps: Any,
    momentum: Any = 0.0,
) -> Any:
    given = (input, weight, bias, running_mean, running_var)
    if form[3]:
        return torch.ops.aten._native_batch_norm_legit_functional.default(*given, True, momentum, eps)
    return torch.ops.aten._native_batch_norm_legit_no_training.default(*given, momentum, eps)[0]


COMPOSITES["batch_norm"] = Composite(
    "batch_norm",
    _batch_norm_steps,
    _eager_batch_norm,
    _check_channels,
    frozenset({"weight", "bias", "running_mean", "running_var"}),
)
