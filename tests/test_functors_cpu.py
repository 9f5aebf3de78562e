"""Each functor of the table on the CPU, over dtypes and layouts, against its float64 reference."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functors import (
    BASICS,
    BY_NAME,
    CASES,
    FLOATS,
    INTS,
    Case,
    as_tuple,
    assert_accurate,
    assert_same,
    draw,
    expected_of,
    functor,
    inputs_of,
    poison,
    unpoison,
)
from tiers import one_of_each

import fuser
from fuser.cpu import backend as cpu_backend
from fuser.cpu.casts import cuts_off_fractions

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    poison()
    yield
    unpoison()


def test_memory_is_poisoned() -> None:
    assert torch.empty_strided((3,), (1,)).isnan().all()
    assert (torch.empty_strided((3,), (1,), dtype=torch.int32) == torch.iinfo(torch.int32).max).all()


def check(case: Case, inputs: list[Any], **scalars: Any) -> None:
    """Run a functor and compare value, dtype, shape and strides with the reference and torch's own pointwise result."""
    before = fuser.stats()
    got = as_tuple(functor(case.name)(*inputs, **scalars))
    after = fuser.stats()
    dtype = pointwise(inputs).dtype
    wanted = expected_of(case, inputs, dtype, **scalars)
    assert len(got) == case.outputs == len(wanted)
    assert after["fallbacks"] == before["fallbacks"]
    assert after["launches"] - before["launches"] == (1 if got[0].numel() else 0)
    for place, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
        model = pointwise(inputs)
        assert mine.dtype == dtype
        assert mine.shape == model.shape
        assert mine.stride() == model.stride()
        assert_accurate(mine, theirs.reshape(()) if not model.dim() else theirs, case.ulps, f"{case} output {place}")


def pointwise(inputs: list[Any]) -> torch.Tensor:
    """Return a tensor with the dtype, shape and strides that torch's pointwise ops give for these inputs."""
    if len(inputs) == 1:
        return torch.bitwise_not(inputs[0]) if not inputs[0].is_floating_point() else torch.neg(inputs[0])
    if len(inputs) == 2:
        return torch.add(inputs[0], inputs[1]) if isinstance(inputs[0], torch.Tensor) else inputs[0] + inputs[1]
    # A ternary op: a chain of binary ones may lay its result out otherwise.
    tensors = [torch.as_tensor(item) for item in inputs[:3]]
    dtype = inputs[0].dtype
    is_served = dtype is not torch.bool and all(item.dtype == dtype for item in tensors)
    return torch.addcmul(*tensors) if is_served else torch.add(*inputs[:2])


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("case", "dtype"), one_of_each([(case, dtype) for case in CASES for dtype in case.dtypes]))
def test_dtypes(case: Case, dtype: torch.dtype) -> None:
    # An odd length, more than one vector, with a tail.
    check(case, inputs_of(case, dtype, (3, 67)))


LAYOUTS: dict[str, Callable[[torch.dtype, tuple[float, float], int], torch.Tensor]] = {
    "contiguous": lambda dtype, domain, seed: draw((4, 6, 5), dtype, domain, seed),
    "transposed": lambda dtype, domain, seed: draw((7, 9), dtype, domain, seed).t(),
    "mixed_order": lambda dtype, domain, seed: (
        draw((9, 7), dtype, domain, seed) if seed % 2 else draw((7, 9), dtype, domain, seed).t()
    ),
    "permuted": lambda dtype, domain, seed: draw((2, 3, 4), dtype, domain, seed).permute(2, 0, 1),
    "sliced": lambda dtype, domain, seed: draw((6, 20), dtype, domain, seed)[::2, 1::3],
    "expanded": lambda dtype, domain, seed: draw((5, 1), dtype, domain, seed).expand(5, 6),
    "channels_last": lambda dtype, domain, seed: draw((2, 3, 4, 5), dtype, domain, seed).to(
        memory_format=torch.channels_last
    ),
    "misaligned": lambda dtype, domain, seed: draw((131,), dtype, domain, seed)[1 + seed :][:120],
    "zero_dim": lambda dtype, domain, seed: draw((), dtype, domain, seed),
    "empty": lambda dtype, domain, seed: draw((3, 0, 2), dtype, domain, seed),
    "one_element": lambda dtype, domain, seed: draw((1, 1), dtype, domain, seed),
    "broadcast": lambda dtype, domain, seed: draw([(1, 6), (5, 1), (6,)][seed % 3], dtype, domain, seed),
    "row": lambda dtype, domain, seed: draw([(5, 6), (1, 6), (1,)][seed % 3], dtype, domain, seed),
}


# Layouts do not look into a functor: a part of the table is enough.
@pytest.mark.one_in(2)
@pytest.mark.parametrize(("case", "layout"), one_of_each(list(itertools.product(BASICS, LAYOUTS)), 4))
def test_layouts(case: Case, layout: str) -> None:
    check(case, [LAYOUTS[layout](case.dtypes[0], case.domain, seed) for seed in range(case.tensors)])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int16], ids=str)
