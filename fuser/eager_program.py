"""A group in eager torch as one flat function, for inputs of certain dtypes: one line for each operation of torch's.

What ``fallback`` decides in every call (promotion, conversions, the translation of each text) is decided once here, and
constants are made once. Shapes, strides and devices are torch's business: what comes out of the first call is looked
at, and where that is not what kernels make, calls go the long way.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from fuser.application import Application
from fuser.counters import Tally
from fuser.cxx.functor import Role
from fuser.dtypes import Rank, dtype_info, fits_in_word, number_dtype
from fuser.eager.data import constant, is_number, storage_dtype, takes_tensors
from fuser.eager.promotion import convert
from fuser.eager.translation import as_stored, cast, restore, simplify, translate
from fuser.errors import UnsupportedError, UntranslatableError
from fuser.fallback import eager_version
from fuser.flat_text import write_flat
from fuser.graph import FusionGroup
from fuser.kernel_spec import InputSpec, ValueLayout, infer_typing

__all__ = ["EagerCall"]

aten = torch.ops.aten

# Operators that methods of a tensor are the shorter way to.
_METHODS: dict[Any, str] = {aten._to_copy.default: "to", aten.view.dtype: "view"}
# What "to" another dtype is called for short.
_CONVERSIONS = {
    torch.float32: "float", torch.float64: "double", torch.float16: "half", torch.bfloat16: "bfloat16",
    torch.int64: "long", torch.int32: "int", torch.bool: "bool",
}  # fmt: skip
# Whose results have no memory of their own.
_NO_MEMORY = {aten.scalar_tensor.default, aten.real.default, aten.imag.default, aten.view.dtype}


class EagerCall:
    """Calls of a group in eager torch that differ in nothing but what tensors hold and numbers are."""

    def __init__(
        self, group: FusionGroup, inputs: tuple[InputSpec, ...], outputs: Sequence[ValueLayout], device: torch.device
    ) -> None:
        """Write the program.

        Args:
            group: what is called.
            inputs: with these.
            outputs: shape and strides that kernels give the results.
            device: where these are.
        """
        self._outputs = outputs
        self._device = device
        self._bind = _write_program(group, inputs)
        # Whether the program makes what it should; None: nobody knows yet.
        self._fits: bool | None = None if self._bind else False

    def run(self, inputs: Sequence[Any]) -> list[torch.Tensor] | None:
        """Return the results, where nobody differentiates; None where the call has to go the long way."""
        made = self.bind(math.inf, Tally())(*inputs) if self._fits is not False else None
        results = made if made is None or isinstance(made, tuple) else (made,)
        if results is not None and self._fits is None:
            self._fits = self._is_as_wanted(inputs, results)
        return list(results) if results is not None and self._fits else None

    def bind(self, until: float, tally: Tally) -> Callable[..., Any]:
        """Return what replays such calls after ``run``: a function of the inputs, which gives None as ``run`` does.

        Args:
            until: when it gives None from then on, in seconds of time.monotonic().
            tally: counts the calls.
        """
        assert self._bind is not None, "run returned what it made"
        made: Callable[..., Any] = self._bind(until, tally.add)
        return made

    def _is_as_wanted(self, inputs: Sequence[Any], results: Sequence[torch.Tensor]) -> bool:
        found = [(item.shape, item.stride(), item.device) for item in results]
        known = [*inputs, *results]
        return (
            found == [(item.shape, item.strides, self._device) for item in self._outputs]
            and not any(
                torch._C._is_alias_of(item, other)  # type: ignore[attr-defined]
                for slot, item in enumerate(results)
                for other in known[: len(inputs) + slot]
                if isinstance(other, torch.Tensor)
            )
        )


@lru_cache(maxsize=1024)
def _write_program(group: FusionGroup, inputs: tuple[InputSpec, ...]) -> Callable[..., Any] | None:
    # A function of a time and of what counts, which returns the function of the inputs; None where there is none.
    if any(item.function.fallback for item in group.applications):
        # Nobody knows which dtypes the user's function makes.
        return None
    try:
        text, names = write_flat(_ProgramWriter(group, inputs).write(), is_boxed=False)
    except (UnsupportedError, UntranslatableError):
        return None
    head, *body = text.replace("\n    return ", "\n    made = ").splitlines()
    lines = [
        "def bind(until, add):",
        f"    {head}",
        "        if until < now():",
        "            return None",
        "        try:",
        *(f"        {line}" for line in body),
        # What torch refuses, such as a number that its C++ type has no place for, goes the long way.
        "        except (RuntimeError, OverflowError):",
        "            return None",
        "        add()",
        "        return made",
        "    return run",
    ]
    names |= {"__name__": __name__, "now": time.monotonic}
    exec(compile("\n".join(lines), "<fuser eager>", "exec"), names)
    bind: Callable[..., Any] = names["bind"]
    return bind


class _ProgramWriter:
    """Builds the graph of a program, in which values of the group are nodes."""

    def __init__(self, group: FusionGroup, inputs: Sequence[InputSpec]) -> None:
        self.group = group
        self.inputs = inputs
        self.typing = infer_typing(group, inputs, torch.get_default_dtype())
        self.graph = fx.Graph()
        self.values = [self.graph.placeholder(f"v{slot}") for slot in range(len(inputs))]
        self._note_dtypes()

    def write(self) -> fx.Graph:
        """Return the graph, in which constants are tensors: torch takes these in less time than numbers."""
        for index, item in enumerate(self.group.applications):
            self.values += self._derive(index, item) or self._call(item)
            self._note_dtypes()
        taken, outputs = set(self.values[: len(self.inputs)]), list[fx.Node]()
        for node in (self.values[value] for value in self.group.outputs):
            is_own = node not in taken and node.target not in _NO_MEMORY
            taken.add(node)
            outputs.append(node if is_own else self.graph.call_function(torch.clone, (node,)))
        self.graph.output(outputs[0] if len(outputs) == 1 else tuple(outputs))
        simplify(self.graph)
        constants: dict[fx.Node, torch.Tensor] = {}
        with _disable_current_modes():
            for node in self.graph.nodes:
                if node.target is aten.scalar_tensor.default:
                    constants[node] = torch.scalar_tensor(*node.args, **node.kwargs)
                elif node.op == "call_function":
                    _lower(node, constants)
        for node in reversed(constants):
            self.graph.erase_node(node)
        return self.graph

    def _note_dtypes(self) -> None:
        for node, dtype in zip(self.values, self.typing.values, strict=False):
            node.meta.setdefault("dtype", dtype)

    def _derive(self, index: int, item: Application) -> list[fx.Node] | None:
        # What a functor's text says; None for anything else.
        function, scalars = item.function, iter(item.scalars)
        if function.op is not None or function.reduction is not None or not all(map(self._is_number, item.scalars)):
            return None
        common = self.typing.common[index]
        compute, rest = dtype_info(common).compute_dtype, list(item.tensors)
        arguments, types, numbers = list[fx.Node](), list[torch.dtype](), dict[fx.Node, int]()
        for parameter in function.functor.parameters:
            if parameter.role is Role.SCALAR:
                slot = next(scalars)
                function.check_kind(parameter, self.inputs[slot].number or float, common)
                types.append(number_dtype(self.inputs[slot].number or float, torch.float64))
                arguments.append(self._number(slot, types[-1]))
                numbers[arguments[-1]] = slot
            elif parameter.role is Role.TENSOR and rest:
                value = rest.pop(0)
                known = self.typing.values[value]
                types.append(compute if parameter.name not in function.unpromoted else dtype_info(known).compute_dtype)
                arguments.append(
                    self._number(value, types[-1])
                    if self._is_number(value)
                    else as_stored(cast(self.values[value], types[-1], known), types[-1])
                )
        translation = translate(function.functor, compute, tuple(types))
        if translation.graph_module is None:
            return None
        steps = translation.graph_module.graph
        made: Any = self.graph.graph_copy(steps, dict(zip(steps.find_nodes(op="placeholder"), arguments, strict=True)))
        for number, slot in numbers.items():
            for user in list(number.users):
                dtype: Any = user.kwargs.get("dtype")
                # Converted once, where Python's number becomes a tensor.
                if user.target is aten._to_copy.default and dtype.is_floating_point:
                    with self.graph.inserting_before(user):
                        user.replace_all_uses_with(self._number(slot, dtype))
        dtypes = function.result_dtypes(common)
        kinds = translation.output_types
        return [cast(restore(node, kind), dtype, kind) for node, kind, dtype in zip(made, kinds, dtypes, strict=True)]

    def _is_number(self, value: int) -> bool:
        return value < len(self.inputs) and self.inputs[value].rank is Rank.NUMBER

    def _number(self, slot: int, dtype: torch.dtype) -> fx.Node:
        # A number among the inputs as a tensor of a C++ type.
        kind = number_dtype(self.inputs[slot].number or float, torch.float64)
        is_simple = dtype is kind or (dtype.is_floating_point and not kind.is_complex)
        plainly = _make_word if self.inputs[slot].number is int else torch.scalar_tensor
        target = plainly if is_simple else _make_number
        node = self.graph.call_function(target, (self.values[slot],), {"dtype": dtype})
        node.meta["dtype"] = storage_dtype(dtype)
        return node

    def _call(self, item: Application) -> list[fx.Node]:
        # Anything else, as ``fallback`` calls it.
        function, names = item.function, [parameter.name for parameter in item.function.scalars]
        tensors = tuple(self.values[value] for value in item.tensors)
        scalars: dict[str, Any] = {name: self.values[value] for name, value in zip(names, item.scalars, strict=True)}
        made = self.graph.create_node("call_function", eager_version(function), tensors, scalars, name="call")
        if function.num_outputs == 1 and function.op is not None:
            return [made]
        return [self.graph.call_function(operator.getitem, (made, slot)) for slot in range(function.num_outputs)]


def _make_word(number: int, dtype: torch.dtype) -> torch.Tensor:
    # torch itself takes those of 64 bits without a sign, too, which no kernel does.
    if not fits_in_word(number):
        raise OverflowError
    return torch.scalar_tensor(number, dtype=dtype)


def _make_number(number: Any, dtype: torch.dtype) -> torch.Tensor:
    if not fits_in_word(number):
        raise OverflowError
    kind = number_dtype(type(number), torch.float64)
    made: torch.Tensor = as_stored(convert(constant(number, kind), dtype).data, dtype)
    return made


def _lower(node: fx.Node, constants: dict[fx.Node, torch.Tensor]) -> None:
    # A call of an overload as Python's binding of it, which is quicker.
    args: list[Any] = [constants.get(item, item) if isinstance(item, fx.Node) else item for item in node.args]
    op: Any = node.target
    if isinstance(op, torch._ops.OpOverload):
        dtype = next((item.meta["dtype"] for item in node.args if isinstance(item, fx.Node)), torch.float32)
        for slot, is_tensor in enumerate(takes_tensors(op)[: len(args)]):
            if is_tensor and is_number(args[slot]):
                args[slot] = torch.scalar_tensor(args[slot], dtype=dtype)
        binding = getattr(torch, op._schema.name.removeprefix("aten::"), None)
        node.target = binding if isinstance(binding, BuiltinFunctionType) else op._op
        if op in _METHODS:
            to: Any = node.kwargs.get("dtype")
            node.op, node.target = "call_method", _CONVERSIONS.get(to) or _METHODS[op]
            args = args if to in _CONVERSIONS else [*args, *node.kwargs.values()]
            node.kwargs = {}
    node.args = tuple(args)
