"""A call of a group as calls of groups that it is cut into: around what has no kernel, or by device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from fuser.compiler import register
from fuser.fallback import each_its_own
from fuser.graph import Section
from fuser.kernel_spec import KernelSpec, infer_layouts
from fuser.outputs import unusual_kind
from fuser.sections import cut_around, cut_by_device
from fuser.tensor_desc import describe, value_layouts

__all__ = ["cut_around_obstacle", "needs_devices", "run_around", "run_bound", "run_by_device"]

# What makes a call of one of the groups that a group is cut into.
RunPart: TypeAlias = Callable[[KernelSpec, list[Any]], Sequence[torch.Tensor]]
# Those groups, with the values that each reads and makes, and those that nobody reads after it.
Parts: TypeAlias = tuple[tuple[KernelSpec, tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...]
# The same with what makes a call in place of each group.
BoundParts: TypeAlias = Sequence[
    tuple[Callable[[list[Any]], Sequence[torch.Tensor]], tuple[int, ...], tuple[int, ...], tuple[int, ...]]
]
_parts: dict[tuple[int, int], Parts] = {}
_parts_by_device: dict[tuple[int, tuple[torch.device | None, ...], tuple[bool, ...]], Parts] = {}


def run_around(spec: KernelSpec, obstacle: int, inputs: Sequence[Any], run: RunPart) -> list[torch.Tensor]:
    """Run a group in which one application has no kernel: cut around it, so that all others keep theirs.

    Args:
        spec: a registered group's spec.
        obstacle: the application.
        inputs: one tensor or number per input of the group.
        run: makes a call of each of the groups that it is cut into.
    """
    return run_bound(spec, _bind_parts(cut_around_obstacle(spec, obstacle), run), inputs)


def run_by_device(spec: KernelSpec, inputs: Sequence[Any], run: RunPart) -> list[torch.Tensor] | None:
    """Run a group in parts if its inputs are on several devices, and one device is not enough; else return None.

    Args:
        spec: a registered group's spec.
        inputs: one tensor or number per input of the group.
        run: makes a call of each of the groups that it is cut into.

    Raises:
        ShapeError, DimError: the inputs do not fit.
    """
    parts = _cut_by_device(spec, inputs)
    return run_bound(spec, _bind_parts(parts, run), inputs) if parts else None


def needs_devices(spec: KernelSpec, inputs: Sequence[Any]) -> bool:
    """Whether a call runs in parts, see ``run_by_device``."""
    return bool(_cut_by_device(spec, inputs))


def _cut_by_device(spec: KernelSpec, inputs: Sequence[Any]) -> Parts:
    devices = tuple(item.device if isinstance(item, torch.Tensor) else None for item in inputs)
    is_one = len(spec.group.applications) == 1 or len({*devices} - {None}) < 2
    if is_one or any(isinstance(item, torch.Tensor) and unusual_kind(item) for item in inputs):
        return ()
    layouts = infer_layouts(spec.group, value_layouts([describe(item) for item in inputs]))
    # What decides it beside devices is which values have no dimensions.
    key = spec.key, devices, tuple(not item.shape for item in layouts)
    if key not in _parts_by_device:
        _parts_by_device[key] = _register_parts(spec, cut_by_device(spec.group, layouts, devices))
    return _parts_by_device[key]


def _bind_parts(parts: Parts, run: RunPart) -> BoundParts:
    return [(partial(run, part), read, made, ended) for part, read, made, ended in parts]


def run_bound(spec: KernelSpec, parts: BoundParts, inputs: Sequence[Any]) -> list[torch.Tensor]:
    """Run a group as the parts that it is cut into."""
    values = dict(enumerate(inputs))
    for run, read, made, ended in parts:
        values |= zip(made, run([values[value] for value in read]), strict=True)
        for value in ended:
            del values[value]
    return each_its_own([values[value] for value in spec.group.outputs])


def cut_around_obstacle(spec: KernelSpec, obstacle: int) -> Parts:
    """Return what ``run_around`` runs, worked out once."""
    parts = _parts.get((spec.key, obstacle))
    if parts is None:
        made = _register_parts(spec, [*cut_around(spec.group, obstacle)])
        parts = _parts.setdefault((spec.key, obstacle), made)
    return parts


def _register_parts(spec: KernelSpec, sections: Sequence[Section]) -> Parts:
    # At the last part that has a value it is let go, unless it is a result.
    last = {value: slot for slot, item in enumerate(sections) for value in (*item.inputs, *item.outputs)}
    ended: list[list[int]] = [[] for _ in sections]
    for value in last.keys() - {*spec.group.outputs}:
        ended[last[value]].append(value)
    return tuple(
        (register(item.group), item.inputs, item.outputs, tuple(own)) for item, own in zip(sections, ended, strict=True)
    )
