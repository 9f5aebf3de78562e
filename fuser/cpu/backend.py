"""The host's C++ compiler. Shared objects are kept on disk, by the digest of all they depend on."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fuser import counters
from fuser._version import __version__
from fuser.config import config
from fuser.cpu.casts import cuts_off_fractions
from fuser.cpu.dialect import DIALECT
from fuser.cpu.fused_kernel import CpuKernel
from fuser.disk_cache import CacheKey, load_or_make, scratch_folder
from fuser.dump import dump
from fuser.errors import CompilerFailedError, CompilerNotFoundError, CompilerTimeoutError, Diagnostic
from fuser.fused_kernel import build_compile_error, check_may_compile, compiler_slots, warn_of_texts
from fuser.kernel_source import Dialect, KernelSource
from fuser.process import ignoring, is_of_signal_handler

__all__ = ["Compiler", "CpuBackend", "build_image", "find_compiler"]

CANDIDATES = ("g++", "c++", "clang++")
# Characters, and conditional expressions, of functors from which g++ -O2 takes minutes: second derivatives of long
# unrolled loops, and loops that data may end early.
LARGE_TEXT = 24_000
MANY_CONDITIONS = 32
# Keeps g++ from making trunc(x) of float(int(x)).
KEEPS_CASTS = "-ftrapping-math"
# Warnings of undefined behaviour; gcc has some of them on without being asked, clang many others.
_COMMON = ("-Wuninitialized", "-Wreturn-type", "-Wshift-count-overflow", "-Wshift-count-negative", "-Warray-bounds")
_OF_GCC = ("-Wmaybe-uninitialized", "-Wreturn-local-addr", "-Woverflow", "-Waggressive-loop-optimizations")
_OF_CLANG = ("-Wsometimes-uninitialized", "-Wreturn-stack-address", "-Winteger-overflow")
WARNINGS = frozenset({*_COMMON, *_OF_GCC, *_OF_CLANG})
_MESSAGE = re.compile(r"(.*):(\d+):(\d+): (error|fatal error|warning): (.*?)(?: \[(-W[\w-]+)=?\])?")
# How an error in the prelude's own text came about: gcc says before it who called what it is in, and below it which
# macro it is in; clang says both below.
_WAY = re.compile(r"(.*):(\d+):(\d+): +(required from|note: in expansion of macro|note: in instantiation of).*")
VERSION_TIMEOUT_S = 60.0
# A compiler that ends is waited for this part of its time too long, and no longer than that.
POLL_PART, SHORTEST_POLL_S, LONGEST_POLL_S = 1 / 32, 0.0005, 0.01
# What compilers, assemblers and linkers say of the machine, with the words of strerror; never remembered.
_OF_THE_MACHINE = re.compile(
    "No space left on device|Disk quota exceeded|File too large|Input/output error|Read-only file system"
    "|Too many open files|(?:Cannot|Can't) allocate memory|out of memory|virtual memory exhausted"
    "|Resource temporarily unavailable|Killed signal|terminated program|Permission denied"
)
_ERROR = re.compile("error")
# Of gcc itself: it broke on a text that is right, mostly where it vectorises.
_BROKEN = re.compile(r"^\S+: internal compiler error: ", re.MULTILINE)
# Said by the linker, of a function that is declared and defined nowhere: GNU ld says reference, others say symbol.
_UNDEFINED = re.compile("[Uu]ndefined (?:reference to|symbol).*")
# Names that gcc and clang give their temporary files.
_TEMPORARY = re.compile(r"\b(?:cc|kernel-)\w{6}\.\w+")


@dataclass(frozen=True, slots=True)
class Compiler:
    """A host C++ compiler."""

    # The command, with the words of CXX that follow it ("ccache g++").
    command: tuple[str, ...]
    version: str
    # Which programs those words are now: path, size and time of change.
    files: tuple[str, ...]

    @property
    def is_clang(self) -> bool:
        """Whether it is clang, which knows neither gcc's simd attribute nor where OpenMP is."""
        return "clang" in self.version

    @property
    def identity(self) -> tuple[str, ...]:
        """Which one it is: what may make another kernel of the same text differs in this."""
        return (*self.command, self.version, *self.files)

    @property
    def title(self) -> str:
        """What it calls itself, in one line; wrappers may say nothing."""
        return next(iter(self.version.splitlines()), shlex.join(self.command))


