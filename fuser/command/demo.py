"""``python -m fuser demo``: four functors in one launch, beside one launch each and eager torch, on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from fuser import counters
from fuser.fx.fused_module import fuse
from fuser.jiterator import create_jit_fn

__all__ = ["SIZE", "run"]

SIZE = {"cpu": 1 << 22, "cuda": 1 << 26}
SECONDS = 0.2

TEXTS = {
    "balance": "template <typename T> T balance(T x, T gain) { return x * gain; }",
    "expose": "template <typename T> T expose(T x, T stops) { return x * exp2(stops); }",
    "curve": "template <typename T> T curve(T x) { return x / (T(1) + x); }",
    "blend": "template <typename T> T blend(T x, T y, T part) { return x + part * (y - x); }",
}


def run(device: str, size: int) -> Iterator[str]:
    """Yield what there is to say as it comes; lines that begin with ``#`` are titles.

    Raises:
        As a functor's call.
    """
    yield "# Four functors, as torch.cuda.jiterator takes them"
    yield from TEXTS.values()
    balance, expose, curve = (create_jit_fn(TEXTS[name]) for name in ("balance", "expose", "curve"))
    blend = create_jit_fn(TEXTS["blend"], part=0.25)

    def develop(x: Any, gain: Any, stops: Any) -> Any:
        return blend(curve(expose(balance(x, gain), stops)), torch.relu(x))

    def eagerly(x: torch.Tensor, gain: torch.Tensor, stops: torch.Tensor) -> torch.Tensor:
        light = x * gain * torch.exp2(stops)
        return torch.lerp(light / (1 + light), torch.relu(x), 0.25)

    from torch.utils.benchmark import Timer  # noqa: PLC0415 - takes long, of every command

    fused = fuse(develop)
    x, gain, stops = (torch.rand(size, device=device) for _ in range(3))
    want, before = develop(x, gain, stops), counters.stats()["launches"]
    got = fused(x, gain, stops)
    launches = counters.stats()["launches"] - before
    made = f"{launches} launch{'es' * (launches > 1)}" if launches else "no launch, but calls of eager torch"
    yield f"# fuser.fuse makes them, and torch.relu, {made}; on {device}, {size:,} float32 elements:"
    usual = None
    ways: dict[str, Callable[..., Any]] = {"eager torch": eagerly, "one launch each": develop, "fused": fused}
    for name, function in ways.items():
        known = {"f": function, "x": x, "gain": gain, "stops": stops}
        timer: Any = Timer("f(x, gain, stops)", globals=known, num_threads=torch.get_num_threads())
        taken_ms = timer.blocked_autorange(min_run_time=SECONDS).median * 1e3
        usual = usual or taken_ms
        yield f"{name:<16}{taken_ms:9.3f} ms  {usual / taken_ms:5.2f} x eager"
    yield f"the same bits as one launch each: {'yes' if torch.equal(got, want) else 'NO'}"
    leaf = x[:1000].double().requires_grad_()
    others = gain[:1000].double(), stops[:1000].double()
    (slope,) = torch.autograd.grad(fused(leaf, *others).sum(), leaf)
    (wanted,) = torch.autograd.grad(eagerly(leaf, *others).sum(), leaf)
    yield f"the gradient, derived from the texts, is eager torch's: {'yes' if torch.allclose(slope, wanted) else 'NO'}"
    yield "the kernels: `python -m fuser show FILE` for a functor in a file, fuser.explain(function, *tensors) for all"
