"""Kernels with reductions on the CPU: values, the canonical order bit for bit, layouts, threads, shared launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody uses
from functors import assert_same, draw, poison, unpoison
from reduction_cases import (
    ADD,
    INFINITY,
    VALUE,
    alone,
    composition,
    functor,
    in_order,
    largest,
    mean_and_variance,
    normalised,
    place_of_largest,
    softmax,
    total,
)
from tiers import SLOW

import fuser
from fuser.combining import Reduction
from fuser.config import config
from fuser.function import Function
from fuser.graph import FusionGroup, GroupBuilder
from fuser.ops import OPS

pytestmark = pytest.mark.cpu

# Around the sizes of chunks and batches.
LENGTHS = (1, 2, 3, 7, 31, 100, 1023, 1024, 1025, 2049, 4097, 5000, 8191, 8192, 8193, 20000, 65537)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    poison()
    yield
    unpoison()


def run(group: FusionGroup, *inputs: Any, launches: int = 1) -> list[torch.Tensor]:
    fuser.reset_stats()
    results = fuser.run_fusion(fuser.register_fusion(group), list(inputs))
    assert not fuser.stats()["fallbacks"]
    assert fuser.stats()["launches"] == launches
    return results


def sum_in_order(x: torch.Tensor) -> torch.Tensor:
    return in_order([x], lambda a, b: (a + b,), (0.0,))[0]


@pytest.mark.parametrize("length", LENGTHS)
def test_a_sum_has_the_canonical_order_along_rows_and_columns(length: int) -> None:
    x = draw((3, length), torch.float32)
    wanted = sum_in_order(x)
    assert torch.equal(run(alone(total((-1,))), x)[0], wanted)
    columns = x.t().contiguous()
    assert torch.equal(run(alone(total((0,))), columns)[0], wanted)
    # One row alone, or beside more than there are lanes.
    assert torch.equal(run(alone(total((0,))), columns[:, 1:2])[0], wanted[1:2])
    assert torch.equal(run(alone(total((0,))), columns.repeat(1, 50))[0], wanted.repeat(50))
    assert torch.equal(run(alone(total()), x[2])[0], wanted[2])


def test_parts_without_a_partner_meet_the_identity_in_any_layout() -> None:
    # Not associative, but for nothing with nothing: what it comes to says which parts were combined.
    tree = functor(
        "int64_t tree(int64_t a, int64_t b) {"
        " return a == 0 && b == 0 ? 0 : int64_t(uint64_t(a) * 31337u + uint64_t(b) * 271u + 1u); }"
    )
    leaf = functor("int64_t leaf(T x) { return int64_t(x); }")

    def combine(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.where((a == 0) & (b == 0), 0, a * 31337 + b * 271 + 1),)

    def reduced(dim: int) -> FusionGroup:
        return alone(Function(leaf, out_dtypes=(torch.int64,), reduction=Reduction(tree, (0,), None, (dim,))))

    for length in (3, 5, 6, 13, 100, 1025, 8195, 20000):
        x = torch.randint(1, 1000, (40, length))
        (wanted,) = in_order([x], combine, (0,))
        for rows in (1, 3, 40):
            assert torch.equal(run(reduced(1), x[:rows])[0], wanted[:rows])
            assert torch.equal(run(reduced(0), x[:rows].t().contiguous())[0], wanted[:rows])


@pytest.mark.slow
def test_several_dimensions_count_as_one_in_row_major_order() -> None:
    x = draw((5, 7, 11, 13), torch.float32)
    for dims in ((0, 2), (1, 3), (0, 2, 3)):
        kept = [dim for dim in range(4) if dim not in dims]
        rows = x.permute(*kept, *dims).reshape(*[x.shape[dim] for dim in kept], -1)
        wanted = sum_in_order(rows)
        for own in (
            x,
            x.contiguous(memory_format=torch.channels_last),
            x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        ):
            assert torch.equal(run(alone(total(dims)), own)[0], wanted)
            kept_dims = run(alone(total(dims, keepdim=True)), own)[0]
            assert torch.equal(kept_dims, wanted.reshape([1 if dim in dims else x.shape[dim] for dim in range(4)]))


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_change_nothing(threads: int) -> None:
    # Few long rows, which threads share, and many, of which each has its own.
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for shape in ((2, 300_000), (700, 900), (1, 1_000_001)):
            x = draw(shape, torch.float32)
            assert torch.equal(run(alone(total((1,))), x)[0], sum_in_order(x))
            assert torch.equal(run(alone(total((0,))), x.t().contiguous())[0], sum_in_order(x))
    finally:
        torch.set_num_threads(before)


def test_what_comes_first_stays_first() -> None:
    a, b = draw((4, 9000), torch.float64, (0.99, 1.01)), draw((4, 9000), torch.float64, seed=1)
    wanted = in_order([a, b], lambda a, b, c, d: (a * c, c * b + d), (1.0, 0.0))
    for got, own in zip(run(alone(composition((1,)), 2), a, b), wanted, strict=True):
        assert torch.equal(got, own)
    x = torch.zeros(4, dtype=torch.float64)
    for step in range(9000):
        x = a[:, step] * x + b[:, step]
    torch.testing.assert_close(wanted[1], x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_welford_and_argmax_have_several_accumulators(dtype: torch.dtype) -> None:
    x = draw((6, 12345), dtype)
    mean, var = run(alone(mean_and_variance((1,))), x)
    assert mean.dtype == dtype
    tolerance = 4 * torch.finfo(dtype).eps if dtype is not torch.float64 else 1e-13
    torch.testing.assert_close(mean.double(), x.double().mean(1), rtol=0, atol=3 * tolerance)
    torch.testing.assert_close(var.double(), x.double().var(1, correction=0), rtol=tolerance, atol=0)
    places = torch.arange(12345)
    (found,) = run(alone(place_of_largest((1,)), 2), x, places)
    assert found.dtype == torch.int64
    assert torch.equal(x.gather(1, found[:, None])[:, 0], x.amax(1))
    # The first of equals.
    first = torch.where(x == x.amax(1, keepdim=True), places, 2**62).amin(1)
    assert torch.equal(found, first)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("shape", "dims", "dtype"),
    [
        ((33, 1000), (1,), torch.float32),
        ((2000, 70), (0,), torch.bfloat16),
        pytest.param((4, 9, 5, 6), (0, 2, 3), torch.float32, marks=SLOW),
        pytest.param((9, 8), (1,), torch.bfloat16, marks=SLOW),
        pytest.param((2000, 70), (0,), torch.float32, marks=SLOW),
        pytest.param((33, 1000), (1,), torch.bfloat16, marks=SLOW),
    ],
)
def test_softmax_is_one_launch_with_the_bits_of_its_parts(
    shape: tuple[int, ...], dims: tuple[int, ...], dtype: torch.dtype, tier: int
) -> None:
    x = draw(shape, dtype)
    group = softmax(dims)
    layouts = (x, x.transpose(0, -1).contiguous().transpose(0, -1), x.repeat_interleave(2, -1)[..., ::2])
    for own in layouts if tier == 3 else layouts[::2]:
        got = run(group, own, -1)
        values = [own, -1]
        for item in group.applications:
            inputs = [values[value] for value in (*item.tensors, *item.scalars)]
            builder = GroupBuilder()
            handles = [builder.add_input(f"x{slot}") for slot in range(len(item.tensors))]
            scalars = [builder.add_input(f"s{slot}", is_scalar=True) for slot in range(len(item.scalars))]
            values += run(builder.build(builder.apply(item.function, handles, scalars)), *inputs)
        for one, value in zip(got, group.outputs, strict=True):
            assert torch.equal(one, values[value])
        exact = own.double()
        torch.testing.assert_close(got[2].double(), exact.amax(dims, keepdim=True), rtol=0, atol=0)
        power = (exact - exact.amax(dims, keepdim=True)).exp()
        tolerance = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(
            got[0].double(), power / power.sum(dims, keepdim=True), rtol=tolerance, atol=tolerance
        )


def test_a_norm_reads_rows_columns_and_whole_tensors() -> None:
    group = normalised((1,))
    x, y = draw((40, 300), torch.float32), draw((40, 1), torch.float32, seed=1)
    weight, bias = draw((300,), torch.float32, seed=2), draw((1, 300), torch.float32, seed=3)
    result, mean = run(group, x, y, weight, bias)
    exact = torch.nn.functional.layer_norm((x * y).double(), (300,), weight.double(), bias[0].double())
    torch.testing.assert_close(result.double(), exact, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mean.double(), (x * y).double().mean(1, keepdim=True), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e5m2]
)
def test_other_dtypes(dtype: torch.dtype) -> None:
    values = draw((5, 900), torch.float32)
    x = values.to(dtype) if not dtype.is_complex else torch.complex(values, values.flip(1)).to(dtype)
    (got,) = run(alone(total((1,))), x)
    assert got.dtype == dtype
    if dtype.is_complex:
        torch.testing.assert_close(got, x.sum(1), rtol=1e-5, atol=1e-5)
    elif dtype.is_floating_point:
        assert torch.equal(got.float(), sum_in_order(x.float()).to(dtype).float())
    else:
        assert torch.equal(got, x.any(1) if dtype is torch.bool else x.sum(1).to(dtype))


def test_infinity_is_an_integers_end() -> None:
    for dtype in (torch.int8, torch.uint8, torch.int32, torch.int64):
        x = torch.full((3, 5), torch.iinfo(dtype).min, dtype=dtype)
        assert torch.equal(run(alone(largest((1,))), x)[0], x[:, 0])
        assert run(alone(largest((1,))), x[:, :0])[0].tolist() == [torch.iinfo(dtype).min] * 3


def test_nothing_comes_to_the_identity() -> None:
    assert run(alone(total((1,))), torch.empty(3, 0))[0].tolist() == [0.0] * 3
    assert run(alone(largest((0,))), torch.empty(0, 2))[0].tolist() == [-INFINITY] * 2
    assert run(alone(total((0,))), torch.empty(4, 0), launches=0)[0].shape == (0,)
    assert run(alone(total()), torch.tensor(3.0))[0].item() == 3.0
    assert run(alone(total((), keepdim=True)), torch.empty(0), launches=0)[0].shape == (0,)


def test_finish_takes_scalars_and_the_number_of_elements() -> None:
    finish = functor("T mean(T t, int64_t n, T alpha) { return t / T(n) * alpha; }", scalars=("alpha",))
    function = Function(VALUE, reduction=Reduction(ADD, (0,), finish, (1,), counts=True))
    builder = GroupBuilder()
    group = builder.build(
        builder.apply(function, [builder.add_input("x")], [builder.add_input("alpha", is_scalar=True)])
    )
    x = draw((4, 6, 50), torch.float64)
    torch.testing.assert_close(run(group, x, 2.5)[0], x.mean(1) * 2.5)


def test_results_without_their_dimensions_go_on_among_themselves() -> None:
    builder = GroupBuilder()
    x, weight = builder.add_input("x"), builder.add_input("weight")
    (row,) = builder.apply(total((1,)), [x])
    (scaled,) = builder.apply(OPS["mul"].function, [row, weight])
    (power,) = builder.apply(OPS["exp"].function, [scaled])
    x_, weight_ = draw((6, 6), torch.float32), draw((6,), torch.float32, seed=1)
    got = run(builder.build([power, row]), x_, weight_)
    assert torch.equal(got[1], sum_in_order(x_))
    torch.testing.assert_close(got[0], (sum_in_order(x_) * weight_).exp())
    # With the whole tensor they broadcast as torch has it, which is not along the row: a second launch.
    (mixed,) = builder.apply(OPS["mul"].function, [x, row])
    (got_mixed,) = run(builder.build([mixed]), x_, weight_, launches=2)
    assert torch.equal(got_mixed, x_ * sum_in_order(x_))


def test_reductions_of_leading_dimensions_broadcast_back() -> None:
    builder = GroupBuilder()
    x = builder.add_input("x")
    (column,) = builder.apply(total((0,)), [x])
    (product,) = builder.apply(OPS["mul"].function, [x, column])
    x_ = draw((50, 7), torch.float32)
    assert torch.equal(run(builder.build([product]), x_)[0], x_ * sum_in_order(x_.t()))


def test_what_does_not_fit_together_is_launched_apart() -> None:
    builder = GroupBuilder()
    x = builder.add_input("x")
    (rows,) = builder.apply(total((1,)), [x])
    (columns,) = builder.apply(total((0,)), [x])
    x_ = draw((60, 7), torch.float32)
    got = run(builder.build([rows, columns]), x_, launches=2)
    assert torch.equal(got[0], sum_in_order(x_))
    assert torch.equal(got[1], sum_in_order(x_.t()))


def test_reductions_of_one_row_share_a_pass() -> None:
    builder = GroupBuilder()
    x = builder.add_input("x")
    outputs = [*builder.apply(total((1,)), [x]), *builder.apply(largest((1,)), [x])]
    outputs += builder.apply(mean_and_variance((1,)), [x])
    x_ = draw((9, 3000), torch.float32)
    got = run(builder.build(outputs), x_)
    assert torch.equal(got[0], sum_in_order(x_))
    assert torch.equal(got[1], x_.amax(1))
    torch.testing.assert_close(got[3], x_.var(1, correction=0))


def test_out_and_strided_results() -> None:
    x = draw((30, 40), torch.float32)
    key = fuser.register_fusion(alone(total((1,))))
    wanted = sum_in_order(x)
    function = fuser.fuse(lambda x: torch.relu(x).amax(1) * 2)
    out = torch.full((60,), 7.0)[::2]
    function(x, out=out)
    assert torch.equal(out, torch.relu(x).amax(1) * 2)
    assert torch.equal(fuser.run_fusion(key, [x])[0], wanted)


def test_out_may_be_an_input_that_a_later_pass_reads() -> None:
    builder = GroupBuilder()
    x = builder.add_input("x")
    (double,) = builder.apply(OPS["mul"].function, [x, x])
    (row,) = builder.apply(total((1,), keepdim=True), [double])
    (scaled,) = builder.apply(OPS["mul"].function, [x, row])
    module = fuser.fx.FusionModule(builder.build([double, scaled]))
    x_ = draw((20, 3000), torch.float32)
    wanted = [item.clone() for item in module(x_)]
    for _ in range(3):
        given = x_.clone()
        got = fuser.route.run(module.spec, [given], [given, torch.empty_like(given)])
        assert torch.equal(got[0], wanted[0])
        assert torch.equal(got[1], wanted[1])
        assert got[0] is given


def test_a_number_is_not_reduced() -> None:
    builder = GroupBuilder()
    number, x = builder.add_input("number"), builder.add_input("x")
    (summed,) = builder.apply(total((0,)), [number])
    key = fuser.register_fusion(builder.build(builder.apply(OPS["mul"].function, [x, summed])))
    fuser.reset_stats()
    with pytest.raises(fuser.errors.ArgumentError, match="needs at least one tensor"):
        fuser.run_fusion(key, [2.0, draw((4,), torch.float32)])
    assert not fuser.stats()["fallbacks"]


class TestFuse:
    """torch's reductions inside fused functions."""

    def test_a_row_scale_is_one_launch_with_torchs_bits(self) -> None:
        @fuser.fuse
        def scale(x: torch.Tensor) -> Any:
            y = torch.relu(x) * 2
            top = y.abs().amax(-1, keepdim=True)
            return (y / top).to(torch.float16), top

        x = draw((50, 1000), torch.float32)
        fuser.reset_stats()
        got, top = scale(x)
        assert fuser.stats()["launches"] == 1
        assert not fuser.stats()["fallbacks"]
        y = torch.relu(x) * 2
        assert torch.equal(top, y.abs().amax(-1, keepdim=True))
        assert torch.equal(got, (y / top).to(torch.float16))

    @pytest.mark.one_in(2)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int8, torch.bool])
    def test_what_has_one_result_in_any_order_fuses(self, dtype: torch.dtype) -> None:
        @fuser.fuse
        def reduce(x: torch.Tensor) -> Any:
            y = x.logical_not()
            return y.any(), y.all(0), y.any(1, keepdim=True), torch.amax(x, (0, 1)), x.amin(-1), torch.count_nonzero(x)

        x = draw((21, 33), dtype)
        fuser.reset_stats()
        for got, wanted in zip(reduce(x), reduce.function(x), strict=True):
            assert torch.equal(got, wanted)
            assert got.dtype == wanted.dtype
        assert not fuser.stats()["fallbacks"]

    @pytest.mark.one_in(3)
    @pytest.mark.parametrize("name", "sum prod mean amax amin any all count_nonzero".split())
    def test_every_name_in_fast_numerics(self, name: str) -> None:
        # As a function, a method and, where torch has one of this form, an ATen overload.
        x = draw((6, 7), torch.float32, (0.5, 1.5))
        calls = [getattr(torch, name), lambda x, **options: getattr(x, name)(**options)]
        overloads = {"sum": "dim_IntList", "mean": "dim", "any": "dims", "all": "dims", "amax": "default"}
        if name in overloads:
            overload = getattr(getattr(torch.ops.aten, name), overloads[name])
            calls.append(lambda x, dim=None, **options: overload(x, [0, 1] if dim is None else [dim], **options))
        with fuser.config.patch(numerics="fast"):
            for call in calls:
                for form in (
                    lambda x, call=call: call(x, dim=1),
                    lambda x, call=call: call(x),
                    lambda x, call=call: call(x, dim=0, **({} if name == "count_nonzero" else {"keepdim": True})),
                ):
                    fused = fuser.fuse(lambda x, form=form: form(x * 1) * 1)
                    fuser.reset_stats()
                    got, wanted = fused(x), form(x) * 1
                    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
                    assert got.dtype == wanted.dtype
                    assert got.stride() == wanted.stride()
                    assert fuser.stats()["launches"] == 1
                    assert not fuser.stats()["fallbacks"]

    def test_strict_leaves_float_sums_to_torch_and_fast_does_not(self) -> None:
        @fuser.fuse
        def centre(x: torch.Tensor) -> Any:
            return (x - x.mean(-1, keepdim=True)) * torch.rsqrt((x * x).sum(-1, keepdim=True))

        x = draw((20, 500), torch.float32)
        assert torch.equal(centre(x), (x - x.mean(-1, keepdim=True)) * torch.rsqrt((x * x).sum(-1, keepdim=True)))
        with fuser.config.patch(numerics="fast"):
            fuser.reset_stats()
            got = centre(x)
            assert fuser.stats()["launches"] == 1
            torch.testing.assert_close(got, centre.function(x))
        fuser.reset_stats()
        assert torch.equal(centre(x), centre.function(x))

    def test_a_dimension_among_the_arguments_is_a_constant_of_the_trace(self) -> None:
        @fuser.fuse
        def scale(x: torch.Tensor, dim: int, options: dict[str, Any]) -> Any:
            return torch.relu(x) / x.abs().amax(dim, keepdim=True), x.argmax(dim=options["dim"]) + dim

        x = draw((6, 50), torch.float32)
        for dim, other in ((1, 0), (0, 1), (-1, -1), (1, 0)):
            fuser.reset_stats()
            arguments = x, dim, {"dim": other}
            for got, wanted in zip(scale(*arguments), scale.function(*arguments), strict=True):
                assert torch.equal(got, wanted)
            assert fuser.stats()["launches"] == (1 if dim == other else 2)
        with pytest.raises(IndexError, match="Dimension out of range"):
            scale(x, 2, {"dim": 0})

    def test_an_error_of_torchs_stays_one(self) -> None:
        function = fuser.fuse(lambda x: torch.relu(x).amax(1))
        with pytest.raises(IndexError, match="non-zero size"):
            function(torch.empty(3, 0))
        with pytest.raises(IndexError, match="Dimension out of range"):
            fuser.fuse(lambda x: torch.relu(x).amax(5))(torch.ones(3, 4))

    @pytest.mark.parametrize("name", ["amax", "argmax", "argmin", "max", "min"])
    def test_a_dimension_out_of_range_is_said_in_torchs_words(self, name: str) -> None:
        fused = fuser.fuse(lambda x: getattr(torch.relu(x), name)(5))
        said = []
        for function in (fused, fused.function):
            with pytest.raises(IndexError) as raised:
                function(torch.ones(3, 4))
            said.append(str(raised.value))
        assert said[0] == said[1]

    @pytest.mark.parametrize(
        "form",
        [
            # What has no dimension left is weak in promotion, whichever dimensions were named.
            lambda x: x.double().amax((0, 1)) * x,
            lambda x: (x * 2).long().amax(0).amax(-1) + x.int(),
            # Of no dimensions, any is that of each element.
            lambda x: torch.any(x * 2, dim=()),
            lambda x: (x * 2).count_nonzero((0, 1)),
            lambda x: (x * 2).max() - x.min(),
            # A result without keepdim beside a whole tensor, which was not reduced.
            lambda x: (x * 2).amax(1) + (x > 0).any(0, keepdim=True),
            lambda x: (x.sin() > 0).any(1) + x.cos(),
        ],
    )
    @pytest.mark.parametrize("numerics", ["strict", pytest.param("fast", marks=pytest.mark.slow)])
    def test_forms_that_are_easily_taken_for_others(self, form: Any, numerics: str) -> None:
        x = draw((5, 5), torch.float32)
        with fuser.config.patch(numerics=numerics):
            got, wanted = fuser.fuse(form)(x), form(x)
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
        assert got.dtype == wanted.dtype
        assert got.stride() == wanted.stride()

    @pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float64])
    def test_a_sum_that_says_its_dtype(self, dtype: torch.dtype) -> None:
        x = draw((4, 50), torch.float32)
        with fuser.config.patch(numerics="fast"):
            got = fuser.fuse(lambda x: (x * 2).sum(1, dtype=dtype))(x)
        wanted = (x * 2).sum(1, dtype=dtype)
        assert got.dtype == dtype
        torch.testing.assert_close(got, wanted)

    def test_autocast_is_torchs(self) -> None:
        x = draw((4, 50), torch.bfloat16)
        function = fuser.fuse(lambda x: (x * 2).prod(1))
        with fuser.config.patch(numerics="fast"):
            assert function(x).dtype == torch.bfloat16
            with torch.autocast("cpu", torch.bfloat16):
                assert function(x).dtype == function.function(x).dtype

    def test_sums_and_means_in_fast_numerics_have_derivatives(self) -> None:
        x = draw((4, 50), torch.float64)
        with fuser.config.patch(numerics="fast"):
            for form in (lambda x: (x * 2).sum(1), lambda x: (x * x).mean(1)):
                fused = fuser.fuse(form)
                assert torch.allclose(torch.vmap(fused)(torch.stack([x, x])), torch.vmap(form)(torch.stack([x, x])))
                assert torch.allclose(torch.func.jvp(fused, (x,), (x,))[1], torch.func.jvp(form, (x,), (x,))[1])
                module = torch.fx.symbolic_trace(form)
                graph = fuser.fx.fuse_graph(module)
                given = x.clone().requires_grad_()
                got = torch.autograd.grad(graph(given).sum(), given)[0]
                assert torch.allclose(got, torch.autograd.grad(form(given).sum(), given)[0])
        count = fuser.fuse(lambda x: (x * 2).count_nonzero(1))
        assert torch.equal(torch.func.jvp(count, (x,), (x,))[0], x.count_nonzero(1))

    def test_gradients_pass_through(self) -> None:
        function = fuser.fuse(lambda x: torch.relu(x * 3).amax(1, keepdim=True) * x)
        x = draw((6, 50), torch.float32).requires_grad_()
        got = torch.autograd.grad(function(x).square().sum(), x)[0]
        assert torch.equal(got, torch.autograd.grad(function.function(x).square().sum(), x)[0])

    def test_compiled_training_uses_them(self) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.GELU())
        x = draw((8, 16), torch.float32)
        compiled = torch.compile(model, backend="fuser")
        wanted = torch.compile(model, backend="aot_eager")(x).amax(1).sum()
        wanted_grads = torch.autograd.grad(wanted, list(model.parameters()))
        got = compiled(x).amax(1).sum()
        assert torch.allclose(got, wanted)
        for one, other in zip(torch.autograd.grad(got, list(model.parameters())), wanted_grads, strict=True):
            torch.testing.assert_close(one, other)


