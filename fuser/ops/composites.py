"""torch's ops that are several steps: one application in a group, which becomes its steps when a call is planned.

The steps are a group of their own, made for a *form*: which optional tensors there are, the dimensions, what is asked
for. They follow ATen's CUDA kernels formula by formula, in the type in which those accumulate. Where one step has no
kernel the op has none: torch's op runs whole, never in pieces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from fuser.application import Application
from fuser.cxx.functor import Functor, parse_functor
from fuser.errors import GroupError, ShapeError, UnsupportedError
from fuser.expansion import Expansion
from fuser.function import Function, View
from fuser.graph import FusionGroup, GroupBuilder
from fuser.layout import Shape, Strides
from fuser.ops.reductions import REDUCTIONS
from fuser.ops.table import dtype_kind
from fuser.orders import KEPT_ORDERS

__all__ = [
    "COMPOSITES",
    "Composite",
    "composite_function",
    "composite_steps",
    "expand",
    "keeps_bits",
    "ordered_form",
    "step",
    "view",
]

Form = tuple[Any, ...]


class Composite(NamedTuple):
    """One row of the table."""

    name: str
    # The steps of a form, as torch orders its reductions (True) or in as few operations as it takes (False). The names
    # of the group's inputs are those of the op's parameters.
    steps: Callable[[Form, bool], FusionGroup]
    # The eager reference: called with the form, and tensors and scalars by name.
    eager: Callable[..., Any]
    # Why torch refuses the shapes of some tensors, which come by name; empty when it does not. It may raise an error of
    # another kind.
    check: Callable[[Form, Mapping[str, Shape]], str] = lambda form, shapes: ""  # noqa: ARG005
    # Tensors that may have another dtype than the first one.
    free: frozenset[str] = frozenset()
    # Whether the steps have the bits of torch's own op, on any device.
    is_exact: bool = False
    # What the steps in torch's order depend on beside the form, which it is put behind: of the tensor called "input".
    kernel: Callable[[torch.dtype, Shape, Strides], Form] | None = None
    # Whether fast numerics on CUDA may take the steps in torch's order, too, where that is known and faster.
    is_short: bool = False


COMPOSITES: dict[str, Composite] = {}


@functools.lru_cache(1024)
def composite_steps(op: str, form: Form, is_ordered: bool = False) -> FusionGroup:
    """Return the steps of an op of the table."""
    return COMPOSITES[op].steps(form, is_ordered)


def ordered_form(
    function: Function, dtypes: Sequence[Any], layouts: Sequence[tuple[Shape, Strides]], *, is_strict: bool
) -> Form | None:
    """Return the form of the steps in torch's order of an application: that of its function, and which kernel it is.

    Args:
        function: a composite.
        dtypes: of its tensors.
        layouts: shape and strides of each.
        is_strict: whether it has to be torch's order; where it has not, None says that the steps are others.
    """
    composite, form = COMPOSITES[str(function.op)], function.form or ()
    if not (is_strict or composite.is_short):
        return None
    if composite.kernel is None:
        return form
    slot = next(slot for slot, item in enumerate(function.functor.tensors) if item.name == "input")
    return (*form, *composite.kernel(dtypes[slot], *layouts[slot]))


@functools.lru_cache(1024)
def composite_function(op: str, form: Form) -> Function:
    """Return the function that applies an op as a whole; its functor says what it takes, and has no kernel."""
    group = composite_steps(op, form)
    taken = [f"{'double' if item.is_scalar else 'T'} {item.name}" for item in group.inputs]
    made = [f"out{slot}" for slot in range(len(group.outputs))]
    parameters = ", ".join([*taken, *(f"T& {name}" for name in made)])
    body = " ".join(f"{name} = T(0);" for name in made)
    scalars = tuple(item.name for item in group.inputs if item.is_scalar)
    text = f"template <typename T> void aten_{op.lstrip('_')}({parameters}) {{ {body} }}"
    return Function(parse_functor(text, scalars, len(made)), op=op, form=form)


def bind_inputs(function: Function, tensors: Sequence[Any], scalars: Sequence[Any]) -> list[Any]:
    """Return what the inputs of a composite's steps are bound to, from what its tensors and scalars are."""
    given, numbers = iter(tensors), iter(scalars)
    steps = composite_steps(str(function.op), function.form or ())
    return [next(numbers) if item.is_scalar else next(given) for item in steps.inputs]


def call_composite(function: Function, tensors: Sequence[Any], scalars: Mapping[str, Any]) -> Any:
    """Run torch's op."""
    names = [parameter.name for parameter in function.functor.tensors]
    return COMPOSITES[str(function.op)].eager(function.form, **dict(zip(names, tensors, strict=True)), **scalars)


def check_dtypes(function: Function, dtypes: Sequence[torch.dtype]) -> None:
    """Raise UnsupportedError for dtypes that the steps are not for; torch's op may have an error of its own."""
    free = COMPOSITES[str(function.op)].free
    if dtype_kind(dtypes[0]) != "float":
        raise UnsupportedError(f"op {function.op!r} on {dtypes[0]}")
    for dtype, parameter in zip(dtypes, function.functor.tensors, strict=True):
        if dtype != dtypes[0] and parameter.name not in free:
            raise UnsupportedError(f"op {function.op!r} with tensors of different dtypes")


