"""Groups with reductions, and layouts of their inputs, for the tests of kernels that run them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from reduction_cases import ADD, FIRST, LARGER, MOMENTS, ONE, PICK, VALUE, WHERE

from fuser.combining import Reduction
from fuser.cxx.functor import Functor, parse_functor
from fuser.function import Function
from fuser.graph import FusionGroup, GroupBuilder
from fuser.ops import OPS, view_function
from fuser.ops.index import index_function

__all__ = ["GROUPS", "LAYOUTS", "OWN_GROUPS", "draw", "layouts_of", "on_gpu", "one", "reduce", "text"]

Dims = tuple[int, ...] | None


def text(source: str, *scalars: str, outputs: int = 1) -> Functor:
    return parse_functor(f"template <typename T> {source}", scalars, outputs)


SQUARE = text("T square(T x) { return x * x; }")
PRODUCT = text("T product(T x, T y) { return x * y; }")
SCALE = text("T scale(T t, T by) { return t * by; }", "by")
# Neither associative nor commutative: shows every change of the order. Its products are exact, so that it has the same
# bits whether a compiler contracts them or not; others say where to.
SKEW = text("T skew(T a, T b) { return b == T(0) ? a : a == T(0) ? b : a * T(0.5) + b * T(0.25); }")
MERGE = text(
    "void merge(T m, T s, T n, T m2, T s2, T n2, T& a, T& b, T& c) "
    "{ c = n + n2; T d = m2 - m; T f = c > 0 ? n2 / c : T(0); a = fma(d, f, m); b = fma(d * d * n, f, s + s2); }",
    outputs=3,
)
NORMALIZE = text("T normalize(T x, T mean, T var) { return (x - mean) / sqrt(var + T(1e-5)); }")
AFFINE = text("T affine(T x, T w, T b) { return fma(x, w, b); }")
AFTER = text("T after(T x) { return x * T(2) + T(1); }")


def reduce(
    dims: Dims,
    *,
    keepdim: bool = False,
    value: Functor = VALUE,
    combine: Functor = ADD,
    identity: tuple[float, ...] = (0,),
    finish: Functor | None = None,
    unpromoted: tuple[str, ...] = (),
    dtypes: tuple[torch.dtype, ...] = (),
) -> Function:
    reduction = Reduction(combine, identity, finish, dims, keepdim)
    return Function(value, reduction=reduction, unpromoted=unpromoted, out_dtypes=dtypes)


def one(function: Function, count: int = 1, scalars: int = 0) -> FusionGroup:
    """A function alone."""
    builder = GroupBuilder()
    tensors = [builder.add_input(f"x{i}") for i in range(count)]
    numbers = [builder.add_input(f"s{i}", is_scalar=True, default=0) for i in range(scalars)]
    return builder.build(builder.apply(function, tensors, numbers))


def total(dims: Dims) -> FusionGroup:
    return one(reduce(dims))


def skewed(dims: Dims) -> FusionGroup:
    return one(reduce(dims, combine=SKEW))


def shifted(dims: Dims) -> FusionGroup:
    """Each element beside what its row comes to: every thread of the row has to have it."""
    builder = GroupBuilder()
    x = builder.add_input("x")
    (s,) = builder.apply(reduce(dims, keepdim=True, combine=SKEW), [x])
    return builder.build(builder.apply(Function(text("T shift(T x, T s) { return x - s; }")), [x, s]))


def columns(dims: Dims) -> FusionGroup:
    """The same, without the reduced dimensions at first."""
    builder = GroupBuilder()
    x = builder.add_input("x")
    (s,) = builder.apply(reduce(dims, combine=SKEW), [x])
    (doubled,) = builder.apply(Function(text("T twice(T s) { return s + s; }")), [s])
    (kept,) = builder.apply(view_function("unsqueeze", dims or ()), [doubled])
    return builder.build([*builder.apply(Function(text("T shift(T x, T s) { return x - s; }")), [x, kept]), s])


def largest(dims: Dims) -> FusionGroup:
    return one(reduce(dims, keepdim=True, combine=LARGER, identity=(-math.inf,)))


def dot(dims: Dims) -> FusionGroup:
    return one(reduce(dims, value=PRODUCT), 2)


def halves(dims: Dims) -> FusionGroup:
    return one(reduce(dims, value=text("T half(T x) { return x / T(2); }")))


def moments(dims: Dims) -> FusionGroup:
    return one(reduce(dims, value=ONE, combine=MERGE, identity=(0, 0, 0), finish=MOMENTS))


def place(dims: Dims) -> FusionGroup:
    function = reduce(
        dims, value=FIRST, combine=PICK, identity=(-math.inf, 2**62), finish=WHERE,
        unpromoted=("i",), dtypes=(torch.int64,),
    )  # fmt: skip
    builder = GroupBuilder()
    x, i = builder.add_input("x"), builder.add_input("i")
    return builder.build(builder.apply(function, [x, i]))


def indexed(dims: Dims) -> FusionGroup:
    """The place of the largest element, counted by the kernel, and an element of each row at most."""
    function = reduce(
        dims, value=FIRST, combine=PICK, identity=(-math.inf, 2**62), finish=WHERE,
        unpromoted=("i",), dtypes=(torch.int64,), keepdim=True,
    )  # fmt: skip
    builder = GroupBuilder()
    x = builder.add_input("x")
    (i,) = builder.apply(index_function(1, dims), [x])
    (at,) = builder.apply(function, [x, i])
    same = Function(text("T same(T i, T at) { return i == at; }"))
    return builder.build([*builder.apply(same, [i, at]), at])


def softmax(dims: Dims) -> FusionGroup:
    """Without ``exp``, whose bits differ between devices."""
    builder = GroupBuilder()
    x = builder.add_input("x")
    (m,) = builder.apply(reduce(dims, keepdim=True, combine=LARGER, identity=(-math.inf,)), [x])
    (d,) = builder.apply(Function(text("T minus(T x, T m) { return T(1) / (T(1) + (m - x)); }")), [x, m])
    (s,) = builder.apply(reduce(dims, keepdim=True), [d])
    (y,) = builder.apply(Function(text("T over(T x, T s) { return x / s; }")), [d, s])
    return builder.build([y, s, m])


def layer_norm(dims: Dims) -> FusionGroup:
    """Normalised rows, mean and variance; the mean goes on."""
    builder = GroupBuilder()
    x, w, b = (builder.add_input(name) for name in "xwb")
    (before,) = builder.apply(Function(AFTER), [x])
    mean, var = builder.apply(
        reduce(dims, keepdim=True, value=ONE, combine=MERGE, identity=(0, 0, 0), finish=MOMENTS), [before]
    )
    (normal,) = builder.apply(Function(NORMALIZE), [before, mean, var])
    (y,) = builder.apply(Function(AFFINE), [normal, w, b])
    (after,) = builder.apply(Function(AFTER), [mean])
    return builder.build([y, after, var])


def two(dims: Dims) -> FusionGroup:
    """Two reductions of one pass, with a scalar, and elements from before them."""
    builder = GroupBuilder()
    x, y = builder.add_input("x"), builder.add_input("y")
    by = builder.add_input("by", is_scalar=True, default=0.5)
    (z,) = builder.apply(Function(PRODUCT), [x, y])
    (s,) = builder.apply(reduce(dims, value=SQUARE, finish=SCALE), [z], [by])
    (m,) = builder.apply(reduce(dims, combine=LARGER, identity=(-math.inf,)), [x])
    (r,) = builder.apply(Function(PRODUCT), [s, m])
    return builder.build([z, r, s])


def softmax_exp(dims: Dims) -> FusionGroup:
    """As torch's ops are decomposed."""
    builder = GroupBuilder()
    x = builder.add_input("x")
    (m,) = builder.apply(reduce(dims, keepdim=True, combine=LARGER, identity=(-math.inf,)), [x])
    minus = builder.add_input("minus_alpha", is_scalar=True, default=-1)
    (d,) = builder.apply(OPS["sub"].function, [x, m], [minus])
    (e,) = builder.apply(OPS["exp"].function, [d])
    (s,) = builder.apply(reduce(dims, keepdim=True), [e])
    (y,) = builder.apply(OPS["div"].function, [e, s])
    return builder.build([y, s, m])


