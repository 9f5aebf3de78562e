"""Results of kernels with reductions in the memory of what they read: the bits of results in memory of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from cuda_emulation import run_emulated
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from fuser import arg_spec, sections
from fuser.compiler import register
from fuser.fx import FusionPass
from fuser.fx.fusion_node import FusionCall, FusionModule
from fuser.graph import FusionGroup
from fuser.planner import find_in_place
from fuser.row_access import RowLimits
from fuser.tensor_desc import describe

ATEN = torch.ops.aten
F32, BF16 = torch.float32, torch.bfloat16
LONG = 50000


def softmax_gradient(x: Tensor, y: Tensor) -> Any:
    return ATEN._softmax_backward_data(x, y, -1, x.dtype)


def norm_gradients(x: Tensor, y: Tensor) -> Any:
    w = y.select(0, 0)
    mean, rstd = x.float().mean(-1, keepdim=True), x.float().var(-1, keepdim=True).rsqrt()
    return ATEN.native_layer_norm_backward(y, x, x.shape[-1:], mean, rstd, w, w, [True, True, True])


def gate(x: Tensor, y: Tensor) -> Any:
    # Elements, and sums of them, as gates of graph networks have.
    z = x * y
    return z, z.sum(-1, keepdim=True), (x + y).relu()


def centred(x: Tensor, y: Tensor) -> Any:
    return x - x.mean(0), y * y.amax(0)


def twice(x: Tensor, y: Tensor) -> Any:
    # The first one is written before the row is read again.
    return x.exp(), (y - (x + y).softmax(-1)) * x


def channels(x: Tensor, y: Tensor) -> Any:
    w = y.select(0, 0).narrow(0, 0, 8)
    return functional.silu(functional.group_norm(x.unflatten(1, (8, -1)), 2, w, w)).flatten(1)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (softmax_gradient, norm_gradients, gate, centred, twice, channels)
}
SHAPES = {
    "softmax_gradient": [(7, 48), (3, 1000), (2, 4097), (3, 40000)],
    "norm_gradients": [(9, 64), (300, 768)],
    "gate": [(50, 128), (5, 33)],
    "centred": [(300, 40), (37, 1000)],
    "twice": [(6, 96), (3, 2000), (2, 70000)],
    "channels": [(4, 512)],
}
CASES = [(name, shape) for name in FUNCTIONS for shape in SHAPES[name]]


def find_groups(name: str, inputs: Sequence[Tensor], numerics: str) -> Iterator[tuple[FusionGroup, list[Any]]]:
    """Give the groups of a function's graph, as it is on a GPU, each with what it reads."""
    with FakeTensorMode():
        given = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda:0") for x in inputs]
        graph_module = make_fx(FUNCTIONS[name])(*given)
    FusionPass(numerics=numerics)(graph_module)
    known = dict[fx.Node, Any]()
    placeholders = iter(inputs)
    for node in graph_module.graph.nodes:
        read, options = fx.node.map_arg((node.args, node.kwargs), known.get)
        if node.op == "placeholder":
            known[node] = next(placeholders)
        elif node.op == "call_function":
            known[node] = node.target(*read, **options)
        elif node.op == "call_module":
            module = graph_module.get_submodule(str(node.target))
            assert isinstance(module, FusionModule), "nothing else is called"
            yield module.group, list(read)
            made = module.run(*read) if inputs[0].is_cuda else run_emulated(module.group, list(read))
            known[node] = made[0] if isinstance(made, list) and len(made) == 1 else made


def draw(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]


def pairs(spec: Any, inputs: Sequence[Any], results: Sequence[Tensor]) -> Iterator[tuple[int, int, bool]]:
    """Give each result and input that lie alike, and whether one may be the other."""
    device = torch.device("cuda", 0)
    described = [item._replace(device=device) if item.device else item for item in map(describe, inputs)]
    may_be = find_in_place(spec, described)
    for slot, result in enumerate(results):
        for at, item in enumerate(inputs):
            if isinstance(item, Tensor) and (item.dtype, item.shape, item.stride()) == (
                result.dtype, result.shape, result.stride()
            ):  # fmt: skip
                yield slot, at, may_be[slot]


@pytest.mark.one_in(2)
@pytest.mark.cpu
@pytest.mark.parametrize("numerics", ["strict", "fast"])
@pytest.mark.parametrize(("name", "shape"), CASES)
def test_loops_write_over_what_they_read(
    name: str, shape: tuple[int, ...], numerics: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "twice" and shape[1] > LONG:
        # Nothing holds a row: what passes read, they read where it lies.
        monkeypatch.setattr(arg_spec, "row_limits", lambda *_: RowLimits(shared_bytes=0, clusters=1))
        monkeypatch.setattr(sections, "FEW_ROWS", 0)
    tried = 0
    for group, inputs in find_groups(name, draw(shape, BF16 if len(shape) % 2 else F32), numerics):
        wanted = run_emulated(group, inputs)
        for slot, at, may_be in pairs(register(group), inputs, wanted):
            for descending in (False, True) if may_be else ():
                given = [item.clone() if isinstance(item, Tensor) else item for item in inputs]
                made = run_emulated(group, given, descending=descending, over={slot: at})
                for got, want in zip([*made, given[at]], [*wanted, wanted[slot]], strict=True):
                    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
                tried += 1
    # In torch's order columns are added up after the rows, of the same gradients.
    assert tried or (name, numerics) == ("norm_gradients", "strict")


LARGE_CASES = [
    *CASES,
    ("softmax_gradient", (300, 131072)), ("softmax_gradient", (70, 300000)), ("norm_gradients", (9000, 1024)),
    ("gate", (100000, 128)), ("centred", (50000, 256)), ("twice", (2000, 4096)), ("twice", (500, 32768)),
    ("channels", (16, 262144)),
]  # fmt: skip


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("numerics", ["strict", "fast"])
@pytest.mark.parametrize(("name", "shape"), LARGE_CASES)
def test_calls_write_over_what_they_read(name: str, shape: tuple[int, ...], numerics: str, dtype: torch.dtype) -> None:
    for group, inputs in find_groups(name, [x.cuda() for x in draw(shape, dtype)], numerics):
        call = FusionCall(register(group))
        wanted = call(*inputs)
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        for slot, at, _ in pairs(call.spec, inputs, wanted):
            # Where it may not be, results go through memory of their own; the second call is a recorded one.
            for _ in range(3):
                given = [item.clone() if isinstance(item, Tensor) else item for item in inputs]
                out = tuple(given[at] if own == slot else torch.empty_like(item) for own, item in enumerate(wanted))
                call(*given, out=out if len(out) > 1 else out[0])
                for got, want in zip(out, wanted, strict=True):
                    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
