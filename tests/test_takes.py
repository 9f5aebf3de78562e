"""Reads at places that are computed (embedding, gather, index_select): in a group, with eager's bits and errors."""

from __future__ import annotations

import operator
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from cuda_emulation import run_emulated
from graph_checks import trace
from torch import fx

import fuser
from fuser.codegen import build_source
from fuser.compiler import register
from fuser.cuda.backend import compile_cubin
from fuser.cuda.dialect import DIALECT
from fuser.fx.fusion_node import FusionModule
from fuser.fx.passes import FusionPass
from fuser.planner import plan_texts

ATEN = torch.ops.aten
TABLE, OTHER = torch.randn(50, 12), torch.randn(40, 12)
PLACES, BACK = torch.randint(50, (4, 7)), torch.randint(-40, 40, (4, 7))


def words(table: Any, other: Any, places: Any, back: Any) -> Any:
    return (F.embedding(places, table) + other[back]) * 2


CASES: dict[str, Callable[..., Any]] = {
    "two embeddings": words,
    "int32": lambda t, o, p, b: F.embedding(p.int(), t) * 2 + 1,
    "computed places": lambda t, o, p, b: F.embedding((p + 1).clamp(0, 49), t).relu() + o[0],
    "rows": lambda t, o, p, b: t.index_select(0, p.flatten()) * o[:28].relu(),
    "columns": lambda t, o, p, b: t.index_select(1, p[0] % 12) + 1,
    "columns of a matrix": lambda t, o, p, b: o[:, b[1] % 12] * 3,
    "one of each row": lambda t, o, p, b: o[:4].gather(1, p % 12).neg() * 2,
    "one of each column": lambda t, o, p, b: o.gather(0, p[:, :7] % 40).exp() + p,
    "of a product": lambda t, o, p, b: (o @ t[:12])[b].tanh() * 2,
    "a part of it": lambda t, o, p, b: F.embedding(p, t)[:, 1:].relu() + F.embedding(p, o.repeat(2, 1))[:, :-1] * 2,
    "put together": lambda t, o, p, b: torch.cat([F.embedding(p, t) * 2, o[b]], -1) + 1,
    "another dtype": lambda t, o, p, b: F.embedding(p, t).double() * 2,
    "read twice": lambda t, o, p, b: (lambda e: (e * 2, e.square() + o[b]))(F.embedding(p, t)),
    "a norm": lambda t, o, p, b: F.layer_norm(F.embedding(p, t) + F.embedding(p % 40, o), (12,)),
}


def two_reads(call: Any, table: Any, other: Any, places: Any, back: Any) -> Any:
    rows = call(ATEN.add.Tensor, call(ATEN.embedding.default, table, places), call(ATEN.index.Tensor, other, [back]))
    return call(ATEN.mul.Tensor, rows, 2.0)


INPUTS = (TABLE, OTHER, PLACES, BACK)


def fusion_nodes(module: fx.GraphModule) -> list[FusionModule]:
    return [item for item in fuser.fx.fuse_graph(module).modules() if isinstance(item, FusionModule)]


@pytest.mark.nvrtc
def test_a_group_reads_rows_of_tables() -> None:
    (made,) = fusion_nodes(trace(two_reads, INPUTS, "cuda"))
    assert made.group.names() == ["take", "take", "add", "mul"]
    given = [TABLE, PLACES, OTHER, BACK, 1, 2.0]
    ((spec, args),) = plan_texts(register(made.group), given, torch.device("cuda"))
    source = build_source(spec.group, args, DIALECT)
    # In pieces of a vector.
    assert source.text.count("= fuser_take_piece<4>(") == 2
    assert compile_cubin(source, "sm_90")
    # Without a kernel, the same values.
    assert torch.equal(made(*given), (TABLE[PLACES] + OTHER[BACK]) * 2)
    assert torch.equal(fuser.FusionGroup.from_json(made.group.to_json()).key and made(*given), words(*INPUTS))


