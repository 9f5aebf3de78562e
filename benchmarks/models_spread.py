"""``benchmarks.models`` for many models at once: a process for each, spread over the GPUs, on which they take turns.

    python -m benchmarks.models_spread --gpus 2 --seconds 200 --out models.json
    python -m benchmarks.models_spread --model llama vit --out models.json -- --size small --steps 20

What follows ``--`` goes to each process. The records become one file, also of models that were cut short, and a later
run goes on from it. Each process runs twice: what the first leaves in its caches, the second begins with (``--alone
warm``).
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.apart import ROOT
from benchmarks.model_cases import CASES

# Threads of Inductor's in each process: all of them compile at the same time.
THREADS = 4


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all processes, print what they print, and merge what they found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models_spread", description=__doc__)
    parser.add_argument("--model", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=600.0, help="for all; what is not done by then is left out")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("rest", nargs="*", help="of benchmarks.models")
    options = parser.parse_args(arguments)
    until = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(len(options.model)) as pool:
        folder = Path(name)
        parts = [folder / f"{model}.json" for model in options.model]

        def measure(slot: int) -> None:
            gpu, part = slot % options.gpus, parts[slot]
            if options.out.exists():
                part.write_bytes(options.out.read_bytes())
            run = ["--model", options.model[slot], "--out", str(part), "--turns", str(folder / f"turns{gpu}")]
            run += ["--caches", str(folder / options.model[slot]), *options.rest]
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            device = visible[gpu] if gpu < len(visible) and visible[gpu] else str(gpu)
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": device, "TORCHINDUCTOR_COMPILE_THREADS": str(THREADS)}
            for more in ([], ["--alone", "warm"]):
                run_until(until, ["benchmarks.models", *run, *more], environment)

        list(pool.map(measure, range(len(parts))))
        merge = ["benchmarks.models", "--out", str(options.out), "--merge", *map(str, filter(Path.exists, parts))]
        run_until(until + 60, merge, os.environ)


def run_until(end: float, command: Sequence[str], environment: os._Environ[str] | dict[str, str]) -> None:
    """Run a module of this package, and end it and what it started when its time is over."""
    left = end - time.monotonic()
    if left <= 0:
        return
    process = subprocess.Popen([sys.executable, "-m", *command], cwd=ROOT, env=environment, start_new_session=True)
    try:
        process.wait(left)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    main()
