"""Draws docs/plots/*.svg: bars of what result files under benchmarks/results hold.

``python docs/plots.py`` writes the pictures, and needs nothing to be installed; a test draws them again and compares.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
FOLDER = Path(__file__).parent / "plots"

WIDTH, LABEL, VALUE, BAR, GAP = 760, 230, 46, 13, 12
INK, PALE = "#0f172a", "#e2e8f0"
COLOURS = {
    "fuser": "#2563eb",
    "fuser, fast": "#93c5fd",
    "eager torch": "#94a3b8",
    "torch.compile": "#f59e0b",
    "jiterator": "#c084fc",
    "Triton": "#10b981",
    "cupy.fuse": "#f472b6",
}


@dataclass(frozen=True)
class Plot:
    """One picture: rows of bars."""

    title: str
    # Of each row its label, and a value for each contestant that has one.
    rows: tuple[tuple[str, Mapping[str, float]], ...]
    # What a value is written with.
    form: str = "{:.2f}"
    # A value at which a line stands, and what it is.
    mark: tuple[float, str] | None = None

    def draw(self) -> str:
        """Return the picture as SVG."""
        names = [name for name in COLOURS if any(name in values for _, values in self.rows)]
        most = max(value for _, values in self.rows for value in values.values())
        scale = (WIDTH - LABEL - VALUE) / max(most, self.mark[0] if self.mark else 0.0)
        parts, y = [], 66
        for label, values in self.rows:
            shown = [(name, values[name]) for name in names if name in values]
            middle, lines = y + BAR * len(shown) / 2 + 4, label.split("\n")
            for number, line in enumerate(lines):
                parts.append(_text(LABEL - 8, middle + 14 * (number - (len(lines) - 1) / 2), line, anchor="end"))
            for name, value in shown:
                width = value * scale
                parts.append(
                    f'<rect x="{LABEL}" y="{y}" width="{width:.1f}" height="{BAR - 2}" fill="{COLOURS[name]}">'
                    f"<title>{name}: {self.form.format(value)}</title></rect>"
                )
                parts.append(_text(LABEL + width + 4, y + BAR - 4, self.form.format(value), size=10))
                y += BAR
            y += GAP
        height = y + 8
        ruler = []
        if self.mark is not None:
            x = LABEL + self.mark[0] * scale
            ruler = [
                f'<line x1="{x:.1f}" y1="58" x2="{x:.1f}" y2="{y - GAP + 4}" stroke="{INK}" stroke-dasharray="3 3"/>',
                _text(x, 54, self.mark[1], anchor="middle", size=10),
            ]
        x, legend = 12.0, []
        for name in names:
            legend += [
                f'<rect x="{x:.0f}" y="30" width="10" height="10" fill="{COLOURS[name]}"/>',
                _text(x + 14, 39, name, size=11),
            ]
            x += 32 + 6.3 * len(name)
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
                f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
                _text(12, 20, self.title, size=14),
                *legend,
                *ruler,
                *parts,
                "</svg>",
                "",
            ]
        )


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "start") -> str:
    clean = text.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{INK}">{clean}</text>'


def read(name: str) -> Any:
    """Return what a result file holds."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _where(document: Any) -> str:
    known = document["environment"]
    return f"{known['device']['name']}, torch {known['versions']['torch'].split('+')[0]}, {known['date'][:10]}"


CHAINS = {
    "six": "six functors, float32",
    "six_bf16": "six functors, bfloat16",
    "two_c64": "x * y + x, complex64",
    "row": "x * row + row",
    "transpose": "x + y.t()",
    "channels": "channels_last + contiguous",
}
PEERS = {
    "fuser": "fuser",
    "fuser_fast": "fuser, fast",
    "eager": "eager torch",
    "inductor": "torch.compile",
    "jiterator": "jiterator",
    "triton": "Triton",
    "cupy_fuse": "cupy.fuse",
}


def plot_chains() -> Plot:
    """Return the speed of chains of functors on a GPU."""
    document = read("h200")
    rows = []
    for chain, label in CHAINS.items():
        found = [item for item in document["throughput"] if item["chain"] == chain and item["status"] == "ok"]
        values = {
            PEERS[item["peer"]]: item["bytes_moved"] / item["time_us"]["median"] / 1e3
            for item in found
            if item["peer"] in PEERS
        }
        rows.append((label, values))
    return Plot(f"GB/s: {_where(document)}", tuple(rows), "{:.0f}")


def plot_calls() -> Plot:
    """Return the host time of calls."""
    document = read("h200_calls")
    labels = {"add": "x + y", "six": "six functors, three inputs", "sum8": "the sum of eight"}
    rows = []
    for chain in dict.fromkeys(item["chain"] for item in document["host"]):
        found = [item for item in document["host"] if item["chain"] == chain and item["status"] == "ok"]
        values = {PEERS[item["peer"]]: item["time_us"]["median"] for item in found if item["peer"] in PEERS}
        values.pop("fuser, fast", None)
        rows.append((labels.get(chain, chain), values))
    return Plot(f"Microseconds of the host for one call: {_where(document)}", tuple(rows), "{:.1f}")


