"""nll_loss and its backward op, in the steps of ATen's CUDA kernels (Loss.cu).

A row's target takes one of its classes out: the only one whose index it is, so no element of another class counts,
finite or not. A target that is no class makes the loss NaN (torch stops the device, or raises on the CPU).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fuser.function import Function, Promotion, Reduction, View
from fuser.graph import FusionGroup, GroupBuilder
from fuser.layout import Shape
from fuser.ops.composites import COMPOSITES, Composite, Form, optional_input, step, view
from fuser.ops.index import index_function
from fuser.ops.norm_steps import functor, reduce_step, stored

__all__ = ["MEAN", "NONE", "SUM"]

# How torch numbers the ways to reduce a loss.
NONE, MEAN, SUM = 0, 1, 2
# The classes are the second dimension.
_ROWS = View(1, insert=(1,))


def _forward_steps(form: Form, is_ordered: bool) -> FusionGroup:
    # Whether there is a weight, how the loss is reduced, and the dtype of the results where that is not the accumulate
    # type.
    has_weight, reduction, dtype = form
    builder = GroupBuilder()
    x, target = builder.add_input("input"), builder.add_input("target")
    weight = optional_input(builder, "weight", has_weight)
    ignored = builder.add_input("ignore_index", is_scalar=True)
    (of_row,) = builder.apply(view(_ROWS), [target])
    (place,) = builder.apply(index_function(1, (1,)), [x])
    taken = "T x, int64_t t, int64_t i" + ", T w" * has_weight
    own = "w" if has_weight else "T(1)"
    pick = f"void pick({taken}, T& v, T& c, int64_t& n) {{ n = i == t; v = n ? x : T(0); c = n ? {own} : T(0); }}"
    either = """void either(T va, T ca, int64_t na, T vb, T cb, int64_t nb, T& v, T& c, int64_t& n) {
      v = na ? va : vb; c = na ? ca : cb; n = na + nb;
    }"""
    found = "void found(T v, T c, int64_t n, T& value, T& share) { value = n ? v : T(NAN); share = n ? c : T(NAN); }"
    picks = Reduction(functor(either, num_outputs=3), (0, 0, 0), functor(found, num_outputs=2), (1,))
    chosen = Function(
        functor(pick, num_outputs=3), promotion=Promotion.DEFAULT_WIDE, unpromoted=("t", "i"), reduction=picks
    )
    value, share = builder.apply(chosen, [x, of_row, place, *weight])
    text = """void row_loss(T value, T share, int64_t t, int64_t ignore_index, T& loss, T& total) {
      loss = t == ignore_index ? T(0) : -(value * share);
      total = t == ignore_index ? T(0) : share;
    }"""
    of_rows = step(text, num_outputs=2, scalars=("ignore_index",), unpromoted=("t",))
    loss, total = builder.apply(of_rows, [value, share, target], [ignored])
    both = functor("void both(T loss, T total, T& s1, T& s2) { s1 = loss; s2 = total; }", num_outputs=2)
    result = "a / b" if reduction == MEAN else "a"
    finish = functor(f"void finish(T a, T b, T& loss, T& total) {{ loss = {result}; total = b; }}", num_outputs=2)
    sums = reduce_step(both, (0,), finish, order="nll_loss" if is_ordered else "", keepdim=False)
    return builder.build(stored(builder, builder.apply(sums, [loss, total]), dtype))


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
    text = f"""T nll_dx(T scale, int64_t t, int64_t i{", T w" * has_weight}, int64_t ignore_index) {{
      return i == t && t != ignore_index ? {"w * scale" if has_weight else "scale"} : T(0);
    }}"""
    dx = step(text, scalars=("ignore_index",), unpromoted=("t", "i"), is_contiguous=True)
    weight = [given[name] for name in ["weight"] * has_weight]
    return builder.build(builder.apply(dx, [scale, of_row, place, *weight], [ignored]))


def _check(form: Form, shapes: Mapping[str, Shape]) -> str:
    own = shapes["input"]
    if len(own) != 2 or shapes["target"] != own[:1]:
        return f"size mismatch (got input: {list(own)}, target: {list(shapes['target'])})"
    if "weight" in shapes and shapes["weight"] != own[1:]:
        return f"weight tensor should be defined for all {own[1]} classes, but got {list(shapes['weight'])}"
    if "grad_output" in shapes and shapes["grad_output"] != (own[:1] if form[1] == NONE else ()):
        return f"grad_output of shape {list(shapes['grad_output'])} for input of shape {list(own)}"
    return ""


def _eager_forward(form: Form, input: Any, target: Any, weight: Any = None, *, ignore_index: Any) -> Any:  # noqa: A002
    return torch.ops.aten.nll_loss_forward.default(input, target, weight, form[1], int(ignore_index))


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
