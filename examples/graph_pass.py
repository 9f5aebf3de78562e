"""Put functors and fusion nodes into a traced model, by passes of torch.fx.

A model of residual blocks is traced. One pass of our own puts a functor in place of every GELU (x times a sigmoid of
1.702 x, as CLIP has it); ``fuser.fx.FusionPass`` then puts one node in place of each chain, from a product of matrices
to the next: bias, activation, residual sum and norm. The model stays a module, which learns.

Run it with ``python examples/graph_pass.py``. It prints the graph before and after, and ends with an error unless the
result is that of the graph without fusion nodes, bit for bit, gradients are its to a rounding, and only products of
matrices are left over.
"""

from __future__ import annotations

import copy
import sys

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody uses
from torch import Tensor, fx, nn

import fuser

WIDTH, BLOCKS = 64, 2

quick_gelu = fuser.jit_fn("template <typename T> T quick_gelu(T x) { return x / (T(1) + exp(T(-1.702) * x)); }")


class Block(nn.Module):
    """Two products of matrices with an activation between them, on top of what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.bias, self.scale = nn.Parameter(torch.randn(4 * WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of ``x`` (rows, width)."""
        inner = F.gelu(self.wide(x) + self.bias)
        return x + self.scale * self.narrow(inner)


def put_functors(traced: fx.GraphModule) -> int:
    """Let a functor compute each GELU; return how many there are."""
    found = traced.graph.find_nodes(op="call_function", target=F.gelu)
    for node in found:
        node.target = quick_gelu
    traced.recompile()
    return len(found)


def differentiate(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return a model's result and the gradients of its parameters."""
    made = model(x)
    return [made, *torch.autograd.grad(made.square().mean(), list(model.parameters()))]


def main() -> int:
    """Compare with the graph without fusion nodes; return the number of what differs."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(*(Block() for _ in range(BLOCKS))).to(device)
    x = torch.randn(128, WIDTH, device=device)
    traced = fx.symbolic_trace(model)
    replaced = put_functors(traced)
    print(traced.graph)
    plain = copy.deepcopy(traced)
    changed = fuser.fx.FusionPass()(traced).modified
    print(traced.graph)
    (made, *gradients), (wanted, *expected) = differentiate(traced, x), differentiate(plain, x)
    left = [name for name, _ in fuser.explain(traced).unfused]
    checks = {
        "functors": replaced == BLOCKS and changed,
        "bits": torch.equal(made, wanted),
        "gradients": all(map(torch.allclose, gradients, expected)),
        "products left": len(left) == 2 * BLOCKS and all(name.endswith(("wide", "narrow")) for name in left),
    }
    for name, holds in checks.items():
        print(f"{name:14}{'holds' if holds else 'DIFFERENT'}")
    return sum(not holds for holds in checks.values())


if __name__ == "__main__":
    sys.exit(main())
