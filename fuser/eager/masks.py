"""Which lanes run: masks as conjunctions of conditions, so that one mask can be told to lie within another.

A lane is one element of the tensors. Conditions that are Python bools never become part of a mask.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fuser.eager.data import Data
from fuser.eager.values import both, either, negate

__all__ = ["ALL", "NONE", "Chain", "Frame", "LaneCondition", "Mask", "any_lane", "any_of", "both_of"]


class Chain:
    """The masks of one loop, iteration by iteration: whoever runs a later iteration ran every earlier one."""

    __slots__ = ("implied", "number")

    def __init__(self) -> None:
        # How many masks there were.
        self.number = 0
        # What is true for every lane of an iteration, by the first mask that it is true for. Not the masks themselves,
        # which their places order: they would live until the garbage collector runs.
        self.implied: dict[Literal, int] = {}


class LaneCondition:
    """A bool for each lane, which counts by identity."""

    __slots__ = ("_negated", "chain", "data", "joined", "number")

    def __init__(self, data: Data, chain: Chain | None = None, number: int = 0) -> None:
        self.data = data
        self.chain = chain
        # Place in the chain.
        self.number = number
        # Conditions made of this and others, by whether it holds in the literals they deny, and the rest of those.
        self.joined: dict[tuple[bool, frozenset[Literal]], LaneCondition] = {}
        self._negated: Data = None

    @property
    def negated(self) -> Data:
        """The opposite, made once."""
        if self._negated is None:
            self._negated = negate(self.data)
        return self._negated


# A condition, and whether it must hold.
Literal = tuple[LaneCondition, bool]


class Mask:
    """The lanes for which every literal is true."""

    __slots__ = ("_data", "_highest", "_set", "guarded", "literals")

    def __init__(self, literals: tuple[Literal, ...] = ()) -> None:
        self.literals = literals
        # What is read under this mask with gradients for its lanes only, by the identity of the data.
        self.guarded: dict[int, tuple[Data, Data]] = {}
        self._set = frozenset(literals)
        self._highest: dict[Chain, int] | None = None
        self._data: Data = None

    @property
    def data(self) -> Data:
        """A bool for each lane; True for all lanes."""
        if self._data is None:
            self._data = _data_of(self.literals)
        return self._data

    def implies(self, literal: Literal) -> bool:
        """Whether the literal is true for every lane of the mask."""
        if literal in self._set:
            return True
        if self._highest is None:
            self._highest = {c.chain: c.number for c, positive in self.literals if c.chain is not None and positive}
        if any(number >= chain.implied.get(literal, number + 1) for chain, number in self._highest.items()):
            return True
        condition, holds = literal
        return condition.chain is not None and holds and self._highest.get(condition.chain, -1) >= condition.number

    def is_within(self, other: Mask) -> bool:
        """Whether every lane of this mask certainly is one of the other."""
        return self is NONE or self is other or (other is not NONE and all(map(self.implies, other.literals)))

    def is_apart(self, other: Mask) -> bool:
        """Whether certainly no lane is in both masks."""
        return any(self.implies((condition, not holds)) for condition, holds in other.literals)

    def extend(self, condition: LaneCondition, holds: bool = True) -> Mask:
        """Return the lanes for which the condition holds, too (or does not)."""
        literal = (condition, holds)
        if self is NONE or self.implies(literal):
            return self
        if self.implies((condition, not holds)):
            return NONE
        # A later iteration of a loop stands for the earlier ones.
        kept = self.literals
        if condition.chain is not None and holds:
            kept = tuple(item for item in kept if not (item[0].chain is condition.chain and item[1]))
        return Mask((*kept, literal))

    def without(self, other: Mask) -> Mask:
        """Return the lanes that are not in the other mask."""
        extras = self.beyond(other)
        if not extras:
            return NONE
        if len(extras) == 1:
            (condition, holds) = extras[0]
            return self.extend(condition, not holds)
        if any(self.implies((condition, not holds)) for condition, holds in extras):
            return self
        first, holds = extras[0]
        key = holds, frozenset(extras[1:])
        joined = first.joined.get(key)
        if joined is None:
            joined = first.joined[key] = LaneCondition(negate(_data_of(extras)))
        return self.extend(joined)

    def beyond(self, other: Mask) -> tuple[Literal, ...]:
        """Return the literals of the other mask that do not follow from this one."""
        return tuple(literal for literal in other.literals if not self.implies(literal))

    def common(self, other: Mask) -> Mask:
        """Return a mask that has every lane of both, as far as their literals tell."""
        kept = tuple(literal for literal in self.literals if other.implies(literal))
        return self if len(kept) == len(self.literals) else Mask(kept)


ALL = Mask()
# No lane at all.
NONE = Mask()


class Frame:
    """A part of the program that lanes enter together and leave at different times."""

    __slots__ = ("entry", "function", "kind", "mask", "result", "results")

    def __init__(self, kind: str, mask: Mask) -> None:
        # "function", "loop", "body" (one iteration), "switch" or "branch".
        self.kind = kind
        # Lanes that are still inside, and those that came in.
        self.mask = self.entry = mask
        # For a function, its syntax, the type of its result, and what lanes returned.
        self.function: Any = None
        self.result: Any = None
        self.results: list[tuple[Mask, Any]] = []


def both_of(literals: Iterable[Literal]) -> Data:
    """Return whether all literals are true, as data."""
    return _data_of(tuple(literals))


def any_lane(data: Data) -> bool:
    """Return whether a condition is true for any lane, in any batch that torch.func.vmap makes of them."""
    if isinstance(data, bool):
        return data
    while torch._C._functorch.is_functorch_wrapped_tensor(data):
        data = torch._C._functorch.get_unwrapped(data)
    return bool(data.any())


def any_of(masks: Iterable[Mask]) -> Data:
    """Return whether a lane is in one of the masks, as data."""
    found: Data = False
    for mask in masks:
        found = either(found, mask.data)
    return found


def _data_of(literals: tuple[Literal, ...]) -> Data:
    found: Data = True
    for condition, holds in literals:
        found = both(found, condition.data if holds else condition.negated)
    return found
