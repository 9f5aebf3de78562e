"""Where expressions live: variables, elements, members, what pointers point at."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fuser.cxx.nodes import (
    Assign,
    Binary,
    Conditional,
    Expression,
    Index,
    Member,
    Name,
    Place,
    Step,
    TypeSyntax,
    Unary,
)
from fuser.cxx.statements import (
    Function,
)
from fuser.eager.masks import Condition, Frame, Mask
from fuser.eager.math import functions
from fuser.eager.resolve import Resolver, SubstitutionError
from fuser.eager.storage import (
    Choice,
    Fixed,
    Location,
    NoTranslation,
    Object,
    Pointer,
    Punned,
    Thing,
    zero_of,
)
from fuser.eager.types import (
    ArrayOf,
    ClassType,
    CppType,
    describe_type,
    trait,
)
from fuser.eager.values import PLACE, Value, binary, constant, convert, negate

__all__ = ["Locator"]

_CONSTANTS = {
    "INFINITY": math.inf,
    "POS_INFINITY": math.inf,
    "NEG_INFINITY": -math.inf,
    "NAN": math.nan,
}


_BIT_CASTS = {
    torch.float32: ("__float_as_int", torch.int32),
    torch.float64: ("__double_as_longlong", torch.int64),
    torch.int32: ("__int_as_float", torch.float32),
    torch.int64: ("__longlong_as_double", torch.float64),
}


class Locator(Resolver):
    """Finds the location of an expression, for the lanes that run."""

    frames: list[Frame]
    is_differentiable: bool
    is_dry: bool
    # Functions that are being run, outermost first.
    running: list[Function]
    # Most places that one index which depends on data may choose from; None where tensors have values.
    limit: int | None

    @abstractmethod
    def evaluate(self, node: Expression) -> Thing:
        """Return what an expression is worth."""

    @abstractmethod
    def assign(self, node: Assign) -> Location:
        """Run an assignment; return what it assigned to."""

    @abstractmethod
    def step(self, node: Step) -> Thing:
        """Run ``++`` or ``--``; return its value."""

    @abstractmethod
    def data_dependent(self, why: str) -> Exception:
        """Return the exception for what needs values and stands in a graph."""

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

    def locate(self, node: Expression) -> Location:
        """Return where an expression lives; what has no place of its own gets one that cannot be written."""
        self.at(node.place)
        match node:
            case Name():
                return self._locate_name(node)
            case Index(place, array, index):
                return self._locate_element(place, array, index)
            case Unary(_, "*", operand):
                return self._target(self._pointer(operand))
            case Member(_, value, name):
                return self._locate_member(value, name)
            case Assign():
                return self.assign(node)
            case Step(_, _, target, True):
                self.step(node)
                return self.locate(target)
            case Binary(_, ",", left, right):
                self.evaluate(left)
                return self.locate(right)
            case Conditional(_, condition, yes, no) if self._are_alike(yes, no):
                found = self.condition(condition)
                if isinstance(found, bool):
                    return self.locate(yes if found else no)
                return Choice([(Condition(found), self.locate(yes)), (Condition(negate(found)), self.locate(no))])
        return Fixed(self.evaluate(node), self.mask)

    def _are_alike(self, one: Expression, other: Expression) -> bool:
        # Whether two expressions have places of one type: then a conditional expression has one, too.
        if not isinstance(one, Name | Index | Member) or not isinstance(other, Name | Index | Member):
            return False
        with self.dry():
            return self.locate(one).type == self.locate(other).type

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

    def _locate_name(self, node: Name) -> Location:
        found = self.scope.find(f"{node.name}::{node.member}" if node.member else node.name)
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

    def _locate_element(self, place: Place, array: Expression, index: Expression) -> Location:
        base = self.locate(array)
        at = self.value(index)
        self.at(place)
        if isinstance(base.type, ArrayOf):
            targets = base.parts if isinstance(base, Object) else _parts(base)
            return self.element(targets, convert(at, torch.int64), base.type.element)
        pointer = base.load(self)
        if not isinstance(pointer, Pointer):
            raise NoTranslation("an index into something that is no array")
        return self._target(pointer, at)

    def _locate_member(self, value: Expression, name: str) -> Location:
        base = self.locate(value)
        kind = base.type
        if isinstance(kind, ClassType) and name in kind.fields:
            return base.part(list(kind.fields).index(name))
        raise NoTranslation(f"the member {name!r} of {describe_type(kind)}")

    def load(self, location: Location) -> Thing:
        """Return the value at a location; an array's is a pointer to its first element."""
        if isinstance(location.type, ArrayOf):
            return self._decay(location)
        return location.load(self)

    def _decay(self, location: Location) -> Pointer:
        assert isinstance(location.type, ArrayOf), "who asks looked"
        targets = location.parts if isinstance(location, Object) else _parts(location)
        return Pointer(targets, constant(0, torch.int64), location.type.element)

    def _pointer(self, node: Expression) -> Pointer:
        found = self.evaluate(node)
        if isinstance(found, Pointer):
            return found
        self.at(node.place)
        raise NoTranslation("a pointer that cannot be followed")

    def _target(self, pointer: Pointer, index: Value | None = None) -> Location:
        offset = pointer.offset if index is None else binary("+", pointer.offset, convert(index, torch.int64))
        found = self.element(pointer.targets, offset, pointer.element)
        return found if pointer.view is None else self._pun(found, pointer.view)

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

    def _pun(self, location: Location, kind: torch.dtype) -> Location:
        source = location.type
        if not isinstance(source, torch.dtype) or source.itemsize != kind.itemsize:
            raise NoTranslation(f"a {describe_type(source)} read as {describe_type(kind)}")
        return Punned(location, kind, lambda v: _bits(v, kind), lambda v: _bits(v, source))


def _parts(location: Location) -> list[Location]:
    return [location.part(number) for number in range(location.length)]


def _bits(thing: Thing, kind: torch.dtype) -> Value:
    # The bits of a number as another type of the same size.
    assert isinstance(thing, Value), "bits are numbers"
    if thing.dtype.is_floating_point is kind.is_floating_point:
        return convert(thing, kind)
    if not thing.dtype.is_floating_point:
        thing = convert(thing, torch.int32 if thing.dtype.itemsize == 4 else torch.int64)
    name, _ = _BIT_CASTS[thing.dtype]
    return convert(functions.call(name, [thing]), kind)
