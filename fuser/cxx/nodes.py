"""Expressions, types and functions of a functor text as frozen values: what ``syntax`` makes of the parser's tree.

Every node has its place: line and column of its first character in the user's text, from 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fuser.cxx.preprocess import Place

# Words of types that are numbers.
NUMBERS = frozenset(
    "bool char short int long float double signed unsigned size_t int8_t int16_t int32_t int64_t uint8_t uint16_t "
    "uint32_t uint64_t complex".split()
)


@dataclass(frozen=True, slots=True)
class Node:
    """Anything with a place in the text."""

    place: Place


def parts(item: object) -> tuple[object, ...]:
    """Return what a node or a tuple is made of; nothing for what is neither."""
    if isinstance(item, tuple):
        return item
    return tuple(getattr(item, name) for name in item.__match_args__) if isinstance(item, Node) else ()


def walk(item: object, *, into_lambdas: bool = True, unevaluated: bool = True) -> Iterator[Node]:
    """Yield the nodes of a tree, or of a tuple of trees; those in ``sizeof`` and ``decltype`` only if asked for."""
    # A long sum is a deep tree: no recursion.
    rest = [item]
    while rest:
        part = rest.pop()
        if isinstance(part, Node):
            yield part
        if (into_lambdas or not isinstance(part, Lambda)) and (unevaluated or not isinstance(part, SizeOf | Decltype)):
            rest += reversed(parts(part))


def number_in(text: str) -> int | float | None:
    """Return the number that a literal is, whatever its type; None for another literal."""
    if text in {"true", "false"}:
        return int(text == "true")
    digits = text.replace("'", "").lower()
    for read in (lambda: int(digits.rstrip("ul"), 0), lambda: float(digits.rstrip("fl"))):
        try:
            return read()
        except ValueError:
            continue
    return None


class TypeSyntax(Node):
    """A type as written; what it means depends on template arguments."""

    __slots__ = ()


class Expression(Node):
    """Something with a value."""

    __slots__ = ()


class Statement(Node):
    """Something that is done."""

    __slots__ = ()


# Types


@dataclass(frozen=True, slots=True)
class NamedType(TypeSyntax):
    """``unsigned int``, ``T``, ``std::complex<T>``, ``std::enable_if<c, T>::type`` (member ``type``), ``auto``."""

    name: str
    arguments: tuple[TypeSyntax | Expression, ...] = ()
    member: str = ""


@dataclass(frozen=True, slots=True)
class Decltype(TypeSyntax):
    """``decltype(expression)``."""

    expression: Expression


@dataclass(frozen=True, slots=True)
class PointerType(TypeSyntax):
    """``T*``."""

    target: TypeSyntax


@dataclass(frozen=True, slots=True)
class ReferenceType(TypeSyntax):
    """``T&`` or ``T&&``."""

    target: TypeSyntax
    is_const: bool
    # ``&&``, which a value without a place may be bound to.
    is_rvalue: bool = False


@dataclass(frozen=True, slots=True)
class ArrayType(TypeSyntax):
    """``T[size]``; no size when the initialiser (or the argument) has it."""

    element: TypeSyntax
    size: Expression | None


# Expressions


@dataclass(frozen=True, slots=True)
class Literal(Expression):
    """A number, ``true``, ``'c'``, ``"text"`` or ``nullptr``, as written."""

    text: str


@dataclass(frozen=True, slots=True)
class Name(Expression):
    """A variable, function or constant, without ``std::``; template arguments if any are written."""

    name: str
    arguments: tuple[TypeSyntax | Expression, ...] = ()
    # Whether it was written ``std::name``.
    in_std: bool = False
    # What follows the last ``::`` of a template: ``value`` of ``std::is_same<T, float>::value``.
    member: str = ""


@dataclass(frozen=True, slots=True)
class Unary(Expression):
    """``- + ! ~ * &``."""

    operator: str
    operand: Expression


@dataclass(frozen=True, slots=True)
class Binary(Expression):
    """Arithmetic, comparison, ``&&``, ``||`` and the comma."""

    operator: str
    left: Expression
    right: Expression


@dataclass(frozen=True, slots=True)
class Assign(Expression):
    """``=`` (operator empty) or a compound assignment (operator without its ``=``)."""

    operator: str
    target: Expression
    value: Expression


@dataclass(frozen=True, slots=True)
class Increment(Expression):
    """``++`` and ``--``."""

    operator: str
    target: Expression
    is_prefix: bool


@dataclass(frozen=True, slots=True)
class Conditional(Expression):
    """``condition ? yes : no``."""

    condition: Expression
    yes: Expression
    no: Expression


@dataclass(frozen=True, slots=True)
class Call(Expression):
    """A call of a function, a lambda or a member function."""

    function: Expression
    arguments: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Cast(Expression):
    """Any way to make a value of a type: ``(T)x``, ``T(x)``, ``T{x, y}``, ``static_cast<T>(x)``, ``T()``."""

    type: TypeSyntax
    values: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Index(Expression):
    """``array[index]``."""

    array: Expression
    index: Expression


@dataclass(frozen=True, slots=True)
class Member(Expression):
    """``value.name``; ``pointer->name`` is ``(*pointer).name``."""

    value: Expression
    name: str


@dataclass(frozen=True, slots=True)
class InitList(Expression):
    """``{a, b}``."""

    values: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class SizeOf(Expression):
    """``sizeof`` of a type or an expression."""

    operand: TypeSyntax | Expression


@dataclass(frozen=True, slots=True)
class Capture(Node):
    """One name in a lambda's brackets, with its initialiser if there is one."""

    name: str
    by_reference: bool
    value: Expression | None


@dataclass(frozen=True, slots=True)
class Lambda(Expression):
    """A lambda; ``default`` is ``&``, ``=`` or empty."""

    default: str
    captures: tuple[Capture, ...]
    function: FunctionDefinition


# Functions, which lambdas hold


@dataclass(frozen=True, slots=True)
class Block(Statement):
    """``{ ... }``, a scope."""

    statements: tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class TemplateParameter(Node):
    """``typename T = default`` or ``int N = default``."""

    name: str
    default: TypeSyntax | Expression | None
    # Type of one that is a value; ``enable_if`` in it must hold.
    type: TypeSyntax | None = None


@dataclass(frozen=True, slots=True)
class Parameter(Node):
    """One parameter of a function."""

    name: str
    type: TypeSyntax
    default: Expression | None


@dataclass(frozen=True, slots=True)
class FunctionDefinition(Node):
    """A function, a function template, a member function or a lambda's body."""

    name: str
    template: tuple[TemplateParameter, ...]
    parameters: tuple[Parameter, ...]
    # ``auto`` where nothing is written.
    result: TypeSyntax
    # None: only declared.
    body: Block | None
    # Of ``template <> int f<int>(int x)``: the template arguments that are written; None: no specialisation.
    special: tuple[TypeSyntax | Expression, ...] | None = None
