"""A graph as a picture: boxes in layers, lines down to what reads them, as SVG text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Box", "draw_graph"]

WIDTH, HEIGHT, GAP = 190, 34, 26


@dataclass(frozen=True, slots=True)
class Box:
    """One box."""

    name: str
    # One short text or two, and what a reader sees who points at it.
    texts: tuple[str, ...]
    title: str
    colour: str
    # Names of the boxes that it reads, all of them earlier ones.
    sources: tuple[str, ...]


def draw_graph(boxes: Sequence[Box], title: str) -> str:
    """Return SVG of boxes, each below all that it reads."""
    layers: list[list[Box]] = []
    depth: dict[str, int] = {}
    for box in boxes:
        depth[box.name] = 1 + max((depth[name] for name in box.sources), default=-1)
        if depth[box.name] == len(layers):
            layers.append([])
        layers[depth[box.name]].append(box)
    corners: dict[str, tuple[float, float]] = {}
    widest = max(map(len, layers), default=1)
    for number, layer in enumerate(layers):
        # Below the middle of what they read.
        ordered = sorted(layer, key=lambda box: _middle(box, corners))
        left = (widest - len(ordered)) / 2
        for slot, box in enumerate(ordered):
            corners[box.name] = ((left + slot) * (WIDTH + GAP) + GAP, number * (HEIGHT + GAP) + 2 * GAP)
    width, height = widest * (WIDTH + GAP) + GAP, len(layers) * (HEIGHT + GAP) + 3 * GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<text x="{GAP}" y="{GAP}" font-size="14">{escape(title)}</text>',
        *(_draw_curve(corners[name], corners[box.name]) for box in boxes for name in box.sources),
        *(_draw_box(box, *corners[box.name]) for box in boxes),
        "</svg>",
    ]
    return "\n".join(parts)


def _middle(box: Box, corners: Mapping[str, tuple[float, float]]) -> float:
    found = [corners[name][0] for name in box.sources]
    return sum(found) / len(found) if found else 0.0


def _draw_curve(source: tuple[float, float], target: tuple[float, float]) -> str:
    x, y, u, v = source[0] + WIDTH / 2, source[1] + HEIGHT, target[0] + WIDTH / 2, target[1]
    return f'<path d="M{x} {y}C{x} {y + GAP} {u} {v - GAP} {u} {v}" fill="none" stroke="#999"/>'


def _draw_box(box: Box, x: float, y: float) -> str:
    shape = f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="4" fill="{box.colour}" stroke="#666"/>'
    texts = "".join(
        f'<text x="{x + 6}" y="{y + 14 + 13 * number}">{escape(text[:32])}</text>'
        for number, text in enumerate(box.texts[:2])
    )
    return f"<g><title>{escape(box.title)}</title>{shape}{texts}</g>"
