"""C++ types as the interpreter has them, and what type names mean."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from fuser.cxx.nodes import FunctionDefinition
from fuser.cxx.statements import Struct

__all__ = [
    "AUTO",
    "CPP_TYPES",
    "VOID",
    "ArrayOf",
    "ClassType",
    "CppType",
    "FunctionType",
    "PointerTo",
    "builtin_type",
    "describe_type",
    "dtype_named",
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
        return isinstance(other, ClassType) and (self.struct, self.bindings) == (other.struct, other.bindings)

    def __hash__(self) -> int:
        return hash((self.struct.name, self.struct.place))


@dataclass(frozen=True, slots=True)
class FunctionType:
    """A lambda, or a function as a value."""


@dataclass(frozen=True, slots=True)
class _Special:
    name: str


VOID = _Special("void")
# The type of what it is initialised with.
AUTO = _Special("auto")

CppType: TypeAlias = "torch.dtype | ArrayOf | PointerTo | ClassType | FunctionType | _Special"

# For isinstance().
CPP_TYPES = (torch.dtype, ArrayOf, PointerTo, ClassType, FunctionType, _Special)

_BY_NAME: dict[str, CppType] = {
    "void": VOID,
    "auto": AUTO,
    "bool": torch.bool,
    "float": torch.float32,
    "double": torch.float64,
    "size_t": torch.uint64,
    "ptrdiff_t": torch.int64,
    "wchar_t": torch.int32,
    "char16_t": torch.uint16,
    "char32_t": torch.uint32,
    **{f"int{bits}_t": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"uint{bits}_t": getattr(torch, f"uint{bits}") for bits in (8, 16, 32, 64)},
}


def builtin_type(name: str) -> CppType | None:
    """Return the type of a name such as ``unsigned long``; None for one that is not C++'s."""
    found = _BY_NAME.get(name)
    words = [word for word in name.split() if word not in {"const", "volatile"}]
    if found is not None or not set(words) <= {"unsigned", "signed", "char", "short", "int", "long", "double"}:
        return found
    if "double" in words:
        # torch has no other width.
        return None if "long" in words else torch.float64
    bits = 8 if "char" in words else 16 if "short" in words else 64 if "long" in words else 32
    kind: CppType = getattr(torch, f"{'u' if 'unsigned' in words else ''}int{bits}")
    return kind


def dtype_named(text: str, parameter: str, compute: torch.dtype) -> torch.dtype | None:
    """Return the dtype that a type's text stands for; None for what is no arithmetic type.

    Args:
        text: such as ``T``, ``int64_t``, ``unsigned long`` or ``std::complex<T>``.
        parameter: name of the template parameter that stands for ``compute``.
        compute: a C++ type, as torch dtype.
    """
    words = text.replace("std::", "").split()
    name = " ".join(words)
    if name == parameter:
        return compute
    inner = _COMPLEX.fullmatch(name)
    if inner is not None:
        part = dtype_named(inner[1], parameter, compute)
        return part.to_complex() if part is not None and part.is_floating_point else None
    found = builtin_type(name)
    return found if isinstance(found, torch.dtype) else None


_COMPLEX = re.compile(r"complex\s*<\s*(.*?)\s*>")


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
        case _Special(name):
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
