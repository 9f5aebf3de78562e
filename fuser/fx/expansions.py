"""Expanded tensors in a graph's middle: pointwise ops read what was expanded instead, which broadcasts by itself.

Gradients of sums and means are expanded to the shape of what was summed, scaled, and multiplied with something of that
shape: with the expansion gone, scaling is work per row, and all of it one group. What stays torch's reads what it did:
torch's kernels have other bits for some layouts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from fuser.fx.nodes import bind_node, is_fusible, read_arguments

__all__ = ["drop_expansions"]

_ATEN = torch.ops.aten


def drop_expansions(graph: fx.Graph) -> None:
    """Let pointwise ops read what is expanded, where others make full tensors of the same layout of what those make."""
    order = {node: number for number, node in enumerate(graph.nodes)}
    for node in graph.find_nodes(op="call_function", target=_ATEN.expand.default):
        smaller = _find_smaller(node, order)
        if smaller is None:
            continue
        for other, value in smaller.items():
            other.meta["val"] = value
        node.replace_all_uses_with(read_arguments(node)[0])
        graph.erase_node(node)


def _find_smaller(expanded: fx.Node, order: dict[fx.Node, int]) -> dict[fx.Node, Any] | None:
    # What computes with an expanded tensor alone, or with others of its first shape, and what its value is without the
    # expansion; None where somebody needs it as it is.
    source = read_arguments(expanded)[0]
    value = source.meta.get("val") if isinstance(source, fx.Node) else None
    if not isinstance(value, torch._subclasses.FakeTensor):
        return None
    values: dict[fx.Node, Any] = {expanded: value}
    waiting = set(expanded.users)
    while waiting:
        node = min(waiting, key=order.__getitem__)
        waiting.remove(node)
        own = node.meta.get("val")
        if not isinstance(own, torch.Tensor) or not _is_pointwise(node, own.device.type):
            return None
        given = {item: values.get(item, item.meta.get("val")) for item in node.all_input_nodes}
        if not all(_can_compute(value, item) for item in given.values()):
            return None
        arguments = map_arg((node.args, node.kwargs), given.__getitem__)
        with value.fake_mode:
            made = node.target(*arguments[0], **arguments[1])  # type: ignore[operator]
        if made.dtype is not own.dtype:
            # A tensor without dimensions counts less than others where dtypes are promoted.
            return None
        if _lies(made) != _lies(own):
            values[node] = made
            waiting.update(node.users)
    del values[expanded]
    return values


def _can_compute(value: torch._subclasses.FakeTensor, other: object) -> bool:
    # make_fx gives each value of real tensors a mode of its own.
    is_number = isinstance(other, int | float | torch.SymInt | torch.SymFloat)
    return is_number or getattr(other, "fake_mode", None) is value.fake_mode


def _is_pointwise(node: fx.Node, device_type: str) -> bool:
    # Whether it broadcasts, and groups take it.
    target = node.target
    known = isinstance(target, torch._ops.OpOverload) and (
        torch.Tag.pointwise in target.tags or target is _ATEN._to_copy.default
    )
    # Without a kernel torch's own is called, and oneDNN's takes tensors of one shape.
    is_onednn = target is _ATEN.gelu_backward.default and device_type == "cpu"
    is_pure = known and not target._schema.is_mutable  # type: ignore[union-attr]
    return is_pure and not is_onednn and is_fusible(node, bind_node(node))


def _lies(value: torch.Tensor) -> str:
    # As text: sizes may be symbols, of which nothing shall be assumed.
    return f"{list(value.shape)} {value.stride()}"
