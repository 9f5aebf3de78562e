"""Plans a call: what its signature (dtypes, shapes, strides, devices) decides, so that the next call only launches.

Plans are made from descriptions of the arguments, never from their values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from fuser.access import VECTOR_BYTES, Walk, plan_walk
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
from fuser.geometry import Launch
from fuser.graph import FusionGroup
from fuser.kernel_spec import (
    ArgSpec,
    InputSpec,
    KernelSpec,
    ValueLayout,
    infer_layouts,
    infer_typing,
)
from fuser.layout import IterationSpace, Shape, Strides, broadcast_strides, build_iteration_space
from fuser.sections import cut_group, group_outputs
from fuser.tuning.table import tuned

__all__ = [
    "Bound",
    "Plan",
    "Step",
    "can_fuse",
    "common_device",
    "describe",
    "describe_without_memory",
    "follows_default_dtype",
    "input_specs",
    "make_plan",
    "plan_texts",
    "set_can_fuse",
    "value_layouts",
]

# Offsets up to here fit an int with room for one block's worth of threads.
MAX_NARROW_OFFSET = 2**31 - 2**16
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
    launch: Launch
    packer: ArgumentPacker
    # Launches with packed arguments.
    run: Callable[[bytes], None]
    # In the order of the kernel's operands: places written, among the call's outputs and, after them, its temporaries;
    # places read, among its inputs and, after them, all that can be written; inputs passed by value.
    outputs: tuple[int, ...]
    inputs: tuple[int, ...]
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a call signature decides."""

    device: torch.device
    # Shape, strides and dtype of each output.
    outputs: tuple[tuple[Shape, Strides, torch.dtype], ...]
    steps: tuple[Step, ...]
    # The same of what one step writes and a later one reads.
    temporaries: tuple[tuple[Shape, Strides, torch.dtype], ...] = ()
    # Why the group runs in eager torch instead; empty when it is fused.
    fallback_reason: str = ""
    # Whether another torch.get_default_dtype() would make another plan.
    follows_default_dtype: bool = False
    # Of the settings it was made under.
    generation: int = 0


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
    for item, bound in zip(spec.group.inputs, inputs, strict=True):
        # A kernel reads one element of it, whatever it has.
        if item.is_scalar and bound.shape:
            raise ArgumentError(f"scalar {item.name!r} has shape {list(bound.shape)}, not []")
    device = common_device(spec, inputs)
    layouts = infer_layouts(spec.group, value_layouts(inputs))
    try:
        return _plan_kernels(spec, inputs, out, device, layouts)
    except (UnsupportedError, CompileError) as error:
        if not allow_fallback:
            raise
        # A text that is wrong stays an error, unless the user gave another version of it.
        if isinstance(error, CompileError) and not spec.fallback.is_given:
            raise
        obstacles = spec.fallback.obstacles
        if obstacles:
            if isinstance(error, CompilerNotFoundError):
                raise
            name, obstacle = obstacles[0]
            raise FallbackError(
                f"cannot fuse: {error}; and {name!r} has no eager version to fall back to: {obstacle}"
            ) from error
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


def value_layouts(inputs: Sequence[Bound]) -> list[ValueLayout]:
    """Return shape, strides and dtype of each input."""
    return [ValueLayout(item.shape, item.strides, item.dtype is None, item.dtype) for item in inputs]


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
    walk = Walk(space)
    if device_type == "cuda":
        sizes = [dtype.itemsize for dtype in dtypes]
        rounds = rounds_between(spec.group, config.numerics)
        walk = plan_walk(space, sizes, aligned, len(outputs), rounds=rounds)
    reach = max(
        sum((size - 1) * stride for size, stride in zip(space.sizes, operand, strict=True)) for operand in space.strides
    )
    args = ArgSpec(
        device_type=device_type,
        inputs=tuple(filled),
        outputs=tuple(inner[: len(outputs)]),
        rank=len(space.sizes),
        vector=walk.vector,
        wide_index=max(reach, space.numel) > MAX_NARROW_OFFSET,
        default_dtype=torch.get_default_dtype(),
        settings=config.code_key(),
        accesses=walk.accesses,
        tuning=walk.tuning,
    )
    return args, walk.space


def rounds_between(group: FusionGroup, numerics: str) -> bool:
    """Whether a kernel rounds values on their way from one functor to the next."""
    return numerics == "strict" and len(group.applications) > 1


def plan_texts(
    spec: KernelSpec, inputs: Sequence[Any], device: torch.device | None
) -> list[tuple[KernelSpec, ArgSpec]]:
    """Return what the kernels of a call would be generated from; ``device`` overrides where the tensors are."""
    described = [describe_without_memory(item, device or torch.device("cpu")) for item in inputs]
    if device is not None:
        described = [item._replace(device=device) if item.device is not None else item for item in described]
    where = common_device(spec, described)
    layouts = infer_layouts(spec.group, value_layouts(described))
    values = _describe_values(spec, described, where, layouts)
    return [(part.spec, part.args) for part in _parts(spec, values, where, _written(spec, values))]


class _Value(NamedTuple):
    """One value of a group, were it in memory."""

    bound: Bound
    spec: InputSpec


# Layout, dtype and alignment of one output.
_Output = tuple[ValueLayout, torch.dtype, bool]


@dataclass(frozen=True, slots=True)
class _Part:
    """One kernel of a plan, before it is compiled."""

    spec: KernelSpec
    args: ArgSpec
    space: IterationSpace
    # Values of the whole group that its inputs and its outputs are.
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    # For the outputs of the whole group, which of them; else -1.
    places: tuple[int, ...]


