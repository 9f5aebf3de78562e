"""A traced function in ATen's ops, for calls of known sizes: there arrangements join groups.

A trace of torch's functions holds for all sizes, and where elements of ``cat(...)`` lie depends on them. So a function
that arranges is traced once more, for the sizes of a call: ops that torch composes of others are taken apart, and what
is put together is computed where it lies.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, Generic, TypeVar

import torch
from torch import fx

from fuser.errors import UnsupportedError
from fuser.fx.as_called import (
    DIFFERENTIATED_OTHERWISE,
    LAID_OUT,
    VALUES_OF_MATRICES,
    WARNS,
    WINDOWS,
    computes_idle_vectors,
    count_laid_out,
    writes_into_windows,
)
from fuser.fx.call_kinds import Number, asking_quietly, at_start, find_read, is_like, key_of, lift
from fuser.fx.effects import calls_torch_alone, is_random
from fuser.fx.fusion_node import FusionModule
from fuser.fx.idle_copies import drop_idle_copies
from fuser.fx.idle_views import drop_idle_views
from fuser.fx.nodes import is_static
from fuser.fx.passes import FusionPass
from fuser.fx.taking_turns import Turn, taking_turns
from fuser.launcher import make_check
from fuser.ops import IS_NUMBER, is_known
from fuser.process import is_of_current_handler
from fuser.record import NUMBER_TYPES
from fuser.route import Route, find_route, is_transformed, requires_grad
from fuser.warming.follow import alone, current, keeping_nothing, stand_in

__all__ = ["SizedGraph", "SizedGraphs", "arranges", "can_be_traced_again", "why_not_at_once"]

T = TypeVar("T")

# How many graphs are traced for a function: what comes later goes by the one for all sizes, as all calls do of a
# function that is so long that tracing it anew would be felt.
MAX_GRAPHS, MAX_NODES = 16, 512
# For how many values of a call's numbers.
MAX_NUMBERS = 3
_CALLS = frozenset(("call_function", "call_method", "call_module"))
# Of these no part is fused, nor of what torch makes them of.
_OPAQUE = frozenset(
    "matmul mm bmm mv dot addmm addbmm baddbmm einsum linear bilinear tensordot inner conv1d conv2d conv3d "
    "conv_transpose1d conv_transpose2d conv_transpose3d scaled_dot_product_attention dropout dim size shape stride "
    "getattr numel".split()
)
# Views, or copies to another layout.
_COPIES = frozenset(("contiguous", "reshape", "flatten"))
# What a tensor's memory is asked for.
_OF_MEMORY = frozenset("storage_offset data_ptr storage untyped_storage _version is_set_to resize_ set_".split())
# And autograd.
_OF_AUTOGRAD = frozenset("requires_grad_ requires_grad retain_grad register_hook detach_ grad backward is_leaf".split())


@dataclass(frozen=True, slots=True)
class SizedGraph(Generic[T]):
    """A function's graph for one kind of call."""

    # With fusion nodes, called with the function's tensors; and what was made of it.
    graph_module: fx.GraphModule
    made: T
    # Whether a call of its kind may go by it, where there is anything to ask.
    holds: Callable[..., bool] | None


def can_be_traced_again(module: fx.GraphModule) -> bool:
    """Whether a graph with fusion nodes calls torch alone, so that it may be traced once more, and is not too long."""
    left = _find_left(module)
    is_short = sum(node.op in _CALLS for node in module.graph.nodes) <= MAX_NODES
    return is_short and all(map(calls_torch_alone, left)) and not any(_name(node) in _OF_MEMORY for node in left)


def arranges(module: fx.GraphModule, *, draws_in_kernels: bool = False) -> bool:
    """Whether a graph with fusion nodes has something left that may join them where sizes are known.

    Args:
        module: the graph.
        draws_in_kernels: whether it is differentiated on a GPU, where dropouts join kernels.
    """
    left = _find_left(module)
    draws = draws_in_kernels and any("dropout" in _name(node) for node in left)
    return draws or any(_may_join(module, node) for node in left)


def _find_left(module: fx.GraphModule) -> list[fx.Node]:
    # Arithmetic on numbers, which the pass has marked, stays Python's.
    nodes = [node for node in module.graph.nodes if node.op in _CALLS]
    return [node for node in nodes if not node.meta.get(IS_NUMBER) and not _is_fusion(module, node)]


