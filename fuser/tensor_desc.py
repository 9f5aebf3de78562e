"""The one description of an argument: all that planning, typing and differentiating a call may depend on.

Never its values: a number's type counts, and whether a double holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fuser.access import VECTOR_BYTES
from fuser.dtypes import MAX_EXACT_INTEGER, Rank, number_dtype, number_kind
from fuser.errors import ArgumentError, DeviceError, describe_type
from fuser.graph import FusionGroup
from fuser.kernel_spec import InputSpec, ValueLayout, infer_typing
from fuser.layout import Shape, Strides

__all__ = [
    "TensorDesc",
    "check_count",
    "check_inputs",
    "common_device",
    "default_dtype_of",
    "describe",
    "input_specs",
    "lies_for_vectors",
    "name_input",
    "read_device",
    "read_number",
    "value_layouts",
]

# Python's types of numbers, each with what stands for it where sizes are symbols.
_NUMBERS = (
    (bool, (bool, torch.SymBool)),
    (int, (int, torch.SymInt)),
    (float, (float, torch.SymFloat)),
    (complex, complex),
)


class TensorDesc(NamedTuple):
    """Description of one argument of a call, or of a value of a group as it would lie in memory."""

    # Python type for a number, torch.Tensor for a tensor.
    kind: type
    dtype: torch.dtype | None = None
    shape: Shape = ()
    # In elements.
    strides: Strides = ()
    # None for a number.
    device: torch.device | None = None
    # Whether vectors of VECTOR_BYTES can be read at its address.
    is_aligned: bool = True
    # Whether a double holds the number: not so of some large integers.
    fits_double: bool = True
    # Of what is seen of a larger tensor, the element of that at which it begins.
    offset: int = 0


def describe(item: Any, meta_device: torch.device | None = None, *, reads_address: bool = False) -> TensorDesc:
    """Describe a tensor or a number.

    Args:
        item: a tensor (real, fake, meta, or wrapped by a transform) or a Python number, which may be symbolic.
        meta_device: where a meta tensor counts as living; None: on meta.
        reads_address: whether the tensor is sure to have memory, whose alignment then counts.

    Raises:
        ArgumentError: it is neither.
    """
    if isinstance(item, torch.Tensor):
        device = meta_device if meta_device is not None and item.is_meta else item.device
        is_aligned = not reads_address or lies_for_vectors(device, item.data_ptr())
        return TensorDesc(torch.Tensor, item.dtype, tuple(item.shape), tuple(item.stride()), device, is_aligned)
    for kind, stands_for in _NUMBERS:
        if isinstance(item, stands_for):
            is_large = isinstance(item, int) and not -MAX_EXACT_INTEGER <= item <= MAX_EXACT_INTEGER
            return TensorDesc(kind, fits_double=not is_large)
    raise ArgumentError(f"expected a tensor or a Python number, got {describe_type(item)}")


def lies_for_vectors(device: torch.device, address: int) -> bool:
    """Return whether a device's kernels can read vectors of VECTOR_BYTES at an address; those of the CPU can at any."""
    return device.type != "cuda" or address % VECTOR_BYTES == 0


def read_number(item: torch.Tensor) -> bool | int | float | complex:
    """Return the value of a 0-dim tensor; of a DTensor that of all its parts."""
    whole = item.full_tensor() if hasattr(item, "full_tensor") else item
    number: bool | int | float | complex = whole.item()
    return number


