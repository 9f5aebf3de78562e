"""Which nodes become one group: what keeps nodes apart, what does not, and how much work it is to find out."""

from __future__ import annotations

import json
import operator
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fuser
from benchmarks import partition as benchmark
from benchmarks.partition import GRAPHS
from fuser.fx import fuse_graph, nodes, partition
from fuser.kernel_spec import MAX_INPUTS, MAX_OUTPUTS
from fuser.ops import bind_for
from fuser.tensor_desc import describe

COPY = "template <typename T> T {name}(T x) {{ return x; }}"
PAIR = "template <typename T> void pair(T x, T& a, T& b) { a = x; b = -x; }"


def groups_of(graph: fx.Graph) -> list[set[str]]:
    graph.lint()
    fx.GraphModule(torch.nn.Module(), graph)
    return [{node.name for node in found.nodes} for found in partition.partition(graph)]


def note(node: fx.Node, *shape: int, device: str = "cpu") -> fx.Node:
    with FakeTensorMode():
        node.meta["val"] = torch.empty(shape, device=device)
    return node


# --- the rules -------------------------------------------------------------------------------------------------------
def test_a_path_outside_keeps_apart() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.tanh, (x,))
    outside = graph.call_function(torch.fliplr, (first,))
    graph.output(graph.call_function(torch.add, (first, outside)))
    assert groups_of(graph) == [{"tanh"}, {"add"}]


def test_a_path_through_another_group_keeps_apart() -> None:
    # tanh -> neg -> flip -> add, and exp -> flip_1 -> neg_1: once neg_1 is with neg, exp comes before add.
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    start = note(graph.call_function(torch.exp, (x,)), 2)
    between = note(graph.call_function(torch.fliplr, (start,)), 2)
    enters = note(graph.call_function(torch.neg, (between,)), 2)
    leaves = note(graph.call_function(torch.tanh, (y,)), 2)
    joined = note(graph.call_function(torch.mul, (enters, leaves)), 2)
    behind = note(graph.call_function(torch.fliplr, (leaves,)), 2)
    end = note(graph.call_function(torch.sigmoid, (behind,)), 2)
    last = note(graph.call_function(torch.add, (start, end)), 2)
    graph.output((joined, last))
    # Edges alone would let exp join sigmoid and add: no path leads from exp to sigmoid.
    assert groups_of(graph) == [{"exp"}, {"neg", "tanh", "mul"}, {"sigmoid", "add"}]


WRITES: list[Callable[[fx.Graph, fx.Node], Any]] = [
    lambda graph, x: graph.call_method("mul_", (x, 2)),
    lambda graph, x: graph.call_function(operator.iadd, (x, 2)),
    lambda graph, x: graph.call_function(torch.add, (x, 2), {"out": x}),
    lambda graph, x: graph.call_function(torch.ops.aten.add_.Tensor, (x, 2)),
    lambda graph, x: graph.call_function(test_a_path_outside_keeps_apart, (x,)),
]
# What says how torch computes from there on, as Dynamo writes it.
MODES: list[Callable[[fx.Graph, fx.Node], Any]] = [
    lambda graph, _: graph.call_function(torch._C._set_grad_enabled, (False,)),
    lambda graph, _: graph.call_function(
        torch.amp._exit_autocast, (graph.call_function(torch.amp._enter_autocast, ("cpu", torch.bfloat16, True, True)),)
    ),
    lambda graph, _: graph.call_function(torch._functorch.predispatch._vmap_decrement_nesting, ()),
    lambda graph, _: graph.call_function(torch.manual_seed, (0,)),
    lambda graph, _: graph.call_function(torch.ops.profiler._record_function_enter_new, ("part",)),
]


@pytest.mark.parametrize("write", WRITES + MODES)
def test_nothing_crosses_a_write_or_a_change_of_mode(write: Callable[[fx.Graph, fx.Node], Any]) -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    before = graph.call_function(torch.tanh, (x,))
    write(graph, y)
    graph.output(graph.call_function(torch.neg, (before,)))
    assert groups_of(graph) == [{"tanh"}, {"neg"}]


