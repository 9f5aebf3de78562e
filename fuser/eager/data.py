"""What an expression of a functor is worth: one data type for constants, tensors and nodes of a graph."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "PLACE",
    "WHOLE_FUNCTIONS",
    "Data",
    "NeedsValuesError",
    "Value",
    "add_node",
    "as_node",
    "constant",
    "emit",
    "is_number",
    "needs_values",
    "round_to",
    "storage_dtype",
    "takes_tensors",
]

aten = torch.ops.aten

# A Python number, a tensor, or a node of the graph that is being built.
Data: TypeAlias = Any

# Line and column (from 1) of the expression that is being translated: what emit() notes on the nodes it makes.
PLACE: ContextVar[tuple[int, int] | None] = ContextVar("PLACE", default=None)

# Whether the graph that is being built is to be differentiated: functions then stay whole, as ATen's where it has them.
WHOLE_FUNCTIONS: ContextVar[bool] = ContextVar("WHOLE_FUNCTIONS", default=False)

# Note [Unsigned integers]
# torch has next to no operations on uint16, uint32 and uint64. They are stored in int64: the two small ones as the
# number, a mask after each operation that can leave the range; uint64 as the int64 of the same bits. Python numbers
# (constants) are always the number itself.
_STORAGE = {torch.uint16: torch.int64, torch.uint32: torch.int64, torch.uint64: torch.int64}

# Source of a bit cast, by its result.
_SAME_SIZE = {torch.int32: torch.float32, torch.float32: torch.int32}
_SAME_SIZE |= {torch.int64: torch.float64, torch.float64: torch.int64}

# The overloads that take a Python number in place of their second tensor.
_TAKES_NUMBERS = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.div.Tensor_mode})


class NeedsValuesError(Exception):
    """It takes the values of a tensor to know what to compute, and there is a node of a graph. Says what and where."""


def needs_values(why: str) -> NeedsValuesError:
    """Return the exception for what is at the current place."""
    line, column = PLACE.get() or (0, 0)
    return NeedsValuesError(f"line {line}, column {column}: {why}")


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A value of a C++ arithmetic type."""

    # The C++ type, as a torch dtype.
    dtype: torch.dtype
    # A number of that type, or a tensor or node of `storage_dtype(dtype)`.
    data: Data

    @property
    def type(self) -> torch.dtype:
        """The C++ type, as all things have it."""
        return self.dtype

    @property
    def is_constant(self) -> bool:
        """Whether the value is known when the functor is translated."""
        return is_number(self.data)

    @property
    def stored(self) -> Data:
        """The data as operand of an ATen op: uint64 constants become the int64 of the same bits."""
        if self.dtype is torch.uint64 and self.is_constant:
            return round_to(self.data, torch.int64)
        return self.data


def is_number(data: Data) -> bool:
    """Whether the data is a Python number."""
    return isinstance(data, (bool, int, float, complex))


