"""What is measured: differentiable chains, each as functors and as torch's own operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import fuser
from benchmarks.chains import random_values

# The scalars of the loss.
RATE, DELTA = 0.5, 1.5

SILU = "template <typename T> T silu(T x) { return x / (T(1) + exp(-x)); }"
MUL = "template <typename T> T mul(T x, T y) { return x * y; }"
GELU = """
template <typename T> T gelu_tanh(T x) {
  T inner = T(0.7978845608028654) * (x + T(0.044715) * x * x * x);
  return T(0.5) * x * (T(1) + tanh(inner));
}"""
DIFFERENCE = "template <typename T> T difference(T x, T target) { return x - target; }"
SCALED = "template <typename T> T scaled(T x, T rate) { return rate * x; }"
PSEUDO_HUBER = """
template <typename T> T pseudo_huber(T x, T delta) {
  T ratio = x / delta;
  return delta * delta * (sqrt(T(1) + ratio * ratio) - T(1));
}"""
LOG_COSH = """
template <typename T> T log_cosh(T x) {
  T size = abs(x);
  return size + log1p(exp(T(-2) * size)) - T(0.6931471805599453);
}"""
FOCAL = """
template <typename T> T focal(T loss, T hardness) {
  T miss = T(1) - exp(-hardness);
  return miss * miss * loss;
}"""
WEIGHTED = "template <typename T> T weighted(T loss, T weight) { return weight * loss; }"

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class TrainingChain:
    """One computation, its gradients, and how exact they have to be."""

    name: str
    title: str
    # Input names, in order.
    names: tuple[str, ...]
    # Those whose gradients are asked for, and those that the formulas of these gradients read.
    wanted: tuple[str, ...]
    read: tuple[str, ...]
    # Makes the computation of functors, to be fused.
    compose: Callable[[], Function]
    # The same in torch's operations.
    compute: Function
    # By dtype, the largest allowed |out - reference| / (1 + |reference|), in units of its eps.
    tolerances_eps: dict[torch.dtype, int]

    def arrays_moved(self) -> dict[str, int]:
        """Return how many arrays each pass must read or write, every one once."""
        forward = len(self.names) + 1
        # The gradient that comes in is read, too.
        backward = len(self.read) + 1 + len(self.wanted)
        return {"forward": forward, "backward": backward, "both": forward + backward}


def compose_swiglu() -> Function:
    """SwiGLU's elementwise part, two functors."""
    silu, mul = fuser.create_jit_fn(SILU), fuser.create_jit_fn(MUL)

    def swiglu(x: Any, y: Any) -> Any:
        return mul(silu(x), y)

    return swiglu


def compute_swiglu(x: Tensor, y: Tensor) -> Tensor:
    """Return SwiGLU's elementwise part."""
    return functional.silu(x) * y


def compose_gelu() -> Function:
    """GELU by tanh, one functor."""
    gelu = fuser.create_jit_fn(GELU)

    def activation(x: Any) -> Any:
        return gelu(x)

    return activation


def compute_gelu(x: Tensor) -> Tensor:
    """Return GELU by tanh."""
    return functional.gelu(x, approximate="tanh")


def compose_loss() -> Function:
    """A focal, weighted regression loss, six functors."""
    difference, scaled = fuser.create_jit_fn(DIFFERENCE), fuser.create_jit_fn(SCALED, rate=RATE)
    pseudo_huber, log_cosh = fuser.create_jit_fn(PSEUDO_HUBER, delta=DELTA), fuser.create_jit_fn(LOG_COSH)
    focal, weighted = fuser.create_jit_fn(FOCAL), fuser.create_jit_fn(WEIGHTED)

    def loss(x: Any, target: Any, weight: Any) -> Any:
        residual = scaled(difference(x, target))
        return weighted(focal(log_cosh(residual), pseudo_huber(residual)), weight)

    return loss


def compute_loss(x: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Return the loss of every element."""
    residual = (x - target) * RATE
    hardness = DELTA**2 * (torch.sqrt(1 + (residual / DELTA) ** 2) - 1)
    size = residual.abs()
    log_cosh = size + torch.log1p(torch.exp(-2 * size)) - math.log(2)
    return (1 - torch.exp(-hardness)) ** 2 * log_cosh * weight


_XY, _X, _LOSS = ("x", "y"), ("x",), ("x", "target", "weight")
CHAINS: dict[str, TrainingChain] = {
    chain.name: chain
    for chain in (
        TrainingChain(
            "swiglu",
            "SwiGLU",
            _XY,
            wanted=_XY,
            read=_XY,
            compose=compose_swiglu,
            compute=compute_swiglu,
            tolerances_eps={torch.bfloat16: 8, torch.float32: 16},
        ),
        TrainingChain(
            "gelu",
            "GELU by tanh",
            _X,
            wanted=_X,
            read=_X,
            compose=compose_gelu,
            compute=compute_gelu,
            tolerances_eps={torch.bfloat16: 4, torch.float32: 32},
        ),
        TrainingChain(
            "loss",
            "a loss of six functors",
            _LOSS,
            wanted=("x", "weight"),
            read=_LOSS,
            compose=compose_loss,
            compute=compute_loss,
            # Torch's own operations round after each of twenty steps.
            tolerances_eps={torch.bfloat16: 16, torch.float32: 32},
        ),
    )
}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class Data:
    """The tensors of one chain: leaves, those of them whose gradients are asked for, and the gradient that comes in."""

    inputs: tuple[Tensor, ...]
    wanted: tuple[Tensor, ...]
    grad: Tensor


def make_data(
    names: tuple[str, ...], wanted: tuple[str, ...], elements: int, dtype: torch.dtype, device: torch.device
) -> Data:
    """Return random tensors, the same ones for every peer."""
    generator = torch.Generator(device).manual_seed(0)
    *values, grad = (random_values((elements,), dtype, device, generator) for _ in range(len(names) + 1))
    for name, value in zip(names, values, strict=True):
        value.requires_grad_(name in wanted)
    inputs = tuple(values)
    return Data(inputs, tuple(value for value in inputs if value.requires_grad), grad)
