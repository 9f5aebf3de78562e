"""Whether a functor gives every result on every path; C++ leaves open what happens where it does not.

Only what certainly goes wrong on a path that can be seen in the text is a problem:

- a branch is a path of its own, unless its condition mentions no variable: types decide, and one of them may be meant;
- a loop runs at least once, and what it does in any round counts; one without an end is left by ``break`` alone;
- a ``switch`` without ``default`` takes one of its cases;
- two branches in one block, on a condition and on its opposite, are the two ways of one;
- whatever mentions an output may write it: an assignment, a call that takes it, a lambda, a reference;
- an operand is only read: that is wrong where nothing before it, in the order of the text, can have written it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from functools import lru_cache

from fuser.cxx.functor import Functor
from fuser.cxx.nodes import (
    Assign,
    Binary,
    Call,
    Expression,
    Increment,
    Lambda,
    Literal,
    Name,
    NamedType,
    Node,
    Place,
    ReferenceType,
    Statement,
    Unary,
)
from fuser.cxx.preprocess import Problem
from fuser.cxx.statements import (
    Block,
    Break,
    Condition,
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
        functions = [function for overloads in program.functions.values() for function in overloads]
        outputs = frozenset(parameter.name for parameter in functor.outputs if parameter.name)
        paths = [_Paths(item, outputs if item is program.entry else frozenset()) for item in functions]
    except (UntranslatableError, RecursionError):
        return None
    return min((problem for item in paths for problem in item.problems), default=None)


class _Paths:
    # What goes wrong on the paths through one function.
    def __init__(self, function: FunctionDefinition, outputs: frozenset[str]) -> None:
        self.problems: list[Problem] = []
        self.outputs = outputs
        # Outputs that something before may have written, in the order of the text.
        self.touched: set[str] = set()
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
        # Nobody uses what an entry with outputs returns: it is made void, or returns something at its end.
        if kind == "void" or (outputs and kind != "auto") or (not returns_value and kind == "auto"):
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
                return self.block(statements, missing)
            case Return(place, value):
                self.leave(place, self.use(value, missing))
                return None
            case Break() | Continue():
                open_here = self.breaks if isinstance(statement, Break) else self.rounds
                open_here[-1].append(missing)
                return None
            case Evaluate(_, Call(_, Name(_, name))) if name in _TRAPS:
                return None
            case If(_, condition, yes, no):
                missing = self.use(condition, missing)
                after = [self.follow(yes, missing), self.follow(no, missing)]
                if self.decides(condition):
                    return _both(after)
                chosen = after if no else after[:1]
                return None if None in chosen else _either(chosen)
            case Switch():
                return self.switch(statement, self.use(statement.condition, missing))
            case For(_, start, condition, step, body):
                return self.loop(body, (condition, step), self.use(start, missing), condition)
            case While(_, condition, body):
                return self.loop(body, condition, missing, condition.value)
            case DoWhile(_, body, condition):
                return self.loop(body, condition, missing, condition)
            case RangeFor(_, _, array, body):
                return self.loop(body, array, missing, array)
            case Evaluate(_, Assign(_, "", Name(_, name), value)):
                # The value comes first.
                missing = self.use(value, missing)
                self.touched.add(name)
                return missing - {name}
        return self.use(statement, missing)

    def use(self, item: object, missing: frozenset[str]) -> frozenset[str]:
        # What is missing after something was evaluated.
        written = _written(item)
        for part in _reads(item):
            if part.name in self.outputs - self.touched - written:
                message = f"{part.name!r} is read before anything was assigned to it"
                self.problems.append(Problem(part.place, message))
        self.touched |= written
        return missing - _mentioned(item)

    def block(self, statements: tuple[Statement, ...], missing: Missing) -> Missing:
        # By condition: what is missing after its branch, and where it was not taken.
        ways: dict[tuple[str, bool], tuple[Missing, Missing]] = {}
        for item in statements:
            if missing is None or not isinstance(item, If) or item.no is not None or not self.decides(item.condition):
                missing = self.follow(item, missing)
                continue
            text, holds = _sense(item.condition)
            now = self.use(item.condition, missing)
            # Who took the opposite branch does not take this one, and who did not does.
            no, yes = (None if way is None else way & now for way in ways.get((text, not holds), (now, now)))
            ways[text, holds] = self.follow(item.yes, yes), no
            missing = _both([*ways[text, holds]])
        return missing

    def decides(self, condition: Condition) -> bool:
        return not self.variables.isdisjoint(_mentioned(condition))

    def loop(self, body: Statement, head: object, missing: frozenset[str], condition: Expression | None) -> Missing:
        # What a round writes, an earlier one may have written.
        self.touched |= _written((head, body))
        missing -= _mentioned(head)
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


def _sense(condition: Condition) -> tuple[str, bool]:
    # A condition without its "!", and whether it had none.
    if not isinstance(condition.value, Unary) or condition.value.operator != "!":
        return condition.text, True
    text = re.sub(r"^(?:!|not\b)\s*", "", condition.text)
    return text[1:-1].strip() if text.startswith("(") else text, False


def _written(item: object) -> frozenset[str]:
    # The names that may get a value.
    reads = Counter(part.name for part in _reads(item))
    found = Counter(part.name for part in _walk(item) if isinstance(part, Name))
    return frozenset(found - reads)


def _reads(item: object) -> Iterator[Name]:
    # The names whose values are needed where they stand.
    if isinstance(item, Name):
        yield item
    for part in _walk(item):
        match part:
            case Binary(_, operator, left, right) if operator != ",":
                operands: list[Expression | None] = [left, right]
            case Unary(_, operator, operand) if operator != "&":
                operands = [operand]
            case Increment(_, _, operand, _) | Condition(_, _, operand, _):
                operands = [operand]
            case Assign(_, operator, target, value):
                operands = [target, value] if operator else [value]
            case Declarator(_, _, kind, value) if not isinstance(kind, ReferenceType):
                operands = [value]
            case _:
                continue
        yield from (operand for operand in operands if isinstance(operand, Name))


def _walk(item: object, *, into_lambdas: bool = True) -> Iterator[Node]:
    # The nodes of a tree, or of a tuple of trees. A long sum is a deep tree: no recursion.
    rest = [item]
    while rest:
        part = rest.pop()
        if isinstance(part, tuple):
            rest += part
        elif isinstance(part, Node):
            yield part
            if into_lambdas or not isinstance(part, Lambda):
                rest += [getattr(part, field.name) for field in fields(part)]
