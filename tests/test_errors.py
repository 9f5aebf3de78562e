"""Bad input: a clear error that names functor, argument and place, and nothing half-made after it."""

from __future__ import annotations

import copy
import functools
import pickle
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fuser
from fuser import counters, log, planner
from fuser.compiler import build_kernel_source
from fuser.config import SETTINGS, Config
from fuser.cpu.backend import Compiler, compiler_flags, parse_gcc_log
from fuser.errors import (
    MAX_MESSAGE_LINES,
    ArgumentError,
    CompileError,
    DeviceError,
    Diagnostic,
    FunctorError,
    FunctorWarning,
    FuserError,
    GradientError,
    GroupError,
    NotDifferentiableError,
    ShapeError,
    TracingError,
    UnsupportedError,
    UntranslatableError,
)

AXPY = "template <typename T> T axpy(T x, T y, T alpha) { return alpha * x + y; }"
# No eager version, and so no derivative, can be derived from it.
ADD = "template <typename T> T add(T a, T b) { return a + b; }"
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
        "a complex number for a real parameter",
        lambda f: f(ones(3), ones(3), alpha=1j),
        ArgumentError,
        "axpy(x, y, *, alpha): T alpha takes no complex number, with tensors of torch.float32",
    ),
    (
        "no tensor but a list",
        lambda f: f(ones(3), [1.0], alpha=1.0),
        ArgumentError,
        "axpy: y must be a tensor or a Python number, got list; torch.as_tensor makes a tensor of it",
    ),
    (
        "a numpy array",
        lambda f: f(ones(3), np.ones(3), alpha=1.0),
        ArgumentError,
        "axpy: y must be a tensor or a Python number, got numpy.ndarray; torch.as_tensor makes a tensor of it",
    ),
    (
        "None",
        lambda f: f(ones(3), None, alpha=1.0),
        ArgumentError,
        "axpy: y must be a tensor or a Python number, got None",
    ),
    (
        "a list in a fused function",
        lambda f: fuser.fuse(lambda a, b: f(a, b, alpha=2.0))(ones(3), [1.0]),
        ArgumentError,
        "axpy: y must be a tensor or a Python number, got list; torch.as_tensor makes a tensor of it",
    ),
    (
        "a scalar by position",
        lambda f: f(ones(3), ones(3), 2.0),
        ArgumentError,
        "axpy(x, y, *, alpha) takes 2 tensors, got 3 arguments; scalars are given by name: alpha=2.0",
    ),
    (
        "a scalar with a slip",
        lambda f: f(ones(3), ones(3), alhpa=1.0),
        ArgumentError,
        "axpy(x, y, *, alpha) has no scalar 'alhpa'; did you mean 'alpha'?",
    ),
    (
        "a tensor by name",
        lambda f: f(ones(3), y=ones(3), alpha=1.0),
        ArgumentError,
        "axpy(x, y, *, alpha) has no scalar 'y'; give tensors by position",
    ),
    (
        "an array as out=",
        lambda f: f(ones(3), ones(3), alpha=1.0, out=np.ones(3)),
        ArgumentError,
        "axpy: out= takes tensors, got numpy.ndarray",
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
        "an integer that Python does not write out",
        lambda f: f(ones(3), 2**20_000, alpha=1.0),
        ArgumentError,
        "axpy: y, an integer of 20001 bits, does not fit in 64 bits",
    ),
    (
        "a complex number for an integer of 64 bits without a sign",
        lambda f: f(ones(3).to(torch.uint64), 1, alpha=1j),
        ArgumentError,
        "axpy(x, y, *, alpha): T alpha takes no complex number, with tensors of torch.uint64",
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
        "axpy: out= does not support automatic differentiation, but one of the inputs requires grad",
    ),
    (
        "out= of two",
        lambda f: f(ones(3), ones(3), alpha=1.0, out=(ones(3), ones(3))),
        ArgumentError,
        "axpy: out= has 2 tensors for 1 outputs",
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


# What jit_fn is called with, the class, the whole message.
BAD_CREATIONS: list[tuple[tuple[Any, ...], dict[str, Any], type[FuserError], str]] = [
    ((123,), {}, ArgumentError, "a functor is made of its C++ text, a str; got int"),
    ((AXPY.encode(),), {}, ArgumentError, "a functor is made of its C++ text, a str; got bytes"),
    (([AXPY],), {}, ArgumentError, "a functor is made of its C++ text, a str; got list"),
    ((AXPY,), {"num_outputs": 1.0}, ArgumentError, "num_outputs must be an int, got float"),
    (
        (AXPY,),
        {"out_dtypes": "float64"},
        ArgumentError,
        "axpy: out_dtypes takes torch's dtypes, such as torch.float64; got 'float64'",
    ),
    (
        (AXPY,),
        {"out_dtypes": [float]},
        ArgumentError,
        "axpy: out_dtypes takes torch's dtypes, such as torch.float32; got <class 'float'>",
    ),
    ((AXPY,), {"out_dtypes": [torch.half] * 2}, ArgumentError, "axpy: 2 out_dtypes for 1 outputs"),
    (
        (AXPY,),
        {"scalars": "alpha"},
        ArgumentError,
        "scalars must be a list of names, or a dict of names and default values, got 'alpha'",
    ),
    (
        (AXPY,),
        {"scalars": ["alhpa"]},
        FunctorError,
        "axpy has no parameter 'alhpa' (its parameters are x, y, alpha); did you mean 'alpha'?",
    ),
    (
        (AXPY.replace("alpha", "out"),),
        {"scalars": ["out"]},
        ArgumentError,
        "a scalar cannot be called 'out': out= of a call says where the result goes; rename it",
    ),
    ((AXPY,), {"fallback": 3}, ArgumentError, "fallback must be a function of the tensors and scalars, got int"),
    ((AXPY,), {"backward": AXPY}, ArgumentError, "backward must be a function made by jit_fn, got str"),
]


@pytest.mark.parametrize(("args", "options", "kind", "message"), BAD_CREATIONS)
def test_bad_creation(args: tuple[Any, ...], options: dict[str, Any], kind: type, message: str) -> None:
    with pytest.raises(kind) as caught:
        fuser.jit_fn(*args, **options)
    assert str(caught.value) == message
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (3, "fuse takes a Python function or a module, got a value of type int"),
        (torch.nn.SiLU, "fuse takes a Python function or a module, got the class SiLU: give an instance, or a method"),
        (torch.sin, "fuse takes a Python function or a module, got sin; wrap it: lambda x: sin(x)"),
        (
            functools.partial(torch.add, alpha=2),
            "fuse takes a Python function or a module, got a functools.partial; wrap it: lambda x: add(x, ...)",
        ),
        (
            functools.partial(lambda x: x),
            "fuse takes a Python function or a module, got a functools.partial; wrap it: lambda x: f(x, ...)",
        ),
        (classmethod(ones), "fuse takes the function below @classmethod: write @classmethod above @fuser.fuse"),
        (staticmethod(ones), "fuse takes the function below @staticmethod: write @staticmethod above @fuser.fuse"),
    ],
)
def test_what_cannot_be_fused(item: Any, message: str) -> None:
    with pytest.raises(TypeError) as caught:
        fuser.fuse(item)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (
            fuser.register_fusion,
            "a FusionGroup is wanted, got fuser.jit_function.JitFunction; of a functor that is fn.spec(",
        ),
        (lambda f: fuser.debug_get_fused_kernel_code(f, [ones(3)]), "a FusionGroup is wanted, got fuser."),
        (lambda f: fuser.debug_launch_graph({"f": f}, [ones(3)]), "a FusionGroup is wanted, got dict; "),
        (
            lambda f: fuser.run_fusion(fuser.register_fusion(f.spec(2).group), ones(3)),
            "the inputs of a group are a list, got torch.Tensor",
        ),
    ],
)
def test_what_is_no_group(use: Callable[[Any], Any], message: str, axpy: fuser.JitFunction) -> None:
    with pytest.raises(ArgumentError) as caught:
        use(axpy)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "the group takes 3 inputs (a, b, factor), got 0"),
        ([ones(3)], "the group takes 3 inputs (a, b, factor), got 1"),
        ([ones(3), ones(3), 1.0, 2.0], "the group takes 3 inputs (a, b, factor), got 4"),
        ([ones(3), None], "axpy: y must be a tensor or a Python number, got None"),
        ([ones(3), ones(3), None], "axpy: alpha must be a tensor or a Python number, got None"),
        ([ones(3), ones(3), ones(1)], "axpy: alpha has shape [1], not []"),
    ],
)
def test_wrong_inputs_of_a_group(given: list[Any], message: str, axpy: fuser.JitFunction) -> None:
    builder = fuser.GroupBuilder()
    a, b = builder.add_input("a"), builder.add_input("b")
    factor = builder.add_input("factor", is_scalar=True, default=1.0)
    key = fuser.register_fusion(builder.build(builder.apply(axpy.function, [a, b], [factor])))
    with pytest.raises(ArgumentError) as caught:
        fuser.run_fusion(key, given)
    assert str(caught.value) == message


