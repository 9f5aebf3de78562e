"""The same computation in eager torch, operation by operation: for when a group cannot be compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fuser.errors import FallbackError
from fuser.graph import Function, FusionGroup
from fuser.ops import op_functions

__all__ = ["Fallback", "build_fallback"]


@dataclass(frozen=True, slots=True)
class Fallback:
    """A group as a sequence of eager calls: torch's ops through themselves, functors through what the user gave."""

    group: FusionGroup
    # Functors for which there is no eager version; the fallback can run when there are none.
    missing: tuple[str, ...]

    def run(self, inputs: Sequence[Any], reason: str) -> list[torch.Tensor]:
        """Run the group on eager torch.

        Args:
            inputs: tensors and Python numbers, as many as the group has inputs.
            reason: why the group is not fused, for the message when it cannot run here either.

        Raises:
            FallbackError: a functor has no eager version.
        """
        if self.missing:
            raise FallbackError(
                f"cannot fuse ({reason}), and {self.missing[0]!r} has no eager version to fall back to: "
                "give jit_fn(..., fallback=a function of the same tensors and scalars)"
            )
        values: list[Any] = list(inputs)
        for application in self.group.applications:
            functor = application.function.functor
            tensors = [values[value] for value in application.tensors]
            names = (parameter.name for parameter in functor.scalars)
            scalars = {name: values[value] for name, value in zip(names, application.scalars, strict=True)}
            result = _call_eager(application.function, tensors, scalars)
            values += [result] if functor.num_outputs == 1 and isinstance(result, torch.Tensor) else list(result)
        return [values[value] for value in self.group.outputs]


def build_fallback(group: FusionGroup) -> Fallback:
    """Make the eager version of a group, and note the functors that have none."""
    missing = dict.fromkeys(
        item.function.name for item in group.applications if item.function.op is None and not item.function.fallback
    )
    return Fallback(group, tuple(missing))


def _call_eager(function: Function, tensors: list[Any], scalars: dict[str, Any]) -> Any:
    if function.op is None:
        assert function.fallback is not None, "run() checked"
        return function.fallback(*tensors, **scalars)
    if function.op == "to":
        return torch.ops.aten._to_copy.default(tensors[0], dtype=function.out_dtypes[0])
    return op_functions(function.op).eager(*tensors, **scalars)
