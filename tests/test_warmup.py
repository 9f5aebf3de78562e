"""Warm-up over ranges of sizes: afterwards no call within them compiles anything."""

from __future__ import annotations

import io
import itertools
import math
import random
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim as ExportDim

import fuser
from fuser import planner
from fuser.errors import ArgumentError, NoCompileError
from fuser.graph import GroupBuilder
from fuser.kernel_spec import KernelSpec
from fuser.ops import OPS, composite_function, reduction_function
from fuser.order_check import OrderCase
from fuser.planner import find_texts
from fuser.progress import Progress
from fuser.tensor_desc import TensorDesc
from fuser.warming import cover, symbolic
from fuser.warming.cover import SizedCall, evaluate, find_classes
from fuser.warming.dims import MAX_POINTS, Dim, draw_points, stretch

ADD = "template <typename T> T add(T a, T b) { return a + b; }"
AXPY = "template <typename T> T axpy(T x, T y, T alpha) { return alpha * x + y * y; }"
axpy = fuser.create_jit_fn(AXPY, alpha=1.0)
total = fuser.create_reduction_fn(ADD, identity=0)
sums = fuser.fuse(lambda x: (x * 2).sum(-1)).groups[0]


def softmax_beside_maxima() -> fuser.FusionGroup:
    builder = GroupBuilder("strict")
    x = builder.add_input("x")
    (share,) = builder.apply(composite_function("_softmax", (1,)), [x])
    (top,) = builder.apply(reduction_function("amax", (1,), True), [x])
    return builder.build(builder.apply(OPS["mul"].function, [share, top]))


N, M = Dim("n", 1, 20), Dim("m", 1, 300)


