"""Fuser itself: chained, chained without the promise of equal bits, and one functor at a time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor
from typing_extensions import override

import fuser
from benchmarks.chains import ALPHA, FUNCTORS, Chain, Ops
from benchmarks.peers.base import Absent, Peer, Unsupported


class Fuser(Peer):
    """The functors chained by ``fuser.fuse``."""

    name = "fuser"
    label = "fuser"

    @override
    def load(self) -> None:
        can_fuse = fuser.can_fuse_on_gpu() if self.device.type == "cuda" else fuser.can_fuse_on_cpu()
        if not can_fuse:
            raise Absent(f"fuser is switched off for {self.device.type}")

    @override
    def build(self, chain: Chain, inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
        run = partial(self.make_call(chain), *inputs)
        try:
            run()
        except fuser.errors.CompilerNotFoundError as error:
            raise Unsupported(str(error)) from error
        return run

    def make_call(self, chain: Chain) -> Callable[..., Any]:
        """Return the chain as a function of its inputs."""
        return fuser.fuse(chain.compose(make_functor_ops()))


class FuserFast(Fuser):
    """The same with ``fuser.config.numerics = "fast"``."""

    name = "fuser_fast"
    label = 'fuser, "fast"'

    @override
    def scope(self) -> AbstractContextManager[Any]:
        return fuser.config.patch(numerics="fast")


class FuserOut(Fuser):
    """The same, written to memory that is already there."""

    name = "fuser_out"
    label = "fuser, out="

    @override
    def build(self, chain: Chain, inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
        call = super().build(chain, inputs)
        return partial(call, out=call())


class FuserPrecise(Fuser):
    """The same with ``fuser.config.cpu_math = "precise"``."""

    name = "fuser_precise"
    label = "fuser, precise"
    devices = ("cpu",)

    @override
    def scope(self) -> AbstractContextManager[Any]:
        return fuser.config.patch(cpu_math="precise")


class FuserUnfused(Fuser):
    """The functors, one launch each."""

    name = "fuser_unfused"
    label = "fuser, one by one"

    @override
    def make_call(self, chain: Chain) -> Callable[..., Any]:
        return chain.compose(make_functor_ops())


def make_functor_ops() -> Ops:
    """Return the functors as fuser's callables."""
    others = {name: fuser.create_jit_fn(code) for name, code in FUNCTORS.items() if name != "axpy"}
    return Ops(axpy=fuser.create_jit_fn(FUNCTORS["axpy"], alpha=ALPHA), **others)
