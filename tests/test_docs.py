"""The documentation is true: its Python blocks run, and its tables say what the code says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from fuser import disk_cache
from fuser.config import SETTINGS, Setting
from fuser.ops import OPS, REDUCTIONS

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks_of(page: Path) -> list[str]:
    """Return the page's Python blocks, each below as many empty lines as put it on its line of the page."""
    text = page.read_text(encoding="utf-8")
    return ["\n" * text.count("\n", 0, found.start(1)) + found[1] for found in BLOCK.finditer(text)]


@pytest.mark.cpu
@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page)], ids=lambda page: page.name)
def test_python_blocks_run(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of the kernels in use, a page saves its own.
    monkeypatch.setattr(disk_cache, "_used", {})
    # One namespace for a page: a block goes on where the one before it stopped.
    namespace: dict[str, Any] = {"__name__": f"docs_{page.stem}"}
    torch.manual_seed(0)
    for source in blocks_of(page):
        exec(compile(source, str(page), "exec"), namespace)


def test_blocks_are_found() -> None:
    assert blocks_of(ROOT / "README.md")
    assert blocks_of(ROOT / "docs" / "architecture.md")


def test_every_op_is_listed() -> None:
    page = (ROOT / "docs" / "ops.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`(?:x\.)?(\w+)", page))
    # Forms of div, pow, gelu and x.to(dtype).
    forms = {"div_number", "pow_number", "gelu_tanh", "gelu_tanh_backward", "convert"}
    assert set(OPS) - listed == forms
    # Forms of max, min and norm, and a step of logsumexp.
    forms = {"max_dim", "min_dim", "amax_or_end"} | {name for name in REDUCTIONS if name.startswith("norm_")}
    assert set(REDUCTIONS) - listed == forms


def test_configuration_table_is_the_one_in_the_code(request: pytest.FixtureRequest) -> None:
    page = ROOT / "docs" / "configuration.md"
    head, _, rest = page.read_text(encoding="utf-8").partition("<!-- settings -->\n")
    table, _, tail = rest.partition("<!-- /settings -->\n")
    expected = settings_table()
    if request.config.getoption("--update-golden"):
        page.write_text(f"{head}<!-- settings -->\n{expected}<!-- /settings -->\n{tail}", encoding="utf-8")
        return
    assert table == expected, "run pytest --update-golden to write the table anew"


def test_the_picture_of_the_rooms_is_the_one_in_the_code(request: pytest.FixtureRequest) -> None:
    rooms = runpy.run_path(str(ROOT / "docs" / "rooms.py"))
    graph, purposes = rooms["read_imports"](rooms["PACKAGE"]), rooms["read_purposes"](rooms["PACKAGE"])
    assert all(purposes[room] for room in graph)
    drawn = rooms["draw"](graph, purposes)
    if request.config.getoption("--update-golden"):
        rooms["PICTURE"].write_text(drawn, encoding="utf-8")
    assert rooms["PICTURE"].read_text(encoding="utf-8") == drawn, "python docs/rooms.py draws it anew"


def test_every_room_has_a_row() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    listed = {name.strip("/") for row in rows for name in re.findall(r"`(\w+/?)`", row)}
    rooms = runpy.run_path(str(ROOT / "docs" / "rooms.py"))
    assert set(rooms["read_imports"](rooms["PACKAGE"])) <= listed


def settings_table() -> str:
    """Return ``fuser.config``'s table in Markdown."""
    rows = ["| setting | environment | default | changes code | meaning |", "| --- | --- | --- | --- | --- |"]
    for item in SETTINGS:
        changes = "yes" if item.changes_code else ""
        rows.append(f"| `{item.name}` | `{item.env}` | {default_text(item)} | {changes} | {item.meaning} |")
    return "\n".join(["", *rows, "", ""])


def default_text(item: Setting) -> str:
    """Return a default as a reader would set it."""
    if item.default in (None, frozenset()):
        return "unset"
    return f"`{int(item.default) if isinstance(item.default, bool) else item.default}`"
