"""Tensors that a graph takes apart in the middle of a group: each part becomes a view of its own, which joins."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fuser.fx.nodes import bind_node, read_arguments

__all__ = ["open_splits"]

_ATEN = torch.ops.aten


def open_splits(graph: fx.Graph) -> None:
    """Replace splits of computed values, whose parts are all computed with, by slices and selections."""
    for target, find in _PARTS.items():
        for node in graph.find_nodes(op="call_function", target=target):
            source, *sizes, dim = read_arguments(node)
            values = node.meta.get("val")
            is_known = isinstance(values, list | tuple) and all(type(size) is int for size in tree_leaves(sizes))
            if not (is_known and _is_computed(source) and all(map(_is_read_by_computation, node.users))):
                continue
            for part in [*node.users]:
                slot: Any = part.args[1]
                with graph.inserting_before(part):
                    seen = find(graph, source, *sizes, dim, slot % len(values))
                seen.meta.update(part.meta)
                part.replace_all_uses_with(seen)
                graph.erase_node(part)
            graph.erase_node(node)


def _is_computed(source: object) -> bool:
    return isinstance(source, fx.Node) and isinstance(source.meta.get("val"), torch.Tensor) and _is_bound(source)


def _is_read_by_computation(part: fx.Node) -> bool:
    is_one = part.target is operator.getitem and type(part.args[1]) is int
    return is_one and all(map(_is_bound, part.users))


def _is_bound(node: fx.Node) -> bool:
    return bind_node(node) is not None


def _slice(graph: fx.Graph, source: fx.Node, sizes: Any, dim: Any, slot: int) -> fx.Node:
    is_list = isinstance(sizes, list | tuple)
    start = sum(sizes[:slot]) if is_list else slot * sizes
    size = sizes[slot] if is_list else sizes
    return graph.call_function(_ATEN.slice.Tensor, (source, dim, start, start + size))


def _select(graph: fx.Graph, source: fx.Node, dim: Any, slot: int) -> fx.Node:
    return graph.call_function(_ATEN.select.int, (source, dim, slot))


_PARTS: dict[Any, Callable[..., fx.Node]] = {
    _ATEN.split.Tensor: _slice,
    _ATEN.split_with_sizes.default: _slice,
    _ATEN.unsafe_split.Tensor: _slice,
    _ATEN.unsafe_split_with_sizes.default: _slice,
    _ATEN.unbind.int: _select,
}
