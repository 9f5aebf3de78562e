"""torch's own pointwise ops as functors: one table, which the FX passes read and the tests walk.

Each functor follows the ATen CUDA kernel of its op (``aten/src/ATen/native/cuda``), operation by operation, so that
its results have the same bits. The ways a program can name an op (``torch.add``, ``operator.add``, ``x.add``,
``aten.add.Tensor``, ``torch.nn.ReLU``) are bound to the table by ``bind_function``, ``bind_method``, ``bind_module``.
"""

from fuser.ops import activations, elementary, loss_terms, statistics  # noqa: F401 - they fill the table
from fuser.ops.arrangements import (
    arrange,
    eager_arrangement,
    lay_out,
    pick_function,
    put_function,
    read_function,
    sum_function,
)
from fuser.ops.binding import (
    bind_function,
    bind_method,
    bind_module,
    find_question,
    find_settled,
    has_global_hooks,
    has_hooks,
    is_known,
    needs_known,
)
from fuser.ops.binding_arrangements import is_bound_by_sizes
from fuser.ops.binding_creations import is_creation
from fuser.ops.calls import (
    DEVICE_TYPE,
    IS_IN_MEMORY,
    IS_NUMBER,
    KNOWN,
    Known,
    OpCall,
    bind_for,
    find_numerics,
    is_constant,
    known_of,
    note_answer,
)
from fuser.ops.composites import (
    COMPOSITES,
    bind_inputs,
    call_composite,
    check_dtypes,
    check_function,
    check_shapes,
    composite_function,
    composite_steps,
    expand,
    ordered_form,
)
from fuser.ops.elementary import is_first_power, of_lists
from fuser.ops.index import eager_index, index_function
from fuser.ops.reductions import REDUCTIONS, reduction_function
from fuser.ops.sizes import call_of_sizes, look_at_sizes
from fuser.ops.softmax import ONE_WALK, SHARED_WALK
from fuser.ops.table import OPS, WIDE_UNDER_AUTOCAST, cast_function, convert_function, dtype_kind
from fuser.ops.views import eager_view, view_function

__all__ = [
    "COMPOSITES",
    "DEVICE_TYPE",
    "IS_IN_MEMORY",
    "IS_NUMBER",
    "KNOWN",
    "ONE_WALK",
    "OPS",
    "REDUCTIONS",
    "SHARED_WALK",
    "WIDE_UNDER_AUTOCAST",
    "Known",
    "OpCall",
    "arrange",
    "bind_for",
    "bind_function",
    "bind_inputs",
    "bind_method",
    "bind_module",
    "call_composite",
    "call_of_sizes",
    "cast_function",
    "check_dtypes",
    "check_function",
    "check_shapes",
    "composite_function",
    "composite_steps",
    "convert_function",
    "dtype_kind",
    "eager_arrangement",
    "eager_index",
    "eager_view",
    "expand",
    "find_numerics",
    "find_question",
    "find_settled",
    "has_global_hooks",
    "has_hooks",
    "index_function",
    "is_bound_by_sizes",
    "is_constant",
    "is_creation",
    "is_first_power",
    "is_known",
    "known_of",
    "lay_out",
    "look_at_sizes",
    "needs_known",
    "note_answer",
    "of_lists",
    "ordered_form",
    "pick_function",
    "put_function",
    "read_function",
    "reduction_function",
    "sum_function",
    "view_function",
]
