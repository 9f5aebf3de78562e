"""Where values live: variables, arrays and structs whose lanes may have been written at different times.

Note [Layers]
A variable keeps what was written last beside what it held before, with the mask it was written under. Who reads under a
mask within the last one gets the value as it was written: a counter stays a constant for the lanes that are still in
the loop, and only who reads it afterwards gets a ``where`` of both.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from fuser.cxx.nodes import Lambda
from fuser.eager.data import Value, emit
from fuser.eager.masks import ALL, Frame, LaneCondition, Mask, both_of
from fuser.eager.promotion import convert
from fuser.eager.state import Scope, State
from fuser.eager.types import ArrayOf, ClassType, CppType, FunctionType, PointerTo
from fuser.eager.values import select

__all__ = [
    "Aggregate",
    "Choice",
    "Closure",
    "Fixed",
    "Location",
    "NoTranslation",
    "Pointer",
    "SubstitutionError",
    "Thing",
    "choose",
    "make_location",
    "parts_of",
    "zero_of",
]

aten = torch.ops.aten


class NoTranslation(Exception):  # noqa: N818 - turned into UntranslatableError by who knows the place
    """What is asked for cannot be done; the message names the construct."""


class SubstitutionError(Exception):
    """A type does not exist for these template arguments: another overload may fit."""


@dataclass(frozen=True, slots=True, eq=False)
class Aggregate:
    """The value of an array or a struct: one thing per element or field."""

    type: CppType
    parts: tuple[Thing, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Pointer:
    """Points at one of several places; ``view`` is the type it was cast to, to read other bits."""

    targets: Sequence[Location]
    # int64.
    offset: Value
    element: CppType
    view: torch.dtype | None = None

    @property
    def type(self) -> CppType:
        """Its C++ type."""
        return PointerTo(self.view or self.element)


@dataclass(frozen=True, slots=True, eq=False)
class Closure:
    """A lambda with the names it sees."""

    syntax: Lambda
    scope: Scope

    @property
    def type(self) -> CppType:
        """Its C++ type."""
        return FunctionType()


Thing: TypeAlias = "Value | Aggregate | Pointer | Closure"


class Location:
    """Something that can be read and perhaps written."""

    __slots__ = ("type",)

    def __init__(self, kind: CppType) -> None:
        self.type = kind

    @abstractmethod
    def load(self, state: State) -> Thing:
        """Return the value for the lanes that run."""

    @abstractmethod
    def store(self, state: State, thing: Thing) -> None:
        """Write a value of this location's type for the lanes that run."""

    def part(self, index: int) -> Location:  # noqa: ARG002 - arrays and structs have parts
        """Return an element or a field."""
        raise NoTranslation("an index into something that is no array")

    @property
    def length(self) -> int:
        """How many elements there are."""
        raise NoTranslation("an index into something that is no array")


class Variable(Location):
    """A variable of an arithmetic or pointer type; see Note [Layers]."""

    __slots__ = ("frame", "layers")

    def __init__(self, kind: CppType, frame: Frame) -> None:
        super().__init__(kind)
        # Lanes that have left this frame never read the variable again.
        self.frame = frame
        # Oldest first; each with the lanes it was written for.
        self.layers: list[tuple[Mask, Thing]] = []

    def load(self, state: State) -> Thing:
        """See ``Location``."""
        if state.is_dry:
            return _any_of(self.type, self.layers[-1][1] if self.layers else None)
        mask = state.mask
        written, found = self._resolve(mask)
        if not state.is_differentiable or all(map(written.implies, mask.literals)):
            return found
        return _guard(mask, found)

    def _resolve(self, mask: Mask) -> tuple[Mask, Thing]:
        # The value for the lanes of a mask, and the literals under which all parts of it were computed.
        found: list[tuple[Mask, Thing]] = []
        for written, thing in reversed(self.layers):
            if mask.is_apart(written):
                continue
            found.append((written, thing))
            if mask.is_within(written):
                break
        if not found:
            return ALL, zero_of(self.type)
        written, thing = found.pop()
        for later, newer in reversed(found):
            condition = both_of(mask.beyond(later))
            thing = choose(condition, newer, thing)
            written = written.common(later)
        return written, thing

    def store(self, state: State, thing: Thing) -> None:
        """See ``Location``."""
        if state.is_dry:
            return
        mask = state.mask
        if self.frame.mask.is_within(mask):
            self.layers = [(mask, thing)]
            return
        self.layers = [item for item in self.layers if not item[0].is_within(mask)]
        if len(self.layers) > 1:
            (oldest, old), (later, newer), *rest = self.layers
            merged = choose(both_of(oldest.beyond(later)), newer, old)
            self.layers = [(oldest.common(later), merged), *rest]
        self.layers.append((mask, thing))


class Fixed(Location):
    """A value without a place of its own: what an expression gave, and the mask it was computed under."""

    __slots__ = ("thing", "written")

    def __init__(self, thing: Thing, written: Mask = ALL) -> None:
        super().__init__(thing.type)
        self.thing = thing
        self.written = written

    def load(self, state: State) -> Thing:
        """See ``Location``."""
        if not state.is_differentiable or state.is_dry or all(map(self.written.implies, state.mask.literals)):
            return self.thing
        return _guard(state.mask, self.thing)

    def store(self, state: State, thing: Thing) -> None:  # noqa: ARG002 - never works
        """See ``Location``."""
        raise NoTranslation("an assignment to something that is no variable")

    def part(self, index: int) -> Location:
        """See ``Location``."""
        if not isinstance(self.thing, Aggregate):
            return super().part(index)
        return Fixed(self.thing.parts[index], self.written)

    @property
    def length(self) -> int:
        """See ``Location``."""
        return len(self.thing.parts) if isinstance(self.thing, Aggregate) else super().length


