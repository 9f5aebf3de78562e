"""``python -m fuser``: the machine, what a functor's text becomes, what is kept on disk, which group is wrong."""

from __future__ import annotations

import argparse
import errno
import importlib.util
import io
import math
import os
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import fuser
from fuser import launcher
from fuser.command import bench, cache, demo, doctor, show
from fuser.command.bisect import bisect
from fuser.config import SETTINGS
from fuser.cpu.backend import find_compiler
from fuser.dtypes import DTYPES
from fuser.errors import ArgumentError, DeviceError, FuserError, suggest
from fuser.python_launcher import PythonLauncher

# Not the module's own documentation, which -OO takes away.
WHAT = "The machine, what a functor's text becomes, what is kept on disk, which group is wrong."
BOLD, RED, GREEN, YELLOW = 1, 31, 32, 33
# As shells have it of a program that SIGINT ends.
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 1 if something is wrong, 130 if Ctrl-C came.

    Raises:
        BrokenPipeError: nobody reads what is printed any more.
    """
    options = _make_parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    # Of torch there are those of its allocators.
    except (FuserError, OSError, ImportError, ValueError, RuntimeError) as error:
        is_of_file = isinstance(error, OSError) and error.filename is not None and not isinstance(error, FuserError)
        print(f"{error.filename}: {error.strerror}" if is_of_file else error, file=sys.stderr)  # type: ignore[union-attr]
        return 1


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fuser", description=WHAT)
    parser.add_argument("--version", action="version", version=f"fuser {fuser.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    shown = commands.add_parser("demo", help="run four functors as one launch, beside eager torch")
    shown.set_defaults(run=show_demo)
    shown.add_argument("--device", choices=("cpu", "cuda"), default=None)
    shown.add_argument("--size", type=_read_count, default=None, metavar="N", help="elements of a tensor")
    commands.add_parser("info", help="show versions, compilers and settings").set_defaults(run=show_info)
    tried = commands.add_parser("doctor", help="try compilers, devices and the cache, and say how to mend them")
    tried.set_defaults(run=show_findings)
    kept = commands.add_parser("cache", help="show or remove what is kept between processes")
    kept.set_defaults(run=show_cache)
    kept.add_argument("action", choices=cache.ACTIONS)
    for name, run, text in (
        ("check", run_check, "parse and compile a functor file"),
        ("emit", run_emit, "print the kernel of a functor file"),
        ("show", run_show, "print its kernel and derivative, the registers they take, and their machine code"),
        ("bench", run_bench, "time it beside a copy, its eager version and jiterator"),
    ):
        command = commands.add_parser(name, help=text)
        command.set_defaults(run=run)
        command.add_argument("file", type=Path, help="a file with one functor text")
        command.add_argument("--scalar", action="append", default=[], help="name of a scalar parameter; repeatable")
        command.add_argument("--outputs", type=int, default=1, help="number of outputs (T&)")
        command.add_argument("--device", choices=("cpu", "cuda"), default=None)
        if name != "bench":
            command.add_argument("--dtype", type=_read_dtype, default=torch.float32, help="of its tensors")
        if name == "show":
            command.add_argument("--target", type=_read_architecture, help="show a CUDA kernel for it, such as sm_90")
            command.add_argument("--assembly", action="store_true", help="show machine code, too")
        if name == "bench":
            command.add_argument("--dtype", nargs="+", type=_read_dtype, default=[torch.float32, torch.bfloat16])
            sizes = [2**10, 2**16, 2**22, 2**25]
            command.add_argument("--sizes", nargs="+", type=_read_count, default=sizes, metavar="N")
            command.add_argument("--seconds", type=_read_seconds, default=0.2, help="for one measurement (0.2)")
            command.add_argument("--json", type=Path, help="a file to write the figures to")
            command.add_argument("--plot", type=Path, help="a file to draw them in (needs matplotlib)")
    command = commands.add_parser("bisect", help="find the fusion group that makes a script fail")
    command.set_defaults(run=find_culprit)
    command.add_argument("--folder", type=Path, default=Path("fuser_bisect"), help="where to write what was found")
    command.add_argument("script", type=Path, help="a script that fails when it is wrong")
    rest = command.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's arguments")
    # argparse would name it among what is missing.
    rest.required = False
    return parser


def show_demo(options: argparse.Namespace) -> int:
    """Run the demo, and print what it says as it comes."""
    device = _find_device(options.device)
    for line in demo.run(device, options.size or demo.SIZE[device]):
        print(_paint(line[2:], BOLD) if line.startswith("# ") else line, flush=True)
    return 0


def show_cache(options: argparse.Namespace) -> int:
    """Print what is kept on disk, or remove it."""
    for line in cache.run(options.action):
        print(line)
    return 0


def run_check(options: argparse.Namespace) -> int:
    """Parse and compile the functor, and print how it is called."""
    function = _read_functor(options)
    function.check(device=options.device, dtype=options.dtype)
    print(f"{function.function.functor.signature()} compiles")
    return 0


def run_emit(options: argparse.Namespace) -> int:
    """Print the kernel text of the functor for contiguous tensors."""
    function = _read_functor(options)
    functor = function.function.functor
    inputs = [
        *(torch.empty(2, 2, dtype=options.dtype, device="meta") for _ in functor.tensors),
        *(1.0 for _ in functor.scalars),
    ]
    group = function.spec(len(functor.tensors)).group
    print(fuser.debug_get_fused_kernel_code(group, inputs, device=options.device or _default_device()))
    return 0


def run_show(options: argparse.Namespace) -> int:
    """Print the functor's kernel, that of its derivative, and what they take."""
    # An architecture is one of CUDA's, whatever is in this machine.
    device = options.device or ("cuda" if options.target else _default_device())
    if options.target and device == "cpu":
        raise ArgumentError(f"--target {options.target} is for CUDA kernels, and --device is cpu")
    function, target = _read_functor(options), options.target or "sm_90"
    for section in show.show(function, device, options.dtype, target, assembly=options.assembly):
        print(section, flush=True)
    return 0


