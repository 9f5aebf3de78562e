"""Odd arguments end no process: the C launcher gives what Python's gives, also built to check its memory accesses."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCE = HERE.parent / "fuser" / "_launcher.c"
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g", "-O1")
OPTIONS = {
    # Python and torch are not built for it: they leak at exit, and map memory as they like.
    "ASAN_OPTIONS": "detect_leaks=0:protect_shadow_gap=0:detect_odr_violation=0:verify_asan_link_order=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    # Each object in memory of its own.
    "PYTHONMALLOC": "malloc",
}


def find_library(name: str) -> str:
    """Return the path of one of gcc's libraries."""
    done = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def build(folder: Path, flags: Sequence[str]) -> Path:
    """Build the C launcher."""
    library = folder / "launcher.so"
    include = f"-I{sysconfig.get_path('include')}"
    command = ["gcc", "-shared", "-fPIC", *flags, include, str(SOURCE), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return library


def compare(seed: int, count: int, folder: Path, *, is_sanitized: bool) -> None:
    """Make the same odd calls with both launchers at once; they must give the same."""
    library = build(folder, SANITIZE if is_sanitized else ())
    script = [sys.executable, str(HERE / "odd_calls.py"), str(seed), str(count)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    checks: dict[str, str] = {}
    if is_sanitized:
        # The second library, because the sanitizer looks for it before torch brings it.
        checks = OPTIONS | {"LD_PRELOAD": f"{find_library('libasan.so')} {find_library('libstdc++.so.6')}"}
    paths = folder / "python", folder / "c"
    commands = [*script, str(paths[0])], [*script, str(paths[1]), str(library)]
    with (
        subprocess.Popen(commands[0], env=environment, stderr=subprocess.PIPE, text=True) as python,
        subprocess.Popen(commands[1], env=environment | checks, stderr=subprocess.PIPE, text=True) as c,
    ):
        errors = c.communicate()[1], python.communicate()[1]
    lines = [path.read_text(encoding="utf-8").splitlines() if path.exists() else [] for path in paths]
    for process, error, made in zip((c, python), errors, reversed(lines), strict=True):
        assert process.returncode == 0, f"after call {len(made)}, {made[-1:]}:\n{error[:6000]}"
    assert len(lines[0]) == len(lines[1]) == count
    differ = [pair for pair in zip(*lines, strict=True) if pair[0] != pair[1]]
    assert not differ, "\n".join(f"Python: {left}\nC:      {right}" for left, right in differ[:5])


needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="the sanitizers are those of gcc (none found)")


@needs_gcc
@pytest.mark.cpu
def test_odd_calls(tmp_path: Path) -> None:
    compare(0, 500, tmp_path, is_sanitized=False)


@needs_gcc
@pytest.mark.cpu
@pytest.mark.slow
def test_many_odd_calls(tmp_path: Path) -> None:
    compare(1, 100_000, tmp_path, is_sanitized=True)
