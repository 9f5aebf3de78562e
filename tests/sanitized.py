"""Launches small kernels of every kind and compares them with the CPU: what test_sanitizers.py runs under a tool.

``python sanitized.py [--broken]``; with it, a functor writes outside its array.
"""

from __future__ import annotations

import sys

import torch
from functors import same_bits
from row_groups import GROUPS, draw, layouts_of, on_gpu

import fuser
from fuser.compiler import register
from fuser.route import run

# Rows of one thread, a warp, several warps, a block, several chunks, several blocks; across the rows; of several
# dimensions; of nothing.
SHAPES = (
    ((5, 7), (-1,)), ((9, 1000), (1,)), ((3, 5000), (1,)), ((2, 20000), (1,)), ((1, 70000), (1,)), ((300, 33), (0,)),
    ((9000, 3), (0,)), ((4, 9, 5, 6), (0, 2, 3)), ((3, 0), (1,)),
)  # fmt: skip
POINTWISE = ((64, 64), (33, 130), (3, 1000), (3, 1021), (0, 4))
BROKEN = "template <typename T> T broken(T x) { *reinterpret_cast<volatile T*>(uint64_t(64)) = x; return x; }"

mix = fuser.create_jit_fn("template <typename T> T mix(T x, T y, T by) { return x > y ? x : y * by; }", by=0.5)


def main() -> int:
    """Run all; return how many differ."""
    if "--broken" in sys.argv:
        fuser.create_jit_fn(BROKEN)(torch.ones(8, device="cuda"))
        torch.cuda.synchronize()
        return 0
    differ = count = 0
    for shape in POINTWISE:
        for dtype in (torch.float32, torch.bfloat16, torch.int8):
            base = draw(shape, dtype)
            for _, x in layouts_of(base):
                differ += not torch.equal(mix(*on_gpu([x, base])).cpu(), mix(x, base))
                count += 1
    for place, (build, inputs_of) in enumerate(GROUPS.values()):
        for number, (shape, dims) in enumerate(SHAPES):
            chosen = list(layouts_of(draw(shape, torch.bfloat16 if number % 2 else torch.float32)))
            inputs = inputs_of(chosen[(place + number) % len(chosen)][1], dims)
            key = register(build(dims))
            pairs = zip(run(key, on_gpu(inputs)), run(key, inputs), strict=True)
            differ += not all(same_bits(got.cpu(), wanted) for got, wanted in pairs)
            count += 1
    torch.cuda.synchronize()
    sys.stdout.write(f"{count} launches, {differ} differ, {fuser.n_compiled_kernels()} kernels\n")
    return differ


if __name__ == "__main__":
    sys.exit(bool(main()))
