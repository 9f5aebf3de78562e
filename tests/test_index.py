"""``index=``: each element's number, whatever the layout, the dtypes, the device and who calls the functor."""

from __future__ import annotations

import itertools
import pickle
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from functors import as_tuple, assert_same, poison, same_bits, unpoison

import fuser
from fuser import arg_spec, planner
from fuser.combining import Reduction
from fuser.compiler import register
from fuser.config import config
from fuser.cuda.backend import compile_cubin
from fuser.cxx.functor import parse_functor
from fuser.debug import kernel_sources
from fuser.errors import ArgumentError, DimError, GroupError, ShapeError
from fuser.fallback import Fallback
from fuser.function import Function
from fuser.fx.backend import fuser_backend
from fuser.graph import FusionGroup, GroupBuilder
from fuser.linear import follow_sums
from fuser.ops import index_function
from fuser.ops.reductions import reduction_function
from fuser.route import run

PLACE = fuser.jit_fn(
    "template <typename T> int64_t place(int64_t i, T x, T y) { return i; }", index="i", out_dtypes=torch.int64
)
CHOOSE = fuser.jit_fn(
    "template <typename T> T choose(T x, int64_t i, T y) { return i % 3 == 0 ? x : y + T(i % 5); }", index="i"
)
SLOPE = fuser.jit_fn(
    "template <typename T> T slope(T x, int64_t i, T p) { return x * x * T(i) + p * x; }",
    scalars={"p": 1.0},
    index="i",
)
AXPY = fuser.jit_fn("template <typename T> T axpy(T x, T y, T alpha) { return alpha * x + y; }", scalars={"alpha": 0.3})
DTYPES = (
    torch.bool, torch.uint8, torch.int64, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex32,
)  # fmt: skip


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    poison()
    yield
    unpoison()


def numbers(*tensors: torch.Tensor) -> torch.Tensor:
    shape = torch.broadcast_shapes(*(item.shape for item in tensors))
    return torch.arange(shape.numel(), device=tensors[0].device).view(shape)


