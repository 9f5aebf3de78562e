"""The host's C++ compiler, with shared objects kept on disk by the hash of everything they depend on."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import filelock

from fuser import counters
from fuser.codegen import Dialect, KernelSource
from fuser.config import config
from fuser.cpu.dialect import DIALECT
from fuser.cpu.fused_kernel import CpuKernel
from fuser.disk_cache import cache_directory
from fuser.errors import CompilerNotFoundError, Diagnostic
from fuser.fused_kernel import begin_compile, build_compile_error, warn_of_texts

__all__ = ["Compiler", "CpuBackend", "find_compiler"]

CANDIDATES = ("g++", "c++", "clang++")
# Characters, and conditional expressions, of functors from which g++ -O2 takes minutes: second derivatives of long
# unrolled loops, and loops that data may end early.
LARGE_TEXT = 24_000
MANY_CONDITIONS = 32
# Warnings of undefined behaviour; gcc has some of them on without being asked.
WARNINGS = (
    "-Wuninitialized", "-Wmaybe-uninitialized", "-Wreturn-type", "-Wreturn-local-addr", "-Wshift-count-overflow",
    "-Wshift-count-negative", "-Warray-bounds", "-Woverflow", "-Waggressive-loop-optimizations",
)  # fmt: skip
_MESSAGE = re.compile(r"(.*):(\d+):(\d+): (error|warning): (.*?)(?: \[(-W[\w-]+)=?\])?")


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
        digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        directory = cache_directory("cpu")
        if directory is not None:
            try:
                return _load_or_build(compiler, flags, source, directory / f"{digest}.so")
            except OSError:
                # The disk is full, say: do without it.
                pass
        with tempfile.TemporaryDirectory(prefix="fuser-") as scratch:
            return CpuKernel(source, _build(compiler, flags, source, Path(scratch) / "kernel.so"))


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
        return Compiler(words, result.stdout.strip())
    return None


def compiler_flags(compiler: Compiler, numerics: str) -> tuple[str, ...]:
    """Return the flags of a kernel. No -ffast-math: values are IEEE; strict numerics contract nothing."""
    contract = "off" if numerics == "strict" else "fast"
    flags = ["-O2", "-std=c++17", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math"]
    # Texts written for CUDA look at bits through pointers to another type; gcc would take what is there for garbage.
    flags.append("-fno-strict-aliasing")
    # Not -frounding-math, with which g++ 12 fills static tables of floats with garbage.
    flags.append(f"-ffp-contract={contract}")
    if compiler.is_clang:
        return (*flags, "-w", "-march=native")
    flags += WARNINGS
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
    """Return the errors of a gcc or clang log, and those warnings: ``label:line:column: error: message``."""
    found = []
    for line in log.splitlines():
        match = _MESSAGE.fullmatch(line)
        # -Woverflow is also about conversions, which wrap.
        is_undefined = match is not None and match[6] in WARNINGS and "conversion" not in match[5]
        if match is not None and (match[4] == "error" or is_undefined):
            found.append(Diagnostic(match[1], int(match[2]), int(match[3]), match[4], match[5]))
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
    return CpuKernel(source, path)


def _load(source: KernelSource, path: Path) -> CpuKernel | None:
    try:
        kernel = CpuKernel(source, path)
    except (OSError, AttributeError):
        # Not there, or damaged: it is compiled and written again.
        return None
    counters.count("cache_hits")
    return kernel


def _build(compiler: Compiler, flags: tuple[str, ...], source: KernelSource, target: Path) -> Path:
    text = target.with_suffix(".cpp")
    text.write_text(source.text, encoding="utf-8")
    libraries = ["-lmvec", "-lm"] if _has_libmvec() and not compiler.is_clang else ["-lm"]
    command = [*compiler.command, *flags, str(text), "-o", str(target), *libraries]
    begin_compile(source)
    # The C++ library is what takes longest to link, and what hardly a functor needs.
    few = [] if compiler.is_clang else ["-lgcc", "-lc", "-nodefaultlibs", "-Wl,--no-undefined"]
    result = _run([*command, *few])
    # GNU ld says reference, others say symbol.
    if few and result.returncode and "undefined" in result.stderr:
        result = _run(command)
    if result.returncode:
        diagnostics = parse_gcc_log(result.stderr)
        raise build_compile_error(source, compiler.command[0], diagnostics, " ".join(flags), result.stderr)
    warn_of_texts(source, parse_gcc_log(result.stderr))
    return target


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"})


@cache
def _has_libmvec() -> bool:
    return platform.machine() == "x86_64" and platform.libc_ver()[0] == "glibc"
