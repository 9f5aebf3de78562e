"""The fast path: calls like earlier ones are replayed, and nothing that differs from them ever is."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import pickle
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fuser
from fuser import launcher
from fuser.cxx.functor import is_steady, parse_functor
from fuser.errors import ArgumentError, FuserError, GradientError
from fuser.python_launcher import PythonLauncher
from fuser.record import _ALLOCATE, Recorded

pytestmark = pytest.mark.cpu

AXPY = "template <typename T> T axpy(T x, T y, T alpha) { return alpha * x + y; }"
BOTH = "template <typename T> void both(T x, T y, T& sum, T& product) { sum = x + y; product = x * y; }"
MEASURE = "template <typename T> T measure(T x) { return sizeof(T) + x; }"


@pytest.fixture(params=["c", "python"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run a test with both launchers: new callables get the one of the kind."""
    if request.param == "c":
        if launcher._c is None:
            pytest.skip("fuser was installed without a C compiler")
        yield "c"
        return
    # Classes derive from the launcher when fuser is imported; the methods below make the other kind serve.
    monkeypatch.setattr(launcher, "_c", None)
    yield "python"


def make(kind: str, text: str = AXPY, outputs: int = 1, **scalars: Any) -> Callable[..., Any]:
    """Return a new function whose fast path is of the kind."""
    function = fuser.create_multi_output_jit_fn(text, outputs, **scalars)
    if kind == "c":
        return function
    python = PythonLauncher(function.scalar_names, tuple(map(function.defaults.get, function.scalar_names)))

    def call(*tensors: Any, out: Any = None, **values: Any) -> Any:
        replayed = python.launch(tensors, values, out)
        if replayed is not None:
            return replayed
        if torch.overrides.has_torch_function(tensors):
            return function.call_anew(*tensors, out=out, **values)
        inputs = [*tensors, *function.bind_scalars(values).values()]
        return fuser.route.call_anew(function.spec(len(tensors)), inputs, python, tensors, values, out)

    call.launcher = python  # type: ignore[attr-defined]
    return call


def replays(function: Callable[..., Any], tensors: tuple[Any, ...], out: Any = None, **scalars: Any) -> bool:
    """Whether a call would go by a record; it is made if so."""
    fast = getattr(function, "launcher", function)
    return fast.launch(tensors, scalars, out) is not None


def draw(*shape: int, **options: Any) -> torch.Tensor:
    return torch.rand(*shape, **options) + 0.5


def axpy(x: Any, y: Any, alpha: Any = 2.0) -> torch.Tensor:
    # The products with small integers are exact, so contraction cannot show.
    return alpha * x + y


def test_a_second_call_is_replayed_with_new_values(kind: str) -> None:
    function = make(kind, alpha=2.0)
    x, y = draw(40), draw(40)
    assert not replays(function, (x, y))
    first = function(x, y)
    before = fuser.stats()["launches"]
    x2, y2 = draw(40), draw(40)
    assert replays(function, (x2, y2))
    second = function(x2, y2)
    assert fuser.stats()["launches"] == before + 2
    torch.testing.assert_close(first, axpy(x, y), rtol=0, atol=0)
    torch.testing.assert_close(second, axpy(x2, y2), rtol=0, atol=0)


def test_several_outputs_come_as_a_tuple(kind: str) -> None:
    function = make(kind, BOTH, 2)
    for _ in range(3):
        x, y = draw(5, 4), draw(5, 4)
        sums, products = function(x, y)
        assert torch.equal(sums, x + y)
        assert torch.equal(products, x * y)
    assert replays(function, (x, y))


@pytest.mark.parametrize("value", [3.0, 3, True, 2 + 1j, -(2**62)])
def test_scalars_keep_their_values_and_types(kind: str, value: Any) -> None:
    function = make(kind, alpha=2.0)
    dtype = torch.complex128 if isinstance(value, complex) else torch.float64
    x, y = draw(9, dtype=torch.float64).to(dtype), draw(9, dtype=torch.float64).to(dtype)
    for _ in range(2):
        assert torch.equal(function(x, y, alpha=value), axpy(x, y, value))
        assert torch.equal(function(x, y), axpy(x, y))
    assert replays(function, (x, y), alpha=value)
    other = True if type(value) is not bool else 7
    assert not replays(function, (x, y), alpha=other)


def test_wrong_calls_raise_after_right_ones(kind: str) -> None:
    function = make(kind, alpha=2)
    x, y = draw(6), draw(6)
    for _ in range(2):
        function(x, y, alpha=5)
        with pytest.raises(ArgumentError, match="has no scalar 'beta'"):
            function(x, y, beta=1.0)
        with pytest.raises(ArgumentError, match="takes 2 tensors, got 3"):
            function(x, y, x)
        with pytest.raises(ArgumentError, match="64 bits"):
            function(x, y, alpha=2**70)


