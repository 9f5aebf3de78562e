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
from fuser.cxx.functor import Functor, parse_functor
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
    ("for (int i = 0; i < 3; ++i) { if (x > 0) return x; }", "for"),
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
# Bodies behind ``TOOLS`` that C++ gives a meaning, of ``T f(T x, T y, int n)`` and ``void f(T x, T y, T& a, T& b)``.
# For some of them compilers warn.
DEFINED = [
    "constexpr bool wide = sizeof(T) == 8; if constexpr (wide) return x; else if constexpr (sizeof(T) <= 4) return y;",
    "constexpr bool wide = sizeof(T) == 8, small = !wide; if constexpr (wide) return x; if (small) return y;",
    "if (sizeof(x) == 4) return x; else if (sizeof(x) == 8) return y;",
    "const int k = sizeof(T); if (k == 4) { return x; } else if (k == 8) { return y; }",
    "switch (n) { case 0: return x; case 1: return y; default: return x + y; }",
    "switch (n & 1) { case 0: return x; case 1: return y; }",
    "switch (n & 1) { case 0: return x; case 1: return y; default: break; }",
    "do { if (x > y) return x; x += 1; } while (true);",
    "while (!false) { if (x > y) return x; x += 1; }",
    "constexpr bool forever = true; while (forever) { if (x > y) return x; x += 1; }",
    "for (;;) { if (x > y) return x; x += 1; }",
    "auto f = [&](T v) { auto g = [&](T w) { if (w > v) return w; return v; }; return g(x); }; return f(y);",
    "if (x > y) return x; stop();",
    "if (x > y) return x; __trap();",
    "if (x > y) return x; __builtin_unreachable();",
    "if (x > y) return x; (void)0, __trap();",
    "if (x > 0) return x; if (x <= 0) return y;",
    "if (x > 0) return x; else if (x <= T(0)) return y;",
    "if (x < 0) { return x; } if (x >= 0 && x < 1) { return y; } if (x >= 1) return T(2);",
    "bool neg = x < 0; if (neg) return -x; if (x >= 0) return x;",
    "if (x > y) return x; else if (y >= x) return y;",
    "if (n == 0) return x; else if (n != 0) return y;",
    "if (n % 2 == 0) return x; if (n % 2 != 0) return y;",
    "for (int i = 0; i < 3; ++i) { if (i == 2) return x; x += y; }",
    "int i = 0; while (true) { if (i == 3) return x; ++i; x += y; }",
    "if (x > 0 && y > 0) return x; if (!(x > 0 && y > 0)) return y;",
    "if (x > 0 && y > 0) return x; if (x <= 0 || y <= 0) return y;",
    "if (x > 0) { if (y > 0) return x; else return y; } else { return 0; }",
    "{ return x; }",
    "if (true) return x;",
    "if (1 == 1) { return x; }",
    "if (abs(x) > 0) return x; if (x == 0) return y;",
    "bool pos = false; if (x > 0) pos = true; if (pos) return x; if (!pos) return y;",
    "if (n > 0) return x; else if (n < 0) return y; else return 0;",
    "int i = 0; for (; i < 4; ++i) { if (x > i) break; } return i;",
    "T r = 0; switch (n) { case 0: r = x; break; default: r = y; } return r;",
    "switch (n) { case 0: { return x; } case 1: { if (x > y) { return x; } return y; } default: { return y; } }",
    "if (x > y) return x; assert(false);",
    "unsigned k = n; if (k > 0) return x; if (k == 0) return y;",
    "bool c = n; if (c == 1) return x; if (c == 0) return y;",
]
DEFINED_TWO = [
    "Ref<T> w = a; w.put(x); b = 1;",
    "Ref<T> w(a); w.put(x); b = 1;",
    "Ref<T> w{a}; w.put(x); b = 1;",
    "auto w = Ref<T>(a); w.put(x); b = 1;",
    "set(x, a); set(y, b);",
    "help1(a, x); help2(b, y);",
    "T* p = &a; *p = x; p = &b; *p = y;",
    "T* p[2] = {&a, &b}; for (int i = 0; i < 2; ++i) *p[i] = x;",
    "for (int i = 0; i < 3; ++i) { a = x; b = y; }",
    "for (int i = 0; i < 3; ++i) { if (i == 0) { a = x; b = y; } }",
    "for (int i = 0; i < 3; ++i) { T v = x * i; if (i == 0 || v > a) a = v; } b = a;",
    "bool no = true; for (int i = 0; i < 3; ++i) { T v = x * i; if (no || v > a) { a = v; no = false; } } b = a;",
    "(x > y ? a : b) = x; (x > y ? b : a) = y;",
    "a = x, b = y;",
    "auto [u, v] = make(x); a = u; b = v;",
    "auto& r = a; r = x; auto&& q = b; q = y;",
    "decltype(auto) r = (a); r = x; b = y;",
    "decltype((a)) r = a; r = x; b = y;",
    "using R = T&; R r = a; r = x; b = y;",
    "auto g = [&] { return a + 1; }; a = x; b = g();",
    "auto sq = [](T a) { return a * a; }; a = sq(x); b = sq(y);",
    "{ T a = x; x = a + 1; } a = x; b = y;",
    "if (x > 0) a = x; if (x <= 0) a = y; b = 1;",
    "if (x > 0) { a = x; } else if (x <= 0) { a = y; } b = 1;",
    "bool c = x > 0; if (c) { a = x; b = y; } else { a = y; b = x; }",
    "if (x > 0) { a = x; b = y; return; } b = a = y;",
    "constexpr bool wide = sizeof(T) == 8; if constexpr (wide) { a = x; } else { a = y; } b = x;",
    "if constexpr (sizeof(x) == 8) a = x; else if constexpr (sizeof(x) == 4) a = y; b = 1;",
    "switch (int(x)) { case 0: a = x; b = 1; break; default: a = y; b = 2; }",
    "do { a = x; b = y; } while (false);",
    "a = T(); b = {};",
    "b = sizeof(a); a = x;",
    "int n = 3; while (n--) { a = x; b = y; }",
    "a = 0; a += x; b = a; b *= y;",
    "struct { T& p; T& q; } o = {a, b}; o.p = x; o.q = y;",
    "b = (a = x) > 0 ? a : y;",
    "if ((a = x) > 0) b = 1; else b = 2;",
    "T m = x > y ? x : y; a = m; return void(b = m);",
    "if (x > y) stop(); a = x; b = y;",
    "if (x > y) { a = x; b = y; } else { stop(); }",
]
# And bodies that it gives none.
UNDEFINED = [
    "if (x > 0) return x; else if (x < 0) return y;",
    "if (x > y) return x; if (x < y) return y;",
    "if (n == 0) return x; if (n == 1) return y;",
    "switch (n) { case 0: return x; default: break; }",
    "switch (n & 3) { case 0: return x; case 1: return y; default: break; }",
    "while (x > 0) { if (x > y) return x; x -= 1; }",
    "bool c = x > 0; if (c) return x; x = y;",
    "for (int i = 0; i < 3; ++i) { x += i; }",
    "auto g = [&](T v) { return v; }; g(x);",
    "if (x > 0) { return x; } else { y = x; }",
    "if (x > 0 && y > 0) return x; if (x <= 0 && y <= 0) return y;",
    "while (true) { if (x > y) break; x += 1; }",
    "if (x > 0) { if (y > 0) return x; } else { return y; }",
    "if (x < 0) return x; if (x > 1) return y;",
]
UNDEFINED_TWO = [
    "a += x; b = 1;",
    "b = a + 1; a = x;",
    "T c = a; a = c; b = 1;",
    "a = x; if (x > y) b = y;",
    "a = x; if (x > 0) b = 1; else if (x < 0) b = 2;",
    "a = x; switch (int(x)) { case 0: b = 1; break; default: break; }",
    "a = x; while (true) { if (x > 0) break; x += 1; }",
    "++a; b = 1;",
    "a = x; auto g = [&](T v) { return v; }; g(y);",
    "if (x > 0) return; a = x; b = x;",
    "auto c = a; a = x + c; b = 1;",
    "a = -a; b = 1;",
    "b = x; if (x > 0 && y > 0) a = x; if (x <= 0 && y <= 0) a = y;",
]
TOOLS = """
template <typename T> void set(T x, T& a) { a = x; }
template <typename T> struct Ref { T& r; Ref(T& v) : r(v) {} void put(T v) { r = v; } };
template <typename T> struct Pair { T u; T v; };
template <typename T> Pair<T> make(T x) { return {x, -x}; }
void stop() { __builtin_trap(); }
using Nothing = void;
template <typename T> Nothing help1(T& a, T x) { a = x; }
template <typename T> typename std::enable_if<sizeof(T) == 4>::type help2(T& a, T x) { a = x; }
template <typename T> typename std::enable_if<sizeof(T) != 4>::type help2(T& a, T x) { a = x; }
template <int N> int pick() { if constexpr (N == 0) return 1; else if constexpr (N == 1) return 2; else return 3; }
"""
HELPER = "template <typename T> void set(T x, T& a) { a = x; }\n"


