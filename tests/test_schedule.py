"""The order of a compiled graph's calls: memory goes early, no peak rises, and what writes or draws keeps its place."""

from __future__ import annotations

import random
import weakref
from typing import Any

import pytest
import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fuser.fx import backend, schedule
from fuser.fx.flat import flatten

ATEN = torch.ops.aten


@pytest.fixture(autouse=True)
def all_bytes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "LARGE_BYTES", 1)


class Graph:
    """Writes a graph on values of 8 rows."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def placeholder(self, columns: int, *, is_own: bool = False) -> fx.Node:
        node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        node.meta["val"] = torch.empty(8, columns)
        if is_own:
            node.meta[schedule.IS_OWN] = True
        return node

    def call(self, target: Any, *arguments: Any) -> fx.Node:
        node = self.graph.call_function(target, arguments)
        node.meta["val"] = target(*fx.node.map_arg(arguments, lambda item: item.meta["val"]))
        return node

    def module(self, *results: fx.Node) -> fx.GraphModule:
        self.graph.output(list(results))
        return fx.GraphModule(torch.nn.Module(), self.graph)


def linear_backward(*, is_own: bool, between: Any = None) -> list[fx.Node]:
    """Return the gradients of a layer's input and weight, in the order in which they are called."""
    graph = Graph()
    x, weight, grad = graph.placeholder(64, is_own=is_own), graph.placeholder(64), graph.placeholder(8)
    of_input = graph.call(ATEN.mm.default, grad, weight)
    if between is not None:
        between(graph, grad)
    of_weight = graph.call(ATEN.mm.default, grad, graph.call(ATEN.slice.Tensor, x, 1, 0, 32))
    module = graph.module(of_input, of_weight)
    schedule.free_early(module)
    return [node for node in module.graph.nodes if node in (of_input, of_weight)] == [of_weight, of_input]


def test_the_weights_gradient_comes_first_where_that_frees_the_input() -> None:
    assert linear_backward(is_own=True)
    # Somebody else holds it.
    assert not linear_backward(is_own=False)


def test_nothing_passes_a_call_that_writes_or_draws() -> None:
    assert linear_backward(is_own=True, between=lambda graph, x: graph.call(ATEN.mul.Tensor, x, 2.0))
    for target, *arguments in ((ATEN.mul_.Tensor, 2.0), (ATEN.rand_like.default,)):
        assert not linear_backward(is_own=True, between=lambda graph, x: graph.call(target, x, *arguments))  # noqa: B023


class Watch(TorchDispatchMode):
    """Counts the bytes that live tensors have."""

    def __init__(self, given: list[torch.Tensor]) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.peak = 0
        self.see(given)

    def see(self, made: Any) -> None:
        for item in tree_leaves(made):
            storage = item.untyped_storage()
            if storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, storage._cdata)
                item.kept_storage = storage
        self.peak = max(self.peak, sum(self.sizes.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.see(made)
        return made


def draw_graph(rng: random.Random) -> tuple[fx.GraphModule, list[int]]:
    graph = Graph()
    columns = [rng.choice((1, 4, 16)) for _ in range(4)]
    values = [graph.placeholder(count, is_own=True) for count in columns]
    for _ in range(rng.randint(4, 24)):
        x, kind = rng.choice(values), rng.randrange(5)
        if kind == 0:
            values.append(graph.call(ATEN.slice.Tensor, x, 1, 0, max(x.meta["val"].shape[1] // 2, 1)))
        elif kind == 1:
            values.append(graph.call(ATEN.sum.dim_IntList, x, [1], True))
        elif kind == 2:
            values.append(graph.call(ATEN.cat.default, [x, rng.choice(values)], 1))
        elif kind == 3:
            values.append(graph.call(ATEN.neg.default, x))
        else:
            values.append(
                graph.call(
                    ATEN.add.Tensor,
                    x,
                    rng.choice([item for item in values if item.meta["val"].shape == x.meta["val"].shape]),
                )
            )
    return graph.module(*rng.sample(values, 3)), columns


def measure(module: fx.GraphModule, columns: list[int]) -> tuple[list[torch.Tensor], int]:
    generator = torch.Generator().manual_seed(0)
    arguments = [torch.randn(8, count, generator=generator) for count in columns]
    run = flatten(module)
    with Watch(arguments) as watch:
        made = run(arguments)
    return made, watch.peak


def test_no_peak_rises_and_values_stay() -> None:
    rng, lower = random.Random(0), 0
    for _ in range(300):
        module, columns = draw_graph(rng)
        wanted, before = measure(module, columns)
        schedule.free_early(module)
        got, after = measure(module, columns)
        assert all(map(torch.equal, got, wanted))
        assert after <= before
        lower += after < before
    assert lower > 20


@pytest.mark.cpu
def test_what_a_backward_pass_alone_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    marked: dict[str, bool] = {}

    def note(forward: fx.GraphModule, backward: fx.GraphModule, count: int) -> None:
        schedule.mark_own(forward, backward, count)
        for node in backward.graph.find_nodes(op="placeholder"):
            marked[node.name] = schedule.IS_OWN in node.meta

    monkeypatch.setattr(backend, "mark_own", note)

    def function(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept = x @ weight
        inner = torch.relu(kept) @ weight
        return kept, torch.relu(inner) @ weight

    weight = torch.randn(4, 4, requires_grad=True)
    compiled = torch.compile(function, backend="fuser")
    compiled(torch.randn(3, 4, requires_grad=True), weight)
    own = [name for name, is_own in marked.items() if is_own]
    assert own
    assert len(own) < len(marked)
    # The weight, its transpose, gradients, and what was returned.
    assert not any(name.startswith(("primals", "t", "permute", "tangents")) or name == "mm" for name in own)
