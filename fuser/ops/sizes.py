"""What torch asks of the sizes of an op's tensors, beyond that they broadcast (``Function.asks_sizes``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody uses

from fuser.function import Function
from fuser.layout import Shape, broadcast_shapes
from fuser.ops.table import OPS

__all__ = ["call_of_sizes", "look_at_sizes"]

# Whose target is the first tensor of the step that looks.
_TARGET_FIRST = frozenset({"binary_cross_entropy_with_logits"})


def look_at_sizes(function: Function, shapes: Sequence[Shape]) -> None:
    """Warn of different sizes, or refuse them, as torch's function does."""
    first, second = shapes[:2] if function.sizes_of else ((), ())
    if first != second:
        given = (second, first) if function.sizes_of in _TARGET_FIRST else (first, second)
        getattr(F, function.sizes_of)(*(torch.empty(shape, device="meta") for shape in given))


def call_of_sizes(function: Function, tensors: Sequence[Any], scalars: Mapping[str, Any]) -> Any:
    """Run an op of the table in eager torch, as a step of what asks for sizes."""
    if function.sizes_of:
        look_at_sizes(function, [item.shape for item in tensors[:2]])
        # Of one size they have the same weight in promotion.
        shape = broadcast_shapes([tuple(item.shape) for item in tensors])
        tensors = [item.expand(shape) for item in tensors]
    written = getattr(torch.Tensor, f"{function.op}_", None) if function.is_in_place else None
    if written is not None:
        return written(tensors[0].clone(), *tensors[1:])
    return OPS[str(function.op)].eager(*tensors, **scalars)
