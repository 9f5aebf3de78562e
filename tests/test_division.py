"""Integers divided by zero, and the smallest by -1, end no process; every other division is what C++ makes of it."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody uses
from cuda_emulation import run_emulated

import fuser
from fuser import codegen
from fuser.combining import Reduction
from fuser.compiler import register
from fuser.cuda.backend import compile_cubin
from fuser.cxx.division import GUARD, guard_divisions
from fuser.cxx.functor import parse_functor
from fuser.cxx.quick import OF_COUNTS, QUICK, quicken_counts, quicken_divisions
from fuser.debug import kernel_sources
from fuser.errors import CompileError
from fuser.function import Function
from fuser.graph import FusionGroup, GroupBuilder
from fuser.ops import OPS, composite_function

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
# Each a way to write a quotient or a remainder of x and y.
QUOTIENTS = {
    "operator": "x / y",
    "assignment": "z /= y",
    "macro": "HALVES(x, y)",
    "chain": "T(1) * x / y / T(1)",
    "ternary": "z /= y == T(77) ? T(77) : y",
    "comments": "x /* a / b */ / // %\n y",
    "product": "z /= 1 * y",
    "spliced": "x / \\\n y",
    "sign": "x SLASH y",
    "call": "Divided<T>()(x, y)",
    "lambda": "[=](T d) { return x / d; }(y)",
}
REMAINDERS = {"operator": "x % y", "assignment": "z %= y", "helper": "rest(x, y)"}
HEAD = """
#define HALVES(a, b) ((a) / (b))
#define SLASH /
// No operator % here.
template <typename T> struct Divided { T operator()(T x, T y) const { return x / y; } };
"""
REST = "template <typename T> T rest(T a, T b) { return a % b; }\n"


def functor(expressions: dict[str, str]) -> fuser.JitFunction:
    """Return a functor with one output per expression."""
    outputs = "".join(f", T& {name}_" for name in expressions)
    body = "".join(f" {{ T z = x; {name}_ = {text}; }}" for name, text in expressions.items())
    head = HEAD + REST if "helper" in expressions else HEAD
    text = f"{head}template <typename T> void divided(T x, T y{outputs}) {{{body} }}"
    return fuser.jit_fn(text, num_outputs=len(expressions))


def pairs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return every pair of the values that matter, and random ones."""
    info = torch.iinfo(dtype)
    torch.manual_seed(3)
    special = [value for value in (0, 1, 2, 7, info.max, info.min, -1, -2, info.min + 1) if value >= info.min]
    values = torch.cat([torch.tensor(special, dtype=dtype), torch.randint(info.min, info.max, (20,), dtype=dtype)])
    first, second = torch.meshgrid(values, values, indexing="ij")
    return first.reshape(-1), second.reshape(-1)


def quotient(a: int, b: int, dtype: torch.dtype) -> int:
    """Return what the prelude promises, wrapped to the dtype; C++ divides towards zero."""
    exact = -1 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    bits = torch.iinfo(dtype).bits
    wrapped = exact % 2**bits
    return wrapped - 2**bits if torch.iinfo(dtype).min < 0 and wrapped >= 2 ** (bits - 1) else wrapped