def contracted(dims: Dims) -> FusionGroup:
    """Products before, inside and after, which a compiler must not contract with what comes next."""
    builder = GroupBuilder()
    x, y = builder.add_input("x"), builder.add_input("y")
    (p,) = builder.apply(Function(PRODUCT), [x, y])
    (s,) = builder.apply(reduce(dims, keepdim=True, value=PRODUCT), [p, y])
    (q,) = builder.apply(reduce(dims, keepdim=True, value=SQUARE), [p])
    (t,) = builder.apply(Function(PRODUCT), [s, q])
    (u,) = builder.apply(Function(PRODUCT), [t, p])
    (r,) = builder.apply(Function(ADD), [u, x])
    return builder.build([r, t, q])


# By name: the group over some dimensions, and how its inputs follow from the first tensor.
GROUPS: dict[str, tuple[Callable[[Dims], FusionGroup], Callable[[torch.Tensor, Dims], list[Any]]]] = {
    "total": (total, lambda x, _: [x]),
    "skewed": (skewed, lambda x, _: [x]),
    "shifted": (shifted, lambda x, _: [x]),
    "columns": (columns, lambda x, _: [x]),
    "largest": (largest, lambda x, _: [x]),
    "dot": (dot, lambda x, _: [x, x.flip(0) if x.dim() else x]),
    "halves": (halves, lambda x, _: [x]),
    "moments": (moments, lambda x, _: [x]),
    "place": (place, lambda x, _: [x, numbers(x)]),
    "indexed": (indexed, lambda x, _: [x]),
    "softmax": (softmax, lambda x, _: [x]),
    "layer_norm": (layer_norm, lambda x, dims: [x, *weights(x, dims)]),
    "two": (two, lambda x, _: [x, x.flip(0) if x.dim() else x, 0.25]),
}
# Those whose arithmetic differs between devices.
OWN_GROUPS: dict[str, tuple[Callable[[Dims], FusionGroup], Callable[[torch.Tensor, Dims], list[Any]]]] = {
    "softmax_exp": (softmax_exp, lambda x, _: [x, -1]),
    "contracted": (contracted, lambda x, _: [x, x.flip(0) if x.dim() else x]),
}


