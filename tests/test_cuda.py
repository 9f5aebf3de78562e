"""On a GPU: the functor table, bit equality with jiterator and with torch's own kernels, streams, capture, training."""

from __future__ import annotations

import functools
import gc
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accuracy import distance
from functors import (
    BY_NAME,
    CASES,
    Case,
    as_tuple,
    assert_accurate,
    assert_same,
    draw,
    expected_of,
    functor,
    inputs_of,
    poison,
    same_bits,
    special_tensor,
    unpoison,
)

import fuser
from fuser.function import Promotion
from fuser.kernel_spec import MAX_OUTPUTS
from fuser.ops import OPS

pytestmark = pytest.mark.cuda

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
UNPOISONED = {
    "test_more_than_2_to_the_31_elements", "test_current_stream", "test_graph_capture", "test_threads",
    "test_training_follows_eager", "test_capture_after_warmup_alone", "test_streams_one_after_another",
    "test_a_first_call_inside_a_capture_says_what_to_do", "test_streams_and_capture_on_another_device",
}  # fmt: skip


@pytest.fixture(autouse=True)
def poisoned_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    # Filling new memory is a launch of its own, which the tests of capture and of huge tensors do without.
    if request.node.originalname in UNPOISONED:
        yield
        return
    poison()
    yield
    unpoison()


def launched(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[int, Any]:
    before = fuser.stats()["launches"]
    result = function(*args, **kwargs)
    return fuser.stats()["launches"] - before, result


# --- the table ------------------------------------------------------------------------------------------------------
def check(case: Case, inputs: list[torch.Tensor]) -> None:
    count, got = launched(functor(case.name), *inputs)
    got = as_tuple(got)
    assert count == (1 if got[0].numel() else 0)
    dtype = functools.reduce(torch.promote_types, (item.dtype for item in inputs))
    for mine, theirs in zip(got, expected_of(case, inputs, dtype), strict=True):
        assert mine.device == inputs[0].device
        assert mine.dtype == dtype
        assert_accurate(mine, theirs, case.ulps, case.name)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [pytest.param(case, dtype, id=f"{case}-{str(dtype)[6:]}") for case in CASES for dtype in case.dtypes],
)
def test_dtypes(case: Case, dtype: torch.dtype) -> None:
    check(case, inputs_of(case, dtype, (3, 67), "cuda"))


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "sliced": lambda x: x[1::2, ::3],
    "offset": lambda x: x.reshape(-1)[1:],
    "offset_by_three": lambda x: x.reshape(-1)[3:-5],
    "expanded": lambda x: x[:, :1].expand(-1, 5),
    "channels_last": lambda x: x.reshape(2, 4, 2, -1).contiguous(memory_format=torch.channels_last),
    "permuted": lambda x: x.reshape(4, 8, -1).permute(2, 0, 1),
    "zero_dim": lambda x: x[0, 0],
    "empty": lambda x: x[:0],
    "row": lambda x: x[:1],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, dtype: torch.dtype) -> None:
    for name in ("axpy", "median3"):
        case = BY_NAME[name]
        inputs = [LAYOUTS[layout](item) for item in inputs_of(case, dtype, (16, 34), "cuda")]
        check(case, inputs)
        model = inputs[0] + inputs[0]
        assert functor(name)(*inputs).stride() == model.stride()
        assert functor(name)(*inputs).shape == model.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mixed_layouts_and_broadcasts(dtype: torch.dtype) -> None:
    x, y = draw((64, 48), dtype, seed=1, device="cuda"), draw((48, 64), dtype, seed=2, device="cuda").t()
    row, column = x[:1], y[:, :1]
    one = draw((1,), dtype, seed=3, device="cuda")
    for left, right in ((x, y), (y, x), (x, row), (column, x), (column, row), (one, y), (x[:, ::2], y[:, 1::2])):
        got = functor("axpy")(left, right)
        assert_accurate(got, expected_of(BY_NAME["axpy"], [left, right], dtype)[0], BY_NAME["axpy"].ulps)
        assert got.stride() == torch.add(left, right).stride()


