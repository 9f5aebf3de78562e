"""Host time of a call where fuser's launcher in C could not be built, and its Python stands in.

The harness calls ``measure_python_launcher``; the module's own command line is the process it starts, because a process
decides once, when it imports fuser.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from typing import Any

import torch

from benchmarks import timing
from benchmarks.apart import run_apart
from benchmarks.chains import CHAINS, make_inputs


def measure_python_launcher(
    chain: str, elements: int, device: torch.device, turns: int, budget_s: float
) -> dict[str, Any]:
    """Return a record: the times, held against ``torch.add`` in the same process, or why there are none."""
    options = {"chain": chain, "device": device.type, "elements": elements, "turns": turns, "budget": budget_s}
    return run_apart("benchmarks.python_launcher", options)


def main() -> None:
    """Measure in this process, and print the record as the last line."""
    parser = argparse.ArgumentParser(description="Time calls of fuser without its launcher in C.")
    parser.add_argument("--chain", choices=CHAINS, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--elements", type=int, required=True)
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--budget", type=float, required=True)
    options = parser.parse_args()
    # Before fuser is imported: as if the launcher had not been built.
    sys.modules["fuser._launcher"] = None  # type: ignore[assignment]
    from benchmarks.peers import PEERS

    device = torch.device(options.device)
    peer, chain = PEERS["fuser"](device), CHAINS[options.chain]
    inputs = make_inputs(chain, options.elements, device)
    run, add = peer.build(chain, inputs), partial(torch.add, *inputs[:2])
    run_us: list[float] = []
    add_us: list[float] = []
    for _ in range(options.turns):
        add_us += timing.sample_host_us(add, peer.wait, device, options.budget)
        run_us += timing.sample_host_us(run, peer.wait, device, options.budget)
    result, mark = timing.Timing("wall", tuple(run_us)), timing.Timing("wall", tuple(add_us))
    ratio = round(result.median_us / mark.median_us, 3)
    print(json.dumps({"status": "ok", "time_us": result.to_json(), "ratio_to_eager_add": ratio}))


if __name__ == "__main__":
    main()
