"""The tests and the pages about this project: each test module says what it protects, and what is named exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

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
    assert len(paths_of(ROOT / "docs" / "architecture.md")) > 20


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
