"""The group of some nodes of an FX graph, and what its fusion node is called with."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fuser.dtypes import plain_number
from fuser.fx.nodes import bind_group
from fuser.fx.partition import Partition
from fuser.graph import FusionGroup, GroupBuilder
from fuser.ops import OpCall, is_creation

__all__ = ["GroupWriter"]


class GroupWriter:
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
        # Numbers are run-time arguments too: two graphs that differ in a constant share one kernel. Anything else the
        # call refuses, by the name of the functor's parameter.
        number = plain_number(value)
        default = number if isinstance(number, bool | int | float | complex) else None
        self._arguments.append((default is not None, value))
        return self.builder.add_input(name, is_scalar=is_scalar, default=default)

    def arguments(self) -> tuple[Any, ...]:
        """Return what the fusion node is called with, in the order of the group's inputs: constants come last."""
        return tuple(value for _, value in sorted(self._arguments, key=operator.itemgetter(0)))


def _device(node: fx.Node) -> torch.device | None:
    value = node.meta.get("val")
    return value.device if isinstance(value, torch.Tensor) else None
