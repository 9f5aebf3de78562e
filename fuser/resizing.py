"""Plans for calls of other sizes than those that were planned: the planner runs once on symbols (``fuser.sizes``).

For the second size of a kind of call (the same group, dtypes, ranks, devices, alignment) its plan is written down as a
program of the sizes. Launchers ask it for sizes that they have no record of; what it does not cover is planned as ever,
and adds another program.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch

from fuser.errors import FuserError
from fuser.kernel_cache import Lru
from fuser.kernel_spec import KernelSpec
from fuser.plan import Plan
from fuser.planner import make_plan
from fuser.process import ignoring
from fuser.record import Recorded, allocations, pack_step
from fuser.report import MISTAKES
from fuser.sizes import Deferred, Tape, write_program
from fuser.tensor_desc import TensorDesc

__all__ = ["Resizer", "find_resizer"]

# How many kinds of call are known, and how many programs each has.
MAX_KINDS, MAX_PROGRAMS = 1024, 128

Program: TypeAlias = Callable[[Sequence[int]], Any]


class Resizer:
    """Says what calls launch that differ from one in sizes and strides alone. Threads may share it."""

    def __init__(self, sizes: Sequence[int]) -> None:
        # Of the call it was made for.
        self._first = sizes
        # The tapes of each program, and names that they share.
        self._tapes: list[list[tuple[Tape, Any]]] = []
        self._names: dict[str, str] = {}
        self._programs: tuple[Program, ...] = ()
        self._attempts = 0

    def __call__(self, *sizes: int) -> Any:
        """Return what a call with these sizes and strides of its tensors, in order, allocates and launches.

        As ``allocations``, ``packed`` and ``steps`` of a record; None if it is not known.
        """
        for program in self._programs:
            found = program(sizes)
            if found is not None:
                return found
        return None

    def learn(self, spec: KernelSpec, inputs: Sequence[TensorDesc], recorded: Recorded) -> bool:
        """Learn from a call that was planned and recorded, unless it is the first; return whether anything is known."""
        sizes = _sizes_of(inputs)
        if sizes != self._first and self._attempts < MAX_PROGRAMS and self(*sizes) is None:
            self._attempts += 1
            # What cannot be done with symbols is planned for each size.
            with ignoring(FuserError, *MISTAKES):
                slot, tapes, program = self._find_place(_write_tape(spec, inputs, recorded, self._names))
                assert program(sizes) == (recorded.allocations, recorded.packed, recorded.steps), "as it was planned"
                self._tapes[slot : slot + 1] = [tapes]
                self._programs = (*self._programs[:slot], program, *self._programs[slot + 1 :])
        return bool(self._programs)

    def _find_place(self, made: tuple[Tape, Any]) -> tuple[int, list[tuple[Tape, Any]], Program]:
        # The first program that it can be a path of, or one of its own.
        for slot, tapes in enumerate([*self._tapes, []]):
            program = write_program([*tapes, made])
            if program is not None:
                return slot, [*tapes, made], program
        raise AssertionError("a program has one path")


_resizers: Lru[Resizer] = Lru()


def find_resizer(spec: KernelSpec, inputs: Sequence[TensorDesc], plan: Plan) -> Resizer:
    """Return what serves calls like one that was planned, with other sizes."""
    kinds = tuple(item._replace(shape=(len(item.shape),), strides=()) for item in inputs)
    key = (spec.key, kinds, plan.generation, torch.get_default_dtype())
    found = _resizers.get(key)
    if found is None:
        found = Resizer(_sizes_of(inputs))
        _resizers.put(key, found, MAX_KINDS)
    return found


def _sizes_of(inputs: Sequence[TensorDesc]) -> tuple[int, ...]:
    return tuple(size for item in inputs for size in (*item.shape, *item.strides))


def _write_tape(
    spec: KernelSpec, inputs: Sequence[TensorDesc], recorded: Recorded, names: dict[str, str]
) -> tuple[Tape, Any]:
    tape = Tape(_sizes_of(inputs), names)
    rest: Iterator[Any] = iter(tape.sizes)
    symbols = [
        item._replace(shape=tuple(next(rest) for _ in item.shape), strides=tuple(next(rest) for _ in item.strides))
        for item in inputs
    ]
    # Without a kernel there is no program; and what symbols cannot do is no mistake to report.
    plan = make_plan(spec, symbols, allow_fallback=False)
    packed = []
    for step in plan.steps:
        words = step.packer.words
        packed.append(pack_step(step, len(inputs), Deferred(struct.Struct(f"={len(words)}q").pack, *words)))
    return tape, (allocations(plan), tuple(packed), recorded.steps)