def test_layouts_of_other_dtypes(dtype: torch.dtype, layout: str) -> None:
    for name in ("axpy", "median3"):
        case = BY_NAME[name]
        check(case, [LAYOUTS[layout](dtype, case.domain, seed) for seed in range(case.tensors)])


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float16),
        (torch.int32, torch.float16),
        (torch.uint8, torch.int8),
        (torch.bool, torch.int16),
        (torch.bool, torch.float32),
        (torch.int64, torch.int8),
        (torch.float64, torch.float16),
    ],
    ids=str,
)
def test_mixed_dtypes(left: torch.dtype, right: torch.dtype) -> None:
    for first, second in ((left, right), (right, left)):
        check(BY_NAME["axpy"], [draw((5, 7), first, seed=1), draw((7,), second, seed=2)])


@pytest.mark.parametrize(
    ("inputs", "dtype"),
    [
        ([draw((5,), torch.float32), 2], torch.float32),
        ([2.5, draw((5,), torch.bfloat16)], torch.bfloat16),
        ([draw((5,), torch.int32), 2.5], torch.float32),
        ([draw((5,), torch.uint8), 3], torch.uint8),
        ([True, draw((5,), torch.int8)], torch.int8),
        ([draw((5,), torch.float32), torch.tensor(2.5, dtype=torch.float64)], torch.float32),
        ([draw((5,), torch.int16), torch.tensor(2, dtype=torch.int64)], torch.int16),
        ([draw((5,), torch.int16), torch.tensor(2.5, dtype=torch.float64)], torch.float64),
        ([draw((), torch.float32), torch.tensor(3, dtype=torch.int64)], torch.float32),
        ([draw((), torch.float32), 2.5], torch.float32),
        ([draw((5,), torch.bool), draw((1,), torch.bool, seed=3)], torch.bool),
    ],
    ids=lambda value: None,
)
def test_numbers_and_zero_dim_tensors(inputs: list[Any], dtype: torch.dtype) -> None:
    case = BY_NAME["differs" if dtype is torch.bool else "axpy"]
    got = functor(case.name)(*inputs)
    assert got.dtype == dtype == pointwise(inputs).dtype
    # A float64 0-dim value reaches a float32 computation rounded to float32.
    assert_accurate(got, expected_of(case, inputs, dtype)[0], case.ulps)


@pytest.mark.parametrize(("name", "values"), [
    ("axpy", {"alpha": [0, -3, 2.5, True, 1e-3]}),
    ("pick", {"greater": [True, False, 0, 1]}),
    ("decay", {"rate": [0, 1, 0.25, True]}),
    ("clip", {"low": [-2, 0.5]}),
    ("quantise", {"steps": [4, 16, True]}),
])  # fmt: skip
def test_scalars_of_every_kind(name: str, values: dict[str, list[Any]]) -> None:
    case = BY_NAME[name]
    inputs = inputs_of(case, torch.float32, (3, 67))
    for scalar, options in values.items():
        for value in options:
            check(case, inputs, **{scalar: value})


def test_scalars_are_run_time_arguments() -> None:
    case = BY_NAME["axpy"]
    inputs = inputs_of(case, torch.float32, (3, 67))
    functor("axpy")(*inputs, alpha=0.5)
    before = fuser.n_compiled_kernels()
    for alpha in (0.25, -7.0, 1e5):
        check(case, inputs, alpha=alpha)
    assert fuser.n_compiled_kernels() == before


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_special_values(dtype: torch.dtype) -> None:
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([nan, inf, -inf, 0.0, -0.0, 1.0], dtype=dtype)
    assert functor("patch")(x).tolist() == [-1.0, inf, -inf, 0.0, 0.0, 1.0]
    assert functor("patch")(x).signbit().tolist() == [True, False, True, False, True, False]
    # NaN > 0 is false: the functor's own C++ rule, not torch's.
    assert functor("relu")(x).tolist() == [0.0, inf, 0.0, 0.0, 0.0, 1.0]
    assert functor("sigmoid")(x)[1:].tolist() == pytest.approx([1.0, 0.0, 0.5, 0.5, 0.7310586], rel=1e-2)
    assert functor("sigmoid")(x)[0].isnan()