# --- sizes -------------------------------------------------------------------------------------------------------
def test_dims_say_what_is_wrong_with_them() -> None:
    for bounds in ((4, 3), (-1, 3)):
        with pytest.raises(ArgumentError, match="there is no size"):
            Dim("n", *bounds)
    with pytest.raises(ArgumentError, match="must be an int, got float"):
        Dim("n", 1, 2.5)  # type: ignore[arg-type]
    assert Dim("n", np.int64(2), np.int32(5)) == Dim("n", 2, 5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ({"z": {0: N}}, r"names 'z'; the arguments are x, y, alpha"),
        ({"x": {2: N}}, r"x has no dimension 2"),
        ({"x": {0: 7}}, r'x, dimension 0: give fuser.Dim\("n", 1, 4096\), got 7'),
        ({"x": {0: ExportDim("n")}}, r"give fuser.Dim"),
        ({"x": {0: N}, "y": {0: Dim("n", 1, 5)}}, r"there are Dim\(name='n', min=1, max=20\) and Dim"),
        ({"x": 3}, "x takes a dict or a sequence, got int"),
        ({"alpha": {0: N}}, "alpha is no tensor, but float"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes: Any, said: str) -> None:
    x = torch.empty(3, 5, device="meta")
    with pytest.raises(ArgumentError, match=said):
        axpy.warmup(x, x, alpha=0.5, dynamic_shapes=shapes)


def test_strides_follow_sizes() -> None:
    x = torch.empty(4, 6, 8)
    for sample, sizes in itertools.product(
        (x, x.transpose(0, 2), x[:, :, ::2], x[:1], x.to(memory_format=torch.contiguous_format).permute(1, 2, 0)),
        ((2, 3, 5), (7, 1, 4)),
    ):
        grown = torch.empty_strided(sizes, stretch(sample, sizes))
        assert sample.is_contiguous() <= grown.is_contiguous()
        assert sorted(range(3), key=lambda dim: -sample.stride(dim)) == sorted(
            range(3), key=lambda dim: (-grown.stride(dim), dim)
        ) or 1 in (*sizes, *sample.shape)
        assert (min(sample.stride()) == 2) == (min(grown.stride()) == 2)
    assert stretch(torch.empty(1).expand(3, 5), (7, 9)) == (0, 0)
    # Rows with gaps between them, whatever the stride of a dimension of size 1.
    assert stretch(torch.empty(2, 1, 4)[..., 1:], (2, 1, 3)) == (4, 3, 1)
    assert stretch(torch.empty(3, 2)[:, :1], (5, 1)) == (2, 1)
    assert stretch(torch.empty_strided((3, 1), (2, 2)), (5, 1)) == (2, 1)


def test_points_are_all_or_those_that_matter() -> None:
    assert draw_points([]).shape == (1, 0)
    assert draw_points([(1, 3), (5, 6)]).tolist() == [[1, 5], [1, 6], [2, 5], [2, 6], [3, 5], [3, 6]]
    many = draw_points([(1, 1 << 20), (1, 1 << 40)])
    assert many.shape == (MAX_POINTS, 2)
    assert {1, 4095, 4096, 4097, 1 << 20} <= {*many[:, 0].tolist()}
    assert many.min() == 1
    assert many[:, 1].max() == 1 << 40


def test_expressions_of_sympys_are_what_they_stand_for() -> None:
    import sympy
    from torch.utils._sympy.functions import FloorDiv, Max, Mod

    n, m = sympy.symbols("n m", integer=True, positive=True)
    for made in (
        n * m + 3 - 2 * n, n**2 * m, FloorDiv(n + 1, 2), Mod(n, 4), Max(n, m), sympy.Eq(n, m), sympy.Ne(n * m, 12),
        n < m, n * m >= 12, sympy.And(n > 2, m > 2), sympy.Or(n > 7, m > 2), sympy.Not(sympy.Eq(n, 4)),
        sympy.Piecewise((n, n > m), (m, True)),
    ):  # fmt: skip
        for sizes in ((3, 4), (4, 3), (8, 1)):
            known = dict(zip((n, m), sizes, strict=True))
            assert evaluate(made, known) == made.subs(known), made


# --- layout classes ----------------------------------------------------------------------------------------------
def dense(shape: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


SHAPES: dict[str, tuple[KernelSpec, Callable[[Any, Any], list[tuple[Any, ...]]], int]] = {
    "dense": (axpy.spec(2), lambda n, m: [(n, m), (n, m)], 1),
    "a row for all": (axpy.spec(2), lambda n, m: [(n, m), (m,)], 1),
    "a column for all": (axpy.spec(2), lambda n, m: [(n, m), (n, 1)], 1),
    "blocks": (axpy.spec(2), lambda n, m: [(n, m, 6), (m, 1)], 1),
    "an outer product": (axpy.spec(2), lambda n, m: [(n, 1), (1, m)], 1),
    "rows": (total.along(-1).spec(1), lambda n, m: [(n, m)], 0),
    "columns": (total.along(0).spec(1), lambda n, m: [(n, m)], 0),
    "torch's sums": (fuser.compiler.register(sums), lambda n, m: [(n, m)], len(sums.inputs) - 1),
    "torch's softmax": (fuser.compiler.register(softmax_beside_maxima()), lambda n, m: [(n, m)], 0),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("device", "name"),
    # On CPUs its order is not known.
    [item for item in itertools.product(("cpu", "cuda:0"), SHAPES) if item != ("cpu", "torch's softmax")],
)
def test_classes_have_all_kernels_of_a_range(device: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # All lengths, against one of each class. Nothing is compared with torch's kernels; verdicts of ops of several steps
    # are kept by sizes, which makes no class of each.
    verdicts = set[str]()

    def is_kept(case: OrderCase, _: Any) -> bool:
        if not case.function.is_composite:
            verdicts.add(case.length())
        return True

    monkeypatch.setattr(planner, "is_kept", is_kept)
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    spec, shapes_of, numbers = SHAPES[name]
    where, env = torch.device(device), ShapeEnv(duck_shape=False, specialize_zero_one=False)
    bounds = {}

    def symbol(dim: Dim) -> Any:
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        source: Any = ConstantSource(dim.name)
        made = env.create_symbol(7, source, DimDynamic.DYNAMIC, do_not_specialize_zero_one=True)
        bounds[made] = (dim.min, dim.max)
        return env.create_symintnode(made, hint=7, source=source)

    def describe(n: Any, m: Any) -> tuple[TensorDesc, ...]:
        made = [TensorDesc(torch.Tensor, torch.float32, x, dense(x), where) for x in shapes_of(n, m)]
        return (*made, *[TensorDesc(float)] * numbers)

    short = Dim("m", 1, {"rows": 300, "torch's sums": 300, "torch's softmax": 140}.get(name, 70))
    found = list(find_classes(SizedCall(spec, describe(symbol(N), symbol(short)), bounds)))
    texts, ready = {text for one in found for text in one.texts}, {*verdicts}
    assert len(found) < 100
    for n, m in itertools.product((1, 2, 7, 20), range(1, short.max + 1)):
        assert texts.issuperset(find_texts(spec, describe(n, m))), (n, m)
        assert ready.issuperset(verdicts), (n, m)


# --- warm-ups ----------------------------------------------------------------------------------------------------
def is_ready(
    function: Callable[..., Any], make: Callable[[int, int], Sequence[Any]], *, device: str = "cpu", most: int = M.max
) -> None:
    """Call for random sizes, gradients included, where nothing may be compiled."""
    drawn = random.Random(0)
    fuser.reset_stats()
    with fuser.config.patch(no_compile=True):
        for n, m in [(1, 1), (1, most), (20, 1), (20, most), (2, 2)] + [
            (drawn.randint(1, 20), drawn.randint(1, most)) for _ in range(30)
        ]:
            with torch.device(device):
                arguments = make(n, m)
            made = function(*arguments)
            if made.requires_grad:
                (made.sum() if n % 2 else (made * torch.ones_like(made)).sum()).backward()
    assert fuser.stats()["compiles"] == 0
    assert fuser.stats()["fallbacks"] == {}


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


@pytest.mark.cpu
def test_a_functor_is_ready_for_a_range() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    own = fuser.create_jit_fn(AXPY.replace("axpy", "warm_one"), alpha=1.0)
    launched = fuser.stats()["launches"]
    row = torch.empty(5, device="meta", requires_grad=True)
    own.warmup(
        torch.empty(3, 5, device="meta"),
        row,
        dynamic_shapes={"x": {0: N, 1: M}, "y": [ExportDim("m", min=1, max=300)]},
        backward=True,
    )
    assert fuser.stats()["launches"] == launched
    is_ready(own, lambda n, m: (torch.randn(n, m), leaf(m)), device=device)
    with fuser.config.patch(no_compile=True), pytest.raises(NoCompileError) as raised:
        own(*[torch.ones(4, 5, dtype=torch.float64)] * 2)
    tensor = "torch.empty_strided((4, 5), (5, 1), dtype=torch.float64, device='cpu')"
    assert "the kernel of warm_one is not ready" in str(raised.value)
    assert "layout class: 1 dimension, inputs (dense, dense) along the innermost one" in str(raised.value)
    call = f"warm_one.warmup({tensor}, {tensor}, alpha=1.0)"
    assert f"; {call} covers it, with dynamic_shapes= also other sizes" in str(raised.value)
    # And it does.
    eval(call, {"torch": torch, "warm_one": own})
    with fuser.config.patch(no_compile=True):
        own(*[torch.ones(4, 5, dtype=torch.float64)] * 2)


@pytest.mark.cpu
@pytest.mark.parametrize("last", [20, 1 << 21], ids=["all sizes", "some sizes"])
@pytest.mark.parametrize("mode", [FakeTensorMode, lambda: torch.device("meta")], ids=["fake", "default device"])
def test_modes_around_choose_no_sizes(mode: Callable[[], Any], last: int) -> None:
    x, sizes = torch.ones(3, 5), {"x": {0: Dim("n", 1, last)}}
    with mode() as entered:
        given = entered.from_tensor(x) if isinstance(entered, FakeTensorMode) else x
        axpy.warmup(given, given, alpha=0.5, dynamic_shapes={**sizes, "y": sizes["x"]})
    with fuser.config.patch(no_compile=True):
        assert torch.equal(axpy(x, x, alpha=0.5), torch.full((3, 5), 1.5))


@pytest.mark.cpu
def test_a_missing_kernel_says_which_warm_up_it_lacks() -> None:
    lone_cube = fuser.create_jit_fn("template <typename T> T lone_cube(T x) { return x * x * x; }")
    fused = fuser.fuse(lambda x: lone_cube(x).exp() + 1)
    x = torch.randn(6, dtype=torch.float64)
    sample = "torch.empty_strided((6,), (1,), dtype=torch.float64, device='cpu')"
    with fuser.config.patch(no_compile=True):
        with pytest.raises(
            NoCompileError, match=re.escape(f"the warm-up of what calls it covers it, here with {sample}")
        ):
            fused(x)
        with pytest.raises(NoCompileError, match=re.escape(f"; lone_cube.warmup({sample}) covers it")):
            lone_cube(x)
    lone_cube.warmup(x)
    with (
        fuser.config.patch(no_compile=True),
        pytest.raises(NoCompileError, match="a warm-up with backward=True covers"),
    ):
        lone_cube(x.requires_grad_()).sum().backward()
    lone_cube.warmup(x, backward=True)
    with fuser.config.patch(no_compile=True):
        lone_cube(x).sum().backward()


MISSING = {
    "a transposed out": lambda own: own(WIDE, out=torch.empty(8, 4, dtype=torch.float64).t()),
    "columns of a wider out": lambda own: own(WIDE, out=torch.empty(4, 20, dtype=torch.float64)[:, 3:11]),
    "an out that is copied to": lambda own: own(WIDE, out=torch.empty(8, 4).t()),
    "an out that is resized": lambda own: own(WIDE.t(), out=torch.empty(0, dtype=torch.float64)),
}
WIDE = torch.ones(4, 8, dtype=torch.float64)


@pytest.mark.cpu
@pytest.mark.parametrize("name", MISSING)
def test_what_is_written_to_is_warmed_up(name: str) -> None:
    words = name.replace(" ", "_")
    own = fuser.create_jit_fn(f"template <typename T> T {words}(T x) {{ return x * T(7); }}")
    with fuser.config.patch(no_compile=True), pytest.raises(NoCompileError) as raised:
        MISSING[name](own)
    found = re.search(r"; (\w+\.warmup\(.*out=.*\)) covers it", str(raised.value))
    assert found is not None
    eval(found[1], {"torch": torch, words: own})
    with fuser.config.patch(no_compile=True):
        MISSING[name](own)


@pytest.mark.cpu
def test_two_tensors_that_are_written_to_are_warmed_up_for_a_range() -> None:
    own = fuser.create_multi_output_jit_fn(
        "template <typename T> void warm_both(T x, T& a, T& b) { a = x; b = -x; }", 2
    )
    total = fuser.create_reduction_fn("template <typename T> T warm_sum(T a, T b) { return a + b; }", identity=0)
    wide = torch.empty(5, 20, device="meta")
    shapes = {"x": {0: N}, "out": ({0: N}, {0: N})}
    own.warmup(wide[:, :7], out=(wide[:, :7], wide[:, 3:10]), dynamic_shapes=shapes)
    total.warmup(wide, dim=1, out=wide[:, 0], dynamic_shapes={"x": {0: N}, "out": {0: N}})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for count in (1, 2, 9, 30):
        x = torch.randn(count, 20, device=device)
        out = torch.empty(2, count, 20, device=device)
        with fuser.config.patch(no_compile=True):
            own(x[:, :7], out=(out[0][:, :7], out[1][:, 3:10]))
            total(x, dim=1, out=out[0][:, 19])
    with pytest.raises(ArgumentError, match="warm_both: out= has 1 tensors for 2 outputs"):
        own.warmup(wide, out=wide)


@pytest.mark.cpu
def test_a_functor_with_an_index_is_named() -> None:
    own = fuser.jit_fn("template <typename T> T warm_index(T x, int64_t i, T y) { return x + i * y; }", index="i")
    with fuser.config.patch(no_compile=True), pytest.raises(NoCompileError) as raised:
        own(WIDE, 2)
    sample = "torch.empty_strided((4, 8), (8, 1), dtype=torch.float64, device='cpu')"
    assert f"; warm_index.warmup({sample}, 1) covers it" in str(raised.value)
    own.warmup(WIDE, 1)
    with fuser.config.patch(no_compile=True):
        own(WIDE, 2)


@pytest.mark.cpu
def test_control_flow_and_groups_apart_are_followed() -> None:
    own = fuser.create_jit_fn(AXPY.replace("axpy", "warm_two"), alpha=1.0)

    @fuser.fuse
    def step(x: Any, y: Any) -> Any:
        made = own(x, 1.5) @ y
        return own(made, made) if x.shape[0] > 10 else made

    step.warmup(leaf(3, 5), torch.randn(5, 7), dynamic_shapes=({0: N, 1: M}, {0: M}), backward=True)
    is_ready(step, lambda n, m: (leaf(n, m), torch.randn(m, 7)))


@pytest.mark.cpu
def test_sizes_that_depend_on_elements_are_left_to_calls() -> None:
    def step(x: Any, y: Any) -> Any:
        before = torch.relu(x) * 3
        # The last one asks whether there is one element.
        chosen = torch.relu(before[y > 0] * 2)
        return before, (chosen[:, None] + 1) * chosen

    x, y = leaf(3, 4), torch.randn(3, 4)
    made = fuser.fuse(step)
    for backward in (False, True):
        made.warmup(x, y, backward=backward)
    assert all(map(torch.equal, made(x, y), step(x, y)))
    graph = fuser.fx.fuse_graph(torch.fx.symbolic_trace(step), [x, y])
    assert all(map(torch.equal, graph(x, y), step(x, y)))


@pytest.mark.cpu
def test_sizes_that_are_numbers_are_ready_for_a_range() -> None:
    step = fuser.fuse(lambda x: x.amax(-1) * x.shape[1] ** -0.5 / (2 * x.shape[0] + 1))
    fuser.reset_stats()
    step.warmup(leaf(3, 5), dynamic_shapes={"x": {0: N, 1: Dim("m", 1, 40)}}, backward=True)
    assert not fuser.stats()["fallbacks"]
    is_ready(step, lambda n, m: (leaf(n, m),), most=40)


@pytest.mark.cpu
def test_gradients_of_parts_are_ready_for_a_range() -> None:
    # A sum of the user's own has a gradient by itself, not amid others.
    step = fuser.fuse(lambda x: torch.relu(x - total(x, dim=-1, keepdim=True)) * 3)
    step.warmup(leaf(3, 5), dynamic_shapes={"x": {0: N, 1: Dim("m", 1, 40)}}, backward=True)
    is_ready(step, lambda n, m: (leaf(n, m),), most=40)


@pytest.mark.cpu
@pytest.mark.parametrize("rows", [12, None])
def test_gradients_of_views_that_begin_elsewhere_are_ready_for_a_range(rows: int | None) -> None:
    # Where all parts have one shape they are one group.
    step = fuser.fuse(lambda x: [part * 2 for part in x.split(3)][-1])
    sizes = {1: Dim("m", 1, 40)} | ({} if rows else {0: Dim("n", 1, 20)})
    step.warmup(leaf(rows or 7, 9), dynamic_shapes={"x": sizes}, backward=True)
    is_ready(step, lambda n, m: (leaf(rows or n, m),), most=40)


@pytest.mark.cpu
def test_gradients_of_slices_are_ready_for_a_range() -> None:
    # The second half begins elsewhere than what stands in for it while its gradient is traced.
    step = fuser.fuse(lambda x: x[:, :32] * 2.25 + torch.relu(x[:, 32:] * 4.75))
    step.warmup(leaf(3, 64), dynamic_shapes={"x": {0: N}}, backward=True)
    is_ready(step, lambda n, m: (leaf(n, 64),))


DEVICES = pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=[pytest.mark.cpu, pytest.mark.slow]), pytest.param("cuda", marks=pytest.mark.cuda)],
)


