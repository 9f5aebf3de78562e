"""The loops of a kernel with reductions in CUDA: the ``__global__`` function around what fuser.row_pass has."""

from __future__ import annotations

from fuser.access import Tuning
from fuser.cuda.rows_across import AcrossText
from fuser.cuda.rows_along import AlongText
from fuser.cuda.rows_chained import ChainedText
from fuser.cuda.rows_columns import ColumnsText
from fuser.cuda.rows_ordered import OrderedAlongText
from fuser.cuda.rows_ordered_across import OrderedAcrossText
from fuser.cuda.rows_scanned import ScannedAcrossText, ScannedAlongText
from fuser.kernel_source import RowLoop

__all__ = ["emit_rows"]


def emit_rows(loop: RowLoop) -> str:
    """Write the ``__global__`` function and what it calls."""
    writer: AlongText | AcrossText | ScannedAlongText
    if loop.rows.scans:
        writer = ScannedAcrossText(loop) if loop.rows.is_across else ScannedAlongText(loop)
    else:
        along, across = (AlongText, AcrossText) if loop.rows.order is None else (OrderedAlongText, OrderedAcrossText)
        if loop.rows.order is not None and loop.rows.order.spreads and loop.tuning.piece:
            along = ChainedText
        writer = ColumnsText(loop) if loop.rows.pieces else across(loop) if loop.rows.is_across else along(loop)
    kernel = _abreast(writer.kernel(), loop.tuning)
    return "\n".join(["", *writer.passes(), *writer.find(), *writer.tables(), "", *kernel, ""])


def _abreast(kernel: list[str], tuning: Tuning) -> list[str]:
    # A kernel that goes along with another one (fuser.abreast).
    if tuning.leads:
        first = next(slot for slot, line in enumerate(kernel) if line.endswith("fuser_args a) {"))
        kernel = [*kernel[: first + 1], "  fuser_admit_next();", *kernel[first + 1 :]]
    if tuning.follows:
        assert not any("return;" in line for line in kernel), "a block that ends before would not wait"
        *kernel, end = kernel
        kernel = [*kernel, "  fuser_await_former();", end]
    return kernel