DIFFERENT: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {
    "size": lambda: (draw(7, 6), draw(7, 6)),
    "broadcast": lambda: (draw(6, 8), draw(8)),
    "strides": lambda: (draw(8, 6).t(), draw(6, 8)),
    "dtype": lambda: (draw(6, 8, dtype=torch.float64), draw(6, 8)),
    "rank": lambda: (draw(1, 6, 8), draw(6, 8)),
    "expanded": lambda: (draw(1, 8).expand(6, 8), draw(6, 8)),
    "negated": lambda: (torch._neg_view(draw(6, 8)), draw(6, 8)),
    "offset": lambda: (draw(49)[1:].view(6, 8), draw(6, 8)),
    "parameter": lambda: (torch.nn.Parameter(draw(6, 8), requires_grad=False), draw(6, 8)),
    "zero elements": lambda: (draw(0, 8), draw(0, 8)),
    "0-dim": lambda: (draw(6, 8), torch.tensor(0.25)),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_is_computed_anew(kind: str, name: str) -> None:
    function = make(kind, alpha=2.0)
    x, y = draw(6, 8), draw(6, 8)
    function(x, y)
    for _ in range(3):
        left, right = DIFFERENT[name]()
        got, wanted = function(left, right), axpy(left, right)
        assert (got.dtype, got.shape, got.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
        assert torch.equal(got, wanted)
        assert torch.equal(function(x, y), axpy(x, y))


def test_one_tensor_twice_is_not_two_tensors(kind: str) -> None:
    function = make(kind, "template <typename T> T three(T x, T y, T z) { return x + 8 * y + 64 * z; }")
    x, y, z = draw(16), draw(16), draw(16)
    for items in [(x, y, z), (x, x, y), (x, y, y), (x, y, x), (x, x, x), (y, z, y)] * 2:
        a, b, c = items
        assert torch.equal(function(*items), a + 8 * b + 64 * c)
        assert replays(function, items)
    if kind == "c":
        # Each is remembered beside the others.
        assert replays(function, (x, y, z))
        assert replays(function, (x, x, y))


def test_complex_conjugates_are_resolved(kind: str) -> None:
    function = make(kind, alpha=2.0)
    x, y = torch.randn(8, dtype=torch.complex64), torch.randn(8, dtype=torch.complex64)
    for _ in range(2):
        torch.testing.assert_close(function(x, y), axpy(x, y))
        torch.testing.assert_close(function(x.conj(), y), axpy(x.conj(), y))
        assert not replays(function, (x.conj(), y))


def test_gradients_are_never_lost(kind: str) -> None:
    function = make(kind, alpha=2.0)
    x, y = draw(8), draw(8)
    needs = draw(8).requires_grad_()
    function(x, y)
    for _ in range(2):
        assert function(needs, y).requires_grad
        with torch.no_grad():
            assert torch.equal(function(needs, y), axpy(needs, y))
            assert replays(function, (needs, y))
            assert not function(needs, y).requires_grad
        # In grad mode another record is replayed, and by autograd.
        assert replays(function, (needs, y))
        assert torch.equal(torch.autograd.grad(function(needs, y).sum(), needs)[0], torch.full((8,), 2.0))
        assert not function(x, y).requires_grad


class Doubles(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return [item * 2 for item in result] if "fuser" in str(func) else result


class Intercepts(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return "intercepted" if isinstance(func, fuser.JitFunction) else func(*args, **(kwargs or {}))


def test_modes_see_recorded_calls(kind: str) -> None:
    function = make(kind, alpha=2.0)
    x, y = draw(8), draw(8)
    function(x, y)
    with Doubles():
        doubled = function(x, y)
    assert torch.equal(doubled, 2 * axpy(x, y))
    with Intercepts():
        assert not replays(function, (x, y))
        if kind == "c":
            assert function(x, y) == "intercepted"
    assert replays(function, (x, y))


def test_subclasses_and_transforms_are_not_replayed(kind: str) -> None:
    class Named(torch.Tensor):
        pass

    function = make(kind, alpha=2.0)
    x, y = draw(8), draw(8)
    function(x, y)
    assert not replays(function, (x.as_subclass(Named), y))
    seen = []
    torch.func.vmap(lambda row: seen.append(replays(function, (row, y))) or row)(draw(3, 8))
    with torch.autocast("cpu"):
        seen.append(replays(function, (x, y)))
    assert seen == [False, False]
    with torch.inference_mode():
        assert torch.equal(function(x, y), axpy(x, y))
    assert torch.equal(function(x, y), axpy(x, y))


def test_settings_make_records_stale(kind: str) -> None:
    function = make(kind, alpha=2.0)
    x, y = draw(8), draw(8)
    function(x, y)
    assert replays(function, (x, y))
    with fuser.config.patch(numerics="fast"):
        assert not replays(function, (x, y))
        function(x, y)
        assert replays(function, (x, y))
    function(x, y)
    assert replays(function, (x, y))
    before = fuser.override_can_fuse_on_cpu(False)
    try:
        assert not replays(function, (x, y))
    finally:
        fuser.override_can_fuse_on_cpu(before)


def test_a_setting_that_changes_between_plan_and_record_makes_the_record_stale(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = make(kind, alpha=2.0)
    x, y = draw(8), draw(8)
    record = fuser.route.record_planned

    def switch_first(*arguments: Any) -> None:
        fuser.config.numerics = "fast"
        record(*arguments)

    try:
        monkeypatch.setattr(fuser.route, "record_planned", switch_first)
        function(x, y)
        assert not replays(function, (x, y))
    finally:
        fuser.config.numerics = "strict"


def test_a_call_that_ran_eagerly_is_not_recorded_where_fusion_is_on_again(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, x, y = make(kind, alpha=2.0), draw(8), draw(8)
    record = fuser.route.record_planned

    def switch_first(*arguments: Any) -> None:
        fuser.override_can_fuse_on_cpu(True)
        record(*arguments)

    fuser.override_can_fuse_on_cpu(False)
    try:
        monkeypatch.setattr(fuser.route, "record_planned", switch_first)
        with warnings.catch_warnings(action="ignore"):
            function(x, y)
        assert not replays(function, (x, y))
    finally:
        fuser.override_can_fuse_on_cpu(True)


def test_modes_of_torchs_own_see_recorded_calls(kind: str) -> None:
    function = make(kind, alpha=2.0)
    x, y = draw(8), draw(8)
    function(x, y)
    assert replays(function, (x, y))
    with FakeTensorMode():
        assert not replays(function, (x, y))
    graph = make_fx(lambda z: function(x, y) + z)(torch.zeros(8))
    wanted = axpy(x, y) + 1
    x += 1
    assert torch.allclose(graph(torch.ones(8)), wanted + 2)


def test_the_default_dtype_is_followed(kind: str) -> None:
    function = make(kind, "template <typename T> T f(T x) { return exp(x) + x; }")
    step, integers, mask = fuser.fuse(lambda x: x / 2 + x * 1.5), torch.arange(6), torch.ones(6, dtype=torch.bool)
    grown = fuser.fuse(lambda x, w: (x * 0.5 * w).sum())
    before = torch.get_default_dtype()
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            w = torch.ones((), requires_grad=True)
            for x in (integers, mask):
                for _ in range(3):
                    assert function(x).dtype is x.dtype
                    assert step(x).dtype is dtype
                    assert torch.equal(step(x), step.function(x))
                    made, wanted = (f(x, w) for f in (grown, grown.function))
                    assert (made.dtype, made) == (wanted.dtype, wanted)
                assert replays(step, (x,))
        finally:
            torch.set_default_dtype(before)


def test_out_is_replayed_where_it_is_apart(kind: str) -> None:
    function = make(kind, alpha=2.0)
    x, y = draw(12), draw(12)
    for _ in range(3):
        out = torch.full((12,), float("nan"))
        assert function(x, y, out=out) is out
        assert torch.equal(out, axpy(x, y))
    assert replays(function, (x, y), out=torch.empty(12)) == (kind == "c")
    for _ in range(2):
        assert function(x, y, out=(out,)) is out
        left = draw(12)
        wanted = axpy(left, y)
        assert function(left, y, out=left) is left
        assert torch.equal(left, wanted)


def test_out_that_overlaps_raises_after_good_calls(kind: str) -> None:
    function = make(kind, alpha=2.0)
    memory = draw(40)
    x, y = memory[:12], draw(12)
    for _ in range(2):
        function(x, y, out=memory[12:24])
        with pytest.raises(FuserError, match="memory location"):
            function(x, y, out=memory[4:16])
        with pytest.raises(GradientError):
            function(x, y, out=draw(12).requires_grad_())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small = torch.empty(0)
        assert torch.equal(function(x, y, out=small), axpy(x, y))
        assert small.shape == (12,)


def test_two_outs_must_be_two(kind: str) -> None:
    function = make(kind, BOTH, 2)
    x, y = draw(8), draw(8)
    first, second = torch.empty(8), torch.empty(8)
    for _ in range(2):
        assert function(x, y, out=(first, second))[1] is second
        assert torch.equal(first, x + y)
        assert torch.equal(second, x * y)
        for again in (first, first.view(8)):
            with pytest.raises(FuserError, match="memory location"):
                function(x, y, out=(first, again))


# By what one index serves: tensors of the rank, and of each size a layout that is dense.
FLAT: dict[str, tuple[list[tuple[int, ...]], Callable[[tuple[int, ...]], torch.Tensor]]] = {
    "one dimension": ([(2,), (3,), (16383,), (16384,), (40000,), (1,), (0,)], lambda size: draw(*size)),
    "dimensions of one element": ([(4, 1, 3), (1, 4, 3), (4, 3, 1), (1, 1, 5), (1, 1, 1)], lambda size: draw(*size)),
    "transposed": ([(4, 6), (6, 4), (300, 200), (1, 4), (4, 1)], lambda size: draw(*size).t()),
    "channels_last": (
        [(2, 3, 4, 5), (3, 2, 5, 4), (1, 3, 4, 5), (2, 1, 4, 5), (2, 3, 1, 1), (2, 1, 4, 1)],
        lambda size: draw(*size).contiguous(memory_format=torch.channels_last),
    ),
    "permuted": (
        [(2, 3, 4), (4, 3, 2), (5, 2, 3), (2, 2, 2)],
        lambda size: draw(*size).permute(2, 0, 1),
    ),
}


@pytest.mark.parametrize("name", FLAT)
def test_a_record_serves_other_sizes(kind: str, name: str) -> None:
    sizes, make_tensor = FLAT[name]
    function, numbers = make(kind, BOTH, 2), make(kind, alpha=2.0)
    zero_dim = torch.tensor(0.25)
    for turn in range(3):
        for size in sizes:
            x = make_tensor(size)
            y = torch.empty_like(x).copy_(torch.rand(x.shape))
            is_dense = x.numel() > 1 and name != "channels_last"
            if kind == "c" and is_dense and (turn or name == "one dimension") and size != sizes[0]:
                # Also of a size that was never seen.
                assert replays(function, (x, y))
            for got, wanted in zip(function(x, y), (x + y, x * y), strict=True):
                assert torch.equal(got, wanted)
                assert got.stride() == wanted.stride()
            for left, right in ((x, y), (x, zero_dim), (zero_dim, y), (x, y[:1]), (x, x)):
                got, wanted = numbers(left, right), axpy(left, right)
                assert torch.equal(got, wanted)
                assert (got.shape, got.stride()) == (wanted.shape, wanted.stride())


@pytest.mark.parametrize("name", FLAT)
def test_a_record_serves_out_of_other_sizes(kind: str, name: str) -> None:
    sizes, make_tensor = FLAT[name]
    function, numbers = make(kind, BOTH, 2), make(kind, alpha=2.0)
    for turn in range(3):
        for size in sizes:
            x, y, left, right = (make_tensor(size) for _ in range(4))
            is_dense = x.numel() > 1 and name != "channels_last"
            if kind == "c" and is_dense and (turn or name == "one dimension") and size != sizes[0]:
                # Also of a size that was never seen.
                assert replays(function, (x, y), out=(left, right))
            version = left._version
            assert function(x, y, out=(left, right))[0] is left
            assert left._version > version
            assert torch.equal(left, x + y)
            assert torch.equal(right, x * y)
            wanted = axpy(x, y)
            assert numbers(x, y, out=x) is x
            assert torch.equal(x, wanted)
            # What lies otherwise or elsewhere, or is to be resized, goes the long way.
            gaps = torch.zeros(*x.shape, 2)[..., 0]
            assert torch.equal(numbers(left, y, out=gaps), axpy(left, y))
            assert torch.equal(numbers(left, y, out=torch.empty(0)), axpy(left, y))
            memory = draw(2 * x.numel() + 1)
            if x.numel() > 1:
                overlapping = memory[1 : 1 + x.numel()].as_strided(x.shape, x.stride())
                with pytest.raises(FuserError, match="memory location"):
                    numbers(memory[: x.numel()].as_strided(x.shape, x.stride()), y, out=overlapping)


def test_a_record_that_calls_serves_other_sizes() -> None:
    if launcher._c is None:
        pytest.skip("fuser was installed without a C compiler")
    function = make("c", alpha=2.0)
    for size in ((5,), (7,), (1,)):
        x, y = draw(*size).requires_grad_(), draw(*size)
        if size != (5,):
            assert replays(function, (x, y))
        got = function(x, y)
        assert torch.equal(got, axpy(x, y))
        assert torch.equal(torch.autograd.grad(got.sum(), x)[0], torch.full(size, 2.0))
    with pytest.raises(FuserError, match="must match the size"):
        function(draw(5).requires_grad_(), draw(4))


@pytest.mark.parametrize("value", [lambda size: draw(size), lambda size: draw(size, 1)])
def test_all_of_many_shapes_are_remembered(value: Callable[[int], torch.Tensor]) -> None:
    if launcher._c is None:
        pytest.skip("fuser was installed without a C compiler")
    function = make("c", alpha=2.0)
    row = draw(3)
    items = [value(size) for size in range(5, 605)]
    calls = [(x, x) if x.dim() == 1 else (x, row) for x in items]
    for call in calls:
        function(*call)
    assert sum(replays(function, call) for call in calls) == len(calls)


def count_steps() -> int:
    gc.collect()
    return sum(type(item) is fuser.plan.Step for item in gc.get_objects())


def test_many_shapes_neither_compile_nor_grow(kind: str) -> None:
    function = make(kind, alpha=2.0)
    y = draw(1)
    function(draw(3), y)
    compiled, before = fuser.n_compiled_kernels(), count_steps()
    with fuser.config.patch(max_plans=64):
        # Records and the cache of plans keep them, both bounded: Python's records are few.
        shapes, most = (2300, 2200) if kind == "c" else (300, 150)
        for size in range(2, shapes):
            x = draw(size)
            assert torch.equal(function(x, y), axpy(x, y))
        assert fuser.n_compiled_kernels() == compiled
        assert count_steps() - before < most


def test_threads_share_a_function(kind: str) -> None:
    function = make(kind, alpha=2.0)
    wrong: list[int] = []

    def work(seed: int) -> None:
        for turn in range(200):
            size = 3 + (seed * 7 + turn) % 11
            x, y = torch.full((size,), float(seed)), torch.full((size,), float(turn))
            if not torch.equal(function(x, y), axpy(x, y)):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_callables_can_be_copied() -> None:
    function = fuser.create_jit_fn(AXPY, alpha=2.0)
    x, y = draw(5), draw(5)
    for other in (copy.copy(function), copy.deepcopy(function), pickle.loads(pickle.dumps(function))):
        assert torch.equal(other(x, y), function(x, y))


def test_a_fused_function_is_replayed_whole() -> None:
    double = fuser.create_jit_fn("template <typename T> T twice(T x) { return 2 * x; }")

    @fuser.fuse
    def step(x: Any, y: Any, z: Any) -> Any:
        return double(z) + x * 3, y - 0.5

    for _ in range(3):
        x, y, z = draw(8), draw(8), draw(8)
        first, second = step(x, y, z)
        assert torch.equal(first, 2 * z + x * 3)
        assert torch.equal(second, y - 0.5)
    assert step.launch((x, y, z), None, None) is not None
    with pytest.raises(TypeError):
        step(x, y, z, x)
    with pytest.raises(TypeError):
        step(x, y, z, w=x)
    assert torch.equal(step(x, z=z, y=y)[0], first)


def test_a_fused_function_writes_to_out() -> None:
    double = fuser.create_jit_fn("template <typename T> T twice(T x) { return 2 * x; }")
    whole = fuser.fuse(lambda x, y: double(x) + y)
    parts = fuser.fuse(lambda x, y: double(x.cumsum(0)) + y)
    both = fuser.fuse(lambda x, y: (double(x), x + y))
    own = fuser.fuse(lambda x, out: double(x) + out)
    for _ in range(3):
        x, y = draw(8), draw(8)
        out, other = torch.full((8,), float("nan")), torch.empty(8)
        assert whole(x, y, out=out) is out
        assert torch.equal(out, 2 * x + y)
        assert parts(x, y, out=out) is out
        assert torch.equal(out, 2 * x.cumsum(0) + y)
        assert both(x, y, out=(out, other))[1] is other
        assert torch.equal(out, 2 * x)
        assert torch.equal(other, x + y)
        assert torch.equal(own(x, out=y), 2 * x + y)
        with pytest.raises(FuserError, match="memory location"):
            whole(x, y, out=torch.empty(1).expand(8))
        with pytest.raises(TypeError):
            whole(x, y, out=out, more=1)
    if launcher._c is not None:
        assert whole.launch((x, y), None, out) is out
    compiled = torch.compile(lambda x, y, out: whole(x, y, out=out), backend="eager", fullgraph=True)
    compiled(x, y, out)
    assert torch.equal(out, 2 * x + y)


def test_run_fusion_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    double = fuser.create_jit_fn("template <typename T> T twice(T x) { return 2 * x; }")
    key = fuser.register_fusion(fuser.fuse(lambda x: (double(x), x + 1.5)).groups[0])
    for _ in range(3):
        x = draw(8)
        first, second = fuser.run_fusion(key, [x])
        assert torch.equal(first, 2 * x)
        assert torch.equal(second, x + 1.5)
    # Constants that the call leaves out are part of the record: no plan is looked up.
    with monkeypatch.context() as patch:
        patch.setattr(fuser.route, "run_planned", None)
        assert torch.equal(fuser.run_fusion(key, [x])[1], x + 1.5)


WITHOUT_C = """
import sys
sys.modules["fuser._launcher"] = None
import fuser, torch
from fuser import launcher
assert launcher._c is None and launcher.Replayer is launcher.PythonLauncher
axpy = fuser.create_jit_fn("template <typename T> T axpy(T x, T y, T alpha) { return alpha * x + y; }", alpha=2.0)
step = fuser.fuse(lambda x, y: axpy(x, y) * 4)
replayed = 0
for turn in range(3):
    x, y = torch.rand(8), torch.rand(8)
    replayed += axpy.launch((x, y), None, None) is not None
    replayed += step.launch((x, y), None, None) is not None
    assert torch.equal(axpy(x, y), 2 * x + y)
    assert torch.equal(axpy(x, y, alpha=3.0), 3 * x + y)
    assert torch.equal(step(x, y), (2 * x + y) * 4)
    out = torch.empty(8)
    assert step(x, y, out=out) is out and torch.equal(out, (2 * x + y) * 4)
    for wrong in ((x,), (x, y, x)):
        try:
            step(*wrong)
        except TypeError:
            continue
        raise AssertionError("the wrong number of arguments passed")
assert replayed == 4, replayed
compiled = torch.compile(lambda x, y: axpy(x, y) + step(x, y), backend="eager", fullgraph=True)
assert torch.allclose(compiled(x, y), (2 * x + y) * 5)
"""


def test_without_c_python_replays() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_C], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(launcher._c is None, reason="fuser was installed without a C compiler")
def test_the_class_shows_python_what_c_runs() -> None:
    shown = fuser.JitFunction.__dict__["__call__"]
    assert shown.__code__.co_filename.endswith("jit_function.py")
    x, y = draw(8), draw(8)
    function = fuser.create_jit_fn(AXPY, alpha=2.0)
    assert torch.equal(function.__call__(x, y), function(x, y))

    class Loud(fuser.JitFunction):
        def __call__(self, *tensors: Any, **options: Any) -> Any:
            return "loud", super().__call__(*tensors, **options)

    loud = Loud(function.function, function.defaults)
    assert loud(x, y)[0] == "loud"
    assert torch.equal(loud(x, y)[1], function(x, y))


@pytest.mark.cuda
def test_replays_on_cuda(kind: str) -> None:
    function = make(kind, alpha=2.0)
    for _ in range(3):
        x, y = draw(4, 256, device="cuda"), draw(4, 256, device="cuda")
        got = function(x, y, alpha=0.5)
        assert torch.equal(got, axpy(x, y, 0.5))
    assert replays(function, (x, y), alpha=0.5)
    out = torch.full_like(x, float("nan"))
    for _ in range(2):
        assert function(x, y, out=out) is out
        assert torch.equal(out, axpy(x, y))


@pytest.mark.cuda
def test_alignment_is_compared_on_cuda(kind: str) -> None:
    function = make(kind, alpha=2.0)
    memory, y = draw(1029, device="cuda"), draw(1024, device="cuda")
    for start in (0, 1, 4, 2, 0, 3, 1):
        x = memory[start : start + 1024]
        assert torch.equal(function(x, y), axpy(x, y))
        assert replays(function, (x, y)) == (kind == "c" or start % 4 == 0)


@pytest.mark.cuda
def test_replays_follow_the_current_stream(kind: str) -> None:
    function = make(kind, alpha=2.0)
    x, y = draw(1 << 24, device="cuda"), draw(1 << 24, device="cuda")
    function(x, y)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x2 = x + 1
        # Were it on another stream, it would read x2 before it is written.
        got = function(x2, y)
    torch.cuda.synchronize()
    assert torch.equal(got, axpy(x + 1, y))


@pytest.mark.cuda
def test_replays_in_a_thread_that_never_used_cuda(kind: str) -> None:
    function = make(kind, alpha=2.0)
    x, y = draw(64, device="cuda"), draw(64, device="cuda")
    function(x, y)
    results: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: results.append(function(x, y)))
    thread.start()
    thread.join()
    assert torch.equal(results[0], axpy(x, y))


@pytest.mark.cuda
def test_replays_run_on_the_tensors_device(kind: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    function = make(kind, alpha=2.0)
    for turn in range(4):
        device = torch.device("cuda", turn % 2)
        x, y = draw(64, device=device), draw(64, device=device)
        got = function(x, y)
        assert got.device == device
        assert torch.equal(got, axpy(x, y))
        assert torch.cuda.current_device() == 0


@pytest.mark.cuda
def test_a_number_in_a_cpu_tensor_is_read_every_time(kind: str) -> None:
    function = make(kind, alpha=2.0)
    x = draw(64, device="cuda")
    number = torch.tensor(0.25)
    assert not replays(function, (x, number))
    for value in (0.25, 0.5, 4.0):
        assert torch.equal(function(x, number.fill_(value)), axpy(x, value))
        assert replays(function, (x, number))
        assert torch.equal(function(x, torch.tensor(value)), axpy(x, value))


def test_autograd_sees_what_out_overwrites(kind: str) -> None:
    function = make(kind, alpha=2.0)
    x, y, saved = draw(8), draw(8), draw(8)
    for _ in range(3):
        weight = draw(8).requires_grad_()
        loss = (weight * saved).sum()
        function(x, y, out=saved)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_more_inputs_than_one_launch_takes() -> None:
    adds = fuser.create_jit_fn("template <typename T> T plus(T x, T y) { return x + y; }")

    names = ", ".join(f"x{index}" for index in range(70))
    scope: dict[str, Any] = {"plus": adds}
    body = "x0"
    for index in range(1, 70):
        body = f"plus({body}, x{index})"
    exec(f"def total({names}):\n    return {body}", scope)
    step = fuser.fuse(scope["total"])
    for _ in range(3):
        items = [torch.randint(-9, 9, (4, 3)).float() for _ in range(70)]
        assert torch.equal(step(*items), torch.stack(items).sum(0))


def test_out_after_calls_without(kind: str) -> None:
    function = make(kind, alpha=2.0)
    x, y, out = draw(12), draw(12), torch.zeros(12)
    function(x, y)
    for _ in range(2):
        assert function(x, y, out=out) is out
    assert torch.equal(out, axpy(x, y))


def test_another_layout_after_one_tensor_twice(kind: str) -> None:
    function = make(kind, alpha=2.0)
    x, y = draw(5, 5), draw(5, 5).t()
    function(x, x)
    assert torch.equal(function(x, y), axpy(x, y.contiguous()))


def test_tangents_after_a_recorded_call(kind: str) -> None:
    function = make(kind, alpha=2.0)
    x, y = draw(12), draw(12)
    function(x, y)
    with forward_ad.dual_level():
        result = function(forward_ad.make_dual(x, y), y)
        assert torch.equal(forward_ad.unpack_dual(result).tangent, 2 * y)


def test_the_default_dtype_decides_in_between(kind: str) -> None:
    text = "template <typename T> T plus(T x, T y) { return x + y; }"
    before = torch.get_default_dtype()
    for function in (make(kind, text), fuser.jit_fn(text, out_dtypes=torch.int64)):
        found = []
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            try:
                found += [int(function(torch.tensor([2**24 + 1]), 0.0)) for _ in range(2)]
            finally:
                torch.set_default_dtype(before)
        assert found == [2**24, 2**24, 2**24 + 1, 2**24 + 1]


@pytest.mark.parametrize("numerics", [("fast",), ("fast", "strict")], ids=["changed", "and changed back"])
def test_a_setting_that_changes_while_a_plan_is_made_makes_the_record_stale(
    numerics: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fuser import executor
    from fuser.config import config

    make = executor.make_plan
    plans = []

    def change(*arguments: Any) -> Any:
        plans.append(make(*arguments))
        for value in numerics:
            config.numerics = value
        return plans[-1]

    monkeypatch.setattr(executor, "_plans", {})
    double, x = fuser.jit_fn("template <typename T> T doubles(T x) { return x + x; }"), torch.ones(3)
    with config.patch(numerics="strict"):
        monkeypatch.setattr(executor, "make_plan", change)
        double(x)
        assert double.launch((x,), None, None) is None
        monkeypatch.setattr(executor, "make_plan", make)
        config.numerics = "strict"
        double(x)
        assert executor._plans[double.spec(1).key].items()[-1][1] is not plans[0]
        assert double.launch((x,), None, None) is not None


@pytest.mark.parametrize(
    "out",
    [(), (None,), (torch.zeros(4),) * 3, ((),), 2.0, "out", object()],
    ids=lambda out: repr(out).partition(" at ")[0],
)
def test_out_of_a_wrong_kind_raises_after_right_calls(kind: str, out: Any) -> None:
    function, whole = make(kind, alpha=2.0), fuser.fuse(lambda x, y: torch.exp(x) + y)
    x, y, right = draw(4), draw(4), torch.empty(4)
    for call in (function, whole):
        for _ in range(2):
            assert call(x, y, out=right) is call(x, y, out=(right,)) is right
            assert torch.equal(call(x, y), right)
            with pytest.raises(ArgumentError, match="out="):
                call(x, y, out=out)


def test_out_may_be_an_argument_of_a_fused_function() -> None:
    own = fuser.fuse(lambda x, out: torch.exp(x) + out)
    x, y = draw(4), draw(4)
    for _ in range(2):
        assert torch.equal(own(x, y), own(x, out=y))
        with pytest.raises(TypeError):
            own(x, y, out=None)


def test_out_without_memory_is_refused(kind: str) -> None:
    function = make(kind, alpha=2.0)
    x, y = draw(4), draw(4)
    for _ in range(2):
        function(x, y, out=torch.empty(4))
        with pytest.raises(RuntimeError, match="ZeroTensors are immutable"):
            function(x, y, out=torch._efficientzerotensor(4))


def test_a_scalar_of_a_group_has_one_element() -> None:
    times = fuser.create_jit_fn("template <typename T> T times(T x, T by) { return x * by; }", by=2.0)
    key = fuser.register_fusion(fuser.fuse(lambda x: times(x, by=3.0) + x).groups[0])
    for by in (torch.empty(0), torch.ones(4), torch.ones(1)):
        with pytest.raises(ArgumentError, match="has shape"):
            fuser.run_fusion(key, [draw(4), by])


needs_c = pytest.mark.skipif(launcher._c is None, reason="fuser was installed without a C compiler")


def record(**other: Any) -> tuple[Any, ...]:
    """Return a record of a call of one tensor that allocates one and launches nothing, with some fields replaced."""
    allocations = ((_ALLOCATE["cpu"], ((4,), (1,), torch.float32)),)
    fields = {"check": lambda *_: True, "generation": fuser.config.generation, "allocations": allocations}
    return Recorded(**fields | {"result_count": 1} | other)  # type: ignore[arg-type]


def step(**other: Any) -> tuple[Any, ...]:
    """Return a launch with some fields replaced; its address is never called."""
    fields: dict[str, Any] = {
        "address": 8, "grid": 1, "block": 1, "shared": 0, "follows": False, "arguments": bytes(24), "first": 1,
        "pointers": (1, 0), "numbers": (), "letters": "", "is_parallel": False, "is_steady": True, "name": "",
    }  # fmt: skip
    return tuple((fields | other).values())


MALFORMED: dict[str, tuple[Any, type[Exception]]] = {
    "check": (lambda: record(check=1), TypeError),
    "generation": (lambda: record(generation="0"), TypeError),
    "through": (lambda: record(through=1), TypeError),
    "too few fields": (lambda: tuple(record())[:5], TypeError),
    "more results than allocations": (lambda: record(result_count=2), ValueError),
    "fewer results than none": (lambda: record(result_count=-1), ValueError),
    "allocations in a list": (lambda: record(allocations=[]), TypeError),
    "allocation of nothing": (lambda: record(allocations=(1,)), TypeError),
    "allocation by no function": (lambda: record(allocations=((1, ()),)), TypeError),
    "step of nothing": (lambda: record(packed=(1,)), TypeError),
    "step without address": (lambda: record(packed=(step(address=0),)), ValueError),
    "first word before the arguments": (lambda: record(packed=(step(first=-1),)), ValueError),
    "first word after the arguments": (lambda: record(packed=(step(first=2**31 - 1),)), ValueError),
    "part of a word": (lambda: record(packed=(step(arguments=bytes(25)),)), ValueError),
    "more words than there are": (lambda: record(packed=(step(arguments=bytes(2**13)),)), ValueError),
    "pointer to no value": (lambda: record(packed=(step(pointers=(3,)),)), ValueError),
    "pointer before the values": (lambda: record(packed=(step(pointers=(-1,)),)), ValueError),
    "pointer of many bits": (lambda: record(packed=(step(pointers=(2**32,)),)), OverflowError),
    "pointer to a number": (lambda: record(packed=(step(pointers=(2, 1)),)), ValueError),
    "number that is allocated": (lambda: record(packed=(step(pointers=(), numbers=(2,), letters="f"),)), ValueError),
    "letter too many": (lambda: record(packed=(step(letters="f"),)), ValueError),
    "name that is none": (lambda: record(packed=(step(name=5),)), TypeError),
    "any size by two launches": (lambda: record(flat=(1, 0, 9), packed=(step(), step())), ValueError),
    "any size by no launch": (lambda: record(flat=(1, 0, 9)), ValueError),
    "any size in no block": (lambda: record(flat=(0, 0, 9), packed=(step(),)), ValueError),
    "any size in no word": (lambda: record(flat=(1, 0, 9), packed=(step(first=0),)), ValueError),
    "any size of too few fields": (lambda: record(flat=(1, 0), packed=(step(),)), TypeError),
    "any size without sizes": (
        lambda: record(flat=(1, 0, 9), packed=(step(),), allocations=((_ALLOCATE["cpu"], ()),)),
        ValueError,
    ),
    "unknown letter": (lambda: record(packed=(step(pointers=(), numbers=(1,), letters="x"),)), ValueError),
}


@needs_c
@pytest.mark.parametrize(("letter", "word"), [("f", "d"), ("i", "q"), ("b", "q")])
def test_the_value_of_a_tensor_goes_where_a_number_does(letter: str, word: str) -> None:
    seen = list[Any]()
    kernel = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)(
        lambda words, _: seen.append(struct.unpack_from(word, ctypes.string_at(words, 24), 16)[0])
    )
    address = ctypes.cast(kernel, ctypes.c_void_p).value
    dtype = {"f": torch.float32, "i": torch.int64, "b": torch.bool}[letter]
    fast, tensor = launcher._c.Launcher((), ()), torch.tensor(3, dtype=dtype)
    fast.add(
        (tensor,), None, None, record(packed=(step(address=address, pointers=(1,), numbers=(0,), letters=letter),))
    )
    for value in (3, 0, 1):
        assert fast.launch((tensor.fill_(value),), None, None) is not None
    assert seen == [1 if letter == "b" else 3, 0, 1]


@needs_c
@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_records_are_refused(name: str) -> None:
    made, error = MALFORMED[name]
    fast = launcher._c.Launcher(("alpha",), (2.0,))
    with pytest.raises(error):
        fast.add((draw(4),), None, None, made())
    # A record for out= has as many results as there are tensors.
    with pytest.raises(ValueError, match="results"):
        fast.add((draw(4),), None, (draw(4), draw(4)), record(allocations=()))
    assert fast.add((draw(4),), None, None, record())
    assert fast.launch((draw(4),), None, None).shape == (4,)
    assert fast.launch((draw(4),), None, ()) is None


@needs_c
def test_the_c_module_refuses_what_it_cannot_use() -> None:
    c = launcher._c
    fast = c.Launcher((), ())
    capsule = torch.Tensor.__dlpack_c_exchange_api__
    wrong: list[Callable[[], Any]] = [
        lambda: fast.launch([], None, None),
        lambda: fast.launch((), 5, None),
        lambda: fast.launch((), None),
        lambda: fast.add((), 5, None, ()),
        lambda: c.Launcher(("x",), ()),
        lambda: c.Launcher((1,), (1,)),
        lambda: c.Launcher((), (), (-1,)),
        lambda: c.Launcher((), (), (2**40,)),
        lambda: c.Launcher((), (), [0]),
        lambda: c.Launcher.__new__(c.Launcher).add((1.0,), None, None, tuple(record())),
        lambda: c.set_torch(capsule, int, int, 1, 2, 3, 4, 5, 6, {}, {}),
        lambda: c.set_torch(capsule, 1, 1, len, len, len, len, len, len, {}, {}),
        lambda: c.set_torch(capsule, int, int, len, len, len, len, len, len, {}, 1),
        lambda: c.set_torch(object(), int, int, len, len, len, len, len, len, {}, {}),
        lambda: c.set_driver(0, 1, 1),
        lambda: c.set_driver("a", 1, 1),
        lambda: c.set_driver(1, 1, "a"),
        lambda: c.set_driver(1),
        lambda: c.show_call(int, len),
        lambda: c.show_call(c.Launcher, len),
        lambda: c.set_generation("1"),
        lambda: c.set_generation(-1),
    ]
    for call in wrong:
        with pytest.raises((TypeError, ValueError, OverflowError, RuntimeError)):
            call()
    # Nothing of that has changed anything.
    function = make("c", alpha=2.0)
    x, y = draw(4), draw(4)
    function(x, y)
    assert replays(function, (x, y))


@needs_c
def test_an_allocator_that_makes_no_tensor_raises() -> None:
    fast = launcher._c.Launcher((), ())
    fast.add((draw(4),), None, None, record(allocations=((lambda: 3, ()),)))
    with pytest.raises(TypeError, match="allocator"):
        fast.launch((draw(4),), None, None)


@needs_c
def test_a_launcher_that_is_made_again_forgets() -> None:
    fast = launcher._c.Launcher((), ())
    x = draw(4)
    # The second time in the middle of a call.
    undo = record(check=lambda *_: fast.__init__((), (), (0,)) or True)  # type: ignore[func-returns-value]
    assert fast.add((x,), None, None, undo)
    assert fast.launch((x,), None, None).shape == (4,)
    assert fast.launch((x,), None, None) is None


@needs_c
def test_replays_leave_no_references() -> None:
    function = make("c", BOTH, 2)
    scaled = make("c", alpha=2.0)
    x, y, out, alpha = draw(4), draw(4), draw(4), 0.5
    held = (x, y, out, alpha, None, True, fuser.JitFunction, function, scaled)

    def calls(count: int) -> None:
        for _ in range(count):
            function(x, y)
            scaled(x, y, alpha=alpha, out=out)
            with contextlib.suppress(ArgumentError):
                scaled(x, y, out=())

    calls(10)
    # What other tests left holds some of these until it is collected.
    gc.collect()
    before = [sys.getrefcount(item) for item in held]
    calls(2000)
    after = [sys.getrefcount(item) for item in held]
    assert all(abs(now - then) < 100 for now, then in zip(after, before, strict=True)), (before, after)


# Few elements, and much work for each: always, or where the data says so.
LONG = "for (int i = 0; i < 10000000; ++i) x = x * T(0.999) + T(0.5);"
SOMETIMES = "while (x > T(0)) x -= T(0.5);"


@needs_c
@pytest.mark.cpu
@pytest.mark.parametrize(("body", "calls"), [(LONG, 1), (LONG, 4), (SOMETIMES, 1), (SOMETIMES, 10)], ids=str)
def test_long_kernels_run_without_the_gil(body: str, calls: int) -> None:
    function = fuser.create_jit_fn(f"template <typename T> T slow(T x) {{ {body} return x; }}")
    x = torch.ones(4, dtype=torch.float64)
    for _ in range(calls):
        function(x)
    x.fill_(1.5e7)
    times: list[float] = []

    def work() -> None:
        times.append(time.perf_counter())
        function(x)
        times.append(time.perf_counter())

    thread = threading.Thread(target=work)
    longest, last = 0.0, time.perf_counter()
    thread.start()
    while len(times) < 2:
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    longest = max(longest, time.perf_counter() - last)
    thread.join()
    # With the GIL held, this thread stands still for as long as the kernel runs.
    assert times[1] - times[0] > 0.05
    assert longest < (times[1] - times[0]) / 2


@needs_c
@pytest.mark.parametrize(
    ("body", "steady"),
    [
        ("return x;", True),
        ("for (int i = 0; i < 8; ++i) x += i; return x;", True),
        ("for (int i = 8; i != 0; --i) x += i; for (int j = 0; j <= 3; j++) x *= 2; return x;", True),
        ("for (int i = 0; i < x; ++i) x += i; return x;", False),
        ("for (int i = 0; i < 8; ++i) { for (;;) { if (x > i) break; x += 1; } } return x;", False),
        ("for (int i = 0; i < 8 && x > 0; ++i) x -= 1; return x;", False),
        ("do { x -= 1; } while (x > 0); return x;", False),
        ("again: x -= 1; if (x > 0) goto again; return x;", False),
    ],
)
def test_what_may_keep_the_gil(body: str, steady: bool) -> None:
    functor = parse_functor(f"template <typename T> T f(T x) {{ {body} }}")
    assert is_steady(functor) is steady


def test_reductions_with_out_are_replayed_unless_it_is_an_input() -> None:
    if launcher._c is None:
        pytest.skip("fuser was installed without a C compiler")
    fused = fuser.fuse(lambda x, y: (x - y) * torch.amax(x, 0, keepdim=True))
    for turn in range(3):
        x, y, out = (draw(7, 5) for _ in range(3))
        wanted = (x - y) * x.amax(0, keepdim=True)
        assert not turn or replays(fused, (x, y), out)
        version = out._version
        assert fused(x, y, out=out) is out
        assert out._version > version
        assert torch.equal(out, wanted)
        # Its first rows would be read after they were written.
        alias = x[:]
        assert not replays(fused, (x, y), alias)
        assert torch.equal(fused(x, y, out=alias), wanted)
    # What is read where it is written may be.
    pointwise = fuser.fuse(lambda x, y: (x - y) * x)
    pointwise(x, y, out=out)
    wanted = (x - y) * x
    assert replays(pointwise, (x, y), x[:])
    assert torch.equal(x, wanted)


def test_default_values_are_read_only() -> None:
    """Kernels, pickles and graphs are made with them once."""
    function = fuser.create_jit_fn("template <typename T> T scaled(T x, T alpha) { return x * alpha; }", alpha=2.0)
    with pytest.raises(TypeError, match="does not support item assignment"):
        function.defaults["alpha"] = 5.0  # type: ignore[index]
    x = torch.ones(3)
    for again in (function, pickle.loads(pickle.dumps(function)), copy.deepcopy(function)):
        assert dict(again.defaults) == {"alpha": 2.0}
        assert torch.equal(again(x), 2 * x)
