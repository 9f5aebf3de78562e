"""Optimizer steps over all parameters of a GPT-2: ``fuser.foreach`` against torch's optimizers.

    python -m benchmarks.foreach                       # GPT-2 small (148 parameters) and medium (292)
    python -m benchmarks.foreach --quick               # a smoke test

Writes benchmarks/results/foreach_DEVICE.json. A step is timed by events on CUDA, where a host that is too slow shows;
``host`` is how long a step keeps Python busy. ``bytes`` is what a step has to read and write once.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fuser
from benchmarks.environment import describe_environment
from benchmarks.report import write_json
from benchmarks.timing import EventSampler, WallSampler, percentile, sample_host_us

ROOT = Path(__file__).resolve().parent
SCHEMA = 1
# Layers and width.
MODELS = {"gpt2": (12, 768), "gpt2-medium": (24, 1024)}
QUICK_MODELS = {"tiny": (2, 32)}

Record = dict[str, Any]


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.foreach")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--budget", type=float, default=0.5, metavar="SECONDS", help="time for one contestant")
    parser.add_argument("--quick", action="store_true", help="a smoke test: a tiny model")
    parser.add_argument("--out", type=Path, metavar="JSON")
    options = parser.parse_args()
    device = torch.device(options.device)
    path = options.out or ROOT / "results" / f"foreach_{device.type}.json"
    steps: list[Record] = []
    document = {"schema": SCHEMA, "environment": describe_environment(device), "steps": steps}
    for model, (layers, width) in (QUICK_MODELS if options.quick else MODELS).items():
        for record in measure(layers, width, device, 0.01 if options.quick else options.budget):
            steps.append({"model": model, **record})
            print(" ".join(f"{value}" for value in steps[-1].values()), flush=True)
            write_json(document, path)
    return 0


def measure(layers: int, width: int, device: torch.device, budget_s: float) -> Iterator[Record]:
    """Yield a record for each contestant; ``ratio`` is torch's fused AdamW's time by its own."""
    fused_us = None
    for name, (make, words) in contestants().items():
        params = [torch.randn(shape, device=device) for shape in shapes(layers, width)]
        for item in params:
            item.grad = torch.randn_like(item)
        step = make(params).step
        fuser.reset_stats()
        step()
        step()
        launches = fuser.stats()["launches"] // 2
        wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
        sampler = EventSampler(step) if device.type == "cuda" else WallSampler(step, lambda _: None)
        times = sampler.sample(budget_s)
        host = sample_host_us(step, lambda _, wait=wait: wait(), device, budget_s / 4)
        median = percentile(times, 0.5)
        fused_us = fused_us or median
        numel = sum(item.numel() for item in params)
        yield {
            "optimizer": name,
            "tensors": len(params),
            "elements": numel,
            "launches": launches or None,
            "us": round(median, 1),
            "p10": round(percentile(times, 0.1), 1),
            "p90": round(percentile(times, 0.9), 1),
            "host_us": round(percentile(host, 0.5), 1),
            "gb_per_s": round(numel * words / median / 1e3, 1),
            "ratio": round(fused_us / median, 3),
        }


def contestants() -> dict[str, tuple[Callable[[list[Tensor]], Any], int]]:
    """Return what makes each optimizer, and the bytes that it moves for a parameter's element; torch's fused first."""
    examples = load_example()
    torchs = torch.optim.AdamW
    return {
        "torch AdamW fused": (lambda params: torchs(params, fused=True), 28),
        "fuser AdamW": (examples.AdamW, 28),
        "torch AdamW foreach": (lambda params: torchs(params, foreach=True), 28),
        "torch AdamW one by one": (lambda params: torchs(params, foreach=False, fused=False), 28),
        "fuser AdamW, bfloat16 moments": (lambda params: examples.AdamW(params, moments=torch.bfloat16), 20),
        "fuser Lion": (examples.Lion, 20),
    }


def load_example() -> Any:
    """Return the module examples/optimizers.py."""
    spec = importlib.util.spec_from_file_location("example_optimizers", ROOT.parent / "examples" / "optimizers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shapes(layers: int, width: int) -> list[tuple[int, ...]]:
    """Return the shapes of a GPT-2's parameters, 12 for each layer and 4 more."""
    layer: list[tuple[int, ...]] = [
        (width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,),
        (width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,),
    ]  # fmt: skip
    return [(50257, width), (1024, width), *layer * layers, (width,), (width,)]


if __name__ == "__main__":
    raise SystemExit(main())
