"""Buffers that a graph writes to: what AOTAutograd made values, to be copied in at the end, is written in place again.

A batch norm in training gives its running statistics back as values, and each buffer that changes is copied into at the
end of the graph. All passes keep what the graph computes.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode

from fuser.fx.fusion_node import FusionModule
from fuser.fx.nodes import add_call, is_fresh, is_static, still_reads

__all__ = [
    "copy_together",
    "drop_unread",
    "gives_items",
    "values_of",
    "write_into",
    "write_results_in_place",
    "write_statistics_in_place",
    "writes_elements",
]

_ATEN = torch.ops.aten
_FUNCTIONAL = _ATEN._native_batch_norm_legit_functional.default
_IN_PLACE = _ATEN._native_batch_norm_legit.default
_BACKWARD = _ATEN.native_batch_norm_backward.default
# Slots of the running statistics among a batch norm's arguments, and of the new ones among its results.
_STATISTICS, _RESULTS = (3, 4), (3, 4)


def drop_unread(joint: fx.GraphModule) -> None:
    """Take from derivatives what they are given and do not read: the forward pass need not make and keep it.

    The running statistics from those of batch norms in training, and from those of log-sigmoids what a GPU keeps for
    them, which has no elements.
    """
    graph = joint.graph
    for node in graph.find_nodes(op="call_function", target=_BACKWARD):
        if node.args[7] is True:
            node.args = tuple(None if slot in _STATISTICS else item for slot, item in enumerate(node.args))
    for node in graph.find_nodes(op="call_function", target=_ATEN.log_sigmoid_backward.default):
        gradient, x, kept = node.args
        if is_static(kept.meta["val"]) and not kept.meta["val"].numel():
            with graph.inserting_before(node), detect_fake_mode(kept.meta["val"]) or nullcontext():
                node.args = gradient, x, add_call(graph, _ATEN.new_empty.default, gradient, [0])


def write_statistics_in_place(graph_module: fx.GraphModule) -> None:
    """Let batch norms write their running statistics themselves where these would be copied into their own buffers."""
    graph = graph_module.graph
    for node in graph.find_nodes(op="call_function", target=_FUNCTIONAL):
        items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        copies = [
            _find_copy(items[made], node.args[slot], node) if made in items else None
            for slot, made in zip(_STATISTICS, _RESULTS, strict=True)
        ]
        if None in copies or len(items) != len(node.users):
            continue
        for copy in copies:
            if copy is not None:
                graph.erase_node(copy)
        for made in _RESULTS:
            graph.erase_node(items[made])
        node.target = _IN_PLACE
        if "val" in node.meta:
            node.meta["val"] = node.meta["val"][:3]


def _find_copy(value: fx.Node, buffer: Any, node: fx.Node) -> fx.Node | None:
    # The one user of a value, if it copies it into the buffer, which nobody else reads.
    users = list(value.users)
    if len(users) != 1 or users[0].target is not _ATEN.copy_.default or users[0].args[:2] != (buffer, value):
        return None
    is_own = isinstance(buffer, fx.Node) and buffer.op == "placeholder" and set(buffer.users) == {node, users[0]}
    return users[0] if is_own and not users[0].users else None


def write_results_in_place(graph_module: fx.GraphModule) -> None:
    """Let kernels write what would be copied into arguments there, where nobody reads the old values any more."""
    graph = graph_module.graph
    for copy in graph.find_nodes(op="call_function", target=_ATEN.copy_.default):
        # ``buffer.copy_(x)`` comes as a copy that is copied; x may be a number, and is one in a part that is written.
        target, made = copy.args[:2]
        if not isinstance(made, fx.Node) or made.target is not _ATEN.copy.default or made.args[0] is not target:
            continue
        source = made.args[1]
        if not isinstance(source, fx.Node) or is_fresh(source):
            copy.args = (target, source)
            if not made.users:
                graph.erase_node(made)
    slots = {node: slot for slot, node in enumerate(graph.nodes)}
    for node in slots:
        module = graph_module.get_submodule(str(node.target)) if node.op == "call_module" else None
        variant = _find_variant(node)
        if variant is not None and (copy := _find_last_write(node, node, slots)) is not None:
            node.target, node.kwargs = variant, {**node.kwargs, "out": copy.args[0]}
            _drop(copy)
        if type(module) is not FusionModule or not writes_elements(module, node):
            continue
        values = values_of(node)
        items = {user.args[1]: user for user in node.users} if len(values) > 1 else {0: node}
        copies = {slot: copy for slot, item in items.items() if (copy := _find_last_write(item, node, slots))}
        if not copies:
            continue
        write_into(node, {slot: copy.args[0] for slot, copy in copies.items()})
        for slot, copy in copies.items():
            _drop(copy)
            if len(values) > 1:
                graph.erase_node(items[slot])


def write_into(node: fx.Node, given: Mapping[int, Any]) -> None:
    """Let a fusion node write its results, by their numbers, into what there is; the others into new memory."""
    with node.graph.inserting_before(node):
        out = tuple(given.get(slot) or _allocate(node.graph, value) for slot, value in enumerate(values_of(node)))
    node.kwargs = {"out": out if len(out) > 1 else out[0]}


def values_of(node: fx.Node) -> list[Any]:
    """Return what the results of a fusion node are known to be; None for what is not known."""
    value = node.meta.get("val")
    return value if isinstance(value, list) else [value]


def _allocate(graph: fx.Graph, value: torch.Tensor) -> fx.Node:
    where: Any = {"dtype": value.dtype, "device": value.device}
    return graph.call_function(_ATEN.empty_strided.default, (tuple(value.shape), tuple(value.stride())), where)


def _drop(copy: Any) -> None:
    copy.replace_all_uses_with(copy.args[0])
    copy.graph.erase_node(copy)


def _find_variant(node: fx.Node) -> torch._ops.OpOverload | None:
    # The overload of a pointwise operator of torch's that writes where it is told.
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.pointwise not in target.tags:
        return None
    names = {"out", f"{target._overloadname}_out"} & {*target.overloadpacket.overloads()}
    taken = [str(item.type) for item in target._schema.arguments]
    for name in names:
        found: torch._ops.OpOverload = getattr(target.overloadpacket, name)
        given = [str(item.type) for item in found._schema.arguments if not item.is_out]
        if len(found._schema.returns) == 1 and given == taken and is_static(node.meta.get("val")):
            return found
    return None


def writes_elements(module: FusionModule, node: fx.Node) -> bool:
    """Whether a fusion node writes all of its results, which are alike, each element where it was read."""
    group, values = module.group, values_of(node)
    return (
        not (group.reshapes or group.arranges)
        and all(is_static(item) for item in values)
        and len({tuple(item.shape) for item in values}) == 1
        and gives_items(node)
    )


def gives_items(node: fx.Node) -> bool:
    """Whether a fusion node's users take its results one by one, if it has several."""
    return all(user.target is operator.getitem for user in node.users) == (len(values_of(node)) > 1)


