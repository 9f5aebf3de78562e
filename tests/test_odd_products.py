"""Matrix products of odd rows: copied so that rows are whole vectors, and added up in cuBLAS's order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple
from typing import Any

import pytest
import torch
from graph_checks import trace

from fuser.config import config
from fuser.cuda.nvrtc import compile_text
from fuser.cuda.products import ProductOrder, _options, emit_text
from fuser.fx import fuse_graph, odd_products
from fuser.fx.backend import _cache_tag, compile_graph
from fuser.fx.fusion_node import FusionModule
from fuser.fx.odd_products import MeasuredOrder, order_products

ATEN = torch.ops.aten
PAD = ATEN.constant_pad_nd.default
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


@pytest.mark.parametrize("vocabulary", [93, 95, 81, 89, 33])
@pytest.mark.parametrize("order", [ProductOrder(8, 32, 1), ProductOrder(8, 32, 2), ProductOrder(16, 64, 1)])
@pytest.mark.parametrize("write", [last_layer, of_input, of_weight, of_both])
def test_products_stay_the_same(
    write: Any, order: ProductOrder, vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(odd_products, "OPERATIONS", 0)
    found = {write: order}
    # Only what adds up the vocabulary has slices.
    monkeypatch.setattr(
        odd_products,
        "measure",
        lambda left, _: MeasuredOrder(order if left.shape[1] == vocabulary else ProductOrder(8, 32, 1), 2, 1),
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
    # Nothing but the products and their copy reads anything.
    assert all(node.users for node in module.graph.nodes if node.op == "call_function")
    # One copy for both.
    assert len(module.graph.find_nodes(op="call_function", target=PAD)) == (write is not last_layer)
    for one, other, node in zip(
        *([item] if write is not of_both else item for item in (made, wanted, values)), strict=True
    ):
        assert torch.equal(one, other)
        assert one.stride() == other.stride() == node.meta["val"].stride()
    for product in products:
        rows = product.args[0].meta["val"]
        assert max(rows.stride()) % odd_products.VECTOR == 0
        assert max(rows.stride()) < vocabulary + 16


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
    monkeypatch.setattr(odd_products, "measure", lambda *_: MeasuredOrder(ProductOrder(8, 32, 1), 2, 1))
    inputs = [torch.zeros(shape, dtype=dtype) for shape in ((rows, 16), (columns, 16), (rows, columns))]
    module = trace(last_layer, inputs, device)
    order_products(module.graph)
    assert module.graph.find_nodes(op="call_function", target=ATEN.mm.default)


def test_one_kernel_writes_the_copy_with_what_comes_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(odd_products, "OPERATIONS", 0)
    monkeypatch.setattr(odd_products, "measure", lambda *_: MeasuredOrder(ProductOrder(8, 32, 1), 2, 1))

    def write(call: Any, x: Any, weight: Any, grad: Any) -> Any:
        return of_both(call, x, weight, call(ATEN.mul.Tensor, grad, 2.0))

    module = trace(write, [torch.zeros(shape, dtype=BF16) for shape in ((40, 16), (93, 16), (40, 93))], "cuda")
    order_products(module.graph)
    module = fuse_graph(module)
    (group,) = (item.group for item in module.modules() if isinstance(item, FusionModule))
    assert [name for name in group.names() if name != "view"] == ["mul", "pad", "cat"]
    # The copy alone, which both products read.
    (node,) = module.graph.find_nodes(op="call_module", target="fusion_0")
    assert node.meta["val"].shape == (40, 96)


def seen_otherwise(call: Any, x: Any, _: Any, grad: Any) -> Any:
    return call(ATEN.mm.default, call(ATEN.permute.default, grad, [1, 0]), x)


@pytest.mark.parametrize(
    ("write", "saved_us", "is_on", "ours"),
    [
        # One copy takes 10, for one product or for both; what comes out needs none.
        (of_weight, 10, True, 0),
        (of_weight, 11, True, 1),
        (of_both, 5, True, 0),
        (of_both, 6, True, 2),
        (last_layer, 0, True, 0),
        (last_layer, 1, True, 1),
        (last_layer, 1, False, 0),
        (seen_otherwise, 11, True, 0),
    ],
)
def test_products_are_ours_where_they_gain(
    write: Any, saved_us: int, is_on: bool, ours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(odd_products, "OPERATIONS", 0)
    copy_us = 0 if write is last_layer else 10
    monkeypatch.setattr(odd_products, "measure", lambda *_: MeasuredOrder(ProductOrder(8, 32, 1), saved_us, copy_us))
    inputs = [torch.zeros(shape, dtype=BF16) for shape in ((40, 16), (93, 16), (40, 93))]
    module = trace(write, inputs, "cuda")
    with config.patch(odd_products=is_on):
        order_products(module.graph)
    assert len(module.graph.find_nodes(op="call_function", target=torch.ops.fuser.product.default)) == ours
    assert bool(module.graph.find_nodes(op="call_function", target=PAD)) == bool(ours and write is not last_layer)


@pytest.fixture
def flags() -> Iterator[Any]:
    """Torch's flags, one of which may be changed."""
    found = torch.backends.cuda.matmul
    before = found.allow_bf16_reduced_precision_reduction
    yield found
    found.allow_bf16_reduced_precision_reduction = before


