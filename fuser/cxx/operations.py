"""How many arithmetic operations a functor's text makes for one element.

One for each ``+ - * / %`` on values, also in an assignment, and for each call of a function that the text does not
define; two for a fused multiply-add. Signs, comparisons, conversions, indices and what counts the rounds of a loop are
none. Of branches the longest counts. A loop counts as often as the text says, and once where only data can say.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from fuser.cxx.functor import Functor
from fuser.cxx.nodes import (
    Assign,
    Binary,
    Block,
    Call,
    Conditional,
    Expression,
    FunctionDefinition,
    Increment,
    Index,
    Lambda,
    Literal,
    Member,
    Name,
    Statement,
    Unary,
    number_in,
    parts,
    walk,
)
from fuser.cxx.statements import Declaration, Declarator, For, If, Program, Return, Struct, Switch
from fuser.cxx.syntax import parse_program

__all__ = ["count_operations"]

_ARITHMETIC = frozenset("+-*/%")
_MULTIPLY_ADDS = frozenset({"fma", "fmaf", "__fmaf_rn", "__fma_rn"})


@lru_cache(4096)
def count_operations(functor: Functor) -> int:
    """Count the operations of one application to one element.

    Raises:
        FunctorError: the text does not parse.
        UntranslatableError: it holds something that fuser does not follow, such as ``goto``.
    """
    program = parse_program(functor)
    return _Counter(program).function(program.entry)


class _Counter:
    def __init__(self, program: Program) -> None:
        nodes = list(walk((program.globals, *program.functions.values())))
        # Functions by name: the text's own, members of its classes, and lambdas.
        self.functions: dict[str, list[FunctionDefinition]] = {
            name: list(items) for name, items in program.functions.items()
        }
        for node in nodes:
            for item in node.functions if isinstance(node, Struct) else ():
                self.functions.setdefault(item.name, []).append(item)
            if isinstance(node, Declarator) and isinstance(node.value, Lambda):
                self.functions.setdefault(node.name, []).append(node.value.function)
        self.open: set[int] = set()
        # Integers that the text gives a name and never changes.
        targets = [node.target for node in nodes if isinstance(node, Assign | Increment)]
        changed = {target.name for target in targets if isinstance(target, Name)}
        named = [node for node in nodes if isinstance(node, Declarator) and node.name not in changed]
        self.constants: dict[str, int | None] = {}
        for node in named:
            value = self.value(node.value)
            self.constants[node.name] = None if node.name in self.constants else value

    def function(self, function: FunctionDefinition) -> int:
        # One that calls itself counts once.
        if id(function) in self.open:
            return 0
        self.open.add(id(function))
        made = self.count(function.body)
        self.open.discard(id(function))
        return made

    def count(self, item: object) -> int:
        match item:
            case Block(_, statements):
                return self.sequence(statements)
            case If(_, condition, yes, no):
                return self.count(condition) + max(self.count(yes), self.count(no))
            case Conditional(_, condition, one, other):
                return self.count(condition) + max(self.count(one), self.count(other))
            case Switch(_, condition, sections):
                return self.count(condition) + max((self.sequence(body) for _, body in sections), default=0)
            case For(_, _, _, _, body):
                return self.rounds(item) * self.count(body)
            case Binary(_, operator, left, right):
                return (operator in _ARITHMETIC) + self.count(left) + self.count(right)
            case Assign(_, operator, target, value):
                return (operator in _ARITHMETIC) + self.count(target) + self.count(value)
            case Index(_, array, _):
                return self.count(array)
            case Call(_, called, arguments):
                return self.call(called, len(arguments)) + self.count(arguments)
            case Lambda() | FunctionDefinition() | Struct():
                # Counts where it is called.
                return 0
        return sum(map(self.count, parts(item)))

    def sequence(self, statements: Sequence[Statement]) -> int:
        made = 0
        for index, item in enumerate(statements):
            if isinstance(item, If) and item.no is None and _leaves(item.yes):
                # What follows is the other branch.
                rest = self.sequence(statements[index + 1 :])
                return made + self.count(item.condition) + max(self.count(item.yes), rest)
            made += self.count(item)
        return made

    def call(self, called: Expression, arguments: int) -> int:
        match called:
            case Lambda(_, _, _, function):
                return self.function(function)
            case Name(_, name) | Member(_, _, name):
                own = self.functions.get(name, [])
                fitting = [item for item in own if len(item.parameters) == arguments and item.body] or own
                if fitting:
                    return max(map(self.function, fitting))
                return 0 if isinstance(called, Member) else 2 if name in _MULTIPLY_ADDS else 1
        return self.count(called)

    def rounds(self, loop: For) -> int:
        match loop.start, loop.condition, loop.step:
            case (
                Declaration(_, (Declarator(_, name, _, first),)),
                Binary(_, "<" | "<=" | ">" | ">=" | "!=" as operator, Name(_, tested), end),
                Increment(_, sign, Name(_, stepped)) | Assign(_, sign, Name(_, stepped)),
            ) if name == tested == stepped and sign in {"++", "--", "+", "-"}:
                size = self.value(loop.step.value) if isinstance(loop.step, Assign) else 1
                begin, beyond = self.value(first), self.value(end)
                if begin is None or beyond is None or not size:
                    return 1
                step = -size if "-" in sign else size
                beyond += (operator in {"<=", ">="}) * (1 if step > 0 else -1)
                # Upwards, whatever the sign of the step.
                return max(0, -((begin - beyond) // step))
        return 1

    def value(self, item: object) -> int | None:
        # An integer that the text says.
        match item:
            case Literal(_, text):
                number = number_in(text)
                return number if isinstance(number, int) else None
            case Name(_, name):
                return self.constants.get(name)
            case Unary(_, "-", operand):
                inner = self.value(operand)
                return None if inner is None else -inner
            case Binary(_, "+" | "-" | "*" as operator, left, right):
                one, other = self.value(left), self.value(right)
                if one is None or other is None:
                    return None
                return one + other if operator == "+" else one - other if operator == "-" else one * other
        return None


def _leaves(statement: Statement) -> bool:
    last = statement.statements[-1] if isinstance(statement, Block) and statement.statements else statement
    return isinstance(last, Return)
