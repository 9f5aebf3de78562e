"""What a launcher keeps of a call: how to recognise one like it, what to allocate, and its launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch._C._dynamo import guards

from fuser.cxx.functor import is_steady
from fuser.geometry import Flat
from fuser.plan import Plan, Step

__all__ = ["MISSING", "NUMBER_TYPES", "TENSOR_TYPES", "Recorded", "Scalars", "allocations", "pack_step"]

Scalars = Mapping[str, Any]
# Where there is neither a default value nor a constant.
MISSING: Any = object()

TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)
NUMBER_TYPES = (bool, int, float, complex)
# torch.compile's allocators: they take (shape, strides, dtype), use the current device and skip the dispatcher.
_ALLOCATE: dict[str, Any] = {kind: getattr(guards, f"_empty_strided_{kind}") for kind in ("cpu", "cuda")}


class Recorded(NamedTuple):
    """What a launcher keeps of a call."""

    # Says whether tensors (inputs, then ``out``) are like the call's.
    check: Callable[..., bool]
    # The settings' generation under which the call was planned; in another one the record is stale.
    generation: int
    # Whether the record holds with grad mode on only (True), off only (False), or either way.
    grad_mode: bool | None = None
    # Function and arguments that make each output; empty with ``out``.
    allocations: tuple[tuple[Callable[..., torch.Tensor], tuple[Any, ...]], ...] = ()
    # How many of the allocated tensors are the call's value.
    result_count: int = 0
    # One tuple per launch, see ``pack_step``.
    packed: tuple[tuple[Any, ...], ...] = ()
    # The GPU that must be current, and whether the kernels are CUDA's.
    device_index: int = 0
    is_cuda: bool = False
    # The plan's steps, kept alive with the record.
    steps: tuple[Step, ...] = ()
    # In place of all that: what is called with the inputs; its result is the call's value.
    through: Callable[..., Any] | None = None
    # Values elsewhere that the call relies on: a dict or another object, a name, and what has to be found there.
    reads: tuple[tuple[Any, str, Any], ...] = ()
    # In C the record serves calls of other sizes, too: any if it calls ``through``, else those whose tensors with
    # dimensions have the same sizes, at least two elements, and the same strides, and lie densely. Empty for records
    # that hold for one size.
    flat: Flat | tuple[()] = ()
    # In C: gives, of other sizes and strides, ``allocations``, ``packed`` and ``steps`` of such a call, or None.
    resize: Callable[..., Any] | None = None
    # In C: a bit for each ``out`` that may be no input, since elements are read after others are written.
    apart: int = 0


def allocations(
    plan: Plan, *, has_out: bool = False
) -> tuple[tuple[Callable[..., torch.Tensor], tuple[Any, ...]], ...]:
    """Return what makes each tensor of a call's, and its arguments: plain tuples, as torch takes no others.

    With ``has_out`` the outputs are given.
    """
    allocate = _ALLOCATE[plan.device.type]
    zeros = _zeros(plan.device)
    made = plan.temporaries if has_out else (*plan.outputs, *plan.temporaries)
    return (
        *((allocate, tuple(item)) for item in made),
        *((zeros, (size,)) for size in plan.workspaces),
    )


@cache
def _zeros(device: torch.device) -> Callable[..., torch.Tensor]:
    # One for all, so that what is recorded can be compared.
    return partial(torch.zeros, dtype=torch.uint8, device=device)


def pack_step(step: Step, input_count: int, template: Any) -> tuple[Any, ...]:
    """Return a step for ``Launcher.add``; ``template`` is the one of its packer.

    Returns:
        The function's address; grid; block; bytes of shared memory; whether it may begin when all blocks of the launch
        before it have; the arguments with addresses and numbers missing; the word where the addresses begin; the
        operands as slots among (inputs, out tensors or allocations); the inputs that are numbers; a letter for each
        number's type; whether to use torch's threads; whether its time does not depend on data; its name.
    """
    launch, packer = step.launch, step.packer
    pointers = (*(input_count + slot for slot in step.outputs), *step.inputs)
    return (
        step.kernel.address,
        launch.grid,
        launch.block,
        launch.shared_bytes,
        launch.follows,
        template,
        packer.first_word,
        pointers,
        step.numbers,
        packer.number_codes,
        launch.is_parallel,
        all(map(is_steady, step.kernel.source.functors)),
        step.name,
    )
