"""Chains in which tensors are put together, padded, rolled, turned or written in parts: torch.compile and fuser.fuse.

    python -m benchmarks.arrangements                  # about two minutes on a GPU
    python -m benchmarks.arrangements --case pad heads

Writes benchmarks/results/arrangements_DEVICE.json, as ``benchmarks.left_behind`` does, with its contestants.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.left_behind import Case, find_device, floats, run

BF16 = torch.bfloat16


def turn_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn neighbours by their positions."""
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def set_edge(x: Tensor) -> Tensor:
    """Write to a column of what was computed."""
    made = x * 2
    made[:, 0] = 1
    return made


def gate(x: Tensor) -> Tensor:
    """Weight one half by the other."""
    value, weight = x.chunk(2, -1)
    return functional.gelu(value) * weight


def side(elements: int) -> int:
    """Return that of a square of so many elements."""
    return int(elements**0.5)


def square(elements: int) -> tuple[Tensor, ...]:
    """Draw a square."""
    return floats((side(elements), side(elements)), dtype=BF16)


def two(elements: int) -> tuple[Tensor, ...]:
    """Draw two halves of a square."""
    return floats(*[(side(elements), side(elements) // 2)] * 2, dtype=BF16)


def odd(elements: int) -> tuple[Tensor, ...]:
    """Draw the same of odd sizes."""
    return floats((side(elements), side(elements) // 2 + 1), (side(elements), side(elements) // 2 - 3), dtype=BF16)


def tokens(elements: int) -> tuple[Tensor, ...]:
    """Draw 16 heads of 64 side by side."""
    return floats((16, elements >> 14, 1024), dtype=BF16)


def images(elements: int) -> tuple[Tensor, ...]:
    """Draw images of 128 channels."""
    return floats((elements >> 19, 128, 64, 64), dtype=BF16)


def pairs(elements: int) -> tuple[Tensor, ...]:
    """Draw heads, and the turns of their positions."""
    return floats((8, 32, elements >> 15, 128), (elements >> 15, 64), (elements >> 15, 64), dtype=BF16)


def table(elements: int) -> tuple[Tensor, ...]:
    """Draw rows of 64, and which of them are read."""
    return *floats((5000, 64), dtype=BF16), torch.randint(0, 5000, (elements >> 6,), device=find_device())


def features(elements: int) -> tuple[Tensor, ...]:
    """Draw rows of 64 features and of 3, in float32."""
    return floats((elements // 64, 64), (elements // 64, 3))


def find_cases() -> dict[str, Case]:
    """Return the cases by name."""
    return {
        "cat of columns": Case(lambda x, y: torch.cat([x * 2, y + 1], 1), two),
        "cat of odd columns": Case(lambda x, y: torch.cat([x * 2, y + 1], 1), odd),
        "stack": Case(lambda x, y: torch.stack([x * 2, y + 1], -1), two),
        "pad": Case(lambda x: functional.pad(x * 2, (1, 1)), square),
        "roll": Case(lambda x: (x * 2).roll(3, 1), square),
        "tril": Case(lambda x: torch.tril(x * 2), square),
        "neighbours": Case(lambda x: x[1:, :-1] + x[:-1, 1:], square),
        "in place": Case(lambda x: x.clone().mul_(2).add_(1), square),
        "a column written": Case(set_edge, square),
        "transposed": Case(lambda x: (x * 2).t().contiguous(), square),
        "heads": Case(lambda x: (x * 2).view(16, -1, 16, 64).transpose(1, 2).contiguous(), tokens),
        "pixel shuffle": Case(lambda x: functional.pixel_shuffle(x * 2, 2), images),
        "repeat": Case(lambda x: x.repeat(1, 2) * 2, square),
        "gate": Case(gate, square),
        "rotation of pairs": Case(turn_pairs, pairs),
        "features": Case(lambda x, y: torch.cat([x * 2, y + 1], 1), features),
        "padded images": Case(lambda x: functional.pad(x * 2, (1, 1, 1, 1)), images),
        "embedding": Case(lambda table, entries: table[entries] * 2, table),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    run(find_cases(), "arrangements", arguments)


if __name__ == "__main__":
    main()
