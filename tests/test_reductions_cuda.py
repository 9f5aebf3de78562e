"""The CUDA kernels of groups with reductions: their loops, emulated on the CPU, and on a GPU, bit for bit."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from composite_cases import fused, fusion_modules
from cuda_emulation import run_emulated
from functors import poison, unpoison
from reduction_cases import MOMENTS, ONE
from row_groups import GROUPS, OWN_GROUPS, draw, layouts_of, on_gpu, one, reduce, text

import fuser
from fuser import arg_spec, row_access, sections
from fuser.compiler import register
from fuser.config import config
from fuser.debug import kernel_sources
from fuser.graph import FusionGroup, GroupBuilder
from fuser.ops import OPS, reduction_function
from fuser.route import run

SHAPES: list[tuple[tuple[int, ...], tuple[int, ...] | None]] = [
    ((5, 7), (-1,)), ((33, 1000), (1,)), ((2000, 70), (0,)), ((3, 5000), (1,)), ((4, 9, 5, 6), (1,)),
    ((4, 9, 5, 6), (0, 2, 3)), ((2, 20000), (1,)), ((6, 3, 20, 50), (0, 2, 3)), ((0, 5), (1,)), ((100, 8), (1,)),
    ((6,), (0,)), ((), ()), ((), None), ((3, 0), (1,)), ((300, 31), None), ((1, 1), (1,)), ((20000, 3), (0,)),
    ((2, 40000), (1,)), ((40, 4096), (-1,)),
]  # fmt: skip
# Held in shared memory, shared by blocks, cut into a launch for each pass.
LONG_SHAPES: list[tuple[tuple[int, ...], tuple[int, ...] | None]] = [
    ((3, 40000), (-1,)), ((3, 140000), (1,)), ((70000, 3), (0,)), ((100, 600, 5), (0, 1)), ((70, 66000), (1,)),
]  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def same(results: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for got, want in zip(results, wanted, strict=True):
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        assert got.stride() == want.stride()
        torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0, equal_nan=True)


def test_numbers_are_no_tensors_of_one_element() -> None:
    # Where sums of what all elements come to are looked at as columns.
    builder = GroupBuilder()
    x, alpha = builder.add_input("x"), builder.add_input("alpha", is_scalar=True)
    (found,) = builder.apply(reduction_function("any", None, False), [x])
    (total,) = builder.apply(reduction_function("sum", None, False), [found])
    other = builder.apply(OPS["neg"].function, [total])
    group = builder.build([found, *other, *builder.apply(OPS["add"].function, [total, total], [alpha])])
    assert kernel_sources(register(group), [torch.empty(5, device="meta"), 2], "cuda")


@pytest.mark.one_in(2)
@pytest.mark.cpu
@pytest.mark.parametrize("name", ["skewed", "moments", "indexed", "softmax", "two", "contracted"])
def test_loops(name: str) -> None:
    check_loops(name, 43)


def test_places_that_are_compared_are_neighbouring_numbers() -> None:
    # Compilers then know which of a thread's elements come first, and compare no places of theirs.
    x = torch.empty(4, 4096, device="meta")
    taken = fuser.debug_get_fused_kernel_code(GROUPS["indexed"][0]((1,)), [x], "cuda")
    assert "fuser_load<V, 1>(row.index" in taken


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.parametrize("name", [*GROUPS, *OWN_GROUPS])
def test_loops_of_all_shapes_and_layouts(name: str) -> None:
    check_loops(name, 1)


def check_loops(name: str, one_in: int) -> None:
    build, inputs_of = (GROUPS | OWN_GROUPS)[name]
    number = len(name)
    for place, (shape, dims) in enumerate([*SHAPES, *LONG_SHAPES]):
        dtypes = (*DTYPES, *MORE_DTYPES) if name == "total" else DTYPES
        dtype = dtypes[(place + len(name)) % len(dtypes)]
        for _, x in layouts_of(draw(shape, dtype)):
            number += 1
            if number % one_in:
                continue
            inputs, group = inputs_of(x, dims), build(dims)
            same(run_emulated(group, inputs, descending=bool(number % 2)), run(register(group), inputs))


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("name", "dtype", "length"),
    [
        ("skewed", torch.float32, 70001),
        ("largest", torch.bfloat16, 300_001),
        # More than one block adds what those before it have.
        pytest.param("moments", torch.float64, 2_200_003, marks=pytest.mark.slow),
    ],
)
def test_blocks_that_share_a_row(name: str, dtype: torch.dtype, length: int) -> None:
    build, inputs_of = GROUPS[name]
    inputs = inputs_of(draw((length,), dtype, 5), None)
    same(run_emulated(build(None), inputs), run(register(build(None)), inputs))


@pytest.mark.cpu
@pytest.mark.parametrize("name", ["total", "shifted"])
def test_rows_of_nothing(name: str) -> None:
    build, inputs_of = GROUPS[name]
    inputs, group = inputs_of(torch.empty(3, 0), (1,)), build((1,))
    same(run_emulated(group, inputs), run(register(group), inputs))


@pytest.mark.cpu
@pytest.mark.parametrize(("shape", "dtype"), [((2, 40000), torch.float32), ((3, 4097), torch.bfloat16)], ids=str)
def test_rows_of_clusters_and_rows_that_begin_anywhere(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    build, inputs_of = GROUPS["shifted"]
    inputs, group = inputs_of(draw(shape, dtype), (1,)), build((1,))
    same(run_emulated(group, inputs, descending=True), run(register(group), inputs))


@pytest.mark.cpu
@pytest.mark.parametrize("shape", [(1, 3, 16384), (1, 9, 8192)], ids=str)
def test_what_threads_take_lies_along_a_dimension(shape: tuple[int, ...]) -> None:
    # Blocks of a cluster, and chunks that are read again.
    build, inputs_of = GROUPS["softmax"]
    inputs, group = inputs_of(draw((*shape[:2], shape[2] + 8), torch.bfloat16)[..., :-8], (1, 2)), build((1, 2))
    same(run_emulated(group, inputs), run(register(group), inputs))


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("shape", "is_held"), [((1, 9, 16384), True), ((2, 9, 16008), True), ((1, 3, 320_000), False)], ids=str
)
def test_rows_that_blocks_go_over_together(
    shape: tuple[int, ...], is_held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of a GPU's many rows, a few.
    monkeypatch.setattr(sections, "FEW_ROWS", 0)
    config.touch()
    build, inputs_of = GROUPS["softmax"]
    inputs, group = inputs_of(draw((*shape[:2], shape[2] + 8), torch.bfloat16)[..., :-8], (1, 2)), build((1, 2))
    (source,) = kernel_sources(register(group), inputs, "cuda")
    assert source.tuning.stretch
    assert source.tuning.is_held == is_held
    same(run_emulated(group, inputs, descending=shape[0] > 1), run(register(group), inputs))


@pytest.mark.cpu
@pytest.mark.parametrize("planes", [2, 4])
def test_no_block_goes_over_a_row_alone(planes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # A single batch is one block's, which keeps it.
    monkeypatch.setattr(sections, "FEW_ROWS", 0)
    config.touch()
    build, inputs_of = OWN_GROUPS["contracted"]
    inputs, group = inputs_of(draw((2, planes, 4104), torch.float32)[..., :-8], (1, 2)), build((1, 2))
    (source,) = kernel_sources(register(group), inputs, "cuda")
    assert bool(source.tuning.stretch) == (source.tuning.cluster > 1) == (planes > 2)
    same(run_emulated(group, inputs), run(register(group), inputs))


@pytest.mark.cpu
@pytest.mark.parametrize("plane", [128 * 128, 56 * 56 + 8])
@pytest.mark.parametrize("is_backward", [False, True])
def test_batch_norms_whose_channels_blocks_go_over_together(
    plane: int, is_backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Threads add up what they have of all chunks: fast numerics promise no order.
    monkeypatch.setattr(sections, "FEW_ROWS", 0)
    config.touch()
    x = torch.randn((1 << 18) // plane, 2, plane).mul(3).add(5)
    grad, w, b = torch.randn_like(x), torch.randn(2), torch.randn(2)
    mean, rstd = x.mean((0, 2)), x.var((0, 2), correction=0).add(1e-5).rsqrt()

    def train(x: Any, w: Any, b: Any) -> Any:
        return torch.ops.aten._native_batch_norm_legit.no_stats(x, w, b, True, 0.1, 1e-5)

    def differentiate(grad: Any, x: Any, w: Any, mean: Any, rstd: Any) -> Any:
        given = (grad, x, w, None, None, mean, rstd, True, 1e-5, [True, True, True])
        return torch.ops.aten.native_batch_norm_backward.default(*given)

    function, given = (differentiate, (grad, x, w, mean, rstd)) if is_backward else (train, (x, w, b))
    with config.patch(numerics="fast"):
        graph_module = fused(function, given)
        (module,) = fusion_modules(graph_module)
        (node,) = [node for node in graph_module.graph.nodes if node.op == "call_module"]
        names = [item.name for item in graph_module.graph.nodes if item.op == "placeholder"]
        inputs = [dict(zip(names, given, strict=True)).get(str(item), item) for item in node.args]
        (source,) = kernel_sources(module.spec, inputs, "cuda")
        assert source.tuning.stretch
        made = run_emulated(module.group, inputs)
    wanted = function(*(item.double() for item in given))
    for got, want in zip(made, wanted, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6 * want.abs().max().item())


@pytest.mark.cpu
def test_what_a_launch_read_is_read_again_from_its_end() -> None:
    # There the cache still has it.
    def train(x: Any, w: Any, b: Any) -> Any:
        return torch.ops.aten._native_batch_norm_legit.no_stats(x, w, b, True, 0.1, 1e-5)

    x, w, b = torch.randn(64, 70, 1600), torch.randn(70), torch.randn(70)
    with config.patch(numerics="fast"):
        graph_module = fused(train, (x, w, b))
    (module,) = fusion_modules(graph_module)
    (node,) = [node for node in graph_module.graph.nodes if node.op == "call_module"]
    given = {"x_1": x, "w_1": w, "b_1": b}
    statistics, normalise = kernel_sources(module.spec, [given.get(str(item), item) for item in node.args], "cuda")
    assert not statistics.tuning.from_end
    assert normalise.tuning.from_end
    assert "gridDim.x - 1 - blockIdx.x" in normalise.text


def divided() -> FusionGroup:
    """Rows divided by a number of each, and what they come to."""
    builder = GroupBuilder()
    x, w = builder.add_input("x"), builder.add_input("w")
    (y,) = builder.apply(OPS["div"].function, [x, w])
    return builder.build([y, *builder.apply(reduce((1,)), [y])])


def any_floats(rows: int, length: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of every magnitude, zeros, infinities and NaNs; most numbers of some of them are ordinary."""
    bits = torch.randint(-(2**31), 2**31 - 1, (rows, length + 1), dtype=torch.int32).view(torch.float32)
    specials = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -3.0, 1e-38, 1e-45, 3e38])
    bits[:, length // 2 : length // 2 + len(specials)] = specials
    bits[rows // 2 :, : length // 4] = torch.randn(rows - rows // 2, length // 4)
    bits[: len(specials), -1], bits[len(specials) : rows // 2, -1] = specials, 1 + torch.rand(rows // 2 - len(specials))
    return bits[:, :-1].to(dtype).contiguous(), bits[:, -1:].to(dtype).contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_a_row_is_divided_by_gives_the_bits_of_a_division(dtype: torch.dtype) -> None:
    x, w = any_floats(48, 512, dtype)
    y, _ = run_emulated(divided(), [x, w])
    same([y], [x / w])


def close_to_halves(step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Divisors of 24 bits, and dividends whose quotients lie next to the middle of two floats: ``step`` thins them out.

    The middles are (2k + 1) / 2^p: a 2^p - (2k + 1) b is a small number. Nearer than to four of its steps a quotient's
    first approximation and its remainder cannot move a rounded result (fuser_divisor in prelude/cuda_rows.h).
    """
    for shift in range(3):
        odd = torch.arange(2 ** (23 - shift) + 1, 2 ** (24 - shift), 2 * step)
        for power in (24 - shift, 25 - shift):
            inverse = torch.ones_like(odd)
            for _ in range(power):
                inverse = torch.where(inverse % 2 == 0, inverse, inverse + odd) // 2
            steps = torch.tensor([sign * number for number in range(1, (4 >> shift) + 1) for sign in (1, -1)])
            first = steps * inverse[:, None] % odd[:, None]
            found = torch.cat([first + odd[:, None] * turn for turn in range(2 ** (shift + 1))], 1)
            found[(found < 2**23) | (found >= 2**24)] = 2**23
            yield found.float(), (odd << shift).float()[:, None]


def test_quotients_next_to_the_middle_of_two_floats() -> None:
    for x, w in close_to_halves(9973):
        same([run_emulated(divided(), [x, w])[0]], [x / w])


def test_quotients_of_bfloat16() -> None:
    numbers = (torch.arange(128, 256) / 128).bfloat16()
    x, w = numbers.expand(128, 128).contiguous(), numbers[:, None].contiguous()
    same([run_emulated(divided(), [x, w])[0]], [x / w])


# --- on a GPU --------------------------------------------------------------------------------------------------------
LARGE_SHAPES: list[tuple[tuple[int, ...], tuple[int, ...] | None]] = [
    ((100000, 8), (1,)), ((100000, 3), (1,)), ((1, 2**20), (1,)), ((3, 2**20 + 3), (1,)), ((5, 65536), (1,)),
    ((4, 131072), (1,)), ((7, 32768), (1,)), ((9, 10007), (1,)), ((131072, 5), (0,)), ((1000, 1000), (0,)),
    ((513, 257), (1,)), ((16, 24, 33, 31), (0, 2, 3)), ((64, 50, 20), (0, 2)), ((700, 800), None), ((2**20,), (0,)),
    ((8193, 40), (0,)), ((1, 70000), (0,)), ((12, 16, 1024), (-1,)), ((300000,), None),
]  # fmt: skip
MORE_DTYPES = (torch.float16, torch.int32, torch.int64, torch.uint8, torch.complex64, torch.float8_e4m3fn)


@pytest.fixture
def poisoned() -> Iterator[None]:
    poison()
    yield
    unpoison()
    config.touch()


@pytest.mark.cuda
def test_all_quotients_next_to_the_middle_of_two_floats() -> None:
    for x, w in close_to_halves(1):
        inputs = on_gpu([x, w])
        assert torch.equal(run(register(divided()), inputs)[0], inputs[0] / inputs[1])


@pytest.mark.cuda
def test_all_quotients_of_bfloat16() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).cuda()
    for divisors in every.split(4096):
        inputs = [every.expand(len(divisors), -1).contiguous(), divisors[:, None].contiguous()]
        made, wanted = run(register(divided()), inputs)[0], inputs[0] / inputs[1]
        is_number = ~made.isnan()
        assert torch.equal(made.view(torch.int16)[is_number], wanted.view(torch.int16)[is_number])
        assert torch.equal(made.isnan(), wanted.isnan())


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_of_divisions(dtype: torch.dtype) -> None:
    for length in (50, 1024, 4096, 40000):
        inputs = on_gpu(list(any_floats(2000, length, dtype)))
        y, _ = run(register(divided()), inputs)
        assert torch.equal(y.nan_to_num(nan=1.5), (inputs[0] / inputs[1]).nan_to_num(nan=1.5))


@pytest.mark.cuda
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", GROUPS)
def test_bits_of_the_cpu(name: str, dtype: torch.dtype) -> None:
    build, inputs_of = GROUPS[name]
    failed = []
    for shape, dims in [*SHAPES, *LARGE_SHAPES]:
        for layout, x in layouts_of(draw(shape, dtype)):
            inputs, group = inputs_of(x, dims), build(dims)
            if layout == "contiguous":
                wanted = run(register(group), inputs)
            try:
                same(run(register(group), on_gpu(inputs)), laid_out(wanted, group, inputs))
            except AssertionError as error:
                failed.append(f"{shape} {dims} {layout}: {error}")
    assert not failed, "\n".join(failed)


@pytest.mark.cuda
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", MORE_DTYPES, ids=str)
@pytest.mark.parametrize("name", ["total", "halves"])
def test_bits_of_the_cpu_for_other_dtypes(name: str, dtype: torch.dtype) -> None:
    build, inputs_of = GROUPS[name]
    for shape, dims in [*SHAPES, *LARGE_SHAPES[::3]]:
        for layout, x in layouts_of(draw(shape, dtype)):
            inputs, group = inputs_of(x, dims), build(dims)
            if layout == "contiguous":
                wanted = run(register(group), inputs)
            same(run(register(group), on_gpu(inputs)), laid_out(wanted, group, inputs))


def laid_out(wanted: list[torch.Tensor], group: FusionGroup, inputs: list[Any]) -> list[torch.Tensor]:
    """Lay results out as those of inputs in another layout: the CPU's kernels for each are compared in other tests."""
    made = run(register(group), [item.to("meta") if isinstance(item, torch.Tensor) else item for item in inputs])
    return [torch.empty_strided(m.shape, m.stride(), dtype=m.dtype).copy_(w) for m, w in zip(made, wanted, strict=True)]


@pytest.mark.cuda
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*GROUPS, *OWN_GROUPS])
def test_bits_of_applications_alone(name: str, dtype: torch.dtype) -> None:
    build, inputs_of = (GROUPS | OWN_GROUPS)[name]
    for shape, dims in [*SHAPES, *LARGE_SHAPES[::4]]:
        inputs, group = on_gpu(inputs_of(draw(shape, dtype), dims)), register(build(dims)).group
        for got, want in zip(run(register(group), inputs), run_apart(group, inputs), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def run_apart(group: FusionGroup, inputs: list[Any]) -> list[Any]:
    """Run the applications of a group one by one."""
    values = list(inputs)
    for item in group.applications:
        part = one(item.function, len(item.tensors), len(item.scalars))
        values += run(register(part), [values[value] for value in (*item.tensors, *item.scalars)])
    return [values[value] for value in group.outputs]


@pytest.mark.cuda
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", GROUPS)
def test_wide_indices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arg_spec, "MAX_NARROW_OFFSET", 0)
    config.touch()
    build, inputs_of = GROUPS[name]
    for shape, dims in [*SHAPES, *LARGE_SHAPES[::4]]:
        inputs, group = inputs_of(draw(shape, torch.float32), dims), build(dims)
        same(run(register(group), on_gpu(inputs)), run(register(group), inputs))


WEIGHTED = text(
    "void merge(T m, T s, T n, T m2, T s2, T n2, T& a, T& b, T& c) "
    "{ c = n + n2; T d = m2 - m; T f = c > 0 ? n2 / c : T(0); a = m + d * f; b = s + s2 + d * d * n * f; }",
    outputs=3,
)


@pytest.mark.cuda
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_bits_do_not_depend_on_what_is_known_of_the_length(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    # Compilers see through more where no bounds are checked.
    weighted = one(reduce((-1,), value=ONE, combine=WEIGHTED, identity=(0, 0, 0), finish=MOMENTS))
    groups = [
        (weighted, lambda x: [x]),
        *((build((-1,)), lambda x, of=of: of(x, (-1,))) for build, of in GROUPS.values()),
    ]
    for shape in ((300, 256), (40, 4096), (8, 5120), (3, 32768), (200, 65536)):
        x = draw(shape, dtype)
        for group, inputs_of in groups:
            inputs = on_gpu(inputs_of(x))
            wanted = run(register(group), inputs)
            with monkeypatch.context() as patch:
                patch.setattr(row_access, "_multiple", lambda length, vector, tuning: 0)
                config.touch()
                same([item.cpu() for item in run(register(group), inputs)], [item.cpu() for item in wanted])
            config.touch()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [2**23, 2**23 + 8193, 2**24 + 5, 2**24 + 2**13])
def test_rows_of_many_batches(length: int, dtype: torch.dtype) -> None:
    # Several blocks add what others have, one after another.
    for name in ("skewed", "moments", "largest"):
        build, inputs_of = GROUPS[name]
        inputs = inputs_of(draw((length,), dtype), None)
        wanted = run(register(build(None)), inputs)
        for _ in range(10):
            same(run(register(build(None)), on_gpu(inputs)), wanted)


@pytest.mark.cuda
def test_rows_that_blocks_share_in_graphs_and_on_several_streams() -> None:
    # Each call has a workspace of its own, which is zero at first.
    group, x = register(GROUPS["dot"][0](None)), draw((1000, 1001), torch.float32).cuda()
    (wanted,) = run(group, [x, x])
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    made = []
    for _ in range(50):
        for stream in streams:
            with torch.cuda.stream(stream):
                made += run(group, [x, x])
    torch.cuda.synchronize()
    assert all(torch.equal(each, wanted) for each in made)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (captured,) = run(group, [x, x])
    for _ in range(3):
        captured.fill_(0)
        graph.replay()
        assert torch.equal(captured, wanted)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", GROUPS)
def test_short_rows_have_as_many_threads_as_each_has_vectors(name: str) -> None:
    build, inputs_of = GROUPS[name]
    for dtype, length in itertools.product((torch.float64, torch.bfloat16), (1, 3, 5, 7, 9, 17, 49, 255)):
        spec, inputs = register(build((-1,))), inputs_of(torch.ones(64, length, dtype=dtype), (-1,))
        for source in kernel_sources(spec, inputs, "cuda"):
            for threads, vectors in re.findall(r"constexpr int V = \d+, T = (\d+), U = (\d+)", source.text):
                assert int(vectors) <= int(threads), (dtype, length)
