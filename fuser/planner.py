"""Plans a call: what its signature (dtypes, shapes, strides, devices) decides, so that the next call only launches.

Plans are made from descriptions of the arguments, never from their values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fuser.compiler import compile_kernel, register
from fuser.config import config
from fuser.dtypes import Rank, dtype_info, number_dtype
from fuser.errors import (
    ArgumentError,
    CompileError,
    CompilerNotFoundError,
    DeviceError,
    FallbackError,
    UnsupportedError,
)
from fuser.fused_kernel import ArgumentPacker, FusedKernel
from fuser.kernel_spec import (
    MAX_INPUTS,
    MAX_OUTPUTS,
    ArgSpec,
    InputSpec,
    KernelSpec,
    ValueLayout,
    infer_layouts,
    infer_typing,
)
from fuser.layout import IterationSpace, Shape, Strides, broadcast_strides, build_iteration_space

__all__ = [
    "VECTOR_BYTES",
    "Bound",
    "Plan",
    "Step",
    "can_fuse",
    "common_device",
    "describe",
    "describe_without_memory",
    "input_specs",
    "make_plan",
    "plan_texts",
    "set_can_fuse",
]

# Offsets up to here fit an int with room for one block's worth of threads.
MAX_NARROW_OFFSET = 2**31 - 2**16
VECTOR_BYTES = 16
# Rows of fewer elements than this are not worth a loop of their own on the CPU.
CPU_SHORT_ROW = 32

_NUMBERS = (bool, int, float, complex)
_can_fuse = {"cpu": True, "cuda": True}


class Bound(NamedTuple):
    """Description of one input or ``out=`` tensor: all that a plan may depend on."""

    # Python type for a number, torch.Tensor for a tensor.
    kind: type
    dtype: torch.dtype | None = None
    shape: Shape = ()
    strides: Strides = ()
    device: torch.device | None = None
    # Whether vectors of VECTOR_BYTES can be read at its address.
    is_aligned: bool = True


@dataclass(frozen=True, slots=True)
class Step:
    """One launch of a plan."""

    kernel: FusedKernel
    packer: ArgumentPacker
    # Outputs written and inputs read, in the order of the kernel's operands; inputs passed by value.
    outputs: tuple[int, ...]
    inputs: tuple[int, ...]
    numbers: tuple[int, ...]
    numel: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What a call signature decides."""

    device: torch.device
    # Shape, strides and dtype of each output.
    outputs: tuple[tuple[Shape, Strides, torch.dtype], ...]
    steps: tuple[Step, ...]
    # Why the group runs in eager torch instead; empty when it is fused.
    fallback_reason: str = ""


def can_fuse(device_type: str) -> bool:
    """Whether groups are fused on this type of device; elsewhere they run in eager torch."""
    return _can_fuse.get(device_type, False)


def set_can_fuse(device_type: str, value: bool) -> bool:
    """Switch fusion on a type of device on or off for plans made from now on; return the former value."""
    before = _can_fuse[device_type]
    _can_fuse[device_type] = value
    return before


def describe(item: Any) -> Bound:
    """Describe one input: a tensor or a Python number.

    Raises:
        ArgumentError: it is neither.
    """
    if isinstance(item, torch.Tensor):
        aligned = item.device.type != "cuda" or item.data_ptr() % VECTOR_BYTES == 0
        return Bound(torch.Tensor, item.dtype, tuple(item.shape), item.stride(), item.device, aligned)
    for kind in _NUMBERS:
        if isinstance(item, kind):
            return Bound(kind)
    raise ArgumentError(f"expected a tensor or a Python number, got {type(item).__name__}")


def make_plan(
    spec: KernelSpec,
    inputs: Sequence[Bound],
    out: Sequence[torch.Tensor] | None = None,
    *,
    allow_fallback: bool = True,
) -> Plan:
    """Plan a call from descriptions, compiling what is missing.

    Raises:
        As ``run``. UnsupportedError leaves only when no fallback is allowed: else it is the plan's fallback reason.
    """
    device = common_device(spec, inputs)
    layouts = infer_layouts(spec.group, [ValueLayout(item.shape, item.strides) for item in inputs])
    try:
        return _plan_kernels(spec, inputs, out, device, layouts)
    except (UnsupportedError, CompileError) as error:
        if not allow_fallback:
            raise
        if spec.fallback.missing:
            if isinstance(error, CompileError | CompilerNotFoundError):
                raise
            name = spec.fallback.missing[0]
            raise FallbackError(f"cannot fuse: {error}; and {name!r} has no eager version to fall back to") from error
        return Plan(device, (), (), fallback_reason=str(error).splitlines()[0])


