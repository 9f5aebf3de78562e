"""``torch.ops.fuser.run``: a registered group as one operator, for FakeTensor, make_fx, Dynamo and AOTAutograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fuser import executor, planner
from fuser.compiler import registered
from fuser.kernel_spec import KernelSpec, infer_layouts, infer_typing

__all__ = [
    "LIBRARY",
    "call_operator",
    "has_torch_dispatch",
    "needs_operator",
    "number_type",
]

LIBRARY = torch.library.Library("fuser", "DEF")  # type: ignore[no-untyped-call]
LIBRARY.define(  # type: ignore[no-untyped-call]
    "run(str key, str kinds, Tensor[] tensors, Scalar[] numbers) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,)
)


def run_operator(key: str, kinds: str, tensors: list[torch.Tensor], numbers: list[Any]) -> list[torch.Tensor]:
    """Run on real tensors (dispatch keys CPU and CUDA)."""
    return executor.run_plain(registered(int(key)), executor.merge_inputs(kinds, tensors, numbers))


def fake_operator(key: str, kinds: str, tensors: list[torch.Tensor], numbers: list[Any]) -> list[torch.Tensor]:
    """Return empty tensors of the dtypes, shapes and strides the group gives; sizes may be symbolic."""
    spec = registered(int(key))
    inputs = executor.merge_inputs(kinds, tensors, numbers)
    described = [
        planner.Bound(torch.Tensor, item.dtype, tuple(item.shape), tuple(item.stride()), item.device)
        if isinstance(item, torch.Tensor)
        else planner.Bound(number_type(item))
        for item in inputs
    ]
    device = planner.common_device(spec, described)
    typing = infer_typing(spec.group, planner.input_specs(described, device), torch.get_default_dtype())
    layouts = infer_layouts(spec.group, planner.value_layouts(described))
    return [
        torch.empty_strided(layouts[value].shape, layouts[value].strides, dtype=typing.values[value], device=device)
        for value in spec.group.outputs
    ]


def number_type(number: Any) -> type:
    """Return the Python type of a number that may be symbolic."""
    for symbolic, kind in ((torch.SymBool, bool), (torch.SymInt, int), (torch.SymFloat, float)):
        if isinstance(number, symbolic):
            return kind
    return type(number)


def call_operator(spec: KernelSpec, inputs: list[Any]) -> list[torch.Tensor]:
    """Run a call through the operator, so that dispatch modes and tensor subclasses see one operator."""
    results: list[torch.Tensor] = torch.ops.fuser.run(str(spec.key), *executor.split_inputs(inputs))
    return results


def has_torch_dispatch(item: torch.Tensor) -> bool:
    """Whether a tensor is of a subclass that sees operators."""
    kind = type(item)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return False
    return kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def needs_operator(items: Sequence[Any]) -> bool:
    """Whether a dispatch mode or a tensor subclass is to see a call of these as one operator."""
    return torch._C._len_torch_dispatch_stack() > 0 or any(
        isinstance(item, torch.Tensor) and has_torch_dispatch(item) for item in items
    )


for _key in ("CPU", "CUDA"):
    LIBRARY.impl("run", run_operator, _key)  # type: ignore[no-untyped-call]
torch.library.register_fake("fuser::run", fake_operator, lib=LIBRARY)
