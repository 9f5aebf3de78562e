"""The thread-safe spec cache, and in each spec a thread-safe store of its kernels.

Locks are held to look up and to publish, never while compiling. The first thread that asks for a kernel compiles it;
threads that ask for the same one wait for that thread, threads that ask for another one do not.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

from fuser import counters
from fuser.errors import CompileError
from fuser.fused_kernel import FusedKernel
from fuser.graph import FusionGroup
from fuser.kernel_spec import KernelSpec, build_kernel_spec

__all__ = ["KernelStore", "Lru", "SpecCache", "compiled_kernel_count"]

V = TypeVar("V")

_count_lock = threading.Lock()
_kernel_count = 0


def compiled_kernel_count() -> int:
    """Return how many kernels were compiled, or loaded from disk, in this process."""
    return _kernel_count


class KernelStore:
    """Kernels of one spec by what their text depends on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kernels: dict[Hashable, Future[FusedKernel]] = {}

    def get_or_compile(self, key: Hashable, compile_kernel: Callable[[], FusedKernel]) -> FusedKernel:
        """Return the kernel of ``key``, compiling it in this thread if no thread has yet.

        Raises:
            CompileError: the text does not compile. It is remembered and raised again for the same key.
            Exception: whatever else ``compile_kernel`` raised; the next call tries again.
        """
        with self._lock:
            future = self._kernels.get(key)
            is_first = future is None
            if future is None:
                future = self._kernels[key] = Future()
        if is_first:
            self._compile(key, future, compile_kernel)
        elif future.done():
            counters.count("cache_hits")
        error = future.exception()
        if error is not None:
            # Each caller gets an error of its own: one that is kept would keep the frames of all who raised it.
            raise copy.copy(error) if isinstance(error, CompileError) else error
        return future.result()

    def _compile(self, key: Hashable, future: Future[FusedKernel], compile_kernel: Callable[[], FusedKernel]) -> None:
        global _kernel_count  # noqa: PLW0603 - one counter per process
        try:
            kernel = compile_kernel()
        except BaseException as error:
            if not isinstance(error, CompileError):
                with self._lock:
                    del self._kernels[key]
            future.set_exception(error.with_traceback(None))
        else:
            with _count_lock:
                _kernel_count += 1
            future.set_result(kernel)


class Lru(Generic[V]):
    """A bounded mapping: adding beyond the bound drops the entry that was unused the longest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, V] = OrderedDict()

    def get(self, key: Hashable) -> V | None:
        """Return the entry, or None."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
            return entry

    def put(self, key: Hashable, entry: V, bound: int) -> None:
        """Add an entry, and drop old ones beyond ``bound``."""
        with self._lock:
            self._entries[key] = entry
            while len(self._entries) > bound:
                self._entries.popitem(last=False)

    def __len__(self) -> int:
        return len(self._entries)


class SpecCache:
    """Registered specs by group key. A spec is built outside the lock and published whole."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._specs: dict[int, tuple[KernelSpec, KernelStore]] = {}

    def get_or_register(self, group: FusionGroup) -> KernelSpec:
        """Return the spec of a group, building it the first time; raises what build_kernel_spec raises."""
        spec = build_kernel_spec(group)
        with self._lock:
            return self._specs.setdefault(spec.key, (spec, KernelStore()))[0]

    def store(self, spec: KernelSpec) -> KernelStore:
        """Return the kernels of a registered spec."""
        return self._specs[spec.key][1]
