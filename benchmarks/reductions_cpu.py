"""Rows, columns and whole tensors on the CPU: fused functions against eager torch's own ops and Inductor.

    python -m benchmarks.reductions_cpu
    python -m benchmarks.reductions_cpu --case softmax --peers eager fuser

Writes benchmarks/results/reductions_cpu.json. The contestants of a case take turns; times are medians, in microseconds.
Numerics are fast, so that torch's sums join the kernels; errors are distances from float64, in eps of the dtype.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fuser
from benchmarks import timing
from benchmarks.environment import describe_environment
from benchmarks.reduction_cases import with_rows
from benchmarks.reductions import RESULTS, as_tuple, error_of
from benchmarks.report import write_json
from benchmarks.sweep import describe, hide_paths, wait_for

PEERS = ("eager", "inductor", "fuser")
SHAPES = ((4096, 1024), (64, 1024), (512, 32768), (1, 2**24), (1023, 4097), (2**17, 50), (2**20, 8))
COLUMNS = ((16384, 64), (4096, 1024), (2**20, 8), (2**20, 3))


@dataclass(frozen=True, slots=True)
class Case:
    """One computation on one shape: as torch has it, and as it is fused."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    inputs: Callable[[Tensor], list[Tensor]]
    eager: Callable[..., Any]
    fused: Callable[..., Any]

    def __str__(self) -> str:
        """Such as ``softmax [4096, 1024] bfloat16``."""
        return f"{self.name} {list(self.shape)} {str(self.dtype)[6:]}"


welford = fuser.create_reduction_fn(
    """template <typename T> void merge(T ma, T sa, T na, T mb, T sb, T nb, T& m, T& s, T& n) {
      n = na + nb;
      const T delta = mb - ma, share = n > T(0) ? nb / n : T(0);
      m = ma + delta * share;
      s = sa + sb + delta * (na * share) * delta;
    }""",
    identity=(0, 0, 0),
    map="template <typename T> void one(T x, T& m, T& s, T& n) { m = x; s = T(0); n = T(1); }",
    finish="template <typename T> void moments(T m, T s, T n, T& var, T& mean) { var = s / n; mean = m; }",
)


def softmax(x: Tensor) -> Tensor:
    """Return softmax in torch's pointwise operations and reductions."""
    power = torch.exp(x - x.amax(-1, keepdim=True))
    return power / power.sum(-1, keepdim=True)


def welford_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return a layer norm with a user's reduction."""
    var, mean = welford(x, dim=-1, keepdim=True)
    return (x - mean) * torch.rsqrt(var + 1e-5) * weight + bias


def two_pass_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return a layer norm of a mean and the mean of squared distances."""
    moved = x - x.mean(-1, keepdim=True)
    return moved * torch.rsqrt((moved * moved).mean(-1, keepdim=True) + 1e-5) * weight + bias


def norm_dx(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of a layer norm's input."""
    scaled, normal = grad * weight, (x - mean) * rstd
    return rstd * (scaled - scaled.mean(-1, keepdim=True) - normal * (scaled * normal).mean(-1, keepdim=True))


def torch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return torch's own layer norm."""
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias)


def torch_dx(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor) -> Tensor:
    """Return torch's own gradient."""
    size, mask = list(x.shape[-1:]), [True, False, False]
    grad_x: Tensor = torch.ops.aten.native_layer_norm_backward(grad, x, size, mean, rstd, weight, weight, mask)[0]
    return grad_x


def with_moments(x: Tensor) -> list[Tensor]:
    """Return what ``norm_dx`` takes."""
    var, mean = torch.var_mean(x.float(), -1, correction=0, keepdim=True)
    return [torch.rand_like(x), x, mean.to(x.dtype), torch.rsqrt(var + 1e-5).to(x.dtype), torch.rand_like(x[0])]


def pair(x: Tensor) -> list[Tensor]:
    """Return a tensor and another one."""
    return [x, torch.rand_like(x)]


def cases() -> Iterator[Case]:
    """Yield every computation and shape."""
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES:
            yield Case("softmax", shape, dtype, lambda x: [x], lambda x: torch.softmax(x, -1), softmax)
            yield Case("layer_norm", shape, dtype, with_rows, torch_norm, welford_norm)
            yield Case("layer_norm (two passes)", shape, dtype, with_rows, torch_norm, two_pass_norm)
            yield Case("sum of products", shape, dtype, pair, *[lambda x, y: (x * y).sum(-1)] * 2)
            if dtype is torch.float32:
                yield Case("layer_norm dx", shape, dtype, with_moments, torch_dx, norm_dx)
        for shape in COLUMNS:
            yield Case("column sums of relu", shape, dtype, lambda x: [x], *[lambda x: torch.relu(x).sum(0)] * 2)
        yield Case("dot", (2**24,), dtype, pair, *[lambda x, y: (x * y).sum()] * 2)


def measure(case: Case, peers: tuple[str, ...], budget_s: float, rounds: int) -> dict[str, Any]:
    """Return a record of all peers on one case."""
    torch.manual_seed(0)
    device = torch.device("cpu")
    inputs = case.inputs(torch.randn(case.shape).to(case.dtype))
    wanted = as_tuple(case.eager(*(x.double() for x in inputs)))
    record: dict[str, Any] = {"case": str(case), "peers": {}}
    samplers: dict[str, timing.Sampler] = {}
    for peer in peers:
        torch.compiler.reset()
        calls = {"eager": case.eager, "fuser": fuser.fuse(case.fused)}
        function = torch.compile(case.eager, dynamic=False) if peer == "inductor" else calls[peer]

        def run(function: Callable[..., Any] = function) -> Any:
            return function(*inputs)

        try:
            error = error_of(as_tuple(run()), wanted, case.dtype)
            samplers[peer] = timing.make_sampler(run, wait_for(device), device, on_torch_stream=True, capturable=True)
            record["peers"][peer] = {"error_eps": round(error, 2)}
        except Exception as error:  # A peer's failure is its own result.
            record["peers"][peer] = {"failed": hide_paths(describe(error))}
    for name, median in timing.take_turns(samplers, rounds, budget_s).items():
        record["peers"][name]["time_us"] = round(median, 2)
    mine = record["peers"].get("fuser", {}).get("time_us")
    for name in samplers:
        if mine and name != "fuser":
            record["peers"][name]["fuser_is_faster"] = round(record["peers"][name]["time_us"] / mine, 2)
    return record


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reductions_cpu")
    parser.add_argument("--case", nargs="+", metavar="NAME", help="such as softmax")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--budget", type=float, default=0.05, metavar="SECONDS", help="of a contestant's turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--note", default="", help="what else the file should say, such as what ran beside it")
    parser.add_argument("--out", type=Path, metavar="JSON", default=RESULTS / "reductions_cpu.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    records: list[dict[str, Any]] = []
    environment = describe_environment(torch.device("cpu"))
    document = {"schema": 1, "environment": environment, "note": options.note, "records": records}
    with fuser.config.patch(numerics="fast"):
        for case in cases():
            if options.case and case.name not in options.case:
                continue
            record = measure(case, tuple(options.peers), options.budget, options.rounds)
            records.append(record)
            shown = [f"{peer} {item.get('time_us', 'failed')}" for peer, item in record["peers"].items()]
            print(f"{record['case']:<50}{'  '.join(shown)}", flush=True)
            write_json(document, options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
