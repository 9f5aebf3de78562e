"""What users' type checkers see: ``make types`` checks this file strictly, where a wrong line needs its comment."""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import torch
from torch import Tensor

import fuser
from fuser.debug import Explanation, GroupReport

add = fuser.create_jit_fn("template <typename T> T add(T x, T y) { return x + y; }")
both = fuser.create_multi_output_jit_fn(
    "template <typename T> void both(T x, T& a, T& b) { a = x; b = -x; }", num_outputs=2
)
named = fuser.jit_fn("template <typename T> T named(T x, T a) { return a * x; }", scalars={"a": 2})
several = fuser.jit_fn("template <typename T> void two(T x, T& a, T& b) { a = x; b = x; }", num_outputs=2)

SUM = "template <typename T> T add(T x, T y) { return x + y; }"
PAIR = "template <typename T> void pair(T a, T b, T c, T d, T& e, T& f) { e = a + c; f = b + d; }"
total = fuser.create_reduction_fn(SUM, identity=0)
totals = fuser.create_reduction_fn(PAIR, identity=(0, 0.0))
finished = fuser.create_reduction_fn(SUM, identity=0, map="template <typename T> T f(T x) { return x; }", finish=named)


@fuser.fuse
def scale(x: Tensor, factor: float = 2.0) -> Tensor:
    """A fused function keeps its signature."""
    return add(x, x) * factor


class Layer(torch.nn.Module):
    """With a fused method."""

    @fuser.fuse
    def scale(self, x: Tensor) -> tuple[Tensor, int]:
        """A fused method is bound as a method is."""
        return add(x, x), 1


def check(x: Tensor) -> None:
    """Ask for types."""
    assert_type(add(x, x), Tensor)
    assert_type(both(x), tuple[Tensor, ...])
    assert_type(named(x, a=1.0), Tensor)
    assert_type(several(x), tuple[Tensor, ...])
    assert_type(scale(x, factor=1.0), Tensor)
    assert_type(scale(x, out=torch.empty_like(x)), Tensor)
    assert_type(Layer().scale(x), tuple[Tensor, int])
    assert_type(len(fuser.explain(scale, x, factor=1.0).groups), int)
    assert_type(fuser.explain(add, x, x).groups, tuple[GroupReport, ...])
    assert_type(fuser.explain(torch.compile(scale, backend="fuser"), x).graphs, tuple[Explanation, ...])
    assert_type(fuser.foreach(add, [x], [x]), list[Tensor])
    assert_type(fuser.foreach(both, [x]), tuple[list[Tensor], ...])
    assert_type(fuser.foreach(scale, [x]), list[Tensor])
    assert_type(total(x, dim=1), Tensor)
    assert_type(totals(x, x), tuple[Tensor, ...])
    assert_type(finished(x, a=1.0), Tensor)
    assert_type(fuser.differentiable(both, add)(x), tuple[Tensor, ...])
    assert_type(fuser.differentiable(scale, add)(x, factor=1.0), Tensor)
    assert_type(fuser.differentiable(torch.relu, add)(x), Tensor)
    fuser.create_reduction_fn(SUM)  # type: ignore[call-overload]
    scale("no tensor")  # type: ignore[call-overload]
    scale(x, 1.0, 2.0)  # type: ignore[call-overload]
    Layer().scale(x, x)  # type: ignore[call-overload]
    fuser.jit_fn("", outputs=2)  # type: ignore[call-overload]
    fuser.jitfn("")  # type: ignore[attr-defined]
    fuser.config.numerics = "fast"
    fuser.config.numerics = "quick"  # type: ignore[assignment]
    fuser.config.numeric = "fast"  # type: ignore[attr-defined]
    fuser.config.cache_dir = Path("somewhere")
    assert_type(fuser.config.cache_dir, str | None)
    fuser.config.cache_dir = 3  # type: ignore[assignment]
    with fuser.config.patch(numerics="fast", logs="source", dump=Path("somewhere")):
        pass
    with fuser.config.patch(numeric="fast"):  # type: ignore[call-arg]
        pass
