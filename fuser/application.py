"""What a group is made of: its inputs, and functions applied to values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fuser.combining import Reduction, number_from_json, number_to_json
from fuser.errors import GroupError
from fuser.fields import check_fields
from fuser.function import Function

__all__ = ["Application", "Input"]


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

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON types."""
        further = {"is_scalar": True} if self.is_scalar else {}
        return (
            {"name": self.name} | further | ({} if self.default is None else {"default": number_to_json(self.default)})
        )

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Input:
        """Rebuild it from ``to_dict``.

        Raises:
            GroupError: a part of it is of a wrong kind.
        """
        made = Input(data["name"], data.get("is_scalar", False), number_from_json(data.get("default")))
        check_fields(made)
        return made


@dataclass(frozen=True, slots=True, repr=False)
class Application:
    """One functor applied to values."""

    function: Function
    # Values bound to the functor's tensor parameters, in order.
    tensors: tuple[int, ...]
    # Values (scalar inputs) bound to the functor's scalar parameters, in order.
    scalars: tuple[int, ...] = ()
    name: str = ""

    @property
    def reads_no_elements(self) -> bool:
        """Whether it takes shape, dtype and device of its tensors, and nothing else of them: no gradient passes."""
        return self.function.is_index or self.function.op in {"arange", "full"}

    def __str__(self) -> str:
        """Such as ``axpy(v0, v1, alpha=v2)``."""
        scalars = zip(self.function.scalars, self.scalars, strict=False)
        arguments = [f"v{value}" for value in self.tensors]
        arguments += [f"{parameter.name}=v{value}" for parameter, value in scalars]
        reduction = self.function.reduction
        if reduction is not None:
            arguments += [f"dim={'all' if reduction.dims is None else list(reduction.dims)}"]
            arguments += ["keepdim"] * reduction.keepdim + [f"pieces={reduction.pieces}"] * bool(reduction.pieces)
        if self.function.dims is not None:
            arguments += [f"dim={list(self.function.dims)}"]
        return f"{self.function.name}({', '.join(arguments)})"

    def __repr__(self) -> str:
        return f"<fuser.Application {self}>"

    def to_dict(self, function: int) -> dict[str, Any]:
        """Return it as JSON types; ``function`` is the index of its function."""
        further = {"scalars": list(self.scalars), "name": self.name}
        kept = {name: value for name, value in further.items() if value}
        return {"function": function, "tensors": list(self.tensors)} | kept

    @staticmethod
    def from_dict(data: dict[str, Any], functions: Sequence[Function]) -> Application:
        """Rebuild it from ``to_dict``, of the functions that its index is among."""
        scalars, name = tuple(data.get("scalars", ())), data.get("name", "")
        return Application(functions[data["function"]], tuple(data["tensors"]), scalars, name)

    def lint(self, where: str, inputs: Sequence[Input], known: int) -> None:
        """Check what it is applied to, in a group with these inputs of which so many values are made before it.

        Raises:
            GroupError: see ``FusionGroup.lint``; says ``where``.
        """
        function, functor = self.function, self.function.functor
        if not self.tensors:
            raise GroupError(f"{where}: needs a tensor")
        if not function.accepts(len(self.tensors)):
            raise GroupError(f"{where}: {functor.signature()} got {len(self.tensors)} tensors")
        if len(self.scalars) != len(function.scalars):
            raise GroupError(f"{where}: {functor.signature()} got {len(self.scalars)} scalars")
        if function.out_dtypes and len(function.out_dtypes) != function.num_outputs:
            raise GroupError(f"{where}: {len(function.out_dtypes)} out_dtypes for {function.num_outputs} outputs")
        if function.reduction is not None:
            _lint_reduction(function, function.reduction, where)
        if function.is_view and (function.dims is None or function.num_outputs > 1 or len(self.tensors) > 1):
            raise GroupError(f"{where}: a view takes one tensor, and has dims")
        if function.dims is not None and not (function.is_index or function.is_view):
            raise GroupError(f"{where}: only an index or a view has dims of its own")
        for value in (*self.tensors, *self.scalars):
            if not 0 <= value < known:
                raise GroupError(f"{where}: value {value} is used before it is made")
        for value in self.tensors:
            if value < len(inputs) and inputs[value].is_scalar:
                raise GroupError(f"{where}: scalar input {inputs[value].name!r} is used as a tensor")
        for value in self.scalars:
            if value >= len(inputs) or not inputs[value].is_scalar:
                raise GroupError(f"{where}: value {value} is used as a scalar and is no scalar input")


def _lint_reduction(function: Function, reduction: Reduction, where: str) -> None:
    count = len(reduction.identity)
    if reduction.combine.num_outputs != count or len(reduction.combine.tensors) != 2 * count:
        raise GroupError(f"{where}: {reduction.combine.signature()} does not combine {count} accumulators with {count}")
    if function.functor.num_outputs != count:
        raise GroupError(f"{where}: {function.functor.signature()} does not make {count} accumulators")
    counts = (1, 2) if reduction.counts else (0,)
    if reduction.finish is not None and len(reduction.finish.tensors) - count not in counts:
        raise GroupError(f"{where}: {reduction.finish.signature()} does not take {count} accumulators")
    add = reduction.accumulate
    if add is not None and (add.num_outputs, len(add.tensors)) != (count, count + len(function.functor.tensors)):
        raise GroupError(f"{where}: {add.signature()} does not add an element to {count} accumulators")
