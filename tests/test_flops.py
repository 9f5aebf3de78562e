"""How many operations a text has, and what FlopCounterMode counts of functors, groups and their derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import fuser
from fuser.cxx.functor import parse_functor
from fuser.cxx.operations import count_operations
from fuser.errors import UntranslatableError

T = "template <typename T> T f"
COUNTS = {
    "nothing": (f"{T}(T x) {{ return x; }}", 0),
    "operators": (f"{T}(T x, T y) {{ return (x + y) * x - y / x; }}", 4),
    "signs, comparisons, logic": (f"{T}(T x) {{ return -x > T(0) && !(x == T(1)) ? x : T(0); }}", 0),
    "assignments": (f"{T}(T x) {{ T s = x * x; s += x; s = s / T(2); return s; }}", 3),
    "functions": (f"{T}(T x) {{ return exp(x) + sqrt(fabs(x)); }}", 4),
    "multiply-add": (f"{T}(T x, T y) {{ return fma(x, y, x) + std::fma(x, x, y); }}", 5),
    "conversions": (f"{T}(T x) {{ return static_cast<T>((double)x) + T(1); }}", 1),
    "longer branch": (f"{T}(T x) {{ return x > T(0) ? x * x + x : x + T(1); }}", 2),
    "if and else": (f"{T}(T x) {{ if (x * x > T(1)) {{ return x; }} else {{ return x + x - x; }} }}", 3),
    "what follows a return": (f"{T}(T x) {{ if (x > T(0)) return x + x + x; return x * x * x * x; }}", 3),
    "what follows no return": (f"{T}(T x) {{ if (x > T(0)) x = x + x; return x * x * x; }}", 3),
    "switch": (f"{T}(T x, int n) {{ switch (n) {{ case 0: return x + x; default: return x * x * x; }} }}", 2),
    "loop": (f"{T}(T x) {{ for (int i = 0; i < 5; ++i) x = x * x + T(1); return x; }}", 10),
    "loop to the end": (f"{T}(T x) {{ for (int i = 1; i <= 9; i += 2) x *= x; return x; }}", 5),
    "loop downwards": (f"{T}(T x) {{ for (int i = 7; i >= 0; i -= 2) x *= x; return x; }}", 4),
    "loop downwards by one": (f"{T}(T x) {{ for (int i = 7; i > 0; i--) x *= x; return x; }}", 7),
    "loop to another": (f"{T}(T x) {{ for (int i = 0; i != 6; i++) x *= x; return x; }}", 6),
    "loop of none": (f"{T}(T x) {{ for (int i = 3; i < 3; ++i) x *= x; return x; }}", 0),
    "long loop": (f"{T}(T x) {{ for (long i = 0; i < (1ul << 40); ++i) x *= x; return x; }}", 1),
    "longest loop": (f"{T}(T x) {{ for (long i = 0; i < 0xffffffffffffffff; ++i) x *= x; return x; }}", 2**64 - 1),
    "loops in loops": (
        f"{T}(T x) {{ for (int i = 0; i < 4; ++i) for (int j = 0; j < 3; ++j) x = x * x; return x; }}",
        12,
    ),
    "named bound": (f"constexpr int N = 2 * 3; {T}(T x) {{ for (int i = 0; i < N; ++i) x *= x; return x; }}", 6),
    "macro": (f"#define N 6\n{T}(T x) {{ for (int i = 0; i < N; ++i) x *= x; return x; }}", 6),
    "bound that changes": (f"{T}(T x) {{ int n = 3; n += 2; for (int i = 0; i < n; ++i) x *= x; return x; }}", 2),
    "bound of two": (
        f"template <typename T> T g(T x) {{ const int n = 2; return x; }}"
        f"{T}(T x) {{ const int n = 3; for (int i = 0; i < n; ++i) x *= x; return x; }}",
        1,
    ),
    "bound by data": (f"{T}(T x, int n) {{ for (int i = 0; i < n; ++i) x *= x; return x; }}", 1),
    "while": (f"{T}(T x) {{ while (x > T(1)) x = x * T(0.5); return x; }}", 1),
    "do": (f"{T}(T x) {{ do {{ x = x * T(0.5); }} while (x > T(1)); return x; }}", 1),
    "indices": (f"{T}(T x) {{ T a[3] = {{x, x, x}}; int i = 0; return a[i + 1] + a[(i + 2) % 3]; }}", 1),
    "own function": (f"template <typename T> T g(T x) {{ return x * x + x; }} {T}(T x) {{ return g(x) + g(x); }}", 5),
    "function of that name": (f"template <typename T> T exp(T x) {{ return x * x; }} {T}(T x) {{ return exp(x); }}", 1),
    "overloads": (
        f"template <typename T> T g(T x) {{ return x * x; }} template <typename T> T g(T x, T y) {{ return x; }}"
        f"{T}(T x) {{ return g(x, x); }}",
        0,
    ),
    "lambda": (f"{T}(T x) {{ auto g = [&](T y) {{ return y * x + y; }}; return g(x) - g(T(1)); }}", 5),
    "lambda not called": (f"{T}(T x) {{ auto g = [&](T y) {{ return y * x; }}; return x; }}", 0),
    "recursion": (
        f"template <typename T> T g(T x, int n) {{ return n ? x * g(x, n - 1) : x; }} {T}(T x) {{ return g(x, 5); }}",
        2,
    ),
    "member": (
        "template <typename U> struct Pair { U a, b; U sum() { return a + b; } };"
        f"{T}(T x) {{ Pair<T> p{{x, x}}; return p.sum() * p.a; }}",
        2,
    ),
    "outputs": ("template <typename T> void f(T x, T& a, T& b) { a = x + x; b = a * x; }", 2),
}


@pytest.mark.parametrize("name", COUNTS)
def test_operations_of_a_text(name: str) -> None:
    text, operations = COUNTS[name]
    assert count_operations(parse_functor(text, num_outputs=2 if name == "outputs" else 1)) == operations


def test_ops_of_torch_count_by_their_texts() -> None:
    found = {op.name: count_operations(op.function.functor) for op in map(fuser.ops.OPS.get, ("add", "mul", "neg"))}
    assert found == {"add": 2, "mul": 1, "neg": 0}


def count(work: Callable[[], Any]) -> int:
    """Return how many operations FlopCounterMode counts."""
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


AXPY = fuser.create_jit_fn("template <typename T> T axpy(T x, T y, T alpha) { return alpha * x + y; }", alpha=1.0)
HALVE = fuser.create_jit_fn(
    "template <typename T> T halve(T x) { T s = x; while (s > T(1)) s = s * T(0.5); return s; }"
)
GOTO = "template <typename T> T f(T x) { goto end; end: return x; }"


@pytest.mark.cpu
def test_a_call_counts_each_element_of_its_result() -> None:
    x, y = torch.randn(4, 1), torch.randn(5)
    for _ in range(2):
        assert count(lambda: AXPY(x, y)) == 2 * 20
    assert count(lambda: AXPY(x[:0], y)) == 0
    assert count(lambda: AXPY(x, 2)) == 2 * 4


@pytest.mark.cpu
def test_a_group_counts_each_application_in_its_own_shape() -> None:
    @fuser.fuse
    def chain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return AXPY(torch.exp(x), y) * y

    # exp of 4 elements, axpy and a product of 20.
    assert count(lambda: chain(torch.randn(4, 1), torch.randn(5))) == 4 + 2 * 20 + 20


@pytest.mark.cpu
def test_a_backward_pass_counts_too() -> None:
    x, y = torch.randn(20, requires_grad=True), torch.randn(20)
    # alpha * grad
    assert count(lambda: AXPY(x, y).sum().backward()) == (2 + 1) * 20


@pytest.mark.cpu
def test_a_derivative_in_eager_torch_counts_twice_what_is_differentiated() -> None:
    x = torch.tensor([5.0, 0.3, 1.5], requires_grad=True)
    assert count(lambda: HALVE(x).sum().backward()) == (1 + 2) * 3
    assert x.grad is not None
    assert x.grad.tolist() == [0.125, 1.0, 0.5]


@pytest.mark.cpu
def test_torch_s_own_formulas_count_beside_it() -> None:
    x = torch.randn(4, 4)
    assert count(lambda: AXPY(x @ x, x)) == 2 * 4**3 + 2 * 16


def test_sizes_alone_suffice() -> None:
    with FakeTensorMode():
        x = torch.empty(1 << 20, 1 << 20)
        assert count(lambda: AXPY(x, x)) == 2 << 40


def test_a_text_that_cannot_be_followed_warns() -> None:
    with pytest.raises(UntranslatableError):
        count_operations(parse_functor(GOTO))
    function = fuser.create_jit_fn(GOTO)
    with FakeTensorMode(), pytest.warns(UserWarning, match="operations of 'f' are not counted: .*goto"):
        assert count(lambda: function(torch.empty(5))) == 0
