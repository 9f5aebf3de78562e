"""Random groups: fused as a whole they equal their applications run alone, bit for bit, and eager torch closely."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from functors import BY_NAME, CASES, assert_same, draw, functor, poison, unpoison
from hypothesis import given
from hypothesis import strategies as st

import fuser
from fuser.dtypes import Rank
from fuser.errors import UnsupportedError
from fuser.fallback import Fallback
from fuser.function import Function
from fuser.graph import FusionGroup, GroupBuilder
from fuser.kernel_spec import InputSpec, infer_typing
from fuser.ops import OPS, cast_function

pytestmark = pytest.mark.cpu

DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64, torch.uint8, torch.int8,
    torch.bool,
)  # fmt: skip
# Broadcastable against (4, 1, 6) and each other.
SHAPES = ((4, 5, 6), (5, 6), (6,), (1,), (), (4, 1, 6), (4, 5, 1), (1, 1, 1))
NUMBERS = (0, 1, -2, 3, 0.5, -1.25, 1e-3, True, False)

# Ops of a number, of a dtype, or of places.
NO_TENSORS = {"to", "convert", "div_number", "div_trunc_number", "tril", "triu"}

FUNCTIONS: dict[str, Function] = {
    **{case.name: functor(case.name).function for case in CASES if case.is_total},
    **{f"aten.{name}": op.function for name, op in OPS.items() if op.name not in NO_TENSORS},
    "aten.to_half": cast_function(torch.float16),
    "aten.to_int": cast_function(torch.int32),
}


@dataclass
class Value:
    """A handle of the builder, and the value it has when every application runs alone."""

    handle: int
    value: Any


@st.composite
def tensors(draw_: Any) -> torch.Tensor:
    dtype = draw_(st.sampled_from(DTYPES))
    shape = draw_(st.sampled_from(SHAPES))
    seed = draw_(st.integers(0, 1000))
    layout = draw_(st.sampled_from(("dense", "dense", "permuted", "sliced", "expanded", "offset")))
    if layout == "permuted":
        order = draw_(st.permutations(range(len(shape))))
        base = draw([shape[place] for place in order], dtype, seed=seed)
        return base.permute([order.index(place) for place in range(len(shape))])
    if layout == "sliced" and shape:
        return draw([2 * size + 1 for size in shape], dtype, seed=seed)[tuple(slice(1, None, 2) for _ in shape)]
    if layout == "expanded" and len(shape) > 1:
        return draw([1, *shape[1:]], dtype, seed=seed).expand(shape)
    if layout == "offset":
        flat = draw([3 + torch.Size(shape).numel()], dtype, seed=seed)
        return flat[3:].view(shape)
    return draw(shape, dtype, seed=seed)


def alone(function: Function, values: list[Any], scalars: list[Any]) -> FusionGroup:
    """Return the group of one application."""
    builder = GroupBuilder()
    handles = [builder.add_input(f"x{place}") for place in range(len(values))]
    named = [builder.add_input(f"s{place}", is_scalar=True) for place in range(len(scalars))]
    return builder.build(builder.apply(function, handles, named))


def is_served(group: FusionGroup, values: list[Any]) -> bool:
    """Whether the dtypes have a kernel; what torch does not promote is other tests' business."""
    specs = []
    for item in values:
        if isinstance(item, torch.Tensor):
            specs.append(InputSpec(item.dtype, Rank.TENSOR if item.dim() else Rank.ZERO_DIM))
        else:
            dtype = torch.result_type(item, item)
            specs.append(InputSpec(dtype, Rank.NUMBER, type(item)))
    try:
        infer_typing(group, specs, torch.get_default_dtype())
    except UnsupportedError:
        return False
    return True


def serves(name: str, values: list[Any]) -> bool:
    """Whether a functor of the table serves the common dtype of these values."""
    case = BY_NAME.get(name)
    if case is None:
        return True
    dtype = values[0].dtype if isinstance(values[0], torch.Tensor) else None
    operands = [item for item in values if isinstance(item, torch.Tensor)]
    dtype = operands[0].dtype
    for item in operands[1:]:
        dtype = torch.promote_types(dtype, item.dtype)
    if any(isinstance(item, float) for item in values) and not dtype.is_floating_point:
        dtype = torch.float32
    return dtype in case.dtypes


@given(data=st.data())
def test_random_groups(data: st.DataObject, tier: int) -> None:
    poison()
    try:
        check_random_group(data, 8 if tier == 3 else 5)
    finally:
        unpoison()


