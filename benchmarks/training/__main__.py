"""Measure the forward and backward passes of fuser and its peers in one run, and write JSON and a plot."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import environment
from benchmarks.report import Document, write_json
from benchmarks.sweep import Say, expand_names
from benchmarks.training import measure, report
from benchmarks.training.chains import CHAINS, DTYPES
from benchmarks.training.contestants import CONTESTANTS, HOST_CONTESTANTS

RESULTS = Path(__file__).resolve().parent.parent / "results"
DEFAULT_ELEMENTS = {"cpu": 2**22, "cuda": 2**26}
QUICK_ELEMENTS = 2**14
# Compiling for the CPU takes it longer than the rest of a quick run.
SLOW_TO_COMPILE = {"cpu": ("inductor",), "cuda": ()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print and write; return 1 if fuser itself is wrong or fails somewhere."""
    options = parse_options(argv)
    device = torch.device(options.device)
    settings = make_settings(options, device)
    path = options.out or RESULTS / default_name(environment.describe_device(device), options.quick)
    document: Document = {}
    for document in run(settings, lambda line: print(f"... {line}", file=sys.stderr, flush=True)):
        # Each time something is complete: what a long run has measured must survive whatever ends it.
        write_json(document, path)
    report.print_tables(document)
    print(f"\nwritten: {path.name}", end="")
    if not options.no_plot:
        report.save_plot(document, path.with_suffix(".png"))
        print(f", {path.with_suffix('.png').name}", end="")
    print(f" in {path.parent.name}/")
    return 1 if has_own_failure(document) else 0


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    peers = tuple(dict.fromkeys((*CONTESTANTS, *HOST_CONTESTANTS)))
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default_device)
    parser.add_argument("--chain", nargs="+", choices=CHAINS, metavar="NAME", help=f"of {', '.join(CHAINS)}")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, metavar="NAME", help=f"of {', '.join(DTYPES)}")
    parser.add_argument("--size", type=int, metavar="N", help="elements of a tensor")
    parser.add_argument("--peers", nargs="+", choices=peers, metavar="NAME", help=f"of {', '.join(peers)}")
    parser.add_argument("--quick", action="store_true", help="a smoke test: small tensors, little time")
    parser.add_argument("--no-plot", action="store_true", help="write JSON only")
    parser.add_argument("--out", type=Path, metavar="JSON", help="default: benchmarks/results/training_DEVICE.json")
    return parser.parse_args(argv)


def make_settings(options: argparse.Namespace, device: torch.device) -> measure.Settings:
    """Return what the command line asks for."""
    left_out = SLOW_TO_COMPILE[device.type] if options.quick and not options.peers else ()
    peers = [name for name in expand_names(options.peers, (*CONTESTANTS, *HOST_CONTESTANTS)) if name not in left_out]
    chosen = measure.Settings(
        device=device,
        chains=expand_names(options.chain, CHAINS),
        dtypes=expand_names(options.dtype, DTYPES),
        elements=options.size or (QUICK_ELEMENTS if options.quick else DEFAULT_ELEMENTS[device.type]),
        contestants=tuple(name for name in CONTESTANTS if name in peers),
        # What the others are held against is always there.
        host_contestants=tuple(name for name in HOST_CONTESTANTS if name in peers or name == "eager_mul"),
    )
    return chosen.shorten() if options.quick else chosen


def run(settings: measure.Settings, say: Say) -> Iterator[Document]:
    """Yield the document of one run after each of its parts, the whole one last."""
    records: list[dict[str, Any]] = []
    document: Document = {
        "schema": report.SCHEMA,
        "environment": environment.describe_environment(settings.device),
        "settings": settings.to_json(),
        "throughput": records,
        "host": [],
    }
    # First: a long run of large tensors leaves a machine warm, and its allocator full.
    document["host"] = measure.measure_host(settings, say)
    yield document
    for point in measure.measure_throughput(settings, say):
        records += point
        yield document


def default_name(device: dict[str, Any], quick: bool) -> str:
    """Return a file name made of the device: ``training_cpu.json``, ``training_h200.json``."""
    name = "cpu" if device["type"] == "cpu" else device["name"].lower().removeprefix("nvidia")
    slug = re.sub(r"[^a-z0-9]+", "-", name).strip("-")
    return f"training_{slug}{'_quick' if quick else ''}.json"


def has_own_failure(document: Document) -> bool:
    """Whether one of fuser's own entries is wrong or failed: peers may, fuser may not."""
    records = [*document["throughput"], *document["host"]]
    return any(record["peer"].startswith("fuser") and record["status"] != "ok" for record in records)


if __name__ == "__main__":
    sys.exit(main())
