"""The peers inside torch: eager, jiterator, and Inductor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from benchmarks.chains import ALPHA, CPP_OPS, FUNCTORS, TORCH_OPS, Chain, Ops, print_expression
from benchmarks.peers.base import Peer, Unsupported


class Eager(Peer):
    """Torch's own operations, one kernel each."""

    name = "eager"
    label = "torch eager"

    @override
    def build(self, chain: Chain, inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
        if chain.dtype.itemsize == 1 and chain.dtype.is_floating_point:
            raise Unsupported("torch has no float8 arithmetic")
        return partial(chain.compose(TORCH_OPS), *inputs)


class Inductor(Peer):
    """The same operations under ``torch.compile``."""

    name = "inductor"
    label = "torch.compile"

    @override
    def build(self, chain: Chain, inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
        # One chain after another in one process would count as recompilations of one function.
        torch.compiler.reset()
        return partial(torch.compile(chain.compose(TORCH_OPS), fullgraph=True, dynamic=False), *inputs)


class Jiterator(Peer):
    """The functors under ``torch.cuda.jiterator``, one launch each."""

    name = "jiterator"
    label = "jiterator, one by one"
    devices = ("cuda",)

    @override
    def build(self, chain: Chain, inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
        return partial(chain.compose(make_jiterator_ops()), *inputs)


class JiteratorMerged(Peer):
    """The chain written by hand as one functor, under ``torch.cuda.jiterator``."""

    name = "jiterator_merged"
    label = "jiterator, one functor"
    devices = ("cuda",)

    @override
    def build(self, chain: Chain, inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
        parameters = ", ".join(f"T {name}" for name in chain.names)
        body = print_expression(chain, CPP_OPS)
        code = f"template <typename T> T merged({parameters}) {{ return {body}; }}"
        return partial(torch.cuda.jiterator._create_jit_fn(code), *inputs)


def make_jiterator_ops() -> Ops:
    """Return the functors as jiterator callables."""
    create = torch.cuda.jiterator._create_jit_fn
    others = {name: create(code) for name, code in FUNCTORS.items() if name != "axpy"}
    return Ops(axpy=create(FUNCTORS["axpy"], alpha=ALPHA), **others)
