"""Replays recorded calls in Python, for machines that had no C compiler when fuser was installed; see ``launcher``."""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from fuser.access import VECTOR_BYTES
from fuser.config import config
from fuser.plan import number_of
from fuser.record import MISSING, Recorded, Scalars

__all__ = ["PythonLauncher", "guard", "picker"]

# How many calls a PythonLauncher remembers.
PYTHON_RECORDS = 4

# Makes a call with inputs that are like the recorded ones, or returns None.
Replay = Callable[[tuple[Any, ...]], Any]


class _Record(NamedTuple):
    # How many positional arguments the call had, and the type of every input.
    argument_count: int
    types: tuple[type, ...]
    # To be called with other inputs of these types.
    replay: Replay


class PythonLauncher:
    """Implements Launcher for calls without ``out=`` on aligned tensors; remembers the last few."""

    def __init__(
        self,
        names: tuple[str, ...],
        defaults: tuple[Any, ...],
        order: tuple[int, ...] | None = None,
        fill: tuple[Any, ...] = (),
        constants: tuple[Any, ...] = (),
    ) -> None:
        self._names = dict.fromkeys(names).keys()
        self._defaults = defaults
        self._order = order
        self._fill = dict(zip(names, fill, strict=True)) if order is not None else {}
        self._constants = tuple((slot, value) for slot, value in enumerate(constants) if value is not MISSING)
        self._records: tuple[_Record, ...] = ()

    def launch(self, tensors: tuple[Any, ...], scalars: Scalars | None, out: Any) -> Any:
        """See Launcher."""
        if out is not None or not self._records or (scalars and not scalars.keys() <= self._names):
            return None
        if self._order is not None:
            # All records have one number of arguments.
            wanted = self._records[0].argument_count
            if scalars or len(tensors) != wanted:
                tensors = self._place(tensors, scalars or {})
            if len(tensors) != wanted or not all(_is_constant(tensors[slot], it) for slot, it in self._constants):
                return None
        count = len(tensors)
        inputs = self._bind(tensors, scalars)
        types = tuple(map(type, inputs))
        for argument_count, recorded_types, replay in self._records:
            if argument_count == count and recorded_types == types:
                replayed = replay(inputs)
                if replayed is not None:
                    return replayed
        return None

    def add(self, tensors: tuple[Any, ...], scalars: Scalars | None, out: Any, recorded: Recorded) -> bool:
        """See Launcher."""
        inputs = self._bind(tensors, scalars)
        addresses = [item.data_ptr() for item in inputs if isinstance(item, torch.Tensor)]
        if (
            out is not None
            or recorded.resize
            or (recorded.is_cuda and any(address % VECTOR_BYTES for address in addresses))
        ):
            return False
        make = _make_replay if recorded.through is None else _make_replay_through
        record = _Record(len(tensors), tuple(map(type, inputs)), guard(recorded, inputs, make(recorded, inputs)))
        self._records = (record, *self._records[: PYTHON_RECORDS - 1])
        return True

    def _place(self, tensors: tuple[Any, ...], keywords: Scalars) -> tuple[Any, ...]:
        # All arguments by position; none where one is missing, or comes twice.
        names = tuple(self._names)[len(tensors) :]
        given = (*tensors, *(keywords.get(name, self._fill[name]) for name in names))
        return () if any(item is MISSING for item in given) or not keywords.keys() <= {*names} else given

    def _bind(self, tensors: tuple[Any, ...], scalars: Scalars | None) -> tuple[Any, ...]:
        if self._order is not None:
            return tuple(tensors[slot] if slot >= 0 else self._defaults[-1 - slot] for slot in self._order)
        if not scalars:
            return tensors + self._defaults
        return tensors + tuple(map(scalars.get, self._names, self._defaults))


def _is_constant(value: Any, constant: Any) -> bool:
    # Of words that are equal there may be several.
    return value is constant or (type(value) is type(constant) is str and value == constant)


