"""Which nodes of an FX graph become one group: maximal convex sets of functor calls and table ops.

A set is convex when no path leaves it and comes back: only then can it run as one step. Nodes that write to their
arguments, and functions and modules that are not torch's and might, are barriers; nothing moves across one. Nodes that
draw random numbers keep their order.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fuser.compiler import registered
from fuser.fx.conversions import find_visible_aliases
from fuser.graph import FusionGroup
from fuser.jiterator import JitFunction
from fuser.kernel_spec import MAX_INPUTS, MAX_OUTPUTS
from fuser.library import merge_inputs
from fuser.ops import IS_NUMBER, Call, bind_function, bind_method, bind_module, has_hooks

__all__ = [
    "Partition",
    "bind_group",
    "bind_node",
    "is_fusible",
    "is_random",
    "is_size",
    "number_nodes",
    "partition",
]

# Longer chains only make longer kernels; a bound keeps compile time bounded.
MAX_APPLICATIONS = 128


@dataclass(frozen=True, slots=True)
class Partition:
    """Nodes that become one fusion node, in the order of the graph."""

    nodes: tuple[fx.Node, ...]


def partition(graph: fx.Graph) -> list[Partition]:
    """Return the groups of a graph, in the order of the graph."""
    return _Partitioner(graph).run()


def bind_node(node: fx.Node) -> Call | None:
    """Return what a node applies, or None when it is neither a functor call nor an op of the table."""
    if node.op == "call_function":
        if isinstance(node.target, JitFunction):
            return _bind_functor(node.target, node)
        return bind_function(node.target, node.args, node.kwargs)
    if node.op == "call_method" and isinstance(node.target, str):
        return bind_method(node.target, node.args, node.kwargs)
    module = _module_of(node) if node.op == "call_module" else None
    return None if module is None else bind_module(module, node.args, node.kwargs)


def _module_of(node: fx.Node) -> torch.nn.Module | None:
    # What a call_module node calls; None for a graph that belongs to no module.
    root = node.graph.owning_module
    return None if root is None else root.get_submodule(str(node.target))


def bind_group(node: fx.Node) -> tuple[FusionGroup, list[Any]] | None:
    """Return the registered group a node runs (``torch.ops.fuser.run``) and its inputs, or None for other nodes."""
    if node.target is not torch.ops.fuser.run.default:
        return None
    key, kinds, tensors, numbers = node.args
    inputs = merge_inputs(str(kinds), tensors, numbers)  # type: ignore[arg-type]
    return registered(int(str(key))).group, inputs


def is_fusible(node: fx.Node) -> bool:
    """Whether a node can be part of a group: it has a functor, and its value, where known, is a strided tensor."""
    call = bind_node(node)
    if call is not None and not any(isinstance(value, fx.Node) for value in _flat_tensors(call)):
        return False
    if isinstance(_known_value(node), bool | int | float | torch.SymInt | torch.SymFloat | torch.SymBool):
        # Arithmetic on sizes.
        return False
    if call is None and bind_group(node) is None:
        return False
    values = [_known_value(item) for item in (node, *node.all_input_nodes)]
    return all(_is_plain(value) for value in values if value is not None)


def _known_value(node: fx.Node) -> Any:
    # What torch.export and AOTAutograd, or Dynamo alone, noted.
    return node.meta.get("val", node.meta.get("example_value"))


def _bind_functor(function: JitFunction, node: fx.Node) -> Call | None:
    if "out" in node.kwargs:
        return None
    function.check_count(len(node.args))
    return Call(function.function, tuple(node.args), function.bind_scalars(node.kwargs))


def number_nodes(nodes: list[fx.Node]) -> set[fx.Node]:
    """Return the nodes known to be numbers, which stay Python's.

    Those are placeholders marked so, sizes of tensors, what a functor takes as a scalar, what that was computed from,
    and what is computed from such nodes alone.
    """
    found: set[fx.Node] = {node for node in nodes if node.meta.get(IS_NUMBER) or is_size(node)}
    for node in reversed(nodes):
        call = bind_node(node)
        scalars = call.scalars.values() if call is not None else ()
        found.update(value for value in scalars if isinstance(value, fx.Node))
        if node in found and not is_size(node):
            found.update(node.all_input_nodes)
    for node in nodes:
        sources = node.all_input_nodes
        if sources and (bind_node(node) is not None or _is_pythons(node)) and found.issuperset(sources):
            found.add(node)
    return found


def is_size(node: fx.Node) -> bool:
    """Whether a node asks a tensor for a number: its sizes, how many dimensions or elements it has, its one value."""
    if node.op == "call_method":
        return node.target in _SIZES
    if node.target is getattr:
        return node.args[1] in {"shape", "ndim", "itemsize", "nbytes"}
    return node.op == "call_function" and node.target is torch.numel


# Methods of a tensor that return numbers.
_SIZES = frozenset("size dim ndimension numel nelement stride storage_offset element_size item".split())


def _is_pythons(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__module__", "") in {"_operator", "math", "builtins"}


def _flat_tensors(call: Call) -> Iterator[Any]:
    for value in call.tensors:
        if isinstance(value, Call):
            yield from _flat_tensors(value)
        else:
            yield value


def _is_plain(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.layout is torch.strided and not value.is_quantized and value.device.type in {"cpu", "cuda", "meta"}
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return isinstance(value, bool | int | float | complex | torch.SymInt | torch.SymFloat | torch.SymBool)


def _is_barrier(node: fx.Node) -> bool:
    # Writes to an argument, or may: everything before it stays before, everything after stays after.
    if node.op == "call_method":
        return _writes_by_name(str(node.target))
    if node.op == "call_module":
        module: Any = _module_of(node)
        is_norm = isinstance(module, torch.nn.modules.batchnorm._NormBase) and module.training
        # Embeddings shorten the rows of their weight.
        writes = is_norm or getattr(module, "inplace", False) or getattr(module, "max_norm", None) is not None
        return bool(writes) or (module is not None and has_hooks(module)) or not _is_torchs(type(module).__module__)
    if node.op != "call_function":
        return False
    given = _named_arguments(node)
    if any(given.get(name) is not None for name in ("out", "max_norm")) or given.get("inplace"):
        return True
    if _last_name(node.target).endswith(("batch_norm", "instance_norm")):
        # Running statistics are written to, which no schema of the older operators says.
        return True
    if isinstance(node.target, torch._ops.OpOverload):
        return bool(node.target._schema.is_mutable)
    if isinstance(node.target, torch._ops.OpOverloadPacket):
        return any(getattr(node.target, name)._schema.is_mutable for name in node.target.overloads())  # type: ignore[no-untyped-call]
    target: Any = node.target
    while isinstance(target, functools.partial):
        target = target.func
    name, home = getattr(target, "__name__", ""), getattr(target, "__module__", None) or ""
    in_place_operator = node.target is operator.setitem or (
        home == "_operator" and name.startswith("i") and hasattr(operator, name[1:])
    )
    return in_place_operator or _writes_by_name(name) or not _is_torchs(home)


def _writes_by_name(name: str) -> bool:
    # Of a method: ``add_``, ``__iadd__``.
    in_place_operator = name.startswith("__i") and hasattr(torch.Tensor, f"__{name[3:]}") and name != "__invert__"
    return (name.endswith("_") and not name.endswith("__")) or in_place_operator or name in {"__setitem__", "backward"}


def _named_arguments(node: fx.Node) -> Mapping[str, Any]:
    # Those given by position too, where the function says what they are called.
    try:
        by_position = inspect.signature(node.target).bind_partial(*node.args).arguments  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return node.kwargs
    return {**by_position, **node.kwargs}


def is_random(node: fx.Node) -> bool:
    """Whether a node may draw random numbers: such nodes keep their order."""
    if node.op == "call_module":
        module = _module_of(node)
        return hasattr(module, "dropout") or any(word in type(module).__name__ for word in _RANDOM_MODULES)
    if isinstance(node.target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in node.target.tags
    return node.op in {"call_function", "call_method"} and any(word in _last_name(node.target) for word in _RANDOM)


# Parts of the names of torch's functions and modules that draw.
_RANDOM = ("rand", "drop", "bernoulli", "normal", "multinomial", "poisson", "binomial", "rrelu", "gumbel", "attention")
_RANDOM_MODULES = ("Drop", "RReLU", "Attention", "FractionalMaxPool")


def _last_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name)
    return target if isinstance(target, str) else str(getattr(target, "__name__", ""))


def _is_torchs(module_name: str) -> bool:
    # Python's own functions that graphs call write to nothing, and functors and what is made of them have no state.
    return module_name.split(".")[0] in {"", "torch", "builtins", "_operator", "math", "fuser"}


class _Partitioner:
    """Greedy merging over units (a node, or nodes already merged), with ancestor and descendant sets as bit masks."""

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        self.index = {node: index for index, node in enumerate(self.nodes)}
        # Unit each node belongs to now.
        self.unit = dict(self.index)
        count = len(self.nodes)
        # Masks of unit numbers, by unit. A merged unit keeps the number of one of its nodes.
        self.ancestors = [0] * count
        self.descendants = [0] * count
        self.members: list[list[fx.Node]] = [[node] for node in self.nodes]
        self.alive = [True] * count
        numbers = number_nodes(self.nodes)
        for node in numbers:
            # Some ops are others beside a number.
            node.meta[IS_NUMBER] = True
        self.calls = {node: bind_node(node) for node in self.nodes if node not in numbers and is_fusible(node)}
        self.barriers = {node for node in self.nodes if _is_barrier(node)}
        visible = find_visible_aliases(self.nodes, self.calls, self.barriers)
        self.fusible = [node in self.calls and node not in visible for node in self.nodes]
        # Applications in each unit.
        self.applications = [int(fusible) for fusible in self.fusible]
        self.getitems = [self._is_getitem_of_fusible(node) for node in self.nodes]

    def run(self) -> list[Partition]:
        self._find_order()
        for index, node in enumerate(self.nodes):
            if self.getitems[index]:
                self._try_merge(self.unit[node.args[0]], self.unit[node])
            elif self.fusible[index]:
                for candidate in self._candidates(node):
                    # A candidate may have been merged since the list was made.
                    unit = self.unit[node]
                    if self.alive[candidate] and candidate != unit and self._allows(candidate, unit):
                        self._try_merge(candidate, unit)
        found = [
            Partition(tuple(sorted(self.members[index], key=self.index.__getitem__)))
            for index in range(len(self.nodes))
            if self.alive[index] and self.applications[index] and not self._only_converts(index)
        ]
        return sorted(found, key=lambda item: self.index[item.nodes[0]])

    def _only_converts(self, unit: int) -> bool:
        # torch copies nothing where no conversion is needed.
        calls = [self.calls.get(node) for node in self.members[unit]]
        return all(call is not None and call.function.op == "convert" for call in calls)

    def _is_getitem_of_fusible(self, node: fx.Node) -> bool:
        # The outputs of a functor with several.
        return (
            node.op == "call_function"
            and node.target is operator.getitem
            and isinstance(node.args[0], fx.Node)
            and (isinstance(node.args[0].target, JitFunction) or bind_group(node.args[0]) is not None)
            and self.fusible[self.unit[node.args[0]]]
        )

    def _find_order(self) -> None:
        last_barrier: int | None = None
        last_random: int | None = None
        since_barrier: list[int] = []
        for index, node in enumerate(self.nodes):
            sources = {self.unit[source] for source in node.all_input_nodes}
            if last_barrier is not None:
                sources.add(last_barrier)
            if node in self.barriers:
                sources.update(since_barrier)
                last_barrier, since_barrier = index, []
            else:
                since_barrier.append(index)
            if is_random(node):
                if last_random is not None:
                    sources.add(last_random)
                last_random = index
            mask = 0
            for source in sources:
                mask |= self.ancestors[source] | (1 << source)
            self.ancestors[index] = mask
        for index, mask in enumerate(self.ancestors):
            for source in _bits(mask):
                self.descendants[source] |= 1 << index

    def _candidates(self, node: fx.Node) -> list[int]:
        # Producers first, then units that read the same values; where shapes are unknown (fuser.fuse) any other
        # unit too: a user who fuses a function wants one launch for all of it.
        found: dict[int, None] = {}
        for source in node.all_input_nodes:
            found[self.unit[source]] = None
        for source in node.all_input_nodes:
            for user in source.users:
                found[self.unit[user]] = None
        if "val" not in node.meta:
            for index in range(self.index[node]):
                found[self.unit[self.nodes[index]]] = None
        return [unit for unit in found if self.alive[unit] and self.applications[unit]]

    def _allows(self, first: int, second: int) -> bool:
        """Whether size, device and shape speak for merging."""
        nodes = [*self.members[first], *self.members[second]]
        if self.applications[first] + self.applications[second] > MAX_APPLICATIONS:
            return False
        inside = set(nodes)
        inputs = {source for node in nodes for source in node.all_input_nodes if source not in inside}
        outputs = [node for node in nodes if any(user not in inside for user in node.users)]
        if len(inputs) > MAX_INPUTS or len(outputs) > MAX_OUTPUTS:
            return False
        devices = {value.device for node in nodes if isinstance(value := node.meta.get("val"), torch.Tensor)}
        if len(devices) > 1:
            return False
        is_connected = bool((self.ancestors[second] >> first | self.ancestors[first] >> second) & 1)
        # As text: sizes may be symbols, which do not hash.
        shapes = {str(value.shape) for node in outputs if isinstance(value := node.meta.get("val"), torch.Tensor)}
        return is_connected or len(shapes) <= 1

    def _try_merge(self, first: int, second: int) -> None:
        both = (1 << first) | (1 << second)
        between = (self.ancestors[first] & self.descendants[second]) | (
            self.ancestors[second] & self.descendants[first]
        )
        if first == second or between & ~both:
            return
        self.members[first] += self.members[second]
        self.applications[first] += self.applications[second]
        for node in self.members[second]:
            self.unit[node] = first
        self.alive[second] = False
        ancestors = (self.ancestors[first] | self.ancestors[second]) & ~both
        descendants = (self.descendants[first] | self.descendants[second]) & ~both
        self.ancestors[first], self.descendants[first] = ancestors, descendants
        # Everything before the merged unit is now before everything after it.
        for index in _bits(ancestors):
            self.descendants[index] = (self.descendants[index] & ~both) | descendants | (1 << first)
        for index in _bits(descendants):
            self.ancestors[index] = (self.ancestors[index] & ~both) | ancestors | (1 << first)


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