class CpuBackend:
    """Implements Backend for the host."""

    dialect: Dialect = DIALECT

    def target(self, device_index: int | None) -> str:  # noqa: ARG002 - one host
        """Return what code is made for: this host's instruction set."""
        return host_identity()

    def maker(self) -> tuple[str, ...] | None:
        """Return which compiler there is."""
        with suppress(CompilerNotFoundError, CompilerFailedError):
            return find_compiler(config.cxx).identity
        return None

    def load_compiler(self) -> None:
        """Ask the compiler for its version."""
        host_identity()
        with suppress(CompilerNotFoundError, CompilerFailedError):
            find_compiler(config.cxx)

    def compile(self, source: KernelSource, target: str) -> CpuKernel:
        """Compile, or load what an earlier process compiled."""
        maker = None
        # Without a compiler, a kernel that was compiled elsewhere will do.
        with suppress(CompilerNotFoundError, CompilerFailedError):
            compiler = find_compiler(config.cxx)
            # Which kernels have the flag for casts is looked up where they are compiled: texts decide.
            flags = (*kernel_flags(compiler, source), KEEPS_CASTS)
            maker = (*compiler.identity, *flags)
        key = CacheKey.build(("cpu", __version__, target, source.numerics, source.text), maker)

        def load(image: bytes) -> CpuKernel:
            dump(source, {"kernel.so": image})
            return self.load(source, key, image)

        return load_or_make(key, lambda: build_image(source), load)

    def load(self, source: KernelSource, key: CacheKey, payload: bytes) -> CpuKernel:
        """Load a shared object."""
        try:
            return CpuKernel(source, key, payload)
        except OSError as error:
            if is_of_signal_handler(error):
                raise
            raise CompilerFailedError(f"the shared object cannot be loaded: {error.strerror or error}") from error


def find_compiler(command: str | None) -> Compiler:
    """Return the compiler to use: ``command`` (the CXX setting), or the first found on the path.

    Raises:
        CompilerNotFoundError: there is none; says what to install or set.
        CompilerFailedError: there is one, and it cannot be asked for its version now.
    """
    return _find_compiler(command, os.environ.get("PATH", ""))


@cache
def _find_compiler(command: str | None, path: str) -> Compiler:
    # What is not found is not kept: it is looked for again.
    failure: CompilerFailedError | None = None
    wanted = f"CXX={command!r} does not run" if command else f"none of {', '.join(CANDIDATES)} is on the path"
    for words in [_split(command)] if command else [(name,) for name in CANDIDATES]:
        if shutil.which(words[0], path=path) is None:
            continue
        try:
            with _explained(words[0]):
                status, version = _run([*words, "--version"], None, VERSION_TIMEOUT_S)
        except CompilerFailedError as error:
            failure = error
            continue
        except CompilerTimeoutError:
            failure = CompilerFailedError(f"{words[0]} --version took longer than {VERSION_TIMEOUT_S:g} s")
            continue
        if status == 0:
            return Compiler(words, version.strip(), tuple(_identify(word, path) for word in words))
        wanted = f"{words[0]} --version: {_describe(status, version)}"
        if status < 0:
            failure = CompilerFailedError(wanted)
    if failure is not None:
        raise failure
    raise CompilerNotFoundError(f"CPU kernels need a C++ compiler: {wanted} (install g++ or set CXX)")


def _split(command: str) -> tuple[str, ...]:
    # One path, whatever is in it, or words as a shell has them.
    if shutil.which(command) is not None:
        return (command,)
    try:
        return tuple(shlex.split(command))
    except ValueError as error:
        raise CompilerNotFoundError(f"CPU kernels need a C++ compiler: CXX={command!r}: {error}") from None


def _identify(word: str, path: str) -> str:
    program = shutil.which(word, path=path)
    if program is None:
        return ""
    status = Path(program).stat()
    return f"{Path(program).resolve()} {status.st_size} {status.st_mtime_ns}"