def test_a_conversion_that_may_be_its_argument_stays_where_that_is_written_to() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    alias = graph.call_method("to", (x, torch.float32))
    graph.call_method("mul_", (x, 2))
    graph.output(graph.call_function(torch.neg, (alias,)))
    assert groups_of(graph) == [{"neg"}]


def test_random_nodes_keep_their_order() -> None:
    # dropout reads a, and comes before dropout_1, which b reads: a and b cannot be one step.
    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(torch.tanh, (x,))
    graph.call_function(torch.nn.functional.dropout, (a,))
    other = graph.call_function(torch.nn.functional.dropout, (x,))
    graph.output((a, graph.call_function(torch.add, (x, other))))
    assert groups_of(graph) == [{"tanh"}, {"add"}]


@pytest.mark.parametrize("name", ["scale_", "normalize", "batch_norm"])
def test_the_name_of_a_functor_says_nothing(name: str) -> None:
    functor = fuser.jit_fn(COPY.format(name=name))
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    before = graph.call_function(torch.tanh, (x,))
    dropped = graph.call_function(torch.nn.functional.dropout, (before,))
    between = graph.call_function(functor, (y,))
    graph.output((dropped, graph.call_function(torch.add, (before, between))))
    assert groups_of(graph) == [{"tanh", str(between), "add"}]


@pytest.mark.parametrize(("shape", "device"), [((3, 4), "cpu"), ((4,), "meta")], ids=["shape", "device"])
def test_readers_of_one_value_are_one_group_where_shape_and_device_are_one(shape: tuple[int, ...], device: str) -> None:
    def build(*shape: int, device: str = "cpu") -> fx.Graph:
        graph = fx.Graph()
        x = note(graph.placeholder("x"), 4)
        one = note(graph.call_function(torch.tanh, (x,)), 4)
        graph.output((one, note(graph.call_function(torch.neg, (x,)), *shape, device=device)))
        return graph

    assert groups_of(build(4)) == [{"tanh", "neg"}]
    assert groups_of(build(*shape, device=device)) == [{"tanh"}, {"neg"}]


def test_a_chain_may_change_its_shape_and_not_its_device() -> None:
    for device, count in ("cpu", 1), ("meta", 2):
        graph = fx.Graph()
        x = note(graph.placeholder("x"), 4)
        one = note(graph.call_function(torch.tanh, (x,)), 4)
        graph.output(note(graph.call_function(torch.add, (one, x)), 3, 4, device=device))
        assert len(groups_of(graph)) == count


def test_of_several_copies_one_is_made() -> None:
    graph = fx.Graph()
    parts = [note(graph.placeholder(name), 2, 3, 4) for name in "xy"]
    alone = note(graph.call_function(torch.ops.aten.clone.default, (parts[0],)), 2, 3, 4)
    stacked = note(graph.call_function(torch.ops.aten.stack.default, (parts,)), 2, 2, 3, 4)
    turned = note(graph.call_function(torch.ops.aten.permute.default, (stacked, [1, 2, 0, 3])), 2, 3, 2, 4)
    dense = graph.call_function(torch.ops.aten.clone.default, (turned,), {"memory_format": torch.contiguous_format})
    graph.output((alone, note(dense, 2, 3, 2, 4)))
    assert groups_of(graph) == [{stacked.name, turned.name, dense.name}]


def test_small_tensors_that_no_group_reads_share_a_launch() -> None:
    graph = fx.Graph()
    counters = [note(graph.placeholder(f"count{slot}")) for slot in range(MAX_OUTPUTS + 4)]
    more, product = [], note(graph.placeholder("x"), 4, 4)
    for counter in counters:
        more.append(note(graph.call_function(torch.ops.aten.add.Tensor, (counter, 1))))
        for _ in range(20):
            product = note(graph.call_function(torch.ops.aten.mm.default, (product, product)), 4, 4)
        product = note(graph.call_function(torch.ops.aten.relu.default, (product,)), 4, 4)
    large = [note(graph.placeholder(f"large{slot}"), 300, 300) for slot in range(2)]
    doubled = [note(graph.call_function(torch.ops.aten.mul.Tensor, (x, 2)), 300, 300) for x in large]
    graph.output((*more, *doubled, product))
    groups = groups_of(graph)
    assert sorted(map(len, groups)) == [*[1] * len(counters), 1, 1, 4, MAX_OUTPUTS]


