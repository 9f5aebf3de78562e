"""One table of functors with eager references, and the comparisons: what the tests of kernels are driven by."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from functor_basics import BASICS
from functor_case import BOOL, FLOATS, INTS, Case
from functor_formulas import FORMULAS
from functor_integers import INTEGERS
from functor_numerics import NUMERICS
from functor_prelude import PRELUDE
from functor_special import SPECIAL

import fuser

__all__ = [
    "BASICS",
    "BOOL",
    "BY_NAME",
    "CASES",
    "FLOATS",
    "INTS",
    "SPECIAL_VALUES",
    "Case",
    "as_tuple",
    "assert_accurate",
    "assert_same",
    "compute_epsilon",
    "draw",
    "expected_of",
    "functor",
    "inputs_of",
    "poison",
    "same_bits",
    "special_tensor",
    "unpoison",
]

CASES: tuple[Case, ...] = (*BASICS, *SPECIAL, *NUMERICS, *FORMULAS, *PRELUDE, *INTEGERS)

BY_NAME = {case.name: case for case in CASES}


@cache
def functor(name: str) -> fuser.JitFunction:
    """Return the one JitFunction of a case: tests that share it share its kernels."""
    return BY_NAME[name].build()


def draw(
    shape: Sequence[int],
    dtype: torch.dtype,
    domain: tuple[float, float] = (-3.0, 3.0),
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> torch.Tensor:
    """Return a contiguous tensor of random values of ``domain``; the same for the same arguments on every device."""
    generator = torch.Generator().manual_seed(seed)
    low, high = domain
    if dtype is torch.bool:
        values = torch.rand(tuple(shape), generator=generator) < 0.5
    elif dtype.is_floating_point:
        values = torch.rand(tuple(shape), generator=generator, dtype=torch.float64) * (high - low) + low
    else:
        info = torch.iinfo(dtype)
        low, high = max(int(low), info.min), min(int(high), info.max)
        values = torch.randint(low, high + 1, tuple(shape), generator=generator)
    return values.to(dtype).to(device)


def inputs_of(case: Case, dtype: torch.dtype, shape: Sequence[int], device: str = "cpu") -> list[torch.Tensor]:
    """Return one tensor per tensor parameter."""
    return [draw(shape, dtype, case.domain, seed, device) for seed in range(case.tensors)]


def as_tuple(result: Any) -> tuple[Any, ...]:
    """Return the outputs of a functor or a reference as a tuple."""
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def expected_of(case: Case, inputs: Sequence[Any], dtype: torch.dtype, **scalars: Any) -> tuple[torch.Tensor, ...]:
    """Return the reference's results in float64 (integers and bool: wrapped to ``dtype``)."""
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    # What a kernel sees: the input in the common dtype's compute type; all convert exactly, or are drawn so.
    tensors = [torch.as_tensor(item).to(dtype).to(wide).cpu() for item in inputs]
    found = as_tuple(case.reference(*tensors, **{**case.scalars, **scalars}))
    return found if dtype.is_floating_point else tuple(item.to(dtype) for item in found)


def compute_epsilon(dtype: torch.dtype) -> float:
    """Return the machine epsilon of the type that functors compute in."""
    return torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).eps


def assert_accurate(got: torch.Tensor, wanted: torch.Tensor, ulps: float, what: str = "") -> None:
    """Assert ``got`` is ``wanted`` (float64) within ``ulps`` of its compute type, and half a unit of its own dtype.

    The error counts relative to the larger of the result and 1; an infinity or NaN must be the same.
    """
    got = got.cpu()
    if not got.dtype.is_floating_point:
        assert torch.equal(got, wanted.to(got.dtype).expand(got.shape)), f"{what}: {got} != {wanted}"
        return
    wanted = wanted.to(torch.float64).expand(got.shape)
    finite = wanted.isfinite()
    assert torch.equal(got.double()[~finite].nan_to_num(nan=1.5), wanted[~finite].nan_to_num(nan=1.5)), what
    own = torch.finfo(got.dtype)
    bound = ulps * compute_epsilon(got.dtype) * wanted.abs().clamp(min=1.0)
    bound = bound + own.eps / 2 * wanted.abs() + (own.smallest_normal * own.eps if own.bits < 32 else 0)
    error = (got.double() - wanted).abs()
    # A NaN in place of a number is beyond any bound.
    assert bool((error <= bound)[finite].all()), (
        f"{what}: off by {error[finite].max()} where {bound[finite].max()} is allowed"
    )


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype hold the same values, signs of zeros included; any NaN equals any NaN."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if not one.dtype.is_floating_point:
        return torch.equal(one, other)
    nan = one.isnan()
    if not torch.equal(nan, other.isnan()):
        return False
    return torch.equal(one.masked_fill(nan, 0), other.masked_fill(nan, 0)) and torch.equal(
        one.masked_fill(nan, 0).signbit(), other.masked_fill(nan, 0).signbit()
    )


def assert_same(got: Any, wanted: Any, what: str = "") -> None:
    """Assert equal structure, dtype, shape, strides and bits."""
    got, wanted = as_tuple(got), as_tuple(wanted)
    assert len(got) == len(wanted), what
    for place, (one, other) in enumerate(zip(got, wanted, strict=True)):
        where = f"{what} output {place}"
        assert one.dtype == other.dtype, f"{where}: {one.dtype} instead of {other.dtype}"
        assert one.shape == other.shape, f"{where}: {one.shape} instead of {other.shape}"
        assert one.stride() == other.stride(), f"{where}: strides {one.stride()} instead of {other.stride()}"
        if not same_bits(one, other):
            differs = (one != other) & ~(one.isnan() & other.isnan()) if one.dtype.is_floating_point else one != other
            places = differs.nonzero()[:3].tolist()
            raise AssertionError(f"{where}: {int(differs.sum())} of {one.numel()} values differ, first at {places}")


SPECIAL_VALUES: Iterable[float] = (
    math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 0.5, 2.0, -2.5, 3.0, 1e-40, -1e-40, 5e-324,
    1e38, -1e38, 88.5, -88.5,
)  # fmt: skip


def special_tensor(dtype: torch.dtype) -> torch.Tensor:
    """Return NaN, infinities, zeros, denormals and extremes of a dtype; integers: their extremes and small ones."""
    if dtype is torch.bool:
        return torch.tensor([False, True])
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        extra = [info.max, info.min, info.tiny, info.smallest_normal * info.eps, 1 + info.eps]
        return torch.tensor([*SPECIAL_VALUES, *extra], dtype=torch.float64).to(dtype)
    bounds = torch.iinfo(dtype)
    return torch.tensor(
        [bounds.min, bounds.max, bounds.max - 1, 0, 1, 2, 3, 7, *([-1, -2] if bounds.min else [])], dtype=dtype
    )


def poison() -> None:
    """Make torch fill every new tensor with NaN (integers: the largest one), so that what no kernel writes shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True


def unpoison() -> None:
    """Undo ``poison``."""
    torch.use_deterministic_algorithms(False)
