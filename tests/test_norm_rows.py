"""Norms over rows in compiled graphs: read from dense copies, parted from what torch alone adds up; the same bits."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody uses
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import fuser
from fuser.fx import backend
from fuser.fx.backend import compile_graph
from fuser.fx.norm_rows import lay_out_norms, part_column_sums

ATEN = torch.ops.aten
# Rows whose gradients of weights ATen adds up in two steps.
MANY_ROWS = (1 << 16) + 64


class Graph:
    """A graph of fake tensors of a GPU, node by node."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.mode = FakeTensorMode()

    def take(self, name: str, *sizes: int, strides: tuple[int, ...] | None = None, device: str = "cuda") -> fx.Node:
        node = self.graph.placeholder(name)
        with self.mode:
            dense = torch.empty(sizes, device=device, dtype=torch.bfloat16)
            node.meta["val"] = dense if strides is None else dense.as_strided(sizes, strides)
        return node

    def call(self, target: Any, *args: Any, value: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = value
        return node


def norms(device: str = "cuda", rows: int = 12, *, is_dense: bool = False) -> Graph:
    """Build a layer norm and the backward of another one, of one tensor that is not contiguous, or is."""
    made = Graph()
    strides = None if is_dense else (rows * 96 // 4, 1, rows // 4)
    x = made.take("x", 4, rows // 4, 96, strides=strides, device=device)
    grad = made.take("grad", 4, rows // 4, 96, device=device)
    weight, mean, rstd = made.take("weight", 96), made.take("mean", 4, rows // 4, 1), made.take("rstd", 4, rows // 4, 1)
    own = grad.meta["val"]
    forward = made.call(ATEN.native_layer_norm.default, x, [96], weight, weight, 1e-5, value=(own, own, own))
    mask = [True, True, True]
    given = (grad, x, [96], mean, rstd, weight, weight, mask)
    backward = made.call(ATEN.native_layer_norm_backward.default, *given, value=(own, own, own))
    items = [made.call(operator.getitem, node, slot, value=own) for node in (forward, backward) for slot in range(3)]
    made.graph.output(tuple(items))
    return made


def test_norms_share_one_dense_copy() -> None:
    graph = norms().graph
    lay_out_norms(graph)
    graph.lint()
    (copy,) = graph.find_nodes(op="call_function", target=ATEN.clone.default)
    assert copy.kwargs == {"memory_format": torch.contiguous_format}
    assert copy.args[0].name == "x"
    assert copy.meta["val"].is_contiguous()
    assert {node.target for node in copy.users} == {
        ATEN.native_layer_norm.default,
        ATEN.native_layer_norm_backward.default,
    }


@pytest.mark.parametrize(("device", "is_dense"), [("cpu", False), ("cuda", True)])
def test_norms_read_what_they_can_as_it_is(device: str, is_dense: bool) -> None:
    graph = norms(device, is_dense=is_dense).graph
    lay_out_norms(graph)
    assert not graph.find_nodes(op="call_function", target=ATEN.clone.default)


@pytest.mark.parametrize(
    ("device", "rows", "is_parted"), [("cuda", MANY_ROWS, True), ("cuda", 1 << 16, False), ("cpu", MANY_ROWS, False)]
)
def test_columns_of_very_many_rows_are_parted_from_the_rows(device: str, rows: int, is_parted: bool) -> None:
    graph = norms(device, rows, is_dense=True).graph
    part_column_sums(graph)
    graph.lint()
    found = graph.find_nodes(op="call_function", target=ATEN.native_layer_norm_backward.default)
    masks = [node.args[-1] for node in found]
    assert masks == ([[True, False, False], [False, True, True]] if is_parted else [[True, True, True]])
    slots = [sorted(user.args[1] for user in node.users) for node in found]
    assert slots == ([[0], [1, 2]] if is_parted else [[0, 1, 2]])


@pytest.mark.parametrize(("numerics", "copies"), [("strict", 1), ("fast", 0)])
def test_in_an_order_of_its_own_a_kernel_reads_what_lies_anywhere(
    numerics: str, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def stop(graph_module: fx.GraphModule, *_: Any) -> fx.GraphModule:
        found.extend(graph_module.graph.find_nodes(op="call_function", target=ATEN.clone.default))
        return graph_module

    monkeypatch.setattr(backend, "_fuse", stop)
    compile_graph(fx.GraphModule({}, norms().graph), numerics)
    assert len(found) == copies


def residual(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    total = x + y
    return total + F.layer_norm(total, weight.shape, weight, bias) * 2


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("shape", "is_turned"),
    [((8, 500, 512), True), ((16, MANY_ROWS // 16, 96), False), ((16, MANY_ROWS // 16, 96), True)],
)
def test_bits_of_compiled_norms(shape: tuple[int, int, int], is_turned: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, device="cuda", dtype=dtype)
    x = (x.mT.contiguous().mT if is_turned else x).requires_grad_()
    y, grad = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2))
    weight, bias = (torch.randn(shape[-1:], device="cuda", dtype=dtype, requires_grad=True) for _ in range(2))
    found = {}
    for name in ("aot_eager", "fuser"):
        torch._dynamo.reset()
        out = torch.compile(residual, backend=name)(x, y, weight, bias)
        found[name] = [out, *torch.autograd.grad(out, (x, weight, bias), grad)]
    for got, want in zip(found["fuser"], found["aot_eager"], strict=True):
        assert got.stride() == want.stride()
        assert torch.equal(got, want)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(12544, 384), (50176, 192), (20000, 96), (2048, 768), (9000, 130)])
def test_bits_of_columns_that_many_blocks_share(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, device="cuda", dtype=dtype)
    torch._dynamo.reset()
    fuser.reset_stats()
    assert torch.equal(torch.compile(lambda x: x.sum(0), backend="fuser")(x), x.sum(0))
    found = fuser.stats()
    # Sums of float64 alone stay torch's, and are counted so.
    assert bool(found["launches"]) == (dtype != torch.float64)
    assert bool(found["kept"]) == (dtype == torch.float64)
    assert not found["fallbacks"]
