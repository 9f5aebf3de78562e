"""A compiled CPU kernel: a shared object, called with one thread or torch's thread count."""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable

from fuser import counters
from fuser.disk_cache import CacheKey, scratch_folder
from fuser.geometry import Flat, Launch
from fuser.kernel_source import KERNEL_NAME, KernelSource
from fuser.layout import IterationSpace
from fuser.process import ignoring, is_of_signal_handler, openmp_threads

__all__ = ["CpuKernel"]

# Below this many elements a parallel region costs more than it saves.
PARALLEL_ELEMENTS = 16384

_loaded = itertools.count(1)


class CpuKernel:
    """Implements FusedKernel. Calls release the GIL."""

    def __init__(self, source: KernelSource, key: CacheKey, image: bytes) -> None:
        self.source = source
        self.key = key
        # Keeps the shared object loaded as long as the kernel lives.
        self._library = _load(image, f"fuser {', '.join(functor.entry for functor in source.functors)}")
        self._function = getattr(self._library, KERNEL_NAME)
        self._function.argtypes = (ctypes.c_char_p, ctypes.c_int)
        self._function.restype = None
        self.address = ctypes.cast(self._function, ctypes.c_void_p).value or 0

    def prepare(self, space: IterationSpace) -> Launch:
        """Decide whether torch's threads share the work."""
        return Launch(is_parallel=space.numel >= PARALLEL_ELEMENTS)

    def prepare_any(self) -> Flat:
        """Return how the launch depends on the number of elements."""
        return Flat(parallel_from=PARALLEL_ELEMENTS)

    def bind(self, launch: Launch, device_index: int) -> Callable[[bytes], None]:  # noqa: ARG002 - one host
        """Return a function that runs the kernel; it returns when the results are there."""
        function = self._function

        def run(arguments: bytes) -> None:
            function(arguments, openmp_threads() if launch.is_parallel else 1)
            counters.count_launch()

        return run


def _load(image: bytes, name: str) -> ctypes.CDLL:
    """Load a shared object from bytes, which nobody can change between a check and this.

    Raises:
        OSError: it cannot be loaded here, or is no kernel.
    """
    if hasattr(os, "memfd_create"):
        # Not everywhere: /proc may be missing, or a policy against it in force.
        with ignoring(OSError):
            return _load_from_memory(image, name)
    with scratch_folder() as folder:
        path = folder / "kernel.so"
        path.write_bytes(image)
        return _open(str(path))


def _open(path: str) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(path)
        getattr(library, KERNEL_NAME)
    except (OSError, AttributeError) as error:
        if is_of_signal_handler(error):
            raise
        # What the loader says, which may be of another library, without a path that no other attempt has: a reason is
        # said once.
        raise OSError(str(error).removeprefix(f"{path}: ").replace(path, "it")) from None
    return library


def _load_from_memory(image: bytes, name: str) -> ctypes.CDLL:
    # Profilers and /proc/self/maps show the name, of which Linux takes 249 bytes.
    with os.fdopen(os.memfd_create(name.encode("ascii", "replace")[:200].decode()), "wb") as file:
        file.write(image)
        file.flush()
        # The loader takes a path that it has seen for the library it found there, and descriptors are used again: each
        # library gets a spelling of its own, made from its number.
        spelling = format(next(_loaded), "b").replace("0", "/").replace("1", "./")
        return _open(f"/proc/self/fd/{spelling}{file.fileno()}")
