"""Statements and calls: runs a functor's syntax on constants, tensors or nodes of a graph.

Note [Lanes]
All lanes walk through the program together. Control flow that is known when the program runs is Python's. Where it
depends on data, both ways run, each for its own lanes (``masks.Frame``): a statement that leaves a loop, a switch or a
function takes its lanes out of every frame up to that one. A loop ends when no lane is left in it; with the nodes of a
graph in place of tensors nobody can know when that is, unless the lanes leave it one by one up to a constant bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fuser.eager.evaluate import Evaluator
from fuser.eager.masks import ALL, NONE, Chain, Condition, Frame, any_of, both_of
from fuser.eager.nodes import (
    Alias,
    ArrayType,
    Block,
    Break,
    Continue,
    Declaration,
    Declarator,
    DoWhile,
    Evaluate,
    Expression,
    For,
    Function,
    If,
    InitList,
    Parameter,
    Program,
    RangeFor,
    ReferenceType,
    Return,
    Statement,
    Struct,
    Switch,
    While,
)
from fuser.eager.nodes import Condition as ConditionSyntax
from fuser.eager.resolve import SubstitutionError
from fuser.eager.storage import (
    Closure,
    Fixed,
    Location,
    NoTranslation,
    Object,
    Pointer,
    Scope,
    Thing,
    choose,
    make_location,
    zero_of,
)
from fuser.eager.types import AUTO, VOID, ArrayOf, ClassType, CppType, PointerTo
from fuser.eager.values import PLACE, Value, binary, constant, either

__all__ = ["DataDependentError", "Interpreter"]

# Calls inside calls. Each takes about a dozen of Python's own frames, of which there are 1000.
MAX_DEPTH = 64
# Returns that are kept apart, where tensors have values.
_MAX_RESULTS = 4


class DataDependentError(Exception):
    """A graph cannot hold what is asked for: it takes the values of the tensors. Says what and where."""


class Interpreter(Evaluator):
    """Runs one program once.

    Args:
        program: the functor's syntax.
        graph: what nodes are added to; None to run on tensors.
        limit: most iterations of all loops together, and elements an index may choose from, in a graph.
        is_differentiable: stop the gradients of lanes where they do not run.
    """

    def __init__(self, program: Program, graph: fx.Graph | None, limit: int, *, is_differentiable: bool) -> None:
        self.program = program
        self.graph = graph
        self.limit = None if graph is None else limit
        self.is_differentiable = is_differentiable
        self.is_dry = False
        self.frames = [Frame("program", ALL)]
        self.globals = self.scope = Scope(None)
        self.iterations = 0
        # Functions that are being run, outermost first.
        self.running: list[Function] = []
        for statement in program.globals:
            self.run(statement)

    def call_entry(self, compute: torch.dtype, arguments: Sequence[Value]) -> list[Value]:
        """Call the entry with the arguments in order, and return its results."""
        overloads = self.program.functions[self.program.entry.name]
        base = self.frames[-1]
        places = [parameter for parameter in self.program.entry.parameters if _is_output(parameter)]
        given = iter(arguments)
        if not places:
            operands: list[Location] = [Fixed(item) for item in given]
            return [self.number(self.call_functions(overloads, [compute], operands, self.globals))]
        operands, made = [], []
        count = len(arguments) + len(places)
        for parameter in self.program.entry.parameters[:count]:
            if _is_output(parameter):
                kind = self.output_type(parameter, compute)
                location = make_location(kind, base)
                location.store(self, zero_of(kind))
                made.append(location)
                operands.append(location)
            else:
                operands.append(Fixed(next(given)))
        self.call_functions(overloads, [compute], operands, self.globals)
        return [self.number(location.load(self)) for location in made]

    def output_type(self, parameter: Parameter, compute: torch.dtype) -> CppType:
        names = [item.name for item in self.program.entry.template]
        self.scope = Scope(self.globals, dict.fromkeys(names, compute))
        kind = self.resolve(parameter.type)
        self.scope = self.globals
        return kind

    def number(self, thing: Thing) -> Value:
        if isinstance(thing, Value):
            return thing
        raise NoTranslation("a result that is no number")

    def data_dependent(self, why: str) -> DataDependentError:
        """Return the exception for what needs values and stands in a graph."""
        line, column = PLACE.get() or (0, 0)
        return DataDependentError(f"line {line}, column {column}: {why}")

    # Statements

    def run(self, statement: Statement) -> None:
        """Run a statement for the lanes that are there."""
        if self.mask is not NONE:
            self.at(statement.place)
            _RUN[type(statement)](self, statement)

    def run_block(self, node: Block) -> None:
        scope, self.scope = self.scope, Scope(self.scope)
        self.run_all(node.statements)
        self.scope = scope

    def run_inside(self, kind: str, statement: Statement) -> None:
        # In a frame of its own, for all lanes.
        self.frames.append(Frame(kind, self.mask))
        self.run(statement)
        self.frames.pop()

    def run_declaration(self, node: Declaration) -> None:
        for item in node.declarators:
            self.at(item.place)
            if item.bindings:
                self.bind_parts(item)
            else:
                self.scope.names[item.name] = self.declare(item)

    def declare(self, item: Declarator) -> Location:
        """Return the place of a new variable."""
        spelled, value = item.type, item.value
        if isinstance(spelled, ReferenceType) and value is not None:
            location = self.locate(value)
            if isinstance(location, Fixed):
                kind = self.resolve(spelled)
                return Fixed(self.convert(location.thing, kind))
            return location
        if isinstance(spelled, ArrayType) and spelled.size is None and isinstance(value, InitList):
            kind: CppType = ArrayOf(self.resolve(spelled.element), len(value.values))
        else:
            kind = self.resolve(spelled)
        if value is None:
            location = make_location(kind, self.frames[-1])
            if isinstance(kind, ClassType) and any(field.value is not None for field in kind.struct.fields):
                location.store(self, self.fill(kind, []))
            return location
        thing = self.evaluate(value) if kind is AUTO else self.initialise(kind, value)
        if kind is AUTO:
            kind = thing.dtype if isinstance(thing, Value) else thing.type
        if isinstance(thing, Closure):
            return Fixed(thing)
        location = make_location(kind, self.frames[-1])
        self.at(item.place)
        location.store(self, thing)
        return location

    def bind_parts(self, item: Declarator) -> None:
        assert item.value is not None, "the grammar wants one"
        whole = self.locate(item.value)
        if whole.length != len(item.bindings):
            raise NoTranslation(f"{len(item.bindings)} names for {whole.length} parts")
        is_copy = not isinstance(item.type, ReferenceType)
        for number, name in enumerate(item.bindings):
            part = whole.part(number)
            self.scope.names[name] = self.copy(part) if is_copy else part

    def run_alias(self, node: Alias) -> None:
        self.scope.names[node.name] = self.resolve(node.type)

    def run_struct(self, node: Struct) -> None:
        self.scope.names[node.name] = node if node.template else self.instantiate(node, [])

    def run_evaluate(self, node: Evaluate) -> None:
        if node.expression is not None:
            self.evaluate(node.expression)

    def decide(self, node: ConditionSyntax) -> Any:
        if node.declaration is not None:
            self.run(node.declaration)
        return self.condition(node.value)

    def run_if(self, node: If) -> None:
        scope, self.scope = self.scope, Scope(self.scope)
        found = self.decide(node.condition)
        if isinstance(found, bool):
            taken = node.yes if found else node.no
            if taken is not None:
                self.run_block(Block(taken.place, (taken,)))
        else:
            condition = Condition(found)
            with self.branch(condition):
                self.run_block(Block(node.yes.place, (node.yes,)))
            if node.no is not None:
                with self.branch(condition, False):
                    self.run_block(Block(node.no.place, (node.no,)))
        self.scope = scope

    # Loops

    def run_for(self, node: For) -> None:
        scope, self.scope = self.scope, Scope(self.scope)
        self.frames.append(Frame("loop", self.mask))
        if node.start is not None:
            self.run(node.start)
        step = node.step
        self.loop(
            node,
            None if node.condition is None else lambda: self.condition(node.condition),  # type: ignore[arg-type]
            lambda: None if step is None else self.evaluate(step),
        )
        self.scope = scope

    def run_while(self, node: While) -> None:
        scope, self.scope = self.scope, Scope(self.scope)
        self.frames.append(Frame("loop", self.mask))
        self.loop(node, lambda: self.decide(node.condition), lambda: None)
        self.scope = scope

    def run_do(self, node: DoWhile) -> None:
        self.frames.append(Frame("loop", self.mask))
        self.loop(node, lambda: self.condition(node.condition), lambda: None)

    def loop(
        self, node: For | While | DoWhile, condition: Callable[[], Any] | None, step: Callable[[], object]
    ) -> None:
        """Run a loop inside the frame that was opened for it; close the frame."""
        frame = self.frames[-1]
        entry, before, chain, count = frame.mask, frame.mask, Chain(), 0
        is_first_free = isinstance(node, DoWhile)
        while True:
            if condition is not None and not is_first_free:
                holds = condition()
                if holds is False:
                    break
                if holds is not True:
                    frame.mask = frame.mask.extend(Condition(holds))
            is_first_free = False
            if frame.mask is not before and frame.mask is not NONE:
                # One condition stands for all that have made lanes leave so far.
                data = both_of(entry.beyond(frame.mask))
                frame.mask = before = entry.extend(Condition(data, chain, count))
                if self.graph is None and not bool(data.any()):
                    break
            if frame.mask is NONE:
                break
            count += 1
            self.at(node.place)
            self.count_iteration(node)
            self.run_inside("body", node.body)
            if frame.mask is NONE:
                break
            step()
        self.frames.pop()

    def count_iteration(self, node: For | While | DoWhile | RangeFor) -> None:
        self.iterations += 1
        if self.limit is not None and (self.iterations > self.limit or self.size > 32 * self.limit):
            text = node.condition.text if isinstance(node, While) else getattr(node, "text", "")
            raise self.data_dependent(f"the loop runs while {text}" if text else "the loop is too long for a graph")

    @property
    def size(self) -> int:
        """How many nodes the graph has."""
        return 0 if self.graph is None else len(self.graph.nodes)

    def run_range(self, node: RangeFor) -> None:
        whole = self.locate(node.array)
        scope, self.scope = self.scope, Scope(self.scope)
        self.frames.append(Frame("loop", self.mask))
        for number in range(whole.length):
            if self.mask is NONE:
                break
            self.count_iteration(node)
            part = whole.part(number)
            is_reference = isinstance(node.variable.type, ReferenceType)
            location = part
            if not is_reference:
                kind = self.resolve(node.variable.type)
                location = make_location(part.type if kind is AUTO else kind, self.frames[-1])
                self.write(location, self.load(part))
            self.scope.names[node.variable.name] = location
            self.run_inside("body", node.body)
        self.frames.pop()
        self.scope = scope

    # Leaving

    def leave(self, *kinds: str) -> None:
        """Take the lanes that run out of every frame up to the innermost of a kind."""
        leaving = self.mask
        for frame in reversed(self.frames):
            frame.mask = frame.mask.without(leaving)
            if frame.kind in kinds:
                return
        raise AssertionError("the parser saw to it that there is one")  # pragma: no cover

    def run_return(self, node: Return) -> None:
        function = next(frame for frame in reversed(self.frames) if frame.kind == "function")
        kind: CppType = function.result
        if node.value is not None and kind is not VOID:
            if kind is AUTO and not isinstance(node.value, InitList):
                thing = self.evaluate(node.value)
            else:
                thing = self.initialise(kind, node.value)
            self.at(node.place)
            self.add_result(function, thing)
        elif node.value is not None:
            self.evaluate(node.value)
        self.leave("function")

    def add_result(self, function: Frame, thing: Thing) -> None:
        function.results.append((self.mask, thing))
        if self.graph is None and len(function.results) > _MAX_RESULTS:
            (first, one), (second, other), *rest = function.results
            merged = choose(both_of(function.entry.beyond(first)), one, other)
            either_of = Condition(either(any_of([first]), any_of([second])))
            function.results = [(function.entry.extend(either_of), merged), *rest]

    def run_switch(self, node: Switch) -> None:
        scope, self.scope = self.scope, Scope(self.scope)
        condition = node.condition
        if condition.declaration is not None:
            self.run(condition.declaration)
        value = self.value(condition.value)
        self.frames.append(Frame("switch", self.mask))
        labels = [[None if item is None else self.value(item) for item in items] for items, _ in node.sections]
        if value.is_constant:
            found = [any(item is not None and item.data == value.data for item in items) for items in labels]
            start = found.index(True) if True in found else next(
                (number for number, items in enumerate(labels) if None in items), len(labels)
            )
            for _, statements in node.sections[start:]:
                self.run_all(statements)
        else:
            self.switch_on_data(node, value, labels)
        self.frames.pop()
        self.scope = scope

    def switch_on_data(self, node: Switch, value: Value, labels: list[list[Value | None]]) -> None:
        frame = self.frames[-1]
        tests = [[Condition(binary("==", value, item).data) for item in items if item is not None] for items in labels]
        # Lanes that come from the section before, None for none.
        falling: Any = None
        for number, (_, statements) in enumerate(node.sections):
            if frame.mask is NONE:
                return
            mask = frame.mask
            if None in labels[number]:
                # Every lane that no other section's label takes.
                for other in tests[:number] + tests[number + 1 :]:
                    for test in other:
                        mask = mask.extend(test, False)
                entering = both_of(frame.mask.beyond(mask))
            else:
                entering = False
                for test in tests[number]:
                    entering = either(entering, test.data)
                mask = frame.mask.extend(tests[number][0] if len(tests[number]) == 1 else Condition(entering))
            if falling is not None:
                entering = either(falling, entering)
                mask = frame.mask if entering is True else frame.mask.extend(Condition(entering))
            inner = Frame("branch", mask)
            self.frames.append(inner)
            self.run_all(statements)
            self.frames.pop()
            falling = None if inner.mask is NONE else entering

    def run_all(self, statements: Sequence[Statement]) -> None:
        for statement in statements:
            self.run(statement)

    # Functions

    def call_functions(
        self, candidates: Sequence[Function], explicit: Sequence[Any], operands: Sequence[Location], scope: Scope
    ) -> Thing:
        """Call the one of several overloads that fits."""
        best: tuple[int, Function, dict[str, Any]] | None = None
        for function in candidates:
            if function.body is None:
                continue
            fit = self.fit(function, explicit, operands, scope)
            if fit is not None and (best is None or fit[0] < best[0]):
                best = (fit[0], function, fit[1])
        if best is None:
            name = candidates[0].name if candidates else "this function"
            raise NoTranslation(f"the call of {name!r} with these arguments")
        return self.call_function(best[1], best[2], operands, scope)

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
                rating = self.rate(parameter, operand)
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

    def rate(self, parameter: Parameter, operand: Location) -> int | None:
        # 0: the same type; 1: a conversion; None: impossible.
        spelled = parameter.type
        kind = self.parameter_type(parameter, operand)
        have = operand.type
        if kind is AUTO or kind == have:
            is_bound = isinstance(spelled, ReferenceType) and not spelled.is_const and kind is not AUTO
            return None if is_bound and isinstance(operand, Fixed) and not isinstance(kind, ClassType) else 0
        if isinstance(kind, PointerTo) and isinstance(have, ArrayOf | PointerTo):
            return 0 if kind.element in (have.element, VOID) else None
        if isinstance(kind, torch.dtype) and isinstance(have, torch.dtype):
            if isinstance(spelled, ReferenceType) and not spelled.is_const:
                return None
            is_promotion = kind.is_floating_point and have.is_floating_point
            return 1 if is_promotion else 2
        return None

    def parameter_type(self, parameter: Parameter, operand: Location) -> CppType:
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
        if function in self.running:
            self.check_depth(function)
            # A recursion ends where no lane is left.
            is_idle = is_idle or (
                self.graph is None and bool(self.mask.literals) and not bool(self.mask.data.any())
            )
        if is_idle:
            self.scope = before
            return nothing
        frame = Frame("function", self.mask)
        frame.result = result
        self.running.append(function)
        self.frames.append(frame)
        self.bind(function, operands)
        assert function.body is not None, "candidates have one"
        self.run_block(function.body)
        self.frames.pop()
        self.running.pop()
        self.scope = before
        return self.result_of(frame)

    def check_depth(self, function: Function) -> None:
        if len(self.running) >= MAX_DEPTH:
            if self.graph is not None:
                raise self.data_dependent(f"{function.name!r} calls itself as long as data says")
            raise RecursionError(f"{function.name!r} calls itself more than {MAX_DEPTH} times")

    def bind(self, function: Function, operands: Sequence[Location]) -> None:
        for number, parameter in enumerate(function.parameters):
            if number < len(operands):
                location = self.bind_parameter(parameter, operands[number])
            else:
                assert parameter.default is not None, "fit() counted"
                kind = self.resolve(parameter.type)
                location = make_location(kind, self.frames[-1])
                location.store(self, self.initialise(kind, parameter.default))
            if parameter.name:
                self.scope.names[parameter.name] = location

    def bind_parameter(self, parameter: Parameter, operand: Location) -> Location:
        spelled = parameter.type
        kind = self.parameter_type(parameter, operand)
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


def _is_output(parameter: Parameter) -> bool:
    return isinstance(parameter.type, ReferenceType) and not parameter.type.is_const


_RUN: dict[type, Any] = {
    Block: Interpreter.run_block,
    Declaration: Interpreter.run_declaration,
    Alias: Interpreter.run_alias,
    Struct: Interpreter.run_struct,
    Evaluate: Interpreter.run_evaluate,
    If: Interpreter.run_if,
    For: Interpreter.run_for,
    While: Interpreter.run_while,
    DoWhile: Interpreter.run_do,
    RangeFor: Interpreter.run_range,
    Switch: Interpreter.run_switch,
    Break: lambda self, _: self.leave("loop", "switch"),
    Continue: lambda self, _: self.leave("body"),
    Return: Interpreter.run_return,
}
