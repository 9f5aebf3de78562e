"""One word per idea, one idea per word: names in the package say what they are everywhere else. Pure text."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fuser
from fuser.config import SETTINGS, Values

PACKAGE = Path(fuser.__file__).parent
MODULES = {
    str(path.relative_to(PACKAGE)): ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")
}
HELD = sorted(MODULES)

# A place is where something stands in a user's text: line and column, from 1.
PLACE = {"Place", "Place | None", "tuple[int, int]", "tuple[int, int] | None"}
PLACES = {f"{many}[{one}]" for many in ("Sequence", "Iterable", "list") for one in PLACE} | {
    f"tuple[{one}, ...]" for one in PLACE
}
WORDS = {"place": PLACE, "places": PLACES}


def names_of(target: ast.AST) -> set[str]:
    """Return the names that an assignment to a target binds."""
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}


def find_annotations(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Yield line, name and annotation of every parameter, field and annotated variable."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.lineno, node.target.id, ast.unparse(node.annotation)
        elif isinstance(node, ast.FunctionDef):
            for item in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                yield item.lineno, item.arg, ast.unparse(item.annotation) if item.annotation else "nothing"


def find_indexes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of every variable that is counted with, or that picks an item by its number."""
    for node in ast.walk(tree):
        found: set[str] = set()
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Name):
            found = names_of(node.slice)
        elif isinstance(node, ast.BinOp):
            found = {side.id for side in (node.left, node.right) if isinstance(side, ast.Name)}
        elif isinstance(node, ast.AugAssign):
            found = names_of(node.target)
        elif isinstance(node, ast.For | ast.comprehension) and isinstance(node.iter, ast.Call):
            called = ast.unparse(node.iter.func)
            first = node.target.elts[0] if isinstance(node.target, ast.Tuple) else node.target
            found = names_of(first) if called in {"range", "enumerate"} else set()
        for name in found:
            yield getattr(node, "lineno", 0) or getattr(node.iter, "lineno", 0), name


@pytest.mark.parametrize("module", HELD)
def test_a_place_is_a_line_and_a_column(module: str) -> None:
    tree = MODULES[module]
    wrong = [
        f"{module}:{line}: {name} is {annotation}"
        for line, name, annotation in find_annotations(tree)
        if name in WORDS and annotation not in WORDS[name]
    ]
    wrong += [f"{module}:{line}: {name} is an index" for line, name in find_indexes(tree) if name in WORDS]
    assert wrong == []


@pytest.mark.parametrize("module", HELD)
def test_what_emits_returns_text(module: str) -> None:
    functions = [node for node in ast.walk(MODULES[module]) if isinstance(node, ast.FunctionDef)]
    emitters = [node for node in functions if node.name.lstrip("_").startswith("emit_")]
    assert [node.name for node in emitters if node.returns is None or ast.unparse(node.returns) != "str"] == []


def test_no_two_classes_have_one_name() -> None:
    homes = defaultdict(list)
    for module in HELD:
        for node in ast.walk(MODULES[module]):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(module)
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


@pytest.mark.parametrize(
    ("text", "indexes"),
    [
        ("items[place]", 1),
        ("place + 1", 1),
        ("for place, item in enumerate(items): pass", 1),
        ("[place for place in range(3)]", 1),
        ("place += 1", 1),
        ("for place in found: error(*place)", 0),
        ("places[node] = node.place", 0),
        ("def f(place: Place) -> None: show(text, place)", 0),
    ],
)
def test_indexes_are_seen(text: str, indexes: int) -> None:
    assert [name for _, name in find_indexes(ast.parse(text)) if name in WORDS] == ["place"] * indexes


def test_type_checkers_see_the_settings_of_the_table() -> None:
    assert list(Values.__annotations__) == [setting.name for setting in SETTINGS]


def test_dir_shows_what_is_for_users() -> None:
    add = fuser.create_jit_fn("template <typename T> T add(T x, T y) { return x + y; }")
    fused = fuser.fuse(lambda x: add(x, x))
    total = fuser.create_reduction_fn("template <typename T> T add(T x, T y) { return x + y; }", identity=0)
    builder = fuser.GroupBuilder()
    group = builder.build(builder.apply(add.function, [builder.add_input("x")] * 2))
    for item in (fuser, fuser.fx, fuser.errors, fuser.config, add, fused, total, builder, group):
        shown = [name for name in dir(item) if not name.startswith("__")]
        assert shown
        assert not [name for name in shown if name.startswith("_")]
        assert all(hasattr(item, name) for name in shown if (item, name) != (fused, "graph_module"))
    assert set(fuser.__all__) == set(dir(fuser))
    assert set(fuser.fx.__all__) == set(dir(fuser.fx))
    assert "Any" not in dir(fuser.errors)
    assert "numerics" in dir(fuser.config)
    assert "launch" not in dir(add)
    assert "add" not in dir(fused)
    assert "widen" not in dir(group)
    assert add.source == "template <typename T> T add(T x, T y) { return x + y; }"


def test_an_explanation_shows_itself_without_texts_of_kernels() -> None:
    add = fuser.create_jit_fn("template <typename T> T add(T x, T y) { return x + y; }")
    for explained in (fuser.explain(add), fuser.explain(add, torch.ones(3), torch.ones(3))):
        assert repr(explained) == str(explained)
        assert len(repr(explained.groups[0])) < 100


def test_a_group_has_a_short_form() -> None:
    add = fuser.create_jit_fn("template <typename T> T add(T x, T y) { return x + y; }")
    for count, shown in ((1, "add"), (5, "add -> add -> add -> add -> add"), (9, "add -> add -> add -> 5 more -> add")):
        builder = fuser.GroupBuilder()
        value = builder.add_input("x")
        for _ in range(count):
            (value,) = builder.apply(add.function, [value, value])
        assert repr(builder.build([value])) == f"<fuser.FusionGroup {shown}, 1 inputs, 1 outputs>"


def test_what_a_group_is_made_of_shows_no_texts() -> None:
    axpy = fuser.create_jit_fn("template <typename T> T axpy(T x, T y, T alpha) { return alpha * x + y; }", alpha=1.0)
    builder = fuser.GroupBuilder()
    x, alpha = builder.add_input("x"), builder.add_input("alpha", is_scalar=True)
    group = builder.build(builder.apply(axpy.function, [x, x], [alpha]))
    assert repr(builder) == "<fuser.GroupBuilder 2 inputs, 1 applications>"
    assert repr(group.applications) == "(<fuser.Application axpy(v0, v0, alpha=v1)>,)"
    assert repr(axpy.function) == "<fuser.Function axpy(x, y, *, alpha)>"
    assert repr(axpy.function.functor) == "<fuser.cxx.Functor axpy(x, y, *, alpha)>"
