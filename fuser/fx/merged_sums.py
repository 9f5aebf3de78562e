"""Sums over a view of what is computed in a graph's middle: over that itself, so that they join what computes it.

A linear layer sees its input as a matrix. So the gradient of its bias is a sum over a view of the gradient that a group
makes, which matrix products read as well.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import prod

import torch
from torch import fx

from fuser.fx.nodes import bind_node, is_copy

__all__ = ["sum_unviewed"]

_ATEN = torch.ops.aten
_SUM = _ATEN.sum.dim_IntList
_VIEWS = {_ATEN.view.default, _ATEN._unsafe_view.default}


def sum_unviewed(graph: fx.Graph) -> None:
    """Let sums read what a view shows instead of the view, where whole dimensions of either are the same elements."""
    for node in graph.find_nodes(op="call_function", target=_SUM):
        view, wanted = node.args[0], node.meta.get("val")
        source = view
        while isinstance(source, fx.Node) and source.target in _VIEWS:
            source = source.args[0]
        if source is view or not (isinstance(source, fx.Node) and isinstance(view, fx.Node) and _is_computed(source)):
            continue
        dims = _find_dims(source, view, node.args[1])
        if dims is None or not isinstance(wanted, torch.Tensor):
            continue
        with graph.inserting_before(node):
            given = {name: value for name, value in node.kwargs.items() if name == "dtype"}
            total = graph.call_function(_SUM, (source, dims), given)
            kept = [size for dim, size in enumerate(source.meta["val"].shape) if dim not in dims]
            total.meta["val"] = wanted.new_empty(kept)
            seen = graph.call_function(_ATEN.view.default, (total, list(wanted.shape)))
        seen.meta.update(node.meta)
        node.replace_all_uses_with(seen)
        graph.erase_node(node)


def _is_computed(source: fx.Node) -> bool:
    # In a group, and not only copied or put together there.
    if source.target is operator.getitem and isinstance(source.args[0], fx.Node):
        source = source.args[0]
    call = bind_node(source)
    return call is not None and not call.arranges and not is_copy(call)


def _find_dims(source: fx.Node, view: fx.Node, dims: object) -> list[int] | None:
    # The dimensions of the source that the view's are; None where some of one are part of the others.
    known, seen = (node.meta.get("val") for node in (source, view))
    if not (isinstance(known, torch.Tensor) and isinstance(seen, torch.Tensor) and isinstance(dims, list | tuple)):
        return None
    if not dims or not all(type(size) is int and size for size in (*known.shape, *seen.shape)):
        return None
    reduced = {dim % seen.dim() for dim in dims}
    found: list[int] = []
    for own, theirs in _match(known.shape, seen.shape):
        kinds = {dim in reduced for dim in theirs}
        if len(kinds) > 1:
            return None
        found += own if True in kinds else []
    return found or None


def _match(one: Sequence[int], other: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    # Runs of dimensions of two shapes of as many elements that hold the same elements.
    runs: list[tuple[list[int], list[int]]] = []
    at, to = 0, 0
    while at < len(one) or to < len(other):
        ends = min(at + 1, len(one)), min(to + 1, len(other))
        while (sizes := (prod(one[at : ends[0]]), prod(other[to : ends[1]])))[0] != sizes[1]:
            ends = (ends[0] + (sizes[0] < sizes[1]), ends[1] + (sizes[0] > sizes[1]))
        runs.append(([*range(at, ends[0])], [*range(to, ends[1])]))
        at, to = ends
    return runs
