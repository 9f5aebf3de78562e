"""Launches side by side: which kernels of a call go together, and that nobody sees them half done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody uses
from torch import Tensor

import fuser
from fuser.abreast import Kernel, side_by_side
from fuser.compiler import register
from fuser.debug import kernel_sources
from fuser.graph import FusionGroup, GroupBuilder
from fuser.ops import composite_function
from fuser.planner import plan_texts

ROWS, LENGTH = 512, 1024


def gradients() -> FusionGroup:
    """Return the gradients of a layer_norm."""
    form = ((LENGTH,), 2, True, True, True, (True, True, True))
    builder = GroupBuilder()
    given = [builder.add_input(name) for name in ("dy", "x", "mean", "rstd", "weight", "bias")]
    return builder.build(builder.apply(composite_function("native_layer_norm_backward", form), given))


def tensors(dtype: torch.dtype, device: str = "meta") -> list[Tensor]:
    full = [torch.empty(ROWS, LENGTH, dtype=dtype, device=device) for _ in range(2)]
    own = [torch.empty(ROWS, 1, device=device) for _ in range(2)]
    return full + own + [torch.empty(LENGTH, dtype=dtype, device=device) for _ in range(2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_columns_begin_and_rows_go_along(dtype: torch.dtype) -> None:
    columns, rows = (source.text for source in kernel_sources(register(gradients()), tensors(dtype), "cuda"))
    for text, own, other in (
        (columns, "fuser_admit_next();", "fuser_await_former();"),
        (rows, "fuser_await_former();", "fuser_admit_next();"),
    ):
        _, _, kernel = text.partition("__global__")
        assert own in kernel
        assert other not in kernel


def test_what_is_read_is_written_before() -> None:
    """No kernel begins before the one whose results it reads, nor beside one that reads nothing of what it reads."""
    columns, rows = (
        args for _, args in plan_texts(register(gradients()), tensors(torch.float32), torch.device("cuda"))
    )
    rows = replace(rows, tuning=replace(rows.tuning, follows=False))
    columns = replace(columns, tuning=replace(columns.tuning, leads=False))
    apart = [(0, rows.tuning), (1, columns.tuning)]
    assert side_by_side([Kernel(rows, (0, 1), (5,)), Kernel(columns, (0, 5), (6,))]) == apart
    assert side_by_side([Kernel(rows, (0, 1), (5,)), Kernel(columns, (2,), (6,))]) == apart
    assert [slot for slot, _ in side_by_side([Kernel(rows, (0, 1), (5,)), Kernel(columns, (0, 1), (6,))])] == [1, 0]


def gradients_of(function: Callable[..., Tensor], leaves: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    """Return the gradients, read at once; then their memory and the gradient given are written to."""
    kept = grad.clone()
    made = torch.autograd.grad(function(*leaves), leaves, grad)
    grad.fill_(torch.nan)
    found = [item + 0 for item in made]
    for item in made:
        item.zero_()
    grad.copy_(kept)
    return found


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_nobody_sees_it_half_done(dtype: torch.dtype) -> None:
    """What is launched before and after neither changes the gradients nor finds them half done; in a graph, too."""

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, weight.shape, weight, bias)

    torch.manual_seed(0)
    fused = fuser.fuse(norm)
    for rows, length in ((20000, 1024), (4096, 4096), (70, 4096), (3, 768), (1, 64), (9000, 200)):
        x, grad = torch.randn(2, rows, length, device="cuda").to(dtype)
        leaves = [x, *torch.randn(2, length, device="cuda").to(dtype)]
        for item in leaves:
            item.requires_grad_()
        wanted = gradients_of(norm, leaves, grad)
        for turn in range(20):
            made = gradients_of(fused, leaves, grad)
            assert all(map(torch.equal, made, wanted)), (rows, length, turn)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            made = gradients_of(fused, leaves, grad)
        for turn in range(3):
            captured.replay()
            assert all(map(torch.equal, made, wanted)), (rows, length, turn)