@pytest.mark.cpu
@pytest.mark.nvrtc
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [12, 7, 64])
def test_pieces_of_rows_lie_anywhere(width: int, dtype: torch.dtype) -> None:
    """Also at addresses that no wide access takes, and with a row's end inside; columns are read one by one."""
    table, other = torch.randn(50, width + 1).to(dtype)[:, 1:], torch.randn(40, width).double()
    given = [table, PLACES, other, BACK, 1, 2.0]
    (made,) = fusion_nodes(trace(two_reads, (table, other, PLACES, BACK), "cuda"))
    (found,) = run_emulated(made.group, given, all_kernels=True)
    assert torch.equal(found, words(table, other, PLACES, BACK))
    read = lambda call, t, p: call(ATEN.mul.Tensor, call(ATEN.index_select.default, t, 1, p), 2.0)  # noqa: E731
    columns = PLACES.flatten() % width
    (made,) = fusion_nodes(trace(read, (table, columns), "cuda"))
    ((spec, args),) = plan_texts(register(made.group), [table, columns, 2.0], torch.device("cuda"))
    # Read by whoever computes an element that is there, and by nobody else.
    assert "if (k < at[u].left) fuser_element(" in build_source(spec.group, args, DIALECT).text
    (found,) = run_emulated(made.group, [table, columns, 2.0], all_kernels=True)
    assert torch.equal(found, table.index_select(1, columns) * 2)


def test_what_is_left_to_torch() -> None:
    # The CPU's own kernels raise where a place is out of range. What is read alone gains nothing; what a group makes
    # does not lie in memory.
    assert "take" not in [name for item in fusion_nodes(trace(two_reads, INPUTS, "cpu")) for name in item.group.names()]
    alone = trace(lambda call, table, places: call(ATEN.embedding.default, table, places), (TABLE, PLACES), "cuda")
    assert not fusion_nodes(alone)
    made = trace(
        lambda call, table, places: call(
            ATEN.relu.default, call(ATEN.embedding.default, call(ATEN.neg.default, table), places)
        ),
        (TABLE, PLACES),
        "cuda",
    )
    assert [item for item in fusion_nodes(made) if "take" in item.group.names()] == []
    # Entries that are none may have fewer dimensions.
    none = trace(
        lambda call, table, entries: call(ATEN.abs.default, call(ATEN.gather.default, table, 0, entries)),
        (TABLE[:, :, None], PLACES[:0]),
        "cuda",
    )
    assert [item for item in fusion_nodes(none) if "take" in item.group.names()] == []


@pytest.mark.parametrize(("op", "width"), [("gather", 128), ("index", 128), ("select", 128), ("index", 4096)])
def test_many_short_rows_are_read_alone(op: str, width: int) -> None:
    """Also of a part of a matrix; torch reads long rows as fast, and where entries differ along rows."""
    table, entries = torch.empty(999, 2 * width, device="meta"), torch.empty(1 << 14, dtype=torch.int64, device="meta")

    def read(call: Any, table: Any, entries: Any) -> Any:
        part = call(ATEN.slice.Tensor, table, 1, width, 2 * width)
        if op == "gather":
            column = call(ATEN.unsqueeze.default, entries, 1)
            return call(ATEN.gather.default, part, 0, call(ATEN.expand.default, column, [-1, width]))
        if op == "select":
            return call(ATEN.index_select.default, part, 0, entries)
        return call(ATEN.index.Tensor, part, [entries])

    found = fusion_nodes(trace(read, [table, entries], "cuda"))
    assert len(found) == (width == 128)
    for item in found:
        given = [torch.empty(999, 2 * width), torch.zeros(1 << 14, dtype=torch.int64)]
        ((spec, args),) = plan_texts(register(item.group), given, torch.device("cuda"))
        assert "fuser_take(" in build_source(spec.group, args, DIALECT).text


@pytest.mark.cpu
@pytest.mark.usefixtures("fresh_dynamo")
def test_out_of_range_on_the_cpu_raises_as_eager() -> None:
    wrong = (TABLE, OTHER, PLACES + 50, BACK)
    with pytest.raises(IndexError, match="index out of range in self"):
        words(*wrong)
    with pytest.raises(IndexError, match="index out of range in self"):
        torch.compile(words, backend="fuser")(*wrong)


