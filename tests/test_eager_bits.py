"""Ops of torch's that call no math function have eager torch's bits on the CPU: rounded numbers, zeros, multiply-adds.

ATen's vectors and what is left over after them differ in some ops: the tensors here have whole vectors only.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from functors import draw, poison, same_bits, special_tensor, unpoison

import fuser
from fuser.ops import OPS
from fuser.ops.table import op_call

pytestmark = pytest.mark.cpu

NARROW = (torch.bfloat16, torch.float16)
# Numbers that the narrow dtypes do not have, and those at which something ends.
NUMBERS = (0.1, 1 / 3, -0.0, 2.0**12 + 1, 1e-3)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    poison()
    yield
    unpoison()


def values(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Every number of 16 bits beside others; of wider dtypes all pairs of special ones, and random ones."""
    if dtype.itemsize == 2:
        x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        return x, x[torch.randperm(len(x), generator=torch.Generator().manual_seed(1))]
    x, y = torch.meshgrid(special_tensor(dtype), special_tensor(dtype), indexing="ij")
    more = (draw((4096,), dtype, (-9.0, 9.0), seed=seed) for seed in (1, 2))
    x, y = (torch.cat([item.flatten(), other]) for item, other in zip((x, y), more, strict=True))
    return x[: len(x) // 64 * 64], y[: len(x) // 64 * 64]


def by_number(number: float) -> dict[str, Callable[[Any], Any]]:
    """Calls of one tensor and a number."""
    size = abs(number)
    return {
        "x + n": lambda x: x + number,
        "n - x": lambda x: number - x,
        "x * n": lambda x: x * number,
        "x / n": lambda x: x / number,
        "n / x": lambda x: number / x,
        "n < x": lambda x: number < x,
        "rsub": lambda x: torch.rsub(x, number, alpha=1.5),
        "threshold": lambda x: F.threshold(x, number, 20.1),
        "hardtanh": lambda x: F.hardtanh(x, -size, number if number > 0 else 0.0),
        "clamp": lambda x: x.clamp(number, 3.3),
        "clamp_max": lambda x: x.clamp(max=number),
        "leaky_relu": lambda x: F.leaky_relu(x, number),
        "hardshrink": lambda x: F.hardshrink(x, size),
        "softshrink": lambda x: F.softshrink(x, size),
        "where": lambda x: torch.where(x > number, x, number),
    }


UNARY: dict[str, Callable[[Any], Any]] = {
    name: getattr(F, name) for name in ("relu", "relu6", "hardsigmoid", "hardswish", "softsign")
} | {name: getattr(torch, name) for name in ("deg2rad", "rad2deg", "frac", "round", "sign", "neg", "abs")}
POWERS: dict[str, Callable[[Any], Any]] = {f"x ** {n}": lambda x, n=n: x**n for n in (2, 3, -1, -2, 0.5, 3.001, -2.001)}
# Gradients from what an op returned, as calls in place keep it.
RESULTS: dict[str, Callable[[Any, Any], Any]] = {
    "leaky_relu_backward of a result": lambda x, y: torch.ops.aten.leaky_relu_backward.default(x, y, 0.1, True),
    "elu_backward of a result": lambda x, y: torch.ops.aten.elu_backward.default(x, 0.3, 1.0, 1 / 0.3, True, y),
}
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: torch.add(x, y, alpha=0.1),
    "sub": lambda x, y: torch.sub(x, y, alpha=1 / 3),
    "addcmul": lambda x, y: torch.addcmul(x, y, x, value=0.1),
    "addcdiv": lambda x, y: torch.addcdiv(x, y, x, value=0.1),
    "lerp": lambda x, y: torch.lerp(x, y, 0.1),
    "lerp beyond a half": lambda x, y: torch.lerp(x, y, 2 / 3),
    "lerp by x": lambda x, y: torch.lerp(x, y, x),
    "maximum": torch.maximum,
    "minimum": lambda x, y: torch.minimum(x, y),
    "clamp": lambda x, y: torch.clamp(x, y, y),
    "copysign": lambda x, y: torch.copysign(x, y),
    "div_trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "sigmoid_backward": lambda x, y: torch.ops.aten.sigmoid_backward.default(x, y),
    "tanh_backward": lambda x, y: torch.ops.aten.tanh_backward.default(x, y),
    "logit_backward": lambda x, y: torch.ops.aten.logit_backward.default(x, y),
    "threshold_backward": lambda x, y: torch.ops.aten.threshold_backward.default(x, y, 0.1),
    "hardtanh_backward": lambda x, y: torch.ops.aten.hardtanh_backward.default(x, y, -0.1, 1 / 3),
    "hardswish_backward": lambda x, y: torch.ops.aten.hardswish_backward.default(x, y),
    "hardsigmoid_backward": lambda x, y: torch.ops.aten.hardsigmoid_backward.default(x, y),
    "leaky_relu_backward": lambda x, y: torch.ops.aten.leaky_relu_backward.default(x, y, 0.1, False),
    **RESULTS,
}


