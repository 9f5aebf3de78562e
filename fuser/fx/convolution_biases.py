"""Biases of convolutions: added by the groups around them, as torch adds them by a kernel of its own after cuDNN's."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

__all__ = ["add_biases_apart"]

_ATEN = torch.ops.aten
# Slots among a convolution's arguments.
_BIAS, _TRANSPOSED = 2, 6


def add_biases_apart(graph: fx.Graph) -> None:
    """Take the biases out of cuDNN's convolutions: the same sums, of the same rounded results."""
    for node in graph.find_nodes(op="call_function", target=_ATEN.convolution.default):
        bias = node.args[_BIAS]
        if not isinstance(bias, fx.Node) or not _is_cudnns(node):
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


def _is_cudnns(node: fx.Node) -> bool:
    values: list[Any] = [item.meta.get("val") if isinstance(item, fx.Node) else item for item in node.args]
    if not (isinstance(values[0], torch.Tensor) and values[0].is_cuda):
        return False
    kinds: Any = torch._C._ConvBackend  # type: ignore[attr-defined]
    try:
        backend = torch._C._select_conv_backend(*values)
    except (RuntimeError, TypeError):
        return False
    return backend in {kinds.Cudnn, kinds.CudnnTranspose}
