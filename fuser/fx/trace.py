"""``fuser.fuse``: trace a function of functor calls once, substitute fusion nodes, run the result."""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fuser.executor import run_and_record
from fuser.fx.passes import FusionModule, FusionPass, warm_up_graph
from fuser.graph import FusionGroup
from fuser.kernel_spec import KernelSpec
from fuser.launcher import Replayer, called_in_c

__all__ = ["FusedFunction", "fuse"]


def fuse(function: Callable[..., Any]) -> FusedFunction:
    """Make a function of functor calls and torch ops run as few kernels as possible, usually one.

    The function is traced once with torch.fx, on its first use: its arguments become symbols, so Python control flow
    may not depend on them. Numbers among the arguments stay run-time arguments. What is neither a functor call nor an
    op that fuser knows stays eager, between fusion nodes.

    Args:
        function: a Python function or a ``torch.nn.Module``; also usable as a decorator.

    Returns:
        The fused function, with ``graph_module``, ``groups`` and ``warmup``.
    """
    return FusedFunction(function)


@called_in_c
class FusedFunction(Replayer):
    """A traced function whose functor calls and pointwise ops are fusion nodes. Threads may share it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__((), ())
        self.function = function
        self._lock = threading.RLock()
        self._graph_module: fx.GraphModule | None = None
        self._whole: WholeFusion | None = None
        functools.update_wrapper(self, function)

    @property
    def graph_module(self) -> fx.GraphModule:
        """The FX graph with fusion nodes; traced on first use."""
        if self._graph_module is None:
            with self._lock:
                if self._graph_module is None:
                    self._graph_module = self._trace()
        return self._graph_module

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
        warm_up_graph(self.graph_module, self._positional(args, kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function."""
        if torch.compiler.is_dynamo_compiling():
            # What is in this function fuses with its neighbours there.
            return self.function(*args, **kwargs)
        return self.call_anew(*args, **kwargs)

    def call_anew(self, *args: Any, **kwargs: Any) -> Any:
        """Serve a call that is not like an earlier one; as ``__call__``."""
        if torch.compiler.is_compiling() or any(isinstance(item, fx.Proxy) for item in (*args, *kwargs.values())):
            # Somebody else is tracing.
            return self.function(*args, **kwargs)
        module = self.graph_module
        values = self._positional(args, kwargs) if kwargs else args
        if self._whole is None or len(values) != self._whole.argument_count:
            return module(*values)
        results = run_and_record(self._whole.spec, self._whole.inputs(values), self, tuple(values))
        return results[0] if len(results) == 1 else tuple(results)

    def _positional(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
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
        return values

    def _trace(self) -> fx.GraphModule:
        tracer = fx.Tracer()
        graph = tracer.trace(self.function)
        root = tracer.root if isinstance(self.function, torch.nn.Module) else torch.nn.Module()
        module = fx.GraphModule(root, graph, self.__name__)
        FusionPass()(module)
        self._whole = find_whole_fusion(module)
        if self._whole is not None:
            super().__init__((), self._whole.constants, self._whole.order)
        return module

    def __repr__(self) -> str:
        return f"<fuser.fuse {self.__name__}>"

    # update_wrapper sets it for functions; modules have none.
    __name__: str = "module"


@dataclass(frozen=True, slots=True)
class WholeFusion:
    """A graph that is one fusion node and nothing else: a call of it is a call of its group."""

    spec: KernelSpec
    argument_count: int
    # Each input of the group: a place among the arguments, or -1 - k for the k-th constant.
    order: tuple[int, ...]
    constants: tuple[Any, ...]

    def inputs(self, arguments: Sequence[Any]) -> list[Any]:
        """Return the group's inputs."""
        return [arguments[place] if place >= 0 else self.constants[-1 - place] for place in self.order]


def find_whole_fusion(module: fx.GraphModule) -> WholeFusion | None:
    """Return what a graph amounts to if it is one fusion node whose outputs, in order, are its result."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    rest = [node for node in module.graph.nodes if node.op != "placeholder"]
    if not rest or rest[0].op != "call_module":
        return None
    fused, result = rest[0], rest[-1].args[0]
    target = module.get_submodule(str(fused.target))
    if not isinstance(target, FusionModule):
        return None
    count = len(target.group.outputs)
    items = rest[1 : 1 + count] if count > 1 else []
    if any(item.target is not operator.getitem or item.args != (fused, k) for k, item in enumerate(items)):
        return None
    if isinstance(result, fx.Node) and result.target is tuple:
        result, items = result.args[0], [*items, result]
    is_all = result is fused if count == 1 else isinstance(result, tuple | list) and list(result) == items[:count]
    if not is_all or len(rest) != 2 + len(items) or isinstance(rest[-1].args[0], list):
        return None
    places = {node: place for place, node in enumerate(placeholders)}
    constants = tuple(item for item in fused.args if not isinstance(item, fx.Node))
    numbered = iter(range(len(constants)))
    order = tuple(places[item] if isinstance(item, fx.Node) else -1 - next(numbered) for item in fused.args)
    return WholeFusion(target.spec, len(placeholders), order, constants)
