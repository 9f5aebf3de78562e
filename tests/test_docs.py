"""The documentation is true: its Python blocks run, and its tables say what the code says."""

from __future__ import annotations

import json
import math
import re
import runpy
import statistics
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import fuser
from fuser import disk_cache
from fuser.config import SETTINGS, Setting
from fuser.ops import OPS, REDUCTIONS
from fuser.prelude import offered_names

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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_says_a_section_twice(page: Path) -> None:
    # A merge that keeps both sides of a section leaves the older one standing below the newer one.
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^#+ .*$", text, re.MULTILINE)
    assert len(heads) == len(set(heads))


def test_every_op_is_listed() -> None:
    page = (ROOT / "docs" / "ops.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`(?:x\.)?(\w+)", page))
    # Forms of div, pow, gelu and x.to(dtype).
    forms = {"div_number", "pow_number", "gelu_tanh", "gelu_tanh_backward", "convert"}
    assert set(OPS) - listed == forms
    # Forms of max, min, sum, mean, var, std and norm.
    forms = {"max_dim", "min_dim", "sum_wide", "mean_wide", "var_wide", "std_wide"} | {
        name for name in REDUCTIONS if name.startswith("norm_") or name.endswith("_in_double")
    }
    assert set(REDUCTIONS) - listed == forms


@pytest.mark.parametrize("mark", ["settings", "names", "throughput", "calls"])
def test_what_is_generated_on_a_page_is_what_the_code_says(mark: str, request: pytest.FixtureRequest) -> None:
    name, generate = GENERATED[mark]
    page = ROOT / "docs" / name
    head, _, rest = page.read_text(encoding="utf-8").partition(f"<!-- {mark} -->\n")
    inside, _, tail = rest.partition(f"<!-- /{mark} -->\n")
    expected = f"\n{generate()}\n\n"
    if request.config.getoption("--update-golden"):
        page.write_text(f"{head}<!-- {mark} -->\n{expected}<!-- /{mark} -->\n{tail}", encoding="utf-8")
        return
    assert inside == expected, "run pytest --update-golden to write it anew"


def test_the_api_page_is_the_one_in_the_code(request: pytest.FixtureRequest) -> None:
    api = runpy.run_path(str(ROOT / "docs" / "api.py"))
    text = api["write_page"]()
    assert {f"### {name}\n" for name in set(fuser.__all__) - api["ELSEWHERE"]} <= set(text.splitlines(keepends=True))
    if request.config.getoption("--update-golden"):
        api["PAGE"].write_text(text, encoding="utf-8")
    assert api["PAGE"].read_text(encoding="utf-8") == text, "python docs/api.py writes it anew"


