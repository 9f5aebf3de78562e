"""Backward passes of ``fuser.fuse`` are one group, with eager torch's bits; launches compute again what they can."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody uses
from graph_checks import trace
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import checkpoint

import fuser
from fuser.config import config
from fuser.fx.expansions import drop_expansions
from fuser.fx.fusion_node import FusionModule
from fuser.fx.joint import DifferentiableFusion
from fuser.fx.joint_calls import JointCalls
from fuser.fx.passes import fuse_graph

ATEN = torch.ops.aten


def widen(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype is torch.float64 else x.float()


def spelled_rms_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    wide = widen(x)
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def masked_scores(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return torch.softmax(widen(x * 0.125).masked_fill(m, float("-inf")), -1).to(x.dtype)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


CASES: dict[str, tuple[Callable[..., Any], Callable[[], list[torch.Tensor]]]] = {
    "rms_norm": (spelled_rms_norm, lambda: [draw(5, 64), draw(64)]),
    "add + rms_norm": (lambda x, y, w: (x + y, spelled_rms_norm(x + y, w)), lambda: [*draw(2, 5, 64), draw(64)]),
    "gelu + layer_norm": (lambda x, w, b: F.layer_norm(F.gelu(x), (64,), w, b), lambda: [draw(5, 64), *draw(2, 64)]),
    "masked softmax": (masked_scores, lambda: [draw(2, 3, 8, 8), torch.ones(8, 8, dtype=torch.bool).triu(1)]),
    "smoothed cross_entropy": (
        lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
        lambda: [draw(9, 33), torch.randint(0, 33, (9,))],
    ),
    "softmax and mean": (lambda x: torch.softmax(x, -1) * x.mean(-1, True), lambda: [draw(5, 64)]),
}


QUICK = {("rms_norm", "strict"), ("add + rms_norm", "fast"), ("smoothed cross_entropy", "fast")}


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("name", "numerics"),
    [
        pytest.param(*key, marks=[] if key in QUICK else [pytest.mark.slow])
        for key in itertools.product(CASES, ("strict", "fast"))
    ],
)
def test_backward_passes_are_one_group(name: str, numerics: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "numerics", numerics)
    function, make = CASES[name]
    torch.manual_seed(0)
    inputs = make()
    fused = fuser.fuse(lambda *tensors: function(*tensors))

    def gradients(step: Callable[..., Any], dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        own = [x.to(dtype or x.dtype) if x.is_floating_point() else x for x in inputs]
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in own]
        made = step(*leaves)
        made = made if isinstance(made, tuple) else (made,)
        torch.manual_seed(1)
        grads = [torch.randn(x.shape).to(inputs[0].dtype).to(x.dtype) for x in made]
        return [*made, *torch.autograd.grad(made, [x for x in leaves if x.requires_grad], grads)]

    got, wanted = gradients(fused), gradients(function)
    if numerics == "strict":
        assert all(map(torch.equal, got, wanted))
        if "rms_norm" not in name:
            # torch's own on the CPU, with groups beside it.
            return
    else:
        for one, other, truth in zip(got, wanted, gradients(function, torch.float64), strict=True):
            assert (one - truth).norm() <= (other - truth).norm()
    (node,) = [item for item in fused.graph_module.modules() if isinstance(item, DifferentiableFusion)]
    (joint,) = node._calls._joints
    for flat in (joint.forward, joint.backward):
        called = [value for value in flat.objects.values() if isinstance(value, torch._ops.OpOverload)]
        # Sums of columns become vectors.
        assert set(called) <= {ATEN.reshape.default}
    calls = [value for value in joint.backward.objects.values() if hasattr(value, "spec")]
    assert len(calls) == 1


POINTWISE: dict[str, Callable[..., Any]] = {
    "sums of products": lambda x, y, w: (x * y + x * w) * x + (y - x) * w,
    "activations": lambda x, y, w: F.silu(x) * torch.tanh(w) + F.gelu(y, approximate="tanh") * torch.sigmoid(x),
    "gelu of a bias": lambda x, y, w: F.gelu(x + w) / y.exp(),
    "powers": lambda x, y, w: x.pow(2) * torch.rsqrt(y * y + 1) + torch.log1p(w.abs()) + x.clamp(-1, 1),
    "choices": lambda x, y, w: torch.where(x > y, x * w, F.relu(y)) + torch.maximum(x, y) * 3,
}


@pytest.mark.parametrize("device", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("cpu", "cuda")])
@pytest.mark.parametrize("name", POINTWISE)
def test_gradients_of_torchs_ops_have_its_bits(name: str, device: str) -> None:
    function = POINTWISE[name]
    fused = fuser.fuse(lambda x, y, w: function(x, y, w))
    for rows in (5, 7, 5):
        torch.manual_seed(rows)
        inputs = [x.to(device).requires_grad_() for x in (*draw(2, rows, 64), draw(64))]
        grad = draw(rows, 64).to(device)
        got, wanted = (torch.autograd.grad(step(*inputs), inputs, grad) for step in (fused, function))
        if device == "cuda" or name in {"sums of products", "choices"}:
            assert all(map(torch.equal, got, wanted))
        assert [x.stride() for x in got] == [x.stride() for x in wanted]
    assert any(isinstance(item, DifferentiableFusion) for item in fused.graph_module.modules())


@pytest.mark.cpu
def test_numbers_and_grad_mode_are_looked_at_in_each_call() -> None:
    fused = fuser.fuse(lambda x, alpha: (x * alpha + 1).sigmoid())
    x = torch.randn(6, requires_grad=True)
    for alpha in (2.0, 3.0, 2.0):
        for _ in range(3):
            (got,), (wanted,) = (torch.autograd.grad(step(x, alpha).sum(), x) for step in (fused, fused.function))
            torch.testing.assert_close(got, wanted)
    double = fuser.fuse(lambda x: x * 2 + x)
    for _ in range(3):
        assert double(x).requires_grad
        with torch.no_grad():
            assert not double(x).requires_grad
        assert not double(x.detach()).requires_grad


@pytest.mark.cpu
def test_groups_between_other_ops_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    step = fuser.fuse(lambda x, y: torch.sort(torch.softmax(x * y, -1))[0] * y)
    asked: list[Any] = []
    find = JointCalls.find
    monkeypatch.setattr(JointCalls, "find", lambda *args: asked.append(args) or find(*args))
    x, y = torch.rand(4, 8, requires_grad=True), torch.rand(4, 8)
    for is_known in (False, True, True):
        asked.clear()
        got, wanted = (torch.autograd.grad(f(x, y).square().sum(), x)[0] for f in (step, step.function))
        torch.testing.assert_close(got, wanted)
        assert bool(asked) is not is_known
    # Others of other sizes, and of other tensors that have gradients.
    y.requires_grad_()
    for given in ((x, y), (x[:2], y[:2]), (x.detach(), y)):
        wanted = torch.autograd.grad(step.function(*given).sum(), y)[0]
        torch.testing.assert_close(torch.autograd.grad(step(*given).sum(), y)[0], wanted)


def test_a_size_that_is_a_symbol_is_a_number() -> None:
    # torch divides by a number in another way than by a tensor of one element, on a GPU.
    def share(x: torch.Tensor, y: torch.Tensor) -> Any:
        return ATEN.mul.Tensor(ATEN.div.Scalar(ATEN.expand.default(x, y.shape), y.shape[1]), y)

    made = fuse_graph(make_fx(share, tracing_mode="symbolic")(torch.ones(3, 1), torch.ones(3, 6)))
    (group,) = (item.group for item in made.modules() if isinstance(item, FusionModule))
    assert [item.function.op for item in group.applications] == ["div_number", "mul"]


def test_copies_to_another_layout_may_have_sizes_that_are_symbols() -> None:
    # No set has symbols: they have no hash.
    def step(call: Any, x: Any) -> Any:
        copied = call(ATEN.clone.default, call(ATEN.relu.default, x), memory_format=torch.contiguous_format)
        return call(ATEN.sigmoid.default, copied)

    x = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    made = fuse_graph(trace(step, [x], "cuda", is_dynamic=True))
    assert any(isinstance(item, FusionModule) for item in made.modules())


@pytest.mark.parametrize("device", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("cpu", "cuda")])
def test_gradients_of_rows_of_other_lengths_have_torchs_bits(device: str) -> None:
    fused = fuser.fuse(spelled_rms_norm)
    with config.patch(numerics="strict"):
        for rows, width in ((7, 96), (100, 1000), (64, 768)):
            x, w, slope = (torch.randn(*shape, device=device) for shape in ((rows, width), (width,), (rows, width)))
            leaves = [x.requires_grad_(), w.requires_grad_()]
            found = [torch.autograd.grad(function(x, w), leaves, slope) for function in (fused, spelled_rms_norm)]
            assert all(torch.equal(*both) for both in zip(*found, strict=True))


@pytest.mark.cpu
def test_sections_that_compute_again_keep_values() -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = torch.relu(x) * y
        top = made.amax(1, keepdim=True)
        kept = made - top
        return kept, (kept * y).amax(0), kept.amin((0, 1)), (made > 0).sum(1)

    x, y = torch.randn(2, 33, 17)
    made = fuser.fuse(step)(x, y)
    assert all(map(torch.equal, made, step(x, y)))


# --- expansions --------------------------------------------------------------------------------------------------
def traced(function: Callable[..., Any], *inputs: torch.Tensor) -> fx.GraphModule:
    mode = FakeTensorMode()
    return make_fx(function, tracing_mode="fake")(*map(mode.from_tensor, inputs))


EXPANSIONS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], int]] = {
    "scaled, then with others": (lambda r, x: r.expand(4, 6) / 6 * x, (torch.randn(4, 1), torch.randn(4, 6)), 0),
    "two of them": (lambda r, x: r.expand(4, 6) * r.expand(4, 6) + x, (torch.randn(4, 1), torch.randn(4, 6)), 0),
    "new dimensions": (lambda r, x: torch.exp(r.expand(4, 6)) + x, (torch.randn(6), torch.randn(4, 6)), 0),
    "nobody makes it full": (lambda r, x: (r.expand(4, 6) / 6, x * 2), (torch.randn(4, 1), torch.randn(4, 6)), 1),
    "returned itself": (lambda r, x: (r.expand(4, 6), r.expand(4, 6) * x), (torch.randn(4, 1), torch.randn(4, 6)), 1),
    "reduced": (lambda r, x: (r.expand(4, 6) * 2).sum(1) + x, (torch.randn(4, 1), torch.randn(4)), 1),
    "another layout": (lambda r, x: r.expand(4, 6).exp() + x, (torch.randn(4, 1), torch.randn(6, 4).t()), 1),
    "no dimensions": (lambda r, x: r.expand(4, 6) * x, (torch.randn(()), torch.randn(4, 6)), 0),
    "no dimensions, another dtype": (lambda r, x: r.expand(4, 6) * x, (torch.randn(()), torch.randn(4, 6).half()), 1),
    "an op of torch's": (
        lambda r, x: torch.special.i0e(r.expand(6, 67)) * x,
        (torch.arange(1, 7).bfloat16()[:, None] / 4, torch.randn(6, 67).bfloat16()),
        1,
    ),
    "oneDNN's": (
        lambda r, x: ATEN.gelu_backward(r.expand(4, 6) / 6, x),
        (torch.randn(4, 1), torch.randn(4, 6)),
        1,
    ),
}


@pytest.mark.parametrize("name", EXPANSIONS)
def test_expansions_go_where_nobody_can_tell(name: str) -> None:
    function, inputs, left = EXPANSIONS[name]
    module = traced(function, *inputs)
    before = module(*inputs)
    drop_expansions(module.graph)
    module.graph.lint()
    module.recompile()
    after = module(*inputs)
    assert len(module.graph.find_nodes(op="call_function", target=ATEN.expand.default)) == left
    for one, other in zip(*(x if isinstance(x, tuple) else (x,) for x in (after, before)), strict=True):
        assert torch.equal(one, other)
        assert (one.dtype, one.stride()) == (other.dtype, other.stride())
    for node in module.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            made = node.target(*fx.node.map_arg(node.args, lambda item: item.meta["val"]), **node.kwargs)
            assert str(made) == str(node.meta["val"])
            assert made.stride() == node.meta["val"].stride()


@pytest.mark.cpu
@pytest.mark.parametrize("mode", ["real", "fake"])
def test_expansions_beside_what_does_not_say_enough(mode: str) -> None:
    """make_fx gives values of real tensors a fake mode each, and nodes that a pass adds may say nothing."""
    x, y = torch.randn(2, 4, 6)
    module = make_fx(torch.func.grad(lambda x, y: (x * y).relu().sum()), tracing_mode=mode)(x, y)
    if mode == "fake":
        del module.graph.find_nodes(op="call_function", target=ATEN.relu.default)[0].meta["val"]
    wanted = module(x, y)
    assert torch.equal(fuser.fx.fuse_graph(module)(x, y), wanted)


@pytest.mark.cpu
def test_tangents_and_transforms_go_through_modules_with_parameters() -> None:
    # The function of autograd's that has both passes knows no forward mode, and nothing traces torch.func's tensors.
    module = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Tanh()).double()
    fused, x = fuser.fuse(module), torch.randn(3, 8, dtype=torch.float64)
    fuser.reset_stats()
    for needs_grad in (False, True):
        point = x.clone().requires_grad_(needs_grad)
        for _ in range(2):
            fused(point)
            with forward_ad.dual_level():
                dual = forward_ad.make_dual(point, x + 1)
                got, wanted = (forward_ad.unpack_dual(item(dual)).tangent for item in (fused, module))
            torch.testing.assert_close(got, wanted)
    for function in (torch.func.grad, torch.func.hessian):
        got, wanted = (function(lambda x, item=item: item(x).pow(2).sum())(x) for item in (fused, module))
        torch.testing.assert_close(got, wanted)
    assert not fuser.stats()["fallbacks"]


@pytest.mark.cpu
@pytest.mark.parametrize("kind", ["floats", "ints", "sizes", "exponents"])
def test_numbers_that_change_are_symbols(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As sizes are: no number of values leaves a training loop without kernels."""

    def step(x: torch.Tensor, a: float) -> torch.Tensor:
        scaled = (x * a + 1).relu() * (x - a * x.shape[1] * 0.1)
        return (scaled.square() if kind != "exponents" else (x.abs() + 1) ** a) / x.shape[0]

    fused, seen = fuser.fuse(step), list[int]()
    fuser.reset_stats()
    asked: list[Any] = []
    evaluate = ShapeEnv.evaluate_guards_expression
    monkeypatch.setattr(
        ShapeEnv, "evaluate_guards_expression", lambda *given: asked.append(given[1]) or evaluate(*given)
    )
    for count in range(2, 22):
        x = torch.randn(count if kind == "sizes" else 3, 8, dtype=torch.bfloat16, requires_grad=True)
        value = {"floats": 0.3 * count - 2, "ints": count - 5, "sizes": 0.7, "exponents": 1 + count % 3}[kind]
        launches = fuser.stats()["launches"]
        for _ in range(2):
            found, wanted = (torch.autograd.grad(function(x, value).sum(), x) for function in (fused, step))
            assert torch.equal(found[0], wanted[0])
        seen.append(fuser.stats()["launches"] - launches)
    assert min(seen) == max(seen) > 0
    assert not fuser.stats()["fallbacks"]
    (fusion,) = (item for item in fused.graph_module.modules() if isinstance(item, DifferentiableFusion))
    assert len(fusion._calls._joints) <= 4
    # What a trace relies on was compiled with it.
    assert not any(isinstance(code, str) for code in asked)


