"""Large results are written where a kernel reads what nobody reads any more: both need not be in memory at once."""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import torch
from torch import fx

from fuser.fx.ahead import describe_all
from fuser.fx.buffers import gives_items, values_of, write_into, writes_elements
from fuser.fx.effects import sets_mode
from fuser.fx.fusion_node import FusionModule
from fuser.fx.gains import count_bytes
from fuser.fx.nodes import is_static
from fuser.fx.schedule import find_memory
from fuser.planner import find_in_place
from fuser.process import ignoring

__all__ = ["write_over_dead"]

# What is worth more work for the host: tensors of so many bytes take longer to write than to be asked for.
LARGE_BYTES = 1 << 24


def write_over_dead(graph_module: fx.GraphModule) -> None:
    """Give kernels the memory of tensors that they are the last to read, in the order in which the graph runs."""
    # Layers of a model are alike.
    known: dict[tuple[int, Any], tuple[bool, ...]] = {}
    graph = graph_module.graph
    if any(map(sets_mode, graph.nodes)):
        # Another stream may still read what this order reads last.
        return
    memory = find_memory(graph)
    made = {node for node in graph.nodes if memory[node] == {node} and _is_made(node)}
    last = {base: node for node in graph.nodes for source in node.all_input_nodes for base in memory[source]}
    for node in list(graph.find_nodes(op="call_module")):
        module = graph_module.get_submodule(str(node.target))
        if type(module) is not FusionModule or node.kwargs or not all(map(is_static, values_of(node))):
            continue
        # What else is seen of their memory may lie elsewhere in it.
        seen = Counter(base for item in node.all_input_nodes for base in memory[item])
        free = [item for item in node.all_input_nodes if item in made and last[item] is node and seen[item] == 1]
        chosen: dict[int, fx.Node] = {}
        for slot, value in enumerate(values_of(node)):
            found = next((item for item in free if _fits(item, value)), None)
            if found is not None:
                chosen[slot] = found
                free.remove(found)
        may_be = _find_in_place(module, node, known) if chosen else ()
        chosen = {slot: item for slot, item in chosen.items() if may_be[slot]}
        if chosen:
            write_into(node, chosen)


def _is_made(node: fx.Node) -> bool:
    # Whether a kernel of torch's or fuser's wrote a value into memory that it asked for.
    source = node.args[0] if node.target is operator.getitem else node
    if not isinstance(source, fx.Node) or "out" in source.kwargs:
        return False
    is_torchs = isinstance(source.target, torch._ops.OpOverload) and source.target.namespace == "aten"
    return source.op == "call_module" or (source.op == "call_function" and is_torchs)


def _fits(item: fx.Node, value: torch.Tensor) -> bool:
    # Whether a value is large, and lies as a result will, in no more memory than that takes.
    own: Any = item.meta.get("val")
    if not is_static(own) or count_bytes(own) < LARGE_BYTES:
        return False
    is_alike = (own.dtype, own.shape, own.device) == (value.dtype, value.shape, value.device)
    reach = 1 + sum((size - 1) * stride for size, stride in zip(own.shape, own.stride(), strict=True))
    return is_alike and own.stride() == value.stride() and own.storage_offset() == 0 and reach == own.numel()


def _find_in_place(
    module: FusionModule, node: fx.Node, known: dict[tuple[int, Any], tuple[bool, ...]]
) -> tuple[bool, ...]:
    # For each result of a fusion node whether it may be what the node reads; ``known``: what was found before.
    if writes_elements(module, node):
        return (True,) * len(values_of(node))
    none, described = (False,) * len(values_of(node)), describe_all(node.args)
    if described is None or not gives_items(node):
        return none
    key = module.spec.key, described
    if key not in known:
        known[key] = none
        # What goes wrong is left to the call.
        with ignoring(Exception):
            known[key] = find_in_place(module.spec, described)
    return known[key]
