"""One reading of a text: what its names stand for, and which function is in charge of which kind of the parser's node.

The parser knows no names, so ``(T)-x``, ``f<T>(x)`` and ``a < b && c > (d)`` come as whatever it took them for. Here it
is known which names are types: operators are taken apart again where that makes a difference, and put together anew.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import tree_sitter

from fuser.cxx.functor import MATH_FUNCTIONS
from fuser.cxx.nodes import Binary, Cast, Expression, FunctionDefinition, Node, Statement, TypeSyntax, Unary
from fuser.cxx.preprocess import MappedText, Place
from fuser.cxx.tree import named, text_of
from fuser.errors import UntranslatableError

__all__ = [
    "STD",
    "TYPES",
    "Grammar",
    "Piece",
    "Pieces",
    "Reader",
    "describe",
    "read_expression",
    "read_list",
    "take_apart",
]

# Type names that are no keywords. A functor's own names come first.
TYPES = frozenset(
    "int8_t int16_t int32_t int64_t uint8_t uint16_t uint32_t uint64_t size_t ptrdiff_t complex nullptr_t".split()
)
# A namespace: its names from the outside in.
Path = tuple[str, ...]
STD: Path = ("std",)
# How tightly binary operators bind, loosest first.
_PRECEDENCE = {
    operator: level
    for level, operators in enumerate(
        (",", "||", "&&", "|", "^", "&", "== !=", "< > <= >=", "<< >>", "+ -", "* / %"),
    )
    for operator in operators.split()
}


@dataclass(frozen=True, slots=True)
class Piece(Node):
    """An operator, or a type in parentheses, of an expression that was taken apart."""

    operator: str
    type: TypeSyntax | None = None


Pieces = list[Piece | Expression]


@dataclass(frozen=True, slots=True)
class Grammar:
    """For each type of the parser's node the function that takes the reader and the node.

    Syntax contains syntax of every other kind: a lambda is an expression that holds statements. Who is in charge of
    one kind finds the others here, and no module has to import those above it.
    """

    # Returns an expression, or the pieces of one.
    expressions: Mapping[str, Callable[[Reader, tree_sitter.Node], Expression | Pieces]]
    # Returns a statement, or any number of them.
    statements: Mapping[str, Callable[[Reader, tree_sitter.Node], Statement | list[Statement]]]


class Meaning(NamedTuple):
    """What a name stands for."""

    # "type", "function" or "value".
    kind: str
    # The one name that a program has for it: with its namespaces, ``a::b::name``, if it is declared outside functions.
    name: str


@dataclass(slots=True, eq=False)
class Reader:
    """What a reading knows at some point of a text."""

    expanded: MappedText
    grammar: Grammar
    # Innermost last; the first one, outside functions, by names with their namespaces.
    scopes: list[dict[str, Meaning]] = field(
        default_factory=lambda: [{name: Meaning("type", name) for name in sorted(TYPES)}]
    )
    # The namespace that is read, every one that there is by its name with those around it, and those in use.
    path: Path = ()
    namespaces: dict[str, Path] = field(default_factory=lambda: {"std": STD})
    used: list[Path] = field(default_factory=list)
    # Functions that are defined outside of classes, by name.
    functions: dict[str, list[FunctionDefinition]] = field(default_factory=dict)
    # The template arguments that a class's own name stands for inside of it, where none are written.
    own_arguments: dict[str, tuple[TypeSyntax | Expression, ...]] = field(default_factory=dict)
    # The names of types that classes have.
    member_types: set[str] = field(default_factory=lambda: {"type", "value_type"})
    # Functions that are called and declared nowhere.
    externals: dict[str, Place] = field(default_factory=dict)
    # Bytes before a text that is read again by itself.
    shift: int = 0

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
        count = len(self.used)
        try:
            yield
        finally:
            self.scopes.pop()
            del self.used[count:]

    def declare(self, name: str, kind: str, known: str = "") -> None:
        """Note what a name stands for from here on; ``known``: its name in the program, if that is another."""
        full = self.qualify(name)
        self.scopes[-1][full] = Meaning(kind, known or full)

    def qualify(self, name: str) -> str:
        """Return a program's name for what is declared here; operators are found wherever they are."""
        is_outside = len(self.scopes) == 1 and not name.startswith("operator")
        return "::".join((*self.path, name)) if is_outside else name

    def find(self, name: str, path: Path | None = None) -> Meaning | None:
        """Return what a name stands for, here or in a namespace; None when nobody declared it."""
        if path is not None:
            return self.scopes[0].get("::".join((*path, name)))
        inside = next((scope[name] for scope in reversed(self.scopes[1:]) if name in scope), None)
        if inside is not None:
            return inside
        # Of two functions that fit alike, C++ takes the one that is no template: that of its own.
        used = [] if name in MATH_FUNCTIONS else self.used
        found = (self.find(name, around) for around in (*self._around(), *used))
        return next(filter(None, found), None)

    def find_namespace(self, name: str, path: Path | None) -> Path | None:
        """Return the namespace that a name stands for, here or in a namespace; None if it is none."""
        places = [*self._around(), *self.used] if path is None else [path]
        return next(filter(None, (self.namespaces.get("::".join((*around, name))) for around in places)), None)

    def kind(self, name: str, path: Path | None = None) -> str:
        """Return what a name stands for; empty when nobody declared it."""
        found = self.find(name, path)
        return "" if found is None else found.kind

    def spell(self, name: str, path: Path | None = None) -> str:
        """Return a program's name for what a name stands for."""
        found = self.find(name, path)
        if found is not None:
            return found.name
        return "::".join((*path, name)) if path and path != STD else name

    def _around(self) -> Iterator[Path]:
        # The namespace that is read, and those around it.
        return (self.path[:depth] for depth in range(len(self.path), -1, -1))


