"""Reductions and groups built of them, against eager torch, Inductor, Triton and CuPy.

    python -m benchmarks.reductions                       # on the GPU if there is one
    python -m benchmarks.reductions --case softmax --peers eager fuser
    python -m benchmarks.reductions --quick               # a smoke test

Writes benchmarks/results/reductions_DEVICE.json and a plot. All of a case's contestants are checked against float64 and
take turns; figures are medians, as multiples of the speed of a device copy of the bytes that the pass must move.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fuser
from benchmarks import timing
from benchmarks.environment import describe_environment
from benchmarks.report import BLUE, GREY, ORANGE, write_json
from benchmarks.sweep import describe, hide_paths, make_copy, wait_for
from fuser.cxx.functor import Functor, parse_functor
from fuser.function import Function, Reduction
from fuser.graph import FusionGroup, GroupBuilder
from fuser.ops import OPS
from fuser.ops.index import index_function

RESULTS = Path(__file__).resolve().parent / "results"
SCHEMA = 1
PEERS = ("eager", "inductor", "triton", "cupy", "fuser")
Run = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One computation on one shape."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    # The tensors it takes, the first of which has the shape.
    inputs: Callable[[Tensor], list[Tensor]]
    group: Callable[[], FusionGroup]
    # In torch's operations.
    eager: Callable[..., Any]
    numbers: tuple[Any, ...] = ()

    def __str__(self) -> str:
        """Such as ``sum [4096, 4096] bfloat16``."""
        return f"{self.name} {list(self.shape)} {str(self.dtype)[6:]}"


# --- groups ----------------------------------------------------------------------------------------------------------
def text(source: str, outputs: int = 1) -> Functor:
    """Parse a functor over T."""
    return parse_functor(f"template <typename T> {source}", (), outputs)


ADD = text("T add(T a, T b) { return a + b; }")
LARGER = text("T larger(T a, T b) { return a != a || a > b ? a : b; }")
VALUE = text("T value(T x) { return x; }")
PRODUCT = text("T product(T x, T y) { return x * y; }")
SIZE = text("T size(T x) { return abs(x); }")
ONE = text("void one(T x, T& m, T& s, T& n) { m = x; s = 0; n = 1; }", 3)
MERGE = text(
    "void merge(T m, T s, T n, T m2, T s2, T n2, T& a, T& b, T& c) {"
    " c = n + n2; T d = m2 - m; T f = c > 0 ? n2 / c : T(0); a = m + d * f; b = s + s2 + d * d * n * f; }",
    3,
)
DONE = text("void done(T m, T s, T n, T& mean, T& var) { mean = m; var = s / n; }", 2)
NORMALIZE = text("T norm(T x, T m, T v, T w, T b) { return (x - m) * rsqrt(v + T(1e-5)) * w + b; }")
FIRST = text("void first(T x, int64_t i, T& v, int64_t& at) { v = x; at = i; }", 2)
PICK = text(
    "void pick(T a, int64_t i, T b, int64_t j, T& r, int64_t& k) {"
    " bool left = a > b || (a == b && i < j); r = left ? a : b; k = left ? i : j; }",
    2,
)
PLACE = text("int64_t place(T v, int64_t at) { return at; }")
# The largest magnitude becomes the largest number of float8_e4m3fn.
SCALE = text("T scale(T m) { return T(448) / m; }")


def reduction(
    value: Functor, combine: Functor, identity: tuple[float, ...], dims: tuple[int, ...] | None, **more: Any
) -> Function:
    """Return a reduction."""
    finish, keepdim = more.pop("finish", None), more.pop("keepdim", False)
    return Function(value, reduction=Reduction(combine, identity, finish, dims, keepdim), **more)


def total(dims: tuple[int, ...] | None, value: Functor = VALUE, count: int = 1) -> FusionGroup:
    """Return a sum."""
    builder = GroupBuilder()
    return builder.build(
        builder.apply(reduction(value, ADD, (0,), dims), [builder.add_input(f"x{i}") for i in range(count)])
    )


def softmax() -> FusionGroup:
    """Return largest, difference, exp, sum, quotient."""
    builder = GroupBuilder()
    x, minus = builder.add_input("x"), builder.add_input("minus", is_scalar=True, default=-1)
    (m,) = builder.apply(reduction(VALUE, LARGER, (-math.inf,), (-1,), keepdim=True), [x])
    (d,) = builder.apply(OPS["sub"].function, [x, m], [minus])
    (e,) = builder.apply(OPS["exp"].function, [d])
    (s,) = builder.apply(reduction(VALUE, ADD, (0,), (-1,), keepdim=True), [e])
    return builder.build(builder.apply(OPS["div"].function, [e, s]))


def layer_norm() -> FusionGroup:
    """Return Welford's moments, and the rows normalised."""
    builder = GroupBuilder()
    x, w, b = (builder.add_input(name) for name in "xwb")
    mean, var = builder.apply(reduction(ONE, MERGE, (0, 0, 0), (-1,), keepdim=True, finish=DONE), [x])
    return builder.build(builder.apply(Function(NORMALIZE), [x, mean, var, w, b]))


