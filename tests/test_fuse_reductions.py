"""What programs write inside ``fuser.fuse`` of torch's reductions, norms and losses; their gradients are torch's."""

from __future__ import annotations

import copy
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody uses
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import fuser
from fuser.config import config
from fuser.errors import GradientError, ShapeError

# Each is torch's, and one group with the addition before it.
SPELLINGS = """
    x.sum(axis=1); torch.sum(x, axis=(0, 1), keepdims=True); torch.sum(input=x); x.sum([]); x.sum(())
    x.sum(1, dtype=None); x.sum(dtype=torch.float64); x.mean(axis=0); x.mean((0, 1), True, dtype=torch.float64)
    x.mean(None, True)
    torch.mean(x, -1, True); torch.mean(x, dim=[0, 2]); x.nansum(); x.nansum(1, dtype=torch.float64)
    torch.nansum(x, (0, 1)); x.prod(); torch.prod(x, -1); x.prod(1, True, dtype=torch.float64); x.var(axis=1); x.var(())
    x.var((0, 1), True); torch.var(x, unbiased=False); x.var(1, correction=2); x.var(1, correction=0.5)
    x.std(unbiased=False); x.std(1, False, True); x.std(dim=None, keepdim=True); torch.std(x, 1)
    torch.std(x, dim=(1,), correction=0, keepdim=True); torch.std_mean(x, 1, False)[0]
    torch.var_mean(x, (0, -1), keepdim=True)[1]; x.norm(2, (0, 1)); x.norm(p=1); x.norm(dtype=torch.float64)
    torch.norm(x, p=2, dim=1, keepdim=True); torch.linalg.vector_norm(x, dtype=torch.float64)
    torch.linalg.vector_norm(x, float("inf"), 1); torch.linalg.vector_norm(x, ord=0, dim=(0, 1)); torch.linalg.norm(x)
    torch.linalg.norm(x, 1, 0); F.normalize(x, dim=1); x.max(axis=1)[0]; x.max(-1, keepdim=True)[1]; x.min(1).values
    torch.max(x, 1).indices; x.max(); torch.min(x); x.amax(); x.amax(()); torch.amax(x, (0, -1)); x.amin(-1, True)
    torch.aminmax(x, dim=1)[0]; x.aminmax()[1]; x.argmax(axis=1); x.argmin(); x.argmax(-1, True); x.all((0, 1))
    x.argmax(dim=None, keepdim=True); torch.any(x > 0, 1); x.all(); torch.all(x, dim=(0, 2), keepdim=True)
    x.count_nonzero(axis=1); x.count_nonzero(0, 1); x.count_nonzero((0, 1)); x.logsumexp(axis=1)
    x.logsumexp((0, 1), True); torch.logsumexp(x, (0, 1)); torch.softmax(x, axis=1); x.softmax(axis=1)
    torch.special.softmax(x, 1); F.softmax(x, -1, dtype=torch.float64); F.log_softmax(x, -2); F.softmin(x, 1)
    torch.special.log_softmax(x, 1, dtype=torch.float64); x.sum(x.ndim - 1); x.square().mean(x.dim() - 1)
    F.layer_norm(x, x.shape[1:]); F.layer_norm(x, x.shape[-1:]); torch.layer_norm(x, (x.size(-1),))
    F.rms_norm(x, (x.shape[-1],)); torch.rms_norm(x, x.shape[-1:]); F.group_norm(x, 3)
    F.batch_norm(x, None, None, training=True); x.sum(1) / x.numel(); F.layer_norm(x, [x.shape[-1]])
""".replace("\n", ";").split(";")
SPELLINGS = [text.strip() for text in SPELLINGS if text.strip()]


@pytest.fixture(autouse=True)
def _fast() -> Iterator[None]:
    before, config.numerics = config.numerics, "fast"
    yield
    config.numerics = before


