"""Matrix products of odd rows: copied so that rows are whole vectors, and added up in cuBLAS's order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graph_checks import trace

from fuser.cuda.nvrtc import compile_text
from fuser.cuda.products import ProductOrder, _options, emit_text
from fuser.fx import odd_products
from fuser.fx.odd_products import order_products

ATEN = torch.ops.aten
BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("order", "length", "size", "gap"),
    [
        # Those of GPT-2's and BERT's last layers.
        (ProductOrder(8, 32, 3), 50257, 16760, (33521, 7)),
        (ProductOrder(16, 64, 2), 30522, 15264, (15290, 6)),
        (ProductOrder(8, 32, 1), 1024, 1024, (0, 0)),
        (ProductOrder(8, 32, 1), 1001, 1001, (9, 7)),
        # A slice of 1, slices with something left over, none for the last one.
        (ProductOrder(16, 32, 2), 401, 208, (208 + 1, 15)),
        (ProductOrder(16, 64, 2), 48, 24, None),
        (ProductOrder(8, 32, 4), 9, 8, None),
    ],
)
def test_where_zeros_fill_up_tiles(order: ProductOrder, length: int, size: int, gap: tuple[int, int] | None) -> None:
    assert order.slice_size(length) == size
    assert order.find_gap(length) == gap


def last_layer(call: Any, x: Any, weight: Any, _: Any) -> Any:
    return call(ATEN.mm.default, x, call(ATEN.t.default, weight))


def of_input(call: Any, _: Any, weight: Any, grad: Any) -> Any:
    return call(ATEN.mm.default, grad, weight)


def of_weight(call: Any, x: Any, _: Any, grad: Any) -> Any:
    return call(ATEN.mm.default, call(ATEN.t.default, grad), x)


def of_both(call: Any, x: Any, weight: Any, grad: Any) -> Any:
    return of_weight(call, x, weight, grad), of_input(call, x, weight, grad)


@pytest.mark.parametrize("vocabulary", [93, 94, 81, 89, 33])
@pytest.mark.parametrize("order", [ProductOrder(8, 32, 1), ProductOrder(8, 32, 2), ProductOrder(16, 64, 1)])
@pytest.mark.parametrize("write", [last_layer, of_input, of_weight, of_both])
def test_products_stay_the_same(
    write: Any, order: ProductOrder, vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(odd_products, "OPERATIONS", 0)
    found = {write: order}
    # Only what adds up the vocabulary has slices.
    monkeypatch.setattr(
        odd_products, "find_order", lambda left, _: order if left.shape[1] == vocabulary else ProductOrder(8, 32, 1)
    )
    inputs = [torch.randint(-3, 4, shape).to(BF16) for shape in ((40, 16), (vocabulary, 16), (40, vocabulary))]
    module = trace(write, inputs, "cuda")
    wanted = module(*inputs)
    order_products(module.graph)
    module.graph.lint()
    module.recompile()
    made, values = module(*inputs), module.graph.output_node().args[0]
    if found[write].find_gap(vocabulary) is None:
        return
    products = module.graph.find_nodes(op="call_function", target=torch.ops.fuser.product.default)
    assert len(products) == (2 if write is of_both else 1)
    # One copy for both.
    assert len(module.graph.find_nodes(op="call_function", target=ATEN.cat.default)) == (write is not last_layer)
    for one, other, node in zip(
        *([item] if write is not of_both else item for item in (made, wanted, values)), strict=True
    ):
        assert torch.equal(one, other)
        assert one.stride() == other.stride() == node.meta["val"].stride()
    for product in products:
        rows = product.args[0].meta["val"]
        assert max(rows.stride()) % odd_products.VECTOR == 0


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "device"),
    [
        (40, 96, BF16, "cuda"),
        (40, 93, torch.float32, "cuda"),
        (40, 93, BF16, "cpu"),
    ],
)
def test_other_products_stay(
    rows: int, columns: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(odd_products, "OPERATIONS", 0)
    monkeypatch.setattr(odd_products, "find_order", lambda *_: ProductOrder(8, 32, 1))
    inputs = [torch.zeros(shape, dtype=dtype) for shape in ((rows, 16), (columns, 16), (rows, columns))]
    module = trace(last_layer, inputs, device)
    order_products(module.graph)
    assert module.graph.find_nodes(op="call_function", target=ATEN.mm.default)


@pytest.mark.nvrtc
@pytest.mark.parametrize("depth", [8, 16])
@pytest.mark.parametrize("rows", [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_the_kernel_needs_no_more_registers_than_there_are(target: str, rows: tuple[bool, bool], depth: int) -> None:
    options = (*_options(target, *rows, depth == 16, depth), "--ptxas-options=-v")
    _, log = compile_text(emit_text(), options)
    assert "0 bytes spill stores" in log


@pytest.mark.cuda
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize(("rows", "inner", "vocabulary"), [(2048, 256, 5001), (1000, 128, 3047), (4096, 512, 10007)])
def test_last_layers_equal_eager(
    rows: int, inner: int, vocabulary: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(odd_products, "OPERATIONS", 0)
    orders = []
    find_order = odd_products.find_order
    monkeypatch.setattr(odd_products, "find_order", lambda *given: orders.append(find_order(*given)) or orders[-1])
    found = []
    for backend in ("fuser", "aot_eager"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        layer = torch.nn.Linear(inner, vocabulary, bias=False).cuda().to(dtype)
        x = torch.randn(rows, inner, device="cuda").to(dtype).requires_grad_()
        made = torch.compile(lambda x, layer=layer: layer(x * 2), backend=backend, dynamic=False)(x)
        made.backward(torch.randn_like(made))
        found.append((made.detach(), x.grad, layer.weight.grad))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    # At least what comes out has an order that is known.
    assert orders[0] is not None
