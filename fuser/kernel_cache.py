"""The thread-safe spec cache, and in each spec a thread-safe store of its kernels.

The first thread that asks for a kernel compiles it. Threads that ask for the same one wait for that thread, threads
that ask for another one do not. Only a kernel, and what a compiler says of the text, is remembered.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from fuser import counters
from fuser.errors import CompileError, CompilerFailedError, FuserError, NoCompileError, UnsupportedError
from fuser.fused_kernel import FusedKernel
from fuser.graph import FusionGroup
from fuser.kernel_spec import KernelSpec, build_kernel_spec
from fuser.process import Lock

__all__ = ["KernelStore", "Lru", "SpecCache", "compiled_kernel_count"]

V = TypeVar("V")

_count_lock = Lock()
_kernel_count = 0


def compiled_kernel_count() -> int:
    """Return how many kernels were compiled, or loaded from disk, in this process."""
    return _kernel_count


class KernelStore:
    """Kernels of one spec by what their text depends on."""

    def __init__(self) -> None:
        self._slots: dict[Hashable, _Slot] = {}

    def get_or_compile(self, key: Hashable, compile_kernel: Callable[[], FusedKernel]) -> FusedKernel:
        """Return the kernel of ``key``, compiling it in this thread if no thread has yet.

        Raises:
            CompileError: the text does not compile. It is remembered and raised again for the same key.
            CompilerFailedError: this thread is compiling already; a signal handler or ``__del__`` calls.
            NoCompileError: the interpreter is ending.
            UnsupportedError: from ``compile_kernel``, here or in the thread that this one waited for; the next call
                tries again.
            BaseException: whatever else ``compile_kernel`` raised here, such as an interrupt. It is this thread's own:
                of those that wait, one compiles then.
        """
        slot = self._slots.get(key) or self._slots.setdefault(key, _Slot())
        content: FusedKernel | FuserError | None = slot.content
        if content is None:
            content = slot.fill(compile_kernel)
        else:
            counters.count("cache_hits")
        if isinstance(content, FuserError):
            # Each caller gets an error of its own: one that is kept would keep the frames of all who raised it.
            raise copy.copy(content)
        return content

    def __contains__(self, key: Hashable) -> bool:
        """Whether the kernel of ``key`` is here, or why there is none."""
        slot = self._slots.get(key)
        return slot is not None and slot.content is not None

    def clear_failures(self) -> None:
        """Forget the errors that are remembered."""
        for slot in list(self._slots.values()):
            if isinstance(slot.content, CompileError):
                slot.content = None


class _Thread(threading.local):
    is_compiling = False


_thread = _Thread()


class _Slot:
    """The place of one kernel."""

    __slots__ = ("content", "failure", "lock")

    def __init__(self) -> None:
        # Held by the thread that compiles.
        self.lock = Lock()
        # The kernel, or what the compiler says of the text; None: neither yet.
        self.content: FusedKernel | CompileError | None = None
        # Why the last attempt came to neither: for the threads that waited for it.
        self.failure: UnsupportedError | None = None

    def fill(self, compile_kernel: Callable[[], FusedKernel]) -> FusedKernel | FuserError:
        """Compile in this thread, or wait for the one that does; return the kernel or an error."""
        if sys.is_finalizing():
            # Nor can anything be imported then, such as what runs a text in eager torch.
            raise NoCompileError("no kernel is compiled while the interpreter ends")
        if _thread.is_compiling:
            # The thread that this one would wait for may be itself, or wait for it.
            raise CompilerFailedError("a signal handler or __del__ calls for a kernel while its thread compiles one")
        failure = self.failure
        with self.lock():
            if self.content is None and self.failure is failure:
                self._compile(compile_kernel)
            content = self.content or self.failure
        assert content is not None, "an attempt ends with a kernel or an error"
        return content

    def _compile(self, compile_kernel: Callable[[], FusedKernel]) -> None:
        global _kernel_count  # noqa: PLW0603 - one counter per process
        _thread.is_compiling = True
        try:
            self.content = compile_kernel()
        except CompileError as error:
            self.content = copy.copy(error)
        except UnsupportedError as error:
            self.failure = copy.copy(error)
            raise
        else:
            with _count_lock():
                _kernel_count += 1
        finally:
            _thread.is_compiling = False


class Lru(Generic[V]):
    """A bounded mapping: adding beyond the bound drops the entry that was unused the longest."""

    def __init__(self) -> None:
        self._lock = Lock()
        # The entry used last comes last.
        self._entries: dict[Hashable, V] = {}

    def get(self, key: Hashable) -> V | None:
        """Return the entry, or None."""
        with self._lock():
            entry = self._entries.pop(key, None)
            if entry is not None:
                self._entries[key] = entry
            return entry

    def put(self, key: Hashable, entry: V, bound: int) -> None:
        """Add an entry, and drop old ones beyond ``bound``."""
        with self._lock():
            self._entries[key] = entry
            while len(self._entries) > bound:
                self._entries.pop(next(iter(self._entries)), None)

    def items(self) -> list[tuple[Any, V]]:
        """Return all entries, and what they are the entries of."""
        with self._lock():
            return list(self._entries.items())

    def __len__(self) -> int:
        return len(self._entries)


class SpecCache:
    """Registered specs by group key. A spec is built outside the lock and published whole."""

    def __init__(self) -> None:
        self._specs: dict[int, tuple[KernelSpec, KernelStore]] = {}

    def get_or_register(self, group: FusionGroup) -> KernelSpec:
        """Return the spec of a group, building it the first time; raises what build_kernel_spec raises."""
        spec = build_kernel_spec(group)
        return self._specs.setdefault(spec.key, (spec, KernelStore()))[0]

    def store(self, spec: KernelSpec) -> KernelStore:
        """Return the kernels of a registered spec."""
        return self._specs[spec.key][1]

    def clear_failures(self) -> None:
        """Forget the errors that are remembered for any spec."""
        for _, store in list(self._specs.values()):
            store.clear_failures()