def read_expression(reader: Reader, node: tree_sitter.Node) -> Expression:
    """Read an expression."""
    return _put_together(reader, node, take_apart(reader, node))


def read_list(reader: Reader, node: tree_sitter.Node | None) -> tuple[Expression, ...]:
    """Read a list of arguments; a template that was none may hide a comma."""
    found: list[Expression] = []
    for child in named(node):
        parts: list[Pieces] = [[]]
        for piece in take_apart(reader, child):
            if isinstance(piece, Piece) and piece.operator == "," and child.type != "comma_expression":
                parts.append([])
            else:
                parts[-1].append(piece)
        found += [_put_together(reader, child, part) for part in parts]
    return tuple(found)


def take_apart(reader: Reader, node: tree_sitter.Node) -> Pieces:
    """Return the pieces of an expression, in the order of the text; most are one piece."""
    read = reader.grammar.expressions.get(node.type)
    if read is None:
        raise reader.refuse(node, describe(node))
    found = read(reader, node)
    return found if isinstance(found, list) else [found]


def describe(node: tree_sitter.Node) -> str:
    """Return what users call a node that has no translation."""
    name = re.sub(r"_(?:expression|statement|specifier)$", "", node.type)
    return {"gnu_asm": "asm", "co_return": name, "ERROR": "this"}.get(name, name.replace("_", " "))


def _put_together(reader: Reader, node: tree_sitter.Node, pieces: Pieces) -> Expression:
    first = pieces[0] if len(pieces) == 1 else None
    if isinstance(first, Expression):
        return first
    rest = pieces[::-1]
    found = _binary(rest, 0)
    if found is None or rest:
        raise reader.refuse(node, f"the expression {text_of(node)!r}")
    return found


def _binary(rest: Pieces, level: int) -> Expression | None:
    # By precedence, from the pieces that are left, the next one last; None where they end too early.
    left = _unary(rest)
    while left is not None and rest:
        piece = rest[-1]
        binds = _PRECEDENCE.get(piece.operator, -1) if isinstance(piece, Piece) else -1
        if not isinstance(piece, Piece) or binds < level:
            break
        rest.pop()
        right = _binary(rest, binds + 1)
        left = None if right is None else Binary(left.place, piece.operator, left, right)
    return left


def _unary(rest: Pieces) -> Expression | None:
    piece = rest.pop() if rest else None
    if not isinstance(piece, Piece):
        return piece
    operand = _unary(rest)
    if operand is None:
        return None
    return (
        Unary(piece.place, piece.operator, operand) if piece.type is None else Cast(piece.place, piece.type, (operand,))
    )
