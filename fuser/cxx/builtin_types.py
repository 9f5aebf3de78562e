"""What the names of C++'s own types mean: torch dtypes, most of them."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

__all__ = ["AUTO", "VOID", "NoValue", "builtin_type", "dtype_named"]


@dataclass(frozen=True, slots=True)
class NoValue:
    """A type that no value has."""

    name: str


VOID = NoValue("void")
# The type of what it is initialised with.
AUTO = NoValue("auto")

_BY_NAME: dict[str, torch.dtype | NoValue] = {
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


def builtin_type(name: str) -> torch.dtype | NoValue | None:
    """Return the type of a name such as ``unsigned long``; None for one that is not C++'s."""
    found = _BY_NAME.get(name)
    words = [word for word in name.split() if word not in {"const", "volatile"}]
    if found is not None or not set(words) <= {"unsigned", "signed", "char", "short", "int", "long", "double"}:
        return found
    if "double" in words:
        # torch has no other width.
        return None if "long" in words else torch.float64
    bits = 8 if "char" in words else 16 if "short" in words else 64 if "long" in words else 32
    kind: torch.dtype | NoValue = getattr(torch, f"{'u' if 'unsigned' in words else ''}int{bits}")
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
