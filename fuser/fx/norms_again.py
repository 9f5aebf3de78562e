"""Results of norms over channels, computed again in a backward pass from their statistics.

What an activation's derivative reads is made of the norm's input and statistics, which the norm's own derivative reads
anyway: one tensor less that is kept, and read in each walk over the elements. The forward pass has the whole op.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fuser.compiler import register
from fuser.graph import GroupBuilder
from fuser.ops import OPS
from fuser.ops.group_norms import group_norm_elemt

__all__ = ["POINTWISE", "join_norms", "part_norms"]

_ATEN = torch.ops.aten
# torch's own pointwise ops, as far as they have a derivative's or a plain name.
POINTWISE = frozenset(getattr(_ATEN, name) for name in OPS if hasattr(_ATEN, name))
# By norm, which argument is eps; 0 of a group norm.
_NORMS: dict[Any, int] = {
    _ATEN._native_batch_norm_legit_functional.default: 7,
    _ATEN._native_batch_norm_legit.no_stats: 5,
    _ATEN.native_group_norm.default: 0,
}
_APPLIED = _ATEN.batch_norm_elemt.default
# In the ``meta`` of what makes a norm's results of its statistics.
_AGAIN = "fuser_norm_again"


def part_norms(joint: fx.GraphModule) -> bool:
    """Let what reads results of norms in training on a GPU read what is computed of their statistics.

    Returns:
        Whether there are any.
    """
    graph, are_parted = joint.graph, False
    for node in [node for target in _NORMS for node in graph.find_nodes(op="call_function", target=target)]:
        items: dict[Any, fx.Node] = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        source: Any = node.args[0]
        if 0 not in items or not _is_on_gpu(source.meta.get("val")):
            continue
        with graph.inserting_after(node):
            mean, rstd = _items(graph, node, items)
        with graph.inserting_after(rstd):
            applied = _apply(graph, node, [mean, rstd])
        if applied is None:
            continue
        applied.meta = items[0].meta | {_AGAIN: True}
        items[0].replace_all_uses_with(applied)
        graph.erase_node(items[0])
        if all(map(_is_forward_or_pointwise, applied.users)):
            # Where others read a norm's input before, as in a residual block, torch's partitioner keeps what is made of
            # it later.
            for step in (applied,) if applied.target is _APPLIED else (applied, applied.args[0]):
                step.meta.setdefault("recompute", CheckpointPolicy.PREFER_RECOMPUTE)  # type: ignore[union-attr]
        for made in applied.users:
            if graph.output_node() in made.users and all(map(_is_forward_or_pointwise, made.users)):
                # torch's partitioner takes what is given back for something that must be there.
                made.meta.setdefault("recompute", CheckpointPolicy.PREFER_RECOMPUTE)
        are_parted = True
    joint.recompile()
    return are_parted


def join_norms(forward: fx.GraphModule) -> None:
    """Let a forward pass read the results of norms themselves again."""
    graph = forward.graph
    for node in [node for node in graph.nodes if _AGAIN in node.meta]:
        args: Any = node.args
        # Of a batch norm's op, or of the operator that runs a group norm's.
        mean = args[3] if node.target is _APPLIED else args[0].args[2][1]
        with graph.inserting_before(node):
            made = graph.call_function(operator.getitem, (mean.args[0], 0))
        made.meta = node.meta
        node.replace_all_uses_with(made)
        graph.erase_node(node)
        if node.target is not _APPLIED:
            graph.erase_node(args[0])
    forward.recompile()


def _items(graph: fx.Graph, node: fx.Node, items: dict[Any, fx.Node]) -> tuple[fx.Node, fx.Node]:
    # Mean and rstd, right behind their norm.
    rstd, mean = (graph.call_function(operator.getitem, (node, slot)) for slot in (2, 1))
    for slot, item in ((1, mean), (2, rstd)):
        item.meta = items[slot].meta if slot in items else {"val": node.meta["val"][slot]}
        if slot in items:
            items[slot].replace_all_uses_with(item)
            graph.erase_node(items[slot])
    return mean, rstd


def _apply(graph: fx.Graph, node: fx.Node, statistics: list[fx.Node]) -> fx.Node | None:
    # After the last of the statistics.
    args: list[Any] = [*node.args]
    if eps := _NORMS[node.target]:
        return graph.call_function(_APPLIED, (*args[:3], *statistics, args[eps]))
    x, weight, bias, *_, count, groups, _ = args
    count = count.meta["val"] if isinstance(count, fx.Node) else count
    # Of single elements ATen computes the results otherwise.
    function = None if count == 1 else group_norm_elemt(x.meta["val"], groups, weight, bias, is_row_major=True)
    if function is None:
        return None
    builder = GroupBuilder()
    spec = register(
        builder.build(builder.apply(function, [builder.add_input(item.name) for item in function.functor.tensors]))
    )
    tensors = [item for item in (x, *statistics, weight, bias) if item is not None]
    run = graph.call_function(torch.ops.fuser.run.default, (spec.text, "t" * len(tensors), tensors, [], []))
    run.meta["val"] = [node.meta["val"][0]]
    with graph.inserting_after(run):
        return graph.call_function(operator.getitem, (run, 0))


def _is_forward_or_pointwise(node: fx.Node) -> bool:
    is_forward = node.op == "output" or node.meta.get("partitioner_tag") != "is_backward"
    return is_forward or getattr(node.target, "overloadpacket", None) in POINTWISE


def _is_on_gpu(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cuda"
