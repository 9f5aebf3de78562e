"""Triton: a kernel per chain, printed to a file because Triton reads a function's source."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from benchmarks.chains import ALPHA, Chain, print_expression, text_ops
from benchmarks.peers.base import Absent, Peer, Unsupported, import_library

TRITON_OPS = text_ops("tl.sigmoid({0})", "libdevice.tanh({0})", str(ALPHA))

HEADER = """\
import triton
import triton.language as tl
from triton.language.extra import libdevice

@triton.jit
"""

FLAT_BLOCK = 1024
# A square tile when operands disagree on the fastest dimension, a wide one otherwise.
SQUARE_TILE = (64, 64)
WIDE_TILE = (4, 512)


class Triton(Peer):
    """Hand-written style kernels with fixed block sizes; broadcast vectors are loaded once per tile."""

    name = "triton"
    label = "Triton"
    devices = ("cuda",)

    @override
    def load(self) -> None:
        import_library("triton")
        if not torch.cuda.is_available():
            raise Absent("Triton needs a CUDA device")

    @override
    def build(self, chain: Chain, inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
        if chain.dtype.is_complex or not (chain.is_flat or chain.is_matrix):
            raise Unsupported("these kernels are written for real numbers, vectors and matrices")
        if chain.is_flat:
            return partial(run_flat, load_kernel(print_flat_kernel(chain)), inputs)
        tile = SQUARE_TILE if "t" in chain.layouts else WIDE_TILE
        return partial(run_tiled, load_kernel(print_tiled_kernel(chain)), inputs, tile)


def run_flat(kernel: Any, inputs: tuple[Tensor, ...]) -> Tensor:
    """Launch a flat kernel."""
    out = torch.empty_like(inputs[0])
    n = out.numel()
    kernel[(-(-n // FLAT_BLOCK),)](*inputs, out, n, BLOCK=FLAT_BLOCK)
    return out


def run_tiled(kernel: Any, inputs: tuple[Tensor, ...], tile: tuple[int, int]) -> Tensor:
    """Launch a kernel over tiles of a matrix."""
    out = torch.empty_like(inputs[0])
    rows, cols = out.shape
    strides = [stride for x in (*inputs, out) for stride in x.stride()]
    grid = (-(-cols // tile[1]), -(-rows // tile[0]))
    kernel[grid](*inputs, out, *strides, rows, cols, ROWS=tile[0], COLS=tile[1], num_warps=8)
    return out


def print_flat_kernel(chain: Chain) -> str:
    """Return a kernel for contiguous inputs of one shape."""
    pointers = ", ".join(f"{name}_ptr" for name in chain.names)
    loads = "\n".join(f"    {name} = tl.load({name}_ptr + i, mask=inside).to(tl.float32)" for name in chain.names)
    return f"""{HEADER}def kernel({pointers}, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
{loads}
    result = {print_expression(chain, TRITON_OPS)}
    tl.store(out_ptr + i, result.to(out_ptr.dtype.element_ty), mask=inside)
"""


def print_tiled_kernel(chain: Chain) -> str:
    """Return a kernel over a matrix, for matrices of any strides and for row and column vectors."""
    names = (*chain.names, "out")
    pointers = ", ".join(f"{name}_ptr" for name in names)
    strides = ", ".join(f"{name}_row, {name}_col" for name in names)
    loads = "\n".join(print_load(name, layout) for name, layout in zip(chain.names, chain.layouts, strict=True))
    return f"""{HEADER}def kernel({pointers}, {strides}, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(0) * COLS + tl.arange(0, COLS)
    inside = (r < rows)[:, None] & (c < cols)[None, :]
{loads}
    result = {print_expression(chain, TRITON_OPS)}
    at = out_ptr + r[:, None] * out_row + c[None, :] * out_col
    tl.store(at, result.to(out_ptr.dtype.element_ty), mask=inside)
"""


def print_load(name: str, layout: str) -> str:
    """Return the line that loads one operand's part of a tile."""
    if layout == "r":
        return f"    {name} = tl.load({name}_ptr + c * {name}_col, mask=c < cols)[None, :].to(tl.float32)"
    if layout == "c":
        return f"    {name} = tl.load({name}_ptr + r * {name}_row, mask=r < rows)[:, None].to(tl.float32)"
    at = f"{name}_ptr + r[:, None] * {name}_row + c[None, :] * {name}_col"
    return f"    {name} = tl.load({at}, mask=inside).to(tl.float32)"


def load_kernel(source: str) -> Any:
    """Return the function ``kernel`` of a module with this text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chain_kernel.py"
        path.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location("chain_kernel", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module.kernel
