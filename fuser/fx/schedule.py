"""The order of a compiled graph's calls: what lets go of more memory than it takes comes before what takes more.

A linear layer's backward pass asks for the gradient of its input, which is large, and for that of its weight, after
which nobody reads the input any more. In which order they come says nothing of their values, but which of the two large
tensors lives while the other one does. A call is made earlier only where it is sure to raise no peak: it takes no more
than the call that it comes before, and afterwards there is less.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from fuser.fx.effects import is_barrier, is_random
from fuser.fx.fusion_node import FusionModule
from fuser.fx.gains import count_bytes
from fuser.fx.nodes import is_fresh, is_pending

__all__ = ["find_memory", "free_early", "mark_own"]

# Of a placeholder, that nobody else holds what it stands for.
IS_OWN = "fuser_is_own"
# What is worth another order.
LARGE_BYTES = 1 << 20


def mark_own(forward: fx.GraphModule, backward: fx.GraphModule, output_count: int) -> None:
    """Note in a backward graph which of its arguments are gone with the list that brings them.

    Args:
        forward: returns what its caller asked for, and then what the backward pass reads, under the same names.
        backward: its placeholders are marked.
        output_count: how many of its results the caller of ``forward`` has.
    """
    memory = find_memory(forward.graph)
    results: Any = forward.graph.output_node().args[0]
    held = {base for item in results[:output_count] if isinstance(item, fx.Node) for base in memory[item]}
    held.update(forward.graph.find_nodes(op="placeholder"))
    saved = {
        item.name for item in results[output_count:] if isinstance(item, fx.Node) and held.isdisjoint(memory[item])
    }
    for node in backward.graph.find_nodes(op="placeholder"):
        if node.name in saved:
            node.meta[IS_OWN] = True


def free_early(graph_module: fx.GraphModule) -> None:
    """Order the nodes of a graph with fusion nodes anew."""
    graph = graph_module.graph
    nodes = list(graph.nodes)
    order = list(_Schedule(graph_module).order())
    if order != nodes:
        end = graph.output_node()
        for node in order:
            if node is not end:
                end.prepend(node)
        graph.lint()


class _Schedule:
    def __init__(self, graph_module: fx.GraphModule) -> None:
        self.nodes = list(graph_module.graph.nodes)
        self.slots = {node: slot for slot, node in enumerate(self.nodes)}
        self.memory = find_memory(graph_module.graph)
        self.fixed = {node for node in self.nodes if _is_fixed(graph_module, node)}
        self.done: set[fx.Node] = set()
        # What calls read, through views and items: the calls that make it, and the memory.
        self.sources: dict[fx.Node, set[fx.Node]] = {}
        self.waits: dict[fx.Node, set[fx.Node]] = {}
        self.readers: dict[fx.Node, set[fx.Node]] = {}
        self.asked_by: dict[fx.Node, list[fx.Node]] = {}
        for node in self.nodes:
            found: set[fx.Node] = set()
            for source in node.all_input_nodes:
                found |= self.sources[source] if _is_light(source) else {source}
            self.sources[node] = found
            if not _is_light(node):
                self.waits[node] = {*found}
                for source in found:
                    self.asked_by.setdefault(source, []).append(node)
                for base in self._read(node):
                    self.readers.setdefault(base, set()).add(node)
        self.ready: set[fx.Node] = set()

    def order(self) -> Iterator[fx.Node]:
        """Give the nodes as they are to be called."""
        end = 0
        for slot, node in enumerate(self.nodes):
            if slot >= end:
                # No node passes one that is fixed.
                end = next((i for i in range(slot, len(self.nodes)) if self.nodes[i] in self.fixed), len(self.nodes))
            if node in self.done:
                continue
            if slot < end and node.op != "placeholder" and not _is_light(node):
                yield from self._earlier(node, end)
            yield from self._give(node)

    def _earlier(self, node: fx.Node, end: int) -> Iterator[fx.Node]:
        # Calls that are better made before a node: in their order, and what that makes ready.
        taken = _count_bytes(node)
        while taken >= LARGE_BYTES:
            likely = sorted((item for item in self.ready if item is not node), key=self.slots.__getitem__)
            chosen = next((item for item in likely if self.slots[item] < end and self._frees(item, taken)), None)
            if chosen is None:
                return
            yield from self._give(chosen)

    def _frees(self, node: fx.Node, most: int) -> bool:
        own = _count_bytes(node)
        if own > most:
            return False
        freed = sum(count_bytes(base.meta.get("val")) for base in self._read(node) if self.readers[base] == {node})
        return freed - own >= LARGE_BYTES

    def _read(self, node: fx.Node) -> set[fx.Node]:
        # Memory of the graph's own that a call reads.
        bases = {base for source in node.all_input_nodes for base in self.memory[source]}
        return {base for base in bases if base.op != "placeholder" or base.meta.get(IS_OWN)}

    def _give(self, node: fx.Node) -> Iterator[fx.Node]:
        # With the views and items that it reads.
        if node in self.done:
            return
        for source in node.all_input_nodes:
            yield from self._give(source)
        self.done.add(node)
        self.ready.discard(node)
        yield node
        if _is_light(node):
            return
        for base in self._read(node):
            self.readers[base].discard(node)
        for user in self.asked_by.get(node, ()):
            self.waits[user].discard(node)
            if not self.waits[user] and user not in self.fixed and user not in self.done:
                self.ready.add(user)


def _is_light(node: fx.Node) -> bool:
    # Whether a node is no more than how others read memory. One that nobody reads is one that reads it.
    return _is_view(node) and bool(node.users)


def _is_view(node: fx.Node) -> bool:
    is_call = node.op in {"call_function", "call_method"}
    return is_call and (node.target is operator.getitem or not is_fresh(node))


def _count_bytes(node: fx.Node) -> int:
    return 0 if _is_view(node) else count_bytes(node.meta.get("val"))


def _is_fixed(graph_module: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        return type(graph_module.get_submodule(str(node.target))) is not FusionModule or bool(node.kwargs)
    is_call = node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)
    is_plain = node.target is operator.getitem or is_call
    return node.op != "placeholder" and (not is_plain or is_barrier(node) or is_random(node))


def find_memory(graph: fx.Graph) -> dict[fx.Node, set[fx.Node]]:
    """Return in whose memory each value lies: of its own, an item of a tuple too, or of what it is a view of.

    Who waits for the result of a collective reads all that was given to it.
    """
    found: dict[fx.Node, set[fx.Node]] = {}
    for node in graph.nodes:
        is_own = not _is_view(node) or (node.target is operator.getitem and is_fresh(node))
        found[node] = {node} if is_own else set()
        if not is_own or is_pending(node):
            found[node].update(base for source in node.all_input_nodes for base in found[source])
    return found
