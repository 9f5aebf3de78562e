"""Traces a Python function to an FX graph, and loses nothing that torch.fx would: writes, modes, tensors it holds.

Tensors and numbers among the arguments become symbols, all other arguments stay what they are. Tensors that the
function finds elsewhere are read when the graph runs, and every torch function is part of the graph, also one that
makes a tensor of nothing (``torch.rand(3)``). Where Python needs a value, that of the call at hand is settled: see
``examples.py``.
"""

from __future__ import annotations

import inspect
import linecache
import os
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody uses
from torch import fx
from torch._prims_common import suggest_memory_format
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.immutable_collections import immutable_dict
from torch.utils import _pytree as pytree

from fuser import errors
from fuser.dtypes import plain_number
from fuser.errors import FuserError, TracingError, describe_type
from fuser.fx.arguments import NUMBER, Key, is_as_given, name_leaves, rebuild
from fuser.fx.examples import Examples, Facts, Unknown, find_facts, find_kind
from fuser.fx.finished import finish_graph
from fuser.fx.guards import Guards, find_guards, find_modes
from fuser.fx.intercept import (
    MATH,
    Intercept,
    builtins_ask_symbols,
    caches_keep_no_symbols,
    checks_ask_symbols,
    math_takes_symbols,
    sizes_may_be_symbols,
)
from fuser.fx.nodes import is_size
from fuser.fx.opened import OPENED, opened
from fuser.fx.symbols import IN_PLACE, SequenceSymbol, Symbol, is_symbol, is_tensor
from fuser.fx.taking_turns import Turn, taking_turns
from fuser.fx.writes import split_batch_norm
from fuser.ops import (
    IS_NUMBER,
    KNOWN,
    Known,
    find_question,
    find_settled,
    has_hooks,
    is_constant,
    needs_known,
    note_answer,
)
from fuser.warming.follow import keeping_nothing

__all__ = ["Traced", "trace"]


@dataclass(frozen=True, slots=True)
class Traced:
    """A graph, and when it stands for the function."""

    graph_module: fx.GraphModule
    # What the function reads besides its arguments.
    guards: Guards
    # What control flow asked of them; None if nothing.
    facts: Facts | None

    def holds(self, leaves: Sequence[Any]) -> bool:
        """Whether a call with these tensors and numbers, of the same key, may go by this graph."""
        return self.guards.holds() and (self.facts is None or self.facts.hold(leaves))


def trace(
    function: Callable[..., Any], call: Callable[..., Any], key: Key, leaves: Sequence[Any] | None, names: list[str]
) -> Traced:
    """Trace a function for one kind of call.

    Args:
        function: a Python function or a bound method.
        call: calls it, with the arguments that the key stands for.
        key: of the call, see ``sort_arguments``.
        leaves: its tensors and numbers; None if there is no call yet: Python then cannot ask for their values.
        names: of the function's parameters.

    Raises:
        TracingError: what the function does cannot be in a graph; shows the line.
    """
    with taking_turns():
        return _trace(function, lambda: _Tracer(function, call, key, leaves, names), key)


def _trace(function: Callable[..., Any], make_tracer: Callable[[], _Tracer], key: Key) -> Traced:
    # A method that makes what it needs on its first use changes something once.
    replaced, grad_mode = "", torch.is_grad_enabled()
    for is_last in (False, True):
        try:
            guards = find_guards(function, key)
        except TracingError:
            # The first attempt left a symbol inside something new.
            break
        tracer = make_tracer()
        try:
            graph = tracer.run(guards)
        except Exception as error:
            place = _find_place(error, inspect.unwrap(function).__code__)
            replaced = guards.remove_proxies()
            if isinstance(error, TracingError) or (not isinstance(error, FuserError) and _is_of_tracing(error)):
                # The function did not come to where it switches back.
                torch.set_grad_enabled(grad_mode)
                reason = error.reason if isinstance(error, TracingError) else _describe_failure(error)
                if replaced and "becomes another" not in reason:
                    reason += f" ({replaced!r} was assigned to)"
                raise TracingError(reason, *place) from None
            raise
        replaced = guards.remove_proxies()
        if replaced:
            break
        if guards.holds() and (is_last or not guards.find_added()):
            return tracer.finish(graph, replace(guards, owners=(), cached_methods=()))
        replaced = guards.find_changed()
    what = repr(replaced) if replaced else "something it does not own"
    raise TracingError(_refuse_change(function, what), *_place_of(inspect.unwrap(function).__code__, None))