def test_small_groups_of_one_shape_share_a_launch_where_no_path_leads_from_one_to_the_other() -> None:
    graph = fx.Graph()
    inputs = [note(graph.placeholder(f"x{slot}"), 64, 32) for slot in range(4)]
    chains = [graph.call_function(torch.relu, (note(graph.call_function(torch.neg, (x,)), 64, 32),)) for x in inputs]
    for node in chains:
        note(node, 64, 32)
    # A product is between the third and the fourth.
    product = note(graph.call_function(torch.mm, (chains[2], inputs[3])), 64, 32)
    after = note(graph.call_function(torch.add, (product, chains[3])), 64, 32)
    other = note(graph.call_function(torch.neg, (note(graph.placeholder("y"), 64, 31),)), 64, 31)
    graph.output((chains[0], chains[1], after, other))
    groups = groups_of(graph)
    first = {item.name for node in chains[:3] for item in (node, *node.all_input_nodes)} - {"x0", "x1", "x2"}
    assert groups == [first, {chains[3].name, chains[3].args[0].name, after.name}, {other.name}]


@pytest.mark.parametrize(
    ("target", "arguments", "shape", "gains"),
    [
        ("sum.dim_IntList", ([0],), (64,), "strict fast"),
        ("mean.dim", ([0],), (64,), "fast"),
        ("sum.dim_IntList", ([1],), (1 << 15,), "strict fast"),
        ("clone.default", (), (1 << 15, 64), ""),
        ("constant_pad_nd.default", ([0, 7], 0.0), (1 << 15, 71), "strict fast"),
    ],
)
@pytest.mark.parametrize("numerics", ["strict", "fast"])
def test_what_a_gpu_does_better_alone(
    target: str, arguments: tuple[Any, ...], shape: tuple[int, ...], gains: str, numerics: str
) -> None:
    name, _, overload = target.partition(".")
    graph = fx.Graph()
    x = note(graph.placeholder("x"), 1 << 15, 64, device="cuda")
    made = graph.call_function(getattr(getattr(torch.ops.aten, name), overload), (x, *arguments))
    graph.output(note(made, *shape, device="cuda"))
    with bind_for(numerics):
        assert len(groups_of(graph)) == (numerics in gains.split())


@pytest.mark.parametrize(
    ("rows", "width", "gains"), [(1 << 11, 512, True), (1 << 10, 1024, False), (1 << 11, 256, False)]
)
def test_sums_along_many_rows_of_large_tensors_are_kernels(rows: int, width: int, gains: bool) -> None:
    graph = fx.Graph()
    x = note(graph.placeholder("x"), rows, width, device="cuda")
    graph.output(note(graph.call_function(torch.ops.aten.sum.dim_IntList, (x, [0])), width, device="cuda"))
    with bind_for("strict"):
        assert len(groups_of(graph)) == gains


def test_short_rows_are_what_the_first_call_has() -> None:
    # A trace serves any sizes: which kernel gains nothing by itself is seen in those that it is made for.
    with torch._subclasses.FakeTensorMode():
        shapes = (1 << 18, 8), (1 << 15, 128), (1 << 13, 128), (1 << 10, 8), (1 << 9, 1 << 13)
        for shape, count in zip(shapes, (1, 1, 0, 0, 0), strict=True):
            fused = fuser.fuse(lambda x: x.sum(-1))
            assert fused(torch.empty(shape, device="cuda")).shape == shape[:1]
            assert len(fused.groups) == count


