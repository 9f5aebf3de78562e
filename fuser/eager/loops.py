"""Loops: iterations that are known in advance are Python's, others go on as long as a lane is left."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from fuser.cxx.nodes import (
    ReferenceType,
    Statement,
)
from fuser.cxx.statements import Condition as ConditionSyntax
from fuser.cxx.statements import (
    DoWhile,
    For,
    RangeFor,
    While,
)
from fuser.eager.calls import Caller
from fuser.eager.masks import NONE, Chain, Condition, Frame, Mask, any_lane, both_of
from fuser.eager.storage import (
    Scope,
    make_location,
)
from fuser.eager.types import AUTO

__all__ = ["Looper"]


class Looper(Caller):
    """Runs loops."""

    # Of all loops together.
    iterations: int

    @abstractmethod
    def run(self, statement: Statement) -> None:
        """Run a statement for the lanes that are there."""

    def _run_for(self, node: For) -> None:
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

    def _run_while(self, node: While) -> None:
        scope, self.scope = self.scope, Scope(self.scope)
        self.frames.append(Frame("loop", self.mask))
        self.loop(node, lambda: self._decide(node.condition), lambda: None)
        self.scope = scope

    def _run_do(self, node: DoWhile) -> None:
        self.frames.append(Frame("loop", self.mask))
        self.loop(node, lambda: self.condition(node.condition), lambda: None)

    def loop(
        self, node: For | While | DoWhile, condition: Callable[[], Any] | None, step: Callable[[], object]
    ) -> None:
        """Run a loop inside the frame that was opened for it; close the frame."""
        frame = self.frames[-1]
        entry, chain = frame.mask, Chain()
        is_first_free = isinstance(node, DoWhile)
        while frame.mask is not NONE:
            if condition is not None and not is_first_free:
                holds = condition()
                if holds is False:
                    break
                if holds is not True:
                    frame.mask = frame.mask.extend(Condition(holds))
            is_first_free = False
            if not self._renew(frame, entry, chain):
                break
            self.at(node.place)
            self._count_iteration(node)
            self._run_inside("body", node.body)
            if not self._renew(frame, entry, chain):
                break
            step()
        self.frames.pop()

    def _renew(self, frame: Frame, entry: Mask, chain: Chain) -> bool:
        """Let one condition stand for all that made lanes leave a loop so far; return whether any may be left."""
        literals = entry.beyond(frame.mask)
        if frame.mask is NONE or not literals or (len(literals) == 1 and literals[0][0].chain is chain):
            return frame.mask is not NONE
        data = both_of(literals)
        number = chain.number = chain.number + 1
        # Where tensors have values, conditions of the past are not kept for it.
        known = chain.implied if self.graph is not None else {}
        chain.implied = {**dict.fromkeys(literals, number), **known}
        frame.mask = entry.extend(Condition(data, chain, number))
        return self.graph is not None or any_lane(frame.mask.data)

    def _count_iteration(self, node: For | While | DoWhile | RangeFor) -> None:
        self.iterations += 1
        if self.limit is not None and (self.iterations > self.limit or self.size > 32 * self.limit):
            text = node.condition.text if isinstance(node, While) else getattr(node, "text", "")
            raise self.data_dependent(f"the loop runs while {text}" if text else "the loop is too long for a graph")

    @property
    def size(self) -> int:
        """How many nodes the graph has."""
        return 0 if self.graph is None else len(self.graph.nodes)

    def _run_range(self, node: RangeFor) -> None:
        whole = self.locate(node.array)
        scope, self.scope = self.scope, Scope(self.scope)
        self.frames.append(Frame("loop", self.mask))
        for number in range(whole.length):
            if self.mask is NONE:
                break
            self._count_iteration(node)
            part = whole.part(number)
            is_reference = isinstance(node.variable.type, ReferenceType)
            location = part
            if not is_reference:
                kind = self.resolve(node.variable.type)
                location = make_location(part.type if kind is AUTO else kind, self.frames[-1])
                self.write(location, self.load(part))
            self.scope.names[node.variable.name] = location
            self._run_inside("body", node.body)
        self.frames.pop()
        self.scope = scope

    def _run_inside(self, kind: str, statement: Statement) -> None:
        # In a frame of its own, for all lanes.
        self.frames.append(Frame(kind, self.mask))
        self.run(statement)
        self.frames.pop()

    def _decide(self, node: ConditionSyntax) -> Any:
        if node.declaration is not None:
            self.run(node.declaration)
        return self.condition(node.value)
