"""Long rows on CUDA: losses of many classes, in torch's order and in one walk, and softmax of what fills a GPU."""

from __future__ import annotations

import pytest
import torch
from cuda_emulation import run_emulated

from fuser import expanded
from fuser.compiler import register
from fuser.cuda import backend
from fuser.debug import kernel_sources
from fuser.graph import FusionGroup, GroupBuilder
from fuser.ops import composite_function


def cross_entropy(
    numerics: str, *, dim: int = 1, keeps_log_softmax: bool = False, dtype: str = "bfloat16"
) -> FusionGroup:
    """The mean of rows' losses."""
    builder = GroupBuilder(numerics)
    (y,) = builder.apply(composite_function("_log_softmax", (dim,)), [builder.add_input("x")])
    target, ignored = builder.add_input("target"), builder.add_input("ignore_index", is_scalar=True)
    loss = composite_function("nll_loss_forward", (False, 1, dtype, True, False))
    return builder.build([*builder.apply(loss, [y, target], [ignored]), *[y] * keeps_log_softmax])


def kernel_of(group: FusionGroup, *shape: int) -> str:
    """The kernel that reads the rows."""
    inputs = [torch.empty(shape, dtype=torch.bfloat16), torch.empty(shape[:1], dtype=torch.int64), -100]
    return kernel_sources(register(group), inputs, "cuda")[0].text.split("__global__")[1]


@pytest.mark.cpu
@pytest.mark.parametrize("classes", [32000, 25608, 30522])
def test_rows_that_begin_at_multiples_of_vectors_have_no_elements_before_them(classes: int) -> None:
    torch.manual_seed(0)
    x = (torch.randn(7, classes) * 4).bfloat16()
    # The last element counts for most.
    x[:, -1] = 40
    target, group = torch.randint(classes, (7,)), cross_entropy("strict")
    target[1] = -100
    text = kernel_sources(register(group), [x, target, -100], "cuda")[0].text
    assert ("const int shift = 0;" in text) == (classes % 8 == 0)
    (loss,) = run_emulated(group, [x, target, -100], descending=True)
    (other,) = run_emulated(group, [x, target, -100], is_level=False)
    assert torch.equal(loss, other)
    exact = torch.nn.functional.cross_entropy(x.double(), target)
    torch.testing.assert_close(loss.double(), exact, rtol=2**-7, atol=0)


# Of many rows, and of so many classes that several blocks would share each otherwise; rows that begin between vectors
# have torch's order.
@pytest.mark.parametrize(
    ("shape", "walks_once"),
    [((600, 8192), False), ((600, 8200), True), ((600, 50260), True), ((600, 50257), False), ((60, 32000), False)],
)
def test_fast_losses_of_many_classes_walk_once(shape: tuple[int, int], walks_once: bool) -> None:
    text = kernel_of(cross_entropy("fast"), *shape)
    assert ("fuser_pass1 pass1" not in text) == walks_once
    assert ("fuser_powers(" in text) == walks_once
    assert not walks_once or "__cluster_dims__" not in text
    assert ("head = shift" in text) == (shape[1] % 4 != 0)


def test_fast_losses_walk_once_over_rows_alone() -> None:
    """Classes that a log_softmax is along: the last dimension, not the first."""
    given = [torch.empty(600, 8200, dtype=torch.bfloat16, device="meta"), torch.empty(600, dtype=torch.int64), -100]
    for dim, walks_once in ((1, True), (-1, True), (0, False)):
        texts = [source.text for source in kernel_sources(register(cross_entropy("fast", dim=dim)), given, "cuda")]
        assert any("fuser_powers(" in text for text in texts) == walks_once


def test_fast_losses_whose_log_softmax_is_needed_walk_more_than_once() -> None:
    text = kernel_of(cross_entropy("fast", keeps_log_softmax=True), 600, 32000)
    assert "fuser_powers(" not in text


