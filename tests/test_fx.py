"""FusionPass and fuse_graph on graphs made by hand: maximal, convex, and right next to writes."""

from __future__ import annotations

import copy
import functools
import io
import operator
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from functors import draw, functor
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import fuser
from fuser.fx import FusionModule, FusionPass, fuse_graph
from fuser.fx import passes as fuser_passes
from fuser.fx.nodes import bind_node, is_fusible

pytestmark = pytest.mark.cpu
ATEN = torch.ops.aten


def module_of(graph: fx.Graph) -> fx.GraphModule:
    graph.lint()
    return fx.GraphModule(torch.nn.Module(), graph)


def fusions(module: fx.GraphModule) -> list[FusionModule]:
    found = [module.get_submodule(str(node.target)) for node in module.graph.nodes if node.op == "call_module"]
    return [item for item in found if isinstance(item, FusionModule)]


def build(inputs: str, steps: list[tuple[str, Any, tuple[Any, ...]]], output: Any) -> fx.GraphModule:
    """Build a graph from lines ``(name, target, arguments)``; names among the arguments are nodes."""
    graph = fx.Graph()
    nodes = {name: graph.placeholder(name) for name in inputs}
    look = lambda item: fx.node.map_aggregate(item, lambda x: nodes[x] if isinstance(x, str) and x in nodes else x)  # noqa: E731
    for name, target, arguments in steps:
        kind = "call_method" if isinstance(target, str) else "call_function"
        nodes[name] = graph.create_node(kind, target, look(arguments))
    graph.output(look(output))
    return module_of(graph)


@pytest.fixture
def x() -> torch.Tensor:
    return draw((5, 33), torch.float32, seed=1)


def test_pass_result(x: torch.Tensor) -> None:
    module = build("x", [("a", torch.sigmoid, ("x",)), ("b", operator.add, ("a", 1))], "b")
    result = FusionPass()(module)
    assert result.modified
    assert result.graph_module is module
    assert len(fusions(module)) == 1
    assert torch.allclose(module(x), torch.sigmoid(x) + 1)
    again = FusionPass()(module)
    assert not again.modified


def test_nothing_to_fuse(x: torch.Tensor) -> None:
    module = build("x", [("a", torch.cumprod, ("x", 0))], "a")
    assert not FusionPass()(module).modified
    assert torch.equal(module(x), torch.cumprod(x, 0))


def test_aten_overloads(x: torch.Tensor) -> None:
    module = build(
        "xy",
        [
            ("a", ATEN.mul.Tensor, ("x", "y")),
            ("b", ATEN.add.Scalar, ("a", 2.5)),
            ("c", ATEN.gt.Scalar, ("b", 0)),
            ("d", ATEN.where.self, ("c", "b", "a")),
            ("e", ATEN.tanh.default, ("d",)),
            ("f", ATEN._to_copy.default, ("e",)),
        ],
        "f",
    )
    next(node for node in module.graph.nodes if node.target is ATEN._to_copy.default).kwargs = {"dtype": torch.float16}
    module.recompile()
    wanted = module(x, x + 1)
    before = fuser.stats()["launches"]
    got = fuse_graph(module, [x, x + 1])(x, x + 1)
    assert fuser.stats()["launches"] == before + 1
    assert got.dtype == torch.float16
    assert torch.allclose(got, wanted, atol=1e-3)


def test_example_inputs_compile(x: torch.Tensor) -> None:
    own = fuser.jit_fn("template <typename T> T examples(T x) { return x * T(5); }")
    module = build("x", [("a", own, ("x",)), ("b", torch.neg, ("a",))], "b")
    before = fuser.stats()
    fuse_graph(module, [x])
    after = fuser.stats()
    assert after["compiles"] > before["compiles"]
    assert after["launches"] == before["launches"]
    with fuser.config.patch(no_compile=True):
        assert torch.allclose(module(x), -5 * x)


WITH_NUMBERS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "beside tensors": (lambda x, k: (x * k, k * 2 + 1), (torch.arange(6.0).view(2, 3), 3)),
    "as an index": (lambda x, k: x[:, k - 1 :] * 2, (torch.arange(6.0).view(2, 3), 2)),
    "as a size": (lambda k: torch.ones(k * 2) + k, (2,)),
    "as a dimension": (lambda x, k: (x + 1).cumsum(-k), (torch.arange(6.0).view(2, 3), 1)),
    "alone": (lambda k, n: (k + 1) * (n - 2), (2, 3)),
    "of one group in the next": (lambda x, k: torch.cumsum(x * k, 0) + (k + 1) * k, (torch.arange(6.0), 3)),
    "of ATen's": (lambda x, k: (torch.ops.aten.mul.Tensor(x, k), k - 1), (torch.arange(6.0), 3)),
    "instead of tensors": (lambda x, k: (x * 2, k + 1), ([1, 2], 3)),
}


