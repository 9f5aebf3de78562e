"""Where a call goes: to a kernel, through autograd, through one operator, or to eager torch. Nobody else decides it.

The table, first match first:

======================================================================  ========
what is called, and where                                               route
======================================================================  ========
a tensor that kernels cannot read: sparse, nested, quantized, batched   EAGER
a dispatch mode or torch.jit.trace is on, or a tensor subclass or       OPERATOR
functional wrapper is among the inputs
torch.func differentiates or maps the call, or an input has a tangent   AUTOGRAD
an input requires grad, in grad mode                                    AUTOGRAD
anything else                                                           KERNEL
======================================================================  ========

Inside torch.func's transforms the third line comes before the second: its wrappers are no subclasses, and what they
wrap comes back here. Below autograd the last three lines are one. What a warm-up follows, on fake tensors, goes where
real ones would.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from fuser import library
from fuser.errors import CompilerNotFoundError, GradientError, UnsupportedError
from fuser.executor import record_planned, run_fallback, run_planned, under_autocast
from fuser.in_parts import run_around, run_by_device
from fuser.kernel_spec import KernelSpec
from fuser.launcher import Launcher
from fuser.outputs import check_kinds, finish_out, unusual_kind
from fuser.tensor_desc import check_inputs, names_of
from fuser.warming.follow import current

__all__ = [
    "HANDLERS",
    "GroupCall",
    "Route",
    "Routed",
    "call",
    "call_anew",
    "differentiate_parts",
    "find_route",
    "has_derivative",
    "is_transformed",
    "requires_grad",
    "run",
    "run_below",
]


class Route(Enum):
    """Who serves a call."""

    KERNEL = "kernel"
    AUTOGRAD = "autograd"
    OPERATOR = "operator"
    EAGER = "eager torch"


class Routed(NamedTuple):
    """Where a call goes."""

    route: Route
    # The inputs to go there with: no lazy conjugates and negatives, no zeros without memory, no wrappers of the dead.
    inputs: list[Any]
    # Why, for EAGER.
    reason: str = ""


class GroupCall(NamedTuple):
    """One call of a group on its way."""

    spec: KernelSpec
    inputs: list[Any]
    out: Sequence[torch.Tensor] | None = None
    # Where to leave a record of it, None for nowhere; and the arguments as the launcher takes them.
    launcher: Launcher | None = None
    tensors: tuple[Any, ...] = ()
    scalars: Mapping[str, Any] | None = None
    # As the user gave it.
    given_out: Any = None


# Who serves the routes that lead to rooms above this one: they put themselves here when they are imported.
HANDLERS: dict[Route, Callable[[GroupCall], Sequence[torch.Tensor]]] = {}


def run(spec: KernelSpec, inputs: Sequence[Any], out: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
    """Run a group.

    Args:
        spec: a registered group's spec.
        inputs: one tensor or Python number per input of the group.
        out: tensors to write the outputs to, checked as torch checks ``out=``.

    Returns:
        The outputs; ``out`` itself where given.

    Raises:
        ArgumentError, ShapeError, DeviceError: the inputs do not fit.
        CompileError: a functor does not compile.
        GradientError: an input requires grad and the group has no derivative.
        FallbackError: the group can neither be fused nor run in eager torch.
    """
    return _follow(GroupCall(spec, list(inputs), out))


def call(spec: KernelSpec, launcher: Launcher, inputs: tuple[Any, ...]) -> Any:
    """Run a group whose inputs are its launcher's arguments; replay the call if there is a record of one like it.

    Returns:
        A tensor, or a tuple of them for several outputs.

    Raises:
        As ``run``.
    """
    replayed = launcher.launch(inputs, None, None)
    return call_anew(spec, inputs, launcher, inputs) if replayed is None else replayed


def call_anew(
    spec: KernelSpec,
    inputs: Sequence[Any],
    launcher: Launcher,
    tensors: tuple[Any, ...],
    scalars: Mapping[str, Any] | None = None,
    out: Any = None,
) -> Any:
    """Run a group for a call that ``launcher`` did not know, and record it there.

    Args:
        spec: a registered group's spec.
        inputs: as in ``run``.
        launcher: of the callable.
        tensors: the call's positional arguments.
        scalars: those by name.
        out: None, a tensor or a tuple of tensors.

    Returns:
        A tensor, or a tuple of them for several outputs.

    Raises:
        As ``run``.
    """
    outs = None if out is None else out if isinstance(out, tuple) else (out,)
    results = _follow(GroupCall(spec, list(inputs), outs, launcher, tensors, scalars, out))
    return results[0] if len(results) == 1 else tuple(results)


def run_below(spec: KernelSpec, launcher: Launcher, inputs: tuple[Any, ...]) -> Sequence[torch.Tensor]:
    """As ``call``, below autograd: nobody differentiates this. Returns the outputs as a sequence."""
    if torch.is_grad_enabled():
        with torch.no_grad():
            return run_below(spec, launcher, inputs)
    replayed = launcher.launch(inputs, None, None)
    if replayed is not None:
        return (replayed,) if isinstance(replayed, torch.Tensor) else replayed
    return _serve(GroupCall(spec, list(inputs), None, launcher, inputs), find_route(inputs, below_autograd=True))


def find_route(inputs: Sequence[Any], *, below_autograd: bool = False) -> Routed:
    """Find the route of a call by its inputs and the modes that are on."""
    # Before its class is asked: a class of nested or sparse tensors knows torch's operators, not fuser's; and before
    # its tangent is: those of torch's batched tensors cannot be asked for.
    kinds = [unusual_kind(item) if isinstance(item, torch.Tensor) else "" for item in inputs]
    tensors = [item for item, kind in zip(inputs, kinds, strict=True) if isinstance(item, torch.Tensor) and not kind]
    reason = next(filter(None, kinds), "")
    transformed = (
        not below_autograd
        and not reason
        and is_transformed()
        and (
            # Inside torch.func's transforms nobody may ask for a tangent; without, a level of forward mode
            # alone is none.
            forward_ad._current_level < 0
            or torch._C._functorch.peek_interpreter_stack() is not None
            or _has_tangent(inputs)
        )
    )
    if not reason and not transformed and current() is None and _sees_operators(tensors):
        return Routed(Route.OPERATOR, list(inputs))
    resolved = iter([_resolve(item) for item in tensors])
    items = [
        next(resolved) if isinstance(item, torch.Tensor) and not kind else item
        for item, kind in zip(inputs, kinds, strict=True)
    ]
    if reason:
        return Routed(Route.EAGER, items, f"a {reason} tensor")
    needs_grad = torch.is_grad_enabled() and not below_autograd and any(map(requires_grad, tensors))
    if not transformed and not needs_grad:
        return Routed(Route.KERNEL, items)
    return Routed(Route.AUTOGRAD, [_as_saved(item) for item in items] if needs_grad else items)


def is_transformed() -> bool:
    """Whether torch.func differentiates or maps what is called now, or tensors may carry tangents."""
    if forward_ad._current_level >= 0:
        return True
    interpreter: Any = torch._C._functorch.peek_interpreter_stack()
    # Equal, but each time another object.
    return interpreter is not None and interpreter.key() != torch._C._functorch.TransformType.Functionalize


def _follow(made: GroupCall) -> list[torch.Tensor]:
    check_inputs(made.spec.group, made.inputs)
    if made.out is not None:
        check_kinds(made.out, names_of(made.spec.group))
    if torch.is_autocast_enabled("cuda"):
        made = made._replace(spec=under_autocast(made.spec, made.inputs))
    # A trace does not know where tensors will be: what it put into one group may be on several devices.
    apart = run_by_device(made.spec, made.inputs, run)
    if apart is not None:
        _refuse_gradient(made)
        return apart if made.out is None else finish_out(made.out, apart, names_of(made.spec.group))
    return list(_serve(made, find_route(made.inputs)))


def _serve(made: GroupCall, routed: Routed) -> Sequence[torch.Tensor]:
    is_as_given = all(map(operator.is_, routed.inputs, made.inputs))
    # A record is for calls with tensors like these; what had to be resolved first has no place in one.
    resolved = made if is_as_given else made._replace(inputs=routed.inputs, launcher=None)
    if routed.route is Route.EAGER:
        return run_fallback(made.spec, routed.inputs, routed.reason, made.out)
    if routed.route is Route.KERNEL:
        return _run_kernel(resolved)
    if routed.route is Route.OPERATOR:
        results: Sequence[torch.Tensor] = library.call_operator(made.spec, routed.inputs)
    else:
        results = _differentiate(resolved)
    return results if made.out is None else finish_out(made.out, results, names_of(made.spec.group))


def _run_kernel(made: GroupCall) -> list[torch.Tensor]:
    follower = current()
    if follower is not None:
        if made.out is not None:
            return follower.run_into(made.spec, made.inputs, made.out)
        return follower.run(made.spec, made.inputs)
    results, plan = run_planned(made.spec, made.inputs, made.out)
    if plan is not None and made.launcher is not None:
        record_planned(made.launcher, made.spec, plan, made.inputs, made.tensors, made.scalars, made.given_out)
    return results


def _refuse_gradient(made: GroupCall) -> None:
    if made.out is not None and torch.is_grad_enabled() and any(map(requires_grad, made.inputs)):
        raise GradientError(
            f"{names_of(made.spec.group)}: out= does not support automatic differentiation, but one of the inputs "
            "requires grad"
        )


def _differentiate(made: GroupCall) -> Sequence[torch.Tensor]:
    _refuse_gradient(made)
    return differentiate_parts(made.spec, made.inputs, lambda: HANDLERS[Route.AUTOGRAD](made))


def differentiate_parts(
    spec: KernelSpec, inputs: list[Any], differentiate: Callable[[], Sequence[torch.Tensor]]
) -> Sequence[torch.Tensor]:
    """Return what ``differentiate`` returns; a group with an op that has no kernel goes in parts, or in eager torch."""
    try:
        return differentiate()
    except CompilerNotFoundError:
        raise
    except UnsupportedError as error:
        # What cannot be fused has no derivative of its own either: torch differentiates its eager version.
        reason = str(error).splitlines()[0]
        if error.application >= 0 and len(spec.group.applications) > 1:
            return run_around(spec, error.application, inputs, run)
        return run_fallback(spec, inputs, reason)


def _sees_operators(tensors: Sequence[torch.Tensor]) -> bool:
    # Whether a mode, or the class of a tensor, is to see the call as one operator.
    return library.needs_operator(tensors) or torch._C._is_tracing() or any(map(torch._is_functional_tensor, tensors))


def _as_saved(item: Any) -> Any:
    # What was made in inference mode cannot be saved for a backward pass; a copy can.
    return item.clone() if isinstance(item, torch.Tensor) and item.is_inference() else item


def _resolve(item: torch.Tensor) -> torch.Tensor:
    if torch._C._functorch.is_functorch_wrapped_tensor(item):
        # What outlived its transform, such as an input of torch.func.vjp in the function that it returned.
        item = torch._C._functorch.unwrap_if_dead(item)
    if item.is_conj() or item.is_neg():
        return item.resolve_conj().resolve_neg()
    if item._is_zerotensor():
        # It has no memory.
        return torch.zeros(item.shape, dtype=item.dtype, device=item.device)
    return item


def requires_grad(item: Any) -> bool:
    """Whether it is a tensor that requires grad."""
    return isinstance(item, torch.Tensor) and item.requires_grad


def has_derivative(item: torch.Tensor) -> bool:
    """Whether somebody differentiates by a tensor."""
    return (item.requires_grad and torch.is_grad_enabled()) or _has_tangent([item])


def _has_tangent(inputs: Sequence[Any]) -> bool:
    unpack: Callable[..., Any] = forward_ad.unpack_dual
    return any(isinstance(x, torch.Tensor) and unpack(x).tangent is not None for x in inputs)
