"""batch_norm with its backward op, in the steps of ATen's CUDA kernels (Normalization.cuh).

Tensors of one element a channel are looked at in the shape of the input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from fuser.errors import OneValueError
from fuser.function import Promotion, View
from fuser.graph import FusionGroup, GroupBuilder
from fuser.layout import Shape, Strides, is_contiguous
from fuser.ops.composites import COMPOSITES, Composite, Form, optional_input, step, view
from fuser.ops.norm_steps import NEXT_MOMENTS, functor, moments, reduce_step, rstd_of

__all__: list[str] = []

# Forms: the rank of the input, whether it is on the CPU (where results lie in its memory format, and elsewhere as it
# does), whether there are a weight and a bias, whether its own statistics are used, and how many results are asked for
# (with those of the running statistics 5, without them 3; the first alone), or which. In torch's order, which of ATen's
# kernels: for channels side by side, for planes, or for what lies otherwise; and the dtype.
_CHANNELS, _PLANES, _OTHER = "channels", "planes", "other"


def _kernel(dtype: torch.dtype, shape: Shape, strides: Strides) -> Form:
    # As ATen chooses.
    if is_contiguous(shape, strides) and prod(shape) < 1 << 31:
        return (_CHANNELS if strides[1] == 1 else _PLANES), dtype
    return (_CHANNELS if _has_channels_last(shape, strides) else _OTHER), dtype


def _backward_kernel(dtype: torch.dtype, shape: Shape, strides: Strides) -> Form:
    # Where an input lies both ways, it chooses otherwise.
    return (_CHANNELS, dtype) if _has_channels_last(shape, strides) else _kernel(dtype, shape, strides)


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
  n = fuser_next(count);
  m = fma(delta, fuser_next_inverse(count), ma);
  s = sa + fuser_rounded_product(delta, x - m);
}"""
_PLANE_MERGE = """void merge(T ma, T sa, T na, T mb, T sb, T nb, T& m, T& s, T& n) {
  n = na + nb;
  const T factor = T(1) / (n > T(1) ? n : T(1)), delta = ma - mb;
  m = fma(na, ma, mb * nb) * factor;
  s = sa + fma(delta * delta * na * nb, factor, sb);
}"""
_KERNELS = {
    _CHANNELS: ("batch_norm", (_CHANNEL_MERGE, _CHANNEL_NEXT)),
    _PLANES: ("batch_norm_planes", (_PLANE_MERGE, NEXT_MOMENTS)),
}


def _batch_norm_steps(form: Form, is_ordered: bool) -> FusionGroup:
    rank, is_on_cpu, has_weight, has_bias, is_training, count, *kernel = form
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
    affine = {name: given[name] for name in affine_names}
    out = _normalised(builder, [x, mean, rstd], affine, keeps_format=is_on_cpu)
    back = view(View(1, insert=dims).inverse)
    return builder.build([out, *(builder.apply(back, [value])[0] for value in further)])


def _normalised(
    builder: GroupBuilder, values: Sequence[int], affine: Mapping[str, int], *, keeps_format: bool = False
) -> int:
    has_weight, has_bias = "weight" in affine, "bias" in affine
    scaled = "weight * (x - mean) * rstd" if has_weight else "(x - mean) * rstd"
    taken = "T x, T mean, T rstd" + ", T weight" * has_weight + ", T bias" * has_bias
    text = f"T batch_norm({taken}) {{ return {scaled}{' + bias' * has_bias}; }}"
    normalise = step(text, unpromoted=("mean", "rstd", *affine), keeps_format=keeps_format)
    return builder.apply(normalise, [*values, *affine.values()])[0]


def _batch_norm_elemt_steps(form: Form, is_ordered: bool) -> FusionGroup:  # noqa: ARG001 - as all steps
    # Forms: the rank of the input, and whether there are a weight and a bias.
    rank, has_weight, has_bias = form
    builder = GroupBuilder()
    x, names = builder.add_input("input"), ["weight"] * has_weight + ["bias"] * has_bias
    given = _add_channels(builder, rank, [*names, "mean", "rstd"])
    values, affine = [x, given["mean"], given["rstd"]], {name: given[name] for name in names}
    return builder.build([_normalised(builder, values, affine)])


def _batch_norm_backward_steps(form: Form, is_ordered: bool) -> FusionGroup:
    rank, is_on_cpu, has_weight, is_training, mask, *kernel = form
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
        unpromoted: tuple[str, ...] = ("mean", "first", "share", "slope", "scale")
        dx = step(text, unpromoted=unpromoted, keeps_format=is_on_cpu)
        made += builder.apply(dx, [x, grad, mean, first, *factors])
    elif mask[0]:
        taken, scaled = "T dy, T rstd" + ", T weight" * has_weight, "dy * weight * rstd" if has_weight else "dy * rstd"
        unpromoted = ("rstd", "weight")[: 1 + has_weight]
        dx = step(f"T norm_dx({taken}) {{ return {scaled}; }}", unpromoted=unpromoted, keeps_format=is_on_cpu)
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
    torch.bfloat16: "fuser_round<fuser_bfloat16>({})",
    torch.float16: "fuser_round<fuser_half>({})",
}


def _plane_backward_steps(form: Form) -> FusionGroup:
    # ATen rounds what threads pass on to each other, and each product, to the dtype of the input.
    rank, _, has_weight, is_training, mask, _, dtype = form
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
    if len(form) == 6 and form[4] and prod((own[0], *own[2:])) == 1:
        message = f"Expected more than 1 value per channel when training, got input size {torch.Size(own)}"
        raise OneValueError(f"batch_norm: {message}")
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
    # Where its own statistics were not used there are none.
    none = mean.new_empty(0, dtype=torch.float64 if input.dtype is torch.float64 else torch.float32)
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
    is_short=True,
)
COMPOSITES["batch_norm_elemt"] = Composite(
    "batch_norm_elemt", _batch_norm_elemt_steps, _eager_batch_norm_elemt, _check_channels, _OF_CHANNELS
)
COMPOSITES["native_batch_norm_backward"] = Composite(
    "native_batch_norm_backward",
    _batch_norm_backward_steps,
    _eager_batch_norm_backward,
    _check_channels,
    _OF_CHANNELS,
    kernel=_backward_kernel,
    is_short=True,
)
