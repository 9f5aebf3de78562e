"""How groups are differentiated: passes and launches, transforms, hand-written derivatives, what is saved."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from functors import draw
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import fuser
from fuser import route
from fuser.autodiff import case as differentiation
from fuser.errors import ArgumentError, GradientError

pytestmark = pytest.mark.cpu

DEVICES = [pytest.param("cpu", marks=pytest.mark.cpu), pytest.param("cuda", marks=pytest.mark.cuda)]

AXPY = "template <typename T> T axpy(T x, T y, T alpha) { return alpha * x + y; }"
SWISH = "template <typename T> T swish(T x, T y) { return x / (T(1) + exp(-x)) * y; }"
NEWTON = """
template <typename T> T newton(T x) {
  T y = x;
  while (abs(y * y - x) > T(1e-12)) y = T(0.5) * (y + x / y);
  return y;
}
"""
axpy = fuser.jit_fn(AXPY, scalars={"alpha": 1.5})
swish = fuser.jit_fn(SWISH)
newton = fuser.jit_fn(NEWTON)


def eager_axpy(x: Any, y: Any, alpha: Any = 1.5) -> Any:
    return alpha * x + y


def eager_swish(x: Any, y: Any) -> Any:
    return F.silu(x) * y


def given(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64, device: str = "cpu") -> tuple[Any, ...]:
    return tuple(
        draw(shape, dtype, (0.5, 2.0), seed=place + 1, device=device).requires_grad_()
        for place, shape in enumerate(shapes)
    )


def gradients(function: Callable[..., Any], inputs: tuple[Any, ...], weight: Any = None) -> tuple[Any, ...]:
    out = function(*inputs)
    outs = out if isinstance(out, tuple) else (out,)
    weights = [draw(tuple(x.shape), torch.float32, seed=7).to(x) for x in outs] if weight is None else [weight]
    return torch.autograd.grad(outs, inputs, weights)


def assert_all_close(got: tuple[Any, ...], wanted: tuple[Any, ...], **tolerance: float) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype is other.dtype
        assert one.device == other.device
        torch.testing.assert_close(one, other, **tolerance)


# --- broadcasting, dtypes, several outputs -----------------------------------------------------------------------
SHAPES = [((3, 4), (4,)), ((3, 1), (1, 4)), ((2, 3, 4), (3, 1)), ((), (5,)), ((1,), (1,)), ((0, 3), (3,)), ((3, 4), ())]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_broadcasting_equals_eager(shapes: tuple[tuple[int, ...], ...], device: str) -> None:
    inputs = given(*shapes, device=device)
    assert_all_close(gradients(swish, inputs), gradients(eager_swish, inputs), rtol=1e-12, atol=1e-12)
    for grad, item in zip(gradients(swish, inputs), inputs, strict=True):
        assert grad.shape == item.shape


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes_equal_eager(dtype: torch.dtype, device: str) -> None:
    inputs = given((64, 33), (33,), dtype=dtype, device=device)
    wide = tuple(x.detach().double().requires_grad_() for x in inputs)
    eps = torch.finfo(dtype).eps
    for got, wanted in zip(gradients(swish, inputs), gradients(eager_swish, wide), strict=True):
        assert got.dtype is dtype
        torch.testing.assert_close(got.double(), wanted, rtol=8 * eps, atol=64 * eps)


@pytest.mark.parametrize("first", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_each_gradient_has_the_dtype_of_its_input(first: torch.dtype) -> None:
    x, y = given((6,))[0].detach().to(first).requires_grad_(), given((6,), dtype=torch.float32)[0]
    ours, theirs = gradients(swish, (x, y)), gradients(lambda x, y: F.silu(x) * y, (x, y))
    for one, other, item in zip(ours, theirs, (x, y), strict=True):
        assert one.dtype is other.dtype is item.dtype
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


def test_complex_numbers() -> None:
    rotate = fuser.jit_fn("template <typename T> T rotate(T x, T y) { return x * y + exp(x); }")
    x = torch.randn(4, dtype=torch.complex128, requires_grad=True)
    y = torch.randn(4, dtype=torch.complex128, requires_grad=True)
    assert torch.autograd.gradcheck(rotate, (x, y))
    assert torch.autograd.gradgradcheck(rotate, (x, y))
    assert_all_close(gradients(rotate, (x, y)), gradients(lambda x, y: x * y + torch.exp(x), (x, y)))


def test_a_real_input_beside_complex_ones_has_a_real_gradient() -> None:
    product = fuser.jit_fn("template <typename T> T product(T x, T y) { return x * y; }")
    x, y = torch.randn(4, dtype=torch.float64, requires_grad=True), torch.randn(4, dtype=torch.complex128)
    y.requires_grad_()
    assert_all_close(gradients(product, (x, y)), gradients(torch.mul, (x, y)))


COMPLEX_OF_REAL = "template <typename T> std::complex<T> f(T x, T y) { return std::complex<T>(x * y, x + y); }"


def test_complex_results_of_real_inputs() -> None:
    """Both parts of the gradient that comes in count."""
    code, dtype = COMPLEX_OF_REAL, torch.complex128
    made = fuser.jit_fn(code, out_dtypes=dtype)
    given_by_hand = fuser.jit_fn(
        code,
        out_dtypes=dtype,
        backward=fuser.jit_fn(
            "template <typename T> void b(T x, T y, T g, T& gx, T& gy) {"
            " gx = y * std::real(g) + std::imag(g); gy = x * std::real(g) + std::imag(g); }",
            num_outputs=2,
        ),
    )
    several = fuser.jit_fn(
        "template <typename T> void f(T x, T y, std::complex<T>& z, T& w) {"
        " z = std::complex<T>(x * y, x + y); w = x * y; }",
        num_outputs=2,
        out_dtypes=[dtype, None],
    )
    product = fuser.fuse(lambda x, y: made(x, y) * made(y, x))
    inputs = given((3, 1), (4,))
    for function in (made, given_by_hand, several, product):
        assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(function, inputs)
    weight = torch.randn(3, 4, dtype=dtype)
    for backend in ("aot_eager", "fuser"):
        compiled = torch.compile(lambda x, y: made(x, y) * weight, backend=backend)
        wanted = gradients(lambda x, y: torch.view_as_real(torch.complex(x * y, x + y) * weight), inputs)
        assert_all_close(gradients(lambda x, y: torch.view_as_real(compiled(x, y)), inputs), wanted)  # noqa: B023


def test_the_real_part_of_a_complex_result() -> None:
    """What a complex number is stored as in a real tensor: its derivative is compiled, in both modes."""
    function = fuser.jit_fn(COMPLEX_OF_REAL)
    x, y = given((3, 1), (4,))
    assert torch.equal(function(x, y), x * y)
    assert torch.autograd.gradcheck(function, (x, y), check_forward_ad=True)


@fuser.fuse
def chain(x: Any, y: Any) -> Any:
    z = axpy(torch.tanh(x), y, alpha=0.5)
    return torch.relu(z - 0.1) * swish(z, x) + z


def eager_chain(x: Any, y: Any) -> Any:
    z = eager_axpy(torch.tanh(x), y, alpha=0.5)
    return torch.relu(z - 0.1) * eager_swish(z, x) + z


@pytest.mark.parametrize("device", DEVICES)
def test_a_chain_is_one_launch_each_way(device: str) -> None:
    inputs = given((5, 8), (5, 8), device=device)
    assert_all_close(gradients(chain, inputs), gradients(eager_chain, inputs), rtol=1e-12, atol=1e-12)
    fuser.reset_stats()
    out = chain(*inputs)
    assert fuser.stats()["launches"] == 1
    out.backward(torch.ones_like(out))
    assert fuser.stats()["launches"] == 2
    assert not fuser.stats()["fallbacks"]


@fuser.fuse
def several(x: Any, y: Any) -> Any:
    return torch.exp(x) * y, torch.tanh(y), x > y


def test_outputs_of_several_shapes_and_dtypes() -> None:
    x, y = given((3, 4), (4,))
    first, second, third = several(x, y)
    assert not third.requires_grad
    wanted = torch.autograd.grad((torch.exp(x) * y, torch.tanh(y)), (x, y), (torch.ones(3, 4), torch.ones(4)))
    got = torch.autograd.grad((first, second), (x, y), (torch.ones(3, 4), torch.ones(4)))
    assert_all_close(got, wanted)
    # One of them alone: the other is not differentiated, and x has no part in it.
    only = torch.autograd.grad(several(x, y)[1], (x, y), torch.ones(4).double(), allow_unused=True)
    assert_all_close((only[1],), (1 - torch.tanh(y) ** 2,))
    assert only[0] is None or not only[0].any()


def test_run_fusion_is_differentiable() -> None:
    key = fuser.register_fusion(chain.groups[0])
    inputs = given((6,), (6,))
    got = gradients(lambda x, y: fuser.run_fusion(key, [x, y])[0], inputs)
    assert_all_close(got, gradients(eager_chain, inputs))


def test_scalars_of_a_group_with_a_reduction_have_gradients() -> None:
    axpy = fuser.jit_fn("template <typename T> T axpy(T x, T y, T alpha) { return alpha * x + y; }", scalars=["alpha"])
    add = "template <typename T> T add(T a, T b) { return a + b; }"
    scaled = "template <typename T> T scaled(T x, T by) { return by * x; }"
    total = fuser.create_reduction_fn(add, identity=0, map=scaled, by=1.0).along(-1)
    builder = fuser.GroupBuilder()
    x = builder.add_input("x")
    by, alpha = builder.add_input("by", is_scalar=True), builder.add_input("alpha", is_scalar=True)
    (summed,) = builder.apply(total.function, [x], [by])
    (result,) = builder.apply(axpy.function, [summed, summed], [alpha])
    key = fuser.register_fusion(builder.build([result]))
    values = draw((4, 6), torch.float32, seed=1)
    weight = torch.tensor(1.5, requires_grad=True)
    (got,) = torch.autograd.grad(fuser.run_fusion(key, [values, 2.0, weight])[0].sum(), weight)
    torch.testing.assert_close(got, 2 * values.sum())
    (got,) = torch.autograd.grad(fuser.run_fusion(key, [values, torch.tensor(2.0), weight])[0].sum(), weight)
    torch.testing.assert_close(got, 2 * values.sum())
    with pytest.raises(GradientError, match="add: by has a gradient"):
        fuser.run_fusion(key, [values, weight, 1.0])
    # A group that ends in the sum is differentiated as what is summed.
    key = fuser.register_fusion(builder.build([summed]))
    (got,) = torch.autograd.grad(fuser.run_fusion(key, [values, weight, 1.0])[0].sum(), weight)
    torch.testing.assert_close(got, values.sum())


@pytest.mark.parametrize("element", [(), (3,), (2, 3)])
@pytest.mark.parametrize("other", [(), (3,), (2, 2, 3)])
def test_vmap_of_a_group_that_does_not_use_an_input(element: tuple[int, ...], other: tuple[int, ...]) -> None:
    builder = fuser.GroupBuilder()
    _, used = builder.add_input("unused"), builder.add_input("used")
    square = fuser.jit_fn("template <typename T> T square(T x) { return x * x; }")
    key = fuser.register_fusion(builder.build(builder.apply(square.function, [used])))
    values, beside = draw((5, *element), torch.float32, seed=1), draw(other, torch.float32, seed=2)
    for batched in (lambda x: [beside, x], lambda x: [x, beside], lambda x: [x[None], x]):
        got = torch.vmap(lambda x: fuser.run_fusion(key, batched(x))[0])(values)  # noqa: B023
        assert_all_close((got,), (torch.stack([batched(x)[1] for x in values]) ** 2,))


# --- costs nothing where nothing is asked for --------------------------------------------------------------------
def test_only_wanted_gradients_are_computed() -> None:
    x, y = given((6,), (6,))
    out = swish(x, y.detach())
    case = out.grad_fn.case
    assert case.wanted == (0,)
    assert case.backward((0,)).derived.targets == (0,)
    assert not swish(x.detach(), y.detach()).requires_grad
    with torch.no_grad():
        assert not swish(x, y).requires_grad
    with torch.inference_mode():
        assert not swish(x, y).requires_grad


def test_what_the_backward_pass_does_not_read_is_not_kept_alive() -> None:
    x, y = given((6,), (6,))
    kept, dropped = x * 2, y * 2
    out = fuser.jit_fn("template <typename T> T f(T x, T y) { return x * x + y; }")(kept, dropped)
    watched = weakref.ref(dropped), weakref.ref(kept)
    del kept, dropped
    gc.collect()
    assert watched[0]() is None
    assert len(out.grad_fn.saved_tensors) == 1


@fuser.fuse
def wide(a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
    return torch.exp(a + b + c + d + e) * 0.5


def test_a_result_is_saved_where_that_moves_fewer_bytes() -> None:
    inputs = given((6,), (6,), (6,), (6,), (6,))
    out = wide(*inputs)
    # The sum of the five, one tensor, not five.
    assert len(out.grad_fn.saved_tensors) == 1
    assert not any(saved is item for saved in out.grad_fn.saved_tensors for item in inputs)
    assert torch.autograd.gradcheck(wide, inputs)
    assert torch.autograd.gradgradcheck(wide, inputs)


def test_what_is_constant_in_steps_has_a_gradient_of_zeros() -> None:
    x, y = given((3, 1), (4,))
    stairs = fuser.jit_fn("template <typename T> T stairs(T x, T y) { return floor(x) + y; }")
    got = gradients(stairs, (x, y))
    assert_all_close(got, gradients(lambda x, y: torch.floor(x) + y, (x, y)))
    assert torch.equal(got[0], torch.zeros(3, 1, dtype=torch.float64))


def test_an_output_of_detached_inputs_requires_no_grad() -> None:
    (x,) = given((4,))
    y = draw((4,), torch.float64)
    pair = fuser.fuse(lambda x, y: (torch.exp(x) * y, torch.exp(y)))
    for _ in range(2):
        assert [(out.requires_grad, out.is_leaf) for out in pair(x, y)] == [(True, False), (False, True)]


POWERS = "template <typename T> T powers(T x, T y) { return pow(pow(pow(x, y), y), y); }"
powers = fuser.jit_fn(POWERS)


@fuser.fuse
def expensive(x: Any, y: Any) -> Any:
    return swish(powers(x, y), y)


def test_a_result_is_saved_that_takes_long_to_compute() -> None:
    inputs = given((6,), (6,))
    out = expensive(*inputs)
    (saved,) = [item for item in out.grad_fn.saved_tensors if all(item is not given for given in inputs)]
    assert torch.equal(saved, powers(*inputs))
    assert torch.autograd.gradcheck(expensive, inputs)
    assert torch.autograd.gradgradcheck(expensive, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_saved_changes_no_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = given((600,), (600,), dtype=dtype)
    found = []
    for prices in ((0,), (4,)):
        monkeypatch.setattr(differentiation, "PRICES", prices)
        monkeypatch.setattr(differentiation, "_cases", type(differentiation._cases)())
        out = fuser.fuse(lambda x, y: swish(powers(x, y), y))(*inputs)
        found.append((len(out.grad_fn.case.kept), torch.autograd.grad(out, inputs, torch.ones_like(out))))
    (none, computed), (some, handed) = found
    assert (none, some) == (0, 1)
    assert all(map(torch.equal, computed, handed))


def test_gradients_between_functors_are_not_rounded() -> None:
    third = fuser.jit_fn("template <typename T> T third(T x) { return x / T(3); }")
    (x,) = given((4000,), dtype=torch.bfloat16)
    weight = draw((4000,), torch.bfloat16, seed=7)
    plus = fuser.jit_fn("template <typename T> T plus(T x, T y) { return x + y; }")
    (got,) = gradients(fuser.fuse(lambda x: plus(third(third(third(third(x)))), third(x))), (x,), weight)
    assert torch.equal(got, (weight.double() * (1 / 81 + 1 / 3)).bfloat16())
    # Torch adds and multiplies in bfloat16, and so do its ops in fused functions.
    thirds = lambda x: x / 3 / 3 / 3 / 3 + x / 3  # noqa: E731
    (rounded,) = gradients(thirds, (x,), weight)
    assert not torch.equal(rounded, got)
    assert torch.equal(gradients(fuser.fuse(thirds), (x,), weight)[0], rounded)


def test_inputs_are_saved_where_that_is_as_cheap() -> None:
    x, y = given((6,), (6,))
    result = swish(x, y)
    assert [id(item) for item in result.grad_fn.saved_tensors] == [id(x), id(y)]


def test_what_was_written_to_after_the_forward_pass_is_noticed() -> None:
    x, y = given((6,), (6,))
    base = x * 1
    out = swish(base, y)
    base.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# --- transforms --------------------------------------------------------------------------------------------------
def total(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: function(*args).sum()


TRANSFORMS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "grad": lambda f: torch.func.grad(total(f), argnums=(0, 1)),
    "vjp": lambda f: lambda x, y: torch.func.vjp(f, x, y)[1](x + y),
    "jvp": lambda f: lambda x, y: torch.func.jvp(f, (x, y), (y, x * 2)),
    "jacrev": lambda f: torch.func.jacrev(f, argnums=(0, 1)),
    "jacfwd": lambda f: torch.func.jacfwd(f, argnums=(0, 1)),
    "hessian": lambda f: torch.func.hessian(total(f), argnums=(0, 1)),
    "forward over forward": lambda f: torch.func.jacfwd(torch.func.jacfwd(total(f))),
    "reverse over reverse": lambda f: torch.func.jacrev(torch.func.jacrev(total(f))),
    "third": lambda f: torch.func.grad(lambda x, y: torch.func.grad(total(torch.func.grad(total(f))))(x, y).sum()),
    "vmap": lambda f: torch.func.vmap(f),
    "vmap of the second dimension": lambda f: torch.func.vmap(f, in_dims=(1, 1), out_dims=1),
    "vmap of the first argument": lambda f: lambda x, y: torch.func.vmap(f, in_dims=(0, None))(x, y[0]),
    "vmap to numbers": lambda f: torch.func.vmap(torch.func.vmap(f)),
    "gradients of samples": lambda f: torch.func.vmap(torch.func.grad(total(f), argnums=(0, 1))),
    "linearize": lambda f: lambda x, y: torch.func.linearize(f, x, y)[1](y, x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_equal_eager(name: str) -> None:
    x, y = (item.detach() for item in given((3, 4), (3, 4)))
    got, wanted = TRANSFORMS[name](swish)(x, y), TRANSFORMS[name](eager_swish)(x, y)
    torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-12)


def test_what_outlives_its_transform_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in each backward pass of a group with a reduction in its middle."""
    x, y = (item.detach() for item in given((3, 4), (3, 4)))
    _, pull = torch.func.vjp(swish, x, y)
    wanted, anew = pull(y), Mock(wraps=route.call_anew)
    monkeypatch.setattr(route, "call_anew", anew)
    assert all(map(torch.equal, pull(y), wanted))
    assert not anew.called


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_autograd_calls_backward_passes_as_they_stand() -> None:
    @fuser.fuse
    def rectify(x: Any, y: Any) -> Any:
        return torch.relu(x) * y

    def total(*inputs: Any) -> Any:
        return rectify(swish(*inputs), inputs[0]).sum()

    inputs = given((3, 4), (3, 4))
    total(*inputs).backward()
    wanted = [item.grad for item in inputs]
    for item in inputs:
        item.grad = None
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        total(*inputs).backward()
    assert all(map(torch.equal, [item.grad for item in inputs], wanted))


