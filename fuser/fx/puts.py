"""Gradients of reads at entries: what goes to one entry is added up, by entries sorted once for all that share them.

torch's ``index_put`` with ``accumulate`` sorts its entries in every call, writes zeros first, and copies what does not
lie densely. Here the entries are sorted by a step of the graph, and a kernel adds up for each entry what goes there, in
torch's order: that of the values, rounded as torch's kernels round, which has been compared with them before.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import _disable_current_modes

from fuser.errors import CompileError, NoCompileError, UnsupportedError
from fuser.fx import passes
from fuser.fx.fusion_node import FusionModule
from fuser.fx.nodes import add_call, is_static
from fuser.fx.passes import Fuel
from fuser.fx.substitution import sort_graph
from fuser.graph import FusionGroup, GroupBuilder
from fuser.ops import IS_IN_MEMORY, put_function
from fuser.order_check import find_verdict, verdict_key
from fuser.planner import can_fuse, make_plan
from fuser.tensor_desc import describe

__all__ = ["sort_puts"]

_ATEN = torch.ops.aten
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ZEROS = (_ATEN.new_zeros.default, _ATEN.zeros.default, _ATEN.zeros_like.default)
# Rows from which torch rounds each sum, and such without columns.
_WIDE = 32


@dataclass(frozen=True, slots=True)
class _Put:
    """Values that are added to zeros at entries."""

    values: fx.Node
    entries: fx.Node
    # The dimension that entries are along, and how many there are.
    dim: int
    size: int
    # Whether torch's kernel has one order; else it adds values as they come.
    is_ordered: bool
    # Whether entries may count from the end.
    wraps: bool

    def find_adding(self, numerics: str) -> str | None:
        """Return how the values are added up; None where torch's kernel does it in an order that nobody knows."""
        if numerics == "fast":
            return "once"
        if not self.is_ordered:
            return None if torch.are_deterministic_algorithms_enabled() else "each"
        value = self.values.meta["val"]
        # Which of torch's kernels adds rows of so many elements.
        row = math.prod(value.shape[self.dim + 1 :])
        adding = "lanes" if row == 1 else "once" if row <= _WIDE else "each"
        return adding if _has_torchs_order(value.device, value.dtype, adding) else None


def sort_puts(graph_module: fx.GraphModule, numerics: str, fuel: Fuel | None) -> None:
    """Let kernels add up, on a GPU, what is added to zeros by ``index_put``, ``index_add`` or ``scatter_add``."""
    if not can_fuse("cuda"):
        return
    graph, known = graph_module.graph, dict[Any, tuple[fx.Node, fx.Node]]()
    names = (name for number in itertools.count() if not hasattr(graph_module, name := f"put_{number}"))
    for target, find in _PUTS.items():
        for node in graph.find_nodes(op="call_function", target=target):
            put = find(*node.args, **node.kwargs)
            if put is None or not _has_kernel(node, put):
                continue
            adding = put.find_adding(numerics)
            if adding is None or not (fuel or passes.process_fuel).burn():
                continue
            key = put.entries, put.size, put.wraps
            with graph.inserting_before(node):
                if key not in known:
                    known[key] = _sort(graph, *key)
                group = _put_group(adding, put.dim, node.meta["val"].dim(), numerics)
                module = FusionModule(group, [node.name])
                graph_module.add_submodule(name := next(names), module)
                made = graph.call_module(name, (put.values, *known[key]))
            (fuel or passes.process_fuel).see(module)
            made.meta = node.meta | {IS_IN_MEMORY: True}
            node.replace_all_uses_with(made)
            zeros: Any = node.args[0]
            graph.erase_node(node)
            if not zeros.users:
                graph.erase_node(zeros)
    if known:
        sort_graph(graph)


def _find_index_put(zeros: Any, indices: Any, values: Any, accumulate: Any = False, *rest: Any) -> _Put | None:
    dims = [dim for dim, item in enumerate(indices) if item is not None]
    if accumulate is not True or rest or len(dims) != 1 or not _is_zero(zeros):
        return None
    (dim,) = dims
    return _Put(values, indices[dim], dim, zeros.meta["val"].shape[dim], is_ordered=True, wraps=True)


