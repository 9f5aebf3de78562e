"""Whole kernels as text: golden files of what is generated after the prelude, and the samples in docstrings."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import fuser
from fuser import codegen, compiler, list_text, planner
from fuser.config import config
from fuser.cpu import dialect as cpu_dialect
from fuser.cpu import prelude as cpu_prelude
from fuser.cuda import dialect as cuda_dialect
from fuser.cuda import prelude as cuda_prelude
from fuser.cxx.functor import parse_functor
from fuser.function import Function
from fuser.graph import FusionGroup, GroupBuilder
from fuser.kernel_source import KERNEL_NAME, KernelSource
from fuser.ops import OPS

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

AXPY = "template <typename T> T axpy(T x, T y, T alpha) { return alpha * x + y; }"
SPLIT = """// Written T, returns nothing.
template <typename T>
T split(T x, T bias, T& low, T& high) {
  low = x - bias;
  high = x + bias;
}"""
QUANTIZE = """#define LEVELS 255
template <typename T> T clip(T v) { return v < 0 ? T(0) : v > LEVELS ? T(LEVELS) : v; }
template <typename T> T quantize(T x, bool keep, int64_t offset) { return keep ? x : clip(x * LEVELS + T(offset)); }"""
ROTATE = "template <typename T> T rotate(T z, T by) { return z * by; }"


@dataclass(frozen=True)
class Sample:
    """A group and the inputs of one call: meta tensors and numbers."""

    group: FusionGroup
    inputs: list[Any]
    numerics: str = "strict"


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def chain(*, dtype: torch.dtype = torch.float32, size: int = 1000, numerics: str = "strict") -> Sample:
    """axpy, then silu: two functors, one of them torch's own."""
    builder = GroupBuilder()
    x, y, alpha = builder.add_input("x"), builder.add_input("y"), builder.add_input("alpha", is_scalar=True)
    (total,) = builder.apply(Function(parse_functor(AXPY, ("alpha",))), [x, y], [alpha])
    group = builder.build(builder.apply(OPS["silu"].function, [total]))
    return Sample(group, [meta(size, dtype=dtype), meta(size, dtype=dtype), 2.0], numerics)


def row_broadcast() -> Sample:
    """A matrix, a row and a Python number."""
    builder = GroupBuilder()
    x, row, number = (builder.add_input(name) for name in ("x", "row", "number"))
    (scaled,) = builder.apply(OPS["mul"].function, [x, row])
    return Sample(builder.build(builder.apply(OPS["maximum"].function, [scaled, number])), [meta(64, 32), meta(32), 0])


def transposed_outputs() -> Sample:
    """Two outputs over a transposed and a dense operand, in double."""
    builder = GroupBuilder()
    x, bias = builder.add_input("x"), builder.add_input("bias")
    group = builder.build(builder.apply(Function(parse_functor(SPLIT, (), 2)), [x, bias]))
    return Sample(group, [meta(8, 6, dtype=torch.float64).t(), meta(6, 8, dtype=torch.float64)])


def mixed_dtypes() -> Sample:
    """int8 and half to uint8 through a condition, with bool and int scalars and a macro."""
    builder = GroupBuilder()
    mask, x, y = (builder.add_input(name) for name in ("mask", "x", "y"))
    keep, offset = builder.add_input("keep", is_scalar=True), builder.add_input("offset", is_scalar=True)
    quantize = Function(parse_functor(QUANTIZE, ("keep", "offset")), out_dtypes=(torch.uint8,))
    (chosen,) = builder.apply(OPS["where"].function, [mask, x, y])
    group = builder.build(builder.apply(quantize, [chosen], [keep, offset]))
    inputs = [meta(100, dtype=torch.bool), meta(100, dtype=torch.int8), meta(100, dtype=torch.float16), False, 3]
    return Sample(group, inputs)


def complex_half() -> Sample:
    """complex32 times a Python complex number and a 0-dim tensor."""
    builder = GroupBuilder()
    z, w, by = (builder.add_input(name) for name in ("z", "w", "by"))
    rotate = Function(parse_functor(ROTATE))
    (turned,) = builder.apply(rotate, [z, by])
    group = builder.build(builder.apply(rotate, [turned, w]))
    return Sample(group, [meta(16, dtype=torch.complex32), meta(dtype=torch.complex64), 1j])


SAMPLES: dict[str, Callable[[], Sample]] = {
    "chain_float32": chain,
    "chain_bfloat16": lambda: chain(dtype=torch.bfloat16),
    "chain_fast": lambda: chain(numerics="fast", dtype=torch.bfloat16),
    "chain_wide_index": lambda: chain(size=2**31 + 5),
    "row_broadcast": row_broadcast,
    "transposed_outputs": transposed_outputs,
    "mixed_dtypes": mixed_dtypes,
    "complex_half": complex_half,
}
ROOMS = {"cuda": (cuda_prelude, ".cu"), "cpu": (cpu_prelude, ".cpp")}


def emit(sample: Sample, room: str) -> KernelSource:
    with config.patch(numerics=sample.numerics):
        spec = compiler.register(sample.group)
        ((part, args),) = planner.plan_texts(spec, sample.inputs, torch.device(room))
        return compiler.build_kernel_source(part, args)