def common_device(spec: KernelSpec, inputs: Sequence[Bound]) -> torch.device:
    """Return the device of a call; 0-dim CPU tensors go along with any.

    Raises:
        DeviceError: tensors on two devices. ArgumentError: no tensor at all.
    """
    names = ", ".join(dict.fromkeys(item.function.name for item in spec.group.applications))
    tensors = [item for item in inputs if item.device is not None]
    if not tensors:
        raise ArgumentError(f"{names}: needs at least one tensor")
    found = {item.device for item in tensors if item.shape or item.device.type != "cpu"}  # type: ignore[union-attr]
    if len(found) > 1:
        first, second = sorted(map(str, found))[:2]
        raise DeviceError(
            f"{names}: expected all tensors to be on the same device, but found at least two devices, "
            f"{first} and {second}!"
        )
    device = found.pop() if found else tensors[0].device
    assert device is not None, "tensors have devices"
    return device


def input_specs(inputs: Sequence[Bound], device: torch.device) -> list[InputSpec]:
    """Return dtype and rank of each input; the strides' class is filled in per kernel."""
    specs = []
    default = torch.get_default_dtype()
    for item in inputs:
        if item.dtype is None:
            specs.append(InputSpec(number_dtype(item.kind, default), Rank.NUMBER, item.kind))
        else:
            dtype_info(item.dtype)
            rank = Rank.TENSOR if item.shape else Rank.ZERO_DIM
            by_value = item.device is not None and item.device.type == "cpu" and device.type != "cpu"
            specs.append(InputSpec(item.dtype, rank, _number_kind(item.dtype) if by_value else None))
    return specs


def arg_spec(
    spec: KernelSpec,
    inputs: Sequence[Bound],
    specs: Sequence[InputSpec],
    device_type: str,
    outputs: Sequence[tuple[ValueLayout, torch.dtype, bool]],
) -> tuple[ArgSpec, IterationSpace]:
    """Return what one kernel's text depends on, and its loop nest.

    Args:
        spec: the kernel's spec; its outputs all have one shape.
        inputs: descriptions of all inputs.
        specs: their dtypes and ranks.
        device_type: "cuda" or "cpu".
        outputs: layout, dtype and alignment of each output.
    """
    shape = outputs[0][0].shape
    used = spec.group.used_inputs()
    pointers = [index for index in used if specs[index].number is None]
    strides = [layout.strides for layout, _, _ in outputs]
    strides += [broadcast_strides(inputs[index].shape, inputs[index].strides, shape) for index in pointers]
    space = build_iteration_space(shape, strides)
    if space.numel == 1:
        # One element of everything: the dense kernel serves.
        space = IterationSpace((1,), ((1,),) * len(strides))
    inner = [min(operand[0], 2) for operand in space.strides]
    if device_type == "cpu" and len(space.sizes) > 1 and space.sizes[0] < CPU_SHORT_ROW:
        # Vector loops of a few elements: kernels gather them into longer ones, like operands without a dense row.
        inner = [2] * len(inner)
    by_index = dict(zip(pointers, inner[len(outputs) :], strict=True))
    filled: list[InputSpec | None] = [None] * len(inputs)
    for index in used:
        item = specs[index]
        filled[index] = InputSpec(item.dtype, item.rank, item.number, by_index.get(index, 0))
    dtypes = [dtype for _, dtype, _ in outputs] + [specs[index].dtype for index in pointers]
    aligned = [ok for _, _, ok in outputs] + [inputs[index].is_aligned for index in pointers]
    vector = _vector_width(space, [dtype.itemsize for dtype in dtypes], aligned) if device_type == "cuda" else 1
    reach = max(
        sum((size - 1) * stride for size, stride in zip(space.sizes, operand, strict=True)) for operand in space.strides
    )
    args = ArgSpec(
        device_type=device_type,
        inputs=tuple(filled),
        outputs=tuple(inner[: len(outputs)]),
        rank=len(space.sizes),
        vector=vector,
        wide_index=max(reach, space.numel) > MAX_NARROW_OFFSET,
        default_dtype=torch.get_default_dtype(),
        settings=config.code_key(),
    )
    return args, space


def _vector_width(space: IterationSpace, itemsizes: Sequence[int], aligned: Sequence[bool]) -> int:
    """Return how many elements one thread can move with one access of each operand; 1 when some operand cannot.

    Operands with innermost stride 0 are read element by element and do not count.
    """
    moving = [place for place, strides in enumerate(space.strides) if strides[0]]
    width = VECTOR_BYTES // max((itemsizes[place] for place in moving), default=VECTOR_BYTES)
    for place in moving:
        inner, *outer = space.strides[place]
        if inner != 1 or not aligned[place] or any(stride % width for stride in outer):
            return 1
    # A kernel of one dimension has a tail; with more, each row is a whole number of vectors.
    return width if len(space.sizes) == 1 or space.sizes[0] % width == 0 else 1