class _Tracer(fx.Tracer):
    """Traces one function for one key."""

    def __init__(
        self, function: Callable[..., Any], call: Callable[..., Any], key: Key, leaves: Any, names: list[str]
    ) -> None:
        # Those of ``math`` are dealt with in ``run``; its annotation takes a tuple of one for any tuple.
        super().__init__(autowrap_modules=(), autowrap_functions=tuple(MATH.values()))  # type: ignore[arg-type]
        self._function, self._call = function, call
        self._key = key
        self._leaves = leaves
        self._names = names
        self._modes = find_modes()
        self._turn = Turn()
        self.examples: Examples | None = None
        self._generators: Sequence[torch.Generator] = ()
        # Whether what is known of the arguments of the module that is called is all that it may ask.
        self._knows_arguments = False
        self._matches_sequences = False
        # Nodes whose values Python asked for.
        self._asked: dict[fx.Node, None] = {}
        # Tensors and modules of the graph by their names there, and the names of all that a module may use.
        self.targets: dict[str, Any] = {}
        self._paths: dict[int, str] = {}
        self._held: dict[int, Symbol] = {}
        # Buffers that were read, in the modules that have them.
        self._buffers: dict[tuple[int, str], tuple[torch.nn.Module, torch.Tensor]] = {}
        owner = getattr(function, "__self__", None)
        if isinstance(owner, torch.nn.Module):
            for part in (owner.named_modules(), owner.named_parameters(), owner.named_buffers()):
                self._paths.update((id(item), name) for name, item in part)
            for module in owner.modules():
                self._note_buffers(module)

    def run(self, guards: Guards) -> fx.Graph:
        """Trace; a module's buffers are left as they were: ``self.count += 1`` would put a proxy there."""
        plain: Any = inspect.unwrap(self._function)
        self._generators = guards.find_generators()
        self._matches_sequences = guards.matches_sequences
        seeds = [item.initial_seed() for item in self._generators]
        try:
            with (
                self._turn,
                Intercept(self),
                keeping_nothing(),
                builtins_ask_symbols(guards),
                checks_ask_symbols(),
                math_takes_symbols(),
                sizes_may_be_symbols(guards),
                caches_keep_no_symbols(guards),
            ):
                graph = self.trace(getattr(plain, "__func__", plain))
            for (_, name), (module, _) in self._buffers.items():
                found: Any = module._buffers[name]
                if is_symbol(found) and _written(found.node).op != "get_attr":
                    raise TracingError(f"fuse cannot trace that the buffer {name!r} becomes another tensor")
            if [item.initial_seed() for item in self._generators] != seeds:
                raise TracingError("fuse cannot trace that a generator is seeded: later calls would not do it")
        finally:
            for (_, name), (module, before) in self._buffers.items():
                module._buffers[name] = before
        return graph

    def finish(self, graph: fx.Graph, guards: Guards) -> Traced:
        """Return the graph with what it needs to run."""
        facts = None
        if self.examples is not None and self._leaves is not None:
            facts = find_facts(graph, list(self._asked), self.examples, self.targets, self._leaves)
        # Symbols hold the tracer, and it them: the call's tensors would wait for the garbage collector.
        self.examples = self._leaves = None
        finish_graph(graph, self._asked)
        # Whoever loads the module reads its code with a tracer of torch's: this one is for one call.
        graph._tracer_cls = None
        # Calls go by the graph as a flat function: the module's own code is written when somebody asks for it.
        module = _LazyGraphModule(dict(self.targets), graph, self._function.__name__)
        return Traced(module, guards, facts)

    # --- what fx asks of a tracer
    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:  # noqa: ARG002
        proxies = []
        for kind, name in name_leaves(self._key, self._names):
            proxy = self.create_proxy("placeholder", name, (), {})
            if kind is NUMBER:
                proxy.node.meta[IS_NUMBER] = True
            proxies.append(proxy)
        if self._leaves is not None:
            self.examples = Examples(self.graph, self._leaves, self.targets)
        args, keywords = rebuild(self._key, iter(proxies))
        given = rebuild(self._key, iter(proxies))
        # Without annotations, which fx would write into the graph's code.
        return lambda: self._call_as_given(args, keywords, given), []

    def _call_as_given(self, args: Any, keywords: Any, given: Any) -> Any:
        # Calls the function, which may change nothing of its arguments: ``given`` is a copy of them.
        made = self._call(*args, **keywords)
        arguments = [*zip(self._names, args, given[0], strict=False), ("arguments", keywords, given[1])]
        for name, now, before in arguments:
            if not is_as_given(now, before, _is_same_value):
                raise TracingError(_refuse_change(self._function, f"its argument {name!r}"))
        return made

    def proxy(self, node: fx.Node) -> fx.Proxy:
        # Otherwise nobody asks, and to find values takes time.
        is_sequence = self._matches_sequences and isinstance(self.find_value(node), tuple | list)
        return (SequenceSymbol if is_sequence else Symbol)(node, self)

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        if kind != "output" and find_modes() != self._modes:
            raise TracingError(
                "fuse cannot trace a change of grad mode or autocast, as a torch.autograd.Function makes one: make it "
                "around the call, or in a function that torch.fx.wrap hides"
            )
        return super().create_node(kind, *args, **kwargs)

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **options: Any) -> Any:
        if kind == "call_method" and target in {"to", "type_as"} and len(args) == 2 and not kwargs:
            target, args = self._name_dtype(target, *args)
        # Which dimensions a kernel reduces is no number that it could be given.
        dims = find_settled(target, args, kwargs) if kind in {"call_function", "call_method"} else []
        asked = {id(item): item for item in pytree.tree_leaves(dims) if is_symbol(item)}
        if asked and self.examples is not None:
            known = {key: self.settle_if_known(item) for key, item in asked.items()}
            args, kwargs = pytree.tree_map(lambda item: known.get(id(item), item), (args, kwargs))
        if kind in {"call_function", "call_method"} and needs_known(target):
            self._note_known(target, [item for item in pytree.tree_leaves((args, kwargs)) if is_symbol(item)])
        if kind in {"call_function", "call_method"}:
            self._settle_answer(*find_question(target, args, kwargs))
        made = split_batch_norm(self.create_proxy, args, kwargs) if target is F.batch_norm else None
        if kind == "call_function" and self.examples is not None and _is_opened(target):
            made = opened(target)(*args, **kwargs)
        return super().create_proxy(kind, target, args, kwargs, *rest, **options) if made is None else made

    def _name_dtype(self, target: str, x: Any, other: Any) -> tuple[str, tuple[Any, ...]]:
        # ``x.to(y)`` with y on x's device is a conversion to a dtype, on which the trace relies.
        is_of_tensors = all(is_symbol(item) and isinstance(self.find(item), torch.Tensor) for item in (x, other))
        return ("to", (x, other.dtype)) if is_of_tensors and x.device == other.device else (target, (x, other))

    def _note_known(self, target: Any, symbols: Sequence[Symbol]) -> None:
        # Which form of an op a call is depends on it; sizes do not count, nor does the layout but for one.
        for symbol in symbols:
            value = self.find(symbol)
            if isinstance(value, torch.Tensor):
                _ = symbol.dtype, symbol.device, symbol.ndim
                is_laid_out = "group_norm" in getattr(target, "__name__", "") and value.device.type == "cpu"
                if is_laid_out and value.dim() in (4, 5):
                    asked: Any = self.create_proxy("call_function", suggest_memory_format, (symbol,), {})
                    self.settle_if_known(asked)
                with torch._C.DisableTorchFunction():
                    symbol.node.meta[KNOWN] = Known.of(value)

    def _settle_answer(self, question: Any = None, *items: Any) -> None:
        # Which form of an op a call is depends on it.
        values = [self.find(item) if is_symbol(item) else item for item in items]
        if any(map(is_symbol, items)) and all(map(is_constant, values)):
            asked: Any = self.create_proxy("call_function", question, items, {})
            found = self.settle(asked, "", "")
            note_answer(found, question, *(item.node if is_symbol(item) else item for item in items))

    def create_arg(self, a: Any) -> Any:
        if is_symbol(a):
            return a.node
        if isinstance(a, torch.Tensor):
            return self.hold(a).node
        if isinstance(a, torch.Generator):
            if not any(a is item for item in self._generators):
                raise TracingError(
                    "later calls would go on with a generator that is made in the function: make it outside"
                )
            return self.hold(a).node
        if isinstance(a, dict):
            return self._create_dict(a)
        try:
            made = super().create_arg(plain_number(a))
        except NotImplementedError:
            # Meshes of devices and placements, of which fx knew nothing before torch 2.13; they never change.
            if type(a).__module__.startswith("torch.distributed."):
                return self.hold(a).node
            raise TracingError(
                f"fuse cannot put a value of type {describe_type(a)} into a graph, as a result or as an argument: a "
                "graph has tensors, numbers, texts, and lists, tuples, dicts and dataclasses of them"
            ) from None
        if isinstance(made, fx.Node) and made.op == "get_attr":
            # What fx cannot write into code, as the spec of a tree: it has put it into a root of its own.
            self.targets[str(made.target)] = a
        return made

    def _create_dict(self, given: Any) -> Any:
        # fx makes a plain dict of whatever is one, and takes no symbols as keys.
        items = {self.settle(key, "a key", "a number") if is_symbol(key) else key: x for key, x in given.items()}
        if type(given) in {dict, immutable_dict}:
            return super().create_arg(items)
        if type(given) is OrderedDict:
            return self.create_proxy("call_function", OrderedDict, (items,), {}).node
        if is_dataclass(given):
            fields_given = {item.name: getattr(given, item.name) for item in fields(given)}
            return self.create_proxy("call_function", type(given), (), fields_given).node
        raise TracingError(f"fuse cannot make a {type(given).__name__} in a graph: make a dict")

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:  # noqa: ARG002
        return self.hold(attr_val) if self._turn and is_tensor(attr_val) else attr_val

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        # What calls one function with its own tensors is that function; without a momentum a batch norm's depends on
        # how many batches there were. Hooks are called in every call.
        is_open = type(m) in _OPEN or (type(m) in _OPEN_IF_KNOWN and self._knows_arguments)
        is_open = is_open and getattr(m, "momentum", 0.1) is not None
        is_script = isinstance(m, torch.jit.ScriptModule)
        is_called = is_script or has_hooks(m) or (not is_open and super().is_leaf_module(m, module_qualified_name))
        # One that the function makes is made again in each call: the graph has what it computes, not it.
        return is_called and not any(map(_holds_symbols, m.modules()))

    def call_module(self, m: torch.nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._turn:
            return forward(*args, **kwargs)
        # Only then: to find a value runs hooks of earlier modules once more.
        symbols = [item for item in (*args, *kwargs.values()) if type(m) in _OPEN_IF_KNOWN and is_symbol(item)]
        self._knows_arguments = all(isinstance(self.find(item), torch.Tensor) for item in symbols)
        return super().call_module(m, forward, args, kwargs)

    def path_of_module(self, mod: torch.nn.Module) -> str:
        self._note_buffers(mod)
        path = self._paths.setdefault(id(mod), f"{type(mod).__name__.lower()}_{len(self._paths)}")
        if self.is_leaf_module(mod, path):
            self.targets[path] = mod
        return path

    # --- tensors and values
    def _note_buffers(self, module: torch.nn.Module) -> None:
        for name, buffer in module._buffers.items():
            if buffer is not None and is_tensor(buffer):
                self._buffers.setdefault((id(module), name), (module, buffer))

    def hold(self, found: Any) -> Symbol:
        """Return the symbol of a tensor, a generator, a mesh that is no argument; the graph reads it when it runs."""
        if id(found) not in self._held:
            path = self._paths.setdefault(id(found), f"_tensor_{len(self.targets)}")
            self.targets[path] = found
            made: Any = self.create_proxy("get_attr", path, (), {})
            self._held[id(found)] = made
        return self._held[id(found)]

    def find(self, proxy: Symbol) -> Any:
        """Return what is known of a symbol's value: fake tensors, numbers; None without a call."""
        return self.find_value(proxy.node)

    def find_value(self, node: fx.Node) -> Any:
        """Return what is known of a node's value, see ``find``."""
        return None if self.examples is None else self.examples.find(node)

    def check_attribute(self, proxy: Symbol, name: str) -> None:
        """Raise AttributeError, as what it stands for does, for a symbol that has no attribute of this name.

        Users may give their tensors attributes: whether they did is relied on.
        """
        node = proxy.node
        if node.meta.get(IS_NUMBER):
            have = [hasattr(kind, name) for kind in (int, float, complex)]
            kind = self.find_class(proxy) if any(have) and not all(have) else int
            if not hasattr(kind, name):
                raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")
            return
        is_given = node.op in {"placeholder", "get_attr"}
        if self.examples is None or not (is_given or _makes_new(node)):
            return
        value = self.examples.given(node) if is_given else self.examples.find(node)
        if not isinstance(value, torch.Tensor):
            return
        if is_given:
            asked: Any = self.create_proxy("call_function", hasattr, (proxy, name), {})
            self._asked[asked.node] = None
        if not hasattr(value, name):
            raise AttributeError(f"'Tensor' object has no attribute {name!r}")

    @staticmethod
    def has_elements(value: Any) -> bool:
        return isinstance(value, torch.Tensor | Unknown)

    def find_class(self, proxy: Symbol, kinds: Any = ()) -> type:
        """Return the class that ``isinstance`` sees; if all tensors are of these kinds, just ``torch.Tensor``."""
        node = proxy.node
        if node.op == "get_attr":
            return type(self.targets[str(node.target)])
        if self.examples is None:
            return fx.Proxy if node.meta.get(IS_NUMBER) or is_size(node) else torch.Tensor
        value = self.examples.find(node)
        is_given = node.op == "placeholder" and isinstance(value, torch.Tensor)
        if self.has_elements(value) and (not is_given or issubclass(torch.Tensor, kinds)):
            return torch.Tensor
        kind: Any = self.create_proxy("call_function", find_kind if is_given else type, (proxy,), {})
        settled: type = self.settle(kind, "type()", "a number")
        return settled

    def settle(self, proxy: Symbol, what: str, instead: str) -> Any:
        """Return a symbol's value in the call at hand, which the trace relies on from now on.

        Raises:
            TracingError: it depends on the elements of tensors, or there is no call.
        """
        if self.examples is None:
            raise TracingError("control flow depends on arguments: call the function, or warmup() with examples, first")
        value = self.examples.find(proxy.node)
        leaves = pytree.tree_leaves(value)
        refusal = next((item.refusal for item in leaves if isinstance(item, Unknown) and item.refusal), "")
        if refusal:
            raise TracingError(
                f"{what} depends on a call that torch refuses, or that needs elements, which a trace has not: {refusal}"
            )
        if any(map(self.has_elements, leaves)):
            raise TracingError(
                f"{what} makes Python wait for its elements, which a trace has not: use {instead}, or leave this "
                "part out of the fused function"
            )
        self._asked[proxy.node] = None
        return value

    def settle_if_known(self, proxy: Symbol) -> Any:
        """Return a symbol's value where there is one, else the symbol."""
        value = self.find(proxy)
        return proxy if value is None or self.has_elements(value) else self.settle(proxy, "", "")

    def settle_parts(self, proxy: Symbol) -> Sequence[Any]:
        """Return the value of a symbol that stands for several, which may be tensors: how many is relied on."""
        value = self.find(proxy)
        if not isinstance(value, tuple | list):
            raise TracingError(f"fuse cannot tell how many values {proxy.node.name} has; unpack them: a, b = ...")
        count: Any = self.create_proxy("call_function", len, (proxy,), {})
        self.settle(count, "len()", "a number")
        return value

    def to_bool(self, obj: fx.Proxy) -> bool:
        return bool(obj)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:  # noqa: ARG002
        raise TracingError("fuse cannot iterate over a tensor: use x.unbind(), or an op on the whole tensor")


_OPEN = (
    torch.nn.LayerNorm, torch.nn.RMSNorm, torch.nn.MSELoss, torch.nn.L1Loss, torch.nn.SmoothL1Loss,
    torch.nn.HuberLoss, torch.nn.BCELoss, torch.nn.BCEWithLogitsLoss, torch.nn.LogSigmoid, torch.nn.KLDivLoss,
    torch.nn.PoissonNLLLoss, torch.nn.HingeEmbeddingLoss, torch.nn.SoftMarginLoss, torch.nn.MarginRankingLoss,
    torch.nn.MultiLabelSoftMarginLoss, torch.nn.CosineEmbeddingLoss, torch.nn.TripletMarginLoss,
)  # fmt: skip
# These look at what they are given.
_OPEN_IF_KNOWN = (
    torch.nn.GroupNorm, torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.CrossEntropyLoss,
    torch.nn.NLLLoss,
)  # fmt: skip


def _holds_symbols(module: torch.nn.Module) -> bool:
    held = vars(module)
    parts = (held, held.get("_parameters", {}), held.get("_buffers", {}))
    return any(is_symbol(item) for part in parts for item in part.values())


def _is_opened(target: Any) -> bool:
    return isinstance(target, types.FunctionType) and target in OPENED


def _is_of_tracing(error: Exception) -> bool:
    # Not an exception of the user's own: fx refused, or C code met a symbol.
    if isinstance(error, fx.proxy.TraceError | NotImplementedError):
        return True
    return isinstance(error, TypeError | RuntimeError | ValueError | AttributeError) and any(
        word in str(error)
        for word in ("Proxy", "got Symbol", "'Symbol'", "symbols.Symbol", "_SymbolAttribute", "symbolic")
    )


def _describe_failure(error: Exception) -> str:
    # What C code, torch's transforms and NumPy say of a symbol tells nobody what to do; some of it ends in a full stop.
    said = str(error).rstrip(".")
    return (
        f"fuse cannot trace this: {said}; leave this part out of the fused function, or in a function of its own that "
        "torch.fx.wrap hides"
    )


# The folders of torch, of the standard library and of this package.
_LIBRARIES = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, inspect.__file__, errors.__file__))


