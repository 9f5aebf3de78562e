"""What ``fuser.fuse`` must not lose of a function it traces: writes, random draws, modes, arguments that are None."""

from __future__ import annotations

import copy
import functools
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from functors import draw, functor
from torch import fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import fuser
from fuser.errors import ArgumentError, DeviceError, GradientError, ShapeError, TracingError, UnsupportedError

pytestmark = pytest.mark.cpu

axpy = functor("axpy")


@pytest.fixture
def x() -> torch.Tensor:
    return draw((4, 9), torch.float32, seed=1)


# --- random numbers ----------------------------------------------------------------------------------------------
def drops(x: Any) -> Any:
    active = torch.relu(x)
    return F.dropout(active), x * F.dropout(x)


def draws(x: Any) -> Any:
    active = torch.relu(x)
    first = torch.rand_like(active)
    other = (active * 2).sin()
    second = x * torch.rand_like(x)
    return first, other, second, torch.bernoulli(second.clamp(0, 1)) * first


class Drops(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Dropout(), torch.nn.Dropout()

    def forward(self, x: Any) -> Any:
        return self.first(torch.relu(x)), x * self.second(x)


@pytest.mark.parametrize("function", [drops, draws, Drops()], ids=["dropout", "draws", "modules"])
@pytest.mark.parametrize("how", ["fuse", "compile"])
def test_random_draws_keep_their_order(function: Callable[..., Any], how: str, x: torch.Tensor) -> None:
    torch._dynamo.reset()
    if how == "fuse":
        fused, reference = fuser.fuse(function), function
    else:
        fused, reference = torch.compile(function, backend="fuser"), torch.compile(function, backend="aot_eager")
    torch.manual_seed(7)
    got = fused(x)
    torch.manual_seed(7)
    for one, other in zip(got, reference(x), strict=True):
        torch.testing.assert_close(one, other)


# --- writes ------------------------------------------------------------------------------------------------------
def normed(x: Any, mean: Any, variance: Any) -> Any:
    result = F.batch_norm(torch.relu(x), mean, variance, training=True)
    return result, mean * 2


def test_running_statistics_are_read_after_they_are_written(x: torch.Tensor) -> None:
    def given() -> tuple[torch.Tensor, ...]:
        return x, torch.zeros(9), torch.ones(9)

    for one, other in zip(fuser.fuse(normed)(*given()), normed(*given()), strict=True):
        torch.testing.assert_close(one, other)


class Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(9)

    def forward(self, x: Any) -> Any:
        return self.norm(torch.relu(x)), self.norm.running_mean * 2


def test_a_norm_layer_that_trains_is_a_barrier(x: torch.Tensor) -> None:
    module = Normed()
    for one, other in zip(fuser.fuse(copy.deepcopy(module))(x), module(x), strict=True):
        torch.testing.assert_close(one, other)


def write(target: Any, value: Any) -> Any:
    return target.copy_(value)


fx.wrap("write")


def test_a_function_that_torch_does_not_know_may_write(x: torch.Tensor) -> None:
    def function(buffer: Any, x: Any) -> Any:
        before = buffer * 2
        written = write(buffer, x)
        return before + x, written

    for one, other in zip(fuser.fuse(function)(x + 1, x), function(x + 1, x), strict=True):
        assert torch.equal(one, other)


def unflatten(parts: Any, spec: pytree.TreeSpec) -> Any:
    return pytree.tree_unflatten(parts, spec)


fx.wrap("unflatten")


def test_a_constant_that_fx_cannot_write_into_code(x: torch.Tensor) -> None:
    _, spec = pytree.tree_flatten({"first": 0, "rest": [0]})
    fused = fuser.fuse(lambda x: unflatten([torch.relu(x) + 1, x * 2], spec))
    for _ in range(2):
        made = fused(x)
        assert torch.equal(made["first"], torch.relu(x) + 1)
        assert torch.equal(made["rest"][0], x * 2)


def test_in_place_operators_write(x: torch.Tensor) -> None:
    def function(x: Any, y: Any) -> Any:
        double = x * 2
        flat = double.view(-1)
        double += y
        double *= 3
        y -= 1
        return flat * 1

    ours, theirs = x.clone(), x.clone()
    assert torch.equal(fuser.fuse(function)(x, ours), function(x, theirs))
    assert torch.equal(ours, theirs)
    assert torch.equal(ours, x - 1)


def test_in_place_operators_on_numbers_are_pythons(x: torch.Tensor) -> None:
    def function(x: Any, n: Any) -> Any:
        n += 1
        n *= 2
        return x * n

    fused = fuser.fuse(function)
    assert torch.equal(fused(x, 2.0), x * 6)
    assert torch.equal(fused(x, 3), x * 8)


class Counts(torch.nn.Module):
    count: torch.Tensor

    def __init__(self, *, replaces: bool) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(9))
        self.replaces = replaces

    def forward(self, x: Any) -> Any:
        if self.replaces:
            self.count = self.count + 1
        else:
            self.count += 1
        return x * self.count


