"""Plans a call: what its signature (dtypes, shapes, strides, devices) decides, so that the next call only launches.

Plans are made from descriptions of the arguments, never from their values, in four steps: describe the values of the
group (``expanded``), cut it into what one launch takes, compile each part, and find each value a slot among outputs and
temporaries.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from fuser import torch_ops as ops
from fuser.abreast import Kernel, side_by_side
from fuser.arg_spec import build_arg_spec, starts_abreast
from fuser.compiler import compile_kernels, map_side_by_side, register
from fuser.config import config
from fuser.errors import (
    ArgumentError,
    CompileError,
    CompilerFailedError,
    CompilerNotFoundError,
    FallbackError,
    NoCompileError,
    UnknownOrderError,
    UnsupportedError,
)
from fuser.expanded import Expanded, expand_call, expand_in_order
from fuser.fallback import Fallback
from fuser.function import Function
from fuser.fused_kernel import ArgumentPacker, FusedKernel
from fuser.geometry import workspace_bytes
from fuser.kernel_spec import ArgSpec, KernelSpec, ValueLayout, infer_layouts
from fuser.layout import IterationSpace, Strides
from fuser.missing import name_warmup
from fuser.order_check import OrderCase, is_kept
from fuser.ordered_access import waiting_parts
from fuser.orders import RowOrder
from fuser.plain_torch import unwatched
from fuser.plan import IN_THIS_PROCESS, Buffer, Plan, Step, event_name
from fuser.process import planning
from fuser.report import is_internal, report
from fuser.row_orders import Orders, order_of_section
from fuser.row_space import written_last
from fuser.sections import cut_group, group_outputs
from fuser.tensor_desc import (
    TensorDesc,
    common_device,
    default_dtype_of,
    describe,
    input_specs,
    name_input,
    value_layouts,
)
from fuser.tuning.table import tuned

__all__ = [
    "FlatCall",
    "ask_lengths",
    "can_fuse",
    "find_in_place",
    "find_texts",
    "make_plan",
    "plan_flat",
    "plan_texts",
    "set_can_fuse",
]

# A compiler that is missing is looked for again after this time.
SEARCH_S = 1.0

_can_fuse = {"cpu": True, "cuda": True}


class FlatCall(NamedTuple):
    """A call whose operands are dense, all in one order, or one element for all."""

    args: ArgSpec
    numel: int
    device: torch.device
    outputs: tuple[Buffer, ...]


def can_fuse(device_type: str) -> bool:
    """Whether groups are fused on this type of device; elsewhere they run in eager torch."""
    return _can_fuse.get(device_type, False)


def set_can_fuse(device_type: str, value: bool) -> bool:
    """Switch fusion on a type of device on or off for plans made from now on; return the former value."""
    before = _can_fuse[device_type]
    _can_fuse[device_type] = value
    return before


@unwatched()
def make_plan(
    spec: KernelSpec, inputs: Sequence[TensorDesc], out: Sequence[TensorDesc] = (), *, allow_fallback: bool = True
) -> Plan:
    """Plan a call from descriptions, compiling what is missing.

    Args:
        spec: a registered group's spec.
        inputs: one per input of the group.
        out: the ``out=`` tensors, if there are any.
        allow_fallback: whether a plan may be to run in eager torch; else the reason is raised.

    Raises:
        As ``run``. UnsupportedError leaves only when no fallback is allowed: else it is the plan's fallback reason.
    """
    for index, (item, bound) in enumerate(zip(spec.group.inputs, inputs, strict=True)):
        # A kernel reads one element of it, whatever it has.
        if item.is_scalar and bound.shape:
            raise ArgumentError(f"{name_input(spec.group, index)} has shape {list(bound.shape)}, not []")
    device = common_device(spec.group, inputs)
    layouts = infer_layouts(spec.group, value_layouts(inputs))
    try:
        return _plan_kernels(spec, inputs, out, device, layouts)
    except (UnsupportedError, CompileError) as error:
        if not allow_fallback:
            raise
        return _plan_fallback(spec, device, error)
    except NoCompileError as error:
        if not config.no_compile:
            raise
        raise NoCompileError(f"{error}; {name_warmup(spec.group, inputs, out)}") from None
    except Exception as error:
        if not allow_fallback or not is_internal(error):
            raise
        return _plan_fallback(spec, device, report(spec, inputs, out, error))


@unwatched()
def find_texts(
    spec: KernelSpec, inputs: Sequence[TensorDesc], out: Sequence[TensorDesc] = (), *, trusts_orders: bool = False
) -> list[tuple[KernelSpec, ArgSpec]]:
    """Return what the kernels of a call on this machine are compiled from; as ``make_plan``, which compiles them.

    With ``trusts_orders``, if torch has the orders that are expected.
    """
    device = common_device(spec.group, inputs)
    layouts = infer_layouts(spec.group, value_layouts(inputs))
    expanded, orders = expand_in_order(spec, inputs, device, layouts)
    if device.type == "meta":
        return []
    _check_can_fuse(device)
    for case in () if trusts_orders else _find_cases(spec, expanded, device, orders):
        _check_order(*case)
    parts = _cut_and_order(expanded, expanded.lay_out(_laid_out_as(out, expanded.outputs)), device, orders)
    return [(part.spec, part.args) for part in parts if not part.space.is_empty]


@unwatched()
def ask_lengths(spec: KernelSpec, inputs: Sequence[TensorDesc]) -> None:
    """Ask sizes of a call, which are symbols, what those have in common that share verdicts on torch's orders.

    Verdicts on ops of several steps are kept by sizes, which nobody is asked for.
    """
    device = common_device(spec.group, inputs)
    expanded, orders = expand_in_order(spec, inputs, device, infer_layouts(spec.group, value_layouts(inputs)))
    for _, case in _find_cases(spec, expanded, device, orders):
        if not case.function.is_composite:
            case.length()


@unwatched()
def find_in_place(spec: KernelSpec, inputs: Sequence[TensorDesc]) -> tuple[bool, ...]:
    """Return for each output of a call whether its kernels may write it over an input, as ``Plan.in_place`` has it.

    Raises:
        As ``find_texts``.
    """
    device = common_device(spec.group, inputs)
    expanded, orders = expand_in_order(spec, inputs, device, infer_layouts(spec.group, value_layouts(inputs)))
    return _find_in_place(expanded, _cut_and_order(expanded, expanded.lay_out(expanded.outputs), device, orders))


@unwatched()
def plan_texts(
    spec: KernelSpec, inputs: Sequence[Any], device: torch.device | None
) -> list[tuple[KernelSpec, ArgSpec]]:
    """Return what the kernels of a call would be generated from; ``device`` overrides where the tensors are."""
    described = [describe(item, device or torch.device("cpu")) for item in inputs]
    if device is not None:
        described = [item._replace(device=device) if item.device is not None else item for item in described]
    where = common_device(spec.group, described)
    layouts = infer_layouts(spec.group, value_layouts(described))
    steps, orders = expand_in_order(spec, described, where, layouts)
    return [(part.spec, part.args) for part in _cut_and_order(steps, steps.lay_out(steps.outputs), where, orders)]


def _plan_kernels(
    spec: KernelSpec,
    inputs: Sequence[TensorDesc],
    out: Sequence[TensorDesc],
    device: torch.device,
    layouts: Sequence[ValueLayout],
    *,
    trusts_orders: bool = False,
) -> Plan:
    with planning():
        expanded, orders = expand_in_order(spec, inputs, device, layouts)
        buffers = tuple(map(_buffer, expanded.outputs))
        if device.type == "meta":
            return Plan(device, buffers, (), in_place=(True,) * len(buffers))
        _check_can_fuse(device)
        cases = [] if trusts_orders else _find_cases(spec, expanded, device, orders)
        outputs = expanded.lay_out(_laid_out_as(out, expanded.outputs))
        parts = list(_cut_and_order(expanded, outputs, device, orders))
        homes, temporaries = _find_homes(expanded, parts, len(inputs))
    workspaces: list[int] = []
    first = len(buffers) + len(temporaries)
    launched = [part for part in parts if not part.space.is_empty]
    kernels = _compile([(part.spec, _tuned(part, device)) for part in launched], device, cases)
    steps = tuple(
        _make_step(part, kernel, device, homes, workspaces, first)
        for part, kernel in zip(launched, kernels, strict=True)
    )
    return Plan(
        device=device,
        outputs=buffers,
        steps=steps,
        temporaries=temporaries,
        workspaces=tuple(workspaces),
        default_dtype=default_dtype_of(spec.group, input_specs(inputs, device)),
        flat=steps[0].kernel.prepare_any() if steps and _holds_for_any_size(spec, parts) else None,
        in_place=_find_in_place(expanded, parts) if out else (),
    )


def _check_can_fuse(device: torch.device) -> None:
    if not can_fuse(device.type):
        known = device.type in _can_fuse
        raise UnsupportedError(f"fusion on {device.type} is switched off" if known else f"device {device.type!r}")


def plan_flat(spec: KernelSpec, inputs: Sequence[TensorDesc], out: Sequence[TensorDesc]) -> FlatCall | None:
    """Describe a call for which one index serves all that one kernel reads and writes; None for any other.

    Arguments as in ``make_plan``; nothing is compiled.

    Raises:
        ArgumentError, ShapeError, DeviceError: the inputs do not fit. UnsupportedError: there is no kernel for them.
    """
    device = common_device(spec.group, inputs)
    if spec.group.has_reduction or spec.group.arranges or not can_fuse(device.type):
        return None
    expanded = expand_call(spec, inputs, device, infer_layouts(spec.group, value_layouts(inputs)))
    outputs = expanded.lay_out(_laid_out_as(out, expanded.outputs))
    parts = list(_cut(expanded, outputs, device, {}))
    if len(parts) != 1 or parts[0].spec is not spec:
        return None
    args, space = parts[0].args, parts[0].space
    if not _is_flat(args):
        return None
    return FlatCall(args, space.numel, device, tuple(map(_buffer, expanded.outputs)))


def _is_flat(args: ArgSpec) -> bool:
    # Whether one index serves all operands.
    used = (item.inner for item in args.inputs if item is not None)
    return args.rank == 1 and args.rows is None and all(inner < 2 for inner in (*used, *args.outputs, *args.counters))


def _holds_for_any_size(spec: KernelSpec, parts: Sequence[_Part]) -> bool:
    # Whether the plan is to launch one kernel that counts elements and knows nothing else of sizes, nor of their order.
    args = parts[0].args
    is_whole = len(parts) == 1 and parts[0].spec is spec and not spec.group.reshapes
    return is_whole and _is_flat(args) and not args.counters and not args.wide_index


def _plan_fallback(spec: KernelSpec, device: torch.device, error: UnsupportedError | CompileError) -> Plan:
    fallback = Fallback(spec.group)
    reason = str(error).splitlines()[0]
    # What is neither of the machine nor of a compiler is of the group and its inputs.
    until = math.inf if type(error) is UnsupportedError else IN_THIS_PROCESS
    if isinstance(error, CompileError):
        # A text that is wrong stays an error, unless the user gave another version of it.
        if not fallback.is_given:
            raise error
    elif error.application >= 0 and len(spec.group.applications) > 1:
        return Plan(device, (), (), fallback_reason=reason, obstacle=error.application, until=until)
    elif error.is_expected:
        return Plan(device, (), (), fallback_reason=reason, is_expected=True, until=until)
    obstacles = fallback.obstacles
    if obstacles:
        if isinstance(error, CompilerNotFoundError):
            raise error
        name, obstacle = obstacles[0]
        raise FallbackError(
            f"cannot fuse: {error}; and {name!r} has no eager version to fall back to: {obstacle}"
        ) from error
    if isinstance(error, CompilerFailedError):
        return Plan(device, (), (), fallback_reason=reason, until=0.0)
    if isinstance(error, CompilerNotFoundError):
        # It may be installed meanwhile, and to look for it takes longer than most calls.
        until = time.monotonic() + SEARCH_S
    return Plan(device, (), (), fallback_reason=reason, until=until)


# --- torch's orders --------------------------------------------------------------------------------------------------
def _find_cases(
    spec: KernelSpec, expanded: Expanded, device: torch.device, orders: Orders
) -> list[tuple[int, OrderCase]]:
    # What torch's orders are to be, each with the application that is torch's own kernel where they are not; and those
    # take one element of a row without the others.
    group = expanded.group
    for index, item in enumerate(group.applications):
        reduction = item.function.reduction
        if group.is_strict and reduction and reduction.order == "pick" and item.tensors[0] < len(group.inputs):
            origin = expanded.expansion.origins[index]
            raise UnsupportedError(f"op {item.function.name!r} of rows in memory", application=origin, is_expected=True)
    # By values, not by what they are: sizes may be symbols, which are pinned down where they are looked up.
    kept: dict[tuple[int, Function, tuple[int, ...]], list[RowOrder]] = {}
    for step, order in orders.items():
        if order is not None and group.is_strict:
            # A reduction of torch's is compared by itself, also where it is a step of an op.
            index, item = expanded.expansion.origins[step], group.applications[step]
            if item.function.op not in ops.REDUCTIONS:
                item = spec.group.applications[index]
            kept.setdefault((index, item.function, item.tensors), []).append(order)
    cases = []
    for (index, function, values), found in kept.items():
        own = expanded.values if function.op in ops.REDUCTIONS else expanded.whole
        tensors = tuple(own[value].desc for value in values)
        cases.append((index, OrderCase(function, tuple(found), tensors, device)))
    return cases


def _check_order(index: int, case: OrderCase, verdict: bool | None = None) -> None:
    if not (is_kept(case, _plan_alone) if verdict is None else verdict):
        reason = f"op {case.function.name!r} in an order that is not this torch's"
        kind = UnknownOrderError if case.verdict() is None else UnsupportedError
        raise kind(reason, application=index, is_expected=True)


def _plan_alone(spec: KernelSpec, described: Sequence[TensorDesc]) -> Callable[[list[Any]], list[torch.Tensor]]:
    # In kernels that keep torch's order, as it is expected.
    device = common_device(spec.group, described)
    layouts = infer_layouts(spec.group, value_layouts(described))
    return partial(_run_alone, _plan_kernels(spec, described, (), device, layouts, trusts_orders=True))


def _run_alone(plan: Plan, inputs: list[Any]) -> list[torch.Tensor]:
    written = plan.allocate()
    for step in plan.steps:
        step.run(step.pack(inputs + written, written))
    return written[: len(plan.outputs)]


def _laid_out_as(out: Sequence[TensorDesc], outputs: Sequence[TensorDesc]) -> list[TensorDesc]:
    # The outputs, each in the memory of its ``out=`` tensor; one of another shape is dealt with when the call is made.
    if len(out) != len(outputs):
        return list(outputs)
    return [
        item._replace(strides=own.strides, is_aligned=own.is_aligned) if own.shape == item.shape else item
        for own, item in zip(out, outputs, strict=True)
    ]


def _buffer(desc: TensorDesc) -> Buffer:
    assert desc.dtype is not None, "what is computed is a tensor"
    return Buffer(desc.shape, desc.strides, desc.dtype)


# --- cut -------------------------------------------------------------------------------------------------------------
class _Part(NamedTuple):
    """One kernel of a plan, before it is compiled."""

    spec: KernelSpec
    args: ArgSpec
    space: IterationSpace
    # Values of the whole group that its inputs and its outputs are.
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    # For each of its outputs which output of the whole group it is; -1 for none.
    targets: tuple[int, ...]

    def operands(self) -> list[tuple[int, int]]:
        """Return its inputs that lie in memory: the number among its operands, and the value."""
        given = [
            index
            for index in self.spec.group.used_inputs()
            if (item := self.args.inputs[index]) and item.number is None and not item.is_counter
        ]
        return [(slot, self.inputs[index]) for slot, index in enumerate(given, start=len(self.outputs))]

    def place_of(self, slot: int) -> tuple[int, Strides]:
        """Return where in a tensor an operand begins, and how it lies from there over the loop nest."""
        return self.space.offsets[slot] if self.space.offsets else 0, self.space.strides[slot]


def _cut(expanded: Expanded, outputs: Sequence[TensorDesc], device: torch.device, orders: Orders) -> Iterator[_Part]:
    # ``outputs`` as the group has them.
    group, values, spec = expanded.group, expanded.values, expanded.spec
    layouts = [ValueLayout(item.desc.shape, item.desc.strides, offset=item.desc.offset) for item in values]
    by_value = {value for value, item in enumerate(values) if item.spec.number is not None}
    is_cuda = device.type == "cuda"
    shared_bytes = _shared_bytes(expanded, orders) if is_cuda else {}
    for section in cut_group(group, layouts, by_value, orders, shared_bytes, shares_rows=is_cuda):
        order = order_of_section(section, orders)
        own = spec if spec is not None and section.group is group else register(section.group)
        slots = [slot for slot, value in enumerate(group.outputs) if value in section.outputs]
        written, targets = [outputs[slot] for slot in slots], [expanded.targets[slot] for slot in slots]
        written += [values[value].desc for value in section.outputs[len(targets) :]]
        targets += [-1] * (len(written) - len(targets))
        inputs = [values[value] for value in section.inputs]
        for chosen in group_outputs([item.shape for item in written], has_reduction=own.group.has_reduction):
            part = own if len(chosen) == len(written) else register(own.group.select_outputs(chosen))
            args, space = build_arg_spec(part.group, inputs, [written[index] for index in chosen], device.type, order)
            yield _Part(
                part,
                args,
                space,
                section.inputs,
                tuple(section.outputs[index] for index in chosen),
                tuple(targets[index] for index in chosen),
            )


def _shared_bytes(expanded: Expanded, orders: Orders) -> dict[int, int]:
    # In torch's order each thread of a row waits for others with what it has of all reductions: also of those that any
    # order serves, which share its walk.
    parts = {index: waiting_parts(order) if order else 0 for index, order in orders.items()}
    most, found = max(parts.values(), default=0), {}
    for index, item in enumerate(expanded.group.applications):
        reduction, dtype = item.function.reduction, expanded.values[item.tensors[0]].desc.dtype
        if reduction is not None and dtype is not None:
            found[index] = parts.get(index, most) * len(reduction.identity) * max(dtype.itemsize, 4)
    return found


def _cut_and_order(
    expanded: Expanded, outputs: Sequence[TensorDesc], device: torch.device, orders: Orders
) -> list[_Part]:
    # As they are launched.
    parts = list(_cut(expanded, outputs, device, orders))
    if device.type == "cuda":
        parts = [_from_end(part) if _is_after(expanded, parts[:at], part) else part for at, part in enumerate(parts)]
    if len(parts) < 2 or not starts_abreast(device) or any(part.space.is_empty for part in parts):
        return parts
    # By tensors, not by values: some of these are parts of one tensor.
    input_count = 1 + max((slot for slot, _ in expanded.expansion.inputs), default=-1)
    homes, _ = _find_homes(expanded, parts, input_count, shares=False)
    kernels = [
        Kernel(
            part.args,
            reads=frozenset(homes.read[value] for value in part.inputs),
            writes=frozenset(input_count + home for home in homes.written_by(part)),
            row_bytes=_row_bytes(expanded, part),
        )
        for part in parts
    ]
    return [
        parts[slot]._replace(args=parts[slot].args._replace(tuning=tuning)) for slot, tuning in side_by_side(kernels)
    ]


def _is_after(expanded: Expanded, before: Sequence[_Part], part: _Part) -> bool:
    # Whether a kernel without reductions reads again what one with them has gone through to its end.
    if part.args.rows is not None or part.args.tuning.tile:
        return False
    shape = expanded.values[part.outputs[0]].desc.shape
    full = {value for value in part.inputs if expanded.values[value].desc.shape == shape}
    return any(other.args.rows is not None and not full.isdisjoint(other.inputs) for other in before)


def _from_end(part: _Part) -> _Part:
    return part._replace(args=part.args._replace(tuning=part.args.tuning._replace(from_end=True)))


def _row_bytes(expanded: Expanded, part: _Part) -> int:
    # As Kernel has it.
    rows, sizes = part.args.rows, part.space.sizes
    descs = [expanded.values[value].desc for value in part.inputs]
    each = sum(item.dtype.itemsize for item in descs if item.dtype and math.prod(item.shape) == part.space.numel)
    return each * math.prod(sizes[rows.reduced :]) if rows is not None else 0


def _find_in_place(expanded: Expanded, parts: Sequence[_Part]) -> tuple[bool, ...]:
    return tuple(_is_written_last(expanded, target, parts) for target in range(len(expanded.outputs)))


def _is_written_last(expanded: Expanded, target: int, parts: Sequence[_Part]) -> bool:
    # Whether each element of an output is written after all that read the same one of an input that lies as it does.
    whole = expanded.outputs[target]
    alike = {
        value
        for value, (slot, _) in enumerate(expanded.expansion.inputs)
        if (own := expanded.whole[slot].desc).shape == whole.shape and own.strides == whole.strides
    }
    is_begun = False
    for at, part in enumerate(parts):
        slots = [slot for slot, own in enumerate(part.targets) if own == target]
        if slots and part.args.tuning.follows and not alike.isdisjoint(parts[at - 1].inputs):
            # That one may still read.
            return False
        is_begun = is_begun or bool(slots)
        read = [slot for slot, value in part.operands() if value in alike]
        if not is_begun or not read:
            continue
        if part.args.rows is not None:
            last = written_last(part.spec.group, part.args.rows)
            if part.args.device_type != "cuda" or not all(last[slot] for slot in slots):
                return False
        # Of what several boxes are written of, each is read by the thread that writes it.
        if not {part.place_of(slot) for slot in read} <= {part.place_of(slot) for slot in slots}:
            return False
    return True


# --- find slots ----------------------------------------------------------------------------------------------------
class _Homes(NamedTuple):
    """Where values are."""

    # That some step writes: indices into outputs and temporaries.
    written: Mapping[int, int]
    # That it reads: indices into the call's inputs and, after them, outputs and temporaries.
    read: Mapping[int, int]

    def written_by(self, part: _Part) -> list[int]:
        """Return where a kernel writes each of its outputs to."""
        written = zip(part.outputs, part.targets, strict=True)
        return [self.written[value] if target < 0 else target for value, target in written]


def _find_homes(
    expanded: Expanded, parts: Sequence[_Part], input_count: int, *, shares: bool = True
) -> tuple[_Homes, tuple[Buffer, ...]]:
    # Without ``shares`` no two values have one home.
    count, temporaries = len(expanded.outputs), list[Buffer]()
    homes = dict(reversed([*zip(expanded.group.outputs, expanded.targets, strict=True)]))
    last = {value: slot for slot, part in enumerate(parts) for value in (*part.inputs, *part.outputs)}
    free, dead = list[int](), list[int]()
    for slot, part in enumerate(parts):
        # What runs beside the kernel before it writes nothing that that one still reads.
        if not part.args.tuning.follows:
            free, dead = [*free, *dead], []
        for value in part.outputs:
            if value not in homes:
                buffer = _buffer(expanded.values[value].desc)
                own = next((item for item in free if temporaries[item] == buffer), len(temporaries))
                if own < len(temporaries):
                    free.remove(own)
                else:
                    temporaries.append(buffer)
                homes[value] = count + own
        if shares:
            ended = dict.fromkeys(value for value in (*part.inputs, *part.outputs) if last[value] == slot)
            dead += [homes[value] - count for value in ended if homes.get(value, -1) >= count]
    read = {value: slot for value, (slot, _) in enumerate(expanded.expansion.inputs)}
    read |= {value: input_count + index for value, index in homes.items()}
    return _Homes(homes, read), tuple(temporaries)


# --- compile ---------------------------------------------------------------------------------------------------------
def _compile(
    wanted: Sequence[tuple[KernelSpec, ArgSpec]], device: torch.device, cases: Sequence[tuple[int, OrderCase]]
) -> list[FusedKernel]:
    tasks: list[Callable[[], Any]] = []
    for index, case in cases:
        verdict = case.verdict()
        if verdict is None:
            tasks.append(partial(_check_order, index, case))
        else:
            _check_order(index, case, verdict)
    # While nobody knows whether they are of use, if nobody knows: torch is compared with by means of other kernels.
    tasks.append(partial(compile_kernels, wanted, device.index))
    kernels: list[FusedKernel] = map_side_by_side(lambda task: task(), tasks)[-1]
    return kernels


def _tuned(part: _Part, device: torch.device) -> ArgSpec:
    return tuned(part.spec, part.args, torch.cuda.get_device_name(device.index)) if device.type == "cuda" else part.args


def _make_step(
    part: _Part,
    kernel: FusedKernel,
    device: torch.device,
    homes: _Homes,
    workspaces: list[int],
    first_workspace: int,
) -> Step:
    # Adds the kernel's workspace, if it has one, to the plan's.
    read = [homes.read[value] for value in part.inputs]
    launch = kernel.prepare(part.space)
    slots = homes.written_by(part)
    if kernel.source.has_workspace:
        slots.append(first_workspace + len(workspaces))
        workspaces.append(workspace_bytes(kernel.source, part.space.sizes))
    return Step(
        kernel=kernel,
        launch=launch,
        packer=ArgumentPacker(kernel.source, part.space),
        outputs=tuple(slots),
        inputs=tuple(read[operand.index] for operand in kernel.source.operands if not operand.is_output),
        numbers=tuple(read[index] for index, _ in kernel.source.numbers),
        name=event_name(part.spec.group),
        device_index=device.index or 0,
    )
