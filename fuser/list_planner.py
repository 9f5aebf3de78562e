"""Plans a call of ``foreach``: which positions share launches, and where the kernels find their tensors."""

from __future__ import annotations

import bisect
import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fuser.access import DEFAULT_TUNING
from fuser.compiler import compile_kernel
from fuser.config import config
from fuser.errors import FuserError
from fuser.fused_kernel import FusedKernel, ListPacker
from fuser.kernel_cache import Lru
from fuser.kernel_source import Operand
from fuser.kernel_spec import MAX_ARGUMENT_BYTES, MAX_LONE_ARGUMENT_BYTES, ArgSpec, KernelSpec
from fuser.launcher import make_check
from fuser.library import needs_operator
from fuser.list_record import Extent, ListCall, ListRecord, ListStep, ListTarget
from fuser.list_text import most_positions
from fuser.outputs import extent_bytes, is_kept_as_it_is
from fuser.plan import Buffer, event_name
from fuser.planner import FlatCall, plan_flat
from fuser.python_launcher import guard, picker
from fuser.record import NUMBER_TYPES, TENSOR_TYPES, Recorded
from fuser.route import Route, find_route, is_transformed
from fuser.tensor_desc import TensorDesc, describe

__all__ = ["launch_lists"]

# The first driver whose launches take MAX_LONE_ARGUMENT_BYTES.
LARGE_ARGUMENTS_DRIVER = 12010
# How kernels divide their work: on CUDA as fast as copies on an H200, on the CPU chunks for which a thread is worth it.
TUNINGS = {"cuda": DEFAULT_TUNING._replace(unroll=2), "cpu": DEFAULT_TUNING._replace(turns=64)}


# Calls that are remembered of one kind, and kinds.
MAX_RECORDS, MAX_KINDS = 8, 256
# Newest first, by what tells calls apart without looking at tensors.
_records: Lru[tuple[ListRecord, ...]] = Lru()


def launch_lists(call: ListCall, target: ListTarget, find_target: Callable[[int], ListTarget | None]) -> Any:
    """Make a call as an earlier one like it, or plan it; None if it has no plan: its positions are ordinary calls.

    Args:
        call: the call.
        target: the group of its first position.
        find_target: finds the group of another position, if it is one.
    """
    flat = call.flatten(target.numbers)
    key = _key(call, target)
    records = _records.get(key) or ()
    for record in records:
        results = record.replay(call, flat)
        if results is not None:
            return results
    made = _make_record(call, target, flat, find_target)
    if made is None:
        return None
    if made.guard is not None:
        _records.put(key, (made, *records[: MAX_RECORDS - 1]), MAX_KINDS)
    return made.run(call, flat)


def _key(call: ListCall, target: ListTarget) -> tuple[Any, ...]:
    shared = [list if own else type(item) for item, own in zip(call.arguments, call.is_list, strict=True)]
    kinds = (*shared, *map(type, target.numbers))
    return id(target.owner), call.count, kinds, len(call.outs), torch.get_default_dtype()


def _make_record(
    call: ListCall, target: ListTarget, flat: tuple[Any, ...], find_target: Callable[[int], ListTarget | None]
) -> ListRecord | None:
    is_plain = all(type(item) in TENSOR_TYPES or type(item) in NUMBER_TYPES for item in flat)
    if not is_plain or torch.overrides.has_torch_function(flat) or needs_operator(flat):
        return None
    if is_transformed() or torch.is_autocast_enabled("cuda"):
        return None
    return RecordMaker(call, target, flat, find_target).make()