def written(text: str) -> Callable[[torch.Tensor], Any]:
    function = eval(f"lambda x: {text}", {"torch": torch, "F": F})
    return lambda x: function(x + 1)


def left_over(fused: Any, *args: Any) -> list[str]:
    """Return the names of what is torch's in the graph of a call, but for numbers."""
    nodes = getattr(fused, "fused", fused).graph_for(args)[0].graph.nodes
    calls = [node.name for node in nodes if node.op in ("call_function", "call_method", "call_module")]
    return [name for name in calls if not name.startswith(("fusion", "getitem", "tuple", "numel"))]


def same(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, wanted, equal_nan=True)
    for one, other in zip(torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(wanted), strict=True):
        if other is not None:
            # A gradient that torch only looks at may be one that is written.
            assert one.stride() == other.stride() or 0 in other.stride()
            assert one.requires_grad == other.requires_grad


def gradients(function: Callable[..., Any], inputs: list[Any], module: Any = None) -> tuple[Any, Any]:
    """Return what a function makes, and the gradients of its tensors and of a module's parameters."""
    torch.manual_seed(1)
    leaves = [
        item.detach().clone(memory_format=torch.preserve_format).requires_grad_(item.is_floating_point())
        for item in inputs
    ]
    made = function(*leaves)
    outputs = [item for item in torch.utils._pytree.tree_leaves(made) if item.requires_grad]
    wanted = [item for item in (*leaves, *(module.parameters() if module else ())) if item.requires_grad]
    return made, torch.autograd.grad(outputs, wanted, [torch.randn_like(item) for item in outputs], allow_unused=True)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def test_every_spelling_joins(tier: int) -> None:
    # Nothing is compiled.
    x, texts = draw(4, 3, 5), SPELLINGS if tier == 3 else SPELLINGS[::5]
    found = {text: left_over(fuser.fuse(written(text)), x) for text in texts}
    assert found == {text: [] for text in texts}


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.parametrize("text", SPELLINGS)
def test_every_spelling_is_torchs(text: str) -> None:
    x, function = draw(4, 3, 5), written(text)
    fused = fuser.fuse(function)
    same(fused(x), function(x))
    if not function(x).is_floating_point():
        return
    for got, wanted in zip(gradients(fused, [x]), gradients(function, [x]), strict=True):
        same(got, wanted)
    x = draw(2, 3, 4, dtype=torch.float64).requires_grad_()
    if text not in ("x.var(())", "torch.linalg.vector_norm(x, ord=0, dim=(0, 1))"):  # torch's own is infinite, or none
        assert torch.autograd.gradcheck(fused, x)
        assert torch.autograd.gradgradcheck(fused, x)


@pytest.mark.cpu
@pytest.mark.parametrize(
    "text", ["x.norm(axis=1)", "F.softmax(x, axis=1)", "x.sum(0, 1)", "x.amax(0, 1)", "x.max((0, 1))"]
)
def test_what_torch_refuses_stays_refused(text: str) -> None:
    x, function = draw(4, 3, 5), written(text)
    with pytest.raises((TypeError, RuntimeError), match=r"\(") as wanted:
        function(x)
    with pytest.raises(type(wanted.value), match=str(wanted.value).splitlines()[0].split("(")[0]):
        fuser.fuse(function)(x)


@pytest.mark.parametrize(
    "text", ["x.softmax(5)", "x.var(4)", "x.logsumexp(3)", "x.sum((0, 0))", "x.amax()", "x.amin(0)"]
)
def test_errors_are_torchs_and_name_no_step(text: str) -> None:
    x, function = torch.empty(0, 3), written(text)
    with pytest.raises((IndexError, RuntimeError), match=r"\w") as wanted:
        function(x)
    kind = IndexError if isinstance(wanted.value, IndexError) else RuntimeError
    with pytest.raises(kind, match=f"^{re.escape(str(wanted.value))}$"):
        fuser.fuse(function)(x)


