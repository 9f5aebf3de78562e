"""The derivative of every operation, and its text, against torch's autograd and finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from derivative_tools import evaluate

import fuser
from fuser.autodiff.derivative.demand import Demand
from fuser.autodiff.derivative.expression import Builder, Expr, topological
from fuser.autodiff.derivative.formulas import PARTIALS, UNARY
from fuser.autodiff.derivative.forward import differentiate_forward
from fuser.autodiff.derivative.reverse import differentiate_reverse
from fuser.autodiff.derivative.rules import edges
from fuser.autodiff.derivative.simplify import simplify
from fuser.autodiff.derivative.text import emit_functor
from fuser.cxx.functor import parse_functor
from fuser.function import Function
from fuser.graph import GroupBuilder

REAL, COMPLEX = torch.float64, torch.complex128
SIZE = 64


@dataclass(frozen=True)
class Operation:
    """One operation, and where its operands are drawn from."""

    name: str
    build: Callable[..., Expr]
    domains: tuple[tuple[float, float], ...]
    dtype: torch.dtype = REAL
    # Whether torch's autograd knows its derivative; else finite differences are what is compared with.
    is_known: bool = True
    # Whether its text is compiled: complex functions take long.
    has_text: bool = True

    def __str__(self) -> str:
        return self.name


def _calls(names: str, domain: tuple[float, float], count: int = 1, **options: bool) -> list[Operation]:
    return [
        Operation(name, lambda x, *rest, name=name: x.call(name, *rest), (domain,) * count, **options)
        for name in names.split()
    ]


def _complex_calls(names: str, count: int = 1) -> list[Operation]:
    return [
        Operation(
            f"complex {name}",
            lambda x, *rest, name=name: x.call(name, *rest),
            ((-2, 2),) * count,
            COMPLEX,
            has_text=name in {"neg", "reciprocal", "exp", "rsqrt", "sgn", "conj_physical", "sub", "mul", "div"},
        )
        for name in names.split()
    ]


def _polygamma(order: int) -> Operation:
    return Operation(f"polygamma {order}", lambda x: x.builder.emit("polygamma", order, x), ((0.2, 4),))


def _order(function: str, order: int) -> Operation:
    def build(x: Expr) -> Expr:
        n = x.builder.constant(order, torch.int32)
        return x.builder.emit(f"cpp.{function}", n, x, dtype=x.dtype)

    return Operation(f"{function} {order}", build, ((0.5, 6),), is_known=False)


OPERATIONS = (
    *_calls(
        "neg abs sgn exp exp2 expm1 sin cos tan atan sinh cosh tanh asinh erf erfc sinc ceil floor trunc round "
        "special_i0 special_i1 special_i0e special_i1e special_erfcx special_ndtr",
        (-3, 3),
    ),
    *_calls("reciprocal log log2 log10 log1p sqrt rsqrt lgamma digamma", (0.2, 4)),
    *_calls("lgamma digamma", (-3.9, -3.1)),
    *_calls("asin acos atanh erfinv", (-0.9, 0.9)),
    *_calls("acosh", (1.1, 4)),
    *_calls("special_ndtri", (0.05, 0.95)),
    *_calls("add sub mul div fmod remainder atan2 hypot logaddexp copysign fmax fmin maximum minimum", (-3, 3), 2),
    *_calls("pow", (0.2, 3), 2),
    *(_polygamma(order) for order in (1, 2, 3)),
    Operation("pow 3", lambda x: x.call("pow", 3), ((-3, 3),)),
    Operation("pow 2.5", lambda x: x.call("pow", 2.5), ((0.2, 3),)),
    Operation("frexp", lambda x: x.call("frexp_mantissa"), ((-3, 3),)),
    Operation("ldexp", lambda x: x.call("ldexp", x.builder.constant(3, torch.int32)), ((-3, 3),)),
    Operation("sigmoid", lambda x: 1 / (1 + (-x).call("exp")), ((-3, 3),)),
    Operation("silu", lambda x: x / (1 + (-x).call("exp")), ((-3, 3),)),
    Operation("softplus", lambda x: (x.call("exp") + 1).call("log"), ((-3, 3),)),
    Operation("log1p exp", lambda x: x.call("exp").call("log1p"), ((-3, 3),)),
    Operation("where", lambda x, y: (x * y).call("log").where((x * y).call("gt", 0), x * x), ((-3, 3),) * 2),
    Operation("to float32", lambda x: x.to(torch.float32).call("sin").to(REAL), ((-3, 3),)),
    # What torch has no derivative of, or not as a function of that name. CPU kernels take Bessel functions from libm.
    *_calls("special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1", (0.5, 4), is_known=False),
    *_calls("cpp.cbrt cpp.exp10 cpp.sinpi cpp.cospi", (-2, 2), is_known=False),
    *_calls("cpp.rcbrt cpp.tgamma", (0.5, 3), is_known=False),
    *_calls("cpp.erfcinv", (0.2, 1.8), is_known=False),
    *_calls("cpp.remainder cpp.rhypot cpp.fdim", (-3, 3), 2, is_known=False),
    *_calls("cpp.fma cpp.norm3d cpp.rnorm3d", (-3, 3), 3, is_known=False),
    *_calls("cpp.norm4d cpp.rnorm4d", (-3, 3), 4, is_known=False),
    *(_order(function, order) for function in ("jn", "yn") for order in (0, 1, 3)),
    *_complex_calls(
        "neg reciprocal exp log log2 log10 sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh abs "
        "sgn angle real imag conj_physical"
    ),
    *_complex_calls("add sub mul div pow", 2),
    Operation("complex", lambda x, y: x.call("complex", y), ((-2, 2),) * 2),
    Operation("polar", lambda x, y: x.call("polar", y), ((0.2, 2), (-3, 3))),
    Operation("complex of real", lambda x: x.to(COMPLEX).call("exp"), ((-2, 2),)),
)


@dataclass(frozen=True)
class Derivatives:
    """An operation on drawn operands with everything derived from it."""

    inputs: list[Expr]
    result: Expr
    gradient: Expr
    # One per input; None: zero.
    gradients: list[Expr | None]
    values: dict[str, torch.Tensor]


def draw(domain: tuple[float, float], seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.rand(SIZE, generator=generator, dtype=REAL) * (domain[1] - domain[0]) + domain[0] for _ in "ri"]
    return torch.complex(*parts) if dtype.is_complex else parts[0]


def derive(operation: Operation) -> Derivatives:
    builder = Builder()
    inputs = [builder.input(f"x{place}", operation.dtype) for place in range(len(operation.domains))]
    result = operation.build(*inputs)
    gradient = builder.input("g", result.dtype)
    found = differentiate_reverse([result], [gradient], inputs)
    short = iter(simplify([item for item in found if item is not None]))
    values = {item.args[0]: draw(domain, k, operation.dtype) for k, (item, domain) in enumerate(
        zip(inputs, operation.domains, strict=True)
    )}  # fmt: skip
    values["g"] = draw((-1, 1), 99, result.dtype)
    return Derivatives(inputs, result, gradient, [None if item is None else next(short) for item in found], values)


def value_or_zero(item: Expr | None, values: dict[str, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like) if item is None else evaluate([item], values)[0].expand(like.shape)


def assert_close(got: torch.Tensor, wanted: torch.Tensor, bound: float, what: str) -> None:
    error = ((got - wanted).abs() / (1 + wanted.abs())).max().item()
    # A NaN is no small error.
    assert error <= bound, f"{what}: off by {error}"


def test_every_formula_is_tested() -> None:
    tested = {item.op for operation in OPERATIONS for item in topological([derive(operation).result])}
    assert {*UNARY, *PARTIALS} <= tested


@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_gradients(operation: Operation) -> None:
    """First and second order, against torch or finite differences."""
    derived = derive(operation)
    if not operation.is_known:
        _check_numerically(operation, derived)
        return
    leaves = {name: value.requires_grad_() for name, value in derived.values.items()}
    tensors = [leaves[item.args[0]] for item in derived.inputs]
    (result,) = evaluate([derived.result], leaves)
    # Far from 1e-12 are what is rounded to float32 and torch's own polygamma.
    bound = 1e-6 if operation.name == "to float32" else 1e-12
    first: tuple[torch.Tensor | None, ...] = (None,) * len(tensors)
    if result.requires_grad:
        first = torch.autograd.grad(result, tensors, leaves["g"], create_graph=True, allow_unused=True)
    for place, (mine, theirs) in enumerate(zip(derived.gradients, first, strict=True)):
        wanted = torch.zeros_like(tensors[place]) if theirs is None else theirs
        assert_close(value_or_zero(mine, leaves, tensors[place]), wanted, bound, f"gradient {place}")
    _check_second_order(derived, first, leaves, bound)


def _check_second_order(
    derived: Derivatives, first: tuple[torch.Tensor | None, ...], leaves: dict[str, torch.Tensor], bound: float
) -> None:
    pairs = [
        (mine, theirs)
        for mine, theirs in zip(derived.gradients, first, strict=True)
        if mine is not None and theirs is not None and theirs.requires_grad
    ]
    if not pairs:
        return
    builder = pairs[0][0].builder
    weights = {f"w{k}": draw((-1, 1), 70 + k, mine.dtype) for k, (mine, _) in enumerate(pairs)}
    inputs = [builder.leaf(item) for item in (*derived.inputs, derived.gradient)]
    given = [builder.input(name, value.dtype) for name, value in weights.items()]
    second = differentiate_reverse([mine for mine, _ in pairs], given, inputs)
    wanted = torch.autograd.grad(
        [theirs for _, theirs in pairs], list(leaves.values()), list(weights.values()), allow_unused=True
    )
    for item, mine, theirs in zip(inputs, second, wanted, strict=True):
        like = leaves[item.args[0]]
        simple = None if mine is None else simplify([mine])[0]
        got = value_or_zero(simple, {**leaves, **weights}, like)
        assert_close(
            got, torch.zeros_like(like) if theirs is None else theirs, 100 * bound, f"second of {item.args[0]}"
        )


def _check_numerically(operation: Operation, derived: Derivatives) -> None:
    # torch's Bessel functions have eight digits.
    step = 1e-3 if "bessel" in operation.name else 1e-4
    for item, mine in zip(derived.inputs, derived.gradients, strict=True):
        name = item.args[0]

        def at(shift: float, name: str = name) -> torch.Tensor:
            moved = {**derived.values, name: derived.values[name] + shift * step}
            return evaluate([derived.result], moved)[0]

        slope = (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12 * step)
        got = value_or_zero(mine, derived.values, derived.values[name])
        # Across a kink or a jump the two estimates differ.
        smooth = (slope - (at(1) - at(-1)) / (2 * step)).abs() < 1e-3 * (1 + slope.abs())
        assert int(smooth.sum()) > SIZE // 2
        assert_close(got[smooth], (slope * derived.values["g"])[smooth], 1e-5, f"gradient of {name}")


@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_forward_mode_is_the_transpose(operation: Operation) -> None:
    derived = derive(operation)
    builder = derived.result.builder
    tangents = [builder.input(f"t{k}", item.dtype) for k, item in enumerate(derived.inputs)]
    (moved,) = differentiate_forward([derived.result], derived.inputs, tangents)
    values = dict(derived.values)
    values |= {item.args[0]: draw((-1, 1), 50 + k, item.dtype) for k, item in enumerate(tangents)}
    if all(item is None for item in derived.gradients):
        assert moved is None
        return
    assert moved is not None
    push = (evaluate([moved], values)[0] * values["g"].conj()).real
    pull = torch.zeros(SIZE, dtype=REAL)
    for gradient, tangent in zip(derived.gradients, tangents, strict=True):
        if gradient is not None:
            pull = pull + (evaluate([gradient], values)[0].conj() * values[tangent.args[0]]).real
    assert_close(push, pull, 1e-6 if operation.name == "to float32" else 1e-12, "forward against reverse")


def test_polar_of_a_negative_radius() -> None:
    """Where torch's own gradient has the wrong sign."""
    negative = Operation("polar", lambda x, y: x.call("polar", y).call("real"), ((-2, -0.2), (-3, 3)), is_known=False)
    _check_numerically(negative, derive(negative))


