"""Fixed groups on random tensors: any shape, layout, dtype, number or ``out=`` gives the bits each functor gives alone.

The groups are few, so that kernels are found again, and many tensors can be drawn in little time. What each functor
gives alone is computed on contiguous copies without broadcasting: an element's value depends on its inputs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accuracy import outcome
from functors import CASES, assert_same, draw, functor, poison, same_bits, unpoison
from hypothesis import given
from hypothesis import strategies as st
from test_layout import views

from fuser.application import Application
from fuser.compiler import register
from fuser.function import Function
from fuser.graph import FusionGroup, GroupBuilder
from fuser.kernel_spec import MAX_OUTPUTS
from fuser.ops import OPS, cast_function
from fuser.route import run

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore:An output with one or more elements:UserWarning")]


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    poison()
    yield
    unpoison()


# --- the groups -----------------------------------------------------------------------------------------------------
def _chain(b: GroupBuilder, x: int, y: int, z: int) -> list[int]:
    (first,) = b.apply(functor("axpy").function, [x, y], [b.add_input("alpha", is_scalar=True, default=0.375)])
    (second,) = b.apply(functor("leaky").function, [first], [b.add_input("slope", is_scalar=True, default=0.1)])
    return list(b.apply(functor("median3").function, [second, z, x]))


def _diamond(b: GroupBuilder, x: int, y: int, z: int) -> list[int]:
    u, v = b.apply(functor("rotate").function, [x, y])
    (product,) = b.apply(OPS["mul"].function, [u, z])
    (total,) = b.apply(OPS["maximum"].function, [product, v])
    return [total, v, u]


def _choice(b: GroupBuilder, x: int, y: int, z: int) -> list[int]:
    (less,) = b.apply(OPS["lt"].function, [x, y])
    (chosen,) = b.apply(OPS["where"].function, [less, z, x])
    (narrow,) = b.apply(cast_function(torch.bfloat16), [chosen])
    return [chosen, less, narrow]


def _shapes(b: GroupBuilder, x: int, y: int, z: int) -> list[int]:
    (left,) = b.apply(functor("relu").function, [x])
    (right,) = b.apply(OPS["add"].function, [y, z], [b.add_input("alpha", is_scalar=True, default=2)])
    return [left, right, *b.apply(OPS["minimum"].function, [left, right])]


def _build(make: Callable[..., list[int]]) -> FusionGroup:
    builder = GroupBuilder()
    return builder.build(make(builder, *(builder.add_input(name) for name in "xyz")))


GROUPS = {make.__name__: _build(make) for make in (_chain, _diamond, _choice, _shapes)}
DTYPES = (
    (torch.float32, torch.float32, torch.float32),
    (torch.bfloat16, torch.float32, torch.float16),
    (torch.float16, torch.float16, torch.float64),
)
NUMBERS = (2, 0.5, -1.25, True)


# --- the tensors ----------------------------------------------------------------------------------------------------
@st.composite
def placed(draw_: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Draw a tensor of values that broadcasts to ``shape``, somewhere in a buffer."""
    view = draw_(views(shape, torch.int8))
    sizes, strides = tuple(view.shape), view.stride()
    if draw_(st.integers(0, 9)) == 0:
        # Elements may share memory.
        strides = tuple(draw_(st.integers(0, 3)) for _ in sizes)
    reach = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) if 0 not in sizes else 0
    offset = draw_(st.sampled_from((0, 0, 1, 3)))
    buffer = draw([offset + reach + 1], dtype, (-3.0, 3.0), draw_(st.integers(0, 99)))
    return buffer.as_strided(sizes, strides, offset)


@st.composite
def calls(draw_: Any) -> tuple[str, list[Any]]:
    """Draw a group and its three operands."""
    shape = tuple(draw_(st.lists(st.sampled_from((1, 2, 3, 4, 0)), max_size=5)))
    inputs: list[Any] = [draw_(placed(shape, dtype)) for dtype in draw_(st.sampled_from(DTYPES))]
    if draw_(st.integers(0, 4)) == 0:
        inputs[draw_(st.integers(1, 2))] = draw_(st.sampled_from(NUMBERS))
    if draw_(st.integers(0, 9)) == 0:
        # Most likely an error.
        inputs[0] = draw_(placed((5, *shape[1:]), torch.float32))
    return draw_(st.sampled_from(sorted(GROUPS))), inputs


