"""Repeated calls in eager torch: the program that they run by has the bits, layouts and errors of the long way."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functors import CASES, Case, as_tuple, functor, inputs_of
from tiers import choose

import fuser
from fuser import executor, planner
from fuser.config import config
from fuser.fallback import Fallback

T = "template <typename T> "
AXPY = T + "T axpy(T x, T y, T alpha) { return alpha * x + y; }"
axpy = fuser.create_jit_fn(AXPY, alpha=1.0)


@pytest.fixture(autouse=True)
def without_kernels() -> Iterator[None]:
    before = fuser.override_can_fuse_on_cpu(False)
    fuser.reset_stats()
    yield
    fuser.override_can_fuse_on_cpu(before)


def count() -> int:
    return sum(fuser.stats()["fallbacks"].values())


def by_the_long_way(function: fuser.JitFunction, tensors: Any, scalars: dict[str, Any]) -> list[torch.Tensor]:
    spec = function.spec(len(tensors))
    return Fallback(spec.group).run([*tensors, *function.bind_scalars(scalars).values()], "")


def is_same(got: Any, want: Any) -> bool:
    return all(
        (a.dtype, a.shape, a.stride(), a.device) == (b.dtype, b.shape, b.stride(), b.device)
        and torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))
        for a, b in zip(as_tuple(got), as_tuple(want), strict=True)
    )


def check(function: fuser.JitFunction, *tensors: Any, is_replayed: bool = True, **scalars: Any) -> None:
    want = tuple(by_the_long_way(function, tensors, scalars))
    before = count()
    for _ in range(2):
        assert is_same(function(*tensors, **scalars), want)
    assert count() == before + 2
    assert (function.launch(tensors, scalars or None, None) is not None) == is_replayed


def check_case(case: Case, dtype: torch.dtype) -> None:
    check(functor(case.name), *inputs_of(case, dtype, (3, 5)), **case.scalars)


ROWS = [(case, dtype) for case in CASES for dtype in case.dtypes]


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 12))])
def test_functors_of_the_table(part: int) -> None:
    for case, dtype in ROWS:
        if choose(f"{case.name} {dtype}", 12) == part:
            check_case(case, dtype)


def test_every_layout() -> None:
    x, y = torch.randn(4, 6, 5), torch.randn(4, 6, 5)
    column, image = torch.randn(6, 1), torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    for given in (
        (x, y), (x.permute(2, 0, 1), y.permute(2, 0, 1)), (x.permute(2, 0, 1), y.reshape(5, 4, 6)), (x, column),
        (column, x), (x[:, ::2], y[:, ::2]), (x[:0], y[:0]), (image, image), (x.sum(), y.sum()), (x.sum(), y),
        (x, 2.5), (3, y), (x, True), (torch.randn(1).expand(4, 5), torch.randn(1).expand(4, 5)), (x, x),
    ):  # fmt: skip
        check(axpy, *given, alpha=0.3)


@pytest.mark.parametrize("alpha", [0.3, 3, True, -0.0, float("inf"), float("nan"), 1e300, 2**40, -1, 1j])
def test_every_kind_of_number(alpha: Any) -> None:
    for dtype in (torch.float32, torch.float16, torch.float64, torch.int32, torch.uint8, torch.bool, torch.complex64):
        x = torch.ones(3, dtype=dtype)
        if isinstance(alpha, complex) and not dtype.is_complex:
            continue
        # No float32 is so large: torch says so, and the long way makes it what C++ does.
        is_large = alpha == 1e300 and dtype in (torch.float32, torch.float16)
        check(axpy, x, x, alpha=alpha, is_replayed=not is_large and not (alpha == 1e300 and dtype is torch.complex64))


def test_dtypes_that_promote_and_that_torch_lacks() -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint16, torch.uint64, torch.float8_e5m2)
    for left, right in itertools.product(dtypes, repeat=2):
        x, y = torch.tensor([1, 0, 3]).to(left), torch.tensor([[1], [2]]).to(right)
        try:
            by_the_long_way(axpy, (x, y), {})
        except fuser.errors.FallbackError:
            continue
        check(axpy, x, y, alpha=2.0)


def test_results_are_tensors_of_their_own() -> None:
    same = fuser.create_jit_fn(T + "T same(T x) { return x; }")
    one = fuser.create_jit_fn(T + "T one(T x) { return T(1); }")
    twice = fuser.create_multi_output_jit_fn(T + "void twice(T x, T& a, T& b) { a = x + 1; b = x + 1; }", 2)
    x = torch.ones(3)
    for function in (same, one, twice):
        for _ in range(3):
            for item in as_tuple(function(x)):
                item.zero_()
        assert x.tolist() == [1, 1, 1]
        check(function, x, is_replayed=function is not one)
    first, second = twice(x)
    first.zero_()
    assert second.tolist() == [2, 2, 2]


def test_groups_of_functors_ops_and_reductions() -> None:
    total = fuser.create_reduction_fn(T + "T total(T a, T b) { return a + b; }", identity=0)

    @fuser.fuse
    def step(x: Any, y: Any) -> Any:
        z = torch.sigmoid(axpy(x, y, alpha=0.5)).to(torch.bfloat16) * 3
        return z, total(axpy(z, x), dim=-1), torch.where(y > 0, z, 0.0), z

    x, y = torch.randn(4, 6), torch.randn(6)
    want = [item.clone() for item in step(x, y)]
    for _ in range(3):
        assert is_same(step(x, y), tuple(want))


def test_everything_that_is_not_a_plain_call() -> None:
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    want = axpy(x, y, alpha=0.5)
    axpy(x, y, alpha=0.5)
    leaf = x.clone().requires_grad_()
    for _ in range(3):
        made = axpy(leaf, y, alpha=0.5)
        assert is_same(made.detach(), want)
        (gradient,) = torch.autograd.grad(made.sum(), leaf)
        assert torch.equal(gradient, torch.full_like(x, 0.5))
        with torch.no_grad():
            assert not axpy(leaf, y, alpha=0.5).requires_grad
        out = torch.empty(3, 4)
        assert axpy(x, y, alpha=0.5, out=out) is out
        assert is_same(out, want)
        assert is_same(torch.func.vmap(lambda a, b: axpy(a, b, alpha=0.5))(x, y), want)
        assert torch.equal(torch.func.grad(lambda a: axpy(a, y, alpha=0.5).sum())(x), gradient)
        with torch.inference_mode():
            assert axpy(x, y, alpha=0.5).is_inference()
        assert isinstance(axpy(torch.nn.Parameter(x), y, alpha=0.5), torch.Tensor)
        assert is_same(axpy(x, y, alpha=torch.tensor(0.5)), want)
        with pytest.raises(fuser.errors.ShapeError):
            axpy(x, torch.randn(5))


def test_each_call_is_counted_in_every_thread() -> None:
    x = torch.randn(3)
    axpy(x, x)
    fuser.reset_stats()
    threads = [threading.Thread(target=lambda: [axpy(x, x) for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count() == count() == 2000
    fuser.reset_stats()
    assert fuser.stats()["fallbacks"] == {}


@pytest.mark.cpu
def test_a_compiler_is_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fuser.override_can_fuse_on_cpu(True)
    seen = 0
    find: Callable[..., Any] = planner.make_plan

    def make(*args: Any, **options: Any) -> Any:
        nonlocal seen
        seen += 1
        return find(*args, **options)

    monkeypatch.setattr(executor, "make_plan", make)
    own, x = fuser.create_jit_fn(AXPY.replace("axpy", "again"), alpha=1.0), torch.ones(3)
    with config.patch(cxx="/nonexistent", disk_cache=False):
        for _ in range(5):
            own(x, x)
        assert seen == 1
        now = planner.time.monotonic() + planner.SEARCH_S
        monkeypatch.setattr(planner.time, "monotonic", lambda: now)
        # Who replays has the clock itself.
        while own.launch((x, x), None, None) is not None:
            pass
        own(x, x)
    assert seen == 2
    assert own(x, x).tolist() == [2, 2, 2]


def test_the_users_version_is_called_each_time() -> None:
    calls = []
    own = fuser.jit_fn(
        AXPY, scalars={"alpha": 1.0}, fallback=lambda x, y, *, alpha: calls.append(alpha) or x * alpha + y
    )
    for alpha in (1.0, 2.0, 3.0):
        own(torch.ones(2), torch.ones(2), alpha=alpha)
    assert calls == [1.0, 2.0, 3.0]


def test_another_default_dtype_is_noticed() -> None:
    x = torch.arange(3)
    root = fuser.fuse(lambda x: torch.sqrt(x) * 2)
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            for _ in range(2):
                assert root(x).dtype is dtype
                assert axpy(x, 1.5).dtype is dtype
        finally:
            torch.set_default_dtype(torch.float32)
