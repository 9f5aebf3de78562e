"""Where expressions live: variables, elements, members, what pointers point at."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fuser.cxx.nodes import Conditional, Expression, Index, Member, Name, NamedType, TypeSyntax, Unary
from fuser.cxx.statements import Alias, Struct
from fuser.eager.calls import call_operator, member_of
from fuser.eager.data import PLACE, Value, constant, needs_values
from fuser.eager.limits import find_constant, find_limit
from fuser.eager.masks import LaneCondition
from fuser.eager.math import functions
from fuser.eager.promotion import convert
from fuser.eager.resolve import resolve
from fuser.eager.state import State
from fuser.eager.storage import Choice, Fixed, Location, NoTranslation, Pointer, Punned, Thing, parts_of, zero_of
from fuser.eager.types import ArrayOf, ClassType, CppType, LimitsOf, describe_type, trait
from fuser.eager.values import binary, negate
from fuser.eager.walk import class_scope, evaluate, locate, number_of, truth_of

__all__ = ["LOCATE", "advance", "find_limit_named", "follow", "point_at", "pun"]

# The function that gives the bits of a type.
_BIT_CASTS = {
    torch.float32: "__float_as_int",
    torch.float64: "__double_as_longlong",
    torch.int32: "__int_as_float",
    torch.int64: "__longlong_as_double",
}


def _locate_name(state: State, node: Name) -> Location:
    found = state.scope.find(f"{node.name}::{node.member}" if node.member else node.name)
    if isinstance(found, Location):
        return found
    if isinstance(found, Value):
        return Fixed(found)
    known_constant = find_limit_named(state, node) if node.member else find_constant(node.name)
    if known_constant is not None:
        return Fixed(known_constant)
    of_class = _find_class_constant(state, node) if node.member else None
    if of_class is not None:
        return of_class
    kinds = tuple(resolve(state, item) for item in node.arguments if isinstance(item, TypeSyntax))
    known = trait(node.name, kinds) if node.member == "value" or node.name.endswith("_v") else None
    if known is not None:
        return Fixed(Value(torch.bool, known))
    raise NoTranslation(f"the name {node.name!r}")


def _find_class_constant(state: State, node: Name) -> Location | None:
    # S<T>::member of a class of the functor's own.
    struct = state.scope.find(node.name)
    if not isinstance(struct, Struct | ClassType):
        return None
    kind = resolve(state, NamedType(node.place, node.name, node.arguments))
    if not isinstance(kind, ClassType):
        return None
    found = class_scope(state, kind.struct, dict(kind.bindings)).names.get(node.member)
    return found if isinstance(found, Location) else None


def find_limit_named(state: State, node: Name) -> Value | None:
    """Return what ``std::numeric_limits<T>::member`` is, None for a name that is nothing of the kind."""
    known = state.scope.find(node.name)
    if not isinstance(known, Alias | LimitsOf) and (node.name != "numeric_limits" or known is not None):
        return None
    kind = resolve(state, NamedType(node.place, node.name, node.arguments))
    if not isinstance(kind, LimitsOf):
        return None
    found = find_limit(node.member, kind.kind)
    if found is None:
        raise NoTranslation(f"the member {node.member!r} of numeric_limits")
    return found


def _locate_element(state: State, node: Index) -> Location:
    base = locate(state, node.array)
    at = number_of(state, node.index)
    PLACE.set(node.place)
    if isinstance(base.type, ArrayOf):
        return _element_at(state, parts_of(base), convert(at, torch.int64), base.type.element)
    if isinstance(base.type, ClassType):
        own = call_operator(state, "[]", (base, Fixed(at, state.mask)))
        if own is not None:
            return Fixed(own, state.mask)
    pointer = base.load(state)
    if not isinstance(pointer, Pointer):
        raise NoTranslation("an index into something that is no array")
    return point_at(state, advance(pointer, "+", at))


def _locate_member(state: State, node: Member) -> Location:
    base, name = locate(state, node.value), node.name
    kind = base.type
    if isinstance(kind, ClassType) and name in kind.fields:
        return member_of(state, base, list(kind.fields).index(name))
    raise NoTranslation(f"the member {name!r} of {describe_type(kind)}")


def _locate_pointed(state: State, node: Unary) -> Location | None:
    return point_at(state, follow(state, node.operand)) if node.operator == "*" else None


def _locate_chosen(state: State, node: Conditional) -> Location | None:
    if not _are_alike(state, node.yes, node.no):
        return None
    found = truth_of(state, node.condition)
    if isinstance(found, bool):
        return locate(state, node.yes if found else node.no)
    return Choice(
        [(LaneCondition(found), locate(state, node.yes)), (LaneCondition(negate(found)), locate(state, node.no))]
    )


def _are_alike(state: State, one: Expression, other: Expression) -> bool:
    # Whether two expressions have places of one type: then a conditional expression has one, too.
    if not isinstance(one, Name | Index | Member) or not isinstance(other, Name | Index | Member):
        return False
    with state.dry():
        return locate(state, one).type == locate(state, other).type


def follow(state: State, node: Expression) -> Pointer:
    """Return the pointer that an expression is."""
    found = evaluate(state, node)
    if isinstance(found, Pointer):
        return found
    PLACE.set(node.place)
    raise NoTranslation("a pointer that cannot be followed")


def advance(pointer: Pointer, operator: str, count: Value) -> Pointer:
    """Return a pointer that many elements further on ("+") or back ("-")."""
    offset = binary(operator, pointer.offset, convert(count, torch.int64))
    return Pointer(pointer.targets, offset, pointer.element, pointer.view)


def point_at(state: State, pointer: Pointer) -> Location:
    """Return what a pointer points at."""
    found = _element_at(state, pointer.targets, pointer.offset, pointer.element)
    return found if pointer.view is None else pun(found, pointer.view)


def _element_at(state: State, targets: Sequence[Location], index: Value, kind: CppType) -> Location:
    # One of several places, chosen by an index that may depend on data.
    if state.is_dry:
        return targets[0] if targets else Fixed(zero_of(kind))
    if index.is_constant:
        # Out of bounds C++ leaves everything open.
        return targets[index.data] if 0 <= index.data < len(targets) else Fixed(zero_of(kind))
    if state.limit is not None and len(targets) > state.limit:
        raise needs_values(f"an index into {len(targets)} elements depends on data")
    if len(targets) == 1:
        return targets[0]
    options = [
        (LaneCondition(binary("==", index, constant(number, index.dtype)).data), location)
        for number, location in enumerate(targets)
    ]
    return Choice(options)


def pun(location: Location, kind: torch.dtype) -> Location:
    """Return a location as one of another type of the same size, whose bits it has."""
    source = location.type
    if not isinstance(source, torch.dtype) or source.itemsize != kind.itemsize:
        raise NoTranslation(f"a {describe_type(source)} read as {describe_type(kind)}")
    return Punned(location, kind, lambda v: _bits(v, kind), lambda v: _bits(v, source))


def _bits(thing: Thing, kind: torch.dtype) -> Value:
    # The bits of a number as another type of the same size.
    assert isinstance(thing, Value), "bits are numbers"
    if thing.dtype.is_floating_point is kind.is_floating_point:
        return convert(thing, kind)
    if not thing.dtype.is_floating_point:
        thing = convert(thing, torch.int32 if thing.dtype.itemsize == 4 else torch.int64)
    return convert(functions.call(_BIT_CASTS[thing.dtype], [thing]), kind)


LOCATE: Mapping[type, Callable[[State, Any], Location | None]] = {
    Name: _locate_name,
    Index: _locate_element,
    Member: _locate_member,
    Unary: _locate_pointed,
    Conditional: _locate_chosen,
}
