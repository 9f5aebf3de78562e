"""Conversions and initialisers: what becomes of a value where another type is wanted."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from fuser.cxx.nodes import (
    Cast,
    Expression,
    Index,
    InitList,
    Member,
    Name,
    SizeOf,
    TypeSyntax,
)
from fuser.eager.math import functions
from fuser.eager.places import Locator
from fuser.eager.storage import (
    Aggregate,
    Fixed,
    Location,
    NoTranslation,
    Pointer,
    Thing,
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
from fuser.eager.values import Value, constant, convert

__all__ = ["Converter"]


class Converter(Locator):
    """Makes values of a type."""

    @abstractmethod
    def construct(self, kind: ClassType, operands: Sequence[Location]) -> Thing:
        """Return an object as its constructor makes it."""

    @abstractmethod
    def call_operator(self, operator: str, operands: Sequence[Location]) -> Thing | None:
        """Call the functor's own operator; None if it defines none for an object."""

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
        if isinstance(kind, ClassType) and kind.named(kind.struct.name) and not _is_a(thing, kind):
            return self.construct(kind, (Fixed(thing, self.mask),))
        if kind is AUTO or (not isinstance(thing, Value | Pointer) and thing.type == kind):
            return thing
        have = thing.dtype if isinstance(thing, Value) else thing.type
        raise NoTranslation(f"a conversion of {describe_type(have)} to {describe_type(kind)}")

    def _cast(self, node: Cast) -> Thing:
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
            if isinstance(kind, ClassType) and kind.named(kind.struct.name):
                return self.construct(kind, [self.locate(item) for item in values])
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

    def _size_of(self, node: SizeOf) -> Value:
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

    def write(self, location: Location, thing: Thing) -> None:
        """Store a thing, converted to the location's type."""
        location.store(self, self.convert(thing, location.type))

    def copy(self, location: Location) -> Location:
        """Return a new place with the same value."""
        made = make_location(location.type, self.frames[-1])
        made.store(self, location.load(self))
        return made


def _is_a(thing: Thing, kind: ClassType) -> bool:
    return not isinstance(thing, Value) and thing.type == kind


def _size(kind: CppType) -> int:
    match kind:
        case torch.dtype():
            return kind.itemsize
        case ArrayOf(element, length):
            return length * _size(element)
        case PointerTo():
            return 8
    raise NoTranslation(f"sizeof {describe_type(kind)}")
