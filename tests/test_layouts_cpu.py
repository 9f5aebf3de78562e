"""Operands of any layout on the CPU: tiles, buffers and short rows give what eager torch gives, to the bit."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from functors import poison, unpoison

import fuser

pytestmark = pytest.mark.cpu

# One word of each size that is moved, and what is a struct in C++.
DTYPES = (
    torch.int8,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)
AXPY = fuser.jit_fn("template <typename T> T axpy(T x, T y, T alpha) { return alpha * x + y; }", scalars={"alpha": 2.0})
SPLIT = fuser.jit_fn(
    "template <typename T> void split(T x, T y, T& low, T& high) { low = x - y; high = x + y; }", num_outputs=2
)
LAYOUTS = ("dense", "permuted", "sliced", "permuted and sliced", "broadcast")


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    poison()
    yield
    unpoison()


def make(shape: list[int], dtype: torch.dtype, layout: str, choose: random.Random) -> torch.Tensor:
    """Return small whole numbers, so that sums are exact in every dtype."""
    if layout == "broadcast":
        shape = [size if choose.random() < 0.5 else 1 for size in shape]
    order = list(range(len(shape)))
    if "permuted" in layout:
        choose.shuffle(order)
    lengths = [shape[dim] for dim in order]
    # Every second element of a dimension, or all but some at its end.
    wider = [length + choose.choice((0, 1, length)) if "sliced" in layout else length for length in lengths]
    steps = [2 if wide == 2 * length else 1 for wide, length in zip(wider, lengths, strict=True)]
    whole = torch.randint(-20, 20, wider, generator=torch.Generator().manual_seed(choose.randrange(1000))).to(dtype)
    part = whole[tuple(slice(0, length * step, step) for length, step in zip(lengths, steps, strict=True))]
    return part.permute([order.index(dim) for dim in range(len(shape))])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_layouts(dtype: torch.dtype, tier: int) -> None:
    choose = random.Random(str(dtype))
    for _ in range(14 if tier == 3 else 4):
        shape = [choose.choice((1, 2, 3, 5, 17, 33, 64, 130)) for _ in range(choose.randint(1, 5))]
        while torch.Size(shape).numel() > 200_000:
            shape[choose.randrange(len(shape))] = 2
        x, y = (make(shape, dtype, choose.choice(LAYOUTS), choose) for _ in range(2))
        where = f"{shape}, strides {x.stride()} and {y.stride()}"
        wanted = torch.add(y, x, alpha=2)
        assert torch.equal(AXPY(x, y), wanted), where
        low, high = (make(list(wanted.shape), dtype, choose.choice(LAYOUTS[:-1]), choose) for _ in range(2))
        SPLIT(x, y, out=(low, high))
        assert torch.equal(low, x - y), where
        assert torch.equal(high, x + y), where
        if x.shape == wanted.shape and not torch._debug_has_internal_overlap(x):
            AXPY(x, y, out=x)
            assert torch.equal(x, wanted), where


@pytest.mark.parametrize("shape", [(1000, 517), (129, 4001), (4001, 129), (3, 70_000), (70_000, 3), (2, 2)], ids=str)
def test_transposed_matrices_with_cut_off_tiles(shape: tuple[int, int]) -> None:
    x, y = torch.randn(shape), torch.randn(shape[::-1]).t()
    assert torch.equal(AXPY(x, y), torch.add(y, x, alpha=2))
    out = torch.empty(shape[::-1]).t()
    assert AXPY(x, y, out=out) is out
    assert torch.equal(out, torch.add(y, x, alpha=2))


def test_two_operands_across_different_dimensions() -> None:
    x = torch.randn(40, 50, 60)
    y, z = torch.randn(60, 40, 50).permute(1, 2, 0), torch.randn(50, 60, 40).permute(2, 0, 1)
    function = fuser.jit_fn("template <typename T> T f(T x, T y, T z) { return x * y - z; }")
    assert torch.equal(function(x, y, z), x * y - z)


def test_formats_of_images() -> None:
    for channels in (1, 3, 16, 64):
        x = torch.randn(4, channels, 31, 33)
        y = torch.randn(4, channels, 31, 33).to(memory_format=torch.channels_last)
        for first, second in ((x, y), (y, x)):
            got = AXPY(first, second)
            assert torch.equal(got, torch.add(second, first, alpha=2))
            assert got.stride() == (first + second).stride()


def test_dimensions_that_do_not_merge() -> None:
    x = torch.randn([3] * 10)[..., ::2].permute(9, 0, 8, 1, 7, 2, 6, 3, 5, 4)
    y = torch.randn(x.shape)
    assert torch.equal(AXPY(x, y), torch.add(y, x, alpha=2))


def test_large_outputs_are_written_whole() -> None:
    # Above 4 MiB the kernel asks for huge pages, from the first whole page to the last: the ends are ordinary ones.
    memory = torch.full((3_000_000,), -1.0)
    x = torch.randn(2_000_003)
    out = memory[500_001 : 500_001 + len(x)]
    AXPY(x, x, out=out)
    assert torch.equal(out, torch.add(x, x, alpha=2))
    assert bool((memory[:500_001] == -1).all())
    assert bool((memory[500_001 + len(x) :] == -1).all())


def test_many_buffered_operands_fit_the_stack() -> None:
    names = [f"x{place}" for place in range(64)]
    parameters = ", ".join(f"T {name}" for name in names)
    many = fuser.jit_fn(f"template <typename T> T many({parameters}) {{ return {' + '.join(names)}; }}")
    inputs = [torch.full((300, 5), float(place), dtype=torch.complex128)[::2] for place in range(64)]
    assert many(*inputs).eq(sum(range(64))).all()
