"""Compiled graphs as flat functions: what a node does, when values are let go, buffers, options of the backend."""

from __future__ import annotations

import copy
import linecache
import operator
import traceback
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from functors import draw, functor
from torch import fx, nn

import fuser
from fuser import order_check, planner
from fuser.errors import ArgumentError
from fuser.fx import backend
from fuser.fx.backend import fuser_backend, read_options
from fuser.fx.flat import flatten
from fuser.fx.fusion_node import FusionModule

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> None:
    # Of torch: a graph that an earlier run compiled would not be compiled here.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(draw((3,), torch.float32, seed=1))
        self.own = nn.Module()
        self.own.register_buffer("scale", torch.tensor(2.0))
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, *rest: Any) -> Any:
        y = self.linear(x) * self.weight + self.own.scale
        first, second = torch.split(torch.cat([y, x], dim=1), [2, 4], dim=1)
        z = second[:, 1:3].clamp(min=float("-inf"), max=1e30).view((-1, 2)).to(torch.float64)
        return {"first": first, "others": [z, (y.sum(),), None], "shape": x.new_zeros((2, 1), dtype=torch.int8)}


def test_every_kind_of_node_and_argument() -> None:
    module = Inner()
    traced = fx.symbolic_trace(module, concrete_args=None)
    x = draw((4, 3), torch.float32)
    arguments = [x, ()]
    got, wanted = flatten(traced)(arguments), module(x)
    assert arguments == [], "the list is emptied"
    assert list(got) == list(wanted)
    assert torch.equal(got["first"], wanted["first"])
    assert torch.equal(got["others"][0], wanted["others"][0])
    assert torch.equal(got["others"][1][0], wanted["others"][1][0])
    assert got["others"][2] is None
    assert torch.equal(got["shape"], wanted["shape"])


def test_values_are_let_go_after_their_last_use() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        alive.append(weakref.ref(x))
        return x * 2

    def count(x: torch.Tensor) -> int:
        return sum(item() is not None for item in alive)

    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.placeholder("unused")
    first = graph.call_function(keep, (x,))
    second = graph.call_function(keep, (first,))
    after = graph.call_function(count, (second,))
    graph.call_function(keep, (second,))
    graph.output((after, graph.call_function(count, (second,))))
    run = flatten(fx.GraphModule(nn.Module(), graph))
    # The input and the first product are gone at the first count; the second product is still needed at the last.
    assert run([torch.ones(3), torch.ones(3)]) == (0, 1)


