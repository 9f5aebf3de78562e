"""``out=`` as torch handles it: what may be written to, resizing, casting and overlap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._prims_common.wrappers import _maybe_resize_out

from fuser.errors import ArgumentError, DeviceError, ShapeError
from fuser.layout import Shape, Strides

__all__ = ["check_out", "finish_out"]


def check_out(
    planned: Sequence[tuple[Shape, Strides, torch.dtype]], out: Sequence[torch.Tensor], inputs: Sequence[Any]
) -> tuple[bool, bool]:
    """Check ``out=`` tensors against the planned outputs and the inputs.

    Returns:
        Whether a tensor was resized, and whether the kernel can write to all of them directly (else it writes to new
        tensors, which are then copied).

    Raises:
        ArgumentError: a wrong number of tensors. ShapeError, DeviceError: they cannot take the result.
    """
    if len(out) != len(planned):
        raise ArgumentError(f"out= has {len(out)} tensors for {len(planned)} outputs")
    resized, direct = False, True
    for tensor, (shape, _, dtype) in zip(out, planned, strict=True):
        if not torch.can_cast(dtype, tensor.dtype):
            raise ShapeError(f"result type {dtype} can't be cast to the desired output type {tensor.dtype}")
        if torch._debug_has_internal_overlap(tensor) == 1:
            raise ShapeError(
                "unsupported operation: more than one element of the written-to tensor refers to a single memory "
                "location. Please clone() the tensor before performing the operation."
            )
        if tuple(tensor.shape) != shape:
            _maybe_resize_out(tensor, shape)
            resized = True
        direct = direct and tensor.dtype == dtype
    tensors = [item for item in inputs if isinstance(item, torch.Tensor)]
    for index, tensor in enumerate(out):
        for other in (*tensors, *out[:index]):
            if tensor.device != other.device and other.dim():
                raise DeviceError(f"out= is on {tensor.device}, but an input is on {other.device}")
            direct = direct and not _overlaps(tensor, other)
    return resized, direct


def finish_out(out: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy results to ``out=`` tensors, resized and cast; return the ``out`` tensors."""
    check_out([(tuple(item.shape), item.stride(), item.dtype) for item in results], out, ())
    for tensor, result in zip(out, results, strict=True):
        tensor.copy_(result)
    return list(out)


def _overlaps(written: torch.Tensor, other: torch.Tensor) -> bool:
    # at::get_overlap_status. The same elements in the same order may be overwritten in place. A partial overlap is
    # torch's error; where torch cannot tell and goes on, the caller writes to a new tensor.
    if written is other or not written.numel() or not other.numel() or written.device != other.device:
        return False
    begin, end = _memory_range(written)
    other_begin, other_end = _memory_range(other)
    if end <= other_begin or other_end <= begin:
        return False
    same = begin == other_begin and end == other_end
    if same and written.stride() == other.stride() and written.shape == other.shape:
        return False
    if _is_dense(written) and _is_dense(other):
        raise ShapeError(
            "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single "
            "memory location. Please clone() the tensor before performing the operation."
        )
    return True


def _is_dense(tensor: torch.Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


def _memory_range(tensor: torch.Tensor) -> tuple[int, int]:
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()
