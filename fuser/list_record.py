"""A call of ``foreach``, and what it leaves behind: how to recognise one like it, and its launches."""

from __future__ import annotations

import itertools
import operator
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from fuser.errors import ArgumentError, describe_type
from fuser.fused_kernel import ListPacker
from fuser.kernel_spec import KernelSpec
from fuser.plan import Buffer, number_of, start

__all__ = ["Extent", "ListCall", "ListRecord", "ListStep", "ListTarget", "are_apart"]

# What an ordinary call makes: tensors, and while it is traced what stands for them.
_VALUES = (fx.Proxy, torch.Tensor)


@dataclass(frozen=True, slots=True)
class ListCall:
    """A call of ``foreach``."""

    # Makes the ordinary call of a position.
    fn: Callable[..., Any]
    arguments: tuple[Any, ...]
    # Whether each of them is a list.
    is_list: tuple[bool, ...]
    # How many positions there are.
    count: int
    scalars: dict[str, Any]
    # One list per output; none without ``out=``.
    outs: tuple[Sequence[Any], ...]
    given_out: Any
    # How many outputs there are; 0: the first ordinary call tells.
    output_count: int

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
            results = [[None] * self.count for _ in range(self.output_count)]
        for position in positions:
            items = self.at(position)
            if self.outs:
                outs = tuple([item[position] for item in self.outs])
                self.fn(*items, out=outs[0] if len(outs) == 1 else outs, **self.scalars)
                continue
            made = self.fn(*items, **self.scalars)
            is_traced = isinstance(made, fx.Proxy)
            if is_traced and self.output_count > 1:
                made = tuple([made[slot] for slot in range(self.output_count)])
            made = (made,) if isinstance(made, _VALUES) else made
            if not isinstance(made, list | tuple) or not all(isinstance(item, _VALUES) for item in made):
                raise ArgumentError(f"foreach takes functions of which tensors come; got {describe_type(made)}")
            results = results or [[None] * self.count for _ in made]
            for own, item in zip(results, made, strict=True):
                own[position] = item
        if self.outs:
            return self.given_out
        return tuple(results) if len(results) > 1 else results[0] if results else []


class ListTarget(NamedTuple):
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


@dataclass(frozen=True, slots=True)
class ListStep:
    """One launch."""

    run: Callable[[bytes], None]
    name: str
    packer: ListPacker
    # For each operand of the kernel: picks the addresses of its tensors out of all.
    operands: tuple[Callable[[Sequence[int]], Sequence[int]], ...]
    # Inputs passed by value: slots among the call's tensors and numbers, or -1 - k for the k-th constant.
    numbers: tuple[int, ...]


class Extent(NamedTuple):
    """What of a tensor decides whether it shares memory."""

    # From its first element to the end of its last one.
    size_bytes: int
    position: int
    itemsize: int
    is_written: bool


_SIZE = operator.itemgetter(0)


class _Memory(NamedTuple):
    """Where the tensors of a call were, and the tables made of that."""

    addresses: list[int]
    tables: list[bytes]


@dataclass(slots=True)
class ListRecord:
    """What is left of a call. Threads may share it."""

    # Keeps its id alive.
    owner: object
    # Returns None for tensors and numbers that are not like the call's. None: it cannot be asked.
    guard: Callable[[tuple[Any, ...]], Any] | None
    # The grad mode of the call, where it decides what autograd records.
    grad_mode: bool | None
    # None of them: all positions are ordinary calls, in order, and there is nothing of what follows.
    steps: tuple[ListStep, ...] = ()
    # Picks the tensors, each once, out of all tensors and numbers; one extent for each.
    pick: Callable[[Sequence[Any]], Sequence[torch.Tensor]] = tuple
    extents: tuple[Extent, ...] = ()
    # How many outputs there are; output, position and arguments of torch.empty_strided of each new tensor.
    output_count: int = 0
    allocations: tuple[tuple[int, int, Buffer, torch.device], ...] = ()
    constants: tuple[Any, ...] = ()
    # Positions that are ordinary calls.
    plain: tuple[int, ...] = ()
    memory: _Memory | None = field(default=None, repr=False)

    def replay(self, call: ListCall, flat: tuple[Any, ...]) -> Any:
        """Make a call that is like the recorded one; None if it is not, and nothing was done."""
        is_other = self.grad_mode is not None and torch.is_grad_enabled() is not self.grad_mode
        if self.guard is None or is_other or self.guard(flat) is None:
            return None
        return self.run(call, flat)

    def run(self, call: ListCall, flat: tuple[Any, ...]) -> Any:
        """Make the call: by ordinary ones, in order, if tensors share memory, or a number is none of the kernels'."""
        if not self.steps:
            return call.run_plainly(range(call.count))
        tensors = self.pick(flat)
        addresses = list(map(torch.Tensor.data_ptr, tensors))
        memory = self.memory
        if memory is None or memory.addresses != addresses:
            if call.outs and not are_apart(addresses, self.extents):
                return call.run_plainly(range(call.count))
            memory = None
        results: list[list[Any]] = [[None] * call.count for _ in range(self.output_count)]
        made = []
        for output, position, buffer, device in self.allocations:
            results[output][position] = buffer.allocate(device)
            made.append(results[output][position])
        if memory is None or made:
            everything = addresses + [item.data_ptr() for item in made]
            tables = [step.packer.pack_tables([pick(everything) for pick in step.operands]) for step in self.steps]
            # In one assignment: another thread finds what belongs together.
            memory = _Memory(addresses, tables)
            self.memory = None if made else memory
        try:
            packed = [
                step.packer.pack(tables, [number_of(self._item(flat, slot)) for slot in step.numbers])
                for step, tables in zip(self.steps, memory.tables, strict=True)
            ]
        except struct.error:
            return call.run_plainly(range(call.count))
        for step, arguments in zip(self.steps, packed, strict=True):
            start(step.run, step.name, arguments)
        if call.outs:
            # Autograd must see that what it may have saved was written to.
            pairs = zip(tensors, self.extents, strict=True)
            torch.autograd.graph.increment_version([item for item, extent in pairs if extent.is_written])
        return call.run_plainly(self.plain, results)

    def _item(self, flat: Sequence[Any], slot: int) -> Any:
        return flat[slot] if slot >= 0 else self.constants[-1 - slot]


def are_apart(addresses: Sequence[int], extents: Sequence[Extent]) -> bool:
    """Whether no tensor that is written shares memory: except all of it, with an input of its own position."""
    # Mostly none shares any: a question for all at once.
    sizes = map(_SIZE, extents)
    begins, ends = zip(*sorted(zip(addresses, map(operator.add, addresses, sizes), strict=True)), strict=True)
    if all(map(operator.le, ends, begins[1:])):
        return True
    ranges = [
        (address, address + extent.size_bytes, *extent[1:])
        for address, extent in zip(addresses, extents, strict=True)
        if extent.size_bytes
    ]
    # The farthest ends so far: of all, of what is written, and of all that are not the same memory in one position.
    end = written_end = others_end = 0
    before: tuple[int, ...] = ()
    for begin, own_end, position, itemsize, is_written in sorted(ranges):
        own = (begin, own_end, position, itemsize)
        others_end = others_end if own == before else end
        if begin < written_end or (is_written and begin < others_end):
            return False
        before, end = own, max(end, own_end)
        written_end = max(written_end, own_end if is_written else 0)
    return True
