"""Torch's orders of reductions on a GPU, without one: schedules, their model, and kernels emulated on the CPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import reduce

import pytest
import torch
from aten_order_model import sum_rows
from cuda_emulation import run_emulated
from torch.fx.experimental.proxy_tensor import make_fx

import fuser
from fuser import order_check
from fuser.combining import Reduction
from fuser.compiler import register
from fuser.config import config
from fuser.cuda import backend
from fuser.cuda.aten_orders import GpuSize, Layout, coalesce, find_schedule, sum_schedule
from fuser.cuda.rows_chained import ChainedText
from fuser.cxx.functor import parse_functor
from fuser.debug import kernel_sources
from fuser.errors import GroupError
from fuser.expanded import expand_call, settle_orders
from fuser.function import Function, Isolation
from fuser.graph import FusionGroup, GroupBuilder
from fuser.kernel_spec import infer_layouts
from fuser.ops import OPS, composite_function, reduction_function
from fuser.ops.softmax import highest_function, total_function
from fuser.orders import RowOrder, Schedule
from fuser.plain_texts import may_end_in_product
from fuser.planner import plan_texts
from fuser.row_orders import torchs_order
from fuser.tensor_desc import TensorDesc, describe, value_layouts

CUDA = torch.device("cuda", 0)


def rows_of(*shape: int) -> Layout:
    return coalesce(shape, torch.empty(shape, device="meta").stride(), (len(shape) - 1,))


# As torch 2.11 has it on an H200, found by comparing bits (tests/test_aten_orders_cuda.py).
@pytest.mark.parametrize(
    ("shape", "dims", "itemsize", "schedule"),
    [
        ((4096, 4096), (1,), 4, Schedule(32, 1, 1, 4, 4)),
        ((4096, 4096), (1,), 2, Schedule(32, 1, 1, 8, 8)),
        ((4096, 100), (1,), 4, Schedule(32, accumulators=1)),
        ((7, 127), (1,), 4, Schedule(64, accumulators=1)),
        ((7, 128), (1,), 4, Schedule(32, 1, 1, 4, 4)),
        ((8, 4096), (1,), 4, Schedule(64, 1, 1, 4, 4)),
        ((64, 16384), (1,), 4, Schedule(32, 16, 1, 4, 4)),
        ((1, 1 << 20), (1,), 4, Schedule(512, 1, 128, 4, 4)),
        ((32768, 4096), (0,), 2, Schedule(1, 4, 66)),
        ((64, 64), (0,), 4, Schedule(1)),
        ((1000, 1001), (0,), 4, Schedule(1, 16)),
        ((16, 64, 28, 28), (0, 2, 3), 4, Schedule(32, 16)),
        ((5, 1), (1,), 4, Schedule(1)),
        ((5, 0), (1,), 4, Schedule(1)),
        # More than ATen's indices reach: in halves.
        ((1 << 18, 4096), (1,), 4, Schedule(32, 1, 1, 4, 4)),
    ],
)
def test_schedules_of_sums(shape: tuple[int, ...], dims: tuple[int, ...], itemsize: int, schedule: Schedule) -> None:
    layout = coalesce(shape, torch.empty(shape, device="meta").stride(), dims)
    assert sum_schedule(layout, itemsize, GpuSize()) == schedule


def test_moments_and_norms_of_sixteen_bits_have_shorter_vectors_than_sums() -> None:
    layout = rows_of(4096, 4096)
    found = {order: find_schedule(order, layout, 2, GpuSize(), is_aligned=True) for order in ("sum", "norm", "welford")}
    assert found == {
        "sum": Schedule(32, 1, 1, 8, 8), "norm": Schedule(32, 1, 1, 4, 4), "welford": Schedule(32, 1, 1, 2, 2)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "slot", "expected"),
    [
        ("T f(T a, T b) { return a + b; }", 0, False),
        ("T f(T a, T b) { return a + b * b; }", 0, False),
        ("T f(T a, T b) { return a * b; }", 0, True),
        ("T f(T a, T b) { return a > b ? a + b * b : a * b; }", 0, True),
        ("T f(T a, T b) { return (a > b) | (a != a) ? a : b; }", 0, False),
        ("T f(T a, T b) { return fma(a, b, a); }", 0, True),
        ("T f(T a, T b) { if (uint64_t(a) < int(b)) { return a; } return T(b); }", 0, False),
        ("T f(T a, T b) { if (a < b) { return a; } return product(a, b); }", 0, True),
        ("void f(T a, T b, T x, T& s, T& t) { s = a + x * x; t = b + x * (x - s); }", 0, False),
        ("void f(T a, T b, T x, T& s, T& t) { s = a + x * x; t = b + x * (x - s); }", 1, False),
        ("void f(T a, T b, T x, T& s, T& t) { s = a + x * x; t = x * b; }", 1, True),
        ("void f(T a, T b, T x, T& s, T& t) { s = a + x; t = b + x; s *= x; }", 0, True),
        ("void f(T a, T b, T x, T& s, T& t) { s = a + x * x; t = b + x; g(s); }", 0, True),
    ],
)
def test_what_may_end_in_a_product(text: str, slot: int, *, expected: bool) -> None:
    functor = parse_functor(f"template <typename T> {text}", (), text.count("T&") or 1)
    assert may_end_in_product(functor, slot) == expected


def test_schedules_that_are_not_known() -> None:
    # Expanded, rows longer than ATen's indices, columns of an unknown address, and norms of nothing or in another type.
    assert sum_schedule(Layout(((5, 0),), ((3, 5),)), 4, GpuSize()) is None
    assert sum_schedule(rows_of(1 << 30), 4, GpuSize()) is None
    assert sum_schedule(Layout(((300, 64),), ((64, 1),)), 4, GpuSize(), is_aligned=False) is None
    norm = {"layer_norm": 768, "rms_norm": 770, "layer_norm_dx": 0}
    found = {
        order: find_schedule(order, rows_of(8, width), 4, GpuSize(), is_aligned=True) for order, width in norm.items()
    }
    assert found == {
        "layer_norm": Schedule(32, 4, 1, 1, 4), "rms_norm": Schedule(32, 16, 1, 1), "layer_norm_dx": None
    }  # fmt: skip
    assert find_schedule("layer_norm", rows_of(8, 768), 8, GpuSize(), is_aligned=True) is None
    # ATen rounds between blocks where there are very many rows of few columns.
    columns = {
        rows: find_schedule("gamma_beta", Layout(((rows, 1024),), ((1024, 1),)), 4, GpuSize(), is_aligned=False)
        for rows in (63, 64, 255, 1 << 16, (1 << 16) + 1)
    }
    assert [item and item.y for item in columns.values()] == [1, 8, 16, 32, None]


def test_schedules_of_norms_over_channels() -> None:
    found = {
        (order, plane): find_schedule(
            order, Layout(((plane, 1), (6, 5 * plane)), ((5, plane),)), 2, GpuSize(), is_aligned=True
        )
        for order in ("batch_norm_planes", "batch_norm_plane_sums")
        for plane in (32, 49, 64, 256, 784, 1024)
    }
    # A block of 512 threads, as many of which have a plane as it has elements.
    for (order, plane), schedule in found.items():
        pitch = {49: 64, 784: 512}.get(plane, 0)
        assert schedule == Schedule(32, 16, 1, 1, rises=order == "batch_norm_planes", pitch=pitch)
    sides = Layout(((524288, 256),), ((256, 1),))
    for order in ("batch_norm", "batch_norm_sums"):
        assert find_schedule(order, sides, 2, GpuSize(), is_aligned=True) == Schedule(1, 16, 128)
    rows = [find_schedule("group_norm_sums", rows_of(8, length), 2, GpuSize(), is_aligned=True) for length in (49, 512)]
    assert rows == [Schedule(32, 1, 1, 1), Schedule(32, 16, 1, 1)]
    columns = [
        find_schedule("group_norm_batch", Layout(((batch, 64),), ((64, 1),)), 2, GpuSize(), is_aligned=True)
        for batch in (128, 129)
    ]
    assert columns == [Schedule(1, 1, 1, 1), Schedule(1, 32, 1, 1)]


def even(x: int, y: int, vector: int, *, is_serial: bool = False) -> Schedule:
    return Schedule(x, y, 1, 1, vector, is_even=True, is_serial=is_serial)


@pytest.mark.parametrize(
    ("order", "length", "itemsize", "is_aligned", "schedule"),
    [
        ("softmax", 3, 4, True, Schedule(4, accumulators=1)),
        ("softmax", 2048, 4, True, Schedule(32, accumulators=1)),
        ("softmax", 1025, 8, True, Schedule(32, 32, accumulators=1)),
        ("softmax", 2049, 2, False, Schedule(32, 32, accumulators=1)),
        ("softmax", 9216, 4, True, Schedule(32, 32, accumulators=1)),
        ("softmax", 9220, 4, True, Schedule(32, 32, 1, 1, 4)),
        ("softmax", 9220, 4, False, even(32, 32, 4)),
        ("softmax", 12252, 4, True, Schedule(32, 32, 1, 1, 4)),
        ("softmax", 12256, 4, True, even(32, 32, 4)),
        ("softmax", 24504, 2, True, Schedule(32, 32, 1, 1, 8)),
        ("softmax", 50257, 2, True, even(32, 32, 8)),
        ("softmax_cast", 1024, 2, True, Schedule(32, accumulators=1)),
        ("softmax_cast", 1025, 2, False, even(32, 32, 8)),
        ("log_softmax_cast", 4096, 2, True, Schedule(32, 32, 1, 1, 8)),
        ("softmax_backward", 1024, 4, True, Schedule(32, accumulators=1)),
        ("softmax_backward", 1025, 4, True, even(32, 4, 4, is_serial=True)),
        ("softmax_backward", 1536, 4, True, Schedule(32, 8, 1, 1, 4)),
        ("log_softmax_backward", 4096, 2, True, Schedule(32, 8, 1, 1, 8)),
        ("log_softmax_backward", 12272, 4, True, even(32, 16, 4, is_serial=True)),
    ],
)
def test_schedules_of_softmax(order: str, length: int, itemsize: int, is_aligned: bool, schedule: Schedule) -> None:
    assert find_schedule(order, rows_of(8, length), itemsize, GpuSize(), is_aligned=is_aligned) == schedule


def test_dimensions_come_as_they_lie_in_memory() -> None:
    strides = (50176, 1, 1792, 64)
    assert coalesce((16, 64, 28, 28), strides, (0, 2, 3)) == Layout(((12544, 64),), ((64, 1),))
    assert coalesce((4, 30, 1, 700), (21000, 700, 700, 1), (1, 3)) == Layout(((21000, 1),), ((4, 21000),))
    assert coalesce((600, 300), (1, 600), (0,)) == Layout(((600, 1),), ((300, 600),))


def add_as_threads_do(row: list[float], shift: int, schedule: Schedule) -> float:
    """Reduce.cuh for one row of float32, thread by thread."""
    f = torch.tensor
    single = lambda a, b: (f(a, dtype=torch.float32) + f(b, dtype=torch.float32)).item()  # noqa: E731
    partials = []
    for block in range(schedule.blocks):
        threads = []
        for thread in range(schedule.x * schedule.y):
            own = [0.0] * schedule.accumulators
            data, end = 0, len(row)
            is_first = block == 0 and thread < schedule.x
            if schedule.vector > 1:
                if shift:
                    data -= shift
                    end += shift
                    if is_first and shift <= thread < schedule.vector:
                        own[0] = single(own[0], row[data + thread])
                    end -= schedule.vector
                    data += schedule.vector
                at = thread + schedule.x * schedule.y * block
                while at * schedule.vector + schedule.vector - 1 < end:
                    for k in range(schedule.vector):
                        own[k] = single(own[k], row[data + at * schedule.vector + k])
                    at += schedule.slots
                tail = end - end % schedule.vector + thread
                if is_first and tail < end:
                    own[0] = single(own[0], row[data + tail])
            else:
                elements = range(thread + schedule.x * schedule.y * block, end, schedule.slots)
                for turn, at in enumerate(elements):
                    own[turn % schedule.accumulators] = single(own[turn % schedule.accumulators], row[at])
            total = own[0]
            for other in own[1:]:
                total = single(total, other)
            threads.append(total)
        partials.append(halve(threads, schedule, single, x_first=True))
    if schedule.blocks == 1:
        return partials[0]
    count = schedule.x * schedule.y
    last = [0.0] * count
    for at, part in enumerate(partials):
        last[at % count] = single(last[at % count], part)
    return halve(last, schedule, single, x_first=False)


def halve(values: list[float], schedule: Schedule, add: Callable[[float, float], float], *, x_first: bool) -> float:
    grid = [values[row * schedule.x : (row + 1) * schedule.x] for row in range(schedule.y)]
    for axis in "xy" if x_first else "yx":
        while axis == "x" and len(grid[0]) > 1:
            half = len(grid[0]) // 2
            grid = [list(map(add, row[:half], row[half:])) for row in grid]
        while axis == "y" and len(grid) > 1:
            half = len(grid) // 2
            grid = [list(map(add, *rows)) for rows in zip(grid[:half], grid[half:], strict=True)]
    return grid[0][0]


@pytest.mark.parametrize(
    ("shape", "threads"),
    [
        ((16, 64, 28, 28), 1),
        ((8, 100, 30), 32),
        ((8, 1000, 64), 16),
        ((2, 63, 5), 1),
        ((1, 64, 3), 64),
        ((3, 5000, 65), 1),
    ],
)
def test_schedules_of_softmax_across(shape: tuple[int, ...], threads: int) -> None:
    layout = coalesce(shape, torch.empty(shape, device="meta").stride(), (1,))
    found = find_schedule("softmax", layout, 4, GpuSize(), is_aligned=True)
    assert found == Schedule(1, threads, accumulators=1)


@pytest.mark.parametrize(("rows", "threads"), [(3, 32), (720, 32), (736, 64), (8192, 512), (100000, 1024)])
def test_schedules_of_losses(rows: int, threads: int) -> None:
    found = find_schedule("nll_loss", rows_of(rows), 4, GpuSize(), is_aligned=True)
    assert found == Schedule(threads, accumulators=1)


def add_as_softmax_does(row: list[float], shift: int, schedule: Schedule) -> float:
    """SoftMax.cu for one row of float32, thread by thread: ilpReduce, and the sums over a block."""
    f = torch.tensor
    single = lambda a, b: (f(a, dtype=torch.float32) + f(b, dtype=torch.float32)).item()  # noqa: E731
    count, threads = schedule.x * schedule.y, []
    for thread in range(count):
        own, data, size = 0.0, 0, len(row)
        if shift:
            data, size = -shift, size + shift
            if thread >= shift:
                own = single(own, row[data + thread])
            data, size = data + count, size - count
        last = size % (schedule.vector * count)
        for at in range(thread * schedule.vector, size - last, count * schedule.vector):
            for k in range(schedule.vector):
                own = single(own, row[data + at + k])
        for at in range(size - last + thread, size, count):
            own = single(own, row[data + at])
        threads.append(own)
    if not schedule.is_serial:
        return halve(threads, schedule, single, x_first=True)
    warps = [reduce(single, threads[at : at + schedule.x], 0.0) for at in range(0, count, schedule.x)]
    return reduce(single, warps, 0.0)


@pytest.mark.parametrize(
    ("length", "shift", "schedule"),
    [(77, 0, even(4, 2, 4)), (301, 3, even(4, 4, 4)), (200, 1, even(8, 2, 8, is_serial=True)), (64, 0, even(8, 2, 4))],
)
def test_the_model_adds_as_softmax_does(length: int, shift: int, schedule: Schedule) -> None:
    torch.manual_seed(length)
    rows = torch.randn(2, length) * torch.exp(3 * torch.randn(2, length))
    made = sum_rows(rows, schedule, torch.tensor([shift, shift]))
    assert made.tolist() == [add_as_softmax_does(row, shift, schedule) for row in rows.tolist()]


@pytest.mark.parametrize(
    ("length", "shift", "schedule"),
    [
        (77, 0, Schedule(8)), (77, 0, Schedule(1, 4, 3)), (301, 0, Schedule(8, 2, 1, 4, 4)),
        (301, 3, Schedule(8, 2, 2, 4, 4)), (304, 1, Schedule(16, 1, 5, 8, 8)), (3, 0, Schedule(4, 2)),
    ],
)  # fmt: skip
def test_the_model_adds_as_threads_do(length: int, shift: int, schedule: Schedule) -> None:
    torch.manual_seed(length)
    rows = torch.randn(2, length) * torch.exp(3 * torch.randn(2, length))
    made = sum_rows(rows, schedule, torch.tensor([shift, shift]))
    assert made.tolist() == [add_as_threads_do(row, shift, schedule) for row in rows.tolist()]


# --- kernels ---------------------------------------------------------------------------------------------------------
def centred(op: str, dims: tuple[int, ...]) -> FusionGroup:
    """abs(x), what its rows come to, and the product of both: pointwise work before and after."""
    builder = GroupBuilder()
    (v,) = builder.apply(OPS["abs"].function, [builder.add_input("x")])
    (s,) = builder.apply(reduction_function(op, dims, True), [v])
    return builder.build([s, *builder.apply(OPS["mul"].function, [v, s])])


def expected(x: torch.Tensor, op: str, dims: tuple[int, ...]) -> torch.Tensor:
    layout = coalesce(x.shape, x.stride(), dims)
    schedule = sum_schedule(layout, x.element_size(), GpuSize())
    assert schedule is not None
    rows = x.permute([*(d for d in range(x.dim()) if d not in dims), *dims]).reshape(layout.rows, layout.length).float()
    shifts = torch.arange(len(rows)) * layout.length % schedule.vector
    total = sum_rows(rows, schedule, shifts)
    if op == "mean":
        total = total * (torch.tensor(float(len(rows))) / torch.tensor(float(rows.numel())))
    shape = [1 if d in dims else size for d, size in enumerate(x.shape)]
    return total.to(x.dtype).view(shape)


SHAPES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((40, 1001), (1,)), ((700, 33), (0,)), ((600, 100), (1,)), ((7, 129), (1,)), ((300, 1024), (1,)),
    ((2, 16384), (1,)), ((4, 30, 70), (1, 2)), ((520, 4096), (1,)), ((520, 7001), (1,)), ((1, 300000), (1,)),
    ((2, 270001), (1,)), ((3000, 40), (0,)), ((2100, 300), (0,)), ((8, 5, 90), (0, 2)), ((3, 1), (1,)), ((2, 0), (1,)),
]  # fmt: skip


def check_kernel(shape: tuple[int, ...], dims: tuple[int, ...], dtype: torch.dtype, op: str) -> None:
    torch.manual_seed(0)
    x = (torch.randn(shape) * torch.exp(2 * torch.randn(shape))).to(dtype)
    total, product = run_emulated(centred(op, dims), [x], descending=op == "mean")
    want = expected(x.abs(), op, dims)
    assert torch.equal(torch.nan_to_num(total, 7.0), torch.nan_to_num(want, 7.0))
    assert torch.equal(product, x.abs() * total)


@pytest.mark.cpu
# The last one is of columns that blocks share.
@pytest.mark.parametrize(("shape", "dims"), [*SHAPES[:2], SHAPES[12]])
def test_kernels_keep_the_order(shape: tuple[int, ...], dims: tuple[int, ...]) -> None:
    check_kernel(shape, dims, torch.float32, "mean")


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "dims"), SHAPES)
def test_kernels_keep_every_order(shape: tuple[int, ...], dims: tuple[int, ...], dtype: torch.dtype, op: str) -> None:
    check_kernel(shape, dims, dtype, op)


# A vector that goes on in the next row has that row's values, too.
@pytest.mark.cpu
@pytest.mark.parametrize(
    ("shape", "dims", "others"),
    [((130, 257), (0, 1), (130, 1)), ((9, 35, 33), (1, 2), (9, 35, 1)), ((20, 7), (0, 1), (1, 1))],
)
def test_what_is_constant_along_rows_changes_with_them(
    shape: tuple[int, ...], dims: tuple[int, ...], others: tuple[int, ...]
) -> None:
    builder = GroupBuilder()
    product = builder.apply(OPS["mul"].function, [builder.add_input("x"), builder.add_input("y")])
    group = builder.build(builder.apply(reduction_function("sum", dims, True), product))
    x, y = torch.randn(shape), torch.randn(others)
    (total,) = run_emulated(group, [x, y])
    assert torch.equal(total, expected(x * y, "sum", dims))


# Of short rows a thread does what several of torch's do, which have several accumulators there.
@pytest.mark.cpu
@pytest.mark.parametrize("length", [8, 50, 127, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3, 7, 33, 96))])
def test_short_rows_are_added_as_by_several_accumulators(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuser.ordered_access.ENOUGH_THREADS", 0)
    for dtype in (torch.float32, torch.bfloat16):
        check_kernel((600, length), (1,), dtype, "sum")
    x = torch.randn(600, length) * torch.exp(2 * torch.randn(600, length))
    schedule = find_schedule("sum", rows_of(600, length), 4, GpuSize(), is_aligned=True)
    assert schedule is not None
    assert schedule.accumulators == 1
    assert torch.equal(sum_rows(x, schedule), sum_rows(x, schedule._replace(accumulators=4)))


def shares(order: str) -> FusionGroup:
    """Powers of the elements, and what part each is of its row's."""
    builder = GroupBuilder("strict")
    power = Function(parse_functor("template <typename T> T power(T x) { return exp(x); }"))
    (e,) = builder.apply(power, [builder.add_input("x")])
    (s,) = builder.apply(total_function(1, order), [e])
    share = Function(parse_functor("template <typename T> T share(T e, T s) { return e / s; }"))
    return builder.build([e, s, *builder.apply(share, [e, s])])