class RecordMaker:
    """Makes the record of a call of plain tensors and numbers."""

    def __init__(
        self, call: ListCall, target: ListTarget, flat: tuple[Any, ...], find_target: Callable[[int], ListTarget | None]
    ) -> None:
        self.call, self.target, self.flat, self.find_target = call, target, flat, find_target
        # Read before planning, this first: what another thread changes meanwhile, and back, makes the record stale.
        self.changes = config.changes
        self.generation = config.generation
        # Where each argument begins in ``flat``, then where the numbers do, and the tensors to write to.
        lengths = [call.count if is_list else 1 for is_list in call.is_list]
        self.starts = list(itertools.accumulate(lengths, initial=0))
        self.first_out = self.starts[-1] + len(target.numbers)
        # Tensors, each once: by its id its first slot in ``flat``.
        self.first: dict[int, int] = {}
        self.flats: dict[int, FlatCall] = {}
        self.plain: list[int] = []
        self.is_steady = target.is_steady
        # What is known of positions described before.
        self.known: dict[Any, FlatCall | None] = {}

    def make(self) -> ListRecord:
        """Return the record, its kernels compiled; it has no steps if all positions are ordinary calls, in order."""
        groups: dict[tuple[ArgSpec, torch.device], list[int]] = {}
        for position in range(self.call.count):
            found = self._find_flat(position)
            if found is None:
                self.plain.append(position)
                continue
            self.flats[position] = found
            if found.numel:
                groups.setdefault((found.args, found.device), []).append(position)
        kernels = []
        for (args, device), positions in groups.items():
            kernel = None
            try:
                kernel = compile_kernel(self.target.spec, args, device.index) if len(positions) > 1 else None
            except FuserError:
                # Whatever it is, the ordinary calls deal with it, and the next call like this one tries again.
                self.is_steady = False
            if kernel is None:
                self.plain += positions
                for position in positions:
                    del self.flats[position]
            else:
                most = args.positions
                kernels += [(kernel, device, positions[at : at + most]) for at in range(0, len(positions), most)]
        extents = self._find_extents() if kernels else None
        if extents is None:
            return self._record()
        slots = list(self.first.values())
        numbered = {slot: number for number, slot in enumerate(slots)}
        allocations = [] if self.call.outs else self._list_allocations()
        new = {item[:2]: len(slots) + number for number, item in enumerate(allocations)}
        return self._record(
            pick=picker(slots),
            extents=tuple(extents),
            output_count=0 if self.call.outs else len(self.target.spec.group.outputs),
            allocations=tuple(allocations),
            steps=tuple(self._step(*item, numbered, new) for item in kernels),
            constants=self.target.constants,
            plain=tuple(sorted(self.plain)),
        )

    def _record(self, **launches: Any) -> ListRecord:
        is_kept = self.is_steady and config.changes == self.changes
        check = make_check(self.flat, compares_sizes=True) if is_kept else None
        recorded = None if check is None else Recorded(check, self.generation)
        requires_grad = any(isinstance(item, torch.Tensor) and item.requires_grad for item in self.flat)
        return ListRecord(
            owner=self.target.owner,
            guard=None if recorded is None else guard(recorded, self.flat, lambda inputs: inputs),
            grad_mode=torch.is_grad_enabled() if requires_grad else None,
            **launches,
        )

    def _find_flat(self, position: int) -> FlatCall | None:
        # What a kernel over lists depends on, if it can compute the position.
        target = self.target if position == 0 or self.target.is_fixed else self.find_target(position)
        if target is None or target.owner is not self.target.owner:
            self.is_steady = False
            return None
        arguments = (*self.call.at(position), *target.numbers)
        inputs = [arguments[slot] if slot >= 0 else target.constants[-1 - slot] for slot in target.order]
        outs = [item[position] for item in self.call.outs]
        routed = find_route([*inputs, *outs])
        if not all(map(operator.is_, routed.inputs, [*inputs, *outs])):
            # Its tensors may have no memory that could be compared with others'.
            self.is_steady = False
            return None
        if routed.route is Route.AUTOGRAD or any(map(is_kept_as_it_is, outs)):
            # Nothing is written: where there is ``out=``, the ordinary call raises.
            return None
        if routed.route is not Route.KERNEL:
            self.is_steady = False
            return None
        for argument, start_slot in enumerate(self.starts[:-1]):
            self._note(start_slot + (position if self.call.is_list[argument] else 0))
        for slot in range(self.starts[-1], self.first_out):
            self._note(slot)
        for output in range(len(outs)):
            self._note(self.first_out + output * self.call.count + position)
        described = tuple(map(describe, inputs)), tuple(map(describe, outs))
        if described not in self.known:
            try:
                self.known[described] = _fit(self.target.spec, *described, self._is_shared())
            except FuserError:
                # The ordinary call raises it, or finds a way.
                self.known[described] = None
        return self.known[described]

    def _note(self, slot: int) -> None:
        if isinstance(self.flat[slot], torch.Tensor):
            self.first.setdefault(id(self.flat[slot]), slot)

    def _is_shared(self) -> list[bool]:
        # Of each input of the group whether it is the same for all positions.
        is_list = self.call.is_list
        return [not (0 <= slot < len(is_list) and is_list[slot]) for slot in self.target.order]

    def _find_extents(self) -> list[Extent] | None:
        # None if a tensor that is written to is another argument in another position, or another output.
        positions: dict[int, set[int]] = {}
        written: dict[int, int] = {}
        for slot, item in enumerate(self.flat):
            if isinstance(item, torch.Tensor):
                positions.setdefault(id(item), set()).add(self._position_of(slot))
                written[id(item)] = written.get(id(item), 0) + (slot >= self.first_out)
        extents = []
        for key, slot in self.first.items():
            tensor, own = self.flat[slot], positions[key]
            if written[key] and (len(own) > 1 or written[key] > 1):
                return None
            extents.append(Extent(extent_bytes(tensor), min(own), tensor.element_size(), bool(written[key])))
        return extents

    def _position_of(self, slot: int) -> int:
        # -1 for what is there for all.
        if slot >= self.first_out:
            return (slot - self.first_out) % self.call.count
        argument = bisect.bisect_right(self.starts, slot) - 1
        is_list = argument < len(self.call.is_list) and self.call.is_list[argument]
        return slot - self.starts[argument] if is_list else -1

    def _list_allocations(self) -> list[tuple[int, int, Buffer, torch.device]]:
        return [
            (output, position, buffer, found.device)
            for position, found in self.flats.items()
            for output, buffer in enumerate(found.outputs)
        ]

    def _step(
        self,
        kernel: FusedKernel,
        device: torch.device,
        positions: Sequence[int],
        numbered: Mapping[int, int],
        new: Mapping[tuple[int, int], int],
    ) -> ListStep:
        packer = ListPacker(kernel.source, [self.flats[position].numel for position in positions])
        operands = []
        for operand in kernel.source.operands:
            if operand.is_output and not self.call.outs:
                found = [new[operand.index, position] for position in positions]
            else:
                slots = [self._slot(operand, position) for position in positions]
                found = [numbered[self.first[id(self.flat[slot])]] for slot in slots]
            operands.append(picker(found))
        return ListStep(
            run=kernel.bind(packer.launch, device.index or 0),
            name=event_name(self.target.spec.group),
            packer=packer,
            operands=tuple(operands),
            numbers=tuple(self._input_slot(index, 0) for index, _ in kernel.source.numbers),
        )

    def _slot(self, operand: Operand, position: int) -> int:
        if operand.is_output:
            return self.first_out + operand.index * self.call.count + position
        return self._input_slot(operand.index, position)

    def _input_slot(self, index: int, position: int) -> int:
        # Of an input of the group; -1 - k for the k-th constant.
        slot = self.target.order[index]
        count = len(self.call.is_list)
        if slot < 0:
            return slot
        if slot >= count:
            return self.starts[-1] + slot - count
        return self.starts[slot] + (position if self.call.is_list[slot] else 0)


