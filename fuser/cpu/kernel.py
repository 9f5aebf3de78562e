"""A compiled CPU kernel: a shared object, called with one thread or torch's thread count."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from fuser import counters
from fuser.codegen import KERNEL_NAME, KernelSource

__all__ = ["CpuKernel"]

# Below this many elements a parallel region costs more than it saves.
PARALLEL_ELEMENTS = 16384


class CpuKernel:
    """Implements FusedKernel. Calls release the GIL."""

    def __init__(self, source: KernelSource, path: Path) -> None:
        self.source = source
        # Keeps the shared object loaded as long as the kernel lives.
        self._library = ctypes.CDLL(str(path))
        self._function = getattr(self._library, KERNEL_NAME)
        self._function.argtypes = (ctypes.c_char_p, ctypes.c_int)
        self._function.restype = None

    def launch(self, arguments: bytes, numel: int, device_index: int) -> None:  # noqa: ARG002 - one host
        """Run over ``numel`` > 0 elements; returns when the results are there."""
        self._function(arguments, 1 if numel < PARALLEL_ELEMENTS else torch.get_num_threads())
        counters.count("launches")
