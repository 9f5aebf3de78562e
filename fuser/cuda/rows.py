"""The loops of a kernel with reductions in CUDA."""

from __future__ import annotations

from fuser.codegen import RowLoop
from fuser.errors import UnsupportedError

__all__ = ["emit_rows"]


def emit_rows(loop: RowLoop) -> str:
    """Write the ``__global__`` function."""
    raise UnsupportedError("a reduction")