@pytest.mark.parametrize("name", RESULTS)
def test_gradients_from_results_are_in_groups(name: str) -> None:
    fused = fuser.fuse(lambda x, y: RESULTS[name](x, y) * 2)
    fused(*torch.randn(2, 9))
    assert [node.op for node in fused.graph_module.graph.nodes if node.op.startswith("call")] == ["call_module"]


def test_results_of_negative_slopes_are_torchs_to_refuse() -> None:
    aten = torch.ops.aten
    for refused in (
        lambda x, y: aten.leaky_relu_backward.default(x, y, -0.1, True),
        lambda x, y: aten.elu_backward.default(x, -0.1, 1, 1, True, y),
    ):
        with pytest.raises(RuntimeError, match="negative slope"):
            fuser.fuse(refused)(*torch.randn(2, 9))


def check(calls: dict[str, Callable[..., Any]], *tensors: torch.Tensor) -> None:
    """Compare what one fused function gives with each call."""
    together = fuser.fuse(lambda *given: tuple(call(*given) for call in calls.values()))
    before = fuser.stats()
    found = together(*tensors)
    after = fuser.stats()
    assert after["fallbacks"] == before["fallbacks"]
    assert after["launches"] > before["launches"]
    for (name, call), got in zip(calls.items(), found, strict=True):
        wanted = call(*tensors)
        assert got.dtype == wanted.dtype, name
        if not same_bits(got, wanted):
            wrong = (got != wanted) | (got.signbit() != wanted.signbit())
            place = int((wrong & ~(got.isnan() & wanted.isnan())).nonzero()[0])
            given = [item.flatten()[min(place, item.numel() - 1)].item() for item in (*tensors, got, wanted)]
            raise AssertionError(f"{name} of {tensors[0].dtype}: inputs, got, eager {given}")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("dtype", [*NARROW, torch.float32, torch.float64], ids=str)
def test_numbers(dtype: torch.dtype, number: float) -> None:
    """A number is rounded to the dtype, or not, as torch's kernel has it; a zero keeps its sign."""
    check(by_number(number), values(dtype)[0])


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_numbers_in_remainders_and_powers(dtype: torch.dtype) -> None:
    """Here, too; where a quotient is too large torch's vectors have NaN."""
    x = draw((4096,), dtype, (-3.0, 3.0))
    calls = {"fmod": lambda x: torch.fmod(x, 0.1), "%": lambda x: x % 0.1}
    # In half a last bit of torch's power shows.
    check(calls | ({"n ** x": lambda x: 4.1**x} if dtype is torch.bfloat16 else {}), x)


@pytest.mark.parametrize("dtype", [*NARROW, torch.float32], ids=str)
def test_tensors_without_dimensions(dtype: torch.dtype) -> None:
    """Products and quotients take a second operand as it is, everything else converts both."""
    x, z = values(dtype)[0], torch.tensor(0.1, dtype=torch.float64)
    ops = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "<": operator.lt}
    calls = {f"x {name} z": lambda x, z, op=op: op(x, z) for name, op in ops.items()}
    calls |= {f"z {name} x": lambda x, z, op=op: op(z, x) for name, op in ops.items()}
    check(calls | {"z made": lambda x, z: x * (z + z), "maximum": torch.maximum}, x, z)


@pytest.mark.parametrize("dtype", [*NARROW, torch.float32, torch.float64], ids=str)
def test_steps_and_multiply_adds(dtype: torch.dtype) -> None:
    x, y = values(dtype)
    check(BINARY, x, y)
    # Of wider dtypes roots are MKL's, which are not always the nearest, and powers Sleef's.
    check(UNARY | {name: call for name, call in POWERS.items() if dtype in NARROW or "." not in name}, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_is_negated_after_a_multiply_add_keeps_the_sign_of_its_zeros(dtype: torch.dtype) -> None:
    """The compiler takes the two for another multiply-add, which has not those of torch's."""
    x = values(dtype)[0]
    calls = {"sub": lambda x: -(x - x), "addcmul": lambda x: torch.addcmul(x * x, x, x, value=-1).neg()}
    check(calls | {"lerp": lambda x: -torch.lerp(x, x * 0, 1.0)}, x)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int64], ids=str)
def test_multiply_adds_of_integers(dtype: torch.dtype) -> None:
    """C++ computes with short ones in int."""
    x, y = (torch.arange(128, dtype=torch.int64).mul(by).to(dtype) for by in (7, 13))
    calls = {"addcmul": lambda x, y: torch.addcmul(x, y, x, value=3), "add": lambda x, y: torch.add(x, y, alpha=3)}
    check(calls | {"sub": lambda x, y: torch.sub(x, y, alpha=3)}, x, y)


