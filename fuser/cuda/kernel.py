"""A compiled CUDA kernel: loaded once per process, launched on torch's current stream of a device."""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING

import torch

from fuser import counters
from fuser.codegen import KERNEL_NAME, KernelSource

if TYPE_CHECKING:
    from cuda.core import ObjectCode

__all__ = ["CudaKernel"]

_thread = threading.local()


class CudaKernel:
    """Implements FusedKernel. The library handle belongs to no context, so one kernel serves every device."""

    def __init__(self, source: KernelSource, code: ObjectCode) -> None:
        from cuda.bindings import driver  # noqa: PLC0415 - importing fuser must not import CUDA

        self.source = source
        self._kernel = code.get_kernel(KERNEL_NAME)
        self._function = driver.CUfunction(int(self._kernel.handle))
        self._threads = source.tuning.block
        self._launch = driver.cuLaunchKernel
        self._success = driver.CUresult.CUDA_SUCCESS

    def launch(self, arguments: bytes, work: int, device_index: int) -> None:
        """Launch ``work`` > 0 blocks; returns before the kernel has run.

        Raises:
            RuntimeError: the driver refused the launch.
        """
        # A thread that has not used CUDA yet has no current context: setting the device binds the primary one.
        if device_index != torch.cuda.current_device() or not getattr(_thread, "has_context", False):
            with torch.cuda.device(device_index):
                torch.cuda.set_device(device_index)
                _thread.has_context = True
                self._launch_here(arguments, work, device_index)
        else:
            self._launch_here(arguments, work, device_index)
        counters.count("launches")

    def _launch_here(self, arguments: bytes, blocks: int, device_index: int) -> None:
        stream = torch._C._cuda_getCurrentRawStream(device_index)
        # The driver copies the struct before it returns.
        struct = ctypes.create_string_buffer(arguments, len(arguments))
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(struct))
        (status,) = self._launch(
            self._function, blocks, 1, 1, self._threads, 1, 1, 0, stream, ctypes.addressof(parameters), 0
        )
        if status != self._success:
            raise RuntimeError(f"CUDA refused to launch a fused kernel: {status!r}")