def _fit(
    spec: KernelSpec, inputs: Sequence[TensorDesc], outs: Sequence[TensorDesc], is_shared: Sequence[bool]
) -> FlatCall | None:
    """Return what a kernel over lists depends on, for a position like this; None if none can compute it."""
    flat = plan_flat(spec, inputs, outs)
    if flat is None or flat.device.type not in TUNINGS:
        return None
    # What a call of another shape, or dtype, is told or done for, ordinary calls know.
    if outs and [(item.shape, item.dtype, item.device) for item in outs] != [
        (item.shape, item.dtype, flat.device) for item in flat.outputs
    ]:
        return None
    given = [(item, shared) for item, shared in zip(flat.args.inputs, is_shared, strict=True) if item is not None]
    # One element is dense, too.
    written = (1,) * len(flat.args.outputs) if flat.numel == 1 else flat.args.outputs
    if 0 in written or any(item.number is not None and not shared for item, shared in given):
        # Numbers in lists are of one position only.
        return None
    numbers = sum(item.number is not None for item, _ in given)
    operands = len(flat.outputs) + len(given) - numbers
    most = most_positions(operands, numbers + len(flat.args.counters), _argument_bytes(flat.device.type))
    tuning = TUNINGS[flat.device.type]
    args = flat.args._replace(outputs=written, wide_index=False, tuning=tuning, positions=most)
    return flat._replace(args=args) if most > 1 else None


@functools.cache
def _argument_bytes(device_type: str) -> int:
    # Builds of torch without CUDA do not have it.
    driver_version: Any = getattr(torch._C, "_cuda_getDriverVersion", lambda: LARGE_ARGUMENTS_DRIVER)
    is_small = device_type == "cuda" and driver_version() < LARGE_ARGUMENTS_DRIVER
    return MAX_ARGUMENT_BYTES if is_small else MAX_LONE_ARGUMENT_BYTES
