"""What a call would launch: it runs on fake tensors, autograd included, and each group that comes by is noted down."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import disable_autocast_cache
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import _disable_current_modes

from fuser.errors import ArgumentError, CompileError, UnsupportedError
from fuser.in_parts import run_around
from fuser.kernel_spec import KernelSpec
from fuser.library import run_fake
from fuser.planner import find_texts
from fuser.tensor_desc import describe, names_of
from fuser.warming.cover import Bounds, SizedCall, number_of, with_sizes

__all__ = ["Follower", "alone", "current", "following", "keeping_nothing", "packing_nothing", "stand_in"]


class Follower:
    """Notes down which groups are called with what.

    Args:
        bounds: of each symbol, the sizes that it may have.
        sizes: of each symbol, that in the call which is followed; None: as the symbols have it.
    """

    def __init__(self, bounds: Bounds, sizes: Mapping[Any, int] | None = None) -> None:
        self.bounds = bounds
        self.sizes = sizes
        self.calls: list[SizedCall] = []

    def run_into(self, spec: KernelSpec, inputs: Sequence[Any], out: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what is given for a group's results; as they come where that would be resized."""
        self.run(spec, inputs, out)
        # Where a kernel cannot write to it, new tensors are written to, and copied.
        made = self.run(spec, inputs)
        if len(made) != len(out):
            raise ArgumentError(f"{names_of(spec.group)}: out= has {len(out)} tensors for {len(made)} outputs")
        return [own if own.shape == item.shape else item.to(own.dtype) for own, item in zip(out, made, strict=True)]

    def run(self, spec: KernelSpec, inputs: Sequence[Any], out: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
        """Return empty results of a group, whose kernels write to memory like that of ``out``."""
        written = tuple(map(describe, out))
        call = SizedCall(spec, tuple(describe(item) for item in inputs), self.bounds, out=written)
        if not self.bounds.keys() >= {*call.symbols()}:
            # Sizes that depend on elements are known to the call that brings them, which compiles for them.
            return run_fake(spec, list(inputs))
        try:
            find_texts(spec, *([with_sizes(item, self.sizes) for item in items] for items in (call.inputs, written)))
        except UnsupportedError as error:
            call = call._replace(obstacle=error.application)
            if error.application >= 0 and len(spec.group.applications) > 1:
                self.calls.append(call)
                return run_around(spec, error.application, inputs, self.run)
        except CompileError:
            # It is raised when all that was noted down is compiled.
            call = call._replace(obstacle=-1)
        self.calls.append(call)
        return run_fake(spec, list(inputs))


class _Following(threading.local):
    follower: Follower | None = None


_thread = _Following()


def current() -> Follower | None:
    """Return who follows what this thread calls."""
    return _thread.follower


@contextmanager
def following(follower: Follower | None) -> Iterator[None]:
    """Let somebody follow what this thread calls inside, or nobody."""
    before, _thread.follower = _thread.follower, follower
    try:
        yield
    finally:
        _thread.follower = before


@contextmanager
def alone() -> Iterator[None]:
    """Let nobody follow what this thread calls inside, on real tensors."""
    with following(None), _disable_current_modes():
        yield


@contextmanager
def keeping_nothing() -> Iterator[None]:
    """Let torch's caches give nothing to what runs inside on tensors that are none, and keep nothing of it.

    Those of ``torch.autocast`` and ``torch.nn.utils.parametrize.cached``: what a weight became here would be the
    weight, for all, in the rest of the block that they are for. Nor do hooks of saved tensors get any.
    """
    parametrize._cache.clear()
    try:
        with disable_autocast_cache(), packing_nothing():
            yield
    finally:
        parametrize._cache.clear()


@contextmanager
def packing_nothing() -> Iterator[None]:
    """Give what is saved for backward passes inside to no hooks around.

    An activation checkpoint counts what it is given, and its recomputation traces nothing again.
    """
    # Where there are none, torch.func's transforms may forbid them.
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
        yield
        return
    with saved_tensors_hooks(_itself, _itself):
        yield


def _itself(item: Any) -> Any:
    return item


def stand_in(item: Any) -> Any:
    """Return an empty tensor, as a tensor whose sizes may be symbols would be in the call that is followed.

    It is a real one inside ``alone``. Of a number that is a symbol: that of the call.

    Raises:
        UnknownNumberError: it depends on elements.
    """
    if isinstance(item, torch.SymInt | torch.SymFloat):
        return number_of(item)
    if not isinstance(item, torch.Tensor):
        return item
    desc = with_sizes(describe(item))
    made = torch.empty_strided(desc.shape, desc.strides, dtype=item.dtype, device=item.device)
    return made.requires_grad_(item.requires_grad)
