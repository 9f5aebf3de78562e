"""A functor for given types in eager torch: one graph of ATen operations, or the interpreter where data decides."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from fuser.config import config
from fuser.cxx.functor import Functor
from fuser.cxx.statements import Program
from fuser.cxx.syntax import parse_program
from fuser.dtypes import dtype_info, number_dtype
from fuser.eager.call_expressions import BESIDE_NUMBERS
from fuser.eager.data import (
    PLACE,
    WHOLE_FUNCTIONS,
    Data,
    NeedsValuesError,
    Value,
    constant,
    emit,
    is_number,
    storage_dtype,
)
from fuser.eager.interpreter import interpret
from fuser.eager.math import functions
from fuser.eager.promotion import convert
from fuser.eager.storage import NoTranslation, SubstitutionError
from fuser.errors import UntranslatableError

__all__ = ["Translation", "as_stored", "cast", "restore", "simplify", "translate"]

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, eq=False)
class Translation:
    """A functor for given types.

    Unsigned integers of 16 bits and more are int64 inside the graph (see Note [Unsigned integers] in data.py).
    """

    functor: Functor
    # The functor's T.
    compute: torch.dtype
    # C++ type of each argument: the entry's parameters in order, without the outputs.
    types: tuple[torch.dtype, ...]
    is_differentiable: bool
    # None where control flow depends on data, and where the graph would be too large.
    graph_module: fx.GraphModule | None
    # C++ type of each output; with a graph.
    output_types: tuple[torch.dtype, ...]
    # Why there is no graph.
    data_dependent: str | None

    def run(self, *arguments: Any) -> tuple[torch.Tensor, ...]:
        """Compute the functor's outputs.

        Args:
            *arguments: tensors of ``types``, in any shapes that broadcast, or Python numbers.

        Returns:
            One tensor per output, of the type that the functor gives it. Its shape is that of the arguments it
            depends on.

        Raises:
            UntranslatableError: as ``translate``, for what is found only when data decides.
            RecursionError: the functor calls itself too often.
        """
        if self.graph_module is not None:
            given = [as_stored(item, kind) for item, kind in zip(arguments, self.types, strict=True)]
            is_batched = any(isinstance(item, torch.Tensor) and _is_batched(item) for item in given)
            run = _OnBatches(self.graph_module).run if is_batched else self.graph_module
            return tuple(map(restore, run(*given), self.output_types))
        return self.interpret(*arguments)

    def interpret(self, *arguments: Any) -> tuple[torch.Tensor, ...]:
        """As ``run``, by the interpreter."""
        values = [
            constant(item, kind) if is_number(item) else Value(kind, as_stored(item, kind))
            for item, kind in zip(arguments, self.types, strict=True)
        ]
        device = next(item.device for item in arguments if isinstance(item, torch.Tensor))
        results = _interpret(self.functor, None, self.compute, values, is_differentiable=self.is_differentiable)
        return tuple(restore(_tensor(value, device), value.dtype) for value in results)


class _OnBatches(fx.Interpreter):
    """Runs a graph on batches of ``torch.autograd.grad(is_grads_batched=True)``, for which torch has no ``detach``."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is aten.detach.default and _is_batched(args[0]):
            with torch.no_grad():
                return args[0].clone()
        return super().call_function(target, args, kwargs)


def _is_batched(item: torch.Tensor) -> bool:
    return torch._C._functorch.is_legacy_batchedtensor(item)


def translate(
    functor: Functor, compute: torch.dtype, types: tuple[torch.dtype, ...], *, differentiable: bool = False
) -> Translation:
    """Translate a functor.

    Args:
        functor: a parsed functor text.
        compute: the type its first template parameter stands for.
        types: C++ type of each argument: the entry's parameters in order without the outputs, where trailing ones
            with a default may be missing.
        differentiable: keep gradients out of lanes that do not run what they would come from.

    Raises:
        FunctorError: the text does not parse.
        UntranslatableError: it holds something that has no counterpart in torch, or is nested too deeply for Python.
    """
    try:
        return _translate(functor, compute, types, differentiable, config.max_unrolled)
    except RecursionError as error:
        raise UntranslatableError(functor.source, 1, 1, "a text nested this deeply") from error


def cast(item: Any, dtype: torch.dtype, known: torch.dtype | None = None) -> Any:
    """Convert a tensor or number to a dtype as a kernel does between the types of memory and those it computes in.

    Args:
        item: a number, a tensor, or a node of a graph.
        dtype: what to.
        known: the dtype of a node.

    Returns:
        A tensor or node for one; for a number the number as a C++ type has it.
    """
    to = dtype_info(dtype)
    if is_number(item):
        return convert(constant(item, number_dtype(type(item), torch.float64)), to.compute_dtype).data
    known = known or item.dtype
    if known is dtype:
        return item
    source = dtype_info(known).compute_dtype
    item = item if known is source else emit(aten._to_copy.default, item, dtype=source)
    value = convert(Value(source, as_stored(item, source)), to.compute_dtype)
    result = restore(value.data, to.compute_dtype)
    return emit(aten._to_copy.default, result, dtype=dtype) if to.is_narrow else result