def of(body: str) -> str:
    """Return the text of a functor with one result."""
    return f"template <typename T>\nT f(T x) {{\n  {body} }}"


def of_two(body: str) -> str:
    """Return the text of a functor with two outputs."""
    return f"{HELPER}template <typename T>\nvoid f(T x, T& a, T& b) {{\n  {body} }}"


def with_tools(body: str, *, has_outputs: bool) -> Functor:
    """Return a functor of two tensors with helpers that it may call."""
    if has_outputs:
        return parse_functor(f"{TOOLS}template <typename T> void f(T x, T y, T& a, T& b) {{ {body} }}", (), 2)
    return parse_functor(f"{TOOLS}template <typename T> T f(T x, T y, int n) {{ {body} }}", ("n",))


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


@pytest.mark.parametrize("body", [*DEFINED, *DEFINED_TWO])
def test_what_is_well_defined_is_never_refused(body: str) -> None:
    check_functor(with_tools(body, has_outputs=body in DEFINED_TWO))


@pytest.mark.parametrize("body", [*UNDEFINED, *UNDEFINED_TWO])
def test_what_is_certainly_undefined_is_refused(body: str) -> None:
    with pytest.raises(FunctorError, match=r"returns nothing on|nothing was assigned to|is read before"):
        check_functor(with_tools(body, has_outputs=body in UNDEFINED_TWO))


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


