"""What the nodes of a graph stand for in the call it is traced for, and what of that the trace relies on.

Python asks for a value where control flow needs one (``if x.dtype == ...``, ``range(n)``). Nodes are then evaluated on
fake tensors, which know everything of a tensor but its elements. What was asked becomes a fact: it is asked again of
the arguments of every later call.
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._functorch.eager_transforms import enable_inplace_requires_grad
from torch.utils import _pytree as pytree

from fuser.errors import TracingError
from fuser.fx.effects import calls_torch_alone
from fuser.process import is_of_current_handler
from fuser.warming.follow import keeping_nothing

__all__ = ["Examples", "Facts", "find_facts", "find_kind", "is_kind_question", "is_none", "untraced_modules"]

# Questions about a tensor whose answers are no numbers to calculate with.
_KIND_QUESTIONS = frozenset(
    "dtype device layout requires_grad is_cuda is_cpu is_meta is_sparse is_quantized is_nested is_floating_point "
    "is_complex is_signed get_device is_conj is_neg element_size".split()
)
_DIM_QUESTIONS = frozenset(("ndim", "dim", "ndimension"))
# Questions about the object and its memory, which fake tensors have not.
_OBJECT_QUESTIONS = frozenset(
    "data_ptr untyped_storage storage is_set_to is_shared is_pinned _version find_kind".split()
)
# What else is the same for all tensors of a kind, shape and strides.
_LAYOUT_QUESTIONS = frozenset(
    "shape size stride numel nelement is_contiguous nbytes itemsize len suggest_memory_format".split()
)
# Views, of which several are often looped over: cheaper to make again than a graph for each shape.
_VIEWS = frozenset(
    "chunk split split_with_sizes tensor_split hsplit vsplit dsplit unbind narrow select t transpose permute unsqueeze "
    "squeeze".split()
)
# Of these the sizes say how many dimensions a result has, and with that its dtype beside others.
_OF_ANY_DIMS = frozenset(
    "squeeze squeeze_ cov corrcoef solve linalg_solve solve_ex linalg_solve_ex lstsq linalg_lstsq".split()
)
# What gives a tensor another shape or other strides, in place.
_TURNS = frozenset("as_strided_ resize_ resize_as_ set_ squeeze_ swapaxes_ swapdims_ t_ transpose_ unsqueeze_".split())


def is_kind_question(name: str) -> bool:
    """Whether an attribute or method of tensors is settled when it is asked for: it is seldom arithmetic."""
    return name in _KIND_QUESTIONS or name in _DIM_QUESTIONS


def is_none(value: Any, name: str) -> bool:
    """Whether an attribute is None."""
    return getattr(value, name) is None


def find_kind(value: Any) -> type:
    """Return the class of a tensor; a fake one stands for a plain one."""
    return torch.Tensor if isinstance(value, torch._subclasses.FakeTensor) else type(value)


@dataclass(frozen=True, slots=True)
class Unknown:
    """Stands for a value that only the elements of tensors decide, or that fake tensors cannot tell."""

    # What torch says of the call that it comes from, where that is wrong.
    refusal: str = ""


class Examples:
    """Values of the nodes of a graph under construction, worked out in its order when they are asked for."""

    def __init__(self, graph: fx.Graph, values: Sequence[Any], targets: Mapping[str, Any]) -> None:
        self._graph = graph
        self._values = values
        self._given = iter(values)
        self._targets = targets
        self._known: dict[fx.Node, Any] = {}
        # Tensors that are there before the call, as they are.
        self._given_tensors: dict[fx.Node, torch.Tensor] = {}

    @functools.cached_property
    def mode(self) -> Any:
        """The mode that the fake tensors belong to."""
        from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415 - most traces need none

        fakes = [item.fake_mode for item in self._values if isinstance(item, torch._subclasses.FakeTensor)]
        return fakes[0] if fakes else FakeTensorMode(allow_non_fake_inputs=True)

    def find(self, node: fx.Node) -> Any:
        """Return a node's value: tensors are fake; an ``Unknown`` where it cannot be said."""
        if node not in self._known:
            with torch._C.DisableTorchFunction(), self.mode, keeping_nothing(), untraced_modules():
                for other in self._graph.nodes:
                    if other not in self._known and other.op != "output":
                        self._known[other] = self._evaluate(other)
                    if other is node:
                        break
        return self._known[node]

    def given(self, node: fx.Node) -> Any:
        """Return the argument, or the function's own tensor, that a node stands for: as it is, and not fake."""
        if node.op == "get_attr":
            return self._targets[str(node.target)]
        return self._values[list(self._graph.find_nodes(op="placeholder")).index(node)]

    def _evaluate(self, node: fx.Node) -> Any:
        if node.op in {"placeholder", "get_attr"}:
            value = next(self._given) if node.op == "placeholder" else self._targets[str(node.target)]
            is_tensor = isinstance(value, torch.Tensor)
            is_real = is_tensor and not isinstance(value, torch._subclasses.FakeTensor)
            if is_tensor:
                self._given_tensors[node] = value
            try:
                return self.mode.from_tensor(value) if is_real else value
            except Exception as error:  # Of a kind that has no fake one.
                if is_of_current_handler(error):
                    raise
                is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(value)
                return _make_like(value) if is_wrapped else Unknown()
        unknown = [value for source in node.all_input_nodes if isinstance(value := self._known[source], Unknown)]
        if unknown:
            return unknown[0]
        tensors = [source for source in node.all_input_nodes if isinstance(self._known[source], torch.Tensor)]
        if tensors and _name_question(node) in _OBJECT_QUESTIONS:
            # What is computed is nowhere yet.
            if not all(source in self._given_tensors for source in tensors):
                return Unknown()
            with torch._subclasses.fake_tensor.unset_fake_temporarily():
                return self._call(node, {**self._known, **self._given_tensors})
        return self._call(node, self._known)

    def _call(self, node: fx.Node, known: Mapping[fx.Node, Any]) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
        try:
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            function: Any = self._targets[str(node.target)] if node.op == "call_module" else node.target
            if isinstance(function, torch.nn.modules.batchnorm._NormBase) and function.training:
                # All but what it writes to.
                given: Any = args[0]
                return torch.nn.functional.batch_norm(given, None, None, function.weight, function.bias, True)
            return function(*args, **kwargs)
        except Exception as error:
            if is_of_current_handler(error):
                raise
            return Unknown(_tell_refusal(error))