@DEVICES
@pytest.mark.parametrize("name", ["reduction", "torch", "module", "obstacle", "plain"])
def test_what_is_called_is_ready_for_a_range(name: str, device: str) -> None:
    own = fuser.create_jit_fn(AXPY.replace("axpy", f"warm_{name}"), alpha=1.0)
    linear = torch.nn.Linear(6, 4, device=device)

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear
            self.scale = torch.nn.Parameter(torch.ones(4, device=device))

        def forward(self, x: Any) -> Any:
            return own(torch.sigmoid(self.linear(x)) * 2, self.scale)

    # On GPUs it has hundreds of kernels.
    short = Dim("m", 1, 100)
    chosen: dict[str, tuple[Any, Callable[[int, int], Sequence[Any]], Any]] = {
        "reduction": (total, lambda n, m: (leaf(n, m),), [{0: N, 1: M}]),
        "torch": (
            fuser.fuse(lambda x, y: torch.softmax(x * y, -1) * (x * y).amax(-1, keepdim=True)),
            lambda n, m: (leaf(n, m), leaf(m)),
            [{0: N, 1: short}, {0: short}],
        ),
        "module": (fuser.fuse(Module()), lambda n, m: (torch.randn(n, m, 6),), [{0: N, 1: M}]),
        # The CPU has no kernel for this float8.
        "obstacle": (
            fuser.fuse(lambda x: own(x, x).to(torch.float8_e8m0fnu).float() * 2),
            lambda n, m: (torch.rand(n, m),),
            [{0: N, 1: M}],
        ),
        "plain": (lambda x: own(x, x).sum(0) + own(x[0], 2.0), lambda n, m: (leaf(n, m),), [{0: N, 1: M}]),
    }
    function, make, shapes = chosen[name]
    options = {"dim": 1} if name == "reduction" else {}
    with torch.device(device):
        samples = make(3, 5)
    fuser.warmup(function, *samples, dynamic_shapes=shapes, backward=name != "obstacle", **options)
    most = short.max if name == "torch" else M.max
    is_ready(lambda *tensors: function(*tensors, **options), make, device=device, most=most)


