"""Upfront: register a group. At run time: find or compile the kernel for one ArgSpec."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

import torch

from fuser import counters, disk_cache, log
from fuser.codegen import build_source
from fuser.config import config
from fuser.disk_cache import CacheKey
from fuser.dump import dump
from fuser.errors import (
    ArgumentError,
    CacheError,
    CompilerFailedError,
    CompilerNotFoundError,
    NoCompileError,
    UnsupportedError,
    describe_type,
)
from fuser.fused_kernel import Backend, FusedKernel
from fuser.graph import FusionGroup
from fuser.kernel_cache import KernelStore, SpecCache
from fuser.kernel_source import KernelSource
from fuser.kernel_spec import ArgSpec, KernelSpec
from fuser.process import core_count, map_in_threads, planning

__all__ = [
    "backend_for",
    "build_kernel_source",
    "check_cuda_text",
    "clear_failures",
    "compile_kernel",
    "compile_kernels",
    "has_host_compiler",
    "map_side_by_side",
    "register",
    "registered",
    "reload_kernel",
]

T = TypeVar("T")
V = TypeVar("V")

_specs = SpecCache()
_by_text: dict[str, KernelSpec] = {}
_reloaded = KernelStore()


def register(group: FusionGroup) -> KernelSpec:
    """Register a group: lint, canonical form, fallback. Equal structure gives the same spec.

    Raises:
        ArgumentError: it is no group.
        GroupError: the group fails lint.
        FunctorError: a functor's text does not parse.
    """
    # An annotation is no check: users call this, too.
    given: object = group
    if not isinstance(given, FusionGroup):
        ways = "of a functor that is fn.spec(number of tensors).group, and fuser.fuse(fn).groups has those of calls"
        raise ArgumentError(f"a FusionGroup is wanted, got {describe_type(given)}; {ways}")
    spec = _specs.get_or_register(group)
    _by_text[spec.text] = spec
    if log.wants("group"):
        log.say("group", str(spec.group))
    return spec


def registered(text: str) -> KernelSpec:
    """Return the spec of a group by its text (``KernelSpec.text``), which is read once in a process.

    Raises:
        GroupError: it is no group's text, or has a part that only the process knows that wrote it.
        FunctorError: a functor's text does not parse.
    """
    spec = _by_text.get(text)
    if spec is None:
        spec = _by_text[text] = register(FusionGroup.from_json(text))
    return spec


def build_kernel_source(spec: KernelSpec, args: ArgSpec) -> KernelSource:
    """Write the kernel's text without compiling it."""
    return build_source(spec.group, args, backend_for(args.device_type).dialect)


def compile_kernel(spec: KernelSpec, args: ArgSpec, device_index: int | None) -> FusedKernel:
    """Return the kernel of a spec for one ArgSpec, from memory, from disk, or compiled now.

    Raises:
        CompileError: a functor does not compile.
        CompilerNotFoundError: there is no compiler for the device.
        NoCompileError: it would have to be made and ``config.no_compile`` is set.
    """
    backend = backend_for(args.device_type)
    target = backend.target(device_index)

    def make() -> FusedKernel:
        if log.wants("spec"):
            log.say("spec", str(args))
        with planning():
            source = build_source(spec.group, args, backend.dialect)
        log.say("source", source.text)
        ending = "cu" if source.dialect == "cuda" else "cpp"
        dump(source, {"group.json": spec.text, "spec.txt": str(args), f"kernel.{ending}": source.text})
        began = time.perf_counter()
        try:
            kernel = backend.compile(source, target)
        except NoCompileError as error:
            raise NoCompileError(f"{error}; layout class: {args.layout_class()}") from None
        if log.wants("compile"):
            names = ", ".join(functor.entry for functor in source.functors)
            # Of a host, the kind of machine: its features are hundreds of words.
            machine = target.partition(" ")[0]
            log.say("compile", f"{names}, for {machine}: ready after {(time.perf_counter() - began) * 1e3:.1f} ms")
        return kernel

    return _store(spec).get_or_compile((args, target), make)


def compile_kernels(wanted: Sequence[tuple[KernelSpec, ArgSpec]], device_index: int | None) -> list[FusedKernel]:
    """Return the kernels of one device, as ``compile_kernel``: those that are not in memory come side by side."""
    made: dict[tuple[int, ArgSpec], FusedKernel] = {}
    if len(wanted) > 1:
        target = backend_for(wanted[0][1].device_type).target(device_index)
        missing = {(spec.key, args): spec for spec, args in wanted if (args, target) not in _store(spec)}
        if len(missing) > 1:
            texts = [(spec, args) for (_, args), spec in missing.items()]
            compiled = map_side_by_side(lambda text: compile_kernel(*text, device_index), texts)
            made = dict(zip(missing, compiled, strict=True))
    found = []
    for spec, args in wanted:
        kernel = made.pop((spec.key, args), None)
        found.append(compile_kernel(spec, args, device_index) if kernel is None else kernel)
    return found


def map_side_by_side(function: Callable[[T], V], items: Sequence[T]) -> list[V]:
    """Return what a function that makes kernels returns for each item, in as many threads as there are items.

    They wait for one another's compilers (``compiler_slots``), so that there may be more of them than cores; but on one
    core they have nothing to share, and what this thread captures as a CUDA graph another one would break.
    """
    is_alone = core_count() == 1 or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
    return map_in_threads(function, items, 1 if is_alone else len(items))


def reload_kernel(source: KernelSource, key: CacheKey) -> FusedKernel:
    """Return a kernel that an earlier process kept on disk; the source's text is not asked for.

    Raises:
        CacheError: it is not there any more. As ``Backend.load``.
    """

    def load() -> FusedKernel:
        payload = disk_cache.read(key)
        if payload is None:
            raise CacheError("a kernel is not in the cache any more")
        counters.count("cache_hits")
        return backend_for(source.dialect).load(source, key, payload)

    return _reloaded.get_or_compile(key, load)


def check_cuda_text(spec: KernelSpec, args: ArgSpec) -> None:
    """Compile a CUDA kernel where there is no device to load it on, for an architecture that every NVRTC knows.

    Raises:
        As ``compile_kernel``.
    """
    from fuser.cuda.backend import compile_cubin  # noqa: PLC0415 - as in backend_for

    compile_cubin(build_kernel_source(spec, args), "sm_90")


def clear_failures() -> None:
    """Forget which texts do not compile."""
    _specs.clear_failures()


def has_host_compiler() -> bool:
    """Whether there is a C++ compiler for CPU kernels."""
    from fuser.cpu.backend import find_compiler  # noqa: PLC0415 - as in backend_for

    try:
        find_compiler(config.cxx)
    except (CompilerNotFoundError, CompilerFailedError):
        return False
    return True


@cache
def backend_for(device_type: str) -> Backend:
    """Return the room that compiles for a device type.

    Raises:
        UnsupportedError: there is none for it.
    """
    # Imported on first use: a room may need compilers and drivers that this machine lacks.
    if device_type == "cuda":
        from fuser.cuda.backend import CudaBackend  # noqa: PLC0415

        return CudaBackend()
    if device_type == "cpu":
        from fuser.cpu.backend import CpuBackend  # noqa: PLC0415

        return CpuBackend()
    raise UnsupportedError(f"device {device_type!r}")


def _store(spec: KernelSpec) -> KernelStore:
    return _specs.store(spec)
