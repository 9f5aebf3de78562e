"""torch's ops that compute nothing and say where elements lie: views, tensors put together, one number for all.

What an arrangement's result looks like is asked of torch itself, on tensors without memory: shapes, strides and errors
are torch's. How a kernel reads and writes through them is in ``fuser.boxes``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from fuser.cxx.functor import parse_functor
from fuser.function import Function
from fuser.layout import Shape, Strides

__all__ = [
    "arange_function",
    "arrange",
    "cat_function",
    "eager_arrangement",
    "full_function",
    "full_like_function",
    "lay_out",
    "pad_function",
    "pick_function",
    "put_function",
    "read_function",
    "seen_through",
    "sum_function",
    "take_function",
]

# A step of a view: an overload of torch's (``slice.Tensor``) and what follows the tensor.
ViewStep = tuple[str, tuple[Any, ...]]


@functools.lru_cache(1024)
def seen_through(overload: str, arguments: tuple[Any, ...], rank: int) -> Function:
    """Return the function of one tensor that is torch's view of it.

    Args:
        overload: as ``slice.Tensor``.
        arguments: what follows the tensor: numbers, None, or tuples of numbers.
        rank: how many dimensions the result has.
    """
    return Function(_functor("view", 1), op="view", form=(overload, arguments, rank))


@functools.lru_cache(1024)
def cat_function(count: int, dim: int) -> Function:
    """Return ``torch.cat`` of ``count`` tensors along a dimension, which is not negative."""
    return Function(_functor("cat", count), op="cat", form=(dim, None))


@functools.lru_cache(1024)
def pad_function(dim: int, before: int, after: int, *, is_contiguous: bool) -> Function:
    """Return the function of a tensor and a number that puts the number before and after the tensor.

    Args:
        dim: along which dimension, which is not negative.
        before: elements that are the number.
        after: likewise.
        is_contiguous: whether the result lies row-major, else as ``constant_pad_nd`` lays it out.
    """
    form = (dim, before, after, is_contiguous, None)
    return Function(_functor("pad", 2), op="pad", unpromoted=("x1",), form=form)


@functools.lru_cache(1024)
def full_function(shape: Shape, strides: Strides, dtype: torch.dtype) -> Function:
    """Return the function of a number that is a tensor of it, on the device of another tensor, which comes second."""
    functor = _functor("full", 2)
    return Function(functor, op="full", unpromoted=("x1",), out_dtypes=(dtype,), form=(shape, strides, len(shape)))


@functools.lru_cache(1024)
def full_like_function(dtype: torch.dtype, memory_format: str, rank: int) -> Function:
    """Return the function of a number and a tensor that is ``torch.full_like``, in a format that torch calls so."""
    form = (memory_format, None, rank)
    return Function(_functor("full", 2), op="full", unpromoted=("x1",), out_dtypes=(dtype,), form=form)


@functools.lru_cache(1024)
def arange_function(size: int, start: int, step: int, dtype: torch.dtype) -> Function:
    """Return the function that is ``torch.arange`` of so many integers, on the device of its tensor."""
    return Function(_functor("arange", 1), op="arange", out_dtypes=(dtype,), form=(size, start, step, 1))


@functools.lru_cache(1024)
def take_function(op: str, dim: int, shape_rank: int, index_rank: int) -> Function:
    """Return the function of a tensor and of entries in it that is one of torch's reads at entries.

    Args:
        op: "embedding", "index_select", "gather" or "index", whose one tensor of entries is for ``dim``.
        dim: the dimension that entries are along, which is not negative.
        shape_rank: dimensions of the tensor.
        index_rank: dimensions of the entries.
    """
    axes = range(index_rank) if op == "gather" else range(dim, dim + index_rank)
    moved = 0 if op == "gather" else index_rank - 1
    table = tuple(-1 if own == dim else own + moved * (own > dim) for own in range(shape_rank))
    form = (op, dim, table, tuple(axes), shape_rank + moved)
    return Function(_functor("take", 2), op="take", unpromoted=("x1",), form=form)


@functools.lru_cache(1024)
def put_function(adding: str, dim: int, rank: int) -> Function:
    """Return the function that adds up, for each entry along a dimension, the parts of a tensor that go there.

    Its tensors: one of ``rank`` dimensions; the places of its parts along ``dim``, those for one entry after those for
    the one before; and for each entry where among them its own begin, and where the last ones end. What becomes of no
    part is zero.

    Args:
        adding: how they are added: "each" sum is rounded to the dtype, all are rounded "once", or by 32 "lanes".
        dim: along which dimension, which is not negative.
        rank: dimensions of the tensor.
    """
    return Function(_functor("put", 3), op="put", unpromoted=("x1", "x2"), form=(adding, dim, rank))


@functools.cache
def sum_function(adding: str) -> Function:
    """Return what kernels have of it.

    It takes a tensor, places, where to begin, how far places lie apart, and which of them: from, and up to.
    """
    functor = _functor(f"add_{adding}", 6)
    return Function(functor, op=f"add_{adding}", unpromoted=tuple(item.name for item in functor.tensors[1:]))


@functools.cache
def read_function() -> Function:
    """Return what kernels have of it.

    It takes a tensor, where to begin, an entry, how far entries lie apart, how many there are, and what is added to
    negative ones.
    """
    functor = _functor("read", 6)
    return Function(functor, op="read", unpromoted=tuple(item.name for item in functor.tensors[1:]))


@functools.cache
def pick_function(bounds: int) -> Function:
    """Return what kernels have of a part of what is put together: nothing is read where another part is.

    It takes a tensor, the place in memory, and for each of its bounds a number and how many there are: it is read where
    each number is one of them, from 0 on.
    """
    functor = _functor(f"pick_{bounds}", 2 + 2 * bounds)
    return Function(functor, op="pick", unpromoted=tuple(item.name for item in functor.tensors[1:]))


@functools.cache
def _functor(name: str, count: int) -> Any:
    parameters = ", ".join(f"T x{slot}" for slot in range(count))
    return parse_functor(f"template <typename T> T aten_{name}({parameters}) {{ return x0; }}")


def arrange(step: ViewStep, x: torch.Tensor) -> torch.Tensor:
    """Return torch's view of a tensor; raises as torch does."""
    packet, _, overload = step[0].partition(".")
    made: torch.Tensor = getattr(getattr(torch.ops.aten, packet), overload)(x, *step[1])
    return made