def test_what_a_bound_that_is_no_number_makes_of_all() -> None:
    x = torch.tensor([-1.0, 0.5, 2.0])
    for low, high in ((float("nan"), 1.0), (0.0, float("nan"))):
        assert fuser.fuse(lambda x, low=low, high=high: F.hardtanh(x, low, high) + 1)(x).isnan().all()


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_gradients(dtype: torch.dtype) -> None:
    """As torch.compile(backend="aot_eager"): also of logsigmoid, whose forward pass keeps what is rounded."""

    def step(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        calls = (F.logsigmoid, F.hardswish, lambda x: F.threshold(x, 0.1, 0.0), lambda x: x**3, F.softsign)
        return tuple(call(x * 0.1 + 0.1) for call, x in zip(calls, given, strict=True))

    x, g = (draw((4096,), dtype, (-30.0, 30.0), seed=seed) for seed in (1, 2))
    results = []
    for backend in ("aot_eager", "fuser"):
        torch._dynamo.reset()
        given = [x.clone().requires_grad_() for _ in range(5)]
        made = torch.compile(step, backend=backend)(*given)
        results.append([*made, *torch.autograd.grad(made, given, [g] * 5)])
    for wanted, got in zip(*results, strict=True):
        assert same_bits(got.detach(), wanted.detach())


@pytest.mark.parametrize(
    ("op", "cuda", "cpu"), [("add", False, True), ("mul", False, False), ("fmod", True, True), ("pow", True, True)]
)
def test_which_numbers_kernels_round(op: str, cuda: bool, cpu: bool) -> None:
    """ATen's CUDA kernels take numbers as they are, but for some; its CPU kernels convert operands, but of products."""
    builder = fuser.GroupBuilder()
    x, n = builder.add_input("x"), builder.add_input("n")
    scalars = [builder.add_input("alpha", is_scalar=True)] if op == "add" else []
    operands = [n, x] if op == "pow" else [x, n]
    group = builder.build(builder.apply(OPS[op].function, operands, scalars))
    given = [torch.ones(64, dtype=torch.bfloat16), 0.1, *[1.0] * len(scalars)]
    for device, wanted in (("cuda", cuda), ("cpu", cpu)):
        text = fuser.debug_get_fused_kernel_code(group, given, device=device)
        assert ("fuser_round<fuser_bfloat16>(fuser_cast<float>(v1))" in text) is wanted, device


def test_the_bound_of_a_gradient_is_a_number_of_the_dtype_on_cuda() -> None:
    for name in ("threshold", "threshold_backward"):
        source = op_call(name).function.functor.source
        on_cuda = source.partition("#ifdef __CUDACC__")[2] or source.partition("#else")[2]
        assert "fuser_round<S>(threshold)" in on_cuda
        on_cpu = source.partition("#ifdef FUSER_CPU")[2].partition("#else")[0] or source.partition("#endif")[2]
        assert "x <= threshold" in on_cpu


LAYOUTS = [
    ((2, 1, 6), (1, 2, 2)), ((2, 1, 6), (6, 12, 1)), ((4, 1), (1, 7)), ((1, 4), (9, 1)), ((1, 1), (3, 5)),
    ((3, 4), (1, 3)), ((3, 4), (8, 1)), ((3, 4), (0, 1)), ((2, 1, 4), (1, 9, 2)), ((1, 3, 1, 5), (2, 5, 7, 1)),
    ((0, 1), (1, 0)), ((0, 3), (1, 5)), ((3, 0, 2), (2, 1, 7)), ((3, 1), (0, 0)),
]  # fmt: skip


@pytest.mark.parametrize("name", ["deg2rad", "rad2deg", "nan_to_num", "isinf", "isfinite", "hardtanh", "_prelu_kernel"])
def test_layouts_of_ops_that_torch_makes_of_others(name: str) -> None:
    """Strides of dimensions that nobody walks, too: some results are like the operand, some are made in steps."""
    packet = getattr(torch.ops.aten, name)
    for shape, strides in LAYOUTS:
        x = torch.linspace(-3, 3, 100).as_strided(shape, strides)
        given = (x, x) if name == "_prelu_kernel" else (x,)
        got, wanted = fuser.fuse(lambda *given: packet.default(*given))(*given), packet.default(*given)
        assert got.stride() == wanted.stride(), f"{shape}, {strides}: {got.stride()} instead of {wanted.stride()}"
        assert torch.equal(got, wanted)


def test_torch_scales_by_powers_of_two_itself() -> None:
    """No float has to hold the power, and the result has the dtype of what is scaled."""
    x, n = torch.tensor([1e-40, 0.1, 1.5]), torch.tensor([140, 128, -3])
    scale = fuser.fuse(lambda x, n: torch.ldexp(x, n) + 1)
    for given in (x, x.bfloat16()):
        got, wanted = scale(given, n), torch.ldexp(given, n) + 1
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)
