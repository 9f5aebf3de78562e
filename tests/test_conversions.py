"""``x.to(dtype)``, ``x.float()`` and the like inside fused functions: torch may return ``x`` itself."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functors import as_tuple, draw, poison, unpoison
from reduction_cases import largest

import fuser
from fuser.config import config
from fuser.graph import GroupBuilder
from fuser.ops import OPS, convert_function

pytestmark = pytest.mark.cpu


def rms_gate(x: Any, w: Any) -> Any:
    h = x.float()
    return (h * torch.rsqrt(h * h + 1e-6)).to(torch.bfloat16) * w


def gate_of_halves(x: Any, w: Any) -> Any:
    return torch.sigmoid(x.half().float()) * w.to(dtype=torch.float32)


def as_mask(x: Any, w: Any) -> Any:
    return ((x > 0) & w.bool()).long()


def ends_in_a_conversion(x: Any, w: Any) -> Any:
    return (x * w).double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32], ids=str)
@pytest.mark.parametrize("function", [rms_gate, gate_of_halves, as_mask, ends_in_a_conversion])
def test_one_launch(function: Callable[..., Any], dtype: torch.dtype) -> None:
    x, w = draw((6, 9), dtype, seed=1), draw((6, 9), dtype, seed=2)
    fuser.reset_stats()
    got = fuser.fuse(function)(x, w)
    assert fuser.stats()["launches"] == 1
    assert fuser.stats()["fallbacks"] == {}
    wanted = function(x, w)
    assert (got.dtype, got.stride()) == (wanted.dtype, wanted.stride())
    torch.testing.assert_close(got, wanted, rtol=2**-7 if got.dtype is torch.bfloat16 else 1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(
    ("shape", "strides"),
    [((4, 6), (1, 4)), ((4, 6), (0, 1)), ((4, 6), (12, 2)), ((2, 3, 4, 5), (60, 1, 15, 3)), ((3, 1), (1, 7)), ((), ())],
)
def test_strides(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> None:
    """What has the dtype keeps its strides, and the result of what reads it depends on them."""
    x = torch.empty_strided(shape, strides, dtype=dtype).fill_(1.5)
    for function in (lambda x: -x.float(), lambda x: x.float().float() * 2, lambda x: (x * 2).to(torch.float32)):
        got, wanted = fuser.fuse(function)(x), function(x)
        assert got.stride() == wanted.stride()
        assert torch.equal(got, wanted)
    # Where one dimension of x is expanded, y decides the order; a copy of x would.
    if len(shape) == 2:
        y = torch.ones(shape[::-1]).t()
        product = lambda x, y: x.float() * y  # noqa: E731
        assert fuser.fuse(product)(x, y).stride() == product(x, y).stride()


@pytest.mark.parametrize("shape", [(9, 1), (1, 70), (1, 1)], ids=str)
def test_what_is_passed_on_lies_as_it_did(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum that stays torch's reads what a kernel has written for it, of an operand that was expanded."""
    monkeypatch.setattr(fuser.config, "internal_errors", "raise")
    x = draw(shape, torch.float32).expand(9, 70)
    for dim in (0, 1):
        assert torch.equal(fuser.fuse(lambda x, dim=dim: x.float().sum(dim))(x), x.sum(dim))


@pytest.mark.parametrize(("device", "has_rows"), [("cpu", False), ("cuda", False), ("cuda", True)])
def test_what_was_expanded_is_written_where_it_lay(device: str, has_rows: bool) -> None:
    """Beside a dense result, it has one place for many elements: a whole row of them would not be its memory."""
    builder = GroupBuilder()
    x, y = builder.add_input("x"), builder.add_input("y")
    (same,) = builder.apply(convert_function(torch.float32), [x])
    (product,) = builder.apply(OPS["mul"].function, [same, y])
    most = builder.apply(largest((1,)), [product]) if has_rows else []
    group = builder.build([same, product, *most])
    x, y = draw((9, 1), torch.float32).expand(9, 70), draw((9, 70), torch.float32)
    _, _, kernel = fuser.debug_get_fused_kernel_code(group, [x, y], device=device).partition("fuser_args {")
    assert "fuser_scatter" in kernel
    made = fuser.run_fusion(fuser.register_fusion(group), [x, y])
    assert [item.stride() for item in made[:2]] == [(1, 0), (70, 1)]
    assert torch.equal(made[0], x)
    assert torch.equal(made[1], x * y)


def test_the_tensor_itself_is_returned() -> None:
    x = draw((5,), torch.float32)
    one = fuser.fuse(lambda x: (x.float(), -x))
    assert one(x)[0] is x
    assert one(x.half())[0].dtype is torch.float32
    assert fuser.fuse(lambda x: x.half().to(torch.float32).float())(x) is not x
    assert fuser.fuse(lambda x: x.float().float())(x) is x
    assert fuser.fuse(lambda x: (x.float().float(), -x))(x)[0] is x


def test_what_is_written_between() -> None:
    def writes_to_the_operand(x: Any) -> Any:
        y = x.float()
        x.add_(1)
        return y * 2

    def writes_to_the_result(x: Any) -> Any:
        total = x + 1
        y = total.float()
        y.mul_(3)
        return total * 2

    def writes_to_what_a_kernel_reads(x: Any) -> Any:
        y, z = x.float(), -x
        x.add_(1)
        return y * 2 + z

    functions = (writes_to_the_operand, writes_to_the_result, writes_to_what_a_kernel_reads)
    for function, dtype in itertools.product(functions, (torch.float32, torch.half)):
        assert torch.equal(fuser.fuse(function)(torch.ones(4, dtype=dtype)), function(torch.ones(4, dtype=dtype)))


