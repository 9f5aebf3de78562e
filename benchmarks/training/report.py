"""What is left of a run: a JSON document, a picture, and a table on the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.report import (
    BLUE,
    DARK,
    GREY,
    ORANGE,
    Document,
    Record,
    draw_bars,
    refusal_text,
    short,
    tidy,
    write_suptitle,
)
from benchmarks.training.chains import CHAINS
from benchmarks.training.contestants import CONTESTANTS, HOST_CONTESTANTS
from benchmarks.training.sampling import PASSES

SCHEMA = 1


def print_tables(document: Document) -> None:
    """Print the medians."""
    for chain, dtype in points(document["throughput"]):
        for name in PASSES:
            copy, *records = at_point(document["throughput"], chain, dtype, name)
            moved = f"{copy['bytes_moved'] / 1e6:.1f} MB moved"
            passes = {"forward": "forward", "backward": "backward", "both": "forward and backward"}[name]
            title = f"{CHAINS[chain].title}, {dtype}, {copy['elements']} elements, {passes}"
            print(f"\n{title}, {moved}, copy {copy['gb_per_s']:.1f} GB/s")
            for record in records:
                print(f"  {CONTESTANTS[record['peer']].label:<24} {throughput_text(record)}")
    for name, title in (("forward", "forward"), ("both", "forward and backward")):
        records = [record for record in document["host"] if record["pass"] == name]
        print(f"\nhost time of x * y, {title}, {records[0]['elements']} elements")
        for record in records:
            print(f"  {HOST_CONTESTANTS[record['peer']].label:<24} {host_text(record)}")


def throughput_text(record: Record) -> str:
    """Return one line of the throughput table."""
    if record["status"] != "ok":
        return refusal_text(record)
    marks = (("eager", "eager"), ("inductor", "torch.compile"), ("copy", "copy"))
    ratios = "".join(
        f"   {record[f'ratio_to_{key}']:6.2f} x {name}" for key, name in marks if record[f"ratio_to_{key}"] is not None
    )
    launches = f"   {record['launches']} launched" if "launches" in record else ""
    return (
        f"{record['time_us']['median']:12.1f} us   {record['gb_per_s']:9.1f} GB/s{ratios}"
        f"   error {record['error_eps']:.2g} eps{launches}"
    )


def host_text(record: Record) -> str:
    """Return one line of the host-time table."""
    if record["status"] != "ok":
        return refusal_text(record)
    ratio = "" if record["ratio_to_eager_mul"] is None else f"   {record['ratio_to_eager_mul']:6.2f} x torch.mul"
    return f"{record['time_us']['median']:10.2f} us{ratio}"


def points(records: Iterable[Record]) -> list[tuple[str, str]]:
    """Return the different pairs of chain and dtype, in order."""
    return list(dict.fromkeys((record["chain"], record["dtype"]) for record in records))


def at_point(records: Iterable[Record], chain: str, dtype: str, name: str) -> list[Record]:
    """Return the records of one chain, dtype and pass."""
    return [
        record for record in records if record["chain"] == chain and record["dtype"] == dtype and record["pass"] == name
    ]


def save_plot(document: Document, path: Path) -> None:
    """Draw one panel per chain and dtype, then host time."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    places = points(document["throughput"])
    rows = -(-(len(places) + 1) // 2)
    figure, grid = plt.subplots(rows, 2, figsize=(14, 0.6 + 2.9 * rows), layout="constrained", squeeze=False)
    figure.get_layout_engine().set(h_pad=0.12, w_pad=0.08)
    axes = iter(grid.flat)
    for chain, dtype in places:
        draw_throughput(next(axes), {name: at_point(document["throughput"], chain, dtype, name) for name in PASSES})
    draw_host(next(axes), [record for record in document["host"] if record["pass"] == "both"])
    for axis in axes:
        axis.axis("off")
    write_suptitle(figure, document["environment"])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_throughput(axis: Any, by_pass: dict[str, list[Record]]) -> None:
    """Draw two bars of GB/s per contestant, with the device's copy as lines."""
    fastest, names = 0.0, []
    for name, offset, colour, line in (("forward", -0.2, GREY, ":"), ("backward", 0.2, BLUE, "--")):
        copy, *records = by_pass[name]
        shown = [record for record in records if record["status"] == "ok"]
        values = [record["gb_per_s"] for record in shown]
        own = {GREY: "#eab08f", BLUE: ORANGE}[colour]
        colours = [own if record["peer"].startswith("fuser") else colour for record in shown]
        places = [i + offset for i in range(len(shown))]
        bars = axis.barh(places, values, height=0.38, color=colours)
        notes = [note_ratio(record) for record in shown]
        axis.bar_label(bars, notes, fontsize=8, padding=3, bbox=_ON_WHITE, zorder=3)
        axis.axvline(copy["gb_per_s"], color=DARK, linestyle=line, linewidth=1)
        fastest = max([fastest, copy["gb_per_s"], *values])
        names = [CONTESTANTS[record["peer"]].label for record in shown]
    tidy(axis, names)
    copy = by_pass["forward"][0]
    axis.set_title(f"{CHAINS[copy['chain']].title}, {copy['dtype']}, {copy['elements']} elements", **_TITLE)
    axis.set_xlabel("GB/s, relative to torch.compile; light: forward, dark: backward; lines: copy", fontsize=9)
    axis.set_xlim(0, fastest * 1.25)


def note_ratio(record: Record) -> str:
    """Return what stands beside a bar."""
    ratio = record["ratio_to_inductor"]
    return short(record["gb_per_s"]) + ("" if ratio is None else f"  ({ratio:.2f}x)")


def draw_host(axis: Any, records: list[Record]) -> None:
    """Draw bars of microseconds, with eager's product as a line."""
    mark, *others = records
    shown = [record for record in others if record["status"] == "ok"]
    values = [record["time_us"]["median"] for record in shown]
    notes = [f"{short(record['time_us']['median'])}  ({record['ratio_to_eager_mul']:.2f})" for record in shown]
    draw_bars(axis, shown, [HOST_CONTESTANTS[record["peer"]].label for record in shown], values, notes)
    axis.axvline(mark["time_us"]["median"], color=DARK, linestyle="--", linewidth=1)
    axis.set_title(f"host time of x * y, forward and backward, {mark['elements']} elements", **_TITLE)
    axis.set_xlabel("microseconds, shorter is better; dashed: torch.mul")
    axis.set_xlim(0, max([mark["time_us"]["median"], *values]) * 1.25)


_ON_WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 1}
_TITLE: dict[str, Any] = {"fontsize": 11, "loc": "left"}
