"""``python -m fuser doctor``: tries everything that fuser needs for real, and says how to mend what does not work."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from fuser import launcher
from fuser._version import __version__
from fuser.compiler import build_kernel_source
from fuser.config import config
from fuser.disk_cache import CacheKey, cache_folder, read, write
from fuser.errors import CacheError, CacheWarning, CompilerNotFoundError, FuserError
from fuser.jit_function import JitFunction
from fuser.jiterator import jit_fn
from fuser.planner import plan_texts
from fuser.python_launcher import PythonLauncher

__all__ = ["Finding", "examine"]

TEXT = "template <typename T> T fuser_doctor(T x, T y) { return x * y + x; }"
# An architecture that every NVRTC knows which fuser works with.
ARCHITECTURE = "sm_90"
SIZE = 100_003
OLDEST_TORCH = (2, 11)


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of trying one thing."""

    name: str
    # True: it works; False: it is broken; None: it is not there, and fuser does without.
    works: bool | None
    # What was found, or why it does not work.
    what: str
    # How to mend it.
    remedy: str = ""

    def __str__(self) -> str:
        mark = {True: "ok", False: "FAILS", None: "none"}[self.works]
        lines = [f"{mark:<6}{self.name}: {self.what}"]
        return "\n".join([*lines, *([f"      {self.remedy}"] if self.remedy else [])])


def examine() -> Iterator[Finding]:
    """Try one thing after another: versions, launcher, compilers, devices, cache and torch.compile."""
    yield _examine_versions()
    yield _examine_launcher()
    yield _try("CPU kernels", lambda: _run_on(torch.device("cpu")), "install g++ or clang++, or name one in CXX")
    yield _try("CUDA compiler", _compile_for_cuda, "pip install cuda-python nvidia-cuda-nvrtc")
    count = torch.cuda.device_count()
    if not count:
        yield Finding("GPU", None, "torch finds no CUDA device")
    for index in range(count):
        device = torch.device("cuda", index)
        remedy = "see whether the driver is as new as torch.version.cuda, and `nvidia-smi` sees the device"
        yield _try(f"GPU {index}", lambda device=device: _run_on(device), remedy)  # type: ignore[misc]
    yield _try("kernel cache", _keep_and_find, "set FUSER_CACHE_DIR to a folder that is yours, or FUSER_DISK_CACHE=0")
    yield _try("torch.compile", _run_compiled, "install the package, so that its entry point is found")


def _try(name: str, attempt: Callable[[], Finding | str], remedy: str) -> Finding:
    # What is warned of is part of the finding.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = attempt()
        except Exception as error:
            is_missing = isinstance(error, CompilerNotFoundError)
            told = [str(item.message).partition(" (")[0] for item in caught if issubclass(item.category, CacheWarning)]
            why = (told or [str(error) or repr(error)])[0]
            return Finding(name, None if is_missing else False, why.splitlines()[0], remedy)
    return found if isinstance(found, Finding) else Finding(name, works=True, what=found)


def _examine_versions() -> Finding:
    python = ".".join(map(str, sys.version_info[:3]))
    what = f"fuser {__version__}, torch {torch.__version__}, Python {python}"
    is_new = tuple(map(int, torch.__version__.split(".")[:2])) >= OLDEST_TORCH
    return Finding("versions", is_new, what, "" if is_new else f"fuser needs torch {'.'.join(map(str, OLDEST_TORCH))}")


def _examine_launcher() -> Finding:
    if launcher.Replayer is not PythonLauncher:
        return Finding("launcher", works=True, what="repeated calls are replayed from C")
    remedy = "install a C compiler and Python's headers, then fuser again"
    return Finding("launcher", None, "repeated calls are replayed in Python, some microseconds slower", remedy)


def _function() -> JitFunction:
    # Of a text that no other process has compiled, so that the compiler is tried and not the cache.
    return jit_fn(f"{TEXT} // {os.urandom(8).hex()}")


def _run_on(device: torch.device) -> str:
    with config.patch(disk_cache=False, no_compile=False):
        function = _function()
        function.check(device=device.type)
        with torch.cuda.device(device) if device.type == "cuda" else torch.no_grad():
            x, y = (torch.randint(-99, 99, (SIZE,), device=device).float() for _ in range(2))
            if not torch.equal(function(x, y), x * y + x):
                raise FuserError("a kernel's values are wrong")
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}: a kernel compiled, and its values are right"
    from fuser.cpu.backend import find_compiler  # noqa: PLC0415 - it looks for compilers

    return f"{find_compiler(config.cxx).title}: a kernel compiled, and its values are right"


def _compile_for_cuda() -> str:
    from fuser.cuda.backend import compile_cubin  # noqa: PLC0415 - importing fuser imports no CUDA

    function = _function()
    x = torch.empty(2, 2, device="meta")
    ((part, args),) = plan_texts(function.spec(2), [x, x], torch.device("cuda"))
    with config.patch(disk_cache=False, no_compile=False):
        size = len(compile_cubin(build_kernel_source(part, args), ARCHITECTURE))
    return f"NVRTC made a kernel for {ARCHITECTURE}, {size} bytes"


def _keep_and_find() -> Finding | str:
    folder = cache_folder()
    if folder is None:
        return Finding("kernel cache", None, "switched off")
    payload = os.urandom(64)
    key = CacheKey.build(("doctor", payload.hex()), ("doctor",))
    write(key, payload)
    found = read(key)
    for path in folder.glob(f"{key.wanted}-*"):
        path.unlink(missing_ok=True)
    if found != payload:
        raise CacheError(f"{folder}: what is written there is not found again")
    return f"{folder}: entries are kept and found"


def _run_compiled() -> str:
    x = torch.rand(64)

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x - 0.5) * x

    try:
        with config.patch(no_compile=False):
            result = torch.compile(function, backend="fuser")(x)
    finally:
        torch._dynamo.reset()
    if not torch.equal(result, function(x)):
        raise FuserError("a compiled function's values are wrong")
    return "backend 'fuser' is found, and a function's values are right"
