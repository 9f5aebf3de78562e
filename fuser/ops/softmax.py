"""softmax and log_softmax with their backward ops, in the steps of ATen's CUDA kernels.

SoftMax.cu and PersistentSoftmax.cuh. Sums, and what is exponentiated, are of the accumulate type, as there.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody uses

from fuser.function import Function, Promotion, Reduction
from fuser.graph import FusionGroup, GroupBuilder
from fuser.ops.calls import Binder, OpCall, asking, is_number, known_of
from fuser.ops.composites import COMPOSITES, Composite, Form, composite_function, step
from fuser.ops.reductions import reduction_function
from fuser.ops.table import OPS, cast_function

__all__ = ["softmax_functions", "softmax_methods"]

_ATEN = torch.ops.aten


# --- steps: a form is the dimension and, of the backward ops, the dtype of the result ----------------------------
def _total(dim: int, order: str) -> Function:
    reduction = Reduction(step("T add(T a, T b) { return a + b; }").functor, (0,), None, (dim,), True, order=order)
    return step("T value(T x) { return x; }", promotion=Promotion.DEFAULT_WIDE, reduction=reduction)


def _forward_steps(op: str, form: Form, is_ordered: bool) -> FusionGroup:
    (dim,) = form
    builder = GroupBuilder()
    x = builder.add_input("input")
    (top,) = builder.apply(reduction_function("amax_or_end", (dim,), True), [x])
    power = step("T power(T x, T top) { return exp(x - top); }", promotion=Promotion.DEFAULT_WIDE)
    (powers,) = builder.apply(power, [x, top])
    (total,) = builder.apply(_total(dim, "softmax" if is_ordered else ""), [powers])
    if op == "_softmax":
        # The tensor gives the result its dtype.
        text = "T softmax(T x, T power, T total) { return power / total; }"
        last = step(text, unpromoted=("power", "total"), is_contiguous=True)
        return builder.build(builder.apply(last, [x, powers, total]))
    (log,) = builder.apply(step("T log_of(T total) { return log(total); }"), [total])
    text = "T log_softmax(T x, T top, T log) { return x - top - log; }"
    last = step(text, unpromoted=("top", "log"), is_contiguous=True)
    return builder.build(builder.apply(last, [x, top, log]))


def _backward_steps(op: str, form: Form, is_ordered: bool) -> FusionGroup:
    dim, dtype = form
    builder = GroupBuilder()
    grad, y = builder.add_input("grad_output"), builder.add_input("output")
    if op == "_softmax_backward_data":
        # A tensor of its own in torch.
        (grad,) = builder.apply(step("T weighted(T grad, T y) { return grad * y; }"), [grad, y])
        text = "T softmax_dx(T grad, T y, T total) { return grad - y * total; }"
    else:
        text = "T log_softmax_dx(T grad, T y, T total) { return grad - exp(y) * total; }"
    order = op.removeprefix("_").removesuffix("_data")
    (total,) = builder.apply(_total(dim, order if is_ordered else ""), [grad])
    last = step(text, unpromoted=("total",), out_dtypes=(getattr(torch, dtype),), is_contiguous=True)
    return builder.build(builder.apply(last, [grad, y, total]))


def _define(op: str) -> None:
    overload = getattr(_ATEN, op).default
    if op.endswith("data"):
        COMPOSITES[op] = Composite(
            op,
            functools.partial(_backward_steps, op),
            lambda form, grad_output, output: overload(grad_output, output, form[0], getattr(torch, form[1])),
        )
    else:
        COMPOSITES[op] = Composite(
            op,
            functools.partial(_forward_steps, op),
            lambda form, input: overload(input, form[0], False),  # noqa: A006
        )


for _name in ("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data"):
    _define(_name)


# --- names ------------------------------------------------------------------------------------------------------------
def _bind(op: str) -> Binder:
    def bind(input: Any, dim: Any, dtype: Any = None) -> OpCall | None:  # noqa: A002 - torch's own parameter name
        if is_number(input) or type(dim) is not int or not isinstance(dtype, torch.dtype | None):
            return None
        given = input if dtype is None else OpCall(cast_function(dtype), (input,))
        return OpCall(composite_function(op, (dim,)), (given,))

    return bind


def _bind_functional(op: str) -> Binder:
    def bind(input: Any, dim: Any = None, _stacklevel: Any = 3, dtype: Any = None) -> OpCall | None:  # noqa: A002
        # Without a dimension torch warns.
        return _bind(op)(input, dim, dtype)

    return bind


def _bind_softmin(input: Any, dim: Any = None, _stacklevel: Any = 3, dtype: Any = None) -> OpCall | None:  # noqa: A002
    if is_number(input):
        return None
    return _bind("_softmax")(OpCall(OPS["neg"].function, (input,)), dim, dtype)


def _bind_aten(op: str) -> Binder:
    def bind(self: Any, dim: Any, half_to_float: Any) -> OpCall | None:
        return _bind(op)(self, dim, torch.float32 if half_to_float else None)

    return bind


def _bind_backward(op: str) -> Binder:
    @asking
    def bind(grad_output: Any, output: Any, dim: Any, input_dtype: Any) -> OpCall | None:
        known = known_of(grad_output)
        if known is None or (known.dtype is not input_dtype and known.device_type != "cuda"):
            return None
        dtype = str(input_dtype).removeprefix("torch.")
        return OpCall(composite_function(op, (dim, dtype)), (grad_output, output))

    return bind


def softmax_methods() -> dict[str, Binder]:
    """Return the binder of each method of tensors."""
    return {"softmax": _bind("_softmax"), "log_softmax": _bind("_log_softmax")}


def softmax_functions() -> dict[Any, Binder]:
    """Return the binder of each function and ATen overload that is no method as well."""
    return {
        F.softmax: _bind_functional("_softmax"),
        F.log_softmax: _bind_functional("_log_softmax"),
        F.softmin: _bind_softmin,
        torch.special.softmax: _bind("_softmax"),
        torch.special.log_softmax: _bind("_log_softmax"),
        _ATEN.softmax.int: _bind("_softmax"),
        _ATEN.log_softmax.int: _bind("_log_softmax"),
        _ATEN._softmax.default: _bind_aten("_softmax"),
        _ATEN._log_softmax.default: _bind_aten("_log_softmax"),
        _ATEN._softmax_backward_data.default: _bind_backward("_softmax_backward_data"),
        _ATEN._log_softmax_backward_data.default: _bind_backward("_log_softmax_backward_data"),
    }
