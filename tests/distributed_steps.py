"""One rank of test_wrappers: ``distributed_steps.py RANK STORE DEVICE KIND`` says whether bits are equal."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 + F.dropout(self.second(torch.relu(self.first(x)) * 3), 0.25, self.training)


def step(kind: str, backend: str, device: torch.device, rank: int) -> list[torch.Tensor]:
    """Train two steps; return parameters as each rank has them."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module: Any = nn.Sequential(Block(), Block()).to(device)
    if kind == "ddp":
        module = nn.parallel.DistributedDataParallel(module)
    else:
        from torch.distributed.fsdp import fully_shard

        for block in module:
            fully_shard(block)
        fully_shard(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    compiled = torch.compile(module, backend=backend)
    torch.manual_seed(rank)
    for _ in range(2):
        compiled(torch.randn(16, 32, device=device)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [item.detach() for item in module.parameters()]
    return [item.full_tensor() if hasattr(item, "full_tensor") else item for item in found]


def main(rank: int, store: str, device_type: str, kind: str) -> None:
    """Compare two steps under fuser with those under aot_eager."""
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2)
    wanted, made = step(kind, "aot_eager", device, rank), step(kind, "fuser", device, rank)
    import fuser

    stats = fuser.stats()
    sys.stdout.write(f"{rank} {all(map(torch.equal, made, wanted))} {stats['launches'] > 0} {stats['fallbacks']}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
