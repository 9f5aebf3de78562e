"""CUDA kernels by NVRTC, kept on disk. Needs no GPU and no CUDA toolkit to compile."""

from __future__ import annotations

import io
import re
from itertools import takewhile

import torch

from fuser import counters
from fuser._version import __version__
from fuser.cuda.dialect import DIALECT
from fuser.cuda.fused_kernel import CudaKernel
from fuser.cuda.nvrtc import NvrtcError, compile_text, identify_nvrtc, load_kernel, nvrtc_version
from fuser.disk_cache import CacheKey, load_or_make
from fuser.dump import dump
from fuser.errors import CaptureError, CompilerFailedError, CompilerNotFoundError, Diagnostic
from fuser.fused_kernel import build_compile_error, check_may_compile, compiler_slots, warn_of_texts
from fuser.kernel_source import KERNEL_NAME, Dialect, KernelSource
from fuser.process import ignoring, is_of_signal_handler

__all__ = ["CudaBackend", "compile_cubin"]

# How an error in the prelude's own text came about: what is instantiated, and who asks for it.
_WAY = re.compile(r'instantiation of "(?:[^"(]*\W)?(\w+)\(.*" at line (\d+) of (\S+)')
_NVRTC_MESSAGE = re.compile(r"(.*)\((\d+)\): (?:catastrophic )?(?:error|(warning)) ?#?(\d*)-?D?: (.*)")
# Warnings of undefined behaviour: results and shifts out of range, an index beyond an array, a variable read before it
# has a value, a reference to a local variable, a path without return.
WARNINGS = frozenset("61 62 63 175 549 836 940".split())
# How the names begin that NVRTC does not declare with --minimal (CUuuid, cudaError_t, libraryPropertyType and its
# MAJOR_VERSION, tex1Dfetch), and the first version that knows it.
_RUNTIME_NAMES = ("CU", "MAJOR_", "MINOR_", "PATCH_", "cuda", "library", "surf", "tex")
_MINIMAL_SINCE = (12, 4)