@DEVICES
def test_a_compiled_model_is_ready_for_a_range(device: str) -> None:
    linear = torch.nn.Linear(6, 4, device=device)
    compiled = torch.compile(lambda x, y: torch.tanh(linear(torch.relu(x) * 2 + y)) * 3, backend="fuser", dynamic=True)
    sample = torch.empty(3, 5, 6, device="meta" if device == "cuda" else device, requires_grad=True)
    fuser.warmup(compiled, sample, torch.ones(6, device=device), dynamic_shapes={"x": {0: N, 1: M}}, backward=True)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    is_ready(compiled, lambda n, m: (leaf(n, m, 6), torch.ones(6)), device=device)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


@pytest.mark.cpu
def test_a_compiled_function_is_ready_where_it_asks_how_large_a_size_is() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x * 3) - 1 if x.shape[0] > 5 else torch.relu(x * 2) + 1 if x.shape[0] > 2 else x.neg() * 7

    compiled = torch.compile(function, backend="fuser", dynamic=True)
    fuser.warmup(compiled, torch.empty(3, 5), dynamic_shapes={"x": {0: N, 1: M}})
    is_ready(compiled, lambda n, m: (torch.rand(n, m),))
    for rows in range(1, 9):
        with fuser.config.patch(no_compile=True):
            x = torch.rand(rows, 4)
            assert torch.equal(compiled(x), function(x))


