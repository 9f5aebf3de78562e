"""Where calls go: kernel, autograd, operator or eager torch, by what their inputs are; and groups cut around one op."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import fuser
from fuser import counters
from fuser.errors import FallbackWarning
from fuser.route import Route, find_route

pytestmark = pytest.mark.cpu

MUL = "template <typename T> T times(T x, T y) { return x * y; }"
GATE = "template <typename T> T gate(T x, T y) { return y / (T(1) + exp(-x)); }"

CASES: dict[str, tuple[str, Callable[..., torch.Tensor]]] = {
    "product": (MUL, torch.mul),
    "gate": (GATE, lambda x, y: torch.sigmoid(x) * y),
}


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class Modes(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


# --- the table
def test_each_row_of_the_table() -> None:
    x = draw(4)
    needing = draw(4).requires_grad_()
    assert find_route([x, 1.0]).route is Route.KERNEL
    assert find_route([needing]).route is Route.AUTOGRAD
    assert find_route([needing], below_autograd=True).route is Route.KERNEL
    with torch.no_grad():
        assert find_route([needing]).route is Route.KERNEL
    sparse = find_route([x, draw(4).to_sparse()])
    assert (sparse.route, sparse.reason) == (Route.EAGER, "a sparse_coo tensor")
    with Modes():
        assert find_route([needing]).route is Route.OPERATOR
    with torch.autograd.forward_ad.dual_level():
        assert find_route([x]).route is Route.KERNEL
        assert find_route([torch.autograd.forward_ad.make_dual(x, x)]).route is Route.AUTOGRAD
    seen = []
    torch.func.vmap(lambda item: seen.append(find_route([item]).route) or item)(x)
    assert seen == [Route.AUTOGRAD]


@pytest.mark.parametrize("kind", ["functor", "fused", "reduction", "list"])
def test_what_traces_above_autograd_sees_the_operator(kind: str) -> None:
    # Its mode is on no stack of Python's: the kernel ran unseen, and the graph held an empty tensor.
    functor = fuser.create_jit_fn(MUL)
    total = fuser.create_reduction_fn("template <typename T> T add(T a, T b) { return a + b; }", identity=0)
    function: Callable[..., torch.Tensor] = {
        "functor": functor,
        "fused": fuser.fuse(lambda x, y: torch.relu(functor(x, y))),
        "reduction": lambda x, y: total(functor(x, y)),
        "list": lambda x, y: fuser.foreach(functor, [x], [y])[0],
    }[kind]
    x, y = draw(5), draw(5, seed=1)
    graph = make_fx(function, pre_dispatch=True)(x, y)
    assert any(node.target is torch.ops.fuser.run.default for node in graph.graph.nodes)
    assert torch.equal(graph(y, y), function(y, y))


@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr, torch.Tensor.to_mkldnn])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_kinds_that_the_operator_cannot_read_are_torchs_under_a_mode(make: Any, needs_grad: bool) -> None:
    functor, fused = fuser.create_jit_fn(MUL), fuser.fuse(lambda x, y: torch.mul(x, y))
    x, y = draw(4, 3, dtype=torch.float32).requires_grad_(needs_grad), make(draw(4, 3, seed=1, dtype=torch.float32))
    x = make(x) if y.layout is torch._mkldnn else x
    for function in (functor, fused):
        with Modes():
            made = function(x, y)
        wanted = torch.mul(x, y)
        assert made.layout is wanted.layout
        assert torch.equal(made.to_dense(), wanted.to_dense())


def test_what_was_made_in_inference_mode_takes_part_in_gradients() -> None:
    with torch.inference_mode():
        y = draw(4, seed=1)
    functor, fused = fuser.create_jit_fn(MUL), fuser.fuse(lambda x, y: torch.relu(functor(x, y)) + x)
    for function, reference in ((functor, torch.mul), (fused, lambda x, y: torch.relu(x * y) + x)):
        for _ in range(2):
            x = draw(4).requires_grad_()
            (got,) = torch.autograd.grad(function(x, y).sum(), x)
            (wanted,) = torch.autograd.grad(reference(x, y.clone()).sum(), x)
            torch.testing.assert_close(got, wanted)


def test_lazy_bits_and_zeros_without_memory_are_resolved() -> None:
    z = draw(4, dtype=torch.complex64)
    zero = torch._efficientzerotensor((2, 3))
    conj, made, kept = find_route([z.conj(), zero, z]).inputs
    assert torch.equal(conj, z.conj())
    assert not conj.is_conj()
    assert not made._is_zerotensor()
    assert torch.equal(made, torch.zeros(2, 3))
    assert kept is z


def test_what_outlived_its_transform_is_unwrapped() -> None:
    kept: list[torch.Tensor] = []
    torch.func.vjp(lambda item: kept.append(item) or item * 2, draw(3))
    (found,) = find_route(kept).inputs
    assert torch._C._functorch.is_functorch_wrapped_tensor(kept[0])
    assert not torch._C._functorch.is_functorch_wrapped_tensor(found)


# --- gradients of every kind
@pytest.mark.parametrize("name", CASES)
def test_sparse_gradients(name: str) -> None:
    text, eager = CASES[name]
    functor, index = fuser.create_jit_fn(text), torch.tensor([1, 2, 2, 5])
    w, s = draw(8, 3).requires_grad_(), draw(8, 3, seed=1).requires_grad_()
    wanted = torch.autograd.grad(torch.nn.functional.embedding(index, eager(w, s)).sum(), (w, s))
    for _ in range(3):
        got = torch.autograd.grad(torch.nn.functional.embedding(index, functor(w, s), sparse=True).sum(), (w, s))
        for own, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(own.to_dense(), theirs)


def test_sparse_gradients_of_a_product_stay_sparse_as_torchs() -> None:
    w, s = draw(8, 3).requires_grad_(), draw(8, 3, seed=1).requires_grad_()
    index = torch.tensor([0, 3])
    for function in (fuser.create_jit_fn(MUL), torch.mul):
        (gradient,) = torch.autograd.grad(torch.nn.functional.embedding(index, function(w, s), sparse=True).sum(), w)
        assert gradient.layout is torch.sparse_coo


@pytest.mark.parametrize("name", CASES)
def test_gradients_that_are_zeros_without_memory(name: str) -> None:
    text, eager = CASES[name]
    functor = fuser.create_jit_fn(text)
    w, s = draw(4, 3).requires_grad_(), draw(4, 3, seed=1).requires_grad_()
    torch.autograd.grad(functor(w, s).sum(), (w, s))
    zero = torch._efficientzerotensor((4, 3), dtype=torch.float64)
    for _ in range(3):
        got = torch.autograd.grad(functor(w, s), (w, s), zero)
        wanted = torch.autograd.grad(eager(w, s), (w, s), zero)
        for own, theirs in zip(got, wanted, strict=True):
            assert own.shape == theirs.shape
            assert torch.equal(own, torch.zeros(4, 3, dtype=torch.float64))


# --- one op without a kernel
AXPY = "template <typename T> T axpy(T x, T y, T a) { return a * x + y; }"
axpy = fuser.create_jit_fn(AXPY, a=2.0)


def with_floor(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.floor((x + 1) * y) * 2 + axpy(x, y)


def with_masked_fill(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x * y + 1).masked_fill(x > 2, 7) - axpy(x, y)


def with_abs(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return axpy(torch.abs(axpy(x, y)), y.real * 2) + 1


CUT: dict[str, tuple[Callable[..., torch.Tensor], torch.Tensor, torch.Tensor, int]] = {
    "floor": (with_floor, torch.arange(6), torch.arange(6), 2),
    "masked_fill": (with_masked_fill, torch.arange(6), torch.arange(6), 2),
    "abs": (with_abs, draw(6, dtype=torch.complex128), draw(6, seed=1, dtype=torch.complex128), 2),
}


@pytest.mark.parametrize("name", CUT)
def test_a_group_is_cut_around_an_op_that_has_no_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, x, y, launches = CUT[name]
    fused = fuser.fuse(function)
    assert len(fused.groups) == 1
    for _ in range(2):
        fuser.reset_stats()
        result = fused(x, y)
        stats = fuser.stats()
        assert stats["launches"] >= launches
        assert sum(stats["fallbacks"].values()) == 1
        with monkeypatch.context() as patch:
            patch.setattr("fuser.planner._can_fuse", {"cpu": False, "cuda": False})
            fuser.config.touch()
            eager = function(x, y)
        fuser.config.touch()
        torch.testing.assert_close(result, eager, rtol=1e-15, atol=0)
        assert result.stride() == eager.stride()
    out = torch.empty_like(result)
    assert fused(x, y, out=out) is out
    assert torch.equal(out, result)


def test_only_what_needs_the_op_waits_for_it() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.floor(x) + 1, (y * 2 + 1) * y

    fused = fuser.fuse(function)
    x, y = torch.arange(5), draw(5)
    fuser.reset_stats()
    first, second = fused(x, y)
    # What does not need floor in one launch, what does in another.
    assert fuser.stats()["launches"] == 2
    assert torch.equal(first, x + 1)
    assert torch.equal(second, (y * 2 + 1) * y)


def test_gradients_pass_through_a_cut() -> None:
    x = draw(5, dtype=torch.complex128).requires_grad_()
    y = draw(5, seed=1, dtype=torch.complex128).requires_grad_()
    fused = fuser.fuse(with_abs)
    got = torch.autograd.grad(fused(x, y).sum(), (x, y))
    inner = 2 * x + y
    wanted = torch.autograd.grad((2 * inner.abs() + y.real * 2 + 1).sum(), (x, y))
    for own, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(own, theirs)


@pytest.mark.parametrize("function", [lambda x, y: x * y, lambda x, y: torch.abs(x * y) + 1.0], ids=["alone", "cut"])
def test_gradients_pass_through_a_cut_under_a_mode(function: Callable[..., Any]) -> None:
    fused = fuser.fuse(function)
    x, y = draw(5, 4).requires_grad_(), draw(5, 4, seed=1, dtype=torch.complex128)
    with Modes():
        (got,) = torch.autograd.grad(fused(x, y).abs().sum(), x)
    (wanted,) = torch.autograd.grad(function(x, y).abs().sum(), x)
    torch.testing.assert_close(got, wanted)


def test_fake_tensors_pass_through_a_cut() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    fused = fuser.fuse(with_floor)
    with FakeTensorMode() as mode:
        made = fused(mode.from_tensor(torch.arange(6)), mode.from_tensor(torch.arange(6)))
    assert (made.dtype, made.shape) == (torch.int64, (6,))


def test_the_first_fallback_of_a_reason_warns_at_the_users_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "_warned", set())
    functor = fuser.create_jit_fn(MUL)
    x = draw(4).to_sparse()
    with pytest.warns(FallbackWarning, match="a sparse_coo tensor") as caught:
        functor(x, x)
    assert caught[0].filename == __file__
    fuser.reset_stats()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        functor(x, x)
    assert fuser.stats()["fallbacks"] == {"a sparse_coo tensor": 1}


# --- one kernel for all kinds of a number
KINDS = (2, 2.0, True, torch.tensor(2.0), torch.tensor(2), torch.tensor(True), -(2**53), 0.1, float("inf"))


@pytest.mark.parametrize("declared", ["T", "double", "float"])
def test_one_kernel_serves_all_kinds_of_a_scalar(declared: str) -> None:
    text = f"template <typename T> T one_kernel_{declared}(T x, {declared} a) {{ return x * T(a); }}"
    functor, x = fuser.create_jit_fn(text, a=1.0), draw(9, dtype=torch.float32)
    functor(x, a=3.5)
    before = fuser.n_compiled_kernels()
    for _ in range(2):
        for number in KINDS:
            assert torch.equal(functor(x, a=number), x * torch.tensor(float(number), dtype=torch.float32))
    assert fuser.n_compiled_kernels() == before


def test_unsigned_integers_take_all_that_c_converts() -> None:
    # What int64 does not hold is a double, what a double may not be is an integer: there is no one kernel for both.
    functor = fuser.create_jit_fn("template <typename T> T whole(T x, uint64_t a) { return x * T(a); }", a=1)
    x, ones = torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.uint64)
    same = fuser.create_jit_fn("template <typename T> T same(T x, T a) { return x * a; }", a=1)
    for _ in range(2):
        for number, result in ((1e19, 1e19), (-1, 2.0**64), (2.9, 2.0), (True, 1.0)):
            assert functor(x, a=number).tolist() == [result] * 3
        assert same(ones, a=1e19).tolist() == [10**19] * 3
        assert same(ones, a=-1).tolist() == [2**64 - 1] * 3


@pytest.mark.parametrize("declared", ["short", "unsigned char", "signed char", "unsigned short"])
def test_one_kernel_serves_all_kinds_of_an_integer(declared: str) -> None:
    text = f"template <typename T> T whole(T x, {declared} a) {{ return x * T(a); }}"
    functor, x = fuser.create_jit_fn(text, a=1), torch.ones(3)
    functor(x, a=3)
    before = fuser.n_compiled_kernels()
    for number in (2, 2.9, torch.tensor(2), torch.tensor(2.5)):
        assert functor(x, a=number).tolist() == [2.0] * 3
    assert functor(x, a=True).tolist() == [1.0] * 3
    assert fuser.n_compiled_kernels() == before


def test_integers_beyond_doubles_are_rounded_once() -> None:
    # Rounded to a double first, this would be a tie that goes to the even float below.
    number = 2**60 + 2**36 + 1
    functor, x = fuser.create_jit_fn(AXPY, a=1), torch.ones(3)
    for small in (1, 1.0):
        functor(x, torch.zeros(3), a=small)
    for _ in range(2):
        assert functor(x, torch.zeros(3), a=number).tolist() == [float(2**60 + 2**37)] * 3


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool])
def test_integers_and_bools_take_what_c_converts(dtype: torch.dtype) -> None:
    text = "template <typename T> T pick(T x, int n, bool b) { return b ? x : T(n); }"
    functor = fuser.create_jit_fn(text, n=0, b=False)
    x = torch.tensor([1, 0, 1]).to(dtype)
    functor(x, n=1, b=True)
    before = fuser.n_compiled_kernels()
    for n in (3, 2.7, -2.7, True):
        for b in (0, 1, 0.0, 0.25, False, True, float("nan")):
            wanted = x if b else torch.full((3,), int(n)).to(dtype)
            assert torch.equal(functor(x, n=n, b=b), wanted)
    assert fuser.n_compiled_kernels() == before


def test_numbers_of_a_deduced_type_keep_theirs() -> None:
    text = "template <typename T, typename U> T half_of(T x, U a) { return x * T(a / U(2)); }"
    functor, x = fuser.create_jit_fn(text, a=1), torch.ones(2)
    assert functor(x, a=3).tolist() == [1.0, 1.0]
    assert functor(x, a=3.0).tolist() == [1.5, 1.5]
