"""Matrix products whose inner dimension is one: pointwise ops with the same bits, where that has been compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_emulation import run_emulated
from graph_checks import trace

from fuser.fx import fuse_graph, outer_products
from fuser.fx.outer_products import open_outer_products
from fuser.graph import FusionGroup, GroupBuilder
from fuser.ops.reductions import reduction_function

ATEN = torch.ops.aten
BF16 = torch.bfloat16


@pytest.fixture
def is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer_products, "_has_torchs_bits", lambda *_: True)


def draw(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Draw numbers whose products are as small as any, and zeros of both signs."""
    drawn = torch.randn(shape) * torch.finfo(dtype).tiny ** torch.rand(shape)
    return drawn.masked_fill(torch.rand(shape) < 0.2, -0.0).to(dtype)


def columns(call: Any, left: Any, right: Any) -> Any:
    return call(ATEN.mm.default, left, right)


def seen_columns(call: Any, left: Any, right: Any) -> Any:
    return call(ATEN.mm.default, call(ATEN.t.default, left), call(ATEN.t.default, right))


def batches(call: Any, left: Any, right: Any) -> Any:
    return call(ATEN.bmm.default, left, right)


@pytest.mark.usefixtures("is_compared")
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize(
    ("write", "shapes"),
    [
        (columns, ((21, 1), (1, 16))),
        (columns, ((1, 1), (1, 16))),
        (columns, ((21, 1), (1, 1))),
        (seen_columns, ((1, 21), (16, 1))),
        (batches, ((5, 21, 1), (5, 1, 16))),
    ],
)
def test_every_element_is_one_product(write: Any, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> None:
    inputs = [draw(*shape, dtype=dtype) for shape in shapes]
    module = trace(write, inputs, "cuda")
    wanted = module(*inputs)
    open_outer_products(module.graph, "strict")
    module.graph.lint()
    module.recompile()
    assert not {ATEN.mm.default, ATEN.bmm.default} & {node.target for node in module.graph.nodes}
    made, known = module(*inputs), module.graph.output_node().args[0].meta["val"]
    assert torch.equal(made, wanted)
    # No zero has a sign, but for what is too small to be another number.
    exact = module.graph.find_nodes(op="call_function", target=ATEN.add.Tensor)
    assert len(exact) == 1
    assert not made.signbit()[(inputs[0] == 0).reshape(*made.shape[:-1], -1).expand(made.shape)].any()
    assert made.stride() == wanted.stride() == known.stride()


@pytest.mark.parametrize(
    ("shapes", "dtype", "device", "numerics"),
    [
        # Sums of two, what would be rounded before it is multiplied, and what no GPU computes.
        (((21, 2), (2, 16)), BF16, "cuda", "fast"),
        (((21, 1), (1, 16)), torch.float32, "cuda", "fast"),
        (((21, 1), (1, 16)), BF16, "cpu", "fast"),
        # Nobody has compared.
        (((21, 1), (1, 16)), BF16, "cuda", "strict"),
    ],
)
def test_other_products_stay(
    shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, device: str, numerics: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outer_products, "_has_torchs_bits", lambda *_: False)
    module = trace(columns, [draw(*shape, dtype=dtype) for shape in shapes], device)
    open_outer_products(module.graph, numerics)
    assert module.graph.find_nodes(op="call_function", target=ATEN.mm.default)


def of_score(call: Any, score: Any, weight: Any, x: Any, y: Any) -> Any:
    """The gradient of a score's input, and of a bias before it."""
    grad = call(ATEN.mul.Tensor, call(ATEN.add.Tensor, x, call(ATEN.mm.default, score, weight)), y)
    return grad, call(ATEN.sum.dim_IntList, grad, [0], True)


@pytest.mark.cpu
@pytest.mark.usefixtures("is_compared")
@pytest.mark.parametrize("shape", [(700, 33), (2100, 128)])
def test_sums_of_columns_read_it_where_it_is_made(shape: tuple[int, int]) -> None:
    inputs = [torch.randn(size).to(BF16) for size in (shape, shape, (shape[0], 1), (1, shape[1]))]
    x, y, score, weight = inputs
    module = trace(of_score, [score, weight, x, y], "cuda")
    open_outer_products(module.graph, "strict")
    (node,) = (module := fuse_graph(module)).graph.find_nodes(op="call_module")
    group = module.get_submodule(node.target).group  # type: ignore[union-attr]
    given = {"x0": score, "x1": weight, "x2": x, "x3": y}
    grad, total = run_emulated(group, [given.get(str(item), item) for item in node.args])
    assert torch.equal(grad, (x + score @ weight) * y)
    # As they are of what is read whole.
    (sums,) = run_emulated(sum_of_columns(), [grad])
    assert torch.equal(total, sums)


def sum_of_columns() -> FusionGroup:
    builder = GroupBuilder("strict")
    return builder.build(builder.apply(reduction_function("sum", (0,), True), [builder.add_input("x")]))


@pytest.mark.cuda
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_gradients_of_scores_equal_eager(dtype: torch.dtype) -> None:
    assert outer_products._has_torchs_bits(torch.device("cuda", 0), dtype)
    layer = torch.nn.Linear(96, 1).cuda().to(dtype)

    def score(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(layer(torch.nn.functional.silu(x) + x))

    found = []
    for backend in ("fuser", "aot_eager"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        x = torch.randn(3000, 96, device="cuda").to(dtype).requires_grad_()
        torch.compile(score, backend=backend)(x).square().sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)
