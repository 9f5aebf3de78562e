"""Puts fusion nodes into an FX graph, in place of the nodes of groups."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import PythonKeyTracer
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map_only

from fuser import log
from fuser.config import config
from fuser.fx.effects import is_barrier, is_random
from fuser.fx.fusion_node import FusionModule, FusionNode, Layouts, find_layouts
from fuser.fx.group_writer import GroupWriter
from fuser.fx.nodes import MAY_BE_NUMBER, bind_node, may_be_number
from fuser.fx.partition import Partition, is_whole
from fuser.fx.plain_nodes import PlainNodes
from fuser.graph import FusionGroup
from fuser.jit_function import JitFunction
from fuser.ops import OpCall, is_bound_by_sizes, is_creation

__all__ = ["Substitution", "sort_graph"]


class Substitution:
    """Puts fusion nodes beside the groups they stand for, then takes the groups out of the graph."""

    def __init__(
        self,
        graph_module: fx.GraphModule,
        numerics: str | None,
        differentiable: FusionNode | None,
        groups: Sequence[Partition],
    ) -> None:
        self.numerics = numerics
        self.differentiable = differentiable
        self.module = graph_module
        self.graph = graph_module.graph
        self.fused: list[fx.Node] = []
        self.replaced: dict[fx.Node, fx.Node] = {}
        # The nodes of groups that read in parts, and what those make themselves of what they read.
        self.in_parts = {
            node for found in groups if not any(map(is_whole, found.nodes, found.calls)) for node in found.nodes
        }
        self.remade = _find_remade(self.graph, self.in_parts)
        self._names = (name for number in itertools.count() if not hasattr(graph_module, name := f"fusion_{number}"))

    def add(self, found: Partition) -> FusionModule:
        """Add the fusion node of a group."""
        writer = GroupWriter(found, self.replaced, self.numerics, self.remade, self.in_parts)
        wanted = {node for node in found.nodes if _is_returned(node, writer.values)}
        views = {node for node, call in zip(found.nodes, found.calls, strict=True) if call is not None and call.is_view}
        for node in reversed(found.nodes):
            # A view that others see is torch's, of what the group returns.
            if node in views & wanted:
                wanted.update(source for source in node.all_input_nodes if source in writer.values)
        returned = [node for node in found.nodes if node in wanted - views]
        handles = [handle for node in returned for handle in writer.values[node] if handle is not None]
        name = next(self._names)
        group, arguments, names = writer.builder.build(handles), writer.arguments(), [node.name for node in found.nodes]
        make = self.differentiable
        if make is not None and not self._follows_torch(found.calls, group):
            make = None
        is_of_numbers = make is None and any(map(may_be_number, arguments))
        layouts = None if make else self._find_layouts(found, arguments)
        log.say("node", f"{name}: {', '.join(names)}")
        nodes = None if make is None else self._copy_graph(found, returned, writer, arguments)
        if make is not None and nodes is not None:
            made = make(group, names, fx.GraphModule(self.module, nodes))
        else:
            plain = PlainNodes(len(arguments), takes_numbers=is_of_numbers)
            inputs = {value: plain.input(slot) for slot, value in enumerate(arguments)}
            results = self._copy_nodes(found, returned, writer, inputs, plain)
            made = FusionModule(group, names, None if results is None else plain.returning(results), layouts)
        self.module.add_submodule(name, made)
        with self.graph.inserting_after(found.nodes[-1]):
            fused = self.graph.call_module(name, arguments)
        _keep_stack_trace(fused, returned[-1])
        if is_of_numbers:
            fused.meta[MAY_BE_NUMBER] = True
        values = [value for node in returned for value in _fake_values(node)]
        if len(values) == len(handles):
            fused.meta["val"] = values[0] if len(values) == 1 else values
        last = self._add_results(fused, returned, writer, len(handles))
        for node in found.nodes:
            if node in views & wanted:
                with self.graph.inserting_after(last):
                    last = self.graph.node_copy(node, lambda source: self.replaced.get(source, source))
                self.replaced[node] = last
        self.fused += found.nodes
        return made

    def _follows_torch(self, calls: Sequence[OpCall | None], group: FusionGroup) -> bool:
        # Whether autograd differentiates a group by torch's formulas: strict numerics promise their bits where all of
        # it is torch's. The derivative of functors is one kernel with that of their neighbours.
        is_strict = (self.numerics or config.numerics) == "strict"
        found = [call for call in calls if call is not None]
        if any(call.reduces for call in found):
            return True
        # Formulas are for the values of numbers: those that each call brings would make kernels without end.
        has_numbers = any(item.is_scalar and item.default is None for item in group.inputs)
        return is_strict and not has_numbers and all(call.function.op for call in found)

    def _copy_graph(
        self, found: Partition, returned: Sequence[fx.Node], writer: GroupWriter, arguments: Sequence[Any]
    ) -> fx.Graph | None:
        # What a group stands for, as a graph of its inputs; None where nodes read more than those.
        graph = fx.Graph()
        inputs = {value: graph.placeholder(f"input_{slot}") for slot, value in enumerate(arguments)}
        made = self._copy_nodes(found, returned, writer, inputs, graph)
        if made is None:
            return None
        graph.output(tuple(made))
        return graph

    def _copy_nodes(
        self,
        found: Partition,
        returned: Sequence[fx.Node],
        writer: GroupWriter,
        inputs: Mapping[Any, Any],
        target: fx.Graph | PlainNodes,
    ) -> list[Any] | None:
        # Copies the nodes of a group to a graph, or what is written as one; returns what the group returns there.
        copies: dict[fx.Node, Any] = {}

        def find(source: fx.Node) -> Any:
            if source not in copies:
                known = inputs.get(self.replaced.get(source, source))
                if known is None and source not in self.remade:
                    raise KeyError(source)
                copies[source] = target.node_copy(source, find) if known is None else known
            return copies[source]

        try:
            for node in found.nodes:
                copies[node] = target.node_copy(node, find)
        except KeyError:
            return None
        made: list[Any] = []
        for node in returned:
            if self.differentiable is not None and not node.users:
                # Nor will anybody differentiate what nobody reads.
                copies[node] = target.call_function(_without_gradient, (copies[node],))
            handles = writer.values[node]
            items = [slot for slot, handle in enumerate(handles) if handle is not None]
            is_one = len(handles) == 1 and not _is_tuple(node)
            made += (
                [copies[node]]
                if is_one
                else [target.call_function(operator.getitem, (copies[node], slot)) for slot in items]
            )
        return made

    def _find_layouts(self, found: Partition, arguments: Sequence[Any]) -> Layouts | None:
        # Of the inputs, where nodes are bound by sizes that the graph says are numbers.
        rest, seen = [*found.nodes], set[fx.Node]()
        while rest:
            node = rest.pop()
            if node not in seen:
                seen.add(node)
                rest += [source for source in node.all_input_nodes if source in self.remade]
        values = [item.meta.get("val") if isinstance(item, fx.Node) else item for item in arguments]
        if not any(is_bound_by_sizes(node.target) for node in seen) or not all(map(_is_known, values)):
            return None
        return find_layouts(values)

    def _add_results(self, fused: fx.Node, returned: list[fx.Node], writer: GroupWriter, count: int) -> fx.Node:
        graph, slot, last = self.graph, 0, fused
        for node in returned:
            items: list[fx.Node | None] = []
            for handle in writer.values[node]:
                if handle is None:
                    items.append(None)
                    continue
                if count == 1:
                    items.append(fused)
                    continue
                with graph.inserting_after(last):
                    last = graph.call_function(operator.getitem, (fused, slot))
                _keep_stack_trace(last, node)
                if "val" in fused.meta:
                    last.meta["val"] = fused.meta["val"][slot]
                items.append(last)
                slot += 1
            if _is_tuple(node) or len(items) > 1:
                with graph.inserting_after(last):
                    last = graph.call_function(tuple, (items,))
                self.replaced[node] = last
            else:
                assert items[0] is not None, "it is made"
                self.replaced[node] = items[0]
        return last

    def finish(self) -> None:
        """Let all others read what the fusion nodes return, each rewritten once: an output may have many arguments."""
        inside = set(self.fused)
        hooks = getattr(self.module, "_replace_hooks", ())
        for node in self.graph.nodes:
            old = [] if node in inside else [source for source in node.all_input_nodes if source in self.replaced]
            for source, hook in itertools.product(old, hooks):
                hook(old=source, new=self.replaced[source].name, user=node)
            if old:
                node.args, node.kwargs = map_arg((node.args, node.kwargs), lambda item: self.replaced.get(item, item))
        # What nodes were given that their group does not read goes with them.
        unread = {*self.remade}
        for node in reversed(self.graph.nodes):
            if node in inside or (node in unread and not node.users):
                unread.update(source for source in node.all_input_nodes if _only_computes(source))
                self.graph.erase_node(node)
        if self.graph._tracer_cls is not None and issubclass(self.graph._tracer_cls, PythonKeyTracer):
            # The tracer of make_fx, which reads the module again from a pickle, would look into the fusion nodes.
            self.graph._tracer_cls = self.module._tracer_cls = None


def sort_graph(graph: fx.Graph) -> None:
    """Bring the nodes of a graph into an order in which each comes after what it reads."""
    # Fusion nodes were put after their last member, which may be after a user of another member. The order is by
    # first possible place, keeping the old order otherwise; the partitioner made sure there is one.
    draws = [node for node in graph.nodes if is_random(node)]
    draw_before = dict(zip(draws[1:], draws, strict=False))
    placed: set[fx.Node] = set()
    entered: set[fx.Node] = set()
    order: list[fx.Node] = []
    for node in list(graph.nodes):
        stack = [node]
        while stack:
            current = stack[-1]
            sources = [*current.all_input_nodes, *([draw_before[current]] if current in draw_before else [])]
            waiting = [source for source in sources if source not in placed]
            if waiting and current not in placed:
                assert current not in entered, f"{current} has to come before itself"
                entered.add(current)
                stack += waiting
            else:
                stack.pop()
                if current not in placed:
                    placed.add(current)
                    order.append(current)
    last: fx.Node | None = None
    for node in order:
        if last is not None:
            last.append(node)
        last = node


def _is_returned(node: fx.Node, inside: Mapping[fx.Node, Any]) -> bool:
    # A functor with several outputs is returned through its getitems unless somebody takes the tuple itself.
    return any(user not in inside for user in node.users) or not node.users


def _only_computes(node: fx.Node) -> bool:
    return node.op == "call_function" and not is_barrier(node) and not is_random(node)


def _without_gradient(made: Any) -> Any:
    return tree_map_only(torch.Tensor, torch.detach, made)


def _is_known(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return all(type(size) is int for size in (*value.shape, *value.stride()))
    return isinstance(value, bool | int | float | complex)


def _find_remade(graph: fx.Graph, in_parts: Collection[fx.Node]) -> dict[fx.Node, OpCall]:
    # Tensors of numbers alone, and views that groups alone read: they cost nothing there.
    calls: dict[fx.Node, OpCall | None] = {}
    rest = [source for node in in_parts for source in node.all_input_nodes]
    while rest:
        node = rest.pop()
        if node not in calls and node not in in_parts and node.op == "call_function":
            call = calls[node] = bind_node(node)
            rest += node.all_input_nodes if call is not None and call.is_view else ()
    inner: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        call = calls.get(node)
        is_read = all(user in in_parts or user in inner for user in node.users)
        if call is not None and call.is_view and isinstance(call.tensors[0], fx.Node) and is_read:
            inner.add(node)
    return {node: call for node, call in calls.items() if call is not None and (node in inner or is_creation(call))}


def _fake_values(node: fx.Node) -> list[Any]:
    value = node.meta.get("val")
    values = list(value) if isinstance(value, list | tuple) else [value]
    return [item for item in values if item is not None]


def _keep_stack_trace(made: fx.Node, node: fx.Node) -> None:
    # For readable graphs, and for what torch says of a node that fails, or of a result in a CUDA graph's memory.
    if "stack_trace" in node.meta:
        made.meta["stack_trace"] = node.meta["stack_trace"]


def _is_tuple(node: fx.Node) -> bool:
    is_several = isinstance(node.target, JitFunction) and node.target.function.num_outputs > 1
    return is_several or node.target is torch.ops.fuser.run.default
