"""Short rows that are put together of pieces of several sizes: one formula, which chooses by an element's place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody uses
from cuda_emulation import run_emulated
from graph_checks import trace
from torch import Tensor

import fuser
from fuser.codegen import build_source
from fuser.compiler import register
from fuser.cuda.backend import compile_cubin
from fuser.cuda.dialect import DIALECT
from fuser.cxx.functor import parse_functor
from fuser.function import Function
from fuser.graph import GroupBuilder
from fuser.ops.arrangements import cat_function
from fuser.planner import plan_texts

ATEN = torch.ops.aten


def draw(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randint(0, 9, shape, device=device).to(dtype)


def find_call(function: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[fuser.FusionGroup, list[Any]]:
    """Return the one group of an ATen graph on a GPU, and what it is called with."""
    module = fuser.fx.fuse_graph(trace(function, inputs, "cuda"))
    (node,) = [item for item in module.graph.nodes if item.op not in {"placeholder", "output"}]
    known = dict(zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True))
    fusion: Any = module.get_submodule(str(node.target))
    return fusion.group, [known.get(item, item) for item in node.args]


def twice(call: Any, x: Any) -> Any:
    return call(ATEN.mul.Tensor, x, 2)


CHOSEN: dict[str, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
    "features": (
        lambda call, x, y: call(ATEN.cat.default, [twice(call, x), call(ATEN.add.Tensor, y, 1)], -1),
        lambda x, y: torch.cat([x * 2, y + 1], -1),
    ),
    "of many parts": (
        lambda call, x, y: call(ATEN.cat.default, [twice(call, x), y, call(ATEN.cat.default, [x, y, x], -1)], -1),
        lambda x, y: torch.cat([x * 2, y, x, y, x], -1),
    ),
    "an image": (
        lambda call, x, y: call(ATEN.constant_pad_nd.default, call(ATEN.mul.Tensor, x, y), [1, 2, 3, 1], 5),
        lambda x, y: F.pad(x * y, (1, 2, 3, 1), value=5),
    ),
    "of what is padded": (
        lambda call, x, y: twice(
            call, call(ATEN.cat.default, [call(ATEN.constant_pad_nd.default, x, [2, 0], 0), y], -1)
        ),
        lambda x, y: torch.cat([F.pad(x, (2, 0)), y], -1) * 2,
    ),
}


@pytest.mark.nvrtc
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("name", CHOSEN)
def test_one_launch_writes_short_rows(name: str, dtype: torch.dtype) -> None:
    function, eager = CHOSEN[name]
    for lead, width in (((2, 5), 7), ((3, 4), 33)):
        x, y = draw(*lead, width, dtype=dtype), draw(*lead, 1, dtype=dtype)
        group, given = find_call(function, (x, y))
        ((spec, args),) = plan_texts(register(group), given, torch.device("cuda"))
        source = build_source(spec.group, args, DIALECT)
        assert "= fuser_pick(" in source.text
        assert compile_cubin(source, "sm_90")
        for descending in (False, True):
            (found,) = run_emulated(group, given, all_kernels=True, descending=descending)
            assert torch.equal(found, eager(x, y))


def test_where_to_choose_takes_longer_pieces_are_written_apart() -> None:
    features, _ = CHOSEN["features"]
    for dtype, sizes, count in (
        (torch.bfloat16, (7, 1), 2),  # narrow elements of two parts
        (torch.float32, (700, 1), 2),  # long rows
        (torch.float32, (3, 3), 1),  # of one size, which share a launch
        (torch.float32, (16, 8), 2),  # whole sectors
    ):
        x, y = (draw(5, size, dtype=dtype) for size in sizes)
        group, given = find_call(features, (x, y))
        plans = plan_texts(register(group), given, torch.device("cuda"))
        assert len(plans) == count
        assert not any(spec.group.picks for spec, _ in plans)
    # Nine pieces of nine shapes would be as many launches, of one side each four.
    for sides, width, count in (([1, 2, 3, 1], 7, 1), ([1, 1, 1, 1], 7, 4), ([1, 2, 3, 1], 2000, 1)):
        x, y = (draw(2, 3, 5, width, dtype=torch.bfloat16) for _ in range(2))
        padded = lambda call, x, y, own=sides: call(ATEN.constant_pad_nd.default, call(ATEN.mul.Tensor, x, y), own)  # noqa: E731
        group, given = find_call(padded, (x, y))
        assert len(plan_texts(register(group), given, torch.device("cuda"))) == count


@pytest.mark.parametrize("name", ["embedding", "index", "entries that are computed"])
def test_what_is_read_at_entries_is_no_part_of_one_formula(name: str) -> None:
    # Of zeros in their place beyond a part, which may be no entries, and at places that are not in the table.
    def read(call: Any, table: Any, entries: Any, y: Any) -> Any:
        if name == "index":
            return call(ATEN.cat.default, [y, twice(call, call(ATEN.index.Tensor, table, [entries]))], -1)
        if name == "entries that are computed":
            entries = call(ATEN.sub.Tensor, entries, 3)
        return call(ATEN.cat.default, [y, twice(call, call(ATEN.embedding.default, table, entries))], -1)

    group, given = find_call(read, (draw(50, 7), torch.arange(3, 9), draw(6, 1)))
    plans = plan_texts(register(group), given, torch.device("cuda"))
    assert len(plans) == 2
    assert not any(spec.group.picks for spec, _ in plans)


@pytest.mark.parametrize(
    ("body", "is_chosen"),
    [
        ("return x * 2;", True),
        ("for (int i = 0; i < 3; ++i) x += x; return x;", True),
        ("while (x < 100) x *= 2; return x;", False),  # of zero never
        ("const T table[3] = {1, 2, 3}; return table[(int)x - 1];", False),
        ("if (x == 0) __trap(); return x;", False),
        ('printf("%g\\n", double(x)); return x;', False),
    ],
)
def test_functors_see_no_zeros_that_they_are_not_for(body: str, is_chosen: bool) -> None:
    builder = GroupBuilder()
    x, y = builder.add_input("x"), builder.add_input("y")
    functor = Function(parse_functor(f"template <typename T> T own(T x) {{ {body} }}"))
    group = builder.build(builder.apply(cat_function(2, 1), [*builder.apply(functor, [x]), y]))
    plans = plan_texts(register(group), [draw(6, 7), draw(6, 1)], torch.device("cuda"))
    assert [bool(spec.group.picks) for spec, _ in plans] == ([True] if is_chosen else [False] * 2)


@pytest.mark.cpu
def test_windows_across_parts_are_not_chosen_on_the_cpu() -> None:
    fused = fuser.fuse(lambda x, y: torch.cat([x * 2, y]).unfold(0, 3, 1) + 1)
    fuser.reset_stats()
    x, y = draw(6), draw(7)
    assert torch.equal(fused(x, y), fused.function(x, y))
    assert not fuser.stats()["fallbacks"]


ON_GPU: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "features": lambda x, y: torch.cat([x * 2, y + 1], -1),
    "of many parts": lambda x, y: torch.cat([x * 2, y, x + 1, y, x], -1),
    "an image": lambda x, y: F.pad(x * 2, (1, 2, 3, 1), value=5),
    "of what is padded": lambda x, y: torch.cat([F.pad(x * 2, (2, 0)), y], -1) * 2,
    "rolled": lambda x, y: (x * 2).roll((1, 2), (-1, 0)),
    "cropped": lambda x, y: F.pad(x * 2, (-1, 3, 0, 2)),
    "of nothing": lambda x, y: torch.cat([x * 2, y[..., :0], y], -1),
    "with its neighbour": lambda x, y: (torch.cat([x * 2, y], -1), F.pad(x + 1, (1, 0))),
    "of another dtype": lambda x, y: torch.cat([x * 2, y], -1).double() + 1,
}


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("name", ON_GPU)
def test_pieces_of_rows_have_torchs_values(name: str, dtype: torch.dtype) -> None:
    function = ON_GPU[name]
    fused = fuser.fuse(lambda x, y: function(x, y))
    for lead, width, other in (
        ((3, 4), 7, 1),
        ((2, 5, 6), 64, 3),
        ((1, 1), 1, 2),
        ((2, 3, 112), 112, 5),
        ((300, 4), 32, 16),
    ):
        whole = draw(*lead, width + 1, dtype=dtype, device="cuda")
        y = draw(*lead, other, dtype=dtype, device="cuda")
        for x in (
            whole[..., 1:],
            whole[..., :-1].contiguous(),
            whole[..., 1:].transpose(0, 1).contiguous().transpose(0, 1),
        ):
            torch.testing.assert_close(fused(x, y), function(x, y), rtol=0, atol=0, check_stride=True)


@pytest.mark.cuda
def test_gradients_of_what_is_put_together_of_pieces() -> None:
    fused = fuser.fuse(lambda x, y: F.pad(torch.cat([x * y, y], -1), (1, 1, 1, 1)) * 2)
    for dtype in (torch.float32, torch.bfloat16):
        x, y = (torch.randn(3, 5, size, device="cuda", dtype=dtype, requires_grad=True) for size in (33, 1))
        made, wanted = fused(x, y), fused.function(x, y)
        weights = torch.randn_like(wanted)
        pairs = (torch.autograd.grad(item, (x, y), weights) for item in (made, wanted))
        assert torch.equal(made, wanted)
        assert all(map(torch.equal, *pairs))
