"""What a backward pass makes of norms again instead of reading it: in graphs, and between launches of one group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody uses
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_module_simplified

from fuser.compiler import register
from fuser.fx import norms_again
from fuser.fx.backend import split_passes
from fuser.graph import FusionGroup, GroupBuilder
from fuser.ops import OPS, composite_function
from fuser.planner import plan_texts

pytestmark = pytest.mark.cpu

SIZES = (4, 8, 6, 5)


class Split(BaseException):
    """Ends AOTAutograd once a joint graph is in two."""


def passes_of(function: Callable[..., Tensor], tensors: list[Tensor]) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return what AOTAutograd's joint graph of a function becomes."""
    found: list[tuple[fx.GraphModule, fx.GraphModule]] = []

    class Module(torch.nn.Module):
        def forward(self, *given: Tensor) -> tuple[Tensor]:
            return (function(*given),)

    def split(graph: fx.GraphModule, given: Any, **settings: Any) -> Any:
        found.append(split_passes(graph, given, **settings))
        raise Split

    with pytest.raises(Split):
        aot_module_simplified(Module(), tensors, lambda graph, _: graph, partition_fn=split)
    return found[0]


def draw() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(size).requires_grad_() for size in (SIZES, SIZES[1:2], SIZES[1:2])]


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(F.batch_norm(x, None, None, weight, bias, training=True))


def group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, 2, weight, bias))


def test_group_norms_of_single_elements_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    # Which ATen computes in another way: (x - mean) * rstd first.
    monkeypatch.setattr(norms_again, "_is_on_gpu", lambda value: True)
    asked = []
    for height in (1, 2):
        tensors = [torch.randn(size).requires_grad_() for size in ((4, 8, height, 1), (8,), (8,))]
        _, backward = passes_of(group_norm, tensors)
        asked.append(len(backward.graph.find_nodes(op="call_function", target=torch.ops.fuser.run.default)))
    assert asked == [0, 1]


@pytest.mark.parametrize("function", [batch_norm, group_norm])
def test_only_the_input_is_kept(function: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = draw()
    kept = []
    for is_on_gpu in (False, True):
        # Nothing here is on a GPU.
        monkeypatch.setattr(norms_again, "_is_on_gpu", lambda value, answer=is_on_gpu: answer)
        forward, backward = passes_of(function, tensors)
        saved = [node.meta["val"] for node in backward.graph.find_nodes(op="placeholder")]
        kept.append(sum(item.shape == torch.Size(SIZES) for item in saved))
        assert not forward.graph.find_nodes(op="call_function", target=torch.ops.aten.batch_norm_elemt.default)
        assert not forward.graph.find_nodes(op="call_function", target=torch.ops.fuser.run.default)
    # The gradient of what comes out is another one; without a GPU, what the activation gave or got.
    assert kept == [3, 2]
    if function is group_norm:
        # batch_norm_elemt has no kernel for a CPU.
        grad = torch.randn(SIZES)
        out, *saved = forward(*tensors)
        wanted = function(*tensors)
        assert torch.equal(out, wanted)
        made, expected = backward(*saved, grad), torch.autograd.grad(wanted, tensors, grad)
        torch.testing.assert_close(made, expected)


def residual(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    kernel = torch.outer(weight, bias)[..., None, None]
    total = F.conv2d(x, kernel) + x
    return F.conv2d(group_norm(total, weight, bias), kernel) + total


def test_what_a_block_goes_on_with_is_no_reason_to_keep_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others read the norm's input before: torch's partitioner would keep whatever reads it later."""
    monkeypatch.setattr(norms_again, "_is_on_gpu", lambda _: True)
    tensors, grad = draw(), torch.randn(SIZES)
    forward, backward = passes_of(residual, tensors)
    saved = [node.meta["val"] for node in backward.graph.find_nodes(op="placeholder")]
    # The gradient, and what both convolutions and the norm read.
    assert sum(item.shape == torch.Size(SIZES) for item in saved) == 4
    out, *kept = forward(*tensors)
    wanted = residual(*tensors)
    assert torch.equal(out, wanted)
    torch.testing.assert_close(backward(*kept, grad), torch.autograd.grad(wanted, tensors, grad))


def gradients_of_activated_group_norm() -> FusionGroup:
    builder = GroupBuilder("strict")
    again = composite_function("group_norm_elemt", (4, 32, True, True, True))
    backward = composite_function("native_group_norm_backward", (4, 32, True, True, (True, True, True)))
    values = {name: builder.add_input(name) for name in ("input", "grad_out", "weight", "bias", "mean", "rstd")}
    (out,) = builder.apply(again, [values[item.name] for item in again.functor.tensors])
    (values["grad_out"],) = builder.apply(OPS["silu_backward"].function, [values["grad_out"], out])
    return builder.build(builder.apply(backward, [values[item.name] for item in backward.functor.tensors]))


def test_what_a_later_launch_reads_is_not_stored_for_it() -> None:
    group, device = gradients_of_activated_group_norm(), torch.device("cuda")
    shapes = {"input": (8, 64, 32, 32), "grad_out": (8, 64, 32, 32), "mean": (8, 32), "rstd": (8, 32)}
    tensors = [torch.empty(shapes.get(item.name, (64,)), dtype=torch.bfloat16, device="meta") for item in group.inputs]
    found = [spec.group for spec, _ in plan_texts(register(group), tensors, device)]
    made = [
        offset in own.outputs
        for own in found
        for item, offset in zip(own.applications, own.value_offsets(), strict=True)
        if item.function.op == "silu_backward"
    ]
    # The sums of channels read it, and so does the gradient of the input.
    assert made == [False, False]
