"""Plans for later processes, as AOTAutograd's cache keeps them beside the graph that makes the calls.

A kernel is kept by the key under which the cache of kernels has its machine code.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, NamedTuple

import torch

from fuser.compiler import reload_kernel
from fuser.disk_cache import CacheKey
from fuser.kernel_source import KernelSource
from fuser.plan import Plan, Step
from fuser.tensor_desc import TensorDesc

__all__ = ["KeptPlan", "keep_plan", "restore_plan"]


class KeptPlan(NamedTuple):
    """The plan of one kind of call of a group."""

    # The group's.
    text: str
    inputs: tuple[TensorDesc, ...]
    # The ``out=`` tensors, if there are any.
    out: tuple[TensorDesc, ...]
    default_dtype: torch.dtype
    payload: bytes


def keep_plan(plan: Plan) -> bytes:
    """Return a plan as bytes."""
    written = io.BytesIO()
    _Pickler(written).dump(plan._replace(eager=None))
    return written.getvalue()


def restore_plan(payload: bytes) -> Plan:
    """Return the plan that ``keep_plan`` made bytes of; its kernels are loaded.

    Raises:
        As ``reload_kernel``.
    """
    plan: Plan = pickle.loads(payload)
    return plan


class _Pickler(pickle.Pickler):
    def reducer_override(self, item: Any) -> Any:
        if not isinstance(item, Step):
            return NotImplemented
        arguments = (item.launch, item.packer, item.outputs, item.inputs, item.numbers, item.name, item.device_index)
        return _restore_step, (item.kernel.source._replace(text=""), item.kernel.key, *arguments)


def _restore_step(source: KernelSource, key: CacheKey, *arguments: Any) -> Step:
    return Step(reload_kernel(source, key), *arguments)
