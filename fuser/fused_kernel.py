"""What a compiled kernel is to the rest of fuser, whatever compiled it, and how its arguments are packed."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from fuser import counters
from fuser.config import config
from fuser.cxx.functor import Functor
from fuser.disk_cache import CacheKey
from fuser.dtypes import MAX_EXACT_INTEGER
from fuser.errors import CompileError, Diagnostic, FunctorWarning, NoCompileError, point_at, suggest
from fuser.geometry import Flat, Launch, launch_lists, pack_geometry
from fuser.hints import find_hint
from fuser.kernel_source import Dialect, KernelSource
from fuser.layout import IterationSpace
from fuser.prelude import offered_names
from fuser.process import Slots, core_count

__all__ = [
    "ArgumentPacker",
    "Backend",
    "FusedKernel",
    "ListPacker",
    "build_compile_error",
    "check_may_compile",
    "compiler_slots",
    "warn_of_texts",
]

# What compilers hold, each of which takes a core and some hundred MB; as turns are taken blindly, twice as many.
compiler_slots = Slots(2 * core_count())
# struct letters of a number passed by value.
_FIELDS = {"f": "d", "c": "dd", "i": "q", "b": "q"}
# Where codegen puts each functor: no name of the user's.
_NAMESPACE = r"\bfuser_f\d+::"
# What compilers say of names, and of those that nobody declared.
_NAMED = r"""['"](?:\w*::)*([A-Za-z_]\w*)"""
_UNKNOWN = (
    r"""'(?:\w*::)*(\w+)' (?:was not declared|is not a member|has not been declared)"""
    r"""|(?:undeclared identifier|no member named) '(\w+)'"""
    r"""|arguments to '(\w+)' that depend|identifier "(\w+)" is undefined|has no (?:member )?"(\w+)\""""
)


class FusedKernel(Protocol):
    """A loaded kernel. Threads may launch it at the same time."""

    source: KernelSource
    # Under which its machine code is kept on disk.
    key: CacheKey
    # Address of the function: a CUfunction, or ``void (const void* arguments, int threads)``.
    address: int

    def prepare(self, space: IterationSpace) -> Launch:
        """Return how to launch over a space that is not empty."""

    def prepare_any(self) -> Flat:
        """Return how the launch of this kernel depends on the number of elements; it is linear."""

    def bind(self, launch: Launch, device_index: int) -> Callable[[bytes], None]:
        """Return a function that launches with packed arguments: on CUDA on torch's current stream of the device.

        There it returns before the kernel has run, and raises RuntimeError if the driver refuses.
        """


class Backend(Protocol):
    """One room that turns a source into a kernel: fuser.cuda or fuser.cpu."""

    dialect: Dialect

    def target(self, device_index: int | None) -> str:
        """Return what code is made for: a GPU architecture (sm_90), or the host."""

    def maker(self) -> tuple[str, ...] | None:
        """Return who compiles, as texts that differ where kernels of one text may; None where nobody does."""

    def load_compiler(self) -> None:
        """Find, and load, what compiles, if it can be had: that takes as long as a small kernel."""

    def compile(self, source: KernelSource, target: str) -> FusedKernel:
        """Compile, or load from the disk cache.

        Raises:
            CompileError: the text does not compile; points into the functor.
            CompilerNotFoundError: there is no compiler.
            NoCompileError: it is not on disk, and ``config.no_compile`` is set.
        """

    def load(self, source: KernelSource, key: CacheKey, payload: bytes) -> FusedKernel:
        """Load the machine code of a source, whose text need not be known any more.

        Raises:
            CompilerNotFoundError, CompilerFailedError: it cannot be loaded here.
        """


class ArgumentPacker:
    """Packs one call's addresses and numbers into the argument struct of a kernel.

    Sizes and strides are fixed when it is made.
    """

    def __init__(self, source: KernelSource, space: IterationSpace) -> None:
        # Words before the addresses.
        self.first_word = 2 if source.has_zero else 1
        # One letter per number: f, c, i or b.
        self.number_codes = "".join(kind.__name__[0] for _, kind in source.numbers)
        fields = "Q" * (len(source.operands) + source.has_workspace) + "".join(
            _FIELDS[code] for code in self.number_codes
        )
        self._head = (space.numel, 0)[: self.first_word]
        self._tail = pack_geometry(source, space)
        self._struct = struct.Struct(f"={len(self._head)}q{fields}{len(self._tail)}q")

    @property
    def words(self) -> tuple[int, ...]:
        """The whole struct; what a call fills in is zero."""
        filled_in = self._struct.size // 8 - len(self._head) - len(self._tail)
        return (*self._head, *(0,) * filled_in, *self._tail)

    @property
    def template(self) -> bytes:
        """The words as bytes."""
        return struct.pack(f"={len(self.words)}q", *self.words)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_struct": self._struct.format}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _struct=struct.Struct(state["_struct"]))

    def pack(self, addresses: Sequence[int], numbers: Sequence[Any]) -> bytes:
        """Return the struct's bytes.

        Args:
            addresses: data pointers of the operands, outputs first, in the order of ``KernelSource.operands``; between
                outputs and inputs that of the workspace, if there is one.
            numbers: values in the order of ``KernelSource.numbers``.

        Raises:
            struct.error: an integer does not fit in 64 bits, or is none of the doubles where it has to be one.
        """
        if numbers:
            pairs = zip(self.number_codes, numbers, strict=True)
            numbers = [field for code, number in pairs for field in _CONVERT[code](number)]
        return self._struct.pack(*self._head, *addresses, *numbers, *self._tail)


class ListPacker:
    """Packs the argument struct of a kernel over lists of tensors; see ``fuser.list_text``.

    Sizes are fixed when it is made.
    """

    def __init__(self, source: KernelSource, numels: Sequence[int]) -> None:
        self.launch, first = launch_lists(source, numels)
        self._each = ArgumentPacker(source, IterationSpace((self.launch.grid,), ()))
        self._unused = (0,) * len(source.operands)
        self._count = len(numels)
        self._tables = [bytes(8 * (source.positions - self._count))] * len(source.operands)
        self._sizes = struct.pack(f"={1 + self._count}q", self._count, *numels) + bytes(
            8 * (source.positions - self._count)
        )
        self._first = struct.pack(f"={self._count}I", *first) + bytes(4 * (source.positions - self._count))

    def pack_tables(self, addresses: Iterable[Sequence[int]]) -> bytes:
        """Return the part of the struct that depends on memory: for each operand the data pointers of its tensors."""
        form = struct.Struct(f"={self._count}Q")
        parts = [form.pack(*each) + rest for each, rest in zip(addresses, self._tables, strict=True)]
        return b"".join([self._sizes, *parts, self._first])

    def pack(self, tables: bytes, numbers: Sequence[Any]) -> bytes:
        """Return the struct's bytes; as ``ArgumentPacker.pack``."""
        return self._each.pack(self._unused, numbers) + tables


def _as_double(number: Any) -> tuple[Any]:
    # Some large integers would be rounded twice on their way to float; a kernel that takes integers serves them.
    if isinstance(number, int) and not -MAX_EXACT_INTEGER <= number <= MAX_EXACT_INTEGER:
        raise struct.error("not exactly a double")
    return (number,)


def _as_integer(number: Any) -> tuple[Any]:
    # As CUDA converts: what is beyond the range becomes its end, NaN becomes 0. (In C++ that is undefined.)
    if isinstance(number, float):
        number = 0 if math.isnan(number) else int(max(-(2.0**63), min(number, 2.0**63 - 1024)))
    return (number,)


# Number to fields, by the letter of what it is passed as.
_CONVERT: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "f": _as_double,
    "c": lambda number: (number.real, number.imag),
    "i": _as_integer,
    "b": lambda number: (bool(number),),
}


