"""What benchmarks.reductions measures: torch's functions that reduce rows, columns or all, and one's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fuser.combining import Reduction
from fuser.cxx.functor import Functor, parse_functor
from fuser.function import Function
from fuser.graph import FusionGroup, GroupBuilder
from fuser.ops import OPS
from fuser.ops.index import index_function

__all__ = ["Case", "cases"]

F32, BF16, F8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn
# Bytes of the tensor that the others go with.
SIZE = 2**28


def alone(x: Tensor) -> list[Tensor]:
    """Return a tensor as the only one."""
    return [x]


@dataclass(frozen=True, slots=True)
class Case:
    """One computation on one shape."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    # In torch's operations; the first tensor that it takes has the shape.
    function: Callable[..., Any]
    # Makes its tensors of the first one.
    inputs: Callable[[Tensor], list[Tensor]] = alone
    # A reduction of one's own, which fuser runs instead of the function, and its numbers.
    group: Callable[[], FusionGroup] | None = None
    numbers: tuple[Any, ...] = ()
    # Whether the gradients of its tensors are what is measured, once its results are there.
    is_backward: bool = False

    def __str__(self) -> str:
        """Such as ``sum [4096, 4096] bfloat16``."""
        return f"{self.name} {list(self.shape)} {str(self.dtype)[6:]}"


def cases() -> Iterator[Case]:
    """Yield every computation and shape."""
    yield from forward_cases()
    yield from backward_cases()
    yield from own_cases()


# --- torch's functions -----------------------------------------------------------------------------------------------
def forward_cases() -> Iterator[Case]:
    """Yield torch's functions."""
    for dtype in (F32, BF16):
        for length in (1024, 4096, 32768, 131072):
            yield Case("softmax", rows_of(length, dtype), dtype, partial(torch.softmax, dim=-1))
    for length, dtype in ((1024, F32), (4096, BF16), (32768, F32), (131072, BF16)):
        yield Case("log_softmax", rows_of(length, dtype), dtype, partial(torch.log_softmax, dim=-1))
    yield Case("logsumexp", rows_of(4096, BF16), BF16, partial(torch.logsumexp, dim=-1))
    yield Case("var", rows_of(4096, F32), F32, partial(torch.var, dim=-1))
    yield Case("rms_norm (spelled out)", rows_of(4096, BF16), BF16, spelled_rms_norm, with_row)
    yield Case("add + rms_norm (spelled out)", rows_of(8192, BF16), BF16, add_rms_norm, lambda x: [x, x + 1, row_of(x)])
    yield Case("rms_norm", rows_of(4096, BF16), BF16, rms_norm, with_row)
    yield Case("layer_norm", rows_of(4096, BF16), BF16, layer_norm, with_rows)
    yield Case("layer_norm", rows_of(4096, F32), F32, layer_norm, with_rows)
    yield Case("gelu + layer_norm", rows_of(1024, BF16), BF16, gelu_layer_norm, with_rows)
    for classes in (32000, 128256):
        yield Case("cross_entropy", rows_of(classes, BF16), BF16, functional.cross_entropy, with_classes)
    images = (32, 256, 128, 128)
    yield Case("batch_norm + relu, channels_last", images, BF16, batch_norm_relu, channels_last)
    yield Case("batch_norm + relu", images, BF16, batch_norm_relu, with_channels)
    yield Case("group_norm + silu", images, BF16, group_norm_silu, with_channels)
    yield Case("column mean", rows_of(4096, BF16), BF16, partial(torch.mean, dim=0))
    yield Case("row amax + fp8", rows_of(4096, BF16), BF16, quantise)
    yield Case("argmax", rows_of(4096, F32), F32, partial(torch.argmax, dim=-1))
    yield Case("sum of x*y", (2**27,), F32, lambda x, y: (x * y).sum(), lambda x: [x, x + 1])
    yield Case("softmax, odd rows", (32767, 4097), BF16, partial(torch.softmax, dim=-1))
    yield Case("softmax, short rows", (2**20, 50), F32, partial(torch.softmax, dim=-1))
    yield Case("softmax, one row", (1, 2**26), F32, partial(torch.softmax, dim=-1))
    yield Case("sum, rows of 8", (2**23, 8), F32, partial(torch.sum, dim=-1))


