"""What an application of the IR applies: a functor with its typing rules, or a reduction."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from fuser.cxx.functor import EntryParameter, Functor, describe_call, parse_functor
from fuser.dtypes import Rank, is_representable, number_of_dtype, promote, to_floating
from fuser.eager.types import dtype_named
from fuser.errors import ArgumentError, DimError, GroupError, ShapeError, UnsupportedError
from fuser.layout import Shape, Strides

__all__ = [
    "ARRANGEMENTS",
    "BATCH",
    "VIEWS",
    "Function",
    "HandWritten",
    "Isolation",
    "Promotion",
    "Reduction",
    "View",
    "number_from_json",
    "number_to_json",
]

# Elements of a reduction that are combined as one tree; batches come in order. As torch's inner-tree order has it
# (torch/_native/ops/reductions/inner_tree_plan.py).
BATCH = 8192
# The ops that change dimensions of size 1 alone.
VIEWS = frozenset({"unsqueeze", "squeeze"})
# The ops that compute nothing and say where elements lie (``fuser.ops.arrangements``).
ARRANGEMENTS = frozenset({"view", "cat", "pad", "full", "arange", "take"})


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


@dataclass(frozen=True, slots=True)
class Reduction:
    """How a function combines, along some dimensions, what its functor (the map) makes of each element.

    The order is fuser's canonical one: elements are numbered along the dimensions, row-major; batches of 8192 of them
    are combined as a balanced binary tree over their numbers, and batches in order, the identity before them all. One
    of torch's own reductions may name torch's order, which strict kernels keep and fast ones ignore.
    """

    # Takes the accumulators of two parts, the one with the smaller numbers first, and makes those of both.
    combine: Functor
    # Value of each accumulator where nothing was combined yet.
    identity: tuple[bool | int | float | complex, ...]
    # Makes the outputs of the accumulators; None: they are the outputs.
    finish: Functor | None = None
    # Negative ones count from the end; None: all of them.
    dims: tuple[int, ...] | None = None
    # Whether the results keep the dimensions, with size 1.
    keepdim: bool = False
    # Whether ``finish`` takes the number of elements that were combined, as an int64_t after the accumulators; and, if
    # it takes one more, the number of rows, where the order is torch's, and 0 elsewhere.
    counts: bool = False
    # What torch calls the order of its own op, as in fuser.orders; empty: the canonical one.
    order: str = ""
    # Takes accumulators, then what the map takes, and makes the accumulators with one element more: how torch's order
    # adds an element where that has other bits than to combine it. None: it is mapped and combined. An accumulator that
    # it calls ``count`` is how many elements there are.
    accumulate: Functor | None = None
    # How many pieces the elements are cut into, each of which is combined by itself: the results are its accumulators,
    # along a dimension before all others. Such are parts of a plan (fuser.columns); 0 elsewhere: all is one.
    pieces: int = 0
    # Whether each element gets what it and all before it along the (one) dimension come to: the results have the shape
    # of what is reduced.
    scans: bool = False

    @property
    def result(self) -> Functor:
        """The functor whose outputs the function's are."""
        return self.finish or self.combine

    def accumulators(self, compute: torch.dtype) -> tuple[torch.dtype, ...]:
        """Return the C++ type of each accumulator, as a dtype.

        Args:
            compute: what ``combine``'s template parameter stands for.

        Raises:
            UnsupportedError: there is no such type, as ``std::complex<T>`` of a complex T.
        """
        name, parameters = self.combine.template_parameters[0], self.combine.tensors[: len(self.identity)]
        found = [dtype_named(parameter.type, name, compute) for parameter in parameters]
        for parameter, dtype in zip(parameters, found, strict=True):
            if dtype is None:
                raise UnsupportedError(f"{self.combine.entry}: an accumulator of type {parameter.type} for {compute}")
        return tuple(dtype for dtype in found if dtype is not None)

    def initial(self, compute: torch.dtype) -> tuple[bool | int | float | complex, ...]:
        """Return the identity as the accumulators' types have it.

        Raises:
            ArgumentError: a number is none of its accumulator's type.
        """
        dtypes = self.accumulators(compute)
        for slot, (number, dtype) in enumerate(zip(self.identity, dtypes, strict=True)):
            if not is_representable(number, dtype):
                which = f"of accumulator {slot} " if len(dtypes) > 1 else ""
                name = str(dtype).removeprefix("torch.")
                raise ArgumentError(f"{self.combine.entry}: the identity {number!r} {which}is no number of type {name}")
        return tuple(map(number_of_dtype, self.identity, dtypes))

    def normalize_dims(self, rank: int, name: str | None = None) -> tuple[int, ...]:
        """Return the dimensions, ascending, for tensors of a rank.

        Raises:
            DimError: a dimension is out of range. ShapeError: it is there twice. Says ``name``, or who combines.
        """
        return _normalize_dims(self.dims, rank, self.combine.entry if name is None else name)

    def reduce_shape(self, shape: Shape, name: str | None = None) -> Shape:
        """Return the shape of the results, from that of what is reduced; raises as ``normalize_dims``."""
        dims = self.normalize_dims(len(shape), name)
        if self.scans:
            return shape
        first = (self.pieces,) if self.pieces else ()
        if self.keepdim:
            return (*first, *(1 if dim in dims else size for dim, size in enumerate(shape)))
        return (*first, *(size for dim, size in enumerate(shape) if dim not in dims))

    def remaining_dims(self, rank: int) -> int:
        """Return how many dimensions the results have, for tensors of a rank."""
        kept = rank if self.keepdim or self.scans else 0 if self.dims is None else max(rank - len(self.dims), 0)
        return kept + bool(self.pieces)

    def to_json(self) -> dict[str, Any]:
        """Return what from_json needs."""
        return {
            "combine": _functor_to_json(self.combine),
            "identity": [number_to_json(number) for number in self.identity],
            "finish": self.finish and _functor_to_json(self.finish),
            "dims": None if self.dims is None else list(self.dims),
            "keepdim": self.keepdim,
            "counts": self.counts,
            "order": self.order,
            "accumulate": self.accumulate and _functor_to_json(self.accumulate),
        } | {name: value for name, value in (("pieces", self.pieces), ("scans", self.scans)) if value}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Reduction:
        """Rebuild it from its JSON form."""
        return Reduction(
            _functor_from_json(data["combine"]),
            tuple(number_from_json(number) for number in data["identity"]),
            data["finish"] and _functor_from_json(data["finish"]),
            None if data["dims"] is None else tuple(data["dims"]),
            data["keepdim"],
            data["counts"],
            data.get("order", ""),
            data.get("accumulate") and _functor_from_json(data["accumulate"]),
            data.get("pieces", 0),
            data.get("scans", False),
        )


