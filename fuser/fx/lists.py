"""Torch's operators of lists (``_foreach_add``), as a compiled optimizer has them: chains of them become few launches.

Such an operator is an ordinary one at each position of its lists. What operators of lists of the same shapes make of
each other is one group, written once, of the first position, and run as ``fuser.foreach`` runs it. Outputs that are
copied into arguments at the end of the graph are written there.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fuser.config import config
from fuser.fx import passes
from fuser.fx.fusion_node import FusionCall, FusionModule
from fuser.fx.nodes import is_static, read_nodes
from fuser.fx.partition import Partition
from fuser.fx.passes import Fuel, FusionPass
from fuser.fx.substitution import sort_graph
from fuser.fx.whole import WholeFusion, find_whole_fusion
from fuser.graph import FusionGroup
from fuser.kernel_spec import MAX_OUTPUTS
from fuser.layout import contiguous_strides
from fuser.list_planner import launch_lists
from fuser.list_record import ListCall, ListTarget
from fuser.ops import OpCall, bind_function, of_lists
from fuser.plan import Buffer
from fuser.route import call_anew

__all__ = ["ListFusion", "fuse_lists"]

_ATEN = torch.ops.aten
# What an operator of lists does at one position, by the part of its name that says what its arguments are.
_OVERLOADS = {
    "List": ("Tensor", "Tensor_Tensor", "default"),
    "Scalar": ("Scalar", "Tensor_Scalar", "Tensor", "default"),
    "Tensor": ("Tensor",),
    "default": ("default",),
    "ScalarAndTensor": ("Scalar",),
}
# Those that have another name where they take a number.
_OF_NUMBERS = {"maximum": "clamp_min", "minimum": "clamp_max"}
# Those of numbers that CUDA's kernels of lists compute otherwise than others: they add up in an order of their own, and
# have no formulas for some powers.
_AS_LISTS = {"norm", "powsum", "pow"}
# Those whose last argument ordinary operators take by name.
_NAMED = {"addcmul": "value", "addcdiv": "value"}


class ListCallable:
    """A registered group as a function of lists; returns a tuple of lists, one for each output."""

    # Of each output the tensors to allocate: none for those given, or one that the tensors are the elements of.
    def __init__(self, run: FusionCall, buffers: Sequence[Sequence[Buffer] | Buffer]) -> None:
        self.spec = run.spec
        self.buffers = buffers
        self._one = run
        inputs = tuple(range(len(run.spec.group.inputs)))
        self._target = ListTarget(run.spec, run.spec, inputs, (), (), is_fixed=True)

    def __call__(self, *inputs: Any, out: Sequence[Sequence[torch.Tensor] | None] = ()) -> Any:
        """Run the group at each position; ``out`` has None for outputs that are new tensors."""
        is_list = tuple([isinstance(item, list | tuple) for item in inputs])
        lists = [item for item, own in zip(inputs, is_list, strict=True) if own]
        outs: tuple[Any, ...] = ()
        if any(item is not None for item in out):
            device = lists[0][0].device
            pairs = zip(out, self.buffers, strict=True)
            outs = tuple([_allocate(buffers, device) if own is None else own for own, buffers in pairs])
        call = ListCall(self._run_one, inputs, is_list, len(lists[0]), {}, outs, outs, len(out))
        made = launch_lists(call, self._target, lambda _: self._target)
        made = call.run_plainly(range(call.count)) if made is None else made
        return (made,) if len(out) == 1 and not outs else made

    def _run_one(self, *inputs: Any, out: Any = None) -> Any:
        made = self._one.launch(inputs, None, out)
        return call_anew(self.spec, inputs, self._one, inputs, None, out) if made is None else made

    def __reduce__(self) -> tuple[Any, ...]:
        return ListCallable, (self._one, self.buffers)


def _allocate(buffers: Sequence[Buffer] | Buffer, device: torch.device) -> Sequence[torch.Tensor]:
    if isinstance(buffers, Buffer):
        return buffers.allocate(device).unbind()
    return [item.allocate(device) for item in buffers]


class ListFusion(FusionModule):
    """A fusion node of lists."""

    def __init__(self, group: FusionGroup, node_names: Sequence[str], buffers: Sequence[Any]) -> None:
        super().__init__(group, node_names)
        self.run: Any = ListCallable(self.run, buffers)

    def forward(self, *inputs: Any, out: Any = ()) -> Any:
        """Run the group at each position."""
        return self.run(*inputs, out=out)

    def __reduce__(self) -> tuple[Any, ...]:
        return ListFusion, (self.group, self.node_names, self.run.buffers)


@dataclass(frozen=True, slots=True, eq=False)
class _ListOp:
    """The same ordinary operator at each position."""

    # What it makes: one node for each position, and what they are taken from (``_foreach_add``), if not themselves.
    items: tuple[fx.Node, ...]
    source: fx.Node | None
    target: Any
    # Columns of nodes, a node for all positions, or numbers.
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    # Shapes of all positions, and the device: what is not of one kind cannot be of one kernel.
    kind: Any

    @property
    def value(self) -> torch.Tensor:
        """What is known of the first position."""
        found: torch.Tensor = self.items[0].meta["val"]
        return found

    @property
    def number(self) -> float | None:
        """The number that all elements are, as they hold it; None for what is computed."""
        if self.target is not _ATEN.full_like.default:
            return None
        return torch.tensor(self.args[1], dtype=self.value.dtype).item()


def fuse_lists(graph_module: fx.GraphModule, numerics: str | None, fuel: Fuel | None) -> None:
    """Put fusion nodes in place of operators of lists."""
    graph, is_strict = graph_module.graph, (numerics or config.numerics) == "strict"
    reader = _Reader(is_strict=is_strict)
    for node in list(graph.nodes):
        if node.op == "call_function" and "aten._foreach_" in str(node.target):
            reader.read(node)
    levels = _find_levels(graph, reader.made_by)
    groups: dict[Any, list[_ListOp]] = {}
    for op in reader.ops:
        groups.setdefault((op.kind, levels[op.items[0]]), []).append(op)
    substitution = _ListSubstitution(graph_module)
    known = [group for group in groups.values() if not is_strict or all(map(_has_known_bits, group))]
    fused = [substitution.add(group, numerics, fuel) for group in known]
    if any(fused):
        sort_graph(graph)
        graph.lint()
        graph_module.recompile()


def _may_lie_otherwise(value: torch.Tensor, operand: Any) -> bool:
    # CUDA's operator gives its results the strides of an operand, a kernel those of ordinary operators: not the same of
    # results of nothing, and else not of dimensions that nobody walks along. Nor do fake tensors know the former.
    known: torch.Tensor | None = operand.meta.get("val") if isinstance(operand, fx.Node) else None
    if not {"0", "1"}.intersection(map(str, value.shape)):
        return False
    if known is None or not (is_static(known) and is_static(value)) or value.numel() == 0:
        return True
    return not value.stride() == known.stride() == contiguous_strides(tuple(value.shape))


class _Reader:
    """Finds the operators of lists of a graph, in its order."""

    def __init__(self, *, is_strict: bool) -> None:
        self.is_strict = is_strict
        self.ops: list[_ListOp] = []
        # The operator that makes a node, which is its item at some position.
        self.made_by: dict[fx.Node, _ListOp] = {}
        # Nodes that operators read otherwise: they stay where they are.
        self.given: set[fx.Node] = set()

    def read(self, node: fx.Node) -> None:
        """Read a node that returns a list."""
        values, operator_of_lists = node.meta.get("val"), node.target
        columns = [item for item in node.args if isinstance(item, list | tuple)]
        assert isinstance(operator_of_lists, torch._ops.OpOverload), "it has such a name"
        if not isinstance(values, list | tuple) or not columns or any(len(item) != len(values) for item in columns):
            return
        if any(map(_may_lie_otherwise, values, columns[0])):
            return
        name, args, kwargs = operator_of_lists._opname.removeprefix("_foreach_"), list(node.args), dict(node.kwargs)
        is_of_number = operator_of_lists._overloadname == "Scalar"
        if self.is_strict and is_of_number and name in _AS_LISTS and any(value.is_cuda for value in values):
            return
        if name in _NAMED and len(args) == 4:
            kwargs[_NAMED[name]] = args.pop()
        if is_of_number:
            name = _OF_NUMBERS.get(name, name)
        for overload in _OVERLOADS.get(operator_of_lists._overloadname, ()):
            target = getattr(getattr(_ATEN, name, None), overload, None)
            if name == "div" and overload == "Scalar":
                # Lists are divided; a tensor is multiplied by what a number divides into 1.
                target = _ATEN.div.Tensor
            if target is not None and self._is_bound(target, args, kwargs):
                self._note(_items_of(node, values), node, target, args, kwargs)
                return

    def _is_bound(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        columns = [item for item in args if isinstance(item, list | tuple)]
        shared = [item for item in args if isinstance(item, fx.Node)]
        if not all(isinstance(item.meta.get("val"), torch.Tensor) and item not in self.made_by for item in shared):
            return False
        self.given.update(shared)
        stand_ins = tuple(item[0] if isinstance(item, list | tuple) else item for item in args)
        if not all(map(self._is_column, columns)) or _promotes_apart(columns, shared):
            return False
        call = bind_function(target, stand_ins, kwargs)
        # A view computes nothing that a kernel could return.
        return (target is _ATEN.full_like.default and not kwargs) or (call is not None and not call.is_view)

    def _is_column(self, items: Sequence[Any]) -> bool:
        # Tensors alike, none of which is made here at another position.
        if not all(isinstance(item, fx.Node) and is_static(item.meta.get("val")) for item in items):
            return False
        if len({(item.meta["val"].dtype, item.meta["val"].device) for item in items}) > 1:
            return False
        if items[0] not in self.made_by:
            self._read_column(items)
        own = [self.made_by.get(item) for item in items]
        if not any(own):
            self.given.update(items)
            return True
        return own[0] is not None and own[0].items == tuple(items)

    def _read_column(self, items: Sequence[fx.Node]) -> None:
        # Nodes that do the same at each position, as an optimizer has them where there is no operator of lists.
        first = items[0]
        if first.op != "call_function" or len(set(items)) < len(items):
            return
        if any(item.target is not first.target or item.kwargs != first.kwargs for item in items):
            return
        if any(len(item.args) != len(first.args) for item in items):
            # Some leave out what has a default.
            return
        if not self.given.isdisjoint(items) or not _are_independent(items):
            return
        args: list[Any] = []
        for column in zip(*(item.args for item in items), strict=True):
            if all(isinstance(item, fx.Node) for item in column):
                args.append(column)
            elif isinstance(column[0], int | float) and all(item == column[0] for item in column):
                args.append(column[0])
            else:
                return
        if any(isinstance(item, tuple) for item in args) and self._is_bound(first.target, args, first.kwargs):
            self._note(tuple(items), None, first.target, args, first.kwargs)

    def _note(
        self,
        items: tuple[fx.Node, ...],
        source: fx.Node | None,
        target: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        values = [item.meta["val"] for item in items]
        if not all(map(is_static, values)) or len({(value.dtype, value.device) for value in values}) > 1:
            return
        kind = (values[0].device, *(tuple(value.shape) for value in values))
        columns = tuple(tuple(item) if isinstance(item, list) else item for item in args)
        op = _ListOp(items, source, target, columns, kwargs, kind)
        self.ops.append(op)
        self.made_by |= dict.fromkeys(items, op)


def _promotes_apart(columns: Sequence[Sequence[fx.Node]], shared: Sequence[fx.Node]) -> bool:
    # Whether dtypes are other ones at some positions: of what has no dimensions there, beside other dtypes.
    dtypes = {item.meta["val"].dtype for item in (*(items[0] for items in columns), *shared)}
    return len(dtypes) > 1 and any(len({item.meta["val"].dim() == 0 for item in items}) > 1 for items in columns)


def _are_independent(nodes: Sequence[fx.Node]) -> bool:
    # Whether none of them is made from another one.
    first, chosen, seen = min(nodes), set(nodes), set[fx.Node]()
    stack = [source for node in nodes for source in node.all_input_nodes]
    while stack:
        node = stack.pop()
        if node in chosen:
            return False
        if node > first and node not in seen:
            seen.add(node)
            stack += node.all_input_nodes
    return True


def _items_of(node: fx.Node, values: Sequence[torch.Tensor]) -> tuple[fx.Node, ...]:
    # One for each position, also where nobody reads it.
    found = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    for slot, value in enumerate(values):
        if slot not in found:
            with node.graph.inserting_after(node):
                found[slot] = node.graph.call_function(operator.getitem, (node, slot))
            found[slot].meta["val"] = value
    return tuple(found[slot] for slot in range(len(values)))


def _find_levels(graph: fx.Graph, made_by: Mapping[fx.Node, _ListOp]) -> dict[fx.Node, int]:
    # Operators of one kind and level are one step: whatever leads from one step to another leads to a higher level.
    # As high as those that read them allow, so that a chain is not cut where something joins it.
    sources = {op.source: op for op in made_by.values() if op.source is not None}
    kinds = {node: op.kind for node, op in (*made_by.items(), *sources.items())}
    nodes = [node for node in graph.nodes if node.op not in {"placeholder", "get_attr", "output"}]
    lowest: dict[fx.Node, int] = {}
    for node in nodes:
        own = [lowest[item] + (kinds.get(item) != kinds.get(node)) for item in node.all_input_nodes if item in lowest]
        lowest[node] = max(own, default=0)
    levels: dict[fx.Node, int] = {}
    # All positions of an operator have one level: they are looked at when the first of them, in this order, is.
    for node in reversed(nodes):
        if node in levels or not (node.users or node in kinds):
            # What nobody reads comes after all.
            continue
        together = made_by[node].items if node in made_by else (node,)
        above = [
            levels[user] - (kinds.get(item) != kinds.get(user))
            for item in together
            for user in item.users
            if user in levels
        ]
        level = min(above, default=max(lowest[item] for item in together))
        levels |= dict.fromkeys(together, level)
    return levels


def _buffers(op: _ListOp) -> tuple[Buffer, ...] | Buffer:
    found = tuple(_buffer(item.meta["val"]) for item in op.items)
    # Numbers that nobody outside sees are one tensor's.
    is_inner = not any(user.op == "output" for item in op.items for user in item.users)
    is_one = is_inner and len({*found}) == 1 and not found[0].shape
    return Buffer((len(found),), (1,), found[0].dtype) if is_one else found


class _ListSubstitution:
    """Puts fusion nodes in place of operators of lists that are one step."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        self.module, self.graph = graph_module, graph_module.graph
        # What stands for nodes of earlier groups now.
        self.replaced: dict[fx.Node, fx.Node] = {}

    def add(self, group: Sequence[_ListOp], numerics: str | None, fuel: Fuel | None) -> bool:
        """Put one there; return whether there is one."""
        inside = {item for op in group for item in op.items} | {op.source for op in group if op.source}
        # Those whose results others read.
        kept = [op for op in group if any(user not in inside for item in op.items for user in item.users)]
        if not kept or any(op.number is not None for op in kept):
            return False
        fuel = fuel or passes.process_fuel
        whole, given = _write_group(group, kept, numerics)
        if whole is None or not fuel.burn():
            return False
        arguments = [self._now(given[slot]) if slot >= 0 else whole.constants[-1 - slot] for slot in whole.order]
        positions_of: dict[Any, set[int]] = {}
        for column in (item for op in group for item in op.args):
            for slot, item in enumerate(column) if isinstance(column, tuple) else [(-1, column)]:
                positions_of.setdefault(item, set()).add(slot)
        outs = [_find_targets(op, inside, positions_of) for op in kept]
        buffers = [_buffers(op) if own is None else () for own, op in zip(outs, kept, strict=True)]
        names = [(op.source or op.items[0]).name for op in group]
        name = f"fusion_lists_{len(list(self.module.children()))}"
        module = ListFusion(whole.spec.group, names, buffers)
        self.module.add_submodule(name, module)
        fuel.see(module)
        with self.graph.inserting_before(group[-1].items[-1]):
            fused = self.graph.call_module(name, tuple(arguments), {"out": outs})
        fused.meta["val"] = [[item.meta["val"] for item in op.items] for op in kept]
        last = fused
        for slot, op in enumerate(kept):
            with self.graph.inserting_after(last):
                last = results = self.graph.call_function(operator.getitem, (fused, slot))
            for position, item in enumerate(op.items):
                if outs[slot] is not None:
                    self.graph.erase_node(_find_copy(item))
                if any(user not in inside for user in item.users):
                    with self.graph.inserting_after(last):
                        last = self.replaced[item] = self.graph.call_function(operator.getitem, (results, position))
                    last.meta = item.meta
                    item.replace_all_uses_with(last)
        for node in reversed(self.graph.nodes):
            if node in inside:
                self.graph.erase_node(node)
        return True

    def _now(self, item: Any) -> Any:
        return (
            [self.replaced.get(own, own) for own in item] if isinstance(item, tuple) else self.replaced.get(item, item)
        )


