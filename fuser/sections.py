"""What one launch takes: outputs of one shape, and no more operands than a kernel has arguments for.

A group beyond that is cut into sections, each of which is launched by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod

import torch

from fuser.errors import UnsupportedError
from fuser.graph import FusionGroup, Section
from fuser.kernel_spec import (
    MAX_ARGUMENT_BYTES,
    MAX_INPUTS,
    MAX_LONE_ARGUMENT_BYTES,
    MAX_OUTPUTS,
    ValueLayout,
    infer_layouts,
)
from fuser.layout import Shape, broadcast_strides, build_iteration_space
from fuser.orders import RowOrder
from fuser.row_space import RowShape, find_row_shape, lies_across, reduction_levels

__all__ = ["FEW_ROWS", "LONG_ROW", "cut_around", "cut_by_device", "cut_group", "group_outputs"]


# Rows that one block of a GPU each takes, and how long they are, at least, for several blocks to share them.
FEW_ROWS = 66
LONG_ROW = 1 << 16
# Neighbouring rows that one block takes.
ROWS_ACROSS = 128
# Shared memory that a block has for what its threads wait with for each other.
WAITING_BYTES = 47 << 10
# Elements that are very many, and of how many each one of few is.
MANY_ELEMENTS, SMALL = 1 << 24, 1 << 10


def cut_group(
    group: FusionGroup,
    layouts: Sequence[ValueLayout],
    by_value: Collection[int],
    orders: Mapping[int, RowOrder | None],
    shared_bytes: Mapping[int, int],
    *,
    shares_rows: bool,
) -> Iterator[Section]:
    """Give sections in the order of launches, each as long as fits in one (with outputs of several shapes, in each).

    Args:
        group: a canonical group.
        layouts: shape and strides of each of its values.
        by_value: the inputs that are numbers in the argument struct, not addresses.
        orders: of reductions whose bits depend on it, by application, the order of a row's elements: one for a section.
        shared_bytes: what those of them take of a block, by application: a section has no more than there is room for.
        shares_rows: whether blocks may share a long row, as they do in kernels of one pass over its elements.

    Raises:
        UnsupportedError: one application alone has more arguments than a kernel takes.
    """
    for section in _cut_launches(group, layouts, by_value, orders, shared_bytes, shares_rows=shares_rows):
        # A kernel without rows computes again, for each vector, what many elements have in common.
        if shares_rows and group.has_reduction and not section.group.has_reduction:
            yield from _cut_small(group, layouts, section)
        else:
            yield section


def _cut_launches(
    group: FusionGroup,
    layouts: Sequence[ValueLayout],
    by_value: Collection[int],
    orders: Mapping[int, RowOrder | None],
    shared_bytes: Mapping[int, int],
    *,
    shares_rows: bool,
) -> Iterator[Section]:
    whole = Section(group, tuple(range(len(group.inputs))), group.outputs, tuple(range(len(group.applications))))
    if _fits(whole, layouts, by_value, orders, shared_bytes, is_whole=True):
        rows = find_row_shape(group, layouts) if shares_rows and group.has_reduction else None
        # In torch's order a block does not share a row, but for those of its own schedule.
        long = LONG_ROW // 8 if any(orders.values()) else LONG_ROW
        is_cut = rows is not None and (_has_few_rows(group, rows, layouts, long) or _is_read_again(rows, orders))
        if rows is not None and not rows.scans and (is_cut or _is_shared(whole, orders)):
            yield from _cut_passes(group, rows)
        else:
            yield whole
        return
    rest, producers, pieces = list(range(len(group.applications))), group.producers(), list[list[int]]()
    while rest:
        chosen = rest[:1]
        section = group.section(chosen)
        if max(size for _, size in _launch_sizes(section, layouts, by_value)) > MAX_LONE_ARGUMENT_BYTES:
            name = group.applications[chosen[0]].function.name
            raise UnsupportedError(f"{name!r} with more than {MAX_LONE_ARGUMENT_BYTES} bytes of sizes and strides")
        waiting: set[int] = set()
        for index in rest[1:]:
            if any(producers[value] in waiting for value in group.applications[index].tensors):
                waiting.add(index)
            elif _fits(longer := group.section([*chosen, index]), layouts, by_value, orders, shared_bytes):
                section, chosen = longer, [*chosen, index]
            elif group.has_reduction:
                # Other rows than these: what does not need them may still be part of this launch.
                waiting.add(index)
            else:
                break
        pieces.append(chosen)
        rest = [index for index in rest if index not in chosen]
    # What is stored for a later piece may as well be computed there again.
    again = _made_again if group.has_reduction else lambda *_: set[int]()
    stored = {value for own in pieces for index in own for value in group.reads(index) if producers[value] not in own}
    stored.update(group.outputs)
    wholes = [sorted({*chosen, *again(group, layouts, chosen, stored)}) for chosen in pieces]
    wholes = [
        more if _fits(group.section(more), layouts, by_value, orders, shared_bytes) else chosen
        for chosen, more in zip(pieces, wholes, strict=True)
    ]
    # The last one first: what all who need it compute again is not stored, nor what was needed for that alone.
    wanted, sections = {*group.outputs}, list[Section]()
    for chosen, own in zip(reversed(pieces), reversed(wholes), strict=True):
        made = [value for value in wanted if producers[value] in chosen]
        if made:
            sections.append(group.section(own, made))
            wanted.update(value for index in own for value in group.reads(index) if producers[value] not in own)
    yield from reversed(sections)


def cut_around(group: FusionGroup, obstacle: int) -> Iterator[Section]:
    """Give a group in at most three sections: what does not need one application, that one alone, what needs it.

    An obstacle beyond the last application is the group's length: two sections of about one length.
    """
    count = len(group.applications)
    if obstacle >= count:
        middle = _find_narrowest(group)
        yield group.section(range(middle))
        yield group.section(range(middle, count))
        return
    needing = group.needing([obstacle])
    before = [index for index in range(count) if index not in needing]
    for chosen in (before, [obstacle], sorted(needing - {obstacle})):
        if chosen:
            yield group.section(chosen)


def cut_by_device(
    group: FusionGroup, layouts: Sequence[ValueLayout], devices: Sequence[torch.device | None]
) -> list[Section]:
    """Return sections of one device each, of a group whose tensors are on several, that of the host first.

    What is computed of the host's tensors without dimensions alone goes along with any device, unless it is a result.

    Args:
        group: a canonical group.
        layouts: shape and strides of each of its values.
        devices: where each of its inputs is; None for numbers.

    Returns:
        No section where one device is enough, or where the tensors of one application are on two.
    """
    host, homes = torch.device("cpu"), [*devices]
    # For each application, where it runs; and those that would run anywhere.
    found, free = list[torch.device](), set[int]()
    for index, item in enumerate(group.applications):
        read = {(homes[value], bool(layouts[value].shape)) for value in item.tensors}
        own = [*{home for home, has_dims in read if home is not None and (has_dims or home != host)}]
        if len(own) > 1:
            return []
        free.update(() if own else (index,))
        found.append(own[0] if own else host)
        homes += [found[-1]] * item.function.num_outputs
    producers = group.producers()
    bound = {home for index, home in enumerate(found) if index not in free}
    bound |= {host for value in group.outputs if producers[value] in free}
    if len(bound) < 2:
        return []
    order = sorted({*found}, key=lambda home: (home != host, found.index(home)))
    return [group.section([index for index, other in enumerate(found) if other == home]) for home in order]


def _find_narrowest(group: FusionGroup) -> int:
    # Between which applications, in the middle half of a group, the fewest values are made before and read after.
    count, producers, last = len(group.applications), group.producers(), dict[int, int]()
    for index in range(count):
        last |= dict.fromkeys(group.reads(index), index)
    crossing = [0] * (count + 1)
    for value, reader in last.items():
        for slot in range(producers[value] + 1, reader + 1) if producers[value] >= 0 else ():
            crossing[slot] += 1
    cuts = range(max(count // 4, 1), max(3 * count // 4, 1) + 1)
    return min(cuts, key=lambda slot: (crossing[slot], abs(2 * slot - count)))


def group_outputs(shapes: Sequence[Shape], *, has_reduction: bool = False) -> list[list[int]]:
    """Return which outputs share a launch: those of one shape, up to the bound on outputs; with reductions, all."""
    if has_reduction:
        return [list(range(len(shapes)))]
    # No dict: shapes may be symbols, whose hash would be asked for (fuser.sizes).
    launches: list[list[int]] = []
    for slot, shape in enumerate(shapes):
        alike = next((own for own in launches if shapes[own[0]] == shape and len(own) < MAX_OUTPUTS), None)
        if alike is None:
            launches.append([slot])
        else:
            alike.append(slot)
    return launches


def _is_shared(section: Section, orders: Mapping[int, RowOrder | None]) -> bool:
    # Whether torch's order has several blocks for a row.
    found = (orders.get(index) for index in section.applications)
    return any(order and order.schedule.blocks > 1 for order in found)


def _is_one_pass(section: Section, layouts: Sequence[ValueLayout]) -> bool:
    # Whether nothing is computed per element after a reduction.
    rows = find_row_shape(section.group, infer_layouts(section.group, [layouts[value] for value in section.inputs]))
    levels = reduction_levels(section.group)
    return rows is not None and max(levels) == 1 and all(rows.is_row[v] for v in section.group.outputs if levels[v])


def _has_few_rows(group: FusionGroup, rows: RowShape, layouts: Sequence[ValueLayout], long: int) -> bool:
    # Whether a block for each row would leave most of a GPU idle.
    full = [value for value in group.used_inputs() if not rows.is_row[value]]
    is_across = lies_across(rows.shape, rows.dims, [rows.strides(value, layouts[value].strides) for value in full])
    length = prod(rows.shape[dim] for dim in rows.dims)
    count = prod(rows.shape) // max(length, 1)
    blocks = count // ROWS_ACROSS if is_across else count
    return blocks < FEW_ROWS and (length * ROWS_ACROSS > LONG_ROW if is_across else length > long)


def _is_read_again(rows: RowShape, orders: Mapping[int, RowOrder | None]) -> bool:
    # Whether torch's order leaves few threads to rows that are too long to be kept: what comes after has more.
    is_long = prod(rows.shape[dim] for dim in rows.dims) >= LONG_ROW
    return is_long and any(order and not order.spreads for order in orders.values())


def _made_again(
    group: FusionGroup, layouts: Sequence[ValueLayout], chosen: Collection[int], stored: Collection[int]
) -> set[int]:
    # The applications that make, elementwise, what a section would read of others, where it reads no more tensors then.
    # ``stored``: the values that sections write for others; they write no more for this.
    producers, sizes = group.producers(), [prod(item.shape) for item in layouts]
    read = {value for index in chosen for value in group.reads(index) if producers[value] not in chosen}
    full = max((sizes[value] for value in read), default=0)
    wide, found = {value for value in read if sizes[value] == full}, set[int]()
    for value in sorted(wide - {*group.outputs}):
        again, instead, stack = set[int](), wide - {value}, [value]
        while stack:
            item = stack.pop()
            if sizes[item] < full and item in stored:
                continue
            if producers[item] >= 0:
                again.add(producers[item])
                stack += group.reads(producers[item])
            elif sizes[item] == full:
                instead.add(item)
        functions = [group.applications[index].function for index in again]
        if len(instead) <= len(wide) and not any(item.reduces or item.reshapes or item.is_index for item in functions):
            wide, found = instead, found | again
    return found


def _cut_small(group: FusionGroup, layouts: Sequence[ValueLayout], section: Section) -> Iterator[Section]:
    # Gives what is computed of few elements, if there are very many others, and then the rest.
    sizes, producers, offsets = [prod(item.shape) for item in layouts], group.producers(), group.value_offsets()
    inside, small = {*section.applications}, set[int]()
    most = max((sizes[value] for value in section.inputs), default=0)
    for index in section.applications:
        function, read = group.applications[index].function, group.reads(index)
        is_early = all(producers[value] not in inside - small for value in read)
        is_plain = not (function.reduces or function.reshapes or function.is_index)
        if is_early and is_plain and sizes[offsets[index]] * SMALL <= most and most >= MANY_ELEMENTS:
            small.add(index)
    asked = {value for value in section.outputs if producers[value] in inside - small}
    if not small or not asked:
        yield section
        return
    needed = {value for index in inside - small for value in group.reads(index) if producers[value] in small}
    yield group.section(sorted(small), needed | ({*section.outputs} - asked))
    yield group.section(sorted(inside - small), asked)


def _cut_passes(group: FusionGroup, rows: RowShape) -> Iterator[Section]:
    # A section for each pass over the elements, with what there is once per row after it. What is needed per element is
    # computed again, not stored.
    levels, producers = reduction_levels(group), group.producers()
    known = set(range(len(group.inputs)))
    for level in range(max(levels) + 1):
        # Per row what comes after this pass, and, of what comes before all, only what is asked for.
        per_row = {value for value, own in enumerate(levels) if rows.is_row[value] and own == level + 1}
        asked = {value for value in group.outputs if levels[value] == level and not (level and rows.is_row[value])}
        made = (per_row | asked) - known
        chosen: set[int] = set()
        stack = list(made)
        while stack:
            value = stack.pop()
            if value not in known and producers[value] not in chosen:
                chosen.add(producers[value])
                stack += group.applications[producers[value]].tensors
        if not chosen:
            continue
        section = group.section(sorted(chosen))
        wanted = [slot for slot, value in enumerate(section.outputs) if value in made]
        yield Section(
            section.group.select_outputs(wanted),
            section.inputs,
            tuple(section.outputs[slot] for slot in wanted),
            section.applications,
        )
        known |= {section.outputs[slot] for slot in wanted if rows.is_row[section.outputs[slot]]}


def _fits(
    section: Section,
    layouts: Sequence[ValueLayout],
    by_value: Collection[int],
    orders: Mapping[int, RowOrder | None],
    shared_bytes: Mapping[int, int],
    *,
    is_whole: bool = False,
) -> bool:
    if len({orders[index] for index in section.applications if index in orders}) > 1:
        return False
    if sum(shared_bytes.get(index, 0) for index in section.applications) > WAITING_BYTES:
        return False
    if section.group.reshapes:
        given = [layouts[value] for value in section.inputs]
        shapes = [layouts[value].shape for value in section.outputs]
        for chosen in group_outputs(shapes, has_reduction=section.group.has_reduction):
            group = section.group.select_outputs(chosen)
            if find_row_shape(group, infer_layouts(group, given)) is None:
                return False
    if not is_whole and _is_shared(section, orders) and not _is_one_pass(section, layouts):
        return False
    sizes = _launch_sizes(section, layouts, by_value)
    return all(inputs <= MAX_INPUTS and size <= MAX_ARGUMENT_BYTES for inputs, size in sizes)


def _launch_sizes(
    section: Section, layouts: Sequence[ValueLayout], by_value: Collection[int]
) -> Iterator[tuple[int, int]]:
    # Inputs and argument bytes of each launch; the bytes are a bound, which is close where it matters.
    shapes = [layouts[value].shape for value in section.outputs]
    for chosen in group_outputs(shapes, has_reduction=section.group.has_reduction):
        group = section.group if len(chosen) == len(shapes) else section.group.select_outputs(chosen)
        read = [section.inputs[index] for index in group.used_inputs()]
        pointers = [layouts[value] for value in read if value not in by_value]
        counters = len(group.index_values())
        shape, operands = shapes[chosen[0]], len(chosen) + len(pointers) + counters
        # The count, the zero, addresses, numbers (a complex one takes two fields); per dimension a size, two fields for
        # the division by it (on a GPU), and strides.
        fixed = 2 + operands + 2 * (len(read) - len(pointers))
        # Where one operand begins elsewhere, the struct says of each where it does.
        written = [layouts[section.outputs[index]] for index in chosen]
        fixed += operands * any(item.offset for item in (*written, *pointers))
        rank = len(shape)
        if section.group.has_reduction:
            # It walks over what it reads.
            rank = max((len(item.shape) for item in pointers), default=rank)
        elif not (counters or group.reshapes) and 8 * (fixed + rank * (3 + operands)) > MAX_ARGUMENT_BYTES:
            strides = [item.strides for item in written]
            strides += [broadcast_strides(item.shape, item.strides, shape) for item in pointers]
            rank = len(build_iteration_space(shape, strides).sizes)
        yield len(read), 8 * (fixed + rank * (3 + operands))
