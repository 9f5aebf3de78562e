"""Fusion nodes in FX graphs: a pass that puts one module per group in place of the group's nodes."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from fuser import log
from fuser.compiler import register, registered
from fuser.config import config
from fuser.fx.expansions import drop_expansions
from fuser.fx.merged_sums import sum_unviewed
from fuser.fx.nodes import bind_group, bind_node, is_random
from fuser.fx.partition import Partition, is_whole, partition
from fuser.fx.splits import open_splits
from fuser.graph import FusionGroup, GroupBuilder
from fuser.jit_function import JitFunction
from fuser.kernel_spec import KernelSpec
from fuser.launcher import Replayer, called_in_c
from fuser.library import split_inputs
from fuser.ops import OpCall, bind_for, is_creation
from fuser.route import call_anew
from fuser.warming.symbolic import warm_up

__all__ = ["Fuel", "FusionCall", "FusionModule", "FusionPass", "fuse_graph", "sort_graph"]


@called_in_c
class FusionCall(Replayer):
    """A registered group as a function of its inputs; returns a tensor, or a tuple of tensors for several outputs."""

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec
        self.text = spec.text
        super().__init__((), ())

    def __call__(self, *inputs: Any, out: Any = None) -> Any:
        """Run the group; ``out`` is where results are written, a tensor or a tuple of them."""
        if torch.compiler.is_dynamo_compiling() and out is None:
            results = torch.ops.fuser.run(self.text, *split_inputs(inputs))
            return results[0] if len(results) == 1 else tuple(results)
        replayed = self.launch(inputs, None, out)
        return self.call_anew(*inputs, out=out) if replayed is None else replayed

    def call_anew(self, *inputs: Any, out: Any = None) -> Any:
        """Serve a call that is not like an earlier one."""
        return call_anew(self.spec, inputs, self, inputs, None, out)

    def __reduce__(self) -> tuple[Any, ...]:
        # A spec holds locks and kernels; the text says everything.
        return _load_call, (self.text,)


def _load_call(text: str) -> FusionCall:
    return FusionCall(registered(text))


class FusionModule(torch.nn.Module):
    """A fusion node: a registered group as a module, called with the group's inputs.

    Attributes:
        group: the FusionGroup.
        node_names: names of the FX nodes it stands for.
        is_differentiated: whether autograd differentiates it as torch does the nodes.
    """

    is_differentiated = False

    def __init__(self, group: FusionGroup, node_names: Sequence[str] = ()) -> None:
        super().__init__()
        self.group = group
        self.node_names = tuple(node_names)
        self.run = FusionCall(register(group))

    @property
    def spec(self) -> KernelSpec:
        """The group as it is registered."""
        return self.run.spec

    def forward(self, *inputs: Any) -> Any:
        """Run the group; returns a tensor, or a sequence of tensors for several outputs."""
        return self.run(*inputs)

    def extra_repr(self) -> str:
        """One line per application."""
        return str(self.group)

    def __reduce__(self) -> tuple[Any, ...]:
        # A spec holds locks and kernels; the group says everything.
        return FusionModule, (self.group, self.node_names)


class Fuel:
    """How many groups may still be made: to bisect a wrong result.

    Attributes:
        limit: how many in all; None: as many as ``config.fuel`` says.
        burnt: how many were asked for.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.burnt = 0

    def burn(self) -> bool:
        """Count one more; return whether it may be made."""
        limit = config.fuel if self.limit is None else self.limit
        if limit is not None:
            self.burnt += 1
        return limit is None or self.burnt <= limit

    def see(self, module: FusionModule) -> None:
        """Look at a group that was made."""


# Of the whole process.
process_fuel = Fuel()

FusionNode: TypeAlias = Callable[[FusionGroup, Sequence[str], fx.GraphModule], FusionModule]


class FusionPass(PassBase):
    """Replace maximal convex groups of functor calls and table ops by fusion nodes, in place.

    The result's ``modified`` says whether there was any. Nodes with ``meta["val"]`` (as AOTAutograd gives) are
    grouped by device and shape; without it, what does not fit together at run time is launched apart.

    Args:
        reduces: whether torch's reductions join groups.
        differentiable: makes the fusion node of a group with torch's reductions (in strict numerics of any of torch's
            ops and nothing else), where autograd differentiates the graph: takes the group, the names of its nodes, and
            those as a graph of the group's inputs. None: a node is a FusionModule.
        device_type: where values are that the graph says nothing of, such as "cuda".
        numerics: what the groups run with, whatever the settings say: "strict" or "fast"; None: as the settings say.
        fuel: how many groups it may make; None: as many as the settings say for the whole process.
    """

    def __init__(
        self,
        *,
        reduces: bool = True,
        differentiable: FusionNode | None = None,
        device_type: str = "",
        numerics: str | None = None,
        fuel: Fuel | None = None,
    ) -> None:
        super().__init__()
        self.reduces = reduces
        self.differentiable = differentiable
        self.device_type = device_type
        self.numerics = numerics
        self.fuel = fuel

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        """Run on one graph module."""
        with bind_for(self.numerics):
            open_splits(graph_module.graph)
            drop_expansions(graph_module.graph)
            sum_unviewed(graph_module.graph)
            groups = self.find_groups(graph_module.graph)
        fuel = self.fuel or process_fuel
        substitution = _Substitution(graph_module, self.numerics, self.differentiable, groups)
        for found in groups:
            if not fuel.burn():
                break
            fuel.see(substitution.add(found))
        if substitution.fused:
            substitution.finish()
            sort_graph(graph_module.graph)
            graph_module.graph.lint()
            graph_module.recompile()
        return PassResult(graph_module, bool(substitution.fused))

    def find_groups(self, graph: fx.Graph) -> list[Partition]:
        """Return what becomes fusion nodes."""
        return partition(graph, reduces=self.reduces, device_type=self.device_type)