def why_not_at_once(nodes: fx.GraphModule) -> str:
    """Return why autograd is not to see one function in place of a graph, if so.

    Gradients of gradients compute it once more: it reads nothing but tensors, asks nothing of autograd itself, and has
    the gradient's bits.
    """
    if not all(isinstance(item, torch.Tensor) for item in find_read(nodes).values()):
        return "it calls modules"
    named = [_name(node) for node in nodes.graph.nodes if node.op not in {"placeholder", "get_attr", "output"}]
    asks = next((name for name in named if name in _OF_AUTOGRAD), "")
    if asks:
        return f"it asks autograd: {asks}"
    otherwise = next((name for name in named if name in DIFFERENTIATED_OTHERWISE), "")
    return f"torch differentiates {otherwise} otherwise where it traces" if otherwise else ""


def _may_join(module: fx.GraphModule, node: fx.Node) -> bool:
    # To ask torch for a trace takes a second, the first time.
    name = "slice" if node.target is operator.getitem else _name(node)
    if node.target is operator.getitem and isinstance(node.args[1], int | fx.Node):
        # One of several results, or a view; what tensors say.
        return isinstance(node.args[1], fx.Node)
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    if isinstance(node.target, type) or name in _OPAQUE or packet is None:
        # Tuples of torch's kinds are types; what has no operator is made of others, in Python.
        return not isinstance(node.target, type) and name not in _OPAQUE
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    if name not in _COPIES and all(map(_is_view, overloads)):
        return _is_computed(module, node)
    return any(is_known(overload) or _is_composed(overload) for overload in overloads)


def _is_view(overload: torch._ops.OpOverload) -> bool:
    kinds = [item.alias_info for item in overload._schema.returns]
    return any(kind is not None and not kind.is_write for kind in kinds)


def _is_composed(overload: torch._ops.OpOverload) -> bool:
    # Whether torch makes it of other operators, as it did of all that takes names of dimensions. Of numbers alone there
    # is no kernel.
    has_kernel, name = torch._C._dispatch_has_kernel_for_dispatch_key, str(overload._name)
    is_of_names = "dimname" in overload._overloadname
    return not is_of_names and torch._C._dispatch_has_kernel(name) and has_kernel(name, "CompositeImplicitAutograd")


def _is_computed(module: fx.GraphModule, node: fx.Node) -> bool:
    # Whether it looks at what a fusion node makes: at arguments kernels look as they lie.
    while node.op in {"call_function", "call_method"} and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return _is_fusion(module, node)


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _is_fusion(module: fx.GraphModule, node: fx.Node) -> bool:
    return node.op == "call_module" and isinstance(module.get_submodule(str(node.target)), FusionModule)


class _NeverTracedError(UnsupportedError):
    """There is no graph of any sizes."""