def _make_like(value: torch.Tensor) -> torch.Tensor:
    # A fake tensor, of the mode around, in place of a view in torch.func's transforms, of which torch makes none.
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    with enable_inplace_requires_grad(True):
        return made.requires_grad_(value.requires_grad)


def _tell_refusal(error: Exception) -> str:
    # Fake tensors have exceptions of their own for what they cannot tell.
    is_wrong = type(error).__module__ == "builtins" and not isinstance(error, NotImplementedError)
    return f"{type(error).__name__}: {error}" if is_wrong else ""


@contextmanager
def untraced_modules() -> Iterator[None]:
    """Call modules as they are: while a function is traced, fx has replaced these two."""
    kind: Any = torch.nn.Module
    traced = kind.__call__, kind.__getattr__
    kind.__call__, kind.__getattr__ = fx._symbolic_trace._orig_module_call, fx._symbolic_trace._orig_module_getattr
    try:
        yield
    finally:
        kind.__call__, kind.__getattr__ = traced


@dataclass(frozen=True, slots=True)
class Facts:
    """Answers that a trace relies on."""

    # Takes the tensors and numbers of a call.
    ask: Callable[..., tuple[Any, ...]]
    answers: tuple[Any, ...]
    # Whether they hold for all calls with such tensors, whatever the numbers.
    is_of_tensors: bool

    def hold(self, leaves: Sequence[Any]) -> bool:
        """Whether the trace may serve a call with these tensors and numbers."""
        try:
            return bool(self.ask(*leaves) == self.answers)
        except Exception as error:  # What was asked of the others cannot be asked of these: a third size of a matrix.
            if is_of_current_handler(error):
                raise
            return False


def find_facts(
    graph: fx.Graph, asked: Sequence[fx.Node], examples: Examples, targets: Mapping[str, Any], leaves: Sequence[Any]
) -> Facts | None:
    """Return the facts behind the values that were asked for; None if there were none."""
    if not asked:
        return None
    writer = _FactWriter(graph, examples)
    for node in asked:
        writer.add(node)
    ask = fx.GraphModule(dict(targets), writer.finish(), "Facts").forward
    try:
        return Facts(ask, ask(*leaves), writer.is_of_tensors)
    except Exception as error:
        if is_of_current_handler(error):
            raise
        raise TracingError(f"fuse cannot repeat what control flow asks of the arguments: {error}") from None


