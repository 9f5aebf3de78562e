"""Hand-written Triton kernels of reductions over rows: a program takes a row, all of it at once.

Triton reads annotations of a kernel as it reads its code, where no name of Python's is known: arguments have none.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor
from triton import language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _softmax(y, x, length, block: tl.constexpr):  # noqa: ANN001, ANN202
    at = tl.program_id(0).to(tl.int64) * length
    lanes = tl.arange(0, block)
    row = tl.load(x + at + lanes, mask=lanes < length, other=float("-inf")).to(tl.float32)
    numerator = tl.exp(row - tl.max(row, axis=0))
    tl.store(y + at + lanes, numerator / tl.sum(numerator, axis=0), mask=lanes < length)


@triton.jit  # type: ignore[untyped-decorator]
def _sum(y, x, length, block: tl.constexpr):  # noqa: ANN001, ANN202
    number = tl.program_id(0)
    lanes = tl.arange(0, block)
    row = tl.load(x + number.to(tl.int64) * length + lanes, mask=lanes < length, other=0.0).to(tl.float32)
    tl.store(y + number, tl.sum(row, axis=0))


def softmax(x: Tensor) -> Tensor:
    """Return the softmax of rows."""
    return _launch(_softmax, torch.empty_like(x), x)


def sum(x: Tensor) -> Tensor:  # noqa: A001 - the case's name
    """Return the sums of rows."""
    return _launch(_sum, x.new_empty(x.shape[0]), x)


def _launch(kernel: Any, y: Tensor, x: Tensor) -> Tensor:
    block = triton.next_power_of_2(x.shape[1])
    kernel[(x.shape[0],)](y, x, x.shape[1], block, num_warps=min(max(block // 512, 1), 16))
    return y