@pytest.mark.parametrize("maker", ["norm", "scatter", "relu"])
def test_a_group_reads_rows_of_what_others_make(maker: str) -> None:
    """Of a norm's group, which cannot be its own, and of what is torch's; not of what it would compute itself."""

    def make(call: Any, x: Any, weight: Any, places: Any) -> Any:
        if maker == "norm":
            x = call(operator.getitem, call(ATEN.native_layer_norm.default, x, [8], weight, weight, 1e-5), 0)
        elif maker == "scatter":
            x = call(ATEN.index_add.default, x, 0, places, x)
        else:
            x = call(ATEN.relu.default, x)
        return x, call(ATEN.cat.default, [call(ATEN.index.Tensor, x, [item]) for item in (places, places)], 1)

    graph_module = trace(make, [torch.empty(50, 8), torch.empty(8), torch.zeros(50, dtype=torch.int64)], "cuda")
    FusionPass()(graph_module)
    read = [node for node in graph_module.graph.nodes if node.target is ATEN.index.Tensor]
    assert len(read) == (2 if maker == "relu" else 0)


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What some reads have for a gradient is added up by atomics otherwise, in any order."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.cuda
@pytest.mark.usefixtures("fresh_dynamo", "deterministic")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_equals_eager_on_cuda(name: str, dtype: torch.dtype) -> None:
    outcomes = []
    for backend in ("fuser", "aot_eager"):
        torch._dynamo.reset()
        floats = [item.to("cuda", dtype).requires_grad_() for item in (TABLE, OTHER)]
        made = torch.compile(CASES[name], backend=backend, dynamic=False)(*floats, PLACES.cuda(), BACK.cuda())
        results = made if isinstance(made, tuple) else (made,)
        torch.autograd.backward(results, [torch.ones_like(item) for item in results])
        outcomes.append([*results, *(item.grad for item in floats)])
    for got, wanted in zip(*outcomes, strict=True):
        assert (got is None) == (wanted is None)
        assert got is None or (torch.equal(got, wanted) and got.stride() == wanted.stride())


@pytest.mark.cuda
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_group_reads_rows_on_cuda() -> None:
    """Sizes whose vectors are cut, and enough rows for more than one block."""
    for rows, width in ((5, 7), (3000, 33), (70000, 8), (1, 1), (0, 8)):
        table, other = torch.randn(999, width, device="cuda"), torch.randn(999, width, device="cuda")
        places, back = (torch.randint(low, 999, (rows,), device="cuda") for low in (0, -999))
        fuser.reset_stats()
        got = torch.compile(words, backend="fuser", dynamic=False)(table, other, places, back)
        assert fuser.stats()["launches"] == (rows > 0)
        assert torch.equal(got, words(table, other, places, back))


@pytest.mark.cuda
@pytest.mark.usefixtures("fresh_dynamo")
def test_many_short_rows_equal_eager_on_cuda() -> None:
    def read(x: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, ...]:
        part = (x @ x.t() @ x)[:, 64:]
        return part[at], part.index_select(0, at), part.gather(0, at[:, None].expand(-1, 64))

    for dtype in (torch.float32, torch.bfloat16):
        x, at = torch.randn(99, 128, device="cuda").to(dtype), torch.randint(0, 99, (1 << 15,), device="cuda")
        fuser.reset_stats()
        made = torch.compile(read, backend="fuser", dynamic=False)(x, at)
        # What they read they have in common.
        assert fuser.stats()["launches"] == 1
        assert all(map(torch.equal, made, read(x, at)))


_OUT_OF_RANGE = """
import sys
import torch
table, other = torch.randn(50, 12, device="cuda"), torch.randn(40, 12, device="cuda")
places, back = torch.full((4, 7), PLACE, device="cuda"), torch.zeros(4, 7, dtype=torch.int64, device="cuda")
words = lambda: (torch.nn.functional.embedding(places, table) + other[back]) * 2
try:
    (torch.compile(words, backend="fuser") if sys.argv[1] == "fuser" else words)()
    torch.cuda.synchronize()
except Exception as error:
    print(type(error).__name__, "device-side assert triggered" in str(error))
"""


@pytest.mark.cuda
@pytest.mark.parametrize("place", [50, -1])
def test_out_of_range_on_cuda_is_eagers_error(place: int) -> None:
    text = _OUT_OF_RANGE.replace("PLACE", str(place))
    said = [
        subprocess.run([sys.executable, "-c", text, kind], capture_output=True, text=True, check=False).stdout
        for kind in ("eager", "fuser")
    ]
    assert said[0] == said[1]
    assert said[1].split()[1] == "True"
