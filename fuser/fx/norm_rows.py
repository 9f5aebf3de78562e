"""Norms over rows, in a graph, as kernels have them: of dense rows, and apart from what torch alone adds up.

ATen's norms copy what is not contiguous before they read it. Here that copy is a node of the graph, which a kernel
makes by tiles, together with what comes before. And where very many rows are added up to gradients of few weights, in
an order that no kernel keeps, that is a node of its own, so that the gradient of the input is none of torch's.
"""

from __future__ import annotations

import operator
from math import prod
from typing import Any

import torch
from torch import fx

from fuser.fx.nodes import add_call, is_static
from fuser.row_orders import keeps_columns

__all__ = ["lay_out_norms", "part_column_sums"]

_ATEN = torch.ops.aten
# How many of a norm's first arguments are copied where they are not contiguous.
_COPIED: dict[Any, int] = {
    _ATEN.native_layer_norm.default: 1,
    _ATEN._fused_rms_norm.default: 1,
    _ATEN.native_layer_norm_backward.default: 2,
    _ATEN._fused_rms_norm_backward.default: 2,
}
_BACKWARD = _ATEN.native_layer_norm_backward.default


def lay_out_norms(graph: fx.Graph) -> None:
    """Let norms on a GPU read contiguous copies of what is not contiguous, one of each tensor."""
    copies: dict[fx.Node, fx.Node] = {}
    for node in [node for node in graph.nodes if node.target in _COPIED]:
        for source in node.args[: _COPIED[node.target]]:
            if not isinstance(source, fx.Node) or not _is_scattered(source.meta.get("val")):
                continue
            if source not in copies:
                with graph.inserting_before(node):
                    copies[source] = add_call(graph, _ATEN.clone.default, source, memory_format=torch.contiguous_format)
            node.replace_input_with(source, copies[source])


def part_column_sums(graph: fx.Graph) -> None:
    """Part the backward of layer norms on a GPU whose weights' gradients torch adds up in an order of its own."""
    for node in graph.find_nodes(op="call_function", target=_BACKWARD):
        value, (*args, mask) = node.args[0].meta.get("val"), node.args
        if not (mask[0] and any(mask[1:]) and is_static(value) and value.is_cuda):
            continue
        width = prod(args[2])
        if not width or keeps_columns(value.numel() // width, width, value.device):
            continue
        with graph.inserting_before(node):
            rows = graph.call_function(_BACKWARD, (*args, [True, False, False]))
            columns = graph.call_function(_BACKWARD, (*args, [False, *mask[1:]]))
        made = node.meta["val"]
        rows.meta["val"], columns.meta["val"] = (made[0], None, None), (None, *made[1:])
        for item in [*node.users]:
            if item.target is operator.getitem:
                item.replace_input_with(node, columns if item.args[1] else rows)
        if not node.users:
            graph.erase_node(node)


def _is_scattered(value: object) -> bool:
    return is_static(value) and value.is_cuda and not value.is_contiguous()
