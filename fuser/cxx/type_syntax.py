"""From the parser's tree to types.

The parser knows no names, so a type and a value look alike to it in many places. What the names in scope stand for
decides: a local variable hides a type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import tree_sitter

from fuser.cxx.nodes import ArrayType, Decltype, Expression, NamedType, PointerType, ReferenceType, TypeSyntax
from fuser.cxx.reader import TYPES, Reader, read_expression
from fuser.cxx.tree import field, has_word, named, text_of

__all__ = ["names_type", "read_declarator", "read_qualified", "read_template_arguments", "read_type"]


def read_type(reader: Reader, node: tree_sitter.Node) -> TypeSyntax:
    """Read a type."""
    read = _TYPES.get(node.type)
    if read is None:
        raise reader.refuse(node, f"the type {text_of(node)!r}")
    return read(reader, node)


def _type_descriptor(reader: Reader, node: tree_sitter.Node) -> TypeSyntax:
    base = read_type(reader, field(node, "type"))
    return read_declarator(reader, node.child_by_field_name("declarator"), base, has_word(node, "const"))[1]


def _named_type(reader: Reader, node: tree_sitter.Node) -> NamedType:
    return NamedType(reader.place(node), " ".join(text_of(node).split()))


def _placeholder(reader: Reader, node: tree_sitter.Node) -> NamedType:
    if text_of(node) != "auto":
        raise reader.refuse(node, "decltype(auto)")
    return _named_type(reader, node)


def _template_type(reader: Reader, node: tree_sitter.Node) -> NamedType:
    return NamedType(reader.place(node), text_of(field(node, "name")), read_template_arguments(reader, node))


def _inner_type(reader: Reader, node: tree_sitter.Node) -> TypeSyntax:
    # ``typename T::value_type``, ``struct point``.
    return read_type(reader, node.named_children[-1])


def _qualified_type(reader: Reader, node: tree_sitter.Node) -> TypeSyntax:
    outer, name = read_qualified(reader, node), field(node, "name")
    return (
        read_type(reader, name) if outer is None else NamedType(outer.place, outer.name, outer.arguments, text_of(name))
    )


def read_qualified(reader: Reader, node: tree_sitter.Node) -> NamedType | None:
    """Read the type before the last ``::``, as in ``std::enable_if<c, T>::type``; None for a namespace or nothing."""
    scope = node.child_by_field_name("scope")
    if scope is None or text_of(scope) in reader.namespaces:
        return None
    outer = read_type(reader, scope)
    assert isinstance(outer, NamedType), "a name comes before ::"
    return outer


def read_template_arguments(reader: Reader, node: tree_sitter.Node) -> tuple[TypeSyntax | Expression, ...]:
    """Read what stands between ``<`` and ``>``."""
    return tuple(
        read_type(reader, item) if names_type(reader, item) else read_expression(reader, item)
        for item in named(node.child_by_field_name("arguments"))
    )


_TYPES: Mapping[str, Callable[[Reader, tree_sitter.Node], TypeSyntax]] = {
    "type_descriptor": _type_descriptor,
    "primitive_type": _named_type,
    "sized_type_specifier": _named_type,
    "type_identifier": _named_type,
    "identifier": _named_type,
    "namespace_identifier": _named_type,
    "placeholder_type_specifier": _placeholder,
    "template_type": _template_type,
    "template_function": _template_type,
    "dependent_type": _inner_type,
    "struct_specifier": _inner_type,
    "class_specifier": _inner_type,
    "qualified_identifier": _qualified_type,
    "decltype": lambda reader, node: Decltype(reader.place(node), read_expression(reader, node.named_children[0])),
}


def names_type(reader: Reader, node: tree_sitter.Node) -> bool:
    """Whether a node stands for a type, by the names in scope."""
    match node.type:
        case "identifier" | "type_identifier" | "namespace_identifier":
            return reader.kind(text_of(node)) == "type"
        case "type_descriptor":
            return names_type(reader, field(node, "type"))
        case "template_type" | "template_function":
            name = text_of(field(node, "name"))
            return reader.kind(name) == "type" or name.endswith("_t")
        case "qualified_identifier":
            inner, scope = field(node, "name"), node.child_by_field_name("scope")
            if scope is not None and text_of(scope) not in reader.namespaces:
                return text_of(inner) in {"type", "value_type"}
            is_plain = inner.type in {"identifier", "type_identifier"}
            return text_of(inner) in TYPES or (not is_plain and names_type(reader, inner))
    return node.type in _TYPES


def read_declarator(
    reader: Reader, node: tree_sitter.Node | None, base: TypeSyntax, is_const: bool = False
) -> tuple[str, TypeSyntax]:
    """Return the name and the type that a declarator makes of the type before it."""
    if node is None:
        return "", base
    place, inner = reader.place(node), node.child_by_field_name("declarator")
    match node.type.removeprefix("abstract_"):
        case "identifier" | "field_identifier" | "type_identifier":
            return text_of(node), base
        case "pointer_declarator":
            return read_declarator(reader, inner, PointerType(place, base))
        case "reference_declarator":
            inner = next((child for child in node.named_children if child.type != "type_qualifier"), None)
            return read_declarator(reader, inner, ReferenceType(place, base, is_const))
        case "array_declarator":
            size = node.child_by_field_name("size")
            array = ArrayType(place, base, None if size is None else read_expression(reader, size))
            return read_declarator(reader, inner, array, is_const)
        case "parenthesized_declarator" if node.named_children:
            return read_declarator(reader, node.named_children[0], base, is_const)
    construct = "a pointer to a function" if "function" in node.type else f"the declarator {text_of(node)!r}"
    raise reader.refuse(node, construct)
