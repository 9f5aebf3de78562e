"""Nodes that compute the same of the same, as one: what torch does before it splits a joint graph into passes.

Torch's own function for it imports Inductor's pattern matcher, which takes a fifth of the time of a first step.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from fuser.fx.effects import is_barrier
from fuser.fx.nodes import find_storage

__all__ = ["merge_equal"]

# What two calls of an operator with the same arguments need not agree in.
_OWN = frozenset({torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


def merge_equal(graph: fx.Graph) -> None:
    """Let the readers of a node read an equal one before it, between the same writes.

    Results of the graph keep memory of their own, as in eager torch. Only inputs are written, as in a joint graph.
    """
    output = next(iter(graph.find_nodes(op="output")))
    returned = {find_storage(node.meta.get("val")) for node in output.all_input_nodes} - {None}
    # By names, which are those of one node each: as text 0.0 is not -0.0, and 1 is not 1.0.
    first: dict[tuple[object, str, int], fx.Node] = {}
    writes = 0
    for node in graph.nodes:
        writes += is_barrier(node)
        if not _is_pure(node) or find_storage(node.meta.get("val")) in returned:
            continue
        same = first.setdefault((node.target, repr((node.args, node.kwargs)), writes), node)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def _is_pure(node: fx.Node) -> bool:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        is_left_open = "empty" in str(target) or not _OWN.isdisjoint(target.tags)
        return not target._schema.is_mutable and not is_left_open
    return target is operator.getitem
