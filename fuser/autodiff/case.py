"""How a group is differentiated: which gradients, by which derived groups, from what is saved.

Inputs are saved rather than intermediate results, which the backward kernel recomputes, unless handing one over is
faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from fuser.application import Application
from fuser.autodiff.backward import (
    BackwardSteps,
    DerivedGroup,
    build_backward,
    build_tangents,
    find_backward,
    find_differentiable,
)
from fuser.autodiff.recompute import Sizes, choose_saved, estimate_cost
from fuser.autodiff.sums import Sum, find_sum
from fuser.compiler import register
from fuser.config import config
from fuser.errors import EagerDerivativeError, GradientError, NotDifferentiableError, UntranslatableError
from fuser.fallback import Fallback
from fuser.kernel_cache import Lru
from fuser.kernel_spec import KernelSpec, Typing, infer_layouts, infer_typing
from fuser.launcher import Replayer
from fuser.layout import Shape
from fuser.ops import reduction_function
from fuser.route import is_transformed
from fuser.tensor_desc import (
    TensorDesc,
    common_device,
    default_dtype_of,
    describe,
    input_specs,
    name_input,
    value_layouts,
)
from fuser.warming.cover import with_sizes
from fuser.warming.follow import current

__all__ = ["Case", "Pass", "check_eager", "find_case"]

# Of operations done again, in what the memory moves meanwhile: as if they were free, or memory was.
PRICES = (0, 1, 4)

# How a group is differentiated, by everything that decides it.
_cases: Lru[Case] = Lru()


@dataclass(frozen=True, slots=True)
class Pass:
    """A derived group, ready to run."""

    spec: KernelSpec
    derived: DerivedGroup
    launcher: Replayer = field(default_factory=lambda: Replayer((), ()))
    # What adds up some of its results, by the dimensions.
    sums: dict[tuple[Shape, ...], Pass] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """How a group is differentiated for inputs of certain dtypes."""

    # The group, with what the backward pass wants to have saved as further outputs.
    spec: KernelSpec
    typing: Typing
    # What it ends in; else it is differentiated itself.
    sum: Sum | None
    output_count: int
    # Inputs whose gradients are asked for.
    wanted: tuple[int, ...]
    # Device of each input, None for numbers.
    devices: tuple[torch.device | None, ...]
    # Values of the group that the backward pass is given beside inputs.
    kept: tuple[int, ...]
    # Tensors among the inputs that the backward pass reads.
    read: tuple[int, ...]
    # Places of the outputs that have no derivative because their dtype is integral.
    constant_outputs: tuple[int, ...]
    # The torch.get_default_dtype() it is for, where another one would change it.
    default_dtype: torch.dtype | None
    # Inputs that are tensors, inputs that are numbers, and slots of ``kept`` among the outputs.
    tensors: tuple[int, ...] = field(init=False)
    numbers: tuple[int, ...] = field(init=False)
    kept_outputs: tuple[int, ...] = field(init=False)
    launcher: Replayer = field(default_factory=lambda: Replayer((), ()))
    # The backward pass that takes the gradients of all outputs; None if it would make zeros only, or nobody asked yet.
    derived: DerivedGroup | None = None
    # By the outputs whose gradients come in (by the inputs that have tangents).
    _passes: dict[tuple[bool, tuple[int, ...]], Pass | None] = field(default_factory=dict)
    _reached: dict[tuple[int, ...], frozenset[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Fill in what every call asks for."""
        slots = range(len(self.devices))
        object.__setattr__(self, "tensors", tuple(slot for slot in slots if self.devices[slot] is not None))
        object.__setattr__(self, "numbers", tuple(slot for slot in slots if self.devices[slot] is None))
        object.__setattr__(self, "kept_outputs", tuple(map(self.spec.group.outputs.index, self.kept)))

    def backward(self, outputs: tuple[int, ...]) -> Pass | None:
        """Return the pass that takes the gradients of these outputs; None if it would make zeros only.

        Raises:
            GradientError, UntranslatableError: there is none as a group.
        """

        def build() -> DerivedGroup | None:
            if self.derived is not None and outputs == tuple(range(self.output_count)):
                return self.derived
            group, typing = (self.spec.group, self.typing) if self.sum is None else (self.sum.group, self.sum.typing)
            return build_backward(group, typing, self.wanted, outputs, self.kept)

        return self._find(True, outputs, build)

    def reached(self, outputs: tuple[int, ...]) -> frozenset[int]:
        """Return the inputs on which these outputs depend: others have no gradient, not even one of zeros."""
        if outputs not in self._reached:
            group = self.spec.group
            values = {group.outputs[slot] for slot in outputs}
            found = (slot for slot in self.wanted if values & find_differentiable(group, self.typing, (slot,)))
            self._reached[outputs] = frozenset(found)
        return self._reached[outputs]

    def adding_up(self, step: Pass, dims: tuple[Shape, ...]) -> Pass:
        """Return a backward pass whose results are added up along dimensions of each, which they keep."""
        if not any(dims):
            return step
        if dims not in step.sums:
            group = step.derived.group
            applications, outputs = list(group.applications), list(group.outputs)
            value = len(group.producers())
            for slot, own in enumerate(dims):
                if own:
                    applications.append(Application(reduction_function("sum", own, True), (outputs[slot],)))
                    outputs[slot], value = value, value + 1
            summed = replace(group, applications=tuple(applications), outputs=tuple(outputs), _key=[])
            step.sums.setdefault(dims, Pass(register(summed), replace(step.derived, group=summed)))
        return step.sums[dims]

    def tangents(self, inputs: tuple[int, ...]) -> Pass | None:
        """Return the pass that takes the tangents of these inputs; as ``backward``."""
        return self._find(False, inputs, partial(build_tangents, self.spec.group, self.typing, inputs))

    def _find(self, is_reverse: bool, given: tuple[int, ...], build: Callable[[], DerivedGroup | None]) -> Pass | None:
        key = is_reverse, given
        if key not in self._passes:
            derived = build()
            self._passes.setdefault(key, None if derived is None else Pass(register(derived.group), derived))
        return self._passes[key]


