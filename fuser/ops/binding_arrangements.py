"""Which calls of ATen's are arrangements: where sizes are known, and it pays to read and write in parts."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser.layout import Shape, Strides
from fuser.ops.arrangements import (
    arrange,
    cat_function,
    eager_arrangement,
    pad_function,
    seen_through,
    take_function,
)
from fuser.ops.binding_creations import bind_fill, creation_functions
from fuser.ops.calls import IS_IN_MEMORY, OpCall, are_ints, is_constant, static_value
from fuser.ops.index import index_function
from fuser.ops.table import OPS, dtype_kind, holds_number, op_call

__all__ = ["arrangement_functions", "is_bound_by_sizes"]

_ATEN = torch.ops.aten
# What is put together of more parts than this, or of parts of more sizes, takes as many launches. On a GPU those that
# torch takes instead read and write all elements again.
MAX_PARTS = 16
MAX_SIZES, MAX_SIZES_ON_GPU = 2, 4
# Likewise of padded dimensions, but of bytes: corners are further parts.
MAX_SIDES, MAX_SIDES_ON_GPU = 1, 2
# As graphs write a slice that has no end.
_END = (1 << 63) - 1


def arrangement_functions() -> dict[Any, Callable[..., OpCall | None]]:
    """Return the binder of each overload."""
    views = {
        getattr(getattr(_ATEN, packet), overload): _bind_view(f"{packet}.{overload}")
        for packet, _, overload in (name.partition(".") for name in _VIEWS)
    }
    return {
        **views,
        _ATEN.alias.default: _bind_alias,
        _ATEN.cat.default: _bind_cat,
        _ATEN.stack.default: _bind_stack,
        _ATEN.roll.default: _bind_roll,
        _ATEN.glu.default: _bind_glu,
        _ATEN.glu_backward.default: _bind_glu_backward,
        _ATEN.slice_backward.default: _bind_slice_backward,
        _ATEN.select_backward.default: _bind_select_backward,
        _ATEN.slice_scatter.default: _bind_slice_scatter,
        _ATEN.select_scatter.default: _bind_select_scatter,
        _ATEN.constant_pad_nd.default: _bind_pad,
        _ATEN.repeat.default: _bind_repeat,
        _ATEN.pixel_shuffle.default: _bind_pixel_shuffle,
        _ATEN.pixel_unshuffle.default: _bind_pixel_unshuffle,
        _ATEN.channel_shuffle.default: _bind_channel_shuffle,
        _ATEN.embedding.default: _bind_embedding,
        _ATEN.index_select.default: _bind_index_select,
        _ATEN.gather.default: _bind_gather,
        _ATEN.index.Tensor: _bind_index,
        _ATEN.clone.default: _bind_clone,
        **creation_functions(),
    }


_VIEWS = (
    "slice.Tensor", "select.int", "permute.default", "transpose.int", "t.default", "expand.default",
    "unsqueeze.default", "squeeze.default", "squeeze.dim", "squeeze.dims", "view.default", "unfold.default",
)  # fmt: skip


# Overloads whose binders write sizes, strides or a dtype of the tensors at hand into what they return.
_BOUND_BY_SIZES = {
    getattr(_ATEN, name).default
    for name in (
        "roll", "stack", "glu", "glu_backward", "slice_scatter", "select_scatter", "zeros_like", "ones_like",
        "full_like", "new_zeros", "new_ones", "new_full", "index_put",
        "repeat", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle",
    )
}  # fmt: skip


def is_bound_by_sizes(target: Any) -> bool:
    """Whether what a call of an overload becomes holds for tensors of these sizes, strides and dtypes alone."""
    return isinstance(target, torch._ops.OpOverload) and target in _BOUND_BY_SIZES


def _bind_view(name: str) -> Callable[..., OpCall | None]:
    def bind(input: Any, *arguments: Any) -> OpCall | None:  # noqa: A002 - torch's own parameter name
        return _view(input, name, *arguments)

    return bind


def _bind_alias(self: Any) -> OpCall | None:
    # What is seen in the shape that it has; a view would have other strides where a dimension is of size 1.
    value = static_value(self)
    return None if value is None else _view(self, "expand.default", tuple(value.shape))


def _view(x: Any, name: str, *arguments: Any) -> OpCall | None:
    # A tensor without dimensions, or one that becomes so, has another weight in promotion afterwards.
    value = static_value(x)
    frozen = tuple(tuple(item) if isinstance(item, list | tuple) else item for item in arguments)
    flat = [one for item in frozen for one in (item if isinstance(item, tuple) else (item,))]
    if value is None or not value.dim() or not all(one is None or type(one) is int for one in flat):
        return None
    rank = _rank_seen(name, frozen, tuple(value.shape), value.stride())
    return OpCall(seen_through(name, frozen, rank), (x,)) if rank else None


@functools.lru_cache(4096)
def _rank_seen(name: str, frozen: tuple[Any, ...], shape: Shape, strides: Strides) -> int:
    # Of a view; 0 where torch refuses it. The layers of a model have the same ones.
    try:
        return arrange((name, frozen), torch.empty_strided(shape, strides, dtype=torch.int8, device="meta")).dim()
    except (RuntimeError, IndexError):
        return 0


def _bind_cat(tensors: Any, dim: Any = 0) -> OpCall | None:
    values = list(map(static_value, tensors)) if isinstance(tensors, list | tuple) else []
    first = values[0] if values else None
    if first is None or type(dim) is not int or not 1 < len(values) <= MAX_PARTS:
        return None
    dim %= max(first.dim(), 1)
    known = [value for value in values if value is not None and value.dim() == first.dim() > 0]
    is_one_dtype = len({value.dtype for value in known}) == 1
    most = MAX_SIZES_ON_GPU if first.is_cuda else MAX_SIZES
    if len(known) < len(values) or not is_one_dtype or len({value.shape[dim] for value in known}) > most:
        return None
    return OpCall(cat_function(len(values), dim), tuple(tensors))


def _bind_stack(tensors: Any, dim: Any = 0) -> OpCall | None:
    first = static_value(tensors[0]) if isinstance(tensors, list | tuple) and tensors else None
    if first is None or type(dim) is not int or not 1 < len(tensors) <= MAX_PARTS:
        return None
    dim %= first.dim() + 1
    parts = [_view(item, "unsqueeze.default", dim) for item in tensors]
    if None in parts:
        return None
    # ATen does not ask how the tensors lie on every device, as it does when it puts them together; where it makes one
    # of the other, the result lies as what was put together along a dimension that there is.
    known = [torch.empty_strided(item.meta["val"].shape, item.meta["val"].stride(), device="meta") for item in tensors]
    made = torch.cat([item.unsqueeze(dim) for item in known], dim), torch.stack(known, dim)
    return OpCall(cat_function(len(parts), dim), tuple(parts)) if all(map(_is_row_major, made)) else None


def _bind_roll(input: Any, shifts: Any, dims: Any = ()) -> OpCall | None:  # noqa: A002
    # The end of each dimension before its beginning. Without dimensions torch rolls all elements as one row.
    value = static_value(input)
    if value is None or not are_ints(shifts, dims) or not 0 < len(dims) == len(shifts):
        return None
    if not value.numel() or not _is_row_major(value):
        return None
    made = input
    for shift, dim in zip(shifts, dims, strict=True):
        size = value.shape[dim]
        if start := -shift % size:
            parts = [
                OpCall(seen_through("slice.Tensor", (dim % value.dim(), *ends), value.dim()), (made,))
                for ends in ((start, size), (0, start))
            ]
            made = OpCall(cat_function(2, dim % value.dim()), tuple(parts))
    return made if isinstance(made, OpCall) else None


def _pad(x: Any, dim: int, before: int, after: int, number: Any, *, is_contiguous: bool) -> OpCall | None:
    if before < 0 or after < 0:
        return None
    return OpCall(pad_function(dim, before, after, is_contiguous=is_contiguous), (x, number))


def _bind_slice_backward(
    grad_output: Any, input_sizes: Any, dim: Any, start: Any, end: Any, step: Any
) -> OpCall | None:
    value = static_value(grad_output)
    if value is None or not value.dim() or not are_ints(dim, start, end, step, input_sizes):
        return None
    dim %= value.dim()
    size = input_sizes[dim]
    start = min(max(start + size if start < 0 else start, 0), size)
    if step > 1:
        # Every step-th element: one of a further dimension, which is then one with this, and cut where it does not end.
        count, before = -(-size // step), start // step
        after = count - before - value.shape[dim]
        part = _pad(grad_output, dim, before, after, 0, is_contiguous=True) if before or after else grad_output
        sizes = (*input_sizes[:dim], count, *input_sizes[dim + 1 :])
        opened = (*sizes[: dim + 1], 1, *sizes[dim + 1 :])
        part = OpCall(seen_through("view.default", (opened,), len(opened)), (part,))
        part = _pad(part, dim + 1, start % step, step - 1 - start % step, 0, is_contiguous=True)
        sizes = (*sizes[:dim], count * step, *sizes[dim + 1 :])
        made = part and OpCall(seen_through("view.default", (sizes,), len(sizes)), (part,))
        is_cut = made and size % step
        if not is_cut:
            return made
        # torch's result lies row-major, a part does not.
        made = OpCall(seen_through("slice.Tensor", (dim, 0, size), len(sizes)), (made,))
        return OpCall(OPS["contiguous"].function, (made,))
    return _pad(grad_output, dim, start, size - start - value.shape[dim], 0, is_contiguous=True)


def _bind_select_backward(grad_output: Any, input_sizes: Any, dim: Any, index: Any) -> OpCall | None:
    if not are_ints(dim, index, input_sizes):
        return None
    dim %= len(input_sizes)
    size = input_sizes[dim]
    part = _view(grad_output, "unsqueeze.default", dim)
    return part and _pad(part, dim, index % size, size - 1 - index % size, 0, is_contiguous=True)


def _bind_pad(input: Any, pad: Any, value: Any = 0) -> OpCall | None:  # noqa: A002
    known = static_value(input)
    if known is None or not are_ints(pad) or not is_constant(value) or not holds_number(known.dtype, value):
        return None
    every = [(known.dim() - 1 - slot, pad[2 * slot], pad[2 * slot + 1]) for slot in range(len(pad) // 2)]
    # What is taken away is taken first.
    cropped, sizes = input, list(known.shape)
    for dim, before, after in every:
        start, stop = max(-before, 0), sizes[dim] + min(after, 0)
        if stop - start < sizes[dim]:
            end = _END if after >= 0 else after
            cropped = OpCall(seen_through("slice.Tensor", (dim, start, end), known.dim()), (cropped,))
        sizes[dim] = stop - start
    sides = [(dim, max(before, 0), max(after, 0)) for dim, before, after in every if max(before, after) > 0]
    is_cropped = isinstance(cropped, OpCall)
    if is_cropped and min(sizes) < 1:
        return None
    if is_cropped and not sides:
        return OpCall(OPS["clone"].function, (cropped,))
    # With dimensions of one element left, the rest may lie in several formats.
    most = MAX_SIDES_ON_GPU if known.is_cuda and known.dtype.itemsize > 1 else MAX_SIDES
    if not 0 < len(sides) <= most or (is_cropped and known.dim() > 3 and min(sizes) < 2):
        return None
    made: Any = cropped
    for side in sides:
        made = made and _pad(made, *side, value, is_contiguous=False)
    return made  # type: ignore[no-any-return]


def _bind_repeat(self: Any, repeats: Any) -> OpCall | None:
    value = static_value(self)
    if value is None or not isinstance(repeats, list | tuple) or not are_ints(repeats) or min(repeats, default=0) < 1:
        return None
    shape = (*[1] * (len(repeats) - value.dim()), *value.shape)
    opened = [one for size in shape for one in (1, size)]
    spread = tuple(one for pair in zip(repeats, shape, strict=True) for one in pair)
    whole = [own * size for own, size in zip(repeats, shape, strict=True)]
    return _copied(self, opened, ("expand.default", (spread,)), whole)


def _bind_pixel_shuffle(self: Any, upscale_factor: Any) -> OpCall | None:
    value, by = _image(self), upscale_factor
    if value is None or not are_ints(by) or by < 1 or value.shape[-3] % by**2:
        return None
    *lead, channels, height, width = value.shape
    opened = (*lead, channels // by**2, by, by, height, width)
    return _copied(
        self, opened, _permuted(len(lead), 0, 3, 1, 4, 2), (*lead, channels // by**2, height * by, width * by)
    )


def _bind_pixel_unshuffle(self: Any, downscale_factor: Any) -> OpCall | None:
    value, by = _image(self), downscale_factor
    if value is None or not are_ints(by) or by < 1 or value.shape[-2] % by or value.shape[-1] % by:
        return None
    *lead, channels, height, width = value.shape
    opened = (*lead, channels, height // by, by, width // by, by)
    return _copied(
        self, opened, _permuted(len(lead), 0, 2, 4, 1, 3), (*lead, channels * by**2, height // by, width // by)
    )


def _bind_channel_shuffle(input: Any, groups: Any) -> OpCall | None:  # noqa: A002
    value = _image(input)
    if value is None or not are_ints(groups) or groups < 1 or value.shape[1] % groups:
        return None
    batch, channels, *rest = value.shape
    opened = (batch, groups, channels // groups, *rest)
    return _copied(input, opened, _permuted(1, 1, 0, *range(2, 2 + len(rest))), value.shape)


def _image(x: Any) -> torch.Tensor | None:
    # What is known of a tensor with channels, height and width, or length, in row-major order: of one in another format
    # ATen's results lie so on the CPU alone.
    value = static_value(x)
    is_plain = value is not None and value.dim() >= 3 and value.numel() > 0 and _is_row_major(value)
    return value if is_plain else None


def _permuted(lead: int, *order: int) -> tuple[str, tuple[Any, ...]]:
    return "permute.default", ((*range(lead), *(lead + dim for dim in order)),)


def _copied(x: Any, opened: Sequence[int], step: tuple[str, tuple[Any, ...]], shape: Sequence[int]) -> OpCall | None:
    # A tensor with its dimensions opened, seen through a step, copied and seen in a shape.
    seen = _view(x, "view.default", tuple(opened))
    if seen is None:
        return None
    moved = OpCall(seen_through(*step, len(step[1][0])), (seen,))
    made = OpCall(OPS["contiguous"].function, (moved,))
    return OpCall(seen_through("view.default", (tuple(shape),), len(shape)), (made,))


def _bind_slice_scatter(
    input: Any,  # noqa: A002
    src: Any,
    dim: Any = 0,
    start: Any = None,
    end: Any = None,
    step: Any = 1,
) -> OpCall | None:
    value = static_value(input)
    if value is None or not value.dim() or step != 1 or not are_ints(dim):
        return None
    start, end = 0 if start is None else start, _END if end is None else end
    if not are_ints(start, end):
        return None
    start, end, _ = slice(start, end).indices(value.shape[dim])
    return _put(input, src, dim % value.dim(), start, end) if start < end else None


def _bind_select_scatter(input: Any, src: Any, dim: Any, index: Any) -> OpCall | None:  # noqa: A002
    value = static_value(input)
    if value is None or not value.dim() or not are_ints(dim, index):
        return None
    dim %= value.dim()
    index += value.shape[dim] if index < 0 else 0
    part = _view(src, "unsqueeze.default", dim)
    return part and _put(input, part, dim, index, index + 1)


def _put(x: Any, part: Any, dim: int, start: int, stop: int) -> OpCall | None:
    # The tensor with a part in place of its own.
    value = static_value(x)
    known = static_value(part.tensors[0] if isinstance(part, OpCall) else part)
    if value is None or known is None or known.dtype != value.dtype:
        return None
    source = part.tensors[0] if isinstance(part, OpCall) else part
    if dim == value.dim() - 1 and stop - start == 1 and source.target in _FILLS and _is_row_major(value):
        return _put_number(x, start, source.args[1])
    sizes = tuple(stop - start if own == dim else size for own, size in enumerate(value.shape))
    ends = [(0, start)] * (start > 0) + [(stop, _END)] * (stop < value.shape[dim])
    parts = [_view(x, "slice.Tensor", dim, *own) for own in ends]
    if None in parts or not parts or _without_memory(part).shape != sizes:
        return None
    where = 1 if start else 0
    tensors = (*parts[:where], part, *parts[where:])
    # ATen writes into a copy, which keeps its strides.
    made = torch.cat(list(map(_without_memory, tensors)), dim)
    return OpCall(cat_function(len(tensors), dim), tensors) if made.stride() == value.stride() else None


_FILLS = frozenset((_ATEN.fill.Scalar, _ATEN.fill.Tensor))


def _put_number(x: Any, column: int, number: Any) -> OpCall | None:
    # Chosen by each element's column: vectors of rows stay whole.
    filled = bind_fill(x, number)
    if filled is None or dtype_kind(x.meta["val"].dtype) not in OPS["where"].kinds:
        return None
    return op_call("where", op_call("eq", OpCall(index_function(1, (-1,)), (x,)), column), filled, x)


def _without_memory(part: Any) -> torch.Tensor:
    # A tensor of known sizes, or a view of one.
    source = part.tensors[0] if isinstance(part, OpCall) else part
    value = source.meta["val"]
    made = torch.empty_strided(value.shape, value.stride(), device="meta")
    return eager_arrangement(part.function, [made]) if isinstance(part, OpCall) else made


# --- reads at entries that are computed ---------------------------------------------------------------------------
def _bind_embedding(
    weight: Any,
    indices: Any,
    padding_idx: Any = -1,  # noqa: ARG001 - its row has no gradient
    scale_grad_by_freq: Any = False,  # noqa: ARG001
    sparse: Any = False,  # noqa: ARG001
) -> OpCall | None:
    return _take("embedding", weight, 0, indices)


def _bind_index_select(input: Any, dim: Any, index: Any) -> OpCall | None:  # noqa: A002
    entries = static_value(index)
    return _take("index_select", input, dim, index) if entries is not None and entries.dim() == 1 else None


def _bind_gather(input: Any, dim: Any, index: Any, *, sparse_grad: Any = False) -> OpCall | None:  # noqa: A002, ARG001
    # Entries that are none may have fewer dimensions.
    table, entries = static_value(input), static_value(index)
    is_alike = table is not None and entries is not None and table.dim() == entries.dim()
    return _take("gather", input, dim, index) if is_alike else None


def _bind_index(input: Any, indices: Any) -> OpCall | None:  # noqa: A002
    if not isinstance(indices, list | tuple):
        return None
    dims = [dim for dim, item in enumerate(indices) if item is not None]
    return _take("index", input, dims[0], indices[dims[0]]) if len(dims) == 1 else None


def _take(op: str, table: Any, dim: Any, entries: Any) -> OpCall | None:
    # On the CPU torch raises where an entry is out of range, which a kernel there could not.
    value, at = static_value(table), static_value(entries)
    if value is None or at is None or not value.is_cuda or not at.is_cuda or at.dtype not in _ENTRIES:
        return None
    if not value.dim() or not at.dim() or not are_ints(dim) or not _is_in_memory(table):
        return None
    function = take_function(op, dim % value.dim(), value.dim(), at.dim())
    made = eager_arrangement(function, [torch.empty_like(item, device="meta") for item in (value, at)])
    return OpCall(function, (table, entries)) if _is_row_major(made) else None


_ENTRIES = (torch.int64, torch.int32)


def _is_in_memory(node: Any) -> bool:
    # Whether it is an argument, or no group that arranges makes it: norms are in groups of another kind.
    while node.target in _SEEN or node.target is operator.getitem:
        node = node.args[0]
    if node.meta.get(IS_IN_MEMORY):
        return True
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target in _APART
    return bool(node.op in {"placeholder", "get_attr"})


# What kernels read through.
_SEEN = {_ATEN.slice.Tensor, _ATEN.select.int}
_APART = {
    getattr(_ATEN, name).default
    for name in (
        "mm", "addmm", "bmm", "baddbmm", "convolution", "index_add", "index_put", "scatter_add", "native_layer_norm",
        "_fused_rms_norm", "native_group_norm",
    )
}  # fmt: skip


def _is_row_major(value: torch.Tensor) -> bool:
    # Also where a dimension has one element.
    return value.stride() == torch.empty(value.shape, device="meta").stride()


def _bind_glu(input: Any, dim: Any = -1) -> OpCall | None:  # noqa: A002
    parts = _halves(input, dim)
    return parts and OpCall(OPS["glu"].function, parts)


def _bind_glu_backward(grad_output: Any, self: Any, dim: Any) -> OpCall | None:
    parts = _halves(self, dim)
    value = static_value(self)
    if parts is None or value is None:
        return None
    first = OpCall(OPS["glu_backward_first"].function, (grad_output, parts[1]))
    second = OpCall(OPS["glu_backward_second"].function, (grad_output, *parts))
    return OpCall(cat_function(2, dim % value.dim()), (first, second))


def _halves(x: Any, dim: Any) -> tuple[OpCall, OpCall] | None:
    value = static_value(x)
    if value is None or not value.dim() or not are_ints(dim) or value.shape[dim] % 2:
        return None
    half = value.shape[dim] // 2
    first, second = (_view(x, "slice.Tensor", dim, *ends) for ends in ((0, half), (half, _END)))
    return (first, second) if first is not None and second is not None else None


def _bind_clone(input: Any, *, memory_format: Any = None) -> OpCall | None:  # noqa: A002
    kinds = {None: "clone", torch.preserve_format: "clone", torch.contiguous_format: "contiguous"}
    name = kinds.get(memory_format)
    if name is None:
        order, back = _CHANNELS_LAST.get(memory_format, ((), ()))
        seen = _view(input, "permute.default", order) if order else None
        made = seen and OpCall(OPS["contiguous"].function, (seen,))
        return made and OpCall(seen_through("permute.default", (back,), len(back)), (made,))
    return OpCall(OPS[name].function, (input,))


# In which order dimensions lie, and the way back.
_CHANNELS_LAST = {
    torch.channels_last: ((0, 2, 3, 1), (0, 3, 1, 2)),
    torch.channels_last_3d: ((0, 2, 3, 4, 1), (0, 4, 1, 2, 3)),
}