class SizedGraphs(Generic[T]):
    """The graphs of one function for calls of known sizes.

    Args:
        nodes: the function's trace, without fusion nodes.
        device_type: as in FusionPass.
        finish: makes of a graph, with fusion nodes, what is called; takes also torch's default dtype, if what the graph
            makes depends on it, and, where there is anything to ask, what says whether a call with such tensors may go
            by it: numbers are constants of it, and the tensors that the function holds may change.
    """

    def __init__(self, nodes: fx.GraphModule, device_type: str, finish: Callable[..., T]) -> None:
        self.nodes = nodes
        self.device_type = device_type
        self.finish = finish
        self._graphs: dict[tuple[Any, ...], SizedGraph[T]] = {}
        # How many may still be made.
        self._left = MAX_GRAPHS
        # Kinds of calls that could not be traced, and why; and why no more are.
        self._failed: dict[tuple[Any, ...], str] = {}
        self._end = ""
        self._held = find_read(nodes)

    def find(self, leaves: Sequence[Any]) -> SizedGraph[T] | None:
        """Return the graph for a call, which is made if there is none; None where the one for all sizes serves."""
        if current() is not None:
            return self._follow(leaves)
        if not (self._graphs or self._left):
            return None
        given = [*leaves, *self._held.values()]
        if not _is_plain(given):
            return None
        key = key_of(given)
        found = self._graphs.get(key)
        if found is None and self._left:
            with taking_turns():
                found = self._graphs.get(key) or self._add(key, leaves)
        # How torch dispatches is asked of held tensors, too: in a custom op it does so below autograd.
        return None if found is None or (found.holds is not None and not found.holds(*leaves)) else found

    def forgive(self, leaves: Sequence[Any]) -> None:
        """Take it for no failure of a trace that there was none for a call which fails by itself."""
        given = [*leaves, *self._held.values()]
        if self._failed and _is_plain(given) and (key := key_of(given)) in self._failed:
            del self._failed[key]
            self._left += 1

    def why_not(self, leaves: Sequence[Any]) -> str:
        """Return why such calls have no graph of their own, where torch was asked for one."""
        given = [*leaves, *self._held.values()]
        return (_is_plain(given) and self._failed.get(key_of(given))) or self._end

    def latest(self) -> SizedGraph[T] | None:
        """Return the graph that was made last."""
        return next(reversed(self._graphs.values()), None)

    def _follow(self, leaves: Sequence[Any]) -> SizedGraph[T] | None:
        if not all(is_static(item) or type(item) in NUMBER_TYPES for item in leaves):
            # Calls of a range of sizes, which are to find all that they need.
            self._left = 0
            return None
        with alone():
            return self.find([*map(stand_in, leaves)])

    def _add(self, key: tuple[Any, ...], leaves: Sequence[Any]) -> SizedGraph[T] | None:
        others = [known for known in self._graphs if is_like(known, key) and _sizes(known) == _sizes(key)]
        # A number that changes from call to call would be a constant of graphs without end.
        self._left = max(self._left - 1, 0) if len(others) < MAX_NUMBERS else 0
        if len(others) >= MAX_NUMBERS:
            self._end = "a number of it changes from call to call"
            return None
        try:
            made = self._graphs[key] = self._trace(leaves)
        except _NeverTracedError as error:
            self._left, self._end = 0, str(error)
            return None
        except Exception as error:  # Whatever the reason, the graph for all sizes serves, and says what is wrong.
            if is_of_current_handler(error):
                raise
            self._failed[key] = f"{type(error).__name__} in torch's tracing"
            return None
        if not self._left:
            self._end = f"it was called in {MAX_GRAPHS} other ways"
        return made

    def _trace(self, leaves: Sequence[Any]) -> SizedGraph[T]:
        from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415 - brings sympy

        numbers = {slot: item for slot, item in enumerate(leaves) if not isinstance(item, torch.Tensor)}
        held = [*self._held.values()]
        mode, given = FakeTensorMode(), [item for item in (*leaves, *held) if isinstance(item, torch.Tensor)]
        # Which require grad torch asks without a gradient, too: of what is multiplied as one matrix.
        plain = [*map(at_start, given)]
        function = lift(self.nodes, numbers, [*self._held])
        traced = _trace_plainly(function, mode, [*map(mode.from_tensor, plain)])
        drop_idle_copies(traced.graph)
        # What is written to is looked at again, for nobody: a group would return it for that.
        traced.graph.eliminate_dead_code(lambda node: node.is_impure() or is_random(node))
        if computes_idle_vectors(traced.graph):
            raise _NeverTracedError(VALUES_OF_MATRICES)
        module = _reading(traced, self.nodes, numbers, self._held)
        default = torch.get_default_dtype() if any(map(_is_of_default_dtype, module.graph.nodes)) else None
        FusionPass(device_type=self.device_type)(module)
        drop_idle_views(module.graph)
        check, texts = make_check(held, compares_sizes=True) if held else None, {k: repr(x) for k, x in numbers.items()}

        def holds(*leaves: Any) -> bool:
            # Zeros have signs.
            is_same = all(repr(leaves[slot]) == text for slot, text in texts.items())
            return is_same and (check is None or check(*held))

        asked = holds if numbers or held else None
        return SizedGraph(module, self.finish(module, default, asked), asked)


def _sizes(key: tuple[Any, ...]) -> list[Any]:
    # Of tensors alone.
    return [item for item in key if not isinstance(item, Number)]


def _is_plain(given: Sequence[Any]) -> bool:
    # Whether kernels serve a call of these as they are, and nobody differentiates.
    tensors = [item for item in given if isinstance(item, torch.Tensor)]
    if is_transformed() or not tensors:
        return False
    if torch.is_grad_enabled() and any(map(requires_grad, tensors)):
        return False
    routed = find_route(tensors)
    return routed.route is Route.KERNEL and all(map(operator.is_, routed.inputs, tensors))


