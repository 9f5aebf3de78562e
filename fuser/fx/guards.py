"""What a traced function reads besides its arguments: globals, closure cells, attributes. A trace holds while they do.

What a function can read is found in its code: the names in it, those of the functions it can reach, and of their
classes. An object is compared in the attributes that some of that code names, a container in all of its items, a module
of torch's in all that its ``forward`` can see. Names that are made at run time (``getattr(x, name)``) stand for all
attributes. What belongs to torch, to the standard library, to sympy or to fuser is compared by identity alone.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fuser.errors import TracingError
from fuser.fx.code_reads import GLOBALS, IMPLIED, find_reads
from fuser.fx.symbols import is_symbol
from fuser.ops import has_global_hooks

__all__ = ["CachedFunction", "Guards", "find_guards", "find_modes"]


def find_modes(_: Any = None) -> tuple[Any, ...]:
    """Return torch's modes that code may change for a part of itself: grad mode, inference mode and autocast."""
    casts = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *casts


# What functools.lru_cache makes.
CachedFunction: Any = functools._lru_cache_wrapper
# Values that may be compared by what they say; all others are the same object or not the same.
_PLAIN = frozenset((bool, int, float, complex, str, bytes))
# Code with one of these names may read any attribute, or find that there is none.
_ANY_NAME = frozenset(("getattr", "hasattr", "vars", "__dict__", "attrgetter", "__getattribute__", "AttributeError"))
# Modes of torch that code may ask for.
_MODES: dict[str, Callable[[Any], Any]] = {
    "is_grad_enabled": lambda _: torch.is_grad_enabled(),
    "is_inference_mode_enabled": lambda _: torch.is_inference_mode_enabled(),
    "is_autocast_enabled": lambda _: tuple(map(torch.is_autocast_enabled, ("cpu", "cuda"))),
    "get_default_dtype": lambda _: torch.get_default_dtype(),
    "are_deterministic_algorithms_enabled": lambda _: torch.are_deterministic_algorithms_enabled(),
    "get_float32_matmul_precision": lambda _: torch.get_float32_matmul_precision(),
    "get_num_threads": lambda _: torch.get_num_threads(),
    "is_anomaly_enabled": lambda _: torch.is_anomaly_enabled(),
    # A call of a module asks for hooks of all modules.
    "forward": lambda _: has_global_hooks(),
    "get_autocast_dtype": find_modes,
    # To set one that holds already changes nothing in the trace, but would in other calls. A torch.autograd.Function
    # sets grad mode.
    **dict.fromkeys("no_grad enable_grad set_grad_enabled inference_mode autocast Function".split(), find_modes),
}
# Special methods that read all of an object, where instructions may call them (``IMPLIED``); those that write or copy
# it have no say in what is computed.
_SELDOM_CALLED = frozenset(
    "__new__ __init__ __post_init__ __eq__ __repr__ __hash__ __replace__ __setattr__ __delattr__ __del__ __getstate__ "
    "__setstate__ __reduce__ __reduce_ex__ __copy__ __deepcopy__ __sizeof__ __dir__ __init_subclass__ __set_name__ "
    "__subclasshook__ __class_getitem__".split()
)
# Sizes of torch's graphs are expressions of sympy, which do not change.
_FOREIGN = sys.stdlib_module_names | {"torch", "fuser", "numpy", "sympy"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, slots=True)
class Guards:
    """Values that were found in dicts, in closures and slots, and by other ways of asking."""

    # Dict, key, value.
    reads: tuple[tuple[dict[Any, Any], Any, Any], ...] = ()
    # Object, attribute, value: what closures and slots hold.
    attributes: tuple[tuple[Any, str, Any], ...] = ()
    # Function of one argument, the argument, what it returned.
    asked: tuple[tuple[Callable[[Any], Any], Any, Any], ...] = ()
    # Dicts, lists and deques that code can put values into, and copies of before; while the function is traced.
    owners: tuple[tuple[Any, Any], ...] = ()
    # Whether code that was found has a ``case (a, b):``.
    matches_sequences: bool = False
    # Class, attribute, value: methods behind functools.lru_cache; while the function is traced.
    cached_methods: tuple[tuple[type, str, Any], ...] = ()

    def holds(self) -> bool:
        """Whether all values are what they were. Part of every call: a read costs some 30 ns."""
        try:
            for held, key, value in self.reads:
                if held[key] is not value and not _is_same(held[key], value):
                    return False
            for subject, name, value in self.attributes:
                now = getattr(subject, name)
                if now is not value and not _is_same(now, value):
                    return False
            for question, subject, answer in self.asked:
                now = question(subject)
                if now is not answer and not _is_same(now, answer):
                    return False
        except (ValueError, LookupError, AttributeError):
            # A name that is gone, an empty cell, a shorter list, a slot without a value.
            return False
        return True

    def split(self) -> tuple[tuple[tuple[Any, str, Any], ...], Guards]:
        """Return what a launcher compares by identity, as ``Recorded.reads``, and the rest.

        An equal value of now stands for the one of the trace; one that has changed meanwhile does not.
        """

        def find(now: Any, before: Any) -> Any:
            return now if _is_same(now, before) else before

        named = [
            (held, key, find(held.get(key), value))
            for held, key, value in self.reads
            if type(held) is dict and type(key) is str
        ]
        named += [(item, name, find(getattr(item, name, None), value)) for item, name, value in self.attributes]
        rest = tuple(item for item in self.reads if type(item[0]) is not dict or type(item[1]) is not str)
        return tuple(named), Guards(rest, (), self.asked)

    def find_generators(self) -> list[torch.Generator]:
        """Return the random number generators that were found, torch's own among them."""
        found = [value for *_, value in (*self.reads, *self.attributes, *self.asked) if type(value) is torch.Generator]
        return [torch.default_generator, *found]

    def find_changed(self) -> str:
        """Return the first key whose value is another one now; empty if it has no name."""
        return next((str(key) for held, key, value in self.reads if not _is_same(held.get(key), value)), "")

    def find_added(self) -> bool:
        """Whether something holds more than it did, which no later call needs to look at."""
        return any(len(owner) > len(before) for owner, before in self.owners)

    def remove_proxies(self) -> str:
        """Put back what tracing replaced by a symbol, and take out what it added; return the last such name."""
        found = ""
        for owner, before in self.owners:
            if isinstance(owner, dict):
                for key in [key for key, value in dict.items(owner) if is_symbol(value)]:
                    found = str(key)
                    if key in before:
                        owner[key] = before[key]
                    else:
                        del owner[key]
            elif any(map(is_symbol, owner)):
                found = found or "a list"
                owner.clear()
                owner.extend(before)
        for subject, name, value in self.attributes:
            if is_symbol(getattr(subject, name, None)):
                found = found or ("a variable of the function around it" if name == "cell_contents" else name)
                setattr(subject, name, value)
        return found


