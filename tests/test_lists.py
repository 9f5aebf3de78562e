"""Operators of lists in compiled graphs: a compiled optimizer's step is few launches and keeps its bits."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functors import draw, same_bits
from graph_checks import compare, trace
from torch import nn, optim

import fuser
from fuser.fx.lists import ListFusion, _Reader
from fuser.fx.recording import record_graphs

pytestmark = [pytest.mark.usefixtures("fresh_dynamo")]

SHAPES = ((8, 4), (16,), (3, 5, 2), (7,), (40, 3), (1,))
OPTIMIZERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "adamw": (optim.AdamW, {"lr": 1e-3}),
    "amsgrad": (optim.Adam, {"lr": 1e-2, "amsgrad": True, "maximize": True}),
    "sgd": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "rmsprop": (optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5}),
    "adagrad": (optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}),
    "nadam": (optim.NAdam, {"lr": 0.1}),
    "adadelta": (optim.Adadelta, {}),
    "rprop": (optim.Rprop, {}),
    "adamax": (optim.Adamax, {}),
}


@pytest.fixture
def without_kernels() -> Iterator[None]:
    """Run groups in eager torch, whose bits are those of the operators that they stand for."""
    fuser.override_can_fuse_on_cpu(False)
    yield
    fuser.override_can_fuse_on_cpu(True)


def make(kind: str, dtype: torch.dtype, device: str, shapes: Any = SHAPES) -> tuple[list[nn.Parameter], Any]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    parameters = [nn.Parameter(item.t() if item.dim() == 2 else item) for item in drawn]
    create, options = OPTIMIZERS[kind]
    return parameters, create(parameters, foreach=True, **options)


def train(kind: str, backend: str | None, dtype: torch.dtype, device: str, steps: int = 3) -> list[torch.Tensor]:
    """Return parameters and the optimizer's state after some steps."""
    torch._dynamo.reset()
    parameters, optimizer = make(kind, dtype, device)
    step = optimizer.step if backend is None else torch.compile(lambda: optimizer.step(), backend=backend)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for item in parameters:
            item.grad = torch.randn(item.shape, generator=generator).to(item)
        step()
    state = [value for item in parameters for value in optimizer.state[item].values()]
    return [*(item.detach() for item in parameters), *(item for item in state if isinstance(item, torch.Tensor))]


def assert_steps_equal(kind: str, dtype: torch.dtype, device: str) -> None:
    wanted, made = train(kind, "aot_eager", dtype, device), train(kind, "fuser", dtype, device)
    assert [torch.equal(*pair) for pair in zip(made, wanted, strict=True)] == [True] * len(wanted)


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.usefixtures("without_kernels")
@pytest.mark.filterwarnings("ignore::fuser.errors.FallbackWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_keep_their_bits(kind: str, dtype: torch.dtype) -> None:
    assert_steps_equal(kind, dtype, "cpu")


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_keep_their_bits_on_cuda(kind: str, dtype: torch.dtype) -> None:
    assert_steps_equal(kind, dtype, "cuda")


@pytest.mark.cpu
@pytest.mark.slow
def test_a_step_is_two_launches_that_write_in_place() -> None:
    # What has one element is a launch of its own.
    parameters, optimizer = make("adamw", torch.float32, "cpu", SHAPES[:-1])
    for item in parameters:
        item.grad = torch.ones_like(item)
    optimizer.step()
    before = [item.detach().clone() for item in parameters]
    compiled = torch.compile(lambda: optimizer.step(), backend="fuser")
    compiled()
    fuser.reset_stats()
    compiled()
    assert fuser.stats()["launches"] == 2
    assert not fuser.stats()["fallbacks"]
    assert not any(map(torch.equal, before, parameters))
    (graph,) = record_graphs(compiled, (), {})
    fusions = [item for item in graph.module.children() if isinstance(item, ListFusion)]
    assert len(fusions) == 2
    # Steps are written in place, and two more numbers are for the other launch; nothing is left to be copied.
    outs = [[own is not None for own in node.kwargs["out"]] for node in graph.module.graph.find_nodes(op="call_module")]
    assert sorted(outs) == [[True, False, False], [True, True, True]]
    assert not any("copy" in str(node.target) for node in graph.module.graph.nodes)
    assert "2 groups" in str(fuser.explain(compiled))


def run_both(function: Callable[..., Any], *args: Any) -> None:
    """Compare results, and arguments that were written to, with the same graph's without fusion."""
    found = []
    for backend in ("aot_eager", "fuser"):
        torch._dynamo.reset()
        own = [[item.clone() for item in items] for items in args]
        made = torch.compile(function, backend=backend)(*own)
        found.append([*torch.utils._pytree.tree_leaves(made), *(item for items in own for item in items)])
    assert [torch.equal(*pair) for pair in zip(*found, strict=True)] == [True] * len(found[0])


def lists(count: int = 2, shapes: Any = SHAPES) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(count)]


