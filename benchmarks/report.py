"""What is left of a run: a JSON document, a picture, and a table on the terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.chains import CHAINS
from benchmarks.peers import PEERS

SCHEMA = 1

COMPILE_TIMES = ("first_ms", "second_ms", "cached_first_ms", "cached_second_ms")

Document = dict[str, Any]
Record = dict[str, Any]

ORANGE, GREY, BLUE, DARK = "#d9622b", "#b4bcc6", "#5b84b1", "#333a45"
# What host times are held against.
MARKS = {"eager_add": "one torch.add", "driver_launch": "cuLaunchKernel alone"}
# What is no peer of its own; every other record is named by its peer.
LABELS = {**MARKS, "fuser_python": "fuser, no C launcher"}


def write_json(document: Document, path: Path) -> None:
    """Write the document; a number that JSON cannot hold is an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(document, indent=1, allow_nan=False)
    # Samples on one line: a run has tens of thousands.
    text = re.sub(r"\[[\s\d.,eE+-]+\]", lambda numbers: " ".join(numbers[0].split()), text)
    path.write_text(text + "\n", encoding="utf-8")


def print_tables(document: Document) -> None:
    """Print the medians."""
    for chain, shape in points(document["throughput"]):
        records = at_point(document["throughput"], chain, shape)
        copy = records[0]
        moved = f"{copy['bytes_moved'] / 1e6:.1f} MB moved"
        print(f"\n{CHAINS[chain].title}, {shape_text(shape)}, {moved}, copy {copy['gb_per_s']:.1f} GB/s")
        print_lines(records[1:], throughput_text)
    for chain in dict.fromkeys(record["chain"] for record in document["host"]):
        records = [record for record in document["host"] if record["chain"] == chain]
        print(f"\nhost time of one call, {CHAINS[chain].title}, {records[0]['elements']} elements")
        print_lines(records, host_text)
    if document["compile"]:
        print(
            "\ncompile time in a fresh process, first and second kernel, then both from the disk caches in another one"
        )
        print_lines(document["compile"], compile_text)
    if document["absent"]:
        print("\nabsent")
        for name, reason in document["absent"].items():
            print(f"  {PEERS[name].label:<24} {reason}")


def print_lines(records: list[Record], text: Callable[[Record], str]) -> None:
    """Print one line per record; peers that are absent everywhere are named once, at the end."""
    for record in records:
        if record["status"] != "absent":
            print(f"  {label(record):<24} {text(record)}")


def throughput_text(record: Record) -> str:
    """Return one line of the throughput table."""
    if record["status"] != "ok":
        return refusal_text(record)
    ratios = "".join(
        f"   {record[key]:6.2f} x {name}"
        for key, name in (("ratio_to_eager", "eager"), ("ratio_to_inductor", "torch.compile"))
        if record[key] is not None
    )
    return (
        f"{record['time_us']['median']:12.1f} us   {record['gb_per_s']:9.1f} GB/s{ratios}"
        f"   {record['ratio_to_copy']:5.2f} x copy   error {record['error_eps']:.2g} eps"
    )


def host_text(record: Record) -> str:
    """Return one line of the host-time table."""
    if record["status"] != "ok":
        return refusal_text(record)
    ratio = f"   {record['ratio_to_eager_add']:6.2f} x torch.add" if "ratio_to_eager_add" in record else ""
    return f"{record['time_us']['median']:10.2f} us{ratio}"


def compile_text(record: Record) -> str:
    """Return one line of the compile-time table."""
    if record["status"] != "ok":
        return refusal_text(record)
    return "   ".join(f"{record[key]:10.1f} ms" for key in COMPILE_TIMES)


def refusal_text(record: Record) -> str:
    """Return why there is no figure."""
    return f"{record['status']}: {record['reason']}"


def points(records: Iterable[Record]) -> list[tuple[str, tuple[int, ...]]]:
    """Return the different pairs of chain and shape, in order."""
    return list(dict.fromkeys((record["chain"], tuple(record["shape"])) for record in records))


def at_point(records: Iterable[Record], chain: str, shape: tuple[int, ...]) -> list[Record]:
    """Return the records of one chain and shape."""
    return [record for record in records if record["chain"] == chain and tuple(record["shape"]) == shape]


def label(record: Record) -> str:
    """Return the name that reports show."""
    return LABELS.get(record["peer"]) or PEERS[record["peer"]].label


def shape_text(shape: Iterable[int]) -> str:
    """Return a shape as people write it."""
    return " x ".join(str(size) for size in shape)


