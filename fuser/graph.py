"""The IR: a FusionGroup is an SSA DAG of functor applications.

Values are numbered: the inputs first, then the outputs of each application in order. A group says nothing about
dtypes, shapes or devices; one group serves them all.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from fuser.cxx.functor import EntryParameter, Functor, describe_call, parse_functor
from fuser.dtypes import Rank, is_representable, number_of_dtype, promote, to_floating
from fuser.eager.types import dtype_named
from fuser.errors import ArgumentError, DimError, FuserError, GroupError, ShapeError, UnsupportedError
from fuser.layout import Shape

if TYPE_CHECKING:
    import networkx

__all__ = [
    "BATCH",
    "Application",
    "Function",
    "FusionGroup",
    "GroupBuilder",
    "Input",
    "Isolation",
    "Promotion",
    "Reduction",
    "Section",
]

JSON_VERSION = 1

# Elements of a reduction that are combined as one tree; batches come in order. As torch's inner-tree order has it
# (torch/_native/ops/reductions/inner_tree_plan.py).
BATCH = 8192


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
    are combined as a balanced binary tree over their numbers, and batches in order, the identity before them all.
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
    # Whether ``finish`` takes the number of elements that were combined, as an int64_t after the accumulators.
    counts: bool = False

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

    def normalize_dims(self, rank: int) -> tuple[int, ...]:
        """Return the dimensions, ascending, for tensors of a rank.

        Raises:
            DimError: a dimension is out of range. ShapeError: it is there twice.
        """
        return _normalize_dims(self.dims, rank, self.combine.entry)

    def reduce_shape(self, shape: Shape) -> Shape:
        """Return the shape of the results, from that of what is reduced; raises as ``normalize_dims``."""
        dims = self.normalize_dims(len(shape))
        if self.keepdim:
            return tuple(1 if dim in dims else size for dim, size in enumerate(shape))
        return tuple(size for dim, size in enumerate(shape) if dim not in dims)

    def remaining_dims(self, rank: int) -> int:
        """Return how many dimensions the results have, for tensors of a rank."""
        return rank if self.keepdim else 0 if self.dims is None else max(rank - len(self.dims), 0)

    def to_json(self) -> dict[str, Any]:
        """Return what from_json needs."""
        return {
            "combine": _functor_to_json(self.combine),
            "identity": [_number_to_json(number) for number in self.identity],
            "finish": self.finish and _functor_to_json(self.finish),
            "dims": None if self.dims is None else list(self.dims),
            "keepdim": self.keepdim,
            "counts": self.counts,
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> Reduction:
        """Rebuild it from its JSON form."""
        return Reduction(
            _functor_from_json(data["combine"]),
            tuple(_number_from_json(number) for number in data["identity"]),
            data["finish"] and _functor_from_json(data["finish"]),
            None if data["dims"] is None else tuple(data["dims"]),
            data["keepdim"],
            data["counts"],
        )


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
    # Of the op "index": the dimensions along which elements are numbered, row-major; as in Reduction.
    dims: tuple[int, ...] | None = None

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
        return (self.functor, self.reduction.combine, *([self.reduction.finish] if self.reduction.finish else []))

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
    def is_index(self) -> bool:
        """Whether it numbers elements: it takes the shape of its tensors, and nothing else of them."""
        return self.op == "index"

    def index_dims(self, rank: int) -> tuple[int, ...]:
        """Return the dimensions along which an index counts, ascending; raises as ``Reduction.normalize_dims``."""
        return _normalize_dims(self.dims, rank, self.name)

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


@dataclass(frozen=True, slots=True)
class Input:
    """One input of a group."""

    name: str
    # False: bound to a tensor, a 0-dim CPU tensor or a Python number, and takes part in promotion.
    # True: bound to a Python number that reaches the functor as a named scalar and has no say in dtypes.
    is_scalar: bool = False
    # Value of a number that was a constant where the group comes from. It still is a run-time argument: groups that
    # differ only in it share their kernels.
    default: bool | int | float | complex | None = None


@dataclass(frozen=True, slots=True)
class Application:
    """One functor applied to values."""

    function: Function
    # Values bound to the functor's tensor parameters, in order.
    tensors: tuple[int, ...]
    # Values (scalar inputs) bound to the functor's scalar parameters, in order.
    scalars: tuple[int, ...] = ()
    name: str = ""


@dataclass(frozen=True, slots=True)
class FusionGroup:
    """A DAG of functor applications that becomes one kernel. Build one with ``GroupBuilder``."""

    inputs: tuple[Input, ...]
    applications: tuple[Application, ...]
    # Values returned, in order.
    outputs: tuple[int, ...]
    _key: list[int] = field(default_factory=list, compare=False, repr=False)

    @property
    def key(self) -> int:
        """Hash (63 bits): equal for groups that differ only in names, dead code or order of writing."""
        if not self._key:
            text = json.dumps(self.canonical().to_dict(), sort_keys=True) + repr(self.defaults())
            self._key.append(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1)
        return self._key[0]

    def defaults(self) -> tuple[bool | int | float | complex | None, ...]:
        """Return the default of each input, None where there is none."""
        return tuple(item.default for item in self.inputs)

    def fill_inputs(self, inputs: Sequence[Any]) -> list[Any]:
        """Return one value per input: the given ones, then the defaults of the rest.

        Raises:
            ArgumentError: too many or too few.
        """
        values = [*inputs, *self.defaults()[len(inputs) :]]
        missing = [item.name for item, value in zip(self.inputs, values, strict=False) if value is None]
        if len(values) > len(self.inputs) or missing:
            names = ", ".join(item.name for item in self.inputs)
            raise ArgumentError(f"the group takes {len(self.inputs)} inputs ({names}), got {len(inputs)}")
        return values

    @property
    def has_reduction(self) -> bool:
        """Whether the outputs depend on the elements of a reduction."""
        return any(self.applications[index].function.reduction for index in self.live_applications())

    def value_offsets(self) -> tuple[int, ...]:
        """Return the number of each application's first output."""
        offsets, value = [], len(self.inputs)
        for application in self.applications:
            offsets.append(value)
            value += application.function.num_outputs
        return tuple(offsets)

    def producers(self) -> tuple[int, ...]:
        """Return for each value the index of the application that makes it, -1 for inputs."""
        made = [-1] * len(self.inputs)
        for index, application in enumerate(self.applications):
            made += [index] * application.function.num_outputs
        return tuple(made)

    def lint(self) -> None:
        """Check the rules of the IR.

        Raises:
            GroupError: a value is used before it is made, a scalar and a tensor are mixed up, the number of tensors,
                scalars or out_dtypes does not fit the functor, or an output is no application's value.
        """
        if not self.outputs:
            raise GroupError("a group needs an output")
        known = len(self.inputs)
        for index, application in enumerate(self.applications):
            where = f"application {index} ({application.function.name})"
            self._lint_application(application, where, known)
            known += application.function.num_outputs
        for output in self.outputs:
            if not len(self.inputs) <= output < known:
                raise GroupError(f"output value {output} is made by no application")

    def canonical(self) -> FusionGroup:
        """Return the same computation in one fixed form.

        Applications come depth first from the outputs, equal ones are merged (functors are pure), unused ones are
        gone, names are numbers, and constants are forgotten. Inputs and outputs keep their positions.
        """
        producers, offsets = self.producers(), self.value_offsets()
        builder = GroupBuilder()
        renamed = {
            value: builder.add_input(f"in{value}", is_scalar=item.is_scalar) for value, item in enumerate(self.inputs)
        }
        merged: dict[tuple[Function, tuple[int, ...], tuple[int, ...]], tuple[int, ...]] = {}
        for index in self._applications_from_outputs():
            application = self.applications[index]
            tensors = tuple(renamed[value] for value in application.tensors)
            scalars = tuple(renamed[value] for value in application.scalars)
            signature = (application.function, tensors, scalars)
            if signature not in merged:
                merged[signature] = builder.apply(application.function, tensors, scalars)
            for slot, value in enumerate(merged[signature]):
                renamed[offsets[index] + slot] = value
        assert all(producers[value] >= 0 for value in self.outputs), "lint() holds"
        return builder.build([renamed[value] for value in self.outputs])

    def select_outputs(self, slots: Sequence[int]) -> FusionGroup:
        """Return the canonical group that makes only the outputs at ``slots``; inputs keep their positions."""
        return replace(self, outputs=tuple(self.outputs[slot] for slot in slots), _key=[]).canonical()

    def section(self, indices: Collection[int]) -> Section:
        """Return some applications, in order, as a group: it takes what they read and makes what others need."""
        inside = [self.applications[index] for index in indices]
        own = [value for value, maker in enumerate(self.producers()) if maker in indices]
        read = sorted({value for item in inside for value in (*item.tensors, *item.scalars)} - {*own})
        others = (item for index, item in enumerate(self.applications) if index not in indices)
        read_later = {value for item in others for value in item.tensors} - {*self.outputs}
        made = [value for value in self.outputs if value in own] + [value for value in own if value in read_later]
        slot = {value: index for index, value in enumerate([*read, *own])}
        group = FusionGroup(
            tuple(self.inputs[value] if value < len(self.inputs) else Input(f"v{value}") for value in read),
            tuple(
                replace(
                    item,
                    tensors=tuple(slot[value] for value in item.tensors),
                    scalars=tuple(slot[value] for value in item.scalars),
                )
                for item in inside
            ),
            tuple(slot[value] for value in made),
        )
        return Section(group, tuple(read), tuple(made))

    def widen(self, ops: Collection[str]) -> FusionGroup:
        """Return the group whose applications of ``ops`` compute half and bfloat16 in float32, as autocast has it."""
        applications = [
            replace(item, function=replace(item.function, promotion=item.function.promotion.wide))
            if item.function.op in ops
            else item
            for item in self.applications
        ]
        return replace(self, applications=tuple(applications), _key=[])

    def live_applications(self) -> tuple[int, ...]:
        """Return the applications whose elements the outputs depend on, in order: an index needs shapes alone."""
        offsets, needed, live = self.value_offsets(), set(self.outputs), list[int]()
        for index in reversed(range(len(self.applications))):
            item = self.applications[index]
            if not needed.isdisjoint(range(offsets[index], offsets[index] + item.function.num_outputs)):
                live.insert(0, index)
                needed.update(() if item.function.is_index else (*item.tensors, *item.scalars))
        return tuple(live)

    def used_inputs(self) -> tuple[int, ...]:
        """Return the inputs whose elements the outputs depend on, in order."""
        live = [self.applications[index] for index in self.live_applications()]
        used = {value for item in live if not item.function.is_index for value in (*item.tensors, *item.scalars)}
        return tuple(value for value in range(len(self.inputs)) if value in used)

    def index_values(self) -> tuple[int, ...]:
        """Return the values that are indices of elements and that the outputs depend on."""
        offsets, applications = self.value_offsets(), self.applications
        return tuple(offsets[index] for index in self.live_applications() if applications[index].function.is_index)

    def names(self) -> list[str]:
        """Return what the applications are called, for people: an index is part of what takes it."""
        names = [item.function.name for item in self.applications if not item.function.is_index]
        return names or [item.function.name for item in self.applications]

    def to_dict(self) -> dict[str, Any]:
        """Return the group as JSON types."""
        functions: list[dict[str, Any]] = []
        applications = []
        for item in self.applications:
            function = item.function.to_json()
            if function not in functions:
                functions.append(function)
            applied = {"function": functions.index(function), "tensors": list(item.tensors)}
            further = {"scalars": list(item.scalars), "name": item.name}
            applications.append(applied | {name: value for name, value in further.items() if value})
        return {
            "version": JSON_VERSION,
            "functions": functions,
            "inputs": [
                {"name": item.name}
                | ({"is_scalar": True} if item.is_scalar else {})
                | ({} if item.default is None else {"default": _number_to_json(item.default)})
                for item in self.inputs
            ],
            "applications": applications,
            "outputs": list(self.outputs),
        }

    def to_json(self, indent: int | None = 1) -> str:
        """Return the group as a JSON text; None for ``indent`` makes it as short as it can be.

        A Python function that a functor has as its fallback is known to this process alone.
        """
        return json.dumps(self.to_dict(), indent=indent, separators=(",", ":") if indent is None else None)

    @staticmethod
    def from_json(text: str) -> FusionGroup:
        """Rebuild a group from ``to_json``; raises GroupError for any other text or a group that fails lint."""
        try:
            data = json.loads(text)
            if data["version"] != JSON_VERSION:
                raise GroupError(f"JSON of version {data['version']!r}; this fuser reads version {JSON_VERSION}")
            group = _group_from_json(data)
        except FuserError:
            raise
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            raise GroupError(f"this is no JSON of a fusion group: {type(error).__name__}: {error}") from error
        group.lint()
        return group

    def to_networkx(self) -> networkx.MultiDiGraph[Any]:
        """Return the DAG as a networkx graph.

        Nodes are ``("input", i)``, ``("application", i)`` and ``("output", i)``; each edge has the ``value`` it
        carries and, into an application, the ``parameter`` it binds.
        """
        import networkx  # noqa: PLC0415 - takes longer to import than the rest of fuser

        view: networkx.MultiDiGraph[Any] = networkx.MultiDiGraph()
        source: list[tuple[str, int]] = []
        for index, item in enumerate(self.inputs):
            view.add_node(("input", index), label=item.name, is_scalar=item.is_scalar)
            source.append(("input", index))
        for index, application in enumerate(self.applications):
            node = ("application", index)
            view.add_node(node, label=application.function.name, application=application)
            tensors = zip(
                application.tensors, application.function.tensor_parameters(len(application.tensors)), strict=True
            )
            for value, parameter in (*tensors, *zip(application.scalars, application.function.scalars, strict=True)):
                view.add_edge(source[value], node, value=value, parameter=parameter.name)
            source += [node] * application.function.num_outputs
        for index, value in enumerate(self.outputs):
            view.add_node(("output", index), label=f"out{index}")
            view.add_edge(source[value], ("output", index), value=value)
        return view

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the key, which other processes may make of something else.
        return FusionGroup, (self.inputs, self.applications, self.outputs)

    def __str__(self) -> str:
        """One line per application: ``v3 = axpy(v0, v1, alpha=v2)``."""
        offsets = self.value_offsets()
        head = ", ".join(f"v{value}: {item.name}" for value, item in enumerate(self.inputs))
        lines = [f"group({head}):"]
        for offset, item in zip(offsets, self.applications, strict=True):
            made = ", ".join(f"v{offset + slot}" for slot in range(item.function.num_outputs))
            lines.append(f"  {made} = {describe_application(item)}")
        return "\n".join([*lines, f"  return {', '.join(f'v{value}' for value in self.outputs)}"])

    def _applications_from_outputs(self) -> list[int]:
        # Depth first without recursion: groups can be deep.
        producers, order, seen = self.producers(), [], set[int]()
        stack = [(producers[value], False) for value in reversed(self.outputs)]
        while stack:
            index, done = stack.pop()
            if done:
                order.append(index)
            elif index >= 0 and index not in seen:
                seen.add(index)
                stack.append((index, True))
                stack += [(producers[value], False) for value in reversed(self.applications[index].tensors)]
        return order

    def _lint_application(self, application: Application, where: str, known: int) -> None:
        function, functor = application.function, application.function.functor
        if not application.tensors:
            raise GroupError(f"{where}: needs a tensor")
        if not function.accepts(len(application.tensors)):
            raise GroupError(f"{where}: {functor.signature()} got {len(application.tensors)} tensors")
        if len(application.scalars) != len(function.scalars):
            raise GroupError(f"{where}: {functor.signature()} got {len(application.scalars)} scalars")
        if function.out_dtypes and len(function.out_dtypes) != function.num_outputs:
            raise GroupError(f"{where}: {len(function.out_dtypes)} out_dtypes for {function.num_outputs} outputs")
        if function.reduction is not None:
            _lint_reduction(function, function.reduction, where)
        if function.dims is not None and not function.is_index:
            raise GroupError(f"{where}: only an index has dims of its own")
        for value in (*application.tensors, *application.scalars):
            if not 0 <= value < known:
                raise GroupError(f"{where}: value {value} is used before it is made")
        for value in application.tensors:
            if value < len(self.inputs) and self.inputs[value].is_scalar:
                raise GroupError(f"{where}: scalar input {self.inputs[value].name!r} is used as a tensor")
        for value in application.scalars:
            if value >= len(self.inputs) or not self.inputs[value].is_scalar:
                raise GroupError(f"{where}: value {value} is used as a scalar and is no scalar input")