def test_what_cannot_be_explained() -> None:
    takes = "explain takes a fused function, functor, graph module or group, got "
    for item, message in (
        (3, "int"),
        (torch.nn.SiLU(), "torch.nn.modules.activation.SiLU; fuser.fuse or torch.compile makes one of it"),
    ):
        with pytest.raises(TypeError) as caught:
            fuser.explain(item)
        assert str(caught.value) == takes + message


@pytest.mark.parametrize(
    "given",
    [(ones(3), ones(4)), (ones(3), "1"), (ones(3), ones(3, device="meta")), (1, 2)],
    ids=["shapes", "kinds", "devices", "no tensor"],
)
def test_what_a_call_raises_explain_raises_too(given: tuple[Any, ...], axpy: fuser.JitFunction) -> None:
    group = axpy.spec(2).group
    with pytest.raises(fuser.errors.FuserError) as expected:
        axpy(*given, alpha=1.0)
    for explain in (lambda: fuser.explain(axpy, *given), lambda: fuser.explain(group, *given, 1.0)):
        with pytest.raises(type(expected.value)) as caught:
            explain()
        assert str(caught.value) == str(expected.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: f(ones(2, 3), 1), "add(x) takes 1 tensor, got 2 arguments; dim is given by name: dim=1"),
        (lambda f: f(ones(2, 3), axis=1), "add(x) has no scalar 'axis'; did you mean 'dim'?"),
        (lambda f: f(ones(2, 3), keepdims=True), "add(x) has no scalar 'keepdims'; did you mean 'keepdim'?"),
    ],
)
def test_dimensions_of_a_reduction_as_elsewhere(call: Callable[[Any], Any], message: str) -> None:
    total = fuser.create_reduction_fn("template <typename T> T add(T a, T b) { return a + b; }", identity=0)
    with pytest.raises(ArgumentError) as caught:
        call(total)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda f: fuser.jit_fn("template <typename T> void twice(T& x) { x = x + x; }")(ones(3)),
            TypeError,
            "twice() has no tensor to work on: T& x is written to, and a tensor is read as T x",
        ),
        (lambda f: fuser.override_can_fuse_on_cpu("no"), TypeError, "fusion is switched by a bool, got str"),
        (lambda f: fuser.override_can_fuse_on_gpu(1), TypeError, "fusion is switched by a bool, got int"),
        (lambda f: fuser.autotune(3), TypeError, "autotune takes what launches kernels, such as a fused function; got"),
        (lambda f: fuser.warmup(3, ones(3)), TypeError, "warmup takes a function that calls functors, got int"),
        (
            lambda f: fuser.warmup(torch.relu, ones(3)),
            TypeError,
            "warmup takes a function that calls functors, got <built-in method relu",
        ),
        (
            lambda f: f.warmup(ones(3), ones(3), alpha=1.0, dynamic_shapes=3),
            TypeError,
            "dynamic_shapes takes a dict or a sequence, got int",
        ),
        (
            lambda f: f.warmup(ones(3), ones(3), alpha=1.0, dynamic_shapes=[None, None, None]),
            TypeError,
            "dynamic_shapes has 3 items, for 2 arguments by position",
        ),
        (
            lambda f: f.warmup(ones(3), ones(3), alpha=1.0, dynamic_shapes={"x": {4: None}}),
            TypeError,
            "dynamic_shapes: x has no dimension 4",
        ),
        (lambda f: fuser.Dim(3, 1, 2), TypeError, "Dim: the name must be a str, got int (3)"),  # type: ignore[arg-type]
        (lambda f: fuser.differentiable(3, f), TypeError, "differentiable: forward must be a function, got int"),
        (lambda f: fuser.differentiable(f, None), TypeError, "differentiable: backward must be a function, got None"),
        (
            lambda f: fuser.differentiable(f, f, num_grad_inputs="all"),
            TypeError,
            "differentiable: num_grad_inputs must be an int, got str",
        ),
        (
            lambda f: fuser.differentiable(f, f, save_for_backward=1),
            TypeError,
            "differentiable: save_for_backward must be a list of names or slots, got int",
        ),
        (
            lambda f: fuser.debug_get_fused_kernel_code(f.spec(2).group, [ones(3), ones(3), 1.0], device="tpu"),
            TypeError,
            'device must be "cpu" or "cuda", got \'tpu\'',
        ),
        (
            lambda f: fuser.debug_get_fused_kernel_code(f.spec(2).group, [ones(3), ones(3), 1.0], device="cuda:x"),
            TypeError,
            'device must be "cpu" or "cuda", got \'cuda:x\'',
        ),
        (lambda f: fuser.fx.FusionPass(numerics="loose"), ValueError, "FusionPass: numerics='loose': must be one of"),
        (lambda f: fuser.fx.FusionPass(fuel=-1), TypeError, "FusionPass: fuel must be a number of groups, got -1"),
        (lambda f: fuser.fx.fuse_graph(f), TypeError, "a torch.fx.GraphModule, as torch.fx.symbolic_trace"),
        (
            lambda f: fuser.fx.fuse_graph(torch.fx.symbolic_trace(torch.nn.ReLU()), [ones(3), ones(3)]),
            TypeError,
            "example_inputs is a list of 1 (input), got 2",
        ),
        (lambda f: fuser.GroupBuilder().apply(f, []), TypeError, "a Function is wanted, such as a functor's"),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[Any], Any], kind: type, message: str, axpy: Any) -> None:
    with pytest.raises(kind) as caught:
        call(axpy)
    assert str(caught.value).startswith(message)
    assert isinstance(caught.value, fuser.errors.FuserError)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_plans", 0, "must be an integer of 1 or more"),
        ("max_plans", 2.5, "must be an integer of 1 or more"),
        ("cache_size", "2GB", "must be an integer of 1 or more"),
        ("fuel", -1, "must be an integer of 0 or more"),
        ("disk_cache", "maybe", "must be a bool (0 or 1)"),
        ("autotune", "", "must be a bool (0 or 1)"),
        ("numerics", "loose", "must be one of strict, fast"),
        ("cache_dir", 3, "must be a text or a path, or None"),
        ("dump", b"/tmp", "must be a text or a path, or None"),
        ("cxx", False, "must be a text or a path, or None"),
        ("cxx", "g++ \0", "no path has a NUL in it"),
        ("cache_dir", "a\0b", "no path has a NUL in it"),
        (
            "cache_dir",
            "a\ud800",
            "'utf-8' codec can't encode character '\\ud800' in position 1: surrogates not allowed",
        ),
        ("lock_timeout", None, "must be a positive number of seconds"),
        ("compile_timeout", "long", "must be a positive number of seconds"),
        ("logs", 3, "must be a text or names of artifacts"),
        ("logs", [1], "must be a text or names of artifacts"),
    ],
)
def test_a_value_that_a_setting_does_not_take(name: str, value: Any, message: str) -> None:
    before = getattr(fuser.config, name)
    with pytest.raises(ValueError, match=f"fuser.config.{name}=") as caught:
        setattr(fuser.config, name, value)
    assert str(caught.value) == f"fuser.config.{name}={value!r}: {message}"
    assert getattr(fuser.config, name) == before