def crossed(x: list[torch.Tensor], y: list[torch.Tensor]) -> Any:
    # Each position reads what the next one makes.
    doubled = torch._foreach_mul(x, 2.0)
    torch._foreach_copy_(x, torch._foreach_add([*doubled[1:], doubled[0]], y))
    return doubled


def rotated(x: list[torch.Tensor], y: list[torch.Tensor]) -> Any:
    # Each is overwritten, and the next one reads what it was.
    torch._foreach_mul_(x, [*x[1:], x[0]])
    return torch._foreach_add(y, 1.0)


def read_again(x: list[torch.Tensor], y: list[torch.Tensor]) -> Any:
    # What is overwritten is read beside what it becomes.
    old = [item + 1 for item in x]
    torch._foreach_mul_(x, y)
    return [one * other for one, other in zip(old, x, strict=True)], torch._foreach_sub(y, x)


def interleaved(x: list[torch.Tensor], y: list[torch.Tensor]) -> Any:
    # Numbers of each position, which come from its tensors and go back into them.
    norms = torch._foreach_norm(x)
    scaled = torch._foreach_div(x, torch._foreach_add(norms, 1e-6))
    again = torch._foreach_norm(torch._foreach_mul(scaled, y))
    return torch._foreach_mul(torch._foreach_sqrt(torch._foreach_abs(scaled)), again), norms


@pytest.mark.cpu
@pytest.mark.usefixtures("without_kernels")
@pytest.mark.filterwarnings("ignore::fuser.errors.FallbackWarning")
@pytest.mark.parametrize(
    "function", [read_again, *(pytest.param(item, marks=pytest.mark.slow) for item in (crossed, rotated, interleaved))]
)
def test_what_positions_and_graphs_have_to_do_with_each_other(function: Callable[..., Any]) -> None:
    shapes = [(4, 3)] * 5 if function in {crossed, rotated} else SHAPES
    run_both(function, *lists(shapes=shapes))


@pytest.mark.cpu
def test_the_first_call_takes_few_launches_too() -> None:
    # AOTAutograd looks at it through a mode.
    step = torch.compile(lambda xs, ys: torch._foreach_add_(xs, torch._foreach_mul(ys, 0.5)), backend="fuser")
    for xs, ys in (lists(), lists()):
        wanted = [x + y * 0.5 for x, y in zip(xs, ys, strict=True)]
        fuser.reset_stats()
        step(xs, ys)
        assert fuser.stats()["launches"] == 1
        assert all(map(torch.equal, xs, wanted))


@pytest.mark.cuda
def test_five_hundred_tensors_are_four_launches() -> None:
    shapes = [(64 + slot % 7, 32) if slot % 3 else (64 + slot % 5,) for slot in range(500)]
    parameters, optimizer = make("adamw", torch.float32, "cuda", shapes)
    for item in parameters:
        item.grad = torch.ones_like(item)
    optimizer.step()
    compiled = torch.compile(lambda: optimizer.step(), backend="fuser")
    compiled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        compiled()
    assert len([item for item in profile.events() if item.device_type == torch.autograd.DeviceType.CUDA]) <= 4