def plan_texts(
    spec: KernelSpec, inputs: Sequence[Any], device: torch.device | None
) -> list[tuple[KernelSpec, ArgSpec]]:
    """Return what the kernels of a call would be generated from; ``device`` overrides where the tensors are."""
    described = [describe_without_memory(item, device or torch.device("cpu")) for item in inputs]
    if device is not None:
        described = [item._replace(device=device) if item.device is not None else item for item in described]
    where = common_device(spec, described)
    layouts = infer_layouts(spec.group, [ValueLayout(item.shape, item.strides) for item in described])
    specs = input_specs(described, where)
    planned = _planned_outputs(spec, specs, layouts)
    written = [(ValueLayout(shape, strides), dtype, True) for shape, strides, dtype in planned]
    return [(part.spec, part.args) for part in _parts(spec, described, specs, where, written)]


@dataclass(frozen=True, slots=True)
class _Part:
    """One kernel of a plan, before it is compiled."""

    spec: KernelSpec
    args: ArgSpec
    space: IterationSpace
    # Outputs of the whole group that it writes.
    places: tuple[int, ...]


def _planned_outputs(
    spec: KernelSpec, specs: Sequence[InputSpec], layouts: Sequence[ValueLayout]
) -> tuple[tuple[Shape, Strides, torch.dtype], ...]:
    typing = infer_typing(spec.group, specs, torch.get_default_dtype())
    return tuple((layouts[value].shape, layouts[value].strides, typing.values[value]) for value in spec.group.outputs)


def _parts(
    spec: KernelSpec,
    inputs: Sequence[Bound],
    specs: Sequence[InputSpec],
    device: torch.device,
    written: Sequence[tuple[ValueLayout, torch.dtype, bool]],
) -> Iterator[_Part]:
    for places in _launches(spec, [layout.shape for layout, _, _ in written]):
        part = spec if len(places) == len(written) else register(spec.group.select_outputs(places))
        args, space = arg_spec(part, inputs, specs, device.type, [written[place] for place in places])
        yield _Part(part, args, space, tuple(places))


def _plan_kernels(
    spec: KernelSpec,
    inputs: Sequence[Bound],
    out: Sequence[torch.Tensor] | None,
    device: torch.device,
    layouts: Sequence[ValueLayout],
) -> Plan:
    specs = input_specs(inputs, device)
    planned = _planned_outputs(spec, specs, layouts)
    if device.type == "meta":
        return Plan(device, planned, ())
    if not can_fuse(device.type):
        known = device.type in _can_fuse
        raise UnsupportedError(f"fusion on {device.type} is switched off" if known else f"device {device.type!r}")
    written = [(ValueLayout(shape, strides), dtype, True) for shape, strides, dtype in planned]
    if out is not None and len(out) == len(planned):
        # A tensor of another shape or dtype is dealt with when the call is checked.
        for place, (tensor, (layout, dtype, _)) in enumerate(zip(out, written, strict=True)):
            if tuple(tensor.shape) == layout.shape:
                own = describe(tensor)
                written[place] = (ValueLayout(own.shape, own.strides), dtype, own.is_aligned)
    steps = []
    for part in _parts(spec, inputs, specs, device, written):
        if part.space.numel == 0:
            continue
        kernel = compile_kernel(part.spec, part.args, device.index)
        operands = kernel.source.operands
        steps.append(
            Step(
                kernel=kernel,
                packer=ArgumentPacker(kernel.source, part.space),
                outputs=part.places,
                inputs=tuple(operand.index for operand in operands if not operand.is_output),
                numbers=tuple(index for index, _ in kernel.source.numbers),
                numel=part.space.numel,
            )
        )
    return Plan(device, planned, tuple(steps))


def _launches(spec: KernelSpec, shapes: Sequence[Shape]) -> list[list[int]]:
    # Outputs of one shape share a launch, up to the bound on outputs.
    if len(spec.group.used_inputs()) > MAX_INPUTS:
        raise UnsupportedError(f"more than {MAX_INPUTS} inputs in one launch")
    by_shape: dict[Shape, list[list[int]]] = {}
    for place, shape in enumerate(shapes):
        parts = by_shape.setdefault(shape, [[]])
        if len(parts[-1]) == MAX_OUTPUTS:
            parts.append([])
        parts[-1].append(place)
    return [part for parts in by_shape.values() for part in parts]


def describe_without_memory(item: Any, device: torch.device) -> Bound:
    """Describe one input that may be fake or meta; meta tensors count as living on ``device``."""
    if not isinstance(item, torch.Tensor):
        return describe(item)
    where = device if item.device.type == "meta" else item.device
    return Bound(torch.Tensor, item.dtype, tuple(item.shape), tuple(item.stride()), where)


def _number_kind(dtype: torch.dtype) -> type:
    if dtype.is_complex:
        return complex
    if dtype.is_floating_point:
        return float
    return bool if dtype is torch.bool else int
