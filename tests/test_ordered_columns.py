"""A norm's gradients from one walk in torch's orders have the bits of those from two: emulated, and on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from cuda_emulation import run_emulated

import fuser
from fuser import planner
from fuser.graph import FusionGroup, GroupBuilder
from fuser.ops import OPS, composite_function

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def norm_gradients(rank: int, length: int, *, has_mean: bool, is_activated: bool = False) -> FusionGroup:
    """Those of a norm, whose input is what gelu makes of one, and of that."""
    builder = GroupBuilder()
    grad, x, *rest = (builder.add_input(name) for name in ["grad", "x", *["mean"] * has_mean, "rstd", "weight"])
    (y,) = builder.apply(OPS["gelu"].function, [x]) if is_activated else (x,)
    name = "native_layer_norm_backward" if has_mean else "_fused_rms_norm_backward"
    mask = (True, True, True)[: 2 + has_mean]
    function = composite_function(name, ((length,), rank, True, has_mean, has_mean, mask))
    dy, *columns = builder.apply(function, [grad, y, *rest, *rest[-1:] * has_mean])
    dx = builder.apply(OPS["gelu_backward"].function, [dy, x])[0] if is_activated else dy
    return builder.build([dx, *columns])


def inputs_of(shape: Sequence[int], dtype: torch.dtype, *, has_mean: bool, device: str = "cpu") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(shape[0])
    x, grad = (torch.randn(*shape, generator=generator) for _ in range(2))
    mean, rstd = x.mean(-1, keepdim=True), 1 / (x.std(-1, keepdim=True) + 1)
    weight = torch.rand(shape[-1], generator=generator).to(dtype)
    return [item.to(device) for item in (grad.to(dtype), x.to(dtype), *[mean] * has_mean, rstd, weight)]


def both(
    group: FusionGroup, inputs: Sequence[Any], monkeypatch: pytest.MonkeyPatch, run: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Results of one walk, and of two."""
    found, find = list[dict[int, int]](), planner.find_ordered_columns
    made = []
    with fuser.config.patch(numerics="strict"):
        for look in (lambda *given: found.append(find(*given)) or found[-1], lambda *_: {}):
            with monkeypatch.context() as patch:
                patch.setattr(planner, "find_ordered_columns", look)
                fuser.config.touch()
                made.append(run(group, inputs))
        fuser.config.touch()
    assert all({*item.values()} == {32} for item in found)
    assert found, "one walk was planned"
    return made[0], made[1]


def check(
    shape: Sequence[int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, *, has_mean: bool, is_activated: bool
) -> None:
    group = norm_gradients(len(shape), shape[-1], has_mean=has_mean, is_activated=is_activated)
    inputs = inputs_of(shape, dtype, has_mean=has_mean)
    for one, other in zip(*both(group, inputs, monkeypatch, run_emulated), strict=True):
        assert torch.equal(one, other)


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("shape", "dtype", "has_mean", "is_activated"),
    [((525, 1024), BF16, True, False), ((2, 131, 1024), F32, False, True)],
    ids=str,
)
def test_emulated(
    shape: tuple[int, ...], dtype: torch.dtype, has_mean: bool, is_activated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(shape, dtype, monkeypatch, has_mean=has_mean, is_activated=is_activated)
