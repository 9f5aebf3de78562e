"""The host's C++ compiler. Shared objects are kept on disk, by the digest of all they depend on."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fuser._version import __version__
from fuser.codegen import Dialect, KernelSource
from fuser.config import config
from fuser.cpu.dialect import DIALECT
from fuser.cpu.fused_kernel import CpuKernel
from fuser.disk_cache import CacheKey, load_or_make, scratch_folder
from fuser.errors import CompilerNotFoundError, CompilerTimeoutError, Diagnostic
from fuser.fused_kernel import begin_compile, build_compile_error

__all__ = ["Compiler", "CpuBackend", "find_compiler"]

CANDIDATES = ("g++", "c++", "clang++")
# Characters, and conditional expressions, of functors from which g++ -O2 takes minutes: second derivatives of long
# unrolled loops, and loops that data may end early.
LARGE_TEXT = 24_000
MANY_CONDITIONS = 32


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


class CpuBackend:
    """Implements Backend for the host."""

    dialect: Dialect = DIALECT

    def target(self, device_index: int | None) -> str:  # noqa: ARG002 - one host
        """Return what code is made for: this host's instruction set."""
        return host_identity()

    def compile(self, source: KernelSource, target: str) -> CpuKernel:
        """Compile, or load what an earlier process compiled."""
        # Without a compiler, a kernel that was compiled elsewhere will do.
        compiler = _find_compiler(config.cxx, os.environ.get("PATH", ""))
        maker = None
        if compiler is not None:
            maker = (*compiler.command, compiler.version, *compiler.files, *kernel_flags(compiler, source))
        key = CacheKey.build(("cpu", __version__, target, source.numerics, source.text), maker)
        return load_or_make(key, lambda: _build(source), lambda image: CpuKernel(source, image))


def find_compiler(command: str | None) -> Compiler:
    """Return the compiler to use: ``command`` (the CXX setting), or the first found on the path.

    Raises:
        CompilerNotFoundError: there is none; says what to install or set.
    """
    compiler = _find_compiler(command, os.environ.get("PATH", ""))
    if compiler is None:
        wanted = f"CXX={command!r} does not run" if command else f"none of {', '.join(CANDIDATES)} is on the path"
        raise CompilerNotFoundError(f"CPU kernels need a C++ compiler: {wanted} (install g++ or set CXX)")
    return compiler


@cache
def _find_compiler(command: str | None, path: str) -> Compiler | None:
    for candidate in (command,) if command else CANDIDATES:
        words = tuple(candidate.split())
        if shutil.which(words[0], path=path) is None:
            continue
        try:
            result = subprocess.run([*words, "--version"], capture_output=True, text=True, timeout=60, check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        return Compiler(words, result.stdout.strip(), tuple(_identify(word, path) for word in words))
    return None


def _identify(word: str, path: str) -> str:
    program = shutil.which(word, path=path)
    if program is None:
        return ""
    status = Path(program).stat()
    return f"{Path(program).resolve()} {status.st_size} {status.st_mtime_ns}"


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


def kernel_flags(compiler: Compiler, source: KernelSource) -> tuple[str, ...]:
    """Return the flags of one kernel: large texts are optimised less."""
    flags = compiler_flags(compiler, source.numerics)
    texts = [functor.text for functor in source.functors]
    if sum(map(len, texts)) > LARGE_TEXT or sum(text.count("?") for text in texts) > MANY_CONDITIONS:
        flags = tuple("-O1" if flag == "-O2" else flag for flag in flags)
    return flags


@cache
def host_identity() -> str:
    """Return text that differs between machines for which -march=native makes different code, or that link it apart."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        features = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        features = platform.processor()
    return f"{platform.machine()} {''.join(platform.libc_ver())} {' '.join(sorted(features.split()))}"


def parse_gcc_log(log: str) -> list[Diagnostic]:
    """Return the errors of a gcc or clang log: ``label:line:column: error: message``."""
    found = []
    for line in log.splitlines():
        place, colon, message = line.partition(": error: ")
        label, line_number, column = ([*place.rsplit(":", 2), "", ""])[:3]
        if colon and line_number.isdigit() and column.isdigit():
            found.append(Diagnostic(label, int(line_number), int(column), "error", message))
    return found


def _build(source: KernelSource) -> bytes:
    """Return the shared object of a kernel."""
    compiler = find_compiler(config.cxx)
    flags = kernel_flags(compiler, source)
    begin_compile(source)
    with scratch_folder() as folder:
        text, target = folder / "kernel.cpp", folder / "kernel.so"
        text.write_text(source.text, encoding="utf-8")
        libraries = ["-lmvec", "-lm"] if _has_libmvec() and not compiler.is_clang else ["-lm"]
        command = [*compiler.command, *flags, str(text), "-o", str(target), *libraries]
        # The C++ library is what takes longest to link, and what hardly a functor needs.
        few = [] if compiler.is_clang else ["-lgcc", "-lc", "-nodefaultlibs", "-Wl,--no-undefined"]
        status, log = _run([*command, *few], folder)
        # GNU ld says reference, others say symbol.
        if few and "undefined" in log:
            status, log = _run(command, folder)
        if status:
            raise build_compile_error(source, compiler.command[0], parse_gcc_log(log), " ".join(flags), log)
        return target.read_bytes()


def _run(command: list[str], folder: Path) -> tuple[int, str]:
    """Run a compiler, with its temporary files in ``folder``; return its exit status and what it wrote to stderr.

    Raises:
        CompilerTimeoutError: it took longer than ``config.compile_timeout``.
    """
    environment = {**os.environ, "LC_ALL": "C", "TMPDIR": str(folder)}
    # A group of its own, which can be ended with all that a compiler starts.
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment, process_group=0
    ) as process:
        try:
            _, log = process.communicate(timeout=config.compile_timeout)
        except BaseException as error:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                limit = f"{config.compile_timeout:g} s (FUSER_COMPILE_TIMEOUT)"
                raise CompilerTimeoutError(f"the C++ compiler {command[0]} took longer than {limit}") from None
            raise
    return process.returncode, log


@cache
def _has_libmvec() -> bool:
    return platform.machine() == "x86_64" and platform.libc_ver()[0] == "glibc"
