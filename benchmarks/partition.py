"""How long ``fuse_graph`` takes to group a graph and put fusion nodes into it, and how that grows with the graph.

    python -m benchmarks.partition

Prints the figures, writes JSON and a plot under benchmarks/results/, and returns 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import fx, nn
from torch._functorch.aot_autograd import aot_export_module
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import environment
from benchmarks.report import BLUE, DARK, GREY, ORANGE, Document, Record, write_json, write_suptitle
from fuser.fx import fuse_graph

RESULTS = Path(__file__).resolve().parent / "results" / "partition.json"
SCHEMA = 1
SIZES = (1000, 1250, 2500, 5000, 10_000)
LAYERS = (10, 20, 40)
# CPU seconds: up to 1,000 nodes, and up to 10,000.
TARGETS_S = {1000: 0.3, 10_000: 4.0}
TARGET_GROWTH = 2.2


def build_chain(count: int) -> fx.GraphModule:
    """Return a chain of ``count`` nodes that alternates a unary op with an addition of the one input."""
    return build(count, lambda graph, x, last, _: graph.call_function(torch.add, (last, x)))


def build_chain_with_writes(count: int) -> fx.GraphModule:
    """Return the same chain with a write in every tenth node."""

    def add(graph: fx.Graph, x: fx.Node, last: fx.Node, number: int) -> fx.Node:
        if number % 10 == 9:
            return graph.call_method("add_", (last, x))
        return graph.call_function(torch.add, (last, x))

    return build(count, add)


def build(count: int, add: Callable[[fx.Graph, fx.Node, fx.Node, int], fx.Node]) -> fx.GraphModule:
    """Return a chain of unary ops and, as every second node, what ``add`` makes."""
    graph = fx.Graph()
    last = x = graph.placeholder("x")
    for number in range(count):
        last = add(graph, x, last, number) if number % 2 else graph.call_function(torch.tanh, (last,))
    graph.output(last)
    return fx.GraphModule(nn.Module(), graph)


def build_fan(count: int) -> fx.GraphModule:
    """Return ``count`` nodes that all read the one input, and are all returned."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(tuple(graph.call_function(torch.mul, (x, float(number))) for number in range(count)))
    return fx.GraphModule(nn.Module(), graph)


