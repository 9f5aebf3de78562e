"""Tensors of every kind: the result is torch's, in value, dtype, shape and strides, or an error of torch's kind."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from accuracy import assert_form, outcome
from functors import draw, poison, same_bits, unpoison
from tiers import one_of_each
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

import fuser
from fuser.dtypes import DTYPES
from fuser.errors import FallbackError, ShapeError
from fuser.fx import fuse_graph

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore")]

ADD_TEXT = "template <typename T> T add(T x, T y) { return x + y; }"
ADD = fuser.jit_fn(ADD_TEXT, fallback=torch.add)
BARE = fuser.jit_fn(ADD_TEXT)
SAME = fuser.jit_fn("template <typename T> T same(T x) { return x; }")


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    fuser.reset_stats()
    poison()
    yield
    unpoison()
    fuser.reset_stats()


def ramp(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(1, torch.Size(shape).numel() + 1).to(dtype).reshape(shape)


def waves() -> torch.Tensor:
    return torch.tensor([1 + 2j, 3 - 4j, -5 + 1j])


def overlapping(*, strides: tuple[int, int] = (1, 1)) -> torch.Tensor:
    return ramp(20).as_strided((3, 4), strides)


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(ramp(3), 0.5, 0, torch.quint8)


def nested(layout: torch.layout = torch.strided) -> torch.Tensor:
    return torch.nested.nested_tensor([ramp(2), ramp(3)], layout=layout)


def with_holes(shape: tuple[int, ...]) -> torch.Tensor:
    return ramp(*(2 * size if size > 1 else 1 for size in shape))[tuple(slice(None, None, 2) for _ in shape)]


def channels_last(*shape: int) -> torch.Tensor:
    return ramp(*shape).to(memory_format=torch.channels_last)


# Two operands (and ``out``) for torch.add; each is made anew for every call.
SERVED: dict[str, Callable[[], tuple[Any, ...]]] = {
    "conjugate": lambda: (waves().conj(), waves()),
    "negative": lambda: (waves().conj().imag, ramp(3)),
    "conjugate of a negative": lambda: (torch._neg_view(waves()).conj(), waves().conj()),
    "out is a conjugate": lambda: (waves(), waves(), torch.zeros(3, dtype=torch.complex64).conj()),
    "out is a negative": lambda: (ramp(3), ramp(3), torch.zeros(3, dtype=torch.complex64).conj().imag),
    "in place in a conjugate": lambda: (lambda z: (z, waves(), z))(waves().conj()),
    "in place in a negative": lambda: (lambda z: (z, ramp(3), z))(waves().conj().imag),
    "out is the conjugate of an input": lambda: (lambda z: (z, waves(), z.conj()))(waves()),
    "expanded rows": lambda: (ramp(1, 4).expand(3, 4), ramp(1, 4).expand(3, 4)),
    "expanded columns": lambda: (ramp(3, 1).expand(3, 4), ramp(3, 1).expand(3, 4)),
    "expanded altogether": lambda: (ramp(1).expand(3, 4), ramp(1).expand(3, 4)),
    "windows": lambda: (overlapping(), ramp(4)),
    "two windows": lambda: (overlapping(), overlapping()),
    "steep windows": lambda: (overlapping(strides=(1, 3)), overlapping(strides=(2, 1))),
    "windows as out": lambda: (ramp(3, 4), 1.0, torch.zeros(20).as_strided((3, 4), (4, 1))),
    "no elements": lambda: (ramp(0, 3), ramp(1)),
    "no elements, permuted": lambda: (ramp(3, 0, 2).permute(2, 0, 1), ramp(1)),
    "no elements, broadcast": lambda: (ramp(3, 1, 0), ramp(4, 1)),
    "0-dim": lambda: (torch.tensor(1.5), torch.tensor(2)),
    "0-dim of a wider dtype": lambda: (torch.tensor(1.5, dtype=torch.float64), ramp(2)),
    "0-dim of a higher kind": lambda: (torch.tensor(1j, dtype=torch.complex128), ramp(2)),
    "25 dimensions": lambda: (ramp(*(1, 2) * 12, 1), ramp(1)),
    "26 dimensions that do not merge": lambda: (with_holes((1,) * 18 + (2,) * 8), ramp(*(2,) * 7, 1)),
    "64 dimensions": lambda: (ramp(*(1,) * 63, 4), ramp(2, *(1,) * 63)),
    "storage offset": lambda: (ramp(20)[1:13].view(3, 4), ramp(20)[3:15].view(3, 4)),
    "bytes at odd addresses": lambda: (ramp(40, dtype=torch.uint8)[3:36], ramp(40, dtype=torch.uint8)[1:34]),
    "channels_last": lambda: (channels_last(2, 3, 4, 5), ramp(3, 1, 1)),
    "channels_last beside dense": lambda: (channels_last(2, 3, 4, 5), ramp(2, 3, 4, 5)),
    "channels_last of one channel": lambda: (channels_last(2, 1, 4, 5), ramp(2, 1, 4, 5)),
    "channels_last_3d": lambda: (
        ramp(2, 3, 4, 5, 2).to(memory_format=torch.channels_last_3d),
        ramp(2, 3, 4, 5, 2).to(memory_format=torch.channels_last_3d),
    ),
    "permuted": lambda: (ramp(2, 3, 4).permute(1, 2, 0), ramp(4, 2)),
    "permuted in two ways": lambda: (ramp(2, 3, 4).permute(1, 2, 0), ramp(4, 2, 3).permute(2, 0, 1)),
    "sliced": lambda: (with_holes((3, 4)), ramp(4)),
    "diagonal": lambda: (ramp(4, 4).diagonal(), ramp(4)),
    "unfolded": lambda: (ramp(10).unfold(0, 4, 2), ramp(4)),
    "bool number": lambda: (ramp(3, dtype=torch.bool), True),
    "float number": lambda: (ramp(3, dtype=torch.int32), 1.5),
    "complex number": lambda: (ramp(3), 1 + 2j),
    "complex number beside double": lambda: (ramp(3, dtype=torch.float64), 2j),
    "complex number beside half": lambda: (ramp(3, dtype=torch.float16), 2j),
    "parameter": lambda: (torch.nn.Parameter(ramp(3)), 1.0),
    "zero tensor": lambda: (torch._efficientzerotensor(3), ramp(3)),
    "zero tensor broadcast": lambda: (ramp(2, 3), torch._efficientzerotensor(2, 1)),
    "zero tensor of a wider dtype": lambda: (ramp(3), torch._efficientzerotensor(3, dtype=torch.float64)),
    "zero tensor and out": lambda: (torch._efficientzerotensor(3), ramp(3), torch.empty(3)),
    "meta": lambda: (torch.empty(3, 4, device="meta").t(), torch.empty(4, 3, device="meta")),
    "meta beside a 0-dim CPU tensor": lambda: (torch.empty(3, device="meta"), torch.tensor(1.0)),
    "meta out": lambda: (torch.empty(3, device="meta"), 1.0, torch.empty(0, device="meta")),
}


def call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    first, second, *out = arguments
    with torch.no_grad():
        result = function(first, second, out=out[0]) if out else function(first, second)
    assert not out or result is out[0]
    return result


def assert_equal(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert_form(got, wanted, "")
    assert (got.device, got.is_conj(), got.is_neg()) == (wanted.device, wanted.is_conj(), wanted.is_neg())
    if got.device.type == "cpu":
        mine, theirs = (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in (got, wanted))
        assert same_bits(mine.resolve_neg(), theirs.resolve_neg()), f"{got} instead of {wanted}"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", SERVED)
def test_served(name: str) -> None:
    wanted = call(torch.add, SERVED[name]())
    assert_equal(call(BARE, SERVED[name]()), wanted)
    assert not fuser.stats()["fallbacks"]
    if len(SERVED[name]()) == 2:
        fused = fuser.fuse(lambda x, y: torch.add(x, y))
        wanted = call(torch.add, SERVED[name]())
        assert_equal(call(fused, SERVED[name]()), wanted)


def test_a_zero_tensor_is_no_repeated_call() -> None:
    # It has no memory, and all else that a recorded call is known by.
    zero, ones = torch._efficientzerotensor(3), torch.ones(3)
    for x in (ones, zero, zero, ones, zero):
        assert torch.equal(BARE(x, ones), x + ones)


FALLS_BACK: dict[str, tuple[Callable[[], tuple[Any, ...]], str]] = {
    "sparse_coo": (lambda: (torch.eye(3).to_sparse(),) * 2, "a sparse_coo tensor"),
    "sparse_coo beside dense": (lambda: (torch.eye(3), torch.eye(3).to_sparse()), "a sparse_coo tensor"),
    "sparse_csr": (lambda: (torch.eye(3).to_sparse_csr(),) * 2, "a sparse_csr tensor"),
    "quantized": (lambda: (quantized(),) * 2, "a quantized tensor"),
    "nested": (lambda: (nested(),) * 2, "a nested tensor"),
    "nested, jagged": (lambda: (lambda x: (x, x))(nested(torch.jagged)), "a nested tensor"),
    "MKL-DNN": (lambda: (ramp(3).to_mkldnn(),) * 2, "a _mkldnn tensor"),
    "float4": (lambda: (torch.zeros(3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), 1.0), "dtype torch.float4"),
}


@pytest.mark.parametrize("name", FALLS_BACK)
def test_falls_back_with_a_reason(name: str) -> None:
    make, reason = FALLS_BACK[name]
    wanted, got = outcome(call, torch.add, make()), outcome(call, ADD, make())
    # A fusion node of a graph that says nothing of its inputs.
    node = fuse_graph(fx.symbolic_trace(lambda x, y: torch.add(x, y)))
    assert type(outcome(call, node, make())) is type(got)
    if isinstance(wanted, Exception):
        assert isinstance(got, type(wanted)), got
    else:
        assert got.layout == wanted.layout
        parts = [list(x.unbind()) if x.is_nested else [x.to_dense()] for x in (got, wanted)]
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(*parts, strict=True))
        fallbacks = fuser.stats()["fallbacks"]
        assert fallbacks.pop(reason) + sum(fallbacks.values()) == 2
    if name in {"quantized", "float4"}:
        with pytest.raises(FallbackError, match=reason):
            call(BARE, make())
    else:
        # The version that is derived from the text runs on whatever torch can add.
        derived = call(BARE, make())
        assert (derived.layout, derived.dtype) == (got.layout, got.dtype)
        parts = [list(x.unbind()) if x.is_nested else [x.to_dense()] for x in (got, derived)]
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(*parts, strict=True))


class Seeing(torch.Tensor):
    """Of a class that sees torch's functions, and is that of their results."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


