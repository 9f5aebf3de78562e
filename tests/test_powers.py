"""Powers, and ops that round their steps, are computed as ATen computes them: formulas by exponent, bits by dtype."""

from __future__ import annotations

import ctypes
import ctypes.util
import math
import platform
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accuracy import distance
from functors import draw, poison, same_bits, special_tensor, unpoison
from vectorised import find_loops

import fuser
from fuser.autodiff.derivative import reverse_functor
from fuser.config import config
from fuser.cpu.backend import CpuBackend, find_compiler
from fuser.cpu.fused_kernel import CpuKernel
from fuser.cxx.functor import parse_functor
from fuser.function import Function
from fuser.kernel_source import KernelSource
from fuser.ops import OPS
from fuser.ops.elementary import power_function

pytestmark = pytest.mark.cpu

NARROW = (torch.bfloat16, torch.float16)
WIDE = (torch.float32, torch.float64)
# ATen has a formula for each.
FORMULAS: dict[float, Callable[[torch.Tensor], torch.Tensor]] = {
    0: torch.ones_like,
    1: torch.clone,
    2: lambda x: x * x,
    3: lambda x: x * x * x,
    -1: lambda x: 1 / x,
    -2: lambda x: 1 / (x * x),
    0.5: lambda x: root(x),
    -0.5: lambda x: 1 / root(x),
}


def root(x: torch.Tensor) -> torch.Tensor:
    """The nearest number to the root: torch's CPU kernel has another one at times."""
    roots = [math.sqrt(item) if item >= 0 else math.nan for item in x.tolist()]
    return torch.tensor(roots, dtype=torch.float64).to(x.dtype)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    poison()
    yield
    unpoison()


