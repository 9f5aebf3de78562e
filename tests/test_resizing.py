"""Calls of sizes that were never planned: a program of sizes gives what a plan would, or nothing."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fuser
from fuser import planner, resizing
from fuser.compiler import register
from fuser.config import config
from fuser.graph import GroupBuilder
from fuser.layout import contiguous_strides
from fuser.ops import composite_function
from fuser.record import allocations, pack_step
from fuser.sizes import Deferred, Tape, write_program
from fuser.tensor_desc import TensorDesc

MULTIPLY = "template <typename T> T f(T x, T y) { return x * y + x; }"
ADD = "template <typename T> T add(T a, T b) { return a + b; }"


# --- symbols -----------------------------------------------------------------------------------------------------
# What a planner may compute and ask.
ASKED: tuple[Callable[[Any, Any, Any], Any], ...] = (
    lambda a, b, c: a * b + (c << 2) - (a | 1) + (b & 3) - (a ^ c) + -b + 7 - a,
    lambda a, b, c: -(-(a * b) // 4) + 100 // (c + 1) + (a + 8) % (b + 1) + (1 << c) + (a >> 1) + 0 * b + a // 1,
    lambda a, b, c: {2: "two", 3: "three"}.get(a, "many"),
    lambda a, b, c: sorted((a, b, c), key=lambda size: (bool(size >= 4), size)),
    lambda a, b, c: (sum((a, b, c)), math.prod((a, b, c)), max(a, b, 7), min(a, c, 3)),
    lambda a, b, c: (b > c, b < c, a < 5, a == b, a != c, b >= 4, a == 3, (a, b) == (b, c), a in (1, b)),
    lambda a, b, c: a if c else b - 1 if not a - b else -1,
    lambda a, b, c: (a, (a * b) % c if c else None),
    lambda a, b, c: 1 << (a - 1).bit_length() if a else 0,
    lambda a, b, c: f"{a % 2} {b} {c!r}" if a > 4 else str(b),
    lambda a, b, c: [10, 20, 30][a % 3] + len(range(b)) + int(c) + len((0,) * a),
    lambda a, b, c: (float(a), hash((a, b)), (a > 2) * b, True + c),
    lambda a, b, c: 2 if a < b < c else a if a * b > c else c,
)


@pytest.mark.parametrize("plan", ASKED)
@given(st.tuples(*[st.integers(0, 9)] * 3), st.lists(st.tuples(*[st.integers(0, 9)] * 3), max_size=20))
def test_a_program_gives_what_its_source_does(
    plan: Callable[..., Any], first: tuple[int, ...], others: list[tuple[int, ...]]
) -> None:
    def tupled(made: Any) -> Any:
        return tuple(made) if isinstance(made, list) else made

    tape = Tape(first)
    program = write_program([(tape, (tupled(plan(*tape.sizes)),))])
    assert program is not None
    assert program(first) == (tupled(plan(*first)),)
    for other in (*others, first[::-1], (first[0], first[1], 9)):
        assert program(other) in (None, (tupled(plan(*other)),))


@pytest.mark.parametrize("plan", ASKED)
@given(st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=1, max_size=30))
def test_paths_of_one_source_are_one_program(plan: Callable[..., Any], sizes: list[tuple[int, ...]]) -> None:
    def tupled(made: Any) -> Any:
        return tuple(made) if isinstance(made, list) else made

    names: dict[str, str] = {}
    finished: list[tuple[Tape, Any]] = []
    program: Any = None
    for given_sizes in sizes:
        if program is None or program(given_sizes) is None:
            tape = Tape(given_sizes, names)
            finished.append((tape, (tupled(plan(*tape.sizes)),)))
            program = write_program(finished)
            assert program is not None
    assert [program(item) for item in sizes] == [(tupled(plan(*item)),) for item in sizes]


def test_what_a_program_does_not_ask_is_free() -> None:
    tape = Tape((6, 5, 1))
    rows, columns, stride = tape.sizes
    steps = -(-(rows * columns) // 4)
    program = write_program([(tape, (rows if stride == 1 else 0, Deferred(str, steps), columns))])
    assert program is not None
    assert [program((rows, 7, 1)) for rows in (1, 2**40)] == [(1, "2", 7), (2**40, str(-(-(7 * 2**40) // 4)), 7)]
    assert program((6, 5, 2)) is None
    with pytest.raises(TypeError):
        rows / columns


@pytest.mark.parametrize("numerics", ["strict", "fast"])
def test_gradients_of_norms_on_a_gpu_are_planned_for_symbols(numerics: str) -> None:
    """In torch's order, and with columns beside rows: what symbols cannot do is planned for each size."""
    builder, (rows, length) = GroupBuilder(numerics), (tape := Tape((1120, 1024))).sizes
    function = composite_function("native_layer_norm_backward", ((1024,), 2, True, True, True, (True, True, True)))
    names = [item.name for item in function.functor.tensors]
    group = builder.build(builder.apply(function, [builder.add_input(name) for name in names]))
    shapes = {"grad_out": (rows, length), "input": (rows, length), "mean": (rows, 1), "rstd": (rows, 1)}
    given = [shapes.get(name, (length,)) for name in names]
    inputs = [TensorDesc(torch.Tensor, torch.float32, x, (x[-1], 1)[-len(x) :], torch.device("cuda")) for x in given]
    assert hash(tuple(planner.find_texts(register(group), inputs, trusts_orders=True)))
    assert tape.find_alike(torch.tensor([[1120, 1024], [1280, 1024], [5, 1024]])).tolist() == [True, True, False]


