"""On a GPU: compute-sanitizer's tools find nothing in kernels of every kind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = shutil.which("compute-sanitizer")
SCRIPT = Path(__file__).with_name("sanitized.py")
# Of torch's kernels, which would take most of the time, only the one that makes the zeros of workspaces.
KERNELS = ("--kernel-name", "kernel_substring=fuser_kernel", "--kernel-name", "kernel_substring=FillFunctor")
OPTIONS = (*KERNELS, "--report-api-errors", "no", "--error-exitcode", "99")

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.slow,
    pytest.mark.skipif(TOOL is None, reason="compute-sanitizer is part of CUDA's toolkit (not found)"),
]


def sanitize(tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(TOOL), "--tool", tool, *OPTIONS, sys.executable, str(SCRIPT), *arguments]
    # Each tensor in an allocation of its own, so that the tool knows where it ends.
    environment = os.environ | ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool == "memcheck" else {})
    return subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=environment)


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_kernels_of_every_kind(tool: str) -> None:
    done = sanitize(tool)
    # Racecheck warns of steps of one thread: a cluster's barrier is set up, and told what to expect four instructions
    # later. Of errors, and of any other warning, there is none.
    is_known = tool == "racecheck" and "1 hazard displayed (0 errors, 1 warning)" in done.stdout
    assert done.returncode == 0 or is_known, done.stdout[-3000:] + done.stderr[-3000:]
    assert " 0 differ" in done.stdout


def test_a_fault_is_found() -> None:
    done = sanitize("memcheck", "--broken")
    assert done.returncode not in (0, 1), done.stdout[-3000:]
    assert "fuser_kernel" in done.stdout
