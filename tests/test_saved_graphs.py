"""Graphs that hold fusion nodes live on their own: saved in one process, run in another one that only imports fuser."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fuser
from fuser.library import merge_inputs, split_inputs

PROGRAM = Path(__file__).with_name("saved_graphs.py")
AXPY = "template <typename T> T axpy(T x, T y, T alpha) { return alpha * x * x + y; }"

EQUAL = {"equal": True, "gradients": True}
# What the process that loads finds.
FOUND = {
    "strict": EQUAL | {"fused": True, "launches": 2},
    "graph module": EQUAL,
    "pickle": {"equal": True, "same key": True},
    "fuser": EQUAL | {"from cache": 1, "plans": False},
    "fallback": "fuser.errors.GroupError: given has a fallback that is a Python function, which only the process knows "
    "that wrote this group: to save it, leave out jit_fn(..., fallback=)",
}
FOUND_SLOW = {
    "non-strict": EQUAL,
    "jit.trace": EQUAL,
    "dynamic": EQUAL | {"larger": True},
    "loop": EQUAL,
    "dynamic strict": EQUAL | {"larger": True},
    "fused module": EQUAL,
    "inductor": EQUAL | {"from cache": 1, "plans": False},
    "package": {"equal": True},
}


def run_program(action: str, folder: Path, cases: list[str]) -> dict[str, Any]:
    """Run tests/saved_graphs.py in a process of its own."""
    command = [sys.executable, str(PROGRAM), action, str(folder), *cases]
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.cpu
@pytest.mark.parametrize("expected", [FOUND, pytest.param(FOUND_SLOW, marks=pytest.mark.slow)], ids=["quick", "slow"])
def test_another_process_runs_what_was_saved(expected: dict[str, Any], tmp_path: Path) -> None:
    saved = run_program("save", tmp_path, [*expected])
    for backend in ("inductor", "fuser"):
        # The two do not take each other's graphs. Inductor's calls the functor's own groups, which eager torch planned.
        assert saved.pop(backend, None) in (None, EQUAL | {"from cache": 0, "plans": backend == "fuser"})
    assert set(saved.values()) == {None}
    assert run_program("load", tmp_path, [*expected]) == expected


# ---- in one process ----


@pytest.mark.cpu
def test_opcheck() -> None:
    spec = fuser.create_jit_fn(AXPY, alpha=1.0).spec(2)
    x, y = torch.randn(5), torch.randn(5)
    for inputs in ([x.requires_grad_(), y, 2.0], [x.detach().to(torch.complex64), y, 2j]):
        torch.library.opcheck(torch.ops.fuser.run.default, (spec.text, *split_inputs(inputs)))


TRANSFORMS: dict[str, Callable[[Callable[..., Any], torch.Tensor, torch.Tensor], Any]] = {
    "grad": lambda f, x, y: torch.func.grad(lambda x: f(x, y).sum())(x),
    "grad of grad": lambda f, x, y: torch.func.grad(lambda x: torch.func.grad(lambda x: f(x, y).sum())(x).sum())(x),
    "jvp": lambda f, x, y: torch.func.jvp(lambda x: f(x, y), (x,), (y,))[1],
    "jacfwd": lambda f, x, y: torch.func.jacfwd(lambda x: f(x, y))(x),
    "hessian": lambda f, x, y: torch.func.hessian(lambda x: f(x, y).sum())(x),
    "vmap": lambda f, x, y: torch.func.vmap(f, in_dims=(None, 0))(x, torch.stack([y, x])),
    "vmap of grad": lambda f, x, y: torch.func.vmap(torch.func.grad(f))(x, y),
    "functionalize": lambda f, x, y: torch.func.functionalize(f)(x, y),
    "vmap of functionalize": lambda f, x, y: torch.func.vmap(torch.func.functionalize(f))(x, y),
    "grad of functionalize": lambda f, x, y: torch.func.grad(torch.func.functionalize(lambda x: f(x, y).sum()))(x),
    "jit.trace": lambda f, x, y: torch.jit.trace(f, (y, x))(x, y),
}


@pytest.mark.cpu
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.trace.*:DeprecationWarning")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_a_traced_graph_and_of_the_functor(name: str) -> None:
    axpy = fuser.create_jit_fn(AXPY, alpha=1.0)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return axpy(axpy(x, y, alpha=2.0), y).sin()

    def plain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        inner = 2.0 * x * x + y
        return (inner * inner + y).sin()

    x, y = torch.linspace(-1, 1, 6, dtype=torch.float64), torch.linspace(0, 2, 6, dtype=torch.float64)
    # Each is traced for one shape.
    sample = (x[0], y[0]) if name.startswith("vmap of") else (x, y)
    for function in (step, make_fx(step)(*sample)):
        found = TRANSFORMS[name](function, x, y)
        torch.testing.assert_close(found, TRANSFORMS[name](plain, x, y))


class Scaled(torch.nn.Linear):
    """A fused function of what requires grad, that asks for a size, and one that writes to ``out=``."""

    def forward(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        y = super().forward(x)
        return clip_rows(y) if out is None else clip_rows(x, out=out) + y


@fuser.fuse
def clip_rows(x: torch.Tensor) -> torch.Tensor:
    return x.abs().relu() / x.shape[0] if x.shape[0] > 2 else x


@pytest.mark.cpu
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.trace.*:DeprecationWarning")
def test_torchs_own_traces_go_through_fused_functions() -> None:
    model, x = Scaled(4, 4), torch.randn(3, 4)
    traced = torch.jit.trace(model, (x,))
    x = torch.randn(5, 4)
    assert torch.equal(traced(x), clip_rows.function(torch.nn.Linear.forward(model, x)))
    out = torch.zeros(5, 4)
    torch.export.export(model, (x, out)).module()(x, out)
    assert torch.equal(out, clip_rows.function(x))


@pytest.mark.cpu
def test_forward_mode_and_plain_autograd_through_a_traced_graph() -> None:
    axpy = fuser.create_jit_fn(AXPY, alpha=1.0)
    x, y = torch.linspace(-1, 1, 6, dtype=torch.float64), torch.linspace(0, 2, 6, dtype=torch.float64)
    graph = make_fx(lambda x, y: axpy(x, y, alpha=2.0))(x, y)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, y)
        assert torch.equal(torch.autograd.forward_ad.unpack_dual(graph(dual, y)).tangent, 4.0 * x * y)
    x.requires_grad_()
    assert torch.autograd.gradcheck(graph, (x, y))
    assert torch.autograd.gradgradcheck(graph, (x, y))


@pytest.mark.cpu
def test_a_python_fallback_works_where_it_was_given() -> None:
    twice = fuser.jit_fn("template <typename T> T twice(T x) { return x + x; }", fallback=lambda x: x + x)
    x = torch.randn(5)
    assert torch.equal(torch.compile(twice, backend="aot_eager", fullgraph=True)(x), x + x)
    group = twice.spec(1).group
    assert fuser.FusionGroup.from_json(group.to_json()) == group


@pytest.mark.cpu
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_floats_from_sizes_compile_once(backend: str) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    scale = fuser.create_jit_fn("template <typename T> T scale(T x, T y, double s) { return x * T(s) + y; }", s=1.0)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(
        lambda x: scale(x, x.shape[0] / 3, s=x.shape[0] / 7), backend=counter, dynamic=True, fullgraph=True
    )
    for size in (2, 3, 4, 5):
        x = torch.randn(size, 3)
        assert torch.equal(compiled(x), scale(x, size / 3, s=size / 7))
    # The first size alone is compiled apart by AOTAutograd of torch 2.11.
    is_apart = backend == "aot_eager" and torch.torch_version.TorchVersion(torch.__version__) < "2.12"
    assert counter.frame_count == 1 + is_apart
    whole = torch.arange(6)
    compiled = torch.compile(lambda x: scale(x, x.shape[0] / 3), backend=backend, dynamic=True, fullgraph=True)
    assert compiled(whole).dtype is torch.float32


def test_inputs_survive_the_split() -> None:
    x = torch.ones(2)
    inputs = [True, 3, x, 2.5, -math.inf, 1j, complex(math.inf, -0.0), False, -(2**63), x]
    split = split_inputs(inputs)
    assert split.kinds == "bitf-cffc+fbit"
    merged = merge_inputs(*split)
    assert [*map(repr, merged)] == [*map(repr, inputs)]
    assert math.isnan(merge_inputs(*split_inputs([math.nan]))[0])
    # What AOTInductor makes of an empty list.
    assert merge_inputs("tf", [x], None, [1.0]) == [x, 1.0]  # type: ignore[arg-type]
    with pytest.raises(fuser.errors.ArgumentError, match="expected a tensor or a Python number, got str"):
        split_inputs(["x"])
