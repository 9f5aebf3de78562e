"""Reductions that users write: their order bit for bit, dtypes, dimensions, errors, derivatives, transforms, graphs."""

from __future__ import annotations

import functools
import math
import operator
import pickle
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import fuser
from fuser.combining import BATCH
from fuser.errors import ArgumentError, DimError, FallbackError, FunctorError, GradientError, ShapeError
from fuser.fx.backend import fuser_backend
from fuser.reduction_check import check_reduction

ADD = "template <typename T> T add(T a, T b) { return a + b; }"
total = fuser.create_reduction_fn(ADD, identity=0)
product = fuser.create_reduction_fn("template <typename T> T mul(T a, T b) { return a * b; }", identity=1)
largest = fuser.create_reduction_fn(
    "template <typename T> T larger(T a, T b) { return a > b ? a : b; }", identity=-math.inf
)
dot = fuser.create_reduction_fn(ADD, identity=0, map="template <typename T> T times(T x, T y) { return x * y; }")
any_above = fuser.create_reduction_fn(
    "template <typename T> bool either(bool a, bool b) { return a || b; }",
    identity=False,
    map="template <typename T> bool above(T x, T limit) { return x > limit; }",
    limit=0,
)
norm = fuser.create_reduction_fn(
    ADD,
    identity=0,
    map="template <typename T> T square(T x, T scale) { return scale * x * x; }",
    finish="template <typename T> T root(T sum, T scale) { return sqrt(sum / scale); }",
    scale=2.0,
)
welford = fuser.create_reduction_fn(
    """template <typename T> void welford(T ma, T sa, T na, T mb, T sb, T nb, T& m, T& s, T& n) {
      n = na + nb;
      T delta = mb - ma, part = n > T(0) ? nb / n : T(0);
      m = ma + delta * part;
      s = sa + sb + delta * delta * na * part;
    }""",
    identity=(0, 0, 0),
    map="template <typename T> void one(T x, T& m, T& s, T& n) { m = x; s = T(0); n = T(1); }",
    finish="template <typename T> void moments(T m, T s, T n, T& mean, T& var) { mean = m; var = s / n; }",
)
logsumexp = fuser.create_reduction_fn(
    """template <typename T> void merge(T ma, T sa, T mb, T sb, T& m, T& s) {
      m = ma > mb ? ma : mb;
      s = ma > mb ? sa + sb * exp(mb - ma) : isinf(mb) ? sa + sb : sa * exp(ma - mb) + sb;
    }""",
    identity=(-math.inf, 0),
    map="template <typename T> void one(T x, T& m, T& s) { m = x; s = T(1); }",
    finish="template <typename T> T log_of(T m, T s) { return m + log(s); }",
)
# x -> a * x + b: maps that are applied one after another.
compose = fuser.create_reduction_fn(
    "template <typename T> void compose(T a1, T b1, T a2, T b2, T& a, T& b) { a = a1 * a2; b = a2 * b1 + b2; }",
    identity=(1, 0),
)
gcd = fuser.create_reduction_fn(
    "template <typename T> T gcd(T a, T b) { while (b != 0) { T rest = a % b; a = b; b = rest; } return a; }",
    identity=0,
    map="template <typename T> T magnitude(T x) { return x < 0 ? -x : x; }",
)
count_nonzero = fuser.create_reduction_fn(
    "template <typename T> int64_t add(int64_t a, int64_t b) { return a + b; }",
    identity=0,
    map="template <typename T> int64_t is_set(T x) { return x != T(0); }",
)

# Those that can be differentiated, with as many arguments as they take.
SMOOTH = {"total": total, "norm": norm, "product": product, "logsumexp": logsumexp, "welford": welford, "dot": dot}


@pytest.fixture(autouse=True)
def _eager(request: pytest.FixtureRequest) -> Iterator[None]:
    # Without kernels, but for the tests that are about them.
    before = fuser.override_can_fuse_on_cpu(request.node.get_closest_marker("cpu") is not None)
    yield
    fuser.override_can_fuse_on_cpu(before)


def reduce_slowly(items: list[Any], combine: Callable[[Any, Any], Any], identity: Any) -> Any:
    """Combine items in the canonical order, one after another."""

    def tree(part: list[Any]) -> Any:
        if len(part) == 1:
            return part[0]
        half = len(part) // 2
        return combine(tree(part[:half]), tree(part[half:]))

    found = identity
    for start in range(0, len(items), BATCH):
        batch = items[start : start + BATCH]
        width = 1 << (len(batch) - 1).bit_length()
        found = combine(found, tree(batch + [identity] * (width - len(batch))))
    return found


# --- order -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 100, 8191, 8192, 8193, 17000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_have_the_order_of_the_tree(count: int, dtype: torch.dtype) -> None:
    x = torch.randn(count, dtype=dtype, generator=torch.Generator().manual_seed(count)) * 10.0
    items = list(x.unbind())
    wanted = reduce_slowly(items, torch.add, torch.zeros((), dtype=dtype))
    assert torch.equal(total(x), wanted)
    # Nothing else decides: not the rows beside it, not the layout.
    rows = torch.stack([torch.ones_like(x), x])
    assert torch.equal(total(rows, dim=1)[1], wanted)
    assert torch.equal(total(rows.t().contiguous(), dim=0)[1], wanted)
    # In a plain order some of these would differ.
    assert count < 100 or not torch.equal(functools.reduce(torch.add, items), wanted)


