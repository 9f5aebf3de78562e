"""Gradients of reads at entries: what goes to one entry is added up, by entries sorted once for all that share them.

torch's ``index_put`` with ``accumulate`` sorts its entries in every call, writes zeros first, and copies what does not
lie densely. Here the entries are sorted by a step of the graph, and a kernel adds up for each entry what goes there, in
torch's order: that of the values, rounded as torch's kernels round, which has been compared with them before.
"""

from __future__ import annotations

import functools
import itertools
import math
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import _disable_current_modes

from fuser.disk_cache import CacheKey
from fuser.fx import passes
from fuser.fx.passes import Fuel, FusionModule
from fuser.graph import FusionGroup, GroupBuilder
from fuser.ops import IS_IN_MEMORY, put_function
from fuser.order_check import find_verdict, installation

__all__ = ["sort_puts"]

_ATEN = torch.ops.aten
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ZEROS = (_ATEN.new_zeros.default, _ATEN.zeros.default, _ATEN.zeros_like.default)
# Rows from which torch rounds each sum, and such without columns.
_WIDE = 32


def sort_puts(graph_module: fx.GraphModule, numerics: str, fuel: Fuel | None) -> None:
    """Let kernels compute ``index_put`` of values that are added to zeros, on a GPU."""
    graph, known = graph_module.graph, dict[Any, tuple[fx.Node, fx.Node]]()
    names = (name for number in itertools.count() if not hasattr(graph_module, name := f"put_{number}"))
    for node in graph.find_nodes(op="call_function", target=_ATEN.index_put.default):
        found = _find_put(node)
        if found is None:
            continue
        dim, entries, values = found
        value, size = values.meta["val"], node.meta["val"].shape[dim]
        adding = _find_adding(value, dim) if numerics == "strict" else "once"
        has_order = numerics == "fast" or _has_torchs_order(value.device, value.dtype, adding)
        if not has_order or not (fuel or passes.process_fuel).burn():
            continue
        with graph.inserting_before(node):
            if (entries, size) not in known:
                known[entries, size] = _sort(graph, entries, size)
            name = next(names)
            graph_module.add_submodule(name, FusionModule(_put_group(adding, dim, value.dim(), numerics), [node.name]))
            made = graph.call_module(name, (values, *known[entries, size]))
        made.meta = node.meta | {IS_IN_MEMORY: True}
        node.replace_all_uses_with(made)
        zeros: Any = node.args[0]
        graph.erase_node(node)
        if not zeros.users:
            graph.erase_node(zeros)


def _find_put(node: fx.Node) -> tuple[int, fx.Node, fx.Node] | None:
    # Along which dimension values are put, and at which entries; None of others.
    zeros, indices, values, *accumulates = node.args
    if accumulates != [True] or not isinstance(zeros, fx.Node) or zeros.target not in _ZEROS:
        return None
    dims = [dim for dim, item in enumerate(indices) if item is not None]  # type: ignore[arg-type, union-attr]
    if len(dims) != 1 or not isinstance(values, fx.Node):
        return None
    entries: Any = indices[dims[0]]  # type: ignore[index, call-overload]
    made, value, at = (item.meta.get("val") for item in (node, values, entries))
    if not all(_is_static(item) and item.is_cuda for item in (made, value, at)):
        return None
    is_whole = value.shape == (*made.shape[: dims[0]], *at.shape, *made.shape[dims[0] + 1 :])
    is_known = at.dim() == 1 and at.dtype is torch.int64 and value.dtype in _DTYPES and value.numel() > 0
    return (dims[0], entries, values) if is_whole and is_known and made.numel() < 1 << 31 else None


def _is_static(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and all(type(size) is int for size in (*value.shape, *value.stride()))


def _find_adding(value: torch.Tensor, dim: int) -> str:
    # Which of torch's kernels adds rows of so many elements.
    row = math.prod(value.shape[dim + 1 :])
    return "lanes" if row == 1 else "once" if row <= _WIDE else "each"


def _sort(graph: fx.Graph, entries: fx.Node, size: int) -> tuple[fx.Node, fx.Node]:
    # The places of values in the order of their entries, and where those of each entry begin.
    def call(target: Any, *arguments: Any, **options: Any) -> fx.Node:
        node = graph.call_function(target, arguments, options)
        given = fx.node.map_arg((arguments, options), lambda item: item.meta["val"])
        with detect_fake_mode(entries.meta["val"]):
            node.meta["val"] = target(*given[0], **given[1])
        return node

    numbers = {"dtype": torch.int32, "device": entries.meta["val"].device, "pin_memory": False}
    every = call(_ATEN.arange.default, size + 1, **numbers)
    # Entries that are negative count from the end, and any other stops the device, as in torch's kernels.
    found = call(_ATEN.index.Tensor, call(_ATEN.slice.Tensor, every, 0, 0, size), [entries])
    both = call(_ATEN.sort.stable, found, stable=True)
    ordered, order = (call(getitem, both, slot) for slot in range(2))
    return order, call(_ATEN.searchsorted.Tensor, ordered, every)


def _put_group(adding: str, dim: int, rank: int, numerics: str) -> FusionGroup:
    builder = GroupBuilder(numerics)
    tensors = [builder.add_input(name) for name in ("values", "order", "begins")]
    return builder.build(builder.apply(put_function(adding, dim, rank), tensors))


@functools.lru_cache(64)
def _has_torchs_order(device: torch.device, dtype: torch.dtype, adding: str) -> bool:
    """Return whether kernels have the bits of torch's ``index_put``: compared once, and kept."""
    if not torch.cuda.is_available():
        return False
    key = CacheKey.build(("put", *installation(device), str(dtype), adding), ())
    return find_verdict(key, functools.partial(_compare, device, dtype, adding))


def _compare(device: torch.device, dtype: torch.dtype, adding: str) -> bool:
    row = {"each": 96, "once": 20, "lanes": 1}[adding]
    run = FusionModule(_put_group(adding, 0, 2, "strict"))
    with _disable_current_modes(), torch.no_grad(), torch.cuda.device(device):
        generator = torch.Generator(device).manual_seed(0)
        for size, count in ((50, 3000), (3000, 9000)):
            # Few entries have many values, and most have few.
            entries = (size * torch.rand(count, device=device, generator=generator) ** 3).long() - size // 2
            values = torch.randn(count, row, device=device, generator=generator).to(dtype)
            ordered, order = torch.sort(entries % size, stable=True)
            begins = torch.searchsorted(ordered, torch.arange(size + 1, device=device))
            zeros = torch.zeros(size, row, dtype=dtype, device=device)
            if not torch.equal(run(values, order, begins), zeros.index_put((entries,), values, accumulate=True)):
                return False
    return True
