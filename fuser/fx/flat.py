"""A graph as one flat Python function: what a node calls is looked up once, what nobody needs any more is let go.

The function takes its arguments as AOTAutograd gives them, in a list that it empties, so that an input's memory is free
as soon as the last node that reads it has run. It is its text and the objects that the text names, and is pickled so:
AOTAutograd's cache keeps it on disk.
"""

from __future__ import annotations

import itertools
import linecache
import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
from torch._inductor.output_code import OutputCode

from fuser.executor import kept_plans, restore_plans
from fuser.flat_text import CALLED, write_flat
from fuser.fx.fusion_node import FusionCall, FusionModule
from fuser.fx.nodes import is_static
from fuser.kept_plans import KeptPlan

__all__ = ["FlatGraph", "flatten"]

_numbers = itertools.count()


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
        names: dict[str, Any] = {"__name__": __name__, "below_autograd": torch._C._AutoDispatchBelowAutograd}
        # Nor has what such an operator makes to say which views it is made of.
        names["below_views"] = torch._C._AutoDispatchBelowADInplaceOrView
        names |= {key: _find_quickest(value) if key.startswith(CALLED) else value for key, value in objects.items()}
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
        kept = kept_plans(value.spec for value in self.objects.values() if isinstance(value, FusionCall))
        return _load, (self.source, {name: _OperatorName.of(value) for name, value in self.objects.items()}, kept)

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


def _load(source: str, objects: dict[str, Any], plans: Sequence[KeptPlan]) -> FlatGraph:
    restore_plans(plans)
    return FlatGraph(source, {name: x.find() if isinstance(x, _OperatorName) else x for name, x in objects.items()})


def _find_quickest(value: Any) -> Any:
    # All that the __call__ of an operator does.
    return value._op if type(value) is torch._ops.OpOverload else value


def flatten(graph_module: fx.GraphModule) -> FlatGraph:
    """Return the graph as a function of one list of arguments, which it empties."""
    # One of fixed sizes makes each call with its own.
    learns_sizes = any(not is_static(node.meta.get("val")) for node in graph_module.graph.find_nodes(op="placeholder"))

    def called(module: torch.nn.Module) -> Any:
        if not isinstance(module, FusionModule):
            return module
        # Of lists of tensors it is another function.
        is_group = type(module.run) is FusionCall
        return FusionCall(module.spec, learns_sizes=learns_sizes) if is_group else module.run

    text, names = write_flat(graph_module.graph, called, is_boxed=True)
    return FlatGraph(text, names)
