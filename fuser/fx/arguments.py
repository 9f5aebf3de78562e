"""What of a call's arguments a trace is made for: where tensors and numbers stand, and all other values."""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch

from fuser.dtypes import plain_number
from fuser.errors import ArgumentError
from fuser.launcher import Replayer

__all__ = ["NUMBER", "TENSOR", "Key", "is_as_given", "name_leaves", "rebuild", "sort_arguments"]

# Equal for calls that one trace may serve: for each argument ``TENSOR``, ``NUMBER``, a constant (its type and itself)
# or a container (its type, its keys, and one of these for each item).
Key: TypeAlias = tuple[Any, ...]

TENSOR, NUMBER = "tensor", "number"
_NUMBERS = frozenset((int, float, complex))
_CONSTANTS = (
    bool, str, bytes, type(None), type(Ellipsis), enum.Enum, int, float, torch.dtype, torch.device, torch.layout,
    torch.memory_format, torch.Size, range, type, types.FunctionType, types.BuiltinFunctionType, types.MethodType,
    torch.nn.Module, Replayer,
)  # fmt: skip


def sort_arguments(args: tuple[Any, ...], keywords: Mapping[str, Any], name: str) -> tuple[Key, tuple[Any, ...]]:
    """Return the key of a call, and its tensors and numbers in order.

    Args:
        args: by position.
        keywords: by name.
        name: of the function, for messages.

    Raises:
        ArgumentError: an argument is nothing of all that.
    """
    leaves: list[Any] = []
    kinds = [_sort(item, leaves, name) for item in args]
    if keywords:
        kinds.append(_sort(dict(keywords), leaves, name))
    return (len(args), *kinds), tuple(leaves)


def rebuild(key: Key, leaves: Iterator[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments by position and by name that a key stands for, with ``leaves`` for tensors and numbers."""
    values = [_rebuild(kind, leaves) for kind in key[1:]]
    return values[: key[0]], values[key[0]] if len(values) > key[0] else {}


def is_as_given(now: Any, given: Any, is_leaf_as_given: Callable[[Any, Any], bool]) -> bool:
    """Whether the lists, tuples and dicts of an argument still hold what they did; ``given`` is a copy of before."""
    if type(given) is dict:
        return len(now) == len(given) and all(
            name is before and is_as_given(now[name], given[before], is_leaf_as_given)
            for name, before in zip(now, given, strict=True)
        )
    if issubclass(type(given), list | tuple):
        pairs = zip(now, given, strict=False)
        return len(now) == len(given) and all(is_as_given(*pair, is_leaf_as_given) for pair in pairs)
    return is_leaf_as_given(now, given)


def name_leaves(key: Key, names: list[str]) -> list[tuple[str, str]]:
    """Return kind and name of each tensor and number of a key, given the names of the arguments."""
    found: list[tuple[str, str]] = []
    for slot, kind in enumerate(key[1:]):
        _name(kind, names[slot] if slot < min(key[0], len(names)) else f"argument_{slot}", found)
    return found


def _sort(item: Any, leaves: list[Any], name: str) -> Any:
    kind = type(item)
    if isinstance(item, torch.Tensor):
        leaves.append(item)
        return TENSOR
    if kind in _NUMBERS:
        leaves.append(item)
        return NUMBER
    if kind in (list, tuple):
        return kind, (), tuple([_sort(value, leaves, name) for value in item])
    if kind is dict:
        return kind, tuple(item), tuple([_sort(value, leaves, name) for value in item.values()])
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return kind, item._fields, tuple([_sort(value, leaves, name) for value in item])
    if isinstance(item, _CONSTANTS) or item is NotImplemented:
        return kind, item
    number = plain_number(item)
    if type(number) is not kind:
        return _sort(number, leaves, name)
    raise ArgumentError(
        f"{name}() got a {kind.__name__}: fuse takes tensors, numbers, strings, dtypes, enums and the like, and lists, "
        "tuples and dicts of them; pass the parts that the function needs"
    )


def _rebuild(kind: Any, leaves: Iterator[Any]) -> Any:
    if kind is TENSOR or kind is NUMBER:
        return next(leaves)
    if len(kind) == 2:
        return kind[1]
    values = [_rebuild(item, leaves) for item in kind[2]]
    make: Callable[..., Any] = kind[0]
    if make is dict:
        return dict(zip(kind[1], values, strict=True))
    return make(*values) if kind[1] else make(values)


def _name(kind: Any, name: str, found: list[tuple[str, str]]) -> None:
    if kind is TENSOR or kind is NUMBER:
        found.append((kind, name))
    elif len(kind) == 3:
        for slot, item in enumerate(kind[2]):
            _name(item, f"{name}_{kind[1][slot] if kind[1] else slot}", found)
