"""batch_norm and group_norm with their backward ops, in the steps of ATen's CUDA kernels (Normalization.cuh).

Tensors of one element a channel are looked at in the shape of the input, and groups of channels as a dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from fuser.function import Function, Promotion, View
from fuser.graph import FusionGroup, GroupBuilder
from fuser.layout import Shape, Strides, is_contiguous
from fuser.ops.composites import (
    COMPOSITES,
    Composite,
    Form,
    composite_function,
    only_wanted,
    optional_input,
    step,
    view,
)
from fuser.ops.norm_steps import affine, functor, moments, normalised_dx, reduce_step, rstd_of, stored
from fuser.ops.reductions import REDUCTIONS

__all__ = ["group_norm_elemt"]

_VERSION = tuple(int(number) for number in torch.__version__.split(".")[:2])


# --- batch_norm -------------------------------------------------------------------------------------------------
# Forms: the rank of the input, whether there are a weight and a bias, whether its own statistics are used, and how many
# results are asked for (with those of the running statistics 5, without them 3; the first alone), or which. In torch's
# order, which of ATen's kernels: for channels side by side, for planes, or for what lies otherwise; and the dtype.
_CHANNELS, _PLANES, _OTHER = "channels", "planes", "other"


def _kernel(dtype: torch.dtype, shape: Shape, strides: Strides) -> Form:
    # As ATen chooses.
    if is_contiguous(shape, strides) and prod(shape) < 1 << 31:
        return (_CHANNELS if strides[1] == 1 else _PLANES), dtype
    return (_CHANNELS if _has_channels_last(shape, strides) else _OTHER), dtype


def _backward_kernel(dtype: torch.dtype, shape: Shape, strides: Strides) -> Form:
    # Where an input lies both ways, it chooses otherwise.
    return (_CHANNELS, dtype) if _has_channels_last(shape, strides) else _kernel(dtype, shape, strides)


def _is_short(shape: Shape, strides: Strides) -> bool:
    return _has_channels_last(shape, strides) or is_contiguous(shape, strides)


def _has_channels_last(shape: Shape, strides: Strides) -> bool:
    return len(shape) == 4 and is_contiguous(shape, strides, (0, 2, 3, 1))


def _all_but_channels(rank: int) -> tuple[int, ...]:
    return (0, *range(2, rank))


def _add_channels(builder: GroupBuilder, rank: int, names: Sequence[str]) -> dict[str, int]:
    # Inputs of one element a channel, in the shape of the op's input.
    looked_at = view(View(1, insert=_all_but_channels(rank)))
    return {name: builder.apply(looked_at, [builder.add_input(name)])[0] for name in names}


# Moments as ATen's kernels have them, with what their compiler contracts, as is to be read in the machine code. Of
# channels side by side a thread has several, which it merges otherwise than those of threads are merged: what was
# merged counts downwards.
_CHANNEL_MERGE = """void merge(T ma, T sa, T na, T mb, T sb, T nb, T& m, T& s, T& n) {
  const T own = abs(na), other = abs(nb), all = own + other, delta = ma - mb;
  const T factor = T(1) / (all > T(1) ? all : T(1));
  m = (nb < T(0) ? fma(ma, own, mb * other) : fma(mb, other, ma * own)) * factor;
  s = sa + fma(delta * delta * other * own, factor, sb);
  n = -all;
}"""
_CHANNEL_NEXT = """void next(T ma, T sa, T count, T x, T& m, T& s, T& n) {
  const T delta = x - ma;
  n = count + T(1);
  m = fma(delta, T(1) / n, ma);
  s = __fadd_rn(sa, __fmul_rn(delta, x - m));
}"""
_PLANE_MERGE = """void merge(T ma, T sa, T na, T mb, T sb, T nb, T& m, T& s, T& n) {
  n = na + nb;
  const T factor = T(1) / (n > T(1) ? n : T(1)), delta = ma - mb;
  m = fma(na, ma, mb * nb) * factor;
  s = sa + fma(delta * delta * na * nb, factor, sb);
}"""
_PLANE_NEXT = """void next(T ma, T sa, T count, T x, T& m, T& s, T& n) {
  const T delta = x - ma;
  n = count + T(1);
  m = ma + fuser_share_of(delta, n);
  s = fma(delta, x - m, sa);
}"""
_KERNELS = {
    _CHANNELS: ("batch_norm", (_CHANNEL_MERGE, _CHANNEL_NEXT)),
    _PLANES: ("batch_norm_planes", (_PLANE_MERGE, _PLANE_NEXT)),
}


def _batch_norm_steps(form: Form, is_ordered: bool) -> FusionGroup:
    rank, has_weight, has_bias, is_training, count, *kernel = form
    layout = kernel[0] if kernel else _CHANNELS
    is_updated = is_training and count == 5
    builder = GroupBuilder()
    dims = _all_but_channels(rank)
    x = builder.add_input("input")
    affine_names = ["weight"] * has_weight + ["bias"] * has_bias
    running = ["running_mean", "running_var"] if is_updated or not is_training else []
    given = _add_channels(builder, rank, [*affine_names, *running])
    momentum = optional_input(builder, "momentum", is_updated, is_scalar=True)
    eps = builder.add_input("eps", is_scalar=True)
    further: list[int] = []
    if is_training:
        # Of an input that lies otherwise it is another order, which is not kept.
        order, texts = _KERNELS.get(layout, ("batch_norm_others", ())) if is_ordered else ("", ())
        mean, var, elements = moments(builder, x, dims, order, texts)
        rstd = rstd_of(builder, var, eps)
        further = [mean, rstd] if count > 1 else []
        if is_updated:
            blend = (
                "T blend(T old, T now, double momentum) { return fma(now, T(momentum), (T(1) - T(momentum)) * old); }"
            )
            (now,) = builder.apply(step("T unbiased(T var, T n) { return var * (n / (n - T(1))); }"), [var, elements])
            for old, value in zip(running, (mean, now), strict=True):
                blended = step(blend, scalars=("momentum",), unpromoted=("now",))
                further += builder.apply(blended, [given[old], value], momentum)
    else:
        mean = given["running_mean"]
        rstd = rstd_of(builder, given["running_var"], eps)
    out = _normalised(builder, layout, [x, mean, rstd], {name: given[name] for name in affine_names})
    back = view(View(1, insert=dims).inverse)
    return builder.build([out, *(builder.apply(back, [value])[0] for value in further)])


def _normalised(builder: GroupBuilder, layout: str, values: Sequence[int], affine: Mapping[str, int]) -> int:
    has_weight, has_bias = "weight" in affine, "bias" in affine
    scaled = "weight * (x - mean) * rstd" if has_weight else "(x - mean) * rstd"
    if has_weight and layout == _OTHER:
        scaled = "(x - mean) * rstd * weight"
    taken = "T x, T mean, T rstd" + ", T weight" * has_weight + ", T bias" * has_bias
    text = f"T batch_norm({taken}) {{ return {scaled}{' + bias' * has_bias}; }}"
    return builder.apply(step(text, unpromoted=("mean", "rstd", *affine)), [*values, *affine.values()])[0]


def _batch_norm_elemt_steps(form: Form, is_ordered: bool) -> FusionGroup:  # noqa: ARG001 - as all steps
    # Forms: the rank of the input, and whether there are a weight and a bias.
    rank, has_weight, has_bias, *kernel = form
    builder = GroupBuilder()
    x, names = builder.add_input("input"), ["weight"] * has_weight + ["bias"] * has_bias
    given = _add_channels(builder, rank, [*names, "mean", "rstd"])
    values, affine = [x, given["mean"], given["rstd"]], {name: given[name] for name in names}
    return builder.build([_normalised(builder, kernel[0] if kernel else _CHANNELS, values, affine)])


def _batch_norm_backward_steps(form: Form, is_ordered: bool) -> FusionGroup:
    rank, has_weight, is_training, mask, *kernel = form
    layout = kernel[0] if kernel else _CHANNELS
    if layout == _PLANES:
        return _plane_backward_steps(form)
    builder = GroupBuilder()
    dims = _all_but_channels(rank)
    grad, x = builder.add_input("grad_out"), builder.add_input("input")
    given = _add_channels(builder, rank, ["weight"] * has_weight + ["mean", "rstd" if is_training else "var"])
    weight = [given[name] for name in ["weight"] * has_weight]
    mean = given["mean"]
    rstd = given["rstd"] if is_training else rstd_of(builder, given["var"], builder.add_input("eps", is_scalar=True))
    sums = "void sums(T dy, T x, T mean, T& s1, T& s2) { s1 = dy; s2 = dy * (x - mean); }"
    totals = """void totals(T s1, T s2, int64_t count, T& first, T& second, T& n) {
      first = s1; second = s2; n = T(count);
    }"""
    order, add = "", None
    if is_ordered:
        text = "void add_sums(T a, T b, T dy, T x, T mean, T& s1, T& s2) { s1 = a + dy; s2 = b + dy * (x - mean); }"
        order = "batch_norm_sums" if layout == _CHANNELS else "batch_norm_other_sums"
        add = functor(text, num_outputs=2)
    both = reduce_step(functor(sums, num_outputs=2), dims, functor(totals, num_outputs=3), order=order, accumulate=add)
    first, second, count = builder.apply(both, [grad, x, mean])
    made: list[int] = []
    if mask[0] and is_training:
        taken = "T second, T n, T rstd" + ", T weight" * has_weight
        # Once per channel, as in ATen, but for the product that its compiler contracts.
        text = f"""void factors({taken}, T& share, T& slope, T& scale) {{
          share = T(1) / n; slope = rstd * rstd * second * share; scale = {"weight * " * has_weight}rstd;
        }}"""
        wide = step(text, num_outputs=3, promotion=Promotion.DEFAULT_WIDE)
        factors = builder.apply(wide, [second, count, rstd, *weight])
        text = """T norm_dx(T x, T dy, T mean, T first, T share, T slope, T scale) {
          return (dy - first * share - (x - mean) * slope) * scale;
        }"""
        dx = step(text, unpromoted=("mean", "first", "share", "slope", "scale"))
        made += builder.apply(dx, [x, grad, mean, first, *factors])
    elif mask[0]:
        taken, scaled = "T dy, T rstd" + ", T weight" * has_weight, "dy * weight * rstd" if has_weight else "dy * rstd"
        dx = step(f"T norm_dx({taken}) {{ return {scaled}; }}", unpromoted=("rstd", "weight")[: 1 + has_weight])
        made += builder.apply(dx, [grad, rstd, *weight])
    return builder.build(made + _channel_gradients(builder, dims, mask, weight, (first, second, rstd)))


def _channel_gradients(
    builder: GroupBuilder,
    dims: Sequence[int],
    mask: Sequence[bool],
    weight: Sequence[int],
    values: tuple[int, int, int],
) -> list[int]:
    # Those of weight and bias, in the dtype of the weight.
    first, second, rstd = values
    dgamma = step("T dgamma(T weight, T total, T rstd) { return total * rstd; }", unpromoted=("total", "rstd"))
    dbeta = step("T dbeta(T weight, T total) { return total; }", unpromoted=("total",))
    back, made = view(View(1, insert=tuple(dims)).inverse), list[int]()
    if mask[1]:
        made += builder.apply(back, builder.apply(dgamma, [*weight, second, rstd]))
    if mask[2]:
        made += builder.apply(back, builder.apply(dbeta, [*weight, first]))
    return made


# What rounds a float to a dtype.
_ROUNDED = {
    torch.bfloat16: "__uint_as_float((unsigned int)fuser_bfloat16_bits({}) << 16)",
    torch.float16: "fuser_half_value(fuser_half_bits({}))",
}


def _plane_backward_steps(form: Form) -> FusionGroup:
    # ATen rounds what threads pass on to each other, and each product, to the dtype of the input.
    rank, has_weight, is_training, mask, _, dtype = form
    rounds = _ROUNDED.get(dtype, "{}")
    builder = GroupBuilder()
    dims = _all_but_channels(rank)
    grad, x = builder.add_input("grad_out"), builder.add_input("input")
    given = _add_channels(builder, rank, ["weight"] * has_weight + ["mean", "rstd" if is_training else "var"])
    weight, mean = [given[name] for name in ["weight"] * has_weight], given["mean"]
    if is_training:
        rstd = given["rstd"]
    else:
        text = "T rstd_of(T var, double eps) { return T(1) / sqrt(var + T(eps)); }"
        rstd_step = step(text, scalars=("eps",), promotion=Promotion.DEFAULT_WIDE)
        (rstd,) = builder.apply(rstd_step, [given["var"]], [builder.add_input("eps", is_scalar=True)])
    added = f"s2 = b + {rounds.format('dy * (x - mean)')};" if dtype in _ROUNDED else "s2 = fma(x - mean, dy, b);"
    passed = f"s1 = a + {rounds.format('c')}; s2 = b + {rounds.format('d')};"
    both = reduce_step(
        functor("void sums(T dy, T x, T mean, T& s1, T& s2) { s1 = dy; s2 = dy * (x - mean); }", num_outputs=2),
        dims,
        functor(
            """void totals(T s1, T s2, int64_t count, T& first, T& second, T& n) {
          first = s1; second = s2; n = T(count);
        }""",
            num_outputs=3,
        ),
        # Where nobody asks for the gradient of the input it is another order, which is not kept.
        order="batch_norm_plane_sums" if mask[0] else "batch_norm_other_sums",
        accumulate=functor(
            f"void add_sums(T a, T b, T dy, T x, T mean, T& s1, T& s2) {{ s1 = a + dy; {added} }}", num_outputs=2
        ),
        combine=functor(f"void both(T a, T b, T c, T d, T& s1, T& s2) {{ {passed} }}", num_outputs=2),
    )
    first, second, count = builder.apply(both, [grad, x, mean])
    made: list[int] = []
    if mask[0]:
        taken = "T first, T second, T n, T rstd" + ", T weight" * has_weight
        text = f"""void factors({taken}, T& shift, T& slope, T& scale) {{
          const T share = T(1) / n;
          shift = first * share; slope = second * share * rstd * rstd; scale = rstd{" * weight" * has_weight};
        }}"""
        wide = step(text, num_outputs=3, promotion=Promotion.DEFAULT_WIDE)
        factors = builder.apply(wide, [first, second, count, rstd, *weight])
        if is_training:
            text = """T norm_dx(T x, T dy, T mean, T shift, T slope, T scale) {
              return (fma(-slope, x - mean, dy) - shift) * scale;
            }"""
            dx = step(text, unpromoted=("mean", "shift", "slope", "scale"))
            made += builder.apply(dx, [x, grad, mean, *factors])
        else:
            dx = step("T norm_dx(T dy, T scale) { return dy * scale; }", unpromoted=("scale",))
            made += builder.apply(dx, [grad, factors[2]])
    return builder.build(made + _channel_gradients(builder, dims, mask, weight, (first, second, rstd)))


def _check_channels(form: Form, shapes: Mapping[str, Shape]) -> str:
    own = shapes["input"]
    if len(own) != form[0]:
        return f"expected an input of {form[0]} dimensions, but got {list(own)}"
    for name, shape in shapes.items():
        if name == "grad_out" and shape != own:
            return f"grad_out of shape {list(shape)} for input of shape {list(own)}"
        if name not in ("input", "grad_out") and shape != own[1:2]:
            return f"{name} should contain {own[1]} elements, but has the shape {list(shape)}"
    if len(form) == 5 and form[3] and prod(own) == own[1]:
        return f"Expected more than 1 value per channel when training, got input size {list(own)}"
    return ""


def _eager_batch_norm(
    form: Form,
    input: Any,  # noqa: A002
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    *,
    eps: Any,
    momentum: Any = 0.0,
) -> Any:
    *_, is_training, count = form
    given = (input, weight, bias, running_mean, running_var)
    if is_training and count < 5:
        made = torch.ops.aten._native_batch_norm_legit.no_stats(*given[:3], True, momentum, eps)
        return made if count == 3 else made[0]
    if is_training:
        return torch.ops.aten._native_batch_norm_legit_functional.default(*given, True, momentum, eps)
    return torch.ops.aten._native_batch_norm_legit_no_training.default(*given, momentum, eps)[0]


def _eager_batch_norm_elemt(form: Form, input: Any, mean: Any, rstd: Any, weight: Any = None, bias: Any = None) -> Any:  # noqa: A002, ARG001
    return torch.ops.aten.batch_norm_elemt.default(input, weight, bias, mean, rstd, 0.0)


def _eager_batch_norm_backward(
    form: Form,
    grad_out: Any,
    input: Any,  # noqa: A002
    mean: Any,
    rstd: Any = None,
    var: Any = None,
    weight: Any = None,
    *,
    eps: Any = 0.0,
) -> Any:
    *_, is_training, mask = form
    # Those of a batch of no elements: where its own statistics were not used there are none.
    none = mean.new_empty(0)
    saved = (None, None, mean, rstd) if is_training else (mean, var, none, none)
    made = torch.ops.aten.native_batch_norm_backward.default(
        grad_out, input, weight, *saved, is_training, eps, list(mask)
    )
    return [item for item, is_wanted in zip(made, mask, strict=True) if is_wanted]


_OF_CHANNELS = frozenset({"weight", "bias", "running_mean", "running_var", "mean", "rstd", "var"})
COMPOSITES["batch_norm"] = Composite(
    "batch_norm",
    _batch_norm_steps,
    _eager_batch_norm,
    _check_channels,
    _OF_CHANNELS,
    kernel=_kernel,
    is_short=_is_short,
)
COMPOSITES["batch_norm_elemt"] = Composite(
    "batch_norm_elemt", _batch_norm_elemt_steps, _eager_batch_norm_elemt, _check_channels, _OF_CHANNELS, kernel=_kernel
)
COMPOSITES["native_batch_norm_backward"] = Composite(
    "native_batch_norm_backward",
    _batch_norm_backward_steps,
    _eager_batch_norm_backward,
    _check_channels,
    _OF_CHANNELS,
    kernel=_backward_kernel,
    is_short=_is_short,
)


# --- group_norm -------------------------------------------------------------------------------------------------
# Forms: the rank of the input, how many groups, whether results lie row-major, whether there are a weight and a bias;
# the dtype of the statistics where that is not the accumulate type, and whether they are asked for; or which gradients
# are asked for.
class _Groups:
    """Adds tensors in the shape in which the channels are two dimensions, of groups and in a group."""

    def __init__(self, rank: int, groups: int) -> None:
        self.builder = GroupBuilder()
        self.inner = tuple(range(2, rank + 1))
        # Of the input, of weights and of statistics.
        self.full = View(rank, (1, groups))
        self.channels = View(1, (0, groups), (0, *self.inner[1:]))
        self.rows = View(2, insert=self.inner)

    def add(self, name: str, of: View) -> int:
        """Add a tensor of the op."""
        return self.builder.apply(view(of), [self.builder.add_input(name)])[0]

    def back(self, value: int, of: View) -> int:
        """Return a result in its own shape."""
        return self.builder.apply(view(of.inverse), [value])[0]


def _wide(builder: GroupBuilder, text: str, values: Sequence[int]) -> tuple[int, ...]:
    # Add a step in the accumulate type.
    return builder.apply(step(text, promotion=Promotion.DEFAULT_WIDE), values)


def _group_norm_steps(form: Form, is_ordered: bool) -> FusionGroup:
    rank, groups, _, has_weight, has_bias, dtype, are_asked = form
    shapes = _Groups(rank, groups)
    builder = shapes.builder
    x = shapes.add("input", shapes.full)
    further = [shapes.add(name, shapes.channels) for name in ["weight"] * has_weight + ["bias"] * has_bias]
    eps = builder.add_input("eps", is_scalar=True)
    # That of an input without further dimensions is another order, which is not kept.
    order = "group_norm" + "_1d" * (rank == 2) if is_ordered else ""
    mean, var, _ = moments(builder, x, shapes.inner, order, (REDUCTIONS["var"].combine, _PLANE_NEXT))
    if is_ordered and dtype:
        # ATen rounds eps to the dtype of the input, too.
        eps_of = step("T eps_of(T var, double eps) { return T(eps); }", scalars=("eps",))
        rounded = stored(builder, builder.apply(eps_of, [var], [eps]), dtype)
        (rstd,) = builder.apply(step("T rstd_of(T var, T eps) { return rsqrt(var + eps); }"), [var, *rounded])
    else:
        rstd = rstd_of(builder, var, eps)
    statistics = stored(builder, [mean, rstd], dtype)
    if is_ordered and dtype and _VERSION < (2, 13):
        # As ATen went on with them.
        mean, rstd = statistics
    out = _group_normalised(form, shapes, [x, mean, rstd, *further], is_ordered=is_ordered)
    return builder.build([out, *(shapes.back(value, shapes.rows) for value in statistics * are_asked)])


def _group_normalised(form: Form, shapes: _Groups, values: Sequence[int], *, is_ordered: bool) -> int:
    _, _, is_row_major, has_weight, has_bias, *_ = form
    builder, (x, mean, rstd, *further) = shapes.builder, values
    if is_ordered and further:
        # In steps, which are rounded: a factor of each channel, and what is added.
        scale = rstd
        if has_weight:
            (scale,) = _wide(builder, "T scale(T rstd, T weight) { return rstd * weight; }", [rstd, further[0]])
        moved = _wide(builder, "T moved(T scale, T mean) { return -scale * mean; }", [scale, mean])
        if has_bias:
            moved = _wide(builder, "T shift(T moved, T bias) { return moved + bias; }", [*moved, further[-1]])
        text = "T group_norm(T x, T scale, T shift) { return scale * x + shift; }"
        normalise, values = step(text, unpromoted=("scale", "shift"), is_contiguous=is_row_major), [x, scale, *moved]
    else:
        normalise = affine(
            "group_norm", "(x - mean) * rstd", "T x, T mean, T rstd", has_weight, has_bias, is_contiguous=is_row_major
        )
    return shapes.back(builder.apply(normalise, values)[0], shapes.full)


def _group_norm_elemt_steps(form: Form, is_ordered: bool) -> FusionGroup:
    # Forms: as those of group_norm up to the bias.
    rank, groups, _, has_weight, has_bias = form
    shapes = _Groups(rank, groups)
    values = [shapes.add("input", shapes.full), shapes.add("mean", shapes.rows), shapes.add("rstd", shapes.rows)]
    values += [shapes.add(name, shapes.channels) for name in ["weight"] * has_weight + ["bias"] * has_bias]
    return shapes.builder.build([_group_normalised(form, shapes, values, is_ordered=is_ordered)])


def group_norm_elemt(input: Any, groups: int, weight: Any, bias: Any, *, is_row_major: bool) -> Function | None:  # noqa: A002
    """Return the op that makes the results of a group norm of its statistics, which takes tensors that are there.

    They come as the input, mean, rstd, weight, bias. None: ATen does not give back the statistics that it goes on with.
    """
    if input.dtype in _ROUNDED and _VERSION >= (2, 13):
        return None
    return composite_function(
        "group_norm_elemt", (input.dim(), groups, is_row_major, weight is not None, bias is not None)
    )


def _group_norm_backward_steps(form: Form, is_ordered: bool) -> FusionGroup:
    rank, groups, is_row_major, has_weight, mask = form
    shapes = _Groups(rank, groups)
    builder = shapes.builder
    grad, x = shapes.add("grad_out", shapes.full), shapes.add("input", shapes.full)
    mean, rstd = shapes.add("mean", shapes.rows), shapes.add("rstd", shapes.rows)
    weight = [shapes.add(name, shapes.channels) for name in ["weight"] * has_weight]
    if is_ordered:
        return _ordered_group_norm_backward(form, shapes, [grad, x, mean, rstd, *weight])
    made: list[int] = []
    if mask[0]:
        taken = [x, grad, mean, rstd, *weight]
        dx = normalised_dx(builder, taken, shapes.inner, "", is_contiguous=is_row_major)
        made.append(shapes.back(dx, shapes.full))
    columns = (
        (mask[1], "T dgamma(T dy, T x, T mean, T rstd) { return dy * (x - mean) * rstd; }", [grad, x, mean, rstd]),
        (mask[2], "T dbeta(T dy) { return dy; }", [grad]),
    )
    for is_wanted, text, taken in columns:
        if is_wanted:
            unpromoted = ("mean", "rstd") if len(taken) > 1 else ()
            dims = (0, *shapes.inner[1:])
            sums = reduce_step(functor(text), dims, is_wide=False, unpromoted=unpromoted)
            made.append(shapes.back(builder.apply(sums, taken)[0], shapes.channels))
    return builder.build(made)


def _ordered_group_norm_backward(form: Form, shapes: _Groups, values: Sequence[int]) -> FusionGroup:
    # As ATen has it: sums of each channel, of which those of groups, and of the batch, are made.
    rank, _, is_row_major, has_weight, mask = form
    builder, (grad, x, mean, rstd, *weight) = shapes.builder, values
    # That of an input without further dimensions is another order, which is not kept.
    order = "group_norm_sums" + "_1d" * (rank == 2)
    sums = reduce_step(
        functor("void sums(T dy, T x, T& ds, T& db) { ds = dy * x; db = dy; }", num_outputs=2),
        shapes.inner[1:],
        functor(
            "void totals(T a, T b, int64_t count, T& ds, T& db, T& n) { ds = a; db = b; n = T(count); }", num_outputs=3
        ),
        order=order,
        accumulate=functor(
            "void add_sums(T a, T b, T dy, T x, T& ds, T& db) { ds = fma(dy, x, a); db = b + dy; }", num_outputs=2
        ),
    )
    ds, db, count = builder.apply(sums, [grad, x])
    made: list[int] = []
    if mask[0]:
        given, by = "T ds, T db, T n" + ", T weight" * has_weight, " * weight" * has_weight
        added = "s = fma(ds, weight, s1); b = fma(db, weight, s2);" if has_weight else "s = s1 + ds; b = s2 + db;"
        of_group = reduce_step(
            functor(f"void of({given}, T& s, T& b, T& c) {{ s = ds{by}; b = db{by}; c = n; }}", num_outputs=3),
            (2,),
            order=order,
            combine=functor(
                "void both(T s, T b, T c, T s2, T b2, T c2, T& x, T& y, T& z) { x = s + s2; y = b + b2; z = c + c2; }",
                num_outputs=3,
            ),
            accumulate=functor(
                f"void add_of(T s1, T s2, T s3, {given}, T& s, T& b, T& c) {{ {added} c = s3 + n; }}", num_outputs=3
            ),
        )
        totals = builder.apply(of_group, [ds, db, count, *weight])
        text = """void factors(T sum1, T sum2, T n, T mean, T rstd, T& c2, T& c3) {
          const T s = T(1) / n;
          const T x = fma(sum2, mean, -sum1) * rstd * rstd * rstd * s;
          c2 = x;
          c3 = fma(-x, mean, -(sum2 * rstd * s));
        }"""
        factors = builder.apply(step(text, num_outputs=2), [*totals, mean, rstd])
        if has_weight:
            (scale,) = _wide(builder, "T scale(T rstd, T weight) { return rstd * weight; }", [rstd, *weight])
        else:
            scale = rstd
        text = "T norm_dx(T x, T dy, T c1, T c2, T c3) { return fma(c1, dy, c2 * x) + c3; }"
        dx = step(text, unpromoted=("c1", "c2", "c3"), is_contiguous=is_row_major)
        made.append(shapes.back(builder.apply(dx, [x, grad, scale, *factors])[0], shapes.full))
    for is_wanted, text, added, taken in (
        (
            mask[1], "T dgamma(T ds, T db, T mean, T rstd) { return (ds - db * mean) * rstd; }",
            "T add(T a, T ds, T db, T mean, T rstd) { return fma(fma(-db, mean, ds), rstd, a); }", [ds, db, mean, rstd],
        ),
        (mask[2], "T dbeta(T db) { return db; }", "T add(T a, T db) { return a + db; }", [db]),
    ):  # fmt: skip
        if is_wanted:
            unpromoted = ("mean", "rstd") if len(taken) > 1 else ()
            total = reduce_step(
                functor(text), (0,), order="group_norm_batch", accumulate=functor(added), unpromoted=unpromoted
            )
            rounded = step("T rounded(T weight, T total) { return total; }", unpromoted=("total",))
            values = builder.apply(rounded, [*weight, *builder.apply(total, taken)])
            made.append(shapes.back(values[0], shapes.channels))
    return builder.build(made)


def _check_groups(form: Form, shapes: Mapping[str, Shape]) -> str:
    own = shapes["input"]
    if len(own) != form[0] or own[1] % form[1]:
        return f"expected an input of {form[0]} dimensions with channels in {form[1]} groups, but got {list(own)}"
    wanted = {"grad_out": own, "mean": (own[0], form[1]), "rstd": (own[0], form[1])}
    for name, shape in shapes.items():
        if name != "input" and shape != wanted.get(name, own[1:2]):
            return f"{name} of shape {list(shape)} for input of shape {list(own)}"
    return ""


def _group_sizes(form: Form, tensor: torch.Tensor) -> tuple[int, int, int, int]:
    return tensor.shape[0], tensor.shape[1], prod(tensor.shape[2:]), form[1]


def _eager_group_norm(form: Form, input: Any, weight: Any = None, bias: Any = None, *, eps: Any) -> Any:  # noqa: A002
    made = torch.ops.aten.native_group_norm.default(input, weight, bias, *_group_sizes(form, input), eps)
    return made if form[6] else made[0]


def _eager_group_norm_elemt(form: Form, input: Any, mean: Any, rstd: Any, weight: Any = None, bias: Any = None) -> Any:  # noqa: A002
    x = input.reshape(*input.shape[:1], form[1], -1, *input.shape[2:])
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    rows, channels = (*mean.shape, *[1] * (x.dim() - 2)), (1, *x.shape[1:3], *[1] * (x.dim() - 3))
    mean, rstd = mean.view(rows).to(wide), rstd.view(rows).to(wide)
    if weight is None and bias is None:
        made = (x.to(wide) - mean) * rstd
    else:
        scale = rstd if weight is None else rstd * weight.view(channels)
        shift = -scale * mean if bias is None else -scale * mean + bias.view(channels)
        made = torch.addcmul(shift, x.to(wide), scale)
    return made.to(x.dtype).view(input.shape)


def _eager_group_norm_backward(
    form: Form,
    grad_out: Any,
    input: Any,  # noqa: A002
    mean: Any,
    rstd: Any,
    weight: Any = None,
) -> Any:
    made = torch.ops.aten.native_group_norm_backward.default(
        grad_out, input, mean, rstd, weight, *_group_sizes(form, input), list(form[-1])
    )
    return only_wanted(made, form[-1])


COMPOSITES["native_group_norm"] = Composite(
    "native_group_norm", _group_norm_steps, _eager_group_norm, _check_groups, is_short=is_contiguous
)
COMPOSITES["group_norm_elemt"] = Composite(
    "group_norm_elemt",
    _group_norm_elemt_steps,
    _eager_group_norm_elemt,
    _check_groups,
    frozenset({"mean", "rstd"}),
    is_short=is_contiguous,
)
COMPOSITES["native_group_norm_backward"] = Composite(
    "native_group_norm_backward",
    _group_norm_backward_steps,
    _eager_group_norm_backward,
    _check_groups,
    frozenset({"mean", "rstd"}),
    is_short=is_contiguous,
)
