"""What is known of a kernel: before any call (KernelSpec), and what one call adds (ArgSpec), sizes left out.

The inference of dtypes, shapes and strides through a group lives here too: it needs no tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fuser import torch_ops as ops
from fuser.access import DEFAULT_TUNING, Access, Tuning
from fuser.application import Application
from fuser.cxx.functor import Functor
from fuser.dtypes import Rank, dtype_info
from fuser.errors import GroupError, ShapeError, UnsupportedError
from fuser.function import ARRANGEMENTS, READS, VIEWS, Function
from fuser.graph import FusionGroup, hash_text
from fuser.layout import (
    Shape,
    Strides,
    broadcast_shapes,
    contiguous_strides,
    has_channels_last_format,
    infer_output_strides,
    is_dense,
)
from fuser.orders import RowOrder

__all__ = [
    "ArgSpec",
    "InputSpec",
    "KernelSpec",
    "RowSpec",
    "Typing",
    "ValueLayout",
    "build_kernel_spec",
    "index_strides",
    "infer_layouts",
    "infer_typing",
]

# What one launch takes; a group beyond it is cut.
MAX_INPUTS = 64
MAX_OUTPUTS = 16
MAX_ARGUMENT_BYTES = 4096
# What CUDA takes at most: for a functor that is too large for the limits above and cannot be cut.
MAX_LONE_ARGUMENT_BYTES = 32760
# Rows that a CPU kernel computes side by side.
CPU_LANES = 64
# Rows of fewer elements than this are not worth a loop of their own on the CPU, reduced or not.
CPU_SHORT_ROW = 32
# And those of so many are long (``RowSpec.is_long``).
CPU_LONG_ROW = 256


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """Everything known of a group before a call."""

    # The canonical group.
    group: FusionGroup
    # It as JSON: what stands for it where it must be found again, also by other processes.
    text: str = field(init=False, repr=False, compare=False)
    # The group's key.
    key: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Write it down."""
        object.__setattr__(self, "text", self.group.to_json(indent=None))
        object.__setattr__(self, "key", hash_text(self.text, self.group.defaults()))


class InputSpec(NamedTuple):
    """One input of a call."""

    dtype: torch.dtype
    rank: Rank
    # Python type of a value that is passed by value (a number, a 0-dim CPU tensor beside CUDA ones); None: a pointer.
    number: type | None = None
    # Innermost stride: 0 (one element for all), 1 (dense), 2 (any, given at run time), 3 (dense, and begins anew after
    # ``IterationSpace.period`` elements) or 4 (an element lasts for so many). 0 for numbers.
    inner: int = 0
    # Dimensions, where a group reduces some: what has none left is weak in promotion.
    ndim: int = 0
    # Whether it has no memory: its element at an offset is the offset.
    is_counter: bool = False


class RowSpec(NamedTuple):
    """What the text of a kernel with reductions depends on beyond that of a pointwise one."""

    # How many of the merged dimensions, the first ones, are reduced.
    reduced: int
    # For each value of the group whether there is one per row, not per element.
    is_row: tuple[bool, ...]
    # Whether neighbouring rows are computed side by side, instead of a row's neighbouring elements.
    is_across: bool
    # Whether what is costly and needed in several passes is computed once: rows are short enough to keep it.
    keeps: bool = False
    # Torch's order, where the kernel keeps it; None: the canonical one.
    order: RowOrder | None = None
    # How many pieces of columns it makes beside its rows: its blocks. 0: none.
    pieces: int = 0
    # Whether its reductions are running totals.
    scans: bool = False
    # Then, on the CPU, whether rows are short, and they and all operands' elements lie one behind the other.
    is_flat: bool = False
    # On the CPU, whether rows are so long that what units come to is combined as they come.
    is_long: bool = False

    @property
    def inner(self) -> int:
        """The dimension along which neighbours are computed side by side."""
        return self.reduced if self.is_across else 0

    @property
    def adds(self) -> bool:
        """Whether what computes an element adds it to what a thread has of its row."""
        return self.order is not None and not (self.order.is_cascade or self.scans)


