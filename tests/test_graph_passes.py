"""What is rewritten in AOTAutograd's graphs before nodes are grouped: the same values come out."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.nn.functional import scaled_dot_product_attention as attend

from fuser.fx import convolution_biases, masks, products
from fuser.fx.equal_nodes import merge_equal
from fuser.fx.expansions import drop_expansions
from fuser.fx.idle_copies import drop_idle_copies
from fuser.fx.merged_sums import sum_unviewed
from fuser.fx.passes import FusionPass
from fuser.fx.splits import open_splits

ATEN = torch.ops.aten


def trace(*inputs: torch.Tensor, device: str = "cpu", **steps: tuple[Any, ...]) -> fx.GraphModule:
    """Return a graph of calls: each takes a target, and its arguments; names of inputs and steps stand for values."""
    graph = fx.Graph()
    values: dict[Any, Any] = {f"x{slot}": graph.placeholder(f"x{slot}") for slot in range(len(inputs))}
    for name, (target, *arguments) in steps.items():
        values[name] = graph.call_function(
            target, tuple(values[item] if isinstance(item, str) else item for item in arguments)
        )
    graph.output(tuple(values[name] for name in steps))
    module = fx.GraphModule(torch.nn.Module(), graph)
    with FakeTensorMode() as mode:
        fakes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device) for x in inputs]
    FakeTensorProp(module, mode).propagate_dont_convert_inputs(*fakes)
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


def test_nodes_that_compute_the_same_of_the_same_are_one() -> None:
    pairs = {
        "number": (ATEN.mul.Tensor, "x0", 2.0),
        "chain": (ATEN.mul.Tensor, "number{}", "number{}"),
        "best": (ATEN.max.dim, "x0", 0),
        "item": (operator.getitem, "best{}", 0),
        "sign": (ATEN.add.Tensor, "x0", 0.0, -0.0),
        "drawn": (ATEN.bernoulli.default, "x0"),
        "empty": (ATEN.empty_like.default, "x0"),
        "before": (ATEN.neg.default, "x1"),
        "written": (ATEN.add_.Tensor, "x1", "x0"),
        "returned": (ATEN.exp.default, "x0"),
    }
    steps: dict[str, tuple[Any, ...]] = {}
    for name, (target, *arguments) in pairs.items():
        for twin in (0, 1):
            given = [item.format(twin) if isinstance(item, str) else item for item in arguments]
            steps[f"{name}{twin}"] = (target, *(given[:2] if name != "sign" else (given[0], given[2 - twin])))
    steps |= {"after": (ATEN.neg.default, "x1")}
    module = trace(torch.rand(4, 3), torch.rand(4, 3), **steps)
    made = dict(zip(steps, module.graph.output_node().args[0], strict=True))
    kept = ("returned0", "returned1")
    read = [name for name in steps if name not in {*kept, "best0", "best1"}]
    for name in read:
        # Its reader, so that it is not returned itself.
        with module.graph.inserting_before(module.graph.output_node()):
            made[name] = module.graph.call_function(ATEN.sum.default, (made[name],))
    module.graph.output_node().args = (tuple(made[name] for name in (*read, *kept)),)
    merge_equal(module.graph)
    module.graph.lint()
    shown = dict(zip((*read, *kept), module.graph.output_node().args[0], strict=True))
    same = {name for name in pairs if name != "best" and shown[f"{name}0"] is shown[f"{name}1"]}
    assert same == {"number", "chain", "item", "before"}
    assert shown["after"] is not shown["before0"]
    assert len(module.graph.find_nodes(op="call_function", target=ATEN.max.dim)) == 1


@pytest.mark.parametrize(
    ("order", "seen", "dims", "read"),
    [
        ([0, 2, 3, 1], [24, 5], [0], [0, 2, 3]),
        ([0, 2, 3, 1], [24, 5], [1], [1]),
        ([0, -2, -1, 1], [2, 3, 4, 5], [0, -1], [0, 1]),
        ([0, 2, 3, 1], [2, 3, 4, 5], [0], None),
        ([2, 1, 0, 3], [3, 5, 2, 4], [2, 3], None),
        ([2, 1, 0, 3], [3, 5, 2, 4], [0, 1], [2, 1]),
    ],
)
def test_sums_read_what_is_computed_not_what_is_turned(
    order: list[int], seen: list[int], dims: list[int], read: list[int] | None
) -> None:
    x = torch.randint(-9, 9, (2, 5, 3, 4)).float().contiguous(memory_format=torch.channels_last)
    steps = {"p": (ATEN.permute.default, "y", order), "v": (ATEN.view.default, "p", seen)}
    module = trace(x, y=(ATEN.mul.Tensor, "x0", 2.0), **steps, s=(ATEN.sum.dim_IntList, "v", dims, True))
    wanted = module(x)
    sum_unviewed(module.graph)
    (total,) = module.graph.find_nodes(op="call_function", target=ATEN.sum.dim_IntList)
    assert total.args[1] == (dims if read is None else read)
    assert (total.args[0].target is ATEN.mul.Tensor) == (read is not None)
    module.recompile()
    assert all(map(torch.equal, module(x), wanted))


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


def test_arguments_may_be_given_by_name() -> None:
    graph = fx.Graph()
    computed = graph.call_function(ATEN.mul.Tensor, (graph.placeholder("x"), 2.0))
    turned = graph.call_function(ATEN.permute.default, kwargs={"self": computed, "dims": [1, 0]})
    total = graph.call_function(ATEN.sum.dim_IntList, kwargs={"self": turned, "dim": [0], "keepdim": True})
    expanded = graph.call_function(ATEN.expand.default, kwargs={"self": total, "size": [6, 3]})
    graph.output(graph.call_function(ATEN.mul.Tensor, (expanded, 3.0)))
    module, x = fx.GraphModule({}, graph), torch.randint(-9, 9, (3, 6)).float()
    FakeTensorProp(module).propagate(x)
    wanted = module(x)
    sum_unviewed(graph)
    drop_expansions(graph)
    (total,) = graph.find_nodes(op="call_function", target=ATEN.sum.dim_IntList)
    assert total.args == (computed, [1])
    module.recompile()
    assert torch.equal(module(x), wanted)


def test_a_sum_over_a_view_of_one_element_stays() -> None:
    module = trace(
        torch.randn(()),
        y=(ATEN.mul.Tensor, "x0", 2.0),
        v=(ATEN.permute.default, "y", []),
        s=(ATEN.sum.dim_IntList, "v", [-1]),
    )
    sum_unviewed(module.graph)
    (total,) = module.graph.find_nodes(op="call_function", target=ATEN.sum.dim_IntList)
    assert total.args[1] == [-1]


def test_what_no_group_computes_is_read_as_it_is_seen() -> None:
    x = torch.randn(4, 6)
    module = trace(x, v=(ATEN.view.default, "x0", [2, 2, 6]), s=(ATEN.sum.dim_IntList, "v", [0, 1]))
    sum_unviewed(module.graph)
    (total,) = module.graph.find_nodes(op="call_function", target=ATEN.sum.dim_IntList)
    assert total.args[1] == [0, 1]


COPY, PAD, TO_TANH = (ATEN.clone.default,), (ATEN.constant_pad_nd.default,), (ATEN.tanh.default, "c")
WRITTEN: dict[str, tuple[dict[str, tuple[Any, ...]], bool]] = {
    "a copy": ({"c": (*COPY, "y"), "z": TO_TANH}, True),
    "a pad of nothing": ({"c": (*PAD, "y", [0, 0, 0, 0]), "z": TO_TANH}, True),
    "a pad that moves": ({"c": (*PAD, "y", [1, -1]), "z": TO_TANH}, False),
    "of a view": ({"v": (ATEN.view.default, "y", [12]), "c": (*COPY, "v"), "z": TO_TANH}, True),
    "of an input": ({"c": (*COPY, "x0"), "z": TO_TANH}, False),
    "of a view of an input": ({"v": (ATEN.view.default, "x0", [12]), "c": (*COPY, "v"), "z": TO_TANH}, False),
    "of another layout": ({"v": (ATEN.expand.default, "y", [2, 4, 3]), "c": (*COPY, "v"), "z": TO_TANH}, False),
    "of what begins elsewhere": ({"v": (ATEN.select.int, "y", 0, 1), "c": (*COPY, "v"), "z": TO_TANH}, False),
    "returned": ({"c": (*COPY, "y")}, False),
    "returned as a view": ({"c": (*COPY, "y"), "v": (ATEN.t.default, "c")}, False),
    "written to": ({"c": (*COPY, "y"), "w": (ATEN.add_.Tensor, "c", 1.0), "z": (ATEN.tanh.default, "y")}, False),
    "read after a write": ({"c": (*COPY, "y"), "w": (ATEN.add_.Tensor, "y", 1.0), "z": TO_TANH}, False),
    "read before a write": (
        {"c": (*COPY, "y"), "d": TO_TANH, "w": (ATEN.add_.Tensor, "y", 1.0), "z": (ATEN.exp.default, "d")},
        True,
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_copies_that_nobody_can_tell_from_what_they_copy_are_dropped(name: str) -> None:
    steps, is_dropped = WRITTEN[name]
    x = torch.randn(4, 3)
    module = trace(x, y=(ATEN.mul.Tensor, "x0", 2.0), **steps)
    module.graph.output_node().args = (module.graph.output_node().args[0][-1],)
    module.recompile()
    wanted, count = module(x), len(module.graph.nodes)
    drop_idle_copies(module.graph)
    module.graph.lint()
    module.recompile()
    assert torch.equal(module(x), wanted)
    assert len(module.graph.nodes) == count - is_dropped


PART, INTO = (ATEN.select.int, "z", 0, 1), (ATEN.select_scatter.default, "z", "c", 0, 1)
NEW = (ATEN.new_empty_strided.default, "y")


def over(count: int, strides: list[int]) -> dict[str, tuple[Any, ...]]:
    scatter = (ATEN.as_strided_scatter.default, "n", "y", [4, 3], strides, 0)
    return {
        "n": (ATEN.new_zeros.default, "y", [count]),
        "s": scatter,
        "a": (ATEN.as_strided.default, "s", [2, 6], [6, 1]),
    }


PARTS: dict[str, tuple[dict[str, tuple[Any, ...]], list[str]]] = {
    "a part": ({"p": PART, "c": (ATEN.copy.default, "p", "x1"), "s": INTO}, ["select_scatter"]),
    "of another dtype": (
        {"w": (ATEN.sin.default, "x2"), "p": PART, "c": (ATEN.copy.default, "p", "w"), "s": INTO},
        ["sin", "_to_copy", "select_scatter"],
    ),
    "of one element": (
        {"v": (ATEN.slice.Tensor, "x1", 0, 0, 1), "p": PART, "c": (ATEN.copy.default, "p", "v"), "s": INTO},
        ["slice", "expand", "select_scatter"],
    ),
    "read by others": (
        {"p": PART, "c": (ATEN.copy.default, "p", "x1"), "r": (ATEN.sin.default, "c"), "s": INTO},
        ["select", "copy", "sin", "select_scatter"],
    ),
    "written to meanwhile": (
        {"p": PART, "c": (ATEN.copy.default, "p", "x1"), "w": (ATEN.add_.Tensor, "x1", 1.0), "s": INTO},
        ["select", "copy", "add_", "select_scatter"],
    ),
    "into new memory": (
        {"e": (*NEW, [4, 3], [3, 1]), "c": (ATEN.copy.default, "e", "y"), "r": (ATEN.sin.default, "c")},
        ["sin"],
    ),
    "into new memory, laid out anew": (
        {"t": (ATEN.t.default, "y"), "e": (*NEW, [3, 4], [4, 1]), "c": (ATEN.copy.default, "e", "t")},
        ["t", "clone"],
    ),
    "into new memory, laid out as it lies": (
        {"t": (ATEN.t.default, "x0"), "e": (*NEW, [3, 4], [1, 3]), "c": (ATEN.copy.default, "e", "t")},
        ["t", "clone"],
    ),
    "into new memory that is not dense": (
        {"e": (*NEW, [4, 3], [6, 2]), "c": (ATEN.copy.default, "e", "y")},
        ["new_empty_strided", "copy"],
    ),
    "over all of new memory": ({**over(12, [3, 1]), "r": (ATEN.sin.default, "a")}, ["view", "sin"]),
    "over all of new memory, returned": (over(12, [3, 1]), ["view", "clone"]),
    "over all of new memory in another order": (over(12, [1, 4]), ["new_zeros", "as_strided_scatter", "as_strided"]),
    "over some of new memory": (over(13, [3, 1]), ["new_zeros", "as_strided_scatter", "as_strided"]),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_is_written_is_read_where_it_is(name: str) -> None:
    steps, left = PARTS[name]
    inputs = (torch.randn(4, 3), torch.randn(3), torch.randn(3).to(torch.bfloat16))
    module = trace(*inputs, y=(ATEN.mul.Tensor, "x0", 2.0), z=(ATEN.mul.Tensor, "x0", 3.0), **steps)
    module.graph.output_node().args = (module.graph.output_node().args[0][-1],)
    module.recompile()
    wanted = module(*(x.clone() for x in inputs))
    drop_idle_copies(module.graph)
    module.graph.lint()
    module.recompile()
    made = module(*(x.clone() for x in inputs))
    assert torch.equal(made, wanted)
    assert made.stride() == wanted.stride()
    calls = [node.target._opname for node in module.graph.nodes if node.op == "call_function"]
    assert [name for name in calls if name != "mul"] == left


ROWS, INNER, COLUMNS = 24, 16, 21


def whole(*shape: int) -> torch.Tensor:
    return torch.randint(-3, 4, shape).to(torch.bfloat16)


@pytest.mark.parametrize(
    ("inputs", "steps", "padded"),
    [
        # A last layer, and both of its gradients.
        (
            (whole(24, 16), whole(21, 16)),
            {"t": (ATEN.t.default, "x1"), "m": (ATEN.mm.default, "x0", "t")},
            [(24, 16), (16, 24)],
        ),
        ((whole(24, 21), whole(21, 16)), {"m": (ATEN.mm.default, "x0", "x1")}, [(24, 24), (24, 16)]),
        (
            (whole(24, 21), whole(24, 16)),
            {"t": (ATEN.t.default, "x0"), "m": (ATEN.mm.default, "t", "x1")},
            [(24, 24), (24, 16)],
        ),
        # With a bias.
        (
            (whole(21), whole(24, 16), whole(21, 16)),
            {"t": (ATEN.t.default, "x2"), "m": (ATEN.addmm.default, "x0", "x1", "t")},
            [(24,), (24, 16), (16, 24)],
        ),
        # Rows, and what is summed over, may be odd where nothing lies densely along them.
        ((whole(21, 16), whole(16, 24)), {"m": (ATEN.mm.default, "x0", "x1")}, [(21, 16), (16, 24)]),
        (
            (whole(21, 16), whole(21, 24)),
            {"t": (ATEN.t.default, "x0"), "m": (ATEN.mm.default, "t", "x1")},
            [(16, 21), (21, 24)],
        ),
        (
            (whole(24, 13), whole(16, 13)),
            {"t": (ATEN.t.default, "x1"), "m": (ATEN.mm.default, "x0", "t")},
            [(24, 16), (16, 16)],
        ),
    ],
)
def test_odd_products_are_padded(
    inputs: tuple[torch.Tensor, ...],
    steps: dict[str, Any],
    padded: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(products, "OPERATIONS", 0)
    monkeypatch.setattr(products, "OPERATIONS_PER_BYTE", 0)
    module = trace(*inputs, device="cuda", **steps)
    wanted = module(*inputs)
    products.pad_products(module.graph)
    (product,) = (node for node in module.graph.nodes if node.target in products._PRODUCTS)
    assert [tuple(item.meta["val"].shape) for item in product.args] == padded
    module.graph.lint()
    module.recompile()
    for found, value, node in zip(module(*inputs), wanted, module.graph.output_node().args[0], strict=True):
        assert torch.equal(found, value)
        assert (found.stride(), node.meta["val"].stride()) == (value.stride(), value.stride())


def test_one_copy_serves_all_products_that_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "OPERATIONS", 0)
    monkeypatch.setattr(products, "OPERATIONS_PER_BYTE", 0)
    steps = {"t": (ATEN.t.default, "x0"), "m": (ATEN.mm.default, "t", "x1"), "n": (ATEN.mm.default, "x0", "x2")}
    module = trace(whole(24, 21), whole(24, 16), whole(21, 16), device="cuda", **steps)
    products.pad_products(module.graph)
    assert len(module.graph.find_nodes(op="call_function", target=ATEN.constant_pad_nd.default)) == 2


@pytest.mark.parametrize(("rows", "is_padded"), [(8192, True), (64, False)])
def test_products_are_padded_where_it_gains(rows: int, *, is_padded: bool) -> None:
    module = fx.GraphModule(torch.nn.Module(), fx.Graph())
    with FakeTensorMode():
        x, w = (torch.empty(size, 1024, dtype=torch.bfloat16, device="cuda") for size in (rows, 50257))
    graph = module.graph
    nodes = [graph.placeholder(name) for name in "xw"]
    turned = graph.call_function(ATEN.t.default, (nodes[1],))
    product = graph.call_function(ATEN.mm.default, (nodes[0], turned))
    graph.output(product)
    for node, value in zip((*nodes, turned, product), (x, w, w.t(), x @ w.t()), strict=True):
        node.meta["val"] = value
    products.pad_products(graph)
    assert bool(graph.find_nodes(op="call_function", target=ATEN.constant_pad_nd.default)) == is_padded
    # What nobody reads would make a group write what it looks at.
    assert all(node.users for node in graph.nodes if node.op == "call_function")


@pytest.mark.parametrize(
    ("target", "args", "named"),
    [
        (ATEN.split.Tensor, (4, 1), {}),
        (ATEN.split.Tensor, (), {"split_size": 2, "dim": -1}),
        (ATEN.split_with_sizes.default, ([1, 2, 3],), {"dim": 1}),
        (ATEN.unbind.int, (), {"dim": 1}),
    ],
)
def test_parts_may_be_counted_from_the_end(target: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    graph = fx.Graph()
    computed = graph.call_function(ATEN.neg.default, (graph.placeholder("x"),))
    split = graph.call_function(target, (computed, *args), named)
    parts = [graph.call_function(operator.getitem, (split, slot)) for slot in (-1, -2, 0)]
    graph.output(tuple(graph.call_function(ATEN.relu.default, (part,)) for part in parts))
    module, x = fx.GraphModule({}, graph), torch.randn(3, 6)
    FakeTensorProp(module).propagate(x)
    wanted = module(x)
    open_splits(graph)
    assert not graph.find_nodes(op="call_function", target=target)
    module.recompile()
    assert all(map(torch.equal, module(x), wanted))


def positions(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    places = torch.arange(x.shape[2], device=x.device)
    return places[:, None], places[None, :]


def of_the_past(x: torch.Tensor) -> torch.Tensor:
    row, column = positions(x)
    return (x.new_ones((), dtype=torch.bool) & (column <= row)).expand(x.shape[0], 1, -1, -1)


def written_later(x: torch.Tensor, write: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    mask = torch.ones(x.shape[2], x.shape[2], dtype=torch.bool)
    write(mask.view(-1)[1:])
    return mask


def true_everywhere(x: torch.Tensor) -> torch.Tensor:
    return (positions(x)[0] >= 0).expand(x.shape[0], 1, -1, x.shape[2])


MASKS: dict[str, tuple[Callable[[torch.Tensor], Any], dict[str, Any]]] = {
    "of the past": (of_the_past, {"attn_mask": None, "is_causal": True}),
    "true everywhere": (true_everywhere, {"attn_mask": None, "is_causal": False}),
    "of a window": (lambda x: of_the_past(x) & (positions(x)[1] > positions(x)[0] - 3), {}),
    "of one row": (lambda x: positions(x)[1] < 3, {}),
    "of the input": (lambda x: of_the_past(x) & (x[:, :1, :, :1] > -9), {}),
    "drawn": (lambda x: torch.rand(x.shape[2], x.shape[2]) > -1, {}),
    "of numbers": (lambda x: of_the_past(x).float(), {}),
    "written to": (lambda x: torch.ones(x.shape[2], x.shape[2], dtype=torch.bool).logical_not_(), {}),
    "written to later": (lambda x: written_later(x, lambda part: part[:5].fill_(False)), {}),
    "assigned to later": (lambda x: written_later(x, lambda part: part.__setitem__(3, False)), {}),
}


def masks_of(model: Callable[..., Any], *inputs: torch.Tensor, is_strict: bool = False) -> tuple[dict[str, Any], Any]:
    """Return what attention is called with, and the result."""
    found: list[dict[str, Any]] = []

    def backend(graph_module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        masks.drop_idle_masks(graph_module, is_strict=is_strict)
        found.extend(dict(node.kwargs) for node in graph_module.graph.find_nodes(op="call_function", target=attend))
        return graph_module.forward

    torch._dynamo.reset()
    result = torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    return found[0], result


@pytest.mark.parametrize("name", MASKS)
def test_masks_that_say_nothing_are_dropped(name: str) -> None:
    make, wanted = MASKS[name]
    x = torch.randn(2, 4, 7, 8)
    found, result = masks_of(lambda x: attend(x, x, x, attn_mask=make(x)), x)
    assert {key: value for key, value in found.items() if not isinstance(value, fx.Node)} == wanted
    assert ("attn_mask" in found) == bool(wanted) or isinstance(found["attn_mask"], fx.Node)
    mask = {} if wanted else {"attn_mask": make(x)}
    assert torch.equal(result, attend(x, x, x, **mask, is_causal=wanted.get("is_causal", False)))


@pytest.mark.parametrize("is_watched", [False, True])
def test_strict_numerics_drop_the_masks_of_models_that_drop_them(
    monkeypatch: pytest.MonkeyPatch, *, is_watched: bool
) -> None:
    if is_watched:
        monkeypatch.setattr(masks, "_WATCHED", Path(__file__).name)
    x = torch.randn(2, 4, 7, 8)
    found, _ = masks_of(lambda x: attend(x, x, x, attn_mask=of_the_past(x)), x, is_strict=True)
    assert (found["attn_mask"] is None) == is_watched


@pytest.mark.parametrize("is_repeated", [False, True])
@pytest.mark.parametrize("written", ["nothing", "keys", "heads"])
def test_heads_that_share_keys_need_not_repeat_them(written: str, *, is_repeated: bool) -> None:
    def share(x: torch.Tensor) -> torch.Tensor:
        shape = (2, 2, 2, 7, 8) if is_repeated else (2, 4, 1, 7, 8)
        return x[:, :, None, :, :].expand(shape).reshape(2, 4, 7, 8)

    def attend_to(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y = y * 2
        heads = share(y)
        {"nothing": x, "keys": y, "heads": heads}[written].add_(1)
        return attend(x, heads, heads, attn_mask=of_the_past(x))

    x, y = torch.randn(2, 4, 7, 8), torch.randn(2, 2 if is_repeated else 4, 7, 8)
    found, result = masks_of(attend_to, x.clone(), y)
    assert found.get("enable_gqa", False) == (written == "nothing")
    assert torch.allclose(result, attend_to(x, y), atol=1e-6)


@pytest.mark.parametrize("backend", ["Cudnn", "CudaDepthwise2d"])
def test_biases_of_cudnns_convolutions_are_added_apart(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = whole(2, 4, 5, 5).contiguous(memory_format=torch.channels_last), whole(6, 4, 3, 3), whole(6)
    options = [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    module = trace(*inputs, device="cuda", c=(ATEN.convolution.default, "x0", "x1", "x2", *options))
    (wanted,) = module(*inputs)
    kind = getattr(torch._C._ConvBackend, backend)
    monkeypatch.setattr(torch._C, "_select_conv_backend", lambda *_: kind)
    convolution_biases.add_biases_apart(module.graph)
    (node,) = module.graph.find_nodes(op="call_function", target=ATEN.convolution.default)
    assert (node.args[2] is None) == (backend == "Cudnn")
    module.graph.lint()
    module.recompile()
    (found,) = module(*inputs)
    assert torch.equal(found, wanted)
    assert found.stride() == wanted.stride()


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        ("CudaDepthwise2d", torch.channels_last),
        ("CudaDepthwise2d", torch.contiguous_format),
        ("Slow2d", torch.channels_last),
    ],
)
def test_gradients_of_biases_are_summed_up_apart(
    backend: str, kind: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = whole(2, 6, 5, 5).contiguous(memory_format=kind), whole(2, 4, 5, 5), whole(6, 4, 3, 3)
    options = [6], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, True]
    both = {f"g{slot}": (operator.getitem, "b", slot) for slot in (1, 2)}
    module = trace(*inputs, device="cuda", b=(ATEN.convolution_backward.default, "x0", "x1", "x2", *options), **both)
    module.graph.output_node().args = (module.graph.output_node().args[0][1:],)
    module.recompile()
    wanted = module(*inputs)
    found = getattr(torch._C._ConvBackend, backend)
    monkeypatch.setattr(torch._C, "_select_conv_backend", lambda *_: found)
    convolution_biases.sum_biases_apart(module.graph)
    (node,) = module.graph.find_nodes(op="call_function", target=ATEN.convolution_backward.default)
    assert node.args[-1][2] == (backend == "Slow2d" or kind is torch.contiguous_format)
    module.graph.lint()
    module.recompile()
    assert all(map(torch.equal, module(*inputs), wanted))
