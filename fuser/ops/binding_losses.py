"""The names under which programs call torch's losses: each is a few steps of the tables, in the order of ATen's.

A loss that is reduced is that of each element, in a tensor of its own in eager torch, and a sum or a mean of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody uses

from fuser.ops.calls import (
    ASKING,
    Binder,
    OpCall,
    answer,
    asking,
    asking_of_numbers,
    device_type_of,
    find_numerics,
    is_constant,
    is_number,
    known_of,
)
from fuser.ops.elementary import clamp_to_numbers
from fuser.ops.loss_terms import MEAN, NONE, SUM
from fuser.ops.reductions import may_have_bits, reduction_function
from fuser.ops.table import op_call

__all__ = ["loss_functions", "loss_methods"]

_ATEN = torch.ops.aten
_REDUCTIONS = {"none": NONE, "mean": MEAN, "sum": SUM}


def _looking(call: OpCall, sizes_of: str) -> OpCall:
    # A step that looks at sizes first, as a function of torch.nn.functional does.
    return replace(call, function=replace(call.function, sizes_of=sizes_of))


def _written(name: str, *tensors: Any, **scalars: Any) -> OpCall:
    # A step that torch computes in the memory of its first tensor.
    call = op_call(name, *tensors, **scalars)
    return replace(call, function=replace(call.function, is_in_place=True))


def _sub(a: Any, b: Any) -> OpCall:
    return op_call("sub", a, b, minus_alpha=-1)


def _add(a: Any, b: Any) -> OpCall:
    return op_call("add", a, b, alpha=1)


def _reduced(call: OpCall, reduction: Any) -> OpCall | None:
    """Return a loss that is reduced as torch numbers it, or names it; None where that has no kernel."""
    name = {MEAN: "mean", SUM: "sum"}.get(reduction)
    if name is None:
        return call if type(reduction) is int and reduction == NONE else None
    return OpCall(reduction_function(name), (call,)) if _has_kernel(name, call) else None


def _has_kernel(name: str, call: OpCall) -> bool:
    # Whether what a call makes may be reduced in one.
    return find_numerics() == "fast" or may_have_bits(name, torch.float32, device_type_of(call))


def _are_floats(*items: Any) -> bool:
    # Whether they are known to be tensors of floats: torch has its own errors for others.
    known = [known_of(item) for item in items]
    return all(item is not None and item.dtype.is_floating_point for item in known)


def _are_tensors(*items: Any) -> bool:
    return not any(map(is_number, items))


def _sign(number: Any) -> int:
    # -1 also of what has none.
    if isinstance(number, complex):
        return -1
    return 1 if number > 0 else 0 if number == 0 else -1


# --- of differences ---------------------------------------------------------------------------------------------
def _terms(name: str, parameter: str = "") -> Callable[..., OpCall | None]:
    # What each element comes to, from the two tensors and what else the loss takes.
    def make(input: Any, target: Any, value: Any = None, sizes_of: str = "") -> OpCall | None:  # noqa: A002 - torch's own parameter name
        # torch has its own error for others.
        is_served = not parameter or answer(_sign, value) in ((1, 0) if name == "smooth_l1_loss" else (1,))
        if not is_served or not _are_tensors(input, target):
            return None
        return _looking(op_call(name, input, target, **({parameter: value} if parameter else {})), sizes_of)

    return make


def _absolute(input: Any, target: Any, _: Any = None, sizes_of: str = "") -> OpCall | None:  # noqa: A002
    return op_call("abs", _looking(_sub(input, target), sizes_of)) if _are_tensors(input, target) else None


_smooth_l1, _huber = _terms("smooth_l1_loss", "beta"), _terms("huber_loss", "delta")


def _bind_terms(make: Callable[..., OpCall | None]) -> Binder:
    def bind(self: Any, target: Any, reduction: Any = MEAN) -> OpCall | None:
        call = make(self, target)
        return call and _reduced(call, reduction)

    return bind


@asking_of_numbers(_sign, "beta")
def _bind_smooth_l1(self: Any, target: Any, reduction: Any = MEAN, beta: Any = 1.0) -> OpCall | None:
    call = _smooth_l1(self, target, beta)
    return call and _reduced(call, reduction)


@asking_of_numbers(_sign, "delta")
def _bind_huber(self: Any, target: Any, reduction: Any = MEAN, delta: Any = 1.0) -> OpCall | None:
    call = _huber(self, target, delta)
    return call and _reduced(call, reduction)


def _functional(call: OpCall | None, reduction: Any, size_average: Any = None, reduce: Any = None) -> OpCall | None:
    # As torch.nn.functional reduces it; None where older arguments say how, which torch warns of.
    is_known = isinstance(reduction, str) and reduction in _REDUCTIONS and size_average is None and reduce is None
    return _reduced(call, _REDUCTIONS[reduction]) if call is not None and is_known else None


def _bind_functional(name: str, make: Callable[..., OpCall | None]) -> Binder:
    def bind(
        input: Any,  # noqa: A002
        target: Any,
        size_average: Any = None,
        reduce: Any = None,
        reduction: Any = "mean",
        weight: Any = None,
    ) -> OpCall | None:
        if weight is not None:
            # Another function, which stays torch's.
            return None
        return _functional(make(input, target, None, name), reduction, size_average, reduce)

    return bind


@asking_of_numbers(_sign, "beta")
def _bind_functional_smooth_l1(
    input: Any,  # noqa: A002
    target: Any,
    size_average: Any = None,
    reduce: Any = None,
    reduction: Any = "mean",
    beta: Any = 1.0,
) -> OpCall | None:
    # Without a beta torch calls its l1_loss, which takes integers and complex numbers, too.
    make = _absolute if answer(_sign, beta) == 0 else _smooth_l1
    return _functional(make(input, target, beta, "smooth_l1_loss"), reduction, size_average, reduce)


@asking_of_numbers(_sign, "delta")
def _bind_functional_huber(
    input: Any,  # noqa: A002
    target: Any,
    reduction: Any = "mean",
    delta: Any = 1.0,
    weight: Any = None,
) -> OpCall | None:
    return None if weight is not None else _functional(_huber(input, target, delta, "huber_loss"), reduction)


def _count(item: Any) -> int | None:
    # How many elements a tensor has; None where that is not known, or there are none.
    value = getattr(item, "meta", {}).get("val")
    count = value.numel() if isinstance(value, torch.Tensor) else None
    return count if type(count) is int and count else None


def _factor(whole: float, item: Any, reduction: Any) -> float | None:
    # By what torch multiplies the gradient of each element.
    if reduction in (NONE, SUM):
        return whole
    count = _count(item) if reduction == MEAN else None
    return whole / count if count else None


def _bind_mse_backward(grad_output: Any, self: Any, target: Any, reduction: Any) -> OpCall | None:
    norm = _factor(2.0, self, reduction)
    return None if norm is None else op_call("mse_loss_backward", self, target, grad_output, norm=norm)


def _bind_smooth_l1_backward(grad_output: Any, self: Any, target: Any, reduction: Any, beta: Any) -> OpCall | None:
    norm = _factor(1.0, self, reduction)
    if norm is None or not is_constant(beta):
        return None
    return op_call("smooth_l1_loss_backward", self, target, grad_output, norm=norm, beta=beta)


def _bind_huber_backward(grad_output: Any, self: Any, target: Any, reduction: Any, delta: Any) -> OpCall | None:
    norm = _factor(1.0, self, reduction)
    if norm is None or not is_constant(delta):
        return None
    return op_call("huber_loss_backward", self, target, grad_output, norm=norm, delta=delta)


# --- of probabilities -------------------------------------------------------------------------------------------
def _bce_with_logits(sizes_of: str, self: Any, target: Any, weight: Any, pos_weight: Any) -> OpCall | None:
    if not _are_tensors(self, target, weight, pos_weight):
        return None
    likely = op_call("log_sigmoid", self)
    if pos_weight is not None:
        likely = _written("mul", likely, _add(op_call("mul", _sub(pos_weight, 1), target), 1))
    unlikely = _looking(_written("mul", _sub(1, target), self), sizes_of)
    loss = _written("sub", unlikely, likely, minus_alpha=-1)
    return loss if weight is None else _written("mul", loss, weight)


def _bind_bce_with_logits(
    self: Any, target: Any, weight: Any = None, pos_weight: Any = None, reduction: Any = MEAN
) -> OpCall | None:
    call = _bce_with_logits("", self, target, weight, pos_weight)
    return call and _reduced(call, reduction)


def _bind_functional_bce_with_logits(
    input: Any,  # noqa: A002
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: Any = "mean",
    pos_weight: Any = None,
) -> OpCall | None:
    call = _bce_with_logits("binary_cross_entropy_with_logits", input, target, weight, pos_weight)
    return _functional(call, reduction, size_average, reduce)


def _bce(sizes_of: str, self: Any, target: Any, weight: Any) -> OpCall | None:
    # On the CPU torch looks at elements, and refuses what is no probability.
    call = _looking(op_call("binary_cross_entropy", self, target), sizes_of)
    if device_type_of(call) != "cuda" or not _are_tensors(self, target, weight):
        return None
    return call if weight is None else _written("mul", call, weight)


def _bind_bce(self: Any, target: Any, weight: Any = None, reduction: Any = MEAN) -> OpCall | None:
    call = _bce("", self, target, weight)
    return call and _reduced(call, reduction)


def _bind_functional_bce(
    input: Any,  # noqa: A002
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: Any = "mean",
) -> OpCall | None:
    return _functional(_bce("binary_cross_entropy", input, target, weight), reduction, size_average, reduce)


def _bind_bce_backward(
    grad_output: Any, self: Any, target: Any, weight: Any = None, reduction: Any = MEAN
) -> OpCall | None:
    call = op_call("binary_cross_entropy_backward", self, target, grad_output)
    if weight is not None:
        call = _written("mul", call, weight)
    if reduction != MEAN:
        return call if reduction in (NONE, SUM) else None
    count = _count(self)
    return op_call("div_number", call, count) if count else None


def _bind_soft_margin(self: Any, target: Any, reduction: Any = MEAN) -> OpCall | None:
    if not _are_tensors(self, target):
        return None
    power = _written("exp", _written("mul", op_call("neg", self), target))
    return _reduced(_written("log1p", power), reduction)


def _bind_soft_margin_backward(grad_output: Any, self: Any, target: Any, reduction: Any) -> OpCall | None:
    norm = _factor(1.0, self, reduction)
    value: Any = getattr(self, "meta", {}).get("val")
    if norm is None:
        return None
    if norm != 1 and value.device.type == "cpu":
        # ATen multiplies in place, which takes the number in the dtype there.
        norm = torch.tensor(norm, dtype=value.dtype).item()
    power = op_call("exp", op_call("mul", op_call("neg", target), self))
    scaled = op_call("mul", op_call("mul", target, power), -norm)
    return op_call("mul", op_call("div", scaled, _add(power, 1)), grad_output)


@asking
def _bind_log_sigmoid(self: Any) -> OpCall | None:
    # On the CPU its result lies row-major.
    known, call = known_of(self), op_call("log_sigmoid", self)
    if known is None:
        return None
    is_on_cpu = known.device_type == "cpu"
    return replace(call, function=replace(call.function, is_contiguous=True)) if is_on_cpu else call


@asking
def _bind_log_sigmoid_forward(self: Any) -> OpCall | None:
    # What it keeps for its gradient on the CPU, that computes again here.
    call = _bind_log_sigmoid(self)
    return call and replace(call, items=(0, -1))


def _bind_xlogy(self: Any, other: Any) -> OpCall | None:
    return op_call("xlogy", self, other) if _are_tensors(self, other) else None


@asking
def _bind_kl_div(self: Any, target: Any, reduction: Any = MEAN, *, log_target: Any = False) -> OpCall | None:
    if not _are_floats(self, target) or not isinstance(log_target, bool):
        return None
    if log_target:
        return _reduced(op_call("mul", op_call("exp", target), _sub(target, self)), reduction)
    return _reduced(_sub(op_call("xlogy", target, target), op_call("mul", target, self)), reduction)


@asking
def _bind_poisson_nll(input: Any, target: Any, log_input: Any, full: Any, eps: Any, reduction: Any) -> OpCall | None:  # noqa: A002
    if not _are_floats(input, target) or not (isinstance(log_input, bool) and isinstance(full, bool)):
        return None
    if log_input:
        loss = _sub(op_call("exp", input), op_call("mul", target, input))
    else:
        loss = _sub(input, op_call("mul", target, op_call("log", _add(input, eps))))
    if full:
        # Stirling's formula.
        root = op_call("mul", op_call("log", op_call("mul", target, 2 * math.pi)), 0.5)
        term = _add(_sub(op_call("mul", target, op_call("log", target)), target), root)
        loss = _written("add", loss, op_call("masked_fill", term, op_call("le", target, 1), value=0), alpha=1)
    return _reduced(loss, reduction)


# --- of margins -------------------------------------------------------------------------------------------------
def _at_least_zero(call: OpCall) -> OpCall:
    return OpCall(clamp_to_numbers("clamp_min"), (call, 0))


def _where(target: Any, comparison: str, number: int, call: Any) -> OpCall:
    return op_call("where", op_call(comparison, target, number), call, 0.0)


def _is_exact(number: Any) -> bool:
    # Whether all dtypes of floats hold it: bfloat16 has eight bits, and float16 the least range.
    if isinstance(number, complex) or not abs(number) <= 65504:
        return False
    return bool((math.frexp(number)[0] * 2**8).is_integer() and number * 2**24 % 1 == 0)


@asking
@asking_of_numbers(_is_exact, "margin")
def _bind_hinge_embedding(self: Any, target: Any, margin: Any = 1.0, reduction: Any = MEAN) -> OpCall | None:
    # In eager torch the margin is a tensor, which holds it as its dtype does.
    if not _are_floats(self) or not _are_tensors(target) or not answer(_is_exact, margin):
        return None
    apart = _where(target, "ne", 1, _at_least_zero(_sub(margin, self)))
    return _reduced(_add(apart, _where(target, "ne", -1, self)), reduction)


def _bind_margin_ranking(
    input1: Any, input2: Any, target: Any, margin: Any = 0.0, reduction: Any = MEAN
) -> OpCall | None:
    if not _are_tensors(input1, input2, target):
        return None
    scaled = op_call("mul", op_call("neg", target), _sub(input1, input2))
    return _reduced(_at_least_zero(_add(scaled, margin)), reduction)


# As ATen has it, a float.
_EPSILON = 9.999999960041972e-13


@asking
def _bind_cosine_embedding(
    input1: Any, input2: Any, target: Any, margin: Any = 0.0, reduction: Any = MEAN
) -> OpCall | None:
    known = [known_of(item) for item in (input1, input2, target)]
    if not _are_floats(input1, input2) or known[2] is None or not is_number(margin):
        return None
    dim = known[2].rank
    if [item and item.rank for item in known] != [dim + 1, dim + 1, dim] or dim > 1:
        # torch has its own errors for it.
        return None
    pairs = ((input1, input2), (input1, input1), (input2, input2))
    products = [_along(op_call("mul", *pair), "sum", dim) for pair in pairs]
    if None in products:
        return None
    product, *squares = products
    sizes = op_call("sqrt", op_call("mul", *(_add(item, _EPSILON) for item in squares)))
    cosine = op_call("div", product, sizes)
    apart = _where(target, "eq", -1, _at_least_zero(_sub(cosine, margin)))
    return _reduced(_add(_where(target, "eq", 1, _sub(1, cosine)), apart), reduction)


def _along(call: OpCall, name: str, dim: int, *, keepdim: bool = False) -> OpCall | None:
    # A reduction along one dimension; None where it has no kernel.
    return OpCall(reduction_function(name, (dim,), keepdim), (call,)) if _has_kernel(name, call) else None


@asking
def _bind_pairwise_distance(x1: Any, x2: Any, p: Any = 2, eps: Any = 1e-06, keepdim: Any = False) -> OpCall | None:
    known = [known_of(item) for item in (x1, x2)]
    rank = max(item.rank if item else 0 for item in known)
    if not _are_floats(x1, x2) or not is_constant(p) or p not in _NORMS or not isinstance(keepdim, bool) or not rank:
        return None
    return _along(_add(_sub(x1, x2), eps), f"norm_{_NORMS[p]}", rank - 1, keepdim=keepdim)


_NORMS: dict[complex, float] = {0: 0, 1: 1, 2: 2, math.inf: math.inf, -math.inf: -math.inf}


@asking
def _bind_triplet_margin(
    anchor: Any,
    positive: Any,
    negative: Any,
    margin: Any = 1.0,
    p: Any = 2.0,
    eps: Any = 1e-06,
    swap: Any = False,
    reduction: Any = MEAN,
) -> OpCall | None:
    known = [known_of(item) for item in (anchor, positive, negative)]
    if len({item and item.rank for item in known}) != 1 or not isinstance(swap, bool):
        return None
    near = _bind_pairwise_distance(anchor, positive, p, eps)
    far = _bind_pairwise_distance(anchor, negative, p, eps)
    other = _bind_pairwise_distance(positive, negative, p, eps) if swap else far
    if near is None or far is None or other is None:
        return None
    far = op_call("minimum", far, other) if swap else far
    return _reduced(_at_least_zero(_sub(_add(near, margin), far)), reduction)


def _outside_autocast(bind: Binder) -> Binder:
    # There torch casts what its functions are given, before it calls what graphs of ATen have.
    @functools.wraps(bind)
    def bind_call(*args: Any, **kwargs: Any) -> OpCall | None:
        is_cast = torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
        return None if is_cast else bind(*args, **kwargs)

    return asking(bind_call) if bind in ASKING else bind_call


def loss_methods() -> dict[str, Binder]:
    """Return the binder of each method of tensors."""
    return {"xlogy": _bind_xlogy}


@functools.cache
def loss_functions() -> dict[Any, Binder]:
    """Return the binder of each function and ATen overload."""
    differences = {"mse_loss": _terms("mse_loss"), "l1_loss": _absolute}
    plain: dict[str, Binder] = {
        **{name: _bind_terms(make) for name, make in differences.items()},
        "smooth_l1_loss": _bind_smooth_l1,
        "huber_loss": _bind_huber,
        "binary_cross_entropy_with_logits": _bind_bce_with_logits,
        "binary_cross_entropy": _bind_bce,
        "soft_margin_loss": _bind_soft_margin,
        "log_sigmoid": _bind_log_sigmoid,
        "kl_div": _bind_kl_div,
        "poisson_nll_loss": _bind_poisson_nll,
        "hinge_embedding_loss": _bind_hinge_embedding,
        "margin_ranking_loss": _bind_margin_ranking,
        "cosine_embedding_loss": _bind_cosine_embedding,
        "pairwise_distance": _bind_pairwise_distance,
        "triplet_margin_loss": _bind_triplet_margin,
    }
    backward: dict[str, Binder] = {
        "mse_loss": _bind_mse_backward,
        "smooth_l1_loss": _bind_smooth_l1_backward,
        "huber_loss": _bind_huber_backward,
        "binary_cross_entropy": _bind_bce_backward,
        "soft_margin_loss": _bind_soft_margin_backward,
    }
    functional: dict[Any, Binder] = {
        **{getattr(F, name): _bind_functional(name, make) for name, make in differences.items()},
        F.smooth_l1_loss: _bind_functional_smooth_l1,
        F.huber_loss: _bind_functional_huber,
        F.binary_cross_entropy_with_logits: _bind_functional_bce_with_logits,
        F.binary_cross_entropy: _bind_functional_bce,
        torch.special.xlogy: _bind_xlogy,
    }
    # What those call.
    for home in (torch, torch._C._nn):
        functional |= {getattr(home, name): bind for name, bind in plain.items() if hasattr(home, name)}
    return {
        **{function: _outside_autocast(bind) for function, bind in functional.items()},
        **{getattr(_ATEN, name).default: bind for name, bind in plain.items()},
        **{getattr(_ATEN, f"{name}_backward").default: bind for name, bind in backward.items()},
        _ATEN.log_sigmoid_forward.default: _bind_log_sigmoid_forward,
        _ATEN.xlogy.Tensor: _bind_xlogy,
    }