def test_copies_to_another_layout_are_groups_on_a_gpu_and_stay_apart_from_reductions() -> None:
    graph = fx.Graph()
    x = note(graph.placeholder("x"), 64, 32, device="cuda")
    turned = note(graph.call_function(torch.ops.aten.t.default, (x,)), 32, 64, device="cuda")
    turned.meta["val"] = x.meta["val"].t()
    copy = graph.call_function(torch.ops.aten.clone.default, (turned,), {"memory_format": torch.contiguous_format})
    total = graph.call_function(torch.ops.aten.amax.default, (note(copy, 32, 64, device="cuda"), [1]))
    half = graph.call_function(torch.ops.aten.mul.Tensor, (note(total, 32, device="cuda"), 0.5))
    graph.output((copy, note(half, 32, device="cuda")))
    assert groups_of(graph) == [{copy.name}, {total.name, half.name}]


def test_copies_that_keep_their_rows_join_reductions() -> None:
    graph = fx.Graph()
    x = note(graph.placeholder("x"), 4, 8, 16, device="cuda")
    x.meta["val"] = x.meta["val"].transpose(0, 1)
    total = note(graph.call_function(torch.ops.aten.amax.default, (x, [2], True)), 8, 4, 1, device="cuda")
    less = graph.call_function(torch.ops.aten.sub.Tensor, (x, total))
    less.meta["val"] = x.meta["val"]
    copy = graph.call_function(torch.ops.aten.clone.default, (less,), {"memory_format": torch.contiguous_format})
    graph.output(note(copy, 8, 4, 16, device="cuda"))
    assert groups_of(graph) == [{"amax_default", "sub_tensor", "clone_default"}]


@pytest.mark.parametrize("is_before", [True, False])
def test_borders_lie_where_the_fewest_bytes_cross(*, is_before: bool) -> None:
    def rotate(x: torch.Tensor) -> torch.Tensor:
        return x * 0.5 + torch.cat([-x[:, 4:], x[:, :4]], 1)

    def normalise(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt((wide * wide).sum(1, keepdim=True))).to(x.dtype)

    def both(x: torch.Tensor) -> torch.Tensor:
        return normalise(rotate(x + 1)) if is_before else rotate(normalise(x + 1))

    traced = make_fx(both, tracing_mode="fake")(torch.ones(4, 8, dtype=torch.bfloat16))
    with bind_for("fast"):
        first, second = (found.nodes for found in partition.partition(traced.graph))
    crossing = {node for later in second for node in later.all_input_nodes if node in first}
    assert [node.meta["val"].dtype for node in crossing] == [torch.bfloat16]


def test_items_are_with_their_functor() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    items = graph.call_function(fuser.jit_fn(PAIR, num_outputs=2), (x,))
    found = [graph.call_function(operator.getitem, (items, place)) for place in (0, 1)]
    flipped = graph.call_function(torch.fliplr, (found[0],))
    graph.output(graph.call_function(torch.add, (found[1], flipped)))
    assert groups_of(graph) == [{str(items), *map(str, found)}, {"add"}]


def test_groups_end_at_the_limits_of_a_launch() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(tuple(graph.call_function(torch.mul, (x, float(number))) for number in range(3 * MAX_OUTPUTS)))
    assert [len(group) for group in groups_of(graph)] == [MAX_OUTPUTS] * 3
    graph = fx.Graph()
    total, *others = [graph.placeholder(f"x{number}") for number in range(2 * MAX_INPUTS - 1)]
    for other in others:
        total = graph.call_function(torch.add, (total, other))
    graph.output(total)
    # The second group reads the sum so far as well.
    assert [len(group) for group in groups_of(graph)] == [MAX_INPUTS - 1] * 2
    graph = fx.Graph()
    x = graph.placeholder("x")
    for _ in range(2 * partition.MAX_APPLICATIONS):
        x = graph.call_function(torch.tanh, (x,))
    graph.output(x)
    assert [len(group) for group in groups_of(graph)] == [partition.MAX_APPLICATIONS] * 2


def test_a_long_stretch_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "MAX_STRETCH", 5)
    graph = build_chain(9, is_known=False).graph
    items = graph.call_function(fuser.jit_fn(PAIR, num_outputs=2), (next(iter(graph.nodes)),))
    assert [len(group) for group in groups_of(graph)] == [4, 5, 1], "the placeholder is in the first stretch"
    assert not items.users


