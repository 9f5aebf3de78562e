"""What an application of the IR applies: a functor with its typing rules, or a reduction."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch

from fuser.combining import Reduction, functor_from_json, functor_to_json, normalize_dims
from fuser.cxx.builtin_types import dtype_named
from fuser.cxx.functor import EntryParameter, Functor, describe_call, parse_functor
from fuser.dtypes import Rank, dtype_info, is_continuous, number_kind, promote, to_floating
from fuser.errors import ArgumentError, GroupError, ShapeError, UnsupportedError
from fuser.fields import check_fields
from fuser.layout import Shape, Strides

__all__ = ["ARRANGEMENTS", "READS", "VIEWS", "Function", "HandWritten", "Isolation", "Promotion", "View"]

# The ops that change dimensions of size 1 alone.
VIEWS = frozenset({"unsqueeze", "squeeze"})
# The ops that compute nothing and say where elements lie (``fuser.ops.arrangements``).
ARRANGEMENTS = frozenset({"view", "cat", "pad", "full", "arange", "take", "put"})
# What kernels have of those that read at entries that are computed: how many tensors of each stay in memory.
READS = {"read": 1, "pick": 1, "add_each": 2, "add_once": 2, "add_lanes": 2}


# Ops whose ATen kernels take numbers in the narrow dtype, on CUDA too; those that on the CPU take a second operand in a
# wider one; and a number that is no operand of theirs.
_OF_NARROW = frozenset({"fmod", "remainder", "pow", "copysign", "atan2", "hypot", "addcmul", "xlogy"})
_BY_WIDE = frozenset({"mul", "div", "div_number", "div_trunc", "div_trunc_number"})
_OF_NUMBERS = frozenset({"lerp", "pow_number"})


class Promotion(Enum):
    """How the dtype an application computes in follows from the dtypes of its tensors."""

    # torch's promotion of the tensors.
    DEFAULT = "default"
    # The same, but integral dtypes become torch's default dtype (ATen: unary float ops, true division).
    INT_TO_FLOAT = "int_to_float"
    # The same, but integral dtypes become int64 (ATen: sums and products along dimensions).
    INT_TO_LONG = "int_to_long"
    # These two under torch.autocast: half and bfloat16 become float32.
    DEFAULT_WIDE = "default_wide"
    INT_TO_FLOAT_WIDE = "int_to_float_wide"

    @property
    def wide(self) -> Promotion:
        """The one of an op that torch.autocast runs in float32, from the op's own."""
        return Promotion.DEFAULT_WIDE if self is Promotion.DEFAULT else Promotion.INT_TO_FLOAT_WIDE


class Isolation(Enum):
    """How far strict kernels keep an application apart from the others."""

    # It has the bits that it has alone in a kernel.
    FULL = "full"
    # What it has in common with others is computed once; no multiply-add is contracted with what reads its result.
    RESULT = "result"
    # Nothing is kept apart: the last bit depends on what else is in the kernel.
    NONE = "none"


class View(NamedTuple):
    """Another shape of the same elements: one dimension as two, then further ones of size 1; or back."""

    # Of what is looked at; what has fewer dimensions broadcasts to it.
    rank: int
    # The dimension, and how many parts the first of the two has.
    split: tuple[int, int] | None = None
    # Where dimensions of size 1 are in the result, ascending.
    insert: tuple[int, ...] = ()
    is_inverse: bool = False

    def apply(self, shape: Shape, strides: Strides) -> tuple[Shape, Strides]:
        """Return shape and strides of the view.

        Raises:
            ShapeError: the dimension does not have so many parts. UnsupportedError: there are more dimensions.
        """
        dims = list(zip(shape, strides, strict=True))
        if self.is_inverse:
            dims = [item for dim, item in enumerate(dims) if dim not in self.insert]
            if self.split is not None:
                dim = self.split[0]
                size, stride = dims.pop(dim + 1)
                outer, step = dims[dim]
                dims[dim] = (outer * size, stride if size > 1 else step)
        elif dims:
            if len(dims) > self.rank:
                raise UnsupportedError(f"{len(dims)} dimensions beside {self.rank} that are looked at in another shape")
            dims = [(1, 0)] * (self.rank - len(dims)) + dims
            if self.split is not None:
                dim, parts = self.split
                size, stride = dims[dim]
                if size != 1 and size % parts:
                    raise ShapeError(f"a dimension of {size} elements does not have {parts} equal parts")
                inner = size // parts if size != 1 else 1
                dims[dim : dim + 1] = [(parts if size != 1 else 1, stride * inner), (inner, stride)]
            for dim in self.insert:
                dims.insert(dim, (1, 1))
        return tuple(size for size, _ in dims), tuple(stride for _, stride in dims)

    @property
    def further_dims(self) -> int:
        """How many dimensions more the result has."""
        return (-1 if self.is_inverse else 1) * (len(self.insert) + (self.split is not None))

    @property
    def inverse(self) -> View:
        """The view that takes its result back."""
        return View(self.rank, self.split, self.insert, not self.is_inverse)


