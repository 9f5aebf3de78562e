"""A compiled CUDA kernel: loaded once per process, launched on torch's current stream of a device."""

from __future__ import annotations

import ctypes
import importlib
import threading
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import torch

from fuser import counters
from fuser.cuda.nvrtc import LoadedKernel
from fuser.disk_cache import CacheKey
from fuser.geometry import Flat, Launch, launch_shape
from fuser.kernel_source import KernelSource
from fuser.kernel_spec import MAX_LONE_ARGUMENT_BYTES
from fuser.layout import IterationSpace
from fuser.process import is_of_signal_handler

if TYPE_CHECKING:
    from cuda.bindings.driver import CUfunction, CUresult

__all__ = ["CudaKernel"]

_thread = threading.local()
# Dynamic shared memory that a kernel gets without asking, beside what it has of its own.
FREE_SHARED_BYTES = 24 << 10
# The driver's version since which a graph's edges say that a launch does not wait for the end of the one before it.
ABREAST_SINCE = 12030


class CudaKernel:
    """Implements FusedKernel. The library handle belongs to no context, so one kernel serves every device."""

    def __init__(self, source: KernelSource, kernel: LoadedKernel, key: CacheKey) -> None:
        from cuda.bindings import driver  # noqa: PLC0415 - importing fuser must not import CUDA

        self.source = source
        self.key = key
        # It lives as long as this.
        self._kernel = kernel
        self.address = kernel.address
        self._function = driver.CUfunction(self.address)
        self._launch = driver.cuLaunchKernel
        self._success = driver.CUresult.CUDA_SUCCESS
        # Shared memory that each device was asked for.
        self._allowed: dict[int, int] = {}
        _tell_launcher()

    def prepare(self, space: IterationSpace) -> Launch:
        """Return the grid over a space that is not empty."""
        return launch_shape(self.source, space)

    def prepare_any(self) -> Flat:
        """Return how the grid depends on the number of elements."""
        return Flat(chunk=self.source.vector * self.source.tuning.block * self.source.tuning.unroll)

    def bind(self, launch: Launch, device_index: int) -> Callable[[bytes], None]:
        """Return a function that launches with packed arguments and returns before the kernel has run.

        It raises RuntimeError if the driver refuses the launch.
        """
        driver_launch, function, success = self._launch, self._function, self._success
        if launch.shared_bytes > FREE_SHARED_BYTES:
            self._allow_shared(int(launch.shared_bytes), device_index)
        if launch.asks:
            self._set_attribute("NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1, device_index)
        shape = (launch.grid, 1, 1, launch.block, 1, 1, launch.shared_bytes)
        abreast = _Abreast(launch) if launch.follows and _starts_abreast() else None
        current_device, current_stream = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream

        def run(arguments: bytes) -> None:
            staging: _Staging | None = getattr(_thread, "staging", None)
            if staging is None or current_device() != device_index:
                # A thread that has not used CUDA yet has no current context: setting the device binds the primary one.
                with torch.cuda.device(device_index):
                    torch.cuda.set_device(device_index)
                    _thread.staging = staging = staging or _Staging()
                    run(arguments)
                return
            # Nobody else's until the driver has copied the arguments: a signal handler or __del__ that launches in
            # between makes one of its own.
            _thread.staging = None
            staging.buffer[: len(arguments)] = arguments
            stream = current_stream(device_index)
            if abreast is None:
                (status,) = driver_launch(function, *shape, stream, staging.parameters, 0)
            else:
                status = abreast.launch(function, stream, staging.parameters)
            _thread.staging = staging
            if status != success:
                raise RuntimeError(f"CUDA refused to launch a fused kernel: {status!r}")
            counters.count_launch()

        return run

    def _allow_shared(self, size: int, device_index: int) -> None:
        # What was allowed before stays: launches of other plans rely on it.
        size = self._allowed[device_index] = max(size, self._allowed.get(device_index, 0))
        self._set_attribute("MAX_DYNAMIC_SHARED_SIZE_BYTES", size, device_index)

    def _set_attribute(self, name: str, value: int, device_index: int) -> None:
        from cuda.bindings import driver  # noqa: PLC0415 - as above

        attribute = getattr(driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
        status = driver.cuKernelSetAttribute(attribute, value, driver.CUkernel(self.address), device_index)[0]
        if status != self._success:
            raise RuntimeError(f"CUDA refused a fused kernel {value} for {name}: {status!r}")


@cache
def _tell_launcher() -> None:
    # The C launcher, where there is one, calls the driver itself.
    try:
        launcher = importlib.import_module("fuser._launcher")
        library = ctypes.CDLL("libcuda.so.1")
    except (ImportError, OSError) as error:
        if is_of_signal_handler(error):
            raise
        return
    functions = [library.cuLaunchKernel, library.cuCtxGetDevice]
    if _starts_abreast():
        functions.append(library.cuLaunchKernelEx)
    launcher.set_driver(*(ctypes.cast(function, ctypes.c_void_p).value for function in functions))


@cache
def _starts_abreast() -> bool:
    # Whether the driver has launches side by side, also in CUDA graphs; otherwise they are one after another.
    from cuda.bindings import driver  # noqa: PLC0415 - as above

    status, version = driver.cuDriverGetVersion()
    return status == driver.CUresult.CUDA_SUCCESS and version >= ABREAST_SINCE


class _Abreast:
    """Launches that may begin when all blocks of the launch before have (programmatic stream serialization)."""

    def __init__(self, launch: Launch) -> None:
        from cuda.bindings import driver  # noqa: PLC0415 - as above

        self._driver, self._launch = driver, launch
        self._attribute = driver.CUlaunchAttribute()
        self._attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        self._attribute.value.programmaticStreamSerializationAllowed = 1

    def launch(self, function: CUfunction, stream: int, parameters: int) -> CUresult:
        """Launch, and return the driver's answer."""
        config, launch = self._driver.CUlaunchConfig(), self._launch
        config.gridDimX, config.gridDimY, config.gridDimZ = int(launch.grid), 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = int(launch.block), 1, 1
        config.sharedMemBytes, config.hStream = int(launch.shared_bytes), self._driver.CUstream(stream)
        config.attrs, config.numAttrs = [self._attribute], 1
        return self._driver.cuLaunchKernelEx(config, function, parameters, 0)[0]


class _Staging:
    """One thread's memory for the arguments of a launch."""

    def __init__(self) -> None:
        self._struct = ctypes.create_string_buffer(MAX_LONE_ARGUMENT_BYTES)
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._struct))
        self.buffer = memoryview(self._struct).cast("B")
        # Address of the array of pointers that cuLaunchKernel takes.
        self.parameters = ctypes.addressof(self._pointers)
