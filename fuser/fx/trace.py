"""``fuser.fuse``: trace a function of functor calls once, substitute fusion nodes, run the result."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fuser.fx.partition import IS_NUMBER
from fuser.fx.passes import FusionModule, FusionPass, warm_up_graph
from fuser.graph import FusionGroup

__all__ = ["FusedFunction", "fuse"]

_NUMBERS = frozenset((bool, int, float, complex))


def fuse(function: Callable[..., Any]) -> FusedFunction:
    """Make a function of functor calls and torch ops run as few kernels as possible, usually one.

    The function is traced once with torch.fx, on its first use: its arguments become symbols, so Python control flow
    may not depend on them. Numbers among the arguments stay run-time arguments, and arithmetic on them alone stays
    Python's (a call with numbers in other places traces once more). What is neither a functor call nor an
    op that fuser knows stays eager, between fusion nodes.

    Args:
        function: a Python function or a ``torch.nn.Module``; also usable as a decorator.

    Returns:
        The fused function, with ``graph_module``, ``groups`` and ``warmup``.
    """
    return FusedFunction(function)


class FusedFunction:
    """A traced function whose functor calls and pointwise ops are fusion nodes. Threads may share it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._lock = threading.RLock()
        # By the places of the numbers among the arguments.
        self._graph_modules: dict[tuple[int, ...], fx.GraphModule] = {}
        functools.update_wrapper(self, function)

    @property
    def graph_module(self) -> fx.GraphModule:
        """The FX graph with fusion nodes: that of the latest kind of call, or of one with tensors alone before any."""
        return next(reversed(self._graph_modules.values()), None) or self._graph_module_for(())

    def _graph_module_for(self, args: tuple[Any, ...]) -> fx.GraphModule:
        numbers = tuple([place for place, item in enumerate(args) if type(item) in _NUMBERS])
        module = self._graph_modules.get(numbers)
        if module is None:
            with self._lock:
                module = self._graph_modules.get(numbers) or self._trace(numbers)
                self._graph_modules[numbers] = module
        return module

    @property
    def groups(self) -> tuple[FusionGroup, ...]:
        """The group of every fusion node, in the order of the graph."""
        module = self.graph_module
        nodes = [node for node in module.graph.nodes if node.op == "call_module"]
        modules = [module.get_submodule(str(node.target)) for node in nodes]
        return tuple(item.group for item in modules if isinstance(item, FusionModule))

    def warmup(self, *args: Any, **kwargs: Any) -> None:
        """Compile the kernels a call with these arguments needs, without launching any.

        Takes real, fake or meta tensors; meta tensors stand for tensors on the GPU, or on the CPU without one.
        """
        positional = self._positional(args, kwargs)
        warm_up_graph(self._graph_module_for(positional), positional)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function."""
        if torch.compiler.is_compiling() or any(isinstance(item, fx.Proxy) for item in (*args, *kwargs.values())):
            # Somebody else is tracing: what is in this function fuses with its neighbours there.
            return self.function(*args, **kwargs)
        if kwargs:
            args = self._positional(args, kwargs)
        return self._graph_module_for(args)(*args)

    def _positional(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        placeholders = [node for node in self.graph_module.graph.nodes if node.op == "placeholder"]
        values = list(args)
        for node in placeholders[len(args) :]:
            name = str(node.target)
            if name in kwargs:
                values.append(kwargs.pop(name))
            elif node.args:
                values.append(node.args[0])
            else:
                raise TypeError(f"{self.__name__}() misses the argument {name!r}")
        if kwargs or len(values) > len(placeholders):
            extra = next(iter(kwargs), "") or f"{len(values)} arguments"
            raise TypeError(f"{self.__name__}() got an unexpected argument: {extra}")
        return tuple(values)

    def _trace(self, numbers: tuple[int, ...]) -> fx.GraphModule:
        tracer = fx.Tracer()
        graph = tracer.trace(self.function)
        for place, node in enumerate(node for node in graph.nodes if node.op == "placeholder"):
            if place in numbers:
                node.meta[IS_NUMBER] = True
        # The root holds the tensors that the function closes over.
        module = fx.GraphModule(tracer.root, graph, self.__name__)
        FusionPass()(module)
        return module

    def __repr__(self) -> str:
        return f"<fuser.fuse {self.__name__}>"

    # update_wrapper sets it for functions; modules have none.
    __name__: str = "module"
