"""torch's ops that are several steps: one application of a group, one kernel or a few."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody uses
from composite_cases import ATEN, CASES, draw, fused, fusion_modules
from cuda_emulation import run_emulated
from torch._subclasses.fake_tensor import FakeTensorMode

import fuser
from fuser.compiler import register
from fuser.config import config
from fuser.errors import GroupError, ShapeError
from fuser.fallback import Fallback
from fuser.graph import FusionGroup, GroupBuilder
from fuser.ops import COMPOSITES, composite_function, composite_steps, expand
from fuser.route import run

# torch keeps statistics of half and bfloat16 in other dtypes on the CPU, which the steps do not follow.
ONLY_FULL = ("batch_norm",)


@pytest.fixture(autouse=True)
def _fast() -> Iterator[None]:
    before, config.numerics = config.numerics, "fast"
    yield
    config.numerics = before


def several(made: Any) -> list[torch.Tensor]:
    made = made if isinstance(made, tuple | list) else (made,)
    return [item for item in made if item is not None]


def is_served(name: str, dtype: torch.dtype) -> bool:
    return dtype in (torch.float32, torch.float64) or not name.startswith(ONLY_FULL)


def error_of(got: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the error of a tensor, as the root of its mean square, in terms of its values' size."""
    size = truth.square().mean().sqrt()
    return float((got.double() - truth).square().mean().sqrt() / size) if got.numel() and size else 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_dtypes_shapes_and_strides_are_torchs(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    tensors = case.tensors(dtype)
    graph_module = fused(case.function, tensors)
    modules = fusion_modules(graph_module)
    assert len(modules) == is_served(name, dtype)
    if not modules:
        return
    (module,) = modules
    (node,) = [node for node in graph_module.graph.nodes if node.op == "call_module"]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        given = [mode.from_tensor(item) for item in tensors]
        found = several(module(*(_bound(item, graph_module, given) for item in node.args)))
    for got, wanted in zip(found, case.run(tensors), strict=True):
        assert (got.dtype, got.shape, got.stride()) == (wanted.dtype, wanted.shape, wanted.stride())


def _bound(item: Any, graph_module: torch.fx.GraphModule, given: list[torch.Tensor]) -> Any:
    # What an argument of the fusion node is: an input of the graph, or a view of one.
    if not isinstance(item, torch.fx.Node):
        return item
    places = {node: slot for slot, node in enumerate(graph_module.graph.find_nodes(op="placeholder"))}
    if item in places:
        return given[places[item]]
    return item.target(*(_bound(one, graph_module, given) for one in item.args))


def check_accuracy(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    tensors = case.tensors(dtype)
    graph_module = fused(case.function, tensors)
    found, wanted = several(graph_module(*tensors)), case.run(tensors)
    doubles = [item.double() if item.is_floating_point() else item for item in tensors]
    truth = case.run(doubles)
    for got, eager, exact in zip(found, wanted, truth, strict=True):
        assert (got.dtype, got.shape, got.stride()) == (eager.dtype, eager.shape, eager.stride())
        # Sums of a few hundred numbers are off by a rounding or two, whoever makes them in their own type, as torch
        # does on a GPU; on the CPU it adds up some of these in double.
        # In float64 torch's own result stands for the truth, and is off by as much.
        roundings = 2 if dtype is torch.float64 else 0.75
        assert error_of(got, exact) <= 1.25 * error_of(eager, exact) + roundings * torch.finfo(dtype).eps


# One form of each op.
QUICK = ("layer_norm", "layer_norm_backward", "batch_norm_backward", "group_norm_backward", "rms_norm_backward")


@pytest.mark.one_in(2)
@pytest.mark.cpu
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in CASES]
)
def test_no_result_is_farther_from_the_truth_than_torchs(name: str) -> None:
    check_accuracy(name, torch.float32)


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_no_result_of_other_dtypes_is_farther(name: str, dtype: torch.dtype) -> None:
    check_accuracy(name, dtype)


