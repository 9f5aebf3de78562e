"""The op "index": the number of each element, as a value like any other.

Kernels compute it from where they are: it is an operand without memory (``kernel_source.Operand.is_counter``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from fuser.cxx.functor import parse_functor
from fuser.errors import UnsupportedError
from fuser.function import Function
from fuser.layout import broadcast_shapes

__all__ = ["eager_index", "index_function"]


@functools.cache
def index_function(count: int, dims: tuple[int, ...] | None = None) -> Function:
    """Return the function of ``count`` tensors that is each element's linear index (int64) in their broadcast shape.

    Args:
        count: how many tensors give the shape; of any dtype, and numbers too.
        dims: the index is counted along these dimensions only, row-major; negative ones count from the end. None: all.
    """
    parameters = ", ".join(f"T x{slot}" for slot in range(count))
    functor = parse_functor(f"template <typename T> int64_t aten_index({parameters}) {{ return 0; }}")
    unpromoted = tuple(parameter.name for parameter in functor.tensors)
    return Function(functor, op="index", unpromoted=unpromoted, out_dtypes=(torch.int64,), dims=dims)


def eager_index(function: Function, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the index in eager torch, as a tensor of the tensors' broadcast shape.

    Inside torch.func.vmap the shape is that of one element of the batch.

    Raises:
        UnsupportedError: a tensor has no shape (a nested one).
        DimError, ShapeError: the function's dimensions are none of the shape's.
    """
    if any(item.is_nested for item in tensors):
        raise UnsupportedError("the index of an element of a nested tensor")
    shape = broadcast_shapes([tuple(item.shape) for item in tensors])
    dims = function.index_dims(len(shape))
    counted = [size if dim in dims else 1 for dim, size in enumerate(shape)]
    device = next((item.device for item in tensors if item.dim()), tensors[0].device)
    return torch.arange(math.prod(counted), device=device).view(counted).expand(shape)
