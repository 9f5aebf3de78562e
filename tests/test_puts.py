"""Gradients of reads at entries (``index_put`` that adds to zeros): sorted once, added up in torch's order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graph_checks import trace

import fuser
from fuser.codegen import build_source
from fuser.compiler import register
from fuser.cuda.backend import compile_cubin
from fuser.cuda.dialect import DIALECT
from fuser.disk_cache import CacheKey
from fuser.errors import NoCompileError
from fuser.fx import puts
from fuser.fx.backend import compile_graph
from fuser.fx.passes import FusionModule
from fuser.planner import plan_texts
from fuser.tuning.table import candidates

ATEN = torch.ops.aten
ROWS, SLICES, PLACES = torch.randn(70, 48), torch.randn(70, 96)[:, :48], torch.randint(-30, 30, (70,))


def put(call: Any, values: Any, entries: Any, size: int, dim: int = 0, *, accumulate: bool = True) -> Any:
    sizes = [*values.meta["val"].shape]
    sizes[dim] = size
    zeros = call(ATEN.new_zeros.default, values, sizes, pin_memory=False)
    return call(ATEN.index_put.default, zeros, [None] * dim + [entries], values, accumulate)


def compiled(write: Any, inputs: tuple[torch.Tensor, ...], numerics: str = "fast") -> torch.fx.GraphModule:
    module = trace(write, inputs, "cuda")
    compile_graph(module, numerics)
    return module


def find_puts(module: torch.fx.GraphModule) -> list[FusionModule]:
    return [item for item in module.modules() if isinstance(item, FusionModule) and item.group.names() == ["put"]]


def test_entries_are_sorted_once() -> None:
    def write(call: Any, x: Any, y: Any, entries: Any) -> Any:
        return put(call, x, entries, 30), put(call, y, entries, 30), put(call, y, entries, 40)

    module = compiled(write, (ROWS, SLICES, PLACES))
    assert len(find_puts(module)) == 3
    assert len(module.graph.find_nodes(op="call_function", target=ATEN.sort.stable)) == 2
    assert not module.graph.find_nodes(op="call_function", target=ATEN.new_zeros.default)


def test_sums_of_rows_share_what_is_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(call: Any, x: Any, entries: Any) -> Any:
        zeros = call(ATEN.new_zeros.default, x, [30, 48], pin_memory=False)
        column = call(ATEN.unsqueeze.default, entries, 1)
        every = call(ATEN.expand.default, column, [-1, 48])
        added = call(ATEN.index_add.default, zeros, 0, entries, x)
        return added, call(ATEN.scatter_add.default, call(ATEN.zeros_like.default, zeros), 0, every, x)

    for numerics in ("strict", "fast"):
        module = compiled(write, (ROWS, PLACES), numerics)
        assert len(find_puts(module)) == 2
        assert len(module.graph.find_nodes(op="call_function", target=ATEN.sort.stable)) == 1
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert find_puts(compiled(write, (ROWS, PLACES), "strict")) == []


def test_what_stays_torchs() -> None:
    def write(call: Any, x: Any, entries: Any) -> Any:
        ones = call(ATEN.new_ones.default, x, [30, 48], pin_memory=False)
        added = call(ATEN.index_put.default, ones, [entries], x, True)
        return put(call, x, entries, 30, accumulate=False), added

    assert find_puts(compiled(write, (ROWS, PLACES))) == []


def test_without_the_order_of_torch_strict_graphs_keep_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_order in (False, True):
        monkeypatch.setattr(puts, "_has_torchs_order", lambda *_, found=has_order: found)
        module = compiled(lambda call, x, entries: put(call, x, entries, 30), (ROWS, PLACES), "strict")
        assert len(find_puts(module)) == has_order


def test_without_kernels_graphs_keep_that_of_torch() -> None:
    before = fuser.override_can_fuse_on_gpu(False)
    try:
        assert find_puts(compiled(lambda call, x, entries: put(call, x, entries, 30), (ROWS, PLACES))) == []
    finally:
        fuser.override_can_fuse_on_gpu(before)


def test_what_cannot_be_compared_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(*_: Any) -> bool:
        raise NoCompileError("no kernel")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(puts, "verdict_key", lambda *_: CacheKey("0" * 64, None))
    monkeypatch.setattr(puts, "_compare", compare)
    module = compiled(lambda call, x, entries: put(call, x, entries, 30), (ROWS, PLACES), "strict")
    assert find_puts(module) == []


@pytest.mark.nvrtc
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("adding", "dim"), [("each", 0), ("once", 0), ("lanes", 1)])
def test_kernels_compile(adding: str, dim: int, dtype: torch.dtype) -> None:
    group = puts._put_group(adding, dim, 2, "strict")
    given = [SLICES.to(dtype), torch.arange(SLICES.shape[dim]), torch.arange(31)]
    ((spec, args),) = plan_texts(register(group), given, torch.device("cuda"))
    source = build_source(spec.group, args, DIALECT)
    assert f"fuser_add_up<fuser_add_{adding}>(" in source.text
    assert args.vector == 1
    assert compile_cubin(source, "sm_90")


def test_any_tuning_reads_each_elements_own_ends() -> None:
    # Those of a column are those of all rows of a large matrix, of which a thread has several elsewhere.
    values = torch.empty(1 << 20, 48, device="meta")
    given = [values, *(torch.empty(size, dtype=torch.int64, device="meta") for size in (48, 31))]
    ((_, args),) = plan_texts(register(puts._put_group("lanes", 1, 2, "strict")), given, torch.device("cuda"))
    assert max(tuning.unroll for tuning in candidates(args)) > 1
    assert not any(access.is_shared for access in args.accesses)


@pytest.mark.parametrize("dim", [0, 1])
def test_without_a_kernel_the_values_are_the_same(dim: int) -> None:
    values = SLICES if dim == 0 else SLICES.t()
    entries = PLACES % 30
    ordered, order = torch.sort(entries, stable=True)
    begins = torch.searchsorted(ordered, torch.arange(31))
    made = FusionModule(puts._put_group("each", dim, 2, "strict"))(values, order, begins)
    zeros = torch.zeros([30, 48][:: 1 if dim == 0 else -1])
    assert torch.equal(made, ATEN.index_put(zeros, [None] * dim + [entries], values, True))


def read_rows(x: torch.Tensor, few: torch.Tensor, many: torch.Tensor) -> torch.Tensor:
    return (torch.cat([x[few], x[many]], 1) * 1.5)[:, 1:].sin() * x[few].cos()[:, :1]


def draw_rows(row: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Rows, entries that count from either end, and entries that many values go to."""
    few, many = torch.randint(-300, 300, (5000,), device="cuda"), 300 * torch.rand(5000, device="cuda") ** 4
    return torch.randn(300, row, device="cuda").to(dtype), few, many.long()


