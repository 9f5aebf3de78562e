"""Reductions in derivatives: the gradient of a sum is that of what is summed, and others are cut out of their group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fuser.combining import Reduction
from fuser.compiler import register
from fuser.cxx.functor import Functor
from fuser.dtypes import dtype_info, is_continuous
from fuser.fallback import Fallback
from fuser.function import Function
from fuser.graph import FusionGroup, GroupBuilder
from fuser.in_parts import run_around
from fuser.kernel_spec import InputSpec, KernelSpec, Typing, infer_typing
from fuser.layout import Shape, broadcast_shapes
from fuser.route import run
from fuser.tensor_desc import common_device, describe, input_specs

__all__ = ["Sum", "find_sum", "run_in_parts"]


@dataclass(frozen=True, slots=True)
class Sum:
    """What a group ends in, all of whose outputs are sums along dimensions."""

    # The group without it: its outputs are what is summed, with the dtypes of the sums.
    group: FusionGroup
    typing: Typing
    reduction: Reduction
    # Inputs whose shapes, broadcast, are that of what is summed.
    shaped_by: tuple[int, ...]

    def shape(self, inputs: Sequence[Any]) -> Shape:
        """Return the shape of what is summed."""
        given = (inputs[slot] for slot in self.shaped_by)
        return broadcast_shapes([tuple(item.shape) for item in given if isinstance(item, torch.Tensor)])

    def spread(self, gradient: torch.Tensor, shape: Shape) -> torch.Tensor:
        """Return the gradient of what is summed, of a shape, from that of a sum."""
        if not self.reduction.keepdim:
            for dim in self.reduction.normalize_dims(len(shape)):
                gradient = gradient.unsqueeze(dim)
        return gradient.expand(shape)


def find_sum(group: FusionGroup, typing: Typing, specs: Sequence[InputSpec | None]) -> Sum | None:
    """Return what a canonical group ends in, if that is nothing but sums, and its only reduction.

    Args:
        group: the group.
        typing: its dtypes.
        specs: of its inputs.
    """
    *before, last = group.applications
    reduction, first = last.function.reduction, group.value_offsets()[-1]
    if reduction is None or reduction.finish is not None or reduction.scans or not _is_sum(reduction.combine):
        return None
    if any(item.function.reshapes for item in before) or min(group.outputs) < first:
        return None
    dtypes = reduction.accumulators(dtype_info(typing.common[-1]).compute_dtype)
    if not all(is_continuous(dtype) for dtype in dtypes):
        # Integers lose what the derivative is of.
        return None
    mapped = replace(last.function, op=None, reduction=None, out_dtypes=typing.values[first:])
    scalars = dict(zip((item.name for item in last.function.scalars), last.scalars, strict=True))
    applied = replace(last, function=mapped, scalars=tuple(scalars[item.name] for item in mapped.scalars))
    summands = register(replace(group, applications=(*before, applied), _key=[])).group
    read = {value for item in group.applications for value in item.tensors}
    return Sum(
        summands,
        infer_typing(summands, specs, torch.get_default_dtype()),
        reduction,
        tuple(slot for slot in range(len(group.inputs)) if slot in read),
    )


def run_in_parts(spec: KernelSpec, inputs: Sequence[Any]) -> list[torch.Tensor]:
    """Run a group that reshapes so that torch differentiates it: all parts but reductions and views have kernels."""
    group = spec.group
    places = [index for index, item in enumerate(group.applications) if item.function.reshapes]
    if len(group.names()) == 1:
        cut = _without_finish(group, inputs) if len(group.applications) == 1 else None
        if cut is None:
            return Fallback(group).run(inputs, "differentiated by torch")
        spec, places = register(cut), [0]
    return run_around(spec, places[0], inputs, run)


def _without_finish(group: FusionGroup, inputs: Sequence[Any]) -> FusionGroup | None:
    # A sum that is finished, as a sum and a functor.
    function = group.applications[0].function
    reduction = function.reduction
    if reduction is None or reduction.finish is None or reduction.counts or not _is_sum(reduction.combine):
        return None
    described = [describe(item) for item in inputs]
    typing = infer_typing(group, input_specs(described, common_device(group, described)), torch.get_default_dtype())
    compute = dtype_info(typing.common[0]).compute_dtype
    dtypes = reduction.accumulators(compute)
    if any(dtype is not compute for dtype in dtypes):
        # The functor's T would be another one.
        return None
    builder = GroupBuilder(group.numerics)
    handles = [builder.add_input(item.name, is_scalar=item.is_scalar) for item in group.inputs]
    application = group.applications[0]
    by_name = dict(zip((item.name for item in function.scalars), application.scalars, strict=True))

    def bind(names: Sequence[str]) -> list[int]:
        return [handles[by_name[name]] for name in names]

    summed = replace(function, op=None, reduction=reduction._replace(finish=None), out_dtypes=dtypes)
    sums = builder.apply(
        summed, [handles[value] for value in application.tensors], bind([item.name for item in summed.scalars])
    )
    finish = Function(reduction.finish, out_dtypes=typing.values[len(group.inputs) :])
    made = builder.apply(finish, sums, bind([item.name for item in finish.scalars]))
    return builder.build([made[value - len(group.inputs)] for value in group.outputs])


def _is_sum(functor: Functor) -> bool:
    from fuser.linear import is_sum  # noqa: PLC0415 - reads whole texts

    return is_sum(functor)