# Vectors of neighbours, whole ones and others, and rows in the canonical order.
@pytest.mark.cpu
@pytest.mark.parametrize(
    ("order", "length", "dtype"),
    [
        ("softmax", 512, torch.float32),
        ("", 512, torch.bfloat16),
        pytest.param("softmax", 3001, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("", 9000, torch.float32, marks=pytest.mark.slow),
    ],
)
def test_shares_of_a_row_are_quotients(order: str, length: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, length) * 3
    # Powers that are 0, denormal, and so small that a quotient is; a row that comes to infinity, and one to nothing.
    x[:, ::7], x[:, 1::9], x[:, 2::31], x[1, 5], x[2] = -torch.inf, -90, -103, torch.inf, -torch.inf
    e, s, q = run_emulated(shares(order), [x.to(dtype)])
    assert (e == 0).any()
    assert ((e > 0) & (e < 1e-38)).any()
    assert torch.equal(torch.nan_to_num(q, 7.0), torch.nan_to_num((e.float() / s.float()).to(q.dtype), 7.0))


# Of results of 16 bits that are asked for together if they are exact; of what waits in shared memory.
@pytest.mark.cpu
@pytest.mark.parametrize("length", [4096, pytest.param(131072, marks=pytest.mark.slow)])
def test_narrow_shares_are_quotients(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuser.sections.FEW_ROWS", 0)
    builder = GroupBuilder("strict")
    x = builder.add_input("x")
    (top,) = builder.apply(highest_function((1,)), [x])
    text = "template <typename T> T {}"
    power = Function(
        parse_functor(text.format("power(T x, T top) { return exp(top < T(-80) ? x : x - top); }")),
        out_dtypes=(torch.float32,),
    )
    (e,) = builder.apply(power, [x, top])
    (s,) = builder.apply(total_function(1, "softmax"), [e])
    share = Function(parse_functor(text.format("share(T e, T s) { return e / s; }")), out_dtypes=(torch.bfloat16,))
    group = builder.build([top, e, s, *builder.apply(share, [e, s])])
    torch.manual_seed(0)
    given = (torch.randn(7, length) * 3).bfloat16()
    # Powers that are 0, and so small that a step of a quotient would lose bits, or all of them.
    given[6] -= 95
    given[1, ::7], given[2, 1::9], given[3, 2::31], given[4], given[5, 3] = -torch.inf, -68, -100, -torch.inf, torch.nan
    kernel = fuser.debug_get_fused_kernel_code(group, [given], "cuda")
    kernel = kernel[kernel.index("__global__") :]
    assert "fuser_extreme<fuser_bfloat16, V, true>" in kernel
    assert "fuser_whole_divisor" in kernel
    assert ("fuser_put_aside" in kernel) == (length > 4096)
    top_of, power_of, sum_of, share_of = run_emulated(group, [given])
    is_number = ~given.isnan().any(1)
    assert torch.equal(top_of[is_number], given[is_number].amax(1, keepdim=True))
    assert torch.equal(torch.nan_to_num(share_of, 7.0), torch.nan_to_num((power_of / sum_of).bfloat16(), 7.0))


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_magnitudes_are_compared_in_pairs(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(6, 1000) * 3).to(dtype)
    x[0], x[1, ::7], x[2, 5], x[3, 999], x[4, 500] = -0.0, torch.nan, -torch.inf, -100, torch.nan
    builder = GroupBuilder()
    (size,) = builder.apply(OPS["abs"].function, [builder.add_input("x")])
    (top,) = builder.apply(reduction_function("amax", (1,), True), [size])
    group = builder.build([top])
    assert "highest.add(in0[u], true)" in fuser.debug_get_fused_kernel_code(group, [x], "cuda")
    (made,) = run_emulated(group, [x])
    wanted = x.abs().amax(1, keepdim=True)
    assert torch.equal(torch.nan_to_num(made, 7.0), torch.nan_to_num(wanted, 7.0))
    assert not torch.signbit(made[0])


@pytest.mark.cpu
@pytest.mark.parametrize("numerics", ["strict", "fast"])
def test_a_losss_gradient_adds_nothing_up(numerics: str) -> None:
    torch.manual_seed(0)
    x, target = torch.randn(9, 3000), torch.randint(3000, (9,))
    target[1] = -100
    y, total = x.log_softmax(1), torch.tensor(8.0)
    builder = GroupBuilder(numerics)
    names = [builder.add_input(name) for name in ("output", "grad", "target", "total")]
    ignored = builder.add_input("ignore_index", is_scalar=True)
    (dy,) = builder.apply(composite_function("nll_loss_backward", (False, 1)), names, [ignored])
    form = (1, "float32")
    group = builder.build(builder.apply(composite_function("_log_softmax_backward_data", form), [dy, names[0]]))
    grad = torch.tensor(-0.5)
    assert "fuser_combine" not in fuser.debug_get_fused_kernel_code(group, [y, grad, target, total, -100], "cuda")
    (dx,) = run_emulated(group, [y, grad, target, total, -100])
    wanted = torch.ops.aten.nll_loss_backward(grad, y, target, None, 1, -100, total)
    torch.testing.assert_close(dx, torch.ops.aten._log_softmax_backward_data(wanted, y, 1, torch.float32))


@pytest.mark.cpu
@pytest.mark.parametrize(("numerics", "shape"), [("fast", (3, 5000)), ("strict", (9, 30))])
def test_a_loss_reads_its_class_and_no_other(numerics: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x, target = torch.randn(shape) * 4, torch.randint(shape[1], shape[:1])
    target[1], x[0, int(target[0]) - 1] = -100, -torch.inf
    builder = GroupBuilder(numerics)
    (y,) = builder.apply(composite_function("_log_softmax", (1,)), [builder.add_input("x")])
    form = (False, 0, "float32", True, False)
    given = [builder.add_input("target")], [builder.add_input("ignore_index", is_scalar=True)]
    group = builder.build(builder.apply(composite_function("nll_loss_forward", form), [y, *given[0]], given[1]))
    text = fuser.debug_get_fused_kernel_code(group, [x, target, -100], "cuda")
    assert "void fuser_pick2(" in text
    assert "void fuser_element2(" not in text
    (loss,) = run_emulated(group, [x, target, -100])
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(x, target, reduction="none"))
    target[2] = shape[1]
    assert run_emulated(group, [x, target, -100])[0].isnan().nonzero().tolist() == [[2]]


@pytest.mark.cpu
def test_another_order_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuser.row_orders.find_schedule", lambda *args, **kwargs: Schedule(32, 1, 1, 2, 2))
    x = torch.randn(4, 1024) * 1000
    assert not torch.equal(run_emulated(centred("sum", (1,)), [x])[0], expected(x.abs(), "sum", (1,)))


def whole(order: str, factors: int = 0) -> FusionGroup:
    """abs(x), the sums of its rows in an order of softmax, the product of both; and, of any order, rows' maxima."""
    builder = GroupBuilder("strict")
    x = builder.add_input("x")
    (v,) = builder.apply(OPS["abs"].function, [x])
    for number in range(factors):
        (v,) = builder.apply(OPS["mul"].function, [v, builder.add_input(f"one{number}")])
    (s,) = builder.apply(total_function(1, order), [v])
    (top,) = builder.apply(reduction_function("amax", (1,), True), [x])
    return builder.build(
        [s, *builder.apply(OPS["mul"].function, [v, s]), *builder.apply(OPS["mul"].function, [v, top])]
    )


def check_softmax(
    order: str, shape: tuple[int, ...], dtype: torch.dtype, factors: int = 0, *, descending: bool = False
) -> None:
    torch.manual_seed(0)
    x = (torch.randn(shape) * torch.exp(2 * torch.randn(shape))).to(dtype)
    # Zeros of both signs: which is larger depends on the order, but is the same for the whole row.
    x[1:2] = torch.where(torch.rand(shape[1:]) < 0.5, -0.0, 0.0)
    given = [x, *[torch.ones_like(x)] * factors]
    total, product, scaled = run_emulated(whole(order, factors), given, descending=descending)
    layout = coalesce(shape, x.stride(), (1,))
    schedule = find_schedule(order, layout, x.element_size(), GpuSize(), is_aligned=True)
    assert schedule is not None
    rows = x.abs().to(total.dtype).movedim(1, -1).reshape(-1, shape[1])
    want = sum_rows(rows, schedule, torch.arange(len(rows)) * shape[1] % schedule.vector).view(total.shape)
    assert torch.equal(total, want)
    assert torch.equal(product, (x.abs() * want).to(product.dtype))
    assert torch.equal(scaled, x.abs() * x.amax(1, keepdim=True))
    signs = scaled[1:2].signbit()
    assert torch.equal(signs, signs[:, :1].expand_as(signs))


# Neighbours of one thread, rows that begin anywhere, rows of several blocks, columns, and rows of so many tensors that
# no thread keeps what it reads for several of torch's.
@pytest.mark.cpu
@pytest.mark.parametrize(
    ("order", "shape", "dtype", "factors"),
    [
        ("softmax", (3, 1000), torch.float32, 0),
        ("softmax", (9, 50), torch.float32, 0),
        ("softmax", (3, 10001), torch.bfloat16, 0),
        ("log_softmax_backward", (3, 32768), torch.float32, 0),
        ("softmax", (2, 100, 30), torch.bfloat16, 0),
        ("softmax_backward", (8, 2048), torch.float32, 5),
    ],
)
def test_kernels_keep_the_order_of_softmax(
    order: str, shape: tuple[int, ...], dtype: torch.dtype, factors: int
) -> None:
    check_softmax(order, shape, dtype, factors)


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape",
    [
        *((3, length) for length in (1, 3, 33, 1024, 1028, 2049, 4096, 9216, 10000, 12288, 12801, 20001, 66000)),
        (2, 9, 300), (1, 300, 3), (4, 64, 65),
    ],
)  # fmt: skip
@pytest.mark.parametrize("order", ["softmax", "softmax_backward"])
def test_kernels_keep_every_order_of_softmax(order: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_softmax(order, shape, dtype, descending=shape[1] % 2 == 0)


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("order", "shape", "dtype"),
    [
        ("softmax", (1, 4096 * 9), torch.float32),
        ("softmax", (1, 2048 * 9), torch.float64),
        pytest.param("log_softmax", (3, 4096 * 33), torch.float32, marks=pytest.mark.slow),
        pytest.param("softmax", (5, 8192 * 40), torch.bfloat16, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("descending", [False, True])
def test_blocks_share_what_torchs_threads_add_one_after_another(
    order: str, shape: tuple[int, ...], dtype: torch.dtype, descending: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fuser.ordered_access.LONG_CHAIN", 2)
    texts = list[str]()
    monkeypatch.setattr(ChainedText, "kernel", lambda self, write=ChainedText.kernel: texts.append("") or write(self))
    check_softmax(order, shape, dtype, descending=descending)
    assert len(texts) == 1


@pytest.mark.nvrtc
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_tiles_of_shared_rows_fit_in_shared_memory(dtype: torch.dtype) -> None:
    sources = kernel_sources(register(whole("softmax")), [torch.ones(2, 1 << 17, dtype=dtype)], "cuda")
    assert any("fuser_run tiles" in source.text for source in sources)
    assert all(backend.compile_cubin(source, "sm_90") for source in sources)


# What their threads wait with for each other takes more shared memory than a block has: the rest is another launch's.
@pytest.mark.cpu
@pytest.mark.nvrtc
def test_many_sums_of_long_rows_are_several_launches() -> None:
    builder = GroupBuilder("strict")
    x, sums = builder.add_input("x"), list[int]()
    for number in range(13):
        (value,) = builder.apply(
            Function(parse_functor(f"template <typename T> T f(T x) {{ return x + {number}; }}")), [x]
        )
        sums += builder.apply(reduction_function("sum", (1,), True), [value])
    group, given = builder.build(sums), torch.randn(3, 9000, dtype=torch.float64)
    sources = kernel_sources(register(group), [given], "cuda")
    assert len(sources) == 2
    assert all(backend.compile_cubin(source, "sm_90") for source in sources)
    made = run_emulated(group, [given])
    for number, total in enumerate(made):
        alone = run_emulated(builder.build(sums[number : number + 1]), [given]) if number % 12 == 0 else [total]
        assert torch.equal(total, alone[0])
        torch.testing.assert_close(total, (given + number).sum(1, keepdim=True))


def test_products_that_derivatives_make_are_not_contracted_with_what_adds_them_up() -> None:
    builder = GroupBuilder("strict")
    inputs = [builder.add_input(name) for name in ("x", "y")]
    product = parse_functor("template <typename T> T f(T x, T y) { return x * y; }")
    (made,) = builder.apply(Function(product, isolation=Isolation.NONE), inputs)
    group = builder.build(builder.apply(reduction_function("sum", (0,)), [made]))
    kernel = fuser.debug_get_fused_kernel_code(group, [torch.ones(300, 64)] * 2, "cuda")
    assert re.search(r"sum_map<float>\(fuser_isolate<\d+>\(fuser_cross\(", kernel)


# --- what is compared ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("shape", "dims"), [((4096, 4096), (1,)), ((40960, 64), (0,)), ((1000, 1001), (0,)), ((16, 64, 28, 28), (0, 2, 3))]
)
def test_what_is_compared_has_fewer_rows_and_the_same_order(shape: tuple[int, ...], dims: tuple[int, ...]) -> None:
    strides = torch.empty(shape, device="meta").stride()
    desc = TensorDesc(torch.Tensor, torch.bfloat16, shape, tuple(strides), CUDA)
    function = reduction_function("sum", dims)
    order = torchs_order(function, desc, dims, CUDA, 0)
    assert order is not None
    case = order_check.OrderCase(function, (order,), (desc,), torch.device("cpu"))
    resized, offset = case._resized()
    assert resized.shape[dims[0]] == shape[dims[0]]
    assert torch.empty(resized.shape, device="meta").numel() <= torch.empty(shape, device="meta").numel()
    for example in case.examples():
        (x,) = example.draw(torch.Generator().manual_seed(0))
        assert example.described == (describe(x),)
        assert x.shape == resized.shape
        found = torchs_order(function, resized._replace(strides=tuple(x.stride())), dims, CUDA, 0)
        assert found is not None
        assert order_check._kind_of(found) == order_check._kind_of(order)
    assert offset == 0


@pytest.mark.parametrize("mask", [(True, True, True), (False, True, True), (True, False, False)])
def test_norms_are_compared_with_as_many_rows_as_columns_take(mask: tuple[bool, ...]) -> None:
    function = composite_function("native_layer_norm_backward", ((40,), 3, True, True, True, mask))

    def desc(*shape: int) -> TensorDesc:
        strides = torch.empty(shape, device="meta").stride()
        return TensorDesc(torch.Tensor, torch.bfloat16, shape, tuple(strides), torch.device("cpu"))

    whole = (desc(200, 3001, 40), desc(200, 3001, 40), desc(200, 3001, 1), desc(200, 3001, 1), desc(40), desc(40))
    case = order_check.OrderCase(function, (), whole, torch.device("cpu"))
    fewer = [item.shape for item in case._fewer_rows()]
    rows = fewer[0][0] * fewer[0][1]
    assert order_check.LONG_COLUMN <= rows < 20000
    assert fewer == [(*fewer[0][:2], size) for size in (40, 40, 1, 1)] + [(40,), (40,)]


def test_balanced_rows_show_in_sixteen_bits() -> None:
    x = torch.randn(4, 3000) * torch.exp(2 * torch.randn(4, 3000))
    order_check._balance(x, (1,), torch.Generator().manual_seed(0))
    sums = [sum_rows(x, Schedule(32, accumulators=count, vector=count)).bfloat16() for count in (4, 8)]
    assert not torch.equal(*sums)
    assert x.double().sum(1).abs().max() < 1e-6 or x.shape[1] % 2


# --- where they are asked for ----------------------------------------------------------------------------------------
def test_strict_groups_take_sums_where_an_order_is_known() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(torch.relu(x).var(-1)) + torch.logsumexp(x, -1)

    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        inputs = {device: torch.empty(8, 300, device=device) for device in ("cuda", "cpu")}
    for device, x in inputs.items():
        graph = make_fx(step, tracing_mode="real")(x)
        fuser.fx.FusionPass()(graph)
        names = [str(node.target) for node in graph.graph.nodes if node.op in {"call_function", "call_module"}]
        for op, stays in (("var", False), ("logsumexp", device == "cpu")):
            assert any(op in name for name in names) == stays, (device, names)


@pytest.mark.cpu
def test_on_a_cpu_torchs_kernel_stays_quietly() -> None:
    spec = fuser.register_fusion(centred("sum", (1,)))
    x = torch.randn(2000, 30)
    fuser.reset_stats()
    total, product = fuser.run_fusion(spec, [x])
    assert torch.equal(total, x.abs().sum(1, keepdim=True))
    assert torch.equal(product, x.abs() * total)
    assert fuser.stats()["kept"] == 1
    assert not fuser.stats()["fallbacks"]


@pytest.mark.parametrize("numerics", ["strict", "fast"])
def test_which_kernel_is_written(numerics: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "numerics", numerics)
    text = fuser.debug_get_fused_kernel_code(centred("sum", (1,)), [torch.empty(64, 768)], device="cuda")
    assert ("fuser_halve_team<X" in text) == (numerics == "strict")


def test_an_order_is_part_of_a_group() -> None:
    add = parse_functor("template <typename T> T add(T a, T b) { return a + b; }")
    value = parse_functor("template <typename T> T value(T x) { return x; }")
    fma = parse_functor("template <typename T> T next(T a, T x) { return a + x * x; }")
    groups = []
    for reduction in (Reduction(add, (0,)), Reduction(add, (0,), order="sum"), Reduction(add, (0,), accumulate=fma)):
        builder = GroupBuilder()
        groups.append(builder.build(builder.apply(Function(value, reduction=reduction), [builder.add_input("x")])))
        assert FusionGroup.from_json(groups[-1].to_json()) == groups[-1]
    assert len({group.key for group in groups}) == 3
    wrong = groups[2].applications[0].function.reduction._replace(accumulate=value)
    builder = GroupBuilder()
    group = builder.build(builder.apply(Function(value, reduction=wrong), [builder.add_input("x")]))
    with pytest.raises(GroupError, match="does not add an element"):
        group.lint()


def test_edges_are_those_of_memory() -> None:
    def order(shape: tuple[int, ...], *, is_aligned: bool = True, source: int = 0) -> RowOrder | None:
        desc = TensorDesc(torch.Tensor, torch.float32, shape, (shape[1], 1), CUDA, is_aligned)
        return torchs_order(reduction_function("sum", (1,)), desc, (1,), CUDA, source)

    schedule = Schedule(32, 1, 1, 4, 4)
    assert order((4096, 1024)) == RowOrder(schedule)
    assert order((4096, 1024), is_aligned=False) == RowOrder(schedule, has_edges=True, source=0)
    assert order((4096, 1023)) == RowOrder(schedule, has_edges=True, source=0)
    assert order((4096, 1023), source=-1) == RowOrder(schedule, has_edges=True)


@pytest.mark.parametrize("op", ["_softmax", "_log_softmax"])
def test_what_has_the_dtype_already_lies_where_it_does(op: str) -> None:
    def order(dtype: torch.dtype, *into: str, is_aligned: bool = False) -> list[RowOrder | None]:
        builder = GroupBuilder("strict")
        group = builder.build(builder.apply(composite_function(op, (-1, *into)), [builder.add_input("x")]))
        desc = describe(torch.empty(4, 10000, dtype=dtype))._replace(device=CUDA, is_aligned=is_aligned)
        expanded = expand_call(register(group), [desc], CUDA, infer_layouts(group, value_layouts([desc])))
        return list(settle_orders(expanded, CUDA)[1].values())

    # In ATen it is the tensor itself.
    assert order(torch.float32, "float32") == order(torch.float32)
    assert order(torch.float32, is_aligned=True) != order(torch.float32)
    assert order(torch.bfloat16, "float32") != order(torch.float32)


def test_fast_numerics_take_torchs_order_along_odd_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours of a tree lie in other lanes there; short ones, and those of whole vectors, are added as a tree."""
    monkeypatch.setattr(config, "numerics", "fast")
    builder = GroupBuilder()
    (made,) = builder.apply(OPS["neg"].function, [builder.add_input("x")])
    spec = register(builder.build(builder.apply(reduction_function("sum", (1,)), [made])))
    narrow, wide = torch.bfloat16, torch.float32
    for length, dtype, is_torchs in (
        (513, narrow, True), (1023, wide, True), (2047, narrow, True), (2047, wide, False), (512, narrow, False),
        (127, narrow, False), (1000, wide, False),
    ):  # fmt: skip
        for device in ("cuda", "cpu"):
            given = torch.empty(64, length, dtype=dtype, device="meta")
            ((_, args),) = plan_texts(spec, [given], torch.device(device))
            assert (args.rows.order is not None) == (is_torchs and device == "cuda"), (length, dtype, device)
