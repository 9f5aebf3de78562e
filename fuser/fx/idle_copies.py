"""Copies that nobody can tell from what they copy: dropouts of nothing, pads of nothing. Dropped.

In eager torch a model pays nothing for a dropout of nothing; AOTAutograd's decomposition copies. Models that pad to
whole windows pad most sizes by nothing, and torch copies. What reads a copy reads its source instead, and joins its
group.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from fuser.fx.nodes import is_barrier, may_alias

__all__ = ["drop_idle_copies"]

_ATEN = torch.ops.aten


def drop_idle_copies(graph: fx.Graph) -> None:
    """Let all read what is copied where a copy lies as that does, and what is detached: graphs have no autograd.

    Copies stay of a graph's inputs, which others may write to later, those that are returned, and those that are read
    after something was written.
    """
    for node in graph.find_nodes(op="call_function", target=_ATEN.detach.default):
        # A gradient that reads it is pointwise to torch's partitioner then.
        if not any(user.op == "output" for user in node.users):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    copies = graph.find_nodes(op="call_function", target=_ATEN.clone.default)
    copies += [
        node
        for node in graph.find_nodes(op="call_function", target=_ATEN.constant_pad_nd.default)
        if not any(node.args[1])
    ]
    if not copies:
        return
    order = {node: number for number, node in enumerate(graph.nodes)}
    writes = [order[node] for node in order if is_barrier(node)]
    for node in copies:
        source = node.args[0]
        # A checkpoint's policy may ask for the copy.
        is_free = "recompute" not in node.meta and isinstance(source, fx.Node) and _is_computed(source)
        if not is_free or _lies(node) != _lies(source):
            continue
        readers = _find_readers(node)
        last = max(map(order.__getitem__, readers), default=0)
        is_seen = any(item.op == "output" or is_barrier(item) for item in readers)
        if not is_seen and not any(order[node] < number < last for number in writes):
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _is_computed(node: fx.Node) -> bool:
    while may_alias(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor | list | tuple)


def _lies(node: fx.Node) -> str:
    # As text: sizes may be symbols, of which nothing shall be assumed. Products may choose kernels by alignment.
    value = node.meta["val"]
    return f"{list(value.shape)} {value.stride()} {value.storage_offset()}"


def _find_readers(node: fx.Node) -> Collection[fx.Node]:
    # Of a tensor, and of its views.
    found: dict[fx.Node, None] = {}
    waiting = [*node.users]
    while waiting:
        user = waiting.pop()
        if user not in found:
            found[user] = None
            waiting += user.users if may_alias(user) else ()
    return found
