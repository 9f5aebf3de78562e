"""Bad input: a clear error that names functor, argument and place, and nothing half-made after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fuser
from fuser import planner
from fuser.compiler import build_kernel_source
from fuser.errors import (
    MAX_MESSAGE_LINES,
    ArgumentError,
    CompileError,
    DeviceError,
    FunctorError,
    FuserError,
    GradientError,
    GroupError,
    ShapeError,
)

AXPY = "template <typename T> T axpy(T x, T y, T alpha) { return alpha * x + y; }"
# No eager version, and so no derivative, can be derived from it.
JUMP = fuser.jit_fn("template <typename T> T jump(T x) { goto end; end: return x; }")


def ones(*shape: int, **options: Any) -> torch.Tensor:
    return torch.ones(*shape, **options)


@pytest.fixture
def axpy() -> fuser.JitFunction:
    return fuser.jit_fn(AXPY, scalars=["alpha"])


# What is wrong, the call, the class, the whole message.
BAD_CALLS: list[tuple[str, Callable[[Any], Any], type[FuserError], str]] = [
    ("no tensor", lambda f: f(alpha=1.0), ArgumentError, "axpy(x, y, *, alpha) takes 2 tensors, got 0"),
    ("too few", lambda f: f(ones(3), alpha=1.0), ArgumentError, "axpy(x, y, *, alpha) takes 2 tensors, got 1"),
    ("too many", lambda f: f(*[ones(3)] * 3, alpha=1.0), ArgumentError, "axpy(x, y, *, alpha) takes 2 tensors, got 3"),
    ("numbers only", lambda f: f(1.0, 2.0, alpha=1.0), ArgumentError, "axpy: needs at least one tensor"),
    (
        "no tensor but a list",
        lambda f: f(ones(3), [1.0], alpha=1.0),
        ArgumentError,
        "expected a tensor or a Python number, got list",
    ),
    (
        "unknown scalar",
        lambda f: f(ones(3), ones(3), alpha=1.0, beta=2.0),
        ArgumentError,
        "axpy(x, y, *, alpha) has no scalar 'beta'",
    ),
    ("missing scalar", lambda f: f(ones(3), ones(3)), ArgumentError, "axpy(x, y, *, alpha) needs the scalar 'alpha'"),
    (
        "a text as scalar",
        lambda f: f(ones(3), ones(3), alpha="1"),
        ArgumentError,
        "axpy(x, y, *, alpha): scalar 'alpha' must be a Python number, got str",
    ),
    (
        "a tensor as scalar",
        lambda f: f(ones(3), ones(3), alpha=ones(1)),
        ArgumentError,
        "axpy(x, y, *, alpha): scalar 'alpha' has shape [1], not []",
    ),
    (
        "an integer too large",
        lambda f: f(ones(3), ones(3), alpha=2**64),
        ArgumentError,
        "axpy: alpha=18446744073709551616 does not fit in 64 bits",
    ),
    (
        "shapes",
        lambda f: f(ones(2, 3), ones(4), alpha=1.0),
        ShapeError,
        "axpy: The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 1 "
        "(shapes [2, 3], [4])",
    ),
    (
        "devices",
        lambda f: f(ones(3), ones(3, device="meta"), alpha=1.0),
        DeviceError,
        "axpy: expected all tensors to be on the same device, but found at least two devices, cpu and meta!",
    ),
    (
        "gradient",
        lambda _: JUMP(ones(3, requires_grad=True)),
        GradientError,
        "an input of 'jump' requires grad, and 'jump' has no derivative: line 1, column 37: goto has no translation to "
        "torch\n    1 | template <typename T> T jump(T x) { goto end; end: return x; }\n"
        "      |                                     ^\n"
        "call it under torch.no_grad(), detach the input, or give jit_fn(..., backward=a functor)",
    ),
    (
        "gradient and out=",
        lambda f: f(ones(3, requires_grad=True), ones(3), alpha=1.0, out=ones(3)),
        GradientError,
        "out= does not support automatic differentiation, but one of the inputs requires grad",
    ),
    (
        "out= of two",
        lambda f: f(ones(3), ones(3), alpha=1.0, out=(ones(3), ones(3))),
        ArgumentError,
        "out= has 2 tensors for 1 outputs",
    ),
]
IDS = [bad[0] for bad in BAD_CALLS]


@pytest.mark.cpu
@pytest.mark.parametrize(("what", "call", "kind", "message"), BAD_CALLS, ids=IDS)
def test_bad_call(what: str, call: Callable[[Any], Any], kind: type, message: str, axpy: fuser.JitFunction) -> None:
    # Twice, then a right call: an error leaves nothing behind.
    for _ in range(2):
        with pytest.raises(kind) as caught:
            call(axpy)
        assert str(caught.value) == message
        assert type(caught.value) is kind
    assert axpy(ones(3), ones(3), alpha=2.0).tolist() == [3, 3, 3]


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (FunctorError, ValueError), (ArgumentError, TypeError), (ShapeError, RuntimeError), (DeviceError, RuntimeError),
        (GroupError, ValueError), (GradientError, RuntimeError), (CompileError, RuntimeError),
    ],
)  # fmt: skip
def test_errors_are_the_builtins_that_a_caller_expects(kind: type, builtin: type) -> None:
    assert issubclass(kind, builtin)
    assert issubclass(kind, FuserError)


@pytest.mark.cpu
def test_shape_error_has_torchs_wording(axpy: fuser.JitFunction) -> None:
    for left, right in (((3,), (4,)), ((2, 3, 4), (2, 1, 5)), ((5, 0), (4, 1, 2)), ((0,), (2,))):
        with pytest.raises(RuntimeError) as torchs:
            torch.add(ones(*left), ones(*right))
        with pytest.raises(ShapeError) as own:
            axpy(ones(*left), ones(*right), alpha=1.0)
        assert str(torchs.value) in str(own.value)
        assert str(own.value).startswith("axpy: ")


@pytest.mark.cpu
def test_shape_error_inside_a_group_names_the_functor_that_met_it() -> None:
    f, g = fuser.create_jit_fn(AXPY, alpha=1.0), fuser.create_jit_fn(AXPY.replace("axpy", "second"), alpha=1.0)
    fused = fuser.fuse(lambda x, y, z: g(f(x, y), z))
    with pytest.raises(ShapeError, match=r"^second: The size of tensor a \(3\)"):
        fused(ones(3), ones(3), ones(4))
    assert fused(ones(3), ones(3), ones(3)).tolist() == [3, 3, 3]


@pytest.mark.cpu
def test_an_error_writes_nothing(axpy: fuser.JitFunction) -> None:
    out = torch.full((3,), 7.0)
    for call in (
        lambda: axpy(ones(2), ones(3), alpha=1.0, out=out),
        lambda: axpy(ones(3), ones(3), out=out),
        lambda: axpy(ones(3), ones(3), alpha=1j, out=out),
        lambda: axpy(ones(3), ones(3, dtype=torch.complex64), alpha=1.0, out=out),
    ):
        with pytest.raises(FuserError):
            call()
        assert out.tolist() == [7, 7, 7]


# ---- functors that do not compile ----


def compile_on(room: str, fn: fuser.JitFunction, count: int = 1) -> CompileError:
    """Return the error that a room raises for a functor of ``count`` tensors."""
    if room == "cpu":
        with pytest.raises(CompileError) as caught:
            fn(*[ones(3)] * count)
        return caught.value
    from fuser.cuda.backend import compile_cubin

    ((spec, args),) = planner.plan_texts(fn.spec(count), [ones(3)] * count, torch.device("cuda"))
    with pytest.raises(CompileError) as caught:
        compile_cubin(build_kernel_source(spec, args), "sm_90")
    return caught.value


ROOMS = [pytest.param("cpu", marks=pytest.mark.cpu), pytest.param("cuda", marks=pytest.mark.nvrtc)]
# Text, tensors, outputs; line, column and a word of the message; g++ and NVRTC agree on the place.
BROKEN = [
    ("// first\ntemplate <typename T>\nT f(T x) {\n  T y = undeclared(x);\n  return y;\n}", 1, 1, 4, "undeclared"),
    ("template <typename T> T f(T x) { return x.member; }", 1, 1, 1, "class type"),
    ("template <typename T> T f(T x, T y) { int* p = x; return y; }", 2, 1, 1, "int"),
    ("// Größe\ntemplate <typename T> T f(T x, T& a, T& b) { a = x; b = missing_name; }", 1, 2, 2, "missing_name"),
]


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize(("code", "count", "outputs", "line", "word"), BROKEN)
def test_compile_error_points_at_the_users_line(
    room: str, code: str, count: int, outputs: int, line: int, word: str
) -> None:
    error = compile_on(room, fuser.jit_fn(code, num_outputs=outputs), count)
    first = error.diagnostics[0]
    assert (first.functor, first.line, first.severity) == ("f", line, "error")
    assert word in first.message
    text = code.splitlines()[line - 1]
    lines = str(error).splitlines()
    assert lines[0].startswith("functor 'f' does not compile (")
    assert ("NVRTC" in lines[0]) == (room == "cuda")
    assert lines[1] == f"line {line}, column {first.column}: error: {first.message}"
    assert lines[2] == f"{line:5d} | {text}"
    # The caret is at a word of the user's line, not past it.
    assert lines[3].index("^") - lines[3].index("|") - 2 == first.column - 1 < len(text)


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize(
    ("code", "outputs"),
    [
        ("template <typename T> T f(T x) { return undeclared_name; }", 1),
        ("template <typename T> T f(T x) { /* Größe ≤ 中 */ return undeclared_name; }", 1),
        ("template <typename T> T f(T x, T& a, T& b) { a = x; b = undeclared_name; }", 2),
    ],
)
def test_compile_error_points_at_the_users_column(room: str, code: str, outputs: int) -> None:
    first = compile_on(room, fuser.jit_fn(code, num_outputs=outputs)).diagnostics[0]
    assert first.column == code.index("undeclared_name") + 1


@pytest.mark.parametrize("room", ROOMS)
def test_compile_error_is_short_and_keeps_the_rest(room: str) -> None:
    body = "\n".join(f"  x += unknown_{index}(x);" for index in range(40))
    error = compile_on(room, fuser.create_jit_fn(f"template <typename T> T f(T x) {{\n{body}\n  return x;\n}}"))
    message = str(error)
    assert len(message.splitlines()) <= MAX_MESSAGE_LINES == 20
    assert "whole log is in this error's .log" in message
    assert len(error.diagnostics) >= 40
    # No generated text in the message, all of it in the attributes.
    for generated in ("fuser_element", "fuser_args", "fuser_kernel", "fuser_f0", "#line", "namespace"):
        assert generated not in message
    for generated in ("fuser_element", "fuser_args", "namespace fuser_f0"):
        assert generated in error.source
    assert error.source.splitlines()[0].lstrip().startswith("1 | ")
    assert "unknown_39" in error.log
    assert "-std=c++17" in error.options


@pytest.mark.parametrize("room", ROOMS)
def test_an_error_that_points_nowhere_into_the_text_still_says_something(room: str) -> None:
    # The entry is fine by itself and cannot be called as it is declared.
    error = compile_on(room, fuser.create_jit_fn("template <typename T, typename U> U f(T x) { return x; }"))
    assert str(error).startswith("the kernel of f does not compile (")
    assert len(str(error).splitlines()) >= 2
    assert "fuser_" not in str(error)


@pytest.mark.cpu
def test_a_broken_functor_leaves_its_group_and_others_alone() -> None:
    good = fuser.create_jit_fn("template <typename T> T good(T x) { return x + 1; }")
    bad = fuser.create_jit_fn("template <typename T> T bad(T x) { return undeclared_name(x); }")
    fused = fuser.fuse(lambda x: bad(good(x)))
    for _ in range(2):
        with pytest.raises(CompileError) as caught:
            fused(ones(2))
        assert [item.functor for item in caught.value.diagnostics] == ["bad"]
        assert good(ones(2)).tolist() == [2, 2]


@pytest.mark.cpu
def test_check_reports_what_a_call_would() -> None:
    bad = fuser.create_jit_fn("template <typename T> T bad(T x) {\n return undeclared_name; }")
    with pytest.raises(CompileError, match="line 2, column 9: "):
        bad.check(device="cpu")
    fuser.create_jit_fn(AXPY, alpha=1.0).check(device="cpu")


def test_a_scalar_between_tensors_that_are_left_out() -> None:
    code = "template <typename T> T f(T x, T y = T(1), T alpha = T(2)) { return x * y + alpha; }"
    with pytest.raises(ArgumentError, match="takes 2 tensors, got 1"):
        fuser.jit_fn(code, scalars={"alpha": 3.0})(torch.ones(3))


def test_an_unknown_scalar_that_is_a_tensor(axpy: fuser.JitFunction) -> None:
    with pytest.raises(ArgumentError, match="has no scalar 'beta'"):
        axpy(ones(3), ones(3), beta=torch.tensor(1.0))
