"""Runs FX graphs with and without fusion nodes, and says where they differ; and a graph as small as still differs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import fuser
from fuser.fx.backend import compile_graph
from fuser.fx.flat import flatten

__all__ = ["compare", "copied", "fails", "fused", "shrink", "trace"]


def trace(
    function: Callable[..., Any], inputs: Sequence[torch.Tensor], device: str = "cpu", *, is_dynamic: bool = False
) -> fx.GraphModule:
    """Return an ATen graph as AOTAutograd has it, as if its inputs were on a device.

    ``function`` takes what calls an overload, then the nodes of the inputs; it returns a node, or a tuple of them.
    Sizes are symbols if ``is_dynamic``.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv() if is_dynamic else None)
    if is_dynamic:
        contexts: list[Any] = [StatelessSymbolicContext([DimDynamic.DYNAMIC] * x.dim()) for x in inputs]
        inputs = [mode.from_tensor(x, symbolic_context=of_x) for x, of_x in zip(inputs, contexts, strict=True)]
    with mode:
        fakes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device) for x in inputs]
    graph = fx.Graph()
    nodes = [graph.placeholder(f"x{slot}") for slot in range(len(fakes))]
    for node, fake in zip(nodes, fakes, strict=True):
        node.meta["val"] = fake

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = graph.call_function(target, args, kwargs)
        with mode:
            node.meta["val"] = target(*fx.node.map_arg(args, lambda item: item.meta["val"]), **kwargs)
        return node

    graph.output(function(call, *nodes))
    return fx.GraphModule(torch.nn.Module(), graph)


def run(call: Callable[..., Any], given: list[torch.Tensor], log: list[str], seed: int) -> dict[str, Any]:
    """Return all that a call shows."""
    inputs = copy.deepcopy(given)
    log.clear()
    torch.manual_seed(seed)
    made = call(inputs)
    outputs = list(made) if isinstance(made, list | tuple) else [made]
    every = [*inputs, *outputs]
    return {
        "values": every,
        "layouts": [(item.dtype, item.shape, item.stride()) for item in every],
        # Which share memory, and where they begin in it.
        "aliases": [
            (one, other)
            for one, first in enumerate(every)
            for other, second in enumerate(every[:one])
            if first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr() and first.numel()
        ],
        "log": list(log),
        "draws": torch.rand(3),
    }


def compare(module: fx.GraphModule, given: list[torch.Tensor], log: list[str], seed: int) -> int:
    """Run a graph with and without fusion nodes; return how many there are."""
    wanted = run(lambda inputs: module(*inputs), given, log, seed)
    graph = fused(module)
    found = {"fused": lambda inputs: graph(*inputs), "flat": lambda inputs: flatten(graph)(list(inputs))}
    if all("val" in node.meta for node in module.graph.nodes if node.op != "output"):
        compiled = compile_graph(copied(module))
        found["compiled"] = lambda inputs: compiled(list(inputs))
    for name, call in found.items():
        got = run(call, given, log, seed)
        for key in ("layouts", "aliases", "log"):
            assert got[key] == wanted[key], f"{key} differ, {name}: {got[key]} for {wanted[key]}"
        assert torch.equal(got["draws"], wanted["draws"]), f"what is drawn differs, {name}"
        for mine, theirs in zip(got["values"], wanted["values"], strict=True):
            assert torch.equal(mine.isnan(), theirs.isnan()), f"{name}: {mine} for {theirs}"
            assert torch.equal(mine.nan_to_num(), theirs.nan_to_num()), f"{name}: {mine} for {theirs}"
    return sum(node.op == "call_module" for node in graph.graph.nodes)


def fails(module: fx.GraphModule, given: list[torch.Tensor], log: list[str], seed: int) -> bool:
    """Whether a graph differs from itself with fusion nodes."""
    try:
        compare(module, given, log, seed)
    except Exception:  # whatever is raised is a difference
        return True
    return False


def shrink(module: fx.GraphModule, is_wrong: Callable[[fx.GraphModule], bool]) -> fx.GraphModule:
    """Return a graph with as few outputs and nodes as are wrong."""
    for slot in reversed(range(len(module.graph.nodes))):
        smaller = copied(module)
        nodes = list(smaller.graph.nodes)
        output = smaller.graph.output_node()
        if slot < len(nodes) and nodes[slot] is output:
            continue
        if slot < len(nodes) and nodes[slot].op != "placeholder":
            kept = tuple(item for item in output.args[0] if item is not nodes[slot])
            output.args = (kept,)
            if not nodes[slot].users:
                smaller.graph.erase_node(nodes[slot])
        smaller.recompile()
        if is_wrong(smaller):
            module = smaller
    return module


def fused(module: fx.GraphModule) -> fx.GraphModule:
    """Return a graph with fusion nodes."""
    return fuser.fx.fuse_graph(copied(module))


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """Return a graph of its own."""
    twin = fx.Graph()
    twin.output(twin.graph_copy(module.graph, {}))
    return fx.GraphModule(torch.nn.Module(), twin)