def test_numbers_and_zero_dim_cpu_tensors() -> None:
    x = draw((5, 7), torch.bfloat16, device="cuda")
    before = fuser.stats()["fallbacks"]
    assert_same(functor("axpy")(x, torch.tensor(2.5), alpha=1), x + 2.5)
    assert_same(functor("axpy")(torch.tensor(2.5, dtype=torch.float64), x, alpha=1), 2.5 + x)
    assert_same(functor("axpy")(x, 3, alpha=1), x + 3)
    assert_same(fuser.fuse(lambda x, k: x * k + k)(x, torch.tensor(1.5)), (x * 1.5) + 1.5)
    ints = draw((5, 7), torch.int16, device="cuda")
    assert_same(functor("axpy")(ints, torch.tensor(3), alpha=1), ints + 3)
    assert fuser.stats()["fallbacks"] == before


# --- the promise ----------------------------------------------------------------------------------------------------
def chain(call: Callable[..., Any], x: Any, y: Any, z: Any) -> Any:
    """Six functors full of multiply-adds; ``call(name, *tensors, **scalars)`` applies one."""
    a = call("axpy", x, y, alpha=1.7)
    b = call("mix", a, call("sigmoid", z), w=0.3)
    c = call("axpy", b, call("gelu", a), alpha=-0.7)
    return call("axpy", c, call("horner", z), alpha=0.1), c


def by_functor(name: str, *tensors: Any, **scalars: Any) -> Any:
    return functor(name)(*tensors, **scalars)


def by_jiterator(name: str, *tensors: Any, **scalars: Any) -> Any:
    return jiterated(name)(*tensors, **scalars)


@functools.cache
def jiterated(name: str) -> Any:
    case = BY_NAME[name]
    # jiterator takes no comment before the template.
    code = case.code[case.code.index("template") :]
    if case.outputs > 1:
        return torch.cuda.jiterator._create_multi_output_jit_fn(code, case.outputs, **case.scalars)
    return torch.cuda.jiterator._create_jit_fn(code, **case.scalars)


fused_chain = fuser.fuse(lambda x, y, z: chain(by_functor, x, y, z))


def chain_inputs(dtype: torch.dtype, shape: tuple[int, ...] = (257, 1031)) -> list[torch.Tensor]:
    return [draw(shape, dtype, seed=seed, device="cuda") for seed in range(3)]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64], ids=str)
def test_chain_equals_functor_by_functor(dtype: torch.dtype) -> None:
    inputs = chain_inputs(dtype)
    count, got = launched(fused_chain, *inputs)
    assert count == 1
    assert_same(got, chain(by_functor, *inputs))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_chain_equals_jiterator(dtype: torch.dtype) -> None:
    inputs = chain_inputs(dtype, (256, 1024))
    assert_same(fused_chain(*inputs), chain(by_jiterator, *inputs))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "case",
    [case for case in CASES if torch.float32 in case.dtypes and case.code.lstrip().startswith("template")],
    ids=str,
)
def test_each_functor_equals_jiterator(case: Case, dtype: torch.dtype) -> None:
    inputs = inputs_of(case, dtype, (3, 1031), "cuda")
    assert_same(functor(case.name)(*inputs), jiterated(case.name)(*inputs), case.name)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_special_values(dtype: torch.dtype) -> None:
    special = special_tensor(dtype).cuda()
    x, y, z = (item.contiguous() for item in torch.meshgrid(special, special, special, indexing="ij"))
    assert_same(fused_chain(x, y, z), chain(by_functor, x, y, z))


CONTRACTED = (
    "template <typename T> T nmsub(T x, T y) { return T(1) - x * y; }",
    "template <typename T> T msub(T x, T y) { return x * y - T(0.3); }",
    "template <typename T> T two(T x, T y) { return x * y - y * T(0.7); }",
    "template <typename T> T product(T x, T y) { return x * y; }",
    "template <typename T> T rest(T x, T y) { return y - x; }",
)


