"""How a reduction combines elements: its functors, its order, its dimensions."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch

from fuser.cxx.builtin_types import dtype_named
from fuser.cxx.functor import Functor, parse_functor
from fuser.dtypes import is_representable, number_of_dtype
from fuser.errors import ArgumentError, DimError, ShapeError, UnsupportedError
from fuser.layout import Shape
from fuser.orders import ANY_ORDER

__all__ = [
    "BATCH",
    "Reduction",
    "functor_from_json",
    "functor_to_json",
    "normalize_dims",
    "number_from_json",
    "number_to_json",
]

# Elements of a reduction that are combined as one tree; batches come in order. As torch's inner-tree order has it
# (torch/_native/ops/reductions/inner_tree_plan.py).
BATCH = 8192


class Reduction(NamedTuple):
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
    # Whether it is one of torch's own, or a step of its ops: fast numerics promise no order of those.
    is_torchs: bool = False

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

    def is_free(self, *, is_strict: bool) -> bool:
        """Whether any order serves: it comes to the same in all, or fast numerics promise none."""
        return self.order in ANY_ORDER or (self.is_torchs and not is_strict)

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
        return normalize_dims(self.dims, rank, self.combine.entry if name is None else name)

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
            "combine": functor_to_json(self.combine),
            "identity": [number_to_json(number) for number in self.identity],
            "finish": self.finish and functor_to_json(self.finish),
            "dims": None if self.dims is None else list(self.dims),
            "keepdim": self.keepdim,
            "counts": self.counts,
            "order": self.order,
            "accumulate": self.accumulate and functor_to_json(self.accumulate),
        } | {name: value for name in ("pieces", "scans", "is_torchs") if (value := getattr(self, name))}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Reduction:
        """Rebuild it from its JSON form."""
        return Reduction(
            functor_from_json(data["combine"]),
            tuple(number_from_json(number) for number in data["identity"]),
            data["finish"] and functor_from_json(data["finish"]),
            None if data["dims"] is None else tuple(data["dims"]),
            data["keepdim"],
            data["counts"],
            data.get("order", ""),
            data.get("accumulate") and functor_from_json(data["accumulate"]),
            data.get("pieces", 0),
            data.get("scans", False),
            data.get("is_torchs", False),
        )


def normalize_dims(dims: tuple[int, ...] | None, rank: int, name: str) -> tuple[int, ...]:
    """Return dimensions, ascending and not negative, of ``rank`` of them; as ``Reduction.normalize_dims``."""
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


def functor_to_json(functor: Functor) -> dict[str, Any]:
    """Return what ``functor_from_json`` needs."""
    scalars = [parameter.name for parameter in functor.scalars]
    return {"code": functor.source, "scalars": scalars, "num_outputs": functor.num_outputs}


def functor_from_json(data: dict[str, Any]) -> Functor:
    """Return the functor that ``functor_to_json`` wrote."""
    return parse_functor(data["code"], tuple(data["scalars"]), data["num_outputs"])


def number_to_json(number: bool | int | float | complex | None) -> Any:
    """Return a number as JSON types."""
    return {"real": number.real, "imag": number.imag} if isinstance(number, complex) else number


def number_from_json(data: Any) -> Any:
    """Return the number that ``number_to_json`` wrote."""
    return complex(data["real"], data["imag"]) if isinstance(data, dict) else data
