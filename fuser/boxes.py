"""Reading through views and writing parts of a tensor: a group with arrangements, as one that only computes.

What a group computes elementwise it computes of any part of its tensors as well. So a view of what is computed becomes
views of the inputs that it is computed from, and what is put together of parts becomes parts of the outputs: each
output is cut into *boxes*, in each of which every element is made by one formula, and which is written where it lies in
the output. Nothing is copied to be put together, and boxes of one shape share a launch.

::

    cat([neg(x[:, n:]), x[:, :n]], 1) * s   # v = neg(x[:, n:]) * s[:, :n] and w = x[:, :n] * s[:, n:], each half of it

Where pieces of short rows are written by one launch after the other, a GPU's memory reads again what is around each.
There one formula makes all elements: each is chosen by its place, and what is read of a part is read where that is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from math import prod
from typing import Generic, NamedTuple, TypeVar

import torch

from fuser import torch_ops as ops
from fuser.application import Application
from fuser.cxx.functor import takes_anything
from fuser.dtypes import Rank
from fuser.errors import UnsupportedError
from fuser.graph import FusionGroup, GroupBuilder
from fuser.kernel_spec import InputSpec, Typing, ValueLayout, index_strides
from fuser.layout import Shape, Strides
from fuser.tensor_desc import TensorDesc
from fuser.view_steps import Steps, follow, has_view, seen

__all__ = ["Boxes", "cut_boxes"]

# Of all outputs of a group; each box that has another shape is a launch.
MAX_BOXES = 32
# Of values in all boxes: kernels that are longer take long to compile.
MAX_VALUES = 512
# Of rows that one formula makes, and how many parts it reads; of narrow elements, for which to choose takes longer than
# memory, where boxes would be a few launches; and what a GPU's memory reads and writes at once. Measured on an H100.
MAX_SELECTED_BYTES, MAX_PICKS, MAX_NARROW_PICKS, FEW_LAUNCHES, SECTOR_BYTES = 2048, 8, 1, 4, 32
K = TypeVar("K")
V = TypeVar("V")


class Boxes(NamedTuple):
    """A group that only computes, and what it reads and writes."""

    group: FusionGroup
    # For each of its inputs which one of the group it is, what of it is read, and what it counts as in typing.
    inputs: tuple[tuple[int, TensorDesc, InputSpec], ...]
    # For each of its outputs which one of the group it is part of, and which part.
    outputs: tuple[tuple[int, Steps], ...]


def cut_boxes(
    group: FusionGroup,
    inputs: Sequence[tuple[TensorDesc, InputSpec]],
    typing: Typing,
    layouts: Sequence[ValueLayout],
) -> Boxes:
    """Cut the outputs of a group into boxes, and write what makes each of them.

    Args:
        group: a canonical group without reductions.
        inputs: each as the call has it.
        typing: of its values.
        layouts: likewise.

    Raises:
        UnsupportedError: an arrangement cannot be part of a kernel; ``application`` says which.
    """
    on_gpu = any(desc.device is not None and desc.device.type == "cuda" for desc, _ in inputs)
    cutter = _Cutter(group, inputs, typing, layouts, may_select=on_gpu)
    try:
        return cutter.cut()
    except UnsupportedError:
        if not cutter.has_selected:
            raise
        # Boxes may do where one formula does not.
        return _Cutter(group, inputs, typing, layouts, may_select=False).cut()


class _Known(Generic[K, V]):
    """What is known by a value and what has sizes. Those are compared: to hash a symbol is to ask for its value."""

    def __init__(self) -> None:
        self._found: dict[int, list[tuple[K, V]]] = {}

    def __contains__(self, key: tuple[int, K]) -> bool:
        return any(own == key[1] for own, _ in self._found.get(key[0], ()))

    def __getitem__(self, key: tuple[int, K]) -> V:
        return next(found for own, found in self._found[key[0]] if own == key[1])

    def __setitem__(self, key: tuple[int, K], found: V) -> None:
        self._found.setdefault(key[0], []).append((key[1], found))

    def __len__(self) -> int:
        return sum(map(len, self._found.values()))

    def results(self) -> Iterator[V]:
        """Give all that is known."""
        return (found for pairs in self._found.values() for _, found in pairs)


class _Cutter:
    def __init__(
        self,
        group: FusionGroup,
        inputs: Sequence[tuple[TensorDesc, InputSpec]],
        typing: Typing,
        layouts: Sequence[ValueLayout],
        *,
        may_select: bool,
    ) -> None:
        self.group, self.given, self.typing, self.layouts = group, inputs, typing, layouts
        # Whether outputs may be made by one formula, some are, and the one at hand is; how many parts those read, and
        # how many that may be of narrow elements.
        self.may_select, self.has_selected, self.is_selecting = may_select, False, False
        self.picks, self.most_narrow = 0, MAX_NARROW_PICKS
        self.shapes = [item.shape for item in layouts]
        self.producers, self.offsets = group.producers(), group.value_offsets()
        self.builder = GroupBuilder(group.numerics)
        self.inputs: list[tuple[int, TensorDesc, InputSpec]] = []
        self.slots = _Known[tuple[TensorDesc, InputSpec], int]()
        self.handles = _Known[Steps, int]()
        # Shapes in which values are cut, or seen, that have dimensions merged from those of what is put together, or of
        # what was copied for that.
        self.finer: dict[int, Shape] = {}
        # Applications that merge them.
        self.merging: set[int] = set()
        self.is_seen = _Known[Steps, bool]()
        # Along each dimension of each value, where another formula begins.
        self.cuts: list[tuple[frozenset[int], ...]] = [(frozenset(),) * len(shape) for shape in self.shapes]

    def cut(self) -> Boxes:
        """Find the boxes of every output, and write them."""
        for index, item in enumerate(self.group.applications):
            if item.function.reduces:
                raise _refuse(self._first(), f"what is put together beside op {item.function.name!r}")
            for value in range(self.offsets[index], self.offsets[index] + item.function.num_outputs):
                self.cuts[value] = self._find_finer(index, item, value) or self._find_cuts(
                    index, item, self.shapes[value]
                )
        if len(self.group.applications) == 1 and self.group.applications[0].function.op not in _GAINING:
            # torch does as well, but that it fills all of a tensor that it pads first, sorts whenever it puts, and has
            # a block for each row that it takes.
            raise _refuse(0, "an arrangement alone")
        outputs, handles = [], []
        for slot, value in enumerate(self.group.outputs):
            for steps in self._boxes(value):
                outputs.append((slot, steps))
                try:
                    handles.append(self._made(value, steps))
                except UnsupportedError as error:
                    if error.application >= 0 or not self.merging:
                        raise
                    # An operand of what is computed in a finer shape cannot be seen in that.
                    raise _refuse(min(self.merging), str(error)) from error
                if len(outputs) > MAX_BOXES or len(self.handles) > MAX_VALUES:
                    raise _refuse(self._find_obstacle(), "more parts of outputs than are worth a kernel")
        return Boxes(self.builder.build(handles).canonical(), tuple(self.inputs), tuple(outputs))

    def _first(self) -> int:
        return next(i for i, item in enumerate(self.group.applications) if item.function.arranges)

    def _find_obstacle(self) -> int:
        # What has too many parts by itself; else nothing has, and parts of the group may have a kernel each.
        items = self.group.applications
        many = (
            index for index, item in enumerate(items) if item.function.op == "cat" and len(item.tensors) > MAX_BOXES
        )
        return next(many, len(items))

    # --- where to cut -----------------------------------------------------------------------------------------------
    def _find_finer(self, index: int, item: Application, made: int) -> tuple[frozenset[int], ...]:
        # The cuts of a value in a finer shape; none where its own will do.
        shape, form = self.shapes[made], item.function.form or ()
        is_reshaped = item.function.op == "view" and form[0] == "view.default"
        finer = {self.finer[value] for value in item.tensors if value in self.finer}
        if not finer:
            value = item.tensors[0]
            if not is_reshaped or self._shows(index, item, value, shape):
                return ()
            self.finer[made] = self.shapes[value]
            self.merging.add(index)
            return self.cuts[value]
        own = next(value for value in item.tensors if value in self.finer)
        cut = [value for value in item.tensors if any(self.cuts[value])]
        if len(finer) == 1 and all(value in self.finer for value in cut):
            if is_reshaped:
                if shape not in finer:
                    self.finer[made] = finer.pop()
                return self.cuts[own]
            is_elementwise = not (item.function.arranges or item.function.is_view)
            is_alike = all(self.shapes[value] == shape for value in item.tensors if value in self.finer)
            if is_elementwise and is_alike and all(self.cuts[value] == self.cuts[own] for value in cut):
                self.finer[made] = finer.pop()
                return self.cuts[own]
        raise _refuse(index, "more than arithmetic with merged dimensions of what is put together")

    def _shows(self, index: int, item: Application, value: int, shape: Shape) -> bool:
        # Whether a view of another shape shows where the parts of a value are, and can be seen of what it is read from.
        if any(self.cuts[value]):
            try:
                self._find_cuts(index, item, shape)
            except UnsupportedError:
                return False
            return True
        return self._is_seen(value, self._steps(item, self.shapes[value]))

    def _is_seen(self, value: int, steps: Steps) -> bool:
        # Whether there is such a view of all that a value is computed from. What refuses others says so later.
        key = (value, steps)
        if key not in self.is_seen:
            index = self.producers[value]
            item = None if index < 0 else self.group.applications[index]
            if item is None:
                desc, spec = self.given[value]
                self.is_seen[key] = spec.number is not None or has_view(desc.shape, desc.strides, steps)
            elif item.function.op == "view" or item.function.is_view:
                (source,) = item.tensors
                self.is_seen[key] = self._is_seen(source, (*self._steps(item, self.shapes[source]), *steps))
            elif item.function.arranges or item.function.is_index:
                self.is_seen[key] = True
            else:
                widened = (self._widen(source, self.shapes[value]) for source in item.tensors)
                pairs = zip(item.tensors, widened, strict=True)
                self.is_seen[key] = all(self._is_seen(source, (*widen, *steps)) for source, widen in pairs)
        return self.is_seen[key]

    def _widen(self, value: int, shape: Shape) -> Steps:
        return () if self.shapes[value] == shape else (("expand.default", (shape,)),)

    def _find_cuts(self, index: int, item: Application, shape: Shape) -> tuple[frozenset[int], ...]:
        function, form = item.function, item.function.form or ()
        found: list[set[int]] = [set() for _ in shape]
        if item.reads_no_elements:
            return (frozenset(),) * len(shape)
        if function.op == "view" or function.is_view:
            (value,) = item.tensors
            for dim, cuts in enumerate(self.cuts[value]):
                if cuts:
                    self._see_cuts(index, found, dim, cuts, self._steps(item, self.shapes[value]))
            return tuple(map(frozenset, found))
        if function.op == "pad":
            before = form[1]
            found[form[0]].update((before, shape[form[0]] - form[2]))
        if function.op == "take":
            table, entries = item.tensors
            if self._find_memory(table) is None:
                raise _refuse(index, "a read at entries of what is computed")
            for axis, cuts in zip(form[3], self.cuts[entries], strict=True):
                found[axis].update(cuts)
            return tuple(map(frozenset, found))
        if function.op == "put":
            if any(self.producers[value] >= 0 for value in item.tensors):
                raise _refuse(index, "a sum of what is computed")
            return (frozenset(),) * len(shape)
        start = 0
        for value in item.tensors:
            lead = len(shape) - len(self.shapes[value])
            for dim, cuts in enumerate(self.cuts[value]):
                move = start if function.op == "cat" and dim == form[0] else 0
                move += form[1] if function.op == "pad" and dim == form[0] else 0
                if self.shapes[value][dim] == shape[lead + dim] or function.arranges:
                    found[lead + dim].update(cut + move for cut in cuts)
            if function.op == "cat":
                start += self.shapes[value][form[0]]
                found[form[0]].add(start)
        return tuple(frozenset(cut for cut in cuts if 0 < cut < size) for cuts, size in zip(found, shape, strict=True))

    def _see_cuts(self, index: int, found: list[set[int]], dim: int, cuts: frozenset[int], steps: Steps) -> None:
        # Where the cuts along one dimension are in a view, from how its elements count that dimension.
        value = self.group.applications[index].tensors[0]
        shape, strides, offset = self._count(index, value, dim, steps)
        moving = [own for own, stride in enumerate(strides) if stride and shape[own] > 1]
        last = offset + sum((shape[own] - 1) * strides[own] for own in moving)
        # Where the dimension was split, the outermost part counts.
        outer = max(moving, key=strides.__getitem__, default=0)
        for cut in cuts:
            if offset < cut <= last:
                if len(moving) > 1 and (cut - offset) % strides[outer]:
                    raise _refuse(index, "a view of what is put together")
                found[outer].add(-(-(cut - offset) // strides[outer]))

    def _count(self, index: int, value: int, dim: int, steps: Steps) -> tuple[Shape, Strides, int]:
        # The place along one dimension of each element that is seen of a value.
        shape = self.shapes[value]
        try:
            return follow(shape, tuple(int(own == dim) for own in range(len(shape))), steps)
        except UnsupportedError as error:
            raise _refuse(index, str(error)) from error

    def _is_selected(self, value: int) -> bool:
        # Whether one formula makes an output: of pieces of rows that are more than a few launches, or that have several
        # sizes in short rows, where they begin anywhere, or are many.
        dtype, (shape, strides) = self.typing.values[value], self.layouts[value][:2]
        if not (self.may_select and shape and self.cuts[value][-1]) or value in self.finer:
            return False
        is_known = all(type(size) is int for size in shape) and ops.dtype_kind(dtype) in ops.OPS["where"].kinds
        if not is_known or strides[-1] != 1 or dtype.itemsize < 2:
            return False
        pieces = self._piece_sizes(value)[-1]
        begins_anywhere = any(piece * dtype.itemsize % SECTOR_BYTES for piece in pieces)
        is_short = shape[-1] * dtype.itemsize <= MAX_SELECTED_BYTES
        has_several = len(pieces) > 2 or (len(pieces) == 2 and begins_anywhere)
        return (is_short and has_several) or self._count_launches(value) > FEW_LAUNCHES

    def _count_launches(self, value: int) -> int:
        return prod(map(len, self._piece_sizes(value)))

    def _piece_sizes(self, value: int) -> list[set[int]]:
        # Along each dimension.
        cuts = zip(self.shapes[value], self.cuts[value], strict=True)
        return [{stop - start for start, stop in itertools.pairwise(sorted({0, size, *own}))} for size, own in cuts]

    def _boxes(self, value: int) -> Iterator[Steps]:
        self.is_selecting = self._is_selected(value)
        if self.is_selecting:
            self.has_selected = True
            self.most_narrow = MAX_NARROW_PICKS if self._count_launches(value) <= FEW_LAUNCHES else MAX_PICKS
            yield ()
            return
        shape = self.finer.get(value, self.shapes[value])
        finer: Steps = (("view.default", (shape,)),) if value in self.finer else ()
        # A size that is a symbol is not asked for its value where nothing is cut.
        ends = [
            sorted({0, size, *cuts}) if cuts else [0, size] for size, cuts in zip(shape, self.cuts[value], strict=True)
        ]
        spans = [list(itertools.pairwise(own)) or [(0, 0)] for own in ends]
        for box in itertools.product(*spans):
            yield finer + tuple(
                ("slice.Tensor", (dim, start, stop, 1))
                for dim, (start, stop) in enumerate(box)
                if (start, stop) != (0, shape[dim])
            )

    # --- what makes a box -------------------------------------------------------------------------------------------
    def _made(self, value: int, steps: Steps) -> int:
        # What writes a box has to be computed, if only a copy.
        handle = self._find(value, steps)
        is_input = handle in self.slots.results()
        return self._cast(handle, self.typing.values[value]) if is_input else handle

    def _cast(self, handle: int, dtype: torch.dtype) -> int:
        return self.builder.apply(ops.cast_function(dtype), [handle])[0]

    def _find(self, value: int, steps: Steps) -> int:
        key = (value, steps)
        if key not in self.handles:
            index = self.producers[value]
            if index < 0:
                self.handles[key] = self._read(value, steps)
            else:
                item = self.group.applications[index]
                if item.function.is_index or item.function.op == "arange":
                    self.handles[key] = self._number(item, value, steps)
                    return self.handles[key]
                if not (item.function.arranges or item.function.is_view):
                    self._computed(index, item, steps)
                else:
                    try:
                        self._arranged(index, item, steps)
                    except UnsupportedError as error:
                        if error.application >= 0:
                            raise
                        # What cannot be seen through a view of this is read after it.
                        raise _refuse(index, str(error)) from error
        return self.handles[key]

    def _select(self, made: int, item: Application, steps: Steps, where: tuple[Shape, Strides, int]) -> int:
        # Of parts that are put together, and of what is around one, what is there where an element is.
        function, form = item.function, item.function.form or ()
        shape, strides, first = where
        is_pad = function.op == "pad"
        start, found = form[1] if is_pad else 0, list[tuple[int, int, int]]()
        for value in item.tensors[:1] if is_pad else item.tensors:
            handle = self._find(value, (("move", (form[0], start, self.shapes[made][form[0]])), *steps))
            if self.typing.values[value] != self.typing.values[made]:
                handle = self._cast(handle, self.typing.values[made])
            number = self._counter((shape, strides, first - start), self.typing.ranks[made])
            found.append((number, self._whole_number(made, self.shapes[value][form[0]]), handle))
            start += self.shapes[value][form[0]]
        if is_pad:
            # Before what is padded, and behind it.
            handle = self._fill(made, item.tensors[1], steps)
            found.insert(0, (found[0][0], self._whole_number(made, 0), handle))
        else:
            *found, (_, _, handle) = found
        for number, count, part in reversed(found):
            is_before = self.builder.apply(ops.OPS["lt"].function, [number, count])[0]
            handle = self.builder.apply(ops.OPS["where"].function, [is_before, part, handle])[0]
        return handle

    def _whole_number(self, made: int, number: int) -> int:
        return self._counter(((), (), number), self.typing.ranks[made])

    def _read(self, value: int, steps: Steps) -> int:
        desc, spec = self.given[value]
        if desc.dtype is None or spec.number is not None:
            # A number is the same everywhere.
            steps = ()
        bounds = self._bounds(desc.shape, steps)
        return self._pick(value, steps, bounds) if bounds else self._input(value, seen(desc, steps), spec)

    def _bounds(self, shape: Shape, steps: Steps) -> list[tuple[tuple[Shape, Strides, int], int]]:
        # Of each dimension along which not all of what is seen is there: its place in that, and how many there are.
        found = []
        for at, (name, form) in enumerate(steps):
            if name == "move":
                whole = follow(shape, (0,) * len(shape), steps[:at])[0]
                own = tuple(int(dim == form[0]) for dim in range(len(whole)))
                seen_of_it, strides, first = follow(whole, own, steps[at:])
                last = first + sum((size - 1) * stride for size, stride in zip(seen_of_it, strides, strict=True))
                if first < 0 or last >= whole[form[0]]:
                    found.append(((seen_of_it, strides, first), whole[form[0]]))
        return found

    def _pick(self, value: int, steps: Steps, bounds: Sequence[tuple[tuple[Shape, Strides, int], int]]) -> int:
        # What is read of a part, where it is.
        desc, spec = self.given[value]
        self.picks += 1
        assert desc.dtype is not None, "it is a tensor"
        if self.picks > (MAX_PICKS if desc.dtype.itemsize >= 4 else self.most_narrow):
            raise UnsupportedError("more parts than are worth one formula")
        # Each with an address of its own: of one there is one place.
        memory = self._add_input(value, desc._replace(shape=(), strides=()), spec)
        numbers = [self._counter(follow(desc.shape, desc.strides, steps), spec.rank)]
        for where, count in bounds:
            numbers += [self._counter(where, spec.rank), self._counter(((), (), count), spec.rank)]
        return self.builder.apply(ops.pick_function(len(bounds)), [memory, *numbers])[0]

    def _input(self, value: int, desc: TensorDesc, spec: InputSpec) -> int:
        key = (value, (desc, spec))
        if key not in self.slots:
            self.slots[key] = self._add_input(value, desc, spec)
        return self.slots[key]

    def _add_input(self, value: int, desc: TensorDesc, spec: InputSpec) -> int:
        is_scalar = self.group.inputs[value].is_scalar and not spec.is_counter
        self.inputs.append((value, desc, spec))
        return self.builder.add_input(self.group.inputs[value].name, is_scalar=is_scalar)

    def _number(self, item: Application, made: int, steps: Steps) -> int:
        # Those of the elements, or of a range.
        if item.function.op == "arange":
            size, first, step = (item.function.form or ())[:3]
            shape, strides, offset = follow((size,), (step,), steps)
        else:
            shape, strides, offset = follow(self.shapes[made], index_strides(item.function, self.shapes[made]), steps)
            first = 0
        handle = self._counter((shape, strides, first + offset), self.typing.ranks[made])
        dtype = self.typing.values[made]
        return handle if dtype is torch.int64 else self._cast(handle, dtype)

    def _computed(self, index: int, item: Application, steps: Steps) -> None:
        shape = self.shapes[self.offsets[index]]
        if item.function.op is None and not takes_anything(item.function.functor):
            self._refuse_beyond(shape, steps, "a functor that is not for zeros")
        tensors = [self._find(value, (*self._widen(value, shape), *steps)) for value in item.tensors]
        made = self.builder.apply(item.function, tensors, [self._find(value, ()) for value in item.scalars], item.name)
        for slot, handle in enumerate(made):
            self.handles[self.offsets[index] + slot, steps] = handle

    def _arranged(self, index: int, item: Application, steps: Steps) -> None:
        function, form, made = item.function, item.function.form or (), self.offsets[index]
        value = item.tensors[0]
        if function.op == "take":
            handle = self._taken(made, item, steps)
        elif function.op == "put":
            handle = self._summed(made, item, steps)
        elif function.op == "full":
            handle = self._fill(made, item.tensors[0], steps)
        elif function.op in {"cat", "pad"}:
            shape, strides, first = self._count(index, made, form[0], steps)
            last = first + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
            start = form[1] if function.op == "pad" else 0
            parts = item.tensors[:1] if function.op == "pad" else item.tensors
            for value in parts:
                size = self.shapes[value][form[0]]
                if start <= first and last < start + size:
                    handle = self._find(value, (("move", (form[0], start, self.shapes[made][form[0]])), *steps))
                    break
                if first < start + size and last >= start:
                    if not self.is_selecting:
                        raise _refuse(index, "a view across what is put together")
                    handle = self._select(made, item, steps, (shape, strides, first))
                    break
                start += size
            else:
                handle = self._fill(made, item.tensors[1], steps)
        else:
            own = self._steps(item, self.shapes[value])
            # Dimensions that are merged and split again are as they were.
            is_reshaped = own[0][0] == "view.default" and bool(steps) and steps[0][0] == "view.default"
            is_undone = is_reshaped and steps[0][1] == (self.shapes[value],)
            is_finer = is_reshaped and steps[0][1] == (self.finer.get(value),)
            handle = self._find(value, steps[1:] if is_undone else steps if is_finer else (*own, *steps))
        if function.op not in {"full", "take", "put"} and self.typing.values[value] != self.typing.values[made]:
            handle = self._cast(handle, self.typing.values[made])
        self.handles[made, steps] = handle

    def _refuse_beyond(self, shape: Shape, steps: Steps, what: str) -> None:
        # Beyond a part nothing is there, and zeros take its place.
        if self._bounds(shape, steps):
            raise UnsupportedError(f"{what}, in a part of what one formula makes")

    def _taken(self, made: int, item: Application, steps: Steps) -> int:
        # Of each element its entry along one dimension, and where in memory those begin.
        self._refuse_beyond(self.shapes[made], steps, "a read at entries")
        op, dim, axes, own, _ = item.function.form or ()
        table, entries = item.tensors
        found = self._find_memory(table)
        assert found is not None, "cuts were found"
        source, desc = found
        if desc.device is None or desc.device.type != "cuda":
            # Who asks for an entry that is not there gets an error, which kernels on the CPU cannot raise.
            raise UnsupportedError("a read at entries that are computed, not on CUDA")
        shape, size = self.shapes[made], self.shapes[table][dim]
        strides = [0] * len(shape)
        for axis, stride in zip(axes, desc.strides, strict=True):
            if axis >= 0:
                strides[axis] = stride
        first = follow(shape, tuple(strides), steps)
        spread: Steps = tuple(("unsqueeze.default", (axis,)) for axis in range(len(shape)) if axis not in own)
        entry = self._find(entries, (*spread, ("expand.default", (shape,)), *steps))
        if self.typing.values[entries] is not torch.int64:
            entry = self._cast(entry, torch.int64)
        scalar = ((), (), 0)
        numbers = [
            self._counter((*where[:2], where[2] + number), self.typing.ranks[made])
            for where, number in (
                (first, 0),
                (scalar, desc.strides[dim]),
                (scalar, size),
                (scalar, size if op == "index" else 0),
            )
        ]
        memory = self._input(source, desc._replace(shape=(), strides=()), self.given[source][1])
        return self.builder.apply(ops.read_function(), [memory, numbers[0], entry, *numbers[1:]])[0]

    def _find_memory(self, value: int) -> tuple[int, TensorDesc] | None:
        # The input that a value is, or a view of, and what is seen of it; None of what is computed.
        steps: Steps = ()
        while self.producers[value] >= 0:
            item = self.group.applications[self.producers[value]]
            if item.function.op != "view" and not item.function.is_view:
                return None
            (value,) = item.tensors
            steps = (*self._steps(item, self.shapes[value]), *steps)
        return value, seen(self.given[value][0], steps)

    def _summed(self, made: int, item: Application, steps: Steps) -> int:
        # Of each element the first and the last of what is added up, and where in memory those begin.
        self._refuse_beyond(self.shapes[made], steps, "a sum of what goes to one entry")
        adding, dim, _ = item.function.form or ()
        table, order, begins = item.tensors
        desc, shape = self.given[table][0], self.shapes[made]
        if desc.device is None or desc.device.type != "cuda" or self.given[order][0].strides != (1,):
            raise UnsupportedError("a sum of what goes to one entry, not on CUDA")
        strides = tuple(stride if own != dim else 0 for own, stride in enumerate(desc.strides))
        spread: Steps = tuple(("unsqueeze.default", (axis,)) for axis in range(len(shape)) if axis != dim)
        seen_by_all: Steps = (*spread, ("expand.default", (shape,)), *steps)
        first, last = (
            self._find(begins, (("slice.Tensor", (0, start, start + shape[dim])), *seen_by_all)) for start in (0, 1)
        )
        memory = [
            self._input(value, self.given[value][0]._replace(shape=(), strides=()), self.given[value][1])
            for value in (table, order)
        ]
        where, step = follow(shape, strides, steps), ((), (), desc.strides[dim])
        numbers = [self._counter(item, self.typing.ranks[made]) for item in (where, step)]
        return self.builder.apply(ops.sum_function(adding), [*memory, *numbers, first, last])[0]

    def _counter(self, where: tuple[Shape, Strides, int], rank: Rank) -> int:
        # Numbers that grow by steps of their own along each dimension.
        shape, strides, offset = where
        desc = TensorDesc(torch.Tensor, torch.int64, shape, strides, offset=offset)
        return self._input(0, desc, InputSpec(torch.int64, rank, is_counter=True))

    def _steps(self, item: Application, shape: Shape) -> Steps:
        function = item.function
        if function.op == "view":
            return ((function.form or ())[:2],)
        if function.op == "squeeze":
            return (("squeeze.dims", (function.dims,)),)
        dims = [slot for slot, dim in enumerate(function.view_dims(len(shape))) if dim is None]
        return tuple(("unsqueeze.default", (dim,)) for dim in dims)

    def _fill(self, made: int, value: int, steps: Steps) -> int:
        # A number that has the dtype and the shape of a tensor.
        shape = follow(self.shapes[made], (0,) * len(self.shapes[made]), steps)[0]
        kind, dtype = self.given[value][0].kind, self.typing.values[made]
        desc = TensorDesc(kind, None, shape, (0,) * len(shape))
        return self._cast(self._input(value, desc, InputSpec(_EXACT[kind], self.typing.ranks[made], kind)), dtype)


# Arrangements that are worth a kernel alone.
_GAINING = frozenset({"pad", "put", "take"})
# What holds a Python number as it is.
_EXACT = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def _refuse(index: int, reason: str) -> UnsupportedError:
    # The rest of the group has kernels, and torch does this one as well.
    return UnsupportedError(reason, application=index, is_expected=True)
