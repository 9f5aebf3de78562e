"""Makes odd calls, drawn from a seed, and writes down what each gave: ``odd_calls.py SEED COUNT FILE [LIBRARY]``.

With the C launcher built as LIBRARY, or with the one in Python: both must write the same lines. A line has the call
and, after a tab, its value or its exception. With LIBRARY, the C module's functions are then called directly, too.
tests/test_launcher_fuzz.py runs this with a LIBRARY that checks its own memory accesses.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import random
import sys
import threading
import warnings
from collections.abc import Callable
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

# What checks memory is for this process, not for the compilers it starts.
os.environ.pop("LD_PRELOAD", None)

import torch


def load_library(path: str | None) -> ModuleType | None:
    """Make ``import fuser._launcher`` give the library at ``path``; without one, fail."""
    name = "fuser._launcher"
    if path is None:
        sys.modules[name] = None  # type: ignore[assignment]
        return None
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Hostile:
    """Raises whatever is asked of it, but its name: messages have no addresses, which differ."""

    def __repr__(self) -> str:
        return "Hostile()"

    def _refuse(self, *_: Any) -> Any:
        raise ZeroDivisionError("hostile")

    __eq__ = __hash__ = __bool__ = __index__ = __int__ = __float__ = __complex__ = __len__ = __iter__ = _refuse
    __dlpack__ = __dlpack_device__ = __array__ = __getitem__ = __add__ = __call__ = _refuse


class Lying:
    """Has what tensors and numbers have, and is neither."""

    def __repr__(self) -> str:
        return "Lying()"

    # Not __class__: torch's own functions end the process for what only isinstance takes for a tensor.
    shape = ()
    dtype = torch.float32

    def __float__(self) -> float:
        return 1.0

    def __index__(self) -> int:
        return 1


class Key(str):
    """A name that compares as it likes."""

    __slots__ = ()

    def __hash__(self) -> int:
        return str.__hash__(self)

    def __eq__(self, other: object) -> bool:
        gc.collect(0)
        raise ZeroDivisionError("key")


class Named(torch.Tensor):
    pass


class MyFloat(float):
    pass


class MyInt(int):
    pass


class MyTuple(tuple):
    pass


class Color(IntEnum):
    RED = 1


def draw(*shape: int, **options: Any) -> torch.Tensor:
    """Return small integers, whose sums and products are exact."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, **options) % 7 + 1).reshape(shape)


def make_tensors() -> dict[str, torch.Tensor]:
    """Return tensors by name: the plain ones first."""
    memory = draw(40, dtype=torch.float32)
    return {
        "x": draw(4, dtype=torch.float32),
        "y": draw(4, dtype=torch.float32) * 3,
        "z": memory[1:5],
        "row": draw(3, 4, dtype=torch.float32),
        "apart": memory[8:12],
        "near": memory[10:14],
        "double": draw(4, dtype=torch.float64),
        "integers": draw(4, dtype=torch.int64),
        "column": draw(4, 3, dtype=torch.float32).t(),
        "scalar": torch.tensor(2.0),
        "five": draw(5, dtype=torch.float32),
        "empty": torch.empty(0),
        "expanded": torch.ones(1).expand(4),
        "needs_grad": draw(4, dtype=torch.float32).requires_grad_(),
        "parameter": torch.nn.Parameter(draw(4, dtype=torch.float32)),
        "named": draw(4, dtype=torch.float32).as_subclass(Named),
        "negative": torch._neg_view(draw(4, dtype=torch.float32)),
        "zero": torch._efficientzerotensor(4),
        "meta": torch.empty(4, device="meta"),
        "sparse": draw(4, dtype=torch.float32).to_sparse(),
        "deep": torch.ones((1,) * 70),
        "deeper": torch.ones((1,) * 300),
    }


def odd_sum(x: Any, y: Any, alpha: Any, flip: Any, word: Any) -> Any:
    """Return what depends on arguments that are neither tensors nor numbers."""
    if flip:
        x, y = y, x
    return x - y * alpha if word == "sub" else x + y * alpha