def test_what_takes_long_to_find_out_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> fx.Graph:
        graph = fx.Graph()
        x = graph.placeholder("x")
        one, two = graph.call_function(torch.tanh, (x,)), graph.call_function(torch.neg, (x,))
        graph.output((graph.call_function(torch.exp, (one,)), two))
        return graph

    assert groups_of(build()) == [{"tanh", "neg", "exp"}]
    with monkeypatch.context() as patch:
        patch.setattr(partition, "MAX_TRIES", 0)
        assert groups_of(build()) == [{"tanh", "exp"}, {"neg"}], "producers are always tried"
    monkeypatch.setattr(partition, "MAX_STEPS", 0)
    assert groups_of(build()) == [{"tanh"}, {"neg"}, {"exp"}]


# --- the work --------------------------------------------------------------------------------------------------------
def build_chain(count: int, *, is_known: bool, write_every: int = 0) -> fx.GraphModule:
    graph = fx.Graph()
    last = x = graph.placeholder("x")
    for number in range(count):
        if write_every and number % write_every == write_every - 1:
            last = graph.call_method("add_", (last, x))
        elif number % 2:
            last = graph.call_function(torch.add, (last, x))
        else:
            last = graph.call_function(torch.tanh, (last,))
    return finish(graph, last, is_known=is_known)


def build_fan(count: int, *, is_known: bool) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    made = [graph.call_function(torch.mul, (x, float(number))) for number in range(count)]
    return finish(graph, tuple(made), is_known=is_known)


def build_writes(count: int, *, is_known: bool) -> fx.GraphModule:
    return build_chain(count, is_known=is_known, write_every=10)


