"""What ``torch.utils.flop_counter`` counts for fuser's operators: operations of the functors' texts, times elements.

Imported with that module, which imports Triton.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from fuser import library
from fuser.autodiff import pull_back as _pull_back  # noqa: F401 - defines an operator
from fuser.compiler import registered
from fuser.cxx.functor import Functor
from fuser.cxx.operations import count_operations
from fuser.errors import FuserError
from fuser.graph import FusionGroup
from fuser.kernel_spec import ValueLayout, infer_layouts
from fuser.layout import broadcast_shapes
from fuser.ops import bind_inputs, composite_steps
from fuser.tensor_desc import describe, value_layouts

__all__ = ["count_flops"]


def count_flops(group: str, kinds: str, tensors: Sequence[Any], ints: Sequence[Any], floats: Sequence[Any]) -> int:
    """Count the operations of one call of ``torch.ops.fuser.run``; its arguments, whose sizes may be symbolic.

    Each application of a functor counts as ``fuser.cxx.operations`` says, for every element of its result. A reduction
    maps every element, combines one time less than there are elements for each result, and finishes each.
    """
    given = list(map(describe, library.merge_inputs(kinds, tensors, ints, floats)))
    return _count(registered(group).group, value_layouts(given))


def _count(group: FusionGroup, inputs: Sequence[ValueLayout]) -> int:
    layouts = infer_layouts(group, inputs)
    flops = 0
    for application, offset in zip(group.applications, group.value_offsets(), strict=True):
        function, made = application.function, math.prod(layouts[offset].shape)
        tensors = [layouts[value] for value in application.tensors]
        if function.is_composite:
            bound = bind_inputs(function, tensors, [layouts[value] for value in application.scalars])
            flops += _count(composite_steps(str(function.op), function.form or ()), bound)
            continue
        if function.reduction is None:
            flops += made * _operations_of(function.functor)
            continue
        elements = math.prod(broadcast_shapes([item.shape for item in tensors]))
        times = (elements, max(elements - made, 0), made)
        flops += sum(map(operator.mul, times, map(_operations_of, function.functors)))
    return flops


def _operations_of(functor: Functor) -> int:
    try:
        return count_operations(functor)
    except (FuserError, RecursionError) as error:
        warnings.warn(f"the operations of {functor.entry!r} are not counted: {error}", stacklevel=2)
        return 0


def _count_run(*args: Any, out_val: Any = None) -> int:  # noqa: ARG001
    return count_flops(*args)


def _count_pull_back(group: str, *inputs: Any, out_val: Any = None) -> int:  # noqa: ARG001
    # As torch counts the derivative of a convolution: what takes part in the forward pass does so twice.
    return 2 * count_flops(group, *inputs[:4])


register_flop_formula(torch.ops.fuser.run, get_raw=True)(_count_run)
register_flop_formula(torch.ops.fuser.pull_back, get_raw=True)(_count_pull_back)
