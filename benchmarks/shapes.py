"""Reductions of the shapes that models have: odd rows, narrow columns, small planes, few channels.

    python -m benchmarks.shapes                                   # on one GPU; about 5 minutes
    python -m benchmarks.shapes --gpus 8 --seconds 120
    python -m benchmarks.shapes --case "softmax [64, 12" --peers eager fuser

Writes benchmarks/results/shapes_DEVICE.json: for each case and contestant how long one call keeps the GPU busy (by
torch.profiler: much takes less than the host needs to launch it), with how many kernels, and whether the result has
eager torch's bits. ``benchmarks.reductions`` has shapes that fill a GPU, this one those where something is left over.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from benchmarks import reduction_cases as rc
from benchmarks import timing
from benchmarks.apart import ROOT
from benchmarks.environment import describe_environment
from benchmarks.reduction_cases import BF16, F32, Case
from benchmarks.reductions import as_tuple, build, draw
from benchmarks.report import write_json
from benchmarks.sweep import describe, hide_paths

RESULTS = Path(__file__).resolve().parent / "results"
SCHEMA = 1
PEERS = ("eager", "fuser", "fuser fast", "inductor")
CALLS, TURNS = 6, 2

Record = dict[str, Any]
Shape = tuple[int, ...]


# --- cases -----------------------------------------------------------------------------------------------------------
def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Return that of scaled scores."""
    return torch.softmax(x * 0.125, dim)


def masked_softmax(x: Tensor, mask: Tensor) -> Tensor:
    """Return that of scaled scores with a bias of positions."""
    return torch.softmax(x * 0.125 + mask, -1)


def with_mask(x: Tensor) -> list[Tensor]:
    """Return scores and a bias."""
    return [x, torch.randn_like(x[:1, :1])]


def pooled(x: Tensor) -> Tensor:
    """Return the mean of each channel."""
    return torch.relu(x).mean((2, 3))


def excited(x: Tensor) -> Tensor:
    """Return channels weighted by their means."""
    return x * torch.sigmoid(x.mean((2, 3), keepdim=True))


def flat(x: Tensor) -> list[Tensor]:
    """Return images with a pixel's channels side by side."""
    return [x.to(memory_format=torch.channels_last)]