@pytest.mark.filterwarnings("ignore::fuser.errors.FallbackWarning")
@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_what_a_graph_does_to_numbers_stays_pythons(name: str) -> None:
    function, arguments = WITH_NUMBERS[name]
    wanted = function(*arguments)
    fused = fuse_graph(fx.symbolic_trace(function))
    assert fusions(fused)
    for module in (fused, copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        for _ in range(2):
            torch.testing.assert_close(module(*arguments), wanted, rtol=0, atol=0)
    if "beside" in name:
        # It is counted where tensors wait for it, and the same module fuses what it is given instead.
        assert any("numbers" in reason for reason in fuser.stats()["fallbacks"])
        tensors = arguments[0], torch.tensor(3.0)
        assert torch.equal(fused(*tensors)[1], torch.tensor(7.0))


def test_numbers_among_the_example_inputs_leave_the_rest_fused() -> None:
    function, arguments = WITH_NUMBERS["beside tensors"]
    fused = fuse_graph(fx.symbolic_trace(function), arguments)
    before = fuser.stats()
    torch.testing.assert_close(fused(*arguments), function(*arguments), rtol=0, atol=0)
    after = fuser.stats()
    assert (after["compiles"], after["fallbacks"]) == (before["compiles"], before["fallbacks"])
    assert after["launches"] == before["launches"] + 1


@pytest.mark.parametrize("given", [[], [torch.ones(2)] * 3, torch.ones(2)], ids=["too few", "too many", "no list"])
def test_example_inputs_that_do_not_fit(given: Any) -> None:
    with pytest.raises(fuser.errors.ArgumentError, match=r"example_inputs is a list of 2 \(x, k\), got"):
        fuse_graph(fx.symbolic_trace(lambda x, k: x * 2 + k), given)


@pytest.mark.parametrize("given", [None, [torch.ones(2)]], ids=["alone", "with example inputs"])
def test_what_is_no_graph_module_is_named(given: Any) -> None:
    with pytest.raises(fuser.errors.ArgumentError, match=r"GraphModule.* is wanted; got "):
        fuse_graph(lambda x: x * 2, given)  # type: ignore[arg-type]


def test_a_fusion_node_takes_the_inputs_of_its_group(x: torch.Tensor) -> None:
    module = FusionPass()(build("xy", [("a", torch.mul, ("x", "y")), ("b", "relu", ("a",))], "b")).graph_module
    (node,) = fusions(module)
    for inputs in ((), (x,), (x, x, 1.0), (x, 2, 3.0, 4.0)):
        with pytest.raises(fuser.errors.ArgumentError, match=f"^mul, relu: takes 2 inputs, got {len(inputs)}$"):
            node(*inputs)
    assert torch.equal(node(x, x), x * x)


def test_fusion_nodes_keep_stack_traces() -> None:
    steps = [("a", torch.mul, ("x", 2)), ("b", torch.relu, ("a",)), ("c", torch.exp, ("b",)), ("d", "sum", ("c",))]
    module = build("x", steps, ("b", "c", "d"))
    for node in module.graph.nodes:
        node.meta["stack_trace"] = f"line of {node.name}"
    FusionPass(reduces=False)(module)
    kept = [node.meta.get("stack_trace") for node in module.graph.nodes if node.op != "placeholder"]
    assert kept == ["line of exp", "line of relu", "line of exp", "line of sum_1", "line of output"]


def test_convex(x: torch.Tensor) -> None:
    # a -> cumprod -> c and a -> c: a and c cannot be one step.
    steps = [
        ("a", torch.sigmoid, ("x",)),
        ("b", torch.cumprod, ("a", 0)),
        ("c", operator.add, ("a", "b")),
        ("d", operator.mul, ("a", 2.0)),
        ("e", operator.mul, ("c", "d")),
    ]
    module = build("x", steps, "e")
    wanted = module(x)
    fuse_graph(module)
    assert len(fusions(module)) == 2
    assert torch.allclose(module(x), wanted, rtol=1e-5)


def test_node_used_twice_and_dead_nodes(x: torch.Tensor) -> None:
    module = build(
        "x",
        [
            ("a", torch.sigmoid, ("x",)),
            ("dead", torch.exp, ("a",)),
            ("b", operator.mul, ("a", "a")),
        ],
        ("a", "b", "a"),
    )
    one, two, three = fuse_graph(module)(x)
    assert torch.equal(one, three)
    assert torch.allclose(two, torch.sigmoid(x) ** 2)


def test_in_place_method_is_a_barrier(x: torch.Tensor) -> None:
    module = build("x", [("y", operator.mul, ("x", 2)), ("w", "add_", ("x", 1)), ("z", operator.add, ("y", "x"))], "z")
    wanted = x * 2 + (x + 1)
    mine = x.clone()
    assert torch.allclose(fuse_graph(module)(mine), wanted)
    assert torch.equal(mine, x + 1)


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        (operator.iadd, ("x", 1)),
        (torch.Tensor.add_, ("x", 1)),
        (ATEN.add_.Tensor, ("x", 1)),
        (operator.setitem, ("x", slice(None), 5.0)),
        ("fill_", ("x", 5.0)),
        ("__setitem__", ("x", 0, 5.0)),
        (torch.relu_, ("x",)),
        ("zero_", ("x",)),
        ("__iadd__", ("x", 1)),
        (torch.nn.functional.relu_, ("x",)),
        (torch.nn.init.zeros_, ("x",)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_writes_are_barriers(target: Any, arguments: tuple[Any, ...], x: torch.Tensor) -> None:
    steps = [("y", operator.mul, ("x", 2)), ("w", target, arguments), ("z", operator.add, ("y", "x"))]
    with torch.no_grad():
        plain, fused = build("x", steps, "z"), fuse_graph(build("x", steps, "z"))
        assert torch.allclose(fused(x.clone()), plain(x.clone()))


@pytest.mark.parametrize("kwargs", [{"inplace": True}, {"out": "x"}])
def test_writes_by_keyword_are_barriers(kwargs: dict[str, Any], x: torch.Tensor) -> None:
    def make() -> fx.GraphModule:
        graph = fx.Graph()
        place = graph.placeholder("x")
        y = graph.call_function(operator.mul, (place, 2))
        swapped = {name: place if value == "x" else value for name, value in kwargs.items()}
        target = torch.nn.functional.relu if "inplace" in kwargs else torch.exp
        graph.call_function(target, (place,), swapped)
        graph.output(graph.call_function(operator.add, (y, place)))
        return module_of(graph)

    assert torch.allclose(fuse_graph(make())(x.clone()), make()(x.clone()))


def test_a_functor_that_writes_to_out_is_a_barrier(x: torch.Tensor) -> None:
    def make() -> fx.GraphModule:
        graph = fx.Graph()
        place = graph.placeholder("x")
        y = graph.call_function(operator.mul, (place, 2))
        graph.call_function(functor("sigmoid"), (place,), {"out": place})
        graph.output(graph.call_function(operator.add, (y, place)))
        return module_of(graph)

    assert torch.allclose(fuse_graph(make())(x.clone()), 2 * x + torch.sigmoid(x))


def test_in_place_through_a_view(x: torch.Tensor) -> None:
    steps = [
        ("v", operator.getitem, ("x", 0)),
        ("y", operator.mul, ("x", 2)),
        ("w", "add_", ("v", 1)),
        ("z", operator.add, ("y", "x")),
    ]
    assert torch.allclose(fuse_graph(build("x", steps, "z"))(x.clone()), build("x", steps, "z")(x.clone()))


def test_multi_output_nodes(x: torch.Tensor) -> None:
    wave = functor("wave")
    steps = [
        ("p", wave, ("x",)),
        ("s", operator.getitem, ("p", 0)),
        ("c", operator.getitem, ("p", 1)),
        ("t", operator.truediv, ("s", "c")),
    ]
    for output in ("t", ("t", "s"), ("p", "t"), ("c", "p")):
        module = build("x", steps, output)
        wanted = module(x)
        got = fuse_graph(module)(x)
        assert len(fusions(module)) == 1
        flat, wanted_flat = torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(wanted)
        assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(flat, wanted_flat, strict=True))


def test_copies(x: torch.Tensor) -> None:
    module = fuse_graph(build("x", [("a", torch.sigmoid, ("x",)), ("b", operator.add, ("a", 1.5))], "b"))
    wanted = module(x)
    assert torch.equal(copy.deepcopy(module)(x), wanted)
    assert torch.equal(pickle.loads(pickle.dumps(module))(x), wanted)
    saved = io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    assert torch.equal(torch.load(saved, weights_only=False)(x), wanted)
    assert fusions(pickle.loads(pickle.dumps(module)))[0].group == fusions(module)[0].group


def test_graphs_of_make_fx_are_pickled(x: torch.Tensor) -> None:
    module = fuse_graph(make_fx(lambda x: torch.sigmoid(x * 1.5).cumsum(0).relu() + 1)(x))
    for made in (pickle.loads(pickle.dumps(module)), pickle.loads(pickle.dumps(copy.deepcopy(module)))):
        assert torch.equal(made(x), module(x))
        assert [item.group for item in fusions(made)] == [item.group for item in fusions(module)]


def test_graphs_of_functors_and_operators_are_pickled(x: torch.Tensor) -> None:
    # An operator without its overload.
    module = fuse_graph(build("x", [("a", functor("axpy"), ("x", "x")), ("b", ATEN.neg, ("a",))], "b"))
    assert torch.equal(pickle.loads(pickle.dumps(module))(x), module(x))


def test_fuel(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [
        ("a", torch.sigmoid, ("x",)),
        ("b", torch.cumprod, ("a", 0)),
        ("c", torch.tanh, ("b",)),
        ("d", torch.cumprod, ("c", 0)),
        ("e", torch.exp, ("d",)),
    ]
    wanted = build("x", steps, "e")(x)
    for fuel in range(4):
        monkeypatch.setattr(fuser_passes, "process_fuel", fuser_passes.Fuel())
        with fuser.config.patch(fuel=fuel):
            module = fuse_graph(build("x", steps, "e"))
        assert len(fusions(module)) == fuel
        assert torch.allclose(module(x), wanted, rtol=1e-4)
        limited = fuser_passes.FusionPass(fuel=fuel)
        graphs = [limited(build("x", steps, "e")).graph_module for _ in range(2)]
        assert sum(len(fusions(module)) for module in graphs) == fuel
        assert torch.allclose(graphs[1](x), wanted, rtol=1e-4)


def test_scalars_that_are_nodes(x: torch.Tensor) -> None:
    graph = fx.Graph()
    place, number = graph.placeholder("x"), graph.placeholder("k")
    a = graph.call_function(functor("axpy"), (place, place), {"alpha": number})
    graph.output(graph.call_function(operator.mul, (a, number)))
    module = fuse_graph(module_of(graph))
    assert torch.allclose(module(x, 3.0), 12 * x)
    assert torch.allclose(module(x, 2), 6 * x)


# --- any graph: what is replaced computes the same, and nothing more could have been merged -------------------------
UNARY = (torch.sigmoid, torch.tanh, torch.neg, functor("relu"), functor("sigmoid"))
BINARY = (operator.add, operator.mul, torch.maximum, functor("axpy"))
OPAQUE = (torch.clone, torch.fliplr)


@st.composite
def random_graphs(draw_: Any) -> fx.Graph:
    graph = fx.Graph()
    values = [graph.placeholder(name) for name in "xy"]
    for _ in range(draw_(st.integers(2, 14))):
        kind = draw_(st.sampled_from(("unary", "binary", "binary", "opaque", "wave", "write")))
        pick = functools.partial(draw_, st.sampled_from(values[-6:]))
        if kind == "unary":
            values.append(graph.call_function(draw_(st.sampled_from(UNARY)), (pick(),)))
        elif kind == "binary":
            values.append(graph.call_function(draw_(st.sampled_from(BINARY)), (pick(), pick())))
        elif kind == "opaque":
            values.append(graph.call_function(draw_(st.sampled_from(OPAQUE)), (pick(),)))
        elif kind == "wave":
            pair = graph.call_function(functor("wave"), (pick(),))
            values += [graph.call_function(operator.getitem, (pair, place)) for place in (0, 1)]
        else:
            graph.call_method("mul_", (pick(), 0.5))
    graph.output(tuple(draw_(st.lists(st.sampled_from(values), min_size=1, max_size=4))))
    return graph


def reachable(graph: fx.Graph) -> dict[fx.Node, set[fx.Node]]:
    """Return every node's ancestors; a write comes after all before it and before all after it."""
    found: dict[fx.Node, set[fx.Node]] = {}
    barrier: fx.Node | None = None
    seen: list[fx.Node] = []
    for node in graph.nodes:
        sources = [*node.all_input_nodes, *([barrier] if barrier else [])]
        if node.op == "call_method" and node.target == "mul_":
            sources, barrier = list(seen), node
        found[node] = set().union(*({source} | found[source] for source in sources)) if sources else set()
        seen.append(node)
    return found


def groups_of(graph: fx.Graph, module: fx.GraphModule) -> Iterator[set[fx.Node]]:
    by_name = {node.name: node for node in graph.nodes}
    for item in fusions(module):
        yield {by_name[name] for name in item.node_names}


@given(graph=random_graphs())
@settings(max_examples=settings().max_examples * 2)
def test_random_graphs(graph: fx.Graph) -> None:
    plain = fx.GraphModule(torch.nn.Module(), copy.deepcopy(graph))
    original = plain.graph
    fused = fx.GraphModule(torch.nn.Module(), copy.deepcopy(graph))
    FusionPass()(fused)
    fused.graph.lint()
    inputs = [draw((3, 5), torch.float32, seed=1), draw((3, 5), torch.float32, seed=2)]
    wanted, got = plain(*(item.clone() for item in inputs)), fused(*(item.clone() for item in inputs))
    for mine, theirs in zip(got, wanted, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    ancestors = reachable(original)
    groups = list(groups_of(original, fused))
    inside = set().union(*groups) if groups else set()
    # Every node that can fuse did.
    assert {node for node in original.nodes if is_fusible(node, bind_node(node))} <= inside
    for group in groups:
        assert is_convex(group, ancestors), "a path leaves the group and comes back"
    for index, one in enumerate(groups):
        for other in groups[:index]:
            connected = any(source in other for node in one for source in node.all_input_nodes)
            connected |= any(source in one for node in other for source in node.all_input_nodes)
            union = one | other
            if connected:
                legal = is_convex(union, ancestors) and is_ordered(union, groups, ancestors)
                assert not legal, f"{one} and {other} could be one group"


def is_convex(group: set[fx.Node], ancestors: dict[fx.Node, set[fx.Node]]) -> bool:
    return not any(
        ancestors[outside] & group and any(outside in ancestors[member] for member in group)
        for outside in ancestors
        if outside not in group
    )


def is_ordered(union: set[fx.Node], groups: list[set[fx.Node]], ancestors: dict[fx.Node, set[fx.Node]]) -> bool:
    """Whether the graph with these groups as single nodes has no cycle."""
    units: dict[fx.Node, int] = dict.fromkeys(union, 0)
    for number, group in enumerate(groups, 1):
        for node in group:
            units.setdefault(node, number)
    for number, node in enumerate(ancestors, len(groups) + 1):
        units.setdefault(node, number)
    before: dict[int, set[int]] = {}
    for node, sources in ancestors.items():
        before.setdefault(units[node], set()).update(units[source] for source in sources)
    state: dict[int, int] = {}

    def has_cycle(unit: int) -> bool:
        if state.get(unit) == 1:
            return True
        if state.get(unit) == 2:
            return False
        state[unit] = 1
        if any(has_cycle(source) for source in before[unit] if source != unit):
            return True
        state[unit] = 2
        return False

    return not any(has_cycle(unit) for unit in before)


IN_PLACE: list[tuple[Any, tuple[Any, ...]]] = [
    (F.relu, (True,)),
    (F.hardtanh, (-0.5, 0.5, True)),
    (F.elu, (1.0, True)),
    (F.leaky_relu, (0.1, True)),
    (torch.Tensor.__iadd__, (1,)),
    (torch.Tensor.mul_, (3,)),
]


@pytest.mark.parametrize(("target", "arguments"), IN_PLACE, ids=lambda item: getattr(item, "__name__", ""))
def test_nothing_moves_across_a_write_asked_for_by_position(target: Any, arguments: tuple[Any, ...]) -> None:
    def make() -> fx.GraphModule:
        graph = fx.Graph()
        x = graph.placeholder("x")
        product = graph.call_function(torch.mul, (x, 1.0))
        before = graph.call_function(torch.sigmoid, (product,))
        graph.call_function(target, (product, *arguments))
        after = graph.call_function(torch.tanh, (product,))
        graph.output((before, after, product))
        return fx.GraphModule(torch.nn.Module(), graph)

    x = draw((64,), torch.float32, seed=1)
    for got, wanted in zip(fuser.fx.fuse_graph(make())(x), make()(x), strict=True):
        torch.testing.assert_close(got, wanted)
