"""Functors of derivatives: their texts, their values to second order, and what has none."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from derivative_tools import argument_types, derived_types, run, tangents_of
from functors import CASES, Case, draw

import fuser
from fuser.autodiff.derivative import Derived, forward_functor, reverse_functor
from fuser.autodiff.derivative.text import emit_functor
from fuser.cxx.functor import Functor, Role, parse_functor
from fuser.eager.translation import translate
from fuser.errors import DataDependentError, NotDifferentiableError, UntranslatableError
from fuser.ops import OPS
from fuser.ops.elementary import clamp_to_numbers

F32, F64 = torch.float32, torch.float64
# Left to their own functors' tests: what decides how often a loop runs is data.
# test_gradients.py has all of them, through autograd.
DIFFERENTIABLE = [case for case in CASES if F64 in case.dtypes and case.is_differentiable and not case.depends_on_data]


def reverse(code: str, *, scalars: tuple[str, ...] = (), num_outputs: int = 1, **options: Any) -> Derived:
    """Return the derivative of a text with respect to everything, in float32 unless told otherwise."""
    functor = parse_functor(code, scalars, num_outputs)
    compute = options.pop("compute", F32)
    types = options.pop("types", None) or argument_types(functor, compute)
    wanted = options.pop("wanted", tuple(place for place, kind in enumerate(types) if kind.is_floating_point))
    return reverse_functor(functor, compute, types, wanted=wanted, outputs=tuple(range(num_outputs)), **options)


def text_of(derived: Derived) -> str:
    assert derived.functor is not None
    return derived.functor.source


# --- texts --------------------------------------------------------------------------------------------------------
def test_samples() -> None:
    code = "template <typename T> T f(T x) { return x > T(0) ? log(x) : x; }"
    assert text_of(reverse(code)) == (
        "template <typename T> T f_backward(T grad_out, T x) {\n  return x > T(0) ? grad_out / x : grad_out;\n}\n"
    )
    sample = (
        "template <typename T> T f_backward(T grad_out, T x) {\n      return x > T(0) ? grad_out / x : grad_out;\n    }"
    )
    for function in (reverse_functor, emit_functor):
        # Python 3.13 keeps docstrings without their indentation.
        assert sample in (inspect.getdoc(function) or "")


def test_text_of_branches_and_loops() -> None:
    code = """template <typename T> T f(T x) {
      T total = T(0);
      for (int i = 0; i < 3; i++) { total += x * T(i); if (total > T(4)) break; }
      switch (int(x)) { case 0: return total; case 1: return -total; default: return T(7); }
    }"""
    assert text_of(reverse(code, wanted=(0,))).count("grad_out") <= 6
    assert "log" not in text_of(reverse("template <typename T> T f(T x) { T y = log(x); return y * T(0) + x; }"))


def test_sums_of_selections_are_one_selection() -> None:
    code = """template <typename T> T f(T x) {
      if (x < T(-1)) return x * x;
      if (x < T(0)) return sin(x);
      if (x < T(1)) return -x;
      return exp(x);
    }"""
    text = text_of(reverse(code))
    assert "+ (" not in text
    assert text.count("?") == 3


def test_what_is_not_needed_is_left_out() -> None:
    code = "template <typename T> T axpy(T x, T y, T alpha) { return alpha * x + y; }"
    derived = reverse(code, scalars=("alpha",), wanted=(0, 1))
    assert derived.arguments == (("grad", 0), ("argument", 2))
    assert derived.results == (0, 1)
    assert derived.dtypes == (F32, F32)
    assert text_of(derived) == (
        "template <typename T> void axpy_backward(T grad_out, T alpha, T& grad_x, T& grad_y) {\n"
        "  grad_x = grad_out * alpha;\n  grad_y = grad_out;\n}\n"
    )
    assert derived.functor is not None
    assert [item.role for item in derived.functor.parameters[:2]] == [Role.TENSOR, Role.SCALAR]


def test_gradients_are_multiplied_by_reciprocals_of_scalars() -> None:
    code = "template <typename T> T f(T x, T y, T c) { T r = x / c; return r * r / y; }"
    # x / c is what the functor itself computes, and y differs from element to element.
    assert text_of(reverse(code, scalars=("c",), wanted=(0,))) == (
        "template <typename T> T f_backward(T grad_out, T x, T y, T c) {\n"
        "  const T v1 = grad_out / y * (x / c);\n  return (v1 + v1) * (T(1) / c);\n}\n"
    )
    assert "T(1) / " not in text_of(reverse(code, compute=torch.complex64, scalars=("c",), wanted=(0,)))


def test_zero_gradients_are_none() -> None:
    derived = reverse("template <typename T> T f(T x, T y) { return floor(x) + y * T(2); }")
    assert derived.results == (None, 0)
    nothing = reverse("template <typename T> T f(T x, T y) { return T(x > y); }")
    assert nothing == Derived(None, (), (None, None), ())
    functor = parse_functor("template <typename T> T f(T x) { return x; }")
    assert reverse_functor(functor, F32, (F32,), wanted=(0,), outputs=()).functor is None


def test_several_outputs_share_one_functor() -> None:
    code = "template <typename T> void wave(T x, T& s, T& c) { s = sin(x); c = cos(x); }"
    both = reverse(code, num_outputs=2)
    assert both.arguments == (("grad", 0), ("grad", 1), ("argument", 0))
    functor = parse_functor(code, (), 2)
    second = reverse_functor(functor, F32, (F32,), wanted=(0,), outputs=(1,))
    assert text_of(second) == (
        "template <typename T> T wave_backward(T grad_c, T x) {\n  return -grad_c * sin(x);\n}\n"
    )
    tangents = forward_functor(functor, F32, (F32,), given=(0,))
    assert text_of(tangents) == (
        "template <typename T> void wave_jvp(T tangent_x, T x, T& tangent_s, T& tangent_c) {\n"
        "  tangent_s = tangent_x * cos(x);\n  tangent_c = -tangent_x * sin(x);\n}\n"
    )


def test_parameters_keep_names_types_and_template() -> None:
    code = """template <typename scalar_t> scalar_t f(scalar_t grad_out, bool keep, scalar_t v1, double rate, int n) {
      return keep ? grad_out * sin(v1) * exp(rate) * scalar_t(n) : v1;
    }"""
    derived = reverse(code, scalars=("rate", "n"), types=(F32, torch.bool, F32, F64, torch.int64))
    text = text_of(derived)
    assert text.startswith(
        "template <typename scalar_t> void f_backward("
        "scalar_t grad_out1, scalar_t grad_out, bool keep, scalar_t v1, double rate, int n, "
        "scalar_t& grad_grad_out, scalar_t& grad_v1, scalar_t& grad_rate) {"
    )
    assert " v1 = " not in text


@pytest.mark.cpu
def test_parameters_may_have_the_names_of_functions() -> None:
    derived = reverse("template <typename T> T f(T exp, T log, T v1) { return std::exp(exp) * std::log(log) * v1; }")
    assert "std::exp(exp)" in text_of(derived)
    assert derived.functor is not None
    jitted = fuser.jit_fn(text_of(derived), num_outputs=3)
    x = torch.rand(8) + 0.5
    got = jitted(x, x, x, x)
    wanted = (x * x * x.exp() * x.log(), x * x * x.exp() / x, x * x.exp() * x.log())
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_constants_are_exact() -> None:
    code = "template <typename T> T f(T x) { return x * 0.1f + x * T(1.0 / 3) + sin(x) * T(INFINITY) + x * T(1e30); }"
    for compute in (F32, F64):
        text = text_of(reverse(code, compute=compute))
        functor = parse_functor(text)
        values = {
            node.args[0] if node.target is torch.ops.aten.scalar_tensor.default else node.args[1]
            for node in translate(functor, compute, (compute, compute)).graph_module.graph.nodes
            if node.op == "call_function" and len(node.args) > 0 and isinstance(node.args[-1], float)
        }
        third = torch.tensor(1.0 / 3, dtype=compute).item()
        assert {torch.tensor(0.1, dtype=F32).item(), third, math.inf} <= values, text


@pytest.mark.cpu
def test_integers_wrap() -> None:
    """A hash that decides a mask: its overflow is no undefined behaviour in the derivative either."""
    code = """template <typename T> T dropout(T x, int64_t seed) {
      uint32_t h = uint32_t(seed) * 2654435761u;
      h ^= h >> 16;
      uint64_t wide = uint64_t(h) * 6364136223846793005ull + 1442695040888963407ull;
      int low = int(wide >> 33) * 65537;
      return (low & 1) ? x * x : -x;
    }"""
    derived = reverse(code, scalars=("seed",), types=(F32, torch.int64))
    assert derived.functor is not None
    backward = fuser.jit_fn(text_of(derived), scalars=("seed",))
    x = torch.linspace(-1, 1, 32)
    forward = parse_functor(code, ("seed",))
    seen = set()
    for seed in range(20):
        value = translate(forward, F32, (F32, torch.int64)).run(x, seed)[0]
        is_square = torch.equal(value, x * x)
        seen.add(is_square)
        torch.testing.assert_close(backward(torch.ones(32), x, seed=seed), 2 * x if is_square else -torch.ones(32))
    assert seen == {True, False}


# --- the table ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Sample:
    """A case with float64 arguments; scalars that are floats are tensors, too, so that they get gradients."""

    functor: Functor
    types: tuple[torch.dtype, ...]
    arguments: tuple[Any, ...]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(item for item in self.arguments if isinstance(item, torch.Tensor))

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = iter(tensors)
        arguments = tuple(next(given) if isinstance(item, torch.Tensor) else item for item in self.arguments)
        return tuple(item for item in run(self.functor, F64, self.types, arguments) if item.is_floating_point())


def sample_of(case: Case, size: int = 6) -> Sample:
    functor = parse_functor(case.code, tuple(case.scalars), case.outputs)
    types = argument_types(functor, F64, **case.scalars)
    arguments: list[Any] = []
    for item in functor.parameters:
        if item.role is Role.TENSOR:
            arguments.append(draw((size,), F64, case.domain, len(arguments)).requires_grad_())
        elif item.role is Role.SCALAR:
            value = case.scalars[item.name]
            is_float = type(value) is float
            arguments.append(torch.tensor(value, dtype=F64, requires_grad=True) if is_float else value)
    return Sample(functor, types, tuple(arguments))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=str)
def test_table(case: Case) -> None:
    """Gradients and second derivatives against finite differences."""
    sample = sample_of(case)
    assert torch.autograd.gradcheck(sample, sample.tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(sample, sample.tensors, fast_mode=True)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=str)
def test_table_forward(case: Case) -> None:
    """Forward mode gives what reverse mode gives, the other way round."""
    sample = sample_of(case, 16)
    places = [place for place, item in enumerate(sample.arguments) if isinstance(item, torch.Tensor)]
    tangents = {place: torch.randn_like(sample.arguments[place]) for place in places}
    outputs = run(sample.functor, F64, sample.types, sample.arguments)
    moved = tangents_of(sample.functor, F64, sample.types, sample.arguments, tangents)
    pairs = [(out, move) for out, move in zip(outputs, moved, strict=True) if out.is_floating_point()]
    weights = [torch.randn_like(out) for out, _ in pairs]
    gradients = torch.autograd.grad([out for out, _ in pairs], sample.tensors, weights, allow_unused=True)
    pull = sum((g * tangents[place]).sum() for g, place in zip(gradients, places, strict=True) if g is not None)
    push = sum((w * move).sum() for w, (_, move) in zip(weights, pairs, strict=True) if move is not None)
    torch.testing.assert_close(torch.as_tensor(push, dtype=F64), torch.as_tensor(pull, dtype=F64))


@pytest.mark.parametrize("case", [case for case in CASES if not case.is_differentiable and F32 in case.dtypes], ids=str)
def test_table_without_derivative(case: Case) -> None:
    """Raises and says why, or is constant: a count has the derivative zero."""
    functor = parse_functor(case.code, tuple(case.scalars), case.outputs)
    types = argument_types(functor, F32, **case.scalars)
    wanted = tuple(place for place, kind in enumerate(types) if kind is F32)
    try:
        derived = reverse_functor(functor, F32, types, wanted=wanted, outputs=tuple(range(case.outputs)))
    except NotDifferentiableError as error:
        found = str(error)
    except DataDependentError:
        found = "depends on data" if case.depends_on_data else ""
    else:
        found = "zero" if derived.functor is None else ""
    assert case.name in found or found in {"zero", "depends on data"}


# --- no NaN from branches that are not taken ----------------------------------------------------------------------
@dataclass(frozen=True)
class Branch:
    """A functor of one parameter whose other branch has no finite derivative at some points."""

    name: str
    body: str
    points: tuple[float, ...]
    # The gradient there and the second derivative.
    first: Callable[[float], float]
    second: Callable[[float], float]

    def __str__(self) -> str:
        return self.name


def _one(x: float) -> float:
    return 1.0


def _zero(x: float) -> float:
    return 0.0


BRANCHES = (
    Branch("ternary", "return x > T(0) ? log(x) : x;", (-1.0, 0.0), _one, _zero),
    Branch("sqrt", "return x > T(0) ? sqrt(x) : x;", (-1.0, 0.0), _one, _zero),
    Branch("division", "if (x == T(0)) return T(1); return sin(x) / x;", (0.0,), _zero, _zero),
    Branch("variable", "T y = sqrt(x); T z = y * y * y; return x > T(0) ? z : x;", (-1.0, 0.0), _one, _zero),
    Branch("reused", "T y = T(1) / x; return x != T(0) ? y * y + y : x;", (0.0,), _one, _zero),
    Branch("early return", "if (x < T(0)) return x; T y = log(x); y += sqrt(x); return y;", (-2.0,), _one, _zero),
    Branch("assignment", "T y = x; if (x > T(1)) { y = log(x - T(1)); y /= x - T(1); } return y;", (1.0, 0.0), _one,
           _zero),
    Branch("nested", "if (x > T(0)) { if (x > T(1)) return acosh(x); return log(x); } return x;", (-1.0, 0.0), _one,
           _zero),
    Branch("shared", "T y = log(x); if (x > T(2)) return y; if (x > T(1)) return y + y; return x;", (0.0, -1.0), _one,
           _zero),
    Branch("written twice", "if (x > T(1)) return T(1) / x; if (x < T(-1)) return -(T(1) / x); return x;", (0.0,), _one,
           _zero),
    Branch("shared deeply", "T y = sqrt(x); T z = y * y * y; if (x > T(2)) return z; if (x > T(1)) return z + y;"
           " return x;", (0.0, -1.0), _one, _zero),
    Branch("overflow", "return x < T(700) ? exp(x) : x;", (800.0,), _one, _zero),
    Branch("power", "return x < T(0) ? -x : pow(x, T(1.5));", (-1.0,), lambda x: -1.0, _zero),
    Branch("loop", "T y = x; for (int i = 0; i < 3; ++i) { if (y <= T(0)) break; y = log(y); } return y;", (-1.0,),
           _one, _zero),
    Branch("and", "return x > T(0) && log(x) < T(5) ? x * log(x) : x;", (-1.0, 0.0), _one, _zero),
    Branch("lambda", "auto f = [&](T t) { return t > T(0) ? sqrt(t) : T(0); }; return f(x) + x;", (-1.0, 0.0), _one,
           _zero),
    Branch("switch", "switch (x > T(0)) { case 1: return log(x); default: return x * x; }", (-1.0, 0.0),
           lambda x: 2 * x, lambda x: 2.0),
    # One branch taken, whose parts overflow where the whole does not.
    Branch("sigmoid", "return T(1) / (T(1) + exp(-x));", (-1e3, 1e3), _zero, _zero),
    Branch("silu", "return x / (T(1) + exp(-x));", (-1e3, 1e3), lambda x: float(x > 0), _zero),
    Branch("softplus", "return log(T(1) + exp(x));", (-1e3, 1e3), lambda x: float(x > 0), _zero),
    Branch("log1p", "return log1p(exp(x));", (-1e3, 1e3), lambda x: float(x > 0), _zero),
    Branch("mish", "return x * tanh(log1p(exp(x)));", (1e3,), _one, _zero),
)  # fmt: skip


@pytest.mark.parametrize("branch", BRANCHES, ids=str)
def test_no_nan(branch: Branch) -> None:
    functor = parse_functor(f"template <typename T> T f(T x) {{ {branch.body} }}")
    x = torch.tensor(branch.points, dtype=F64, requires_grad=True)
    (y,) = run(functor, F64, (F64,), (x,))
    (first,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
    assert first.tolist() == pytest.approx([branch.first(point) for point in branch.points])
    if first.requires_grad:
        (second,) = torch.autograd.grad(first, x, torch.ones_like(y), create_graph=True, allow_unused=True)
        got = [0.0] * len(branch.points) if second is None else second.tolist()
        assert got == pytest.approx([branch.second(point) for point in branch.points])
        if second is not None and second.requires_grad:
            (third,) = torch.autograd.grad(second, x, torch.ones_like(y), allow_unused=True)
            assert third is None or not third.isnan().any()


def test_the_slope_of_a_sigmoid_keeps_its_digits() -> None:
    """Also where the sigmoid is nearly 1, and 1 - sigmoid has few of them."""
    functor = parse_functor("template <typename T> T f(T x) { return T(1) / (T(1) + exp(-x)); }")
    x = torch.linspace(-80, 80, 161, requires_grad=True)
    (y,) = run(functor, F32, (F32,), (x,))
    (got,) = torch.autograd.grad(y.sum(), x)
    exact = x.detach().double()
    torch.testing.assert_close(got.double(), exact.sigmoid() * (-exact).sigmoid(), rtol=1e-6, atol=0)


@pytest.mark.cpu
def test_no_nan_when_compiled() -> None:
    """The texts above in one kernel each way: what eager torch computes, the compiler does."""
    for compute in (F32, F64):
        for branch in BRANCHES[:6]:
            derived = reverse(f"template <typename T> T f(T x) {{ {branch.body} }}", compute=compute)
            x = torch.tensor(branch.points, dtype=compute)
            arguments = [torch.ones_like(x) if kind == "grad" else x for kind, _ in derived.arguments]
            got = fuser.jit_fn(text_of(derived))(*arguments)
            assert got.tolist() == pytest.approx([branch.first(point) for point in branch.points])


# --- what has none ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("body", "reason", "place"),
    [
        ("return __int_as_float(__float_as_int(x) & 0x7fffffff);", "a bit cast", (2, 23)),
        ("return T(__float_as_int(x) >> 23);", "a bit cast", (2, 10)),
        ("return nextafter(x, T(1));", "nextafter", (2, 8)),
        ("return isnan(x);", "its result is bool", (2, 8)),
    ],
)
def test_not_differentiable(body: str, reason: str, place: tuple[int, int]) -> None:
    result = "bool" if "isnan" in body else "T"
    code = f"template <typename T> {result} odd(T x) {{\n{body}\n}}"
    with pytest.raises(NotDifferentiableError) as caught:
        reverse(code)
    assert caught.value.reason == reason
    assert "odd has no derivative" in str(caught.value)
    assert caught.value.place is not None
    assert caught.value.place[0] == place[0]


def test_bits_may_decide() -> None:
    """A bit cast whose result is only compared does no harm."""
    code = "template <typename T> T f(T x) { return __float_as_int(x) < 0 ? x * T(2) : x; }"
    assert "grad_out" in text_of(reverse(code))


def test_data_dependent() -> None:
    code = "template <typename T> T f(T x) { while (x > T(1)) x = x / T(2); return x; }"
    with pytest.raises(DataDependentError, match="f has no derivative in one piece: line 1"):
        reverse(code)


# --- torch's own ops ----------------------------------------------------------------------------------------------
# With ties, bounds, zeros of both signs, infinities and NaN.
_POINTS = (-2.0, -1.0, -0.5, -0.0, 0.0, 0.5, 1.0, 2.0, 3.0, math.inf, -math.inf, math.nan)
_SECOND = (-2.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0)
_NUMBERS: dict[str, tuple[float, ...]] = {
    "pow_number": (2.0, 3.0, 0.5, -1.0, 0.0, 1.0, 2.5, -0.5, -2.0),
    "div_number": (3.0, -0.25),
    "div_trunc_number": (3.0, -0.25),
}


def _silu_backward(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    s = torch.sigmoid(x)
    return g * s * (1 + x * (1 - s))


def _mish_backward(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    t = torch.tanh(torch.nn.functional.softplus(x))
    return g * (t + x * torch.sigmoid(x) * (1 - t * t))


def _clipped(d: torch.Tensor, bound: float) -> torch.Tensor:
    return torch.where(d.abs() >= bound, d.sign() * bound, d)


# torch's own of these have no derivative.
_FORMULAS: dict[str, Callable[..., torch.Tensor]] = {
    "silu_backward": _silu_backward,
    "mish_backward": _mish_backward,
    # The sixth is a float in torch, too.
    "hardsigmoid_backward": lambda g, x: torch.where(x.abs() < 3, g * torch.tensor(1 / 6).item(), 0.0),
    "logit_backward": lambda g, x: torch.where((x < 0) | (x > 1), math.nan, g / (x * (1 - x))),
    "heaviside": lambda a, b: torch.where(a == 0, b, torch.where(a > 0, 1.0, 0.0)),
    # Torch's take the way to reduce a loss for its factor.
    "mse_loss_backward": lambda x, y, g, norm: norm * (x - y) * g,
    "smooth_l1_loss_backward": lambda x, y, g, norm, beta: norm * _clipped(x - y, beta) / beta * g,
    "huber_loss_backward": lambda x, y, g, norm, delta: norm * _clipped(x - y, delta) * g,
}
# Their texts round as the dtype of memory does, which only a kernel can: torch differentiates its own op.
_TORCHS_OWN = ("hardshrink", "softshrink", "shrink_backward", "threshold", "div_trunc")


def _real_ops() -> list[str]:
    found = [name for name, op in OPS.items() if "float" in op.kinds and op.function.out_dtypes != (torch.bool,)]
    # The places of triangles are no floats: they have a test of their own.
    return [name for name in found if name not in {*_TORCHS_OWN, "tril", "triu"}]


@pytest.mark.parametrize("name", _real_ops())
def test_torch_ops(name: str) -> None:
    """Gradients and tangents are those of torch's autograd, on ties and kinks too."""
    op = OPS[name]
    functor = op.function.functor
    scalars = {item.name: 1.5 for item in functor.scalars}
    grids = [torch.tensor(_POINTS, dtype=F64), *[torch.tensor(_SECOND, dtype=F64)] * (len(functor.tensors) - 1)]
    mesh = [item.reshape(-1).clone() for item in torch.meshgrid(*grids, indexing="ij")]
    for number in _NUMBERS.get(name, (None,)):
        tensors: list[Any] = [item.clone() for item in mesh]
        for place, parameter in enumerate(functor.tensors):
            if parameter.type == "bool":
                tensors[place] = tensors[place] > 0
        if name == "acosh":
            tensors = [tensors[0][tensors[0] >= 1]]
        if name.startswith("binary_cross_entropy"):
            # Of probabilities, and away from where torch's bounds on logarithms and denominators are.
            is_probable = (mesh[0] > 0) & (mesh[0] < 1) & (mesh[1] >= 0) & (mesh[1] <= 1)
            tensors = [item[is_probable] for item in tensors]
        if number is not None:
            # Of -0 torch takes the reciprocal root, which is -infinity, where pow is infinity.
            tensors = [grids[0][grids[0].signbit().logical_not() | (grids[0] != 0)], number]
        _compare_with_torch(name, functor, tensors, scalars, _FORMULAS.get(name, op.eager))