def _find_index_add(zeros: Any, dim: Any, index: Any, source: Any, *, alpha: Any = 1) -> _Put | None:
    if alpha != 1 or not _is_zero(zeros):
        return None
    dim %= zeros.meta["val"].dim()
    return _Put(source, index, dim, zeros.meta["val"].shape[dim], is_ordered=False, wraps=False)


def _find_scatter_add(zeros: Any, dim: Any, index: Any, src: Any) -> _Put | None:
    # Of entries that are the same for all elements of a row.
    if dim != 0 or not _is_zero(zeros) or index.target is not _ATEN.expand.default:
        return None
    column: Any = index.args[0]
    if column.target is not _ATEN.unsqueeze.default or column.args[0].meta["val"].dim() != 1:
        return None
    is_whole = column.args[1] in (1, -1) and index.meta["val"].shape == src.meta["val"].shape
    size = zeros.meta["val"].shape[0]
    return _Put(src, column.args[0], 0, size, is_ordered=False, wraps=False) if is_whole else None


_PUTS: dict[Any, Callable[..., _Put | None]] = {
    _ATEN.index_put.default: _find_index_put,
    _ATEN.index_add.default: _find_index_add,
    _ATEN.scatter_add.default: _find_scatter_add,
}


def _is_zero(node: Any) -> bool:
    is_made = isinstance(node, fx.Node) and node.target in _ZEROS
    return is_made and isinstance(node.meta.get("val"), torch.Tensor) and node.meta["val"].dim() > 0


def _has_kernel(node: fx.Node, put: _Put) -> bool:
    # Whether all is known, and values have the shape of what is made, but for the entries.
    known: list[Any] = [item.meta.get("val") for item in (node, put.values, put.entries)]
    if not all(is_static(item) and item.is_cuda for item in known):
        return False
    made, values, entries = known
    shape = (*made.shape[: put.dim], *entries.shape, *made.shape[put.dim + 1 :])
    is_plain = entries.dim() == 1 and entries.dtype is torch.int64 and values.dtype in _DTYPES
    return is_plain and values.shape == shape and values.numel() > 0 and made.numel() < 1 << 31


def _sort(graph: fx.Graph, entries: fx.Node, size: int, wraps: bool) -> tuple[fx.Node, fx.Node]:
    # The places of values in the order of their entries, and where those of each entry begin.
    def call(target: Any, *arguments: Any, **options: Any) -> fx.Node:
        with detect_fake_mode(entries.meta["val"]) or nullcontext():
            return add_call(graph, target, *arguments, **options)

    numbers = {"dtype": torch.int32, "device": entries.meta["val"].device, "pin_memory": False}
    every = call(_ATEN.arange.default, size + 1, **numbers)
    # Entries that are none stop the device, as in torch's kernels.
    own = call(_ATEN.slice.Tensor, every, 0, 0, size)
    found = call(_ATEN.index.Tensor, own, [entries]) if wraps else call(_ATEN.index_select.default, own, 0, entries)
    both = call(_ATEN.sort.stable, found, stable=True)
    ordered, order = (call(getitem, both, slot) for slot in range(2))
    return order, call(_ATEN.searchsorted.Tensor, ordered, every)


def _put_group(adding: str, dim: int, rank: int, numerics: str) -> FusionGroup:
    builder = GroupBuilder(numerics)
    tensors = [builder.add_input(name) for name in ("values", "order", "begins")]
    return builder.build(builder.apply(put_function(adding, dim, rank), tensors))


def _has_torchs_order(device: torch.device, dtype: torch.dtype, adding: str) -> bool:
    """Return whether kernels have the bits of torch's ``index_put``: compared once, and kept."""
    if not torch.cuda.is_available():
        return False
    key = verdict_key(device, "put", str(dtype), adding)
    try:
        return find_verdict(key, functools.partial(_compare, device, dtype, adding))
    except (CompileError, NoCompileError, UnsupportedError, torch.OutOfMemoryError):
        # Nobody knows: torch's kernel serves, this time.
        return False


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
            # Else eager torch would be compared with itself.
            make_plan(run.spec, tuple(map(describe, (values, order, begins))), allow_fallback=False)
            if not torch.equal(run(values, order, begins), zeros.index_put((entries,), values, accumulate=True)):
                return False
    return True
