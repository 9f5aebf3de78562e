"""Matrix products of odd rows in strict numerics: read by whole vectors, and added up in the order of cuBLAS's kernels.

A vocabulary of 50257 makes the products of a language model's last layer, and of its gradients, five to nine times
slower than one of 50264: cuBLAS's kernels for such rows read one element at a time. What they add up, and in which
order, is simple, and is what kernels of fuser's do with rows that begin at whole vectors: those of the gradient are
copied so, once for both products that read it. Which order cuBLAS has for some sizes is found by comparing every bit of
a product of that size, once, and kept; where none fits, the product stays torch's. In fast numerics rows are padded
(``fuser.fx.products``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from fuser import disk_cache
from fuser.cuda.products import ALIGNMENT_BYTES, ProductOrder, can_multiply, multiply
from fuser.disk_cache import CacheKey
from fuser.library import LIBRARY
from fuser.order_check import installation
from fuser.process import Lock

__all__ = ["order_products"]

_ATEN = torch.ops.aten
_DTYPES = (torch.float16, torch.bfloat16)
# Elements of a vector.
VECTOR = 8
# Products of so many operations take longer than what there is to do beside them.
OPERATIONS = 1 << 34
# Rows of a result that are compared at a time, at most.
ROWS = 4096
# What cuBLAS's kernels for odd rows have: the depth of an instruction, and that of a tile.
KINDS = ((8, 32), (16, 64), (16, 32))
MAX_SLICES = 4

# As it was found, by what it follows from; each lock is held while products are compared.
_orders: dict[CacheKey, ProductOrder | None] = {}
_lock = Lock()

LIBRARY.define("product(Tensor left, Tensor right, int rows, int gap_at, int[] order) -> Tensor")  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class _Product:
    """A product whose order is known: of a tensor as it lies, or turned, with another one."""

    base: fx.Node
    is_turned: bool
    order: ProductOrder


def order_products(graph: fx.Graph) -> None:
    """Let kernels of fuser's compute, on a GPU, products of odd rows whose order they keep."""
    found: dict[fx.Node, _Product] = {}
    for node in graph.find_nodes(op="call_function", target=_ATEN.mm.default):
        values: list[Any] = [item.meta.get("val") for item in node.args]
        if all(map(_is_plain, values)) and _is_odd(*values):
            order = find_order(*values)
            if order is not None:
                left: Any = node.args[0]
                is_turned = left.target is _ATEN.t.default
                found[node] = _Product(left.args[0] if is_turned else left, is_turned, order)
    gaps: dict[fx.Node, tuple[int, int]] = {}
    for product in found.values():
        if not product.is_turned:
            gap = product.order.find_gap(product.base.meta["val"].shape[1])
            assert gap is not None, "it has been compared"
            gaps.setdefault(product.base, gap)
    copies: dict[tuple[fx.Node, int], fx.Node] = {}
    for node, product in found.items():
        _replace(graph, node, product, gaps, copies)


def _replace(graph: fx.Graph, node: fx.Node, product: _Product, gaps: Any, copies: Any) -> None:
    def call(target: Any, *arguments: Any, **options: Any) -> fx.Node:
        made = graph.call_function(target, arguments, options)
        given = torch.utils._pytree.tree_map(lambda x: x.meta["val"] if isinstance(x, fx.Node) else x, arguments)
        made.meta["val"] = target(*given, **options)
        return made

    base, value, left = product.base, product.base.meta["val"], product.base
    size = value.shape[1]
    # In which place zeros are is all the same for what is turned: for one copy, where others need them.
    gap = gaps.get(base) if product.is_turned else product.order.find_gap(size)
    at, more = gap or (size, -size % VECTOR)
    with graph.inserting_before(node):
        if size % VECTOR:
            if (base, at) not in copies:
                zeros = call(_ATEN.new_zeros.default, base, [value.shape[0], more])
                parts = [call(_ATEN.slice.Tensor, base, 1, 0, at), zeros, call(_ATEN.slice.Tensor, base, 1, at, size)]
                copies[base, at] = call(_ATEN.cat.default, parts[: 2 + (at < size)], 1)
            left = copies[base, at]
        if product.is_turned:
            left = call(_ATEN.t.default, left)
        order = [product.order.depth, product.order.tile, product.order.slices]
        made = call(torch.ops.fuser.product.default, left, node.args[1], node.meta["val"].shape[0], at, order)
    made.meta = node.meta
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _is_plain(value: Any) -> bool:
    is_dense = isinstance(value, torch.Tensor) and value.dtype in _DTYPES and value.is_cuda and value.dim() == 2
    if not is_dense or not all(type(size) is int for size in (*value.shape, *value.stride())):
        return False
    # Row-major, or turned.
    is_turned = value.stride(1) != 1
    rows = value.t() if is_turned else value
    return bool(rows.is_contiguous() and value.storage_offset() == 0)


def _is_odd(left: torch.Tensor, right: torch.Tensor) -> bool:
    # Whether rows are odd: of the result, or of the left operand, which is copied then; the right one is as it is.
    operations = 2 * left.numel() * right.shape[1]
    is_odd = right.shape[1] % VECTOR or max(left.stride()) % VECTOR
    return bool(is_odd) and max(right.stride()) % VECTOR == 0 and operations >= OPERATIONS


