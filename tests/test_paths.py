"""A functor gives every result on every path, or says where it does not; no text with a meaning in C++ is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from eager_cases import CONSTRUCTS
from functors import CASES
from test_functor import FORMS

import fuser
from fuser.cxx.functor import parse_functor
from fuser.cxx.paths import check_functor
from fuser.errors import FunctorError
from fuser.ops import OPS

# Bodies of ``T f(T x)`` that end without a return, and the statement after which they do.
NO_RETURN = [
    ("", "{"),
    ("x;", "x;"),
    ("if (x > 0) return x;", "if"),
    ("if (x > 0) { return x; } else { x = 1; }", "if"),
    ("if (x > 0) return x; else if (x < 0) return -x;", "if"),
    ("for (int i = 0; i < 3; ++i) { if (x > i) return x; }", "for"),
    ("while (true) { if (x > 0) break; x += 1; }", "while"),
    ("do { x += 1; } while (x < 0);", "do"),
    ("switch (int(x)) { case 0: return x; default: x = 1; }", "switch"),
    ("switch (int(x)) { case 0: break; default: return x; }", "switch"),
    ("switch (int(x)) { default: return x; case 1: x = 2; }", "switch"),
    ("auto g = [](T v) { return v; }; g(x);", "g(x)"),
    ("{ if (x > 0) { return x; } }", "{ if"),
    ("bool c = x > 0; if (c) return x; if (c) return -x;", "if (c) return -x"),
    ("bool c = x > 0, d = x > 1; if (c && d) return x; if (!c && d) return -x;", "if (!c"),
    ("do { if (x > 1) break; return x; } while (true);", "do"),
]
# Bodies of ``T f(T x)`` that always return, and what only types or the compiler decide.
RETURN = [
    "if (x > 0) return x; return -x;",
    "if (x > 0) return x; else return -x;",
    "if (x > 0) { return x; } else if (x < 0) { return -x; } else { return 0; }",
    "while (true) { if (x > 0) return x; x += 1; }",
    "for (;;) { switch (int(x)) { case 0: break; default: return x; } x += 1; }",
    "do { return x; } while (x > 0);",
    "do { x += 1; if (x > 3) return x; continue; } while (1);",
    "for (int i = 0; i < 3; ++i) { return x; }",
    "switch (int(x)) { case 0: return x; case 1: x = 2; default: return x; }",
    "switch (int(x) & 1) { case 0: return x; case 1: return -x; }",
    "switch (int(x)) { case 0: while (x > 0) { break; } default: return x; }",
    "if constexpr (sizeof(T) == 4) return x; else if constexpr (sizeof(T) == 8) return -x;",
    "if (sizeof(T) == 4) { return x; } else { x = -x; } return x;",
    "if (x > 0) return x; __trap();",
    "if (x > 0) goto end; x = 1; end: return x;",
    "return x; x = 1;",
    "if (x > 0) break; return x;",
    "if (x > 0) return x; if (!(x > 0)) return -x;",
    "bool c = x > 0; if (!c) { return -x; } x += 1; if (c) { return x; }",
    "bool c = x > 0; if (c) return x; if (not c) return -x;",
    "while (true) { for (;;) { break; } if (x > 3) return x; x += 1; }",
    "auto g = [](T v) { if (v > 0) return v; return -v; }; return g(x);",
    "if (x > 0) { return x; } else { for (;;) { if (x > 0) return x; x += 1; } }",
    "switch (int(x)) { default: { if (x > 0) return x; else return -x; } }",
]
# Bodies of ``void f(T x, T& a, T& b)``, the outputs they miss, and where.
MISSING = [
    ("", "'a', 'b'", "{"),
    ("a = x;", "'b'", "a ="),
    ("a = x; if (x > 0) b = x;", "'b'", "if"),
    ("a = x; if (x > 0) { b = x; } else { x = 1; }", "'b'", "if"),
    ("a = x; if (x > 0) return; b = x;", "'b'", "return"),
    ("if (x > 0) { a = x; b = x; } else { a = 1; }", "'b'", "if"),
    ("a = x; switch (int(x)) { case 0: b = x; break; default: x = 1; }", "'b'", "switch"),
    ("a = x; switch (int(x)) { case 0: x = 2; case 1: b = x; break; case 2: break; }", "'b'", "switch"),
    ("a = x; while (true) { if (x > 0) break; x += 1; }", "'b'", "while"),
    ("T v = x; a = v; { T c = v; }", "'b'", "{ T c"),
]
ASSIGNED = [
    "a = b = x;",
    "b = x; if (x > 0) { a = x; } else { a = 1; }",
    "b = x; if (x > 0) { a = x; return; } a = 1;",
    "for (int i = 0; i < 3; ++i) { a = i; b = x; }",
    "while (true) { a = x; if (x > 0) { b = x; break; } }",
    "for (int i = 0; i < 3; ++i) { if (i == 1) continue; a = i; b = x; }",
    "b = x; switch (int(x) & 1) { case 0: a = x; break; case 1: a = 2; }",
    "set(x, a); T& r = b; r = x;",
    "auto g = [&](T v) { a = v; b = v; }; g(x);",
    "if (sizeof(T) == 4) a = x; else a = -x; if constexpr (sizeof(T) == 4) { b = x; }",
    "(x > 0 ? a : b) = x; ++a; b += x;",
    "bool c = x > 0; b = 1; if (c) a = x; if (!c) a = -x;",
    "bool c = x > 0; if (c) a = 1; if (c) x = a + 1; if (!c) a = 2; b = a;",
    "T* p = &a; *p = x; b = a + 1;",
    "auto put = [&a](T v) { a = v; }; put(x); b = -a;",
    "for (int i = 0; i < 3; ++i) { if (i > 0) b = a + 1; a = x; } b = 1;",
    "a = b = 0; for (int i = 0; i < 3; ++i) { a += x; b += a; }",
    "b = (a = x) + a;",
    "(a = x) > 0 ? b = 1 : b = 2;",
    "b = a = x; a += b; T t[2] = {a, b};",
    "while (true) { a = x; b = x; break; }",
    "__trap();",
]
# The same, and the first place that reads an output without a value.
READ = [
    ("a = x; b = a + b;", "b;"),
    ("a += x; b = 1;", "a +="),
    ("++a; b = 1;", "a; b"),
    ("b = a; a = 1;", "a; a"),
    ("T c = a; a = c; b = 1;", "a; a"),
    ("a = a + 1; b = 1;", "a + 1"),
    ("a = 1; if (x > 0) b += 1; else b = 2;", "b += 1"),
    ("b = 1; if (a) a = 1; else a = 2;", "a) a"),
    ("b = 1; for (int i = 0; i < 3; ++i) x += a; a = x;", "a; a = x"),
    ("a = 1; return b + 1;", "b + 1"),
]
HELPER = "template <typename T> void set(T x, T& a) { a = x; }\n"


def of(body: str) -> str:
    """Return the text of a functor with one result."""
    return f"template <typename T>\nT f(T x) {{\n  {body} }}"


def of_two(body: str) -> str:
    """Return the text of a functor with two outputs."""
    return f"{HELPER}template <typename T>\nvoid f(T x, T& a, T& b) {{\n  {body} }}"


def place_of(text: str, start: str) -> tuple[int, int]:
    """Return line and column where something begins in the last function of a text."""
    head, body = text.rsplit(" {\n  ", 1) if start != "{" else (text[: text.rindex(" {\n")], "")
    offset = len(head) + 1 if start == "{" else len(head) + 5 + body.index(start)
    line = text[:offset].count("\n") + 1
    return line, offset - text[:offset].rfind("\n")


@pytest.mark.parametrize(("body", "start"), NO_RETURN)
def test_a_path_without_return_is_refused(body: str, start: str) -> None:
    text = of(body)
    fn = fuser.create_jit_fn(text)
    for use in (fn.check, lambda: fn(torch.ones(2))):
        with pytest.raises(FunctorError, match="'f' returns nothing on a path that ends after this") as caught:
            use()
        assert (caught.value.line, caught.value.column) == place_of(text, start)


@pytest.mark.parametrize("body", RETURN)
def test_every_path_returns(body: str) -> None:
    check_functor(parse_functor(of(body)))


@pytest.mark.parametrize(("body", "names", "start"), MISSING)
def test_an_output_without_a_value_is_refused(body: str, names: str, start: str) -> None:
    text = of_two(body)
    fn = fuser.create_multi_output_jit_fn(text, 2)
    with pytest.raises(FunctorError, match=f"nothing was assigned to {names} on a path that ends here") as caught:
        fn(torch.ones(2))
    assert (caught.value.line, caught.value.column) == place_of(text, start)


@pytest.mark.parametrize("body", ASSIGNED)
def test_every_output_has_a_value(body: str) -> None:
    check_functor(parse_functor(of_two(body), (), 2))


@pytest.mark.parametrize(("body", "start"), READ)
def test_an_output_that_is_read_before_it_has_a_value_is_refused(body: str, start: str) -> None:
    text = of_two(body)
    with pytest.raises(FunctorError, match=f"'{start[0]}' is read before anything was assigned to it") as caught:
        check_functor(parse_functor(text, (), 2))
    assert (caught.value.line, caught.value.column) == place_of(text, start)


def test_helpers_are_checked_too() -> None:
    with pytest.raises(FunctorError, match="'help' returns nothing") as caught:
        fuser.create_jit_fn(f"int help(int n) {{\n if (n) return 1; }}\n{of('return help(1);')}").check()
    assert (caught.value.line, caught.value.column) == (2, 2)


@pytest.mark.cpu
def test_a_value_on_some_paths_only() -> None:
    # Nobody uses what an entry with outputs returns.
    for end in ("", "#define END }\n"):
        text = f"{end}template <typename T> T f(T x, T& a) {{ a = x; if (x > 0) return a; {'END' if end else '}'}"
        fn = fuser.create_jit_fn(text)
        assert fn(torch.tensor([-1.0, 2.0])).tolist() == [-1, 2]
        assert "if (x > 0) return a; " in fn.function.functor.text
    with pytest.raises(FunctorError, match="'f' returns nothing"):
        check_functor(parse_functor("template <typename T> auto f(T x, T& a) { a = x; if (x > 0) return a; }"))
    # What never returns a value, returns nothing on purpose.
    check_functor(parse_functor("template <typename T> T f(T x, T& a) { a = x; if (x > 0) return; }"))
    check_functor(parse_functor("template <typename T> auto f(T x, T& a) { a = x; }"))


def test_no_text_of_the_tables_is_refused() -> None:
    for case in (*CASES, *CONSTRUCTS):
        check_functor(parse_functor(case.code, tuple(case.scalars), case.outputs))
    for form in FORMS:
        check_functor(parse_functor(form.code, tuple(form.scalars), form.num_outputs))


def test_no_functor_of_torchs_ops_is_refused() -> None:
    for op in OPS.values():
        check_functor(op.function.functor)


@pytest.mark.parametrize("module", ["cuda/jiterator.py", "testing/_internal/common_methods_invocations.py"])
def test_no_text_of_torch_itself_is_refused(module: str) -> None:
    source = (Path(torch.__file__).parent / module).read_text(encoding="utf-8")
    texts = re.findall(r'"(template <typename [^"]*)"', source)
    assert texts
    for text in texts:
        outputs = text.partition("{")[0].count("&")
        check_functor(parse_functor(text, (), max(outputs, 1)))
