"""The parser's tree of a C++ text, and how to walk it. Offsets in it are bytes of UTF-8."""

from __future__ import annotations

from collections.abc import Iterator

import tree_sitter
import tree_sitter_cpp

__all__ = [
    "class_name",
    "field",
    "find",
    "function_declarator",
    "has_word",
    "named",
    "parse_tree",
    "text_of",
    "trailing_type",
]

_LANGUAGE = tree_sitter.Language(tree_sitter_cpp.language())


def parse_tree(text: str) -> tree_sitter.Tree:
    """Return the tree of a text that has no macros left."""
    # A parser keeps state while it parses and so is not shared between threads.
    return tree_sitter.Parser(_LANGUAGE).parse(text.encode())


def text_of(node: tree_sitter.Node) -> str:
    """Return the text of a node."""
    return (node.text or b"").decode()


def field(node: tree_sitter.Node, name: str) -> tree_sitter.Node:
    """Return a child that the grammar always has."""
    found = node.child_by_field_name(name)
    assert found is not None, f"the grammar gives {node.type} its {name}"
    return found


def class_name(node: tree_sitter.Node) -> str:
    """Return what a class or an enumeration is called, without template arguments; where it has no name, by its place.

    Nothing for what is neither.
    """
    name = node.child_by_field_name("name")
    if name is not None:
        return text_of(name.child_by_field_name("name") or name)
    return f"{text_of(node.children[0])} {node.start_byte}" if node.type.endswith("_specifier") else ""


def has_word(node: tree_sitter.Node, *words: str) -> bool:
    """Whether one of the words stands in a node itself, such as ``const`` in a declaration."""
    return any(text_of(child) in words for child in node.children)


def named(node: tree_sitter.Node | None) -> Iterator[tree_sitter.Node]:
    """Yield the named children of a node, comments left out; none for None."""
    return (child for child in node.named_children if child.type != "comment") if node is not None else iter(())


def find(node: tree_sitter.Node, kind: str, *, skip: str = "") -> Iterator[tree_sitter.Node]:
    """Yield the nodes of a kind at and below a node, in the order of the text; nothing below nodes of kind ``skip``."""
    # A long sum is a deep tree: no recursion.
    rest = [node]
    while rest:
        item = rest.pop()
        if item.type == kind:
            yield item
        rest += [child for child in reversed(item.children) if child.type != skip]


def function_declarator(node: tree_sitter.Node) -> tree_sitter.Node | None:
    """Return the declarator of a function, under references and pointers that belong to its result."""
    inner = node.child_by_field_name("declarator")
    while inner is not None and inner.type in {"reference_declarator", "pointer_declarator"}:
        inner = inner.child_by_field_name("declarator") or next(iter(inner.named_children), None)
    return inner if inner is not None and inner.type == "function_declarator" else None


def trailing_type(declarator: tree_sitter.Node | None) -> tree_sitter.Node | None:
    """Return what a function's declarator has behind its arrow."""
    children = [] if declarator is None else declarator.named_children
    return next((child.named_children[0] for child in children if child.type == "trailing_return_type"), None)
