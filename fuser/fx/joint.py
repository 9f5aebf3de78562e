"""Gradients of fusion nodes with torch's reductions: torch's own formulas, traced by AOTAutograd, and fused in turn.

A functor has a derivative of its own. What torch's reductions come to backwards is torch's business, bits included: the
nodes that a fusion node stands for are traced with their backward pass for the sizes of a call, and split into a
forward and a backward graph, which are fused like any other. A gradient of a gradient is eager torch's.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils.weak import TensorWeakRef

from fuser.errors import DeviceError, GradientError, UnsupportedError
from fuser.fx.both_passes import Joint, find_changed_numbers, give, key_of, trace_joint
from fuser.fx.fusion_node import FusionModule
from fuser.fx.passes import FusionPass
from fuser.graph import FusionGroup
from fuser.kernel_cache import Lru
from fuser.kernel_spec import infer_layouts
from fuser.launcher import Launcher, record_through
from fuser.process import Lock, await_before_fork
from fuser.route import Route, find_route, is_transformed, requires_grad
from fuser.sections import cut_by_device
from fuser.tensor_desc import common_device, describe, follows_default_dtype, input_specs, value_layouts
from fuser.warming.follow import alone, current, stand_in

__all__ = ["DifferentiableFusion"]

# How many kinds of call (sizes, strides, values of numbers) of a fusion node are known, and how many graphs of its own
# it has: tracing takes some 0.1 s, and for what comes later torch's reductions stay torch's (strict: all ops).
MAX_CALLS, MAX_JOINTS = 1024, 16

_lock = Lock()
# A child that is forked meanwhile would find the tracing of torch's half done.
await_before_fork(_lock)


class DifferentiableFusion(FusionModule):
    """A fusion node with torch's reductions, which autograd differentiates as torch does.

    Attributes:
        nodes: what it stands for, as a graph of the inputs of its group.
    """

    is_differentiated = True

    def __init__(self, group: FusionGroup, node_names: Sequence[str], nodes: fx.GraphModule) -> None:
        super().__init__(group, node_names)
        self.nodes = nodes
        # Constants come last.
        self._varying = sum(item.default is None for item in group.inputs)
        # For calls that have no graphs of their own.
        self._apart: fx.GraphModule | None = None
        self._calls: Lru[tuple[Joint | None]] = Lru()
        self._joints: list[Joint] = []
        # Whether torch traces it only with numbers as constants: it compares an exponent with others.
        self._binds_numbers = False

    def call(self, inputs: Sequence[Any], launcher: Launcher, tensors: tuple[Any, ...]) -> Any:
        """Run the group for a call that is this and nothing else, and record it; arguments as in ``record_through``."""
        joint = self._find_joint(tuple(inputs)) if torch.is_grad_enabled() else None
        numbers = {id(item) for item in tensors if not isinstance(item, torch.Tensor)}
        # What is recorded knows no other values of numbers.
        if joint is not None and joint.forward is not None and not numbers and not self._follows_default_dtype(inputs):
            record_through(launcher, partial(_run_joint, joint), inputs, tensors, None, any_size=False)
        return self.forward(*inputs)

    def _follows_default_dtype(self, inputs: Sequence[Any]) -> bool:
        described = [describe(item) for item in inputs]
        try:
            return follows_default_dtype(self.group, input_specs(described, common_device(self.group, described)))
        except (UnsupportedError, DeviceError):
            # Parts of it are torch's, or on another device.
            return True

    def forward(self, *inputs: Any) -> Any:
        """Run the group; returns a tensor, or a tuple of them for several outputs."""
        if not torch.is_grad_enabled() or not any(map(requires_grad, inputs)):
            return self.run(*inputs)
        joint = self._find_joint(inputs)
        if joint is not None and joint.forward is None:
            with torch.no_grad():
                return self.run(*inputs)
        if joint is not None:
            return _run_joint(joint, *inputs)
        made = self._run_apart(inputs)
        return made[0] if len(made) == 1 else made

    def _find_joint(self, inputs: tuple[Any, ...]) -> Joint | None:
        if is_transformed():
            # Neither torch.func's transforms nor tangents go through a function of autograd's that knows none.
            return None
        given = inputs[: self._varying]
        routed = find_route(given)
        if routed.route is not Route.AUTOGRAD or not all(map(operator.is_, routed.inputs, given)):
            # Somebody traces, or maps.
            return None
        if current() is not None:
            with alone():
                followed = self._find_joint(tuple(map(stand_in, inputs)))
            # Asks of symbols what it relies on.
            return followed if followed is None or followed.fits(inputs) else None
        key = key_of(given)
        found = self._calls.get(key)
        if found is None:
            with _lock():
                found = (self._joint_for(key, inputs),)
                self._calls.put(key, found, MAX_CALLS)
        return found[0]

    def _joint_for(self, key: tuple[Any, ...], inputs: tuple[Any, ...]) -> Joint | None:
        alike = [joint for joint in self._joints if joint.is_like(key)]
        joint = next((joint for joint in alike if joint.fits(inputs)), None)
        if joint is None and len(self._joints) < MAX_JOINTS:
            # What does not fit together raises here: tracing would say much more.
            described = [describe(item) for item in inputs]
            layouts = infer_layouts(self.group, value_layouts(described))
            # The pass puts what is on several devices into several groups: there it knows where everything is.
            if not cut_by_device(self.group, layouts, [item.device for item in described]):
                common_device(self.group, described)
            # Sizes and numbers that were others before are symbols from now on.
            before = [item.key for item in alike]
            numbers = () if self._binds_numbers else find_changed_numbers(inputs[: self._varying], before)
            with warnings.catch_warnings():
                if numbers:
                    # AOTAutograd says which op it cannot differentiate by symbols.
                    warnings.simplefilter("ignore")
                joint = trace_joint(self.nodes, key, inputs, before, numbers)
            if joint is None and numbers:
                self._binds_numbers = True
                joint = trace_joint(self.nodes, key, inputs, before)
            self._joints += [] if joint is None else [joint]
        return joint

    def _run_apart(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        # As torch's modules call it, it would print itself with each error.
        made: tuple[Any, ...] = self._find_apart().forward(*inputs)
        return made

    def _find_apart(self) -> fx.GraphModule:
        if self.group.is_strict:
            # A kernel's derivative comes from its text, and is rounded elsewhere than torch's formulas.
            return self.nodes
        if self._apart is None:
            graph = fx.Graph()
            graph.output(graph.graph_copy(self.nodes.graph, {}))
            apart = fx.GraphModule(self.nodes, graph)
            FusionPass(reduces=False)(apart)
            self._apart = apart
        return self._apart

    def __reduce__(self) -> tuple[Any, ...]:
        return DifferentiableFusion, (self.group, self.node_names, self.nodes)


class _Differentiated(torch.autograd.Function):
    """``apply(joint, *inputs)``."""

    @staticmethod
    def forward(ctx: Any, joint: Joint, *inputs: Any) -> tuple[torch.Tensor, ...]:
        assert joint.forward is not None, "it has gradients"
        made = joint.forward([give(inputs[slot]) for slot in joint.varying])
        outputs = tuple(made[: joint.count])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[x for slot, x in enumerate(outputs) if slot not in joint.continuous])
        saved = made[joint.count :]
        ctx.save_for_backward(*(item for item in saved if isinstance(item, torch.Tensor)))
        ctx.saves = any(isinstance(item, torch.Tensor) for item in saved)
        ctx.sizes = [item for item in saved if not isinstance(item, torch.Tensor)]
        ctx.like = [(x.shape, x.dtype, x.device) for x in map(outputs.__getitem__, joint.continuous)]
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
        plain = find_route([item for item in given if item is not None], below_autograd=True)
        if torch.is_grad_enabled() or plain.route is not Route.KERNEL:
            # Sparse gradients and others go where torch's own ops take them.
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
                for grad, (shape, dtype, device) in zip(given, ctx.like, strict=True)
            ]
            assert joint.backward is not None, "it has gradients"
            # What was not saved may be asked for twice.
            saved = ctx.saved_tensors if ctx.saves else ()
            made = joint.backward([*ctx.sizes, *saved, *tangents])
            if not torch._C._autograd._get_current_graph_task_keep_graph():
                # As what is saved: the graph may outlive it.
                ctx.inputs = _let_go(ctx.inputs)
        for slot, gradient in zip(joint.varying, made, strict=True):
            found[slot] = gradient
        return None, *found


# torch.autograd.Function.apply serves transforms, too, and takes its time for it.
_apply: Callable[..., tuple[torch.Tensor, ...]] = super(torch.autograd.Function, _Differentiated).apply


def _run_joint(joint: Joint, *inputs: Any) -> Any:
    made = _apply(joint, *inputs)
    return made[0] if len(made) == 1 else made


def _let_go(inputs: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(TensorWeakRef(item) if isinstance(item, torch.Tensor) else item for item in inputs)


def _versions(joint: Joint, inputs: Sequence[Any]) -> list[int]:
    return [inputs[slot]._version for slot in joint.read]


def _differentiate(
    joint: Joint, inputs: Sequence[Any], grads: Sequence[torch.Tensor | None]
) -> Sequence[torch.Tensor | None]:
    # In eager torch, which differentiates that in turn where it is asked to. Each input is looked at anew: one may be
    # made of another.
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        seen = [item.view_as(item) if isinstance(item, torch.Tensor) else item for item in inputs]
        outputs = joint.nodes.forward(*seen)
    pairs = [(outputs[slot], grad) for slot, grad in zip(joint.continuous, grads, strict=True) if grad is not None]
    wanted = [slot for slot in joint.varying if requires_grad(inputs[slot])]
    made = torch.autograd.grad(
        [output for output, _ in pairs],
        [seen[slot] for slot in wanted],
        [grad for _, grad in pairs],
        create_graph=create_graph,
        allow_unused=True,
    )
    found = dict(zip(wanted, made, strict=True))
    return [found.get(slot) for slot in joint.varying]
