"""What ``check()`` tries of a reduction, in eager torch: its identity, and whether the grouping changes the result."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fuser.dtypes import is_continuous
from fuser.eager_reduction import EagerReduction, EagerText
from fuser.errors import ArgumentError, UnsupportedError, UntranslatableError
from fuser.function import Function

__all__ = ["check_reduction"]

# What T may be, the first that the texts and the identity take, and the dtype to compile them for.
_COMPUTE = {
    torch.float64: torch.float32,
    torch.int64: torch.int32,
    torch.complex128: torch.complex64,
    torch.bool: torch.bool,
}
_COUNT = 96
_SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, 3.0, math.inf, -math.inf)

Parts = Sequence[torch.Tensor]


@torch.no_grad()
def check_reduction(function: Function, scalars: Mapping[str, Any], dtype: torch.dtype | None = None) -> torch.dtype:
    """Combine random and special numbers; what has no eager version passes.

    Args:
        function: a reduction.
        scalars: value of each scalar, by name.
        dtype: of the elements; None: the first of some that it takes.

    Returns:
        A dtype of tensors that it takes.

    Raises:
        ArgumentError: the identity changes what it is combined with, or the combine functor is not associative.
    """
    trial = _make_trial(function, scalars, [*_COMPUTE] if dtype is None else [_widen(dtype)])
    if trial is None:
        return dtype or torch.float32
    compute, tree, parts = trial
    combine, name = tree.combine, function.name
    identity = tree.identity(parts, _COUNT)
    # Also with itself: a tree's padding is.
    for items in (parts, identity):
        for arguments in ((identity, items), (items, identity)):
            found = combine(*arguments)
            # Of infinity, formulas that divide or subtract make NaN; not of what pads.
            spoiled = None if items is identity else _find_infinite(items)
            row = _find_difference(found, items, items, spoiled=spoiled)
            if row is not None:
                raise ArgumentError(
                    f"the identity of {name} is none: {name}({_show(row, *arguments)}) is {_show(row, found)}, not "
                    f"{_show(row, items)}"
                )
    # Of special numbers, infinity less infinity is another thing in another order.
    first, second, third = (
        [item[start : start + _COUNT // 4] for item in parts] for start in range(_COUNT // 4, _COUNT, _COUNT // 4)
    )
    left, right = combine(combine(first, second), third), combine(first, combine(second, third))
    row = _find_difference(left, right, first, second, third)
    if row is not None:
        a, b, c = (f"({_show(row, item)})" for item in (first, second, third))
        raise ArgumentError(
            f"{name} is not associative, and the parts of what is reduced are combined in the order of a tree: with "
            f"a = {a}, b = {b} and c = {c}, {name}({name}(a, b), c) is {_show(row, left)} and "
            f"{name}(a, {name}(b, c)) is {_show(row, right)}"
        )
    return dtype or _COMPUTE[compute]


def _widen(dtype: torch.dtype) -> torch.dtype:
    # Rounding shall not look like another result; integers do not round, and have ends of their own.
    return torch.float64 if dtype.is_floating_point else torch.complex128 if dtype.is_complex else dtype


def _make_trial(
    function: Function, scalars: Mapping[str, Any], dtypes: Sequence[torch.dtype]
) -> tuple[torch.dtype, EagerReduction, Parts] | None:
    # What T is, what combines, and accumulators as the map makes them of elements: the special ones first.
    assert function.reduction is not None, "the caller has one"
    for compute in dtypes:
        names = [parameter.name for parameter in function.functor.tensors]
        types = [torch.int64 if name in function.unpromoted else compute for name in names]
        try:
            tree = EagerReduction(function.reduction, compute, scalars, differentiable=False)
            mapped = EagerText(function.functor, compute, types, scalars, differentiable=False)
            given = [
                torch.arange(_COUNT) if name in function.unpromoted else _make_elements(compute, slot)
                for slot, name in enumerate(names)
            ]
            made = mapped(*given)
            parts = [item.to(dtype).expand(_COUNT) for item, dtype in zip(made, tree.dtypes, strict=True)]
            tree.combine(parts, parts)
        except (UntranslatableError, UnsupportedError, ArgumentError):
            continue
        return compute, tree, parts
    return None


def _make_elements(dtype: torch.dtype, slot: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(slot)
    if not is_continuous(dtype):
        return torch.randint(-9, 10, (_COUNT,), generator=generator).to(dtype)
    elements = torch.randn(_COUNT, dtype=dtype, generator=generator)
    special = torch.tensor(_SPECIAL, dtype=dtype).roll(slot)
    return torch.cat([special, elements[len(special) :]])


def _find_infinite(parts: Parts) -> torch.Tensor:
    return torch.stack([~torch.isfinite(item) for item in parts]).any(0)


def _find_difference(found: Parts, wanted: Parts, *made_of: Parts, spoiled: torch.Tensor | None = None) -> int | None:
    # The first row where one accumulator differs by more than rounding, and is no NaN where rows are ``spoiled``.
    is_same = torch.ones(_COUNT, dtype=torch.bool)[: len(found[0])]
    # An accumulator may hold what another one lost in rounding.
    floats = [
        part for parts in (found, wanted, *made_of) for part in parts if part.is_floating_point() or part.is_complex()
    ]
    sizes = [part.abs().nan_to_num(0, 0, 0).double() for part in floats]
    for one, other in zip(found, wanted, strict=True):
        equal = (one == other) | (one.isnan() & (other.isnan() if spoiled is None else other.isnan() | spoiled))
        if one.is_floating_point() or one.is_complex():
            tolerance = math.sqrt(torch.finfo(one.dtype).eps)
            distance = (one - other).abs()
            equal |= distance.isfinite() & (distance <= tolerance * sum(sizes))
        is_same &= equal
    return None if bool(is_same.all()) else int(is_same.logical_not().nonzero()[0])


def _show(row: int, *items: Parts) -> str:
    return ", ".join(
        f"{part[row].item():.6g}" if _is_float(part) else str(part[row].item()) for item in items for part in item
    )


_is_float: Callable[[torch.Tensor], bool] = torch.is_floating_point
