"""Fit a force field to forces: the forces are a gradient, so that fitting them takes a gradient of a gradient.

Charged atoms attract and repel each other along every pair's distance r by the sum of two functors: the potential of
P. M. Morse (1929), D (1 - exp(-a (r - b)))^2 - D, and C. A. Coulomb's, q / r with opposite signs for unlike charges.
``fuser.fuse`` makes one kernel of both. The force on an atom is minus the derivative of the energy by its position; the
loss compares forces, so its derivative by D, a, b and q needs the second derivative of that kernel. Nobody writes any
of these derivatives: they come from the functors' texts.

Run it with ``python examples/force_field.py``. It makes forces with known parameters, starts from wrong ones, and ends
with an error unless it finds the known ones again, to one part in a thousand.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import Tensor

import fuser

FRAMES, ATOMS = 32, 8
# The depth D, the width a and the distance b of Morse's potential, and the strength q of Coulomb's.
NAMES = ("depth", "width", "distance", "charge")
TRUE = (2.0, 1.3, 1.6, 0.7)
START = (1.0, 1.0, 1.3, 0.1)

morse = fuser.jit_fn("""
template <typename T> T morse(T r, T depth, T width, T distance) {
  const T rest = T(1) - std::exp(-width * (r - distance));
  return depth * (rest * rest - T(1));
}""")

coulomb = fuser.jit_fn("""
template <typename T> T coulomb(T r, T sign, T charge) {
  return charge * sign / r;
}""")


@fuser.fuse
def pair_energy(r: Tensor, sign: Tensor, depth: Tensor, width: Tensor, distance: Tensor, charge: Tensor) -> Tensor:
    """Return the energy of each pair of atoms."""
    return morse(r, depth, width, distance) + coulomb(r, sign, charge)


def energy(positions: Tensor, charges: Tensor, parameters: Tensor) -> Tensor:
    """Return the energy (frames,) of positions (frames, atoms, 3)."""
    first, second = torch.triu_indices(ATOMS, ATOMS, offset=1)
    r = torch.linalg.vector_norm(positions[:, first] - positions[:, second], dim=-1)
    return pair_energy(r, charges[first] * charges[second], *parameters.unbind()).sum(-1)


def forces(positions: Tensor, charges: Tensor, parameters: Tensor) -> Tensor:
    """Return the forces (frames, atoms, 3), which can be differentiated again."""
    positions = positions.detach().requires_grad_()
    (slope,) = torch.autograd.grad(energy(positions, charges, parameters).sum(), positions, create_graph=True)
    return -slope


def make_frames(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return positions, the corners of a cube displaced at random, and charges, +1 and -1 by turns along its edges."""
    generator = torch.Generator().manual_seed(0)
    corners = torch.cartesian_prod(*[torch.tensor([0.0, 1.7], dtype=torch.float64)] * 3)
    moves = 0.25 * torch.randn(FRAMES, ATOMS, 3, generator=generator, dtype=torch.float64)
    charges = 1 - 2 * ((corners > 0).sum(-1) % 2).double()
    return (corners + moves).to(device), charges.to(device)


def check_forces(positions: Tensor, charges: Tensor, parameters: Tensor) -> float:
    """Return how far a force is from the energy's difference quotient, relative to the largest force."""
    step = torch.zeros_like(positions)
    step[:, 0, 0] = 1e-5
    with torch.no_grad():
        change = energy(positions + step, charges, parameters) - energy(positions - step, charges, parameters)
    found = forces(positions, charges, parameters).detach()
    return float((found[:, 0, 0] + change / 2e-5).abs().max() / found.abs().max())


def fit(positions: Tensor, charges: Tensor, wanted: Tensor) -> tuple[Tensor, int]:
    """Return the parameters that explain the wanted forces, and how often the loss was differentiated."""
    parameters = torch.tensor(START, dtype=torch.float64, device=positions.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([parameters], max_iter=20, line_search_fn="strong_wolfe")
    count = 0

    def loss() -> Tensor:
        nonlocal count
        count += 1
        optimizer.zero_grad()
        value = (forces(positions, charges, parameters) - wanted).square().mean()
        value.backward()
        return value

    for turn in range(1, 4):
        before = float(optimizer.step(loss).detach())
        shown = ", ".join(f"{name} {value:.4f}" for name, value in zip(NAMES, parameters.tolist(), strict=True))
        print(f"turn {turn}   loss {before:9.2e} -> {shown}")
    return parameters.detach(), count


def main() -> int:
    """Fit and print; return the exit code."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    positions, charges = make_frames(device)
    true = torch.tensor(TRUE, dtype=torch.float64, device=device)
    wanted = forces(positions, charges, true).detach()
    error = check_forces(positions, charges, true)
    print(f"{FRAMES} frames of {ATOMS} atoms, {ATOMS * (ATOMS - 1) // 2} pairs each, on {device}")
    print(f"forces are the energy's difference quotients to {error:.1e}")

    fuser.reset_stats()
    began = time.perf_counter()
    found, count = fit(positions, charges, wanted)
    seconds = time.perf_counter() - began
    stats = fuser.stats()
    worst = float(((found - true) / true).abs().max())

    print(f"{count} gradients of the loss in {seconds:.1f} s")
    print(f"launches     {stats['launches']}: {stats['launches'] / count:.1f} per gradient")
    print(f"fallbacks    {sum(stats['fallbacks'].values())}")
    for name, value, start, target in zip(NAMES, found.tolist(), START, TRUE, strict=True):
        print(f"{name:<12} {start:.1f} -> {value:.6f}   (true: {target})")
    return 0 if worst < 1e-3 and error < 1e-6 and not stats["fallbacks"] else 1


if __name__ == "__main__":
    sys.exit(main())
