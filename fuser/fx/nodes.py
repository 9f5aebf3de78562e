"""What single nodes of an FX graph are: what they apply, whether they are numbers, what they may share memory with."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import fx

from fuser.compiler import registered
from fuser.dtypes import Rank, number_dtype
from fuser.errors import UnsupportedError
from fuser.graph import FusionGroup
from fuser.jit_function import JitFunction
from fuser.library import merge_inputs
from fuser.ops import (
    DEVICE_TYPE,
    IS_NUMBER,
    KNOWN,
    OPS,
    OpCall,
    bind_function,
    bind_method,
    bind_module,
    dtype_kind,
    is_constant,
)
from fuser.tensor_desc import describe

__all__ = [
    "COPIES",
    "IS_WRITTEN",
    "MAY_BE_NUMBER",
    "NUMBERS",
    "UNSAFE_VIEWS",
    "GraphReading",
    "add_call",
    "bind_group",
    "bind_node",
    "find_bar",
    "find_readers",
    "find_storage",
    "is_copy",
    "is_fresh",
    "is_fusible",
    "is_pending",
    "is_size",
    "is_static",
    "may_alias",
    "may_be_number",
    "module_of",
    "read_arguments",
    "read_nodes",
    "still_reads",
    "takes_item",
]


COPIES = frozenset({"convert", "clone", "contiguous"})
# Overloads that share memory with what they are given, of which their schemas say nothing.
UNSAFE_VIEWS = frozenset({
    torch.ops.aten._unsafe_view.default, torch.ops.aten.unsafe_split.Tensor,
    torch.ops.aten.unsafe_split_with_sizes.default,
})  # fmt: skip
# Key in the ``meta`` of a node that stays torch's: what it makes is written where it is.
IS_WRITTEN = "fuser_is_written"
# Key there of a fusion node that may be given numbers alone, and returns some then.
MAY_BE_NUMBER = "fuser_may_be_number"
# Key there of what joins no group with reductions: fast kernels of these have no registers left for it.
IS_APART = "fuser_is_apart"


@dataclass(frozen=True, slots=True)
class GraphReading:
    """What the nodes of a graph are."""

    # What each node applies: each is bound once.
    calls: Mapping[fx.Node, OpCall | None]
    # Those known to be numbers, which stay Python's.
    numbers: frozenset[fx.Node]

    def is_fusible(self, node: fx.Node) -> bool:
        """Whether the node can be part of a group."""
        return node not in self.numbers and is_fusible(node, self.calls[node])


def read_nodes(nodes: Sequence[fx.Node], device_type: str = "") -> GraphReading:
    """Bind the nodes of a graph, in its order, and mark those that are numbers (``meta[IS_NUMBER]``).

    ``device_type`` is where the values are that nothing else is known of; empty: it is not known either.
    """
    if device_type:
        for node in nodes:
            node.meta[DEVICE_TYPE] = device_type
    calls = {node: bind_node(node) for node in nodes}
    numbers = _find_numbers(nodes, calls)
    new = [node for node in numbers if not node.meta.get(IS_NUMBER)]
    for node in new:
        node.meta[IS_NUMBER] = True
    # Some ops are others beside a number.
    readers = {user for node in new for user in node.users}
    return GraphReading(calls | {node: bind_node(node) for node in readers}, frozenset(numbers))


def bind_node(node: fx.Node) -> OpCall | None:
    """Return what a node applies, or None when it is neither a functor call nor an op of the table."""
    if node.op == "call_function":
        if isinstance(node.target, JitFunction):
            return _bind_functor(node.target, node)
        return bind_function(node.target, node.args, node.kwargs)
    if node.op == "call_method" and isinstance(node.target, str):
        return bind_method(node.target, node.args, node.kwargs)
    module = module_of(node) if node.op == "call_module" else None
    return None if module is None else bind_module(module, node.args, node.kwargs)


def module_of(node: fx.Node) -> torch.nn.Module | None:
    """Return what a call_module node calls, or a get_attr node gets if that is a module.

    None for a graph that belongs to no module.
    """
    root = node.graph.owning_module
    found = None if root is None else operator.attrgetter(str(node.target))(root)
    return found if isinstance(found, torch.nn.Module) else None


def bind_group(node: fx.Node) -> tuple[FusionGroup, list[Any]] | None:
    """Return the group a node runs (``torch.ops.fuser.run``) and its inputs, or None for other nodes."""
    if node.target is not torch.ops.fuser.run.default:
        return None
    group, *inputs = node.args
    return registered(str(group)).group, merge_inputs(*inputs)  # type: ignore[arg-type]


def is_fusible(node: fx.Node, call: OpCall | None) -> bool:
    """Whether a node that applies ``call`` can be part of a group: its value, where known, is a strided tensor."""
    return find_bar(node, call) is None


def find_bar(node: fx.Node, call: OpCall | None) -> str | None:
    """Return what keeps a node that applies ``call`` out of all groups, in words."""
    if call is not None and not any(isinstance(value, fx.Node) for value in _flat_tensors(call)):
        return "it is given no tensors of the graph's"
    if node.meta.get(IS_WRITTEN):
        return "what it makes is written where it is"
    if isinstance(_known_value(node), NUMBERS):
        return "arithmetic on numbers is Python's"
    if call is None and bind_group(node) is None:
        return f"no op of fuser's table: {node.target}"
    if call is not None and not _has_kernel(call):
        return "no kernel of fuser's for these dtypes"
    if call is not None and call.items is not None and not all(takes_item(user, call) for user in node.users):
        return "a result of it is read that no kernel of fuser's makes"
    values = [_known_value(item) for item in (node, *node.all_input_nodes)]
    is_plain = all(_is_plain(value) for value in values if value is not None)
    return None if is_plain else "its arguments are no strided tensors"


def _has_kernel(call: OpCall) -> bool:
    # Whether the op serves the dtypes of its tensors, where these are known; floats are served by all.
    op, operands = OPS.get(str(call.function.op)), list[tuple[torch.dtype, Rank]]()
    for item in call.tensors:
        value = _known_value(item) if isinstance(item, fx.Node) else item
        if isinstance(value, torch.Tensor):
            operands.append((value.dtype, Rank.TENSOR if value.dim() else Rank.ZERO_DIM))
        elif is_constant(value) or isinstance(value, NUMBERS):
            operands.append((number_dtype(describe(value).kind, torch.get_default_dtype()), Rank.NUMBER))
        else:
            return True
    if op is None or all(dtype.is_floating_point for dtype, rank in operands if rank is not Rank.NUMBER):
        return True
    try:
        return dtype_kind(call.function.common_dtype(operands, torch.get_default_dtype())) in op.kinds
    except UnsupportedError:
        return False


def is_copy(call: OpCall | None) -> bool:
    """Whether a call gives back its tensor's elements, in another dtype or layout at most."""
    return call is not None and call.function.op in COPIES


