"""``torch.ops.fuser.run``: a registered group as one operator, for FakeTensor, make_fx, Dynamo and AOTAutograd.

``torch.ops.fuser.pull_back`` is its derivative where there is none as a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fuser import executor, planner
from fuser.compiler import registered
from fuser.errors import GradientError
from fuser.kernel_spec import KernelSpec, infer_layouts, infer_typing
from fuser.opaque import TensorFunction, call_opaque, pull_back

__all__ = ["LIBRARY"]

LIBRARY = torch.library.Library("fuser", "DEF")  # type: ignore[no-untyped-call]
LIBRARY.define(  # type: ignore[no-untyped-call]
    "run(str key, str kinds, Tensor[] tensors, Scalar[] numbers) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,)
)
LIBRARY.define(  # type: ignore[no-untyped-call]
    "pull_back(str key, str kinds, Tensor[] tensors, Scalar[] numbers, int[] places, Tensor[] gradients, int[] wanted)"
    " -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
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


def eager_function(spec: KernelSpec, inputs: Sequence[Any], places: Sequence[int]) -> TensorFunction:
    """Return the outputs at ``places``, by eager torch, as a function of the inputs that are tensors."""

    def run_eager(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = iter(tensors)
        items = [next(given) if isinstance(item, torch.Tensor) else item for item in inputs]
        results = spec.fallback.run(items, "differentiated by torch")
        return tuple(results[place] for place in places)

    return run_eager


def pull_back_eagerly(
    spec: KernelSpec,
    inputs: Sequence[Any],
    places: Sequence[int],
    gradients: Sequence[torch.Tensor],
    wanted: Sequence[int],
) -> tuple[torch.Tensor, ...]:
    """Differentiate a group's eager version, whose course may depend on data.

    Args:
        spec: a registered group's spec.
        inputs: of the group.
        places: the outputs that have a gradient.
        gradients: those.
        wanted: which of the tensors among the inputs get one.
    """
    kinds, tensors, numbers = executor.split_inputs(inputs)

    def differentiate(*items: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if needs_operator(items):
            # What traces has no data.
            plain, incoming = list(items[: len(tensors)]), list(items[len(tensors) :])
            arguments = (str(spec.key), kinds, plain, numbers, list(places), incoming, list(wanted))
            return tuple(torch.ops.fuser.pull_back(*arguments))
        return pull_back(eager_function(spec, inputs, places), wanted, len(tensors), *items)

    return call_opaque(differentiate, *tensors, *gradients)


def pull_back_operator(
    key: str,
    kinds: str,
    tensors: list[torch.Tensor],
    numbers: list[Any],
    places: list[int],
    gradients: list[torch.Tensor],
    wanted: list[int],
) -> list[torch.Tensor]:
    """Run on real tensors (dispatch keys CPU and CUDA)."""
    function = eager_function(registered(int(key)), executor.merge_inputs(kinds, tensors, numbers), places)
    found = pull_back(function, wanted, len(tensors), *tensors, *gradients)
    # An operator's results are its own memory, and dense as its fake ones.
    return [item.clone(memory_format=torch.contiguous_format) for item in found]


def fake_pull_back(
    key: str,  # noqa: ARG001
    kinds: str,  # noqa: ARG001
    tensors: list[torch.Tensor],
    numbers: list[Any],  # noqa: ARG001
    places: list[int],  # noqa: ARG001
    gradients: list[torch.Tensor],  # noqa: ARG001
    wanted: list[int],
) -> list[torch.Tensor]:
    """Return empty tensors of the shapes of what is differentiated by."""
    return [tensors[place].new_empty(tensors[place].shape) for place in wanted]


def _refuse_second_derivative(ctx: Any, *grads: Any) -> None:  # noqa: ARG001
    raise GradientError("in a traced graph, a functor whose course depends on data has one derivative only")


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
    LIBRARY.impl("pull_back", pull_back_operator, _key)  # type: ignore[no-untyped-call]
torch.library.register_fake("fuser::run", fake_operator, lib=LIBRARY)
torch.library.register_fake("fuser::pull_back", fake_pull_back, lib=LIBRARY)
torch.library.register_autograd("fuser::pull_back", _refuse_second_derivative, lib=LIBRARY)