def find_case(spec: KernelSpec, inputs: Sequence[Any], *, saves_results: bool = True) -> Case:
    """Find or make the case of a call.

    Raises:
        GradientError: an input requires grad and the group has no derivative.
    """
    # A transform of torch.func may ask for any gradient, or for none.
    transformed = is_transformed()
    wanted = tuple(
        slot
        for slot, item in enumerate(inputs)
        if isinstance(item, torch.Tensor)
        and (item.requires_grad or transformed)
        and (item.is_floating_point() or item.is_complex())
    )
    # Sizes decide nothing but what is worth to be saved: those of the call that a warm-up follows do.
    described = [with_sizes(describe(item)) if current() else describe(item) for item in inputs]
    signature = tuple((item.kind, item.dtype, not item.shape, item.device) for item in described)
    key = (spec.key, wanted, signature, torch.get_default_dtype(), saves_results, transformed)
    case = _cases.get(key)
    if case is None:
        case = _make_case(spec, described, wanted, saves_results=saves_results, derives=not transformed)
        _cases.put(key, case, config.max_plans)
    return case


def _make_case(
    spec: KernelSpec, described: list[TensorDesc], wanted: tuple[int, ...], *, saves_results: bool, derives: bool
) -> Case:
    specs = input_specs(described, common_device(spec.group, described))
    count = len(spec.group.outputs)
    tensors = [index for index, item in enumerate(described) if item.device is not None]
    read = tuple(tensors)
    kept: tuple[int, ...] = ()
    derived: DerivedGroup | None = None
    typing = infer_typing(spec.group, specs, torch.get_default_dtype())
    ending = find_sum(spec.group, typing, specs)
    if derives:
        _check_outputs(spec, typing, wanted)
        try:
            group, types = (spec.group, typing) if ending is None else (ending.group, ending.typing)
            steps = find_backward(group, types, wanted, range(count))
            if saves_results and ending is None:
                kept = _choose_kept(steps, described)
                spec = _with_outputs(spec, kept)
            derived = steps.write(kept)
            values = {item.slot for item in derived.sources if not item.is_derivative} if derived else set[int]()
            read = tuple(index for index in tensors if index in values)
        except (GradientError, UntranslatableError) as error:
            check_eager(spec, error)
            for slot in spec.group.scalars_of_reductions().intersection(wanted):
                raise GradientError(
                    f"{name_input(spec.group, slot)} has a gradient, and scalars of a reduction have one where a sum "
                    "comes last only: detach it"
                ) from error
    continuous = find_differentiable(spec.group, typing, wanted)
    return Case(
        spec=spec,
        typing=typing,
        sum=ending,
        output_count=count,
        wanted=wanted,
        devices=tuple(item.device for item in described),
        kept=kept,
        read=read,
        constant_outputs=tuple(index for index, value in enumerate(spec.group.outputs) if value not in continuous),
        default_dtype=default_dtype_of(spec.group, specs),
        derived=derived,
    )


