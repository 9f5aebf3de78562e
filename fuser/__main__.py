"""``python -m fuser``: the machine, what a functor's text becomes, what is kept on disk, which group is wrong."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

import fuser
from fuser import launcher
from fuser.command import bench, cache, demo, doctor, show
from fuser.command.bisect import bisect
from fuser.config import SETTINGS
from fuser.cpu.backend import find_compiler
from fuser.errors import FuserError
from fuser.python_launcher import PythonLauncher

BOLD, RED, GREEN, YELLOW = 1, 31, 32, 33


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fuser", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    shown = commands.add_parser("demo", help="run four functors as one launch, beside eager torch")
    shown.add_argument("--device", choices=("cpu", "cuda"), default=None)
    shown.add_argument("--size", type=int, default=None, metavar="N", help="elements of a tensor")
    commands.add_parser("info", help="show versions, compilers and settings")
    commands.add_parser("doctor", help="try compilers, devices and the cache for real, and say how to mend them")
    kept = commands.add_parser("cache", help="show or remove what is kept between processes")
    kept.add_argument("action", choices=cache.ACTIONS)
    for name, text in (
        ("check", "parse and compile a functor file"),
        ("emit", "print the kernel of a functor file"),
        ("show", "print its kernel and derivative, the registers they take, and their machine code"),
        ("bench", "time it beside a copy, its eager version and jiterator"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("file", type=Path, help="a file with one functor text")
        command.add_argument("--scalar", action="append", default=[], help="name of a scalar parameter; repeatable")
        command.add_argument("--outputs", type=int, default=1, help="number of outputs")
        command.add_argument("--device", choices=("cpu", "cuda"), default=None)
        if name == "show":
            command.add_argument("--dtype", type=_read_dtype, default=torch.float32, help="of its tensors")
            command.add_argument("--target", default="sm_90", help="architecture of CUDA kernels (sm_90)")
            command.add_argument("--assembly", action="store_true", help="show machine code, too")
        if name == "bench":
            command.add_argument("--dtype", nargs="+", type=_read_dtype, default=[torch.float32, torch.bfloat16])
            command.add_argument("--sizes", nargs="+", type=int, default=[2**10, 2**16, 2**22, 2**25], metavar="N")
            command.add_argument("--seconds", type=float, default=0.2, help="for one measurement (0.2)")
            command.add_argument("--json", type=Path, help="a file to write the figures to")
            command.add_argument("--plot", type=Path, help="a file to draw them in (needs matplotlib)")
    command = commands.add_parser("bisect", help="find the fusion group that makes a script fail")
    command.add_argument("--folder", type=Path, default=Path("fuser_bisect"), help="where to write what was found")
    command.add_argument("script", nargs=argparse.REMAINDER, help="a script that fails when it is wrong; its arguments")
    options = parser.parse_args(arguments)
    if options.command == "info":
        return show_info()
    if options.command == "doctor":
        return show_findings()
    if options.command == "bisect":
        return find_culprit(options.script, options.folder)
    try:
        if options.command == "demo":
            device = options.device or _default_device()
            for line in demo.run(device, options.size or demo.SIZE[device]):
                print(_paint(line[2:], BOLD) if line.startswith("# ") else line, flush=True)
            return 0
        if options.command == "cache":
            for line in cache.run(options.action):
                print(line)
            return 0
        function = fuser.jit_fn(options.file.read_text(), num_outputs=options.outputs, scalars=options.scalar)
        if options.command == "check":
            function.check(device=options.device)
            print(f"{function.function.functor.signature()} compiles")
        elif options.command == "emit":
            print(emit(function, options.device))
        elif options.command == "bench":
            run_bench(function, options)
        else:
            device = options.device or _default_device()
            for section in show.show(function, device, options.dtype, options.target, assembly=options.assembly):
                print(section, flush=True)
    except BrokenPipeError:
        raise
    except (FuserError, OSError, ImportError, UnicodeDecodeError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def run_bench(function: fuser.JitFunction, options: argparse.Namespace) -> None:
    """Print a table as it comes, and write what was asked for."""
    device, rows = options.device or _default_device(), list[bench.Row]()

    def keep() -> Iterator[bench.Row]:
        for row in bench.measure(function, device, options.dtype, options.sizes, options.seconds):
            rows.append(row)
            yield row

    for number, line in enumerate(bench.table_lines(keep())):
        print(line if number else _paint(line, BOLD), flush=True)
    if options.json is not None:
        bench.write_json(rows, function.function.functor.source, device, options.json)
    if options.plot is not None:
        bench.plot(rows, options.plot)


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
    group = function.spec(len(functor.tensors)).group
    return fuser.debug_get_fused_kernel_code(group, inputs, device=device or _default_device())


def _paint(text: str, colour: int) -> str:
    # For a terminal; what is piped is plain.
    is_plain = not sys.stdout.isatty() or bool(os.environ.get("NO_COLOR"))
    return text if is_plain else f"\033[{colour}m{text}\033[0m"


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _read_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise argparse.ArgumentTypeError(f"torch has no dtype {name!r}")
    return dtype


def show_findings() -> int:
    """Try everything, print what comes of it as it comes, and return 1 if something that is there does not work."""
    is_broken = False
    for finding in doctor.examine():
        print(_paint(str(finding), {True: GREEN, False: RED, None: YELLOW}[finding.works]), flush=True)
        is_broken = is_broken or finding.works is False
    return int(is_broken)


def show_info() -> int:
    """Print versions, compilers and the settings that are not as they come: what a bug report needs."""
    print(f"fuser {fuser.__version__}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    print(f"installed in: {Path(fuser.__file__).parent}")
    print(f"launcher: in {'Python' if launcher.Replayer is PythonLauncher else 'C'}")
    try:
        compiler = find_compiler(fuser.config.cxx)
        print(f"C++ compiler: {compiler.version.splitlines()[0]}")
    except FuserError as error:
        print(f"C++ compiler: {error}")
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    print(f"GPUs: {', '.join(gpus) or 'none'}")
    values = [(item.name, getattr(fuser.config, item.name), item.default) for item in SETTINGS]
    changed = [f"{name}={value!r}" for name, value, default in values if value != default]
    print(f"settings: {', '.join(changed) or 'all as they come'}")
    return 0


if __name__ == "__main__":
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # ``| head`` has read enough.
        status = 0
    sys.stderr.flush()
    # Nothing is left to do, and the interpreter would take up to a second to take torch's modules apart.
    os._exit(status)
