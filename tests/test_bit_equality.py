"""The promise: fusing never changes a bit, and an element's value depends on its inputs alone."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functors import as_tuple, assert_same, draw, functor, poison, same_bits, special_tensor, unpoison
from tiers import SLOW, one_of_each

import fuser

pytestmark = pytest.mark.cpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MOSTLY = [torch.float32, torch.bfloat16, *(pytest.param(dtype, marks=SLOW) for dtype in DTYPES[2:])]
CHAINS_OF_DTYPES = one_of_each(list(itertools.product(["contraction", "branching"], DTYPES)))


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    poison()
    yield
    unpoison()


def contraction(x: Any, y: Any, z: Any) -> Any:
    """A chain full of multiply-adds across functor boundaries."""
    axpy, sigmoid, mix = functor("axpy"), functor("sigmoid"), functor("mix")
    a = axpy(x, y, alpha=1.7)
    b = mix(a, sigmoid(z), w=0.3)
    return axpy(b, axpy(a, b, alpha=0.1), alpha=-0.7)


def branching(x: Any, y: Any, z: Any) -> Any:
    u, v = functor("rotate")(x, y)
    radius, angle = functor("polar")(u, z)
    return functor("axpy")(radius, functor("gelu")(v)), functor("horner")(functor("leaky")(angle)), u


def with_operators(x: Any, y: Any, z: Any) -> Any:
    t = functor("sigmoid")(x * y + z)
    return torch.where(t > 0.5, t * x - y, torch.tanh(z) / (1.0 + abs(x)))


def deep(x: Any, y: Any, z: Any) -> Any:
    for step in range(12):
        x, y = functor("mix")(x, y, w=0.1 * step), functor("leaky")(functor("axpy")(y, z, alpha=-0.5))
    return x, y


def integers(x: Any, y: Any, z: Any) -> Any:
    a = functor("axpy")(x, y, alpha=3)
    b = functor("median3")(a, functor("cube")(z), y)
    return functor("bit_mix")(b, functor("macro")(a)), functor("relu")(b) * a + z


CHAINS: dict[str, Callable[..., Any]] = {
    "contraction": contraction,
    "branching": branching,
    "with_operators": with_operators,
    "deep": deep,
}
FUSED = {name: fuser.fuse(chain) for name, chain in (*CHAINS.items(), ("integers", integers))}


def one_by_one(function: Callable[..., Any], *args: torch.Tensor) -> Any:
    """Run a chain functor by functor, its torch ops also through fuser, one launch each."""

    class Single(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, target: Any, types: Any, call: Any = (), kwargs: Any = None) -> Any:
            single = _single(target, tuple(isinstance(item, torch.Tensor) for item in call))
            if single is None:
                return target(*call, **(kwargs or {}))
            with torch._C.DisableTorchFunction():
                return single(*call)

    with Single():
        return function(*args)


_singles: dict[Any, Any] = {}


def _single(target: Any, are_tensors: tuple[bool, ...]) -> Any:
    # The op alone as a fused function, where the table knows it.
    from fuser.fx.nodes import bind_node, is_fusible

    name = getattr(target, "__name__", "")
    if (target, are_tensors) not in _singles:
        graph = torch.fx.Graph()
        places = [graph.placeholder(f"a{place}") for place in range(len(are_tensors))]
        method = name if isinstance(target, type(torch.Tensor.add)) and hasattr(torch.Tensor, name) else None
        node = graph.call_method(method, tuple(places)) if method else graph.call_function(target, tuple(places))
        graph.output(node)
        fusible = is_fusible(node, bind_node(node))
        module = torch.fx.GraphModule(torch.nn.Module(), graph)
        _singles[target, are_tensors] = fuser.fx.fuse_graph(module) if fusible else None
    return _singles[target, are_tensors]


@pytest.mark.parametrize(
    ("name", "dtype"), one_of_each(list(itertools.product(["contraction", "branching", "deep"], DTYPES)))
)
def test_chain_equals_functor_by_functor(name: str, dtype: torch.dtype) -> None:
    inputs = [draw((5, 2003), dtype, seed=seed) for seed in range(3)]
    before = fuser.stats()["launches"]
    got = FUSED[name](*inputs)
    assert fuser.stats()["launches"] == before + 1
    wanted = CHAINS[name](*inputs)
    assert fuser.stats()["launches"] > before + 3, "the functors ran one by one"
    assert_same(got, wanted, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_precise_chain_equals_functor_by_functor(dtype: torch.dtype) -> None:
    inputs = [draw((5, 203), dtype, seed=seed) for seed in range(3)]
    usual = FUSED["branching"](*inputs)
    with fuser.config.patch(cpu_math="precise"):
        got, wanted = FUSED["branching"](*inputs), CHAINS["branching"](*inputs)
        part = FUSED["branching"](*(item[1:3, 5:190].t() for item in inputs))
    assert_same(got, wanted)
    assert not all(same_bits(mine, theirs) for mine, theirs in zip(got, usual, strict=True)), "other functions ran"
    for mine, theirs in zip(part, got, strict=True):
        assert same_bits(mine, theirs[1:3, 5:190].t())


@pytest.mark.parametrize("dtype", MOSTLY, ids=str)
def test_chain_with_torch_ops_equals_one_by_one(dtype: torch.dtype) -> None:
    inputs = [draw((5, 2003), dtype, seed=seed) for seed in range(3)]
    got = FUSED["with_operators"](*inputs)
    before = fuser.stats()["launches"]
    wanted = one_by_one(with_operators, *inputs)
    assert fuser.stats()["launches"] >= before + 8, "the ops ran one by one"
    assert_same(got, wanted)


@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.int64, *(pytest.param(item, marks=SLOW) for item in (torch.int8, torch.int32))],
    ids=str,
)
def test_integer_chain_equals_functor_by_functor(dtype: torch.dtype) -> None:
    inputs = [draw((5, 203), dtype, (-60, 60), seed) for seed in range(3)]
    assert_same(FUSED["integers"](*inputs), integers(*inputs))


@pytest.mark.parametrize("dtype", MOSTLY, ids=str)
def test_special_values(dtype: torch.dtype) -> None:
    special = special_tensor(dtype)
    x, y, z = (item.reshape(-1).contiguous() for item in torch.meshgrid(special, special, special, indexing="ij"))
    for name in ("contraction", "branching"):
        assert_same(FUSED[name](x, y, z), CHAINS[name](x, y, z), name)


def test_intermediates_are_rounded() -> None:
    # In bfloat16 1 + 2^-8 is 1: the chain must lose it, the fast mode may keep it.
    axpy = functor("axpy")
    x, y = torch.ones(64, dtype=torch.bfloat16), torch.full((64,), 2.0**-9, dtype=torch.bfloat16)
    chain = fuser.fuse(lambda x, y: axpy(axpy(x, y, alpha=1.0), x, alpha=-1.0))
    assert chain(x, y).tolist() == [0.0] * 64 == axpy(axpy(x, y, alpha=1.0), x, alpha=-1.0).tolist()
    with fuser.config.patch(numerics="fast"):
        assert chain(x, y).tolist() == [-(2.0**-9)] * 64


# Functors of x, y and z, by name.
PARTS = {"product": ("x", "y", "x * y"), "sum": ("product", "z", "x + y"), "both": ("x", "y", "z", "x * y + z")}


def cuda_text(*names: str) -> str:
    """Return the CUDA kernel that computes these of the parts, each a functor."""
    builder = fuser.GroupBuilder()
    handles = {name: builder.add_input(name) for name in "xyz"}
    for name, (*arguments, value) in PARTS.items():
        parameters = ", ".join(f"T {letter}" for letter in "xyz"[: len(arguments)])
        function = fuser.jit_fn(f"template <typename T> T {name}({parameters}) {{ return {value}; }}").function
        (handles[name],) = builder.apply(function, [handles[argument] for argument in arguments])
    group = builder.build([handles[name] for name in names])
    return fuser.debug_get_fused_kernel_code(group, [torch.ones(64)] * 3, device="cuda")


def multiply_adds(text: str) -> int:
    """Return how many there are after NVVM, which contracts operations."""
    from cuda.bindings import nvrtc

    _, program = nvrtc.nvrtcCreateProgram(text.encode(), b"kernel.cu", 0, [], [])
    options = [b"-arch=compute_90", b"-std=c++17", b"-default-device"]
    assert nvrtc.nvrtcCompileProgram(program, len(options), options) == (nvrtc.nvrtcResult.NVRTC_SUCCESS,)
    ptx = b" " * nvrtc.nvrtcGetPTXSize(program)[1]
    nvrtc.nvrtcGetPTX(program, ptx)
    return ptx.count(b"fma.rn.f32")


def test_every_value_between_functors_is_behind_a_barrier() -> None:
    def barriers() -> list[str]:
        return sorted(re.findall(r"fuser_isolate<(\d+)>", cuda_text("sum").partition("fuser_element(")[2]))

    # Two arguments and the result of each functor.
    assert barriers() == [str(number) for number in range(6)]
    with fuser.config.patch(numerics="fast"):
        assert barriers() == []


@pytest.mark.nvrtc
def test_no_multiply_add_crosses_a_barrier() -> None:
    assert multiply_adds(cuda_text("sum")) == 0
    with fuser.config.patch(numerics="fast"):
        assert multiply_adds(cuda_text("sum")) > 0


@pytest.mark.nvrtc
def test_a_functor_keeps_its_multiply_add_beside_another_that_multiplies() -> None:
    # Without a barrier at each use, the compiler computes the product once, and adds to it.
    assert multiply_adds(cuda_text("product", "both")) == multiply_adds(cuda_text("both")) > 0


def test_mixed_dtypes_and_broadcasts() -> None:
    x, y = draw((64, 1), torch.bfloat16, seed=1), draw((1, 130), torch.float32, seed=2)
    z = draw((130, 64), torch.float16, seed=3).t()
    for name in ("contraction", "branching", "deep"):
        assert_same(FUSED[name](x, y, z), CHAINS[name](x, y, z), name)


LENGTH = 40000


@pytest.mark.parametrize(("name", "dtype"), CHAINS_OF_DTYPES)
def test_value_does_not_depend_on_where_it_is(name: str, dtype: torch.dtype) -> None:
    fused = FUSED[name]
    inputs = [draw((LENGTH,), dtype, seed=seed) for seed in range(3)]
    whole = as_tuple(fused(*inputs))
    for start, stop in ((0, 1), (0, 7), (1, 18), (3, 3 + 16384), (5, LENGTH), (LENGTH - 33, LENGTH)):
        part = as_tuple(fused(*(item[start:stop] for item in inputs)))
        for mine, theirs in zip(part, whole, strict=True):
            assert same_bits(mine, theirs[start:stop]), f"{name} {start}:{stop}"


@pytest.mark.parametrize(("name", "dtype"), CHAINS_OF_DTYPES)
def test_value_does_not_depend_on_layout(name: str, dtype: torch.dtype) -> None:
    fused = FUSED[name]
    inputs = [draw((200, 97), dtype, seed=seed) for seed in range(3)]
    whole = as_tuple(fused(*inputs))
    layouts: list[list[torch.Tensor]] = [
        [item.t().contiguous().t() for item in inputs],
        [inputs[0].t().contiguous().t(), *inputs[1:]],
        [torch.stack([item, item], -1)[..., 0] for item in inputs],
        [item.flip(0).flip(0) for item in inputs],
    ]
    for variant in layouts:
        for mine, theirs in zip(as_tuple(fused(*variant)), whole, strict=True):
            assert same_bits(mine, theirs)
    # One value for all of a broadcast dimension.
    column = [item[:, :1] for item in inputs]
    for mine, theirs in zip(as_tuple(fused(column[0], inputs[1], column[2])), as_tuple(
        fused(column[0].expand(200, 97).contiguous(), inputs[1], column[2].expand(200, 97).contiguous())
    ), strict=True):  # fmt: skip
        assert same_bits(mine, theirs)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_value_does_not_depend_on_the_thread_count(dtype: torch.dtype, threads: Callable[[int], None]) -> None:
    for name in ("contraction", "branching"):
        for shape in ((LENGTH + 1,), (211, 199)):
            inputs = [draw(shape, dtype, seed=seed) for seed in range(3)]
            if len(shape) == 2:
                inputs[1] = inputs[1].t().contiguous().t()
            threads(1)
            single = FUSED[name](*inputs)
            threads(2)
            assert_same(FUSED[name](*inputs), single, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_complex_product_is_not_contracted(dtype: torch.dtype) -> None:
    # g++ 12 does so unasked where the two parts are a difference beside a sum.
    product = fuser.create_jit_fn("template <typename T> T product(T x, T y) { return x * y; }")
    for length in (1, 3, 1001):
        a, b, c, d = (draw((length,), dtype, (-3.0, 3.0), seed=seed) for seed in range(4))
        wanted = torch.complex(a * c - b * d, a * d + b * c)
        x, y = torch.complex(a, b), torch.complex(c, d)
        assert_same(product(x, y), wanted)
        assert_same(product(x.repeat_interleave(2)[::2], y), wanted)


def test_a_zero_that_was_an_integer_has_no_sign() -> None:
    from fuser.ops import cast_function

    builder = fuser.GroupBuilder()
    (whole,) = builder.apply(cast_function(torch.int32), [builder.add_input("x")])
    group = builder.build(builder.apply(cast_function(torch.float32), [whole]))
    (got,) = fuser.run_fusion(fuser.register_fusion(group), [torch.full((40,), -0.3)])
    assert not got.signbit().any()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32], ids=str)
def test_which_of_two_zeros_is_larger(dtype: torch.dtype) -> None:
    """ATen's CUDA kernels take the positive one, its kernels of lists the second one; all of them keep NaN."""
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, *[float("nan")] * dtype.is_floating_point]).to(dtype).cuda()
    x, y = (item.flatten() for item in torch.meshgrid(values, values, indexing="ij"))
    calls: dict[str, Callable[[Any, Any], Any]] = {
        name: lambda x, y, name=name: getattr(torch, name)(x, y)
        for name in ("maximum", "minimum", "clamp_min", "clamp_max")
    }
    for zero in (0.0, -0.0):
        calls |= {
            f"clamp({zero}, 1)": lambda x, y, zero=zero: x.clamp(zero, 1.0),
            f"clamp(-1, {zero})": lambda x, y, zero=zero: x.clamp(-1.0, zero),
            f"clamp(min={zero})": lambda x, y, zero=zero: x.clamp(min=zero),
            f"clamp(max={zero})": lambda x, y, zero=zero: x.clamp(max=zero),
            f"hardtanh(-1, {zero})": lambda x, y, zero=zero: torch.nn.functional.hardtanh(x, -1.0, zero),
        }
    calls |= {"clamp": lambda x, y: x.clamp(y, y), "relu": lambda x, y: torch.relu(x)}
    found = fuser.fuse(lambda x, y: tuple(call(x, y) for call in calls.values()))(x, y)
    for (name, call), got in zip(calls.items(), found, strict=True):
        assert same_bits(got, call(x, y)), name