@pytest.mark.parametrize("name", ["tril", "triu"])
@pytest.mark.parametrize("diagonal", [-1, 0, 2])
def test_triangles(name: str, diagonal: int) -> None:
    row, column = torch.meshgrid(torch.arange(3), torch.arange(4), indexing="ij")
    x = torch.tensor(_POINTS, dtype=F64).reshape(3, 4)
    op = OPS[name]
    _compare_with_torch(name, op.function.functor, [x, row, column], {"diagonal": diagonal}, op.eager)


@pytest.mark.cpu
@pytest.mark.parametrize("name", _TORCHS_OWN)
@pytest.mark.parametrize("dtype", [F64, torch.bfloat16], ids=str)
def test_torch_differentiates_its_own_ops(name: str, dtype: torch.dtype) -> None:
    """What has no translation has torch's gradient, bit for bit, at a bound that bfloat16 rounds too."""
    op = OPS[name]
    functor = op.function.functor
    scalars = {item.name: 0.1 for item in functor.scalars}
    types = (F64,) * (len(functor.tensors) + len(scalars))
    with pytest.raises(UntranslatableError, match="fuser_"):
        reverse_functor(functor, F64, types, wanted=(0,), outputs=(0,), op=name)
    grid = torch.tensor([*_POINTS, 0.1, -0.1], dtype=dtype)
    mesh = torch.cartesian_prod(*[grid] * len(functor.tensors)).reshape(-1, len(functor.tensors))
    weight = torch.linspace(0.5, 1.5, len(mesh)).to(dtype)
    found = []
    for function in (fuser.JitFunction(op.function, scalars), op.eager):
        leaves = [item.contiguous().requires_grad_() for item in mesh.unbind(1)]
        result = function(*leaves, **scalars)
        found.append(torch.autograd.grad(result, leaves, weight))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