def check_emulated(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    tensors = case.tensors(dtype)
    graph_module = fused(case.function, tensors)
    for module in fusion_modules(graph_module):
        (node,) = [node for node in graph_module.graph.nodes if node.op == "call_module"]
        inputs = [_bound(item, graph_module, list(tensors)) for item in node.args]
        wanted = run(module.spec, inputs)
        for got, want in zip(run_emulated(module.group, inputs), wanted, strict=True):
            assert got.dtype == want.dtype
            # The same order, but nothing says that the two compilers contract the same products.
            assert error_of(got, want.double()) <= 4 * torch.finfo(dtype).eps


@pytest.mark.cpu
@pytest.mark.parametrize("name", ["layer_norm_backward"])
def test_cuda_loops(name: str) -> None:
    check_emulated(name, torch.float32)


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(CASES) - {"layer_norm_backward"}))
def test_more_cuda_loops(name: str) -> None:
    check_emulated(name, torch.float32)


# --- groups -----------------------------------------------------------------------------------------------------
def layer_norm_group(outputs: tuple[int, ...] = (0,), *, form: Any = ((24,), True, True, "", False)) -> FusionGroup:
    """Return relu(layer_norm(x + x)), and some of its outputs."""
    builder = GroupBuilder()
    x, weight, bias = (builder.add_input(name) for name in ("x", "weight", "bias"))
    eps = builder.add_input("eps", is_scalar=True, default=1e-5)
    (sum_,) = builder.apply(fuser.jit_fn("template <typename T> T twice(T x) { return x + x; }").function, [x])
    made = builder.apply(composite_function("native_layer_norm", form), [sum_, weight, bias], [eps])
    return builder.build([made[slot] for slot in outputs])


def test_a_composite_is_one_application_as_text_and_as_key() -> None:
    group = layer_norm_group((0, 1))
    group.lint()
    assert "= native_layer_norm(v4, v1, v2, eps=v3)" in str(group)
    again = FusionGroup.from_json(group.to_json())
    assert again.applications == group.applications
    assert again.key == group.key
    assert layer_norm_group((0, 1), form=((24,), True, True, "bfloat16", False)).key != group.key
    assert register(group).group.names() == ["twice", "native_layer_norm"]


@pytest.mark.parametrize("form", [["x"], [[24], True, False, "", False], [[24], True, True, "", False, 1]])
def test_a_form_that_is_none_is_refused(form: Any) -> None:
    text = layer_norm_group().to_json(indent=None)
    assert '"form":[[24],true,true,"",false]' in text
    changed = text.replace('"form":[[24],true,true,"",false]', f'"form":{str(form).replace("True", "true")}')
    changed = changed.replace("False", "false").replace("'", '"')
    with pytest.raises(GroupError, match="no op 'native_layer_norm' of the form"):
        register(FusionGroup.from_json(changed))


def test_what_nobody_reads_is_not_computed() -> None:
    assert len(expand(register(layer_norm_group((0, 1, 2))).group).group.outputs) == 3
    whole = expand(register(layer_norm_group((0,))).group)
    assert len(whole.group.outputs) == 1
    # The sum before it, the mean, the variance, its root and the result.
    assert len(whole.group.applications) == 5
    assert len(expand(register(layer_norm_group((1,))).group).group.applications) == 2


def test_every_op_of_the_table_has_steps_that_say_what_it_takes() -> None:
    for name, case in CASES.items():
        graph_module = fused(case.function, case.tensors(torch.float32))
        for module in fusion_modules(graph_module):
            for item in module.group.applications:
                function = item.function
                assert function.op in COMPOSITES, name
                assert function == composite_function(str(function.op), function.form or ())
                steps = composite_steps(str(function.op), function.form or (), is_ordered=True)
                assert len(steps.outputs) == function.num_outputs