class Block(nn.Module):
    """A layer of a transformer: normalised, rotated, masked attention, then a gated MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(width), torch.ones(width)])
        self.project, self.attended = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.up, self.down = (
            nn.Linear(width, 2 * width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after the layer."""
        query, key, value = self.project(normalise(x, self.scales[0])).chunk(3, -1)
        scores = rotate(query, cos, sin) @ rotate(key, cos, sin).transpose(-1, -2) * 0.125
        x = x + self.attended(torch.where(mask, scores, -1e9).softmax(-1) @ value)
        y = normalise(x, self.scales[1])
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def normalise(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return ``x`` divided by its root mean square."""
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * scale


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return ``x`` with rotary positions."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Transformer(nn.Module):
    """Layers and a loss."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor]:
        """Return the loss."""
        for block in self.blocks:
            x = block(x, *others)
        return ((x * x).mean(),)


def build_joint_graph(layers: int, width: int = 16, length: int = 8) -> fx.GraphModule:
    """Return the forward and backward pass of a transformer as AOTAutograd makes them, on fake tensors."""
    with FakeTensorMode():
        positions = torch.empty(length, width), torch.empty(length, width)
        arguments = torch.empty(2, length, width), *positions, torch.empty(length, length, dtype=torch.bool)
        return aot_export_module(Transformer(layers, width), arguments, trace_joint=True, output_loss_index=0)[0]


# What makes each graph, and how large. Each size but the first of the synthetic ones is twice the one before.
GRAPHS: dict[str, tuple[Callable[[int], fx.GraphModule], Sequence[int]]] = {
    "chain": (build_chain, SIZES),
    "fan": (build_fan, SIZES),
    "chain with writes": (build_chain_with_writes, SIZES),
    "joint graph of a transformer": (build_joint_graph, LAYERS),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, report, and return 1 when a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.partition", description=__doc__)
    parser.add_argument("--runs", type=int, default=7, help="of each size, the fastest counts (default 7)")
    parser.add_argument("--quick", action="store_true", help="a smoke test: graphs a tenth as large")
    parser.add_argument("--no-plot", action="store_true", help="write JSON only")
    parser.add_argument("--out", type=Path, metavar="JSON", default=RESULTS)
    options = parser.parse_args(argv)
    records: list[Record] = []
    document: Document = {
        "schema": SCHEMA,
        "environment": environment.describe_environment(torch.device("cpu")),
        "settings": {"runs": options.runs, "targets_s": TARGETS_S, "target_growth": TARGET_GROWTH},
        "records": records,
    }
    fuse_graph(build_chain(10))  # what happens once
    for name, (build_graph, sizes) in GRAPHS.items():
        modules = [build_graph(size // 10 if options.quick else size) for size in sizes]
        for record in measure(name, modules, options.runs):
            records.append(record)
            print(record_text(record), flush=True)
        write_json(document, options.out)
    if not options.no_plot:
        save_plot(document, options.out.with_suffix(".png"))
    return 0 if all(record["is_within_targets"] for record in records) else 1


def measure(name: str, modules: Sequence[fx.GraphModule], runs: int) -> Iterator[Record]:
    """Yield the record of each graph; its growth is that since the graph of half the size, if there is one.

    The sizes take turns, and the fastest run of each counts: a spell in which the machine is slow meets all of them.
    """
    times = [{key: list[float]() for key in MODES} for _ in modules]
    for _ in range(runs):
        for module, samples in zip(modules, times, strict=True):
            for key, is_collecting in MODES.items():
                samples[key].append(time_s(module, is_collecting))
    fastest: dict[int, float] = {}
    for module, samples in zip(modules, times, strict=True):
        nodes = len(module.graph.nodes)
        fastest[nodes] = min(samples["cpu_s"])
        half = next((count for count in fastest if abs(2 * count / nodes - 1) < 0.02), None)
        growth = round(fastest[nodes] / fastest[half] / (nodes / half) * 2, 3) if half else None
        limit = next((seconds for size, seconds in TARGETS_S.items() if nodes <= size * 1.01), None)
        is_fast = limit is None or min(samples["cpu_with_gc_s"]) <= limit
        yield {
            "graph": name,
            "nodes": nodes,
            **{key: round(min(found), 4) for key, found in samples.items()},
            "samples_s": {key: [round(sample, 4) for sample in found] for key, found in samples.items()},
            "growth": growth,
            "is_within_targets": is_fast and (growth is None or growth <= TARGET_GROWTH),
        }


# The garbage collector's full rounds depend on what else is in memory, and come at some sizes and not at others.
MODES = {"cpu_s": False, "cpu_with_gc_s": True}


def time_s(module: fx.GraphModule, is_collecting: bool) -> float:
    """Return the CPU seconds of this process that ``fuse_graph`` takes on a copy of a graph."""
    fresh = fx.GraphModule(module, copy.deepcopy(module.graph))
    gc.collect()
    if not is_collecting:
        gc.disable()
    try:
        began = time.process_time()
        fuse_graph(fresh)
        return time.process_time() - began
    finally:
        gc.enable()


def record_text(record: Record) -> str:
    """Return one line of the table."""
    growth = "" if record["growth"] is None else f"   {record['growth']:.2f} x for twice the nodes"
    missed = "" if record["is_within_targets"] else "   target missed"
    with_gc = f"{record['cpu_with_gc_s']:7.3f} s with the garbage collector"
    return f"{record['graph']:<30} {record['nodes']:>6} nodes {record['cpu_s']:7.3f} s   {with_gc}{growth}{missed}"


def save_plot(document: Document, path: Path) -> None:
    """Draw the time over the number of nodes, with a line for time in proportion to it."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 5), layout="constrained")
    for name, colour in zip(GRAPHS, (ORANGE, BLUE, GREY, DARK), strict=True):
        records = [record for record in document["records"] if record["graph"] == name]
        counts = [record["nodes"] for record in records]
        axis.plot(counts, [record["cpu_with_gc_s"] for record in records], marker="o", color=colour, label=name)
    ends = sorted(TARGETS_S)
    axis.plot(ends, [TARGETS_S[end] for end in ends], color=DARK, linestyle="--", linewidth=1, label="target")
    axis.set(xscale="log", yscale="log", xlabel="nodes of the graph", ylabel="CPU seconds of fuse_graph")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=9)
    write_suptitle(figure, document["environment"])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
