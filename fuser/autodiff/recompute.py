"""What the forward pass hands to the backward pass: the fewest bytes, or fewer operations done twice.

A kernel takes the longer of two times, memory's and arithmetic's, so that computing something again is free as long as
memory is the slower one. Sizes are bytes, and so are operations: those that memory moves meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

from fuser.application import Application
from fuser.autodiff.backward import DerivedGroup
from fuser.cxx.functor import read_text
from fuser.graph import FusionGroup

__all__ = ["Sizes", "choose_saved", "cost_of_application", "estimate_cost", "estimate_instructions"]

# 4.2 TB/s against 132 * 128 operations in each of 1.98e9 cycles a second, on an H200. The ratio of other GPUs, and of
# CPUs with vector instructions, is within a factor of two.
BYTES_PER_OPERATION = 0.125

# Instructions of the CUDA library's float functions, roughly; a name that is not here is a user's function, whose text
# is counted, or as cheap as an addition.
_OPERATIONS = {
    "sqrt": 10, "exp": 10, "exp2": 8, "exp10": 10, "log": 12, "log2": 12, "log10": 12, "expm1": 25, "log1p": 25,
    "rsqrt": 4, "cbrt": 20, "rcbrt": 20, "tanh": 20, "sinh": 30, "cosh": 20, "sin": 25, "cos": 25, "tan": 35,
    "sinpi": 25, "cospi": 25, "asin": 25, "acos": 25, "atan": 25, "asinh": 40, "acosh": 40, "atanh": 30, "erf": 25,
    "erfc": 40, "erfcx": 40, "erfinv": 40, "erfcinv": 50, "normcdf": 40, "normcdfinv": 50, "pow": 60, "hypot": 25,
    "atan2": 40, "fmod": 40, "remainder": 40, "lgamma": 100, "tgamma": 80, "j0": 80, "j1": 80, "y0": 80, "y1": 80,
}  # fmt: skip
_DIVISION = 10
# A result is rounded, converted, stored or selected.
_RESULT = 3
_SKIPPED = re.compile(r"//[^\n]*|/\*.*?\*/|template\s*<[^>]*>", re.DOTALL)
_WORD = re.compile(r"(\w+)\s*\(")
_OPERATOR = re.compile(r"/|[-+*?<>]")


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the values of a group are."""

    # Bytes of each value; 0 for numbers.
    bytes: tuple[int, ...]
    # Elements of the widest.
    elements: int


@lru_cache(1024)
def estimate_instructions(text: str) -> int:
    """Return roughly how many instructions a functor's text takes; the body of a loop counts once."""
    text = _SKIPPED.sub("", text)
    calls = sum(_OPERATIONS.get(name, _OPERATIONS.get(name.removesuffix("f"), 0)) for name in _WORD.findall(text))
    return calls + sum(_DIVISION if sign == "/" else 1 for sign in _OPERATOR.findall(text))


def cost_of_application(application: Application, sizes: Sizes) -> float:
    """Return what it costs to compute an application."""
    # Without the branches of other devices.
    text = read_text(application.function.functor.source).expanded.text
    operations = estimate_instructions(text) + _RESULT * application.function.num_outputs
    return BYTES_PER_OPERATION * sizes.elements * operations


def estimate_cost(group: FusionGroup, sizes: Sizes, derived: DerivedGroup, saved: Collection[int]) -> float:
    """Return what both passes cost, if the forward pass writes ``saved`` besides its outputs."""
    written = sum(sizes.bytes[value] for value in {*group.outputs, *saved})
    forward = sum(sizes.bytes[: len(group.inputs)]) + written
    moved = sum(sizes.bytes[group.outputs[slot] if is_grad else slot] for is_grad, slot in derived.sources)
    backward = moved + sum(sizes.bytes[value] for value in derived.targets)
    passes = ((forward, group), (backward, derived.group))
    return sum(
        max(size, sum(cost_of_application(application, sizes) for application in item.applications))
        for size, item in passes
    )


def choose_saved(group: FusionGroup, read: Collection[int], sizes: Sizes, *, price: float) -> frozenset[int]:
    """Choose what the forward pass hands to the backward pass so that the cost is the least: a minimum cut.

    An input or output of the group costs one read of its bytes, any other value a write as well.

    Args:
        group: a canonical group.
        read: values that the backward pass reads, directly.
        sizes: those of the values.
        price: of the operations done again: 0 where memory is the slower in both passes, more where arithmetic is.

    Returns:
        The values that are no inputs: outputs of the group, or values that are worth to become one.
    """
    if all(value < len(group.inputs) for value in read):
        return frozenset()
    import networkx  # noqa: PLC0415 - takes longer to import than the rest of fuser

    flow: networkx.DiGraph[object] = networkx.DiGraph()
    flow.add_nodes_from(("source", "sink"))
    inputs, outputs = range(len(group.inputs)), frozenset(group.outputs)
    for value, size in enumerate(sizes.bytes):
        # Equal costs: the inputs, which live anyway.
        cost = 4 * size * (1 if value in inputs or value in outputs else 2) + (value not in inputs)
        flow.add_edge(("in", value), ("out", value), capacity=cost)
        if value in inputs:
            flow.add_edge("source", ("in", value))
        if value in read:
            flow.add_edge(("out", value), "sink")
    for index, (application, offset) in enumerate(zip(group.applications, group.value_offsets(), strict=True)):
        # On the sink's side is what is computed again.
        cost = round(4 * price * cost_of_application(application, sizes))
        flow.add_edge("source", ("application", index), capacity=cost)
        for slot in range(application.function.num_outputs):
            flow.add_edge(("application", index), ("in", offset + slot))
            for value in application.tensors:
                flow.add_edge(("out", value), ("in", offset + slot))
    reached, _ = networkx.minimum_cut(flow, "source", "sink")[1]
    cut = {node[1] for node in reached if node[0] == "in" and ("out", node[1]) not in reached}
    return frozenset(value for value in cut if value not in inputs)
