"""Nothing passes what writes or draws in modules, graphs and operators' graphs that a graph calls as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation

from fuser.fx import FusionPass
from fuser.fx.effects import is_barrier, is_random


class LeafTracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


class Root(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        before = x * 2
        part = self.part(x)
        return before + x, part


class Scales(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(3)


def hooked() -> nn.Module:
    module = nn.Sequential(nn.Identity())
    module[0].register_forward_pre_hook(lambda _, given: given[0].add_(1))
    return module


WRITING: dict[str, Callable[[], nn.Module]] = {
    "a layer in place": lambda: nn.Sequential(nn.Sequential(nn.ReLU(inplace=True))),
    "a user's": lambda: nn.Sequential(nn.Identity(), Scales()),
    "a hook": hooked,
    "a graph": lambda: fx.symbolic_trace(Scales()),
}


@pytest.mark.cpu
@pytest.mark.parametrize("name", WRITING)
def test_nothing_passes_a_module_with_a_part_that_writes(name: str) -> None:
    root = Root(WRITING[name]())
    plain = fx.GraphModule(root, LeafTracer().trace(root))
    fused = fx.GraphModule(root, LeafTracer().trace(root))
    FusionPass()(fused)
    x = torch.randn(4, 5)
    assert all(map(torch.equal, fused(x.clone()), plain(x.clone())))


@pytest.mark.parametrize(
    ("name", "named", "writes"),
    [("cumprod", (), False), ("cumprod", ("out",), True), ("max", ("max", "max_values"), True), ("cumprod_", (), True)],
)
def test_an_operator_without_its_overload_writes_where_it_is_told_to(name: str, named: Any, writes: bool) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(getattr(torch.ops.aten, name), (x, 0), dict.fromkeys(named, x))
    assert is_barrier(node) == writes


def called(body: Callable[..., Any], target: Any) -> fx.Node:
    root, graph = nn.Module(), fx.Graph()
    root.body = fx.symbolic_trace(body)
    node = graph.call_function(target, (graph.get_attr("body"), graph.placeholder("x")))
    graph.output(node)
    return next(iter(fx.GraphModule(root, graph).graph.find_nodes(op="call_function", target=target)))


def test_graphs_that_operators_call_are_looked_at() -> None:
    # As Dynamo writes a checkpoint.
    checkpoint = torch.ops.higher_order.tag_activation_checkpoint
    assert not is_barrier(called(lambda x: x.mul(3), checkpoint))
    assert is_barrier(called(lambda x: x.mul_(3), checkpoint))
    assert not is_random(called(lambda x: x.mul(3), checkpoint))
    assert is_random(called(lambda x: nn.functional.dropout(x), checkpoint))
    assert is_barrier(called(lambda x: x, triton_kernel_wrapper_mutation))


@pytest.mark.parametrize("target", [torch._VF.lstm, torch.pca_lowrank])
def test_functions_draw_that_have_no_telling_name(target: Any) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.neg, (x,))
    read = graph.call_function(torch.matmul, (first, first))
    graph.call_function(target, (x,))
    drawn = graph.call_function(torch.rand_like, (x,))
    graph.output((read, graph.call_function(torch.add, (first, drawn))))
    # One group of neg and add would draw rand_like's numbers before matmul, which reads neg.
    module = fx.GraphModule(nn.Module(), graph)
    FusionPass()(module)
    names = [node.name for node in module.graph.nodes]
    assert names.index(getattr(target, "__name__", "")) < names.index("rand_like")


def test_modules_in_modules_draw() -> None:
    root = Root(nn.Sequential(nn.Dropout()))
    graph = fx.GraphModule(root, LeafTracer().trace(root)).graph
    assert [node.name for node in graph.nodes if is_random(node)] == ["part"]