@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_integers_wrap(dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    x = torch.tensor([info.max, info.min, 100], dtype=dtype)
    assert torch.equal(functor("axpy")(x, x, alpha=1), x + x)


def test_out_dtypes() -> None:
    x = draw((3, 67), torch.float32)
    inside = BY_NAME["inside"].build(out_dtypes=torch.bool)
    assert_same(inside(x), (x >= 1) & (x < 3))
    wave = BY_NAME["wave"].build(out_dtypes=[torch.float64, None])
    sine, cosine = wave(x)
    assert (sine.dtype, cosine.dtype) == (torch.float64, torch.float32)
    assert_accurate(cosine, torch.cos(x.double()), 8)
    assert (sine - torch.sin(x.double())).abs().max() < 1e-6


def test_long_and_odd_lengths() -> None:
    case = BY_NAME["polar"]
    for length in (1, 15, 16, 17, 255, 16383, 16384, 16385, 100003):
        check(case, inputs_of(case, torch.float32, (length,)))


def test_texts_of_many_conditions_are_optimised_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """g++ -O2 takes minutes for a hundred of them, one inside the other."""
    commands: list[list[str]] = []
    run = cpu_backend._run
    monkeypatch.setattr(cpu_backend, "_run", lambda command, *rest: commands.append(command) or run(command, *rest))
    for count, level in ((3, "-O2"), (40, "-O1")):
        nest = "T(0)"
        for number in range(count):
            nest = f"x > T({number}) ? x + ({nest}) : x"
        x = torch.tensor([-1.0, 1.5, 50.0])
        assert fuser.jit_fn(f"template <typename T> T nest(T x) {{ return {nest}; }}")(x)[0] == -1
        assert level in commands[-1]


def test_derivatives_of_loops_that_end_early_compile_in_seconds() -> None:
    """Jumps that g++ threads through a chain of conditions take it twice as long for each of them."""
    incomplete_gamma = fuser.jit_fn("""
        template <typename T> T series(T a, T x) {
          T sum = T(1) / a, term = sum, n = a;
          for (int i = 0; i < 32; ++i) {
            n += 1;
            term *= x / n;
            sum += term;
            if (fabs(term) < fabs(sum) * std::numeric_limits<T>::epsilon()) break;
          }
          return sum * exp(-x + a * log(x) - lgamma(a));
        }
        template <typename T> T fraction(T a, T x) {
          constexpr T tiny = std::numeric_limits<T>::min() / std::numeric_limits<T>::epsilon();
          T b = x + 1 - a, c = 1 / tiny, d = 1 / b, h = d;
          for (int i = 1; i <= 32; ++i) {
            const T an = -i * (i - a);
            b += 2;
            d = an * d + b;
            if (fabs(d) < tiny) d = tiny;
            c = b + an / c;
            if (fabs(c) < tiny) c = tiny;
            d = 1 / d;
            const T factor = d * c;
            h *= factor;
            if (fabs(factor - 1) <= std::numeric_limits<T>::epsilon()) break;
          }
          return exp(-x + a * log(x) - lgamma(a)) * h;
        }
        template <typename T> T incomplete_gamma(T a, T x) {
          return x <= T(0) ? T(1) : x < a + 1 ? 1 - series(a, x) : fraction(a, x);
        }""")
    a, x = (draw((9,), torch.float64, (0.1, 6.0), seed).requires_grad_() for seed in range(2))
    wanted = torch.special.gammaincc(a.detach(), x)
    fuser.reset_stats()
    with fuser.config.patch(disk_cache=False, compile_timeout=60.0):
        found = incomplete_gamma(a, x)
        slopes = torch.autograd.grad(found.sum(), x, retain_graph=True)
        assert torch.autograd.grad(found.sum(), (a, x))[1].equal(slopes[0])
    assert fuser.stats()["fallbacks"] == {}
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(slopes[0], torch.autograd.grad(wanted.sum(), x)[0])


def test_the_cpp_library_is_there_for_those_who_need_it() -> None:
    allocates = fuser.jit_fn("""
        template <typename T> T allocates(T x) {
          const int count = int(x) + 2;
          T* multiples = new T[count];
          for (int i = 0; i < count; ++i) multiples[i] = x * T(i);
          T sum = T(0);
          for (int i = 0; i < count; ++i) sum += multiples[i];
          delete[] multiples;
          return sum;
        }""")
    fuser.reset_stats()
    assert allocates(torch.arange(4.0)).tolist() == [0.0, 3.0, 12.0, 30.0]
    assert (fuser.stats()["launches"], fuser.stats()["fallbacks"]) == (1, {})


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return int(x);", True),
        ("long n = x; return x > 0 ? n : 2;", True),
        ("int n = 3; for (int i = 0; i < n; ++i) x += i; return x * int(n);", False),
        ("unsigned n = (unsigned)(int)x; n *= 0x846ca68bU; return T(n >> 8);", False),
        ("int n = 0; while (x > 1) { x -= 1; ++n; } return int(x) + n;", True),
        ("return x - floor(x);", False),
    ],
)
def test_kernels_that_need_gcc_to_keep_casts(body: str, expected: bool) -> None:
    # float(int(x)) is no trunc(x): of -0.3 it is 0. With the flag that says so, branches and floor do not vectorise.
    function = fuser.jit_fn(f"template <typename T> T f(T x) {{ {body} }}").function.functor
    assert cuts_off_fractions([function], "fuser_f0::f<float>(v0)") is expected
    assert not cuts_off_fractions([function], "fuser_f0::f<int32_t>(v0)")
