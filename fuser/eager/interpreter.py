"""Statements and calls: runs a functor's syntax on constants, tensors or nodes of a graph.

Note [Lanes]
All lanes walk through the program together. Control flow that is known when the program runs is Python's. Where it
depends on data, both ways run, each for its own lanes (``masks.Frame``): a statement that leaves a loop, a switch or a
function takes its lanes out of every frame up to that one. A loop ends when no lane is left in it; with the nodes of a
graph in place of tensors nobody can know when that is, unless the lanes leave it one by one up to a constant bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx

from fuser.cxx.nodes import (
    ArrayType,
    InitList,
    ReferenceType,
    Statement,
)
from fuser.cxx.statements import (
    Alias,
    Block,
    Break,
    Continue,
    Declaration,
    Declarator,
    DoWhile,
    Evaluate,
    For,
    Function,
    If,
    Parameter,
    Program,
    RangeFor,
    Return,
    Struct,
    Switch,
    While,
)
from fuser.eager.loops import Looper
from fuser.eager.masks import ALL, NONE, Condition, Frame, any_of, both_of
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
from fuser.eager.types import AUTO, VOID, ArrayOf, ClassType, CppType
from fuser.eager.values import Value, binary, either

__all__ = ["Interpreter"]

# Returns that are kept apart, where tensors have values.
_MAX_RESULTS = 4


class Interpreter(Looper):
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
        self.resources = ExitStack()
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
            return [self._number(self.call_functions(overloads, [compute], operands, self.globals))]
        operands, made = [], []
        count = len(arguments) + len(places)
        for parameter in self.program.entry.parameters[:count]:
            if _is_output(parameter):
                kind = self._output_type(parameter, compute)
                location = make_location(kind, base)
                location.store(self, zero_of(kind))
                made.append(location)
                operands.append(location)
            else:
                operands.append(Fixed(next(given)))
        self.call_functions(overloads, [compute], operands, self.globals)
        return [self._number(location.load(self)) for location in made]

    def _output_type(self, parameter: Parameter, compute: torch.dtype) -> CppType:
        names = [item.name for item in self.program.entry.template]
        self.scope = Scope(self.globals, dict.fromkeys(names, compute))
        kind = self.resolve(parameter.type)
        self.scope = self.globals
        return kind

    def _number(self, thing: Thing) -> Value:
        if isinstance(thing, Value):
            return thing
        raise NoTranslation("a result that is no number")

    def run(self, statement: Statement) -> None:
        """Run a statement for the lanes that are there."""
        if self.mask is not NONE:
            self.at(statement.place)
            _RUN[type(statement)](self, statement)

    def run_block(self, node: Block) -> None:
        """Run the statements of a block in a scope of its own."""
        scope, self.scope = self.scope, Scope(self.scope)
        self._run_all(node.statements)
        self.scope = scope

    def _run_declaration(self, node: Declaration) -> None:
        for item in node.declarators:
            self.at(item.place)
            if item.bindings:
                self._bind_parts(item)
            else:
                self.scope.names[item.name] = self.declare(item)

    def declare(self, item: Declarator) -> Location:
        """Return the place of a new variable."""
        spelled, value = item.type, item.value
        if isinstance(spelled, ReferenceType) and value is not None:
            location = self.locate(value)
            if not isinstance(location, Fixed):
                return location
            return Fixed(self.convert(location.thing, self.resolve(spelled)), self.mask)
        if isinstance(spelled, ArrayType) and spelled.size is None and isinstance(value, InitList):
            kind: CppType = ArrayOf(self.resolve(spelled.element), len(value.values))
        else:
            kind = self.resolve(spelled)
        if value is None:
            location = make_location(kind, self.frames[-1])
            if isinstance(kind, ClassType) and kind.named(kind.struct.name):
                location.store(self, self.construct(kind, ()))
            elif isinstance(kind, ClassType) and any(field.value is not None for field in kind.struct.fields):
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

    def _bind_parts(self, item: Declarator) -> None:
        assert item.value is not None, "the grammar wants one"
        whole = self.locate(item.value)
        if whole.length != len(item.bindings):
            raise NoTranslation(f"{len(item.bindings)} names for {whole.length} parts")
        is_copy = not isinstance(item.type, ReferenceType)
        for number, name in enumerate(item.bindings):
            part = whole.part(number)
            self.scope.names[name] = self.copy(part) if is_copy else part

    def _run_alias(self, node: Alias) -> None:
        self.scope.names[node.name] = self.resolve(node.type)

    def _run_struct(self, node: Struct) -> None:
        self.scope.names[node.name] = node if node.template else self.instantiate(node, [])

    def _run_evaluate(self, node: Evaluate) -> None:
        if node.expression is not None:
            self.evaluate(node.expression)

    def _run_if(self, node: If) -> None:
        scope, self.scope = self.scope, Scope(self.scope)
        found = self._decide(node.condition)
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

    def leave(self, *kinds: str) -> None:
        """Take the lanes that run out of every frame up to the innermost of a kind."""
        leaving = self.mask
        for frame in reversed(self.frames):
            frame.mask = frame.mask.without(leaving)
            if frame.kind in kinds:
                return
        raise AssertionError("the parser saw to it that there is one")  # pragma: no cover

    def _run_return(self, node: Return) -> None:
        function = next(frame for frame in reversed(self.frames) if frame.kind == "function")
        kind: CppType = function.result
        if node.value is not None and kind is not VOID:
            if kind is AUTO and not isinstance(node.value, InitList):
                thing = self.evaluate(node.value)
            else:
                thing = self.initialise(kind, node.value)
            self.at(node.place)
            self._add_result(function, thing)
        elif node.value is not None:
            self.evaluate(node.value)
        self.leave("function")

    def _add_result(self, function: Frame, thing: Thing) -> None:
        function.results.append((self.mask, thing))
        if self.graph is None and len(function.results) > _MAX_RESULTS:
            (first, one), (second, other), *rest = function.results
            merged = choose(both_of(function.entry.beyond(first)), one, other)
            either_of = Condition(either(any_of([first]), any_of([second])))
            function.results = [(function.entry.extend(either_of), merged), *rest]

    def _run_switch(self, node: Switch) -> None:
        scope, self.scope = self.scope, Scope(self.scope)
        condition = node.condition
        if condition.declaration is not None:
            self.run(condition.declaration)
        value = self.value(condition.value)
        self.frames.append(Frame("switch", self.mask))
        labels = [[None if item is None else self.value(item) for item in items] for items, _ in node.sections]
        if value.is_constant:
            found = [any(item is not None and item.data == value.data for item in items) for items in labels]
            start = (
                found.index(True)
                if True in found
                else next((number for number, items in enumerate(labels) if None in items), len(labels))
            )
            for _, statements in node.sections[start:]:
                self._run_all(statements)
        else:
            self._switch_on_data(node, value, labels)
        self.frames.pop()
        self.scope = scope

    def _switch_on_data(self, node: Switch, value: Value, labels: list[list[Value | None]]) -> None:
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
            self._run_all(statements)
            self.frames.pop()
            falling = None if inner.mask is NONE else entering

    def _run_all(self, statements: Sequence[Statement]) -> None:
        for statement in statements:
            self.run(statement)


def _is_output(parameter: Parameter) -> bool:
    return isinstance(parameter.type, ReferenceType) and not parameter.type.is_const


_RUN: dict[type, Any] = {
    Block: Interpreter.run_block,
    Declaration: Interpreter._run_declaration,
    Alias: Interpreter._run_alias,
    Struct: Interpreter._run_struct,
    Evaluate: Interpreter._run_evaluate,
    If: Interpreter._run_if,
    For: Interpreter._run_for,
    While: Interpreter._run_while,
    DoWhile: Interpreter._run_do,
    RangeFor: Interpreter._run_range,
    Switch: Interpreter._run_switch,
    Break: lambda self, _: self.leave("loop", "switch"),
    Continue: lambda self, _: self.leave("body"),
    Return: Interpreter._run_return,
}
