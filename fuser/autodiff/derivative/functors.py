"""From a functor to the functor of its derivative."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fuser.autodiff.derivative.expression import Builder, Expr, topological
from fuser.autodiff.derivative.forward import differentiate_forward
from fuser.autodiff.derivative.importing import import_graph
from fuser.autodiff.derivative.reverse import differentiate_reverse
from fuser.autodiff.derivative.simplify import multiply_by_reciprocals, simplify
from fuser.autodiff.derivative.text import Names, emit_functor
from fuser.autodiff.derivative.torch_ops import DIFFERENTIATED_AS
from fuser.cxx.functor import EntryParameter, Functor, Role, parse_functor
from fuser.dtypes import is_continuous
from fuser.eager.translation import translate
from fuser.errors import DataDependentError, NotDifferentiableError

__all__ = [
    "Derived",
    "forward_functor",
    "reverse_functor",
]

Argument = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Derived:
    """A derivative as a functor, and what to call it with."""

    # None when everything that was asked for is zero.
    functor: Functor | None
    # What each parameter of the functor (outputs left out) is: ("grad", k), the k-th incoming gradient or tangent, or
    # ("argument", place), an argument of the functor that was differentiated. Tensors stay tensors, scalars scalars.
    arguments: tuple[Argument, ...]
    # For each gradient (forward: tangent) that was asked for the output that holds it; None where it is zero.
    results: tuple[int | None, ...]
    # C++ type of each output.
    dtypes: tuple[torch.dtype, ...]


@dataclass(frozen=True, slots=True)
class _ReadFunctor:
    """A functor as expressions of its parameters."""

    name: str
    # Name of the template parameter, which stands for ``compute``.
    template: str
    compute: torch.dtype
    # One per argument, in order.
    parameters: tuple[EntryParameter, ...]
    inputs: tuple[Expr, ...]
    # Name and value of each output; the value is of the compute type, unless the output is no real or complex number.
    outputs: tuple[tuple[str, Expr], ...]


@lru_cache(maxsize=4096)
def reverse_functor(
    functor: Functor,
    compute: torch.dtype,
    types: tuple[torch.dtype, ...],
    *,
    wanted: tuple[int, ...],
    outputs: tuple[int, ...],
    op: str | None = None,
) -> Derived:
    """Return the functor that makes gradients of arguments from gradients of outputs.

    The gradient of ``x > 0 ? log(x) : x`` for float32::

        template <typename T> T f_backward(T grad_out, T x) {
          return x > T(0) ? grad_out / x : grad_out;
        }

    It takes the gradients first, then what it needs of the functor's own arguments, in their order, with their names
    and types; it can be differentiated again.

    Args:
        functor: what to differentiate.
        compute: its compute dtype.
        types: C++ type of each argument, tensors and scalars in the order of the declaration; as for ``translate``.
        wanted: slots of the arguments whose gradient is asked for.
        outputs: the outputs that have a gradient.
        op: which of torch's ops the functor is, if any: its derivative is torch's, at ties and kinks too.

    Raises:
        NotDifferentiableError: an operation in between, or every output, has no derivative.
        DataDependentError: control flow depends on data.
        UntranslatableError: the text cannot be translated.
    """
    with _disable_current_modes():
        return _reverse_source(_load_source(functor, compute, types, op), wanted, outputs)


@lru_cache(maxsize=4096)
def forward_functor(
    functor: Functor,
    compute: torch.dtype,
    types: tuple[torch.dtype, ...],
    *,
    given: tuple[int, ...],
    op: str | None = None,
) -> Derived:
    """Return the functor that makes the tangent of every output from tangents of arguments.

    A tangent may have fewer dimensions than its output: an argument that does not enter it does not broadcast it.

    Args:
        functor: what to differentiate.
        compute: its compute dtype.
        types: as for ``reverse_functor``.
        given: slots of the arguments that have a tangent.
        op: as for ``reverse_functor``.

    Raises:
        As ``reverse_functor``.
    """
    with _disable_current_modes():
        return _forward_source(_load_source(functor, compute, types, op), given)


def _load_source(
    functor: Functor, compute: torch.dtype, types: tuple[torch.dtype, ...], op: str | None
) -> _ReadFunctor:
    """Translate a functor into expressions.

    Raises:
        DataDependentError, UntranslatableError: as ``reverse_functor``.
    """
    form = DIFFERENTIATED_AS.get(functor.entry.removeprefix("aten_")) if op else None
    if form is not None:
        return _source_of_op(form, functor, compute, types)
    translation = translate(functor, compute, types, differentiable=True)
    if translation.graph_module is None:
        raise DataDependentError(f"{functor.entry} has no derivative in one piece: {translation.data_dependent}")
    names = [item.name for item in functor.inputs]
    inputs, values = import_graph(translation.graph_module.graph, names, Builder())
    return _source(functor, compute, inputs, values)


def _source_of_op(
    form: Callable[..., Expr], functor: Functor, compute: torch.dtype, types: tuple[torch.dtype, ...]
) -> _ReadFunctor:
    builder = Builder()
    inputs = [builder.input(item.name, dtype) for item, dtype in zip(functor.inputs, types, strict=True)]
    return _source(functor, compute, inputs, [form(*inputs)])


def _source(functor: Functor, compute: torch.dtype, inputs: Sequence[Expr], values: Sequence[Expr]) -> _ReadFunctor:
    values, inputs = _as_declared(values, inputs, {item.name for item in functor.scalars})
    names = [item.name for item in functor.outputs] or ["out"]
    outputs = [value.to(compute) if is_continuous(value.dtype) else value for value in values]
    return _ReadFunctor(
        name=functor.entry,
        template=functor.template_parameters[0],
        compute=compute,
        parameters=functor.inputs[: len(inputs)],
        inputs=tuple(inputs),
        outputs=tuple(zip(names, outputs, strict=True)),
    )


def _reverse_source(source: _ReadFunctor, wanted: Sequence[int], outputs: Sequence[int]) -> Derived:
    """As ``reverse_functor``, for a functor that is expressions already."""
    if not outputs:
        return Derived(None, (), (None,) * len(wanted), ())
    chosen = [source.outputs[slot] for slot in outputs]
    _check_outputs(source, chosen)
    names = _names(source)
    builder = source.inputs[0].builder
    given = [builder.input(names.choose(f"grad_{name}"), source.compute) for name, _ in chosen]
    pairs = [(value, grad) for (_, value), grad in zip(chosen, given, strict=True) if is_continuous(value.dtype)]
    asked = [source.inputs[slot] for slot in wanted]
    with _naming(source):
        found = differentiate_reverse([value for value, _ in pairs], [grad for _, grad in pairs], asked)
    results = [
        (names.choose(f"grad_{source.parameters[slot].name}"), value) for slot, value in zip(wanted, found, strict=True)
    ]
    return _build(source, f"{source.name}_backward", given, results)


def _forward_source(source: _ReadFunctor, given: Sequence[int]) -> Derived:
    """As ``forward_functor``, for a functor that is expressions already."""
    _check_outputs(source, source.outputs)
    names = _names(source)
    builder = source.inputs[0].builder
    inputs = [source.inputs[slot] for slot in given]
    tangents = [
        builder.input(names.choose(f"tangent_{source.parameters[slot].name}"), source.compute) for slot in given
    ]
    wide = [tangent.to(item.dtype) for tangent, item in zip(tangents, inputs, strict=True)]
    with _naming(source):
        found = differentiate_forward([value for _, value in source.outputs], inputs, wide)
    results = [(names.choose(f"tangent_{name}"), value) for (name, _), value in zip(source.outputs, found, strict=True)]
    return _build(source, f"{source.name}_jvp", tangents, results)


def _build(
    source: _ReadFunctor, entry: str, given: Sequence[Expr], results: Sequence[tuple[str, Expr | None]]
) -> Derived:
    kept = [(slot, name, value) for slot, (name, value) in enumerate(results) if value is not None]
    values = simplify([_as_result(value, source.compute) for _, _, value in kept])
    named = [
        (slot, name, value)
        for (slot, name, _), value in zip(kept, values, strict=True)
        if not (value.equals(0) or value.equals(-0.0))
    ]
    numbers: list[int | None] = [None] * len(results)
    for number, (slot, _, _) in enumerate(named):
        numbers[slot] = number
    if not named:
        return Derived(None, (), tuple(numbers), ())
    scalars = {item.name for item in source.parameters if item.role is Role.SCALAR}
    values = multiply_by_reciprocals([value for _, _, value in named], scalars, {item.args[0] for item in given})
    meanings: dict[str, Argument] = {item.args[0]: ("grad", k) for k, item in enumerate(given)}
    meanings |= {item.name: ("argument", slot) for slot, item in enumerate(source.parameters)}
    used = {item.args[0]: item for item in topological(values) if item.op == "input"}
    parameters = [used[name] for name in meanings if name in used]
    outputs = [(name, value) for (_, name, _), value in zip(named, values, strict=True)]
    text = emit_functor(entry, parameters, outputs, source.compute, source.template)
    return Derived(
        functor=parse_functor(text, tuple(name for name in scalars if name in used), len(outputs)),
        arguments=tuple(meanings[item.args[0]] for item in parameters),
        results=tuple(numbers),
        dtypes=tuple(value.dtype for value in values),
    )


def _as_result(value: Expr, compute: torch.dtype) -> Expr:
    # The compute type's precision: a gradient is no wider than what it was computed in.
    if value.dtype.is_complex == compute.is_complex:
        return value.to(compute)
    return value.to(compute.to_real()) if compute.is_complex else value


def _as_declared(
    values: Sequence[Expr], inputs: Sequence[Expr], scalars: Collection[str]
) -> tuple[list[Expr], list[Expr]]:
    # A scalar that is converted to one type wherever it is used is of that type, as the user declared it.
    readers: dict[Expr, set[torch.dtype | None]] = {item: set() for item in inputs}
    for item in topological(values):
        for operand in item.operands:
            readers.setdefault(operand, set()).add(item.dtype if item.op == "convert" else None)
    for value in values:
        readers.setdefault(value, set()).add(None)

    def declared(item: Expr) -> Expr:
        dtype = next(iter(readers[item]), None)
        is_one = item.args[0] in scalars and len(readers[item]) == 1
        return item if dtype is None or not is_one else item.builder.input(item.args[0], dtype)

    def instead(item: Expr) -> Expr | None:
        other = declared(item.operands[0]) if item.op == "convert" and item.operands[0].op == "input" else None
        return other if other is not None and other.dtype is item.dtype else None

    builder = Builder()
    return builder.copy(values, instead), [builder.leaf(declared(item)) for item in inputs]


def _names(source: _ReadFunctor) -> Names:
    return Names([source.template, *(item.name for item in source.parameters)])


def _check_outputs(source: _ReadFunctor, outputs: Sequence[tuple[str, Expr]]) -> None:
    if not any(is_continuous(value.dtype) for _, value in outputs):
        dtype = str(outputs[0][1].dtype).removeprefix("torch.")
        raise NotDifferentiableError(f"its result is {dtype}", outputs[0][1].place, source.name)


@contextmanager
def _naming(source: _ReadFunctor) -> Iterator[None]:
    # Rules know no functor.
    try:
        yield
    except NotDifferentiableError as error:
        raise NotDifferentiableError(error.reason, error.place, source.name) from None
