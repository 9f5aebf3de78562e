"""``Plan``: what the signature of a call decides, and how one of its launches is started."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd import profiler

from fuser.fused_kernel import ArgumentPacker, FusedKernel
from fuser.geometry import Flat, Launch
from fuser.graph import FusionGroup
from fuser.layout import Shape, Strides

if TYPE_CHECKING:
    from fuser.eager_program import EagerCall

__all__ = ["IN_THIS_PROCESS", "Buffer", "Plan", "Step", "event_name", "number_of", "start"]

# How many functors the name of a launch has.
MAX_NAMES = 8
# Until when a plan holds that is of no use to later processes: a compiler that took too long here may not there.
IN_THIS_PROCESS = sys.float_info.max


class Plan(NamedTuple):
    """What a call signature decides."""

    device: torch.device
    outputs: tuple[Buffer, ...]
    steps: tuple[Step, ...]
    # What one step writes and a later one reads.
    temporaries: tuple[Buffer, ...] = ()
    # After them, what kernels have to themselves, which holds zeros at first: bytes of each.
    workspaces: tuple[int, ...] = ()
    # Why the group runs in eager torch instead; empty when it is fused.
    fallback_reason: str = ""
    # What runs then in repeated calls, once there was one.
    eager: EagerCall | None = None
    # The one application that this is about: the rest of the group may be fused around it. -1: all of it is; as many
    # as there are: its halves may be fused.
    obstacle: int = -1
    # Whether torch's own kernel is what was asked for: nobody is warned.
    is_expected: bool = False
    # When to look again whether that still holds, in seconds of time.monotonic(). Infinity: no later process need look
    # either; IN_THIS_PROCESS: they all do.
    until: float = math.inf
    # The torch.get_default_dtype() it was made under, where another one would make another plan.
    default_dtype: torch.dtype | None = None
    # Of the settings it was made under.
    generation: int = 0
    # Where ``out`` is given, for each whether it may be an input, element for element: it is written after it is read.
    in_place: tuple[bool, ...] = ()
    # How its one launch depends on the number of elements, where nothing else does.
    flat: Flat | None = None

    def allocate(self, out: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Return what the steps write: the outputs, new ones unless given, then temporaries and workspaces."""
        buffers = self.temporaries if out is not None else self.outputs + self.temporaries
        made = [*(out or ()), *(item.allocate(self.device) for item in buffers)]
        return made + [torch.zeros(size, dtype=torch.uint8, device=self.device) for size in self.workspaces]


class Buffer(NamedTuple):
    """A tensor to allocate."""

    shape: Shape
    # In elements.
    strides: Strides
    dtype: torch.dtype

    def allocate(self, device: torch.device) -> torch.Tensor:
        """Return a new tensor, which holds anything."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class Step:
    """One launch of a plan."""

    kernel: FusedKernel
    launch: Launch
    packer: ArgumentPacker
    # In the order of the kernel's operands: what is written, as indices into the call's outputs and, after them, its
    # temporaries; what is read, into its inputs and, after them, all that can be written; inputs passed by value.
    outputs: tuple[int, ...]
    inputs: tuple[int, ...]
    numbers: tuple[int, ...]
    # What profilers call it.
    name: str
    # The GPU that it runs on.
    device_index: int
    # Launches with packed arguments; ``start`` does so in sight of profilers.
    run: Callable[[bytes], None] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "run", self.kernel.bind(self.launch, self.device_index))

    def pack(self, inputs: Sequence[Any], written: Sequence[torch.Tensor]) -> bytes:
        """Return the arguments of a launch.

        Args:
            inputs: the call's, and after them all that can be written.
            written: the outputs, then the temporaries and workspaces.

        Raises:
            struct.error: an integer does not fit in 64 bits.
        """
        addresses = [written[slot].data_ptr() for slot in self.outputs]
        addresses += [inputs[index].data_ptr() for index in self.inputs]
        return self.packer.pack(addresses, [number_of(inputs[index]) for index in self.numbers])

    def start(self, arguments: bytes) -> None:
        """Launch with packed arguments, as an event of torch's profiler (a range of NVTX) where that is on."""
        start(self.run, self.name, arguments)


def number_of(item: Any) -> Any:
    """Return the number that an input is, or a 0-dim tensor holds."""
    return item.item() if isinstance(item, torch.Tensor) else item


def start(run: Callable[[bytes], None], name: str, arguments: bytes) -> None:
    """Launch a kernel, as an event of torch's profiler (a range of NVTX) where that is on."""
    if profiler._is_profiler_enabled:
        with torch._C._profiler._RecordFunctionFast(name):
            run(arguments)
    else:
        run(arguments)


def event_name(group: FusionGroup) -> str:
    """Return what profilers call a launch, such as ``fuser::axpy+relu``."""
    names = group.names()
    rest = [f"{len(names) - MAX_NAMES} more"] if len(names) > MAX_NAMES else []
    return "fuser::" + "+".join(names[:MAX_NAMES] + rest)
