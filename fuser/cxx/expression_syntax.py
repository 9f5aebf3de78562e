"""From the parser's tree to types and expressions, whatever the parser took them for; see ``reader``.

A type and a value look alike to it in many places. What the names in scope stand for decides: a local variable hides a
type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce

import tree_sitter

from fuser.cxx.nodes import (
    ArrayType,
    Assign,
    Binary,
    Call,
    Cast,
    Conditional,
    Decltype,
    Expression,
    Increment,
    Index,
    InitList,
    Literal,
    Member,
    Name,
    NamedType,
    PointerType,
    ReferenceType,
    SizeOf,
    TypeSyntax,
    Unary,
)
from fuser.cxx.reader import STD, TYPES, Path, Piece, Pieces, Reader, describe, read_expression, read_list, take_apart
from fuser.cxx.tree import class_name, field, find, has_word, named, parse_tree, text_of
from fuser.errors import UntranslatableError

__all__ = ["EXPRESSIONS", "read_again", "read_declarator", "read_type", "template_arguments"]

_SPELLED = {"and": "&&", "or": "||", "not": "!", "compl": "~", "bitand": "&", "bitor": "|", "xor": "^", "not_eq": "!="}
_CASTS = frozenset({"static_cast", "reinterpret_cast", "const_cast", "dynamic_cast"})


def read_again(reader: Reader, text: str, start: int) -> tuple[Expression, ...]:
    """Read a text in parentheses, at a byte, as arguments when the parser took it for something else."""
    before = "int f() { return g"
    tree = parse_tree(f"{before}{text}; }}")
    call = next(find(tree.root_node, "call_expression"), None)
    if call is None or tree.root_node.has_error:
        raise UntranslatableError(reader.expanded.source, *reader.expanded.place(start), f"the declarator {text!r}")
    shift, reader.shift = reader.shift, reader.shift + start - len(before)
    found = read_list(reader, field(call, "arguments"))
    reader.shift = shift
    return found


def read_type(reader: Reader, node: tree_sitter.Node) -> TypeSyntax:
    """Read a type."""
    read = _READ_TYPE.get(node.type)
    if read is None:
        raise reader.refuse(node, f"the type {text_of(node)!r}")
    return read(reader, node)


def _type_descriptor(reader: Reader, node: tree_sitter.Node) -> TypeSyntax:
    base = read_type(reader, field(node, "type"))
    return read_declarator(reader, node.child_by_field_name("declarator"), base, has_word(node, "const"))[1]


def _named_type(reader: Reader, node: tree_sitter.Node) -> NamedType:
    name = reader.spell(" ".join(text_of(node).split()))
    return NamedType(reader.place(node), name, reader.own_arguments.get(name, ()))


def _placeholder(reader: Reader, node: tree_sitter.Node) -> NamedType:
    if text_of(node).startswith("decltype"):
        raise reader.refuse(node, "decltype(auto)")
    return NamedType(reader.place(node), "auto")


def _template_type(reader: Reader, node: tree_sitter.Node) -> NamedType:
    return NamedType(reader.place(node), reader.spell(text_of(field(node, "name"))), template_arguments(reader, node))


def _inner_type(reader: Reader, node: tree_sitter.Node) -> TypeSyntax:
    # ``typename T::value_type``, ``struct point``; also ``struct { T x; }``, which is defined before it is read here.
    if node.child_by_field_name("body") is not None:
        return NamedType(reader.place(node), reader.spell(class_name(node)))
    return read_type(reader, node.named_children[-1])


def _qualified_type(reader: Reader, node: tree_sitter.Node) -> TypeSyntax:
    path, outer, name = _split(reader, node)
    if outer is not None:
        return NamedType(outer.place, outer.name, outer.arguments, text_of(name))
    return _type_in(reader, name, path)


def _split(reader: Reader, node: tree_sitter.Node) -> tuple[Path | None, NamedType | None, tree_sitter.Node]:
    # ``a::b::S<T>::v`` into the namespace, the type before the last name, None for none, and the last name.
    path: Path | None = None
    while node.type == "qualified_identifier":
        scope, name = node.child_by_field_name("scope"), field(node, "name")
        inner = () if scope is None else reader.find_namespace(text_of(scope), path)
        if scope is not None and inner is None:
            return path, _type_in(reader, scope, path), name
        path, node = inner, name
    if path == () and any(text_of(node) in scope for scope in reader.scopes[1:]):
        raise reader.refuse(node, f"::{text_of(node)}, which another {text_of(node)} hides,")
    return path, None, node


def _type_in(reader: Reader, node: tree_sitter.Node, path: Path | None) -> NamedType:
    # A type's name, in a namespace.
    if path is None or node.type not in {*_NAMES, "template_type", "template_function"}:
        found = read_type(reader, node)
        assert isinstance(found, NamedType), "a name comes before and after ::"
        return found
    arguments = template_arguments(reader, node)
    return NamedType(reader.place(node), reader.spell(_template_name(node), path), arguments)


def _template_name(node: tree_sitter.Node) -> str:
    # Without template arguments.
    return text_of(field(node, "name") if node.type in {"template_type", "template_function"} else node)


def template_arguments(reader: Reader, node: tree_sitter.Node) -> tuple[TypeSyntax | Expression, ...]:
    """Read what stands between ``<`` and ``>``; nothing for a name without them."""
    return tuple(
        read_type(reader, item) if _names_type(reader, item) else read_expression(reader, item)
        for item in named(node.child_by_field_name("arguments"))
    )


_NAMES = frozenset({"identifier", "type_identifier", "namespace_identifier"})
_READ_TYPE: Mapping[str, Callable[[Reader, tree_sitter.Node], TypeSyntax]] = {
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
    "enum_specifier": _inner_type,
    "class_specifier": _inner_type,
    "qualified_identifier": _qualified_type,
    "decltype": lambda reader, node: Decltype(reader.place(node), read_expression(reader, node.named_children[0])),
}


def _names_type(reader: Reader, node: tree_sitter.Node) -> bool:
    # By the names in scope.
    match node.type:
        case "identifier" | "type_identifier" | "namespace_identifier":
            return reader.kind(text_of(node)) == "type"
        case "type_descriptor":
            return _names_type(reader, field(node, "type"))
        case "template_type" | "template_function":
            name = text_of(field(node, "name"))
            return reader.kind(name) == "type" or name.endswith("_t")
        case "qualified_identifier":
            path, outer, inner = _split(reader, node)
            if outer is not None:
                return text_of(inner) in reader.member_types
            if path != STD:
                return reader.kind(_template_name(inner), path) == "type"
            return text_of(inner) in TYPES or (inner.type not in _NAMES and _names_type(reader, inner))
    return node.type in _READ_TYPE


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
            reference = ReferenceType(place, base, is_const, has_word(node, "&&"))
            return read_declarator(reader, inner, reference)
        case "array_declarator":
            size = node.child_by_field_name("size")
            array = ArrayType(place, base, None if size is None else read_expression(reader, size))
            return read_declarator(reader, inner, array, is_const)
        case "parenthesized_declarator" if node.named_children:
            return read_declarator(reader, node.named_children[0], base, is_const)
    construct = "a pointer to a function" if "function" in node.type else f"the declarator {text_of(node)!r}"
    raise reader.refuse(node, construct)


# Expressions that may come as pieces


def _binary(reader: Reader, node: tree_sitter.Node) -> Pieces:
    # A long sum leans to the left, more deeply than Python calls itself.
    links = [node]
    while (left := field(links[-1], "left")).type == node.type:
        links.append(left)
    found = take_apart(reader, left)
    for link in reversed(links):
        operator = next(child for child in link.children if not child.is_named)
        found += [_operator(reader, operator), *take_apart(reader, field(link, "right"))]
    return found


def _unary(reader: Reader, node: tree_sitter.Node) -> Pieces:
    operator, rest = _operator(reader, node.children[0]), take_apart(reader, field(node, "argument"))
    if operator.operator == "&" and isinstance(rest[0], Piece) and rest[0].operator == "&":
        # (a) && b, taken for a cast of the address of an address, which nothing has.
        return [Piece(operator.place, "&&"), *rest[1:]]
    return [operator, *rest]


def _operator(reader: Reader, node: tree_sitter.Node) -> Piece:
    return Piece(reader.place(node), _SPELLED.get(text_of(node), text_of(node)))


def _number(reader: Reader, node: tree_sitter.Node) -> Expression | Pieces:
    place, text = reader.place(node), text_of(node)
    return [Piece(place, text[0]), Literal(place, text[1:])] if text[0] in "+-" else Literal(place, text)


def _parenthesized(reader: Reader, node: tree_sitter.Node) -> Expression | Pieces:
    inner = _inner(node)
    if _names_type(reader, inner):
        return [Piece(reader.place(node), "", read_type(reader, inner))]
    return read_expression(reader, inner)


def _cast(reader: Reader, node: tree_sitter.Node) -> Expression | Pieces:
    kind, value = field(node, "type"), field(node, "value")
    declarator = kind.child_by_field_name("declarator")
    # Nothing is cast to the type of a function or an array: (T(a)) - b, and a may be a call or an element.
    of_type = declarator is None or declarator.type not in {"abstract_function_declarator", "abstract_array_declarator"}
    if of_type and _names_type(reader, kind):
        return [Piece(reader.place(node), "", read_type(reader, kind)), *take_apart(reader, value)]
    (name,) = read_again(reader, f"({text_of(kind)})", kind.start_byte - 1)
    if value.type == "parenthesized_expression":
        return Call(reader.place(node), name, (read_expression(reader, _inner(value)),))
    # (a) - b, taken for a cast of -b.
    return [name, *take_apart(reader, value)]


def _call(reader: Reader, node: tree_sitter.Node) -> Expression | Pieces:
    function, arguments = field(node, "function"), field(node, "arguments")
    place = reader.place(node)
    if function.type == "parenthesized_expression" and _names_type(reader, inner := _inner(function)):
        return [Piece(place, "", read_type(reader, inner)), _joined(reader, arguments)]
    if function.type == "template_function":
        name = text_of(field(function, "name"))
        if reader.kind(name) == "value":
            # a < b && c > (d), taken for a call of the template a<b && c>.
            found: Pieces = [Name(place, reader.spell(name))]
            for child in named(field(function, "arguments")):
                found.append(Piece(reader.place(child), "," if len(found) > 1 else "<"))
                found += [_name(reader, child)] if child.type == "type_descriptor" else take_apart(reader, child)
            return [*found, Piece(reader.place(arguments), ">"), _joined(reader, arguments)]
        if name in _CASTS:
            kinds = template_arguments(reader, function)
            if len(kinds) != 1 or not isinstance(kinds[0], TypeSyntax):
                raise reader.refuse(function, f"the cast {text_of(function)!r}")
            return Cast(place, kinds[0], read_list(reader, arguments))
    if _names_type(reader, function):
        return Cast(place, read_type(reader, function), read_list(reader, arguments))
    callee = read_expression(reader, function)
    is_unknown = isinstance(callee, Name) and not callee.member and not _is_declared(reader, callee.name)
    if isinstance(callee, Name) and is_unknown:
        reader.externals.setdefault(callee.name, callee.place)
    return Call(place, callee, read_list(reader, arguments))


def _is_declared(reader: Reader, name: str) -> bool:
    # Whether a function or value has the name; the function may stand in the namespace of an argument's type.
    is_in_namespace = any(full.endswith(f"::{name}") for full in reader.scopes[0])
    return is_in_namespace or reader.kind(name) in {"function", "value"}


def _joined(reader: Reader, arguments: tree_sitter.Node) -> Expression:
    # What stands in brackets, as one expression.
    found = read_list(reader, arguments)
    if not found:
        raise reader.refuse(arguments, text_of(arguments))
    return reduce(lambda left, right: Binary(left.place, ",", left, right), found)


# Those that come as they are


def _name(reader: Reader, node: tree_sitter.Node) -> Name:
    return Name(reader.place(node), reader.spell(text_of(node).strip()))


def _taken_for_type(reader: Reader, node: tree_sitter.Node) -> Expression:
    # As everything between < and > may be.
    if node.child_by_field_name("declarator") is not None:
        raise reader.refuse(node, describe(node))
    return read_expression(reader, node.named_children[-1])


def _template(reader: Reader, node: tree_sitter.Node) -> Name:
    return Name(reader.place(node), reader.spell(text_of(field(node, "name"))), template_arguments(reader, node))


def _qualified(reader: Reader, node: tree_sitter.Node) -> Name:
    path, outer, name = _split(reader, node)
    place = reader.place(node)
    if outer is not None:
        return Name(place, outer.name, outer.arguments, member=text_of(name))
    return Name(place, reader.spell(_template_name(name), path), template_arguments(reader, name), path == STD)


def _assignment(reader: Reader, node: tree_sitter.Node) -> Assign:
    target, value = (read_expression(reader, field(node, name)) for name in ("left", "right"))
    return Assign(reader.place(node), text_of(field(node, "operator"))[:-1], target, value)


def _update(reader: Reader, node: tree_sitter.Node) -> Increment:
    target, operator = field(node, "argument"), field(node, "operator")
    is_prefix = operator.start_byte < target.start_byte
    return Increment(reader.place(node), text_of(operator)[0], read_expression(reader, target), is_prefix)


def _conditional(reader: Reader, node: tree_sitter.Node) -> Conditional:
    parts = [node.child_by_field_name(name) for name in ("condition", "consequence", "alternative")]
    found = [read_expression(reader, part) for part in parts if part is not None]
    if len(found) < len(parts):
        raise reader.refuse(node, "a conditional expression without its middle")
    return Conditional(reader.place(node), *found)


def _subscript(reader: Reader, node: tree_sitter.Node) -> Index:
    index = _joined(reader, field(node, "indices"))
    return Index(reader.place(node), read_expression(reader, field(node, "argument")), index)


def _member(reader: Reader, node: tree_sitter.Node) -> Member:
    found = read_expression(reader, field(node, "argument"))
    if text_of(field(node, "operator")) == "->":
        found = Unary(found.place, "*", found)
    return Member(reader.place(node), found, text_of(field(node, "field")).removeprefix("template").strip())


def _size_of(reader: Reader, node: tree_sitter.Node) -> SizeOf:
    kind = node.child_by_field_name("type") or node.child_by_field_name("value")
    if kind is None:
        raise reader.refuse(node, describe(node))
    inner = _inner(kind) if kind.type == "parenthesized_expression" else kind
    read = read_type if _names_type(reader, inner) else read_expression
    return SizeOf(reader.place(node), read(reader, inner))


def _inner(node: tree_sitter.Node) -> tree_sitter.Node:
    return next(named(node))


_LITERALS = "true false null nullptr char_literal string_literal concatenated_string"
# But lambdas, which hold statements.
EXPRESSIONS: Mapping[str, Callable[[Reader, tree_sitter.Node], Expression | Pieces]] = {
    **dict.fromkeys(_LITERALS.split(), lambda reader, node: Literal(reader.place(node), text_of(node))),
    "number_literal": _number,
    "identifier": _name,
    "field_identifier": _name,
    "type_identifier": _name,
    "this": lambda reader, node: Name(reader.place(node), "this"),
    "type_descriptor": _taken_for_type,
    "template_function": _template,
    "template_type": _template,
    "qualified_identifier": _qualified,
    "parenthesized_expression": _parenthesized,
    "binary_expression": _binary,
    "comma_expression": _binary,
    "unary_expression": _unary,
    "pointer_expression": _unary,
    "cast_expression": _cast,
    "call_expression": _call,
    "assignment_expression": _assignment,
    "update_expression": _update,
    "conditional_expression": _conditional,
    "subscript_expression": _subscript,
    "field_expression": _member,
    "initializer_list": lambda reader, node: InitList(reader.place(node), read_list(reader, node)),
    "argument_list": lambda reader, node: InitList(reader.place(node), read_list(reader, node)),
    "compound_literal_expression": lambda reader, node: Cast(
        reader.place(node), read_type(reader, field(node, "type")), read_list(reader, field(node, "value"))
    ),
    "sizeof_expression": _size_of,
}
