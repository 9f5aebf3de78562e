"""How long a peer compiles its first two kernels in a fresh process with empty caches, and with those it left on disk.

The harness calls ``measure_compile``; the module's own command line is the process it starts.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.apart import run_apart
from benchmarks.chains import CHAINS, make_inputs
from benchmarks.peers import PEERS, Absent, Peer

# The first kernel pays for everything that happens once; the second shows what another chain costs.
FIRST, SECOND = "add", "six"
ELEMENTS = 1024

CACHE_VARIABLES = (
    "FUSER_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "CUPY_CACHE_DIR",
    "PYTORCH_KERNEL_CACHE_PATH",
    "CUDA_CACHE_PATH",
)


def measure_compile(peer: str, device: torch.device) -> dict[str, Any]:
    """Return the record of one peer: its times, or why there are none."""
    options = {"peer": peer, "device": device.type}
    with tempfile.TemporaryDirectory() as folder:
        environment = make_cold_environment(os.environ, Path(folder))
        cold = run_apart("benchmarks.compile_time", options, environment)
        if cold["status"] != "ok":
            return cold
        # The same once more: the disk caches are what the first process left.
        cached = run_apart("benchmarks.compile_time", options, environment)
    if cached["status"] != "ok":
        return cached
    return {**cold, **{f"cached_{name}": value for name, value in cached.items() if name != "status"}}


def make_cold_environment(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the environment with every compiler's disk cache in an empty folder."""
    caches = {}
    for name in CACHE_VARIABLES:
        cache = folder / name.lower()
        cache.mkdir()
        caches[name] = str(cache)
    return {**environment, **caches}


def time_first_call_ms(peer: Peer, chain_name: str) -> float:
    """Return the time from a chain's text to its first result."""
    chain = CHAINS[chain_name]
    inputs = make_inputs(chain, ELEMENTS, peer.device)
    if peer.device.type == "cuda":
        torch.cuda.synchronize(peer.device)
    began = time.perf_counter()
    peer.wait(peer.build(chain, inputs)())
    return (time.perf_counter() - began) * 1e3


def main() -> None:
    """Measure one peer in this process, and print its record as the last line."""
    parser = argparse.ArgumentParser(description="Time a peer's first two kernels in this process.")
    parser.add_argument("--peer", choices=PEERS, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    options = parser.parse_args()
    device = torch.device(options.device)
    # The device's own start is nobody's compile time.
    torch.ones(4, device=device).add_(1).sum().item()
    try:
        peer = PEERS[options.peer](device)
    except Absent as error:
        print(json.dumps({"status": "absent", "reason": str(error)}))
        return
    with peer.scope():
        times = {"first_ms": time_first_call_ms(peer, FIRST), "second_ms": time_first_call_ms(peer, SECOND)}
    print(json.dumps({"status": "ok", **{name: round(value, 2) for name, value in times.items()}}))


if __name__ == "__main__":
    main()
