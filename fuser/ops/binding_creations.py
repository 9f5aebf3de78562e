"""Which calls of ATen's make tensors of numbers: of one, or counted, or put where others were."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser.ops.arrangements import arange_function, full_function, full_like_function
from fuser.ops.calls import OpCall, are_ints, asking, is_constant, known_of, static_value
from fuser.ops.index import index_function
from fuser.ops.table import OPS, holds_number

__all__ = ["bind_fill", "creation_functions", "is_creation"]

_ATEN = torch.ops.aten


def creation_functions() -> dict[Any, Callable[..., OpCall | None]]:
    """Return the binder of each overload."""
    return {
        _ATEN.full.default: _bind_full,
        **{getattr(_ATEN, name).default: _bind_filled(value) for name, value in (("zeros", 0), ("ones", 1))},
        **{
            getattr(_ATEN, f"new_{name}").default: _bind_new(value)
            for name, value in (("full", None), ("zeros", 0), ("ones", 1))
        },
        **dict.fromkeys((_ATEN.fill.Scalar, _ATEN.fill.Tensor), bind_fill),
        _ATEN.zero.default: _bind_zero,
        _ATEN.index_put.default: _bind_index_put,
        _ATEN.scalar_tensor.default: _bind_scalar_tensor,
        **{getattr(_ATEN.arange, name): _bind_arange for name in ("default", "start", "start_step")},
        torch.ops.prims.iota.default: _bind_iota,
        **{getattr(_ATEN, name).default: _bind_triangle(name) for name in ("tril", "triu")},
        **{
            getattr(_ATEN, f"{name}_like").default: _bind_like(value)
            for name, value in (("full", None), ("zeros", 0), ("ones", 1))
        },
    }


def is_creation(call: OpCall | None) -> bool:
    """Whether a call makes a tensor of nothing but numbers."""
    return call is not None and call.function.op in {"full", "arange"}


def _full(shape: Sequence[Any], strides: Sequence[int], number: Any, dtype: Any) -> OpCall | None:
    # Which device it is on is for whoever takes it into a group to say: a tensor of that device comes second.
    dtype = dtype or {bool: torch.bool, int: torch.int64}.get(type(number), torch.get_default_dtype())
    if not is_constant(number) or not holds_number(dtype, number):
        return None
    return OpCall(full_function(tuple(shape), tuple(strides), dtype), (number,))


def _bind_full(
    size: Any,
    fill_value: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,  # noqa: ARG001
    pin_memory: Any = None,
) -> OpCall | None:
    if not isinstance(size, list | tuple) or not are_ints(size) or layout not in (None, torch.strided) or pin_memory:
        return None
    made = torch.empty(tuple(size), device="meta")
    return _full(made.shape, made.stride(), fill_value, dtype)


def _bind_filled(number: int) -> Callable[..., OpCall | None]:
    def bind(
        size: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
    ) -> OpCall | None:
        dtype = dtype or torch.get_default_dtype()
        return _bind_full(size, number, dtype=dtype, layout=layout, device=device, pin_memory=pin_memory)

    return bind


def _bind_scalar_tensor(
    s: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> OpCall | None:
    return _bind_full(
        (), s, dtype=dtype or torch.get_default_dtype(), layout=layout, pin_memory=pin_memory, device=device
    )


def _bind_like(number: int | None) -> Callable[..., OpCall | None]:
    def bind(
        input: Any,  # noqa: A002
        fill_value: Any = number,
        *,
        dtype: Any = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: Any = None,
        memory_format: Any = None,
    ) -> OpCall | None:
        value = static_value(input)
        if value is None or layout not in (None, torch.strided) or pin_memory or device not in (None, value.device):
            return None
        dtype = dtype or value.dtype
        if not is_constant(fill_value) or not holds_number(dtype, fill_value):
            return None
        kind = str(memory_format or torch.preserve_format).removeprefix("torch.")
        return OpCall(full_like_function(dtype, kind, value.dim()), (fill_value, input))

    return bind


def _bind_new(number: int | None) -> Callable[..., OpCall | None]:
    def bind(
        self: Any,
        size: Any,
        fill_value: Any = number,
        *,
        dtype: Any = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: Any = None,
    ) -> OpCall | None:
        value = static_value(self)
        if value is None or device not in (None, value.device):
            return None
        call = _bind_full(size, fill_value, dtype=dtype or value.dtype, layout=layout, pin_memory=pin_memory)
        # Of another tensor it may have another dtype.
        return call and OpCall(call.function, (*call.tensors, self))

    return bind


@asking
def bind_fill(input: Any, value: Any) -> OpCall | None:  # noqa: A002
    """Bind ``fill``."""
    known = known_of(input)
    if known is None:
        return None
    is_held = holds_number(known.dtype, value) if is_constant(value) else _is_one_element(value, known.dtype)
    return OpCall(OPS["fill"].function, (input, value)) if is_held else None


@asking
def _bind_zero(self: Any) -> OpCall | None:
    known = known_of(self)
    return None if known is None else bind_fill(self, False if known.dtype is torch.bool else 0)


def _bind_index_put(input: Any, indices: Any, values: Any, accumulate: Any = False) -> OpCall | None:  # noqa: A002
    # One number at the places of a mask, as ``x[mask] = 0`` writes it.
    mask = indices[0] if isinstance(indices, list | tuple) and len(indices) == 1 else None
    value, places = static_value(input), static_value(mask)
    if value is None or places is None or accumulate is not False:
        return None
    if places.dtype is not torch.bool or places.shape != value.shape or not _is_one_element(values, value.dtype):
        return None
    return OpCall(OPS["masked_put"].function, (input, mask, values))


def _is_one_element(x: Any, dtype: torch.dtype) -> bool:
    # Of another dtype torch asks for the number, and whether its own can hold it.
    known = known_of(x)
    return known is not None and known.rank == 0 and known.dtype is dtype


def _bind_arange(
    start: Any,
    end: Any = None,
    step: Any = 1,
    *,
    dtype: Any = None,
    layout: Any = None,  # noqa: ARG001
    device: Any = None,  # noqa: ARG001
    pin_memory: Any = None,
) -> OpCall | None:
    start, end = (0, start) if end is None else (start, end)
    is_known = are_ints(start, end, step) and start >= 0 and step > 0 and end >= start and not pin_memory
    if not is_known or dtype not in (None, torch.int64, torch.int32):
        return None
    return OpCall(arange_function(len(range(start, end, step)), start, step, dtype or torch.int64), ())


def _bind_iota(
    length: Any,
    *,
    start: Any,
    step: Any,
    dtype: Any,
    device: Any,  # noqa: ARG001
    requires_grad: Any,  # noqa: ARG001
) -> OpCall | None:
    if not are_ints(length, start, step):
        return None
    return _bind_arange(start, start + length * step, step, dtype=dtype)


def _bind_triangle(name: str) -> Callable[..., OpCall | None]:
    def bind(input: Any, diagonal: Any = 0) -> OpCall | None:  # noqa: A002
        if not are_ints(diagonal):
            return None
        row, column = (OpCall(index_function(1, (dim,)), (input,)) for dim in (-2, -1))
        return OpCall(OPS[name].function, (input, row, column), {"diagonal": diagonal})

    return bind
