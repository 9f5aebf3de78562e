"""batch_norm and group_norm with their backward ops, in the steps of ATen's CUDA kernels (Normalization.cuh).

Tensors of one element a channel are looked at in the shape of the input, and groups of channels as a dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from fuser.function import Promotion, View
from fuser.graph import FusionGroup, GroupBuilder
from fuser.layout import Shape
from fuser.ops.composites import COMPOSITES, Composite, Form, only_wanted, optional_input, step, view
from fuser.ops.norm_steps import affine, functor, moments, normalised_dx, reduce_step, rstd_of, stored

__all__: list[str] = []

_VERSION = tuple(int(number) for number in torch.__version__.split(".")[:2])


# --- batch_norm -------------------------------------------------------------------------------------------------
# Forms: the rank of the input, whether there are a weight and a bias, whether its own statistics are used, and how many
# results are asked for (with those of the running statistics 5, without them 3; the first alone), or which.
def _all_but_channels(rank: int) -> tuple[int, ...]:
    return (0, *range(2, rank))


def _add_channels(builder: GroupBuilder, rank: int, names: Sequence[str]) -> dict[str, int]:
    # Inputs of one element a channel, in the shape of the op's input.
    looked_at = view(View(1, insert=_all_but_channels(rank)))
    return {name: builder.apply(looked_at, [builder.add_input(name)])[0] for name in names}


def _batch_norm_steps(form: Form, is_ordered: bool) -> FusionGroup:  # noqa: ARG001 - as all steps
    # In torch's order they have not its bits: how its compiler contracts the moments is not known.
    rank, has_weight, has_bias, is_training, count = form
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
        mean, var, elements = moments(builder, x, dims, "")
        rstd = rstd_of(builder, var, eps)
        further = [mean, rstd] if count > 1 else []
        if is_updated:
            blend = "T blend(T old, T now, double momentum) { return T(momentum) * now + (T(1) - T(momentum)) * old; }"
            (now,) = builder.apply(step("T unbiased(T var, T n) { return var * (n / (n - T(1))); }"), [var, elements])
            for old, value in zip(running, (mean, now), strict=True):
                blended = step(blend, scalars=("momentum",), unpromoted=("now",))
                further += builder.apply(blended, [given[old], value], momentum)
    else:
        mean = given["running_mean"]
        rstd = rstd_of(builder, given["running_var"], eps)
    scaled = "weight * (x - mean) * rstd" if has_weight else "(x - mean) * rstd"
    taken = "T x, T mean, T rstd" + ", T weight" * has_weight + ", T bias" * has_bias
    unpromoted = tuple(word for word in ("mean", "rstd", "weight", "bias") if f"T {word}" in taken)
    normalise = step(f"T batch_norm({taken}) {{ return {scaled}{' + bias' * has_bias}; }}", unpromoted=unpromoted)
    (out,) = builder.apply(normalise, [x, mean, rstd, *(given[name] for name in affine_names)])
    back = view(View(1, insert=dims).inverse)
    return builder.build([out, *(builder.apply(back, [value])[0] for value in further)])


def _batch_norm_backward_steps(form: Form, is_ordered: bool) -> FusionGroup:
    rank, has_weight, is_training, mask = form
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
        order, add = "batch_norm_sums", functor(text, num_outputs=2)
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
    # In the dtype of the weight.
    dgamma = step("T dgamma(T weight, T total, T rstd) { return total * rstd; }", unpromoted=("total", "rstd"))
    dbeta = step("T dbeta(T weight, T total) { return total; }", unpromoted=("total",))
    back = view(View(1, insert=dims).inverse)
    if mask[1]:
        made += builder.apply(back, builder.apply(dgamma, [*weight, second, rstd]))
    if mask[2]:
        made += builder.apply(back, builder.apply(dbeta, [*weight, first]))
    return builder.build(made)


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
    saved = (None, None, mean, rstd) if is_training else (mean, var, None, None)
    made = torch.ops.aten.native_batch_norm_backward.default(
        grad_out, input, weight, *saved, is_training, eps, list(mask)
    )
    return [item for item, is_wanted in zip(made, mask, strict=True) if is_wanted]


_OF_CHANNELS = frozenset({"weight", "bias", "running_mean", "running_var", "mean", "rstd", "var"})
COMPOSITES["batch_norm"] = Composite("batch_norm", _batch_norm_steps, _eager_batch_norm, _check_channels, _OF_CHANNELS)
COMPOSITES["native_batch_norm_backward"] = Composite(
    "native_batch_norm_backward", _batch_norm_backward_steps, _eager_batch_norm_backward, _check_channels, _OF_CHANNELS
)


# --- group_norm -------------------------------------------------------------------------------------------------
# Forms: the rank of the input, how many groups, whether results lie row-major, whether there are a weight and a bias;
# the dtype of the statistics where that is not the accumulate type (None: they are not asked for), or which gradients
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
    rank, groups, is_contiguous, has_weight, has_bias, dtype = form
    shapes = _Groups(rank, groups)
    builder = shapes.builder
    x = shapes.add("input", shapes.full)
    further = [shapes.add(name, shapes.channels) for name in ["weight"] * has_weight + ["bias"] * has_bias]
    eps = builder.add_input("eps", is_scalar=True)
    # That of an input without further dimensions is another order, which is not kept.
    mean, var, _ = moments(builder, x, shapes.inner, "group_norm" + "_1d" * (rank == 2) if is_ordered else "")
    if is_ordered and dtype:
        # ATen rounds eps to the dtype of the input, too.
        eps_of = step("T eps_of(T var, double eps) { return T(eps); }", scalars=("eps",))
        rounded = stored(builder, builder.apply(eps_of, [var], [eps]), dtype)
        (rstd,) = builder.apply(step("T rstd_of(T var, T eps) { return rsqrt(var + eps); }"), [var, *rounded])
    else:
        rstd = rstd_of(builder, var, eps)
    statistics = [] if dtype is None else stored(builder, [mean, rstd], dtype)
    if is_ordered and dtype and _VERSION < (2, 13):
        # As ATen went on with them.
        mean, rstd = statistics
    if is_ordered and further:
        # In steps, which are rounded: a factor of each channel, and what is added.
        scale = rstd
        if has_weight:
            (scale,) = _wide(builder, "T scale(T rstd, T weight) { return rstd * weight; }", [rstd, further[0]])
        moved = _wide(builder, "T moved(T scale, T mean) { return -scale * mean; }", [scale, mean])
        if has_bias:
            moved = _wide(builder, "T shift(T moved, T bias) { return moved + bias; }", [*moved, further[-1]])
        text = "T group_norm(T x, T scale, T shift) { return scale * x + shift; }"
        normalise = step(text, unpromoted=("scale", "shift"), is_contiguous=is_contiguous)
        (out,) = builder.apply(normalise, [x, scale, *moved])
    else:
        normalise = affine(
            "group_norm", "(x - mean) * rstd", "T x, T mean, T rstd", has_weight, has_bias, is_contiguous=is_contiguous
        )
        (out,) = builder.apply(normalise, [x, mean, rstd, *further])
    return builder.build([shapes.back(out, shapes.full), *(shapes.back(value, shapes.rows) for value in statistics)])


def _group_norm_backward_steps(form: Form, is_ordered: bool) -> FusionGroup:  # noqa: ARG001 - as all steps
    # As those of batch_norm: how its compiler contracts the formulas is not known.
    rank, groups, is_contiguous, has_weight, mask = form
    shapes = _Groups(rank, groups)
    builder = shapes.builder
    grad, x = shapes.add("grad_out", shapes.full), shapes.add("input", shapes.full)
    mean, rstd = shapes.add("mean", shapes.rows), shapes.add("rstd", shapes.rows)
    weight = [shapes.add(name, shapes.channels) for name in ["weight"] * has_weight]
    made: list[int] = []
    if mask[0]:
        taken = [x, grad, mean, rstd, *weight]
        dx = normalised_dx(builder, taken, shapes.inner, "", is_contiguous=is_contiguous)
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
    return made[0] if form[5] is None else made


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


COMPOSITES["native_group_norm"] = Composite("native_group_norm", _group_norm_steps, _eager_group_norm, _check_groups)
COMPOSITES["native_group_norm_backward"] = Composite(
    "native_group_norm_backward",
    _group_norm_backward_steps,
    _eager_group_norm_backward,
    _check_groups,
    frozenset({"mean", "rstd"}),
)