class ArgSpec(NamedTuple):
    """What a kernel's text depends on beside its group."""

    # "cuda" or "cpu".
    device_type: str
    # One per input of the group; None for an input no application reads.
    inputs: tuple[InputSpec | None, ...]
    # Innermost stride class of each output.
    outputs: tuple[int, ...]
    # Merged dimensions; 1 with dense or broadcast operands only is the linear kernel.
    rank: int
    # Elements of the innermost dimension that one thread computes together (CUDA).
    vector: int
    # Whether offsets need 64 bits.
    wide_index: bool
    # torch's default dtype: what integral inputs of ``exp`` become.
    default_dtype: torch.dtype
    # Settings that change the text.
    settings: tuple[tuple[str, Any], ...]
    # Innermost stride class of each counter: indices in the order of ``FusionGroup.index_values``, then inputs.
    counters: tuple[int, ...] = ()
    # How each operand is read or written, outputs first, counters last (CUDA; empty on the CPU).
    accesses: tuple[Access, ...] = ()
    # How a CUDA kernel divides its work.
    tuning: Tuning = DEFAULT_TUNING
    # Of a kernel with reductions.
    rows: RowSpec | None = None
    # Of a kernel over lists of tensors: how many positions of them a launch takes at most; 0 for others.
    positions: int = 0
    # Whether operands begin elsewhere than at their tensors' addresses.
    has_offsets: bool = False

    @property
    def numerics(self) -> str:
        """The numerics setting of this kernel."""
        return str(dict(self.settings)["numerics"])

    def layout_class(self) -> str:
        """Return for people what of shapes and strides a kernel is for."""
        kinds = ("one for all", "dense", "any stride", "repeated rows", "one for each row")
        given = ", ".join(kinds[item.inner] for item in self.inputs if item is not None and item.number is None)
        words = [f"{self.rank} dimension{'s' * (self.rank > 1)}", f"inputs ({given}) along the innermost one"]
        words += [f"{self.vector} elements at a time"] if self.vector > 1 else []
        words += ["64-bit offsets"] if self.wide_index else []
        if self.rows is not None:
            words.append(f"rows {'side by side' if self.rows.is_across else 'one by one'}, {self.tuning}")
        return ", ".join(words)


class Typing(NamedTuple):
    """dtypes through a group."""

    # dtype of each value; for scalar inputs the dtype of the number.
    values: tuple[torch.dtype, ...]
    # Common dtype each application computes in, before it becomes a compute type.
    common: tuple[torch.dtype, ...]
    # Weight of each value in promotion, and how many dimensions it has where a group reduces some.
    ranks: tuple[Rank, ...]
    ndims: tuple[int, ...] = ()


class ValueLayout(NamedTuple):
    """Shape and strides (in elements) of one value."""

    shape: Shape
    strides: Strides
    # Whether it is a Python number: it has shape () then.
    is_number: bool = False
    # What it is stored as; None where nothing depends on it, as in a result that is dense.
    dtype: torch.dtype | None = None
    # The element of its memory at which it begins, where that is not the first; as in TensorDesc.
    offset: int = 0


def build_kernel_spec(group: FusionGroup) -> KernelSpec:
    """Lint a group, bring it into its canonical form and work out what needs no tensor.

    Raises:
        GroupError: the group fails lint.
        FunctorError: a functor's text does not parse, or a path through it gives no result.
    """
    group.lint()
    for application in group.applications:
        for functor in application.function.functors:
            _check_text(functor)
        if application.function.is_composite:
            ops.check_function(application.function)
        elif not _is_known(application.function.op):
            raise GroupError(f"there is no op {application.function.op!r} in fuser's table")
    return KernelSpec(group.canonical())


def _is_known(op: str | None) -> bool:
    return op in (None, "index", *READS, *VIEWS, *ARRANGEMENTS) or op in ops.OPS or op in ops.REDUCTIONS