def _describe_values(
    spec: KernelSpec, inputs: Sequence[Bound], device: torch.device, layouts: Sequence[ValueLayout]
) -> list[_Value]:
    # The inputs, then what the applications make.
    specs = input_specs(inputs, device)
    typing = infer_typing(spec.group, specs, torch.get_default_dtype())
    made = list(zip(typing.values, typing.ranks, layouts, strict=True))[len(inputs) :]
    return [_Value(*item) for item in zip(inputs, specs, strict=True)] + [
        _Value(Bound(torch.Tensor, dtype, layout.shape, layout.strides, device), InputSpec(dtype, rank))
        for dtype, rank, layout in made
    ]


def _written(spec: KernelSpec, values: Sequence[_Value]) -> list[_Output]:
    return [_output(values[value]) for value in spec.group.outputs]


def _output(value: _Value) -> _Output:
    return ValueLayout(value.bound.shape, value.bound.strides), value.spec.dtype, True


def _parts(
    spec: KernelSpec, values: Sequence[_Value], device: torch.device, written: Sequence[_Output]
) -> Iterator[_Part]:
    layouts = [ValueLayout(item.bound.shape, item.bound.strides) for item in values]
    by_value = {value for value, item in enumerate(values) if item.spec.number is not None}
    for section in cut_group(spec.group, layouts, by_value):
        own = spec if section.group is spec.group else register(section.group)
        places = [place for place, value in enumerate(spec.group.outputs) if value in section.outputs]
        outputs = [written[place] for place in places]
        outputs += [_output(values[value]) for value in section.outputs[len(places) :]]
        places += [-1] * (len(outputs) - len(places))
        inputs = [values[value] for value in section.inputs]
        for chosen in group_outputs([layout.shape for layout, _, _ in outputs]):
            part = own if len(chosen) == len(outputs) else register(own.group.select_outputs(chosen))
            bounds, specs = [item.bound for item in inputs], [item.spec for item in inputs]
            args, space = arg_spec(part, bounds, specs, device.type, [outputs[index] for index in chosen])
            yield _Part(
                part,
                args,
                space,
                section.inputs,
                tuple(section.outputs[index] for index in chosen),
                tuple(places[index] for index in chosen),
            )


def _plan_kernels(
    spec: KernelSpec,
    inputs: Sequence[Bound],
    out: Sequence[torch.Tensor] | None,
    device: torch.device,
    layouts: Sequence[ValueLayout],
) -> Plan:
    values = _describe_values(spec, inputs, device, layouts)
    written = _written(spec, values)
    planned = tuple((layout.shape, layout.strides, dtype) for layout, dtype, _ in written)
    if device.type == "meta":
        return Plan(device, planned, ())
    if not can_fuse(device.type):
        known = device.type in _can_fuse
        raise UnsupportedError(f"fusion on {device.type} is switched off" if known else f"device {device.type!r}")
    if out is not None and len(out) == len(planned):
        # A tensor of another shape or dtype is dealt with when the call is checked.
        for place, (tensor, (layout, dtype, _)) in enumerate(zip(out, written, strict=True)):
            if tuple(tensor.shape) == layout.shape:
                own = describe(tensor)
                written[place] = (ValueLayout(own.shape, own.strides), dtype, own.is_aligned)
    # Where each value that some step writes is, among the outputs and the temporaries.
    homes = {value: place for place, value in reversed(list(enumerate(spec.group.outputs)))}
    temporaries: list[tuple[Shape, Strides, torch.dtype]] = []
    steps = []
    for part in _parts(spec, values, device, written):
        for value in part.outputs:
            if value not in homes:
                homes[value] = len(planned) + len(temporaries)
                bound = values[value].bound
                temporaries.append((bound.shape, bound.strides, values[value].spec.dtype))
        if part.space.numel == 0:
            continue
        args = part.args
        if device.type == "cuda":
            args = tuned(part.spec, args, torch.cuda.get_device_name(device.index))
        kernel = compile_kernel(part.spec, args, device.index)
        read = [value if value < len(inputs) else len(inputs) + homes[value] for value in part.inputs]
        operands = kernel.source.operands
        launch = kernel.prepare(part.space)
        steps.append(
            Step(
                kernel=kernel,
                launch=launch,
                run=kernel.bind(launch, device.index or 0),
                packer=ArgumentPacker(kernel.source, part.space),
                outputs=tuple(
                    homes[value] if place < 0 else place for value, place in zip(part.outputs, part.places, strict=True)
                ),
                inputs=tuple(read[operand.index] for operand in operands if not operand.is_output),
                numbers=tuple(read[index] for index, _ in kernel.source.numbers),
            )
        )
    follows = follows_default_dtype(spec, [values[index].spec for index in range(len(inputs))])
    return Plan(device, planned, tuple(steps), tuple(temporaries), follows_default_dtype=follows)


def follows_default_dtype(spec: KernelSpec, specs: Sequence[InputSpec]) -> bool:
    """Whether another torch.get_default_dtype() would change a dtype of the group, for these inputs."""
    # Numbers have a default dtype, too: it counts where no tensor overrules it.
    first, second = (
        infer_typing(spec.group, [_with_default(item, dtype) for item in specs], dtype)
        for dtype in (torch.float32, torch.float64)
    )
    count = len(specs)
    return first.common != second.common or first.values[count:] != second.values[count:]


def _with_default(item: InputSpec, default: torch.dtype) -> InputSpec:
    return replace(item, dtype=number_dtype(item.number, default)) if item.rank is Rank.NUMBER and item.number else item


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
