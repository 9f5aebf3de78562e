"""Gradients of fusion nodes with torch's reductions: torch's own formulas, traced by AOTAutograd, and fused in turn.

A functor has a derivative of its own. What torch's reductions come to backwards is torch's business, bits included: the
nodes that a fusion node stands for are traced with their backward pass for the sizes of a call, and split into a
forward and a backward graph, which are fused like any other. A gradient of a gradient is eager torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.weak import TensorWeakRef

from fuser import counters
from fuser.errors import GradientError, UnsupportedError
from fuser.fx.passes import FusionModule, FusionPass
from fuser.graph import FusionGroup
from fuser.process import Lock, await_before_fork
from fuser.route import Route, find_route, requires_grad

__all__ = ["DifferentiableFusion"]

# How many kinds of call (sizes, strides, values of numbers) of a fusion node have graphs of their own. Tracing one
# takes some 0.1 s: for those that come later torch's reductions stay torch's.
MAX_JOINTS = 32

_ATEN = torch.ops.aten
_NORM = _ATEN._native_batch_norm_legit_functional.default
_lock = Lock()
# A child that is forked meanwhile would find the tracing of torch's half done.
await_before_fork(_lock)


class DifferentiableFusion(FusionModule):
    """A fusion node with torch's reductions, which autograd differentiates as torch does.

    Attributes:
        nodes: what it stands for, as a graph of the inputs of its group.
    """

    def __init__(self, group: FusionGroup, node_names: Sequence[str], nodes: fx.GraphModule) -> None:
        super().__init__(group, node_names)
        self.nodes = nodes
        # For calls that have no graphs of their own.
        self._apart: fx.GraphModule | None = None
        self._joints: dict[Any, Joint | None] = {}

    def forward(self, *inputs: Any) -> Any:
        """Run the group; returns a tensor, or a tuple of them for several outputs."""
        if not torch.is_grad_enabled() or not any(map(requires_grad, inputs)):
            return self.run(*inputs)
        joint = self._find_joint(inputs)
        made = self._run_apart(inputs) if joint is None else _apply(joint, *inputs)
        return made[0] if len(made) == 1 else made

    def _find_joint(self, inputs: tuple[Any, ...]) -> Joint | None:
        routed = find_route(inputs)
        if routed.route is not Route.AUTOGRAD or any(a is not b for a, b in zip(routed.inputs, inputs, strict=True)):
            # Somebody traces, or maps.
            return None
        key = (torch.get_default_dtype(), *map(_describe, inputs))
        if key not in self._joints:
            with _lock():
                if key not in self._joints and len(self._joints) < MAX_JOINTS:
                    self._joints[key] = _trace_joint(self.nodes, inputs)
        return self._joints.get(key)

    def _run_apart(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if self._apart is None:
            apart = fx.GraphModule(self.nodes, fx.Graph())
            apart.graph.output(apart.graph.graph_copy(self.nodes.graph, {}))
            FusionPass(reduces=False)(apart)
            self._apart = apart
        made: tuple[Any, ...] = self._apart(*inputs)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return DifferentiableFusion, (self.group, self.node_names, self.nodes)


@dataclass(frozen=True, slots=True)
class Joint:
    """Both passes of a graph for one kind of call."""

    nodes: fx.GraphModule
    # Functions of a list, which they empty: of the tensors, and of what the first one saves and the gradients.
    forward: Callable[[list[Any]], Sequence[Any]]
    backward: Callable[[list[Any]], Sequence[Any]]
    count: int
    # Which inputs are tensors; which outputs have gradients, and of which shape, dtype and device these are.
    tensors: tuple[int, ...]
    continuous: tuple[int, ...]
    # The tensors that gradients depend on: all but statistics that a norm only updates.
    read: tuple[int, ...]
    like: tuple[tuple[torch.Size, torch.dtype, torch.device], ...]


class _Differentiated(torch.autograd.Function):
    """``apply(joint, *inputs)``."""

    @staticmethod
    def forward(ctx: Any, joint: Joint, *inputs: Any) -> tuple[torch.Tensor, ...]:
        made = joint.forward([inputs[slot] for slot in joint.tensors])
        outputs = tuple(made[: joint.count])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[x for slot, x in enumerate(outputs) if slot not in joint.continuous])
        ctx.save_for_backward(*made[joint.count :])
        ctx.joint = joint
        # For gradients of gradients; what was written to meanwhile has another version. Whoever packs what is saved
        # (an activation checkpoint) wants nothing else to be kept.
        is_packed = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        ctx.inputs = _let_go(inputs) if is_packed else inputs
        ctx.versions = _versions(joint, inputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        joint: Joint = ctx.joint
        given = [grads[slot] for slot in joint.continuous]
        found: list[torch.Tensor | None] = [None] * len(ctx.inputs)
        if torch.is_grad_enabled():
            inputs = [item() if isinstance(item, TensorWeakRef) else item for item in ctx.inputs]
            if any(item is None for item in inputs):
                raise GradientError(
                    "an input of the fused function is gone, which the gradient of a gradient needs: keep it, or take "
                    "that before gradients without create_graph"
                )
            if ctx.versions != _versions(joint, inputs):
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation"
                )
            made = _differentiate(joint, inputs, given)
        else:
            tangents = [
                grad if grad is not None else torch.zeros(shape, dtype=dtype, device=device)
                for grad, (shape, dtype, device) in zip(given, joint.like, strict=True)
            ]
            made = joint.backward([*ctx.saved_tensors, *tangents])
            # As what is saved: the graph may outlive it.
            ctx.inputs = _let_go(ctx.inputs)
        for slot, gradient in zip(joint.tensors, made, strict=True):
            found[slot] = gradient
        return None, *found


# torch.autograd.Function.apply serves transforms, too, and takes its time for it.
_apply: Callable[..., tuple[torch.Tensor, ...]] = super(torch.autograd.Function, _Differentiated).apply


def _let_go(inputs: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(TensorWeakRef(item) if isinstance(item, torch.Tensor) else item for item in inputs)


def _versions(joint: Joint, inputs: Sequence[Any]) -> list[int]:
    return [inputs[slot]._version for slot in joint.read]


def _differentiate(
    joint: Joint, inputs: Sequence[Any], grads: Sequence[torch.Tensor | None]
) -> Sequence[torch.Tensor | None]:
    # In eager torch, which differentiates that in turn. Each input is looked at anew: one may be made of another.
    seen = [item.view_as(item) if isinstance(item, torch.Tensor) else item for item in inputs]
    outputs = joint.nodes(*seen)
    pairs = [(outputs[slot], grad) for slot, grad in zip(joint.continuous, grads, strict=True) if grad is not None]
    wanted = [slot for slot in joint.tensors if inputs[slot].requires_grad]
    made = torch.autograd.grad(
        [output for output, _ in pairs],
        [seen[slot] for slot in wanted],
        [grad for _, grad in pairs],
        create_graph=True,
        allow_unused=True,
    )
    found = dict(zip(wanted, made, strict=True))
    return [found.get(slot) for slot in joint.tensors]


def _trace_joint(nodes: fx.GraphModule, inputs: Sequence[Any]) -> Joint | None:
    # None where torch cannot trace it, or its graphs would rely on how gradients lie in memory.
    from torch._functorch.aot_autograd import aot_export_joint_simple  # noqa: PLC0415 - takes a second

    from fuser.fx.backend import compile_graph, split_passes  # noqa: PLC0415 - as above

    tensors = tuple(slot for slot, item in enumerate(inputs) if isinstance(item, torch.Tensor))
    made: list[torch.Tensor] = []

    def run(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        items = list(inputs)
        for slot, item in zip(tensors, given, strict=True):
            items[slot] = item
        made[:] = nodes(*items)
        return tuple(made)

    try:
        graph: Any = aot_export_joint_simple(run, tuple(inputs[slot] for slot in tensors), trace_joint=True)
        _prepare(graph)
        passes = split_passes(graph, (), num_fwd_outputs=len(made))
        forward, backward = (compile_graph(item, ()) for item in passes)
    except Exception as error:  # Whatever the reason, torch's ops one by one are right, and say what is wrong.
        counters.count_fallback(f"{type(error).__name__} in torch's tracing of a backward pass")
        return None
    continuous = tuple(slot for slot, item in enumerate(made) if item.requires_grad)
    like = tuple((made[slot].shape, made[slot].dtype, made[slot].device) for slot in continuous)
    updated = {node for norm in nodes.graph.find_nodes(op="call_function", target=_NORM) for node in norm.args[3:5]}
    placeholders = nodes.graph.find_nodes(op="placeholder")
    read = tuple(slot for slot in tensors if placeholders[slot] not in updated)
    return Joint(nodes, forward, backward, len(made), tensors, continuous, read, like)


def _prepare(graph: fx.GraphModule) -> None:
    """Take out what only says that nobody differentiates, and let gradients lie in memory as they do."""
    for node in graph.graph.find_nodes(op="call_function", target=_ATEN.detach.default):
        node.replace_all_uses_with(node.args[0])
        graph.graph.erase_node(node)
    for node in graph.graph.find_nodes(op="call_function", target=_ATEN.view.default):
        node.target = _ATEN.reshape.default
    if graph.graph.find_nodes(op="call_function", target=_ATEN.as_strided.default):
        raise UnsupportedError("as_strided")


def _describe(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return item.dtype, item.device, item.shape, item.stride(), item.requires_grad
    return type(item), repr(item)
