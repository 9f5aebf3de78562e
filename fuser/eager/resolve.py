"""Types as written to types as they are: names in scope, template arguments, traits, deduction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fuser.cxx.builtin_types import VOID, builtin_type
from fuser.cxx.nodes import (
    ArrayType,
    Decltype,
    Expression,
    Name,
    NamedType,
    PointerType,
    ReferenceType,
    TypeSyntax,
    walk,
)
from fuser.cxx.statements import Alias, Struct
from fuser.eager.data import PLACE, Value, constant
from fuser.eager.state import Scope, State
from fuser.eager.storage import NoTranslation, SubstitutionError
from fuser.eager.types import (
    CPP_TYPES,
    ArrayOf,
    ClassType,
    CppType,
    LimitsOf,
    PointerTo,
    ReferenceTo,
    argument_key,
)
from fuser.eager.walk import class_scope, number_of, static_type

__all__ = ["deduce", "instantiate", "resolve", "resolve_argument"]


def resolve(state: State, node: TypeSyntax) -> CppType:
    """Return the type that is written here; a reference is what it refers to.

    Raises:
        SubstitutionError: ``enable_if`` does not hold.
        NoTranslation: nobody knows the type.
    """
    before = PLACE.get()
    PLACE.set(node.place)
    found = _resolve_node(state, node)
    PLACE.set(before)
    return found


def _resolve_node(state: State, node: TypeSyntax) -> CppType:
    match node:
        case NamedType():
            return _resolve_name(state, node)
        case PointerType(_, target):
            return PointerTo(resolve(state, target))
        case ReferenceType(_, target, _):
            return resolve(state, target)
        case ArrayType(_, element, size):
            if size is None:
                raise NoTranslation("an array without a size")
            return ArrayOf(resolve(state, element), _length_of(state, size))
        case Decltype(_, expression):
            found = static_type(state, expression)
            if found is None:
                raise NoTranslation("decltype of this expression")
            return found
    raise AssertionError(node)  # pragma: no cover


def _length_of(state: State, node: Expression) -> int:
    found = number_of(state, node)
    if not found.is_constant:
        raise NoTranslation("an array whose size is no constant")
    return int(found.data)


def _resolve_name(state: State, node: NamedType) -> CppType:
    found = state.scope.find(node.name)
    if isinstance(found, Struct):
        kind = instantiate(state, found, [resolve_argument(state, item) for item in node.arguments])
        return _member_type(state, node, kind)
    if isinstance(found, Alias):
        bindings = _bind(state, found, [resolve_argument(state, item) for item in node.arguments])
        with state.within(Scope(state.globals, bindings)):
            return _member_type(state, node, resolve(state, found.type))
    if isinstance(found, CPP_TYPES):
        return _member_type(state, node, found)
    known = builtin_type(node.name) if found is None else None
    if known is not None:
        return known
    return _resolve_std(state, node)


def _member_type(state: State, node: NamedType, kind: CppType) -> CppType:
    # The type that a class names, or std::complex<T>::value_type; of no member, the type itself.
    if not node.member:
        return kind
    if isinstance(kind, ClassType):
        found = class_scope(state, kind.struct, dict(kind.bindings)).names.get(node.member)
        return found if isinstance(found, CPP_TYPES) else _missing(node)
    return kind.to_real() if isinstance(kind, torch.dtype) and kind.is_complex else _missing(node)


def _resolve_std(state: State, node: NamedType) -> CppType:
    arguments = [resolve_argument(state, item) for item in node.arguments]
    match node.name.removesuffix("_t"), arguments:
        case "complex", [torch.dtype() as part] if part.is_floating_point:
            whole = part.to_complex()
            return part if node.member == "value_type" else whole
        case "enable_if", [Value() as holds, *rest]:
            if not holds.data:
                raise SubstitutionError
            return rest[0] if rest else VOID
        case "conditional", [Value() as holds, yes, no]:
            return yes if holds.data else no  # type: ignore[no-any-return]
        case "remove_cv" | "remove_const" | "remove_volatile" | "remove_reference" | "decay", [kind]:
            return kind  # type: ignore[no-any-return]
        case "numeric_limits", [kind]:
            return LimitsOf(kind)
    raise NoTranslation(f"the type {node.name!r}")


def resolve_argument(state: State, node: TypeSyntax | Expression) -> Any:
    """Return a template argument: a type, or a constant."""
    if isinstance(node, TypeSyntax):
        return resolve(state, node)
    found = number_of(state, node)
    if not found.is_constant:
        raise NoTranslation("a template argument that is no constant")
    return found


def instantiate(
    state: State, struct: Struct, arguments: list[Any], around: Mapping[str, Any] | None = None
) -> ClassType:
    """Return a struct for template arguments; of a function's own, ``around`` are those of the function."""
    names = [*(around or {}), *(parameter.name for parameter in struct.template)]
    bindings = _bind(state, struct, arguments, around)
    with state.within(Scope(state.globals, bindings)):
        frozen = tuple((name, bindings[name]) for name in names)
        special = _find_special(state, struct, [value for _, value in frozen])
    with state.within(class_scope(state, special, bindings)):
        # One that is specialised keeps the template's arguments: they are deduced from it as from any other.
        fields = {field.name: _field_type(state, field.type) for field in special.fields}
    return ClassType(special, frozen, fields)


