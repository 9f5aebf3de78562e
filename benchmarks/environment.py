"""What a result has to say about where it was measured."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import fuser

LIBRARIES = ("numpy", "triton", "cupy-cuda12x", "cupy-cuda13x", "cupy", "jax", "jaxlib", "numexpr", "numba")


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Return the device, the versions of everything, and the date."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": describe_device(device),
        "host": {"cpu": read_cpu_name(), "cores": os.cpu_count(), "system": platform.system()},
        "versions": collect_versions(),
    }


def describe_device(device: torch.device) -> dict[str, Any]:
    """Return the device's kind and name, and what bounds its speed."""
    if device.type == "cpu":
        return {"type": "cpu", "name": read_cpu_name(), "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    return {
        "type": "cuda",
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
    }


def read_cpu_name() -> str:
    """Return the processor's model name, or the architecture where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def collect_versions() -> dict[str, str]:
    """Return the version of every library and compiler that is here."""
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fuser": str(getattr(fuser, "__version__", "unknown")),
    }
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    compiler = read_compiler_version()
    if compiler:
        versions["c++"] = compiler
    return versions


def read_compiler_version() -> str | None:
    """Return the first line that the host's C++ compiler says about itself, if there is one."""
    try:
        command = [os.environ.get("CXX", "g++"), "--version"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.partition("\n")[0].strip()
