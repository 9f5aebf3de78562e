"""``fuser.foreach``: one functor over lists of tensors, as an optimizer has them, in a few launches.

A *position* of the lists is a call of its own: the tensors of each list with one index. Positions that one kernel can
compute, all operands dense in one order, share launches: their addresses and sizes are tables in the argument struct.
The kernel is that of an ordinary call but for how a block finds its tensors, so bits are those of ordinary calls, by
which all other positions are served.

What a call was like is recorded. The next one like it compares tensors (torch's own guard), reads addresses, packs them
if they are other ones, and launches.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import operator
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from fuser.access import DEFAULT_TUNING
from fuser.codegen import Operand
from fuser.compiler import compile_kernel
from fuser.config import config
from fuser.dtypes import plain_number
from fuser.errors import ArgumentError, FuserError, describe_type, shows_users_frames
from fuser.fused_kernel import FusedKernel, ListPacker
from fuser.fx.trace import FusedFunction
from fuser.jiterator import JitFunction
from fuser.kernel_cache import Lru
from fuser.kernel_spec import MAX_ARGUMENT_BYTES, MAX_LONE_ARGUMENT_BYTES, ArgSpec, KernelSpec
from fuser.launcher import NUMBER_TYPES, TENSOR_TYPES, Recorded, guard, make_check, picker
from fuser.list_text import most_positions
from fuser.planner import Buffer, FlatCall, event_name, plan_flat, start
from fuser.route import Route, find_route, is_transformed
from fuser.tensor_desc import TensorDesc, describe

__all__ = ["foreach"]

# The first driver whose launches take MAX_LONE_ARGUMENT_BYTES.
LARGE_ARGUMENTS_DRIVER = 12010
# How kernels divide their work: on CUDA as fast as copies on an H200, on the CPU chunks for which a thread is worth it.
TUNINGS = {"cuda": replace(DEFAULT_TUNING, unroll=2, turns=2), "cpu": replace(DEFAULT_TUNING, turns=64)}
# Calls that are remembered of one kind, and kinds.
MAX_RECORDS, MAX_KINDS = 8, 256


@shows_users_frames
def foreach(fn: JitFunction | FusedFunction, /, *tensor_lists: Any, out: Any = None, **scalars: Any) -> Any:
    """Apply a functor to lists of tensors: ``[fn(*items, **scalars) for items in zip(*tensor_lists)]`` in a few launches.

    Each position has the bits, shape, strides and dtype of that ordinary call; positions need not have one shape, dtype
    or device. Those whose tensors are dense in one order share launches, for each combination of dtypes: some 450
    positions of seven tensors each. All others, and whatever autograd records, are ordinary calls. Positions are
    computed in no order, unless one writes what another one reads or writes.

    Args:
        fn: a functor (``jit_fn``), or a fused function; one of several kernels is called for each position.
        *tensor_lists: for each tensor that it takes a list, all of one length; or a number or a 0-dim tensor for all.
        out: a list of tensors to write to, or for several outputs one list for each; may be lists of the inputs.
        **scalars: as in a call, for all positions.

    Returns:
        A list of tensors; for several outputs a tuple of lists. ``out`` itself where given.

    Raises:
        ArgumentError: no list, lists of different lengths, or what a call of the functor does not take.
        ShapeError, DeviceError, GradientError, CompileError: as the ordinary call of a position; others may be done.
    """
    if not isinstance(fn, JitFunction | FusedFunction):
        raise ArgumentError(f"foreach takes a functor or a fused function, got {describe_type(fn)}")
    if isinstance(fn, JitFunction) and any(isinstance(item, torch.Tensor) for item in scalars.values()):
        held = tuple(name for name, value in scalars.items() if isinstance(value, torch.Tensor))
        fn.bind_scalars({**scalars, **dict.fromkeys(held, 0)})
        tensor_lists = tuple(fn.merge_arguments(held, tensor_lists, scalars))
        fn, scalars = fn.with_tensors(held), {name: value for name, value in scalars.items() if name not in held}
    call = _read_call(fn, tensor_lists, out, scalars)
    results = None
    if call.count and not torch.compiler.is_compiling():
        target = _find_target(call, 0)
        results = None if target is None else _launch(call, target)
    return call.run_plainly(range(call.count)) if results is None else results


def _launch(call: _Call, target: _Target) -> Any:
    # The value of a call; None if all its positions are ordinary calls.
    flat = call.flatten(target.numbers)
    key = _key(call, target)
    records = _records.get(key) or ()
    for record in records:
        results = record.replay(call, flat)
        if results is not None:
            return results
    made = _make_record(call, target, flat)
    if made is None:
        return None
    if made.guard is not None:
        _records.put(key, (made, *records[: MAX_RECORDS - 1]), MAX_KINDS)
    return made.run(call, flat)


# Newest first, by what tells calls apart without looking at tensors.
_records: Lru[tuple[_Record, ...]] = Lru()


# --- a call ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Call:
    """A call of ``foreach``."""

    fn: JitFunction | FusedFunction
    arguments: tuple[Any, ...]
    # Whether each of them is a list.
    is_list: tuple[bool, ...]
    # How many positions there are.
    count: int
    scalars: dict[str, Any]
    # One list per output; none without ``out=``.
    outs: tuple[Sequence[Any], ...]
    given_out: Any

    def at(self, position: int) -> tuple[Any, ...]:
        """Return the arguments of one position."""
        pairs = zip(self.arguments, self.is_list, strict=True)
        return tuple([item[position] if is_list else item for item, is_list in pairs])

    def flatten(self, numbers: Sequence[Any]) -> tuple[Any, ...]:
        """Return all tensors and numbers: the arguments, ``numbers``, and the tensors to write to."""
        pairs = zip(self.arguments, self.is_list, strict=True)
        given = [item if is_list else (item,) for item, is_list in pairs]
        return tuple(itertools.chain(*given, numbers, *self.outs))

    def run_plainly(self, positions: Iterable[int], results: list[list[Any]] | None = None) -> Any:
        """Make the ordinary calls of some positions; return the value of the whole call, which is complete then.

        Args:
            positions: which.
            results: those of the other positions: for each output a list of all.
        """
        if results is None:
            # How many outputs a fused function has, the first call tells.
            known = self.fn.function.num_outputs if isinstance(self.fn, JitFunction) else 0
            results = [[None] * self.count for _ in range(known)]
        for position in positions:
            items = self.at(position)
            if self.outs:
                outs = tuple([item[position] for item in self.outs])
                self.fn(*items, out=outs[0] if len(outs) == 1 else outs, **self.scalars)
                continue
            made = self.fn(*items, **self.scalars)
            made = (made,) if isinstance(made, torch.Tensor) else made
            if not isinstance(made, list | tuple) or not all(isinstance(item, torch.Tensor) for item in made):
                raise ArgumentError(f"foreach takes functions of which tensors come; got {describe_type(made)}")
            results = results or [[None] * self.count for _ in made]
            for own, item in zip(results, made, strict=True):
                own[position] = item
        if self.outs:
            return self.given_out
        return tuple(results) if len(results) > 1 else results[0] if results else []


def _read_call(fn: JitFunction | FusedFunction, arguments: tuple[Any, ...], out: Any, scalars: dict[str, Any]) -> _Call:
    is_list = tuple([isinstance(item, list | tuple) for item in arguments])
    lengths = {len(item) for item, own in zip(arguments, is_list, strict=True) if own}
    if len(lengths) != 1:
        what = f"lists of one length, got {sorted(lengths)}" if lengths else "at least one list of tensors"
        raise ArgumentError(f"foreach takes {what}")
    count = lengths.pop()
    for item, own in zip(arguments, is_list, strict=True):
        if not own and isinstance(item, torch.Tensor) and item.dim():
            raise ArgumentError(f"foreach takes lists, and 0-dim tensors for all; got a tensor of {list(item.shape)}")
    if isinstance(fn, JitFunction):
        fn.check_count(len(arguments))
        arguments = tuple([item if own else plain_number(item) for item, own in zip(arguments, is_list, strict=True)])
    if out is None:
        return _Call(fn, arguments, is_list, count, scalars, (), None)
    is_nested = isinstance(out, list | tuple) and bool(out) and all(isinstance(item, list | tuple) for item in out)
    outs = tuple(out) if is_nested else (out,)
    if not all(isinstance(item, list | tuple) and len(item) == count for item in outs):
        raise ArgumentError(
            f"foreach takes as out= a list of {count} tensors for each output, got {describe_type(out)}"
        )
    wanted = fn.function.num_outputs if isinstance(fn, JitFunction) else len(outs)
    if len(outs) != wanted:
        raise ArgumentError(f"out= has {len(outs)} lists for {wanted} outputs")
    return _Call(fn, arguments, is_list, count, scalars, outs, out)


class _Target(NamedTuple):
    """The group that a position is a call of."""

    # Where it comes from; calls with one owner have one group.
    owner: object
    spec: KernelSpec
    # The group's inputs as slots among the position's arguments and the numbers; -1 - k for the k-th constant.
    order: tuple[int, ...]
    constants: tuple[Any, ...]
    # What a call has beside the arguments, the same for all positions.
    numbers: tuple[Any, ...]
    # Whether it is the same for all positions.
    is_fixed: bool = False
    # Whether tensors of one kind always lead there.
    is_steady: bool = True


def _find_target(call: _Call, position: int) -> _Target | None:
    # None where it is no single group.
    items = call.at(position)
    if isinstance(call.fn, JitFunction):
        spec = call.fn.spec(len(items))
        numbers = tuple([plain_number(item) for item in call.fn.bind_scalars(call.scalars).values()])
        return _Target(spec, spec, tuple(range(len(items) + len(numbers))), (), numbers, is_fixed=True)
    found = call.fn.find_whole(items, call.scalars)
    if found is None:
        return None
    entry, leaves = found
    whole, facts = entry.whole, entry.traced.facts
    if whole is None or len(leaves) < len(items) or not all(map(operator.is_, leaves, items)):
        return None
    is_steady = facts is None or facts.is_of_tensors
    return _Target(entry, whole.spec, whole.order, whole.constants, leaves[len(items) :], is_steady=is_steady)


def _key(call: _Call, target: _Target) -> tuple[Any, ...]:
    shared = [list if own else type(item) for item, own in zip(call.arguments, call.is_list, strict=True)]
    kinds = (*shared, *map(type, target.numbers))
    return id(target.owner), call.count, kinds, len(call.outs), torch.get_default_dtype()


# --- a record -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Step:
    """One launch."""

    run: Callable[[bytes], None]
    name: str
    packer: ListPacker
    # For each operand of the kernel: picks the addresses of its tensors out of all.
    operands: tuple[Callable[[Sequence[int]], Sequence[int]], ...]
    # Inputs passed by value: slots among the call's tensors and numbers, or -1 - k for the k-th constant.
    numbers: tuple[int, ...]


class _Extent(NamedTuple):
    """What of a tensor decides whether it shares memory."""

    # From its first element to the end of its last one.
    size_bytes: int
    position: int
    itemsize: int
    is_written: bool


class _Memory(NamedTuple):
    """Where the tensors of a call were, and the tables made of that."""

    addresses: list[int]
    tables: list[bytes]


@dataclass(slots=True)
class _Record:
    """What is left of a call. Threads may share it."""

    # Keeps its id alive.
    owner: object
    # Returns None for tensors and numbers that are not like the call's. None: it cannot be asked.
    guard: Callable[[tuple[Any, ...]], Any] | None
    needs_no_grad: bool
    # Picks the tensors, each once, out of all tensors and numbers; one extent for each.
    pick: Callable[[Sequence[Any]], Sequence[torch.Tensor]]
    extents: tuple[_Extent, ...]
    # How many outputs there are; output, position and arguments of torch.empty_strided of each new tensor.
    output_count: int
    allocations: tuple[tuple[int, int, Buffer, torch.device], ...]
    steps: tuple[_Step, ...]
    constants: tuple[Any, ...]
    # Positions that are ordinary calls.
    plain: tuple[int, ...]
    memory: _Memory | None = field(default=None, repr=False)

    def replay(self, call: _Call, flat: tuple[Any, ...]) -> Any:
        """Make a call that is like the recorded one; None if it is not, and nothing was done."""
        if self.guard is None or (self.needs_no_grad and torch.is_grad_enabled()) or self.guard(flat) is None:
            return None
        return self.run(call, flat)

    def run(self, call: _Call, flat: tuple[Any, ...]) -> Any:
        """Make the call; None if tensors share memory, or a number is none of the kernels': nothing was done."""
        tensors = self.pick(flat)
        addresses = list(map(torch.Tensor.data_ptr, tensors))
        memory = self.memory
        if memory is None or memory.addresses != addresses:
            if call.outs and not _are_apart(addresses, self.extents):
                return None
            memory = None
        results: list[list[Any]] = [[None] * call.count for _ in range(self.output_count)]
        made = []
        for output, position, (shape, strides, dtype), device in self.allocations:
            results[output][position] = torch.empty_strided(shape, strides, dtype=dtype, device=device)
            made.append(results[output][position])
        if memory is None or made:
            places = addresses + [item.data_ptr() for item in made]
            tables = [step.packer.pack_tables([pick(places) for pick in step.operands]) for step in self.steps]
            # In one assignment: another thread finds what belongs together.
            memory = _Memory(addresses, tables)
            self.memory = None if made else memory
        try:
            packed = [
                step.packer.pack(tables, [self._number(flat, slot) for slot in step.numbers])
                for step, tables in zip(self.steps, memory.tables, strict=True)
            ]
        except struct.error:
            return None
        for step, arguments in zip(self.steps, packed, strict=True):
            start(step.run, step.name, arguments)
        if call.outs:
            # Autograd must see that what it may have saved was written to.
            pairs = zip(tensors, self.extents, strict=True)
            torch.autograd.graph.increment_version([item for item, extent in pairs if extent.is_written])
        return call.run_plainly(self.plain, results)

    def _number(self, flat: Sequence[Any], slot: int) -> Any:
        item = flat[slot] if slot >= 0 else self.constants[-1 - slot]
        return item.item() if isinstance(item, torch.Tensor) else item