def check_shapes(function: Function, shapes: Sequence[Shape]) -> None:
    """Raise ShapeError for shapes that torch refuses."""
    names = [parameter.name for parameter in function.functor.tensors]
    reason = COMPOSITES[str(function.op)].check(function.form or (), dict(zip(names, shapes, strict=True)))
    if reason:
        raise ShapeError(f"{function.op}: {reason}")


def check_function(function: Function) -> None:
    """Raise GroupError for a function that is no row of the table in the form that it says."""
    op = str(function.op)
    try:
        is_known = op in COMPOSITES and function == composite_function(op, function.form or ())
    except (TypeError, ValueError, LookupError):
        is_known = False
    if not is_known:
        raise GroupError(f"there is no op {op!r} of the form {function.form!r} in fuser's table")


def keeps_bits(function: Function, device_type: str) -> bool:
    """Whether strict numerics may fuse an op: torch's order of all its reductions is known there."""
    if not function.is_composite or COMPOSITES[str(function.op)].is_exact:
        return True
    steps = composite_steps(str(function.op), function.form or (), True)
    functions = [item.function for item in steps.applications]
    if not any(item.reduction for item in functions):
        # As those of torch's pointwise ops.
        return device_type == "cuda"
    inexact = [item for item in functions if item.op not in REDUCTIONS or "float" not in REDUCTIONS[item.op].exact]
    orders = {item.reduction.order for item in inexact if item.reduction}
    return bool(orders) and orders <= KEPT_ORDERS.get(device_type, frozenset())


def only_wanted(made: Sequence[Any], mask: Sequence[bool]) -> list[Any]:
    """Return what an ``output_mask`` asks for of a backward op's results."""
    return [item for item, is_wanted in zip(made, mask, strict=True) if is_wanted]


# --- writing steps ----------------------------------------------------------------------------------------------
def optional_input(builder: GroupBuilder, name: str, is_there: bool, *, is_scalar: bool = False) -> list[int]:
    """Add an input that not every form has; return its handle, or nothing."""
    return [builder.add_input(name, is_scalar=is_scalar)] if is_there else []


@functools.cache
def step(text: str, *, num_outputs: int = 1, scalars: tuple[str, ...] = (), **rest: Any) -> Function:
    """Return a step: the function of a functor, given without ``template <typename T>``."""
    return Function(parse_functor(f"template <typename T> {text}", scalars, num_outputs), **rest)


@functools.cache
def view(of: View) -> Function:
    """Return the step that looks at a tensor in another shape: of the op's tensors, or of what becomes its outputs."""
    return Function(parse_functor("template <typename T> T aten_view(T x) { return x; }"), view=of)


@functools.cache
def value_functor() -> Functor:
    """Return what takes elements as they are."""
    return step("T value(T x) { return x; }").functor


@functools.cache
def add_functor() -> Functor:
    """Return how sums are added up."""
    return step("T add(T a, T b) { return a + b; }").functor


# Of steps whose results need not be added up to know what a row of them comes to: the function that says it, and which
# of the step's tensors it takes.
ROW_SUMS: dict[Functor, tuple[Function, tuple[int, ...]]] = {}


# --- expansion --------------------------------------------------------------------------------------------------
@functools.lru_cache(1024)
def expand(group: FusionGroup, forms: tuple[Form | None, ...] = (), *, knows_sums: bool = True) -> Expansion:
    """Put the steps of its composites into a canonical group, without what no output needs, inputs too.

    Args:
        group: the group.
        forms: of its applications, where that is one in torch's order (see ``ordered_form``).
        knows_sums: whether sums that are known without adding are not added up (see ``ROW_SUMS``).

    Raises:
        UnsupportedError: a step looks in another shape at what is made in the group; ``application`` says which.
    """
    writer = _Expander(group, forms)
    made = [writer.find(value) for value in group.outputs]
    whole = writer.builder.build([handle for handle, _ in made])
    needed = sorted(whole.applications_from_outputs())
    read = {
        value for index in needed for item in [whole.applications[index]] for value in (*item.tensors, *item.scalars)
    }
    used = [value for value in range(len(whole.inputs)) if value in read]
    builder, offsets = GroupBuilder(group.numerics), whole.value_offsets()
    inputs = [whole.inputs[value] for value in used]
    values = {
        value: builder.add_input(item.name, is_scalar=item.is_scalar) for value, item in zip(used, inputs, strict=True)
    }
    for index in needed:
        item = whole.applications[index]
        item = _known_sum(whole, item) if knows_sums else item
        tensors, scalars = ([values[value] for value in given] for given in (item.tensors, item.scalars))
        values |= enumerate(builder.apply(item.function, tensors, scalars, item.name), offsets[index])
    return Expansion(
        builder.build([values[value] for value in whole.outputs]),
        tuple(writer.inputs[value] for value in used),
        tuple(view for _, view in made),
        tuple(writer.origins[index] for index in needed),
    )


