"""Tensors that a graph takes apart in the middle of a group: each part becomes a view of its own, which joins."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from fuser.fx.nodes import bind_node

__all__ = ["open_splits"]

_ATEN = torch.ops.aten


def open_splits(graph: fx.Graph) -> None:
    """Replace splits of computed values, whose parts are all computed with, by slices and selections."""
    for target, arguments in _PARTS.items():
        for node in graph.find_nodes(op="call_function", target=target):
            parts = list(node.users)
            sizes = node.args[1] if len(node.args) > 1 else 0
            is_known = all(type(size) is int for size in (sizes if isinstance(sizes, list | tuple) else [sizes]))
            if not (is_known and _is_computed(node.args[0]) and all(map(_is_read_by_computation, parts))):
                continue
            for part, (view, rest) in zip(parts, arguments(node, parts), strict=True):
                with graph.inserting_before(part):
                    seen = graph.call_function(view, (node.args[0], *rest))
                seen.meta.update(part.meta)
                part.replace_all_uses_with(seen)
                graph.erase_node(part)
            graph.erase_node(node)


def _is_computed(source: object) -> bool:
    return isinstance(source, fx.Node) and isinstance(source.meta.get("val"), torch.Tensor) and _is_bound(source)


def _is_read_by_computation(part: fx.Node) -> bool:
    return part.target is operator.getitem and all(map(_is_bound, part.users))


def _is_bound(node: fx.Node) -> bool:
    return bind_node(node) is not None


def _dim(node: fx.Node, slot: int) -> int:
    dim = node.args[slot] if len(node.args) > slot else node.kwargs.get("dim", 0)
    assert isinstance(dim, int), "torch says so"
    return dim


def _slices(node: fx.Node, parts: list[fx.Node]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    sizes: Any = node.args[1]
    for part in parts:
        slot: Any = part.args[1]
        start = sum(sizes[:slot]) if isinstance(sizes, list | tuple) else slot * sizes
        size = sizes[slot] if isinstance(sizes, list | tuple) else sizes
        yield _ATEN.slice.Tensor, (_dim(node, 2), start, start + size)


def _selections(node: fx.Node, parts: list[fx.Node]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    for part in parts:
        yield _ATEN.select.int, (_dim(node, 1), part.args[1])


_PARTS = {
    _ATEN.split.Tensor: _slices,
    _ATEN.split_with_sizes.default: _slices,
    _ATEN.unsafe_split.Tensor: _slices,
    _ATEN.unsafe_split_with_sizes.default: _slices,
    _ATEN.unbind.int: _selections,
}