def choose(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    i = numbers(x, y)
    # Laid out as a pointwise op of the two lays it out.
    return torch.empty_like(x + y).copy_(torch.where(i % 3 == 0, x, y + (i % 5).to(y.dtype)))


def slope(x: torch.Tensor, p: Any = 1.0) -> torch.Tensor:
    return x * x * numbers(x).to(x.dtype) + p * x


def layouts(device: str = "cpu") -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    make = partial(torch.randn, generator=torch.Generator(device).manual_seed(0), device=device)
    image = make(3, 8, 20, 40).to(memory_format=torch.channels_last)
    yield "contiguous", make(7, 130), make(7, 130)
    yield "row", make(37, 64), make(64)
    yield "column and row", make(70, 1), make(90)
    yield "transposed", make(90, 70).t(), make(90, 70).t()
    yield "one transposed", make(130, 97), make(97, 130).t()
    yield "channels_last", image, image + 1
    yield "channels_last and contiguous", image, make(3, 8, 20, 40)
    yield "permuted", make(5, 40, 33).permute(2, 0, 1), make(33, 5, 1)
    yield "sliced", make(90, 140)[::2, 1::3], make(45, 47)
    yield "short rows", make(500, 3), make(3, 500).t()
    yield "expanded", make(1, 64).expand(40, 64), make(40, 1).expand(40, 64)
    yield "0-dim", make(()), make(())
    yield "0-dim and one element", make(()), make(1, 1)
    yield "empty", make(0, 3), make(3)


def group_of(function: Function, inputs: int = 1) -> FusionGroup:
    builder = GroupBuilder()
    tensors = [builder.add_input(f"x{slot}") for slot in range(inputs)]
    group = builder.build(builder.apply(function, tensors))
    group.lint()
    return group


# --- the text of kernels ---------------------------------------------------------------------------------------------
def spec_of(function: fuser.JitFunction, *tensors: torch.Tensor, device: str = "cuda") -> Any:
    ((_, args),) = planner.plan_texts(function.spec(len(tensors)), tensors, torch.device(device))
    return args


def test_contiguous_operands_keep_the_linear_kernel() -> None:
    args = spec_of(CHOOSE, torch.empty(64, 64), torch.empty(64, 64))
    assert (args.rank, args.counters, args.vector) == (1, (1,), 4)
    # What is stored nowhere makes no vector shorter.
    assert spec_of(CHOOSE, torch.empty(64, dtype=torch.int8), torch.empty(64, dtype=torch.int8)).vector == 16


def test_a_counter_is_neither_a_tile_nor_the_reason_for_short_vectors() -> None:
    x = torch.empty(8, 64, 20, 20).to(memory_format=torch.channels_last)
    args = spec_of(CHOOSE, x, x)
    assert (args.rank, args.counters, args.vector, args.tuning.tile) == (3, (2,), 4, 0)
    assert not any(access.is_transposed for access in args.accesses)
    assert len(args.accesses) == 4


def test_an_operand_that_gives_the_shape_alone_is_not_read() -> None:
    builder = GroupBuilder()
    x, y = builder.add_input("x"), builder.add_input("y")
    (between,) = builder.apply(AXPY.function, [x, y], [builder.add_input("alpha", is_scalar=True)])
    (i,) = builder.apply(index_function(2), [between, y])
    group = builder.build(builder.apply(SLOPE.function, [x, i], [builder.add_input("p", is_scalar=True)]))
    for device in ("cpu", "cuda"):
        text = fuser.debug_get_fused_kernel_code(group, [torch.empty(4, 1), torch.empty(5), 1.0, 2.0], device=device)
        assert "in0;" in text
        assert "in1;" not in text
        # Nor is what lies between computed.
        assert "axpy" not in text


def test_equal_indices_are_one() -> None:
    builder = GroupBuilder()
    x = builder.add_input("x")
    outputs = []
    for dims in (None, (0,), None):
        (i,) = builder.apply(index_function(1, dims), [x])
        outputs += builder.apply(PLACE.function, [i, x, x])
    group = builder.build(outputs).canonical()
    assert len(group.index_values()) == 2
    assert group.outputs[0] == group.outputs[2] != group.outputs[1]


@pytest.mark.nvrtc
@pytest.mark.parametrize("is_wide", [False, True])
def test_every_layout_has_a_cuda_kernel(is_wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # All that is generated here is compiled after the test.
    if is_wide:
        monkeypatch.setattr(arg_spec, "MAX_NARROW_OFFSET", 0)
    config.touch()
    for name, x, y in layouts():
        if x.numel():
            text = fuser.debug_get_fused_kernel_code(CHOOSE.spec(2).group, [x, y], device="cuda")
            assert "fuser_counter" in text, name
    for dtype in DTYPES:
        x = torch.empty(40, 64, dtype=dtype)
        fuser.debug_get_fused_kernel_code(PLACE.spec(2).group, [x, x], device="cuda")
    config.touch()


# --- values ----------------------------------------------------------------------------------------------------------
@pytest.mark.cpu
def test_layouts() -> None:
    for name, x, y in layouts():
        # Planned, then replayed.
        for _ in range(2):
            assert_same(CHOOSE(x, y), choose(x, y), name)
        assert torch.equal(PLACE(x, y), numbers(x, y)), name


@pytest.mark.cpu
def test_eager_torch_numbers_and_lays_out_as_the_kernel() -> None:
    expected = [(CHOOSE(x, y), PLACE(x, y)) for _, x, y in layouts()]
    was = fuser.override_can_fuse_on_cpu(False)
    try:
        with warnings.catch_warnings(action="ignore"):
            for (name, x, y), wanted in zip(layouts(), expected, strict=True):
                assert_same((CHOOSE(x, y), PLACE(x, y)), wanted, name)
    finally:
        fuser.override_can_fuse_on_cpu(was)


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_have_no_say(dtype: torch.dtype) -> None:
    number = fuser.jit_fn(
        "template <typename T> int64_t number(T x, int64_t i) { return i; }", index="i", out_dtypes=torch.int64
    )
    x = torch.zeros(20, 17).to(dtype)
    assert torch.equal(number(x), numbers(x))
    assert torch.equal(number(x.t()), numbers(x.t()))
    # Not even those that torch promotes to nothing.
    group = group_of(index_function(3), 3)
    (mixed,) = fuser.debug_launch_graph(group, [x, torch.zeros(20, 1, dtype=torch.float8_e5m2), 2.5])
    assert torch.equal(mixed, numbers(x))


@pytest.mark.cpu
def test_an_index_weighs_what_its_shape_weighs() -> None:
    builder = GroupBuilder()
    x, y = builder.add_input("x"), builder.add_input("y")
    (i,) = builder.apply(index_function(1), [x])
    group = builder.build(builder.apply(AXPY.function, [i, y], [builder.add_input("alpha", is_scalar=True)]))
    (made,) = fuser.debug_launch_graph(group, [torch.zeros(300), torch.zeros(300, dtype=torch.uint8), 1])
    assert_same(made, torch.arange(300))
    # One number beside a tensor, as any 0-dim tensor.
    (made,) = fuser.debug_launch_graph(group, [torch.zeros(()), torch.ones(300, dtype=torch.uint8), 1])
    assert_same(made, torch.ones(300, dtype=torch.uint8))


@pytest.mark.cpu
@pytest.mark.parametrize("dims", [None, (), (0,), (1,), (-1,), (0, 2), (2, 0), (-1, -2)], ids=str)
def test_dims(dims: tuple[int, ...] | None) -> None:
    group = group_of(index_function(2, dims), 2)
    assert FusionGroup.from_json(group.to_json()) == group
    key = fuser.register_fusion(group)
    for x in (torch.zeros(3, 4, 5), torch.zeros(5, 4, 3).permute(2, 1, 0)):
        counted = [
            size if dims is None or dim in {each % 3 for each in dims} else 1 for dim, size in enumerate((3, 4, 5))
        ]
        wanted = torch.arange(torch.Size(counted).numel()).view(counted).expand(3, 4, 5)
        (made,) = fuser.run_fusion(key, [x, x[:1]])
        assert_same(made, torch.empty_like(x, dtype=torch.int64).copy_(wanted), str(x.stride()))
    if not dims:
        assert fuser.run_fusion(key, [torch.tensor(1.0), 2])[0].tolist() == 0


@pytest.mark.cpu
def test_scalars_defaults_outputs_and_pickles() -> None:
    x = torch.randn(6, 5)
    wanted = slope(x, 2.0)
    for function in (SLOPE, pickle.loads(pickle.dumps(SLOPE))):
        assert torch.equal(function(x, p=2.0), wanted)
        assert torch.equal(function(x, p=torch.tensor(2.0)), wanted)
        # As a tensor of the call: one that requires grad.
        assert torch.equal(function(x, p=torch.tensor(2.0, requires_grad=True)).detach(), wanted)
    out = torch.empty(5, 6).t()
    assert SLOPE(x, p=2.0, out=out) is out
    assert torch.equal(out, wanted)
    again = x.clone()
    assert SLOPE(again, p=2.0, out=again) is again
    assert torch.equal(again, wanted)
    default = fuser.jit_fn("template <typename T> T f(T x, int64_t i, T y = T(3)) { return x * y + T(i); }", index="i")
    assert torch.equal(default(x), x * 3 + numbers(x))
    assert torch.equal(default(x, 2.0), x * 2 + numbers(x))
    SLOPE.check(device="cpu")
    assert SLOPE(torch.empty(3, 4, device="meta")).shape == (3, 4)


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
def test_in_a_chain_the_bits_stay(dtype: torch.dtype) -> None:
    def chain(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mixed = CHOOSE(AXPY(x, y), y)
        return SLOPE(mixed, p=0.7), CHOOSE(torch.relu(mixed), 1.5), AXPY(mixed, x)

    fused = fuser.fuse(chain)
    for name, x, y in itertools.islice(layouts(), 1, None, 5):
        x, y = x.to(dtype), y.to(dtype)
        assert_same(fused(x, y), chain(x, y), name)
    assert [len(group.index_values()) for group in fused.groups] == [3]
    assert not fuser.explain(fused, x, y).unfused


@pytest.mark.cpu
def test_a_group_that_is_cut_counts_on() -> None:
    # More operands than a launch takes, and an application in the middle that has no kernel.
    builder = GroupBuilder()
    tensors = [builder.add_input(f"x{slot}") for slot in range(70)]
    (total,) = builder.apply(index_function(2), tensors[:2])
    for tensor in tensors:
        (total,) = builder.apply(
            AXPY.function, [total, tensor], [builder.add_input("alpha", is_scalar=True, default=1)]
        )
    (i,) = builder.apply(index_function(1), [total])
    group = builder.build([*builder.apply(PLACE.function, [i, total, total]), total])
    x = torch.ones(4, 1), *[torch.ones(3)] * 69
    made = fuser.run_fusion(fuser.register_fusion(group), x)
    assert torch.equal(made[0], numbers(*x))
    assert torch.equal(made[1], numbers(*x) + 70.0)


@pytest.mark.cpu
@pytest.mark.slow
def test_more_than_2_to_the_31_elements() -> None:
    check_beyond_32_bits("cpu")


def check_beyond_32_bits(device: str) -> None:
    high = fuser.jit_fn("template <typename T> T high(T x, int64_t i) { return T(i >> 24) + x; }", index="i")
    length = 2**31 + 2**24 + 5
    x = torch.zeros(1, dtype=torch.uint8, device=device)
    for shape in ((length,), (2, length // 2), (length // 2, 2)):
        found = high(x.expand(shape)).view(-1)
        for begin in (0, 2**24 - 2, 2**31 - 2, 2**31 + 2**24 - 2):
            wanted = torch.arange(begin, begin + 4) >> 24
            assert found[begin : begin + 4].tolist() == wanted.tolist(), (shape, begin)
        assert int(found[-1]) == (found.numel() - 1) >> 24
        del found


@pytest.mark.cpu
@pytest.mark.parametrize("dims", [(-1,), pytest.param((0,), marks=pytest.mark.slow)], ids=str)
def test_beside_reductions(dims: tuple[int, ...]) -> None:
    # Along the reduced dimension, over the whole and of the results: one kernel counts them all.
    weigh = Function(
        parse_functor("template <typename T> T weigh(T x, int64_t i) { return x * T(i % 7); }"), unpromoted=("i",)
    )
    add = parse_functor("template <typename T> T add(T a, T b) { return a + b; }")
    keep = parse_functor("template <typename T> T keep(T x) { return x; }")
    builder = GroupBuilder()
    x = builder.add_input("x")
    (along,) = builder.apply(index_function(1, dims), [x])
    (total,) = builder.apply(
        Function(keep, reduction=Reduction(add, (0,), None, dims, keepdim=True)), builder.apply(weigh, [x, along])
    )
    (row,) = builder.apply(index_function(1), [total])
    (place,) = builder.apply(index_function(2), [total, x])
    outputs = [*builder.apply(weigh, [total, row]), *builder.apply(weigh, [x, place]), along, row]
    group = builder.build(outputs)
    data = torch.randint(-9, 9, (6, 300)).double()
    for given in (data, data.t().contiguous().t()):
        fuser.reset_stats()
        made = fuser.debug_launch_graph(group, [given])
        assert fuser.stats()["launches"] == 1
        wanted = numbers(data[0] if dims == (-1,) else data[:, :1]).expand(6, 300)
        sums = (data * (wanted % 7)).sum(dims, keepdim=True)
        expected = sums * (numbers(sums) % 7), data * (numbers(data) % 7), wanted, numbers(sums)
        assert all(map(torch.equal, made, expected))


def test_a_reduction_that_gives_a_shape_alone_is_not_made() -> None:
    add = parse_functor("template <typename T> T add(T a, T b) { return a + b; }")
    keep = parse_functor("template <typename T> T keep(T x) { return x; }")
    builder = GroupBuilder()
    (total,) = builder.apply(Function(keep, reduction=Reduction(add, (0,), None, (1,))), [builder.add_input("x")])
    group = builder.build(builder.apply(index_function(1), [total]))
    assert not group.has_reduction
    text = fuser.debug_get_fused_kernel_code(group, [torch.empty(6, 50)], device="cuda")
    assert "out0 = v2;" in text
    assert "add" not in text.partition("struct fuser_args")[2]


# --- derivatives and transforms --------------------------------------------------------------------------------------
@pytest.mark.cpu
@pytest.mark.slow
def test_gradients() -> None:
    x = torch.randn(3, 1, dtype=torch.float64, requires_grad=True)
    y = torch.randn(4, dtype=torch.float64, requires_grad=True)
    p = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(CHOOSE, (x, y))
    mapped = lambda x, p: SLOPE(x, p=p)  # noqa: E731
    assert torch.autograd.gradcheck(mapped, (x, p), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(mapped, (x, p))


@pytest.mark.cpu
def test_a_hand_written_derivative_takes_the_index_and_makes_no_gradient_of_it() -> None:
    forward = "template <typename T> T f(T x, int64_t i, T y, T a) { return a * x * T(i) + y; }"
    # Another name and place in the text. Were it promoted, it would be halved as a float.
    backward = fuser.jit_fn(
        "template <typename T, typename I> void b(T x, I k, T y, T g, T a, T& gx, T& gy) {"
        " gx = a * g * T(k / 2); gy = g; }",
        num_outputs=2,
        scalars=["a"],
    )
    function = fuser.jit_fn(forward, scalars={"a": 2.0}, index="i", backward=backward)
    chosen = fuser.differentiable(
        fuser.jit_fn(forward, scalars={"a": 2.0}, index="i"),
        fuser.jit_fn(
            "template <typename T, typename I> T b(I k, T g, T a) { return a * g * T(k / 2); }", scalars=["a"]
        ),
        save_for_backward=["i"],
        num_grad_inputs=1,
    )
    x, y = torch.randn(5, 6, requires_grad=True), torch.randn(6, requires_grad=True)
    wanted = 2 * (numbers(x) // 2).float()
    for is_fused in (True, False):
        was = fuser.override_can_fuse_on_cpu(is_fused)
        try:
            with warnings.catch_warnings(action="ignore"):
                found = torch.autograd.grad(function(x, y).sum(), (x, y))
                (only,) = torch.autograd.grad(chosen(x, y.detach()).sum(), x)
        finally:
            fuser.override_can_fuse_on_cpu(was)
        assert torch.equal(found[0], wanted)
        assert torch.equal(found[1], torch.full((6,), 5.0))
        assert torch.equal(only, wanted)
    # As torch differentiates the eager version, where no derived group can serve.
    (result,) = Fallback(function.spec(2).group).run([x, y, 2.0], "a test")
    assert torch.equal(torch.autograd.grad(result.sum(), x)[0], wanted)
    with pytest.raises(ArgumentError, match=r"expected 4 \(3 saved, 1 gradients\) and 2"):
        fuser.jit_fn(forward, scalars={"a": 2.0}, index="i", backward=AXPY)


@pytest.mark.cpu
def test_vmap_counts_within_an_element_of_the_batch() -> None:
    x, y = torch.randn(3, 4, 5), torch.randn(5, 3)
    wanted = torch.stack([choose(x[n], y[:, n]) for n in range(3)])
    assert torch.equal(torch.vmap(CHOOSE, in_dims=(0, 1))(x, y), wanted)
    assert torch.equal(torch.vmap(CHOOSE, in_dims=(0, None))(x, y[:, 0]), torch.stack([choose(a, y[:, 0]) for a in x]))
    twice = torch.stack([torch.stack([choose(row, row) for row in a]) for a in x])
    assert torch.equal(torch.vmap(torch.vmap(CHOOSE))(x, x), twice)
    # Elements without a dimension have the number 0.
    assert torch.equal(torch.vmap(SLOPE)(y[0]), y[0])
    expected = torch.stack([torch.func.grad(lambda v: slope(v).sum())(a) for a in x])
    found = torch.vmap(torch.func.grad(lambda v: SLOPE(v).sum()))(x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.func.grad(lambda v: torch.vmap(SLOPE)(v).sum())(x), expected)
    tangent = torch.func.jvp(torch.vmap(SLOPE), (x,), (torch.ones_like(x),))[1]
    torch.testing.assert_close(tangent, expected)
    # A group with dimensions of its own, from the front.
    spec = register(group_of(index_function(1, (0,))))
    found = torch.vmap(lambda v: fuser.run_fusion(fuser.register_fusion(spec.group), [v])[0])(x)
    assert torch.equal(found, torch.arange(4).view(4, 1).expand(3, 4, 5))


# --- graphs ----------------------------------------------------------------------------------------------------------
@pytest.mark.cpu
@pytest.mark.parametrize("backend", [fuser_backend, "aot_eager"], ids=["fuser", "aot_eager"])
def test_compiled(backend: Any) -> None:
    def step(x: torch.Tensor, y: torch.Tensor, p: Any) -> torch.Tensor:
        return SLOPE(CHOOSE(x, y) * 2, p=p)

    torch.compiler.reset()
    compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=True)
    for shape in ((4, 6), (7, 3)):
        x, y = torch.randn(shape, requires_grad=True), torch.randn(shape[1:], requires_grad=True)
        for p in (0.5, torch.tensor(0.5)):
            found, wanted = compiled(x, y, p), step(x, y, p)
            assert torch.equal(found, wanted)
            for mine, theirs in zip(
                torch.autograd.grad(found.sum(), (x, y)), torch.autograd.grad(wanted.sum(), (x, y)), strict=True
            ):
                torch.testing.assert_close(mine, theirs)


@pytest.mark.cpu
def test_exported_and_warmed_up() -> None:
    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return SLOPE(x, p=3.0) + 1

    x = torch.randn(4, 5)
    exported = torch.export.export(Module(), (x,))
    assert torch.equal(exported.module()(x), slope(x, 3.0) + 1)
    fused = fuser.fuse(lambda x: SLOPE(x, p=3.0) + 1)
    fused.warmup(torch.empty(4, 5, device="meta"))
    fuser.reset_stats()
    assert torch.equal(fused(x), slope(x, 3.0) + 1)
    assert fuser.stats()["compiles"] == 0
    assert fuser.stats()["launches"] == 1


def test_fused_functions_build_the_functors_own_applications() -> None:
    graph = torch.fx.symbolic_trace(lambda x, y: CHOOSE(x, y))
    fuser.fx.FusionPass()(graph)
    (module,) = [item for item in graph.modules() if isinstance(item, fuser.fx.FusionModule)]
    assert module.group.key == CHOOSE.spec(2).group.key


def test_sums_pass_an_index_by() -> None:
    builder = GroupBuilder()
    x = builder.add_input("x")
    (i,) = builder.apply(index_function(1), [x])
    times = Function(fuser.jit_fn("template <typename T> T f(T x, T i) { return x * i; }").function.functor)
    group = builder.build([*builder.apply(times, [x, i]), i])
    assert follow_sums(group, frozenset({0})) == ((True, False), -1)
    # What is added to each part is no sum.
    plus = Function(fuser.jit_fn("template <typename T> T f(T x, T i) { return x + i; }").function.functor)
    builder = GroupBuilder()
    x = builder.add_input("x")
    (i,) = builder.apply(index_function(1), [x])
    assert follow_sums(builder.build(builder.apply(plus, [x, i])), frozenset({0})) == ((), 1)


@pytest.mark.cpu
@pytest.mark.nvrtc
def test_what_only_gives_an_index_its_shape_is_not_computed_behind_a_reduction() -> None:
    add = fuser.jit_fn("template <typename T> T add(T x, T y) { return x + y; }").function
    builder = GroupBuilder()
    x = builder.add_input("x")
    (row,) = builder.apply(reduction_function("sum", (1,), True), [x])
    (twice,) = builder.apply(add, [row, row])
    (place,) = builder.apply(index_function(1, (1,)), builder.apply(add, [x, twice]))
    group = builder.build([twice, place])
    # Of what is stored narrower, and read as it was computed.
    x = torch.randn(6, 96).bfloat16()
    made = run(register(group), [x])
    torch.testing.assert_close(made[0], 2 * x.float().sum(1, keepdim=True).bfloat16())
    assert torch.equal(made[1], torch.arange(96).expand(6, 96))
    assert [compile_cubin(source, "sm_90") for source in kernel_sources(register(group), [x], "cuda")]


# --- what is said ----------------------------------------------------------------------------------------------------
X_I = "template <typename T> T f(T x, int64_t index) { return x; }"
WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "misspelt": (lambda: fuser.jit_fn(X_I, index="idnex"), ArgumentError, "no parameter 'idnex'.*did you mean 'index'"),
    "a scalar": (lambda: fuser.jit_fn(X_I, index="index", scalars=["index"]), ArgumentError, "it is a scalar"),
    "an output": (
        lambda: fuser.jit_fn("template <typename T> void f(T x, T& y) { y = x; }", index="y"),
        ArgumentError,
        "'y' cannot receive the index: it is an output",
    ),
    "no name": (lambda: fuser.jit_fn(X_I, index=1), ArgumentError, "index must be the name of a parameter.*got int"),
    "given": (
        lambda: SLOPE(torch.ones(2), torch.ones(2)),
        ArgumentError,
        r"slope\(x, i=index, \*, p\) takes 1 tensor, got 2",
    ),
    "given by name": (lambda: SLOPE(torch.ones(2), i=1), ArgumentError, "no scalar 'i'; it is each element's index"),
    "no tensor": (
        lambda: fuser.jit_fn("template <typename T> T f(T i) { return i; }", index="i")(),
        ArgumentError,
        r"f\(i=index\) has no tensor to work on",
    ),
    "left out before it": (
        lambda: fuser.jit_fn("template <typename T> T f(T x, T y = T(1), int64_t i = 0) { return x; }", index="i")(
            torch.ones(2)
        ),
        ArgumentError,
        r"f\(x, y, i=index\) takes 2 tensors, got 1",
    ),
    "shapes": (lambda: CHOOSE(torch.ones(2), torch.ones(3)), ShapeError, "^choose: The size of tensor a"),
    "a list": (lambda: CHOOSE([1.0], torch.ones(3)), ArgumentError, "^choose: x must be a tensor"),
    "dim beyond": (
        lambda: fuser.debug_launch_graph(group_of(index_function(1, (2,))), [torch.ones(2, 2)]),
        DimError,
        "index: Dimension out of range",
    ),
    "dim twice": (
        lambda: fuser.debug_launch_graph(group_of(index_function(1, (0, -2))), [torch.ones(2, 2)]),
        ShapeError,
        "index: dim 0 appears multiple times",
    ),
    "dims of another": (
        lambda: group_of(Function(AXPY.function.functor, dims=(0,))),
        GroupError,
        "axpy",
    ),
    "dims of a functor": (
        lambda: group_of(
            Function(fuser.jit_fn("template <typename T> T f(T x) { return x; }").function.functor, dims=(0,))
        ),
        GroupError,
        "only an index or a view has dims",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use(name: str) -> None:
    call, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        call()


def test_signatures_say_who_gives_it() -> None:
    assert SLOPE.signature() == "slope(x, i=index, *, p)"
    assert repr(CHOOSE) == "<fuser.JitFunction choose(x, i=index, y)>"
    assert "v2 = index(v0, v1)\n" in str(CHOOSE.spec(2).group)
    assert "index(v0, dim=[0, -1])" in str(group_of(index_function(1, (0, -1))))
    assert CHOOSE.spec(2).group.names() == ["choose"]


# --- CUDA ------------------------------------------------------------------------------------------------------------
@pytest.mark.cuda
@pytest.mark.parametrize("is_wide", [False, True])
def test_cuda_has_the_cpus_values(is_wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_wide:
        monkeypatch.setattr(arg_spec, "MAX_NARROW_OFFSET", 0)
    config.touch()
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        for name, x, y in layouts():
            x, y = (x * 50).to(dtype), (y * 50).to(dtype)
            found, wanted = CHOOSE(x.cuda(), y.cuda()), CHOOSE(x, y)
            assert same_bits(found.cpu(), wanted), (name, dtype)
            assert torch.equal(PLACE(x.cuda(), y.cuda()).cpu(), numbers(x, y)), (name, dtype)
    for dims in ((0,), (1,), (0, 2), ()):
        key = fuser.register_fusion(group_of(index_function(1, dims)))
        for x in (torch.zeros(40, 36, 50), torch.zeros(50, 36, 40).permute(2, 1, 0)):
            assert_same(
                [item.cpu() for item in fuser.run_fusion(key, [x.cuda()])], as_tuple(fuser.run_fusion(key, [x]))
            )
    config.touch()


@pytest.mark.cuda
@pytest.mark.slow
def test_cuda_counts_beyond_32_bits() -> None:
    check_beyond_32_bits("cuda")
