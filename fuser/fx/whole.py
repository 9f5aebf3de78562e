"""Graphs that are one fusion node and nothing else: a call of one is a call of its group, and can be replayed."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from fuser.compiler import register
from fuser.fx.fusion_node import FusionCall, FusionModule
from fuser.kernel_spec import KernelSpec

__all__ = ["WholeFusion", "find_whole_fusion"]


@dataclass(frozen=True, slots=True)
class WholeFusion:
    """A graph that is one fusion node and nothing else: a call of it is a call of its group."""

    spec: KernelSpec
    module: FusionModule
    # Each input of the group: a slot among the arguments, or -1 - k for the k-th constant.
    order: tuple[int, ...]
    constants: tuple[Any, ...]
    # Whether every argument is an input.
    reads_all: bool

    def inputs(self, arguments: Sequence[Any]) -> list[Any]:
        """Return the group's inputs."""
        return [arguments[slot] if slot >= 0 else self.constants[-1 - slot] for slot in self.order]


def find_whole_fusion(module: fx.GraphModule) -> WholeFusion | None:
    """Return what a graph amounts to if it is one fusion node whose outputs, each once, are its result."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    rest = [node for node in module.graph.nodes if node.op != "placeholder"]
    if not rest or rest[0].op != "call_module":
        return None
    fused, result = rest[0], rest[-1].args[0]
    target = module.get_submodule(str(fused.target))
    if not isinstance(target, FusionModule) or not isinstance(target.run, FusionCall):
        # The last one is watched.
        return None
    count = len(target.group.outputs)
    items = rest[1 : 1 + count] if count > 1 else []
    if any(item.target is not operator.getitem or item.args != (fused, k) for k, item in enumerate(items)):
        return None
    if isinstance(result, fx.Node) and result.target is tuple:
        result, items = result.args[0], [*items, result]
    made = [fused] if count == 1 else items[:count]
    results = list(result) if isinstance(result, tuple | list) and count > 1 else [result]
    # Beside its values there may be anything, also what has no hash.
    if (
        not all(isinstance(item, fx.Node) for item in results)
        or {*results} != {*made}
        or len(results) != count
        or len(rest) != 2 + len(items)
        or isinstance(rest[-1].args[0], list)
    ):
        return None
    slots = {node: slot for slot, node in enumerate(placeholders)}
    constants = tuple(item for item in fused.args if not isinstance(item, fx.Node))
    numbered = iter(range(len(constants)))
    order = tuple(slots[item] if isinstance(item, fx.Node) else -1 - next(numbered) for item in fused.args)
    # The function may return them in another order than it computes them.
    is_in_order = results == made
    if target.is_differentiated and not is_in_order:
        return None
    spec = target.spec if is_in_order else register(target.group.select_outputs([*map(made.index, results)]))
    return WholeFusion(spec, target, order, constants, {*slots.values()} <= {*order})