REDUCTION_PEERS = {
    "fuser": "fuser",
    "fuser fast": "fuser, fast",
    "eager": "eager torch",
    "inductor": "torch.compile",
    "triton": "Triton",
}


def _is_shown(case: str) -> bool:
    # One of each kind: the file has more.
    many = (
        "own",
        "softmax [2048",
        "softmax [16384",
        "softmax [4096",
        "layer_norm [16384",
        "softmax,",
        "sum, rows",
        "log",
    )
    return not case.startswith(many) or "backward" in case


def plot_reductions(is_backward: bool) -> Callable[[], Plot]:
    """Return what makes the plot of torch's reductions in one direction: parts of the speed of a copy."""

    def plot() -> Plot:
        document = read("reductions_h200")
        rows = []
        for item in document["records"]:
            if item["is_backward"] is not is_backward or not _is_shown(item["case"]):
                continue
            values = {
                REDUCTION_PEERS[peer]: found["ratio_to_copy"]
                for peer, found in item["peers"].items()
                if peer in REDUCTION_PEERS and "ratio_to_copy" in found
            }
            if values:
                rows.append((item["case"].replace(", backward", "").replace(" [", "\n["), values))
        what = "backward" if is_backward else "forward"
        title = f"Speed in parts of a copy's, {what}: {_where(document)}"
        return Plot(title, tuple(rows), mark=(1.0, "a copy of the same bytes"))

    return plot


SHAPES = (
    "softmax [64, 12, 197, 197]", "softmax [2048, 8, 49, 49]", "softmax of classes", "cross_entropy [4096, 50257]",
    "layer_norm [25088, 192]", "layer_norm, backward [12608, 768]", "batch_norm + relu [64, 256, 56, 56]",
    "batch_norm + relu, backward [64, 256, 56, 56]", "batch_norm + relu [64, 1024, 14, 14]",
    "group_norm + silu [8, 640", "sum of columns [8192, 50257]", "sum of the middle [300, 257", "argmax of classes",
)  # fmt: skip


def plot_shapes() -> Plot:
    """Return how many times as fast as eager torch some reductions of models' shapes are."""
    document, rows = read("shapes_h200"), []
    for item in document["records"]:
        if item["case"].startswith(SHAPES) and "bfloat16" in item["case"]:
            times = {REDUCTION_PEERS[peer]: found["gpu_us"] for peer, found in item["peers"].items()}
            values = {name: times["eager torch"] / time for name, time in times.items() if name != "eager torch"}
            rows.append((item["case"].replace(" bfloat16", "").replace(" [", "\n["), values))
    title = f"Times as fast as eager torch, bfloat16: {_where(document)}"
    return Plot(title, tuple(rows), "{:.1f}", (1.0, "eager torch"))


def plot_models() -> Plot:
    """Return the device's time of training steps of whole models."""
    document = read("models_h200")
    rows = []
    for model, records in document["records"].items():
        found = {
            REDUCTION_PEERS[peer]: records[peer]["gpu_ms"]
            for peer in records
            if "gpu_ms" in records[peer] and peer in REDUCTION_PEERS
        }
        if len(found) > 1:
            rows.append((model.removesuffix(" bfloat16"), found))
    return Plot(f"Milliseconds of the GPU for one training step, bfloat16: {_where(document)}", tuple(rows), "{:.1f}")


def plot_optimizers() -> Plot:
    """Return optimizer steps over all parameters of a model."""
    document = read("foreach_h200")
    rows: dict[str, dict[str, float]] = {}
    names = {"torch AdamW fused": "eager torch", "fuser AdamW": "fuser"}
    for item in document["steps"]:
        if item["optimizer"] in names:
            label = f"{item['model']}, {item['tensors']} tensors"
            rows.setdefault(label, {})[names[item["optimizer"]]] = item["us"] / 1e3
    title = f"Milliseconds of an AdamW step (torch: fused=True): {_where(document)}"
    return Plot(title, tuple(rows.items()))


PLOTS: Mapping[str, Callable[[], Plot]] = {
    "chains": plot_chains,
    "calls": plot_calls,
    "reductions": plot_reductions(False),
    "reductions_backward": plot_reductions(True),
    "shapes": plot_shapes,
    "optimizers": plot_optimizers,
    "models": plot_models,
}


def main(names: Sequence[str] = ()) -> None:
    """Write the pictures."""
    FOLDER.mkdir(exist_ok=True)
    for name in names or PLOTS:
        (FOLDER / f"{name}.svg").write_text(PLOTS[name]().draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