def remainder(a: int, b: int) -> int:
    return a if b == 0 else abs(a) % abs(b) * (-1 if a < 0 else 1)


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_all_pairs_of_integers(dtype: torch.dtype) -> None:
    x, y = pairs(dtype)
    numbers = list(zip(x.tolist(), y.tolist(), strict=True))
    quotients = [quotient(a, b, dtype) for a, b in numbers]
    for name, got in zip(QUOTIENTS, functor(QUOTIENTS)(x, y), strict=True):
        assert got.tolist() == quotients, name
    remainders = [remainder(a, b) for a, b in numbers]
    for name, got in zip(REMAINDERS, functor(REMAINDERS)(x, y), strict=True):
        assert got.tolist() == remainders, name


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
def test_other_types_divide_as_they_did(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    x, y = torch.randn(2, 999, dtype=dtype)
    if not dtype.is_complex:
        y[:3] = torch.tensor([0.0, -0.0, float("inf")])
    for name, got in zip(QUOTIENTS, functor(QUOTIENTS)(x, y), strict=True):
        rtol = 1e-6 if dtype.is_complex else 0.0
        torch.testing.assert_close(got, x / y, rtol=rtol, atol=0.0, equal_nan=True, msg=name)


@pytest.mark.cpu
def test_constants_and_constant_expressions() -> None:
    x = torch.tensor([1, 5])
    constant = fuser.jit_fn(
        "template <typename T> T constant(T x) { T a[8 / (3 - 1)] = {x / T(2), T(7 % (4 - 1)), x % T(3), T(1 / 0)};\n"
        "#if 8 / 4 == 2\n"
        "  constexpr int n = 9 / (1 + 2); return a[0] + a[1] + a[2] + a[3] + n;\n"
        "#endif\n}"
    )
    assert constant(x).tolist() == [0 + 1 + 1 - 1 + 3, 2 + 1 + 2 - 1 + 3]


@pytest.mark.cpu
def test_constants_that_are_not_captured() -> None:
    x = torch.tensor([6.0, 9.0])
    constants = fuser.jit_fn(
        "#define A 8\n#define B 4\n#define RATIO (A / B)\n"
        "enum Part { NONE = 0, HALF = 2 };\n"
        "template <typename T> T constants(T x) {\n#if RATIO == 2\n"
        "const int n = 4; constexpr float third = 3; Part e = x > T(0) ? HALF : NONE;\n"
        "auto f = [](T y) { return y / n + (7 % n) + y / third; };\n"
        "return f(x) + T(8 / e);\n#endif\n}"
    )
    assert constants(x).tolist() == [1.5 + 3 + 2 + 4, 2.25 + 3 + 3 + 4]


@pytest.mark.cpu
def test_bit_fields() -> None:
    code = """
        struct Part { int a : 7; unsigned b : 3; int halves() { a /= b - 3; return a; } };
        template <typename T> void fields(T x, T y, T& a, T& b) {
          Part part{63, 5}, parts[2] = {part, part}, *at = parts; int i = 1;
          part.a /= 1 * y; at->b %= y; parts[i - 1 + 1].a /= y; parts[0].a /= y;
          a = part.a + 100 * parts[0].a + 10000 * parts[1].a; b = at->b;
          const int before = part.a; if (part.halves() != before / 2) b = 77;
          T* both[2] = {&x, &y};
          for (auto each : both) if (y == 1) *each /= y;
        }"""
    y = torch.tensor([4, 0, -1, 2])
    a, b = fuser.jit_fn(code, num_outputs=2)(y, y)
    assert a.tolist() == [10101 * quotient for quotient in (15, -1, -63, 31)]
    assert b.tolist() == [1, 5, 0, 1]


@pytest.mark.cpu
def test_integers_of_128_bits() -> None:
    # NVRTC has none.
    code = """
        template <typename T> void wide(T x, T y, T& quotient, T& rest) {
        #ifdef __SIZEOF_INT128__
          __int128 z = __int128(x) << 64; quotient = T((z / y) >> 64); z %= y; rest = T(z);
        #else
          quotient = x / y; rest = x % y;
        #endif
        }"""
    x, y = torch.tensor([9, 9, -(2**63), 7]), torch.tensor([4, 0, -1, 2])
    quotient, rest = fuser.jit_fn(code, num_outputs=2)(x, y)
    assert quotient.tolist() == [2, -1, -(2**63), 3]
    assert rest.tolist() == [0, 0, 0, 0]


def test_what_is_safe_is_left_as_it_is() -> None:
    def guarded(body: str) -> str:
        return guard_divisions(parse_functor(f"template <typename T> T f(T x, T y) {{ {body} }}")).text

    for safe in ("x / 2", "x % 0x10u", "x / 2.0f", "x / .5", "x / 0.0", "x / 1e3", "x /* / y */ * y", "'/' + x"):
        assert GUARD not in guarded(f"return {safe};")
    for unsafe in ("x / 0", "x % 0x0u", "x / -1", "x / y", "x / 00", "x % (2)"):
        assert guarded(f"return {unsafe};").count(GUARD) == 1
    own = "struct S { int v; }; int operator/(S a, S b) { return a.v / b.v; }\n"
    text = own + "template <typename T> T f(T x) { return x / T(S{4} / S{2}); }"
    assert guard_divisions(parse_functor(text)).text == text


@pytest.mark.cpu
def test_errors_show_the_place_in_the_users_text() -> None:
    wrong = fuser.jit_fn("template <typename T> T wrong(T x, T y) {\n  T z = x / y; return z % y / missing;\n}")
    with pytest.raises(CompileError, match="line 2, column 31") as raised:
        wrong(torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.int64))
    assert GUARD not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "quick"),
    [
        ("T f(T x) { return T(1) / (x + x); }", "T(1) /fuser_by<true>(fuser_how)/ (x + x)"),
        ("T f(T x) { return -1 / x; }", "-1 /fuser_by<false>(fuser_how)/ x"),
        ("T f(T x, T y) { T z = 2 - 1 / x; return z / y; }", "1 /fuser_by<false>(fuser_how)/ x; return z /fuser_by<"),
        (
            "void f(T x, T& y) { y = x / x; }",
            "f(fuser_D& fuser_how, T x, T& y) { y = x /fuser_by<false>(fuser_how)/ x; }",
        ),
        ("T f(T x, T y = T(2)) { return y / x; }", "f(fuser_D& fuser_how, T x, T y = T(2)) { return y /fuser_by<"),
        ("T f(T x, T y = 1 / T(M_E)) { return x / y; }", "f(fuser_D& fuser_how, T x, T y = 1 / T(M_E)) { return x /f"),
        ("T f(T x, T y = 1 / T(M_E)) { return x * y; }", ""),
        ("T f(T x) { return x / 2 + x / T(3); }", ""),
        ("T f(T x) { return x > 0 ? f(x / x) : x; }", ""),
        ("T f(T x) { return [=](T d) { return x / d; }(x); }", ""),
        ("T f(T x) { constexpr int a = 4; return x / a; }", ""),
        ("T g(T x) { return 1 / x; } template <typename T> T f(T x) { return g(x) / x; }", ""),
        ("T f(T x) { return x * x; }", ""),
        ("auto f(T x, T y) -> decltype(x / y) { return x / y; }", ""),
        ("T f(T x, T y) noexcept(true) { return x / y; }", ""),
        ("using U = T; template <typename T> T f(T x, T y) { U<T> q = x / y; return q; }", ""),
        ("T g(T x); template <typename T> T f(T x, T y) { return x / y; }", ""),
    ],
)
def test_plain_functors_divide_as_they_are_told(text: str, quick: str) -> None:
    functor = parse_functor(f"template <typename T> {text}")
    found = quicken_divisions(functor)
    assert quick in found.text
    assert (found is functor) == (not quick)
    assert (QUICK in found.words) == bool(quick)


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    "text",
    [
        "T f(T x, T y = T(2)) { return y / x; }",
        "T f(T x, double scale, T y = T(M_PI) / T(M_E), int n = -128) { return x / scale + n / y; }",
        "void f(T x, T& low, T& high, T y = T(2)) { low = y / x; high = x / y; }",
    ],
)
def test_functors_with_default_values_divide_on_cuda(text: str) -> None:
    outputs = 2 if "T&" in text else 1
    functor = fuser.jit_fn(f"template <typename T> {text}", num_outputs=outputs, scalars=["scale"] * ("scale" in text))
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        functor.check(device="cuda", dtype=dtype)