@pytest.mark.cpu
def test_a_compiled_function_is_ready_where_a_graph_is_for_some_sizes_of_a_range() -> None:
    # Of two rows one is left, and five eighths of seven are no integer.
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x[::2].exp2() if x.shape[0] * 0.625 > 4.5 else x[::2].neg()) * 0.5

    compiled = torch.compile(function, backend="fuser")
    fuser.warmup(compiled, torch.empty(5, 5), dynamic_shapes={"x": {0: N, 1: M}})
    is_ready(compiled, lambda n, m: (torch.rand(n, m),))


@pytest.mark.cpu
def test_a_compiled_function_is_ready_where_torchs_kernel_serves_some_sizes() -> None:
    # Sums of many short rows are torch's.
    compiled = torch.compile(lambda x: x.abs() - x.sum(-1, keepdim=True), backend="fuser", dynamic=True)
    fuser.warmup(compiled, torch.empty(5, 32), dynamic_shapes={"x": {0: Dim("n", 2, 2000)}})
    with fuser.config.patch(no_compile=True):
        for rows in (2, 1024, 1025, 2000):
            assert compiled(torch.rand(rows, 32)).shape == (rows, 32)


@pytest.mark.cpu
def test_a_compiled_function_of_one_size_alone_is_no_function_of_a_range() -> None:
    compiled = torch.compile(lambda x: sum(x * k for k in range(x.shape[0])), backend="fuser", dynamic=True)
    with pytest.raises(ArgumentError, match="a graph for each n alone"):
        fuser.warmup(compiled, torch.empty(3, 5), dynamic_shapes={"x": {0: N}})


