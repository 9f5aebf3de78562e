"""From the parser's tree of a functor text to a ``Program``: functions, constants, statements."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import tree_sitter

from fuser.eager.expressions import ExpressionReader
from fuser.eager.nodes import (
    Expression,
    InitList,
    Literal,
    Name,
    NamedType,
    Statement,
    TypeSyntax,
)
from fuser.eager.preprocess import preprocess
from fuser.eager.statements import (
    Alias,
    Block,
    Break,
    Condition,
    Continue,
    Declaration,
    Declarator,
    DoWhile,
    Evaluate,
    For,
    Function,
    If,
    Parameter,
    Program,
    RangeFor,
    Return,
    Struct,
    Switch,
    TemplateParameter,
    While,
)
from fuser.eager.type_syntax import field, named, text_of
from fuser.functor import Functor, parse_tree

__all__ = ["parse_program"]

_REFUSED = {
    "goto_statement": "goto",
    "throw_statement": "throw",
    "try_statement": "try",
    "co_return_statement": "co_return",
    "union_specifier": "union",
}
_IGNORED = frozenset(
    "comment ; using_declaration static_assert_declaration empty_statement attribute_declaration".split()
)


@lru_cache(maxsize=1024)
def parse_program(functor: Functor) -> Program:
    """Return the syntax of a functor's text.

    Raises:
        FunctorError: the text does not parse.
        UntranslatableError: it holds something that has no translation, such as ``goto``.
    """
    functor.raise_problems()
    expanded = preprocess(functor.source)
    root = parse_tree(expanded.text).root_node
    reader = _Reader(expanded)
    if root.has_error:
        bad = next(_find_errors(root), root)
        raise reader.refuse(bad, f"{text_of(bad).splitlines()[0] if text_of(bad) else 'this'!r}")
    reader.file(root)
    entry = next(item for item in reversed(reader.functions[functor.entry]) if item.template and item.body)
    functions = {name: tuple(items) for name, items in reader.functions.items()}
    return Program(functions, tuple(reader.globals), entry, dict(reader.externals))


class _Reader(ExpressionReader):
    """Reads statements and whatever stands outside functions."""

    functions: dict[str, list[Function]]
    globals: list[Statement]

    def file(self, root: tree_sitter.Node) -> None:
        self.functions, self.globals = {}, []
        self.outside(root)

    def outside(self, parent: tree_sitter.Node) -> None:
        for node in parent.named_children:
            if node.type in {"namespace_definition", "linkage_specification"}:
                name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
                if name is not None:
                    self.namespaces.add(text_of(name))
                if body is not None:
                    self.outside(body)
            elif node.type == "template_declaration":
                self.template(node)
            elif node.type == "function_definition":
                self.add_function(self.function(node, ()))
            elif node.type == "declaration" and (declarator := _function_declarator(node)) is not None:
                # A prototype: its name may be called from here on.
                self.declare(self.function_name(declarator), "function")
            else:
                self.globals += self.statements(node)

    def template(self, node: tree_sitter.Node) -> None:
        inner = node.named_children[-1]
        declarator = _function_declarator(inner)
        if declarator is not None:
            self.declare(self.function_name(declarator), "function")
        with self.scope():
            template = self.template_parameters(node.child_by_field_name("parameters"))
            if inner.type == "function_definition":
                function = self.function(inner, template)
            elif inner.type in {"struct_specifier", "class_specifier"}:
                struct = self.struct(inner, template)
            elif declarator is None:
                alias = inner.type.replace("_", " ")
                raise self.refuse(node, f"a template of a {alias}")
        if inner.type == "function_definition":
            self.add_function(function)
        elif declarator is None:
            self.declare(struct.name, "type")
            self.globals.append(struct)

    def add_function(self, function: Function) -> None:
        self.declare(function.name, "function")
        self.functions.setdefault(function.name, []).append(function)

    def template_parameters(self, node: tree_sitter.Node | None) -> tuple[TemplateParameter, ...]:
        found = []
        for child in named(node):
            place = self.place(child)
            value = child.child_by_field_name("default_value") or child.child_by_field_name("default_type")
            default = None
            if child.type in {"type_parameter_declaration", "optional_type_parameter_declaration"}:
                inner = child.child_by_field_name("name") or next(iter(named(child)), None)
                name = text_of(inner) if inner is not None and (value is None or inner.id != value.id) else ""
                default = self.type(value) if value is not None else None
                self.declare(name, "type")
                found.append(TemplateParameter(place, name, True, default))
            elif child.type in {"parameter_declaration", "optional_parameter_declaration"}:
                kind = field(child, "type")
                name, spelled = self.declarator(child.child_by_field_name("declarator"), self.type(kind))
                self.declare(name, "value")
                found.append(TemplateParameter(place, name, False, self.expression(value) if value else None, spelled))
            else:
                raise self.refuse(child, f"the template parameter {text_of(child)!r}")
        return tuple(found)

    def function_name(self, declarator: tree_sitter.Node) -> str:
        name = field(declarator, "declarator")
        if name.type not in {"identifier", "field_identifier", "operator_name"}:
            raise self.refuse(name, f"the function name {text_of(name)!r}")
        return text_of(name)

    def function(self, node: tree_sitter.Node, template: tuple[TemplateParameter, ...]) -> Function:
        declarator = _function_declarator(node)
        kind, body = node.child_by_field_name("type"), node.child_by_field_name("body")
        if declarator is None or body is None or body.type != "compound_statement":
            raise self.refuse(node, "this function")
        name = self.function_name(declarator)
        self.declare(name, "function")
        with self.scope():
            trailing = next((item for item in declarator.named_children if item.type == "trailing_return_type"), None)
            parameters = self.parameters(declarator.child_by_field_name("parameters"))
            if trailing is not None:
                result = self.type(trailing.named_children[0])
            else:
                result = self.type(kind) if kind is not None else NamedType(self.place(node), "void")
            outer = node.child_by_field_name("declarator")
            if outer is not None and outer.type == "pointer_declarator":
                raise self.refuse(outer, "a function that returns a pointer")
            return Function(self.place(node), name, template, parameters, result, self.block(body))

    def parameters(self, node: tree_sitter.Node | None) -> tuple[Parameter, ...]:
        found = []
        for child in named(node):
            if child.type not in {"parameter_declaration", "optional_parameter_declaration"}:
                raise self.refuse(child, "a parameter pack" if "variadic" in child.type else "this parameter")
            kind, value = field(child, "type"), child.child_by_field_name("default_value")
            is_const = any(text_of(item) == "const" for item in child.children)
            name, spelled = self.declarator(child.child_by_field_name("declarator"), self.type(kind), is_const=is_const)
            if isinstance(spelled, NamedType) and spelled.name == "void":
                continue
            default = self.expression(value) if value is not None else None
            self.declare(name, "value")
            found.append(Parameter(self.place(child), name, spelled, default))
        return tuple(found)

    def struct(self, node: tree_sitter.Node, template: tuple[TemplateParameter, ...]) -> Struct:
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name is None or body is None or any(child.type == "base_class_clause" for child in node.children):
            raise self.refuse(node, "a class without a name or with bases")
        self.declare(text_of(name), "type")
        fields: list[Declarator] = []
        functions: list[Function] = []
        members: list[tree_sitter.Node] = []
        with self.scope():
            for child in named(body):
                if child.type == "field_declaration" and _function_declarator(child) is None:
                    fields += self.declarators(child)
                elif child.type == "function_definition":
                    declarator = _function_declarator(child)
                    if declarator is not None:
                        self.declare(self.function_name(declarator), "function")
                    members.append(child)
                elif child.type not in {"access_specifier", *_IGNORED}:
                    raise self.refuse(child, f"the member {text_of(child).splitlines()[0]!r}")
            functions += [self.function(child, ()) for child in members]
        if any(function.name == text_of(name) for function in functions):
            raise self.refuse(node, "a class with a constructor")
        return Struct(self.place(node), text_of(name), template, tuple(fields), tuple(functions))

    # Statements

    def block(self, node: tree_sitter.Node) -> Block:
        with self.scope():
            return Block(self.place(node), tuple(item for child in named(node) for item in self.statements(child)))

    def statements(self, node: tree_sitter.Node) -> list[Statement]:
        """Read a statement; one that means nothing here gives none."""
        place = self.place(node)
        if node.type in _IGNORED:
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
                return self.declaration(node)
            case "if_statement":
                return [self.if_statement(node)]
            case "for_statement":
                return [self.for_statement(node)]
            case "for_range_loop":
                return [self.range_for(node)]
            case "while_statement":
                with self.scope():
                    return [While(place, self.condition(node), self.body(node))]
            case "do_statement":
                condition = field(node, "condition")
                return [DoWhile(place, self.body(node), self.expression(condition), _one_line(next(named(condition))))]
            case "switch_statement":
                return [self.switch(node)]
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

    def body(self, node: tree_sitter.Node, name: str = "body") -> Statement:
        child = field(node, name)
        with self.scope():
            found = self.statements(child)
        return found[0] if len(found) == 1 else Block(self.place(child), tuple(found))

    def declaration(self, node: tree_sitter.Node) -> list[Statement]:
        kind = node.child_by_field_name("type")
        found: list[Statement] = []
        if kind is not None and kind.type.endswith("_specifier") and kind.child_by_field_name("body") is not None:
            found += self.statements(kind)
        return [*found, Declaration(self.place(node), tuple(self.declarators(node)))]

    def declarators(self, node: tree_sitter.Node) -> list[Declarator]:
        kind = field(node, "type")
        base = self.type(kind.child_by_field_name("name") or kind if kind.type.endswith("specifier") else kind)
        is_const = any(text_of(child) in {"const", "constexpr"} for child in node.children)
        found = []
        for place_in_list, child in enumerate(node.children):
            if node.field_name_for_child(place_in_list) != "declarator":
                continue
            following = node.children[place_in_list + 2 :]
            value = (
                following[0]
                if following and node.field_name_for_child(place_in_list + 2) in {"default_value", "value"}
                else None
            )
            found.append(self.init(child, base, value, is_const=is_const))
        return found

    def init(
        self, node: tree_sitter.Node, base: TypeSyntax, value: tree_sitter.Node | None, *, is_const: bool
    ) -> Declarator:
        place, target = self.place(node), node
        if node.type == "init_declarator":
            inner, value = field(node, "declarator"), node.child_by_field_name("value")
            target = inner
        if target.type == "structured_binding_declarator":
            names = tuple(text_of(child) for child in named(target))
            found = self.expression(value) if value is not None else None
            for name in names:
                self.declare(name, "value")
            return Declarator(place, "", base, found, names)
        if target.type == "function_declarator":
            return self.constructed(target, base)
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

    def constructed(self, node: tree_sitter.Node, base: TypeSyntax) -> Declarator:
        # ``T y(x);`` was taken for the declaration of a function.
        name, parameters = field(node, "declarator"), field(node, "parameters")
        if name.type != "identifier":
            raise self.refuse(node, "a pointer to a function")
        values = self.read_again(text_of(parameters), parameters.start_byte)
        self.declare(text_of(name), "value")
        value = values[0] if len(values) == 1 else InitList(self.place(parameters), values)
        return Declarator(self.place(node), text_of(name), base, value)

    def condition(self, node: tree_sitter.Node) -> Condition:
        clause = field(node, "condition")
        place = self.place(clause)
        start, value = clause.child_by_field_name("initializer"), clause.child_by_field_name("value")
        declared = self.statements(next(named(start)))[0] if start is not None else None
        if value is None:
            inner = next(named(clause))
            return Condition(place, declared, self.expression(inner), _one_line(inner))
        if value.type == "declaration":
            made = self.init_condition(value)
            return Condition(place, made, Name(place, made.declarators[0].name), _one_line(value))
        return Condition(place, declared, self.expression(value), _one_line(value))

    def init_condition(self, node: tree_sitter.Node) -> Declaration:
        # ``if (T y = f(x))``.
        kind, value = field(node, "type"), node.child_by_field_name("value")
        declarator = field(node, "declarator")
        return Declaration(self.place(node), (self.init(declarator, self.type(kind), value, is_const=False),))

    def if_statement(self, node: tree_sitter.Node) -> If:
        with self.scope():
            condition = self.condition(node)
            yes = self.body(node, "consequence")
            alternative = node.child_by_field_name("alternative")
            no = None
            if alternative is not None:
                inner = next(named(alternative))
                with self.scope():
                    found = self.statements(inner)
                no = found[0] if len(found) == 1 else Block(self.place(inner), tuple(found))
            return If(self.place(node), condition, yes, no)

    def for_statement(self, node: tree_sitter.Node) -> For:
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
                self.body(node),
                _one_line(condition) if condition is not None else "true",
            )

    def range_for(self, node: tree_sitter.Node) -> RangeFor:
        kind, declarator = field(node, "type"), field(node, "declarator")
        array = field(node, "right")
        found = self.expression(array)
        with self.scope():
            name, spelled = self.declarator(declarator, self.type(kind))
            self.declare(name, "value")
            variable = Declarator(self.place(declarator), name, spelled, None)
            return RangeFor(self.place(node), variable, found, self.body(node))

    def switch(self, node: tree_sitter.Node) -> Switch:
        with self.scope():
            condition = self.condition(node)
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

    def alias(self, node: tree_sitter.Node) -> list[Statement]:
        kind = field(node, "type")
        found: list[Statement] = []
        if node.type == "alias_declaration":
            name = field(node, "name")
            found.append(Alias(self.place(node), text_of(name), self.type(kind)))
            self.declare(text_of(name), "type")
            return found
        if kind.type == "struct_specifier" and kind.child_by_field_name("body") is not None:
            raise self.refuse(kind, "typedef struct")
        for declarator in node.children_by_field_name("declarator"):
            name_text, spelled = self.declarator(declarator, self.type(kind))
            found.append(Alias(self.place(node), name_text, spelled))
            self.declare(name_text, "type")
        return found

    def enum(self, node: tree_sitter.Node) -> list[Statement]:
        place, name = self.place(node), node.child_by_field_name("name")
        found: list[Statement] = []
        if name is not None:
            found.append(Alias(place, text_of(name), NamedType(place, "int")))
            self.declare(text_of(name), "type")
        next_value = 0
        for child in named(node.child_by_field_name("body")):
            label, value = field(child, "name"), child.child_by_field_name("value")
            if value is not None and value.type != "number_literal":
                raise self.refuse(value, "an enumerator that is no plain number")
            next_value = int(text_of(value), 0) if value is not None else next_value
            literal = Literal(self.place(child), str(next_value))
            kind = NamedType(place, "int")
            found.append(Declaration(place, (Declarator(self.place(child), text_of(label), kind, literal),)))
            self.declare(text_of(label), "value")
            next_value += 1
        return found


def _one_line(node: tree_sitter.Node) -> str:
    return " ".join(text_of(node).split())


def _function_declarator(node: tree_sitter.Node) -> tree_sitter.Node | None:
    # The declarator of a function, under references and pointers that belong to its result.
    inner = node.child_by_field_name("declarator")
    while inner is not None and inner.type in {"reference_declarator", "pointer_declarator"}:
        inner = inner.child_by_field_name("declarator") or next(iter(inner.named_children), None)
    return inner if inner is not None and inner.type == "function_declarator" else None


def _find_errors(node: tree_sitter.Node) -> Iterator[tree_sitter.Node]:
    if node.type == "ERROR" or node.is_missing:
        yield node
    for child in node.children:
        if child.has_error:
            yield from _find_errors(child)
