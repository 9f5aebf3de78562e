"""Train a network with a SwiGLU layer on handwritten digits; the activation is two functors in one launch.

SwiGLU (N. Shazeer, "GLU Variants Improve Transformer", 2020) multiplies one half of a layer's values by the SiLU of the
other half. Here SiLU and product are two functors, and ``fuser.fuse`` makes one kernel of them. Its backward pass is
derived from their texts and is one kernel, too. Both read the halves where they are, as strided slices.

Run it with ``python examples/swiglu_digits.py``. It ends with an error unless more than 95 % of the digits that it has
not seen are recognised and every kernel was compiled.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import Tensor, nn
from torch.nn import functional

import fuser

WIDTH = 128
EPOCHS = 20
BATCH = 128

silu = fuser.jit_fn("""
template <typename T> T silu(T x) {
  return x / (T(1) + std::exp(-x));
}""")

product = fuser.jit_fn("template <typename T> T product(T a, T b) { return a * b; }")


@fuser.fuse
def swiglu(gate: Tensor, value: Tensor) -> Tensor:
    """Return ``silu(gate) * value``."""
    return product(silu(gate), value)


class Network(nn.Module):
    """Pixels, a SwiGLU layer, and a score for each digit."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(64, 2 * WIDTH)
        self.leave = nn.Linear(WIDTH, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return scores (n, 10) for pixels (n, 64)."""
        return self.leave(swiglu(*self.enter(pixels).chunk(2, dim=-1)))


def load_digits(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return pixels and labels to train with, and pixels and labels to test with: three quarters and one quarter."""
    from sklearn import datasets

    digits = datasets.load_digits()
    pixels = torch.tensor(digits.data, dtype=torch.float32, device=device) / 16
    labels = torch.tensor(digits.target, device=device)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).to(device)
    train, test = order.tensor_split([len(order) * 3 // 4])
    return pixels[train], labels[train], pixels[test], labels[test]


def train(network: Network, pixels: Tensor, labels: Tensor) -> int:
    """Train in place, print the loss as it falls, and return the number of steps."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=5e-3, weight_decay=1e-2)
    generator = torch.Generator().manual_seed(1)
    steps = 0
    for epoch in range(1, EPOCHS + 1):
        total = torch.zeros((), device=pixels.device)
        for batch in torch.randperm(len(labels), generator=generator).to(pixels.device).split(BATCH):
            loss = functional.cross_entropy(network(pixels[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(batch)
            steps += 1
        if epoch in {1, 2} or epoch % 5 == 0:
            print(f"epoch {epoch:3d}   loss {float(total) / len(labels):.4f}")
    return steps


def main() -> int:
    """Train, test and print; return the exit code."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        train_pixels, train_labels, test_pixels, test_labels = load_digits(device)
    except ModuleNotFoundError as error:
        print(f"swiglu_digits.py: the example needs {error.name}: pip install 'torch-fuser[demo]'", file=sys.stderr)
        return 1
    print(f"{len(train_labels)} digits to train with, {len(test_labels)} to test with, on {device}")

    network = Network().to(device)
    fuser.reset_stats()
    began = time.perf_counter()
    steps = train(network, train_pixels, train_labels)
    seconds = time.perf_counter() - began
    stats = fuser.stats()
    with torch.no_grad():
        accuracy = float((network(test_pixels).argmax(-1) == test_labels).double().mean())

    print(f"{steps} steps in {seconds:.1f} s")
    print(f"launches     {stats['launches']}: {stats['launches'] / steps:.2f} per step, forward and backward")
    print(f"compilations {stats['compiles']}")
    print(f"fallbacks    {sum(stats['fallbacks'].values())}")
    print(f"accuracy     {accuracy:.1%} of the digits it has not seen")
    return 0 if accuracy > 0.95 and not stats["fallbacks"] else 1


if __name__ == "__main__":
    sys.exit(main())
