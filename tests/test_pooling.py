"""Places of maxima in poolings: kept in as few bytes as they need."""

from __future__ import annotations

import gc
import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from graph_checks import trace

from fuser.fx.pooling import narrow_places

ATEN = torch.ops.aten


@pytest.mark.parametrize(("side", "dtype"), [(181, torch.int16), (182, torch.int32)])
def test_places_are_kept_in_few_bytes(side: int, dtype: torch.dtype) -> None:
    window = [[3, 3], [2, 2], [1, 1], [1, 1], False]

    def write(call: Any, x: Any, grad: Any) -> Any:
        both = call(ATEN.max_pool2d_with_indices.default, x, *window)
        pooled, places = (call(operator.getitem, both, slot) for slot in range(2))
        return pooled, call(ATEN.max_pool2d_with_indices_backward.default, grad, x, *window, places), places

    half = (side - 1) // 2 + 1
    module = trace(write, [torch.empty(1, 2, side, side), torch.empty(1, 2, half, half)], "cuda")
    narrow_places(module)
    kept, again = module.graph.find_nodes(op="call_function", target=ATEN._to_copy.default)
    assert (kept.kwargs["dtype"], again.kwargs["dtype"]) == (dtype, torch.int64)
    (derivative,) = module.graph.find_nodes(op="call_function", target=ATEN.max_pool2d_with_indices_backward.default)
    assert derivative.args[-1] is again
    # Who gets the places themselves gets torch's.
    assert module.graph.output_node().args[0][2] is kept.args[0]


@pytest.mark.cuda
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_equal_eager_and_less_is_kept(dtype: torch.dtype) -> None:
    x, held, grads = torch.randn(8, 64, 100, 100, device="cuda").to(dtype), [], []
    for backend in ("fuser", "aot_eager"):
        torch._dynamo.reset()
        given = x.detach().requires_grad_()
        function = torch.compile(lambda x: F.max_pool2d(x, 3, 2, 1) * 2, backend=backend, dynamic=False)
        function(given)
        # What other tests left must not go meanwhile.
        made = None
        gc.collect()
        before = torch.cuda.memory_allocated()
        made = function(given)
        held.append(torch.cuda.memory_allocated() - before)
        # Sums of few that have few digits: torch's kernel may add them in any order.
        made.backward((torch.arange(made.numel(), device="cuda") % 4).view_as(made).to(dtype))
        grads.append(given.grad)
    assert torch.equal(*grads)
    # Of 8 bytes for each place 2 are left.
    assert held[0] <= held[1] - 5 * made.numel()