def fuse_graph(graph_module: fx.GraphModule, example_inputs: Sequence[Any] | None = None) -> fx.GraphModule:
    """Substitute fusion nodes into a graph module, in place, and return it.

    Args:
        graph_module: calls functors (JitFunction), torch functions, tensor methods or ATen overloads.
        example_inputs: real, fake or meta tensors, one per placeholder; where given, the kernels are compiled now.
    """
    FusionPass()(graph_module)
    if example_inputs is not None:
        names = [str(node.target) for node in graph_module.graph.find_nodes(op="placeholder")]
        warm_up(graph_module, example_inputs, {}, names=names)
    return graph_module


class _GroupWriter:
    """Builds the FusionGroup of a partition, and the arguments its fusion node is called with."""

    def __init__(
        self,
        found: Partition,
        replaced: Mapping[fx.Node, fx.Node],
        numerics: str | None,
        remade: Mapping[fx.Node, OpCall],
        in_parts: set[fx.Node],
    ) -> None:
        self.builder = GroupBuilder(numerics)
        # What stands for the nodes of other groups now.
        self.replaced = replaced
        # Handles of the values each node of this one makes.
        self.values: dict[fx.Node, tuple[int | None, ...]] = {}
        self.tensors: dict[fx.Node, int] = {}
        self.scalars: dict[fx.Node, int] = {}
        self._arguments: list[tuple[bool, Any]] = []
        self._calls = dict(zip(found.nodes, found.calls, strict=True))
        # Nodes outside that are made again here.
        self.remade = remade if in_parts.issuperset(found.nodes) else {}
        self.like: dict[torch.device | None, fx.Node] = {}
        read = (source for member in found.nodes for source in member.all_input_nodes)
        for node in dict.fromkeys(read):
            if node not in self._calls and not self._is_number(node):
                self.like.setdefault(_device(node), node)
        for node, applied in zip(found.nodes, found.calls, strict=True):
            self.values[node] = self._add(node, applied)

    def _is_number(self, node: fx.Node) -> bool:
        # Whether nothing but numbers makes it.
        call = self.remade.get(node)
        return call is not None and (is_creation(call) or (call.is_view and self._is_number(call.tensors[0])))

    def _remake(self, node: fx.Node) -> int | None:
        call = self.remade.get(node)
        if call is None:
            return None
        if is_creation(call) and len(call.tensors) < len(call.function.functor.tensors):
            # Some tensor says which device it is on.
            like = self.like.get(_device(node))
            if like is None:
                return None
            call = replace(call, tensors=(*call.tensors, like))
        (made,) = self.values[node] = self._apply(call, node.name)
        return made

    def _add(self, node: fx.Node, call: OpCall | None) -> tuple[int | None, ...]:
        if call is not None:
            made = self._apply(call, node.name)
            return made if call.items is None else tuple(made[item] if item >= 0 else None for item in call.items)
        if node.target in {operator.getitem, getattr}:
            source: Any = node.args[0]
            whole = self._calls[source]
            slot: Any = node.args[1] if whole is None else whole.find_item(node)
            return (self.values[source][slot],)
        group = bind_group(node)
        assert group is not None, "the partitioner chose it"
        return self._inline(*group)

    def _apply(self, call: OpCall, name: str) -> tuple[int, ...]:
        tensors = [self._tensor(value) for value in call.tensors]
        scalars = [self._scalar(call.scalars[item.name], item.name) for item in call.function.scalars]
        return self.builder.apply(call.function, tensors, scalars, name)

    def _inline(self, group: FusionGroup, inputs: list[Any]) -> tuple[int, ...]:
        handles = [
            self._scalar(value, item.name) if item.is_scalar else self._tensor(value)
            for item, value in zip(group.inputs, inputs, strict=True)
        ]
        return self.builder.inline(group, handles)

    def _tensor(self, value: Any) -> int:
        if isinstance(value, OpCall):
            return self._apply(value, "")[0]
        if isinstance(value, fx.Node):
            if value in self.values:
                handle = self.values[value][0]
                assert handle is not None, "nodes read what is made"
                return handle
            made = self._remake(value)
            if made is not None:
                return made
            value = self.replaced.get(value, value)
            if value not in self.tensors:
                self.tensors[value] = self._input(value, value.name, is_scalar=False)
            return self.tensors[value]
        return self._input(value, "number", is_scalar=False)

    def _scalar(self, value: Any, name: str) -> int:
        if not isinstance(value, fx.Node):
            return self._input(value, name, is_scalar=True)
        value = self.replaced.get(value, value)
        if value not in self.scalars:
            self.scalars[value] = self._input(value, value.name, is_scalar=True)
        return self.scalars[value]

    def _input(self, value: Any, name: str, *, is_scalar: bool) -> int:
        # Numbers are run-time arguments too: two graphs that differ in a constant share one kernel.
        default = None if isinstance(value, fx.Node) else value
        self._arguments.append((default is not None, value))
        return self.builder.add_input(name, is_scalar=is_scalar, default=default)

    def arguments(self) -> tuple[Any, ...]:
        """Return what the fusion node is called with, in the order of the group's inputs: constants come last."""
        return tuple(value for _, value in sorted(self._arguments, key=operator.itemgetter(0)))


