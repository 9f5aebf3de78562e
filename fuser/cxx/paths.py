"""Whether a functor gives every result on every path; C++ leaves open what happens where it does not.

Only what certainly goes wrong on a path that can be seen in the text is a problem:

- a branch is a path of its own where data decides, and there are data for all that is decided on the path;
- of the branches that types, constants or counters decide, one may be meant;
- a loop runs at least once, and what it does in any round counts; one without an end is left by ``break`` alone;
- a ``switch`` without ``default`` takes one of its cases;
- whatever mentions an output may write it: an assignment, a call that takes it, a lambda, a reference;
- an operand is only read: that is wrong where nothing before it, in the order of the text, can have written it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Set
from contextlib import contextmanager
from functools import lru_cache

from fuser.cxx.conditions import Conditions, mentioned
from fuser.cxx.functor import Functor
from fuser.cxx.nodes import (
    NUMBERS,
    Assign,
    Binary,
    Block,
    Call,
    Expression,
    FunctionDefinition,
    Increment,
    Name,
    NamedType,
    ReferenceType,
    Statement,
    Unary,
    walk,
)
from fuser.cxx.preprocess import Place, Problem
from fuser.cxx.statements import (
    Break,
    Condition,
    Continue,
    Declarator,
    DoWhile,
    Evaluate,
    For,
    If,
    Program,
    RangeFor,
    Return,
    Switch,
    While,
)
from fuser.cxx.syntax import parse_program
from fuser.errors import UntranslatableError

__all__ = ["check_functor"]

# Calls of them do not come back; of the second kind, where what they claim is no question of data.
_TRAPS = frozenset({"__trap", "__builtin_trap", "__builtin_unreachable", "unreachable", "abort", "exit", "terminate"})
_CLAIMS = frozenset({"assert", "__assume", "__builtin_assume"})
# What is missing beside outputs: the value that a function returns.
_RESULT = "return"
# More than these are taken together as what they have in common.
_MOST_WAYS = 16

# What is missing at some point of the text, and the ways on which it is: which conditions hold (by number), or do not
# (with a minus).
_Ways = frozenset[frozenset[int]]
_Missing = dict[str, _Ways]
# None: no path comes there.
Missing = _Missing | None


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
    outputs = tuple(parameter.name for parameter in functor.outputs if parameter.name)
    problems: list[Problem] = []
    traps = set(_TRAPS)
    try:
        program = parse_program(functor)
        for function in (function for overloads in program.functions.values() for function in overloads):
            wanted = outputs if function is program.entry else ()
            if not wanted and _ends_in_return(function.body):
                # Every path that comes to its end returns.
                continue
            paths = _Paths(program, function, wanted, traps)
            problems += paths.problems
            if paths.ends is None and not _returns(function.body):
                traps.add(function.name)
    except (UntranslatableError, RecursionError):
        return None
    return min(problems, default=None)


class _Paths:
    # What goes wrong on the paths through one function.
    def __init__(
        self, program: Program, function: FunctionDefinition, outputs: tuple[str, ...], traps: Set[str]
    ) -> None:
        assert function.body is not None, "only definitions are kept"
        self.problems: list[Problem] = []
        self.traps = traps
        self.conditions = Conditions(program, function)
        inside = list(walk(function.body, into_lambdas=False))
        # In an inner scope their names mean something else.
        hidden = {item.name for item in inside if isinstance(item, Declarator)}
        self.outputs = frozenset(outputs) - hidden
        # Types of numbers. With operators of the text's own, what an operand is for is theirs.
        self.numbers = NUMBERS | {"auto"} | {item.name for item in function.template if item.type is None}
        defined = (item for item in walk((program.globals, *program.functions.values())))
        names = (item.name for item in defined if isinstance(item, FunctionDefinition))
        self.has_operators = any(name.startswith("operator") for name in names)
        # Outputs that something before may have written, in the order of the text.
        self.touched: set[str] = set()
        # What is missing at each break out of an open loop or switch, and at each continue in an open loop, and whether
        # a path certainly comes there; the first list is for those outside all of them, which no compiler takes.
        self.breaks: list[list[tuple[_Missing, bool]]] = [[]]
        self.rounds: list[list[tuple[_Missing, bool]]] = [[]]
        # Open branches that data do not decide.
        self.doubts = 0
        # The conditions on which data decide; their numbers begin at 1.
        self.tests: list[Expression] = []
        anyway: _Ways = frozenset({frozenset()})
        missing = dict.fromkeys(self.outputs, anyway)
        result = function.result.target if isinstance(function.result, ReferenceType) else function.result
        kind = result.name if isinstance(result, NamedType) and not result.member else ""
        returns_value = any(isinstance(item, Return) and item.value is not None for item in inside)
        # An alias, a member of a template or a helper's parameter may be void.
        own = self.numbers if function is program.entry else NUMBERS
        is_value = returns_value or (kind != "auto" and not own.isdisjoint(kind.split()))
        # Nobody uses what an entry with outputs returns: it is made void, or returns something at its end.
        if kind != "void" and is_value and (kind == "auto" or not outputs):
            missing[_RESULT] = anyway
        self.name = function.name
        self.ends = self.follow(function.body, missing)
        place = function.body.statements[-1].place if function.body.statements else function.body.place
        self.leave(place, self.ends)

    def leave(self, place: Place, missing: Missing) -> None:
        names = sorted(name for name, ways in (missing or {}).items() if any(map(self.happens, ways)))
        if _RESULT in names:
            self.problems.append(Problem(place, f"{self.name!r} returns nothing on a path that ends after this"))
        elif names:
            shown = ", ".join(map(repr, names))
            self.problems.append(Problem(place, f"nothing was assigned to {shown} on a path that ends here"))

    def happens(self, way: frozenset[int]) -> bool:
        return self.conditions.meet([(self.tests[abs(number) - 1], number > 0) for number in way])

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
                self.leave(place, _without(self.use(value, missing), {_RESULT}))
                return None
            case Break() | Continue():
                open_here = self.breaks if isinstance(statement, Break) else self.rounds
                open_here[-1].append((missing, not self.doubts))
                return None
            case Evaluate() if self.stops(statement):
                return None
            case If(_, condition, yes, no):
                missing, value = self.use(condition, missing), condition.value
                test = self.test(value)
                with self.doubting(test):
                    after = [self.follow(yes, _assume(missing, test)), self.follow(no, _assume(missing, -test))]
                if test:
                    return _both(after)
                # It may be the branch that is meant, and it may not.
                chosen = after if no else after[:1]
                return None if None in chosen and _returns((yes, no)) else _either(after if None in chosen else chosen)
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
                return _without(missing, {name})
        return self.use(statement, missing)

    def use(self, item: object, missing: _Missing) -> _Missing:
        # What is missing after something was evaluated.
        written = self.written(item)
        for part in self.reads(item):
            if part.name in self.outputs - self.touched - written:
                message = f"{part.name!r} is read before anything was assigned to it"
                self.problems.append(Problem(part.place, message))
        self.touched |= written
        return _without(missing, mentioned(item))

    @contextmanager
    def doubting(self, test: int) -> Iterator[None]:
        # Where data do not decide, nothing is certain of the paths through the branches.
        count = len(self.problems)
        self.doubts += not test
        yield
        self.doubts -= not test
        if not test:
            del self.problems[count:]

    def test(self, condition: Expression) -> int:
        # The number of a condition; 0 where data do not decide it.
        if not self.conditions.decides(condition):
            return 0
        self.tests.append(condition)
        return len(self.tests)

    def stops(self, item: object) -> bool:
        for part in walk(item, into_lambdas=False):
            if isinstance(part, Call) and isinstance(part.function, Name):
                claims = part.function.name in _CLAIMS and not any(map(self.conditions.decides, part.arguments))
                if claims or part.function.name in self.traps:
                    return True
        return False

    def loop(self, body: Statement, head: object, missing: _Missing, condition: Expression | None) -> Missing:
        # What a round writes, an earlier one may have written.
        self.touched |= self.written((head, body))
        missing = _without(missing, mentioned(head))
        self.breaks.append([])
        self.rounds.append([])
        end, rounds, breaks = self.follow(body, missing), self.rounds.pop(), self.breaks.pop()
        if condition is None or self.conditions.always(condition):
            return _either([path for path, _ in breaks]) if any(is_sure for _, is_sure in breaks) else None
        return _either([end, *(path for path, is_sure in (*breaks, *rounds) if is_sure or end is not None)])

    def switch(self, statement: Switch, missing: _Missing) -> Missing:
        value, sections = statement.condition.value, statement.sections
        labels = [label for items, _ in sections for label in items if label is not None]
        tests: dict[Expression | None, int] = {
            label: self.test(Binary(label.place, "==", value, label)) for label in labels
        }
        test = self.test(value)
        end: Missing = None
        with self.doubting(test):
            self.breaks.append([])
            for items, statements in sections:
                start = missing
                if None in items:
                    for label in set(labels).difference(items):
                        start = _assume(start, -tests[label])
                elif len(items) == 1:
                    start = _assume(start, tests[items[0]])
                end = self.follow(Block(statement.place, statements), _both([start, end]))
        breaks = self.breaks.pop()
        if test:
            return _both([end, *(path for path, is_sure in breaks if is_sure)])
        return None if _returns(sections) else _either([end, *(path for path, _ in breaks)])

    def written(self, item: object) -> set[str]:
        # The names that may get a value.
        names = Counter(part.name for part in walk(item, unevaluated=False) if isinstance(part, Name))
        return set(names - Counter(part.name for part in self.reads(item)))

    def reads(self, item: object) -> Iterator[Name]:
        # The names whose values are needed where they stand; what a lambda needs, it needs later.
        if isinstance(item, Name):
            yield item
        for part in () if self.has_operators else walk(item, into_lambdas=False, unevaluated=False):
            match part:
                case Binary(_, operator, left, right) if operator != ",":
                    operands: list[Expression | None] = [left, right]
                case Unary(_, operator, operand) if operator != "&":
                    operands = [operand]
                case Increment(_, _, operand, _) | Condition(_, _, operand, _):
                    operands = [operand]
                case Assign(_, operator, target, value):
                    operands = [target, value] if operator else [value]
                case Declarator(_, _, NamedType(_, name, (), ""), value) if not self.numbers.isdisjoint(name.split()):
                    # A class may keep a reference.
                    operands = [value]
                case _:
                    continue
            yield from (operand for operand in operands if isinstance(operand, Name))


def _ends_in_return(body: Block | None) -> bool:
    return body is not None and bool(body.statements) and isinstance(body.statements[-1], Return)


def _returns(item: object) -> bool:
    return any(isinstance(part, Return) for part in walk(item, into_lambdas=False))


def _assume(missing: _Missing, fact: int) -> _Missing:
    # What is missing where a test was made; 0: where none was.
    return {name: frozenset(way | {fact} for way in ways) for name, ways in missing.items()} if fact else missing


def _both(paths: list[Missing]) -> Missing:
    # Each is a path: what one of them misses is missing.
    found: Missing = None
    for path in paths:
        if path is not None:
            found = {} if found is None else found
            found |= {name: _join(found.get(name, frozenset()) | ways) for name, ways in path.items()}
    return found


def _either(paths: list[Missing]) -> Missing:
    # One of them is the path, who knows which: what all of them miss is missing.
    found: Missing = None
    for path in paths:
        if found is None:
            found = path
        elif path is not None:
            found = {
                name: _join(frozenset(one | other for one in ways for other in path[name]))
                for name, ways in found.items()
                if name in path
            }
    return found


def _join(ways: _Ways) -> _Ways:
    # The same ways in fewer words: two that go apart once and come together, those beside which another asks for less.
    for way in ways:
        for fact in way:
            if (other := way - {fact} | {-fact}) in ways:
                return _join(ways - {way, other} | {way - {fact}})
    fewest = frozenset(way for way in ways if not any(other < way for other in ways))
    return fewest if len(fewest) <= _MOST_WAYS else frozenset({frozenset.intersection(*fewest)})


def _without(missing: _Missing, names: Set[str]) -> _Missing:
    return {name: ways for name, ways in missing.items() if name not in names}
