"""From the parser's tree to expressions and types.

The parser knows no names, so ``(T)-x``, ``f<T>(x)`` and ``a < b && c > (d)`` come as whatever it took them for. Here it
is known which names are types: operators are taken apart again where that makes a difference, and put together anew.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import tree_sitter

from fuser.eager.nodes import (
    ArrayType,
    Assign,
    Binary,
    Block,
    Call,
    Capture,
    Cast,
    Conditional,
    Decltype,
    Expression,
    Function,
    Index,
    InitList,
    Lambda,
    Literal,
    Member,
    Name,
    NamedType,
    Parameter,
    Place,
    PointerType,
    ReferenceType,
    SizeOf,
    Step,
    TypeSyntax,
    Unary,
)
from fuser.eager.preprocess import Expanded
from fuser.errors import UntranslatableError
from fuser.functor import parse_tree

__all__ = ["ExpressionReader", "named", "text_of"]

# How tightly binary operators bind, loosest first.
_PRECEDENCE = {
    operator: level
    for level, operators in enumerate(
        (",", "||", "&&", "|", "^", "&", "== !=", "< > <= >=", "<< >>", "+ -", "* / %"),
    )
    for operator in operators.split()
}
_SPELLED = {"and": "&&", "or": "||", "not": "!", "compl": "~", "bitand": "&", "bitor": "|", "xor": "^", "not_eq": "!="}
_CASTS = frozenset({"static_cast", "reinterpret_cast", "const_cast", "dynamic_cast"})
# Type names that are no keywords. A functor's own names come first.
_TYPES = frozenset(
    "int8_t int16_t int32_t int64_t uint8_t uint16_t uint32_t uint64_t size_t ptrdiff_t complex nullptr_t".split()
)
_TYPE_NODES = frozenset(
    "type_identifier primitive_type sized_type_specifier template_type placeholder_type_specifier dependent_type "
    "decltype type_descriptor struct_specifier class_specifier".split()
)
_LITERALS = frozenset("number_literal true false null nullptr char_literal string_literal concatenated_string".split())


def text_of(node: tree_sitter.Node) -> str:
    """Return the text of a node."""
    return (node.text or b"").decode()


@dataclass(frozen=True, slots=True)
class _Item:
    """One piece of an expression that was taken apart: an operand, an operator, or a type in parentheses."""

    place: Place
    operator: str = ""
    operand: Expression | None = None
    type: TypeSyntax | None = None


class ExpressionReader:
    """Makes expressions and types; keeps the names that are in scope."""

    def __init__(self, expanded: Expanded) -> None:
        self.expanded = expanded
        # Innermost last; what each name stands for: "type", "function" or "value".
        self.scopes: list[dict[str, str]] = [dict.fromkeys(_TYPES, "type")]
        # Functions that are called and declared nowhere.
        self.externals: dict[str, Place] = {}
        # Bytes before a text that is read again by itself.
        self.shift = 0

    @abstractmethod
    def block(self, node: tree_sitter.Node) -> Block:
        """Read a compound statement."""

    @abstractmethod
    def parameters(self, node: tree_sitter.Node | None) -> tuple[Parameter, ...]:
        """Read a parameter list and declare its names."""

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
                return self.type_descriptor(node)
            case "primitive_type" | "sized_type_specifier":
                return NamedType(place, " ".join(text_of(node).split()))
            case "type_identifier" | "identifier" | "namespace_identifier":
                return NamedType(place, text_of(node))
            case "placeholder_type_specifier":
                return NamedType(place, "auto")
            case "template_type" | "template_function":
                name = node.child_by_field_name("name")
                assert name is not None, "the grammar's field"
                return NamedType(place, text_of(name), self.template_arguments(node))
            case "dependent_type" | "struct_specifier" | "class_specifier" if node.named_children:
                return self.type(node.named_children[-1])
            case "qualified_identifier":
                return self.qualified_type(node)
            case "decltype":
                return Decltype(place, self.expression(node.named_children[0]))
        raise self.refuse(node, f"the type {text_of(node)!r}")

    def type_descriptor(self, node: tree_sitter.Node) -> TypeSyntax:
        kind = node.child_by_field_name("type")
        assert kind is not None, "the grammar's field"
        is_const = any(text_of(child) == "const" for child in node.children)
        _, found = self.declarator(node.child_by_field_name("declarator"), self.type(kind), is_const=is_const)
        return found

    def qualified_type(self, node: tree_sitter.Node) -> NamedType:
        # std::complex<T>, std::enable_if<c, T>::type, T::value_type.
        name = node.child_by_field_name("name")
        scope = node.child_by_field_name("scope")
        assert name is not None, "the grammar's field"
        if scope is None or (text_of(scope) == "std"):
            found = self.type(name)
            assert isinstance(found, NamedType), "std:: comes before names"
            return found
        outer = self.type(scope)
        assert isinstance(outer, NamedType), "a name comes before ::"
        return NamedType(outer.place, outer.name, outer.arguments, text_of(name))

    def template_arguments(self, node: tree_sitter.Node) -> tuple[TypeSyntax | Expression, ...]:
        arguments = node.child_by_field_name("arguments")
        found: list[TypeSyntax | Expression] = []
        for child in named(arguments):
            found.append(self.type(child) if self.names_type(child) else self.expression(child))
        return tuple(found)

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
                return name is not None and (
                    self.kind(text_of(name)) == "type" or text_of(name).endswith("_t") or node.type == "template_type"
                )
            case "qualified_identifier":
                return self.qualified_names_type(node)
        return node.type in _TYPE_NODES

    def qualified_names_type(self, node: tree_sitter.Node) -> bool:
        name, scope = node.child_by_field_name("name"), node.child_by_field_name("scope")
        if name is None:
            return False
        if scope is not None and text_of(scope) != "std":
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

    # Expressions

    def expression(self, node: tree_sitter.Node) -> Expression:
        """Read an expression."""
        items = list(self.take_apart(node))
        if len(items) == 1 and items[0].operand is not None:
            return items[0].operand
        return _Builder(items, self.refuse(node, f"the expression {text_of(node)!r}")).build()

    def expressions(self, node: tree_sitter.Node | None) -> tuple[Expression, ...]:
        """Read a list of arguments; a template that was none may hide a comma."""
        found: list[Expression] = []
        for child in named(node):
            items = [item for item in self.take_apart(child)]
            while any(item.operator == "," for item in items) and child.type != "comma_expression":
                cut = next(index for index, item in enumerate(items) if item.operator == ",")
                found.append(_Builder(items[:cut], self.refuse(child, "this expression")).build())
                items = items[cut + 1 :]
            found.append(_Builder(items, self.refuse(child, f"the expression {text_of(child)!r}")).build())
        return tuple(found)

    def read_again(self, text: str, start: int) -> tuple[Expression, ...]:
        """Read a text in parentheses as arguments, when the parser took it for something else."""
        before = "int f() { return g"
        tree = parse_tree(f"{before}{text}; }}")
        shift, self.shift = self.shift, self.shift + start - len(before)
        call = next(_find(tree.root_node, "call_expression"), None)
        if call is None or tree.root_node.has_error:
            raise UntranslatableError(self.expanded.source, *self.expanded.place(start), f"the declarator {text!r}")
        found = self.expressions(call.child_by_field_name("arguments"))
        self.shift = shift
        return found

    def take_apart(self, node: tree_sitter.Node) -> Iterator[_Item]:
        place = self.place(node)
        match node.type:
            case "binary_expression" | "comma_expression":
                left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
                assert left is not None and right is not None, "the grammar's fields"
                yield from self.take_apart(left)
                operator = node.child_by_field_name("operator") or node.children[1]
                yield _Item(self.place(operator), _spell(text_of(operator)))
                yield from self.take_apart(right)
            case "unary_expression" | "pointer_expression":
                argument = node.child_by_field_name("argument")
                assert argument is not None, "the grammar's field"
                yield _Item(place, _spell(text_of(node.children[0])))
                yield from self.take_apart(argument)
            case "cast_expression":
                yield from self.take_cast_apart(node)
            case "parenthesized_expression" if node.named_children and self.names_type(_inner(node)):
                yield _Item(place, type=self.type(_inner(node)))
            case "call_expression":
                yield from self.take_call_apart(node)
            case "number_literal" if text_of(node)[0] in "+-":
                yield _Item(place, text_of(node)[0])
                yield _Item(place, operand=Literal(place, text_of(node)[1:]))
            case _:
                yield _Item(place, operand=self.primary(node))

    def take_cast_apart(self, node: tree_sitter.Node) -> Iterator[_Item]:
        kind, value = node.child_by_field_name("type"), node.child_by_field_name("value")
        assert kind is not None and value is not None, "the grammar's fields"
        if self.names_type(kind):
            yield _Item(self.place(node), type=self.type(kind))
            yield from self.take_apart(value)
        elif value.type == "parenthesized_expression":
            arguments = (self.expression(_inner(value)),)
            yield _Item(self.place(node), operand=Call(self.place(node), self.name_in(kind), arguments))
        else:
            # (a) - b, taken for a cast of -b.
            yield _Item(self.place(node), operand=self.name_in(kind))
            yield from self.take_apart(value)

    def take_call_apart(self, node: tree_sitter.Node) -> Iterator[_Item]:
        function, arguments = node.child_by_field_name("function"), node.child_by_field_name("arguments")
        assert function is not None and arguments is not None, "the grammar's fields"
        place = self.place(node)
        name = function.child_by_field_name("name") if function.type == "template_function" else None
        if function.type == "parenthesized_expression" and self.names_type(_inner(function)):
            yield _Item(place, type=self.type(_inner(function)))
            yield _Item(self.place(arguments), operand=_join(self.expressions(arguments), self.refuse(node, "()")))
        elif name is not None and self.kind(text_of(name)) == "value":
            # a < b && c > (d), taken for a call of the template a<b && c>.
            yield _Item(place, operand=Name(place, text_of(name)))
            for index, child in enumerate(named(function.child_by_field_name("arguments"))):
                yield _Item(self.place(child), "<" if index == 0 else ",")
                if child.type == "type_descriptor":
                    yield _Item(self.place(child), operand=self.name_in(child))
                else:
                    yield from self.take_apart(child)
            yield _Item(self.place(arguments), ">")
            yield _Item(self.place(arguments), operand=_join(self.expressions(arguments), self.refuse(node, "()")))
        else:
            yield _Item(place, operand=self.call(node, function, arguments))

    def name_in(self, node: tree_sitter.Node) -> Name:
        # A name that was taken for a type.
        return Name(self.place(node), text_of(node).strip())

    def call(self, node: tree_sitter.Node, function: tree_sitter.Node, arguments: tree_sitter.Node) -> Expression:
        place = self.place(node)
        if function.type == "template_function":
            name = function.child_by_field_name("name")
            if name is not None and text_of(name) in _CASTS:
                (kind,) = self.template_arguments(function)
                assert isinstance(kind, TypeSyntax), "a cast names a type"
                return Cast(place, kind, self.expressions(arguments))
        if self.names_type(function):
            return Cast(place, self.type(function), self.expressions(arguments))
        callee = self.expression(function)
        if isinstance(callee, Name) and not callee.member and self.kind(callee.name) not in {"function", "value"}:
            self.externals.setdefault(callee.name, callee.place)
        return Call(place, callee, self.expressions(arguments))

    def primary(self, node: tree_sitter.Node) -> Expression:
        place = self.place(node)
        fields = {name: node.child_by_field_name(name) for name in ("left", "right", "argument", "value", "operator")}
        if node.type in _LITERALS:
            return Literal(place, text_of(node))
        match node.type:
            case "identifier" | "field_identifier" | "this":
                return Name(place, text_of(node))
            case "template_function":
                name = node.child_by_field_name("name")
                assert name is not None, "the grammar's field"
                return Name(place, text_of(name), self.template_arguments(node))
            case "qualified_identifier":
                return self.qualified_name(node)
            case "parenthesized_expression":
                return self.expression(_inner(node))
            case "assignment_expression":
                return self.assignment(node)
            case "update_expression":
                argument, operator = fields["argument"], fields["operator"]
                assert argument is not None and operator is not None, "the grammar's fields"
                is_prefix = operator.start_byte < argument.start_byte
                return Step(place, text_of(operator)[0], self.expression(argument), is_prefix)
            case "conditional_expression":
                return self.conditional(node)
            case "subscript_expression":
                return self.subscript(node)
            case "field_expression":
                return self.member(node)
            case "initializer_list" | "argument_list":
                return InitList(place, self.expressions(node))
            case "compound_literal_expression":
                kind, value = node.child_by_field_name("type"), fields["value"]
                assert kind is not None and value is not None, "the grammar's fields"
                return Cast(place, self.type(kind), self.expressions(value))
            case "sizeof_expression":
                return self.size_of(node)
            case "lambda_expression":
                return self.lambda_expression(node)
        raise self.refuse(node, _describe(node))

    def qualified_name(self, node: tree_sitter.Node) -> Expression:
        name, scope = node.child_by_field_name("name"), node.child_by_field_name("scope")
        assert name is not None, "the grammar's field"
        if scope is not None and text_of(scope) != "std":
            outer = self.type(scope)
            assert isinstance(outer, NamedType), "a name comes before ::"
            return Name(self.place(node), outer.name, outer.arguments, member=text_of(name))
        found = self.primary(name)
        if not isinstance(found, Name):  # pragma: no cover - the grammar has names there
            raise self.refuse(node, _describe(node))
        return Name(self.place(node), found.name, found.arguments, scope is not None, found.member)

    def assignment(self, node: tree_sitter.Node) -> Assign:
        left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
        operator = node.child_by_field_name("operator")
        assert left is not None and right is not None and operator is not None, "the grammar's fields"
        return Assign(self.place(node), text_of(operator)[:-1], self.expression(left), self.expression(right))

    def conditional(self, node: tree_sitter.Node) -> Conditional:
        parts = [node.child_by_field_name(name) for name in ("condition", "consequence", "alternative")]
        condition, yes, no = parts
        if condition is None or yes is None or no is None:
            raise self.refuse(node, "a conditional expression without its middle")
        return Conditional(self.place(node), self.expression(condition), self.expression(yes), self.expression(no))

    def subscript(self, node: tree_sitter.Node) -> Index:
        array, indices = node.child_by_field_name("argument"), node.child_by_field_name("indices")
        assert array is not None, "the grammar's field"
        (index,) = self.expressions(indices)
        return Index(self.place(node), self.expression(array), index)

    def member(self, node: tree_sitter.Node) -> Member:
        value, field = node.child_by_field_name("argument"), node.child_by_field_name("field")
        operator = node.child_by_field_name("operator")
        assert value is not None and field is not None and operator is not None, "the grammar's fields"
        found = self.expression(value)
        if text_of(operator) == "->":
            found = Unary(found.place, "*", found)
        return Member(self.place(node), found, text_of(field).removeprefix("template").strip())

    def size_of(self, node: tree_sitter.Node) -> SizeOf:
        kind, value = node.child_by_field_name("type"), node.child_by_field_name("value")
        if kind is None and value is not None:
            kind = _inner(value) if value.type == "parenthesized_expression" else value
        if kind is None:
            raise self.refuse(node, _describe(node))
        operand = self.type(kind) if self.names_type(kind) else self.expression(kind)
        return SizeOf(self.place(node), operand)

    def lambda_expression(self, node: tree_sitter.Node) -> Lambda:
        place = self.place(node)
        default, captures = "", []
        for child in named(node.child_by_field_name("captures")):
            if child.type == "lambda_default_capture":
                default = text_of(child)
            else:
                captures.append(self.capture(child))
        declarator, body = node.child_by_field_name("declarator"), node.child_by_field_name("body")
        assert body is not None, "the grammar's field"
        with self.scope():
            for capture in captures:
                self.declare(capture.name, "value")
            parameters = self.parameters(declarator.child_by_field_name("parameters") if declarator else None)
            trailing = next(_find(declarator, "trailing_return_type"), None) if declarator else None
            result = self.type(trailing.named_children[0]) if trailing else NamedType(place, "auto")
            function = Function(place, "a lambda", (), parameters, result, self.block(body))
        return Lambda(place, default, tuple(captures), function)

    def capture(self, node: tree_sitter.Node) -> Capture:
        text = text_of(node)
        value = node.child_by_field_name("right")
        name = text.split("=")[0].strip().removeprefix("&").strip()
        return Capture(self.place(node), name, text.startswith("&"), self.expression(value) if value else None)


class _Builder:
    """Puts an expression together from its pieces, by precedence."""

    def __init__(self, items: list[_Item], error: UntranslatableError) -> None:
        self.items = items
        self.error = error
        self.at = 0

    def build(self) -> Expression:
        found = self.binary(0)
        if self.at < len(self.items):
            raise self.error
        return found

    def binary(self, level: int) -> Expression:
        left = self.unary()
        while self.at < len(self.items):
            item = self.items[self.at]
            if _PRECEDENCE.get(item.operator, -1) < level:
                break
            self.at += 1
            left = Binary(left.place, item.operator, left, self.binary(_PRECEDENCE[item.operator] + 1))
        return left

    def unary(self) -> Expression:
        if self.at >= len(self.items):
            raise self.error
        item = self.items[self.at]
        self.at += 1
        if item.type is not None:
            return Cast(item.place, item.type, (self.unary(),))
        if item.operand is None:
            return Unary(item.place, item.operator, self.unary())
        return item.operand


def _join(arguments: tuple[Expression, ...], error: UntranslatableError) -> Expression:
    # What stands in parentheses as one expression.
    if not arguments:
        raise error
    found = arguments[0]
    for argument in arguments[1:]:
        found = Binary(found.place, ",", found, argument)
    return found


def _spell(operator: str) -> str:
    return _SPELLED.get(operator, operator)


def _inner(node: tree_sitter.Node) -> tree_sitter.Node:
    return next(named(node))


def named(node: tree_sitter.Node | None) -> Iterator[tree_sitter.Node]:
    """Yield the named children of a node, comments left out; none for None."""
    return (child for child in node.named_children if child.type != "comment") if node is not None else iter(())


def _find(node: tree_sitter.Node, kind: str) -> Iterator[tree_sitter.Node]:
    if node.type == kind:
        yield node
    for child in node.children:
        yield from _find(child, kind)


def _describe(node: tree_sitter.Node) -> str:
    known = {"new_expression": "new", "delete_expression": "delete", "gnu_asm_expression": "asm", "ERROR": "this"}
    return known.get(node.type, node.type.removesuffix("_expression").replace("_", " "))