def guard(recorded: Recorded, inputs: tuple[Any, ...], replay: Replay) -> Replay:
    """Return ``replay`` for inputs that are like the recorded ones; for others it returns None.

    The caller compares the types of numbers, and grad mode.
    """
    # What a replay looks up is bound here: an attribute costs as much as an addition.
    check, generation, settings, reads = recorded.check, recorded.generation, config, recorded.reads
    function_modes, dispatch_modes = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
    first: dict[int, int] = {}
    for slot, item in enumerate(inputs):
        if isinstance(item, torch.Tensor):
            first.setdefault(id(item), slot)
    # Each tensor once, and the slots where one comes again.
    distinct = tuple(first.values())
    twins = [(slot, first[id(item)]) for slot, item in enumerate(inputs) if first.get(id(item), slot) != slot]
    pick = picker(distinct)
    again, before = picker([slot for slot, _ in twins]), picker([slot for _, slot in twins])
    is_plain = len(distinct) == len(inputs)

    def guarded(inputs: tuple[Any, ...]) -> Any:
        for held, name, value in reads:
            if (held.get(name) if type(held) is dict else getattr(held, name, None)) is not value:
                return None
        if not is_plain and not all(map(operator.is_, again(inputs), before(inputs))):
            return None
        if not check(*(inputs if is_plain else pick(inputs))):
            return None
        if generation != settings.generation or function_modes() or dispatch_modes() or forward_ad._current_level >= 0:
            return None
        return replay(inputs)

    return guarded


def picker(slots: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return a function that picks these items of a sequence."""
    if len(slots) > 1:
        return operator.itemgetter(*slots)
    return lambda items: [items[slot] for slot in slots]


def _number_picker(slots: Sequence[int], inputs: Sequence[Any]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    # Of a tensor on the CPU, its value.
    if not any(isinstance(inputs[slot], torch.Tensor) for slot in slots):
        return picker(slots)
    return lambda items: [number_of(items[slot]) for slot in slots]


def _make_replay_through(recorded: Recorded, inputs: tuple[Any, ...]) -> Replay:  # noqa: ARG001 - as below
    through, is_grad_enabled, mode = recorded.through, torch.is_grad_enabled, recorded.grad_mode
    assert through is not None, "the caller checked"
    return lambda inputs: through(*inputs) if mode is None or is_grad_enabled() is mode else None


def _make_replay(recorded: Recorded, inputs: tuple[Any, ...]) -> Replay:
    slots = tuple(slot for slot, item in enumerate(inputs) if isinstance(item, torch.Tensor))
    allocations, is_cuda, device_index = recorded.allocations, recorded.is_cuda, recorded.device_index
    needs_no_grad, is_grad_enabled = recorded.grad_mode is False, torch.is_grad_enabled
    current_device = torch._C._cuda_getDevice if is_cuda else None
    count = None if recorded.result_count == 1 else recorded.result_count
    # Addresses come in this order: what is allocated, then the inputs.
    order = {slot: len(allocations) + index for index, slot in enumerate(slots)}
    order |= {len(inputs) + index: index for index in range(len(allocations))}
    launches = [
        (
            step.packer.pack,
            step.start,
            picker([order[slot] for slot in (*(len(inputs) + slot for slot in step.outputs), *step.inputs)]),
            _number_picker(step.numbers, inputs),
        )
        for step in recorded.steps
    ]

    def replay(inputs: tuple[Any, ...]) -> Any:
        if needs_no_grad and is_grad_enabled():
            return None
        read = [inputs[slot].data_ptr() for slot in slots]
        if current_device is not None:
            if current_device() != device_index:
                return None
            # Records are of aligned tensors; what is not takes another kernel.
            for address in read:
                if address % VECTOR_BYTES:
                    return None
        made = [allocate(*arguments) for allocate, arguments in allocations]
        addresses = [tensor.data_ptr() for tensor in made] + read
        for pack, run, pick_addresses, pick_numbers in launches:
            try:
                packed = pack(pick_addresses(addresses), pick_numbers(inputs))
            except struct.error:
                return None
            run(packed)
        return made[0] if count is None else tuple(made[:count])

    return replay
