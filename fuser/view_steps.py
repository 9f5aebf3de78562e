"""What is seen of a tensor through views of it, and where its elements lie."""

from __future__ import annotations

from typing import Any

import torch

from fuser import torch_ops as ops
from fuser.access import VECTOR_BYTES
from fuser.errors import UnsupportedError
from fuser.layout import Shape, Strides
from fuser.process import is_of_signal_handler
from fuser.tensor_desc import TensorDesc

__all__ = ["Steps", "follow", "has_view", "seen"]

# Steps of a view, from a value to what is read of it: torch's, and "move", by which a part becomes the whole.
Steps = tuple[tuple[str, tuple[Any, ...]], ...]
# A tensor without memory that is large enough for anything, and where others begin in it.
_MEMORY = torch.empty(1 << 62, dtype=torch.int8, device="meta")
_ORIGIN = 1 << 58


def seen(desc: TensorDesc, steps: Steps) -> TensorDesc:
    """Return what is seen of a tensor through views of it.

    Raises:
        UnsupportedError: there is no such view.
    """
    if not steps:
        return desc
    shape, strides, offset = follow(desc.shape, desc.strides, steps)
    assert desc.dtype is not None, "it is a tensor"
    is_aligned = desc.is_aligned and offset * desc.dtype.itemsize % VECTOR_BYTES == 0
    return desc._replace(shape=shape, strides=strides, offset=desc.offset + offset, is_aligned=is_aligned)


def has_view(shape: Shape, strides: Strides, steps: Steps) -> bool:
    """Return whether a tensor can be seen so."""
    try:
        follow(shape, strides, steps)
    except UnsupportedError:
        return False
    return True


def follow(shape: Shape, strides: Strides, steps: Steps) -> tuple[Shape, Strides, int]:
    """Return shape, strides and first element of what is seen of a tensor that begins at element 0."""
    while steps and steps[0][0] == "expand.default" and (widened := _expand(shape, strides, *steps[0][1])) is not None:
        (shape, strides), steps = widened, steps[1:]
    if not steps:
        return shape, strides, 0
    looked = _MEMORY.as_strided(shape, strides, _ORIGIN)
    try:
        for step in steps:
            if step[0] == "move":
                dim, start, size = step[1]
                sizes = [size if own == dim else other for own, other in enumerate(looked.shape)]
                begin = looked.storage_offset() - start * looked.stride(dim)
                looked = _MEMORY.as_strided(sizes, looked.stride(), begin)
            else:
                looked = ops.arrange(step, looked)
    except RuntimeError as error:
        if is_of_signal_handler(error):
            raise
        raise UnsupportedError(str(error).splitlines()[0]) from error
    if looked.untyped_storage()._cdata != _MEMORY.untyped_storage()._cdata:
        raise UnsupportedError("a view that needs a copy")
    return tuple(looked.shape), tuple(looked.stride()), int(looked.storage_offset()) - _ORIGIN


def _expand(shape: Shape, strides: Strides, to: Shape) -> tuple[Shape, Strides] | None:
    # As torch expands a tensor (inferExpandGeometry), of sizes that may be symbols; None: torch has to say.
    lead = len(to) - len(shape)
    if lead < 0 or any(size < 0 for size in to):
        return None
    if not shape:
        return to, (0,) * len(to)
    made: list[Any] = []
    for dim in reversed(range(len(to))):
        stride = strides[dim - lead] if dim >= lead else to[dim + 1] * made[-1] if made else 1
        if to[dim] != (shape[dim - lead] if dim >= lead else 1):
            if dim >= lead and shape[dim - lead] != 1:
                return None
            stride = 0
        made.append(stride)
    return to, tuple(reversed(made))
