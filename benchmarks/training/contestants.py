"""Who takes part: the ways to run a chain whose gradients are asked for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fuser
from benchmarks.training.chains import MUL, Function, TrainingChain

MUL_BACKWARD = """
template <typename T> void mul_backward(T x, T y, T grad, T& grad_x, T& grad_y) {
  grad_x = grad * y;
  grad_y = grad * x;
}"""


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to run a chain."""

    label: str
    build: Callable[[TrainingChain], Function]
    # What building and calling happen in.
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    # Whether the work is fuser's: it may not fall back to eager torch.
    is_fuser: bool = False


def compile_with_inductor(function: Function) -> Function:
    """Return the function under ``torch.compile`` with its default backend, for static shapes."""
    # One function after another in one process would count as recompilations of one.
    torch.compiler.reset()
    compiled: Function = torch.compile(function, fullgraph=True, dynamic=False)
    return compiled


CONTESTANTS: dict[str, Contestant] = {
    "eager": Contestant("torch eager", lambda chain: chain.compute),
    "fuser": Contestant("fuser", lambda chain: fuser.fuse(chain.compose()), is_fuser=True),
    "fuser_fast": Contestant(
        'fuser, "fast"',
        lambda chain: fuser.fuse(chain.compose()),
        lambda: fuser.config.patch(numerics="fast"),
        is_fuser=True,
    ),
    "inductor": Contestant("torch.compile", lambda chain: compile_with_inductor(chain.compute)),
}


def build_eager_mul() -> Function:
    """Return ``torch.mul``."""
    return torch.mul


def build_fused_mul() -> Function:
    """Return the functor under ``fuser.fuse``."""
    mul = fuser.create_jit_fn(MUL)

    def product(x: Any, y: Any) -> Any:
        return mul(x, y)

    return fuser.fuse(product)


def build_mul_functor() -> Function:
    """Return the functor alone."""
    return fuser.create_jit_fn(MUL)


def build_hand_written_mul() -> Function:
    """Return what users of jiterator write: an autograd.Function with a functor for each pass."""
    forward_functor = fuser.create_jit_fn(MUL)
    backward_functor = fuser.create_multi_output_jit_fn(MUL_BACKWARD, 2)

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
            ctx.save_for_backward(x, y)
            return forward_functor(x, y)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            return backward_functor(*ctx.saved_tensors, grad)

    apply: Function = Product.apply
    return apply


def build_compiled_mul() -> Function:
    """Return ``torch.mul`` under ``torch.compile``."""
    return compile_with_inductor(lambda x, y: torch.mul(x, y))


@dataclass(frozen=True, slots=True)
class HostContestant:
    """One way to multiply two tensors."""

    label: str
    build: Callable[[], Function]
    is_fuser: bool = False


# The first is the mark.
HOST_CONTESTANTS: dict[str, HostContestant] = {
    "eager_mul": HostContestant("torch.mul", build_eager_mul),
    "fuser": HostContestant("fuser", build_fused_mul, is_fuser=True),
    "fuser_functor": HostContestant("fuser, functor alone", build_mul_functor, is_fuser=True),
    "hand_written": HostContestant("autograd.Function by hand", build_hand_written_mul),
    "inductor": HostContestant("torch.compile", build_compiled_mul),
}