def test_an_operator_that_is_an_argument() -> None:
    """As of an effect, which is a call of torch's that a graph keeps in order: it gives its operator to another one."""

    def solve(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.linalg.solve(a, b) + 1

    a, b = torch.eye(2) * 2, torch.ones(2, 2)
    assert torch.equal(torch.compile(solve, backend="fuser")(a, b), solve(a, b))


def test_a_traceback_shows_the_line() -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(operator.add, (graph.placeholder("x"), "text")))

    def kept() -> int:
        return sum(name.startswith("<fuser graph") for name in linecache.cache)

    before = kept()
    run = flatten(fx.GraphModule(nn.Module(), graph))
    assert kept() == before + 1
    with pytest.raises(TypeError) as caught:
        run([1])
    assert "(v0, 'text')" in "".join(traceback.format_exception(caught.value))
    del run, caught
    assert kept() == before


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.BatchNorm1d(4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What the graphs call that the backend compiles, in order."""
    found: list[list[str]] = []

    def look(graph: fx.GraphModule) -> Callable[..., Any]:
        found.append([str(node.target) for node in graph.graph.nodes])
        return flatten(graph)

    monkeypatch.setattr(backend, "flatten", look)
    return found


def test_batch_norms_write_their_buffers_in_place(graphs: list[list[str]]) -> None:
    model, twin = Norms(), Norms()
    x = draw((8, 4), torch.float32)
    compiled = torch.compile(model, backend="fuser")
    for _ in range(3):
        compiled(x).sum().backward()
        twin(x).sum().backward()
    forward = graphs[0]
    assert forward.count("aten._native_batch_norm_legit.default") == 3
    assert not any("copy_" in target for target in forward), "the counts of batches are written where they are"
    for mine, theirs in zip(model.buffers(), twin.buffers(), strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.allclose(mine, theirs, rtol=1e-6, atol=1e-7)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)


def test_a_norm_that_runs_twice_keeps_its_copies(graphs: list[list[str]]) -> None:
    norm, twin = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    x = draw((8, 4), torch.float32)
    compiled = torch.compile(lambda x: norm(norm(x) * 2), backend="fuser")
    for _ in range(2):
        assert torch.allclose(compiled(x), twin(twin(x) * 2), rtol=1e-5, atol=1e-6)
    assert "aten._native_batch_norm_legit.default" not in graphs[0]
    for mine, theirs in zip(norm.buffers(), twin.buffers(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-6, atol=1e-7)


class Swapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.tensor([1.0]))
        self.register_buffer("b", torch.tensor([2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.a.clone(), self.b.clone()
        self.a.copy_(b)
        self.b.copy_(a)
        self.a.add_(x.sum())
        return self.a * x


def test_buffers_that_depend_on_each_other() -> None:
    model, twin = Swapped(), Swapped()
    compiled = torch.compile(model, backend="fuser")
    x = draw((3,), torch.float32)
    for _ in range(3):
        assert torch.equal(compiled(x), twin(x))
        assert torch.equal(model.a, twin.a)
        assert torch.equal(model.b, twin.b)


class Moments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4, 6))
        self.register_buffer("peak", torch.zeros(6, dtype=torch.bfloat16))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(4, 6))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.mean.mul_(0.5).add_(x)
        self.peak.copy_(x.amax(0))
        self.steps += 1
        # The old value is read after the kernel that makes the new one.
        product = torch.mm(self.last, (x.relu() * 2).t())
        self.last.add_(x.relu())
        return x * self.mean, product, self.steps


def test_kernels_write_buffers_where_they_are(graphs: list[list[str]]) -> None:
    model, twin = Moments(), Moments()
    compiled = torch.compile(model, backend="fuser")
    for seed in range(3):
        x = draw((4, 6), torch.float32, seed=seed)
        for got, wanted in zip(compiled(x), twin(x), strict=True):
            assert torch.equal(got, wanted)
        for got, wanted in zip(model.buffers(), twin.buffers(), strict=True):
            assert torch.equal(got, wanted)
    # What is read again, and what has another dtype.
    assert sum("copy_" in target for target in graphs[0]) == 2


def test_nothing_is_kept_that_the_backward_pass_can_compute() -> None:
    axpy = functor("axpy")

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = torch.sin(axpy(x, x, alpha=0.5))
        return x

    kept = 0

    def pack(x: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += x.numel()
        return x

    x = draw((100,), torch.float32).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = torch.compile(chain, backend="fuser")(x)
    assert kept <= 200, "the input, and at most one value more"
    (mine,) = torch.autograd.grad(result.sum(), x)
    (theirs,) = torch.autograd.grad(chain(x).sum(), x)
    assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_options() -> None:
    assert read_options(None, None) == read_options("default", {})
    assert read_options("reduce-overhead", None)["cuda_graphs"] is True
    assert read_options("reduce-overhead", {"cuda_graphs": False})["cuda_graphs"] is False
    with pytest.raises(ArgumentError, match="mode='fastest': backend 'fuser' has 'default', 'reduce-overhead', 'max-"):
        read_options("fastest", None)
    with pytest.raises(ArgumentError, match="option 'cudagraphs': backend 'fuser' has cuda_graphs, numerics, autotune"):
        read_options(None, {"cudagraphs": True})
    with pytest.raises(ArgumentError, match="option 'cuda_graphs' is 1: must be one of False, True"):
        read_options(None, {"cuda_graphs": 1})
    assert read_options(None, {"fuel": 0})["fuel"] == 0
    for fuel in (-1, True, 1.0, "1"):
        with pytest.raises(ArgumentError, match=r"option 'fuel' is .*: must be one of integers from 0, None"):
            read_options(None, {"fuel": fuel})
    x = draw((3,), torch.float32)
    on_cpu = torch.compile(lambda x: torch.sin(x) + 1, backend="fuser", mode="reduce-overhead")
    assert torch.allclose(on_cpu(x), torch.sin(x) + 1)
    with pytest.raises(Exception, match="option 'wrong'"):
        torch.compile(lambda x: x + 1, backend="fuser", options={"wrong": 1})(x)
    assert fuser_backend.__name__ == "fuser_backend"


def test_a_graphs_numerics_are_its_own() -> None:
    x = draw((40, 3000), torch.float32, seed=3) * 1e3

    def step(x: torch.Tensor) -> torch.Tensor:
        return (x * 1.5).sum(-1) + (x * x + x).sum(-1)

    results = {}
    for numerics in ("strict", "fast"):
        torch._dynamo.reset()
        compiled = torch.compile(step, backend="fuser", options={"numerics": numerics})
        with fuser.config.patch(numerics="fast" if numerics == "strict" else "strict"):
            results[numerics] = compiled(x)
        with fuser.config.patch(numerics=numerics):
            torch._dynamo.reset()
            assert torch.equal(torch.compile(step, backend="fuser")(x), results[numerics])
    assert torch.equal(results["strict"], step(x))
    assert not torch.equal(results["strict"], results["fast"])


def test_groups_keep_their_numerics() -> None:
    axpy = functor("axpy")
    graph = fx.symbolic_trace(lambda x, y: axpy(torch.sin(x), y, alpha=2.0))
    fuser.fx.FusionPass(numerics="fast")(graph)
    (group,) = [item.group for item in graph.modules() if hasattr(item, "group")]
    assert group.numerics == "fast"
    assert not group.is_strict
    assert fuser.FusionGroup.from_json(group.to_json()) == group
    assert group.canonical().numerics == "fast"
    assert group.select_outputs([0]).numerics == "fast"
    assert group.section(range(1)).group.numerics == "fast"
    plain = fx.symbolic_trace(lambda x, y: axpy(torch.sin(x), y, alpha=2.0))
    fuser.fx.FusionPass()(plain)
    (other,) = [item.group for item in plain.modules() if hasattr(item, "group")]
    assert other.numerics is None
    assert other.is_strict
    assert other.key != group.key
    with pytest.raises(fuser.errors.GroupError, match="numerics='quick': must be one of strict, fast"):
        replace(group, numerics="quick").lint()


def test_a_call_that_keeps_torchs_kernel_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU strict norms are torch's: a group that holds one is cut around it, once for each size."""

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.linalg_vector_norm.default(x.abs() + 1, 2, [1])

    traced = fx.symbolic_trace(step)
    fuser.fx.FusionPass(device_type="cuda")(traced)
    (fusion,) = [item for item in traced.modules() if isinstance(item, FusionModule)]
    long_way: list[Any] = []
    monkeypatch.setattr(type(fusion.run), "call_anew", count_calls(type(fusion.run).call_anew, long_way))
    with torch.no_grad():
        for rows in (3, 3, 5, 3, 5):
            x = draw((rows, 4), torch.float32, seed=rows)
            assert torch.equal(traced(x), step(x))
    assert len(long_way) == 2, "once for each size"
    before = fuser.stats()["kept"]
    assert torch.equal(traced(x.requires_grad_()), step(x))
    assert fuser.stats()["kept"] > before, "whatever asks for a gradient goes the long way"


def count_calls(function: Callable[..., Any], found: list[Any]) -> Callable[..., Any]:
    def counted(*args: Any) -> Any:
        found.append(args)
        return function(*args)

    return counted


# --- on a GPU --------------------------------------------------------------------------------------------------------
@pytest.mark.cuda
def test_cuda_graphs_train_as_eager_does() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)).cuda()
    twin = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)).cuda()
    twin.load_state_dict(model.state_dict())
    compiled = torch.compile(model, backend="fuser", options={"cuda_graphs": True})
    plain = torch.compile(twin, backend="aot_eager")
    optimizers = [torch.optim.SGD(item.parameters(), lr=1e-3) for item in (model, twin)]
    for step in range(8):
        x = draw((8, 16), torch.float32, seed=step).cuda()
        torch.compiler.cudagraph_mark_step_begin()
        for called, optimizer in zip((compiled, plain), optimizers, strict=True):
            optimizer.zero_grad()
            called(x).square().sum().backward()
            optimizer.step()
    for mine, theirs in zip(
        [*model.parameters(), *model.buffers()], [*twin.parameters(), *twin.buffers()], strict=True
    ):
        assert torch.equal(mine, theirs)
    # A replayed graph launches what it recorded: fuser counts nothing.
    before = fuser.stats()["launches"]
    torch.compiler.cudagraph_mark_step_begin()
    compiled(x).square().sum().backward()
    assert fuser.stats()["launches"] == before


