"""Loops: iterations that are known in advance are Python's, others go on as long as a lane is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fuser.cxx.builtin_types import AUTO
from fuser.cxx.nodes import ReferenceType, Statement
from fuser.cxx.statements import Declarator, DoWhile, For, RangeFor, While
from fuser.eager.calls import bind_parts, write
from fuser.eager.data import PLACE, needs_values
from fuser.eager.masks import NONE, Chain, Frame, LaneCondition, Mask, any_lane, both_of
from fuser.eager.resolve import resolve
from fuser.eager.state import Scope, State
from fuser.eager.storage import Location, make_location
from fuser.eager.walk import decide, evaluate, load, locate, run, truth_of

__all__ = ["run_do", "run_for", "run_range", "run_while"]


def run_for(state: State, node: For) -> None:
    """Run a loop with a counter."""
    test, step = node.condition, node.step
    with state.within(Scope(state.scope)), state.inside("loop") as frame:
        if node.start is not None:
            run(state, node.start)
        _loop(
            state,
            frame,
            node,
            None if test is None else lambda: truth_of(state, test),
            lambda: None if step is None else evaluate(state, step),
        )


def run_while(state: State, node: While) -> None:
    """Run a loop with its condition at the start."""
    with state.within(Scope(state.scope)), state.inside("loop") as frame:
        _loop(state, frame, node, lambda: decide(state, node.condition), lambda: None)


def run_do(state: State, node: DoWhile) -> None:
    """Run a loop with its condition at the end."""
    with state.inside("loop") as frame:
        _loop(state, frame, node, lambda: truth_of(state, node.condition), lambda: None)


def run_range(state: State, node: RangeFor) -> None:
    """Run a loop over the elements of an array."""
    whole = locate(state, node.array)
    with state.within(Scope(state.scope)), state.inside("loop"):
        for number in range(whole.length):
            if state.mask is NONE:
                break
            _count_iteration(state, node)
            _declare_element(state, node.variable, whole.part(number))
            _run_body(state, node.body)


def _declare_element(state: State, variable: Declarator, element: Location) -> None:
    if variable.bindings:
        bind_parts(state, variable, element)
        return
    location = element
    if not isinstance(variable.type, ReferenceType):
        kind = resolve(state, variable.type)
        location = make_location(element.type if kind is AUTO else kind, state.frames[-1])
        write(state, location, load(state, element))
    state.scope.names[variable.name] = location


def _loop(
    state: State,
    frame: Frame,
    node: For | While | DoWhile,
    condition: Callable[[], Any] | None,
    step: Callable[[], object],
) -> None:
    # Runs a loop inside the frame that was opened for it.
    entry, chain = frame.mask, Chain()
    is_first_free = isinstance(node, DoWhile)
    while frame.mask is not NONE:
        if condition is not None and not is_first_free:
            holds = condition()
            if holds is False:
                break
            if holds is not True:
                frame.mask = frame.mask.extend(LaneCondition(holds))
        is_first_free = False
        if not _renew(state, frame, entry, chain):
            break
        PLACE.set(node.place)
        _count_iteration(state, node)
        _run_body(state, node.body)
        if not _renew(state, frame, entry, chain):
            break
        step()


def _run_body(state: State, body: Statement) -> None:
    with state.inside("body"):
        run(state, body)


def _renew(state: State, frame: Frame, entry: Mask, chain: Chain) -> bool:
    # Lets one condition stand for all that made lanes leave a loop so far; whether any may be left.
    literals = entry.beyond(frame.mask)
    if frame.mask is NONE or not literals or (len(literals) == 1 and literals[0][0].chain is chain):
        return frame.mask is not NONE
    data = both_of(literals)
    number = chain.number = chain.number + 1
    # Where tensors have values, conditions of the past are not kept for it.
    known = chain.implied if state.graph is not None else {}
    others = [item for item in literals if not (item[0].chain is chain and item[1])]
    chain.implied = {**dict.fromkeys(others, number), **known}
    frame.mask = entry.extend(LaneCondition(data, chain, number))
    return state.graph is not None or any_lane(frame.mask.data)


def _count_iteration(state: State, node: For | While | DoWhile | RangeFor) -> None:
    state.iterations += 1
    size = 0 if state.graph is None else len(state.graph.nodes)
    if state.limit is not None and (state.iterations > state.limit or size > 32 * state.limit):
        text = node.condition.text if isinstance(node, While) else getattr(node, "text", "")
        raise needs_values(f"the loop runs while {text}" if text else "the loop is too long for a graph")
