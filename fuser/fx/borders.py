"""Where to cut between groups that cannot be one: what says where elements lie, and what reduces, share no kernel.

The partitioner grows groups in the order of the graph, so that pointwise work between the two goes to whoever comes
first. Here it is counted which cut moves the fewest bytes: of a rotation's gradient only the last sum, in 16 bits, goes
to the gradient of a norm, and not what that makes of it in float32.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fuser.fx.gains import count_bytes

__all__ = ["Kinds", "find_misplaced"]

# How many nodes may change sides: rarely more than a few.
MAX_MOVES = 32


@dataclass(frozen=True, slots=True)
class Kinds:
    """Nodes whose groups cannot be one, two of each kind: those that arrange, and those that need all of a row."""

    arranging: Collection[fx.Node]
    whole: Collection[fx.Node]

    def add(self, other: Kinds) -> Kinds:
        """Return both together."""
        return Kinds({*self.arranging, *other.arranging}, {*self.whole, *other.whole})


def find_misplaced(groups: Sequence[Sequence[fx.Node]], kinds: Kinds) -> Kinds:
    """Return pointwise nodes that belong on the other side of a border, as if they were of the kind there.

    Args:
        groups: as they were found, each in the order of the graph.
        kinds: of their nodes.
    """
    found = Kinds(set(), set())
    homes = {node: slot for slot, group in enumerate(groups) for node in group}
    sides = [tuple(any(node in kind for node in group) for kind in (kinds.arranging, kinds.whole)) for group in groups]
    for slot, group in enumerate(groups):
        readers = {homes[user] for node in group for user in node.users if user in homes} - {slot}
        for reader in sorted(readers):
            pair = (group, groups[reader])
            if {sides[slot], sides[reader]} == {(True, False), (False, True)}:
                moved, is_down = _find_best(*pair, kinds)
                is_whole = sides[reader if is_down else slot][1]
                (found.whole if is_whole else found.arranging).update(moved)  # type: ignore[attr-defined]
    return found


def _find_best(first: Sequence[fx.Node], second: Sequence[fx.Node], kinds: Kinds) -> tuple[set[fx.Node], bool]:
    # What moves to the other group so that the two move the fewest bytes, and whether it moves down. Where as many move
    # it goes to what reduces, which may share with others what it reads.
    best, least, is_down = set[fx.Node](), _count_traffic(first) + _count_traffic(second), True
    for down, sets in ((True, _lower_ends(first, second, kinds)), (False, _upper_ends(first, second, kinds))):
        for moved in sets:
            kept, others = (first, second) if down else (second, first)
            traffic = _count_traffic({*kept} - moved) + _count_traffic({*others} | moved)
            if traffic < least or (traffic == least and any(node in kinds.whole for node in others)):
                best, least, is_down = {*moved}, traffic, down
    return best, is_down


def _lower_ends(first: Sequence[fx.Node], second: Sequence[fx.Node], kinds: Kinds) -> Iterator[set[fx.Node]]:
    # Ever more nodes of the first group that only the second reads.
    inside, moved = {*second}, set[fx.Node]()
    for node in reversed(first):
        if _is_pointwise(node, kinds) and inside.issuperset(node.users) and len(moved) < MAX_MOVES:
            inside.add(node)
            moved.add(node)
            yield moved


def _upper_ends(first: Sequence[fx.Node], second: Sequence[fx.Node], kinds: Kinds) -> Iterator[set[fx.Node]]:
    # Ever more nodes of the second group that read nothing but what the first makes or reads.
    known, moved = {*first, *(source for node in first for source in node.all_input_nodes)}, set[fx.Node]()
    for node in second:
        if _is_pointwise(node, kinds) and known.issuperset(node.all_input_nodes) and len(moved) < MAX_MOVES:
            known.add(node)
            moved.add(node)
            yield moved


def _is_pointwise(node: fx.Node, kinds: Kinds) -> bool:
    is_one = not isinstance(node.meta.get("val"), list | tuple) and node.target is not torch.ops.fuser.run.default
    return is_one and node not in kinds.arranging and node not in kinds.whole


def _count_traffic(group: Collection[fx.Node]) -> int:
    read = {source for node in group for source in node.all_input_nodes if source not in group}
    written = [node for node in group if any(user not in group for user in node.users)]
    return sum(count_bytes(node.meta.get("val")) for node in (*read, *written))