@pytest.mark.cuda
def test_cuda_graphs_hold_what_stays_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    # Torch looks at the graphs' memory after each first call: nothing may live on that nobody asks for any more.
    monkeypatch.setattr(planner, "is_kept", lambda *_: False)
    monkeypatch.setattr(order_check.OrderCase, "verdict", lambda _: None)
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(96), nn.Linear(96, 96), nn.GELU()) for _ in range(3)).cuda()
    twins = copy.deepcopy(layers)

    def step(run: Callable[..., torch.Tensor], layers: nn.ModuleList, x: torch.Tensor) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        for layer in layers:
            layer.zero_grad()
            x = run(layer, x)
        x.square().sum().backward()

    compiled = torch.compile(
        lambda layer, x: layer(x) + x, backend="fuser", options={"cuda_graphs": True}, dynamic=True
    )
    for number in range(5):
        x = draw((3, 20 + number // 4, 96), torch.float32, seed=number).cuda()
        step(compiled, layers, x)
        step(lambda layer, x: layer(x) + x, twins, x)
        for mine, theirs in zip(layers.parameters(), twins.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.cuda
def test_cuda_graphs_know_what_sizes_they_were_recorded_for() -> None:
    def body(x: torch.Tensor, weight: torch.Tensor, count: int) -> torch.Tensor:
        return torch.softmax(x[:, :count] * weight, -1).cumsum(0) * count

    compiled = torch.compile(body, backend="fuser", options={"cuda_graphs": True}, dynamic=True)
    weight = nn.Parameter(draw((1,), torch.float32, seed=1).cuda())
    for rows, columns, count in [(4, 7, 5), (6, 9, 5), (4, 7, 6), (6, 9, 9), (4, 7, 5), (6, 9, 5)] * 4:
        found = []
        for run in (compiled, body):
            x = draw((rows, columns), torch.float32, seed=count).cuda().requires_grad_()
            torch.compiler.cudagraph_mark_step_begin()
            made = run(x, weight, count)
            made.square().sum().backward()
            assert weight.grad is not None
            found.append([made.detach().clone(), x.grad, weight.grad.clone()])
            weight.grad = None
        assert all(map(torch.equal, *found))


@pytest.mark.cpu
@pytest.mark.parametrize(
    "function",
    [
        lambda x, weight: torch.relu(x) @ weight,
        # torch's kernels make these as views of something.
        lambda x, weight: torch.stack([x @ weight, x]),
        lambda x, weight: nn.functional.embedding(torch.arange(6).view(2, 3) % 4, weight),
        lambda x, weight: torch.select_scatter(x @ weight, x[0] + 1, 0, 1),
        lambda x, weight: (x @ weight).clone().slice_scatter(x[:, :1], 1, 1, 2),
        lambda x, weight: nn.functional.scaled_dot_product_attention(x @ weight, x, x),
        lambda x, weight: torch.unsafe_split(x @ weight, 2, -1)[0],
    ],
    ids=["product", "stack", "embedding", "select_scatter", "slice_scatter", "attention", "split"],
)
def test_results_that_are_no_views_may_be_written_to(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    compiled = torch.compile(function, backend="fuser")
    for _ in range(3):
        x = torch.randn(2, 3, 4)
        made, wanted = compiled(x, weight), function(x, weight).clone()
        assert not made._is_view()
        gradients = []
        for result in (made, wanted):
            result.transpose(0, 1)[0] = 1.0
            result.sum().backward()
            assert weight.grad is not None
            gradients.append(weight.grad)
            weight.grad = None
        assert torch.equal(made, wanted)
        torch.testing.assert_close(*gradients)
