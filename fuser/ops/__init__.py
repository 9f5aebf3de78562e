"""torch's own pointwise ops as functors: one table, which the FX passes read and the tests walk.

Each functor follows the ATen CUDA kernel of its op (``aten/src/ATen/native/cuda``), operation by operation, so that
its results have the same bits. The ways a program can name an op (``torch.add``, ``operator.add``, ``x.add``,
``aten.add.Tensor``, ``torch.nn.ReLU``) are bound to the table by ``bind_function``, ``bind_method``, ``bind_module``.
"""

from fuser.ops import activations, elementary  # noqa: F401 - they fill the table
from fuser.ops.binding import DEVICE_TYPE, IS_NUMBER, OpCall, bind_function, bind_method, bind_module, has_hooks
from fuser.ops.elementary import is_first_power
from fuser.ops.index import eager_index, index_function
from fuser.ops.reductions import REDUCTIONS, ReductionOp, reduction_function
from fuser.ops.table import OPS, WIDE_UNDER_AUTOCAST, Op, cast_function, convert_function, dtype_kind

__all__ = [
    "DEVICE_TYPE",
    "IS_NUMBER",
    "OPS",
    "REDUCTIONS",
    "WIDE_UNDER_AUTOCAST",
    "Op",
    "OpCall",
    "ReductionOp",
    "bind_function",
    "bind_method",
    "bind_module",
    "cast_function",
    "convert_function",
    "dtype_kind",
    "eager_index",
    "has_hooks",
    "index_function",
    "is_first_power",
    "reduction_function",
]
