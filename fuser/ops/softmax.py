"""softmax and log_softmax with their backward ops, in the steps of ATen's CUDA kernels.

SoftMax.cu and PersistentSoftmax.cuh. Sums, and what is exponentiated, are of the accumulate type, as there.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody uses

from fuser.combining import Reduction
from fuser.function import Function, Promotion
from fuser.graph import FusionGroup, GroupBuilder
from fuser.ops.calls import Binder, OpCall, asking, is_number, known_of
from fuser.ops.composites import COMPOSITES, Composite, Form, add_functor, composite_function, step
from fuser.ops.reductions import reduction_function
from fuser.ops.table import OPS, convert_function, op_call
from fuser.ops.views import view_function

__all__ = ["ONE_WALK", "SHARED_WALK", "highest_function", "softmax_functions", "softmax_methods", "total_function"]

_ATEN = torch.ops.aten


# --- steps: a form is the dimension and a dtype: of the result; forward, of what the input is cast to, if it is -------
_VALUE = "T value(T x) { return x; }"
_POWER = "T power(T x, T top) { return exp(x - top); }"
# A NaN is lost here: it comes back from the sum.
_LARGER = "T larger(T a, T b) { return fmax(a, b); }"
# In one text, so that a compiler contracts what it contracts in ATen's.
_ADD_POWER = "T add_power(T sum, T x, T top) { return sum + exp(x - top); }"

# Last in a form: fast numerics find the largest element and the sum in one walk (Milakov and Gimelshein, "Online
# normalizer calculation for softmax", 2018). Each part's sum is of powers of what its elements are less than its own
# largest one, which is finite; there is none of infinity, nor of nothing else than its negative.
ONE_WALK = "one walk"
# The same where several blocks of a GPU share a row: each walk is a launch of its own.
SHARED_WALK = "one walk, shared"
_LEAST = -torch.finfo(torch.float32).max
_POWERS = f"""void powers(T x, T& top, T& total) {{
  top = x < T({_LEAST}) ? T({_LEAST}) : x;
  total = x != x ? x : x < T({_LEAST}) ? T(0) : T(1);
}}"""
_MERGE_POWERS = """void merge(T a_top, T a_total, T b_top, T b_total, T& top, T& total) {
  const T share = exp(-fabs(a_top - b_top));
  top = fmax(a_top, b_top);
  total = a_top > b_top ? a_total + b_total * share : a_total * share + b_total;
}"""
_FOUND_POWERS = """void found(T a_top, T a_total, T& top, T& total) {
  top = a_top;
  total = a_top == T(INFINITY) || a_total == T(0) ? T(NAN) : a_total;
}"""


def highest_function(dims: tuple[int, ...]) -> Function:
    """Return the step that finds the largest element along dimensions, which are kept."""
    return step(_VALUE, reduction=Reduction(step(_LARGER).functor, (-math.inf,), None, dims, True, order="any"))


def total_function(dim: int, order: str, mapped: str = _VALUE) -> Function:
    """Return the step that adds up along a dimension, which is kept: its elements, or what a text makes of them."""
    accumulate = step(_ADD_POWER).functor if order and mapped is _POWER else None
    reduction = Reduction(add_functor(), (0,), None, (dim,), True, order=order, accumulate=accumulate, is_torchs=True)
    return step(mapped, promotion=Promotion.DEFAULT_WIDE, reduction=reduction)


def _powers_function(dim: int, order: str) -> Function:
    merge, found = (step(text, num_outputs=2).functor for text in (_MERGE_POWERS, _FOUND_POWERS))
    reduction = Reduction(merge, (_LEAST, 0), found, (dim,), True, order=order, is_torchs=not order)
    return step(_POWERS, num_outputs=2, promotion=Promotion.DEFAULT_WIDE, reduction=reduction)


def _forward_steps(op: str, form: Form, is_ordered: bool) -> FusionGroup:
    dim, *dtype = form
    builder = GroupBuilder()
    x = builder.add_input("input")
    if dtype in ([ONE_WALK], [SHARED_WALK]):
        top, total = builder.apply(_powers_function(dim, "powers" if dtype == [ONE_WALK] else ""), [x])
        if op == "_log_softmax":
            return _log_softmax(builder, x, top, total)
        text = "T softmax(T x, T top, T total) { return exp(x - top) / total; }"
        return builder.build(
            builder.apply(step(text, unpromoted=("top", "total"), is_contiguous=True), [x, top, total])
        )
    if dtype:
        (x,) = builder.apply(convert_function(getattr(torch, dtype[0])), [x])
    (top,) = builder.apply(highest_function((dim,)), [x])
    # What is converted, too, has a kernel of its own from float16.
    order = op.removeprefix("_") + "_cast" * len(dtype) if is_ordered else ""
    if op == "_softmax":
        (powers,) = builder.apply(step(_POWER, promotion=Promotion.DEFAULT_WIDE), [x, top])
        (total,) = builder.apply(total_function(dim, order), [powers])
        # The maximum gives the result its dtype.
        text = "T softmax(T top, T power, T total) { return power / total; }"
        last = step(text, unpromoted=("power", "total"), is_contiguous=True)
        return builder.build(builder.apply(last, [top, powers, total]))
    (total,) = builder.apply(total_function(dim, order, _POWER), [x, top])
    return _log_softmax(builder, x, top, total)


def _log_softmax(builder: GroupBuilder, x: int, top: int, total: int) -> FusionGroup:
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
    (total,) = builder.apply(total_function(dim, order if is_ordered else ""), [grad])
    last = step(text, unpromoted=("total",), out_dtypes=(getattr(torch, dtype),), is_contiguous=True)
    return builder.build(builder.apply(last, [grad, y, total]))


def _logsumexp_steps(form: Form, is_ordered: bool) -> FusionGroup:  # noqa: ARG001 - a sum of torch's is one of them
    # As ATen has it: tensors of the dtype, and an infinite maximum is not subtracted.
    dims, keepdim = form
    builder = GroupBuilder()
    x = builder.add_input("input")
    (top,) = builder.apply(highest_function(dims), [x])
    (top,) = builder.apply(step("T finite(T top) { return fabs(top) == T(INFINITY) ? T(0) : top; }"), [top])
    (less,) = builder.apply(step("T difference(T x, T top) { return x - top; }"), [x, top])
    (powers,) = builder.apply(step("T power_of(T less) { return exp(less); }"), [less])
    (total,) = builder.apply(reduction_function("sum", dims, keepdim), [powers])
    (log,) = builder.apply(step("T log_of(T total) { return log(total); }"), [total])
    if not keepdim:
        (top,) = builder.apply(view_function("squeeze", dims), [top])
    return builder.build(builder.apply(step("T logsumexp(T log, T top) { return log + top; }"), [log, top]))


def _eager_forward(name: str, form: Form, input: Any) -> Any:  # noqa: A002
    # float16 to float32 is a kernel of its own on CUDA.
    return getattr(torch, name)(input, form[0], dtype=getattr(torch, form[1]) if form[1:] else None)


def _define(op: str) -> None:
    overload = getattr(_ATEN, op).default
    if op.endswith("data"):
        COMPOSITES[op] = Composite(
            op,
            functools.partial(_backward_steps, op),
            lambda form, grad_output, output: overload(grad_output, output, form[0], getattr(torch, form[1])),
            is_short=True,
        )
    else:
        COMPOSITES[op] = Composite(
            op,
            functools.partial(_forward_steps, op),
            functools.partial(_eager_forward, op.removeprefix("_")),
            is_short=True,
        )


for _name in ("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data"):
    _define(_name)
COMPOSITES["logsumexp"] = Composite(
    "logsumexp", _logsumexp_steps, lambda form, **given: torch.logsumexp(given["input"], *form)
)


# --- names ------------------------------------------------------------------------------------------------------------
def _bind(op: str) -> Binder:
    def bind(input: Any, dim: Any, dtype: Any = None) -> OpCall | None:  # noqa: A002 - torch's own parameter name
        if is_number(input) or type(dim) is not int or not isinstance(dtype, torch.dtype | None):
            return None
        form = (dim,) if dtype is None else (dim, str(dtype).removeprefix("torch."))
        return OpCall(composite_function(op, form), (input,))

    return bind


def _bind_functional(op: str) -> Binder:
    def bind(input: Any, dim: Any = None, _stacklevel: Any = 3, dtype: Any = None) -> OpCall | None:  # noqa: A002
        # Without a dimension torch warns.
        return _bind(op)(input, dim, dtype)

    return bind


@asking
def _bind_logsumexp(input: Any, dim: Any, keepdim: Any = False) -> OpCall | None:  # noqa: A002
    dims = (dim,) if type(dim) is int else tuple(dim) if isinstance(dim, list | tuple) else ()
    if is_number(input) or not dims or not all(type(item) is int for item in dims) or type(keepdim) is not bool:
        return None
    known = known_of(input)
    if known is None or not known.dtype.is_floating_point:
        # Integers become floats.
        input = op_call("div_number", input, 1)  # noqa: A001
    return OpCall(composite_function("logsumexp", (dims, keepdim)), (input,))


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
    return {"softmax": _bind("_softmax"), "log_softmax": _bind("_log_softmax"), "logsumexp": _bind_logsumexp}


def softmax_functions() -> dict[Any, Binder]:
    """Return the binder of each function and ATen overload that is no method as well."""
    return {
        F.softmax: _bind_functional("_softmax"),
        F.log_softmax: _bind_functional("_log_softmax"),
        F.softmin: _bind_softmin,
        torch.special.logsumexp: _bind_logsumexp,
        _ATEN.logsumexp.default: _bind_logsumexp,
        torch.special.softmax: _bind("_softmax"),
        torch.special.log_softmax: _bind("_log_softmax"),
        _ATEN.softmax.int: _bind("_softmax"),
        _ATEN.log_softmax.int: _bind("_log_softmax"),
        _ATEN._softmax.default: _bind_aten("_softmax"),
        _ATEN._log_softmax.default: _bind_aten("_log_softmax"),
        _ATEN._softmax_backward_data.default: _bind_backward("_softmax_backward_data"),
        _ATEN._log_softmax_backward_data.default: _bind_backward("_log_softmax_backward_data"),
    }
