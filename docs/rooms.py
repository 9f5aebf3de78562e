"""Draws docs/rooms.svg: the rooms of fuser, and which imports which, read from the sources.

``python docs/rooms.py`` writes the picture; a test draws it again and compares. Of the arrows, those are left out that
follow from others (a transitive reduction).
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

import networkx

PACKAGE = Path(__file__).parent.parent / "fuser"
PICTURE = Path(__file__).with_name("rooms.svg")
# What everybody imports, and what starts everything, would hide the rest.
LEFT_OUT = {
    "__init__", "__main__", "_later", "_version",
    "config", "counters", "errors", "late", "log", "plain_torch", "progress",
}  # fmt: skip
WIDTH, ROW, BOX, HEIGHT = 980, 62, 104, 26
# One for what belongs together, from what users call down to how their text is read.
COLOURS = {
    "#dbeafe": "interface debug over_lists fx jiterator jit_function reduction reduction_check own_derivatives",
    "#dcfce7": "autodiff route sharding flops",
    "#fef9c3": "library executor in_parts kept_plans launcher python_launcher record outputs planner expanded report "
    "boxes view_steps arg_spec tensor_desc tuning sections list_planner list_record",
    "#ffedd5": "compiler kernel_cache disk_cache dump file_lock fused_kernel cuda cpu list_text codegen geometry "
    "prelude",
    "#f3e8ff": "kernel_spec fallback eager_reduction linear torch_ops ops expansion graph application function "
    "combining dtypes layout access",
    "#fce7f3": "eager cxx",
}


def read_imports(package: Path) -> networkx.DiGraph[str]:
    """Return a graph with an edge from each room to each room it imports, functions' own imports included."""
    graph: networkx.DiGraph[str] = networkx.DiGraph()
    for path in sorted(package.rglob("*.py")):
        room = path.relative_to(package).with_suffix("").parts[0]
        graph.add_node(room)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == package.name:
                parts = node.module.split(".")[1:]
                for name in [parts[0]] if parts else [alias.name for alias in node.names]:
                    if name != room:
                        graph.add_edge(room, name)
    graph.remove_nodes_from(LEFT_OUT & set(graph))
    return graph


def place_rooms(graph: networkx.DiGraph[str]) -> dict[str, tuple[float, float]]:
    """Return the centre of each room: a room stands above all that it imports, near to what imports it."""
    rows = [sorted(row) for row in networkx.topological_generations(graph)]
    centres: dict[str, tuple[float, float]] = {}
    for depth, row in enumerate(rows):

        def pull(room: str) -> tuple[float, str]:
            above = [centres[other][0] for other in graph.predecessors(room) if other in centres]
            return (sum(above) / len(above) if above else WIDTH / 2), room

        for index, room in enumerate(sorted(row, key=pull)):
            centres[room] = WIDTH * (index + 1) / (len(row) + 1), ROW * (depth + 0.6)
    return centres


def draw(graph: networkx.DiGraph[str], purposes: Mapping[str, str]) -> str:
    """Return the picture as SVG. A room's tooltip says what it is for."""
    reduced = networkx.transitive_reduction(graph)
    centres = place_rooms(reduced)
    height = max(y for _, y in centres.values()) + ROW * 0.6
    colours = {room: colour for colour, rooms in COLOURS.items() for room in rooms.split()}
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>',
    ]
    for upper, lower in sorted(reduced.edges):
        (x1, y1), (x2, y2) = centres[upper], centres[lower]
        begin, end = y1 + HEIGHT / 2, y2 - HEIGHT / 2
        middle = (begin + end) / 2
        lines.append(
            f'<path d="M{x1:.0f},{begin:.0f} C{x1:.0f},{middle:.0f} {x2:.0f},{middle:.0f} {x2:.0f},{end:.0f}" '
            'fill="none" stroke="#94a3b8" stroke-width="1.2"/>'
        )
    for room, (x, y) in sorted(centres.items()):
        lines += [
            f"<g><title>{purposes[room]}</title>",
            f'<rect x="{x - BOX / 2:.0f}" y="{y - HEIGHT / 2:.0f}" width="{BOX}" height="{HEIGHT}" rx="6" '
            f'fill="{colours.get(room, "#f1f5f9")}" stroke="#475569"/>',
            f'<text x="{x:.0f}" y="{y + 4:.0f}" font-size="13" text-anchor="middle" fill="#0f172a">{room}</text></g>',
        ]
    return "\n".join([*lines, "</svg>", ""])


def read_purposes(package: Path) -> dict[str, str]:
    """Return the first line of each room's docstring, ready for XML."""
    found = {}
    for room in {path.relative_to(package).with_suffix("").parts[0] for path in package.rglob("*.py")}:
        home = package / room / "__init__.py"
        path = home if home.exists() else package / f"{room}.py"
        first = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]
        found[room] = first.replace("&", "&amp;").replace("<", "&lt;").replace("`", "")
    return found


if __name__ == "__main__":
    PICTURE.write_text(draw(read_imports(PACKAGE), read_purposes(PACKAGE)), encoding="utf-8")