def may_alias(node: fx.Node) -> bool:
    """Whether what a node returns may be memory that it was given: only of torch's overloads it is known."""
    schema = getattr(node.target, "_schema", None)
    is_view = schema is None or any(item.alias_info is not None for item in schema.returns)
    return is_view or node.target in UNSAFE_VIEWS


def find_readers(value: Any) -> Iterator[fx.Node]:
    """Yield what reads a value, or one that may be the same memory."""
    for user in value.users if isinstance(value, fx.Node) else ():
        yield user
        if may_alias(user):
            yield from find_readers(user)


def is_fresh(node: fx.Node) -> bool:
    """Whether what a node returns has memory of its own, in a graph with fusion nodes; of an item, its tuple."""
    node = _whole(node)
    return node.op == "call_module" or not may_alias(node)


def is_pending(node: fx.Node) -> bool:
    """Whether what a node was given is read until somebody waits for what it returns, or for the item that it is."""
    target = _whole(node).target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "_c10d_functional":
        return False
    return target._opname != "wait_tensor"


def _whole(node: fx.Node) -> fx.Node:
    # What a node is an item of, or the node: an index of a tensor makes a view.
    source = node.args[0] if node.target is operator.getitem else node
    return source if isinstance(source, fx.Node) and not isinstance(_known_value(source), torch.Tensor) else node


def still_reads(node: fx.Node) -> bool:
    """Whether who reads what a node returns may read what it was given."""
    return not is_fresh(node) or is_pending(node)


def takes_item(user: fx.Node, call: OpCall) -> bool:
    """Whether a node takes an item, one that is made, of the tuple that another one returns."""
    slot = call.find_item(user)
    return slot is not None and call.items is not None and call.items[slot] >= 0


def _known_value(node: fx.Node) -> Any:
    # What torch.export and AOTAutograd, or Dynamo alone, noted.
    return node.meta.get("val", node.meta.get("example_value"))


