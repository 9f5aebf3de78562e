"""What lies along another dimension than the results goes through tiles: read and written once, in whole vectors.

The kernels run on the CPU, each thread as a fiber.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_emulation import run_emulated
from torch.fx.experimental.proxy_tensor import make_fx

from fuser.fx.fusion_node import FusionModule
from fuser.fx.passes import FusionPass

pytestmark = pytest.mark.cpu

DTYPES = [torch.int8, torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow), torch.float64]


def sum_both_ways(x: Any, y: Any) -> Any:
    total = x + y
    return total, total.clone(memory_format=torch.contiguous_format)


def other_way(x: Any, y: Any) -> Any:
    # Only what is written needs a tile.
    total = x * x + x
    return total, total.clone(memory_format=torch.contiguous_format), y


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize(
    "shape", [(3, 70, 33), (65, 130), (64, 128), pytest.param((2, 100, 37), marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", [sum_both_ways, pytest.param(other_way, marks=pytest.mark.slow)])
def test_results_of_two_layouts(function: Any, dtype: torch.dtype, shape: tuple[int, ...], descending: bool) -> None:
    torch.manual_seed(0)
    x, y = ((torch.randn(shape) * 10).to(dtype) for _ in range(2))
    x = x.mT.contiguous().mT
    module = make_fx(function, tracing_mode="fake")(x, y)
    FusionPass(device_type="cuda")(module)
    (group,) = [item.group for item in module.modules() if isinstance(item, FusionModule)]
    given = {"x_1": x, "y_1": y}
    made = run_emulated(group, [given.get(item.name, 1) for item in group.inputs], descending=descending)
    for got, want in zip(made, function(x, y), strict=False):
        assert got.stride() == want.stride()
        assert torch.equal(got, want)
