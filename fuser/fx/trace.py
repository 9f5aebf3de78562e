"""``fuser.fuse``: trace a function of functor calls once, substitute fusion nodes, run the result."""

from __future__ import annotations

import functools
import inspect
import operator
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fuser.dtypes import plain_number
from fuser.errors import ArgumentError, GradientError
from fuser.fx.passes import FusionModule, FusionPass, warm_up_graph
from fuser.fx.tracer import Baked, trace
from fuser.graph import FusionGroup
from fuser.kernel_spec import KernelSpec
from fuser.launcher import Replayer, called_in_c
from fuser.outputs import check_kinds, finish_out, finish_traced_out
from fuser.route import call_anew

__all__ = ["FusedFunction", "fuse"]

_NUMBERS = frozenset((bool, int, float, complex))
# How many states of a module are remembered: it goes back and forth between train() and eval().
MAX_STATES = 2


def fuse(function: Callable[..., Any]) -> FusedFunction:
    """Make a function of functor calls and torch ops run as few kernels as possible, usually one.

    The function is traced once with torch.fx, on its first use: its arguments become symbols, so Python control flow
    may not depend on them. Numbers among the arguments stay run-time arguments, and arithmetic on them alone stays
    Python's (a call with numbers in other places traces once more, and so does one of a module that has other
    attributes now, or was put in eval mode). What a function closes over is that of the first call. What is neither a
    functor call nor an op that fuser knows stays eager, between fusion nodes. Tensors with a ``__torch_function__`` of
    their own go through the function as it is.

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
        called = function.forward if isinstance(function, torch.nn.Module) else function
        if not inspect.isroutine(called) or not hasattr(inspect.unwrap(called), "__code__"):
            name = getattr(function, "__name__", type(function).__name__)
            raise TypeError(f"fuse takes a Python function or a module, got {name}; wrap it: lambda x: {name}(x)")
        self.function = function
        self._lock = threading.RLock()
        # By the places of the numbers among the arguments; of a module in one state after another, the newest first.
        self._traces: dict[tuple[int, ...], tuple[tuple[Baked, fx.GraphModule], ...]] = {}
        # The first graph that is one fusion node, by the same places: calls of it can be replayed whole.
        self._whole: tuple[tuple[int, ...], WholeFusion] | None = None
        self._parameters = tuple(inspect.signature(called).parameters.values())
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        self._can_bind = all(parameter.kind not in variadic for parameter in self._parameters)
        self._has_out = any(parameter.name == "out" for parameter in self._parameters)
        # Not its attributes: a module's would hide this object's.
        functools.update_wrapper(self, function, updated=())

    @property
    def graph_module(self) -> fx.GraphModule:
        """The FX graph with fusion nodes: that of the kind of call traced last, of tensors alone before any call."""
        traces = next(reversed(self._traces.values()), None)
        return traces[0][1] if traces else self._graph_module_for(())

    def graph_module_for(self, *args: Any) -> fx.GraphModule:
        """Return the FX graph with fusion nodes that serves a call with these arguments."""
        return self._graph_module_for(self._positional(args, {}) if self._can_bind else args)

    def _graph_module_for(self, args: tuple[Any, ...]) -> fx.GraphModule:
        numbers = number_places(args)
        module = self._find_trace(numbers)
        if module is None:
            with self._lock:
                module = self._find_trace(numbers)
                if module is None:
                    module = self._trace(numbers)
                    made = Baked(self.function), module
                    self._traces[numbers] = (made, *self._traces.get(numbers, ())[: MAX_STATES - 1])
        return module

    def _find_trace(self, numbers: tuple[int, ...]) -> fx.GraphModule | None:
        return next((module for baked, module in self._traces.get(numbers, ()) if baked.is_current()), None)

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
        """Run the function.

        Unless the function has an argument of that name, ``out`` takes the tensor (or one per output) to write to, with
        torch's rules for ``out=``.
        """
        if torch.compiler.is_dynamo_compiling():
            # What is in this function fuses with its neighbours there.
            return self._call_plainly(*args, **kwargs)
        replayed = None if kwargs else self.launch(args, None, None)
        return self.call_anew(*args, **kwargs) if replayed is None else replayed

    def _call_plainly(self, *args: Any, **kwargs: Any) -> Any:
        out = None if self._has_out else kwargs.pop("out", None)
        result = self.function(*args, **kwargs)
        return result if out is None else _finish_out(out, result)

    def call_anew(self, *args: Any, **kwargs: Any) -> Any:
        """Serve a call that is not like an earlier one; as ``__call__``."""
        is_exported = torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()
        if is_exported or any(isinstance(item, fx.Proxy) for item in (*args, *kwargs.values())):
            # Somebody else is tracing.
            return self.function(*args, **kwargs)
        if any(map(_has_own_functions, args)):
            return self._call_plainly(*args, **kwargs)
        out = None if self._has_out else kwargs.pop("out", None)
        outs = None if out is None else tuple(out) if isinstance(out, tuple | list) else (out,)
        if outs is not None:
            check_kinds(outs)
        if kwargs or (self._can_bind and len(args) < len(self._parameters)):
            args = self._positional(args, kwargs)
            replayed = self.launch(args, None, out)
            if replayed is not None:
                return replayed
        args = tuple(map(plain_number, args))
        module = self._graph_module_for(args)
        places, whole = self._whole or ((), None)
        if whole is not None and places == number_places(args) and len(args) == whole.argument_count:
            return call_anew(whole.spec, whole.inputs(args), self, args, None, outs)
        result = module(*args)
        if outs is None:
            return result
        made = [result] if isinstance(result, torch.Tensor) else list(result)
        if not all(isinstance(item, torch.Tensor) for item in made):
            raise ArgumentError(f"{self.__name__}() has a result that out= cannot take: a {type(result).__name__}")
        if torch.is_grad_enabled() and any(item.requires_grad for item in made):
            raise GradientError("out= does not support automatic differentiation, but a result requires grad")
        results = finish_out(outs, made, args)
        return results[0] if len(results) == 1 else tuple(results)

    def _positional(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        values = list(args)
        for parameter in self._parameters[len(args) :]:
            name = parameter.name
            if name in kwargs:
                values.append(kwargs.pop(name))
            elif parameter.default is not parameter.empty:
                values.append(parameter.default)
            else:
                raise TypeError(f"{self.__name__}() misses the argument {name!r}")
        if kwargs or len(values) > len(self._parameters):
            extra = next(iter(kwargs), "") or f"{len(values)} arguments"
            raise TypeError(f"{self.__name__}() got an unexpected argument: {extra}")
        return tuple(values)

    def _trace(self, numbers: tuple[int, ...]) -> fx.GraphModule:
        module = trace(self.function, self._parameters if self._can_bind else (), numbers, self.__name__)
        FusionPass()(module)
        # A replay does not look at the module.
        can_be_whole = self._whole is None and not isinstance(self.function, torch.nn.Module)
        whole = find_whole_fusion(module) if can_be_whole else None
        if whole is not None:
            super().__init__((), whole.constants, whole.order)
            self._whole = numbers, whole
        return module

    def __reduce__(self) -> str | tuple[Any, ...]:
        # Where it took its function's place, it is found by name, as functions are.
        found: Any = sys.modules.get(self.__module__)
        name = getattr(self, "__qualname__", "<locals>")
        for part in name.split("."):
            found = getattr(found, part, None)
        return name if found is self else (FusedFunction, (self.function,))

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


def _has_own_functions(item: Any) -> bool:
    # A subclass that says what torch's functions do with it.
    if type(item) is torch.Tensor or not isinstance(item, torch.Tensor):
        return False
    own, usual = (getattr(kind.__torch_function__, "__func__", None) for kind in (type(item), torch.Tensor))
    # None where it is switched off, as in torch.nn.Parameter.
    return own is not None and own is not usual


def _finish_out(out: Any, result: Any) -> Any:
    finish_traced_out(out, [result] if isinstance(result, torch.Tensor) else result)
    return out


def number_places(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the places of the numbers among the arguments of a call, and -1 - place for each that is None."""
    return tuple(
        [~place if item is None else place for place, item in enumerate(args) if item is None or type(item) in _NUMBERS]
    )


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
    if not {*places.values()} <= {*order}:
        # An argument that is not read may still be one that decided how the function was traced.
        return None
    return WholeFusion(target.spec, len(placeholders), order, constants)