def test_explain_says_that_strict_numerics_leave_a_product_to_torch() -> None:
    config.numerics = "strict"
    step = fuser.fuse(lambda x: (x * 2).prod(-1).cumprod(0))
    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.empty(3, 4))
    reasons = dict(fuser.explain(step.graph_for((x,))[0]).unfused)
    assert "strict numerics leave it to torch" in reasons["prod"]
    assert reasons["cumprod"] == "no op of fuser's table: cumprod"


class Head(torch.nn.Module):
    """Norms and a loss, one after the other."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.batch_norm = torch.nn.BatchNorm2d(6, dtype=dtype)
        self.group_norm = torch.nn.GroupNorm(3, 6, dtype=dtype)
        self.loss = torch.nn.CrossEntropyLoss(torch.arange(1, 7, dtype=dtype), ignore_index=2, label_smoothing=0.1)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> Any:
        y = self.group_norm(torch.relu(self.batch_norm(x * 2)))
        return self.loss(y.amax((2, 3)), target), y


@pytest.mark.cpu
@pytest.mark.slow
def test_modules_of_norms_and_losses() -> None:
    x, target = draw(4, 6, 3, 3), torch.tensor([5, 2, 0, 1])
    model, other = Head(torch.float32), Head(torch.float32)
    fused = fuser.fuse(model)
    for is_training in (True, False):
        model.train(is_training)
        other.train(is_training)
        assert left_over(fused, x, target) == (
            ["size", "_verify_batch_size", "detach", "detach_1", "add_", "_foreach_copy_"] if is_training else []
        )
        for got, wanted in zip(gradients(fused, [x, target], model), gradients(other, [x, target], other), strict=True):
            same(got, wanted)
        same(model.state_dict(), other.state_dict())
    with torch.no_grad():
        same(fused(x, target), other(x, target))


@pytest.mark.cpu
def test_a_buffer_that_is_read_again_is_written_in_its_place() -> None:
    norm = torch.nn.BatchNorm1d(6, affine=False)
    fused = fuser.fuse(lambda x: (norm(x + 1) + 1, norm.running_mean * 2))
    x = draw(4, 6)
    names = left_over(fused, x)
    assert names.index("copy_") < len(names) - 1
    module = copy.deepcopy(norm)
    same(fused(x)[1], (module(x + 1), module.running_mean * 2)[1])


@pytest.mark.cpu
def test_a_module_that_stays_one_counts_its_batches_once() -> None:
    # Without a momentum: what follows it asks for its shape.
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(6, momentum=None), torch.nn.BatchNorm1d(6))
    other, fused = copy.deepcopy(module), fuser.fuse(module)
    assert "_0" in left_over(fused, draw(4, 6))
    for _ in range(2):
        same(fused(draw(4, 6)), other(draw(4, 6)))
    same(module.state_dict(), other.state_dict())


@pytest.mark.cpu
@pytest.mark.parametrize("numerics", ["strict", "fast"])
def test_norms_of_one_value_raise_what_eager_raises(numerics: str) -> None:
    mean = torch.zeros(6)
    functions: list[Any] = [
        torch.nn.BatchNorm1d(6),
        lambda x: F.batch_norm(x, mean, mean.clone(), training=True),
        lambda x: F.batch_norm(x * 2, None, None, training=True),
        lambda x: F.group_norm(x * 2, 6),
    ]
    with fuser.config.patch(numerics=numerics):
        for function in functions:
            fused = fuser.fuse(function)
            for x in (torch.randn(1, 6), torch.randn(1, 6, 1), torch.randn(1, 6, 1, requires_grad=True)):
                with pytest.raises(ValueError, match="Expected more than 1 value per channel when training") as wanted:
                    function(x)
                with pytest.raises(ValueError, match=re.escape(str(wanted.value))):
                    fused(x)
        # It is the functions of torch.nn.functional that do, and nothing is no value.
        assert not fuser.fuse(lambda x: torch.group_norm(x * 2, 6))(torch.randn(1, 6)).any()
        assert fuser.fuse(functions[2])(torch.randn(5, 0)).shape == (5, 0)
    assert not mean.any()


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("has_weight", [False, True])
def test_cross_entropy(smoothing: float, reduction: str, has_weight: bool) -> None:
    weight = torch.arange(1.0, 10.0) if has_weight else None

    def loss(x: Any, target: Any) -> Any:
        own = None if weight is None else weight.to(x.dtype)
        return F.cross_entropy(x * 2, target, own, reduction=reduction, label_smoothing=smoothing)

    inputs = [draw(5, 9), torch.tensor([0, 8, 3, -100, 2])]
    fused = fuser.fuse(loss)
    assert left_over(fused, *inputs) == []
    same(fused(*inputs), loss(*inputs))
    for got, wanted in zip(gradients(fused, inputs), gradients(loss, inputs), strict=True):
        same(got, wanted)
    x, target = draw(5, 9, dtype=torch.float64).requires_grad_(), inputs[1]
    assert torch.autograd.gradcheck(lambda x: fused(x, target), x)


@pytest.mark.cpu
def test_ties_share_a_gradient_as_in_torch_bit_for_bit() -> None:
    config.numerics = "strict"

    def step(x: Any, y: Any) -> Any:
        z = torch.relu(x) + y
        values, places = z.min(1, keepdim=True)
        return (z - z.amax(-1, keepdim=True)) * values, places, z.amin((0, 1))

    fused = fuser.fuse(step)
    inputs = [torch.randint(-3, 3, (6, 40)).float(), draw(6, 1)]
    for got, wanted in zip(gradients(fused, inputs), gradients(step, inputs), strict=True):
        same(got, wanted)
        assert all(map(torch.equal, got, wanted))
    assert len(fused.groups) == 1
    assert fused.groups[0].has_reduction


@pytest.mark.cpu
def test_gradients_are_never_lost() -> None:
    step = fuser.fuse(lambda x, y, scale: torch.relu((x * y * scale).amax(-1, keepdim=True) - x) * y)
    x = draw(3, 7)
    for plain in (True, False):
        # With a number, as a second order, twice, in parts, under a transform, of what no gradient comes to.
        leaf = x.clone().requires_grad_()
        function = step.function if plain else step
        # One input is made of another.
        made = function(leaf, leaf * leaf, 2.0)
        (first,) = torch.autograd.grad(made.square().sum(), leaf, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), leaf, retain_graph=True)
        again = torch.autograd.grad(made.sum(), leaf, retain_graph=True)[0]
        of_transform = torch.func.grad(lambda x: function(x, x, 2.0).square().sum())(x)  # noqa: B023
        mapped = torch.func.vmap(lambda x: function(x, x, 2.0))(leaf)  # noqa: B023
        batch = torch.autograd.grad(made, leaf, torch.stack([made, made * 2]), retain_graph=True, is_grads_batched=True)
        found = (made, first, second, again, of_transform, mapped, *batch, *torch.autograd.grad(mapped.sum(), leaf))
        if plain:
            wanted = found
    same([item.detach() for item in found], [item.detach() for item in wanted])


@pytest.mark.cpu
def test_what_a_graph_keeps_is_let_go_by_its_backward_pass() -> None:
    step = fuser.fuse(lambda x: torch.softmax(x, -1) * x.amax(-1, keepdim=True))
    leaf = draw(3, 7).requires_grad_()

    def run(*, is_kept: bool) -> tuple[torch.Tensor, Any]:
        x = leaf * 1
        made = step(x)
        torch.autograd.grad(made.sum(), leaf, retain_graph=is_kept)
        return made, weakref.ref(x)

    made, seen = run(is_kept=False)
    assert made.grad_fn is not None
    assert seen() is None
    made, seen = run(is_kept=True)
    assert seen() is not None
    (first,) = torch.autograd.grad(made.sum(), leaf, create_graph=True)
    assert first.requires_grad
    # In a checkpoint from the start; the results and gradients are those without.
    same(
        gradients(lambda x: checkpoint(step, x * 2, use_reentrant=False), [leaf]),
        gradients(lambda x: step(x * 2), [leaf]),
    )
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        x = leaf * 1
        made, seen = step(x), weakref.ref(x)
        del x
    assert seen() is None
    with pytest.raises(GradientError, match="is gone"):
        torch.autograd.grad(made.sum(), leaf, create_graph=True)


@pytest.mark.cpu
def test_tuples_are_returned_as_torch_returns_them() -> None:
    def both(x: torch.Tensor) -> Any:
        found = (x * 2).min(1)
        return {"found": [found], "again": found.values + 1}

    x = torch.randn(9, 50)
    for function in (
        both,
        lambda x: torch.max(x * 2, 1),
        lambda x: torch.aminmax(x + 1, dim=0),
        lambda x: torch.std_mean(x * 3, 1, correction=0),
    ):
        fused = fuser.fuse(function)
        fuser.reset_stats()
        with config.patch(numerics="fast"):
            (got, kind), (wanted, own) = (torch.utils._pytree.tree_flatten(run(x)) for run in (fused, function))
            assert fuser.stats()["launches"] == 1
            assert "not fused" not in str(fuser.explain(fused, x))
        assert kind == own
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, other)

    def behind_a_write(x: torch.Tensor) -> Any:
        made, found = torch.relu(x), x.max(1)
        made.add_(1)
        return made, found.values

    for given in (x, x.requires_grad_()):
        assert torch.equal(fuser.fuse(behind_a_write)(given)[1], x.amax(1))


@pytest.mark.cpu
def test_places_have_no_gradient() -> None:
    step = fuser.fuse(lambda x: (x * 2).argmax(-1) + 1)
    x, before = draw(3, 7).requires_grad_(), fuser.stats()["fallbacks"]
    same(step(x), step.function(x))
    assert fuser.stats()["fallbacks"] == before


@pytest.mark.cpu
def test_what_is_written_to_meanwhile_is_refused() -> None:
    step = fuser.fuse(lambda x: (x * x).amax(-1) * 2)
    leaf = draw(3, 7).requires_grad_()
    x = leaf * 1
    made = step(x)
    with torch.no_grad():
        x += 1
    for create_graph in (False, True):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(made.sum(), leaf, create_graph=create_graph, retain_graph=True)


@pytest.mark.cpu
@pytest.mark.slow
def test_sizes_that_change_are_symbols() -> None:
    step = fuser.fuse(lambda x, y: F.layer_norm(x * y, (6,)).amax(-1, keepdim=True) + x.mean(0))
    counts = []
    for size in (5, 5, 7, 9, 1, 3):
        inputs = [draw(size, 6), draw(size, 1)]
        for got, wanted in zip(gradients(step, inputs), gradients(step.function, inputs), strict=True):
            same(got, wanted)
        (fusion,) = [item for item in step.graph_module.children() if hasattr(item, "nodes")]
        counts.append(len(fusion._calls._joints))
    # As numbers; as symbols; one, of which torch broadcasts.
    assert counts == [1, 1, 2, 2, 3, 3]
    # What only happened to be equal is looked at.
    inputs = [draw(4, 6), draw(1, 1)]
    for got, wanted in zip(gradients(step, inputs), gradients(step.function, inputs), strict=True):
        same(got, wanted)


@pytest.mark.cpu
def test_sizes_that_change_are_symbols_in_views_that_begin_elsewhere() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2)
        return torch.relu(first) * second + second.amax(-1, keepdim=True)

    fused = fuser.fuse(step)
    fuser.reset_stats()
    for size in range(2, 12):
        inputs = [draw(2 * size, 3 * size)]
        for got, wanted in zip(gradients(fused, inputs), gradients(step, inputs), strict=True):
            same(got, wanted)
    assert not fuser.stats()["fallbacks"]
    counts = [len(item._calls._joints) for item in fused.graph_module.children() if hasattr(item, "nodes")]
    # As numbers; as symbols; of rows there may be one, of which torch broadcasts.
    assert counts
    assert max(counts) <= 3


@pytest.mark.cpu
def test_sizes_that_change_where_an_op_expands() -> None:
    """``lerp`` of fake tensors expands in Python, whose symbols ATen takes there only if it is told."""
    step = fuser.fuse(lambda x, y: torch.lerp(x, y, 2.0).mean(0))
    fuser.reset_stats()
    for size in (5, 7, 9):
        inputs = [draw(1, size), draw(4, size)]
        for got, wanted in zip(gradients(step, inputs), gradients(step.function, inputs), strict=True):
            same(got, wanted)
    assert not fuser.stats()["fallbacks"]


@pytest.mark.cpu
@pytest.mark.slow
def test_too_many_sizes_are_torchs_reductions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuser.fx.joint_calls.MAX_JOINTS", 1)
    step = fuser.fuse(lambda x: (x * 2).amax(-1) + 1)
    for size in (5, 6, 7):
        for got, wanted in zip(
            gradients(step, [draw(3, size)]), gradients(step.function, [draw(3, size)]), strict=True
        ):
            same(got, wanted)
    (fusion,) = [item for item in step.graph_module.children() if hasattr(item, "nodes")]
    assert len(fusion._calls._joints) == 1


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_too_many_kinds_of_call_change_no_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    config.numerics = "strict"
    monkeypatch.setattr("fuser.fx.joint_calls.MAX_JOINTS", 1)
    step = fuser.fuse(lambda x, y: (x * y) * (x * y) * x + y)
    for shape in ((64,), (2, 64), (3, 2, 64)):
        inputs = [draw(*shape, dtype=dtype), draw(2, 64, dtype=dtype)]
        (_, found), (_, wanted) = gradients(step, inputs), gradients(step.function, inputs)
        assert all(map(torch.equal, found, wanted))


@pytest.mark.cpu
@pytest.mark.parametrize("is_again", [False, True])
def test_batches_of_gradients_require_grad_where_they_are_to(is_again: bool) -> None:
    config.numerics = "strict"
    step = fuser.fuse(lambda x, y: torch.sin(x * y) * x + y)
    inputs = [draw(3).requires_grad_(), draw(3).requires_grad_()]
    for function in (step, step.function):
        made = torch.autograd.grad(
            function(*inputs), inputs, torch.eye(3), is_grads_batched=True, create_graph=is_again
        )
        assert [item.requires_grad for item in made] == [is_again] * 2


@pytest.mark.cpu
def test_a_mistake_says_no_more_than_the_error(capfd: pytest.CaptureFixture[str], recwarn: Any) -> None:
    fused = fuser.fuse(lambda x, y: (x * y).sum(-1))
    x = torch.rand(4, 6, requires_grad=True)
    fuser.reset_stats()
    for _ in range(2):
        with pytest.raises(ShapeError, match=r"shapes \[4, 6\], \[3, 5\]"):
            fused(x, torch.rand(3, 5))
        with pytest.raises(RuntimeError, match="CSR"):
            fused(x, torch.rand(4, 6).to_sparse_csr())
        torch.testing.assert_close(fused(x, x), (x * x).sum(-1))
    assert not {reason for reason in fuser.stats()["fallbacks"] if "tracing" in reason}
    assert capfd.readouterr() == ("", "")


def test_no_warning_comes_of_binding() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        left_over(fuser.fuse(lambda x: F.softmax(x + 1, -1)), draw(3, 4))
