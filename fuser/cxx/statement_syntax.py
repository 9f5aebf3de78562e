"""From the parser's tree to statements."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

import tree_sitter

from fuser.cxx.expression_syntax import read_again, read_declarator, read_type
from fuser.cxx.nodes import Block, Expression, InitList, Name, ReferenceType, Statement, TypeSyntax
from fuser.cxx.reader import Path, Reader, describe, read_expression
from fuser.cxx.statements import (
    Break,
    Condition,
    Continue,
    Declaration,
    Declarator,
    DoWhile,
    Evaluate,
    For,
    If,
    RangeFor,
    Return,
    Switch,
    While,
)
from fuser.cxx.tree import field, has_word, named, text_of

__all__ = ["IGNORED", "STATEMENTS", "read_block", "read_declarators", "read_optional", "read_statements"]

# What means nothing here.
IGNORED = ("comment", ";", "static_assert_declaration", "empty_statement", "attribute_declaration")


def read_statements(reader: Reader, nodes: Iterable[tree_sitter.Node]) -> list[Statement]:
    """Read statements; one that means nothing here gives none."""
    made: list[Statement] = []
    for node in nodes:
        read = reader.grammar.statements.get(node.type)
        if read is None:
            raise reader.refuse(node, describe(node))
        found = read(reader, node)
        made += found if isinstance(found, list) else [found]
    return made


def read_block(reader: Reader, node: tree_sitter.Node) -> Block:
    """Read a compound statement, a scope of its own."""
    with reader.scope():
        return Block(reader.place(node), tuple(read_statements(reader, named(node))))


def read_optional(reader: Reader, node: tree_sitter.Node | None) -> Expression | None:
    """Read an expression if there is one."""
    return None if node is None else read_expression(reader, node)


def read_declarators(reader: Reader, node: tree_sitter.Node) -> list[Declarator]:
    """Read the variables of a declaration."""
    kind = field(node, "type")
    base = read_type(reader, kind.child_by_field_name("name") or kind if kind.type.endswith("specifier") else kind)
    is_const = has_word(node, "const", "constexpr")
    fields = [node.field_name_for_child(index) for index in range(node.child_count)]
    found = []
    for index, child in enumerate(node.children):
        if fields[index] == "declarator":
            # In a class and in a condition the value is no part of the declarator, but follows it, maybe after "=".
            values = [at for at in (index + 1, index + 2) if fields[at : at + 1] in (["default_value"], ["value"])]
            found.append(_declarator(reader, child, base, node.children[values[0]] if values else None, is_const))
    return found


def _declarator(
    reader: Reader, node: tree_sitter.Node, base: TypeSyntax, value: tree_sitter.Node | None, is_const: bool
) -> Declarator:
    place, target = reader.place(node), node
    if node.type == "init_declarator":
        target, value = field(node, "declarator"), node.child_by_field_name("value")
    inner = target.named_children[-1] if target.type == "reference_declarator" else None
    if inner is not None and inner.type == "structured_binding_declarator":
        target, base = inner, ReferenceType(place, base, is_const)
    if target.type == "function_declarator":
        return _constructed(reader, target, base)
    names: tuple[str, ...] = ()
    if target.type == "structured_binding_declarator":
        name, spelled, names = "", base, tuple(map(text_of, named(target)))
    else:
        name, spelled = read_declarator(reader, target, base, is_const)
    if value is not None and value.type == "lambda_expression":
        # Only a lambda may name itself in its own text, and those are functions.
        reader.declare(name, "function")
    found = read_optional(reader, value)
    if value is not None and value.type == "argument_list" and isinstance(found, InitList) and len(found.values) == 1:
        # T x(1): one value is the value itself.
        (found,) = found.values
    for item in names or (name,):
        reader.declare(item, "value")
    return Declarator(place, reader.qualify(name), spelled, found, names)


def _constructed(reader: Reader, node: tree_sitter.Node, base: TypeSyntax) -> Declarator:
    # ``T y(x);`` was taken for the declaration of a function.
    name, parameters = field(node, "declarator"), field(node, "parameters")
    if name.type != "identifier":
        raise reader.refuse(node, "a pointer to a function")
    values = read_again(reader, text_of(parameters), parameters.start_byte)
    reader.declare(text_of(name), "value")
    value = values[0] if len(values) == 1 else InitList(reader.place(parameters), values)
    return Declarator(reader.place(node), reader.qualify(text_of(name)), base, value)


def _declaration(reader: Reader, node: tree_sitter.Node) -> list[Statement]:
    kind = node.child_by_field_name("type")
    has_body = kind is not None and kind.type.endswith("_specifier") and kind.child_by_field_name("body") is not None
    found = read_statements(reader, [kind] if kind is not None and has_body else [])
    return [*found, Declaration(reader.place(node), tuple(read_declarators(reader, node)))]


def _expression(reader: Reader, node: tree_sitter.Node) -> list[Statement]:
    return [Evaluate(reader.place(node), read_expression(reader, inner)) for inner in named(node)]


def _condition(reader: Reader, node: tree_sitter.Node) -> Condition:
    clause = field(node, "condition")
    place, value = reader.place(clause), clause.child_by_field_name("value")
    first = next(iter(read_statements(reader, named(clause.child_by_field_name("initializer")))), None)
    inner = next(named(clause)) if value is None else value
    if inner.type == "declaration":
        # ``if (T y = f(x))``.
        before = first.declarators if isinstance(first, Declaration) else ()
        first = Declaration(reader.place(inner), (*before, *read_declarators(reader, inner)))
        return Condition(place, first, Name(place, first.declarators[-1].name), _one_line(inner))
    return Condition(place, first, read_expression(reader, inner), _one_line(inner))


def _branch(reader: Reader, node: tree_sitter.Node) -> Statement:
    with reader.scope():
        found = read_statements(reader, [node])
    return found[0] if len(found) == 1 else Block(reader.place(node), tuple(found))


def _if(reader: Reader, node: tree_sitter.Node) -> If:
    with reader.scope():
        condition = _condition(reader, node)
        yes, no = _branch(reader, field(node, "consequence")), node.child_by_field_name("alternative")
        return If(reader.place(node), condition, yes, None if no is None else _branch(reader, next(named(no))))


def _while(reader: Reader, node: tree_sitter.Node) -> While:
    with reader.scope():
        return While(reader.place(node), _condition(reader, node), _branch(reader, field(node, "body")))


def _do(reader: Reader, node: tree_sitter.Node) -> DoWhile:
    body, condition = _branch(reader, field(node, "body")), field(node, "condition")
    return DoWhile(reader.place(node), body, read_expression(reader, condition), _one_line(next(named(condition))))


def _for(reader: Reader, node: tree_sitter.Node) -> For:
    start, condition, step = (node.child_by_field_name(name) for name in ("initializer", "condition", "update"))
    with reader.scope():
        first: Statement | None = None
        if start is not None and start.type in {"declaration", "expression_statement"}:
            first = next(iter(read_statements(reader, [start])), None)
        elif start is not None:
            first = Evaluate(reader.place(start), read_expression(reader, start))
        tested, stepped = read_optional(reader, condition), read_optional(reader, step)
        text = _one_line(condition) if condition is not None else "true"
        return For(reader.place(node), first, tested, stepped, _branch(reader, field(node, "body")), text)


def _range_for(reader: Reader, node: tree_sitter.Node) -> RangeFor:
    array, declarator = read_expression(reader, field(node, "right")), field(node, "declarator")
    with reader.scope():
        kind, is_const = read_type(reader, field(node, "type")), has_word(node, "const")
        variable = _declarator(reader, declarator, kind, None, is_const)
        return RangeFor(reader.place(node), variable, array, _branch(reader, field(node, "body")))


def _switch(reader: Reader, node: tree_sitter.Node) -> Switch:
    with reader.scope():
        condition = _condition(reader, node)
        sections: list[tuple[tuple[Expression | None, ...], tuple[Statement, ...]]] = []
        for child in named(node.child_by_field_name("body")):
            if child.type != "case_statement":
                raise reader.refuse(child, "a statement of a switch outside its cases")
            value = child.child_by_field_name("value")
            labels: tuple[Expression | None, ...] = (read_optional(reader, value),)
            found = read_statements(reader, (item for item in named(child) if item != value))
            if sections and not sections[-1][1]:
                labels = sections.pop()[0] + labels
            sections.append((labels, tuple(found)))
        return Switch(reader.place(node), condition, tuple(sections))


def _one_line(node: tree_sitter.Node) -> str:
    return " ".join(text_of(node).split())


def _using(reader: Reader, node: tree_sitter.Node) -> list[Statement]:
    *outer, name = re.split(r"\s*::\s*", text_of(next(named(node))))
    path = _namespace_of(reader, outer)
    if has_word(node, "namespace"):
        used = reader.find_namespace(name, path)
        reader.used += [] if used is None else [used]
    elif path is not None and (found := reader.find(name, path)) is not None:
        reader.declare(name, found.kind, found.name)
    return []


def _namespace_alias(reader: Reader, node: tree_sitter.Node) -> list[Statement]:
    name, target = named(node)
    path = _namespace_of(reader, re.split(r"\s*::\s*", text_of(target)))
    if path is None:
        raise reader.refuse(target, f"the namespace {text_of(target)!r}")
    reader.namespaces["::".join((*reader.path, text_of(name)))] = path
    return []


def _namespace_of(reader: Reader, names: Iterable[str]) -> Path | None:
    path: Path | None = None
    for name in filter(None, names):
        path = reader.find_namespace(name, path)
        if path is None:
            return None
    return path


# But what declares types, which may hold functions.
STATEMENTS: Mapping[str, Callable[[Reader, tree_sitter.Node], Statement | list[Statement]]] = {
    **dict.fromkeys(IGNORED, lambda _reader, _node: []),
    "using_declaration": _using,
    "namespace_alias_definition": _namespace_alias,
    "compound_statement": read_block,
    "expression_statement": _expression,
    "declaration": _declaration,
    "if_statement": _if,
    "for_statement": _for,
    "for_range_loop": _range_for,
    "while_statement": _while,
    "do_statement": _do,
    "switch_statement": _switch,
    "break_statement": lambda reader, node: Break(reader.place(node)),
    "continue_statement": lambda reader, node: Continue(reader.place(node)),
    "return_statement": lambda reader, node: Return(reader.place(node), read_optional(reader, next(named(node), None))),
    "attributed_statement": lambda reader, node: read_statements(reader, node.named_children[-1:]),
    "labeled_statement": lambda reader, node: read_statements(reader, node.named_children[1:]),
}
