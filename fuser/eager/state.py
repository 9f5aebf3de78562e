"""What a run of the interpreter changes, and which function is in charge of which kind of syntax."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fuser.cxx.statements import Program
from fuser.eager.data import PLACE, Value
from fuser.eager.masks import ALL, Frame, LaneCondition, Mask

__all__ = ["Scope", "State", "Tables"]


class Scope:
    """Names and what they stand for: a location, or a type."""

    __slots__ = ("names", "parent")

    def __init__(self, parent: Scope | None, names: dict[str, Any] | None = None) -> None:
        self.parent = parent
        self.names: dict[str, Any] = names if names is not None else {}

    def find(self, name: str) -> Any:
        """Return what a name stands for; None when it is unknown."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.parent
        return None

    def types(self) -> dict[str, Any]:
        """Return the names that stand for types or template arguments, but those of the outermost scope."""
        if self.parent is None:
            return {}
        own = {name: item for name, item in self.names.items() if isinstance(item, Value | torch.dtype)}
        return self.parent.types() | own


@dataclass(frozen=True, slots=True)
class Tables:
    """For each type of node the function that takes the state and the node.

    Syntax contains syntax of every other kind, so that who is in charge of one kind calls who is in charge of another.
    They find each other here, and no module has to import those above it.
    """

    # Runs a statement.
    run: Mapping[type, Callable[[State, Any], None]]
    # Returns what an expression is worth, a Thing.
    evaluate: Mapping[type, Callable[[State, Any], Any]]
    # Returns the Location of an expression, or None where it has no place of its own.
    locate: Mapping[type, Callable[[State, Any], Any]]


@dataclass(slots=True, eq=False)
class State:
    """One run of a program."""

    # The functor's syntax.
    program: Program
    tables: Tables
    # What nodes are added to; None to run on tensors.
    graph: fx.Graph | None
    # Most iterations of all loops together, and elements an index that depends on data may choose from, in a graph;
    # None where tensors have values.
    limit: int | None
    # Whether gradients must not reach lanes that do not run.
    is_differentiable: bool
    # Whether only types count: nothing is read or written.
    is_dry: bool = False
    # Functions' outermost scope: constants and types.
    globals: Scope = field(default_factory=lambda: Scope(None))
    scope: Scope = field(init=False)
    frames: list[Frame] = field(default_factory=lambda: [Frame("program", ALL)])
    # Of all loops together.
    iterations: int = 0
    # Given back when the program has run.
    resources: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.scope = self.globals

    @property
    def mask(self) -> Mask:
        """The lanes that run."""
        return self.frames[-1].mask

    @contextmanager
    def within(self, scope: Scope) -> Iterator[None]:
        """Look names up in a scope."""
        before, self.scope = self.scope, scope
        try:
            yield
        finally:
            self.scope = before

    @contextmanager
    def inside(self, kind: str, mask: Mask | None = None) -> Iterator[Frame]:
        """Open a frame for a mask, or for the lanes that run."""
        frame = Frame(kind, self.mask if mask is None else mask)
        depth = len(self.frames)
        self.frames.append(frame)
        try:
            yield frame
        finally:
            del self.frames[depth:]

    def branch(self, condition: LaneCondition, holds: bool = True) -> AbstractContextManager[Frame]:
        """Run what is inside for the lanes for which the condition holds (or does not)."""
        return self.inside("branch", self.mask.extend(condition, holds))

    @contextmanager
    def dry(self) -> Iterator[None]:
        """Evaluate what is inside for its types only."""
        before, scope, depth, place = self.is_dry, self.scope, len(self.frames), PLACE.get()
        self.is_dry = True
        try:
            yield
        finally:
            self.is_dry, self.scope = before, scope
            PLACE.set(place)
            del self.frames[depth:]

    def leave(self, *kinds: str) -> None:
        """Take the lanes that run out of every frame up to the innermost of a kind."""
        leaving = self.mask
        for frame in reversed(self.frames):
            frame.mask = frame.mask.without(leaving)
            if frame.kind in kinds:
                return
        raise AssertionError("whoever leaves one is in it")  # pragma: no cover
