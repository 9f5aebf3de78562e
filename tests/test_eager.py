"""The eager version that is derived from a functor's text: against the compiled kernel, and against itself."""

from __future__ import annotations

import itertools
import math
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from eager_cases import CONSTRUCTS, Construct, one
from functors import (
    BY_NAME,
    CASES,
    Case,
    as_tuple,
    assert_same,
    compute_epsilon,
    draw,
    functor,
    inputs_of,
    same_bits,
    special_tensor,
)
from tiers import SLOW, choose, one_of_each
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import fuser
from fuser.config import config
from fuser.cxx.functor import Role, parse_functor
from fuser.cxx.nodes import Expression, Statement
from fuser.dtypes import dtype_info, number_dtype
from fuser.eager.evaluate import EVALUATE, LOCATE
from fuser.eager.statements import RUN
from fuser.eager.translation import Translation, translate
from fuser.errors import ArgumentError, FallbackError, UntranslatableError
from fuser.fallback import call_derived, find_obstacle

COMPILED_DTYPES = [(item, dtype) for item in CONSTRUCTS for dtype in item.dtypes]


def run_eagerly(function: fuser.JitFunction, inputs: list[Any], **scalars: Any) -> tuple[torch.Tensor, ...]:
    """Call the eager version, whether or not a kernel could serve."""
    return call_derived(function.function, inputs, {**function.defaults, **scalars})


def translation_of(function: fuser.JitFunction, dtype: torch.dtype, *, differentiable: bool = False) -> Translation:
    """Return a functor's translation for tensors of one dtype and its default scalars."""
    parsed, compute = function.function.functor, dtype_info(dtype).compute_dtype
    types = tuple(
        compute if item.role is Role.TENSOR else number_dtype(type(function.defaults[item.name]), torch.float64)
        for item in parsed.parameters
        if item.role is not Role.OUTPUT and not item.has_default
    )
    return translate(parsed, compute, types, differentiable=differentiable)


def arguments_of(translation: Translation, inputs: list[torch.Tensor], scalars: dict[str, Any]) -> list[Any]:
    """Return what ``Translation.run`` takes, from tensors and scalars by name."""
    rest = list(inputs)
    return [
        scalars[item.name] if item.role is Role.SCALAR else rest.pop(0).to(translation.compute)
        for item in translation.functor.parameters
        if item.role is Role.SCALAR or (item.role is Role.TENSOR and rest)
    ]


def grid_of(dtype: torch.dtype, count: int) -> list[torch.Tensor]:
    """Return every combination of special values, one tensor per argument."""
    special = special_tensor(dtype)
    return [item.flatten() for item in torch.meshgrid(*[special] * count, indexing="ij")]


# ---- against the compiled kernel ----


def batches() -> Iterator[Any]:
    """Give up to a dozen constructs of one dtype, which share a launch: one kernel compiles for all of them."""
    alike: dict[Any, list[Construct]] = {}
    for construct, dtype in COMPILED_DTYPES:
        alike.setdefault((dtype, construct.tensors, construct.outputs, construct.is_total), []).append(construct)
    for (dtype, _, outputs, _), constructs in alike.items():
        size = 12 // outputs
        for first in range(0, len(constructs), size):
            batch = constructs[first : first + size]
            # bfloat16 computes in float, which has these too.
            marks = [SLOW] if dtype is torch.bfloat16 and choose(str(batch[0]), 4) else []
            yield pytest.param(batch, dtype, id=f"{str(dtype)[6:]}-{batch[0]}", marks=marks)


@pytest.mark.one_in(3)
@pytest.mark.cpu
@pytest.mark.parametrize(("constructs", "dtype"), [*batches()])
def test_constructs_have_the_kernels_bits(constructs: list[Construct], dtype: torch.dtype) -> None:
    functions = [construct.build() for construct in constructs]
    count = constructs[0].tensors
    drawn = [[draw((3, 67), dtype, construct.domain, seed) for seed in range(count)] for construct in constructs]
    special = [grid_of(dtype, count)] * len(constructs) if constructs[0].is_total else []

    graph = fx.Graph()
    proxy = fx.proxy.GraphAppendingTracer(graph).proxy
    places = [[proxy(graph.placeholder(f"x{k}_{place}")) for place in range(count)] for k in range(len(functions))]
    results = [function(*inputs) for function, inputs in zip(functions, places, strict=True)]
    graph.output([result.node for result in results])
    together = fuser.fx.fuse_graph(fx.GraphModule(torch.nn.Module(), graph))
    for inputs in filter(None, (drawn, special)):
        fuser.reset_stats()
        found = together(*itertools.chain(*inputs))
        assert fuser.stats()["launches"] == 1
        for construct, function, given, kernels in zip(constructs, functions, inputs, found, strict=True):
            assert_same(run_eagerly(function, given), kernels, str(construct))


# The same kernels as in test_functors_cpu.py.
CASE_DTYPES = one_of_each([(case, dtype) for case in CASES for dtype in case.dtypes])
TOTAL = one_of_each([(case, dtype) for case in CASES for dtype in case.dtypes if case.is_total])


