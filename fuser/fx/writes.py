"""What a trace writes to that nobody reads again: buffers of norms, as values that are copied in at the end.

A write is a barrier: nothing moves across it. A batch norm in training writes two buffers between what it reads and
what it returns, and its module counts the batches in a third.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody uses
from torch import fx

from fuser.ops import find_numerics, known_of
from fuser.ops.binding_whole import runs_in_cudnn

__all__ = ["sink_writes", "split_batch_norm"]

_FUNCTIONAL = torch.ops.aten._native_batch_norm_legit_functional.default
_signature = functools.cache(inspect.signature)


def split_batch_norm(create: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Write a call of ``F.batch_norm`` in training as one that writes nothing, and copies into its buffers.

    Args:
        create: makes the symbol of a call, as ``create_proxy`` of a tracer.
        args: of the call, by position.
        kwargs: by name.

    Returns:
        The symbol of the result; None for what stays as it is. Strict numerics leave batch norms to torch, but for
        those that eager torch runs in a kernel of its own on a GPU.
    """
    bound = _signature(F.batch_norm).bind(*args, **kwargs)
    bound.apply_defaults()
    x, *buffers, weight, bias, training, momentum, eps = bound.arguments.values()
    known = known_of(x.node)
    if training is not True or None in buffers or known is None:
        return None
    is_cudnns = runs_in_cudnn(x.node, getattr(weight, "node", None), bias, eps)
    if find_numerics() != "fast" and (known.device_type != "cuda" or is_cudnns):
        return None
    # What F.batch_norm looks at before it calls the operator.
    create("call_function", vars(F)["_verify_batch_size"], (x.size(),), {})
    made = create("call_function", _FUNCTIONAL, (x, weight, bias, *buffers, True, momentum, eps), {})
    for slot, buffer in enumerate(buffers, start=3):
        create("call_method", "copy_", (buffer, made[slot].detach()), {})
    return made[0]


def sink_writes(graph: fx.Graph) -> None:
    """Move writes to tensors that a traced function holds, and reads no more, to the end of its graph."""
    output = graph.output_node()
    sunk = [node for node in graph.nodes if _is_last(node)]
    copies = [node for node in sunk if node.target == "copy_"]
    for node in sunk:
        output.prepend(node)
    if len(copies) > 1:
        with graph.inserting_before(output):
            graph.call_function(torch._foreach_copy_, tuple([node.args[slot] for node in copies] for slot in (0, 1)))
        for node in copies:
            graph.erase_node(node)


def _is_last(node: fx.Node) -> bool:
    # Whether a node writes to a tensor that no other node reads but the norm that the new value comes from.
    if node.op != "call_method" or node.target not in ("copy_", "add_") or node.users or node.kwargs:
        return False
    target: Any = node.args[0]
    readers = {user for user in target.users if user is not node} if isinstance(target, fx.Node) else None
    return readers is not None and target.op == "get_attr" and all(user.target is _FUNCTIONAL for user in readers)