def find_order(left: torch.Tensor, right: torch.Tensor) -> ProductOrder | None:
    """Return the order in which cuBLAS adds up a product of tensors like these; None if it is none that is known."""
    device = left.device
    if not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing() or not can_multiply(device):
        return None
    flags = torch.backends.cuda.matmul
    chosen = (
        torch.are_deterministic_algorithms_enabled(),
        str(torch.backends.cuda.preferred_blas_library()),
        flags.allow_fp16_reduced_precision_reduction,
        flags.allow_bf16_reduced_precision_reduction,
        getattr(flags, "allow_fp16_accumulation", False),
    )
    kind = (left.dtype, left.shape, left.stride(), right.shape, right.stride(), *chosen)
    key = CacheKey.build(("product order", *installation(device), *map(str, kind)), ())
    with _lock():
        if key not in _orders:
            payload = disk_cache.read(key)
            if payload is None:
                try:
                    order = _compare(left, right)
                except torch.OutOfMemoryError:
                    # Nobody knows: torch's kernel serves, this time.
                    return None
                payload = " ".join(map(str, (order.depth, order.tile, order.slices) if order else ())).encode()
                disk_cache.write(key, payload)
            numbers = [int(item) for item in payload.split()]
            _orders[key] = ProductOrder(*numbers) if numbers else None
    return _orders[key]


def _compare(left: torch.Tensor, right: torch.Tensor) -> ProductOrder | None:
    device = left.device
    with _disable_current_modes(), torch.no_grad(), torch.cuda.device(device):
        generator = torch.Generator(device).manual_seed(0)
        candidates = list(_candidates(left, right))
        for spread in (0, 8):
            # Of much the same size, and of very different ones.
            given = [_draw(value, spread, generator) for value in (left, right)]
            wanted = torch.mm(*given)
            candidates = [order for order in candidates if _is_same(given, wanted, order)]
            if not candidates:
                return None
        return candidates[0]


def _candidates(left: torch.Tensor, right: torch.Tensor) -> Iterator[ProductOrder]:
    length = left.shape[1]
    for slices, (depth, tile) in itertools.product(range(1, MAX_SLICES + 1), KINDS):
        order = ProductOrder(depth, tile, slices)
        gap = order.find_gap(length)
        # Zeros between need a copy of the left operand, and a right one that leaves rows out.
        if gap is not None and (not gap[1] or (left.stride(1) == 1 and length % VECTOR and right.stride(1) == 1)):
            yield order


def _draw(like: torch.Tensor, spread: int, generator: torch.Generator) -> torch.Tensor:
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    made.normal_(generator=generator)
    if spread:
        made *= torch.empty_like(made).uniform_(-spread, spread, generator=generator).exp2_()
    return made


def _is_same(given: list[torch.Tensor], wanted: torch.Tensor, order: ProductOrder) -> bool:
    left, right = given
    # First a few rows: most orders differ there.
    for first, last in itertools.pairwise((0, *range(256, wanted.shape[0], ROWS), wanted.shape[0])):
        part = _with_gap(left[first:last], order)
        made = multiply(part[0], right, last - first, part[1], order)
        if not torch.equal(made.view(torch.int16), wanted[first:last].view(torch.int16)):
            return False
    return True


def _with_gap(left: torch.Tensor, order: ProductOrder) -> tuple[torch.Tensor, int]:
    # As ``order_products`` copies it, and where its zeros begin.
    if left.stride(1) != 1:
        more = -left.shape[0] % VECTOR
        padded = torch.nn.functional.pad(left.t(), (0, more)).contiguous().t()
        return padded, left.shape[0]
    at, more = order.find_gap(left.shape[1]) or (0, 0)
    if not left.shape[1] % VECTOR:
        return left, at
    zeros = left.new_zeros(left.shape[0], more)
    return torch.cat([left[:, :at], zeros, left[:, at:]], 1), at


def run_product(left: Any, right: Any, rows: int, gap_at: int, order: list[int]) -> torch.Tensor:
    """Multiply (dispatch keys CPU and CUDA)."""
    if not left.is_cuda or any(item.data_ptr() % ALIGNMENT_BYTES for item in (left, right)):
        # cuBLAS has other kernels for what lies anywhere.
        more = left.shape[1] - right.shape[0]
        left = torch.cat([left[:, :gap_at], left[:, gap_at + more :]], 1) if more else left
        more = left.shape[0] - rows
        left = torch.cat([left[:gap_at], left[gap_at + more :]], 0) if more else left
        return torch.mm(left, right)
    return multiply(left, right, rows, gap_at, ProductOrder(*order))


def fake_product(left: Any, right: Any, rows: int, gap_at: int, order: list[int]) -> torch.Tensor:  # noqa: ARG001
    """Return an empty tensor like the result."""
    return left.new_empty((rows, right.shape[1]))  # type: ignore[no-any-return]


for _key in ("CPU", "CUDA"):
    LIBRARY.impl("product", run_product, _key)  # type: ignore[no-untyped-call]
torch.library.register_fake("fuser::product", fake_product, lib=LIBRARY)