def split_prelude(text: str) -> tuple[str, str]:
    """Return the prelude, which has tests of its own, and the kernel."""
    prelude, mark, kernel = text.partition("\nnamespace fuser_f0 {")
    assert mark
    return prelude, mark.lstrip() + kernel


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("name", SAMPLES)
def test_kernel_text(name: str, room: str, golden: Callable[[str, str], None]) -> None:
    _, kernel = split_prelude(emit(SAMPLES[name](), room).text)
    # The prelude's length depends on the machine (libmvec), and these numbers on it.
    golden(f"{name}{ROOMS[room][1]}", re.sub(rf'#line \d+ "{KERNEL_NAME}"', f'#line N "{KERNEL_NAME}"', kernel))


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("name", SAMPLES)
def test_prelude_is_the_rooms_own(name: str, room: str) -> None:
    source = emit(SAMPLES[name](), room)
    prelude, _ = split_prelude(source.text)
    words = frozenset[str]().union(*(functor.words for functor in source.functors))
    features = {operand.info.feature for operand in source.operands} - {None}
    if "complex" in features:
        features.add("half")
    if source.geometry:
        features.add("tiles")
    wanted = ROOMS[room][0].emit_prelude(words, frozenset(features))
    assert prelude.strip() == wanted.strip()
    assert len(prelude) > 1000


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("name", SAMPLES)
def test_line_numbers(name: str, room: str) -> None:
    # A compiler's message about line n of the kernel, or of a functor, is about that line.
    source = emit(SAMPLES[name](), room)
    found = 0
    lines = source.text.split("\n")
    for index, line in enumerate(lines):
        match = re.fullmatch(r'#line (\d+) "(.*)"', line)
        if match and match[2] == KERNEL_NAME:
            assert int(match[1]) == index + 2
            found += 1
        elif match:
            functor = source.functor_labels[match[2]]
            assert int(match[1]) == 1
            assert lines[index + 1 : index + 1 + len(functor.text.split("\n"))] == functor.text.split("\n")
            found += 1
    assert found == 2 * len(source.functors)


@pytest.mark.parametrize("name", SAMPLES)
def test_text_is_the_same_every_time(name: str) -> None:
    first, second = (emit(SAMPLES[name](), "cuda").text for _ in range(2))
    assert first == second


def test_names_do_not_reach_the_text() -> None:
    builder = GroupBuilder()
    other = [builder.add_input(name) for name in ("foo", "bar")]
    alpha = builder.add_input("baz", is_scalar=True)
    (total,) = builder.apply(Function(parse_functor(AXPY, ("alpha",))), other, [alpha], "qux")
    renamed = builder.build(builder.apply(OPS["silu"].function, [total], name="quux"))
    assert emit(Sample(renamed, chain().inputs), "cuda").text == emit(chain(), "cuda").text


# ---- samples in docstrings ----


def emitters() -> Iterator[Any]:
    for module in (codegen, list_text, cpu_dialect, cuda_dialect, cpu_prelude, cuda_prelude):
        for name, function in vars(module).items():
            if name.startswith("emit_") and inspect.getmodule(inspect.unwrap(function)) is module:
                yield pytest.param(module, function, id=f"{module.__name__}.{name}")


def sample_texts(docstring: str) -> list[str]:
    """Return the ``::`` blocks of a docstring; without any, the texts in backticks after the word Sample."""
    text = inspect.cleandoc(docstring)
    blocks = re.findall(r"::\n\n((?:    .*\n?|\n)+)", text)
    if blocks:
        return [textwrap.dedent(block).strip("\n") for block in blocks]
    inline = re.findall(r"`([^`]*[(;][^`]*)`", text.partition("Sample")[2])
    return [item for item in inline if "for" not in item.split()]


def flat(text: str) -> str:
    # Line breaks and indentation count for nothing.
    return "".join(text.split())


@pytest.mark.parametrize(("module", "function"), list(emitters()))
def test_samples_in_docstrings_are_true(module: Any, function: Any) -> None:
    samples = sample_texts(function.__doc__ or "")
    assert samples, f"{function.__name__} shows no sample of its text"
    builder = GroupBuilder()
    x, y, alpha = builder.add_input("x"), builder.add_input("y"), builder.add_input("alpha", is_scalar=True)
    axpy = builder.build(builder.apply(Function(parse_functor(AXPY, ("alpha",))), [x, y], [alpha]))
    exp = parse_functor("template <typename T> T f(T x) { return exp(x); }")
    unary = builder_of_one(Function(exp))
    room = "cpu" if module in (cpu_dialect, cpu_prelude) else "cuda"
    texts = [emit(Sample(axpy, [meta(8), meta(8), 2.0]), room).text, emit(Sample(unary, [meta(8)]), room).text]
    macros = parse_functor("#define LEVELS 2\n#undef INFINITY\ntemplate <typename T> T f(T x) { return x * LEVELS; }")
    texts.append(emit(Sample(builder_of_one(Function(macros)), [meta(8)]), room).text)
    ((part, args),) = planner.plan_texts(compiler.register(unary), [meta(8)], torch.device(room))
    args = args._replace(positions=448, tuning=args.tuning._replace(unroll=2))
    texts.append(compiler.build_kernel_source(part, args).text)
    for sample in samples:
        assert any(flat(sample) in flat(text) for text in texts), sample


def builder_of_one(function: Function) -> FusionGroup:
    builder = GroupBuilder()
    return builder.build(builder.apply(function, [builder.add_input("x")]))


def test_debug_function_gives_the_same_text() -> None:
    sample = chain()
    for room in ROOMS:
        assert fuser.debug_get_fused_kernel_code(sample.group, sample.inputs, device=room) == emit(sample, room).text
