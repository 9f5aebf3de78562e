"""Every op of the table, under every name a program can give it, against eager torch on the CPU."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from accuracy import assert_close_to_eager, assert_form, distance, outcome
from functors import draw, poison, same_bits, special_tensor, unpoison
from tiers import choose

import fuser
from fuser.fx.nodes import bind_node
from fuser.ops import OPS, OpCall, binding

pytestmark = pytest.mark.cpu

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    poison()
    yield
    unpoison()


# --- ways to name an op: calls of a target with tensors (T, U: two tensors, C: a condition) and numbers --------------
class T:
    """Stands for a tensor among the arguments; the letter says which."""

    def __init__(self, letter: str) -> None:
        self.letter = letter

    def __repr__(self) -> str:
        return self.letter


X, Y, C = T("x"), T("y"), T("c")
Way = tuple[str, Any, tuple[Any, ...], tuple[tuple[str, Any], ...]]

PATTERNS: tuple[tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]], ...] = (
    ((X,), ()),
    ((X, Y), ()),
    ((X, 2.5), ()),
    ((X, 2), ()),
    ((2.5, X), ()),
    ((3, X), ()),
    ((X, True), ()),
    ((X, Y), (("alpha", 2),)),
    ((X, Y), (("alpha", 0.5),)),
    ((X, 3), (("alpha", 2),)),
    ((X, Y, C), ()),
    ((X, -1.0, 1.5), ()),
    ((X, 1), ()),
    ((X, None, 1), ()),
    ((X, Y, X), ()),
    ((X, Y, 0.5), ()),
    ((X, Y, 0), ()),
    ((C, X, Y), ()),
    ((C, X, 2.5), ()),
    ((C, 2.5, X), ()),
    ((C, 2.5, -1.0), ()),
    ((C, 1, 0), ()),
    ((X, C, Y), ()),
    ((X, C, 2.5), ()),
    ((X, Y, X), (("value", 0.5),)),
    ((X, Y, X), (("value", 2),)),
    ((X, 0.25, 1.5, 2.0), ()),
    ((X,), (("min", -1),)),
    ((X,), (("max", 1.5),)),
    ((X,), (("min", Y),)),
    ((X,), (("approximate", "tanh"),)),
    ((X,), (("approximate", "none"),)),
    ((X, Y), (("approximate", "tanh"),)),
    ((X, -1), ()),
    ((X, 3), ()),
    ((X, -2), ()),
    ((X, 0.5), ()),
    ((X, -0.5), ()),
    ((X, 0), ()),
    ((X,), (("dtype", torch.float64),)),
    ((X,), (("dtype", torch.bfloat16),)),
    ((X,), (("dtype", torch.int32),)),
    ((X,), (("dtype", torch.bool),)),
    ((X, torch.float16), ()),
    ((X, Y, -1.0, 1.5), ()),
    ((X, Y, 0.5, False), ()),
    ((X, 1.5, 2.0, 0.5, False, Y), ()),
    ((X, C, 2.5), ()),
    ((X, Y, 0), (("beta", 0.75),)),
    ((X, Y, 0, 0.75), ()),
    ((X, Y, X, 2), ()),
    # torch's CPU kernel divides integers by it.
    ((X, Y, X, 2, 1.5), ()),
    ((X, Y, X, None, 2), ()),
    ((X, Y), (("rounding_mode", "trunc"),)),
    ((X, 2.5), (("rounding_mode", "trunc"),)),
    ((X, Y), (("rounding_mode", "floor"),)),
)


def target_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if isinstance(target, str):
        return f"Tensor.{target}"
    return f"{(getattr(target, '__module__', '') or 'torch').strip('_')}.{target.__name__}"


@cache
def all_ways() -> dict[str, list[Way]]:
    """Return for each op of the table the calls that bind to it."""
    found: dict[str, list[Way]] = {name: [] for name in OPS}
    targets = [("call_function", target) for target in binding._functions()]
    targets += [("call_method", target) for target in binding._methods()]
    for (kind, target), (args, kwargs) in itertools.product(targets, PATTERNS):
        if not fits_schema(target, args, kwargs):
            continue
        call = bind_node(_node(kind, target, args, kwargs)[1])
        if call is None or call.reduces or call.is_view or call.arranges:
            # Reductions have dimensions instead of patterns: test_reductions_cpu; arrangements have test_arrangements.
            continue
        if takes((kind, target, args, kwargs)):
            found[_outer(call)].append((kind, target, args, kwargs))
    return found


def takes(way: Way) -> bool:
    """Whether torch's binding takes such arguments: no program has calls that it does not."""
    result = outcome(eager, way, random_tensors(torch.float32))
    return not isinstance(result, TypeError | AttributeError) and result is not NotImplemented


