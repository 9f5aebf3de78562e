"""Dimensions of size 1 that torch's views put in or take out: values of a group like any other, which copy nothing."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from fuser.cxx.functor import parse_functor
from fuser.function import Function

__all__ = ["bind_item", "bind_reshape", "bind_squeeze", "bind_unsqueeze", "eager_view", "view_function"]


@functools.cache
def view_function(op: str, dims: tuple[int, ...]) -> Function:
    """Return the function of one tensor that changes its dimensions alone.

    Args:
        op: "unsqueeze" or "squeeze".
        dims: those of the result that are new, or those of the tensor that go, which have size 1.
    """
    functor = parse_functor("template <typename T> T aten_view(T x) { return x; }")
    return Function(functor, op=op, dims=dims)


def eager_view(function: Function, x: torch.Tensor) -> Any:
    """Return the view in eager torch."""
    if function.op == "squeeze":
        return torch.squeeze(x, function.dims or ())
    for slot, dim in enumerate(function.view_dims(x.dim())):
        x = x.unsqueeze(slot) if dim is None else x
    return x


def bind_unsqueeze(input: Any, dim: Any) -> Function | None:  # noqa: A002, ARG001 - torch's own parameter names
    """Return the function of ``torch.unsqueeze``; None where a dimension is no constant."""
    return view_function("unsqueeze", (dim,)) if type(dim) is int else None


def bind_squeeze(input: Any, dim: Any = None) -> Function | None:  # noqa: A002
    """Return the function of ``torch.squeeze``; None where it is not known that the dimensions have size 1."""
    value = getattr(input, "meta", {}).get("val")
    dims = (dim,) if type(dim) is int else dim
    if value is None or not isinstance(dims, list | tuple) or not all(type(item) is int for item in dims):
        return None
    is_one = all(-value.dim() <= item < value.dim() and _is_one(value.shape[item]) for item in dims)
    return view_function("squeeze", tuple(dims)) if is_one else None


def bind_item(input: Any, index: Any) -> Function | None:  # noqa: A002, ARG001
    """Return the function of ``x[:, None]`` and its like; None for an index that takes elements out."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(item is None or item is Ellipsis or item == slice(None) for item in parts) or None not in parts:
        return None
    front = parts.index(Ellipsis) if Ellipsis in parts else len(parts)
    if Ellipsis in parts[front + 1 :]:
        return None
    return view_function(
        "unsqueeze", tuple(dim if dim < front else dim - len(parts) for dim, item in enumerate(parts) if item is None)
    )


def bind_reshape(input: Any, *shape: Any) -> tuple[Function, ...]:  # noqa: A002
    """Return the functions that ``x.reshape(shape)`` comes to, in order; none where it does more than that."""
    value = getattr(input, "meta", {}).get("val")
    wanted = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], list | tuple) else shape
    if value is None or not all(type(size) is int for size in (*value.shape, *wanted)) or not value.is_contiguous():
        return ()
    own = tuple(value.shape)
    if wanted.count(-1) == 1:
        rest = math.prod(size for size in wanted if size != -1)
        wanted = tuple(math.prod(own) // max(rest, 1) if size == -1 else size for size in wanted)
    if own == wanted or [size for size in own if size != 1] != [size for size in wanted if size != 1]:
        return ()
    gone, new = (tuple(dim for dim, size in enumerate(sizes) if size == 1) for sizes in (own, wanted))
    functions = tuple(view_function(op, dims) for op, dims in (("squeeze", gone), ("unsqueeze", new)) if dims)
    # The strides of dimensions of size 1 go on to what is computed of them, and torch's are others where the tensor's
    # own are odd, as those of a permuted one.
    bare = torch.empty_strided(own, value.stride(), device="meta")
    made = functools.reduce(lambda x, function: eager_view(function, x), functions, bare)
    return functions if made.stride() == bare.view(wanted).stride() else ()


def _is_one(size: Any) -> bool:
    # A size that is a symbol is another one.
    return type(size) is int and size == 1
