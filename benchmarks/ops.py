"""One op, one call: the kernels of torch's powers, and of every op of the table, against eager torch.

    python -m benchmarks.ops                             # powers, forward and backward; then every op of the table
    python -m benchmarks.ops --sizes 1048576 --only powers
    python -m benchmarks.ops --quick                     # a smoke test

Writes benchmarks/results/ops_DEVICE.json and a plot of the powers. Both sides take turns, and a ratio is of the fastest
calls. On the CPU a call's time is the processor time of all its threads: other work on the machine adds little to it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import fuser
from benchmarks.environment import describe_environment
from benchmarks.report import BLUE, GREY, ORANGE, write_json
from fuser.ops import OPS

RESULTS = Path(__file__).resolve().parent / "results"
SCHEMA = 1
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
OF_TABLE = (torch.float32, torch.bfloat16, torch.float16)
EXPONENTS = (0, 1, 2, 3, 0.5, -0.5, -1, -2, 4, -3, 10, 2.5, 0.1)
# Of the ops that take numbers: as their modules have them.
NUMBERS = {
    "alpha": 0.5, "minus_alpha": -0.5, "value": 0.5, "negative_slope": 0.01, "scale": 1.0, "input_scale": 1.0,
    "beta": 1.0, "threshold": 0.5, "min_val": -1.0, "max_val": 0.5,
    "lambd": 0.5, "nan": 0.0, "posinf": 1.0, "neginf": -1.0,
}  # fmt: skip

Record = dict[str, Any]
Run = Callable[[], Any]


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ops")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", nargs="+", type=int, default=[2**20, 2**22, 2**24], metavar="N")
    parser.add_argument("--only", choices=("powers", "table"), help="one of the two parts")
    parser.add_argument("--budget", type=float, default=0.4, metavar="SECONDS", help="time for one pair of contestants")
    parser.add_argument("--quick", action="store_true", help="a smoke test: one small size, a few exponents")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), metavar="N", help="on the CPU")
    parser.add_argument("--out", type=Path, metavar="JSON")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.set_num_threads(options.threads)
    sizes = [2**14] if options.quick else options.sizes
    exponents = EXPONENTS[:4] if options.quick else EXPONENTS
    budget_s = 0.01 if options.quick else options.budget
    path = options.out or RESULTS / f"ops_{device.type}.json"
    document = {"schema": SCHEMA, "environment": describe_environment(device), "sizes": sizes, "budget_s": budget_s}
    powers: list[Record] = []
    table: list[Record] = []
    document |= {"powers": powers, "table": table}
    for records, found in (
        (powers, measure_powers(device, sizes, exponents, budget_s) if options.only != "table" else iter(())),
        (table, measure_table(device, sizes[-1], budget_s) if options.only != "powers" else iter(())),
    ):
        for record in found:
            records.append(record)
            print(" ".join(f"{value}" for value in record.values()), flush=True)
            write_json(document, path)
    if powers:
        save_plot(powers, path.with_suffix(".png"))
    return 0


def measure_powers(
    device: torch.device, sizes: list[int], exponents: tuple[float, ...], budget_s: float
) -> Iterator[Record]:
    """Yield a record for each exponent, dtype, size and form: constant, argument, tensor, with the backward pass."""
    variable = fuser.fuse(lambda x, n: x**n)
    by_tensor = fuser.fuse(lambda x, y: torch.pow(x, y))
    for dtype in DTYPES:
        for size in sizes:
            for exponent in exponents:
                x = torch.randn(size, dtype=dtype, device=device)
                # Of both signs where that has a power.
                x = x if exponent == int(exponent) else x.abs()
                eager, fused = power(exponent), fuser.fuse(power(exponent))
                row = {"dtype": str(dtype)[6:], "elements": size, "exponent": exponent}
                yield {**row, "form": "constant", **compare(bind(fused, x), bind(eager, x), budget_s)}
                forward = bind(eager, x)
                yield {**row, "form": "argument", **compare(bind(variable, x, exponent), forward, budget_s)}
                grad = torch.randn_like(x)
                ours, theirs = bind(differentiate, fused, x, grad), bind(differentiate, eager, x, grad)
                yield {**row, "form": "with backward", **compare(ours, theirs, budget_s)}
            x, y = torch.rand(size, device=device).to(dtype) * 4, torch.randn(size, device=device).to(dtype)
            row = {"dtype": str(dtype)[6:], "elements": size, "exponent": None, "form": "tensor"}
            yield {**row, **compare(bind(by_tensor, x, y), bind(torch.pow, x, y), budget_s)}


def measure_table(device: torch.device, size: int, budget_s: float) -> Iterator[Record]:
    """Yield a record for each op of the table that takes floats, in each dtype."""
    for name, op in OPS.items():
        functor = op.function.functor
        if "float" not in op.kinds or name in {"tril", "triu"}:  # of matrices
            continue
        numbers = {item.name: NUMBERS.get(item.name, 1.0) for item in functor.scalars}
        function = fuser.JitFunction(op.function, numbers)
        low, high = (1.1, 3.0) if name == "acosh" else (0.1, 0.9)
        for dtype in OF_TABLE:
            drawn = [torch.rand(size, device=device) * (high - low) + low for _ in range(len(functor.tensors))]
            pairs = zip(drawn, functor.tensors, strict=True)
            tensors: list[Any] = [x > 0.5 if item.type == "bool" else x.to(dtype) for x, item in pairs]
            if name in {"pow_number", "div_number"}:
                tensors[1] = 2.5
            sides = bind(function, *tensors), bind(op.eager, *tensors, **numbers)
            yield {"op": name, "dtype": str(dtype)[6:], "elements": size, **compare(*sides, budget_s)}


def power(exponent: float) -> Callable[[Any], Any]:
    """Return the function whose text has this exponent."""
    return lambda x: x**exponent


def bind(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Run:
    """Return the call."""
    return lambda: function(*args, **kwargs)


def differentiate(function: Callable[[Any], Any], x: torch.Tensor, grad: torch.Tensor) -> Any:
    """Run forward and backward."""
    leaf = x.detach().requires_grad_()
    result = function(leaf)
    # x ** 0 has no graph in torch's view of it at times.
    return torch.autograd.grad(result, leaf, grad, allow_unused=True) if result.requires_grad else result


def compare(ours: Run, theirs: Run, budget_s: float) -> Record:
    """Time both by turns; return milliseconds of the fastest calls, and their ratio (above 1: eager is faster)."""
    fuser.reset_stats()
    best = [float("inf"), float("inf")]
    for run in (ours, theirs, ours):
        timed(run)
    # The clock's steps are as long as a short call.
    calls = 1 if timed(theirs) > 0.1 else 16
    rounds, began = 0, time.perf_counter()
    while rounds < 5 or time.perf_counter() - began < budget_s:
        rounds += 1
        for place, run in enumerate((ours, theirs)):
            best[place] = min(best[place], timed(run, calls))
    assert not fuser.stats()["fallbacks"], fuser.stats()["fallbacks"]
    fused_ms, eager_ms = best
    return {"fuser_ms": round(fused_ms, 4), "eager_ms": round(eager_ms, 4), "ratio": round(fused_ms / eager_ms, 3)}


def timed(run: Run, calls: int = 1) -> float:
    """Return the milliseconds of one call of several, until their work is done."""
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    began = clock()
    for _ in range(calls):
        run()
    wait()
    return (clock() - began) * 1e3 / calls


def save_plot(powers: list[Record], path: Path) -> None:
    """Draw the ratios of the largest size: a group of bars for each exponent."""
    import matplotlib.pyplot as plt  # the rest runs without it

    size = max(record["elements"] for record in powers)
    rows = [item for item in powers if item["elements"] == size and item["form"] == "constant"]
    exponents = list(dict.fromkeys(item["exponent"] for item in rows))
    figure, axes = plt.subplots(figsize=(9, 3.2), layout="constrained")
    for place, (dtype, color) in enumerate(zip(DTYPES, (ORANGE, BLUE, GREY), strict=True)):
        ratios = [item["ratio"] for item in rows if item["dtype"] == str(dtype)[6:]]
        axes.bar(
            [k + 0.27 * (place - 1) for k in range(len(exponents))], ratios, 0.25, color=color, label=str(dtype)[6:]
        )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(exponents)), [f"x ** {item:g}" for item in exponents], rotation=30)
    axes.set_ylabel("time, eager = 1")
    axes.set_title(f"powers, {size} elements")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    raise SystemExit(main())
