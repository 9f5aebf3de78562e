"""CUDA kernels whose threads take rows side by side: of any width, with several dimensions, of any length."""

from __future__ import annotations

import pytest
import torch
from cuda_emulation import run_emulated
from reduction_cases import MERGE, functor

from fuser.combining import Reduction
from fuser.compiler import register
from fuser.cuda import backend
from fuser.debug import kernel_sources
from fuser.function import Function
from fuser.graph import FusionGroup, GroupBuilder
from fuser.ops import OPS, composite_function
from fuser.ops.reductions import reduction_function
from fuser.route import run

pytestmark = pytest.mark.cpu

# Widths that vectors divide and others, of one row and of several; more elements than a thread has, and fewer.
SHAPES = [(37, 9, 3), (5, 40, 7), (3, 33, 4), (2, 300, 129), (1, 70, 1), (11, 2, 2), (4, 21, 64), (3, 2500, 5)]


def reduced(op: str, numerics: str) -> FusionGroup:
    """Return a group that reduces along the middle of three dimensions, and computes with what that comes to."""
    builder = GroupBuilder(numerics)
    x = builder.add_input("x")
    (squares,) = builder.apply(OPS["mul"].function, [x, x])
    (found,) = builder.apply(reduction_function(op, (1,), True), [squares])
    (product,) = builder.apply(OPS["mul"].function, [squares, found])
    return builder.build([found, product])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("numerics", ["strict", "fast"])
@pytest.mark.parametrize("op", ["sum", "amax"])
def test_rows_side_by_side(op: str, numerics: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape)
    total, product = run_emulated(reduced(op, numerics), [x])
    exact = getattr(x.double().square(), op)(1, keepdim=True)
    torch.testing.assert_close(total.double(), exact, rtol=1e-5, atol=0)
    assert torch.equal(product, x * x * total)
    for given, other in zip((total, product), run_emulated(reduced(op, numerics), [x], descending=True), strict=True):
        assert torch.equal(given, other)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("shape", [*SHAPES, (4, 65, 7), (5, 2000, 2), (3, 100, 30), (2, 3, 1025)], ids=str)
@pytest.mark.parametrize("numerics", ["strict", "fast"])
def test_softmax_of_rows_side_by_side(numerics: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    builder = GroupBuilder(numerics)
    group = builder.build(builder.apply(composite_function("_softmax", (1,)), [builder.add_input("x")]))
    x = torch.randn(shape)
    for source in kernel_sources(register(group), [x], "cuda"):
        assert source.tuning.block <= 1024
    (made,) = run_emulated(group, [x])
    torch.testing.assert_close(made.double(), torch.softmax(x.double(), 1), rtol=1e-5, atol=1e-7)


# What threads wait with for each other has room in a block, however much that is.
@pytest.mark.nvrtc
def test_many_reductions_of_rows_side_by_side() -> None:
    builder = GroupBuilder()
    x = builder.add_input("x")
    made = []
    for number in range(5):
        one = functor(f"void one(T x, T& m, T& s, T& n) {{ m = x + T({number}); s = T(0); n = T(1); }}", num_outputs=3)
        mean = functor("T mean(T m, T s, T n) { return m; }")
        made += builder.apply(Function(one, reduction=Reduction(MERGE, (0, 0, 0), mean, (0,))), [x])
    group, given = builder.build(made), torch.randn(600, 300, dtype=torch.float64)
    (source,) = kernel_sources(register(group), [given], "cuda")
    assert backend.compile_cubin(source, "sm_90")
    assert all(map(torch.equal, run_emulated(group, [given]), run(register(group), [given])))


def test_narrow_rows_fill_blocks() -> None:
    """A block's threads are those of many rows, where a row's neighbours are few."""
    for numerics in ("strict", "fast"):
        for shape in ((100000, 16, 4), (100000, 10, 3), (10000, 64, 4)):
            given = [torch.empty(shape, dtype=torch.bfloat16, device="meta")]
            (source, *_) = kernel_sources(register(reduced("amax", numerics)), given, "cuda")
            assert source.tuning.block >= 64
            assert source.tuning.team * source.vector > shape[-1]


def test_widths_decide_vectors() -> None:
    """All threads have whole vectors: what each has is not asked for each element."""
    for width, vector in ((1024, 4), (1022, 2), (1023, 1)):
        given = [torch.empty(64, 700, width, dtype=torch.bfloat16, device="meta")]
        (source, *_) = kernel_sources(register(reduced("amax", "fast")), given, "cuda")
        assert source.vector == vector
