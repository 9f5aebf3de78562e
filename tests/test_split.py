"""Groups too large for one launch are cut into several, and return the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from functors import assert_same, draw, functor, poison, unpoison

import fuser
from fuser import planner
from fuser.codegen import build_source
from fuser.compiler import register
from fuser.cuda.dialect import DIALECT
from fuser.errors import FallbackError
from fuser.fused_kernel import ArgumentPacker
from fuser.graph import FusionGroup, GroupBuilder
from fuser.kernel_spec import MAX_ARGUMENT_BYTES, MAX_INPUTS
from fuser.layout import IterationSpace
from fuser.ops import OPS, cast_function
from fuser.ops.arrangements import pad_function
from fuser.ops.index import index_function
from fuser.ops.reductions import reduction_function
from fuser.sections import group_outputs
from fuser.tensor_desc import describe

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    poison()
    yield
    unpoison()


def run(group: FusionGroup, inputs: list[Any]) -> tuple[list[torch.Tensor], int]:
    """Return the outputs and the number of launches; nothing may fall back."""
    fuser.reset_stats()
    results = fuser.run_fusion(fuser.register_fusion(group), inputs)
    assert not fuser.stats()["fallbacks"]
    return results, fuser.stats()["launches"]


def one_by_one(group: FusionGroup, inputs: list[Any]) -> list[torch.Tensor]:
    """Run each application as a group of its own."""
    values = list(inputs)
    for item in group.applications:
        builder = GroupBuilder()
        tensors = [builder.add_input(f"x{place}") for place in range(len(item.tensors))]
        scalars = [builder.add_input(f"s{place}", is_scalar=True) for place in range(len(item.scalars))]
        single = builder.build(builder.apply(item.function, tensors, scalars))
        values += fuser.run_fusion(
            fuser.register_fusion(single), [values[value] for value in (*item.tensors, *item.scalars)]
        )
    return [values[value] for value in group.outputs]


def sum_of(count: int) -> FusionGroup:
    """Return a chain of axpy over ``count`` inputs; a value in its middle, and the last one twice, are outputs."""
    builder = GroupBuilder()
    inputs = [builder.add_input(f"x{place}") for place in range(count)]
    alpha = builder.add_input("alpha", is_scalar=True)
    total, outputs = inputs[0], []
    for step, other in enumerate(inputs[1:]):
        (total,) = builder.apply(functor("axpy").function, [total, other], [alpha])
        if step == count // 3:
            outputs.append(total)
    return builder.build([total, *outputs, total])


@pytest.mark.parametrize(
    "count",
    [pytest.param(MAX_INPUTS - 1, marks=pytest.mark.slow), MAX_INPUTS, pytest.param(200, marks=pytest.mark.slow)],
)
def test_many_inputs(count: int, tier: int) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.float16)
    # As many kinds of inputs as each has shapes: what is compared with takes few kernels.
    dtypes = dtypes if tier == 3 else dtypes[1:4]
    shapes = ((4, 1, 9), (5, 1), (9,), (4, 5, 9), (1,), ())
    inputs: list[Any] = [draw(shapes[seed % 6], dtypes[seed % len(dtypes)], seed=seed) for seed in range(count)]
    inputs[2] = 3
    inputs[7] = 0.5
    inputs.append(0.25)
    group = sum_of(count)
    got, launches = run(group, inputs)
    assert launches == -(-count // (MAX_INPUTS - 1))
    assert_same(got, one_by_one(group, inputs))


def test_intermediate_outputs_of_other_shapes_and_dtypes() -> None:
    builder = GroupBuilder()
    small = [builder.add_input(f"a{place}") for place in range(36)]
    large = [builder.add_input(f"b{place}") for place in range(36)]
    total = small[0]
    for other in small[1:]:
        (total,) = builder.apply(
            OPS["add"].function, [total, other], [builder.add_input("one", is_scalar=True, default=1)]
        )
    (whole,) = builder.apply(cast_function(torch.int32), [total])
    wide = whole
    for other in large:
        (wide,) = builder.apply(OPS["mul"].function, [wide, other])
    group = builder.build([wide, total, whole])
    inputs = [draw((7,), torch.float64, seed=seed) for seed in range(36)]
    inputs += [draw((3, 7), torch.float32, (0.9, 1.1), seed=seed) for seed in range(36)]
    got, launches = run(group, group.fill_inputs(inputs))
    assert launches > 2
    assert_same(got, one_by_one(group, group.fill_inputs(inputs)))
    assert [item.dtype for item in got] == [torch.float32, torch.float64, torch.int32]


def test_more_arguments_than_a_kernel_takes() -> None:
    # No two dimensions merge: 64 inputs with 8 sizes and strides each are more than the limit.
    shape = (2, 3, 2, 3, 2, 1, 2, 3, 2)
    inputs: list[Any] = [
        draw([2 * size for size in shape], torch.float32, seed=seed)[tuple(slice(None, None, 2) for _ in shape)]
        for seed in range(60)
    ]
    group = sum_of(60)
    got, launches = run(group, [*inputs, 0.5])
    assert launches > 1
    assert_same(got, one_by_one(group, [*inputs, 0.5]))
    # Where dimensions merge, the same group is one kernel.
    dense = [item.contiguous() for item in inputs]
    merged, launches = run(group, [*dense, 0.5])
    assert launches == 1
    assert_same([item.contiguous() for item in got], [item.contiguous() for item in merged])


def test_no_argument_struct_is_beyond_the_limit() -> None:
    from fuser import planner

    shape = (2, 3, 2, 3, 2, 1, 2, 3, 2)
    inputs: list[Any] = [torch.empty([2 * size for size in shape])[tuple(slice(None, None, 2) for _ in shape)]] * 60
    spec = fuser.compiler.register(sum_of(60))
    plan = planner.make_plan(spec, [describe(item) for item in [*inputs, 1.0]])
    sizes = [len(step.packer.pack([0] * (len(step.outputs) + len(step.inputs)), [1.0])) for step in plan.steps]
    assert max(sizes) <= MAX_ARGUMENT_BYTES
    assert sum(size > MAX_ARGUMENT_BYTES / 2 for size in sizes) == len(sizes) - 1, "sections are as long as fits"


def test_a_functor_alone_may_be_larger() -> None:
    names = [f"x{place}" for place in range(70)]
    code = (
        f"template <typename T> T total({', '.join(f'T {name}' for name in names)}) {{ return {' + '.join(names)}; }}"
    )
    total = fuser.create_jit_fn(code)
    fuser.reset_stats()
    assert total(*[torch.ones(3, 2).t()] * 35, *[torch.ones(2, 3)] * 35).tolist() == [[70.0] * 3] * 2
    assert fuser.stats()["launches"] == 1


def test_a_functor_that_no_kernel_can_take() -> None:
    names = [f"x{place}" for place in range(400)]
    parameters = ", ".join(f"T {name}" for name in names)
    functor_text = f"template <typename T> T huge({parameters}) {{ goto end; end: return x0; }}"
    inputs = [torch.empty((4,) * 10)[(slice(None, None, 2),) * 10]] * 400
    with pytest.raises(FallbackError, match="'huge' with more than 32760 bytes of sizes and strides"):
        fuser.create_jit_fn(functor_text)(*inputs)
    # Without the goto it has an eager version.
    fuser.reset_stats()
    fuser.create_jit_fn(functor_text.replace("goto end; end: ", ""))(*inputs)
    assert list(fuser.stats()["fallbacks"].values()) == [1]


def test_in_place_where_a_later_launch_reads_it() -> None:
    # 17 outputs are two launches, and the first must not overwrite what the second reads.
    names = [f"o{place}" for place in range(17)]
    body = " ".join(f"{name} = x + T({place});" for place, name in enumerate(names))
    many = fuser.create_multi_output_jit_fn(
        f"template <typename T> void many(T x, {', '.join(f'T& {name}' for name in names)}) {{ {body} }}", 17
    )
    x = draw((5, 6), torch.float32)
    start = x.clone()
    out = [x, *[torch.empty(5, 6) for _ in range(16)]]
    many(x, out=out)
    assert all(torch.equal(item, start + place) for place, item in enumerate(out))


def test_fusion_nodes_are_cut_too() -> None:
    # fuse() bounds a group's inputs itself; a registered group stands in a graph as it is.
    builder = GroupBuilder()
    inputs = [builder.add_input(f"x{place}") for place in range(90)]
    total = inputs[0]
    for other in inputs[1:]:
        (total,) = builder.apply(OPS["maximum"].function, [total, other])
    module = fuser.fx.FusionModule(builder.build([total]))
    tensors = [draw((4, 5), torch.float32, seed=seed) for seed in range(90)]
    fuser.reset_stats()
    assert torch.equal(module(*tensors), torch.stack(tensors).amax(0))
    assert fuser.stats()["launches"] == 2


def test_outputs_of_one_shape_share_launches_up_to_the_bound() -> None:
    assert group_outputs([(3,)] * 17 + [(4,)]) == [[*range(16)], [16], [17]]


def test_no_argument_struct_of_a_gpu_is_beyond_the_limit() -> None:
    shape = (2, 3, 2, 3, 2, 1, 2, 3, 2)
    for count in range(45, 62):
        inputs: list[Any] = [
            torch.empty([2 * size for size in shape])[tuple(slice(None, None, 2) for _ in shape)]
        ] * count
        spec = fuser.compiler.register(sum_of(count))
        for part, args in planner.plan_texts(spec, [*inputs, 1.0], torch.device("cuda")):
            source = build_source(part.group, args, DIALECT)
            space = IterationSpace((2,) * args.rank, ((2,) * args.rank,) * len(source.operands))
            size = len(ArgumentPacker(source, space).template)
            assert size <= MAX_ARGUMENT_BYTES, (count, args.rank, size)


def test_no_argument_struct_of_a_part_is_beyond_the_limit() -> None:
    """Which says of each operand where it begins, too."""
    shape = (4, 3, 4, 3, 4, 5)
    apart = torch.empty([size + 1 for size in shape], device="meta")[tuple(slice(size) for size in shape)]
    for count in range(59, 64):
        builder = GroupBuilder()
        largest, *others = (builder.add_input(f"x{place}") for place in range(count))
        for other in others:
            (largest,) = builder.apply(OPS["maximum"].function, [largest, other])
        pad = pad_function(3, 1, 0, is_contiguous=True)
        spec = register(builder.build(builder.apply(pad, [largest, builder.add_input("number")])))
        texts = planner.plan_texts(spec, [*[apart] * count, 0.0], torch.device("cuda"))
        assert any(args.has_offsets for _, args in texts)
        for part, args in texts:
            source = build_source(part.group, args, DIALECT)
            operands = len(source.operands)
            space = IterationSpace((2,) * args.rank, ((2,) * args.rank,) * operands, offsets=(0,) * operands)
            assert len(ArgumentPacker(source, space).template) <= MAX_ARGUMENT_BYTES, (count, operands)


def test_a_group_in_several_launches_is_replayed() -> None:
    group = sum_of(70)
    inputs = [torch.full((4, 3), float(place)) for place in range(70)]
    key = fuser.register_fusion(group)
    first, second = (fuser.run_fusion(key, [*inputs, 1.0]) for _ in range(2))
    assert len(first) == len(second) == len(group.outputs)
    assert all(map(torch.equal, first, second))


def test_what_a_later_launch_computes_again_needs_no_further_output() -> None:
    # The column beside the quotient would be one, of a shape that the first launch has no element for.
    builder = GroupBuilder()
    column, x = builder.add_input("column"), builder.add_input("x")
    correction = builder.add_input("correction", is_scalar=True)
    (below,) = builder.apply(OPS["square"].function, [column])
    (quotient,) = builder.apply(OPS["div"].function, [x, below])
    (deviation,) = builder.apply(reduction_function("std", (0, 1), True), [quotient], [correction])
    (scaled,) = builder.apply(OPS["mul"].function, [quotient, deviation])
    (totals,) = builder.apply(reduction_function("cumsum", (-1,)), [x])
    (total,) = builder.apply(reduction_function("sum", (0, 1)), [totals])
    group = builder.build([deviation, scaled, total])
    inputs = [torch.rand(1, 500), torch.rand(300, 500), 1]
    texts = planner.plan_texts(register(group), inputs, torch.device("cuda", 0))
    # The three, and the running totals.
    assert sum(len(spec.group.outputs) for spec, _ in texts) == 4


def test_what_all_who_read_it_compute_again_is_no_launch_of_its_own() -> None:
    # The nearest of some codes: the first sum is met before the lengths of the codes, other rows than its own.
    builder = GroupBuilder()
    x, products, codes = builder.add_input("x"), builder.add_input("products"), builder.add_input("codes")
    one = builder.add_input("one", is_scalar=True)
    (first,) = builder.apply(OPS["add"].function, [x, products], [one])
    (squares,) = builder.apply(OPS["square"].function, [codes])
    (lengths,) = builder.apply(reduction_function("sum", (-1,)), [squares])
    (distances,) = builder.apply(OPS["add"].function, [first, lengths], [one])
    (place,) = builder.apply(index_function(1, (-1,)), [distances])
    (nearest,) = builder.apply(reduction_function("argmin", (-1,)), [distances, place])
    spec = register(builder.build([nearest]))
    inputs = [draw((5, 1), torch.float32), draw((5, 16), torch.float32), draw((16, 4), torch.float32), 1]
    texts = planner.plan_texts(spec, inputs, torch.device("cuda", 0))
    assert [len(own.group.outputs) for own, _ in texts] == [1, 1]
    wanted = ((inputs[0] + inputs[1]) + inputs[2].square().sum(-1)).argmin(-1)
    assert torch.equal(fuser.run_fusion(fuser.register_fusion(spec.group), inputs)[0], wanted)


def test_what_all_compute_again_is_no_launch() -> None:
    # A sum of other rows than what it is added to, which the launch after it has to read anyway.
    builder = GroupBuilder()
    x, y, two = builder.add_input("x"), builder.add_input("y"), builder.add_input("two")
    (twice,) = builder.apply(OPS["mul"].function, [x, two])
    (total,) = builder.apply(reduction_function("sum", None), [y])
    (result,) = builder.apply(OPS["maximum"].function, [twice, total])
    inputs = [draw((3,), torch.float32), draw((4, 8), torch.float32), 2]
    group = builder.build([result])
    assert len(planner.plan_texts(register(group), inputs, torch.device("cpu"))) == 2
    assert torch.equal(run(group, inputs)[0][0], torch.maximum(inputs[0] * 2, inputs[1].sum()))


def test_what_kernels_leave_for_each_other_shares_memory() -> None:
    # Ten launches: what one leaves is read by the next and by nobody else.
    builder = GroupBuilder()
    inputs = [builder.add_input(f"x{place}") for place in range(600)]
    total = inputs[0]
    for other in inputs[1:]:
        (total,) = builder.apply(OPS["maximum"].function, [total, other])
    group = builder.build([total])
    tensors = [draw((4, 5), torch.float32, seed=seed) for seed in range(600)]
    plan = planner.make_plan(register(group), [describe(item) for item in tensors])
    assert len(plan.steps) == 10
    assert len(plan.temporaries) == 2
    for step in plan.steps[:-1]:
        # It never writes what it reads.
        assert {len(tensors) + slot for slot in step.outputs}.isdisjoint(step.inputs)
    for _ in range(2):
        assert torch.equal(fuser.run_fusion(fuser.register_fusion(group), tensors)[0], torch.stack(tensors).amax(0))


def test_a_kernel_beside_another_writes_nothing_that_that_one_reads() -> None:
    def part(read: tuple[int, ...], made: tuple[int, ...], *, follows: bool = False) -> Any:
        args = SimpleNamespace(tuning=SimpleNamespace(follows=follows))
        return SimpleNamespace(args=args, inputs=read, outputs=made, targets=(-1,) * len(made))

    value = SimpleNamespace(desc=describe(torch.empty(3)))
    expanded: Any = SimpleNamespace(
        outputs=(None,),
        targets=(0,),
        values=[value] * 6,
        group=SimpleNamespace(outputs=(5,)),
        expansion=SimpleNamespace(inputs=((0, None),)),
    )
    for follows, count in ((False, 2), (True, 3)):
        # The third one writes beside the second, which reads what the first one wrote.
        parts = [part((0,), (1,)), part((1,), (2,)), part((0,), (3,), follows=follows), part((2, 3), (5,))]
        homes, temporaries = planner._find_homes(expanded, parts, 1)
        assert len(temporaries) == count
        assert (homes.written[3] == homes.written[1]) is not follows