def compiler_flags(compiler: Compiler, numerics: str) -> tuple[str, ...]:
    """Return the flags of a kernel. No -ffast-math: values are IEEE; strict numerics contract nothing."""
    contract = "off" if numerics == "strict" else "fast"
    flags = ["-O2", "-std=c++17", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math"]
    # Texts written for CUDA look at bits through pointers to another type; gcc would take what is there for garbage.
    flags.append("-fno-strict-aliasing")
    # Back from what CXX may say: messages are read, the kernel is found by its name, and warnings are no errors.
    flags += ["-fno-diagnostics-color", "-fmessage-length=0", "-fvisibility=default", "-Wno-error"]
    # Not -frounding-math, with which g++ 12 fills static tables of floats with garbage.
    flags.append(f"-ffp-contract={contract}")
    if compiler.is_clang:
        return (*flags, "-Wno-everything", *_COMMON, *_OF_CLANG, "-ferror-limit=0", "-march=native")
    flags += (*_COMMON, *_OF_GCC)
    # A loop for each side of a branch on a number of the call: gcc 12 vectorises few loops that have the branch inside.
    flags += ["-ftree-vectorize", "-fvect-cost-model=dynamic", "-funswitch-loops", "-march=native", "-fopenmp"]
    # Where gcc gives a loop's function other parameters it forgets that all calls in it are to be inlined, and what an
    # element calls keeps the loop from vectors.
    flags.append("-fno-ipa-sra")
    # These make of choices branches that lead past what is computed, and what only one side needs is computed there:
    # of such loops gcc makes no vectors. In each twelfth chain of two to five ops there was one.
    flags += ["-fno-tree-pre", "-fno-thread-jumps", "-fno-tree-sink"]
    if platform.machine() in {"x86_64", "AMD64"}:
        flags.append("-mprefer-vector-width=512")
    return tuple(flags)


def kernel_flags(compiler: Compiler, source: KernelSource) -> tuple[str, ...]:
    """Return the flags of one kernel: large texts are optimised less."""
    flags = compiler_flags(compiler, source.numerics)
    texts = [functor.text for functor in source.functors]
    if sum(map(len, texts)) > LARGE_TEXT or sum(text.count("?") for text in texts) > MANY_CONDITIONS:
        # The time of threading jumps, which is off, doubles with each & and | of a chain, as whether an iteration is
        # reached at all makes them.
        flags = tuple("-O1" if flag == "-O2" else flag for flag in flags)
    return flags


@cache
def host_identity() -> str:
    """Return text that differs between machines for which -march=native makes different code, or that link it apart."""
    try:
        # Of the first processor: to read about all of them takes milliseconds where there are many.
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            features = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration) as error:
        if is_of_signal_handler(error):
            raise
        features = platform.processor()
    return f"{platform.machine()} {''.join(platform.libc_ver())} {' '.join(sorted(features.split()))}"


def parse_gcc_log(log: str, texts: Container[str]) -> list[Diagnostic]:
    """Return the errors of a gcc or clang log, and those warnings: ``label:line:column: error: message``.

    Args:
        log: what the compiler wrote.
        texts: labels of the users' texts. An error in the prelude is placed where such a text came to it.
    """
    found: list[Diagnostic] = []
    caller: tuple[str, int, int] | None = None
    is_elsewhere = False
    for line in log.splitlines():
        if "In instantiation of" in line:
            caller = None
        way = _WAY.fullmatch(line)
        if way is not None and way[1] in texts:
            place = way[1], int(way[2]), int(way[3])
            if way[4] == "required from":
                caller = caller or place
            elif is_elsewhere:
                found[-1] = Diagnostic(*place, "error", found[-1].message)
                is_elsewhere = False
        match = _MESSAGE.fullmatch(line)
        if match is None:
            continue
        label, row, column, severity, message, option = match.groups()
        is_of_text = {
            "error": True,
            # A template without an end; but also a disk that is full while the compiler happens to be there.
            "fatal error": not _OF_THE_MACHINE.search(message),
            # -Woverflow is also about conversions, which wrap.
            "warning": option in WARNINGS and "conversion" not in message,
        }
        if is_of_text[severity]:
            place = label, int(row), int(column)
            is_elsewhere = severity != "warning" and label not in texts
            place = caller if is_elsewhere and caller is not None else place
            found.append(Diagnostic(*place, severity.removeprefix("fatal "), message))
    # One place in a text may come to several in the prelude.
    return [*dict.fromkeys(found)]


def build_image(source: KernelSource) -> bytes:
    """Return the shared object of a kernel.

    Raises:
        CompileError: the compiler says what is wrong in the text.
        CompilerFailedError: it made no kernel for another reason.
        CompilerNotFoundError, CompilerTimeoutError, NoCompileError: as they say.
    """
    check_may_compile(source)
    compiler = find_compiler(config.cxx)
    flags = kernel_flags(compiler, source)
    if not compiler.is_clang and cuts_off_fractions(source.functors, source.text):
        flags = (*flags, KEEPS_CASTS)
    counters.count("compiles")
    with _explained(compiler.command[0]), scratch_folder() as folder, compiler_slots():
        target = folder / "kernel.so"
        status, log = _compile(compiler, flags, source, target)
        if status and _BROKEN.search(log):
            status, log = _compile(compiler, (*flags, "-fno-tree-vectorize"), source, target)
        if status == 0 and target.is_file() and target.stat().st_size:
            warn_of_texts(source, parse_gcc_log(log, source.functor_labels))
            return target.read_bytes()
        log = log.replace(f"{folder}/", "")
    diagnostics = [item for item in parse_gcc_log(log, source.functor_labels) if item.severity == "error"]
    # What a diagnosis of the text says, or quotes, is no word of the machine.
    is_of_text = any(item.functor in source.functor_labels for item in diagnostics)
    is_of_machine = not is_of_text and _OF_THE_MACHINE.search(log)
    if status < 0 or is_of_machine or _BROKEN.search(log) or not (diagnostics or _UNDEFINED.search(log)):
        raise CompilerFailedError(f"{compiler.command[0]} made no kernel: {_describe(status, log)}")
    raise build_compile_error(source, compiler.command[0], diagnostics, " ".join(flags), log)