def _choose_kept(steps: BackwardSteps, described: Sequence[TensorDesc]) -> tuple[int, ...]:
    # The values of the group that are worth to be saved, beside inputs.
    group, typing = steps.group, steps.typing
    if not steps.incoming:
        return ()
    layouts = infer_layouts(group, value_layouts(described))
    elements = [0 if layout.is_number else math.prod(layout.shape) for layout in layouts]
    sizes = Sizes(
        tuple(typing.values[value].itemsize * count for value, count in enumerate(elements)), max(elements, default=0)
    )

    def cost_of(saved: frozenset[int]) -> float:
        derived = steps.write(saved)
        return 0.0 if derived is None else estimate_cost(group, sizes, derived, saved)

    found = list(dict.fromkeys(choose_saved(group, steps.read, sizes, price=price) for price in PRICES))
    best = found[0] if len(found) == 1 else min(found, key=cost_of)
    return tuple(sorted(best))


def _with_outputs(spec: KernelSpec, kept: Sequence[int]) -> KernelSpec:
    # The group with what is saved as further outputs.
    group = spec.group
    further = tuple(value for value in kept if value not in group.outputs)
    if not further:
        return spec
    made = register(replace(group, outputs=(*group.outputs, *further), _key=[]))
    # The canonical order goes from the first output to the last, and all of these were reached before.
    assert made.group.applications == group.applications, "values keep their numbers"
    return made


def _check_outputs(spec: KernelSpec, typing: Typing, wanted: Sequence[int]) -> None:
    # torch's comparisons have outputs without a gradient, and so have places and counts along dimensions, and a functor
    # beside others; a functor that has nothing else would lose the gradient in silence.
    group = spec.group
    continuous = find_differentiable(group, typing, wanted)
    for application, offset in zip(group.applications, group.value_offsets(), strict=True):
        made = range(offset, offset + application.function.num_outputs)
        is_reached = not continuous.isdisjoint(application.tensors)
        is_users = application.function.op is None and application.function.reduction is None
        if is_users and is_reached and continuous.isdisjoint(made):
            raise NotDifferentiableError(f"its result is {typing.values[offset]}", functor=application.function.name)


def check_eager(spec: KernelSpec, error: GradientError | UntranslatableError) -> None:
    """Raise ``error``, for which a group has no derived groups, unless torch can differentiate its eager version."""
    fallback = Fallback(spec.group)
    # It can where a loop's length depends on data, say. What is not differentiable is no more so in eager torch, unless
    # the user wrote that.
    has_derivative = isinstance(error, EagerDerivativeError | UntranslatableError) or fallback.is_given
    if fallback.missing:
        name = fallback.missing[0]
        raise GradientError(
            f"an input of {name!r} requires grad, and {name!r} has no derivative: {error}\n"
            "call it under torch.no_grad(), detach the input, or give jit_fn(..., backward=a functor)"
        ) from error
    if not has_derivative:
        raise error
