"""The names under which programs call torch's ops of several steps, and which form of the op each call is."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody uses

from fuser.ops import norms  # noqa: F401 - they fill the table
from fuser.ops.calls import Binder, OpCall, is_number
from fuser.ops.composites import composite_function

__all__ = ["whole_functions"]

_ATEN = torch.ops.aten


def _call(
    op: str,
    form: tuple[Any, ...],
    tensors: Sequence[Any],
    scalars: Mapping[str, Any] | None = None,
    mask: Sequence[bool] | None = None,
) -> OpCall | None:
    """Return a call of an op in a form.

    Args:
        op: its name in the table of composites.
        form: of its steps.
        tensors: without those that the form says are not there.
        scalars: by name.
        mask: of an op that returns a tuple: which items the form makes.
    """
    if any(map(is_number, tensors)):
        return None
    items = None
    if mask is not None:
        items = tuple(sum(mask[:slot]) if is_made else -1 for slot, is_made in enumerate(mask))
    return OpCall(composite_function(op, form), tuple(tensors), scalars or {}, items)


def _there(*tensors: Any) -> list[Any]:
    return [item for item in tensors if item is not None]


def _known(node: Any) -> torch.Tensor | None:
    # The tensor that a stand-in stands for, where dtype and shape are known.
    value = getattr(node, "meta", {}).get("val")
    return value if isinstance(value, torch.Tensor) else None


def _sizes(sizes: Any) -> tuple[int | None, ...] | None:
    # What stands in forms for a shape; None if it is none.
    if not isinstance(sizes, list | tuple) or not sizes:
        return None
    return tuple(size if type(size) is int else None for size in sizes)


# --- layer_norm and rms_norm ------------------------------------------------------------------------------------
def _bind_layer_norm(
    input: Any,  # noqa: A002 - torch's own parameter name
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: Any = 1e-05,
    cudnn_enable: Any = True,  # noqa: ARG001
) -> OpCall | None:
    sizes = _sizes(normalized_shape)
    form = (sizes, weight is not None, bias is not None, "", True)
    return _call("native_layer_norm", form, _there(input, weight, bias), {"eps": eps}) if sizes else None


def _bind_native_layer_norm(input: Any, normalized_shape: Any, weight: Any, bias: Any, eps: Any) -> OpCall | None:  # noqa: A002
    sizes, known = _sizes(normalized_shape), _known(input)
    if sizes is None or known is None:
        return None
    is_narrow = known.device.type == "cpu" and known.dtype in (torch.float16, torch.bfloat16)
    dtype = str(known.dtype).removeprefix("torch.") if is_narrow else ""
    form = (sizes, weight is not None, bias is not None, dtype, False)
    return _call("native_layer_norm", form, _there(input, weight, bias), {"eps": eps}, (True,) * 3)


def _bind_layer_norm_backward(
    grad_out: Any,
    input: Any,  # noqa: A002
    normalized_shape: Any,
    mean: Any,
    rstd: Any,
    weight: Any,
    bias: Any,
    output_mask: Any,
) -> OpCall | None:
    sizes, known = _sizes(normalized_shape), _known(input)
    mask = tuple(map(bool, output_mask))
    is_odd = not any(mask) or (mask[1] and weight is None) or (mask[2] and bias is None)
    if sizes is None or known is None or is_odd:
        return None
    form = (sizes, known.dim(), weight is not None, bias is not None, True, mask)
    tensors = _there(grad_out, input, mean, rstd, weight, bias)
    return _call("native_layer_norm_backward", form, tensors, mask=mask)


def _bind_rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: Any = None) -> OpCall | None:  # noqa: A002
    sizes = _sizes(normalized_shape)
    form = (sizes, weight is not None, eps is not None, True)
    scalars = {} if eps is None else {"eps": eps}
    return _call("_fused_rms_norm", form, _there(input, weight), scalars) if sizes else None


def _bind_fused_rms_norm(input: Any, normalized_shape: Any, weight: Any, eps: Any) -> OpCall | None:  # noqa: A002
    sizes = _sizes(normalized_shape)
    form = (sizes, weight is not None, eps is not None, False)
    scalars = {} if eps is None else {"eps": eps}
    return _call("_fused_rms_norm", form, _there(input, weight), scalars, (True,) * 2) if sizes else None


def _bind_rms_norm_backward(
    grad_out: Any,
    input: Any,  # noqa: A002
    normalized_shape: Any,
    rstd: Any,
    weight: Any,
    output_mask: Any,
) -> OpCall | None:
    sizes, known = _sizes(normalized_shape), _known(input)
    mask = tuple(map(bool, output_mask))
    if sizes is None or known is None or not any(mask) or (mask[1] and weight is None):
        return None
    form = (sizes, known.dim(), weight is not None, False, False, mask)
    return _call("_fused_rms_norm_backward", form, _there(grad_out, input, rstd, weight), mask=mask)


@functools.cache
def whole_functions() -> dict[Any, Binder]:
    """Return the binder of each function and ATen overload."""
    found: dict[Any, Binder] = {
        F.layer_norm: _bind_layer_norm,
        torch.layer_norm: _bind_layer_norm,
        torch.native_layer_norm: _bind_native_layer_norm,
        _ATEN.native_layer_norm.default: _bind_native_layer_norm,
        _ATEN.native_layer_norm_backward.default: _bind_layer_norm_backward,
        F.rms_norm: _bind_rms_norm,
        torch.rms_norm: _bind_rms_norm,
    }
    if hasattr(_ATEN, "_fused_rms_norm_backward"):
        found |= {
            _ATEN._fused_rms_norm.default: _bind_fused_rms_norm,
            _ATEN._fused_rms_norm_backward.default: _bind_rms_norm_backward,
        }
    return found
