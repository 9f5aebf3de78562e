"""One thread at a time traces: while it does, fx has replaced methods of modules, for all threads.

Each trace puts back what it found. Of two at once one would find, and leave behind for good, what the other one put
there. AOTAutograd traces with fx, too: where fuser asks it to, and where torch.compile does.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import fx
from torch.fx import _symbolic_trace

from fuser.process import Lock, await_before_fork, is_forked

__all__ = ["Turn", "taking_turns"]

# A compilation of torch's may wait for what a thread of its own traces: not for longer than this.
LONGEST_WAIT_S = 60.0

_lock = Lock()
# A child that is forked meanwhile would keep what is replaced, and find the tracing of torch's half done.
await_before_fork(_lock)


@contextmanager
def taking_turns() -> Iterator[None]:
    """Let no other thread trace, nor torch.compile compile, inside a ``with`` block."""
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    # Taken first: what torch.compile calls takes the other one second. In a child, who has it may not be there.
    compiling: Any = None if is_forked() else getattr(dynamo, "compile_lock", None)
    is_held = compiling is not None and compiling.acquire(timeout=LONGEST_WAIT_S)
    try:
        with _lock():
            yield
    finally:
        if is_held:
            compiling.release()


_module: Any = torch.nn.Module
_tracer: Any = fx.Tracer
_flagged: Any = _symbolic_trace
# Whether all threads have one flag. In torch 2.15 each has its own.
_HAS_FLAG = hasattr(_symbolic_trace, "_is_fx_tracing_flag")


class Turn:
    """Whether this thread traces just now: true in the thread that makes it, inside a ``with`` block.

    There fx is to say so to this thread alone: Dynamo refuses to run what it has compiled while fx traces.
    """

    def __init__(self) -> None:
        self._thread = 0

    def __bool__(self) -> bool:
        return self._thread == threading.get_ident()

    def __enter__(self) -> None:
        """Begin."""
        self._methods = _module.__call__, _module.__getattr__
        if _HAS_FLAG:
            self._before = _tracer.trace, _flagged._is_fx_tracing_flag
            self._trace = _say_nothing(_tracer.trace)
            _tracer.trace, _flagged._is_fx_tracing_flag = self._trace, self
        # Last: whatever interrupts this leaves nobody tracing.
        self._thread = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        """Other traces of fx's may put back what this one has replaced."""
        self._thread = 0
        # An interrupt may have met fx where it does so.
        if self._methods != (_module.__call__, _module.__getattr__):
            _module.__call__, _module.__getattr__ = self._methods
        if _HAS_FLAG:
            trace, _flagged._is_fx_tracing_flag = self._before
            # Dynamo may have come meanwhile, and hidden it from itself.
            if _tracer.trace is self._trace:
                _tracer.trace = trace


@functools.lru_cache(8)
def _say_nothing(trace: Any) -> Any:
    # The same with other globals, in which it may say that all threads trace.
    plain = inspect.unwrap(trace)
    made = FunctionType(plain.__code__, {**plain.__globals__}, argdefs=plain.__defaults__)
    # Dynamo has it hidden from itself, once it is there.
    return made if trace is plain else torch.compiler.disable(made)  # type: ignore[no-untyped-call]
