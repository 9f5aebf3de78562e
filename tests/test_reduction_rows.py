"""torch's reductions, row by row, against eager torch: values, dtypes, strides and exceptions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from accuracy import outcome

import fuser

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*degrees of freedom", "ignore:.*runs in eager torch", "ignore:Casting complex")
]

# By name: what is called with a tensor. Reductions follow pointwise work, without which torch's own kernel serves.
PLACES: dict[str, Callable[[torch.Tensor], Any]] = {
    "argmax": lambda x: torch.argmax(x * 1, 1),
    "argmax of all": lambda x: (x * 1).argmax(),
    "argmax, kept": lambda x: (x * 1).argmax(keepdim=True),
    "argmin": lambda x: (x * 1).argmin(dim=0, keepdim=True),
    "max": lambda x: (lambda found: (found[0], found[1]))(torch.max(x * 1, 1)),
    "max, kept": lambda x: (x * 1).max(0, keepdim=True).values,
    "min": lambda x: (x * 1).min(-1).indices,
    "max between": lambda x: (lambda top: (top.values, top.indices, x - top.values[:, None]))((x * 1).max(1)),
    "max as a tuple": lambda x: (x * 1).max(1),
    "max of two": lambda x: torch.max(x * 1, x),
    "aminmax": lambda x: (lambda found: (found.max - found.min, found.min))(torch.aminmax(x * 1, dim=1)),
    "aminmax of all": lambda x: (lambda found: (found[0], found[1]))((x * 1).aminmax()),
    "norm inf": lambda x: torch.linalg.vector_norm(x * 1, math.inf, 1),
    "norm -inf": lambda x: torch.linalg.vector_norm(x * 1, -math.inf),
}
SUMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "var": lambda x: torch.var(x * 1, 1),
    "var, biased": lambda x: (x * 1).var(0, unbiased=False),
    "var of all": lambda x: (x * 1).var(False),
    "std": lambda x: (x * 1).std((0, 1), correction=0, keepdim=True),
    "std, corrected": lambda x: torch.std(x * 1, -1, correction=1.5),
    "var_mean": lambda x: (lambda found: (found[0], found[1]))(torch.var_mean(x * 1, 1)),
    "std_mean": lambda x: (lambda found: (found[0], found[1]))(torch.std_mean(x * 1, (0, 1), correction=0)),
    "normalised": lambda x: (lambda v: (x - v[1]) / v[0])(torch.var_mean(x * 1, -1, keepdim=True, unbiased=False)),
    "norm": lambda x: (x * 1).norm(),
    "norm 1": lambda x: torch.norm(x * 1, 1, 1),
    "norm 2": lambda x: (x * 1).norm(2, -1, True),
    "norm 0": lambda x: torch.linalg.vector_norm(x * 1, 0, dim=(0,)),
    "norm 3": lambda x: (x * 1).norm(3, 1),
    "logsumexp": lambda x: torch.logsumexp(x * 1, 1),
    "logsumexp, kept": lambda x: (x * 1).logsumexp((0, 1), keepdim=True),
    "logsumexp of none": lambda x: torch.logsumexp(x * 1, ()),
    "nansum": lambda x: torch.nansum(x * 1, 1),
    "nansum of all": lambda x: (x * 1).nansum(),
    "softmax": lambda x: torch.softmax(x * 1, 1),
    "softmax of rows": lambda x: F.softmax(x * 1, dim=0),
    "softmax, wider": lambda x: (x * 1).softmax(-1, dtype=torch.float64) * 2,
    "log_softmax": lambda x: F.log_softmax(x * 1, -1),
    "log_softmax of columns": lambda x: (x * 1).log_softmax(0),
    "softmin": lambda x: F.softmin(x * 1, dim=1),
    "softmax of a transposed tensor": lambda x: (x * 1).t().softmax(0),
    "softmax out of range": lambda x: (x * 1).softmax(3),
}
DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
SHAPES = ((5, 7), (4, 0), (0, 4), (3, 1), (33, 300))


def draw(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Return numbers with ties, and in a small tensor with all that is special."""
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    if dtype.is_floating_point and shape == (5, 7):
        x[0, 1] = x[0, 3] = math.nan
        x[1, 2] = math.inf
        x[2] = -math.inf
        x[3, 3] = x[3, 4] = 9
        x[4] = 0
    return x.to(device)


def check(form: Callable[..., Any], x: torch.Tensor, *, is_exact: bool, what: str) -> None:
    """Compare a fused function with eager torch."""
    got, wanted = outcome(fuser.fuse(form), x), outcome(form, x)
    if isinstance(wanted, Exception) or isinstance(got, Exception):
        assert isinstance(got, type(wanted)), f"{what}: {got!r} instead of {wanted!r}"
        assert str(wanted)[:40] in str(got), f"{what}: {got!r} instead of {wanted!r}"
        return
    pairs = [(got, wanted)] if isinstance(wanted, torch.Tensor) else list(zip(got, wanted, strict=True))
    narrow = x.dtype in (torch.float16, torch.bfloat16)
    tolerances = (
        {"rtol": 0, "atol": 0} if is_exact else {"rtol": 1e-2, "atol": 1e-2} if narrow else {"rtol": 1e-5, "atol": 1e-5}
    )
    for one, other in pairs:
        torch.testing.assert_close(
            one, other, **tolerances, equal_nan=True, check_stride=True, msg=lambda text: f"{what}: {text}"
        )


