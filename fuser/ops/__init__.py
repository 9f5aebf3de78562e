"""torch's own pointwise ops as functors: one table, which the FX passes read and the tests walk.

Each functor follows the ATen CUDA kernel of its op (``aten/src/ATen/native/cuda``), operation by operation, so that
its results have the same bits. The ways a program can name an op (``torch.add``, ``operator.add``, ``x.add``,
``aten.add.Tensor``, ``torch.nn.ReLU``) are bound to the table by ``bind_function``, ``bind_method``, ``bind_module``.

A group of functors alone does without the table, which is loaded when the first of these names is used (PEP 562).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fuser.ops._later import (
        COMPOSITES,
        DEVICE_TYPE,
        IS_IN_MEMORY,
        IS_NUMBER,
        KNOWN,
        ONE_WALK,
        OPS,
        REDUCTIONS,
        WIDE_UNDER_AUTOCAST,
        Composite,
        Known,
        Op,
        OpCall,
        ReductionOp,
        arrange,
        bind_for,
        bind_function,
        bind_inputs,
        bind_method,
        bind_module,
        call_composite,
        cast_function,
        check_dtypes,
        check_function,
        check_shapes,
        composite_function,
        composite_steps,
        convert_function,
        dtype_kind,
        eager_arrangement,
        eager_index,
        eager_view,
        expand,
        find_numerics,
        find_settled,
        has_hooks,
        index_function,
        is_constant,
        is_creation,
        is_first_power,
        is_known,
        known_of,
        lay_out,
        needs_known,
        ordered_form,
        put_function,
        read_function,
        reduction_function,
        seen_through,
        sum_function,
        view_function,
    )

__all__ = [
    "COMPOSITES",
    "DEVICE_TYPE",
    "IS_IN_MEMORY",
    "IS_NUMBER",
    "KNOWN",
    "ONE_WALK",
    "OPS",
    "REDUCTIONS",
    "WIDE_UNDER_AUTOCAST",
    "Composite",
    "Known",
    "Op",
    "OpCall",
    "ReductionOp",
    "arrange",
    "bind_for",
    "bind_function",
    "bind_inputs",
    "bind_method",
    "bind_module",
    "call_composite",
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
    "find_settled",
    "has_hooks",
    "index_function",
    "is_constant",
    "is_creation",
    "is_first_power",
    "is_known",
    "known_of",
    "lay_out",
    "needs_known",
    "ordered_form",
    "put_function",
    "read_function",
    "reduction_function",
    "seen_through",
    "sum_function",
    "view_function",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fuser.ops import _later  # noqa: PLC0415

    value = globals()[name] = getattr(_later, name)
    return value
