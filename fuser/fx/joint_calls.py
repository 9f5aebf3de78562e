"""Calls of a graph as one function to autograd: torch's own formulas, traced by AOTAutograd for each kind of call.

Both passes are graphs, which are fused like any other. A gradient of a gradient is eager torch's.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import fx
from torch.utils.weak import TensorWeakRef

from fuser import counters
from fuser.config import config
from fuser.errors import GradientError, UnsupportedError
from fuser.fx.both_passes import Joint, trace_joint
from fuser.fx.call_kinds import find_changed_numbers, give, key_of
from fuser.fx.effects import is_random
from fuser.fx.generators import State, drawing_again, find_states
from fuser.fx.taking_turns import taking_turns
from fuser.kernel_cache import Lru
from fuser.launcher import Launcher, record_through, untraced
from fuser.route import Route, find_route, is_transformed, requires_grad
from fuser.warming.follow import alone, current, stand_in

__all__ = ["JointCalls", "Kind"]

# How many kinds of call (sizes, strides, values of numbers) of a fusion node are known, and how many graphs of its own
# it has: tracing takes some 0.1 s, and for what comes later torch's reductions stay torch's (strict: all ops).
MAX_CALLS, MAX_JOINTS = 1024, 16
# How often torch may fail to trace a function.
MAX_FAILURES = 2


class JointCalls:
    """Calls of a graph that autograd differentiates as torch does: by graphs of both passes for each kind of call.

    Args:
        nodes: the graph; returns a tuple of tensors.
        varying: how many of its inputs each call brings: constants come last.
        check: raises what is wrong with a call, which tracing would say much about.
        is_function: whether the results are a function's, which says what they share memory with. If torch cannot trace
            it, it has another way.
        is_strict: as in ``trace_joint``.
    """

    def __init__(
        self,
        nodes: fx.GraphModule,
        varying: int,
        check: Callable[[Sequence[Any]], None],
        *,
        is_function: bool = False,
        is_strict: bool = False,
    ) -> None:
        self.nodes = nodes
        self.draws = any(map(is_random, nodes.graph.nodes))
        self._varying = varying
        self._check = check
        self._is_function, self._is_strict = is_function, is_strict
        self._calls: Lru[Kind] = Lru()
        self._joints: list[Joint] = []
        # The results that have gradients where not all have.
        self._taken: tuple[int, ...] | None = None
        # Whether torch traces it only with numbers as constants: it compares an exponent with others.
        self._binds_numbers = False
        # Kinds of calls for which it could not trace it, and why.
        self._failed: dict[tuple[Any, ...], str] = {}

    def find(self, inputs: tuple[Any, ...]) -> Kind | None:
        """Return what a call goes by; None where the graph is not to be one function to autograd."""
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
                followed = self.find(tuple(map(stand_in, inputs)))
            # Asks of symbols what it relies on.
            return followed if followed is None or followed.joint is None or followed.joint.fits(inputs) else None
        key = key_of(given)
        found = self._calls.get(key)
        if found is None:
            with taking_turns():
                found = Kind(self._joint_for(key, inputs), draws=self.draws)
                self._calls.put(key, found, MAX_CALLS)
        return found

    def run(self, kind: Kind, *inputs: Any) -> Sequence[torch.Tensor]:
        """Return the results of a call of a kind that has a gradient."""
        if kind.asked is not None and kind.may_change():
            with taking_turns():
                key = key_of(inputs[: self._varying])
                self._taken = kind.asked or self._taken
                kind.joint, kind.asked = self._joint_for(key, inputs) or kind.joint, None
        assert kind.joint is not None, "it has gradients"
        unreached = kind.joint.unreached
        if not unreached:
            return _apply(kind, inputs, *inputs)
        return _apply(kind, inputs, *(x.detach() if slot in unreached else x for slot, x in enumerate(inputs)))

    def record(self, launcher: Launcher, run: Callable[..., Any], inputs: Any, tensors: tuple[Any, ...]) -> None:
        """Record that calls like this one are made by ``run``; as ``record_through``."""
        # What is recorded knows no other values of numbers; constants have one. Parts of a group may be torch's, or on
        # another device: whether the default dtype counts is not asked.
        if all(isinstance(item, torch.Tensor) for item in inputs[: self._varying]):
            default = torch.get_default_dtype()
            record_through(launcher, run, inputs, tensors, None, any_size=False, default_dtype=default)

    def forgive(self, inputs: Sequence[Any]) -> None:
        """Take it for no failure of torch's that there is no trace of a call which fails by itself."""
        given = inputs[: self._varying]
        if self._failed and find_route(given).route is Route.AUTOGRAD:
            self._failed.pop(key_of(given), None)

    def why_not(self, inputs: Sequence[Any]) -> str:
        """Return why such calls are not one function to autograd, if torch could not trace them."""
        return self._failed.get(key_of(inputs[: self._varying])) or next(iter(self._failed.values()), "")

    def _joint_for(self, key: tuple[Any, ...], inputs: tuple[Any, ...]) -> Joint | None:
        taken = self._taken
        alike = [joint for joint in self._joints if joint.is_like(key) and joint.takes(taken)]
        joint = next((joint for joint in alike if joint.fits(inputs)), None)
        may_try = not self._is_function or len(self._failed) < MAX_FAILURES
        if joint is None and len(self._joints) < MAX_JOINTS and may_try:
            self._check(inputs)
            joint = self._trace(key, inputs, [item.key for item in alike])
            self._joints += [] if joint is None else [joint]
        return joint

    def _trace(self, key: tuple[Any, ...], inputs: tuple[Any, ...], before: Sequence[tuple[Any, ...]]) -> Joint | None:
        # Sizes and numbers that were others before are symbols from now on; numbers only where torch can.
        changed = () if self._binds_numbers else find_changed_numbers(inputs[: self._varying], before)
        trace = partial(trace_joint, is_function=self._is_function, is_strict=self._is_strict)
        for numbers in (changed, ()) if changed else ((),):
            try:
                with warnings.catch_warnings():
                    if numbers or self._is_function:
                        # AOTAutograd says which op it cannot differentiate: by symbols, or what it reads is written
                        # to.
                        warnings.simplefilter("ignore")
                    return trace(self.nodes, key, inputs, before, numbers, self._taken)
            except UnsupportedError as error:
                self._binds_numbers |= bool(numbers)
                reason = str(error)
        self._failed[key] = reason
        if not self._is_function:
            # A function has fusion nodes, each of which is differentiated.
            counters.count_fallback(reason)
        return None