def check_all(
    forms: dict[str, Callable[..., Any]],
    device: str,
    *,
    is_exact: bool,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    shapes: tuple[tuple[int, ...], ...] = SHAPES,
) -> None:
    for name, form in forms.items():
        for dtype in dtypes:
            for shape in shapes:
                check(form, draw(shape, dtype, device), is_exact=is_exact, what=f"{name} of {dtype} {shape}")


# One of each kind; the others take as long again.
FEW = ("argmax", "max between", "aminmax", "norm -inf", "var_mean", "logsumexp", "softmax", "log_softmax of columns")


@pytest.mark.one_in(2)
@pytest.mark.cpu
@pytest.mark.parametrize("name", FEW)
def test_rows_are_torchs(name: str) -> None:
    is_place = name in PLACES
    with fuser.config.patch(numerics="strict" if is_place else "fast"):
        dtypes = (torch.bfloat16, torch.int32) if is_place else (torch.bfloat16,)
        check_all({name: (PLACES | SUMS)[name]}, "cpu", is_exact=is_place, dtypes=dtypes, shapes=((5, 7), (4, 0)))


@pytest.mark.cpu
@pytest.mark.parametrize("numerics", ["strict", "fast"])
def test_the_variance_beside_an_infinity_is_none_wherever_it_is(numerics: str) -> None:
    @fuser.fuse
    def spread(x: torch.Tensor) -> torch.Tensor:
        return torch.var(x * 1, 1, correction=0)

    with fuser.config.patch(numerics=numerics):
        for length in (1, 4, 7):
            assert spread(torch.ones(length, length).fill_diagonal_(math.inf)).isnan().all()


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.parametrize("numerics", ["strict", "fast"])
def test_places_are_torchs_in_any_order(numerics: str) -> None:
    with fuser.config.patch(numerics=numerics):
        check_all(PLACES, "cpu", is_exact=True)


@pytest.mark.cpu
@pytest.mark.slow
def test_sums_in_fast_numerics() -> None:
    with fuser.config.patch(numerics="fast"):
        check_all(SUMS, "cpu", is_exact=False)


@pytest.mark.cuda
@pytest.mark.parametrize("numerics", ["strict", "fast"])
@pytest.mark.parametrize("name", [*PLACES, *SUMS])
def test_on_a_gpu(name: str, numerics: str) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.int32)
    with fuser.config.patch(numerics=numerics):
        is_exact = numerics == "strict" or name in PLACES
        check_all(
            {name: (PLACES | SUMS)[name]}, "cuda", is_exact=is_exact, dtypes=dtypes, shapes=SHAPES[::2] + SHAPES[1:2]
        )


# --- accuracy ---------------------------------------------------------------------------------------------------------
@pytest.mark.cpu
@pytest.mark.parametrize("size", [1e-30, 1e25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_spreads_of_numbers_whose_squares_float32_lacks(dtype: torch.dtype, size: float) -> None:
    x = (torch.randn(3, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * size).to(dtype)
    with fuser.config.patch(numerics="fast"):
        for dim in (0, 1):
            found = fuser.fuse(lambda x, dim=dim: torch.std(x * 1, dim))(x)
            torch.testing.assert_close(found.double() / size, x.double().std(dim) / size, rtol=1e-2, atol=0)


def error_of(found: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype) -> float:
    """Return the root mean square distance from the truth, in roundings of a dtype."""
    distance = (found.double() - truth.double()).square().mean().sqrt() / truth.double().square().mean().sqrt()
    return float(distance) / torch.finfo(dtype).eps


def check_accuracy(name: str, form: Callable[..., Any], device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for count in (50, 3000, 70000):
            drawn = torch.randn(max(20000 // count, 4), count, generator=torch.Generator().manual_seed(count))
            x = (drawn * 2 + 1).to(device, dtype)
            with fuser.config.patch(numerics="fast"):
                got = fuser.fuse(form)(x)
            wanted, truth = form(x), form(x.double())
            pairs = [(got, wanted, truth)] if isinstance(wanted, torch.Tensor) else zip(got, wanted, truth, strict=True)
            for one, other, true in pairs:
                own, torchs = error_of(one, true, dtype), error_of(other, true, dtype)
                # A sum in another order may round otherwise; batches of 8192 come in order, and round once each.
                assert own <= max(1.1 * torchs, 1.0 if true.numel() > 1 and count <= 8192 else 2.0), (
                    f"{name} of {dtype} {tuple(x.shape)}: {own:.2f}, torch {torchs:.2f}"
                )


ACCURATE = tuple(name for name in SUMS if not any(word in name for word in ("range", "none", "wider")))


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.parametrize("name", ACCURATE)
def test_fast_numerics_are_no_farther_from_the_truth_than_torch(name: str) -> None:
    check_accuracy(name, SUMS[name], "cpu")


@pytest.mark.cuda
@pytest.mark.parametrize("name", ACCURATE)
def test_fast_numerics_on_a_gpu_are_no_farther_from_the_truth(name: str) -> None:
    check_accuracy(name, SUMS[name], "cuda")
