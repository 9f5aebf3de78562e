"""Traces a Python function to an FX graph, and loses nothing that torch.fx would: writes, modes, numbers, None."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fuser.errors import UnsupportedError
from fuser.fx.nodes import is_size
from fuser.jiterator import JitFunction
from fuser.ops import IS_NUMBER, has_hooks

__all__ = ["Baked", "trace"]


def trace(
    function: Callable[..., Any], parameters: Sequence[inspect.Parameter], numbers: Sequence[int], name: str
) -> fx.GraphModule:
    """Trace a function for one kind of call.

    Args:
        function: a Python function or a module.
        parameters: its parameters; none if it takes any number of arguments.
        numbers: places of the arguments that are numbers, and -1 - place for each that is None.
        name: of the graph module.

    Raises:
        UnsupportedError: it changes grad mode or autocast on its way, replaces a buffer, or is a module with hooks.
    """
    if isinstance(function, torch.nn.Module) and has_hooks(function):
        raise UnsupportedError(f"fuse traces forward(), and would lose the hooks of {name}: fuse what it calls")
    missing = {parameters[~place].name: None for place in numbers if place < 0 and parameters}
    tracer = _Tracer()
    graph = tracer.trace_with_buffers(function, missing)
    for node in list(graph.nodes):
        if node.target is fx._symbolic_trace._assert_is_none:
            # The graph is chosen by what is None.
            graph.erase_node(node)
    for place, node in enumerate(node for node in graph.nodes if node.op == "placeholder"):
        if place in numbers:
            node.meta[IS_NUMBER] = True
    _bind_scalars(graph, _settle_numbers(graph))
    # The root holds the tensors that the function closes over.
    return fx.GraphModule(tracer.root, graph, name)


class Baked:
    """What a trace of a module holds for ever: the attributes, tensors, submodules and hooks that it found."""

    def __init__(self, function: Callable[..., Any]) -> None:
        modules = function.modules() if isinstance(function, torch.nn.Module) else ()
        self._found = [(module, _list_baked(module)) for module in modules]

    def is_current(self) -> bool:
        """Whether the module has the same ones still."""
        for module, found in self._found:
            now = _list_baked(module)
            if len(found) != len(now) or not all(map(operator.is_, found, now)):
                return False
        return True


def _list_baked(module: torch.nn.Module) -> list[Any]:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    held = (vars(module), module._parameters, module._buffers, module._modules, *hooks)
    return [item for part in held for item in part.values()]


class _Proxy(fx.Proxy):
    """A proxy whose ``a += b`` writes to ``a``, as a tensor's does; fx would make it ``a = a + b``."""


def _in_place(function: Callable[..., Any]) -> Callable[[fx.Proxy, Any], Any]:
    return lambda self, other: self.tracer.create_proxy("call_function", function, (self, other), {})


# What Python calls for ``a += b``, with what that is for numbers.
_IN_PLACE = {
    getattr(operator, f"__i{name}__"): getattr(operator, f"__{name}__")
    for name in "add sub mul matmul truediv floordiv mod pow and or xor lshift rshift".split()
}
for _function in _IN_PLACE:
    setattr(_Proxy, f"__{_function.__name__}__", _in_place(_function))


class _Tracer(fx.Tracer):
    """Makes proxies of the kind above, also of buffers, and refuses changes of grad mode and autocast."""

    proxy_buffer_attributes = True

    def __init__(self) -> None:
        super().__init__()
        self._modes = _find_modes()

    def trace_with_buffers(self, function: Callable[..., Any], constants: dict[str, None]) -> fx.Graph:
        """Trace, and leave a module's buffers as they were: ``self.count += 1`` would put a proxy there."""
        modules = list(function.modules()) if isinstance(function, torch.nn.Module) else []
        before = [dict(module._buffers) for module in modules]
        try:
            graph = self.trace(function, concrete_args=constants or None)
            for module, buffers in zip(modules, before, strict=True):
                for name in buffers:
                    found: Any = module._buffers[name]
                    if isinstance(found, fx.Proxy) and not _is_written(found.node):
                        raise UnsupportedError(f"fuse cannot trace that the buffer {name!r} becomes another tensor")
        finally:
            for module, buffers in zip(modules, before, strict=True):
                module._buffers.update(buffers)
        return graph

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        if kind != "output" and _find_modes() != self._modes:
            raise UnsupportedError("fuse cannot trace a change of grad mode or autocast: make it around the call")
        return super().create_node(kind, *args, **kwargs)


def _is_written(node: Any) -> bool:
    # The result of writing to a buffer, once or several times.
    while node.target in _IN_PLACE:
        node = node.args[0]
    return bool(node.op == "get_attr")


def _find_modes() -> tuple[Any, ...]:
    casts = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *casts


def _settle_numbers(graph: fx.Graph) -> set[fx.Node]:
    # What is computed from numbers alone is a number; what a function does to one in place makes another one.
    numbers: set[fx.Node] = set()
    for node in graph.nodes:
        sources = node.all_input_nodes
        if node.meta.get(IS_NUMBER) or is_size(node) or (sources and numbers.issuperset(sources)):
            numbers.add(node)
            node.target = _IN_PLACE.get(node.target, node.target)
    return numbers


def _bind_scalars(graph: fx.Graph, numbers: set[fx.Node]) -> None:
    # What is no number is a tensor, also where a functor takes it as a scalar.
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, JitFunction):
            continue
        scalars = {key: value for key, value in node.kwargs.items() if key in node.target.scalar_names}
        names = tuple(name for name, value in scalars.items() if isinstance(value, fx.Node) and value not in numbers)
        if names:
            node.args = tuple(node.target.merge_arguments(names, node.args, node.kwargs))
            node.kwargs = {name: value for name, value in node.kwargs.items() if name not in names}
            node.target = node.target.with_tensors(names)
