"""Functor texts: every form that torch.cuda.jiterator runs is parsed and runs; wrong texts are reported in place."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import fuser
from fuser.cxx.brief import shorten_exp
from fuser.cxx.functor import Role, parse_functor
from fuser.eager.translation import translate
from fuser.errors import FunctorError, UntranslatableError
from fuser.fallback import call_derived


@dataclass(frozen=True)
class Form:
    """One way to write a functor: what it parses to, and what it computes in float64."""

    name: str
    code: str
    reference: Callable[..., Any]
    entry: str = "f"
    tensors: tuple[str, ...] = ("x",)
    scalars: dict[str, Any] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    num_outputs: int = 1
    # Tensors given in the call; None: all.
    given: int | None = None

    def __str__(self) -> str:
        return self.name


def _two(x: Any, y: Any) -> Any:
    return (x + y, x - y)


FORMS = [
    Form("plain", "template <typename T> T f(T x, T y) { return x * y; }", lambda x, y: x * y, tensors=("x", "y")),
    Form("class", "template<class T> T f(T x) { return x + T(1); }", lambda x: x + 1),
    Form(
        "several functions, the last is the entry",
        "template <typename T> T f(T x) { return x * x; }\ntemplate <typename T> T cube(T x) { return f(x) * x; }",
        lambda x: x**3,
        entry="cube",
    ),
    Form(
        "helper templates",
        "template <typename A, typename B> A mix(A a, B b) { return a + A(b); }\n"
        "template <int n> int times() { return n; }\n"
        "template <typename T> T f(T x) { return mix<T, int>(x, 2) * times<3>(); }",
        lambda x: (x + 2) * 3,
    ),
    Form(
        "helper that is no template, before and after",
        "float half_of(float v) { return v / 2; }\ntemplate <typename T> T f(T x) { return half_of(x); }\n"
        "int after(int v) { return v; }",
        lambda x: x / 2,
    ),
    Form(
        "helper struct",
        "template <typename T> struct Pair { T a; T b; };\n"
        "template <typename T> T f(T x) { Pair<T> p{x, x + 1}; return p.a * p.b; }",
        lambda x: x * (x + 1),
    ),
    Form(
        "lambda",
        "template <typename T> T f(T x) { auto g = [&](T v) { return v + x; }; return g(x * 2); }",
        lambda x: x * 3,
    ),
    Form(
        "local arrays",
        "template <typename T> T f(T x) { const T c[] = {1, 2, 3}; T m[2][2] = {{x, 1}, {2, x}};\n"
        "  return c[0] + c[1] * x + c[2] * (m[0][0] * m[1][1] - m[0][1] * m[1][0]); }",
        lambda x: 1 + 2 * x + 3 * (x * x - 2),
    ),
    Form(
        "constant table",
        "constexpr double table[2] = {0.5, 0.25};\n"
        "template <typename T> T f(T x) { return x * T(table[0]) + T(table[1]); }",
        lambda x: x * 0.5 + 0.25,
    ),
    Form(
        "loops",
        "template <typename T> T f(T x) { T s = 0; for (int i = 0; i < 4; ++i) { if (i == 2) continue; s += i * x; }\n"
        "  int n = 0; while (true) { if (++n > 3) break; s += 1; } do { s -= x; } while (s > 100); return s; }",
        lambda x: 4 * x + 3 - x,
    ),
    Form(
        "recursion",
        "template <typename T> T power(T x, int n) { return n == 0 ? T(1) : x * power(x, n - 1); }\n"
        "template <typename T> T f(T x) { return power(x, 3); }",
        lambda x: x**3,
    ),
    Form(
        "switch",
        "template <typename T> T f(T x) { switch (int(x > 0)) { case 0: return -x; default: return 2 * x; } }",
        lambda x: torch.where(x > 0, 2 * x, -x),
    ),
    Form(
        "bool and double scalars",
        "template <typename T> T f(T x, bool flip, double by, int64_t n) { return (flip ? -x : x) * T(by) + T(n); }",
        lambda x: -x * 0.5 + 7,
        scalars={"flip": True, "by": 0.5, "n": 7},
    ),
    Form(
        "comments first",
        "// template <typename T> T no(T x) { return 0; }\n/* template <typename T>\nT no(T x) {} */\n"
        "template <typename T> T f(T x) { return x + 1; }",
        lambda x: x + 1,
    ),
    Form(
        "a trailing comment that looks like a function",
        "template <typename T> T f(T x) { return x + 1; }\n// template <typename T> T no(T x) { return 0; }\n"
        "/* template <typename T> T no(T x, T y) { return 0; } */",
        lambda x: x + 1,
    ),
    Form(
        "text in a string that looks like a function",
        'template <typename T> T f(T x) { const char* s = "template <typename T> T no(T x) {"; return x + s[0]; }',
        lambda x: x + ord("t"),
    ),
    Form(
        "a mark of the file's encoding",
        "\ufefftemplate <typename T> T f(T x) { return x + 1; }",
        lambda x: x + 1,
    ),
    Form(
        "letters beyond ASCII",
        "// Größe ≤ 1\ntemplate <typename T> T f(T x) { /* ü */ return x + 1; }",
        lambda x: x + 1,
    ),
    Form(
        "several outputs, void",
        "template <typename T> void f(T x, T y, T& a, T& b) { a = x + y; b = x - y; }",
        _two,
        tensors=("x", "y"),
        outputs=("a", "b"),
        num_outputs=2,
    ),
    Form(
        "several outputs, written T without return",
        "// Größe\ntemplate <typename T> T f(T x, T y, T& a, T& b) {\n"
        "  auto g = [](T v) { return v; }; a = g(x + y); b = x - y; }",
        _two,
        tensors=("x", "y"),
        outputs=("a", "b"),
        num_outputs=2,
    ),
    Form(
        "several outputs, written T with an early return",
        "template <typename T> T f(T x, T y, T& a, T& b) { a = x + y; b = x - y; if (x > 0) return; b = x - y; }",
        _two,
        tensors=("x", "y"),
        outputs=("a", "b"),
        num_outputs=2,
    ),
    Form(
        "one output by reference",
        "template <typename T> void f(T x, T& a) { a = 2 * x; }",
        lambda x: 2 * x,
        outputs=("a",),
    ),
    Form(
        "tensors, scalars and outputs in any order",
        "template <typename T> void f(T& a, T p, T x, T& b, double q, T y) { a = p * x + y; b = x - T(q) * y; }",
        lambda x, y: (2 * x + y, x - 3 * y),
        tensors=("x", "y"),
        scalars={"q": 3.0, "p": 2.0},
        outputs=("a", "b"),
        num_outputs=2,
    ),
    Form(
        "C++ default arguments, left out",
        "template <typename T> T f(T x, T y = T(3), T z = 2) { return x * y + z; }",
        lambda x: 3 * x + 2,
        tensors=("x", "y", "z"),
        given=1,
    ),
    Form(
        "C++ default arguments, given",
        "template <typename T> T f(T x, T y = T(3)) { return x * y; }",
        lambda x, y: x * y,
        tensors=("x", "y"),
    ),
    Form(
        "second template parameter",
        "template <typename T, typename U> T f(T x, U y) { return x + T(y * U(2)); }",
        lambda x, y: x + 2 * y,
        tensors=("x", "y"),
    ),
    Form(
        "second template parameter with a default",
        "template <typename T, typename acc_t = double> T f(T x) { acc_t s = x; return T(s * s); }",
        lambda x: x * x,
    ),
    Form(
        "macros",
        "#define SQUARE(v) ((v) * (v))\n#define ONE 1\n#ifdef NOBODY_DEFINES_THIS\n#error no\n#endif\n"
        "template <typename T> T f(T x) { return SQUARE(x) + ONE; }",
        lambda x: x * x + 1,
    ),
    Form(
        "an entry named by a macro",
        "#define NAME(n) my_##n\n#define TYPE T\ntemplate <typename TYPE> TYPE NAME(kernel)(TYPE x) { return x + 1; }",
        lambda x: x + 1,
        entry="my_kernel",
    ),
    Form(
        "outputs that a macro makes",
        "#define OUT T&\ntemplate <typename T> void f(T x, T y, OUT a, OUT b) { a = x + y; b = x - y; }",
        _two,
        tensors=("x", "y"),
        outputs=("a", "b"),
        num_outputs=2,
    ),
    Form(
        "a result type that a macro writes, without return",
        "#define RESULT T\n#define OUT(name) T& name\n"
        "template <typename T> RESULT f(T x, T y, OUT(a), OUT(b)) { a = x + y;\n b = x - y; }",
        _two,
        tensors=("x", "y"),
        outputs=("a", "b"),
        num_outputs=2,
    ),
    Form(
        "a trailing result type, without return",
        "template <typename T> auto f(T x, T y, T& a, T& b) -> T { a = x + y; b = x - y; }",
        _two,
        tensors=("x", "y"),
        outputs=("a", "b"),
        num_outputs=2,
    ),
    Form(
        "a function that a macro writes",
        "#define FUNCTION(name, body) template <typename T> T name(T x) { return body; }\nFUNCTION(g, x * 2)\n"
        "#ifdef __CUDACC__\nFUNCTION(f, g(x) + 1)\n#else\nFUNCTION(f, 1 + g(x))\n#endif",
        lambda x: x * 2 + 1,
    ),
    Form(
        "a name of the prelude that is pasted together",
        "#define CALL(name) name##qrt\ntemplate <typename T> T f(T x) { return CALL(rs)(x * x + 1); }",
        lambda x: (x * x + 1).rsqrt(),
    ),
    Form(
        "an argument as text, at the start of a macro",
        "#define SAY(v) #v\ntemplate <typename T> T f(T x) { static_assert(sizeof(T) > 0, SAY(size)); return x + 1; }",
        lambda x: x + 1,
    ),
    Form(
        "lines that go on in the next one",
        "#def\\\nine ONE \\\n  1\ntemplate <type\\\nname T> T f(T x) { return x + ONE; }",
        lambda x: x + 1,
    ),
    Form(
        "a directive after a comment",
        "/* one\n */ #define ONE 1 // not 2 /* nor 3\ntemplate <typename T> T f(T x) { return x + ONE; }",
        lambda x: x + 1,
    ),
    Form(
        "pragmas",
        "#pragma once\ntemplate <typename T> T f(T x) { T s = 0;\n#pragma unroll\n"
        "  for (int i = 0; i < 3; ++i) s += x;\n  return s; }",
        lambda x: 3 * x,
    ),
    Form(
        "CUDA qualifiers",
        "template <typename T> __device__ __forceinline__ T help(T x) { return x + 1; }\n"
        "template <typename T> __host__ __device__ T f(const T x, const T& y) { return help(x) * y; }",
        lambda x, y: (x + 1) * y,
        tensors=("x", "y"),
    ),
    Form(
        "digraphs",
        "%:define AT(k) a<:k:>\ntemplate <typename T> T f(T x)\n<% T a<:2:> = <%x, T(1)%>;\n"
        "  return AT(0) + static_cast<::int64_t>(AT(1)); %>",
        lambda x: x + 1,
    ),
    Form(
        "conversions to types that are no single name",
        "template <typename U> struct Of { typedef U type; };\n"
        "template <typename T> auto f(T x) -> decltype(x) {\n"
        "  const auto same = [](auto a) -> decltype(a) { return a; };\n"
        "  return decltype(x)(same(x)) + decltype(x * 2) /* and */ {1} + (x < 0 ? typename Of<T>::type{3} : T(3)); }",
        lambda x: x + 4,
    ),
    Form(
        "the bits of a number",
        "template <typename T> T f(T x) {\n"
        "  return __builtin_bit_cast(float, __builtin_bit_cast(unsigned, float(x)) ^ 0x80000000u); }",
        lambda x: -x,
    ),
    Form(
        "memory of variables",
        "template <typename T> T f(T x) { const float* p = NULL; float y = float(x), a[2]; unsigned i;\n"
        "  memcpy(&i, &y, sizeof(i)); i ^= 0x80000000u; std::memcpy(&y, &i, 4); memset(a, 0, sizeof(a));\n"
        "  if (p == NULL) p = a; return T(y + p[1]); }",
        lambda x: -x,
    ),
    Form(
        "inline and static",
        "template <typename T> static inline T f(T x) { return std::exp(x) + ::min(x, T(0)); }",
        lambda x: x.exp() + x.clamp(max=0),
    ),
    Form(
        "casts, sizeof and bits",
        "template <typename T> T f(T x) { int n = static_cast<int>(x * 8);\n"
        "  return T((n & 6) ^ 1) + sizeof(T) + (T)(n << 1); }",
        lambda x: ((x * 8).int() & 6 ^ 1) + 4 + ((x * 8).int() << 1),
    ),
    Form(
        "spread over lines, no space",
        "\n\n template<typename T>\n T\n f (\n   T x\n , T y)\n {\n return x-y ; }\n\n",
        lambda x, y: x - y,
        tensors=("x", "y"),
    ),
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_parses(form: Form) -> None:
    functor = parse_functor(form.code, tuple(form.scalars), form.num_outputs)
    assert functor.entry == form.entry
    assert tuple(parameter.name for parameter in functor.tensors) == form.tensors
    assert {parameter.name for parameter in functor.scalars} == set(form.scalars)
    assert tuple(parameter.name for parameter in functor.outputs) == form.outputs
    assert functor.problems == ()


@pytest.mark.cpu
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_runs(form: Form) -> None:
    torch.manual_seed(1)
    count = len(form.tensors) if form.given is None else form.given
    inputs = [torch.randn(37) for _ in range(count)]
    got = fuser.jit_fn(form.code, num_outputs=form.num_outputs, scalars=form.scalars)(*inputs)
    wanted = form.reference(*(item.double() for item in inputs))
    assert isinstance(got, tuple) == (form.num_outputs > 1)
    pairs = zip(got, wanted, strict=True) if isinstance(got, tuple) else [(got, wanted)]
    for one, other in pairs:
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other.double(), rtol=2e-6, atol=2e-6)


@pytest.mark.cpu
def test_macros_end_with_their_functor() -> None:
    first = fuser.create_jit_fn(
        "#define BY(v) (v) * 2\n#define K 1\ntemplate <typename T> T f(T x) { return BY(x) + K; }"
    )
    second = fuser.create_jit_fn(
        "#define BY(v) (v) * 3\ntemplate <typename T> T g(T x) { int K = 5; return BY(x) + K; }"
    )
    fused = fuser.fuse(lambda x: second(first(x)))
    x = torch.arange(5.0)
    assert torch.equal(fused(x), (x * 2 + 1) * 3 + 5)
    assert len(fused.groups) == 1


@pytest.mark.cpu
def test_what_a_functor_defines_and_ends_is_there_for_the_next() -> None:
    first = fuser.create_jit_fn(
        "#undef INFINITY\n#define INFINITY 7\n#undef NAN\n#ifndef __CUDACC__\n#undef __device__\n#define __device__\n"
        "#endif\ntemplate <typename T> T f(T x) { return x + INFINITY; }"
    )
    second = fuser.create_jit_fn("template <typename T> __device__ T g(T x) { return x < INFINITY ? x : T(NAN); }")
    fused = fuser.fuse(lambda x: second(first(x)))
    assert fused(torch.arange(3.0)).tolist() == [7, 8, 9]
    assert len(fused.groups) == 1


DOUBLE = "template <typename T> T f(T x) { return x * 2; }"
PLUS_ONE = "template <typename T> T g(T x) { return x + 1; }"
# Two texts that have something in common, or the first of which changes what the second means: x * 2, then + 1.
NEIGHBOURS = {
    "entry": (DOUBLE, PLUS_ONE.replace("g(", "f(")),
    "helper": tuple(
        f"float h(float x) {{ return {value}; }}\ntemplate <typename T> T f(T x) {{ return h(x); }}"
        for value in ("x * 2", "x + 1")
    ),
    "struct and constant": tuple(
        f"struct S {{ static float h(float x) {{ return {value}; }} }};\nconstexpr int C = {number};\n"
        "template <typename T> T f(T x) { return S::h(x) + C - C; }"
        for number, value in enumerate(("x * 2", "x + 1"))
    ),
    "namespaces": tuple(
        f"namespace n {{ float h(float x) {{ return {value}; }} }} namespace {{ int k = {number}; }}\n"
        "template <typename T> T f(T x) { return n::h(x) + k - k; }"
        for number, value in enumerate(("x * 2", "x + 1"))
    ),
    "std": ("namespace std { float h(float x) { return x * 2; } }\nusing namespace std;\n"
            "template <typename T> T f(T x) { return std::h(x); }", PLUS_ONE),
    "names of the kernel": (
        "constexpr int fuser_f1 = 2, out0 = 1, v0 = 3;\n"
        "template <typename T> T fuser_kernel(T x) { return x * fuser_f1; }",
        "struct fuser_args { float i; };\n"
        "template <typename T> T fuser_element(T x) { fuser_args a{1}; return x + a.i; }",
    ),
    "macros": (
        "#define float double\n#define T1 3\n#define a 4\n#define out0 5\n#define for if\n" + DOUBLE,
        "template <typename T> T g(T x) { float a = 0; int T1 = 1; for (int i = 0; i < 3; ++i) a += sizeof(a) == 4; "
        "return x + a - 2 * T1; }",
    ),
    "a question for a way to ask for files": (
        "#if defined(__has_include) && defined __has_include\n#ifdef __has_include\n" + DOUBLE + "\n#endif\n#endif",
        PLUS_ONE,
    ),
    "a macro of a branch": ("#ifdef __GNUC__\n#define g nothing\n#endif\n" + DOUBLE, PLUS_ONE),
    "qualifiers": (
        "#define __device__\n#define __global__\n#define __forceinline__ nothing\n#undef __noinline__\n" + DOUBLE,
        "template <typename T> __device__ __forceinline__ T h(T x) { return x + 1; }\n"
        "template <typename T> __device__ T g(T x) { return h(x); }",
    ),
    "places": ('#line 7 "functor1.g"\n# 9\n' + DOUBLE, PLUS_ONE),
    "messages": (
        '#pragma GCC diagnostic error "-Wuninitialized"\n#pragma nv_diag_error 549\n' + DOUBLE,
        "template <typename T> T g(T x) { T y; T z = y; return x + 1; }",
    ),
}  # fmt: skip


@pytest.mark.cpu
@pytest.mark.parametrize("what", NEIGHBOURS)
@pytest.mark.filterwarnings("ignore::fuser.errors.FunctorWarning")
def test_a_functor_means_the_same_beside_another(what: str) -> None:
    # cubins.py compiles the kernel with NVRTC, too.
    first, second = map(fuser.create_jit_fn, NEIGHBOURS[what])
    fused = fuser.fuse(lambda x: second(first(x)))
    x = torch.arange(5.0)
    assert fused(x).tolist() == [1, 3, 5, 7, 9]
    assert len(fused.groups) == 1


def test_a_long_sum_has_an_eager_version() -> None:
    # Nothing that reads it calls itself for each term.
    fn = fuser.create_jit_fn(f"template <typename T> T f(T x) {{ return {' + '.join(['x'] * 1200)}; }}")
    assert call_derived(fn.function, [torch.tensor([0.5, 1.0])], {})[0].tolist() == [600, 1200]


def test_what_is_nested_too_deeply_is_untranslatable() -> None:
    for body in ("(" * 2000 + "x" + ")" * 2000, "x > 1 ? x : " * 2000 + "x", "abs(" * 2000 + "x" + ")" * 2000):
        functor = parse_functor(f"template <typename T> T f(T x) {{ return {body}; }}")
        with pytest.raises(UntranslatableError, match="a text nested this deeply"):
            translate(functor, torch.float32, (torch.float32,))


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("template <typename T> T f(T x, T& a) { a = x; }", "template <typename T> void f(T x, T& a) { a = x; }"),
        ("template <typename T> T f(T x, T& a) { a = x; return a; }", None),
        ("template <typename T> void f(T x, T& a) { a = x; }", None),
        ("template <typename T> T f(T x) { x; }", None),
        (
            "template <typename T> T f(T x, T& a) { a = x; if (x > 0) return a; }",
            "template <typename T> T f(T x, T& a) { a = x; if (x > 0) return a; return {}; }",
        ),
    ],
)
def test_only_an_unused_return_type_becomes_void(code: str, text: str | None) -> None:
    assert parse_functor(code).text == (text or code)


@pytest.mark.parametrize(("column", "own"), [(1, 1), (22, 22), (23, 23), (27, 24), (30, 27)])
def test_columns_are_those_of_the_own_text(column: int, own: int) -> None:
    functor = parse_functor("template <typename T> T f(T x, T& a) {\n a = x; }")
    assert functor.place_in_source(1, column) == (1, own)
    assert functor.place_in_source(2, 5) == (2, 5)


def test_parameters_know_their_place_and_type() -> None:
    functor = parse_functor("template <typename T>\nT f(const T& x,\n  double s = 2.0) { return x; }", ("s",))
    found = [(item.name, item.type, item.role, item.has_default, *item.place) for item in functor.parameters]
    assert found == [("x", "T", Role.TENSOR, False, 2, 5), ("s", "double", Role.SCALAR, True, 3, 3)]


# A text, and where and how the report says that it is wrong.
SYNTAX_ERRORS = [
    ("template <typename T> T f(T x) {\n  return x +;\n}", 2, 13, "expected 'identifier'"),
    ("template <typename T> T f(T x) {\n  return x\n}", 2, 11, "expected ';'"),
    ("template <typename T> T f(T x) { return (x; }", 1, 43, "expected ')'"),
    ("// Größe\ntemplate <typename T> T f(T x) {\n\tT y = ;\n\treturn x; }", 3, 6, "does not parse at '='"),
    ("template <typename T> T f(T x, T& a) { a = 2 * x }", 1, 51, "expected ';'"),
    ("template <typename T> T f(T x) { const T [] = {1, 2}; return x; }", 1, 43, "does not parse at ']'"),
    ("#include <cmath>\ntemplate <typename T> T f(T x) { return x; }", 1, 1, "#include"),
    ("#inc\\\nlude <cmath>\ntemplate <typename T> T f(T x) { return x; }", 1, 1, "#include"),
    (
        "#ifdef __GNUC__\n # /* */ include <cmath>\n#endif\ntemplate <typename T> T f(T x) { return x; }",
        2,
        2,
        "#include",
    ),
    ("%:include <cmath>\ntemplate <typename T> T f(T x) { return x; }", 1, 1, "#include"),
    *(
        (f"{text}\ntemplate <typename T> T f(T x) {{ return x; }}", line, column, message)
        for text, line, column, message in [
            ("#import <cmath>", 1, 1, "#include"),
            ("\\\n#\\\ninclude <cmath>", 2, 1, "#include"),
            ("#/*\n*/include <cmath>", 1, 1, "#include"),
            ("#define HEADER <cmath>\n#include HEADER", 2, 1, "#include"),
            ('constexpr char s[] = "/*";\n#include <cmath>\nconstexpr char t[] = "*/";', 2, 1, "#include"),
            ('constexpr char s[] = R"x()"/*)x";\n#include <cmath>\n/* "*/', 2, 1, "#include"),
            ("constexpr int n = 1'000;\n#include <cmath>\nconstexpr int m = 1'000;", 2, 1, "#include"),
            ("\u2028#include <cmath>", 1, 2, "#include"),
            ("// a\r#include <cmath>", 1, 5, "a carriage return without a line feed"),
            ('constexpr char a[] = {\n#embed "file"\n};', 2, 1, "#include"),
            ("#if __has_include(<cmath>)\n#endif", 1, 1, "cannot ask for files"),
            ("#define ASK __has_embed(<a>)\n#if ASK\n#endif", 1, 1, "cannot ask for files"),
            ('_Pra\\\ngma("GCC poison x")', 1, 1, "#pragma GCC poison x would"),
            ('_Pragma/* */(L"GCC poison x")', 1, 1, '#pragma L"GCC poison x" would'),
            ("#define P(x) _Pragma(#x)\nP(GCC poison x)", 2, 1, "#pragma GCC poison x would"),
            ("#ifdef __GNUC__\n#define P(x) _Pragma(#x)\nP(GCC poison x)\n#endif", 2, 1, "would reach the rest"),
            ('#ifdef __GNUC__\n_Pragma("GCC poison x")\n#endif', 2, 1, "#pragma GCC poison x would"),
            ("#define D declare\n#pragma omp D target", 2, 1, "#pragma omp declare target would"),
            ('#line \\\n3 "x"', 1, 1, "#line goes on in another line"),
            ("#assert machine(x)", 1, 1, "#assert would reach the rest"),
            ("#undef _OPENMP", 1, 1, "_OPENMP is not for functors to undef"),
            ("#ifdef NOBODY\n#define __CUDA_ARCH__ 1\n#endif", 2, 1, "__CUDA_ARCH__ is not for functors to define"),
            ('extern "C" int help(int v) { return v; }', 1, 1, 'what is extern "C" has one name'),
            ('extern "C" { int count = 0; }', 1, 1, 'what is extern "C" has one name'),
            ('namespace n {\n asm(".section .init_array");\n}', 2, 2, "asm outside of functions"),
        ]
    ),
    ("#import <cmath>\ntemplate <typename T> T f(T x) { return x; }", 1, 1, "#include"),
    ("template <typename T> T f(T x) { return x; }\n#include <cmath>", 2, 1, "#include"),
    ("#if 1\ntemplate <typename T> T f(T x) { return x; }", 1, 1, "#if without #endif"),
    ("template <typename T> T f(T x) { return x; }\n#endif", 2, 1, "#endif without #if"),
    ("template <typename T> T f(T x) { return x; } // \\\n", 1, 49, "the last line goes on"),
    ("#define FUSER_INLINE x\ntemplate <typename T> T f(T x) { return x; }", 1, 1, "FUSER_INLINE is not for functors"),
    ("#pragma pack(1)\ntemplate <typename T> T f(T x) { return x; }", 1, 1, "#pragma pack(1) would reach the rest"),
    ('template <typename T> T f(T x) {\n  _Pragma("GCC poison x") return x; }', 2, 3, "#pragma GCC poison x would"),
    ("#define HALF(v) ((v) / )\ntemplate <typename T> T f(T x) {\n  return 1 + HALF(x); }", 3, 14, "expected"),
    ("template <typename T> T f(T x) {\n  return x \u2212 1; }", 2, 12, "'\u2212' (MINUS SIGN) is no character of C++"),
    ("template <typename T> T f(T x) { return\xa0x; }", 1, 40, r"'\xa0' (NO-BREAK SPACE) is no character of C++"),
    ('// \u2212 "\ntemplate <typename T> T f(T x) { return x \u00d7 2; }', 2, 43, "'\u00d7' (MULTIPLICATION SIGN)"),
    ("/* \u2212 */ template <typename T> T f(T \u00e9) { return \u00e9 + ; }", 1, 52, "expected"),
    # How long it takes to see that a text has no end must not double with each line.
    ('template <typename T> T f(T x) {\n  const char* s = R"(;' + "\n" * 60 + "  return x; }", 2, 22, "does not parse"),
]


@pytest.mark.parametrize(("code", "line", "column", "message"), SYNTAX_ERRORS)
def test_syntax_error_is_built_and_never_called(code: str, line: int, column: int, message: str) -> None:
    fn = fuser.create_jit_fn(code)
    # Building it is no error; every use is, with the same report.
    for use in (lambda: fn(torch.ones(3)), fn.check):
        with pytest.raises(FunctorError) as caught:
            use()
        error = caught.value
        assert (error.line, error.column) == (line, column)
        head, shown, caret = str(error).split("\n")
        assert head.startswith(f"line {line}, column {column}: ")
        assert message in head
        assert shown.endswith(re.sub(r"[\t\r\u2028]", " ", code.split("\n")[line - 1]))
        assert caret.index("^") - caret.index("|") == column + 1


@pytest.mark.parametrize(
    ("code", "column", "message"),
    [
        ("template <typename T> T my _kernel(T x) { return x; }", 25, "does not parse at 'my'"),
        ("template <typename T> Tmy_kernel(T x) { return x; }", 23, "'Tmy_kernel' has no result type"),
        ("template <typename T> T f(T x { return x; }", 30, "expected ')'"),
        ("template <typename T> T f(T x, ) { return x; }", 30, "does not parse at ','"),
        ("template <typename T T f(T x) { return x; }", 22, "does not parse at 'T'"),
        ("template <typename T> T 2f(T x) { return x; }", 25, "does not parse at '2'"),
        ("template <typename T> T f[](T x) { return x; }", 23, "no function with a name of its own"),
        ("template <typename T> T f(T x) return x; }", 31, "expected ';'"),
        ("template <typename T> T f(T x) try { return x; } catch (...) { }", 23, "'f' has no body"),
        ("template <int n> int f(int x) { return x; }", 1, "the first template parameter of 'f' is no type"),
        ("template <> float f(float x) { return x; }", 1, "the first template parameter of 'f' is no type"),
    ],
)
def test_an_entry_that_cannot_be_read_is_no_function(code: str, column: int, message: str) -> None:
    before = "// é\n#define NOTHING\n"
    for create in (
        fuser.create_jit_fn,
        lambda text: fuser.create_multi_output_jit_fn(text, 1),
        lambda text: fuser.jit_fn(text, scalars=["x"]),
    ):
        with pytest.raises(FunctorError) as caught:
            create(before + code)
        assert (caught.value.line, caught.value.column) == (3, column)
        head, shown, caret = str(caught.value).splitlines()
        assert message in head
        assert shown == f"    3 | {code}"
        assert caret.index("^") - caret.index("|") == column + 1


def test_a_macro_may_name_the_entry_everywhere() -> None:
    fn = fuser.create_jit_fn("#define NAME my_kernel\ntemplate <typename T> T NAME(T x) { return x * x; }")
    assert fn.__name__ == "my_kernel"
    assert "my_kernel" in str(fuser.explain(fn, torch.ones(2)))
    x = torch.tensor([3.0], requires_grad=True)
    with fuser.config.patch(cxx="/nonexistent", no_compile=False):
        fn(x).backward()
    assert x.grad.tolist() == [6.0]


def test_a_text_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from fuser.cxx import functor

    texts = []
    parse = functor.parse_tree
    monkeypatch.setattr(functor, "parse_tree", lambda text: texts.append(text) or parse(text))
    code = "#define BY 3\ntemplate <typename T> T read_once(T x) { return x * BY; }"
    fn = fuser.create_jit_fn(code)
    fuser.jit_fn(code, scalars=["x"])
    fuser.explain(fn, torch.ones(2))
    assert len(texts) == 1
    assert "BY" not in texts[0]


NO_FUNCTOR = [
    ("", {}, "needs a function template"),
    # What other libraries take.
    ("y = x * 2", {}, "needs a function template"),
    ("T x, T y -> T z: z = x + y", {}, "needs a function template"),
    ("lambda x: x + 1", {}, "needs a function template"),
    ("@triton.jit\ndef f(x_ptr): pass", {}, "needs a function template"),
    ("[](float x) { return x * 2; }", {}, "needs a function template"),
    (
        "__global__ void f(float* x, int n) { if (threadIdx.x < n) x[threadIdx.x] *= 2; }",
        {},
        "needs a function template",
    ),
    ("/* template <typename T>", {}, "does not parse"),
    ("float f(float x) { return x; }", {}, "needs a function template"),
    ("// template <typename T> T f(T x) { return x; }", {}, "needs a function template"),
    ("template <typename T> struct S { T a; };", {}, "needs a function template"),
    ("template <typename T> T f(T x) { return x; }", {"scalars": {"alpha": 1.0}}, "f has no parameter 'alpha'"),
    ("template <typename T> T f(T x) { return x; }", {"num_outputs": 0}, "num_outputs must be 1 or more"),
    ("template <typename T> T f(T x) { return x; }", {"num_outputs": 2}, "0 output parameters"),
    ("template <typename T> void f(T x, T& a, T& b) { }", {"num_outputs": 1}, "2 output parameters"),
    ("template <typename T> void f(T x, T& a) { }", {"scalars": {"a": 1.0}}, "'a' is an output of f"),
    ("template <typename T> T f(const T* x) { return *x; }", {}, "x is a pointer, .* write T x, or T& x for an output"),
    ("template <typename T> void f(T x, T* r) { *r = x; }", {}, "line 1, column 35: r is a pointer"),
    ("template <typename T> T f(T x[]) { return x[0]; }", {}, "x is an array"),
    ("template <typename T> T f(T (*g)(T)) { return g(1); }", {}, "g is a function"),
    ("template <typename T> T f(T&& x) { return x; }", {}, "x is an rvalue reference"),
    ("template <typename T> T f(T... x) { return 1; }", {}, "no parameter pack"),
    ("template <typename T> void f(T x) { }", {}, "line 1, column 23: 'f' has no result"),
    ("template <typename T> T* f(T x) { return &x; }", {}, "'f' returns a pointer"),
    ("// \ud800\ntemplate <typename T> T f(T x) { return x; }", {}, "line 1, column 4: half of a surrogate pair is no"),
    ("template <typename T> T f(T x) { return x; } // \0", {}, "line 1, column 49: NUL is no character"),
    (
        "#define M0 x\n"
        + "".join(f"#define M{n + 1} M{n}\n" for n in range(2000))
        + "template <typename T> T f(T x) { return M2000; }",
        {},
        "nested too deeply for it to be read",
    ),
]


@pytest.mark.parametrize(("code", "options", "message"), NO_FUNCTOR)
def test_no_functor(code: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(FunctorError, match=message):
        fuser.jit_fn(code, **options)


def test_equal_texts_are_equal_functors() -> None:
    code = "template <typename T> T f(T x, T a) { return x * a; }"
    assert parse_functor(code, ("a",)) == parse_functor(code, ("a",))
    assert len({parse_functor(code, ("a",)), parse_functor(code), parse_functor(code + " ")}) == 3


@pytest.mark.cpu
def test_integer_division_and_double_literals_are_those_of_cxx() -> None:
    fn = fuser.create_jit_fn("template <typename T> T f(T x) { return 1 / 2 + x * 0.1; }")
    x = torch.tensor([math.pi, 1e10])
    assert torch.equal(fn(x), (x.double() * 0.1).float())


@pytest.mark.parametrize(
    ("body", "shortened"),
    [
        ("return exp(x);", "return fuser_brief_exp(x);"),
        ("return exp((x - y) * T(2)) ;", "return fuser_brief_exp((x - y) * T(2)) ;"),
        ("return exp(x) * (y);", ""),
        ("return exp(x) - exp(y);", ""),
        ("T z = x; return exp(z);", ""),
        ("return expm1(x);", ""),
    ],
)
def test_what_returns_an_exponential_alone_may_have_a_shorter_one(body: str, shortened: str) -> None:
    functor = parse_functor(f"template <typename T> T f(T x, T y) {{ {body} }}", ())
    text = shorten_exp(functor).text
    assert text == functor.text.replace(body, shortened or body)
    assert shorten_exp(shorten_exp(functor)).text == text