@pytest.mark.parametrize("name", ["grad", "jvp", "vjp", "gradients of samples", "reverse over reverse", "vmap"])
def test_transforms_of_loops_that_depend_on_data(name: str) -> None:
    def ours(x: Any, y: Any) -> Any:
        return newton(x) * y

    x, y = (item.detach() for item in given((2, 3), (2, 3)))
    got = TRANSFORMS[name](ours)(x, y)
    wanted = TRANSFORMS[name](lambda x, y: torch.sqrt(x) * y)(x, y)
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


def test_a_loop_leaves_no_tensors_to_the_garbage_collector() -> None:
    search = fuser.jit_fn("""
    template <typename T> T search(T x) {
      T s = x;
      while (true) {
        s *= T(1.3);
        if (s > T(4) && x > T(1.2)) return s * x;
        if (s > T(6)) break;
        if (s > T(3)) { s += x; continue; }
        s += T(0.1);
      }
      return s;
    }""")

    def count_tensors() -> int:
        return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())

    x = torch.linspace(1, 2, 6, dtype=torch.float64, requires_grad=True)
    for function in (newton, search):
        gradients(function, (x,))
        gc.collect()
        gc.disable()
        try:
            before = count_tensors()
            gradients(function, (x,))
            assert count_tensors() == before
        finally:
            gc.enable()