def fits_schema(target: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> bool:
    """Whether tensors, numbers and dtypes stand where an ATen overload takes them: no graph has other calls of it."""
    if not isinstance(target, torch._ops.OpOverload):
        return True
    declared = [argument for argument in target._schema.arguments if not argument.kwarg_only]
    given = dict(kwargs) | dict(zip((item.name for item in declared), args, strict=False))
    wanted = {item.name: item for item in target._schema.arguments}
    return len(args) <= len(declared) and all(_fits(value, wanted.get(name)) for name, value in given.items())


def _fits(value: Any, declared: Any) -> bool:
    if declared is None:
        return False
    kind = str(declared.type).removeprefix("Optional[").rstrip("]")
    if declared.name == "dtype":
        return isinstance(value, torch.dtype)
    if value is None:
        return str(declared.type).startswith("Optional")
    return isinstance(value, {"Tensor": T, "str": str}.get(kind, (int, float)))


def _outer(call: OpCall) -> str:
    assert call.function.op is not None
    # ``2 / x`` is a reciprocal and a product.
    inner = [item for item in call.tensors if isinstance(item, OpCall)]
    return str(inner[0].function.op if inner and call.function.op == "mul" else call.function.op)


def _node(
    kind: str, target: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]
) -> tuple[torch.fx.Graph, torch.fx.Node]:
    graph = torch.fx.Graph()
    return graph, _call(graph, (kind, target, args, kwargs), {letter: graph.placeholder(letter) for letter in "xyc"})


def _call(graph: torch.fx.Graph, way: Way, places: dict[str, torch.fx.Node]) -> torch.fx.Node:
    kind, target, args, kwargs = way
    swap = lambda item: places[item.letter] if isinstance(item, T) else item  # noqa: E731
    return graph.create_node(kind, target, tuple(map(swap, args)), {name: swap(item) for name, item in kwargs})


_fused: dict[str, Callable[..., Any]] = {}


def fused(way: Way) -> Callable[..., Any]:
    # By text: True and 1 are equal, and not the same argument.
    text = describe(way)
    if text not in _fused:
        graph, node = _node(*way)
        graph.output(node)
        _fused[text] = fuser.fx.fuse_graph(torch.fx.GraphModule(torch.nn.Module(), graph))
    return _fused[text]


def eager(way: Way, tensors: dict[str, torch.Tensor]) -> Any:
    kind, target, args, kwargs = way
    swap = lambda item: tensors[item.letter] if isinstance(item, T) else item  # noqa: E731
    positional, named = [swap(item) for item in args], {name: swap(item) for name, item in kwargs}
    return (
        getattr(positional[0], target)(*positional[1:], **named)
        if kind == "call_method"
        else target(*positional, **named)
    )


def describe(way: Way) -> str:
    _, target, args, kwargs = way
    return f"{target_name(target)}({', '.join([*map(str, args), *(f'{name}={item}' for name, item in kwargs)])})"


def uses(way: Way, letter: str) -> bool:
    values = [*way[2], *(item for _, item in way[3])]
    return any(isinstance(item, T) and item.letter == letter for item in values)


def check(way: Way, name: str, tensors: dict[str, torch.Tensor]) -> None:
    """Compare one call with eager: exception, dtype, shape, strides, and value against float64."""
    compare(way, name, tensors, outcome(eager, way, tensors), outcome(fused(way), *tensors.values()))