_BOUNDS = {
    "clamp": [(0.5, 2.0), (0.5, 0.5), (2.0, 0.5), (0.5, math.nan), (math.nan, 0.5)],
    "clamp_min": [(0.5,), (-0.0,), (math.nan,)],
    "clamp_max": [(0.5,), (-0.0,), (math.nan,)],
}


@pytest.mark.parametrize(("name", "bounds"), [(name, bounds) for name, all_of in _BOUNDS.items() for bounds in all_of])
def test_clamps_to_numbers(name: str, bounds: tuple[float, ...]) -> None:
    """At a bound that is a number, torch's gradient may be another one than at a tensor."""
    given = torch.tensor(_POINTS, dtype=F64)
    _compare_with_torch(name, clamp_to_numbers(name).functor, [given, *bounds], {}, OPS[name].eager)


def _compare_with_torch(
    name: str, functor: Functor, tensors: list[Any], scalars: dict[str, float], eager: Callable[..., Any]
) -> None:
    types = tuple(item.dtype if isinstance(item, torch.Tensor) else F64 for item in tensors)
    types += tuple(torch.int64 if isinstance(item, int) else F64 for item in scalars.values())
    wanted = tuple(k for k, item in enumerate(tensors) if isinstance(item, torch.Tensor) and item.dtype is F64)
    leaves = [tensors[place].requires_grad_() for place in wanted]
    result = eager(*tensors, **scalars)
    weight = torch.linspace(0.5, 1.5, result.numel(), dtype=F64).reshape(result.shape)
    theirs = [None] * len(leaves)
    if result.requires_grad:
        theirs = torch.autograd.grad(result, leaves, weight, allow_unused=True)
    derived = reverse_functor(functor, F64, types, wanted=wanted, outputs=(0,), op=name)
    arguments = (*tensors, *scalars.values())
    bound = tuple(weight if kind == "grad" else arguments[k] for kind, k in derived.arguments)
    found: tuple[torch.Tensor, ...] = ()
    if derived.functor is not None:
        found = run(derived.functor, F64, derived_types(derived, types, F64), bound)
    for number, wanted_gradient, leaf in zip(derived.results, theirs, leaves, strict=True):
        zero = torch.zeros_like(leaf)
        mine = zero if number is None else found[number].detach()
        reference = zero if wanted_gradient is None else wanted_gradient
        # torch's own formulas give NaN in places where infinity less infinity is asked for, and ours elsewhere.
        finite = reference.isfinite() & mine.isfinite()
        torch.testing.assert_close(mine[finite], reference[finite], msg=lambda text, name=name: f"{name}: {text}")
        usual = torch.stack([item.detach().isfinite() for item in leaves]).all(0)
        torch.testing.assert_close(mine[usual], reference[usual], equal_nan=True)
    moved = forward_functor(functor, F64, types, given=wanted[:1], op=name)
    if moved.functor is not None and derived.results[0] is not None:
        bound = tuple(weight if kind == "grad" else arguments[k] for kind, k in moved.arguments)
        (push,) = run(moved.functor, F64, derived_types(moved, types, F64), bound)
        torch.testing.assert_close(push, found[derived.results[0]].detach(), equal_nan=True)


