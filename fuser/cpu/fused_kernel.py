"""A compiled CPU kernel: a shared object, called with one thread or torch's thread count."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

from fuser import counters
from fuser.codegen import KERNEL_NAME, KernelSource
from fuser.geometry import Launch
from fuser.layout import IterationSpace
from fuser.process import openmp_threads

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
        self.address = ctypes.cast(self._function, ctypes.c_void_p).value or 0

    def prepare(self, space: IterationSpace) -> Launch:
        """Decide whether torch's threads share the work."""
        return Launch(is_parallel=space.numel >= PARALLEL_ELEMENTS)

    def bind(self, launch: Launch, device_index: int) -> Callable[[bytes], None]:  # noqa: ARG002 - one host
        """Return a function that runs the kernel; it returns when the results are there."""
        function = self._function

        def run(arguments: bytes) -> None:
            function(arguments, openmp_threads() if launch.is_parallel else 1)
            counters.count("launches")

        return run