def _compile(compiler: Compiler, flags: tuple[str, ...], source: KernelSource, target: Path) -> tuple[int, str]:
    text = target.with_suffix(".cpp")
    text.write_text(source.text, encoding="utf-8")
    libraries = ["-lmvec", "-lm"] if _has_libmvec() and not compiler.is_clang else ["-lm"]
    command = [*compiler.command, *flags, str(text), "-o", str(target), *libraries]
    # The C++ library is what takes longest to link, and what hardly a functor needs.
    few = [] if compiler.is_clang else ["-lgcc", "-lc", "-nodefaultlibs"]
    # What linkers of other systems do by themselves.
    complete = ["-Wl,--no-undefined"] if sys.platform == "linux" else []
    status, log = _run([*command, *few, *complete], target.parent, config.compile_timeout)
    if few and _UNDEFINED.search(log):
        status, log = _run([*command, *complete], target.parent, config.compile_timeout)
    return status, log


def _run(command: list[str], folder: Path | None, timeout_s: float) -> tuple[int, str]:
    """Run a compiler, and whatever it starts, to the end.

    Args:
        command: its words.
        folder: for its temporary files; None: where others have them.
        timeout_s: when to end it.

    Returns:
        Its exit status, or minus the signal that ended it; all that it said.

    Raises:
        OSError: it cannot be started.
        CompilerTimeoutError: it took too long.
    """
    # It writes to a file: a pipe would be held open by whatever is forked meanwhile, or stays behind, such as the
    # server of a compiler cache. A group of its own: Ctrl-C is sent to all processes of ours, while this may be the
    # compile of a thread that is not interrupted.
    with tempfile.TemporaryFile(dir=folder) as log:
        actions = [(os.POSIX_SPAWN_DUP2, log.fileno(), 1), (os.POSIX_SPAWN_DUP2, log.fileno(), 2)]
        process = os.posix_spawnp(
            command[0],
            command,
            {**os.environ, "LC_ALL": "C", **({"TMPDIR": str(folder)} if folder else {})},
            file_actions=[*actions, (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
            setpgroup=0,
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
        )
        try:
            status = _wait_for(process, timeout_s)
        except BaseException:
            with ignoring(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
            _wait_for(process, timeout_s)
            raise
        log.seek(0)
        return status, log.read().decode(errors="replace")


def _wait_for(process: int, timeout_s: float) -> int:
    began = time.monotonic()
    while True:
        try:
            found, status = os.waitpid(process, os.WNOHANG)
        except ChildProcessError as error:
            if is_of_signal_handler(error):
                raise
            # Who ignores SIGCHLD is not told how a process ended; what it made tells.
            return 0
        if found:
            return os.waitstatus_to_exitcode(status)
        elapsed_s = time.monotonic() - began
        if elapsed_s > timeout_s:
            raise CompilerTimeoutError(f"the C++ compiler took longer than {timeout_s:g} s (FUSER_COMPILE_TIMEOUT)")
        time.sleep(min(max(POLL_PART * elapsed_s, SHORTEST_POLL_S), LONGEST_POLL_S))


@contextmanager
def _explained(program: str) -> Iterator[None]:
    """Raise CompilerFailedError for what the operating system refuses inside."""
    try:
        yield
    except OSError as error:
        if is_of_signal_handler(error):
            raise
        raise CompilerFailedError(f"{program} made no kernel: {error.strerror}") from error


def _describe(status: int, log: str) -> str:
    """Return in one line why a compiler failed: the same in every process, so that a reason is said once."""
    if status < 0:
        # Real-time signals have no name.
        name = next((item.name for item in signal.Signals if item == -status), f"signal {-status}")
        return f"it was ended by {name}"
    lines = [line for line in log.splitlines() if line.strip()]
    telling = [line for pattern in (_OF_THE_MACHINE, _ERROR) for line in lines if pattern.search(line)]
    said = [_TEMPORARY.sub("...", line) for line in (*telling, *lines)]
    return ": ".join([f"exit status {status}" if status else "it wrote none", *said[:1]])


@cache
def _has_libmvec() -> bool:
    return platform.machine() == "x86_64" and platform.libc_ver()[0] == "glibc"