@pytest.mark.parametrize(
    ("body", "quick"),
    [
        ("c = n + n2; a = m + (m2 - m) * (c > 0 ? n2 / c : T(0));", "n2 /fuser_of/ c"),
        ("c = n + n2; T f = n / c; a = f * m + n2 / c * m2;", "T f = n /fuser_of/ c; a = f * m + n2 /fuser_of/ c * m2"),
        ("c = n + n2; a = m - n2 / c - m / c;", "a = m - n2 /fuser_of/ c - m / c"),
        # The other part may be of nothing.
        ("c = n + n2; a = n2 / n;", ""),
        # Not all of what is divided, or what divides.
        ("c = n + n2; a = m + (m2 - m) * n2 / c;", ""),
        ("c = n + n2; a = m / n / c;", ""),
        ("c = n + n2; a = T(n2) / c;", ""),
        ("c = n + n2; T c2 = c + 1; a = m + (m2 - m) * (n2 / c2);", ""),
        # Not yet a number.
        ("a = n / c; c = n + n2;", ""),
    ],
)
def test_numbers_of_elements_divide_without_a_branch(body: str, quick: str) -> None:
    functor = parse_functor(
        f"template <typename T> void f(T m, T n, T m2, T n2, T& a, T& c) {{ {body} }}", num_outputs=2
    )
    found = quicken_counts(functor, frozenset({"n", "n2", "c"}))
    assert quick in found.text
    assert (found is functor) == (not quick)
    assert (OF_COUNTS in found.words) == bool(quick)
    assert quicken_counts(functor, frozenset()) is functor