def _texts(dtype: torch.dtype) -> list[tuple[Operation, Derivatives]]:
    pairs = [(operation, derive(operation)) for operation in OPERATIONS if operation.dtype is dtype]
    return [
        (operation, derived)
        for operation, derived in pairs
        if any(item is not None for item in derived.gradients) and derived.result.dtype is dtype and operation.has_text
    ]


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [REAL, COMPLEX], ids=["real", "complex"])
def test_text_means_the_same(dtype: torch.dtype, tier: int) -> None:
    """The compiled gradient of every operation against its expressions in eager torch."""
    cases = _texts(dtype)
    assert len(cases) > 7
    cases = cases[:: 1 if tier == 3 else 2]
    # Few kernels: each holds the gradients of some operations.
    for first, last in pairwise([*range(0, len(cases), 10), len(cases)]):
        _compare_compiled(cases[first:last], dtype)


def _compare_compiled(cases: list[tuple[Operation, Derivatives]], dtype: torch.dtype) -> None:
    group = GroupBuilder()
    handles: dict[str, int] = {}
    inputs: list[torch.Tensor] = []
    outputs: list[int] = []
    wanted: list[tuple[str, torch.Tensor]] = []
    for number, (operation, derived) in enumerate(cases):
        kept = [item for item in derived.gradients if item is not None]
        used = [item for item in topological(kept) if item.op == "input"]
        text = emit_functor(f"f{number}", used, [(f"out{k}", item) for k, item in enumerate(kept)], dtype)
        for item in used:
            name = f"{item.args[0]} of {number}"
            handles[name] = group.add_input(name)
            inputs.append(derived.values[item.args[0]])
        function = Function(parse_functor(text, (), len(kept)))
        outputs += group.apply(function, [handles[f"{item.args[0]} of {number}"] for item in used])
        wanted += [(str(operation), value) for value in evaluate(kept, derived.values)]
    results = fuser.run_fusion(fuser.register_fusion(group.build(outputs)), inputs)
    for (name, value), result in zip(wanted, results, strict=True):
        # torch's Bessel functions have eight digits, and its trigamma has nine.
        is_coarse = name == "to float32" or "bessel" in name or name[:2] in {"jn", "yn"}
        assert_close(result, value, 1e-6 if is_coarse else 1e-9 if name == "digamma" else 1e-12, name)


