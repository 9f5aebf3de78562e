"""Calls: which function is meant, what its parameters are bound to, what its lanes return."""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx

from fuser.cxx.functor import MATH_FUNCTIONS
from fuser.cxx.nodes import (
    ArrayType,
    Assign,
    Binary,
    Call,
    Cast,
    Conditional,
    Expression,
    Index,
    InitList,
    Lambda,
    Literal,
    Member,
    Name,
    NamedType,
    ReferenceType,
    SizeOf,
    Step,
    TypeSyntax,
    Unary,
)
from fuser.cxx.statements import (
    Block,
    Function,
    Parameter,
)
from fuser.eager.evaluate import Evaluator
from fuser.eager.masks import Frame, any_lane, both_of
from fuser.eager.math import functions
from fuser.eager.resolve import SubstitutionError
from fuser.eager.stack import MAX_DEPTH, deep_stack
from fuser.eager.storage import (
    Closure,
    Fixed,
    Location,
    NoTranslation,
    Scope,
    Thing,
    choose,
    make_location,
    zero_of,
)
from fuser.eager.types import (
    AUTO,
    VOID,
    ArrayOf,
    ClassType,
    CppType,
    PointerTo,
    describe_type,
)
from fuser.eager.values import PLACE, Value, constant, convert

__all__ = ["IGNORED", "Caller", "DataDependentError"]

# Functions that write through pointers, and how many of them (the last arguments).
_WRITERS = {"frexp": 1, "modf": 1, "remquo": 1, "sincos": 2, "sincospi": 2}
_IN_STD = frozenset({"max", "min", "clamp"})
# Functions that say something and compute nothing.
IGNORED = frozenset({"assert", "printf", "__builtin_assume", "__syncthreads"})


class DataDependentError(Exception):
    """A graph cannot hold what is asked for: it takes the values of the tensors. Says what and where."""


