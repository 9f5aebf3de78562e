"""Large results take the place of what a kernel reads last: only where nothing else sees that memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fuser.fx import reuse
from fuser.fx.backend import compile_graph

Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "LARGE_BYTES", 0)


def compiled(function: Function, *inputs: Tensor, numerics: str = "strict") -> tuple[Any, list[fx.Node]]:
    """Return what runs a function's graph, and the calls in it that write over what they read."""
    graph_module = make_fx(function, tracing_mode="fake")(*inputs)
    run = compile_graph(graph_module, numerics)
    nodes = graph_module.graph.nodes
    told = [node for node in nodes if node.op == "call_module" and "out" in node.kwargs]
    return run, told


def check(function: Function, *inputs: Tensor, count: int) -> None:
    """Compare with eager torch, twice, and count the calls that write over what they read."""
    run, told = compiled(function, *inputs)
    assert len(told) == count
    wanted = torch.utils._pytree.tree_leaves(function(*inputs))
    before = [item.clone() for item in inputs]
    for _ in range(2):
        for got, other in zip(run([*inputs]), wanted, strict=True):
            torch.testing.assert_close(got, other, rtol=0, atol=0)
            assert got.stride() == other.stride()
    assert all(map(torch.equal, inputs, before))


X, Y = torch.randn(40, 64), torch.randn(64, 64)
COLLECTIVES = torch.ops._c10d_functional


@pytest.mark.cpu
@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: ((x @ y).neg() * 2,),
        lambda x, y: ((x.abs() @ y).relu() + x, x * 3),
        # One after another, all in the same memory.
        lambda x, y: (((x @ y).relu().add(1) @ y).relu() * 2,),
    ],
)
def test_the_last_reader_writes_where_it_read(function: Function) -> None:
    run, told = compiled(function, X, Y)
    assert told
    assert all(torch.equal(*pair) for pair in zip(run([X, Y]), function(X, Y), strict=True))


def test_what_another_stream_may_read_stays() -> None:
    graph_module = make_fx(lambda x, y: ((x @ y).neg() * 2,), tracing_mode="fake")(X, Y)
    with graph_module.graph.inserting_before(graph_module.graph.output_node()):
        # A change of streams is such a call, too, where there is more than one.
        graph_module.graph.call_function(torch.ops.profiler._record_function_enter_new.default, ("part",))
    compile_graph(graph_module, "strict")
    assert not any("out" in node.kwargs for node in graph_module.graph.nodes)


def gathered_late(x: Tensor) -> tuple[Tensor, Tensor]:
    own = x.neg()
    pending = COLLECTIVES.all_gather_into_tensor(own, 1, "0")
    other = (own + own.cumprod(0)).abs()
    return COLLECTIVES.wait_tensor(pending), other


def gathered_at_once(x: Tensor) -> tuple[Tensor, Tensor]:
    own = x.neg()
    gathered = COLLECTIVES.wait_tensor(COLLECTIVES.all_gather_into_tensor(own, 1, "0"))
    return gathered, (own + own.cumprod(0)).abs()


def updated_meanwhile(x: Tensor) -> Tensor:
    pending = COLLECTIVES.all_gather_into_tensor(x, 1, "0")
    updated = x * 2
    gathered: Tensor = COLLECTIVES.wait_tensor(pending).cumprod(0)
    x.copy_(updated)
    return gathered


def updated_afterwards(x: Tensor) -> Tensor:
    gathered: Tensor = COLLECTIVES.wait_tensor(COLLECTIVES.all_gather_into_tensor(x, 1, "0")).cumprod(0)
    x.copy_(x * 2)
    return gathered


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("function", "written"),
    [
        (gathered_late, ["cumprod"]),
        (gathered_at_once, ["fusion_0"]),
        (updated_meanwhile, []),
        (updated_afterwards, ["x_1"]),
    ],
)
def test_what_a_collective_was_given_is_not_written_before_somebody_waits(
    function: Function, written: list[str]
) -> None:
    _, told = compiled(function, X)
    assert [str(node.kwargs["out"]) for node in told] == written


@pytest.mark.cpu
@pytest.mark.parametrize("is_waited_for", [True, False])
def test_what_a_collective_was_given_is_scattered_to_when_somebody_has_waited(*, is_waited_for: bool) -> None:
    def function(x: Tensor) -> Tensor:
        gathered = COLLECTIVES.all_gather_into_tensor(x, 1, "0")
        gathered = COLLECTIVES.wait_tensor(gathered) if is_waited_for else gathered
        filled = x.index_fill(0, torch.arange(2), 1.0)
        gathered = gathered if is_waited_for else COLLECTIVES.wait_tensor(gathered)
        x.copy_(filled)
        return gathered

    graph_module = make_fx(function, tracing_mode="fake")(X)
    compile_graph(graph_module, "strict")
    targets = [node.target for node in graph_module.graph.nodes]
    assert (torch.ops.aten.index_fill_.int_Scalar in targets) == is_waited_for


