"""C++ types as the interpreter has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from fuser.cxx.builtin_types import NoValue
from fuser.cxx.nodes import FunctionDefinition
from fuser.cxx.statements import Struct
from fuser.eager.data import Value

__all__ = [
    "CPP_TYPES",
    "ArrayOf",
    "ClassType",
    "CppType",
    "FunctionType",
    "LimitsOf",
    "PointerTo",
    "ReferenceTo",
    "argument_key",
    "describe_type",
    "trait",
]


@dataclass(frozen=True, slots=True)
class ArrayOf:
    """``element[length]``."""

    element: CppType
    length: int


@dataclass(frozen=True, slots=True)
class PointerTo:
    """``element*``."""

    element: CppType


@dataclass(frozen=True, slots=True)
class ReferenceTo(PointerTo):
    """``element&`` as a member, which is kept as a pointer; any other reference is the place that it is bound to."""

    is_const: bool


@dataclass(frozen=True, slots=True, eq=False)
class ClassType:
    """A struct of the functor's own, with its template arguments."""

    struct: Struct
    # Names of its template parameters and what they are bound to, hashable.
    bindings: tuple[tuple[str, Any], ...]
    # Type of each field, in order.
    fields: Mapping[str, CppType]

    def named(self, name: str) -> tuple[FunctionDefinition, ...]:
        """Return its functions of a name."""
        return tuple(function for function in self.struct.functions if function.name == name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClassType) and self.struct == other.struct and self._key() == other._key()

    def __hash__(self) -> int:
        return hash((self.struct.name, self.struct.place))

    def _key(self) -> tuple[Any, ...]:
        return argument_key([item for _, item in self.bindings])


@dataclass(frozen=True, slots=True)
class FunctionType:
    """A lambda, or a function as a value."""


@dataclass(frozen=True, slots=True)
class LimitsOf:
    """``std::numeric_limits<kind>``."""

    kind: CppType


CppType: TypeAlias = "torch.dtype | ArrayOf | PointerTo | ClassType | FunctionType | LimitsOf | NoValue"

# For isinstance().
CPP_TYPES = (torch.dtype, ArrayOf, PointerTo, ClassType, FunctionType, LimitsOf, NoValue)


def argument_key(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Return what is equal for equal template arguments: of constants, their types have no say."""
    return tuple(int(item.data) if isinstance(item, Value) else item for item in arguments)


def describe_type(kind: CppType) -> str:
    """Return a type's name for messages."""
    match kind:
        case torch.dtype():
            return str(kind).removeprefix("torch.")
        case ArrayOf(element, length):
            return f"{describe_type(element)}[{length}]"
        case PointerTo(element):
            return f"{describe_type(element)}*"
        case ClassType():
            return kind.struct.name
        case LimitsOf(inner):
            return f"numeric_limits<{describe_type(inner)}>"
        case NoValue(name):
            return name
    return "a function"


def _is_integral(kind: CppType) -> bool:
    return isinstance(kind, torch.dtype) and not kind.is_floating_point and not kind.is_complex


def _is_floating(kind: CppType) -> bool:
    return isinstance(kind, torch.dtype) and kind.is_floating_point


_TRAITS: dict[str, Callable[..., bool]] = {
    "is_same": lambda a, b: a == b,
    "is_integral": _is_integral,
    "is_floating_point": _is_floating,
    "is_arithmetic": lambda a: _is_integral(a) or _is_floating(a),
}


def trait(name: str, kinds: tuple[CppType, ...]) -> bool | None:
    """Return ``std::name<kinds>::value``; None for a name that is no trait."""
    test = _TRAITS.get(name.removesuffix("_v"))
    return None if test is None else test(*kinds)
