"""Reductions and groups built of them, against eager torch, Inductor, Triton and CuPy.

    python -m benchmarks.reductions                         # on the GPU if there is one; about 100 s
    python -m benchmarks.reductions --cases softmax argmax --peers eager fuser
    python -m benchmarks.reductions --quick                 # a smoke test

Writes benchmarks/results/reductions_DEVICE.json and a plot. Kernels are compiled first, by several processes, into the
caches of each peer. Then all of a case's contestants are checked against float64 and take turns; figures are medians,
as multiples of the speed of a device copy of the bytes that the pass must move. torch's functions go through
``fuser.fuse``; gradients are those of ``torch.autograd.grad``, once the forward pass has run.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor

import fuser
from benchmarks import timing
from benchmarks.environment import describe_environment
from benchmarks.reduction_cases import Case, cases
from benchmarks.report import BLUE, DARK, GREY, ORANGE, write_json
from benchmarks.sweep import describe, hide_paths, make_copy, wait_for
from fuser.config import config

RESULTS = Path(__file__).resolve().parent / "results"
SCHEMA = 2
# Bytes from which copies are as fast as memory, whatever their size.
LARGE = 1 << 27
# Peers, and their colours; "fuser fast" is fuser in fast numerics.
COLOURS = {
    "eager": GREY, "inductor": ORANGE, "triton": "#54a24b", "cupy": "#b279a2", "fuser": BLUE, "fuser fast": DARK,
}  # fmt: skip
PEERS = tuple(COLOURS)
Run = Callable[[], Any]
Record = dict[str, Any]


# --- peers -----------------------------------------------------------------------------------------------------------
def build(peer: str, case: Case, inputs: list[Any]) -> Run | None:
    """Return a peer's call; None if it has none for this case."""
    if peer in {"triton", "cupy"}:
        return triton_call(case, inputs) if peer == "triton" else cupy_call(case, inputs)
    function = case.function
    if peer == "inductor":
        torch.compiler.reset()
        # Its backward pass runs more than once.
        torch._functorch.config.donated_buffer = False
        function = torch.compile(case.function, dynamic=False)
    if peer.startswith("fuser"):
        config.numerics = "fast" if "fast" in peer else "strict"
        if case.group is not None:
            call = partial(fuser.run_fusion, fuser.register_fusion(case.group()), [*inputs, *case.numbers])
            return in_numerics(config.numerics, call)
        function = fuser.fuse(lambda *tensors: case.function(*tensors))
    run = differentiate(function, inputs) if case.is_backward else partial(function, *inputs)
    return in_numerics(config.numerics, run) if peer.startswith("fuser") else run


def in_numerics(numerics: Any, run: Run) -> Run:
    """Return the call as it is in these numerics: peers take turns, and no graph keeps what was set for one of them."""

    def run_so() -> Any:
        if config.numerics != numerics:
            config.numerics = numerics
        return run()

    return run_so


def differentiate(function: Callable[..., Any], inputs: Sequence[Any]) -> Run:
    """Return the call that makes the gradients of tensors, from gradients of what a function made of them."""
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    made = as_tuple(function(*leaves))
    torch.manual_seed(1)
    grads = [torch.randn_like(x) for x in made]
    wanted = [x for x in leaves if x.requires_grad]
    return lambda: torch.autograd.grad(made, wanted, grads, retain_graph=True)


def triton_call(case: Case, inputs: list[Any]) -> Run | None:
    """Return a hand-written kernel's call: one row per program, all of it in registers."""
    name = next((name for name in ("softmax", "sum") if case.name in {name, f"own {name}"}), None)
    if name is None or case.shape[-1] > 32768 or case.is_backward:
        return None
    from benchmarks import reductions_triton

    return partial(getattr(reductions_triton, name), inputs[0])


@cache
def cupy_kernel() -> Any:
    """Return CuPy's sum."""
    import cupy  # type: ignore[import-not-found]

    return cupy.ReductionKernel("T x", "T y", "x", "a + b", "y = a", "0", "total")


def cupy_call(case: Case, inputs: list[Any]) -> Run | None:
    """Return a ReductionKernel's call, on torch's stream."""
    axes = {"own sum": -1, "sum, rows of 8": -1, "own columns": 0, "own sum of all": None}
    if case.name not in axes or case.dtype is not torch.float32:
        return None
    import cupy

    kernel, x, axis = cupy_kernel(), cupy.from_dlpack(inputs[0]), axes[case.name]
    stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)

    def run() -> Any:
        with stream:
            return kernel(x, axis=axis)

    return run


# --- compiling -------------------------------------------------------------------------------------------------------
def chosen(names: Sequence[str] | None, *, is_quick: bool) -> list[Case]:
    """Return the cases whose description has one of the names in it; small ones for a smoke test."""
    found = [case for case in cases() if not names or any(name in str(case) for name in names)]
    if not is_quick:
        return found
    return [
        Case(case.name, tuple(min(size, 64) for size in case.shape), *(getattr(case, name) for name in _REST))
        for case in found
    ]