@pytest.mark.one_in(2)
@pytest.mark.cpu
@pytest.mark.parametrize(("case", "dtype"), CASE_DTYPES)
def test_functor_of_the_table_is_near_the_kernel(case: Case, dtype: torch.dtype) -> None:
    assert_near_kernel(case, inputs_of(case, dtype, (3, 67)))


@pytest.mark.cpu
@pytest.mark.parametrize(("case", "dtype"), TOTAL)
def test_functor_of_the_table_on_special_values(case: Case, dtype: torch.dtype) -> None:
    assert_near_kernel(case, grid_of(dtype, case.tensors))


def assert_near_kernel(case: Case, inputs: list[torch.Tensor]) -> None:
    """Compare with the kernel: 2 units per operation of the compute type, and half a unit of the result's own."""
    function = functor(case.name)
    translation = translation_of(function, inputs[0].dtype)
    count = len(translation.graph_module.graph.nodes) if translation.graph_module is not None else 100
    for mine, kernels in zip(run_eagerly(function, inputs), as_tuple(function(*inputs)), strict=True):
        assert (mine.dtype, mine.shape, mine.stride()) == (kernels.dtype, kernels.shape, kernels.stride())
        if not mine.dtype.is_floating_point:
            assert torch.equal(mine, kernels)
            continue
        finite = kernels.isfinite()
        assert same_bits(mine[~finite], kernels[~finite])
        wanted = kernels[finite].double()
        own = torch.finfo(mine.dtype)
        bound = (2 * count * compute_epsilon(mine.dtype) + own.eps * (own.bits < 32)) * wanted.abs()
        bound = bound.clamp(min=own.smallest_normal * own.eps * 4)
        if case.ulps:
            # Where terms cancel, what counts is the size of the terms.
            bound = bound.clamp(min=case.ulps * compute_epsilon(mine.dtype))
        assert bool(((mine[finite].double() - wanted).abs() <= bound).all())


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16),
        (torch.int32, torch.float16),
        (torch.uint8, torch.int8),
        (torch.bool, torch.int16),
        (torch.int64, torch.float64),
        (torch.complex64, torch.float64),
        (torch.uint16, torch.uint16),
        (torch.uint32, torch.uint32),
        (torch.uint64, torch.uint64),
        (torch.complex32, torch.complex32),
        (torch.float8_e5m2, torch.float8_e5m2),
    ],
    ids=str,
)
def test_dtypes_are_promoted_and_rounded_as_in_a_kernel(left: torch.dtype, right: torch.dtype) -> None:
    function = fuser.jit_fn("template <typename T> T f(T x, T y) { return x * y - y; }")
    x = torch.tensor([0.0, 1.0, 2.0, 3.0, 7.0]).to(left)
    y = torch.tensor([3.0, 1.0, 0.0, 5.0, 6.0]).to(right)
    (mine,), kernels = run_eagerly(function, [x, y]), function(x, y)
    assert mine.dtype == kernels.dtype
    assert torch.equal(mine.view(torch.uint8), kernels.view(torch.uint8))


@pytest.mark.cpu
def test_numbers_and_zero_dim_tensors_take_part_as_in_a_kernel() -> None:
    function = fuser.jit_fn("template <typename T> T f(T x, T y) { return x / (y + x); }")
    x = torch.tensor([1.0, 2.0, -3.0])
    for other in (0.1, 3, True, torch.tensor(0.1, dtype=torch.float64), torch.tensor(7), torch.ones(2, 1)):
        for inputs in ([x, other], [other, x]):
            assert_same(run_eagerly(function, inputs), function(*inputs), str(other))


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int32])
def test_outputs_of_other_dtypes(dtype: torch.dtype) -> None:
    function = fuser.jit_fn(
        "template <typename T> void f(T x, T& a, T& b, T& c) { a = x; b = x * T(3); c = x > T(1); }",
        num_outputs=3,
        out_dtypes=[torch.bfloat16, torch.int8, torch.bool],
    )
    x = draw((40,), dtype, (-30.0, 30.0))
    assert_same(run_eagerly(function, [x]), function(x))


COMPLEX = {
    "square": "template <typename T> T f(T z) { return z * z + T(1) - z / T(2); }",
    "parts": "template <typename T> T f(T z) { return T(z.imag(), z.real()) * std::conj(z); }",
    "mixed": "template <typename T> T f(T z) { typename T::value_type r = std::norm(z); return z * r + r; }",
    "set": "template <typename T> T f(T z) { z.real(z.imag()); z.imag(2); return z; }",
    "branch": "template <typename T> T f(T z) { if (z.real() > 0) return z; T w = -z; return w + std::real(z); }",
    "named": "template <typename T> T f(T z) { std::complex<double> w(z.real(), 0.1); return w * w == w ? z : T(w); }",
}


@pytest.mark.cpu
@pytest.mark.parametrize("name", COMPLEX)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_numbers(name: str, dtype: torch.dtype) -> None:
    function = fuser.jit_fn(COMPLEX[name])
    z = torch.complex(draw((50,), torch.float64), draw((50,), torch.float64, seed=1)).to(dtype)
    (mine,), kernels = run_eagerly(function, [z]), function(z)
    assert mine.dtype == kernels.dtype
    torch.testing.assert_close(mine, kernels, rtol=8 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)


