"""The host's C++ compiler, with shared objects kept on disk by the hash of everything they depend on."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import BinaryIO

import filelock

from fuser import counters
from fuser.codegen import Dialect, KernelSource
from fuser.config import config
from fuser.cpu.dialect import DIALECT
from fuser.cpu.fused_kernel import CpuKernel
from fuser.disk_cache import cache_directory
from fuser.errors import CompilerFailedError, CompilerNotFoundError, Diagnostic
from fuser.fused_kernel import begin_compile, build_compile_error

__all__ = ["Compiler", "CpuBackend", "find_compiler"]

CANDIDATES = ("g++", "c++", "clang++")
# Characters, and conditional expressions, of functors from which g++ -O2 takes minutes: second derivatives of long
# unrolled loops, and loops that data may end early.
LARGE_TEXT = 24_000
MANY_CONDITIONS = 32
COMPILE_TIMEOUT_S, VERSION_TIMEOUT_S = 600.0, 60.0
LONGEST_POLL_S = 0.01
# What compilers, assemblers and linkers say of the machine, with the words of strerror; never remembered.
_OF_THE_MACHINE = re.compile(
    "No space left on device|Disk quota exceeded|File too large|Input/output error|Read-only file system"
    "|Too many open files|(?:Cannot|Can't) allocate memory|out of memory|virtual memory exhausted"
    "|Resource temporarily unavailable|Killed signal|terminated program|Permission denied"
)
_ERROR = re.compile("error")
# Said by the linker, of a function that is declared and defined nowhere.
_UNDEFINED = re.compile("undefined (?:reference to|symbol).*")
# Names that compilers give their temporary files.
_TEMPORARY = re.compile(r"\bcc\w{6}\.\w+")


@dataclass(frozen=True, slots=True)
class Compiler:
    """A host C++ compiler."""

    # The command, with the words of CXX that follow it ("ccache g++").
    command: tuple[str, ...]
    version: str

    @property
    def is_clang(self) -> bool:
        """Whether it is clang, which knows neither gcc's simd attribute nor where OpenMP is."""
        return "clang" in self.version


class CpuBackend:
    """Implements Backend for the host."""

    dialect: Dialect = DIALECT

    def target(self, device_index: int | None) -> str:  # noqa: ARG002 - one host
        """Return what code is made for: this host's instruction set."""
        return host_identity()

    def compile(self, source: KernelSource, target: str) -> CpuKernel:
        """Compile, or load from disk; one process compiles, others that want the same kernel wait for it."""
        compiler = find_compiler(config.cxx)
        flags = compiler_flags(compiler, source.numerics)
        texts = [functor.text for functor in source.functors]
        if sum(map(len, texts)) > LARGE_TEXT or sum(text.count("?") for text in texts) > MANY_CONDITIONS:
            flags = tuple("-O1" if flag == "-O2" else flag for flag in flags)
        parts = (source.text, *compiler.command, compiler.version, *flags, target)
        digest = hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()
        directory = cache_directory("cpu")
        if directory is not None:
            try:
                return _load_or_build(compiler, flags, source, directory / f"{digest}.so")
            except (OSError, CompilerFailedError) as error:
                # The disk is full, say: do without it.
                _pass_on(error)
        try:
            with tempfile.TemporaryDirectory(prefix="fuser-", ignore_cleanup_errors=True) as scratch:
                return _load_new(compiler, source, _build(compiler, flags, source, Path(scratch) / "kernel.so"))
        except OSError as error:
            _pass_on(error)
            raise _failure(compiler.command, str(error.strerror)) from error


def find_compiler(command: str | None) -> Compiler:
    """Return the compiler to use: ``command`` (the CXX setting), or the first found on the path.

    Raises:
        CompilerNotFoundError: there is none; says what to install or set. It is looked for again in the next call.
    """
    return _find_compiler(command, os.environ.get("PATH", ""))