def doubled(name: str, dim: int | tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """Return a reduction of what is computed."""
    return lambda x: getattr(x * 2, name)(dim)


def rows() -> Iterator[tuple[str, Shape, Callable[..., Any], Callable[[Tensor], list[Tensor]]]]:
    """Yield what reduces rows."""
    shape: Shape
    for shape in ((8192, 96), (25088, 192), (12608, 768), (16384, 1280), (8192, 5120), (4096, 3072), (12608, 386)):
        yield "layer_norm", shape, rc.layer_norm, rc.with_rows
    for shape in ((131072, 64), (8192, 2304), (16384, 896)):
        yield "rms_norm", shape, rc.rms_norm, rc.with_row
        yield "rms_norm (spelled out)", shape, rc.spelled_rms_norm, rc.with_row
    for shape in ((64, 12, 197, 197), (2048, 8, 49, 49), (64, 8, 77, 77), (16, 8, 256, 1500), (128, 8, 100, 333)):
        yield "softmax", shape, softmax, rc.alone
        yield "softmax with a bias", shape, masked_softmax, with_mask
    yield "softmax of classes", (32, 21, 256, 256), partial(softmax, dim=1), rc.alone
    yield "softmax of tokens", (64, 197, 768), partial(softmax, dim=1), rc.alone
    for shape in ((4096, 50257), (8192, 1000), (4096, 32128)):
        yield "cross_entropy", shape, functional.cross_entropy, rc.with_classes
    yield "logsumexp", (64, 12, 197, 197), partial(torch.logsumexp, dim=-1), rc.alone
    yield "normalize", (64, 256, 56, 56), partial(functional.normalize, dim=1), rc.alone
    yield "std", (12608, 768), partial(torch.std, dim=-1), rc.alone


def channels() -> Iterator[tuple[str, Shape, Callable[..., Any], Callable[[Tensor], list[Tensor]]]]:
    """Yield what reduces images."""
    shape: Shape
    for shape in ((64, 256, 56, 56), (64, 64, 112, 112), (64, 512, 28, 28), (64, 1024, 14, 14), (64, 2048, 7, 7)):
        yield "batch_norm + relu", shape, rc.batch_norm_relu, rc.with_channels
        yield "batch_norm + relu, channels_last", shape, rc.batch_norm_relu, rc.channels_last
    for shape in ((8, 320, 64, 64), (8, 640, 32, 32), (8, 1280, 16, 16), (4, 128, 256, 256)):
        yield "group_norm + silu", shape, rc.group_norm_silu, rc.with_channels
    for shape in ((64, 768, 14, 14), (64, 2048, 7, 7), (64, 96, 112, 112)):
        yield "mean of channels", shape, pooled, rc.alone
        yield "mean of channels, channels_last", shape, pooled, flat
        yield "squeeze and excite", shape, excited, rc.alone


def columns() -> Iterator[tuple[str, Shape, Callable[..., Any]]]:
    """Yield what is measured forward alone."""
    shape: Shape
    for shape in ((12608, 768), (12608, 3072), (65536, 96), (8192, 50257), (2048, 2049), (300000, 17), (1000, 1000)):
        yield "sum of columns", shape, doubled("sum", 0)
    for shape in ((64, 197, 768), (300, 257, 129), (10000, 64, 4), (100000, 16, 4), (100000, 10, 3)):
        for name in ("sum", "amax"):
            yield f"{name} of the middle", shape, doubled(name, 1)
    yield "argmax of classes", (8, 21, 256, 256), doubled("argmax", 1)
    yield "sum of all but channels", (64, 256, 56, 56), doubled("sum", (0, 2, 3))
    yield "cumsum of rows", (4096, 4096), doubled("cumsum", -1)
    yield "cumsum of tokens", (64, 197, 768), doubled("cumsum", 1)


def find_cases() -> list[Case]:
    """Return the cases, forward and backward, in the dtypes that models have."""
    found = []
    for dtype in (BF16, F32):
        for name, shape, function, inputs in (*rows(), *channels()):
            if dtype is F32 and "batch_norm" in name:
                # cuDNN's in eager torch, which stay its own.
                continue
            found.append(Case(name, shape, dtype, function, inputs))
            found.append(Case(f"{name}, backward", shape, dtype, function, inputs, is_backward=True))
        found += [Case(name, shape, dtype, function) for name, shape, function in columns()]
    return found


# --- measuring -------------------------------------------------------------------------------------------------------
def measure(case: Case, peers: Sequence[str], device: torch.device) -> Record:
    """Return a record of all peers on one case."""
    inputs = draw(case, device)
    record: Record = {"case": str(case), "is_backward": case.is_backward, "peers": {}}
    runs: dict[str, Callable[[], Any]] = {}
    wanted: tuple[Tensor, ...] = ()
    for peer in peers:
        try:
            run = build(peer, case, inputs)
            assert run is not None, "all have one"
            made = as_tuple(run())
            own: Record = {}
            if peer == "eager":
                wanted = made
            elif peer == "fuser":
                own["equal"] = all(map(torch.equal, made, wanted))
            run(), run()
            runs[peer], record["peers"][peer] = run, own
        except Exception as error:  # A peer's failure is its own result.
            record["peers"][peer] = {"failed": hide_paths(describe(error))}
    taken = [{peer: time_kernels(run) for peer, run in runs.items()} for _ in range(TURNS)]
    for peer, own in record["peers"].items():
        if peer in runs:
            own["gpu_us"], own["launches"] = min(turn[peer] for turn in taken)
    return record


def time_kernels(run: Callable[[], Any]) -> tuple[float, float]:
    """Return how long a call keeps the GPU busy in microseconds, and with how many kernels."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(CALLS):
            run()
        torch.cuda.synchronize()
    busy, count = timing.busy_time(profiler)
    return round(busy / CALLS, 2), round(count / CALLS, 1)


def summarize(records: Sequence[Record]) -> Record:
    """Return for each contestant against eager torch and Inductor the geometric mean of times, and the slowest."""
    found: Record = {}
    for peer in PEERS[1:]:
        for other in ("eager", "inductor"):
            pairs = [(item["peers"].get(peer, {}), item["peers"].get(other, {}), item["case"]) for item in records]
            ratios = [(a["gpu_us"] / b["gpu_us"], name) for a, b, name in pairs if a.get("gpu_us") and b.get("gpu_us")]
            if peer != other and ratios:
                mean = math.exp(sum(math.log(ratio) for ratio, _ in ratios) / len(ratios))
                slowest = [f"{name}: {ratio:.2f}" for ratio, name in sorted(ratios, reverse=True)[:8] if ratio > 1]
                found[f"{peer} by {other}"] = {"mean": round(mean, 3), "cases": len(ratios), "slowest": slowest}
    found["not equal"] = [item["case"] for item in records if item["peers"].get("fuser", {}).get("equal") is False]
    return found


def spread(gpus: int, arguments: Sequence[str]) -> list[Record]:
    """Measure in a process for each GPU; return all records, in the order of the cases."""
    with tempfile.TemporaryDirectory() as folder:
        parts = [Path(folder) / f"{number}.json" for number in range(gpus)]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
        command = [sys.executable, "-m", "benchmarks.shapes", *arguments]
        processes = [
            subprocess.Popen(
                [*command, "--part", f"{number}/{gpus}", "--out", str(part)],
                cwd=ROOT,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": visible.split(",")[number]},
            )
            for number, part in enumerate(parts)
        ]
        for process in processes:
            process.wait()
        found = [item for part in parts if part.exists() for item in json.loads(part.read_text())["records"]]
    places = {str(case): place for place, case in enumerate(find_cases())}
    return sorted(found, key=lambda item: places[item["case"]])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shapes", description=__doc__)
    parser.add_argument("--case", nargs="+", default=[""], metavar="TEXT", help="parts of descriptions")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=600.0, help="no case begins after that")
    parser.add_argument("--part", default="0/1", metavar="K/N", help="every N-th case from the K-th on")
    parser.add_argument("--out", type=Path, metavar="JSON")
    options = parser.parse_args(arguments)
    began, device = time.monotonic(), torch.device("cuda")
    path = options.out or RESULTS / "shapes_cuda.json"
    records: list[Record] = []
    if options.gpus > 1:
        given = ["--case", *options.case, "--peers", *options.peers, "--seconds", str(options.seconds)]
        records = spread(options.gpus, given)
    else:
        part, parts = map(int, options.part.split("/"))
        cases = [case for case in find_cases() if any(text in str(case) for text in options.case)]
        for case in cases[part::parts]:
            if time.monotonic() - began > options.seconds:
                print(f"no time for {case}", flush=True)
                continue
            records.append(measure(case, options.peers, device))
            shown = [f"{peer} {item.get('gpu_us', 'failed')}" for peer, item in records[-1]["peers"].items()]
            print(f"{records[-1]['case']:<64}{'  '.join(shown)}", flush=True)
    document = {"schema": SCHEMA, "environment": describe_environment(device), "summary": summarize(records)}
    write_json(document | {"records": records}, path)
    print(json.dumps(document["summary"], indent=1))


if __name__ == "__main__":
    main()