def _are_apart(addresses: Sequence[int], extents: Sequence[_Extent]) -> bool:
    """Whether no tensor that is written shares memory: except all of it, with an input of its own position."""
    ranges = [
        (address, address + extent.size_bytes, *extent[1:])
        for address, extent in zip(addresses, extents, strict=True)
        if extent.size_bytes
    ]
    # Of those before, the farthest end, also among those that are written.
    end = written_end = 0
    before: tuple[int, ...] = ()
    for begin, own_end, position, itemsize, is_written in sorted(ranges):
        own = (begin, own_end, position, itemsize)
        if begin < written_end or (is_written and begin < end and own != before):
            return False
        before, end = own, max(end, own_end)
        written_end = max(written_end, own_end if is_written else 0)
    return True


# --- how to make one ------------------------------------------------------------------------------------------------
def _make_record(call: _Call, target: _Target, flat: tuple[Any, ...]) -> _Record | None:
    # None if all positions are ordinary calls, in order.
    is_plain = all(type(item) in TENSOR_TYPES or type(item) in NUMBER_TYPES for item in flat)
    if not is_plain or torch.overrides.has_torch_function(flat) or torch._C._len_torch_dispatch_stack():
        return None
    if is_transformed() or torch.is_autocast_enabled("cuda"):
        return None
    return _RecordMaker(call, target, flat).make()


