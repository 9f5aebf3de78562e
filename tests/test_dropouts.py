"""Dropouts of compiled graphs: torch's numbers for torch's seed, drawn by torch or in the kernel itself."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from functors import draw
from graph_checks import compare, trace
from torch import nn

import fuser
from fuser import order_check
from fuser.fx import dropouts
from fuser.fx.dropouts import keep_function
from fuser.ops.binding import bind_function
from fuser.ops.calls import OpCall

pytestmark = [pytest.mark.usefixtures("fresh_dynamo")]

LOW = np.uint64(0xFFFFFFFF)


def philox(number: np.ndarray, thread: np.ndarray, key: int) -> np.ndarray:
    """Return the four numbers of each call of Philox-4x32-10, written from the paper."""
    c = [number & LOW, number >> np.uint64(32), thread, np.zeros_like(thread)]
    k = [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        p, q = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [
            (q >> np.uint64(32)) ^ c[1] ^ np.uint64(k[0]),
            q & LOW,
            (p >> np.uint64(32)) ^ c[3] ^ np.uint64(k[1]),
            p & LOW,
        ]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return np.stack(c)


def test_philox_is_the_papers() -> None:
    zero = np.zeros(1, dtype=np.uint64)
    known = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox(zero, zero, 0)[:, 0].tolist() == known


@pytest.mark.cpu
@pytest.mark.parametrize("vector", [1, 2, 4, 8])
def test_a_kernel_keeps_what_each_thread_of_torchs_would(vector: int) -> None:
    # The carry from the lower half of the counter is among them.
    key, first, threads, chance = 0x923456789ABCDEF0, 4 * ((1 << 32) - 2), 512, 0.7
    numel = threads * vector * 9 + 5 * vector
    wanted = np.zeros(numel, dtype=bool)
    for thread in range(threads):
        turns = np.arange(40, dtype=np.uint64)
        drawn = philox(turns + np.uint64(first // 4), np.full_like(turns, thread), key)
        kept = drawn.astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33) < np.float32(chance)
        if vector == 1:
            own = np.arange(thread, numel, threads)
            wanted[own] = kept.T.reshape(-1)[: len(own)]
        else:
            begins = np.arange(thread * vector, numel, threads * vector)
            # Two elements take a call of their own, of which two numbers are not used.
            rows = kept[: min(vector, 4)].T.reshape(-1, vector)
            for slot, begin in enumerate(begins):
                wanted[begin : begin + vector] = rows[slot]
    signed = key - (1 << 64)
    made = keep_function(vector)(draw((numel,), torch.float32), key=signed, first=first, threads=threads, chance=chance)
    assert np.array_equal(made.numpy(), wanted)


class Block(nn.Module):
    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        self.first, self.second, self.p = nn.Linear(64, 64), nn.Linear(64, 64), p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.dropout(torch.relu(self.first(x)), 0.3, self.training)
        noise = torch.rand_like(x)
        return x * noise + F.dropout(self.second(hidden), self.p, self.training)


def run(function: Callable[..., Any], module: nn.Module, x: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """Return results, gradients, and the state of the generator after them."""
    torch._dynamo.reset()
    torch.manual_seed(5)
    found = []
    for _ in range(2):
        y = function(module)(x)
        found += [y, *torch.autograd.grad(y.float().square().sum(), [x, *module.parameters()])]
    return [*found, torch.cuda.get_rng_state() if x.is_cuda else torch.get_rng_state()]


def compile_for(backend: str, **options: Any) -> Callable[..., Any]:
    return lambda module: torch.compile(module, backend=backend, **options)


@pytest.mark.cpu
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float32, marks=pytest.mark.slow),
        torch.bfloat16,
        pytest.param(torch.float64, marks=pytest.mark.slow),
    ],
)
def test_cpu_draws_the_mask_and_fuses_the_rest(dtype: torch.dtype) -> None:
    module, x = Block().to(dtype), draw((33, 64), dtype).requires_grad_()
    wanted, made = run(compile_for("aot_eager"), module, x), run(compile_for("fuser"), module, x)
    # Biases are added up in torch's order of columns, which is not that of a kernel where these are few.
    assert [torch.equal(*pair) for pair in zip(made, wanted, strict=True)] == [True] * len(wanted)
    report = str(fuser.explain(torch.compile(module, backend="fuser"), x))
    assert "native_dropout:" not in report
    assert "native_dropout_1, add" in report


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.parametrize("p", [0.0, 1.0])
def test_nothing_is_drawn_where_all_or_none_stays(p: float) -> None:
    module, x = Block(p), draw((8, 64), torch.float32).requires_grad_()
    wanted, made = run(compile_for("aot_eager"), module, x), run(compile_for("fuser"), module, x)
    assert all(map(torch.equal, made, wanted))
    module.eval()
    torch._dynamo.reset()
    torch.manual_seed(5)
    compiled = torch.compile(module, backend="fuser")
    made = compiled(x)
    torch.manual_seed(5)
    assert torch.equal(made, module(x))
    torch._dynamo.reset()
    module.train()
    said = str(fuser.explain(compiled, x))
    assert ("a dropout: nothing is drawn" in said) == (p == 1.0)


CUDA_SHAPES = [(33, 64), (1023, 64), (40000, 64), (7, 64)]


@pytest.mark.cuda
@pytest.mark.parametrize("shape", CUDA_SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_cuda_draws_torchs_numbers_in_the_kernel(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    module, x = Block().to("cuda", dtype), draw(shape, dtype).cuda().requires_grad_()
    wanted, made = run(compile_for("aot_eager"), module, x), run(compile_for("fuser"), module, x)
    assert [torch.equal(*pair) for pair in zip(made, wanted, strict=True)] == [True] * len(wanted)
    assert any(kept is True for kept in map(dropouts._is_torchs, known_orders())), "no kernel drew"


def known_orders() -> list[dropouts.Order]:
    return [dropouts.Order(0, dtype, 16 // dtype.itemsize) for dtype in (torch.float32, torch.bfloat16)]


class Odd(nn.Module):
    """Elements of which no vectors can be made, and pairs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.sin(x), 0.5, True) + F.dropout(torch.cos(x[:-1]), 0.25, True).sum()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 6, 12, 1001, 270336 * 8 + 3, 270336 * 17 + 2, 270336 * 33 + 4])