def rows_of(length: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return the shape of as many rows as there is room for."""
    return SIZE // dtype.itemsize // length, length


def row_of(x: Tensor) -> Tensor:
    """Return weights along the last dimension."""
    return torch.rand_like(x[0]) + 0.5


def with_row(x: Tensor) -> list[Tensor]:
    """Return rows and weights."""
    return [x, row_of(x)]


def with_rows(x: Tensor) -> list[Tensor]:
    """Return rows, weights and biases."""
    return [x, row_of(x), row_of(x)]


def with_classes(x: Tensor) -> list[Tensor]:
    """Return rows and a class of each."""
    return [x, torch.randint(0, x.shape[1], x.shape[:1], device=x.device)]


def with_channels(x: Tensor) -> list[Tensor]:
    """Return images, weights and biases."""
    return [x, torch.rand_like(x[0, :, 0, 0]), torch.rand_like(x[0, :, 0, 0])]


def channels_last(x: Tensor) -> list[Tensor]:
    """Return the same with a pixel's channels side by side."""
    return with_channels(x.to(memory_format=torch.channels_last))


def widen(x: Tensor) -> Tensor:
    """Return what float32 holds at least."""
    return x if x.dtype is torch.float64 else x.float()


def spelled_rms_norm(x: Tensor, w: Tensor) -> Tensor:
    """Return what Hugging Face's Llama computes."""
    wide = widen(x)
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def add_rms_norm(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of two, and what is normalised of it."""
    z = x + y
    return z, spelled_rms_norm(z, w)


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    """Return torch's own."""
    return functional.rms_norm(x, x.shape[-1:], w, 1e-6)


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Return torch's own."""
    return functional.layer_norm(x, x.shape[-1:], w, b)


def gelu_layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Return what follows an activation."""
    return layer_norm(functional.gelu(x), w, b)


def batch_norm_relu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Return torch's own, in training."""
    return torch.relu(functional.batch_norm(x, None, None, w, b, training=True))


def group_norm_silu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Return torch's own."""
    return functional.silu(functional.group_norm(x, 32, w, b))


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows scaled to float8's range, and their largest magnitudes."""
    m = x.abs().amax(-1, keepdim=True)
    # float64 has no conversion to float8 that every device knows.
    y = x * (448 / m)
    return (y if x.dtype is torch.float64 else y.to(F8)), m


# --- their derivatives -----------------------------------------------------------------------------------------------
def backward_cases() -> Iterator[Case]:
    """Yield what is differentiated."""
    softmax, log_softmax = (partial(function, dim=-1) for function in (torch.softmax, torch.log_softmax))
    shape, images, classes = rows_of(4096, BF16), (32, 256, 128, 128), functional.cross_entropy
    for name, sizes, dtype, function, inputs in (
        ("softmax", rows_of(1024, F32), F32, softmax, alone),
        ("softmax", shape, BF16, softmax, alone),
        ("softmax", rows_of(131072, BF16), BF16, softmax, alone),
        ("log_softmax", shape, BF16, log_softmax, alone),
        ("rms_norm (spelled out)", shape, BF16, spelled_rms_norm, with_row),
        ("add + rms_norm (spelled out)", shape, BF16, add_rms_norm, lambda x: [x, x + 1, row_of(x)]),
        ("rms_norm", shape, BF16, rms_norm, with_row),
        ("layer_norm", shape, BF16, layer_norm, with_rows),
        ("gelu + layer_norm", shape, BF16, gelu_layer_norm, with_rows),
        ("bias + gelu", shape, BF16, bias_gelu, with_row),
        ("cross_entropy", rows_of(32000, BF16), BF16, classes, with_classes),
        ("cross_entropy", rows_of(128256, BF16), BF16, classes, with_classes),
        ("batch_norm + relu, channels_last", images, BF16, batch_norm_relu, channels_last),
        ("batch_norm + relu", images, BF16, batch_norm_relu, with_channels),
        ("group_norm + silu", images, BF16, group_norm_silu, with_channels),
    ):
        yield Case(f"{name}, backward", sizes, dtype, function, inputs, is_backward=True)


def bias_gelu(x: Tensor, b: Tensor) -> Tensor:
    """Return what follows a linear layer."""
    return functional.gelu(x + b)


# --- one's own -------------------------------------------------------------------------------------------------------
def text(source: str, outputs: int = 1) -> Functor:
    """Parse a functor over T."""
    return parse_functor(f"template <typename T> {source}", (), outputs)


ADD = text("T add(T a, T b) { return a + b; }")
LARGER = text("T larger(T a, T b) { return a != a || a > b ? a : b; }")
VALUE = text("T value(T x) { return x; }")
PRODUCT = text("T product(T x, T y) { return x * y; }")
SIZE_OF = text("T size(T x) { return abs(x); }")
ONE = text("void one(T x, T& m, T& s, T& n) { m = x; s = 0; n = 1; }", 3)
MERGE = text(
    "void merge(T m, T s, T n, T m2, T s2, T n2, T& a, T& b, T& c) {"
    " c = n + n2; T d = m2 - m; T f = c > 0 ? n2 / c : T(0); a = m + d * f; b = s + s2 + d * d * n * f; }",
    3,
)
DONE = text("void done(T m, T s, T n, T& mean, T& var) { mean = m; var = s / n; }", 2)
NORMALIZE = text("T norm(T x, T m, T v, T w, T b) { return (x - m) * rsqrt(v + T(1e-5)) * w + b; }")
FIRST = text("void first(T x, int64_t i, T& v, int64_t& at) { v = x; at = i; }", 2)
PICK = text(
    "void pick(T a, int64_t i, T b, int64_t j, T& r, int64_t& k) {"
    " bool left = a > b || (a == b && i < j); r = left ? a : b; k = left ? i : j; }",
    2,
)
PLACE = text("int64_t place(T v, int64_t at) { return at; }")
# The largest magnitude becomes the largest number of float8_e4m3fn.
SCALE = text("T scale(T m) { return T(448) / m; }")


def own_cases() -> Iterator[Case]:
    """Yield reductions of one's own."""
    softmax, rows = partial(torch.softmax, dim=-1), partial(total, (-1,))
    for dtype in (F32, BF16):
        for length in (1024, 4096, 32768, 131072):
            shape = rows_of(length, dtype)
            yield Case("own softmax", shape, dtype, softmax, group=own_softmax, numbers=(-1,))
            yield Case("own Welford", shape, dtype, layer_norm, with_rows, own_layer_norm)
    yield Case("own softmax", (32767, 4097), BF16, softmax, group=own_softmax, numbers=(-1,))
    yield Case("own softmax", (2**20, 50), F32, softmax, group=own_softmax, numbers=(-1,))
    yield Case("own softmax", (1, 2**26), F32, softmax, group=own_softmax, numbers=(-1,))
    for shape in (rows_of(4096, F32), (16383, 4097), (2**23, 8)):
        yield Case("own sum", shape, F32, partial(torch.sum, dim=-1), group=rows)
    for shape, dtype in ((rows_of(4096, BF16), BF16), (rows_of(4096, F32), F32), ((2**20, 64), F32)):
        yield Case("own columns", shape, dtype, partial(torch.sum, dim=0), group=partial(total, (0,)))
    channels = partial(torch.sum, dim=(0, 2, 3))
    yield Case("own channels", (64, 64, 112, 112), F32, channels, group=partial(total, (0, 2, 3)))
    dot = partial(total, None, PRODUCT, 2)
    yield Case("own dot", (2**27,), F32, lambda x, y: (x * y).sum(), lambda x: [x, x + 1], dot)
    yield Case("own sum of all", (2**27,), F32, torch.sum, group=partial(total, None))
    yield Case("own amax + fp8", rows_of(4096, BF16), BF16, quantise, group=own_quantise)
    yield Case("own argmax", rows_of(4096, F32), F32, partial(torch.argmax, dim=-1), group=own_argmax)


def reduction(
    value: Functor, combine: Functor, identity: tuple[float, ...], dims: tuple[int, ...] | None, **more: Any
) -> Function:
    """Return a reduction."""
    finish, keepdim = more.pop("finish", None), more.pop("keepdim", False)
    return Function(value, reduction=Reduction(combine, identity, finish, dims, keepdim), **more)


def total(dims: tuple[int, ...] | None, value: Functor = VALUE, count: int = 1) -> FusionGroup:
    """Return a sum."""
    builder = GroupBuilder()
    return builder.build(
        builder.apply(reduction(value, ADD, (0,), dims), [builder.add_input(f"x{i}") for i in range(count)])
    )


def own_softmax() -> FusionGroup:
    """Return largest, difference, exp, sum, quotient."""
    builder = GroupBuilder()
    x, minus = builder.add_input("x"), builder.add_input("minus", is_scalar=True, default=-1)
    (m,) = builder.apply(reduction(VALUE, LARGER, (-math.inf,), (-1,), keepdim=True), [x])
    (d,) = builder.apply(OPS["sub"].function, [x, m], [minus])
    (e,) = builder.apply(OPS["exp"].function, [d])
    (s,) = builder.apply(reduction(VALUE, ADD, (0,), (-1,), keepdim=True), [e])
    return builder.build(builder.apply(OPS["div"].function, [e, s]))


def own_layer_norm() -> FusionGroup:
    """Return Welford's moments, and the rows normalised."""
    builder = GroupBuilder()
    x, w, b = (builder.add_input(name) for name in "xwb")
    mean, var = builder.apply(reduction(ONE, MERGE, (0, 0, 0), (-1,), keepdim=True, finish=DONE), [x])
    return builder.build(builder.apply(Function(NORMALIZE), [x, mean, var, w, b]))


def own_quantise() -> FusionGroup:
    """Return rows scaled to float8's range, and their largest magnitudes."""
    builder = GroupBuilder()
    x = builder.add_input("x")
    (m,) = builder.apply(reduction(SIZE_OF, LARGER, (0,), (-1,), keepdim=True), [x])
    (scale,) = builder.apply(Function(SCALE), [m])
    (y,) = builder.apply(Function(PRODUCT, out_dtypes=(F8,)), [x, scale])
    return builder.build([y, m])


def own_argmax() -> FusionGroup:
    """Return the place of the largest element, as kernels count them."""
    builder = GroupBuilder()
    function = reduction(
        FIRST, PICK, (-math.inf, 2**62), (-1,), finish=PLACE, unpromoted=("i",), out_dtypes=(torch.int64,)
    )
    x = builder.add_input("x")
    return builder.build(builder.apply(function, [x, *builder.apply(index_function(1, (-1,)), [x])]))
