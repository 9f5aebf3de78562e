"""Kinds of calls of a graph: what of its arguments a trace is made for, and which other calls may go by it.

A kind of call is a key: the default dtype and device, whether torch only infers, and what each input is. A trace fits
other calls whose sizes, strides and numbers meet what it relied on.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import fx

from fuser.fx.as_called import multiply_as_called

__all__ = [
    "Number",
    "asking_quietly",
    "at_start",
    "bind_constants",
    "find_changed_numbers",
    "find_read",
    "give",
    "is_like",
    "key_of",
    "lift",
    "make_fakes",
]


def key_of(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Return what a call with these inputs is known by."""
    found_under = torch.get_default_dtype(), torch.get_default_device(), torch.is_inference_mode_enabled()
    return (found_under, *map(_describe, inputs))


def is_like(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether two calls, by their keys, differ in sizes, strides and values of numbers alone."""
    return len(one) == len(other) and all(map(_is_like, one, other))


def find_changed_numbers(inputs: Sequence[Any], before: Sequence[Sequence[Any]]) -> list[int]:
    """Return the slots of numbers that were others in calls of some keys, and may be symbols."""
    # What torch knows of symbols is of finite floats, and zeros have signs.
    return [
        slot
        for slot, item in enumerate(inputs)
        if (type(item) is int or (type(item) is float and math.isfinite(item) and item))
        and any(kinds[1 + slot].text != repr(item) for kinds in before)
    ]


def bind_constants(nodes: fx.GraphModule, inputs: Sequence[Any], varying: Sequence[int]) -> fx.GraphModule:
    """Return the graph of those inputs alone that vary."""
    graph, copies = fx.Graph(), {}
    for slot, placeholder in enumerate(nodes.graph.find_nodes(op="placeholder")):
        copies[placeholder] = graph.node_copy(placeholder) if slot in varying else inputs[slot]
    for slot, (placeholder, copy) in enumerate([*copies.items()]):
        if slot in varying and isinstance(inputs[slot], float):
            copies[placeholder] = graph.call_method("item", (copy,))
    graph.output(graph.graph_copy(nodes.graph, copies))
    return fx.GraphModule(nodes, graph)


def find_read(nodes: fx.GraphModule) -> dict[str, Any]:
    """Return what a function's trace reads besides its arguments, by name."""
    names = dict.fromkeys(str(node.target) for node in nodes.graph.find_nodes(op="get_attr"))
    return {name: operator.attrgetter(name)(nodes) for name in names}


def lift(nodes: fx.GraphModule, numbers: Mapping[int, Any], names: Sequence[str]) -> fx.GraphModule:
    """Return a trace with what it reads as its last arguments, and without numbers among them.

    Products of matrices in it are those that torch makes where nobody traces.
    """
    graph, copies = fx.Graph(), {}
    for slot, node in enumerate(nodes.graph.find_nodes(op="placeholder")):
        copies[node] = numbers[slot] if slot in numbers else graph.node_copy(node)
    lifted = {name: graph.placeholder(f"held_{slot}") for slot, name in enumerate(names)}
    copies |= {node: lifted[str(node.target)] for node in nodes.graph.find_nodes(op="get_attr")}
    graph.output(graph.graph_copy(nodes.graph, copies))
    multiply_as_called(graph)
    return fx.GraphModule(nodes, graph)


@contextmanager
def asking_quietly() -> Iterator[None]:
    """Let torch print nothing of a call that fails on fake tensors: the call itself says what is wrong with it."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def give(item: Any) -> Any:
    """Return what graphs take for an input: torch's partitioner hands a float on only if it is read from a tensor."""
    is_float = isinstance(item, float | torch.SymFloat)
    return torch.full((), item, dtype=torch.float64, device="cpu") if is_float else item


def make_fakes(
    inputs: Sequence[Any], before: Sequence[Sequence[Any]]
) -> tuple[Any, list[Any], Callable[[], Callable[[Sequence[Any]], bool]]]:
    """Return what is traced, and its mode.

    Args:
        inputs: tensors and numbers of a call; all numbers become symbols.
        before: what each was in earlier calls: sizes that differ become symbols.

    Returns:
        The mode, the inputs in it, and what makes, after the trace, the question whether it holds for other inputs.
    """
    from torch._dynamo.source import ConstantSource  # noqa: PLC0415 - brings Dynamo
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415 - brings sympy, with torch's symbols
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
        fakes.append(mode.from_tensor(at_start(item), symbolic_context=context))
        guarded.append(fakes[-1])

    def find_guard() -> Callable[[Sequence[Any]], bool]:
        text = env.produce_guards_expression(guarded, ignore_static=False) or "True"
        # Each number that is new asks: Python would compile a text each time.
        code: Any = compile(text, "<guards>", "eval")
        return lambda given: bool(env.evaluate_guards_expression(code, [*map(_look_at, given)]))

    return mode, fakes, find_guard


def at_start(item: torch.Tensor) -> torch.Tensor:
    """Return a tensor as if it were nobody's view.

    torch would make a fake of what it views, none of whose sizes is a symbol, and rely on where it begins there, which
    is another place for each size of what x.split() is called on.
    """
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


class _Tensor(NamedTuple):
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    sizes: torch.Size
    strides: tuple[int, ...]


class Number(NamedTuple):
    """What a number of a call was."""

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
    return Number(type(item), repr(item))


def _is_like(one: Any, other: Any) -> bool:
    if type(one) is Number and type(other) is Number:
        return one.kind is other.kind
    if type(one) is not _Tensor or type(other) is not _Tensor:
        return bool(one == other)
    return one[:3] == other[:3] and len(one.sizes) == len(other.sizes)
