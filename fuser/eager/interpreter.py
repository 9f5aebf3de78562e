"""Runs a functor's syntax on constants, tensors or nodes of a graph.

Note [Lanes]
All lanes walk through the program together. Control flow that is known when the program runs is Python's. Where it
depends on data, both ways run, each for its own lanes (``masks.Frame``): a statement that leaves a loop, a switch or a
function takes its lanes out of every frame up to that one. A loop ends when no lane is left in it; with the nodes of a
graph in place of tensors nobody can know when that is, unless the lanes leave it one by one up to a constant bound.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from fuser.cxx.nodes import Parameter, ReferenceType
from fuser.cxx.statements import Program
from fuser.eager.calls import call_functions
from fuser.eager.data import Value
from fuser.eager.evaluate import EVALUATE, LOCATE
from fuser.eager.resolve import resolve
from fuser.eager.state import Scope, State, Tables
from fuser.eager.statements import RUN
from fuser.eager.storage import Fixed, Location, NoTranslation, Thing, make_location, zero_of
from fuser.eager.types import CppType
from fuser.eager.walk import run_all

__all__ = ["interpret"]

_TABLES = Tables(RUN, EVALUATE, LOCATE)


def interpret(
    program: Program,
    compute: torch.dtype,
    arguments: Sequence[Value],
    graph: fx.Graph | None,
    limit: int,
    *,
    is_differentiable: bool,
) -> list[Value]:
    """Call a program's entry once and return its results.

    Args:
        program: the functor's syntax.
        compute: what its first template parameter stands for.
        arguments: the entry's, in order.
        graph: what nodes are added to; None to run on tensors.
        limit: most iterations of all loops together, and elements an index may choose from, in a graph.
        is_differentiable: stop the gradients of lanes where they do not run.
    """
    state = State(program, _TABLES, graph, None if graph is None else limit, is_differentiable)
    with state.resources:
        run_all(state, program.globals)
        return _call_entry(state, compute, arguments)


def _call_entry(state: State, compute: torch.dtype, arguments: Sequence[Value]) -> list[Value]:
    entry = state.program.entry
    count = len(arguments) + sum(map(_is_output, entry.parameters))
    given = iter(arguments)
    operands: list[Location] = []
    made: list[Location] = []
    for parameter in entry.parameters[:count]:
        if _is_output(parameter):
            kind = _output_type(state, parameter, compute)
            location = make_location(kind, state.frames[-1])
            location.store(state, zero_of(kind))
            made.append(location)
            operands.append(location)
        else:
            operands.append(Fixed(next(given)))
    result = call_functions(state, state.program.functions[entry.name], [compute], operands, state.globals)
    return [_as_number(location.load(state)) for location in made] if made else [_as_number(result)]


def _output_type(state: State, parameter: Parameter, compute: torch.dtype) -> CppType:
    names = [item.name for item in state.program.entry.template]
    with state.within(Scope(state.globals, dict.fromkeys(names, compute))):
        return resolve(state, parameter.type)


def _as_number(thing: Thing) -> Value:
    if isinstance(thing, Value):
        return thing
    raise NoTranslation("a result that is no number")


def _is_output(parameter: Parameter) -> bool:
    return isinstance(parameter.type, ReferenceType) and not parameter.type.is_const