def second_on_first(first: Callable[..., Any], second: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, y: second(first(x, y), y)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64], ids=str)
def test_contraction_stays_inside_a_functor(dtype: torch.dtype) -> None:
    # Every order of two functors, the second on the first one's result: a product and the sum it ends in are in one
    # functor, or in two.
    # Whole blocks: in the tail of its last block, jiterator rounds the product of 1 - x * y, and elsewhere it does not.
    x, y = chain_inputs(dtype, (256, 1024))[:2]
    mine = [fuser.create_jit_fn(text) for text in CONTRACTED]
    theirs = [torch.cuda.jiterator._create_jit_fn(text) for text in CONTRACTED]
    for first, first_theirs in zip(mine, theirs, strict=True):
        assert same_bits(first(x, y), first_theirs(x, y)), first
        for second, second_theirs in zip(mine, theirs, strict=True):
            count, got = launched(fuser.fuse(second_on_first(first, second)), x, y)
            assert count == 1
            assert same_bits(got, second_theirs(first_theirs(x, y), y)), f"{first} then {second}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_value_does_not_depend_on_where_it_is(dtype: torch.dtype) -> None:
    inputs = chain_inputs(dtype, (40000,))
    whole = fused_chain(*inputs)
    for start, stop in ((0, 1), (1, 18), (3, 16387), (5, 40000), (39967, 40000)):
        for mine, theirs in zip(fused_chain(*(item[start:stop] for item in inputs)), whole, strict=True):
            assert same_bits(mine, theirs[start:stop]), f"{start}:{stop}"
    grid = [item.view(200, 200) for item in inputs]
    for variant in (
        [item.t().contiguous().t() for item in grid],
        [grid[0].t().contiguous().t(), *grid[1:]],
        [torch.stack([item, item], -1)[..., 0] for item in grid],
    ):
        for mine, theirs in zip(fused_chain(*variant), whole, strict=True):
            assert same_bits(mine, theirs.view(200, 200))


# --- torch's own ops ------------------------------------------------------------------------------------------------
UNARY_EQUAL: dict[str, Callable[[Any], Any]] = {
    "sigmoid": torch.sigmoid, "tanh": torch.tanh, "exp": torch.exp, "neg": torch.neg, "abs": torch.abs,
    "sqrt": lambda x: torch.sqrt(abs(x)), "relu": torch.relu, "clamp": lambda x: torch.clamp(x, -0.5, 0.5),
    "clamp_min": lambda x: torch.clamp(x, min=0.25), "x + 2": lambda x: x + 2, "x * 2.5": lambda x: x * 2.5,
}  # fmt: skip
BINARY_EQUAL: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: torch.add(x, y), "add(alpha)": lambda x, y: torch.add(x, y, alpha=1.7),
    "sub": lambda x, y: x - y, "mul": lambda x, y: x * y, "maximum": torch.maximum, "minimum": torch.minimum,
    "where": lambda x, y: torch.where(x > y, x, y), "lt": lambda x, y: x < y, "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y, "ge": lambda x, y: x >= y, "eq": lambda x, y: x == y, "ne": lambda x, y: x != y,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64], ids=str)
@pytest.mark.parametrize("name", [*UNARY_EQUAL, *BINARY_EQUAL])
def test_ops_equal_torchs_kernels(name: str, dtype: torch.dtype) -> None:
    special = special_tensor(dtype).cuda()
    x = torch.cat([draw((100003,), dtype, (-6.0, 6.0), seed=1, device="cuda"), special.repeat(len(special))])
    y = torch.cat([draw((100003,), dtype, (-6.0, 6.0), seed=2, device="cuda"), special.repeat_interleave(len(special))])
    function = UNARY_EQUAL.get(name) or BINARY_EQUAL[name]
    args = (x,) if name in UNARY_EQUAL else (x, y)
    # torch.fx of torch 2.11 traces no builtin function.
    traced = (lambda x: function(x)) if name in UNARY_EQUAL else (lambda x, y: function(x, y))
    count, got = launched(fuser.fuse(traced), *args)
    assert count == 1
    wanted = function(*args)
    assert got.dtype == wanted.dtype
    assert torch.equal(
        got.nan_to_num(nan=1.25, posinf=2.5, neginf=-2.5), wanted.nan_to_num(nan=1.25, posinf=2.5, neginf=-2.5)
    )
    if got.dtype.is_floating_point:
        assert torch.equal(got.isnan(), wanted.isnan())