class CudaBackend:
    """Implements Backend for CUDA devices."""

    dialect: Dialect = DIALECT

    def target(self, device_index: int | None) -> str:
        """Return the architecture of a device, such as ``sm_90``."""
        major, minor = torch.cuda.get_device_capability(device_index)
        return f"sm_{major}{minor}"

    def maker(self) -> tuple[str, ...] | None:
        """Return which NVRTC there is."""
        return identify_nvrtc()

    def load_compiler(self) -> None:
        """Load NVRTC."""
        with ignoring(ImportError, OSError, RuntimeError):
            identify_nvrtc()
            nvrtc_version()

    def compile(self, source: KernelSource, target: str) -> CudaKernel:
        """Compile for an architecture (or load from disk), and load the kernel.

        Raises:
            CaptureError: a CUDA graph is being captured; loading would break the capture.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            names = ", ".join(functor.entry for functor in source.functors)
            raise CaptureError(
                f"the kernel of {names} is needed for the first time inside a CUDA graph capture: before it, make the "
                "same call once, or call warmup() of a function made by fuser.fuse"
            )

        key = _cache_key(source, target)

        def load(cubin: bytes) -> CudaKernel:
            dump(source, {"kernel.cubin": cubin})
            return self.load(source, key, cubin)

        return load_or_make(key, lambda: compile_cubin(source, target), load)

    def load(self, source: KernelSource, key: CacheKey, payload: bytes) -> CudaKernel:
        """Load machine code."""
        try:
            return CudaKernel(source, load_kernel(payload, KERNEL_NAME), key)
        except ImportError as error:
            raise CompilerNotFoundError(f"CUDA kernels need cuda-python: {error}") from error


def compile_cubin(source: KernelSource, target: str, resources: io.StringIO | None = None) -> bytes:
    """Compile to machine code of an architecture such as ``sm_90``; works on a machine without a GPU.

    Args:
        source: the kernel.
        target: the architecture.
        resources: where ptxas writes what the kernel takes (registers, spills), if anybody wants to know.

    Raises:
        CompileError: the text does not compile.
        CompilerNotFoundError: cuda-python or NVRTC is missing.
        CompilerFailedError: NVRTC made no kernel for another reason: it lacks memory, or knows no such architecture.
        NoCompileError: ``config.no_compile`` is set.
    """
    check_may_compile(source)
    options = _options(target, source.numerics)
    if resources is not None:
        options += ("--ptxas-options=-v",)
    counters.count("compiles")
    try:
        options += _omissions(source)
        with compiler_slots():
            cubin, log = compile_text(source.text, options)
    except NvrtcError as error:
        if error.status != "NVRTC_ERROR_COMPILATION":
            raise CompilerFailedError(f"NVRTC, {target}, made no kernel: {' '.join(str(error).split())}") from error
        diagnostics = [item for item in parse_nvrtc_log(error.log, source) if item.severity == "error"]
        raise build_compile_error(source, f"NVRTC, {target}", diagnostics, " ".join(options), error.log) from None
    except (ImportError, OSError, RuntimeError) as error:
        if is_of_signal_handler(error):
            raise
        missing = f"CUDA kernels need cuda-python and NVRTC (pip install nvidia-cuda-nvrtc): {error}"
        raise CompilerNotFoundError(missing) from error
    if resources is not None:
        resources.write(log)
    warn_of_texts(source, parse_nvrtc_log(log, source))
    return cubin


def parse_nvrtc_log(log: str, source: KernelSource) -> list[Diagnostic]:
    """Return the errors of an NVRTC log, and its warnings of the user's mistakes, with the columns its carets point to.

    NVRTC writes ``label(line): error: message``, then the line itself, indented, and a caret below it.
    """
    lines = log.split("\n")
    texts = {label: functor.text.split("\n") for label, functor in source.functor_labels.items()}
    found = []
    for index, line in enumerate(lines):
        match = _NVRTC_MESSAGE.fullmatch(line)
        if match is None or (match[3] and match[4] not in WARNINGS):
            continue
        label, number, column, own = match[1], int(match[2]), 1, texts.get(match[1], [])
        if label not in texts and not match[3]:
            # In the prelude's own text: where the user's came to it, which is said below, up to an empty line.
            below = map(_WAY.search, takewhile(bool, lines[index:]))
            way = next((said for said in below if said is not None and said[3] in texts), None)
            if way is not None:
                label, number = way[3], int(way[2])
                shown = texts[label][number - 1]
                named = re.search(rf"\b{way[1]}\b", shown)
                column = 1 + (named.start() if named is not None else len(shown) - len(shown.lstrip()))
                found.append(Diagnostic(label, number, column, "error", match[5]))
                continue
        # The line is followed by its caret, behind the same tabs; types of arguments may stand between.
        caret = next((at for at in range(index + 1, len(lines)) if not lines[at].strip(" \t^")), len(lines))
        if caret < len(lines) and "^" in lines[caret] and number <= len(own):
            shown, code = lines[caret - 1], own[number - 1].strip()
            indent = len(own[number - 1]) - len(own[number - 1].lstrip())
            column = lines[caret].index("^") - shown.find(code) + indent + 1
        found.append(Diagnostic(label, number, column, "warning" if match[3] else "error", match[5]))
    return [*dict.fromkeys(found)]


def _options(target: str, numerics: str) -> tuple[str, ...]:
    # The options of torch.cuda.jiterator, so that a functor has the bits it has there. Inside a functor both NVVM and
    # ptxas contract multiply-adds; the text keeps them from doing so across functors.
    options = (f"-arch={target}", "--std=c++17", "--device-as-default-execution-space")
    # Fast: float32 division and square root within 2 ULP, in a third of the instructions, as others that fuse kernels
    # have them.
    return options if numerics == "strict" else (*options, "--prec-sqrt=false", "--prec-div=false")


def _omissions(source: KernelSource) -> tuple[str, ...]:
    # What NVRTC declares by itself, before the text: without textures and the CUDA runtime's types it takes 4 ms less.
    # The machine code is the same, so no key has this.
    is_used = any(word.startswith(_RUNTIME_NAMES) for functor in source.functors for word in functor.words)
    return () if is_used or nvrtc_version() < _MINIMAL_SINCE else ("--minimal",)


def _cache_key(source: KernelSource, target: str) -> CacheKey:
    wanted = ("cuda", __version__, *_options(target, source.numerics), source.text)
    return CacheKey.build(wanted, identify_nvrtc())