@pytest.mark.cpu
def test_a_compiled_function_is_ready_whatever_no_dim_bounds() -> None:
    # Of the second dimension nothing is said, and the float is a symbol, too.
    compiled = torch.compile(lambda x, by: torch.relu(x) * by + x, backend="fuser", dynamic=True)
    fuser.warmup(compiled, torch.empty(3, 5), 0.5, dynamic_shapes={"x": {0: N}})
    is_ready(lambda x: compiled(x, 1.5), lambda n, _: (torch.rand(n, 5),), device="cpu")
    with fuser.config.patch(no_compile=True):
        assert compiled(torch.ones(4, 33), 2.5).shape == (4, 33)


@pytest.mark.cpu
def test_a_compiled_function_is_ready_whatever_several_dimensions_are() -> None:
    compiled = torch.compile(lambda x: torch.relu(x) * 0.5, backend="fuser", dynamic=True)
    fuser.warmup(compiled, torch.empty(4, 3, 5, 7), dynamic_shapes={"x": {0: N}})
    is_ready(compiled, lambda n, m: (torch.rand(n + 1, 3, m + 1, 7),))


@pytest.mark.cpu
@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("kind", ["fused", "plain", "compiled"])
def test_all_tensors_that_one_parameter_takes_vary(kind: str, *, by_name: bool) -> None:
    own = fuser.create_jit_fn(AXPY.replace("axpy", f"star_{kind}_{by_name}"), alpha=1.0)

    def function(first: Any, *others: Any, scale: float = 2.0) -> Any:
        return own(first * others[0], others[1], alpha=scale)

    ways = {"fused": fuser.fuse, "compiled": lambda function: torch.compile(function, backend="fuser", dynamic=True)}
    made, each = ways.get(kind, lambda function: function)(function), {0: N, 1: M}
    shapes = {"first": each, "others": (each, each)} if by_name else [each] * 3
    x = torch.empty(3, 5)
    fuser.warmup(made, x, x, x, scale=3.0, dynamic_shapes=shapes)
    is_ready(made, lambda n, m: torch.rand(3, n, m).unbind())
    for wrong in ({"others": [each] * 3}, [each] * 4):
        with pytest.raises(ArgumentError, match=r"others has no item 2|4 items, for 3 arguments"):
            fuser.warmup(made, x, x, x, dynamic_shapes=wrong)


