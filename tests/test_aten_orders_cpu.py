"""Torch's orders of sums on the CPU: which are known, and kernels that keep them, bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tiers import SLOW

import fuser
from fuser.config import config
from fuser.cpu import rows_ordered
from fuser.cpu.aten_orders import moments_order, sum_order
from fuser.orders import RowOrder, Schedule

ROWS = ((1, 100), (7, 3), (40, 8), (9, 33), (3, 64), (50, 100), (5, 511), (17, 1000), (2, 70001), (3, 40, 50))
COLUMNS = ((1, 32), (17, 64), (1000, 96), (4097, 32), (144, 64), (70001, 32))


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def draw(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return numbers of many magnitudes."""
    return (torch.randn(shape) * torch.exp(2 * torch.randn(shape))).to(dtype)


def product(x: torch.Tensor, y: torch.Tensor, dim: Any) -> Any:
    return (x * y).sum(dim)


def centred(x: torch.Tensor, y: torch.Tensor, dim: Any) -> Any:
    z = x + y
    return z - z.mean(dim, keepdim=True), torch.nansum(z * y[:1], dim)


def check(function: Callable[..., Any], dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...], dim: Any) -> None:
    fused = fuser.fuse(lambda x, y: function(x, y, dim))
    torch.manual_seed(0)
    for shape in shapes:
        x, y = draw(shape, dtype), draw(shape, dtype)
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            fuser.reset_stats()
            got, wanted = fused(x, y), function(x, y, dim)
            for one, other in zip(
                *((item if isinstance(item, tuple) else (item,)) for item in (got, wanted)), strict=True
            ):
                # Products of narrow numbers overflow: a sum of both infinities is none, here and there.
                torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, msg=f"{shape}, {count}")
                assert one.stride() == other.stride()
            # A few sums that are narrow stay torch's.
            assert dtype.itemsize == 2 or not fuser.stats()["kept"], (shape, count)


@pytest.mark.cpu
@pytest.mark.slow
def test_sums_have_torchs_bits_with_any_number_of_threads() -> None:
    check(product, torch.float32, ROWS, -1)
    check(product, torch.float32, COLUMNS, 0)


@pytest.mark.cpu
@SLOW
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_sums_and_means_of_every_dtype_have_torchs_bits(dtype: torch.dtype) -> None:
    for function in (product, centred):
        check(function, dtype, ROWS, -1)
        check(function, dtype, COLUMNS, 0)
    check(product, dtype, ((3, 40, 50), (2, 3, 4)), (1, 2))
    if dtype.itemsize > 2:
        check(product, dtype, ((9, 16, 64),), (0, 1))


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_16_bits_beside_wider_ones_have_torchs_bits(dtype: torch.dtype) -> None:
    check(lambda x, y, dim: ((x * y).sum(dim), (x > 0).sum(dim)), dtype, ((3000,), (7, 1001), (3, 65), (2, 63)), -1)


@pytest.mark.cpu
def test_the_first_of_equal_elements_counts_beside_a_sum() -> None:
    def places(x: torch.Tensor, y: torch.Tensor, dim: Any) -> Any:
        return (x * y).sum(dim), (y * 0).argmax(dim), (x > 0).to(x.dtype).argmin(dim), *(x / 0).max(dim)

    for dtype in (torch.float32, torch.bfloat16):
        check(places, dtype, ((3000,), (7, 1001), (3, 65), (2, 63)), -1)
    check(places, torch.float32, ((1000, 96),), 0)


def moments(x: torch.Tensor, y: torch.Tensor, dim: Any) -> Any:
    z = x * y
    return z.var(dim), *torch.std_mean(z, dim, correction=0, keepdim=True), z - 1


@pytest.mark.cpu
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_moments_have_torchs_bits(dtype: torch.dtype) -> None:
    for shapes, dim in (
        (((2, 8), (33, 100), (5, 33000)), -1),
        (((100, 33), (4100, 3)), 0),
        (((4, 5, 6, 7),), (1, 3)),
        (((4, 5, 6, 7),), (0, 2)),
    ):
        check(moments, dtype, shapes, dim)
        if dim in (-1, 0):
            check(lambda x, y, dim: moments(x.mT, y[..., :1].mT, dim), dtype, shapes, dim)


@pytest.mark.cpu
def test_moments_that_threads_share_stay_torchs() -> None:
    fused = fuser.fuse(lambda x: (*torch.var_mean(x * 3, 1),))
    for rows, kept in ((1, 1), (2, 0)):
        x = draw((rows, 70000), torch.float64)
        for got, wanted in zip(fused(x), fused.function(x), strict=True):
            assert torch.equal(got, wanted)
        fuser.reset_stats()
        fused(x)
        assert fuser.stats()["kept"] == kept
    assert moments_order(1) is None


