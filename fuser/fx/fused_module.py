"""``fuser.fuse`` of a function or a module; a fused module is the module, with another ``forward``."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import fx

from fuser.errors import ArgumentError, shows_users_frames
from fuser.fx.trace import FusedFunction, P
from fuser.graph import FusionGroup
from fuser.jit_function import R

__all__ = ["FusedModule", "fuse"]


@overload
def fuse(function: torch.nn.Module) -> FusedModule: ...  # type: ignore[overload-overlap]
@overload
def fuse(function: Callable[P, R]) -> FusedFunction[P, R]: ...
@shows_users_frames
def fuse(function: Callable[..., Any]) -> FusedFunction | FusedModule:
    """Make a function of functor calls and torch ops run as few kernels as possible, usually one.

    The function is traced with torch.fx when it is called: tensors and numbers among its arguments (also in lists,
    tuples and dicts) become symbols, so numbers stay run-time arguments, and arithmetic on them alone stays Python's.
    All other arguments are constants of the trace. Control flow may ask for numbers, and for everything of a tensor but
    its elements: what it asked is asked again in every later call, and the function is traced anew where the answer, a
    constant, a global or closure variable, or an attribute that the function read is another one. Items of numpy arrays
    and attributes of other libraries' objects are not compared. What is neither a functor call nor an op that fuser
    knows stays eager, between fusion nodes. Tensors of a subclass that has not switched ``__torch_function__`` off, as
    parameters have, go through the function as it is; so do all in a ``TorchFunctionMode`` that is none of torch's own.

    Args:
        function: a Python function, a method (also as a decorator in a class) or a ``torch.nn.Module``.

    Returns:
        The fused function, with ``graph_module``, ``groups`` and ``warmup``; of a module a ``FusedModule``.

    Raises:
        ArgumentError: it is no such function. In a call, for what the function does not take.
        TracingError: in a call, for what a trace cannot hold; shows the line.
    """
    if isinstance(function, FusedFunction | FusedModule):
        return function
    if not isinstance(function, torch.nn.Module):
        return FusedFunction(function)
    if "training" not in vars(function):
        raise ArgumentError(
            "fuse takes a Python function or a module, got what torch.jit or torch.compile made of one: "
            "fuse the module itself"
        )
    return fuse_module(function)


class FusedModule(torch.nn.Module):
    """A module whose ``forward`` is fused. It is of the module's class, and shares parameters, state and hooks with it.

    Attributes:
        fused: the fused ``forward``.
    """

    __slots__ = ("_fuser_function", "_fuser_module")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``forward`` as few kernels."""
        if torch.compiler.is_dynamo_compiling():
            return super().forward(*args, **kwargs)
        return self.fused(*args, **kwargs)

    @property
    def fused(self) -> FusedFunction:
        """The fused ``forward``."""
        # None in a copy of one with parametrizations, which torch makes without its slots.
        found: FusedFunction | None = getattr(self, "_fuser_function", None)
        forward = self._find_forward()
        if found is None or found.function != forward:
            # The class, or the module, has been given another one.
            found = FusedFunction(forward)
            FusedModule._fuser_function.__set__(self, found)  # type: ignore[attr-defined]
        return found

    def _find_forward(self) -> Any:
        # A parametrization of the fused module puts properties into its class, which the module's has not.
        module: torch.nn.Module | None = getattr(self, "_fuser_module", None)
        is_own = FusedModule in type(self).__bases__
        return module.forward if module is not None and is_own else super().forward

    @property
    def graph_module(self) -> fx.GraphModule:
        """See FusedFunction."""
        return self.fused.graph_module

    @property
    def groups(self) -> tuple[FusionGroup, ...]:
        """See FusedFunction."""
        return self.fused.groups

    def warmup(self, *args: Any, dynamic_shapes: Any = None, backward: bool = False, **kwargs: Any) -> None:
        """See FusedFunction."""
        self.fused.warmup(*args, dynamic_shapes=dynamic_shapes, backward=backward, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copies and pickles are those of the module, fused again."""
        return fuse_module, (FusedModule._fuser_module.__get__(self),)  # type: ignore[attr-defined]


def fuse_module(module: torch.nn.Module) -> FusedModule:
    """Return a module with the same state and a fused ``forward``."""
    fused: FusedModule = object.__new__(_fused_class(type(module)))  # type: ignore[arg-type]
    fused.__dict__ = module.__dict__
    # Not by setattr: a module would become a part of itself.
    FusedModule._fuser_module.__set__(fused, module)  # type: ignore[attr-defined]
    FusedModule._fuser_function.__set__(fused, FusedFunction(module.forward))  # type: ignore[attr-defined]
    return fused


@functools.cache
def _fused_class(kind: type[torch.nn.Module]) -> type[FusedModule]:
    # A function of its own, so that those who ask for its parameters find the module's: torch.export, which takes
    # dynamic shapes by name, torch.fx, which makes a placeholder of each, and trainers that drop unused columns.
    plain: Any = FusedModule.forward
    forward = types.FunctionType(plain.__code__, plain.__globals__, closure=plain.__closure__)
    functools.update_wrapper(forward, kind.forward, updated=())
    held = {"__module__": kind.__module__, "__slots__": (), "forward": forward}
    return type(kind.__name__, (FusedModule, kind), held)
