"""Text to machine code by NVRTC, and machine code to a kernel of the driver, through cuda.bindings.

Not through cuda.core, whose import takes as long as NVRTC takes for a small kernel.
"""

from __future__ import annotations

import ctypes
import os
import site
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fuser.process import is_of_signal_handler

__all__ = ["LoadedKernel", "NvrtcError", "compile_text", "find_nvrtc", "identify_nvrtc", "load_kernel", "nvrtc_version"]

# Under which the dynamic loader knows it.
_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12")


class NvrtcError(Exception):
    """NVRTC made no machine code.

    Attributes:
        status: its name for what happened, such as ``NVRTC_ERROR_COMPILATION``.
        log: what it wrote.
    """

    def __init__(self, status: str, log: str) -> None:
        super().__init__(f"{status}: {log}" if log else status)
        self.status = status
        self.log = log


def compile_text(text: str, options: Sequence[str]) -> tuple[bytes, str]:
    """Return the cubin and NVRTC's log. Needs no GPU.

    Raises:
        ImportError: cuda-python is missing.
        NvrtcError: NVRTC refuses the text or the options, or has no memory.
        RuntimeError: NVRTC's library is missing.
    """
    from cuda.bindings import nvrtc  # noqa: PLC0415 - importing fuser must not import CUDA

    def check(status: nvrtc.nvrtcResult, log: str = "") -> None:
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise NvrtcError(status.name, log)

    status, program = nvrtc.nvrtcCreateProgram(text.encode(), b"fuser_kernel", 0, [], [])
    check(status)
    try:
        (compiled,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        status, size = nvrtc.nvrtcGetProgramLogSize(program)
        check(status)
        written = bytes(size)
        check(*nvrtc.nvrtcGetProgramLog(program, written))
        # It ends with a zero.
        log = written[:-1].decode(errors="replace")
        check(compiled, log)
        status, size = nvrtc.nvrtcGetCUBINSize(program)
        check(status)
        cubin = bytes(size)
        check(*nvrtc.nvrtcGetCUBIN(program, cubin))
        return cubin, log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def find_nvrtc() -> Path:
    """Return which file NVRTC is. A wheel's one is not loaded for that, which takes 10 to 25 ms.

    Raises:
        ImportError: cuda-python is missing.
        RuntimeError: NVRTC's library is missing.
    """
    from cuda.pathfinder import load_nvidia_dynamic_lib  # noqa: PLC0415 - as above

    # It takes what is loaded already before a wheel's, and looks anywhere else only where there is no wheel. It finds
    # none that is elsewhere on ``sys.path``.
    folders = site.getsitepackages() + [site.getusersitepackages()] * bool(site.ENABLE_USER_SITE)
    found = [file for folder in folders for name in _NAMES for file in Path(folder).glob(f"nvidia/*/lib/{name}")]
    if len(found) == 1 and not any(map(_is_loaded, _NAMES)):
        return found[0]
    return Path(load_nvidia_dynamic_lib("nvrtc").abs_path or "")


@cache
def identify_nvrtc() -> tuple[str, ...] | None:
    """Return which file NVRTC is, as it is now; None where there is none."""
    try:
        library = find_nvrtc().resolve()
        status = library.stat()
    except (ImportError, OSError, RuntimeError) as error:
        if is_of_signal_handler(error):
            raise
        return None
    return (str(library), str(status.st_size), str(status.st_mtime_ns))


def _is_loaded(name: str) -> bool:
    try:
        ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
    except OSError as error:
        if is_of_signal_handler(error):
            raise
        return False
    return True


def nvrtc_version() -> tuple[int, int]:
    """Return NVRTC's version, such as (13, 0).

    Raises:
        ImportError: cuda-python is missing.
        RuntimeError: NVRTC's library is missing.
    """
    from cuda.bindings import nvrtc  # noqa: PLC0415 - as above

    _, major, minor = nvrtc.nvrtcVersion()
    return major, minor


@dataclass(frozen=True, slots=True, weakref_slot=True)
class LoadedKernel:
    """A kernel that is loaded for every device of the process, as long as this object lives."""

    # A CUkernel, which the driver takes wherever it takes a CUfunction.
    address: int


def load_kernel(cubin: bytes, name: str) -> LoadedKernel:
    """Load machine code; a device that has no context yet gets the code with its first launch.

    Raises:
        ImportError: cuda-python is missing.
        RuntimeError: the driver refuses it.
    """
    from cuda.bindings import driver  # noqa: PLC0415 - as above

    def check(status: driver.CUresult) -> None:
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"CUDA does not load a fused kernel: {status.name}")

    check(*driver.cuInit(0))
    status, library = driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0)
    check(status)
    status, kernel = driver.cuLibraryGetKernel(library, name.encode())
    if status != driver.CUresult.CUDA_SUCCESS:
        driver.cuLibraryUnload(library)
        check(status)
    loaded = LoadedKernel(int(kernel))
    # Not when the process ends: the driver may have ended before.
    weakref.finalize(loaded, driver.cuLibraryUnload, library).atexit = False
    return loaded
