"""Training steps of whole models: time, memory, compile time, launches and bits, under several backends.

    python -m benchmarks.models                              # all models in bfloat16, on the GPU if there is one
    python -m benchmarks.models --model llama resnet50 --contestant eager fuser --seconds 60
    python -m benchmarks.models --size small                 # small sizes: the host's time
    python -m benchmarks.models --bits --dtype float32 bfloat16   # small sizes, every bit against aot_eager's
    python -m benchmarks.models --caches DIR --alone cold    # the first step, of each in a process of its own
    python -m benchmarks.models --caches DIR --alone warm    # once more, with the caches of that run
    python -m benchmarks.models --merge part1.json part2.json --out benchmarks/results/models_h200.json

A step is forward, loss and backward; the optimizer is not part of it. What a file holds already is not measured again,
so that a run that was cut short goes on, and parts from several runs become one file (``--merge``).
Processes that share a GPU take turns (``--turns FILE``): all compile side by side, then one at a time is timed;
``benchmarks.models_spread`` starts a process for each model.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import fcntl
import gc
import json
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fuser
from benchmarks import timing
from benchmarks.environment import describe_environment
from benchmarks.model_cases import CASES
from benchmarks.report import write_json
from benchmarks.sweep import hide_paths

RESULTS = Path(__file__).resolve().parent / "results"
SCHEMA = 2
GIB = 1 << 30

Record = dict[str, Any]

# How each contestant compiles a model; None: not at all. Those with CUDA graphs have their memory in pools.
CONTESTANTS: dict[str, Mapping[str, Any] | None] = {
    "eager": None,
    # What any compiler's first step has in it: Dynamo's part, and with AOTAutograd's without a cache.
    "dynamo": {"backend": "eager"},
    "aot_eager": {"backend": "aot_eager"},
    "fuser": {"backend": "fuser"},
    "fuser fast": {"backend": "fuser", "options": {"numerics": "fast"}},
    "fuser graphs": {"backend": "fuser", "options": {"cuda_graphs": True}},
    "inductor": {"backend": "inductor"},
    "inductor graphs": {"backend": "inductor", "mode": "reduce-overhead"},
}
USUAL = ("eager", "fuser", "fuser fast", "fuser graphs", "inductor", "inductor graphs")
# Whose caches on disk matter.
COMPILERS = ("dynamo", "fuser", "inductor")


class Runner:
    """A copy of a model under one contestant, and what its steps cost."""

    def __init__(self, model: nn.Module, inputs: Mapping[str, torch.Tensor], contestant: str) -> None:
        self.own = copy.deepcopy(model)
        self.inputs = inputs
        self.device = next(iter(inputs.values())).device
        self.has_pool = contestant.endswith("graphs")
        how = CONTESTANTS[contestant]
        self.called: Any = self.own if how is None else torch.compile(self.own, **how)

    def step(self) -> torch.Tensor:
        """Run forward, loss and backward; returns the output."""
        torch.compiler.cudagraph_mark_step_begin()
        result = self.called(**self.inputs)
        output: torch.Tensor = result if isinstance(result, torch.Tensor) else result.logits
        output.float().square().mean().backward()
        return output

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def compile(self) -> Record:
        """Run the first steps."""
        began = time.perf_counter()
        self.step()
        self.wait()
        first = time.perf_counter() - began
        for _ in range(3):
            self.own.zero_grad(set_to_none=True)
            self.step()
        self.own.zero_grad(set_to_none=True)
        self.wait()
        return {"first_step_s": round(first, 2)}

    def measure(self, steps: int) -> Record:
        """Time steps, the device's time of one, and the most memory that one takes."""
        record: Record = {}
        samples = []
        self._fresh_step()
        if self.device.type == "cuda":
            gc.collect()
            self.own.zero_grad(set_to_none=True)
            self.wait()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self._fresh_step()
            if not self.has_pool:
                kept = sum(item.nbytes for item in (*self.own.parameters(), *self.own.buffers()))
                record["peak_gib"] = round((torch.cuda.max_memory_allocated() - before + kept) / GIB, 3)
        for _ in range(steps):
            began = time.perf_counter()
            self._fresh_step()
            samples.append(1e3 * (time.perf_counter() - began))
        record["wall_ms"] = round(statistics.median(samples), 3)
        if self.device.type == "cuda":
            # Other work on the machine can only add to it.
            record["gpu_ms"], record["launches"] = min(self._profile_step() for _ in range(3))
        self.own.zero_grad(set_to_none=True)
        return record

    def _profile_step(self) -> tuple[float, int]:
        # Milliseconds in which a step has something to do on the GPU, and how many kernels, copies and fills.
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            self._fresh_step()
        busy, count = timing.busy_time(profiler)
        return round(busy / 1e3, 3), count

    def _fresh_step(self) -> None:
        self.own.zero_grad(set_to_none=True)
        self.step()
        self.wait()