def with_exponent(exponent: float) -> Callable[[Any], Any]:
    return lambda x: x**exponent


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64], ids=str)
@pytest.mark.parametrize(
    "exponent", [0, 1, 2, 3, 0.5, -0.5, -1, -2, 4, -3, 10, 2.5, 1.7, 2.001, -2.001], ids=lambda number: f"{number}"
)
def test_powers_equal_torchs_kernel(exponent: float, dtype: torch.dtype) -> None:
    """ATen has formulas for some exponents, which it may meet when the exponent is rounded to the dtype."""
    sizes = torch.exp2(draw((50001,), torch.float64, (-0.9, 0.9), seed=1) * math.log2(torch.finfo(dtype).max))
    near = draw((50001,), dtype, (-6.0, 6.0), seed=2)
    x = torch.cat([near, (sizes * near.double().sign()).to(dtype), special_tensor(dtype)]).cuda()
    wanted = x**exponent
    for function, arguments in ((with_exponent(exponent), (x,)), (lambda x, n: x**n, (x, exponent))):
        count, got = launched(fuser.fuse(function), *arguments)
        # A first power alone is torch's copy.
        assert count == (0 if exponent == 1 and len(arguments) == 1 else 1)
        assert same_bits(got, wanted)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["sigmoid_backward", "tanh_backward"])
def test_backward_ops_round_their_steps_as_torchs(name: str, dtype: torch.dtype) -> None:
    special = special_tensor(dtype)
    g, y = (item.flatten() for item in torch.meshgrid(special, special, indexing="ij"))
    g = torch.cat([draw((100003,), dtype, (-6.0, 6.0), seed=1), g]).cuda()
    y = torch.cat([draw((100003,), dtype, (-1.0, 1.0), seed=2), y]).cuda()
    builder = fuser.GroupBuilder()
    key = fuser.register_fusion(builder.build(builder.apply(OPS[name].function, [builder.add_input(x) for x in "gy"])))
    count, (got,) = launched(fuser.run_fusion, key, [g, y])
    assert count == 1
    assert same_bits(got, OPS[name].eager(g, y))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64], ids=str)
