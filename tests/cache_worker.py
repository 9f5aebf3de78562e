"""A process that uses the kernel cache as told, one line of JSON for each request and each answer.

``Worker`` starts one. It answers each request as a process that has just begun: it forgets what earlier ones left in
memory. As root it gives up the right to read and write whatever it likes, so that permissions hold.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from select import select
from typing import Any

ROOT = Path(__file__).parents[1]
# Longer than any answer takes: one that has not come by then never will.
HANG_S = 120.0
# Of capability.h: what root may do to files whatever their permissions say.
CAP_VERSION, CAP_DAC = 0x20080522, 0b110


class Worker:
    """One process, from its start to the end of a ``with`` block."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), *sys.path)), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def send(self, **request: Any) -> None:
        """Begin a request; ``receive`` gives its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """Return the answer; fails if the process died or hangs."""
        assert self.process.stdout is not None
        ready, _, _ = select([self.process.stdout], [], [], HANG_S)
        assert ready, "the process hangs"
        line = self.process.stdout.readline()
        assert line, f"the process died: {self.process.wait()}"
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send, and receive."""
        self.send(**request)
        return self.receive()


def ask_all(workers: Sequence[Worker], **request: Any) -> list[dict[str, Any]]:
    """Send one request to all at once."""
    for worker in workers:
        worker.send(**request)
    return [worker.receive() for worker in workers]


def answer(
    kind: str,
    number: int,
    cache: str,
    settings: Mapping[str, Any] | None = None,
    umask: int = 0o022,
    save: str | None = None,
    load: str | None = None,
) -> dict[str, Any]:
    """Run functor ``number`` on the CPU or on CUDA, or compile it to a cubin; say what came of it.

    Args:
        kind: "cpu", "cuda" or "cubin".
        number: which functor.
        cache: the cache folder.
        settings: of ``fuser.config``.
        umask: the process's.
        save: a file for ``save_cache``, afterwards.
        load: a file for ``load_cache``, before.
    """
    import torch

    import fuser
    from fuser import compiler, counters, disk_cache, executor
    from fuser.cpu import backend as cpu_backend
    from fuser.kernel_cache import SpecCache

    compiler._specs = SpecCache()
    executor._plans.clear()
    counters._warned.clear()
    disk_cache._used.clear()
    disk_cache._shipped.clear()
    cpu_backend._find_compiler.cache_clear()
    fuser.reset_stats()
    os.umask(umask)
    began = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught, fuser.config.patch(**{"cache_dir": cache, **(settings or {})}):
        warnings.simplefilter("always")
        counts: dict[str, int] = {}
        if load:
            counts["loaded"] = fuser.load_cache(load)
        fn = fuser.create_jit_fn(f"template <typename T> T numbered(T x) {{ return x * T(2) + T({number}); }}")
        if kind == "cubin":
            result = hashlib.sha256(find_cubin(fn)).hexdigest()
        else:
            result = str(fn(torch.arange(100.0, device=kind)).tolist() == [2.0 * i + number for i in range(100)])
        if save:
            counts["saved"] = fuser.save_cache(save)
    return {
        **fuser.stats(),
        **counts,
        "result": result,
        "warnings": [f"{item.category.__name__}: {item.message}" for item in caught],
        "files": [item.filename for item in caught],
        "seconds": time.perf_counter() - began,
    }


def find_cubin(fn: Any) -> bytes:
    """Return the functor's cubin, by way of the cache; no GPU is needed for that."""
    import torch

    from fuser.cuda import backend
    from fuser.debug import kernel_sources
    from fuser.disk_cache import load_or_make

    (source,) = kernel_sources(fn.spec(1), [torch.ones(3)], "cuda")
    return load_or_make(
        backend._cache_key(source, "sm_90"), lambda: backend.compile_cubin(source, "sm_90"), lambda cubin: cubin
    )


def give_up_roots_rights() -> None:
    """Make file permissions hold for this process and its children, as they do for everybody else."""
    libc = ctypes.CDLL(None, use_errno=True)
    # Version and process, then effective, permitted and inheritable sets for two words of capabilities.
    header, sets = (ctypes.c_uint32 * 2)(CAP_VERSION, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    for index in range(3):
        sets[index] &= ~CAP_DAC
    assert libc.capset(header, sets) == 0, os.strerror(ctypes.get_errno())


def main() -> None:
    """Answer until the input ends."""
    if os.geteuid() == 0:
        give_up_roots_rights()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(**json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
