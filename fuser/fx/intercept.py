"""What sees that a function is traced: torch functions of no symbol, and what Python asks of a symbol's class."""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fuser.fx.examples import Examples, is_kind_question, untraced_modules
from fuser.fx.guards import CachedFunction, Guards
from fuser.fx.symbols import Symbol, is_symbol, is_tensor
from fuser.jit_function import JitFunction

__all__ = [
    "MATH",
    "Intercept",
    "builtins_ask_symbols",
    "caches_keep_no_symbols",
    "checks_ask_symbols",
    "is_traced",
    "math_takes_symbols",
    "sizes_may_be_symbols",
]

# The functions of Python's math module by name.
MATH: dict[str, Callable[..., Any]] = {
    name: value for name, value in vars(math).items() if callable(value) and not name.startswith("_")
}


class Intercept(TorchFunctionMode):
    """Puts every torch function of the traced code into the graph, also those that see no symbol."""

    def __init__(self, tracer: Any) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        leaves = pytree.tree_leaves((args, kwargs))
        if not any(is_symbol(item) or isinstance(item, torch.Tensor) for item in leaves):
            return self._make(func, args, kwargs)
        if name in _ABOUT_OBJECTS:
            return func(*args, **kwargs)
        tracer = self._tracer
        if any(map(is_tensor, leaves)):
            args, kwargs = pytree.tree_map(lambda x: tracer.hold(x) if is_tensor(x) else x, (args, kwargs))
        if name == "__get__":
            return getattr(args[0], func.__self__.__name__)
        if isinstance(func, JitFunction | BuiltinFunctionType):
            # No method of tensors. Asking torch for it lists, once in a process, all that can be overridden.
            made: Any = tracer.create_proxy("call_function", func, args, kwargs)
        elif torch.overrides.is_tensor_method_or_property(func) and is_symbol(args[0]):
            own = inspect.getattr_static(Symbol, name, None)
            if callable(own) and name.startswith("__"):
                return own(*args, **kwargs)
            return getattr(args[0], name)(*args[1:], **kwargs)
        else:
            made = Symbol.__torch_function__(func, types, args, kwargs)
        return tracer.settle_if_known(made) if is_kind_question(name) else made

    def _make(self, function: Any, args: Any, kwargs: Any) -> Any:
        # A function of no tensor: it may make one, or draw one.
        examples = self._tracer.examples or Examples(self._tracer.graph, (), {})
        with torch._C.DisableTorchFunction(), examples.mode:
            result = function(*args, **kwargs)
        if any(isinstance(item, torch.Tensor) for item in pytree.tree_leaves(result)):
            return self._tracer.create_proxy("call_function", function, args, kwargs)
        return result


# Methods of a tensor that are about the Python object.
_ABOUT_OBJECTS = frozenset(("__repr__", "__str__", "__format__", "__hash__", "__reduce_ex__", "__deepcopy__"))


def is_traced(values: Sequence[Any]) -> bool:
    """Whether a call with these arguments is part of what somebody else traces, with torch.fx or torch.jit."""
    modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return torch._C._is_tracing() or any(isinstance(item, fx.Proxy | Intercept) for item in (*modes, *values))


@contextmanager
def builtins_ask_symbols(guards: Guards) -> Iterator[None]:
    """Let ``isinstance`` and its like ask symbols what they stand for, where the traced function calls them, meanwhile.

    In torch, too, ``isinstance`` does.
    """
    # A property ``__class__`` would not do: torch's C++ would take symbols for tensors. Other code keeps its own.
    asked: list[tuple[Any, Any]] = [(vars(torch), "isinstance")]
    asked += [
        (getattr(question, "__self__", None), name)
        for question, name, _ in guards.asked
        if type(name) is str and name in _ASKING
    ]
    # Globals of functions: an object may have an attribute of that name, which its class holds.
    found = {(id(held), name): held for held, name in asked if isinstance(held, dict) and "__builtins__" in held}
    for (_, name), held in found.items():
        held[name] = _ASKING[name]
    try:
        yield
    finally:
        for (_, name), held in found.items():
            del held[name]


@contextmanager
def checks_ask_symbols() -> Iterator[None]:
    """Let ``torch._check`` and its like ask a symbol what it stands for, meanwhile: they take nothing but bools."""
    held = vars(torch)
    before = {name: held[name] for name in ("_check_with", "broadcast_shapes")}

    def check(error: type[Exception], condition: Any, message: Any) -> None:
        before["_check_with"](error, bool(condition) if is_symbol(condition) else condition, message)

    def broadcast(*shapes: Any) -> Any:
        if not any(map(is_symbol, pytree.tree_leaves(shapes))):
            return before["broadcast_shapes"](*shapes)
        sizes = [*map(_find_sizes, shapes)]
        made = [_broadcast(column) for column in zip_longest(*map(reversed, sizes), fillvalue=1)]
        if None in made:
            # Says what does not fit.
            return before["broadcast_shapes"](*[torch.Size(map(operator.index, item)) for item in sizes])
        return tuple(reversed(made))

    held.update(_check_with=check, broadcast_shapes=broadcast)
    try:
        yield
    finally:
        held.update(before)


