"""Matrix products of odd rows in strict numerics: read by whole vectors, and added up in the order of cuBLAS's kernels.

A vocabulary of 50257 makes the products of a language model's last layer, and of its gradients, five to nine times
slower than one of 50264: cuBLAS's kernels for such rows read one element at a time. What they add up, and in which
order, is simple, and is what kernels of fuser's do with rows that begin at whole vectors: those of the gradient are
copied so, once for both products that read it. Which order cuBLAS has for some sizes is found by comparing every bit of
a product of that size, once, and both are timed; where no order fits, or nothing is gained, the product stays torch's.
In fast numerics rows are padded (``fuser.fx.products``).
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from fuser import counters, disk_cache, log
from fuser.config import config
from fuser.cuda.products import ALIGNMENT_BYTES, ProductOrder, can_multiply, multiply
from fuser.disk_cache import CacheKey
from fuser.errors import NoCompileError, UnsupportedError
from fuser.fx.nodes import add_call, is_static
from fuser.library import LIBRARY
from fuser.order_check import verdict_key
from fuser.planner import can_fuse
from fuser.process import Lock

__all__ = ["describe_choice", "order_products"]

_ATEN = torch.ops.aten
_DTYPES = (torch.float16, torch.bfloat16)
# Elements of a vector.
VECTOR = 8
# Products of so many operations take longer than what there is to do beside them.
OPERATIONS = 1 << 34
# What cuBLAS's kernels for odd rows have: the depth of an instruction, and that of a tile.
KINDS = ((8, 32), (16, 64), (16, 32))
MAX_SLICES = 4
# How often each product is timed.
TURNS = 3

LIBRARY.define("product(Tensor left, Tensor right, int rows, int gap_at, int[] order) -> Tensor")  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class MeasuredOrder:
    """What is known of products of some sizes on a device."""

    order: ProductOrder
    # How much less time fuser's kernel takes than cuBLAS's, and how much torch takes to copy the left operand before.
    saved_us: int
    copy_us: int


# By what it follows from; the lock is held while products are compared. None: no order that is known.
_measured: dict[CacheKey, MeasuredOrder | None] = {}
_lock = Lock()


@dataclass(frozen=True, slots=True)
class _OddProduct:
    """A product that may be fuser's."""

    node: fx.Node
    # Where the left operand needs how many zeros; None: it is turned, and they may be anywhere.
    gap: tuple[int, int] | None
    measured: MeasuredOrder


def order_products(graph: fx.Graph) -> None:
    """Let kernels of fuser's compute, on a GPU, products of odd rows in cuBLAS's order, where that gains time."""
    if not config.odd_products:
        return
    found: dict[fx.Node, list[_OddProduct]] = {}
    for node in graph.find_nodes(op="call_function", target=_ATEN.mm.default):
        left, right = (item.meta.get("val") for item in node.args)
        if _is_plain(left) and _is_plain(right) and _is_odd(left, right):
            is_turned, measured = left.stride(1) != 1, measure(left, right)
            if measured is not None and (not is_turned or node.args[0].target is _ATEN.t.default):
                base = node.args[0].args[0] if is_turned else node.args[0]
                gap = None if is_turned else measured.order.find_gap(left.shape[1])
                found.setdefault(base, []).append(_OddProduct(node, gap, measured))
    for base, products in found.items():
        # They share the copy.
        if sum(item.measured.saved_us for item in products) > max(item.measured.copy_us for item in products):
            _replace(graph, base, products)


def _replace(graph: fx.Graph, base: fx.Node, products: list[_OddProduct]) -> None:
    call = functools.partial(add_call, graph)
    size = base.meta["val"].shape[1]
    gap = next((item.gap for item in products if item.gap), (size, -size % VECTOR))
    with graph.inserting_before(products[0].node):
        copy = _widen(call, base, size, *gap) if size % VECTOR else base
    for product in products:
        if product.gap not in {None, gap}:
            # Its slices are others.
            continue
        node, order = product.node, [*astuple(product.measured.order)]
        seen: Any = node.args[0]
        with graph.inserting_before(node):
            left = copy if product.gap else call(_ATEN.t.default, copy)
            rows = node.meta["val"].shape[0]
            made = call(torch.ops.fuser.product.default, left, node.args[1], rows, gap[0], order)
        made.meta = node.meta
        node.replace_all_uses_with(made)
        graph.erase_node(node)
        if seen is not base and not seen.users:
            # Else what it is a view of would be written, too.
            graph.erase_node(seen)


def _widen(call: Callable[..., Any], base: Any, size: int, at: int, more: int) -> Any:
    # Rows with so many zeros at some place: of two parts at most, so that groups write them.
    begin = call(_ATEN.slice.Tensor, base, 1, 0, at) if at < size else base
    made = call(_ATEN.constant_pad_nd.default, begin, [0, more], 0.0)
    return call(_ATEN.cat.default, [made, call(_ATEN.slice.Tensor, base, 1, at, size)], 1) if at < size else made


