"""Parts of arguments that a compiled graph writes to are written where they are, and nothing else is copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fuser.fx.recording import record_graphs
from fuser.fx.scatters import mark_scatters, write_scatters_in_place

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.cpu]


def index_copy(cache: Any, new: Any, at: Any) -> Any:
    cache.index_copy_(2, at, new)
    return cache * 2


def part(cache: Any, new: Any, at: Any) -> Any:
    cache[:, :, 3:5] = new
    return cache + 1


def index_put(cache: Any, new: Any, at: Any) -> Any:
    cache[:, :, at] = new
    return cache.relu()


def part_of_a_part(cache: Any, new: Any, at: Any) -> Any:
    cache[:, 1, 3:5].copy_(new[:, 0])
    return cache - 1


def several(cache: Any, new: Any, at: Any) -> Any:
    cache.index_copy_(2, at, new)
    cache.index_copy_(2, at + 2, new * 2)
    cache[:, 0] = 1
    return cache.relu()


def through_a_view(cache: Any, new: Any, at: Any) -> Any:
    seen = cache[:, :, 1:3]
    cache.scatter_(2, torch.zeros(2, 3, 1, 4, dtype=torch.int64), 1.0)
    seen.add_(1)
    return cache[..., 0]


def computed_from_the_old(cache: Any, new: Any, at: Any) -> Any:
    old = cache * 3
    cache[:, :, 3:5] = old[:, :, 3:5] + new
    return old * cache


def old_is_returned(cache: Any, new: Any, at: Any) -> Any:
    old = cache.clone()
    cache.index_copy_(2, at, new)
    return old, cache.neg()


def from_itself(cache: Any, new: Any, at: Any) -> Any:
    cache[:, :, 0:3] = cache[:, :, 2:5].clone()
    return cache * 2


def shifted(cache: Any, new: Any, at: Any) -> Any:
    # What is written is a view of what is written to.
    cache[:, :, 0:2] = cache[:, :, 2:4]
    return cache * 2


def returned(cache: Any, new: Any, at: Any) -> Any:
    cache.index_copy_(2, at, new)
    return cache


def old_beside_new(cache: Any, new: Any, at: Any) -> Any:
    # One kernel could compute both, if the whole were copied for it.
    old = cache * 3
    cache.index_copy_(2, at, new)
    return old + cache


# Which operators write; "" where the whole is copied.
CASES: dict[Callable[..., Any], set[str]] = {
    index_copy: {"index_copy_"},
    part: {"copy_"},
    index_put: {"index_put_"},
    part_of_a_part: {"copy_"},
    several: {"index_copy_", "copy_"},
    through_a_view: {"scatter_", "copy_"},
    computed_from_the_old: {"copy_"},
    old_is_returned: {"index_copy_"},
    from_itself: {"copy_"},
    shifted: {"slice_scatter", "copy_"},
    returned: {"index_copy", "copy_"},
    old_beside_new: {"index_copy_"},
}
NAMES = ("index_copy", "index_put", "scatter", "slice_scatter", "select_scatter", "copy_", "index_copy_", "index_put_")


@pytest.mark.parametrize(
    "function", [item if item is several else pytest.param(item, marks=pytest.mark.slow) for item in CASES]
)
def test_parts_are_written_in_place(function: Callable[..., Any]) -> None:
    found = []
    for backend in ("eager", "fuser"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        cache, new, at = torch.randn(2, 3, 8, 4), torch.randn(2, 3, 2, 4), torch.tensor([3, 4])
        compiled = torch.compile(function, backend=backend)
        with torch.no_grad():
            made = compiled(cache, new, at)
        found.append([cache, *(made if isinstance(made, tuple) else (made,))])
    for made, wanted in zip(*found, strict=True):
        assert torch.equal(made, wanted)
        assert made.stride() == wanted.stride()
    with torch.no_grad():
        (graph,) = record_graphs(compiled, (cache, new, at), {})
    nodes = graph.module.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    written = {getattr(node.target, "_opname", "") for node in graph.module.graph.nodes}
    names = CASES[function]
    assert written & {*NAMES, "scatter_"} == names
    if function not in {shifted, returned}:
        assert not any(node.args[0].op == "placeholder" for node in nodes), "the whole is copied"


def whole_from_a_number(cache: torch.Tensor) -> torch.Tensor:
    return cache.copy_(2) * 2


def part_from_a_number(cache: torch.Tensor) -> torch.Tensor:
    cache[0].copy_(2.5)
    return cache * 2


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("function", [whole_from_a_number, part_from_a_number])
def test_a_number_is_copied(function: Callable[..., Any], requires_grad: bool) -> None:
    start = torch.randn(2, 3, requires_grad=requires_grad)
    own, other = start.clone(), start.clone()
    assert torch.equal(torch.compile(function, backend="fuser")(own), function(other))
    assert torch.equal(own, other)


def test_a_part_that_moves() -> None:
    """Where it begins is a number of each call, which graphs have as a symbol from the second one on."""

    def step(cache: torch.Tensor, new: torch.Tensor, at: int) -> torch.Tensor:
        cache[0, :, at : at + 2].copy_(new)
        return cache[0, :, : at + 2] * 2

    caches = torch.zeros(2, 2, 3, 8, 4)
    compiled = torch.compile(step, backend="fuser")
    for at in (0, 2, 5):
        new = torch.randn(3, 2, 4)
        made, wanted = (function(cache, new, at) for function, cache in zip((compiled, step), caches, strict=True))
        assert torch.equal(made, wanted)
        assert torch.equal(*caches)


def inner_of_another(cache: Any, new: Any) -> Any:
    # A scatter into another tensor is what is put into a part.
    inner = ATEN.slice_scatter(torch.zeros_like(cache[:, 1]), new[:, 0], 1, 3, 5)
    ATEN.copy_(cache, ATEN.select_scatter(cache, inner, 1, 1))
    return new + 1


def old_later(cache: Any, new: Any) -> Any:
    seen = ATEN.select(cache, 2, 4)
    made = ATEN.slice_scatter(cache, new, 2, 3, 5)
    old = seen.cumsum(0)
    ATEN.copy_(cache, made)
    return old, made


def old_later_of_a_tuple(cache: Any, new: Any) -> Any:
    seen, _ = ATEN.split(cache, 4, 2)
    made = ATEN.slice_scatter(cache, new, 2, 3, 5)
    old = ATEN._unsafe_view(seen, [2, 3, 16]).cumsum(0)
    ATEN.copy_(cache, made)
    return old


ATEN = torch.ops.aten


@pytest.mark.parametrize("function", [inner_of_another, old_later, old_later_of_a_tuple])
def test_graphs_that_are_not_of_autograd(function: Callable[..., Any]) -> None:
    cache, new = torch.randn(2, 3, 8, 4), torch.randn(2, 3, 2, 4)
    graph = make_fx(function)(cache.clone(), new)
    again = cache.clone()
    wanted = function(again, new)
    mark_scatters(graph.graph)
    write_scatters_in_place(graph)
    graph.recompile()
    own = cache.clone()
    made = graph(own, new)
    assert torch.equal(own, again)
    for got, item in zip(torch.utils._pytree.tree_leaves(made), torch.utils._pytree.tree_leaves(wanted), strict=True):
        assert torch.equal(got, item)
