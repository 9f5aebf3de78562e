"""torch.compile(backend="fuser"): trains as eager does, fuses forward and backward, takes functors without a break."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from functors import assert_same, draw, functor
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config

import fuser
from fuser import planner
from fuser.cpu import backend as cpu_backend
from fuser.errors import UnsupportedError
from fuser.fx import backend as fx_backend

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("fresh_dynamo")]

STEPS = 10


class Mlp(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class SwiGlu(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def train(model: nn.Module, optimiser: Callable[..., Any], loss: Callable[..., Any], x: Any, y: Any) -> list[float]:
    """Return the loss of each step."""
    steps = optimiser(model.parameters())
    losses = []
    for _ in range(STEPS):
        steps.zero_grad()
        value = loss(model(x), y)
        value.backward()
        steps.step()
        losses.append(value.item())
    return losses


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=5e-2, momentum=0.9)


TASKS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], Callable[[], tuple[Any, Any]]]] = {
    "mlp": (
        Mlp, F.mse_loss, lambda: (draw((4, 6, 16), torch.float32, seed=1), draw((4, 6, 16), torch.float32, seed=2)),
    ),
    "swiglu": (
        SwiGlu, F.mse_loss, lambda: (draw((4, 6, 16), torch.float32, seed=1), draw((4, 6, 16), torch.float32, seed=2)),
    ),
    "convnet": (
        ConvNet, F.cross_entropy, lambda: (draw((6, 3, 8, 8), torch.float32, seed=1), torch.arange(6) % 5),
    ),
}  # fmt: skip


def test_no_pattern_matcher_is_imported_for_equal_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    # Torch's own function imports Inductor's, which takes as long as all of fuser does.
    monkeypatch.setattr("torch._functorch.partitioners.fx_graph_cse", None)
    model, x = Mlp(), draw((4, 16), torch.float32)
    wanted = torch.autograd.grad(model(x).sum(), model.up.weight)
    found = torch.autograd.grad(torch.compile(model, backend="fuser")(x).sum(), model.up.weight)
    torch.testing.assert_close(found, wanted)


def test_no_code_generator_is_imported_for_the_key_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    imports: list[str] = []
    monkeypatch.setattr("torch._inductor.codecache.init_backend_registration", lambda: imports.append("all"))
    x = draw((4, 16), torch.float32)
    with torch._functorch.config.patch(enable_autograd_cache=True):
        torch.compile(torch.tanh, backend="fuser")(x)
    assert not imports


@pytest.mark.parametrize("optimiser", [sgd, adam], ids=lambda item: item.__name__)
@pytest.mark.parametrize("task", TASKS)
def test_training_follows_eager(task: str, optimiser: Callable[..., Any]) -> None:
    make, loss, data = TASKS[task]
    x, y = data()
    torch.manual_seed(0)
    model, twin = make(), make()
    twin.load_state_dict(model.state_dict())
    wanted = train(twin, optimiser, loss, x, y)
    before = fuser.stats()
    got = train(torch.compile(model, backend="fuser"), optimiser, loss, x, y)
    after = fuser.stats()
    # Adam divides by the gradient's size: a rounding error of a tiny gradient counts more there.
    assert got == pytest.approx(wanted, rel=2e-5 if optimiser is sgd else 1e-4)
    assert wanted[-1] < wanted[0]
    assert after["launches"] - before["launches"] >= 2 * STEPS, "forward and backward launch"
    assert after["fallbacks"] == before["fallbacks"]


def test_forward_and_backward_both_launch() -> None:
    model = Mlp()
    compiled = torch.compile(model, backend="fuser")
    x = draw((4, 6, 16), torch.float32)
    before = fuser.stats()["launches"]
    loss = compiled(x).square().mean()
    forward = fuser.stats()["launches"]
    assert forward > before
    loss.backward()
    assert fuser.stats()["launches"] > forward


def test_gradients_equal_eagers() -> None:
    model = SwiGlu()
    x = draw((4, 6, 16), torch.float32).requires_grad_()
    other = x.detach().clone().requires_grad_()
    torch.compile(model, backend="fuser")(x).sin().sum().backward()
    mine = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    model(other).sin().sum().backward()
    assert torch.allclose(x.grad, other.grad, rtol=1e-4, atol=1e-6)
    for name, parameter in model.named_parameters():
        assert torch.allclose(mine[name], parameter.grad, rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("dynamic", [None, True])
def test_batch_size_changes(dynamic: bool | None) -> None:
    model = Mlp()
    compiled = torch.compile(model, backend="fuser", dynamic=dynamic)
    for batch in (2, 3, 7, 5, 12):
        x = draw((batch, 6, 16), torch.float32, seed=batch)
        compiled(x).sum().backward()
        mine = model.up.weight.grad.clone()
        model.zero_grad()
        assert torch.allclose(compiled(x), model(x), rtol=1e-5, atol=1e-6)
        model(x).sum().backward()
        assert torch.allclose(mine, model.up.weight.grad, rtol=1e-4, atol=1e-5)
        model.zero_grad()


def test_dynamic_sizes_compile_once() -> None:
    compiled = torch.compile(lambda x, y: torch.sigmoid(x) * y + 1, backend="fuser", dynamic=True)
    compiled(*[draw((5, 8), torch.float32, seed=seed) for seed in (1, 2)])
    before = fuser.n_compiled_kernels()
    for length in (9, 17, 33):
        x, y = (draw((length, 8), torch.float32, seed=seed) for seed in (1, 2))
        assert torch.allclose(compiled(x, y), torch.sigmoid(x) * y + 1)
    assert fuser.n_compiled_kernels() == before


@pytest.mark.parametrize("dynamic", [False, True])
def test_integers_join_no_group_for_an_op_of_theirs_with_a_size(dynamic: bool) -> None:
    """What has no kernel of their dtype is known before the first call, also where sizes are symbols."""
    x = torch.randint(0, 100, (5, 7))

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x + 1) % x.shape[0] * 3

    before = fuser.stats()["fallbacks"]
    assert torch.equal(torch.compile(function, backend="fuser", dynamic=dynamic)(x), function(x))
    assert fuser.stats()["fallbacks"] == before


def test_functors_do_not_break_the_graph() -> None:
    axpy, wave, gelu = functor("axpy"), functor("wave"), functor("gelu")

    def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sine, cosine = wave(axpy(x, y, alpha=0.5))
        return gelu(sine) * 2 + cosine, cosine

    compiled = torch.compile(step, backend="fuser", fullgraph=True)
    for length in (33, 40):
        x, y = draw((4, length), torch.float32, seed=1), draw((length,), torch.float32, seed=2)
        for mine, theirs in zip(compiled(x, y), step(x, y), strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-6, atol=1e-6)


def test_a_functor_alone_equals_itself_compiled() -> None:
    leaky = functor("leaky")
    compiled = torch.compile(lambda x: leaky(x, slope=0.5), backend="fuser", fullgraph=True)
    for dtype in (torch.float32, torch.bfloat16):
        x = draw((4, 33), dtype).t()
        assert_same(compiled(x), leaky(x, slope=0.5))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_functors_under_other_backends(backend: str) -> None:
    polar = functor("polar")
    compiled = torch.compile(lambda x, y: polar(x, y, scale=2.0), backend=backend, fullgraph=True)
    x, y = draw((4, 33), torch.float32, seed=1), draw((33,), torch.float32, seed=2)
    assert_same(compiled(x, y), polar(x, y, scale=2.0))


def test_a_functor_without_a_derivative_raises() -> None:
    bits = fuser.jit_fn("template <typename T> T bits(T x) { return T(__float_as_int(float(x))); }")
    compiled = torch.compile(lambda x: bits(x) * 2, backend="fuser", fullgraph=True)
    x = draw((4, 33), torch.float32).requires_grad_()
    with pytest.raises(Exception, match="bits has no derivative") as caught:
        compiled(x).sum().backward()
    chain: list[BaseException] = [caught.value]
    while chain[-1].__cause__ or chain[-1].__context__:
        chain.append(chain[-1].__cause__ or chain[-1].__context__)
    assert any(isinstance(error, fuser.errors.GradientError) for error in chain), chain
    with torch.no_grad():
        assert torch.equal(compiled(x), bits(x) * 2)


def test_in_place_code() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        x.add_(1)
        z = y + x
        z[0] = torch.sigmoid(z[1])
        return z.relu_()

    x = draw((4, 33), torch.float32)
    mine, theirs = x.clone(), x.clone()
    assert torch.allclose(torch.compile(step, backend="fuser")(mine), step(theirs))
    assert torch.equal(mine, theirs)


def test_bfloat16_and_mixed_precision() -> None:
    model = Mlp().to(torch.bfloat16)
    x = draw((4, 6, 16), torch.bfloat16)
    compiled = torch.compile(model, backend="fuser")
    got, wanted = compiled(x), model(x)
    assert got.dtype == torch.bfloat16
    assert torch.allclose(got.float(), wanted.float(), rtol=2e-2, atol=2e-2)
    plain = SwiGlu()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x.float()
        got, wanted = torch.compile(plain, backend="fuser")(y), plain(y)
    assert got.dtype == wanted.dtype
    assert torch.allclose(got.float(), wanted.float(), rtol=2e-2, atol=2e-2)


def test_backend_is_registered() -> None:
    assert "fuser" in torch._dynamo.list_backends()


def test_dynamic_shapes_of_any_layout() -> None:
    square = fuser.jit_fn("template <typename T> T square(T x) { return x * x; }")
    product = functor("axpy")
    layouts: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x,
        lambda x: x.t().contiguous().t(),
        lambda x: x.repeat(1, 2)[:, ::2],
        lambda x: x[:1].expand_as(x),
    ]
    unary = torch.compile(lambda x: square(x.t()) + 1, backend="fuser")
    binary = torch.compile(lambda x, y: product(x, y, alpha=2.0), backend="fuser", dynamic=True)
    for rows in (3, 5, 7):
        x = draw((rows, 4), torch.float32, seed=rows)
        assert_same(unary(x), square(x.t()) + 1)
        for one in layouts:
            for other in layouts:
                assert_same(binary(one(x), other(x)), product(one(x), other(x), alpha=2.0))
    pictures = torch.compile(lambda x, y: product(x, y, alpha=2.0), backend="fuser", dynamic=True)
    x = draw((2, 3, 4, 5), torch.float32, seed=1)
    last = x.contiguous(memory_format=torch.channels_last)
    assert_same(pictures(last, x), product(last, x, alpha=2.0))


def test_a_view_that_inputs_of_other_strides_do_not_have() -> None:
    flat = torch.compile(lambda x: (x + 1).reshape(-1) * 2, backend="fuser")
    for x in (draw((4, 4), torch.float32, seed=1), draw((8, 8), torch.float32, seed=2)[::2, ::2]):
        assert_same(flat(x), (x + 1).reshape(-1) * 2)


def test_a_checkpoint_decides_for_costly_functors() -> None:
    """Functors with loops and reductions are computed again where the user asks for that, and saved elsewhere."""
    code = "template <typename T> T f(T x) { T s = x; for (int i = 0; i < 3; ++i) s = s * T(0.5) + x; return sin(s); }"
    loop = fuser.create_jit_fn(code)
    total = fuser.create_reduction_fn("template <typename T> T add(T a, T b) { return a + b; }", identity=0)

    def block(x: torch.Tensor) -> torch.Tensor:
        return loop(loop(x) * total(loop(x + 1), dim=1, keepdim=True) / x.shape[1])

    def checkpointed(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sum()

    values, saved, gradients = draw((6, 5), torch.float32), dict[str, int](), []
    for name, run in {
        "eager": block,
        "plain": torch.compile(block, backend="fuser", fullgraph=True),
        "checkpointed": torch.compile(checkpointed, backend="fuser", fullgraph=True),
    }.items():
        x, sizes = values.clone().requires_grad_(), list[int]()

        def note(item: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(item.numel())
            return item

        with torch.autograd.graph.saved_tensors_hooks(note, lambda item: item):
            result = run(x).sum()
        result.backward()
        saved[name] = sum(sizes)
        gradients.append(x.grad)
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0])
    assert saved["checkpointed"] == values.numel() < saved["plain"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("copies", [False, True], ids=["views", "a view of a copy"])
def test_kernels_are_looked_at_while_a_graph_is_compiled(device: str, *, copies: bool) -> None:
    """Fake tensors are made there, and torch's rules in Python have errors of their own for a view that is none."""
    found = []

    def emit(group: fuser.FusionGroup) -> str:
        tensors = [torch.empty(8, 12, 4), torch.empty(8, 12, 4)]
        try:
            return fuser.debug_get_fused_kernel_code(group, [*tensors, *([1] * (len(group.inputs) - 2))], device)
        except UnsupportedError as error:
            return str(error)

    def look(graph_module: fx.GraphModule, _: Any) -> Any:
        fuser.fx.FusionPass()(graph_module)
        found.extend((module.group, emit(module.group)) for module in graph_module.children())
        return graph_module.forward

    def joined(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        parts = [item.view(2, 4, 12, 4).transpose(1, 2) for item in (x * 2, y + 1)]
        if copies:
            # Not in the dimensions of what was copied.
            return parts[0].reshape(2, 24, 8) * 3 + y.view(-1)[:24].view(24, 1)
        return torch.cat(parts, -1) * 3

    torch.compile(joined, backend=aot_autograd(fw_compiler=look))(*torch.randn(2, 8, 12, 4))
    ((group, text),) = found
    assert ("view" if copies else "kernel") in text
    assert text == emit(group)


def test_what_is_kept_is_of_one_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there are no sources to tell states of the code apart: in an archive."""
    monkeypatch.setattr(fx_backend, "_fingerprint", lambda: "")
    tags = set[str]()
    for version in ("1", "2"):
        monkeypatch.setattr(fx_backend, "__version__", version)
        tags.add(fx_backend._cache_tag(None))
    assert len(tags) == 2


@pytest.mark.parametrize("is_kept", [False, True], ids=["compiled", "from the cache"])
def test_a_backward_pass_runs_again(is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of two losses of one graph. Even where an earlier backward pass did not keep what it read."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def step(backend: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        compiled = torch.compile(model, backend=backend)
        x = draw((4, 8), torch.bfloat16).float()
        compiled(x).sum().backward()
        made = compiled(x)
        made.sum().backward(retain_graph=True)
        made.square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    with functorch_config.patch(enable_autograd_cache=is_kept):
        if is_kept:
            step("fuser")
            torch._dynamo.reset()
        for mine, wanted in zip(step("fuser"), step("eager"), strict=True):
            assert torch.allclose(mine, wanted, rtol=1e-5)


@pytest.mark.parametrize(
    ("artifact", "is_found"),
    [("launch", True), *((name, False) for name in ("node", "spec", "source", "compile", "dump"))],
)
def test_kernels_that_are_looked_at_come_from_no_cache_of_graphs(
    artifact: str, is_found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    settings: Any = {"dump": str(tmp_path / "dump")} if artifact == "dump" else {"logs": artifact}
    hits = torch._dynamo.utils.counters["aot_autograd"]
    x = draw((4, 8), torch.float32)
    with functorch_config.patch(enable_autograd_cache=True):
        torch.compile(torch.tanh, backend="fuser")(x)
        torch._dynamo.reset()
        hits.clear()
        with fuser.config.patch(**settings):
            torch.compile(torch.tanh, backend="fuser")(x)
    assert hits["autograd_cache_hit"] == is_found


@pytest.mark.filterwarnings("ignore::fuser.errors.FallbackWarning")
@pytest.mark.parametrize(
    ("owner", "name", "other"),
    [
        (planner, "_can_fuse", {"cpu": False, "cuda": True}),
        # In folders that machines share.
        (cpu_backend, "host_identity", lambda: "another processor"),
        (torch.backends.cpu, "get_cpu_capability", lambda: "ANOTHER"),
    ],
    ids=["fusion is off", "processor", "torch's instructions"],
)
def test_what_was_compiled_elsewhere_is_for_no_other_process(
    owner: Any, name: str, other: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    hits = torch._dynamo.utils.counters["aot_autograd"]
    x, found = draw((4, 8), torch.float32), []
    with functorch_config.patch(enable_autograd_cache=True):
        for is_here in (False, False, True):
            torch._dynamo.reset()
            hits.clear()
            with monkeypatch.context() as patch:
                if not is_here:
                    patch.setattr(owner, name, other)
                torch.compile(torch.sinh, backend="fuser")(x)
            found.append(hits["autograd_cache_hit"])
    assert found == [0, 1, 0]