class Kind:
    """What calls of one kind go by.

    A gradient that nobody gives is no gradient of zeros, which a pole would make NaN. So where only some results have
    one, the backward pass is eager torch's, and later calls go by graphs for those: of one choice, lest it change in
    each call, and for all again once another result has one.
    """

    __slots__ = ("_is_settled", "_packed", "asked", "draws", "joint")

    def __init__(self, joint: Joint | None, *, draws: bool) -> None:
        self.joint = joint
        # Whether calls draw random numbers, which eager torch is to draw, too, where it computes once more.
        self.draws = draws
        # Whether the graphs stay those of all results.
        self._is_settled = False
        # Calls whose saved tensors somebody packs, and whose backward pass is to come.
        self._packed: WeakSet[_Packed] = WeakSet()
        # The results that had a gradient, from a backward pass to the next call.
        self.asked: tuple[int, ...] | None = None

    @property
    def has_gradient(self) -> bool:
        """Whether there are both passes."""
        return self.joint is not None and self.joint.forward is not None

    def may_change(self) -> bool:
        """Whether the next call may save other tensors than those before.

        An activation checkpoint makes a call again in the backward pass, which is to save what it saved at first.
        """
        is_again = _is_packed() and torch._C._current_graph_task_id() != -1
        return not is_again and not self._packed

    def packed(self) -> _Packed:
        """Return what a call whose saved tensors are packed keeps until its backward pass."""
        made = _Packed()
        self._packed.add(made)
        return made

    def note(self, joint: Joint, asked: tuple[int, ...]) -> None:
        """Take note of which results had a gradient in a backward pass of a call by ``joint``."""
        if not asked or joint is not self.joint:
            return
        if not {*asked} <= {*joint.taken}:
            self.asked, self._is_settled = joint.continuous, True
        elif joint.taken == joint.continuous and not (self._is_settled or config.no_compile):
            # Kernels that were prepared are those of all gradients.
            self.asked = asked


class _Packed:
    __slots__ = ("__weakref__",)


def _is_packed() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


