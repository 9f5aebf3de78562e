"""Both passes of a graph for one kind of call, as AOTAutograd makes them: what differed before is a symbol."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fuser.errors import UnsupportedError
from fuser.fx.as_called import (
    LAID_OUT,
    VALUES_OF_MATRICES,
    WARNS,
    WINDOWS,
    AsCalled,
    CountingLaidOut,
    computes_idle_vectors,
    count_laid_out,
    writes_into_windows,
)
from fuser.fx.call_kinds import asking_quietly, bind_constants, is_like, make_fakes
from fuser.fx.taking_turns import Turn
from fuser.process import is_of_current_handler
from fuser.route import requires_grad
from fuser.warming.follow import packing_nothing

__all__ = ["Joint", "trace_joint"]

_ATEN = torch.ops.aten
SHARED = "results share memory with arguments, or with each other"
_NORM = _ATEN._native_batch_norm_legit_functional.default


@dataclass(frozen=True, slots=True)
class Joint:
    """Both passes of a graph for one kind of call."""

    nodes: fx.GraphModule
    # Functions of a list, which they empty: of the tensors, and of what the first one saves and the gradients.
    # None where no output has a gradient.
    forward: Callable[[list[Any]], Any] | None
    backward: Callable[[list[Any]], Any] | None
    count: int
    # Which inputs are tensors, or numbers of each call; and which outputs have gradients.
    varying: tuple[int, ...]
    continuous: tuple[int, ...]
    # Of those, the outputs whose gradients the second one takes.
    taken: tuple[int, ...]
    # The tensors that gradients depend on: all but statistics that a norm only updates.
    read: tuple[int, ...]
    # Those that require grad and that no result's gradient reaches (only ``x > 0`` is read): autograd sees no way.
    unreached: frozenset[int]
    # The call it was traced for, and what sizes, strides and values of numbers it relies on.
    key: tuple[Any, ...]
    relies_on: Callable[[Sequence[Any]], bool]

    def is_like(self, key: tuple[Any, ...]) -> bool:
        """Whether a call differs from the one it was traced for in sizes, strides and values of numbers alone."""
        return is_like(key, self.key)

    def takes(self, taken: Sequence[int] | None) -> bool:
        """Whether its backward pass takes the gradients of these outputs, as ``trace_joint`` has them."""
        return self.taken == _choose(self.continuous, taken)

    def fits(self, inputs: Sequence[Any]) -> bool:
        """Whether a call that is like the one it was traced for may go by it."""
        # The first item of the key is no input's.
        constants = [(slot, item) for slot, item in enumerate(self.key[1:]) if slot not in self.varying]
        if not all(number.is_of(inputs[slot]) for slot, number in constants):
            return False
        return self.relies_on([inputs[slot] for slot in self.varying])


def trace_joint(
    nodes: fx.GraphModule,
    key: tuple[Any, ...],
    inputs: Sequence[Any],
    before: Sequence[tuple[Any, ...]],
    numbers: Sequence[int] = (),
    taken: Sequence[int] | None = None,
    *,
    is_function: bool = False,
    is_strict: bool = False,
) -> Joint:
    """Trace both passes.

    Args:
        nodes: what is differentiated, as a graph of its inputs.
        key: of the call, which is traced with its ``inputs``.
        inputs: one per input of the graph.
        before: the keys of calls that are like it: sizes that differ from theirs are symbols.
        numbers: the slots of numbers that are symbols, all others being constants.
        taken: the outputs whose gradients are to come; None, or where none of them has any: all that do.
        is_function: whether results that share memory with inputs or with each other are to do so: there is no trace of
            such, nor of what warns.
        is_strict: whether sums are to be added up in the order that tensors have in eager torch's memory.

    Raises:
        UnsupportedError: torch cannot, or its graphs would rely on how gradients lie in memory; says why.
    """
    from torch._functorch.aot_autograd import aot_module_simplified  # noqa: PLC0415 - takes a second

    from fuser.fx.backend import compile_graph, split_passes  # noqa: PLC0415 - as above

    counting = CountingLaidOut()
    varying = tuple(slot for slot, item in enumerate(inputs) if isinstance(item, torch.Tensor) or slot in numbers)

    def split(graph: fx.GraphModule, given: Any, **settings: Any) -> Any:
        if settings["num_fwd_outputs"] != len(made):
            raise UnsupportedError(SHARED)
        if is_function or is_strict:
            ahead, back = (count_laid_out(graph.graph, is_backward=item) for item in (False, True))
            if ahead > counting.count or (back and back > _count_backwards(mode, made, fakes, chosen)):
                raise UnsupportedError(LAID_OUT)
        if writes_into_windows(graph.graph):
            raise UnsupportedError(WINDOWS)
        _prepare(graph)
        raise _Split(split_passes(graph, given, **settings))

    try:
        module = bind_constants(nodes, inputs, varying)
        own: Any = AsCalled(module)
        known = [[kinds[1 + slot] for kinds in before] for slot in varying]
        mode, fakes, find_guard = make_fakes([inputs[slot] for slot in varying], known)
        with warnings.catch_warnings(record=is_function) as said, mode, packing_nothing(), asking_quietly(), counting:
            if is_function:
                warnings.simplefilter("always")
            made = own(*fakes)
        shared = _find_shared(made, fakes)
        reached = _find_reached(made)
        unreached = frozenset(
            slot for slot, x in zip(varying, fakes, strict=True) if requires_grad(x) and id(x) not in reached
        )
        if is_function:
            _check_function(shared, said)
        continuous = tuple(slot for slot, item in enumerate(made) if item.requires_grad)
        chosen = _choose(continuous, taken)
        _call_on_results(module, torch.detach, {*continuous} - {*chosen})
        _call_on_results(module, torch.clone, shared)
        forward = backward = None
        try:
            with Turn(), packing_nothing(), _floats_as_they_are() if numbers else nullcontext():
                aot_module_simplified(own, fakes, lambda graph, _: compile_graph(graph), partition_fn=split)
        except _Split as both:
            # All that is wanted of AOTAutograd.
            forward, backward = (compile_graph(item) for item in both.passes)
        assert continuous == () or forward is not None, "AOTAutograd splits what it differentiates"
        guard = find_guard()
    except Exception as error:  # Whatever the reason, torch's ops one by one are right, and say what is wrong.
        if is_of_current_handler(error):
            raise
        is_known = isinstance(error, UnsupportedError)
        reason = str(error) if is_known else f"{type(error).__name__} in torch's tracing of a backward pass"
        raise UnsupportedError(reason) from error
    updated = {node for norm in nodes.graph.find_nodes(op="call_function", target=_NORM) for node in norm.args[3:5]}
    placeholders = nodes.graph.find_nodes(op="placeholder")
    read = tuple(slot for slot in varying if slot not in numbers and placeholders[slot] not in updated)
    return Joint(nodes, forward, backward, len(made), varying, continuous, chosen, read, unreached, key, guard)


def _check_function(shared: set[int], said: Sequence[Any] | None) -> None:
    if shared or said:
        raise UnsupportedError(SHARED if shared else WARNS)


def _count_backwards(mode: Any, made: Sequence[torch.Tensor], inputs: Sequence[Any], taken: Sequence[int]) -> int:
    # How much the backward pass lays out anew where nobody traces; gradients lie as the results, as AOTAutograd's do.
    results = [made[slot] for slot in taken]
    leaves = [item for item in inputs if requires_grad(item)]
    counting = CountingLaidOut()
    with mode, counting:
        torch.autograd.grad(results, leaves, [*map(torch.empty_like, results)], allow_unused=True)
    return counting.count


def _choose(continuous: tuple[int, ...], taken: Sequence[int] | None) -> tuple[int, ...]:
    return tuple(slot for slot in continuous if taken is None or slot in taken) or continuous


@contextmanager
def _floats_as_they_are() -> Iterator[None]:
    # As under Dynamo, torch would make arithmetic with floats one with tensors of float64, which rounds elsewhere.
    from torch._functorch._aot_autograd import graph_compile  # noqa: PLC0415 - as in trace_joint

    module: Any = graph_compile
    before, module.tensorify_python_scalars = module.tensorify_python_scalars, lambda *_: None
    try:
        yield
    finally:
        module.tensorify_python_scalars = before


class _Split(BaseException):
    """Ends AOTAutograd once it has both passes of a graph."""

    def __init__(self, passes: Sequence[fx.GraphModule]) -> None:
        self.passes = passes


def _find_shared(made: Sequence[torch.Tensor], inputs: Sequence[Any]) -> set[int]:
    """Return which results lie in memory that is an input's, or an earlier result's: a kernel's have their own.

    A conversion to the dtype that is there already returns what it was given, and AOTAutograd takes such a result from
    the backward pass.
    """
    found = set[int]()
    taken = {item.untyped_storage()._cdata for item in inputs if isinstance(item, torch.Tensor)}
    for slot, item in enumerate(made):
        memory = item.untyped_storage()._cdata
        if memory in taken:
            found.add(slot)
        taken.add(memory)
    return found


def _find_reached(made: Sequence[torch.Tensor]) -> set[int]:
    """Return the ids of the leaves that autograd comes to from results, whatever gradients they get."""
    found = {id(item) for item in made if item.is_leaf}
    pending = [item.grad_fn for item in made if item.grad_fn is not None]
    steps = {*pending}
    while pending:
        step = pending.pop()
        found.add(id(getattr(step, "variable", None)))
        new = {source for source, _ in step.next_functions if source is not None} - steps
        steps |= new
        pending += new
    return found


def _call_on_results(module: fx.GraphModule, function: Callable[..., Any], slots: set[int]) -> None:
    # Some of the results, as a function makes them.
    output = module.graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    with module.graph.inserting_before(output):
        for slot in slots:
            results[slot] = module.graph.call_function(function, (results[slot],))
    output.args = (tuple(results),)
    module.recompile()


def _prepare(graph: fx.GraphModule) -> None:
    """Take out what only says that nobody differentiates, and let gradients lie in memory as they do."""
    for node in graph.graph.find_nodes(op="call_function", target=_ATEN.detach.default):
        node.replace_all_uses_with(node.args[0])
        graph.graph.erase_node(node)
    for node in graph.graph.find_nodes(op="call_function", target=_ATEN.view.default):
        node.target = _ATEN.reshape.default
    if graph.graph.find_nodes(op="call_function", target=_ATEN.as_strided.default):
        raise UnsupportedError("its backward pass looks at memory by strides")
    if computes_idle_vectors(graph.graph):
        raise UnsupportedError(VALUES_OF_MATRICES)