def test_a_loop_that_no_element_enters_has_derivatives_of_any_order() -> None:
    # Its derivative is the gradient itself, which torch takes from no function as a result.
    halved = fuser.create_jit_fn("template <typename T> T f(T x) { while (x > T(1)) x /= T(2); return x; }")
    x = torch.tensor([-1.0, 0.5], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(halved, x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(halved, x)
    hessian = torch.func.hessian(lambda x: (halved(x) * halved(x)).sum())(x.detach())
    assert torch.equal(hessian, 2 * torch.eye(2, dtype=torch.float64))
    each = torch.func.vmap(torch.func.grad(lambda x: halved(x) * x))(x.detach())
    assert torch.equal(each, 2 * x.detach())


def test_forward_mode_of_a_loop_beside_a_hand_written_derivative() -> None:
    twice = fuser.jit_fn(
        "template <typename T> T twice(T x) { return x + x; }",
        backward=fuser.jit_fn("template <typename T> T thrice(T x, T g) { return T(3) * g; }"),
    )
    x = torch.tensor([2.0, 3.0], dtype=torch.float64)
    for function in (lambda x: newton(twice(x)), fuser.fuse(lambda x: newton(twice(x)))):
        with forward_ad.dual_level():
            made = function(forward_ad.make_dual(x, torch.ones_like(x)))
            torch.testing.assert_close(forward_ad.unpack_dual(made).tangent, 1.5 * torch.rsqrt(2 * x))


def test_vmap_promotes_as_each_element_would() -> None:
    # Each element is a 0-dim float64 beside a float32 vector: the result is float32.
    scales, x = torch.arange(3.0, dtype=torch.float64), draw((5,), torch.float32)
    got = torch.func.vmap(swish, in_dims=(0, None))(scales, x)
    wanted = torch.stack([swish(scale, x) for scale in scales])
    assert got.dtype is wanted.dtype is torch.float32
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(
    ("weak", "other", "shape"),
    [
        # Of a higher category, which counts in the other's precision or in its own.
        (torch.complex64, torch.float64, (3,)),
        (torch.complex128, torch.float32, (3,)),
        (torch.int8, torch.bool, (3,)),
        (torch.float64, torch.int32, (3,)),
        # Of a lower one.
        (torch.float64, torch.complex64, (3,)),
        # As weak as the other, which has no batch.
        (torch.float32, torch.float64, ()),
        (torch.uint8, torch.int8, ()),
    ],
)
def test_vmap_promotes_numbers_of_any_kind_as_each_element_would(
    weak: torch.dtype, other: torch.dtype, shape: tuple[int, ...]
) -> None:
    product = fuser.create_jit_fn("template <typename T> T product(T x, T y) { return x * y; }")
    scales, x = torch.tensor([2.7, 0.0, -3.3]).to(weak), torch.full(shape, 5.3, dtype=torch.float64).to(other)
    if weak.is_complex:
        scales = scales * (1 + 2j)
    got = torch.func.vmap(product, in_dims=(0, None))(scales, x)
    wanted = torch.stack([product(scale, x) for scale in scales])
    assert got.dtype is wanted.dtype is torch.result_type(scales[0], x)
    assert torch.equal(got, wanted)


def test_vmap_promotes_in_each_step_of_a_group() -> None:
    # The number is float64 where it meets integers and numbers, and float32 where it meets a float32 vector.
    def steps(s: torch.Tensor, i: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return s * 3 + i, torch.abs(s / 3) * x, (x - s) * i

    scales, i, x = torch.rand(4, dtype=torch.float64), torch.arange(3, dtype=torch.int32), torch.rand(3)
    got = torch.func.vmap(fuser.fuse(steps), in_dims=(0, None, None))(scales, i, x)
    wanted = [torch.stack(items) for items in zip(*[steps(scale, i, x) for scale in scales], strict=True)]
    assert [item.dtype for item in got] == [torch.float64, torch.float32, torch.float32]
    assert all(map(torch.equal, got, wanted))


def test_forward_mode_is_not_lost_in_a_replayed_call() -> None:
    x, y = (item.detach() for item in given((6,), (6,)))
    for _ in range(3):
        swish(x, y)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, y)
        tangent = torch.autograd.forward_ad.unpack_dual(swish(dual, y)).tangent
        wanted = torch.autograd.forward_ad.unpack_dual(eager_swish(dual, y)).tangent
    assert tangent is not None
    torch.testing.assert_close(tangent, wanted)


def test_checkpointing() -> None:
    inputs = given((4, 5), (4, 5))
    got = gradients(lambda x, y: torch.utils.checkpoint.checkpoint(chain, x, y, use_reentrant=False), inputs)
    assert_all_close(got, gradients(eager_chain, inputs))


# --- torch.compile -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", ["fuser", "aot_eager"])
def test_training_through_torch_compile(backend: str) -> None:
    torch._dynamo.reset()
    layer = torch.nn.Linear(5, 5, dtype=torch.float64)

    def model(x: Any, y: Any) -> Any:
        return torch.sin(axpy(layer(x), y, alpha=2.0)) * swish(x, y)

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    inputs = given((4, 5), (5,))
    assert_all_close(gradients(compiled, inputs), gradients(model, inputs), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("backend", ["fuser", "aot_eager"])
def test_a_loop_that_depends_on_data_trains_through_torch_compile(backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, y: torch.sin(newton(x.t()) * y), backend=backend, fullgraph=True)
    inputs = given((5, 4), (5,))
    wanted = gradients(lambda x, y: torch.sin(x.t().sqrt() * y), inputs)
    assert_all_close(gradients(compiled, inputs), wanted, rtol=1e-10, atol=1e-12)


def test_a_loop_that_depends_on_data_is_one_operator_in_a_traced_gradient() -> None:
    (x,) = given((3,))
    gradient = torch.func.grad(lambda x: newton(x).sum())
    graph = make_fx(gradient, tracing_mode="symbolic")(x.detach())
    assert [node.target for node in graph.graph.nodes].count(torch.ops.fuser.pull_back.default) == 1
    y = x.detach() + 1
    torch.testing.assert_close(graph(y), 0.5 / y.sqrt())
    # The operator itself has no derivative, and says so.
    with pytest.raises(GradientError, match="traced graph"):
        graph(x).sum().backward()


VMAPPED = {
    "one of two": ((0, None), lambda: (torch.randn(5, 4), torch.randn(3, 1))),
    "the last dimension": ((None, 2), lambda: (torch.randn(4), torch.randn(3, 1, 6))),
    "single numbers": ((0, 0), lambda: (torch.randn(5, 4), torch.randn(5, dtype=torch.float64))),
    "single numbers first": ((0, 0), lambda: (torch.randn(5, dtype=torch.float64), torch.randn(5, 4))),
    "both": ((1, 0), lambda: (torch.randn(4, 5), torch.randn(5, 3, 1))),
}


@pytest.mark.parametrize("name", VMAPPED)
def test_vmap_of_a_traced_graph(name: str) -> None:
    dims, make = VMAPPED[name]
    inputs = make()
    single = [item if dim is None else item.select(dim, 0) for item, dim in zip(inputs, dims, strict=True)]
    graph = make_fx(lambda x, y: axpy(x, y, alpha=2.0))(*single)
    assert any(node.target is torch.ops.fuser.run.default for node in graph.graph.nodes)
    got = torch.func.vmap(graph, in_dims=dims)(*inputs)
    torch.testing.assert_close(got, torch.func.vmap(lambda x, y: 2 * x + y, in_dims=dims)(*inputs))


@pytest.mark.parametrize(
    ("dims", "shapes"),
    [
        # The elements of one input have fewer dimensions; one input has no batch, though it is as long as one.
        ((0, 0), ((4, 3, 5), (4, 5))),
        ((0, 0), ((4, 3, 5), (4,))),
        ((None, 0), ((4, 5), (4, 5))),
        ((None, 0), ((4, 5), (4, 4, 5))),
        ((0, None), ((4, 3, 5), (4, 5, 1, 1))),
    ],
)
def test_vmap_of_results_that_are_made_of_other_inputs(dims: Any, shapes: Any) -> None:
    def each(x: Any, y: Any) -> Any:
        return y + 1, x * 2 + 1, (x * 2) * x

    inputs = [torch.randn(shape) for shape in shapes]
    fused = fuser.fuse(each)
    fused(*inputs)
    assert len(fused.groups) == 1
    for got, wanted in zip(
        torch.func.vmap(fused, in_dims=dims)(*inputs), torch.func.vmap(each, in_dims=dims)(*inputs), strict=True
    ):
        assert torch.equal(got, wanted)
    first = torch.func.vmap(torch.func.jacrev(fused), in_dims=dims)(*inputs)
    for got, wanted in zip(first, torch.func.vmap(torch.func.jacrev(each), in_dims=dims)(*inputs), strict=True):
        torch.testing.assert_close(got, wanted)


def test_vmap_inside_torch_compile() -> None:
    torch._dynamo.reset()
    x, y = torch.randn(5, 4), torch.randn(4)
    compiled = torch.compile(
        lambda x, y: torch.func.vmap(lambda row: axpy(row, y) * 3)(x), backend="fuser", fullgraph=True
    )
    torch.testing.assert_close(compiled(x, y), 3 * eager_axpy(x, y))


# --- scalars as tensors ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("device", DEVICES)
def test_a_scalar_that_is_a_tensor_has_a_gradient(device: str) -> None:
    x, y = given((3, 4), (4,), device=device)
    alpha = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    inputs = (x, y, alpha)
    assert torch.equal(axpy(x, y, alpha=alpha), axpy(x, y, alpha=0.7))
    assert torch.autograd.gradcheck(lambda x, y, a: axpy(x, y, alpha=a), inputs)
    assert torch.autograd.gradgradcheck(lambda x, y, a: axpy(x, y, alpha=a), inputs)
    fused = fuser.fuse(lambda x, y, a: torch.tanh(axpy(x, y, alpha=a * 2)))
    assert_all_close(gradients(fused, inputs), gradients(lambda x, y, a: torch.tanh(a * 2 * x + y), inputs))
    assert len(fused.groups) == 1


def test_a_scalar_that_is_a_tensor_does_not_promote() -> None:
    x = draw((4,), torch.bfloat16)
    assert axpy(x, x, alpha=torch.tensor(2.0, dtype=torch.float64)).dtype is torch.bfloat16
    with pytest.raises(ArgumentError, match=r"scalar 'alpha' has shape \[2\]"):
        axpy(x, x, alpha=torch.ones(2))


# --- hand-written derivatives ------------------------------------------------------------------------------------
STEP = "template <typename T> T step(T x) { return x > T(0) ? T(1) : T(0); }"
SURROGATE = """
template <typename T> T surrogate(T x, T grad) {
  const T s = T(1) / (T(1) + abs(x));
  return grad * s * s;
}
"""
surrogate = fuser.jit_fn(SURROGATE)


def surrogate_of(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    return grad / (1 + x.abs()) ** 2


def test_a_hand_written_derivative_fuses_with_its_neighbours() -> None:
    step = fuser.jit_fn(STEP, backward=surrogate)
    (x,) = given((6,))
    x = (x - 1).detach().requires_grad_()
    fused = fuser.fuse(lambda x: torch.tanh(step(x * 2) + x))
    fuser.reset_stats()
    (got,) = gradients(fused, (x,))
    assert fuser.stats()["launches"] == 2
    value = torch.tanh((x > 0) + x)
    weight = draw((6,), torch.float32, seed=7).to(x)
    slope = weight * (1 - value**2)
    torch.testing.assert_close(got, slope + 2 * surrogate_of(x * 2, slope))
    # The hand-written functor is differentiated from its text.
    (first,) = torch.autograd.grad(step(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, -2 * x.sign() / (1 + x.abs()) ** 3)


SCALED = "template <typename T> T scaled(T x, T y, T k) { return k * x * y; }"
SCALED_BACKWARD = """
template <typename T> void scaled_backward(T y, T out, T grad, T k, T& gx, T& gy) {
  gx = k * y * grad;
  gy = out / y * grad;
}
"""
SAVED = {
    "names": ["y", "out"],
    "places": [1, 2],
    "function": lambda inputs, outputs: (inputs[1], outputs[0]),
}


@pytest.mark.parametrize("saved", SAVED.values(), ids=SAVED)
@pytest.mark.parametrize("is_functor", [True, False], ids=["functors", "functions"])
def test_differentiable(saved: Any, is_functor: bool) -> None:
    forward = fuser.jit_fn(SCALED, scalars={"k": 2.0})
    backward = fuser.jit_fn(SCALED_BACKWARD, num_outputs=2, scalars={"k": 2.0})

    def call_forward(x: Any, y: Any, k: float = 2.0) -> Any:
        return forward(x, y, k=k)

    def call_backward(y: Any, out: Any, grad: Any, k: float = 2.0) -> Any:
        return backward(y, out, grad, k=k)

    pair = (forward, backward) if is_functor else (call_forward, call_backward)
    function = fuser.differentiable(*pair, save_for_backward=saved)
    inputs = given((3, 4), (4,))
    for options in ({}, {"k": 3.0}):
        k = options.get("k", 2.0)
        got = gradients(lambda x, y: function(x, y, **options), inputs)  # noqa: B023 - called here
        assert_all_close(got, gradients(lambda x, y: k * x * y, inputs))  # noqa: B023
    with torch.no_grad():
        assert torch.equal(function(*inputs), forward(*inputs))


def test_some_inputs_without_a_gradient() -> None:
    forward = fuser.jit_fn("template <typename T> T masked(T x, T mask) { return x * mask; }")
    backward = fuser.jit_fn("template <typename T> T masked_backward(T mask, T grad) { return mask * grad; }")
    function = fuser.differentiable(forward, backward, save_for_backward=["mask"], num_grad_inputs=1)
    x, mask = given((4,), (4,))
    got = torch.autograd.grad(function(x, mask).sum(), (x, mask), allow_unused=True)
    torch.testing.assert_close(got[0], mask.detach())
    assert got[1] is None or not got[1].any()


def test_an_output_without_an_incoming_gradient_counts_as_zeros() -> None:
    forward = fuser.jit_fn(
        "template <typename T> void two(T x, T& a, T& b) { a = x * x; b = x * T(3); }", num_outputs=2
    )
    backward = fuser.jit_fn("template <typename T> T two_b(T x, T ga, T gb) { return ga * T(2) * x + gb * T(3); }")
    function = fuser.differentiable(forward, backward)
    (x,) = given((4,))
    torch.testing.assert_close(torch.autograd.grad(function(x)[0].sum(), x)[0], (2 * x).detach())
    torch.testing.assert_close(torch.autograd.grad(function(x)[1].sum(), x)[0], torch.full_like(x, 3))


WRONG_PAIRS: dict[str, Callable[[], Any]] = {
    "too few saved": lambda: fuser.jit_fn(SCALED, scalars=["k"], backward=surrogate),
    "unknown name": lambda: fuser.differentiable(fuser.jit_fn(STEP), surrogate, save_for_backward=["z"]),
    "unknown place": lambda: fuser.differentiable(fuser.jit_fn(STEP), surrogate, save_for_backward=[2]),
    "unknown scalar": lambda: fuser.jit_fn(
        STEP, backward=fuser.jit_fn("template <typename T> T b(T x, T g, T k) { return k * g; }", scalars=["k"])
    ),
}


@pytest.mark.parametrize("make", WRONG_PAIRS.values(), ids=WRONG_PAIRS)
def test_functors_that_do_not_fit_together(make: Callable[[], Any]) -> None:
    with pytest.raises(ArgumentError):
        make()


def test_differentiable_functions_whose_parameters_have_no_names() -> None:
    x, y = given((4,), (4,))
    out, slots = ["out"], [1, 2]
    product = fuser.differentiable(
        lambda *items: items[0] * items[1], lambda y, out, g: (g * y, g * out / y), save_for_backward=slots
    )
    assert_all_close(gradients(product, (x, y)), gradients(torch.mul, (x, y)))
    total = fuser.differentiable(
        lambda *items: (items[0] + items[1]).exp(), lambda e, g: (g * e, g * e), save_for_backward=out
    )
    assert_all_close(gradients(total, (x, y)), gradients(lambda x, y: (x + y).exp(), (x, y)))
    square = fuser.differentiable(lambda *items: items[0] * items[1], lambda x, y, g: (g * y, g * x))
    assert_all_close(gradients(square, (x, y)), gradients(torch.mul, (x, y)))
    # torch's functions have no signature at all.
    exponential = fuser.differentiable(torch.exp, torch.mul, save_for_backward=out)
    assert_all_close(gradients(exponential, (x,)), gradients(torch.exp, (x,)))


@pytest.mark.parametrize("slot", [True, 0.0, None, -1, 3, "z"])
def test_what_is_no_slot(slot: Any) -> None:
    for function in (fuser.jit_fn(SCALED, scalars=["k"]), lambda x, y: x * y):
        with pytest.raises(ArgumentError, match=f"there is no {slot!r} among x, y, out0, out"):
            fuser.differentiable(function, surrogate, save_for_backward=[slot])(*given((3,), (3,)))


def test_a_backward_function_with_too_few_gradients() -> None:
    function = fuser.differentiable(lambda x, y: x * y, lambda x, y, grad: grad * y)
    x, y = given((3,), (3,))
    with pytest.raises(ArgumentError, match="returned 1 gradients, not 2"):
        function(x, y).sum().backward()


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda x, y, g: (g * y, g * x, g), "returned 3 gradients, not 2"),
        (lambda x, y, g: (g * y, 1.0), "returned float for input 1, not a tensor"),
        (lambda x, y, g: {"x": g, "y": g}, "returned 1 gradients, not 2"),
        (
            lambda x, y, g: (g, g[1:]),
            r"of product returned a gradient of shape \(2,\) for input 1, whose shape is \(3,\)",
        ),
        (
            lambda x, y, g: (g.sum(), g),
            r"of product returned a gradient of shape \(\) for input 0, whose shape is \(3,\)",
        ),
    ],
)
def test_a_backward_function_that_returns_no_gradients(made: Callable[..., Any], message: str) -> None:
    def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y

    for count in (None, 2, 5):
        function = fuser.differentiable(product, made, num_grad_inputs=count)
        with pytest.raises(ArgumentError, match=message):
            function(*given((3,), (3,))).sum().backward()


def test_a_forward_function_that_returns_no_tensors() -> None:
    for made, kind in ((3.0, "float"), (None, "None")):
        function = fuser.differentiable(lambda x: made, lambda x, g: g)  # noqa: B023 - called here
        with pytest.raises(ArgumentError, match=f"the forward function <lambda> returned {kind}, not a tensor"):
            function(*given((3,)))


def test_a_number_of_gradients_that_is_none() -> None:
    for forward, backward in ((fuser.jit_fn(STEP), surrogate), (lambda x: x, lambda x, g: g)):
        with pytest.raises(ArgumentError, match="num_grad_inputs must not be negative, got -1"):
            fuser.differentiable(forward, backward, num_grad_inputs=-1)


@pytest.mark.parametrize("saved", [None, [], ["out"]])
def test_a_forward_function_that_returns_its_input(saved: Any) -> None:
    """Reversing a gradient, or passing it through unchanged, is what one writes such pairs for."""
    reverse = fuser.differentiable(lambda x: x, lambda *items: -items[-1], save_for_backward=saved)
    (x,) = given((3,))
    assert torch.equal(reverse(x), x)
    (got,) = gradients(lambda x: reverse(x * x), (x,))
    (wanted,) = gradients(lambda x: -(x * x), (x,))
    assert torch.equal(got, wanted)
    rows = torch.func.vmap(torch.func.grad(lambda x: reverse(x).sum()))(torch.ones(2, 3))
    assert torch.equal(rows, -torch.ones(2, 3))


def test_a_hand_written_derivative_also_counts_in_eager_torch() -> None:
    step = fuser.jit_fn(STEP, backward=surrogate)
    (x,) = given((6,))
    x = (x - 1).detach().requires_grad_()
    (wanted,) = gradients(step, (x,))
    before = fuser.override_can_fuse_on_cpu(False)
    try:
        (got,) = gradients(step, (x,))
    finally:
        fuser.override_can_fuse_on_cpu(before)
    torch.testing.assert_close(got, wanted)
    loop = fuser.fuse(lambda x: newton(step(x) + 2))
    slope = torch.rsqrt((x > 0) + 2.0) / 2
    (got,) = torch.autograd.grad(loop(x).sum(), x)
    torch.testing.assert_close(got, surrogate_of(x.detach(), slope.detach().double()))


@pytest.mark.parametrize("is_fused", [True, False])
def test_forward_mode_transposes_a_hand_written_derivative(is_fused: bool) -> None:
    step = fuser.jit_fn(STEP, backward=surrogate)
    clip = fuser.jit_fn(
        "template <typename T> T clip(T x) { return x; }",
        backward=fuser.jit_fn("template <typename T> T clipped(T x, T g) { return g > T(1) ? T(1) : g; }"),
    )
    # 2 x is what it says, not what it is.
    wave = fuser.jit_fn(
        "template <typename T> void wave(T x, T y, T k, T& a, T& b) { a = x * y; b = sin(k * y); }",
        num_outputs=2,
        scalars=["k"],
        backward=fuser.jit_fn(
            "template <typename T> void back(T x, T y, T ga, T gb, T k, T& gx, T& gy) {"
            " gx = T(2) * ga * y; gy = ga * x + gb * k * cos(k * y); }",
            num_outputs=2,
            scalars=["k"],
        ),
    )
    (x,) = given((6,))
    x = (x - 1).detach()
    y, v, w = draw((3, 1), x.dtype, seed=1), draw((6,), x.dtype, seed=2), draw((3, 1), x.dtype, seed=3)
    before = fuser.override_can_fuse_on_cpu(is_fused)
    try:
        for function in (step, fuser.fuse(lambda x: torch.tanh(step(x * 2) + x))):
            assert_all_close(torch.func.jacfwd(function)(x), torch.func.jacrev(function)(x))
        found = torch.func.jvp(lambda x, y: wave(x, y, k=3.0), (x, y), (v, w))[1]
        assert_all_close(found, (2 * v * y + x * w, 3 * (3 * y).cos() * w.expand(3, 6)))
        found = torch.func.jvp(lambda y: wave(x, y, k=torch.tensor(3.0)), (y,), (w,))[1]
        assert_all_close(found, (x * w, 3 * (3 * y).cos() * w.expand(3, 6)))
        with pytest.raises(GradientError, match="its backward functor clipped, which is not linear in the gradient"):
            torch.func.jvp(clip, (x,), (v,))
    finally:
        fuser.override_can_fuse_on_cpu(before)


# --- never in silence --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("is_fused", [True, False])
def test_hand_written_derivatives_with_scalars_that_are_tensors(is_fused: bool) -> None:
    """Scalars before and after the tensors, taken by the backward functor or not; its saved output stays that."""
    power = fuser.jit_fn("template <typename T> T power(T k, T x, T a) { return a * pow(x, k); }", scalars=["a", "k"])
    slope = fuser.jit_fn(
        "template <typename T> T slope(T k, T out, T x, T g) { return g * k * out / x; }", scalars={"k": 1.0}
    )
    function = fuser.differentiable(power, slope, save_for_backward=["out", "x"])
    (x,) = given((5,))
    a, k = torch.tensor(3.0, dtype=torch.float64), torch.tensor(2.5, dtype=torch.float64)
    fused = fuser.fuse(lambda x, a, k: function(x, a=a, k=k))
    before = fuser.override_can_fuse_on_cpu(is_fused)
    try:
        for call in (lambda x: function(x, a=a, k=k), lambda x: function(x, a=a, k=2.5), lambda x: fused(x, a, k)):
            assert_all_close(gradients(call, (x,)), gradients(lambda x: 3 * x**2.5, (x,)))
        for options in ({"a": a.clone().requires_grad_(), "k": 2.0}, {"a": 2.0, "k": k.clone().requires_grad_()}):
            for leaf in (x, x.detach()):
                with pytest.raises(GradientError, match="makes no gradient of the scalar"):
                    function(leaf, **options)
    finally:
        fuser.override_can_fuse_on_cpu(before)


def test_differentiable_functions_lose_no_gradient() -> None:
    (x,) = given((5,))
    inner = fuser.differentiable(lambda x, k: x * k, lambda x, k, g: (g * k * 100, None))
    assert_all_close(gradients(lambda x: inner(x, 3.0), (x,)), gradients(lambda x: 300 * x, (x,)))
    outer = fuser.differentiable(inner, lambda x, k, g: (g * k, None))
    assert_all_close(gradients(lambda x: outer(x, 3.0), (x,)), gradients(lambda x: 3 * x, (x,)))
    scaled = fuser.differentiable(lambda x, k=1.0: x * k, lambda x, g, k=1.0: g * k)
    k = torch.tensor(2.0)
    for lost in (k.clone().requires_grad_(), [k.clone().requires_grad_()]):
        with pytest.raises(GradientError, match="no gradient of the scalar 'k'"):
            scaled(x.detach(), k=lost)
    with pytest.raises(GradientError, match="no gradient of the scalar 'k'"):
        torch.func.jvp(lambda k: scaled(x.detach(), k=k), (k,), (k,))
    product = fuser.differentiable(lambda items: items[0] * items[1], lambda items, g: None)
    with pytest.raises(GradientError, match="no gradient of what is in input 0, which is no tensor but a list of some"):
        product([x, x])
    assert torch.equal(product([x.detach(), x.detach()]), x.detach() ** 2)
    with torch.no_grad():
        assert torch.equal(product((x, x)), x**2)


def test_batches_of_gradients() -> None:
    (x,) = given((4,))
    slope = x.detach().cos() * x.detach() + x.detach().sin()
    wave = fuser.jit_fn("template <typename T> T wave(T x) { return sin(x) * x; }")
    (rows,) = torch.autograd.grad(wave(x), x, torch.eye(4, dtype=torch.float64), is_grads_batched=True)
    torch.testing.assert_close(rows, slope.diag())
    jacobian = torch.autograd.functional.jacobian(wave, x.detach(), vectorize=True)
    torch.testing.assert_close(jacobian, slope.diag())
    # Batched tensors of torch's own, which cannot be asked for their tangents, as tangents.
    options = {"vectorize": True, "strategy": "forward-mode"}
    jacobian = torch.autograd.functional.jacobian(wave, x.detach(), **options)
    torch.testing.assert_close(jacobian, slope.diag())
    # And gradients of those, of what only some elements go through.
    root = fuser.jit_fn("template <typename T> T root(T x) { return x > T(0) ? sqrt(x) : T(0); }")
    x = torch.tensor([0.0, 4.0], dtype=torch.float64)
    for options in ({"create_graph": True}, {"outer_jacobian_strategy": "forward-mode"}):
        hessian = torch.autograd.functional.hessian(lambda x: root(x).sum(), x, vectorize=True, **options)
        torch.testing.assert_close(hessian, torch.diag(torch.tensor([0, -1 / 32], dtype=torch.float64)))


def test_what_cannot_be_fused_is_differentiated_by_torch() -> None:
    fused = fuser.fuse(lambda x, y: x.pow(3) * y)
    (y,) = given((4,))
    x = torch.arange(4)
    assert_all_close(gradients(lambda y: fused(x, y), (y,)), gradients(lambda y: x.pow(3) * y, (y,)))


def test_export_with_a_dynamic_size_that_is_broadcast() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Any, y: Any) -> Any:
            return swish(x, y)

    size = torch.export.Dim("size", min=2)
    exported = torch.export.export(Model(), (torch.randn(3, 4), torch.randn(4)), dynamic_shapes=({0: size}, None))
    x, y = torch.randn(7, 4), torch.randn(4)
    torch.testing.assert_close(exported.module()(x, y), swish(x, y))


WITHOUT: dict[str, tuple[str, dict[str, Any], str]] = {
    "bit cast": (
        "template <typename T> T bits(T x) { return T(__float_as_int(float(x))); }",
        {},
        r"bits has no derivative: a bit cast at line 1, column 46",
    ),
    "integer output": (
        "template <typename T> T sign(T x) { return x > T(0); }",
        {"out_dtypes": torch.int32},
        r"sign has no derivative: its result is torch.int32",
    ),
}


@pytest.mark.parametrize(("code", "options", "message"), WITHOUT.values(), ids=WITHOUT)
def test_no_derivative_is_an_error(code: str, options: dict[str, Any], message: str) -> None:
    function = fuser.jit_fn(code, **options)
    (x,) = given((3,))
    for _ in range(2):
        with pytest.raises(GradientError, match=message):
            function(x)
    assert function(x.detach()).shape == (3,)
    fused = fuser.fuse(lambda x: function(x * 2))
    with pytest.raises(GradientError, match=message):
        fused(x)


UNTAKEN = {
    "log": ("x > T(0) ? log(x) : x", lambda x: torch.where(x > 0, 1 / x, 1)),
    "sqrt": ("x > T(0) ? sqrt(x) : T(0)", lambda x: torch.where(x > 0, 0.5 / x.sqrt(), 0)),
    "division": ("x == T(0) ? T(1) : sin(x) / x", None),
    "power": ("x > T(0) ? pow(x, T(0.5)) : x", lambda x: torch.where(x > 0, 0.5 / x.sqrt(), 1)),
    "two branches share": ("x > T(1) ? log(x) * T(2) : (x < T(-1) ? log(-x) : x)", None),
}


@pytest.mark.parametrize("name", UNTAKEN)
def test_no_nan_from_branches_that_are_not_taken(name: str) -> None:
    expression, slope = UNTAKEN[name]
    function = fuser.jit_fn(f"template <typename T> T f(T x) {{ return {expression}; }}")
    x = torch.tensor([-2.0, -0.0, 0.0, 0.5, 3.0], dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert first.isfinite().all(), first
    assert second.isfinite().all(), second
    if slope is not None:
        torch.testing.assert_close(first.detach(), slope(x.detach()).double())


COMPARING: dict[str, Callable[[Any], Any]] = {
    "where": lambda x: torch.where(x > 0, x * x, x * x * x),
    "mask": lambda x: (x > 0) * x * x,
    "functor": lambda x: torch.where(is_positive(x), x * x, torch.sin(x)),
}
is_positive = fuser.jit_fn("template <typename T> bool is_positive(T x) { return x > T(0); }", out_dtypes=[torch.bool])


@pytest.mark.parametrize("name", COMPARING)
def test_forward_mode_passes_by_what_compares(name: str) -> None:
    plain = (lambda x: torch.where(x > 0, x * x, torch.sin(x))) if name == "functor" else COMPARING[name]
    fused = fuser.fuse(COMPARING[name])
    x, v = (draw((5,), torch.float64, seed=seed) for seed in (1, 2))
    transforms: list[Callable[[Any], Any]] = [
        lambda f: torch.func.hessian(lambda a: f(a).sum())(x),
        lambda f: torch.func.jvp(torch.func.grad(lambda a: f(a).sum()), (x,), (v,)),
        lambda f: torch.func.jvp(f, (x,), (v,)),
        lambda f: torch.func.jvp(torch.vmap(f), (x,), (v,)),
        lambda f: torch.func.jacfwd(torch.vmap(f))(x),
    ]
    for transform in transforms:
        torch.testing.assert_close(transform(fused), transform(plain))
    before = fuser.stats()["fallbacks"]
    torch.func.jvp(fused, (x,), (v,))
    assert fuser.stats()["fallbacks"] == before


def test_vmap_inside_a_level_of_forward_mode() -> None:
    cube = fuser.create_jit_fn("template <typename T> T cube(T x) { return x * x * x; }")
    x, v = (draw((5,), torch.float64, seed=seed) for seed in (1, 2))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, v)
        torch.testing.assert_close(forward_ad.unpack_dual(torch.vmap(cube)(dual)).tangent, 3 * x * x * v)
        assert torch.equal(torch.vmap(cube)(x), cube(x))


def test_batches_of_second_gradients_under_broadcasting() -> None:
    def plain(x: Any, y: Any) -> Any:
        return (torch.tanh(x * y) * x).sum()

    fused = fuser.fuse(lambda x, y: torch.tanh(x * y) * x)
    x, y = draw((3, 1), torch.float64, seed=1), draw((4,), torch.float64, seed=2)
    hessian = torch.autograd.functional.hessian
    torch.testing.assert_close(
        hessian(lambda x, y: fused(x, y).sum(), (x, y), vectorize=True), hessian(plain, (x, y), vectorize=True)
    )


def test_a_pass_that_saves_nothing_runs_twice() -> None:
    x = draw((5,), torch.float64, seed=1).requires_grad_()
    total = fuser.fuse(lambda x: x + 2 * x)(x).sum()
    total.backward()
    total.backward()
    assert torch.equal(x.grad, torch.full_like(x, 6.0))
    product = fuser.fuse(lambda x: x * x)(x).sum()
    product.backward()
    with pytest.raises(RuntimeError, match="second time"):
        product.backward()


def test_gradients_with_lazy_bits_are_resolved() -> None:
    square = fuser.jit_fn("template <typename T> T square(T x) { return x * x; }")
    generator = torch.Generator().manual_seed(0)
    incoming = torch.randn(5, dtype=torch.complex64, generator=generator).conj()
    for gradient in (incoming, incoming.imag):
        start = torch.randn(5, dtype=gradient.dtype, generator=generator)
        for _ in range(3):
            x, y = (start.clone().requires_grad_() for _ in range(2))
            square(x).backward(gradient)
            (y * y).backward(gradient)
            torch.testing.assert_close(x.grad, y.grad)


def test_a_gradient_of_a_subclass() -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    x = torch.ones(3, requires_grad=True)
    fake = FakeTensorMode(allow_non_fake_inputs=True).from_tensor(torch.ones(3))
    for _ in range(2):
        (found,) = torch.autograd.grad(axpy(x, x, alpha=2.0), x, fake)
        assert isinstance(found, FakeTensor)


def test_a_backward_function_of_some_broadcast_inputs_and_scalars() -> None:
    def forward(x: Any, y: Any, *, a: float, b: float) -> Any:
        return a * x * y + b

    product = fuser.differentiable(forward, lambda x, y, g, *, a: a * g * y, num_grad_inputs=1)
    x, y = torch.ones(3, requires_grad=True), torch.arange(6.0).reshape(2, 3)
    product(x, y, a=2.0, b=1.0).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [6, 10, 14]


@pytest.mark.parametrize("name", ["fmax", "fmin"])
def test_nan_loses_and_takes_no_gradient(name: str) -> None:
    function = fuser.jit_fn(f"template <typename T> T f(T x, T y) {{ return {name}(x, y); }}")
    x, y = (torch.tensor(values, requires_grad=True) for values in ([1.0, torch.nan], [torch.nan, 1.0]))
    function(x, y).sum().backward()
    assert (x.grad.tolist(), y.grad.tolist()) == ([1, 0], [0, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_angle_of_numbers_whose_squares_are_zero(dtype: torch.dtype) -> None:
    angle = fuser.create_jit_fn("template <typename T> T angle(T y, T x) { return atan2(y, x); }")
    tiny = torch.finfo(dtype).tiny
    values = torch.tensor([0.0, tiny, -tiny, 1.0], dtype=dtype)
    inputs = [item.clone().requires_grad_() for item in torch.cartesian_prod(values, values).unbind(1)]
    assert_all_close(gradients(angle, tuple(inputs)), gradients(torch.atan2, tuple(inputs)))


def test_more_gradients_than_inputs() -> None:
    forward = fuser.jit_fn("template <typename T> T f(T x) { return x * x; }")
    backward = fuser.jit_fn(
        "template <typename T> void b(T x, T g, T& gx, T& gy) { gx = g * x; gy = g; }", num_outputs=2
    )
    with pytest.raises(ArgumentError, match=r"expected 2 .* and 2"):
        fuser.differentiable(forward, backward, num_grad_inputs=2)


def test_scalars_become_tensors_one_after_the_other() -> None:
    backward = fuser.jit_fn("template <typename T> T b(T x, T g, T a, T c) { return a * c * g; }", scalars=("a", "c"))
    forward = fuser.jit_fn(
        "template <typename T> T f(T x, T a, T c) { return a * c * x; }", scalars=("a", "c"), backward=backward
    )
    one_by_one = forward.with_tensors(("a",)).with_tensors(("c",)).function
    assert one_by_one == forward.with_tensors(("a", "c")).function


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_broadcast_inputs_have_is_added_up_by_the_same_kernel(dtype: torch.dtype, device: str) -> None:
    for shape, broadcast in (
        ((300, 64), (64,)), ((300, 64), (300, 1)), ((40, 3, 50), (3, 1)), ((7, 500), ()), ((5, 6, 7), (1, 6, 1)),
        ((0, 5), (5,)), ((2048, 1000), (1000,)), ((3, 1), (1,)),
    ):  # fmt: skip
        x, y = given(shape, broadcast, dtype=dtype, device=device)
        out = swish(x, y)
        gradient = draw(tuple(out.shape), torch.float32, seed=9, device=device).to(dtype)
        dx, dy = torch.autograd.grad(out, (x, y), gradient, retain_graph=True)
        fuser.reset_stats()
        assert torch.equal(torch.autograd.grad(out, (x, y), gradient, retain_graph=True)[1], dy)
        if device == "cuda" and out.numel():
            # torch's launch is none of them.
            assert fuser.stats()["launches"] == 1
        # As torch adds up what the kernel makes, where somebody asks for that.
        for got, want in zip((dx, dy), torch.autograd.grad(out, (x, y), gradient, create_graph=True), strict=True):
            assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
            assert torch.equal(got, want)


def test_a_pass_that_adds_up() -> None:
    x, y = given((30, 6), (6,), dtype=torch.float32)
    case = differentiation.find_case(swish.spec(2), (x, y))
    step = case.backward((0,))
    assert step is not None
    assert case.adding_up(step, ((), ())) is step
    summed = case.adding_up(step, ((), (0,)))
    assert summed is case.adding_up(step, ((), (0,)))
    bound = [torch.ones(30, 6) if item.is_derivative else (x, y)[item.slot].detach() for item in step.derived.sources]
    dx, dy = fuser.run_fusion(fuser.register_fusion(step.derived.group), bound)
    added = fuser.run_fusion(fuser.register_fusion(summed.derived.group), bound)
    assert torch.equal(added[0], dx)
    torch.testing.assert_close(added[1], dy.sum(0, keepdim=True))
