"""Views that show what they are views of as it is: dropped, but where others would tell."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graph_checks import run
from graph_checks import trace as write
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fuser.fx import backend
from fuser.fx.idle_copies import drop_idle_copies
from fuser.fx.idle_views import drop_idle_views

ATEN: Any = torch.ops.aten
WHOLE = (0, (1 << 63) - 1)


def twice_turned(x: Any) -> Any:
    return x.neg().t().t().exp()


def there_and_back(x: Any) -> Any:
    y = x.neg()
    return y.view(6, 4).view(2, 12).view(4, 6).exp(), y.unsqueeze(0).squeeze(0).sin()


def of_part(x: Any) -> Any:
    # As large as the part, but elsewhere.
    return x.neg()[0:2].t().t().exp(), x.neg()[2:4].exp()


def permuted(x: Any) -> Any:
    y = x.neg().view(2, 2, 6)
    return y.permute(2, 0, 1).permute(1, 2, 0).exp(), y.permute(1, 0, 2).exp()


def made(x: Any) -> Any:
    return x.neg().t().t()


def made_twice(x: Any) -> Any:
    y = x.neg()
    return y.t().t(), y.view(4, 6)


def argument(x: Any) -> Any:
    return x.t().t(), x.t().t().exp()


def trace(function: Any, *, symbolic: bool = False) -> fx.GraphModule:
    mode = FakeTensorMode()
    if symbolic:
        return make_fx(function, tracing_mode="symbolic")(torch.randn(4, 6))
    with mode:
        return make_fx(function, tracing_mode="fake")(torch.randn(4, 6))


@pytest.mark.parametrize(
    ("function", "left"),
    [
        (twice_turned, []),
        (there_and_back, []),
        (of_part, ["slice", "slice"]),
        (permuted, ["view", "permute"]),
        (made, []),
        (made_twice, ["view"]),
        (argument, ["t", "t"]),
    ],
)
def test_only_views_that_show_something_else_stay(function: Any, left: list[str]) -> None:
    module = trace(function)
    drop_idle_views(module.graph)
    module.recompile()
    names = [node.target._opname for node in module.graph.nodes if node.op == "call_function"]
    assert [name for name in names if name not in {"neg", "exp", "sin"}] == left
    given = [torch.randn(4, 6)]
    wanted, found = (run(lambda inputs, call=call: call(*inputs), given, [], 0) for call in (function, module))
    assert found["layouts"] == wanted["layouts"]
    assert found["aliases"] == wanted["aliases"]
    assert all(map(torch.equal, found["values"], wanted["values"]))


def test_sizes_that_are_not_known_stay() -> None:
    module = trace(twice_turned, symbolic=True)
    drop_idle_views(module.graph)
    assert len(module.graph.find_nodes(op="call_function", target=ATEN.t.default)) == 2


def sizes_of(call: Any, x: Any) -> list[Any]:
    return [call(ATEN.sym_size.int, x, dim) for dim in range(2)]


def into_new(call: Any, x: Any, y: Any) -> Any:
    sizes = sizes_of(call, x)
    return call(ATEN.copy.default, call(ATEN.new_empty_strided.default, y, sizes, [sizes[1], 1]), y)


def into_new_columns(call: Any, x: Any, y: Any) -> Any:
    sizes = sizes_of(call, x)
    return call(ATEN.copy.default, call(ATEN.new_empty_strided.default, y, sizes, [1, sizes[0]]), y)


def gradient_of_turned(call: Any, x: Any, y: Any) -> Any:
    sizes = reversed(sizes_of(call, x))
    return call(ATEN.slice_backward.default, call(ATEN.t.default, y), [*sizes], 0, *WHOLE, 1)


PARTS: dict[str, tuple[Any, list[str]]] = {
    "whole": (lambda call, _, y: call(ATEN.slice.Tensor, y, 0, *WHOLE), []),
    "a part": (lambda call, _, y: call(ATEN.slice.Tensor, y, 0, 1, WHOLE[1]), ["slice"]),
    "its gradient": (lambda call, x, y: call(ATEN.slice_backward.default, y, sizes_of(call, x), 1, *WHOLE, 1), []),
    "the gradient of what lies otherwise": (gradient_of_turned, ["t", "clone"]),
    "what is written there": (lambda call, x, y: call(ATEN.slice_scatter.default, x, y, 0, *WHOLE), []),
    "in another dtype": (
        lambda call, x, y: call(ATEN.slice_scatter.default, x, call(ATEN.gt.Scalar, y, 0), 0, *WHOLE),
        ["gt", "slice_scatter"],
    ),
    "into new memory": (into_new, []),
    "into new memory that lies otherwise": (into_new_columns, ["new_empty_strided", "copy"]),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_that_are_the_whole_cost_nothing_where_sizes_are_symbols(name: str) -> None:
    function, left = PARTS[name]
    module = write(
        lambda call, x: call(ATEN.exp.default, function(call, x, call(ATEN.neg.default, x))),
        [torch.randn(4, 6)],
        is_dynamic=True,
    )
    wanted = module(torch.arange(15.0).view(5, 3))
    drop_idle_copies(module.graph)
    module.recompile()
    found = module(torch.arange(15.0).view(5, 3))
    assert torch.equal(found, wanted)
    assert found.stride() == wanted.stride()
    names = [node.target._opname for node in module.graph.nodes if node.op == "call_function"]
    assert [name for name in names if name not in {"neg", "exp", "sym_size"}] == left


def test_a_linear_layers_backward_turns_two_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []

    def drop(graph: fx.Graph) -> None:
        drop_idle_views(graph)
        graphs.append(graph)

    monkeypatch.setattr(backend, "drop_idle_views", drop)
    torch._dynamo.reset()
    layer = torch.nn.Linear(6, 5, bias=False)
    torch.compile(layer, backend="fuser")(torch.randn(4, 6, requires_grad=True)).sum().backward()
    turned = [len(graph.find_nodes(op="call_function", target=ATEN.t.default)) for graph in graphs]
    assert turned == [1, 1]