PLAIN = 4
NUMBERS: tuple[Any, ...] = (0.5, 3.0, float("nan"), float("inf"), -0.0, 1e308)
ODD_NUMBERS: tuple[Any, ...] = (
    *(2, 0, -1, 2**62, -(2**63), 2**63, 2**70, 10**400, True, False, MyFloat(0.5), MyInt(2), Color.RED),
    *(Fraction(1, 2), Decimal("0.5"), None, "text", b"bytes", [], {}, (), (1.0,), object, NotImplemented, Ellipsis),
    *(Hostile(), Lying(), Hostile, torch.float32, slice(None)),
)
NAMES = ("alpha", "beta", "Alpha", "", "self", "tensors", "x", "out ", "näme", Key("alpha"), Key("out"), Key("z"))


class Calls:
    """Draws calls and makes them."""

    def __init__(self, seed: int) -> None:
        import fuser

        self.random = random.Random(seed)
        self.fuser = fuser
        self.tensors = make_tensors()
        self.functions = self._make_functions()

    def _make_functions(self) -> dict[str, tuple[Callable[..., Any], int]]:
        # By name, with how many tensors each takes.
        fuser = self.fuser
        axpy = fuser.create_jit_fn(
            "template <typename T> T axpy(T x, T y, T alpha) { return alpha * x + y; }", alpha=2.0
        )
        both = fuser.create_multi_output_jit_fn(
            "template <typename T> void both(T x, T y, T& sum, T& product) { sum = x + y; product = x * y; }", 2
        )
        bare = fuser.jit_fn(
            "template <typename T> T bare(T x, T alpha, T beta) { return alpha * x + beta; }", scalars=["alpha", "beta"]
        )
        whole = fuser.fuse(lambda x, y: axpy(x, y, alpha=3.0) + y)
        key = fuser.register_fusion(whole.groups[0])
        return {
            "axpy": (axpy, 2),
            "both": (both, 2),
            "bare": (bare, 1),
            "whole": (whole, 2),
            "two": (fuser.fuse(lambda x, y: (axpy(x, y), x + y)), 2),
            "own": (fuser.fuse(lambda x, out: axpy(x, out)), 2),
            "flags": (fuser.fuse(lambda x, y, alpha=2.0, flip=False, word="add": odd_sum(x, y, alpha, flip, word)), 2),
            "run": (lambda *items, **options: fuser.run_fusion(key, list(items), **options), 2),
        }

    def tensor(self) -> tuple[str, Any]:
        """Draw a tensor, in most cases a plain one."""
        names = list(self.tensors)
        name = self.random.choice(names if self.random.random() < 0.1 else names[:PLAIN])
        return name, self.tensors[name]

    def anything(self) -> tuple[str, Any]:
        """Draw what may not be a tensor or a number at all."""
        chance = self.random.random()
        if chance < 0.3:
            return self.tensor()
        index = self.random.randrange(len(ODD_NUMBERS))
        value = ODD_NUMBERS[index]
        return f"odd[{index}]", value

    def out(self, outputs: int) -> tuple[str, Any]:
        """Draw a value of ``out=``."""
        count = outputs if self.random.random() < 0.6 else self.random.choice((0, 1, 2, 3, 100))
        if self.random.random() < 0.5:
            items = [("new", torch.zeros(4)) for _ in range(count)]
        else:
            items = [(self.tensor if self.random.random() < 0.8 else self.anything)() for _ in range(count)]
        name, values = ",".join(text for text, _ in items[:5]), [item for _, item in items]
        match self.random.randrange(8):
            case 0:
                return self.anything()
            case 1:
                return f"[{name}]", values
            case 2:
                return f"MyTuple({name})", MyTuple(values)
            case 3 | 4 if values:
                return f"({name})[0]", values[0]
            case _:
                return f"({name})", tuple(values)

    def call(self) -> tuple[str, Callable[[], Any]]:
        """Draw one call; return how it reads, and what makes it."""
        name = self.random.choice(list(self.functions))
        function, count = self.functions[name]
        is_odd = self.random.random() < 0.6
        if is_odd and self.random.random() < 0.3:
            count = self.random.choice((0, 1, 2, 3, 100))
        items = [(self.anything if is_odd and self.random.random() < 0.15 else self.tensor)() for _ in range(count)]
        options: dict[str, tuple[str, Any]] = {}
        if name == "bare":
            options = dict.fromkeys(("alpha", "beta"), ("1.5", 1.5))
        if name == "flags":
            # Words that are equal, and others than those of the program.
            drawn = {"flip": self.random.choice((True, False, None, 0)), "word": self.random.choice(("add", "sub"))}
            drawn = {key: value for key, value in drawn.items() if self.random.random() < 0.4}
            options = {
                key: (repr(value), value[:1] + value[1:] if key == "word" else value) for key, value in drawn.items()
            }
            if self.random.random() < 0.2:
                items.append(("numbers[1]", NUMBERS[1]))
        for key in ("alpha", "beta") if name == "bare" else ("alpha",) if name in ("axpy", "flags") else ():
            if self.random.random() < 0.4:
                index = self.random.randrange(len(NUMBERS))
                options[key] = f"numbers[{index}]", NUMBERS[index]
            if is_odd and self.random.random() < 0.2:
                options[key] = self.anything()
        if self.random.random() < (0.4 if is_odd else 0.1):
            options["out"] = self.out(2 if name in ("both", "two") else 1)
        extra = self.random.choice(NAMES)
        if is_odd and self.random.random() < 0.1 and not any(str.__eq__(extra, name) for name in options):
            options[extra] = self.anything()
        is_grad = self.random.random() < 0.8
        words = [*(text for text, _ in items[:5]), *(f"{key!s}={options[key][0]}" for key in options)]
        text = f"{name}({', '.join(words)})"
        given, named = [item for _, item in items], {key: value for key, (_, value) in options.items()}

        def make() -> Any:
            with torch.set_grad_enabled(is_grad):
                return function(*given, **named)

        return text, make


