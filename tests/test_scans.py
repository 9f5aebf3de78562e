"""Running totals: torch.cumsum in groups, with torch's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_emulation import run_emulated

import fuser
from fuser.cuda.aten_orders import scan_chunk
from fuser.graph import FusionGroup, GroupBuilder
from fuser.ops import reduction_function, table


def scan(dim: int = -1, numerics: str = "strict") -> FusionGroup:
    """Return ``relu(cumsum(x * y, dim) - y)`` and the totals."""
    builder = GroupBuilder(numerics)
    x, y = builder.add_input("x"), builder.add_input("y")
    (product,) = builder.apply(table.OPS["mul"].function, [x, y])
    (total,) = builder.apply(reduction_function("cumsum", (dim,)), [product])
    (less,) = builder.apply(table.OPS["minimum"].function, [total, y])
    return builder.build([less, total])


def aten_scan(x: torch.Tensor) -> torch.Tensor:
    """The order of ATen's CUDA kernel along the last dimension (ScanUtils.cuh), one addition of tensors at a time."""
    rows, length = x.shape
    chunk = scan_chunk(length, rows)
    padded = torch.nn.functional.pad(x, (0, -length % chunk)).view(rows, -1, chunk)
    total = torch.zeros_like(x[:, 0])
    for number in range(padded.shape[1]):
        part = padded[:, number]
        part[:, 0] += total
        half = 1
        while half < chunk:
            runs = part.view(rows, -1, 2, half)
            runs[:, :, 1] += runs[:, :, 0, -1:].clone()
            half *= 2
        total = part[:, -1]
    return padded.reshape(rows, -1)[:, :length]


def draw(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(shape) * torch.exp(2 * torch.randn(shape))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(3, 5000), (40, 100), (600, 7)])
def test_cuda_loops_keep_atens_order(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, y = draw(shape, dtype), draw((shape[1],), dtype)
    for descending in (False, True):
        less, total = run_emulated(scan(), [x, y], descending=descending)
        assert torch.equal(total, aten_scan(x * y))
        assert torch.equal(less, torch.minimum(total, y))