@pytest.mark.cpu
def test_a_number_that_fills_a_tensor_makes_no_class_of_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    own = fuser.create_jit_fn(AXPY.replace("axpy", "filled"), alpha=1.0)
    compiled = torch.compile(lambda x, y, scale: own(x * y, y, alpha=scale), backend="fuser", dynamic=True)
    asked, leave_out = list[Any](), cover.leave_out
    monkeypatch.setattr(cover, "leave_out", lambda points, *rest: asked.append(points) or leave_out(points, *rest))
    x = torch.empty(3, 5)
    fuser.warmup(compiled, x, x, 3.0, dynamic_shapes=[{0: N, 1: M}] * 2)
    assert 0 < len(asked) < 20
    is_ready(lambda x, y: compiled(x, y, 3.0), lambda n, m: torch.rand(2, n, m).unbind())


@pytest.mark.cpu
def test_ops_of_torchs_between_groups_make_no_run_of_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = fuser.fuse(lambda x: torch.nn.functional.pad(axpy(x, x), (1, 2)) + 0.5)
    runs, leave_out = list[Any](), symbolic.leave_out
    monkeypatch.setattr(symbolic, "leave_out", lambda points, *rest: runs.append(points) or leave_out(points, *rest))
    fused.warmup(torch.empty(3, 5), dynamic_shapes=[{0: N, 1: Dim("m", 1, 20)}])
    assert len(runs) < 5
    is_ready(fused, lambda n, m: (torch.rand(n, m),), most=20)