def _trace_plainly(function: fx.GraphModule, mode: Any, fakes: Sequence[Any]) -> fx.GraphModule:
    # Not where calls do more than to compute tensors: they are to warn of what the trace warns of, to write, and to
    # return what autograd goes on from.
    from torch._subclasses.functional_tensor import (  # noqa: PLC0415 - brings sympy
        FunctionalTensor,
        FunctionalTensorMode,
        dispatch_functionalize,
    )
    from torch.fx.experimental.proxy_tensor import make_fx  # noqa: PLC0415 - as above

    does_more = False
    is_written: Callable[[Any], bool] = torch._functionalize_has_data_mutation  # type: ignore[attr-defined]

    def look(*tensors: Any) -> Any:
        nonlocal does_more
        before = [*map(_find_kind, tensors)]
        # Which prints nothing of its own with an error.
        made = function.forward(*tensors)
        does_more |= not _is_of_tensors(made, tensors)
        does_more |= any(is_written(item.elem) for item in tensors if isinstance(item, FunctionalTensor))
        # Such as t_ of an argument.
        does_more |= before != [*map(_find_kind, tensors)]
        return made

    needs_grad = torch.is_grad_enabled()
    with Turn(), warnings.catch_warnings(record=True) as said, torch.inference_mode(mode=False):
        warnings.simplefilter("always")
        # Without torch's decompositions for symbols, which compute otherwise than its kernels.
        with torch.set_grad_enabled(needs_grad), keeping_nothing(), asking_quietly(), mode:
            traced = make_fx(look)(*fakes)
            laid_out = count_laid_out(traced.graph)
            if any(map(_writes, traced.graph.nodes)):
                # To what it made itself, unless it writes to arguments.
                traced = make_fx(dispatch_functionalize(look, FunctionalTensorMode()))(*fakes)
    if said:
        raise _NeverTracedError(WARNS)
    if does_more or any(map(_writes, traced.graph.nodes)):
        raise _NeverTracedError("it does more than to compute tensors")
    if count_laid_out(traced.graph) > laid_out:
        raise _NeverTracedError(LAID_OUT)
    if writes_into_windows(traced.graph):
        raise _NeverTracedError(WINDOWS)
    return traced


def _find_kind(item: torch.Tensor) -> tuple[Any, ...]:
    return item.shape, item.stride(), item.storage_offset(), item.requires_grad


def _is_of_tensors(made: Any, given: Sequence[Any]) -> bool:
    # Whether that is what a function returns, in containers of Python's own, where autograd has no part in it: it goes
    # on from what is given, and from views of that.
    if type(made) in (list, tuple, dict):
        return all(_is_of_tensors(item, given) for item in (made.values() if isinstance(made, dict) else made))
    if not isinstance(made, torch.Tensor):
        return isinstance(made, NoneType | bool | int | float)
    source = made._base if made._is_view() else made
    return not made.requires_grad or any(source is item for item in given)


def _writes(node: fx.Node) -> bool:
    # The schema of older norms does not say so.
    schema = getattr(node.target, "_schema", None)
    return schema is not None and (schema.is_mutable or schema.name.endswith("batch_norm"))


def _reading(
    traced: fx.GraphModule, nodes: fx.GraphModule, numbers: Mapping[int, Any], held: Mapping[str, Any]
) -> fx.GraphModule:
    # The reverse, with the function's own arguments.
    graph, copies = fx.Graph(), {}
    every = [graph.node_copy(node) for node in nodes.graph.find_nodes(op="placeholder")]
    arguments = [node for slot, node in enumerate(every) if slot not in numbers]
    arguments += [graph.get_attr(name) for name in held]
    for node, argument in zip(traced.graph.find_nodes(op="placeholder"), arguments, strict=True):
        copies[node] = argument
        argument.meta["val"] = node.meta["val"]
    made = {str(node.target): getattr(traced, str(node.target)) for node in traced.graph.find_nodes(op="get_attr")}
    graph.output(graph.graph_copy(traced.graph, copies))
    return fx.GraphModule({**held, **made}, graph)


def _is_of_default_dtype(node: fx.Node) -> bool:
    # Whether floats come of no floats.
    made, given = ([item.meta.get("val") for item in items] for items in ((node,), node.all_input_nodes))
    return node.op == "call_function" and any(map(_is_continuous, made)) and not any(map(_is_continuous, given))


def _is_continuous(value: Any) -> bool:
    items = value if isinstance(value, list | tuple) else (value,)
    return any(isinstance(item, torch.Tensor) and (item.is_floating_point() or item.is_complex()) for item in items)