def make_model(name: str, dtype: torch.dtype, device: torch.device, *, is_small: bool) -> tuple[nn.Module, Any]:
    """Return a model in training and its arguments."""
    case = CASES[name]
    torch.manual_seed(0)
    layout = {"memory_format": torch.channels_last} if case.channels_last else {}
    with device:
        # Where drawing weights takes no time.
        model = case.make(is_small)
    model = model.to(device, dtype, **layout).train()
    inputs = {
        key: value.to(device, dtype, **layout) if value.is_floating_point() else value.to(device)
        for key, value in case.draw(is_small).items()
    }
    return model, inputs


def measure_model(name: str, dtype: torch.dtype, records: Record, options: argparse.Namespace) -> Iterator[None]:
    """Compile a model under each contestant, then time one after the other; yields when there is a new record.

    What fails is a record, too. Inductor comes last: it compiles for the longest time.
    """
    device = find_device()
    with turn(options.turns, fcntl.LOCK_SH):
        model, inputs = make_model(name, dtype, device, is_small=options.size == "small")
        if device.type == "cuda":
            # The first time takes seconds.
            with profile(activities=[ProfilerActivity.CUDA]):
                torch.cuda.synchronize()
        prepare(model, inputs)
    missing = [item for item in options.contestant if not {"wall_ms", "error"} & {*records.get(item, ())}]
    for is_inductor in (False, True):
        runners: dict[str, Runner] = {}
        # Once for all of them: what is forgotten would be compiled again where it is timed.
        torch._dynamo.reset()
        with turn(options.turns, fcntl.LOCK_SH):
            for contestant in missing:
                if contestant.startswith("inductor") == is_inductor:
                    runners[contestant] = runner = Runner(model, inputs, contestant)
                    records[contestant] = attempt(runner.compile)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        with turn(options.turns, fcntl.LOCK_EX):
            for contestant, runner in runners.items():
                if "error" not in records[contestant]:
                    records[contestant] |= attempt(partial(runner.measure, options.steps))
                print(f"{name:12} {options.size:5} {contestant:16} {records[contestant]}", flush=True)
                yield


def measure_alone(name: str, dtype: torch.dtype, records: Record, options: argparse.Namespace) -> Iterator[None]:
    """Compile a model in a process of its own, with the caches on disk as they are; yields at each new record."""
    for contestant in (item for item in COMPILERS if item in options.contestant):
        with turn(options.turns, fcntl.LOCK_SH), multiprocessing.get_context("spawn").Pool(1) as pool:
            arguments = (name, dtype, contestant, options.size == "small", fuser.config.cache_dir)
            found = attempt(partial(pool.apply, compile_alone, arguments))
        records.setdefault(contestant, {})[f"{options.alone}_step_s"] = found.get("first_step_s")
        print(f"{name:12} {options.size:5} {contestant:16} {options.alone} {found}", flush=True)
        yield


