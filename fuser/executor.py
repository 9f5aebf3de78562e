"""Runs a registered group on tensors: check, plan, find or compile the kernels, allocate, launch.

A *plan* holds everything a call signature (dtypes, shapes, strides, devices) decides, so that the next call with the
same signature only allocates, packs and launches. Plans are made from descriptions, never from tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fuser import counters
from fuser.compiler import compile_kernel, register
from fuser.config import config
from fuser.dtypes import Rank, dtype_info, number_dtype
from fuser.errors import (
    ArgumentError,
    CompileError,
    CompilerNotFoundError,
    DeviceError,
    FallbackError,
    FuserError,
    GradientError,
    UnsupportedError,
)
from fuser.fused_kernel import ArgumentPacker, FusedKernel
from fuser.kernel_cache import Lru
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
from fuser.outputs import check_out, finish_out

__all__ = [
    "Bound",
    "Plan",
    "Step",
    "can_fuse",
    "describe",
    "make_plan",
    "plan_texts",
    "run",
    "set_can_fuse",
    "set_dispatcher",
    "warm_up",
]

# Offsets up to here fit an int with room for one block's worth of threads.
MAX_NARROW_OFFSET = 2**31 - 2**16
VECTOR_BYTES = 16

_NUMBERS = (bool, int, float, complex)
_can_fuse = {"cpu": True, "cuda": True}
_plans: dict[int, Lru[Plan]] = {}
# Runs a call under tensor subclasses and dispatch modes; fuser.library provides it.
_dispatcher: Callable[[KernelSpec, list[Any]], list[torch.Tensor]] | None = None


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
    """Switch fusion on a type of device on or off; return the former value."""
    before = _can_fuse[device_type]
    _can_fuse[device_type] = value
    _plans.clear()
    return before


def set_dispatcher(dispatcher: Callable[[KernelSpec, list[Any]], list[torch.Tensor]]) -> None:
    """Set what runs calls under tensor subclasses and dispatch modes."""
    global _dispatcher  # noqa: PLW0603 - set once, by fuser.library
    _dispatcher = dispatcher


def run(spec: KernelSpec, inputs: Sequence[Any], out: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
    """Run a group.

    Args:
        spec: a registered group's spec.
        inputs: one tensor or Python number per input of the group.
        out: tensors to write the outputs to, checked as torch checks ``out=``.

    Returns:
        The outputs; ``out`` itself where given.

    Raises:
        ArgumentError, ShapeError, DeviceError: the inputs do not fit.
        CompileError: a functor does not compile.
        GradientError: an input requires grad and the group has no derivative.
        FallbackError: the group can neither be fused nor run in eager torch.
    """
    inputs = list(inputs)
    for tensor in out or ():
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(f"out= takes tensors, got {type(tensor).__name__}")
    unusual = _unusual(spec, inputs, out)
    if unusual is not None:
        return unusual() if out is None else finish_out(out, unusual())
    return run_plain(spec, inputs, out)


def run_plain(spec: KernelSpec, inputs: list[Any], out: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
    """Run a group on plain strided tensors that need no gradient."""
    described = tuple(describe(item) for item in inputs)
    described_out = tuple(describe(item) for item in out) if out is not None else ()
    signature = (described, described_out, config.generation, torch.get_default_dtype())
    plans = _plans.get(spec.key) or _plans.setdefault(spec.key, Lru())
    plan = plans.get(signature)
    if plan is None:
        plan = make_plan(spec, described, out)
        plans.put(signature, plan, config.max_plans)
    if plan.fallback_reason:
        return _run_fallback(spec, inputs, plan.fallback_reason, out)
    if out is not None:
        ready, direct = check_out(plan.outputs, out, inputs)
        if not direct:
            return finish_out(out, run_plain(spec, inputs))
        if ready:
            # Resized: strides are other ones than those planned for.
            return run_plain(spec, inputs, out)
        outputs = list(out)
    else:
        outputs = [
            torch.empty_strided(shape, strides, dtype=dtype, device=plan.device)
            for shape, strides, dtype in plan.outputs
        ]
    for step in plan.steps:
        _launch(spec, step, inputs, outputs, plan.device)
    return outputs


def warm_up(
    spec: KernelSpec, inputs: Sequence[Any], device: torch.device | None = None, *, allow_fallback: bool = True
) -> None:
    """Compile what a call would need, without launching.

    Args:
        spec: a registered group's spec.
        inputs: real, fake or meta tensors, and Python numbers.
        device: where meta tensors will live; the default is the current GPU, or the CPU without one.
        allow_fallback: whether a group that would run in eager torch is fine; else its reason is raised.

    Raises:
        As ``run``; UnsupportedError for a group that would not be fused.
    """
    where = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if where.type == "cuda" and torch.cuda.device_count() == 0:
        raise DeviceError("no CUDA device is available")
    if where == torch.device("cuda"):
        where = torch.device("cuda", torch.cuda.current_device())
    described = [_describe_without_memory(item, where) for item in inputs]
    plan = make_plan(spec, described, allow_fallback=allow_fallback)
    if plan.fallback_reason:
        counters.count_fallback(plan.fallback_reason)


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
    described = [_describe_without_memory(item, device or torch.device("cpu")) for item in inputs]
    if device is not None:
        described = [item._replace(device=device) if item.device is not None else item for item in described]
    where = common_device(spec, described)
    layouts = infer_layouts(spec.group, [ValueLayout(item.shape, item.strides) for item in described])
    planned = _planned_outputs(spec, described, where, layouts)
    written = [(ValueLayout(shape, strides), dtype, True) for shape, strides, dtype in planned]
    return [(part.spec, part.args) for part in _parts(spec, described, where, written)]


@dataclass(frozen=True, slots=True)
class _Part:
    """One kernel of a plan, before it is compiled."""

    spec: KernelSpec
    args: ArgSpec
    space: IterationSpace
    # Outputs of the whole group that it writes.
    places: tuple[int, ...]


def _planned_outputs(
    spec: KernelSpec, inputs: Sequence[Bound], device: torch.device, layouts: Sequence[ValueLayout]
) -> tuple[tuple[Shape, Strides, torch.dtype], ...]:
    typing = infer_typing(spec.group, input_specs(inputs, device), torch.get_default_dtype())
    return tuple((layouts[value].shape, layouts[value].strides, typing.values[value]) for value in spec.group.outputs)


def _parts(
    spec: KernelSpec,
    inputs: Sequence[Bound],
    device: torch.device,
    written: Sequence[tuple[ValueLayout, torch.dtype, bool]],
) -> Iterator[_Part]:
    specs = input_specs(inputs, device)
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
    planned = _planned_outputs(spec, inputs, device, layouts)
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
    for part in _parts(spec, inputs, device, written):
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


def _launch(spec: KernelSpec, step: Step, inputs: list[Any], outputs: list[torch.Tensor], device: torch.device) -> None:
    addresses = [outputs[place].data_ptr() for place in step.outputs]
    addresses += [inputs[index].data_ptr() for index in step.inputs]
    numbers = [_number(inputs[index]) for index in step.numbers]
    try:
        arguments = step.packer.pack(addresses, numbers)
    except struct.error:
        names = [spec.group.inputs[index].name for index in step.numbers]
        raise ArgumentError(f"an integer among {', '.join(names)} does not fit in 64 bits") from None
    step.kernel.launch(arguments, step.numel, device.index or 0)


def _describe_without_memory(item: Any, device: torch.device) -> Bound:
    if not isinstance(item, torch.Tensor):
        return describe(item)
    where = device if item.device.type == "meta" else item.device
    return Bound(torch.Tensor, item.dtype, tuple(item.shape), tuple(item.stride()), where)


def _number(item: Any) -> Any:
    return item.item() if isinstance(item, torch.Tensor) else item


def _number_kind(dtype: torch.dtype) -> type:
    if dtype.is_complex:
        return complex
    if dtype.is_floating_point:
        return float
    return bool if dtype is torch.bool else int


def _run_fallback(
    spec: KernelSpec, inputs: list[Any], reason: str, out: Sequence[torch.Tensor] | None = None
) -> list[torch.Tensor]:
    results = spec.fallback.run(inputs, reason)
    counters.count_fallback(reason)
    return results if out is None else finish_out(out, results)


def _unusual(
    spec: KernelSpec, inputs: list[Any], out: Sequence[torch.Tensor] | None
) -> Callable[[], list[torch.Tensor]] | None:
    # How to run a call that a kernel cannot serve as it is; None for the usual call. Resolves lazy bits in place.
    if torch._C._len_torch_dispatch_stack() > 0:
        return lambda: _dispatch(spec, inputs)
    reason = ""
    needs_grad = False
    for index, item in enumerate(inputs):
        if not isinstance(item, torch.Tensor):
            continue
        if _has_torch_dispatch(item):
            return lambda: _dispatch(spec, inputs)
        needs_grad = needs_grad or item.requires_grad
        if item.layout is not torch.strided or item.is_quantized or item.is_nested:
            kind = "quantized" if item.is_quantized else "nested" if item.is_nested else str(item.layout)
            reason = f"a {kind.removeprefix('torch.')} tensor"
        elif item.is_conj() or item.is_neg():
            inputs[index] = item.resolve_conj().resolve_neg()
    if torch._C._functorch.peek_interpreter_stack() is not None:
        reason = "inside a torch.func transform"
    if needs_grad and torch.is_grad_enabled():
        _check_gradient(spec, out)
        reason = "an input requires grad"
    return (lambda: _run_fallback(spec, inputs, reason)) if reason else None


def _check_gradient(spec: KernelSpec, out: Sequence[torch.Tensor] | None) -> None:
    if out is not None:
        raise GradientError("out= does not support automatic differentiation, but one of the inputs requires grad")
    if spec.fallback.missing:
        name = spec.fallback.missing[0]
        raise GradientError(
            f"an input of {name!r} requires grad, and {name!r} has no derivative: call it under torch.no_grad(), "
            "detach the input, or give jit_fn(..., fallback=) a differentiable function"
        )


def _dispatch(spec: KernelSpec, inputs: list[Any]) -> list[torch.Tensor]:
    if _dispatcher is None:
        raise FuserError("tensor subclasses and dispatch modes need fuser.library")
    return _dispatcher(spec, inputs)


def _has_torch_dispatch(item: torch.Tensor) -> bool:
    kind = type(item)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return False
    return kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl
