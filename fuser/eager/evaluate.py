"""Expressions: what each is worth for the lanes that run, by C++'s rules for types."""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fuser.eager import functions
from fuser.eager.masks import Condition, Frame, Mask
from fuser.eager.nodes import (
    Assign,
    Binary,
    Call,
    Cast,
    Conditional,
    Expression,
    Function,
    Index,
    InitList,
    Lambda,
    Literal,
    Member,
    Name,
    Place,
    SizeOf,
    Step,
    TypeSyntax,
    Unary,
)
from fuser.eager.resolve import Resolver, SubstitutionError
from fuser.eager.storage import (
    Aggregate,
    Choice,
    Closure,
    Fixed,
    Location,
    NoTranslation,
    Object,
    Pointer,
    Punned,
    Scope,
    Thing,
    Variable,
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
    builtin_type,
    describe_type,
    trait,
)
from fuser.eager.values import PLACE, Value, binary, both, common_type, constant, convert, either, unary

__all__ = ["IGNORED", "Evaluator"]

_SUFFIX = re.compile(r"(?P<digits>0[xX][\da-fA-F.']+(?:[pP][+-]?\d+)?|0[bB][01']+|[\d.']+(?:[eE][+-]?\d+)?)(?P<suffix>\w*)")
_CONSTANTS = {
    "INFINITY": math.inf,
    "POS_INFINITY": math.inf,
    "NEG_INFINITY": -math.inf,
    "NAN": math.nan,
}
# Functions that write through pointers, and how many of them (the last arguments).
_WRITERS = {"frexp": 1, "modf": 1, "remquo": 1, "sincos": 2, "sincospi": 2}
_IN_STD = frozenset({"max", "min", "clamp"})
# Functions that say something and compute nothing.
IGNORED = frozenset({"assert", "printf", "__builtin_assume", "__syncthreads"})
_ESCAPES = {"n": "\n", "t": "\t", "0": "\0", "r": "\r", "\\": "\\", "'": "'", '"': '"'}


class Evaluator(Resolver):
    """Evaluates expressions; who runs statements derives from it."""

    frames: list[Frame]
    # The innermost scope.
    scope: Scope
    is_differentiable: bool
    is_dry: bool
    # Functions that are being run, outermost first.
    running: list[Function]
    # Most places that one index which depends on data may choose from; None where tensors have values.
    limit: int | None

    @abstractmethod
    def call_functions(
        self, candidates: Sequence[Function], explicit: Sequence[Any], operands: Sequence[Location], scope: Scope
    ) -> Thing:
        """Call the one of several overloads that fits."""

    @property
    def mask(self) -> Mask:
        """The lanes that run."""
        return self.frames[-1].mask

    def at(self, place: Place) -> None:
        """Note the place of what is made next."""
        PLACE.set(place)

    @contextmanager
    def branch(self, condition: Condition, holds: bool = True) -> Iterator[Frame]:
        """Run what is inside for the lanes for which the condition holds (or does not)."""
        frame = Frame("branch", self.mask.extend(condition, holds))
        self.frames.append(frame)
        yield frame
        self.frames.pop()

    @contextmanager
    def dry(self) -> Iterator[None]:
        """Evaluate what is inside for its types only."""
        before, scope, depth, place = self.is_dry, self.scope, len(self.frames), PLACE.get()
        running = len(self.running)
        self.is_dry = True
        try:
            yield
        finally:
            self.is_dry, self.scope = before, scope
            PLACE.set(place)
            del self.frames[depth:], self.running[running:]

    # Entry points

    def evaluate(self, node: Expression) -> Thing:
        """Return what an expression is worth."""
        self.at(node.place)
        return _EVALUATE[type(node)](self, node)

    def locate(self, node: Expression) -> Location:
        """Return where an expression lives; what has no place of its own gets one that cannot be written."""
        self.at(node.place)
        match node:
            case Name():
                return self.locate_name(node)
            case Index(place, array, index):
                return self.locate_element(place, array, index)
            case Unary(_, "*", operand):
                return self.target(self.pointer(operand))
            case Member(_, value, name):
                return self.locate_member(value, name)
            case Assign():
                return self.assign(node)
            case Step(_, _, target, True):
                self.step(node)
                return self.locate(target)
            case Binary(_, ",", left, right):
                self.evaluate(left)
                return self.locate(right)
        return Fixed(self.evaluate(node))

    def value(self, node: Expression) -> Value:
        """Return the number that an expression is."""
        found = self.evaluate(node)
        if not isinstance(found, Value):
            self.at(node.place)
            raise NoTranslation("arithmetic with something that is no number")
        return found

    def condition(self, node: Expression) -> Any:
        """Return an expression as bool data."""
        found = self.value(node)
        self.at(node.place)
        return convert(found, torch.bool).data

    def static_type(self, node: Expression) -> CppType | None:
        """Return the type of an expression without evaluating it; None if that takes more."""
        with self.dry():
            try:
                found = self.evaluate(node)
            except (NoTranslation, TypeError, RecursionError, SubstitutionError):
                return None
        return found.dtype if isinstance(found, Value) else found.type

    # Names, elements, members

    def locate_name(self, node: Name) -> Location:
        found = self.scope.find(node.name)
        if isinstance(found, Location):
            return found
        if isinstance(found, Value):
            return Fixed(found)
        if node.name in _CONSTANTS:
            return Fixed(constant(_CONSTANTS[node.name], torch.float32))
        kinds = tuple(self.resolve(item) for item in node.arguments if isinstance(item, TypeSyntax))
        known = trait(node.name, kinds) if node.member == "value" or node.name.endswith("_v") else None
        if known is not None:
            return Fixed(Value(torch.bool, known))
        raise NoTranslation(f"the name {node.name!r}")

    def load_name(self, node: Name) -> Thing:
        return self.load(self.locate_name(node))

    def load(self, location: Location) -> Thing:
        """Return the value at a location; an array's is a pointer to its first element."""
        if isinstance(location.type, ArrayOf):
            return self.decay(location)
        return location.load(self)

    def decay(self, location: Location) -> Pointer:
        assert isinstance(location.type, ArrayOf), "who asks looked"
        targets = location.parts if isinstance(location, Object) else _parts(location)
        return Pointer(targets, constant(0, torch.int64), location.type.element)

    def pointer(self, node: Expression) -> Pointer:
        found = self.evaluate(node)
        if isinstance(found, Pointer):
            return found
        self.at(node.place)
        raise NoTranslation("a pointer that cannot be followed")

    def target(self, pointer: Pointer, index: Value | None = None) -> Location:
        offset = pointer.offset if index is None else binary("+", pointer.offset, convert(index, torch.int64))
        found = self.element(pointer.targets, offset, pointer.element)
        return found if pointer.view is None else self.pun(found, pointer.view)

    def pun(self, location: Location, kind: torch.dtype) -> Location:
        source = location.type
        if not isinstance(source, torch.dtype) or source.itemsize != kind.itemsize:
            raise NoTranslation(f"a {describe_type(source)} read as {describe_type(kind)}")
        return Punned(location, kind, lambda v: _bits(v, kind), lambda v: _bits(v, source))

    def locate_element(self, place: Place, array: Expression, index: Expression) -> Location:
        base = self.locate(array)
        at = self.value(index)
        self.at(place)
        if isinstance(base.type, ArrayOf):
            targets = base.parts if isinstance(base, Object) else _parts(base)
            return self.element(targets, convert(at, torch.int64), base.type.element)
        pointer = base.load(self)
        if not isinstance(pointer, Pointer):
            raise NoTranslation("an index into something that is no array")
        return self.target(pointer, at)

    def element(self, targets: Sequence[Location], index: Value, kind: CppType) -> Location:
        """Return one of several places, chosen by an index that may depend on data."""
        if self.is_dry:
            return targets[0] if targets else Fixed(zero_of(kind))
        if index.is_constant:
            # Out of bounds C++ leaves everything open.
            return targets[index.data] if 0 <= index.data < len(targets) else Fixed(zero_of(kind))
        if self.limit is not None and len(targets) > self.limit:
            raise self.data_dependent(f"an index into {len(targets)} elements depends on data")
        if len(targets) == 1:
            return targets[0]
        options = [
            (Condition(binary("==", index, constant(number, index.dtype)).data), location)
            for number, location in enumerate(targets)
        ]
        return Choice(options)

    @abstractmethod
    def data_dependent(self, why: str) -> Exception:
        """Return the exception for what needs values and stands in a graph."""

    def locate_member(self, value: Expression, name: str) -> Location:
        base = self.locate(value)
        kind = base.type
        if isinstance(kind, ClassType) and name in kind.fields:
            return base.part(list(kind.fields).index(name))
        raise NoTranslation(f"the member {name!r} of {describe_type(kind)}")

    # Operators

    def literal(self, node: Literal) -> Thing:
        text = node.text
        if text in {"true", "false"}:
            return Value(torch.bool, text == "true")
        if text.startswith("'"):
            inner = text[1:-1]
            return constant(ord(_ESCAPES.get(inner[1:], inner[-1]) if inner.startswith("\\") else inner), torch.int8)
        if text[0].isdigit() or text[0] == ".":
            return _number(text)
        raise NoTranslation("a text" if text.startswith('"') else text)

    def unary(self, node: Unary) -> Thing:
        if node.operator == "*":
            return self.load(self.locate(node))
        if node.operator == "&":
            return self.address(node.operand)
        if node.operator == "!":
            found = convert(self.value(node.operand), torch.bool)
        else:
            found = self.value(node.operand)
        self.at(node.place)
        return unary(node.operator, found)

    def address(self, node: Expression) -> Pointer:
        if isinstance(node, Index):
            base, at = self.evaluate(node.array), self.value(node.index)
            if isinstance(base, Pointer):
                return self.advance(base, "+", at)
        location = self.locate(node)
        return Pointer((location,), constant(0, torch.int64), location.type)

    def advance(self, pointer: Pointer, operator: str, count: Value) -> Pointer:
        offset = binary(operator, pointer.offset, convert(count, torch.int64))
        return Pointer(pointer.targets, offset, pointer.element, pointer.view)

    def binary(self, node: Binary) -> Thing:
        if node.operator == ",":
            self.evaluate(node.left)
            return self.evaluate(node.right)
        if node.operator in {"&&", "||"}:
            return self.short_circuit(node)
        left, right = self.evaluate(node.left), self.evaluate(node.right)
        self.at(node.place)
        return self.combine(node.operator, left, right)

    def combine(self, operator: str, left: Thing, right: Thing) -> Thing:
        """Apply a binary operator to two things."""
        if isinstance(left, Value) and isinstance(right, Value):
            return binary(operator, left, right)
        if isinstance(right, Pointer) and operator == "+":
            left, right = right, left
        if isinstance(left, Pointer) and isinstance(right, Value) and operator in {"+", "-"}:
            return self.advance(left, operator, right)
        if isinstance(left, Pointer) and isinstance(right, Pointer) and left.targets is right.targets:
            return binary(operator, left.offset, right.offset)
        raise NoTranslation(f"the operator {operator} on something that is no number")

    def short_circuit(self, node: Binary) -> Value:
        left = self.condition(node.left)
        is_and = node.operator == "&&"
        if isinstance(left, bool) and not self.is_dry:
            return Value(torch.bool, self.condition(node.right) if left is is_and else left)
        with self.branch(Condition(left), is_and):
            right = self.condition(node.right)
        self.at(node.place)
        return Value(torch.bool, (both if is_and else either)(left, right))

    def conditional(self, node: Conditional) -> Thing:
        found = self.condition(node.condition)
        if self.is_dry or isinstance(found, bool):
            taken, other = (node.yes, node.no) if found else (node.no, node.yes)
            thing = self.evaluate(taken)
            kind = self.static_type(other)
            if isinstance(thing, Value) and isinstance(kind, torch.dtype) and kind is not thing.dtype:
                return convert(thing, common_type(thing.dtype, kind))
            return thing
        condition = Condition(found)
        with self.branch(condition):
            yes = self.evaluate(node.yes)
        with self.branch(condition, False):
            no = self.evaluate(node.no)
        self.at(node.place)
        if isinstance(yes, Value) and isinstance(no, Value) and yes.dtype is not no.dtype:
            kind = common_type(yes.dtype, no.dtype)
            yes, no = convert(yes, kind), convert(no, kind)
        return choose(found, yes, no)

    def assign(self, node: Assign) -> Location:
        if isinstance(node.value, InitList):
            location = self.locate(node.target)
            self.write(location, self.initialise(location.type, node.value))
            return location
        thing = self.evaluate(node.value)
        location = self.locate(node.target)
        if node.operator:
            old = self.load(location)
            self.at(node.place)
            thing = self.combine(node.operator, old, thing)
        self.at(node.place)
        self.write(location, thing)
        return location

    def step(self, node: Step) -> Thing:
        location = self.locate(node.target)
        old = self.load(location)
        self.at(node.place)
        new = self.convert(self.combine(node.operator, old, constant(1, torch.int32)), location.type)
        self.write(location, new)
        return new if node.is_prefix else old

    def write(self, location: Location, thing: Thing) -> None:
        """Store a thing, converted to the location's type."""
        location.store(self, self.convert(thing, location.type))

    # Conversions

    def convert(self, thing: Thing, kind: CppType) -> Thing:
        """Return a thing as an implicit conversion to a type gives it."""
        if isinstance(thing, Value) and isinstance(kind, torch.dtype):
            return convert(thing, kind)
        if isinstance(thing, Pointer) and isinstance(kind, PointerTo):
            if kind.element in (thing.view or thing.element, VOID):
                return thing
            if isinstance(kind.element, torch.dtype):
                view = None if kind.element == thing.element else kind.element
                return Pointer(thing.targets, thing.offset, thing.element, view)
        if kind is AUTO or (not isinstance(thing, Value | Pointer) and thing.type == kind):
            return thing
        have = thing.dtype if isinstance(thing, Value) else thing.type
        raise NoTranslation(f"a conversion of {describe_type(have)} to {describe_type(kind)}")

    def cast(self, node: Cast) -> Thing:
        kind = self.resolve(node.type)
        if kind is VOID:
            for item in node.values:
                self.evaluate(item)
            return constant(0, torch.int32)
        if len(node.values) == 1 and not isinstance(node.values[0], InitList) and not isinstance(kind, ClassType):
            thing = self.evaluate(node.values[0])
            self.at(node.place)
            return self.convert(thing, kind)
        return self.initialise(kind, InitList(node.place, node.values))

    def initialise(self, kind: CppType, node: Expression) -> Thing:
        """Return what an initialiser makes of a type."""
        if not isinstance(node, InitList):
            return self.convert(self.evaluate(node), kind)
        values = list(node.values)
        if isinstance(kind, ArrayOf | ClassType):
            if len(values) == 1 and isinstance(kind, ClassType) and self.static_type(values[0]) == kind:
                return self.evaluate(values[0])
            return self.fill(kind, values)
        if not isinstance(kind, torch.dtype):
            raise NoTranslation(f"this initialiser of {describe_type(kind)}")
        if kind.is_complex and len(values) == 2:
            part = kind.to_real()
            real, imaginary = (convert(self.value(item), part) for item in values)
            self.at(node.place)
            found = functions.call("complex", [real, imaginary])
            return convert(found, kind)
        if len(values) > 1:
            raise NoTranslation(f"{len(values)} values for one {describe_type(kind)}")
        return self.initialise(kind, values[0]) if values else zero_of(kind)

    def fill(self, kind: ArrayOf | ClassType, values: list[Expression]) -> Aggregate:
        """Return an array or struct of the first values, which are taken off the list; the rest is zero."""
        defaults: list[Expression | None] = []
        if isinstance(kind, ArrayOf):
            kinds = [kind.element] * kind.length
        else:
            kinds, defaults = list(kind.fields.values()), [field.value for field in kind.struct.fields]
        parts: list[Thing] = []
        for number, part in enumerate(kinds):
            default = defaults[number] if defaults else None
            if not values and default is None:
                parts.append(zero_of(part))
            elif values and isinstance(part, ArrayOf | ClassType) and not isinstance(values[0], InitList):
                # The inner braces may be left out.
                is_whole = isinstance(part, ClassType) and self.static_type(values[0]) == part
                parts.append(self.evaluate(values.pop(0)) if is_whole else self.fill(part, values))
            else:
                item = values.pop(0) if values else default
                assert item is not None, "one of the two is there"
                parts.append(self.initialise(part, item))
        return Aggregate(kind, tuple(parts))

    def size_of(self, node: SizeOf) -> Value:
        operand = node.operand
        kind: CppType | None
        if isinstance(operand, TypeSyntax):
            kind = self.resolve(operand)
        elif isinstance(operand, Name | Index | Member):
            with self.dry():
                kind = self.locate(operand).type
        else:
            kind = self.static_type(operand)
        if kind is None:
            raise NoTranslation("sizeof of this expression")
        return constant(_size(kind), torch.uint64)

    # Calls

    def call(self, node: Call) -> Thing:
        function = node.function
        if isinstance(function, Member):
            return self.call_member(node, function)
        if isinstance(function, Name) and not function.in_std or isinstance(function, Lambda):
            closure = self.scope.find(function.name) if isinstance(function, Name) else None
            if isinstance(function, Lambda) or closure is not None:
                return self.call_closure(node, function)
        if not isinstance(function, Name):
            return self.call_closure(node, function)
        candidates = self.program.functions.get(function.name, ())
        if candidates and not function.in_std:
            explicit = [self.resolve(item) if isinstance(item, TypeSyntax) else self.value(item) for item in function.arguments]
            operands = [self.operand(item) for item in node.arguments]
            self.at(node.place)
            return self.call_functions(candidates, explicit, operands, self.globals)
        return self.call_builtin(node, function)

    def operand(self, node: Expression) -> Location:
        """Return an argument as a location: itself if it has one, for parameters that are references."""
        return self.locate(node)

    def call_closure(self, node: Call, function: Expression) -> Thing:
        closure = self.evaluate(function)
        if not isinstance(closure, Closure):
            raise NoTranslation("a call of something that is no function")
        operands = [self.operand(item) for item in node.arguments]
        self.at(node.place)
        return self.call_functions((closure.syntax.function,), (), operands, closure.scope)

    def call_member(self, node: Call, function: Member) -> Thing:
        base = self.locate(function.value)
        kind = base.type
        if isinstance(kind, ClassType):
            candidates = [item for item in kind.struct.functions if item.name == function.name]
            names: dict[str, Any] = dict(kind.bindings)
            names |= {name: base.part(number) for number, name in enumerate(kind.fields)}
            operands = [self.operand(item) for item in node.arguments]
            self.at(node.place)
            return self.call_functions(candidates, (), operands, Scope(self.globals, names))
        if isinstance(kind, torch.dtype) and kind.is_complex and function.name in {"real", "imag"}:
            return self.complex_part(node, base, function.name)
        raise NoTranslation(f"the member {function.name!r} of {describe_type(kind)}")

    def complex_part(self, node: Call, base: Location, name: str) -> Thing:
        whole = base.load(self)
        assert isinstance(whole, Value), "complex numbers are numbers"
        if not node.arguments:
            return functions.call(name, [whole])
        given = convert(self.value(node.arguments[0]), whole.dtype.to_real())
        real, imaginary = functions.call("real", [whole]), functions.call("imag", [whole])
        pair = [given, imaginary] if name == "real" else [real, given]
        base.store(self, functions.call("complex", pair))
        return constant(0, torch.int32)

    def call_builtin(self, node: Call, function: Name) -> Thing:
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
        targets = [self.target(self.pointer(item)) for item in node.arguments[len(given) :]]
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

    def closure(self, node: Lambda) -> Closure:
        scope = Scope(self.scope)
        if node.default == "=":
            for name in _names_in(node.function):
                found = self.scope.find(name)
                if isinstance(found, Location) and self.globals.find(name) is not found:
                    scope.names[name] = self.copy(found)
        for capture in node.captures:
            if capture.value is not None:
                scope.names[capture.name] = self.copy(Fixed(self.evaluate(capture.value)))
            elif not capture.by_reference:
                found = self.scope.find(capture.name)
                if isinstance(found, Location):
                    scope.names[capture.name] = self.copy(found)
        return Closure(node, scope)

    def copy(self, location: Location) -> Location:
        """Return a new place with the same value."""
        made = make_location(location.type, self.frames[-1])
        made.store(self, location.load(self))
        return made


def _parts(location: Location) -> list[Location]:
    return [location.part(number) for number in range(location.length)]


def _number(text: str) -> Value:
    match = _SUFFIX.fullmatch(text)
    if match is None:
        raise NoTranslation(f"the number {text}")
    digits, suffix = match["digits"].replace("'", ""), match["suffix"].lower()
    is_hex = digits[:2] in {"0x", "0X"}
    is_float = "." in digits or ("p" in digits.lower() if is_hex else "e" in digits.lower() or "f" in suffix)
    if is_float:
        number = float.fromhex(digits) if is_hex else float(digits)
        return constant(number, torch.float32 if suffix == "f" else torch.float64)
    is_octal = len(digits) > 1 and digits[0] == "0" and digits.isdigit()
    whole = int(digits, 8) if is_octal else int(digits, 0)
    kinds = [torch.int32, torch.uint32, torch.int64, torch.uint64]
    if "l" in suffix:
        kinds = [torch.int64, torch.uint64]
    if "u" in suffix:
        kinds = [kind for kind in kinds if not kind.is_signed]
    elif not (is_hex or is_octal or digits[:2] in {"0b", "0B"}):
        kinds = [kind for kind in kinds if kind.is_signed]
    fitting = [kind for kind in kinds if whole <= torch.iinfo(kind).max]
    return constant(whole, (fitting or kinds[-1:])[0])


def _size(kind: CppType) -> int:
    match kind:
        case torch.dtype():
            return kind.itemsize
        case ArrayOf(element, length):
            return length * _size(element)
        case PointerTo():
            return 8
    raise NoTranslation(f"sizeof {describe_type(kind)}")


_BIT_CASTS = {
    torch.float32: ("__float_as_int", torch.int32),
    torch.float64: ("__double_as_longlong", torch.int64),
    torch.int32: ("__int_as_float", torch.float32),
    torch.int64: ("__longlong_as_double", torch.float64),
}


def _bits(thing: Thing, kind: torch.dtype) -> Value:
    # The bits of a number as another type of the same size.
    assert isinstance(thing, Value), "bits are numbers"
    if thing.dtype.is_floating_point is kind.is_floating_point:
        return convert(thing, kind)
    if not thing.dtype.is_floating_point:
        thing = convert(thing, torch.int32 if thing.dtype.itemsize == 4 else torch.int64)
    name, _ = _BIT_CASTS[thing.dtype]
    return convert(functions.call(name, [thing]), kind)


def _names_in(node: Any) -> set[str]:
    # Every name that an expression or statement mentions.
    if isinstance(node, Name):
        return {node.name}
    if isinstance(node, tuple):
        return set().union(*map(_names_in, node))
    fields = getattr(node, "__dataclass_fields__", ())
    return set().union(*(_names_in(getattr(node, field)) for field in fields))


_EVALUATE: dict[type, Any] = {
    Literal: Evaluator.literal,
    Name: Evaluator.load_name,
    Unary: Evaluator.unary,
    Binary: Evaluator.binary,
    Assign: lambda self, node: self.load(self.assign(node)),
    Step: Evaluator.step,
    Conditional: Evaluator.conditional,
    Call: Evaluator.call,
    Cast: Evaluator.cast,
    Index: lambda self, node: self.load(self.locate(node)),
    Member: lambda self, node: self.load(self.locate(node)),
    InitList: lambda self, node: self.initialise(AUTO, node),
    SizeOf: Evaluator.size_of,
    Lambda: Evaluator.closure,
}