def _check_text(functor: Functor) -> None:
    functor.raise_problems()
    if not functor.ends_in_returns:
        # What reads whole texts is imported with the first text to read.
        from fuser.cxx.paths import check_functor  # noqa: PLC0415

        check_functor(functor)


def infer_typing(group: FusionGroup, inputs: Sequence[InputSpec | None], default_dtype: torch.dtype) -> Typing:
    """Infer the dtype of every value, application by application.

    Raises:
        UnsupportedError: torch does not promote the dtypes of an application, or no kernel of it serves them. Its
            ``application`` says which one.
        ArgumentError: the identity of a reduction is no number of its accumulator's type.
    """
    values = [item.dtype if item else torch.float32 for item in inputs]
    ranks = [item.rank if item else Rank.NUMBER for item in inputs]
    ndims = [item.ndim if item else 0 for item in inputs]
    common_dtypes = []
    for index, application in enumerate(group.applications):
        function = application.function
        if function.is_composite:
            inner = _type_steps(application, index, [*zip(values, ranks, ndims, strict=True)], default_dtype)
            made = ops.composite_steps(str(function.op), function.form or ()).outputs
            values += [inner.values[value] for value in made]
            ranks += [inner.ranks[value] for value in made]
            ndims += [inner.ndims[value] for value in made]
            common_dtypes.append(values[application.tensors[0]])
            continue
        try:
            common = _common_dtype(application, values, ranks, default_dtype)
            dtypes = function.result_dtypes(common)
            for dtype in dtypes:
                dtype_info(dtype)
            if function.reduction is not None:
                function.reduction.initial(dtype_info(common).compute_dtype)
        except UnsupportedError as error:
            error.application = index
            raise
        common_dtypes.append(common)
        values += dtypes
        rank = min(ranks[value] for value in application.tensors)
        ndim = max(ndims[value] for value in application.tensors)
        if function.reshapes:
            ndim = function.result_rank(ndim)
            # What has no dimension left is weak, as a 0-dim tensor is.
            rank = Rank.TENSOR if ndim else max(rank, Rank.ZERO_DIM)
        if function.view is not None:
            ndim += function.view.further_dims
        ranks += [rank] * function.num_outputs
        ndims += [ndim] * function.num_outputs
    return Typing(tuple(values), tuple(common_dtypes), tuple(ranks), tuple(ndims))


def _type_steps(
    application: Application, index: int, known: Sequence[tuple[torch.dtype, Rank, int]], default_dtype: torch.dtype
) -> Typing:
    # dtypes through the steps of a composite.
    function = application.function
    try:
        ops.check_dtypes(function, [known[value][0] for value in application.tensors])
        bound = ops.bind_inputs(function, application.tensors, application.scalars)
        inputs = [InputSpec(dtype, rank, ndim=ndim) for dtype, rank, ndim in (known[value] for value in bound)]
        return infer_typing(ops.composite_steps(str(function.op), function.form or ()), inputs, default_dtype)
    except UnsupportedError as error:
        error.application = index
        raise


