"""Which ``x.to(dtype)`` may become part of a kernel: those where nobody can tell a copy from ``x`` itself.

torch returns ``x`` when it has the dtype already, a kernel returns a copy; a graph may not know which dtype ``x`` has.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import fx

from fuser.ops import OpCall

__all__ = ["find_visible_aliases"]


def find_visible_aliases(
    nodes: Sequence[fx.Node], calls: Mapping[fx.Node, OpCall | None], barriers: Collection[fx.Node]
) -> set[fx.Node]:
    """Return the conversions that have to stay torch's.

    Args:
        nodes: of a graph, in its order.
        calls: of the nodes that can be part of a group, what each applies; None for a group.
        barriers: nodes that may write to tensors.
    """
    aliases = dict.fromkeys(node for node in nodes if _may_alias(node, calls))
    invisible: set[fx.Node] = set()
    for node in aliases:
        # Of a new tensor that nobody else reads.
        (source,) = node.all_input_nodes
        if source in calls and len(source.users) == 1 and (source in invisible or source not in aliases):
            invisible.add(node)
    # How many barriers come before each node.
    barriers_before: dict[fx.Node, int] = {}
    count = 0
    for node in nodes:
        barriers_before[node] = count
        count += node in barriers
    for node in reversed(aliases):
        # Read by kernels alone, which make new tensors of it, before anything writes.
        if all(
            user in calls
            and barriers_before[user] == barriers_before[node]
            and (user in invisible or user not in aliases)
            for user in node.users
        ):
            invisible.add(node)
    # A view that somebody sees is made again beside the group.
    return {node for node in aliases if node not in invisible and not _is_view(calls[node])}


def _may_alias(node: fx.Node, calls: Mapping[fx.Node, OpCall | None]) -> bool:
    call = calls.get(node)
    if _is_view(call):
        return True
    if call is None or call.function.op != "convert":
        return False
    (source,) = node.all_input_nodes
    known = source.meta.get("val", source.meta.get("example_value"))
    return not isinstance(known, torch.Tensor) or known.dtype is call.function.out_dtypes[0]


def _is_view(call: OpCall | None) -> bool:
    return call is not None and call.is_view
