"""A functor of the tests' table: its text, what it computes, and where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import fuser

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
BOOL = (torch.bool,)
# Those that compute in float.
NARROW = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """One functor, what it computes, and where."""

    name: str
    code: str
    # The same in eager torch, called with float64 (for integers: int64) tensors and the scalars by name.
    reference: Callable[..., Any]
    tensors: int = 1
    scalars: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1
    # Range of the inputs; integers are drawn from its integers.
    domain: tuple[float, float] = (-3.0, 3.0)
    dtypes: tuple[torch.dtype, ...] = FLOATS
    # Largest error, in units of the compute type's epsilon, relative to the larger of the result and 1.
    ulps: float = 8.0
    # Whether every input of every dtype above is fine (no integer division, no cast of a huge number).
    is_total: bool = True
    # Whether it has a derivative; not where bits are reinterpreted, where every input is an integer, or where the
    # result is a truth value. (What is rounded or counted has one: zero.)
    is_differentiable: bool = True
    # Whether the values of tensors or scalars alone decide how often a loop runs or how deep a recursion goes: no
    # number in the text bounds it.
    depends_on_data: bool = False

    def build(self, **options: Any) -> fuser.JitFunction:
        """Return a new JitFunction."""
        return fuser.jit_fn(self.code, num_outputs=self.outputs, scalars=self.scalars, **options)

    def __str__(self) -> str:
        return self.name
