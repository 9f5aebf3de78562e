"""What a trace relies on is never stale: constants, answers, globals, closures, attributes of ``self``; and methods."""

from __future__ import annotations

import collections
import copy
import dis
import enum
import linecache
import pickle
import re
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from functors import draw, functor
from torch import empty
from torch.utils.checkpoint import checkpoint

import fuser
from fuser.errors import ArgumentError, TracingError, UnsupportedError
from fuser.fx.guards import Guards, find_guards

pytestmark = pytest.mark.cpu

axpy = functor("axpy")


@pytest.fixture
def x() -> torch.Tensor:
    return draw((4, 9), torch.float32, seed=1)


def check(function: Callable[..., Any], *calls: tuple[Any, ...]) -> Any:
    """Compare a fused function with itself unfused, each call twice, then all of them once more."""
    fused = fuser.fuse(function)
    for arguments in (*(call for call in calls for _ in range(2)), *calls):
        got, wanted = fused(*arguments), function(*arguments)
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
        assert type(got) is type(wanted)
        if isinstance(wanted, torch.Tensor):
            assert (got.dtype, got.stride()) == (wanted.dtype, wanted.stride())
    return fused


# --- arguments that are constants ---------------------------------------------------------------------------------
class Mode(enum.Enum):
    SUM = 1
    PRODUCT = 2


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


CONSTANTS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "bool": (lambda x, on: x * 2 if on else x + 1, (True, False)),
    "bool is": (lambda x, on: x * 2 if on is True else x + 1, (True, False)),
    "str": (lambda x, how: getattr(torch, how)(x) * 2, ("relu", "tanh")),
    "none": (lambda x, how: x * 2 if how is None else x + how, (None, 3.0)),
    "enum": (lambda x, mode: x + x if mode is Mode.SUM else x * x, tuple(Mode)),
    "int enum": (lambda x, level: x * (3 if level == Level.HIGH else 5), tuple(Level)),
    "dtype": (lambda x, dtype: x.to(dtype) * 2, (torch.float64, torch.bfloat16, torch.int32)),
    "device": (lambda x, device: x.to(device) * 2, (torch.device("cpu"), "cpu")),
    "format": (
        lambda x, order: x[None, None].contiguous(memory_format=order) * 2,
        (torch.contiguous_format, torch.channels_last),
    ),
    "tuple": (lambda x, flags: x * 2 if flags[0] and flags[1] == "a" else x, ((True, "a"), (True, "b"), (False, "a"))),
    "list": (lambda x, steps: [getattr(torch, step)(x) for step in steps], (["relu", "tanh"], ["sin"])),
    "function": (lambda x, f: f(x) * 2, (torch.relu, torch.tanh, lambda x: x - 1)),
    "size": (lambda x, shape: x.reshape(shape) * 2, (torch.Size((36,)), torch.Size((9, 4)))),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_another_constant_traces_again(name: str, x: torch.Tensor) -> None:
    function, values = CONSTANTS[name]
    check(function, *((x, value) for value in values))