def test_elements_are_numbered_row_major_along_all_reduced_dimensions() -> None:
    x = torch.randn(3, 4, 5, 7)
    wanted = total(x.permute(1, 3, 0, 2).reshape(4, 7, 15), dim=2)
    assert torch.equal(total(x, dim=(0, 2)), wanted)
    assert torch.equal(total(x, dim=(-2, 0)), wanted)
    assert torch.equal(total(x.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3), dim=[2, 0]), wanted)


def test_what_does_not_commute_is_combined_in_the_order_of_the_elements() -> None:
    a, b = torch.rand(50, dtype=torch.float64) + 0.5, torch.randn(50, dtype=torch.float64)
    x = 0.25
    for one, other in zip(a.tolist(), b.tolist(), strict=True):
        x = one * x + other
    slope, offset = compose(a, b)
    assert (slope * 0.25 + offset).item() == pytest.approx(x, rel=1e-12)
    items = [(one, other) for one, other in zip(a.unbind(), b.unbind(), strict=True)]
    wanted = reduce_slowly(
        items, lambda f, g: (f[0] * g[0], g[0] * f[1] + g[1]), (torch.tensor(1.0), torch.tensor(0.0))
    )
    assert (slope.item(), offset.item()) == (wanted[0].item(), wanted[1].item())


CASES: dict[str, tuple[Any, tuple[tuple[int, ...], ...], torch.dtype]] = {
    "total": (total, ((3, 5, 9000),), torch.float32),
    "total of half": (total, ((3, 300),), torch.float16),
    "product of ints": (product, ((7, 70),), torch.int32),
    "dot": (dot, ((4, 1, 33), (5, 1)), torch.float32),
    "largest": (largest, ((6, 100),), torch.bfloat16),
    "compose": (compose, ((300, 3), (3,)), torch.float64),
    "count": (count_nonzero, ((6, 100),), torch.float32),
    "any": (any_above, ((6, 100),), torch.int64),
    "gcd": (gcd, ((40, 8),), torch.int64),
    "complex": (total, ((3, 500),), torch.complex64),
}


@pytest.mark.cpu
@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CASES, ids=str)
def test_kernels_have_the_bits_of_the_eager_version(name: str) -> None:
    fn, shapes, dtype = CASES[name]
    generator = torch.Generator().manual_seed(1)
    if dtype.is_floating_point or dtype.is_complex:
        tensors = [torch.randn(shape, generator=generator, dtype=torch.complex64).to(dtype) for shape in shapes]
    else:
        tensors = [torch.randint(-50, 50, shape, generator=generator).to(dtype) * 6 for shape in shapes]
    for dim in (None, 0, -1, (0, 1)):
        fuser.reset_stats()
        fused = fn(*tensors, dim=dim)
        assert not fuser.stats()["fallbacks"]
        fuser.override_can_fuse_on_cpu(False)
        eager = fn(*tensors, dim=dim)
        fuser.override_can_fuse_on_cpu(True)
        for one, other in zip(*([item] if torch.is_tensor(item) else item for item in (fused, eager)), strict=True):
            assert one.dtype == other.dtype
            assert one.stride() == other.stride()
            assert torch.equal(one, other)


# --- values, dtypes, dimensions --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.int32, torch.uint8]
)
@pytest.mark.parametrize("dim", [None, 0, 1, -1, (0, 2), (-1, 1), [0, 1, 2], ()])
@pytest.mark.parametrize("keepdim", [False, True])
def test_dimensions_are_those_of_torch(dtype: torch.dtype, dim: Any, keepdim: bool) -> None:
    x = torch.randn(3, 4, 5, dtype=torch.complex64).to(dtype) if dtype.is_floating_point or dtype.is_complex else None
    x = torch.randint(0, 3, (3, 4, 5)).to(dtype) if x is None else x
    exact = x.to(torch.complex128 if dtype.is_complex else torch.float64)
    found, wanted = total(x, dim=dim, keepdim=keepdim), torch.sum(exact, dim=dim, keepdim=keepdim)
    assert found.dtype is dtype
    assert found.shape == wanted.shape
    assert found.is_contiguous()
    # One rounding to the dtype, of what float (or the dtype itself) came to.
    torch.testing.assert_close(found, wanted.to(dtype))


def test_values_are_those_of_torchs_own_reductions() -> None:
    x = torch.randn(4, 50, dtype=torch.float64)
    torch.testing.assert_close(product(x, dim=1), x.prod(1))
    assert torch.equal(largest(x, dim=1), x.amax(1))
    torch.testing.assert_close(logsumexp(x, dim=1), x.logsumexp(1))
    torch.testing.assert_close(norm(x, dim=0, scale=1.0), x.norm(dim=0))
    mean, var = welford(x, dim=1, keepdim=True)
    torch.testing.assert_close((var, mean), torch.var_mean(x, 1, correction=0, keepdim=True))
    assert any_above(x, dim=1, limit=2.0).tolist() == (x > 2.0).any(1).tolist()
    assert any_above(x).dtype is torch.bool
    assert torch.equal(count_nonzero(x > 0, dim=0), (x > 0).sum(0))
    assert gcd(torch.tensor([[12, 18, 30], [7, 21, 14]]), dim=1).tolist() == [6, 7]