@pytest.mark.cpu
def test_autograd_goes_only_where_a_gradient_may_come() -> None:
    choose = fuser.fuse(lambda x, y: torch.where(y > 0, x, 0) * 2)
    arrange = fuser.fuse(lambda x, y: torch.cat([x.masked_fill(y > 0, 0), x]) * 2)
    for fused in (choose, arrange):
        x, y = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
        seen: list[Any] = []
        # What made an argument has no part in the backward pass, as in eager torch: not even without a gradient.
        y.register_hook(seen.append)
        fused(x, y).sum().backward()
        assert x.grad is not None
        assert y.grad is None
        (once,) = torch.autograd.grad(fused(x, y).square().sum(), x, create_graph=True)
        once.sum().backward()
        assert not seen


@pytest.mark.cpu
def test_results_without_a_gradient_have_no_part_in_others() -> None:
    """A gradient of zeros would be NaN where a root has its pole."""

    def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x.log()
        return x * 2 + y, torch.sqrt(x), x.neg()

    # A loop over data has no derivative but that of its eager version.
    root = fuser.jit_fn("template <typename T> T root(T x) { T y = x; while (y < T(0)) y = -y; return sqrt(y); }")
    fused, passed = fuser.fuse(step), fx.symbolic_trace(step)
    looped = fx.symbolic_trace(lambda x, y: (x * 2 + y, root(x), x.neg()))
    assert all(len(fuse_graph(module).graph.find_nodes(op="call_module")) == 1 for module in (passed, looped))
    x, y = torch.tensor([0.0, 4.0, -0.0], requires_grad=True), torch.randn(3, requires_grad=True)
    for slots in ([0], [0], [0, 1, 2], [2], [1], [0, 2]):
        made = [[function(x, y)[slot] for slot in slots] for function in (step, fused, passed, looped)]
        grads = [torch.full((3,), 0.5 + slot) for slot in slots]
        wanted, *found = (torch.autograd.grad(items, (x, y), grads, allow_unused=True) for items in made)
        for item in found:
            torch.testing.assert_close(item, wanted, rtol=0, atol=0, equal_nan=True)
    ((entry,),) = fused._traces.values()
    # Of all, and after the first backward pass, of the first one alone.
    assert [len(joint.taken) for joint in entry.joint._calls._joints] == [3, 1]
    for _ in range(2):
        fuser.reset_stats()
        torch.autograd.grad([item.sum() for item in fused(x, y)], (x, y))
        # Of all again, since others were asked for.
        assert fuser.stats()["launches"] == 2


