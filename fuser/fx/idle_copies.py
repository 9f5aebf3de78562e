"""Copies that nobody can tell from what they copy: dropouts of nothing, pads of nothing, parts to write. Dropped.

In eager torch a model pays nothing for a dropout of nothing; AOTAutograd's decomposition copies. Models that pad to
whole windows pad most sizes by nothing, and torch copies. What reads a copy reads its source instead, and joins its
group.

``out[:, 0] = x`` becomes a scatter of ``copy(out[:, 0], x)``, which lies as the part does and costs a copy of all of
``out``, in its gradient too, although a scatter asks of what it writes for nothing but values. The gradient of
``as_strided``, with which torch lays out averages of whole channels_last planes, is written over all of new zeros.
Where the first size is a symbol, ``x[:, 0]`` is a part of a part that is the whole, whose gradient copies ``x``.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode

from fuser.fx.effects import is_barrier
from fuser.fx.nodes import add_call, is_static, may_alias

__all__ = ["drop_idle_copies"]

_ATEN = torch.ops.aten
# What writes its second argument into a copy of the first.
_SCATTERS = tuple(getattr(_ATEN, f"{name}_scatter") for name in ("slice", "select", "diagonal", "as_strided"))
# Memory in which nothing is yet, and with zeros.
_EMPTY = tuple(getattr(_ATEN, name) for name in "empty empty_like empty_strided new_empty new_empty_strided".split())
_NEW = (*_EMPTY, _ATEN.zeros, _ATEN.zeros_like, _ATEN.new_zeros)


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
    _read_what_is_written(graph)
    _read_what_covers(graph)
    _read_what_is_whole(graph)
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


def _read_what_is_whole(graph: fx.Graph) -> None:
    # A part of the size of the whole is the whole, and what is written there a copy.
    for node in graph.find_nodes(op="call_function", target=_ATEN.slice.Tensor):
        is_returned = any(user.op == "output" for user in node.users)
        if not is_returned and "recompute" not in node.meta and _lies(node) == _lies(node.args[0]):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    for target, slot in ((_ATEN.slice_backward.default, 0), (_ATEN.slice_scatter.default, 1)):
        for node in graph.find_nodes(op="call_function", target=target):
            source: Any = node.args[slot]
            made, given = node.meta["val"], source.meta["val"]
            is_whole = f"{list(made.shape)}" == f"{list(given.shape)}" and made.dtype == given.dtype
            if not is_whole or "recompute" in node.meta:
                continue
            with graph.inserting_before(node), detect_fake_mode(made) or nullcontext():
                copy = add_call(graph, _ATEN.clone.default, source, memory_format=torch.contiguous_format)
            is_alike = _lies(copy) == _lies(node)
            if is_alike:
                node.replace_all_uses_with(copy)
            graph.erase_node(node if is_alike else copy)


def _read_what_is_written(graph: fx.Graph) -> None:
    # Of ``copy(target, source)`` a scatter reads the source; one into new memory is a clone. Sizes may be symbols.
    copies = graph.find_nodes(op="call_function", target=_ATEN.copy.default)
    order = {node: number for number, node in enumerate(graph.nodes)} if copies else {}
    writes = [order[node] for node in order if is_barrier(node)]
    for node in copies:
        target: Any = node.args[0]
        source = node.args[1]
        if not isinstance(source, fx.Node):
            # A number.
            continue
        made, given = node.meta["val"], source.meta["val"]
        is_whole = f"{list(made.shape)}" == f"{list(given.shape)}"
        # A checkpoint's policy may ask for the copy.
        if not (is_whole or is_static(made)) or given.device != made.device or "recompute" in node.meta:
            continue
        last = max((order[user] for user in node.users), default=0)
        is_part = all(_packet(user) in _SCATTERS and user.args[0] is not node for user in node.users)
        is_read_in_time = is_part and not any(order[node] < number < last for number in writes)
        layout = _find_layout(made, given) if _packet(target) in _EMPTY else None
        if not is_read_in_time and layout is None:
            continue
        with graph.inserting_before(node), detect_fake_mode(made) or nullcontext():
            if not is_whole:
                source = add_call(graph, _ATEN.expand.default, source, [*made.shape])
            if made.dtype != given.dtype:
                source = add_call(graph, _ATEN._to_copy.default, source, dtype=made.dtype)
            if not is_read_in_time:
                source = add_call(graph, _ATEN.clone.default, source, memory_format=layout)
        node.replace_all_uses_with(source)
        graph.erase_node(node)
        while isinstance(target, fx.Node) and not target.users and (_packet(target) in _EMPTY or _is_view(target)):
            target, unread = target.args[0], target
            graph.erase_node(unread)


def _read_what_covers(graph: fx.Graph) -> None:
    # What is written over all of new memory, and read there as a view of it lies: a clone of that view.
    for node in graph.find_nodes(op="call_function", target=_ATEN.as_strided.default):
        scatter: Any = node.args[0]
        if _packet(scatter) is not _ATEN.as_strided_scatter or len(scatter.users) > 1 or "recompute" in scatter.meta:
            continue
        base, source, _, strides, *_ = scatter.args
        made = node.meta["val"]
        starts = any(item.kwargs or any(item.args[slot:]) for item, slot in ((scatter, 4), (node, 3)))
        if starts or _packet(base) not in _NEW or not _covers(base.meta["val"], source.meta["val"], made, strides):
            continue
        with graph.inserting_before(node), detect_fake_mode(made) or nullcontext():
            seen = add_call(graph, _ATEN.view.default, source, [*made.shape])
            node.replace_all_uses_with(add_call(graph, _ATEN.clone.default, seen))
        for unread in (node, scatter, base):
            if not unread.users:
                graph.erase_node(unread)


def _covers(base: Any, given: Any, made: Any, strides: Any) -> bool:
    # Whether what is given fills the base as it lies itself, and a view of it lies as what is made.
    if not all(map(is_static, (base, given, made))) or not base.numel() == given.numel() == made.numel():
        return False
    kept = [dim for dim, size in enumerate(given.shape) if size > 1]
    is_dense = given.is_contiguous() and all(strides[dim] == given.stride(dim) for dim in kept)
    is_alike = is_dense and base.dtype == given.dtype == made.dtype
    return is_alike and torch.empty(given.shape, device="meta").view(made.shape).stride() == made.stride()


def _find_layout(made: torch.Tensor, given: torch.Tensor) -> torch.memory_format | None:
    # In which a clone lies as a copy does.
    if not (is_static(made) and is_static(given)):
        # Of symbols nothing shall be assumed.
        is_alike = f"{made.new_empty(made.shape).stride()}" == f"{made.stride()}"
        return torch.contiguous_format if is_alike else None
    seen = torch.empty_strided(given.shape, given.stride(), device="meta").expand(made.shape)
    for layout in (torch.contiguous_format, torch.preserve_format):
        if not made.storage_offset() and torch.empty_like(seen, memory_format=layout).stride() == made.stride():
            return layout
    return None


def _packet(node: fx.Node) -> object:
    return node.target.overloadpacket if isinstance(node.target, torch._ops.OpOverload) else None


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and may_alias(node) and not is_barrier(node)


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