class _WholePass(FusionPass):
    """Makes one fusion node of a whole graph, whether its parts have to do with each other or not."""

    def find_groups(self, graph: fx.Graph) -> list[Partition]:
        """Return all nodes, or nothing."""
        reading = read_nodes(list(graph.nodes))
        nodes = [node for node in graph.nodes if node.op == "call_function"]
        if not all(map(reading.is_fusible, nodes)) or len(graph.output_node().all_input_nodes) > MAX_OUTPUTS:
            return []
        return [Partition(tuple(nodes), tuple(_call_of(node, reading.calls[node]) for node in nodes))]


def _call_of(node: fx.Node, call: OpCall | None) -> OpCall | None:
    return replace(call, function=of_lists(call.function)) if call and node.meta["is_of_lists"] else call


def _has_known_bits(op: _ListOp) -> bool:
    # Of 16-bit tensors on a GPU torch's kernels of lists differed in a rounding for four of nine optimizers.
    return not (op.value.is_cuda and op.value.dtype.itemsize == 2)


def _write_group(
    group: Sequence[_ListOp], kept: Sequence[_ListOp], numerics: str | None
) -> tuple[WholeFusion | None, list[Any]]:
    # The group, of the first position; and its tensors, of all positions.
    small = fx.Graph()
    given: dict[Any, fx.Node] = {}
    stand_ins: dict[Any, Any] = {op.items: op.number for op in group}
    for item in dict.fromkeys(item for op in group for item in op.args if isinstance(item, tuple | fx.Node)):
        if item not in stand_ins:
            stand_ins[item] = given[item] = small.placeholder(f"x{len(given)}")
            given[item].meta["val"] = (item[0] if isinstance(item, tuple) else item).meta["val"]
    for op in group:
        if op.number is None:
            arguments = tuple(stand_ins[item] if isinstance(item, tuple | fx.Node) else item for item in op.args)
            stand_ins[op.items] = made = small.call_function(op.target, arguments, dict(op.kwargs))
            made.meta["val"], made.meta["is_of_lists"] = op.value, op.source is not None and op.value.is_cuda
    results = tuple(stand_ins[op.items] for op in kept)
    small.output(results if len(results) > 1 else results[0])
    module = fx.GraphModule({}, small)
    _WholePass(numerics=numerics, fuel=Fuel(1))(module)
    return find_whole_fusion(module), [*given]


def _find_targets(
    op: _ListOp, inside: Collection[fx.Node], positions_of: Mapping[Any, set[int]]
) -> list[fx.Node] | None:
    # The arguments that the results are copied into, if nobody else reads those, nor another position does.
    found = []
    for position, item in enumerate(op.items):
        copy = _find_copy(item)
        if copy is None:
            return None
        target: Any = copy.args[0]
        own, value = target.meta.get("val"), item.meta["val"]
        if target.op != "placeholder" or not is_static(own) or _buffer(own) != _buffer(value):
            return None
        is_others = any(user is not copy and user not in inside for user in target.users)
        if is_others or positions_of.get(target, {position}) != {position}:
            return None
        found.append(target)
    return found


def _buffer(value: torch.Tensor) -> Buffer:
    return Buffer(tuple(value.shape), tuple(value.stride()), value.dtype)


def _find_copy(item: fx.Node) -> Any:
    copies = [user for user in item.users if user.target is _ATEN.copy_.default and user.args[1] is item]
    return copies[0] if len(copies) == 1 and not copies[0].users else None
