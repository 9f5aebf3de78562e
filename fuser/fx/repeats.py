"""Work that a group would repeat: what is computed of a column, for each element of its rows. It is a group of its own.

A kernel computes each element of its results by itself. Of what is broadcast that is the same over and over, which is
free while the kernel waits for memory, but not where there is a division, a look-up and more for every element.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fuser.cxx.operations import count_operations
from fuser.errors import FunctorError, UntranslatableError
from fuser.fx.nodes import GraphReading
from fuser.ops import OpCall

__all__ = ["part_repeated"]

# How many elements the results have, at least; how many times as many as what is broadcast; and how much there is to do
# for one of that: more than hides behind memory.
MANY, TIMES, OPERATIONS = 1 << 24, 32, 8
# A read at a place that is computed takes as long as so many operations; so does a division.
READ, DIVISION = 6, 3


def part_repeated(group: Sequence[fx.Node], reading: GraphReading) -> Iterator[list[fx.Node]]:
    """Give a group in one part, or in two: first what would be repeated for many elements each."""
    sizes = {node: _count(node) for node in group}
    most = max(sizes.values(), default=0)
    narrow: dict[fx.Node, None] = {}
    for node in group:
        call = reading.calls[node]
        if call is None or call.function.reduces or most < MANY:
            # Kernels with reductions compute once what there is once a row.
            narrow = {}
            break
        is_first = all(item not in sizes or item in narrow for item in node.all_input_nodes)
        if is_first and 0 < sizes[node] * TIMES <= most:
            narrow[node] = None
    if sum(_cost(reading.calls[node]) for node in narrow) < OPERATIONS:
        yield [*group]
    else:
        yield [*narrow]
        yield [node for node in group if node not in narrow]


def _count(node: fx.Node) -> int:
    value: Any = node.meta.get("val")
    is_known = isinstance(value, torch.Tensor) and value.is_cuda and all(type(size) is int for size in value.shape)
    return value.numel() if is_known else 0


def _cost(call: OpCall | None) -> int:
    if call is None or call.is_view:
        return 0
    nested = sum(_cost(item) for item in call.tensors if isinstance(item, OpCall))
    if call.function.op == "take":
        return READ + nested
    functor = call.function.functor
    try:
        return count_operations(functor) + DIVISION * functor.source.count("/") + nested
    except (FunctorError, UntranslatableError):
        return nested