def scaled() -> FusionGroup:
    """Return rows scaled to float8's range, and what they were scaled by."""
    builder = GroupBuilder()
    x = builder.add_input("x")
    (m,) = builder.apply(reduction(SIZE, LARGER, (0,), (-1,), keepdim=True), [x])
    (scale,) = builder.apply(Function(SCALE), [m])
    (y,) = builder.apply(Function(PRODUCT, out_dtypes=(torch.float8_e4m3fn,)), [x, scale])
    return builder.build([y, m])


def argmax() -> FusionGroup:
    """Return the place of the largest element, as kernels count them."""
    builder = GroupBuilder()
    function = reduction(
        FIRST, PICK, (-math.inf, 2**62), (-1,), finish=PLACE, unpromoted=("i",), out_dtypes=(torch.int64,)
    )
    x = builder.add_input("x")
    return builder.build(builder.apply(function, [x, *builder.apply(index_function(1, (-1,)), [x])]))


def alone(x: Tensor) -> list[Tensor]:
    """Return what takes one tensor."""
    return [x]


def cases() -> Iterator[Case]:
    """Yield every computation and shape."""
    f32, bf16 = torch.float32, torch.bfloat16
    rows = partial(total, (-1,))
    for dtype in (f32, bf16):
        for length in (1024, 4096, 32768, 131072):
            shape = (2**27 // length if dtype is bf16 else 2**26 // length, length)
            yield Case("sum", shape, dtype, alone, rows, lambda x: x.sum(-1))
            yield Case("softmax", shape, dtype, alone, softmax, lambda x, _: x.softmax(-1), (-1,))
            yield Case("layer_norm", shape, dtype, with_weights, layer_norm, layer_norm_eager)
    yield Case("sum", (2**23, 8), f32, alone, rows, lambda x: x.sum(-1))
    yield Case("sum", (16383, 4097), f32, alone, rows, lambda x: x.sum(-1))
    yield Case("softmax", (16383, 4097), bf16, alone, softmax, lambda x, _: x.softmax(-1), (-1,))
    yield Case("softmax", (2**20, 50), f32, alone, softmax, lambda x, _: x.softmax(-1), (-1,))
    yield Case("softmax", (1, 2**24), f32, alone, softmax, lambda x, _: x.softmax(-1), (-1,))
    yield Case("columns", (16384, 4096), bf16, alone, partial(total, (0,)), lambda x: x.sum(0))
    yield Case("columns", (16384, 4096), f32, alone, partial(total, (0,)), lambda x: x.sum(0))
    yield Case("columns", (2**20, 64), f32, alone, partial(total, (0,)), lambda x: x.sum(0))
    yield Case("channels", (64, 64, 112, 112), f32, alone, partial(total, (0, 2, 3)), lambda x: x.sum((0, 2, 3)))
    yield Case("dot", (2**27,), f32, lambda x: [x, x + 1], partial(total, None, PRODUCT, 2), lambda x, y: (x * y).sum())
    yield Case("all", (2**27,), f32, alone, partial(total, None), lambda x: x.sum())
    yield Case("scaled", (16384, 4096), bf16, alone, scaled, scaled_eager)
    yield Case("argmax", (16384, 4096), f32, alone, argmax, lambda x: x.argmax(-1))


def with_weights(x: Tensor) -> list[Tensor]:
    """Return a tensor, and weights and biases along its rows."""
    return [x, torch.rand_like(x[0]) + 0.5, torch.rand_like(x[0])]


def layer_norm_eager(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Return torch's own."""
    return torch.nn.functional.layer_norm(x, x.shape[-1:], w, b)


def scaled_eager(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what ``scaled`` does, in torch's operations."""
    m = x.abs().amax(-1, keepdim=True)
    # float64 has no conversion to float8 that every device knows.
    y = x * (448 / m)
    return (y if x.dtype is torch.float64 else y.to(torch.float8_e4m3fn)), m


# --- peers -----------------------------------------------------------------------------------------------------------
def build(peer: str, case: Case, inputs: list[Any]) -> Run | None:
    """Return a peer's call; None if it has none for this case."""
    if peer == "eager":
        return partial(case.eager, *inputs, *case.numbers)
    if peer == "inductor":
        torch.compiler.reset()
        return partial(torch.compile(case.eager, dynamic=False), *inputs, *case.numbers)
    if peer == "fuser":
        return partial(fuser.run_fusion, fuser.register_fusion(case.group()), [*inputs, *case.numbers])
    if peer == "triton":
        return triton_call(case, inputs)
    return cupy_call(case, inputs)


def triton_call(case: Case, inputs: list[Any]) -> Run | None:
    """Return a hand-written kernel's call: one row per program, all of it in registers."""
    if case.name not in {"sum", "softmax"} or case.shape[-1] > 32768:
        return None
    from benchmarks import reductions_triton

    return partial(getattr(reductions_triton, case.name), inputs[0])


@cache
def cupy_kernel() -> Any:
    """Return CuPy's sum."""
    import cupy  # type: ignore[import-not-found]

    return cupy.ReductionKernel("T x", "T y", "x", "a + b", "y = a", "0", "total")


def cupy_call(case: Case, inputs: list[Any]) -> Run | None:
    """Return a ReductionKernel's call, on torch's stream."""
    axes = {"sum": -1, "columns": 0, "all": None}
    if case.name not in axes or case.dtype is not torch.float32:
        return None
    import cupy

    kernel, x, axis = cupy_kernel(), cupy.from_dlpack(inputs[0]), axes[case.name]
    stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)

    def run() -> Any:
        with stream:
            return kernel(x, axis=axis)

    return run


# --- measuring -------------------------------------------------------------------------------------------------------
def measure(case: Case, peers: tuple[str, ...], device: torch.device, budget_s: float, rounds: int) -> dict[str, Any]:
    """Return a record of all peers on one case."""
    torch.manual_seed(0)
    inputs: list[Any] = case.inputs(torch.randn(case.shape, device=device, dtype=torch.float32).to(case.dtype))
    wait = wait_for(device)
    wanted = as_tuple(case.eager(*(x.double() if x.is_floating_point() else x for x in inputs), *case.numbers))
    record: dict[str, Any] = {"case": str(case), "peers": {}}
    samplers: dict[str, timing.Sampler] = {}
    moved = 0
    for peer in peers:
        try:
            run = build(peer, case, inputs)
            if run is None:
                continue
            made = run()
            wait(made)
            if peer == "eager":
                moved = sum(x.nbytes for x in (*inputs, *as_tuple(made)))
            error = 0.0 if peer == "cupy" else error_of(as_tuple(made), wanted, case.dtype)
            samplers[peer] = timing.make_sampler(run, wait, device, on_torch_stream=True, capturable=peer != "cupy")
            record["peers"][peer] = {"error_eps": round(error, 2)}
        except Exception as error:  # A peer's failure is its own result.
            record["peers"][peer] = {"failed": hide_paths(describe(error))}
    copy = timing.make_sampler(make_copy(moved, device), wait, device, on_torch_stream=True, capturable=True)
    taken: dict[str, list[float]] = {name: [] for name in ("copy", *samplers)}
    for _ in range(rounds):
        for name, sampler in [("copy", copy), *samplers.items()]:
            taken[name] += sampler.sample(budget_s)
    medians = {name: timing.Timing("", tuple(samples)).median_us for name, samples in taken.items()}
    record |= {"bytes_moved": moved, "copy_us": round(medians["copy"], 2)}
    for name in samplers:
        ratio = round(medians["copy"] / medians[name], 3)
        record["peers"][name] |= {"time_us": round(medians[name], 2), "ratio_to_copy": ratio}
    return record


def as_tuple(made: Any) -> tuple[Tensor, ...]:
    """Return the tensors of a result."""
    return tuple(made) if isinstance(made, (tuple, list)) else (made,)


def error_of(made: tuple[Tensor, ...], wanted: tuple[Tensor, ...], dtype: torch.dtype) -> float:
    """Return the largest distance from float64, in eps of the dtype and of the largest value."""
    worst = 0.0
    for one, other in zip(made, wanted, strict=True):
        eps = torch.finfo(one.dtype if one.is_floating_point() else dtype).eps
        scale = max(other.abs().max().item(), 1e-30)
        worst = max(worst, (one.double().reshape(other.shape) - other).abs().max().item() / scale / eps)
    return worst


def save_plot(records: list[dict[str, Any]], path: Path) -> None:
    """Draw a bar per peer and case."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    colours = {"fuser": BLUE, "inductor": ORANGE, "eager": GREY, "triton": "#54a24b", "cupy": "#b279a2"}
    _, axes = plt.subplots(figsize=(9, 0.5 * len(records) + 1))
    for row, record in enumerate(records):
        shown = [(peer, item["ratio_to_copy"]) for peer, item in record["peers"].items() if "ratio_to_copy" in item]
        for place, (peer, ratio) in enumerate(shown):
            axes.barh(row + place * 0.16, ratio, 0.15, color=colours[peer], label=peer if row == 0 else None)
    axes.set_yticks(range(len(records)), [record["case"] for record in records], fontsize=7)
    axes.axvline(1.0, color="black", linewidth=0.5)
    axes.invert_yaxis()
    axes.set_xlabel("times the speed of a copy of the bytes moved")
    axes.legend(fontsize=7)
    plt.tight_layout()
    plt.savefig(path, dpi=120)


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reductions")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--case", nargs="+", metavar="NAME", help="such as softmax")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--budget", type=float, default=0.03, metavar="SECONDS", help="of a contestant's turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a smoke test: small shapes, few peers")
    parser.add_argument("--out", type=Path, metavar="JSON")
    options = parser.parse_args()
    device = torch.device(options.device)
    path = options.out or RESULTS / f"reductions_{device.type}.json"
    peers = tuple(options.peers)
    records: list[dict[str, Any]] = []
    document = {"schema": SCHEMA, "environment": describe_environment(device), "records": records}
    for case in cases():
        if options.case and case.name not in options.case:
            continue
        if options.quick:
            small = tuple(min(size, 128) for size in case.shape)
            case = Case(case.name, small, case.dtype, case.inputs, case.group, case.eager, case.numbers)
        record = measure(case, peers, device, options.budget, options.rounds)
        records.append(record)
        shown = [f"{peer} {item.get('ratio_to_copy', 'failed')}" for peer, item in record["peers"].items()]
        print(f"{record['case']:<42}{'  '.join(shown)}", flush=True)
        write_json(document, path)
    try:
        save_plot(records, path.with_suffix(".png"))
    except ImportError as error:
        print(f"no plot: {error}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