def check_random_group(data: st.DataObject, most: int) -> None:
    builder = GroupBuilder()
    known = []
    inputs: list[Any] = []
    for place, tensor in enumerate(data.draw(st.lists(tensors(), min_size=1, max_size=4))):
        inputs.append(tensor)
        known.append(Value(builder.add_input(f"in{place}"), tensor))
    made: list[Value] = []
    for _ in range(data.draw(st.integers(1, most))):
        name = data.draw(st.sampled_from(sorted(FUNCTIONS)))
        function = FUNCTIONS[name]
        operands: list[Value | int | float] = [
            data.draw(st.sampled_from(known + made + made)) for _ in function.functor.tensors
        ]
        if len(operands) > 1 and function.op != "where" and data.draw(st.integers(0, 3)) == 0:
            operands[data.draw(st.integers(0, len(operands) - 1))] = data.draw(st.sampled_from(NUMBERS))
        scalars = [data.draw(st.sampled_from(NUMBERS)) for _ in function.functor.scalars]
        values = [item.value if isinstance(item, Value) else item for item in operands]
        single = alone(function, values, scalars)
        if not serves(name, values) or not is_served(single, [*values, *scalars]):
            continue
        results = fuser.run_fusion(fuser.register_fusion(single), [*values, *scalars])
        check_against_eager(name, single, values, scalars, results)
        handles = []
        for item in operands:
            if isinstance(item, Value):
                handles.append(item.handle)
            else:
                inputs.append(item)
                handles.append(builder.add_input(f"number{len(inputs)}"))
        named = []
        for item in scalars:
            inputs.append(item)
            named.append(builder.add_input(f"scalar{len(inputs)}", is_scalar=True))
        new = builder.apply(function, handles, named, name)
        made += [Value(handle, result) for handle, result in zip(new, results, strict=True)]
    if not made:
        return
    chosen = data.draw(st.lists(st.sampled_from(made), min_size=1, max_size=4, unique_by=lambda item: item.handle))
    group = builder.build([item.handle for item in chosen])
    before = fuser.stats()["fallbacks"]
    got = fuser.run_fusion(fuser.register_fusion(group), inputs)
    assert fuser.stats()["fallbacks"] == before
    assert_same(got, [item.value for item in chosen], str(group))


def check_against_eager(
    name: str, single: FusionGroup, values: list[Any], scalars: list[Any], results: list[torch.Tensor]
) -> None:
    """Compare with eager torch where the inputs are tame: there the error has a bound."""
    case = BY_NAME.get(name)
    operands = [item for item in values if isinstance(item, torch.Tensor)]
    if case is None:
        try:
            wanted = Fallback(single).run([*values, *scalars], "")
        except (RuntimeError, TypeError) as error:
            # torch has no such call: a number where its op takes tensors alone, a bool for alpha, or shapes that oneDNN
            # does not broadcast.
            is_tensors = len(operands) == len(values) and not any(isinstance(item, bool) for item in scalars)
            is_broadcast = len({item.shape for item in operands}) > 1 and "primitive descriptor" in str(error)
            if is_tensors and not is_broadcast:
                raise
            return
    elif results[0].dtype.is_floating_point:
        wide = [torch.as_tensor(item).to(results[0].dtype).double() for item in values]
        named = dict(zip((item.name for item in case.build().function.functor.scalars), scalars, strict=True))
        found = case.reference(*wide, **named)
        wanted = list(found) if isinstance(found, tuple) else [found]
    else:
        return
    tame = torch.ones((), dtype=torch.bool)
    for item in operands:
        low, high = case.domain if case else (-8.0, 8.0)
        tame = tame & (item.double() >= low) & (item.double() <= high)
    for mine, theirs in zip(results, wanted, strict=True):
        if case is None:
            assert mine.dtype == theirs.dtype, name
            assert mine.stride() == theirs.stride(), f"{name}: {mine.stride()} instead of {theirs.stride()}"
        mine, theirs = torch.broadcast_tensors(mine.double(), theirs.double())
        where = (tame & theirs.isfinite() & mine.isfinite()).expand(mine.shape)
        epsilon = torch.finfo(results[0].dtype).eps if results[0].dtype.is_floating_point else 0.0
        error = (mine - theirs).abs()[where]
        bound = (64 * epsilon * theirs.abs().clamp(min=1.0))[where]
        assert bool((error <= bound).all()), f"{name}{[*values, *scalars]}: {mine} != {theirs}"