def storage_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the tensors that hold values of a C++ type."""
    return _STORAGE.get(dtype, dtype)


def constant(number: Any, dtype: torch.dtype) -> Value:
    """Return a constant: integers wrap around, float32 rounds; a float for an integer type must be whole."""
    return Value(dtype, round_to(number, dtype))


def round_to(number: Any, dtype: torch.dtype) -> Any:
    """Return the number as the dtype holds it: integers wrap around, floats are rounded."""
    if dtype is torch.bool:
        return bool(number)
    if dtype.is_complex:
        z = complex(number)
        part = dtype.to_real()
        return complex(_round_float(z.real, part), _round_float(z.imag, part))
    if dtype.is_floating_point:
        return _round_float(number, dtype)
    bits = 8 * dtype.itemsize
    wrapped = int(number) & ((1 << bits) - 1)
    return wrapped - (1 << bits) if dtype.is_signed and wrapped >> (bits - 1) else wrapped


def _round_float(number: float, dtype: torch.dtype) -> float:
    if dtype is torch.float64:
        return float(number)
    if isinstance(number, int) and abs(number) >> 53:
        # Rounded once: the last of the bits that stay says whether those shifted out were all zero.
        shift = abs(number).bit_length() - 50
        kept = abs(number) >> shift
        kept |= int(kept << shift != abs(number))
        number = (-1.0 if number < 0 else 1.0) * kept * 2.0**shift
    return ctypes.c_float(number).value


def emit(op: Any, *args: Data, dtype: torch.dtype, **kwargs: Any) -> Data:
    """Make one ATen call.

    Args:
        op: an overload.
        args: its arguments. Numbers in the place of tensors are constants of the type of the other operands.
        dtype: the dtype of the result (passed on where the overload itself takes one).
        kwargs: further arguments of the overload.

    Returns:
        A node where an argument is one, with its dtype and the current place in its meta; else a tensor where an
        argument is one; else a number.
    """
    if op is aten._to_copy.default:
        kwargs["dtype"] = dtype
    elif op is aten.view.dtype:
        args = (*args, dtype)
    known: fx.Node | torch.Tensor | None = None
    graph: fx.Graph | None = None
    for arg in args:
        if isinstance(arg, fx.Node):
            known, graph = arg, arg.graph
        elif isinstance(arg, torch.Tensor) and known is None:
            known = arg
    if known is None:
        return _fold(op, args, dtype, kwargs)
    if any(map(is_number, args)):
        of = dtype if op is aten.where.self else next(d for a in args if (d := _dtype_of(a)) is not None)
        keep = op in _TAKES_NUMBERS
        args = tuple(
            _tensor_of(arg, of, graph) if is_number(arg) and is_tensor and not (keep and index == 1) else arg
            for index, (arg, is_tensor) in enumerate(zip(args, takes_tensors(op), strict=False))
        )
    return op(*args, **kwargs) if graph is None else add_node(graph, op, args, dtype, kwargs)


def add_node(
    graph: fx.Graph, target: Any, args: Sequence[Any], dtype: torch.dtype, kwargs: dict[str, Any] | None = None
) -> fx.Node:
    """Append a call to a graph, with the dtype of its result and the current place in its meta."""
    node = graph.call_function(target, tuple(args), kwargs)
    node.meta["dtype"] = dtype
    if (place := PLACE.get()) is not None:
        node.meta["place"] = place
    return node


@cache
def takes_tensors(op: Any) -> tuple[bool, ...]:
    """Return for each argument of an overload whether it is a tensor."""
    return tuple(isinstance(argument.type, torch.TensorType) for argument in op._schema.arguments)


def _dtype_of(data: Data) -> torch.dtype | None:
    if isinstance(data, fx.Node):
        dtype: torch.dtype = data.meta["dtype"]
        return dtype
    return data.dtype if isinstance(data, torch.Tensor) else None


def as_node(graph: fx.Graph, value: Value) -> fx.Node:
    """Return a value's node; a constant gets one."""
    node: fx.Node = _tensor_of(value.stored, storage_dtype(value.dtype), graph) if value.is_constant else value.data
    return node


def _tensor_of(number: complex, dtype: torch.dtype, graph: fx.Graph | None) -> Data:
    if graph is None:
        return aten.scalar_tensor.default(number, dtype=dtype)
    return add_node(graph, aten.scalar_tensor.default, (number,), dtype, {"dtype": dtype})


def _fold(op: Any, args: tuple[Any, ...], dtype: torch.dtype, kwargs: dict[str, Any]) -> Any:
    # Tensors that have values, whatever mode (fake tensors, tracing) the caller is in.
    with _disable_current_modes():
        tensors = tuple(
            _tensor_of(arg, _operand_dtype(op, arg, dtype), None) if is_number(arg) and is_tensor else arg
            for arg, is_tensor in zip(args, takes_tensors(op), strict=False)
        )
        return round_to(op(*tensors, **kwargs).item(), dtype)


def _operand_dtype(op: Any, number: complex, result: torch.dtype) -> torch.dtype:
    if op is aten.view.dtype:
        return _SAME_SIZE[result]
    # Wide enough for the number, and of the result's precision where that rounds.
    narrow = result in (torch.float32, torch.complex64)
    if isinstance(number, bool):
        return torch.bool
    if isinstance(number, int):
        return torch.int64
    if isinstance(number, float):
        return torch.float32 if narrow else torch.float64
    return torch.complex64 if narrow else torch.complex128