@pytest.mark.cpu
def test_checkpoints_make_a_call_again_by_the_graphs_it_went_by() -> None:
    """A graph for the results that have a gradient saves other tensors: not between a call and its backward pass."""
    fused = fuser.fuse(lambda x, y: (torch.cat([x.neg(), y * 3]) * 2, x * x * y))
    x, y = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)

    def layer(call: Callable[..., Any], x: torch.Tensor) -> Any:
        return checkpoint(lambda x, y: call(x, y)[0].square().square(), x, y, use_reentrant=False)

    for _ in range(2):
        made = [layer(call, layer(call, x)[:3]).sum() for call in (fused, fused.function)]
        # In between, another call's backward pass says which results have a gradient, and a third call comes.
        torch.autograd.grad(layer(fused, x).sum(), x)
        fused(x, y)
        mine, eagers = (torch.autograd.grad(item, (x, y)) for item in made)
        torch.testing.assert_close(mine, eagers)
    fuser.reset_stats()
    torch.autograd.grad(fused(x, y)[0].sum(), (x, y))
    # A kernel each way: they are for that result from now on.
    assert fuser.stats()["launches"] == 2


@pytest.mark.cpu
def test_zeros_infinities_and_what_is_none_are_numbers_of_their_own() -> None:
    fused = fuser.fuse(lambda x, a: (x * a + 1).relu() * (a / x))
    for value in (2.0, 3.0, 0.0, -0.0, float("inf"), float("nan"), -1.5, 1e300):
        x = torch.randn(6, requires_grad=True)
        made, wanted = fused(x, value), fused.function(x, value)
        slopes = [torch.autograd.grad(item.sum(), x)[0] for item in (made, wanted)]
        for got, expected in ((made, wanted), slopes):
            assert torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))
            assert torch.equal(got.isnan(), expected.isnan())
            assert torch.equal(got.signbit() & ~got.isnan(), expected.signbit() & ~got.isnan())


