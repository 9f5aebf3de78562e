"""How far a result is from eager torch and from the truth, and what counts as close."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

# Ops whose CPU kernel in torch may return either zero when it has both to choose from.
EITHER_ZERO = {
    "maximum", "minimum", "fmax", "fmin", "clamp", "clamp_min", "clamp_max", "softshrink",
}  # fmt: skip
# Ops that subtract: CUDA's formulas, which fuser follows on the CPU too, lose digits where torch's CPU kernels (with
# fused multiply-adds, and for gelu other polynomials) lose fewer.
CANCELS = {
    "add", "sub", "gelu", "gelu_tanh", "gelu_backward", "gelu_tanh_backward", "tanh_backward", "silu_backward",
    "sigmoid_backward", "mish_backward", "addcmul", "addcdiv", "lerp", "logaddexp",
}  # fmt: skip


def outcome(function: Callable[..., Any], *args: Any) -> Any:
    """Return a result, or the exception."""
    try:
        return function(*args)
    except Exception as error:
        return error


def order_of(value: torch.Tensor) -> torch.Tensor:
    """Map a floating tensor to integers in the order of its values: neighbours differ by 1, both zeros are 0."""
    bits = (
        value.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()]).to(torch.int64)
    )
    top = {2: 2**15, 4: 2**31, 8: 2**63}[value.element_size()]
    if top == 2**63:
        return torch.where(bits < 0, -(bits & torch.iinfo(torch.int64).max), bits)
    return torch.where(bits < 0, -(bits + top), bits)


def distance(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return how many representable numbers lie between two tensors; NaN is 0 from NaN, far from others."""
    nan, other_nan = one.isnan(), other.isnan()
    gap = (order_of(one) - order_of(other)).abs()
    far = torch.tensor(2**40)
    return torch.where(nan & other_nan, 0, torch.where(nan ^ other_nan, far, gap))


def assert_form(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    """Assert equal dtype, shape and strides."""
    assert got.dtype == wanted.dtype, f"{what}: {got.dtype} instead of {wanted.dtype}"
    assert got.shape == wanted.shape, f"{what}: {got.shape} instead of {wanted.shape}"
    assert got.stride() == wanted.stride(), f"{what}: strides {got.stride()} instead of {wanted.stride()}"


def assert_close_to_eager(
    name: str, got: torch.Tensor, wanted: torch.Tensor, truth: Any, terms: Sequence[torch.Tensor], what: str
) -> None:
    """Assert a result is as right as torch's: exact for integers and bool, else by distance from the truth.

    Args:
        name: the op's name in the table.
        got: the result.
        wanted: eager torch's.
        truth: eager torch's on float64 inputs; rounded once to the dtype, the result may be 4 ULP from it (half and
            bfloat16: 1), or as far as torch's. Where it is no tensor, torch's result stands for it.
        terms: the tensors the result was computed from: the error of an op that subtracts counts in their ULP.
        what: the call, for messages.
    """
    if not got.dtype.is_floating_point:
        assert torch.equal(got, wanted), f"{what}: {got} instead of {wanted}"
        return
    truth = truth.to(got.dtype) if isinstance(truth, torch.Tensor) and got.dtype != torch.float64 else wanted
    mine, theirs = distance(got, truth), distance(wanted, truth)
    allowed = theirs.clamp(min=4 if got.dtype in (torch.float32, torch.float64) else 1)
    if name == "softplus":
        # Half an ULP of the exponent x * beta, which is rounded, is as many of the result as the exponent is large.
        allowed = allowed + truth.double().log().abs().nan_to_num(posinf=0).clamp(max=1000).div(2).ceil().long()
    if name in CANCELS:
        sizes = [item.double().abs().nan_to_num() for item in terms]
        size = torch.stack(torch.broadcast_tensors(torch.ones(()), *sizes)).amax(0) * 2
        close = (got.double() - truth.double()).abs() <= 4 * torch.finfo(got.dtype).eps * size
        allowed = torch.where(close, mine, allowed)
    if not bool((mine <= allowed).all()):
        place = (mine - allowed).flatten().argmax()
        values = [item.flatten()[place].item() for item in torch.broadcast_tensors(*terms, got, wanted, truth)]
        raise AssertionError(f"{what}: inputs, got, eager, truth {values}: {int(mine.max())} ULP from float64")
    # torch's half and bfloat16 pow(-0, 0.5) is +0, its float32 one -0.
    if name not in EITHER_ZERO and not (name == "pow_number" and got.dtype.itemsize == 2):
        zero = (got == 0) & (wanted == 0)
        assert torch.equal(got.signbit() & zero, wanted.signbit() & zero), f"{what}: the sign of a zero"
