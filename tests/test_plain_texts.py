"""What functors plainly do: where it is not plain, the careful answer."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from cuda_emulation import run_emulated
from graph_checks import trace
from row_groups import GROUPS, draw, text

import fuser
from fuser.compiler import register
from fuser.cxx.functor import parse_functor
from fuser.fx import fuse_graph
from fuser.fx.fusion_node import FusionModule
from fuser.plain_texts import chooses, count_names, counts_elements, may_end_in_product
from fuser.planner import plan_texts
from fuser.route import run

ONE = "void one(T x, T& m, T& n) { m = x; n = T(1); }"
MERGE = "void merge(T m, T n, T m2, T n2, T& a, T& c) { c = n + n2; a = m + (m2 - m) * (c > 0 ? n2 / c : T(0)); }"


@pytest.mark.parametrize(
    ("mapped", "combine", "counts"),
    [
        (ONE, MERGE, True),
        (ONE.replace("T(1)", "2"), MERGE, True),
        (ONE.replace("T(1)", "x"), MERGE, False),
        (ONE.replace("T(1)", "0"), MERGE, False),
        (ONE.replace("n = T(1);", "n = T(1); n = x;"), MERGE, False),
        (ONE.replace("n = T(1);", "if (x > 0) n = T(1);"), MERGE, False),
        (ONE.replace("n = T(1);", "n = T(1); n += x;"), MERGE, False),
        (ONE, MERGE.replace("n + n2", "n + n2 * m"), False),
        (ONE, MERGE.replace("c = n + n2;", "c = n + n2; ++c;"), False),
        (ONE, MERGE.replace("c = n + n2;", "n = m; c = n + n2;"), False),
        (ONE, MERGE.replace("c = n + n2;", "c = n + n2; change(c);"), False),
        (ONE, MERGE.replace("c = n + n2;", "T* p = &c; c = n + n2;"), False),
    ],
)
def test_counts(mapped: str, combine: str, counts: bool) -> None:
    texts = [text(item, outputs=2) for item in (mapped, combine)]
    assert counts_elements(*texts, 1) == counts
    assert not counts_elements(*texts, 0)
    # Parts of elements that count twice are none of so many elements.
    assert count_names(*texts) == ({"n", "n2", "c"} if counts and "T(1)" in mapped else set())


@pytest.mark.parametrize(
    ("combine", "identity", "is_choice"),
    [
        ("T f(T a, T b) { return a != a || a > b ? a : b; }", (-math.inf,), True),
        ("T f(T a, T b) { return a != a || a < b ? a : b; }", (math.inf,), True),
        ("T f(T a, T b) { return fmax(a, b); }", (-math.inf,), True),
        # Numbers that the identity hides.
        ("T f(T a, T b) { return fmax(a, b); }", (0,), False),
        ("T f(T a, T b) { return fmin(a, b); }", (-math.inf,), False),
        # Of three, the middle one being none: the last one, or the larger of the others.
        ("T f(T a, T b) { return a > b ? a : b; }", (-math.inf,), False),
        ("T f(T a, T b) { return a + b; }", (0.0,), False),
    ],
)
def test_choices(combine: str, identity: tuple[float, ...], is_choice: bool) -> None:
    assert chooses(text(combine), identity) == is_choice


@pytest.mark.cpu
def test_parts_of_as_many_elements_have_one_count() -> None:
    build, inputs_of = GROUPS["moments"]
    inputs, group = inputs_of(draw((5, 1024), torch.float32), (1,)), build((1,))
    (_, args), *_ = plan_texts(register(group), inputs, torch.device("cuda", 0))
    assert args.tuning.multiple == 1024, "all of a warp's vectors are there"
    for got, want in zip(run_emulated(group, inputs), run(register(group), inputs), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("body", "may_be"),
    [
        ("return alpha * x + y;", False),
        ("return x - (y * alpha);", False),
        ("return alpha * x;", True),
        ("return x * - y;", True),
        ("return x * y + T(0);", True),
        ("return x * y - T();", True),
        ("return x * y - .0f;", True),
        ("return x * y - false;", True),
        ("return (T) - x * y;", True),
        ("return x > 0 ? x + y : x * y;", True),
        ("return (x + y) * alpha;", True),
        ("return exp(x) + y, x * y;", True),
    ],
)
def test_sums_are_no_products(body: str, may_be: bool) -> None:
    assert may_end_in_product(parse_functor(f"template <typename T> T f(T x, T y, T alpha) {{ {body} }}")) == may_be


@pytest.mark.cpu
def test_only_products_that_may_be_added_are_kept_apart() -> None:
    """In strict kernels on CUDA, where ptxas contracts; what a product or a quotient reads is not added to anything."""

    def crossed(*bodies: str) -> int:
        fns = [fuser.jit_fn(f"template <typename T> T f(T x, T y) {{ {body} }}") for body in bodies]
        x, y = torch.ones(2, 8)
        fused = fuser.fuse(lambda x, y: functools.reduce(lambda made, fn: fn(made, y), fns, x))
        fused(x, y)
        return fuser.debug_get_fused_kernel_code(fused.groups[0], (x, y), device="cuda").count("fuser_cross(fuser_cast")

    product, total, quotient, other = "return x * y;", "return x + y;", "return x / y;", "return x > y ? x : y;"
    assert crossed(product, total) == 1
    assert crossed(product, product, total) == 1
    assert crossed(product, quotient, product) == 0
    assert crossed(total, total) == 0
    assert crossed(product, other, total) == 1, "it may return what it is given"


@pytest.mark.cpu
def test_what_is_written_where_the_largest_element_is_found() -> None:
    # Two elements at a time, nothing but that is found.
    given = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    aten = torch.ops.aten
    made = trace(lambda call, x: (call(aten.log_softmax.int, x, 1), call(aten.neg.default, x)), [given], "cuda")
    (fused,) = (item for item in fuse_graph(made).modules() if isinstance(item, FusionModule))
    logarithm, negative = run_emulated(fused.group, [given])
    assert torch.equal(negative, -given)
    assert torch.allclose(logarithm, given.log_softmax(1), rtol=0.01)