def infer_layouts(
    group: FusionGroup, inputs: Sequence[ValueLayout], *, is_of_torch: bool = False
) -> tuple[ValueLayout, ...]:
    """Infer shape and strides of every value, as torch would give them op by op.

    Args:
        group: whose values they are.
        inputs: what is known of its inputs.
        is_of_torch: whether it is the steps of an op of torch's, which errors do not name.

    Raises:
        ShapeError: the tensors of an application do not broadcast; names the functor.
        DimError, ShapeError: a reduction's dimensions are none of the shape's; names the functor, if it is a user's.
    """
    values = list(inputs)
    for application in group.applications:
        function = application.function
        operands = [values[value] for value in application.tensors]
        if function.is_composite:
            ops.check_shapes(function, [operand.shape for operand in operands])
            steps = ops.composite_steps(str(function.op), function.form or ())
            given = ops.bind_inputs(function, operands, [values[item] for item in application.scalars])
            inner = infer_layouts(steps, given, is_of_torch=True)
            values += [inner[value] for value in steps.outputs]
            continue
        if function.view is not None:
            values.append(ValueLayout(*function.view.apply(operands[0].shape, operands[0].strides)))
            continue
        if function.arranges:
            values.append(
                ValueLayout(*ops.lay_out(function, [(operand.shape, operand.strides) for operand in operands]))
            )
            continue
        try:
            shape = broadcast_shapes([operand.shape for operand in operands])
        except ShapeError as error:
            ops.look_at_sizes(function, [operand.shape for operand in operands])
            shapes = ", ".join(str(list(operand.shape)) for operand in operands)
            raise ShapeError(
                f"{_name_for_people(group, application, len(values))}: {error} (shapes {shapes})"
            ) from None
        if function.is_index:
            function.index_dims(len(shape), _name_before_dims(group, application, len(values)))
        if function.reduction is not None:
            name = "" if is_of_torch else _name_before_dims(group, application, len(values))
            shape = function.reduction.reduce_shape(shape, name)
            strides = contiguous_strides(shape)
        elif function.is_view:
            shape, strides = _view(function, operands[0])
        elif function.op in {"pow", "pow_number"} and operands[0].is_number:
            # at::pow(Scalar, Tensor) lays its result out before it knows its operands.
            strides = contiguous_strides(shape)
        elif function.is_contiguous or (
            function.keeps_format and not has_channels_last_format(shape, operands[0].strides)
        ):
            strides = contiguous_strides(shape)
        elif operands[0].shape == shape and _keeps_strides(function, operands[0]):
            strides = operands[0].strides
        elif function.op in _TESTS_BY_STEPS:
            strides = _lay_out_test(str(function.op), operands[0])
        else:
            if function.op in _LIKE_OPERAND and operands[0].shape == shape:
                operands = operands[:1]
            if not function.numbers_have_layout:
                operands = [operand for operand in operands if not operand.is_number] or operands
            strides = infer_output_strides(shape, [(operand.shape, operand.strides) for operand in operands])
        dtype = function.out_dtypes[0] if function.is_conversion else None
        values += [ValueLayout(shape, strides, dtype=dtype)] * function.num_outputs
    return tuple(values)


def index_strides(function: Function, shape: Shape) -> Strides:
    """Return by how much an index grows along each dimension of the shape that it counts in.

    Raises:
        DimError, ShapeError: its dimensions are none of the shape's.
    """
    dims = function.index_dims(len(shape))
    strides = contiguous_strides(tuple(size if dim in dims else 1 for dim, size in enumerate(shape)))
    return tuple(stride if dim in dims else 0 for dim, stride in enumerate(strides))


def _name_for_people(group: FusionGroup, application: Application, value: int) -> str:
    return _taker(group, application, value).name


def _name_before_dims(group: FusionGroup, application: Application, value: int) -> str:
    # torch does not name its own ops there.
    function = _taker(group, application, value)
    return "" if function.op and not function.is_index else function.name


def _taker(group: FusionGroup, application: Application, value: int) -> Function:
    # An index is part of what takes it, which comes later.
    function = application.function
    takers = [item.function for item in group.applications if value in item.tensors] if function.is_index else []
    return takers[0] if takers else function


def _view(function: Function, operand: ValueLayout) -> tuple[Shape, Strides]:
    # As torch lays a view out: what is new comes to one step of the dimension that it stands before.
    rank = len(operand.shape)
    sources = function.view_dims(rank)
    steps = [size * stride for size, stride in zip(operand.shape, operand.strides, strict=True)]
    shape = tuple(1 if dim is None else operand.shape[dim] for dim in sources)
    strides = []
    for slot, dim in enumerate(sources):
        after = next((other for other in sources[slot:] if other is not None), rank)
        strides.append(operand.strides[dim] if dim is not None else steps[after] if after < rank else 1)
    return shape, tuple(strides)


