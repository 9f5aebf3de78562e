"""Whether torch, as it is installed, has the order that a kernel keeps: found by comparing bits on the user's device.

An order is compared before an op first uses it, on a few random tensors, of fewer rows but the same schedule, and the
verdict kept, in memory and on disk. Where bits differ, torch's own kernel serves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fuser import counters, disk_cache, log
from fuser import torch_ops as ops
from fuser._version import __version__
from fuser.combining import Reduction
from fuser.compiler import backend_for, map_side_by_side, register
from fuser.cuda.aten_orders import coalesce
from fuser.disk_cache import CacheKey
from fuser.errors import CaptureError, NoCompileError
from fuser.fallback import Fallback
from fuser.function import Function
from fuser.graph import GroupBuilder
from fuser.kernel_spec import KernelSpec
from fuser.layout import Shape
from fuser.orders import ANY_ORDER, COLUMN_ORDERS, RowOrder
from fuser.process import Lock, planning
from fuser.row_orders import torchs_order
from fuser.tensor_desc import TensorDesc, describe, lies_for_vectors

__all__ = ["OrderCase", "find_verdict", "is_kept", "verdict_key"]

# How many rows are compared, at least as many as it takes for the schedule to be the same.
ROWS = (3, 8, 33, 128, 512, 600, 1024, 2048, 4096)
# Elements of a longer row.
LONG = 1 << 20
# Elements that are compared of what is computed per element, at least: small differences of what there is per row show
# in few of those that are rounded to 16 bits.
ELEMENTS = 1 << 19
# Rows from which the columns of a norm's gradients have one schedule.
LONG_COLUMN = 256
# What scalars are bound to.
SCALARS = {"eps": 1e-5, "momentum": 0.1}

# Orders (Reduction.order) of sums of exponentials.
_OF_POWERS = ("softmax", "log_softmax", "softmax_cast", "log_softmax_cast")
_NARROW = (torch.float16, torch.bfloat16)
# Orders of sums of squares, whose differences results of 16 bits hide.
_HIDDEN = ("norm", "welford")

# Each is held while its case is compared.
_locks: dict[CacheKey, Lock] = {}
_verdicts: dict[CacheKey, bool] = {}
_drawing = Lock()

# From a group and its inputs' descriptions to what runs it.
Prepare = Callable[[KernelSpec, Sequence[TensorDesc]], Callable[[list[Any]], Sequence[torch.Tensor]]]


class Example(NamedTuple):
    """Inputs of an op alone."""

    described: tuple[TensorDesc, ...]
    draw: Callable[[torch.Generator], list[Any]]


class OrderCase(NamedTuple):
    """One kind of use of an order."""

    # One of torch's ops: a reduction, or several steps.
    function: Function
    # Of its reductions.
    orders: tuple[RowOrder, ...]
    # Its tensors.
    tensors: tuple[TensorDesc, ...]
    device: torch.device

    def cache_key(self) -> CacheKey:
        """Under which the verdict is kept: of sizes, only the length of rows is part of it."""
        form = replace(self.function, reduction=None) if self.function.reduction else self.function
        kind = (str(form.to_json()), str([item.dtype for item in self.tensors]), str(tuple(map(_kind_of, self.orders))))
        return verdict_key(self.device, "order", *kind, self.length())

    def length(self) -> str:
        """Return what lengths of rows have in common that share a verdict."""
        # What has several steps may have another kernel from any length on, and for any sizes that make it.
        sizes = self._reduced_sizes()
        return str(sizes) if self.function.is_composite else str((math.prod(sizes) - 1).bit_length())

    def verdict(self) -> bool | None:
        """Return whether torch has the orders, as ``is_kept`` found in this process; None: it was not asked."""
        return _verdicts.get(self.cache_key())

    def forms(self) -> Iterator[OrderCase]:
        """Give the op, and one with results that hide nothing where its own do and no row's come to little."""
        yield self
        reduction, wide = self.function.reduction, f"{str(self.function.op).removesuffix('_mean')}_wide"
        # On the CPU they are double, which nothing hides; a result of float32 has another kernel there.
        is_hidden = self.device.type == "cuda" and self.tensors[0].dtype in _NARROW
        if reduction and reduction.order in _HIDDEN and is_hidden and wide in ops.REDUCTIONS:
            yield self._replace(function=ops.reduction_function(wide, reduction.dims, reduction.keepdim))

    def group(self) -> KernelSpec:
        """Return the op alone."""
        builder = GroupBuilder("strict")
        tensors = [builder.add_input(f"x{slot}") for slot in range(len(self.tensors))]
        scalars = [builder.add_input(item.name, is_scalar=True) for item in self.function.scalars]
        return register(builder.build(builder.apply(self.function, tensors, scalars)))

    def examples(self) -> Iterator[Example]:
        """Give inputs of the op alone that have the same kinds of order."""
        if self.function.reduction is not None:
            resized, offset = self._resized()
            for draw in (_draw, partial(_draw_balanced, self._dims(len(resized.shape))), _draw):
                yield self._example([resized], draw, offset)
            return
        tensors = self._fewer_rows()
        dims = self._dims(len(tensors[0].shape))
        if dims and self._reductions()[0].order in _OF_POWERS:
            # Of many powers, or what is added is one of them; and of one large one, whose logarithm is small.
            for rise in (0.0, math.log(max(math.prod(self._reduced_sizes()), 1)) + 11):
                draw = partial(_draw_exponents, dims[0], rise)
                yield self._example(tensors[:1], draw, int(not tensors[0].is_aligned))
            return
        # In float32, too: of the same orders, and what is rounded to 16 bits hides small differences.
        wide = [item._replace(dtype=torch.float32) if item.dtype in _NARROW else item for item in tensors]
        says_dtype = any(isinstance(item, str) and hasattr(torch, item) for item in self.function.form or ())
        for chosen in (tensors, tensors if says_dtype else wide):
            yield self._example(chosen, _draw)

    def _example(self, tensors: Sequence[TensorDesc], draw: Callable[..., torch.Tensor], offset: int = 0) -> Example:
        # Tensors that begin so many elements from an aligned address.
        numbers, drawn = [SCALARS.get(item.name, 1.0) for item in self.function.scalars], list[TensorDesc]()
        for item in tensors:
            assert item.dtype is not None, "no number"
            is_aligned = lies_for_vectors(self.device, offset * item.dtype.itemsize)
            sizes, strides = tuple(map(int, item.shape)), tuple(map(int, item.strides))
            drawn.append(TensorDesc(torch.Tensor, item.dtype, sizes, strides, self.device, is_aligned))
        return Example(
            (*drawn, *map(describe, numbers)),
            lambda generator: [*(draw(item, offset, generator) for item in drawn), *numbers],
        )

    def _dims(self, rank: int) -> tuple[int, ...]:
        # What the op reduces, for a tensor of so many dimensions; of one that adds up columns the others.
        if self.function.reduction is not None:
            return self.function.reduction.normalize_dims(rank)
        reductions = self._reductions()
        steps = ops.composite_steps(str(self.function.op), self.function.form or (), True)
        if any(item.function.view for item in steps.applications) and reductions[0].order != "nll_loss":
            # Of channels, which have tensors of their own.
            return tuple(range(1, rank))
        columns = {dim for item in reductions if item.order in COLUMN_ORDERS for dim in item.normalize_dims(rank)}
        along = {dim for item in reductions if item.order not in COLUMN_ORDERS for dim in item.normalize_dims(rank)}
        return tuple(sorted(along or {*range(rank)} - columns))

    def _reductions(self) -> list[Reduction]:
        # Those of its steps whose order counts.
        steps = ops.composite_steps(str(self.function.op), self.function.form or (), True)
        found = [item.function.reduction for item in steps.applications if item.function.reduction]
        return [item for item in found if item.order not in ANY_ORDER]

    def _reduced_sizes(self) -> Shape:
        shape = self.tensors[0].shape
        return tuple(shape[dim] for dim in self._dims(len(shape)))

    def _resized(self) -> tuple[TensorDesc, int]:
        # A tensor with as few rows as it takes, as dense as it goes, and how far from an aligned address it begins.
        desc, order = self.tensors[0], self.orders[0]
        dims = self._dims(len(desc.shape))
        layout = coalesce(desc.shape, desc.strides, dims)
        offset = 1 if order.source >= 0 and not layout.length % order.schedule.vector else 0
        own = [dim for dim in range(len(desc.shape)) if dim not in dims and desc.shape[dim] > 1]
        longest = max(dims, key=lambda dim: desc.shape[dim], default=0)
        lengths = {}
        if layout.length > 2 * LONG and desc.shape[longest] == layout.length:
            lengths = {longest: LONG + layout.length % 64}
        # All rows along the innermost dimension. What neighbours are read with depends on how many there are.
        inner = min(own, key=lambda dim: desc.strides[dim], default=-1)
        counts = [count + (layout.rows - count) % 4 for count in ROWS] if own else [1]
        for sizes in [{dim: count if dim == inner else 1 for dim in own} | lengths for count in counts]:
            resized = _with_sizes(desc, sizes)._replace(is_aligned=not offset)
            found = torchs_order(self.function, resized, dims, self.device, order.source)
            if found is not None and _kind_of(found) == _kind_of(order):
                return resized, offset
        return desc, offset

    def _fewer_rows(self) -> list[TensorDesc]:
        # The tensors of several steps, with fewer rows: of those that have all dimensions.
        shape = self.tensors[0].shape
        dims, length = self._dims(len(shape)), max(math.prod(self._reduced_sizes()), 1)
        # As many as it takes for columns to have the same schedule.
        rows, sizes = max(-(-ELEMENTS // length), LONG_COLUMN) + math.prod(shape) // length % 8, dict[int, int]()
        for dim, size in enumerate(shape):
            if dim not in dims:
                sizes[dim] = min(size, rows)
                rows = -(-rows // max(size, 1))
        return [
            _with_sizes(item, {dim: size for dim, size in sizes.items() if item.shape[dim] == shape[dim]})
            if len(item.shape) == len(shape)
            else item
            for item in self.tensors
        ]


def verdict_key(device: torch.device, *what: str) -> CacheKey:
    """Return under which it is kept what a comparison with torch on a device came to; ``what`` says of what.

    What was compared is what a compiler made of a text: another one's kernels are compared again.
    """
    return CacheKey.build((*what, *_installation(device)), backend_for(device.type).maker())


def _installation(device: torch.device) -> tuple[str, ...]:
    # What torch's orders may depend on beside what is computed: the versions, and the device.
    versions = (__version__, torch.__version__, str(torch.version.cuda))
    if device.type != "cuda":
        return (*versions, "cpu", torch.backends.cpu.get_cpu_capability(), str(torch.get_num_threads()))
    found: Any = torch.cuda.get_device_properties(device)
    return (*versions, found.name, str((found.major, found.minor)), str(found.multi_processor_count))


def is_kept(case: OrderCase, prepare: Prepare) -> bool:
    """Return whether kernels have torch's bits.

    Args:
        case: what is asked for.
        prepare: makes what runs a group in kernels that keep the orders that are expected.

    Raises:
        CaptureError: nobody knows yet, and a CUDA graph is being captured: nothing can be compared now.
    """

    def compare() -> bool:
        if case.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            name = case.function.name
            raise CaptureError(f"{name!r} was not compared with torch's kernel before this CUDA graph: call it once")
        verdict = _compare(case, prepare)
        log.say("order", f"{case.function.name}, {case.tensors}, {case.orders}: {'kept' if verdict else 'another one'}")
        return verdict

    try:
        return find_verdict(case.cache_key(), compare)
    except (NoCompileError, torch.OutOfMemoryError):
        # Nobody knows: torch's kernel serves, this time.
        return False


def find_verdict(key: CacheKey, compare: Callable[[], bool]) -> bool:
    """Return what a comparison with torch came to: once made, it is kept in memory and on disk."""
    if key not in _verdicts:
        with _locks.setdefault(key, Lock())():
            payload = b"" if key in _verdicts else disk_cache.read(key)
            if key not in _verdicts and payload not in (b"0", b"1"):
                payload = b"1" if compare() else b"0"
                disk_cache.write(key, payload)
            _verdicts.setdefault(key, payload == b"1")
    return _verdicts[key]


def _compare(case: OrderCase, prepare: Prepare) -> bool:
    counters.count("checks")
    with planning():
        found = [(form.group(), example) for form in case.forms() for example in form.examples()]
    wanted = {(spec.key, example.described): spec for spec, example in found}
    made = map_side_by_side(lambda item: prepare(item[1], item[0][1]), list(wanted.items()))
    runs = dict(zip(wanted, made, strict=True))
    with (
        # One at a time: the tensors take memory, and no time.
        _drawing(),
        _disable_current_modes(),
        torch.no_grad(),
        torch.autocast(case.device.type, enabled=False),
        torch.cuda.device(case.device if case.device.type == "cuda" else -1),
    ):
        generator = torch.Generator(case.device).manual_seed(0)
        for spec, example in found:
            inputs = example.draw(generator)
            assert [describe(item, reads_address=True) for item in inputs] == [*example.described], "drawn as described"
            results = runs[spec.key, example.described](inputs), Fallback(spec.group).run(inputs, "")
            if not all(map(_is_equal, *results)):
                return False
        return True


def _is_equal(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.equal(*(torch.nan_to_num(x, nan=7.0) if x.is_floating_point() else x for x in (got, want)))


def _with_sizes(desc: TensorDesc, sizes: Mapping[int, int]) -> TensorDesc:
    # Dense, its dimensions as they lie in memory.
    shape = tuple(sizes.get(dim, size) for dim, size in enumerate(desc.shape))
    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (desc.strides[dim], -dim)):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return desc._replace(shape=shape, strides=tuple(strides))


def _draw(desc: TensorDesc, offset: int, generator: torch.Generator, *, is_wide: bool = True) -> torch.Tensor:
    # Of many magnitudes, so that every change of the order shows. Integers are indices: 0 is one of them.
    reach = sum((size - 1) * stride for size, stride in zip(desc.shape, desc.strides, strict=True))
    count, device = max(reach + 1, 0) + offset, generator.device
    if desc.dtype is not None and not desc.dtype.is_floating_point:
        flat = torch.zeros(count, dtype=desc.dtype, device=device)
    else:
        wide = torch.float64 if desc.dtype is torch.float64 else torch.float32
        first, second = (torch.randn(count, dtype=wide, device=device, generator=generator) for _ in range(2))
        flat = (first * torch.exp(2 * second) if is_wide else first).to(desc.dtype)
    return flat.as_strided(desc.shape, desc.strides, offset)


def _draw_balanced(dims: tuple[int, ...], desc: TensorDesc, offset: int, generator: torch.Generator) -> torch.Tensor:
    x = _draw(desc, offset, generator)
    _balance(x, dims, generator)
    return x


def _draw_exponents(dim: int, rise: float, desc: TensorDesc, offset: int, generator: torch.Generator) -> torch.Tensor:
    # One element of each row is so much larger.
    x = _draw(desc, offset, generator, is_wide=False)
    place = torch.randint(x.shape[dim], x.narrow(dim, 0, 1).shape, device=x.device, generator=generator)
    return x.scatter_add_(dim, place, torch.full_like(x.narrow(dim, 0, 1), rise))


def _balance(x: torch.Tensor, dims: tuple[int, ...], generator: torch.Generator) -> None:
    # Rows that come to nothing but what is rounded: their bits show in 16 bits, too.
    order = [*(dim for dim in range(x.dim()) if dim not in dims), *dims]
    view = x.permute(order)
    length = math.prod(x.shape[dim] for dim in dims)
    rows = view.reshape(x.numel() // max(length, 1), length).clone()
    half = rows.shape[1] // 2
    rows[:, half : 2 * half] = -rows[:, :half]
    mixed = torch.randperm(rows.shape[1], device=x.device, generator=generator)
    view.copy_(rows[:, mixed].view(view.shape))


def _kind_of(order: RowOrder) -> RowOrder:
    # What makes other kernels; how many blocks share a row does not.
    blocks = min(order.schedule.blocks, 2)
    return order._replace(schedule=order.schedule._replace(blocks=blocks), source=min(order.source, 0))