@pytest.mark.cpu
def test_a_backward_pass_that_lays_out_anew_is_traced_as_eager_torch_runs_it() -> None:
    # What comes back to the mask lies transposed, and three terms meet at x: in their order.
    fused = fuser.fuse(lambda x: ((y := torch.cat([x, x + 1])), (y * y.std(-1, keepdim=True)).tril().t().contiguous()))
    x = torch.randn(64, 9, requires_grad=True)
    weights = [torch.randn(item.shape) for item in fused.function(x)]
    mine, eagers = (torch.autograd.grad(call(x), x, weights) for call in (fused, fused.function))
    assert torch.equal(*mine, *eagers)
    assert fuser.explain(fused, x).remarks == ()


@pytest.mark.parametrize(
    ("function", "needs_grad", "remark"),
    [
        (lambda x: (torch.cat([x * 2, x]), x.view(-1)), True, "node by node: results share memory"),
        (lambda x: torch.cat([x * 2, x]).prod(0), True, "node by node: torch differentiates prod otherwise"),
        (lambda x: torch.cat([x * 2, torch.nn.Dropout(0.0)(x)]), True, ""),
        (lambda x: torch.cat([x * 2, x.add_(1)]), False, "known sizes: it does more than"),
        (lambda x: torch.cat([torch.linalg.svdvals(x) * 2, x[0]]), False, "known sizes: torch computes values of"),
        (lambda x: torch.cat([x * 2, x]), False, ""),
    ],
)
@pytest.mark.cpu
def test_explain_says_why_a_call_is_fused_by_halves(function: Any, needs_grad: bool, remark: str) -> None:
    found = fuser.explain(fuser.fuse(function), torch.randn(4, 4, requires_grad=needs_grad))
    assert [remark in item for item in found.remarks] == [True] * bool(remark)
    assert all(str(found).endswith(item) for item in found.remarks)


@pytest.mark.cpu
def test_explain_says_that_a_call_with_numbers_is_differentiated_node_by_node() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    for function, given in ((lambda x, n: ((x @ x) * n).exp() @ x, (2.5,)), (lambda x: ((x @ x) * 2).exp() @ x, ())):
        remarks = fuser.explain(fuser.fuse(function), x, *given).remarks
        remark = "node by node: it takes numbers, and arranges nothing"
        assert [remark in item for item in remarks] == [True] * len(given)
