"""What calls took is let go with its last user: no tensor waits for garbage to be collected, no callable stays."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fuser
from fuser import compiler, executor, order_check, planner
from fuser.library import split_inputs

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("uncollected")]

SQUARE = "template <typename T> T square(T x, T s) { return x * x * s; }"
ADD = "template <typename T> T add(T a, T b) { return a + b; }"


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Let nothing go but what nobody refers to any more."""
    # What torch.func and AOTAutograd import on their first use fails here and there, and what fails holds its callers.
    torch.func.vjp(torch.sin, torch.ones(2))[1](torch.ones(2))
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def square() -> Callable[..., Any]:
    return fuser.create_jit_fn(SQUARE, s=2.0)


def squares() -> Callable[[Tensor], Any]:
    function = square()
    return lambda x: fuser.foreach(function, [x, x])[0]


def scaled() -> Callable[[Tensor], Any]:
    function = square()
    return lambda x: function(x.detach(), s=x.sum())


def operator() -> Callable[[Tensor], Any]:
    group = fuser.create_jit_fn(SQUARE, s=2.0).spec(1).text
    return lambda x: torch.ops.fuser.run(group, *split_inputs([x, 2j if x.is_complex() else 2.0]))


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(x)) * 2


# Makes what is called with one tensor of 3 x 4, anew: first calls are those that trace, plan and compile.
ROUTES: dict[str, Callable[[], Callable[[Tensor], Any]]] = {
    "a functor": square,
    "a loop": lambda: fuser.create_jit_fn("template <typename T> T f(T x) { while (x > T(1)) x /= T(2); return x; }"),
    "a scalar that is a tensor": scaled,
    "a reduction": lambda: fuser.create_reduction_fn(ADD, identity=0),
    "foreach": squares,
    "the operator": operator,
    "a fused function": lambda: fuser.fuse(lambda x: torch.relu(x) * 2 + x),
    "facts of sizes": lambda: fuser.fuse(lambda x: x * 2 if x.shape[0] > 2 else x.exp()),
    "torch's reductions": lambda: fuser.fuse(lambda x: torch.softmax(x, -1) * x.amax(-1, keepdim=True)),
    "a module": lambda: fuser.fuse(Scaled()),
    "a compiled function": lambda: torch.compile(lambda x: torch.relu(x) * x.cumsum(0), backend="fuser"),
}


KINDS = [*((name, torch.float32) for name in ROUTES), ("a functor", torch.complex64), ("the operator", torch.complex64)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "dtype"), KINDS, ids=str)
def test_no_call_keeps_its_tensors(name: str, dtype: torch.dtype) -> None:
    assert_lets_go(ROUTES[name](), lambda: torch.randn(3, 4, dtype=dtype))


def assert_lets_go(function: Callable[[Tensor], Any], draw: Callable[[], Tensor]) -> None:
    """Assert that calls, first ones and later ones, with gradients and without, leave nobody who refers to x."""

    def call(*, is_differentiated: bool) -> weakref.ref[Tensor]:
        x = draw().requires_grad_(is_differentiated)
        made = function(x)
        if is_differentiated:
            (made[0] if isinstance(made, list) else made).abs().sum().backward()
        return weakref.ref(x)

    for is_differentiated in (False, False, True, True):
        assert call(is_differentiated=is_differentiated)() is None


SUMS: dict[str, Callable[[], Callable[[Tensor], Any]]] = {
    "a fused function": lambda: fuser.fuse(lambda x: (x * 2).exp().sum(-1) + 1),
    "a compiled function": lambda: torch.compile(lambda x: (x * 2).exp().sum(-1) + 1, backend="fuser", dynamic=True),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", SUMS)
def test_a_call_that_stays_torchs_in_part_keeps_none_either(
    name: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What says so was raised, maybe in another thread, and had the frames of all callers in its traceback.
    monkeypatch.setattr(planner, "is_kept", lambda *_: False)
    monkeypatch.setattr(order_check.OrderCase, "verdict", lambda _: None)
    monkeypatch.setattr(compiler, "core_count", lambda: threads)
    monkeypatch.setattr(executor, "_plans", {})
    assert_lets_go(SUMS[name](), lambda: torch.randn(40, 64))


class Model:
    factor = 2.0

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        self.body = body
        # Each call looks at ``self.factor`` first, so that its records hold this object, and it them.
        self.run = fuser.fuse(self.forward)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


BODIES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "one launch": lambda self, x: torch.relu(x) * self.factor,
    "several": lambda self, x: (torch.relu(x) * self.factor).cumprod(0) * self.factor,
}


@pytest.mark.parametrize("name", BODIES)
def test_what_its_own_calls_hold_is_collected(name: str) -> None:
    model, x = Model(BODIES[name]), torch.ones(4)
    wanted = [model.forward(x)] * 2
    assert torch.equal(torch.stack([model.run(x) for _ in wanted]), torch.stack(wanted))
    gc.collect()
    # Records that are in use stay.
    replayed = model.run.launch((x,), None, None)
    assert replayed is not None
    assert torch.equal(replayed, wanted[0])
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None