class Swapping(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.add if func in (torch.mul, torch.ops.aten.mul.Tensor) else func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("trace", [fx.symbolic_trace, lambda function: make_fx(function)(ramp(3), ramp(3))])
def test_who_sees_torchs_functions_sees_those_of_fusion_nodes(trace: Callable[..., fx.GraphModule]) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.neg(torch.mul(x, y))

    fused = fuse_graph(trace(function))
    x, y = ramp(3), ramp(3) * 3
    assert torch.equal(fused(x, y), function(x, y))
    Seeing.seen.clear()
    made = fused(x.as_subclass(Seeing), y)
    assert (type(made), len(Seeing.seen)) == (Seeing, 2)
    with Swapping():
        assert torch.equal(fused(x, y), -(x + y))
    with torch.device("cpu"):
        # torch's own mode.
        fuser.reset_stats()
        assert torch.equal(fused(x, y), function(x, y))
        assert not fuser.stats()["fallbacks"]
    again = fx.symbolic_trace(fused)
    assert [node.name.partition("_")[0] for node in again.graph.nodes][-3:-1] == ["mul", "neg"]
    assert torch.equal(again(x, y), function(x, y))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        quantized,
        nested,
        lambda: ramp(3).to_mkldnn(),
    ],
)
def test_out_without_plain_memory_is_refused(make: Callable[[], torch.Tensor]) -> None:
    for function in (torch.add, BARE):
        with pytest.raises(RuntimeError):
            function(ramp(3), ramp(3), out=make())
    with pytest.raises(ShapeError, match="out= takes strided tensors, got a "):
        BARE(ramp(3), ramp(3), out=make())


