"""The text of a graph as a function of plain Python: no interpreter of nodes, no module calls.

A boxed one takes its arguments in a list that it empties, and runs below autograd: see ``fx.flat``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

__all__ = ["CALLED", "as_function", "write_flat"]

# With what the global names of a text begin: of what it calls, and of what it gives to that or returns. An operator may
# be both, as that of an effect is.
CALLED, GIVEN = "f", "g"

# Views as methods of a tensor: half of what the operator costs, of which a graph has hundreds.
_ATEN = torch.ops.aten
_METHODS: dict[Any, str] = {
    _ATEN.view.default: "view",
    _ATEN._unsafe_view.default: "view",
    _ATEN.t.default: "t",
    _ATEN.permute.default: "permute",
    _ATEN.transpose.int: "transpose",
    _ATEN.detach.default: "detach",
    _ATEN.expand.default: "expand",
    _ATEN.unsqueeze.default: "unsqueeze",
    _ATEN.squeeze.dim: "squeeze",
    _ATEN.select.int: "select",
}


# What is called for a module.
Called = Callable[[torch.nn.Module], Any]


def _itself(module: torch.nn.Module) -> Any:
    return module


def write_flat(graph: fx.Graph, called: Called = _itself, *, is_boxed: bool) -> tuple[str, dict[str, Any]]:
    """Return the text of a function ``run``, and the objects that its global names stand for."""
    writer = _FlatWriter(graph, called, is_boxed=is_boxed)
    return writer.write(), writer.names


def as_function(graph: fx.Graph, called: Called) -> Callable[..., Any]:
    """Return what a graph does as a function of its arguments."""
    text, names = write_flat(graph, called, is_boxed=False)
    names |= {"__name__": __name__}
    exec(compile(text, "<fuser graph>", "exec"), names)
    run: Callable[..., Any] = names["run"]
    return run


class _FlatWriter:
    def __init__(self, graph: fx.Graph, called: Called, *, is_boxed: bool) -> None:
        self.graph = graph
        self.called = called
        self.is_boxed = is_boxed
        # Global names of the function, and the name that each object has there.
        self.names: dict[str, Any] = {}
        self._known: dict[tuple[str, int], str] = {}
        self._values = {node: f"v{number}" for number, node in enumerate(graph.nodes)}
        self._returned = {value for node in graph.find_nodes(op="output") for value in node.all_input_nodes}

    def write(self) -> str:
        """Write the function's text."""
        nodes = list(self.graph.nodes)
        placeholders = [self._values[node] for node in nodes if node.op == "placeholder"]
        lines = []
        if placeholders and self.is_boxed:
            lines += [f"{', '.join(placeholders)}, = arguments", "arguments.clear()"]
        last = self._last_readers(nodes)
        has_whole = False
        for node in nodes:
            dead = [self._values[value] for value in last.get(node, ())]
            if node.op == "output":
                lines.append(f"return {self._argument(node.args[0])}")
            elif node.op != "placeholder":
                is_whole = self.is_boxed and self._is_whole(node)
                if is_whole and not has_whole:
                    # Of each call: threads must not share it.
                    lines.append("whole = below_views()")
                    has_whole = True
                indent = "    " if is_whole else ""
                lines += ["with whole:"] * is_whole
                lines.append(f"{indent}{self._values[node]} = {self._call(node)}")
            if dead and node.op != "output":
                lines.append(f"del {', '.join(dead)}")
        head = [f"def run({', '.join(placeholders)}):"]
        if self.is_boxed:
            head = ["def run(arguments):", "    with below_autograd():"]
        indent = "    " * len(head)
        return "\n".join([*head, *(f"{indent}{line}" for line in lines), ""])

    def _is_whole(self, node: fx.Node) -> bool:
        # Whether an operator's results, which are no views, are returned. Many of torch's kernels make theirs as views
        # (``stack``, ``embedding``, ``slice_scatter``, attention). Autograd hides that in its own call of them; below
        # autograd it shows, and nobody may write to a view that a function with a derivative made.
        if not isinstance(node.target, torch._ops.OpOverload):
            return False
        readers = {node, *(user for user in node.users if user.target is operator.getitem)}
        schema = node.target._schema
        # What is written to counts its versions, which this would keep it from.
        is_made = not schema.is_mutable and all(item.alias_info is None for item in schema.returns)
        return is_made and not self._returned.isdisjoint(readers)

    def _last_readers(self, nodes: list[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
        # For each node the values that nobody reads after it; those that nobody reads at all go at once.
        seen: set[fx.Node] = set()
        last: dict[fx.Node, list[fx.Node]] = {}
        for node in reversed(nodes):
            own = [value for value in (node, *node.all_input_nodes) if value not in seen]
            seen.update(own)
            last[node] = [value for value in dict.fromkeys(own) if value.op != "output"]
        return last

    def _call(self, node: fx.Node) -> str:
        if node.op == "get_attr":
            return self._object(_find_attribute(self.graph.owning_module, str(node.target)))
        arguments = list(map(self._argument, node.args))
        arguments += [f"{name}={self._argument(value)}" for name, value in node.kwargs.items()]
        if node.op == "call_method":
            return f"{arguments[0]}.{node.target}({', '.join(arguments[1:])})"
        target: Any = node.target
        # _unsafe_view's result is no view: see _is_whole.
        is_hidden = target is not _ATEN._unsafe_view.default or node not in self._returned
        if target in _METHODS and not node.kwargs and is_hidden:
            *_, last = node.args
            if isinstance(last, list | tuple) and last:
                # Sizes one by one are read in two thirds of the time of a list.
                arguments[-1:] = map(self._argument, last)
            return f"{arguments[0]}.{_METHODS[target]}({', '.join(arguments[1:])})"
        if target is operator.getitem and len(arguments) == 2:
            return f"{arguments[0]}[{arguments[1]}]"
        if node.op == "call_module":
            target = self.called(_find_attribute(self.graph.owning_module, str(target)))
        return f"{self._object(target, CALLED)}({', '.join(arguments)})"

    def _argument(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self._values[value]
        if isinstance(value, torch.Size):
            return self._object(value)
        if isinstance(value, list | tuple):
            # torch.fx has classes of its own, which operators do not take.
            items = "".join(f"{self._argument(item)}, " for item in value)
            name = self._object(type(value)) if hasattr(value, "_fields") else ""
            return f"[{items}]" if isinstance(value, list) else f"{name}({items})"
        if type(value) is slice:
            return f"slice({', '.join(map(self._argument, (value.start, value.stop, value.step)))})"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{key!r}: {self._argument(item)}' for key, item in value.items())}}}"
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        return self._object(value)

    def _object(self, value: Any, kind: str = GIVEN) -> str:
        name = self._known.get((kind, id(value)))
        if name is None:
            name = self._known[kind, id(value)] = f"{kind}{len(self._known)}"
            self.names[name] = value
        return name


def _find_attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module