def _is_plain(value: Any) -> bool:
    if not (is_static(value) and value.dtype in _DTYPES and value.is_cuda and value.dim() == 2):
        return False
    # Row-major, or turned.
    rows = value.t() if value.stride(1) != 1 else value
    return bool(rows.is_contiguous())


def _is_odd(left: torch.Tensor, right: torch.Tensor) -> bool:
    # Whether rows are odd: of the result, or of the left operand, which is copied then; the right one is as it is.
    # Then cuBLAS has the same kernels wherever tensors begin. Those for rows that are even are as fast as fuser's.
    operations = 2 * left.numel() * right.shape[1]
    is_odd = right.shape[1] % 2 or max(left.stride()) % 2
    return bool(is_odd) and max(right.stride()) % VECTOR == 0 and operations >= OPERATIONS


def describe_choice() -> tuple[str, ...]:
    """Return which kernels the user lets cuBLAS, and fuser, take: what is compiled depends on it."""
    flags = torch.backends.cuda.matmul
    chosen = (
        config.odd_products,
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.preferred_blas_library(),
        flags.allow_fp16_reduced_precision_reduction,
        flags.allow_bf16_reduced_precision_reduction,
        getattr(flags, "allow_fp16_accumulation", False),
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    )
    return tuple(map(str, chosen))


def measure(left: torch.Tensor, right: torch.Tensor) -> MeasuredOrder | None:
    """Return in which order cuBLAS adds up a product of tensors like these, and what it takes; None if nobody knows."""
    device = left.device
    is_ready = can_fuse("cuda") and torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing()
    if not is_ready or not can_multiply(device):
        return None
    kind = (left.dtype, left.shape, left.stride(), right.shape, right.stride())
    key = verdict_key(device, "product order", *map(str, kind), *describe_choice())
    with _lock():
        if key not in _measured:
            payload = disk_cache.read(key)
            if payload is None:
                try:
                    numbers = _compare(left, right)
                except (NoCompileError, UnsupportedError, torch.OutOfMemoryError):
                    # Nobody knows: torch's kernel serves, this time.
                    return None
                payload = " ".join(map(str, numbers)).encode()
                disk_cache.write(key, payload)
            *order, saved_us, copy_us = map(int, payload.split() or (0, 0))
            _measured[key] = MeasuredOrder(ProductOrder(*order), saved_us, copy_us) if order else None
            log.say("order", f"matrix product, {kind}: {_measured[key] or 'another one'}")
        return _measured[key]


def _compare(left: torch.Tensor, right: torch.Tensor) -> Iterable[int]:
    # The fields of MeasuredOrder, those of its order first; none where no order fits.
    device = left.device
    counters.count("checks")
    with (
        _disable_current_modes(),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
        torch.cuda.device(device),
    ):
        generator = torch.Generator(device).manual_seed(0)
        orders = list(_list_orders(left, right))
        for spread in (0, 8):
            # Of much the same size, and of very different ones.
            given = [_draw(value, spread, generator) for value in (left, right)]
            wanted = torch.mm(*given).view(torch.int16)
            orders = [order for order in orders if torch.equal(_multiply(given, order).view(torch.int16), wanted)]
            del wanted
            if not orders:
                return ()
        order, copied = orders[0], _copy(given[0], orders[0])
        saved_us = _time_us(lambda: torch.mm(*given)) - _time_us(lambda: _multiply(given, order, copied))
        copy_us = _time_us(lambda: _copy(given[0], order)) if copied[0] is not given[0] else 0
        return *astuple(order), saved_us, copy_us


def _list_orders(left: torch.Tensor, right: torch.Tensor) -> Iterator[ProductOrder]:
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


def _multiply(
    given: list[torch.Tensor], order: ProductOrder, copied: tuple[torch.Tensor, int] | None = None
) -> torch.Tensor:
    left, right = given
    wide, at = copied or _copy(left, order)
    return multiply(wide, right, left.shape[0], at, order)


def _copy(left: torch.Tensor, order: ProductOrder) -> tuple[torch.Tensor, int]:
    # As ``_replace`` does, and where zeros begin.
    is_turned = left.stride(1) != 1
    base = left.t() if is_turned else left
    size = base.shape[1]
    at, more = (size, -size % VECTOR) if is_turned else order.find_gap(size) or (size, 0)
    wide = _widen(lambda target, *given: target(*given), base, size, at, more) if size % VECTOR else base
    return (left if wide is base else wide.t() if is_turned else wide), at


def _time_us(run: Callable[[], Any]) -> int:
    # The least of some turns: other work on the GPU can only add to it.
    times: list[float] = []
    event: Any = torch.cuda.Event
    for _ in range(TURNS):
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return round(1e3 * min(times))


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
