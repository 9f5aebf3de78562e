"""Run fuser and its peers on the same chains in one run, and write JSON and a plot."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import environment, report, sweep
from benchmarks.chains import CHAINS, SMALL_SIZES
from benchmarks.compile_time import measure_compile
from benchmarks.peers import PEERS

RESULTS = Path(__file__).resolve().parent / "results"
DEFAULT_SIZES = {"cpu": (2**24,), "cuda": (2**26,)}
QUICK_SIZES = (2**16,)
# Compiling for the CPU takes it longer than the rest of a quick run.
SLOW_TO_COMPILE = {"cpu": ("inductor",), "cuda": ()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print and write; return 1 if fuser itself is wrong or fails somewhere."""
    options = parse_options(argv)
    device = torch.device(options.device)
    settings = make_settings(options, device)
    path = options.out or RESULTS / default_name(environment.describe_environment(device))
    document: report.Document = {}
    for document in measure(settings, lambda line: print(f"... {line}", file=sys.stderr, flush=True)):
        # Each time something is complete: what a long run has measured must survive whatever ends it.
        report.write_json(document, path)
    report.print_tables(document)
    print(f"\nwritten: {path.name}", end="")
    if not options.no_plot:
        report.save_plot(document, path.with_suffix(".png"))
        print(f", {path.with_suffix('.png').name}", end="")
    print(f" in {path.parent.name}/")
    return 1 if has_own_failure(document) else 0


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default_device)
    parser.add_argument("--chain", nargs="+", choices=CHAINS, metavar="NAME", help=f"of {', '.join(CHAINS)}")
    parser.add_argument("--sizes", nargs="+", type=int, metavar="N", help="elements of a result")
    parser.add_argument("--peers", nargs="+", choices=PEERS, metavar="NAME", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--quick", action="store_true", help="a smoke test: small sizes, no compile times")
    parser.add_argument("--no-compile-times", action="store_true", help="start no process per peer to time compilers")
    parser.add_argument("--no-plot", action="store_true", help="write JSON only")
    parser.add_argument("--out", type=Path, metavar="JSON", help="default: benchmarks/results/DEVICE-DATE.json")
    return parser.parse_args(argv)


def make_settings(options: argparse.Namespace, device: torch.device) -> sweep.Settings:
    """Return what the command line asks for."""
    peers = sweep.expand_names(options.peers, PEERS)
    if options.quick and not options.peers:
        peers = tuple(name for name in peers if name not in SLOW_TO_COMPILE[device.type])
    return sweep.Settings(
        device=device,
        chains=sweep.expand_names(options.chain, CHAINS),
        sizes=tuple(options.sizes or (QUICK_SIZES if options.quick else DEFAULT_SIZES[device.type])),
        peers=peers,
        small_sizes=SMALL_SIZES if device.type == "cuda" and not (options.sizes or options.quick) else (),
        rounds=1 if options.quick else 3,
        budget_s=0.02 if options.quick else 0.25,
        compile_times=not (options.quick or options.no_compile_times),
    )


def measure(settings: sweep.Settings, say: sweep.Say) -> Iterator[report.Document]:
    """Yield the document of one run after each of its parts, the whole one last."""
    peers, absent = sweep.load_peers(settings)
    compiled: list[dict[str, Any]] = []
    document: report.Document = {
        "schema": report.SCHEMA,
        "environment": environment.describe_environment(settings.device),
        "settings": settings.to_json(),
        "absent": absent,
        "throughput": sweep.measure_throughput(settings, peers, absent, say),
        "host": [],
        "compile": compiled,
    }
    yield document
    document["host"] = sweep.measure_host(settings, peers, absent, say)
    yield document
    for name in settings.peers if settings.compile_times else ():
        say(f"{name}, compile time")
        result = {"status": "absent", "reason": absent[name]} if name in absent else None
        result = result or measure_compile(name, settings.device)
        compiled.append({"peer": name, **result})
    yield document


def default_name(described: dict[str, Any]) -> str:
    """Return a file name made of the device and the date of an environment."""
    device = re.sub(r"[^a-z0-9]+", "-", described["device"]["name"].lower()).strip("-")
    return f"{device}-{re.sub(r'[^0-9]', '', described['date'][:19])}.json"


def has_own_failure(document: report.Document) -> bool:
    """Whether one of fuser's own entries is wrong or failed: peers may, fuser may not."""
    records = [*document["throughput"], *document["host"], *document["compile"]]
    return any(record["peer"].startswith("fuser") and record["status"] in {"wrong", "failed"} for record in records)


if __name__ == "__main__":
    sys.exit(main())