def flatten(item: Any, shape: tuple[int, ...]) -> Any:
    """Return a contiguous copy of one dimension without broadcasting; numbers and 0-dim tensors are as they are."""
    return item.expand(shape).reshape(-1).clone() if isinstance(item, torch.Tensor) and item.dim() else item


def alone(application: Application, values: list[Any]) -> list[torch.Tensor]:
    """Run one application by itself on flat copies, and bring its results into the shape they have."""
    builder = GroupBuilder()
    handles = [builder.add_input(f"x{place}") for place in range(len(application.tensors))]
    scalars = [builder.add_input(f"s{place}", is_scalar=True) for place in range(len(application.scalars))]
    spec = register(builder.build(builder.apply(application.function, handles, scalars)))
    operands = [values[value] for value in application.tensors]
    shape = torch.broadcast_shapes(*(item.shape for item in operands if isinstance(item, torch.Tensor)))
    inputs = [flatten(item, shape) for item in operands]
    return [item.view(shape) for item in run(spec, [*inputs, *(values[value] for value in application.scalars)])]


def in_torch(application: Application, values: list[Any]) -> Any:
    """Return what a torch op with as many operands gives: it has the layout that the functor must give."""
    operands = [values[value] for value in application.tensors]
    op = application.function.op
    if op == "to":
        return torch.ops.aten._to_copy.default(operands[0], dtype=application.function.out_dtypes[0])
    # On the CPU torch casts operands of several dtypes first, which loses strides of expanded ones: ask in one dtype.
    operands = [x if isinstance(x, torch.Tensor) and x.dtype is torch.bool else _as_double(x) for x in operands]
    if op is not None:
        names = [parameter.name for parameter in application.function.functor.scalars]
        numbers = [values[value] for value in application.scalars]
        tensors = [torch.tensor(x) if op in {"maximum", "minimum"} and not torch.is_tensor(x) else x for x in operands]
        return OPS[op].eager(*tensors, **dict(zip(names, numbers, strict=True)))
    if len(operands) == 1:
        return torch.neg(operands[0])
    if len(operands) == 2:
        return operands[0] + operands[1]
    return torch.addcmul(*(torch.as_tensor(item) for item in operands))


def _as_double(item: Any) -> Any:
    is_tensor = isinstance(item, torch.Tensor)
    return torch.empty_strided(item.shape, item.stride(), dtype=torch.float64) if is_tensor else item


def reference(group: FusionGroup, inputs: list[Any]) -> list[torch.Tensor]:
    """Return the group's outputs: bits of each functor alone, strides of eager torch; raises what torch raises."""
    values, layouts = list(inputs), list(inputs)
    for application in group.applications:
        like = in_torch(application, layouts)
        found = alone(application, values)
        values += found
        layouts += [torch.empty_strided(like.shape, like.stride(), dtype=item.dtype) for item in found]
    return [layouts[value].copy_(values[value]) for value in group.outputs]


@given(drawn=calls())
def test_groups_on_any_tensors(drawn: tuple[str, list[Any]]) -> None:
    name, operands = drawn
    spec = register(GROUPS[name])
    inputs = GROUPS[name].fill_inputs(operands)
    wanted, got = outcome(reference, GROUPS[name], inputs), outcome(run, spec, inputs)
    if isinstance(wanted, Exception) or isinstance(got, Exception):
        assert isinstance(wanted, RuntimeError), repr(wanted)
        assert isinstance(got, RuntimeError), f"{got!r} instead of {wanted!r}"
    else:
        assert_same(got, wanted, name)


@st.composite
def targets(draw_: Any, results: list[torch.Tensor], inputs: list[Any]) -> list[torch.Tensor]:
    """Draw ``out=`` tensors that can take the results: of another layout, dtype or shape, or an input itself."""
    found: list[torch.Tensor] = []
    for result in results:
        kind = draw_(st.sampled_from(("same", "placed", "wider", "empty", "input")))
        fitting = [
            item
            for item in inputs
            if isinstance(item, torch.Tensor)
            and item.shape == result.shape
            and torch.can_cast(result.dtype, item.dtype)
            and not any(item is other for other in found)
            and torch.ops.aten.is_non_overlapping_and_dense.default(item)
        ]
        if kind == "input" and fitting:
            found.append(draw_(st.sampled_from(fitting)))
        elif kind == "wider":
            dtype = torch.int64 if result.dtype is torch.bool else torch.float64
            found.append(torch.empty(result.shape, dtype=dtype))
        elif kind == "empty":
            found.append(torch.empty(0, dtype=result.dtype))
        elif kind == "placed" and result.dim():
            steps = [2 * size + 1 for size in result.shape]
            found.append(torch.empty(steps, dtype=result.dtype)[tuple(slice(1, None, 2) for _ in steps)])
        else:
            found.append(torch.empty_like(result))
    return found


