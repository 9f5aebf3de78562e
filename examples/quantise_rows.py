"""Quantise activations to float8, a scale per row, as matrix products in float8 want them.

Eager torch reads and writes the activations four times: once for the activation function, once for the largest
magnitude of each row, once to divide by the scale, once to convert. ``fuser.fuse`` makes one kernel of all of it, with
torch's bits: a maximum is the same in any order. Beside it stands a reduction of our own, which finds where in its row
the largest magnitude is (an outlier worth to know of): two accumulators, a map that takes the place of an element, and
a finish that keeps one of them.

Run it with ``python examples/quantise_rows.py``. It ends with an error unless every element is that of eager torch,
from one launch, and every place is a row's first largest.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

import fuser

ROWS, LENGTH = 512, 4096
# The largest number of float8_e4m3fn.
LARGEST = 448.0

place_of_largest = fuser.create_reduction_fn(
    """
template <typename T> void larger(T a, int64_t i, T b, int64_t j, T& v, int64_t& at) {
  const bool first = a > b || (a == b && i < j);
  v = first ? a : b;
  at = first ? i : j;
}""",
    identity=(-1.0, 2**62),
    map="template <typename T> void magnitude(T x, int64_t i, T& v, int64_t& at) { v = x < T(0) ? -x : x; at = i; }",
    finish="template <typename T> int64_t place(T v, int64_t at) { return at; }",
    index="i",
)


def quantise(x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``relu(gate) * x`` (rows, length) in float8, and the scale of each row (rows, 1)."""
    product = torch.relu(gate) * x
    scale = product.abs().amax(-1, keepdim=True).clamp(min=1e-12) * (1.0 / LARGEST)
    return (product / scale).to(torch.float8_e4m3fn), scale


def main() -> int:
    """Compare with eager torch; return the number of what differs."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, gate = (torch.randn(ROWS, LENGTH, device=device) for _ in range(2))
    fused = fuser.fuse(quantise)
    fused(x, gate)
    fuser.reset_stats()
    numbers, scale = fused(x, gate)
    launches = fuser.stats()["launches"]
    wanted, wanted_scale = quantise(x, gate)
    places = place_of_largest(x, dim=1)
    largest = x.abs().amax(1, keepdim=True)
    checks = {
        "float8 numbers": torch.equal(numbers.view(torch.uint8), wanted.view(torch.uint8)),
        "scales": torch.equal(scale, wanted_scale),
        "one launch": launches == 1,
        "places": torch.equal(places, (x.abs() == largest).int().argmax(1)),
    }
    for name, holds in checks.items():
        print(f"{name:16}{'as eager torch' if holds else 'DIFFERENT'}")
    return sum(not holds for holds in checks.values())


if __name__ == "__main__":
    sys.exit(main())
