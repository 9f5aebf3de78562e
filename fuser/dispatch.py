"""Which way a call goes: to a kernel, through autograd, through one operator, or to eager torch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from fuser import library
from fuser.autodiff import autograd
from fuser.autodiff.case import is_transformed
from fuser.config import config
from fuser.errors import CompilerNotFoundError, GradientError, UnsupportedError
from fuser.executor import run_fallback, run_planned, under_autocast
from fuser.kernel_spec import KernelSpec
from fuser.launcher import Launcher, record_call
from fuser.outputs import check_kinds, finish_out, unusual_kind
from fuser.planner import Plan

__all__ = ["run", "run_and_record"]


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
    items = list(inputs)
    return _run(spec, items, out, lambda spec: autograd.run(spec, items))[0]


def run_and_record(
    spec: KernelSpec,
    inputs: Sequence[Any],
    launcher: Launcher,
    tensors: tuple[Any, ...],
    scalars: Mapping[str, Any] | None = None,
    out: Any = None,
) -> list[torch.Tensor]:
    """Run a group for a call that ``launcher`` did not know, and record it there.

    Args:
        spec: a registered group's spec.
        inputs: as in ``run``.
        launcher: of the callable.
        tensors: the call's positional arguments.
        scalars: those by name.
        out: None, a tensor or a tuple of tensors.
    """
    resolved = list(inputs)
    outs = None if out is None else out if isinstance(out, tuple) else (out,)
    results, plan = _run(
        spec, resolved, outs, lambda spec: autograd.run_and_record(spec, resolved, launcher, tensors, scalars)
    )
    # A replayed launch could not be dumped.
    if plan is not None and "launch" not in config.dump and all(map(operator.is_, resolved, inputs)):
        record_call(launcher, plan, inputs, tensors, scalars, out)
    return results


Differentiate = Callable[[KernelSpec], list[torch.Tensor]]


def _run(
    spec: KernelSpec, inputs: list[Any], out: Sequence[torch.Tensor] | None, differentiate: Differentiate
) -> tuple[list[torch.Tensor], Plan | None]:
    # The results, and the plan if a call like this one can go by it without another look.
    if out is not None:
        check_kinds(out)
    if torch.is_autocast_enabled("cuda"):
        spec = under_autocast(spec, inputs)
    unusual = _unusual(spec, inputs, out, differentiate)
    if unusual is not None:
        return (unusual() if out is None else finish_out(out, unusual())), None
    return run_planned(spec, inputs, out)


def _unusual(
    spec: KernelSpec, inputs: list[Any], out: Sequence[torch.Tensor] | None, differentiate: Differentiate
) -> Callable[[], list[torch.Tensor]] | None:
    # How to run a call that a kernel cannot serve as it is; None for the usual call. Resolves lazy bits in place.
    transformed = is_transformed() and (
        # Inside torch.func's transforms nobody may ask for a tangent; without, a level of forward mode alone is none.
        forward_ad._current_level < 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or _has_tangent(inputs)
    )
    if not transformed and torch._C._len_torch_dispatch_stack() > 0:
        return lambda: library.call_operator(spec, inputs)
    reason = ""
    needs_grad = False
    for index, item in enumerate(inputs):
        if not isinstance(item, torch.Tensor):
            continue
        needs_grad = needs_grad or item.requires_grad
        if item.layout is not torch.strided or item.is_quantized or item.is_nested:
            # Before its class is asked: a class of nested or sparse tensors knows torch's operators, not fuser's.
            reason = f"a {unusual_kind(item)} tensor"
        elif not transformed and library.has_torch_dispatch(item):
            return lambda: library.call_operator(spec, inputs)
        elif item.is_conj() or item.is_neg():
            inputs[index] = item.resolve_conj().resolve_neg()
        elif item._is_zerotensor():
            # It has no memory.
            inputs[index] = torch.zeros(item.shape, dtype=item.dtype, device=item.device)
    if reason:
        return lambda: run_fallback(spec, inputs, reason)
    needs_grad = needs_grad and torch.is_grad_enabled()
    if needs_grad and out is not None:
        raise GradientError("out= does not support automatic differentiation, but one of the inputs requires grad")
    if needs_grad or transformed:
        return lambda: _differentiate(spec, inputs, differentiate)
    return None


def _differentiate(spec: KernelSpec, inputs: list[Any], differentiate: Differentiate) -> list[torch.Tensor]:
    try:
        return differentiate(spec)
    except CompilerNotFoundError:
        raise
    except UnsupportedError as error:
        # What cannot be fused has no derivative of its own either: torch differentiates its eager version.
        return run_fallback(spec, inputs, str(error).splitlines()[0])


def _has_tangent(inputs: Sequence[Any]) -> bool:
    unpack: Callable[..., Any] = forward_ad.unpack_dual
    return any(isinstance(x, torch.Tensor) and unpack(x).tangent is not None for x in inputs)