@pytest.mark.cpu
def test_what_is_written_is_the_memory_that_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    class Note(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.mm.default:
                made.append(found.data_ptr())
            return found

    for least, is_same in ((0, True), (1 << 30, False)):
        monkeypatch.setattr(reuse, "LARGE_BYTES", least)
        run, _ = compiled(lambda x, y: ((x @ y).neg() * 2,), X, Y)
        made.clear()
        with Note():
            (result,) = run([X, Y])
        assert (made == [result.data_ptr()]) == is_same


@pytest.mark.cpu
def test_of_several_results_the_others_have_memory_of_their_own() -> None:
    check(lambda x, y: ((z := x @ y).neg(), z.abs() + x), X, Y, count=1)
    check(lambda x, y: ((z := x @ y).neg() + (w := y[:40] @ y), z * w), X, Y, count=1)


@pytest.mark.cpu
def test_what_goes_wrong_where_it_is_asked_is_left_to_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    # A function of nobody's text: others' frames in a traceback are a signal handler's.
    monkeypatch.setattr(reuse, "find_in_place", max)
    check(gate_halves, X, Y, count=0)


def gate_halves(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    z = x @ y
    return (torch.cat([z[:, :32] * 2, z[:, 32:].relu()], 1),)


def write_a_column(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    z = (x @ y) * 2
    z[:, 3] = 1.5
    z[2:5] *= y[:3]
    return (z,)


def turn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    # A thread reads both halves before it writes them.
    z = x @ y
    return (torch.cat([z[:, 32:] * 2, z[:, :32].relu()], 1),)


def gate_halves_twice(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    # Whoever writes an element of the one result reads it for the other one, too.
    z = x @ y
    return torch.cat([z[:, :32] * 2, z[:, 32:].relu()], 1), torch.cat([z[:, 32:] + 1, z[:, :32] - 1], 1)


def shift(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    z = x @ y
    return (torch.cat([z[:, 1:] * 2, z[:, :1].relu()], 1),)


def overlap(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    z = x @ y
    return (torch.cat([z[:, :5], z[:, 5:24] + z[:, 16:35], z[:, 24:] * 2], 1),)


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("function", "count"),
    [(gate_halves, 1), (write_a_column, 1), (turn, 1), (gate_halves_twice, 1), (shift, 0), (overlap, 0)],
)
def test_parts_are_written_over_what_they_alone_read(function: Function, count: int) -> None:
    check(function, X, Y, count=count)


@pytest.mark.cpu
def test_what_others_see_is_not_written_to() -> None:
    def read_later(x: Tensor, y: Tensor) -> Any:
        z = x @ y
        return z.neg() * 2, z @ y

    def returned(x: Tensor, y: Tensor) -> Any:
        z = x @ y
        return z, z.neg() * 2

    def seen_elsewhere(x: Tensor, y: Tensor) -> Any:
        z = x @ y
        return z.t(), z.neg() * 2

    def given(x: Tensor, y: Tensor) -> Any:
        return (x.neg() * y[:40],)

    def split(x: Tensor, y: Tensor) -> Any:
        # Views, whatever their names say.
        z = x @ y
        return torch.unsafe_chunk(z, 2)[1], torch.unsafe_split_with_sizes(z, [8, 32])[0], z.neg() * 2

    for function in (read_later, returned, seen_elsewhere, given, split):
        check(function, X, Y, count=0)


@pytest.mark.cpu
def test_what_lies_in_another_way_is_not_written_to() -> None:
    for function in (
        lambda x, y: ((x @ y).double().neg(),),
        # Broadcast, transposed, part of a larger one.
        lambda x, y: ((x @ y)[:1].neg() + x,),
        lambda x, y: ((x @ y).t().neg() + y[:, :40].contiguous(),),
        lambda x, y: ((x @ y)[:, :32].neg() * 2,),
        lambda x, y: ((x @ y).view(-1).neg() * 2,),
    ):
        run, told = compiled(function, X, Y)
        for node in told:
            out = node.kwargs["out"]
            assert isinstance(out, fx.Node), "one result"
            value = out.meta["val"]
            assert (value.dtype, value.shape, value.stride()) == (
                node.meta["val"].dtype,
                node.meta["val"].shape,
                node.meta["val"].stride(),
            )
        assert all(torch.equal(*pair) for pair in zip(run([X, Y]), function(X, Y), strict=True))
    check(lambda x, y: ((seen := (x @ y).view(64, 40)) @ x, seen.neg() * 2), X, Y, count=0)
    check(lambda x, y: (x * (x @ y),), Y.t(), Y, count=0)


@pytest.mark.cpu
def test_rows_are_read_again_and_have_memory_of_their_own() -> None:
    check(lambda x, y: ((z := x @ y) - z.amax(1, keepdim=True),), X, Y, count=0)
    _, told = compiled(lambda x, y: (torch.softmax((x @ y) * 2, 1),), X, Y, numerics="fast")
    assert not told


@pytest.mark.cpu
def test_small_results_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "LARGE_BYTES", 1 << 24)
    check(lambda x, y: ((x @ y).neg() * 2,), X, Y, count=0)


@pytest.mark.cpu
def test_a_compiled_function_takes_less_memory(monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> None:
    peaks = list[int]()
    for least in (0, 1 << 40):
        monkeypatch.setattr(reuse, "LARGE_BYTES", least)
        torch._dynamo.reset()
        run = torch.compile(lambda x, y: (x @ y).neg() * 2, backend="fuser", fullgraph=True)
        with torch._functorch.config.patch(enable_autograd_cache=False):
            run(X, Y)
        with torch.profiler.profile(profile_memory=True) as profiler:
            run(X, Y)
        events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
        peaks.append(max(itertools.accumulate(sizes)))
    assert peaks[1] - peaks[0] == X.nbytes