def test_a_blank_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in SETTINGS:
        monkeypatch.setenv(setting.env, " ")
    settings = Config()
    assert {item.name: getattr(settings, item.name) for item in SETTINGS} == {
        item.name: item.default for item in SETTINGS
    }


def test_a_setting_cannot_be_deleted() -> None:
    with pytest.raises(AttributeError, match=r"fuser.config.max_plans cannot be deleted; its default is 1024"):
        del fuser.config.max_plans
    with pytest.raises(AttributeError, match="has no setting 'plans'"):
        del fuser.config.plans  # type: ignore[attr-defined]
    assert fuser.config.max_plans == 1024
    with fuser.config.patch(cache_dir=Path("some/where")):
        assert fuser.config.cache_dir == "some/where"


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda item: pickle.loads(pickle.dumps(item))])
@pytest.mark.parametrize(
    "error",
    [
        FunctorError("wrong", 2, 7),
        NotDifferentiableError("a bit cast", (2, 7), "bits"),
        NotDifferentiableError("a bit cast"),
        UntranslatableError("goto end;", 1, 1, "goto"),
        TracingError("branches", "file.py", 3, "if x > 0:"),
        CompileError(
            "wrong", diagnostics=[Diagnostic("f", 1, 2, "error", "what")], source="a\nb", options="-O", log="c"
        ),
        UnsupportedError("no kernel", application=3, is_expected=True),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_of_other_processes_say_the_same(duplicate: Callable[[Any], Any], error: FuserError) -> None:
    # As those of a pool's workers and of a DataLoader's.
    error = copy.copy(error)
    error.add_note("while loading batch 3")
    again = duplicate(error)
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda item: pickle.loads(pickle.dumps(item))])
def test_the_settings_of_a_process_are_one_object(duplicate: Callable[[Any], Any]) -> None:
    assert duplicate(fuser.config) is fuser.config
    assert duplicate([fuser.config])[0] is fuser.config


