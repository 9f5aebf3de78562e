"""Every exception fuser raises: a small family, each class under the builtin a caller would expect."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from fuser.config import config

P = ParamSpec("P")
R = TypeVar("R")

__all__ = [
    "ArgumentError",
    "CacheError",
    "CacheWarning",
    "CaptureError",
    "CompileError",
    "CompilerFailedError",
    "CompilerNotFoundError",
    "CompilerTimeoutError",
    "DataDependentError",
    "DeviceError",
    "DimError",
    "EagerDerivativeError",
    "FallbackError",
    "FallbackWarning",
    "FunctorError",
    "FunctorWarning",
    "FuserError",
    "GradientError",
    "GroupError",
    "NoCompileError",
    "NotDifferentiableError",
    "OneValueError",
    "ShapeError",
    "TracingError",
    "UnsupportedError",
    "UntranslatableError",
]


def __dir__() -> list[str]:
    return __all__


# A compiler that meets one bad template can print pages; a reader needs the first messages only.
MAX_MESSAGE_LINES = 20


class FuserError(Exception):
    """Base class of everything fuser raises on purpose."""


class FunctorError(FuserError, ValueError):
    """A functor's text is wrong: it does not parse, or its signature cannot be used.

    ``line`` and ``column`` count from 1 in the user's own text; both are None when no place can be named.
    """

    def __init__(self, message: str, line: int | None = None, column: int | None = None) -> None:
        super().__init__(message)
        self.line = line
        self.column = column


class UntranslatableError(FuserError, NotImplementedError):
    """A functor has no eager version: its text holds something that torch's operations cannot follow.

    ``line`` and ``column`` count from 1 in the user's own text; ``construct`` names what stands there ("goto").
    """

    def __init__(self, source: str, line: int, column: int, construct: str) -> None:
        super().__init__(describe_place(source, line, column, f"{construct} has no translation to torch"))
        self.source = source
        self.line = line
        self.column = column
        self.construct = construct

    def __reduce__(self) -> tuple[type, tuple[str, int, int, str], dict[str, Any]]:
        return type(self), (self.source, self.line, self.column, self.construct), self.__dict__


class ArgumentError(FuserError, TypeError):
    """A call has too few or too many tensors, or an unknown, missing or ill-typed scalar."""


class ShapeError(FuserError, RuntimeError):
    """Shapes do not broadcast, or ``out=`` has a shape that cannot take the result."""


class OneValueError(ShapeError, ValueError):
    """Of a norm in training each channel, or group, has one value: ``torch.nn.functional`` refuses that."""


class DimError(FuserError, IndexError):
    """A dimension to reduce is out of range."""


class DeviceError(FuserError, RuntimeError):
    """The tensors of one call live on several devices."""


class GroupError(FuserError, ValueError):
    """A FusionGroup breaks a rule of the IR, or a key names no registered group."""


class GradientError(FuserError, RuntimeError):
    """An input requires grad and the group has no derivative."""


class EagerDerivativeError(GradientError):
    """A group's derivative is no group: where torch runs the group, part by part, it can differentiate that."""


class DataDependentError(EagerDerivativeError):
    """A functor's control flow depends on data, so that its derivative has no text."""


class NotDifferentiableError(GradientError):
    """A functor has no derivative; says which operation has none, and where in the text if that is known."""

    def __init__(self, reason: str, place: tuple[int, int] | None = None, functor: str = "") -> None:
        where = f" at line {place[0]}, column {place[1]}" if place else ""
        super().__init__(f"{functor or 'the functor'} has no derivative: {reason}{where}")
        self.reason = reason
        self.place = place
        self.functor = functor

    def __reduce__(self) -> tuple[type, tuple[Any, ...], dict[str, Any]]:
        return type(self), (self.reason, self.place, self.functor), self.__dict__

    @property
    def line(self) -> int | None:
        """The line, from 1."""
        return self.place[0] if self.place else None

    @property
    def column(self) -> int | None:
        """The column, from 1."""
        return self.place[1] if self.place else None


class FallbackError(FuserError, RuntimeError):
    """A group can neither be compiled nor run in eager torch; says why for both."""


class UnsupportedError(FuserError, RuntimeError):
    """A group cannot be fused for these inputs; the executor turns this into a recorded fallback.

    Attributes:
        application: index of the application that has no kernel, where the rest of the group may have one; how many
            applications there are, where none is in the way and the group is too long; else -1.
        is_expected: whether torch's kernel is what strict numerics ask for here: nobody is warned.
    """

    # Given at once: a variable for an error, where it is raised, makes a cycle with its traceback, which keeps all that
    # the callers' frames hold, tensors too, until the garbage collector comes.
    def __init__(self, *arguments: object, application: int = -1, is_expected: bool = False) -> None:
        super().__init__(*arguments)
        self.application = application
        self.is_expected = is_expected


class UnknownOrderError(UnsupportedError):
    """Whether torch has an order of a reduction could not be found out now."""


class FallbackWarning(UserWarning):
    """Something runs in eager torch instead of in a kernel; warned about once for each reason.

    ``warnings.filterwarnings("ignore", category=fuser.errors.FallbackWarning)`` silences it, and
    ``fuser.stats()`` counts on.
    """