@pytest.mark.cuda
def test_quick_divisions_are_divisions() -> None:
    """Every float's inverse; quotients of any bits, of close exponents, by many ones, in the middle of two floats."""
    inverse = fuser.jit_fn("template <typename T> T inverse(T x) { return T(1) / x; }")
    quotient = fuser.jit_fn("template <typename T> T quotient(T x, T y) { return x / y; }")

    def differ(found: torch.Tensor, wanted: torch.Tensor) -> int:
        return int(((found.view(torch.int32) != wanted.view(torch.int32)) & ~(found.isnan() & wanted.isnan())).sum())

    for chunk in range(-16, 16):
        words = torch.arange(chunk << 27, (chunk + 1) << 27, device="cuda").to(torch.int32).view(torch.float32)
        assert not differ(inverse(words), 1 / words)
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (1 << 26,), device="cuda", generator=generator).to(torch.int32)

    for kind in range(8):
        x, y = (draw(-(2**31), 2**31) for _ in range(2))
        if kind % 4 == 1:
            x, y = (item & ~0x7F800000 | draw(100, 150) << 23 for item in (x, y))
        elif kind % 4 == 2:
            y |= 0x7FFF00
        elif kind % 4 == 3:
            middle = (x & 0x7FFFFF | 0x3F800000).view(torch.float32).double() + 2.0**-24
            y = y & 0x7FFFFF | 0x3F800000
            x = (middle * y.view(torch.float32)).float().view(torch.int32) + draw(-1, 2)
        assert not differ(
            quotient(x.view(torch.float32), y.view(torch.float32)), x.view(torch.float32) / y.view(torch.float32)
        )
    special = [0.0, 1.0, math.inf, math.nan, 1e-45, 2.0**-126, 2.0**126, 3.4e38, 255.0]
    x = torch.tensor([sign * item for item in special for sign in (1, -1)], device="cuda")
    pairs = torch.cartesian_prod(x, x).t().contiguous()
    wanted = torch.div(*pairs)
    assert not differ(quotient(*pairs), wanted)
    # What is divided again is read again, before anything is written there.
    assert not differ(quotient(*pairs, out=pairs[0]), wanted)


@pytest.mark.nvrtc
def test_quick_divisions_leave_room_for_as_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "template <typename T> T shares(T a, T b, T c) { return a / b + b / (c * c + T(1)) + c / (a * a + T(2)); }"
    group = fuser.create_jit_fn(text).spec(3).group
    inputs = [torch.empty(1 << 20, dtype=torch.bfloat16, device="meta")] * 3

    def count_registers() -> int:
        (source,) = kernel_sources(register(group), inputs, "cuda")
        written = io.StringIO()
        compile_cubin(source, "sm_90", written)
        return int(re.findall(r"Used (\d+) registers", written.getvalue())[0])

    quick = count_registers()
    monkeypatch.setattr(codegen, "quicken_divisions", lambda functor: functor)
    assert quick <= count_registers() + 4