def test_every_page_is_in_the_menu() -> None:
    menu = re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(menu) == sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").glob("**/*.md"))


def test_the_picture_of_the_rooms_is_the_one_in_the_code(request: pytest.FixtureRequest) -> None:
    rooms = runpy.run_path(str(ROOT / "docs" / "rooms.py"))
    graph, purposes = rooms["read_imports"](rooms["PACKAGE"]), rooms["read_purposes"](rooms["PACKAGE"])
    assert all(purposes[room] for room in graph)
    drawn = rooms["draw"](graph, purposes)
    if request.config.getoption("--update-golden"):
        rooms["PICTURE"].write_text(drawn, encoding="utf-8")
    assert rooms["PICTURE"].read_text(encoding="utf-8") == drawn, "python docs/rooms.py draws it anew"


def test_the_plots_show_what_result_files_hold(request: pytest.FixtureRequest) -> None:
    plots = runpy.run_path(str(ROOT / "docs" / "plots.py"))
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for name, make in plots["PLOTS"].items():
        drawn, picture = make().draw(), plots["FOLDER"] / f"{name}.svg"
        if request.config.getoption("--update-golden"):
            picture.write_text(drawn, encoding="utf-8")
        assert picture.read_text(encoding="utf-8") == drawn, "python docs/plots.py draws it anew"
        assert f"(plots/{name}.svg)" in page
        root = ElementTree.fromstring(drawn)
        assert len(root.findall(".//{*}rect/{*}title")) > 1


def test_figures_of_whole_models_are_those_of_the_run() -> None:
    # A new run is written into more than one page.
    results = ROOT / "benchmarks" / "results"
    models = json.loads((results / "models_h200.json").read_text(encoding="utf-8"))["records"]
    before = json.loads((results / "models_first_h200.json").read_text(encoding="utf-8"))["records"]

    def mean(one: str, other: str) -> str:
        both = [model for model in models.values() if one in model and other in model]
        return f"{statistics.geometric_mean(model[one]['gpu_ms'] / model[other]['gpu_ms'] for model in both):.2f}"

    def words(name: str) -> str:
        return " ".join((ROOT / name).read_text(encoding="utf-8").split())

    eager, peer, fast = mean("fuser", "eager"), mean("fuser", "inductor"), mean("fuser fast", "inductor")
    gpt2 = models["gpt2 bfloat16"]["fuser"]["gpu_ms"] / before["gpt2 bfloat16"]["inductor"]["gpu_ms"]
    readme, choosing, page = words("README.md"), words("docs/choosing.md"), words("docs/benchmarks.md")
    assert f"{eager} of its GPU time on an H200, {peer} of `torch.compile`'s; without the bits, {fast}" in readme
    assert f"the GPU's time is {eager} of eager torch's" in choosing
    assert f"it is {peer} and {fast} of Inductor's in the geometric mean" in choosing
    assert f"gpt2 strict is {gpt2:.2f} of what Inductor took" in choosing
    assert f"(gpt2, {gpt2:.2f})" in choosing
    assert f"strict, and {mean('fuser fast', 'eager')} in fast numerics; {peer} and {fast} of" in page


def test_every_room_has_a_row() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    listed = {name.strip("/") for row in rows for name in re.findall(r"`(\w+/?)`", row)}
    rooms = runpy.run_path(str(ROOT / "docs" / "rooms.py"))
    assert set(rooms["read_imports"](rooms["PACKAGE"])) <= listed


def to_table(rows: list[list[str]]) -> str:
    """Return rows, the first of which are the heads, as a table in Markdown."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "| " + " | ".join("---" for _ in rows[0]) + " |", *lines[1:]])


def settings_table() -> str:
    """Return ``fuser.config``'s table."""
    # Few columns: what a setting means has to have room on a phone.
    rows = [["setting, environment", "default", "meaning"]]
    for item in SETTINGS:
        changes = " *Changes code.*" if item.changes_code else ""
        rows.append([f"`{item.name}`<br>`{item.env}`", default_text(item), f"{item.meaning}{changes}"])
    return to_table(rows)


def default_text(item: Setting) -> str:
    """Return a default as a reader would set it."""
    if item.default in (None, frozenset()):
        return "unset"
    return f"`{int(item.default) if isinstance(item.default, bool) else item.default}`"


def names_text() -> str:
    """Return the names that functors may use, without forms for float of names that have another."""
    offered = offered_names() - {"numeric_limits"}
    names = sorted(name for name in offered if not (name.endswith("f") and name[:-1] in offered))
    constants = ", ".join(f"`{name}`" for name in names if name.isupper())
    functions = ", ".join(f"`{name}`" for name in names if not (name.isupper() or name.startswith("__")))
    intrinsics = ", ".join(f"`{name}`" for name in names if name.startswith("__"))
    return (
        f"{functions}.\n\nOf CUDA's intrinsics these have a counterpart on the CPU: {intrinsics}.\n\n"
        f"Constants of C's headers: {constants}."
    )


def read_results(name: str) -> dict[str, Any]:
    """Return what a run of the benchmarks wrote."""
    results: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8"))
    return results


def throughput_table() -> str:
    """Return GB/s of fuser and its peers on an H200."""
    rows = [["", *PEERS.values(), "copy"]]
    records = read_results("h200_again.json")["throughput"]
    speeds = {
        (item["chain"], item["peer"]): f"{item['gb_per_s']:.0f}"
        for item in records
        if item["status"] == "ok" and math.prod(item["shape"]) == 1 << 26
    }
    for chain, title in CHAINS.items():
        rows.append([title, *(speeds.get((chain, peer), "-") for peer in (*PEERS, "copy"))])
    return to_table(rows)


def calls_table() -> str:
    """Return host and compile times of fuser and its peers on an H200."""
    results = read_results("h200_calls.json")
    host = {(item["chain"], item["peer"]): f"{item['time_us']['median']:.1f}" for item in results["host"]}
    compiles = {item["peer"]: item for item in results["compile"]}
    rows = [["", "torch.add", *PEERS.values()]]
    for chain, title in (("add", "one call of x + y, us"), ("six", "one call of six functors, us")):
        rows.append([title, *(host[chain, peer] for peer in ("eager_add", *PEERS))])
    for key, title in (("first_ms", "first kernel"), ("second_ms", "second kernel")):
        for prefix, where in (("", "empty caches"), ("cached_", "from disk")):
            times = [f"{compiles[peer][prefix + key]:.1f}" if peer != "eager" else "-" for peer in PEERS]
            rows.append([f"{title}, {where}, ms", "-", *times])
    return to_table(rows)


PEERS = {
    "eager": "eager",
    "fuser": "fuser",
    "fuser_fast": "fuser, fast",
    "jiterator": "jiterator",
    "inductor": "Inductor",
    "triton": "Triton",
    "cupy_fuse": "cupy.fuse",
}
CHAINS = {
    "six": "six functors, float32",
    "six_bf16": "six functors, bfloat16",
    "two_f8": "x * y + x, float8_e4m3fn",
    "two_c64": "x * y + x, complex64",
    "row": "x * row + row, float32",
    "six_row": "six functors, two of three inputs a row",
    "transpose": "x + y.t(), float32",
    "channels": "channels_last + contiguous, float32",
}
# Mark -> page, and what stands between the mark and its end.
GENERATED = {
    "settings": ("configuration.md", settings_table),
    "names": ("cxx.md", names_text),
    "throughput": ("choosing.md", throughput_table),
    "calls": ("choosing.md", calls_table),
}
