"""``fuser.fuse`` of a module: the module as it is now, and what its parts write to."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from functors import draw
from torch import nn
from torch.nn.utils import parametrize

import fuser

pytestmark = pytest.mark.cpu


class Layer(nn.Module):
    """Has one of everything that a trace takes from a module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((9,), 2.0))
        self.register_buffer("shift", torch.ones(9))
        self.act: nn.Module = nn.ReLU()
        self.factor = 3.0

    def forward(self, x: Any) -> Any:
        x = self.act(x * self.weight + self.shift) * self.factor
        return torch.sigmoid(x) if self.training else torch.tanh(x)


def _assign(module: Layer) -> None:
    state = {"weight": torch.full((9,), 7.0), "shift": torch.zeros(9)}
    module.load_state_dict(state, assign=True)


CHANGES: dict[str, Callable[[Layer], Any]] = {
    "eval": lambda module: module.eval(),
    "parameter": lambda module: setattr(module, "weight", nn.Parameter(torch.zeros(9))),
    "buffer": lambda module: setattr(module, "shift", torch.full((9,), -5.0)),
    "assigned": _assign,
    "double": lambda module: module.double(),
    "submodule": lambda module: setattr(module, "act", nn.Tanh()),
    "attribute": lambda module: setattr(module, "factor", 0.5),
    "hook": lambda module: module.act.register_forward_hook(lambda *args: args[2] * 10),
    "forward": lambda module: setattr(module.act, "forward", lambda x: x * 10),
    "values": lambda module: nn.init.constant_(module.weight, 4.0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_module_that_changes_is_traced_again(change: str) -> None:
    x = draw((4, 9), torch.float32, (-0.5, 0.5), seed=1)
    module = Layer()
    fused = fuser.fuse(module)
    for _ in range(2):
        torch.testing.assert_close(fused(x), module(x))
    before = fused(x)
    CHANGES[change](module)
    for _ in range(2):
        torch.testing.assert_close(fused(x), module(x))
    assert not torch.equal(fused(x), before)


def test_train_and_eval_are_traced_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    x = draw((4, 9), torch.float32, seed=1)
    module = Layer()
    fused = fuser.fuse(module)
    wanted = {mode: module.train(mode)(x) for mode in (True, False)}
    for mode in wanted:
        module.train(mode)
        fused(x)
    monkeypatch.setattr(fuser.fx.trace, "trace", None)
    for mode in (True, False, True):
        module.train(mode)
        torch.testing.assert_close(fused(x), wanted[mode])


class Switch(nn.Module):
    """One kernel and nothing else, in either mode."""

    def forward(self, x: Any) -> Any:
        return torch.relu(x) * 2 if self.training else torch.tanh(x) + 3


def test_a_module_that_is_one_kernel_changes_its_mode() -> None:
    x = draw((4, 9), torch.float32, seed=1)
    module = Switch()
    fused = fuser.fuse(module)
    for mode in (True, True, False, False, True):
        module.train(mode)
        torch.testing.assert_close(fused(x), module(x))
        assert len(fused.groups) == 1


def test_the_hooks_of_the_module_itself_are_called() -> None:
    module = Layer()
    fused = fuser.fuse(module)
    x = torch.ones(9)
    before = fused(x)
    module.register_forward_hook(lambda *args: args[2] * 10)
    assert torch.equal(fused(x), before * 10)
    seen: list[torch.Tensor] = []
    fused.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    fused(x)
    module(x)
    assert [item is x for item in seen] == [True, True]


def test_a_class_that_is_given_another_forward() -> None:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x) * 2

    module, x = Scaled(), torch.randn(9)
    fused, first = fuser.fuse(module), Scaled.forward
    for forward in (first, lambda _, x: torch.tanh(x) * 3, first):
        Scaled.forward = forward  # type: ignore[method-assign]
        for _ in range(2):
            assert torch.equal(fused(x), fuser.fuse(Scaled())(x))
            torch.testing.assert_close(fused(x), module(x))
        assert len(fused.groups) == 1


def test_a_fused_module_is_parametrized() -> None:
    module, x = nn.Linear(9, 9), torch.randn(4, 9)
    fused = fuser.fuse(module)
    before = fused(x)
    parametrize.register_parametrization(fused, "weight", nn.Sigmoid())
    kept = fused.fused
    for other in (fused, fused, copy.deepcopy(fused)):
        torch.testing.assert_close(other(x), F.linear(x, fused.weight, fused.bias))
    assert fused.fused is kept
    parametrize.remove_parametrizations(fused, "weight", leave_parametrized=False)
    for other in (fused, module):
        assert torch.equal(other(x), before)


# --- a fused module is a module -----------------------------------------------------------------------------------
def test_a_fused_module_is_the_module() -> None:
    x = draw((4, 9), torch.float32, (-0.5, 0.5), seed=1)
    module = Layer()
    fused = fuser.fuse(module)
    assert isinstance(fused, Layer)
    assert isinstance(fused, fuser.FusedModule)
    assert fuser.fuse(fused) is fused
    assert [name for name, _ in fused.named_parameters()] == ["weight"]
    assert next(fused.parameters()) is module.weight
    assert list(fused.children()) == [module.act]
    assert list(fused.state_dict()) == ["weight", "shift"]
    fused.load_state_dict({"weight": torch.full((9,), 7.0), "shift": torch.zeros(9)})
    assert module.weight[0] == 7.0
    for mode in (False, True):
        fused.train(mode)
        assert module.training is mode
        torch.testing.assert_close(fused(x), module(x))
    assert fused.to(torch.float64) is fused
    assert module.weight.dtype is torch.float64
    torch.testing.assert_close(fused(x.double()), module(x.double()))
    fused.factor = 0.25
    assert module.factor == 0.25
    torch.testing.assert_close(fused(x.double()), module(x.double()))
    assert repr(fused) == repr(module)


class Scaled(nn.Module):
    """Has parameters that callers name."""

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return torch.relu(x + 1) * scale


def test_a_fused_module_takes_what_its_module_takes() -> None:
    # Others ask forward itself: torch.export, whose dynamic shapes have the names of parameters, and torch.fx, which
    # makes a placeholder for each.
    module, x = Scaled(), draw((4, 9), torch.float32, (-0.5, 0.5), seed=1)
    fused = fuser.fuse(module)
    assert inspect.signature(fused.forward) == inspect.signature(module.forward)
    for strict in (True, False):
        rows = {0: torch.export.Dim("rows", min=2)}
        exported = torch.export.export(fused, (x,), dynamic_shapes={"x": rows}, strict=strict).module()
        assert torch.equal(exported(x[1:]), module(x[1:]))
    traced = torch.fx.symbolic_trace(fused)
    assert [node.target for node in traced.graph.find_nodes(op="placeholder")] == ["x", "scale"]
    assert torch.equal(traced(x, 3.0), module(x, 3.0))


def test_a_fused_module_is_fused_and_trains() -> None:
    x = draw((4, 9), torch.float32, (-0.5, 0.5), seed=1)
    module = Layer()
    fused = fuser.fuse(module)
    fused.warmup(x)
    assert len(fused.groups) == 1
    assert isinstance(fused.graph_module, torch.fx.GraphModule)
    assert len(fuser.explain(fused, x).groups[0].kernels) == 1
    optimizer = torch.optim.SGD(fused.parameters(), 0.1)
    before = module.weight.detach().clone()
    fused(x).sum().backward()
    optimizer.step()
    assert not torch.equal(module.weight, before)
    torch.testing.assert_close(fused(x), module(x))
    with torch.no_grad():
        assert torch.equal(fused(x, out=torch.empty(0)), fused(x))


def test_a_fused_module_is_copied_and_pickled_with_its_own_state() -> None:
    x = draw((4, 9), torch.float32, (-0.5, 0.5), seed=1)
    fused = fuser.fuse(Layer())
    wanted = fused(x)
    for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert isinstance(other, fuser.FusedModule)
        assert other.weight is not fused.weight
        nn.init.zeros_(other.weight)
        assert not torch.equal(other(x), wanted)
    assert torch.equal(fused(x), wanted)


def test_a_fused_module_in_a_module() -> None:
    x = draw((4, 9), torch.float32, (-0.5, 0.5), seed=1)
    inner = Layer()
    outer = nn.Sequential(fuser.fuse(inner), nn.Tanh())
    assert list(outer.state_dict()) == ["0.weight", "0.shift"]
    wanted = torch.tanh(inner(x))
    torch.testing.assert_close(outer(x), wanted)
    fused = fuser.fuse(outer)
    torch.testing.assert_close(fused(x), wanted)
    assert len(fused.groups) == 1
    torch._dynamo.reset()
    compiled = torch.compile(outer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), wanted)


