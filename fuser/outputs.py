"""``out=`` as torch handles it: what may be written to, resizing, casting and overlap."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from fuser.errors import ArgumentError, DeviceError, GradientError, ShapeError, describe_type
from fuser.layout import Shape, Strides

__all__ = [
    "check_kinds",
    "check_out",
    "extent_bytes",
    "finish_out",
    "finish_traced_out",
    "is_kept_as_it_is",
    "unusual_kind",
]


def check_kinds(out: Sequence[Any], taker: str) -> None:
    """Check that ``out=`` is made of tensors that have memory to write to.

    Args:
        out: what was given.
        taker: what is called, for messages that are not torch's.

    Raises:
        ArgumentError: no tensor. ShapeError: a sparse, quantized, nested or zero one, or one of inference mode outside.
    """
    for item in out:
        if not isinstance(item, torch.Tensor):
            raise ArgumentError(f"{taker}: out= takes tensors, got {describe_type(item)}")
        kind = unusual_kind(item)
        if kind:
            raise ShapeError(f"{taker}: out= takes strided tensors, got a {kind} tensor")
        if is_kept_as_it_is(item):
            raise ShapeError(
                "Inplace update to inference tensor outside InferenceMode is not allowed. You can make a clone to get "
                "a normal tensor before doing inplace update."
            )
        if item._is_zerotensor():
            raise ShapeError(
                "ZeroTensors are immutable. Please use the materialized zero tensor obtained using .clone() if you "
                "want a mutable tensor."
            )


def is_kept_as_it_is(tensor: torch.Tensor) -> bool:
    """Whether nobody may write to a tensor: it was made in inference mode, which is over."""
    return tensor.is_inference() and not torch.is_inference_mode_enabled()


def unusual_kind(tensor: torch.Tensor) -> str:
    """Return what keeps kernels from reading a tensor's memory: quantized, nested, sparse_coo, ...; else nothing."""
    if torch._C._functorch.is_legacy_batchedtensor(tensor):
        # Of torch.autograd.grad(is_grads_batched=True), whose batches only torch's own operators take.
        return "batched"
    if tensor.is_quantized:
        return "quantized"
    if tensor.is_nested:
        return "nested"
    return "" if tensor.layout is torch.strided else str(tensor.layout).removeprefix("torch.")


def check_out(
    planned: Sequence[tuple[Shape, Strides, torch.dtype]],
    out: Sequence[torch.Tensor],
    inputs: Sequence[Any],
    taker: str,
) -> tuple[bool, bool]:
    """Check ``out=`` tensors against the planned outputs and the inputs, in torch's order; then resize them.

    ``taker`` is what is called, for messages that are not torch's.

    Returns:
        Whether a tensor was resized, and whether the kernel can write to all of them directly (else it writes to new
        tensors, which are then copied).

    Raises:
        ArgumentError: a wrong number of tensors. ShapeError, DeviceError: they cannot take the result.
        GradientError: one requires grad.
    """
    if len(out) != len(planned):
        raise ArgumentError(f"{taker}: out= has {len(out)} tensors for {len(planned)} outputs")
    tensors = [item for item in inputs if isinstance(item, torch.Tensor)]
    for index, tensor in enumerate(out):
        _check_memory(tensor, tensors, out[:index], taker)
    for tensor, (shape, _, dtype) in zip(out, planned, strict=True):
        if tuple(tensor.shape) != shape and any(tensor is item for item in tensors):
            raise ShapeError(f"output with shape {list(tensor.shape)} doesn't match the broadcast shape {list(shape)}")
        if not torch.can_cast(dtype, tensor.dtype):
            raise ShapeError(
                f"result type {_torch_name(dtype)} can't be cast to the desired output type {_torch_name(tensor.dtype)}"
            )
    resized = False
    for tensor, (shape, strides, _) in zip(out, planned, strict=True):
        if tuple(tensor.shape) != shape:
            _resize(tensor, shape, strides)
            resized = True
    # Where torch cannot tell whether memory overlaps and goes on, the kernel writes to new tensors. So it does where
    # memory holds the conjugate or the negative of what the tensor stands for.
    direct = all(
        tensor.dtype == dtype and not tensor.is_conj() and not tensor.is_neg()
        for tensor, (_, _, dtype) in zip(out, planned, strict=True)
    ) and not any(
        _overlap(tensor, other) in {_PARTIAL, _UNKNOWN}
        for index, tensor in enumerate(out)
        for other in (*tensors, *out[:index])
    )
    return resized, direct