ATEN = torch.ops.aten
TENSORS = [torch.randn(4, 4), torch.randn(4, 4), torch.randn(4, 4)]


def views(call: Any, x: Any, y: Any, z: Any) -> Any:
    turned = [call(ATEN.t.default, item) for item in (x, y)]
    # Between the views and their sums, so that the two are no one step.
    product = call(ATEN.mm.default, turned[0], turned[1])
    return call(operator.getitem, call(ATEN._foreach_add.List, turned, [product, y]), 0)


def made_of_each_other(call: Any, x: Any, y: Any, z: Any) -> Any:
    first = call(ATEN.neg.default, x)
    return call(operator.getitem, call(ATEN._foreach_abs.default, [call(ATEN.neg.default, first), first]), 0)


def in_two_places(call: Any, x: Any, y: Any, z: Any) -> Any:
    made = [call(ATEN.abs.default, item) for item in (x, y, z)]
    lists = call(ATEN._foreach_sub.List, [made[1], x, x], [made[1], made[2], made[0]])
    return call(operator.getitem, lists, 1)


@pytest.mark.parametrize("write", [views, made_of_each_other, in_two_places])
def test_what_is_no_list_of_operators(write: Callable[..., Any], without_kernels: None) -> None:
    compare(trace(write, TENSORS), TENSORS, [], 0)


@pytest.mark.cpu
def test_numbers_that_are_returned_have_memory_of_their_own() -> None:
    """Those that a step hands from one launch to the next are one tensor's elements."""
    numbers = [torch.tensor(float(slot)) for slot in range(4)]

    def count(given: list[torch.Tensor]) -> Any:
        torch._foreach_add_(given, 1.0)
        return torch._foreach_mul(given, 3.0)

    made = torch.compile(count, backend="fuser")(numbers)
    assert [item.item() for item in (*numbers, *made)] == [1.0, 2.0, 3.0, 4.0, 3.0, 6.0, 9.0, 12.0]
    assert len({item.untyped_storage().data_ptr() for item in made}) == 4


@pytest.mark.parametrize("shapes", [((), (3, 5)), ((3, 5), ())])
@pytest.mark.parametrize(("dtype", "count"), [(torch.float32, 1), (torch.bfloat16, 0)])
def test_tensors_without_dimensions_are_as_others_but_beside_other_dtypes(
    shapes: Any, dtype: torch.dtype, count: int
) -> None:
    """A learned temperature among the parameters of a model."""
    given = [torch.ones(shape) for shape in shapes] + [torch.ones(shape, dtype=dtype) for shape in shapes]
    made = trace(lambda call, *x: call(ATEN._foreach_mul.List, list(x[:2]), list(x[2:])), given)
    reader = _Reader(is_strict=True)
    reader.read(*made.graph.find_nodes(op="call_function", target=ATEN._foreach_mul.List))
    assert len(reader.ops) == count


@pytest.mark.parametrize(("strides", "count"), [((1, 1, 1), 1), ((1, 6, 6), 0)])
def test_lists_whose_results_cuda_lays_out_otherwise_stay_torchs(strides: tuple[int, ...], count: int) -> None:
    given = [torch.empty_strided((6, 1, 1), strides) for _ in range(2)]
    made = trace(lambda call, *x: call(ATEN._foreach_exp.default, list(x)), given, "cuda")
    reader = _Reader(is_strict=True)
    (listed,) = made.graph.find_nodes(op="call_function", target=ATEN._foreach_exp.default)
    reader.read(listed)
    assert len(reader.ops) == count
    # Nor where it is known how CUDA lays them out.
    listed.meta["val"] = [item.meta["val"] for item in listed.args[0]]
    reader = _Reader(is_strict=True)
    reader.read(listed)
    assert len(reader.ops) == count