def _keeps_strides(function: Function, operand: ValueLayout) -> bool:
    # What ATen makes like its operand keeps them where that is dense, also those of dimensions that nobody walks.
    if function.op == "convert" and operand.dtype is function.out_dtypes[0]:
        return True
    return (function.is_conversion or function.op in _LIKE_OPERAND) and is_dense(operand.shape, operand.strides)


_LIKE_OPERAND = frozenset(
    "hardtanh clone deg2rad rad2deg nan_to_num prelu log_sigmoid log_sigmoid_backward huber_loss binary_cross_entropy"
    " binary_cross_entropy_backward".split()
)
_TESTS_BY_STEPS = frozenset({"isinf", "isfinite"})


def _lay_out_test(op: str, operand: ValueLayout) -> Strides:
    # ATen compares the absolute value with a number, and the operand with itself.
    shape, number = operand.shape, ((), ())
    size = infer_output_strides(shape, [(shape, operand.strides)])
    compared = infer_output_strides(shape, [(shape, size), number])
    return compared if op == "isinf" else infer_output_strides(shape, [(shape, size), (shape, compared)])


def _common_dtype(
    application: Application, values: Sequence[torch.dtype], ranks: Sequence[Rank], default_dtype: torch.dtype
) -> torch.dtype:
    # The dtype it computes in, if a kernel can.
    function = application.function
    # Where sizes are looked at, tensors have the same ones before they are promoted.
    weight = min(ranks[value] for value in application.tensors) if function.sizes_of else Rank.NUMBER
    operands = [(values[value], min(ranks[value], weight)) for value in application.tensors]
    common = function.common_dtype(operands, default_dtype)
    if function.is_index:
        return common
    _check_kind(application, common, operands, values)
    parameters = function.tensor_parameters(len(application.tensors))
    for value, parameter in zip(application.tensors, parameters, strict=True):
        dtype_info(values[value])
        # A user's scalar as a 0-dim tensor is of any dtype; the condition of torch's own ops is not.
        if function.op and parameter.type == "bool" and values[value] is not torch.bool:
            raise UnsupportedError(f"op {function.op!r} with a condition of {values[value]}")
        if function.op and parameter.type == "double" and values[value].is_complex:
            raise UnsupportedError(f"op {function.op!r} with a complex number")
    return common


def _check_kind(
    application: Application,
    common: torch.dtype,
    operands: Sequence[tuple[torch.dtype, Rank]],
    values: Sequence[torch.dtype],
) -> None:
    function = application.function
    dtype_info(common)
    if function.op is None or function.is_view or function.is_read or function.arranges:
        return
    if function.reduction is not None:
        reduces = ops.REDUCTIONS[function.op]
        if ops.dtype_kind(common) not in reduces.kinds or common in reduces.others:
            raise UnsupportedError(f"op {function.op!r} on {common}")
        return
    op = ops.OPS[function.op]
    if ops.dtype_kind(common) not in op.kinds:
        raise UnsupportedError(f"op {function.op!r} on {common}")
    if op.same_dtypes and any(dtype != common for dtype, rank in operands if rank is not Rank.NUMBER):
        # torch has its own error for it.
        raise UnsupportedError(f"op {function.op!r} with tensors of different dtypes")
    if function.op == "sub" and any(values[value] is torch.bool for value in application.tensors):
        # torch has its own error for it.
        raise UnsupportedError("op 'sub' with a bool tensor")
    if function.op == "addcdiv" and not any(values[value].is_floating_point for value in application.tensors[1:]):
        # Likewise.
        raise UnsupportedError("op 'addcdiv' with a quotient of integers")
    if ops.dtype_kind(common) != "float" and any(values[value].is_floating_point for value in application.scalars):
        # torch has its own error for it.
        raise UnsupportedError(f"op {function.op!r} on {common} with a floating scalar")