def test_patches_that_overlap_leave_nothing() -> None:
    def patched(**values: Any) -> Iterator[None]:
        with fuser.config.patch(**values):
            yield

    first, second, third = patched(numerics="fast"), patched(numerics="fast", max_plans=7), patched(max_plans=9)
    for block in (first, second, third):
        next(block)
    assert next(first, None) is None
    assert (fuser.config.numerics, fuser.config.max_plans) == ("fast", 9)
    assert next(second, None) is None
    assert (fuser.config.numerics, fuser.config.max_plans) == ("strict", 9)
    assert next(third, None) is None
    assert (fuser.config.numerics, fuser.config.max_plans) == ("strict", 1024)


def test_threads_that_change_settings_leave_what_is_known_of_the_last_ones() -> None:
    def change(name: str, values: tuple[Any, Any]) -> None:
        for _ in range(1000):
            setattr(fuser.config, name, values[0])
            with fuser.config.patch(max_plans=7):
                setattr(fuser.config, name, values[1])

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            kinds = (("numerics", ("fast", "strict")), ("fuel", (3, None)), ("max_unrolled", (9, 256))) * 2
            list(pool.map(lambda kind: change(*kind), kinds))
    finally:
        sys.setswitchinterval(interval)
    assert (fuser.config.max_plans, fuser.config.fuel) == (1024, None)
    before = fuser.config.generation
    fuser.config.numerics = "strict"
    assert fuser.config.generation == before