def check_may_compile(source: KernelSource) -> None:
    """Every room asks this before it looks for its compiler: a missing kernel is an error then, compiler or not.

    Raises:
        NoCompileError: ``config.no_compile`` is set.
    """
    if config.no_compile:
        names = ", ".join(functor.entry for functor in source.functors)
        raise NoCompileError(f"the kernel of {names} is not ready, and FUSER_NO_COMPILE forbids to compile it")


def warn_of_texts(source: KernelSource, diagnostics: Sequence[Diagnostic]) -> None:
    """Show a compiler's warnings of the users' texts, once for each place; ``diagnostics`` as below."""
    for functor, item in _place_all(source, diagnostics):
        if item.severity == "warning":
            reason = f"{functor.source}\0{item}"
            counters.warn_once(reason, f"functor {functor.entry!r}: {_show(functor, item)}", FunctorWarning)


def _show(functor: Functor, item: Diagnostic) -> str:
    place = f"line {item.line}, column {item.column}"
    return f"{place}: {item.severity}: {item.message}\n{point_at(functor.source, item.line, item.column)}"


def _place_all(source: KernelSource, diagnostics: Sequence[Diagnostic]) -> list[tuple[Functor, Diagnostic]]:
    labels = source.functor_labels
    return [
        (labels[item.functor], _place(labels[item.functor], item)) for item in diagnostics if item.functor in labels
    ]


