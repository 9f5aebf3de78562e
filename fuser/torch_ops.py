"""The table of torch's own ops (``fuser.ops``) for what calls of functors need, too: read when an op is met."""

from typing import TYPE_CHECKING, Any

from fuser.late import loading

if TYPE_CHECKING:
    from fuser.ops import (
        ONE_WALK,
        OPS,
        REDUCTIONS,
        SHARED_WALK,
        WIDE_UNDER_AUTOCAST,
        arrange,
        bind_inputs,
        call_composite,
        call_of_sizes,
        cast_function,
        check_dtypes,
        check_function,
        check_shapes,
        composite_steps,
        dtype_kind,
        eager_arrangement,
        eager_index,
        eager_view,
        expand,
        index_function,
        lay_out,
        look_at_sizes,
        ordered_form,
        pick_function,
        read_function,
        reduction_function,
        sum_function,
    )

__all__ = [
    "ONE_WALK",
    "OPS",
    "REDUCTIONS",
    "SHARED_WALK",
    "WIDE_UNDER_AUTOCAST",
    "arrange",
    "bind_inputs",
    "call_composite",
    "call_of_sizes",
    "cast_function",
    "check_dtypes",
    "check_function",
    "check_shapes",
    "composite_steps",
    "dtype_kind",
    "eager_arrangement",
    "eager_index",
    "eager_view",
    "expand",
    "index_function",
    "lay_out",
    "look_at_sizes",
    "ordered_form",
    "pick_function",
    "read_function",
    "reduction_function",
    "sum_function",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with loading():
        from fuser import ops  # noqa: PLC0415

    value = globals()[name] = getattr(ops, name)
    return value