@dataclass(frozen=True, slots=True, repr=False)
class Function:
    """What an application applies: a functor with its typing rules."""

    # Of a reduction: the map, which makes the accumulators of one element.
    functor: Functor
    # The ATen op this is, for torch's own ops; None for a user's functor.
    op: str | None = None
    promotion: Promotion = Promotion.DEFAULT
    # Parameters that take no part in promotion (the condition of ``where``).
    unpromoted: tuple[str, ...] = ()
    # dtype of each output; None stands for the common dtype. Empty: all are the common dtype.
    out_dtypes: tuple[torch.dtype | None, ...] = ()
    # Whether a Python number among the tensors counts as a 0-dim operand when torch lays out the result.
    numbers_have_layout: bool = True
    # The same computation in eager torch, given by the user: called with the tensors and the scalars by name.
    fallback: Callable[..., Any] | None = None
    # The derivative, where the user wrote it; else it is derived from the text.
    backward: HandWritten | None = None
    # Less than full in derived groups, which compute the forward pass again beside its derivative.
    isolation: Isolation = Isolation.FULL
    # What makes it a reduction.
    reduction: Reduction | None = None
    # Of the op "index": the dimensions along which elements are numbered, row-major; as in Reduction. Of "unsqueeze":
    # the dimensions of the result that are new; of "squeeze": those of the tensor that go.
    dims: tuple[int, ...] | None = None
    # Of an op that is several steps (``fuser.ops.composites``): what its steps depend on beside dtypes and shapes. The
    # functor says no more than what it takes and makes. Of an arrangement: where elements lie.
    form: tuple[Any, ...] | None = None
    # Among those steps only: its result is another shape of the same elements.
    view: View | None = None
    # Whether results lie row-major, whatever the tensors do.
    is_contiguous: bool = False
    # Whether they do unless the first tensor lies in one of torch's formats of channels last.
    keeps_format: bool = False
    # The function of torch.nn.functional that looks, before, whether the first two tensors have one size; "" if none.
    sizes_of: str = ""
    # Whether torch computes it in memory like its first tensor's, or in that: it has the result's shape and dtype.
    is_in_place: bool = False

    @property
    def name(self) -> str:
        """The op's or the entry's name."""
        return self.op or (self.reduction.combine if self.reduction else self.functor).entry

    @property
    def num_outputs(self) -> int:
        """How many values one application makes."""
        return self.reduction.result.num_outputs if self.reduction else self.functor.num_outputs

    def signature(self, index: str | None = None) -> str:
        """Return how it is called, for messages: ``total(x, *, factor)``, or ``pick(x, i=index)``."""
        return describe_call(self.name, self.functor.tensors, self.scalars, index)

    def __repr__(self) -> str:
        # Texts are long.
        return f"<fuser.Function {self.signature()}>"

    @property
    def functors(self) -> tuple[Functor, ...]:
        """All texts of it."""
        if self.reduction is None:
            return (self.functor,)
        further = (self.reduction.finish, self.reduction.accumulate)
        return (self.functor, self.reduction.combine, *(functor for functor in further if functor))

    @property
    def scalars(self) -> tuple[EntryParameter, ...]:
        """The parameters that an application's scalars bind, in order: one for each name."""
        if self.reduction is None:
            return self.functor.scalars
        return tuple({item.name: item for functor in self.functors for item in functor.scalars}.values())

    def check_kind(self, parameter: EntryParameter, kind: type, common: torch.dtype) -> None:
        """Raise ArgumentError where a parameter of a user's functor is real, and its number a complex one."""
        if kind is complex and self.op is None:
            compute, names = dtype_info(common).compute_dtype, self.functor.template_parameters
            declared = dtype_named(parameter.type, names[0] if names else "", compute)
            if declared is not None and not declared.is_complex:
                what = f"{parameter.type} {parameter.name}"
                raise ArgumentError(f"{self.signature()}: {what} takes no complex number, with tensors of {common}")

    def tensor_parameters(self, count: int) -> tuple[EntryParameter, ...]:
        """Return the parameters that ``count`` tensors bind; trailing ones with a C++ default may be left out."""
        return self.functor.tensors[:count]

    def accepts(self, count: int) -> bool:
        """Whether the functor can be applied to ``count`` tensors."""
        tensors = self.functor.tensors
        if count == len(tensors):
            return True
        # C++ allows to leave out arguments at the end of the call only.
        tail = self.functor.parameters[-(len(tensors) - count) :] if count < len(tensors) else ()
        return bool(tail) and all(parameter in tensors and parameter.has_default for parameter in tail)

    @property
    def asks_sizes(self) -> bool:
        """Whether torch asks more of its tensors' sizes than that they broadcast."""
        return bool(self.sizes_of) or self.is_in_place

    @property
    def is_composite(self) -> bool:
        """Whether it is an op of torch's that becomes several steps when a call is planned."""
        return self.form is not None and not self.arranges

    @property
    def arranges(self) -> bool:
        """Whether it computes nothing and says where elements lie: a view, tensors put together, one number for all."""
        return self.op in ARRANGEMENTS

    @property
    def reduces(self) -> bool:
        """Whether it combines elements, or is an op that may."""
        return self.reduction is not None or self.is_composite

    @property
    def is_index(self) -> bool:
        """Whether it numbers elements: it takes the shape of its tensors, and nothing else of them."""
        return self.op == "index"

    def index_dims(self, rank: int, name: str | None = None) -> tuple[int, ...]:
        """Return the dimensions along which an index counts, ascending; raises as ``Reduction.normalize_dims``."""
        return normalize_dims(self.dims, rank, self.name if name is None else name)

    @property
    def is_read(self) -> bool:
        """Whether it reads elements of its first tensor, which stays in memory, at entries that are computed."""
        return self.op in READS

    @property
    def is_view(self) -> bool:
        """Whether it puts dimensions of size 1 in, or takes them out, and computes nothing."""
        return self.op in VIEWS

    @property
    def reshapes(self) -> bool:
        """Whether its results have other dimensions than its tensors."""
        return self.reduces or self.is_view or self.arranges

    def result_rank(self, rank: int) -> int:
        """Return how many dimensions its results have, where its tensors' shapes broadcast to one of ``rank``."""
        if self.reduction is not None:
            return self.reduction.remaining_dims(rank)
        if self.arranges and self.form is not None:
            return rank if self.form[-1] is None else int(self.form[-1])
        return rank + len(self.dims or ()) * (1 if self.op == "unsqueeze" else -1) if self.is_view else rank

    def view_dims(self, rank: int) -> tuple[int | None, ...]:
        """Return, for each dimension of a view's result, the tensor's that it is; None for a new one.

        Raises:
            DimError, ShapeError: as ``Reduction.normalize_dims``.
        """
        if self.op == "squeeze":
            gone = normalize_dims(self.dims, rank, self.name)
            return tuple(dim for dim in range(rank) if dim not in gone)
        made = self.result_rank(rank)
        new = normalize_dims(self.dims, made, self.name)
        own = iter(range(rank))
        return tuple(None if dim in new else next(own) for dim in range(made))

    @property
    def is_comparison(self) -> bool:
        """Whether it is one of torch's comparisons."""
        return self.op is not None and not self.is_conversion and self.out_dtypes == (torch.bool,)

    def takes_wide(self, slot: int, *, is_number: bool, is_weak: bool, device_type: str) -> bool:
        """Whether an operand that promotion makes narrower is computed with as it is: 0.1 beside bfloat16, say.

        On CUDA ATen's kernels take numbers so, but for those that compute in the narrow dtype itself. On the CPU
        operands are converted before a kernel runs; products and quotients look at what their second one was.

        Args:
            slot: of the operand, among the tensors.
            is_number: whether it is a Python number.
            is_weak: whether it is that, or has no dimensions.
            device_type: where the kernel runs.
        """
        if self.is_comparison:
            return False
        if device_type == "cpu" and self.op is not None and self.op not in _OF_NUMBERS:
            return is_weak and slot == 1 and self.op in _BY_WIDE
        is_dividend = self.op in {"div", "div_trunc"} and slot == 0
        return is_number and self.op not in _OF_NARROW and not is_dividend

    @property
    def is_conversion(self) -> bool:
        """Whether it is torch's conversion to another dtype."""
        return self.op in {"to", "convert"}

    def common_dtype(self, operands: Sequence[tuple[torch.dtype, Rank]], default: torch.dtype) -> torch.dtype:
        """Return the dtype an application computes in, before it becomes a compute type.

        Args:
            operands: dtype and weight of each tensor, in order; trailing parameters may be missing.
            default: torch's default dtype.

        Raises:
            UnsupportedError: torch does not promote the dtypes. ArgumentError: as ``check_kind``, of a scalar that is a
                tensor.
        """
        if self.is_index:
            return torch.int64
        pairs = [*zip(operands, self.tensor_parameters(len(operands)), strict=True)]
        common = promote(operand for operand, parameter in pairs if parameter.name not in self.unpromoted)
        if self.promotion in (Promotion.INT_TO_FLOAT, Promotion.INT_TO_FLOAT_WIDE):
            common = to_floating(common, default)
        elif self.promotion is Promotion.INT_TO_LONG and not is_continuous(common):
            common = torch.int64
        is_wide = self.promotion in (Promotion.DEFAULT_WIDE, Promotion.INT_TO_FLOAT_WIDE)
        common = torch.float32 if is_wide and common in (torch.float16, torch.bfloat16) else common
        for (dtype, _), parameter in pairs if self.unpromoted else ():
            if parameter.name in self.unpromoted:
                self.check_kind(parameter, number_kind(dtype), common)
        return common

    def result_dtypes(self, common: torch.dtype) -> list[torch.dtype]:
        """Return the dtype of each result, where tensors have the common one."""
        return [dtype or common for dtype in self.out_dtypes] or [common] * self.num_outputs

    def to_json(self) -> dict[str, Any]:
        """Return what from_json needs, without what is as usual; of a user's fallback, a name in this process."""
        written = {
            "op": self.op,
            **functor_to_json(self.functor),
            "promotion": self.promotion.value,
            "unpromoted": list(self.unpromoted),
            "out_dtypes": [None if dtype is None else str(dtype).removeprefix("torch.") for dtype in self.out_dtypes],
            "numbers_have_layout": self.numbers_have_layout,
            "fallback": self.fallback and _name_callable(self.fallback),
            "backward": self.backward and self.backward.to_json(),
            "isolation": self.isolation.value,
            "reduction": self.reduction and self.reduction.to_json(),
            "dims": None if self.dims is None else list(self.dims),
            "form": self.form,
            "is_contiguous": self.is_contiguous,
            "keeps_format": self.keeps_format,
            "sizes_of": self.sizes_of,
            "is_in_place": self.is_in_place,
        }
        return {name: value for name, value in written.items() if value != _USUAL.get(name, ...)}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Function:
        """Rebuild a function from its JSON form.

        Raises:
            GroupError: it has a fallback, and was written by another process; or a part of it is of a wrong kind.
        """
        data = _USUAL | data
        functor = functor_from_json(data)
        if data["fallback"] and data["fallback"] not in _callables:
            raise GroupError(
                f"{functor.entry} has a fallback that is a Python function, which only the process knows that wrote "
                "this group: to save it, leave out jit_fn(..., fallback=)"
            )
        function = Function(
            functor=functor,
            op=data["op"],
            promotion=Promotion(data["promotion"]),
            unpromoted=tuple(data["unpromoted"]),
            out_dtypes=tuple(None if name is None else getattr(torch, name) for name in data["out_dtypes"]),
            numbers_have_layout=data["numbers_have_layout"],
            fallback=data["fallback"] and _callables[data["fallback"]],
            backward=data["backward"] and HandWritten.from_json(data["backward"]),
            isolation=Isolation(data["isolation"]),
            reduction=data["reduction"] and Reduction.from_json(data["reduction"]),
            dims=None if data["dims"] is None else tuple(data["dims"]),
            form=_form_from_json(data["form"]),
            is_contiguous=data["is_contiguous"],
            keeps_format=data["keeps_format"],
            sizes_of=data["sizes_of"],
            is_in_place=data["is_in_place"],
        )
        for part in (function, function.reduction, function.backward):
            if part is not None:
                check_fields(part)
        return function