def test_a_constant_that_was_seen_is_not_traced_again(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    function, values = CONSTANTS["bool"]
    fused = check(function, *((x, value) for value in values))
    monkeypatch.setattr(fuser.fx.trace, "trace", None)
    for value in values:
        fused(x, value)


@pytest.mark.parametrize("item", [object(), {1, 2}, iter(())], ids=["object", "set", "iterator"])
def test_an_argument_that_cannot_be_compared_is_refused(item: Any, x: torch.Tensor) -> None:
    with pytest.raises(ArgumentError, match=r"<lambda>\(\) got a .*: fuse takes tensors, numbers"):
        fuser.fuse(lambda x, other: x * 2)(x, item)


# --- numbers and sizes that control flow needs --------------------------------------------------------------------
def repeats(x: Any, n: Any) -> Any:
    for i in range(n):
        x = torch.relu(x) * (i + 1)
    return x


NUMBERS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "range": (repeats, (0, 1, 3, 2)),
    "equal": (lambda x, n: x * 2 if n == 2 else x + n, (1, 2, 3, 2.0)),
    "less": (lambda x, n: x * 2 if n < 1.5 else x + n, (1.0, 2.0, 1.25)),
    "truth": (lambda x, n: x * n if n else x + 1, (0, 2, 0.0, -0.0)),
    "index": (lambda x, n: x * (1.0, 2.0, 3.0)[n], (0, 1, 2, -1)),
    "key": (lambda x, n: x * {1: 5.0, 2: 7.0}[n], (1, 2)),
    "member": (lambda x, n: x * 2 if n in {1, 2} else x, (1, 2, 3)),
    "text": (lambda x, n: getattr(x, f"log{n}")(), (2, 10)),
    "float": (lambda x, n: x * float(n), (1, 2)),
    "type": (lambda x, n: x * 2 if isinstance(n, int) else x + n, (1, 1.0, 2)),
    "shape": (lambda x, n: x.new_zeros(n) + n if n > 2 else x, (1, 3, 4)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_another_number_that_control_flow_needs_traces_again(name: str, x: torch.Tensor) -> None:
    function, values = NUMBERS[name]
    check(function, *((x.abs() + 1, value) for value in values))


def test_numbers_for_arithmetic_stay_run_time_arguments(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    fused = check(lambda x, n, k: axpy(x, x, alpha=n) * (k / 3), (x, 1.0, 2))
    monkeypatch.setattr(fuser.fx.trace, "trace", None)
    torch.testing.assert_close(fused(x, 5.0, 7), (5.0 * x + x) * (7 / 3))


def halves(x: Any) -> Any:
    return x[: x.shape[0] // 2] * 2 if x.shape[0] % 2 == 0 else x * 3


def computed(x: Any) -> Any:
    y = torch.relu(x) @ x.t()
    return y * 2 if y.shape[0] > 5 and y.dtype == torch.float32 else y + 1


def matched(x: Any) -> Any:
    match x.shape:
        case (5, columns):
            return x * columns
        case (rows, *rest) if rows > 4:
            return x + len(rest)
        case (_,) | []:
            return x
    return x - 1


def matched_parts(x: Any) -> Any:
    match (x * 2).split(2), x.max(-1):
        case [first, second], (values, places):
            return first + second + values.sum() * places.sum()
        case [_, _, last], _:
            return last
    return x


def matched_tensor(x: Any) -> Any:
    match x + 1:
        case [first, *_]:
            return first
        case torch.Tensor() as y:
            return y * 2


TENSORS: dict[str, Callable[..., Any]] = {
    "dtype": lambda x: x * 2 if x.dtype == torch.float32 else x + 1,
    "finfo": lambda x: torch.where(x > 0, x, torch.finfo(x.dtype).min),
    "to": lambda x: (x * 2).to(torch.float64).to(x.dtype) + 1,
    "device": lambda x: x * 2 if x.device.type == "cpu" and not x.is_cuda else x,
    "ndim": lambda x: x * 2 if x.ndim == 2 else x + x.dim(),
    "floating": lambda x: x * 2 if x.is_floating_point() and not torch.is_complex(x) else x,
    "rows": lambda x: sum(x[i] * i for i in range(x.shape[0])),
    "len": lambda x: x * len(x),
    "even": halves,
    "unpacked": lambda x: (lambda rows, columns=1: x * rows if rows > 3 else x)(*x.shape[:1]),
    "unbind": lambda x: [torch.relu(row) * 2 for row in x.unbind(0)],
    "computed": computed,
    "match": matched,
    "match of parts": matched_parts,
    "match of a tensor": matched_tensor,
    "is tensor": lambda x: x * 2 if isinstance(x, torch.Tensor) and torch.is_tensor(x) else x + 1,
    "zeros": lambda x: torch.zeros(3, dtype=x.dtype, device=x.device) + x.sum(),
    "zeros of a size": lambda x: torch.zeros(*x.shape) + torch.ones(x.shape[0], 9, dtype=x.dtype) + x,
    "empty of a size": lambda x: empty(x.shape[1], x.shape[0], device=x.device).fill_(2).t() * x,
}


@pytest.mark.parametrize("name", TENSORS)
def test_what_control_flow_asks_of_a_tensor_is_asked_again(name: str) -> None:
    values = [
        draw(shape, dtype, seed=1)
        for shape in ((4, 9), (6, 9), (5, 9))
        for dtype in (torch.float32, torch.float64)
    ]  # fmt: skip
    check(TENSORS[name], *((value,) for value in values))


def _with_gradient() -> torch.Tensor:
    x = torch.ones(4, requires_grad=True)
    x.grad = torch.full((4,), 3.0)
    return x


# Functions, and tensors that are alike but for what they ask.
OBJECTS: dict[str, tuple[Callable[..., Any], tuple[Callable[[], Any], ...]]] = {
    "grad": (
        lambda x: x * 2 if x.grad is None else x + x.grad,
        (lambda: torch.ones(4, requires_grad=True), _with_gradient),
    ),
    "grad_fn": (
        lambda x: x * 2 if x.grad_fn is None else x,
        (lambda: torch.ones(4, requires_grad=True), lambda: torch.ones(4, requires_grad=True) * 1),
    ),
    "is_leaf": (
        lambda x: x * 2 if x.is_leaf else x,
        (lambda: torch.ones(4, requires_grad=True), lambda: torch.ones(4, requires_grad=True) * 1),
    ),
    "_base": (lambda x: x * 2 if x._base is None else x, (lambda: torch.ones(4), lambda: torch.ones(5)[:4])),
    "storage_offset": (lambda x: x * x.storage_offset(), (lambda: torch.ones(8)[4:], lambda: torch.ones(4))),
    "data_ptr": (lambda x: x * 2 if x.data_ptr() == WEIGHT.data_ptr() else x, (lambda: torch.ones(9), lambda: WEIGHT)),
    "storage": (
        lambda x: x * 2 if x.untyped_storage().data_ptr() == WEIGHT.untyped_storage().data_ptr() else x,
        (lambda: torch.ones(9), lambda: WEIGHT),
    ),
    "is_set_to": (lambda x: x * 2 if x.is_set_to(WEIGHT) else x, (lambda: torch.ones(9), lambda: WEIGHT)),
    "is_shared": (
        lambda x: x * 2 if x.is_shared() else x,
        (lambda: torch.ones(4), lambda: torch.ones(4).share_memory_()),
    ),
    "isinstance": (
        lambda x: x * 2 if isinstance(x, torch.nn.Parameter) else x,
        (lambda: torch.ones(4, requires_grad=True), lambda: torch.nn.Parameter(torch.ones(4))),
    ),
    "type": (
        lambda x: x * 2 if type(x) is torch.Tensor else x,
        (lambda: torch.ones(4, requires_grad=True), lambda: torch.nn.Parameter(torch.ones(4))),
    ),
    "_version": (lambda x: x * x._version, (lambda: torch.ones(4), lambda: torch.ones(4).mul_(2))),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_what_control_flow_asks_of_an_object_is_asked_again(name: str) -> None:
    function, values = OBJECTS[name]
    check(function, *((value(),) for value in (*values, values[0])))
    check(function, *((value(),) for value in reversed(values)))


def test_checks_of_torchs_hold_in_every_call(x: torch.Tensor) -> None:
    def function(x: Any, n: int) -> Any:
        torch._check(x.shape[0] < 6, lambda: f"{n} of too many rows")
        torch._check_value(n >= 0)
        return axpy(x, x, alpha=n) * 2

    fused = check(function, (x, 2), (x[:3], 5))
    with pytest.raises(RuntimeError, match="2 of too many rows"):
        fused(torch.cat([x, x]), 2)
    with pytest.raises(ValueError, match="Expected cond to be True"):
        fused(x, -1)
    with pytest.raises(TracingError, match="makes Python wait for its elements"):
        fuser.fuse(lambda x: torch._check(x.sum() > 0) or x * 2)(x)


def test_shapes_that_are_broadcast_are_those_of_each_call() -> None:
    def function(x: Any, y: Any) -> Any:
        return x.expand(torch.broadcast_shapes(x.shape, y.shape, (y.shape[-1],))) * 2

    shapes = [((3, 1), (3, 4)), ((5, 1), (5, 2)), ((1,), (4, 4)), ((2, 3, 1), (1, 3, 4)), ((1, 1), (1, 1))]
    fused = check(function, *([torch.randn(shape) for shape in pair] for pair in shapes))
    with pytest.raises(RuntimeError, match=r"a dimension of length 4 at -2! .* torch.Size\(\[4, 4\]\)"):
        fused(torch.randn(3, 1), torch.randn(4, 4))


@pytest.mark.parametrize("function", [lambda x: x.view(7, 7), lambda x: (x[..., :0].sum(1), x.view(7, 7) * 2)[1]])
def test_what_torch_refuses_is_said_where_control_flow_asks_for_it(function: Callable[..., Any]) -> None:
    x = torch.ones(3, 5)
    with pytest.raises(RuntimeError) as wanted:
        function(x)
    # An error of the values would be a wrong clue: there are none.
    with pytest.raises(TracingError, match=re.escape(str(wanted.value))) as raised:
        fuser.fuse(lambda x: x * 2 if function(x).dim() == 2 else x)(x)
    assert "torch.where" not in str(raised.value)
    assert raised.value.source_line is not None


def test_the_memory_of_what_is_computed_cannot_be_asked_for(x: torch.Tensor) -> None:
    with pytest.raises(TracingError):
        fuser.fuse(lambda x: x * 2 if x.relu().data_ptr() == x.data_ptr() else x)(x)


def squeezed_in_place(x: Any) -> Any:
    x.squeeze_()
    return x * 2 if x.dim() == 2 else x + 1


def turned_in_place(x: Any) -> Any:
    row = x[None][0]
    row.t_()
    return row * 2 if row.shape[0] > 5 else row + 1


ANY_DIMS: dict[str, Callable[..., Any]] = {
    "squeezed": lambda x: (lambda y: y * 2 if y.dim() == 2 else y + 1)((x + 1).squeeze()),
    "a dtype": lambda x: x + ((x + 1).squeeze() * torch.ones(1, dtype=torch.float16)).dtype.itemsize,
    "in place": squeezed_in_place,
    "turned in place": turned_in_place,
}


@pytest.mark.parametrize("name", ANY_DIMS)
def test_dims_that_sizes_decide_and_what_is_turned_in_place_are_asked_again(name: str) -> None:
    function = ANY_DIMS[name]
    fused = fuser.fuse(function)
    for shape in ((4, 6), (4, 1), (1, 1), (4, 3), (4, 6)):
        x = draw(shape, torch.float32, seed=1)
        found, wanted = fused(x.clone()), function(x.clone())
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)


def test_ndim_of_another_tensor() -> None:
    check(TENSORS["ndim"], (torch.ones(3),), (torch.ones(3, 4),), (torch.ones(2, 3, 4),))


def test_a_question_that_makes_no_sense_for_another_tensor() -> None:
    def function(x: Any) -> Any:
        return x * 2 if x.ndim > 1 and x.shape[1] > 3 else x + 1

    check(function, (torch.ones(3, 4),), (torch.ones(3),), (torch.ones(3, 2),))


def test_transforms_of_a_function_that_asks(x: torch.Tensor) -> None:
    fused = fuser.fuse(lambda x: x * 2 if x.dtype == torch.float32 else x + 1)
    assert torch.equal(torch.func.vmap(fused)(x), x * 2)
    assert torch.equal(torch.func.grad(lambda x: fused(x).sum())(x), torch.full_like(x, 2))
    assert torch.equal(fused(x), x * 2)
    # What it is given may be a view, as all tensors with tangents are.
    fused = fuser.fuse(lambda x: x.relu().expand(2, *x.shape) * (2 if x.requires_grad else 3))
    assert torch.equal(torch.func.jvp(fused, (x,), (x,))[1], (x.relu() * 3).expand(2, *x.shape))
    assert torch.equal(torch.func.grad(lambda x: fused(x[0]).sum())(x)[0], 4.0 * (x[0] > 0))


def test_a_first_call_in_a_checkpoint_saves_what_later_ones_do(x: torch.Tensor) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = axpy(torch.sin(x), x)
        return y * y if y.dtype == torch.float32 else y

    leaf = x.clone().requires_grad_()
    fused = fuser.fuse(function)
    checkpoint(fused, leaf, use_reentrant=False).sum().backward()
    wanted = leaf.detach().clone().requires_grad_()
    function(wanted).sum().backward()
    torch.testing.assert_close(leaf.grad, wanted.grad)
    packed: list[type] = []

    def pack(item: torch.Tensor) -> torch.Tensor:
        packed.append(type(item))
        return item

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda item: item):
        fuser.fuse(function).warmup(leaf, backward=True)
        assert packed == []
        fuser.fuse(function)(leaf)
    assert set(packed) == {torch.Tensor}


def test_requires_grad_is_asked_again(x: torch.Tensor) -> None:
    leaf = x.clone().requires_grad_()
    check(lambda x: x * 2 if x.requires_grad else x + 1, (x,), (leaf,))
    fused = fuser.fuse(lambda x: x * 2 if (x * 3).requires_grad else x + 1)
    for _ in range(2):
        assert torch.equal(fused(leaf), leaf * 2)
        with torch.no_grad():
            assert torch.equal(fused(leaf), leaf + 1)


def test_a_new_size_of_a_size_for_arithmetic_traces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = check(lambda x: x * (x.shape[0] / 7) if x.ndim == 2 else x, (torch.ones(3, 4),))
    monkeypatch.setattr(fuser.fx.trace, "trace", None)
    torch.testing.assert_close(fused(torch.ones(5, 4)), torch.full((5, 4), 5 / 7))


PARTS: dict[str, Callable[..., Any]] = {
    "split": lambda x: sum(part * slot for slot, part in enumerate(x[:6].split(2))),
    "torch.chunk": lambda x: torch.stack([part * 2 for part in torch.chunk(x[:, :4].t(), 2)]),
    "unbind": lambda x: sum(x[..., :3].unbind(-1), start=1.0),
    "tensor_split": lambda x: (lambda first, *rest: first * len(rest))(*x.select(1, 0).tensor_split([2, 3])),
    "a size": lambda x: sum(x[:3, None].shape[0] * x for _ in range(x[:, 1:3].shape[1])),
}


@pytest.mark.parametrize("name", PARTS)
def test_new_sizes_trace_nothing_where_views_are_as_many(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function = PARTS[name]
    fused = check(function, (torch.ones(6, 7),), (torch.ones(5, 4),))
    check(function, (torch.ones(6, 7),), (torch.ones(2, 2),), (torch.ones(6, 7),))
    monkeypatch.setattr(fuser.fx.trace, "trace", None)
    for shape in ((6, 8), (5, 9), (5, 4)):
        x = torch.randn(shape)
        torch.testing.assert_close(fused(x), function(x))


def test_what_entries_are_is_asked_of_no_later_call() -> None:
    function = fuser.fuse(lambda x, entries: sum(x[entries].split(1)))
    x, entries = torch.arange(6.0), torch.tensor([1, 4])
    for _ in range(2):
        assert function(x, entries).tolist() == [5.0]
    # As large as they were.
    assert function(x, entries + 1).tolist() == [7.0]
    assert function(x, torch.tensor([1, 2, 3])).tolist() == [6.0]


def test_what_needs_a_call_says_so_before_the_first() -> None:
    fused = fuser.fuse(NUMBERS["range"][0])
    with pytest.raises(TracingError, match="call the function, or warmup"):
        _ = fused.groups
    fused.warmup(torch.ones(3), 2)
    assert len(fused.groups[0].applications) == 4


# --- containers ---------------------------------------------------------------------------------------------------
def test_containers_of_tensors(x: torch.Tensor) -> None:
    def function(pair: Any, named: Any, *rest: Any, **options: Any) -> Any:
        total = sum(pair) * named["scale"]
        for item in rest:
            total = total + item
        return {"total": total, "parts": [total + value for value in options.values()], "given": (named["x"], 3)}

    calls: list[Any] = [
        (([x, x + 1], {"scale": 2.0, "x": x}), {}),
        (([x, x, x], {"scale": 3.0, "x": x}, x), {}),
        (((x,), {"scale": 4.0, "x": x}, x, 5.0), {"a": x, "b": 2.0}),
        (([x], {"scale": x, "x": x}), {"b": x}),
    ]
    fused = fuser.fuse(function)
    for args, kwargs in [*calls, *calls]:
        got, wanted = fused(*args, **kwargs), function(*args, **kwargs)
        torch.testing.assert_close(got, wanted)
        assert got["given"][0] is x


@dataclass
class Output(collections.OrderedDict[str, Any]):
    values: Any
    count: int = 1

    def __post_init__(self) -> None:
        self["values"] = self.values


@pytest.mark.parametrize(
    "function",
    [
        lambda x: collections.OrderedDict(b=x * 2, a=[x + 1]),
        lambda x: [Output(x * 2, count=3), {"inner": Output({"x": x})}],
        lambda x: {x.shape[0]: x * 2, x.shape[1]: x},
    ],
)
def test_dicts_that_are_made_keep_their_class_and_keys(function: Callable[[Any], Any], x: torch.Tensor) -> None:
    fused = fuser.fuse(function)
    for argument in (x, x.t(), x):
        got, wanted = fused(argument), function(argument)
        assert repr(got) == repr(wanted)
        assert type(got) is type(wanted)


def test_a_dict_of_another_class_is_refused(x: torch.Tensor) -> None:
    with pytest.raises(TracingError, match="cannot make a Counter in a graph"):
        fuser.fuse(lambda x: collections.Counter(a=x))(x)


def test_a_list_is_one_launch_and_keeps_no_numbers(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    fused = fuser.fuse(lambda items: axpy(items[0], items[1], alpha=items[2]))
    fused([x, x, 2.0])
    monkeypatch.setattr(fuser.fx.trace, "trace", None)
    before = fuser.stats()["launches"]
    torch.testing.assert_close(fused([x, x, 5.0]), 6 * x)
    assert fuser.stats()["launches"] == before + 1


# --- globals and closures -----------------------------------------------------------------------------------------
FACTOR: Any = 2.0
MISSING: Any
FLAG: Any = True
WEIGHT: Any = torch.full((9,), 2.0)
CONFIG: Any = {"factor": 2.0, "inner": {"flag": True}, "steps": [1.0, 2.0]}


@dataclass
class Settings:
    factor: float = 2.0
    unread: int = 0
    inner: Any = None


SETTINGS: Any = Settings(inner=Settings())


class FactorKind(type):
    factor: Any = 2.0


class Scales(metaclass=FactorKind):
    scale: Any = 2.0


class Hides(Scales):
    pass


HIDES: Any = Hides()


class Table(dict[str, Any]):
    scale: Any = 2.0


TABLE: Any = Table(factor=2.0)
QUEUE: Any = collections.deque([1.0, 2.0])
MODULE = types.ModuleType("some_settings")
MODULE.factor = 2.0  # type: ignore[attr-defined]


def helper(x: Any) -> Any:
    return x * FACTOR


def other_helper(x: Any) -> Any:
    return x - 7


def offset(x: Any) -> Any:
    return x + 3


def scale_if_there_is_one(x: Any) -> Any:
    try:
        return x * HIDES.missing
    except AttributeError:
        return x + 1


def factor_if_there_is_one(x: Any) -> Any:
    try:
        return x * MISSING
    except NameError:
        return x + 1


def default(x: Any, options: Any = CONFIG["inner"]) -> Any:
    return x * 2 if options["flag"] else x + 1


def _replace_first(patch: pytest.MonkeyPatch, steps: list[float]) -> None:
    # By the list's own item assignment, undone with the rest.
    patch.setitem(CONFIG, "steps", steps)
    patch.setattr(patch, "undo", lambda undo=patch.undo: (steps.__setitem__(0, 1.0), undo()))
    steps[0] = 9.0


READS: dict[str, tuple[Callable[..., Any], Callable[[pytest.MonkeyPatch], Any]]] = {
    "number": (lambda x: x * FACTOR, lambda patch: patch.setitem(globals(), "FACTOR", 3.0)),
    "type": (lambda x: x.int() * FACTOR, lambda patch: patch.setitem(globals(), "FACTOR", 2)),
    "flag": (lambda x: x * 2 if FLAG else x, lambda patch: patch.setitem(globals(), "FLAG", False)),
    "one": (lambda x: x * 2 if FLAG is True else x, lambda patch: patch.setitem(globals(), "FLAG", 1)),
    "tensor": (lambda x: x * WEIGHT, lambda patch: patch.setitem(globals(), "WEIGHT", torch.zeros(9))),
    "elements": (lambda x: x * (WEIGHT + 1), lambda _: WEIGHT.mul_(3)),
    "function": (lambda x: helper(x), lambda patch: patch.setitem(globals(), "helper", other_helper)),
    "in a function": (lambda x: helper(x), lambda patch: patch.setitem(globals(), "FACTOR", 3.0)),
    "functor": (lambda x: axpy(x, x), lambda patch: patch.setitem(globals(), "axpy", lambda x, y: x * y)),
    "item": (lambda x: x * CONFIG["factor"], lambda patch: patch.setitem(CONFIG, "factor", 3.0)),
    "deep item": (
        lambda x: x * 2 if CONFIG["inner"]["flag"] else x,
        lambda patch: patch.setitem(CONFIG["inner"], "flag", False),
    ),
    "list": (lambda x: [x * step for step in CONFIG["steps"]], lambda patch: patch.setitem(CONFIG, "steps", [4.0])),
    "list item": (lambda x: x * CONFIG["steps"][0], lambda patch: _replace_first(patch, CONFIG["steps"])),
    "default": (default, lambda patch: patch.setitem(CONFIG["inner"], "flag", False)),
    "attribute": (lambda x: x * SETTINGS.factor, lambda patch: patch.setattr(SETTINGS, "factor", 3.0)),
    "alias": (lambda x: (lambda s: x * s.factor)(SETTINGS), lambda patch: patch.setattr(SETTINGS, "factor", 3.0)),
    "deep attribute": (
        lambda x: x * SETTINGS.inner.factor,
        lambda patch: patch.setattr(SETTINGS.inner, "factor", 3.0),
    ),
    "getattr": (
        lambda x: x * getattr(SETTINGS, "fac" + "tor"),
        lambda patch: patch.setattr(SETTINGS, "factor", 3.0),
    ),
    "class": (lambda x: x * Holder.factor, lambda patch: patch.setattr(Holder, "factor", 3.0)),
    "hidden by a class": (
        lambda x: x * HIDES.scale,
        lambda patch: patch.setattr(Hides, "scale", 3.0, raising=False),
    ),
    "hasattr": (
        lambda x: x * 2 if hasattr(HIDES, "missing") else x,
        lambda patch: patch.setattr(Hides, "missing", 3.0, raising=False),
    ),
    "getattr or else": (
        lambda x: x * getattr(HIDES, "missing", 2.0),
        lambda patch: patch.setattr(HIDES, "missing", 3.0, raising=False),
    ),
    "AttributeError": (
        scale_if_there_is_one,
        lambda patch: patch.setattr(HIDES, "missing", 3.0, raising=False),
    ),
    "NameError": (factor_if_there_is_one, lambda patch: patch.setitem(globals(), "MISSING", 3.0)),
    "class of a dict": (lambda x: x * TABLE.scale, lambda patch: patch.setattr(Table, "scale", 3.0)),
    "attribute of a dict": (
        lambda x: x * TABLE["factor"] * TABLE.scale,
        lambda patch: patch.setattr(TABLE, "scale", 3.0),
    ),
    "deque": (lambda x: x * QUEUE[0], lambda _: QUEUE.rotate()),
    "metaclass": (lambda x: x * Hides.factor, lambda patch: patch.setattr(FactorKind, "factor", 3.0)),
    "code": (lambda x: offset(x), lambda patch: patch.setattr(offset, "__code__", other_helper.__code__)),
    "defaults": (lambda x: default(x), lambda patch: patch.setattr(default, "__defaults__", ({"flag": False},))),
    "module": (lambda x: x * MODULE.factor, lambda patch: patch.setattr(MODULE, "factor", 3.0)),
    "builtin": (lambda x: x * max(1, 2), lambda patch: patch.setitem(globals(), "max", min)),
    "mode": (lambda x: x * 2 if torch.is_grad_enabled() else x, lambda _: torch.set_grad_enabled(False)),
    "default dtype": (
        lambda x: x.to(torch.get_default_dtype()) * 2,
        lambda _: torch.set_default_dtype(torch.float64),
    ),
}


# What asks for it, what changes it and back.
MODES: dict[str, tuple[Callable[[], Any], Callable[[], Any], Callable[[], Any]]] = {
    "deterministic": (
        lambda: torch.are_deterministic_algorithms_enabled(),
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.use_deterministic_algorithms(False),
    ),
    "matmul": (
        lambda: torch.get_float32_matmul_precision() == "high",
        lambda: torch.set_float32_matmul_precision("high"),
        lambda: torch.set_float32_matmul_precision("highest"),
    ),
    "threads": (
        lambda: torch.get_num_threads() == THREADS + 1,
        lambda: torch.set_num_threads(THREADS + 1),
        lambda: torch.set_num_threads(THREADS),
    ),
    "anomaly": (
        lambda: torch.is_anomaly_enabled(),
        lambda: torch.autograd.set_detect_anomaly(True),
        lambda: torch.autograd.set_detect_anomaly(False),
    ),
    "autocast": (
        lambda: torch.get_autocast_dtype("cpu") is torch.half,
        lambda: torch.set_autocast_dtype("cpu", torch.half),
        lambda: torch.set_autocast_dtype("cpu", torch.bfloat16),
    ),
}
THREADS = torch.get_num_threads()


@pytest.mark.parametrize("name", MODES)
def test_a_mode_that_a_function_asks_for_is_never_stale(name: str, x: torch.Tensor) -> None:
    asks, change, undo = MODES[name]
    fused = fuser.fuse(lambda x: torch.relu(x) * (3 if asks() else 2))
    for _ in range(2):
        assert torch.equal(fused(x), torch.relu(x) * 2)
        change()
        try:
            assert torch.equal(fused(x), torch.relu(x) * 3)
        finally:
            undo()


@pytest.mark.parametrize("name", READS)
def test_what_a_function_reads_is_never_stale(name: str, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    function, change = READS[name]
    weight = WEIGHT.clone()
    fused = fuser.fuse(function)
    try:
        for _ in range(3):
            torch.testing.assert_close(fused(x), function(x))
        before = function(x)
        change(monkeypatch)
        for _ in range(3):
            got, wanted = fused(x), function(x)
            torch.testing.assert_close(got, wanted)
        assert str(wanted) != str(before) or wanted.dtype != before.dtype or name in {"one", "type"}
        monkeypatch.undo()
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        torch.testing.assert_close(fused(x), function(x))
    finally:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        WEIGHT.copy_(weight)


def test_a_closure_variable_is_never_stale(x: torch.Tensor) -> None:
    factor: Any = 2.0
    table: Any = {"f": lambda x: x + 1}
    fused = fuser.fuse(lambda x: table["f"](x * factor))
    for value in (2.0, 3.0, x, 2.0):
        factor = value
        torch.testing.assert_close(fused(x), x * factor + 1)
    table["f"] = torch.tanh
    torch.testing.assert_close(fused(x), torch.tanh(x * 2.0))


def test_what_is_not_read_does_not_count(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    fused = fuser.fuse(lambda x: x * SETTINGS.factor + FACTOR)
    torch.testing.assert_close(fused(x), x * 2 + 2)
    monkeypatch.setattr(fuser.fx.trace, "trace", None)
    monkeypatch.setattr(SETTINGS, "unread", 5)
    monkeypatch.setitem(globals(), "FLAG", False)
    # Equal, and not the same object.
    monkeypatch.setitem(globals(), "FACTOR", float("2"))
    torch.testing.assert_close(fused(x), x * 2 + 2)
    assert fused.launch((x,), None, None) is not None


def test_a_replay_looks_at_globals_with_and_without_the_c_launcher(x: torch.Tensor) -> None:
    for options in ({}, {"needs_grad": True}):
        leaf = x.clone().requires_grad_(bool(options))
        fused = fuser.fuse(lambda x: axpy(x, x, alpha=FACTOR))
        fused(leaf)
        assert fused.launch((leaf,), None, None) is not None
        try:
            globals()["FACTOR"] = 5.0
            assert fused.launch((leaf,), None, None) is None
            torch.testing.assert_close(fused(leaf), 6 * leaf)
        finally:
            globals()["FACTOR"] = 2.0
        torch.testing.assert_close(fused(leaf), 3 * leaf)


def test_a_random_draw_is_made_in_every_call(x: torch.Tensor) -> None:
    fused = fuser.fuse(lambda x: torch.relu(x) + torch.rand(9))
    torch.manual_seed(3)
    first, second = fused(x), fused(x)
    torch.manual_seed(3)
    assert torch.equal(first, torch.relu(x) + torch.rand(9))
    assert torch.equal(second, torch.relu(x) + torch.rand(9))


GENERATOR: Any = torch.Generator()


def test_generators_draw_in_every_call(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def noisy(x: Any) -> Any:
        drawn = torch.rand(x.shape, generator=GENERATOR) - torch.rand(x.shape, generator=torch.default_generator)
        return drawn * x, torch.relu(x).bernoulli(0.5, generator=GENERATOR)

    fused = fuser.fuse(noisy)
    for generator in (GENERATOR, torch.Generator()):
        monkeypatch.setitem(globals(), "GENERATOR", generator)
        results = []
        for function in (fused, noisy):
            generator.manual_seed(3)
            torch.manual_seed(4)
            results.append([function(x) for _ in range(3)])
        for got, wanted in zip(*results, strict=True):
            assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: torch.rand(x.shape, generator=GENERATOR.manual_seed(1)), "seeded"),
        (lambda x: (torch.manual_seed(1), torch.rand(x.shape))[1], "seeded"),
        (lambda x: torch.rand(x.shape, generator=torch.Generator().manual_seed(1)), "made in the function"),
    ],
)
def test_what_later_calls_would_not_seed_is_refused(function: Any, reason: str, x: torch.Tensor) -> None:
    torch.manual_seed(2)
    GENERATOR.manual_seed(2)
    with pytest.raises(TracingError, match=reason):
        fuser.fuse(function)(x)


def test_a_tensor_made_on_the_way_is_new_in_every_call(x: torch.Tensor) -> None:
    def function(x: Any) -> Any:
        total = torch.zeros(9)
        total += x[0]
        return total * 2

    check(function, (x,))


def test_gradients_reach_tensors_that_are_no_arguments(x: torch.Tensor) -> None:
    weight = torch.nn.Parameter(torch.full((9,), 2.0))
    fuser.fuse(lambda x: x * (weight * 2))(x).sum().backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, x.sum(0) * 2)


COUNT = 0


def counts(x: Any) -> Any:
    global COUNT  # noqa: PLW0603 - that is the point
    COUNT += 1
    return x * COUNT


def test_a_function_that_changes_a_global_is_refused(x: torch.Tensor) -> None:
    with pytest.raises(TracingError, match=r"counts\(\) changes 'COUNT'"):
        fuser.fuse(counts)(x)


KEPT: list[Any] = []
NAMED: dict[str, Any] = {}


def makes_global(x: Any) -> Any:
    global FRESH  # noqa: PLW0603 - that is the point
    FRESH = x + 1
    return x * 2


def queues(x: Any) -> Any:
    QUEUE.append(x)
    return x


def appends(x: Any) -> Any:
    KEPT.append(x)
    return x * 2


def names(x: Any) -> Any:
    NAMED["x"] = x
    return x * 2


class Keeper(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        self.last = x * 2
        return x


class Nester(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        self.seen = []
        self.seen.append(x)
        return x


def test_no_symbol_stays_where_a_function_puts_one(x: torch.Tensor) -> None:
    kept: Any = 1.0

    def rebinds(x: Any) -> Any:
        nonlocal kept
        kept = x * 2
        return x

    keeper = Keeper()
    for function, name in (
        (makes_global, "'FRESH'"),
        (appends, "'a list'"),
        (queues, "'a list'"),
        (names, "'x'"),
        (keeper, "'last'"),
        (rebinds, "'a variable of the function around it'"),
        (Nester(), "something it does not own"),
    ):
        for _ in range(2):
            with pytest.raises(TracingError, match=rf"\(\) changes {name}"):
                fuser.fuse(function)(x)
    assert "FRESH" not in globals()
    assert (KEPT, NAMED, kept, sorted(QUEUE)) == ([], {}, 1.0, [1.0, 2.0])
    assert not hasattr(keeper, "last")


# --- methods ------------------------------------------------------------------------------------------------------
class Holder:
    factor: Any = 2.0

    def __init__(self, weight: Any = 1.0) -> None:
        self.weight = torch.full((9,), weight)
        self.linear = torch.nn.Linear(9, 9)
        self.bias: Any = 0.5
        self.calls = 0
        self.cache: Any = None

    @fuser.fuse
    def step(self, x: Any, alpha: Any = 2.0) -> Any:
        return axpy(x, self.weight, alpha=alpha) * self.factor + self.bias

    @fuser.fuse
    def apply(self, x: Any) -> Any:
        return torch.relu(self.linear(x)) * 2

    @fuser.fuse
    def memo(self, x: Any) -> Any:
        if self.cache is None:
            self.cache = (2.0, "made")
        return x * self.cache[0]

    @fuser.fuse
    def count(self, x: Any) -> Any:
        self.calls += 1
        return x * 2

    @fuser.fuse
    def keep(self, x: Any) -> Any:
        self.bias = x * 2
        return self.bias + 1

    def plain(self, x: Any) -> Any:
        return torch.relu(x) * self.weight + self.bias


class Child(Holder):
    @fuser.fuse
    def step(self, x: Any, alpha: Any = 2.0) -> Any:
        return super().step(x, alpha) * 10


def expected(holder: Holder, x: torch.Tensor, alpha: float = 2.0) -> torch.Tensor:
    return (alpha * x + holder.weight) * holder.factor + holder.bias


def test_a_method_in_a_class(x: torch.Tensor) -> None:
    first, second = Holder(), Holder(5.0)
    for holder in (first, second, first):
        for alpha in (2.0, 3.0):
            torch.testing.assert_close(holder.step(x, alpha), expected(holder, x, alpha))
            torch.testing.assert_close(holder.step(x=x, alpha=alpha), expected(holder, x, alpha))
    assert first.step is first.step
    assert first.step is not second.step
    assert first.step.__name__ == "step"
    assert isinstance(Holder.step, fuser.FusedFunction)


def test_attributes_of_self_are_never_stale(x: torch.Tensor) -> None:
    holder = Holder()
    changes: list[Callable[[], Any]] = [
        lambda: None,
        lambda: holder.weight.fill_(7.0),
        lambda: setattr(holder, "weight", torch.zeros(9)),
        lambda: setattr(holder, "bias", 3.0),
        lambda: setattr(holder, "bias", x),
        lambda: setattr(holder, "factor", 9.0),
        lambda: delattr(holder, "factor"),
        lambda: setattr(Holder, "factor", 4.0),
        lambda: setattr(Holder, "factor", 2.0),
    ]
    for change in changes:
        change()
        for _ in range(2):
            torch.testing.assert_close(holder.step(x), expected(holder, x))


def test_modules_of_self_are_called(x: torch.Tensor) -> None:
    holder = Holder()
    for _ in range(2):
        torch.testing.assert_close(holder.apply(x), torch.relu(holder.linear(x)) * 2)
    holder.apply(x).sum().backward()
    assert holder.linear.weight.grad is not None
    holder.linear = torch.nn.Linear(9, 9)
    torch.testing.assert_close(holder.apply(x), torch.relu(holder.linear(x)) * 2)
    assert len(holder.apply.groups) == 1


def test_bound_methods_and_super(x: torch.Tensor) -> None:
    holder, child = Holder(3.0), Child()
    torch.testing.assert_close(fuser.fuse(holder.plain)(x), holder.plain(x))
    for _ in range(2):
        torch.testing.assert_close(child.step(x), expected(child, x) * 10)
        torch.testing.assert_close(Holder.step.__get__(child)(x), expected(child, x))


def test_a_method_may_make_what_it_needs_once(x: torch.Tensor) -> None:
    holder = Holder()
    for _ in range(2):
        assert torch.equal(holder.memo(x), x * 2)
    assert holder.cache == (2.0, "made")


def test_a_method_that_changes_its_object_is_refused(x: torch.Tensor) -> None:
    holder = Holder()
    with pytest.raises(TracingError, match=r"count\(\) changes 'calls'"):
        holder.count(x)
    with pytest.raises(TracingError, match=r"keep\(\) changes 'bias'"):
        holder.keep(x)
    assert holder.bias == 0.5


class Derived(Holder):
    def step(self, x: Any) -> Any:
        return Holder.step(self, x) * 2


def test_a_class_calls_its_method_with_an_object(x: torch.Tensor) -> None:
    holder = Derived(3.0)
    for _ in range(2):
        assert torch.equal(Holder.step(holder, x), Holder.step.__get__(holder)(x))
        assert torch.equal(Holder.step(holder, x=x), Holder.step.__get__(holder)(x))
        assert torch.equal(holder.step(x), Holder.step.__get__(holder)(x) * 2)


class Decorated:
    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    @torch.no_grad()
    @fuser.fuse
    def scale(self, x: Any, factor: float = 1.0) -> Any:
        return torch.relu(x) * self.weight * factor

    @property
    @fuser.fuse
    def double(self) -> Any:
        return self.weight * 2 + 0


class Point(NamedTuple):
    x: torch.Tensor
    factor: float

    @fuser.fuse
    def scale(self, y: Any) -> Any:
        return torch.relu(y) * self.factor + self.x


def test_methods_below_another_decorator(x: torch.Tensor) -> None:
    first, second = Decorated(x.clone().requires_grad_()), Decorated(x * 3)
    for holder in (first, second, copy.deepcopy(first), pickle.loads(pickle.dumps(second))):
        for factor in (2.0, 3.0):
            result = holder.scale(x, factor=factor)
            assert torch.equal(result, torch.relu(x) * holder.weight * factor)
            assert not result.requires_grad
            assert torch.equal(holder.double, holder.weight * 2)
    first.weight = x + 1
    assert torch.equal(first.double, (x + 1) * 2)


def test_methods_of_named_tuples_take_them_as_arguments(x: torch.Tensor) -> None:
    compiles = []
    for factor in (2.0, 3.0, 4.0):
        point = Point(x, factor)
        assert torch.equal(point.scale(x), torch.relu(x) * factor + x)
        assert torch.equal(Point.scale(point, x), point.scale(x))
        compiles.append(fuser.stats()["compiles"])
    assert compiles[1] == compiles[2]


@dataclass(slots=True)
class Slotted:
    factor: float

    @fuser.fuse
    def scale(self, x: Any) -> Any:
        return x * self.factor


def test_instances_with_nothing_but_slots_are_refused(x: torch.Tensor) -> None:
    with pytest.raises(UnsupportedError, match='those of Slotted have not: add "__dict__" to its __slots__'):
        Slotted(2.0).scale(x)


class Shared:
    factor = 2.0

    @classmethod
    @fuser.fuse
    def scale(cls, x: Any) -> Any:
        return x * cls.factor


class Larger(Shared):
    factor = 6.0


def test_class_methods(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    for factor in (2.0, 3.0):
        monkeypatch.setattr(Shared, "factor", factor)
        for _ in range(2):
            assert torch.equal(Shared.scale(x), x * factor)
            assert torch.equal(Larger.scale(x), x * 6)
            assert torch.equal(Larger().scale(x), x * 6)
            # As Python 3.13 calls them.
            assert torch.equal(vars(Shared)["scale"].__func__(Larger, x), x * 6)


def test_a_fused_method_stands_in_a_compiled_function(x: torch.Tensor) -> None:
    holder = Holder(3.0)
    compiled = torch.compile(lambda x: holder.step(x) + 1, backend="eager", fullgraph=True)
    for factor in (2.0, 5.0):
        holder.factor = factor
        torch.testing.assert_close(compiled(x), expected(holder, x) + 1)


def test_objects_with_fused_methods_are_copied_and_pickled(x: torch.Tensor) -> None:
    holder = Holder()
    holder.step(x)
    for other in (copy.copy(holder), copy.deepcopy(holder), pickle.loads(pickle.dumps(holder))):
        other.bias = 7.0
        torch.testing.assert_close(other.step(x), expected(other, x))
        assert other.step.function.__self__ is other
    torch.testing.assert_close(holder.step(x), expected(holder, x))


def test_a_method_takes_no_part_in_the_life_of_its_object() -> None:
    import gc
    import weakref

    holder = Holder()
    holder.step(torch.ones(9))
    seen = weakref.ref(holder)
    del holder
    gc.collect()
    assert seen() is None


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(9, 9)
        self.scale = torch.nn.Parameter(torch.full((9,), 2.0))
        self.slope = 0.5

    @fuser.fuse
    def forward(self, x: Any) -> Any:
        return torch.relu(self.linear(x)) * self.scale * self.slope

    def twice(self, x: Any) -> Any:
        return torch.tanh(x) * self.scale + self.slope


def test_a_fused_forward_in_a_class(x: torch.Tensor) -> None:
    net = Net()

    def eager() -> torch.Tensor:
        return torch.relu(net.linear(x)) * net.scale * net.slope

    for change in (lambda: None, lambda: setattr(net, "slope", 0.25), lambda: torch.nn.init.zeros_(net.scale)):
        change()
        for _ in range(2):
            torch.testing.assert_close(net(x), eager())
    net.register_forward_hook(lambda *args: args[2] + 1)
    torch.testing.assert_close(net(x), eager() + 1)
    assert list(net.state_dict()) == ["scale", "linear.weight", "linear.bias"]
    other = copy.deepcopy(net)
    torch.nn.init.ones_(other.scale)
    assert not torch.equal(other(x), net(x))


def test_forward_and_other_methods_of_a_module(x: torch.Tensor) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(9, 9), torch.nn.Tanh(), torch.nn.Sigmoid())
    fused = fuser.fuse(module.forward)
    torch.testing.assert_close(fused(x), module(x))
    module[1] = torch.nn.ReLU()
    torch.testing.assert_close(fused(x), module(x))
    net = Net()
    twice = fuser.fuse(net.twice)
    for slope in (0.5, 0.25):
        net.slope = slope
        torch.testing.assert_close(twice(x), net.twice(x))


# --- errors -------------------------------------------------------------------------------------------------------
def branches(x: Any) -> Any:
    y = x * 2
    if y.sum() > 0:  # the branch
        return y
    return x


def converts(x: Any) -> Any:
    return x * float(x.sum())  # the conversion


def asks(x: Any) -> Any:
    return x if x.max().item() > 0 else -x  # the item


def iterates(x: Any) -> Any:
    return [row * 2 for row in x]  # the loop


def ranges(x: Any) -> Any:
    return [x * i for i in range(x.sum())]  # the range


def nested(x: Any) -> Any:
    return branches(x + 1)


def transforms(x: Any) -> Any:
    return torch.func.vmap(torch.relu)(x)  # the transform


def chooses(x: Any) -> Any:
    return torch.cond(x.sum() > 0, torch.relu, torch.neg, (x,))  # the choice


def yields(x: Any) -> Any:  # the generator
    yield x


def collects(x: Any) -> Any:  # the set
    return {x + 1}


ERRORS = {
    branches: ("torch.where", "the branch"),
    converts: ("the tensor itself", "the conversion"),
    asks: ("torch.where", "the item"),
    iterates: ("unbind", "the loop"),
    ranges: ("index or a count", "the range"),
    nested: ("torch.where", "the branch"),
    transforms: ("cannot trace this", "the transform"),
    chooses: ("got Proxy(gt); leave this part out", "the choice"),
    yields: ("of type generator into a graph, as a result", "the generator"),
    collects: ("lists, tuples, dicts", "the set"),
}


@pytest.mark.parametrize("function", ERRORS, ids=lambda function: function.__name__)
def test_tracing_errors_show_the_users_line(function: Any, x: torch.Tensor) -> None:
    advice, comment = ERRORS[function]
    with pytest.raises(TracingError) as caught:
        fuser.fuse(function)(x)
    error = caught.value
    assert isinstance(error, fuser.errors.FuserError)
    assert advice in str(error)
    assert error.source_line is not None
    assert comment in error.source_line
    assert error.filename == __file__
    assert f"{__file__}:{error.line}: " in str(error)
    assert error.__cause__ is None
    assert error.__suppress_context__
    frames = [entry.path for entry in caught.traceback]
    assert not [path for path in frames if "torch" in str(path)]
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.line) == (str(error), error.line)


def test_a_tracing_error_shows_the_line_of_a_cell(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    # As IPython names its cells, which are in no file.
    name, text = "<ipython-input-1-0123456789ab>", "def cell(x):\n    y = x + 1\n    return y if y.sum() > 0 else x\n"
    monkeypatch.setitem(linecache.cache, name, (len(text), None, text.splitlines(keepends=True), name))
    made: dict[str, Any] = {}
    exec(compile(text, name, "exec"), made)
    with pytest.raises(TracingError) as caught:
        fuser.fuse(made["cell"])(x)
    error = caught.value
    assert (error.filename, error.line, error.source_line) == (name, 3, "    return y if y.sum() > 0 else x\n")


def test_an_exception_of_the_users_own_stays_one(x: torch.Tensor) -> None:
    def function(x: Any) -> Any:
        if x.ndim != 3:
            raise ValueError(f"expected three dimensions, got {x.ndim}")
        return x * 2

    fused = fuser.fuse(function)
    for _ in range(2):
        with pytest.raises(ValueError, match="three dimensions, got 2"):
            fused(x)
    assert torch.equal(fused(x[None]), x[None] * 2)


def test_the_table_of_foreign_modules_names_real_ones() -> None:
    assert {"torch", "math"} <= fuser.fx.guards._FOREIGN
    assert __name__ not in sys.stdlib_module_names


@dataclass(frozen=True, slots=True)
class _Held:
    scale: float
    functor: Any


def test_what_cannot_change_is_not_asked_in_every_call() -> None:
    held = _Held(2.0, fuser.create_jit_fn("template <typename T> T twice(T x, T a) { return x * a; }", a=1.0))
    fused = fuser.fuse(lambda x: held.functor(x, a=held.scale))
    x = torch.randn(4)
    assert torch.equal(fused(x), 2 * x)
    guards = find_guards(fused.function)
    # The closure's variable, and that neither the function's code nor the class is another; not the fields of a
    # frozen object, nor what its class is made of.
    assert [name for _, name, _ in guards.attributes] == ["cell_contents", "__code__"]
    assert not guards.reads
    assert [question for question, *_ in guards.asked] == [len]
    held = _Held(3.0, held.functor)
    assert torch.equal(fused(x), 3 * x)


def test_a_record_relies_on_the_values_of_its_trace() -> None:
    held: dict[str, Any] = {"scale": 2.0, "name": "a"}
    guards = Guards(reads=((held, "scale", 2.0), (held, "name", "a")))
    # Another thread changes one, and puts an equal value in place of the other, before the call is recorded.
    same = float("2.0")
    held.update(scale=same, name="b")
    (_, _, scale), (_, _, name) = guards.split()[0]
    assert scale is same
    assert name == "a"
    del held["scale"]
    assert guards.split()[0][0][2] == 2.0


def test_what_code_reaches_may_be_deeper_than_the_stack() -> None:
    def add_one(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda x: function(x) + 1

    function: Callable[[Any], Any] = abs
    for _ in range(300):
        function = add_one(function)
    check(function, (torch.zeros(4),))


def test_an_exported_module_with_dynamic_sizes() -> None:
    # It holds the bounds of its sizes, numbers of sympy, from which all of sympy's code can be reached.
    rows = {0: torch.export.Dim("rows", min=2)}
    module = torch.export.export(torch.nn.Tanh(), (torch.ones(4, 9),), dynamic_shapes=(rows,)).module()
    check(module, (torch.ones(4, 9),), (torch.ones(6, 9),))
    assert len(find_guards(module).asked) < 100


def with_an_assert(x: torch.Tensor) -> torch.Tensor:
    assert x.dim() == 1, "pytest rewrites it, to say more when it fails"
    return x * 2


def test_what_pytest_puts_into_asserts_is_not_looked_at() -> None:
    assert any(name.startswith("@") for name in with_an_assert.__code__.co_names), "pytest rewrites asserts"
    guards = find_guards(with_an_assert)
    assert [key for _, key, _ in guards.reads if str(key).startswith("@")] == []
    # All of pytest could be reached from there, and would be looked at in each call.
    assert len(guards.reads) + len(guards.attributes) + len(guards.asked) < 20


class Registry(collections.OrderedDict[str, Any]):
    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name)()


class Doubling:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


REGISTRY = Registry(double=Doubling)
OUTER = types.ModuleType("outer")
OUTER.inner, OUTER.other = types.ModuleType("inner"), types.ModuleType("other")  # type: ignore[attr-defined]
OUTER.inner.scale, OUTER.other.scale = 2.0, 3.0  # type: ignore[attr-defined]


def test_a_registry_that_makes_what_it_gives_holds_the_same(x: torch.Tensor) -> None:
    def double(x: torch.Tensor) -> Any:
        return REGISTRY["double"](x)

    assert torch.equal(fuser.fuse(double)(x), x * 2)
    guards = find_guards(double)
    assert guards.holds()
    dict.__setitem__(REGISTRY, "double", lambda: torch.neg)
    try:
        assert not guards.holds()
    finally:
        dict.__setitem__(REGISTRY, "double", Doubling)


def test_of_a_module_that_is_reached_by_name_no_other_name_is_read(x: torch.Tensor) -> None:
    def scaled(x: torch.Tensor) -> Any:
        return x * OUTER.inner.scale

    guards = find_guards(scaled)
    assert {key for _, key, _ in guards.reads} == {"OUTER", "inner", "scale"}
    fused = fuser.fuse(scaled)
    assert torch.equal(fused(x), x * 2)
    OUTER.inner.scale = 5.0
    try:
        assert not guards.holds()
        assert torch.equal(fused(x), x * 5)
    finally:
        OUTER.inner.scale = 2.0


def test_code_is_taken_apart_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Names found late have all be looked at again: of a large library many times, and this takes most of the time.
    met: list[Any] = []
    take_apart = dis.get_instructions
    monkeypatch.setattr(dis, "get_instructions", lambda code: met.append(code) or take_apart(code))
    late = types.SimpleNamespace(scale=lambda x: x * late.factor, factor=2.0)
    guards = find_guards(lambda x: late.scale(x))
    assert any(value == 2.0 for *_, value in guards.reads)
    assert met
    assert len(met) == len(set(met))