def read_device(device: Any, where: str = "") -> torch.device:
    """Return the device that a user names.

    Raises:
        ArgumentError: there is no such device, or fuser has no kernels for it; says ``where``.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in {"cpu", "cuda"}:
        raise ArgumentError(f'{where}device must be "cpu" or "cuda", got {device!r}')
    return found


def check_count(group: FusionGroup, inputs: Sequence[Any]) -> None:
    """Raise ArgumentError for too few or too many inputs."""
    if len(inputs) != len(group.inputs):
        raise ArgumentError(f"{names_of(group)}: takes {len(group.inputs)} inputs, got {len(inputs)}")


def check_inputs(group: FusionGroup, inputs: Sequence[Any]) -> None:
    """Raise ArgumentError, with the functor and its parameter, for an input that is neither a tensor nor a number."""
    kinds = (torch.Tensor, bool, int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool)
    for index, item in enumerate(inputs):
        if not isinstance(item, kinds):
            message = f"{name_input(group, index)} must be a tensor or a Python number, got {describe_type(item)}"
            is_many = hasattr(item, "__len__") and not isinstance(item, str)
            raise ArgumentError(f"{message}; torch.as_tensor makes a tensor of it" if is_many else message)


def name_input(group: FusionGroup, index: int) -> str:
    """Return the functor that takes an input of a group first, and what it calls it: ``axpy: alpha``."""
    # A group in canonical form has no names of the caller's; the functors' parameters have.
    for item in sorted(group.applications, key=lambda item: item.function.is_index):
        functor = item.function.functor
        bound = [
            *zip(item.tensors, functor.tensors, strict=False),
            *zip(item.scalars, item.function.scalars, strict=True),
        ]
        for value, parameter in bound:
            if value == index:
                return f"{item.function.name}: {parameter.name or 'a parameter without a name'}"
    return f"{names_of(group)}: input {index}"


def common_device(group: FusionGroup, inputs: Sequence[TensorDesc]) -> torch.device:
    """Return the device of a call; 0-dim CPU tensors go along with any.

    Raises:
        DeviceError: tensors on two devices. ArgumentError: no tensor at all.
    """
    devices = [item.device for item in inputs if item.device is not None]
    if not devices:
        raise ArgumentError(f"{names_of(group)}: needs at least one tensor")
    found = {item.device for item in inputs if item.device is not None and (item.shape or item.device.type != "cpu")}
    if len(found) > 1:
        first, second = sorted(map(str, found))[:2]
        raise DeviceError(
            f"{names_of(group)}: expected all tensors to be on the same device, but found at least two devices, "
            f"{first} and {second}!"
        )
    return found.pop() if found else devices[0]


def input_specs(inputs: Sequence[TensorDesc], device: torch.device) -> list[InputSpec]:
    """Return dtype and rank of each input; the strides' class is filled in per kernel."""
    specs = []
    default = torch.get_default_dtype()
    for item in inputs:
        if item.dtype is None:
            specs.append(InputSpec(number_dtype(item.kind, default), Rank.NUMBER, item.kind))
        else:
            rank = Rank.TENSOR if item.shape else Rank.ZERO_DIM
            by_value = item.device is not None and item.device.type == "cpu" and device.type != "cpu"
            number = number_kind(item.dtype) if by_value else None
            specs.append(InputSpec(item.dtype, rank, number, ndim=len(item.shape)))
    return specs


def value_layouts(inputs: Sequence[TensorDesc]) -> list[ValueLayout]:
    """Return shape, strides and dtype of each input."""
    return [ValueLayout(item.shape, item.strides, item.dtype is None, item.dtype) for item in inputs]


def default_dtype_of(group: FusionGroup, specs: Sequence[InputSpec]) -> torch.dtype | None:
    """Return torch.get_default_dtype() where another one would change a dtype of the group, for these inputs."""
    # Numbers have a default dtype, too: it counts where no tensor overrules it.
    first, second = (
        infer_typing(group, [_with_default(item, dtype) for item in specs], dtype)
        for dtype in (torch.float32, torch.float64)
    )
    count = len(specs)
    follows = first.common != second.common or first.values[count:] != second.values[count:]
    return torch.get_default_dtype() if follows else None


def names_of(group: FusionGroup) -> str:
    """Return what a group is called in messages."""
    return ", ".join(dict.fromkeys(group.names()))


def _with_default(item: InputSpec, default: torch.dtype) -> InputSpec:
    return item._replace(dtype=number_dtype(item.number, default)) if item.rank is Rank.NUMBER and item.number else item
