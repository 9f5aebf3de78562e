"""A reduction in eager torch, level by level of its tree: the bits of a kernel where the functors' arithmetic agrees.

Elements are numbered along the reduced dimensions, row-major. A batch of 8192 of them is a balanced binary tree over
their numbers, padded with the identity; batches are combined in order, the identity before them all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fuser.combining import BATCH, Reduction
from fuser.cxx.functor import Functor, Role
from fuser.dtypes import scalar_dtype
from fuser.eager.translation import Translation, cast, translate
from fuser.layout import Shape

__all__ = ["EagerReduction", "EagerText"]

Parts = Sequence[torch.Tensor]


class EagerReduction:
    """What follows the map of a reduction, for given types."""

    def __init__(
        self, reduction: Reduction, compute: torch.dtype, scalars: Mapping[str, Any], *, differentiable: bool
    ) -> None:
        """Translate its texts.

        Args:
            reduction: what to do.
            compute: the type that the texts' T stands for.
            scalars: value of each scalar, by name.
            differentiable: as for ``translate``.

        Raises:
            UntranslatableError: a text has no eager version. ArgumentError: the identity is of another type.
            UnsupportedError: an accumulator is of no type that torch has.
        """
        self.reduction = reduction
        self.dtypes = reduction.accumulators(compute)
        self._initial = reduction.initial(compute)
        self._combine = EagerText(reduction.combine, compute, self.dtypes * 2, scalars, differentiable=differentiable)
        finish = reduction.finish
        self._finish: EagerText | None = None
        if finish is not None:
            self._finish = EagerText(finish, compute, self.dtypes, scalars, differentiable=differentiable)

    @property
    def is_graph(self) -> bool:
        """Whether it runs on tensors without values, too."""
        return self._combine.is_graph and (self._finish is None or self._finish.is_graph)

    def run(self, mapped: Parts, shape: Shape) -> tuple[torch.Tensor, ...]:
        """Reduce.

        Args:
            mapped: what the map made of each element, one tensor for each accumulator, that broadcast to ``shape``.
            shape: of what is reduced.

        Returns:
            The outputs, contiguous, of the types that the texts give them.
        """
        dims = self.reduction.normalize_dims(len(shape))
        kept = [dim for dim in range(len(shape)) if dim not in dims]
        count = math.prod(shape[dim] for dim in dims)
        rows = [shape[dim] for dim in kept]
        parts = [
            cast(item, dtype).expand(shape).permute([*kept, *dims]).reshape(*rows, count)
            for item, dtype in zip(mapped, self.dtypes, strict=True)
        ]
        found = self._reduce(parts)
        results = found if self._finish is None else self._finish(*found)
        made = self.reduction.reduce_shape(shape)
        return tuple(item.expand(rows).reshape(made) for item in results)

    def combine(self, first: Parts, second: Parts) -> Parts:
        """Combine accumulators, elementwise."""
        made = self._combine(*first, *second)
        return [cast(item, dtype).expand(second[0].shape) for item, dtype in zip(made, self.dtypes, strict=True)]

    def identity(self, parts: Parts, *shape: int) -> Parts:
        """Return accumulators where nothing was combined, on the device of ``parts``."""
        pairs = zip(parts, self._initial, self.dtypes, strict=True)
        return [torch.full(shape, number, dtype=dtype, device=item.device) for item, number, dtype in pairs]

    def _reduce(self, parts: Parts) -> Parts:
        # Of (..., count) elements.
        *rows, count = parts[0].shape
        if count == 0:
            # Beside an element that is none, so that gradients still reach what was empty.
            return [item[..., 0] for item in self._pad(parts, 1)]
        found = self.identity(parts, *rows)
        whole = count - count % BATCH
        for start, stop in ((0, whole), (whole, count)):
            if start == stop:
                continue
            width = min(BATCH, stop - start)
            batches = (stop - start) // width
            trees = self._reduce_tree([item[..., start:stop].reshape(*rows, batches, width) for item in parts])
            for batch in range(batches):
                found = self.combine(found, [item[..., batch] for item in trees])
        return found

    def _reduce_tree(self, parts: Parts) -> Parts:
        *rows, size = parts[0].shape
        while size > 1:
            # What would combine the identity with itself is left out.
            padded = self._pad(parts, size % 2)
            size = (size + 1) // 2
            pairs = [item.reshape(*rows, size, 2) for item in padded]
            parts = self.combine([item[..., 0] for item in pairs], [item[..., 1] for item in pairs])
        return [item[..., 0] for item in parts]

    def _pad(self, parts: Parts, count: int) -> Parts:
        if not count:
            return parts
        identity = self.identity(parts, *parts[0].shape[:-1], count)
        return [torch.cat([item, other], -1) for item, other in zip(parts, identity, strict=True)]


class EagerText:
    """One text, for given types and scalars."""

    def __init__(
        self,
        functor: Functor,
        compute: torch.dtype,
        types: Sequence[torch.dtype],
        scalars: Mapping[str, Any],
        *,
        differentiable: bool,
    ) -> None:
        """Translate it; ``types`` are those of its tensors."""
        given = iter(types)
        kinds = tuple(
            next(given) if item.role is Role.TENSOR else scalar_dtype(scalars[item.name]) for item in functor.inputs
        )
        self._translation: Translation = translate(functor, compute, kinds, differentiable=differentiable)
        self._scalars = [
            None if item.role is Role.TENSOR else cast(scalars[item.name], kind)
            for item, kind in zip(functor.inputs, kinds, strict=True)
        ]

    @property
    def is_graph(self) -> bool:
        """Whether it runs on tensors without values, too."""
        return self._translation.graph_module is not None

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return its results, which may have fewer dimensions than the tensors."""
        given = iter(tensors)
        arguments = [next(given) if number is None else number for number in self._scalars]
        # What depends on none of them is made on the CPU.
        return tuple(item.to(tensors[0].device) for item in self._translation.run(*arguments))