@given(data=st.data())
def test_out_of_any_kind(data: st.DataObject) -> None:
    name, operands = data.draw(calls())
    inputs = GROUPS[name].fill_inputs(operands)
    spec = register(GROUPS[name])
    wanted = outcome(run, spec, inputs)
    if isinstance(wanted, Exception):
        return
    out = data.draw(targets(wanted, operands))
    kept = [(item, item.dtype, item.shape, item.stride()) for item in out]
    got = run(spec, inputs, out)
    for mine, result, (item, dtype, shape, strides) in zip(got, wanted, kept, strict=True):
        assert mine is item
        assert mine.dtype == dtype
        assert same_bits(mine, result.to(dtype))
        if shape == result.shape:
            assert mine.stride() == strides


# --- an element's value depends on its inputs alone -------------------------------------------------------------------
FUNCTIONS: list[Function] = [case.build().function for case in CASES if case.is_total]
FUNCTIONS += [
    op.function
    for op in OPS.values()
    if "float" in op.kinds and not op.function.is_conversion and not op.function.unpromoted
]
LENGTH = 20000


def whole_table(dtype: torch.dtype, tier: int) -> Iterator[FusionGroup]:
    """Give groups that apply every functor to the same inputs."""
    served = [item for item in FUNCTIONS if item.op or dtype in _dtypes(item)]
    if tier < 3:
        served = served[::3]
    size = MAX_OUTPUTS - 2
    for begin in range(0, len(served), size):
        builder = GroupBuilder()
        inputs = [builder.add_input(name) for name in "xyz"]
        outputs: list[int] = []
        for function in served[begin : begin + size]:
            scalars = [builder.add_input(item.name, is_scalar=True, default=0.5) for item in function.functor.scalars]
            operands = [inputs[place % 3] for place in range(len(function.functor.tensors))]
            outputs += builder.apply(function, operands, scalars)
        yield builder.build(outputs)


def _dtypes(function: Function) -> tuple[torch.dtype, ...]:
    return next(case.dtypes for case in CASES if case.name == function.name)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
def test_value_depends_on_the_inputs_alone(dtype: torch.dtype, tier: int) -> None:
    inputs = [draw((LENGTH,), dtype, (-9.0, 9.0), seed) for seed in range(3)]
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(5))
    threads = torch.get_num_threads()
    for group in whole_table(dtype, tier):
        spec = register(group)

        def results(*tensors: torch.Tensor, spec: Any = spec, group: FusionGroup = group) -> list[torch.Tensor]:
            return [item.reshape(-1) for item in run(spec, group.fill_inputs(tensors))]

        whole = results(*inputs)
        names = [item.function.name for item in group.applications for _ in range(item.function.num_outputs)]
        variants: dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]] = {
            "permuted": (results(*(item[order] for item in inputs)), [item[order] for item in whole]),
            "shifted": (results(*(item[1:] for item in inputs)), [item[1:] for item in whole]),
            "sliced": (results(*(item[3::7] for item in inputs)), [item[3::7] for item in whole]),
            "few": (results(*(item[-3:] for item in inputs)), [item[-3:] for item in whole]),
            "columns": (
                results(*(item.view(100, 200).t() for item in inputs)),
                [item.view(100, 200).t().reshape(-1) for item in whole],
            ),
        }
        try:
            torch.set_num_threads(1)
            variants["one thread"] = (results(*inputs), whole)
            torch.set_num_threads(2)
            variants["two threads"] = (results(*inputs), whole)
        finally:
            torch.set_num_threads(threads)
        for what, (got, wanted) in variants.items():
            for name, mine, theirs in zip(names, got, wanted, strict=True):
                assert same_bits(mine, theirs), f"{name} {what}"