def test_cuda_odd_sizes(dtype: torch.dtype, size: int) -> None:
    module, x = Odd(), draw((size,), dtype).cuda().requires_grad_()
    found = []
    for backend in ("aot_eager", "fuser"):
        torch._dynamo.reset()
        torch.manual_seed(7)
        y = torch.compile(module, backend=backend)(x)
        found.append([y, *torch.autograd.grad(y.sum(), [x]), torch.cuda.get_rng_state()])
    assert all(map(torch.equal, *found))


LAYOUTS = {
    "row-major": lambda g: g,
    "permuted": lambda g: g.transpose(2, 3),
    "channels last": lambda g: g.to(memory_format=torch.channels_last),
    "apart": lambda g: g[..., ::2],
}


def write_gradient(call: Callable[..., Any], g: Any, mask: Any) -> Any:
    return call(torch.ops.aten.neg.default, call(torch.ops.aten.native_dropout_backward.default, g, mask, 2.0))


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_lie_as_a_devices_kernel_writes_them(name: str) -> None:
    """On CUDA what is in no memory format of torch's becomes row-major; on the CPU it keeps its strides."""
    g = LAYOUTS[name](draw((2, 3, 4, 6), torch.float32))
    for device in ("cpu", "cuda"):
        graph = trace(write_gradient, [g, torch.ones(g.shape, dtype=torch.bool)], device).graph
        (node,) = graph.find_nodes(op="call_function", target=torch.ops.aten.native_dropout_backward.default)
        call = bind_function(node.target, node.args, {})
        assert call is not None
        ops = [item.function.op for item in call.tensors if isinstance(item, OpCall)]
        assert ops == ["contiguous"] * (device == "cuda" and name in {"permuted", "apart"})


@pytest.mark.cuda
@pytest.mark.parametrize("name", LAYOUTS)
def test_cuda_gradients_lie_as_torchs(name: str) -> None:
    g = LAYOUTS[name](draw((2, 3, 4, 6), torch.float32).cuda())
    mask = torch.rand(g.shape, device="cuda") > 0.5
    assert compare(trace(write_gradient, [g, mask], "cuda"), [g, mask], [], 0) == 1


@pytest.mark.cuda
def test_cuda_graphs_draw_anew_in_each_replay() -> None:
    module, x = Block().cuda(), draw((512, 64), torch.float32).cuda().requires_grad_()
    found = []
    for options in ({"backend": "aot_eager"}, {"backend": "fuser", "options": {"cuda_graphs": True}}):
        torch._dynamo.reset()
        torch.manual_seed(7)
        compiled, results = torch.compile(module, **options), []
        for _ in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            y = compiled(x)
            results += [y.detach().clone(), *(g.clone() for g in torch.autograd.grad(y.sum(), [x]))]
        found.append(results)
    assert all(map(torch.equal, *found))
    assert not torch.equal(found[1][0], found[1][2])


@pytest.mark.cuda
def test_another_order_than_torchs_is_found_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropouts, "_find_vector", lambda numel, itemsize: 4)
    monkeypatch.setattr(order_check, "_verdicts", {})
    monkeypatch.setattr(order_check.disk_cache, "read", lambda key: None)
    monkeypatch.setattr(order_check.disk_cache, "write", lambda key, payload: None)
    dropouts._is_torchs.cache_clear()
    module, x = Block().to("cuda", torch.float16), draw((512, 64), torch.float16).cuda().requires_grad_()
    try:
        wanted, made = run(compile_for("aot_eager"), module, x), run(compile_for("fuser"), module, x)
        assert all(map(torch.equal, made, wanted))
        assert not dropouts._is_torchs(dropouts.Order(0, torch.float16, 4))
    finally:
        dropouts._is_torchs.cache_clear()


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(4, 12)[:, ::2],
        torch.randn(1, 6).expand(4, 6),
        torch.randn(6, 4).t(),
        torch.randn(4, 1, 6)[:, :, ::3],
    ],
    ids=["apart", "expanded", "transposed", "of one"],
)
def test_what_is_drawn_and_how_it_lies(x: torch.Tensor) -> None:
    """Other numbers are drawn before and after, by what a group is between."""
    aten = torch.ops.aten

    def write(call: Callable[..., Any], x: Any) -> Any:
        first = call(aten.rand_like.default, call(aten.sum.dim_IntList, x, [0], True))
        both = call(aten.native_dropout.default, x, 0.5, True)
        parts = [call(operator.getitem, both, slot) for slot in range(2)]
        return (call(aten.add.Tensor, parts[0], first), *parts, call(aten.rand_like.default, x))

    before = fuser.override_can_fuse_on_cpu(False)
    try:
        compare(trace(write, [x]), [x], [], 0)
    finally:
        fuser.override_can_fuse_on_cpu(before)
