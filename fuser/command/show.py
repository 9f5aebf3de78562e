"""``python -m fuser show``: a functor's kernel and that of its derivative, what they take, and their machine code."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch

from fuser.autodiff.case import find_case
from fuser.compiler import register
from fuser.debug import kernel_sources
from fuser.disk_cache import scratch_folder
from fuser.dtypes import is_continuous
from fuser.errors import FuserError
from fuser.graph import FusionGroup
from fuser.jit_function import JitFunction
from fuser.kernel_source import KernelSource

__all__ = ["show"]

# What ptxas says of a kernel in its log.
_USED = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads[^U]*Used (\d+) registers"
)


def show(function: JitFunction, device: str, dtype: torch.dtype, target: str, *, assembly: bool) -> Iterator[str]:
    """Yield sections of text, each with a title.

    Args:
        function: the functor.
        device: "cuda" or "cpu"; neither has to be there.
        dtype: of its tensors, which are contiguous.
        target: the GPU architecture that CUDA kernels are compiled for, such as ``sm_90``.
        assembly: whether to show machine code, too.

    Raises:
        FuserError: after all the rest, where a kernel was not compiled.
    """
    functor = function.function.functor
    spec = function.spec(len(functor.tensors))
    inputs = _samples(spec.group, dtype)
    yield f"{functor.signature()} on {dtype}, {device}"
    failures: list[FuserError] = []
    yield from _show_group("kernel", spec.group, dtype, device, target, failures, assembly=assembly)
    for item in inputs:
        if isinstance(item, torch.Tensor) and is_continuous(dtype):
            item.requires_grad_()
    try:
        case = find_case(spec, inputs)
        derived = case.backward(tuple(range(case.output_count))) if case.wanted else None
        why = "nothing here has a gradient"
    except FuserError as error:
        derived, why = None, str(error).splitlines()[0]
    if derived is None:
        yield f"-- derivative\nnone: {why}"
    else:
        group = derived.derived.group
        yield from _show_group("derivative", group, dtype, device, target, failures, assembly=assembly)
    if failures:
        raise failures[0]


def _samples(group: FusionGroup, dtype: torch.dtype) -> list[torch.Tensor | float]:
    return [1.0 if item.is_scalar else torch.empty(64, 64, dtype=dtype, device="meta") for item in group.inputs]


def _show_group(
    title: str,
    group: FusionGroup,
    dtype: torch.dtype,
    device: str,
    target: str,
    failures: list[FuserError],
    *,
    assembly: bool,
) -> Iterator[str]:
    for source in kernel_sources(register(group), _samples(group, dtype), device):
        yield f"-- {title}\n{_own_part(source)}"
        try:
            yield from _show_binary(title, source, device, target, assembly=assembly)
        except FuserError as error:
            failures.append(error)
            yield f"-- {title}: not compiled"


def _own_part(source: KernelSource) -> str:
    # Without what every kernel begins with.
    first = min((source.text.find(f"namespace fuser_f{index}") for index in range(len(source.functors))), default=0)
    return source.text[max(first, 0) :].strip()


def _show_binary(title: str, source: KernelSource, device: str, target: str, *, assembly: bool) -> Iterator[str]:
    if device == "cuda":
        from fuser.cuda.backend import compile_cubin  # noqa: PLC0415 - importing fuser imports no CUDA

        log = io.StringIO()
        image = compile_cubin(source, target, log)
        used = _USED.search(log.getvalue())
        if used is not None:
            stack, stores, loads, registers = used.groups()
            spills = f"{stores} bytes of spill stores, {loads} of spill loads"
            yield f"-- {title}: {target}\n{registers} registers, {spills}, {stack} bytes of stack, {len(image)} bytes"
        tools: tuple[tuple[str, ...], ...] = (("nvdisasm", "-c"), ("cuobjdump", "-sass"))
    else:
        from fuser.cpu.backend import build_image  # noqa: PLC0415 - as above

        image, tools = build_image(source), (("objdump", "-d", "--no-show-raw-insn", "-M", "intel"),)
        yield f"-- {title}: this machine\n{len(image)} bytes"
    if assembly:
        yield f"-- {title}: machine code\n{_disassemble(image, tools)}"


def _disassemble(image: bytes, tools: tuple[tuple[str, ...], ...]) -> str:
    for command in tools:
        path = shutil.which(command[0])
        if path is None:
            continue
        with scratch_folder() as folder:
            file = Path(folder) / "kernel"
            file.write_bytes(image)
            done = subprocess.run([path, *command[1:], str(file)], capture_output=True, text=True, check=False)
        return done.stdout.strip() or done.stderr.strip()
    return f"no disassembler here: {' or '.join(command[0] for command in tools)} would show it"
