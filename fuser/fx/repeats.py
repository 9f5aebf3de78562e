"""Work that a group would repeat: what is computed of a column, for each element of its rows. It is a group of its own.

A kernel computes each element of its results by itself. Of what is broadcast that is the same over and over, which is
free while the kernel waits for memory, but not where there is a division, a look-up and more for every element.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from fuser.errors import FunctorError, UntranslatableError
from fuser.ops import OpCall

__all__ = ["are_repeated", "count_elements"]

# How many elements the results have, at least; how many times as many as what is broadcast; and how much there is to do
# for one of that: more than hides behind memory.
MANY, TIMES, OPERATIONS = 1 << 24, 32, 8
# A read at a place that is computed takes as long as so many operations; so does a division.
READ, DIVISION = 6, 3


def are_repeated(few: int, many: int, nodes: Iterable[fx.Node], calls: Mapping[fx.Node, OpCall | None]) -> bool:
    """Whether a kernel of ``many`` elements would repeat too much of what nodes compute for ``few``."""
    is_small = 0 < few * TIMES <= many and many >= MANY
    return is_small and sum(_cost(calls.get(node)) for node in nodes) >= OPERATIONS


def count_elements(node: fx.Node) -> int:
    """Return how many elements a value on a GPU has; 0 where that is not known."""
    value: Any = node.meta.get("val")
    is_known = isinstance(value, torch.Tensor) and value.is_cuda and all(type(size) is int for size in value.shape)
    return value.numel() if is_known else 0


def _cost(call: OpCall | None) -> int:
    if call is None or call.is_view:
        return 0
    nested = sum(_cost(item) for item in call.tensors if isinstance(item, OpCall))
    if call.function.op == "take":
        return READ + nested
    # It reads whole texts, which importing fuser does not.
    from fuser.cxx.operations import count_operations  # noqa: PLC0415

    functor = call.function.functor
    try:
        return count_operations(functor) + DIVISION * functor.source.count("/") + nested
    except (FunctorError, UntranslatableError):
        return nested
