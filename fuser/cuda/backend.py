"""NVRTC through cuda.core, with compiled kernels kept in its file cache. Needs no GPU and no CUDA toolkit."""

from __future__ import annotations

import io
import re
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from fuser import counters
from fuser.codegen import Dialect, KernelSource
from fuser.cuda.dialect import DIALECT
from fuser.cuda.fused_kernel import CudaKernel
from fuser.disk_cache import cache_directory
from fuser.errors import CaptureError, CompilerNotFoundError, Diagnostic, FuserError
from fuser.fused_kernel import begin_compile, build_compile_error, warn_of_texts

if TYPE_CHECKING:
    from cuda.core import ObjectCode, ProgramOptions

__all__ = ["CudaBackend", "compile_cubin"]

_NVRTC_MESSAGE = re.compile(r"(.*)\((\d+)\): (?:catastrophic )?(?:error|(warning)) ?#?(\d*)-?D?: (.*)")
# Warnings of undefined behaviour: results and shifts out of range, an index beyond an array, a variable read before it
# has a value, a reference to a local variable, a path without return.
WARNINGS = frozenset("61 62 63 175 549 836 940".split())


class CudaBackend:
    """Implements Backend for CUDA devices."""

    dialect: Dialect = DIALECT

    def target(self, device_index: int | None) -> str:
        """Return the architecture of a device, such as ``sm_90``."""
        major, minor = torch.cuda.get_device_capability(device_index)
        return f"sm_{major}{minor}"

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
        code = compile_cubin(source, target)
        try:
            return CudaKernel(source, code)
        except Exception:
            # What the cache held cannot be loaded (a damaged file, an older driver): compile anew.
            return CudaKernel(source, compile_cubin(source, target, is_damaged=True))


def compile_cubin(source: KernelSource, target: str, *, use_cache: bool = True, is_damaged: bool = False) -> ObjectCode:
    """Compile to machine code of an architecture such as ``sm_90``; works on a machine without a GPU.

    Args:
        source: the kernel.
        target: the architecture.
        use_cache: whether to look into the disk cache first, and to keep the result there.
        is_damaged: whether what the cache holds is of no use and is to be replaced.

    Raises:
        CompileError: the text does not compile.
        CompilerNotFoundError: cuda-python or NVRTC is missing.
    """
    try:
        from cuda.core import ObjectCode, Program  # noqa: PLC0415 - importing fuser must not import CUDA
        from cuda.core.utils import FileStreamProgramCache, make_program_cache_key  # noqa: PLC0415
    except ImportError as error:
        raise CompilerNotFoundError(f"CUDA kernels need cuda-python: {error}") from error
    options = _options(target, source.numerics)
    directory = cache_directory("cuda") if use_cache else None
    try:
        if directory is not None:
            cache = FileStreamProgramCache(directory)
            key = make_program_cache_key(code=source.text, code_type="c++", options=options, target_type="cubin")
            found = None if is_damaged else cache.get(key)
            if found is not None:
                counters.count("cache_hits")
                return ObjectCode.from_cubin(found)
        begin_compile(source)
        said = io.StringIO()
        code = Program(source.text, "c++", options).compile("cubin", logs=said)
        if directory is not None:
            # The disk may be full: the kernel is there all the same.
            with suppress(OSError):
                cache[key] = code
    except FuserError:
        raise
    except (ImportError, OSError) as error:
        raise CompilerNotFoundError(f"CUDA kernels need NVRTC (pip install nvidia-cuda-nvrtc): {error}") from error
    except Exception as error:
        log = str(error)
        diagnostics = parse_nvrtc_log(log, source)
        if not diagnostics and "NVRTC" not in log:
            raise CompilerNotFoundError(f"CUDA kernels need NVRTC (pip install nvidia-cuda-nvrtc): {error}") from error
        text = " ".join(option.decode() for option in options.as_bytes("nvrtc"))
        raise build_compile_error(source, f"NVRTC, {target}", diagnostics, text, log) from None
    warn_of_texts(source, parse_nvrtc_log(said.getvalue(), source))
    return code


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
        # The line is followed by its caret; types of arguments may stand between the message and the line.
        caret = next((at for at in range(index + 1, len(lines)) if not lines[at].strip(" ^")), len(lines))
        if caret < len(lines) and "^" in lines[caret] and number <= len(own):
            shown, code = lines[caret - 1], own[number - 1].strip()
            indent = len(own[number - 1]) - len(own[number - 1].lstrip())
            column = lines[caret].index("^") - shown.find(code) + indent + 1
        found.append(Diagnostic(label, number, column, "warning" if match[3] else "error", match[5]))
    return found


def _options(target: str, numerics: str) -> ProgramOptions:
    from cuda.core import ProgramOptions  # noqa: PLC0415

    # The options of torch.cuda.jiterator, so that a functor has the bits it has there. Inside a functor both NVVM and
    # ptxas contract multiply-adds; the text keeps them from doing so across functors.
    return ProgramOptions(
        name="fuser_kernel",
        arch=target,
        std="c++17",
        device_as_default_execution_space=True,
        # Fast: float32 division and square root within 2 ULP, in a third of the instructions, as others that fuse
        # kernels have them.
        prec_div=None if numerics == "strict" else False,
        prec_sqrt=None if numerics == "strict" else False,
    )
