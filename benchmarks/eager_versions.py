"""Functors where no kernel can be made, against the same torch operations written by hand.

    python -m benchmarks.eager_versions                # 1 to 10^7 elements
    python -m benchmarks.eager_versions --quick        # a smoke test

Writes benchmarks/results/eager_versions_cpu.json. ``ratio`` is a functor's time by that of the operations: a call in
eager torch is to cost at most 1.5 times what its operations do. One thread: the host's time is the question.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fuser
from benchmarks.environment import describe_environment
from benchmarks.report import write_json
from benchmarks.timing import percentile

RESULTS = Path(__file__).resolve().parent / "results"
SCHEMA = 1
SIZES = (1, 10, 100, 1000, 10**4, 10**5, 10**6, 10**7)
# Times of the two in turn; the best of each counts, as other programs share the machine.
SAMPLES = 40
SAMPLE_S = 4e-3

T = "template <typename T> "
Record = dict[str, Any]


def by_hand() -> dict[str, tuple[Callable[..., Any], Callable[..., Any], int]]:
    """Return functors, their operations as one writes them, and how many tensors they take; their scalar is 0.5."""
    axpy = fuser.create_jit_fn(T + "T axpy(T x, T y, T alpha) { return alpha * x + y; }", alpha=0.5)
    gelu = """T gelu(T x) {
      return T(0.5) * x * (T(1) + tanh(T(0.79788456) * (x + T(0.044715) * x * x * x)));
    }"""
    return {
        "add": (fuser.create_jit_fn(T + "T add(T x, T y) { return x + y; }"), torch.add, 2),
        "axpy": (axpy, lambda x, y: torch.add(torch.mul(x, 0.5), y), 2),
        "axpy of bfloat16": (axpy, _axpy_bfloat16, 2),
        "relu": (
            fuser.create_jit_fn(T + "T relu(T x) { return x > T(0) ? x : T(0); }"),
            lambda x: torch.where(x > 0, x, 0.0),
            1,
        ),
        "silu": (
            fuser.create_jit_fn(T + "T silu(T x) { return x / (T(1) + exp(-x)); }"),
            lambda x: x / (torch.exp(-x) + 1),
            1,
        ),
        "gelu": (
            fuser.create_jit_fn(T + gelu),
            lambda x: 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x * x * x))),
            1,
        ),
        "polynomial": (
            fuser.create_jit_fn(T + "T f(T x) { return ((T(0.5) * x + T(1)) * x + T(2)) * x - T(3); }"),
            lambda x: ((0.5 * x + 1) * x + 2) * x - 3,
            1,
        ),
        "sum and difference": (
            fuser.create_multi_output_jit_fn(T + "void both(T x, T y, T& s, T& d) { s = x + y; d = x - y; }", 2),
            lambda x, y: (x + y, x - y),
            2,
        ),
    }


def _axpy_bfloat16(x: Tensor, y: Tensor) -> Tensor:
    # Functors compute in float32.
    return torch.add(torch.mul(x.float(), 0.5), y.float()).bfloat16()


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.eager_versions")
    parser.add_argument("--quick", action="store_true", help="a smoke test: two sizes, few samples")
    parser.add_argument("--out", type=Path, default=RESULTS / "eager_versions_cpu.json", metavar="JSON")
    options = parser.parse_args()
    # Threads of torch's that wait for each other measure other programs.
    torch.set_num_threads(1)
    # As if there were no compiler: nothing on disk serves either.
    fuser.override_can_fuse_on_cpu(False)
    warnings.simplefilter("ignore", fuser.errors.FallbackWarning)
    rows: list[Record] = []
    document = {"schema": SCHEMA, "environment": describe_environment(torch.device("cpu")), "rows": rows}
    for record in measure((1, 1000) if options.quick else SIZES, 3 if options.quick else SAMPLES):
        rows.append(record)
        print(" ".join(f"{value}" for value in record.values()), flush=True)
        write_json(document, options.out)
    return 0


def measure(sizes: tuple[int, ...], samples: int) -> Iterator[Record]:
    """Yield a record for each functor and size; times in microseconds."""
    for name, (functor, operations, count) in by_hand().items():
        for size in sizes:
            dtype = torch.bfloat16 if "bfloat16" in name else torch.float32
            inputs = [torch.randn(size).to(dtype) for _ in range(count)]
            calls = max(int(SAMPLE_S / _time(operations, inputs, 3)), 1)
            taken: dict[Callable[..., Any], list[float]] = {functor: [], operations: []}
            for function, times in [*taken.items()] * samples:
                times.append(_time(function, inputs, calls) * 1e6)
            best = {function: min(times) for function, times in taken.items()}
            yield {
                "functor": name,
                "elements": size,
                "functor_us": round(best[functor], 2),
                "operations_us": round(best[operations], 2),
                "ratio": round(best[functor] / best[operations], 2),
                "ratio_of_medians": round(percentile(taken[functor], 0.5) / percentile(taken[operations], 0.5), 2),
            }


def _time(function: Callable[..., Any], inputs: list[Tensor], calls: int) -> float:
    function(*inputs)
    began = time.perf_counter()
    for _ in range(calls):
        function(*inputs)
    return (time.perf_counter() - began) / calls


if __name__ == "__main__":
    raise SystemExit(main())
