"""The kernels that tests generate are also compiled by NVRTC, which needs no GPU.

A pytest plugin (conftest.py loads it). It notes what passes through ``fuser.compiler.build_source``; after each test
the CUDA twin of every new text (same group, same ArgSpec with ``device_type="cuda"``) is compiled: in tier 3 to a
cubin for each architecture; in tier 2 every third one, and of those that are not dense every sixth, for one
architecture, two of three to PTX only. A twin that does not compile fails that test. Kernels that the test's own
compiler refuses are left out: they are tests of errors.
"""

from __future__ import annotations

import hashlib
import inspect
import threading
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tiers import choose, has

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
# They have no clusters of blocks.
OLD = ("sm_80",)
# Elements along each dimension of a made-up call.
SIDE = 64

_lock = threading.Lock()
# Text -> group and ArgSpec of the kernels generated since the last test.
_generated: dict[str, tuple[Any, Any]] = {}
# Digests of what compiled in this process (text, architecture, options, NVRTC's version), and the folder (pytest's own
# cache) with one empty file for each that compiled in any process: the same text need not be compiled in every run.
_compiled: set[str] = set()
_shared: Path | None = None
_tier = 2


def pytest_configure(config: pytest.Config) -> None:
    """Share the list of texts that compile among the workers of a run, and with the next run."""
    global _shared, _tier  # noqa: PLW0603 - one run per process
    _tier = config.getoption("tier")
    if hasattr(config, "cache"):
        _shared = config.cache.mkdir("cubins")


@pytest.fixture(scope="session", autouse=True)
def generated_kernels() -> Generator[None]:
    """Note every kernel that is generated, and forget those that a compiler refuses."""
    # Here and not at the top: fuser reads its environment when it is imported, after conftest.py has set it.
    from fuser import compiler
    from fuser.cpu import backend as cpu_backend
    from fuser.cuda import backend as cuda_backend

    emit, build_error = compiler.build_source, cpu_backend.build_compile_error

    def emit_and_note(group: Any, args: Any, dialect: Any) -> Any:
        source = emit(group, args, dialect)
        with _lock:
            _generated[source.text] = (group, args)
        return source

    def forget_and_build_error(source: Any, *rest: Any) -> Any:
        with _lock:
            _generated.pop(source.text, None)
        return build_error(source, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "build_source", emit_and_note)
        patch.setattr(cpu_backend, "build_compile_error", forget_and_build_error)
        patch.setattr(cuda_backend, "build_compile_error", forget_and_build_error)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Compile the twins of what the test generated; a failure is the test's."""
    try:
        result = yield
    except BaseException:
        _generated.clear()
        raise
    compile_twins()
    return result


def compile_twins() -> int:
    """Compile the CUDA twin of every kernel noted since the last call; return how many texts were new."""
    with _lock:
        noted = list(_generated.items())
        _generated.clear()
    if _tier == 1 or not has("nvrtc"):
        return 0
    return sum(compile_twin(group, cuda_twin(group, args)) for text, (group, args) in noted if is_chosen(text, args))


def is_chosen(text: str, args: Any) -> bool:
    """Whether a kernel's twin is compiled: in tier 2 every third one that is dense, and of the rest, every sixth."""
    is_dense = args.rows is None and args.rank == 1
    return _tier == 3 or args.device_type == "cuda" or choose(f"{text}  ", 3 if is_dense else 6) == 0


def compile_twin(group: Any, twin: Any) -> bool:
    """Compile one CUDA kernel; return False for a text that was compiled before."""
    from fuser.codegen import build_source
    from fuser.config import config
    from fuser.cuda import backend
    from fuser.cuda.dialect import DIALECT

    source = build_source(group, twin, DIALECT)
    new = [(name, digest) for name in architectures_of(source.text) if is_new(digest := digest_of(source.text, name))]
    options = backend._options
    with config.patch(no_compile=False), pytest.MonkeyPatch.context() as patch:
        # Less optimised, in half the time for large kernels: whether a text compiles does not depend on that.
        patch.setattr(backend, "_options", lambda *given: (*options(*given), "--Ofast-compile=mid"))
        for architecture, digest in new:
            if architecture.startswith("compute_"):
                compile_ptx(source.text, backend._options(architecture, source.numerics))
            else:
                backend.compile_cubin(source, architecture)
            _compiled.add(digest)
            if _shared:
                (_shared / digest).touch()
    return bool(new)


