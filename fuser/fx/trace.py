"""``fuser.fuse``: trace a function of functor calls once, substitute fusion nodes, run the result."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, Generic, overload

import torch
from torch import fx

from fuser.config import config
from fuser.errors import ArgumentError, GradientError, NoCompileError, UnsupportedError, shows_users_frames
from fuser.flat_text import as_function
from fuser.fx.arguments import NUMBER, TENSOR, Key, sort_arguments
from fuser.fx.entries import (
    Binding,
    Entry,
    Mode,
    SizedReplayer,
    bind_alike,
    copy_nodes,
    find_held,
    mode_of,
    of_its_size,
)
from fuser.fx.fusion_node import FusionModule
from fuser.fx.intercept import is_traced
from fuser.fx.joint import DifferentiableFusion, JointFunction
from fuser.fx.passes import FusionPass
from fuser.fx.plain_nodes import answers_for_torch
from fuser.fx.sized import SizedGraphs, arranges, can_be_traced_again, why_not_at_once
from fuser.fx.tracer import Traced, trace
from fuser.fx.whole import WholeFusion, find_whole_fusion
from fuser.graph import FusionGroup
from fuser.jit_function import R
from fuser.launcher import Replayer, called_in_c, record_through
from fuser.outputs import check_kinds, finish_out, finish_traced_out, unusual_kind
from fuser.process import Lock
from fuser.record import MISSING, Recorded, Scalars
from fuser.route import call_anew, requires_grad
from fuser.tensor_desc import describe
from fuser.warming.follow import current, stand_in
from fuser.warming.symbolic import names_by_position, warm_up

__all__ = ["FusedFunction", "P"]

# A function's parameters; those without the first one; that one.
if TYPE_CHECKING:
    from typing_extensions import ParamSpec, TypeVar

    P = ParamSpec("P", default=...)
else:
    from typing import ParamSpec, TypeVar

    P = ParamSpec("P")
Q = ParamSpec("Q")
S = TypeVar("S")

PUBLIC = ("function", "graph_for", "graph_module", "groups", "warmup")
# How many kinds of call are remembered, graphs for one kind (which differ in what control flow asked), and among them
# such that hold no more: a module goes back and forth between train() and eval().
MAX_KEYS, MAX_GRAPHS, MAX_STALE = 64, 32, 1


@called_in_c
class FusedFunction(Replayer, Generic[P, R]):
    """A traced function whose functor calls and pointwise ops are fusion nodes. Threads may share it.

    In a class it is a method: each instance has graphs of its own.
    """

    def __init__(self, function: Callable[P, R]) -> None:
        super().__init__((), ())
        plain: Any = inspect.unwrap(function)
        if isinstance(function, classmethod | staticmethod):
            kind = type(function).__name__
            raise ArgumentError(f"fuse takes the function below @{kind}: write @{kind} above @fuser.fuse")
        if not inspect.isroutine(function) or not isinstance(getattr(plain, "__func__", plain), types.FunctionType):
            raise ArgumentError(f"fuse takes a Python function or a module, got {_describe_no_function(function)}")
        self.function = function
        self._lock = Lock()
        # By the key of the call, the newest first.
        self._traces: dict[Key, tuple[Entry, ...]] = {}
        # The trace whose calls this object replays itself; the arguments that it takes for constants, and, where there
        # are any, the slots of the others.
        self._own: Entry | None = None
        self._own_constants: tuple[Any, ...] = ()
        self._own_slots: tuple[int, ...] = ()
        # The defaults and the order of its launcher.
        self._own_binding: Binding = ((), ())
        # Whether records are to serve calls of other sizes.
        self.learns_sizes = True
        # What it wraps names the arguments of a wrapper, which is given them as they come: it may add some by name.
        self._named = tuple(inspect.signature(function).parameters.values())
        self._signature = inspect.signature(function, follow_wrapped=False)
        self._parameters = tuple(self._signature.parameters.values())
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        self._can_bind = all(parameter.kind not in variadic for parameter in self._parameters)
        self._has_out = any(parameter.name == "out" for parameter in self._named)
        self.__name__, self.__qualname__ = function.__name__, function.__qualname__
        functools.update_wrapper(self, function, updated=())

    @overload
    def __get__(self, instance: None, owner: type) -> FusedFunction[P, R]: ...
    @overload
    def __get__(
        self: FusedFunction[Concatenate[S, Q], R], instance: S, owner: type | None = None
    ) -> FusedFunction[Q, R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> FusedFunction[..., R]:
        """Return the fused method of an instance, which keeps it."""
        if instance is None or isinstance(self.function, types.MethodType):
            return self
        if torch.compiler.is_dynamo_compiling():
            # As it is called there.
            return functools.partial(self._call_plainly, instance)  # type: ignore[return-value]
        if isinstance(instance, tuple):
            # An argument like others.
            return functools.partial(self, instance)  # type: ignore[return-value]
        try:
            held = vars(instance)
        except TypeError:
            name = type(instance).__name__
            raise UnsupportedError(
                f"fuse keeps an instance's graphs in its __dict__, which those of {name} have not: "
                'add "__dict__" to its __slots__, or fuse a function of what the method reads'
            ) from None
        name = f"_fused_{self.__qualname__}"
        found: FusedFunction | None = held.get(name)
        if found is None or found.function != types.MethodType(self.function, instance):
            found = FusedFunction(types.MethodType(self.function, instance))
            if isinstance(instance, type):
                # Of a class method.
                setattr(instance, name, found)
            else:
                held[name] = found
        return found

    @property
    def graph_module(self) -> fx.GraphModule:
        """The FX graph with fusion nodes: that of the kind of call traced last.

        Before any call, one for tensors in place of all arguments without a default.
        """
        last = next(reversed(self._traces.values()), None)
        if last:
            sized = None if last[0].sized is None else last[0].sized.latest()
            return (sized.made if sized else last[0]).traced.graph_module
        kinds: list[Any] = []
        leaves: list[Any] = []
        for item in self._named:
            if item.default is not item.empty:
                if not self._can_bind and item not in self._parameters:
                    continue  # A wrapper, or what it wraps, fills it in.
                (_, kind), found = sort_arguments((item.default,), {}, self.__name__)
                kinds.append(kind)
                leaves += found
            elif item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD):
                kinds.append(TENSOR)
        is_known = TENSOR not in kinds
        return self._add_trace((len(kinds), *kinds), tuple(leaves) if is_known else None).traced.graph_module

    def graph_for(
        self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
    ) -> tuple[fx.GraphModule, tuple[Any, ...]]:
        """Return the FX graph with fusion nodes that serves a call, and what the graph is called with."""
        key, leaves = self._sort(tuple(args), {**(kwargs or {})})
        entry = self._find_entry(key, leaves)
        if entry.find_joint(leaves) is not None:
            # As it computes, but for what it keeps for gradients.
            with torch.no_grad():
                entry = entry.find_sized(leaves) or entry
        return entry.traced.graph_module, leaves

    def remarks_for(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
        """Return why less of a call is fused than could be, as far as it concerns no single node."""
        key, leaves = self._sort(tuple(args), {**kwargs})
        return tuple(self._find_trace(key, leaves).remarks(leaves))

    def find_whole(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Entry, tuple[Any, ...]] | None:
        """Return the trace that serves a call, if it is one fusion node, and the call's tensors and numbers.

        None for any other, and where the call is one of the function as it is.
        """
        if torch.compiler.is_compiling() or is_traced((*args, *kwargs.values())):
            return None
        key, leaves = self._sort(tuple(args), kwargs)
        if answers_for_torch(leaves):
            return None
        entry = self._find_trace(key, leaves)
        return None if entry.whole is None else (entry, leaves)

    @property
    def groups(self) -> tuple[FusionGroup, ...]:
        """The group of every fusion node, in the order of the graph."""
        module = self.graph_module
        nodes = [node for node in module.graph.nodes if node.op == "call_module"]
        modules = [module.get_submodule(str(node.target)) for node in nodes]
        return tuple(item.group for item in modules if isinstance(item, FusionModule))

    @shows_users_frames
    def warmup(self, *args: Any, dynamic_shapes: Any = None, backward: bool = False, **kwargs: Any) -> None:
        """Compile the kernels that calls need, without launching any.

        Args:
            *args: arguments of a call: real, fake or meta tensors, which stand for tensors on the GPU, or on the CPU
                without one; and anything else that the function takes.
            dynamic_shapes: the sizes that calls differ in, as ``torch.export`` takes them: for arguments by name, or in
                order, a ``Dim`` for dimensions. All kernels are compiled that calls within their bounds need,
                but for those of sizes that depend on elements (``x[mask]``).
            backward: whether to prepare gradients, too, by all tensors that require them.
            **kwargs: those by name.

        Raises:
            ArgumentError: ``dynamic_shapes`` does not fit. Else as calls.
        """
        warm_up(
            self,
            args,
            kwargs,
            names=names_by_position(self._named),
            dynamic_shapes=dynamic_shapes,
            backward=backward,
            parameters=self._held_tensors(),
        )

    def _held_tensors(self) -> Iterator[torch.Tensor]:
        # What a module has of its own.
        owner = getattr(self.function, "__self__", None)
        return owner.parameters() if isinstance(owner, torch.nn.Module) else iter(())

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def __call__(self, *args: Any, out: Any, **kwargs: Any) -> R: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function.

        Unless the function has an argument of that name, ``out`` takes the tensor (or one per output) to write to, with
        torch's rules for ``out=``.
        """
        if torch.compiler.is_dynamo_compiling():
            # What is in this function fuses with its neighbours there.
            return self._call_plainly(*args, **kwargs)
        replayed = None if "out" in kwargs else self.launch(args, kwargs or None, None)
        return self.call_anew(*args, **kwargs) if replayed is None else replayed

    def _is_method_of(self, kind: type) -> bool:
        # It stands there, or was defined there.
        found = vars(kind).get(self.__name__)
        return getattr(found, "__func__", found) is self or self.__qualname__ == f"{kind.__qualname__}.{self.__name__}"

    def _call_plainly(self, *args: Any, **kwargs: Any) -> Any:
        out = None if self._has_out else kwargs.pop("out", None)
        result = self.function(*args, **kwargs)
        return result if out is None else _finish_out(out, result)

    @shows_users_frames
    def call_anew(self, *args: Any, **kwargs: Any) -> Any:
        """Serve a call that is not like an earlier one; as ``__call__``."""
        owner = args[0] if args and isinstance(args[0], type) else type(args[0]) if args else torch.Tensor
        kinds = () if owner is torch.Tensor or issubclass(owner, tuple) else owner.__mro__
        if any(map(self._is_method_of, kinds)):
            # A method called by its class: ``Base.forward(self, x)``; from Python 3.13 on, so are class methods; or by
            # a decorator above ``fuse``, such as ``property`` and ``torch.no_grad()``.
            return self.__get__(args[0])(*args[1:], **kwargs)
        is_exported = torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()
        if is_exported or is_traced((*args, *kwargs.values())):
            # Somebody else is tracing.
            return self._call_plainly(*args, **kwargs)
        if current() is not None:
            key, leaves = self._sort(args, kwargs)
            entry = self._find_trace(key, tuple(map(stand_in, leaves)))
            # Asks of symbols what the trace relies on.
            entry.traced.holds(leaves)
            sized = entry.find_sized(leaves)
            if sized is not None:
                sized.run(*leaves)
            # Calls of other sizes may go by the graph for all.
            return entry.run_either(*leaves)
        out = None if self._has_out else kwargs.pop("out", None)
        outs = None if out is None else tuple(out) if isinstance(out, tuple | list) else (out,)
        if outs is not None:
            check_kinds(outs, self.__name__)
        if kwargs or len(args) != len(self._parameters) or not self._can_bind:
            args, kwargs = self._bind_arguments(args, kwargs)
            replayed = None if kwargs else self.launch(args, None, out)
            if replayed is not None:
                return replayed
        key, leaves = sort_arguments(args, kwargs, self.__name__)
        if answers_for_torch(leaves):
            result = self._call_by_position(*args, **kwargs)
            return result if out is None else _finish_out(out, result)
        entry = self._find_entry(key, leaves)
        if entry.is_sized and config.no_compile:
            states = entry.states()
            try:
                return self._serve(entry, args, leaves, outs)
            except NoCompileError:
                # A warm-up for all sizes knows the kernels of the graph for all, which draws what that one has drawn.
                for generator, state in states:
                    generator.set_state(state)
                entry = self._find_trace(key, leaves)
        return self._serve(entry, args, leaves, outs)

    def _serve(self, entry: Entry, args: tuple[Any, ...], leaves: tuple[Any, ...], outs: Any) -> Any:
        whole, launcher = entry.whole, entry.launcher
        if whole is None and outs is not None:
            return self._finish(outs, entry.call(leaves), args)
        if launcher is not self or self._own_slots:
            # A constant may be equal to that of the trace, and another object.
            replayed = launcher.launch(self._among_constants(leaves) if launcher is self else leaves, None, outs)
            if replayed is not None:
                return replayed
        joined = entry.find_joint(leaves)
        if joined is not None and entry.joint is not None:
            entry.joint.record(launcher, joined, entry.run_either, leaves)
            return joined(*leaves)
        if whole is None:
            result = entry.call(leaves)
            record_through(
                launcher,
                entry.run,
                leaves,
                leaves,
                None,
                grad_mode=torch.is_grad_enabled(),
                any_size=not entry.is_sized and entry.joint is None,
                default_dtype=entry.default_dtype,
            )
            return result
        inputs = whole.inputs(leaves)
        if outs is None and isinstance(whole.module, DifferentiableFusion):
            return whole.module.call(inputs, launcher, leaves)
        return call_anew(whole.spec, inputs, launcher, leaves, None, outs)

    def add(self, tensors: tuple[Any, ...], scalars: Scalars | None, out: Any, recorded: Recorded) -> bool:
        """See Launcher: what the function reads besides its arguments is looked at in each replay."""
        assert self._own is not None, "only its calls are recorded here"
        reads, rest = self._own.traced.guards.split()
        check = recorded.check
        if rest.reads or rest.asked:
            recorded = recorded._replace(check=lambda *tensors: rest.holds() and check(*tensors))
        if self._own.traced.facts is not None:
            # Sizes may be among what the trace relies on.
            recorded = of_its_size(recorded)
        if self._own.is_sized:
            recorded = of_its_size(recorded, self._own.default_dtype)
        return super().add(self._among_constants(tensors), scalars, out, recorded._replace(reads=reads))

    def _among_constants(self, leaves: tuple[Any, ...]) -> tuple[Any, ...]:
        # Tensors and numbers among the constants of the trace whose calls are replayed here.
        if not self._own_slots:
            return leaves
        values = [*self._own_constants]
        for slot, leaf in zip(self._own_slots, leaves, strict=True):
            values[slot] = leaf
        return tuple(values)

    def _finish(self, outs: tuple[Any, ...], result: Any, args: tuple[Any, ...]) -> Any:
        made = [result] if isinstance(result, torch.Tensor) else list(result)
        if not all(isinstance(item, torch.Tensor) for item in made):
            raise ArgumentError(f"{self.__name__}() has a result that out= cannot take: a {type(result).__name__}")
        if torch.is_grad_enabled() and any(item.requires_grad for item in made):
            raise GradientError(
                f"{self.__name__}: out= does not support automatic differentiation, but a result requires grad"
            )
        results = finish_out(outs, made, self.__name__, args)
        return results[0] if len(results) == 1 else tuple(results)

    def _sort(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Key, tuple[Any, ...]]:
        return sort_arguments(*self._bind_arguments(args, dict(kwargs)), self.__name__)

    def _bind_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # All by position, with defaults, where the function takes a fixed number of arguments.
        if not self._can_bind:
            try:
                bound = self._signature.bind(*args, **kwargs)
            except TypeError as error:
                raise ArgumentError(f"{self.__name__}(): {error}") from None
            bound.apply_defaults()
            return bound.args, bound.kwargs
        values = list(args)
        for parameter in self._parameters[len(args) :]:
            name = parameter.name
            if name in kwargs:
                values.append(kwargs.pop(name))
            elif parameter.default is not parameter.empty:
                values.append(parameter.default)
            else:
                raise ArgumentError(f"{self.__name__}() misses the argument {name!r}")
        if kwargs or len(values) > len(self._parameters):
            extra = next(iter(kwargs), "") or f"{len(values)} arguments"
            raise ArgumentError(f"{self.__name__}() got an unexpected argument: {extra}")
        return tuple(values), {}

    def _find_trace(self, key: Key, leaves: tuple[Any, ...]) -> Entry:
        found = self._look_up(key, leaves)
        if found is None:
            with self._lock():
                found = self._look_up(key, leaves)
                if found is None:
                    found = self._add_trace(key, leaves)
        return found

    def _find_entry(self, key: Key, leaves: tuple[Any, ...]) -> Entry:
        # For calls of these sizes, where it knows more than the one for all.
        found = self._find_trace(key, leaves)
        return found.find_sized(leaves) or found

    def _look_up(self, key: Key, leaves: tuple[Any, ...]) -> Entry | None:
        mode = mode_of(leaves)
        for item in self._traces.get(key, ()):
            if item.mode == mode and item.traced.holds(leaves):
                return item
        return None

    def _add_trace(self, key: Key, leaves: tuple[Any, ...] | None) -> Entry:
        names = [item.name for item in self._named]
        traced = trace(self.function, self._call_by_position, key, leaves, names)
        mode = mode_of(leaves or ())
        has_parameters = any(map(requires_grad, find_held(traced.graph_module)))
        differentiable = DifferentiableFusion if mode.is_differentiated or has_parameters else None
        if differentiable is None and leaves is not None:
            for node, leaf in zip(traced.graph_module.graph.find_nodes(op="placeholder"), leaves, strict=True):
                if isinstance(leaf, torch.Tensor) and not unusual_kind(leaf):
                    node.meta["first"] = describe(leaf)
        can_be_sized = mode.reduces and bool(leaves)
        nodes = copy_nodes(traced.graph_module) if can_be_sized else None
        FusionPass(reduces=mode.reduces, differentiable=differentiable, device_type=mode.device_type)(
            traced.graph_module
        )
        entry = self._finish_entry(traced, key, leaves or (), mode, nodes, is_differentiated=differentiable is not None)
        before = self._traces.pop(key, ())
        current = [item for item in before if item.traced.guards.holds()]
        stale = [item for item in before if item not in current]
        self._traces[key] = (entry, *current[: MAX_GRAPHS - 1], *stale[:MAX_STALE])
        if len(self._traces) > MAX_KEYS:
            del self._traces[next(iter(self._traces))]
        return entry

    def _finish_entry(
        self,
        traced: Traced,
        key: Key,
        leaves: tuple[Any, ...],
        mode: Mode,
        nodes: fx.GraphModule | None,
        *,
        is_differentiated: bool,
    ) -> Entry:
        whole = find_whole_fusion(traced.graph_module)
        run = as_function(traced.graph_module.graph, _find_called)
        if whole is not None or nodes is None or not can_be_traced_again(traced.graph_module):
            return self._owned(Entry(traced, whole, self._launcher_of(traced, whole, key), run, mode))
        draws_in_kernels = is_differentiated and mode.device_type == "cuda"
        is_sized = arranges(traced.graph_module, draws_in_kernels=draws_in_kernels)
        # Node by node, terms of one tensor's gradient would be added in another order than torch's; calls with numbers
        # are replayed so alone, unless there are graphs for known sizes.
        has_derivatives = any(isinstance(item, DifferentiableFusion) for item in traced.graph_module.modules())
        apart = ""
        may_join = is_differentiated and (is_sized or has_derivatives)
        if may_join:
            is_replayed = is_sized or all(isinstance(leaf, torch.Tensor) for leaf in leaves)
            apart = why_not_at_once(nodes) if is_replayed else "it takes numbers, and arranges nothing"
        joint = JointFunction(nodes) if may_join and not apart else None
        if joint is None and (mode.is_differentiated or not is_sized):
            return self._owned(Entry(traced, None, self._launcher_of(traced, None, key), run, mode, apart=apart))

        def finish(
            module: fx.GraphModule, default_dtype: torch.dtype | None, holds: Callable[..., bool] | None
        ) -> Entry:
            made = replace(traced, graph_module=module)
            own = as_function(module.graph, _find_called)
            # A record knows tensors alone, and what is asked besides is asked by what runs.
            whole = find_whole_fusion(module) if holds is None else None
            launcher = self._launcher_of(made, whole, key, partial(SizedReplayer, default_dtype), default_dtype)

            ask = own if holds is None else partial(self._run_if, holds, own, key)
            return self._owned(Entry(made, whole, launcher, ask, mode, is_sized=True, default_dtype=default_dtype))

        sized = SizedGraphs(nodes, mode.device_type, finish) if is_sized else None
        if joint is None:
            return Entry(traced, None, Replayer((), ()), run, mode, sized)
        # The other one serves who looks at it.
        return self._owned(Entry(traced, None, self._launcher_of(traced, None, key), run, mode, sized, joint=joint))

    def _run_if(self, holds: Callable[..., bool], run: Callable[..., Any], key: Key, *leaves: Any) -> Any:
        return (run if holds(*leaves) else self._find_entry(key, leaves).run)(*leaves)

    def _owned(self, entry: Entry) -> Entry:
        if self._own is None and entry.launcher is self:
            self._own, self.learns_sizes = entry, not entry.is_sized
        return entry

    def _launcher_of(
        self,
        traced: Traced,
        whole: WholeFusion | None,
        key: Key,
        make: Callable[..., Replayer] = Replayer,
        default_dtype: torch.dtype | None = None,
    ) -> Replayer:
        inputs = traced.graph_module.graph.find_nodes(op="placeholder")
        defaults, order = ((), tuple(range(len(inputs)))) if whole is None else (whole.constants, whole.order)
        is_seen = traced.facts is None or traced.facts.is_of_tensors
        own = self._own
        if not is_seen or (whole is not None and not whole.reads_all):
            return make((), defaults, order)
        if own is None:
            self._own_binding = defaults, order
            return self._launch_own(key, defaults, order) or make((), defaults, order)
        # Calls of all sizes of one trace are replayed here, where they bind the same.
        is_of_own = own.is_sized and own.traced.guards is traced.guards and own.default_dtype is default_dtype
        return self if is_of_own and bind_alike(self._own_binding, (defaults, order)) else make((), defaults, order)

    def _launch_own(self, key: Key, defaults: tuple[Any, ...], order: tuple[int, ...]) -> Replayer | None:
        # This object is called in C with the arguments as they are: all must be compared there.
        kinds = key[1:]
        slots = tuple(slot for slot, kind in enumerate(kinds) if kind is TENSOR or kind is NUMBER)
        constants = tuple(MISSING if slot in slots else kind[1] for slot, kind in enumerate(kinds))
        has_constants = len(slots) < len(kinds)
        if any(len(kind) == 3 for kind in kinds if type(kind) is tuple) or len(kinds) != key[0]:
            return None
        if not self._can_bind:
            if has_constants:
                return None
            Replayer.__init__(self, (), defaults, order)
            return self
        if has_constants:
            self._own_constants, self._own_slots = constants, slots
            order = tuple(slots[slot] if slot >= 0 else slot for slot in order)
        names = tuple(item.name for item in self._parameters)
        fill = tuple(MISSING if item.default is item.empty else item.default for item in self._parameters)
        Replayer.__init__(self, names, defaults, order, fill, constants)
        return self

    def _call_by_position(self, *args: Any, **kwargs: Any) -> Any:
        # Keyword-only arguments have a place, too.
        if not self._can_bind:
            return self.function(*args, **kwargs)
        given = {item.name: value for item, value in zip(self._parameters, args, strict=True)}
        by_name = {item.name: given[item.name] for item in self._parameters if item.kind is item.KEYWORD_ONLY}
        return self.function(*(value for name, value in given.items() if name not in by_name), **by_name)

    def __reduce__(self) -> str | tuple[Any, ...]:
        if isinstance(self.function, types.MethodType):
            owner, name = self.function.__self__, _find_method(self.function)
            if name is not None:
                return getattr, (owner, name)
            if getattr(owner, "__dict__", {}).get(f"_fused_{self.__qualname__}") is self:
                # Below another decorator no name leads to it: it is made again when it is called.
                return types.NoneType, ()
        # Where it took its function's place, it is found by name, as functions are.
        found: Any = sys.modules.get(self.__module__)
        path = getattr(self, "__qualname__", "<locals>")
        for part in path.split("."):
            found = getattr(found, part, None)
        return path if found is self else (FusedFunction, (self.function,))

    def __dir__(self) -> list[str]:
        # What is for users: the rest serves other stages.
        return [*(name for name in super().__dir__() if name.startswith("__")), *PUBLIC]

    def __repr__(self) -> str:
        return f"<fuser.fuse {self.__name__}>"


