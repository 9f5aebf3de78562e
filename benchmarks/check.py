"""Whether a peer's result is right: compared with eager torch in float64 before anything is timed."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.chains import TORCH_OPS, Chain


def compute_reference(chain: Chain, inputs: tuple[Tensor, ...]) -> Tensor:
    """Return the chain's exact result, in float64."""
    result: Tensor = chain.compose(TORCH_OPS)(*(x.double() for x in inputs))
    return result


def measure_error_eps(result: Tensor, reference: Tensor, dtype: torch.dtype) -> float:
    """Return the largest |result - reference| / (1 + |reference|), in units of the dtype's eps.

    A result of another dtype or shape, or one that holds a NaN, is infinitely wrong.
    """
    if result.dtype != dtype or result.shape != reference.shape:
        return float("inf")
    distance = (result.double() - reference).abs_() / (1 + reference.abs())
    worst = float(distance.max()) / torch.finfo(dtype).eps
    return worst if worst == worst else float("inf")


def poison_memory(reference: Tensor, dtype: torch.dtype) -> None:
    """Leave NaN in memory that the next results are likely to get, so that unwritten elements show."""
    poison = [torch.full(reference.shape, torch.nan, dtype=dtype, device=reference.device) for _ in range(3)]
    poison.clear()
