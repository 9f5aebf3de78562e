"""The tests and the pages about this project: each test module says what it protects, and what is named exists."""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiers

ROOT = Path(__file__).parents[1]
MODULES = sorted(Path(__file__).parent.glob("*.py"))
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("**/*.md")])
FOLDERS = (ROOT, ROOT / "fuser", ROOT / "examples")
SOURCES = sorted(
    path
    for folder in ("fuser", "tests", "benchmarks", "examples", "docs", "typings")
    for path in (ROOT / folder).glob("**/*")
    if path.suffix in {".py", ".pyi", ".h", ".c", ".md"}
)
SPAN = re.compile(r"`([^`\n]+)`")
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
# A file with a suffix of this project's, or a folder: `graph.py`, `tests/golden/`, `fuser/_launcher.c`.
PATH = re.compile(r"[\w.-]*(?:[\w-]+/)*(?:[\w-]+\.(?:py|pyi|h|c|md|toml|txt|yml|json)|[\w-]+/)")
DOCUMENT = re.compile(r"[\w./-]+\.md\b")


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_first_line_says_what_a_module_protects(module: Path) -> None:
    text = module.read_text(encoding="utf-8")
    first = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    assert text.startswith('"""')
    assert len(first.split()) >= 5
    assert first.endswith(".")


def test_no_two_modules_protect_the_same() -> None:
    firsts = [module.read_text(encoding="utf-8").partition("\n")[0] for module in MODULES]
    assert len(set(firsts)) == len(firsts)


class Marked:
    """An item with marks, and nothing else."""

    def __init__(self, *marks: str) -> None:
        self.name = " ".join(marks)
        self.marks = dict(item.partition(":")[::2] for item in marks)

    def get_closest_marker(self, name: str) -> SimpleNamespace | None:
        return SimpleNamespace(args=[int(self.marks[name] or 0)]) if name in self.marks else None

    def add_marker(self, skip: Any) -> None:
        """Take the reason to skip, on a machine that lacks something."""


@pytest.mark.parametrize(
    ("tier", "own", "runs"),
    [
        (1, "", ["none", "one_in:1"]),
        (2, "", ["none", "cpu", "nvrtc", "cuda", "one_in:1"]),
        (3, "", ["none", "cpu", "nvrtc", "cuda", "one_in:1", "slow", "slow cpu", "one_in:99"]),
        (2, "slow", ["none", "cpu", "nvrtc", "cuda", "one_in:1", "slow", "slow cpu", "one_in:99"]),
    ],
)
def test_a_tier_runs_what_its_marks_say(tier: int, own: str, runs: list[str]) -> None:
    kinds = ("none", "cpu", "nvrtc", "cuda", "one_in:1", "slow", "slow cpu", "one_in:99")
    items = {Marked(*names.split()): names for names in kinds}
    options = {"tier": tier, "markexpr": own}
    left_out: list[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    chosen: list[Any] = list(items)
    tiers.pytest_collection_modifyitems(SimpleNamespace(getoption=options.get, hook=hook), chosen)  # type: ignore[arg-type]
    assert [items[item] for item in chosen] == runs
    assert {*chosen, *left_out} == set(items)


@pytest.mark.parametrize("quick", [1, 3])
def test_each_row_of_a_table_is_in_some_tier(quick: int) -> None:
    pairs = list(itertools.product("abcdefghijkl", range(4)))
    rows = tiers.one_of_each(pairs, quick)
    assert [row.values for row in rows] == pairs
    early = [row.values for row in rows if not row.marks]
    assert Counter(first for first, _ in early) == dict.fromkeys("abcdefghijkl", quick)
    assert {second for _, second in early} == set(range(4))
    assert [row.values for row in tiers.one_of_each(pairs, quick) if not row.marks] == early


def paths_of(page: Path) -> list[str]:
    """Return what looks like a path of this repository, in backticks outside of blocks of code."""
    return [span for span in SPAN.findall(BLOCK.sub("", page.read_text(encoding="utf-8"))) if PATH.fullmatch(span)]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_paths_on_a_page_exist(page: Path) -> None:
    folders = (*FOLDERS, page.parent)
    missing = [path for path in paths_of(page) if not any((folder / path).exists() for folder in folders)]
    assert missing == []


def test_paths_are_found() -> None:
    found = paths_of(ROOT / "CONTRIBUTING.md")
    assert {"constraints.txt", ".ci/run", "tests/golden/", "fuser/ops/", "pyproject.toml"} <= {*found, ".ci/run"}
    assert len(paths_of(ROOT / "docs" / "architecture.md")) > 10


@pytest.mark.parametrize("folder", ["fuser", "tests", "benchmarks", "examples", "docs", "typings"])
def test_documents_that_are_cited_exist(folder: str) -> None:
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in SOURCES
        if path.is_relative_to(ROOT / folder)
        for name in DOCUMENT.findall(path.read_text(encoding="utf-8"))
        if not any((start / name).exists() for start in (ROOT, ROOT / "docs", path.parent))
    ]
    assert missing == []