class _Differentiated(torch.autograd.Function):
    """``apply(kind, inputs, *seen)``: of the inputs what autograd is to see."""

    @staticmethod
    def forward(ctx: Any, kind: Kind, inputs: tuple[Any, ...], *_: Any) -> tuple[torch.Tensor, ...]:
        joint = kind.joint
        assert joint is not None, "it has gradients"
        assert joint.forward is not None, "it has gradients"
        ctx.states = find_states(inputs) if kind.draws else ()
        made = joint.forward([give(inputs[slot]) for slot in joint.varying])
        # What a function of autograd's returns as a view may not be written to; it has one version with what is saved.
        outputs = tuple([item.detach() if item._is_view() else item for item in made[: joint.count]])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[x for slot, x in enumerate(outputs) if slot not in joint.continuous])
        saved = made[joint.count :]
        ctx.save_for_backward(*(item for item in saved if isinstance(item, torch.Tensor)))
        ctx.saves = any(isinstance(item, torch.Tensor) for item in saved)
        ctx.sizes = [item for item in saved if not isinstance(item, torch.Tensor)]
        ctx.like = [(x.shape, x.dtype, x.device) for x in map(outputs.__getitem__, joint.taken)]
        ctx.kind, ctx.joint = kind, joint
        # For gradients of gradients; what was written to meanwhile has another version. Whoever packs what is saved
        # (an activation checkpoint) wants nothing else to be kept.
        is_packed = _is_packed()
        ctx.inputs, ctx.packed = (_let_go(inputs), kind.packed()) if is_packed else (inputs, None)
        ctx.versions = _versions(joint, inputs)
        return outputs

    @staticmethod
    @untraced
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        joint: Joint = ctx.joint
        asked = tuple(slot for slot in joint.continuous if grads[slot] is not None)
        found: list[torch.Tensor | None] = [None] * len(ctx.inputs)
        plain = find_route([grads[slot] for slot in asked], below_autograd=True)
        # Sparse gradients and others go where torch's own ops take them.
        is_eager = torch.is_grad_enabled() or plain.route is not Route.KERNEL or not {*asked} <= {*joint.taken}
        if asked != joint.taken and _are_unchanged(ctx, _held(ctx)):
            ctx.kind.note(joint, asked)
            is_eager = True
        if is_eager:
            with drawing_again(_find_states(ctx)):
                made = _differentiate(joint, _find_inputs(ctx), [grads[slot] for slot in joint.continuous])
        else:
            tangents = [
                grads[slot] if grads[slot] is not None else torch.zeros(shape, dtype=dtype, device=device)
                for slot, (shape, dtype, device) in zip(joint.taken, ctx.like, strict=True)
            ]
            assert joint.backward is not None, "it has gradients"
            # What was not saved may be asked for twice.
            saved = ctx.saved_tensors if ctx.saves else ()
            made = joint.backward([*ctx.sizes, *saved, *tangents])
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            # As what is saved: the graph may outlive it.
            ctx.inputs, ctx.packed = _let_go(ctx.inputs), None
        for slot, gradient in zip(joint.varying, made, strict=True):
            found[slot] = gradient
        return None, None, *found


# torch.autograd.Function.apply serves transforms, too, and takes its time for it.
_apply: Callable[..., tuple[torch.Tensor, ...]] = super(torch.autograd.Function, _Differentiated).apply


def _held(ctx: Any) -> list[Any]:
    # The inputs, or None for one that is gone.
    return [item() if isinstance(item, TensorWeakRef) else item for item in ctx.inputs]


def _are_unchanged(ctx: Any, inputs: Sequence[Any]) -> bool:
    return all(item is not None for item in inputs) and ctx.versions == _versions(ctx.joint, inputs)


def _find_inputs(ctx: Any) -> list[Any]:
    inputs = _held(ctx)
    if any(item is None for item in inputs):
        raise GradientError(
            "an input of the fused function is gone, which the gradient of a gradient needs: keep it, or take "
            "that before gradients without create_graph"
        )
    if not _are_unchanged(ctx, inputs):
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation"
        )
    return inputs


def _find_states(ctx: Any) -> Sequence[State]:
    if ctx.states is None:
        raise GradientError(
            "a gradient of a gradient, or of some results alone, of a fused function that draws random numbers while a "
            "CUDA graph is recorded: they are others in each replay"
        )
    states: Sequence[State] = ctx.states
    return states


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