def _find_method(method: types.MethodType) -> str | None:
    # Under which name its owner has it, fused; of a class, those of its own are class methods. None where something
    # lies over it: another decorator, or what a derived class has under that name.
    owner = method.__self__
    kinds = (*(owner.__mro__ if isinstance(owner, type) else ()), *type(owner).__mro__)
    for name, held in ChainMap(*(dict(vars(kind)) for kind in kinds)).items():
        found = held.__func__ if isinstance(held, classmethod) else held
        if isinstance(found, FusedFunction) and found.function is method.__func__:
            return name
    return None


def _describe_no_function(item: Any) -> str:
    name = getattr(item, "__name__", type(item).__name__)
    if isinstance(item, type):
        return f"the class {name}: give an instance, or a method"
    if isinstance(item, functools.partial):
        called = getattr(item.func, "__name__", "")
        return f"a functools.partial; wrap it: lambda x: {called if called.isidentifier() else 'f'}(x, ...)"
    return f"{name}; wrap it: lambda x: {name}(x)" if callable(item) else f"a value of type {name}"


def _finish_out(out: Any, result: Any) -> Any:
    finish_traced_out(out, [result] if isinstance(result, torch.Tensor) else result)
    return out


def _find_called(module: torch.nn.Module) -> Any:
    # Where autograd looks, some fusion nodes are more than a call of their group.
    return module.run if type(module) is FusionModule else module