@lru_cache(maxsize=4096)
def _translate(
    functor: Functor, compute: torch.dtype, types: tuple[torch.dtype, ...], differentiable: bool, limit: int
) -> Translation:
    graph = fx.Graph()
    arguments = []
    for slot, (parameter, kind) in enumerate(zip(functor.inputs, types, strict=False)):
        # With the slot, no name of C++ is one that Python or fx keeps for itself ("lambda", "self", "torch"). C++ has
        # characters in names that Python has not: "$x", or a letter by its number.
        name = re.sub(r"\W", "_", parameter.name or "unnamed")
        node = graph.placeholder(f"{name}_{slot}")
        node.meta["dtype"] = storage_dtype(kind)
        arguments.append(Value(kind, node))
    # Derivatives want cbrt as cbrt, not as what it is made of.
    token = WHOLE_FUNCTIONS.set(differentiable)
    try:
        results = _interpret(functor, graph, compute, arguments, is_differentiable=differentiable, limit=limit)
    except NeedsValuesError as error:
        return Translation(functor, compute, types, differentiable, None, (), str(error))
    finally:
        WHOLE_FUNCTIONS.reset(token)
    outputs = tuple(value.data if isinstance(value.data, fx.Node) else _constant(graph, value) for value in results)
    graph.output(outputs)
    simplify(graph)
    graph.lint()
    module = fx.GraphModule(torch.nn.Module(), graph, functor.entry)
    kinds = tuple(value.dtype for value in results)
    return Translation(functor, compute, types, differentiable, module, kinds, None)


def _interpret(
    functor: Functor,
    graph: fx.Graph | None,
    compute: torch.dtype,
    arguments: list[Value],
    *,
    is_differentiable: bool,
    limit: int = 0,
) -> list[Value]:
    program = parse_program(functor)
    _check_externals(functor, program)
    token = PLACE.set(program.entry.place)
    try:
        return interpret(program, compute, arguments, graph, limit, is_differentiable=is_differentiable)
    except (NoTranslation, TypeError, SubstitutionError) as error:
        place = PLACE.get() or program.entry.place
        raise UntranslatableError(functor.source, *place, str(error) or "a type that does not exist") from error
    finally:
        PLACE.reset(token)


def _check_externals(functor: Functor, program: Program) -> None:
    for name, place in program.externals.items():
        if name not in BESIDE_NUMBERS and not functions.is_known(name) and not functions.is_known(f"std::{name}"):
            raise UntranslatableError(functor.source, *place, f"the function {name!r}")


def _constant(graph: fx.Graph, value: Value) -> fx.Node:
    dtype = storage_dtype(value.dtype)
    node = graph.call_function(aten.scalar_tensor.default, (value.stored,), {"dtype": dtype})
    node.meta["dtype"] = dtype
    return node


def simplify(graph: fx.Graph) -> None:
    """Make one node of equal ones, and take out those that nobody uses."""
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        key = (node.target, _key(node.args), _key(tuple(sorted(node.kwargs.items()))))
        known = seen.setdefault(key, node)
        if known is not node:
            node.replace_all_uses_with(known)
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _key(item: Any) -> Any:
    # 0.0, -0.0, 0 and False are equal in Python, and NaN is not.
    if isinstance(item, tuple | list):
        return tuple(map(_key, item))
    return item if isinstance(item, fx.Node | torch.dtype | str) else (type(item), repr(item))


def as_stored(item: Data, kind: torch.dtype) -> Data:
    """Return a number, a tensor or node of a C++ type as what ATen's operations take."""
    if is_number(item):
        return torch.scalar_tensor(constant(item, kind).stored, dtype=storage_dtype(kind))
    if kind is torch.uint64:
        return emit(aten.view.dtype, item, dtype=torch.int64)
    return emit(aten._to_copy.default, item, dtype=storage_dtype(kind)) if storage_dtype(kind) is not kind else item


def restore(item: Data, kind: torch.dtype) -> Data:
    """Return what ATen's operations made as a tensor or node of the C++ type."""
    if kind is torch.uint64:
        return emit(aten.view.dtype, item, dtype=torch.uint64)
    return emit(aten._to_copy.default, item, dtype=kind) if storage_dtype(kind) is not kind else item


def _tensor(value: Value, device: torch.device) -> torch.Tensor:
    if not value.is_constant:
        return value.data  # type: ignore[no-any-return]
    return torch.scalar_tensor(value.stored, dtype=storage_dtype(value.dtype), device=device)
