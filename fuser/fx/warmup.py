"""``fuser.warmup``: for any function, and for what torch.compile made, which is called for that."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from fuser.errors import ArgumentError, describe_type, shows_users_frames
from fuser.fx.fused_module import FusedModule
from fuser.fx.trace import FusedFunction
from fuser.jit_function import JitFunction
from fuser.reduction import ReductionFunction
from fuser.warming.dims import Dim, Sample, map_samples, stretch
from fuser.warming.graphs import Ranges, following_graphs
from fuser.warming.symbolic import meta_device, names_by_position, read_arguments, results_with_grad, warm_up

__all__ = ["warmup"]

# Of one compiled function; Dynamo compiles no more by itself.
MAX_GRAPHS = 64
# Sizes of one Dim that have a graph of their own; of more all have.
MAX_ALONE = 4


@shows_users_frames
def warmup(
    function: Callable[..., Any], /, *args: Any, dynamic_shapes: Any = None, backward: bool = False, **kwargs: Any
) -> None:
    """Compile the kernels that calls of a function need.

    Nothing is launched, but of what torch.compile made: that is called, a few times, with zeros in place of meta
    tensors, since its graphs are made by calls.

    Args:
        function: a functor, reduction, fused function or module, what torch.compile made with ``backend="fuser"``, or
            a function that calls any of those.
        *args: arguments of a call: real, fake or meta tensors, which stand for tensors on the GPU, or on the CPU
            without one; and anything else that the function takes.
        dynamic_shapes: the sizes that calls differ in, as ``torch.export`` takes them: for arguments by name, or in
            order, a ``Dim`` for dimensions. All kernels are compiled that calls within their bounds need,
            but for those of sizes that depend on elements (``x[mask]``).
        backward: whether to prepare gradients, too, by all tensors that require them.
        **kwargs: those by name.

    Raises:
        ArgumentError: ``dynamic_shapes`` does not fit. Else as calls.
    """
    if isinstance(function, FusedFunction | FusedModule | JitFunction | ReductionFunction):
        function.warmup(*args, dynamic_shapes=dynamic_shapes, backward=backward, **kwargs)
        return
    if not callable(function):
        raise ArgumentError(f"warmup takes a function that calls functors, got {describe_type(function)}")
    is_compiled = hasattr(function, "_torchdynamo_orig_callable")
    original: Any = getattr(function, "_orig_mod", function)
    names = _names_of(original.forward if isinstance(original, torch.nn.Module) else original)
    if is_compiled:
        _warm_up_compiled(function, *read_arguments(args, kwargs, names, dynamic_shapes), backward=backward)
        return
    parameters = original.parameters() if isinstance(original, torch.nn.Module) else ()
    warm_up(
        function,
        args,
        kwargs,
        names=names,
        dynamic_shapes=dynamic_shapes,
        backward=backward,
        parameters=parameters,
    )


def _names_of(function: Callable[..., Any]) -> list[str]:
    plain: Any = inspect.unwrap(function)
    if isinstance(plain, JitFunction):
        # Its text has names for what it takes.
        return [*plain.tensor_names]
    try:
        # Not that of what lies below a method's wrappers, which takes its instance, too.
        return names_by_position(inspect.signature(function).parameters.values())
    except ValueError:
        raise ArgumentError(
            f"warmup takes a function that calls functors, got {plain!r}, which is not Python's"
        ) from None


# --- what torch.compile made -----------------------------------------------------------------------------------------
def _warm_up_compiled(
    function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], dims: Mapping[str, Dim], *, backward: bool
) -> None:
    others = _other_sizes(args, kwargs)
    # A graph may be for some of the sizes: torch, and the function, may ask how large they are. Others begin beside it.
    rest, called, alone = [*_sizes_of_graphs(dims, others)], list[dict[str, int]](), list[str]()
    while rest and len(called) < MAX_GRAPHS:
        sizes = rest.pop(0)
        if sizes in called:
            continue
        called.append(sizes)
        limits = {size: (max(dims[name].min, 2), dims[name].max) for name, size in sizes.items() if size > 1}
        with following_graphs(limits) as found, torch.enable_grad() if backward else nullcontext():
            made = function(*map_samples(args, _maker(sizes)), **map_samples(kwargs, _maker(sizes)))
        for name, size in sizes.items():
            is_alone = size in limits and dims[name].min < dims[name].max and not any(size in item for item in found)
            if found and is_alone:
                found.append({size: (size, size)})
                alone.append(name)
            if alone.count(name) > MAX_ALONE:
                raise ArgumentError(
                    f"dynamic_shapes: torch.compile makes a graph for each {name} alone, since the function or torch "
                    "asks for its number: call it for each size instead"
                )
        rest += _sizes_beside(sizes, dims, others, found)
        if backward:
            results_with_grad(made)


def _other_sizes(args: list[Any], kwargs: dict[str, Any]) -> set[int]:
    # Those that no Dim is of.
    found = set[int]()

    def note(sample: Sample) -> torch.Tensor:
        found.update(size for axis, size in enumerate(sample.tensor.shape) if axis not in sample.dims)
        return sample.tensor

    map_samples(args, note), map_samples(kwargs, note)
    return found


def _sizes_of_graphs(dims: Mapping[str, Dim], others: Collection[int]) -> Iterator[dict[str, int]]:
    # Dynamo has graphs of their own for sizes 0 and 1, and takes what is equal for one size.
    choices, taken = list[list[int]](), {*others}
    for dim in dims.values():
        small = [size for size in (0, 1) if dim.min <= size <= dim.max]
        first = max(dim.min, 2)
        apart = next((size for size in range(min(first + 3, dim.max), dim.max + 1) if size not in taken), dim.max)
        taken.add(apart)
        choices.append(([apart] if first <= dim.max else []) + small)
    for chosen in itertools.product(*choices):
        yield dict(zip(dims, chosen, strict=True))


def _sizes_beside(
    sizes: Mapping[str, int], dims: Mapping[str, Dim], others: Collection[int], found: Sequence[Ranges]
) -> Iterator[dict[str, int]]:
    taken = {*others, *sizes.values()}
    for name, size in sizes.items():
        least, most = max(dims[name].min, 2), dims[name].max
        for low, high in (ranges[size] for ranges in found if size in ranges):
            for beyond in (range(min(low, most + 1) - 1, least - 1, -1), range(max(high, least - 1) + 1, most + 1)):
                other = next((item for item in beyond if item not in taken), None)
                if other is not None:
                    yield {**sizes, name: other}


def _maker(sizes: Mapping[str, int]) -> Callable[[Sample], torch.Tensor]:
    def make(sample: Sample) -> torch.Tensor:
        shape = sample.sizes(sizes)
        made = sample.tensor.detach()
        if made.is_meta or shape != tuple(made.shape):
            device = meta_device() if made.is_meta else made.device
            made = torch.empty_strided(shape, stretch(made, shape), dtype=made.dtype, device=device).zero_()
        made = made.requires_grad_(sample.tensor.requires_grad)
        for axis, dim in sample.dims.items():
            if sizes[dim.name] > 1 and dim.min < dim.max:
                # If it can be: where it cannot, each size has a graph of its own, as in calls.
                torch._dynamo.maybe_mark_dynamic(made, axis)
        return made

    return make