@pytest.mark.cpu
def test_digamma_and_polygamma() -> None:
    """Their texts against exact values: Abramowitz and Stegun 6.3 and 6.4."""
    euler, zeta3, pi = 0.57721566490153286, 1.2020569031595943, math.pi
    catalan = 0.91596559417721902
    exact = {
        0: {
            1.0: -euler,
            0.5: -euler - 2 * math.log(2),
            2.0: 1 - euler,
            -0.5: 2 - euler - 2 * math.log(2),
            -1.0: math.nan,
        },
        1: {1.0: pi**2 / 6, 0.5: pi**2 / 2, 0.25: pi**2 + 8 * catalan, -0.5: pi**2 / 2 + 4, 0.0: math.inf},
        2: {1.0: -2 * zeta3, 0.5: -14 * zeta3, -0.5: 16 - 14 * zeta3},
        3: {1.0: pi**4 / 15, 0.5: pi**4, -0.5: pi**4 + 96},
    }
    builder = Builder()
    x = builder.input("x", REAL)
    for order, values in exact.items():
        function = builder.emit("polygamma", order, x) if order else x.call("digamma")
        jitted = fuser.jit_fn(emit_functor("f", [x], [("y", function)], REAL))
        for dtype, digits in ((torch.float64, 14), (torch.float32, 5)):
            got = jitted(torch.tensor(list(values), dtype=dtype))
            wanted = torch.tensor(list(values.values()), dtype=dtype)
            torch.testing.assert_close(got, wanted, rtol=10**-digits, atol=10**-digits, equal_nan=True)
        if order == 0:
            # The sign of a zero is the side of the pole.
            zeros = torch.tensor([0.0, -0.0])
            assert torch.equal(jitted(zeros), torch.digamma(zeros))