def _known_sum(group: FusionGroup, item: Application) -> Application:
    # What makes a sum without adding, where that is known.
    reduction = item.function.reduction
    maker = group.producers()[item.tensors[0]] if reduction and item.function.functor == value_functor() else -1
    if reduction is None or maker < 0 or reduction.combine != add_functor() or reduction.dims not in {(1,), (-1,)}:
        return item
    made = group.applications[maker]
    if made.function.functor not in ROW_SUMS:
        return item
    function, slots = ROW_SUMS[made.function.functor]
    return Application(function, (*item.tensors, *(made.tensors[slot] for slot in slots)))


class _Expander:
    """Writes the applications of a group, those of steps in place of composites.

    What steps look at in another shape are inputs of the group in that shape. What else makes such a tensor, or reads
    such a result, elementwise, is applied in that shape, too.
    """

    def __init__(self, group: FusionGroup, forms: tuple[Form | None, ...]) -> None:
        self.forms = forms
        self.builder = GroupBuilder()
        self.given = range(len(group.inputs))
        self.inputs: list[tuple[int, View | None]] = [(index, None) for index in self.given]
        self.origins: list[int] = []
        # How each handle was made: which result of which application.
        self.makers: dict[int, tuple[Application, int]] = {}
        # Handles in other shapes. Results that steps give in another shape than they make them have negative handles:
        # the builder's, and the shape.
        self.seen: dict[tuple[int, View], int] = {}
        self.made: dict[int, int] = {}
        self.views: dict[int, View] = {}
        self.handles = [self.builder.add_input(item.name, is_scalar=item.is_scalar) for item in group.inputs]
        for origin, application in enumerate(group.applications):
            taken = ([self.handles[value] for value in given] for given in (application.tensors, application.scalars))
            tensors, scalars = taken
            function = application.function
            if function.is_composite:
                self.handles += self._inline(origin, function, bind_inputs(function, tensors, scalars))
            else:
                self.handles += self._apply(origin, replace(application, tensors=(*tensors,), scalars=(*scalars,)))

    def find(self, value: int) -> tuple[int, View | None]:
        """Return the builder's handle of a value of the group, and the shape in which it is given back."""
        handle = self.handles[value]
        for (seen, of), made in self.seen.items():
            if seen == handle and handle in self.makers:
                # Made in this shape anyway.
                return made, of.inverse
        return self.made.get(handle, handle), self.views.get(handle)

    def _inline(self, origin: int, function: Function, inputs: list[int]) -> list[int]:
        form = self.forms[origin] if self.forms else None
        steps = composite_steps(str(function.op), form or function.form or (), form is not None)
        handles = inputs
        for item in steps.applications:
            tensors, scalars = (tuple(handles[value] for value in given) for given in (item.tensors, item.scalars))
            if item.function.view is not None:
                handles.append(self._look_at(origin, item.function.view, tensors[0]))
            elif any(handle < 0 for handle in tensors):
                raise _refuse(origin, "steps of a result in another shape")
            else:
                handles += self._add(origin, replace(item, tensors=tensors, scalars=scalars))
        return [handles[value] for value in steps.outputs]

    def _add(self, origin: int, application: Application) -> tuple[int, ...]:
        self.origins.append(origin)
        made = self.builder.apply(application.function, application.tensors, application.scalars, application.name)
        self.makers |= {handle: (application, slot) for slot, handle in enumerate(made)}
        return made

    def _apply(self, origin: int, application: Application) -> Sequence[int]:
        shapes = {self.views[handle] for handle in application.tensors if handle < 0}
        if not shapes:
            return self._add(origin, application)
        if len(shapes) > 1 or not _is_elementwise(application.function):
            raise _refuse(origin, "reading a result in another shape")
        shape = shapes.pop()
        tensors = tuple(
            self.made[handle] if handle < 0 else self._look_at(origin, shape.inverse, handle)
            for handle in application.tensors
        )
        return [self._give_back(made, shape) for made in self._add(origin, replace(application, tensors=tensors))]

    def _give_back(self, handle: int, of: View) -> int:
        found = -1 - len(self.views)
        self.made[found], self.views[found] = handle, of
        return found

    def _look_at(self, origin: int, of: View, handle: int) -> int:
        if of.is_inverse:
            return self._give_back(handle, of)
        if self.views.get(handle) == of.inverse:
            return self.made[handle]
        if (handle, of) not in self.seen:
            if handle in self.given:
                self.seen[handle, of] = self.builder.add_input(f"v{handle}")
                self.inputs.append((handle, of))
            elif handle in self.makers and _is_elementwise(self.makers[handle][0].function):
                application, slot = self.makers[handle]
                tensors = tuple(self._look_at(origin, of, value) for value in application.tensors)
                self.seen[handle, of] = self._add(origin, replace(application, tensors=tensors))[slot]
            else:
                raise _refuse(origin, "a tensor in another shape that is made in the group")
        return self.seen[handle, of]


def _is_elementwise(function: Function) -> bool:
    return not (function.reduces or function.reshapes or function.is_index)


def _refuse(origin: int, reason: str) -> UnsupportedError:
    return UnsupportedError(reason, application=origin)
