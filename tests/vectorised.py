"""What gcc says of a CPU kernel's loops."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from fuser.config import config
from fuser.cpu.backend import compiler_flags, find_compiler
from fuser.kernel_source import KernelSource

__all__ = ["find_loops"]


def find_loops(source: KernelSource, folder: Path) -> tuple[set[str], set[str]]:
    """Return the loops of a kernel that gcc makes vectors of, and those of which it does not, by their places."""
    compiler = find_compiler(config.cxx)
    file = folder / "kernel.cpp"
    file.write_text(source.text, encoding="utf-8")
    command = [*compiler.command, *compiler_flags(compiler, source.numerics), "-fopt-info-vec-optimized-missed"]
    run = subprocess.run(
        [*command, "-c", file, "-o", file.with_suffix(".o")], capture_output=True, text=True, check=True
    )
    done, missed = (
        set(re.findall(rf"^(fuser_kernel:\d+:\d+): {words}", run.stderr, re.MULTILINE))
        for words in ("optimized: loop vectorized", "missed: couldn't vectorize loop")
    )
    return done, missed
