"""A mistake of fuser's own does not stop its user: the call runs in eager torch, and a script shows the mistake."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fuser
from fuser import planner
from fuser.config import config
from fuser.errors import FallbackWarning

pytestmark = pytest.mark.cpu
TEXT = "template <typename T> T reported(T x, T y, T alpha) { return x * alpha + y; }"


# Raises without a frame of its own, as code of fuser's would.
MISTAKE = {}.__getitem__
SAYS = "TypeError: dict.__getitem__() takes exactly one argument"


def call(function: fuser.JitFunction, x: torch.Tensor) -> torch.Tensor:
    return function(x, x.t(), alpha=2.5)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(5, 5)


def test_the_call_runs_in_eager_torch_and_a_script_shows_the_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, x: torch.Tensor
) -> None:
    function = fuser.jit_fn(TEXT, scalars=["alpha"])
    with config.patch(internal_errors="fallback", dump=str(tmp_path)), monkeypatch.context() as patch:
        patch.setattr(planner, "_plan_kernels", MISTAKE)
        with pytest.warns(FallbackWarning, match="fuser failed") as caught:
            got = call(function, x)
    assert torch.equal(got, x * 2.5 + x.t())
    (script,) = tmp_path.glob("reproduce-*.py")
    assert f"fuser failed ({SAYS}" in str(caught[0].message)
    assert f"python {script} shows it" in str(caught[0].message)
    # Where the mistake is, it is shown; where it is not, the call returns something.
    broken = "import runpy; from fuser import planner; planner._plan_kernels = {}.__getitem__; "
    program = f"{broken}runpy.run_path({str(script)!r})"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    for command, status, words in (([str(script)], 0, "tensor("), (["-c", program], 1, SAYS)):
        done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        assert words in done.stdout + done.stderr
        assert re.search(r"reported\(v0, v1, alpha=v2\)", done.stdout)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint64, torch.float8_e8m0fnu, torch.complex32])
def test_the_script_makes_tensors_of_every_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    function = fuser.jit_fn("template <typename T> T same(T x) { return x; }")
    with config.patch(internal_errors="fallback", dump=str(tmp_path)), monkeypatch.context() as patch:
        patch.setattr(planner, "_plan_kernels", MISTAKE)
        with pytest.warns(FallbackWarning, match="fuser failed"):
            function(torch.ones(3, 4).to(dtype)[:, 1:])
    (script,) = tmp_path.glob("reproduce-*.py")
    # The script changes settings.
    with config.patch(internal_errors="fallback"):
        runpy.run_path(str(script))


def test_the_script_writes_where_the_call_did_and_under_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[Any]()
    names = {
        "__name__": "fuser.planner",
        "see": lambda out: seen.append((out, torch.get_default_dtype(), config.cpu_math)),
    }
    exec("def fail(spec, inputs, out, *_): see(out); raise LookupError", names)
    monkeypatch.setattr(planner, "_plan_kernels", names["fail"])
    function = fuser.jit_fn("template <typename T> void both(T x, T& a, T& b) { a = x; b = -x; }", num_outputs=2)
    out = torch.empty(4, 3).t(), torch.empty(3, 4, dtype=torch.float64)
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float64)
    settings = config.patch(internal_errors="fallback", dump=str(tmp_path), cpu_math="precise")
    with settings, pytest.warns(FallbackWarning, match="fuser failed"):
        function(torch.ones(3, 4), out=out)
    monkeypatch.undo()
    monkeypatch.setattr(planner, "_plan_kernels", names["fail"])
    (script,) = tmp_path.glob("reproduce-*.py")
    before = torch.get_default_dtype()
    try:
        with config.patch(internal_errors="fallback", cpu_math="fast", cxx=None), pytest.raises(LookupError):
            runpy.run_path(str(script))
    finally:
        torch.set_default_dtype(before)
    assert seen[0] == seen[1]


def test_a_mistake_is_reported_once_whatever_is_in_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, x: torch.Tensor
) -> None:
    # Of a call with other sizes, and a file whose name is no UTF-8.
    names = {"__name__": "fuser.planner"}
    exec("def fail(spec, inputs, *_): raise ValueError(f'{inputs[0].shape} of \\udcff')", names)
    monkeypatch.setattr(planner, "_plan_kernels", names["fail"])
    function = fuser.jit_fn(TEXT, scalars=["alpha"])
    parts = [x[:size, :size] for size in (1, 2, 5)]
    fuser.reset_stats()
    settings = config.patch(internal_errors="fallback", dump=str(tmp_path))
    with settings, pytest.warns(FallbackWarning, match="fuser failed") as caught:
        got = [call(function, part) for part in parts]
    assert all(torch.equal(made, part * 2.5 + part.t()) for made, part in zip(got, parts, strict=True))
    assert [len(caught), len(list(tmp_path.iterdir()))] == [1, 1]
    assert list(fuser.stats()["fallbacks"].values()) == [3]


@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), torch.OutOfMemoryError("no memory"), MemoryError()])
def test_what_is_no_mistake_of_fusers_leaves(
    error: Exception, monkeypatch: pytest.MonkeyPatch, x: torch.Tensor
) -> None:
    def give_up(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(planner, "_plan_kernels", give_up)
    with config.patch(internal_errors="fallback"), pytest.raises(type(error)):
        call(fuser.jit_fn(TEXT, scalars=["alpha"]), x)


def test_a_mistake_can_be_let_out(monkeypatch: pytest.MonkeyPatch, x: torch.Tensor) -> None:
    monkeypatch.setattr(planner, "_plan_kernels", MISTAKE)
    with config.patch(internal_errors="raise"), pytest.raises(TypeError, match="exactly one argument"):
        call(fuser.jit_fn(TEXT, scalars=["alpha"]), x)
