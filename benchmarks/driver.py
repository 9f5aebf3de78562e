"""The floor under every launch: ``cuLaunchKernel`` alone, called from a loop in C with everything prepared."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

_KERNEL = 'extern "C" __global__ void nothing(const void*, const void*, const void*, void*, long long) {}'

_LOOP = """
#include <time.h>
typedef unsigned u;
typedef int (*launch_t)(void*, u, u, u, u, u, u, u, void*, void**, void**);
static double now_us(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1e6 + time.tv_nsec * 1e-3;
}
double launch_us(launch_t launch, void* kernel, void* stream, int calls) {
  void* field = 0;
  long long count = 0;
  void* arguments[] = {&field, &field, &field, &field, &count};
  const double began = now_us();
  for (int i = 0; i < calls; ++i)
    if (launch(kernel, 1, 1, 1, 256, 1, 1, 0, stream, arguments, 0)) return -1;
  return (now_us() - began) / calls;
}
"""


class NoFloorError(Exception):
    """The driver's own time cannot be measured here."""


def make_driver_loop(device: torch.device) -> Callable[[int], float]:
    """Return a function that launches an empty kernel some times and returns the microseconds of one launch.

    Raises:
        NoFloorError: no C compiler, or no CUDA driver.
    """
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        raise NoFloorError("no C compiler")
    from fuser.cuda.nvrtc import compile_text, load_kernel

    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise NoFloorError("no CUDA driver") from error
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "loop.c"), Path(folder, "loop.so")
        source.write_text(_LOOP)
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
        loop = ctypes.CDLL(str(library)).launch_us
    loop.restype = ctypes.c_double
    major, minor = torch.cuda.get_device_capability(device)
    kernel = load_kernel(compile_text(_KERNEL, (f"-arch=sm_{major}{minor}",))[0], "nothing")
    launch = ctypes.cast(driver.cuLaunchKernel, ctypes.c_void_p)

    def measure(calls: int) -> float:
        # A full launch queue would stop the host.
        torch.cuda.synchronize(device)
        stream = torch.cuda.current_stream(device).cuda_stream
        taken = float(loop(launch, ctypes.c_void_p(kernel.address), ctypes.c_void_p(stream), calls))
        if taken < 0:
            raise NoFloorError("the driver refused the launch")
        return taken

    return measure
