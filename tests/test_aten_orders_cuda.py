"""Strict kernels against torch's own reductions on the device: the same bits, whatever stands around them."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody uses
from torch.fx.experimental.proxy_tensor import make_fx

import fuser
from fuser import order_check
from fuser.cuda import aten_orders
from fuser.orders import Schedule

pytestmark = pytest.mark.cuda

ROWS = (
    (1, 1), (5, 2), (3, 33), (100000, 8), (70000, 3), (4096, 100), (7, 127), (7, 128), (1000, 129), (33, 131),
    (64, 768), (512, 1000), (4096, 1024), (300, 1023), (8, 4096), (1, 4096), (2048, 4096), (100, 5120), (17, 8191),
    (2000, 8192), (64, 16384), (3, 50257), (200, 50257), (1, 65536), (100, 32000), (1, 1 << 20), (2, 300001),
    (0, 5), (5, 0), (131, 3000),
)  # fmt: skip
COLUMNS = (
    (64, 64), (100, 4096), (2048, 768), (1000, 1000), (8192, 1024), (4096, 1102), (999, 1001), (32768, 256),
    (3, 100000), (257, 3), (100000, 7), (5000, 1), (4100, 33),
)  # fmt: skip
OTHERS: tuple[tuple[tuple[int, ...], tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]], ...] = (
    ((16, 64, 28, 28), (0, 2, 3), lambda x: x),
    ((16, 64, 28, 28), (0, 2, 3), lambda x: x.contiguous(memory_format=torch.channels_last)),
    ((8, 64, 56, 56), (2, 3), lambda x: x),
    ((8, 64, 56, 56), (2, 3), lambda x: x.contiguous(memory_format=torch.channels_last)),
    ((16, 300, 64), (1,), lambda x: x),
    ((16, 300, 64), (0, 1), lambda x: x),
    ((16, 30, 640), (0, 2), lambda x: x),
    ((600, 300), (0,), torch.t),
    ((300, 600), (1,), torch.t),
    ((20, 30, 40), (0, 1), lambda x: x.permute(2, 0, 1)),
    ((8, 64, 56, 7), (0, 1, 2, 3), lambda x: x),
    ((64, 1030), (1,), lambda x: x[:, 3:1003]),
    ((512, 2000), (1,), lambda x: x[:, ::2]),
    ((64001,), (0,), lambda x: x[1:]),
    ((65, 1000), (1,), lambda x: x.flatten()[3 : 3 + 64 * 1000].view(64, 1000)),
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def alone(op: str, x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    return getattr(x, op)(dims) * 2


def around(op: str, x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    z = torch.relu(x) + 0.5
    return z - getattr(z, op)(dims, keepdim=True)


def before(op: str, x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    return getattr(x * 1.5, op)(dims)


def along_rows(op: str, x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    return getattr(x * x[..., :1], op)(dims)


def wide(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    # Of many magnitudes: every change of the order shows.
    kind = torch.float64 if dtype is torch.float64 else torch.float32
    first, second = (torch.randn(shape, dtype=kind, device="cuda") for _ in range(2))
    return (first * torch.exp(2 * second)).to(dtype)


@pytest.mark.parametrize("context", [alone, around, before, along_rows])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_torchs_bits(op: str, dtype: torch.dtype, context: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(0)
    cases = [(shape, (1,), lambda x: x) for shape in ROWS] + [(shape, (0,), lambda x: x) for shape in COLUMNS]
    fuser.reset_stats()
    different = []
    for shape, dims, view in (*cases, *OTHERS):
        x = view(wide(*shape, dtype=dtype))
        fused = fuser.fuse(lambda x, dims=dims: context(op, x, dims))
        want = context(op, x, dims)
        got = fused(x)
        assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
        if not torch.equal(torch.nan_to_num(got, 7.0), torch.nan_to_num(want, 7.0)):
            different.append((tuple(x.shape), x.stride(), dims))
    assert not different
    # The order of most shapes is kept; none is a fallback to warn of.
    assert fuser.stats()["kept"] <= (18 if dtype is torch.float64 else 4)
    assert not fuser.stats()["fallbacks"]


@pytest.mark.parametrize("rows", [1, 10, 2048])
@pytest.mark.parametrize("width", [768, 1001, 4096, 8192])
def test_llamas_norm_is_one_kernel_with_the_bits_of_seven(rows: int, width: int) -> None:
    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        z = x.to(torch.float32)
        z = z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weight * z.to(x.dtype)

    x, weight = wide(rows, width, dtype=torch.bfloat16), wide(width, dtype=torch.bfloat16)
    fused = fuser.fuse(norm)
    assert torch.equal(fused(x, weight), norm(x, weight))
    fuser.reset_stats()
    assert torch.equal(fused(x, weight), norm(x, weight))
    assert fuser.stats()["launches"] == 1


WHOLE: dict[str, Callable[..., object]] = {
    "layer_norm": lambda x, w, b, size: F.layer_norm(F.gelu(x), size, w, b),
    "layer_norm without a weight": lambda x, w, b, size: F.layer_norm(x * 2, size) + b,
    "native_layer_norm": lambda x, w, b, size: torch.native_layer_norm(x, size, w, b, 1e-5),
    "rms_norm": lambda x, w, b, size: torch.relu(F.rms_norm(x + b, size, w, 1e-6)),
    "softmax": lambda x, w, b, size: torch.softmax(x * 0.25, -1),
    "log_softmax": lambda x, w, b, size: F.log_softmax(x + b, -1) * 2,
    "logsumexp": lambda x, w, b, size: torch.logsumexp(x, -1, keepdim=True) + b,
    "logsumexp of columns": lambda x, w, b, size: (x * w).logsumexp(0),
    "var": lambda x, w, b, size: (x * 2).var(-1),
    "std": lambda x, w, b, size: torch.relu(x).std(-1, keepdim=True) + 1,
    "var_mean": lambda x, w, b, size: torch.var_mean(x - 1, -1, correction=0),
    "variance of columns": lambda x, w, b, size: (x * w).var(0),
    "norm": lambda x, w, b, size: torch.linalg.vector_norm(x * w, dim=-1),
    "norm of columns": lambda x, w, b, size: torch.linalg.vector_norm(x * w, ord=1, dim=0),
}
GRADIENTS: dict[str, Callable[..., object]] = {
    "layer_norm": lambda dy, x, m, r, w: torch.ops.aten.native_layer_norm_backward(
        dy * 2, x, w.shape, m, r, w, w, [True, False, False]
    )[0],
    "rms_norm": lambda dy, x, m, r, w: torch.ops.aten._fused_rms_norm_backward(dy * 2, x, w.shape, r, w, [True, False])[
        0
    ],
    "layer_norm with weights": lambda dy, x, m, r, w: torch.ops.aten.native_layer_norm_backward(
        dy * 2, x, w.shape, m, r, w, w, [True, True, True]
    ),
    "rms_norm with weights": lambda dy, x, m, r, w: torch.ops.aten._fused_rms_norm_backward(
        dy * 2, x, w.shape, r, w, [True, True]
    ),
    "softmax": lambda dy, x, m, r, w: torch.ops.aten._softmax_backward_data(dy * 2, torch.sigmoid(x), -1, x.dtype),
    "log_softmax": lambda dy, x, m, r, w: torch.ops.aten._log_softmax_backward_data(dy * 2, -x.abs(), -1, x.dtype),
}
SHAPES = (
    (4096, 1024), (512, 4096), (64, 768), (100, 5120), (3, 256), (7, 1000), (64, 1002), (9, 40), (300, 2048),
    (40, 1536), (30, 4100), (20, 8192), (17, 12288), (8, 32000), (5, 50304), (4, 128256), (12, 3),
)  # fmt: skip


def with_size(step: Callable[..., object], size: tuple[int, ...]) -> Callable[..., object]:
    return lambda x, w, b: step(x, w, b, size)


def same(got: object, want: object) -> bool:
    got, want = ([item] if isinstance(item, torch.Tensor) else list(item) for item in (got, want))
    pairs = zip(got, want, strict=True)
    return all(a.dtype is b.dtype and torch.equal(torch.nan_to_num(a, 7.0), torch.nan_to_num(b, 7.0)) for a, b in pairs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WHOLE)
def test_what_has_several_steps_has_torchs_bits(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    different = []
    for rows, width in SHAPES:
        x, weight, bias = (
            wide(*shape, dtype=torch.float32).clamp(-40, 40).to(dtype) for shape in ((rows, width), (width,), (width,))
        )
        step = with_size(WHOLE[name], (width,))
        want, fused = step(x, weight, bias), fuser.fuse(step)
        fuser.reset_stats()
        if not same(fused(x, weight, bias), want):
            different.append((rows, width))
        if os.environ.get("SHOW_KEPT"):
            sys.stderr.write(f"{name} {dtype} {rows}x{width}: {fuser.stats()}\n")
    assert not different


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_have_torchs_bits(name: str, dtype: torch.dtype) -> None:
    if name.startswith("rms_norm") and not hasattr(torch.ops.aten, "_fused_rms_norm_backward"):
        pytest.skip("this torch has no such op")
    torch.manual_seed(0)
    different = []
    for rows, width in SHAPES:
        x, dy, weight = (
            wide(*shape, dtype=torch.float32).clamp(-40, 40).to(dtype)
            for shape in ((rows, width), (rows, width), (width,))
        )
        kind = torch.float64 if dtype is torch.float64 else torch.float32
        m = x.to(kind).mean(-1, keepdim=True)
        inputs = [dy, x, m, 1 / (x.to(kind).var(-1, keepdim=True) + 1e-5).sqrt(), weight]
        want = GRADIENTS[name](*inputs)
        graph = make_fx(GRADIENTS[name], tracing_mode="fake")(*inputs)
        # What is not asked for of an op's results has no node in a graph of AOTAutograd.
        graph.graph.eliminate_dead_code()
        fuser.fx.fuse_graph(graph)
        fuser.reset_stats()
        if not same(graph(*inputs), want):
            different.append((rows, width))
        if os.environ.get("SHOW_KEPT"):
            sys.stderr.write(f"{name} dx {dtype} {rows}x{width}: {fuser.stats()}\n")
    assert not different


LENGTHS = (
    1, 2, 3, 33, 127, 1000, 1024, 1025, 1028, 2048, 2049, 4096, 4100, 9216, 10000, 12248, 12288, 16384, 20001, 24512,
    32000, 50257, 128256, 131072,
)  # fmt: skip
# Of these, rows that begin anywhere, too, and some that are not finite.
ANYWHERE = (3, 1000, 2049, 4100, 10000, 12288, 50257)
SOFTMAX: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
    "softmax of what is computed": lambda x: torch.softmax(x * 0.125, -1) + 1,
    "log_softmax of what is computed": lambda x: torch.relu(torch.log_softmax(x + 1, -1) + 5),
    "softmax beside maxima": lambda x: torch.softmax(x, -1) * x.amax(-1, keepdim=True),
    "softmax of what is cast": lambda x: torch.softmax(x, -1, dtype=torch.float32),
    "softmax_backward": lambda x: torch.ops.aten._softmax_backward_data(x, torch.sigmoid(x), -1, x.dtype),
    "log_softmax_backward": lambda x: torch.ops.aten._log_softmax_backward_data(x, -x.abs(), -1, x.dtype) * 2,
}


def rows_anywhere(length: int, dtype: torch.dtype) -> list[torch.Tensor]:
    rows = min(max((1 << 18) // length, 2), 3001)
    flat = wide(rows * length + 1, dtype=dtype).clamp(-60, 60)
    dense = flat[:-1].view(rows, length)
    if length not in ANYWHERE:
        return [dense]
    special = dense[:2].clone()
    special[0, ::3] = -math.inf
    special[1] = math.nan if length % 2 else math.inf
    return [dense, flat[1:].view(rows, length), special, dense[:1], dense[:, : -(length // 3) or None]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SOFTMAX)
def test_softmax_of_every_length_has_torchs_bits(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    different, kept = [], []
    for length in LENGTHS:
        for number, x in enumerate(rows_anywhere(length, dtype)):
            want = SOFTMAX[name](x)
            fused: Callable[[torch.Tensor], torch.Tensor] = fuser.fuse(SOFTMAX[name])
            if "backward" in name:
                graph = make_fx(SOFTMAX[name], tracing_mode="fake")(x)
                fuser.fx.fuse_graph(graph)
                fused = graph
            fuser.reset_stats()
            if not same(fused(x), want):
                different.append((length, number))
            if number == 0 and fuser.stats()["kept"]:
                kept.append(length)
    assert not different
    assert not kept


ACROSS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda x: torch.softmax(x * 2, 1),
    "log_softmax": lambda x: torch.log_softmax(x, 1) + 1,
    "softmax_backward": lambda x: torch.ops.aten._softmax_backward_data(x, torch.sigmoid(x), 1, x.dtype),
    "log_softmax_backward": lambda x: torch.ops.aten._log_softmax_backward_data(x, -x.abs(), 1, x.dtype),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACROSS)
def test_softmax_of_columns_has_torchs_bits(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    different = []
    for shape in ((3, 100, 30), (2, 1000, 64), (8, 19, 64, 64), (4, 65, 7), (2, 3, 1025), (5, 2000, 2), (1, 7, 3)):
        x = wide(*shape, dtype=dtype).clamp(-60, 60)
        for layout in (x, x.transpose(1, -1).contiguous().transpose(1, -1)):
            want, graph = ACROSS[name](layout), make_fx(ACROSS[name], tracing_mode="fake")(layout)
            fuser.fx.fuse_graph(graph)
            fuser.reset_stats()
            if not same(graph(layout), want) or (layout is x and fuser.stats()["kept"]):
                different.append((shape, fuser.stats()["kept"]))
    assert not different


def cross_entropy(x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, ...]:
    aten = torch.ops.aten
    made = aten._log_softmax(x, 1, False)
    loss, count = aten.nll_loss_forward(made, target, None, 1, -100)
    grad = aten.nll_loss_backward(loss * 3, made, target, None, 1, -100, count)
    return loss, aten._log_softmax_backward_data(grad, made, 1, x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_entropy_has_torchs_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    different = []
    for shape in ((1, 10), (31, 5), (700, 33), (4096, 1000), (33, 4096), (257, 32000), (100, 50257), (40, 128256)):
        x = wide(*shape, dtype=dtype).clamp(-60, 60)
        target = torch.randint(0, shape[1], shape[:1], device="cuda")
        target[1::7] = -100
        for step in (cross_entropy, lambda x, target: cross_entropy(x * 2, target)[:1]):
            want, graph = step(x, target), make_fx(step, tracing_mode="fake")(x, target)
            fuser.fx.fuse_graph(graph)
            fuser.reset_stats()
            if not same(graph(x, target), want) or fuser.stats()["kept"]:
                different.append((shape, fuser.stats()["kept"]))
            assert not any("nll" in str(node.target) for node in graph.graph.nodes)
    assert not different


def fused_as_traced(step: Callable[..., object], inputs: list[torch.Tensor]) -> object:
    graph = make_fx(step, tracing_mode="fake")(*inputs)
    graph.graph.eliminate_dead_code()
    fuser.fx.fuse_graph(graph)
    fuser.reset_stats()
    return graph(*inputs)


@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize(
    ("rows", "width"),
    [(100, 768), (63, 40), (200, 1000), (1001, 1024), (3000, 33), (66000, 256), (66000, 4096), (1, 64), (4096, 1001)],
)
def test_columns_of_norms_have_torchs_bits(rows: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, dy, weight = (wide(*shape, dtype=dtype) for shape in ((rows, width), (rows, width), (width,)))
    statistics = [wide(rows, 1, dtype=torch.float32) for _ in range(2)]

    def step(dy: torch.Tensor, x: torch.Tensor, m: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> object:
        return torch.ops.aten.native_layer_norm_backward(dy * 2, x, w.shape, m, r, w, w, [False, True, True])[1:]

    inputs = [dy, x, *statistics, weight]
    assert same(fused_as_traced(step, inputs), step(*inputs))
    # ATen rounds between the blocks of very many rows.
    assert fuser.stats()["kept"] == (width == 256)


def fused_norm(step: Callable[..., object], inputs: list[torch.Tensor]) -> object:
    """Run a step whose norm is fused: none of ATen's is left, and none is kept."""
    graph = make_fx(step, tracing_mode="fake")(*inputs)
    graph.graph.eliminate_dead_code()
    fuser.fx.fuse_graph(graph)
    assert not [node for node in graph.graph.nodes if "norm" in str(node.target) and "aten" in str(node.target)]
    fuser.reset_stats()
    made = graph(*inputs)
    assert not fuser.stats()["kept"]
    assert not fuser.stats()["fallbacks"]
    return made


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("sizes", "groups"),
    [((4, 32, 16, 16), 8), ((2, 64, 7, 7), 32), ((200, 32, 4, 4), 8), ((2, 512, 64, 64), 32), ((3, 6, 5, 3), 2)],
)
def test_group_norms_have_torchs_bits(sizes: tuple[int, ...], groups: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    (batch, channels, *space), aten = sizes, torch.ops.aten
    x, dy, weight, bias = (wide(*shape, dtype=dtype) for shape in (sizes, sizes, (channels,), (channels,)))
    form = (batch, channels, math.prod(space), groups)

    def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> object:
        out, mean, rstd = aten.native_group_norm(torch.relu(x), weight, bias, *form, 1e-5)
        return F.silu(out), mean, rstd

    def alone(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> object:
        return F.silu(aten.native_group_norm(x, weight, bias, *form, 1e-5)[0])

    def backward(dy: torch.Tensor, x: torch.Tensor, m: torch.Tensor, r: torch.Tensor, weight: torch.Tensor) -> object:
        return aten.native_group_norm_backward(dy * 2, x, m, r, weight, *form, [True, True, True])

    _, mean, rstd = aten.native_group_norm(x, weight, bias, *form, 1e-5)
    steps = ((forward, [x, weight, bias]), (alone, [x, weight, bias]), (backward, [dy, x, mean, rstd, weight]))
    for step, inputs in steps:
        assert same(fused_norm(step, inputs), step(*inputs))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_last", [False, True])
def test_group_norms_of_other_sizes_have_torchs_bits(is_last: bool, dtype: torch.dtype) -> None:
    # Of single elements, too, which ATen has other kernels for.
    torch.manual_seed(0)
    fused = fuser.fuse(silu_of_group_norm)
    fuser.reset_stats()
    for sizes in ((16, 96, 1, 1), (2, 64, 7, 7), (5, 96, 14, 15), (16, 96, 1, 1), (1, 320, 28, 28), (33, 64, 9, 7)):
        x, dy, weight, bias = (wide(*shape, dtype=dtype) for shape in (sizes, sizes, sizes[1:2], sizes[1:2]))
        x = x.to(memory_format=torch.channels_last) if is_last else x
        results = []
        for call in (fused, silu_of_group_norm):
            leaves = [item.detach().requires_grad_() for item in (x, weight, bias)]
            made = call(*leaves)
            results.append([made, *torch.autograd.grad(made, leaves, dy)])
        assert same(*results)
    assert not fuser.stats()["fallbacks"]


def batch_norm_step(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, mean: torch.Tensor, var: torch.Tensor
) -> object:
    norm = torch.ops.aten._native_batch_norm_legit_functional
    made = norm(x * 2, weight, bias, mean, var, True, 0.1, 1e-5)
    return torch.relu(made[0]), *made[1:]


def batch_norm_backward_step(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, m: torch.Tensor, r: torch.Tensor
) -> object:
    backward = torch.ops.aten.native_batch_norm_backward
    return backward(dy * 2, x, weight, None, None, m, r, True, 1e-5, [True, True, True])


CHANNELS_LAST = [(2, 64, 7, 7), (16, 64, 56, 56), (4, 256, 14, 14), (3, 5, 30, 31), (64, 512, 7, 7), (8, 3, 64, 64)]
# A block's threads have one plane, or several, whose elements are a multiple of them or not.
PLANES = [(3, 5, 8, 8), (16, 64, 32, 32), (5, 256, 16, 16), (70, 3, 4, 8), (2, 33, 64, 64), (9, 7, 96, 64)]
PLANES += [(5, 33, 7, 7), (16, 64, 56, 56)]


@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize(
    ("sizes", "layout"),
    [
        *((sizes, torch.channels_last) for sizes in CHANNELS_LAST),
        *((sizes, torch.contiguous_format) for sizes in PLANES),
    ],
)
def test_batch_norms_have_torchs_bits(sizes: tuple[int, ...], layout: torch.memory_format, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, dy = (wide(*sizes, dtype=dtype).contiguous(memory_format=layout) for _ in range(2))
    for kind in {torch.float32, dtype}:
        weight, bias, mean, var = wide(4, sizes[1], dtype=kind)
        _, m, r, *_ = torch.ops.aten._native_batch_norm_legit_functional(x, weight, bias, mean, var, True, 0.1, 1e-5)
        inputs = [x, weight, bias, mean, var.abs()]
        assert same(fused_norm(batch_norm_step, inputs), batch_norm_step(*inputs))
        inputs = [dy, x, weight, m, r]
        assert same(fused_norm(batch_norm_backward_step, inputs), batch_norm_backward_step(*inputs))


@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_norms_in_evaluation_have_torchs_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = wide(6, 64, 14, 15, dtype=dtype)
    weight, bias, mean, var = wide(4, 64, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    layouts = (x, x.contiguous(memory_format=torch.channels_last), x.transpose(2, 3), x[:, :, 1:], x.flatten(2).mT.mT)

    def step(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, mean: torch.Tensor, var: torch.Tensor
    ) -> object:
        norm = torch.ops.aten._native_batch_norm_legit_no_training
        return torch.relu(norm(x * 2, weight, bias, mean, var, 0.1, 1e-5)[0]), norm(
            x, weight, bias, mean, var, 0.1, 1e-5
        )[0]

    for given in layouts:
        inputs = [given, weight, bias, mean, var.abs()]
        assert same(fused_norm(step, inputs), step(*inputs))


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_batch_norms_in_evaluation(dtype: torch.dtype, layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    x, dy = (wide(6, 64, 16, 16, dtype=dtype).contiguous(memory_format=layout) for _ in range(2))
    wider = torch.float64 if dtype is torch.float64 else torch.float32

    def step(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> object:
        backward, none = torch.ops.aten.native_batch_norm_backward, mean.new_empty(0, dtype=wider)
        return backward(dy * 2, x, weight, mean, var, none, none, False, 1e-5, [True, True, True])

    for kind in {dtype, wider}:
        weight, mean, var = wide(3, 64, dtype=kind)
        inputs = [dy, x, weight, mean, var.abs()]
        assert same(fused_as_traced(step, inputs), step(*inputs))


def relu_of_batch_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.relu(F.batch_norm(x, None, None, weight, bias, training=True))


def silu_of_group_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.silu(F.group_norm(x, 8, weight, bias))


@pytest.mark.parametrize(
    ("function", "layout"),
    [
        (relu_of_batch_norm, torch.channels_last),
        (relu_of_batch_norm, torch.contiguous_format),
        (silu_of_group_norm, torch.contiguous_format),
    ],
)
def test_results_of_norms_are_computed_again(
    function: Callable[..., torch.Tensor], layout: torch.memory_format
) -> None:
    torch.manual_seed(0)
    x = wide(8, 64, 32, 32, dtype=torch.bfloat16).contiguous(memory_format=layout).requires_grad_()
    weight, bias = (wide(64, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    found = []
    for step in (fuser.fuse(function), function):
        fuser.reset_stats()
        out = step(x, weight, bias)
        if step is not function:
            # The forward pass keeps its input, and no other tensor of that size, where statistics are given back as
            # they are.
            kept = [item for item in out.grad_fn.saved_tensors if item.shape == x.shape]
            is_exact = function is relu_of_batch_norm or torch.__version__ < "2.13"
            assert len(kept) == (1 if is_exact else 2)
        found.append([out, *torch.autograd.grad(out, (x, weight, bias), torch.sin(out.detach()))])
    assert all(map(torch.equal, *found))


def in_float32(x: torch.Tensor, op: str, dims: tuple[int, ...] | None) -> torch.Tensor:
    return getattr(torch.relu(x), op)(dims, dtype=torch.float32) * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_sums_in_float32_have_torchs_bits(op: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shapes = (((64, 768), (1,)), ((4096, 100), (1,)), ((2048, 768), (0,)), ((3, 50257), (1,)), ((9, 4096), None))
    for shape, dims in shapes:
        inputs = [wide(*shape, dtype=dtype)]
        step = partial(in_float32, op=op, dims=dims)
        assert same(fused_as_traced(step, inputs), step(*inputs))
        assert fuser.stats()["kept"] == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_moments_and_norms_of_sixteen_bits_are_fused(dtype: torch.dtype) -> None:
    for name in ("var", "std", "var_mean", "variance of columns", "norm", "norm of columns"):
        for rows, width in ((64, 768), (300, 4096), (40, 1001)):
            x, weight = wide(rows, width, dtype=dtype).clamp(-40, 40), wide(width, dtype=dtype).clamp(-40, 40)
            step = with_size(WHOLE[name], (width,))
            fused = fuser.fuse(step)
            fuser.reset_stats()
            assert same(fused(x, weight, weight), step(x, weight, weight)), (name, rows, width)
            assert fuser.stats()["kept"] == 0, (name, rows, width)


def test_an_order_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_check, "_verdicts", {})
    monkeypatch.setattr(order_check.disk_cache, "read", lambda key: None)
    x = wide(37, 2048, dtype=torch.float32)
    fused = fuser.fuse(lambda x: (x + 1).sum(-1))
    fuser.reset_stats()
    for count in (37, 36, 35):
        assert torch.equal(fused(x[:count]), (x[:count] + 1).sum(-1))
    assert fuser.stats()["checks"] == 1
    assert fuser.stats()["kept"] == 0


def test_a_wrong_order_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: object, **kwargs: object) -> Schedule:
        return Schedule(32, accumulators=2, vector=2)

    monkeypatch.setattr(order_check, "_verdicts", {})
    monkeypatch.setattr(order_check.disk_cache, "read", lambda key: None)
    monkeypatch.setattr(order_check.disk_cache, "write", lambda key, payload: None)
    monkeypatch.setattr("fuser.row_orders.find_schedule", wrong)
    assert aten_orders.find_schedule is not wrong
    x = wide(40, 3000, dtype=torch.float32)
    fused = fuser.fuse(lambda x: torch.sigmoid((x * 3).sum(-1)))
    fuser.reset_stats()
    assert torch.equal(fused(x), torch.sigmoid((x * 3).sum(-1)))
    assert (fuser.stats()["checks"], fuser.stats()["kept"]) == (1, 1)
    assert not fuser.stats()["fallbacks"]


def test_nothing_is_compared_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_check, "_verdicts", {})
    monkeypatch.setattr(order_check.disk_cache, "read", lambda key: None)
    x = wide(40, 3000, dtype=torch.float32)
    fused = fuser.fuse(lambda x: (x * 3).sum(-1))
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(fuser.errors.CaptureError, match="was not compared"), torch.cuda.graph(graph):
        fused(x)
    torch.cuda.synchronize()
    fused(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = fused(x)
    graph.replay()
    assert torch.equal(got, (x * 3).sum(-1))


def test_random_numbers_of_the_program_are_not_drawn() -> None:
    order_check._verdicts.clear()
    torch.manual_seed(3)
    before_call = torch.cuda.get_rng_state()
    fuser.fuse(lambda x: (x * 3).mean(-1))(torch.ones(7, 555, device="cuda"))
    assert torch.equal(before_call, torch.cuda.get_rng_state())
    assert math.isfinite(torch.rand(1, device="cuda").item())
