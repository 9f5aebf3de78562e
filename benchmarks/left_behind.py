"""Chains of a few of torch's ops whose operands lie unevenly: where fusing once was slower than Inductor.

    python -m benchmarks.left_behind                   # about 40 s on a GPU
    python -m benchmarks.left_behind --case rope image

Writes benchmarks/results/left_behind_DEVICE.json. Contestants of a case take turns; ``ratio`` is Inductor's time by
theirs, ``of_copy`` that of a device copy of the bytes that the case must move. Strict results are compared with eager
torch's bit by bit where every op is torch's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fuser
from benchmarks import timing
from benchmarks.chains import CHAINS, TORCH_OPS, make_inputs
from benchmarks.environment import describe_environment
from benchmarks.peers.fuser_peers import make_functor_ops
from benchmarks.report import write_json
from benchmarks.sweep import describe, make_copy, wait_for

RESULTS = Path(__file__).resolve().parent / "results"
SCHEMA = 1
PEERS = ("eager", "fuser", "fuser fast", "fuse", "inductor")
# With eager torch's bits: by torch.compile, by fuser.fuse.
STRICT = ("fuser", "fuse")
# Elements of a result, on a GPU and elsewhere.
ELEMENTS, FEW = 1 << 26, 1 << 20

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One chain."""

    function: Callable[..., Any]
    # Draws the tensors, for about so many elements of the result.
    draw: Callable[[int], tuple[Tensor, ...]]
    # The same written with functors, where they are not torch's ops.
    functors: Callable[..., Any] | None = None


def rope(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn heads by their positions, as transformers spells it."""
    half = q.shape[-1] // 2
    return q * cos + torch.cat((-q[..., half:], q[..., :half]), -1) * sin


def normalise(image: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """Make floats of a picture whose three colours lie innermost."""
    return (image.float() / 255 - mean) / deviation


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Scale and shift."""
    return x * weight + bias


def six(name: str) -> Case:
    """Return the chain of six functors with rows or columns that ``benchmarks`` has."""
    chain = CHAINS[name]
    return Case(
        chain.compose(TORCH_OPS),
        lambda elements: make_inputs(chain, elements, find_device()),
        chain.compose(make_functor_ops()),
    )


def floats(*shapes: Sequence[int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Draw tensors."""
    return tuple(torch.randn(tuple(shape), device=find_device()).to(dtype) for shape in shapes)


def draw_heads(elements: int) -> tuple[Tensor, ...]:
    """Draw heads as attention has them, and the turns of their positions."""
    length = elements // (4 * 32 * 128)
    return floats((4, 32, length, 128), (length, 128), (length, 128), dtype=torch.bfloat16)


def draw_image(elements: int) -> tuple[Tensor, ...]:
    """Draw pictures of bytes, and a mean and a deviation for each colour."""
    image = torch.randint(0, 256, (elements // (3 << 16), 256, 256, 3), device=find_device(), dtype=torch.uint8)
    return image, *floats((3,), (3,))


def draw_choice(elements: int) -> tuple[Tensor, ...]:
    """Draw a mask, and what is chosen of."""
    x, y = floats((elements,), (elements,))
    return x > 0.5, x, y


def multiply(x: Tensor, y: Tensor) -> Tensor:
    """Multiply."""
    return x * y


def choose(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Choose elements."""
    return torch.where(condition, x, y)


def odd(elements: int) -> int:
    """Return the side of a square of about so many elements; rows of it are not aligned."""
    return int(elements**0.5) - 1 | 1


def find_cases() -> dict[str, Case]:
    """Return the cases by name."""
    return {
        "rope": Case(rope, draw_heads),
        "image": Case(normalise, draw_image),
        "outer": Case(multiply, lambda n: floats((64, 1, n >> 14), (1, 256, n >> 14))),
        "outer bfloat16": Case(multiply, lambda n: floats((64, 1, n >> 14), (1, 256, n >> 14), dtype=torch.bfloat16)),
        "odd column": Case(affine, lambda n: floats((odd(n), odd(n)), (odd(n), 1), (odd(n), 1))),
        "where": Case(choose, draw_choice),
        "six functors, row": six("six_row"),
        "six functors, column": six("six_col"),
    }


def measure(case: Case, device: torch.device, budget_s: float) -> dict[str, Record]:
    """Return a record for each peer."""
    inputs = case.draw(ELEMENTS if device.type == "cuda" else FEW)
    wanted = case.function(*inputs)
    moved = sum(item.numel() * item.element_size() for item in (*inputs, wanted))
    records: dict[str, Record] = {}
    samplers = {"copy": make_sampler(make_copy(moved, device), device)}
    for peer in PEERS:
        try:
            run = partial(build(peer, case), *inputs)
            made = run()
            is_exact = bool(torch.equal(made, wanted)) and case.functors is None
            records[peer] = {"equal": is_exact} if peer in STRICT and case.functors is None else {}
            samplers[peer] = make_sampler(run, device)
        except Exception as error:  # What a peer raises is its result.
            records[peer] = {"error": describe(error)}
    taken = timing.take_turns(samplers, 3, budget_s)
    for peer in samplers.keys() & records.keys():
        records[peer] |= {"us": round(taken[peer], 1), "of_copy": round(taken["copy"] / taken[peer], 3)}
        if "inductor" in taken:
            records[peer]["ratio"] = round(taken["inductor"] / taken[peer], 3)
    return records


def build(peer: str, case: Case) -> Callable[..., Any]:
    """Return a peer's function."""
    torch.compiler.reset()
    if peer == "eager":
        return case.function
    if peer == "inductor":
        return torch.compile(case.function, dynamic=False)
    if peer == "fuse":
        return fuser.fuse(case.functors or case.function)
    how: Mapping[str, Any] = {"numerics": "fast" if "fast" in peer else "strict"}
    return torch.compile(case.functors or case.function, backend="fuser", dynamic=False, options=dict(how))


def make_sampler(run: timing.Run, device: torch.device) -> timing.Sampler:
    """Return what times a call."""
    return timing.make_sampler(run, wait_for(device), device, True, True)


def find_device() -> torch.device:
    """Return the GPU, or the CPU where there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    run(find_cases(), "left_behind", arguments)


def run(every: Mapping[str, Case], name: str, arguments: Sequence[str] | None) -> None:
    """Measure the cases that the arguments name, and write ``benchmarks/results/NAME_DEVICE.json``."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}")
    parser.add_argument("--case", nargs="+", choices=every, default=list(every))
    parser.add_argument("--budget", type=float, default=0.1, metavar="SECONDS", help="time for a turn of a contestant")
    parser.add_argument("--out", type=Path, metavar="JSON")
    options = parser.parse_args(arguments)
    device = find_device()
    records: dict[str, Record] = {}
    document = {"schema": SCHEMA, "environment": describe_environment(device), "records": records}
    for case in options.case:
        records[case] = measure(every[case], device, options.budget)
        print(f"{case:22}", *(f"{peer} {found}" for peer, found in records[case].items()), flush=True)
        write_json(document, options.out or RESULTS / f"{name}_{device.type}.json")


if __name__ == "__main__":
    main()