LAYOUTS = {
    "transposed": lambda: [torch.randn(5, 3).t(), torch.randn(3, 5)],
    "broadcast": lambda: [torch.randn(4, 1), torch.randn(3)],
    "expanded": lambda: [torch.randn(4, 1).expand(4, 3), torch.randn(4, 3)],
    "channels_last": lambda: [torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.randn(2, 3, 4, 5)],
    "sliced": lambda: [torch.randn(6, 8)[::2, ::3], torch.randn(3, 3)],
    "zero_dim": lambda: [torch.randn(()), torch.randn(())],
    "empty": lambda: [torch.randn(0, 3), torch.randn(3)],
    "number": lambda: [torch.randn(1, 3).t(), 2.0],
    "number_and_empty": lambda: [2, torch.randn(0, 3).t()],
}


@pytest.mark.cpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["unused", "second_template_parameter", "outputs"])
def test_shapes_and_strides_are_the_kernels(name: str, layout: str) -> None:
    function = next(item for item in CONSTRUCTS if item.name == name).build()
    inputs = LAYOUTS[layout]()
    assert_same(run_eagerly(function, inputs), function(*inputs), layout)


# ---- against itself ----


def is_graph(item: Case | Construct) -> bool:
    """Whether a functor becomes a graph, with its loops written out; data ends that of "escape", but not late."""
    return item.is_graph if isinstance(item, Construct) else not item.depends_on_data or item.name == "escape"


@pytest.mark.parametrize("item", [*CASES, *CONSTRUCTS], ids=str)
def test_graph_and_interpreter_agree_bit_for_bit(item: Case | Construct) -> None:
    dtype = item.dtypes[0]
    translation = translation_of(item.build(), dtype)
    assert (translation.graph_module is not None) == is_graph(item), translation.data_dependent
    if isinstance(item, Construct):
        assert translation.graph_module is None or len(translation.graph_module.graph.nodes) <= item.nodes
    if translation.graph_module is not None:
        inputs = [draw((11,), dtype, item.domain, seed) for seed in range(item.tensors)]
        arguments = arguments_of(translation, inputs, item.scalars)
        assert_same(translation.interpret(*arguments), translation.run(*arguments))


@pytest.mark.parametrize("item", [*CASES, *CONSTRUCTS], ids=str)
def test_a_batch_and_single_lanes_agree_bit_for_bit(item: Case | Construct) -> None:
    dtype = item.dtypes[0]
    function = item.build()
    inputs = [draw((9,), dtype, item.domain, seed) for seed in range(item.tensors)]
    together = run_eagerly(function, inputs)
    for lane in range(9):
        alone = run_eagerly(function, [item[lane : lane + 1] for item in inputs])
        assert_same([item[lane : lane + 1] for item in together], list(alone), f"lane {lane}")


GRAPHS = [item for item in (*CASES, *CONSTRUCTS) if is_graph(item)]


@pytest.mark.parametrize("item", GRAPHS, ids=str)
def test_graph_holds_typed_overloads_of_aten(item: Case | Construct) -> None:
    translation = translation_of(item.build(), item.dtypes[0])
    assert translation.graph_module is not None
    nodes = list(translation.graph_module.graph.nodes)
    inputs = [draw((3,), item.dtypes[0], item.domain, seed) for seed in range(item.tensors)]
    values = _Values(translation.graph_module)
    arguments = [
        torch.scalar_tensor(given, dtype=kind) if not isinstance(given, torch.Tensor) else given
        for given, kind in zip(arguments_of(translation, inputs, item.scalars), translation.types, strict=True)
    ]
    values.run(*arguments)
    for node in nodes[:-1]:
        assert node.op == "placeholder" or isinstance(node.target, torch._ops.OpOverload)
        assert values.found[node].dtype == node.meta["dtype"], node.format_node()
        if node.op != "placeholder":
            # A constant result comes from no one place.
            line, column = node.meta.get("place", (1, 1))
            assert 1 <= line <= translation.functor.source.count("\n") + 1
            assert column >= 1
            assert node.users, f"{node} is not used"


