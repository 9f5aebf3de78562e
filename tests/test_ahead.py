"""Kernels of compiled graphs are planned and compiled before the graphs are called, side by side."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from functors import draw
from torch.overrides import BaseTorchFunctionMode

import fuser
from fuser import disk_cache, executor, order_check, planner
from fuser.compiler import register
from fuser.cpu.backend import CpuBackend
from fuser.disk_cache import CacheKey
from fuser.fx import backend
from fuser.fx.ahead import Ahead

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("fresh_dynamo")]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Names of the threads in which calls were planned; with an empty cache of graphs."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found: list[str] = []
    make_plan = executor.make_plan

    def note(*args: Any, **kwargs: Any) -> Any:
        found.append(threading.current_thread().name)
        return make_plan(*args, **kwargs)

    monkeypatch.setattr(executor, "make_plan", note)
    return found


def chain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Three groups, two of them equal."""
    for _ in range(2):
        x = torch.relu(x + 0.25) * x @ weight
    return x * x - 2


def test_every_call_is_planned_once_and_ahead(planned: list[str]) -> None:
    x, weight = torch.randn(6, 8), torch.randn(8, 8)
    compiled = torch.compile(chain, backend="fuser", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(x, weight), chain(x, weight))
    assert len(planned) == 2
    assert all(name.startswith("fuser-ahead") for name in planned)


def test_sizes_that_are_not_known_are_planned_by_their_calls(planned: list[str]) -> None:
    weight = torch.randn(8, 8)
    compiled = torch.compile(chain, backend="fuser", dynamic=True)
    with torch.no_grad():
        for rows in (6, 7):
            # No other test has calls of this layout, which would be planned already.
            x = torch.randn(8, rows).t()
            assert torch.equal(compiled(x, weight), chain(x, weight))
    assert planned
    assert not any(name.startswith("fuser-ahead") for name in planned)