def _bind_functor(function: JitFunction, node: fx.Node) -> OpCall | None:
    held = (node.kwargs.get(name) for name in function.number_names)
    if "out" in node.kwargs or any(isinstance(value, fx.Node) and not value.meta.get(IS_NUMBER) for value in held):
        # A number that only the call itself can read stays a call.
        return None
    function.check_count(len(node.args))
    scalars = function.bind_scalars(node.kwargs)
    if function.index is None:
        return OpCall(function.function, tuple(node.args), scalars)
    # Numbers have no shape.
    shaped = tuple(item for item in node.args if isinstance(item, fx.Node)) or node.args
    index = OpCall(function.index_function(len(shaped)), shaped, {})
    return OpCall(function.function, tuple(function.insert_index(node.args, index)), scalars)


def _find_numbers(nodes: Sequence[fx.Node], calls: Mapping[fx.Node, OpCall | None]) -> set[fx.Node]:
    # Placeholders marked so, what is known to be one, sizes of tensors, what a functor takes as a scalar, what that was
    # computed from, and what is computed from such nodes alone.
    known = {node for node in nodes if is_size(node) or isinstance(_known_value(node), NUMBERS)}
    found = known | {node for node in nodes if node.meta.get(IS_NUMBER)}
    for node in reversed(nodes):
        call = calls[node]
        if call is not None:
            found.update(value for value in call.scalars.values() if isinstance(value, fx.Node))
        if node in found and node not in known:
            found.update(node.all_input_nodes)
    for node in nodes:
        sources = node.all_input_nodes
        if sources and (calls[node] is not None or _is_pythons(node)) and found.issuperset(sources):
            found.add(node)
    return found


def may_be_number(value: Any) -> bool:
    """Whether an argument may be a number for all that its graph says: an input without metadata, or made of one."""
    if not isinstance(value, fx.Node) or _known_value(value) is not None:
        return False
    may_be = value.op == "placeholder" or _is_pythons(value) or MAY_BE_NUMBER in value.meta
    return may_be and not any(name in value.meta for name in (IS_NUMBER, DEVICE_TYPE, KNOWN))


def is_size(node: fx.Node) -> bool:
    """Whether a node asks a tensor for numbers: its sizes, how many dimensions or elements it has, its values."""
    if node.op == "call_method":
        return node.target in _SIZES
    if node.target is getattr:
        return node.args[1] in {"shape", "ndim", "itemsize", "nbytes", "_version"}
    return node.op == "call_function" and node.target in _SIZE_FUNCTIONS


NUMBERS = bool | int | float | torch.SymInt | torch.SymFloat | torch.SymBool
# Methods of a tensor that return numbers, among them bools, and functions that do.
_SIZES = frozenset(
    "size dim ndimension numel nelement stride storage_offset element_size item tolist data_ptr nbytes is_contiguous "
    "is_set_to is_same_size is_nonzero equal allclose".split()
)
_SIZE_FUNCTIONS = frozenset((torch.numel, torch.is_same_size, torch.is_nonzero, torch.equal, torch.allclose))


def _is_pythons(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__module__", "") in {"_operator", "math", "builtins"}


def _flat_tensors(call: OpCall) -> Iterator[Any]:
    for value in call.tensors:
        if isinstance(value, OpCall):
            yield from _flat_tensors(value)
        else:
            yield value


def _is_plain(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.layout is torch.strided and not value.is_quantized and value.device.type in {"cpu", "cuda", "meta"}
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value if item is not None)
    return isinstance(value, complex | NUMBERS)


def is_static(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether a value is a tensor whose sizes and strides are numbers."""
    return isinstance(value, torch.Tensor) and all(type(size) is int for size in (*value.shape, *value.stride()))


def find_storage(value: object) -> int | None:
    """Return a number that tensors have in common, fake ones too, if they share memory; None for what has none."""
    if not isinstance(value, torch.Tensor):
        return None
    try:
        return int(value.untyped_storage()._cdata)
    except NotImplementedError:
        # Sparse tensors have none.
        return None


def read_arguments(node: fx.Node) -> list[Any]:
    """Return all arguments of an overload of torch's, in the order of its schema, however they are given."""
    taken = node.target._schema.arguments  # type: ignore[union-attr]
    return [*node.args, *(node.kwargs.get(item.name, item.default_value) for item in taken[len(node.args) :])]


def add_call(graph: fx.Graph, target: Any, *arguments: Any, **options: Any) -> fx.Node:
    """Add a call where the graph is written, with what ``target`` makes of its arguments' values as its value."""
    node = graph.call_function(target, arguments, options)
    given, named = fx.node.map_arg((arguments, options), lambda item: item.meta["val"])
    node.meta["val"] = target(*given, **named)
    return node
