"""``fuser.foreach``: every position is what an ordinary call makes of it, in a few launches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import fuser
from fuser import list_planner
from fuser.codegen import build_source
from fuser.config import config
from fuser.cuda.backend import compile_cubin
from fuser.cuda.dialect import DIALECT
from fuser.errors import ArgumentError, FuserError
from fuser.list_record import Extent, are_apart
from fuser.tensor_desc import TensorDesc

SIZES = (0, 1, 2, 3, 5, 16, 17, 63, 1000, 4095, 16384, 16385, 40001)

axpy = fuser.create_jit_fn("template <typename T> T axpy(T x, T y, T alpha) { return alpha * x + y; }", alpha=1.0)
numbered = fuser.jit_fn("template <typename T> T numbered(T x, int64_t i) { return x + T(i % 1021); }", index="i")
both = fuser.create_multi_output_jit_fn(
    "template <typename T> void both(T x, T y, T a, T& sum, T& rest) { sum = x + a * y; rest = x * y - a; }", 2, a=2.0
)


@fuser.fuse
def chain(x: Tensor, y: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    """Return results in another order than that in which they are computed."""
    first = torch.sigmoid(x) * y
    return axpy(first, x, alpha=rate), first


@pytest.fixture(params=[pytest.param("cpu", marks=pytest.mark.cpu), pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> str:
    """Return each device."""
    return str(request.param)


@pytest.fixture(autouse=True)
def nothing_recorded() -> None:
    """Forget what other tests called, and count anew."""
    config.touch()
    fuser.reset_stats()


def make(device: str, dtype: torch.dtype = torch.float32, sizes: Sequence[int] = SIZES, shift: int = 0) -> list[Tensor]:
    """Return a tensor of each size; every second one begins ``shift`` elements into its memory."""
    found = []
    for place, size in enumerate(sizes):
        skip = shift if place % 2 else 0
        found.append((torch.randn(size + skip, device=device) * 4).to(dtype)[skip:])
    return found


def check(made: Any, wanted: Any) -> None:
    """Compare lists (tuples of lists) of tensors with a list of what ordinary calls returned."""
    by_position = list(zip(*made, strict=True)) if isinstance(made, tuple) else made
    assert len(by_position) == len(wanted)
    for own, item in zip(by_position, wanted, strict=True):
        pairs = [(own, item)] if isinstance(item, Tensor) else list(zip(own, item, strict=True))
        for one, other in pairs:
            assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
            assert torch.equal(one, other)


def launches(call: Callable[[], Any]) -> tuple[Any, int]:
    """Return what a call returns, and how many kernels it launches."""
    before = fuser.stats()["launches"]
    value = call()
    return value, fuser.stats()["launches"] - before


@pytest.mark.parametrize("fn", [axpy, both, chain], ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_launch_has_the_bits_of_ordinary_calls(device: str, fn: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    xs, ys = make(device, dtype, shift=1), make(device, dtype)
    scalars = {axpy: {"alpha": 2.5}, both: {}, chain: {"rate": 0.25}}[fn]
    wanted = [fn(*items, **scalars) for items in zip(xs, ys, strict=True)]
    if fn is chain:
        # Its results are in their own order.
        assert all(torch.equal(last, axpy(first, x, alpha=0.25)) for (last, first), x in zip(wanted, xs, strict=True))
    for _ in range(3):
        made, count = launches(lambda: fuser.foreach(fn, xs, ys, **scalars))
        assert count == 1
        check(made, wanted)
    # The same kernel for other numbers, and for other sizes and more positions.
    compiled = fuser.stats()["compiles"] + fuser.n_compiled_kernels()
    xs, ys = make(device, dtype, SIZES[::-1] * 2), make(device, dtype, SIZES[::-1] * 2, shift=3)
    scalars = dict.fromkeys(scalars, 1.5)
    made, count = launches(lambda: fuser.foreach(fn, xs, ys, **scalars))
    assert count == 1
    assert fuser.stats()["compiles"] + fuser.n_compiled_kernels() == compiled
    check(made, [fn(*items, **scalars) for items in zip(xs, ys, strict=True)])


def test_elements_are_counted_from_where_each_tensor_begins(device: str) -> None:
    """Also by blocks that begin further on."""
    xs = make(device, shift=1)
    made, count = launches(lambda: fuser.foreach(numbered, xs))
    assert count == 1
    check(made, [numbered(x) for x in xs])
    check(made, [x + torch.arange(x.numel(), device=device) % 1021 for x in xs])
    grids = [x.view(-1, 3) for x in make(device, sizes=(3, 40002, 60000))]
    made, count = launches(lambda: fuser.foreach(fuser.fuse(lambda x: numbered(axpy(x, x)) * 2), grids))
    assert count == 1
    check(made, [numbered(axpy(x, x)) * 2 for x in grids])


def test_500_tensors_take_4_launches_at_most(device: str) -> None:
    sizes = [*range(490), *range(2000, 2010)]
    dtypes = [torch.float32, torch.bfloat16] * 250
    xs, ys = ([item.to(dtype) for item, dtype in zip(make(device, sizes=sizes), dtypes, strict=True)] for _ in "xy")
    made, count = launches(lambda: fuser.foreach(axpy, xs, ys, alpha=0.5))
    assert count == 2
    check(made, [axpy(x, y, alpha=0.5) for x, y in zip(xs, ys, strict=True)])
    # Eight tensors of a position: 433 positions fill the arguments of a launch.
    text = "template <typename T> T sum7(T a, T b, T c, T d, T e, T f, T g) { return a - b + c - d + e - f + g; }"
    sum7 = fuser.create_jit_fn(text)
    lists = [make(device, sizes=sizes) for _ in range(7)]
    made, count = launches(lambda: fuser.foreach(sum7, *lists))
    assert count == 2
    check(made, [sum7(*items) for items in zip(*lists, strict=True)])


def test_positions_that_no_list_kernel_computes_are_ordinary_calls(device: str) -> None:
    plain = [torch.randn(4, 6, device=device) for _ in range(6)]
    xs = [plain[0], plain[1].t(), plain[2][:, ::2], plain[3], plain[4].to(torch.float64), plain[5]]
    ys = [plain[1], plain[0].t(), torch.randn(3, device=device), torch.randn(6, device=device), plain[2], plain[4]]
    made, count = launches(lambda: fuser.foreach(axpy, xs, ys))
    # 0, 1 and 5 together; 2, 3 and 4 are of a kind that nobody else is of.
    assert count == 4
    check(made, [axpy(x, y) for x, y in zip(xs, ys, strict=True)])
    # Numbers in lists belong to one position.
    check(
        fuser.foreach(axpy, xs, [1, 2.5, 3, 4, 5, True]),
        [axpy(x, y) for x, y in zip(xs, [1, 2.5, 3, 4, 5, True], strict=True)],
    )


def test_numbers_and_0_dim_tensors_are_for_all(device: str) -> None:
    xs = make(device)
    here, there = torch.tensor(0.75, device=device), torch.tensor(-3.0)
    for y, alpha in ((here, there), (there, here), (2, 1.5), (1.5, 3), (here, 3)):
        made, count = launches(lambda y=y, alpha=alpha: fuser.foreach(axpy, xs, y, alpha=alpha))
        # What has one element is of another kind: its operands are all dense.
        assert count <= 2
        check(made, [axpy(x, y, alpha=alpha) for x in xs])


@pytest.mark.cpu
def test_numpy_scalars_are_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    xs, weight = [torch.ones(3), torch.arange(4.0)], torch.tensor(0.5)
    for value in (numpy.float32(1.5), numpy.int64(3), numpy.bool_(True)):
        for arguments, scalars in (((xs, xs), {"alpha": value}), ((xs, value), {"alpha": value})):
            got = fuser.foreach(axpy, *arguments, **scalars)
            assert all(map(torch.equal, got, [axpy(x, x if arguments[1] is xs else value, alpha=value) for x in xs]))
        sums, rests = fuser.foreach(both, xs, xs, a=value)
        assert all(torch.equal(made, both(x, x, a=value)[0]) for made, x in zip(sums, xs, strict=True))
        assert len(rests) == len(xs)
        scaled = fuser.jit_fn("template <typename T> T f(T x, T s, T t) { return x * s + t; }", scalars=["s", "t"])
        got = fuser.foreach(scaled, xs, s=weight, t=value)
        assert all(map(torch.equal, got, [scaled(x, s=weight, t=value) for x in xs]))


@pytest.mark.cpu
@pytest.mark.usefixtures("fresh_dynamo")
def test_numbers_that_dynamo_knows_by_type_alone() -> None:
    def step(xs: list[Tensor], y: float, alpha: float) -> Any:
        return fuser.foreach(axpy, xs, y, alpha=alpha)

    xs = [torch.ones(3), torch.arange(4.0)]
    compiled = torch.compile(step, backend="fuser", fullgraph=True, dynamic=True)
    for y, alpha in ((1.5, 0.5), (2.5, 0.75), (3.5, 1.75)):
        assert all(map(torch.equal, compiled(xs, y, alpha), step(xs, y, alpha)))


@pytest.mark.parametrize("shift", [0, 1])
def test_in_place(device: str, shift: int) -> None:
    xs, ys = make(device, shift=shift), make(device)
    for _ in range(3):
        wanted = [axpy(x, y, alpha=0.5) for x, y in zip(xs, ys, strict=True)]
        versions = [item._version for item in xs]
        made, count = launches(lambda ys=ys: fuser.foreach(axpy, xs, ys, out=xs, alpha=0.5))
        assert made is xs
        assert count == 1
        check(xs, wanted)
        assert all(item._version > before for item, before in zip(xs, versions, strict=True))
        # Another gradient each time, as in training.
        ys = make(device)
    sums, rests = make(device), make(device)
    wanted = [both(x, y) for x, y in zip(xs, ys, strict=True)]
    made, count = launches(lambda: fuser.foreach(both, xs, ys, out=(sums, rests)))
    assert count == 1
    check(made, wanted)


def test_out_of_another_kind_is_as_in_an_ordinary_call(device: str) -> None:
    xs, ys = [torch.randn(6, device=device) for _ in range(4)], [torch.randn(6, device=device) for _ in range(4)]
    outs = [torch.empty(6, device=device), torch.empty(6, device=device, dtype=torch.float64), torch.empty(0), xs[3]]
    outs[2] = torch.empty(0, device=device)
    wanted = [axpy(x, y).to(out.dtype) for x, y, out in zip(xs, ys, outs, strict=True)]
    check(fuser.foreach(axpy, xs, ys, out=outs), wanted)
    narrow = [item.int() for item in xs]
    with pytest.raises(FuserError, match="can't be cast"):
        fuser.foreach(axpy, xs, ys, out=narrow)
    with torch.inference_mode():
        kept = [torch.zeros(6, device=device) for _ in xs]
    with pytest.raises(FuserError, match="Inplace update to inference tensor outside InferenceMode"):
        fuser.foreach(axpy, xs, ys, out=kept)
    assert not any(map(torch.any, kept))


def test_positions_that_share_memory_are_computed_in_order(device: str) -> None:
    def run(apply: Callable[..., Any]) -> Tensor:
        memory = torch.arange(40.0, device=device)
        # Each position reads what the one before wrote.
        xs, outs = [memory[i : i + 8] for i in (0, 8, 16)], [memory[i : i + 8] for i in (8, 16, 24)]
        apply(xs, [torch.ones(8, device=device)] * 3, outs)
        # A tensor that comes twice.
        apply([xs[0], xs[0]], [xs[1], xs[2]], [xs[0], xs[0]])
        return memory

    def one_by_one(xs: list[Tensor], ys: list[Tensor], outs: list[Tensor]) -> None:
        for x, y, out in zip(xs, ys, outs, strict=True):
            axpy(x, y, alpha=2.0, out=out)

    wanted = run(one_by_one)
    for _ in range(2):
        made, count = launches(lambda: run(lambda xs, ys, outs: fuser.foreach(axpy, xs, ys, out=outs, alpha=2.0)))
        assert torch.equal(made, wanted)
        # On one thread blocks come in order, too: nobody else would notice.
        assert count == 5
    # The same shapes, apart: recorded; then not apart in a call like the recorded one.
    memory = [torch.ones(8, device=device) for _ in range(6)]
    assert launches(lambda: fuser.foreach(axpy, memory[:3], memory[3:], out=memory[:3]))[1] == 1
    assert torch.equal(run(lambda xs, ys, outs: fuser.foreach(axpy, xs, ys, out=outs, alpha=2.0)), wanted)
    whole = torch.ones(9, device=device)
    with pytest.raises(FuserError, match="single memory location"):
        fuser.foreach(axpy, [whole[1:], memory[0]], [memory[1], memory[2]], out=[whole[:-1], memory[0]])


@pytest.mark.parametrize(
    ("ranges", "wanted"),
    [
        ([(0, 8, 0, True), (8, 8, 1, True), (100, 8, -1, False)], True),
        # In place: all of it, in one position.
        ([(0, 8, 0, True), (0, 8, 0, False)], True),
        ([(0, 8, 0, True), (0, 8, 1, False)], False),
        ([(0, 8, 0, True), (0, 8, 0, True)], False),
        ([(0, 8, 0, True), (4, 8, 0, False)], False),
        ([(4, 8, 0, True), (0, 8, 1, False)], False),
        # Inputs may share what nobody writes.
        ([(0, 8, 0, False), (0, 8, 1, False), (4, 8, 2, False), (12, 4, 0, True)], True),
        # In place inside of what another position reads.
        ([(0, 100, 1, False), (50, 8, 0, False), (50, 8, 0, True)], False),
        ([(0, 0, 0, True), (0, 8, 1, True)], True),
    ],
)
def test_what_shares_memory(ranges: list[tuple[int, int, int, bool]], wanted: bool) -> None:
    for order in (ranges, ranges[::-1]):
        extents = [Extent(size, position, 4, is_written) for _, size, position, is_written in order]
        assert are_apart([begin for begin, *_ in order], extents) is wanted


def test_gradients_are_not_lost(device: str) -> None:
    xs = [item.requires_grad_() for item in make(device, sizes=(3, 5, 8))]
    ys = make(device, sizes=(3, 5, 8))
    for _ in range(2):
        made = fuser.foreach(axpy, xs, ys, alpha=3.0)
        found = torch.autograd.grad([item.sum() for item in made], xs)
        assert all(torch.equal(item, torch.full_like(item, 3.0)) for item in found)
        with torch.no_grad():
            made, count = launches(lambda: fuser.foreach(axpy, xs, ys, alpha=3.0))
        assert count == 1
        assert not any(item.requires_grad for item in made)
    with pytest.raises(FuserError, match="automatic differentiation"):
        fuser.foreach(axpy, xs, ys, out=make(device, sizes=(3, 5, 8)))


def test_wrong_calls_say_what_is_wrong() -> None:
    xs = [torch.ones(3), torch.ones(4)]
    for wrong, message in (
        (lambda: fuser.foreach(torch.add, xs, xs), "takes a functor or a fused function"),
        (lambda: fuser.foreach(axpy, xs, xs[:1]), r"lists of one length, got \[1, 2\]"),
        (lambda: fuser.foreach(axpy, 1.0, torch.tensor(2.0)), "at least one list"),
        (
            lambda: fuser.foreach(axpy, iter(xs), iter(xs)),
            r"lists of tensors, got list_iterator; list\(\.\.\.\) makes one",
        ),
        (
            lambda: fuser.foreach(axpy, xs, torch.nn.ParameterList([torch.nn.Parameter(xs[0])])),
            r"got torch.nn.modules.container.ParameterList; list\(\.\.\.\) makes one",
        ),
        (lambda: fuser.foreach(axpy, xs, {"x": xs[0]}), "foreach takes lists of tensors, got dict$"),
        (lambda: fuser.foreach(axpy, xs, torch.ones(3)), r"0-dim tensors for all; got a tensor of \[3\]"),
        (lambda: fuser.foreach(axpy, xs), "takes 2 tensors, got 1"),
        (lambda: fuser.foreach(axpy, xs, xs, beta=1), "no scalar 'beta'"),
        (lambda: fuser.foreach(axpy, xs, xs, alpha=torch.ones(3)), "0-dim tensors for all"),
        (lambda: fuser.foreach(axpy, xs, xs, out=xs[:1]), "a list of 2 tensors for each output, got a list of 1"),
        (lambda: fuser.foreach(axpy, xs, xs, out=[None, None]), "out= takes tensors, got None"),
        (lambda: fuser.foreach(both, xs, xs, out=xs), "1 lists for 2 outputs"),
    ):
        with pytest.raises(ArgumentError, match=message):
            wrong()
    assert fuser.foreach(axpy, [], []) == []
    assert fuser.foreach(both, [], []) == ([], [])


@pytest.mark.cpu
def test_a_call_during_which_settings_changed_and_changed_back_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    xs, find = make("cpu", sizes=(5, 7)), list_planner.compile_kernel

    def change(*arguments: Any) -> Any:
        with config.patch(numerics="fast"):
            return find(*arguments)

    recorded = Mock()
    monkeypatch.setattr(list_planner._records, "put", recorded)
    for compile_kernel, count in ((change, 0), (find, 1)):
        monkeypatch.setattr(list_planner, "compile_kernel", compile_kernel)
        check(fuser.foreach(axpy, xs, xs), [axpy(item, item) for item in xs])
        assert recorded.call_count == count


@pytest.mark.cpu
def test_calls_with_positions_that_are_ordinary_calls_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    xs, ys, rows = (make("cpu", sizes=(5, 7, 8)) for _ in range(3))
    learned = [xs[0].clone().requires_grad_(), *xs[1:]]
    matrices = [torch.stack([item, item]) for item in xs]
    # Each of these writes what the next one reads.
    windows = list(torch.ones(7).unfold(0, 5, 2))
    planned = Mock(wraps=list_planner.RecordMaker)
    monkeypatch.setattr(list_planner, "RecordMaker", planned)
    for count, run in enumerate(
        (
            lambda: fuser.foreach(axpy, learned, ys),
            lambda: fuser.foreach(axpy, matrices, rows),
            lambda: fuser.foreach(axpy, [xs[0], xs[0]], [xs[0], ys[0]], out=[xs[0], xs[0]]),
            lambda: fuser.foreach(axpy, windows, xs[:1] * 2, out=windows),
        ),
        start=1,
    ):
        for _ in range(3):
            run()
        assert planned.call_count == count
    made = fuser.foreach(axpy, learned, ys)
    assert [item.requires_grad for item in made] == [True, False, False]
    with torch.no_grad():
        assert launches(lambda: fuser.foreach(axpy, learned, ys))[1] == 1


@pytest.mark.cpu
def test_what_is_not_like_the_recorded_call_is_planned_anew() -> None:
    xs, ys = make("cpu", sizes=(5, 7)), make("cpu", sizes=(5, 7))
    fuser.foreach(axpy, xs, ys)
    for wrong in (torch.ones(6), torch.ones(5, dtype=torch.float64), torch.ones(10)[::2], torch.ones(1, 5)):
        check(fuser.foreach(axpy, [wrong, xs[1]], [wrong, ys[1]]), [axpy(wrong, wrong), axpy(xs[1], ys[1])])
    check(fuser.foreach(axpy, xs, xs), [axpy(item, item) for item in xs])
    fuser.override_can_fuse_on_cpu(False)
    try:
        with warnings.catch_warnings(action="ignore"):
            made, count = launches(lambda: fuser.foreach(axpy, xs, ys))
    finally:
        fuser.override_can_fuse_on_cpu(True)
    assert count == 0
    check(made, [axpy(x, y) for x, y in zip(xs, ys, strict=True)])
    rate = 2.0

    @fuser.fuse
    def scaled(x: Tensor) -> Tensor:
        return torch.abs(x) * rate

    for rate in (2.0, 3.0):
        check(fuser.foreach(scaled, xs), [torch.abs(item) * rate for item in xs])


@pytest.mark.cpu
@pytest.mark.slow
def test_functions_of_several_kernels_and_traces() -> None:
    xs = make("cpu", sizes=(5, 7))
    branching = fuser.fuse(lambda x: axpy(x, x) if x.shape[0] == 5 else axpy(x, x, alpha=3.0).cumsum(0) * 2)
    check(fuser.foreach(branching, xs), [2 * xs[0], (4 * xs[1]).cumsum(0) * 2])


@pytest.mark.cpu
def test_lists_inside_a_fused_function() -> None:
    xs, ys = make("cpu", sizes=(5, 7)), make("cpu", sizes=(5, 7))
    scaled = fuser.fuse(lambda x, by: axpy(x, x) * by)

    @fuser.fuse
    def step(xs: list[Tensor], ys: list[Tensor], by: float, out: list[Tensor]) -> Any:
        products, differences = fuser.foreach(both, xs, ys)
        fuser.foreach(axpy, by, ys, out=out)
        return [*fuser.foreach(axpy, products, differences, alpha=by), *fuser.foreach(scaled, xs, by)]

    for by in (0.5, 2.0):
        outs = [[torch.empty_like(x) for x in xs] for _ in range(2)]
        check(step(xs, ys, by, outs[0]), step.function(xs, ys, by, outs[1]))
        check(outs[0], outs[1])


@pytest.mark.nvrtc
def test_cuda_text_compiles() -> None:
    where = torch.device("cuda", 0)
    for dtypes in ((torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.float64, torch.uint8)):
        tensors = [TensorDesc(torch.Tensor, dtype, (1000,), (1,), where) for dtype in dtypes]
        spec = axpy.spec(2)
        flat = list_planner._fit(spec, [*tensors, TensorDesc(float)], (), (False, False, True))
        assert flat is not None
        source = build_source(spec.group, flat.args, DIALECT)
        assert "__grid_constant__ fuser_lists lists" in source.text
        assert f"[{flat.args.positions}]" in source.text
        compile_cubin(source, "sm_90")
        numbers = list_planner._fit(numbered.spec(1), tensors[:1], (), (False,))
        assert numbers is not None
        compile_cubin(build_source(numbered.spec(1).group, numbers.args, DIALECT), "sm_90")
    # For a driver of old, too, whose launches take 4096 bytes.
    args = flat.args._replace(positions=2 * (flat.args.positions // 20))
    compile_cubin(build_source(spec.group, args, DIALECT), "sm_80")


@pytest.mark.cuda
def test_capture_and_large_tensors() -> None:
    xs, ys = make("cuda"), make("cuda")
    fuser.foreach(axpy, xs, ys, out=xs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fuser.foreach(axpy, xs, ys, out=xs)
    wanted = [axpy(x, y) for x, y in zip(xs, ys, strict=True)]
    graph.replay()
    check(xs, wanted)
    large = [torch.randint(9, (2**31 + 12345,), dtype=torch.uint8, device="cuda") for _ in range(2)]
    check(fuser.foreach(axpy, large, large, alpha=2), [axpy(item, item, alpha=2) for item in large])