class FunctorWarning(UserWarning):
    """A compiler found undefined behaviour in a functor's text; warned about once for each place.

    A kernel that was compiled before, and is loaded from disk, warns of nothing.
    """


class CacheError(FuserError, RuntimeError):
    """A file of compiled kernels cannot be used or written; says why. Nothing of it is loaded."""


class CacheWarning(UserWarning):
    """The kernel cache was not used: an entry is damaged or not to be trusted, or nothing can be kept on disk.

    The call goes on without it, and compiles. Warned about once for each reason, as ``FallbackWarning`` is.
    """


class TracingError(UnsupportedError):
    """``fuse`` cannot trace a function; the message shows the user's line, and says what to do instead.

    ``filename``, ``line`` (from 1) and ``source_line`` say where; they are None where no place is known.
    """

    def __init__(
        self, reason: str, filename: str | None = None, line: int | None = None, source_line: str | None = None
    ) -> None:
        shown = f"{reason}\n{filename}:{line}: {(source_line or '').strip()}" if filename else reason
        super().__init__(shown)
        self.reason = reason
        self.filename = filename
        self.line = line
        self.source_line = source_line

    def __reduce__(self) -> tuple[type, tuple[Any, ...], dict[str, Any]]:
        return type(self), (self.reason, self.filename, self.line, self.source_line), self.__dict__


class NoCompileError(FuserError, RuntimeError):
    """A kernel is missing, and may not be compiled: ``config.no_compile`` is set, or the interpreter is ending."""


class CaptureError(FuserError, RuntimeError):
    """A kernel is needed for the first time while a CUDA graph is being captured, where none can be loaded."""


class CompilerNotFoundError(UnsupportedError):
    """No compiler for the device: no host C++ compiler, or no NVRTC."""


class CompilerFailedError(UnsupportedError):
    """A compiler came to no end for a reason that is not in the text: it was killed, say, or the disk is full.

    It is not remembered: the next call tries again.
    """


class CompilerTimeoutError(UnsupportedError):
    """The host C++ compiler took longer than ``config.compile_timeout``, and was ended."""


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One compiler message at a place in a functor's own text (line and column from 1)."""

    functor: str
    line: int
    column: int
    severity: str
    message: str


class CompileError(FuserError, RuntimeError):
    """A functor does not compile. The message shows the user's own lines, never the generated kernel.

    Attributes:
        diagnostics: the compiler's messages that point into functor texts.
        source: the generated kernel, with line numbers; print it to see what was compiled.
        options: the compiler options.
        log: everything the compiler said.
    """

    def __init__(
        self,
        message: str,
        *,
        diagnostics: Sequence[Diagnostic] = (),
        source: str = "",
        options: str = "",
        log: str = "",
    ) -> None:
        lines = message.splitlines()
        if len(lines) > MAX_MESSAGE_LINES:
            lines = [*lines[: MAX_MESSAGE_LINES - 1], "... (the whole log is in this error's .log)"]
        super().__init__("\n".join(lines))
        self.diagnostics = tuple(diagnostics)
        self.source = "\n".join(f"{number:5d} | {line}" for number, line in enumerate(source.splitlines(), 1))
        self.options = options
        self.log = log


def shows_users_frames(function: Callable[P, R]) -> Callable[P, R]:
    """Let what fuser raises on purpose in a public function show the frames of its users, and none of its own.

    With ``config.full_tracebacks`` it shows all.
    """

    @functools.wraps(function)
    def public(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except FuserError as error:
            shown: BaseException | None = None if config.full_tracebacks else error
            while isinstance(shown, FuserError):
                shown.__traceback__ = _users_part(shown.__traceback__)
                shown = shown.__cause__
            raise

    return public


def _users_part(traceback: TracebackType | None, *, is_inside: bool = False) -> TracebackType | None:
    # Without fuser's frames, and those of torch that they called.
    if traceback is None:
        return None
    package = str(traceback.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
    is_inside = package == "fuser" or (is_inside and package == "torch")
    rest = _users_part(traceback.tb_next, is_inside=is_inside)
    if is_inside:
        return rest
    return TracebackType(rest, traceback.tb_frame, traceback.tb_lasti, traceback.tb_lineno)


def describe_type(item: object) -> str:
    """Return the name of an argument's type, with its module where that is not Python's: ``numpy.ndarray``."""
    kind = next((base for base in (list, tuple, dict) if isinstance(item, base)), type(item))
    if item is None:
        return "None"
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def suggest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'exp'?" for the known name that is most like a wrong one; nothing if none is."""
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.75)
    return f"; did you mean {near[0]!r}?" if near else ""


def describe_place(text: str, line: int, column: int, message: str) -> str:
    """Return a message for a place of ``text`` (line and column from 1), with the line and a caret below it."""
    return f"line {line}, column {column}: {message}\n{point_at(text, line, column)}"


def point_at(text: str, line: int, column: int) -> str:
    """Return the given line of ``text`` with a caret below the column (both from 1); empty if out of range."""
    # As compilers count: a form feed ends no line.
    lines = text.split("\n")
    if not 1 <= line <= len(lines):
        return ""
    shown = re.sub(r"[\x00-\x1f\x7f\x85\u2028\u2029]", " ", lines[line - 1].removesuffix("\r"))
    return f"{line:5d} | {shown}\n      | {' ' * (max(column, 1) - 1)}^"
