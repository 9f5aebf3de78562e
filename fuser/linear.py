"""Whether sums pass through a group: f(a + b, c) is f(a, c) + f(b, c), but for rounding.

Certain from the texts or not at all. Linear are a sum or a difference of what is linear, its product with or quotient
by what does not depend on the summed inputs, its sign, and a variable of a floating type that holds it.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import lru_cache

from fuser.cxx.functor import Functor, Role
from fuser.cxx.nodes import (
    NUMBERS,
    ArrayType,
    Assign,
    Binary,
    Call,
    Cast,
    Expression,
    Increment,
    InitList,
    Lambda,
    Member,
    Name,
    NamedType,
    Statement,
    TypeSyntax,
    Unary,
    walk,
)
from fuser.cxx.statements import Declaration, Declarator, Evaluate, Return
from fuser.cxx.syntax import parse_program
from fuser.dtypes import is_continuous
from fuser.errors import FunctorError, UntranslatableError
from fuser.graph import FusionGroup

__all__ = ["follow_sums", "is_linear", "is_sum"]


@lru_cache(1024)
def follow_sums(group: FusionGroup, summed: frozenset[int]) -> tuple[tuple[bool, ...], int]:
    """Follow some inputs through a group whose tensors are all floating or complex.

    Args:
        group: the group.
        summed: inputs, all together.

    Returns:
        Which outputs depend on them, and -1; or nothing, and the first application that is not linear in what depends
        on them.
    """
    values = [index in summed for index in range(len(group.inputs))]
    for index, item in enumerate(group.applications):
        if item.function.is_index:
            values.append(False)
            continue
        if item.function.reshapes:
            return (), index
        dtypes = [dtype for dtype in item.function.out_dtypes if dtype is not None]
        is_real = all(is_continuous(dtype) for dtype in dtypes)
        taken = tuple(values[value] for value in item.tensors)
        if any(values[value] for value in item.scalars) or (any(taken) and not is_real):
            return (), index
        try:
            values += _follow_functor(item.function.functor, taken)
        except (_NotLinearError, FunctorError, UntranslatableError, RecursionError):
            return (), index
    return tuple(values[value] for value in group.outputs), -1


def is_linear(functor: Functor, slot: int) -> bool:
    """Whether all that a functor makes is linear in one of its tensors, the slot-th, but for rounding."""
    try:
        return all(_follow_functor(functor, tuple(at == slot for at in range(len(functor.tensors)))))
    except (_NotLinearError, FunctorError, UntranslatableError, RecursionError):
        return False


@lru_cache(1024)
def is_sum(combine: Functor) -> bool:
    """Whether a functor adds each of its first tensors to one of its last ones, and does nothing else."""
    count = combine.num_outputs
    names = [parameter.name for parameter in combine.tensors]
    pairs = [{names[slot], names[count + slot]} for slot in range(count)]
    try:
        entry = parse_program(combine).entry
    except (FunctorError, UntranslatableError):
        return False
    match entry.body.statements if entry.body else ():
        case (Return(_, Binary(_, "+", Name(_, left), Name(_, right))),) if not combine.outputs:
            return pairs == [{left, right}]
        case statements:
            found = {}
            for statement in statements:
                match statement:
                    case Evaluate(_, Assign(_, "", Name(_, name), Binary(_, "+", Name(_, left), Name(_, right)))):
                        found[name] = {left, right}
                    case _:
                        return False
            return len(statements) == count and [found.get(item.name) for item in combine.outputs] == pairs


class _NotLinearError(Exception):
    pass


@lru_cache(4096)
def _follow_functor(functor: Functor, taken: tuple[bool, ...]) -> tuple[bool, ...]:
    if not any(taken):
        return (False,) * functor.num_outputs
    program = parse_program(functor)
    body, result = program.entry.body, program.entry.result
    return _Sums(functor, taken, program.externals).run(body.statements if body else (), result)


class _Sums:
    # Which variables depend on the summed inputs, statement by statement; raises for what is not linear in them.
    def __init__(self, functor: Functor, taken: Sequence[bool], externals: Container[str]) -> None:
        self.externals = externals
        self.outputs = [parameter.name for parameter in functor.outputs]
        self.real = {functor.template_parameters[0], "auto", "float", "double"}
        given = iter(taken)
        self.variables: dict[str, bool] = {}
        # Those that hold a real number.
        self.reals: set[str] = set()
        for item in functor.parameters:
            is_summed = item.role is Role.TENSOR and next(given, False)
            self.declare(item.name, is_real=item.type in self.real, is_summed=is_summed)

    def declare(self, name: str, *, is_real: bool, is_summed: bool) -> None:
        if is_real:
            self.reals.add(name)
        self.assign(name, is_summed=is_summed)

    def assign(self, name: str, *, is_summed: bool) -> None:
        if is_summed and name not in self.reals:
            raise _NotLinearError
        self.variables[name] = is_summed

    def run(self, statements: Sequence[Statement], result: TypeSyntax) -> tuple[bool, ...]:
        for statement in statements:
            match statement:
                case Declaration(_, declarators):
                    for item in declarators:
                        self.check_apart(item)
                        is_real = self.is_real(item.type) and not item.bindings
                        self.declare(item.name, is_real=is_real, is_summed=self.read(item.value))
                case Evaluate(_, Assign(_, "" | "+" | "-" as operator, Name(_, name), value)) if name in self.variables:
                    is_summed = self.read(value)
                    if operator and is_summed is not self.variables[name]:
                        raise _NotLinearError
                    self.assign(name, is_summed=is_summed)
                case Return() if self.outputs:
                    # What it returns beside them is nobody's.
                    break
                case Return(_, Expression() as value):
                    return (self.convert(result, self.read(value)),)
                case Return():
                    break
                case _:
                    raise _NotLinearError
        return tuple(self.variables[name] for name in self.outputs)

    def read(self, expression: Expression | None) -> bool:
        match expression:
            case Name(_, name):
                return self.variables.get(name, False)
            case Unary(_, "-" | "+", operand):
                return self.read(operand)
            case Binary(_, "+" | "-", left, right):
                # What does not depend on the parts of a sum would be added to each.
                is_summed = self.read(left)
                if self.read(right) is not is_summed:
                    raise _NotLinearError
                return is_summed
            case Binary(_, "*" | "/" as operator, left, right):
                of_left, of_right = self.read(left), self.read(right)
                if of_right and (of_left or operator == "/"):
                    raise _NotLinearError
                return of_left or of_right
            case Cast(_, kind, (value,)):
                return self.convert(kind, self.read(value))
        self.check_constant(expression)
        return False

    def convert(self, kind: TypeSyntax, is_summed: bool) -> bool:
        if is_summed and not self.is_real(kind):
            raise _NotLinearError
        return is_summed

    def is_real(self, kind: TypeSyntax) -> bool:
        return isinstance(kind, NamedType) and kind.name in self.real and not kind.arguments

    def check_apart(self, item: Declarator) -> None:
        # A new variable must be a number, so that what is written to others does not reach it, nor the other way round.
        kind = item.type.element if isinstance(item.type, ArrayType) else item.type
        self.check_number(kind)
        for part in walk(item.value) if kind == NamedType(kind.place, "auto") else ():
            match part:
                case Cast(_, made):
                    self.check_number(made)
                case InitList() | Unary(_, "&") | Call(_, Member() | Lambda()):
                    raise _NotLinearError
                case Call(_, Name(_, name)) if name not in self.externals:
                    raise _NotLinearError

    def check_number(self, kind: TypeSyntax) -> None:
        if not isinstance(kind, NamedType) or not (kind.name in self.real or NUMBERS.issuperset(kind.name.split())):
            raise _NotLinearError

    def check_constant(self, item: object) -> None:
        # Of anything else, the parts must not depend on a summed input, nor change a variable.
        for part in walk(item):
            if isinstance(part, Assign | Increment | Lambda) or (
                isinstance(part, Name) and self.variables.get(part.name)
            ):
                raise _NotLinearError