class _RecordMaker:
    """Makes the record of a call of plain tensors and numbers."""

    def __init__(self, call: _Call, target: _Target, flat: tuple[Any, ...]) -> None:
        self.call, self.target, self.flat = call, target, flat
        # Read before planning: a setting that another thread changes meanwhile makes the record stale.
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

    def make(self) -> _Record | None:
        """Return the record, its kernels compiled; None if all positions are ordinary calls, in order."""
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
            with suppress(FuserError):
                # Whatever it is, the ordinary calls deal with it.
                kernel = compile_kernel(self.target.spec, args, device.index) if len(positions) > 1 else None
            if kernel is None:
                self.plain += positions
                for position in positions:
                    del self.flats[position]
            else:
                most = args.positions
                kernels += [(kernel, device, positions[at : at + most]) for at in range(0, len(positions), most)]
        extents = self._find_extents()
        if not kernels or extents is None:
            return None
        slots = list(self.first.values())
        places = {slot: place for place, slot in enumerate(slots)}
        allocations = [] if self.call.outs else self._list_allocations()
        new = {item[:2]: len(slots) + place for place, item in enumerate(allocations)}
        check = make_check(self.flat, compares_sizes=True) if self.is_steady else None
        recorded = None if check is None else Recorded(check, self.generation)
        return _Record(
            owner=self.target.owner,
            guard=None if recorded is None else guard(recorded, self.flat, lambda inputs: inputs),
            needs_no_grad=any(isinstance(item, torch.Tensor) and item.requires_grad for item in self.flat),
            pick=picker(slots),
            extents=tuple(extents),
            output_count=0 if self.call.outs else len(self.target.spec.group.outputs),
            allocations=tuple(allocations),
            steps=tuple(self._step(*item, places, new) for item in kernels),
            constants=self.target.constants,
            plain=tuple(sorted(self.plain)),
        )

    def _find_flat(self, position: int) -> FlatCall | None:
        # What a kernel over lists depends on, if it can compute the position.
        target = self.target if position == 0 or self.target.is_fixed else _find_target(self.call, position)
        if target is None or target.owner is not self.target.owner:
            self.is_steady = False
            return None
        arguments = (*self.call.at(position), *target.numbers)
        inputs = [arguments[slot] if slot >= 0 else target.constants[-1 - slot] for slot in target.order]
        outs = [item[position] for item in self.call.outs]
        routed = find_route([*inputs, *outs])
        if routed.route is not Route.KERNEL or not all(map(operator.is_, routed.inputs, [*inputs, *outs])):
            # Its tensors may have no memory that could be compared with others'.
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

    def _find_extents(self) -> list[_Extent] | None:
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
            reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            size_bytes = (reach + 1) * tensor.element_size() if tensor.numel() else 0
            extents.append(_Extent(size_bytes, min(own), tensor.element_size(), bool(written[key])))
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
        places: Mapping[int, int],
        new: Mapping[tuple[int, int], int],
    ) -> _Step:
        packer = ListPacker(kernel.source, [self.flats[position].numel for position in positions])
        operands = []
        for operand in kernel.source.operands:
            if operand.is_output and not self.call.outs:
                found = [new[operand.index, position] for position in positions]
            else:
                slots = [self._slot(operand, position) for position in positions]
                found = [places[self.first[id(self.flat[slot])]] for slot in slots]
            operands.append(picker(found))
        return _Step(
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
    if 0 in flat.args.outputs or any(item.number is not None and not shared for item, shared in given):
        # Numbers in lists are of one position only.
        return None
    numbers = sum(item.number is not None for item, _ in given)
    operands = len(flat.outputs) + len(given) - numbers
    most = most_positions(operands, numbers, _argument_bytes(flat.device.type))
    tuning = TUNINGS[flat.device.type]
    args = replace(flat.args, wide_index=False, tuning=tuning, positions=most)
    return flat._replace(args=args) if most > 1 else None


@functools.cache
def _argument_bytes(device_type: str) -> int:
    # Builds of torch without CUDA do not have it.
    driver_version: Any = getattr(torch._C, "_cuda_getDriverVersion", lambda: LARGE_ARGUMENTS_DRIVER)
    is_small = device_type == "cuda" and driver_version() < LARGE_ARGUMENTS_DRIVER
    return MAX_ARGUMENT_BYTES if is_small else MAX_LONE_ARGUMENT_BYTES