class _Substitution:
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
        writer = _GroupWriter(found, self.replaced, self.numerics, self.remade, self.in_parts)
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
        make, nodes = self.differentiable, None
        if make is not None and self._follows_torch(found.calls, group):
            nodes = self._copy_nodes(found, returned, writer, arguments)
        log.say("node", f"{name}: {', '.join(names)}")
        made = FusionModule(group, names) if make is None or nodes is None else make(group, names, nodes)
        self.module.add_submodule(name, made)
        with self.graph.inserting_after(found.nodes[-1]):
            fused = self.graph.call_module(name, arguments)
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

    def _copy_nodes(
        self, found: Partition, returned: Sequence[fx.Node], writer: _GroupWriter, arguments: Sequence[Any]
    ) -> fx.GraphModule | None:
        # What a group stands for, as a graph of its inputs; None where nodes read more than those.
        graph = fx.Graph()
        inputs = {value: graph.placeholder(f"input_{slot}") for slot, value in enumerate(arguments)}
        copies: dict[fx.Node, fx.Node] = {}
        read = {source for node in found.nodes for source in node.all_input_nodes} - {*found.nodes}
        for source in read:
            if self.replaced.get(source, source) not in inputs:
                return None
            copies[source] = inputs[self.replaced.get(source, source)]
        for node in found.nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        made: list[fx.Node] = []
        for node in returned:
            handles = writer.values[node]
            items = [slot for slot, handle in enumerate(handles) if handle is not None]
            is_one = len(handles) == 1 and not _is_tuple(node)
            made += (
                [copies[node]]
                if is_one
                else [graph.call_function(operator.getitem, (copies[node], slot)) for slot in items]
            )
        graph.output(tuple(made))
        return fx.GraphModule(self.module, graph)

    def _add_results(self, fused: fx.Node, returned: list[fx.Node], writer: _GroupWriter, count: int) -> fx.Node:
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
        for node in reversed(self.graph.nodes):
            if node in inside or (node in self.remade and not node.users):
                self.graph.erase_node(node)


def _is_returned(node: fx.Node, inside: Mapping[fx.Node, Any]) -> bool:
    # A functor with several outputs is returned through its getitems unless somebody takes the tuple itself.
    return any(user not in inside for user in node.users) or not node.users


def _find_remade(graph: fx.Graph, in_parts: Collection[fx.Node]) -> dict[fx.Node, OpCall]:
    # Tensors of numbers alone, and views that groups alone read: they cost nothing there.
    calls = {node: bind_node(node) for node in graph.nodes if node not in in_parts and node.op == "call_function"}
    inner: set[fx.Node] = set()
    for node, call in reversed(calls.items()):
        is_read = all(user in in_parts or user in inner for user in node.users)
        if call is not None and call.is_view and isinstance(call.tensors[0], fx.Node) and is_read:
            inner.add(node)
    return {node: call for node, call in calls.items() if call is not None and (node in inner or is_creation(call))}


def _device(node: fx.Node) -> torch.device | None:
    value = node.meta.get("val")
    return value.device if isinstance(value, torch.Tensor) else None


def _fake_values(node: fx.Node) -> list[Any]:
    value = node.meta.get("val")
    values = list(value) if isinstance(value, list | tuple) else [value]
    return [item for item in values if item is not None]


def _is_tuple(node: fx.Node) -> bool:
    is_several = isinstance(node.target, JitFunction) and node.target.function.num_outputs > 1
    return is_several or node.target is torch.ops.fuser.run.default


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
