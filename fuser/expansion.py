"""What becomes of a group whose composites are taken apart; a group without any is its own."""

from __future__ import annotations

from typing import NamedTuple

from fuser.function import View
from fuser.graph import FusionGroup

__all__ = ["Expansion"]


class Expansion(NamedTuple):
    """A group with the steps of its composites in their place."""

    group: FusionGroup
    # For each of its inputs which one of the group it is, and in which shape; for each output, in which shape it is
    # given back.
    inputs: tuple[tuple[int, View | None], ...]
    outputs: tuple[View | None, ...]
    # For each of its applications the one of the group that it is a step of.
    origins: tuple[int, ...]
