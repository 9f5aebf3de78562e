"""Both passes of a graph for one kind of call, as AOTAutograd makes them: traced with symbols for what differed before.

A kind of call is a key: the default dtype, and what each input is. It fits other calls whose sizes, strides and numbers
meet what the trace relied on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from fuser import counters
from fuser.errors import UnsupportedError
from fuser.fx.taking_turns import Turn
from fuser.process import is_of_current_handler
from fuser.warming.follow import packing_nothing

__all__ = ["Joint", "find_changed_numbers", "give", "key_of", "trace_joint"]

_ATEN = torch.ops.aten
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
    # The call it was traced for, and what sizes, strides and values of numbers it relies on.
    key: tuple[Any, ...]
    relies_on: Callable[[Sequence[Any]], bool]

    def is_like(self, key: tuple[Any, ...]) -> bool:
        """Whether a call differs from the one it was traced for in sizes, strides and values of numbers alone."""
        return len(key) == len(self.key) and all(map(_is_like, key, self.key))

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
) -> Joint | None:
    """Trace both passes; None where torch cannot, or its graphs would rely on how gradients lie in memory.

    Args:
        nodes: what is differentiated, as a graph of its inputs.
        key: of the call, which is traced with its ``inputs``.
        inputs: one per input of the graph.
        before: the keys of calls that are like it: sizes that differ from theirs are symbols.
        numbers: the slots of numbers that are symbols, all others being constants.
        taken: the outputs whose gradients are to come; None, or where none of them has any: all that do.
    """
    from torch._dispatch.python import enable_python_dispatcher  # noqa: PLC0415 - as below
    from torch._functorch.aot_autograd import aot_module_simplified  # noqa: PLC0415 - takes a second

    from fuser.fx.backend import compile_graph, split_passes  # noqa: PLC0415 - as above

    varying = tuple(slot for slot, item in enumerate(inputs) if isinstance(item, torch.Tensor) or slot in numbers)

    def split(graph: fx.GraphModule, given: Any, **settings: Any) -> Any:
        if settings["num_fwd_outputs"] != len(made):
            raise UnsupportedError("results that share memory")
        _prepare(graph)
        raise _Split(split_passes(graph, given, **settings))

    try:
        module = _bind_constants(nodes, inputs, varying)
        known = [[kinds[1 + slot] for kinds in before] for slot in varying]
        mode, fakes, find_guard = _make_fakes([inputs[slot] for slot in varying], known)
        with mode, enable_python_dispatcher(), packing_nothing():
            made = module(*fakes)
        continuous = tuple(slot for slot, item in enumerate(made) if item.requires_grad)
        taken = _choose(continuous, taken)
        _call_on_results(module, torch.detach, {*continuous} - {*taken})
        _call_on_results(module, torch.clone, _find_shared(made, fakes))
        forward = backward = None
        try:
            with Turn(), packing_nothing(), _floats_as_they_are() if numbers else nullcontext():
                aot_module_simplified(module, fakes, lambda graph, _: compile_graph(graph), partition_fn=split)
        except _Split as both:
            # All that is wanted of AOTAutograd.
            forward, backward = (compile_graph(item) for item in both.passes)
        assert continuous == () or forward is not None, "AOTAutograd splits what it differentiates"
        guard = find_guard()
    except Exception as error:  # Whatever the reason, torch's ops one by one are right, and say what is wrong.
        if is_of_current_handler(error):
            raise
        if numbers:
            # Those as constants are next.
            return None
        counters.count_fallback(f"{type(error).__name__} in torch's tracing of a backward pass")
        return None
    updated = {node for norm in nodes.graph.find_nodes(op="call_function", target=_NORM) for node in norm.args[3:5]}
    placeholders = nodes.graph.find_nodes(op="placeholder")
    read = tuple(slot for slot in varying if slot not in numbers and placeholders[slot] not in updated)
    return Joint(nodes, forward, backward, len(made), varying, continuous, taken, read, key, guard)


def _choose(continuous: tuple[int, ...], taken: Sequence[int] | None) -> tuple[int, ...]:
    return tuple(slot for slot in continuous if taken is None or slot in taken) or continuous


def key_of(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Return what a call with these inputs is known by."""
    return (torch.get_default_dtype(), *map(_describe, inputs))


def find_changed_numbers(inputs: Sequence[Any], before: Sequence[Sequence[Any]]) -> list[int]:
    """Return the slots of numbers that were others in calls of some keys, and may be symbols."""
    # What torch knows of symbols is of finite floats, and zeros have signs.
    return [
        slot
        for slot, item in enumerate(inputs)
        if (type(item) is int or (type(item) is float and math.isfinite(item) and item))
        and any(kinds[1 + slot].text != repr(item) for kinds in before)
    ]


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


def _bind_constants(nodes: fx.GraphModule, inputs: Sequence[Any], varying: Sequence[int]) -> fx.GraphModule:
    # The graph of those inputs alone that vary.
    graph, copies = fx.Graph(), {}
    for slot, placeholder in enumerate(nodes.graph.find_nodes(op="placeholder")):
        copies[placeholder] = graph.node_copy(placeholder) if slot in varying else inputs[slot]
    for slot, (placeholder, copy) in enumerate([*copies.items()]):
        if slot in varying and isinstance(inputs[slot], float):
            copies[placeholder] = graph.call_method("item", (copy,))
    graph.output(graph.graph_copy(nodes.graph, copies))
    return fx.GraphModule(nodes, graph)