def check_together(name: str, calls: list[tuple[Way, dict[str, torch.Tensor]]]) -> None:
    """As ``check``, with one launch for all calls that eager torch computes: their kernel compiles once."""
    wanted = [outcome(eager, *call) for call in calls]
    refused = [call for call, result in zip(calls, wanted, strict=True) if isinstance(result, Exception)]
    served = [(call, result) for call, result in zip(calls, wanted, strict=True) if isinstance(result, torch.Tensor)]
    assert len(refused) + len(served) == len(calls)
    for batch in (served[first : first + 12] for first in range(0, len(served), 12)):
        graph = torch.fx.Graph()
        places = [{letter: graph.placeholder(f"{letter}{index}") for letter in "xyc"} for index in range(len(batch))]
        graph.output([_call(graph, way, place) for ((way, _), _), place in zip(batch, places, strict=True)])
        before = fuser.stats()["fallbacks"]
        module = fuser.fx.fuse_graph(torch.fx.GraphModule(torch.nn.Module(), graph))
        found = outcome(module, *itertools.chain(*(tensors.values() for (_, tensors), _ in batch)))
        if isinstance(found, Exception) or fuser.stats()["fallbacks"] != before:
            # One that runs in eager torch, alone, takes no other with it.
            refused += [call for call, _ in batch]
            continue
        for ((way, tensors), result), got in zip(batch, found, strict=True):
            compare(way, name, tensors, result, got)
    for way, tensors in refused:
        check(way, name, tensors)


def compare(way: Way, name: str, tensors: dict[str, torch.Tensor], wanted: Any, got: Any) -> None:
    """Compare outcomes, the value against float64."""
    what = f"{describe(way)} on {', '.join(str(item.dtype)[6:] for item in tensors.values())}"
    if isinstance(wanted, Exception) or isinstance(got, Exception):
        assert isinstance(got, type(wanted)), f"{what}: {str(got)[:200]} instead of {str(wanted)[:200]}"
        return
    assert_form(got, wanted, what)
    # The truth, rounded to the dtype once.
    wide = {letter: item.double() if item.dtype.is_floating_point else item for letter, item in tensors.items()}
    terms = [item for letter, item in tensors.items() if uses(way, letter)]
    assert_close_to_eager(name, got, wanted, outcome(eager, way, wide), terms, what)