@pytest.mark.cuda
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("row", [1, 2, 32, 33, 128, 200])
def test_gradients_equal_eager(row: int, dtype: torch.dtype) -> None:
    """Rows of each of torch's kernels; gradients that are parts of what lies wider."""
    fuser.reset_stats()
    assert torch.equal(*compare(read_rows, draw_rows(row, dtype), "strict"))
    assert fuser.stats()["fallbacks"] == {}


@pytest.mark.cuda
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("row", [33, 128])
def test_fast_gradients_are_closer_than_eager(row: int, dtype: torch.dtype) -> None:
    x, *entries = draw_rows(row, dtype)
    made, eager = compare(read_rows, (x, *entries), "fast")
    exact = compare(read_rows, (x.double(), *entries), "fast")[1]
    assert (made - exact).abs().mean() < (eager - exact).abs().mean()


@pytest.mark.cuda
@pytest.mark.usefixtures("fresh_dynamo")
def test_gradients_of_columns_equal_eager() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        x, entries = torch.randn(40, 90, 3, device="cuda").to(dtype), torch.randint(0, 90, (500,), device="cuda")
        assert torch.equal(*compare(lambda x, at: x[:, at] * 2, (x, entries), "strict"))
        assert torch.equal(*compare(lambda x, at: x[:, at] * 2, (x[..., 0], entries), "strict"))


@pytest.mark.cuda
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_equal_eager_where_no_order_matters(dtype: torch.dtype) -> None:
    """Where torch adds as values come: of few that have few digits, so that no sum is rounded."""

    def function(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        rows = at[:, None].expand(-1, x.shape[1])
        heard = x.new_zeros(90, x.shape[1]).scatter_add(0, rows, x * 2)
        return heard * x.new_zeros(90, 1).index_add(0, at, x[:, :1] + 1)[at[0]]

    x, entries = torch.randint(-2, 2, (500, 70), device="cuda").to(dtype), torch.randint(0, 90, (500,), device="cuda")
    assert torch.equal(*compare(function, (x, entries), "strict"))


@pytest.mark.cuda
@pytest.mark.usefixtures("fresh_dynamo")
def test_no_entries() -> None:
    x, none = torch.randn(40, 90, device="cuda"), torch.empty(0, dtype=torch.int64, device="cuda")
    assert torch.equal(*compare(lambda x, at: x[at] * 2, (x, none), "strict"))


def compare(function: Any, inputs: tuple[torch.Tensor, ...], numerics: str) -> list[torch.Tensor]:
    """Return the gradient by the first input, as fuser and as aot_eager have it."""
    found = []
    for how in ({"backend": "fuser", "options": {"numerics": numerics}}, {"backend": "aot_eager"}):
        torch._dynamo.reset()
        x = inputs[0].detach().requires_grad_()
        made = torch.compile(function, dynamic=False, **how)(x, *inputs[1:])
        torch.manual_seed(0)
        # The same numbers in every dtype.
        made.backward(torch.randn(made.shape, dtype=torch.float32, device="cuda").bfloat16().to(made.dtype))
        assert x.grad is not None
        found.append(x.grad)
    return found
