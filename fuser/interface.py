"""The verbs: register a group, run it, switch fusion off, ask what happened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser import compiler, executor, planner, route
from fuser.config import config
from fuser.errors import ArgumentError, GroupError, describe_type, shows_users_frames
from fuser.graph import FusionGroup
from fuser.kernel_cache import compiled_kernel_count
from fuser.kernel_spec import KernelSpec
from fuser.launcher import Launcher, Replayer
from fuser.tuning.search import TuningReport, tune

__all__ = [
    "autotune",
    "can_fuse_on_cpu",
    "can_fuse_on_gpu",
    "clear_failures",
    "n_compiled_kernels",
    "override_can_fuse_on_cpu",
    "override_can_fuse_on_gpu",
    "register_fusion",
    "run_fusion",
]

# Groups that differ in constants only have different keys and one spec.
_registered: dict[int, tuple[FusionGroup, KernelSpec, Launcher]] = {}


@shows_users_frames
def register_fusion(group: FusionGroup) -> int:
    """Register a group and return its key; groups that differ only in names get the same key.

    Raises:
        GroupError: the group fails lint.
        FunctorError: a functor's text does not parse.
    """
    spec = compiler.register(group)
    _registered.setdefault(group.key, (group, spec, Replayer((), ())))
    return group.key


@shows_users_frames
def run_fusion(key: int, inputs: Sequence[Any]) -> list[torch.Tensor]:
    """Run a registered group.

    Args:
        key: what register_fusion returned.
        inputs: one tensor or Python number per input of the group; constants of the traced function, which come
            last, may be left out.

    Returns:
        The group's outputs.

    Raises:
        GroupError: the key is unknown.
        ArgumentError, ShapeError, DeviceError: the inputs do not fit.
        CompileError: a functor does not compile.
    """
    if key not in _registered:
        raise GroupError(f"no fusion group is registered under key {key!r}")
    group, spec, launcher = _registered[key]
    filled = tuple(group.fill_inputs(inputs))
    value = route.call(spec, launcher, filled)
    return [value] if isinstance(value, torch.Tensor) else list(value)


@shows_users_frames
def autotune(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> TuningReport:
    """Find the fastest block size, vectors in flight and tile shape for the CUDA kernels of one call.

    The winners are used from now on for all calls of the same layout class, and kept on disk. They change no result.

    Args:
        fn: what launches the kernels: a fused function, a functor, or any function that calls them.
        *args: its arguments, which it is called with many times.
        **kwargs: its keyword arguments.

    Returns:
        What was tried and how long the call took with it; prints as a table. Empty, with a reason, where there is
        nothing to tune: on CPU tensors, for instance.

    Raises:
        As ``fn``.
    """
    if not callable(fn):
        raise ArgumentError(f"autotune takes what launches kernels, such as a fused function; got {describe_type(fn)}")
    return tune(lambda: fn(*args, **kwargs))


def can_fuse_on_cpu() -> bool:
    """Whether groups on CPU tensors are fused: not switched off, and there is a C++ compiler. Else they run eagerly."""
    return planner.can_fuse("cpu") and compiler.has_host_compiler()


def can_fuse_on_gpu() -> bool:
    """Whether groups on CUDA tensors are fused; if not, they run in eager torch."""
    return planner.can_fuse("cuda")


@shows_users_frames
def override_can_fuse_on_cpu(value: bool) -> bool:
    """Switch fusion on CPU tensors on or off; return the former value."""
    return _switch("cpu", value)


@shows_users_frames
def override_can_fuse_on_gpu(value: bool) -> bool:
    """Switch fusion on CUDA tensors on or off; return the former value."""
    return _switch("cuda", value)


def _switch(device_type: str, value: bool) -> bool:
    # A text such as "no" would switch it on.
    if not isinstance(value, bool):
        raise ArgumentError(f"fusion is switched by a bool, got {describe_type(value)}")
    return executor.set_can_fuse(device_type, value)


def clear_failures() -> None:
    """Forget what failed: the next call compiles again what did not compile, and looks again why a group is not fused.

    Remembered is what a compiler says of a text, that it took too long, and what does not change, such as that a dtype
    has no kernel. A compiler that was killed, say, is tried again in the next call anyway.
    """
    compiler.clear_failures()
    # Plans and records, too.
    config.touch()


def n_compiled_kernels() -> int:
    """Return how many kernels were compiled, or loaded from disk, in this process."""
    return compiled_kernel_count()
