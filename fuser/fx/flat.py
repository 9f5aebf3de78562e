"""A graph as one flat Python function: what a node calls is looked up once, what nobody needs any more is let go.

The function takes its arguments as AOTAutograd gives them, in a list that it empties, so that an input's memory is free
as soon as the last node that reads it has run.
"""

from __future__ import annotations

import itertools
import linecache
import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fuser.fx.passes import FusionModule

__all__ = ["flatten"]

_numbers = itertools.count()


def flatten(graph_module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Return the graph as a function of one list of arguments, which it empties."""
    writer = _FlatWriter(graph_module)
    source, name = writer.write(), f"<fuser graph {next(_numbers)}>"
    # For tracebacks and debuggers.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), writer.names)
    run: Callable[[list[Any]], Any] = writer.names.pop("run")
    weakref.finalize(run, linecache.cache.pop, name, None)
    # What AOTAutograd asks for: it is called with a list.
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


class _FlatWriter:
    def __init__(self, graph_module: fx.GraphModule) -> None:
        self.module = graph_module
        # Global names of the function, and the name that each object has there.
        # Nobody differentiates what runs here, so that no operator need look for autograd.
        self.names: dict[str, Any] = {"below_autograd": torch._C._AutoDispatchBelowAutograd}
        self._known: dict[int, str] = {}
        self._values = {node: f"v{number}" for number, node in enumerate(graph_module.graph.nodes)}

    def write(self) -> str:
        """Write the function's text."""
        nodes = list(self.module.graph.nodes)
        placeholders = [self._values[node] for node in nodes if node.op == "placeholder"]
        lines = []
        if placeholders:
            lines += [f"{', '.join(placeholders)}, = arguments", "arguments.clear()"]
        last = self._last_readers(nodes)
        for node in nodes:
            dead = [self._values[value] for value in last.get(node, ())]
            if node.op == "output":
                lines.append(f"return {self._argument(node.args[0])}")
            elif node.op != "placeholder":
                lines.append(f"{self._values[node]} = {self._call(node)}")
            if dead and node.op != "output":
                lines.append(f"del {', '.join(dead)}")
        head = ["def run(arguments):", "    with below_autograd():"]
        return "\n".join([*head, *(f"        {line}" for line in lines), ""])

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
            return self._object(_find_attribute(self.module, str(node.target)))
        arguments = list(map(self._argument, node.args))
        arguments += [f"{name}={self._argument(value)}" for name, value in node.kwargs.items()]
        if node.op == "call_method":
            return f"{arguments[0]}.{node.target}({', '.join(arguments[1:])})"
        target: Any = node.target
        if target is operator.getitem and len(arguments) == 2:
            return f"{arguments[0]}[{arguments[1]}]"
        if node.op == "call_module":
            target = self.module.get_submodule(str(target))
            target = target.run if isinstance(target, FusionModule) else target
        elif type(target) is torch._ops.OpOverload:
            # All that its __call__ does.
            target = target._op
        return f"{self._object(target)}({', '.join(arguments)})"

    def _argument(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self._values[value]
        if isinstance(value, list | tuple):
            # torch.fx has classes of its own, which operators do not take.
            items = "".join(f"{self._argument(item)}, " for item in value)
            return f"[{items}]" if isinstance(value, list) else f"({items})"
        if type(value) is slice:
            return f"slice({', '.join(map(self._argument, (value.start, value.stop, value.step)))})"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{key!r}: {self._argument(item)}' for key, item in value.items())}}}"
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        return self._object(value)

    def _object(self, value: Any) -> str:
        name = self._known.get(id(value))
        if name is None:
            name = self._known[id(value)] = f"g{len(self._known)}"
            self.names[name] = value
        return name


def _find_attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module