def _is_same(now: Any, before: Any) -> bool:
    """Whether a value is one that tracing cannot tell from another: the same object, or an equal plain value."""
    if now is before:
        return True
    if type(now) is not type(before):
        return False
    if type(now) in _PLAIN:
        # Zeros differ in their sign, and NaN is not equal to itself.
        return repr(now) == repr(before)
    if type(now) in (tuple, frozenset, torch.Size):
        return len(now) == len(before) and (
            all(map(_is_same, now, before)) if type(now) is not frozenset else bool(now == before)
        )
    return type(now) in (torch.device, torch.dtype) and bool(now == before)


def find_guards(*roots: Any) -> Guards:
    """Return what functions (and whatever else is given) can read now."""
    names: set[str] = set()
    instructions: dict[types.CodeType, list[Any]] = {}
    while True:
        # Code that is found late may name attributes of objects that were found early.
        count = len(names)
        reader = _GuardFinder(names, instructions)
        for root in roots:
            reader.visit(root)
        reader.walk()
        if len(names) == count:
            return reader.build()


class _GuardFinder:
    """Walks through what code can reach."""

    def __init__(self, names: set[str], instructions: dict[types.CodeType, list[Any]]) -> None:
        self.names = names
        # Of each code as ``find_reads`` has them: to find them takes longer than all else.
        self._instructions = instructions
        self._seen: dict[int, Any] = {}
        # What was seen and is not looked into yet. A stack of our own: what code reaches is deeper than Python's.
        self._waiting: list[Any] = []
        self._reads: dict[tuple[int, Any], tuple[dict[Any, Any], Any, Any]] = {}
        self._attributes: list[tuple[Any, str, Any]] = []
        self._asked: list[tuple[Callable[[Any], Any], Any, Any]] = []
        self._owners: dict[int, tuple[Any, Any]] = {}
        self._of_classes: set[tuple[type, str]] = set()
        self._matches_sequences = False
        self._cached_methods: list[tuple[type, str, Any]] = []

    def build(self) -> Guards:
        modes = [(ask, None, ask(None)) for ask in dict.fromkeys(_MODES[name] for name in _MODES if name in self.names)]
        asked, owners = (*self._asked, *modes), tuple(self._owners.values())
        rest = self._matches_sequences, tuple(self._cached_methods)
        return Guards(tuple(self._reads.values()), tuple(self._attributes), asked, owners, *rest)

    def visit(self, value: Any) -> None:
        if value is None or type(value) in _PLAIN or id(value) in self._seen:
            return
        if is_symbol(value):
            raise TracingError("an earlier trace left a symbol in what the function can reach")
        self._seen[id(value)] = value
        if not isinstance(value, torch.Tensor):
            self._waiting.append(value)

    def walk(self) -> None:
        """Look into what was visited, and into what that leads to."""
        while self._waiting:
            self._look_into(self._waiting.pop())

    def _look_into(self, value: Any) -> None:
        # A mode that code has under another name, or as an object.
        kinds = (value if isinstance(value, type) else type(value)).__mro__
        self.names.update(
            kind.__name__ for kind in kinds if kind.__name__ in _MODES and kind.__module__.startswith("torch.")
        )
        if isinstance(value, types.FunctionType):
            self._visit_function(value)
        elif isinstance(value, types.MethodType):
            self.visit(value.__self__)
            self.visit(value.__func__)
        elif isinstance(value, functools.partial):
            self._visit_all((value.func, value.args, value.keywords))
        elif isinstance(value, staticmethod | classmethod):
            self.visit(value.__func__)
        elif isinstance(value, CachedFunction):
            self.visit(value.__wrapped__)
        elif isinstance(value, property):
            self.visit(value.fget)
        elif isinstance(value, type):
            # It may be called.
            self._visit_class(value, {"__new__", "__init__", "__post_init__"})
            self._visit_class(type(value))
        elif isinstance(value, types.ModuleType):
            if not _is_foreign(value.__name__):
                self._read_names(vars(value))
        elif isinstance(value, torch.nn.Module):
            self._visit_module(value)
        elif isinstance(value, list | tuple | dict | set | frozenset | deque):
            self._visit_container(value)
            if not _is_foreign(type(value).__module__):
                self._visit_object(value)
        else:
            self._visit_object(value)

    def _visit_all(self, values: Iterable[Any]) -> None:
        for value in values:
            self.visit(value)

    def _visit_function(self, function: types.FunctionType) -> None:
        for cell in function.__closure__ or ():
            self._ask_attribute(cell, "cell_contents")
        self._visit_all(function.__defaults__ or ())
        self._visit_all((function.__kwdefaults__ or {}).values())
        self._read_names(vars(function))
        if _is_foreign(str(function.__globals__.get("__name__"))):
            return
        # Who reloads a module may put new code into the functions that are there, as IPython's autoreload does.
        for part in ("__code__", "__defaults__", "__kwdefaults__"):
            if getattr(function, part) is not None:
                self._ask_attribute(function, part)
        self._owners[id(function.__globals__)] = function.__globals__, dict(function.__globals__)
        codes = [function.__code__]
        while codes:
            code = codes.pop()
            codes += [item for item in code.co_consts if isinstance(item, types.CodeType)]
            self.names.update(code.co_names)
            if code not in self._instructions:
                self._instructions[code] = find_reads(code)
            for operation, name, path in self._instructions[code]:
                if operation in GLOBALS:
                    self._read_global(function.__globals__, name, path)
                elif operation == "IMPORT_NAME":
                    self.visit(sys.modules.get(name))
                elif operation == "MATCH_SEQUENCE":
                    self._matches_sequences = True
                else:
                    self.names.update(IMPLIED[operation])

    def _read_global(self, held: dict[str, Any], name: str, path: Sequence[str]) -> None:
        # ``path``: the attributes that are read of it there.
        if name.startswith("@"):
            # Nobody can write such a name: pytest puts its own into asserts, for what they say when they fail.
            return
        for attribute in path:
            # Of a module's other names nothing is read, and they may lead far.
            if name not in held or not isinstance(held[name], types.ModuleType):
                break
            self._reads[id(held), name] = held, name, held[name]
            if _is_foreign(held[name].__name__):
                return
            held, name = vars(held[name]), attribute
        if name in held:
            self._read(held, name)
        else:
            self._note_absence(held, name)

    def _read(self, held: dict[Any, Any], key: Any) -> None:
        if type(held).__getitem__ is not dict.__getitem__:
            # What a registry's own method makes is another object each time, of what it holds.
            self._ask(functools.partial(dict.__getitem__, held), key)
            return
        value = held[key]
        self._reads[id(held), key] = held, key, value
        self.visit(value)

    def _note_absence(self, held: dict[str, Any], name: str) -> None:
        # What is found elsewhere now may be hidden later: a builtin by a global, a class's attribute by an object's.
        self._asked.append((held.__contains__, name, False))

    def _ask(self, question: Callable[[Any], Any], subject: Any) -> None:
        try:
            answer = question(subject)
        except (ValueError, LookupError, AttributeError):
            return
        self._asked.append((question, subject, answer))
        self.visit(answer)

    def _ask_attribute(self, subject: Any, name: str) -> None:
        # None yet: an empty cell, a slot without a value.
        if hasattr(subject, name):
            self._attributes.append((subject, name, getattr(subject, name)))
            self.visit(getattr(subject, name))

    def _read_names(self, held: dict[str, Any]) -> None:
        self._owners[id(held)] = held, dict(held)
        if _ANY_NAME.isdisjoint(self.names):
            named: Iterable[str] = self.names.intersection(held)
        else:
            named = list(held)
            self._ask(len, held)
        for name in named:
            self._read(held, name)

    def _visit_class(self, kind: type, special: Collection[str] = ()) -> None:
        for base in kind.__mro__:
            if _is_foreign(base.__module__):
                continue
            if (base, "__dict__") not in self._of_classes:
                # What is new in a class may hide what its bases have, or answer ``hasattr``.
                self._of_classes.add((base, "__dict__"))
                self._ask(len, vars(base))
            # Special methods are called without being named.
            for name, value in vars(base).items():
                if isinstance(value, types.MemberDescriptorType) or _is_written_by_dataclass(base, name, value):
                    # A slot, whose value is asked of the object; what stores the arguments that it is given.
                    continue
                is_special = name[:2] == "__" and callable(value) and name not in _SELDOM_CALLED
                if (is_special or name in special or name in self.names) and (base, name) not in self._of_classes:
                    self._of_classes.add((base, name))
                    self._ask(vars(base).get, name)
                    if isinstance(getattr(value, "__func__", value), CachedFunction):
                        self._cached_methods.append((base, name, value))

    def _visit_object(self, value: Any) -> None:
        kind = type(value)
        if kind.__module__.partition(".")[0] == "fuser":
            # A fused function; functors do not change.
            self.visit(getattr(value, "function", None) if callable(value) else None)
            return
        self._visit_class(kind)
        if getattr(getattr(kind, "__dataclass_params__", None), "frozen", False):
            # It stays as it is; what it holds may not.
            self._visit_all(getattr(value, name, None) for name in kind.__dataclass_fields__)
            return
        held = getattr(value, "__dict__", None)
        if isinstance(held, dict):
            self._read_names(held)
            self._read_hidden(held, kind)
        for base in kind.__mro__:
            slots = vars(base).get("__slots__", ())
            for name in self.names.intersection((slots,) if isinstance(slots, str) else slots):
                self._ask_attribute(value, name)

    def _read_hidden(self, held: dict[str, Any], kind: type) -> None:
        for base in kind.__mro__:
            if not _is_foreign(base.__module__):
                for name in self.names.intersection(vars(base)).difference(held):
                    if not isinstance(vars(base)[name], property):
                        self._note_absence(held, name)

    def _visit_container(self, value: Any) -> None:
        if isinstance(value, dict):
            self._owners[id(value)] = value, dict(dict.items(value))
            self._ask(len, value)
            for key in dict.keys(value):
                self._read(value, key)
        elif isinstance(value, list | deque):
            self._owners[id(value)] = value, value.copy()
            self._ask(len, value)
            for slot in range(len(value)):
                self._ask(value.__getitem__, slot)
        elif isinstance(value, set):
            self._ask(frozenset, value)
        else:
            self._visit_all(value)

    def _visit_module(self, module: torch.nn.Module) -> None:
        if "training" not in vars(module):
            # TorchScript's, or what torch.compile made, which stays in the graph and looks at its state in every call.
            return
        parts = (module._parameters, module._buffers, module._modules)
        for part in parts:
            for name in part:
                self._read(part, name)
        for part in (*parts, *(getattr(module, name) for name in _HOOKS)):
            self._ask(len, part)
        held = vars(module)
        self.names.add("forward")
        self._read(held, "training")
        # What torch's own modules read cannot be seen in the user's code.
        is_torchs = type(module).__module__.partition(".")[0] == "torch"
        if is_torchs:
            for name in held:
                if name[:1] != "_":
                    self._read(held, name)
            if "forward" not in held:
                self._note_absence(held, "forward")
        else:
            self._read_names(held)
            self._read_hidden(held, type(module))
            self._visit_class(type(module))


def _is_written_by_dataclass(kind: type, name: str, value: Any) -> bool:
    return (
        name == "__init__"
        and "__dataclass_params__" in vars(kind)
        and isinstance(value, types.FunctionType)
        and value.__code__.co_filename == "<string>"
    )


def _is_foreign(module_name: str | None) -> bool:
    return (module_name or "").partition(".")[0] in _FOREIGN
