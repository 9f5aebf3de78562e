"""Graphs that operators of a graph call: the branches of ``torch.cond``, loops, and regions that are compiled once."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx
from torch._ops import HigherOrderOperator

__all__ = ["bodies_of", "find_bodies"]

# They call graphs with the tensors that they are given, as a call_module would. Others map them (associative_scan), or
# look at each of their operators (strict_mode).
CALLERS = frozenset({"cond", "invoke_subgraph", "while_loop"})


def bodies_of(graph_module: fx.GraphModule, node: fx.Node) -> dict[str, fx.GraphModule]:
    """Return the graphs that a node calls, by where the graph has them."""
    if not (isinstance(node.target, HigherOrderOperator) and node.target._name in CALLERS):
        return {}
    names = [str(item.target) for item in node.all_input_nodes if item.op == "get_attr"]
    found: dict[str, Any] = {name: operator.attrgetter(name)(graph_module) for name in names}
    return {name: item for name, item in found.items() if isinstance(item, fx.GraphModule)}


def find_bodies(graph_module: fx.GraphModule) -> dict[str, fx.GraphModule]:
    """Return the graphs that the nodes of a graph call."""
    return {name: body for node in graph_module.graph.nodes for name, body in bodies_of(graph_module, node).items()}
