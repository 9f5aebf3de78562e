"""What a kernel of fuser's gains over torch's own: whether a group is worth its launch.

Within a group nothing is written that only the group reads, which is counted by what it saves elsewhere
(``fuser.explain``). Here are the groups that save nothing: torch has as good a kernel for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fuser.fx.nodes import COPIES, GraphReading, is_copy
from fuser.ops import REDUCTIONS, OpCall, find_numerics, is_first_power

__all__ = ["count_bytes", "crosses_rows", "gains_nothing", "is_laid_out_anew", "is_small"]

# Elements of a tensor that are computed while a kernel is launched.
SMALL = 1 << 16
# Elements of which a sum along columns is worth a kernel of its own; rows, in torch's order.
LARGE, MANY = 1 << 20, 1 << 15


def gains_nothing(group: Sequence[fx.Node], reading: GraphReading) -> bool:
    """Whether torch computes a group as well as fuser, node by node."""
    # torch reduces as well, but for columns, copies nothing where no conversion is needed, and x ** 1
    # as it lies in memory. Of several copies a group makes one, and on a GPU it copies faster to another layout, by
    # tiles, and beside what it pads with.
    every = [reading.calls[node] for node in group]
    calls = [call for call in every if call is None or not (call.is_view or call.function.arranges)]
    op = REDUCTIONS.get(str(calls[0].function.op)) if len(calls) == 1 and calls[0] is not None else None
    if op is not None and not op.scans and calls[0] is not None:
        is_alone = not calls[0].scalars and all(isinstance(item, fx.Node) for item in calls[0].tensors)
        return is_alone and not _is_of_columns(calls[0])
    if all(call is not None and call.function.op == "take" for call in every):
        return True
    moved = [(node, call) for node, call in zip(group, every, strict=True) if call is None or not call.is_view]
    if len(moved) > 1 or any(is_laid_out_anew(node, call) for node, call in moved):
        return False
    return all(is_copy(call) or (call is not None and is_first_power(call.function)) for call in calls)


def _is_of_columns(call: OpCall) -> bool:
    # In an order of its own fuser reduces them faster: few columns keep few of torch's threads busy. In torch's order,
    # too, where they are long: its threads wait for what they read.
    value = call.tensors[0].meta.get("val")
    reduction = call.function.reduction
    if reduction is None or not isinstance(value, torch.Tensor) or not value.is_cuda:
        return False
    if any(type(size) is not int for size in (*value.shape, *value.stride())) or value.numel() < LARGE:
        return False
    dims = reduction.normalize_dims(value.dim())
    rows = math.prod(value.shape[dim] for dim in dims)
    if find_numerics() != "fast" and (call.function.op != "sum" or rows < MANY):
        return False
    return any(value.stride(dim) == 1 and value.shape[dim] > 1 and dim not in dims for dim in range(value.dim()))


def is_laid_out_anew(node: fx.Node, call: OpCall | None) -> bool:
    """Whether a node copies a tensor on a GPU to another layout, or pads it."""
    values: list[Any] = [item.meta.get("val") for item in (node, *node.all_input_nodes)]
    is_known = all(isinstance(value, torch.Tensor) and value.is_cuda for value in values)
    if not is_known or call is None or call.function.op not in {*COPIES, "pad"}:
        return False
    # As text: strides may be symbols.
    return len({str((value.shape, value.stride())) for value in values}) > 1


def crosses_rows(node: fx.Node, call: OpCall | None) -> bool:
    """Whether a copy to another layout has other rows: what reads them beside a reduction would read across memory."""
    if not is_laid_out_anew(node, call):
        return False
    values = [item.meta["val"] for item in (node, *node.all_input_nodes)]
    ends = {(tuple(value.shape[-1:]), str(value.stride()[-1:])) for value in values if value.dim()}
    return len(ends) != 1 or "(1,)" not in next(iter(ends))


def is_small(value: Any) -> bool:
    """Whether a launch takes longer than computing a tensor."""
    is_known = isinstance(value, torch.Tensor) and all(type(size) is int for size in value.shape)
    return is_known and value.numel() <= SMALL


def count_bytes(value: Any) -> int:
    """Return how many bytes of memory a value is, or those of a list are: what is expanded is read once."""
    if isinstance(value, list | tuple):
        return sum(map(count_bytes, value))
    if not isinstance(value, torch.Tensor):
        return 0
    sizes = [_hint(size) for size, stride in zip(value.shape, value.stride(), strict=True) if _hint(stride)]
    return math.prod(sizes) * value.element_size()


def _hint(size: Any) -> int:
    return int(size.node.hint or 0) if isinstance(size, torch.SymInt) else int(size)