class Object(Location):
    """A struct, or an array: its parts are locations."""

    __slots__ = ("parts",)

    def __init__(self, kind: CppType, parts: Sequence[Location]) -> None:
        super().__init__(kind)
        self.parts = parts

    def load(self, state: State) -> Thing:
        """See ``Location``."""
        return Aggregate(self.type, tuple(part.load(state) for part in self.parts))

    def store(self, state: State, thing: Thing) -> None:
        """See ``Location``."""
        assert isinstance(thing, Aggregate), "of this type"
        for part, value in zip(self.parts, thing.parts, strict=True):
            part.store(state, value)

    def part(self, index: int) -> Location:
        """See ``Location``."""
        if not 0 <= index < len(self.parts):
            raise NoTranslation(f"the index {index} into an array of {len(self.parts)}")
        return self.parts[index]

    @property
    def length(self) -> int:
        """See ``Location``."""
        return len(self.parts)


class Choice(Location):
    """One of several places, by a condition each; the last one is for all other state."""

    __slots__ = ("options",)

    def __init__(self, options: Sequence[tuple[LaneCondition, Location]]) -> None:
        super().__init__(options[0][1].type)
        self.options = options

    def load(self, state: State) -> Thing:
        """See ``Location``."""
        found = self.options[-1][1].load(state)
        for condition, location in reversed(self.options[:-1]):
            found = choose(condition.data, location.load(state), found)
        return found

    def store(self, state: State, thing: Thing) -> None:
        """See ``Location``."""
        for condition, location in self.options:
            with state.branch(condition):
                location.store(state, thing)

    def part(self, index: int) -> Location:
        """See ``Location``."""
        return Choice([(condition, location.part(index)) for condition, location in self.options])

    @property
    def length(self) -> int:
        """See ``Location``."""
        return self.options[0][1].length


class Punned(Location):
    """Another location's bits as another type."""

    __slots__ = ("location", "read", "write")

    def __init__(self, location: Location, kind: torch.dtype, read: Any, write: Any) -> None:
        super().__init__(kind)
        self.location = location
        self.read = read
        self.write = write

    def load(self, state: State) -> Thing:
        """See ``Location``."""
        thing = self.read(self.location.load(state))
        assert isinstance(thing, Value), "bits are numbers"
        return thing

    def store(self, state: State, thing: Thing) -> None:
        """See ``Location``."""
        self.location.store(state, self.write(thing))


def parts_of(location: Location) -> Sequence[Location]:
    """Return an array's elements as locations; those of a variable are one list, by which pointers know the array."""
    return location.parts if isinstance(location, Object) else [location.part(n) for n in range(location.length)]


def make_location(kind: CppType, frame: Frame) -> Location:
    """Return a new place for a value of a type, nothing written yet."""
    if isinstance(kind, ArrayOf):
        return Object(kind, [make_location(kind.element, frame) for _ in range(kind.length)])
    if isinstance(kind, ClassType):
        return Object(kind, [make_location(field, frame) for field in kind.fields.values()])
    return Variable(kind, frame)


def choose(condition: Any, yes: Thing, no: Thing) -> Thing:
    """Return ``condition ? yes : no`` for two things of one type.

    Raises:
        NoTranslation: they are pointers into different arrays, or functions.
    """
    if condition is True or yes is no:
        return yes
    if condition is False:
        return no
    if isinstance(yes, Value) and isinstance(no, Value):
        return select(condition, yes, no)
    if isinstance(yes, Aggregate) and isinstance(no, Aggregate):
        parts = tuple(choose(condition, one, other) for one, other in zip(yes.parts, no.parts, strict=True))
        return Aggregate(yes.type, parts)
    if isinstance(yes, Pointer) and isinstance(no, Pointer) and yes.targets is no.targets and yes.view is no.view:
        return Pointer(yes.targets, select(condition, yes.offset, no.offset), yes.element, yes.view)
    raise NoTranslation("a pointer or function that depends on data")


def zero_of(kind: CppType) -> Thing:
    """Return what a variable of a type holds that nobody wrote: anything."""
    if isinstance(kind, torch.dtype):
        return convert(Value(torch.int32, 0), kind)
    if isinstance(kind, ArrayOf):
        return Aggregate(kind, tuple(zero_of(kind.element) for _ in range(kind.length)))
    if isinstance(kind, ClassType):
        return Aggregate(kind, tuple(map(zero_of, kind.fields.values())))
    raise NoTranslation("a pointer that points nowhere")


def _guard(mask: Mask, thing: Thing) -> Thing:
    # The same value; gradients reach it from the lanes of the mask only.
    if isinstance(thing, Aggregate):
        return Aggregate(thing.type, tuple(_guard(mask, part) for part in thing.parts))
    if not isinstance(thing, Value) or thing.is_constant or not thing.dtype.is_floating_point | thing.dtype.is_complex:
        return thing
    known = mask.guarded.get(id(thing.data))
    if known is None:
        detached = emit(aten.detach.default, thing.data, dtype=thing.dtype)
        guarded = emit(aten.where.self, mask.data, thing.data, detached, dtype=thing.dtype)
        known = mask.guarded[id(thing.data)] = (thing.data, guarded)
    return Value(thing.dtype, known[1])


def _any_of(kind: CppType, known: Thing | None) -> Thing:
    # Something of a type, when only types count.
    return convert(Value(torch.int32, 1), kind) if isinstance(kind, torch.dtype) else known or zero_of(kind)
