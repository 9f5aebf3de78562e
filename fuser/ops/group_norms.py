"""group_norm with its backward op, in the steps of ATen's CUDA kernels (group_norm_kernel.cu).

Groups of channels are looked at as a dimension of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from fuser.errors import OneValueError
from fuser.function import Function, Promotion, View
from fuser.graph import FusionGroup, GroupBuilder
from fuser.layout import Shape
from fuser.ops.composites import COMPOSITES, Composite, Form, composite_function, only_wanted, step, view
from fuser.ops.norm_steps import (
    NEXT_MOMENTS,
    affine,
    functor,
    moments,
    normalised_dx,
    reduce_step,
    rstd_of,
    stored,
)
from fuser.ops.reductions import REDUCTIONS

__all__ = ["group_norm_elemt"]

_VERSION = tuple(int(number) for number in torch.__version__.split(".")[:2])


# Forms: the rank of the input, how many groups, whether results lie row-major, whether there are a weight and a bias;
# the dtype of the statistics where that is not the accumulate type, whether they are asked for, and of F.group_norm
# that it refuses groups of one value; or which gradients are asked for.
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
    rank, groups, _, has_weight, has_bias, dtype, are_asked, *_ = form
    shapes = _Groups(rank, groups)
    builder = shapes.builder
    x = shapes.add("input", shapes.full)
    further = [shapes.add(name, shapes.channels) for name in ["weight"] * has_weight + ["bias"] * has_bias]
    eps = builder.add_input("eps", is_scalar=True)
    # That of an input without further dimensions is another order, which is not kept.
    order = "group_norm" + "_1d" * (rank == 2) if is_ordered else ""
    mean, var, _ = moments(builder, x, shapes.inner, order, (REDUCTIONS["var"].combine, NEXT_MOMENTS))
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


def _group_norm_elemt_steps(form: Form, is_ordered: bool) -> FusionGroup:  # noqa: ARG001 - as the others
    # Forms: as those of group_norm up to the bias. In ATen's steps in fast numerics, too: they are the fewest for each
    # element, where what there is once per channel is computed apart.
    rank, groups, _, has_weight, has_bias = form
    shapes = _Groups(rank, groups)
    values = [shapes.add("input", shapes.full), shapes.add("mean", shapes.rows), shapes.add("rstd", shapes.rows)]
    values += [shapes.add(name, shapes.channels) for name in ["weight"] * has_weight + ["bias"] * has_bias]
    return shapes.builder.build([_group_normalised(form, shapes, values, is_ordered=True)])


def group_norm_elemt(input: Any, groups: int, weight: Any, bias: Any, *, is_row_major: bool) -> Function | None:  # noqa: A002
    """Return the op that makes the results of a group norm of its statistics, which takes tensors that are there.

    They come as the input, mean, rstd, weight, bias. None: ATen does not give back the statistics that it goes on with.
    """
    if input.dtype in (torch.float16, torch.bfloat16) and _VERSION >= (2, 13):
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
    seen = (own[0] * own[1] // form[1], form[1], *own[2:])
    if form[7:] and prod((seen[0], *seen[2:])) == 1:
        message = f"Expected more than 1 value per channel when training, got input size {list(seen)}"
        raise OneValueError(f"group_norm: {message}")
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


COMPOSITES["native_group_norm"] = Composite("native_group_norm", _group_norm_steps, _eager_group_norm, _check_groups)
COMPOSITES["group_norm_elemt"] = Composite(
    "group_norm_elemt",
    _group_norm_elemt_steps,
    _eager_group_norm_elemt,
    _check_groups,
    frozenset({"mean", "rstd"}),
)
COMPOSITES["native_group_norm_backward"] = Composite(
    "native_group_norm_backward",
    _group_norm_backward_steps,
    _eager_group_norm_backward,
    _check_groups,
    frozenset({"mean", "rstd"}),
    is_short=True,
)