def finish_out(
    out: Sequence[torch.Tensor], results: Sequence[torch.Tensor], taker: str, inputs: Sequence[Any] = ()
) -> list[torch.Tensor]:
    """Copy results of ``inputs`` to ``out=`` tensors, resized and cast; return the ``out`` tensors."""
    check_out([(tuple(item.shape), item.stride(), item.dtype) for item in results], out, inputs, taker)
    for tensor, result in zip(out, results, strict=True):
        tensor.copy_(result)
    return list(out)


def finish_traced_out(out: Any, results: Sequence[torch.Tensor]) -> None:
    """Copy results to ``out=`` tensors while Dynamo traces.

    Raises:
        ShapeError: that is not all there is to do; Dynamo then makes the call without tracing it.
    """
    outs = [out] if isinstance(out, torch.Tensor) else list(out)
    is_plain = len(outs) == len(results)
    for tensor, result in zip(outs, results, strict=False):
        is_plain = is_plain and tensor.shape == result.shape and _kind(result.dtype) <= _kind(tensor.dtype)
        is_plain = is_plain and not (torch.is_grad_enabled() and (tensor.requires_grad or result.requires_grad))
    if not is_plain:
        raise ShapeError("in a compiled graph, out= takes tensors of the result's shape that need no gradient")
    for tensor, result in zip(outs, results, strict=True):
        tensor.copy_(result)


def _kind(dtype: torch.dtype) -> int:
    # torch.can_cast forbids to go down; Dynamo cannot call it.
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 0 if dtype is torch.bool else 1


def _resize(tensor: torch.Tensor, shape: Shape, strides: Strides) -> None:
    # at::native::resize_output, with its warning.
    if tensor.numel():
        warnings.warn(
            f"An output with one or more elements was resized since it had shape {list(tensor.shape)}, which does not "
            f"match the required output shape {list(shape)}. This behavior is deprecated, and in a future PyTorch "
            "release outputs will not be resized unless they have zero elements. You can explicitly reuse an out "
            "tensor t by resizing it, inplace, to zero elements with t.resize_(0).",
            stacklevel=2,
        )
    tensor.resize_(shape).as_strided_(shape, strides)


def _check_memory(
    written: torch.Tensor, inputs: Sequence[torch.Tensor], written_before: Sequence[torch.Tensor], taker: str
) -> None:
    if written.requires_grad and torch.is_grad_enabled():
        raise GradientError(
            f"{taker}: out= does not support automatic differentiation, but an out= tensor requires grad"
        )
    for other in (*inputs, *written_before):
        if written.device != other.device and other.dim():
            raise DeviceError(f"{taker}: out= is on {written.device}, but an input is on {other.device}")
    if torch._debug_has_internal_overlap(written) == 1:
        raise ShapeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory "
            "location. Please clone() the tensor before performing the operation."
        )
    # An input may be overwritten in place; two outputs must be two.
    if any(_overlap(written, other) == _PARTIAL for other in inputs) or any(
        _overlap(written, other) in {_PARTIAL, _SAME} for other in written_before
    ):
        raise ShapeError(
            "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single "
            "memory location. Please clone() the tensor before performing the operation."
        )


_NONE, _SAME, _PARTIAL, _UNKNOWN = range(4)


def _overlap(written: torch.Tensor, other: torch.Tensor) -> int:
    # at::get_overlap_status.
    if not written.numel() or not other.numel() or written.device != other.device:
        return _NONE
    if written is other:
        return _SAME
    begin, other_begin = written.data_ptr(), other.data_ptr()
    end, other_end = begin + extent_bytes(written), other_begin + extent_bytes(other)
    if end <= other_begin or other_end <= begin:
        return _NONE
    same = begin == other_begin and end == other_end
    if same and written.stride() == other.stride() and written.shape == other.shape:
        return _SAME
    return _PARTIAL if _is_dense(written) and _is_dense(other) else _UNKNOWN


def _torch_name(dtype: torch.dtype) -> str:
    # torch's errors have the names of its C++ types.
    name = str(dtype).removeprefix("torch.")
    return _TORCH_NAMES.get(name, name.capitalize().replace("Uint", "UInt"))


_TORCH_NAMES = {
    "uint8": "Byte", "int8": "Char", "int16": "Short", "int32": "Int", "int64": "Long", "float16": "Half",
    "float32": "Float", "float64": "Double", "complex32": "ComplexHalf", "complex64": "ComplexFloat",
    "complex128": "ComplexDouble", "bfloat16": "BFloat16",
}  # fmt: skip


def _is_dense(tensor: torch.Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


def extent_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last one."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size() if tensor.numel() else 0
