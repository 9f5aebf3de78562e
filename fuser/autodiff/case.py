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
from torch.autograd import forward_ad

from fuser import library, planner
from fuser.autodiff.backward import DerivedGroup, build_backward, build_tangents, find_differentiable
from fuser.autodiff.recompute import Sizes, choose_saved, estimate_cost
from fuser.compiler import register
from fuser.config import config
from fuser.errors import DataDependentError, GradientError, NotDifferentiableError, UntranslatableError
from fuser.kernel_cache import Lru
from fuser.kernel_spec import KernelSpec, Typing, infer_layouts, infer_typing
from fuser.launcher import Replayer

__all__ = ["Case", "Pass", "check_eager", "find_case", "is_transformed"]

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


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """How a group is differentiated for inputs of certain dtypes."""

    # The group, with what the backward pass wants to have saved as further outputs.
    spec: KernelSpec
    typing: Typing
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
    # Whether another torch.get_default_dtype() would change it.
    follows_default_dtype: bool
    # Inputs that are tensors, inputs that are numbers, and places of ``kept`` among the outputs.
    tensors: tuple[int, ...] = field(init=False)
    numbers: tuple[int, ...] = field(init=False)
    kept_outputs: tuple[int, ...] = field(init=False)
    launcher: Replayer = field(default_factory=lambda: Replayer((), ()))
    # By places of the gradients that come in (by inputs that have tangents).
    _passes: dict[tuple[bool, tuple[int, ...]], Pass] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Fill in what every call asks for."""
        places = range(len(self.devices))
        object.__setattr__(self, "tensors", tuple(place for place in places if self.devices[place] is not None))
        object.__setattr__(self, "numbers", tuple(place for place in places if self.devices[place] is None))
        object.__setattr__(self, "kept_outputs", tuple(map(self.spec.group.outputs.index, self.kept)))

    def backward(self, places: tuple[int, ...]) -> Pass | None:
        """Return the pass that takes the gradients of these outputs; None if it would make zeros only.

        Raises:
            GradientError, UntranslatableError: there is none as a group.
        """
        return self._passes.get((True, places)) or self._add(
            (True, places), partial(build_backward, self.spec.group, self.typing, self.wanted, places, self.kept)
        )

    def tangents(self, inputs: tuple[int, ...]) -> Pass | None:
        """Return the pass that takes the tangents of these inputs; as ``backward``."""
        return self._passes.get((False, inputs)) or self._add(
            (False, inputs), partial(build_tangents, self.spec.group, self.typing, inputs)
        )

    def _add(self, key: tuple[bool, tuple[int, ...]], build: Callable[[], DerivedGroup | None]) -> Pass | None:
        derived = build()
        if derived is None:
            return None
        return self._passes.setdefault(key, Pass(register(derived.group), derived))


def find_case(spec: KernelSpec, inputs: Sequence[Any], *, saves_results: bool = True) -> Case:
    """Find or make the case of a call.

    Raises:
        GradientError: an input requires grad and the group has no derivative.
    """
    # A transform of torch.func may ask for any gradient, or for none.
    transformed = is_transformed()
    wanted = tuple(
        place
        for place, item in enumerate(inputs)
        if isinstance(item, torch.Tensor)
        and (item.requires_grad or transformed)
        and (item.is_floating_point() or item.is_complex())
    )
    described = [_describe(item) for item in inputs]
    signature = tuple((item.kind, item.dtype, not item.shape, item.device) for item in described)
    key = (spec.key, wanted, signature, torch.get_default_dtype(), saves_results, transformed)
    case = _cases.get(key)
    if case is None:
        case = _make_case(spec, described, wanted, saves_results=saves_results, derives=not transformed)
        _cases.put(key, case, config.max_plans)
    return case


def _make_case(
    spec: KernelSpec, described: list[planner.Bound], wanted: tuple[int, ...], *, saves_results: bool, derives: bool
) -> Case:
    device = planner.common_device(spec, described)
    specs = planner.input_specs(described, device)
    count = len(spec.group.outputs)
    tensors = [place for place, item in enumerate(described) if item.device is not None]
    read = tuple(tensors)
    kept: tuple[int, ...] = ()
    typing = infer_typing(spec.group, specs, torch.get_default_dtype())
    if derives:
        _check_outputs(spec, typing, wanted)
        try:
            if saves_results:
                spec, kept = _with_saved(spec, typing, described, wanted)
                typing = infer_typing(spec.group, specs, torch.get_default_dtype())
            derived = build_backward(spec.group, typing, wanted, range(count), kept)
            values = {item.place for item in derived.sources if not item.is_derivative} if derived else set[int]()
            read = tuple(place for place in tensors if place in values)
        except (GradientError, UntranslatableError) as error:
            check_eager(spec, error)
    continuous = find_differentiable(spec.group, typing, wanted)
    return Case(
        spec=spec,
        typing=typing,
        output_count=count,
        wanted=wanted,
        devices=tuple(item.device for item in described),
        kept=kept,
        read=read,
        constant_outputs=tuple(place for place, value in enumerate(spec.group.outputs) if value not in continuous),
        follows_default_dtype=planner.follows_default_dtype(spec, specs),
    )


def _with_saved(
    spec: KernelSpec, typing: Typing, described: Sequence[planner.Bound], wanted: tuple[int, ...]
) -> tuple[KernelSpec, tuple[int, ...]]:
    # The group with what is worth to be saved as further outputs, and all values of it that are saved beside inputs.
    group = spec.group
    derived = build_backward(group, typing, wanted, range(len(group.outputs)))
    if derived is None:
        return spec, ()
    layouts = infer_layouts(group, planner.value_layouts(described))
    elements = [0 if layout.is_number else math.prod(layout.shape) for layout in layouts]
    sizes = Sizes(
        tuple(typing.values[value].itemsize * count for value, count in enumerate(elements)), max(elements, default=0)
    )

    def cost_of(saved: frozenset[int]) -> float:
        derived = build_backward(group, typing, wanted, range(len(group.outputs)), saved)
        assert derived is not None, "there was one without"
        return estimate_cost(group, sizes, derived, saved)

    found = list(dict.fromkeys(choose_saved(group, derived.read, sizes, price=price) for price in PRICES))
    best = found[0] if len(found) == 1 else min(found, key=cost_of)
    kept = sorted(best)
    if not kept:
        return spec, ()
    outputs = (*group.outputs, *(value for value in kept if value not in group.outputs))
    spec = register(replace(group, outputs=outputs, _key=[]))
    # In the new group's canonical form values may have other numbers.
    return spec, tuple(sorted(spec.group.outputs[outputs.index(value)] for value in kept))


def _check_outputs(spec: KernelSpec, typing: Typing, wanted: Sequence[int]) -> None:
    # torch's comparisons have outputs without a gradient, and so has a functor beside others; one that has nothing
    # else would lose the gradient in silence.
    group = spec.group
    continuous = find_differentiable(group, typing, wanted)
    for application, offset in zip(group.applications, group.value_offsets(), strict=True):
        made = range(offset, offset + application.function.num_outputs)
        is_reached = not continuous.isdisjoint(application.tensors)
        if application.function.op is None and is_reached and continuous.isdisjoint(made):
            raise NotDifferentiableError(f"its result is {typing.values[offset]}", functor=application.function.name)


def check_eager(spec: KernelSpec, error: GradientError | UntranslatableError) -> None:
    """Raise ``error``, for which a group has no derived groups, unless torch can differentiate its eager version."""
    # It can where a loop's length depends on data, say. What is not differentiable is no more so in eager torch, unless
    # the user wrote that.
    has_derivative = isinstance(error, DataDependentError | UntranslatableError) or spec.fallback.is_given
    if spec.fallback.missing:
        name = spec.fallback.missing[0]
        raise GradientError(
            f"an input of {name!r} requires grad, and {name!r} has no derivative: {error}\n"
            "call it under torch.no_grad(), detach the input, or give jit_fn(..., backward=a functor)"
        ) from error
    if not has_derivative:
        raise error


def is_transformed() -> bool:
    """Whether torch.func differentiates or maps what is called now, or tensors may carry tangents."""
    if forward_ad._current_level >= 0:
        return True
    interpreter: Any = torch._C._functorch.peek_interpreter_stack()
    return interpreter is not None and interpreter.key() is not torch._C._functorch.TransformType.Functionalize


def _describe(item: Any) -> planner.Bound:
    if isinstance(item, torch.Tensor):
        return planner.Bound(torch.Tensor, item.dtype, tuple(item.shape), tuple(item.stride()), item.device)
    return planner.Bound(library.number_type(item))