def _place(functor: Functor, item: Diagnostic) -> Diagnostic:
    # A message in the user's text: under the name it is about, with a better one where there is one.
    line, column = functor.place_in_source(item.line, item.column)
    message = re.sub(_NAMESPACE, "", item.message)
    named = re.search(_NAMED, message)
    lines = functor.source.split("\n")
    # What is missing at the end may be said of a line behind it.
    shown = lines[line - 1] if 0 < line <= len(lines) else ""
    if named is not None:
        ends = {
            match.end() + 1: match.start() + 1 for match in re.finditer(rf"\b{named[1]}\b\s*(?:<[^<>()]*>)?\s*", shown)
        }
        # gcc points behind the name of a function that is called, and into expressions with a variable without value.
        before = [start for start in ends.values() if start <= column and "uninitialized" in message]
        column = max(before, default=ends.get(column, column))
    unknown = re.search(_UNKNOWN, message)
    hint = find_hint(shown, column, message) if item.severity == "error" else ""
    if unknown is not None and "did you mean" not in message:
        name = next(filter(None, unknown.groups()))
        message += hint or suggest(name, (offered_names() | functor.words) - {name})
    else:
        message += hint
    return Diagnostic(functor.entry, line, column, item.severity, message)


def build_compile_error(
    source: KernelSource, compiler: str, diagnostics: Sequence[Diagnostic], options: str, log: str
) -> CompileError:
    """Make the error a user sees from a compiler's messages.

    Args:
        source: the kernel that did not compile.
        compiler: name of the compiler, for the message.
        diagnostics: the compiler's errors; ``functor`` holds the #line label, lines and columns are those of the
            emitted text.
        options: the compiler's options.
        log: its whole output.
    """
    diagnostics = [item for item in diagnostics if item.severity == "error"]
    placed = _place_all(source, diagnostics)
    if placed:
        lines = [f"functor {placed[0][0].entry!r} does not compile ({compiler})"]
        for functor, item in placed:
            lines += _show(functor, item).splitlines()
    else:
        names = ", ".join(functor.entry for functor in source.functors)
        # An assembler's errors have no place in a text.
        log_lines = log.strip().splitlines()
        of_assembler = [line for line in log_lines if line.startswith("ptxas error")]
        messages = [f"error: {item.message}" for item in diagnostics] or of_assembler or log_lines[:10]
        messages = [re.sub(_NAMESPACE, "", message) for message in messages]
        lines = [f"the kernel of {names} does not compile ({compiler})", *messages]
    return CompileError(
        "\n".join(lines), diagnostics=[item for _, item in placed], source=source.text, options=options, log=log
    )
