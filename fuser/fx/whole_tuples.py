"""Tuples of torch's: what is read as one is put together of items, which a group can make."""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import torch
from torch import fx

from fuser.fx.nodes import bind_node, takes_item
from fuser.ops import REDUCTIONS

__all__ = ["take_tuples_apart"]

_TUPLES = frozenset(op.name.removesuffix("_dim") for op in REDUCTIONS.values() if op.num_outputs > 1)


def take_tuples_apart(graph: fx.Graph) -> None:
    """Let items of tuples be taken where those are made, and who reads a whole one read it put together of items.

    The latter of what is made of computed values (``torch.max(x * 2, 1)``).
    """
    for node in [node for node in graph.nodes if _name(node) in _TUPLES]:
        call = bind_node(node)
        if call is None or not call.items:
            continue
        takers = [user for user in node.users if takes_item(user, call)]
        for user in reversed(takers):
            # Behind a write it would take an item of what a group returns, which knows no names.
            node.append(user)
        readers = [user for user in node.users if user not in takers]
        if not readers or min(call.items) < 0 or not any(map(bind_node, node.all_input_nodes)):
            continue
        with graph.inserting_before(node.next):
            items = {node: _put_together(graph, node, len(call.items))}
        for reader in readers:
            reader.args, reader.kwargs = fx.map_arg((reader.args, reader.kwargs), partial(_find, items))


def _name(node: fx.Node) -> str:
    # That of a method, a function, or an operator without its overload.
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.partition(".")[0]


def _find(items: dict[fx.Node, Any], node: fx.Node) -> Any:
    return items.get(node, node)


def _put_together(graph: fx.Graph, node: fx.Node, count: int) -> Any:
    items = tuple(graph.call_function(operator.getitem, (node, slot)) for slot in range(count))
    for item, value in zip(items, node.meta.get("val", ()), strict=False):
        item.meta["val"] = value
    # ATen's overloads return plain tuples, as some functions do.
    named = None if isinstance(node.target, torch._ops.OpOverload) else getattr(torch.return_types, _name(node), None)
    return items if named is None else graph.call_function(named, (items,))
