"""Which nodes of an FX graph become one group: maximal convex sets of functor calls and table ops.

A set is convex when no path leaves it and comes back: only then can it run as one step. Nodes that write to their
arguments, and functions and modules that are not torch's and might, are barriers; nothing moves across one, so the
stretches between them are looked at one by one. Nodes that draw random numbers keep their order.

Note [Masks]: which nodes come before and after each one is a mask of its stretch, one bit per node, worked out once
from the edges. Masks say which units can be partners at all, so that the others are not tried one by one: where a path
leads from one unit to the other there must be an edge as well, and where none does their outputs add up. That a group
is one step now, so that what enters it at one node comes before what leaves it at another, is not in the masks: when
two units are about to merge, the groups between them are looked up one by one, from both ends at once.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fuser.fx.borders import Kinds, find_misplaced
from fuser.fx.conversions import find_visible_aliases
from fuser.fx.effects import is_barrier, is_random
from fuser.fx.gains import crosses_rows, gains_nothing, is_small
from fuser.fx.nodes import IS_APART, IS_WRITTEN, bind_group, find_readers, is_copy, read_nodes
from fuser.fx.repeats import are_repeated, count_elements
from fuser.jit_function import JitFunction
from fuser.kernel_spec import MAX_INPUTS, MAX_OUTPUTS
from fuser.ops import OpCall

__all__ = ["Partition", "is_whole", "partition"]

# Longer chains only make longer kernels; a bound keeps compile time bounded.
MAX_APPLICATIONS = 128
# A mask has as many bits: a longer stretch is cut, so that time and memory stay in proportion to the graph.
MAX_STRETCH = 1 << 11
# How many units that only read the same values a node tries. Most of those that do not fit are never tried.
MAX_TRIES = 256
# How many groups that have nothing to do with it a group tries, those of so many nodes before it first.
MAX_SIBLINGS, NEAR = 8, 32
# How many groups are looked up from either end to find that two units can merge; rarely more than a few.
MAX_STEPS = 256


@dataclass(frozen=True, slots=True)
class Partition:
    """Nodes that become one fusion node, in the order of the graph."""

    nodes: tuple[fx.Node, ...]
    # What each applies; None for a group that is inlined, and for the items of what has several outputs.
    calls: tuple[OpCall | None, ...]


def partition(graph: fx.Graph, *, reduces: bool = True, device_type: str = "") -> list[Partition]:
    """Return the groups of a graph, in the order of the graph.

    Args:
        graph: what is cut.
        reduces: whether torch's reductions may be part of groups.
        device_type: where its values are, if nodes do not say so.
    """
    nodes = list(graph.nodes)
    reading = read_nodes(nodes, device_type)
    calls = {node: reading.calls[node] for node in nodes if reading.is_fusible(node)}
    # What a group reads a number from is computed before the group.
    held = {value for node, call in calls.items() if call is None for value in _held_numbers(node)}
    calls = {node: call for node, call in calls.items() if node not in held}
    if not reduces:
        calls = {node: call for node, call in calls.items() if call is None or not (call.reduces or call.is_view)}
    calls = _without_other_views(nodes, calls)
    groups = _group(nodes, calls)
    hidden = {view for group in groups for view in _find_hidden(group, calls)}
    if hidden:
        groups = _group(nodes, {node: call for node, call in calls.items() if node not in hidden})
    return [
        Partition(tuple(group), tuple(reading.calls[node] for node in group))
        for group in groups
        if not gains_nothing(group, reading)
    ]


def _group(nodes: Sequence[fx.Node], calls: Mapping[fx.Node, OpCall | None]) -> list[list[fx.Node]]:
    # What can be part of a group writes to nothing.
    barriers = {node for node in nodes if node not in calls and is_barrier(node)}
    visible = find_visible_aliases(nodes, calls, barriers)
    fusible = {node for node in calls if node not in visible}
    # What returns a tuple, of which others take the items.
    several = {node: calls[node] for node in fusible if _returns_several(node, calls[node])}
    kinds = Kinds(
        {node for node in fusible if _arranges(node, calls[node])},
        {node for node in fusible if is_whole(node, calls[node])},
    )
    return [
        group
        for stretch in _cut_stretches(nodes, barriers)
        for group in _find_groups(stretch, fusible, several, kinds, calls)
    ]


_RESHAPED = {torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default, torch.ops.aten.alias.default}


def _find_hidden(group: Sequence[fx.Node], calls: Mapping[fx.Node, OpCall | None]) -> Iterator[fx.Node]:
    # Graphs copy what they could not see in another shape. Arithmetic reads it as it was before, but nothing that says
    # where elements of the new shape lie: views of such copies on which an arrangement in the group depends.
    rearranged: set[fx.Node] = set()
    members = {*group}
    for node in reversed(group):
        call = calls.get(node)
        arranges = call is not None and (call.arranges or call.is_view) and node.target not in _RESHAPED
        if arranges or any(user in rearranged for user in node.users if user in members):
            rearranged.add(node)
        is_view = node in rearranged and node.target in _RESHAPED
        if is_view and is_copy(calls.get(node.all_input_nodes[0])):
            yield node


def _without_other_views(nodes: Sequence[fx.Node], calls: dict[fx.Node, OpCall | None]) -> dict[fx.Node, OpCall | None]:
    # Views of what was reduced join it to what it was reduced from, and views of what is computed join it to what reads
    # it, if nobody else does: others stay torch's.
    reduced: set[fx.Node] = set()
    for node in nodes:
        call = calls.get(node)
        is_one = call is not None and _reduces(call)
        is_part = node in calls or node.target in {operator.getitem, getattr}
        if is_one or (is_part and any(source in reduced for source in node.all_input_nodes)):
            reduced.add(node)
    views = {node for node, call in calls.items() if call is not None and call.is_view}
    inside: set[fx.Node] = set()
    for node in reversed(nodes):
        if node in calls and all(user in calls and (user not in views or user in inside) for user in node.users):
            inside.add(node)
    kept: set[fx.Node] = set()
    for node in nodes:
        if node in views:
            call, source = calls[node], node.all_input_nodes[0]
            joins = {node, source} <= inside and (source not in views or source in kept)
            if joins or (node in reduced and call is not None and call.function.is_view):
                kept.add(node)
    return {node: call for node, call in calls.items() if node not in views or node in kept}


def _reduces(call: OpCall) -> bool:
    return call.function.reduces or any(isinstance(x, OpCall) and _reduces(x) for x in call.tensors)


def _held_numbers(node: fx.Node) -> list[fx.Node]:
    # Values that a group takes as scalars.
    bound = bind_group(node)
    if bound is None:
        return []
    pairs = zip(bound[0].inputs, bound[1], strict=True)
    return [value for item, value in pairs if item.is_scalar and isinstance(value, fx.Node)]


def _cut_stretches(nodes: Sequence[fx.Node], barriers: set[fx.Node]) -> Iterator[list[fx.Node]]:
    stretch: list[fx.Node] = []
    for node in nodes:
        if node in barriers or len(stretch) == MAX_STRETCH:
            yield stretch
            stretch = []
        if node not in barriers:
            stretch.append(node)
    yield stretch


def _find_groups(
    stretch: Sequence[fx.Node],
    fusible: set[fx.Node],
    several: Mapping[fx.Node, OpCall | None],
    kinds: Kinds,
    calls: Mapping[fx.Node, OpCall | None],
) -> list[list[fx.Node]]:
    groups = list(_Stretch(stretch, fusible, several, kinds, calls).find_groups())
    misplaced = find_misplaced(groups, kinds)
    if not (misplaced.arranging or misplaced.whole):
        return groups
    return list(_Stretch(stretch, fusible, several, kinds.add(misplaced), calls).find_groups())


def _arranges(node: fx.Node, call: OpCall | None) -> bool:
    return bool(node.meta.get(IS_APART)) or crosses_rows(node, call) or (call is not None and call.arranges)


def is_whole(node: fx.Node, call: OpCall | None) -> bool:
    """Whether a node has to see its tensors whole, not in parts: it reduces them."""
    if call is not None:
        return call.function.reduces or any(isinstance(item, OpCall) and is_whole(node, item) for item in call.tensors)
    group = bind_group(node)
    return group is not None and group[0].has_reduction


@dataclass(slots=True, eq=False)
class _Unit:
    """Nodes that run as one step: one node, or those merged so far."""

    nodes: list[fx.Node]
    # The nodes, and those that come before and after one of them.
    mask: int
    above: int
    below: int
    applications: int
    # What they read of others, a mask of values, and those of them that others read.
    inputs: int
    outputs: int
    devices: set[torch.device]
    # Of the outputs, where known.
    shapes: set[str]
    # Whether a node says where elements lie, as a copy to another layout does; whether one needs them all.
    arranges: bool = False
    is_whole: bool = False
    # Elements of the largest of them, where known.
    size: int = 0


class _Stretch:
    """Nodes without a barrier between them, merged greedily."""

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        fusible: set[fx.Node],
        several: Mapping[fx.Node, OpCall | None],
        kinds: Kinds,
        calls: Mapping[fx.Node, OpCall | None],
    ) -> None:
        self.nodes = nodes
        self.calls = calls
        self.slot = {node: slot for slot, node in enumerate(nodes)}
        # Nodes that read each value.
        self.readers: dict[fx.Node, int] = {}
        # The bit of each value: of a node its slot, and further ones of what comes from elsewhere.
        self.values = self.slot.copy()
        # Nodes that are read elsewhere, too.
        self.kept = self._mask_of(node for node in nodes if any(user not in self.slot for user in node.users))
        # Shape of each value, where known. As text: sizes may be symbols, which do not hash.
        self.shapes: dict[fx.Node, str] = {}
        # The unit each node belongs to now; None for what no group can have.
        self.units: list[_Unit | None] = []
        # Nodes of units that have several, and of units that others may still merge with.
        self.grouped = 0
        self.open = 0
        # The open ones by the shape of their outputs (None: not known), then by how many outputs and applications.
        self.peers: dict[str | None, dict[tuple[int, int], int]] = {}
        above, below = self._find_paths()
        for slot, node in enumerate(nodes):
            is_fusible = node in fusible
            if not is_fusible and not _is_item_of(node, several):
                self.units.append(None)
                continue
            devices = set()
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                devices, self.shapes[node] = {value.device}, str(value.shape)
            inputs, outputs = self._mask_of(node.all_input_nodes), 1 << slot if node.users else 0
            paths, shapes = (above[slot], below[slot]), self._known_shapes(outputs)
            unit = _Unit([node], 1 << slot, *paths, int(is_fusible), inputs, outputs, devices, shapes)
            if is_fusible:
                unit.arranges, unit.is_whole = node in kinds.arranging, node in kinds.whole
                unit.size = count_elements(node)
            self.units.append(unit)
            self._enter(unit)

    def find_groups(self) -> Iterator[list[fx.Node]]:
        """Yield the nodes of each group, in the order of the graph."""
        for slot, node in enumerate(self.nodes):
            unit = self.units[slot]
            if unit is not None and unit.applications:
                self._grow(slot)
            elif unit is not None:
                source = self._unit(node.all_input_nodes[0])
                if source is not None:
                    self._merge(source, unit, *self._find_ends(source, unit))
        self._join_siblings()
        done: set[fx.Node] = set()
        for node, unit in zip(self.nodes, self.units, strict=True):
            if unit is not None and unit.applications and node not in done:
                done.update(unit.nodes)
                yield sorted(unit.nodes, key=self.slot.__getitem__)

    def _join_siblings(self) -> None:
        # Groups that have nothing to do with each other share a launch, if that takes longer than what they compute.
        small = 0
        for unit in dict.fromkeys(unit for unit in self.units if unit is not None):
            is_pointwise = unit.applications and not (unit.arranges or unit.is_whole)
            if is_pointwise and all(is_small(node.meta.get("val")) for node in self._nodes_of(unit.outputs)):
                small |= unit.mask
        for slot in range(len(self.nodes)):
            # Each at its last node.
            if small >> slot & 1 and not (unit := self._unit_at(1 << slot)).mask >> slot + 1:
                apart = small & ~(unit.above | unit.below) & (1 << slot) - 1
                near = apart & -(1 << max(slot - NEAR, 0))
                self._try_field(slot, apart, near, self._try_field(slot, near, 0, MAX_SIBLINGS))

    def _find_paths(self) -> tuple[list[int], list[int]]:
        sources: list[list[int]] = []
        last_random: int | None = None
        above: list[int] = []
        for slot, node in enumerate(self.nodes):
            for source in node.all_input_nodes:
                self.readers[source] = self.readers.get(source, 0) | 1 << slot
            own = [self.slot[source] for source in node.all_input_nodes if source in self.slot]
            if node.meta.get(IS_WRITTEN):
                # Who reads what is there before comes before, or the whole would have to be copied for it.
                slots = [self.slot.get(reader, slot) for reader in find_readers(node.args[0])]
                own += [reader for reader in slots if reader < slot]
            if is_random(node):
                own += [] if last_random is None else [last_random]
                last_random = slot
            sources.append(own)
            mask = 0
            for source_slot in own:
                mask |= above[source_slot] | 1 << source_slot
            above.append(mask)
        below = [0] * len(sources)
        for slot, own in reversed([*enumerate(sources)]):
            for source_slot in own:
                below[source_slot] |= below[slot] | 1 << slot
        return above, below

    def _mask_of(self, values: Iterable[fx.Node]) -> int:
        mask = 0
        for value in values:
            mask |= 1 << self.values.setdefault(value, len(self.values))
        return mask

    def _nodes_of(self, mask: int) -> Iterator[fx.Node]:
        while mask:
            yield self.nodes[mask.bit_length() - 1]
            mask ^= 1 << mask.bit_length() - 1

    def _unit(self, node: fx.Node) -> _Unit | None:
        slot = self.slot.get(node)
        return None if slot is None else self.units[slot]

    def _grow(self, slot: int) -> None:
        # Producers first, then units that read the same values; where shapes are unknown (fuser.fuse) any other unit
        # too: a user who fuses a function wants one launch for all of it.
        node, seen = self.nodes[slot], 0
        for source in node.all_input_nodes:
            producer, unit = self._unit(source), self._unit_at(1 << slot)
            if producer is not None and producer.mask & self.open & ~(seen | unit.mask):
                seen |= producer.mask
                self._try_merge(producer, unit)
        fields = [self.readers[source] for source in node.all_input_nodes]
        if "val" not in node.meta:
            fields.append((1 << slot) - 1)
        tries = MAX_TRIES
        for field in fields:
            tries = self._try_field(slot, field, seen, tries)
            seen |= field

    def _try_field(self, slot: int, field: int, seen: int, tries: int) -> int:
        # In the order of the graph, each unit once: the place of its first node counts.
        unit = self._unit_at(1 << slot)
        rest = field & ~(seen | unit.mask)
        likely = self._find_likely(unit) if rest else 0
        while (found := rest & likely) and tries:
            bit = found & -found
            rest &= -bit ^ bit
            other = self._unit_at(bit)
            if not other.mask & (seen | field & (bit - 1)):
                tries -= 1
                if self._try_merge(other, unit):
                    unit = self._unit_at(bit)
                    likely = self._find_likely(unit) if rest else 0
        return tries

    def _find_likely(self, unit: _Unit) -> int:
        """Return the nodes whose unit may fit: one beside it, or a peer that no path leads to. See Note [Masks]."""
        readers = 0
        for node in self._nodes_of(unit.outputs):
            readers |= self.readers.get(node, 0)
        beside = unit.inputs & (1 << len(self.nodes)) - 1
        groups = (readers | beside) & self.grouped
        while groups:
            other = self._unit_at(groups)
            beside |= other.mask
            groups &= ~other.mask
        peers = self._find_peers(unit) & ~(unit.above | unit.below)
        return (beside | readers | peers) & self.open & ~unit.mask

    def _find_peers(self, unit: _Unit) -> int:
        # Of two units that read nothing of each other, outputs and applications add up.
        outputs, applications = MAX_OUTPUTS - unit.outputs.bit_count(), MAX_APPLICATIONS - unit.applications
        found = 0
        if len(unit.shapes) <= 1:
            for shape in {*unit.shapes, None} if unit.shapes else self.peers:
                for counts, mask in self.peers.get(shape, {}).items():
                    if counts[0] <= outputs and counts[1] <= applications:
                        found |= mask
        return found

    def _unit_at(self, mask: int) -> _Unit:
        unit = self.units[mask.bit_length() - 1]
        assert unit is not None, "the mask is one of units"
        return unit

    def _try_merge(self, first: _Unit, second: _Unit) -> bool:
        """Merge two units if size, device and shape speak for it and no path leads from one to the other outside."""
        if first.applications + second.applications > MAX_APPLICATIONS or len(first.devices | second.devices) > 1:
            return False
        if (first.arranges or second.arranges) and (first.is_whole or second.is_whole):
            return False
        few, many = sorted((first, second), key=lambda unit: unit.size)
        # Kernels with reductions compute once what there is once a row.
        if not many.is_whole and are_repeated(few.size, many.size, few.nodes, self.calls):
            return False
        inputs, outputs = self._find_ends(first, second)
        if inputs.bit_count() > MAX_INPUTS or outputs.bit_count() > MAX_OUTPUTS:
            return False
        if not _are_connected(first, second) and len(first.shapes | second.shapes) > 1:
            return False
        if self._has_path(first, second) or self._has_path(second, first):
            return False
        self._merge(first, second, inputs, outputs)
        return True

    def _find_ends(self, first: _Unit, second: _Unit) -> tuple[int, int]:
        inside = first.mask | second.mask
        inputs, outputs = first.inputs | second.inputs, first.outputs | second.outputs
        # Only what one of them reads of the other may be nobody else's business.
        for node in self._nodes_of(outputs & inputs & ~self.kept):
            if not self.readers[node] & ~inside:
                outputs ^= 1 << self.slot[node]
        return inputs & ~inside, outputs

    def _has_path(self, first: _Unit, second: _Unit) -> bool:
        """Whether a path leads from one unit to the other through a third. See Note [Masks]."""
        inside = first.mask | second.mask
        down, up = first.below & ~inside, second.above & ~inside
        groups_down = groups_up = self.grouped & ~inside
        for _ in range(MAX_STEPS):
            if down & up:
                return True
            if not (down & groups_down and up & groups_up):
                return False
            lower, upper = self._unit_at(down & groups_down), self._unit_at(up & groups_up)
            down |= (lower.mask | lower.below) & ~inside
            up |= (upper.mask | upper.above) & ~inside
            groups_down &= ~lower.mask
            groups_up &= ~upper.mask
        return True  # for all that is known

    def _merge(self, first: _Unit, second: _Unit, inputs: int, outputs: int) -> None:
        self._leave(first)
        self._leave(second)
        unit, other = (first, second) if len(first.nodes) >= len(second.nodes) else (second, first)
        for node in other.nodes:
            self.units[self.slot[node]] = unit
        unit.nodes += other.nodes
        unit.mask |= other.mask
        unit.above |= other.above
        unit.below |= other.below
        unit.applications += other.applications
        unit.inputs, unit.outputs = inputs, outputs
        unit.devices |= other.devices
        unit.arranges, unit.is_whole = unit.arranges or other.arranges, unit.is_whole or other.is_whole
        unit.size = max(unit.size, other.size)
        unit.shapes = self._known_shapes(outputs)
        self.grouped |= unit.mask
        self._enter(unit)

    def _enter(self, unit: _Unit) -> None:
        if 0 < unit.applications < MAX_APPLICATIONS:
            self.open |= unit.mask
            if len(unit.shapes) <= 1:
                by_counts, counts = self._peers_of(unit)
                by_counts[counts] = by_counts.get(counts, 0) | unit.mask

    def _leave(self, unit: _Unit) -> None:
        if unit.mask & self.open and len(unit.shapes) <= 1:
            by_counts, counts = self._peers_of(unit)
            by_counts[counts] &= ~unit.mask
            if not by_counts[counts]:
                del by_counts[counts]
        self.open &= ~unit.mask

    def _peers_of(self, unit: _Unit) -> tuple[dict[tuple[int, int], int], tuple[int, int]]:
        shape = next(iter(unit.shapes), None)
        return self.peers.setdefault(shape, {}), (unit.outputs.bit_count(), unit.applications)

    def _known_shapes(self, outputs: int) -> set[str]:
        nodes = self._nodes_of(outputs) if self.shapes else ()
        return {self.shapes[node] for node in nodes if node in self.shapes}


def _returns_several(node: fx.Node, call: OpCall | None) -> bool:
    is_tuple = call is not None and call.items is not None
    is_functor = isinstance(node.target, JitFunction) and node.target.function.num_outputs > 1
    return is_tuple or is_functor or bind_group(node) is not None


def _is_item_of(node: fx.Node, several: Mapping[fx.Node, OpCall | None]) -> bool:
    source = node.args[0] if node.args else None
    if node.op != "call_function" or not isinstance(source, fx.Node) or source not in several:
        return False
    call = several[source]
    is_named = call is not None and call.items is not None and call.find_item(node) is not None
    return is_named or node.target is operator.getitem


def _are_connected(first: _Unit, second: _Unit) -> bool:
    return bool((first.above | first.below) & second.mask)