@pytest.mark.cpu
def test_what_is_compiled_in_a_class_is_ready_for_a_range() -> None:
    class Scaled:
        scale = 3.0

        @torch.compile(backend="fuser", dynamic=True)
        def run(self, x: Any, y: Any) -> Any:
            return torch.relu(x) * self.scale + y

    run = Scaled().run
    fuser.warmup(run, torch.empty(3, 5), torch.empty(5), dynamic_shapes={"x": {0: N, 1: M}, "y": {0: M}})
    is_ready(run, lambda n, m: (torch.rand(n, m), torch.rand(m)))


@pytest.mark.cpu
def test_a_compiled_functor_has_its_own_names() -> None:
    compiled = torch.compile(axpy, backend="fuser", dynamic=True)
    fuser.warmup(compiled, torch.empty(3, 5), torch.empty(5), dynamic_shapes={"x": {0: N, 1: M}, "y": {0: M}})
    is_ready(compiled, lambda n, m: (torch.rand(n, m), torch.rand(m)))


def test_without_a_gradient_there_is_nothing_to_prepare() -> None:
    with pytest.raises(ArgumentError, match="backward=True, and no result requires grad"):
        axpy.warmup(torch.ones(3), torch.ones(3), backward=True)


# --- progress ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_for_terminals(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr("fuser.progress.DELAY_S", -1.0)
    with Progress("work", 4) as bar:
        bar.advance("first")
        bar.advance("second")
    lines = re.split("\r\x1b\\[K", shown.getvalue())
    assert [re.sub(r" \d+ s ", " S ", line) for line in lines] == (
        ["", "work [######                  ] 1/4, S  first", "work [############            ] 2/4, S  second", ""]
        if is_terminal
        else [""]
    )
