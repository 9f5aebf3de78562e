"""Whether torch, as it is installed, has the order that a kernel keeps: found by comparing bits on the user's device.

An order is compared before it is first used, on a few random tensors of another shape with the same schedule, and the
verdict kept, in memory and on disk. Where bits differ, torch's own kernel serves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fuser import counters, disk_cache
from fuser._version import __version__
from fuser.cuda.aten_orders import Layout, coalesce
from fuser.disk_cache import CacheKey
from fuser.errors import CaptureError
from fuser.function import Function
from fuser.layout import Shape, contiguous_strides
from fuser.ops import REDUCTIONS
from fuser.orders import RowOrder
from fuser.process import Lock
from fuser.row_orders import torchs_order
from fuser.tensor_desc import TensorDesc

__all__ = ["OrderCase", "is_kept"]

# Tensors that are compared.
TRIALS = 3
# How many rows they have, at least as many as it takes for the schedule to be the same.
ROWS = (3, 8, 33, 128, 512, 600, 1024, 2048, 4096)

_lock = Lock()
_verdicts: dict[CacheKey, bool] = {}


@dataclass(frozen=True, slots=True)
class OrderCase:
    """One kind of use of an order."""

    # A row of torch's reductions.
    function: Function
    order: RowOrder
    # Of what is reduced, and along what.
    desc: TensorDesc
    dims: tuple[int, ...]
    device: torch.device

    def cache_key(self) -> CacheKey:
        """Under which the verdict is kept: the sizes of the tensor are no part of it."""
        properties: Any = torch.cuda.get_device_properties(self.device)
        device = (properties.name, str((properties.major, properties.minor)), str(properties.multi_processor_count))
        kind = (self.function.name, str(self.desc.dtype), str(_kind_of(self.order)))
        return CacheKey.build(("order", __version__, torch.__version__, str(torch.version.cuda), *device, *kind), ())


def is_kept(case: OrderCase, run: Callable[[Function, torch.Tensor], torch.Tensor]) -> bool:
    """Return whether kernels have torch's bits.

    Args:
        case: which order is asked for.
        run: applies a function to a tensor, in a kernel that keeps the order that is expected for it.

    Raises:
        CaptureError: nobody knows yet, and a CUDA graph is being captured: nothing can be compared now.
    """
    key = case.cache_key()
    with _lock():
        verdict = _verdicts.get(key)
    if verdict is None:
        payload = disk_cache.read(key)
        verdict = payload == b"1" if payload in (b"0", b"1") else None
    if verdict is None:
        if torch.cuda.is_current_stream_capturing():
            name = case.function.name
            raise CaptureError(f"{name!r} was not compared with torch's kernel before this CUDA graph: call it once")
        verdict = _compare(case, run)
        disk_cache.write(key, b"1" if verdict else b"0")
    with _lock():
        return _verdicts.setdefault(key, verdict)


def _compare(case: OrderCase, run: Callable[[Function, torch.Tensor], torch.Tensor]) -> bool:
    counters.count("checks")
    reduction = case.function.reduction
    assert reduction is not None, "it is one"
    op = REDUCTIONS[case.function.name]
    with (
        _disable_current_modes(),
        torch.no_grad(),
        torch.autocast("cuda", enabled=False),
        torch.cuda.device(case.device),
    ):
        generator = torch.Generator(case.device).manual_seed(0)
        for x, dims in _examples(case, generator):
            function = replace(case.function, reduction=replace(reduction, dims=dims, keepdim=False))
            if not torch.equal(run(function, x), op.eager(x, dims, False)):
                return False
    return True


def _examples(case: OrderCase, generator: torch.Generator) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
    # Tensors of the same kind of order, with as few rows as that takes.
    assert case.desc.dtype is not None, "numbers are not reduced"
    layout = coalesce(case.desc.shape, case.desc.strides, case.dims)
    for count in (*ROWS, layout.rows):
        shape, dims = _resized(layout, count)
        offset = 1 if case.order.source >= 0 and not layout.length % case.order.schedule.vector else 0
        desc = case.desc._replace(shape=shape, strides=contiguous_strides(shape), is_aligned=not offset)
        order = torchs_order(case.function, desc, dims, case.device, case.order.source)
        if order is not None and _kind_of(order) == _kind_of(case.order):
            break
    else:
        shape, dims, offset = case.desc.shape, case.dims, 0
    for _ in range(TRIALS):
        yield _draw(shape, offset, case.desc.dtype, case.device, generator), dims


def _resized(layout: Layout, rows: int) -> tuple[Shape, tuple[int, ...]]:
    # As dense as it goes, with other numbers of rows: dimensions as they lie in memory.
    kept = list(layout.kept)
    if kept:
        size, stride = kept[0]
        # What neighbouring rows are read with depends on how many there are.
        kept = [(rows + (size - rows) % 4 if stride == 1 else rows, stride)]
    dims = sorted([(stride, size, True) for size, stride in layout.reduced] + [(s, n, False) for n, s in kept])
    dims.reverse()
    return tuple(size for _, size, _ in dims), tuple(at for at, (_, _, is_reduced) in enumerate(dims) if is_reduced)


def _draw(
    shape: Shape, offset: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> torch.Tensor:
    # Of many magnitudes, so that every change of the order shows.
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    first, second = (
        torch.randn(math.prod(shape) + offset, dtype=wide, device=device, generator=generator) for _ in range(2)
    )
    return (first * torch.exp(second * 2)).to(dtype)[offset:].view(shape)


def _kind_of(order: RowOrder) -> RowOrder:
    # What makes other kernels; how many blocks share a row does not.
    blocks = min(order.schedule.blocks, 2)
    return replace(order, schedule=replace(order.schedule, blocks=blocks), source=min(order.source, 0))