def test_several_tensors_broadcast_and_promote() -> None:
    x, y = torch.randn(3, 1, 5), torch.randint(0, 9, (4, 1))
    found = dot(x, y, dim=-1)
    torch.testing.assert_close(found, (x * y).sum(-1))
    assert found.dtype is torch.float32
    assert dot(x.half(), torch.tensor(2.0, dtype=torch.float64)).dtype is torch.float16
    assert dot(x, 2).item() == pytest.approx(2 * x.sum().item(), rel=1e-5)
    with pytest.raises(ShapeError, match="add"):
        dot(x, torch.ones(2, 7))


@pytest.mark.parametrize("dim", [1, -3, (0, 2), None])
def test_the_first_tensor_need_not_have_all_dimensions(dim: Any) -> None:
    whole, row = torch.randn(4, 5, 6), torch.randn(6)
    fuser.reset_stats()
    assert torch.equal(dot(row, whole, dim=dim), dot(whole, row, dim=dim))
    assert torch.equal(dot(3, whole, dim=dim), dot(whole, 3, dim=dim))
    assert not any("of a number" in reason for reason in fuser.stats()["fallbacks"])


def test_types_of_results() -> None:
    pair = fuser.create_reduction_fn(
        "template <typename T> void pick(T va, int32_t ia, T vb, int32_t ib, T& v, int32_t& i) "
        "{ v = va > vb ? va : vb; i = va > vb ? ia : ib; }",
        identity=(-math.inf, 0),
    )
    value, place = pair(torch.tensor([1.0, 3.0, 2.0]).half(), torch.tensor([10.0, 20.0, 30.0]))
    assert (value.dtype, place.dtype, value.item(), place.item()) == (torch.float32, torch.int32, 3.0, 20)
    wide = fuser.create_reduction_fn(
        "template <typename T> double add(double a, double b) { return a + b; }", identity=0
    )
    x = torch.full((10,), 0.1)
    assert torch.equal(wide(x), total(x.double()))
    narrow = fuser.create_reduction_fn(
        "template <typename T> double add(double a, double b) { return a + b; }",
        identity=0,
        finish="template <typename T> T out(double sum) { return sum; }",
    )
    assert torch.equal(narrow(x), wide(x).float())
    other = fuser.create_reduction_fn(
        ADD, identity=0, finish=fuser.jit_fn("template <typename T> T out(T s) { return s; }", out_dtypes=torch.int8)
    )
    assert torch.equal(other(x), torch.tensor(1, dtype=torch.int8))
    whole = fuser.create_reduction_fn(
        "template <typename T> std::complex<double> add(std::complex<double> a, std::complex<double> b)"
        " { return a + b; }",
        identity=0j,
    )
    assert whole(x).dtype is torch.complex128


def test_accumulators_are_not_rounded() -> None:
    x = torch.full((4096,), 1.0, dtype=torch.bfloat16)
    x[1:] = 2.0**-9
    assert total(x).item() == torch.tensor(1 + 4095 * 2.0**-9).bfloat16().item()


def test_nothing_to_reduce_gives_the_identity_finished() -> None:
    assert total(torch.empty(0)).item() == 0
    assert product(torch.empty(2, 0), dim=1).tolist() == [1.0, 1.0]
    assert product(torch.empty(2, 0), dim=0).shape == (0,)
    assert logsumexp(torch.empty(2, 0), dim=1, keepdim=True).tolist() == [[-math.inf]] * 2
    assert largest(torch.empty(0, dtype=torch.int32)).item() == -(2**31)
    assert all(item.isnan().all() == (slot == 1) for slot, item in enumerate(welford(torch.empty(0, 3), dim=0)))


def test_tensors_without_dimensions() -> None:
    x = torch.tensor(3.0)
    for dim in (None, 0, -1, (0,)):
        assert total(x, dim=dim).shape == ()
        assert total(x, dim=dim, keepdim=True).item() == 3.0


def test_out() -> None:
    x = torch.randn(3, 4)
    out = torch.empty(3)
    assert total(x, dim=1, out=out) is out
    assert torch.equal(out, total(x, dim=1))
    outs = (torch.empty(4), torch.empty(4, dtype=torch.float64))
    assert all(map(operator.is_, welford(x, dim=0, out=outs), outs))
    assert torch.equal(outs[1], welford(x, dim=0)[1].double())
    with pytest.raises(GradientError, match="out="):
        total(x.requires_grad_(), dim=1, out=out)


def test_scalars_are_bound_by_name_in_whichever_text_they_are() -> None:
    x = torch.randn(5)
    torch.testing.assert_close(norm(x), x.norm())
    torch.testing.assert_close(norm(x, scale=8), x.norm())
    torch.testing.assert_close(norm(x, scale=torch.tensor(3.0)), x.norm())
    limit = torch.tensor(0.5)
    assert any_above(x, limit=limit).item() == bool((x > 0.5).any())
    # A tensor in place of a scalar of the map, which makes three accumulators, is differentiated.
    stretched = fuser.create_reduction_fn(
        welford.function.reduction.combine.source,
        identity=(0, 0, 0),
        map="template <typename T> void one(T x, T k, T& m, T& s, T& n) { m = k * x; s = T(0); n = T(1); }",
        finish=welford.function.reduction.finish.source,
        k=1,
    )
    k = torch.tensor(3.0, requires_grad=True)
    mean, _ = stretched(x, k=k)
    torch.testing.assert_close(torch.autograd.grad(mean, k)[0], x.mean())
    # Of a JitFunction's own, one must be given in every call.
    scaled = fuser.jit_fn("template <typename T> T scale(T x, T k) { return k * x; }", scalars=["k"])
    fn = fuser.create_reduction_fn(ADD, identity=0, map=scaled)
    with pytest.raises(ArgumentError, match="needs the scalar 'k'"):
        fn(x)
    torch.testing.assert_close(fn(x, k=3.0), 3 * x.sum())