def hard_pairs(rows: int, length: int, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw what is divided, and by what: a share of both are zeros, denormal, huge, infinite or no numbers."""
    special = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 2.0**-126, 3e38, -(2.0**127), math.inf, -math.inf, math.nan])
    x, y = torch.randn(2, rows, length)
    for item in (x, y):
        places = torch.rand(rows, length) < share
        item[places] = special[torch.randint(len(special), (int(places.sum()),))]
    return x, y


@pytest.mark.cpu
@pytest.mark.parametrize("order", ["", "sum"])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.3])
def test_rows_divide_again_what_was_not_exact(order: str, share: float) -> None:
    """A CUDA kernel that adds quotients, on the CPU, against one that adds what the CPU has divided."""
    value = Function(parse_functor("template <typename T> T value(T x) { return x; }"))
    add = parse_functor("template <typename T> T add(T a, T b) { return a + b; }")
    total = replace(value, reduction=Reduction(add, (0.0,), dims=(-1,), order=order))
    divided, given = GroupBuilder(), GroupBuilder()
    x = divided.add_input("x")
    (quotient,) = divided.apply(OPS["div"].function, [x, divided.add_input("y")])
    group = divided.build([quotient, *divided.apply(total, [quotient])])
    plain = given.build(given.apply(total, [given.add_input("q")]))
    torch.manual_seed(0)
    for rows, length in ((3, 1024), (5, 999), (2, 20000)):
        x, y = hard_pairs(rows, length, share)
        quotients, sums = run_emulated(group, [x, y])
        (wanted,) = run_emulated(plain, [x / y])
        assert torch.equal(torch.nan_to_num(quotients, 7.0), torch.nan_to_num(x / y, 7.0))
        assert torch.equal(torch.nan_to_num(sums, 7.0), torch.nan_to_num(wanted, 7.0))


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_kept_is_divided_again(dtype: torch.dtype) -> None:
    """What passes keep of elements is written anew where a division was not exact: a softmax of quotients."""
    builder = GroupBuilder()
    values = builder.apply(OPS["silu"].function, [builder.add_input("x")])
    group = builder.build(builder.apply(composite_function("_softmax", (1,)), values))
    torch.manual_seed(0)
    for rows, length in ((64, 512), (5, 2048)):
        x = hard_pairs(rows, length, 0.001)[0].to(dtype)
        (got,) = run_emulated(group, [x])
        wanted = torch.softmax(F.silu(x.float()), -1)
        assert 0 < wanted.isnan().sum() < wanted.numel()
        assert torch.equal(got.isnan(), wanted.isnan())
        torch.testing.assert_close(got.float(), wanted, rtol=2e-2, atol=2e-2, equal_nan=True)


@pytest.mark.cpu
def test_what_a_whole_row_divides_hides_no_other_division() -> None:
    """Where a thread asks once for all that a softmax of one's own divides, a division behind it asks for itself."""
    text = "template <typename T> T {}"
    value = Function(parse_functor(text.format("value(T x) { return x; }")))
    power = Function(parse_functor(text.format("power(T x, T top) { return exp(x - top); }")))
    share = Function(parse_functor(text.format("share(T e, T sum) { return e / sum; }")))
    add = parse_functor(text.format("add(T a, T b) { return a + b; }"))
    largest = parse_functor(text.format("largest(T a, T b) { return fmax(a, b); }"))
    total, top = (
        replace(value, reduction=Reduction(combine, (identity,), dims=(-1,), keepdim=True))
        for combine, identity in ((add, 0.0), (largest, -math.inf))
    )

    def softmax(*, is_divided: bool) -> FusionGroup:
        builder = GroupBuilder()
        x, *others = (builder.add_input(name) for name in ("x", "y")[: 1 + is_divided])
        powers = builder.apply(power, [x, *builder.apply(top, [x])])
        made = builder.apply(share, [*powers, *builder.apply(total, powers)])
        return builder.build(builder.apply(OPS["div"].function, [*made, *others]) if is_divided else made)

    torch.manual_seed(0)
    x, y = torch.randn(3, 4096).bfloat16(), hard_pairs(3, 4096, 0.01)[1].bfloat16()
    # Each thread has as many elements as one of a long row.
    tuning = {"block": 64, "team": 64, "unroll": 8}
    (shares,) = run_emulated(softmax(is_divided=False), [x], **tuning)
    (made,) = run_emulated(softmax(is_divided=True), [x, y], **tuning)
    assert torch.equal(made.nan_to_num(7.0), (shares / y).nan_to_num(7.0))


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_counts_need_not_divide_as_functors_do(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Where elements are divided, what counts them may count plainly: a rms_norm of rows of odd length."""
    torch.manual_seed(0)
    for rows, length in ((7, 777), (5, 1000)):
        builder = GroupBuilder()
        x, y, eps = builder.add_input("x"), builder.add_input("y"), builder.add_input("eps", is_scalar=True)
        values = builder.apply(OPS["mul"].function, [*builder.apply(OPS["silu"].function, [x]), y])
        values = builder.apply(composite_function("_fused_rms_norm", ((length,), False, True, True)), values, [eps])
        group = builder.build(builder.apply(OPS["div"].function, [*values, y]))
        given = [*(item.to(dtype) for item in hard_pairs(rows, length, 0.002)), 1e-6]
        (made,) = run_emulated(group, given)
        with monkeypatch.context() as plainly:
            plainly.setattr(codegen, "quicken_divisions", lambda functor: functor)
            (wanted,) = run_emulated(group, given)
        assert torch.equal(made.nan_to_num(7.0), wanted.nan_to_num(7.0))


# Pointwise divisions before, after and between torch's reductions.
DIVIDING: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": lambda x, y: (x / y).sum(-1),
    "mean": lambda x, y: x / y - (x / y).mean(-1, keepdim=True),
    "largest": lambda x, y: (x / y).amax(-1, keepdim=True) - F.silu(x),
    "softmax": lambda x, y: torch.sigmoid(y) * torch.softmax(F.silu(x), -1),
    "layer_norm": lambda x, y: F.silu(F.layer_norm(x / y, x.shape[1:])),
    "rms_norm": lambda x, y: F.rms_norm(F.silu(x) * y, x.shape[1:]) / y,
    "group_norm": lambda x, y: F.silu(F.group_norm((x / y)[:, None], 1)),
}


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", DIVIDING)
def test_rows_divide_as_torch_does(name: str, dtype: torch.dtype) -> None:
    fuser.reset_stats()
    torch.manual_seed(1)
    fused = fuser.fuse(DIVIDING[name])
    for rows, length in ((64, 512), (33, 4096), (7, 777), (5, 40000), (2, 131072)):
        for share in (0.0, 0.01):
            x, y = (item.cuda().to(dtype) for item in hard_pairs(rows, length, share))
            got, wanted = fused(x, y), DIVIDING[name](x, y)
            assert torch.equal(got.isnan(), wanted.isnan()), (rows, length, share)
            assert torch.equal(got.nan_to_num(7.0), wanted.nan_to_num(7.0)), (rows, length, share)
    assert not [reason for reason in fuser.stats()["fallbacks"] if "does not compile" in reason]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", DIVIDING)
def test_gradients_of_rows_divide_as_torchs_do(name: str, dtype: torch.dtype) -> None:
    fuser.reset_stats()
    torch.manual_seed(2)
    fused = fuser.fuse(DIVIDING[name])
    for rows, length in ((64, 512), (33, 4096), (7, 777), (4, 40000)):
        x, y = torch.randn(2, rows, length, device="cuda").to(dtype)
        made = []
        for function in (fused, DIVIDING[name]):
            torch.manual_seed(3)
            leaf = x.detach().requires_grad_()
            result = function(leaf, y)
            made += torch.autograd.grad(result, leaf, torch.randn_like(result))
        assert torch.equal(made[0].isnan(), made[1].isnan()), (rows, length)
        assert torch.equal(made[0].nan_to_num(7.0), made[1].nan_to_num(7.0)), (rows, length)
    assert not [reason for reason in fuser.stats()["fallbacks"] if "does not compile" in reason]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_cuda_divides_alike_where_cpp_says_how(dtype: torch.dtype) -> None:
    x, y = pairs(dtype)
    lowest = torch.iinfo(dtype).min
    is_defined = (y != 0) & ~((x == lowest) & (y == (-1 if lowest else 0)))
    for expressions in (QUOTIENTS, REMAINDERS):
        run = functor(expressions)
        for mine, theirs in zip(run(x.cuda(), y.cuda()), run(x, y), strict=True):
            assert torch.equal(mine.cpu()[is_defined], theirs[is_defined])