# Torch's own, of a row, and of what is made of it: sums in fast numerics, and what is the same in any order.
OWN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda x: torch.softmax(x * 2, -1),
    "softmax and more": lambda x: (lambda y: y * (y + x).amax(-1, keepdim=True))(torch.softmax(x, -1)),
    "sum": lambda x: (x * 2).sum(-1),
    "layer_norm": lambda x: F.layer_norm(F.gelu(x), x.shape[-1:]),
    "logsumexp": lambda x: torch.logsumexp(x * 2, -1),
    "extremes": lambda x: (x * 2).amax(-1) - (x * 2).amin(-1),
    "two dimensions": lambda x: (x.view(len(x), -1, 1).expand(-1, -1, 3)[:, :, 1:] * 2).sum((1, 2)),
    "stretches": lambda x: F.pad(x, (0, 7 - x.shape[1] % 7)).view(len(x), -1, 7)[:, :, :5].exp().sum((1, 2)),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("length", [33, 50, 200, 255, 256, 257, 300, 1023, 1024, 1025, 5000, 8191, 8193, 20000])
@pytest.mark.parametrize("name", OWN)
def test_long_rows_in_any_order_are_as_exact_as_torchs(name: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "numerics", "fast")
    function = OWN[name]
    fused = fuser.fuse(lambda x: function(x))
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = draw((5, length), dtype, seed=length)
        found, before = [], torch.get_num_threads()
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(fused(x))
        torch.set_num_threads(before)
        assert_same(*found)
        exact, made = function(x.double()), function(x)
        assert (found[0].shape, found[0].stride(), found[0].dtype) == (made.shape, made.stride(), made.dtype)
        own, torchs = ((item.double() - exact).abs().max() for item in (found[0], made))
        # Of float64 nothing is more exact: some roundings are both's.
        assert own <= 2 * torchs + 8 * torch.finfo(dtype).eps * exact.abs().max()


