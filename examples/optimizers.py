"""Optimizers as one function of one parameter: AdamW, AdamW with bfloat16 moments, and Lion, in a few launches a step.

Each optimizer is written once, for a parameter of any shape, and ``fuser.foreach`` applies it to the lists of all
parameters, gradients and moments, in place. Scalars that change from step to step are run-time arguments.

- ``adamw`` has the operations of ``torch.optim.AdamW(foreach=False, fused=False)`` one by one, so that on CUDA its
  parameters and moments are torch's, bit for bit. (On the CPU torch multiplies in another order than on CUDA, which
  fuser follows: there the two differ in last bits.) torch's fused and foreach AdamW have other operations.
- ``adamw_bfloat16`` keeps both moments in bfloat16, in half of the memory; it computes in float32.
- ``lion`` is a functor of its own: X. Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023). Its sums are
  written with ``fma``, so that no compiler has a choice: CPU and GPU have the same bits.

Run it with ``python examples/optimizers.py``. It trains a small network with each, and ends with an error unless AdamW
follows torch's, and all of them learn.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

import fuser

# --- one step of one parameter --------------------------------------------------------------------


@fuser.fuse
def adamw(
    param: Tensor, grad: Tensor, mean: Tensor, square: Tensor,
    keep: float, rate1: float, beta2: float, rate2: float, root: float, eps: float, step_size: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the parameter and its moments after a step; numbers as ``AdamW.step`` makes them."""
    mean = mean.lerp(grad, rate1)
    square = (square * beta2).addcmul(grad, grad, value=rate2)
    denominator = square.sqrt() / root + eps
    return (param * keep).addcdiv(mean, denominator, value=step_size), mean, square


# Of a tensor that may have the dtype already, ``to`` would not make a new one.
to_bfloat16 = fuser.jit_fn("template <typename T> T to_bfloat16(T x) { return x; }", out_dtypes=torch.bfloat16)


@fuser.fuse
def adamw_bfloat16(
    param: Tensor, grad: Tensor, mean: Tensor, square: Tensor,
    keep: float, rate1: float, beta2: float, rate2: float, root: float, eps: float, step_size: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The same with moments in bfloat16."""
    wide_mean = mean.float().lerp(grad, rate1)
    wide_square = (square.float() * beta2).addcmul(grad, grad, value=rate2)
    denominator = wide_square.sqrt() / root + eps
    new = (param * keep).addcdiv(wide_mean, denominator, value=step_size)
    return new, to_bfloat16(wide_mean), to_bfloat16(wide_square)


lion = fuser.jit_fn(
    """
template <typename T>
void lion(T param, T grad, T mean, float lr, float keep, float rate1, float rate2, T& new_param, T& new_mean) {
  const T direction = fma(rate1, grad - mean, mean);
  const T sign = direction > T(0) ? T(1) : direction < T(0) ? T(-1) : T(0);
  new_param = fma(-lr, sign, param * keep);
  new_mean = fma(rate2, grad - mean, mean);
}""",
    num_outputs=2,
    scalars=["lr", "keep", "rate1", "rate2"],
)

# --- all parameters -------------------------------------------------------------------------------


class AdamW:
    """``torch.optim.AdamW`` for one group of parameters, all of which have a gradient in each step."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        moments: torch.dtype | None = None,
    ) -> None:
        self.params = list(params)
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.means = [torch.zeros_like(item, dtype=moments) for item in self.params]
        self.squares = [torch.zeros_like(item, dtype=moments) for item in self.params]
        self.function = adamw_bfloat16 if moments is torch.bfloat16 else adamw
        self.steps = 0

    @torch.no_grad()
    def step(self) -> None:
        """Update parameters and moments in place."""
        self.steps += 1
        beta1, beta2 = self.betas
        correction1, correction2 = 1 - beta1**self.steps, 1 - beta2**self.steps
        fuser.foreach(
            self.function,
            self.params,
            [item.grad for item in self.params],
            self.means,
            self.squares,
            out=(self.params, self.means, self.squares),
            keep=1 - self.lr * self.weight_decay,
            rate1=1 - beta1,
            beta2=beta2,
            rate2=1 - beta2,
            root=correction2**0.5,
            eps=self.eps,
            step_size=-(self.lr / correction1),
        )


class Lion:
    """Lion for one group of parameters, all of which have a gradient in each step."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0,
    ) -> None:
        self.params = list(params)
        self.lr, self.betas, self.weight_decay = lr, betas, weight_decay
        self.means = [torch.zeros_like(item) for item in self.params]

    @torch.no_grad()
    def step(self) -> None:
        """Update parameters and moments in place."""
        fuser.foreach(
            lion,
            self.params,
            [item.grad for item in self.params],
            self.means,
            out=(self.params, self.means),
            lr=self.lr,
            keep=1 - self.lr * self.weight_decay,
            rate1=1 - self.betas[0],
            rate2=1 - self.betas[1],
        )


STEPS = 120

# --- the network ----------------------------------------------------------------------------------


def train(
    make: Callable[[list[Tensor]], AdamW | Lion | torch.optim.Optimizer], device: torch.device, steps: int = STEPS
) -> tuple[list[Tensor], float, float]:
    """Train a network to add its inputs; return its parameters, and the first and the last loss."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
    params = list(network.parameters())
    optimizer = make(params)
    inputs = torch.randn(512, 8, device=device)
    losses = []
    for _ in range(steps):
        network.zero_grad()
        loss = nn.functional.mse_loss(network(inputs), inputs.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return params, float(losses[0]), float(losses[-1])


def main() -> int:
    """Train with each optimizer, compare and print; return the exit code."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    passed = True
    wanted, *_ = train(lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=False, fused=False), device)
    for name, make in {
        "AdamW": lambda params: AdamW(params, lr=1e-2),
        "AdamW, bfloat16 moments": lambda params: AdamW(params, lr=1e-2, moments=torch.bfloat16),
        "Lion": lambda params: Lion(params, lr=1e-3),
    }.items():
        fuser.reset_stats()
        params, first, last = train(make, device)
        stats = fuser.stats()
        print(f"{name:24} loss {first:.4f} -> {last:.4f}, {stats['launches'] / STEPS:g} launches a step")
        passed = passed and last < first / 20 and not stats["fallbacks"]
        if name == "AdamW":
            apart = max(
                float(((own - item).norm() / item.norm()).detach()) for own, item in zip(params, wanted, strict=True)
            )
            print(f"{'':24} differs from torch's by {apart:.1e}")
            passed = passed and apart <= (0 if device.type == "cuda" else 1e-3)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