def save_plot(document: Document, path: Path) -> None:
    """Draw one panel per chain at its largest size, then host time and compile time."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    largest = dict(points(document["throughput"]))
    panels = len(largest) + 1 + bool(document["compile"])
    rows = -(-panels // 2)
    figure, grid = plt.subplots(rows, 2, figsize=(14, 0.6 + 3.2 * rows), layout="constrained", squeeze=False)
    figure.get_layout_engine().set(h_pad=0.12, w_pad=0.08)
    axes = iter(grid.flat)
    for chain, shape in largest.items():
        draw_throughput(next(axes), at_point(document["throughput"], chain, shape))
    draw_host(next(axes), [record for record in document["host"] if record["chain"] == "six"])
    if document["compile"]:
        draw_compile(next(axes), document["compile"])
    for axis in axes:
        axis.axis("off")
    write_suptitle(figure, document["environment"])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write_suptitle(figure: Any, environment: dict[str, Any]) -> None:
    """Say where and when a picture was measured."""
    versions = environment["versions"]
    figure.suptitle(
        f"{environment['device']['name']}, torch {versions['torch']}, {environment['date'][:10]}", fontsize=13
    )


def draw_throughput(axis: Any, records: list[Record]) -> None:
    """Draw bars of GB/s, with the device's copy as a line."""
    copy, shown = records[0], [record for record in records[1:] if record["status"] == "ok"]
    notes = [
        short(record["gb_per_s"]) + ("" if record["ratio_to_eager"] is None else f"  ({record['ratio_to_eager']:.2f}x)")
        for record in shown
    ]
    draw_bars(axis, shown, [label(record) for record in shown], [record["gb_per_s"] for record in shown], notes)
    axis.axvline(copy["gb_per_s"], color=DARK, linestyle="--", linewidth=1)
    axis.set_title(f"{CHAINS[copy['chain']].title}, {shape_text(copy['shape'])}", fontsize=11, loc="left")
    axis.set_xlabel("GB/s, and speed relative to torch eager; dashed: device copy")
    axis.set_xlim(0, max([copy["gb_per_s"], *(record["gb_per_s"] for record in shown)]) * 1.25)


def draw_host(axis: Any, records: list[Record]) -> None:
    """Draw bars of microseconds, with one eager addition as a line."""
    add = records[0]
    shown = [record for record in records if record["status"] == "ok" and record["peer"] not in MARKS]
    values = [record["time_us"]["median"] for record in shown]
    draw_bars(axis, shown, [label(record) for record in shown], values, [short(value) for value in values])
    axis.axvline(add["time_us"]["median"], color=DARK, linestyle="--", linewidth=1)
    axis.set_title(f"host time of one call, six functors, {add['elements']} elements", fontsize=11, loc="left")
    axis.set_xlabel("microseconds, shorter is better; dashed: one torch.add")
    axis.set_xlim(0, max(values, default=1) * 1.15)


def draw_compile(axis: Any, records: list[Record]) -> None:
    """Draw two bars per peer on a logarithmic scale."""
    shown = [record for record in records if record["status"] == "ok"]
    for key, offset, colour, name in (
        ("first_ms", -0.2, GREY, "first kernel of a process"),
        ("second_ms", 0.2, BLUE, "second kernel"),
    ):
        values = [max(record[key], 0.01) for record in shown]
        bars = axis.barh([i + offset for i in range(len(shown))], values, height=0.38, color=colour, label=name)
        axis.bar_label(bars, [short(value) for value in values], fontsize=8, padding=2)
    axis.set_xscale("log")
    tidy(axis, [label(record) for record in shown])
    axis.set_title("compile time, empty caches", fontsize=11, loc="left")
    axis.set_xlabel("milliseconds, logarithmic; shorter is better")
    if shown:
        axis.set_xlim(right=max(record["first_ms"] for record in shown) * 6)
        axis.legend(fontsize=8, frameon=False, loc="upper right")


def short(value: float) -> str:
    """Return a number with three digits at least, and never with an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def draw_bars(axis: Any, records: list[Record], names: list[str], values: list[float], notes: list[str]) -> None:
    """Draw one bar per record, fuser's own in another colour."""
    colours = [ORANGE if record["peer"].startswith("fuser") else GREY for record in records]
    bars = axis.barh(range(len(records)), values, color=colours, height=0.7)
    # On white, or the line of the copy would cross them out.
    white = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    axis.bar_label(bars, notes, fontsize=9, padding=3, bbox=white, zorder=3)
    tidy(axis, names)


def tidy(axis: Any, names: list[str]) -> None:
    """Name the bars, the first on top, and take away what carries no information."""
    axis.set_yticks(range(len(names)), names, fontsize=9)
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
