"""From the parser's tree of a functor text to a ``Program``: functions, constants, types."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

import tree_sitter

from fuser.cxx.expression_syntax import EXPRESSIONS, read_declarator, read_type, template_arguments
from fuser.cxx.functor import Functor, read_text
from fuser.cxx.nodes import (
    Assign,
    Block,
    Capture,
    Expression,
    FunctionDefinition,
    InitList,
    Lambda,
    Literal,
    Name,
    NamedType,
    Parameter,
    ReferenceType,
    Statement,
    TemplateParameter,
    TypeSyntax,
    Unary,
)
from fuser.cxx.reader import Grammar, Reader, describe, read_list
from fuser.cxx.statement_syntax import IGNORED, STATEMENTS, read_block, read_declarators, read_optional, read_statements
from fuser.cxx.statements import Alias, Declaration, Declarator, Evaluate, Program, Struct
from fuser.cxx.tree import class_name, field, function_declarator, has_word, named, text_of, trailing_type
from fuser.errors import UntranslatableError

__all__ = ["parse_program"]


@lru_cache(maxsize=1024)
def parse_program(functor: Functor) -> Program:
    """Return the syntax of a functor's text.

    Raises:
        FunctorError: the text does not parse.
        UntranslatableError: it holds something that has no translation, such as ``goto``.
    """
    functor.raise_problems()
    reading = read_text(functor.source)
    obstacle = reading.preprocessed.obstacle
    if obstacle is not None:
        raise UntranslatableError(functor.source, *obstacle.place, obstacle.message)
    reader = Reader(reading.expanded, _GRAMMAR)
    try:
        others = _read_outside(reader, reading.tree.root_node)
    except RecursionError:
        raise UntranslatableError(functor.source, 1, 1, "a text nested this deeply") from None
    entry = next(item for item in reversed(reader.functions[functor.entry]) if item.template and item.body)
    functions = {name: tuple(items) for name, items in reader.functions.items()}
    return Program(functions, tuple(others), entry, reader.externals)


def _read_outside(reader: Reader, parent: tree_sitter.Node) -> list[Statement]:
    # What stands outside functions: theirs go to the reader, the other statements are returned.
    found: list[Statement] = []
    for node in parent.named_children:
        read = _OUTSIDE.get(node.type)
        made = read(reader, node) if read is not None else read_statements(reader, [node])
        if not all(isinstance(item, Alias | Declaration | Struct) for item in made):
            raise reader.refuse(node, f"{describe(node)} outside of functions")
        found += made
    return found


def _namespace(reader: Reader, node: tree_sitter.Node) -> list[Statement]:
    name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
    before, count = reader.path, len(reader.used)
    for inner in [] if name is None else text_of(name).split("::"):
        full = (*reader.path, inner.strip())
        # Of an inline namespace the one around it has all names.
        reader.path = reader.path if has_word(node, "inline") else full
        reader.namespaces["::".join(full)] = reader.path
    found = [] if body is None else _read_outside(reader, body)
    reader.path = before
    del reader.used[count:]
    return found


def _declaration(reader: Reader, node: tree_sitter.Node) -> list[Statement]:
    declarator = function_declarator(node)
    if declarator is None:
        return read_statements(reader, [node])
    # A prototype: its name may be called from here on.
    reader.declare(_function_name(reader, declarator), "function")
    return []


def _specialisation(
    reader: Reader, name: tree_sitter.Node | None, template: tuple[TemplateParameter, ...]
) -> tuple[TypeSyntax | Expression, ...] | None:
    # The template arguments that a specialisation writes, of a template that has no parameters left.
    is_template = name is not None and name.type in {"template_function", "template_type"}
    if name is not None and is_template and template:
        raise reader.refuse(name, "a partial specialisation")
    return template_arguments(reader, name) if name is not None and is_template else None


def _template(reader: Reader, node: tree_sitter.Node) -> list[Statement]:
    inner = node.named_children[-1]
    found: list[Struct | Alias] = []
    declarator = function_declarator(inner)
    name = "" if declarator is None else _function_name(reader, declarator)
    if declarator is not None:
        reader.declare(name, "function")
    full = reader.qualify(name or class_name(inner))
    with reader.scope():
        template = _template_parameters(reader, node.child_by_field_name("parameters"))
        if declarator is not None and inner.type == "function_definition":
            function = _function(reader, inner, full, template)
            special = _specialisation(reader, field(declarator, "declarator"), template)
            special = () if special is None and not template else special
            reader.functions.setdefault(full, []).append(replace(function, special=special))
        elif inner.type in {"struct_specifier", "class_specifier"} and inner.child_by_field_name("body") is None:
            # A declaration; of a template that is never defined there are specialisations.
            is_new = reader.kind(class_name(inner)) != "type"
            found = [Struct(reader.place(node), full, template, (), ())] if is_new else []
        elif inner.type in {"struct_specifier", "class_specifier"}:
            special = _specialisation(reader, inner.child_by_field_name("name"), template)
            found = [replace(_struct(reader, inner, full, template, special), special=special)]
        elif inner.type == "alias_declaration":
            kind = read_type(reader, field(inner, "type"))
            found = [Alias(reader.place(node), full, kind, template)]
        elif declarator is None:
            raise reader.refuse(node, f"a template of a {inner.type.replace('_', ' ')}")
    for _ in found:
        reader.declare(class_name(inner), "type")
    return [*found]


def _template_parameters(reader: Reader, node: tree_sitter.Node | None) -> tuple[TemplateParameter, ...]:
    found = []
    for child in named(node):
        place = reader.place(child)
        value = child.child_by_field_name("default_value") or child.child_by_field_name("default_type")
        if child.type in {"type_parameter_declaration", "optional_type_parameter_declaration"}:
            inner = child.child_by_field_name("name") or next(named(child), None)
            name = text_of(inner) if inner is not None and inner != value else ""
            reader.declare(name, "type")
            found.append(TemplateParameter(place, name, None if value is None else read_type(reader, value)))
        elif child.type in {"parameter_declaration", "optional_parameter_declaration"}:
            kind = read_type(reader, field(child, "type"))
            name, kind = read_declarator(reader, child.child_by_field_name("declarator"), kind)
            reader.declare(name, "value")
            found.append(TemplateParameter(place, name, read_optional(reader, value), kind))
        else:
            raise reader.refuse(child, f"the template parameter {text_of(child)!r}")
    return tuple(found)


def _define(reader: Reader, node: tree_sitter.Node) -> list[Statement]:
    declarator = function_declarator(node)
    if declarator is None:
        raise reader.refuse(node, "this function")
    name = _function_name(reader, declarator)
    reader.declare(name, "function")
    full = reader.qualify(name)
    reader.functions.setdefault(full, []).append(_function(reader, node, full))
    return []


def _function_name(reader: Reader, declarator: tree_sitter.Node) -> str:
    name = field(declarator, "declarator")
    if name.type == "template_function":
        return text_of(field(name, "name"))
    if name.type not in {"identifier", "field_identifier", "operator_name"}:
        raise reader.refuse(name, f"the function name {text_of(name)!r}")
    return text_of(name)


def _function(
    reader: Reader, node: tree_sitter.Node, name: str, template: tuple[TemplateParameter, ...] = ()
) -> FunctionDefinition:
    declarator, body = function_declarator(node), node.child_by_field_name("body")
    if declarator is None or body is None or body.type != "compound_statement":
        raise reader.refuse(node, "this function")
    with reader.scope():
        parameters = _parameters(reader, declarator)
        kind = trailing_type(declarator) or node.child_by_field_name("type")
        result = NamedType(reader.place(node), "void") if kind is None else read_type(reader, kind)
        outer = field(node, "declarator")
        if outer.type == "pointer_declarator":
            raise reader.refuse(outer, "a function that returns a pointer")
        if outer.type == "reference_declarator":
            result = ReferenceType(result.place, result, has_word(node, "const"))
        block = read_block(reader, body)
        block = Block(block.place, (*_initialisers(reader, node), *block.statements))
        return FunctionDefinition(reader.place(node), name, template, parameters, result, block)


def _initialisers(reader: Reader, node: tree_sitter.Node) -> Iterator[Statement]:
    # What a constructor has between its parameters and its body, as assignments.
    for item in (
        item for child in node.named_children if child.type == "field_initializer_list" for item in named(child)
    ):
        name, values = named(item)
        place = reader.place(item)
        value = InitList(place, read_list(reader, values))
        yield Evaluate(place, Assign(place, "", Name(place, text_of(name)), value))


def _parameters(reader: Reader, declarator: tree_sitter.Node | None) -> tuple[Parameter, ...]:
    found = []
    for child in named(declarator.child_by_field_name("parameters") if declarator is not None else None):
        if child.type not in {"parameter_declaration", "optional_parameter_declaration"}:
            raise reader.refuse(child, "a parameter pack" if "variadic" in child.type else "this parameter")
        kind = read_type(reader, field(child, "type"))
        name, kind = read_declarator(reader, child.child_by_field_name("declarator"), kind, has_word(child, "const"))
        if not isinstance(kind, NamedType) or kind.name != "void":
            default = read_optional(reader, child.child_by_field_name("default_value"))
            reader.declare(name, "value")
            found.append(Parameter(reader.place(child), name, kind, default))
    return tuple(found)


def _lambda(reader: Reader, node: tree_sitter.Node) -> Lambda:
    place, declarator = reader.place(node), node.child_by_field_name("declarator")
    default, captures = "", []
    for child in named(node.child_by_field_name("captures")):
        if child.type == "lambda_default_capture":
            default = text_of(child)
        elif child.type != "this":
            captures.append(_capture(reader, child))
    with reader.scope():
        for capture in captures:
            reader.declare(capture.name, "value")
        parameters, kind = _parameters(reader, declarator), trailing_type(declarator)
        result = NamedType(place, "auto") if kind is None else read_type(reader, kind)
        body = read_block(reader, field(node, "body"))
        function = FunctionDefinition(place, "a lambda", (), parameters, result, body)
    return Lambda(place, default, tuple(captures), function)


def _capture(reader: Reader, node: tree_sitter.Node) -> Capture:
    text, before = text_of(node), node.prev_sibling
    name = text.split("=")[0].strip().removeprefix("&").strip()
    by_reference = text.startswith("&") or (before is not None and before.type == "&")
    return Capture(reader.place(node), name, by_reference, read_optional(reader, node.child_by_field_name("right")))


def _plain_struct(reader: Reader, node: tree_sitter.Node) -> Struct | list[Statement]:
    if node.child_by_field_name("body") is None:
        reader.declare(class_name(node), "type")
        return []
    return _struct(reader, node, reader.qualify(class_name(node)))


def _struct(
    reader: Reader,
    node: tree_sitter.Node,
    full: str,
    template: tuple[TemplateParameter, ...] = (),
    special: tuple[TypeSyntax | Expression, ...] | None = None,
) -> Struct:
    body = node.child_by_field_name("body")
    if body is None or any(child.type == "base_class_clause" for child in node.children):
        raise reader.refuse(node, "a class with bases")
    reader.declare(class_name(node), "type", full)
    own = special or tuple(
        NamedType(item.place, item.name) if item.type is None else Name(item.place, item.name) for item in template
    )
    outer, reader.own_arguments = reader.own_arguments, reader.own_arguments | {full: own}
    fields: list[Declarator] = []
    constants: list[Declarator] = []
    members: list[tree_sitter.Node] = []
    aliases: list[Statement] = []
    with reader.scope():
        for child in named(body):
            declarator = function_declarator(child)
            if any(part.type == "bitfield_clause" for part in child.children):
                raise reader.refuse(child, "a bit field")
            kind = child.child_by_field_name("type")
            if kind is not None and kind.child_by_field_name("body") is not None:
                raise reader.refuse(kind, "a class inside a class")
            if child.type == "field_declaration" and declarator is None:
                is_constant = any(text_of(part) == "static" for part in child.children)
                (constants if is_constant else fields).extend(read_declarators(reader, child))
            elif child.type == "function_definition":
                name = "" if declarator is None else _function_name(reader, declarator)
                if name not in {"", class_name(node)}:
                    # A constructor is no function that could be called: its name stays the type's.
                    reader.declare(name, "function")
                members.append(child)
            elif child.type in {"alias_declaration", "type_definition"}:
                aliases += _alias(reader, child)
            elif child.type not in {"access_specifier", *IGNORED}:
                raise reader.refuse(child, f"the member {text_of(child).splitlines()[0]!r}")
        functions = tuple(_member_function(reader, child) for child in members)
    reader.own_arguments = outer
    named_types = tuple(item for item in aliases if isinstance(item, Alias))
    reader.member_types.update(item.name for item in named_types)
    return Struct(reader.place(node), full, template, tuple(fields), functions, tuple(constants), aliases=named_types)


def _member_function(reader: Reader, node: tree_sitter.Node) -> FunctionDefinition:
    declarator = function_declarator(node)
    if declarator is None:
        raise reader.refuse(node, "this function")
    return _function(reader, node, _function_name(reader, declarator))


def _alias(reader: Reader, node: tree_sitter.Node) -> list[Statement]:
    kind = field(node, "type")
    found = read_statements(reader, [kind]) if kind.child_by_field_name("body") is not None else []
    for declarator in node.children_by_field_name("declarator") or [field(node, "name")]:
        name, spelled = read_declarator(reader, declarator, read_type(reader, kind))
        if isinstance(spelled, NamedType) and spelled.name == reader.qualify(name):
            # ``typedef struct point { T x, y; } point;`` names nothing anew.
            continue
        found.append(Alias(reader.place(node), reader.qualify(name), spelled))
        reader.declare(name, "type")
    return [*found]


def _enum(reader: Reader, node: tree_sitter.Node) -> list[Statement]:
    place, name = reader.place(node), class_name(node)
    values: list[tuple[tree_sitter.Node, int]] = []
    for child in named(node.child_by_field_name("body")):
        value = child.child_by_field_name("value")
        if value is not None and value.type != "number_literal":
            raise reader.refuse(value, "an enumerator that is no plain number")
        before = values[-1][1] if values else -1
        values.append((child, _integer(text_of(value)) if value is not None else before + 1))
    numbers = [value for _, value in values] or [0]
    base = node.child_by_field_name("base")
    promoted = NamedType(
        place, next(kind for kind, low, high in _ENUM_TYPES if low <= min(numbers) <= max(numbers) < high)
    )
    kind = promoted if base is None else read_type(reader, base)
    found: list[Statement] = [Alias(place, reader.qualify(name), kind)]
    reader.declare(name, "type")
    is_scoped = has_word(node, "class", "struct")
    for child, number in values:
        label = text_of(field(child, "name"))
        at = reader.place(child)
        literal: Expression = Literal(at, f"{abs(number)}u" if number >= 1 << 63 else str(abs(number)))
        literal = Unary(at, "-", literal) if number < 0 else literal
        names = [f"{reader.qualify(name)}::{label}"]
        if not is_scoped:
            names.append(reader.qualify(label))
            reader.declare(label, "value")
        found += [Declaration(place, (Declarator(at, item, kind, literal),)) for item in names]
    return found


# What the values of an enumeration without a type of its own are promoted to.
_ENUM_TYPES = (
    ("int32_t", -1 << 31, 1 << 31), ("uint32_t", 0, 1 << 32), ("int64_t", -1 << 63, 1 << 63), ("uint64_t", 0, 1 << 64),
)  # fmt: skip


def _integer(text: str) -> int:
    digits = text.replace("'", "").lower().rstrip("ulz")
    return int(digits, 8 if digits[0] == "0" and digits.isdigit() else 0)


_GRAMMAR = Grammar(
    expressions={**EXPRESSIONS, "lambda_expression": _lambda},
    statements={
        **STATEMENTS,
        "alias_declaration": _alias,
        "type_definition": _alias,
        "struct_specifier": _plain_struct,
        "class_specifier": _plain_struct,
        "enum_specifier": _enum,
    },
)
_OUTSIDE: Mapping[str, Callable[[Reader, tree_sitter.Node], list[Statement]]] = {
    "namespace_definition": _namespace,
    "linkage_specification": _namespace,
    "template_declaration": _template,
    "function_definition": _define,
    "declaration": _declaration,
}