def describe(value: Any) -> str:
    """Return a value's text; of a tensor all that can be seen of it."""
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}({', '.join(map(describe, value))})"
    if not isinstance(value, torch.Tensor):
        return repr(value)
    head = f"{type(value).__name__} {value.dtype} {tuple(value.shape)[:5]} {value.requires_grad}"
    if value.layout is not torch.strided or value.device.type == "meta" or value.is_nested:
        return head
    plain = value.detach().as_subclass(torch.Tensor)
    return f"{head} {value.stride()[:5]} {plain.reshape(-1).tolist() if plain.numel() < 50 else 'large'}"


def outcome(call: Callable[[], Any]) -> str:
    """Return what a call gives as one line."""
    try:
        return describe(call()).replace("\n", " ")
    except Exception as error:
        # In C there is no other method to name.
        return f"{type(error).__name__}: {error}".splitlines()[0].replace("call_anew", "__call__")


def make_calls(seed: int, count: int, path: Path) -> None:
    """Make the calls and write their lines."""
    calls = Calls(seed)
    # Line by line, and the call before what it gives: if the process ends, the last line says in which call.
    with path.open("w", encoding="utf-8", errors="backslashreplace", buffering=1) as lines:
        for index in range(count):
            if index % 997 == 996:
                calls.fuser.config.touch()
            text, call = calls.call()
            lines.write(f"{text}\t")
            lines.flush()
            lines.write(f"{outcome(call)}\n")
            if "out=" in text:
                # A call that resizes one tensor and refuses the next leaves the first with whatever its memory held.
                calls.tensors = make_tensors()