class Renorms(nn.Module):
    def __init__(self, lookup: type[nn.Module]) -> None:
        super().__init__()
        self.lookup: Any = lookup(5, 4, max_norm=0.5)

    def forward(self, places: Any) -> Any:
        before = torch.sigmoid(self.lookup.weight) * 2
        found = self.lookup(places)
        return before, found, torch.tanh(self.lookup.weight) + 1


class Counts(nn.Module):
    """A hook of a part writes to a buffer that is read before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(4))
        self.part = nn.Linear(4, 4)
        self.part.register_forward_pre_hook(self.add_one)

    def add_one(self, *_: Any) -> None:
        self.count.add_(1)

    def forward(self, x: Any) -> Any:
        before = torch.sigmoid(self.count) * 2
        return before, self.part(x), torch.tanh(self.count) + 1


class LooksUp(Renorms):
    def __init__(self) -> None:
        super().__init__(nn.Embedding)

    def forward(self, places: Any) -> Any:
        before = torch.sigmoid(self.lookup.weight) * 2
        # The fourth argument is max_norm.
        found = F.embedding(places, self.lookup.weight, None, 0.5)
        return before, found, torch.tanh(self.lookup.weight) + 1


@pytest.mark.parametrize(
    "make",
    [lambda: Renorms(nn.Embedding), lambda: Renorms(nn.EmbeddingBag), LooksUp, Counts],
    ids=["embedding", "bag", "function", "hook"],
)
def test_nothing_moves_across_a_part_that_writes(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module = make()
    torch.manual_seed(0)
    fused = fuser.fuse(make())
    x = torch.rand(2, 4) if isinstance(module, Counts) else torch.tensor([[0, 1]])
    with torch.no_grad():
        wanted = module(x)
        for got, expected in zip(fused(x), wanted, strict=True):
            torch.testing.assert_close(got, expected)


class Leaky(nn.ReLU):
    def forward(self, input: Any) -> Any:  # noqa: A002
        return torch.where(input > 0, input, input * 0.1)


@pytest.mark.parametrize("is_first", [True, False])
def test_hooks_of_all_modules_are_called(is_first: bool) -> None:
    def add_one(module: nn.Module, _: Any, made: torch.Tensor) -> torch.Tensor | None:
        return made + 1 if isinstance(module, nn.ReLU) else None

    x = draw((4, 9), torch.float32, seed=1)
    module = nn.Sequential(nn.ReLU(), nn.Tanh())
    fused, inside = fuser.fuse(module), fuser.fuse(lambda x: module(x) * 2)
    for _ in range(2):
        if not is_first:
            torch.testing.assert_close(fused(x), torch.tanh(torch.relu(x)))
            torch.testing.assert_close(inside(x), torch.tanh(torch.relu(x)) * 2)
        handle = nn.modules.module.register_module_forward_hook(add_one)
        try:
            torch.testing.assert_close(fused(x), torch.tanh(torch.relu(x) + 1))
            torch.testing.assert_close(inside(x), torch.tanh(torch.relu(x) + 1) * 2)
        finally:
            handle.remove()
        is_first = False


@pytest.mark.parametrize("hook", ["forward_pre", "full_backward", "full_backward_pre"])
def test_every_kind_of_hook_is_called(hook: str) -> None:
    seen: list[int] = []
    x = draw((4, 9), torch.float32, seed=1)
    module = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh())
    getattr(module[0], f"register_{hook}_hook")(lambda *_: seen.append(1))
    fused = fuser.fuse(module)
    assert [[item.function.name for item in group.applications] for group in fused.groups] == [["tanh"]]
    fused(x.clone().requires_grad_()).sum().backward()
    assert seen


@pytest.mark.parametrize("kind", ["forward", "forward_pre"])
@pytest.mark.parametrize("path", ["0", "0.1", "1"])
def test_a_hook_of_a_part_is_called_once_a_call(path: str, kind: str) -> None:
    """Also of a part whose own forward is Python; what a hook keeps is a tensor."""
    seen: list[Any] = []
    module = torch.nn.Sequential(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh()), torch.nn.Sigmoid())
    x = draw((4, 9), torch.float32, seed=1)
    fused = fuser.fuse(module)
    fused(x)
    handle = getattr(module.get_submodule(path), f"register_{kind}_hook")(lambda *args: seen.append(args[-1]))
    for count in range(1, 4):
        torch.testing.assert_close(fused(x), module(x))
        assert len(seen) == 2 * count
        torch.testing.assert_close(seen[-2], seen[-1])
    handle.remove()
    fused(x)
    assert len(seen) == 6


def test_a_subclass_of_an_activation_is_itself() -> None:
    root, graph = nn.Module(), torch.fx.Graph()
    root.act = Leaky()
    graph.output(graph.call_module("act", (graph.placeholder("x"),)))
    x = draw((4, 9), torch.float32, seed=1)
    assert torch.equal(fuser.fx.fuse_graph(torch.fx.GraphModule(root, graph))(x), root.act(x))


PREPARE: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "call": lambda module, x: fuser.fuse(module)(x),
    "warmup": lambda module, x: fuser.fuse(module).warmup(x, backward=True),
    "pass": lambda module, x: fuser.fx.fuse_graph(torch.fx.symbolic_trace(module), [x]),
}


@pytest.mark.parametrize("name", PREPARE)
def test_autocast_keeps_no_fake_weights(name: str) -> None:
    # Whatever casts a weight first in its block casts it for all that use it there.
    x = draw((4, 9), torch.float32, seed=1)
    module = nn.Sequential(nn.Linear(9, 9), nn.BatchNorm1d(9), nn.ReLU())
    with torch.autocast("cpu", torch.bfloat16):
        PREPARE[name](module, x)
        made = module(x)
        assert type(made) is torch.Tensor
        assert type(fuser.fuse(module)(x)) is torch.Tensor
        assert made.dtype is torch.bfloat16


class Symmetric(nn.Module):
    def forward(self, weight: Any) -> Any:
        return weight.triu() + weight.triu(1).t()


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(9, 9))
        parametrize.register_parametrization(self, "bias", Symmetric())

    def forward(self, x: Any) -> Any:
        return torch.relu(x + self.bias[0])


def make_parametrized() -> nn.Module:
    linear = nn.Linear(9, 9)
    parametrize.register_parametrization(linear, "weight", Symmetric())
    return nn.Sequential(linear, Biased(), nn.BatchNorm1d(9)).eval()


@pytest.mark.parametrize("name", PREPARE)
def test_cached_parametrizations_hold_tensors(name: str) -> None:
    x = draw((4, 9), torch.float32, seed=1)
    module = make_parametrized()
    if name == "pass":
        module = module[:1]  # type: ignore[index]
    fused = fuser.fuse(module)
    wanted = module(x)
    with parametrize.cached():
        PREPARE[name](module, x)
        torch.testing.assert_close(module(x), wanted)
        # What another call has cached is no constant of the trace.
        torch.testing.assert_close(fused(x), wanted)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2)
    torch.testing.assert_close(fused(x), module(x))
    assert not torch.equal(module(x), wanted)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "make",
    [
        torch.jit.script,
        lambda module: torch.jit.trace(module, torch.ones(2, 4)),
        lambda module: torch.compile(module, backend="eager"),
    ],
    ids=["script", "trace", "compile"],
)
def test_modules_that_hold_no_python_stay_where_they_are(make: Any) -> None:
    inner, x = make(torch.nn.Linear(4, 4)), torch.randn(2, 4)
    with pytest.raises(fuser.errors.ArgumentError, match=r"what torch.jit or torch.compile made of one: fuse the mod"):
        fuser.fuse(inner)
    fused = fuser.fuse(lambda x: torch.relu(torch.relu(inner(x) + 1) * 2))
    model = fuser.fuse(torch.nn.Sequential(inner, torch.nn.ReLU()))
    for change in (lambda: None, lambda: inner.bias.data.fill_(3.0), inner.eval, inner.train):
        change()
        for _ in range(2):
            torch.testing.assert_close(fused(x), fused.function(x))
            torch.testing.assert_close(model(x), torch.relu(inner(x)))
    assert len(fused.groups) == 1
    fused(x).sum().backward()
    assert inner.weight.grad is not None


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_part_may_be_compiled() -> None:
    x, layer = draw((4, 9), torch.float32, seed=1), Layer()
    module = nn.Sequential(torch.compile(layer, backend="fuser"), nn.ReLU())
    fused = fuser.fuse(module)
    for change in (lambda: None, layer.eval, lambda: setattr(layer, "factor", 0.5)):
        change()
        torch.testing.assert_close(fused(x), module(x))


@pytest.mark.cpu
def test_gradients_by_parameters_of_a_layer_are_torchs() -> None:
    """No argument requires them, nor does the graph read a parameter itself."""
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(32, 64).bfloat16(), torch.randn(128, 32).bfloat16()
    function = lambda x: (torch.sigmoid(layer(x)) * x[:, :1]).mean()  # noqa: E731
    wanted = torch.autograd.grad(function(x), layer.weight)[0]
    assert torch.equal(torch.autograd.grad(fuser.fuse(function)(x), layer.weight)[0], wanted)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(9, 3),
        lambda: nn.Sequential(nn.Linear(9, 3), nn.ReLU(), nn.PReLU()),
        lambda: nn.Bilinear(9, 9, 2),
        lambda: _hooked(nn.Linear(9, 3)),
    ],
)
def test_a_module_that_a_function_makes_is_made_in_each_call(make: Callable[[], nn.Module]) -> None:
    """Its parameters are none that a graph could hold: they are drawn anew."""

    def step(x: Any) -> Any:
        module = make()
        made = module(x, x) if isinstance(module, nn.Bilinear) else module(x)
        return torch.abs(made) * 2, made.shape

    x = draw((4, 9), torch.float32, seed=1)
    fused = fuser.fuse(step)
    for seed in range(2):
        (got, shape), (wanted, _) = [torch.manual_seed(seed) and function(x) for function in (fused, step)]
        assert torch.equal(got, wanted)
        assert got.requires_grad
        assert shape == wanted.shape


def _hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *given: given[2] * 2)
    return module