def give(item: Any) -> Any:
    """Return what graphs take for an input: torch's partitioner hands a float on only if it is read from a tensor."""
    is_float = isinstance(item, float | torch.SymFloat)
    return torch.full((), item, dtype=torch.float64, device="cpu") if is_float else item


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


def _call_on_results(module: fx.GraphModule, function: Callable[..., Any], slots: set[int]) -> None:
    # Some of the results, as a function makes them.
    output = module.graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    with module.graph.inserting_before(output):
        for slot in slots:
            results[slot] = module.graph.call_function(function, (results[slot],))
    output.args = (tuple(results),)
    module.recompile()


def _make_fakes(
    inputs: Sequence[Any], before: Sequence[Sequence[Any]]
) -> tuple[Any, list[Any], Callable[[], Callable[[Sequence[Any]], bool]]]:
    # What is traced, its mode, and what makes, afterwards, the question whether it holds for tensors of other sizes and
    # for other numbers.
    from torch._dynamo.source import ConstantSource  # noqa: PLC0415 - as in trace_joint
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415 - as in trace_joint
    from torch.fx.experimental.symbolic_shapes import (  # noqa: PLC0415
        DimDynamic,
        ShapeEnv,
        StatelessSymbolicContext,
    )

    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    fakes: list[Any] = []
    # The same, but for floats as they are.
    guarded: list[Any] = []
    for slot, (item, known) in enumerate(zip(inputs, before, strict=True)):
        if not isinstance(item, torch.Tensor):
            source: Any = ConstantSource(f"fuser_number_{slot}")
            symbol = env.create_unspecified_symbol(item, source, DimDynamic.DYNAMIC)
            make: Any = env.create_symintnode if type(item) is int else env.create_symfloatnode
            guarded.append(make(symbol, hint=item, source=source))
            if type(item) is float:
                fakes.append(mode.from_tensor(give(item)))
                fakes[-1].item_memo = guarded[-1]
            else:
                fakes.append(guarded[-1])
            continue
        dims = [
            DimDynamic.DYNAMIC if any(other.sizes[dim] != size for other in known) else DimDynamic.STATIC
            for dim, size in enumerate(item.shape)
        ]
        context: Any = StatelessSymbolicContext(dynamic_sizes=dims)
        fakes.append(mode.from_tensor(_at_start(item), symbolic_context=context))
        guarded.append(fakes[-1])

    def find_guard() -> Callable[[Sequence[Any]], bool]:
        text = env.produce_guards_expression(guarded, ignore_static=False) or "True"
        return lambda given: bool(env.evaluate_guards_expression(text, [*map(_look_at, given)]))

    return mode, fakes, find_guard


def _at_start(item: torch.Tensor) -> torch.Tensor:
    # As if it were nobody's view: torch would make a fake of what it views, none of whose sizes is a symbol, and rely
    # on where it begins there, which is another place for each size of what x.split() is called on.
    plain = item.data.as_strided(item.shape, item.stride(), 0).data
    return plain.requires_grad_(item.requires_grad)


class _Begun(NamedTuple):
    # What guards ask of a tensor; nothing relies on where it begins.
    size: Callable[[], Sequence[Any]]
    stride: Callable[[], Sequence[Any]]

    def storage_offset(self) -> int:
        return 0


def _look_at(item: Any) -> Any:
    return _Begun(item.size, item.stride) if isinstance(item, torch.Tensor) else item


def _prepare(graph: fx.GraphModule) -> None:
    """Take out what only says that nobody differentiates, and let gradients lie in memory as they do."""
    for node in graph.graph.find_nodes(op="call_function", target=_ATEN.detach.default):
        node.replace_all_uses_with(node.args[0])
        graph.graph.erase_node(node)
    for node in graph.graph.find_nodes(op="call_function", target=_ATEN.view.default):
        node.target = _ATEN.reshape.default
    if graph.graph.find_nodes(op="call_function", target=_ATEN.as_strided.default):
        raise UnsupportedError("as_strided")


class _Tensor(NamedTuple):
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    sizes: torch.Size
    strides: tuple[int, ...]


class _Number(NamedTuple):
    kind: type
    # Tells zeros apart, and no NaNs.
    text: str

    def is_of(self, item: Any) -> bool:
        """Whether another call has the same number: asked of a symbol, too."""
        if isinstance(item, torch.SymInt | torch.SymFloat):
            return bool(item == self.kind(self.text))
        return self.text == repr(item)


def _describe(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return _Tensor(item.dtype, item.device, item.requires_grad, item.shape, item.stride())
    return _Number(type(item), repr(item))


def _is_like(one: Any, other: Any) -> bool:
    if type(one) is _Number and type(other) is _Number:
        return one.kind is other.kind
    if type(one) is not _Tensor or type(other) is not _Tensor:
        return bool(one == other)
    return one[:3] == other[:3] and len(one.sizes) == len(other.sizes)
