"""What a traced graph becomes: nothing that only questions needed, writes at its end, numbers told from tensors."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from fuser.fx.nodes import is_size
from fuser.fx.symbols import IN_PLACE
from fuser.fx.writes import sink_writes
from fuser.jit_function import JitFunction
from fuser.ops import IS_NUMBER

__all__ = ["finish_graph"]


def finish_graph(graph: fx.Graph, asked: Collection[fx.Node]) -> None:
    """Make a traced graph one that runs: in place. ``asked``: the nodes whose values Python asked for."""
    _erase_unused(graph, asked)
    sink_writes(graph)
    _bind_scalars(graph, _settle_numbers(graph))


def _erase_unused(graph: fx.Graph, asked: Collection[fx.Node]) -> None:
    # What was computed for questions alone.
    wanted = set(asked)
    for node in reversed(graph.nodes):
        if node in wanted and not node.users and not node.is_impure():
            wanted.update(node.all_input_nodes)
            graph.erase_node(node)


def _settle_numbers(graph: fx.Graph) -> set[fx.Node]:
    # What is computed from numbers alone is a number; what a function does to one in place makes another one.
    numbers: set[fx.Node] = set()
    for node in graph.nodes:
        sources = node.all_input_nodes
        if node.meta.get(IS_NUMBER) or is_size(node) or (sources and numbers.issuperset(sources)):
            numbers.add(node)
            node.target = IN_PLACE.get(node.target, node.target)
    return numbers


def _bind_scalars(graph: fx.Graph, numbers: set[fx.Node]) -> None:
    # What is no number is a tensor, also where a functor takes it as a scalar.
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, JitFunction):
            continue
        scalars = {key: value for key, value in node.kwargs.items() if key in node.target.scalar_names}
        # What a reduction takes behind its map is read when it is called.
        names = tuple(
            name
            for name, value in scalars.items()
            if isinstance(value, fx.Node) and value not in numbers and name not in node.target.number_names
        )
        if names:
            node.args = tuple(node.target.merge_arguments(names, node.args, node.kwargs))
            node.kwargs = {name: value for name, value in node.kwargs.items() if name not in names}
            node.target = node.target.with_tensors(names)
