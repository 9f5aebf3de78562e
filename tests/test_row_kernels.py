"""torch's reductions between pointwise ops have CUDA kernels that compile, for rows of any length and count."""

from __future__ import annotations

import random

import pytest
import torch

from fuser.compiler import register
from fuser.cuda.backend import compile_cubin
from fuser.debug import kernel_sources
from fuser.graph import FusionGroup, GroupBuilder
from fuser.ops import OPS, composite_function
from fuser.ops.reductions import reduction_function

pytestmark = [pytest.mark.cpu, pytest.mark.nvrtc]

BEFORE = ["x", "silu", "div", "mul sigmoid"]
REDUCED = ["softmax", "log_softmax", "softmax backward", "log_softmax backward", "sum", "mean", "var"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
NUMERICS = ["strict", "strict", "fast"]


def prepare(builder: GroupBuilder, before: str, x: int, y: int) -> int:
    """Add what a reduction is made of."""
    if before == "x":
        return x
    name, _, of = before.partition(" ")
    others = builder.apply(OPS[of].function, [y]) if of else [y] * (name == "div")
    return builder.apply(OPS[name].function, [x, *others])[0]


def build(before: str, reduced: str, dtype: torch.dtype, numerics: str) -> FusionGroup:
    """Return a group of pointwise work, a reduction of rows, and more pointwise work of both."""
    builder = GroupBuilder(numerics)
    x, y = builder.add_input("x"), builder.add_input("y")
    value = prepare(builder, before, x, y)
    op, _, backward = reduced.partition(" ")
    if backward:
        form = (-1, str(dtype).removeprefix("torch."))
        (made,) = builder.apply(composite_function(f"_{op}_backward_data", form), [value, builder.add_input("made")])
    elif "softmax" in op:
        (made,) = builder.apply(composite_function(f"_{op}", (-1,)), [value])
    else:
        numbers = [builder.add_input("correction", is_scalar=True)] if op == "var" else []
        (total,) = builder.apply(reduction_function(op, (-1,), True), [value], numbers)
        (made,) = builder.apply(OPS["mul"].function, [value, total])
    return builder.build(builder.apply(OPS["silu_backward"].function, [made, x]))


def compile_rows(group: FusionGroup, dtype: torch.dtype, rows: int, length: int) -> int:
    """Compile the kernels of a call; return how many there are."""
    inputs = [1.0 if item.is_scalar else torch.empty(rows, length, dtype=dtype) for item in group.inputs]
    sources = kernel_sources(register(group), inputs, "cuda")
    return sum(bool(compile_cubin(source, "sm_90")) for source in sources)


@pytest.mark.parametrize(
    ("before", "reduced", "dtype", "rows", "length"),
    [
        # The tail of a row that is read in chunks is divided again, too.
        ("mul sigmoid", "softmax backward", torch.float32, 4, 40000),
        # Two values of each element are kept, and shared memory has room for some of one.
        ("silu", "softmax", torch.float16, 300, 128256),
    ],
)
def test_kernels_compile(before: str, reduced: str, dtype: torch.dtype, rows: int, length: int) -> None:
    assert compile_rows(build(before, reduced, dtype, "strict"), dtype, rows, length) > 0


# What their threads wait with for each other takes more shared memory than a block has: the rest is another launch's.
@pytest.mark.parametrize(
    ("op", "count", "shape", "dim"),
    [
        # Of serial orders, each of torch's threads waits; of two rows of a block, or of one.
        ("_softmax_backward_data", 3, (300, 2041), -1),
        pytest.param("_softmax_backward_data", 6, (3, 36845), -1, marks=pytest.mark.slow),
        # Rows of few threads are several of a block.
        pytest.param("var", 20, (300, 300), -1, marks=pytest.mark.slow),
        # Maxima, which any order serves, are in a pass of their own.
        pytest.param("_softmax", 24, (64, 1000, 2), 1, marks=pytest.mark.slow),
    ],
)
def test_what_waits_fits_in_shared_memory(op: str, count: int, shape: tuple[int, ...], dim: int) -> None:
    builder, made, x = GroupBuilder(), list[int](), torch.empty(shape, dtype=torch.float64)
    for number in range(count):
        own = [builder.add_input(f"x{number}")]
        if op == "var":
            correction = builder.add_input(f"correction{number}", is_scalar=True)
            made += builder.apply(reduction_function(op, (dim,)), own, [correction])
        else:
            is_backward = "backward" in op
            own += [builder.add_input(f"made{number}")] if is_backward else []
            form = (dim, "float64") if is_backward else (dim,)
            made += builder.apply(composite_function(op, form), own)
    group = builder.build(made)
    inputs = [1.0 if item.is_scalar else x for item in group.inputs]
    sources = kernel_sources(register(group), inputs, "cuda")
    # The first one is the largest.
    assert len(sources) > 1
    assert compile_cubin(sources[0], "sm_90")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_kernels_of_any_rows_compile(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(40):
        dtype, rows = draw.choice(DTYPES), draw.choice([1, 4, 33, 300, 5000])
        length = draw.choice([draw.randint(2, 300), draw.randint(300, 5000), draw.randint(5000, 400000 // rows + 9000)])
        chosen = draw.choice(BEFORE), draw.choice(REDUCED), dtype, draw.choice(NUMERICS)
        assert compile_rows(build(*chosen), dtype, rows, length) > 0, (*chosen, rows, length)