# What a function's JSON form leaves out.
_USUAL: dict[str, Any] = {
    "op": None,
    "scalars": [],
    "num_outputs": 1,
    "promotion": "default",
    "unpromoted": [],
    "out_dtypes": [],
    "numbers_have_layout": True,
    "fallback": None,
    "backward": None,
    "isolation": "full",
    "reduction": None,
    "dims": None,
    "form": None,
    "is_contiguous": False,
    "keeps_format": False,
    "sizes_of": "",
    "is_in_place": False,
}

# Python functions that groups hold, by the names that stand for them in JSON: no two processes give the same name.
_callables: dict[str, Callable[..., Any]] = {}
_callable_names: dict[int, str] = {}


def _name_callable(function: Callable[..., Any]) -> str:
    name = _callable_names.setdefault(id(function), uuid.uuid4().hex)
    # Kept, so that nothing else gets its id.
    _callables[name] = function
    return name


class HandWritten(NamedTuple):
    """A backward functor of the user's: takes tensors of the forward pass, then the gradient of every output.

    Its scalars are those of the forward functor, by name.
    """

    functor: Functor
    # Which tensors it takes: slots among the forward functor's tensors, and after them among its outputs.
    saved: tuple[int, ...]
    # The forward functor's tensors of which its outputs are the gradients.
    targets: tuple[int, ...]
    # Which of its tensors are scalars that the call gives as tensors; they are taken by name.
    scalars: tuple[str, ...] = ()

    def operands(self, forward: Functor) -> list[tuple[str, int]]:
        """Return what each tensor parameter is bound to: a "tensor", an "output" or the "gradient" of one."""
        names = [parameter.name for parameter in forward.tensors]
        count = len(names)
        saved = [("tensor", slot) if slot < count else ("output", slot - count) for slot in self.saved]
        rest = iter([*saved, *(("gradient", slot) for slot in range(forward.num_outputs))])
        return [
            ("tensor", names.index(parameter.name)) if parameter.name in self.scalars else next(rest)
            for parameter in self.functor.tensors
        ]

    def unpromoted(self, forward: Function) -> tuple[str, ...]:
        """Return its parameters that take what the forward function ``forward`` takes unpromoted."""
        names = [parameter.name for parameter in forward.functor.tensors]
        bound = zip(self.functor.tensors, self.operands(forward.functor), strict=True)
        return tuple(
            parameter.name
            for parameter, (kind, slot) in bound
            if kind == "tensor" and names[slot] in forward.unpromoted
        )

    def with_tensors(self, names: Sequence[str], before: Functor, after: Functor) -> HandWritten:
        """Return it for a forward functor ``after`` that takes the scalars ``names`` of ``before`` as tensors."""
        old = [parameter.name for parameter in before.tensors]
        new = [parameter.name for parameter in after.tensors]
        slots = {slot: new.index(name) for slot, name in enumerate(old)}
        slots |= {len(old) + slot: len(new) + slot for slot in range(before.num_outputs)}
        own = [parameter.name for parameter in self.functor.scalars]
        rest = tuple(name for name in own if name not in names)
        return HandWritten(
            parse_functor(self.functor.source, rest, self.functor.num_outputs),
            tuple(slots[slot] for slot in self.saved),
            tuple(slots[slot] for slot in self.targets),
            (*self.scalars, *(name for name in own if name in names)),
        )

    def to_json(self) -> dict[str, Any]:
        """Return what from_json needs."""
        return {
            **functor_to_json(self.functor),
            "saved": list(self.saved),
            "targets": list(self.targets),
            "by_name": list(self.scalars),
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> HandWritten:
        """Rebuild it from its JSON form."""
        return HandWritten(
            functor_from_json(data), tuple(data["saved"]), tuple(data["targets"]), tuple(data["by_name"])
        )


def _form_from_json(data: Any) -> Any:
    return tuple(map(_form_from_json, data)) if isinstance(data, list | tuple) else data
