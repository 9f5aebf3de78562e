"""``python -m fuser``: what this machine can do, a functor file checked or shown as a kernel, a wrong group found."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import fuser
from fuser.bisect import bisect
from fuser.cpu.backend import find_compiler
from fuser.errors import FuserError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fuser", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="show versions, compilers and settings")
    for name, text in (("check", "parse and compile a functor file"), ("emit", "print the kernel of a functor file")):
        command = commands.add_parser(name, help=text)
        command.add_argument("file", type=Path, help="a file with one functor text")
        command.add_argument("--scalar", action="append", default=[], help="name of a scalar parameter; repeatable")
        command.add_argument("--outputs", type=int, default=1, help="number of outputs")
        command.add_argument("--device", choices=("cpu", "cuda"), default=None)
    command = commands.add_parser("bisect", help="find the fusion group that makes a script fail")
    command.add_argument("--folder", type=Path, default=Path("fuser_bisect"), help="where to write what was found")
    command.add_argument("script", nargs=argparse.REMAINDER, help="a script that fails when it is wrong; its arguments")
    options = parser.parse_args(arguments)
    if options.command == "info":
        return show_info()
    if options.command == "bisect":
        return find_culprit(options.script, options.folder)
    try:
        function = fuser.jit_fn(options.file.read_text(), num_outputs=options.outputs, scalars=options.scalar)
        if options.command == "check":
            function.check(device=options.device)
            print(f"{function.function.functor.signature()} compiles")
        else:
            print(emit(function, options.device))
    except (FuserError, OSError, UnicodeDecodeError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def find_culprit(command: Sequence[str], folder: Path) -> int:
    """Print the group that makes a script fail; return 1 if there is none."""
    try:
        found = bisect(command, folder)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    if found is None:
        print("the script does not fail")
        return 1
    print(f"it passes with {found.number - 1} groups, and fails with this one, number {found.number}:")
    print(found.group)
    print(f"python {found.script} runs it alone")
    return 0


def emit(function: fuser.JitFunction, device: str | None) -> str:
    """Return the kernel text of a functor for contiguous float32 tensors."""
    functor = function.function.functor
    inputs = [*(torch.empty(2, 2, device="meta") for _ in functor.tensors), *(1.0 for _ in functor.scalars)]
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return fuser.debug_get_fused_kernel_code(function.spec(len(functor.tensors)).group, inputs, device=where)


def show_info() -> int:
    """Print versions, compilers and settings."""
    print(f"fuser {fuser.__version__}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    try:
        compiler = find_compiler(fuser.config.cxx)
        print(f"C++ compiler: {compiler.version.splitlines()[0]}")
    except FuserError as error:
        print(f"C++ compiler: {error}")
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    print(f"GPUs: {', '.join(gpus) or 'none'}")
    print(fuser.config)
    return 0


if __name__ == "__main__":
    sys.exit(main())
