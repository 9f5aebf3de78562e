"""The verbs: register a group, run it, switch fusion off, ask what happened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fuser import compiler, executor, planner
from fuser.errors import GroupError
from fuser.graph import FusionGroup
from fuser.kernel_cache import compiled_kernel_count
from fuser.kernel_spec import KernelSpec

__all__ = [
    "can_fuse_on_cpu",
    "can_fuse_on_gpu",
    "n_compiled_kernels",
    "override_can_fuse_on_cpu",
    "override_can_fuse_on_gpu",
    "register_fusion",
    "run_fusion",
]

# Groups that differ in constants only have different keys and one spec.
_registered: dict[int, tuple[FusionGroup, KernelSpec]] = {}


def register_fusion(group: FusionGroup) -> int:
    """Register a group and return its key; groups that differ only in names get the same key.

    Raises:
        GroupError: the group fails lint.
        FunctorError: a functor's text does not parse.
    """
    spec = compiler.register(group)
    _registered[group.key] = (group, spec)
    return group.key


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
        raise GroupError(f"no fusion group is registered under key {key}")
    group, spec = _registered[key]
    return executor.run(spec, group.fill_inputs(inputs))


def can_fuse_on_cpu() -> bool:
    """Whether groups on CPU tensors are fused: not switched off, and there is a C++ compiler. Else they run eagerly."""
    return planner.can_fuse("cpu") and compiler.has_host_compiler()


def can_fuse_on_gpu() -> bool:
    """Whether groups on CUDA tensors are fused; if not, they run in eager torch."""
    return planner.can_fuse("cuda")


def override_can_fuse_on_cpu(value: bool) -> bool:
    """Switch fusion on CPU tensors on or off; return the former value."""
    return executor.set_can_fuse("cpu", value)


def override_can_fuse_on_gpu(value: bool) -> bool:
    """Switch fusion on CUDA tensors on or off; return the former value."""
    return executor.set_can_fuse("cuda", value)


def n_compiled_kernels() -> int:
    """Return how many kernels were compiled, or loaded from disk, in this process."""
    return compiled_kernel_count()
