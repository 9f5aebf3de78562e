"""``torch.ops.fuser.pull_back``: derivatives of groups that have none as a group, through their eager version."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from fuser.autodiff.opaque import TensorFunction, call_opaque, pull_back
from fuser.autodiff.sums import run_in_parts
from fuser.compiler import registered
from fuser.fallback import Fallback
from fuser.kernel_spec import KernelSpec
from fuser.library import merge_inputs, needs_operator, split_inputs
from fuser.tensor_desc import read_number
from fuser.warming.follow import current

__all__ = ["eager_function", "fake_pull_back", "pull_back_eagerly", "pull_back_operator"]


def eager_function(spec: KernelSpec, inputs: Sequence[Any], slots: Sequence[int]) -> TensorFunction:
    """Return the outputs at ``slots``, by eager torch, as a function of the inputs that are tensors."""

    def run_eager(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = iter(tensors)
        items = [next(given) if isinstance(item, torch.Tensor) else item for item in inputs]
        for slot in spec.group.scalars_of_reductions():
            # The others may be what is differentiated by.
            items[slot] = read_number(items[slot]) if isinstance(items[slot], torch.Tensor) else items[slot]
        if spec.group.reshapes:
            results = run_in_parts(spec, items)
        else:
            results = Fallback(spec.group).run(items, "differentiated by torch")
        return tuple(results[slot] for slot in slots)

    return run_eager


def pull_back_eagerly(
    spec: KernelSpec,
    inputs: Sequence[Any],
    slots: Sequence[int],
    gradients: Sequence[torch.Tensor],
    wanted: Sequence[int],
) -> tuple[torch.Tensor, ...]:
    """Differentiate a group's eager version, whose course may depend on data.

    Args:
        spec: a registered group's spec.
        inputs: of the group.
        slots: the outputs that have a gradient.
        gradients: those.
        wanted: which of the tensors among the inputs get one.
    """
    kinds, tensors, ints, floats = split_inputs(inputs)

    def differentiate(*items: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # A warm-up has to see what parts launch, and needs no data for that.
        is_followed = current() is not None and spec.group.reshapes
        if needs_operator(items) and not is_followed:
            # What traces has no data.
            plain, incoming = list(items[: len(tensors)]), list(items[len(tensors) :])
            arguments = (spec.text, kinds, plain, ints, floats, list(slots), incoming, list(wanted))
            return tuple(torch.ops.fuser.pull_back(*arguments))
        return pull_back(eager_function(spec, inputs, slots), wanted, len(tensors), *items)

    return call_opaque(differentiate, *tensors, *gradients)


def pull_back_operator(
    group: str,
    kinds: str,
    tensors: list[torch.Tensor],
    ints: list[int],
    floats: list[float],
    slots: list[int],
    gradients: list[torch.Tensor],
    wanted: list[int],
) -> list[torch.Tensor]:
    """Run on real tensors (dispatch keys CPU and CUDA)."""
    function = eager_function(registered(group), merge_inputs(kinds, tensors, ints, floats), slots)
    # Below a dispatch mode or a tensor subclass torch.func's transforms are switched off, and no derivative is made.
    with torch._C._ForceDispatchKeyGuard(*_outermost_keys()):
        found = pull_back(function, wanted, len(tensors), *tensors, *gradients)
    # An operator's results are its own memory, and dense as its fake ones.
    return [item.clone(memory_format=torch.contiguous_format) for item in found]


@cache
def _outermost_keys() -> tuple[Any, Any]:
    # Which dispatch keys a thread includes and excludes that is in no operator.
    found: list[Any] = []
    get_keys = (torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_local_exclude_set)
    thread = threading.Thread(target=lambda: found.extend(get() for get in get_keys))
    thread.start()
    thread.join()
    return found[0], found[1]


def fake_pull_back(
    group: str,  # noqa: ARG001
    kinds: str,  # noqa: ARG001
    tensors: list[torch.Tensor],
    ints: list[int],  # noqa: ARG001
    floats: list[float],  # noqa: ARG001
    slots: list[int],  # noqa: ARG001
    gradients: list[torch.Tensor],  # noqa: ARG001
    wanted: list[int],
) -> list[torch.Tensor]:
    """Return empty tensors of the shapes of what is differentiated by."""
    return [tensors[slot].new_empty(tensors[slot].shape) for slot in wanted]
