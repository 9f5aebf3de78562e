"""nll_loss and its backward op, in the steps of ATen's CUDA kernels (Loss.cu).

A row's target takes one of its classes out: the only one whose index it is, so no element of another class counts,
finite or not. A target that is no class makes the loss NaN (torch stops the device, or raises on the CPU).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fuser.function import Function, View
from fuser.graph import FusionGroup, GroupBuilder
from fuser.layout import Shape
from fuser.ops.composites import COMPOSITES, ROW_SUMS, Composite, Form, optional_input, step, view
from fuser.ops.index import index_function
from fuser.ops.norm_steps import functor, reduce_step, stored

__all__ = ["MEAN", "NONE", "SUM"]

# How torch numbers the ways to reduce a loss.
NONE, MEAN, SUM = 0, 1, 2
# The classes are the second dimension.
_ROWS = View(1, insert=(1,))


_ADD_THREE = """void add_three(T a1, T a2, T a3, T b1, T b2, T b3, T& s1, T& s2, T& s3) {
  s1 = a1 + b1; s2 = a2 + b2; s3 = a3 + b3;
}"""


def _forward_steps(form: Form, is_ordered: bool) -> FusionGroup:
    # Whether there is a weight, how the loss is reduced, the dtype of the results where that is not the accumulate
    # type, whether the loss alone is asked for, and whether labels are smoothed: all classes have a share in it then.
    has_weight, reduction, dtype, is_alone, is_smooth = form
    builder = GroupBuilder()
    x, target = builder.add_input("input"), builder.add_input("target")
    weight = optional_input(builder, "weight", has_weight)
    numbers = [builder.add_input("ignore_index", is_scalar=True)]
    numbers += optional_input(builder, "label_smoothing", is_smooth, is_scalar=True)
    (of_row,) = builder.apply(view(_ROWS), [target])
    (place,) = builder.apply(index_function(1, (1,)), [x])
    # A sum of zeros and one element is the element. What a row comes to: its target's value and weight, all values.
    taken = "T x, int64_t t, int64_t i" + ", T w" * has_weight
    picked = ["v = i == t ? x : T(0);", *["c = i == t ? w : T(0);"] * has_weight]
    picked += [f"s = {'w * ' * has_weight}x;"] * is_smooth
    names = [text[0] for text in picked]
    found = ["value", "classes", *["share"] * has_weight, *["every"] * is_smooth]
    pick = functor(f"void pick({taken}, {_list('T& ', names)}) {{ {' '.join(picked)} }}", (), len(names))
    results = ["v", "T(count)", *names[1:]]
    text = f"""void found({_list("T ", names)}, int64_t count, {_list("T& ", found)}) {{
      {" ".join(f"{name} = {value};" for name, value in zip(found, results, strict=True))}
    }}"""
    combine = functor(_ADD_THREE, (), 3) if len(names) == 3 else None
    finish = functor(text, (), len(found))
    order = "" if is_smooth else "pick"
    picks = reduce_step(pick, (1,), finish, order=order, combine=combine, keepdim=False, unpromoted=("t", "i"))
    values = builder.apply(picks, [x, of_row, place, *weight])
    own, scalars = "share" if has_weight else "T(1)", ["ignore_index"] + ["label_smoothing"] * is_smooth
    loss = f"-(value * {own})"
    if is_smooth:
        loss = f"(T(1) - T(label_smoothing)) * {loss} - every * (T(label_smoothing) / classes)"
    taken = f"{_list('T ', found)}, int64_t t, int64_t ignore_index" + ", double label_smoothing" * is_smooth
    text = f"""void row_loss({taken}, T& loss, T& total) {{
      const bool is_ignored = t == ignore_index, is_class = t >= 0 && T(t) < classes;
      loss = is_ignored ? T(0) : is_class ? {loss} : T(NAN);
      total = is_ignored ? T(0) : {own};
    }}"""
    of_rows = step(text, num_outputs=2, scalars=tuple(scalars), unpromoted=("t",))
    made = builder.apply(of_rows, [*values, target], numbers)
    if reduction != NONE:
        both = functor("void both(T loss, T total, T& s1, T& s2) { s1 = loss; s2 = total; }", num_outputs=2)
        result = "a / b" if reduction == MEAN else "a"
        finish = functor(f"void finish(T a, T b, T& loss, T& total) {{ loss = {result}; total = b; }}", num_outputs=2)
        # With weights ATen adds products, in another way for each dtype.
        order = "nll_loss" if is_ordered and not has_weight else ""
        sums = reduce_step(both, (0,), finish, order=order, keepdim=False)
        made = builder.apply(sums, made)
    return builder.build(stored(builder, made[:1] if is_alone else made, dtype))


def _list(kind: str, names: Sequence[str]) -> str:
    return ", ".join(f"{kind}{name}" for name in names)


@functools.cache
def _dx(has_weight: bool) -> Function:
    made = step(
        f"""T nll_dx(T scale, int64_t t, int64_t i{", T w" * has_weight}, int64_t ignore_index) {{
      return i == t && t != ignore_index ? {"w * scale" if has_weight else "scale"} : T(0);
    }}""",
        scalars=("ignore_index",),
        unpromoted=("t", "i"),
        is_contiguous=True,
    )
    if not has_weight:
        # A sum of zeros and one element is the element; torch adds it to zero, which takes the sign from another one.
        picked = step("T picked(T x, int64_t t, int64_t i) { return i == t ? T(0) + x : T(0); }").functor
        ROW_SUMS[made.functor] = reduce_step(picked, (1,), order="pick", unpromoted=("t", "i")), (1, 2)
    return made


def _backward_steps(form: Form, is_ordered: bool) -> FusionGroup:  # noqa: ARG001
    # Whether there is a weight, and how the loss was reduced.
    has_weight, reduction = form
    builder = GroupBuilder()
    names = ["input", "grad_output", "target"] + ["weight"] * has_weight + ["total_weight"]
    given = {name: builder.add_input(name) for name in names}
    ignored = builder.add_input("ignore_index", is_scalar=True)
    (of_row,) = builder.apply(view(_ROWS), [given["target"]])
    (place,) = builder.apply(index_function(1, (1,)), [given["input"]])
    grad = given["grad_output"]
    if reduction == MEAN:
        (scale,) = builder.apply(step("T scale(T g, T total) { return -(g / total); }"), [grad, given["total_weight"]])
    else:
        if reduction == NONE:
            (grad,) = builder.apply(view(_ROWS), [grad])
        (scale,) = builder.apply(step("T scale(T g) { return -g; }"), [grad])
    weight = [given[name] for name in ["weight"] * has_weight]
    return builder.build(builder.apply(_dx(has_weight), [scale, of_row, place, *weight], [ignored]))


def _check(form: Form, shapes: Mapping[str, Shape]) -> str:
    own = shapes["input"]
    if len(own) != 2 or shapes["target"] != own[:1]:
        return f"size mismatch (got input: {list(own)}, target: {list(shapes['target'])})"
    if "weight" in shapes and shapes["weight"] != own[1:]:
        return f"weight tensor should be defined for all {own[1]} classes, but got {list(shapes['weight'])}"
    if "grad_output" in shapes and shapes["grad_output"] != (own[:1] if form[1] == NONE else ()):
        return f"grad_output of shape {list(shapes['grad_output'])} for input of shape {list(own)}"
    return ""


def _eager_forward(
    form: Form,
    input: Any,  # noqa: A002
    target: Any,
    weight: Any = None,
    *,
    ignore_index: Any,
    label_smoothing: Any = 0.0,
) -> Any:
    _, reduction, _, is_alone, is_smooth = form
    if is_smooth:
        # The logarithm of a softmax is its own.
        return torch.ops.aten.cross_entropy_loss.default(
            input, target, weight, reduction, int(ignore_index), label_smoothing
        )
    made = torch.ops.aten.nll_loss_forward.default(input, target, weight, reduction, int(ignore_index))
    return made[0] if is_alone else made


def _eager_backward(
    form: Form,
    input: Any,  # noqa: A002
    grad_output: Any,
    target: Any,
    total_weight: Any,
    weight: Any = None,
    *,
    ignore_index: Any,
) -> Any:
    return torch.ops.aten.nll_loss_backward.default(
        grad_output, input, target, weight, form[1], int(ignore_index), total_weight
    )


COMPOSITES["nll_loss_forward"] = Composite(
    "nll_loss_forward", _forward_steps, _eager_forward, _check, frozenset({"target"})
)
COMPOSITES["nll_loss_backward"] = Composite(
    "nll_loss_backward", _backward_steps, _eager_backward, _check, frozenset({"target"}), is_exact=True
)
