"""``python -m fuser bisect SCRIPT``: which fusion group makes a script fail, found by halving how many are fused.

The script runs in processes of its own, with ``FUSER_FUEL`` groups each: it has to end with a status other than 0 when
it is wrong, as a failed ``assert`` does, and must not draw other numbers each time. Of the first group with which it
fails, the last process keeps the inputs of the call that was farthest from eager torch, and a script is written that
runs the group alone.
"""

from __future__ import annotations

import copy
import errno
import os
import pickle
import runpy
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from fuser.errors import FuserError
from fuser.function import Function
from fuser.fx import passes
from fuser.fx.fusion_node import FusionModule
from fuser.fx.passes import Fuel
from fuser.graph import FusionGroup
from fuser.interface import override_can_fuse_on_cpu, override_can_fuse_on_gpu

__all__ = ["Culprit", "bisect", "compare", "run_eagerly", "run_watched"]

ENOUGH = 1 << 62
COUNT, CALL, SCRIPT = "groups.txt", "call.pt", "reproduce.py"


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
        FileNotFoundError: there is no such script.
        ValueError: the script fails without any group too.
    """
    if not Path(command[0]).is_file():
        raise FileNotFoundError(errno.ENOENT, "no such script", command[0])
    folder.mkdir(parents=True, exist_ok=True)
    # With fuel, however much, nothing comes from caches of compiled graphs, and all groups are counted.
    if not _run(command, folder, ENOUGH).returncode:
        return None
    # Without a fault it would be one of so many; it passes with ``low`` groups and fails with ``high``.
    low, high = 0, int((folder / COUNT).read_text())
    alone = _run(command, folder, low)
    if alone.returncode:
        *_, last = ["", *alone.stderr.splitlines()]
        raise ValueError(f"the script fails without any fusion group, too: {last or alone.returncode}")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _run(command, folder, middle).returncode else (middle, high)
    # Not what an earlier run left.
    (folder / CALL).unlink(missing_ok=True)
    _run(command, folder, high)
    script = folder / SCRIPT
    # Whatever the locale, and characters of the name that have a meaning in Python.
    script.write_text(
        _REPRODUCE.format(number=high, script=ascii(command[0])[1:-1].replace('"', "'")), encoding="utf-8"
    )
    return Culprit(high, torch.load(folder / CALL, weights_only=False)[0].group, script)


def run_watched(folder: Path, command: Sequence[str]) -> None:
    """Run a script in this process, and note how many groups there are and what the last one is."""
    passes.process_fuel = _Watched(folder)
    sys.argv = list(command)
    # As Python does it, which leaves the folder out where it is told to (-P): the first place is then another's.
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(command[0]).resolve().parent)
    runpy.run_path(command[0], run_name="__main__")


class _Watched(Fuel):
    """Counts groups; of the last that is fused it keeps what it is, and the inputs of one call.

    What it knows is on disk at any time: a kernel may end the process.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(int(os.environ["FUSER_FUEL"]))
        self.folder = folder
        self._write_count()

    def burn(self) -> bool:
        may_be_made = super().burn()
        self._write_count()
        return may_be_made

    def _write_count(self) -> None:
        (self.folder / COUNT).write_text(str(self.burnt))

    def see(self, module: FusionModule) -> None:
        if self.burnt != self.limit:
            return
        twin, fused, most = copy.deepcopy(module), module.run, -1.0
        self._keep(twin, ())

        def run(*inputs: Any, **out: Any) -> Any:
            nonlocal most
            if not all(map(_has_values, tree_leaves(inputs))):
                return fused(*inputs, **out)
            # The call may write to them.
            given = copy.deepcopy(tree_map_only(torch.Tensor, torch.Tensor.detach, inputs))
            if most < 0:
                most = 0.0
                self._keep(twin, given)
            try:
                wanted = run_eagerly(twin, *copy.deepcopy(given))
            except FuserError:
                # Texts without an eager version are no failure of the script's.
                return fused(*inputs, **out)
            made = fused(*inputs, **out)
            apart = max((compare(*pair)[1] for pair in zip(tree_leaves(made), wanted, strict=True)), default=0.0)
            if apart > most:
                most = apart
                self._keep(twin, given)
            return made

        # A function, so that no graph is replayed around it; what plans ahead asks it for the group.
        run.spec = module.spec  # type: ignore[attr-defined]
        module.run = run  # type: ignore[assignment]

    def _keep(self, module: FusionModule, inputs: Any) -> None:
        torch.save((module, inputs), self.folder / CALL, pickle_module=_Saving)


class _Saving:
    """What torch.save asks for a pickler: one that leaves out fallbacks, which are functions of the script's."""

    class Pickler(pickle.Pickler):
        def reducer_override(self, item: Any) -> Any:
            if isinstance(item, Function) and item.fallback is not None:
                return replace(item, fallback=None).__reduce_ex__(2)
            return NotImplemented


def _has_values(item: Any) -> bool:
    # What stands for a tensor, or a number, while somebody traces or maps the call can be neither kept nor compared.
    if not isinstance(item, torch.Tensor):
        return isinstance(item, bool | int | float | complex)
    is_plain = type(item) in {torch.Tensor, torch.nn.Parameter} and not item.is_meta
    return is_plain and not torch._C._functorch.is_functorch_wrapped_tensor(item)


def run_eagerly(module: FusionModule, *inputs: Any) -> list[torch.Tensor]:
    """Return the results of a fusion node, without kernels."""
    before = override_can_fuse_on_cpu(False), override_can_fuse_on_gpu(False)
    try:
        return list(tree_leaves(module(*inputs)))
    finally:
        override_can_fuse_on_cpu(before[0])
        override_can_fuse_on_gpu(before[1])


def compare(got: torch.Tensor, wanted: torch.Tensor) -> tuple[int, float]:
    """Return how many elements of a tensor differ from another's, and by how much at most."""
    same = (got == wanted) | (got.isnan() & wanted.isnan())
    wide = torch.complex128 if got.dtype.is_complex else torch.float64
    apart = (got.to(wide) - wanted.to(wide)).abs().nan_to_num().max().item() if got.numel() else 0.0
    return got.numel() - int(same.sum()), apart


def _run(command: Sequence[str], folder: Path, fuel: int) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "FUSER_FUEL": str(fuel)}
    program = "import sys, pathlib, fuser.command.bisect as b; b.run_watched(pathlib.Path(sys.argv[1]), sys.argv[2:])"
    # Absolute: the script may go to another folder.
    line = [sys.executable, "-c", program, str(folder.absolute()), *command]
    return subprocess.run(line, env=environment, capture_output=True, text=True, errors="replace", check=False)


_REPRODUCE = '''"""Group {number} of {script}: what its kernel returns, and what eager torch returns."""

from pathlib import Path

import torch

from fuser.command.bisect import compare, run_eagerly

module, inputs = torch.load(Path(__file__).parent / "call.pt", weights_only=False)
print(module.group)
if module.group.inputs and not inputs:
    raise SystemExit("no call of it had tensors that could be kept: functorch maps them, or they have no values")
fused = torch.utils._pytree.tree_leaves(module(*inputs))
for number, (got, wanted) in enumerate(zip(fused, run_eagerly(module, *inputs), strict=True)):
    count, apart = compare(got, wanted)
    print(f"output {{number}}: {{count}} of {{got.numel()}} elements differ, by {{apart}} at most")
'''
