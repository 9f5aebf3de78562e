"""Gradients of fusion nodes with torch's reductions: torch's own formulas, traced by AOTAutograd, and fused in turn.

A functor has a derivative of its own. What torch's reductions come to backwards is torch's business, bits included: the
nodes that a fusion node stands for are traced with their backward pass for the sizes of a call, and split into a
forward and a backward graph, which are fused like any other. A gradient of a gradient is eager torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from fuser.fx.call_kinds import find_read, lift
from fuser.fx.fusion_node import FusionModule
from fuser.fx.joint_calls import JointCalls, Kind
from fuser.fx.passes import FusionPass
from fuser.graph import FusionGroup
from fuser.kernel_spec import infer_layouts
from fuser.launcher import Launcher, Replayer, make_check
from fuser.route import requires_grad
from fuser.sections import cut_by_device
from fuser.tensor_desc import common_device, describe, value_layouts

__all__ = ["DifferentiableFusion", "JointFunction"]


class DifferentiableFusion(FusionModule):
    """A fusion node with torch's reductions, which autograd differentiates as torch does.

    Attributes:
        nodes: what it stands for, as a graph of the inputs of its group.
    """

    is_differentiated = True

    def __init__(self, group: FusionGroup, node_names: Sequence[str], nodes: fx.GraphModule) -> None:
        super().__init__(group, node_names)
        self.nodes = nodes
        # For calls that have no graphs of their own.
        self._apart: fx.GraphModule | None = None
        self._launcher = Replayer((), ())
        varying = sum(item.default is None for item in group.inputs)
        self._calls = JointCalls(nodes, varying, partial(_check_together, group), is_strict=group.is_strict)

    def call(self, inputs: Sequence[Any], launcher: Launcher, tensors: tuple[Any, ...]) -> Any:
        """Run the group for a call that is this and nothing else, and record it; arguments as in ``record_through``."""
        if not torch.is_grad_enabled() or not any(map(requires_grad, inputs)):
            return self.run(*inputs)
        return self._call_anew(tuple(inputs), launcher, tensors)

    def forward(self, *inputs: Any) -> Any:
        """Run the group; returns a tensor, or a tuple of them for several outputs."""
        if not torch.is_grad_enabled() or not any(map(requires_grad, inputs)):
            return self.run(*inputs)
        replayed = self._launcher.launch(inputs, None, None)
        return self._call_anew(inputs, self._launcher, inputs) if replayed is None else replayed

    def _call_anew(self, inputs: tuple[Any, ...], launcher: Launcher, tensors: tuple[Any, ...]) -> Any:
        kind = self._calls.find(inputs)
        if kind is not None and kind.has_gradient:
            run = partial(self._run_joint, kind)
            self._calls.record(launcher, run, inputs, tensors)
            return run(*inputs)
        if kind is not None and kind.joint is not None:
            with torch.no_grad():
                return self.run(*inputs)
        made = self._run_apart(inputs)
        return made[0] if len(made) == 1 else made

    def _run_joint(self, kind: Kind, *inputs: Any) -> Any:
        made = self._calls.run(kind, *inputs)
        return made[0] if len(made) == 1 else made

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


def _check_together(group: FusionGroup, inputs: Sequence[Any]) -> None:
    # Raises what does not fit together: tracing would say much more.
    described = [describe(item) for item in inputs]
    layouts = infer_layouts(group, value_layouts(described))
    # The pass puts what is on several devices into several groups: there it knows where everything is.
    if not cut_by_device(group, layouts, [item.device for item in described]):
        common_device(group, described)


class JointFunction:
    """A traced function that autograd differentiates as a whole, for calls of known sizes; see ``sized``.

    Args:
        nodes: its trace, without fusion nodes; what it reads are tensors.
    """

    def __init__(self, nodes: fx.GraphModule) -> None:
        graph, read = fx.Graph(), find_read(nodes)
        # Those come after the arguments.
        self._read = [*read.values()]
        made = graph.graph_copy(lift(nodes, {}, [*read]).graph, {})
        results = list(dict.fromkeys(_find_results(made)))
        graph.output(tuple(results))
        self._results = {node: slot for slot, node in enumerate(results)}
        self._made = made
        count = len(graph.find_nodes(op="placeholder"))
        self._calls = JointCalls(fx.GraphModule(nodes, graph), count, lambda _: None, is_function=True)

    def find(self, leaves: tuple[Any, ...]) -> Callable[..., Any] | None:
        """Return what runs calls of a kind, with their gradients; None where autograd goes through each fusion node."""
        kind = self._calls.find((*leaves, *self._read))
        return partial(self._run, kind) if kind is not None and kind.has_gradient else None

    def forgive(self, leaves: Sequence[Any]) -> None:
        """See JointCalls."""
        self._calls.forgive([*leaves, *self._read])

    def why_not(self, leaves: Sequence[Any]) -> str:
        """See JointCalls."""
        return self._calls.why_not([*leaves, *self._read])

    def record(
        self, launcher: Launcher, run: Callable[..., Any], otherwise: Callable[..., Any], leaves: tuple[Any, ...]
    ) -> None:
        """Record that calls like this one are made by ``run``, or ``otherwise`` if what it reads has changed."""
        if self._read:
            check = make_check(self._read, compares_sizes=True)
            if check is None:
                return
            run = partial(self._run_if, check, run, otherwise)
        self._calls.record(launcher, run, leaves, leaves)

    def _run(self, kind: Kind, *leaves: Any) -> Any:
        return self._build(self._made, self._calls.run(kind, *leaves, *self._read))

    def _run_if(
        self, check: Callable[..., bool], run: Callable[..., Any], otherwise: Callable[..., Any], *leaves: Any
    ) -> Any:
        return (run if check(*self._read) else otherwise)(*leaves)

    def _build(self, item: Any, made: Sequence[torch.Tensor]) -> Any:
        # What the function returns.
        if isinstance(item, fx.Node):
            return made[self._results[item]]
        if isinstance(item, dict):
            return {key: self._build(value, made) for key, value in item.items()}
        if isinstance(item, list):
            return [self._build(value, made) for value in item]
        return tuple(self._build(value, made) for value in item) if type(item) is tuple else item


def _find_results(made: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    map_arg(made, found.append)
    return found
