"""What the fields of a group's parts may hold: groups are also written by hand, and read from JSON of others."""

from __future__ import annotations

import inspect
import re
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from fuser.errors import GroupError

__all__ = ["check_fields"]


def check_fields(item: Any, where: str = "") -> None:
    """Check that each field of a dataclass or a named tuple holds what its annotation says; of a class, any instance.

    A list does for a tuple.

    Raises:
        GroupError: one does not; says ``where``.
    """
    owner: Any = type(item)
    for name, (kind, is_plain) in _kinds(owner).items():
        value = getattr(item, name)
        if not (isinstance(value, kind) if is_plain else _fits(value, kind)):
            wanted = re.sub(r"\bfuser\.(\w+\.)*", "", inspect.formatannotation(kind))
            raise GroupError(f"{where}{type(item).__name__}: {name}={value!r} is no {wanted}")


@cache
def _kinds(owner: Any) -> dict[str, tuple[Any, bool]]:
    # Of each field, and whether ``isinstance`` knows what that is: a class, or one of several.
    hints = {name: kind for name, kind in get_type_hints(owner).items() if not name.startswith("_")}
    return {name: (kind, _is_plain(kind)) for name, kind in hints.items()}


def _is_plain(kind: Any) -> bool:
    if get_origin(kind) in (Union, UnionType):
        return all(map(_is_plain, get_args(kind)))
    return isinstance(kind, type) and kind is not Any and not get_args(kind)


def _fits(value: object, kind: Any) -> bool:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_fits(value, item) for item in inner)
    if origin is tuple:
        return isinstance(value, tuple | list) and all(_fits(item, inner[0]) for item in value)
    return kind is Any or isinstance(value, origin or kind)
