"""How programs call torch's reductions: what each form says of the dimensions, and which row of the table it is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fuser.ops.calls import known_of

__all__ = ["FORMS", "ReductionForm"]


@dataclass(frozen=True, slots=True)
class ReductionForm:
    """A call of a row of the table."""

    name: str
    dim: Any = None
    keepdim: Any = False
    # What the tensor is converted to first.
    dtype: torch.dtype | None = None
    scalars: Mapping[str, Any] = field(default_factory=dict)


def _place(name: str) -> Any:
    def bind(input: Any, dim: Any = None, keepdim: Any = False) -> ReductionForm | None:  # noqa: A002, ARG001
        return ReductionForm(name, dim, keepdim) if dim is None or type(dim) is int else None

    return bind


def _moment(name: str) -> Any:
    def bind(
        input: Any,  # noqa: A002, ARG001 - torch's own parameter name
        dim: Any = None,
        unbiased: Any = None,
        keepdim: Any = False,
        *,
        correction: Any = None,
    ) -> ReductionForm | None:
        if isinstance(dim, bool):
            # torch.var(x, False)
            dim, unbiased = None, dim
        if unbiased is not None:
            correction = int(unbiased) if isinstance(unbiased, bool) and correction is None else "unknown"
        correction = 1 if correction is None else correction
        if type(correction) not in (int, float):
            return None
        return ReductionForm(name, dim, keepdim, scalars={"correction": correction})

    return bind


def _bind_vector_norm(
    input: Any,  # noqa: A002
    ord: Any = 2,  # noqa: A002
    dim: Any = None,
    keepdim: Any = False,
    *,
    dtype: Any = None,
) -> ReductionForm | None:
    value = known_of(input)
    if type(ord) not in (int, float) or ord not in _NORMS:
        return None
    if dtype is not None and (value is None or not _widens(value.dtype, dtype)):
        # torch has its own error for it.
        return None
    return ReductionForm(f"norm_{_NORMS[ord]}", dim, keepdim, dtype)


def _bind_norm(
    input: Any,  # noqa: A002
    p: Any = "fro",
    dim: Any = None,
    keepdim: Any = False,
    dtype: Any = None,
) -> ReductionForm | None:
    if isinstance(p, str) and (p != "fro" or not (dim is None or type(dim) is int)):
        return None
    return _bind_vector_norm(input, 2 if p in ("fro", None) else p, dim, keepdim, dtype=dtype)


def _bind_linalg_norm(
    input: Any,  # noqa: A002
    ord: Any = None,  # noqa: A002
    dim: Any = None,
    keepdim: Any = False,
    *,
    dtype: Any = None,
) -> ReductionForm | None:
    # One of vectors: those of matrices are others.
    if (ord is None and isinstance(dim, list | tuple) and len(dim) > 2) or (ord is not None and type(dim) is not int):
        return None
    return _bind_vector_norm(input, 2 if ord is None else ord, dim, keepdim, dtype=dtype)


_NORMS: dict[float, float] = {0: 0, 1: 1, 2: 2, math.inf: math.inf, -math.inf: -math.inf}


def _widens(dtype: torch.dtype, wanted: Any) -> bool:
    is_float = isinstance(wanted, torch.dtype) and wanted.is_floating_point and dtype.is_floating_point
    return is_float and torch.promote_types(dtype, wanted) == wanted


# By the name of torch's function and method; and those of ATen's overloads.
FORMS: dict[str, Any] = {
    **{name: _place(name) for name in ("argmax", "argmin")},
    **{name: _moment(name) for name in ("var", "std", "var_mean", "std_mean")},
    "norm": _bind_norm,
    "linalg_vector_norm": _bind_vector_norm,
    "linalg_norm": _bind_linalg_norm,
}