# A sum of short rows, where any order serves, and a user's, whose parts are joined as they come where rows are long.
@pytest.mark.parametrize(("name", "length"), [("sum", 50), ("sum", 300), ("ordered", 50), ("ordered", 300)])
def test_vectors_are_taken_apart_once_per_row_where_any_order_serves(
    name: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "numerics", "fast")
    x = draw((5, length), torch.float32)
    if name == "sum":
        fused = fuser.fuse(OWN[name])
        torch.testing.assert_close(fused(x), OWN[name](x))
        text = fuser.debug_get_fused_kernel_code(fused.groups[0], [x])
    else:
        text = fuser.debug_get_fused_kernel_code(alone(total((1,))), [x])
    assert ("float all" in text) == (name == "sum")
    assert ("fuser_quarter0(a, all" in text) == (name == "sum" and length == 300)
    assert ("fuser_join0" in text) == (name == "ordered" and length == 300)


def test_tiles_of_what_is_near_are_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    """And change nothing."""
    monkeypatch.setattr(config, "numerics", "fast")
    x = draw((2400, 60), torch.float32)
    fused = fuser.fuse(OWN["softmax"])
    whole = fused(x)
    assert "a.numel <= 131072 * threads ? 4096 : 1024" in fuser.debug_get_fused_kernel_code(fused.groups[0], [x])
    assert_same(whole[:2000], fused(x[:2000]))