def run_bench(options: argparse.Namespace) -> int:
    """Print a table as it comes, and write what was asked for."""
    function, device, rows = _read_functor(options), _find_device(options.device), list[bench.Row]()
    # What cannot be written is said before it is measured.
    for path in (options.json, options.plot):
        if path is not None:
            _check_writable(path)
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ImportError("--plot needs matplotlib: pip install matplotlib")

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
    return 0


def find_culprit(options: argparse.Namespace) -> int:
    """Print the group that makes a script fail; return 1 if there is none."""
    found = bisect([str(options.script), *options.arguments], options.folder)
    if found is None:
        print("the script does not fail")
        return 1
    print(f"it passes with {found.number - 1} groups, and fails with this one, number {found.number}:")
    print(found.group)
    print(f"python {shlex.quote(str(found.script))} runs it alone")
    return 0


def _read_functor(options: argparse.Namespace) -> fuser.JitFunction:
    try:
        text = options.file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{options.file}: no text: {error}") from None
    return fuser.jit_fn(text, num_outputs=options.outputs, scalars=options.scalar)


def _check_writable(path: Path) -> None:
    # Without writing: there may be nothing to write in the end.
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such folder", str(path.parent))
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def _find_device(name: str | None) -> str:
    # Where something runs.
    if name == "cuda" and not torch.cuda.is_available():
        raise DeviceError("torch finds no CUDA device")
    return name or _default_device()


def _paint(text: str, colour: int) -> str:
    # For a terminal; what is piped is plain.
    is_plain = not sys.stdout.isatty() or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    return text if is_plain else f"\033[{colour}m{text}\033[0m"


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _read_dtype(name: str) -> torch.dtype:
    # As printed, too.
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise argparse.ArgumentTypeError(f"torch has no dtype {name!r}")
    if dtype not in DTYPES:
        raise argparse.ArgumentTypeError(f"functors do not compute in {name}")
    return dtype


def _read_architecture(name: str) -> str:
    # Of a virtual one (compute_90) NVRTC makes no machine code.
    if not re.fullmatch(r"sm_\d+[a-z]?", name):
        raise argparse.ArgumentTypeError(f"an architecture is wanted, such as sm_90, got {name!r}")
    return name


def _read_count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= sys.maxsize:
        raise argparse.ArgumentTypeError(f"a whole number above 0, of 64 bits, is wanted, got {text!r}")
    return int(text)


def _read_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"a time above 0 is wanted, got {text!r}")
    return seconds


def show_findings(options: argparse.Namespace) -> int:  # noqa: ARG001 - as the others
    """Try everything, print what comes of it as it comes, and return 1 if something that is there does not work."""
    is_broken = False
    for finding in doctor.examine():
        print(_paint(str(finding), {True: GREEN, False: RED, None: YELLOW}[finding.works]), flush=True)
        is_broken = is_broken or finding.works is False
    return int(is_broken)


def show_info(options: argparse.Namespace) -> int:  # noqa: ARG001 - as the others
    """Print versions, compilers and the settings that are not as they come: what a bug report needs."""
    print(f"fuser {fuser.__version__}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    print(f"installed in: {Path(fuser.__file__).parent}")
    print(f"launcher: in {'Python' if launcher.Replayer is PythonLauncher else 'C'}")
    try:
        compiler = find_compiler(fuser.config.cxx)
        print(f"C++ compiler: {compiler.title}")
    except FuserError as error:
        print(f"C++ compiler: {error}")
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    print(f"GPUs: {', '.join(gpus) or 'none'}")
    values = [(item.name, getattr(fuser.config, item.name), item.default) for item in SETTINGS]
    changed = [f"{name}={value!r}" for name, value, default in values if value != default]
    print(f"settings: {', '.join(changed) or 'all as they come'}")
    known = {item.env for item in SETTINGS}
    for name in sorted(os.environ):
        if name.startswith("FUSER_") and name not in known:
            print(f"no setting: {name} in the environment{suggest(name, known)}")
    return 0


def _say_plainly(message: Warning | str, *_: Any, **__: Any) -> str:
    # Where in this program it was said is nothing to its user.
    return f"{message}\n"


if __name__ == "__main__":
    warnings.formatwarning = _say_plainly
    # Functors' texts may have characters that the locale has not. The C locale's escapes are for names of files alone.
    refused = {"strict"} if sys.stdout and sys.stdout.encoding == "utf-8" else {"strict", "surrogateescape"}
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in refused:
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            status = main()
        except SystemExit as end:
            # argparse's, of --help and of a wrong command line.
            status = int(end.code or 0)
        # It is None where it was closed beforehand.
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
    except BrokenPipeError:
        # ``| head`` has read enough.
        status = 0
    except OSError as error:
        # The disk is full that the output goes to.
        print(error, file=sys.stderr)
        status = 1
    # Nothing is left to do, and the interpreter would take up to a second to take torch's modules apart.
    os._exit(status)
