"""Attention masks that say nothing, in Dynamo's graphs: dropped, as models drop them in eager torch.

There a model looks at its mask: one that is true everywhere it leaves out, one of the past alone it writes as
``is_causal=True``, and then heads that share keys need not repeat them. Under ``torch.compile`` it cannot look, makes
the mask all the same, and torch chooses other kernels: twice the work, or, where the mask is expanded, no fused kernel
at all. Here the mask of a graph that makes it of numbers alone is looked at once.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map_only

from fuser.fx.effects import is_barrier, is_random
from fuser.fx.nodes import find_storage

__all__ = ["drop_idle_masks"]

# Larger masks are not looked at.
MAX_ELEMENTS = 1 << 26
_ATTENTION = torch.nn.functional.scaled_dot_product_attention
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
# Who is known to leave such masks out in eager torch: a file's name in the traces of nodes.
_WATCHED = "transformers/masking_utils.py"
# What reads of its first argument only what kind of tensor it is.
_LIKE = frozenset("new_ones new_zeros new_full ones_like zeros_like full_like".split())
_HEADS = (slice(None), slice(None), None, slice(None), slice(None))


def drop_idle_masks(graph_module: fx.GraphModule, *, is_strict: bool) -> None:
    """Take from attention the masks that are true everywhere, or for the past alone.

    ``is_strict``: only where the model does so in eager torch; elsewhere its bits are those of the mask's kernels.
    """
    writes = _find_writes(graph_module.graph)
    constants, seen = _Constants(writes), dict[fx.Node, bool | None]()
    for node in graph_module.graph.find_nodes(op="call_function", target=_ATTENTION):
        given: dict[str, Any] = {**dict(zip(_NAMES, node.args, strict=False)), **node.kwargs}
        mask = given.get("attn_mask")
        if not isinstance(mask, fx.Node) or (is_strict and _WATCHED not in str(mask.meta.get("stack_trace"))):
            continue
        if mask not in seen:
            seen[mask] = _find_kind(constants.find(mask))
        if seen[mask] is None or given.get("is_causal"):
            continue
        given |= {"attn_mask": None, "is_causal": seen[mask]}
        shared = [_without_repetition(given[name], writes) for name in ("key", "value")]
        if None not in shared:
            given |= {"key": shared[0], "value": shared[1], "enable_gqa": True}
        node.args, node.kwargs = (), given
    graph_module.recompile()


def _find_kind(mask: torch.Tensor | None) -> bool | None:
    # Whether it is true for the past alone; None where it is something else than that, or true everywhere.
    if mask is None or mask.dtype is not torch.bool:
        return None
    if mask.all():
        return False
    is_square = mask.dim() > 1 and mask.shape[-1] == mask.shape[-2]
    return True if is_square and torch.equal(mask, torch.ones_like(mask).tril()) else None


def _find_writes(graph: fx.Graph) -> dict[int | None, fx.Node]:
    # By memory the last call that may write to it: what was made there may be something else when it is read.
    found: dict[int | None, fx.Node] = {}
    for node in filter(is_barrier, graph.nodes):
        is_one = node.op == "call_method" or node.target is operator.setitem
        found |= dict.fromkeys(map(_memory, node.all_input_nodes[: 1 if is_one else None]), node)
    found.pop(None, None)
    return found


def _memory(node: fx.Node) -> int | None:
    return find_storage(node.meta.get("example_value"))


def _without_repetition(heads: Any, writes: Mapping[int | None, fx.Node]) -> Any:
    # What is repeated for each head of a query that shares it: x[:, :, None].expand(...).reshape(...).
    expanded = _source(heads, "reshape")
    opened = _source(expanded, "expand")
    if opened is None or opened.target is not operator.getitem or opened.args[1] != _HEADS:
        return None
    if any((last := writes.get(_memory(item))) is not None and last > heads for item in (heads, opened.args[0])):
        return None
    heads_of = [item.meta["example_value"].shape for item in (heads, expanded)]
    return (
        opened.args[0] if heads_of[0] == (heads_of[1][0], heads_of[1][1] * heads_of[1][2], *heads_of[1][3:]) else None
    )


def _source(node: Any, method: str) -> Any:
    is_one = isinstance(node, fx.Node) and node.op == "call_method" and node.target == method
    return node.args[0] if is_one else None


class _Constants:
    """Values of nodes that depend on no input, computed on the CPU; of none in memory that is written to."""

    def __init__(self, written: Container[int | None]) -> None:
        self._written = written
        self._known: dict[fx.Node, torch.Tensor | None] = {}

    def find(self, node: fx.Node) -> torch.Tensor | None:
        """Return the value of a node; None where it is not a tensor that is known."""
        if node not in self._known:
            self._known[node] = self._compute(node)
        return self._known[node]

    def _compute(self, node: fx.Node) -> torch.Tensor | None:
        example = node.meta.get("example_value")
        is_call = node.op in {"call_function", "call_method"} and not is_barrier(node) and not is_random(node)
        if not is_call or not isinstance(example, torch.Tensor) or _memory(node) in self._written:
            return None
        if any(type(size) is not int for size in example.shape) or example.numel() > MAX_ELEMENTS:
            return None
        name = str(getattr(node.target, "__name__", node.target))
        inputs = {item: _like(item) if name in _LIKE else self.find(item) for item in node.all_input_nodes}
        if any(value is None for value in inputs.values()):
            return None
        arguments = map_arg((node.args, dict(node.kwargs)), inputs.__getitem__)
        args, kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), arguments)
        target: Any = node.target if node.op == "call_function" else getattr(torch.Tensor, name)
        try:
            made = target(*args, **kwargs)
        except Exception:  # whatever an operator raises: the model will, too
            return None
        return made if isinstance(made, torch.Tensor) else None


def _like(node: fx.Node) -> torch.Tensor | None:
    example = node.meta.get("example_value")
    return torch.empty(example.shape, dtype=example.dtype) if isinstance(example, torch.Tensor) else None