def build_layers(count: int, *, is_known: bool) -> fx.GraphModule:
    """Layers that read a shared table and the stream, each with a part that does not fuse, and a way back like it."""
    graph = fx.Graph()
    last, table = graph.placeholder("x"), graph.placeholder("table")
    kept = []
    for _ in range(count // 12):
        turned = graph.call_function(torch.mul, (last, table))
        mixed = graph.call_function(torch.matmul, (turned, table))
        gate = graph.call_function(torch.sigmoid, (mixed,))
        last = graph.call_function(torch.add, (last, graph.call_function(torch.mul, (mixed, gate))))
        kept.append((turned, mixed, gate))
    for turned, mixed, gate in reversed(kept):
        down = graph.call_function(torch.mul, (last, graph.call_function(torch.mul, (mixed, gate))))
        up = graph.call_function(torch.matmul, (down, table))
        last = graph.call_function(torch.add, (last, graph.call_function(torch.mul, (up, turned))))
    return finish(graph, last, is_known=is_known)


def build_towers(count: int, *, is_known: bool) -> fx.GraphModule:
    """Two chains side by side, with parts that do not fuse."""
    graph = fx.Graph()
    left = right = x = graph.placeholder("x")
    for number in range(count // 2):
        function = torch.fliplr if number % 5 == 4 else torch.tanh
        left, right = graph.call_function(function, (left,)), graph.call_function(torch.add, (right, x))
    return finish(graph, (left, right), is_known=is_known)


def finish(graph: fx.Graph, result: Any, *, is_known: bool) -> fx.GraphModule:
    if is_known:
        with FakeTensorMode():
            value = torch.empty(4, 4)
        for node in graph.nodes:
            node.meta["val"] = value
    graph.output(result)
    return fx.GraphModule(torch.nn.Module(), graph)


def count_work(module: fx.GraphModule) -> Counter[str]:
    """Return how often a node was bound, and how often two units, or a group between two, were looked at."""
    counts: Counter[str] = Counter()

    def watch(patch: pytest.MonkeyPatch, home: Any, name: str) -> None:
        inner = getattr(home, name)

        def counted(*args: Any) -> Any:
            counts[name] += 1
            return inner(*args)

        patch.setattr(home, name, counted)

    with pytest.MonkeyPatch.context() as patch:
        watch(patch, nodes, "bind_node")
        for name in ("_try_merge", "_find_likely", "_unit_at"):
            watch(patch, partition._Stretch, name)
        fuse_graph(module)
    return counts


@pytest.mark.one_in(2)
@pytest.mark.parametrize("is_known", [True, False], ids=["shapes are known", "shapes are not known"])
@pytest.mark.parametrize("build", [build_chain, build_fan, build_writes, build_layers, build_towers])
def test_the_work_is_in_proportion_to_the_graph(build: Callable[..., fx.GraphModule], is_known: bool) -> None:
    small, large = build(960, is_known=is_known), build(1920, is_known=is_known)
    sizes = len(small.graph.nodes), len(large.graph.nodes)
    before, after = count_work(small), count_work(large)
    assert (before["bind_node"], after["bind_node"]) == sizes, "each node is bound once"
    for name in ("_try_merge", "_find_likely"):
        assert after[name] <= 2.2 * before[name] + 8, name
        assert after[name] <= 3 * sizes[1], name
    assert after["_unit_at"] <= 24 * sizes[1]


def build_tangle(count: int, *, is_known: bool) -> fx.GraphModule:
    """Nodes that read any two of the nodes before them, or one and do not fuse: most groups are in each other's way."""
    graph, draws = fx.Graph(), random.Random(0)
    made = [graph.placeholder("x"), graph.placeholder("y")]
    for _ in range(count):
        first, second = draws.choice(made), draws.choice(made)
        is_apart = draws.random() < 0.1
        made.append(graph.call_function(*((torch.fliplr, (first,)) if is_apart else (torch.add, (first, second)))))
    return finish(graph, tuple(node for node in made if not node.users), is_known=is_known)


def test_the_work_on_a_tangle_is_in_proportion_to_it() -> None:
    before, after = (count_work(build_tangle(count, is_known=False)) for count in (3000, 6000))
    for name in ("_try_merge", "_find_likely", "_unit_at"):
        assert after[name] <= 2.2 * before[name], name


def test_only_what_reads_a_number_is_bound_twice() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    size = graph.call_method("size", (x, 0))
    scaled = graph.call_function(torch.mul, (x, size))
    graph.output(graph.call_function(torch.tanh, (scaled,)))
    module = fx.GraphModule(torch.nn.Module(), graph)
    count = len(graph.nodes)
    assert count_work(module)["bind_node"] == count + 1


@pytest.mark.slow
def test_a_quick_run_of_the_benchmark_writes_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {name: (make, (max(sizes[0] // 4, 10),)) for name, (make, sizes) in GRAPHS.items()}
    monkeypatch.setattr(benchmark, "GRAPHS", small)
    out = tmp_path / "result.json"
    benchmark.main(["--quick", "--runs", "1", "--no-plot", "--out", str(out)])
    document = json.loads(out.read_text())
    assert set(document) == {"schema", "environment", "settings", "records"}
    assert {record["graph"] for record in document["records"]} == set(GRAPHS)
    for record in document["records"]:
        assert record["nodes"] > 0
        assert 0 < record["cpu_s"] == round(min(record["samples_s"]["cpu_s"]), 4)


@pytest.mark.parametrize(
    ("op", "dtype", "gains"),
    [
        ("sum", torch.bfloat16, True), ("sum", torch.float32, False), ("amin", torch.half, True),
        ("sum", torch.bool, True), ("any", torch.bool, True), ("any", torch.uint8, False), ("amax", torch.int8, True),
        ("sum", torch.int32, True), ("sum", torch.int64, False), ("count_nonzero", torch.int64, True),
    ],
)  # fmt: skip
def test_lone_reductions_join_where_a_gpu_is_faster_with_them(op: str, dtype: torch.dtype, *, gains: bool) -> None:
    for shape, is_large in (((4096, 4096), True), ((64, 64), False)):
        graph = fx.Graph()
        x = graph.placeholder("x")
        desc = describe(torch.empty(shape, dtype=dtype, device="meta"))
        x.meta["first"] = desc._replace(device=torch.device("cuda"))
        graph.output(graph.call_function(getattr(torch, op), (x, -1)))
        fx.GraphModule(torch.nn.Module(), graph)
        assert len(partition.partition(graph, device_type="cuda")) == (gains and is_large)
