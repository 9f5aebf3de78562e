"""What is rewritten in AOTAutograd's graphs before nodes are grouped: the same values come out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from fuser.fx.merged_sums import sum_unviewed
from fuser.fx.passes import FusionPass

ATEN = torch.ops.aten


def trace(*inputs: torch.Tensor, **steps: tuple[Any, ...]) -> fx.GraphModule:
    """Return a graph of calls: each takes a target, and its arguments; names of inputs and steps stand for values."""
    graph = fx.Graph()
    values: dict[Any, Any] = {f"x{slot}": graph.placeholder(f"x{slot}") for slot in range(len(inputs))}
    for name, (target, *arguments) in steps.items():
        values[name] = graph.call_function(
            target, tuple(values[item] if isinstance(item, str) else item for item in arguments)
        )
    graph.output(tuple(values[name] for name in steps))
    module = fx.GraphModule(torch.nn.Module(), graph)
    mode = FakeTensorMode()
    FakeTensorProp(module, mode).propagate(*inputs)
    return module


@pytest.mark.parametrize(
    ("shape", "seen", "dims", "read"),
    [
        ((4, 3, 5), (12, 5), [0], [0, 1]),
        ((12, 5), (4, 3, 5), [0, 1], [0]),
        ((12, 5), (4, 3, 5), [1], None),
        ((4, 3, 5), (12, 5), [-1], [2]),
        ((4, 6, 2), (3, 8, 2), [0], None),
        ((4, 1, 5), (4, 5), [0], [0]),
        ((1, 4, 5), (4, 5, 1), [0], [0, 1]),
        ((2, 3, 4, 5), (6, 20), [0, 1], [0, 1, 2, 3]),
        ((0, 3, 4), (0, 4), [0], None),
    ],
)
@pytest.mark.parametrize("keeps", [False, True])
def test_sums_read_what_is_computed_not_a_view_of_it(
    shape: tuple[int, ...], seen: tuple[int, ...], dims: list[int], read: list[int] | None, *, keeps: bool
) -> None:
    x = torch.randint(-9, 9, shape).float()
    module = trace(
        x, y=(ATEN.mul.Tensor, "x0", 2.0), v=(ATEN.view.default, "y", seen), s=(ATEN.sum.dim_IntList, "v", dims, keeps)
    )
    wanted = module(x)
    sum_unviewed(module.graph)
    (total,) = module.graph.find_nodes(op="call_function", target=ATEN.sum.dim_IntList)
    assert total.args[1] == (dims if read is None else read)
    module.graph.lint()
    module.recompile()
    assert all(map(torch.equal, module(x), wanted))
    noted = [node.meta["val"].shape for node in module.graph.output_node().args[0]]
    assert noted == [item.shape for item in wanted]


def test_a_bias_gradient_joins_what_makes_the_gradient() -> None:
    module = trace(
        torch.randn(4, 3, 5),
        torch.randn(5, 2),
        y=(ATEN.mul.Tensor, "x0", "x0"),
        v=(ATEN.view.default, "y", [12, 5]),
        m=(ATEN.mm.default, "v", "x1"),
        s=(ATEN.sum.dim_IntList, "v", [0]),
    )
    FusionPass(numerics="fast")(module)
    assert not module.graph.find_nodes(op="call_function", target=ATEN.sum.dim_IntList)
    assert len([node for node in module.graph.nodes if node.op == "call_module"]) == 1


def test_what_no_group_computes_is_read_as_it_is_seen() -> None:
    x = torch.randn(4, 6)
    module = trace(x, v=(ATEN.view.default, "x0", [2, 2, 6]), s=(ATEN.sum.dim_IntList, "v", [0, 1]))
    sum_unviewed(module.graph)
    (total,) = module.graph.find_nodes(op="call_function", target=ATEN.sum.dim_IntList)
    assert total.args[1] == [0, 1]