def _find_sizes(shape: Any) -> Sequence[Any]:
    # Of a shape, or of one dimension's size.
    value = shape.tracer.find(shape) if is_symbol(shape) else shape
    return [shape] if isinstance(value, int) else [shape[dim] for dim in range(len(value))]


def _broadcast(sizes: Iterable[Any]) -> Any:
    # The size that others of one are repeated for; None if there are several.
    others = [size for size in sizes if size != 1]
    return None if any(size != others[0] for size in others[1:]) else others[0] if others else 1


@contextmanager
def math_takes_symbols() -> Iterator[None]:
    """Let the functions of ``math`` be part of the graph where they are called with a symbol, meanwhile."""
    # fx would do it, too, and write them anew for each trace.
    before = {name: vars(math)[name] for name in _SYMBOLIC_MATH}
    vars(math).update(_SYMBOLIC_MATH)
    try:
        yield
    finally:
        vars(math).update(before)


def _take_symbols(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        symbols = [item for item in pytree.tree_leaves((args, kwargs)) if is_symbol(item)]
        if not symbols:
            return function(*args, **kwargs)
        made = symbols[0].tracer.create_proxy("call_function", function, args, kwargs)
        made.node.meta["is_wrapped"] = True
        return made

    return call


_SYMBOLIC_MATH = {name: _take_symbols(function) for name, function in MATH.items()}


@contextmanager
def sizes_may_be_symbols(guards: Guards) -> Iterator[None]:
    """Let ``torch.zeros(n, m)`` and its like take symbols, meanwhile: C code takes a first one for the whole size."""
    found = [(held, name, value) for held, name, value in guards.reads if id(value) in _OF_SIZES]
    found += [(vars(torch), item.__name__, item) for item in _MAKERS]
    for held, name, value in found:
        held[name] = _OF_SIZES[id(value)]
    try:
        yield
    finally:
        for held, name, value in found:
            held[name] = value


def _take_sizes(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*sizes: Any, **kwargs: Any) -> Any:
        return (
            function(sizes, **kwargs) if len(sizes) > 1 and any(map(is_symbol, sizes)) else function(*sizes, **kwargs)
        )

    return call


# What makes a tensor, and takes its size as so many numbers.
_MAKERS: tuple[Callable[..., Any], ...] = (torch.empty, torch.ones, torch.zeros, torch.rand, torch.randn)
_OF_SIZES = {id(function): _take_sizes(function) for function in _MAKERS}


@contextmanager
def caches_keep_no_symbols(guards: Guards) -> Iterator[None]:
    """Let functions behind ``functools.lru_cache`` keep no symbol, meanwhile: all who call them get what they keep."""
    found = [(held, name, value) for held, name, value in guards.reads if isinstance(value, CachedFunction)]
    others = [item for item in guards.attributes if isinstance(item[2], CachedFunction)]
    for held, name, value in found:
        held[name] = _take_values(value)
    for owner, name, value in (*others, *guards.cached_methods):
        is_plain = isinstance(value, CachedFunction)
        setattr(owner, name, _take_values(value) if is_plain else type(value)(_take_values(value.__func__)))
    try:
        yield
    finally:
        for held, name, value in found:
            held[name] = value
        for owner, name, value in (*others, *guards.cached_methods):
            setattr(owner, name, value)


def _take_values(cached: Any) -> Callable[..., Any]:
    @functools.wraps(cached)
    def call(*args: Any, **kwargs: Any) -> Any:
        symbols = [item for item in pytree.tree_leaves((args, kwargs)) if is_symbol(item)]
        if any(item.tracer.has_elements(item.tracer.find(item)) for item in symbols):
            # A cache would find no tensor of a later call.
            return cached.__wrapped__(*args, **kwargs)
        values = {id(item): item.tracer.settle(item, "a cache", "a number") for item in symbols}
        args, kwargs = pytree.tree_map(lambda item: values.get(id(item), item), (args, kwargs))
        mode = torch.overrides._get_current_function_mode()  # type: ignore[no-untyped-call]
        if not isinstance(mode, Intercept):
            # Another thread.
            return cached(*args, **kwargs)
        # A warm-up traces among fake tensors.
        with torch.overrides._pop_mode_temporarily(), untraced_modules(), unset_fake_temporarily():
            return cached(*args, **kwargs)

    for name in ("cache_info", "cache_clear", "cache_parameters"):
        setattr(call, name, getattr(cached, name))
    return call


def _isinstance(item: Any, kinds: Any, /) -> bool:
    # torch.is_tensor() comes here, too.
    if isinstance(item, kinds):
        return True
    return issubclass(type(item), Symbol) and issubclass(item.tracer.find_class(item, kinds), kinds)


def _callable(item: Any, /) -> bool:
    return not is_symbol(item) and callable(item)


class _AsksSymbols(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and is_symbol(args[0]):
            return args[0].tracer.find_class(args[0])
        made = type(*args, **kwargs)
        # ``type(kind) is type``, in one and the same function.
        return cls if made is type else made

    def __instancecheck__(cls, item: Any) -> bool:
        return isinstance(item, type)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, type)


class _Type(type, metaclass=_AsksSymbols):
    """``type`` of a symbol is what the symbol stands for."""


_ASKING: dict[str, Any] = {"isinstance": _isinstance, "callable": _callable, "type": _Type}