def values(dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    """Numbers of both signs and of every size, and special ones."""
    near = draw((5003,), dtype, (-4.0, 4.0), seed=seed)
    sizes = draw((5003,), torch.float64, (-0.9, 0.9), seed=seed + 1) * math.log2(torch.finfo(dtype).max)
    return torch.cat([near, (torch.exp2(sizes) * near.double().sign()).to(dtype), special_tensor(dtype)])


def pairs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    special = special_tensor(dtype)
    x, y = torch.meshgrid(special, special, indexing="ij")
    return torch.cat([values(dtype, 3), x.flatten()]), torch.cat([values(dtype, 5).flip(0), y.flatten()])


def apply(function: Function, *operands: Any) -> torch.Tensor:
    builder = fuser.GroupBuilder()
    places = [builder.add_input(f"x{place}") for place in range(len(operands))]
    key = fuser.register_fusion(builder.build(builder.apply(function, places)))
    before = fuser.stats()
    (result,) = fuser.run_fusion(key, operands)
    after = fuser.stats()
    assert after["launches"] == before["launches"] + 1
    assert after["fallbacks"] == before["fallbacks"]
    return result


def traced(exponent: Any) -> Any:
    return fuser.fuse(lambda x: x**exponent)


@pytest.mark.parametrize("exponent", FORMULAS)
def test_exponents_of_a_program_have_functors_of_their_own(exponent: float) -> None:
    function = fuser.fuse(lambda x: -(x**exponent))
    x = values(torch.float32)
    function(x)
    application, _ = (item for group in function.groups for item in group.applications)
    assert application.function.op == "pow_number"
    assert "pow(" not in application.function.functor.source
    assert torch.equal(traced(float(exponent))(x).isnan(), function(x).isnan())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_first_power_alone_is_torchs_copy(dtype: torch.dtype) -> None:
    x = values(dtype)
    # A NaN that only a copy keeps.
    x.view(torch.int16)[:4] = 0x7FA1
    fuser.reset_stats()
    function = traced(1)
    result = function(x)
    assert torch.equal(result.view(torch.int16), x.view(torch.int16))
    assert result.data_ptr() != x.data_ptr()
    assert not function.groups
    assert fuser.stats()["launches"] == 0
    assert fuser.stats()["fallbacks"] == {}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("cpu_math", ["fast", "precise"])
@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_formulas(dtype: torch.dtype, cpu_math: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A formula has the same bits whether the program's text has the exponent or a call brings it."""
    monkeypatch.setattr(fuser.config, "cpu_math", cpu_math)
    x = values(dtype)
    variable = fuser.fuse(lambda x, n: x**n)
    for exponent, formula in FORMULAS.items():
        wanted = formula(x)
        assert same_bits(traced(exponent)(x), wanted), exponent
        assert same_bits(variable(x, exponent), wanted), exponent
        if exponent == int(exponent):
            assert same_bits(wanted, x**exponent), exponent


def test_formulas_in_every_loop() -> None:
    """Tiles, lists, several powers by one exponent, and a number that is more than an exponent."""
    x = values(torch.float32)[:10000].view(100, 100).t()
    square, add = fuser.fuse(lambda x, n: (x**n).t() * 1.5 + x**n), fuser.fuse(lambda x, n: x**n + n)
    raised = fuser.JitFunction(OPS["pow_number"].function, {})
    for exponent, formula in FORMULAS.items():
        wanted = formula(x.flatten()).view(x.shape)
        assert same_bits(square(x, exponent), wanted.t() * 1.5 + wanted), exponent
        assert same_bits(add(x, exponent), wanted + exponent), exponent
        for result in fuser.foreach(raised, [x.contiguous(), x.contiguous()[:50]], exponent):
            assert same_bits(result, wanted[: len(result)]), exponent


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_formulas_in_narrow_dtypes(dtype: torch.dtype) -> None:
    """As torch's: in bfloat16 each product is rounded, and roots of half are powers, of -0 and minus infinity too."""
    # ATen takes one root and one inverse of whole vectors, and rounds between the two elsewhere.
    x = values(dtype)
    x = x[: len(x) // 64 * 64]
    variable = fuser.fuse(lambda x, n: x**n)
    for exponent in FORMULAS:
        wanted = x**exponent
        assert same_bits(traced(exponent)(x), wanted), exponent
        assert same_bits(variable(x, exponent), wanted), exponent


@pytest.mark.parametrize("dtype", [*WIDE, *NARROW], ids=str)
@pytest.mark.parametrize("exponent", [4, -3, 2.5, -1.7, 2.001])
def test_other_exponents(exponent: float, dtype: torch.dtype) -> None:
    """Negative numbers, too; where the dtype is narrow the exponent is rounded to it first, as ATen does."""
    x = values(dtype)
    exact = x.double() ** torch.tensor(exponent, dtype=dtype).double()
    for got in (traced(exponent)(x), fuser.fuse(lambda x, n: x**n)(x, exponent)):
        assert int(distance(got, exact.to(dtype)).max()) <= (4 if dtype in WIDE else 1)
        assert torch.equal(got.signbit() | got.isnan(), exact.to(dtype).signbit() | exact.isnan())


@pytest.mark.one_in(2)
@pytest.mark.skipif(platform.machine() != "x86_64" or find_compiler(config.cxx).is_clang, reason="gcc's vectors")
@pytest.mark.parametrize("exponent", [4, 2.5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, *WIDE], ids=str)
def test_loops_with_one_exponent_are_vectorised(
    dtype: torch.dtype, exponent: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Forward and backward, with the exponent in the text and as an argument: else they take ten times as long."""
    sources = []
    build = CpuBackend.compile

    def compile_kernel(self: CpuBackend, source: KernelSource, target: str) -> CpuKernel:
        sources.append(source)
        return build(self, source, target)

    monkeypatch.setattr(CpuBackend, "compile", compile_kernel)
    x = draw((40,), dtype, (0.5, 2.0)).requires_grad_()
    # Factors that make kernels of their own.
    for function in (
        fuser.fuse(lambda x: x**exponent * 1.75),
        lambda x: fuser.fuse(lambda x, n: x**n * 1.25)(x, exponent),
    ):
        torch.autograd.grad(function(x).sum(), x)
    # One for each pass: the two functions differ in numbers alone.
    assert len(sources) >= 2
    for source in sources:
        done, missed = find_loops(source, tmp_path)
        # Of a loop that became several, each.
        assert done, source.text
        assert not done & missed, source.text


@pytest.mark.parametrize("exponent", [0, 1, 2, 2.0, 0.5, 3, True])
def test_the_exponent_has_a_say_in_the_dtype(exponent: float) -> None:
    for dtype in (torch.int32, torch.float16, torch.bool):
        x = torch.tensor([0, 1, 1, 0]).to(dtype)
        got, wanted = traced(exponent)(x), x**exponent
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)


# --- steps that ATen's CUDA kernels round ---------------------------------------------------------------------------
def as_on_cuda(function: Function) -> Function:
    """What the GPU's compiler sees, for the CPU."""
    source = function.functor.source.replace("#ifdef __CUDACC__", "#if 1")
    source = re.sub(r"fuser_\w+_step<", "fuser_round<", source)
    assert source != function.functor.source
    return replace(function, functor=parse_functor(source))


@pytest.mark.parametrize("dtype", [*NARROW, *WIDE], ids=str)
def test_steps_of_backward_ops(dtype: torch.dtype) -> None:
    """Each operation of ATen's formula is one of eager torch's here, and so rounded to the dtype."""
    g, y = pairs(dtype)
    assert same_bits(apply(as_on_cuda(OPS["tanh_backward"].function), g, y), g * (1 - y * y))
    assert same_bits(apply(as_on_cuda(OPS["sigmoid_backward"].function), g, y), g * (1 - y) * y)


@pytest.mark.parametrize("dtype", [*NARROW, *WIDE], ids=str)
def test_steps_of_powers(dtype: torch.dtype) -> None:
    x = values(dtype)
    for exponent in (3, -2):
        wanted = FORMULAS[exponent](x)
        for function in (power_function(exponent), OPS["pow_number"].function):
            assert same_bits(apply(as_on_cuda(function), x, exponent), wanted), exponent
    for exponent in (0, 1, 2, -1, 0.5, -0.5):
        wanted = FORMULAS[exponent](x.float() if dtype in NARROW else x).to(dtype)
        assert same_bits(apply(as_on_cuda(OPS["pow_number"].function), x, exponent), wanted), exponent
    # ATen rounds the exponent before it looks for these formulas.
    if dtype is torch.bfloat16:
        for exponent in (2.001, 2.999, -2.001):
            wanted = FORMULAS[round(exponent)](x)
            assert same_bits(apply(as_on_cuda(power_function(exponent)), x, exponent), wanted), exponent


@pytest.mark.parametrize("name", ["tanh_backward", "sigmoid_backward"])
def test_strict_kernels_round_steps_and_fast_ones_do_not(name: str) -> None:
    builder = fuser.GroupBuilder()
    group = builder.build(builder.apply(OPS[name].function, [builder.add_input("g"), builder.add_input("y")]))
    for dtype, storage in ((torch.bfloat16, "fuser_bfloat16"), (torch.float16, "fuser_half"), (torch.float32, "float")):
        x = torch.ones(8, dtype=dtype)
        text = fuser.debug_get_fused_kernel_code(group, [x, x], device="cuda")
        assert f"aten_{name}<float, {storage}>(" in text
        with fuser.config.patch(numerics="fast"):
            assert f"aten_{name}<float>(" in fuser.debug_get_fused_kernel_code(group, [x, x], device="cuda")


# --- the power of a functor -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("cpu_math", ["fast", "precise"])
@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_power_of_negative_numbers(dtype: torch.dtype, cpu_math: str) -> None:
    """The C library's function decides: signs, whole exponents, infinities."""
    library = ctypes.CDLL(ctypes.util.find_library("m"))
    power = library.pow
    power.restype, power.argtypes = ctypes.c_double, [ctypes.c_double, ctypes.c_double]
    large = [2.0**k + shift for k in (22, 23, 24, 31, 32, 52, 53, 62, 63) for shift in (-1, -0.5, 0, 0.5, 1)]
    exponents = torch.tensor([*range(-6, 7), 1.5, -2.5, 7.25, math.inf, -math.inf, math.nan, *large], dtype=dtype)
    exponents = torch.cat([exponents, -exponents])
    sizes = torch.tensor(
        [0.0, 1.0, 0.75, 3.0, 1e-30, 1e30, math.inf, math.nan, 1 + torch.finfo(dtype).eps], dtype=dtype
    )
    x, y = torch.meshgrid(torch.cat([sizes, -sizes]), exponents, indexing="ij")
    x, y = x.flatten(), y.flatten()
    exact = torch.tensor([power(a, b) for a, b in zip(x.tolist(), y.tolist(), strict=True)], dtype=torch.float64)
    with fuser.config.patch(cpu_math=cpu_math):
        got = fuser.create_jit_fn("template <typename T> T power(T x, T y) { return pow(x, y); }")(x, y)
    assert int(distance(got, exact.to(dtype)).max()) <= 4
    assert torch.equal(got.signbit() | got.isnan(), exact.to(dtype).signbit() | exact.isnan())


# --- gradients ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("exponent", [2, 3, 4])
def test_the_derivative_of_a_small_power_multiplies(exponent: int) -> None:
    power = power_function(exponent).functor
    types = torch.float32, torch.float64
    derived = reverse_functor(power, torch.float32, types, wanted=(0,), outputs=(0,), op="pow_number")
    assert derived.functor is not None
    assert "pow(" not in derived.functor.source.partition("{")[2]


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 0.5, -0.5, -1, -2, 4, 2.5, 2.001])
def test_gradients(exponent: float) -> None:
    """First and second derivatives are torch's, also at zeros and where the square of a number is no number."""
    x = torch.tensor([0.3, 0.7, 1.0, 2.5, 40.0, 1e-90, 1e90, 0.0, math.inf], dtype=torch.float64)
    x = torch.cat([x, -x[:7]]) if exponent == int(exponent) else x
    # Of the second derivative torch multiplies infinities by zeros.
    usual = x.isfinite() & (x != 0) & (x.abs() > 1e-80) & (x.abs() < 1e80)
    found = []
    for function in (traced(exponent), lambda x: x**exponent):
        leaf = x.clone().requires_grad_()
        result = function(leaf)
        if not result.requires_grad:
            found.append((torch.zeros_like(x), torch.zeros_like(x)))
            continue
        (first,) = torch.autograd.grad(result, leaf, torch.full_like(x, 1.5), create_graph=True)
        second = torch.autograd.grad(first.sum(), leaf, allow_unused=True)[0] if first.requires_grad else None
        found.append((first.detach(), torch.zeros_like(x) if second is None else second))
    (first, second), (wanted, wanted_second) = found
    torch.testing.assert_close(first, wanted, equal_nan=True, rtol=1e-14, atol=0)
    torch.testing.assert_close(second[usual], wanted_second[usual], rtol=1e-13, atol=0)
