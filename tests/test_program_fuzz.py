"""Random programs of torch's functions under ``fuser.fuse``, with gradients: eager torch's bits for any shapes.

Values are reduced, broadcast again and read by several: what one kernel makes another looks at, in rows of any length.
On the CPU groups run in eager torch, so that every bit counts there, too: what is compared is what was traced.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody uses
from torch import Tensor

import fuser

Random = random.Random

SIZES = (1, 2, 3, 5, 7, 8, 16, 31, 33, 64, 100, 127, 129, 255, 257, 513, 1000, 1023, 2047, 4099)
# Elements of a tensor at most, on the CPU and on a GPU; programs of a test.
MOST = {"cpu": 1 << 12, "cuda": 1 << 20}
PROGRAMS, PARTS = 400, 4

UNARY: list[Callable[[Tensor], Tensor]] = [
    torch.relu, torch.sigmoid, torch.tanh, F.gelu, F.silu, torch.exp, torch.neg, torch.abs, F.softplus, F.hardswish,
    lambda v: v * 1.7, lambda v: v + 0.3, lambda v: v.clamp(-1, 1), lambda v: torch.rsqrt(v.abs() + 1), torch.square,
    lambda v: torch.where(v > 0, v, v * 0.1), lambda v: v.masked_fill(v > 1, 0.0), lambda v: v / 3, F.logsigmoid,
    lambda v: v.clone().mul_(2), lambda v: F.dropout(v, 0.2), lambda v: v + torch.rand_like(v),
]  # fmt: skip
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum, lambda a, b: a / (b.abs() + 1),
    lambda a, b: torch.where(a > b, a, b * 0.5), lambda a, b: torch.addcmul(a, a, b, value=0.5),
]  # fmt: skip
REDUCED: list[Callable[[Tensor, list[int], bool], Tensor]] = [
    lambda v, dims, keeps: v.sum(dims, keepdim=keeps) * 0.1,
    lambda v, dims, keeps: v.mean(dims, keepdim=keeps),
    lambda v, dims, keeps: v.amax(dims, keepdim=keeps),
    lambda v, dims, keeps: torch.linalg.vector_norm(v, dim=dims, keepdim=keeps),
    lambda v, dims, keeps: v.var(dims, correction=0, keepdim=keeps),
    lambda v, dims, keeps: v.logsumexp(dims, keepdim=keeps),
    lambda v, dims, keeps: v.max(dims[0], keepdim=keeps)[0],
]
ALONG: list[Callable[[Tensor, int], Tensor]] = [
    lambda v, dim: v.softmax(dim), lambda v, dim: v.log_softmax(dim), lambda v, dim: F.normalize(v, dim=dim),
    lambda v, dim: v - v.mean(dim, keepdim=True), lambda v, dim: F.layer_norm(v, v.shape[-1:]),
    lambda v, dim: F.rms_norm(v, v.shape[-1:]), lambda v, dim: F.mse_loss(v, v * 0.5) + v, lambda v, dim: v + v.sum(),
]  # fmt: skip
ARRANGED: list[Callable[[Tensor, int], Tensor]] = [
    lambda v, dim: v.transpose(0, -1), lambda v, dim: v.transpose(0, -1).contiguous(), lambda v, dim: v.flatten(),
    lambda v, dim: torch.cat([v, v * 0.5], dim), lambda v, dim: F.pad(v, (1, 2)), lambda v, dim: v.roll(1, dim),
    lambda v, dim: v.narrow(dim, 0, max(1, v.shape[dim] // 2)), lambda v, dim: torch.stack([v, -v], -1),
    lambda v, dim: v.flip(dim), lambda v, dim: v.unsqueeze(dim).expand(*v.shape[:dim], 2, *v.shape[dim:]),
]  # fmt: skip


def step(draw: Random, values: list[Tensor], most: int) -> Tensor | None:
    """Return one more value; None where that would be too large, or nothing fits."""
    v = values[-1] if draw.random() < 0.7 else draw.choice(values)
    kind = draw.random()
    if kind < 0.35 or not v.dim():
        return draw.choice(UNARY)(v)
    if kind < 0.55:
        other = draw.choice(values)
        sizes = zip(reversed(v.shape), reversed(other.shape), strict=False)
        fits = all(a == b or 1 in (a, b) for a, b in sizes)
        return draw.choice(BINARY)(v, other) if fits and v.numel() * other.numel() <= most**1.5 else None
    if kind < 0.75:
        dims = sorted(draw.sample(range(v.dim()), draw.randint(1, v.dim())))
        return draw.choice(REDUCED)(v, dims, draw.random() < 0.8)
    dim = draw.randrange(v.dim())
    return draw.choice(ALONG if kind < 0.9 or v.numel() > most else ARRANGED)(v, dim)


def program(seed: int, most: int) -> Callable[..., Any]:
    """Return a function of some tensors, of which a part is returned."""
    draw = Random(seed)
    steps, several = [draw.randrange(1 << 30) for _ in range(draw.randint(2, 9))], draw.random() < 0.4

    def run(*tensors: Tensor) -> Any:
        values = list(tensors)
        for one in steps:
            made = step(Random(one), values, most)
            values += [] if made is None else [made]
        # What shares memory with an argument would be differentiated node by node.
        return tuple(value * 1 for value in values[-2:]) if several else values[-1] * 1

    return run


def inputs(seed: int, device: str) -> list[Tensor]:
    """Draw tensors that broadcast with each other, some of them permuted."""
    draw, most = Random(seed), MOST[device]
    dtype = draw.choice([torch.float32, torch.bfloat16, torch.float16])
    shape = [draw.choice(SIZES) for _ in range(draw.randint(1, 4))]
    while math.prod(shape) > most:
        shape[draw.randrange(len(shape))] = draw.choice(SIZES[:6])
    needs_grad, made = draw.random() < 0.6, []
    for number in range(draw.randint(1, 3)):
        sizes = [size if number == 0 or draw.random() < 0.6 else 1 for size in shape]
        order = draw.sample(range(len(sizes)), len(sizes)) if draw.random() < 0.2 else [*range(len(sizes))]
        x = torch.randn([sizes[dim] for dim in order], device=device).to(dtype)
        made.append(x.permute([order.index(dim) for dim in range(len(sizes))]).requires_grad_(needs_grad))
    return made


def results(function: Callable[..., Any], given: list[Tensor]) -> list[Tensor]:
    """Return what a function makes, and gradients."""
    torch.manual_seed(7)
    made = function(*given)
    made = [*made] if isinstance(made, tuple) else [made]
    ends = [item for item in made if item.requires_grad]
    if ends:
        # They lie as results do: of others sums may be added up in another order.
        above = [torch.randn_like(item) for item in ends]
        found = torch.autograd.grad(ends, given, above, allow_unused=True)
        made += [item for item in found if item is not None]
    return made


def check(seed: int, device: str) -> None:
    """Compare two calls of a fused program with eager torch."""
    torch.manual_seed(seed)
    function, given = program(seed, MOST[device]), inputs(seed, device)
    wanted, fused = results(function, given), fuser.fuse(function)
    for _ in range(2):
        for number, (item, want) in enumerate(zip(results(fused, given), wanted, strict=True)):
            where = f"seed {seed}, {number} of {len(wanted)}: {[x.shape for x in given]}, {want.dtype}"
            assert (item.dtype, item.shape) == (want.dtype, want.shape), where
            assert torch.equal(item.nan_to_num(), want.nan_to_num()), where


@pytest.fixture
def eager_groups() -> Iterator[None]:
    before = fuser.override_can_fuse_on_cpu(False)
    yield
    fuser.override_can_fuse_on_cpu(before)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_some_programs(eager_groups: None) -> None:
    for seed in range(8):
        check(seed, "cpu")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("part", range(PARTS))
def test_many_programs(eager_groups: None, part: int) -> None:
    for seed in range(100 + part, 100 + PROGRAMS, PARTS):
        check(seed, "cpu")


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("part", range(PARTS))
def test_programs_on_a_gpu(part: int) -> None:
    for seed in range(1000 + part, 1000 + PROGRAMS // 4, PARTS):
        check(seed, "cuda")