@dataclass(frozen=True, slots=True)
class Section:
    """Consecutive applications of a group, as a group of their own."""

    group: FusionGroup
    # Values of the whole group that are its inputs and its outputs, in order.
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def _lint_reduction(function: Function, reduction: Reduction, where: str) -> None:
    count = len(reduction.identity)
    if reduction.combine.num_outputs != count or len(reduction.combine.tensors) != 2 * count:
        raise GroupError(f"{where}: {reduction.combine.signature()} does not combine {count} accumulators with {count}")
    if function.functor.num_outputs != count:
        raise GroupError(f"{where}: {function.functor.signature()} does not make {count} accumulators")
    if reduction.finish is not None and len(reduction.finish.tensors) != count + reduction.counts:
        raise GroupError(f"{where}: {reduction.finish.signature()} does not take {count} accumulators")


def _normalize_dims(dims: tuple[int, ...] | None, rank: int, name: str) -> tuple[int, ...]:
    if dims is None:
        return tuple(range(rank))
    last = max(rank, 1)
    for dim in dims:
        if not -last <= dim < last:
            expected = f"expected to be in range of [{-last}, {last - 1}]"
            raise DimError(f"{name}: Dimension out of range ({expected}, but got {dim})")
    found = sorted(dim % last for dim in dims)
    for dim, after in itertools.pairwise(found):
        if dim == after:
            raise ShapeError(f"{name}: dim {dim} appears multiple times in the list of dims")
    return tuple(found) if rank else ()