# --- programs of plans -------------------------------------------------------------------------------------------
Shapes = Callable[[Callable[[], int]], Sequence[tuple[int, ...]]]
total, multiply = fuser.create_reduction_fn(ADD, identity=0), fuser.create_jit_fn(MULTIPLY)
place = fuser.jit_fn("template <typename T> T f(T x, int64_t i) { return x + T(i); }", index="i")


def times_plus(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.addcmul(x, x, y)


# What is computed, in eager torch too, and the shapes of its tensors. Numbers are small integers: sums are exact.
KINDS: dict[str, tuple[Callable[..., Any], Callable[..., Any] | None, Shapes]] = {
    "a row for all": (multiply, times_plus, lambda n: [(n(), (m := n())), (m,)]),
    "a column for all": (multiply, times_plus, lambda n: [((m := n()), n()), (m, 1)]),
    "channels": (multiply, times_plus, lambda n: [(n(), (m := n()), n(), 3), (m, 1, 1)]),
    "an outer product": (multiply, times_plus, lambda n: [(n(), 1), (1, n())]),
    "places": (place, lambda x: x + torch.arange(x.numel()).view(x.shape).to(x), lambda n: [(n(), n())]),
    "rows": (lambda x: total(x, dim=-1), lambda x: x.sum(-1), lambda n: [(n(), n())]),
    "columns": (lambda x: total(x, dim=0), lambda x: x.sum(0), lambda n: [(n(), n(), n())]),
    "rows and all": (fuser.fuse(lambda x: x - (x * 2).amax(-1, True)), None, lambda n: [(n(), n(), n() + 1)]),
    "sums": (fuser.fuse(lambda x, y: (torch.relu(x) * y).sum(-1)), None, lambda n: [(n(), (m := n())), (m,)]),
    "two launches": (fuser.fuse(lambda x: (x * 2).amax(0) + (x * 3).amin()), None, lambda n: [(n() + 1, n() + 1)]),
    "a number": (fuser.fuse(lambda x, y: x * (y + 3.5)), None, lambda n: [(n(), n()), ()]),
}


QUICK = {"a row for all", "rows", "places"}
KIND = pytest.mark.parametrize("name", [pytest.param(x, marks=[] if x in QUICK else [pytest.mark.slow]) for x in KINDS])


def lay_out(shape: tuple[int, ...], drawn: random.Random) -> torch.Tensor:
    """Return a tensor whose dimensions may lie in another order, and apart."""
    order = list(range(len(shape)))
    if drawn.randrange(4) == 0:
        drawn.shuffle(order)
    step = drawn.choice((1, 1, 1, 2))
    whole = torch.randint(-9, 10, [shape[dim] * (step if dim == order[-1] else 1) for dim in order]).float()
    return whole[..., ::step].permute([order.index(dim) for dim in range(len(order))]) if shape else whole


@pytest.fixture
def learnt(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Start without programs, and return what is learnt: a list that grows."""
    found: list[Any] = []
    learn = resizing.Resizer.learn
    monkeypatch.setattr(resizing, "_resizers", type(resizing._resizers)())
    # What was recorded before is forgotten.
    config.touch()
    monkeypatch.setattr(
        resizing.Resizer, "learn", lambda self, *given: learn(self, *given) and not found.append((self, *given))
    )
    return found


def size_of(drawn: random.Random) -> int:
    return drawn.choice((0, 1, 2, 3, 7, 31, 32, 33, drawn.randrange(70), drawn.randrange(70)))


@pytest.mark.parametrize("device", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("cpu", "cuda")])
@KIND
def test_random_sizes(name: str, device: str, learnt: list[Any]) -> None:
    function, reference, shapes = KINDS[name]
    reference = reference or function.function
    drawn = random.Random(name)
    torch.manual_seed(0)
    calls = [[lay_out(x, drawn).to(device) for x in shapes(lambda: size_of(drawn))] for _ in range(60)]
    first = [function(*inputs) for inputs in calls]
    # The others were served by what was learnt of them.
    assert 0 < len(learnt) < 45 or name == "a number"
    compiled, planned = fuser.n_compiled_kernels(), len(learnt)
    again = [function(*inputs) for inputs in reversed(calls)][::-1]
    assert (fuser.n_compiled_kernels(), len(learnt)) == (compiled, planned)
    for inputs, *made in zip(calls, first, again, strict=True):
        wanted = reference(*inputs)
        for one in made:
            assert torch.equal(one, wanted), [x.shape for x in inputs]
            assert one.stride() == wanted.stride(), [x.shape for x in inputs]


@pytest.mark.cpu
@KIND
def test_programs_say_what_plans_do(name: str, learnt: list[Any]) -> None:
    function, _, shapes = KINDS[name]
    drawn = random.Random(name)
    for _ in range(12):
        function(*(lay_out(shape, drawn) for shape in shapes(lambda: size_of(drawn))))
    if not learnt:
        assert name == "a number"
        return
    resizer, spec, inputs, _ = learnt[-1]
    served = 0
    for _ in range(60):
        # Up to more elements than an int counts.
        large = drawn.randrange(5) == 0
        wanted = iter(shapes(lambda: 1 << drawn.randrange(34) if large else size_of(drawn)))  # noqa: B023
        others = []
        for item in inputs:
            if item.dtype is not None:
                shape = next(wanted)
                item = item._replace(shape=shape, strides=contiguous_strides(shape))
            others.append(item)
        got = resizer(*(size for item in others for size in (*item.shape, *item.strides)))
        if got is None:
            continue
        served += 1
        plan = planner.make_plan(spec, others)
        packed = tuple(pack_step(step, len(others), step.packer.template) for step in plan.steps)
        assert got[:2] == (allocations(plan), packed)
        assert [step.kernel.address for step in got[2]] == [step.kernel.address for step in plan.steps]
    assert served or name == "a number"


@pytest.mark.cpu
def test_threads_share_programs(learnt: list[Any]) -> None:
    wrong: list[Any] = []

    def work(seed: int) -> None:
        drawn = random.Random(seed)
        for _ in range(150):
            x, y = (lay_out(shape, drawn) for shape in KINDS["a row for all"][2](lambda: size_of(drawn)))
            if not torch.equal(multiply(x, y), x * y + x):
                wrong.append((x.shape, y.shape))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(learnt) < 1200


@pytest.mark.cpu
def test_other_settings_have_other_programs(learnt: list[Any]) -> None:
    fused = fuser.fuse(lambda x, y: torch.exp(x) * y + x)
    results = []
    for numerics in ("strict", "fast", "strict"):
        with config.patch(numerics=numerics):
            results += [fused(torch.ones(rows, 40), torch.ones(40)) for rows in range(2, 6)]
    assert len({resizer for resizer, *_ in learnt}) == len(learnt) > 1
    for rows, one in zip((*range(2, 6),) * 3, results, strict=True):
        torch.testing.assert_close(one, torch.full((rows, 40), 1 + math.e))


@pytest.mark.cpu
def test_what_a_trace_asks_of_sizes_is_asked_of_each(learnt: list[Any]) -> None:
    fused = fuser.fuse(lambda x, y: x * y if x.shape[0] > 4 else x + y)
    y = torch.arange(40.0)
    for rows in (2, 3, 7, 4, 5, 8, 3):
        x = torch.ones(rows, 40)
        assert torch.equal(fused(x, y), fused.function(x, y))
