"""From the parser's tree to types, and which names are types.

The parser knows no names, so a type and a value look alike to it in many places. The reader keeps what every name in
scope stands for: a local variable hides a type.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import tree_sitter

from fuser.cxx.nodes import ArrayType, Decltype, Expression, NamedType, Place, PointerType, ReferenceType, TypeSyntax
from fuser.cxx.preprocess import MappedText
from fuser.cxx.tree import field, named, text_of
from fuser.errors import UntranslatableError

__all__ = ["TypeReader"]

# Type names that are no keywords. A functor's own names come first.
_TYPES = frozenset(
    "int8_t int16_t int32_t int64_t uint8_t uint16_t uint32_t uint64_t size_t ptrdiff_t complex nullptr_t".split()
)
_TYPE_NODES = frozenset(
    "type_identifier primitive_type sized_type_specifier template_type placeholder_type_specifier dependent_type "
    "decltype type_descriptor struct_specifier class_specifier".split()
)


class TypeReader:
    """Makes types; keeps the names that are in scope."""

    def __init__(self, expanded: MappedText) -> None:
        self.expanded = expanded
        # Innermost last; what each name stands for: "type", "function" or "value".
        self.scopes: list[dict[str, str]] = [dict.fromkeys(_TYPES, "type")]
        self.namespaces = {"std"}
        # Functions that are called and declared nowhere.
        self.externals: dict[str, Place] = {}
        # Bytes before a text that is read again by itself.
        self.shift = 0

    @abstractmethod
    def expression(self, node: tree_sitter.Node) -> Expression:
        """Read an expression."""

    def place(self, node: tree_sitter.Node) -> Place:
        """Return where a node begins in the user's text."""
        return self.expanded.place(node.start_byte + self.shift)

    def refuse(self, node: tree_sitter.Node, construct: str) -> UntranslatableError:
        """Return the error for a node that has no translation."""
        return UntranslatableError(self.expanded.source, *self.place(node), construct)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Forget the names declared inside."""
        self.scopes.append({})
        try:
            yield
        finally:
            self.scopes.pop()

    def declare(self, name: str, kind: str) -> None:
        """Note what a name stands for from here on."""
        self.scopes[-1][name] = kind

    def kind(self, name: str) -> str:
        """Return what a name stands for; empty when nobody declared it."""
        return next((scope[name] for scope in reversed(self.scopes) if name in scope), "")

    # Types

    def type(self, node: tree_sitter.Node) -> TypeSyntax:
        """Read a type."""
        place = self.place(node)
        match node.type:
            case "type_descriptor":
                return self._type_descriptor(node)
            case "primitive_type" | "sized_type_specifier":
                return NamedType(place, " ".join(text_of(node).split()))
            case "type_identifier" | "identifier" | "namespace_identifier":
                return NamedType(place, text_of(node))
            case "placeholder_type_specifier":
                return NamedType(place, "auto")
            case "template_type" | "template_function":
                name = field(node, "name")
                return NamedType(place, text_of(name), self._template_arguments(node))
            case "dependent_type" | "struct_specifier" | "class_specifier" if node.named_children:
                return self.type(node.named_children[-1])
            case "qualified_identifier":
                return self._qualified_type(node)
            case "decltype":
                return Decltype(place, self.expression(node.named_children[0]))
        raise self.refuse(node, f"the type {text_of(node)!r}")

    def _type_descriptor(self, node: tree_sitter.Node) -> TypeSyntax:
        kind = field(node, "type")
        is_const = any(text_of(child) == "const" for child in node.children)
        _, found = self.declarator(node.child_by_field_name("declarator"), self.type(kind), is_const=is_const)
        return found

    def _qualified_type(self, node: tree_sitter.Node) -> NamedType:
        # std::complex<T>, std::enable_if<c, T>::type, T::value_type.
        name = field(node, "name")
        scope = node.child_by_field_name("scope")
        if scope is None or text_of(scope) in self.namespaces:
            found = self.type(name)
            assert isinstance(found, NamedType), "std:: comes before names"
            return found
        outer = self.type(scope)
        assert isinstance(outer, NamedType), "a name comes before ::"
        return NamedType(outer.place, outer.name, outer.arguments, text_of(name))

    def _template_arguments(self, node: tree_sitter.Node) -> tuple[TypeSyntax | Expression, ...]:
        arguments = node.child_by_field_name("arguments")
        return tuple(self.type(item) if self.names_type(item) else self.expression(item) for item in named(arguments))

    def names_type(self, node: tree_sitter.Node) -> bool:
        """Whether a node stands for a type, by the names in scope."""
        match node.type:
            case "type_identifier" | "identifier" | "namespace_identifier":
                return self.kind(text_of(node)) == "type"
            case "type_descriptor":
                kind = node.child_by_field_name("type")
                return kind is not None and self.names_type(kind)
            case "template_type" | "template_function":
                name = node.child_by_field_name("name")
                return name is not None and (self.kind(text_of(name)) == "type" or text_of(name).endswith("_t"))
            case "qualified_identifier":
                return self._qualified_names_type(node)
        return node.type in _TYPE_NODES

    def _qualified_names_type(self, node: tree_sitter.Node) -> bool:
        name, scope = node.child_by_field_name("name"), node.child_by_field_name("scope")
        if name is None:
            return False
        if scope is not None and text_of(scope) not in self.namespaces:
            return text_of(name) in {"type", "value_type"}
        return text_of(name) in _TYPES or (name.type not in {"identifier", "type_identifier"} and self.names_type(name))

    def declarator(
        self, node: tree_sitter.Node | None, base: TypeSyntax, *, is_const: bool = False
    ) -> tuple[str, TypeSyntax]:
        """Return the name and the type that a declarator makes of the type before it."""
        if node is None:
            return "", base
        place = self.place(node)
        inner = node.child_by_field_name("declarator")
        match node.type:
            case "identifier" | "field_identifier" | "type_identifier":
                return text_of(node), base
            case "pointer_declarator" | "abstract_pointer_declarator":
                return self.declarator(inner, PointerType(place, base))
            case "reference_declarator" | "abstract_reference_declarator":
                inner = next((child for child in node.named_children if child.type != "type_qualifier"), None)
                return self.declarator(inner, ReferenceType(place, base, is_const))
            case "array_declarator" | "abstract_array_declarator":
                size = node.child_by_field_name("size")
                array = ArrayType(place, base, self.expression(size) if size is not None else None)
                return self.declarator(inner, array, is_const=is_const)
            case "parenthesized_declarator" | "abstract_parenthesized_declarator" if node.named_children:
                return self.declarator(node.named_children[0], base, is_const=is_const)
        construct = "a pointer to a function" if "function" in node.type else f"the declarator {text_of(node)!r}"
        raise self.refuse(node, construct)
