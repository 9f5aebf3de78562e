"""Torch's orders of sums on the CPU: which are known, and kernels that keep them, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tiers import SLOW

import fuser
from fuser.config import config
from fuser.cpu import rows_ordered
from fuser.cpu.aten_orders import sum_order
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
def test_what_is_found_of_rows_is_not_taken_for_permuted_ones() -> None:
    """Torch adds up elements as they lie in memory, a kernel as they are numbered."""
    fused, torchs = fuser.fuse(lambda x: x.relu().sum((0, 1))), lambda x: x.relu().sum((0, 1))
    torch.manual_seed(0)
    for x in (draw((33, 100), torch.float32), *draw((4, 100, 33), torch.float32).transpose(1, 2)):
        assert torch.equal(fused(x), torchs(x)), x.stride()


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