def test_what_products_depend_on_is_known(flags: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _cache_tag(None)
    assert _cache_tag(None) == before
    flags.allow_bf16_reduced_precision_reduction = not flags.allow_bf16_reduced_precision_reduction
    other = _cache_tag(None)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    third = _cache_tag(None)
    with config.patch(odd_products=False):
        assert len({before, other, third, _cache_tag(None)}) == 4


def test_fast_numerics_have_padded_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("products of fast numerics have no order")

    monkeypatch.setattr(odd_products, "OPERATIONS", 0)
    monkeypatch.setattr(odd_products, "measure", fail)
    inputs = [torch.zeros(shape, dtype=BF16) for shape in ((40, 16), (93, 16), (40, 93))]
    compile_graph(trace(last_layer, inputs, "cuda"), "fast")
    with pytest.raises(AssertionError, match="no order"):
        compile_graph(trace(last_layer, inputs, "cuda"), "strict")


@pytest.mark.nvrtc
@pytest.mark.one_in(6)
@pytest.mark.parametrize("depth", [8, 16])
@pytest.mark.parametrize("rows", [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "sm_120"])
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
    found_orders = []
    measure = odd_products.measure

    def spare(left: torch.Tensor, right: torch.Tensor) -> MeasuredOrder | None:
        measured = measure(left, right)
        found_orders.append(measured)
        return measured and MeasuredOrder(measured.order, 2, 1)

    monkeypatch.setattr(odd_products, "measure", spare)
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
    assert found_orders[0] is not None


@pytest.fixture
def layer() -> tuple[torch.Tensor, torch.Tensor, MeasuredOrder]:
    """What a last layer multiplies, and what is known of it."""
    x, weight = (torch.randn(size, 256, device="cuda").to(BF16) for size in (2048, 5001))
    measured = odd_products.measure(x, weight.t())
    assert measured is not None
    return x, weight, measured


def multiply_in_order(x: torch.Tensor, weight: torch.Tensor, measured: MeasuredOrder) -> torch.Tensor:
    product: torch.Tensor = torch.ops.fuser.product(x, weight.t(), len(x), 0, [*astuple(measured.order)])
    return product


@pytest.mark.cuda
def test_what_is_no_number_comes_out_as_it_does(layer: tuple[torch.Tensor, torch.Tensor, MeasuredOrder]) -> None:
    x, weight, measured = layer
    x[::7, 3], x[::5, 200], weight[::3, 3], weight[1::3, 9] = torch.inf, -torch.inf, torch.nan, torch.inf
    made, wanted = multiply_in_order(x, weight, measured), x @ weight.t()
    assert wanted.isnan().any()
    assert wanted.isinf().any()
    assert wanted.isfinite().any()
    assert torch.equal(made.view(torch.int16), wanted.view(torch.int16))


@pytest.mark.cuda
def test_other_streams_and_graphs(layer: tuple[torch.Tensor, torch.Tensor, MeasuredOrder]) -> None:
    x, weight, measured = layer
    wanted = x @ weight.t()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        made = multiply_in_order(x, weight, measured)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(made, wanted)
    with torch.cuda.graph(graph):
        # Nothing can be compared now.
        assert odd_products.measure(x, weight.t()) is None
        made = multiply_in_order(x, weight, measured)
    x.neg_()
    graph.replay()
    assert torch.equal(made, -wanted)


@pytest.mark.cuda
def test_what_begins_anywhere(layer: tuple[torch.Tensor, torch.Tensor, MeasuredOrder]) -> None:
    x, weight, measured = layer
    moved = torch.empty(x.numel() + 1, dtype=BF16, device="cuda")[1:].view(x.shape).copy_(x)
    assert moved.data_ptr() % 16
    assert torch.equal(multiply_in_order(moved, weight, measured), moved @ weight.t())


@pytest.mark.cuda
def test_comparing_changes_nothing(layer: tuple[torch.Tensor, torch.Tensor, MeasuredOrder]) -> None:
    x, weight, measured = layer
    torch.cuda.synchronize()
    state, allocated = torch.cuda.get_rng_state(), torch.cuda.memory_allocated()
    assert ProductOrder(*[*odd_products._compare(x, weight.t())][:3]) == measured.order
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert torch.cuda.memory_allocated() == allocated


@pytest.mark.cuda
@pytest.mark.parametrize("is_reduced", [False, True])
def test_flags_of_torchs(is_reduced: bool, flags: Any) -> None:
    flags.allow_bf16_reduced_precision_reduction = is_reduced
    x, weight = (torch.randn(size, 512, device="cuda").to(BF16) for size in (4096, 10007))
    for left, right in ((x, weight.t()), (x @ weight.t(), weight)):
        numbers = [*odd_products._compare(left, right)]
        if numbers:
            order = ProductOrder(*numbers[:3])
            assert torch.equal(odd_products._multiply([left, right], order), left @ right)