def describe_application(application: Application) -> str:
    """Return ``axpy(v0, v1, alpha=v2)``."""
    scalars = zip(application.function.scalars, application.scalars, strict=True)
    arguments = [f"v{value}" for value in application.tensors]
    arguments += [f"{parameter.name}=v{value}" for parameter, value in scalars]
    reduction = application.function.reduction
    if reduction is not None:
        arguments += [f"dim={'all' if reduction.dims is None else list(reduction.dims)}"]
        arguments += ["keepdim"] * reduction.keepdim
    if application.function.dims is not None:
        arguments += [f"dim={list(application.function.dims)}"]
    return f"{application.function.name}({', '.join(arguments)})"


def _functor_to_json(functor: Functor) -> dict[str, Any]:
    scalars = [parameter.name for parameter in functor.scalars]
    return {"code": functor.source, "scalars": scalars, "num_outputs": functor.num_outputs}


def _functor_from_json(data: dict[str, Any]) -> Functor:
    return parse_functor(data["code"], tuple(data["scalars"]), data["num_outputs"])


def _number_to_json(number: bool | int | float | complex | None) -> Any:
    return {"real": number.real, "imag": number.imag} if isinstance(number, complex) else number


def _group_from_json(data: dict[str, Any]) -> FusionGroup:
    functions = [Function.from_json(item) for item in data["functions"]]
    return FusionGroup(
        inputs=tuple(
            Input(item["name"], item.get("is_scalar", False), _number_from_json(item.get("default")))
            for item in data["inputs"]
        ),
        applications=tuple(
            Application(
                functions[item["function"]],
                tuple(item["tensors"]),
                tuple(item.get("scalars", ())),
                item.get("name", ""),
            )
            for item in data["applications"]
        ),
        outputs=tuple(data["outputs"]),
    )


