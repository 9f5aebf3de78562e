"""Warm-up of a function for ranges of sizes: it is followed on symbols, as often as its control flow asks for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch.utils import _pytree

from fuser.errors import ArgumentError, describe_type
from fuser.warming.cover import UnknownNumberError, compile_all, evaluate, find_classes, leave_out, take_first
from fuser.warming.dims import Dim, Sample, draw_points, map_samples, read_samples, stretch
from fuser.warming.follow import Follower, following, keeping_nothing

__all__ = ["meta_device", "names_by_position", "read_arguments", "results_with_grad", "warm_up"]


def names_by_position(parameters: Iterable[inspect.Parameter]) -> list[str]:
    """Return the names of what a function takes by position, as ``read_arguments`` has them."""
    ordinary = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [
        item.name if item.kind in ordinary else f"*{item.name}"
        for item in parameters
        if item.kind in (*ordinary, inspect.Parameter.VAR_POSITIONAL)
    ]


def read_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str], dynamic_shapes: Any
) -> tuple[list[Any], dict[str, Any], dict[str, Dim]]:
    """Return a call's arguments with Samples in place of tensors, and the Dims by name.

    Args:
        args: by position.
        kwargs: by name.
        names: of what is given by position; that of a parameter which takes all others has its star, and comes last.
        dynamic_shapes: by name, or by position: see ``read_samples``.

    Raises:
        ArgumentError: ``dynamic_shapes`` does not fit.
    """
    *own, rest = names if names and names[-1].startswith("*") else [*names, ""]
    others, given, rest = args[len(own) :], dynamic_shapes or {}, rest.removeprefix("*")
    known = [*own[: len(args)], *([rest] if others else []), *kwargs]
    if isinstance(given, list | tuple):
        if len(given) > len(args):
            raise ArgumentError(f"dynamic_shapes has {len(given)} items, for {len(args)} arguments by position")
        left = given[len(own) :]
        given = dict(zip(own, given, strict=False)) | ({rest: left} if left else {})
    if not isinstance(given, Mapping):
        raise ArgumentError(f"dynamic_shapes takes a dict or a sequence, got {describe_type(given)}")
    for name in given:
        if name not in known:
            raise ArgumentError(f"dynamic_shapes names {name!r}; the arguments are {', '.join(known)}")
    dims: dict[str, Dim] = {}
    by_position = [read_samples(item, given.get(name), dims, name) for item, name in zip(args, own, strict=False)]
    by_position += read_samples([*others], given.get(rest) if others else None, dims, rest)
    by_name = {name: read_samples(item, given.get(name), dims, name) for name, item in kwargs.items()}
    return by_position, by_name, dims


def warm_up(
    call: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    names: Sequence[str],
    dynamic_shapes: Any = None,
    backward: bool = False,
    parameters: Iterable[torch.Tensor] = (),
) -> None:
    """Compile what a function's calls need, launching nothing of fuser's.

    Args:
        call: the function.
        args: real, fake or meta tensors, and anything else that it takes.
        kwargs: those by name.
        names: see ``read_arguments``.
        dynamic_shapes: likewise.
        backward: whether gradients are taken, too.
        parameters: tensors by which it is differentiated beside arguments.

    Raises:
        ArgumentError: ``dynamic_shapes`` does not fit. Else as the function's calls.
    """
    by_position, by_name, dims = read_arguments(args, kwargs, names, dynamic_shapes)
    by_tensors = [item for item in parameters if item.requires_grad]
    hints = [_first_sizes([by_position, by_name], dims)]
    points = draw_points([(dim.min, dim.max) for dim in dims.values()])
    known: set[tuple[Any, ...]] = set()
    ready: set[Any] = set()
    tasks: list[Any] = []
    while hints or len(points):
        sizes = hints.pop() if hints else take_first(points, dims)
        run = _Run(dims, sizes)
        run.call(call, by_position, by_name, by_tensors, backward=backward)
        for found in run.follower.calls:
            key = (found.spec.key, str(found.inputs), str(found.out))
            if key in known:
                continue
            known.add(key)
            for one in find_classes(found):
                new = {(*text, one.inputs[0].device) for text in one.texts} - ready
                there = sizes | {run.names[symbol]: size for symbol, size in one.sizes.items()}
                if one.obstacle != found.obstacle and one.obstacle is not None:
                    # Other groups run in its place there.
                    hints.append(there)
                elif new or (one.obstacle is not None and there == sizes):
                    tasks.append((found.spec, one.inputs, one.out))
                ready |= new
        points = leave_out(points, sizes, run.ask)
    compile_all(tasks)


def results_with_grad(made: Any) -> list[torch.Tensor]:
    """Return the tensors that require grad among what a call returned.

    Raises:
        ArgumentError: there are none.
    """
    found = [item for item in _pytree.tree_leaves(made) if isinstance(item, torch.Tensor) and item.requires_grad]
    if not found:
        raise ArgumentError("backward=True, and no result requires grad: give tensors that do")
    return found


def _first_sizes(tree: Any, dims: Mapping[str, Dim]) -> dict[str, int]:
    # Those of the sample, as far as they are in bounds.
    found = {name: dim.min for name, dim in dims.items()}

    def read(sample: Sample) -> None:
        for axis, dim in sample.dims.items():
            found[dim.name] = min(max(sample.tensor.shape[axis], dim.min), dim.max)

    map_samples(tree, read)
    return found


class _Run:
    """One run of a function on symbols that stand for certain sizes."""

    def __init__(self, dims: Mapping[str, Dim], sizes: Mapping[str, int]) -> None:
        from torch._dynamo.source import ConstantSource  # noqa: PLC0415 - brings Dynamo
        from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv  # noqa: PLC0415 - brings sympy

        self.env = ShapeEnv(duck_shape=False, specialize_zero_one=False)
        self.mode = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)
        self.sizes: dict[str, Any] = {}
        # Of the Dim that each symbol is.
        self.names: dict[Any, str] = {}
        for name, dim in dims.items():
            source: Any = ConstantSource(f"fuser_{name}")
            symbol = self.env.create_symbol(
                sizes[name],
                source,
                DimDynamic.DYNAMIC,
                positive=True if dim.min else None,
                do_not_specialize_zero_one=True,
            )
            self.names[symbol] = name
            self.sizes[name] = self.env.create_symintnode(symbol, hint=sizes[name], source=source)
        self.follower = Follower({symbol: (dims[name].min, dims[name].max) for symbol, name in self.names.items()})

    def call(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        parameters: Iterable[torch.Tensor],
        *,
        backward: bool,
    ) -> None:
        """Call it, and take gradients of all that it returns: such that are dense, and those of a sum.

        What comes after something was asked of a number that depends on elements is left to calls.
        """
        from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # noqa: PLC0415 - brings sympy

        leaves = [*parameters]

        def make(sample: Sample) -> torch.Tensor:
            tensor, shape = sample.tensor, sample.sizes(self.sizes)
            device = tensor.device if not tensor.is_meta else meta_device()
            made = torch.empty_strided(shape, stretch(tensor, shape), dtype=tensor.dtype, device=device)
            leaves.extend([made.requires_grad_()] if tensor.requires_grad else [])
            return made

        with (
            suppress(GuardOnDataDependentSymNode, UnknownNumberError),
            self.mode,
            keeping_nothing(),
            following(self.follower),
            torch.autograd.set_multithreading_enabled(False),
            # Some of ATen's kernels have no symbols: each size, as of what is padded, would be followed by itself.
            enable_python_dispatcher(),
        ):
            args, kwargs = map_samples(args, make), map_samples(kwargs, make)
            if not backward:
                function(*args, **kwargs)
                return
            with torch.enable_grad():
                made = function(*args, **kwargs)
            made = results_with_grad(made)
            for gradients in ([torch.empty_like(x) for x in made], [x.new_empty(()).expand(x.shape) for x in made]):
                torch.autograd.grad(made, leaves, gradients, retain_graph=True, allow_unused=True)

    def ask(self, sizes: Mapping[str, Any]) -> None:
        """Ask of sizes what was asked on the way."""
        known = {symbol: sizes[name] for symbol, name in self.names.items()}
        for guard in self.env.guards:
            bool(evaluate(guard.expr, known))


def meta_device() -> torch.device:
    """Return where what meta tensors stand for is: on the GPU, if there is one."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
