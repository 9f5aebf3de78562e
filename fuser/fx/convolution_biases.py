"""Biases of convolutions and their gradients: in the groups around them, as torch has kernels of its own for both.

It adds biases after cuDNN's kernels, and sums up the gradients of a convolution's results beside them.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

__all__ = ["add_biases_apart", "sum_biases_apart"]

_ATEN = torch.ops.aten
# Slots among a convolution's arguments, and its backward op's.
_BIAS, _MASK = 2, 10
# Those whose kernels add no bias, and those that sum up no gradient of one.
_ADDING = {"Cudnn", "CudnnTranspose"}
_SUMMING = {*_ADDING, "CudaDepthwise2d", "CudaDepthwise3d"}


def add_biases_apart(graph: fx.Graph) -> None:
    """Take the biases out of cuDNN's convolutions: the same sums, of the same rounded results."""
    for node in graph.find_nodes(op="call_function", target=_ATEN.convolution.default):
        bias = node.args[_BIAS]
        if not isinstance(bias, fx.Node) or _find_backend(node.args) not in _ADDING:
            continue
        node.args = tuple(None if slot == _BIAS else item for slot, item in enumerate(node.args))
        value = node.meta["val"]
        with graph.inserting_after(node):
            seen = graph.call_function(_ATEN.view.default, (bias, [1, -1, *[1] * (value.dim() - 2)]))
        with graph.inserting_after(seen):
            total = graph.call_function(_ATEN.add.Tensor, (node, seen))
        seen.meta["val"] = bias.meta["val"].view(seen.args[1])
        total.meta.update(node.meta)
        node.replace_all_uses_with(total, delete_user_cb=lambda user, total=total: user is not total)


def sum_biases_apart(graph: fx.Graph) -> None:
    """Take the gradients of biases out of the backward ops of convolutions, where they are sums along columns.

    They are torch's own sums; over planes it is as fast as a group.
    """
    for node in graph.find_nodes(op="call_function", target=_ATEN.convolution_backward.default):
        grad, x, weight, sizes, *how, mask = node.args
        item = next((user for user in node.users if user.target is operator.getitem and user.args[1] == _BIAS), None)
        if item is None or not mask[_BIAS] or str(grad.meta["val"].stride(1)) != "1":
            continue
        if _find_backend((x, weight, None, *how, sizes)) not in _SUMMING:
            continue
        node.args = (*node.args[:_MASK], [*mask[:_BIAS], False])
        node.meta["val"] = (*node.meta["val"][:_BIAS], None)
        dims = [dim for dim in range(grad.meta["val"].dim()) if dim != 1]
        with graph.inserting_before(node):
            total = graph.call_function(_ATEN.sum.dim_IntList, (grad, dims))
        total.meta.update(item.meta)
        item.replace_all_uses_with(total)
        graph.erase_node(item)


def _find_backend(args: Any) -> str:
    # Which kernels torch chooses on a GPU.
    values: list[Any] = [item.meta.get("val") if isinstance(item, fx.Node) else item for item in args]
    if not (isinstance(values[0], torch.Tensor) and values[0].is_cuda):
        return ""
    try:
        return str(torch._C._select_conv_backend(*values).name)
    except (RuntimeError, TypeError):
        return ""
