"""Small functors, one per construct of C++ that the eager version follows: table of tests/test_eager.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

import fuser

FLOATS = (torch.float64, torch.float32, torch.bfloat16)
INTS = (torch.int32, torch.int64, torch.int8, torch.uint8)


@dataclass(frozen=True)
class Construct:
    """One functor that uses one construct; arithmetic only, so that its eager version has the kernel's bits."""

    name: str
    code: str
    tensors: int = 1
    outputs: int = 1
    scalars: dict[str, Any] = field(default_factory=dict)
    dtypes: tuple[torch.dtype, ...] = FLOATS
    domain: tuple[float, float] = (-4.0, 4.0)
    # Whether every input is fine: none is cast to an integer that cannot hold it, none fails an assertion or loops on.
    is_total: bool = True
    # Whether the eager version is a graph.
    is_graph: bool = True
    # Most nodes the graph may have, placeholders and output among them.
    nodes: int = 60

    def build(self) -> fuser.JitFunction:
        """Return a new JitFunction."""
        return fuser.jit_fn(self.code, num_outputs=self.outputs, scalars=self.scalars)

    def __str__(self) -> str:
        return self.name


def one(name: str, body: str, before: str = "", **options: Any) -> Construct:
    """Return a functor of x with the given body."""
    return Construct(name, f"{before}\ntemplate <typename T> T f(T x) {{ {body} }}", **options)


