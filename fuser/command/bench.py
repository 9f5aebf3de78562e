"""``python -m fuser bench``: a functor's kernel beside a copy of the same bytes, its eager version and jiterator."""

from __future__ import annotations

import importlib
import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fuser._version import __version__
from fuser.errors import FuserError
from fuser.fallback import Fallback
from fuser.jit_function import JitFunction
from fuser.progress import Progress

__all__ = ["Row", "measure", "plot", "table_lines", "write_json"]

NAMES = ("copy", "fuser", "eager", "jiterator")


@dataclass(frozen=True, slots=True)
class Row:
    """What one call takes of each that can run, in microseconds: medians; why another cannot."""

    dtype: str
    elements: int
    # Each input read once, each output written once.
    moved_bytes: int
    microseconds: dict[str, float]
    absent: dict[str, str]

    def gb_per_s(self, name: str) -> float:
        """Return how fast one moves the bytes that a call has to move."""
        return self.moved_bytes / self.microseconds[name] / 1e3


def measure(
    function: JitFunction, device: str, dtypes: Sequence[torch.dtype], sizes: Sequence[int], seconds: float
) -> Iterator[Row]:
    """Yield a row for each dtype and size.

    Args:
        function: the functor; its scalars are 1.5.
        device: "cpu" or "cuda".
        dtypes: of its tensors, which are dense and random.
        sizes: their elements.
        seconds: for one measurement, at least.
    """
    cases = [(dtype, elements) for dtype in dtypes for elements in sizes]
    with Progress("bench", len(cases) * len(NAMES)) as bar:
        for dtype, elements in cases:
            tensors = [_draw(elements, dtype, device) for _ in function.tensor_names]
            numbers = dict.fromkeys(function.scalar_names, 1.5)
            outputs = function(*tensors, **numbers)
            outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
            moved = sum(item.numel() * item.element_size() for item in (*tensors, *outputs))
            times: dict[str, float] = {}
            absent: dict[str, str] = {}
            for name in NAMES:
                try:
                    times[name] = _time_us(_make(name, function, tensors, numbers, moved), seconds)
                except (FuserError, RuntimeError, TypeError, AttributeError) as error:
                    absent[name] = str(error).partition("\n")[0] or type(error).__name__
                bar.advance(f"{dtype}, {elements:,} elements, {name}")
            bar.clear()
            yield Row(str(dtype).removeprefix("torch."), elements, moved, times, absent)


def _draw(elements: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    # Not zeros: arithmetic on them takes less power, and so less time. make_tensor does not know all of float8.
    drawn = torch.float32 if dtype.is_floating_point and dtype.itemsize == 1 else dtype
    return torch.testing.make_tensor(elements, dtype=drawn, device=device, low=0, high=2).to(dtype)


def _make(name: str, function: JitFunction, tensors: Sequence[Any], numbers: dict[str, Any], moved: int) -> Any:
    if name == "copy":
        source = _draw(moved // 2, torch.uint8, tensors[0].device.type)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)
    if name == "fuser":
        return lambda: function(*tensors, **numbers)
    functor = function.function.functor
    if name == "eager":
        fallback = Fallback(function.spec(len(tensors)).group)
        return lambda: fallback.run([*tensors, *numbers.values()], "benchmark")
    if tensors[0].device.type != "cuda":
        raise RuntimeError("needs a GPU")
    # It has no index, and no dtypes of outputs.
    made_by: Any = torch.cuda.jiterator
    count = function.function.num_outputs
    if count == 1:
        theirs = made_by._create_jit_fn(functor.source, **numbers)
    else:
        theirs = made_by._create_multi_output_jit_fn(functor.source, count, **numbers)
    return lambda: theirs(*tensors)


def _time_us(call: Callable[[], Any], seconds: float) -> float:
    from torch.utils.benchmark import Timer  # noqa: PLC0415 - takes long, of every command

    call()
    timer: Any = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=seconds).median * 1e6)


def table_lines(rows: Iterator[Row]) -> Iterator[str]:
    """Yield a table's lines as rows come."""
    yield f"{'dtype':<12}{'elements':>12}" + "".join(f"{name:>22}" for name in NAMES)
    told: set[tuple[str, str]] = set()
    for row in rows:
        cells = [
            f"{row.microseconds[name]:>9.1f} us {row.gb_per_s(name):>5.0f} GB/s" if name in row.microseconds else "-"
            for name in NAMES
        ]
        yield f"{row.dtype:<12}{row.elements:>12,}" + "".join(f"{cell:>22}" for cell in cells)
        for name, reason in row.absent.items():
            if (name, reason) not in told:
                told.add((name, reason))
                yield f"  {name}: {reason}"


def write_json(rows: Sequence[Row], text: str, device: str, path: Path) -> None:
    """Write rows and where they were measured."""
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    document = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "device": {"type": device, "name": name, "threads": torch.get_num_threads()},
        "versions": {"fuser": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "functor": text,
        "rows": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw GB/s over elements, a panel for each dtype.

    Raises:
        ImportError: matplotlib is missing.
    """
    # An optional extra.
    plt: Any = importlib.import_module("matplotlib.pyplot")
    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    figure, axes = plt.subplots(1, len(dtypes), figsize=(5 * len(dtypes), 4), squeeze=False, layout="constrained")
    for axis, dtype in zip(axes[0], dtypes, strict=True):
        for name in NAMES:
            shown = [row for row in rows if row.dtype == dtype and name in row.microseconds]
            points = [(row.elements, row.gb_per_s(name)) for row in shown]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", label=name)
        axis.set(xscale="log", xlabel="elements", ylabel="GB/s", title=dtype, ylim=(0, None))
        axis.legend()
    figure.savefig(path)
    plt.close(figure)