def test_a_kept_graph_whose_kernels_are_gone_makes_them_before_its_calls(
    planned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    functors = [fuser.create_jit_fn(f"template <typename T> T gone{n}(T x) {{ return x + T({n}); }}") for n in range(2)]
    x = torch.randn(11)
    for functor in functors:
        functor(x)
    specs = [functor.spec(1) for functor in functors]
    kept = executor.kept_plans(specs)
    assert len(kept) == 2
    # As in a process that finds the graph, but not what a machine's temporary folder held.
    monkeypatch.setattr(executor, "_plans", {})
    monkeypatch.setattr(disk_cache, "read", lambda _: None)
    planned.clear()
    executor.restore_plans(kept)
    assert len(planned) == 2
    assert not any(name == "MainThread" for name in planned)
    for functor in functors:
        functor(x * 2)
    assert len(planned) == 2


def test_a_plan_is_kept_once_however_many_calls_are_cut_into_its_group() -> None:
    @fuser.fuse
    def sums(x: torch.Tensor) -> torch.Tensor:
        # Columns that torch adds in an order of its own: the call is cut around each sum, one after the other.
        for number in range(7):
            x = torch.relu(x + number) * (x.sum(0) + 0.25)
        return x

    for rows in (3, 4, 5):
        sums(torch.randn(rows, 5))
    kept = executor.kept_plans([register(group) for group in sums.groups])
    assert len({item.text for item in kept}) > 7, "with its parts"
    assert len(kept) == len({item[:4] for item in kept})


@pytest.mark.parametrize(
    ("error", "count"), [("UnsupportedError", 1), ("CompilerTimeoutError", 0), ("CompileError", 0), ("LookupError", 0)]
)
@pytest.mark.filterwarnings("ignore::fuser.errors.FallbackWarning")
def test_what_may_go_well_later_is_kept_for_no_other_process(
    error: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As code of fuser's would raise it.
    names = {"__name__": "fuser.planner"}
    exec(f"from fuser.errors import *\ndef fail(*_): raise {error}('not here')", names)
    monkeypatch.setattr(planner, "_plan_kernels", names["fail"])
    text = f"template <typename T> T fails(T x) {{ return x + T({len(error)}); }}"
    function = fuser.jit_fn(text, fallback=lambda x: x + len(error))
    with fuser.config.patch(internal_errors="fallback", dump=str(tmp_path)):
        assert function(torch.ones(3)).tolist() == [1 + len(error)] * 3
        assert len(executor.kept_plans([function.spec(1)])) == count


@pytest.mark.parametrize("is_known", [True, False])
def test_that_nobody_knows_an_order_is_kept_for_no_other_process(
    is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compare(*_: object) -> bool:
        if not is_known:
            raise torch.OutOfMemoryError
        return False

    monkeypatch.setattr(order_check, "_compare", compare)
    monkeypatch.setattr(order_check, "_verdicts", {})
    monkeypatch.setattr(disk_cache, "read", lambda _: None)
    monkeypatch.setattr(disk_cache, "write", lambda *_: None)
    monkeypatch.setattr(executor, "_plans", {})
    fused = fuser.fuse(lambda x: (x * 7).sum(-1) + 7)
    x = torch.randn(5, 700)
    assert torch.equal(fused(x), fused.function(x))
    specs = [register(group) for group in fused.groups]
    assert any(item.text == specs[0].text for item in executor.kept_plans(specs)) == is_known


def test_an_error_is_the_calls() -> None:
    wrong = fuser.create_jit_fn("template <typename T> T wrong(T x) { return x + nothing; }")
    x = torch.ones(3)
    with pytest.raises(fuser.errors.CompileError) as eager:
        wrong(x)
    fuser.clear_failures()
    with pytest.raises(fuser.errors.CompileError) as compiled:
        torch.compile(lambda x: wrong(x).sin(), backend="fuser")(x)
    assert "nothing" in str(eager.value)
    assert compiled.value.diagnostics == eager.value.diagnostics


def test_an_order_is_compared_by_one_of_the_threads_that_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []

    def compare(*_: object) -> bool:
        compared.append(threading.current_thread().name)
        time.sleep(0.05)
        return True

    monkeypatch.setattr(order_check, "_compare", compare)
    monkeypatch.setattr(order_check, "_verdicts", {})
    key = CacheKey("0" * 64, None)
    case: Any = SimpleNamespace(
        cache_key=lambda: key, device=torch.device("cpu"), function=SimpleNamespace(name="sum"), tensors=(), orders=()
    )
    threads = [threading.Thread(target=order_check.is_kept, args=(case, None)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compared) == 1


def test_what_compiles_is_loaded_before_a_graph_is_split(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    events: list[str] = []

    def note(owner: Any, name: str) -> None:
        whole = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, **more: (events.append(name), whole(*given, **more))[1])

    note(CpuBackend, "load_compiler")
    note(backend, "min_cut_rematerialization_partition")
    note(backend, "compile_graph")
    x = torch.randn(5, 3, requires_grad=True)
    torch.compile(lambda x: torch.relu(x + 2.5) * x, backend="fuser")(x).sum().backward()
    assert events == ["load_compiler", "min_cut_rematerialization_partition", "compile_graph", "compile_graph"]


@pytest.mark.parametrize(
    "mode", [BaseTorchFunctionMode, lambda: torch.device("cpu")], ids=["a user's", "the default device"]
)
def test_calls_are_planned_under_modes_of_functions(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # In the call itself, where torch is asked for views that some tensors have not: its answers came through the mode.
    monkeypatch.setattr(Ahead, "add", lambda *_: None)
    monkeypatch.setattr(executor, "_plans", {})

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.view(2, 8, 9, 24).transpose(1, 2).reshape(2, 9, 192)

    def body(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat([heads(x), heads(y * 2)], 2) * 2

    x, y = draw((16, 9, 24), torch.float32, seed=0), draw((16, 9, 24), torch.float32, seed=1)
    with mode():
        assert torch.equal(torch.compile(body, backend="fuser")(x, y), body(x, y))