def _find_last_write(item: fx.Node, node: fx.Node, slots: Mapping[fx.Node, int]) -> fx.Node | None:
    # What copies a result of a fusion node into an argument, if that is all that becomes of it.
    users = list(item.users)
    if len(users) != 1 or users[0].target is not _ATEN.copy_.default or users[0].args[1] is not item:
        return None
    copy, target = users[0], users[0].args[0]
    assert isinstance(target, fx.Node), "it is written to"
    if target.op != "placeholder" or not is_static(target.meta.get("val")):
        return None
    own, made = target.meta["val"], item.meta["val"]
    if (own.dtype, own.shape, own.stride()) != (made.dtype, made.shape, made.stride()):
        return None
    seen = [target]
    for base in seen:
        for user in base.users:
            if user is copy or (user is node and base is target):
                continue
            if slots[user] >= slots[node]:
                return None
            seen += [user] if still_reads(user) else []
    return copy


def copy_together(graph_module: fx.GraphModule) -> None:
    """Copy values into buffers in one launch for all of a dtype, at the end of the graph."""
    batches: dict[Any, list[fx.Node]] = {}
    slots = {node: slot for slot, node in enumerate(graph_module.graph.nodes)}
    for node in slots:
        if node.target is _ATEN.copy_.default and not node.users and _is_plain_copy(node, slots):
            value = node.args[0].meta["val"]
            batches.setdefault((value.device, value.dtype), []).append(node)
    output = graph_module.graph.output_node()
    for nodes in batches.values():
        if len(nodes) > 1:
            with graph_module.graph.inserting_before(output):
                targets, values = ([node.args[slot] for node in nodes] for slot in (0, 1))
                graph_module.graph.call_function(_ATEN._foreach_copy_.default, (targets, values))
            for node in nodes:
                graph_module.graph.erase_node(node)


def _is_plain_copy(node: fx.Node, slots: Mapping[fx.Node, int]) -> bool:
    # Nobody reads the buffer afterwards, and what is copied lies elsewhere and in the same way.
    target, value = node.args[:2]
    if not isinstance(target, fx.Node) or not isinstance(value, fx.Node) or target.op != "placeholder":
        return False
    own, other = target.meta.get("val"), value.meta.get("val")
    if own is None or other is None or (own.dtype, own.shape) != (other.dtype, other.shape):
        return False
    return is_fresh(value) and all(slots[user] <= slots[node] for user in target.users)