@pytest.mark.parametrize(
    "name", [name for name, op in OPS.items() if "float" in op.kinds and not op.function.is_conversion]
)
def test_every_op_has_the_bits_of_torchs_kernel(name: str, dtype: torch.dtype) -> None:
    function = OPS[name].function
    builder = fuser.GroupBuilder()
    tensors = [builder.add_input(item.name) for item in function.functor.tensors]
    scalars = [builder.add_input(item.name, is_scalar=True) for item in function.functor.scalars]
    key = fuser.register_fusion(builder.build(builder.apply(function, tensors, scalars)))
    values: list[Any] = [
        draw((100003,), dtype, (-4.0, 4.0), seed=place, device="cuda") for place in range(len(tensors))
    ]
    for place, item in enumerate(function.functor.tensors):
        if item.type == "bool":
            values[place] = values[place] > 2
    if name in ("div_number", "div_trunc_number", "pow_number"):
        values[1] = 1.7
    elif name == "clamp":
        values[1:] = [0.5, 2.5]
    elif "entropy" in name:
        # Of probabilities.
        values[:2] = [item.abs() / 4 for item in values[:2]]
    if name in ("tril", "triu"):
        places = torch.arange(len(values[0]) // 317 * 317, device="cuda")
        values = [values[0][: len(places)].view(-1, 317), (places // 317).view(-1, 317), (places % 317).view(-1, 317)]
    numbers = [0.75, 1.5, 2.25][: len(scalars)]
    if scalars and function.functor.scalars[0].name == "norm":
        # What a mean's is, which torch's op works out.
        numbers[0] = (2.0 if name.startswith("mse") else 1.0) / len(values[0])
    numbers = [
        1 if item.type == "int64_t" else number for item, number in zip(function.functor.scalars, numbers, strict=True)
    ]
    before = fuser.stats()["launches"]
    got = fuser.run_fusion(key, [*values, *numbers])[0]
    assert fuser.stats()["launches"] == before + 1
    wanted = OPS[name].eager(
        *values, **dict(zip((item.name for item in function.functor.scalars), numbers, strict=True))
    )
    assert got.dtype == wanted.dtype
    if not got.dtype.is_floating_point:
        assert torch.equal(got, wanted)
        return
    assert int(distance(got, wanted).max()) == 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64], ids=str)
def test_ops_on_integers_are_torchs(dtype: torch.dtype) -> None:
    """All ops that keep integers or test them, as many in one launch as it may have outputs."""
    kind, bounds = ("bool", (0, 2)) if dtype is torch.bool else ("int", (-100, 100))
    served = [op for op in OPS.values() if kind in op.kinds and op.function.promotion is Promotion.DEFAULT]
    served = [op for op in served if not op.function.is_conversion and not op.function.unpromoted]
    given = [draw((5003,), dtype, bounds, seed=place, device="cuda") for place in range(3)]
    for some in (served[begin : begin + MAX_OUTPUTS] for begin in range(0, len(served), MAX_OUTPUTS)):
        builder = fuser.GroupBuilder()
        places = [builder.add_input(name) for name in "xyz"]
        results: list[int] = []
        for op in some:
            functor = op.function.functor
            numbers = [
                builder.add_input(item.name, is_scalar=True, default=number_for(item.name)) for item in functor.scalars
            ]
            results += builder.apply(op.function, places[: len(functor.tensors)], numbers)
        key = fuser.register_fusion(builder.build(results))
        count, got = launched(fuser.run_fusion, key, given)
        assert count == 1
        for op, mine in zip(some, got, strict=True):
            functor = op.function.functor
            scalars = {item.name: number_for(item.name) for item in functor.scalars}
            wanted = op.eager(*given[: len(functor.tensors)], **scalars)
            assert mine.dtype == wanted.dtype, op.name
            assert torch.equal(mine, wanted), op.name


def number_for(name: str) -> int:
    # torch subtracts no multiple below zero of unsigned integers.
    return -1 if name == "minus_alpha" else 1


# --- sizes, streams, capture, threads, devices ----------------------------------------------------------------------
def test_more_than_2_to_the_31_elements() -> None:
    length = 2**31 + 5
    free, _ = torch.cuda.mem_get_info()
    if free < 4 * length:
        pytest.skip("needs 8 GiB of GPU memory")
    x = torch.ones(length, dtype=torch.int8, device="cuda")
    x[-3:] = 7
    out = functor("axpy")(x, x, alpha=2)
    assert out[-6:].tolist() == [3, 3, 3, 21, 21, 21]
    assert out[:3].tolist() == [3, 3, 3]
    out -= 3
    # Every other element is right too.
    assert int(torch.count_nonzero(out)) == 3
    del out
    # The same beyond the first launch dimension: rows and a broadcast.
    wide = functor("axpy")(x[: 2**31].view(2**16, 2**15), x[: 2**15], alpha=2)
    assert int((wide != 3).any(0).sum()) == 0


def returns_at_once(call: Callable[[], Any]) -> bool:
    """Whether a call comes back while the current stream is busy; a busy host is given longer and longer."""
    for cycles in (50_000_000, 500_000_000, 4_000_000_000):
        torch.cuda._sleep(cycles)
        call()
        event = torch.cuda.Event()
        event.record()
        if not event.query():
            return True
    return False


def test_current_stream() -> None:
    x = draw((1 << 20,), torch.float32, device="cuda")
    # The same calls once before: loading a kernel may wait for the device.
    wanted = functor("sigmoid")(x * 2 * 0.5)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results: list[torch.Tensor] = []
        # What the kernel reads is written in this stream, behind the sleep.
        assert returns_at_once(lambda: results.append(functor("sigmoid")(x * 2 * 0.5)))
    stream.synchronize()
    assert all(torch.equal(got, wanted) for got in results)


def test_graph_capture() -> None:
    fused = fuser.fuse(lambda x, y: functor("axpy")(functor("sigmoid")(x), y, alpha=0.5) * 2)
    x, y = (draw((1000, 33), torch.float32, seed=seed, device="cuda") for seed in (1, 2))
    fused.warmup(x, y)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fused(x, y)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = fused(x, y)
    x.copy_(draw((1000, 33), torch.float32, seed=7))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(got, fused(x, y))


def test_capture_after_warmup_alone() -> None:
    # A group that no other test has: nothing but warmup() compiles and loads it.
    own = fuser.create_jit_fn("template <typename T> T only_captured(T x, T y) { return x * T(3) - y; }")
    fused = fuser.fuse(lambda x, y: own(torch.sigmoid(x), y))
    x, y = (draw((257, 33), torch.float32, seed=seed, device="cuda") for seed in (1, 2))
    fused.warmup(x, y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = fused(x, y)
    for seed in (7, 8):
        x.copy_(draw((257, 33), torch.float32, seed=seed))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, fused(x, y))


def test_a_first_call_inside_a_capture_says_what_to_do() -> None:
    own = fuser.create_jit_fn("template <typename T> T first_captured(T x) { return x * T(5) - T(2); }")
    x = draw((100,), torch.float32, device="cuda")
    # What other tests left must not be freed in the middle of the capture, which that may end.
    gc.collect()
    with (
        pytest.raises(fuser.errors.CaptureError, match=r"first_captured .* warmup\(\)"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        own(x)
    torch.cuda.synchronize()
    # The capture is over, and the call works: nothing half-made is left.
    wanted = own(x)
    assert torch.allclose(wanted, x * 5 - 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = own(x)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(got, wanted)


def test_streams_one_after_another() -> None:
    # Each launch goes to the stream that is current when it is made, also when the call's plan is known.
    sigmoid, x = functor("sigmoid"), draw((1 << 16,), torch.float32, device="cuda")
    sigmoid(x)
    streams = [torch.cuda.Stream() for _ in range(3)]
    results: list[tuple[int, torch.Tensor]] = []
    for place, stream in enumerate(streams * 2):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Written in this stream, behind the sleep; in memory that held other values before.
            assert returns_at_once(lambda place=place: results.append((place, sigmoid(x + place))))
    torch.cuda.synchronize()
    assert all(torch.equal(item, sigmoid(x + place)) for place, item in results)


def test_threads() -> None:
    own = fuser.jit_fn("template <typename T> T from_many_threads(T x, T k) { return x * k + T(1); }", scalars={"k": 2})
    x = draw((4096,), torch.float32, device="cuda")
    torch.cuda.synchronize()
    before = fuser.stats()["compiles"] + fuser.stats()["cache_hits"]
    results: list[torch.Tensor | Exception] = []
    barrier = threading.Barrier(16)

    def work() -> None:
        barrier.wait()
        try:
            result = own(x, k=3.0)
            torch.cuda.synchronize()
            results.append(result)
        except Exception as error:
            results.append(error)

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fuser.stats()["compiles"] + fuser.stats()["cache_hits"] >= before + 1
    assert len(results) == 16
    wanted = own(x, k=3.0)
    assert torch.allclose(wanted, 3 * x + 1, atol=1e-6)
    for result in results:
        assert isinstance(result, torch.Tensor), result
        assert torch.equal(result, wanted)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_other_devices() -> None:
    x = draw((1000,), torch.float32, device="cuda:1")
    assert torch.cuda.current_device() == 0
    got = functor("sigmoid")(x)
    assert got.device == x.device
    assert torch.cuda.current_device() == 0
    assert torch.allclose(got, torch.sigmoid(x))
    with torch.cuda.device(1):
        y = draw((1000,), torch.float32, device="cuda:0")
        assert functor("sigmoid")(y).device == y.device
        assert torch.cuda.current_device() == 1
    with pytest.raises(fuser.errors.DeviceError, match="cuda:0"):
        functor("axpy")(x, y)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_streams_and_capture_on_another_device() -> None:
    axpy = functor("axpy")
    x, y = (draw((1000,), torch.float32, seed=seed, device="cuda:1") for seed in (1, 2))
    wanted = axpy(x, y)
    stream = torch.cuda.Stream(1)
    stream.wait_stream(torch.cuda.current_stream(1))
    with torch.cuda.stream(stream):
        got = axpy(x, y)
    with torch.cuda.stream(stream), torch.cuda.device(0):
        other = axpy(x, y)
    torch.cuda.synchronize(1)
    assert torch.equal(got, wanted)
    assert torch.equal(other, wanted)
    assert torch.cuda.current_device() == 0
    with torch.cuda.device(1):
        graph = torch.cuda.CUDAGraph()
        # Torch's own stream for captures is of the device that captured first in this process.
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(1)):
            captured = axpy(x, y)
        x.fill_(2.0)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, axpy(x, y))


@pytest.mark.parametrize("count", [100, 200])
def test_many_inputs_are_cut_into_several_launches(count: int) -> None:
    builder = fuser.GroupBuilder()
    inputs = [builder.add_input(f"x{place}") for place in range(count)]
    total = inputs[0]
    for other in inputs[1:]:
        (total,) = builder.apply(OPS["maximum"].function, [total, other])
    tensors = [
        draw((4, 1, 33) if seed % 2 else (7, 33), torch.float32, seed=seed, device="cuda") for seed in range(count)
    ]
    before = fuser.stats()
    (got,) = fuser.run_fusion(fuser.register_fusion(builder.build([total])), tensors)
    assert fuser.stats()["launches"] - before["launches"] == -(-count // 63)
    assert fuser.stats()["fallbacks"] == before["fallbacks"]
    wanted = functools.reduce(torch.maximum, tensors)
    assert_same(got, wanted)


def test_a_cpu_tensor_beside_a_cuda_tensor_raises() -> None:
    x = draw((5,), torch.float32, device="cuda")
    with pytest.raises(RuntimeError, match="same device"):
        functor("axpy")(x, x.cpu())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_autocast_is_torchs(dtype: torch.dtype) -> None:
    def step(x: Any, y: Any) -> Any:
        return torch.exp(x) + y, x**2.0, torch.sigmoid(x) * torch.log1p(y * y), 1.0 / (x * x + 1)

    fused = fuser.fuse(step)
    x, y = (draw((33, 65), dtype, seed=seed, device="cuda") for seed in (1, 2))
    for narrow in (torch.float16, torch.bfloat16):
        with torch.autocast("cuda", dtype=narrow):
            got, wanted = fused(x, y), step(x, y)
        assert [item.dtype for item in got] == [item.dtype for item in wanted]
        for mine, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(mine, theirs)
    assert [item.dtype for item in fused(x, y)] == [dtype] * 4


# --- out=, training -------------------------------------------------------------------------------------------------
def test_out() -> None:
    x, y = (draw((33, 65), torch.float32, seed=seed, device="cuda") for seed in (1, 2))
    wanted = functor("axpy")(x, y)
    out = torch.empty_like(x)
    assert functor("axpy")(x, y, out=out) is out
    assert torch.equal(out, wanted)
    strided = torch.empty(65, 33, device="cuda").t()
    functor("axpy")(x, y, out=strided)
    assert torch.equal(strided, wanted)
    shifted = torch.empty(33 * 65 + 1, device="cuda")[1:].view(33, 65)
    functor("axpy")(x, y, out=shifted)
    assert torch.equal(shifted, wanted)
    double = torch.empty(33, 65, device="cuda", dtype=torch.float64)
    functor("axpy")(x, y, out=double)
    assert torch.equal(double, wanted.double())
    mine = x.clone()
    functor("axpy")(mine, y, out=mine)
    assert torch.equal(mine, wanted)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(32)
        self.up, self.down = torch.nn.Linear(32, 128), torch.nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class ConvNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
            torch.nn.Conv2d(8, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(),
            torch.nn.Linear(8, 5),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


@pytest.mark.parametrize("task", ["block", "convnet"])
def test_training_follows_eager(task: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    make: Callable[[], torch.nn.Module] = Block if task == "block" else ConvNet
    loss: Callable[..., Any] = torch.nn.functional.mse_loss if task == "block" else torch.nn.functional.cross_entropy
    x = draw((8, 5, 32) if task == "block" else (8, 3, 8, 8), torch.float32, seed=1, device="cuda")
    y = (
        draw((8, 5, 32), torch.float32, seed=2, device="cuda")
        if task == "block"
        else torch.arange(8, device="cuda") % 5
    )
    model, twin = make().cuda(), make().cuda()
    twin.load_state_dict(model.state_dict())
    before = fuser.stats()
    losses = []
    for network, call in ((model, torch.compile(model, backend="fuser")), (twin, twin)):
        optimiser = torch.optim.SGD(network.parameters(), lr=5e-2, momentum=0.9)
        found = []
        for _ in range(10):
            optimiser.zero_grad()
            value = loss(call(x), y)
            value.backward()
            optimiser.step()
            found.append(value.item())
        losses.append(found)
    after = fuser.stats()
    # cuDNN picks kernels with atomics for small convolutions: eager differs from itself by about as much.
    assert losses[0] == pytest.approx(losses[1], rel=5e-5 if task == "block" else 1e-3)
    assert after["launches"] - before["launches"] >= 20, "forward and backward launch"
    assert after["fallbacks"] == before["fallbacks"]
    torch._dynamo.reset()