@dataclass(frozen=True, slots=True)
class View:
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


@dataclass(frozen=True, slots=True)
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

    def index_dims(self, rank: int) -> tuple[int, ...]:
        """Return the dimensions along which an index counts, ascending; raises as ``Reduction.normalize_dims``."""
        return _normalize_dims(self.dims, rank, self.name)

    @property
    def is_read(self) -> bool:
        """Whether it reads an element of its first tensor, which stays in memory, at a place that is computed."""
        return self.op == "read"

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
            gone = _normalize_dims(self.dims, rank, self.name)
            return tuple(dim for dim in range(rank) if dim not in gone)
        made = self.result_rank(rank)
        new = _normalize_dims(self.dims, made, self.name)
        own = iter(range(rank))
        return tuple(None if dim in new else next(own) for dim in range(made))

    @property
    def is_comparison(self) -> bool:
        """Whether it is one of torch's comparisons."""
        return self.op is not None and not self.is_conversion and self.out_dtypes == (torch.bool,)

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
            UnsupportedError: torch does not promote the dtypes.
        """
        if self.is_index:
            return torch.int64
        parameters = self.tensor_parameters(len(operands))
        pairs = zip(operands, parameters, strict=True)
        common = promote(operand for operand, parameter in pairs if parameter.name not in self.unpromoted)
        if self.promotion in (Promotion.INT_TO_FLOAT, Promotion.INT_TO_FLOAT_WIDE):
            common = to_floating(common, default)
        elif self.promotion is Promotion.INT_TO_LONG and not (common.is_floating_point or common.is_complex):
            common = torch.int64
        is_wide = self.promotion in (Promotion.DEFAULT_WIDE, Promotion.INT_TO_FLOAT_WIDE)
        return torch.float32 if is_wide and common in (torch.float16, torch.bfloat16) else common

    def to_json(self) -> dict[str, Any]:
        """Return what from_json needs, without what is as usual; of a user's fallback, a name in this process."""
        written = {
            "op": self.op,
            **_functor_to_json(self.functor),
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
        }
        return {name: value for name, value in written.items() if value != _USUAL.get(name, ...)}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Function:
        """Rebuild a function from its JSON form.

        Raises:
            GroupError: it has a fallback, and was written by another process.
        """
        data = _USUAL | data
        functor = _functor_from_json(data)
        if data["fallback"] and data["fallback"] not in _callables:
            raise GroupError(
                f"{functor.entry} has a fallback that is a Python function, which only the process knows that wrote "
                "this group: to save it, leave out jit_fn(..., fallback=)"
            )
        return Function(
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
        )


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
}

