"""``fuser.fuse``: one launch for a function of functors and torch ops."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from math import hypot
from queue import SimpleQueue
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from accuracy import outcome
from functors import assert_same, draw, functor
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fuser
from fuser.errors import ArgumentError, DeviceError
from fuser.fx import trace
from fuser.fx.taking_turns import Turn

pytestmark = pytest.mark.cpu

axpy, sigmoid, relu, wave = (functor(name) for name in ("axpy", "sigmoid", "relu", "wave"))


def launches(function: Any, *args: Any, **kwargs: Any) -> tuple[int, Any]:
    before = fuser.stats()["launches"]
    result = function(*args, **kwargs)
    return fuser.stats()["launches"] - before, result


@pytest.fixture
def x() -> torch.Tensor:
    return draw((4, 33), torch.float32, seed=1)


@pytest.fixture
def y() -> torch.Tensor:
    return draw((4, 33), torch.float32, seed=2)


def test_a_chain_is_one_launch(x: torch.Tensor, y: torch.Tensor) -> None:
    def step(x: Any, y: Any) -> Any:
        return relu(sigmoid(axpy(x, y, alpha=2.0)) * y + x)

    fused = fuser.fuse(step)
    count, got = launches(fused, x, y)
    assert count == 1
    assert len(fused.groups) == 1
    assert torch.allclose(got, step(x, y))
    assert fused.__name__ == "step"


# What a number decides, which are run-time arguments of the same op, and some that make it another one, or none.
DECIDING: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]] = {
    "smooth_l1": (lambda x, y, n: F.smooth_l1_loss(x, y, beta=n), (0.3, 1.5, 2), (0.0, -1.0, 1j)),
    "huber": (lambda x, y, n: F.huber_loss(x, y, delta=n), (0.3, 1.5), (0.0, -1.0)),
    "hinge": (lambda x, y, n: F.hinge_embedding_loss(x, y.sign(), n), (1.0, 0.5, 2), (0.3, 1e9, math.nan)),
    "cosine": (lambda x, y, n: F.cosine_embedding_loss(x, y, y.amax(1).sign(), n), (0.0, 0.3), ()),
    "hardtanh": (lambda x, y, n: F.hardtanh(x, -n, n) + y, (0.5, 2.0, 1), (-1.0, math.nan)),
    "masked_fill": (lambda x, y, n: x.masked_fill(y > 0, n) * 2, (0.0, -1e4, -math.inf, 3, math.nan), (1e9, 1j)),
    "softshrink": (lambda x, y, n: F.softshrink(x, n) + y, (0.5, 0.1), (-1.0, 1e9)),
    "hardshrink": (lambda x, y, n: F.hardshrink(x, n) + y, (0.5, 0.1, -1.0), ()),
    "threshold": (lambda x, y, n: F.threshold(x, 0.1, n) + y, (0.5, -3, math.inf), ()),
    "nan_to_num": (lambda x, y, n: torch.nan_to_num(x / 0, n) + y, (0.5, -3.0, 2), ()),
}


@pytest.mark.parametrize("name", DECIDING)
def test_a_number_that_decides_which_op_a_call_is(name: str, x: torch.Tensor, y: torch.Tensor) -> None:
    function, alike, others = DECIDING[name]
    fused = fuser.fuse(function)
    found = set()
    for number in (*alike, *others, *alike):
        constant = fuser.fuse(lambda x, y, number=number: function(x, y, number))
        got, wanted = outcome(fused, x, y, number), outcome(function, x, y, number)
        if isinstance(wanted, Exception):
            assert (type(got), str(got)) == (type(wanted), str(wanted))
            continue
        assert_same(got, wanted)
        if number in alike:
            found.add(fused.graph_for((x, y, number))[0])
            assert all("arithmetic on numbers" in why for _, why in fuser.explain(fused, x, y, number).unfused)
            assert launches(fused, x, y, number)[0] == launches(constant, x, y)[0]
    assert len(found) == 1


def test_a_number_that_decides_is_asked_for_in_warm_ups_and_gradients(x: torch.Tensor, y: torch.Tensor) -> None:
    fused = fuser.fuse(lambda x, y, beta=1.0, low=-0.5: F.smooth_l1_loss(F.hardtanh(x, low, beta), y, beta=beta))
    fused.warmup(x, y)
    fused.warmup(x.requires_grad_(), y, backward=True)
    compiles = fuser.stats()["compiles"]
    for numbers in ((), (0.25,), (0.25, 0.0), (2, -1)):
        made = torch.autograd.grad(fused(x, y, *numbers), x)
        assert_same(made[0], torch.autograd.grad(fused.function(x, y, *numbers), x)[0])
    assert fuser.stats()["compiles"] == compiles
    assert len(fused.groups) == 1


@pytest.mark.parametrize("numerics", ["strict", "fast"])
def test_labels_are_smoothed_by_a_number_that_only_a_call_knows(numerics: str) -> None:
    def loss(x: Any, target: Any, smoothing: float = 0.0) -> Any:
        return F.cross_entropy(x * 2, target, label_smoothing=smoothing)

    with FakeTensorMode(allow_non_fake_inputs=True), fuser.config.patch(numerics=numerics):
        given = torch.empty(4, 9, device="cuda"), torch.empty(4, device="cuda", dtype=torch.int64)
        for smoothing in (0.0, 0.1, 0.3, 0):
            constant = fuser.fuse(lambda x, target, smoothing=smoothing: loss(x, target, smoothing))
            found = fuser.explain(constant, *given), fuser.explain(fuser.fuse(loss), *given, smoothing)
            count = 1 if smoothing and numerics == "strict" else 2
            assert [len(item.groups[0].nodes) for item in found] == [count, count]
        assert len(fuser.explain(fuser.fuse(loss), *given).groups[0].nodes) == 2
        assert len(fuser.explain(fuser.fuse(F.cross_entropy), *given).groups) == 1


def test_decorator_and_groups(x: torch.Tensor) -> None:
    @fuser.fuse
    def step(x: Any) -> Any:
        return sigmoid(x) + 1

    assert [item.function.name for item in step.groups[0].applications] == ["sigmoid", "add"]
    assert isinstance(step.graph_module, torch.fx.GraphModule)
    assert launches(step, x)[0] == 1


def test_numbers_are_run_time_arguments(x: torch.Tensor, y: torch.Tensor) -> None:
    fused = fuser.fuse(lambda x, y, a, b: axpy(x, y, alpha=a) * b + 1.5)
    for kind in (float, int):
        fused(x, y, kind(1), kind(1))
        before = fuser.n_compiled_kernels()
        for value in (2, 3, -7):
            got = fused(x, y, kind(value), kind(value + 1))
            assert torch.allclose(got, (value * x + y) * (value + 1) + 1.5)
        assert fuser.n_compiled_kernels() == before


def test_constants_share_a_kernel(x: torch.Tensor) -> None:
    first, second = fuser.fuse(lambda x: sigmoid(x) * 2.5), fuser.fuse(lambda x: sigmoid(x) * -4.25)
    assert torch.allclose(first(x), torch.sigmoid(x) * 2.5)
    before = fuser.n_compiled_kernels()
    assert torch.allclose(second(x), torch.sigmoid(x) * -4.25)
    assert fuser.n_compiled_kernels() == before


def test_a_new_shape_compiles_nothing() -> None:
    fused = fuser.fuse(lambda x: sigmoid(x) - 1)
    fused(draw((8, 8), torch.float32))
    before = fuser.n_compiled_kernels()
    for shape in ((3,), (100000,), (2, 3, 4), (1, 5)):
        value = draw(shape, torch.float32)
        assert torch.allclose(fused(value), torch.sigmoid(value) - 1)
    assert fuser.n_compiled_kernels() == before


def test_keyword_and_default_arguments(x: torch.Tensor, y: torch.Tensor) -> None:
    @fuser.fuse
    def step(x: Any, y: Any, alpha: Any = 2.0, *, beta: Any = 0.5) -> Any:
        return axpy(x, y, alpha=alpha) + beta

    assert torch.allclose(step(x, y), 2 * x + y + 0.5)
    assert torch.allclose(step(x, y=y, alpha=-1.0), -x + y + 0.5)
    assert torch.allclose(step(y=y, x=x, beta=3.0), 2 * x + y + 3)
    with pytest.raises(TypeError, match="gamma"):
        step(x, y, gamma=1)
    with pytest.raises(TypeError, match="'y'"):
        step(x, beta=1.0)


def test_defaults_and_flags_are_replayed(x: torch.Tensor, y: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    @fuser.fuse
    def step(x: Any, y: Any, alpha: Any = 2.0, flip: Any = False, *, word: Any = "add", of: Any = None) -> Any:
        if flip:
            x, y = y, x
        return x - alpha * y if word == "sub" else x + alpha * y

    def check(*args: Any, is_replayed: bool = True, **options: Any) -> None:
        met: list[Any] = []
        with monkeypatch.context() as patched:
            anew = step.call_anew
            patched.setattr(step, "call_anew", lambda *args, **options: met.append(args) or anew(*args, **options))
            got = step(*args, **options)
        assert_same(got, step.function(*args, **options))
        assert bool(met) is not is_replayed

    check(x, y, is_replayed=False)
    check(x, y)
    check(x, y, 3.0)
    check(y=x, x=y, alpha=0.5)
    check(x, y, 2.0, False, word="".join(["a", "dd"]), of=None)
    for options in ({"flip": True}, {"word": "sub"}, {"of": 1.0}, {"flip": None}, {"flip": 0}):
        for _ in range(2):
            check(x, y, is_replayed=False, **options)
        check(x, y)
    # What is equal, and another object, is found a step later.
    other = fuser.fuse(lambda x, device: x.to(device) * 2.0)
    assert_same(other(x, torch.device("cpu")), x * 2.0)
    with monkeypatch.context() as patched:
        patched.setattr(trace, "call_anew", None)
        assert_same(other(x, torch.device("cpu")), x * 2.0)
    for wrong in ((x,), (x, y, 1.0, False, "add", None, None)):
        with pytest.raises(ArgumentError):
            step(*wrong)
    with pytest.raises(ArgumentError, match="unexpected argument: x"):
        step(x, y, x=x)


def test_several_outputs_and_getitem(x: torch.Tensor) -> None:
    def step(x: Any) -> Any:
        pair = wave(x)
        sine, cosine = pair[0], pair[1]
        return sine * sine + cosine * cosine, sine

    count, (ones, sine) = launches(fuser.fuse(step), x)
    assert count == 1
    assert torch.allclose(ones, torch.ones_like(x))
    assert_same(sine, wave(x)[0])


def test_the_tuple_itself_is_returned(x: torch.Tensor) -> None:
    count, got = launches(fuser.fuse(lambda x: wave(sigmoid(x))), x)
    assert count == 1
    assert isinstance(got, tuple)
    assert_same(got, wave(sigmoid(x)))


def test_dicts_and_nested_results(x: torch.Tensor, y: torch.Tensor) -> None:
    def step(x: Any, y: Any) -> Any:
        a = sigmoid(x)
        return {"a": a, "rest": [a + y, (x, 3)]}

    count, got = launches(fuser.fuse(step), x, y)
    assert count == 1
    assert_same(got["a"], sigmoid(x))
    assert_same(got["rest"][0], sigmoid(x) + y)
    assert got["rest"][1][0] is x
    assert got["rest"][1][1] == 3


def test_results_without_a_hash(x: torch.Tensor) -> None:
    fused = fuser.fuse(lambda x: (relu(x), slice(0, x.shape[0] // 2), {"part": slice(1, None)}))
    assert_same(fused(x)[0], relu(x))
    assert fused(x)[1:] == (slice(0, x.shape[0] // 2), {"part": slice(1, None)})


def test_an_unused_value_does_no_harm(x: torch.Tensor) -> None:
    def step(x: Any) -> Any:
        sigmoid(x)
        return relu(x)

    assert_same(fuser.fuse(step)(x), relu(x))


def test_unknown_ops_stay_eager_between_fusion_nodes(x: torch.Tensor, y: torch.Tensor) -> None:
    def step(x: Any, y: Any) -> Any:
        a = sigmoid(x) * 2
        b = a @ y.t()
        return relu(b) + b.prod()

    fused = fuser.fuse(step)
    count, got = launches(fused, x, y)
    assert count == 2
    assert torch.allclose(got, step(x, y), rtol=1e-5)
    unfused = dict(fuser.explain(fused).unfused)
    assert {"mm", "t", "prod"} <= set(unfused)


def test_methods_that_return_views(x: torch.Tensor) -> None:
    def step(x: Any) -> Any:
        return (sigmoid(x).reshape(-1)[1:] + 1).view(-1, 1) * 2

    assert torch.allclose(fuser.fuse(step)(x), step(x))


def test_modules(x: torch.Tensor) -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(33, 5)
            self.scale = torch.nn.Parameter(torch.full((5,), 0.5))

        def forward(self, x: Any) -> Any:
            return torch.sigmoid(self.linear(x)) * self.scale + 1

    block = Block()
    fused = fuser.fuse(block)
    with torch.no_grad():
        count, got = launches(fused, x)
        assert count == 1
        assert torch.allclose(got, block(x))
        block.scale.fill_(3.0)
        assert torch.allclose(fused(x), block(x))
    # Gradients are not lost: torch's ops have their own.
    fused(x).sum().backward()
    assert block.scale.grad is not None
    mine = block.scale.grad.clone()
    block.zero_grad()
    block(x).sum().backward()
    assert torch.allclose(mine, block.scale.grad)


def test_gradients_are_never_lost(x: torch.Tensor, y: torch.Tensor) -> None:
    fused = fuser.fuse(lambda x, y: axpy(x, y) * 2)
    leaf = x.clone().requires_grad_()
    fused(leaf, y).sum().backward()
    assert leaf.grad is not None
    jump = fuser.jit_fn("template <typename T> T jump(T x) { goto end; end: return x; }")
    fused = fuser.fuse(lambda x: jump(x) * 2)
    with pytest.raises(fuser.errors.GradientError, match="jump"):
        fused(x.clone().requires_grad_())
    with torch.no_grad():
        assert torch.equal(fused(x.clone().requires_grad_()), x * 2)
    # What no derivative can be derived of has that of its eager version.
    own = fuser.jit_fn(
        "template <typename T> T twice(T x, T k) { goto end; end: return k * x; }",
        scalars={"k": 2},
        fallback=lambda x, k: x * k,
    )
    leaf = x.clone().requires_grad_()
    fuser.fuse(lambda x: own(x) * 3)(leaf).sum().backward()
    assert torch.allclose(leaf.grad, torch.full_like(x, 6))


@pytest.mark.parametrize("kind", ["real", "meta", "fake"])
def test_warmup_compiles_and_launches_nothing(kind: str, x: torch.Tensor, y: torch.Tensor) -> None:
    text = f"template <typename T> T warm_{kind}(T x, T k) {{ return x * k + k; }}"
    own = fuser.jit_fn(text, scalars={"k": 2.0})

    @fuser.fuse
    def step(x: Any, y: Any) -> Any:
        return own(own(x, k=3.0) @ y.t())

    before = fuser.stats()
    if kind == "real":
        step.warmup(x, y)
    elif kind == "meta":
        step.warmup(x.to("meta"), y.to("meta"))
    else:
        mode = torch._subclasses.FakeTensorMode()
        step.warmup(mode.from_tensor(x), y=mode.from_tensor(y))
    after = fuser.stats()
    assert after["launches"] == before["launches"]
    assert after["compiles"] > before["compiles"]
    with fuser.config.patch(no_compile=True):
        count, got = launches(step, x, y)
    assert count == 2
    assert torch.allclose(got, 2 * ((3 * x + 3) @ y.t()) + 2, rtol=1e-4)


def test_explain(x: torch.Tensor, y: torch.Tensor) -> None:
    fused = fuser.fuse(lambda x, y: torch.cumprod(axpy(x, y) + 1, 0))
    found = fuser.explain(fused, x, y)
    assert len(found.groups) == 1
    assert len(found.groups[0].kernels) == 1
    assert "axpy" in found.groups[0].kernels[0].text
    assert [name for name, _ in found.unfused] == ["cumprod"]
    assert "axpy" in str(found)
    assert "cumprod" in str(found)


def test_explain_takes_what_calls_take_by_name(x: torch.Tensor, y: torch.Tensor) -> None:
    @fuser.fuse
    def step(x: torch.Tensor, y: torch.Tensor, *, deep: bool = False) -> torch.Tensor:
        return torch.cumprod(axpy(x, y), 0) if deep else axpy(x, y) + 1

    for found in (fuser.explain(step, x, y, deep=True), fuser.explain(step, y=y, x=x, deep=True)):
        assert [name for name, _ in found.unfused] == ["cumprod"]
    assert not fuser.explain(step, x, y=y).unfused
    with pytest.raises(ArgumentError, match="depth"):
        fuser.explain(step, x, y, depth=True)
    with pytest.raises(ArgumentError, match="has no scalar 'beta'"):
        fuser.explain(axpy, x, y, beta=2.0)
    with pytest.raises(ArgumentError, match="by position, got 'deep'"):
        fuser.explain(step.groups[0], x, y, deep=True)
    sum_of = fuser.create_reduction_fn("template <typename T> T add(T a, T b) { return a + b; }", identity=0)
    assert fuser.explain(sum_of, x, dim=0).groups[0].kernels != fuser.explain(sum_of, x).groups[0].kernels


def test_outputs_of_two_shapes_are_two_launches(x: torch.Tensor) -> None:
    fused = fuser.fuse(lambda x, row: (sigmoid(row), sigmoid(row) + x))
    row = draw((33,), torch.float32, seed=3)
    count, got = launches(fused, x, row)
    assert count == 2
    assert_same(got, (sigmoid(row), sigmoid(row) + x))


def test_nested_fused_functions(x: torch.Tensor) -> None:
    inner = fuser.fuse(lambda x: sigmoid(x) + 1)
    outer = fuser.fuse(lambda x: relu(inner(x)) * 2)
    assert torch.allclose(outer(x), (torch.sigmoid(x) + 1) * 2)


def test_switched_off_it_runs_in_eager_torch(x: torch.Tensor) -> None:
    fused = fuser.fuse(lambda x: torch.sigmoid(x) * 2 + x)
    before = fuser.override_can_fuse_on_cpu(False)
    try:
        count, got = launches(fused, x)
        assert count == 0
        assert any("switched off" in reason for reason in fuser.stats()["fallbacks"])
    finally:
        fuser.override_can_fuse_on_cpu(before)
    assert torch.equal(got, torch.sigmoid(x) * 2 + x)


def test_threads_share_a_fused_function(x: torch.Tensor) -> None:
    from concurrent.futures import ThreadPoolExecutor

    fused = fuser.fuse(lambda x: sigmoid(x) * 0.75 + relu(x) / 3)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: fused(x), range(32)))
    for result in results:
        assert torch.equal(result, results[0])


def test_a_trace_is_of_one_thread(x: torch.Tensor) -> None:
    from concurrent.futures import ThreadPoolExecutor

    from torch._dynamo import convert_frame

    layer = torch.nn.Linear(3, 3)
    compiled = torch.compile(layer, backend="eager")
    wanted, seen = compiled(torch.ones(3)), SimpleQueue[Any]()

    def call() -> Any:
        # What fx replaces is replaced for all threads, and puts back what it found, as what torch.compile traces.
        return layer(torch.ones(3)), compiled(torch.ones(3)), convert_frame.compile_lock.acquire(blocking=False)

    def traced(x: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            seen.put(pool.submit(call).result())
        return relu(x) * 2

    assert torch.equal(fuser.fuse(traced)(x), relu(x) * 2)
    *results, is_free = seen.get()
    assert not is_free
    for result in results:
        assert type(result) is torch.Tensor
        assert torch.equal(result, wanted)

    def asks() -> bool:
        return bool(fx._symbolic_trace.is_fx_symbolic_tracing())

    told = list[bool]()
    with Turn(), ThreadPoolExecutor(1) as pool:
        make_fx(lambda x: (x + 1, told.extend((asks(), pool.submit(asks).result())))[0])(x)
    assert [*told, asks()] == [True, False, False]


def test_an_interrupt_that_meets_fx_leaves_modules_as_they_were() -> None:
    kind: Any = torch.nn.Module
    before = kind.__call__, kind.__getattr__
    with Turn():
        # As it does where it is interrupted before it puts them back.
        kind.__call__ = kind.__getattr__ = lambda *_: None
    assert (kind.__call__, kind.__getattr__) == before


def test_deepcopy_of_a_fused_graph(x: torch.Tensor) -> None:
    fused = fuser.fuse(lambda x: sigmoid(x) * 2)
    assert torch.equal(copy.deepcopy(fused.graph_module)(x), fused(x))


def test_functions_of_math_take_numbers_of_each_call(x: torch.Tensor) -> None:
    def scale(x: Any, a: float, b: float) -> Any:
        return x * math.sqrt(a) + hypot(a, b)

    before = dict(vars(math))
    fused = fuser.fuse(scale)
    for a, b in ((4.0, 3.0), (9.0, 12.0), (2.0, 0.5)):
        assert torch.equal(fused(x, a, b), x * math.sqrt(a) + hypot(a, b))
    # One graph for all numbers.
    assert {math.sqrt, math.hypot} <= {node.target for node in fused.graph_module.graph.nodes}

    def fails(x: Any, a: float) -> Any:
        raise KeyError(math.floor(a))

    with pytest.raises(KeyError):
        fuser.fuse(fails)(x, 2.5)
    # Nobody else's functions are left changed.
    assert vars(math) == before


def test_arithmetic_on_numbers_stays_pythons() -> None:
    # In double, and a number: float32 operations would lose digits that a float64 tensor shows.
    x = draw((5, 33), torch.float64, seed=1)
    for step in (lambda x, a: x * (a / 3), lambda x, a: axpy(x, x, alpha=a * 2), lambda x, a: (x + 1, a + 1)):
        for value in (1.0, 3):
            got, wanted = fuser.fuse(step)(x, value), step(x, value)
            if isinstance(wanted, tuple):
                assert type(got[1]) is type(wanted[1])
                assert got[1] == wanted[1]
            else:
                assert torch.allclose(got, wanted, rtol=1e-15)


@pytest.mark.cpu
def test_out_in_a_tuple_gives_the_same_kind_of_result_again() -> None:
    # An argument that is None: another launcher than the function's own replays the call.
    fused = fuser.fuse(lambda x, y=None: x * 2 + 1 if y is None else x * y)
    x, out = torch.randn(5), torch.empty(5)
    fused(x, x)
    for _ in range(3):
        assert fused(x, None, out=(out,)) is out
        assert fused(x, None, out=[out]) is out


@pytest.mark.cpu
@pytest.mark.parametrize("grad", [False, True])
def test_what_is_decided_by_a_size_is_decided_for_each(grad: bool) -> None:
    @fuser.fuse
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * 2.0 if x.shape[0] > 3 else x * 3.0

    for size in (5, 5, 2, 7, 3, 2, 5):
        x = torch.rand(size, requires_grad=grad)
        assert torch.equal(function(x), x * (2.0 if size > 3 else 3.0))


class Held:
    """What a fused function reads beside its arguments."""

    factor: float


class Pair(NamedTuple):
    """What a fused function may return."""

    values: torch.Tensor
    size: int


def test_results_keep_their_classes(x: torch.Tensor) -> None:
    fused = fuser.fuse(lambda x: Pair(torch.sort(x * 2)[0] + 1, 7))
    for _ in range(3):
        made = fused(x)
        assert type(made) is Pair
        assert made.size == 7
        assert_same(made.values, torch.sort(x * 2)[0] + 1)


@pytest.mark.parametrize("grad", [False, True])
def test_graphs_of_several_steps_are_replayed(grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held()
    held.factor = first = 2.0

    @fuser.fuse
    def step(x: torch.Tensor, scale: float) -> dict[str, torch.Tensor]:
        y = torch.sort(x * x * scale)[0]
        return {"y": y, "z": axpy(y, x, alpha=3.0) * held.factor}

    def check(rows: int, scale: float, *, is_replayed: bool) -> None:
        x = torch.randn(rows, 5, requires_grad=grad)
        met = []
        with monkeypatch.context() as patched:
            anew = step.call_anew
            patched.setattr(step, "call_anew", lambda *args: met.append(args) or anew(*args))
            got = step(x, scale)
        wanted = step.function(x, scale)
        torch.testing.assert_close(got, wanted)
        if grad:
            torch.testing.assert_close(*(torch.autograd.grad(made["z"].sum(), x)[0] for made in (got, wanted)))
        assert bool(met) is not is_replayed

    check(3, 2.0, is_replayed=False)
    for rows, scale in ((3, 2.0), (3, 5.0), (4, 2.0)):
        check(rows, scale, is_replayed=True)
    held.factor = 7.0
    check(3, 2.0, is_replayed=False)
    check(3, 2.0, is_replayed=False)
    held.factor = first
    check(3, 2.0, is_replayed=True)
    if grad:
        with torch.no_grad():
            assert not step(torch.randn(3, 5, requires_grad=True), 2.0)["z"].requires_grad
    else:
        check(3, 2.0, is_replayed=True)
        x = torch.randn(3, 5, requires_grad=True)
        assert step(x, 2.0)["z"].requires_grad


@pytest.mark.parametrize("grad", [False, True])
def test_tensors_on_several_devices_are_launched_apart(grad: bool) -> None:
    x = draw((5, 33), torch.float32, seed=4).requires_grad_(grad)
    away = torch.ones(4, device="meta", requires_grad=grad)
    functions: tuple[Callable[..., Any], ...] = (
        lambda x, y: (torch.relu(x) * 2, y.abs() + 1),
        lambda x, y: (x.float() * 2, axpy(y, 1.0) + 1, axpy(x, x)),
        # What is made on the way is on the host.
        lambda x, y: (x + 1, y * 2 + (torch.arange(4) * 0.5).to(y.device)),
        # The host's without dimensions go along, and are results where they are.
        lambda x, y: (y * (x.detach().amax() + 1) * 2, x.detach().amax() + 1),
    )
    for function in functions:
        fused = fuser.fuse(function)
        for _ in range(2):
            for got, wanted in zip(fused(x, away), function(x, away), strict=True):
                assert (got.device, got.shape, got.requires_grad) == (wanted.device, wanted.shape, wanted.requires_grad)
                assert got.is_meta or torch.equal(got, wanted)
    with pytest.raises(DeviceError, match="cpu and meta"):
        fuser.fuse(lambda x, y: torch.relu(x[0, :4]) + y * 2)(x, away)
    assert "each has kernels of its own" in str(fuser.explain(fuser.fuse(lambda x, y: (x * 2, y * 2)), x, away))


def test_a_number_of_the_hosts_stays_there() -> None:
    step, away = torch.tensor(2.0), torch.ones(4, device="meta")
    fused = fuser.fuse(lambda x, step: (x * (step + 1), step + 1, step * 2))
    for _ in range(2):
        scaled, more, twice = fused(away, step)
        assert scaled.is_meta
        assert (more.device.type, more.item(), twice.item()) == ("cpu", 3.0, 4.0)
