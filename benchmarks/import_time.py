"""How long ``import fuser`` takes on top of ``import torch``, and what its first CUDA kernel imports on top of that.

Medians over fresh processes.

    python benchmarks/import_time.py [--runs 9]

Prints the figure, writes benchmarks/results/import_time.json, and fails when the figure is over the target.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results" / "import_time.json"
TARGET_MS = 50.0

PROBE = """
import time
began = time.perf_counter()
import torch
between = time.perf_counter()
import fuser
ended = time.perf_counter()
from cuda.bindings import driver, nvrtc
print((between - began) * 1e3, (ended - between) * 1e3, (time.perf_counter() - ended) * 1e3)
"""


def main() -> int:
    """Measure, report, and return 1 when the target is missed."""
    parser = argparse.ArgumentParser(description="Time `import fuser` on top of `import torch`.")
    parser.add_argument("--runs", type=int, default=9, help="fresh processes to take the median over (default 9)")
    runs = parser.parse_args().runs

    time_import_ms()  # fills the file cache and writes the bytecode
    samples = [time_import_ms() for _ in range(runs)]
    torch_ms, fuser_ms, cuda_ms = (statistics.median(times) for times in zip(*samples, strict=True))
    result = {
        "torch_ms": round(torch_ms, 2),
        "fuser_ms": round(fuser_ms, 2),
        "cuda_bindings_ms": round(cuda_ms, 2),
        "fuser_ms_all": [round(times[1], 2) for times in samples],
        "target_ms": TARGET_MS,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"import torch {torch_ms:.0f} ms; import fuser on top of it {fuser_ms:.1f} ms (target {TARGET_MS:.0f} ms)")
    print(f"the first CUDA kernel imports cuda.bindings: {cuda_ms:.0f} ms")
    return 0 if fuser_ms < TARGET_MS else 1


def time_import_ms() -> tuple[float, ...]:
    """Return the times of ``import torch``, ``fuser`` after it, and ``cuda.bindings`` after that, in a new process."""
    # An installed package has its bytecode; without it most of the time would go into compiling Python.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run([sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, check=True)
    return tuple(map(float, done.stdout.split()[-3:]))


if __name__ == "__main__":
    sys.exit(main())