class Module:
    """Calls the functions of the C module with what they are not made for; an exception is fine."""

    def __init__(self, seed: int, module: ModuleType) -> None:
        from fuser import record

        self.random = random.Random(seed)
        self.module = module
        self.calls = Calls(seed)
        self.allocate = record._ALLOCATE["cpu"]
        # A function that may be called with any arguments, and looks at none.
        self.harmless = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p).value
        self.launchers: list[Any] = []
        self.missing = record.MISSING

    def value(self) -> Any:
        """Draw any object."""
        match self.random.randrange(6):
            case 0:
                return self.random.choice((0, 1, -1, 2**31, 2**32 + 1, -(2**31), 2**63, 2**64, 10**30))
            case 1:
                return tuple(self.value() for _ in range(self.random.randrange(4)))
            case 2:
                return self.random.choice((b"", b"12345678", bytes(8192), "f", "x\0", {}, {"out": 1}, {1: 2}, print))
            case _:
                return self.calls.anything()[1]

    def maybe(self, value: Any) -> Any:
        """Return ``value``, or now and then something else."""
        return self.value() if self.random.random() < 0.03 else value

    def address(self) -> Any:
        """Draw the address of a function. Nobody can check a wrong one, only that it is one."""
        return self.harmless if self.random.randrange(30) else self.random.choice((0, None, "f", 0.5, (), Hostile()))

    def check(self, launcher: Any) -> Callable[..., Any]:
        """Draw what is asked whether tensors are like the recorded ones; it may undo what called it."""

        def check(*_: Any) -> Any:
            match self.random.randrange(40):
                case 0:
                    return self.value()
                case 1:
                    raise ZeroDivisionError("check")
                case 2:
                    launcher.__init__((), ())
                case 3:
                    self.add(launcher)
                case 4:
                    gc.collect(0)
            return True

        return check

    def places(self, values: int, count: int) -> Any:
        """Draw places of values, in most cases right ones."""
        low, high = (0, max(values, 1)) if self.random.randrange(20) else (-2, values + 3)
        return self.maybe(tuple(self.random.randrange(low, high) for _ in range(count)))

    def step(self, inputs: int, values: int) -> Any:
        """Draw one launch of a record over so many inputs, and values."""
        some, integer = self.maybe, self.random.randrange
        size = integer(-4, 600) if integer(20) == 0 else 8 * integer(6, 12)
        first, count = integer(-1, 4) if integer(20) == 0 else 1, integer(2) if inputs else 0
        letters = some("".join(self.random.choice("fcib" if integer(9) else "?q") for _ in range(count)))
        pointers, numbers = self.places(values, integer(3) if values else 0), self.places(inputs, count)
        template = some(bytes(max(size, 0)))
        head = (self.address(), some(1), some(1), some(0), integer(9) == 0, template, first)
        flags = integer(30) == 0, integer(2) == 0
        return some((*head, pointers, numbers, letters, *flags, some("step")))

    def read(self) -> Any:
        """Draw a value that a record relies on: mostly one that is there, in a dict or as an attribute."""
        some, module = self.maybe, self.module
        held = self.random.choice(((vars(self), "module", module), (self, "module", module), (Hostile(), "none", None)))
        return some(tuple(map(some, held)))

    def add(self, launcher: Any) -> Any:
        """Record something of the right shape, or nearly."""
        some, integer = self.maybe, self.random.randrange
        tensors, scalars, out = self.arguments()
        made = tuple((some(self.allocate), some(((4,), (1,), torch.float32))) for _ in range(integer(3)))
        inputs = len(tensors) if isinstance(tensors, tuple) else 2
        outs = out if isinstance(out, tuple) else () if out is None else (out,)
        steps = tuple(self.step(inputs, inputs + len(outs) + len(made)) for _ in range(integer(3)))
        results = integer(-1, 4) if integer(20) == 0 else len(made) if out is None else len(outs)
        through = some(None if integer(5) else lambda *items: items)
        head = (
            self.check(launcher),
            some(self.calls.fuser.config.generation),
            some((None, None, True, False)[integer(4)]),
            some(made),
        )
        reads = some(tuple(self.read() for _ in range(integer(3))))
        flat = some(() if integer(3) else tuple(integer(-1, most) for most in (9, 9, 99)[: 3 - (integer(20) == 0)]))
        resize = some(None if integer(4) else self.resize(launcher, made, steps))
        rest = (results, some(steps), some(0), integer(9) == 0, some(()), through, reads, flat, resize, integer(2) == 0)
        return launcher.add(tensors, scalars, out, some((*head, *rest)))

    def resize(self, launcher: Any, *launches: Any) -> Callable[..., Any]:
        """Draw what is asked what a call of other sizes launches: mostly what the record says."""
        check = self.check(launcher)

        def resize(*_: Any) -> Any:
            check()
            kept = self.maybe((*map(self.maybe, launches), ()))
            return None if self.random.randrange(9) == 0 else kept

        return resize

    def arguments(self) -> tuple[Any, Any, Any]:
        """Draw what ``launch`` takes; few enough kinds that records are met again."""
        some, integer, calls = self.maybe, self.random.randrange, self.calls
        x, y = calls.tensors["x"], calls.tensors["y"]
        if integer(2):
            return (x, y), None, None
        tensors: Any = self.random.choice(
            ((x, y), (y, x), (x, y), (x, x), (x,), (x, 0.5), (), (calls.tensor()[1],) * 3)
        )
        scalars = some(self.random.choice((None, None, None, None, None, {}, {"alpha": 1.0}, {"alpha": 1, "beta": 2})))
        outs = (None, None, None, (), torch.zeros(4), (torch.zeros(4),), (torch.zeros(4), y), [torch.zeros(4)])
        return some(tensors), scalars, some(self.random.choice(outs))

    def call(self) -> Any:
        """Make one call."""
        integer, module = self.random.randrange, self.module
        match integer(40):
            case 0:
                return module.set_driver(self.address(), self.address(), *[self.address()] * integer(3))
            case 1:
                # The capsule is never right.
                return module.set_torch(*(self.value() for _ in range(integer(12))))
            case 2:
                function = self.random.choice((module.set_generation, module.launch_count, module.show_call))
                return function(*(self.value() for _ in range(integer(3))))
            case 3:
                return module.show_call(self.random.choice((int, type, Hostile, module.Launcher)), self.value())
            case 4:
                return module.Launcher(*(self.value() for _ in range(integer(4))))
            case 5:
                empty = module.Launcher.__new__(module.Launcher)
                return self.add(empty) and empty.launch(*self.arguments())
            case 6:
                names = self.random.choice(((), (), (), (), ("alpha",), ("alpha", "beta")))
                defaults = self.maybe((0.5, None)[: len(names)])
                order = self.random.choice((None, None, None, None, (0, 1), (1, 0), (0, -1), (-3,), (2**40,)))
                more = [
                    self.maybe((self.calls.tensors["x"], 0.5)[: len(names)]),
                    self.maybe((self.missing,) * len(names)),
                ]
                given = (names, defaults, self.maybe(order), *more[: integer(4)])
                self.launchers = [*self.launchers[-3:], module.Launcher(*given)]
                return None
        if not self.launchers:
            return None
        launcher = self.random.choice(self.launchers)
        match integer(4):
            case 0:
                return self.add(launcher)
            case 1:
                tensors, scalars, out = self.arguments()
                return launcher(*tensors, **(scalars or {}), out=out)
            case _:
                return launcher.launch(*self.arguments(), *[0] * (integer(50) == 0))


