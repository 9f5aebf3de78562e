"""Places of maxima that a pooling keeps for its gradient: in as few bytes as they need.

torch's pooling returns in 64 bits where in its plane each maximum was. They are kept in 16 or 32 bits, and are widened
again in the backward pass.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

__all__ = ["narrow_places"]

_ATEN = torch.ops.aten
# By pooling, its derivative and how many dimensions a plane has.
_POOLINGS: dict[Any, tuple[Any, int]] = {
    _ATEN.max_pool2d_with_indices.default: (_ATEN.max_pool2d_with_indices_backward.default, 2),
    _ATEN.max_pool3d_with_indices.default: (_ATEN.max_pool3d_with_indices_backward.default, 3),
    _ATEN.adaptive_max_pool2d.default: (_ATEN.adaptive_max_pool2d_backward.default, 2),
}


def narrow_places(joint: fx.GraphModule) -> None:
    """Let derivatives of max poolings on a GPU read places that were kept in fewer bytes."""
    graph = joint.graph
    for target, (derivative, dims) in _POOLINGS.items():
        for node in graph.find_nodes(op="call_function", target=target):
            source: Any = node.args[0]
            value = source.meta.get("val")
            if not isinstance(value, torch.Tensor) or not value.is_cuda:
                continue
            plane = value.shape[-dims:]
            places = [user for user in node.users if user.target is operator.getitem and user.args[1] == 1]
            readers = [user for item in places for user in item.users if user.target is derivative]
            if not readers or not all(type(size) is int for size in plane):
                continue
            dtype = torch.int16 if math.prod(plane) <= torch.iinfo(torch.int16).max else torch.int32
            (wide,) = places
            with graph.inserting_after(wide):
                narrow = _convert(graph, wide, dtype)
            with graph.inserting_before(readers[0]):
                again = _convert(graph, narrow, torch.int64)
            for reader in readers:
                reader.replace_input_with(wide, again)
    joint.recompile()


def _convert(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    made = graph.call_function(_ATEN._to_copy.default, (node,), {"dtype": dtype})
    made.meta["val"] = node.meta["val"].to(dtype)
    return made