_REST = ("dtype", "function", "inputs", "group", "numbers", "is_backward")


def draw(case: Case, device: torch.device) -> list[Any]:
    """Return a case's tensors."""
    torch.manual_seed(0)
    return case.inputs(torch.randn(case.shape, device=device).to(case.dtype))


def prepare(number: int, names: Sequence[str] | None, peers: Sequence[str], device: str) -> None:
    """Run one case once, in a process of its own, which leaves its kernels in the caches."""
    case = chosen(names, is_quick=False)[number]
    inputs = draw(case, torch.device(device))
    for peer in peers:
        try:
            if (run := build(peer, case, inputs)) is not None:
                run()
        except Exception:  # Shown where it is measured.
            continue


def prepare_all(count: int, names: Sequence[str] | None, peers: Sequence[str], device: str, limit_s: float) -> None:
    """Compile for all cases side by side, for so many seconds at most."""
    compiled = [peer for peer in peers if peer not in {"eager", "cupy"}]
    # One case in each process: Inductor need not start more of them.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    context = multiprocessing.get_context("spawn")
    pool = futures.ProcessPoolExecutor(min(count, 12, os.cpu_count() or 1), mp_context=context)
    jobs = [pool.submit(prepare, number, names, compiled, device) for number in range(count)]
    done, late = futures.wait(jobs, timeout=limit_s)
    failed = [job.exception() for job in done if job.exception()]
    print(f"prepared {len(done) - len(failed)} of {count} cases{f', first failure: {failed[0]!r}' if failed else ''}")
    processes = list((pool._processes or {}).values())
    pool.shutdown(wait=not late, cancel_futures=True)
    for process in processes if late else ():
        process.kill()


# --- measuring -------------------------------------------------------------------------------------------------------
def measure(case: Case, peers: Sequence[str], device: torch.device, budget_s: float, rounds: int) -> Record:
    """Return a record of all peers on one case."""
    inputs, wait = draw(case, device), wait_for(device)
    made = as_tuple(case.function(*inputs))
    # A backward pass reads what the forward one read, and gradients, and writes others.
    gradients = [x for x in inputs if x.is_floating_point()] if case.is_backward else []
    moved = sum(x.nbytes for x in (*inputs, *made, *gradients))
    record: Record = {"case": str(case), "is_backward": case.is_backward, "bytes_moved": moved, "peers": {}}
    wanted: tuple[Tensor, ...] = ()
    try:
        wide = [x.double() if x.is_floating_point() else x for x in inputs]
        wanted = as_tuple(exact(case, wide))
    except RuntimeError as error:
        record["unchecked"] = hide_paths(describe(error))
    samplers: dict[str, timing.Sampler] = {}
    for peer in peers:
        try:
            run = build(peer, case, inputs)
            if run is None:
                continue
            made = as_tuple(run())
            wait(made)
            own: Record = {}
            if wanted and peer != "cupy":
                own["error_eps"] = round(error_of(made, wanted, case.dtype), 2)
            # What autograd runs is on the stream of the forward pass.
            is_captured = peer != "cupy" and not case.is_backward
            samplers[peer] = timing.make_sampler(run, wait, device, on_torch_stream=True, capturable=is_captured)
            record["peers"][peer] = own
        except Exception as error:  # A peer's failure is its own result.
            record["peers"][peer] = {"failed": hide_paths(describe(error))}
    medians = timing.take_turns(samplers, rounds, budget_s)
    record["copy_us"] = round(copy_time(moved, device, budget_s), 2)
    for name, median in medians.items():
        record["peers"][name] |= {"time_us": round(median, 2), "ratio_to_copy": round(record["copy_us"] / median, 3)}
        if "inductor" in medians and name != "inductor":
            record["peers"][name]["ratio_to_inductor"] = round(medians["inductor"] / median, 3)
    return record


def exact(case: Case, inputs: Sequence[Tensor]) -> Any:
    """Return what a case makes of tensors of float64, with gradients rounded as all peers have them."""
    if not case.is_backward:
        return case.function(*inputs)
    leaves = [x.requires_grad_(x.is_floating_point()) for x in inputs]
    made = as_tuple(case.function(*leaves))
    torch.manual_seed(1)
    grads = [torch.randn_like(x, dtype=case.dtype if x.dtype is torch.float64 else x.dtype).to(x.dtype) for x in made]
    return torch.autograd.grad(made, [x for x in leaves if x.requires_grad], grads)


def copy_time(moved: int, device: torch.device, budget_s: float) -> float:
    """Return the time of a copy: of several, since some places in memory are half as fast as others."""
    times, kept = [], []
    for _ in range(3):
        run = make_copy(moved, device)
        sampler = timing.make_sampler(run, wait_for(device), device, on_torch_stream=True, capturable=True)
        times.append(timing.Timing("", tuple(sampler.sample(budget_s))).median_us)
        # The next one is made elsewhere.
        kept.append(torch.empty(1 << 21, device=device))
    return min(times)