class _Values(fx.Interpreter):
    """Keeps what each node gave."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.found: dict[fx.Node, Any] = {}
        return super().run(*args, **kwargs)

    def run_node(self, n: fx.Node) -> Any:
        self.found[n] = super().run_node(n)
        return self.found[n]


def test_equal_nodes_are_one_and_unused_ones_are_gone() -> None:
    function = fuser.jit_fn(
        "template <typename T> T f(T x) { T a = exp(x), b = exp(x), c = sin(x); return a + b + T(0) * T(-0.0); }"
    )
    graph = translation_of(function, torch.float32).graph_module
    assert graph is not None
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert names == ["aten.exp.default", "aten.add.Tensor", "aten.add.Tensor"]


def test_zeros_of_both_signs_stay_apart() -> None:
    function = fuser.jit_fn(
        "template <typename T> void f(T x, T& a, T& b) { a = x > T(0) ? T(0) : x; b = x > T(0) ? T(-0.0) : x; }",
        num_outputs=2,
    )
    a, b = run_eagerly(function, [torch.ones(2)])
    assert (a.signbit().any(), b.signbit().all()) == (False, True)


def test_a_counter_stays_a_constant_for_the_lanes_in_the_loop() -> None:
    code = """template <typename T> T f(T x) {
      int n = 0;
      while (x > T(1) && n < 5) { x = x * T(0.5); ++n; }
      return x;
    }"""
    graph = translation_of(fuser.jit_fn(code), torch.float64).graph_module
    assert graph is not None
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert names.count("aten.mul.Tensor") == 5
    # The counter itself is nowhere: only x is compared and chosen.
    assert {node.meta["dtype"] for node in graph.graph.nodes if node.op == "call_function"} == {
        torch.float64,
        torch.bool,
    }


# ---- one graph for every shape ----


def test_one_graph_serves_every_shape_and_scalar() -> None:
    function = functor("axpy")
    translation = translation_of(function, torch.float32)
    assert translation.graph_module is not None
    assert translation is translation_of(function, torch.float32)
    for shape, alpha in (((3,), 2), ((4, 1, 2), -3), ((), 0)):
        x, y = torch.randn(shape), torch.randn(shape)
        assert torch.equal(translation.run(x, y, alpha)[0], alpha * x + y)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("item", GRAPHS, ids=str)
def test_graph_runs_on_meta_and_fake_tensors(item: Case | Construct) -> None:
    dtype = item.dtypes[0]
    translation = translation_of(item.build(), dtype)
    for shape in ((4,), (2, 3)):
        real = run_eagerly(item.build(), [draw(shape, dtype, item.domain, seed) for seed in range(item.tensors)])
        meta = run_eagerly(item.build(), [torch.empty(shape, dtype=dtype, device="meta")] * item.tensors)
        assert [(x.shape, x.dtype) for x in meta] == [(x.shape, x.dtype) for x in real]
        assert all(x.is_meta for x in meta)
        with FakeTensorMode():
            fake = translation.run(
                *arguments_of(translation, [torch.empty(shape, dtype=dtype)] * item.tensors, item.scalars)
            )
        assert len(fake) == len(real)


def test_graph_is_exported() -> None:
    translation = translation_of(functor("smoothstep"), torch.float32)
    graph = translation.graph_module
    assert graph is not None

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step = graph

        def forward(self, x: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
            return self.step(x * 2, low, high)[0] + 1  # type: ignore[no-any-return]

    low, high = torch.tensor(-1.0, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(
        Module(), (torch.randn(4), low, high), dynamic_shapes=({0: batch}, None, None), strict=False
    )
    assert not any("fuser" in str(node.target) for node in program.graph.nodes)
    for count in (2, 9):
        x = torch.randn(count)
        assert torch.equal(program.module()(x, low, high), run_eagerly(functor("smoothstep"), [x * 2])[0] + 1)


def test_vmap_of_a_graph() -> None:
    function = functor("smoothstep")
    x = torch.randn(3, 5)
    mapped = torch.func.vmap(lambda row: run_eagerly(function, [row])[0])(x)
    assert torch.equal(mapped, run_eagerly(function, [x])[0])


def test_vmap_and_grad_of_a_loop_on_data() -> None:
    function = next(item for item in CONSTRUCTS if item.name == "loop_on_data").build()
    x = draw((3, 5), torch.float64)
    mapped = torch.func.vmap(lambda row: run_eagerly(function, [row])[0])(x)
    assert torch.equal(mapped, run_eagerly(function, [x])[0])
    halvings = torch.func.vmap(torch.func.vmap(torch.func.grad(lambda item: run_eagerly(function, [item])[0])))(x)
    expected = torch.where(x > 0.01, 0.5 ** torch.ceil(torch.log2(x / 0.01)), 1.0)
    torch.testing.assert_close(halvings, expected)


# ---- what depends on data ----


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("\n  while (x > T(1)) x = x / T(2);\n  return x;", "line 3, column 3: the loop runs while x > T(1)"),
        ("\n do { x -= T(1); } while (x > T(0)); return x;", "line 3, column 2: the loop runs while x > T(0)"),
        ("for (int i = 0; T(i) < x; ++i) x -= T(1); return x;", "line 2, column 34: the loop runs while T(i) < x"),
        ("return g(x);", "line 1, column 52: 'g' calls itself as long as data says"),
    ],
)
def test_why_there_is_no_graph(body: str, why: str) -> None:
    helper = "template <typename T> T g(T v) { return v > T(1) ? g(v / T(2)) : v; }"
    translation = translation_of(one("f", body, helper).build(), torch.float64)
    assert translation.graph_module is None
    assert translation.data_dependent == why
    x = torch.tensor([0.0, 0.5, 3.0, 20.0], dtype=torch.float64)
    together = translation.run(x)[0]
    assert torch.equal(together, torch.cat([translation.run(item)[0] for item in x.split(1)]))


def test_how_long_loops_may_be_is_a_setting() -> None:
    function = one("f", "T s = T(0); for (int i = 0; i < 40; ++i) s += x; return s;").build()
    assert translation_of(function, torch.float32).graph_module is not None
    with config.patch(max_unrolled=30):
        translation = translation_of(function, torch.float32)
        assert translation.graph_module is None
        assert translation.data_dependent == "line 2, column 46: the loop runs while i < 40"
        assert torch.equal(translation.run(torch.ones(2))[0], torch.full((2,), 40.0))


def test_how_many_elements_an_index_may_choose_from_is_a_setting() -> None:
    function = one("f", "const T c[5] = {T(1), T(2)}; return c[int(x)];").build()
    with config.patch(max_unrolled=4):
        assert translation_of(function, torch.float32).graph_module is None
    assert translation_of(function, torch.float32).graph_module is not None


def test_a_recursion_has_a_limit() -> None:
    function = one("f", "return g(x);", "template <typename T> T g(T v) { return v > T(0) ? g(v - T(1)) : v; }").build()
    assert run_eagerly(function, [torch.tensor([3.5, -1.0])])[0].tolist() == [-0.5, -1.0]
    before = sys.getrecursionlimit()
    with pytest.raises(RecursionError, match="'g' calls itself more than 64 times"):
        run_eagerly(function, [torch.tensor([1000.0])])
    assert run_eagerly(function, [torch.tensor([61.5])])[0].tolist() == [-0.5]
    assert sys.getrecursionlimit() == before


def test_scalars_decide_without_the_tensors() -> None:
    # The interpreter knows their values: nothing is masked, and no lane keeps the loop alive.
    function = next(item for item in CONSTRUCTS if item.name == "scalar_count").build()
    x = torch.randn(5)
    for count in (0, 1, 7):
        expected = torch.zeros(5)
        for _ in range(count):
            expected = expected + x
        assert torch.equal(run_eagerly(function, [x], n=count)[0], expected)


def test_meta_and_fake_tensors_need_no_values() -> None:
    function = one("f", "while (x > T(1)) x = x / T(2); return x;").build()
    (result,) = run_eagerly(function, [torch.empty(3, 4, dtype=torch.bfloat16, device="meta")])
    assert (result.shape, result.dtype, result.is_meta) == ((3, 4), torch.bfloat16, True)
    with FakeTensorMode():
        (result,) = run_eagerly(function, [torch.empty(3, 4, dtype=torch.bfloat16)])
    assert (result.shape, result.dtype, result.device.type) == ((3, 4), torch.bfloat16, "cpu")


# ---- gradients ----

# The table's functors are in test_gradients.py; those of whose graphs there are none go the same way there.
DIFFERENTIABLE = [item for item in CONSTRUCTS if torch.float64 in item.dtypes and item.name != "infinities"]


@pytest.mark.filterwarnings("ignore:Input #")
@pytest.mark.parametrize("item", DIFFERENTIABLE, ids=str)
def test_gradients(item: Case | Construct) -> None:
    function = item.build()
    inputs = [draw((5,), torch.float64, item.domain, seed).requires_grad_() for seed in range(item.tensors)]

    def call(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(out for out in run_eagerly(function, list(tensors)) if out.requires_grad)

    if call(*inputs):
        assert torch.autograd.gradcheck(call, inputs)


@pytest.mark.parametrize(
    ("body", "inputs", "expected"),
    [
        ("return x > T(0) ? sqrt(x) : T(0);", [-1.0, 0.0, 4.0], [0.0, 0.0, 0.25]),
        ("if (x > T(0)) return log(x) / x; return -x;", [-1.0, 0.0, 1.0], [-1.0, -1.0, 1.0]),
        ("T y = x; if (x > T(0)) { y = sqrt(x); y = T(1) / y; } return y;", [-1.0, 0.0, 1.0], [1.0, 1.0, -0.5]),
        ("T y = x; while (y > T(1)) y = sqrt(y - T(1)); return y;", [-1.0, 1.0, 2.0, 5.0], [1.0, 1.0, 0.5, 0.125]),
        ("return x < T(0) || sqrt(x) > T(1) ? x * x : T(0);", [-1.0, 0.0, 4.0], [-2.0, 0.0, 8.0]),
        ("T s = T(0); for (int i = 0; i < 2; ++i) { if (x <= T(i)) continue; s += sqrt(x - T(i)); } return s;",
         [-1.0, 0.0, 1.0], [0.0, 0.0, 0.5]),
        ("auto root = [&](const T& v) { return v > T(0) ? sqrt(v) : T(0); }; return root(x) + root(x * T(1));",
         [-1.0, 0.0, 4.0], [0.0, 0.0, 0.5]),
        ("auto root = [&](T v) { if (v <= T(0)) return T(0); return sqrt(v); }; return root(x) + root(-x);",
         [-1.0, 0.0, 4.0], [-0.5, 0.0, 0.25]),
    ],
)  # fmt: skip
def test_lanes_that_do_not_run_give_no_nan(body: str, inputs: list[float], expected: list[float]) -> None:
    function = one("f", body).build()
    x = torch.tensor(inputs, dtype=torch.float64, requires_grad=True)
    (result,) = run_eagerly(function, [x])
    result.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == expected


def test_without_gradients_nothing_is_detached() -> None:
    function = one("f", "return x > T(0) ? sqrt(x) : x;").build()
    plain = translation_of(function, torch.float32).graph_module
    guarded = translation_of(function, torch.float32, differentiable=True).graph_module
    assert plain is not None
    assert guarded is not None
    assert not [node for node in plain.graph.nodes if node.target is torch.ops.aten.detach.default]
    guards = [node for node in guarded.graph.nodes if node.target is torch.ops.aten.detach.default]
    # x, for the lanes that take its root and for those that take itself.
    assert [len(node.users) for node in guards] == [2]


# ---- directives ----

CONDITIONS = (
    "BOTH & 2 == 2", "3 > 2 > 1", "1 == 1 == 2", "-7 / 2 == -3 && -7 % 3 == -1", "7 % -3 == 1", "!BOTH == 0",
    "0x10 == 020 && 0b11 == 3", "BOTH > 2 ? 0 : NOBODY + 1", "0 && 1 / 0", "1 || 1 % 0", "not BOTH or compl 0 == -1",
    "~0u / 2 == 0x7fffffffffffffff", "1 ? -1 : 0u", "(1 ? -1 : 0u) > 0", "-8 >> 1 == -4", "1 << 2 + 1 == 8",
    "6 ^ 3 | 8 & 12", "1'000 == 1000LLU", "STANDARD >= 201703L", "2 * (3 + 4) % 5 == 4", "true + false", "-1 > 0u",
    "0 ? 1 / 0 : 2", "5 - 3 - 2",
    "1 + 2 == 3 && !(4 < 3)", "- - 1 == + 1", "1 ? 0 : 1 ? 2 : 3",
)  # fmt: skip


@pytest.mark.cpu
def test_conditions_of_directives_are_the_compilers() -> None:
    lines = ["#define BOTH 3", "#define STANDARD __cplusplus"]
    for number, condition in enumerate(CONDITIONS):
        lines += [f"#if {condition}", f"#define C{number} 1", "#else", f"#define C{number} 0", "#endif"]
    held = " | ".join(f"(int64_t(C{number}) << {number})" for number in range(len(CONDITIONS)))
    fn = fuser.jit_fn("\n".join([*lines, f"template <typename T> T f(T x) {{ return x + T({held}); }}"]))
    x = torch.zeros(1, dtype=torch.float64)
    assert run_eagerly(fn, [x])[0].item() == fn(x).item()


@pytest.mark.parametrize(
    "condition", ["1 << -1", "9 ** 9 ** 9 ** 9", "ASK(2)", "1 / 0", "(1", "1 +", "08", "2 : 3", "new (0)"]
)
def test_conditions_of_directives_that_are_none(condition: str) -> None:
    obstacle = find_obstacle(
        parse_functor(f"\n#if {condition}\n#endif\ntemplate <typename T> T f(T x) {{ return x; }}")
    )
    assert obstacle is not None
    assert (obstacle.line, obstacle.construct) == (2, f"#if {condition}")


# ---- what has no translation ----

UNTRANSLATABLE = [
    ("enum { A = 1 << 3 }; return x * T(A);", 2, 45, "an enumerator that is no plain number"),
    ("if (x > T(0))\n    goto end;\n  end: return x;", 3, 5, "goto"),
    ("return x +\n    frobnicate(x);", 3, 5, "the function 'frobnicate'"),
    ("while (x > T(0)) x = later(x); return x;", 2, 55, "the function 'later'"),
    ("T* p = nullptr; return *p;", 2, 41, "nullptr"),
    ("T a[2] = {x}, b[2] = {x}; T* p = x > T(0) ? a : b; return *p;", 2, 67,
     "a pointer or function that depends on data"),
    ("try { return x; } catch (...) {} return x;", 2, 34, "try"),
    ("throw 1;", 2, 34, "throw"),
    ("T* p = new T; return x;", 2, 41, "new"),
    ('asm("nop"); return x;', 2, 34, "asm"),
    ("union { float f; int i; } u; return x;", 2, 34, "union"),
    ("half y = x; return y;", 2, 34, "the type 'half'"),
    ("return x.size;", 2, 41, "the member 'size' of float32"),
    ("int (*p)(int) = 0; return x;", 2, 38, "a pointer to a function"),
    ("return MAXFLOAT * x;", 2, 41, "the name 'MAXFLOAT'"),
    ("return std::numeric_limits<T>::traps + x;", 2, 41, "the member 'traps' of numeric_limits"),
    ("return std::numeric_limits<T>::round_error() + x;", 2, 41, "the member 'round_error' of numeric_limits"),
    ("int n = int(x); T a[n]; return x;", 2, 54, "an array whose size is no constant"),
    ("  /* é */ return x + missing(x);", 2, 55, "the function 'missing'"),
    ("struct S { unsigned a : 3; }; S s; s.a = 9; return x * T(s.a);", 2, 45, "a bit field"),
    ("struct S { struct { T a; } in; }; S s; s.in.a = x; return s.in.a;", 2, 45, "a class inside a class"),
    (
        "T y = x;\n  auto last = [&]() -> T& { return y; };\n  T& r = last();\n  y = 5;\n  return r;",
        4,
        4,
        "a reference to what a function returns",
    ),
    (
        "T y = x;\n  auto last = [&]() -> T& { return y; };\n  const T& r = last();\n  y = 5;\n  return r;",
        4,
        10,
        "a reference to what a function returns",
    ),
    (
        "struct S { T v; const T& get() { return v; } };\n  S s{x};\n  const T& r = s.get();\n  s.v = 5;\n  return r;",
        4,
        10,
        "a reference to what a function returns",
    ),
    ("long double y = x; return T(y);", 2, 34, "the type 'long double'"),
    ("return pick(x, x);", 2, 41, "the call of 'pick' with these arguments"),
    ("return twice(x, x);", 2, 41, "the call of 'twice' with these arguments"),
    ("T r[2] = {x}; return r[];", 2, 56, "[]"),
    ("return static_cast<>(x);", 2, 41, "the cast 'static_cast<>'"),
    ("return static_cast<7>(x);", 2, 41, "the cast 'static_cast<7>'"),
    ("for (;;) { auto f = [&] { break; }; f(); } return x;", 2, 60, "break outside of what it could leave"),
    ("switch (0) { default: continue; } return x;", 2, 56, "continue outside of what it could leave"),
    ("return x; } return 2; template <typename T> T g(T x) { return x;", 2, 46, "return outside of functions"),
]  # fmt: skip


# C++ takes the second, which is more special.
AMBIGUOUS = (
    "template <typename A, typename B> A pick(A a, B) { return a; } template <typename A> A pick(A a, A) { return -a; }"
)


@pytest.mark.parametrize(("body", "line", "column", "construct"), UNTRANSLATABLE)
def test_what_has_no_translation_is_named(body: str, line: int, column: int, construct: str) -> None:
    code = one("f", body, f"template <typename T> T twice(T v) {{ return v + v; }} {AMBIGUOUS}").code
    obstacle = find_obstacle(parse_functor(code))
    assert obstacle is not None
    assert (obstacle.line, obstacle.column, obstacle.construct) == (line, column, construct)
    head, shown, caret = str(obstacle).splitlines()
    assert head == f"line {line}, column {column}: {construct} has no translation to torch"
    assert shown == f"{line:5d} | {code.splitlines()[line - 1]}"
    assert caret == f"      | {' ' * (column - 1)}^"


@pytest.mark.parametrize(
    ("before", "body", "line", "column"),
    [
        ("#define TWICE(v) ((v) + (v))", "return TWICE(missing(x));", 2, 47),
        ("#define CALL missing(x)", "return x + CALL;", 2, 45),
        ("#ifdef NEVER\nint some;\n#else\n#define HERE 1\n#endif", "return HERE + missing(x);", 6, 48),
        ("__device__ __forceinline__ int g(int v) {\n  return missing(v); }", "return g(1);", 2, 10),
    ],
)
def test_places_are_those_of_the_users_text(before: str, body: str, line: int, column: int) -> None:
    obstacle = find_obstacle(parse_functor(one("f", body, before).code))
    assert obstacle is not None
    assert (obstacle.line, obstacle.column) == (line, column)


def test_an_operator_that_a_type_does_not_have() -> None:
    function = one("f", "return x % T(3);").build()
    assert find_obstacle(function.function.functor) is None
    assert run_eagerly(function, [torch.tensor([7, -7])])[0].tolist() == [1, -1]
    with pytest.raises(UntranslatableError, match="line 2, column 41: no operator % for float32 and float32"):
        run_eagerly(function, [torch.ones(2)])


GOTO = "template <typename T> T jump(T x) {\n  if (x > T(0)) goto end;\n  x += T(1);\nend:\n  return x;\n}"


@pytest.mark.cpu
def test_check_and_explain_name_what_has_no_translation() -> None:
    function = fuser.jit_fn(GOTO)
    with pytest.warns(UserWarning, match="^'jump' has no eager version: line 2, column 17: goto has no translation"):
        function.check(device="cpu")
    assert "no eager version of 'jump': line 2, column 17: goto has" in str(fuser.explain(function))
    assert "no eager version of 'jump': line 2, column 17: goto has" in str(fuser.explain(function, torch.ones(2)))
    # It runs fused.
    assert function(torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]


@pytest.mark.cpu
def test_check_and_explain_are_silent_otherwise() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        functor("axpy").check(device="cpu")
    assert "eager" not in str(fuser.explain(functor("axpy")))
    given = fuser.jit_fn(GOTO, fallback=lambda x: x)
    assert "eager" not in str(fuser.explain(given))


def test_a_call_that_cannot_fall_back_says_why() -> None:
    with pytest.raises(
        FallbackError, match=r"(?s)cannot fuse \(a sparse_coo tensor\), and 'jump' has no .*: line 2, col"
    ):
        fuser.jit_fn(GOTO)(torch.ones(2).to_sparse())


# ---- in place of a kernel ----


@pytest.fixture
def no_compiler() -> Iterator[None]:
    # Without one, kernels that are kept on disk would do.
    with config.patch(cxx="/nonexistent", disk_cache=False, no_compile=False):
        yield


def test_runs_without_a_compiler(no_compiler: None) -> None:
    for case in (BY_NAME["smoothstep"], BY_NAME["steps"], BY_NAME["rotate"], BY_NAME["chop"]):
        function = case.build()
        inputs = inputs_of(case, torch.bfloat16 if case.name == "smoothstep" else torch.float32, (3, 5))
        fuser.reset_stats()
        result = function(*inputs)
        assert fuser.stats()["launches"] == 0
        assert list(fuser.stats()["fallbacks"].values()) == [1]
        assert_same(result, run_eagerly(function, inputs))


def test_groups_run_functor_by_functor(no_compiler: None) -> None:
    axpy, smoothstep = functor("axpy"), functor("smoothstep")

    @fuser.fuse
    def both(x: Any, y: Any) -> Any:
        return smoothstep(torch.tanh(axpy(x, y, alpha=0.3)), low=-0.5)

    x, y = torch.randn(5, dtype=torch.bfloat16), torch.randn(5, dtype=torch.bfloat16)
    # Rounded to bfloat16 between the applications, as strict numerics say.
    middle = run_eagerly(axpy, [x, y], alpha=0.3)[0]
    assert torch.equal(both(x, y), run_eagerly(smoothstep, [torch.tanh(middle)], low=-0.5)[0])


def test_outputs_are_new_tensors(no_compiler: None) -> None:
    x = torch.randn(4)
    same = fuser.jit_fn("template <typename T> T f(T x) { return x; }")(x)
    a, b = fuser.jit_fn("template <typename T> void f(T x, T& a, T& b) { a = x + T(1); b = a; }", num_outputs=2)(x)
    assert torch.equal(a, b)
    memory = {item.data_ptr() for item in (x, same, a, b)}
    assert len(memory) == 4


def test_lazy_conjugates(no_compiler: None) -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    function = fuser.jit_fn("template <typename T> T f(T z) { return z * T(0, 1); }")
    assert torch.equal(function(z.conj()), z.conj().resolve_conj() * 1j)


def test_a_name_with_a_letter_by_its_number(no_compiler: None) -> None:
    # Which compilers take, and Python does not.
    function = fuser.jit_fn(r"template <typename T> T f(T \u00e4, T k) { return \u00e4 * k; }", scalars=["k"])
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    result = function(x, k=3)
    assert result.tolist() == [3.0, -6.0]
    assert torch.autograd.grad(result.sum(), x)[0].tolist() == [3.0, 3.0]


def test_infinite_and_nan_scalars(no_compiler: None) -> None:
    function = fuser.jit_fn("template <typename T> T f(T x, T a) { return x < a ? x : a; }", scalars=["a"])
    x = torch.tensor([1.0, -2.0])
    assert function(x, a=math.inf).tolist() == [1.0, -2.0]
    assert function(x, a=math.nan).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint64, torch.complex64])
def test_numbers_that_no_kernel_takes_are_refused_here_too(no_compiler: None, dtype: torch.dtype) -> None:
    function = functor("axpy")
    x = torch.ones(3).to(dtype)
    total = fuser.create_reduction_fn(
        "template <typename T> T add(T a, T b, T k) { return a + b * k; }", identity=0, k=1
    )
    # The second call goes by what the first one left.
    for number in (2, 2**63, 2**64, -(2**63) - 1, 2**20_000):
        calls = (
            ("alpha", lambda n=number: function(x, x, alpha=n)),
            ("y", lambda n=number: function(x, n, alpha=1)),
            ("k", lambda n=number: total(x, k=n)),
        )
        for name, call in calls:
            if number == 2:
                call()
                continue
            with pytest.raises(ArgumentError, match=rf"^\w+: {name}.* does not fit in 64 bits$"):
                call()
    held = torch.tensor([2j])
    for call in (
        lambda: function(x, x, alpha=2j),
        lambda: total(x, k=2j),
        # As a tensor that no Python number can stand for.
        lambda: fuser.foreach(function, [x, x], [x, x], alpha=held[0])[1],
        lambda: torch.vmap(lambda alpha: function(x, x, alpha=alpha))(held)[0],
    ):
        if dtype.is_complex:
            assert call().is_complex()
            continue
        with pytest.raises(ArgumentError, match=rf"T \w+ takes no complex number, with tensors of {dtype}$"):
            call()


# ---- the interpreter's tables ----


def test_every_kind_of_syntax_has_a_function() -> None:
    def names(kinds: Iterable[type]) -> set[str]:
        return {kind.__name__ for kind in kinds}

    assert names(RUN) == names(Statement.__subclasses__())
    assert names(EVALUATE) == names(Expression.__subclasses__())
    assert names(LOCATE) <= names(EVALUATE)