class Caller(Evaluator):
    """Calls functions."""

    # Given back when the program has run.
    resources: ExitStack
    graph: fx.Graph | None

    @abstractmethod
    def run_block(self, node: Block) -> None:
        """Run the statements of a block."""

    def evaluate(self, node: Expression) -> Thing:
        """Return what an expression is worth."""
        self.at(node.place)
        found: Thing = _EVALUATE[type(node)](self, node)
        return found

    def data_dependent(self, why: str) -> DataDependentError:
        """Return the exception for what needs values and stands in a graph."""
        line, column = PLACE.get() or (0, 0)
        return DataDependentError(f"line {line}, column {column}: {why}")

    def _call(self, node: Call) -> Thing:
        function = node.function
        if isinstance(function, Member):
            return self._call_member(node, function)
        if isinstance(function, Name) and function.member:
            return self._call_static(node, function)
        if (isinstance(function, Name) and not function.in_std) or isinstance(function, Lambda):
            closure = self.scope.find(function.name) if isinstance(function, Name) else None
            if isinstance(function, Lambda) or closure is not None:
                return self._call_closure(node, function)
        if not isinstance(function, Name):
            return self._call_closure(node, function)
        candidates = self.program.functions.get(function.name, ())
        # What fuser's own texts define under such a name, torch has.
        is_ours = function.name.startswith("fuser_") and functions.is_known(function.name)
        if candidates and not function.in_std and not is_ours:
            explicit = [
                self.resolve(item) if isinstance(item, TypeSyntax) else self.value(item) for item in function.arguments
            ]
            operands = [self.operand(item) for item in node.arguments]
            self.at(node.place)
            if explicit or not self._is_shadowed(function.name, operands):
                return self.call_functions(candidates, explicit, operands, self.globals)
        return self._call_builtin(node, function)

    def _is_shadowed(self, name: str, operands: Sequence[Location]) -> bool:
        # A function that is no template is preferred where it takes just these types.
        kinds = {operand.type for operand in operands}
        is_function = name in MATH_FUNCTIONS and name == self.program.entry.name
        return is_function and len(kinds) == 1 and kinds <= {torch.float32, torch.float64}

    def operand(self, node: Expression) -> Location:
        """Return an argument as a location: itself if it has one, for parameters that are references."""
        return self.locate(node)

    def _call_closure(self, node: Call, function: Expression) -> Thing:
        closure = self.evaluate(function)
        if not isinstance(closure, Closure):
            raise NoTranslation("a call of something that is no function")
        operands = [self.operand(item) for item in node.arguments]
        self.at(node.place)
        return self.call_functions((closure.syntax.function,), (), operands, closure.scope)

    def _call_member(self, node: Call, function: Member) -> Thing:
        base = self.locate(function.value)
        kind = base.type
        if isinstance(kind, ClassType):
            operands = [self.operand(item) for item in node.arguments]
            self.at(node.place)
            return self.call_functions(kind.named(function.name), (), operands, self._inside(base, kind))
        if isinstance(kind, torch.dtype) and kind.is_complex and function.name in {"real", "imag"}:
            return self._complex_part(node, base, function.name)
        raise NoTranslation(f"the member {function.name!r} of {describe_type(kind)}")

    def _inside(self, base: Location, kind: ClassType) -> Scope:
        # What the functions of an object see.
        fields = {name: base.part(number) for number, name in enumerate(kind.fields)}
        return Scope(self.globals, {**dict(kind.bindings), **fields})

    def _call_static(self, node: Call, function: Name) -> Thing:
        kind = self.resolve(NamedType(function.place, function.name, function.arguments))
        if not isinstance(kind, ClassType):
            raise NoTranslation(f"the member {function.member!r} of {describe_type(kind)}")
        operands = [self.operand(item) for item in node.arguments]
        self.at(node.place)
        return self.call_functions(kind.named(function.member), (), operands, Scope(self.globals, dict(kind.bindings)))

    def construct(self, kind: ClassType, operands: Sequence[Location]) -> Thing:
        """Return an object as its constructor makes it."""
        made = make_location(kind, self.frames[-1])
        made.store(self, self.fill(kind, []))
        self.call_functions(kind.named(kind.struct.name), (), operands, self._inside(made, kind))
        return made.load(self)

    def call_operator(self, operator: str, operands: Sequence[Location]) -> Thing | None:
        """Call the functor's own operator; None if it defines none for an object."""
        first = operands[0].type
        if isinstance(first, ClassType) and first.named(f"operator{operator}"):
            scope = self._inside(operands[0], first)
            return self.call_functions(first.named(f"operator{operator}"), (), operands[1:], scope)
        candidates = self.program.functions.get(f"operator{operator}", ())
        is_ours = any(isinstance(item.type, ClassType) for item in operands)
        return self.call_functions(candidates, (), operands, self.globals) if candidates and is_ours else None

    def _complex_part(self, node: Call, base: Location, name: str) -> Thing:
        whole = base.load(self)
        assert isinstance(whole, Value), "complex numbers are numbers"
        if not node.arguments:
            return functions.call(name, [whole])
        given = convert(self.value(node.arguments[0]), whole.dtype.to_real())
        real, imaginary = functions.call("real", [whole]), functions.call("imag", [whole])
        pair = [given, imaginary] if name == "real" else [real, given]
        base.store(self, functions.call("complex", pair))
        return constant(0, torch.int32)

    def _call_builtin(self, node: Call, function: Name) -> Thing:
        name = function.name
        if name in IGNORED:
            return constant(0, torch.int32)
        writers = next((count for base, count in _WRITERS.items() if name in {base, f"{base}f"}), 0)
        if name in {"nan", "nanf"}:
            return functions.call(name, [])
        given = list(node.arguments[: len(node.arguments) - writers])
        values = [self.value(item) for item in given]
        if function.arguments and isinstance(function.arguments[0], TypeSyntax):
            kind = self.resolve(function.arguments[0])
            values = [convert(value, kind) for value in values] if isinstance(kind, torch.dtype) else values
        targets = [self._target(self._pointer(item)) for item in node.arguments[len(given) :]]
        self.at(node.place)
        try:
            if not writers:
                return functions.call(f"std::{name}" if function.in_std and name in _IN_STD else name, values)
            results = functions.call_with_results(name, values)
        except KeyError:
            raise NoTranslation(f"the function {name!r}") from None
        for target, result in zip(targets, results[len(results) - writers :], strict=True):
            self.write(target, result)
        return results[0] if len(results) > writers else constant(0, torch.int32)

    def call_functions(
        self, candidates: Sequence[Function], explicit: Sequence[Any], operands: Sequence[Location], scope: Scope
    ) -> Thing:
        """Call the one of several overloads that fits."""
        fits = [(self.fit(item, explicit, operands, scope), item) for item in candidates if item.body is not None]
        found = sorted(((*fit, function) for fit, function in fits if fit is not None), key=operator.itemgetter(0))
        if not found or (len(found) > 1 and found[0][0] == found[1][0]):
            # C++ would order templates that fit alike by how special they are.
            name = candidates[0].name if candidates else "this function"
            raise NoTranslation(f"the call of {name!r} with these arguments")
        _, bindings, function = found[0]
        return self.call_function(function, bindings, operands, scope)

    def fit(
        self, function: Function, explicit: Sequence[Any], operands: Sequence[Location], scope: Scope
    ) -> tuple[int, dict[str, Any]] | None:
        """Return how badly arguments fit a function (0: exactly), and its template arguments; None if not at all."""
        parameters = function.parameters
        needed = sum(parameter.default is None for parameter in parameters)
        if not needed <= len(operands) <= len(parameters):
            return None
        names = {item.name for item in function.template}
        bindings: dict[str, Any] = dict(zip((item.name for item in function.template), explicit, strict=False))
        for parameter, operand in zip(parameters, operands, strict=False):
            if not self.deduce(parameter.type, operand.type, names - set(list(bindings)[: len(explicit)]), bindings):
                return None
        before, self.scope = self.scope, Scope(scope, bindings)
        try:
            for item in function.template:
                if item.type is not None:
                    self.resolve(item.type)
                if item.name not in bindings and item.default is not None:
                    bindings[item.name] = self.argument(item.default)
                elif item.name not in bindings:
                    return None
            self.resolve(function.result)
            cost = 2 * len(function.template) if not function.template else 1
            for parameter, operand in zip(parameters, operands, strict=False):
                rating = self._rate(parameter, operand)
                if rating is None:
                    return None
                cost += 2 * rating
        except (SubstitutionError, NoTranslation):
            if len(self.program.functions.get(function.name, ())) > 1:
                return None
            raise
        finally:
            self.scope = before
        return cost, bindings

    def _rate(self, parameter: Parameter, operand: Location) -> int | None:
        # 0: the same type; 1: a conversion; None: impossible.
        spelled = parameter.type
        kind = self._parameter_type(parameter, operand)
        have = operand.type
        if kind is AUTO or kind == have:
            is_bound = isinstance(spelled, ReferenceType) and not spelled.is_const and kind is not AUTO
            return None if is_bound and isinstance(operand, Fixed) and not isinstance(kind, ClassType) else 0
        if isinstance(kind, PointerTo) and isinstance(have, ArrayOf | PointerTo):
            return 0 if kind.element in (have.element, VOID) else None
        if isinstance(kind, torch.dtype) and isinstance(have, torch.dtype):
            if isinstance(spelled, ReferenceType) and not spelled.is_const:
                return None
            is_promotion = (have, kind) == (torch.float32, torch.float64) or (
                kind is torch.int32 and not have.is_floating_point and have.itemsize < 4
            )
            return 1 if is_promotion else 2
        return None

    def _parameter_type(self, parameter: Parameter, operand: Location) -> CppType:
        spelled = parameter.type
        if isinstance(spelled, ArrayType):
            # An array parameter is a pointer.
            return PointerTo(self.resolve(spelled.element))
        if isinstance(spelled, ReferenceType) and isinstance(spelled.target, ArrayType) and spelled.target.size is None:
            return operand.type
        return self.resolve(spelled)

    def call_function(
        self, function: Function, bindings: dict[str, Any], operands: Sequence[Location], scope: Scope
    ) -> Thing:
        """Run a function's body for the lanes that are there and return its result."""
        before, self.scope = self.scope, Scope(scope, bindings)
        result = self.resolve(function.result)
        nothing = constant(0, torch.int32) if result in (AUTO, VOID) else zero_of(result)
        is_idle = self.is_dry and result is not AUTO
        is_recursion = function in self.running
        # A recursion ends where no lane is left.
        if is_idle or (is_recursion and self.graph is None and not any_lane(self.mask.data)):
            self.scope = before
            return nothing
        if is_recursion:
            self._check_depth(function)
            self.resources.enter_context(deep_stack)
        frame = Frame("function", self.mask)
        frame.result = result
        self.running.append(function)
        self.frames.append(frame)
        self._bind(function, operands)
        assert function.body is not None, "candidates have one"
        self.run_block(function.body)
        self.frames.pop()
        self.running.pop()
        self.scope = before
        return self.result_of(frame)

    def _check_depth(self, function: Function) -> None:
        if len(self.running) >= MAX_DEPTH:
            if self.graph is not None:
                raise self.data_dependent(f"{function.name!r} calls itself as long as data says")
            raise RecursionError(f"{function.name!r} calls itself more than {MAX_DEPTH} times")

    def _bind(self, function: Function, operands: Sequence[Location]) -> None:
        for number, parameter in enumerate(function.parameters):
            if number < len(operands):
                location = self._bind_parameter(parameter, operands[number])
            else:
                assert parameter.default is not None, "fit() counted"
                kind = self.resolve(parameter.type)
                location = make_location(kind, self.frames[-1])
                location.store(self, self.initialise(kind, parameter.default))
            if parameter.name:
                self.scope.names[parameter.name] = location

    def _bind_parameter(self, parameter: Parameter, operand: Location) -> Location:
        spelled = parameter.type
        kind = self._parameter_type(parameter, operand)
        if isinstance(spelled, ReferenceType) and (kind is AUTO or kind == operand.type):
            return operand
        thing = self.load(operand)
        if isinstance(thing, Closure):
            return Fixed(thing)
        if kind is AUTO:
            kind = thing.dtype if isinstance(thing, Value) else thing.type
        location = make_location(kind, self.frames[-1])
        location.store(self, self.convert(thing, kind))
        return location

    def result_of(self, frame: Frame) -> Thing:
        """Return what a function's lanes returned, put together."""
        kind: CppType = frame.result
        if kind is VOID or not frame.results:
            return constant(0, torch.int32) if kind in (VOID, AUTO) else zero_of(kind)
        cases: list[tuple[Any, Thing]] = []
        known = frame.entry
        for mask, thing in frame.results:
            literals = known.beyond(mask)
            cases.append((both_of(literals), thing))
            if len(literals) == 1:
                # Who comes to a later return has not left by this one.
                known = known.extend(literals[0][0], not literals[0][1])
        found = cases[-1][1]
        for condition, thing in reversed(cases[:-1]):
            if isinstance(thing, Value) and isinstance(found, Value) and thing.dtype is not found.dtype:
                raise NoTranslation("a function with results of two types")
            found = choose(condition, thing, found)
        return found


_EVALUATE: dict[type, Any] = {
    Literal: Caller._literal,
    Name: Caller._load_name,
    Unary: Caller._unary,
    Binary: Caller._binary,
    Assign: lambda self, node: self.load(self.assign(node)),
    Step: Caller.step,
    Conditional: Caller._conditional,
    Call: Caller._call,
    Cast: Caller._cast,
    Index: lambda self, node: self.load(self.locate(node)),
    Member: lambda self, node: self.load(self.locate(node)),
    InitList: lambda self, node: self.initialise(AUTO, node),
    SizeOf: Caller._size_of,
    Lambda: Caller._closure,
}
