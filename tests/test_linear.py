"""Which texts and groups pass sums on: what is not certainly linear never counts as linear."""

from __future__ import annotations

import pytest
import torch

import fuser
from fuser.cxx.functor import parse_functor
from fuser.graph import FusionGroup
from fuser.linear import follow_sums, is_sum


def group_of(text: str, outputs: int = 1, *scalars: str, **options: object) -> FusionGroup:
    function = fuser.jit_fn(text, num_outputs=outputs, scalars=scalars, **options)  # type: ignore[arg-type]
    return function.spec(len(function.function.functor.tensors)).group


def follow(text: str, summed: set[int], outputs: int = 1, *scalars: str, **options: object) -> tuple[bool, ...]:
    """Return which outputs depend on some inputs; nothing where the functor is not linear in them."""
    return follow_sums(group_of(text, outputs, *scalars, **options), frozenset(summed))[0]


T = "template <typename T> T f"
TWO = "template <typename T> void f(T x, T& a, T& b)"
PAIR = "struct Pair { float u; float v; };"
REF = "struct Ref { float& r; float set(float v) { r = v; return v; } };"
LINEAR = {
    "itself": (f"{T}(T x) {{ return x; }}", {0}),
    "sum": (f"{T}(T x, T y) {{ return x + y; }}", {0, 1}),
    "difference": (f"{T}(T x, T y) {{ return -x - y; }}", {0, 1}),
    "scaled": (f"{T}(T x, T c) {{ return 3 * x * exp(c) / (c + 1); }}", {0}),
    "second": (f"{T}(T c, T x) {{ return c * x; }}", {1}),
    "steps": (f"{T}(T x, T y) {{ T s = x; s += y; T t = T(2) * s; s = t - x; return s; }}", {0, 1}),
    "automatic": (f"{T}(T x) {{ auto s = T(2) * x; return static_cast<T>(s); }}", {0}),
    "written": ("template <typename T> void f(T x, T& y) { y = x / T(3); }", {0}),
    "chosen by others": (f"{T}(T x, T c) {{ T w = c > T(0) ? T(1) : c; return w * x; }}", {0}),
    "numbers beside it": (
        f"{T}(T x, T c) {{ const T k[2] = {{T(1), c}}; auto n = 2 * exp(c); return n * x * k[1]; }}",
        {0},
    ),
    "loop beside it": (f"{T}(T x, T c) {{ return x * fmax(c, T(1)); }}", {0}),
}
NOT_LINEAR = {
    "constant": (f"{T}(T x) {{ return x + T(1); }}", {0}),
    "other": (f"{T}(T x, T y) {{ return x + y; }}", {0}),
    "product": (f"{T}(T x, T y) {{ return x * y; }}", {0, 1}),
    "square": (f"{T}(T x) {{ return x * x; }}", {0}),
    "quotient": (f"{T}(T x, T y) {{ return x / y; }}", {0, 1}),
    "reciprocal": (f"{T}(T x) {{ return T(1) / x; }}", {0}),
    "remainder": (f"{T}(T x, T y) {{ return fmod(x, y); }}", {0}),
    "function": (f"{T}(T x) {{ return fabs(x); }}", {0}),
    "own function": (f"template <typename T> T g(T x) {{ return x * x; }} {T}(T x) {{ return g(x); }}", {0}),
    "branch": (f"{T}(T x) {{ return x > T(0) ? x : T(0); }}", {0}),
    "statement": (f"{T}(T x, T c) {{ if (c > T(0)) return x; return x * c; }}", {0}),
    "loop": (f"{T}(T x) {{ for (int i = 0; i < 3; ++i) x = x + x; return x; }}", {0}),
    "integer cast": (f"{T}(T x) {{ return T(int(x)); }}", {0}),
    "integer variable": (f"{T}(T x) {{ int n = x; return n; }}", {0}),
    "integer later": (f"{T}(T x) {{ int n = 0; n = x; return n; }}", {0}),
    "integer result": ("template <typename T> int f(T x) { return x; }", {0}),
    "integer parameter": ("template <typename T> T f(int x, T y) { return x * y; }", {0}),
    "hidden assignment": (f"{T}(T x, T y) {{ T z = y; T w = (z = x) * 0; return y * z * x; }}", {0}),
    "hidden increment": (f"{T}(T x) {{ T z = T(0); return x * z++; }}", {0}),
    "constant added": (f"{T}(T x) {{ T s = T(1); s += x; return s; }}", {0}),
    "lambda": (f"{T}(T x) {{ auto g = [&](T y) {{ return y * x; }}; return g(T(2)); }}", {0}),
    "reference": (f"{TWO} {{ T& r = a; a = x; b = x; r = T(3); }}", {0}),
    "constant reference": (f"{TWO} {{ T z = T(1); const T& r = z; z = x; a = x; b = r; }}", {0}),
    "reference of its own kind": (f"using R = float&; {TWO} {{ R r = a; a = x; b = x; r = 3.0f; }}", {0}),
    "rvalue reference": (f"{TWO} {{ auto&& r = a; a = x; b = x; r = T(3); }}", {0}),
    "pointer": (f"{TWO} {{ T* p = &a; a = x; b = T(2) * (*p) * x; }}", {0}),
    "automatic pointer": (f"{TWO} {{ auto p = &a; a = x; b = *p; }}", {0}),
    "bound names": (f"{PAIR} {TWO} {{ Pair s = {{1, 2}}; auto& [u, v] = s; a = x; b = x * u; }}", {0}),
    "object": (f"{REF} {TWO} {{ Ref r = {{a}}; a = x; float z = r.set(3); b = x; }}", {0}),
    "made object": (f"{REF} {TWO} {{ auto r = Ref{{a}}; a = x; float z = r.set(3); b = x; }}", {0}),
    "given object": (
        f"{REF} Ref g(float& v) {{ return {{v}}; }} {TWO} {{ auto r = g(a); a = x; T z = r.set(3); b = x; }}",
        {0},
    ),
    "bits": (f"{T}(T x) {{ return reinterpret_cast<T&>(x); }}", {0}),
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear_texts(name: str) -> None:
    text, summed = LINEAR[name]
    assert follow(text, summed) == (True,)


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_other_texts(name: str) -> None:
    text, summed = NOT_LINEAR[name]
    assert follow(text, summed, 2 if TWO in text else 1) == ()


def test_outputs_that_depend_on_nothing_are_told_apart() -> None:
    text = "template <typename T> void f(T x, T c, T& y, T& z) { y = c * x; z = c + T(1); }"
    assert follow(text, {0}, 2) == (True, False)
    assert follow(text, set(), 2) == (False, False)


def test_a_dtype_that_rounds_to_integers_is_not_linear() -> None:
    text = f"{T}(T x) {{ return x; }}"
    assert follow(text, {0}, out_dtypes=torch.bfloat16) == (True,)
    assert follow(text, {0}, out_dtypes=torch.int32) == ()


def test_a_scalar_that_depends_on_a_sum_is_not_linear() -> None:
    assert follow(f"{T}(T x, T a) {{ return a * x; }}", {0}, 1, "a") == (True,)
    assert follow(f"{T}(T x, T a) {{ return a * x; }}", {1}, 1, "a") == ()


@pytest.mark.parametrize(
    ("function", "obstacle"),
    [
        (lambda x, y: (x + y) * 2 - y / 3, None),
        (lambda x, y: torch.add(x, y, alpha=2).neg(), None),
        (lambda x, y: torch.relu(x + y), "relu"),
        (lambda x, y: (x - y) * y, "mul"),
        (lambda x, y: (x - y + 1) * 2, "add"),
        (lambda x, y: torch.where(x > 0, x, y), "gt"),
    ],
)
def test_ops_of_torch_are_read_as_their_texts(function: object, obstacle: str | None) -> None:
    fused = fuser.fuse(function)  # type: ignore[call-overload]
    fused.graph_for([torch.empty(3, device="meta"), torch.empty(3, device="meta")])
    (group,) = fused.groups
    tensors = frozenset(slot for slot, item in enumerate(group.inputs) if not item.is_scalar and item.default is None)
    outputs, found = follow_sums(group, tensors)
    assert (None if found < 0 else group.applications[found].function.op) == obstacle
    assert bool(outputs) == (obstacle is None)


def test_what_an_entry_with_outputs_returns_is_nobodys() -> None:
    assert follow("template <typename T> T f(T x, T& a) { a = x * 2; return 1; }", {0}) == (True,)


@pytest.mark.parametrize(
    ("text", "count", "expected"),
    [
        ("T f(T a, T b) { return a + b; }", 1, True),
        ("T f(T a, T b) { return b + a; }", 1, True),
        ("void f(T a, T b, T& r) { r = b + a; }", 1, True),
        ("void f(T a, T i, T b, T j, T& r, T& k) { k = i + j; r = a + b; }", 2, True),
        ("T f(T a, T b) { return a + a; }", 1, False),
        ("T f(T a, T b) { return a - b; }", 1, False),
        ("T f(T a, T b) { T c = a; return c + b; }", 1, False),
        ("void f(T a, T i, T b, T j, T& r, T& k) { r = a + b; k = i * j; }", 2, False),
        ("void f(T a, T i, T b, T j, T& r, T& k) { r = a + j; k = i + b; }", 2, False),
        ("void f(T a, T i, T b, T j, T& r, T& k) { r = a + b; }", 2, False),
    ],
)
def test_what_is_a_sum(text: str, count: int, expected: bool) -> None:
    assert is_sum(parse_functor(f"template <typename T> {text}", (), count)) is expected
