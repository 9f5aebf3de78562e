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

from fuser.errors import UnsupportedError
from fuser.expanded import describe_values
from fuser.fx.nodes import COPIES, GraphReading, is_copy
from fuser.graph import FusionGroup
from fuser.ops import REDUCTIONS, OpCall, find_numerics, is_first_power
from fuser.tensor_desc import TensorDesc

__all__ = ["count_bytes", "count_unread", "crosses_rows", "gains_nothing", "is_small"]

# Elements of a tensor that are computed while a kernel is launched.
SMALL = 1 << 16
# Elements of which a reduction is worth a kernel of its own; of columns in torch's order at least, of rows at most; of
# rows up to which any large tensor gains, and others four times as large.
LARGE, MANY, SHORT, SHORTEST = 1 << 20, 1 << 11, 1 << 10, 1 << 6
# Bytes of rows that a kernel reads at entries four times as fast as torch's: at least, and at most.
ROW_BYTES = (64, 512)


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
        return is_alone and not _is_slow(calls[0])
    moving = [(node, call) for node, call in zip(group, every, strict=True) if call is None or not call.is_view]
    if all(call is not None and call.function.op == "take" for _, call in moving):
        return not moving or not all(call and _takes_short_rows(node, call) for node, call in moving)
    if len(moving) > 1 or any(_is_laid_out_anew(node, call) or _is_roll(node, call) for node, call in moving):
        return False
    return all(is_copy(call) or (call is not None and is_first_power(call.function)) for call in calls)


def _takes_short_rows(node: fx.Node, call: OpCall) -> bool:
    # torch's kernel has a block for each row; of an embedding it has another.
    given: list[Any] = [item.meta.get("val") for item in (node, *call.tensors)]
    value, table, entries = given
    op, dim = (call.function.form or ())[:2]
    is_known = all(isinstance(item, torch.Tensor) and item.is_cuda for item in given)
    if not is_known or op == "embedding" or value.numel() < LARGE:
        return False
    is_row = op != "gather" or not any(stride for own, stride in enumerate(entries.stride()) if own != dim)
    row = math.prod(table.shape[dim + 1 :]) * table.itemsize
    return is_row and ROW_BYTES[0] <= row <= ROW_BYTES[1]


def _is_slow(call: OpCall) -> bool:
    # Short rows keep few of torch's threads busy, and so do rows of narrow elements, of which each adds up few at a
    # time; whole numbers it widens one by one. Few columns fuser reduces faster in an order of its own; in torch's
    # order, too, where they are long: its threads wait for what they read.
    read, reduction = call.tensors[0].meta, call.function.reduction
    # Where sizes may differ, those of the first call.
    value = read.get("val", read.get("first"))
    if reduction is None or not isinstance(value, torch.Tensor | TensorDesc) or value.device is None:
        return False
    strides = value.stride() if isinstance(value, torch.Tensor) else value.strides
    is_known = all(type(size) is int for size in (*value.shape, *strides))
    if value.device.type != "cuda" or not is_known or math.prod(value.shape) < LARGE:
        return False
    op, dtype = call.function.op, value.dtype
    assert dtype is not None, "it is a tensor's"
    is_whole = not (dtype.is_floating_point or dtype.is_complex)
    if op == "count_nonzero" or (is_whole and dtype.itemsize < 8 and op in {"sum", "prod"}):
        return True
    dims = reduction.normalize_dims(len(value.shape))
    rows = math.prod(value.shape[dim] for dim in dims)
    kept = [dim for dim, size in enumerate(value.shape) if size > 1 and dim not in dims]
    if all(strides[dim] != 1 for dim in kept):
        # Whether one of many bytes is not zero torch finds sooner.
        is_narrow = dtype.itemsize <= 2 and not (is_whole and dtype is not torch.bool and op in {"any", "all"})
        return is_narrow or (rows <= SHORT and (rows <= SHORTEST or math.prod(value.shape) >= 4 * LARGE))
    return find_numerics() == "fast" or (call.function.op == "sum" and rows >= MANY)


def _is_laid_out_anew(node: fx.Node, call: OpCall | None) -> bool:
    """Whether a node copies a tensor on a GPU to another layout, or pads it."""
    values: list[Any] = [item.meta.get("val") for item in (node, *node.all_input_nodes)]
    is_known = all(isinstance(value, torch.Tensor) and value.is_cuda for value in values)
    if not is_known or call is None or call.function.op not in {*COPIES, "pad"}:
        return False
    # As text: strides may be symbols.
    return len({str((value.shape, value.stride())) for value in values}) > 1


def _is_roll(node: fx.Node, call: OpCall | None) -> bool:
    # Put together of parts of one tensor: torch rolls along one dimension after the other, and divides per element.
    return call is not None and call.function.op == "cat" and len(node.all_input_nodes) == 1


def crosses_rows(node: fx.Node, call: OpCall | None) -> bool:
    """Whether a copy to another layout has other rows: what reads them beside a reduction would read across memory."""
    if not _is_laid_out_anew(node, call):
        return False
    values = [item.meta["val"] for item in (node, *node.all_input_nodes)]
    # As above.
    ends = {(str(value.shape[-1:]), str(value.stride()[-1:])) for value in values if value.dim()}
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


def count_unread(group: FusionGroup, inputs: Sequence[TensorDesc]) -> int:
    """Return how many bytes of its inputs a group has no use for: it looks at parts of them."""
    try:
        values = describe_values(group, inputs)
    except UnsupportedError:
        # Eager torch reads whatever it reads.
        return 0
    # By value: what is expanded is one element again and again.
    sizes = [
        math.prod(size for size, stride in zip(item.shape, item.strides, strict=True) if stride) for item in values
    ]
    needed = [size if value in group.outputs else 0 for value, size in enumerate(sizes)]
    for begin, item in reversed([*zip(group.value_offsets(), group.applications, strict=True)]):
        shown = sum(needed[begin : begin + item.function.num_outputs])
        is_part = item.function.is_view or item.function.arranges
        for value in item.tensors:
            needed[value] = min(sizes[value], needed[value] + (shown if is_part else sizes[value]))
    pairs = zip(inputs, sizes, needed, strict=False)
    return sum((size - own) * item.dtype.itemsize for item, size, own in pairs if item.dtype is not None)


def _hint(size: Any) -> int:
    return int(size.node.hint or 0) if isinstance(size, torch.SymInt) else int(size)