# --- a callable among others -----------------------------------------------------------------------------------------
def test_it_is_immutable_and_can_be_pickled() -> None:
    copy = pickle.loads(pickle.dumps(norm))
    x = torch.randn(3, 4)
    assert torch.equal(copy(x, dim=1), norm(x, dim=1))
    assert repr(copy) == "<fuser.ReductionFunction add(x, *, scale)>"
    with pytest.raises(FrozenInstanceError):
        copy.defaults = {}
    # One group for each number of tensors, dimensions and keepdim.
    assert norm.along(1) is norm.along((1,))
    assert norm.along(1).spec(1) is norm.along(1).spec(1)
    assert norm.along(1) is not norm.along(1, keepdim=True)
    group = norm.along((0, -1)).spec(1).group
    assert fuser.FusionGroup.from_json(group.to_json()) == group


def test_flops_count_every_map_combine_and_finish() -> None:
    with FlopCounterMode(display=False) as counter:
        norm(torch.ones(3, 4), dim=1)
    assert counter.get_total_flops() == 12 * 2 + 9 * 1 + 3 * 2


@pytest.mark.cpu
def test_explain_and_check() -> None:
    x = torch.randn(3, 4)
    assert "1 kernel" in str(fuser.explain(total, x))
    for fn in (total, welford, logsumexp, compose, gcd, any_above, count_nonzero, largest):
        fn.check(device="cpu")