def random_tensors(dtype: torch.dtype, other: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    return {
        "x": draw((7, 19), dtype, seed=1),
        "y": draw((7, 19), other or dtype, seed=2),
        "c": draw((7, 19), torch.bool, seed=3),
    }


SPECIAL_COUNT = len(special_tensor(torch.float32))


def special_tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    # As many for every dtype: results of one shape share a kernel.
    special = special_tensor(dtype)
    special = special.repeat(-(-SPECIAL_COUNT // len(special)))[:SPECIAL_COUNT]
    x, y = torch.meshgrid(special, special, indexing="ij")
    return {"x": x.contiguous(), "y": y.contiguous(), "c": draw(x.shape, torch.bool)}


def distinct(ways: list[Way]) -> list[Way]:
    """One way per pattern: all ways of one pattern share a group, which the first test shows."""
    return list({str(way[2:]): way for way in ways if way[0] == "call_function"}.values()) or ways


def few(ways: list[Way]) -> list[Way]:
    """One way per place of the tensors: numbers of other types and values make kernels that differ little."""
    return list(
        {tuple(str(item) if isinstance(item, T) else "n" for item in way[2]): way for way in distinct(ways)}.values()
    )


def test_every_op_has_a_name() -> None:
    backward_only = {name for name, ways in all_ways().items() if not ways} - BY_THEMSELVES
    assert not backward_only, f"no way to write {backward_only} is known"


# What takes tensors that depend on each other (test_arrangements.py has them), or asks for devices (test_losses.py).
BY_THEMSELVES = {
    "elu_result_backward",
    "fill",
    "masked_put",
    "contiguous",
    "glu_backward_first",
    "glu_backward_second",
    "tril",
    "triu",
    "glu",
    "binary_cross_entropy",
    "log_sigmoid",
    "log_sigmoid_backward",
    "nan_to_num",
    "native_dropout_backward",
}
# A conversion or a copy whose result is all that a graph returns stays torch's.
NAMES = [name for name in OPS if name not in {"convert", "clone", *BY_THEMSELVES}]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", NAMES, ids=str)
def test_every_name(name: str) -> None:
    """Under every name, the op fuses and equals eager."""
    tensors = random_tensors(torch.float32 if "float" in OPS[name].kinds else torch.int32)
    ran = 0
    for way in all_ways()[name]:
        if isinstance(outcome(eager, way, tensors), Exception):
            check(way, name, tensors)
            continue
        before = fuser.stats()
        check(way, name, tensors)
        after = fuser.stats()
        assert after["fallbacks"] == before["fallbacks"], describe(way)
        # A first power alone is torch's copy.
        is_copy = name == "pow_number" and way[2][1:] in {(1,), (1.0,), (True,)}
        assert after["launches"] == before["launches"] + (not is_copy), describe(way)
        ran += 1
    assert ran, "some way runs"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", NAMES)
def test_dtypes_and_special_values(name: str, tier: int) -> None:
    """Where torch raises, so does fuser, with the same kind of exception."""
    ways, drawn, special = all_ways()[name], [], []
    floats, integers = FLOATS, (torch.int32, torch.uint8, torch.bool)
    if tier < 3:
        # test_opinfo.py has each op in all dtypes.
        floats, integers = floats[choose(name, 4) :][:1], integers[choose(name, 6) :][:1]
    for dtype in (*floats, *integers):
        for way in distinct(ways) if dtype in (torch.float32, torch.int32) else few(ways):
            drawn.append((way, random_tensors(dtype)))
            # Floats beside extreme integers, and casts of what does not fit, are undefined in torch too.
            if name == "to" or (not dtype.is_floating_point and any(isinstance(item, float) for item in way[2])):
                continue
            # What is added overflows or underflows where torch's CPU kernel fuses the product with the sum.
            if dtype.is_floating_point and (name == "lerp" or any(key in {"alpha", "value"} for key, _ in way[3])):
                continue
            # torch's vectorised kernels give NaN where the quotient is too large for the dtype.
            if dtype is torch.float64 and name in {"fmod", "remainder"}:
                continue
            special.append((way, special_tensors(dtype)))
    check_together(name, drawn)
    check_together(name, special)


MIXED = (
    (torch.float32, torch.bfloat16),
    (torch.int32, torch.float16),
    (torch.uint8, torch.int8),
    (torch.bool, torch.float32),
)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", NAMES, ids=str)
def test_promotion(name: str) -> None:
    ways = [way for way in distinct(all_ways()[name]) if uses(way, "x") and uses(way, "y")]
    calls = [(way, random_tensors(*order)) for way in ways[:1] for pair in MIXED for order in (pair, pair[::-1])]
    if name == "gelu_backward":
        # Where oneDNN serves the gradient's dtype, torch's CPU kernel refuses another one of the input.
        calls = [call for call in calls if not isinstance(outcome(eager, *call), RuntimeError)]
    check_together(name, calls)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", NAMES, ids=str)
def test_layouts(name: str, tier: int) -> None:
    """Strides, with numbers and 0-dim tensors beside the tensors, are torch's."""
    base = random_tensors(torch.float32)
    variants = [
        {letter: item.t() for letter, item in base.items()},
        {**base, "x": base["x"].t().contiguous().t()},
        {**base, "y": base["y"][:, :1], "x": base["x"][:1]},
        {**base, "y": torch.tensor(1.5)},
        {"x": torch.tensor(1.25), "y": torch.tensor(0.5), "c": torch.tensor(True)},
    ]
    if tier < 3:
        # Layouts do not look into an op.
        variants = [variants[choose(name, len(variants))]]
    for way in few(all_ways()[name]):
        for tensors in variants:
            check(way, name, tensors)


# --- Python's own spellings, traced by fuser.fuse -------------------------------------------------------------------
SPELLINGS: dict[str, Callable[[Any, Any], Any]] = {
    "x + y": lambda x, y: x + y,
    "x - y": lambda x, y: x - y,
    "x * y": lambda x, y: x * y,
    "x / y": lambda x, y: x / y,
    "x ** y": lambda x, y: abs(x) ** y,
    "x + 2": lambda x, y: x + 2,
    "2 + x": lambda x, y: 2 + x,
    "x - 2": lambda x, y: x - 2,
    "2 - x": lambda x, y: 2 - x,
    "2.5 * x": lambda x, y: 2.5 * x,
    "x / 3": lambda x, y: x / 3,
    "3 / x": lambda x, y: 3 / x,
    "x ** 2": lambda x, y: x**2,
    "x ** -1": lambda x, y: x**-1,
    "2 ** x": lambda x, y: 2**x,
    "-x": lambda x, y: -x,
    "abs(x)": lambda x, y: abs(x),
    "x < y": lambda x, y: x < y,
    "2 > x": lambda x, y: x < 2,
    "x == 1": lambda x, y: x == 1,
    "x != y": lambda x, y: x != y,
    "x >= 0": lambda x, y: x >= 0,
    "x <= y": lambda x, y: x <= y,
    "x.clamp(-1, 1)": lambda x, y: x.clamp(-1, 1),
    "x.clamp(min=y)": lambda x, y: x.clamp(min=y),
    "torch.clamp(x, max=y)": lambda x, y: torch.clamp(x, max=y),
    "x.where(x > y, y)": lambda x, y: x.where(x > y, y),
    "torch.where(x > 0, x, 0.0)": lambda x, y: torch.where(x > 0, x, 0.0),
    "torch.where(x > 0, 1.0, 0.0)": lambda x, y: torch.where(x > 0, 1.0, 0.0),
    "torch.add(x, y, alpha=2)": lambda x, y: torch.add(x, y, alpha=2),
    "x.sub(y, alpha=2)": lambda x, y: x.sub(y, alpha=2),
    "torch.rsub(x, 2)": lambda x, y: torch.rsub(x, 2),
    "F.gelu(x)": lambda x, y: F.gelu(x),
    "F.gelu(x, approximate='tanh')": lambda x, y: F.gelu(x, approximate="tanh"),
    "F.silu(x)": lambda x, y: F.silu(x),
    "F.relu(x)": lambda x, y: F.relu(x),
    "torch.sigmoid(x).mul(y)": lambda x, y: torch.sigmoid(x).mul(y),
    "torch.maximum(input=x, other=y)": lambda x, y: torch.maximum(input=x, other=y),
    "operator.truediv(x, y)": lambda x, y: operator.truediv(x, y),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("text", SPELLINGS, ids=str)
def test_spellings(text: str) -> None:
    function = SPELLINGS[text]
    one = fuser.fuse(function)
    x, y = draw((5, 33), torch.float32, seed=4), draw((5, 33), torch.float32, seed=5)
    before = fuser.stats()["launches"]
    got = one(x, y)
    assert fuser.stats()["launches"] == before + 1
    wanted = function(x, y)
    assert got.dtype == wanted.dtype
    assert got.stride() == wanted.stride()
    if got.dtype == torch.bool:
        assert torch.equal(got, wanted)
    else:
        truth = function(x.double(), y.double()).to(got.dtype)
        close = (got.double() - truth.double()).abs() <= 16 * torch.finfo(torch.float32).eps
        assert bool(((distance(got, truth) <= distance(wanted, truth).clamp(min=4)) | ("gelu" in text) & close).all())
    for dtype in (torch.int32, torch.bool, torch.bfloat16):
        mine, theirs = outcome(one, x.to(dtype), y.to(dtype)), outcome(function, x.to(dtype), y.to(dtype))
        if isinstance(theirs, Exception):
            assert isinstance(mine, type(theirs)), f"{text} on {dtype}: {mine!r} instead of {theirs!r}"
        else:
            assert mine.dtype == theirs.dtype, f"{text} on {dtype}: {mine.dtype} instead of {theirs.dtype}"
            assert torch.allclose(mine.double(), theirs.double(), rtol=0.02, atol=0.02, equal_nan=True), (
                f"{text} {dtype}"
            )


@pytest.mark.parametrize("number", [2**63, 2**64 - 1])
@pytest.mark.parametrize(
    "function", [lambda x, n: torch.relu(x) + n, lambda x, n: n > x, lambda x, n: torch.clamp(x, -torch.inf, n)]
)
def test_integers_without_a_sign_are_torchs(function: Callable[..., Any], number: int) -> None:
    fused = fuser.fuse(function)
    for dtype in (torch.float32, torch.float64, torch.int32):
        x = draw((5, 33), dtype, seed=4)
        # Beside one that a kernel takes, and again.
        for given in (3, number, 4, number):
            got, wanted = outcome(fused, x, given), outcome(function, x, given)
            assert_form(got, wanted, f"{dtype}, {given}")
            assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x.bool() - y.bool(),
        lambda x, y: -x.bool(),
        lambda x, y: torch.relu(x.bool()),
        lambda x, y: torch.where(x, y, y),
        lambda x, y: torch.add(x.int(), y.int(), alpha=0.5),
        lambda x, y: torch.add(x.bool(), y.bool(), alpha=0.5),
        lambda x, y: torch.add(x, y, alpha=True),
        lambda x, y: torch.sub(x.int(), y.int(), alpha=True),
        lambda x, y: (x * 2) + 2**64,
        lambda x, y: torch.clamp(x, -(2**63) - 1, 1),
        lambda x, y: torch.clamp(x, min=y, max=1.0),
        lambda x, y: torch.add(x, y[:3, :4]),
        lambda x, y: x.int() ** -1,
        lambda x, y: torch.maximum(x, y[0, :2]),
        lambda x, y: F.gelu(x.int()),
        lambda x, y: F.silu(x.int()),
    ],
)
def test_errors_are_torchs(function: Callable[..., Any]) -> None:
    x, y = draw((5, 33), torch.float32, seed=4), draw((5, 33), torch.float32, seed=5)
    with pytest.raises(Exception) as wanted:  # noqa: PT011 - whatever torch raises
        function(x, y)
    with pytest.raises(type(wanted.value)):
        fuser.fuse(function)(x, y)


@pytest.mark.cpu
@pytest.mark.parametrize("is_turned", [False, True])
def test_the_gradient_of_log_sigmoid_lies_as_what_comes(is_turned: bool) -> None:
    x, g = torch.randn(4, 6).t(), torch.randn(6, 4)
    x, g = (g, x) if is_turned else (x, g)
    _, buffer = torch.ops.aten.log_sigmoid_forward(x)
    wanted = torch.ops.aten.log_sigmoid_backward(g, x, buffer)
    made = fuser.fuse(lambda g, x, buffer: torch.ops.aten.log_sigmoid_backward(g, x, buffer))(g, x, buffer)
    assert made.stride() == wanted.stride()
    torch.testing.assert_close(made, wanted)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_log_sigmoid_lies_as_torch_makes_it(device: str) -> None:
    # On the GPU as its operand, also along dimensions that nobody walks.
    for shape, strides in (((2, 1, 1), (1, 2, 2)), ((3, 4), (1, 3)), ((3, 4), (8, 1))):
        x = torch.empty_strided(shape, strides, device=device).fill_(0.5)
        assert fuser.fuse(lambda x: F.logsigmoid(x))(x).stride() == F.logsigmoid(x).stride()


def test_strides_of_a_number_to_the_power_of_a_tensor() -> None:
    x = draw((5, 33), torch.float32).t()
    for step in (lambda x, a: 2**x, lambda x, a: a**x, lambda x, a: torch.pow(a, x), lambda x, a: x**a):
        assert_form(fuser.fuse(step)(x, 2), step(x, 2), "")


def with_constant(form: Callable[[Any, Any], Any], number: float) -> Callable[[Any], Any]:
    return lambda x: form(x, number)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_numbers_that_are_arguments_choose_the_same_ops(device: str) -> None:
    """Torch multiplies by a number's reciprocal and has powers of its own: so do numbers that only a call knows."""
    x = draw((1000,), torch.float32, (0.1, 4.0), device=device)
    forms = (lambda x, n: x / n, lambda x, n: n / x, lambda x, n: x**n, lambda x, n: x / (n * x.shape[0]) ** 0.5)
    for form in forms:
        for number in (3, 0.3, 2.0, 0.5, True):
            variable, constant = fuser.fuse(form), fuser.fuse(with_constant(form, number))
            got = variable(x, number)
            assert same_bits(got, constant(x))
            # A power is the same op by another text: a call brings another exponent without a new kernel.
            assert [item.function.op for group in variable.groups for item in group.applications] == [
                item.function.op for group in constant.groups for item in group.applications
            ]
            if device == "cuda":
                assert same_bits(got, form(x, number))
    for number in (1 + 2j, 2**40):
        assert torch.equal(fuser.fuse(forms[0])(x, number), forms[0](x, number))


COMPARISONS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_is_compared_has_the_common_dtype(dtype: torch.dtype, device: str) -> None:
    x = torch.tensor([0.1, 0.3, 1 / 3, 2.5, -0.7], dtype=dtype, device=device)
    fuser.reset_stats()
    compare = fuser.fuse(lambda x, y: tuple(function(x, y) for function in COMPARISONS))
    for value in (0.1, 0.3, 1 / 3, -0.7):
        for other in (value, torch.tensor(value), torch.tensor(value, dtype=torch.float64)):
            for got, function in zip(compare(x, other), COMPARISONS, strict=True):
                assert torch.equal(got, function(x, other)), (function, other)
    assert fuser.stats()["fallbacks"] == {}


def test_casts() -> None:
    x = draw((5, 33), torch.float32, (-90, 90), seed=4)
    for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int8, torch.int64, torch.bool):
        graph = torch.fx.Graph()
        graph.output(graph.call_function(torch.ops.aten._to_copy.default, (graph.placeholder("x"),), {"dtype": dtype}))
        module = fuser.fx.fuse_graph(torch.fx.GraphModule(torch.nn.Module(), graph))
        before = fuser.stats()["launches"]
        got = module(x)
        assert fuser.stats()["launches"] == before + 1
        assert got.dtype == dtype
        assert same_bits(got, x.to(dtype))


def exact_fmod(a: float, b: float) -> float:
    return math.nan if math.isinf(a) or b == 0 else math.fmod(a, b)


def exact_remainder(a: float, b: float) -> float:
    r = exact_fmod(a, b)
    return r + b if r != 0 and (b < 0) != (r < 0) else r


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_fmod_and_remainder_are_exact(dtype: torch.dtype) -> None:
    """Python's, which are the C library's; torch's CPU kernels overflow where the quotient does."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    info, special = torch.iinfo(bits), special_tensor(dtype)
    a, b = (torch.randint(info.min, info.max, (3001,), dtype=bits).view(dtype) for _ in range(2))
    near, by = torch.randn(3001, dtype=dtype) * 100, torch.randn(3001, dtype=dtype)
    # Quotients that are integers, and rounded up to one.
    whole = (near.double().round() * by.double()).to(dtype)
    x = torch.cat([a, near, whole, torch.nextafter(whole, 0 * whole), special.repeat_interleave(len(special))])
    y = torch.cat([b, by, by, by, special.repeat(len(special))])
    for name, exact in (("fmod", exact_fmod), ("remainder", exact_remainder)):
        function = fuser.JitFunction(OPS[name].function, {})
        pairs = zip(x.tolist(), y.tolist(), strict=True)
        wanted = torch.tensor([exact(*pair) for pair in pairs], dtype=torch.float64).to(dtype)
        fuser.reset_stats()
        # Alone, and in vectors of every width: the tail begins anywhere.
        assert same_bits(function(x, y), wanted), name
        assert all(same_bits(function(x[-n:], y[-n:]), wanted[-n:]) for n in range(1, 40)), name
        assert fuser.stats()["fallbacks"] == {}
        theirs = getattr(torch, name)(x, y)
        agrees = (theirs == wanted) | theirs.isnan()
        assert bool(agrees[: 4 * 3001].all()), name


def test_a_number_before_a_tensor_is_not_rounded() -> None:
    """As behind it: torch has the product of the tensor by the number."""
    x = draw((4096,), torch.bfloat16, seed=4)
    graph = torch.fx.Graph()
    graph.output(graph.call_function(operator.mul, (-1 / 6, graph.placeholder("x"))))
    module = fuser.fx.fuse_graph(torch.fx.GraphModule(torch.nn.Module(), graph))
    before = fuser.stats()["launches"]
    assert same_bits(module(x), -1 / 6 * x)
    assert fuser.stats()["launches"] == before + 1
