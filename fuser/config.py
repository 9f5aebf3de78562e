"""Settings: one table of names, environment variables, defaults and meanings.

The table is the only source: it makes the ``config`` object, the environment table of the docs, and the part of
every kernel key that comes from settings (those with ``changes_code``).
"""

from __future__ import annotations

import difflib
import itertools
import math
import operator
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, Unpack

from fuser import log
from fuser.process import Lock, await_before_fork

__all__ = ["SETTINGS", "STALE", "Config", "Setting", "config"]


class Setting(NamedTuple):
    """One row of the table."""

    # Attribute of ``fuser.config``.
    name: str
    # Environment variable read when fuser is imported.
    env: str
    default: Any
    # Turns text from the environment, or a value a user assigns, into the stored value; raises ValueError.
    parse: Callable[[Any], Any]
    # Whether the generated text or the compiler's options depend on it: such settings are part of kernel keys.
    changes_code: bool
    meaning: str


def parse_choice(*choices: str) -> Callable[[Any], str]:
    """Return a parser that accepts exactly ``choices``."""

    def parse(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return str(value)

    return parse


def parse_bool(value: Any) -> bool:
    """Accept a bool, or the texts 0/1/true/false/yes/no/on/off."""
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in {"1", "true", "yes", "on"}:
        return True
    if text in {"0", "false", "no", "off"}:
        return False
    raise ValueError("must be a bool (0 or 1)")


def parse_optional_int(value: Any) -> int | None:
    """Accept a non-negative integer, or None (an empty text)."""
    return None if value is None or value == "" else _parse_int(value, 0)


def parse_positive_int(value: Any) -> int:
    """Accept an integer of 1 or more."""
    return _parse_int(value, 1)


def _parse_int(value: Any, least: int) -> int:
    try:
        # Not int(), which cuts what is behind the point.
        number = int(value) if isinstance(value, str) else operator.index(value)
    except (ValueError, TypeError):
        number = least - 1
    if number < least:
        raise ValueError(f"must be an integer of {least} or more")
    return number


def parse_seconds(value: Any) -> float:
    """Accept a positive number of seconds."""
    try:
        seconds = float(value)
    except (ValueError, TypeError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError("must be a positive number of seconds")
    return seconds


def parse_optional_str(value: Any) -> str | None:
    """Accept a text or a path; a blank one means None."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str | None):
        raise TypeError("must be a text or a path, or None")
    if text and "\0" in text:
        raise ValueError("no path has a NUL in it")
    # Raises where the locale has no such letters, as half of a surrogate pair everywhere.
    os.fsencode(text or "")
    return text if text and text.strip() else None


def parse_artifacts(value: Any) -> frozenset[str]:
    """Accept a comma-separated text or an iterable of names of artifacts; None for none."""
    value = "" if value is None else value
    names = value.split(",") if isinstance(value, str) else list(value) if isinstance(value, Iterable) else [value]
    if not all(isinstance(name, str) for name in names):
        raise TypeError("must be a text or names of artifacts")
    artifacts = frozenset(name.strip() for name in names if name.strip())
    unknown = artifacts - log.ARTIFACTS.keys()
    if unknown:
        raise ValueError(f"unknown artifact {min(unknown)!r}; artifacts are {', '.join(log.ARTIFACTS)}")
    return artifacts


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "numerics",
        "FUSER_NUMERICS",
        "strict",
        parse_choice("strict", "fast"),
        True,
        "`strict`: a fused chain equals its functors run one launch at a time, bit for bit. "
        "`fast`: intermediates stay in the compute type, multiply-adds may contract across functors, and on CUDA "
        "float32 division may be off by 2 ULP and square roots by 1.",
    ),
    Setting(
        "cpu_math",
        "FUSER_CPU_MATH",
        "fast",
        parse_choice("fast", "precise"),
        True,
        "Math functions on the CPU. `fast`: vectorised, right to 4 units in the last place. "
        "`precise`: right to 1 unit; slower, and float64 is not vectorised.",
    ),
    Setting(
        "cxx",
        "CXX",
        None,
        parse_optional_str,
        True,
        "The host C++ compiler. Unset: the first of `g++`, `c++`, `clang++` on the path.",
    ),
    Setting(
        "cache_dir",
        "FUSER_CACHE_DIR",
        None,
        parse_optional_str,
        False,
        "Where compiled kernels are kept on disk. Unset: the user's cache directory.",
    ),
    Setting("disk_cache", "FUSER_DISK_CACHE", True, parse_bool, False, "Keep compiled kernels on disk."),
    Setting(
        "cache_size",
        "FUSER_CACHE_SIZE",
        2 << 30,
        parse_positive_int,
        False,
        "How many bytes the kernels on disk may take; those that nobody read for the longest time go first.",
    ),
    Setting(
        "lock_timeout",
        "FUSER_LOCK_TIMEOUT",
        60.0,
        parse_seconds,
        False,
        "How many seconds a process waits for another one that compiles the same kernel, before it compiles it itself.",
    ),
    Setting(
        "compile_timeout",
        "FUSER_COMPILE_TIMEOUT",
        600.0,
        parse_seconds,
        False,
        "After how many seconds the host C++ compiler is ended; the call then runs in eager torch. "
        "NVRTC runs inside the process and cannot be ended.",
    ),
    Setting(
        "no_compile",
        "FUSER_NO_COMPILE",
        False,
        parse_bool,
        False,
        "Raise `NoCompileError` where a kernel is missing, whether or not there is a compiler: shows that a warm-up"
        " covered everything.",
    ),
    Setting(
        "fuel",
        "FUSER_FUEL",
        None,
        parse_optional_int,
        False,
        "Stop substituting after this many fusion groups, to bisect a wrong result. Unset: no limit.",
    ),
    Setting(
        "autotune",
        "FUSER_AUTOTUNE",
        False,
        parse_bool,
        False,
        "Time several block sizes, vectors in flight and tile shapes when a CUDA kernel is first needed for a layout "
        "class, and keep the fastest on disk. What a kernel returns does not depend on it.",
    ),
    Setting(
        "odd_products",
        "FUSER_ODD_PRODUCTS",
        True,
        parse_bool,
        False,
        "In strict numerics on CUDA, let a kernel of fuser's compute matrix products in 16 bits whose rows are odd, as "
        "a vocabulary of 50257 makes them, where it has cuBLAS's bits and takes less time. Both are found out when a "
        "graph is compiled.",
    ),
    Setting(
        "max_plans",
        "FUSER_MAX_PLANS",
        1024,
        parse_positive_int,
        False,
        "How many call signatures (dtypes, shapes, strides) each group remembers; the oldest unused one goes first.",
    ),
    Setting(
        "max_unrolled",
        "FUSER_MAX_UNROLLED",
        256,
        parse_positive_int,
        False,
        "How many loop iterations the eager version of a functor may have written out in its graph, and how many "
        "elements an index that depends on data may choose from there. Beyond it, an interpreter runs the functor.",
    ),
    Setting(
        "internal_errors",
        "FUSER_INTERNAL_ERRORS",
        "fallback",
        parse_choice("fallback", "raise"),
        False,
        "When fuser itself fails while it plans a call. `fallback`: a script is written that shows it, and the call "
        "runs in eager torch. `raise`: the exception leaves.",
    ),
    Setting(
        "full_tracebacks",
        "FUSER_FULL_TRACEBACKS",
        False,
        parse_bool,
        False,
        "Show the frames inside of fuser, too, in the traceback of an error that fuser raises on purpose.",
    ),
    Setting(
        "logs",
        "FUSER_LOGS",
        frozenset(),
        parse_artifacts,
        False,
        f"Write artifacts to stderr as they come: a comma-separated list of {', '.join(log.ARTIFACTS)}.",
    ),
    Setting(
        "dump",
        "FUSER_DUMP",
        None,
        parse_optional_str,
        False,
        "A folder that gets a folder for each kernel: its group, what it is specialised on, its text and its binary.",
    ),
)


class Values(TypedDict, total=False):
    """What ``Config.patch`` takes."""

    numerics: Literal["strict", "fast"]
    cpu_math: Literal["fast", "precise"]
    cxx: str | os.PathLike[str] | None
    cache_dir: str | os.PathLike[str] | None
    disk_cache: bool
    cache_size: int
    lock_timeout: float
    compile_timeout: float
    no_compile: bool
    fuel: int | None
    autotune: bool
    odd_products: bool
    max_plans: int
    max_unrolled: int
    internal_errors: Literal["fallback", "raise"]
    full_tracebacks: bool
    logs: str | Iterable[str] | None
    dump: str | os.PathLike[str] | None


_TABLE = {setting.name: setting for setting in SETTINGS}

if TYPE_CHECKING:

    class _PathOrText:
        """A setting that is a text, of which a path is made one."""

        def __get__(self, config: Config, kind: type[Config]) -> str | None: ...
        def __set__(self, config: Config, value: str | os.PathLike[str] | None) -> None: ...


# No generation: of what was made while settings changed.
STALE = 0


class Config:
    """The settings as attributes. Assigning checks the value; an unknown name raises AttributeError.

    ``generation`` is a number for all settings together: what was remembered under one of them holds whenever the
    settings are those again. ``listeners`` are called with it when it changes. ``changes`` says how often it did: what
    was made while it grew, by another thread, was made under several, and is remembered under none.
    """

    if TYPE_CHECKING:
        numerics: Literal["strict", "fast"]
        cpu_math: Literal["fast", "precise"]
        cxx = _PathOrText()
        cache_dir = _PathOrText()
        disk_cache: bool
        cache_size: int
        lock_timeout: float
        compile_timeout: float
        no_compile: bool
        fuel: int | None
        autotune: bool
        odd_products: bool
        max_plans: int
        max_unrolled: int
        internal_errors: Literal["fallback", "raise"]
        full_tracebacks: bool
        dump = _PathOrText()
        generation: int
        changes: int
        listeners: list[Callable[[int], None]]

        # Any text or list of names may be assigned.
        @property
        def logs(self) -> frozenset[str]: ...  # noqa: D102
        @logs.setter
        def logs(self, value: str | Iterable[str] | None) -> None: ...

        _generations: dict[tuple[Any, ...], int]
        _numbers: Iterator[int]
        # What each ``with`` block that goes on found, in the order in which they were entered.
        _patches: list[dict[str, Any]]

    def __init__(self) -> None:
        for setting in SETTINGS:
            text = os.environ.get(setting.env, "")
            # A blank variable is what a script sets where it has no value.
            self.__dict__[setting.name] = _checked(setting, text, setting.env) if text.strip() else setting.default
        log.show(self.logs)
        self.__dict__["listeners"] = []
        self.__dict__["_patches"] = []
        self.__dict__["_numbers"] = itertools.count(STALE + 1)
        self.__dict__["changes"] = 0
        self.touch()

    if not TYPE_CHECKING:  # mypy then knows that there are no others

        def __getattr__(self, name: str) -> Any:
            near = difflib.get_close_matches(name, _TABLE, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise AttributeError(f"fuser.config has no setting {name!r}; it has {', '.join(_TABLE)}{hint}")

        def __setattr__(self, name: str, value: Any) -> None:
            if name not in _TABLE:
                self.__getattr__(name)
            self._assign(name, _checked(_TABLE[name], value, f"fuser.config.{name}"))

        def __delattr__(self, name: str) -> None:
            if name not in _TABLE:
                self.__getattr__(name)
            raise AttributeError(f"fuser.config.{name} cannot be deleted; its default is {_TABLE[name].default!r}")

    def touch(self) -> None:
        """Make whoever remembers something that depends on settings forget it."""
        self._assign("_generations", {})

    def _assign(self, name: str, value: Any) -> None:
        with _changing():
            # Whatever interrupts this leaves a number that nothing was remembered under.
            self._announce(next(self._numbers))
            self.__dict__[name] = value
            if name == "logs":
                log.show(self.logs)
            # Once more where a signal handler, or ``__del__``, changed settings meanwhile.
            known = None
            while known != (found := self._find_generation()):
                known = found
                self._announce(found)

    def _announce(self, generation: int) -> None:
        self.__dict__.update(generation=generation, changes=self.changes + 1)
        for listener in self.listeners:
            listener(generation)

    def _find_generation(self) -> int:
        values = tuple(getattr(self, name) for name in _TABLE)
        return self._generations.setdefault(values, next(self._numbers))

    @contextmanager
    def patch(self, **values: Unpack[Values]) -> Iterator[None]:
        """Set several settings for a ``with`` block, in every thread, and restore them after it."""
        before = dict[str, Any]()
        try:
            with _changing():
                before.update((name, getattr(self, name)) for name in values)
                self._patches.append(before)
                for name, value in values.items():
                    setattr(self, name, value)
            yield
        finally:
            with _changing():
                self._restore(before)

    def _restore(self, before: dict[str, Any]) -> None:
        entered = next((i for i, item in enumerate(self._patches) if item is before), None)
        if entered is None:
            return
        del self._patches[entered]
        for name, value in before.items():
            # A block that was entered later, by another thread or a generator, may go on, and restores in its turn.
            heir = next((item for item in self._patches[entered:] if name in item), None)
            if heir is None:
                setattr(self, name, value)
            else:
                heir[name] = value

    def code_key(self, **others: Any) -> tuple[tuple[str, Any], ...]:
        """Return the settings that change generated code or compiler options, as part of a kernel's key.

        Args:
            **others: values that stand in for those of some settings.
        """
        names = [setting.name for setting in SETTINGS if setting.changes_code]
        return tuple((name, others.get(name, getattr(self, name))) for name in names)

    def __reduce__(self) -> str:
        # Copied and pickled by name: what remembers plans listens to one, and takes what a copy says for its word.
        return "config"

    def __dir__(self) -> list[str]:
        # What is for users: the rest serves other stages.
        return [*(name for name in super().__dir__() if name.startswith("__")), *_TABLE, "patch"]

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{name}={getattr(self, name)!r}' for name in _TABLE)})"


def _checked(setting: Setting, value: Any, where: str) -> Any:
    try:
        return setting.parse(value)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}={value!r}: {error}") from None


def _is_command() -> bool:
    # While Python looks for what follows -m, that is all that sys.argv says of the program.
    return sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)].removeprefix("-m") == "fuser"


# Held while settings change: what follows from all of them together must not come from a mixture.
_changing = Lock()
await_before_fork(_changing)

try:
    config = Config()
except ValueError as error:
    if _is_command():
        # As the command line says all that is wrong; its own code comes after this.
        sys.exit(str(error))
    raise