def _number_from_json(data: Any) -> Any:
    return complex(data["real"], data["imag"]) if isinstance(data, dict) else data


class GroupBuilder:
    """Builds a FusionGroup: add inputs and applications in any order, then ``build``.

    Handles it returns are opaque until ``build`` numbers the values.
    """

    def __init__(self) -> None:
        # Handle -> None for an input, (application, slot) for an application's output.
        self._handles: list[tuple[int, int] | None] = []
        self._inputs: list[Input] = []
        self._applications: list[Application] = []

    def add_input(
        self, name: str, *, is_scalar: bool = False, default: bool | int | float | complex | None = None
    ) -> int:
        """Add an input; return its handle. In the group, inputs with a default come last."""
        self._inputs.append(Input(name, is_scalar, default))
        self._handles.append(None)
        return len(self._handles) - 1

    def apply(
        self, function: Function, tensors: Sequence[int], scalars: Sequence[int] = (), name: str = ""
    ) -> tuple[int, ...]:
        """Apply a function to handles; return one handle per output."""
        self._applications.append(Application(function, tuple(tensors), tuple(scalars), name))
        first = len(self._handles)
        index = len(self._applications) - 1
        self._handles += [(index, slot) for slot in range(function.num_outputs)]
        return tuple(range(first, len(self._handles)))

    def build(self, outputs: Sequence[int]) -> FusionGroup:
        """Return the group that returns the given handles."""
        inputs = [handle for handle, made in enumerate(self._handles) if made is None]
        own = dict(zip(inputs, self._inputs, strict=True))
        inputs.sort(key=lambda handle: own[handle].default is not None)
        made = [handle for handle, made in enumerate(self._handles) if made is not None]
        values = {handle: value for value, handle in enumerate(inputs + made)}
        unknown = [handle for handle in outputs if handle not in values]
        if unknown:
            raise GroupError(f"the builder made no handle {unknown[0]}")
        applications = tuple(
            replace(
                item,
                tensors=tuple(values[handle] for handle in item.tensors),
                scalars=tuple(values[handle] for handle in item.scalars),
            )
            for item in self._applications
        )
        return FusionGroup(
            tuple(own[handle] for handle in inputs), applications, tuple(values[handle] for handle in outputs)
        )