def _field_type(state: State, node: TypeSyntax) -> CppType:
    kind = resolve(state, node)
    return ReferenceTo(kind, node.is_const) if isinstance(node, ReferenceType) else kind


def _bind(
    state: State, named: Struct | Alias, arguments: list[Any], around: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    # What the parameters of a template stand for: its arguments, then defaults.
    names = (parameter.name for parameter in named.template)
    bindings: dict[str, Any] = dict(around or {}) | dict(zip(names, arguments, strict=False))
    with state.within(Scope(state.globals, bindings)):
        for parameter in named.template[len(arguments) :]:
            if parameter.default is None:
                raise NoTranslation(f"{named.name!r} without template arguments")
            bindings[parameter.name] = resolve_argument(state, parameter.default)
    return bindings


def _find_special(state: State, struct: Struct, arguments: list[Any]) -> Struct:
    # The specialisation for these arguments; the template itself if there is none.
    known: dict[Any, Struct] = state.globals.find(f"{struct.name}<>") or {}
    return known.get(argument_key(arguments), struct)


def deduce(node: TypeSyntax, kind: CppType, names: set[str], bindings: dict[str, Any]) -> bool:
    """Bind the template parameters in a parameter's type by an argument's; False if they do not fit."""
    match node:
        case ReferenceType(_, target, _):
            return deduce(target, kind, names, bindings)
        case NamedType(_, name, ()) if name in names:
            if isinstance(kind, ArrayOf):
                kind = PointerTo(kind.element)
            return bool(bindings.setdefault(name, kind) == kind)
        case NamedType(_, "complex", (inner,)) if isinstance(inner, TypeSyntax):
            if not isinstance(kind, torch.dtype) or not kind.is_complex:
                return not _mentions(inner, names)
            return deduce(inner, kind.to_real(), names, bindings)
        case NamedType(_, name, arguments) if arguments and isinstance(kind, ClassType):
            given = [value for _, value in kind.bindings]
            pairs = zip(arguments, given, strict=False)
            return kind.struct.name == name and all(
                _deduce_argument(inner, value, names, bindings) for inner, value in pairs
            )
        case PointerType(_, target) | ArrayType(_, target, None):
            if not isinstance(kind, PointerTo | ArrayOf):
                return not _mentions(target, names)
            return deduce(target, kind.element, names, bindings)
        case ArrayType(_, element, size):
            if isinstance(kind, ArrayOf):
                if isinstance(size, Name) and size.name in names:
                    bindings.setdefault(size.name, constant(kind.length, torch.int32))
                return deduce(element, kind.element, names, bindings)
            return isinstance(kind, PointerTo) and deduce(element, kind.element, names, bindings)
    return True


def _deduce_argument(node: TypeSyntax | Expression, value: Any, names: set[str], bindings: dict[str, Any]) -> bool:
    if isinstance(node, TypeSyntax):
        return deduce(node, value, names, bindings)
    if isinstance(node, Name) and node.name in names:
        bindings.setdefault(node.name, value)
    return True


def _missing(node: NamedType) -> CppType:
    raise NoTranslation(f"the member {node.member!r} of {node.name!r}")


def _mentions(node: TypeSyntax, names: set[str]) -> bool:
    return any(isinstance(item, NamedType) and item.name in names for item in walk(node))