# Python functions that groups hold, by the names that stand for them in JSON: no two processes give the same name.
_callables: dict[str, Callable[..., Any]] = {}
_callable_names: dict[int, str] = {}


def _name_callable(function: Callable[..., Any]) -> str:
    name = _callable_names.setdefault(id(function), uuid.uuid4().hex)
    # Kept, so that nothing else gets its id.
    _callables[name] = function
    return name


@dataclass(frozen=True, slots=True)
class HandWritten:
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
            **_functor_to_json(self.functor),
            "saved": list(self.saved),
            "targets": list(self.targets),
            "by_name": list(self.scalars),
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> HandWritten:
        """Rebuild it from its JSON form."""
        return HandWritten(
            _functor_from_json(data), tuple(data["saved"]), tuple(data["targets"]), tuple(data["by_name"])
        )


def _normalize_dims(dims: tuple[int, ...] | None, rank: int, name: str) -> tuple[int, ...]:
    if dims is None:
        return tuple(range(rank))
    last, prefix = max(rank, 1), f"{name}: " if name else ""
    for dim in dims:
        if not -last <= dim < last:
            expected = f"expected to be in range of [{-last}, {last - 1}]"
            raise DimError(f"{prefix}Dimension out of range ({expected}, but got {dim})")
    found = sorted(dim % last for dim in dims)
    for dim, after in itertools.pairwise(found):
        if dim == after:
            raise ShapeError(f"{prefix}dim {dim} appears multiple times in the list of dims")
    return tuple(found) if rank else ()


def _form_from_json(data: Any) -> Any:
    return tuple(map(_form_from_json, data)) if isinstance(data, list | tuple) else data


def _functor_to_json(functor: Functor) -> dict[str, Any]:
    scalars = [parameter.name for parameter in functor.scalars]
    return {"code": functor.source, "scalars": scalars, "num_outputs": functor.num_outputs}


def _functor_from_json(data: dict[str, Any]) -> Functor:
    return parse_functor(data["code"], tuple(data["scalars"]), data["num_outputs"])


def number_to_json(number: bool | int | float | complex | None) -> Any:
    """Return a number as JSON types."""
    return {"real": number.real, "imag": number.imag} if isinstance(number, complex) else number


def number_from_json(data: Any) -> Any:
    """Return the number that ``number_to_json`` wrote."""
    return complex(data["real"], data["imag"]) if isinstance(data, dict) else data