# --- errors ----------------------------------------------------------------------------------------------------------
def make(code: str = ADD, **arguments: Any) -> Any:
    return fuser.create_reduction_fn(code, **{"identity": 0} | arguments)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"code": 3}, ArgumentError, "combine functor's C\\+\\+ text, a str; got int"),
        ({"identity": ()}, ArgumentError, "identity is empty"),
        ({"identity": "0"}, ArgumentError, "identity must be a number, or one for each accumulator; got str"),
        ({"identity": (0, None)}, ArgumentError, "got None"),
        ({"identity": 10**400}, ArgumentError, "0 is no number of type T, as a is"),
        (
            {"identity": (0, 0)},
            FunctorError,
            r"line 1, column 29: add\(a, b\) takes 2 accumulators and makes 1; with an ",
        ),
        ({"code": "template <typename T> T add(T a) { return a; }"}, FunctorError, "takes 1 accumulators and makes 1"),
        (
            {"code": "template <typename T> int32_t f(int32_t a, int32_t b) { return a; }", "identity": 0.5},
            ArgumentError,
            "identity 0.5 is no number of type int32_t, as a is",
        ),
        ({"code": "template <typename T> T f(T a, int b) { return a; }"}, FunctorError, "is T as a and int as b"),
        (
            {"code": "template <typename T> T f(T* a, T b) { return b; }"},
            FunctorError,
            "line 1, column 27: a is a point",
        ),
        ({"code": "template <typename T> T f(foo a, foo b) { return a; }"}, FunctorError, "a is of type foo: an acc"),
        (
            {"code": "template <typename T> std::complex<T> f(std::complex<T> a, std::complex<T> b) { return a; }"},
            FunctorError,
            "a result of type std::complex<T> has no dtype",
        ),
        ({"map": 3}, ArgumentError, "map must be a functor's text or made by jit_fn, got int"),
        ({"finish": total}, ArgumentError, "finish must be a functor's text or made by jit_fn, got fuser"),
        ({"finish": total.along(1)}, ArgumentError, "finish=add must be a plain functor"),
        (
            {"map": "template <typename T> void m(T x, T& a, T& b) { a = b = x; }"},
            FunctorError,
            r"line 1, column 30: map=m\(x\) makes 2 accumulators, and the identity has 1",
        ),
        (
            {"map": "template <typename T> void m(T x, int& a) { a = x; }"},
            FunctorError,
            "line 1, column 35: a is int, and accumulator 0 of add is T",
        ),
        (
            {"map": "template <typename T>\ndouble m(T x) { return x; }", "code": ADD.replace("T ", "float ")},
            FunctorError,
            r"line 2, column 10: m\(x\) returns double, and the accumulator of add is float: it would narrow",
        ),
        (
            {"code": "template <typename T> int64_t f(int a, int b) { return a; }"},
            FunctorError,
            r"f\(a, b\) returns int64_t, and the accumulator of f is int",
        ),
        (
            {"finish": "template <typename T> T f(T a, T b) { return a; }"},
            FunctorError,
            r"finish=f\(a, b\) takes 2 accumulators, and the identity has 1",
        ),
        (
            {"finish": "template <typename T> T f(T a, T scale) { return a; }", "scael": 2.0},
            FunctorError,
            "no parameter 'scael' .*; did you mean 'scale'",
        ),
        ({"dim": 0}, ArgumentError, "a scalar cannot be called 'dim'"),
        (
            {"map": "template <typename T> T m(T x, T k) { return x * k; }", "k": "2"},
            ArgumentError,
            "scalar 'k' must be a Python number, got str",
        ),
        ({"map": fuser.jit_fn(ADD, out_dtypes=torch.int8)}, ArgumentError, "map=add has out_dtypes"),
    ],
)
def test_wrong_reductions(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make(**arguments)


def test_an_identity_must_be_given() -> None:
    with pytest.raises(TypeError, match="needs identity=: the number that changes nothing"):
        fuser.create_reduction_fn(ADD)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"dim": 2}, DimError, r"Dimension out of range \(expected to be in range of \[-2, 1\], but got 2\)"),
        ({"dim": (0, -3)}, IndexError, "but got -3"),
        ({"dim": (1, -1)}, ShapeError, "dim 1 appears multiple times in the list of dims"),
        ({"dim": True}, ArgumentError, "dim must be an int or a tuple of ints, got bool"),
        ({"dim": 1.0}, ArgumentError, "got float"),
        ({"dim": (0, "1")}, ArgumentError, "got str"),
        ({"dim": torch.tensor(1)}, ArgumentError, "got torch.Tensor"),
        ({"dim": np.array([0, 1])}, ArgumentError, "dim must be an int or a tuple of ints, got numpy.ndarray"),
        ({"keepdim": 1}, ArgumentError, "keepdim must be a bool, got int"),
        ({"axis": 1}, ArgumentError, r"add\(x\) has no scalar 'axis'"),
    ],
)
def test_wrong_calls(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    total(torch.ones(2, 3), dim=1, keepdim=True)
    with pytest.raises(kind, match=message):
        total(torch.ones(2, 3), **arguments)


def test_wrong_tensors_and_identities() -> None:
    with pytest.raises(ArgumentError, match=r"add\(x\) takes 1 tensor, got 2"):
        total(torch.ones(2), torch.ones(2))
    half = fuser.create_reduction_fn("template <typename T> T f(T a, T b) { return a + b - T(0.5); }", identity=0.5)
    with pytest.raises(ArgumentError, match=r"f: the identity 0.5 is no number of type int32"):
        half(torch.ones(2, dtype=torch.int32))
    with pytest.raises(ArgumentError, match="the identity 300 is no number of type int8"):
        make(identity=300)(torch.ones(2, dtype=torch.int8, device="meta"))
    scale = torch.tensor(2.0, requires_grad=True)
    with pytest.raises(GradientError, match="the scalar 'scale' has a gradient"):
        norm(torch.ones(2), scale=scale)
    with pytest.raises(ArgumentError, match="scalar 'scale' has shape"):
        norm(torch.ones(2), scale=torch.ones(2))


@pytest.mark.parametrize(
    ("code", "identity", "message"),
    [
        (ADD, 1, r"the identity of add is none: add\(1, 0\) is 1, not 0"),
        ("template <typename T> T sub(T a, T b) { return a - b; }", 0, r"sub\(0, 1\) is -1, not 1"),
        ("template <typename T> T larger(T a, T b) { return a > b ? a : b; }", -1e30, "larger"),
        ("template <typename T> T f(T a, T b) { return a + b - a * a * b * b; }", 0, "f is not associative.* a = "),
        ("template <typename T> T f(T a, T b) { return a == 0 ? b : b == 0 ? a : a - b; }", 0, "f is not associative"),
        ("template <typename T> int f(int a, int b) { return a == 0 ? b : b == 0 ? a : a - b; }", 0, "not associative"),
    ],
)
def test_check_tries_the_identity_and_the_order(code: str, identity: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make(code, identity=identity).check(device="cpu")


@pytest.mark.cpu
def test_check_tries_the_dtype_that_it_is_told() -> None:
    both = fuser.create_reduction_fn("template <typename T> T both(T a, T b) { return a & b; }", identity=255)
    least = fuser.create_reduction_fn(
        "template <typename T> T least(T a, T b) { return a < b ? a : b; }", identity=2**31 - 1
    )
    either = fuser.create_reduction_fn("template <typename T> T either(T a, T b) { return a || b; }", identity=False)
    for reduction, dtype, other in (
        (both, torch.uint8, torch.int32), (least, torch.int32, torch.float32), (either, torch.bool, torch.float32),
    ):  # fmt: skip
        reduction.check(device="cpu", dtype=dtype)
        with pytest.raises(ArgumentError, match=r"the identity of .* is none"):
            reduction.check(device="cpu", dtype=other)


def test_check_tries_what_pads_the_tree() -> None:
    # The difference of two infinities, where the identity meets itself.
    careless = fuser.create_reduction_fn(
        "template <typename T> void merge(T ma, T sa, T mb, T sb, T& m, T& s) "
        "{ m = ma > mb ? ma : mb; s = sa * exp(ma - m) + sb * exp(mb - m); }",
        identity=(-math.inf, 0),
    )
    with pytest.raises(ArgumentError, match=r"merge\(-inf, 0, -inf, 0\) is -inf, nan, not -inf, 0"):
        careless.check(device="cpu")


@pytest.mark.parametrize(
    ("code", "identity", "message"),
    [
        ("template <typename T> T f(T a, T b) { if (a > b) return a; }", 0, "column 39: 'f' returns nothing on a path"),
        ("template <typename T> void f(T a, T b, T c, T d, T& e, T& g) { e = a + c; }", (0, 0), "assigned to 'g'"),
    ],
)
def test_check_blames_the_text_before_the_identity(code: str, identity: Any, message: str) -> None:
    with pytest.raises(FunctorError, match=message):
        make(code, identity=identity).check(device="cpu")


def test_a_text_without_an_eager_version_is_an_error_that_names_it() -> None:
    fn = fuser.create_reduction_fn("template <typename T> T add(T a, T b) { goto end; end: return a + b; }", identity=0)
    with pytest.raises(FallbackError, match="'add' has no eager version") as caught:
        fn(torch.ones(3))
    # It takes no fallback=.
    assert "jit_fn" not in str(caught.value)
    with pytest.raises(GradientError, match="'add' has no derivative"):
        fn(torch.ones(3, requires_grad=True))


# --- derivatives -----------------------------------------------------------------------------------------------------
def arguments_of(fn: Any, *shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    count = len(fn.function.functor.tensors)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(count)]


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients(name: str) -> None:
    fn = SMOOTH[name]
    for dim, shape in ((None, (5,)), (1, (2, 3)), ((0, 2), (2, 2, 3))):
        arguments = arguments_of(fn, *shape)
        check = functools.partial(torch.autograd.gradcheck, fast_mode=True, check_forward_ad=True)
        assert check(lambda *x, dim=dim: fn(*x, dim=dim), arguments)
    check = functools.partial(torch.autograd.gradgradcheck, fast_mode=True)
    assert check(lambda *x: fn(*x, dim=(0, 2), keepdim=True), arguments)


def test_gradients_of_broadcast_and_half_arguments() -> None:
    x, y = torch.randn(3, 4).half().requires_grad_(), torch.randn(4, requires_grad=True)
    found = torch.autograd.grad(dot(x, y, dim=1).sum(), (x, y))
    torch.testing.assert_close(found[0], y.detach().expand(3, 4).half())
    torch.testing.assert_close(found[1], x.detach().float().sum(0))
    assert [item.dtype for item in found] == [torch.float16, torch.float32]
    x = torch.randn(4).half().requires_grad_()
    found = torch.autograd.grad(norm(x), x)[0]
    torch.testing.assert_close(found, (x.detach().float() / x.detach().float().norm()).half())
    # More than a batch, nothing at all, and a sum that is finished.
    long = torch.randn(2, 9000, requires_grad=True)
    torch.testing.assert_close(torch.autograd.grad(norm(long), long)[0], (long / long.norm()).detach())
    none = torch.empty(0, 3, requires_grad=True)
    assert torch.autograd.grad(logsumexp(none, dim=0).sum(), none)[0].shape == (0, 3)


def test_a_sum_is_differentiated_without_its_tree() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    y = torch.randn(4)
    result = dot(x, y, dim=1)
    fuser.reset_stats()
    result.sum().backward()
    # One pointwise group, on what the gradient is spread over.
    assert sum(fuser.stats()["fallbacks"].values()) == 1
    assert torch.equal(x.grad, y.expand(3, 4))


def test_what_has_no_gradient_says_so() -> None:
    # Through an accumulator that is an integer nothing comes, though the result is of a floating dtype.
    whole = fuser.create_reduction_fn("template <typename T> T f(int a, int b) { return a + b; }", identity=0)
    x = torch.tensor([1.5, 2.5], requires_grad=True)
    assert torch.autograd.grad(whole(x), x)[0].tolist() == [0.0, 0.0]
    # Nor through a result that is one.
    count = count_nonzero(torch.ones(3, requires_grad=True))
    assert not count.requires_grad
    assert count == 3
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    k = fuser.create_reduction_fn(ADD, identity=0, map="template <typename T> T m(T x, T k) { return k * x; }", k=1.0)
    x = torch.randn(4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda k_: k(x, k=k_), (scale,))


# --- transforms, graphs ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dim", [None, 0, -1, (0, 1)])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_vmap(dim: Any, at: int) -> None:
    x = torch.randn(3, 4, 5)
    for fn in (total, logsumexp):
        found = torch.vmap(lambda item, fn=fn: fn(item, dim=dim, keepdim=True), in_dims=at)(x)
        assert torch.equal(found, torch.stack([fn(item, dim=dim, keepdim=True) for item in x.unbind(at)]))


def test_transforms_of_transforms() -> None:
    x, y = torch.randn(3, 4, 5), torch.randn(3, 5)
    found = torch.vmap(lambda a, b: dot(a, b, dim=0))(x, y)
    assert torch.equal(found, torch.stack([dot(a, b, dim=0) for a, b in zip(x, y, strict=True)]))
    assert torch.equal(torch.vmap(lambda a: total(a))(y[0]), y[0])
    torch.testing.assert_close(torch.vmap(torch.func.grad(logsumexp))(y), y.softmax(1))
    ties = torch.relu(y)
    torch.testing.assert_close(torch.vmap(torch.func.grad(logsumexp))(ties), ties.softmax(1))
    torch.testing.assert_close(torch.func.hessian(logsumexp)(y[0]), torch.func.hessian(lambda a: a.logsumexp(0))(y[0]))
    torch.testing.assert_close(torch.func.jvp(total, (y,), (y,))[1], total(y))


def test_a_group_with_neighbours_on_both_sides() -> None:
    @fuser.fuse
    def softmax(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = x * y
        return torch.exp(z - logsumexp(z, dim=-1, keepdim=True)), total(x, dim=0) + y

    x, y = torch.randn(3, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    found = softmax(x, y)
    assert len(softmax.groups) == 1
    torch.testing.assert_close(found, ((x * y).softmax(1), x.sum(0) + y))
    x.requires_grad_()
    y.requires_grad_()
    assert torch.autograd.gradcheck(softmax, (x, y), fast_mode=True)
    assert torch.autograd.gradgradcheck(softmax, (x, y), fast_mode=True)
    batch = torch.randn(2, 3, 4, dtype=torch.float64)
    biases = torch.randn(2, 4, dtype=torch.float64)
    mapped = torch.vmap(softmax)(batch, biases)
    one_by_one = zip(*map(softmax, batch, biases), strict=True)
    for one, other in zip(mapped, one_by_one, strict=True):
        assert torch.equal(one, torch.stack(other))


def test_one_element_is_as_weak_as_torchs() -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return total(x) * y

    x, y = torch.randn(3, dtype=torch.float64), torch.randn(4)
    assert step(x, y).dtype is torch.float32
    for device in ("cpu", "meta"):
        assert fuser.fuse(step)(x.to(device), y.to(device)).dtype is torch.float32


def test_fake_and_meta_tensors_have_the_reduced_shape() -> None:
    found = total(torch.empty(3, 4, 5, device="meta", dtype=torch.half), dim=(0, -1), keepdim=True)
    assert (found.shape, found.dtype, found.device.type) == ((1, 4, 1), torch.half, "meta")
    with FakeTensorMode():
        x = torch.empty(3, 4)
        assert [item.shape for item in welford(x, dim=1)] == [(3,), (3,)]
        assert gcd(torch.ones(3, 4, dtype=torch.int64), dim=0).shape == (4,)
    graph = make_fx(lambda a: total(a, dim=1), tracing_mode="symbolic")(torch.ones(3, 4))
    assert torch.equal(graph(torch.ones(5, 6)), torch.full((5,), 6.0))


@pytest.mark.parametrize("backend", ["aot_eager", fuser_backend], ids=["aot_eager", "fuser"])
def test_compiled_without_a_break(backend: Any) -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return logsumexp(torch.relu(x * y), dim=-1) + total(x, dim=(2,)) * norm(y, scale=float(y.shape[0]))

    torch._dynamo.reset()
    compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=True)
    for count in (4, 7):
        x, y = torch.randn(2, 3, count, requires_grad=True), torch.randn(count)
        results = [fn(x, y) for fn in (compiled, step)]
        assert torch.equal(*results)
        assert torch.equal(*(torch.autograd.grad(result.sum(), x)[0] for result in results))


@pytest.mark.cpu
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_dimension_among_the_arguments_of_what_is_compiled(dynamic: bool | None) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, dim: total(x, dim=dim) * 2, backend="eager", fullgraph=True, dynamic=dynamic)
    x = torch.randn(3, 4, 5, 6)
    for dim in (0, 2, 3, -1, (2, 3), [3, 0]):
        assert torch.equal(compiled(x, dim), total(x, dim=dim) * 2)
    with pytest.raises(Exception, match=r"dim must be an int or a tuple of ints, got bool"):
        compiled(x, True)


@pytest.mark.cpu
def test_a_number_that_is_not_known_when_a_graph_is_traced() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return norm(x, scale=float(x.shape[0])) + x

    torch._dynamo.reset()
    compiled = torch.compile(step, backend=fuser_backend, fullgraph=True, dynamic=True)
    for count in (4, 7):
        x = torch.randn(count)
        assert torch.equal(compiled(x), step(x))


def test_exported() -> None:
    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return logsumexp(x, dim=-1)

    x = torch.randn(3, 4)
    dynamic = {"x": {0: torch.export.Dim("rows")}}
    program = torch.export.export(Module(), (x,), dynamic_shapes=dynamic)
    assert torch.equal(program.module()(x[:2]), logsumexp(x[:2], dim=-1))


# --- the place along the reduced dimensions --------------------------------------------------------------------------
argmax = fuser.create_reduction_fn(
    """template <typename T> void later(T va, int64_t ia, T vb, int64_t ib, T& v, int64_t& i) {
      const bool is_later = ia < 0 || vb > va;
      v = is_later ? vb : va;
      i = is_later ? ib : ia;
    }""",
    identity=(-math.inf, -1),
    map="template <typename T> void place(T x, int64_t i, T& v, int64_t& at) { v = x; at = i; }",
    finish="template <typename T> int64_t second(T v, int64_t i) { return i; }",
    index="i",
)


def test_wrong_dimensions_of_what_asks_for_places_name_its_functor() -> None:
    with pytest.raises(DimError, match=r"^later: Dimension out of range"):
        argmax(torch.ones(2, 3), dim=2)
    with pytest.raises(ShapeError, match=r"^later: dim 1 appears multiple times"):
        argmax(torch.ones(2, 3), dim=(1, -1))


@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 9000)])
def test_argmax(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    for dim in (None, 0, -1):
        found = argmax(x, dim=dim)
        assert found.dtype is torch.int64
        assert torch.equal(found, x.argmax(dim))
    if len(shape) == 3:
        # Along several dimensions the place is that among all of them, row-major.
        assert torch.equal(argmax(x, dim=(0, 2)), x.permute(1, 0, 2).flatten(1).argmax(1))
    # Of equal elements the first.
    assert argmax(torch.ones(shape)).item() == 0


def test_the_place_in_other_hands() -> None:
    x = torch.randn(2, 3, 4)
    assert repr(argmax) == "<fuser.ReductionFunction later(x, i=index)>"
    assert torch.equal(pickle.loads(pickle.dumps(argmax))(x, dim=1), x.argmax(1))
    assert torch.equal(torch.vmap(lambda row: argmax(row, dim=0), in_dims=1)(x), x.transpose(0, 1).argmax(1))
    assert torch.equal(torch.vmap(argmax)(x), x.flatten(1).argmax(1))

    @fuser.fuse
    def fused(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return argmax(torch.exp(a * b), dim=1) * 2

    y = torch.rand(4) + 0.5
    assert torch.equal(fused(x, y), (x * y).argmax(1) * 2)
    assert len(fused.groups) == 1
    assert torch.equal(torch.vmap(fused, in_dims=(0, None))(x[:, None], y), (x * y)[:, None].argmax(2) * 2)
    torch._dynamo.reset()
    compiled = torch.compile(lambda a: argmax(a, dim=(0, 1)), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), x.flatten(0, 1).argmax(0))
    with FakeTensorMode():
        assert argmax(torch.empty(3, 4), dim=0).shape == (4,)
    with pytest.raises(ArgumentError, match=r"later\(x, i=index\) takes 1 tensor, got 2"):
        argmax(x, x)


def test_gradients_beside_the_place() -> None:
    weighted = fuser.create_reduction_fn(
        ADD, identity=0, map="template <typename T> T times(T x, int64_t i) { return x * T(i); }", index="i"
    )
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(weighted(x, dim=1), (x * torch.arange(4)).sum(1))
    assert torch.autograd.gradcheck(lambda a: weighted(a, dim=0), (x,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda a: weighted(a * a), (x,))
    best = fuser.create_reduction_fn(
        argmax.function.reduction.combine.source,
        identity=(-math.inf, -1),
        map=argmax.function.functor.source,
        index="i",
    )
    value, place = best(x, dim=1)
    assert torch.equal(torch.autograd.grad(value.sum(), x)[0], torch.nn.functional.one_hot(place, 4).double())


@pytest.mark.cpu
def test_the_place_in_kernels() -> None:
    x = torch.randn(5, 3, 700)
    for dim in (None, 0, 1, (0, 2), -1):
        fuser.reset_stats()
        found = argmax(x, dim=dim)
        assert not fuser.stats()["fallbacks"]
        fuser.override_can_fuse_on_cpu(False)
        assert torch.equal(found, argmax(x, dim=dim))
        fuser.override_can_fuse_on_cpu(True)
    argmax.check(device="cpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"index": 3, "map": ADD}, "index must be the name of a parameter, a str; got int"),
        ({"index": "i"}, "index='i' is to be a parameter of map, and there is no map"),
        ({"index": "j", "map": "template <typename T> T m(T x, int64_t i) { return x; }"}, "no parameter 'j'"),
        (
            {"map": fuser.jit_fn("template <typename T> T m(T x, int64_t i) { return x; }", index="i")},
            "map=m numbers all elements: give index= to create_reduction_fn instead",
        ),
    ],
)
def test_wrong_places(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make(**arguments)


@pytest.mark.cpu
def test_a_number_that_only_the_call_can_read() -> None:
    # A scalar of finish is no tensor of the map's: fused, compiled and exported it is read where the call is made.
    scaled = fuser.create_reduction_fn(
        "template <typename T> T add(T a, T b) { return a + b; }",
        identity=0,
        finish="template <typename T> T times(T x, T s) { return x * s; }",
        s=1.0,
    )
    x = torch.randn(5, 5)
    wanted = scaled(x, dim=1, s=float(x.max())) * 2

    def run(x: torch.Tensor) -> torch.Tensor:
        return scaled(x, dim=1, s=x.max() + 0) * 2

    assert torch.equal(fuser.fuse(run)(x), wanted)
    for backend in ("fuser", "eager"):
        torch._dynamo.reset()
        assert torch.equal(torch.compile(run, backend=backend)(x), wanted)

    class Scaled(torch.nn.Module):
        def forward(self, x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
            return scaled(x, dim=1, s=s)

    exported = torch.export.export(Scaled(), (x, torch.tensor(2.0))).module()
    assert torch.equal(exported(x, torch.tensor(3.0)), scaled(x, dim=1, s=3.0))


@pytest.mark.cpu
def test_an_identity_is_read_as_its_accumulators_type() -> None:
    add = "template <typename T> T add(T a, T b) { return a + b; }"
    assert fuser.create_reduction_fn(add, identity=0j)(torch.ones(2, 3), dim=1).tolist() == [3.0, 3.0]


def test_a_compensated_sum_is_associative_enough() -> None:
    compensated = fuser.create_reduction_fn(
        """template <typename T> void add(T s, T c, T s2, T c2, T& r, T& e) {
          T t = s + s2, z = t - s;
          e = c + c2 + ((s - (t - z)) + (s2 - z));
          r = t;
        }""",
        identity=(0, 0),
        map="template <typename T> void one(T x, T& s, T& c) { s = x; c = T(0); }",
    )
    assert check_reduction(compensated.function, {}) is not None