def _find_place(error: Exception, own: types.CodeType) -> tuple[str, int, str]:
    # The innermost line of the user's; else where the function begins. A name as <eval_with_key> is of code that was
    # made, unless the function itself is there: in a cell of IPython, or a line of Python's prompt.
    found: tuple[types.CodeType, int | None] = own, None
    step = error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        is_made = code.co_filename[:1] == "<" and code.co_filename != own.co_filename
        if not is_made and not code.co_filename.startswith(_LIBRARIES):
            found = code, step.tb_lineno
        step = step.tb_next
    return _place_of(*found)


def _place_of(code: types.CodeType, line: int | None) -> tuple[str, int, str]:
    line = line or code.co_firstlineno
    return code.co_filename, line, linecache.getline(code.co_filename, line)


def _refuse_change(function: Callable[..., Any], what: str) -> str:
    return f"fuse cannot trace that {function.__name__}() changes {what}, which later calls would not do: return it"


def _written(node: Any) -> Any:
    # What an operator wrote to, once or several times.
    while node.target in IN_PLACE:
        node = node.args[0]
    return node


def _makes_new(node: fx.Node) -> bool:
    # Whether what a node makes is an object of its own, which no user has named; modules may return anything.
    name = getattr(node.target, "__name__", str(node.target))
    return node.op in {"call_function", "call_method"} and node.target not in IN_PLACE and not name.endswith("_")


def _is_same_value(now: Any, before: Any) -> bool:
    if now is before or not is_symbol(now) or not is_symbol(before) or before.node.meta.get(IS_NUMBER):
        return now is before
    return _written(now.node) is before.node
