"""Sums over a view of what is computed in a graph's middle: over that itself, so that they join what computes it.

A linear layer sees its input as a matrix. So the gradient of its bias is a sum over a view of the gradient that a group
makes, which matrix products read as well.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from fuser.fx.nodes import bind_node, is_copy, read_arguments

__all__ = ["sum_unviewed"]

_ATEN = torch.ops.aten
_SUM = _ATEN.sum.dim_IntList
_VIEWS = {_ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.permute.default}


def sum_unviewed(graph: fx.Graph) -> None:
    """Let sums read what a view shows instead of the view, where whole dimensions of either are the same elements."""
    for node in graph.find_nodes(op="call_function", target=_SUM):
        wanted = node.meta.get("val")
        first, given, _, dtype = read_arguments(node)
        source: Any = first
        dims = list(given) if isinstance(given, list | tuple) and given else None
        while dims is not None and isinstance(source, fx.Node) and source.target in _VIEWS:
            base, seen_as = read_arguments(source)
            dims = _find_dims(base, source, seen_as, dims)
            source = base
        if dims is None or source is first or not isinstance(wanted, torch.Tensor) or not _is_computed(source):
            continue
        with graph.inserting_before(node):
            total = graph.call_function(_SUM, (source, dims), {} if dtype is None else {"dtype": dtype})
            sizes = [size for dim, size in enumerate(source.meta["val"].shape) if dim not in dims]
            total.meta["val"] = wanted.new_empty(sizes)
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


def _find_dims(source: Any, view: fx.Node, seen_as: Any, dims: Sequence[int]) -> list[int] | None:
    # The dimensions of the source that the view's are; None where some of one are part of the others, or where what is
    # left comes in another order.
    known, seen = (getattr(node, "meta", {}).get("val") for node in (source, view))
    if not (isinstance(known, torch.Tensor) and isinstance(seen, torch.Tensor)):
        return None
    if not seen.dim() or not all(type(size) is int and size for size in (*known.shape, *seen.shape)):
        return None
    reduced = {dim % seen.dim() for dim in dims}
    if view.target is _ATEN.permute.default:
        places = [dim % seen.dim() for dim in seen_as]
        left = [place for dim, place in enumerate(places) if dim not in reduced]
        return [places[dim] for dim in sorted(reduced)] if left == sorted(left) else None
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
