"""Parts of arguments that a graph writes to, as a cache of keys and values in each step: written where they are.

AOTAutograd makes of ``cache.index_copy_(2, place, keys)`` a copy of the whole cache with the new keys in it, which is
copied into the cache at the end of the graph. Where nobody reads the old value after that, only the part is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from fuser.fx.effects import is_barrier
from fuser.fx.nodes import IS_WRITTEN, add_call, may_alias, still_reads

__all__ = ["mark_scatters", "write_scatters_in_place"]

_ATEN = torch.ops.aten
_IN_PLACE: dict[Any, Any] = {
    getattr(getattr(_ATEN, name), overload): getattr(getattr(_ATEN, f"{name}_"), overload)
    for name, overload in (
        ("index_copy", "default"), ("index_put", "default"), ("index_add", "default"), ("scatter", "src"),
        ("scatter", "value"), ("scatter_add", "default"), ("index_fill", "int_Scalar"), ("index_fill", "int_Tensor"),
    )
}  # fmt: skip
# What sees the part that others write.
_VIEWS: dict[Any, Any] = {
    _ATEN.slice_scatter.default: _ATEN.slice.Tensor,
    _ATEN.select_scatter.default: _ATEN.select.int,
}


def mark_scatters(graph: fx.Graph) -> None:
    """Keep what is written in place out of groups, and before it what reads the old value."""
    for copy in graph.find_nodes(op="call_function", target=_ATEN.copy_.default):
        for node in _chain(copy):
            for part in (node, *_parts(node)):
                part.meta[IS_WRITTEN] = True


def write_scatters_in_place(graph_module: fx.GraphModule) -> None:
    """Write parts of arguments where they are, if the whole was to be copied there."""
    graph = graph_module.graph
    for copy in graph.find_nodes(op="call_function", target=_ATEN.copy_.default):
        chain = list(_chain(copy))
        slots = {node: slot for slot, node in enumerate(graph.nodes)}
        if not chain or not all(_is_last_reader(node, chain, copy, slots) for node in chain):
            continue
        target: Any = copy.args[0]
        graph.erase_node(copy)
        for node in reversed(chain):
            with graph.inserting_before(node):
                if node.target in _IN_PLACE:
                    graph.call_function(_IN_PLACE[node.target], (target, *node.args[1:]), node.kwargs)
                else:
                    _write_part(graph, target, node)
            node.replace_all_uses_with(target)
            graph.erase_node(node)
    for node in reversed(graph.nodes):
        # Of other functions it is not known what else they do.
        is_view = isinstance(node.target, torch._ops.OpOverload) and may_alias(node) and not is_barrier(node)
        if not node.users and (node.meta.get(IS_WRITTEN) or is_view):
            graph.erase_node(node)


def _chain(copy: fx.Node) -> Iterator[fx.Node]:
    # The scatters that make of an argument what is copied into it, the last one first; none if something else does.
    target, node = copy.args[:2]
    if not isinstance(target, fx.Node) or target.op != "placeholder" or copy.users:
        return
    found = []
    while isinstance(node, fx.Node) and (node.target in _IN_PLACE or node.target in _VIEWS):
        found.append(node)
        node = node.args[0]
    if node is target:
        yield from found


def _is_last_reader(node: fx.Node, chain: list[fx.Node], copy: fx.Node, slots: Mapping[fx.Node, int]) -> bool:
    # Whether what a scatter writes to is read by nobody later, and in nothing that it is written with.
    base: Any = node.args[0]
    own, made = base.meta.get("val"), node.meta.get("val")
    if own is None or made is None or own.stride() != made.stride() or any(user.op == "output" for user in node.users):
        return False
    inside = {*chain, copy, *_parts(node)}
    seen = {base}
    for user in [base, *slots]:
        if user is not base and seen.isdisjoint(user.all_input_nodes):
            continue
        if user is not base and user not in inside and slots[user] > slots[node]:
            return False
        if user is not base and user not in inside and still_reads(user):
            seen.add(user)
    rest = (*node.args[1:], *node.kwargs.values())
    given = [_written(node)] if node.target in _VIEWS else rest
    return not any(item in seen for item in torch.utils._pytree.tree_leaves(list(given)) if isinstance(item, fx.Node))


def _parts(node: Any) -> Iterator[fx.Node]:
    # What a scatter of a scatter consists of, to the innermost copy: each of what the one before it sees.
    before: Any = None
    while isinstance(node, fx.Node) and (node.target in _VIEWS or node.target is _ATEN.copy.default):
        if node.target in _VIEWS and before is not None and not _sees(node.args[0], before):
            return
        yield node
        if node.target is _ATEN.copy.default:
            return
        before, node = node, node.args[1]


def _sees(view: Any, scatter: fx.Node) -> bool:
    is_one = isinstance(view, fx.Node) and view.target is _VIEWS[scatter.target]
    return is_one and (view.args[0], view.args[1:], view.kwargs) == (scatter.args[0], scatter.args[2:], scatter.kwargs)


def _written(node: fx.Node) -> Any:
    # What is written into the innermost part.
    *_, last = _parts(node)
    return last.args[1]


def _write_part(graph: fx.Graph, target: fx.Node, node: fx.Node) -> None:
    for item in _parts(node):
        if item.target in _VIEWS:
            target = add_call(graph, _VIEWS[item.target], target, *item.args[2:], **item.kwargs)
    graph.call_function(_ATEN.copy_.default, (target, _written(node)))
