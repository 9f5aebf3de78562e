"""``torch.ops.fuser.run``: a registered group as one operator, for FakeTensor, make_fx, Dynamo and AOTAutograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fuser.compiler import registered
from fuser.errors import UnsupportedError
from fuser.executor import run_around, run_plain
from fuser.fallback import Fallback
from fuser.kernel_spec import KernelSpec, infer_layouts, infer_typing
from fuser.tensor_desc import common_device, describe, input_specs, value_layouts

__all__ = [
    "LIBRARY",
    "call_operator",
    "has_torch_dispatch",
    "merge_inputs",
    "needs_operator",
    "split_inputs",
]

LIBRARY = torch.library.Library("fuser", "DEF")  # type: ignore[no-untyped-call]
LIBRARY.define(  # type: ignore[no-untyped-call]
    "run(str key, str kinds, Tensor[] tensors, Scalar[] numbers) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,)
)


def run_operator(key: str, kinds: str, tensors: list[torch.Tensor], numbers: list[Any]) -> list[torch.Tensor]:
    """Run on real tensors (dispatch keys CPU and CUDA)."""
    return run_plain(registered(int(key)), merge_inputs(kinds, tensors, numbers))


def fake_operator(key: str, kinds: str, tensors: list[torch.Tensor], numbers: list[Any]) -> list[torch.Tensor]:
    """Return empty tensors of the dtypes, shapes and strides the group gives; sizes may be symbolic."""
    return _run_fake(registered(int(key)), merge_inputs(kinds, tensors, numbers))


def _run_fake(spec: KernelSpec, inputs: list[Any]) -> list[torch.Tensor]:
    group = spec.group
    described = [describe(item) for item in inputs]
    device = common_device(group, described)
    try:
        typing = infer_typing(group, input_specs(described, device), torch.get_default_dtype())
    except UnsupportedError as error:
        if len(group.applications) == 1:
            return Fallback(group).run(inputs, str(error))
        return run_around(spec, error.application, inputs, _run_fake)
    layouts = infer_layouts(group, value_layouts(described))
    return [
        torch.empty_strided(layouts[value].shape, layouts[value].strides, dtype=typing.values[value], device=device)
        for value in group.outputs
    ]


def call_operator(spec: KernelSpec, inputs: list[Any]) -> list[torch.Tensor]:
    """Run a call through the operator, so that dispatch modes and tensor subclasses see one operator."""
    results: list[torch.Tensor] = torch.ops.fuser.run(str(spec.key), *split_inputs(inputs))
    return results


def split_inputs(inputs: Sequence[Any]) -> tuple[str, list[torch.Tensor], list[Any]]:
    """Return a group's inputs as ``torch.ops.fuser.run`` takes them; ``merge_inputs`` is the reverse.

    Returns:
        One letter per input, ``t`` for a tensor or ``n`` for a number; the tensors; the numbers.
    """
    kinds = "".join("t" if isinstance(item, torch.Tensor) else "n" for item in inputs)
    tensors = [item for item in inputs if isinstance(item, torch.Tensor)]
    numbers = [item for item in inputs if not isinstance(item, torch.Tensor)]
    return kinds, tensors, numbers


def merge_inputs(kinds: str, tensors: Sequence[Any], numbers: Sequence[Any]) -> list[Any]:
    """Return the inputs of a group in order, from what ``split_inputs`` made of them."""
    next_tensor, next_number = iter(tensors), iter(numbers)
    return [next(next_tensor) if kind == "t" else next(next_number) for kind in kinds]


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