def test_an_interrupt_leaves_no_setting_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fuser.config.generation
    heard = list[int]()
    monkeypatch.setattr(log, "show", Mock(side_effect=KeyboardInterrupt))
    fuser.config.listeners.append(heard.append)
    try:
        with pytest.raises(KeyboardInterrupt):
            fuser.config.logs = "launch"
        assert fuser.config.generation == heard[-1] != before
    finally:
        fuser.config.listeners.remove(heard.append)
        monkeypatch.undo()
        fuser.config.logs = None


def test_a_setting_that_there_is_not() -> None:
    message = "fuser.config has no setting 'numeric'; it has numerics, cpu_math, "
    for use in (
        lambda: setattr(fuser.config, "numeric", "fast"),
        lambda: fuser.config.numeric,
        lambda: fuser.config.patch(numeric="fast").__enter__(),
    ):
        with pytest.raises(AttributeError) as caught:
            use()
        assert str(caught.value).startswith(message)
        assert str(caught.value).endswith("; did you mean 'numerics'?")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpu"}, 'axpy(x, y, alpha): device must be "cpu" or "cuda", got \'gpu\''),
        ({"device": "cuda:x"}, 'axpy(x, y, alpha): device must be "cpu" or "cuda", got \'cuda:x\''),
        ({"device": 1.5}, 'axpy(x, y, alpha): device must be "cpu" or "cuda", got 1.5'),
        ({"dtype": "float32"}, "axpy(x, y, alpha): dtype must be one of torch's, such as torch.float32; got 'float32'"),
    ],
)
def test_a_check_for_what_there_is_not(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        fuser.jit_fn(AXPY).check(**options)
    assert str(caught.value) == message


@pytest.mark.cpu
def test_a_scalar_may_have_any_other_name_of_pythons() -> None:
    names = ["self", "tensors", "scalars", "lambda", "args"]
    code = (
        f"template <typename T> T f(T x, {', '.join(f'T {name}' for name in names)}) {{ return {' + '.join(names)}; }}"
    )
    values = {name: 10.0**power for power, name in enumerate(names)}
    assert fuser.jit_fn(code, scalars=names)(ones(2), **values).tolist() == [11111, 11111]
    assert fuser.create_jit_fn(code, **values)(ones(2)).tolist() == [11111, 11111]


# ---- what a traceback shows ----


@pytest.mark.cpu
@pytest.mark.parametrize(
    "call",
    [
        lambda: fuser.jit_fn("nothing"),
        lambda: fuser.create_jit_fn("template <typename T> T f(T x) { return x }")(ones(2)),
        lambda: fuser.create_jit_fn("template <typename T> T f(T x) { return undeclared(x); }")(ones(2)),
        lambda: fuser.create_jit_fn("template <typename T> T f(T x) { return undeclared(x); }").check(device="cpu"),
        lambda: fuser.create_jit_fn("template <typename T> T f(T x) { return undeclared(x); }")(
            ones(2, requires_grad=True)
        ),
        lambda: fuser.fuse(lambda x: fuser.create_jit_fn(AXPY)(x, x))(ones(2)),
        lambda: fuser.run_fusion(fuser.register_fusion(JUMP.spec(1).group), [None]),
        lambda: JUMP(ones(2, requires_grad=True)),
        lambda: fuser.fuse(3),  # type: ignore[call-overload]
        lambda: fuser.fuse(lambda x, y: x + y)(ones(2)),
        lambda: fuser.fuse(lambda x, y: x + y)(ones(2), z=ones(2)),
        lambda: fuser.fuse(lambda x, *more, y: x + y)(ones(2)),
        lambda: fuser.fuse(lambda x, y: x + y).warmup(ones(2)),
        lambda: fuser.create_reduction_fn(ADD, identity=0)(ones(2), dim=3),
        lambda: fuser.create_reduction_fn(ADD, identity=0)("text"),
        lambda: fuser.explain(3),
        lambda: fuser.autotune(3),  # type: ignore[arg-type]
        lambda: fuser.differentiable(JUMP, 3),  # type: ignore[arg-type]
        lambda: fuser.override_can_fuse_on_cpu("no"),  # type: ignore[arg-type]
        lambda: fuser.debug_get_fused_kernel_code(JUMP.spec(1).group, [], device="cpu"),
        lambda: fuser.FusionGroup.from_json("{"),
        lambda: fuser.fx.fuse_graph(3),  # type: ignore[arg-type]
        lambda: fuser.load_cache(__file__),
    ],
)
def test_no_frame_of_fusers_own_is_shown(call: Callable[[], Any]) -> None:
    own = (str(Path(fuser.__file__).parent), "pass_base.py")

    def shown() -> set[str]:
        with pytest.raises(FuserError) as caught:
            call()
        lines = "".join(traceback.format_exception(caught.value))
        return {word for word in own if word in lines}

    assert shown() == set()
    with fuser.config.patch(full_tracebacks=True):
        assert shown()


@pytest.mark.cpu
def test_the_users_own_frames_stay_between_fusers() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return fuser.create_jit_fn("nothing")(x)

    with pytest.raises(FunctorError) as caught:
        fuser.fuse(lambda x: inner(x))(ones(2))
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names == ["test_the_users_own_frames_stay_between_fusers", "<lambda>", "inner"]


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
def test_a_group_that_reads_a_view_that_is_none_says_so() -> None:
    def joined(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).reshape(2, 12, 10) * 2 + y

    inputs = [torch.ones(2, 4, 6, 5), torch.ones(12, 1)]
    traced = make_fx(joined, tracing_mode="fake")(*inputs)
    fuser.fx.FusionPass()(traced)
    (module,) = traced.children()
    with pytest.raises(UnsupportedError, match="view size is not compatible") as raised:
        planner.plan_texts(module.spec, [*inputs, 2, 1], None)
    # Else who walks along the causes never comes to an end, as the public functions do.
    assert raised.value.__cause__ is not raised.value
    with pytest.raises(UnsupportedError, match="view size is not compatible"):
        fuser.debug_get_fused_kernel_code(module.group, [*inputs, 2, 1])


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
    ('#line 70 "other"\ntemplate <typename T> T f(T x) {\n# 3\n return undeclared(x); }', 1, 1, 4, "undeclared"),
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
        ("\ttemplate <typename T> T f(T x) {\treturn x +\tundeclared_name; }", 1),
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


# Texts whose error is in the prelude, in one of its macros or in a template; the line, and what is under the caret.
ELSEWHERE = [
    ("template <typename T> T f(T x) {\n  NAN = x; return x; }", 2, "NAN", "NAN"),
    ("template <typename T> T f(T x) {\n  return x + std::INFINITY; }", 2, "INFINITY", "INFINITY"),
    ("#define FAR (INFINITY = 3)\ntemplate <typename T> T f(T x) {\n return x + FAR; }", 1, "INFINITY", ""),
    (
        "struct S { float v; };\ntemplate <typename U> U mid(U a) { return std::clamp(a, a, a); }\n"
        "template <typename T> T f(T x) {\n  return mid(S{x}).v; }",
        2,
        "(a, a, a); }",
        "clamp(a, a, a); }",
    ),
]


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize(("code", "line", "on_cpu", "on_cuda"), ELSEWHERE)
def test_an_error_in_the_prelude_points_at_what_came_to_it(
    room: str, code: str, line: int, on_cpu: str, on_cuda: str
) -> None:
    error = compile_on(room, fuser.create_jit_fn(code))
    (first,) = error.diagnostics
    under = on_cpu if room == "cpu" else on_cuda
    # NVRTC points at where a macro of the functor's own stands.
    line = line if under else 3
    assert (first.functor, first.line) == ("f", line)
    assert code.splitlines()[line - 1][first.column - 1 :].startswith(under)
    assert str(error).startswith("functor 'f' does not compile (")


# As clang 14 writes them.
CLANG_ELSEWHERE = """\
kernel.cpp:190:12: error: invalid operands to binary expression ('const fuser_f0::S' and 'const fuser_f0::S')
  return v < lo ? lo : hi < v ? hi : v;
functor0.f:2:46: note: in instantiation of function template specialization 'std::clamp<fuser_f0::S>' requested here
functor0.f:4:10: note: in instantiation of function template specialization 'fuser_f0::mid<fuser_f0::S>' requested here
fuser_kernel:3:5: note: in instantiation of function template specialization 'fuser_f0::f<float>' requested here"""


def test_clangs_error_in_the_prelude_points_at_what_came_to_it() -> None:
    message = "invalid operands to binary expression ('const fuser_f0::S' and 'const fuser_f0::S')"
    found = parse_gcc_log(CLANG_ELSEWHERE, {"functor0.f"})
    assert found == [Diagnostic("functor0.f", 2, 46, "error", message)]


# A body, and the message and the text under the caret, on each side.
SLIPS = [
    ("return tanhh (x);", "did you mean 'tanh'?", "tanhh"),
    ("return std::logp1(x);", "did you mean 'log1p'?", "logp1"),
    ("T value = x; return vlaue;", "did you mean 'value'?", "vlaue"),
    ("return exp<T>(x, x);", "exp", "exp"),
    ("return quux(x);", "quux", "quux"),
]


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize(("body", "message", "name"), SLIPS)
def test_an_unknown_name_is_shown_with_the_nearest_known_one(room: str, body: str, message: str, name: str) -> None:
    code = f"template <typename T> T f(T x) {{\n  {body} }}"
    first = compile_on(room, fuser.create_jit_fn(code)).diagnostics[0]
    assert message in first.message
    assert ("did you mean" in first.message) == ("did you mean" in message)
    assert code.splitlines()[1][first.column - 1 :].startswith(name)


# A body, and what the message adds: written as elsewhere.
HABITS = [
    ("return x ** 2;", "pow(a, b) is the power"),
    ("return x**2;", "pow(a, b) is the power"),
    ("return x ^ 2;", "pow(a, b) is the power"),
    ("return x % 2;", "fmod(a, b) is the remainder of floats"),
    ("return x % T(2);", "fmod(a, b) is the remainder of floats"),
    ("return torch::tanh(x);", "a functor calls C++'s functions: exp(x), pow(x, y)"),
    ("return tl.exp(x);", "a functor calls C++'s functions: exp(x), pow(x, y)"),
    ("return std::sigmoid(x);", "write 1 / (1 + exp(-x))"),
    ("return relu(x);", "write x > 0 ? x : T(0)"),
    ("return std::max(x, 0);", "it takes one type: std::max(x, T(0))"),
    ("return std::clamp(x, 0, 1);", "it takes one type: std::clamp(x, T(0), T(1))"),
    ("return x[0];", "a parameter is the value of one element, and has no others"),
    ("return half(x);", "T is float for half and bfloat16 tensors, and is rounded where it is stored"),
    # Names of the functor's own mean what they mean.
    ("T at = x; int* half = at; return at;", ""),
]


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize(("body", "hint"), HABITS)
def test_what_is_written_as_elsewhere_is_answered(room: str, body: str, hint: str) -> None:
    error = compile_on(room, fuser.create_jit_fn(f"template <typename T> T f(T x) {{ {body} }}"))
    assert error.diagnostics[0].message.endswith(f"; {hint}" if hint else error.diagnostics[0].message)
    assert hint or "; " not in error.diagnostics[0].message


@pytest.mark.cpu
def test_threads_are_no_elements() -> None:
    function = fuser.create_jit_fn("template <typename T> T f(T x) { return x * threadIdx.x; }")
    with pytest.raises(
        CompileError, match=r"one element; jit_fn\(..., index=\) names a parameter that gets its number"
    ):
        function.check(device="cpu")


# A body, whether NVRTC warns too, a word of the message, what the caret is under on the CPU, and with NVRTC.
UNDEFINED = [
    ("T y; return y + x;", True, "uninitialized", "y + x", "y + x"),
    ("T y; if (x > 0) y = x; return y;", False, "uninitialized", "y; if", ""),
    ("int s[4]; for (int i = 0; i <= 4; ++i) s[i] = i; return s[2] + x;", False, "undefined", "= i; ret", ""),
    ("return x + (1 << 40);", True, "shift", "<< 40", "40"),
    ("return x + 2147483647 * 2;", True, "2", "* 2", "* 2"),
]


def warned_by(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert all(item.filename == __file__ for item in caught if item.category is FunctorWarning)
    return [str(item.message) for item in caught if item.category is FunctorWarning]


@pytest.mark.cpu
@pytest.mark.parametrize(("body", "word", "under"), [(item[0], *item[2:4]) for item in UNDEFINED])
def test_undefined_behaviour_is_shown_once(body: str, word: str, under: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "_warned", set())
    code = f"// ä\ntemplate <typename T> T doubtful(T x) {{\n {body} }}"
    fn = fuser.create_jit_fn(code)
    with fuser.config.patch(disk_cache=False):
        first = warned_by(lambda: fn(ones(300)))[0].splitlines()
        assert not warned_by(lambda: (fn(ones(300)), fn(ones(3, 3).t(), out=ones(3, 3)), fn(ones(9).double())))
    assert first[0].startswith("functor 'doubtful': line 3, column ")
    assert word in first[0]
    assert first[1] == f"    3 |  {body} }}"
    assert first[1][first[2].index("^") :].startswith(under)


# As clang 14 writes them, and one of the notes below them.
CLANG_LOG = """\
functor0.f:1:4: warning: variable 'y' is used uninitialized whenever 'if' condition is false [-Wsometimes-uninitialized]
functor0.f:7:27: note: in instantiation of function template specialization 'f<float>' requested here
functor0.f:2:53: warning: reference to stack memory associated with local variable 'y' returned [-Wreturn-stack-address]
functor0.f:3:61: warning: array index 3 is past the end of the array (which contains 3 elements) [-Warray-bounds]
functor0.f:3:71: warning: shift count >= width of type [-Wshift-count-overflow]
functor0.f:3:83: warning: shift count is negative [-Wshift-count-negative]
functor0.f:3:104: warning: overflow in expression; result is -2147483648 with type 'int' [-Winteger-overflow]
functor0.f:4:50: warning: variable 'y' is uninitialized when used here [-Wuninitialized]
functor0.f:5:55: warning: non-void function does not return a value in all control paths [-Wreturn-type]
functor0.f:6:41: warning: unused variable 'z' [-Wunused-variable]"""


def test_clang_is_asked_for_the_warnings_that_are_shown() -> None:
    warned = re.findall(r"^functor0\.f:(\d+):(\d+): warning: (.*) \[(.*)\]$", CLANG_LOG, re.MULTILINE)[:-1]
    shown = [Diagnostic("functor0.f", int(row), int(column), "warning", said) for row, column, said, _ in warned]
    assert parse_gcc_log(CLANG_LOG, {"functor0.f"}) == shown
    flags = compiler_flags(Compiler(("clang++",), "Debian clang version 14.0.6", ("",)), "strict")
    assert {option for *_, option in warned} == {flag for flag in flags if re.match("-W(?!no)", flag)}


@pytest.mark.nvrtc
@pytest.mark.parametrize(("body", "under"), [(item[0], item[4]) for item in UNDEFINED if item[1]])
def test_undefined_behaviour_is_shown_for_cuda(body: str, under: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from fuser.cuda.backend import compile_cubin

    monkeypatch.setattr(counters, "_warned", set())
    fn = fuser.create_jit_fn(f"template <typename T> T doubtful(T x) {{\n {body} }}")
    ((spec, args),) = planner.plan_texts(fn.spec(1), [ones(3)], torch.device("cuda"))
    source = build_kernel_source(spec, args)
    head, line, caret = warned_by(lambda: compile_cubin(source, "sm_90"))[0].splitlines()
    assert head.startswith("functor 'doubtful': line 2, column ")
    assert line[caret.index("^") :].startswith(under)


@pytest.mark.cpu
def test_what_is_defined_warns_of_nothing() -> None:
    bodies = [
        "unsigned u = -1; unsigned char c = 300; int big = 0x80000000; return x + u + c + big;",
        "T y; T z = 1; if (x > 0) { y = 1; z = 2; } if (x > 0) z += y; return z;",
        "T best; for (int i = 0; i < 4; ++i) { if (i == 0 || x * i > best) best = x * i; } return best;",
        "T inf = T(1) / T(0); return x + inf - inf + 1.0 / 0.0;",
        "T a[3] = {1}; int k = x; return a[k & 1];",
    ]
    with fuser.config.patch(disk_cache=False):
        for body in bodies:
            fn = fuser.create_jit_fn(f"template <typename T> T fine(T x) {{ {body} }}")
            assert not warned_by(lambda fn=fn: fn(ones(300)))


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


@pytest.mark.nvrtc
def test_a_check_for_cuda_needs_no_device() -> None:
    bad = fuser.create_jit_fn("template <typename T> T f(T x) {\n  return undeclared(x);\n}")
    with pytest.raises(CompileError, match="undeclared") as caught:
        bad.check(device="cuda")
    assert caught.value.diagnostics[0].line == 2
    fuser.create_jit_fn(AXPY, alpha=1.0).check(device="cuda", dtype=torch.bfloat16)
