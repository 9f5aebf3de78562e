"""``python -m fuser bisect SCRIPT``: which fusion group makes a script fail, found by halving how many are fused.

The script runs in processes of its own, with ``FUSER_FUEL`` groups each: it has to end with a status other than 0 when
it is wrong, as a failed ``assert`` does, and must not draw other numbers each time. Of the first group with which it
fails, the last process keeps the inputs of its first call, and a script is written that runs the group alone.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fuser.fx import passes
from fuser.fx.passes import Fuel, FusionModule
from fuser.graph import FusionGroup

__all__ = ["Culprit", "bisect", "run_watched"]

ENOUGH = 1 << 62
COUNT, GROUP, INPUTS, SCRIPT = "groups.txt", "group.json", "inputs.pt", "reproduce.py"


@dataclass(frozen=True, slots=True)
class Culprit:
    """The first group with which a script fails."""

    # Which one it is, counted from 1 in the order in which groups are made.
    number: int
    group: FusionGroup
    # Runs it alone, fused and in eager torch.
    script: Path


def bisect(command: Sequence[str], folder: Path) -> Culprit | None:
    """Find the first group with which a script fails.

    Args:
        command: the script's path and its arguments.
        folder: where the group, its inputs and a script that runs it are written.

    Returns:
        The group; None where the script does not fail.

    Raises:
        ValueError: the script fails without any group too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # With fuel, however much, nothing comes from caches of compiled graphs, and all groups are counted.
    if not _fails(command, folder, ENOUGH):
        return None
    # Without a fault it would be one of so many; it passes with ``low`` groups and fails with ``high``.
    low, high = 0, int((folder / COUNT).read_text())
    if _fails(command, folder, low):
        raise ValueError("the script fails without any fusion group, too")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _fails(command, folder, middle) else (middle, high)
    for name in (GROUP, INPUTS):
        (folder / name).unlink(missing_ok=True)
    _fails(command, folder, high)
    script = folder / SCRIPT
    script.write_text(_REPRODUCE.format(number=high, script=command[0]))
    return Culprit(high, FusionGroup.from_json((folder / GROUP).read_text()), script)


def run_watched(folder: Path, command: Sequence[str]) -> None:
    """Run a script in this process, and note how many groups there are and what the last one is."""
    fuel = passes.process_fuel = _Watched(folder)
    sys.argv = list(command)
    sys.path[0] = str(Path(command[0]).resolve().parent)
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        (folder / COUNT).write_text(str(fuel.burnt))


class _Watched(Fuel):
    """Counts groups; of the last that is fused it keeps the text, and the inputs of its first call."""

    def __init__(self, folder: Path) -> None:
        super().__init__(int(os.environ["FUSER_FUEL"]))
        self.folder = folder

    def see(self, module: FusionModule) -> None:
        if self.burnt != self.limit:
            return
        (self.folder / GROUP).write_text(module.group.to_json())
        fused, is_first = module.run, True

        def run(*inputs: Any, **out: Any) -> Any:
            nonlocal is_first
            if is_first:
                is_first = False
                # Of lists, the first position.
                first = [item[0] if isinstance(item, list | tuple) else item for item in inputs]
                torch.save(first, self.folder / INPUTS)
            return fused(*inputs, **out)

        # A function, so that no graph is replayed around it.
        module.run = run  # type: ignore[assignment]


def _fails(command: Sequence[str], folder: Path, fuel: int) -> bool:
    environment = {**os.environ, "FUSER_FUEL": str(fuel)}
    program = "import sys, pathlib, fuser.command.bisect as b; b.run_watched(pathlib.Path(sys.argv[1]), sys.argv[2:])"
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder), *command], env=environment, capture_output=True, check=False
    )
    return done.returncode != 0


_REPRODUCE = '''"""Group {number} of {script}: what its kernel returns, and what eager torch returns."""

from pathlib import Path

import torch

import fuser

folder = Path(__file__).parent
group = fuser.FusionGroup.from_json((folder / "group.json").read_text())
inputs = torch.load(folder / "inputs.pt", weights_only=False)
print(group)
fused = fuser.debug_launch_graph(group, inputs)
fuser.override_can_fuse_on_cpu(False)
fuser.override_can_fuse_on_gpu(False)
eager = fuser.debug_launch_graph(group, inputs)
for number, (got, wanted) in enumerate(zip(fused, eager, strict=True)):
    same = (got == wanted) | (got.isnan() & wanted.isnan())
    worst = (got.double() - wanted.double()).abs().nan_to_num().max().item() if got.numel() else 0.0
    count = got.numel() - int(same.sum())
    print(f"output {{number}}: {{count}} of {{got.numel()}} elements differ, by {{worst}} at most")
'''