CONSTRUCTS: tuple[Construct, ...] = (
    # Types and literals
    one("half_is_double", "return x * 0.1;"),
    one("half_as_t", "return x * T(0.1);"),
    one("integer_quotient", "return x + 1 / 2 + 7 / 2 + -7 / 2 + -7 % 3;"),
    one("literals", "return x + 0x1p-3 + 1.5f + 1e-2 + 0b101 + 017 + 0xffu + 1'000 + 10ull + 'a' + true;"),
    one("unsigned_wraps", "unsigned u = 3; u = u - 5; return x + T(u > 100u) + T(u % 7u);"),
    one("unsigned_long", "unsigned long long u = 0; u -= 1; return T(u / 3ull % 1000ull) + x;"),
    one("compare_signs", "return (-1 < 1u) ? x : -x;"),
    one("short_wraps", "short s = 32767; s += 1; char c = 200; return x + T(s) + T(c);"),
    one("promotion", "return x + x * x;", dtypes=INTS),
    one("narrow_store", "T y = x * T(3); return y / T(2);", dtypes=INTS),
    one("two_declarations", "if (T a = x + T(1); T b = a * T(2)) return b + a; return T(0);"),
    one("field_in_braces", "struct S { int v{3}; int w = 2; }; S s; return x * T(s.v) + T(s.w);"),
    one("comment_before_comma", "T y = x /* a */ + T(1); return (y /* b */, y * T(3));"),
    one("bool_arithmetic", "bool b = x > T(0); return T(b + b) + T(b) * x;"),
    one("casts", "return T((int)x) + static_cast<T>(int(x * T(2))) + (T)-x + (T)(x) * 2 + T{x};", is_total=False),
    one("cast_before_minus", "return T(1) + (T)-x * x;"),
    one("parentheses", "return (x) - (x) * (x) + (x)-T(1);"),
    one(
        "values_taken_for_types",
        "T v[2] = {x, T(2)}; int i = 1; auto l = [](T a) { return a * 3; }; "
        "bool b = (x) < T(3) && (x) > T(-3), c = (x) && x > T(0) || (i) && (v[i & 1]) <= (v[(i & 0)]) && b; "
        "return (std::fabs(x)) - (x) * 3 + (l)(x) + (n::k) + (n::twice(x)) - (T(b)) * 2 + (v[i & i]) - (T(c));",
        "namespace n { constexpr int k = 4; template <typename T> T twice(T x) { return x * 2; } }",
    ),
    one(
        "keywords_that_convert",
        "if (unsigned(x > T(0)) > 0u) return (short(70000)) + (long{1}) * x; unsigned long (n) = 3; "
        "return T(U (2) - 3 > (unsigned/**/(n))) - (signed(n) % 2) * x;",
        "#define U unsigned",
    ),
    one("alias", "using U = T; typedef T V; U a = x; V b = a; return a + b;"),
    one("auto_type", "auto a = x * 2; auto b = 1 / 2; const auto& c = a; return T(a + b + c);"),
    one("decltype_cast", "return decltype(x)(3) * x + T(decltype(x * 2.0){0.5} / 3) + decltype(x)();"),
    one("typename_cast", "return typename std::remove_cv<T>::type(3) * x;"),
    one(
        "decltype_of_parameters",
        "P p{2.f}; auto scaled = [x](auto a) -> decltype(a + x) { return a * x / 4; }; "
        "return T(add(x, 1) + add(1, 2) / 2 + third(p)) + third(1.0f) * x + T(third(1.0)) "
        "+ T(raised(x, 3) + scaled(2));",
        "struct P { float a; }; template <typename A, typename B> auto add(A a, B b) "
        "-> decltype(a + b) { return a + b; } "
        "inline auto third(float a) -> decltype(a) { return a / 3; } "
        "inline auto third(double a) -> decltype(a) { return a / 3; } "
        "template <typename Q> auto third(Q q) -> decltype(q.a * 1.0) { return q.a / 3.0; } "
        "template <typename A> auto raised(A a, int n) -> decltype(a * n) { "
        "return n == 0 ? a * 1 : raised(a, n - 1) * a; }",
    ),
    one("decltype_type", "decltype(x * 2.0) a = x; return T(a / 3);"),
    one("sizes", "return x + T(sizeof(T)) + T(sizeof(int)) + sizeof x * T(2) + T(sizeof(double) == 8);"),
    one("conditional_type", "std::conditional_t<sizeof(T) == 4, float, double> a = x; return T(a / 3);"),
    one(
        "traits",
        "if constexpr (std::is_same<T, double>::value) return x / 3; else return x * (std::is_integral_v<T> ? "
        "5 : 7);",
    ),
    one("size_type", "size_t n = 3; int64_t m = -1; return x + T(n * 2) + T(m / 2 - 1);"),
    # Operators
    one("bit_operators", "return (x & T(12)) | (x ^ T(5)) | ~x;", dtypes=INTS),
    one("shifts", "return (x << 2) + (x >> 1);", dtypes=(torch.int32, torch.int64), domain=(-50, 50)),
    one("unsigned_shift", "unsigned u = (unsigned)x; return T((u >> 3) + (u << 30 >> 2));", dtypes=(torch.int32,)),
    one("modulo", "return x % T(3) + x / T(3);", dtypes=INTS, domain=(-20, 20)),
    one("logic", "return T(x > T(0) && x < T(2)) + T(x < T(-1) || !(x < T(1)));"),
    one("comma", "T y = T(0); y = x, y += T(1); return (y, y * T(2));"),
    one("comma_in_brackets", "T r[2] = {x, x + T(1)}; int i = 0; return r[i = 0, 1] + r[i++, i];"),
    one("steps_of_one", "int i = 2; int a = i++ + ++i; int b = i-- - --i; return x + T(a * 10 + b);"),
    one("compound", "T y = x; y += T(1); y -= T(0.5); y *= T(3); y /= T(4); return y;"),
    one("compound_double", "T y = x; y *= 0.1; y += 1; return y;"),
    one(
        "compound_bits",
        "T y = x; y |= T(8); y &= T(13); y ^= T(3); y <<= 1; y >>= 2; y %= T(5); return y;",
        dtypes=INTS,
    ),
    one("chain", "T a, b, c; a = b = c = x * T(2); return a + b + c;"),
    one("ternary", "return x > T(1) ? x : x < T(-1) ? -x : T(0.25);"),
    one("ternary_expected", "return __builtin_expect(!!(x > T(1)), 1) ? x : T(sizeof(__builtin_expect(1, 0)));"),
    one("ternary_types", "return x > T(0) ? 1 : 2.5;"),
    one("ternary_constant", "return x / (sizeof(T) > 1 ? 2 : 2.5f);"),
    one("assignment_value", "T y; if ((y = x + T(1)) > T(0)) return y; return -y;"),
    one("less_and_greater", "T a = x, b = x + T(1), c = x; return T(a < b && c > (a)) + T(a < b) + T(c > (b));"),
    one("unary_plus", "return +x - -x;"),
    # Branches
    one("if_else", "T y; if (x > T(0)) y = x * T(2); else y = x - T(1); return y;"),
    one(
        "if_chain",
        "if (x > T(2)) return T(2); else if (x > T(0)) return x; else if (x > T(-2)) return -x; return T(9);",
    ),
    one("early_return", "if (x < T(0)) return T(-1); if (x < T(1)) return T(0); T y = x * x; return y;"),
    one("nested_if", "T y = x; if (x > T(0)) { if (x > T(2)) { y = T(7); return y; } y += T(1); } return y * T(2);"),
    one("if_declares", "if (T y = x - T(1); y > T(0)) return y; else return -y;"),
    one("swap_in_branch", "T a = x, b = T(1); if (a > b) { T t = a; a = b; b = t; } return a - b * T(3);"),
    one(
        "switch_returns",
        "switch (int(x) % 3) { case 0: return x; case 1: return x * T(2); case -1: return T(5); default: "
        "return -x; }",
    ),
    one(
        "switch_breaks",
        "T y = x; switch (int(x)) { case 0: y = T(1); break; case 1: case 2: y = T(2); break; default: y = "
        "T(3); } return y;",
    ),
    one(
        "switch_falls",
        "T y = T(0); switch (int(x)) { case 3: y += T(1); case 2: y += T(2); case 1: y += T(4); break; case "
        "-1: y = T(9); default: y += T(20); } return y;",
    ),
    one(
        "switch_default_first",
        "T y = T(0); switch (int(x)) { default: y += T(1); case 1: y += T(2); break; case 2: y = T(5); } "
        "return y;",
    ),
    one(
        "switch_constant",
        "T y = x; switch (sizeof(int)) { case 2: y = T(0); break; case 4: y += T(1); case 5: y += T(1); break; "
        "case 8: y = T(0); } return y;",
    ),
    one(
        "enum_spellings",
        "return x * T(Kind::EVEN + ODD) + T(int(K::x) * int(L::x));",
        "enum Kind { EVEN = 2UL, ODD = 0X1B }; enum struct K { x = 3 }; enum class L { x = 5 };",
    ),
    one(
        "enum_below_zero",
        "Sign s = x > T(0) ? Sign::P : Sign::N; return x * T(int(s)) + T(LOW) + T(NEXT < 0u);",
        "enum class Sign : int { N = -1, P = 1 }; enum { LOW = -0x10, NEXT };",
    ),
    one("enum_hides_nothing", "enum class K { x = 3 }; enum struct L { x = 5 }; return x * T(int(K::x) * int(L::x));"),
    one(
        "enum_values",
        "switch (int(x) & 1) { case EVEN: return x; default: return T(ODD + 4); }",
        "enum Kind { EVEN, ODD };",
    ),
    # Loops
    one("for_loop", "T s = T(0); for (int i = 1; i <= 5; ++i) s = s * x + T(i); return s;"),
    one("for_without", "T s = x; int i = 0; for (;;) { if (i >= 4) break; s += T(i); ++i; } return s;"),
    one("two_counters", "T s = T(0); for (int i = 0, j = 5; i < j; i++, --j) s += x * T(i * j); return s;"),
    one("while_loop", "T s = x; int n = 0; while (n < 3) { s = s * T(0.5) + x; n += 1; } return s;"),
    one("do_loop", "T s = x; int n = 3; do { s += x; --n; } while (n > 0); return s;"),
    one("do_once", "T s = x; do { s += T(1); } while (false); return s;"),
    one("breaks", "T s = T(0); for (int i = 0; i < 6; ++i) { if (s > T(5)) break; s += x + T(1); } return s;"),
    one(
        "continues",
        "T s = T(0); for (int i = 0; i < 5; ++i) { if (x > T(i) && i % 2 == 0) continue; s += x + T(i); } "
        "return s;",
    ),
    one("return_in_loop", "for (int i = 0; i < 5; ++i) if (x < T(i - 2)) return x * T(i); return T(100);"),
    one(
        "nested_loops",
        "T s = T(0); for (int i = 0; i < 3; ++i) { for (int j = 0; j < 4; ++j) { if (x < T(j)) break; s += T(i "
        "+ j); } if (s > T(9)) break; s += x; } return s;",
        nodes=90,
    ),
    one("counter_after_loop", "int i; for (i = 0; i < 6; ++i) if (x < T(i)) break; return T(i) + x;"),
    one(
        "counter_in_branch",
        "int n = 0; if (x > T(0)) { for (int i = 0; i < 3; ++i) ++n; } else n = 7; return T(n) * x;",
    ),
    one(
        "loop_bound_by_count",
        "T y = x; int n = 0; while (y > T(0.5) && n < 10) { y = y * T(0.5); ++n; } return y + T(n);",
        nodes=90,
    ),
    one(
        "loop_on_data",
        "T y = x; int n = 0; while (y > T(0.01)) { y = y * T(0.5); ++n; } return y + T(n);",
        is_graph=False,
        is_total=False,
    ),
    one("do_on_data", "T y = x; do { y = y - T(1); } while (y > T(0)); return y;", is_graph=False, is_total=False),
    one(
        "for_on_data",
        "T s = T(0); int n = int(x); for (int i = 0; i < n; ++i) { if (i == 2) continue; s += T(i) + x; } "
        "return s;",
        is_graph=False,
        is_total=False,
    ),
    one(
        "return_from_loop_on_data",
        "T y = x; while (true) { if (y < T(0)) return y; y -= T(1.5); if (y > T(2)) { y -= T(0.25); continue; "
        "} y -= T(0.5); }",
        is_graph=False,
        is_total=False,
    ),
    one(
        "range_over_array",
        "T table[3] = {T(1), x, T(3)}; T s = T(0); for (T c : table) s = s * x + c; for (auto& c : table) c += "
        "T(1); return s + table[1];",
    ),
    # Arrays and pointers
    one("table", "const T c[4] = {T(1), T(2), T(4)}; T s = T(0); for (int i = 0; i < 4; ++i) s += c[i] * x; return s;"),
    one("table_without_size", "static const double c[] = {0.1, 0.2, 0.3}; return x * c[0] + c[2] / c[1];"),
    one(
        "constexpr_table",
        "return x * T(C[1]) + T(N);",
        "constexpr double C[2] = {0.25, 0.3}; static const int N = 5;",
    ),
    one("device_constants", "return x * SCALE[1];", "__constant__ float SCALE[2] = {1.0f, 0.3f};"),
    one("matrix", "T m[2][3] = {{T(1), T(2), T(3)}, {x}}; return m[0][2] + m[1][0] * m[1][2] + m[0][1] * x;"),
    one("flat_matrix", "const int m[2][2] = {1, 2, 3, 4}; return x * T(m[1][0]) + T(m[0][1]);"),
    one("index_by_data", "const T c[4] = {T(3), T(1), T(4), T(1.5)}; return c[int(x) & 3] + x;"),
    one("index_by_data_2d", "T m[2][2] = {{T(1), x}, {T(3), T(4)}}; int i = x > T(0); return m[i][1 - i] * m[i][i];"),
    one(
        "write_by_data",
        "T a[3] = {T(0), T(0), T(0)}; int i = x > T(1) ? 2 : x > T(0) ? 1 : 0; a[i] = x; a[i] += T(1); return "
        "a[0] + T(2) * a[1] + T(3) * a[2];",
    ),
    one(
        "pointers",
        "T a[3] = {x, T(2), T(3)}; T* p = a; *p += T(1); ++p; *(p + 1) = p[0] * x; T* q = &a[2]; return a[0] + "
        "*q + T(q - p);",
    ),
    one("address_of_variable", "T y = x; T* p = &y; *p = *p * T(3); return y;"),
    one(
        "bits_through_pointer",
        "T y = x; unsigned u = *(unsigned*)&y; u &= 0xffff0000u; return *(float*)&u;",
        dtypes=(torch.float32,),
    ),
    one(
        "bits_by_builtin",
        "unsigned u = __builtin_bit_cast(unsigned, float(x) + 1.0f); return T(__builtin_bit_cast(float, u & ~4095u));",
    ),
    one(
        "bits_by_memcpy",
        "float y = float(x) + 1.0f; unsigned u; memcpy(&u, &y, sizeof(u)); u &= ~4095u; std::memcpy(&y, &u, 4); T z; "
        "memcpy(&z, &x, sizeof(T)); return T(y) + z;",
    ),
    one("bits_by_reinterpret", "float y = float(x); int i = *reinterpret_cast<int*>(&y); return T(i >> 23);"),
    # Functions
    one("helper", "return twice(x) + twice<T>(x);", "template <typename T> T twice(T v) { return v * T(2); }"),
    one("plain_helper", "return T(third(x));", "double third(double v) { return v / 3; }"),
    one(
        "inline_helper",
        "return third(x);",
        "template <typename T> __device__ __forceinline__ T third(const T& v) { return v / T(3); }",
    ),
    one(
        "two_types",
        "return mixed(x, 3) + mixed<T, double>(x, 1);",
        "template <typename A, typename B> A mixed(A a, B b) { return a / b; }",
    ),
    one(
        "explicit_first",
        "return convert<T>(0.3) + x;",
        "template <typename To, typename From> To convert(From v) { return static_cast<To>(v) * To(2); }",
    ),
    one(
        "value_parameter",
        "return power<3>(x) + power<2, T>(x);",
        "template <int N, typename T> T power(T v) { T r = T(1); for (int i = 0; i < N; ++i) r *= v; return r; "
        "}",
    ),
    one(
        "default_argument",
        "return shift(x) + shift(x, T(5));",
        "template <typename T> T shift(T v, T by = T(2)) { return v + by; }",
    ),
    one("default_template", "return shift(x);", "template <typename T, int N = 4> T shift(T v) { return v * T(N); }"),
    one(
        "by_reference",
        "T a = x, b = T(1); exchange(a, b); return a - b;",
        "template <typename T> void exchange(T& a, T& b) { T t = a; a = b; b = t; }",
    ),
    one(
        "by_pointer",
        "T a[2] = {x, T(3)}; scale(a, 2, T(2)); return a[0] * a[1];",
        "template <typename T> void scale(T* v, int n, T by) { for (int i = 0; i < n; ++i) v[i] *= by; }",
    ),
    one(
        "array_parameter",
        "const T c[3] = {T(1), T(2), T(3)}; return horner(x, c, 3);",
        "template <typename T> T horner(T x, const T c[], int n) { T r = T(0); for (int i = 0; i < n; ++i) r = "
        "r * x + c[i]; return r; }",
    ),
    one(
        "sized_array_parameter",
        "const T c[3] = {T(1), T(2), T(3)}; return total(c) * x;",
        "template <typename T, int N> T total(const T (&c)[N]) { T r = T(0); for (int i = 0; i < N; ++i) r += "
        "c[i]; return r; }",
    ),
    one(
        "global_table_parameter",
        "return horner(x, C, 3);",
        "__device__ const double C[] = {0.5, 0.25, 2.0}; template <typename T> T horner(T x, const double* c, "
        "int n) { T r = T(0); while (n--) r = r * x + c[n]; return r; }",
    ),
    one(
        "matrix_parameter",
        "T m[2][2] = {{T(1), T(2)}, {x, T(4)}}; return trace(m);",
        "template <typename T> T trace(T m[][2]) { return m[0][0] + m[1][1] * m[1][0]; }",
    ),
    one(
        "overloads",
        "return pick(x) + T(pick(1));",
        "int pick(int v) { return v + 1; } double pick(double v) { return v * 2; } float pick(float v) { "
        "return v * 3; }",
    ),
    one(
        "overload_enable_if",
        "return kind(x) + T(kind(3));",
        "template <typename T> typename std::enable_if<std::is_floating_point<T>::value, T>::type kind(T v) { "
        "return v * T(2); } template <typename T, typename = std::enable_if_t<std::is_integral_v<T>>> int "
        "kind(T v) { return v * 5; }",
    ),
    one(
        "early_return_in_helper",
        "T y = T(1); if (x > T(0)) y = step(x); return y + step(x);",
        "template <typename T> T step(T v) { if (v < T(1)) return T(0); if (v < T(2)) return v; return v * v; }",
    ),
    one(
        "helper_of_helper",
        "return outer(x, T(3));",
        "template <typename T> T inner(T v) { return v + T(1); } template <typename T> T outer(T v, T w) { "
        "return inner(inner(v) * w); }",
    ),
    one(
        "recursion",
        "return power(x, 5);",
        "template <typename T> T power(T v, int n) { if (n == 0) return T(1); T h = power(v, n / 2); return n "
        "% 2 ? h * h * v : h * h; }",
    ),
    one(
        "recursion_on_data",
        "return T(gcd(int(x * T(12)), 18));",
        "int gcd(int a, int b) { return b == 0 ? a : gcd(b, a % b); }",
        is_graph=False,
        is_total=False,
    ),
    one(
        "mutual_recursion",
        "return T(even(int(x) + 5));",
        "bool odd(int n); bool even(int n) { return n <= 0 ? true : odd(n - 1); } bool odd(int n) { if (n <= "
        "0) return false; return even(n - 1); }",
        is_graph=False,
        is_total=False,
    ),
    one("auto_result", "return helper(x);", "template <typename T> auto helper(T v) { return v * T(2) + T(1); }"),
    one("trailing_result", "return helper(x);", "template <typename T> auto helper(T v) -> T { return v * 2.5; }"),
    one("reference_result_bound", "T a = x; T& b = a; b += T(1); const T& c = b; return c * a;"),
    # Lambdas
    one("lambda_by_reference", "T y = x; auto add = [&](T v) { y += v; return y; }; add(T(1)); return add(x);"),
    one("lambda_by_value", "T y = x; auto f0 = [=](T v) { return v * y; }; y = T(100); return f0(T(2));"),
    one(
        "lambda_captures",
        "T y = x, z = T(2); auto f0 = [y, &z, w = y * z](T v) { z += v; return v * y + w; }; T r = f0(T(3)); "
        "return r + z;",
    ),
    one("lambda_generic", "auto sq = [](auto v) { return v * v; }; return sq(x) + T(sq(3));"),
    one("lambda_result", "auto f0 = [](T v) -> int { return v; }; return T(f0(x * T(1.5)) + 1);", is_total=False),
    one("lambda_at_once", "return [&] { return x + T(1); }() + [](T v) { return v; }(x);"),
    one("lambda_early_return", "auto f0 = [&](T v) { if (v > x) return v; return x; }; return f0(T(1)) + f0(T(-1));"),
    one(
        "lambda_as_argument",
        "return apply([&](T v) { return v * x; }, T(3));",
        "template <typename F, typename T> T apply(F f0, T v) { return f0(v) + f0(f0(v)); }",
    ),
    one(
        "lambda_mutable",
        "int n = 3; auto count = [n]() mutable { return ++n; }; count(); return x + T(count() * 10 + n);",
    ),
    # Structs
    one(
        "struct_fields",
        "Pair<T> p{x, T(2)}; p.a += T(1); Pair<T> q = p; q.b = x; return p.a * p.b + q.a * q.b;",
        "template <typename T> struct Pair { T a; T b; };",
    ),
    one(
        "struct_result",
        "auto r = split(x); return r.whole + r.rest * T(10);",
        "template <typename T> struct Parts { T whole, rest; }; template <typename T> Parts<T> split(T v) { T "
        "w = T(int(v)); if (v < T(0)) return {w, T(0)}; return {w, v - w}; }",
        is_total=False,
    ),
    one(
        "struct_function",
        "Line<T> l{x, T(2)}; return l.at(T(3)) + l.at(x);",
        "template <typename T> struct Line { T a, b; T at(T v) const { return a * v + b; } };",
    ),
    one(
        "struct_default",
        "Options o; o.n += 1; return x * T(o.scale) + T(o.n);",
        "struct Options { int n = 3; float scale = 0.5f; };",
    ),
    one(
        "structured_binding",
        "auto [a, b] = both(x); return a - b;",
        "template <typename T> struct Two { T a; T b; }; template <typename T> Two<T> both(T v) { return {v * "
        "v, v + T(1)}; }",
    ),
    one(
        "constructor_in_its_struct",
        "V<T> p(x, T(1)); V<T> q = p.plus(V<T>(T(2), x)); return q.a * q.b;",
        "template <typename T> struct V { T a, b; V(T p, T q) : a(p), b(q) {} "
        "V plus(const V& o) const { return V(a + o.a, b + o.b); } };",
    ),
    one(
        "limits_by_another_name",
        "using L = std::numeric_limits<T>; return x < Lim<T>::max() ? x * x + T(F::digits) : L::lowest();",
        "template <typename T> using Lim = std::numeric_limits<T>; typedef std::numeric_limits<float> F;",
    ),
    one("attributes", "if (x > T(0)) [[likely]] return x * x; else [[unlikely]] { return x + T(1); }"),
    # Macros and text
    one(
        "macros",
        "return SQUARE(x + T(1)) * FACTOR + CAT(AB, CD);",
        "#define SQUARE(v) ((v) * (v))\n#define FACTOR T(3)\n#define CAT(a, b) a##b\n#define ABCD T(7)",
    ),
    one(
        "macro_statement",
        "T s = T(0); REPEAT(3, s += x); return s;",
        "#define REPEAT(n, body) for (int i = 0; i < (n); ++i) { body; }",
    ),
    one(
        "macro_conditions",
        "return x * T(PICK);",
        "#ifdef __CUDACC__\n#define PICK 1\n#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800\n#define PICK "
        "2\n#else\n#define PICK 3\n#endif\n#if PICK == 3 // yes\n#undef PICK\n#define PICK 4\n#endif",
    ),
    one("macro_in_body", "\n  #define HALF(v) ((v) / 2)\n  return HALF(x);\n  #undef HALF\n  "),
    one("continued_macro", "return TWO(x);", "#define TWO(v) \\\n  ((v) + \\\n   (v))"),
    one("comments", "/* T(1) */ return x // + 1\n + T(2); // }\n"),
    one(
        "namespaces",
        "return tools::third(x);",
        "namespace tools { template <typename T> T third(T v) { return v / T(3); } }",
    ),
    one("shadowing", "int half = 3; T f0 = x; { T half = T(1); f0 += half; } return f0 * T(half);"),
    one("infinities", "return x > T(1) ? T(INFINITY) : x < T(-1) ? T(NEG_INFINITY) : x > T(0) ? T(NAN) : x;"),
    one("asserts", "assert(x == x); return x + T(1);", is_total=False),
    one("bool_result", "return x > T(1);"),
    one("void_cast", "(void)x; return x;"),
    # Corners
    one(
        "loop_down_to_zero",
        "T s = T(0); for (unsigned i = 4; i-- > 0;) s = s * x + T(i); return s;",
        dtypes=(torch.float32,),
    ),
    one(
        "number_as_condition",
        "if (x) return T(1) / x; while (!x) { x = T(1); } return x;",
        dtypes=(torch.float32,),
    ),
    one(
        "not_of_numbers",
        "return T(!x) + T(!!x) * 2;",
        dtypes=(torch.float32,),
    ),
    one(
        "pointer_beside_variable",
        "T a = x, *p = &a; *p += T(2); return a;",
        dtypes=(torch.float32,),
    ),
    one(
        "pointer_to_row",
        "T m[2][2] = {{x, T(1)}, {T(2), x}}, *row = m[1]; row[0] += x; return m[1][0] * row[1];",
        dtypes=(torch.float32,),
    ),
    one(
        "row_by_data",
        "T m[2][2] = {{x, T(1)}, {T(2), x}}; const T* row = m[x > T(0)]; return row[0] + row[1] * 3;",
        dtypes=(torch.float32,),
    ),
    one(
        "overload_by_count",
        "return g(x) + g(x, x);",
        "template <typename T> T g(T a) { return a * 2; } template <typename T> T g(T a, T b) { return a * b; }",
        dtypes=(torch.float32,),
    ),
    one(
        "recursion_of_templates",
        "return p<4>(x);",
        "template <int N, typename T> T p(T v) { if constexpr (N == 0) return T(1); else return v * p<N - "
        "1>(v); }",
        dtypes=(torch.float32,),
    ),
    one(
        "recursion_of_a_lambda",
        "auto fac = [](auto self, int n) -> int { return n < 2 ? 1 : n * self(self, n - 1); }; return x * "
        "T(fac(fac, 5));",
        dtypes=(torch.float32,),
    ),
    one(
        "array_of_structs",
        "P<T> p[2]; p[0].a = x; p[1].a = T(2); p[1].b = p[0].a * p[1].a; p[0] = p[1]; return p[0].b + p[1].a;",
        "template <typename T> struct P { T a, b; };",
        dtypes=(torch.float32,),
    ),
    one(
        "struct_with_the_name_of_its_typedef",
        "P p = {2.f, 3}; struct pair_s q = p; Q r = q; r.a += 1; struct same s{r.a}; same t = s; "
        "return x * p.a + T(r.a * q.n) + T(t.v);",
        "typedef struct { float a; int n; } P0; typedef struct pair_s { float a; int n; } P, Q; "
        "typedef struct same { float v; } same;",
    ),
    one(
        "struct_without_a_name",
        "struct { T a; int n; } s, t; s.a = x; s.n = 3; t = s; t.a *= t.n; { struct { T b, a; } s{x, T(2)}; "
        "t.a += s.a; } T sum = t.a; for (int i = 0; i < 2; ++i) sum += s.a * table[i].w * table[i].n; return sum;",
        "static const struct { float w; int n; } table[2] = {{0.5f, 1}, {0.25f, 2}};",
    ),
    one(
        "enum_of_a_typedef",
        "Mode m = x > T(0) ? CUBIC : LINEAR; enum Kind k = B; enum { K = 5 } e = K; Kind l = A; "
        "switch (m) { case LINEAR: return x * e; case CUBIC: return x + T(k); default: return T(l); }",
        "typedef enum { NEAREST, LINEAR = 3, CUBIC } Mode; typedef enum Kind { A, B } Kind;",
    ),
    one(
        "generator_in_a_typedef",
        "pcg r = {uint64_t(x * T(10) + T(100)), 3u}; next(&r); return T(next(&r) >> 8);",
        "typedef struct { uint64_t state; uint64_t inc; } pcg; static inline uint32_t next(pcg* r) { uint64_t o = "
        "r->state; r->state = o * 6364136223846793005ULL + (r->inc | 1); uint32_t s = (uint32_t)(((o >> 18u) ^ o) >> "
        "27u), by = (uint32_t)(o >> 59u); return (s >> by) | (s << ((-by) & 31)); }",
        is_total=False,
    ),
    one(
        "struct_that_names_itself",
        "D<T> a(x, T(1)), s(T(0)); for (int i = 0; i < 3; ++i) s += a * a + D<T>(T(i)); s *= a; "
        "if (x > T(0)) s.set(x); return s.d + s.both();",
        "template <typename T> struct D { T v, d; D(T v_, T d_ = T(0)) : v(v_), d(d_) {} "
        "D operator*(const D& o) const { return D(v * o.v, v * o.d + d * o.v); } "
        "D operator+(const D& o) const { return {v + o.v, d + o.d}; } "
        "D& operator+=(const D& o) { v += o.v; d += o.d; return *this; } "
        "D& operator*=(const D& o) { *this = *this * o; return *this; } "
        "D& set(T v) { this->v = v; return *this; } "
        "T both() const { auto sum = [this](T k) { return this->v * k + d; }; return sum(T(2)); } };",
    ),
    one(
        "array_in_struct",
        "V<T> v = {{x, T(1), T(2)}}; V<T> w = scaled(v, T(3)); bump(v); return v.v[0] + w.v[0] * w.v[2];",
        "template <typename T> struct V { T v[3]; }; template <typename T> V<T> scaled(V<T> a, T s) { for (int "
        "i = 0; i < 3; ++i) a.v[i] *= s; return a; } template <typename T> void bump(V<T>& a) { for (auto& e : "
        "a.v) e += T(1); }",
        dtypes=(torch.float32,),
    ),
    one(
        "switch_in_loop",
        "T s = T(0); for (int i = 0; i < 5; ++i) { switch (int(x) + i) { case 0: continue; case 1: s += T(1); "
        "break; case 3: return s; default: s += x; } s *= T(2); } return s;",
        nodes=150,
        dtypes=(torch.float32,),
    ),
    one(
        "continue_in_do",
        "T s = x; int i = 0; do { ++i; if (s > T(i)) continue; s += T(1); } while (i < 4); return s;",
        dtypes=(torch.float32,),
    ),
    one(
        "effects_of_conditions",
        "T y = T(5); if (x > T(0) && (y = x) > T(1)) y += T(10); int i = 0; bool b = (i++ > 0) || (i++ > 0) || "
        "x > T(2); return y + T(i) + T(b);",
        dtypes=(torch.float32,),
    ),
    one(
        "return_of_comma",
        "T y = x; return y += T(1), y * y;",
        dtypes=(torch.float32,),
    ),
    one(
        "bytes_wrap",
        "unsigned char c = (unsigned char)(int)(x * T(40)); c += 100; signed char d = c; return T(c) * 1000 + "
        "T(d);",
        domain=(0, 4),
        dtypes=(torch.float32,),
    ),
    one(
        "shifts_of_64_bits",
        "unsigned long long a = 1ull << 40; long b = -5; return T(a >> 38) + T(b >> 1) + T((b << 3) ^ 7) + x;",
        dtypes=(torch.float32,),
    ),
    one(
        "types_of_literals",
        "int i = -1; return T(i < 0xffffffffu) + T(i == 0xffffffff) + T(0x7fffffff + 1u) + x;",
        dtypes=(torch.float32,),
    ),
    one(
        "unary_minus_first",
        "return -T(1) / 3 + T(1) / 2 + 1 / T(3) * x + (x == x ? 1 : 0);",
        dtypes=(torch.float32,),
    ),
    one(
        "array_of_bool",
        "bool f[3] = {true, x > T(0)}; f[2] = !f[1]; int n = 0; for (bool b : f) n += b; return T(n) + T(f[2]);",
        dtypes=(torch.float32,),
    ),
    one(
        "pragma_unroll",
        "T s = x;\n#pragma unroll\nfor (int i = 0; i < 3; ++i) s += s;\nreturn s;",
        dtypes=(torch.float32,),
    ),
    one(
        "pragma_operator",
        'T s = x; UNROLL\nfor (int i = 0; i < 3; ++i) s += s; return s;',
        '#define UNROLL _Pragma("unroll")',
        dtypes=(torch.float32,),
    ),
    one(
        "binding_by_reference",
        "[[maybe_unused]] T y = x; const auto& [a, b] = two(x); return a * b;",
        "template <typename T> struct S { T a, b; }; template <typename T> S<T> two(T v) { return S<T>{v, v + "
        "1}; }",
        dtypes=(torch.float32,),
    ),
    one(
        "using_namespace",
        "using namespace std; return fabs(x) + abs(-3);",
        dtypes=(torch.float32,),
    ),
    one(
        "reference_to_element_by_data",
        "T a[3] = {x, T(1), T(2)}; int i = x > T(1) ? 2 : 1; ex(a[0], a[i]); return a[0] * 100 + a[1] * 10 + "
        "a[2];",
        "template <typename T> void ex(T& a, T& b) { T t = a; a = b; b = t; }",
        dtypes=(torch.float32,),
    ),
    one(
        "loop_over_pointers",
        "const T t[3] = {T(1), x, T(3)}; T s = T(0); for (const T* p = t; p != t + 3; ++p) s = s * 2 + *p; for "
        "(const T* p = t + 2; p >= t; p--) s += *p; return s;",
        dtypes=(torch.float32,),
    ),
    one(
        "results_through_pointers",
        "T y; int n; put(x, &y, &n); return y * T(n);",
        "template <typename T> void put(T v, T* y, int* n) { *y = v * 2; *n = v > T(0) ? 3 : 4; }",
        dtypes=(torch.float32,),
    ),
    one(
        "modf_through_pointer",
        "T w; T r = modf(x, &w); return w * 10 + r;",
        dtypes=(torch.float32,),
    ),
    one(
        "frexp_through_pointer",
        "int e; T m = frexp(x, &e); return m * 16 + T(e);",
        dtypes=(torch.float32,),
    ),
    one(
        "macros_in_macros",
        "return MAX3(x, T(1), -x);",
        "#define MAX2(a, b) ((a) > (b) ? (a) : (b))\n#define MAX3(a, b, c) MAX2(a, MAX2(b, c))",
        dtypes=(torch.float32,),
    ),
    one(
        "scoped_enum",
        "return x * T(int(K::B));",
        "enum class K { A, B = 5 };",
        dtypes=(torch.float32,),
    ),
    one(
        "static_function",
        "return helper(x, 2);",
        "static inline __host__ __device__ double helper(double v, int k) { return v / k; }",
        dtypes=(torch.float32,),
    ),
    one(
        "constant_array_size",
        "constexpr int n = 3 * 2 + 1; T a[n]; for (int i = 0; i < n; ++i) a[i] = x * T(i); return a[n - 1] + "
        "a[n / 2];",
        dtypes=(torch.float32,),
    ),
    one(
        "constant_condition",
        "T a = x, b = T(1); T* p = &a; if (sizeof(T) == 2) p = &b; *p = T(3); return a + b;",
        dtypes=(torch.float32,),
    ),
    one(
        "steps_of_elements",
        "int c[3] = {0, 0, 0}; c[int(x) & 1]++; ++c[2]; c[2] += c[0]--; return T(c[0] * 100 + c[1] * 10 + "
        "c[2]) + x;",
        dtypes=(torch.float32,),
    ),
    one(
        "return_from_loop_in_lambda",
        "auto find = [&](int k) { for (int i = 0; i < 4; ++i) if (x < T(i - k)) return i; return -1; }; return "
        "T(find(1) * 10 + find(-1));",
        dtypes=(torch.float32,),
    ),
    one(
        "pointer_moved_by_data",
        "T t[4] = {T(4), T(3), x, T(1)}; int i = int(x) & 1; T* p = t + i; p[1] = T(7); *p++ = T(9); return *p "
        "+ t[0] * 10 + t[1] * 100;",
        dtypes=(torch.float32,),
    ),
    one(
        "dangling_else",
        "if (x > T(0)) if (x > T(2)) return T(2); else return T(1); return T(0);",
        dtypes=(torch.float32,),
    ),
    one(
        "scopes",
        "T y = x; { T y = T(2); y += x; } for (int i = 0; i < 2; ++i) { T y = T(i); y += 1; } return y;",
        dtypes=(torch.float32,),
    ),
    one(
        "casts_in_c",
        "return T((double)x / 3) + (float)(x) + T(float(x)) + T((long long)2);",
        dtypes=(torch.float32,),
    ),
    one(
        "casts_of_literals",
        "return T((unsigned long long)3000000000u * 4u % 1000u) + T((unsigned)-1 / 2) + x;",
        dtypes=(torch.float32,),
    ),
    one(
        "characters",
        "char c = 'z'; return x + T(c - 'a') + T('\\n') + T('\\\\');",
        dtypes=(torch.float32,),
    ),
    one(
        "compound_integers",
        "int a = 13; a <<= 2; a |= 3; a ^= 5; a %= 17; a -= 20; a /= 3; a *= a; a >>= 1; return x + T(a);",
        dtypes=(torch.float32,),
    ),
    one(
        "compound_of_mixed_types",
        "T a = x; a += 1.9; a -= 0.5; a *= 1.5; T b = a / 2; return b++ + ++b;",
        dtypes=(torch.int32, torch.int64, torch.uint8, torch.float32),
        domain=(0, 20),
    ),
    one(
        "pointers_compared",
        "T a[2] = {x, x}; T* p = a; return p == a ? x : -x;",
        dtypes=(torch.float32,),
    ),
    one(
        "lambda_captures_both_ways",
        "T s = T(0); auto add = [&s, k = x * 2](T v) { s += v * k; }; for (int i = 0; i < 3; ++i) add(T(i)); "
        "return s;",
        dtypes=(torch.float32,),
    ),
    one(
        "struct_changes_itself",
        "Acc<T> a{T(0), 0}; for (int i = 0; i < 4; ++i) { if (x > T(i)) a.push(x * T(i)); } return a.mean();",
        "template <typename T> struct Acc { T sum; int n; void push(T v) { sum += v; n++; } T mean() const { "
        "return n == 0 ? T(0) : sum / n; } };",
        dtypes=(torch.float32,),
    ),
    one(
        "struct_that_refers",
        "T s = x; Into<T> a{s, x}; a.add(T(2)); if (x > T(0)) { Into<T> b = a; b.add(s); x += T(1); } a.to -= T(1); "
        "auto& [to, by] = a; to *= T(3); return s * a.by;",
        "template <typename T> struct Into { T& to; const T& by; void add(T v) { to += v * by; } };",
        dtypes=(torch.float32,),
    ),
    one(
        "loop_over_pairs",
        "P<T> p[2] = {{x, T(1)}, {T(2), x}}; for (auto& [a, b] : p) a += b; T s = T(0); "
        "for (const auto& [a, b] : p) s += a * b; for (auto [a, b] : p) { a += T(1); s += a; } return s + p[0].a;",
        "template <typename T> struct P { T a; T b; };",
        dtypes=(torch.float32,),
    ),
    one(
        "struct_of_a_number",
        "V<T, 2> a{{x, T(2)}}, b{{T(3), x}}; V<T, 1 + 1> c = b; return a.dot(c) + total(a, b);",
        "template <typename T, int N> struct V { T d[N]; T dot(const V<T, N>& o) const { T s = 0; for (int i = 0; i < "
        "N; ++i) s += d[i] * o.d[i]; return s; } };\n"
        "template <typename T, int N> T total(V<T, N> a, const V<T, N>& b) { return a.dot(b) * T(N) + a.dot(a); }",
        dtypes=(torch.float32,),
    ),
    one(
        "struct_in_struct",
        "O<T> o{{x, T(1)}, T(2)}; o.i.a *= o.c; O<T> q; q = o; q.i.b = T(9); return o.i.a + o.i.b + q.i.b;",
        "template <typename T> struct N { T a, b; }; template <typename T> struct O { N<T> i; T c; };",
        dtypes=(torch.float32,),
    ),
    one(
        "global_tables_by_data",
        "int i = int(x * 3) & 7; return C[i] * x + T(D[i & 1][(i >> 1) & 1]);",
        "__constant__ double C[8] = {1, 2, 3, 4, 5, 6, 7.5, 8};\nconst int D[2][2] = {{1, 2}, {3, 4}};",
        dtypes=(torch.float32,),
    ),
    one(
        "conditional_assigned_to",
        "T a = x, b = T(2); (x > T(0) ? a : b) = T(7); return a * 10 + b;",
        dtypes=(torch.float32,),
    ),
    one(
        "size_of_array",
        "T a[] = {x, x * 2, x * 3}; int n = sizeof(a) / sizeof(a[0]); T s = T(0); for (int i = 0; i < n; i++) "
        "s += a[i]; return s * T(n);",
        dtypes=(torch.float32,),
    ),
    one(
        "struct_names_itself",
        "V<T> u{x, T(2)}, v = u.swapped(); return v.dot(u) + V<int>::K * E<T>().next().v + E<float>().next().v;",
        "template <typename T> struct V { T x, y; static constexpr int K = 3; V swapped() const { return V{y, x}; } "
        "T dot(const V& o) const { return x * o.x + y * o.y * T(V::K); } };\n"
        "template <typename T> struct E { T v; E() : v(T(5)) {} E next() const { E e; e.v = v + T(1); return e; } };\n"
        "template <> struct E<float> { float v = 7; E next() const { E e; e.v = v + 2; return e; } };",
        dtypes=(torch.float32, torch.float64),
    ),
    one(
        "struct_declared_first",
        "return x * T(Of<T>::n) + S{2}.v;",
        "template <typename T> struct Of; template <> struct Of<float> { static constexpr int n = 3; };\n"
        "template <> struct Of<double> { static constexpr int n = 4; };\n"
        "struct S; struct S { int v; }; template <typename T> struct Of;",
        dtypes=(torch.float32, torch.float64),
    ),
    one(
        "alias_template",
        "wide<T> a = x; a = a / 3; P<T> p{x, T(2)}; return T(a) + p.a * sum(p) + T(sizeof(arr<T, 2>) / sizeof(T));",
        "template <typename T> using wide = typename std::conditional<sizeof(T) == 4, double, T>::type;\n"
        "template <typename T> struct Pair { T a, b; }; template <typename T = float> using P = Pair<T>;\n"
        "template <typename T, int N> using arr = T[N];\n"
        "template <typename T> T sum(Pair<T> p) { return p.a + p.b; }",
        dtypes=(torch.float32, torch.float64),
    ),
    one(
        "static_member_function",
        "return Op<T>::apply(x);",
        "template <typename T> struct Op { static T apply(T v) { return v * 2; } };",
        dtypes=(torch.float32,),
    ),
    one(
        "constructor",
        "Q<T> q(x); return q.v;",
        "template <typename T> struct Q { T v; Q(T a) : v(a * 2) {} };",
        dtypes=(torch.float32,),
    ),
    one(
        "operator_of_a_struct",
        "Z<T> a{x}, b{T(2)}; return (a + b).v;",
        "template <typename T> struct Z { T v; }; template <typename T> Z<T> operator+(Z<T> a, Z<T> b) { "
        "return {a.v + b.v}; }",
        dtypes=(torch.float32,),
    ),
    one(
        "operators_of_a_struct",
        "Z<T> a{x}, b{T(2)}; a += b; a *= T(3); Z<T> c = -a; c++; if (x > T(0)) ++c; "
        "return c.v + a[2] + a(x, b) + Z<T>{x}() + T(!c);",
        "template <typename T> struct Z { T v; Z& operator+=(const Z& o) { v += o.v; return *this; } "
        "Z operator+(const Z& o) const { return {v - o.v}; } Z operator-() const { return {T(1) - v}; } "
        "bool operator!() const { return v < 0; } T operator[](int i) const { return v * i; } "
        "T operator()() const { return v; } T operator()(T a, Z b) const { return v * a - b.v; } "
        "Z& operator++() { v += 2; return *this; } void operator++(int) { v += 5; } }; "
        "template <typename T> Z<T>& operator*=(Z<T>& a, T s) { a.v *= s; return a; }",
        dtypes=(torch.float32,),
    ),
    one(
        "types_of_a_struct",
        "typename A<T>::type s = x; s /= 3; using S = A<T>; P<T> p; p.a = 3; p.b[1] = x; "
        "return s + typename A<int>::type(x * 2) / 2 + S::k * typename S::type(0.1) + p.get() + first(P<T>{x}) "
        "+ std::complex<float>::value_type(3);",
        "template <typename U> struct A { using type = U; static constexpr int k = 2; }; template <> struct "
        "A<float> { typedef double type; static constexpr type k = 3; }; template <typename U> struct P { "
        "typedef U value; using two = value[2]; value a; two b; value get() const { return value(a) * b[1]; } }; "
        "template <typename C> typename P<C>::value first(P<C> p) { typename P<C>::value r = p.a; return r * 3; }",
        is_total=False,
    ),
    one(
        "constants_of_constants",
        "return x * PI2 + T(N2);",
        "constexpr double PI = 3.14159; constexpr double PI2 = PI * 2; constexpr int N1 = 3, N2 = N1 * N1;",
        dtypes=(torch.float32,),
    ),
    one(
        "macro_of_any_count",
        "return SUM(x, T(1));",
        "#define SUM(...) add(__VA_ARGS__)\ntemplate <typename T> T add(T a, T b) { return a + b; }",
        dtypes=(torch.float32,),
    ),
    one(
        "namespaces_of_constants",
        "int n = 9; return x * T(a::n) + T(c::n * n) + T(a::table[1]);",
        "namespace a { constexpr int n = 2; constexpr double table[] = {1, 2.5}; } namespace c { "
        "constexpr int n = 7; } "
        "constexpr int n = 5; constexpr double table[] = {9, 9};",
    ),
    one(
        "namespaces_of_functions",
        "return a::g(x) + c::g(x) * 10 + T(a::h(1)) + exp(T(0)) + a::exp(x);",
        "namespace a { double h(double v) { return v + 0.5; } template <typename T> T exp(T v) { return v * 4; } "
        "template <typename T> T g(T v) { return exp(v) + 1; } } "
        "namespace c { int h(int v) { return v * 2; } template <typename T> T g(T v) { return v * 2; } }",
    ),
    one(
        "namespaces_in_each_other",
        "namespace q = a::b; return q::g(x) * q::n + a::b::g(x) + a::h(x) + a::inner::n + a::m * a::open::m;",
        "namespace a::b { constexpr int n = 3; template <typename T> T g(T v) { return v * n; } } "
        "namespace a { constexpr int n = 11; template <typename T> T h(T v) { return b::g(v) * n; } "
        "namespace inner { constexpr int n = 6; } inline namespace open { constexpr int m = 2; } }",
    ),
    one(
        "namespaces_in_use",
        "using a::k; return h(x) + g(x) * k;",
        "namespace a { constexpr int k = 3; template <typename T> T g(T v) { return v * 100; } } "
        "template <typename T> T h(T v) { using namespace a; return g(v); } template <typename T> T g(T "
        "v) { return v + 1; }",
    ),
    one(
        "namespaces_of_classes",
        "a::P<T> p{x, 2}; a::Q<T> q(x); return norm(p) + (p + p).v * q.v + a::P<T>::by(x) + T(a::E::C) + T(a::B);",
        "namespace a { constexpr int k = 4; enum E { A = 1, B = 5, C }; template <typename T> struct P { T u, v; "
        "static T by(T w) { return w + k; } }; template <typename T> struct Q { T v; Q(T w) : v(w * 3) {} }; "
        "template <typename T> T norm(P<T> p) { return p.u * p.u + p.v; } "
        "template <typename T> P<T> operator+(P<T> p, P<T> q) { return {p.u + q.u, p.v + q.v}; } } "
        "constexpr int k = 1;",
    ),
    one(
        "arguments_of_templates_only",
        "return x + g<int>(3) * 10 + g(3) + h<3>(2);",
        "template <typename T> T g(T v) { return v + 1; } int g(int v) { return v * 7; } "
        "template <int N> int h(int v) { return v + N; } int h(int v) { return v * 100; }",
    ),
    one(
        "specialised_functions",
        "return g<T>(x) + g<int>(3) + g('a') + h<0>() + h<5>();",
        "template <typename T> T g(T v) { return v * 2; } template <> int g<int>(int v) { return v * 50; } "
        "template <> char g(char v) { return v - 90; } "
        "template <int N> int h() { return N; } template <> int h<0>() { return 77; }",
    ),
    one(
        "specialised_classes",
        "V<int> v{3}; return V<T>::get(x) + V<int>::get(3) + F<5>::value * g(v) + B<true>::n;",
        "template <typename T> struct V { T a; static T get(T v) { return v * 2; } }; "
        "template <> struct V<int> { int a; int b = 5; static int get(int v) { return v * 3; } }; "
        "template <int N> struct F { static constexpr int value = N * F<N - 1>::value; }; "
        "template <> struct F<0> { static constexpr int value = 1; }; "
        "template <bool> struct B { static constexpr int n = 1; }; template <> struct B<true> { static "
        "constexpr int n = 2; };"
        "template <typename T> T g(V<T> v) { return v.a; }",
    ),
    one(
        "constants_of_classes",
        "S<T> s{{x, 1}}; return s.a[0] * S<T>::n + s.g() + K::a;",
        "struct K { static constexpr int a = 3; }; template <typename T> struct S { static constexpr "
        "int n = 2; T a[n]; "
        "static constexpr double k[2] = {.5, .25}; T g() const { return T(a[1] * k[n - 1]); } };",
    ),
    one("class_in_a_function", "struct L { T a; int n; T g() const { return a * n; } }; L l{x, 3}; return l.g();"),
    one(
        "copies_of_a_lambda",
        "int n = 0; auto g = [n]() mutable { return ++n; }; auto h = g; g(); g(); return x * g() + h();",
    ),
    one(
        "assignments_before_commas",
        "int i = 0; T c, a = x > 0 ? (i = 1, x) : (i = 2, -x); a *= (c = x, i += 1, c * i); return a + "
        "(a <= 1, c != a);",
    ),
    one("keywords_as_functions", "return x + unsigned(3) / unsigned(2) + short(40000) + long(2.5) + signed(1.5);"),
    one(
        "version_of_the_language",
        "return x * V;",
        "#if __cplusplus >= 201703L\n#define V 2\n#else\n#define V 3\n#endif",
    ),
    one("fractions_cut_off", "return int(x);", is_total=False),
    one("fractions_cut_off_in_parts", "int n[2] = {int(x), int(x * 2)}; T s = -n[0]; return s * n[1];", is_total=False),
    one("chosen_by_bits", "int a = int(x), c = 3; return c ^ ((a ^ c) & -(a < c));", is_total=False),
    # Several arguments
    Construct("bool_entry", "template <typename T> bool f(T x, T y) { return x < y; }", tensors=2),
    Construct(
        "outputs",
        "template <typename T> void f(T x, T y, T& a, T& b) { a = x; if (x > y) { b = a * y; return; } b += "
        "T(1); a = y; }",
        tensors=2,
        outputs=2,
    ),
    Construct(
        "output_types",
        "template <typename T> void f(T x, T& a, bool& b, int& c) { a = x * T(2); b = x > T(1); c = int(x) / "
        "2; }",
        outputs=3,
    ),
    Construct(
        "declared_scalars",
        "template <typename T> T f(T x, int n, float s, bool b) { return b ? x / n * s : T(n / 2); }",
        scalars={"n": 3, "s": 0.1, "b": True},
    ),
    Construct(
        "scalar_first",
        "template <typename T> T f(T a, T x, double b) { return a * x + b; }",
        scalars={"a": 0.1, "b": 0.7},
    ),
    Construct(
        "scalar_count",
        "template <typename T> T f(T x, int n) { T s = T(0); for (int i = 0; i < n; ++i) s += x; return s; }",
        scalars={"n": 3},
        is_graph=False,
    ),
    Construct("defaulted", "template <typename T> T f(T x, T y = T(2)) { return x * y; }"),
    Construct(
        "second_template_parameter",
        "template <typename T, typename U> T f(T x, U y) { return x / (U(1) + y * y); }",
        tensors=2,
    ),
    Construct(
        "integers_of_elements",
        "template <typename T> T f(T x, int n) { return -x * n; }",
        tensors=2,
        is_total=False,
    ),
    Construct("unused", "template <typename T> T f(T x, T y) { return x + T(1); }", tensors=2),
    Construct("constant_result", "template <typename T> T f(T x) { return T(2) / T(3); }"),
    Construct("escaped_characters", r"template <typename T> T f(T x) { return x * T('\x41') + T('\101') - T('\n'); }"),
    Construct(
        "enum_of_a_type",
        "template <typename T> T f(T x) { enum U : unsigned { A = 1 }; return x * T(A - 2); }",
        dtypes=(torch.float64,),
    ),
    Construct(
        "enum_that_is_large",
        "template <typename T> T f(T x) { enum { A = 4294967295, B }; return T(A - 1 > 0 ? 1 : 2) + x * T(B / 3); }",
        dtypes=(torch.float64,),
    ),
    Construct(
        "enum_literals",
        "template <typename T> T f(T x) { enum { A = 010, B = 0x10u, C = 1'000, D }; return x * T(A + B + C - D); }",
    ),
    Construct(
        "promotion_before_conversion",
        "int g(long) { return 1; } int g(int) { return 2; } int h(double) { return 3; } int h(int) { return 4; }"
        " template <typename T> T f(T x) { short s = 3; return x * T(g(s) * 10 + h(true)); }",
    ),
    Construct("clamp", "template <typename T> T f(T x) { return std::clamp(x, T(-1), T(1)) * x; }"),
    Construct("named_as_what_it_calls", "template <typename T> T rint(T x) { return rint(x) + T(1); }"),
    Construct("same_twice", "template <typename T> void f(T x, T& a, T& b) { a = x; b = x; }", outputs=2),
)  # fmt: skip
