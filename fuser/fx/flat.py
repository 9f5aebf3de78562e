"""A graph as one flat Python function: what a node calls is looked up once, what nobody needs any more is let go.

The function takes its arguments as AOTAutograd gives them, in a list that it empties, so that an input's memory is free
as soon as the last node that reads it has run. It is its text and the objects that the text names, and is pickled so:
AOTAutograd's cache keeps it on disk.
"""

from __future__ import annotations

import itertools
import linecache
import operator
import pickle
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
from torch._inductor.output_code import OutputCode

from fuser.fx.passes import FusionModule

__all__ = ["FlatGraph", "flatten"]

_numbers = itertools.count()

# Views as methods of a tensor: half of what the operator costs, of which a graph has hundreds.
_ATEN = torch.ops.aten
_METHODS: dict[Any, str] = {
    _ATEN.view.default: "view",
    _ATEN.t.default: "t",
    _ATEN.permute.default: "permute",
    _ATEN.transpose.int: "transpose",
    _ATEN.detach.default: "detach",
    _ATEN.expand.default: "expand",
    _ATEN.unsqueeze.default: "unsqueeze",
    _ATEN.squeeze.dim: "squeeze",
    _ATEN.select.int: "select",
}


class FlatGraph(OutputCode):
    """A graph as a function of one list of arguments, which it empties; what AOTAutograd's cache can keep."""

    def __init__(self, source: str, objects: dict[str, Any]) -> None:
        super().__init__()
        # What AOTAutograd asks for: it is called with a list. Not of the class: wrappers take an object's attributes.
        self._boxed_call = True
        self.source = source
        # What the text's global names stand for.
        self.objects = objects
        name = f"<fuser graph {next(_numbers)}>"
        # For tracebacks and debuggers.
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        # Nobody differentiates what runs here, so that no operator need look for autograd.
        names: dict[str, Any] = {"below_autograd": torch._C._AutoDispatchBelowAutograd}
        names |= {key: _find_quickest(value) for key, value in objects.items()}
        exec(compile(source, name, "exec"), names)
        self._run: Callable[[list[Any]], Any] = names["run"]
        weakref.finalize(self, linecache.cache.pop, name, None)

    def __call__(self, arguments: Any) -> Any:
        """Run the graph."""
        return self._run(arguments)

    def unless(self, is_other: Callable[[], bool], other: FlatGraph) -> FlatGraph:
        """Return the function that asks in each call whether another one is to run."""
        head, body = self.source.split("\n", 1)
        source = f"{head}\n    if is_other():\n        return other(arguments)\n{body}"
        return FlatGraph(source, {**self.objects, "is_other": is_other, "other": other})

    def __reduce__(self) -> tuple[Any, ...]:
        return _load, (self.source, {name: _OperatorName.of(value) for name, value in self.objects.items()})

    def __copy__(self) -> FlatGraph:
        # Nothing of it changes.
        return self

    def prepare_for_serialization(self) -> None:
        """Raise BypassAOTAutogradCache where something that the graph calls cannot be kept."""
        if any(isinstance(value, torch.nn.Module) for value in self.objects.values()):
            raise BypassAOTAutogradCache("the graph calls a module")
        try:
            pickle.dumps(self)
        except Exception as error:  # whatever an object's pickling raises
            raise BypassAOTAutogradCache(f"the graph calls what cannot be pickled: {error}") from error

    def post_compile(self, *arguments: Any) -> None:
        """Do nothing: a graph that was loaded is complete."""


class _OperatorName(NamedTuple):
    """An operator of torch's as it is kept."""

    name: str
    overload: str

    @classmethod
    def of(cls, value: Any) -> Any:
        """Return the name of an operator; anything else as it is."""
        return cls(value._schema.name, value._overloadname) if type(value) is torch._ops.OpOverload else value

    def find(self) -> Any:
        """Return the operator."""
        space, _, name = self.name.partition("::")
        return getattr(getattr(getattr(torch.ops, space), name), self.overload)


def _load(source: str, kept: dict[str, Any]) -> FlatGraph:
    return FlatGraph(source, {name: x.find() if isinstance(x, _OperatorName) else x for name, x in kept.items()})


def _find_quickest(value: Any) -> Any:
    # All that the __call__ of an operator does.
    return value._op if type(value) is torch._ops.OpOverload else value


def flatten(graph_module: fx.GraphModule) -> FlatGraph:
    """Return the graph as a function of one list of arguments, which it empties."""
    writer = _FlatWriter(graph_module)
    return FlatGraph(writer.write(), writer.names)


class _FlatWriter:
    def __init__(self, graph_module: fx.GraphModule) -> None:
        self.module = graph_module
        # Global names of the function, and the name that each object has there.
        self.names: dict[str, Any] = {}
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
        if target in _METHODS and not node.kwargs:
            return f"{arguments[0]}.{_METHODS[target]}({', '.join(arguments[1:])})"
        if target is operator.getitem and len(arguments) == 2:
            return f"{arguments[0]}[{arguments[1]}]"
        if node.op == "call_module":
            target = self.module.get_submodule(str(target))
            target = target.run if isinstance(target, FusionModule) else target
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