@pytest.mark.parametrize(("device", "is_strict", "count"), [("cuda", True, 0), ("cuda", False, 1)])
def test_norms_that_cuda_adds_up_in_an_order_of_their_own_stay_torchs(
    device: str, *, is_strict: bool, count: int
) -> None:
    made = trace(lambda call, *x: call(ATEN._foreach_norm.Scalar, list(x), 2), TENSORS, device)
    reader = _Reader(is_strict=is_strict)
    reader.read(*made.graph.find_nodes(op="call_function", target=ATEN._foreach_norm.Scalar))
    assert len(reader.ops) == count


@pytest.mark.parametrize(("device", "is_strict", "count"), [("cuda", True, 0), ("cuda", False, 1), ("cpu", True, 1)])
def test_powers_that_cuda_makes_of_lists_as_such_stay_torchs(device: str, *, is_strict: bool, count: int) -> None:
    """A tensor alone is multiplied by itself."""
    made = trace(lambda call, *x: call(ATEN._foreach_pow.Scalar, list(x), 3), TENSORS, device)
    reader = _Reader(is_strict=is_strict)
    reader.read(*made.graph.find_nodes(op="call_function", target=ATEN._foreach_pow.Scalar))
    assert len(reader.ops) == count


@pytest.mark.cuda
@pytest.mark.parametrize("sizes", [(5,), (300, 7), (1000, 70000)])
def test_norms_of_lists_have_torchs_bits_on_cuda(sizes: tuple[int, ...]) -> None:
    """As gradients are clipped: the norm of norms, and what it scales."""
    given = [draw((size, 3), torch.float32, seed=size).cuda() for size in sizes]

    def clip(x: list[torch.Tensor]) -> list[torch.Tensor]:
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(torch._foreach_mul(x, 1.5))))
        return [norm, *torch._foreach_mul(x, 1 / (norm + 1e-6))]

    wanted, made = (torch.compile(clip, backend=backend)(given) for backend in ("aot_eager", "fuser"))
    assert all(map(torch.equal, made, wanted))


def test_operators_of_a_list_may_leave_out_what_has_a_default() -> None:
    def step(call: Any, x: Any, y: Any) -> Any:
        made = [call(ATEN.std.default, x, True), call(ATEN.std.default, y)]
        return call(ATEN._foreach_minimum.Scalar, made, 2)

    given = [torch.randn(4, 6), torch.randn(3)]
    compare(trace(step, given), given, [], 0)


def maxima(x: list[torch.Tensor], y: list[torch.Tensor]) -> list[torch.Tensor]:
    """All elements but NaN beside each other, in lists and in tensors."""
    lists = [torch._foreach_maximum(x, y), torch._foreach_minimum(x, y), torch._foreach_clamp_min(x, 0.0)]
    lists += [torch._foreach_clamp_max(x, -0.0)]
    return [item * 1 for made in lists for item in made] + [torch.maximum(a, b) for a, b in zip(x, y, strict=True)]


def check_maxima(device: str) -> list[ListFusion]:
    """Compare with what aot_eager gives; return what stands for the lists."""
    values = torch.tensor([0.0, -0.0, 1.0, float("nan")])
    # Whole vectors of the CPU.
    pair = (item.flatten().to(device) for item in torch.meshgrid(values, values, indexing="ij"))
    lists = [[item.repeat(4), item.repeat(8)] for item in pair]
    compiled = torch.compile(maxima, backend="fuser")
    assert all(map(same_bits, compiled(*lists), torch.compile(maxima, backend="aot_eager")(*lists)))
    (graph,) = record_graphs(compiled, tuple(lists), {})
    return [module for module in graph.module.children() if isinstance(module, ListFusion)]


@pytest.mark.cpu
def test_larger_elements_of_lists() -> None:
    assert check_maxima("cpu")


@pytest.mark.cuda
def test_larger_elements_of_lists_on_cuda() -> None:
    """Of two zeros CUDA's kernels of lists take the second one, those of tensors the positive one."""
    assert check_maxima("cuda")
