"""Results of batch norms as two steps, statistics and what they are applied to, so that a backward pass may do the latter again.

What an activation's derivative reads is computed from the norm's input and statistics, which the norm's own derivative
reads anyway: one tensor less that is kept, and read in each walk over the elements. The forward pass has the whole op.
"""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fuser.ops import OPS

__all__ = ["POINTWISE", "join_norms", "part_norms"]

_ATEN = torch.ops.aten
POINTWISE = frozenset(getattr(_ATEN, name) for name in OPS if hasattr(_ATEN, name))
_APPLIED = _ATEN.batch_norm_elemt.default
# By op, where it takes eps.
_NORMS = {_ATEN._native_batch_norm_legit_functional.default: 7, _ATEN._native_batch_norm_legit.no_stats: 5}


def part_norms(joint: fx.GraphModule) -> bool:
    """Let what reads results of batch norms in training on a GPU read what is computed from their statistics.

    Returns:
        Whether there are any.
    """
    graph, are_parted = joint.graph, False
    for node in [node for target in _NORMS for node in graph.find_nodes(op="call_function", target=target)]:
        items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        if 0 not in items or not _has_kernel(items[0].meta.get("val")) or not _has_kernel(node.args[0].meta.get("val")):
            continue
        with graph.inserting_after(node):
            # In order, each after the last one.
            made = [graph.call_function(operator.getitem, (node, slot)) for slot in (2, 1)]
        made.reverse()
        for slot, item in enumerate(made, start=1):
            item.meta["val"] = node.meta["val"][slot]
            if slot in items:
                item.meta = items[slot].meta
                items[slot].replace_all_uses_with(item)
                graph.erase_node(items[slot])
        with graph.inserting_after(made[1]):
            applied = graph.call_function(_APPLIED, (*node.args[:3], *made, node.args[_NORMS[node.target]]))
        applied.meta = dict(items[0].meta)
        items[0].replace_all_uses_with(applied)
        graph.erase_node(items[0])
        for made in applied.users:
            if graph.output_node() in made.users and all(map(_is_forward_or_pointwise, made.users)):
                # torch's partitioner takes what is given back for something that must be there.
                made.meta.setdefault("recompute", CheckpointPolicy.PREFER_RECOMPUTE)
        are_parted = True
    joint.recompile()
    return are_parted


def join_norms(forward: fx.GraphModule) -> None:
    """Let a forward pass read the results of batch norms themselves again."""
    graph = forward.graph
    for node in graph.find_nodes(op="call_function", target=_APPLIED):
        mean = node.args[3]
        if isinstance(mean, fx.Node) and mean.target is operator.getitem and mean.args[0].target in _NORMS:
            with graph.inserting_before(node):
                made = graph.call_function(operator.getitem, (mean.args[0], 0))
            made.meta = node.meta
            node.replace_all_uses_with(made)
            graph.erase_node(node)
    forward.recompile()


def _is_forward_or_pointwise(node: fx.Node) -> bool:
    is_forward = node.op == "output" or node.meta.get("partitioner_tag") != "is_backward"
    return is_forward or getattr(node.target, "overloadpacket", None) in POINTWISE


def _has_kernel(value: object) -> bool:
    # Whether ATen has one formula for tensors that lie like that.
    if not isinstance(value, torch.Tensor) or value.device.type != "cuda":
        return False
    return value.is_contiguous() or (value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last))