class _FactWriter:
    """Writes a graph that asks again: of the arguments directly where that is possible."""

    def __init__(self, graph: fx.Graph, examples: Examples) -> None:
        self.graph = fx.Graph()
        self.is_of_tensors = True
        self._examples = examples
        self._copies: dict[fx.Node, fx.Node] = {}
        self._answers: dict[Any, fx.Node] = {}
        for node in graph.nodes:
            if node.op == "placeholder":
                self._copies[node] = self.graph.node_copy(node)

    def add(self, node: fx.Node) -> None:
        if self._is_repeatable(node):
            self._answer(node, _tell, (self._copy(node),))
            # The type of a number among the arguments is one with the kind of call.
            is_type = node.target is type and node.all_input_nodes[0].op == "placeholder"
            self.is_of_tensors = self.is_of_tensors and (is_type or all(map(self._is_of_layouts, _find_sources(node))))
            return
        # It is about a tensor that is computed: all that its kind, or its shape, may come from.
        name = _name_question(node)
        what = "kind" if name in _KIND_QUESTIONS else "dims" if name in _DIM_QUESTIONS else "sizes"
        sources = _find_sources(node)
        if any(map(_may_have_any_dims, sources)):
            what = "sizes"
        for leaf in filter(_is_leaf, sources):
            self.is_of_tensors = self.is_of_tensors and (self._is_tensor(leaf) or what == "kind")
            self._answer((leaf, what), _describe, (self._copy(leaf), what))

    def finish(self) -> fx.Graph:
        self.graph.output(tuple(self._answers.values()))
        return self.graph

    def _answer(self, key: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if key not in self._answers:
            self._answers[key] = self.graph.call_function(function, args)

    def _copy(self, node: fx.Node) -> fx.Node:
        if node not in self._copies:
            for source in node.all_input_nodes:
                self._copy(source)
            self._copies[node] = self.graph.node_copy(node, self._copies.__getitem__)
        return self._copies[node]

    def _is_tensor(self, leaf: fx.Node) -> bool:
        return isinstance(self._examples.find(leaf), torch.Tensor)

    def _is_of_layouts(self, node: fx.Node) -> bool:
        # Whether a node is the same for tensors that are alike, if all that it is made of is.
        if _is_leaf(node):
            return self._is_tensor(node)
        is_told = _name_question(node) in _KIND_QUESTIONS | _DIM_QUESTIONS | _LAYOUT_QUESTIONS
        return is_told or _is_view(node) or not any(map(self._is_tensor, node.all_input_nodes))

    def _is_repeatable(self, node: fx.Node) -> bool:
        # Numbers and the like, of arguments, tensors that the function holds, and views of those, as they are given.
        stack, seen = [node], set()
        while stack:
            current = stack.pop()
            if _is_turned(current):
                return False
            if current in seen or _is_leaf(current):
                continue
            seen.add(current)
            found = pytree.tree_leaves(self._examples.find(current))
            if any(isinstance(item, torch.Tensor) for item in found) and not _is_view(current):
                return False
            stack += current.all_input_nodes
        return True


def _name_question(node: fx.Node) -> str:
    if node.target is getattr:
        return str(node.args[1])
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        return all(type(item) in _PLACES for item in index)
    name = _name_question(node)
    return name in _VIEWS and (node.op == "call_method" or node.target is getattr(torch, name))


def _is_turned(node: fx.Node) -> bool:
    return any(_name_question(user) in _TURNS for user in node.users)


def _may_have_any_dims(node: fx.Node) -> bool:
    is_users = node.op == "call_function" and not calls_torch_alone(node)
    return is_users or _is_turned(node) or (not _is_leaf(node) and _name_question(node) in _OF_ANY_DIMS)


_PLACES = (int, slice, types.EllipsisType, types.NoneType)


def _is_leaf(node: fx.Node) -> bool:
    return node.op in {"placeholder", "get_attr"}


def _find_sources(node: fx.Node) -> list[fx.Node]:
    # The node, and all that it is made of, each once.
    stack, seen = [node], {node: None}
    while stack:
        for source in stack.pop().all_input_nodes:
            if source not in seen:
                seen[source] = None
                stack.append(source)
    return list(seen)


def _tell(value: Any) -> Any:
    # Symbols, of a warm-up, as what they stand for.
    kind = int if isinstance(value, torch.SymInt) else type(value)
    if isinstance(value, torch.SymBool):
        kind, value = bool, bool(value)
    # Comparable: 1, 1.0 and True are equal, zeros too, and NaN is not.
    return kind, repr(value) if isinstance(value, float | complex) else value


def _describe(value: Any, what: str) -> Any:
    if not isinstance(value, torch.Tensor):
        return type(value) if what == "kind" else _tell(value)
    found = (value.dtype, value.device, value.layout, value.requires_grad, torch.is_grad_enabled(), value.dim())
    return (*found, value.shape, value.stride()) if what == "sizes" else found
