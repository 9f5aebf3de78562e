"""From the parser's tree to expressions.

The parser knows no names, so ``(T)-x``, ``f<T>(x)`` and ``a < b && c > (d)`` come as whatever it took them for. Here it
is known which names are types: operators are taken apart again where that makes a difference, and put together anew.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import tree_sitter

from fuser.cxx.nodes import (
    Assign,
    Binary,
    Call,
    Capture,
    Cast,
    Conditional,
    Expression,
    Increment,
    Index,
    InitList,
    Lambda,
    Literal,
    Member,
    Name,
    NamedType,
    Place,
    SizeOf,
    TypeSyntax,
    Unary,
)
from fuser.cxx.statements import Block, FunctionDefinition, Parameter
from fuser.cxx.tree import field, find, named, parse_tree, text_of
from fuser.cxx.type_syntax import TypeReader
from fuser.errors import UntranslatableError

__all__ = ["ExpressionReader"]

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
_LITERALS = frozenset("number_literal true false null nullptr char_literal string_literal concatenated_string".split())


@dataclass(frozen=True, slots=True)
class _Item:
    """One piece of an expression that was taken apart: an operand, an operator, or a type in parentheses."""

    place: Place
    operator: str = ""
    operand: Expression | None = None
    type: TypeSyntax | None = None


class ExpressionReader(TypeReader):
    """Makes expressions."""

    @abstractmethod
    def block(self, node: tree_sitter.Node) -> Block:
        """Read a compound statement."""

    @abstractmethod
    def parameters(self, node: tree_sitter.Node | None) -> tuple[Parameter, ...]:
        """Read a parameter list and declare its names."""

    def expression(self, node: tree_sitter.Node) -> Expression:
        """Read an expression."""
        items = list(self._take_apart(node))
        if len(items) == 1 and items[0].operand is not None:
            return items[0].operand
        return _Builder(items, self.refuse(node, f"the expression {text_of(node)!r}")).build()

    def expressions(self, node: tree_sitter.Node | None) -> tuple[Expression, ...]:
        """Read a list of arguments; a template that was none may hide a comma."""
        found: list[Expression] = []
        for child in named(node):
            items = list(self._take_apart(child))
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
        call = next(find(tree.root_node, "call_expression"), None)
        if call is None or tree.root_node.has_error:
            raise UntranslatableError(self.expanded.source, *self.expanded.place(start), f"the declarator {text!r}")
        found = self.expressions(call.child_by_field_name("arguments"))
        self.shift = shift
        return found

    def _take_apart(self, node: tree_sitter.Node) -> Iterator[_Item]:
        place = self.place(node)
        match node.type:
            case "binary_expression" | "comma_expression":
                # A long sum leans to the left, more deeply than Python calls itself.
                links = [node]
                while (left := field(links[-1], "left")).type == node.type:
                    links.append(left)
                yield from self._take_apart(left)
                for link in reversed(links):
                    operator = link.child_by_field_name("operator") or link.children[1]
                    yield _Item(self.place(operator), _spell(text_of(operator)))
                    yield from self._take_apart(field(link, "right"))
            case "unary_expression" | "pointer_expression":
                argument = field(node, "argument")
                yield _Item(place, _spell(text_of(node.children[0])))
                yield from self._take_apart(argument)
            case "cast_expression":
                yield from self._take_cast_apart(node)
            case "parenthesized_expression" if node.named_children and self.names_type(_inner(node)):
                yield _Item(place, type=self.type(_inner(node)))
            case "call_expression":
                yield from self._take_call_apart(node)
            case "number_literal" if text_of(node)[0] in "+-":
                yield _Item(place, text_of(node)[0])
                yield _Item(place, operand=Literal(place, text_of(node)[1:]))
            case _:
                yield _Item(place, operand=self._primary(node))

    def _take_cast_apart(self, node: tree_sitter.Node) -> Iterator[_Item]:
        kind, value = field(node, "type"), field(node, "value")
        if self.names_type(kind):
            yield _Item(self.place(node), type=self.type(kind))
            yield from self._take_apart(value)
        elif value.type == "parenthesized_expression":
            arguments = (self.expression(_inner(value)),)
            yield _Item(self.place(node), operand=Call(self.place(node), self._name_in(kind), arguments))
        else:
            # (a) - b, taken for a cast of -b.
            yield _Item(self.place(node), operand=self._name_in(kind))
            yield from self._take_apart(value)

    def _take_call_apart(self, node: tree_sitter.Node) -> Iterator[_Item]:
        function, arguments = field(node, "function"), field(node, "arguments")
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
                    yield _Item(self.place(child), operand=self._name_in(child))
                else:
                    yield from self._take_apart(child)
            yield _Item(self.place(arguments), ">")
            yield _Item(self.place(arguments), operand=_join(self.expressions(arguments), self.refuse(node, "()")))
        else:
            yield _Item(place, operand=self._call(node, function, arguments))

    def _name_in(self, node: tree_sitter.Node) -> Name:
        # A name that was taken for a type.
        return Name(self.place(node), text_of(node).strip())

    def _call(self, node: tree_sitter.Node, function: tree_sitter.Node, arguments: tree_sitter.Node) -> Expression:
        place = self.place(node)
        if function.type == "template_function":
            name = function.child_by_field_name("name")
            if name is not None and text_of(name) in _CASTS:
                (kind,) = self._template_arguments(function)
                assert isinstance(kind, TypeSyntax), "a cast names a type"
                return Cast(place, kind, self.expressions(arguments))
        if self.names_type(function):
            return Cast(place, self.type(function), self.expressions(arguments))
        callee = self.expression(function)
        if isinstance(callee, Name) and not callee.member and self.kind(callee.name) not in {"function", "value"}:
            self.externals.setdefault(callee.name, callee.place)
        return Call(place, callee, self.expressions(arguments))

    def _primary(self, node: tree_sitter.Node) -> Expression:
        place = self.place(node)

        if node.type in _LITERALS:
            return Literal(place, text_of(node))
        match node.type:
            case "identifier" | "field_identifier" | "type_identifier":
                return Name(place, text_of(node))
            case "type_descriptor" if node.child_by_field_name("declarator") is None:
                # Taken for a type, as everything between < and > may be.
                return self.expression(node.named_children[-1])

            case "template_function" | "template_type":
                name = field(node, "name")
                return Name(place, text_of(name), self._template_arguments(node))
            case "qualified_identifier":
                return self._qualified_name(node)
            case "parenthesized_expression":
                return self.expression(_inner(node))
            case "assignment_expression":
                return self._assignment(node)
            case "update_expression":
                argument, operator = field(node, "argument"), field(node, "operator")
                is_prefix = operator.start_byte < argument.start_byte
                return Increment(place, text_of(operator)[0], self.expression(argument), is_prefix)
            case "conditional_expression":
                return self._conditional(node)
            case "subscript_expression":
                return self._subscript(node)
            case "field_expression":
                return self._member(node)
            case "initializer_list" | "argument_list":
                return InitList(place, self.expressions(node))
            case "compound_literal_expression":
                kind, value = field(node, "type"), field(node, "value")
                return Cast(place, self.type(kind), self.expressions(value))
            case "sizeof_expression":
                return self._size_of(node)
            case "lambda_expression":
                return self._lambda_expression(node)
        raise self.refuse(node, _describe(node))

    def _qualified_name(self, node: tree_sitter.Node) -> Expression:
        name, scope = field(node, "name"), node.child_by_field_name("scope")
        if scope is not None and text_of(scope) not in self.namespaces:
            outer = self.type(scope)
            assert isinstance(outer, NamedType), "a name comes before ::"
            return Name(self.place(node), outer.name, outer.arguments, member=text_of(name))
        found = self._primary(name)
        if not isinstance(found, Name):  # pragma: no cover - the grammar has names there
            raise self.refuse(node, _describe(node))
        is_std = scope is not None and text_of(scope) == "std"
        return Name(self.place(node), found.name, found.arguments, is_std, found.member)

    def _assignment(self, node: tree_sitter.Node) -> Assign:
        left, right = field(node, "left"), field(node, "right")
        operator = field(node, "operator")
        return Assign(self.place(node), text_of(operator)[:-1], self.expression(left), self.expression(right))

    def _conditional(self, node: tree_sitter.Node) -> Conditional:
        parts = [node.child_by_field_name(name) for name in ("condition", "consequence", "alternative")]
        condition, yes, no = parts
        if condition is None or yes is None or no is None:
            raise self.refuse(node, "a conditional expression without its middle")
        return Conditional(self.place(node), self.expression(condition), self.expression(yes), self.expression(no))

    def _subscript(self, node: tree_sitter.Node) -> Index:
        array, indices = field(node, "argument"), node.child_by_field_name("indices")
        (index,) = self.expressions(indices)
        return Index(self.place(node), self.expression(array), index)

    def _member(self, node: tree_sitter.Node) -> Member:
        value, name = field(node, "argument"), field(node, "field")
        operator = field(node, "operator")
        found = self.expression(value)
        if text_of(operator) == "->":
            found = Unary(found.place, "*", found)
        return Member(self.place(node), found, text_of(name).removeprefix("template").strip())

    def _size_of(self, node: tree_sitter.Node) -> SizeOf:
        kind, value = node.child_by_field_name("type"), node.child_by_field_name("value")
        if kind is None and value is not None:
            kind = _inner(value) if value.type == "parenthesized_expression" else value
        if kind is None:
            raise self.refuse(node, _describe(node))
        operand = self.type(kind) if self.names_type(kind) else self.expression(kind)
        return SizeOf(self.place(node), operand)

    def _lambda_expression(self, node: tree_sitter.Node) -> Lambda:
        place = self.place(node)
        default, captures = "", []
        for child in named(node.child_by_field_name("captures")):
            if child.type == "lambda_default_capture":
                default = text_of(child)
            elif child.type != "this":
                captures.append(self._capture(child))
        declarator, body = node.child_by_field_name("declarator"), field(node, "body")
        with self.scope():
            for capture in captures:
                self.declare(capture.name, "value")
            parameters = self.parameters(declarator.child_by_field_name("parameters") if declarator else None)
            trailing = next(find(declarator, "trailing_return_type"), None) if declarator else None
            result = self.type(trailing.named_children[0]) if trailing else NamedType(place, "auto")
            function = FunctionDefinition(place, "a lambda", (), parameters, result, self.block(body))
        return Lambda(place, default, tuple(captures), function)

    def _capture(self, node: tree_sitter.Node) -> Capture:
        text, before = text_of(node), node.prev_sibling
        value = node.child_by_field_name("right")
        name = text.split("=")[0].strip().removeprefix("&").strip()
        by_reference = text.startswith("&") or (before is not None and before.type == "&")
        return Capture(self.place(node), name, by_reference, self.expression(value) if value else None)


class _Builder:
    """Puts an expression together from its pieces, by precedence."""

    def __init__(self, items: list[_Item], error: UntranslatableError) -> None:
        self.items = items
        self.error = error
        self.at = 0

    def build(self) -> Expression:
        found = self._binary(0)
        if self.at < len(self.items):
            raise self.error
        return found

    def _binary(self, level: int) -> Expression:
        left = self._unary()
        while self.at < len(self.items):
            item = self.items[self.at]
            if _PRECEDENCE.get(item.operator, -1) < level:
                break
            self.at += 1
            left = Binary(left.place, item.operator, left, self._binary(_PRECEDENCE[item.operator] + 1))
        return left

    def _unary(self) -> Expression:
        if self.at >= len(self.items):
            raise self.error
        item = self.items[self.at]
        self.at += 1
        if item.type is not None:
            return Cast(item.place, item.type, (self._unary(),))
        if item.operand is None:
            return Unary(item.place, item.operator, self._unary())
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


def _describe(node: tree_sitter.Node) -> str:
    known = {"new_expression": "new", "delete_expression": "delete", "gnu_asm_expression": "asm", "ERROR": "this"}
    return known.get(node.type, node.type.removesuffix("_expression").replace("_", " "))
