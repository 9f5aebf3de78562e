"""Sizes that a warm-up is for: ``Dim``, for which dimensions it is given, and the sizes in between."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, SupportsIndex

import torch

from fuser.errors import ArgumentError, describe_type
from fuser.plain_torch import unwatched

__all__ = ["Dim", "Sample", "draw_points", "map_samples", "read_samples", "stretch"]

# Beyond so many, not every combination of sizes is looked at, but those near bounds and powers of two, and others at
# random.
MAX_POINTS = 1 << 20
NEAR = 9


@dataclass(frozen=True, slots=True)
class Dim:
    """Sizes from ``min`` to ``max`` of a dimension of calls; dimensions with one ``Dim`` (by name) have one size.

    ``torch.export.Dim`` serves as well, if it has a ``max``.
    """

    name: str
    min: int
    max: int

    def __post_init__(self) -> None:
        """Raise ArgumentError where there is no such size."""
        if not isinstance(self.name, str):
            raise ArgumentError(f"Dim: the name must be a str, got {describe_type(self.name)} ({self.name!r})")
        for name in ("min", "max"):
            bound = getattr(self, name)
            if isinstance(bound, bool) or not isinstance(bound, SupportsIndex):
                raise ArgumentError(f"Dim {self.name!r}: a bound must be an int, got {describe_type(bound)} ({bound})")
            # NumPy's integers are numbers, too.
            object.__setattr__(self, name, operator.index(bound))
        if not 0 <= self.min <= self.max:
            raise ArgumentError(f"Dim {self.name!r}: there is no size from {self.min} to {self.max}")


class Sample(NamedTuple):
    """A tensor of a call, and which of its dimensions vary."""

    tensor: torch.Tensor
    dims: Mapping[int, Dim]

    def sizes(self, chosen: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return its shape with these sizes, by names of ``Dim``, integers or symbols."""
        given = {dim: chosen[item.name] for dim, item in self.dims.items()}
        return tuple(given.get(dim, size) for dim, size in enumerate(self.tensor.shape))


def read_samples(value: Any, shapes: Any, found: dict[str, Dim], where: str) -> Any:
    """Return an argument with a Sample in place of each tensor.

    Args:
        value: a tensor, anything else, or a list, tuple or dict of those.
        shapes: as in ``torch.export``: for a tensor a dict or a sequence that gives a Dim (or None) for dimensions; for
            a container one for each item; None where nothing varies.
        found: gets each Dim by its name.
        where: which argument it is, for messages.

    Raises:
        ArgumentError: ``shapes`` does not fit, or two Dims of one name differ.
    """
    if isinstance(value, torch.Tensor):
        return Sample(value, _read_dims(value, shapes, found, where))
    if type(value) in (list, tuple):
        given = _items_of(shapes, range(len(value)), where)
        return type(value)([read_samples(x, given.get(k), found, f"{where}[{k}]") for k, x in enumerate(value)])
    if type(value) is dict:
        given = _items_of(shapes, value, where)
        return {key: read_samples(x, given.get(key), found, f"{where}[{key!r}]") for key, x in value.items()}
    if shapes is not None:
        raise ArgumentError(f"dynamic_shapes: {where} is no tensor, but {describe_type(value)}")
    return value


def _items_of(shapes: Any, keys: Any, where: str, what: str = "item") -> dict[Any, Any]:
    given = dict(enumerate(shapes)) if isinstance(shapes, list | tuple) else {} if shapes is None else shapes
    if not isinstance(given, Mapping):
        raise ArgumentError(f"dynamic_shapes: {where} takes a dict or a sequence, got {describe_type(shapes)}")
    for key in given:
        if key not in keys:
            raise ArgumentError(f"dynamic_shapes: {where} has no {what} {key!r}")
    return dict(given)


def _read_dims(tensor: torch.Tensor, shapes: Any, found: dict[str, Dim], where: str) -> dict[int, Dim]:
    dims = {}
    for key, item in _items_of(shapes, range(-tensor.dim(), tensor.dim()), where, "dimension").items():
        if item is None:
            continue
        dim = item
        if not isinstance(item, Dim):
            first, last = getattr(item, "min", None), getattr(item, "max", None)
            # A Dim of torch.export's without an upper bound has one that is no integer.
            if isinstance(item, int) or not isinstance(first, int) or not isinstance(last, int):
                name = f"{where}, dimension {key}"
                raise ArgumentError(f'dynamic_shapes: {name}: give fuser.Dim("n", 1, 4096), got {item}')
            dim = Dim(str(item.__name__), first, last)
        if found.setdefault(dim.name, dim) != dim:
            raise ArgumentError(f"dynamic_shapes: there are {found[dim.name]} and {dim}")
        dims[key % tensor.dim()] = dim
    return dims


def map_samples(value: Any, function: Callable[[Sample], Any]) -> Any:
    """Return an argument with something else in place of each Sample."""
    if isinstance(value, Sample):
        return function(value)
    if type(value) in (list, tuple):
        return type(value)([map_samples(item, function) for item in value])
    return {key: map_samples(item, function) for key, item in value.items()} if type(value) is dict else value


def stretch(tensor: torch.Tensor, sizes: Sequence[Any]) -> tuple[Any, ...]:
    """Return the strides of a tensor of another size that lies in memory as this one does: dense where it is."""
    strides: list[Any] = list(tensor.stride())
    dense: int = 1
    other: Any = 1
    for dim in sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim), -dim)):
        step, size = tensor.stride(dim), tensor.shape[dim]
        if step == dense or size == 1:
            strides[dim] = other
        if step:
            # The stride of a size of 1 says nothing of where others lie.
            dense, other = (dense if size == 1 else max(step, dense) * size), strides[dim] * sizes[dim]
    return tuple(strides)


@unwatched()
def draw_points(bounds: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return combinations of sizes, a row for each: all there are, or those that matter most and a million others."""
    if not bounds:
        return torch.zeros(1, 0, dtype=torch.int64)
    if math.prod(last - first + 1 for first, last in bounds) <= MAX_POINTS:
        return torch.cartesian_prod(*(torch.arange(first, last + 1) for first, last in bounds)).reshape(-1, len(bounds))
    generator = torch.Generator().manual_seed(0)
    columns = []
    for first, last in bounds:
        special = torch.tensor([*dict.fromkeys(_special_sizes(first, last))])
        drawn = torch.randint(first, last + 1, (MAX_POINTS,), generator=generator)
        chosen = special[torch.randint(len(special), (MAX_POINTS,), generator=generator)]
        columns.append(torch.where(torch.rand(MAX_POINTS, generator=generator) < 0.5, drawn, chosen))
    return torch.stack(columns, 1)


def _special_sizes(first: int, last: int) -> Iterator[int]:
    powers = (1 << bits for bits in range(last.bit_length() + 1))
    for size, away in itertools.product((first, last, *powers), range(-NEAR, NEAR + 1)):
        if first <= size + away <= last:
            yield size + away
