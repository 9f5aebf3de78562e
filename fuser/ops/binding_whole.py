"""The names under which programs call torch's ops of several steps, and which form of the op each call is."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody uses

from fuser.ops import batch_norms, group_norms, losses, norms  # noqa: F401 - they fill the table
from fuser.ops.calls import (
    Binder,
    Known,
    OpCall,
    answer,
    asking,
    asking_of_numbers,
    find_numerics,
    is_number,
    known_of,
)
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


def _narrow_name(known: Known) -> str:
    # Of half and bfloat16; "" of others.
    return str(known.dtype).removeprefix("torch.") if known.dtype in (torch.float16, torch.bfloat16) else ""


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


@asking
def _bind_native_layer_norm(input: Any, normalized_shape: Any, weight: Any, bias: Any, eps: Any) -> OpCall | None:  # noqa: A002
    sizes, known = _sizes(normalized_shape), known_of(input)
    if sizes is None or known is None:
        return None
    # On the CPU torch keeps the statistics in the input's dtype.
    dtype = _narrow_name(known) if known.device_type == "cpu" else ""
    form = (sizes, weight is not None, bias is not None, dtype, False)
    return _call("native_layer_norm", form, _there(input, weight, bias), {"eps": eps}, (True,) * 3)


@asking
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
    sizes, known = _sizes(normalized_shape), known_of(input)
    mask = tuple(map(bool, output_mask))
    is_odd = not any(mask) or (mask[1] and weight is None) or (mask[2] and bias is None)
    if sizes is None or known is None or is_odd:
        return None
    form = (sizes, known.rank, weight is not None, bias is not None, True, mask)
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


@asking
def _bind_rms_norm_backward(
    grad_out: Any,
    input: Any,  # noqa: A002
    normalized_shape: Any,
    rstd: Any,
    weight: Any,
    output_mask: Any,
) -> OpCall | None:
    sizes, known = _sizes(normalized_shape), known_of(input)
    mask = tuple(map(bool, output_mask))
    if sizes is None or known is None or not any(mask) or (mask[1] and weight is None):
        return None
    form = (sizes, known.rank, weight is not None, False, False, mask)
    return _call("_fused_rms_norm_backward", form, _there(grad_out, input, rstd, weight), mask=mask)


# The least eps that cuDNN takes.
CUDNN_EPS = 1e-5


# --- batch_norm and group_norm ----------------------------------------------------------------------------------
def _of_channels(input: Any) -> Known | None:  # noqa: A002
    # On the CPU torch keeps statistics of half and bfloat16 in other dtypes.
    known = known_of(input)
    if known is None or known.rank < 2 or (known.device_type == "cpu" and _narrow_name(known)):
        return None
    return known


def _is_on_cpu(known: Known) -> bool:
    # There results lie in the memory format of the input.
    return known.device_type == "cpu"


def runs_in_cudnn(input: Any, weight: Any, bias: Any, eps: Any) -> bool:  # noqa: A002
    """Whether eager ``F.batch_norm`` runs in cuDNN, whose bits nobody else has, for what it is called with."""
    known, of_weight = known_of(input), known_of(weight)
    if known is None or of_weight is None or bias is None or known.device_type != "cuda" or known.rank < 3:
        return False
    is_kind = known.dtype in (torch.float32, torch.float64) or of_weight.dtype is torch.float32
    is_kind = is_kind and torch.bfloat16 not in (known.dtype, of_weight.dtype)
    # What a trace does not know of eps is no less than cuDNN takes.
    return is_kind and torch.backends.cudnn.enabled and not (isinstance(eps, float) and eps < CUDNN_EPS)


@asking
def _bind_batch_norm_training(
    input: Any,  # noqa: A002
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: Any,
    momentum: Any,
    eps: Any,
) -> OpCall | None:
    known = _of_channels(input)
    if known is None or training is not True or _has_one_value(input):
        return None
    form = (known.rank, _is_on_cpu(known), weight is not None, bias is not None, True, 5)
    tensors = _there(input, weight, bias, running_mean, running_var)
    return _call("batch_norm", form, tensors, {"momentum": momentum, "eps": eps}, (True,) * 5)


def _has_one_value(item: Any) -> bool:
    # Whether each channel is known to have one element: ATen's op takes it, which F.batch_norm refuses.
    value = getattr(item, "meta", {}).get("val")
    sizes = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
    return len(sizes) > 1 and all(type(size) is int for size in sizes) and math.prod((sizes[0], *sizes[2:])) == 1


@asking
def _bind_batch_norm_inference(
    input: Any,  # noqa: A002
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    momentum: Any,  # noqa: ARG001
    eps: Any,
) -> OpCall | None:
    known = _of_channels(input)
    if known is None:
        return None
    form = (known.rank, _is_on_cpu(known), weight is not None, bias is not None, False, 1)
    tensors = _there(input, weight, bias, running_mean, running_var)
    # The statistics that it returns are of no elements.
    return _call("batch_norm", form, tensors, {"eps": eps}, (True, False, False))


@asking
def _bind_batch_norm_alone(
    input: Any,  # noqa: A002
    weight: Any,
    bias: Any,
    training: Any,
    momentum: Any,  # noqa: ARG001
    eps: Any,
) -> OpCall | None:
    known = _of_channels(input)
    if known is None or training is not True or _has_one_value(input):
        return None
    form = (known.rank, _is_on_cpu(known), weight is not None, bias is not None, True, 3)
    return _call("batch_norm", form, _there(input, weight, bias), {"eps": eps}, (True,) * 3)


@asking
def _bind_functional_batch_norm(
    input: Any,  # noqa: A002
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: Any = False,
    momentum: Any = 0.1,  # noqa: ARG001
    eps: Any = 1e-05,
) -> OpCall | None:
    known, running = _of_channels(input), _there(running_mean, running_var)
    # One that writes is made another by the trace.
    if known is None or len(running) != (0 if training is True else 2) or not isinstance(training, bool):
        return None
    if find_numerics() != "fast" and runs_in_cudnn(input, weight, bias, eps):
        return None
    form = (known.rank, _is_on_cpu(known), weight is not None, bias is not None, training, 1)
    return _call("batch_norm", form, _there(input, weight, bias, *running), {"eps": eps})


@asking
def _bind_batch_norm_elemt(input: Any, weight: Any, bias: Any, mean: Any, invstd: Any, eps: Any) -> OpCall | None:  # noqa: A002, ARG001
    known = _of_channels(input)
    if known is None or known.device_type != "cuda":
        return None
    form = (known.rank, weight is not None, bias is not None)
    return _call("batch_norm_elemt", form, _there(input, weight, bias, mean, invstd))


@asking
def _bind_batch_norm_backward(
    grad_out: Any,
    input: Any,  # noqa: A002
    weight: Any,
    running_mean: Any,
    running_var: Any,
    save_mean: Any,
    save_invstd: Any,
    train: Any,
    eps: Any,
    output_mask: Any,
) -> OpCall | None:
    known, mask = _of_channels(input), tuple(map(bool, output_mask))
    saved = (save_mean, save_invstd) if train else (running_mean, running_var)
    is_odd = not any(mask) or None in saved or (weight is None and any(mask[1:]))
    if known is None or not isinstance(train, bool) or is_odd:
        return None
    form = (known.rank, _is_on_cpu(known), weight is not None, train, mask)
    scalars = {} if train else {"eps": eps}
    return _call("native_batch_norm_backward", form, _there(grad_out, input, weight, *saved), scalars, mask)


def _lies_row_major(known: Known) -> bool:
    # Of the results of group_norm: on a GPU always.
    return not _is_on_cpu(known) or known.memory_format is torch.contiguous_format


def _group_form(known: Known, groups: int, weight: Any, bias: Any) -> tuple[Any, ...]:
    taken = (weight is not None, bias is not None)
    return (known.rank, groups, _lies_row_major(known), *taken, _narrow_name(known))


@asking
def _bind_group_norm(
    input: Any,  # noqa: A002
    weight: Any,
    bias: Any,
    N: Any,  # noqa: N803, ARG001 - torch's own parameter names
    C: Any,  # noqa: N803, ARG001
    HxW: Any,  # noqa: N803, ARG001
    group: Any,
    eps: Any,
) -> OpCall | None:
    known = known_of(input)
    if known is None or known.rank < 2 or type(group) is not int:
        return None
    form = (*_group_form(known, group, weight, bias), True)
    return _call("native_group_norm", form, _there(input, weight, bias), {"eps": eps}, (True,) * 3)


@asking
def _bind_functional_group_norm(
    input: Any,  # noqa: A002
    num_groups: Any,
    weight: Any = None,
    bias: Any = None,
    eps: Any = 1e-05,
) -> OpCall | None:
    # It refuses groups of one value.
    return _call_group_norm(input, num_groups, weight, bias, eps, (False, True))


@asking
def _bind_plain_group_norm(
    input: Any,  # noqa: A002
    num_groups: Any,
    weight: Any = None,
    bias: Any = None,
    eps: Any = 1e-05,
    cudnn_enabled: Any = True,  # noqa: ARG001
) -> OpCall | None:
    return _call_group_norm(input, num_groups, weight, bias, eps, (False,))


def _call_group_norm(
    input: Any,  # noqa: A002
    groups: Any,
    weight: Any,
    bias: Any,
    eps: Any,
    rest: tuple[bool, ...],
) -> OpCall | None:
    known = known_of(input)
    if known is None or known.rank < 2 or type(groups) is not int or groups < 1:
        return None
    form = (*_group_form(known, groups, weight, bias), *rest)
    return _call("native_group_norm", form, _there(input, weight, bias), {"eps": eps})


@asking
def _bind_group_norm_backward(
    grad_out: Any,
    input: Any,  # noqa: A002
    mean: Any,
    rstd: Any,
    weight: Any,
    N: Any,  # noqa: N803, ARG001
    C: Any,  # noqa: N803, ARG001
    HxW: Any,  # noqa: N803, ARG001
    group: Any,
    output_mask: Any,
) -> OpCall | None:
    known, mask = known_of(input), tuple(map(bool, output_mask))
    is_odd = not any(mask) or (weight is None and any(mask[1:]))
    if known is None or known.rank < 2 or type(group) is not int or is_odd:
        return None
    form = (known.rank, group, _lies_row_major(known), weight is not None, mask)
    return _call("native_group_norm_backward", form, _there(grad_out, input, mean, rstd, weight), mask=mask)


# --- nll_loss ---------------------------------------------------------------------------------------------------
_REDUCTIONS = {"none": losses.NONE, "mean": losses.MEAN, "sum": losses.SUM}


def _has_classes(input: Any, target: Any) -> Known | None:  # noqa: A002
    known, of_rows = known_of(input), known_of(target)
    if known is None or of_rows is None or (known.rank, of_rows.rank) != (2, 1):
        return None
    # Of other dtypes torch's kernels take bytes and refuse the rest, which its shape functions let pass.
    return known if of_rows.dtype is torch.int64 else None


def _is_of_classes(node: Any) -> bool:
    # To look through all classes for the target's is worth it only where they are at hand.
    return "log_softmax" in str(getattr(node, "target", ""))


@asking
def _bind_nll_loss(self: Any, target: Any, weight: Any, reduction: Any, ignore_index: Any) -> OpCall | None:
    known = _has_classes(self, target)
    if known is None or not _is_of_classes(self) or reduction not in (losses.MEAN, losses.SUM):
        return None
    form = (weight is not None, reduction, _narrow_name(known), False, False)
    return _call("nll_loss_forward", form, _there(self, target, weight), {"ignore_index": ignore_index}, (True,) * 2)


@asking
def _bind_functional_nll_loss(
    input: Any,  # noqa: A002
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: Any = -100,
    reduce: Any = None,
    reduction: Any = "mean",
) -> OpCall | None:
    known = _has_classes(input, target)
    if known is None or not _is_of_classes(input):
        return None
    return _nll_loss(known, input, target, weight, (size_average, reduce, reduction), ignore_index)


def _smoothing(number: Any) -> str:
    # How labels are smoothed: torch has its own error for others.
    if number == 0.0:
        return "none"
    return "some" if type(number) is float and 0 < number <= 1 else "refused"


@asking
@asking_of_numbers(_smoothing, "label_smoothing")
def _bind_cross_entropy(
    input: Any,  # noqa: A002
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: Any = -100,
    reduce: Any = None,
    reduction: Any = "mean",
    label_smoothing: Any = 0.0,
) -> OpCall | None:
    known = _has_classes(input, target)
    if known is None:
        return None
    classes = OpCall(composite_function("_log_softmax", (1,)), (input,))
    return _nll_loss(known, classes, target, weight, (size_average, reduce, reduction), ignore_index, label_smoothing)


def _nll_loss(
    known: Known,
    classes: Any,
    target: Any,
    weight: Any,
    reduces: tuple[Any, Any, Any],
    ignored: Any,
    smoothing: Any = 0.0,
) -> OpCall | None:
    is_smooth, reduction = answer(_smoothing, smoothing) == "some", _REDUCTIONS.get(reduces[2])
    # What all classes have a share in is added up in an order of its own.
    is_served = answer(_smoothing, smoothing) == "none" or (is_smooth and find_numerics() == "fast")
    if reduces[:2] != (None, None) or not is_served or reduction is None:
        return None
    scalars = {"ignore_index": ignored, **({"label_smoothing": smoothing} if is_smooth else {})}
    form = (weight is not None, reduction, _narrow_name(known), True, is_smooth)
    return _call("nll_loss_forward", form, _there(classes, target, weight), scalars)


@asking
def _bind_nll_loss_backward(
    grad_output: Any,
    self: Any,
    target: Any,
    weight: Any,
    reduction: Any,
    ignore_index: Any,
    total_weight: Any,
) -> OpCall | None:
    if _has_classes(self, target) is None or reduction not in (losses.NONE, losses.MEAN, losses.SUM):
        return None
    tensors = _there(self, grad_output, target, weight, total_weight)
    return _call("nll_loss_backward", (weight is not None, reduction), tensors, {"ignore_index": ignore_index})


@functools.cache
def whole_functions() -> dict[Any, Binder]:
    """Return the binder of each function and ATen overload."""
    found: dict[Any, Binder] = {
        F.layer_norm: _bind_layer_norm,
        torch.layer_norm: _bind_layer_norm,
        torch.native_layer_norm: _bind_native_layer_norm,
        F.batch_norm: _bind_functional_batch_norm,
        F.group_norm: _bind_functional_group_norm,
        torch.group_norm: _bind_plain_group_norm,
        F.nll_loss: _bind_functional_nll_loss,
        F.cross_entropy: _bind_cross_entropy,
        _ATEN.native_layer_norm.default: _bind_native_layer_norm,
        _ATEN.native_layer_norm_backward.default: _bind_layer_norm_backward,
        _ATEN._native_batch_norm_legit_functional.default: _bind_batch_norm_training,
        _ATEN._native_batch_norm_legit.no_stats: _bind_batch_norm_alone,
        _ATEN._native_batch_norm_legit_no_training.default: _bind_batch_norm_inference,
        _ATEN.batch_norm_elemt.default: _bind_batch_norm_elemt,
        _ATEN.native_batch_norm_backward.default: _bind_batch_norm_backward,
        _ATEN.native_group_norm.default: _bind_group_norm,
        _ATEN.native_group_norm_backward.default: _bind_group_norm_backward,
        _ATEN.nll_loss_forward.default: _bind_nll_loss,
        _ATEN.nll_loss_backward.default: _bind_nll_loss_backward,
        F.rms_norm: _bind_rms_norm,
        torch.rms_norm: _bind_rms_norm,
    }
    if hasattr(_ATEN, "_fused_rms_norm_backward"):
        found |= {
            _ATEN._fused_rms_norm.default: _bind_fused_rms_norm,
            _ATEN._fused_rms_norm_backward.default: _bind_rms_norm_backward,
        }
    return found