@cache
def _find_compiler(command: str | None, path: str) -> Compiler:
    wanted = f"CXX={command!r} does not run" if command else f"none of {', '.join(CANDIDATES)} is on the path"
    for words in [_split(command)] if command else [(name,) for name in CANDIDATES]:
        if shutil.which(words[0], path=path) is None:
            continue
        try:
            status, version = _run([*words, "--version"], None, VERSION_TIMEOUT_S)
        except (OSError, CompilerFailedError) as error:
            wanted = f"{words[0]} --version: {error}"
        else:
            if not status:
                return Compiler(words, version.strip())
            wanted = f"{words[0]} --version: {_describe(status, version)}"
    raise CompilerNotFoundError(f"CPU kernels need a C++ compiler: {wanted} (install g++ or set CXX)")


def _split(command: str) -> tuple[str, ...]:
    # One path, whatever is in it, or words as a shell has them.
    if shutil.which(command) is not None:
        return (command,)
    try:
        return tuple(shlex.split(command))
    except ValueError as error:
        raise CompilerNotFoundError(f"CPU kernels need a C++ compiler: CXX={command!r}: {error}") from None


def compiler_flags(compiler: Compiler, numerics: str) -> tuple[str, ...]:
    """Return the flags of a kernel. No -ffast-math: values are IEEE; strict numerics contract nothing."""
    contract = "off" if numerics == "strict" else "fast"
    flags = ["-O2", "-std=c++17", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-w"]
    # Not -frounding-math, with which g++ 12 fills static tables of floats with garbage.
    flags.append(f"-ffp-contract={contract}")
    if compiler.is_clang:
        return (*flags, "-march=native")
    # A loop for each side of a branch on a number of the call: gcc 12 vectorises few loops that have the branch inside.
    flags += ["-ftree-vectorize", "-fvect-cost-model=dynamic", "-funswitch-loops", "-march=native", "-fopenmp"]
    if platform.machine() in {"x86_64", "AMD64"}:
        flags.append("-mprefer-vector-width=512")
    return tuple(flags)


@cache
def host_identity() -> str:
    """Return text that differs between machines for which -march=native makes different code."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        features = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        features = platform.processor()
    return f"{platform.machine()} {' '.join(sorted(features.split()))}"


def parse_gcc_log(log: str) -> list[Diagnostic]:
    """Return the errors of a gcc or clang log: ``label:line:column: error: message``."""
    found = []
    for line in log.splitlines():
        place, colon, message = line.partition(": error: ")
        label, line_number, column = ([*place.rsplit(":", 2), "", ""])[:3]
        if colon and line_number.isdigit() and column.isdigit():
            found.append(Diagnostic(label, int(line_number), int(column), "error", message))
    return found


def _load_or_build(compiler: Compiler, flags: tuple[str, ...], source: KernelSource, path: Path) -> CpuKernel:
    kernel = _load(source, path)
    if kernel is not None:
        return kernel
    with filelock.FileLock(path.with_suffix(".lock")):
        kernel = _load(source, path)
        if kernel is not None:
            return kernel
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            # Readers see a whole file or none.
            _build(compiler, flags, source, Path(scratch) / "kernel.so").replace(path)
    return _load_new(compiler, source, path)


def _load_new(compiler: Compiler, source: KernelSource, path: Path) -> CpuKernel:
    """Load what was just compiled; raises CompilerFailedError where that is not possible."""
    try:
        return CpuKernel(source, path)
    except (OSError, AttributeError, UnicodeError) as error:
        # The loader's errors begin with a path.
        raise _failure(compiler.command, str(error).partition(": ")[2] or str(error)) from error


def _pass_on(error: Exception) -> None:
    # Signal handlers raise TimeoutError, which is an OSError, but no error of the operating system's with its number.
    if isinstance(error, OSError) and error.errno is None:
        raise error


def _load(source: KernelSource, path: Path) -> CpuKernel | None:
    try:
        kernel = CpuKernel(source, path)
    except (OSError, AttributeError, UnicodeError):
        # Not there, or damaged: it is compiled and written again.
        return None
    counters.count("cache_hits")
    return kernel


def _build(compiler: Compiler, flags: tuple[str, ...], source: KernelSource, target: Path) -> Path:
    """Compile to ``target``.

    Raises:
        CompileError: the compiler says what is wrong in the text.
        CompilerFailedError, OSError: it made no kernel for another reason.
    """
    # No option, whatever the name begins with.
    target = target.absolute()
    text = target.with_suffix(".cpp")
    text.write_text(source.text, encoding="utf-8")
    libraries = ["-lmvec", "-lm"] if _has_libmvec() and not compiler.is_clang else ["-lm"]
    command = [*compiler.command, *flags, str(text), "-o", str(target), *libraries]
    begin_compile(source)
    # The C++ library is what takes longest to link, and what hardly a functor needs.
    few = [] if compiler.is_clang else ["-lgcc", "-lc", "-nodefaultlibs"]
    complete = [] if compiler.is_clang else ["-Wl,--no-undefined"]
    status, log = _run([*command, *few, *complete], target.parent)
    # GNU ld says reference, others say symbol.
    if few and _UNDEFINED.search(log):
        status, log = _run([*command, *complete], target.parent)
    if status == 0 and target.is_file() and target.stat().st_size:
        return target
    diagnostics = parse_gcc_log(log)
    if status < 0 or _OF_THE_MACHINE.search(log) or not (diagnostics or _UNDEFINED.search(log)):
        raise _failure(compiler.command, _describe(status, log.replace(f"{target.parent}/", "")))
    raise build_compile_error(source, compiler.command[0], diagnostics, " ".join(flags), log)


def _run(command: list[str], folder: Path | None, timeout_s: float = COMPILE_TIMEOUT_S) -> tuple[int, str]:
    """Run a compiler, and whatever it starts, to the end.

    Args:
        command: its words.
        folder: for its temporary files; None: where others have them.
        timeout_s: when to end it.

    Returns:
        Its exit status, or minus the signal that ended it; all that it said.

    Raises:
        OSError: it cannot be started.
        CompilerFailedError: it took too long.
    """
    # It writes to a file: a pipe would be held open by whatever is forked meanwhile, or stays behind, such as the
    # server of a compiler cache. A group of its own: Ctrl-C is sent to all processes of ours, while this may be the
    # compile of a thread that is not interrupted.
    with _anonymous_file() as log:
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
            os.killpg(process, signal.SIGKILL)
            _wait_for(process, timeout_s)
            raise
        log.seek(0)
        return status, log.read().decode(errors="replace")


def _wait_for(process: int, timeout_s: float) -> int:
    deadline, pause_s = time.monotonic() + timeout_s, 0.0005
    while True:
        try:
            found, status = os.waitpid(process, os.WNOHANG)
        except ChildProcessError:
            # Who ignores SIGCHLD is not told how a process ended; what it made tells.
            return 0
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            raise CompilerFailedError(f"the compiler took longer than {timeout_s:g} s")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_POLL_S)


def _anonymous_file() -> BinaryIO:
    # In memory where there is such a thing: no folder is needed.
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("fuser-log"), "w+b")
    return tempfile.TemporaryFile()


def _failure(command: Sequence[str], reason: str) -> CompilerFailedError:
    return CompilerFailedError(f"{command[0]} made no kernel: {reason}")


def _describe(status: int, log: str) -> str:
    """Return in one line why a compiler failed: the same in every process, so that a reason is said once."""
    if status < 0:
        return f"it was ended by {signal.Signals(-status).name}"
    lines = [line for line in log.splitlines() if line.strip()]
    telling = [line for pattern in (_OF_THE_MACHINE, _ERROR) for line in lines if pattern.search(line)]
    said = [_TEMPORARY.sub("...", line) for line in (*telling, *lines)]
    return ": ".join([f"exit status {status}" if status else "it wrote none", *said[:1]])


@cache
def _has_libmvec() -> bool:
    return platform.machine() == "x86_64" and platform.libc_ver()[0] == "glibc"
