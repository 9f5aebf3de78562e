"""From the parser's tree of a functor text to a ``Program``: functions, constants, types."""

from __future__ import annotations

from functools import lru_cache

import tree_sitter

from fuser.cxx.functor import Functor, read_text
from fuser.cxx.nodes import Assign, InitList, Literal, Name, NamedType, Statement
from fuser.cxx.statement_syntax import IGNORED, StatementReader
from fuser.cxx.statements import (
    Alias,
    Block,
    Declaration,
    Declarator,
    Evaluate,
    FunctionDefinition,
    Parameter,
    Program,
    Struct,
    TemplateParameter,
)
from fuser.cxx.tree import field, function_declarator, named, text_of
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
    reader = _Reader(reading.expanded)
    try:
        reader.file(reading.tree.root_node)
    except RecursionError:
        raise UntranslatableError(functor.source, 1, 1, "a text nested this deeply") from None
    entry = next(item for item in reversed(reader.functions[functor.entry]) if item.template and item.body)
    functions = {name: tuple(items) for name, items in reader.functions.items()}
    return Program(functions, tuple(reader.globals), entry, dict(reader.externals))


class _Reader(StatementReader):
    """Reads statements and whatever stands outside functions."""

    functions: dict[str, list[FunctionDefinition]]
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
            elif node.type == "declaration" and (declarator := function_declarator(node)) is not None:
                # A prototype: its name may be called from here on.
                self.declare(self.function_name(declarator), "function")
            else:
                self.globals += self.statements(node)

    def template(self, node: tree_sitter.Node) -> None:
        inner = node.named_children[-1]
        declarator = function_declarator(inner)
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

    def add_function(self, function: FunctionDefinition) -> None:
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
                found.append(TemplateParameter(place, name, default))
            elif child.type in {"parameter_declaration", "optional_parameter_declaration"}:
                kind = field(child, "type")
                name, spelled = self.declarator(child.child_by_field_name("declarator"), self.type(kind))
                self.declare(name, "value")
                found.append(TemplateParameter(place, name, self.expression(value) if value else None, spelled))
            else:
                raise self.refuse(child, f"the template parameter {text_of(child)!r}")
        return tuple(found)

    def function_name(self, declarator: tree_sitter.Node) -> str:
        name = field(declarator, "declarator")
        if name.type not in {"identifier", "field_identifier", "operator_name"}:
            raise self.refuse(name, f"the function name {text_of(name)!r}")
        return text_of(name)

    def function(self, node: tree_sitter.Node, template: tuple[TemplateParameter, ...]) -> FunctionDefinition:
        declarator = function_declarator(node)
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
            block = self.block(body)
            starts = self._initialisers(node)
            if starts:
                block = Block(block.place, (*starts, *block.statements))
            return FunctionDefinition(self.place(node), name, template, parameters, result, block)

    def _initialisers(self, node: tree_sitter.Node) -> list[Statement]:
        # What a constructor has between its parameters and its body, as assignments.
        found: list[Statement] = []
        for child in node.named_children:
            for item in named(child) if child.type == "field_initializer_list" else ():
                name, values = list(named(item))
                place = self.place(item)
                value = InitList(place, self.expressions(values))
                found.append(Evaluate(place, Assign(place, "", Name(place, text_of(name)), value)))
        return found

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
        functions: list[FunctionDefinition] = []
        members: list[tree_sitter.Node] = []
        with self.scope():
            for child in named(body):
                if any(part.type == "bitfield_clause" for part in child.children):
                    raise self.refuse(child, "a bit field")
                if child.type == "field_declaration" and function_declarator(child) is None:
                    fields += self.declarators(child)
                elif child.type == "function_definition":
                    declarator = function_declarator(child)
                    if declarator is not None:
                        self.declare(self.function_name(declarator), "function")
                    members.append(child)
                elif child.type not in {"access_specifier", *IGNORED}:
                    raise self.refuse(child, f"the member {text_of(child).splitlines()[0]!r}")
            functions += [self.function(child, ()) for child in members]
        return Struct(self.place(node), text_of(name), template, tuple(fields), tuple(functions))

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
        is_scoped = any(child.type in {"class", "struct"} for child in node.children)
        values: list[tuple[tree_sitter.Node, int]] = []
        for child in named(node.child_by_field_name("body")):
            value = child.child_by_field_name("value")
            if value is not None and value.type != "number_literal":
                raise self.refuse(value, "an enumerator that is no plain number")
            before = values[-1][1] if values else -1
            values.append((child, _integer(text_of(value)) if value is not None else before + 1))
        base = node.child_by_field_name("base")
        largest = max((value for _, value in values), default=0)
        promoted = NamedType(place, next(name for name, bound in _ENUM_TYPES if largest < bound))
        kind = promoted if base is None else self.type(base)
        found: list[Statement] = []
        if name is not None:
            found.append(Alias(place, text_of(name), kind))
            self.declare(text_of(name), "type")
        for child, number in values:
            label = field(child, "name")
            literal = Literal(self.place(child), f"{number}u" if number >= 1 << 63 else str(number))
            names = [] if name is None else [f"{text_of(name)}::{text_of(label)}"]
            if not is_scoped:
                names.append(text_of(label))
                self.declare(text_of(label), "value")
            found += [Declaration(place, (Declarator(self.place(child), item, kind, literal),)) for item in names]
        return found


# What the values of an enumeration without a type of its own are promoted to.
_ENUM_TYPES = (("int32_t", 1 << 31), ("uint32_t", 1 << 32), ("int64_t", 1 << 63), ("uint64_t", 1 << 64))


def _integer(text: str) -> int:
    digits = text.replace("'", "").lower().rstrip("ulz")
    return int(digits, 8 if digits[0] == "0" and digits.isdigit() else 0)