def test_complex_functor() -> None:
    """Gradients of complex functors follow torch's convention."""
    dtype = torch.complex128
    code = """template <typename T> T f(T z, T w) {
      T p = z * w + std::exp(z) / (w + T(3));
      return p * std::conj(z) + T(std::abs(w) * std::real(z), std::arg(z) * std::norm(w));
    }"""
    functor = parse_functor(code)
    generator = torch.Generator().manual_seed(1)
    z, w = (torch.randn(5, dtype=dtype, generator=generator, requires_grad=True) for _ in range(2))

    def reference(z: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        p = z * w + z.exp() / (w + 3)
        return p * z.conj() + torch.complex(w.abs() * z.real, z.angle() * (w * w.conj()).real)

    def own(z: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return run(functor, dtype, (dtype, dtype), (z, w))[0]

    torch.testing.assert_close(own(z, w), reference(z, w))
    weight = torch.randn(5, dtype=dtype, generator=generator)
    mine = torch.autograd.grad(own(z, w), (z, w), weight)
    theirs = torch.autograd.grad(reference(z, w), (z, w), weight)
    torch.testing.assert_close(mine, theirs)
    assert torch.autograd.gradgradcheck(own, (z, w), fast_mode=True)


@pytest.mark.parametrize("power", ["1", "2", "3.0", "T(4)", "5"])
def test_powers_of_complex_numbers(power: str) -> None:
    dtype = torch.complex128
    functor = parse_functor(f"template <typename T> T f(T z) {{ return std::pow(z, {power}); }}")
    z = torch.randn(5, dtype=dtype, generator=torch.Generator().manual_seed(1), requires_grad=True)
    exponent = float(power.removeprefix("T(").removesuffix(")"))
    (found,) = torch.autograd.grad(run(functor, dtype, (dtype,), (z,))[0].real.sum(), z)
    torch.testing.assert_close(found, exponent * (z.detach() ** (exponent - 1)).conj())


@pytest.mark.parametrize("number", ["3.40282347e+38", "1.17549435e-38", "1.40129846e-45", "3.4e+38"])
def test_the_largest_and_smallest_constants_keep_their_value(number: str) -> None:
    derived = reverse(f"template <typename T> T f(T x) {{ return x * {number}f; }}")
    (found,) = re.findall(r"T\((\d[\d.]*e[-+]\d+)\)", text_of(derived))
    assert torch.equal(*(torch.tensor(float(text), dtype=F64).to(F32) for text in (found, number)))
    assert len(found) <= len(number)