def random_program(seed: int) -> Callable[..., Any]:
    """Return a function of two tensors that converts, computes, writes in place, and returns some of its values."""
    source = random.Random(seed)
    steps = [(source.choice("ccccppw"), source.random(), source.random()) for _ in range(source.randint(2, 8))]
    kept = source.sample(range(len(steps) + 2), 2)
    methods = ("float", "half", "float", "double")

    def program(x: Any, y: Any) -> Any:
        values = [x, y]
        for kind, first, second in steps:
            one, other = values[int(first * len(values))], values[int(second * len(values))]
            if kind == "c":
                values.append(getattr(one, methods[int(second * 4)])())
            elif kind == "p":
                values.append(one * 0.5 + other)
            else:
                one.add_(1)
                values.append(one)
        return [values[k] for k in kept]

    return program


def outcome(function: Callable[..., Any], dtype: torch.dtype) -> Any:
    given = [torch.full((3,), 1.25, dtype=dtype), torch.full((3,), -2.0)]
    found = [*given, *as_tuple(function(*given))]
    shared = [one.data_ptr() == other.data_ptr() for one, other in itertools.combinations(found, 2)]
    return [(x.dtype, x.tolist()) for x in found], shared


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_random_programs(dtype: torch.dtype, tier: int) -> None:
    """Values, and which of inputs and results are the same memory, are eager's."""
    poison()
    fused = 0
    count = 10 if tier < 3 else 50
    for seed in range(count):
        program = random_program(seed)
        before = fuser.stats()["launches"]
        assert outcome(fuser.fuse(program), dtype) == outcome(program, dtype), seed
        fused += fuser.stats()["launches"] > before
    unpoison()
    assert fused > count // 2, "most of them launch kernels"


def test_gradients() -> None:
    x, w = (draw((7,), dtype, seed=k).requires_grad_() for k, dtype in enumerate((torch.bfloat16, torch.float32)))
    weight = draw((7,), torch.float32, seed=5)
    function = lambda x, w: torch.tanh(x.float() * w).to(torch.float64).float()  # noqa: E731
    mine = torch.autograd.grad(fuser.fuse(function)(x, w), (x, w), weight)
    theirs = torch.autograd.grad(function(x, w), (x, w), weight)
    for one, other in zip(mine, theirs, strict=True):
        assert one.dtype is other.dtype
        torch.testing.assert_close(one, other)


def _across_a_product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x.float()
    return ((y * 2 - y.sum()) @ w).relu() * y


def _of_what_is_computed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = x + 1
    y = h.float()
    return ((h * 2) @ w).relu() * y - h


def _that_nobody_reads(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x.float()
    return x.clamp(-1, 1) * w


@pytest.mark.parametrize("numerics", ["strict", "fast"])
@pytest.mark.parametrize("function", [_across_a_product, _of_what_is_computed, _that_nobody_reads])
def test_gradients_of_what_a_kernel_returns_a_copy_of(function: Callable[..., Any], numerics: str) -> None:
    """A conversion that converts nothing is a result of a group that returns its input, to AOTAutograd."""
    x, w = (draw((6, 6), torch.float32, seed=k).requires_grad_() for k in range(2))
    weight = draw((6, 6), torch.float32, seed=2)
    fuser.reset_stats()
    with config.patch(numerics=numerics):
        mine = torch.autograd.grad(fuser.fuse(function)(x, w), (x, w), weight)
    assert not fuser.stats()["fallbacks"]
    tolerance = {"rtol": 0, "atol": 0} if numerics == "strict" else {}
    for one, other in zip(mine, torch.autograd.grad(function(x, w), (x, w), weight), strict=True):
        torch.testing.assert_close(one, other, **tolerance)


def test_what_an_exported_graph_knows() -> None:
    """With dtypes known, a conversion that converts fuses even where it is all that is returned."""

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x.double(), x.float(), -x

    x = draw((5,), torch.float32)
    module = torch.export.export(Module(), (x,)).module()
    fused = fuser.fx.fuse_graph(module)
    fuser.reset_stats()
    double, same, negative = fused(x)
    assert fuser.stats()["launches"] == 1
    assert same is x
    assert torch.equal(double, x.double())
    assert torch.equal(negative, -x)


def test_explain_says_why_a_conversion_stays() -> None:
    # A call that nobody differentiates is traced for its own dtypes, where it is none.
    x = torch.ones(3, requires_grad=True)
    assert "has the dtype" in str(fuser.explain(fuser.fuse(lambda x: (x.float(), -x)), x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_what_is_promoted_to_a_narrow_dtype_is_rounded_to_it(dtype: torch.dtype, device: str) -> None:
    x = (torch.arange(500, device=device) * 0.037 - 3).to(dtype)
    # Integers have less weight in promotion than floats, and tensors without dimensions than those that have some.
    others = [torch.arange(1000, 1500, device=device), torch.tensor(2.2140, device=device), torch.tensor(1027)]
    for other in [*others[:2], others[2].to(device), others[1].double()]:
        fused = fuser.fuse(lambda a, b: ((a - b) * 2, torch.where(a > 0, b, a)))
        for got, wanted in zip(fused(x, other), ((x - other) * 2, torch.where(x > 0, other, x)), strict=True):
            assert torch.equal(got, wanted)