def numbers(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.numel(), device=x.device).reshape(x.shape)


def weights(x: torch.Tensor, dims: Dims) -> list[torch.Tensor]:
    reduced = range(x.dim()) if dims is None else [dim % max(x.dim(), 1) for dim in dims]
    shape = [size if dim in reduced else 1 for dim, size in enumerate(x.shape)]
    return [draw(tuple(shape), x.dtype, seed).to(x.device) for seed in (1, 2)]


def draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    drawn = torch.randn(shape, dtype=torch.float64, generator=generator)
    if dtype.is_complex:
        return torch.complex(drawn, torch.randn(shape, dtype=torch.float64, generator=generator)).to(dtype)
    return (drawn * 3).to(dtype) if not dtype.is_floating_point else drawn.to(dtype)


def layouts_of(x: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Give a tensor's values in several layouts."""
    yield "contiguous", x
    if not x.dim():
        return
    for name in LAYOUTS:
        yield name, LAYOUTS[name](x)


def on_gpu(inputs: list[Any]) -> list[Any]:
    """Move tensors to the GPU as they lie in memory, gaps and all."""
    moved = []
    for item in inputs:
        if isinstance(item, torch.Tensor):
            base = item.new_empty(0).set_(item.untyped_storage()).cuda()
            item = base.as_strided(item.shape, item.stride(), item.storage_offset())
        moved.append(item)
    return moved


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "gaps": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "unaligned": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape) if x.numel() else x,
    "padded": lambda x: torch.cat([x, x[..., :3]], -1)[..., : x.shape[-1]],
}