def eager_arrangement(function: Function, tensors: Sequence[Any]) -> torch.Tensor:
    """Return the result in eager torch."""
    form: tuple[Any, ...] = function.form or ()
    if function.op == "view":
        return arrange(form[:2], tensors[0])
    if function.op == "cat":
        return torch.cat(list(tensors), form[0])
    if function.op == "arange":
        size, start, step = form[:3]
        return torch.arange(start, start + size * step, step, dtype=function.out_dtypes[0], device=tensors[0].device)
    if function.op == "take":
        table, entries = tensors
        op, dim = form[:2]
        if op == "embedding":
            return torch.embedding(table, entries)
        if op == "index":
            found: torch.Tensor = table[(slice(None),) * dim + (entries,)]
            return found
        return torch.gather(table, dim, entries) if op == "gather" else torch.index_select(table, dim, entries)
    if function.op == "put":
        x, order, begins = tensors
        entries = torch.repeat_interleave(torch.arange(len(begins) - 1, device=x.device), begins.diff())
        sizes = [*x.shape[: form[1]], len(begins) - 1, *x.shape[form[1] + 1 :]]
        at = (None,) * form[1] + (entries,)
        added: torch.Tensor = torch.ops.aten.index_put(x.new_zeros(sizes), at, x.index_select(form[1], order), True)
        return added
    if function.op == "full":
        number, like = tensors
        if form[1] is None:
            kind = getattr(torch, form[0])
            return torch.full_like(like, number, dtype=function.out_dtypes[0], memory_format=kind)
        return torch.empty_strided(form[0], form[1], dtype=function.out_dtypes[0], device=like.device).fill_(number)
    x, number = tensors
    dim, before, after, is_contiguous = form[:4]
    if not is_contiguous:
        return torch.constant_pad_nd(x, [0, 0] * (x.dim() - 1 - dim) + [before, after], number)
    sizes = [size + (before + after) * (own == dim) for own, size in enumerate(x.shape)]
    made: torch.Tensor = x.new_full(sizes, number)
    made.narrow(dim, before, x.shape[dim]).copy_(x)
    return made


def lay_out(function: Function, tensors: Sequence[tuple[Shape, Strides]]) -> tuple[Shape, Strides]:
    """Return shape and strides of an arrangement's result, from those of its tensors; raises as torch does."""
    if function.op == "full" and (function.form or ())[1] is not None:
        shape, strides = (function.form or ())[:2]
        return shape, strides
    if function.op == "arange":
        return (function.form or ())[:1], (1,)
    if function.op == "put":
        (shape, _), _, (begins, _) = tensors
        dim = (function.form or ())[1]
        made = torch.empty(*shape[:dim], begins[0] - 1, *shape[dim + 1 :], device="meta")
        return tuple(made.shape), made.stride()
    given: list[Any] = [torch.empty_strided(*item, device="meta") for item in tensors]
    if function.op in {"pad", "full"}:
        given[function.op == "pad"] = 0
    if function.op == "take":
        given[1] = given[1].to(torch.int64)
    made = eager_arrangement(function, given)
    return tuple(made.shape), tuple(made.stride())