def test_a_buffer_is_written_to_in_every_call(x: torch.Tensor) -> None:
    module = Counts(replaces=False)
    buffer = module.count
    fused = fuser.fuse(module)
    for number in (1, 2, 3):
        assert torch.equal(fused(x), x * number)
    assert module.count is buffer
    assert buffer.tolist() == [3] * 9


def test_a_buffer_that_is_replaced_is_refused(x: torch.Tensor) -> None:
    module = Counts(replaces=True)
    with pytest.raises(UnsupportedError, match="'count' becomes another tensor"):
        fuser.fuse(module)(x)
    assert torch.equal(module(x), x)


# --- modes -------------------------------------------------------------------------------------------------------
def stops_gradients(x: Any) -> Any:
    with torch.no_grad():
        weight = torch.relu(x)
    return weight * x


def casts(x: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return torch.relu(x)


def switches(x: Any) -> Any:
    y = torch.relu(x)
    torch.set_grad_enabled(False)
    z = y * 2
    torch.set_grad_enabled(True)
    return z


class Steep(torch.autograd.Function):
    """A gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 3

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 7


def is_steep(x: Any) -> Any:
    return Steep.apply(x)  # type: ignore[no-untyped-call]


fx.wrap("is_steep")


def test_a_function_of_autograds_is_hidden_by_wrap(x: torch.Tensor) -> None:
    with pytest.raises(UnsupportedError, match=r"as a torch\.autograd\.Function makes one: .* torch\.fx\.wrap hides"):
        fuser.fuse(lambda x: Steep.apply(x) * 2)(x)  # type: ignore[no-untyped-call]
    x = x.detach().requires_grad_()
    fuser.fuse(lambda x: torch.relu(is_steep(x * 2) + 100))(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 14))


@pytest.mark.parametrize("function", [stops_gradients, casts, switches])
def test_a_change_of_mode_is_refused(function: Callable[..., Any], x: torch.Tensor) -> None:
    with pytest.raises(UnsupportedError, match="grad mode or autocast"):
        fuser.fuse(function)(x)
    assert torch.is_grad_enabled()


WEIGHT = torch.nn.Parameter(torch.full((9,), 2.0))
NO_GRAD = torch.no_grad()


@torch.no_grad()
def weigh(x: Any) -> Any:
    return x * WEIGHT


def weighs_in_a_block(x: Any) -> Any:
    with torch.no_grad():
        scale = torch.relu(x * WEIGHT)
    return scale * WEIGHT


def weighs_in_a_named_block(x: Any) -> Any:
    with NO_GRAD:
        scale = torch.relu(x * WEIGHT)
    return scale * WEIGHT


SETTING = {
    "block": weighs_in_a_block,
    "named block": weighs_in_a_named_block,
    "decorator": lambda x: weigh(x) * WEIGHT,
    "function": lambda x: Steep.apply(x * WEIGHT),  # type: ignore[no-untyped-call]
}


@pytest.mark.parametrize("name", SETTING)
def test_a_mode_that_held_while_tracing_may_not_later(name: str, x: torch.Tensor) -> None:
    # Nothing in the graph says that the function sets it; by the parameter, autograd would look through all of it.
    function, x = SETTING[name], x.detach()
    fused = fuser.fuse(function)
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(fused(x), function(x))
        with pytest.raises(UnsupportedError, match="grad mode or autocast"):
            fused(x)


# --- arguments ---------------------------------------------------------------------------------------------------
def test_none_decides_how_a_function_is_traced(x: torch.Tensor) -> None:
    fused = fuser.fuse(lambda x, bias=None, scale=None: x * 2 if bias is None else x + bias)
    for _ in range(3):
        assert torch.equal(fused(x), x * 2)
        assert torch.equal(fused(x, x), x + x)
        assert torch.equal(fused(x, None), x * 2)
        assert torch.equal(fused(x, bias=1.5), x + 1.5)
        assert torch.equal(fused(x, bias=None, scale=3.0), x * 2)


def test_keywords_and_defaults_are_replayed(x: torch.Tensor) -> None:
    fused = fuser.fuse(lambda x, y, s=2.0: axpy(x, y, alpha=s))
    wanted = axpy(x, x, alpha=2.0)
    for arguments, keywords in (((x, x), {}), ((x,), {"y": x}), ((x, x), {"s": 2.0}), ((), {"y": x, "x": x})):
        assert torch.equal(fused(*arguments, **keywords), wanted)
    assert len(fused._traces) == 1
    assert fused.launch((x, x, 2.0), None, None) is not None


def test_a_wrapper_is_given_arguments_as_they_come(x: torch.Tensor) -> None:
    def scaled(x: Any, bias: Any = 0.0, scale: Any = 1.0, *, out: Any = 2.0) -> Any:
        return axpy(x, bias, alpha=scale) * out

    @functools.wraps(scaled)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return scaled(*args, **{"scale": 3.0, **kwargs})

    fused = fuser.fuse(wrapper)
    assert [item.name for item in fused.graph_module.graph.find_nodes(op="placeholder")] == ["x"]
    for _ in range(2):
        for arguments, keywords in (((x,), {}), ((), {"bias": x, "x": x}), ((x, x), {"out": 1})):
            assert torch.equal(fused(*arguments, **keywords), wrapper(*arguments, **keywords))
    with pytest.raises(TypeError, match="multiple values for argument 'scale'"):
        fused(x, x, 2.0)


@pytest.mark.parametrize("function", [torch.log, max, axpy], ids=["torch", "builtin", "functor"])
def test_what_has_no_python_code_is_refused(function: Any) -> None:
    with pytest.raises(TypeError, match="wrap it: lambda x"):
        fuser.fuse(function)


def test_a_modules_attributes_hide_nothing(x: torch.Tensor) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(9, 9))
    module.function = 3  # type: ignore[assignment]
    module._lock = None  # type: ignore[assignment]
    torch.testing.assert_close(fuser.fuse(module)(x), module(x))


def test_numpy_scalars_are_numbers(x: torch.Tensor) -> None:
    fused = fuser.fuse(lambda x, n: axpy(x, x, alpha=n) * n)
    for number in (np.float32(1.5), np.int64(2), np.int16(3), np.float64(0.5)):
        for call in (lambda x, n: axpy(x, n), lambda x, n: axpy(x, x, alpha=n), fused):
            assert torch.equal(call(x, number), call(x, number.item()))
            assert call(x, number).dtype is torch.float32


@pytest.mark.cpu
@pytest.mark.parametrize("number", [np.float32(1.5), np.float64(0.5), np.int64(2), np.int8(2)], ids=repr)
def test_numpy_scalars_in_a_function_are_numbers(number: Any, x: torch.Tensor) -> None:
    uses: list[Callable[[torch.Tensor], Any]] = [
        lambda x: x * number,
        lambda x: number * x,
        lambda x: number - axpy(x, x),
        lambda x: torch.add(x, number),
        lambda x: x.clamp(max=number),
    ]
    for use in uses:
        fuser.reset_stats()
        wanted, got = use(x), fuser.fuse(use)(x)
        assert torch.equal(got, wanted)
        assert got.dtype is wanted.dtype
    assert torch.equal(fuser.fuse(lambda x: x[np.int64(1)] * 2)(x), x[1] * 2)


@pytest.mark.parametrize(
    "use", [lambda x: np.exp(x), lambda x: np.asarray(x) + 1, lambda x: torch.from_numpy(x.numpy() * 2)]
)
def test_numpy_does_not_trace(use: Callable[[torch.Tensor], Any], x: torch.Tensor) -> None:
    with pytest.raises(fuser.errors.TracingError) as caught:
        fuser.fuse(use)(x)
    assert "lambda x: np.exp(x)" in str(caught.value)


def test_bools_of_numpy_are_flags(x: torch.Tensor) -> None:
    fused = fuser.fuse(lambda x, flag: x * 2 if flag else x * 3)
    choose = fuser.create_jit_fn("template <typename T> T choose(T x, bool flag) { return flag ? x : -x; }", flag=True)
    for flag in (np.bool_(True), np.bool_(False)):
        assert torch.equal(fused(x, flag), x * (2 if flag else 3))
        assert torch.equal(choose(x, flag=flag), x if flag else -x)


# --- numbers that tensors are asked for --------------------------------------------------------------------------
SIZES: dict[str, Callable[..., Any]] = {
    "slice": lambda x: x[: x.shape[0] - 1] * 1,
    "full": lambda x: torch.full((2,), x.shape[0] / 3) + x[0, 0],
    "floor": lambda x: x * ((x.size(0) // 2) * 3),
    "quotient": lambda x: x * (x.size(0) / 7),
    "power": lambda x: x * (x.numel() ** -1),
    "dimension": lambda x: torch.softmax(x * 2, x.dim() - 1),
    "scalar": lambda x: axpy(x, x, alpha=x.size(1) / 7),
    "item": lambda x: x * (x.sum().item() / 3),
    "result": lambda x: (x * 2, x.size(0) * 2, x.shape),
    "address": lambda x: (x * 2, x.data_ptr() * 2, (x * 2).data_ptr() != 0),
    "bools": lambda x: (x * 2, x.is_contiguous() & True, torch.equal(x, x) ^ True, x.allclose(x) * 2),
    "list": lambda x: (x * 2, x.tolist()[0][1] * 3 > 1),
}


@pytest.mark.parametrize("how", ["fuse", "pass"])
@pytest.mark.parametrize("name", SIZES)
def test_arithmetic_on_sizes_is_pythons(name: str, how: str) -> None:
    function, wide = SIZES[name], draw((4, 9), torch.float64, seed=1)
    fused = fuser.fuse(function) if how == "fuse" else fuser.fx.fuse_graph(fx.symbolic_trace(function))
    got, wanted = fused(wide), function(wide)
    assert type(got) is type(wanted)
    for mine, eagers in zip(*((item if isinstance(item, tuple) else (item,)) for item in (got, wanted)), strict=True):
        assert type(mine) is type(eagers)
        assert torch.allclose(mine, eagers, rtol=1e-15) if isinstance(mine, torch.Tensor) else mine == eagers
    graph = (fused.graph_module if isinstance(fused, fuser.FusedFunction) else fused).graph
    assert any(node.op == "call_module" for node in graph.nodes)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, n: (x * round(n), round(n, 1), round(x.size(1) / 7)),
        lambda x, n: (x * divmod(n, 2)[0], *divmod(100, n), divmod(x.numel(), 7)[1]),
    ],
)
def test_rounding_and_dividing_numbers_is_pythons(function: Callable[..., Any], x: torch.Tensor) -> None:
    fused = fuser.fuse(function)
    for number in (2.5, 7, 3, -2.66, 3.5):
        got, wanted = fused(x, number), function(x, number)
        assert torch.equal(got[0], wanted[0])
        assert repr(got[1:]) == repr(wanted[1:])


def test_the_text_of_a_shape_is_that_of_each_call() -> None:
    fused = fuser.fuse(lambda x: (x * 2, f"{x.shape}", str((x.t() + 1).shape)))
    for size in (2, 3, 2):
        assert fused(torch.ones(size, 4))[1:] == (f"torch.Size([{size}, 4])", f"torch.Size([4, {size}])")


def test_arithmetic_on_sizes_in_place_is_no_barrier(x: torch.Tensor) -> None:
    def function(x: Any) -> Any:
        active, rows = torch.relu(x), x.size(0)
        rows += 1
        return active * rows

    fused = fuser.fuse(function)
    assert torch.equal(fused(x), function(x))
    assert len(fused.groups) == 1


def test_sizes_in_a_graph_of_dynamo_are_numbers() -> None:
    graphs = []

    def backend(module: fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(module)
        return fuser.fx.FusionPass()(module).graph_module

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: torch.relu(x) * (x.size(0) / 7), backend=backend, dynamic=True)
    wide = draw((3, 5), torch.float64, seed=1)
    assert torch.equal(compiled(wide), torch.relu(wide) * (3 / 7))
    assert any(node.op == "call_module" for node in graphs[0].graph.nodes)


class Loud(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return "loud" if func is torch.exp else super().__torch_function__(func, types, args, kwargs or {})


def test_a_subclass_with_functions_of_its_own_keeps_them(x: torch.Tensor) -> None:
    fused, chain = fuser.fuse(lambda x: torch.exp(x)), fuser.fuse(lambda x: torch.sin(x) * 2)
    fused(x)
    assert fused(x.as_subclass(Loud)) == "loud"
    assert type(chain(x.as_subclass(Loud))) is Loud
    # A class without is a plain tensor to torch's functions, too.
    torch.testing.assert_close(fused(torch.nn.Parameter(x)).detach(), torch.exp(x))


class Softens(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (torch.tanh if func is torch.relu else func)(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_first", [True, False])
def test_a_mode_with_functions_of_its_own_sees_torchs(is_first: bool, x: torch.Tensor) -> None:
    half = fuser.create_jit_fn("template <typename T> T half(T x) { return x * T(0.5); }")

    def step(x: Any) -> Any:
        return torch.relu(half(x)) + x

    fused = fuser.fuse(step)
    for _ in range(2):
        if not is_first:
            assert torch.equal(fused(x), torch.relu(x * 0.5) + x)
        with Softens():
            assert torch.equal(fused(x), torch.tanh(x * 0.5) + x)
            assert torch.equal(fused(x, out=torch.empty_like(x)), torch.tanh(x * 0.5) + x)
            assert torch.equal(fuser.foreach(fused, [x])[0], torch.tanh(x * 0.5) + x)
        is_first = False
    # That of a default device changes no function's result.
    fuser.reset_stats()
    with torch.device("cpu"):
        fused(x)
    assert fuser.stats()["launches"] == 1


class Named(torch.Tensor): ...


def test_results_are_of_the_class_that_torch_gives_them(x: torch.Tensor) -> None:
    def step(x: Any, others: Any) -> Any:
        return torch.relu(x) * 2, x + others[0]

    fused, named, other = fuser.fuse(step), x.as_subclass(Named), (x * 3).as_subclass(Named)
    for given in ((x, [x]), (named, [x]), (x, [other]), (x, [x]), (named, [other])):
        for _ in range(2):
            got, wanted = fused(*given), step(*given)
            assert [type(item) for item in got] == [type(item) for item in wanted]
            assert all(map(torch.equal, got, wanted))
        assert [type(item) for item in fused(others=given[1], x=given[0])] == [type(item) for item in wanted]


# --- modules and copies ------------------------------------------------------------------------------------------
def test_activation_modules_fuse(x: torch.Tensor) -> None:
    layers = [
        torch.nn.ReLU(),
        torch.nn.Sigmoid(),
        torch.nn.GELU("tanh"),
        torch.nn.SiLU(),
        torch.nn.Tanh(),
        torch.nn.GELU(),
    ]
    fused = fuser.fuse(torch.nn.Sequential(*layers))
    names = [item.function.name for item in fused.groups[0].applications]
    assert names == ["relu", "sigmoid", "gelu_tanh", "silu", "tanh", "gelu"]
    torch.testing.assert_close(fused(x), torch.nn.Sequential(*layers)(x))


def test_modules_with_hooks_or_that_write_stay(x: torch.Tensor) -> None:
    seen = []
    hooked = torch.nn.ReLU()
    hooked.register_forward_hook(lambda *_: seen.append(1))
    module = torch.nn.Sequential(hooked, torch.nn.ReLU(inplace=True), torch.nn.Tanh())
    fused = fuser.fuse(module)
    assert [[item.function.name for item in group.applications] for group in fused.groups] == [["tanh"]]
    assert torch.allclose(fused(x), torch.tanh(torch.relu(x)))
    assert seen


@fuser.fuse
def at_the_top(x: Any) -> Any:
    return torch.relu(x) * 2


def test_fused_functions_can_be_copied_and_pickled(x: torch.Tensor) -> None:
    assert pickle.loads(pickle.dumps(at_the_top)) is at_the_top
    module = torch.nn.Module()
    module.top, module.inner = at_the_top, fuser.fuse(lambda x: torch.sigmoid(x) * 3)  # type: ignore[assignment]
    copied = copy.deepcopy(module)
    assert copied.top is at_the_top
    assert copied.inner is not module.inner
    assert torch.equal(copied.inner(x), module.inner(x))  # type: ignore[operator]


# --- out= --------------------------------------------------------------------------------------------------------
def mixes(x: Any) -> Any:
    return torch.relu(x) + x.sum(0)


def test_out_of_several_nodes_follows_the_rules(x: torch.Tensor) -> None:
    fused = fuser.fuse(mixes)
    assert torch.equal(fused(x, out=torch.empty(0)), mixes(x))
    with pytest.raises(GradientError, match="automatic differentiation"):
        fused(x.clone().requires_grad_(), out=torch.empty(4, 9))
    with pytest.raises(DeviceError):
        fused(x, out=torch.empty(4, 9, device="meta"))
    with pytest.raises(ArgumentError, match="got int"):
        fused(x, out=3)
    memory = torch.zeros(5, 9)
    with pytest.raises(ShapeError, match="single memory location"):
        fused(memory[:4], out=memory[1:])
    with pytest.raises(ArgumentError, match="a dict"):
        fuser.fuse(lambda x: {"a": x * 2})(x, out=x)


@pytest.mark.parametrize("kind", ["functor", "fused"])
def test_out_in_a_compiled_function_is_that_of_the_call(kind: str, x: torch.Tensor) -> None:
    function = axpy if kind == "functor" else fuser.fuse(lambda x, y: torch.relu(x) * y)
    outs = [
        torch.empty(4, 9),
        torch.empty(4, 9, dtype=torch.float64),
        torch.empty(0),
        torch.empty(2, 4, 9),
        torch.empty(4, 9, dtype=torch.int32),
    ]
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, out: function(x, x, out=out), backend="eager")

    def outcome(call: Callable[..., Any], out: torch.Tensor, x: torch.Tensor) -> Any:
        own = torch.full_like(out, 7)
        try:
            result = call(x, own)
        except fuser.errors.FuserError as error:
            return type(error)
        assert result is own
        return own.shape, own.dtype, own.tolist()

    torch._dynamo.utils.counters.clear()
    for out in outs:
        assert outcome(compiled, out, x) == outcome(lambda x, out: function(x, x, out=out), out, x)
    # Of what runs after a break, nothing of fuser's own is traced: the lambda, and __call__, for each kind of out.
    assert torch._dynamo.utils.counters["frames"]["total"] <= 2 * len(outs)
    leaf = x.clone().requires_grad_()
    assert outcome(compiled, outs[0], leaf) is GradientError


def test_scalars_of_a_compiled_call_are_checked(x: torch.Tensor) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, **scalars: axpy(x, x, **scalars), backend="eager")
    assert torch.equal(compiled(x, alpha=3.0), axpy(x, x, alpha=3.0))
    with pytest.raises(ArgumentError, match="no scalar 'alhpa'"):
        compiled(x, alhpa=3.0)


def test_a_scalar_that_is_a_tensor_is_traced_in_the_first_call(x: torch.Tensor) -> None:
    torch._dynamo.reset()
    fresh = fuser.jit_fn("template <typename T> T fresh(T x, T a, T b) { return a * x + b; }", scalars=["b", "a"])
    compiled = torch.compile(lambda x, a: fresh(x, a=a, b=0.5), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, torch.tensor(2.0)), 2 * x + 0.5)


def test_a_fused_function_in_a_class_is_pickled_by_name() -> None:
    assert pickle.loads(pickle.dumps(Holder.inside)) is Holder.inside


class Holder:
    rate = 2

    @staticmethod
    @fuser.fuse
    def inside(x: Any) -> Any:
        return torch.relu(x) * 2

    @classmethod
    @fuser.fuse
    def of_class(cls, x: Any) -> Any:
        return torch.relu(x) * cls.rate

    @fuser.fuse
    def of_instance(self, x: Any) -> Any:
        return torch.relu(x) * self.rate

    again = fuser.fuse(lambda self, x: torch.relu(x) * self.rate + 1)


class Derived(Holder):
    rate = 3

    @fuser.fuse
    def of_instance(self, x: Any) -> Any:
        return super().of_instance(x) - 1


def test_fused_methods_are_copied_and_pickled_with_what_they_are_bound_to(x: torch.Tensor) -> None:
    held = Derived()
    held.rate = 5
    methods = (Holder.of_class, Derived.of_class, held.of_class, Holder().of_instance, held.of_instance, held.again)
    for method in methods:
        wanted = method(x)
        for other in (copy.copy(method), copy.deepcopy(method), pickle.loads(pickle.dumps(method))):
            assert torch.equal(other(x), wanted)
    for other in (copy.deepcopy(held), pickle.loads(pickle.dumps(held))):
        assert torch.equal(other.of_instance(x), held.of_instance(x))


def test_an_argument_named_out(x: torch.Tensor) -> None:
    fused = fuser.fuse(lambda x, out: torch.relu(x) + out)
    for _ in range(2):
        assert torch.equal(fused(x, out=x), torch.relu(x) + x)


def test_what_no_symbol_can_be_given_to_is_left_out_or_hidden(x: torch.Tensor) -> None:
    """As the message says."""

    def slope(x: Any) -> Any:
        return torch.func.grad(lambda x: (x * x).sum())(x)

    def total(x: Any) -> Any:
        return torch.vmap(lambda x: x.sum())(x)

    for inner in (slope, total, lambda x: torch.from_numpy(x.numpy())):
        with pytest.raises(TracingError, match=r"leave this part out of .* torch\.fx\.wrap hides"):
            fuser.fuse(lambda x, inner=inner: torch.relu(x) + inner(x))(x)
    hides = fuser.fuse(lambda x: torch.relu(x) + hidden_slope(x))
    for _ in range(2):
        assert torch.equal(hides(x), torch.relu(x) + 2 * x)


@fx.wrap
def hidden_slope(x: Any) -> Any:
    return torch.func.grad(lambda x: (x * x).sum())(x)


@functools.lru_cache
def _mask(count: int) -> torch.Tensor:
    return torch.ones(count, count).tril()


@functools.cache
def _layer(width: int, name: str = "") -> torch.nn.Module:
    return torch.nn.Linear(width, width)


class _Keeps:
    @functools.lru_cache  # noqa: B019
    def root(self, count: int) -> float:
        return count**0.5

    @staticmethod
    @functools.cache
    def twice(x: Any) -> Any:
        return x * 2

    def __call__(self, x: Any, count: Any) -> Any:
        return self.twice(torch.relu(x)) * self.root(count)


def test_what_functions_cache_is_no_symbol(x: torch.Tensor) -> None:
    """Whoever else calls them, a later trace or eager torch, gets what they keep."""
    keeps, local = _Keeps(), functools.lru_cache(lambda shape: torch.arange(shape[-1]))

    def step(x: Any, count: Any) -> Any:
        x = _layer(9, name="first")(x) + _layer(x.shape[1])(x)
        return keeps((x @ x.T) * _mask(x.shape[0]), count), x + local(x.shape)

    fused = fuser.fuse(step)
    for given in ((x, 2), (x[:3], 2), (x, 2.5), (x, 3), (x[:2], 3), (x, 2)):
        for _ in range(2):
            for got, wanted in zip(fused(*given), step(*given), strict=True):
                torch.testing.assert_close(got, wanted)
    assert [type(_mask(rows)) for rows in (2, 3, 4)] == [torch.Tensor] * 3
    assert _mask.cache_info().currsize == 3
    assert _layer.cache_info().currsize == 2
    assert type(keeps.root(2)) is float
    assert isinstance(vars(_Keeps)["twice"], staticmethod)
    assert fuser.fuse(lambda x: torch.relu(x) * _mask(4)[0, 0])(x).shape == x.shape
    assert type(_mask(5)) is torch.Tensor
    fused.warmup(torch.empty(6, 9), 2)
    assert type(_mask(6)) is torch.Tensor


def _copies(x: Any, state: Any, number: float) -> Any:
    kept, shared, own = copy.deepcopy(state), copy.copy(x), copy.deepcopy(x)
    shared.add_(1)
    state["a"].mul_(2)
    return torch.relu(x) * copy.deepcopy(number), kept["a"] + kept["b"], own * 2, state["a"] - copy.copy(number)


def test_copies_are_made_in_each_call(x: torch.Tensor) -> None:
    fused = fuser.fuse(_copies)
    for number in (2.0, 3):
        given, wanted = [(x.clone(), {"a": x * 3, "b": 1.5}, number) for _ in range(2)]
        for one, other in zip(fused(*given), _copies(*wanted), strict=True):
            assert torch.equal(one, other)
        assert torch.equal(given[0], wanted[0])
        assert torch.equal(given[1]["a"], wanted[1]["a"])
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(fuser.fuse(lambda x: copy.deepcopy(x) * 2 + x)(leaf).sum(), leaf)
    assert torch.equal(gradient, torch.ones_like(x))
    with pytest.raises(TracingError, match="pickle wants the elements of a tensor"):
        fuser.fuse(lambda x: pickle.dumps(x))(x)


def test_any_number_of_arguments(x: torch.Tensor) -> None:
    for function in (lambda x, *rest: torch.relu(x) * 2, lambda x, **options: torch.relu(x) * 2):
        assert torch.equal(fuser.fuse(function)(x), torch.relu(x) * 2)


def test_too_many_arguments(x: torch.Tensor) -> None:
    with pytest.raises(TypeError, match="got an unexpected argument: 2 arguments"):
        fuser.fuse(lambda x: torch.relu(x) * 2).warmup(x, x)
    fused = fuser.fuse(lambda x: torch.relu(x) * 2)
    fused(x)
    with pytest.raises(TypeError):
        fused(x, x)


def test_a_list_for_out(x: torch.Tensor) -> None:
    fused = fuser.fuse(lambda x: (torch.relu(x), x * 2))
    a, b = torch.empty_like(x), torch.empty_like(x)
    for _ in range(2):
        fused(x, out=[a, b])
    assert torch.equal(a, torch.relu(x))
    assert torch.equal(b, x * 2)


def test_a_scalar_of_a_compiled_call_has_no_dimensions(x: torch.Tensor) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, alpha: axpy(x, x, alpha=alpha), backend="eager")
    with pytest.raises(ArgumentError, match=r"scalar 'alpha' has shape \[9\], not \[\]"):
        compiled(x, torch.ones(9))


# --- what a function does to its arguments --------------------------------------------------------------------------
def appends(x: Any, made: list[Any]) -> Any:
    made.append(x * 2)
    return x


def names(x: Any, made: dict[str, Any]) -> Any:
    made["twice"] = x * 2
    return x


def counts(x: Any, made: tuple[list[int]]) -> Any:
    made[0][0] += 1
    return x * made[0][0]


def pops(x: Any, made: dict[str, Any]) -> Any:
    return x * made.pop("by")


def keeps_by_default(x: Any, made: list[Any] = []) -> Any:  # noqa: B006 - that is the point
    made.append(1)
    return x * len(made)


@pytest.mark.parametrize(
    ("function", "given"),
    [(appends, ([],)), (names, ({},)), (counts, (([1],),)), (pops, ({"by": 2.0},)), (keeps_by_default, ())],
)
def test_a_function_that_changes_an_argument_is_refused(function: Any, given: Any, x: torch.Tensor) -> None:
    before = copy.deepcopy(given)
    for _ in range(2):
        with pytest.raises(TracingError, match=rf"{function.__name__}\(\) changes its argument 'made'") as raised:
            fuser.fuse(function)(x, *given)
        assert raised.value.line == function.__code__.co_firstlineno
    assert given == before


def test_writing_to_tensors_among_the_arguments_changes_no_list(x: torch.Tensor) -> None:
    def writes(held: Any) -> Any:
        held[0] += 1
        held[1]["x"] *= 2
        return held[0] * held[1]["x"]

    step = fuser.fuse(writes)
    for _ in range(2):
        one, other = ([x.clone(), {"x": x * 3}] for _ in range(2))
        assert torch.equal(step(one), writes(other))
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1]["x"], other[1]["x"])


# --- what an argument is ---------------------------------------------------------------------------------------------
def matched(x: Any, other: Any) -> Any:
    match other:
        case ("scale", factor):
            return x * factor
        case int(number):
            return x - number
        case float():
            return x * 4
        case torch.Tensor():
            return x + other
        case str() | None:
            return x * 5
        case _:
            return x * 0


@functools.singledispatch
def dispatched(_: Any, x: Any) -> Any:
    return x * 5


@dispatched.register
def _(other: int, x: Any) -> Any:
    return x * other


@dispatched.register
def _(other: torch.Tensor, x: Any) -> Any:
    return x + other


KINDS: dict[str, Callable[..., Any]] = {
    "pattern": matched,
    "type": lambda x, other: x * 2 if type(other) is int else x * 3 if type(other) is torch.Tensor else x,
    "class": lambda x, other: x * 2 if other.__class__ is int else x * 3 if x.__class__ is torch.Tensor else x,
    "singledispatch": lambda x, other: dispatched(other, dispatched(x, x)),
    "type of a result": lambda x, other: x * 2 if isinstance(other, int | float) and type(other * 2) is float else x,
    "type as a value": lambda x, other: x * type(other)(2.7) if type(other) in (int, float) else x,
    "type is itself": lambda x, _: x * 2 if type(int) is type and isinstance(int, type) and type("A", (), {}) else x,
    "callable": lambda x, other: x * 2 if callable(other) else x,
    "attribute": lambda x, other: x * 2 if hasattr(other, "shape") else x,
    "attribute of some numbers": lambda x, other: x * 2 if hasattr(other, "bit_length") else x,
    "default": lambda x, other: x * getattr(other, "ndim", 7),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_argument_is_decides_as_without_fusion(kind: str, x: torch.Tensor) -> None:
    function = KINDS[kind]
    fused = fuser.fuse(function)
    for other in (4, 2.5, x, "text", None, ("scale", 2), 7, ("scale", 3.0), 1.5, torch.relu):
        assert torch.equal(fused(x, other), function(x, other)), other
    assert "type" not in globals()


def test_an_attribute_may_have_the_name_of_a_builtin(x: torch.Tensor) -> None:
    class Layer:
        type = 3.0

        def scale(self, x: Any) -> Any:
            return x * self.type if type(self) is Layer else x

    layer = Layer()
    fused = fuser.fuse(layer.scale)
    for factor in (3.0, 5.0):
        Layer.type = factor
        assert torch.equal(fused(x), x * factor)
    assert not {"type"} & vars(layer).keys()


# --- attributes that tensors have not ---------------------------------------------------------------------------------
def scaled(x: Any) -> Any:
    x = axpy(x, x, alpha=2.0)
    factor = getattr(x, "factor", None)
    return x if factor is None else x * factor


def scaled_first(x: Any) -> Any:
    return axpy(x, x * x.factor if hasattr(x, "factor") else x, alpha=2.0)


def test_what_a_tensor_has_is_asked_in_each_call(x: torch.Tensor) -> None:
    marked = x.clone()
    marked.factor = 3.0  # type: ignore[attr-defined]
    for function in (scaled, scaled_first):
        step = fuser.fuse(function)
        for given in (x, x, marked, x, marked, marked):
            assert torch.equal(step(given), function(given))


def misspelled(x: Any) -> Any:
    y = x * 2
    return y.relux()


def test_an_attribute_that_no_tensor_has_is_an_error_in_the_users_line(x: torch.Tensor) -> None:
    with pytest.raises(AttributeError, match="'Tensor' object has no attribute 'relux'") as raised:
        fuser.fuse(misspelled)(x)
    assert "misspelled" in {step.name for step in traceback.extract_tb(raised.tb)}


def yields(x: Any) -> Any:
    yield x * 2


def test_a_result_that_no_graph_returns_is_refused_with_the_function(x: torch.Tensor) -> None:
    with pytest.raises(TracingError) as raised:
        fuser.fuse(yields)(x)
    assert (raised.value.filename, raised.value.line) == (__file__, yields.__code__.co_firstlineno)
