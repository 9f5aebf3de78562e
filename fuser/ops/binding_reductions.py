"""The names under which programs call torch's reductions, and which row of the table each call is."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody uses

from fuser.dtypes import is_continuous
from fuser.ops.calls import DEVICE_TYPE, Binder, OpCall, asking, find_numerics, is_number, known_of
from fuser.ops.elementary import clamp_to_numbers
from fuser.ops.index import index_function
from fuser.ops.reduction_forms import FORMS, ReductionForm
from fuser.ops.reductions import REDUCTIONS, may_have_bits, reduction_function
from fuser.ops.table import cast_function, op_call, overloads

__all__ = ["reduction_functions", "reduction_methods"]

_ATEN = torch.ops.aten


def _reduce(
    name: str,
    input: Any,  # noqa: A002
    dim: Any = None,
    keepdim: Any = False,
    scalars: Mapping[str, Any] = {},
) -> OpCall | None:
    dims = (dim,) if type(dim) is int else dim
    is_known = dims is None or (isinstance(dims, list | tuple) and all(type(item) is int for item in dims))
    if is_number(input) or not is_known or not isinstance(keepdim, bool) or not _has_bits(name, input):
        return None
    # No dimensions mean all.
    over = tuple(dims) if dims else None
    op = REDUCTIONS[name]
    index = (OpCall(index_function(1, over), (input,)),) if op.has_index else ()
    items = tuple(range(op.num_outputs)) if op.num_outputs > 1 else None
    return OpCall(reduction_function(name, over, keepdim), (input, *index), scalars, items, op.fields)


def _has_bits(name: str, input: Any) -> bool:  # noqa: A002
    # Whether numerics allow a kernel: where dtype or device are not known, the worst is assumed.
    if find_numerics() == "fast":
        return True
    meta = getattr(input, "meta", {})
    value = meta.get("val")
    if value is None:
        return may_have_bits(name, None, meta.get(DEVICE_TYPE))
    return may_have_bits(name, value.dtype, value.device.type)


def _bind_reduction(name: str) -> Binder:
    def bind(input: Any, dim: Any = None, keepdim: Any = False) -> OpCall | None:  # noqa: A002
        # Of no dimensions, ``any`` and ``all`` are those of each element.
        is_empty = isinstance(dim, list | tuple) and not dim
        return None if is_empty and name in {"any", "all"} else _reduce(name, input, dim, keepdim)

    return bind


def _bind_count_nonzero(input: Any, *dims: Any, dim: Any = None) -> OpCall | None:  # noqa: A002
    return _reduce("count_nonzero", input, dims[0] if len(dims) == 1 else dims or dim)


def _bind_total(name: str) -> Binder:
    def bind(input: Any, dim: Any = None, keepdim: Any = False, *, dtype: Any = None) -> OpCall | None:  # noqa: A002
        if dtype is not None:
            # What it adds up in and what it returns are the same, but for small integers.
            is_known = isinstance(dtype, torch.dtype) and is_continuous(dtype)
            known = known_of(input)
            is_narrow = known is not None and known.dtype in (torch.float16, torch.bfloat16)
            if is_narrow and dtype is torch.float32 and f"{name}_wide" in REDUCTIONS:
                return _reduce(f"{name}_wide", input, dim, keepdim)
            if not is_known or find_numerics() != "fast":
                return None
            input = OpCall(cast_function(dtype), (input,))  # noqa: A001
        return _reduce(name, input, dim, keepdim)

    return bind


def _bind_prod(input: Any, dim: Any = None, keepdim: Any = False, *, dtype: Any = None) -> OpCall | None:  # noqa: A002
    return _bind_total("prod")(input, dim, keepdim, dtype=dtype) if dim is None or type(dim) is int else None


def _bind_running(input: Any, dim: Any, *, dtype: Any = None) -> OpCall | None:  # noqa: A002
    if type(dim) is not int or (dtype is not None and not (dtype is torch.int64 or _is_floating(dtype))):
        return None
    return _reduce("cumsum", input if dtype is None else OpCall(cast_function(dtype), (input,)), dim)


def _is_floating(dtype: Any) -> bool:
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point


def _bind_form(bind: Callable[..., ReductionForm | None]) -> Binder:
    @functools.wraps(bind)
    def bind_call(input: Any, *args: Any, **kwargs: Any) -> OpCall | None:  # noqa: A002
        form = bind(input, *args, **kwargs)
        if form is None:
            return None
        if form.dtype is not None:
            input = OpCall(cast_function(form.dtype), (input,))  # noqa: A001
        return _reduce(form.name, input, form.dim, form.keepdim, form.scalars)

    return asking(bind_call) if "norm" in bind.__name__ else bind_call


def _bind_normalize(input: Any, p: Any = 2.0, dim: Any = 1, eps: Any = 1e-12) -> OpCall | None:  # noqa: A002
    norm = _bind_form(FORMS["norm"])(input, p, dim, True)
    floor = OpCall(clamp_to_numbers("clamp_min"), (norm, eps))
    return norm and op_call("div", input, floor)


def _bind_extremum(name: str) -> Binder:
    # torch.max(x), and of one dimension values and places; of two tensors it is torch's maximum.
    def bind(input: Any, dim: Any = None, keepdim: Any = False) -> OpCall | None:  # noqa: A002
        if dim is None:
            return _reduce(name, input) if keepdim is False else None
        return _reduce(f"{name}_dim", input, dim, keepdim) if type(dim) is int else None

    return bind


def _bind_aminmax(input: Any, *, dim: Any = None, keepdim: Any = False) -> OpCall | None:  # noqa: A002
    # Of all dimensions, CUDA keeps none.
    is_odd = (dim is None and keepdim is not False) or not (dim is None or type(dim) is int)
    return None if is_odd else _reduce("aminmax", input, dim, keepdim)


@functools.cache
def reduction_methods() -> dict[str, Binder]:
    """Return the binder of each method of tensors."""
    return {
        **{name: _bind_reduction(name) for name in ("amax", "amin", "any", "all")},
        "count_nonzero": _bind_count_nonzero, "prod": _bind_prod, "cumsum": _bind_running,
        **{name: _bind_total(name) for name in ("sum", "mean", "nansum")},
        **{name: _bind_form(bind) for name, bind in FORMS.items() if "linalg" not in name},
        "max": _bind_extremum("max"), "min": _bind_extremum("min"), "aminmax": _bind_aminmax,
    }  # fmt: skip


def reduction_functions() -> dict[Any, Binder]:
    """Return the binder of each function and ATen overload that is no method as well."""
    return {
        **{
            overload: _bind_reduction(name)
            for name, forms in (("amax", ""), ("amin", ""), ("any", "default dim dims"), ("all", "default dim dims"))
            for overload in overloads(*(f"{name}.{form}" for form in (forms or "default").split()))
        },
        **dict.fromkeys(overloads("sum", "sum.dim_IntList"), _bind_total("sum")),
        **dict.fromkeys(overloads("mean", "mean.dim"), _bind_total("mean")),
        **dict.fromkeys(overloads("prod", "prod.dim_int"), _bind_prod),
        _ATEN.nansum.default: _bind_total("nansum"),
        _ATEN.cumsum.default: _bind_running,
        **{
            overload: _bind_form(FORMS[name])
            for name, forms in (
                ("argmax", "default"), ("argmin", "default"), ("var", "default dim correction"),
                ("std", "default dim correction"), ("linalg_vector_norm", "default"),
                ("var_mean", "default dim correction"), ("std_mean", "default dim correction"),
                ("norm", "Scalar ScalarOpt_dim ScalarOpt_dtype ScalarOpt_dim_dtype"),
            )
            for overload in overloads(*(f"{name}.{form}" for form in forms.split()))
        },
        torch.linalg.vector_norm: _bind_form(FORMS["linalg_vector_norm"]),
        torch.linalg.norm: _bind_form(FORMS["linalg_norm"]),
        F.normalize: _bind_normalize,
        **{
            overload: _bind_extremum(name)
            for name in ("max", "min") for overload in overloads(f"{name}.default", f"{name}.dim")
        },
        _ATEN.aminmax.default: _bind_aminmax,
    }  # fmt: skip