ALLOWED = (TypeError, ValueError, OverflowError, RuntimeError, AttributeError, ZeroDivisionError)


def call_module(seed: int, count: int, module: ModuleType) -> None:
    """Call the C module's functions."""
    from fuser.config import config

    odd = Module(seed, module)
    for _ in range(count):
        try:
            odd.call()
        except ALLOWED:
            pass
        finally:
            module.set_generation(config.generation)


def call_in_threads(count: int) -> None:
    """Make right calls in 8 threads, of more kinds than a launcher remembers, while one forgets them all."""
    import fuser

    text = "template <typename T> T shared(T x, T y, T alpha) { return alpha * x + y; }"
    function = fuser.create_jit_fn(text, alpha=2.0)
    wrong: list[str] = []

    def work(seed: int) -> None:
        drawn = random.Random(seed)
        for _ in range(count):
            size, alpha = drawn.randrange(1, 40), float(drawn.randrange(9))
            rows = (drawn.randrange(1, 5),) * drawn.randrange(2)
            x, y = draw(*rows, size, dtype=torch.float32), torch.full((size,), float(seed))
            out = torch.empty(*rows, size) if drawn.randrange(3) == 0 else None
            if not torch.equal(function(x, y, alpha=alpha, out=out), alpha * x + y):
                wrong.append(f"{seed}: {size} elements, {alpha}")
            if drawn.randrange(50) == 0:
                function.__class__.__mro__[1].__init__(function, ("alpha",), (2.0,))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    sys.setswitchinterval(1e-6)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[:5]


def main() -> None:
    """Do what the command line says."""
    seed, count, path = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    module = load_library(sys.argv[4] if len(sys.argv) > 4 else None)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    make_calls(seed, count, path)
    if module is not None:
        before = module.launch_count()
        call_module(seed, max(count // 2, 2000), module)
        assert module.launch_count() > before, "no odd record was replayed"
        call_in_threads(count // 50)


if __name__ == "__main__":
    main()