@pytest.mark.cpu
@pytest.mark.parametrize("numerics", ["strict", "fast"])
@pytest.mark.parametrize("correction", [0, 1])
def test_moments_of_one_element_warn_where_torchs_do(numerics: str, correction: int) -> None:
    fused = fuser.fuse(lambda x: torch.var_mean(x * 3, 1, correction=correction))
    with config.patch(numerics=numerics, disk_cache=False):
        # An order, which is compared with torch's before its first use, too.
        for shape in ((5, 1), (5, 0), (0, 5), (5, 2), (5, 1)):
            x, said = torch.randn(shape), []
            for function in (fused, fused.function):
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    made = function(x)
                said.append(([str(item.message) for item in caught], *made))
            (mine, *got), (torchs, *wanted) = said
            assert mine == torchs, shape
            for one, other in zip(got, wanted, strict=True):
                torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.cpu
def test_moments_in_fast_numerics_are_those_of_doubles() -> None:
    # Far from zero, where what a float keeps of squares is little.
    x = draw((9, 5000), torch.float32) + 1e4
    with config.patch(numerics="fast"):
        fuser.reset_stats()
        got = fuser.fuse(lambda x: (*torch.var_mean(x, 1, correction=0),))(x)
    assert fuser.stats()["launches"] == 1
    for mine, wanted in zip(got, torch.var_mean(x.double(), 1, correction=0), strict=True):
        torch.testing.assert_close(mine.double(), wanted, rtol=2**-23, atol=0)


@pytest.mark.cpu
def test_where_torch_has_another_order_its_kernel_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_ordered, "LEAST_POWER", 5)
    x = draw((3, 9000), torch.float64)
    fused = fuser.fuse(lambda x: torch.nansum(x * 3, 1))
    fuser.reset_stats()
    assert torch.equal(fused(x), fused.function(x))
    assert fuser.stats()["checks"] == fuser.stats()["kept"] == 1
    assert not fuser.stats()["fallbacks"]


@pytest.mark.cpu
def test_dimensions_that_lie_in_another_order_are_numbered_as_they_lie() -> None:
    wide = fuser.fuse(lambda x: (x * 3).sum())
    # The order is compared with torch's on what is seen first, and known from then on.
    x = draw((100, 128), torch.float32)
    assert torch.equal(wide(x), wide.function(x))
    assert torch.equal(wide(x.t()), wide.function(x.t()))
    columns = fuser.fuse(lambda x: (x * 3).mean((0, 1)))
    y = draw((7, 9, 64), torch.float64)
    assert torch.equal(columns(y), columns.function(y))
    assert torch.equal(columns(y.transpose(0, 1)), columns.function(y.transpose(0, 1)))


def test_which_orders_are_known() -> None:
    along, pairs = RowOrder(Schedule(8), is_cascade=True), RowOrder(Schedule(8, vector=2), is_cascade=True)
    across = RowOrder(Schedule(8), is_across=True, is_cascade=True)

    def order(op: str, reduced: Any, kept: Any, itemsize: int = 4, *, is_plain: bool = True) -> RowOrder | None:
        return sum_order(op, reduced, kept, itemsize, is_plain=is_plain)

    assert order("sum", ((1000, 1),), ((9, 1000),)) == order("mean", ((1000, 1),), ((9, 1000),), 2) == along
    assert order("sum", ((1000, 1),), ((9, 1000),), 2) == pairs
    assert order("sum", ((1000, 1),), ((9, 1000),), 8) == RowOrder(Schedule(4), is_cascade=True)
    assert order("sum", ((30, 1),), ((9, 30),)) == along
    assert order("sum", ((30000, 1),), ()) == along
    assert order("sum", ((9, 64),), ((64, 1),)) == across
    assert order("mean", ((9, 64),), ((64, 1),), 2) == across
    # Short rows, many of them; threads that share a sum; neighbours of several rows; other columns; other ops.
    assert order("sum", ((30, 1),), ((9000, 30),)) is None
    assert order("sum", ((40000, 1),), ()) is None
    assert order("sum", ((10, 1), (10, 200)), ((9, 2000),)) is None
    assert order("sum", ((9, 60),), ((60, 1),)) is None
    assert order("sum", ((9, 64),), ((64, 1),), is_plain=False) is None
    assert order("sum", ((9, 64),), ((64, 1),), 2) is None
    assert order("sum", ((1000, 1),), ((9, 0),)) is None
    assert order("prod", ((1000, 1),), ((9, 1000),)) is None


@pytest.mark.cpu
def test_columns_that_torch_is_as_fast_with_stay_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    few, many = torch.randn(20000, 3), torch.randn(100, 1000)
    monkeypatch.setattr(config, "numerics", "fast")
    for function, x, kept in (
        (lambda x: x.sum(0) * 2, few, 1), (lambda x: (x * 2).sum(0), few, 0), (lambda x: x.sum(0) * 2, many, 0),
        (lambda x: x.amax(0) * 2, many, 1), (lambda x: (x * 2).amax(0), many, 0), (lambda x: x.amax(0) * 2, few, 0),
    ):  # fmt: skip
        fused = fuser.fuse(function)
        fuser.reset_stats()
        torch.testing.assert_close(fused(x), function(x))
        assert fuser.stats()["kept"] == kept