# With threads that have none, with a last vector that has not all of its elements, and of every other element.
@pytest.mark.cpu
@pytest.mark.parametrize(("classes", "step"), [(8200, 1), (17000, 1), (9001, 1), (18001, 1), (8300, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_of_one_walk(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, classes: int, step: int) -> None:
    monkeypatch.setattr(expanded, "MANY_ROWS", 1)
    torch.manual_seed(0)
    least, inf = torch.finfo(dtype).min, torch.inf
    x = (torch.randn(9, classes) * 4).to(dtype)
    x[1, ::3], x[2], x[3, 77], x[4, 78], x[5], x[6, ::3] = -inf, -inf, inf, torch.nan, least, least
    x[7, 1:], x[8] = -inf, 40
    target = torch.randint(classes // 3, (9,)) * 3 + 1
    target[7] = 0
    exact = torch.nn.functional.log_softmax(x.double(), 1)[torch.arange(9), target].neg().to(dtype)
    group = cross_entropy("fast", dtype=str(dtype).removeprefix("torch."))
    for row in range(9):
        given = [x[row : row + 1].repeat_interleave(step, 1)[:, ::step], target[row : row + 1], -100]
        (loss,) = run_emulated(group, given)
        (other,) = run_emulated(group, given, descending=True)
        assert torch.equal(loss.view(torch.int16), other.view(torch.int16))
        # What is asked for is the loss in 16 bits.
        torch.testing.assert_close(loss, exact[row], rtol=2**-8, atol=1e-6, equal_nan=True)


def test_blocks_of_losses_are_small() -> None:
    assert "__cluster_dims__(2, 1, 1) __launch_bounds__(256" in kernel_of(cross_entropy("strict"), 600, 32000)
    assert "__cluster_dims__(8, 1, 1) __launch_bounds__(128" in kernel_of(cross_entropy("strict"), 600, 128256)
    assert "__cluster_dims__" not in kernel_of(cross_entropy("strict"), 600, 16384)


# The longest that registers keep, of which some waits in shared memory; longer ones are read again.
@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("length", "dtype"), [(1 << 18, torch.bfloat16), (180000, torch.float16), (200000, torch.float32)]
)
def test_softmax_of_long_rows_compiles(length: int, dtype: torch.dtype) -> None:
    builder = GroupBuilder("strict")
    group = builder.build(builder.apply(composite_function("_softmax", (1,)), [builder.add_input("x")]))
    (source,) = kernel_sources(register(group), [torch.empty(256, length, dtype=dtype)], "cuda")
    assert source.tuning.is_resident == (dtype is not torch.float32)
    assert backend.compile_cubin(source, "sm_90")


@pytest.mark.one_in(2)
@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_few_rows_are_walked_over_twice_in_fast_numerics(op: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(5, 66001, dtype=torch.float64) * 3).to(dtype)
    x[0, 9], x[1, 5], x[2, 70], x[3] = -torch.inf, torch.inf, torch.nan, -torch.inf
    builders = {numerics: GroupBuilder(numerics) for numerics in ("strict", "fast")}
    strict, fast = (
        builder.build(builder.apply(composite_function(f"_{op}", (1,)), [builder.add_input("x")]))
        for builder in builders.values()
    )
    assert [len(kernel_sources(register(group), [x], "cuda")) for group in (strict, fast)] == [3, 2]
    # Many rows, and shorter ones, a block, or a cluster of them, has for itself.
    for shape in ((70, 66000), (5, 60000)):
        assert len(kernel_sources(register(fast), [torch.empty(shape, dtype=dtype, device="meta")], "cuda")) == 1
    eager, exact = getattr(torch, op)(x, 1), getattr(torch, op)(x.double(), 1)
    for descending in (False, True):
        (made,) = run_emulated(fast, [x], descending=descending)
        assert torch.equal(made.isnan(), exact.isnan())
        own, others = ((item.double() - exact)[~exact.isnan()].nan_to_num(0).abs().max() for item in (made, eager))
        assert own <= others