# --- demand -------------------------------------------------------------------------------------------------------
def test_demand_knows_what_masks_imply() -> None:
    builder = Builder()
    x, y = builder.input("x", REAL), builder.input("y", REAL)
    p, q = x.call("gt", 0), y.call("gt", 0)
    both = p.call("logical_and", q)
    inner = (x * y).where(p, 1)
    outer = inner.call("log").where(both, y)
    demand = Demand(topological([outer]), [outer])
    assert demand.decides(inner, p) is True
    assert demand.decides(inner, both) is True
    assert demand.decides(y, q) is None
    assert str(simplify([outer])[0].args[1].args[0].op) == "mul"


def test_integer_denominators_stay_guarded() -> None:
    """A selection that keeps a zero out of an integer division is never resolved, though its lanes are not used."""
    builder = Builder()
    a, b = builder.input("a", torch.int32), builder.input("b", torch.int32)
    mask = b.call("ne", 0)
    guarded = a.call("div_trunc", b.where(mask, 1))
    (simple,) = simplify([guarded.where(mask, 0)])
    assert any(item.op == "where" and item.args[2].equals(1) for item in topological([simple]))
    # In floating point it goes away.
    c = builder.input("c", REAL)
    mask = c.call("ne", 0)
    (simple,) = simplify([(1 / c.where(mask, 1)).where(mask, 0)])
    assert sum(item.op == "where" for item in topological([simple])) == 1


# --- rewrites -----------------------------------------------------------------------------------------------------
def test_rewrites_are_exact() -> None:
    builder = Builder()
    x, m = builder.input("x", REAL), builder.input("m", torch.bool)
    minus = -x
    assert x * 1 is x
    assert x / 1 is x
    assert -minus is x
    assert (x + minus).op == "sub"
    assert (x * -1).op == "neg"
    assert x.where(m, x) is x
    assert x.where(m.call("logical_not"), 2).args == builder.constant(2, REAL).where(m, x).args
    assert x.to(torch.float64) is x
    assert m.to(torch.int32).call("ne", 0) is m
    assert x.call("add", -0.0) is x
    # -0 + 0 is 0, and 0 * NaN is NaN.
    assert x + 0 is not x
    assert (x * 0).op == "mul"
    assert (builder.constant(2, REAL) * 3).args == (6.0,)
    assert (0 * builder.constant(math.inf, REAL)).is_constant


def test_operations_without_derivative_have_no_edges() -> None:
    builder = Builder()
    x = builder.input("x", REAL)
    for name in ("floor", "round", "signbit", "isnan"):
        assert not edges(x.call(name), reverse=True)
    assert not edges(x.to(torch.int64), reverse=True)
