"""``torch.ops.fuser.run`` on DTensors: each rank computes its shards, as of torch's own pointwise ops.

Imported with the first import of DTensor, which takes long.

One dimension of the mesh after the other, all tensors are brought to

- the same shards, where one of them is sharded: of those that agree with most of the data; a tensor that is broadcast
  along the sharded dimension is whole on every rank;
- partial sums, where some are partial sums and the group is linear in them (``fuser.linear``), or in all its tensors;
- copies otherwise, and where users' reductions are.

An application that is not linear in a partial sum is run by itself, so that what comes before it still computes with
partial sums. So is an op of torch's that gives other dimensions than its tensors have, as a sum: torch knows where.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from fuser import library
from fuser.autodiff import pull_back as _pull_back  # noqa: F401 - defines an operator
from fuser.compiler import registered
from fuser.config import config
from fuser.dtypes import is_continuous
from fuser.errors import DeviceError, ShapeError
from fuser.fallback import Fallback
from fuser.in_parts import run_around
from fuser.kernel_cache import Lru
from fuser.kernel_spec import KernelSpec, infer_layouts
from fuser.launcher import Replayer
from fuser.layout import Shape, broadcast_shapes
from fuser.linear import follow_sums
from fuser.route import run_below
from fuser.tensor_desc import TensorDesc, describe, value_layouts

__all__ = ["run_copies", "run_shards"]


def run_shards(_: Any, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any = None) -> list[Any]:
    """Run a group of which some tensors are DTensors; the others have one element or count as copies.

    Raises:
        RuntimeError: as torch, for other plain tensors and for tensors on several meshes.
    """
    del func, types, kwargs
    with torch.no_grad():
        return _run(registered(args[0]), library.merge_inputs(*args[1:]))


def run_copies(_: Any, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any = None) -> list[Any]:
    """Run an operator of fuser's on copies, on each rank the same."""
    del types
    tensors = [item for arg in args if isinstance(arg, list) for item in arg if isinstance(item, DTensor)]
    mesh = _common_mesh(tensors)
    whole = [Replicate()] * mesh.ndim

    def localise(item: Any) -> Any:
        if isinstance(item, list):
            return [localise(part) for part in item]
        return _redistribute(item, whole) if isinstance(item, DTensor) else item

    with torch.no_grad():
        results = func(*map(localise, args), **(kwargs or {}))
        return [DTensor.from_local(item, mesh, whole, run_check=False) for item in results]


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a call is shared among the ranks."""

    # What each tensor is brought to.
    inputs: dict[int, tuple[Placement, ...]]
    # Placements, global shape and strides of each output.
    outputs: tuple[tuple[tuple[Placement, ...], torch.Size, tuple[int, ...]], ...]
    # The application to cut the group around instead, which torch runs where it is the only one; -1: none.
    obstacle: int = -1
    launcher: Replayer = field(default_factory=lambda: Replayer((), ()))


# By group and descriptions of the inputs.
_shardings: Lru[Sharding] = Lru()


def _run(spec: KernelSpec, inputs: list[Any]) -> list[Any]:
    mesh = _common_mesh([item for item in inputs if isinstance(item, DTensor)])
    for slot, item in enumerate(inputs):
        # As torch: one of one element is the same on every rank, and so are all where the user says so.
        if isinstance(item, torch.Tensor) and not isinstance(item, DTensor) and item.numel() != 1:
            _check_implicit_replication()
            inputs[slot] = DTensor.from_local(item, mesh, [Replicate()] * mesh.ndim, run_check=False)
    tensors = {slot: item for slot, item in enumerate(inputs) if isinstance(item, DTensor)}
    described = tuple(map(describe, inputs))
    key = (spec.key, mesh, described, tuple((slot, item.placements) for slot, item in tensors.items()))
    try:
        sharding = _shardings.get(key)
    except TypeError:
        # Sizes that are symbols have no hash.
        sharding = _share(spec, tensors, described)
    if sharding is None:
        sharding = _share(spec, tensors, described)
        _shardings.put(key, sharding, config.max_plans)
    if sharding.obstacle >= 0 and len(spec.group.applications) == 1:
        return Fallback(spec.group).run(inputs, "DTensors")
    if sharding.obstacle >= 0:
        return run_around(spec, sharding.obstacle, inputs, library.call_operator)
    for slot, item in tensors.items():
        inputs[slot] = _bring(item, sharding.inputs[slot])
    results = run_below(spec, sharding.launcher, tuple(inputs))
    return [
        DTensor.from_local(result, mesh, placements, run_check=False, shape=shape, stride=strides)
        for result, (placements, shape, strides) in zip(results, sharding.outputs, strict=True)
    ]


def _share(spec: KernelSpec, tensors: Mapping[int, DTensor], described: Sequence[TensorDesc]) -> Sharding:
    layouts = infer_layouts(spec.group, value_layouts(described))
    made = [layouts[value] for value in spec.group.outputs]
    dtypes = [item.dtype for item in described if item.dtype is not None]
    are_real = all(is_continuous(dtype) for dtype in dtypes)
    chosen = []
    mesh = next(iter(tensors.values())).device_mesh
    for dim in range(mesh.ndim):
        shapes = {slot: described[slot].shape for slot in tensors}
        placements = {slot: item.placements[dim] for slot, item in tensors.items()}
        choice = _choose(spec, placements, shapes, [item.shape for item in made], mesh.size(dim), are_real=are_real)
        if isinstance(choice, int):
            return Sharding({}, (), choice)
        chosen.append(choice)
    return Sharding(
        {slot: tuple(brought[slot] for brought, _ in chosen) for slot in tensors},
        tuple(
            (tuple(placed[slot] for _, placed in chosen), torch.Size(layout.shape), tuple(layout.strides))
            for slot, layout in enumerate(made)
        ),
    )


def _choose(
    spec: KernelSpec,
    placements: dict[int, Placement],
    shapes: dict[int, Shape],
    made: Sequence[Shape],
    size: int,
    *,
    are_real: bool,
) -> tuple[dict[int, Placement], list[Placement]] | int:
    # Along one dimension of the mesh, of a size: what the tensors are brought to and what the outputs become; or the
    # application to cut the group around.
    copy: Placement = Replicate()
    copies = dict.fromkeys(placements, copy), [copy] * len(made)
    for index, item in enumerate(spec.group.applications):
        if item.function.reshapes and item.function.op is not None:
            return index
    if spec.group.reshapes:
        # Dimensions of its values have other numbers before and after.
        return copies
    try:
        common = broadcast_shapes([*shapes.values(), *made])
    except ShapeError:
        # Outputs that have nothing to do with each other.
        return copies
    # A shard's elements have other numbers.
    shard = None if spec.group.index_values() else _vote(placements, shapes, common, size)
    if shard is not None:
        return (
            {slot: _place(shard, shape, common) for slot, shape in shapes.items()},
            [_place(shard, shape, common) for shape in made],
        )
    partial = {slot: item for slot, item in placements.items() if type(item) is Partial}
    operations = {item.reduce_op for item in partial.values()}
    others_are_whole = all(slot in partial or item.is_replicate() for slot, item in placements.items())
    if len(operations) != 1 or not operations <= {"sum", "avg"} or not others_are_whole or not are_real:
        return copies
    dependent, obstacle = follow_sums(spec.group, frozenset(partial))
    summed = frozenset(partial)
    if obstacle >= 0:
        # A sum of partial sums and copies, if the copies are made partial: all on one rank.
        summed = frozenset(placements)
        dependent, obstacle_of_all = follow_sums(spec.group, summed)
        if obstacle_of_all >= 0:
            return obstacle if len(spec.group.applications) > 1 else copies
    kind = next(iter(partial.values()))
    return (
        {slot: kind if slot in summed else copy for slot in placements},
        [kind if is_dependent else copy for is_dependent in dependent],
    )


def _vote(placements: dict[int, Placement], shapes: dict[int, Shape], common: Shape, size: int) -> Any:
    # The shards, in terms of the common shape, that most of the data has.
    votes: Counter[Any] = Counter()
    for slot, placement in placements.items():
        own = getattr(placement, "dim", None)
        if own is not None and shapes[slot][own] == common[own + len(common) - len(shapes[slot])]:
            votes[_at(placement, own + len(common) - len(shapes[slot]))] += math.prod(shapes[slot])
    for shard in sorted(votes, key=lambda item: (-votes[item], item.dim)):
        is_there = all(placements[slot] == _place(shard, shape, common) for slot, shape in shapes.items())
        # Nobody is brought to shards of which some are empty, or to such that torch makes for itself.
        if is_there or (shard.is_shard() and not hasattr(shard, "split_factor") and common[shard.dim] >= size):
            return shard
    return None


def _place(shard: Any, shape: Shape, common: Shape) -> Placement:
    # Shards of the common shape as those of a tensor that is broadcast to it.
    own = shard.dim + len(shape) - len(common)
    return _at(shard, own) if own >= 0 and shape[own] == common[shard.dim] else Replicate()


def _at(shard: Any, dim: int) -> Any:
    factor = {"split_factor": shard.split_factor} if hasattr(shard, "split_factor") else {}
    return shard if shard.dim == dim else type(shard)(dim, **factor)


def _bring(item: DTensor, placements: Sequence[Placement]) -> torch.Tensor:
    # This rank's part of a tensor under other placements. A copy becomes partial where torch will not make it so.
    if item.placements == tuple(placements):
        return item.to_local()
    pairs = list(zip(item.placements, placements, strict=True))
    spread = [dim for dim, (old, new) in enumerate(pairs) if new.is_partial() and old.is_replicate()]
    wanted = [Replicate() if dim in spread else new for dim, (_, new) in enumerate(pairs)]
    local = _redistribute(item, wanted)
    for dim in spread:
        # As torch does it for its own ops.
        local = placements[dim]._partition_value(local, item.device_mesh, dim)  # type: ignore[attr-defined]
    return local


def _redistribute(item: DTensor, placements: Sequence[Placement]) -> torch.Tensor:
    # Torch 2.11 has no way to forget in place that a result requires grad.
    detached: Any = item.detach()
    local: torch.Tensor = detached.redistribute(placements=placements).to_local()
    return local


def _common_mesh(tensors: Sequence[DTensor]) -> DeviceMesh:
    meshes = list(dict.fromkeys(item.device_mesh for item in tensors))
    if len(meshes) > 1:
        raise DeviceError(f"expected all DTensors to be on one mesh, got {meshes[0]} and {meshes[1]}")
    return meshes[0]


def _check_implicit_replication() -> None:
    dispatcher = getattr(DTensor, "_op_dispatcher", None)
    if not getattr(dispatcher, "_allow_implicit_replication", False):
        raise DeviceError(
            "got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor before calling"
        )


for _name, _rule in (("run", run_shards), ("pull_back", run_copies)):
    torch.library.register_torch_dispatch(f"fuser::{_name}", DTensor, _rule, lib=library.LIBRARY)