RAISES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "meta beside CPU": lambda: (torch.empty(3, device="meta"), ramp(3)),
    "0-dim meta beside CPU": lambda: (ramp(3), torch.empty((), device="meta")),
    "meta of another shape": lambda: (torch.empty(3, device="meta"), torch.empty(4, device="meta")),
    "no elements beside two": lambda: (ramp(0), ramp(2)),
    "expanded out": lambda: (ramp(3, 4), 1.0, torch.zeros(1, 4).expand(3, 4)),
    "out is a shifted input": lambda: (lambda x: (x[1:], 1.0, x[:-1]))(ramp(5)),
    "uint16 beside int32": lambda: (ramp(3, dtype=torch.uint16), ramp(3, dtype=torch.int32)),
    "two kinds of float8": lambda: (ramp(3, dtype=torch.float8_e5m2), ramp(3, dtype=torch.float8_e4m3fn)),
}


@pytest.mark.parametrize("name", RAISES)
def test_raises_what_torch_raises(name: str) -> None:
    wanted = outcome(call, torch.add, RAISES[name]())
    assert isinstance(wanted, RuntimeError)
    for function in (ADD, BARE):
        assert isinstance(outcome(call, function, RAISES[name]()), RuntimeError)


# --- dtypes -----------------------------------------------------------------------------------------------------------
LIMITED = [dtype for dtype in DTYPES if "float8" in str(dtype) or dtype in (torch.uint16, torch.uint32, torch.uint64)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_functors_take_every_dtype(dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(dtype) if dtype.itemsize == 1 else ramp(256).to(dtype)
    if dtype is torch.bool:
        every = ramp(256) % 3 == 0
    got = SAME(every)
    assert got.dtype == dtype
    bits = [item.view(torch.uint8) for item in (got, every)]
    is_nan = every.to(torch.complex128).isnan() if dtype.is_complex else every.double().isnan()
    assert torch.equal(*(item.view(256, -1)[~is_nan] for item in bits))
    assert torch.equal(got.to(torch.complex128).isnan(), is_nan)
    if dtype is not torch.bool:
        # Computed in float (integers: as they are), rounded once.
        wide = torch.complex64 if dtype.is_complex else torch.float32 if dtype.is_floating_point else torch.int64
        wide = torch.float64 if dtype is torch.float64 else torch.complex128 if dtype is torch.complex128 else wide
        left, right = (torch.tensor([1, 2, 3, 8]).to(dtype), torch.tensor([4, 2, 1, 16]).to(dtype))
        wanted = (left.to(wide) + right.to(wide)).to(dtype)
        assert torch.equal(BARE(left, right).view(torch.uint8), wanted.view(torch.uint8))


HARDLY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "x + x": lambda x: x + x,
    "x * 2": lambda x: x * 2,
    "x == x": lambda x: x == x,
    "x < x": lambda x: x < x,
    "-x": lambda x: -x,
    "abs": lambda x: abs(x),
    "exp": lambda x: torch.exp(x),
    "x / x": lambda x: x / x,
    "where": lambda x: torch.where(x == x, x, x),
    "clamp": lambda x: x.clamp(1, 2),
    "to": lambda x: torch.ops.aten._to_copy.default(x, dtype=torch.float32) * 2,
}


@pytest.mark.parametrize(("name", "dtype"), one_of_each(list(itertools.product(HARDLY, LIMITED)), 3))
def test_ops_on_dtypes_that_torch_hardly_computes_with(name: str, dtype: torch.dtype) -> None:
    function = HARDLY[name]
    x = torch.tensor([1, 2, 3]).to(dtype)
    wanted, got = outcome(function, x), outcome(fuser.fuse(function), x)
    if isinstance(wanted, Exception):
        assert isinstance(got, type(wanted)), got
    else:
        assert got.dtype == wanted.dtype
        assert torch.allclose(got.double(), wanted.double(), rtol=1e-6)


def test_dtypes_of_each_output() -> None:
    split = fuser.jit_fn(
        "template <typename T, typename U> void split(T x, U& less, T& twice, bool& positive)"
        " { less = x - T(0.75); twice = x * 2; positive = x > T(0); }",
        num_outputs=3,
        out_dtypes=(torch.int32, None, torch.bool),
    )
    x = torch.tensor([-1.5, 0.0, 2.0], dtype=torch.bfloat16)
    for mine, theirs in zip(split(x), ((x.float() - 0.75).to(torch.int32), x * 2, x > 0), strict=True):
        assert_equal(mine, theirs)
    out = [torch.empty(3, dtype=torch.int64), torch.empty(3, dtype=torch.float64), torch.empty(3, dtype=torch.bool)]
    split(x, out=out)
    assert [item.tolist() for item in out] == [[-2, 0, 1], [-3.0, 0.0, 4.0], [False, False, True]]


def test_complex_scalars() -> None:
    scale = fuser.create_jit_fn("template <typename T> T scale(T x, T k) { return x * k; }", k=1 + 2j)
    for dtype in (torch.complex64, torch.complex128, torch.complex32):
        z = waves().to(dtype)
        for k in (1 + 2j, -0.5j, 2.0, 3):
            wide = z.to(torch.complex128 if dtype is torch.complex128 else torch.complex64)
            torch.testing.assert_close(scale(z, k=k).to(wide.dtype), (wide * k).to(dtype).to(wide.dtype))


# --- what autograd and Python see ---------------------------------------------------------------------------------
def test_a_tensor_that_was_written_to_is_known_to_autograd() -> None:
    weight, x = ramp(3), torch.ones(3, requires_grad=True)
    product = x * weight
    BARE(weight, 1.0, out=weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    before = weight._version
    BARE(ramp(3), 1.0, out=weight.view(3, 1).squeeze(1))
    assert weight._version > before
    with torch.inference_mode():
        out = torch.empty(3)
        assert BARE(ramp(3), 1.0, out=out).tolist() == [2, 3, 4]


def test_out_of_another_type() -> None:
    for out in (3, "x", [1], (None,)):
        with pytest.raises(TypeError, match="out= takes tensors, got "):
            BARE(ramp(3), 1.0, out=out)


def test_a_function_that_closes_over_a_tensor() -> None:
    weight = draw((3, 4), torch.float32)
    fused = fuser.fuse(lambda x: x * weight + torch.ones(4))
    x = draw((3, 4), torch.float32, seed=1)
    assert torch.equal(fused(x), x * weight + 1)
    assert fuser.stats()["launches"] == 1


def test_a_bool_in_front_where_the_group_falls_back() -> None:
    before = fuser.override_can_fuse_on_cpu(False)
    try:
        assert fuser.fuse(lambda x: True + x)(ramp(3)).tolist() == [2, 3, 4]
    finally:
        fuser.override_can_fuse_on_cpu(before)


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.float32, np.float64], ids=str)
def test_numbers_of_numpy(kind: Any) -> None:
    number, x = kind(2), torch.arange(5)
    fused = fuser.fuse(lambda x, y: x * y)
    scaled = fuser.create_jit_fn("template <typename T, typename S> T f(T x, S y) { return x * T(y); }", y=1)
    for got in (fused(x, number), fused(x, y=number)):
        assert got.dtype is (x * number).dtype
        assert torch.equal(got, x * number)
    assert torch.equal(TIMES(x, number), x * number)
    assert torch.equal(scaled(x, y=number), x * 2)


TIMES = fuser.create_jit_fn("template <typename T> T times(T x, T y) { return x * y; }")
