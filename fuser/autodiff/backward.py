"""The derivative of a group, as groups: they are compiled, fused, and differentiated in turn like any other.

Reverse mode applies, from the outputs to the inputs, the backward functor of every application, and recomputes what
the backward functors read of the forward pass from its inputs. Forward mode applies the tangent functors in order.
Both work on the values of one element; sums over broadcast dimensions are the caller's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from fuser.application import Application
from fuser.cxx.functor import Role, parse_functor
from fuser.dtypes import dtype_info, is_continuous
from fuser.errors import EagerDerivativeError, NotDifferentiableError
from fuser.function import Function, Isolation
from fuser.graph import FusionGroup, GroupBuilder
from fuser.kernel_spec import Typing
from fuser.ops import cast_function

if TYPE_CHECKING:
    # Imported where a derivative is made: programs without gradients need none of it.
    from fuser.autodiff.derivative import Derived

__all__ = [
    "BackwardSteps",
    "DerivedGroup",
    "Source",
    "build_backward",
    "build_tangents",
    "find_backward",
    "find_differentiable",
]


@cache
def _accumulate() -> Function:
    text = "template <typename T> T accumulate(T a, T b) { return a + b; }"
    return Function(parse_functor(text), isolation=Isolation.NONE)


@cache
def _zero() -> Function:
    return Function(parse_functor("template <typename T> T zero(T x) { return T(0); }"))


class Source(NamedTuple):
    """What one input of a derived group is bound to."""

    # A gradient (of the forward group's output ``slot``; in forward mode the tangent of its input ``slot``), or the
    # forward group's value ``slot``.
    is_derivative: bool
    slot: int


@dataclass(frozen=True, slots=True)
class DerivedGroup:
    """A group that computes gradients or tangents."""

    group: FusionGroup
    # One per input of the group.
    sources: tuple[Source, ...]
    # What each output is the gradient of (an input of the forward group) or the tangent of (a slot among its outputs).
    targets: tuple[int, ...]
    # Values of the forward group that some derived functor reads.
    read: frozenset[int]


def find_differentiable(group: FusionGroup, typing: Typing, inputs: Collection[int]) -> frozenset[int]:
    """Return the values of floating or complex dtype that depend on ``inputs`` through such values only."""
    found = {value for value in inputs if is_continuous(typing.values[value])}
    for application, offset in zip(group.applications, group.value_offsets(), strict=True):
        if not (application.reads_no_elements or found.isdisjoint((*application.tensors, *application.scalars))):
            made = range(offset, offset + application.function.num_outputs)
            found |= {value for value in made if is_continuous(typing.values[value])}
    return frozenset(found)


def build_backward(
    group: FusionGroup,
    typing: Typing,
    wanted: Collection[int],
    outputs: Collection[int],
    saved: Collection[int] = (),
) -> DerivedGroup | None:
    """Return the group of the gradients of ``wanted`` inputs, given those of ``outputs``.

    Args:
        group: a canonical group.
        typing: its dtypes.
        wanted: inputs whose gradient is asked for.
        outputs: which of the group's outputs have an incoming gradient.
        saved: values of the forward pass that are at hand, beside its inputs; the rest is recomputed.

    Returns:
        The group, or None if every gradient is zero. An input without an output has a gradient of zero.

    Raises:
        NotDifferentiableError: a functor has no derivative. EagerDerivativeError: it has none as a functor.
        UntranslatableError: it has a construct that cannot be differentiated.
    """
    return find_backward(group, typing, wanted, outputs).write(saved)


def find_backward(
    group: FusionGroup, typing: Typing, wanted: Collection[int], outputs: Collection[int]
) -> BackwardSteps:
    """Derive the functors of a backward pass; what it saves can be chosen when it is written. As ``build_backward``."""
    _refuse_reductions(group)
    continuous = find_differentiable(group, typing, wanted)
    steps = _reverse_steps(group, typing, continuous, outputs)
    reached = {value for step in steps for value in step.outputs}
    incoming = tuple(index for index in outputs if group.outputs[index] in continuous & reached)
    return BackwardSteps(group, typing, tuple(wanted), incoming, tuple(steps))


@dataclass(frozen=True, slots=True)
class BackwardSteps:
    """A backward pass before it is known what the forward pass saves for it."""

    group: FusionGroup
    typing: Typing
    wanted: tuple[int, ...]
    # The outputs of the group whose gradients it takes.
    incoming: tuple[int, ...]
    steps: tuple[_Step, ...]

    @property
    def read(self) -> frozenset[int]:
        """Values of the forward pass that some derived functor reads."""
        return frozenset(value for step in self.steps for value in step.read)

    def write(self, saved: Collection[int]) -> DerivedGroup | None:
        """Return the group that is given the values ``saved``; None if every gradient is zero."""
        writer = _Writer(self.group, self.typing)
        gradients: dict[int, int] = {}
        for output in self.incoming:
            writer.accumulate(gradients, self.group.outputs[output], writer.derivative(output, f"grad{output}"))
        writer.recompute(self.read, saved)
        inputs, pending = range(len(self.group.inputs)), Counter(value for step in self.steps for value in step.targets)
        for step in self.steps:
            incoming = [gradients[value] for value in step.outputs]
            done = [item for item in step.targets if item in inputs and pending[item] == 1 and item not in gradients]
            handles = writer.apply(step, incoming, done)
            for value, handle in zip(step.targets, handles, strict=True):
                pending[value] -= 1
                if value >= 0:
                    writer.accumulate(gradients, value, handle, is_done=value in inputs and not pending[value])
        targets = [value for value in self.wanted if value in gradients]
        return writer.finish([gradients[value] for value in targets], targets, self.read) if targets else None


def build_tangents(group: FusionGroup, typing: Typing, given: Collection[int]) -> DerivedGroup | None:
    """Return the group of the tangents of the outputs, given those of the inputs ``given``; as ``build_backward``."""
    _refuse_reductions(group)
    continuous = find_differentiable(group, typing, given)
    tangents: set[int] = {value for value in given if value in continuous}
    steps = []
    for index, (application, offset) in enumerate(zip(group.applications, group.value_offsets(), strict=True)):
        arguments = _arguments(application)
        slots = tuple(slot for slot, value in enumerate(arguments) if value in tangents)
        made = range(offset, offset + application.function.num_outputs)
        if not slots or continuous.isdisjoint(made):
            continue
        _refuse_complex(application, index, typing, made)
        derived = _derive_tangents(application, index, typing, slots)
        if derived.functor is None:
            continue
        values = {out: offset + slot for slot, out in enumerate(derived.results) if out is not None}
        targets = tuple(values.get(out, -1) for out in range(derived.functor.num_outputs))
        incoming = tuple(arguments[slot] for slot in slots)
        steps.append(_Step(index, derived, incoming, targets, arguments, tuple(made)))
        tangents |= {value for value in targets if value in continuous}
    writer = _Writer(group, typing)
    handles = {
        value: writer.derivative(value, f"tangent{value}")
        for value in given
        if any(value in step.outputs for step in steps)
    }
    read = frozenset(value for step in steps for value in step.read)
    writer.recompute(read, ())
    for step in steps:
        made_handles = writer.apply(step, [handles[value] for value in step.outputs], group.outputs)
        handles.update(zip(step.targets, made_handles, strict=True))
    moved = [slot for slot, value in enumerate(group.outputs) if value in tangents and value not in given]
    return writer.finish([handles[group.outputs[slot]] for slot in moved], moved, read) if moved else None


def _refuse_reductions(group: FusionGroup) -> None:
    # They are cut out first: see ``sums`` and ``pull_back``.
    for item in group.applications:
        if item.function.reshapes:
            raise EagerDerivativeError(f"the derivative of {item.function.name!r} is that of its eager version")


def _refuse_complex(application: Application, index: int, typing: Typing, results: Iterable[int]) -> None:
    # A derived functor has one T for what it reads and for the gradients that come in: a real one would lose half of
    # these.
    function, common = application.function, typing.common[index]
    if function.op is None and not common.is_complex and any(typing.values[value].is_complex for value in results):
        raise EagerDerivativeError(
            f"{function.name!r} makes complex numbers of real ones, and its derivative is that of its eager version"
        )


@dataclass(frozen=True, slots=True)
class _Step:
    # One application of a derived functor.
    index: int
    derived: Derived
    # Forward values whose derivatives come in, in the order of the derived functor's ("grad", k).
    outputs: tuple[int, ...]
    # Forward value that each output of the derived functor belongs to; -1 for one that nobody wants.
    targets: tuple[int, ...]
    # Forward values of the functor's arguments, in the order of the declaration, and of its results.
    arguments: tuple[int, ...]
    results: tuple[int, ...]

    @property
    def read(self) -> list[int]:
        values = {"argument": self.arguments, "result": self.results}
        return [values[kind][slot] for kind, slot in self.derived.arguments if kind in values]


def _reverse_steps(
    group: FusionGroup, typing: Typing, continuous: Collection[int], outputs: Collection[int]
) -> list[_Step]:
    # From the last application to the first; a step is there if a gradient reaches it.
    reached = {group.outputs[slot] for slot in outputs} & set(continuous)
    offsets = group.value_offsets()
    steps = []
    for index in reversed(range(len(group.applications))):
        application, offset = group.applications[index], offsets[index]
        incoming = tuple(slot for slot in range(application.function.num_outputs) if offset + slot in reached)
        arguments = _arguments(application)
        wanted = tuple(slot for slot, value in enumerate(arguments) if value in continuous)
        if not incoming or not wanted:
            continue
        _refuse_complex(application, index, typing, [offset + slot for slot in incoming])
        derived = _derive(application, index, typing, wanted, incoming)
        made = {out: arguments[slot] for slot, out in zip(wanted, derived.results, strict=True) if out is not None}
        if made and derived.functor is not None:
            results = tuple(range(offset, offset + application.function.num_outputs))
            values = tuple(results[slot] for slot in incoming)
            targets = tuple(made.get(out, -1) for out in range(derived.functor.num_outputs))
            steps.append(_Step(index, derived, values, targets, arguments, results))
            reached |= set(made.values())
    return steps


def _derive(
    application: Application, index: int, typing: Typing, wanted: tuple[int, ...], outputs: tuple[int, ...]
) -> Derived:
    function = application.function
    from fuser.autodiff.derivative import reverse_functor  # noqa: PLC0415

    compute = _compute_dtype(typing, index)
    if function.backward is not None:
        return _hand_written(function, wanted, outputs)
    types = _argument_types(application, index, typing)
    return reverse_functor(function.functor, compute, types, wanted=wanted, outputs=outputs, op=function.op)


def _hand_written(function: Function, wanted: tuple[int, ...], outputs: tuple[int, ...]) -> Derived:
    # The user's backward functor takes what it wants to have saved, then the gradient of every output.
    from fuser.autodiff.derivative import Derived  # noqa: PLC0415

    assert function.backward is not None, "the caller checked"
    backward, parameters = function.backward, function.functor.inputs
    slots = {parameter.name: slot for slot, parameter in enumerate(parameters)}
    tensor_places = [slots[parameter.name] for parameter in function.functor.tensors]
    for slot in wanted:
        name = parameters[slot].name
        if name in function.unpromoted:
            raise NotDifferentiableError(
                f"its backward functor makes no gradient of the scalar {name!r}, which is a tensor here",
                functor=function.functor.entry,
            )

    def bind(kind: str, slot: int) -> tuple[str, int]:
        if kind == "tensor":
            return "argument", tensor_places[slot]
        if kind == "output":
            return "result", slot
        return ("grad", outputs.index(slot)) if slot in outputs else ("zero", slot)

    tensors = iter([bind(*operand) for operand in backward.operands(function.functor)])
    arguments = tuple(
        ("argument", slots[parameter.name]) if parameter.role is Role.SCALAR else next(tensors)
        for parameter in backward.functor.inputs
    )
    made = {tensor_places[slot]: out for out, slot in enumerate(backward.targets)}
    return Derived(backward.functor, arguments, tuple(made.get(slot) for slot in wanted), ())


def _derive_tangents(application: Application, index: int, typing: Typing, given: tuple[int, ...]) -> Derived:
    from fuser.autodiff.derivative import forward_functor  # noqa: PLC0415

    function = application.function
    compute, types = _compute_dtype(typing, index), _argument_types(application, index, typing)
    if function.backward is not None:
        return _transposed(function, compute, types, given)
    return forward_functor(function.functor, compute, types, given=given, op=function.op)


def _transposed(
    function: Function, compute: torch.dtype, types: tuple[torch.dtype, ...], given: tuple[int, ...]
) -> Derived:
    # The user's backward functor is a linear map of gradients; that of tangents is its transpose, as its derivative is.
    from fuser.autodiff.derivative import Derived, reverse_functor  # noqa: PLC0415

    hand_written = _hand_written(function, given, tuple(range(function.num_outputs)))
    assert hand_written.functor is not None, "the user wrote one"
    bound = hand_written.arguments
    tangents = {out: k for k, out in enumerate(hand_written.results) if out is not None}
    outputs = tuple(sorted(tangents))
    derived = reverse_functor(
        hand_written.functor,
        compute,
        tuple(types[slot] if kind == "argument" else compute for kind, slot in bound),
        wanted=tuple(slot for slot, (kind, _) in enumerate(bound) if kind == "grad"),
        outputs=outputs,
    )
    arguments = tuple(("grad", tangents[outputs[k]]) if kind == "grad" else bound[k] for kind, k in derived.arguments)
    if any(kind == "argument" and bound[k][0] == "grad" for kind, k in derived.arguments):
        raise NotDifferentiableError(
            f"forward mode transposes its backward functor {hand_written.functor.entry}, which is not linear in the "
            "gradient",
            functor=function.functor.entry,
        )
    return Derived(derived.functor, arguments, derived.results, derived.dtypes)


class _Writer:
    """Builds a derived group."""

    def __init__(self, group: FusionGroup, typing: Typing) -> None:
        self.group = group
        self.typing = typing
        self.builder = GroupBuilder(group.numerics)
        self.sources: list[Source] = []
        # Handles of forward values.
        self.values: dict[int, int] = {}

    def derivative(self, slot: int, name: str) -> int:
        self.sources.append(Source(True, slot))
        return self.builder.add_input(name)

    def recompute(self, read: Collection[int], saved: Collection[int]) -> None:
        """Make the forward values ``read`` available: inputs and ``saved`` as inputs, others computed again."""
        offsets = self.group.value_offsets()
        needed, again = set(read), set[int]()
        for index in reversed(range(len(self.group.applications))):
            item = self.group.applications[index]
            made = range(offsets[index], offsets[index] + item.function.num_outputs)
            if any(value in needed and value not in saved for value in made):
                again.add(index)
                needed |= {*item.tensors, *item.scalars}
        for value in sorted(needed):
            if value < len(self.group.inputs):
                given = self.group.inputs[value]
                self.values[value] = self.builder.add_input(given.name, is_scalar=given.is_scalar)
                self.sources.append(Source(False, value))
            elif value in saved:
                self.values[value] = self.builder.add_input(f"saved{value}")
                self.sources.append(Source(False, value))
        for index in sorted(again):
            item = self.group.applications[index]
            tensors = [self.values[value] for value in item.tensors]
            function = replace(item.function, isolation=Isolation.RESULT)
            handles = self.builder.apply(function, tensors, [self.values[value] for value in item.scalars])
            for slot, handle in enumerate(handles):
                self.values.setdefault(offsets[index] + slot, handle)

    def apply(self, step: _Step, incoming: Sequence[int], done: Collection[int]) -> tuple[int, ...]:
        """Apply a derived functor to derivatives of ``step.outputs``; return a handle per output of it.

        Those of the values ``done`` have these values' dtypes, others the dtypes that they are computed in.
        """
        assert step.derived.functor is not None, "steps without are left out"
        functor, forward = step.derived.functor, self.group.applications[step.index].function
        handles = {
            parameter.name: self._operand(step, incoming, *bound)
            for parameter, bound in zip(functor.inputs, step.derived.arguments, strict=True)
        }
        hand_written = forward.backward
        unpromoted = forward.unpromoted if hand_written is None else hand_written.unpromoted(forward)
        is_the_users = hand_written is not None and functor is hand_written.functor
        function = Function(
            functor,
            unpromoted=tuple(name for name in unpromoted if name in handles),
            out_dtypes=tuple(None if value < 0 else self._dtype(value, value in done) for value in step.targets),
            isolation=Isolation.FULL if is_the_users else Isolation.NONE,
        )
        tensors = [handles[parameter.name] for parameter in functor.tensors]
        return self.builder.apply(function, tensors, [handles[parameter.name] for parameter in functor.scalars])

    def _operand(self, step: _Step, incoming: Sequence[int], kind: str, slot: int) -> int:
        if kind == "argument":
            return self.values[step.arguments[slot]]
        if kind == "result":
            return self.values[step.results[slot]]
        common = self.typing.common[step.index]
        if kind == "zero":
            zero = replace(_zero(), out_dtypes=(self.typing.values[step.results[slot]],))
            return self.builder.apply(zero, [incoming[0]])[0]
        dtype = self.typing.values[step.outputs[slot]]
        if dtype_info(dtype).compute_dtype is dtype_info(common).compute_dtype:
            return incoming[slot]
        return self.builder.apply(cast_function(common), [incoming[slot]])[0]

    def accumulate(self, gradients: dict[int, int], value: int, handle: int, *, is_done: bool = False) -> None:
        """Add to the gradient of a value."""
        if value in gradients:
            function = replace(_accumulate(), out_dtypes=(self._dtype(value, is_done),))
            handle = self.builder.apply(function, [gradients[value], handle])[0]
        gradients[value] = handle

    def _dtype(self, value: int, is_done: bool) -> torch.dtype | None:
        dtype = self.typing.values[value]
        if not is_continuous(dtype):
            return None
        return dtype if is_done else dtype_info(dtype).compute_dtype

    def finish(self, handles: Sequence[int], targets: Sequence[int], read: frozenset[int]) -> DerivedGroup:
        return DerivedGroup(self.builder.build(handles), tuple(self.sources), tuple(targets), read)


def _arguments(application: Application) -> tuple[int, ...]:
    # Values of the arguments in the order of the declaration; tensors left out have their C++ default.
    tensors, scalars = iter(application.tensors), iter(application.scalars)
    bound = len(application.tensors)
    values = []
    for parameter in application.function.functor.inputs:
        if parameter.role is Role.SCALAR:
            values.append(next(scalars))
        elif bound:
            bound -= 1
            values.append(next(tensors))
    return tuple(values)


def _argument_types(application: Application, index: int, typing: Typing) -> tuple[torch.dtype, ...]:
    unpromoted = application.function.unpromoted
    scalars = frozenset(application.scalars)
    compute = _compute_dtype(typing, index)
    names = [parameter.name for parameter in application.function.functor.inputs]
    return tuple(
        dtype_info(typing.values[value]).compute_dtype if value in scalars or name in unpromoted else compute
        for name, value in zip(names, _arguments(application), strict=False)
    )


def _compute_dtype(typing: Typing, index: int) -> torch.dtype:
    return dtype_info(typing.common[index]).compute_dtype
