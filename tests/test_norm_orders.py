"""Norms in ATen's order, without a GPU: kernels emulated on the CPU against what ATen's threads do, one by one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from cuda_emulation import run_emulated

import fuser
from fuser.compiler import register
from fuser.config import config
from fuser.cuda.aten_orders import GpuSize, Layout, find_schedule
from fuser.debug import kernel_sources
from fuser.errors import UnsupportedError
from fuser.graph import GroupBuilder
from fuser.ops import OPS, composite_function

pytestmark = pytest.mark.cpu

Item = tuple[torch.Tensor, ...]
Merge = Callable[[Item, Item], Item]


def add(a: Item, b: Item) -> Item:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def next_vector(a: Item, b: Item) -> Item:
    count, delta = a[2] + 1, b[0] - a[0]
    mean = a[0] + delta * (1 / count)
    return mean, a[1] + delta * (b[0] - mean), count


def merge_vector(own: Item, other: Item) -> Item:
    count, delta = own[2] + other[2], own[0] - other[0]
    by = torch.where(count > 0, 1 / count, 0)
    mean = other[2] * by * other[0] + own[2] * by * own[0]
    return mean, other[1] + own[1] + delta * delta * other[2] * (own[2] * by), count


def next_element(a: Item, b: Item) -> Item:
    count, delta = a[2] + 1, b[0] - a[0]
    mean = a[0] + delta / count
    return mean, a[1] + delta * (b[0] - mean), count


def merge_element(a: Item, b: Item) -> Item:
    count, delta = a[2] + b[2], b[0] - a[0]
    share = b[2] / count
    made = a[0] + delta * share, a[1] + b[1] + delta * delta * a[2] * share, count
    return tuple(torch.where(a[2] == 0, y, torch.where(b[2] == 0, x, z)) for x, y, z in zip(a, b, made, strict=True))


def fused(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return (a.double() * b + c).float()


def next_channel(a: Item, b: Item) -> Item:
    count, delta = a[2] + 1, b[0] - a[0]
    mean = fused(delta, 1 / count, a[0])
    return mean, a[1] + delta * (b[0] - mean), count


def merge_channel(a: Item, b: Item) -> Item:
    # Those of a thread, whose counts are no negative numbers, otherwise than those of threads.
    own, other, delta = a[2].abs(), b[2].abs(), a[0] - b[0]
    count = own + other
    factor = 1 / count.clamp(min=1)
    total = torch.where(b[2] < 0, fused(a[0], own, b[0] * other), fused(b[0], other, a[0] * own))
    return total * factor, a[1] + fused(delta * delta * other * own, factor, b[1]), -count


def next_plane(a: Item, b: Item) -> Item:
    count, delta = a[2] + 1, b[0] - a[0]
    mean = a[0] + delta / count
    return mean, fused(delta, b[0] - mean, a[1]), count


def merge_plane(a: Item, b: Item) -> Item:
    count, delta = a[2] + b[2], a[0] - b[0]
    factor = 1 / count.clamp(min=1)
    squares = a[1] + fused(delta * delta * a[2] * b[2], factor, b[1])
    return fused(a[2], a[0], b[0] * b[2]) * factor, squares, count


def add_product(a: Item, b: Item) -> Item:
    # Of two that are multiplied, and one that is not.
    return fused(b[0], b[1], a[0]), a[1] + b[2]


def as_threads_do(
    order: str, rows: Sequence[torch.Tensor], *, is_across: bool, step: Merge, merge: Merge, plane: int = 0
) -> Item:
    """What each row comes to: tensors [rows, length], one for each thing that is added up."""
    count, length = rows[0].shape
    layout = Layout(((length, count),), ((count, 1),)) if is_across else Layout(((length, 1),), ((count, length),))
    if plane:
        layout = Layout(((plane**2, 1), (length // plane**2, count * plane**2)), ((count, plane**2),))
    schedule = find_schedule(order, layout, 4, GpuSize(), is_aligned=True)
    assert schedule is not None
    # Elements of a plane are numbered as if there were a multiple of so many.
    pitch = schedule.pitch or 1
    several = 2 if step is add_product else len(rows) if merge is add else 3
    zero: Item = tuple(torch.zeros(count) for _ in range(several))
    own = [[zero] * schedule.accumulators for _ in range(schedule.slots)]
    for at in range(length):
        n = at if not plane else at // plane**2 * (-(-(plane**2) // pitch) * pitch) + at % plane**2
        slot, turn = n // schedule.vector % schedule.slots, n // (schedule.vector * schedule.slots)
        turn = n % schedule.vector if schedule.vector > 1 else turn
        held = own[slot]
        held[turn % len(held)] = step(held[turn % len(held)], tuple(row[:, at] for row in rows))
    threads = []
    for first, *others in own:
        for other in others:
            first = merge(first, other)
        threads.append(first)

    def halve(items: list[Item]) -> Item:
        while len(items) > 1:
            half = len(items) // 2
            items = [merge(a, b) for a, b in zip(items[:half], items[half:], strict=True)]
        return items[0]

    def rise(items: list[Item]) -> Item:
        # As many as a warp has.
        items = items + [zero] * (32 - len(items))
        while len(items) > 1:
            items = [merge(a, b) for a, b in zip(items[::2], items[1::2], strict=True)]
        return items[0]

    def of_block(items: list[Item]) -> Item:
        if schedule.rises:
            return rise([rise(items[at : at + schedule.x]) for at in range(0, len(items), schedule.x)])
        return halve([halve(items[at : at + schedule.x]) for at in range(0, len(items), schedule.x)])

    size = schedule.x * schedule.y
    blocks = [of_block(threads[at : at + size]) for at in range(0, len(threads), size)]
    if len(blocks) == 1:
        return blocks[0]
    last = [zero] * size
    for at, part in enumerate(blocks):
        last[at % size] = merge(last[at % size], part)
    return halve(last)


def run(op: str, form: tuple[Any, ...], **given: Any) -> list[torch.Tensor]:
    function = composite_function(op, form)
    builder = GroupBuilder()
    names = [item.name for item in function.functor.tensors]
    tensors = [builder.add_input(name) for name in names]
    scalars = [builder.add_input(item.name, is_scalar=True) for item in function.scalars]
    group = builder.build(builder.apply(function, tensors, scalars))
    numbers = {"eps": 1e-5, "momentum": 0.1}
    return run_emulated(group, [*(given[name] for name in names), *(numbers[item.name] for item in function.scalars)])


def wide(*shape: int) -> torch.Tensor:
    return torch.randn(shape) * torch.exp(torch.randn(shape))


def check_layer_norm(rows: int, width: int) -> None:
    torch.manual_seed(rows)
    x, dy, weight, bias = wide(rows, width), wide(rows, width), wide(width), wide(width)
    _, mean, rstd = run("native_layer_norm", ((width,), True, True, "", False), input=x, weight=weight, bias=bias)
    steps = (next_vector, merge_vector) if width % 4 == 0 else (next_element, merge_element)
    moments = as_threads_do("layer_norm", [x], is_across=False, step=steps[0], merge=steps[1])
    assert torch.equal(mean.flatten(), moments[0])
    torch.testing.assert_close(rstd.flatten(), (moments[1] / moments[2].abs() + 1e-5).rsqrt(), rtol=2e-7, atol=0)
    dx, dweight, dbias = run(
        "native_layer_norm_backward", ((width,), 2, True, True, True, (True, True, True)),
        grad_out=dy, input=x, mean=mean, rstd=rstd, weight=weight, bias=bias,
    )  # fmt: skip
    terms = [dy * weight, dy * weight * (x - mean) * rstd]
    first, second = as_threads_do("layer_norm_dx", terms, is_across=False, step=add, merge=add)
    want = width * weight * dy - (x - mean) * rstd * second[:, None] - first[:, None]
    assert torch.equal(dx, want * (1 / torch.tensor(float(width)) * rstd))
    columns = [(dy * (x - mean) * rstd).t(), dy.t()]
    totals = as_threads_do("gamma_beta", columns, is_across=True, step=add, merge=add)
    assert torch.equal(dweight, totals[0])
    assert torch.equal(dbias, totals[1])


def check_group_norm(batch: int, channels: int, groups: int, size: int) -> None:
    torch.manual_seed(batch)
    x, weight, bias = wide(batch, channels, size, size), wide(channels), wide(channels)
    _, mean, rstd = run("native_group_norm", (4, groups, True, True, True, "", True), input=x, weight=weight, bias=bias)
    rows = x.reshape(batch * groups, -1)
    moments = as_threads_do("group_norm", [rows], is_across=False, step=next_element, merge=merge_element)
    assert torch.equal(mean.flatten(), moments[0])
    torch.testing.assert_close(rstd.flatten(), (moments[1] / moments[2].abs() + 1e-5).rsqrt(), rtol=2e-7, atol=0)
    dy = wide(batch, channels, size, size)
    made = run(
        "native_group_norm_backward", (4, groups, True, True, (True, True, True)), grad_out=dy, input=x, mean=mean,
        rstd=rstd, weight=weight,
    )  # fmt: skip
    terms = [item.reshape(batch * channels, -1) for item in (dy, x, dy)]
    sums = as_threads_do("group_norm_sums", terms, is_across=False, step=add_product, merge=add)
    ds, db = (item.view(batch, groups, -1) for item in sums)
    terms = [item.flatten(1).t() for item in (fused(-db, mean[..., None], ds), rstd[..., None].expand(db.shape), db)]
    totals = as_threads_do("group_norm_batch", terms, is_across=True, step=add_product, merge=add)
    assert torch.equal(made[1], totals[0])
    assert torch.equal(made[2], totals[1])
    given, none = weight.view(groups, -1).expand(ds.shape), torch.zeros_like(ds)
    rows = [[item.flatten(0, 1) for item in (of, given, none)] for of in (ds, db)]
    s1, s2 = (as_threads_do("group_norm_sums", row, is_across=False, step=add_product, merge=add)[0] for row in rows)
    m, r, share = mean.flatten(), rstd.flatten(), 1 / torch.tensor(float(x.numel() // (batch * groups)))
    c2 = fused(s2, m, -s1) * r * r * r * share
    c3 = fused(-c2, m, -(s2 * r * share))
    c1 = (rstd[..., None] * weight.view(groups, -1)).view(batch, channels, 1, 1)
    c2, c3 = (c.view(batch, groups, 1).expand(ds.shape).reshape(c1.shape) for c in (c2, c3))
    assert torch.equal(made[0], fused(c1.expand(x.shape), dy, c2 * x) + c3)


def check_planes(batch: int, channels: int, size: int) -> None:
    torch.manual_seed(batch)
    x, dy = wide(batch, channels, size, size), wide(batch, channels, size, size)
    weight, bias = wide(2, channels)
    out, mean, rstd = run("batch_norm", (4, False, True, True, True, 3), input=x, weight=weight, bias=bias)
    rows, grads = (item.transpose(0, 1).reshape(channels, -1) for item in (x, dy))
    moments = as_threads_do(
        "batch_norm_planes", [rows], is_across=False, step=next_plane, merge=merge_plane, plane=size
    )
    assert torch.equal(mean, moments[0])
    torch.testing.assert_close(rstd, (moments[1] / moments[2].abs() + 1e-5).rsqrt(), rtol=2e-7, atol=0)
    m, r, w = (item.view(1, channels, 1, 1) for item in (mean, rstd, weight))
    assert torch.equal(out, w * (x - m) * r + bias.view(w.shape))
    made = run(
        "native_batch_norm_backward", (4, False, True, True, (True, True, True)), grad_out=dy, input=x, mean=mean,
        rstd=rstd, weight=weight,
    )  # fmt: skip
    terms = [rows - mean[:, None], grads, grads]
    order = "batch_norm_plane_sums"
    second, first = as_threads_do(order, terms, is_across=False, step=add_product, merge=add, plane=size)
    assert torch.equal(made[1], second * rstd)
    assert torch.equal(made[2], first)
    share = 1 / torch.tensor(float(rows.shape[1]))
    shift, slope = ((item * share).view(m.shape) for item in (first, second))
    assert torch.equal(made[0], (fused(-(slope * r * r), x - m, dy) - shift) * (r * w))


def check_batch_norm(batch: int, channels: int, size: int) -> None:
    torch.manual_seed(batch)
    x, dy = (wide(batch, channels, size, size).contiguous(memory_format=torch.channels_last) for _ in range(2))
    weight, bias = wide(2, channels)
    out, mean, rstd = run("batch_norm", (4, False, True, True, True, 3), input=x, weight=weight, bias=bias)
    rows, count = x.permute(1, 0, 2, 3).reshape(channels, -1), batch * size * size
    moments = as_threads_do("batch_norm", [rows], is_across=True, step=next_channel, merge=merge_channel)
    assert torch.equal(mean, moments[0])
    torch.testing.assert_close(rstd, (moments[1] / moments[2].abs() + 1e-5).rsqrt(), rtol=2e-7, atol=0)
    m, r, w = (item.view(1, channels, 1, 1) for item in (mean, rstd, weight))
    assert torch.equal(out, w * (x - m) * r + bias.view(w.shape))
    dx, dweight, dbias = run(
        "native_batch_norm_backward", (4, False, True, True, (True, True, True)), grad_out=dy, input=x, mean=mean,
        rstd=rstd, weight=weight,
    )  # fmt: skip
    terms = [item.permute(1, 0, 2, 3).reshape(channels, -1) for item in (dy, dy * (x - m))]
    first, second = as_threads_do("batch_norm_sums", terms, is_across=True, step=add, merge=add)
    assert torch.equal(dbias, first)
    assert torch.equal(dweight, second * rstd)
    share = 1 / torch.tensor(float(count))
    shift, slope = (item.view(m.shape) for item in (first * share, rstd * rstd * second * share))
    assert torch.equal(dx, (dy - shift - (x - m) * slope) * (w * r))


CASES: list[tuple[Callable[..., None], tuple[int, ...]]] = [
    (check_layer_norm, (300, 36)), (check_group_norm, (2, 8, 2, 8)), (check_batch_norm, (2, 5, 7)),
    (check_planes, (5, 3, 7)),
    (check_layer_norm, (5, 768)), (check_layer_norm, (70, 1001)), (check_layer_norm, (130, 1000)),
    (check_layer_norm, (40, 96)), (check_layer_norm, (19, 384)), (check_layer_norm, (9, 700)),
    (check_layer_norm, (3, 7)), (check_layer_norm, (1, 64)), (check_layer_norm, (1001, 1200)),
    (check_group_norm, (3, 64, 4, 16)),
    (check_group_norm, (2, 8, 2, 7)), (check_group_norm, (140, 4, 2, 5)), (check_group_norm, (1, 6, 3, 30)),
    (check_batch_norm, (4, 8, 9)), (check_batch_norm, (3, 40, 40)), (check_batch_norm, (2, 3, 70)),
    (check_planes, (3, 4, 32)), (check_planes, (5, 3, 8)), (check_planes, (4, 2, 16)),
    (check_planes, (3, 2, 28)), (check_planes, (33, 2, 7)), (check_planes, (9, 3, 14)),
    (check_planes, (2, 3, 56)),
]  # fmt: skip


@pytest.fixture(autouse=True)
def small_tensors_are_divided_as_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuser.ordered_access.MANY_ELEMENTS", 0)
    monkeypatch.setattr("fuser.ordered_access.ENOUGH_THREADS", 0)


@pytest.mark.parametrize(("check", "sizes"), CASES[:4])
def test_norms_do_what_threads_do(check: Callable[..., None], sizes: tuple[int, ...]) -> None:
    check(*sizes)


@pytest.mark.slow
@pytest.mark.parametrize(("check", "sizes"), CASES[4:])
def test_norms_of_other_sizes_do_what_threads_do(check: Callable[..., None], sizes: tuple[int, ...]) -> None:
    check(*sizes)


def test_counts_divide_what_is_close_to_zero_or_infinite(monkeypatch: pytest.MonkeyPatch) -> None:
    # Where a quotient made in few operations may be none, elements are added again: in registers, and read in chunks.
    torch.manual_seed(0)
    x = wide(2, 5, 32, 32) * torch.tensor([1, 1e-30, 1e-37, 1e-43, 0]).view(1, 5, 1, 1)
    x[:, 0, :19] = 0
    x[-1, 1, -1, -1] = math.inf
    rows = x.transpose(0, 1).reshape(5, -1)
    want = as_threads_do("batch_norm_planes", [rows], is_across=False, step=next_plane, merge=merge_plane, plane=32)
    for most, in_flight, enough in ((32, 128, 0), (1, 128, 0), (1, 16, 0), (1, 16, 1 << 16)):
        monkeypatch.setattr("fuser.ordered_access.MOST_ELEMENTS", most)
        monkeypatch.setattr("fuser.ordered_access.ENOUGH_THREADS", enough)
        monkeypatch.setattr("fuser.ordered_access.IN_FLIGHT_BYTES", in_flight)
        _, mean, _ = run("batch_norm", (4, False, False, False, True, 3), input=x)
        assert torch.equal(mean, want[0])


def test_counts_of_fast_numerics_divide_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # By an inverse that all elements of a thread with that number have in common: as close as torch's order is. Rows
    # that registers keep, or that are few, have another order then.
    monkeypatch.setattr("fuser.row_orders._suits_tree", lambda *_: False)
    torch.manual_seed(0)
    x = wide(2, 5, 32, 32)
    rows = x.transpose(0, 1).reshape(5, -1).double()
    errors = []
    for numerics in ("strict", "fast"):
        monkeypatch.setattr(config, "numerics", numerics)
        _, mean, rstd = run("batch_norm", (4, False, False, False, True, 3), input=x)
        exact = rows.var(1, correction=0).add(1e-5).rsqrt()
        errors.append(torch.stack([(mean - rows.mean(1)).abs() / rows.std(1), (rstd / exact - 1).abs()]).max())
    assert errors[1] < 2 * errors[0] + 2**-22
    builder = GroupBuilder("fast")
    handles = [builder.add_input("input"), builder.add_input("eps", is_scalar=True)]
    group = builder.build(
        builder.apply(composite_function("batch_norm", (4, False, False, False, True, 3)), handles[:1], handles[1:])
    )
    text = kernel_sources(register(group), [x, 1e-5], "cuda")[0].text
    assert "fuser_rough_count(" in text.partition("__global__")[2]
    assert "is_exact" not in text.partition("__global__")[2]


# What registers hold between walks; what blocks hold together; fewer channels than processors; longer ones; odd planes.
@pytest.mark.parametrize(
    ("sizes", "walks_once", "is_shared"),
    [
        ((64, 512, 14, 14), False, False), ((64, 256, 56, 56), False, True), ((32, 256, 128, 128), False, True),
        ((64, 64, 112, 112), False, False), ((65, 256, 128, 128), True, False), ((128, 512, 49, 49), True, False),
    ],
    ids=str,
)  # fmt: skip
def test_order_of_fast_batch_norms(sizes: tuple[int, ...], walks_once: bool, is_shared: bool) -> None:
    builder = GroupBuilder("fast")
    x, eps = builder.add_input("input"), builder.add_input("eps", is_scalar=True)
    function = composite_function("batch_norm", (4, False, False, False, True, 3))
    group = builder.build(builder.apply(function, [x], [eps]))
    given = [torch.empty(sizes, dtype=torch.bfloat16, device="meta"), 1e-5]
    texts = [source.text.partition("__global__")[2] for source in kernel_sources(register(group), given, "cuda")]
    assert any("fuser_rough_count(" in text for text in texts) == walks_once
    assert any("__cluster_dims__" in text for text in texts) == is_shared


# Planes whose rows of threads are not full: what is not there is read elsewhere, by all threads alike. The more there
# is on its way, the more planes at a time, or parts of one.
@pytest.mark.cpu
@pytest.mark.parametrize("size", [7, 14, 25, 30, 46])
def test_planes_that_are_no_multiple_of_threads(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x = wide(3, 5, size, size)
    rows = x.transpose(0, 1).reshape(5, -1)
    want = as_threads_do("batch_norm_planes", [rows], is_across=False, step=next_plane, merge=merge_plane, plane=size)
    for most, enough, in_flight in ((32, 0, 128), (1, 0, 128), (1, 1 << 16, 128), (1, 0, 64), (1, 0, 4)):
        monkeypatch.setattr("fuser.ordered_access.MOST_ELEMENTS", most)
        monkeypatch.setattr("fuser.ordered_access.ENOUGH_THREADS", enough)
        monkeypatch.setattr("fuser.ordered_access.IN_FLIGHT_BYTES", in_flight)
        out, mean, rstd = run("batch_norm", (4, False, False, False, True, 3), input=x)
        assert torch.equal(mean, want[0])
        torch.testing.assert_close(rstd.double(), (rows.double().var(1, correction=0) + 1e-5).rsqrt())
        torch.testing.assert_close(out, torch.nn.functional.batch_norm(x, None, None, training=True))


# Their products are doubles, too, where they are not contracted.
@pytest.mark.parametrize("numerics", ["strict", "fast"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_moments_of_doubles_are_doubles(layout: torch.memory_format, numerics: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 3, 9, 9, dtype=torch.float64).contiguous(memory_format=layout)
    with config.patch(numerics=numerics):
        _, mean, rstd = run("batch_norm", (4, False, False, False, True, 3), input=x)
    torch.testing.assert_close(mean, x.mean((0, 2, 3)), rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(rstd, (x.var((0, 2, 3), correction=0) + 1e-5).rsqrt(), rtol=1e-14, atol=0)


# ATen has kernels of its own where a channel of a batch is one element, in whatever number of dimensions.
@pytest.mark.parametrize("sizes", [(3, 8), (3, 8, 1), (3, 8, 1, 1)], ids=str)
@pytest.mark.parametrize("op", ["native_group_norm", "native_group_norm_backward"])
def test_group_norms_of_single_elements_are_torchs(op: str, sizes: tuple[int, ...]) -> None:
    last = ("", True) if op == "native_group_norm" else ((True, False, False),)
    form = (len(sizes), 2, True, False, *(False,) * (len(last) == 2), *last)
    given = {name: wide(*sizes) for name in ("input", "grad_out")} | {name: wide(3, 2) for name in ("mean", "rstd")}
    with pytest.raises(UnsupportedError, match="torch's own order") as caught:
        run(op, form, **given)
    assert caught.value.is_expected


# Where squares are beyond float32 the deviation is infinite, and what is divided by it nothing: in two passes, too.
@pytest.mark.cpu
def test_squares_that_are_infinite_divide_to_zero() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4, 6, 6) * 1e25
    forms: dict[str, tuple[Any, ...]] = {
        "native_layer_norm": ((6,), False, False, "", False),
        "native_group_norm": (4, 2, True, False, False, "", True),
        "batch_norm": (4, False, False, False, True, 3),
    }
    for op, form in forms.items():
        with config.patch(numerics="fast"):
            out, mean, rstd = run(op, form, input=x)
        assert mean.isfinite().all()
        assert not rstd.any()
        assert not out.any()
    with config.patch(numerics="fast"):
        made = fuser.fuse(lambda x: torch.nn.functional.layer_norm(x * 2, (6, 6)))(x)
    assert not made.any()


def test_statistics_of_what_many_tensors_make_up_are_added_up_by_all_threads() -> None:
    """Rows of which no thread can hold so much as it takes to do what several of torch's do."""
    torch.manual_seed(0)
    x, builder = wide(5, 64), GroupBuilder()
    value = builder.add_input("x")
    for number in range(8):
        (value,) = builder.apply(OPS["mul"].function, [value, builder.add_input(f"one{number}")])
    form, eps = ((64,), False, True, False), builder.add_input("eps", is_scalar=True)
    _, rstd = builder.apply(composite_function("_fused_rms_norm", form), [value], [eps])
    (made,) = run_emulated(builder.build([rstd]), [x, *[torch.ones_like(x)] * 8, 1e-5])
    assert torch.equal(made, run("_fused_rms_norm", form, input=x)[1])
