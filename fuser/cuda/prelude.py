"""The CUDA dialect's prelude: what NVRTC does not declare by itself."""

from functools import cache

from fuser.prelude import PreludeBlock, emit_selected, load_blocks

__all__ = ["emit_prelude"]

_FILES = (
    "cuda.h", "core.h", "limits.h", "cuda_math.h", "storage.h", "cuda_storage.h", "cuda_access.h", "complex.h",
    "cuda_cluster.h", "cuda_rows.h", "cuda_orders.h", "cuda_scans.h",
)  # fmt: skip


@cache
def emit_prelude(names: frozenset[str], features: frozenset[str]) -> str:
    """Return the CUDA C++ text to put before the functors.

    Args:
        names: every identifier of the functor texts; only what they mention is declared.
        features: which storage types are used, out of "half", "bfloat16", "float8" and "complex".

    Sample, for `names` with "exp": `FUSER_PROMOTE_1(exp)`, and `using ::exp;` inside `namespace std`.
    """
    return emit_selected(_load_all(), names, features)


@cache
def _load_all() -> tuple[PreludeBlock, ...]:
    return tuple(block for file in _FILES for block in load_blocks(file))
