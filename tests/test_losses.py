"""torch's losses: their bits, their gradients', what they say of sizes and arguments, on the CPU and a GPU."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from accuracy import assert_form, outcome
from functors import poison, same_bits, unpoison
from graph_checks import trace
from torch import fx

import fuser
from fuser.config import config
from fuser.errors import FallbackWarning
from fuser.fx.buffers import drop_unread
from fuser.ops import OPS

pytestmark = [
    pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning"),
    pytest.mark.filterwarnings("ignore:An output with one or more elements was resized"),
]
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DEVICES = [pytest.param("cpu", marks=pytest.mark.cpu), pytest.param("cuda", marks=pytest.mark.cuda)]
ATEN: Any = torch.ops.aten
Loss = Callable[..., Any]


def signs(y: torch.Tensor) -> torch.Tensor:
    return torch.where(y > 0.5, 1.0, -1.0).to(y.dtype)


# Those that are one rounded step after another have torch's bits on a CPU, too.
EXACT: dict[str, Loss] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": lambda x, y, **rest: F.smooth_l1_loss(x, y, beta=0.3, **rest),
    "huber": lambda x, y, **rest: F.huber_loss(x, y, delta=0.3, **rest),
    "hinge": lambda x, y, **rest: F.hinge_embedding_loss(x, signs(y), **rest),
    "ranking": lambda x, y, **rest: F.margin_ranking_loss(x, y, signs(y), 0.1, **rest),
}
LOSSES: dict[str, Loss] = {
    **EXACT,
    "logits": F.binary_cross_entropy_with_logits,
    "weighted": lambda x, y, **rest: F.binary_cross_entropy_with_logits(x, y, y[0] + 1, pos_weight=y[1], **rest),
    "kl_div": F.kl_div,
    "log_target": lambda x, y, **rest: F.kl_div(x, y, log_target=True, **rest),
    "poisson": lambda x, y, **rest: F.poisson_nll_loss(x, 4 * y, full=True, **rest),
    "rates": lambda x, y, **rest: F.poisson_nll_loss(x.abs(), y, log_input=False, **rest),
    "soft_margin": lambda x, y, **rest: F.soft_margin_loss(x, signs(y), **rest),
    "labels": F.multilabel_soft_margin_loss,
    "cosine": lambda x, y, **rest: F.cosine_embedding_loss(x, y, signs(y[:, 0]), 0.1, **rest),
}
# Of probabilities, and norms: on a GPU.
ON_A_GPU: dict[str, Loss] = {
    "entropy": lambda x, y, **rest: F.binary_cross_entropy(torch.sigmoid(x), y, **rest),
    "weighted_entropy": lambda x, y, **rest: F.binary_cross_entropy(torch.sigmoid(x), y, y[0], **rest),
    "distance": lambda x, y, reduction: F.pairwise_distance(x, y) * len(reduction),
    "triplet": lambda x, y, **rest: F.triplet_margin_loss(x, y, y * 2, swap=True, **rest),
}


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    poison()
    yield
    unpoison()


def draw(dtype: torch.dtype, device: str = "cpu", shape: tuple[int, ...] = (32, 128)) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return tuple(make(shape).to(device, dtype) for make in (torch.randn, torch.rand))


def gradient(function: Loss, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.clone().requires_grad_()
    made = function(x, y)
    torch.manual_seed(1)
    weight = torch.randn(made.shape).to(made)
    return made.detach(), torch.autograd.grad(made, x, weight)[0]


def assert_same(got: torch.Tensor, wanted: torch.Tensor, what: str, *, is_exact: bool) -> None:
    assert_form(got, wanted, what)
    if is_exact:
        assert same_bits(got, wanted), what
    elif got.dtype is torch.float16:
        # A logarithm that rounds to its neighbour is multiplied by up to four: one unit of terms up to eight.
        torch.testing.assert_close(got, wanted, msg=what, rtol=2**-10, atol=2**-8, equal_nan=True)
    else:
        torch.testing.assert_close(got, wanted, msg=what, equal_nan=True)


def is_exact(name: str, device: str, dtype: torch.dtype) -> bool:
    # ATen's logarithms on the CPU are others than a kernel's, by some ULP.
    return device == "cuda" or name in EXACT or dtype is torch.bfloat16


def check(name: str, loss: Loss, reduction: str, dtype: torch.dtype, device: str) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss(x, y, reduction=reduction)

    x, y = draw(dtype, device)
    what, exact = f"{name}, {reduction}, {dtype}", is_exact(name, device, dtype)
    fused = fuser.fuse(function)
    fuser.reset_stats()
    assert_same(fused(x, y), function(x, y), what, is_exact=exact)
    assert fuser.stats()["launches"], what
    assert fuser.stats()["fallbacks"] == {}, what
    calls = [node for node in fused.graph_module.graph.nodes if "loss" in str(node.target)]
    assert not calls, f"{what}: {calls}"
    for got, wanted in zip(gradient(fuser.fuse(function), x, y), gradient(function, x, y), strict=True):
        assert_same(got, wanted, what, is_exact=exact)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", [*LOSSES, *ON_A_GPU])
def test_losses_have_eagers_bits(name: str, dtype: torch.dtype, device: str, tier: int) -> None:
    if name in ON_A_GPU and device == "cpu":
        pytest.skip("stays torch's on a CPU")
    for reduction in ("none", "mean", "sum") if tier == 3 or device == "cuda" else ("mean",):
        check(name, (LOSSES | ON_A_GPU)[name], reduction, dtype, device)


@pytest.mark.cpu
@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", LOSSES)
def test_each_element_has_a_loss(name: str) -> None:
    check(name, LOSSES[name], "none", torch.bfloat16, "cpu")


@pytest.mark.one_in(8)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("numerics", ["strict", "fast"])
@pytest.mark.parametrize("name", EXACT)
def test_layouts(name: str, numerics: str, device: str) -> None:
    x, y = draw(torch.float32, device, (6, 6))
    given = [
        (x.t(), y), (x, y.t()), (x[:0], y[:0]), (x[0, 0], y[0, 0]), (x[::2], y[1::2]), (x[:, :1].expand(6, 6), y),
        (x.expand(2, 6, 6), y.expand(2, 6, 6)), (x[:1, :1], y[:1, :1]),
    ]  # fmt: skip
    with config.patch(numerics=numerics):
        for reduction in ("none", "mean", "sum"):
            fused = fuser.fuse(lambda x, y, reduction=reduction: EXACT[name](x, y, reduction=reduction))
            for a, b in given:
                wanted = EXACT[name](a, b, reduction=reduction)
                assert_same(fused(a, b), wanted, f"{name}, {a.shape}, {a.stride()}", is_exact=numerics == "strict")


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_kernels_of_probabilities(dtype: torch.dtype) -> None:
    """On a CPU F.binary_cross_entropy stays torch's, which refuses what is no probability; its kernel runs there."""
    (x, y), function = (item.abs().clamp(max=1) for item in draw(dtype)), OPS["binary_cross_entropy"].function
    builder = fuser.GroupBuilder()
    group = builder.build(builder.apply(function, [builder.add_input(name) for name in "xy"]))
    x.view(-1)[:4] = torch.tensor([0, 1, 0, 1])
    y.view(-1)[:4] = torch.tensor([0, 0, 1, 1])
    (got,) = fuser.run_fusion(fuser.register_fusion(group), [x, y])
    assert_same(got, F.binary_cross_entropy(x, y, reduction="none"), "", is_exact=dtype is torch.bfloat16)
    fused = fuser.fuse(lambda x, y: F.binary_cross_entropy(torch.relu(x), y))
    assert torch.equal(fused(x, y), F.binary_cross_entropy(x, y))
    with pytest.raises(RuntimeError, match="between 0 and 1"):
        fused(x + 1, y)