def compile_ptx(text: str, options: tuple[str, ...]) -> None:
    """Compile a kernel without ptxas, which takes half the time: all but inline PTX and resources are looked at."""
    from cuda.bindings import nvrtc

    words = [option.encode() for option in options]
    _, program = nvrtc.nvrtcCreateProgram(text.encode(), b"kernel.cu", 0, [], [])
    (result,) = nvrtc.nvrtcCompileProgram(program, len(words), words)
    # The log is written into the bytes themselves. Of one byte, as where nothing is said, Python has a single object.
    log = bytes(1 + nvrtc.nvrtcGetProgramLogSize(program)[1])
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(program)
    assert result == nvrtc.nvrtcResult.NVRTC_SUCCESS, f"{result!r}: {log.decode()}"
    # Texts of functors may have warnings of their own.
    lines = [line for line in log.decode().splitlines() if line.startswith("kernel.cu")]
    assert not [line for line in lines if "before its value is set" in line], log.decode()


def architectures_of(text: str) -> tuple[str, ...]:
    """Return what a kernel is compiled for: in tier 2 one architecture; the thousands of kernels reach each of them.

    ``compute_90`` stands for PTX of that architecture.
    """
    known = tuple(name for name in ARCHITECTURES if name not in OLD or "__cluster_dims__" not in text)
    if _tier == 3:
        return known
    chosen = known[choose(text, len(known))]
    return (chosen if choose(f"{text} ", 3) == 0 else chosen.replace("sm_", "compute_"),)


def digest_of(text: str, architecture: str) -> str:
    """Return what stands for one compilation."""
    return hashlib.sha256(f"{text}\0{architecture}\0{compiler_identity()}".encode()).hexdigest()


def is_new(digest: str) -> bool:
    """Whether no process has compiled this."""
    return digest not in _compiled and not (_shared and (_shared / digest).exists())


def cuda_twin(group: Any, args: Any) -> Any:
    """Return an ArgSpec that the same call can have on CUDA tensors.

    Sizes, strides and addresses decide how the operands are read: in whole vectors, one by one, or, for those that are
    dense along another dimension than the outputs, through tiles. Each group and ArgSpec is given one of these forms,
    the same in every run; the thousands of them in the tests get them all.
    """
    from fuser.access import plan_walk
    from fuser.arg_spec import rounds_between
    from fuser.kernel_spec import infer_typing
    from fuser.layout import IterationSpace
    from fuser.row_access import RowLimits, plan_row_walk

    if args.device_type == "cuda":
        return args
    typing = infer_typing(group, args.inputs, args.default_dtype)
    read = [slot for slot in group.used_inputs() if in_memory(args.inputs[slot])]
    pointers = [args.inputs[slot] for slot in read]
    itemsizes = [typing.values[value].itemsize for value in group.outputs] + [item.dtype.itemsize for item in pointers]
    inner = [*args.outputs, *(item.inner for item in pointers), *args.counters]
    # An innermost stride that is neither 0 nor 1 is `step`: with SIDE the second dimension is dense instead, with 2
    # none is, and rows are not aligned.
    step = (SIDE, 2)[choose(f"{group!s} {args}", 2)]
    strides = []
    for first in inner:
        second = SIDE * SIDE + 1 if step == 2 else 1 if first == 2 else SIDE * SIDE
        outer = (SIDE**dim for dim in range(3, args.rank + 1))
        strides.append((step if first == 2 else first, second, *outer)[: args.rank])
    space = IterationSpace((SIDE,) * args.rank, tuple(strides))
    rows = args.rows
    if rows is None:
        rounds = rounds_between(group, is_strict=args.numerics == "strict")
        walk = plan_walk(space, itemsizes, [True] * len(itemsizes), len(args.outputs), rounds=rounds)
    else:
        given = [slot for slot in group.used_inputs() if args.inputs[slot].is_counter]
        values = (*group.outputs, *read, *group.index_values(), *given)
        lengths = (1, SIDE, SIDE**2, SIDE**3)
        sizes = (lengths[choose(f"{args} {group!s}", len(lengths))], *space.sizes[1:])
        space = IterationSpace(sizes, space.strides, rows.reduced)
        # The order of torch's CPU kernels is no schedule of a GPU's threads.
        rows = rows._replace(order=None)
        limits = RowLimits(choose(str(args), 2) << 17, 1)
        walk = plan_row_walk(group, space, rows, values, itemsizes, [True] * len(itemsizes), limits)
        rows = rows._replace(keeps=walk.tuning.is_resident)
    walked = args._replace(vector=walk.vector, accesses=walk.accesses, tuning=walk.tuning)
    return walked._replace(device_type="cuda", rows=rows)


def in_memory(item: Any) -> bool:
    """Whether an input is read, and neither passed by value nor computed from where elements are."""
    return item.number is None and not item.is_counter


@cache
def compiler_identity() -> str:
    """Return NVRTC's version and the code that chooses its options."""
    from cuda.bindings import nvrtc

    from fuser.cuda import backend

    return f"{nvrtc.nvrtcVersion()} {inspect.getsource(backend)}"
