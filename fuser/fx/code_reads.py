"""What Python code reads besides its arguments, by its instructions."""

from __future__ import annotations

import dis
import types
from typing import Any

__all__ = ["GLOBALS", "IMPLIED", "find_reads"]

# Instructions that may call special methods without naming them.
IMPLIED = {
    "COMPARE_OP": ("__eq__",),
    "CONTAINS_OP": ("__eq__", "__hash__"),
    "BINARY_SUBSCR": ("__hash__",),
    "FORMAT_VALUE": ("__repr__",),
    "FORMAT_SIMPLE": ("__repr__",),
    "CONVERT_VALUE": ("__repr__",),
}
GLOBALS = frozenset(("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"))
_LOADS = frozenset(("LOAD_ATTR", "LOAD_METHOD"))
_TELLING = GLOBALS | {"IMPORT_NAME", "MATCH_SEQUENCE"} | IMPLIED.keys()


def find_reads(code: types.CodeType) -> list[tuple[str, Any, list[str]]]:
    """Return the instructions that say what code reads: operation, argument, the attributes that are read of that."""
    found: list[tuple[str, Any, list[str]]] = []
    path: list[str] = []
    # From the end: what is read of a global comes behind it.
    for instruction in reversed([*dis.get_instructions(code)]):
        operation, argument = instruction.opname, instruction.argval
        if operation == "EXTENDED_ARG":
            continue
        if operation in _TELLING:
            found.append((operation, argument, path))
        path = [argument, *path] if operation in _LOADS else []
    return found
