"""Whether a functor gives every result on every path; C++ leaves open what happens where it does not.

Only what certainly goes wrong on a path that can be seen in the text is a problem:

- a branch is a path of its own, unless its condition mentions no variable: types decide, and one of them may be meant;
- a loop runs at least once, and what it does in any round counts; one without an end is left by ``break`` alone;
- a ``switch`` without ``default`` takes one of its cases;
- whatever mentions an output may write it: an assignment, a call that takes it, a lambda, a reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from functools import lru_cache

from fuser.cxx.functor import Functor
from fuser.cxx.nodes import Call, Expression, Lambda, Literal, Name, NamedType, Node, Place, Statement
from fuser.cxx.preprocess import Problem
from fuser.cxx.statements import (
    Block,
    Break,
    Continue,
    Declarator,
    DoWhile,
    Evaluate,
    For,
    FunctionDefinition,
    If,
    RangeFor,
    Return,
    Switch,
    While,
)
from fuser.cxx.syntax import parse_program
from fuser.errors import UntranslatableError

__all__ = ["check_functor"]

# Calls of them do not come back.
_TRAPS = frozenset({"__trap", "__builtin_trap", "__builtin_unreachable", "abort"})

# Outputs without a value at some point of the text; None: no path comes there.
Missing = frozenset[str] | None


def check_functor(functor: Functor) -> None:
    """Raise FunctorError for the first place of a text that cannot be right; do nothing when there is none.

    A text that fuser cannot follow, such as one with ``goto``, is right as far as it parses.
    """
    functor.raise_problems()
    problem = _find_problem(functor)
    if problem is not None:
        raise functor.error(problem)


@lru_cache(maxsize=4096)
def _find_problem(functor: Functor) -> Problem | None:
    try:
        program = parse_program(functor)
    except (UntranslatableError, RecursionError):
        return None
    outputs = frozenset(parameter.name for parameter in functor.outputs if parameter.name)
    found = [
        problem
        for overloads in program.functions.values()
        for function in overloads
        for problem in _Paths(function, outputs if function is program.entry else frozenset()).problems
    ]
    return min(found, default=None)


class _Paths:
    # What goes wrong on the paths through one function.
    def __init__(self, function: FunctionDefinition, outputs: frozenset[str]) -> None:
        self.problems: list[Problem] = []
        # What is missing at each break out of an open loop or switch, and at each continue in an open loop; the first
        # list is for those outside all of them, which no compiler takes.
        self.breaks: list[list[Missing]] = [[]]
        self.rounds: list[list[Missing]] = [[]]
        if function.body is None:
            return
        inside = list(_walk(function.body, into_lambdas=False))
        declared = [item for item in inside if isinstance(item, Declarator)]
        self.variables = {item.name for item in function.parameters} | {item.name for item in declared}
        self.variables.update(*(item.bindings for item in declared))
        returns_value = any(isinstance(item, Return) and item.value is not None for item in inside)
        end = self.follow(function.body, outputs)
        place = function.body.statements[-1].place if function.body.statements else function.body.place
        kind = function.result.name if isinstance(function.result, NamedType) else ""
        # An entry that is declared to return a value and never does is made void; what is auto is void then.
        if kind == "void" or (not returns_value and (outputs or kind == "auto")):
            self.leave(place, end)
        elif end is not None:
            self.problems.append(Problem(place, f"{function.name!r} returns nothing on a path that ends after this"))

    def leave(self, place: Place, missing: Missing) -> None:
        if missing:
            names = ", ".join(map(repr, sorted(missing)))
            self.problems.append(Problem(place, f"nothing was assigned to {names} on a path that ends here"))

    def follow(self, statement: Statement | None, missing: Missing) -> Missing:
        # What is missing after a statement.
        if statement is None or missing is None:
            return missing
        match statement:
            case Block(_, statements):
                for item in statements:
                    missing = self.follow(item, missing)
                return missing
            case Return(place, value):
                self.leave(place, missing - _mentioned(value))
                return None
            case Break() | Continue():
                open_here = self.breaks if isinstance(statement, Break) else self.rounds
                open_here[-1].append(missing)
                return None
            case Evaluate(_, Call(_, Name(_, name))) if name in _TRAPS:
                return None
            case If(_, condition, yes, no):
                missing -= _mentioned(condition)
                after = [self.follow(yes, missing), self.follow(no, missing)]
                if not self.variables.isdisjoint(_mentioned(condition)):
                    return _both(after)
                chosen = after if no else after[:1]
                return None if None in chosen else _either(chosen)
            case Switch():
                return self.switch(statement, missing - _mentioned(statement.condition))
            case For(_, start, condition, step, body):
                return self.loop(body, missing - _mentioned((start, condition, step)), condition)
            case While(_, condition, body):
                return self.loop(body, missing - _mentioned(condition), condition.value)
            case DoWhile(_, body, condition):
                return self.loop(body, missing, condition)
            case RangeFor(_, _, array, body):
                return self.loop(body, missing - _mentioned(array), array)
        return missing - _mentioned(statement)

    def loop(self, body: Statement, missing: Missing, condition: Expression | None) -> Missing:
        self.breaks.append([])
        self.rounds.append([])
        rounds = [self.follow(body, missing), *self.rounds.pop()]
        breaks = self.breaks.pop()
        is_endless = condition is None or (isinstance(condition, Literal) and condition.text in {"true", "1"})
        return _either(breaks if is_endless else breaks + rounds)

    def switch(self, statement: Switch, missing: Missing) -> Missing:
        self.breaks.append([])
        end: Missing = None
        for _, statements in statement.sections:
            end = _both([missing, end])
            for item in statements:
                end = self.follow(item, end)
        return _both([*self.breaks.pop(), end])


def _both(paths: list[Missing]) -> Missing:
    # Each is a path: what one of them misses is missing.
    taken = [missing for missing in paths if missing is not None]
    return frozenset().union(*taken) if taken else None


def _either(paths: list[Missing]) -> Missing:
    # One of them is the path, who knows which: what all of them miss is missing.
    taken = [missing for missing in paths if missing is not None]
    return frozenset.intersection(*taken) if taken else None


def _mentioned(item: object) -> frozenset[str]:
    return frozenset(part.name for part in _walk(item) if isinstance(part, Name))


def _walk(item: object, *, into_lambdas: bool = True) -> Iterator[Node]:
    # The nodes of a tree, or of a tuple of trees.
    if isinstance(item, tuple):
        for part in item:
            yield from _walk(part, into_lambdas=into_lambdas)
    elif isinstance(item, Node):
        yield item
        if into_lambdas or not isinstance(item, Lambda):
            for field in fields(item):
                yield from _walk(getattr(item, field.name), into_lambdas=into_lambdas)
