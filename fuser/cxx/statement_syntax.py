"""From the parser's tree to statements."""

from __future__ import annotations

from abc import abstractmethod

import tree_sitter

from fuser.cxx.expressions import ExpressionReader
from fuser.cxx.nodes import Expression, InitList, Name, ReferenceType, Statement, TypeSyntax
from fuser.cxx.statements import (
    Block,
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
    Struct,
    Switch,
    TemplateParameter,
    While,
)
from fuser.cxx.tree import field, named, text_of

__all__ = ["IGNORED", "StatementReader"]

_REFUSED = {
    "goto_statement": "goto",
    "throw_statement": "throw",
    "try_statement": "try",
    "co_return_statement": "co_return",
    "union_specifier": "union",
}
IGNORED = frozenset(
    "comment ; using_declaration static_assert_declaration empty_statement attribute_declaration".split()
)


class StatementReader(ExpressionReader):
    """Makes statements."""

    @abstractmethod
    def alias(self, node: tree_sitter.Node) -> list[Statement]:
        """Read ``using`` or ``typedef``."""

    @abstractmethod
    def struct(self, node: tree_sitter.Node, template: tuple[TemplateParameter, ...]) -> Struct:
        """Read a class."""

    @abstractmethod
    def enum(self, node: tree_sitter.Node) -> list[Statement]:
        """Read an enumeration."""

    def block(self, node: tree_sitter.Node) -> Block:
        """Read a compound statement, a scope of its own."""
        with self.scope():
            return Block(self.place(node), tuple(item for child in named(node) for item in self.statements(child)))

    def statements(self, node: tree_sitter.Node) -> list[Statement]:
        """Read a statement; one that means nothing here gives none."""
        place = self.place(node)
        if node.type in IGNORED:
            return []
        if node.type in _REFUSED:
            raise self.refuse(node, _REFUSED[node.type])
        match node.type:
            case "compound_statement":
                return [self.block(node)]
            case "expression_statement":
                inner = list(named(node))
                return [Evaluate(place, self.expression(inner[0]))] if inner else []
            case "declaration":
                return self._declaration(node)
            case "if_statement":
                return [self._if_statement(node)]
            case "for_statement":
                return [self._for_statement(node)]
            case "for_range_loop":
                return [self._range_for(node)]
            case "while_statement":
                with self.scope():
                    return [While(place, self._condition(node), self._body(node))]
            case "do_statement":
                condition = field(node, "condition")
                return [DoWhile(place, self._body(node), self.expression(condition), _one_line(next(named(condition))))]
            case "switch_statement":
                return [self._switch(node)]
            case "break_statement":
                return [Break(place)]
            case "continue_statement":
                return [Continue(place)]
            case "return_statement":
                inner = list(named(node))
                return [Return(place, self.expression(inner[0]) if inner else None)]
            case "alias_declaration" | "type_definition":
                return self.alias(node)
            case "struct_specifier" | "class_specifier":
                return [self.struct(node, ())]
            case "enum_specifier":
                return self.enum(node)
            case "labeled_statement":
                return [item for child in node.named_children[1:] for item in self.statements(child)]
        raise self.refuse(node, node.type.removesuffix("_statement").replace("_", " "))

    def _body(self, node: tree_sitter.Node, name: str = "body") -> Statement:
        child = field(node, name)
        with self.scope():
            found = self.statements(child)
        return found[0] if len(found) == 1 else Block(self.place(child), tuple(found))

    def _declaration(self, node: tree_sitter.Node) -> list[Statement]:
        kind = node.child_by_field_name("type")
        found: list[Statement] = []
        if kind is not None and kind.type.endswith("_specifier") and kind.child_by_field_name("body") is not None:
            found += self.statements(kind)
        return [*found, Declaration(self.place(node), tuple(self.declarators(node)))]

    def declarators(self, node: tree_sitter.Node) -> list[Declarator]:
        """Read the variables of a declaration."""
        kind = field(node, "type")
        base = self.type(kind.child_by_field_name("name") or kind if kind.type.endswith("specifier") else kind)
        is_const = any(text_of(child) in {"const", "constexpr"} for child in node.children)
        found = []
        for index, child in enumerate(node.children):
            if node.field_name_for_child(index) != "declarator":
                continue
            following = node.children[index + 2 :]
            value = (
                following[0]
                if following and node.field_name_for_child(index + 2) in {"default_value", "value"}
                else None
            )
            found.append(self._init(child, base, value, is_const=is_const))
        return found

    def _init(
        self, node: tree_sitter.Node, base: TypeSyntax, value: tree_sitter.Node | None, *, is_const: bool
    ) -> Declarator:
        place, target = self.place(node), node
        if node.type == "init_declarator":
            target, value = field(node, "declarator"), node.child_by_field_name("value")
        inner = target.named_children[-1] if target.type == "reference_declarator" else None
        if inner is not None and inner.type == "structured_binding_declarator":
            target, base = inner, ReferenceType(place, base, is_const)
        if target.type == "structured_binding_declarator":
            names = tuple(text_of(child) for child in named(target))
            found = self.expression(value) if value is not None else None
            for name in names:
                self.declare(name, "value")
            return Declarator(place, "", base, found, names)
        if target.type == "function_declarator":
            return self._constructed(target, base)
        name, spelled = self.declarator(target, base, is_const=is_const)
        is_lambda = value is not None and value.type == "lambda_expression"
        if is_lambda:
            # Only a lambda may name itself in its own text, and those are functions.
            self.declare(name, "function")
        found = self.expression(value) if value is not None else None
        if value is not None and value.type == "argument_list" and isinstance(found, InitList):
            # T x(1): one value is the value itself.
            found = found.values[0] if len(found.values) == 1 else found
        self.declare(name, "value")
        return Declarator(place, name, spelled, found)

    def _constructed(self, node: tree_sitter.Node, base: TypeSyntax) -> Declarator:
        # ``T y(x);`` was taken for the declaration of a function.
        name, parameters = field(node, "declarator"), field(node, "parameters")
        if name.type != "identifier":
            raise self.refuse(node, "a pointer to a function")
        values = self.read_again(text_of(parameters), parameters.start_byte)
        self.declare(text_of(name), "value")
        value = values[0] if len(values) == 1 else InitList(self.place(parameters), values)
        return Declarator(self.place(node), text_of(name), base, value)

    def _condition(self, node: tree_sitter.Node) -> Condition:
        clause = field(node, "condition")
        place = self.place(clause)
        start, value = clause.child_by_field_name("initializer"), clause.child_by_field_name("value")
        declared = self.statements(next(named(start)))[0] if start is not None else None
        if value is None:
            inner = next(named(clause))
            return Condition(place, declared, self.expression(inner), _one_line(inner))
        if value.type == "declaration":
            made = self._init_condition(value)
            return Condition(place, made, Name(place, made.declarators[0].name), _one_line(value))
        return Condition(place, declared, self.expression(value), _one_line(value))

    def _init_condition(self, node: tree_sitter.Node) -> Declaration:
        # ``if (T y = f(x))``.
        kind, value = field(node, "type"), node.child_by_field_name("value")
        declarator = field(node, "declarator")
        return Declaration(self.place(node), (self._init(declarator, self.type(kind), value, is_const=False),))

    def _if_statement(self, node: tree_sitter.Node) -> If:
        with self.scope():
            condition = self._condition(node)
            yes = self._body(node, "consequence")
            alternative = node.child_by_field_name("alternative")
            no = None
            if alternative is not None:
                inner = next(named(alternative))
                with self.scope():
                    found = self.statements(inner)
                no = found[0] if len(found) == 1 else Block(self.place(inner), tuple(found))
            return If(self.place(node), condition, yes, no)

    def _for_statement(self, node: tree_sitter.Node) -> For:
        start, condition, step = (node.child_by_field_name(name) for name in ("initializer", "condition", "update"))
        with self.scope():
            first: Statement | None = None
            if start is not None and start.type in {"declaration", "expression_statement"}:
                found = self.statements(start)
                first = found[0] if found else None
            elif start is not None:
                first = Evaluate(self.place(start), self.expression(start))
            return For(
                self.place(node),
                first,
                self.expression(condition) if condition is not None else None,
                self.expression(step) if step is not None else None,
                self._body(node),
                _one_line(condition) if condition is not None else "true",
            )

    def _range_for(self, node: tree_sitter.Node) -> RangeFor:
        kind, declarator = field(node, "type"), field(node, "declarator")
        array = field(node, "right")
        found = self.expression(array)
        with self.scope():
            name, spelled = self.declarator(declarator, self.type(kind))
            self.declare(name, "value")
            variable = Declarator(self.place(declarator), name, spelled, None)
            return RangeFor(self.place(node), variable, found, self._body(node))

    def _switch(self, node: tree_sitter.Node) -> Switch:
        with self.scope():
            condition = self._condition(node)
            body = node.child_by_field_name("body")
            sections: list[tuple[tuple[Expression | None, ...], tuple[Statement, ...]]] = []
            for child in named(body):
                if child.type != "case_statement":
                    raise self.refuse(child, "a statement of a switch outside its cases")
                value = child.child_by_field_name("value")
                label = self.expression(value) if value is not None else None
                inside = [item for item in named(child) if value is None or item.id != value.id]
                found = tuple(item for statement in inside for item in self.statements(statement))
                if sections and not sections[-1][1]:
                    sections[-1] = ((*sections[-1][0], label), found)
                else:
                    sections.append(((label,), found))
            return Switch(self.place(node), condition, tuple(sections))


def _one_line(node: tree_sitter.Node) -> str:
    return " ".join(text_of(node).split())