@pytest.mark.cpu
def test_rows_then_columns_take_two_launches() -> None:
    def call(grad: Any, x: Any, mean: Any, rstd: Any, weight: Any, bias: Any, y: Any) -> Any:
        grad = ATEN.threshold_backward(grad, y, 0)
        made = ATEN.native_layer_norm_backward(grad, x, [24], mean, rstd, weight, bias, [True] * 3)
        return (ATEN.mul.Tensor(made[0], made[0]), *made)

    tensors = [*CASES["layer_norm_backward"].tensors(torch.float32), draw(5, 3, 24, seed=20)]
    graph_module = fused(call, tensors)
    graph_module(*tensors)
    fuser.reset_stats()
    found = graph_module(*tensors)
    assert fuser.stats()["launches"] == 2
    assert fuser.stats()["fallbacks"] == {}
    for got, wanted in zip(found, call(*tensors), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.cpu
def test_what_meets_groups_of_channels_is_computed_in_their_shape() -> None:
    def call(x: Any, weight: Any, bias: Any, scale: Any, other: Any) -> Any:
        before = ATEN.tanh(x) * 2.0 + scale
        out, mean, rstd = ATEN.native_group_norm(before, weight, bias, 3, 6, 20, 2, 1e-5)
        return before, ATEN.silu(out) * scale + before, mean * 2, rstd, other + 1

    tensors = CASES["group_norm"].tensors(torch.float32)
    for scale in (draw(6, 1, 1), draw(4), draw(3, 1, 5, 1), draw(3, 6, 5, 4).to(memory_format=torch.channels_last)):
        given = [*tensors, scale, draw(2, 2)]
        graph_module = fused(call, given)
        found = graph_module(*given)
        fuser.reset_stats()
        graph_module(*given)
        # The last one has nothing to do with them.
        assert fuser.stats()["launches"] == 2
        for got, wanted in zip(found, call(*given), strict=True):
            torch.testing.assert_close(got, wanted)
            assert got.stride() == wanted.stride()


@pytest.mark.cpu
def test_what_does_not_fit_that_shape_gets_a_launch_of_its_own() -> None:
    def more(x: Any, weight: Any, bias: Any, other: Any) -> Any:
        return ATEN.native_group_norm(x, weight, bias, 3, 6, 20, 2, 1e-5)[0] + other

    def again(x: Any, weight: Any, bias: Any, other: Any) -> Any:
        out = ATEN.native_group_norm(x.amax(-1, keepdim=True) + x, weight, bias, 3, 6, 20, 2, 1e-5)[0]
        return ATEN.native_group_norm(out, weight, bias, 3, 6, 20, 3, 1e-5)[0] + other

    tensors = [*CASES["group_norm"].tensors(torch.float32), draw(2, 3, 6, 5, 4)]
    for call in (more, again):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = fused(call, tensors)(*tensors)
        torch.testing.assert_close(found, call(*tensors))


@pytest.mark.cpu
def test_strict_numerics_leave_torchs_order_to_torch() -> None:
    config.numerics = "strict"
    for name in ("layer_norm", "batch_norm", "layer_norm_backward", "group_norm"):
        case = CASES[name]
        tensors = case.tensors(torch.float32)
        graph_module = fused(case.function, tensors)
        assert fusion_modules(graph_module) == []
    # Nothing is added up here.
    case = CASES["nll_loss_backward weighted"]
    for dtype in (torch.float32, torch.bfloat16):
        tensors = case.tensors(dtype)
        graph_module = fused(case.function, tensors)
        assert len(fusion_modules(graph_module)) == 1
        assert torch.equal(graph_module(*tensors), case.function(*tensors))
    x, weight, bias = CASES["layer_norm"].tensors(torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = run(register(layer_norm_group((0, 1, 2))), [x, weight, bias, 1e-5])
    for got, wanted in zip(found, torch.native_layer_norm(x + x, (24,), weight, bias, 1e-5), strict=True):
        assert torch.equal(got, wanted)


def test_in_eager_torch_it_is_torchs_op() -> None:
    for name, case in CASES.items():
        tensors = case.tensors(torch.float32)
        graph_module = fused(case.function, tensors)
        if case.reference is not None:
            continue
        (module,) = fusion_modules(graph_module)
        (node,) = [node for node in graph_module.graph.nodes if node.op == "call_module"]
        inputs = [_bound(item, graph_module, list(tensors)) for item in node.args]
        found = Fallback(module.group).run(module.group.fill_inputs(inputs), "asked for")
        for got, wanted in zip(found, case.run(tensors), strict=True):
            assert torch.equal(got, wanted), name


# --- programs ---------------------------------------------------------------------------------------------------
@pytest.mark.cpu
def test_norms_in_a_fused_function() -> None:
    @fuser.fuse
    def step(x: Any, weight: Any, bias: Any) -> Any:
        y = F.silu(F.layer_norm(x + 1, (24,), weight, bias))
        return F.rms_norm(y, (24,), weight, 1e-6) * 2 + torch.layer_norm(x, (3, 24))

    x, weight, bias = CASES["layer_norm"].tensors(torch.float32)
    torch.testing.assert_close(step(x, weight, bias), step.function(x, weight, bias))
    assert len(step.groups) == 1
    x.requires_grad_()
    wanted = torch.autograd.grad(step.function(x, weight, bias).sum(), x)
    torch.testing.assert_close(torch.autograd.grad(step(x, weight, bias).sum(), x), wanted)


@pytest.mark.cpu
def test_modules_of_norms() -> None:
    model = torch.nn.Sequential(
        torch.nn.LayerNorm(24), torch.nn.GELU(), torch.nn.RMSNorm(24), torch.nn.LayerNorm(24, bias=False)
    )
    step = fuser.fuse(model)
    x = draw(5, 24)
    with torch.no_grad():
        torch.testing.assert_close(step(x), model(x))
        model[0].weight.mul_(2)
        torch.testing.assert_close(step(x), model(x))


@pytest.mark.cpu
@pytest.mark.parametrize("name", ["batch_norm", "batch_norm in evaluation", "group_norm", "rms_norm"])
def test_norms_lie_as_torchs(name: str) -> None:
    mean, var = torch.zeros(6), torch.ones(6)
    norms = {
        "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
        "batch_norm in evaluation": lambda x: F.batch_norm(x, mean, var),
        "group_norm": lambda x: F.group_norm(x, 2),
        "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    }
    step = fuser.fuse(lambda x: norms[name](x * 2))
    images = draw(2, 6, 4, 5)
    last = images.contiguous(memory_format=torch.channels_last)
    # One function for all: what it found of one layout does not serve the next.
    for x in (images, last, last[:, :, ::2], images.mT, draw(6, 2, 4, 5).transpose(0, 1), images[0], images[0].mT):
        if x.dim() == 4 or name == "rms_norm":
            torch.testing.assert_close(step(x), step.function(x), check_stride=True)
    x = draw(6, 2).t() if name != "rms_norm" else draw(5, 2).t()
    torch.testing.assert_close(step(x), step.function(x), check_stride=True)


def test_a_wrong_shape_is_torchs_error() -> None:
    step = fuser.fuse(lambda x, weight: F.layer_norm(x * 2, (weight.shape[0],), weight))
    for x, weight in ((draw(5, 24), draw(23)), (draw(24, 23), draw(1))):
        with pytest.raises(RuntimeError, match="normalized_shape"):
            step.function(x, weight)
        with pytest.raises(ShapeError, match="normalized_shape"):
            step(x, weight)


@pytest.mark.cpu
def test_a_group_with_a_composite_is_differentiated_and_batched_by_torch() -> None:
    spec = register(layer_norm_group((0,)))
    x, weight, bias = (item.double().requires_grad_() for item in CASES["layer_norm"].tensors(torch.float32))

    def wanted(x: Any, weight: Any, bias: Any) -> Any:
        return F.layer_norm(x + x, (24,), weight, bias)

    def got(x: Any, weight: Any, bias: Any) -> Any:
        return run(spec, [x, weight, bias, 1e-5])[0]

    gradients = [torch.autograd.grad(f(x, weight, bias).square().sum(), (x, weight, bias)) for f in (got, wanted)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
    batched = [torch.func.vmap(f, in_dims=(0, None, None))(x, weight, bias) for f in (got, wanted)]
    torch.testing.assert_close(*batched)


@pytest.mark.cpu
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_target_takes_one_class_out(reduction: str) -> None:
    def call(x: Any, target: Any, weight: Any) -> Any:
        return F.cross_entropy(x, target, weight, ignore_index=3, reduction=reduction)

    x, target = draw(33, 10), torch.arange(33) % 10
    x[2, 5] = float("-inf")
    x[6, 0] = float("nan")
    weight = draw(10).abs()
    target[6] = 3
    graph_module = fused(call, [x, target, weight])
    torch.testing.assert_close(graph_module(x, target, weight), call(x, target, weight))
    target[0] = 10
    assert graph_module(x, target, weight).isnan()
    target[:] = 3
    torch.testing.assert_close(graph_module(x, target, weight), call(x, target, weight), equal_nan=True)


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [torch.int32, torch.bool])
def test_a_target_of_another_dtype_is_torchs_error(dtype: torch.dtype) -> None:
    # Its shape functions let it pass.
    x, target = draw(6, 5).requires_grad_(), (torch.arange(6) % 2).to(dtype)
    step = torch.compile(
        lambda x, target: F.cross_entropy(x * 2, target), backend="fuser", options={"numerics": "fast"}
    )
    # As torch 2.13 says it, and as 2.11 does.
    with pytest.raises(RuntimeError, match=r"expected (target dtype to be Long or Byte|scalar type Long but found)"):
        step(x, target)
