"""What joins groups in a compiled graph: each operator beside arithmetic, and why one that stays torch's does."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_checks import trace

from fuser.fx.backend import compile_graph

A: Any = torch.ops.aten
X, Y = torch.randn(4, 6), torch.randn(4, 6)
PLACES, BUFFER = torch.randint(4, (4, 6)), torch.randn(4, 6)
CUDA = {"device": torch.device("cuda"), "pin_memory": False}


def reading(target: Any, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Arithmetic, the operator of it, arithmetic."""

    def write(call: Any, x: Any, *_: Any) -> Any:
        made = call(target, call(A.mul.Tensor, x, 2.0), *args, **kwargs)
        made = call(operator.getitem, made, 0) if isinstance(made.meta["val"], list | tuple) else made
        return call(A.neg.default, made)

    return write


def of_two(target: Any, *args: Any) -> Callable[..., Any]:
    def write(call: Any, x: Any, y: Any, *_: Any) -> Any:
        parts = [call(A.mul.Tensor, x, 2.0), call(A.relu.default, y)]
        made = call(target, parts, *args) if target in {A.cat.default, A.stack.default} else call(target, *parts, *args)
        return call(A.neg.default, made)

    return write


def making(target: Any, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    return lambda call, x, *_: call(A.add.Tensor, call(A.exp.default, x), call(target, *args, **kwargs))


def at_entries(target: Any, arguments: Callable[[Any, Any], tuple[Any, ...]]) -> Callable[..., Any]:
    return lambda call, x, y, entries, _: call(A.neg.default, call(target, *arguments(x, entries)))


def into_a_buffer(call: Any, x: Any, y: Any, _: Any, buffer: Any) -> Any:
    new = call(A.add.Tensor, call(A.mul.Tensor, buffer, 0.5), x)
    made = call(A.neg.default, x)
    call(A.copy_.default, buffer, new)
    return made


def into_a_part(call: Any, x: Any, y: Any, _: Any, buffer: Any) -> Any:
    # As ``buffer[1:3] = y[1:3] * 2`` comes from AOTAutograd.
    seen, part = (call(A.slice.Tensor, item, 0, 1, 3) for item in (buffer, y))
    made = call(A.slice_scatter.default, buffer, call(A.copy.default, seen, call(A.mul.Tensor, part, 2.0)), 0, 1, 3)
    call(A.copy_.default, buffer, made)
    return call(A.neg.default, x)


def one_hot(call: Any, x: Any, y: Any, entries: Any, _: Any) -> Any:
    classes = call(
        torch.ops.prims.iota.default, 4, start=0, step=1, dtype=torch.int64, device="cuda", requires_grad=False
    )
    hot = call(A.eq.Tensor, call(A.unsqueeze.default, entries, -1), classes)
    return call(A.mul.Tensor, call(A._to_copy.default, hot, dtype=torch.int64), call(A.unsqueeze.default, x, -1))


def of_lists(target: Any, *args: Any) -> Callable[..., Any]:
    def write(call: Any, x: Any, y: Any, *_: Any) -> Any:
        made = call(target, [x, y], *args)
        made = call(A._foreach_neg.default, [call(operator.getitem, made, slot) for slot in range(2)])
        return tuple(call(operator.getitem, made, slot) for slot in range(2))

    return write


# An operator, how it is called, and what of the graph stays torch's; views cost nothing.
JOINED: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "slice": (reading(A.slice.Tensor, 1, 1, 5), []),
    "every second": (reading(A.slice.Tensor, 1, 1, 6, 2), []),
    "split, chunk": (reading(A.split.Tensor, 3, 1), []),
    "unequal split": (reading(A.split_with_sizes.default, [1, 5], 1), []),
    "unbind": (reading(A.unbind.int, 0), []),
    "select": (reading(A.select.int, 1, 2), []),
    "permute": (reading(A.permute.default, [1, 0]), []),
    "transpose": (reading(A.transpose.int, 0, 1), []),
    "expand": (reading(A.expand.default, [3, 4, 6]), []),
    "view": (reading(A.view.default, [2, 12]), []),
    "unfold": (reading(A.unfold.default, 1, 2, 2), []),
    "pad": (reading(A.constant_pad_nd.default, [1, 2], 0.5), []),
    "below the diagonal": (reading(A.tril.default, 1), []),
    "contiguous": (reading(A.clone.default, memory_format=torch.contiguous_format), []),
    "to a dtype": (reading(A._to_copy.default, dtype=torch.bfloat16), []),
    "glu": (reading(A.glu.default, 1), []),
    "cat": (of_two(A.cat.default, 1), []),
    "stack": (of_two(A.stack.default, 1), []),
    "slice_backward": (reading(A.slice_backward.default, [4, 9], 1, 2, 8, 1), []),
    "select_backward": (reading(A.select_backward.default, [4, 3, 6], 1, 1), []),
    "full": (making(A.full.default, [4, 6], 2.0, **CUDA), []),
    "zeros": (making(A.zeros.default, [6], **CUDA), []),
    "arange": (making(A.arange.start_step, 0, 12, 2, **CUDA), []),
    "zeros_like": (reading(A.zeros_like.default), []),
    "one_hot": (one_hot, []),
    "embedding": (at_entries(A.embedding.default, lambda x, at: (x, at)), []),
    "gather": (at_entries(A.gather.default, lambda x, at: (x, 0, at)), []),
    "index": (at_entries(A.index.Tensor, lambda x, at: (x, [None, at])), []),
    # Where the other result of the kernel is to lie.
    "into a buffer": (into_a_buffer, ["empty_strided"]),
    "foreach": (of_lists(A._foreach_add.Scalar, 1), []),
    # Written by torch into the part of the buffer where it lies, which takes one launch as well.
    "into a part of a buffer": (into_a_part, ["copy_"]),
    "pad on both dimensions": (reading(A.constant_pad_nd.default, [1, 1, 1, 1], 0.0), []),
    "pad by less than nothing": (reading(A.constant_pad_nd.default, [-1, 1], 0.0), []),
    "crop": (reading(A.constant_pad_nd.default, [-1, 0, -2, -1], 0.0), []),
    "repeat": (reading(A.repeat.default, [2, 1]), []),
    "new zeros": (reading(A.new_zeros.default, [4], pin_memory=False), []),
    "fill": (reading(A.fill.Scalar, 3), []),
    "zero": (reading(A.zero.default), []),
    # Two tensors of entries are a place in two dimensions.
    "index of two": (at_entries(A.index.Tensor, lambda x, at: (x, [at, at])), ["index"]),
    # Read by other elements than are written: flips are no views.
    "flip": (reading(A.flip.default, [0]), ["flip"]),
    "roll along one": (reading(A.roll.default, [1], [0]), []),
    "roll along two": (reading(A.roll.default, [1, -2], [0, 1]), []),
    # All elements as one row.
    "roll without dimensions": (reading(A.roll.default, [1]), ["roll"]),
}  # fmt: skip


@pytest.mark.parametrize("name", JOINED)
def test_what_stays_torchs(name: str) -> None:
    write, left = JOINED[name]
    module = trace(write, (X, Y, PLACES, BUFFER), "cuda")
    compile_graph(module)
    found = [
        str(node.target).split(".")[1]
        for node in module.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload) and not _is_view(node.target)
    ]
    assert found == left
    # What joins is one step with what is around it.
    groups = sum(node.op == "call_module" for node in module.graph.nodes)
    assert groups == 1 if not left else groups


def _is_view(target: torch._ops.OpOverload) -> bool:
    return any(item.alias_info and not item.alias_info.is_write for item in target._schema.returns)
