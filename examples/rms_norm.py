"""Llama's RMSNorm, forward and backward: as torch spells it out, and from functors of our own.

Written with torch's ops it is seven kernels, of which each reads and writes all activations. ``fuser.fuse`` makes as
few of them as it can, for the gradients of the input and the weight too, with the bits of torch's kernels: the sum of
squares of a row is added up in torch's order, and every intermediate result is rounded as torch rounds it.

Made of functors, the sum is in fuser's own order, which depends on the row's length alone: one launch has the bits of
the functors run one by one. Gradients are derived from their text.

Run it with ``python examples/rms_norm.py``. It ends with an error unless torch's version has eager torch's bits in all
three results, and ours those of its parts, with gradients as close to the exact ones as eager torch's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

import fuser

ROWS, LENGTH, EPS = 256, 4096, 1e-6

sum_of_squares = fuser.create_reduction_fn(
    "template <typename T> T add(T a, T b) { return a + b; }",
    identity=0,
    map="template <typename T> T square(T x) { return x * x; }",
)
reciprocal_root = fuser.jit_fn(
    "template <typename T> T reciprocal_root(T total, T count, T eps) { return rsqrt(total / count + eps); }",
    scalars={"count": LENGTH, "eps": EPS},
)
multiply = fuser.jit_fn("template <typename T> T multiply(T x, T y) { return x * y; }")


def as_llama_has_it(x: Tensor, weight: Tensor) -> Tensor:
    """Return the norm of rows (rows, length), computed in float32; the weight (length,) has the dtype of ``x``."""
    wide = x.float()
    variance = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(variance + EPS)).to(x.dtype)


def from_functors(x: Tensor, weight: Tensor) -> Tensor:
    """Return the same, in the order of fuser's reductions."""
    wide = x.float()
    root = reciprocal_root(sum_of_squares(wide, dim=-1, keepdim=True))
    return multiply(multiply(wide, root).to(x.dtype), weight)


def exactly(x: Tensor, weight: Tensor) -> Tensor:
    """Return it as a formula has it, in the dtype of the tensors."""
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def differentiate(norm: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor]:
    """Return the result and the gradients of both tensors."""
    leaves = [item.detach().requires_grad_() for item in (x, weight)]
    made = norm(*leaves)
    return [made.detach(), *torch.autograd.grad(made, leaves, grad)]


def farthest(results: list[Tensor], exact: list[Tensor]) -> list[float]:
    """Return how far each result is from the exact one, at most."""
    return [float((one.double() - other).abs().max()) for one, other in zip(results, exact, strict=True)]


def main() -> int:
    """Compare with eager torch; return the number of what differs."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, grad = (torch.randn(ROWS, LENGTH, device=device).bfloat16() for _ in range(2))
    weight = torch.randn(LENGTH, device=device).bfloat16()
    eager = differentiate(as_llama_has_it, x, weight, grad)
    fused = differentiate(fuser.fuse(as_llama_has_it), x, weight, grad)
    own = differentiate(fuser.fuse(from_functors), x, weight, grad)
    exact = differentiate(exactly, x.double(), weight.double(), grad.double())
    fuser.reset_stats()
    again = fuser.fuse(from_functors)(x, weight)
    launches = fuser.stats()["launches"]
    checks = {
        "torch's ops, result": torch.equal(fused[0], eager[0]),
        "torch's ops, gradient": torch.equal(fused[1], eager[1]),
        "torch's ops, weight": torch.equal(fused[2], eager[2]),
        "functors, result": torch.equal(own[0], from_functors(x, weight)) and torch.equal(again, own[0]),
        "functors, one launch": launches == 1,
        "functors, accuracy": all(map(float.__le__, farthest(own, exact), farthest(eager, exact))),
    }
    for name, holds in checks.items():
        print(f"{name:22}{'holds' if holds else 'DIFFERENT'}")
    return sum(not holds for holds in checks.values())


if __name__ == "__main__":
    sys.exit(main())