def compile_alone(name: str, dtype: torch.dtype, contestant: str, is_small: bool, cache_dir: str) -> Record:
    """Compile a model as the first contestant of a process."""
    fuser.config.cache_dir = cache_dir
    model, inputs = make_model(name, dtype, find_device(), is_small=is_small)
    prepare(model, inputs)
    return attempt(Runner(model, inputs, contestant).compile)


def prepare(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> None:
    """Let happen what happens once in a process, whoever compiles: the device's libraries and Dynamo are loaded."""
    Runner(model, inputs, "eager").compile()
    x = torch.ones(8, device=find_device(), requires_grad=True)
    torch.compile(torch.sin, backend="aot_eager")(x).sum().backward()
    torch._dynamo.reset()
    # All contestants compile the same functions: beyond the usual number of them one would run without its backend.
    torch._dynamo.config.recompile_limit = 256


def attempt(work: Callable[[], Record]) -> Record:
    """Return what work returns, or what it raised."""
    try:
        return work()
    except Exception as error:  # whatever a peer raises
        return {"error": hide_paths(f"{type(error).__name__}: {error}")[:600]}


@contextlib.contextmanager
def turn(path: Path | None, kind: int) -> Iterator[None]:
    """Hold a lock, shared while compiling, alone while timing; who waits to be alone comes before who compiles next."""
    if path is None:
        yield
        return
    with path.open("a") as file:
        with path.with_suffix(".gate").open("a") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            fcntl.flock(file, kind)
        yield


def compare_bits(name: str, dtype: torch.dtype) -> Record:
    """Compare output, gradients and buffers of a training step, and an evaluation, with aot_eager's or eager torch's.

    Those of the two that more tensors are equal to: where a model makes attention masks under ``torch.compile`` alone,
    it is eager torch. Where torch's own kernels have not the same bits in each run, ``unsteady`` counts what differs
    between two runs of aot_eager; ``from_eager`` counts what differs between aot_eager and eager torch.
    """
    model, inputs = make_model(name, dtype, find_device(), is_small=True)
    found = {contestant: run_once(model, inputs, contestant) for contestant in ("aot_eager", "eager", "fuser")}
    wanted = found["aot_eager"]
    again = run_once(model, inputs, "aot_eager")
    differ = min((count_differing(found["fuser"], found[name]) for name in ("aot_eager", "eager")), key=len)
    record: Record = {
        "tensors": len(wanted),
        "differ": len(differ),
        "unsteady": len(count_differing(again, wanted)),
        "from_eager": len(count_differing(found["eager"], wanted)),
    }
    return record | ({"names": differ[:4]} if differ else {})


def run_once(model: nn.Module, inputs: Mapping[str, torch.Tensor], contestant: str) -> dict[str, torch.Tensor]:
    """Return what a step and an evaluation leave, by name."""
    torch._dynamo.reset()
    runner = Runner(model, inputs, contestant)
    with deterministic():
        torch.manual_seed(1)
        found = {"output": runner.step().detach()}
        found |= {f"grad {name}": item.grad for name, item in runner.own.named_parameters() if item.grad is not None}
        found |= {name: item.detach() for name, item in runner.own.named_buffers()}
        runner.own.eval()
        with torch.no_grad():
            result = runner.called(**inputs)
        found["evaluation"] = result if isinstance(result, torch.Tensor) else result.logits
    return found


def count_differing(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of the tensors whose bits differ; one NaN is like another."""
    return [name for name, value in wanted.items() if name not in found or not same_bits(found[name], value)]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same, signs of zeros included."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    equal = torch.equal(one.nan_to_num(0.0), other.nan_to_num(0.0)) and torch.equal(one.isnan(), other.isnan())
    return equal and (
        not one.is_floating_point() or torch.equal(one.signbit() & (one == 0), other.signbit() & (other == 0))
    )


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Let torch choose kernels that have the same bits in each run."""
    cudnn = torch.backends.cudnn
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        # Not by assignment: torch's test utilities freeze the flags. Those not named would become flags()'s own.
        with cudnn.flags(cudnn.enabled, cudnn.benchmark, cudnn.benchmark_limit, True, cudnn.allow_tf32):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def find_device() -> torch.device:
    """Return the GPU, or the CPU where there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, print a line for each model and contestant, and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__)
    parser.add_argument("--model", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--contestant", nargs="+", choices=CONTESTANTS, default=list(USUAL))
    parser.add_argument("--dtype", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16"])
    parser.add_argument("--size", choices=("real", "small"), default="real")
    parser.add_argument("--bits", action="store_true", help="compare with aot_eager in small sizes, in place of timing")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no model after so long")
    parser.add_argument("--turns", type=Path, help="a file by which processes take turns")
    parser.add_argument("--caches", type=Path, help="where compilers keep what they made; not given: nowhere")
    parser.add_argument("--alone", choices=("cold", "warm"), help="time first steps alone, with what is in --caches")
    parser.add_argument("--merge", nargs="+", type=Path, help="make one file of several")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    environment = describe_environment(find_device())
    name = environment["device"]["name"].split()[-1].lower() if torch.cuda.is_available() else "cpu"
    path = options.out or RESULTS / f"models_{name}.json"
    document = read_document(path) or {"schema": SCHEMA, "environment": environment, "records": {}}
    if options.merge:
        for part in options.merge:
            merge_into(document, read_document(part))
        write_json(document, path)
        print(summarize(document["records"]))
        return
    # cuBLAS has the same bits in each run with this.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        caches = options.caches or Path(folder)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(caches / "inductor")
        os.environ["TRITON_CACHE_DIR"] = str(caches / "triton")
        os.environ["CUDA_CACHE_PATH"] = str(caches / "cuda")
        fuser.config.cache_dir = str(caches / "fuser")
        for model in options.model:
            for dtype in options.dtype:
                if time.perf_counter() - began < options.seconds:
                    for _ in add_records(document, model, dtype, options):
                        write_json(document, path)


def add_records(document: Record, model: str, dtype: str, options: argparse.Namespace) -> Iterator[None]:
    """Measure what the document does not hold yet of a model; yields when there is more."""
    key = f"{model} {dtype}" + (" small" if options.size == "small" else "")
    records = document["records"].setdefault(key, {})
    if not options.bits:
        measure = measure_alone if options.alone else measure_model
        yield from measure(model, getattr(torch, dtype), records, options)
    elif "tensors" not in records.get("bits", ()):
        records["bits"] = attempt(lambda: compare_bits(model, getattr(torch, dtype)))
        print(f"{model:12} {dtype:8} {records['bits']}", flush=True)
        yield


def read_document(path: Path) -> Record:
    """Return what a file holds; empty where there is none."""
    found: Record = json.loads(path.read_text()) if path.exists() else {}
    return found if found.get("schema") == SCHEMA else {}


def merge_into(document: Record, part: Record) -> None:
    """Add the records of a part; the part's win."""
    if part and not document["records"]:
        document["environment"] = part["environment"]
    for key, records in part.get("records", {}).items():
        document["records"].setdefault(key, {}).update(records)


def summarize(records: Mapping[str, Record]) -> str:
    """Return geometric means over the models of each contestant's figures, relative to eager torch and to Inductor."""
    lines = []
    for size in ("", " small"):
        chosen = {key: found for key, found in records.items() if key.endswith(" small") == bool(size)}
        for figure in ("wall_ms", "gpu_ms", "peak_gib", "first_step_s", "cold_step_s", "warm_step_s"):
            for peer in ("eager", "inductor", "inductor graphs"):
                for contestant in (name for name in CONTESTANTS if name != peer):
                    ratios = [
                        found[contestant][figure] / found[peer][figure]
                        for found in chosen.values()
                        if found.get(contestant, {}).get(figure) and found.get(peer, {}).get(figure)
                    ]
                    if ratios:
                        mean = statistics.geometric_mean(ratios)
                        lines.append(
                            f"{figure + size:18} {contestant:16} / {peer:16} {mean:.3f} ({len(ratios)} models)"
                        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