def as_tuple(made: Any) -> tuple[Tensor, ...]:
    """Return the tensors of a result."""
    return tuple(made) if isinstance(made, (tuple, list)) else (made,)


def error_of(made: Iterable[Tensor], wanted: Iterable[Tensor], dtype: torch.dtype) -> float:
    """Return the largest distance from float64, in eps of the dtype and of the largest value."""
    worst = 0.0
    for one, other in zip(made, wanted, strict=True):
        eps = torch.finfo(one.dtype if one.is_floating_point() else dtype).eps
        scale = max(other.abs().max().item(), 1e-30)
        worst = max(worst, (one.double().reshape(other.shape) - other).abs().max().item() / scale / eps)
    return worst


def settle_copies(records: Iterable[Record]) -> None:
    """Give every case the speed of the fastest copy: in some places of memory copies are slower by a third."""
    large = [item for item in records if item.get("copy_us") and item["bytes_moved"] > LARGE]
    if not large:
        return
    best = max(item["bytes_moved"] / item["copy_us"] for item in large)
    for record in large:
        record["copy_us"] = round(record["bytes_moved"] / best, 2)
        for item in record["peers"].values():
            if "time_us" in item:
                item["ratio_to_copy"] = round(record["copy_us"] / item["time_us"], 3)


def summarize(records: Iterable[Record]) -> Record:
    """Return geometric means of times against Inductor's, forward and backward, over the cases that both can run."""
    found: dict[str, list[float]] = {}
    for record in records:
        kind = "backward" if record["is_backward"] else "own" if record["case"].startswith("own") else "forward"
        for peer, item in record["peers"].items():
            if "ratio_to_inductor" in item:
                found.setdefault(f"{peer}, {kind}", []).append(item["ratio_to_inductor"])
    return {name: round(math.exp(sum(map(math.log, ratios)) / len(ratios)), 3) for name, ratios in found.items()}


def save_plot(records: list[Record], path: Path) -> None:
    """Draw a bar per peer and case."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    _, axes = plt.subplots(figsize=(9, 0.5 * len(records) + 1))
    named: set[str] = set()
    for row, record in enumerate(records):
        shown = [(peer, item["ratio_to_copy"]) for peer, item in record["peers"].items() if "ratio_to_copy" in item]
        for place, (peer, ratio) in enumerate(shown):
            label = None if peer in named else peer
            axes.barh(row + place * 0.15, ratio, 0.14, color=COLOURS[peer], label=label)
            named.add(peer)
    axes.set_yticks(range(len(records)), [record["case"] for record in records], fontsize=7)
    axes.axvline(1.0, color="black", linewidth=0.5)
    axes.invert_yaxis()
    axes.set_xlabel("times the speed of a copy of the bytes moved")
    axes.legend(fontsize=7)
    plt.tight_layout()
    plt.savefig(path, dpi=100)


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reductions")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", nargs="+", metavar="TEXT", help="parts of descriptions, such as 'softmax [1024'")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--budget", type=float, default=0.01, metavar="SECONDS", help="of a contestant's turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=95, metavar="SECONDS", help="no case begins after that")
    parser.add_argument("--quick", action="store_true", help="a smoke test: small shapes")
    parser.add_argument("--out", type=Path, metavar="JSON")
    options = parser.parse_args()
    began, device = time.monotonic(), torch.device(options.device)
    path = options.out or RESULTS / f"reductions_{device.type}.json"
    records: list[Record] = []
    document = {"schema": SCHEMA, "environment": describe_environment(device), "records": records}
    found = chosen(options.cases, is_quick=options.quick)
    if device.type == "cuda" and not options.quick:
        prepare_all(len(found), options.cases, options.peers, options.device, options.limit / 2)
    for case in found:
        if time.monotonic() - began > options.limit:
            print(f"no time for {case}")
            continue
        try:
            record = measure(case, options.peers, device, options.budget, options.rounds)
        except Exception as error:  # Such as a device without the memory.
            record = {"case": str(case), "is_backward": case.is_backward, "peers": {}, "failed": describe(error)}
        records.append(record)
        settle_copies(records)
        shown = [f"{peer} {item.get('ratio_to_copy', 'failed')}" for peer, item in record["peers"].items()]
        print(f"{record['case']:<48}{record.get('failed', '')}{'  '.join(shown)}", flush=True)
        document["times_of_inductor"] = summarize(records)
        write_json(document, path)
    for name, ratio in summarize(records).items():
        print(f"{name}: {ratio} x Inductor, geometric mean")
    try:
        save_plot(records, path.with_suffix(".png"))
    except ImportError as error:
        print(f"no plot: {error}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
