"""The nodes that a fusion node stands for, one by one.

They are called where a tensor's class, a mode or a tracer sees each of torch's functions, and for what a graph does to
numbers without saying that they are.

Not a GraphModule: that writes code, and cannot be pickled where functors are called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate, map_arg

from fuser.fx.nodes import module_of

__all__ = ["PlainNodes", "answers_for_torch"]


def answers_for_torch(values: Sequence[Any]) -> bool:
    """Whether a value's class or a mode is to see each of torch's functions.

    torch's own modes, such as that of a default device, make no other result of them.
    """
    if torch._C._is_torch_function_enabled() and any(map(_has_functions, values)):
        return True
    if not torch._C._len_torch_function_stack():
        return False
    modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(type(mode).__module__.partition(".")[0] != "torch" for mode in modes)


def _has_functions(item: Any) -> bool:
    # Whether it is a symbol, or of a subclass that says what torch's functions do with it, or whose class they give to
    # results. Switched off in torch.nn.Parameter.
    kind = type(item)
    known = getattr(kind, "__torch_function__", None)
    return kind is not torch.Tensor and known not in (None, torch._C._disabled_torch_function_impl)


@dataclass(frozen=True, slots=True)
class _Earlier:
    # Stands for an input, or for what a node before makes.
    index: int


@dataclass(frozen=True, slots=True)
class _Operator:
    # Stands for an overload or for all of an operator's, which cannot be pickled.
    packet: str
    # None: all of them.
    overload: str | None

    @classmethod
    def of(cls, target: Any) -> Any:
        """Return what stands for an operator; anything else as it is."""
        if isinstance(target, torch._ops.OpOverload):
            return cls(target._schema.name, target._overloadname)
        return cls(target._qualified_op_name, None) if isinstance(target, torch._ops.OpOverloadPacket) else target

    def find(self) -> Any:
        """Return the operator."""
        namespace, name = self.packet.split("::")
        packet = getattr(getattr(torch.ops, namespace), name)
        return packet if self.overload is None else getattr(packet, self.overload)


class PlainNodes:
    """Nodes as a function of some inputs, which returns a tuple; written as a graph is, by copying nodes to it.

    Args:
        count: how many inputs there are.
        takes_numbers: whether inputs may be numbers, for all that is known.
    """

    def __init__(self, count: int, *, takes_numbers: bool) -> None:
        self.takes_numbers = takes_numbers
        self._count = count
        self._steps: list[tuple[bool, Any, Any, Any]] = []
        self._results: tuple[Any, ...] = ()

    def input(self, slot: int) -> Any:
        """Return what stands for an input."""
        return _Earlier(slot)

    def node_copy(self, node: fx.Node, find: Callable[[fx.Node], Any]) -> Any:
        """Add the call of a node; ``find`` returns what stands for what it reads. Returns what stands for its value."""
        args, kwargs = map_arg((node.args, node.kwargs), find)
        target = module_of(node) if node.op == "call_module" else node.target
        return self._add(node.op == "call_method", target, args, kwargs)

    def call_function(self, target: Any, args: tuple[Any, ...]) -> Any:
        """Add a call; returns what stands for its value."""
        return self._add(False, target, args, {})

    def returning(self, results: Sequence[Any]) -> PlainNodes:
        """Set what the nodes return, and return them."""
        self._results = tuple(results)
        return self

    def _add(self, is_method: bool, target: Any, args: Any, kwargs: Any) -> _Earlier:
        self._steps.append((is_method, target, args, kwargs))
        return _Earlier(self._count + len(self._steps) - 1)

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """Run the nodes."""
        values = list(inputs)

        def find(item: Any) -> Any:
            return values[item.index] if isinstance(item, _Earlier) else item

        for is_method, target, args, kwargs in self._steps:
            given, named = map_aggregate(args, find), map_aggregate(kwargs, find)
            call = getattr(given[0], target) if is_method else target
            values.append(call(*given[is_method:], **named))
        return tuple(map(find, self._results))

    def __getstate__(self) -> dict[str, Any]:
        steps = [(is_method, _Operator.of(target), *given) for is_method, target, *given in self._steps]
        return {"steps": steps, "results": self._results, "takes_numbers": self.takes_numbers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._results, self.takes_numbers = state["results"], state["takes_numbers"]
        self._steps = [
            (is_method, target.find() if isinstance(target, _Operator) else target, args, kwargs)
            for is_method, target, args, kwargs in state["steps"]
        ]