# --- what torch says -------------------------------------------------------------------------------------------------
def said(function: Loss, *args: Any) -> tuple[Any, list[str]]:
    """Return a result or an exception, and what was warned of; not what torch's C++ says once in a process."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = outcome(function, *args)
    shown = [str(item.message) for item in caught if not issubclass(item.category, FallbackWarning)]
    return made, [message for message in shown if "(Triggered internally at" not in message]


def assert_says_the_same(fused: Loss, function: Loss, *args: Any) -> None:
    (got, ours), (wanted, theirs) = said(fused, *args), said(function, *args)
    assert ours == theirs
    if isinstance(wanted, Exception):
        assert isinstance(got, type(wanted)), f"{got!r} instead of {wanted!r}"
    else:
        assert_same(got, wanted, "", is_exact=False)


SIZES = ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits"]


@pytest.mark.cpu
@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [*SIZES, "binary_cross_entropy"])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_sizes(name: str, reduction: str) -> None:
    """Broadcast, torch warns of them or refuses them, in each call."""
    loss, (_, x) = getattr(F, name), draw(torch.float32, shape=(4, 6))
    for function in (
        lambda x, y: loss(x, y, reduction=reduction),
        lambda x, y: loss(torch.tanh(x), y.abs(), reduction=reduction) * 2,
    ):
        fused = fuser.fuse(function)
        for y in (x, x[0], x[:, :1], x[0, :5], x, x[None], x[0, 0]):
            for _ in range(2):
                assert_says_the_same(fused, function, x, y)
                assert_says_the_same(fused, function, y, x)
    # One without dimensions has, as large as the other one, the same weight in promotion.
    assert_says_the_same(fuser.fuse(loss), loss, x, x[0, 0].double())


@pytest.mark.cpu
@pytest.mark.parametrize("name", [*SIZES, "binary_cross_entropy", "kl_div", "soft_margin_loss", "poisson_nll_loss"])
def test_arguments(name: str) -> None:
    loss, (_, x) = getattr(F, name), draw(torch.float32, shape=(4, 6))
    given: list[dict[str, Any]] = [{"reduction": "batchmean"}, {"reduction": "average"}]
    if name != "huber_loss":
        given += [{"size_average": False}, {"reduce": False}]
    given += [{"weight": x}] if name in {"mse_loss", "huber_loss"} else []
    for rest in given:
        function = lambda x, y, rest=rest: loss(x, y, **rest)  # noqa: E731
        assert_says_the_same(fuser.fuse(function), function, x, x / 2)
    function = lambda x, y: loss(x, y, reduction="sum")  # noqa: E731
    for dtypes in ((torch.float32, torch.float64), (torch.float64, torch.float32), (torch.int32, torch.int32)):
        assert_says_the_same(fuser.fuse(function), function, *(x.to(dtype) for dtype in dtypes))


@pytest.mark.cpu
def test_numbers() -> None:
    _, x = draw(torch.float32, shape=(4, 6))
    for function in (
        lambda x, y: F.smooth_l1_loss(x, y, beta=-1.0),
        lambda x, y: F.smooth_l1_loss(x, y, beta=0.0),
        lambda x, y: F.huber_loss(x, y, delta=0.0),
        lambda x, y: F.hinge_embedding_loss(x.bfloat16(), y, margin=0.3),
    ):
        assert_says_the_same(fuser.fuse(function), function, x, x / 2)


@pytest.mark.cpu
@pytest.mark.filterwarnings("ignore:runs in eager torch")
@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.float32])
def test_a_smooth_loss_without_a_beta_takes_what_l1_loss_takes(dtype: torch.dtype) -> None:
    x = torch.arange(6).view(2, 3).to(dtype)
    for reduction in ("none", "sum", "mean"):
        function = lambda x, reduction=reduction: F.smooth_l1_loss(x * 2, x + 3, reduction=reduction, beta=0.0)  # noqa: E731
        got, wanted = outcome(fuser.fuse(function), x), outcome(function, x)
        if isinstance(wanted, Exception):
            assert isinstance(got, type(wanted))
            assert str(got) == str(wanted)
        else:
            assert same_bits(got, wanted)


@pytest.mark.cpu
@pytest.mark.parametrize("shape", [(6,), (4, 6), (5,), (2, 4, 6)])
def test_weights(shape: tuple[int, ...]) -> None:
    """What torch multiplies by in place has to fit."""
    (_, x), (_, weight) = draw(torch.float32, shape=(4, 6)), draw(torch.float32, shape=shape)
    for function in (
        lambda x, y, w: F.binary_cross_entropy_with_logits(x, y, w),
        lambda x, y, w: F.binary_cross_entropy_with_logits(x, y, pos_weight=w),
    ):
        for given in (weight, weight.double()):
            assert_says_the_same(fuser.fuse(function), function, x, x / 2, given)


# --- graphs ----------------------------------------------------------------------------------------------------------
class Model(torch.nn.Module):
    def __init__(self, loss: torch.nn.Module) -> None:
        super().__init__()
        self.layer, self.loss = torch.nn.Linear(16, 64), loss

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.loss(torch.relu(self.layer(x)), y)


MODULES = [
    torch.nn.MSELoss(), torch.nn.L1Loss(), torch.nn.SmoothL1Loss(beta=0.3), torch.nn.HuberLoss(delta=0.3),
    torch.nn.BCEWithLogitsLoss(pos_weight=torch.full((64,), 2.0)), torch.nn.KLDivLoss(reduction="batchmean"),
    torch.nn.SoftMarginLoss(), torch.nn.HingeEmbeddingLoss(), torch.nn.PoissonNLLLoss(), torch.nn.LogSigmoid(),
]  # fmt: skip


@pytest.mark.one_in(4)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", ["compile", "fuse"])
@pytest.mark.parametrize("loss", MODULES, ids=lambda item: type(item).__name__)
def test_models_learn_the_same(loss: torch.nn.Module, way: str, device: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(loss) if type(loss) is not torch.nn.LogSigmoid else Model(_NegativeLog())
    model.to(device, torch.bfloat16)
    x, y = torch.randn(32, 16).to(device, torch.bfloat16), torch.rand(32, 64).to(device, torch.bfloat16)
    found = []
    for run in (model, torch.compile(model, backend="fuser") if way == "compile" else fuser.fuse(model)):
        # For other sizes, too.
        for rows in (32, 24):
            made: Any = run(x[:rows], y[:rows])
            found.append((made.detach(), *torch.autograd.grad(made, list(model.parameters()))))
    for wanted, got in zip(found[:2], found[2:], strict=True):
        for one, other in zip(got, wanted, strict=True):
            assert_same(one, other, str(loss), is_exact=True)


class _NegativeLog(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.LogSigmoid()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return -(self.inner(x) * y).mean()


@pytest.mark.cpu
def test_overloads_in_graphs() -> None:
    x, y = draw(torch.float32)
    loss = torch.tensor(0.75)
    calls = [
        (ATEN.mse_loss.default, (x, y, 1)), (ATEN.mse_loss_backward.default, (loss, x, y, 1)),
        (ATEN.smooth_l1_loss.default, (x, y, 2, 0.5)), (ATEN.smooth_l1_loss_backward.default, (loss, x, y, 1, 0.5)),
        (ATEN.huber_loss.default, (x, y)), (ATEN.huber_loss_backward.default, (loss, x, y, 1, 0.5)),
        (ATEN.l1_loss.default, (x, y)),
    ]  # fmt: skip
    for target, args in calls:
        graph = fx.Graph()
        places: dict[int, fx.Node] = {}
        for item in args:
            if isinstance(item, torch.Tensor):
                places[id(item)] = graph.placeholder(f"x{len(places)}")
                places[id(item)].meta["val"] = item
        node = graph.call_function(target, tuple(places.get(id(item), item) for item in args))
        node.meta["val"] = target(*args)
        graph.output(node)
        given = [item for item in args if isinstance(item, torch.Tensor)]
        fused = fuser.fx.fuse_graph(fx.GraphModule(torch.nn.Module(), graph), given)
        fuser.reset_stats()
        assert_same(fused(*given), target(*args), str(target), is_exact=True)
        assert not [node for node in fused.graph.nodes if node.target is target], target
        assert fuser.stats()["fallbacks"] == {}


@pytest.mark.cpu
def test_nothing_is_kept_for_the_derivative_of_a_log_sigmoid() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    found = fuser.explain(torch.compile(lambda x: F.logsigmoid(x * 2) + 1, backend="fuser"), x)
    assert [(len(graph.groups), graph.unfused) for graph in found.graphs] == [(1, ()), (1, ())], str(found)

    def write(call: Any, gradient: fx.Node, x: fx.Node) -> fx.Node:
        kept = call(operator.getitem, call(ATEN.log_sigmoid_forward.default, x), 1)
        return call(ATEN.log_sigmoid_backward.default, gradient, x, kept)

    joint = trace(write, [x, x], "cuda")
    drop_unread(joint)
    joint.graph.eliminate_dead_code()
    left = [node.target for node in joint.graph.nodes if node.op == "call_function"]
    assert left == [ATEN.new_empty.default, ATEN.log_sigmoid_backward.default]


@pytest.mark.cpu
def test_autocast() -> None:
    x, y = draw(torch.bfloat16)
    for name in SIZES:
        function = lambda x, y, name=name: getattr(F, name)(x, y)  # noqa: E731
        fused = fuser.fuse(function)
        for is_on in (True, False, True):
            with torch.autocast("cpu", enabled=is_on):
                assert_same(fused(x, y), function(x, y), name, is_exact=True)


@pytest.mark.cpu
def test_gradients_of_gradients() -> None:
    x, y = (item.requires_grad_() for item in draw(torch.float64, shape=(2, 3)))
    for name in SIZES:
        fused = fuser.fuse(lambda x, y, name=name: getattr(F, name)(x, y, reduction="sum"))
        assert torch.autograd.gradcheck(fused, (x, y)), name
        assert torch.autograd.gradgradcheck(fused, (x, y)), name


@pytest.mark.cpu
@pytest.mark.parametrize("name", SIZES)
def test_transforms(name: str) -> None:
    x, y = draw(torch.float64, shape=(4, 6))
    function = lambda x, y: getattr(F, name)(x, y)  # noqa: E731
    fused = fuser.fuse(function)
    for transform in (torch.func.grad, lambda f: torch.func.vmap(torch.func.grad(f)), torch.func.vmap):
        torch.testing.assert_close(transform(fused)(x, y), transform(function)(x, y))
    _, tangent = torch.func.jvp(lambda x: fused(x, y), (x,), (y,))
    torch.testing.assert_close(tangent, torch.func.jvp(lambda x: function(x, y), (x,), (y,))[1])
