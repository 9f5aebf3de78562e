"""Statements and whole programs as frozen values; see ``nodes``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fuser.cxx.nodes import (
    Expression,
    FunctionDefinition,
    Node,
    Statement,
    TemplateParameter,
    TypeSyntax,
)
from fuser.cxx.preprocess import Place


@dataclass(frozen=True, slots=True)
class Declarator(Node):
    """One variable of a declaration; several names for ``auto [a, b]``."""

    name: str
    type: TypeSyntax
    # None: not initialised.
    value: Expression | None
    bindings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Declaration(Statement):
    """``T x = 1, y[2] = {1, 2};``."""

    declarators: tuple[Declarator, ...]


@dataclass(frozen=True, slots=True)
class Alias(Statement):
    """``using name = type;`` and ``typedef``; a template of one has parameters."""

    name: str
    type: TypeSyntax
    template: tuple[TemplateParameter, ...] = ()


@dataclass(frozen=True, slots=True)
class Evaluate(Statement):
    """An expression as a statement; None is the empty statement."""

    expression: Expression | None


@dataclass(frozen=True, slots=True)
class Condition(Node):
    """What stands in the parentheses of ``if``, ``while`` and ``switch``; the declaration comes first."""

    declaration: Statement | None
    value: Expression
    # The value as written.
    text: str


@dataclass(frozen=True, slots=True)
class If(Statement):
    """``if``, ``if constexpr``."""

    condition: Condition
    yes: Statement
    no: Statement | None


@dataclass(frozen=True, slots=True)
class For(Statement):
    """``for (start; condition; step) body``."""

    start: Statement | None
    condition: Expression | None
    step: Expression | None
    body: Statement
    # The condition as written.
    text: str


@dataclass(frozen=True, slots=True)
class RangeFor(Statement):
    """``for (T x : array) body``; the variable's value is filled in for each element."""

    variable: Declarator
    array: Expression
    body: Statement


@dataclass(frozen=True, slots=True)
class While(Statement):
    """``while (condition) body``."""

    condition: Condition
    body: Statement


@dataclass(frozen=True, slots=True)
class DoWhile(Statement):
    """``do body while (condition);``."""

    body: Statement
    condition: Expression
    # The condition as written.
    text: str


@dataclass(frozen=True, slots=True)
class Switch(Statement):
    """``switch``: statements in order, each with the labels before it; a label None is ``default``."""

    condition: Condition
    sections: tuple[tuple[tuple[Expression | None, ...], tuple[Statement, ...]], ...]


class Break(Statement):
    """``break;``."""

    __slots__ = ()


class Continue(Statement):
    """``continue;``."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Return(Statement):
    """``return value;``."""

    value: Expression | None


@dataclass(frozen=True, slots=True)
class Struct(Statement):
    """A class without bases: its fields, in order, its functions, and what is no part of an object."""

    name: str
    template: tuple[TemplateParameter, ...]
    fields: tuple[Declarator, ...]
    functions: tuple[FunctionDefinition, ...]
    constants: tuple[Declarator, ...] = ()
    # Of ``template <> struct S<int> {...}``: the template arguments; None: no specialisation.
    special: tuple[TypeSyntax | Expression, ...] | None = None
    # Types that it names: ``using type = float;``.
    aliases: tuple[Alias, ...] = ()

    @property
    def constructors(self) -> tuple[FunctionDefinition, ...]:
        """Return the functions that have its name."""
        return tuple(item for item in self.functions if item.name == self.name.rpartition("::")[2])


@dataclass(frozen=True, slots=True)
class Program:
    """A whole text: functions by name (overloads in order), and everything else in the order of the text."""

    functions: Mapping[str, tuple[FunctionDefinition, ...]]
    globals: tuple[Statement, ...]
    entry: FunctionDefinition
    # Every function that is called and not defined here, with the first place that calls it.
    externals: Mapping[str, Place]
