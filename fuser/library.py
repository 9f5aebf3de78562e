"""``torch.ops.fuser.run``: a group as one operator, for all that traces, saves and loads programs.

Its first argument is the group itself, as text: a graph that calls it needs nothing of the process that made it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from fuser.compiler import registered
from fuser.errors import ArgumentError, UnsupportedError
from fuser.executor import record_planned, run_planned
from fuser.fallback import Fallback
from fuser.in_parts import run_around
from fuser.kernel_spec import KernelSpec, infer_layouts, infer_typing
from fuser.launcher import Replayer
from fuser.tensor_desc import common_device, describe, input_specs, value_layouts

__all__ = [
    "LIBRARY",
    "call_operator",
    "has_dispatch_mode",
    "merge_inputs",
    "needs_operator",
    "replay_operator",
    "run_fake",
    "split_inputs",
]

LIBRARY = torch.library.Library("fuser", "DEF")  # type: ignore[no-untyped-call]
LIBRARY.define(  # type: ignore[no-untyped-call]
    "run(str group, str kinds, Tensor[] tensors, SymInt[] ints, float[] floats) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


class Inputs(NamedTuple):
    """A group's inputs as ``torch.ops.fuser.run`` takes them: lists of one type each, which all can be saved."""

    # What each input is: t for a tensor; i and b for an int and a bool, both in ``ints``; f for a float in ``floats``,
    # or one of NOT_FINITE, which JSON has no way to write; c for a complex, whose two parts follow.
    kinds: str
    tensors: list[torch.Tensor]
    ints: list[Any]
    floats: list[Any]


NOT_FINITE = {"+": math.inf, "-": -math.inf, "n": math.nan}


def run_operator(group: str, *inputs: Any) -> list[torch.Tensor]:
    """Run on real tensors (dispatch keys CPU and CUDA)."""
    values = merge_inputs(*inputs)
    replayed = replay_operator(group, values)
    if replayed is not None:
        return replayed
    results, plan = run_planned(registered(group), values, None)
    if plan is not None:
        record_planned(_launcher_of(group), registered(group), plan, values, tuple(values))
    return results


def replay_operator(group: str, values: Sequence[Any]) -> list[torch.Tensor] | None:
    """Run a call like an earlier one on real tensors; None if there was none."""
    replayed = _launcher_of(group).launch(tuple(values), None, None)
    return [replayed] if isinstance(replayed, torch.Tensor) else replayed and list(replayed)


@cache
def _launcher_of(group: str) -> Replayer:  # noqa: ARG001
    return Replayer((), ())


def fake_operator(group: str, *inputs: Any) -> list[torch.Tensor]:
    """Return empty tensors of the dtypes, shapes and strides the group gives; sizes may be symbolic."""
    return run_fake(registered(group), merge_inputs(*inputs))


def run_fake(spec: KernelSpec, inputs: list[Any]) -> list[torch.Tensor]:
    """As ``fake_operator``, of a registered group's spec."""
    group = spec.group
    described = [describe(item) for item in inputs]
    device = common_device(group, described)
    try:
        typing = infer_typing(group, input_specs(described, device), torch.get_default_dtype())
    except UnsupportedError as error:
        if len(group.applications) == 1:
            return Fallback(group).run(inputs, str(error))
        return run_around(spec, error.application, inputs, run_fake)
    layouts = infer_layouts(group, value_layouts(described))
    return [
        torch.empty_strided(layouts[value].shape, layouts[value].strides, dtype=typing.values[value], device=device)
        for value in group.outputs
    ]


def call_operator(spec: KernelSpec, inputs: list[Any]) -> list[torch.Tensor]:
    """Run a call through the operator, so that dispatch modes and tensor subclasses see one operator."""
    results: list[torch.Tensor] = torch.ops.fuser.run(spec.text, *split_inputs(inputs))
    return results


def split_inputs(inputs: Sequence[Any]) -> Inputs:
    """Return a group's inputs as ``torch.ops.fuser.run`` takes them; ``merge_inputs`` is the reverse.

    Raises:
        ArgumentError: one is neither a tensor nor a number.
    """
    split = Inputs("", [], [], [])
    kinds = ""
    for item in inputs:
        if isinstance(item, torch.Tensor):
            kinds += "t"
            split.tensors.append(item)
        elif isinstance(item, bool | torch.SymBool):
            kinds += "b"
            split.ints.append(int(item))
        elif isinstance(item, int | torch.SymInt):
            kinds += "i"
            split.ints.append(item)
        elif isinstance(item, float | torch.SymFloat):
            kinds += _add_float(item, split.floats)
        elif isinstance(item, complex):
            kinds += "c" + _add_float(item.real, split.floats) + _add_float(item.imag, split.floats)
        else:
            raise ArgumentError(f"expected a tensor or a Python number, got {type(item).__name__}")
    return split._replace(kinds=kinds)


def _add_float(item: Any, floats: list[Any]) -> str:
    # Whether it is finite, so that it can be asked of symbols.
    if item - item == 0:
        floats.append(item)
        return "f"
    return "+" if item > 0 else "-" if item < 0 else "n"


def merge_inputs(kinds: str, tensors: Sequence[Any], ints: Sequence[Any], floats: Sequence[Any]) -> list[Any]:
    """Return the inputs of a group in order, from what ``split_inputs`` made of them."""
    # AOTInductor gives None for a list of ints without any.
    rest, given = iter(kinds), {"t": iter(tensors), "i": iter(ints or ()), "f": iter(floats)}

    # Not for complex numbers, too: a function that calls itself holds itself, and tensors until garbage is collected.
    def read(kind: str) -> Any:
        if kind in given:
            return next(given[kind])
        return bool(next(given["i"])) if kind == "b" else NOT_FINITE[kind]

    return [complex(read(next(rest)), read(next(rest))) if kind == "c" else read(kind) for kind in rest]


def _has_torch_dispatch(item: torch.Tensor) -> bool:
    """Whether a tensor is of a subclass that sees operators."""
    kind = type(item)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return False
    return kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def has_dispatch_mode() -> bool:
    """Whether a dispatch mode sees operators, below autograd or, as ``make_fx(pre_dispatch=True)`` does, above it."""
    return torch._C._len_torch_dispatch_stack() > 0 or torch._ops._len_torch_dispatch_stack_pre_dispatch() > 0  # type: ignore[no-untyped-call]


def needs_operator(items: Sequence[Any]) -> bool:
    """Whether a dispatch mode or a tensor subclass is to see a call of these as one operator."""
    return (has_dispatch_mode() and not _only_looks_for_aliases()) or any(
        isinstance(item, torch.Tensor) and _has_torch_dispatch(item) for item in items
    )


def _only_looks_for_aliases() -> bool:
    # AOTAutograd's mode in a graph's first call: whether a result of others' operators is one of their arguments.
    is_one = torch._C._len_torch_dispatch_stack() == 1
    return is_one and type(torch._C._get_dispatch_stack_at(0)).__name__ == "_AnalyzeCustomOpInputOutputMode"


for _key in ("CPU", "CUDA"):
    LIBRARY.impl("run", run_operator, _key)  # type: ignore[no-untyped-call]
# From which line it comes is for torch's messages alone, and finding that of a file of fuser's takes milliseconds.
torch.library.register_fake("fuser::run", fake_operator, lib=LIBRARY, _stacklevel=0)
