"""Derivatives of every functor and op of the tables, in float64, against finite differences and torch's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functors import CASES, Case, as_tuple, draw, functor, inputs_of

import fuser
from fuser.errors import GradientError
from fuser.ops import OPS

pytestmark = pytest.mark.cpu

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.cpu),
    pytest.param("cuda", marks=pytest.mark.cuda),
]
IN_FLOAT64 = [case for case in CASES if torch.float64 in case.dtypes]
DIFFERENTIABLE = [case for case in IN_FLOAT64 if case.is_differentiable]


def leaves(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(x.clone().requires_grad_(x.is_floating_point() or x.is_complex()) for x in tensors)


def continuous(function: Callable[..., Any]) -> Callable[..., Any]:
    # gradcheck takes no integral outputs.
    return lambda *args: tuple(x for x in as_tuple(function(*args)) if x.is_floating_point() or x.is_complex())


# The text of every derivative is checked without a compiler in test_derivative.py; here a sixth of them is compiled.


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.one_in(14)
@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=str)
def test_functor(case: Case, device: str) -> None:
    function = continuous(functor(case.name))
    # The interpreter launches torch's kernels one by one, a hundred thousand for three elements of incomplete_gamma:
    # no compute-sanitizer ends on those.
    count = 1 if device == "cuda" and case.depends_on_data else 3
    inputs = leaves(inputs_of(case, torch.float64, (count,), device))
    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=device == "cpu")
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("case", [case for case in IN_FLOAT64 if not case.is_differentiable], ids=str)
def test_a_functor_without_a_derivative_says_so(case: Case) -> None:
    inputs = leaves(inputs_of(case, torch.float64, (3,)))
    with pytest.raises(GradientError, match=case.build().function.functor.entry):
        functor(case.name)(*inputs)
    with torch.no_grad():
        assert not any(x.requires_grad for x in as_tuple(functor(case.name)(*inputs)))


SPECIALS = (0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, torch.inf, -torch.inf, torch.nan)
NUMBERS: dict[str, dict[str, Any]] = {
    "add": {"alpha": 0.5},
    "sub": {"minus_alpha": -0.5},
    "threshold_backward": {"threshold": 0.25},
    "addcmul": {"value": 0.5},
    "addcdiv": {"value": -0.5},
    "masked_fill": {"value": 0.25},
    "leaky_relu": {"negative_slope": 0.2},
    "elu": {"alpha": 0.5, "scale": 1.5, "input_scale": 0.75},
    "softplus": {"beta": 1.5, "threshold": 2.0},
    "hardtanh": {"min_val": -1.0, "max_val": 0.5},
    "elu_backward": {"alpha": 0.5, "scale": 1.5, "input_scale": 0.75},
    "elu_result_backward": {"alpha": 0.5, "input_scale": 0.75},
    "hardtanh_backward": {"min_val": -1.0, "max_val": 0.5},
    "leaky_relu_backward": {"negative_slope": 0.2},
    "softplus_backward": {"beta": 1.5, "threshold": 2.0},
    "hardshrink": {"lambd": 0.25},
    "softshrink": {"lambd": 0.25},
    "shrink_backward": {"lambd": 0.25},
    "threshold": {"threshold": 0.25, "value": -0.5},
    "native_dropout_backward": {"scale": 1.25},
    "nan_to_num": {"nan": 0.25, "posinf": 2.0, "neginf": -2.0},
    "tril": {"diagonal": 1},
    "triu": {"diagonal": 1},
    "mse_loss_backward": {"norm": 2.0},
    "smooth_l1_loss": {"beta": 0.5},
    "smooth_l1_loss_backward": {"norm": 1.0, "beta": 0.5},
    "huber_loss": {"delta": 0.5},
    "huber_loss_backward": {"norm": 1.0, "delta": 0.5},
}


def op_function(name: str) -> Callable[..., Any]:
    op = OPS[name]
    function = fuser.JitFunction(op.function, NUMBERS.get(name, {}))
    return lambda *args: function(*args)


DOMAINS = {
    **dict.fromkeys(("log", "log2", "log10", "sqrt", "rsqrt", "pow", "pow_number", "log1p"), (0.3, 2.0)),
    **dict.fromkeys(("asin", "acos", "atanh"), (-0.9, 0.9)),
    "acosh": (1.1, 3.0),
    **dict.fromkeys(("logit_backward", "binary_cross_entropy", "binary_cross_entropy_backward"), (0.1, 0.9)),
    "xlogy": (0.3, 2.0),
}


def op_inputs(name: str, dtype: torch.dtype = torch.float64, device: str = "cpu") -> list[torch.Tensor]:
    domain = DOMAINS.get(name, (-2.0, 2.0))
    parameters = OPS[name].function.functor.tensors
    found = []
    for place, parameter in enumerate(parameters):
        is_condition = parameter.type == "bool"
        found.append(draw((3,), torch.bool if is_condition else dtype, domain, seed=place + 1, device=device))
    return found


# Comparisons have none; a conversion is tested in test_autograd.py. torch has none for all inputs of these.
UNDIFFERENTIATED = {"heaviside", "log_sigmoid_backward"}
HAVE_GRADIENT = [
    name
    for name, op in OPS.items()
    if not op.function.out_dtypes and "float" in op.kinds and name not in UNDIFFERENTIATED
]


def alike() -> list[tuple[str, ...]]:
    """Return the ops in parts that take the same inputs: the ops of a part are one kernel."""
    found: dict[Any, list[str]] = {}
    for name in HAVE_GRADIENT:
        functor = OPS[name].function.functor
        types = tuple(item.type for item in functor.tensors)
        # What rounds a step has no translation to torch: a group of it may run as torch's ops.
        found.setdefault((DOMAINS.get(name), types, "fuser_" in functor.source), []).append(name)
    return [tuple(names[begin : begin + 6]) for names in found.values() for begin in range(0, len(names), 6)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.one_in(10)
@pytest.mark.parametrize("names", map("+".join, alike()), ids=str)
def test_ops(names: str, device: str) -> None:
    builder = fuser.GroupBuilder()
    inputs = leaves(op_inputs(names.split("+")[0], device=device))
    places = [builder.add_input(f"x{place}") for place in range(len(inputs))]
    results: list[int] = []
    for name in names.split("+"):
        numbers = NUMBERS.get(name, {}).items()
        scalars = [builder.add_input(f"{name}_{key}", is_scalar=True, default=value) for key, value in numbers]
        results += builder.apply(OPS[name].function, places, scalars)
    key = fuser.register_fusion(builder.build(results))
    function = lambda *args: tuple(fuser.run_fusion(key, args))  # noqa: E731
    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=device == "cpu")
    assert torch.autograd.gradgradcheck(function, inputs)


# torch has no second derivative of these activations, an inexact one of the loss, and triangles take matrices:
# test_derivative.py has them.
INCOMPARABLE = {f"{name}_backward" for name in ("silu", "hardsigmoid", "mish", "logit", "binary_cross_entropy")}
INCOMPARABLE |= {"tril", "triu"}
COMPARABLE = [name for name in HAVE_GRADIENT if name not in INCOMPARABLE]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", COMPARABLE, ids=str)
def test_op_at_special_values(name: str) -> None:
    tensors = op_inputs(name)
    # What activations' derivatives are given is finite.
    values = [x for x in SPECIALS if "_backward" not in name or abs(x) <= 3]
    if name == "acosh":
        values = [x for x in values if not x < 1]
    if name == "binary_cross_entropy":
        # Of probabilities.
        values = [x for x in values if 0 < x < 1]
    if name in {"copysign", "remainder"}:
        # torch's own formulas give NaN for infinity, and sgn gives none for NaN.
        values = [x for x in values if math.isfinite(x)]
    grid = torch.tensor(values, dtype=torch.float64)
    count = sum(x.dtype is torch.float64 for x in tensors)
    columns = iter(torch.cartesian_prod(*[grid] * count).reshape(-1, count).unbind(1))
    given = [next(columns).contiguous() if x.dtype is torch.float64 else None for x in tensors]
    length = len(grid) ** count
    mask = torch.arange(length) % 3 == 0
    ours = leaves([mask if x is None else x for x in given])
    theirs = leaves([mask if x is None else x for x in given])
    if name == "pow_number":
        # The exponent is a number.
        ours, theirs = (ours[0], ours[1].detach()), (theirs[0], theirs[1].detach())
    got = op_function(name)(*ours)
    wanted = OPS[name].eager(*theirs, **NUMBERS.get(name, {}))
    weight = draw((length,), torch.float64, (0.5, 1.5), seed=9)
    got.backward(weight)
    wanted.backward(weight)
    for mine, torchs in zip(ours, theirs, strict=True):
        if mine.requires_grad:
            one, other = mine.grad, torchs.grad
            assert one is not None
            other = torch.zeros_like(one) if other is None else other
            # torch has the sixth of hardsigmoid's derivative in float32.
            same = torch.isclose(one, other, rtol=1e-7 if name == "hardsigmoid" else 1e-12, atol=1e-14, equal_nan=True)
            rows = [tuple(x[i].item() for x in given if x is not None) for i in range(length) if not same[i]]
            found = [(one[i].item(), other[i].item()) for i in range(length) if not same[i]]
            assert not rows, list(zip(rows, found, strict=True))[:12]
