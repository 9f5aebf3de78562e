"""Matrix products in the order of cuBLAS's kernels for odd rows, which read one element at a time: by whole vectors.

Which order a product has follows from its sizes in tables of cuBLAS: it is found by comparing (fuser.fx.odd_products).
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch

from fuser import counters
from fuser._version import __version__
from fuser.config import config
from fuser.cuda.nvrtc import LoadedKernel, NvrtcError, compile_text, identify_nvrtc, load_kernel
from fuser.disk_cache import CacheKey, load_or_make
from fuser.errors import CompilerFailedError, NoCompileError

__all__ = ["ALIGNMENT_BYTES", "ProductOrder", "can_multiply", "multiply"]

# Of what is read: a vector.
ALIGNMENT_BYTES = 16
# As in the kernel's text: its name, results of a block, its threads, and the bytes of its tiles.
NAME, ROWS, COLUMNS, THREADS, SHARED_BYTES = "fuser_kernel", 128, 256, 256, 3 * (128 + 256) * 64 * 2


@dataclass(frozen=True, slots=True)
class ProductOrder:
    """In which order the products that make an element of a matrix product are added up."""

    # How many neighbours one instruction adds up.
    depth: int
    # How many one of cuBLAS's tiles has: what is left over comes first, filled up with zeros.
    tile: int
    # In how many slices: each is added up from zero on, then the sum of those before is added, and it is rounded.
    slices: int

    def slice_size(self, length: int) -> int:
        """Return how many are in each slice but the last."""
        return length if self.slices == 1 else 8 * math.ceil(math.ceil(length / self.slices) / 8)

    def find_gap(self, length: int) -> tuple[int, int] | None:
        """Return where zeros fill up what is left over, and how many; None if no sums of ``length`` have this order."""
        size = self.slice_size(length)
        first = (self.slices - 1) * size
        if first >= length or (self.slices > 1 and size % self.tile % self.depth):
            return None
        left = (length - first) % self.tile
        return first + left, -left % self.depth


class _Arguments(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("left", "right", "out")),
        *((name, ctypes.c_longlong) for name in ("left_stride", "right_stride")),
        *((name, ctypes.c_int) for name in ("rows", "columns", "first", "last", "adds")),
        *((name, ctypes.c_int) for name in ("k_gap_at", "k_gap", "row_gap_at", "row_gap")),
    )


def can_multiply(device: torch.device) -> bool:
    """Return whether a GPU has the kernel's instructions and memory."""
    found: Any = torch.cuda.get_device_properties(device)
    return found.major >= 8 and found.shared_memory_per_block_optin >= SHARED_BYTES  # type: ignore[no-any-return]


def multiply(left: torch.Tensor, right: torch.Tensor, rows: int, gap_at: int, order: ProductOrder) -> torch.Tensor:
    """Return ``left @ right``, row-major, of tensors in 16 bits on one GPU whose dense rows are whole aligned vectors.

    Args:
        left: (rows, K), dense along either. It may have zeros between: more rows than there are results, or more
            columns than the other one has rows, from ``gap_at`` on.
        right: (K, N), dense along either, along N if there are such columns.
        rows: of the result.
        gap_at: where those zeros begin.
        order: how sums are added up.

    Raises:
        CompilerFailedError: NVRTC makes no kernel for this GPU.
        NoCompileError: it would have to be made and ``config.no_compile`` is set.
        RuntimeError: the driver refuses the launch.
    """
    from cuda.bindings import driver  # noqa: PLC0415 - importing fuser must not import CUDA

    device, length = left.device, left.shape[1]
    out = torch.empty((rows, right.shape[1]), dtype=left.dtype, device=device)
    size = order.slice_size(right.shape[0])
    kernel = _load(device.index, left.stride(1) == 1, right.stride(1) != 1, left.dtype is torch.float16, order.depth)
    grid = (-(-left.shape[0] // ROWS), -(-right.shape[1] // COLUMNS), 1)
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream().cuda_stream
        for slot in range(order.slices):
            given = _Arguments(
                left.data_ptr(),
                right.data_ptr(),
                out.data_ptr(),
                max(left.stride()),
                max(right.stride()),
                *out.shape,
                slot * size,
                length if slot == order.slices - 1 else (slot + 1) * size,
                slot > 0,
                *(gap_at, length - right.shape[0]),
                *(gap_at, left.shape[0] - rows),
            )
            parameters = (ctypes.c_void_p * 1)(ctypes.addressof(given))
            (status,) = driver.cuLaunchKernel(
                driver.CUfunction(kernel.address), *grid, THREADS, 1, 1, SHARED_BYTES, stream,
                ctypes.addressof(parameters), 0,
            )  # fmt: skip
            if status != driver.CUresult.CUDA_SUCCESS:
                raise RuntimeError(f"CUDA refused to launch a matrix product: {status!r}")
            counters.count_launch()
    return out


@functools.cache
def _load(device_index: int, left_rows: bool, right_rows: bool, is_half: bool, depth: int) -> LoadedKernel:
    from cuda.bindings import driver  # noqa: PLC0415 - as above

    major, minor = torch.cuda.get_device_capability(device_index)
    options = _options(f"sm_{major}{minor}", left_rows, right_rows, is_half, depth)
    key = CacheKey.build(("product", __version__, emit_text(), *options), identify_nvrtc())
    loaded = load_or_make(key, lambda: _compile(options), lambda cubin: load_kernel(cubin, NAME))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    status = driver.cuKernelSetAttribute(attribute, SHARED_BYTES, driver.CUkernel(loaded.address), device_index)[0]
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"CUDA gives a matrix product no {SHARED_BYTES} bytes of shared memory: {status!r}")
    return loaded


def _compile(options: tuple[str, ...]) -> bytes:
    if config.no_compile:
        raise NoCompileError("the kernel of a matrix product is not ready, and FUSER_NO_COMPILE forbids to compile it")
    counters.count("compiles")
    try:
        return compile_text(emit_text(), options)[0]
    except NvrtcError as error:
        raise CompilerFailedError(f"NVRTC made no kernel of a matrix product: {error}") from error


@functools.cache
def emit_text() -> str:
    """Return the kernel's text."""
    return files("fuser.prelude").joinpath("cuda_product.h").read_text(encoding="utf-8")


def _options(target: str, left_rows: bool, right_rows: bool, is_half: bool, depth: int) -> tuple[str, ...]:
    chosen = {"LEFT_ROWS": left_rows, "RIGHT_ROWS": right_rows, "IS_HALF": is_half, "DEPTH": depth}
    return (f"--gpu-architecture={target}", "--std=c++17", *(f"-D{name}={value:d}" for name, value in chosen.items()))
