"""Whether a peer's result is right: compared with eager torch in float64 before anything is timed."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.chains import TORCH_OPS, Chain


def compute_reference(chain: Chain, inputs: tuple[Tensor, ...]) -> Tensor:
    """Return the chain's exact result, in float64 or complex128."""
    exact = torch.complex128 if chain.dtype.is_complex else torch.float64
    result: Tensor = chain.compose(TORCH_OPS)(*(x.to(exact) for x in inputs))
    return result


def measure_error_eps(result: Tensor, reference: Tensor, dtype: torch.dtype) -> float:
    """Return the largest |result - reference| / (1 + |reference|), in units of the dtype's eps.

    A result of another dtype or shape, or one that holds a NaN, is infinitely wrong. The eps of integers is 1.
    """
    if result.dtype != dtype or result.shape != reference.shape:
        return float("inf")
    distance = (result.to(reference.dtype) - reference).abs() / (1 + reference.abs())
    eps = torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 1
    worst = float(distance.max()) / eps
    return worst if worst == worst else float("inf")


def poison_memory(reference: Tensor, dtype: torch.dtype) -> None:
    """Leave NaN (integers: 111) in memory that the next results are likely to get, so that unwritten elements show."""
    value = torch.nan if dtype.is_floating_point or dtype.is_complex else 111
    poison = [torch.full(reference.shape, value, device=reference.device).to(dtype) for _ in range(3)]
    poison.clear()
