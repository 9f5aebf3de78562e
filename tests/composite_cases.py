"""Calls of torch's ops that are several steps, as ATen has them: one of each form that matters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fuser.fx.fusion_node import FusionModule
from fuser.fx.passes import FusionPass

__all__ = ["CASES", "Case", "fused", "fusion_modules"]

ATEN = torch.ops.aten
CHANNELS_LAST = torch.channels_last


class Case(NamedTuple):
    """A call: what it calls with its tensors, and those."""

    function: Callable[..., Any]
    tensors: Callable[[torch.dtype], Sequence[torch.Tensor]]
    # The same, where torch has the op on GPUs only.
    reference: Callable[..., Any] | None = None

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what torch makes of the tensors."""
        made = (self.reference or self.function)(*tensors)
        return [item for item in (made if isinstance(made, tuple | list) else (made,)) if item is not None]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Return numbers that are not centred."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * 1.5 + 0.75).to(dtype)


def _norm(shape: tuple[int, ...], rank: int = 1, count: int = 3) -> Callable[[torch.dtype], list[torch.Tensor]]:
    return lambda dtype: [
        draw(*shape, dtype=dtype),
        *(draw(*shape[-rank:], dtype=dtype, seed=seed) for seed in range(1, count)),
    ]


def _layer_norm(mask: list[bool], shape: tuple[int, ...], rank: int = 1, *, has_weight: bool = True) -> Case:
    sizes = list(shape[-rank:])

    def call(grad: Any, x: Any, mean: Any, rstd: Any, *affine: Any) -> Any:
        weight, bias = affine or (None, None)
        return ATEN.native_layer_norm_backward(grad, x, sizes, mean, rstd, weight, bias, mask)

    def tensors(dtype: torch.dtype) -> list[torch.Tensor]:
        x, *affine = _norm(shape, rank)(dtype)
        _, mean, rstd = ATEN.native_layer_norm(x, sizes, None, None, 1e-5)
        return [draw(*shape, dtype=dtype, seed=7), x, mean, rstd, *(affine if has_weight else [])]

    return Case(call, tensors)


