"""Groups of gradients: what their kernels keep apart, and the dtypes of what lies in between."""

from __future__ import annotations

import re

import pytest
import torch

from fuser import compiler, planner
from fuser.autodiff.backward import DerivedGroup, build_backward, build_tangents, find_differentiable
from fuser.cxx.functor import parse_functor
from fuser.function import Function, HandWritten, Isolation
from fuser.graph import FusionGroup, GroupBuilder
from fuser.kernel_spec import InputSpec, infer_typing
from fuser.ops.arrangements import arange_function, full_like_function
from fuser.tensor_desc import describe, input_specs

SILU = "template <typename T> T silu(T x) { return x / (T(1) + exp(-x)); }"
MUL = "template <typename T> T mul(T x, T y) { return x * y; }"
MUL_BACKWARD = """
template <typename T> void by_hand(T x, T y, T grad, T& grad_x, T& grad_y) { grad_x = grad * y; grad_y = grad * x; }
"""
CUDA = torch.device("cuda")


def swiglu(backward: HandWritten | None = None) -> FusionGroup:
    """Return silu(x) * y."""
    builder = GroupBuilder()
    x, y = builder.add_input("x"), builder.add_input("y")
    (gate,) = builder.apply(Function(parse_functor(SILU)), [x])
    return builder.build(builder.apply(Function(parse_functor(MUL), backward=backward), [gate, y]))


def meta(dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(64, dtype=dtype, device="meta")


def specs_of(*dtypes: torch.dtype) -> list[InputSpec]:
    return input_specs([describe(meta(dtype), CUDA) for dtype in dtypes], CUDA)


def gradients_of(group: FusionGroup, dtype: torch.dtype) -> DerivedGroup:
    typing = infer_typing(group, specs_of(dtype, dtype), torch.float32)
    derived = build_backward(group, typing, (0, 1), (0,))
    assert derived is not None
    return derived


def barriers_of(derived: DerivedGroup, dtype: torch.dtype) -> dict[str, tuple[int, int]]:
    """For each functor of the strict CUDA kernel, how many arguments and results are behind barriers."""
    spec = compiler.register(derived.group)
    ((part, args),) = planner.plan_texts(spec, [meta(dtype)] * len(derived.sources), CUDA)
    element = compiler.build_kernel_source(part, args).text.partition("void fuser_element(")[2].partition("\n}")[0]
    found = {}
    for statements in element.split("// v")[1:]:
        call = re.search(r"fuser_f\d+::(\w+)<[\w, ]+>\((.*)", statements)
        assert call is not None
        arguments = call[2].partition("));" if ")));" in call[2] else ");")[0].count("fuser_isolate")
        found[call[1]] = arguments, statements.count("fuser_isolate") - arguments
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_derivatives_are_not_kept_apart(dtype: torch.dtype) -> None:
    # What is computed again is the same value as in the forward pass.
    assert barriers_of(gradients_of(swiglu(), dtype), dtype) == {
        "silu": (0, 1),
        "mul_backward": (0, 0),
        "silu_backward": (0, 0),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hand_written_derivatives_are_kept_apart(dtype: torch.dtype) -> None:
    by_hand = HandWritten(parse_functor(MUL_BACKWARD, (), 2), (0, 1), (0, 1))
    derived = gradients_of(swiglu(by_hand), dtype)
    assert [item.function.isolation for item in derived.group.applications] == [
        Isolation.RESULT,
        Isolation.FULL,
        Isolation.NONE,
    ]
    arguments, results = barriers_of(derived, dtype)["by_hand"]
    assert (arguments, results) == (3, 1 if dtype is torch.bfloat16 else 2)


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.complex32, torch.complex64)],
)
def test_only_what_comes_out_is_rounded(dtype: torch.dtype, wide: torch.dtype) -> None:
    derived = gradients_of(swiglu(), dtype)
    dtypes = {item.function.functor.entry: item.function.out_dtypes for item in derived.group.applications}
    assert dtypes["mul_backward"] == (wide, dtype)
    assert dtypes["silu_backward"] == (dtype,)


def test_the_last_sum_is_rounded() -> None:
    builder = GroupBuilder()
    x = builder.add_input("x")
    (square,) = builder.apply(Function(parse_functor(MUL)), [x, x])
    group = builder.build(builder.apply(Function(parse_functor(MUL)), [square, x]))
    derived = build_backward(group, infer_typing(group, specs_of(torch.float16), torch.float32), (0,), (0,))
    assert derived is not None
    sums = [item.function for item in derived.group.applications if item.function.functor.entry == "accumulate"]
    assert [item.out_dtypes for item in sums] == [(torch.float32,), (torch.float16,)]


def test_what_is_added_to_a_gradient_is_not_rounded_before() -> None:
    builder = GroupBuilder()
    x, y = builder.add_input("x"), builder.add_input("y")
    gate, root = Function(parse_functor(SILU)), Function(parse_functor("template <typename T> T f(T x) { return -x; }"))
    (first,), (second,) = builder.apply(gate, [x]), builder.apply(root, [x])
    (product,) = builder.apply(Function(parse_functor(MUL)), [first, second])
    derived = gradients_of(builder.build(builder.apply(Function(parse_functor(MUL)), [product, y])), torch.bfloat16)
    dtypes = {item.function.functor.entry: item.function.out_dtypes for item in derived.group.applications}
    assert dtypes["f_backward"] == dtypes["silu_backward"] == (torch.float32,)
    assert dtypes["accumulate"] == (torch.bfloat16,)


def test_tangents_that_come_out_are_rounded() -> None:
    group = swiglu()
    derived = build_tangents(group, infer_typing(group, specs_of(*[torch.bfloat16] * 2), torch.float32), (0, 1))
    assert derived is not None
    dtypes = {item.function.functor.entry: item.function.out_dtypes for item in derived.group.applications}
    assert dtypes["silu_jvp"] == (torch.float32,)
    assert dtypes["mul_jvp"] == (torch.bfloat16,)


def test_no_gradient_goes_through_what_has_but_the_shape_of_a_tensor() -> None:
    builder = GroupBuilder()
    x, number = builder.add_input("x"), builder.add_input("number", default=2.0)
    (gate,) = builder.apply(Function(parse_functor(SILU)), [x])
    (filled,) = builder.apply(full_like_function(torch.float32, "preserve_format", 1), [number, gate])
    (counted,) = builder.apply(arange_function(64, 0, 1, torch.float32), [gate])
    group = builder.build([gate, filled, counted])
    found = find_differentiable(group, infer_typing(group, specs_of(torch.float32) * 2, torch.float32), (0,))
    assert [value in found for value in group.outputs] == [True, False, False]


def test_isolation_is_part_of_a_group() -> None:
    group = gradients_of(swiglu(), torch.float32).group
    again = FusionGroup.from_json(group.to_json())
    assert [item.function.isolation for item in again.applications] == [
        item.function.isolation for item in group.applications
    ]
    assert again.key == group.key