def test_most_texts_need_no_reading_of_paths() -> None:
    plain = [op.function.functor.ends_in_returns for op in OPS.values()]
    assert sum(plain) > 0.9 * len(plain)
    assert parse_functor(of("if (x > 0) { x = 1; } return x;  // on each path")).ends_in_returns
    helper = "template <typename T> T twice(T x) { return x + x; }"
    assert parse_functor(f"{helper}\n{of('return twice(x);')}").ends_in_returns
    refused = [of(body) for body, _ in NO_RETURN]
    refused += [f"template <typename T> T help(T x) {{ if (x > 0) return x; }}\n{of('return help(x);')}"]
    assert not any(parse_functor(text).ends_in_returns for text in refused)
    assert not parse_functor(of_two("a = x; return;"), (), 2).ends_in_returns


@pytest.mark.parametrize("module", ["cuda/jiterator.py", "testing/_internal/common_methods_invocations.py"])
def test_no_text_of_torch_itself_is_refused(module: str) -> None:
    source = (Path(torch.__file__).parent / module).read_text(encoding="utf-8")
    texts = re.findall(r'"(template <typename [^"]*)"', source)
    assert texts
    for text in texts:
        outputs = text.partition("{")[0].count("&")
        check_functor(parse_functor(text, (), max(outputs, 1)))