def _rms_norm(mask: list[bool], shape: tuple[int, ...], *, has_weight: bool = True) -> Case:
    sizes = [shape[-1]]

    def call(grad: Any, x: Any, rstd: Any, *weight: Any) -> Any:
        return ATEN._fused_rms_norm_backward(grad, x, sizes, rstd, weight[0] if weight else None, mask)

    def reference(grad: Any, x: Any, rstd: Any, *weight: Any) -> Any:
        g, own = grad.to(rstd.dtype), x.to(rstd.dtype)
        loss = g * weight[0].to(rstd.dtype) if weight else g
        dx = rstd * (loss - own * rstd * (loss * own * rstd).mean(-1, keepdim=True))
        columns = (g * own * rstd).sum(tuple(range(x.dim() - 1)))
        return tuple(item.to(x.dtype) for item, wanted in ((dx, mask[0]), (columns, mask[1])) if wanted)

    def tensors(dtype: torch.dtype) -> list[torch.Tensor]:
        x, weight = _norm(shape, 1, 2)(dtype)
        wide = x.double() if dtype is torch.float64 else x.float()
        rstd = (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        return [draw(*shape, dtype=dtype, seed=7), x, rstd, *([weight] if has_weight else [])]

    return Case(call, tensors, reference)


def _channels(
    *shape: int, layout: torch.memory_format = torch.contiguous_format, count: int = 2, has_grad: bool = False
) -> Callable[[torch.dtype], list[torch.Tensor]]:
    def tensors(dtype: torch.dtype) -> list[torch.Tensor]:
        first = [draw(*shape, dtype=dtype, seed=seed).to(memory_format=layout) for seed in range(1 + has_grad)]
        of_channels = [draw(shape[1], dtype=dtype, seed=3 + seed) for seed in range(count)]
        return [*first, *of_channels[:-1], *(item.abs() + 0.5 for item in of_channels[-1:])]

    return tensors


def _batch_norm(x: Any, weight: Any, bias: Any, mean: Any, var: Any) -> Any:
    return ATEN._native_batch_norm_legit_functional(x, weight, bias, mean, var, True, 0.1, 1e-5)


def _batch_norm_backward(mask: list[bool], *, train: bool) -> Callable[..., Any]:
    def call(grad: Any, x: Any, weight: Any, mean: Any, scale: Any) -> Any:
        statistics = (None, None, mean, scale) if train else (mean, scale, None, None)
        made = ATEN.native_batch_norm_backward(grad, x, weight, *statistics, train, 1e-5, mask)
        # What is not asked for is something on the CPU, and nothing on a GPU.
        return tuple(item for item, is_wanted in zip(made, mask, strict=True) if is_wanted)

    return call


def _group_norm_backward(mask: list[bool], groups: int) -> Case:
    def call(grad: Any, x: Any, mean: Any, rstd: Any, weight: Any) -> Any:
        n, c, *rest = x.shape
        return ATEN.native_group_norm_backward(grad, x, mean, rstd, weight, n, c, rest[0] * rest[1], groups, mask)

    def tensors(dtype: torch.dtype) -> list[torch.Tensor]:
        grad, x, weight = _channels(3, 6, 5, 4, count=1, has_grad=True)(dtype)
        _, mean, rstd = ATEN.native_group_norm(x, None, None, 3, 6, 20, groups, 1e-5)
        return [grad, x, mean, rstd, weight]

    return Case(call, tensors)


def _rows(*, has_weight: bool = False, has_grad: bool = False) -> Callable[[torch.dtype], list[torch.Tensor]]:
    def tensors(dtype: torch.dtype) -> list[torch.Tensor]:
        x = torch.log_softmax(draw(33, 10), 1).to(dtype)
        target = torch.arange(33) % 10
        target[4] = -100
        first = [torch.tensor(0.75, dtype=dtype)] if has_grad else []
        last = [torch.tensor(29.5, dtype=dtype)] if has_grad else []
        return [*first, x, target, *([draw(10, dtype=dtype).abs()] if has_weight else []), *last]

    return tensors


def _nll_loss_backward(reduction: int, *, has_weight: bool) -> Callable[..., Any]:
    def call(grad: Any, x: Any, target: Any, *rest: Any) -> Any:
        weight, total = (rest[0] if has_weight else None), rest[-1]
        return ATEN.nll_loss_backward(grad, x, target, weight, reduction, -100, total)

    return call


CASES: dict[str, Case] = {
    "layer_norm": Case(lambda x, w, b: ATEN.native_layer_norm(x, [24], w, b, 1e-5), _norm((5, 3, 24))),
    "layer_norm of two": Case(lambda x, w, b: ATEN.native_layer_norm(x, [3, 24], w, b, 1e-5), _norm((5, 3, 24), 2)),
    "layer_norm without bias": Case(
        lambda x, w: ATEN.native_layer_norm(x, [24], w, None, 1e-5), _norm((5, 3, 24), count=2)
    ),
    "layer_norm alone": Case(lambda x: ATEN.native_layer_norm(x, [24], None, None, 0.5), _norm((9, 24), count=1)),
    "layer_norm transposed": Case(
        lambda x, w, b: ATEN.native_layer_norm(x.transpose(0, 1), [24], w, b, 1e-5), _norm((5, 3, 24))
    ),
    "layer_norm of nothing": Case(lambda x: ATEN.native_layer_norm(x, [24], None, None, 1e-5), _norm((0, 24), count=1)),
    "layer_norm_backward": _layer_norm([True, True, True], (5, 3, 24)),
    "layer_norm_backward of two": _layer_norm([True, True, True], (5, 3, 24), 2),
    "layer_norm_backward to the input": _layer_norm([True, False, False], (5, 3, 24)),
    "layer_norm_backward to the weight": _layer_norm([False, True, False], (5, 3, 24)),
    "layer_norm_backward alone": _layer_norm([True, False, False], (5, 3, 24), has_weight=False),
    "batch_norm": Case(_batch_norm, _channels(4, 6, 5, 7, count=4)),
    "batch_norm channels_last": Case(_batch_norm, _channels(4, 6, 5, 7, layout=CHANNELS_LAST, count=4)),
    "batch_norm of rows": Case(
        lambda x, m, v: ATEN._native_batch_norm_legit_functional(x, None, None, m, v, True, 0.1, 1e-5),
        _channels(40, 6, count=2),
    ),
    "batch_norm inference": Case(
        lambda x, w, b, m, v: ATEN._native_batch_norm_legit_no_training(x, w, b, m, v, 0.1, 1e-5)[0],
        _channels(4, 6, 5, 7, count=4),
    ),
    "batch_norm_backward": Case(
        _batch_norm_backward([True, True, True], train=True), _channels(4, 6, 5, 7, count=3, has_grad=True)
    ),
    "batch_norm_backward channels_last": Case(
        _batch_norm_backward([True, True, True], train=True),
        _channels(4, 6, 5, 7, layout=CHANNELS_LAST, count=3, has_grad=True),
    ),
    "batch_norm_backward to the weight": Case(
        _batch_norm_backward([False, True, True], train=True), _channels(40, 6, count=3, has_grad=True)
    ),
    "batch_norm_backward inference": Case(
        _batch_norm_backward([True, True, True], train=False), _channels(4, 6, 5, 7, count=3, has_grad=True)
    ),
    "group_norm": Case(
        lambda x, w, b: ATEN.native_group_norm(x, w, b, 3, 6, 20, 2, 1e-5), _channels(3, 6, 5, 4, count=2)
    ),
    "group_norm channels_last": Case(
        lambda x, w, b: ATEN.native_group_norm(x, w, b, 3, 6, 20, 3, 1e-5),
        _channels(3, 6, 5, 4, layout=CHANNELS_LAST, count=2),
    ),
    "group_norm_backward": _group_norm_backward([True, True, True], 2),
    "group_norm_backward to the input": _group_norm_backward([True, False, False], 6),
    "nll_loss_backward": Case(_nll_loss_backward(1, has_weight=False), _rows(has_grad=True)),
    "nll_loss_backward weighted": Case(_nll_loss_backward(2, has_weight=True), _rows(has_weight=True, has_grad=True)),
}
if hasattr(ATEN, "_fused_rms_norm_backward"):
    CASES |= {
        "rms_norm_backward": _rms_norm([True, True], (5, 3, 24)),
        "rms_norm_backward alone": _rms_norm([True, False], (5, 24), has_weight=False),
    }


def fused(function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> fx.GraphModule:
    """Trace a call to ATen, and put fusion nodes into its graph."""
    graph_module = make_fx(function, tracing_mode="fake")(*tensors)
    graph_module.graph.eliminate_dead_code()
    FusionPass()(graph_module)
    return graph_module


def fusion_modules(graph_module: fx.GraphModule) -> list[FusionModule]:
    """Return the fusion nodes of a graph."""
    return [module for module in graph_module.children() if isinstance(module, FusionModule)]
