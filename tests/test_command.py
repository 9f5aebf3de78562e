"""``python -m fuser``: what it prints, and the status it ends with."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import fuser
from fuser.__main__ import main
from fuser.command import doctor
from fuser.cpu.backend import find_compiler
from fuser.disk_cache import list_entries

AXPY = "template <typename T> T axpy(T x, T y, T alpha) { return alpha * x + y; }"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "axpy.h"
    path.write_text(AXPY)
    return path


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, *arguments]
    return subprocess.run(line, env={**os.environ, **environment}, capture_output=True, text=True, check=False)


def test_info(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSER_NUMERIC", "fast")
    assert main(["info"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert "no setting: FUSER_NUMERIC in the environment; did you mean 'FUSER_NUMERICS'?" in told
    monkeypatch.delenv("FUSER_NUMERIC")
    assert main(["info"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"fuser {fuser.__version__}, torch ")
    assert f"installed in: {Path(fuser.__file__).parent}\nlauncher: in " in shown
    with fuser.config.patch(logs=None):
        assert not fuser.config.logs
    with fuser.config.patch(numerics="fast", logs="source"):
        assert main(["info"]) == 0
    told = capsys.readouterr().out.splitlines()[-1]
    assert "numerics='fast'" in told
    assert "cpu_math" not in told


@pytest.mark.cpu
@pytest.mark.slow
def test_demo(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for is_terminal, term in ((False, "xterm"), (True, "xterm"), (True, "dumb")):
        monkeypatch.setattr("sys.stdout.isatty", lambda is_terminal=is_terminal: is_terminal)
        monkeypatch.setenv("TERM", term)
        assert main(["demo", "--device", "cpu", "--size", "1000"]) == 0
        shown = capsys.readouterr().out
        assert "makes them, and torch.relu, 1 launch; on cpu, 1,000 float32 elements" in shown
        assert re.search(r"^fused +\d+\.\d+ ms", shown, re.MULTILINE)
        assert shown.count(": yes") == 2
        assert ("\033[1m" in shown) is (is_terminal and term != "dumb")


@pytest.mark.parametrize(("device", "word"), [("cpu", "omp parallel"), ("cuda", 'extern "C" __global__')])
def test_emit(device: str, word: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["emit", str(file), "--scalar", "alpha", "--device", device]) == 0
    shown = capsys.readouterr().out
    assert AXPY in shown
    assert word in shown


@pytest.mark.cpu
def test_check(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(file), "--scalar", "alpha", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == "axpy(x, y, *, alpha) compiles\n"
    file.write_text(AXPY.replace("+ y", "+ z"))
    assert main(["check", str(file), "--scalar", "alpha", "--device", "cpu"]) == 1
    shown = capsys.readouterr()
    assert "alpha * x + z" in shown.err
    assert not shown.out


@pytest.mark.parametrize(
    ("device", "takes"), [("cuda", r"\d+ registers, 0 bytes of spill stores"), ("cpu", "this machine\n[0-9]+ bytes")]
)
@pytest.mark.cpu
def test_show(device: str, takes: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(file), "--scalar", "alpha", "--device", device, "--dtype", "bfloat16"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"axpy(x, y, *, alpha) on torch.bfloat16, {device}\n-- kernel\nnamespace fuser_f0")
    forward, backward = shown.split("-- derivative\n")
    assert AXPY in forward
    assert "grad_x = alpha * grad_out" in backward or "grad_x = grad_out * alpha" in backward
    assert re.search(takes, forward)
    assert re.search(takes, backward)


def test_an_architecture_stands_for_cuda(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shown = []
    monkeypatch.setattr("fuser.command.show.show", lambda *given, assembly: shown.append(given[1::2]) or [])
    for options in ("--target sm_100", "--device cuda", ""):
        assert main(["show", str(file), *options.split()]) == 0
    assert shown == [("cuda", "sm_100"), ("cuda", "sm_90"), ("cpu", "sm_90")]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"fuser {fuser.__version__}\n"


@pytest.mark.cpu
def test_show_what_has_no_gradient_and_what_does_not_compile(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(file), "--scalar", "alpha", "--device", "cpu", "--dtype", "int32", "--assembly"]) == 0
    shown = capsys.readouterr().out
    assert "-- derivative\nnone: " in shown
    assert "ret" in shown.split("-- kernel: machine code\n")[1]
    file.write_text(AXPY.replace("+ y", "+ z"))
    assert main(["show", str(file), "--scalar", "alpha", "--device", "cpu"]) == 1
    shown = capsys.readouterr()
    assert "-- kernel: not compiled" in shown.out
    assert "-- derivative" in shown.out
    assert "'z' was not declared" in shown.err


@pytest.mark.cpu
def test_doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fuser.config.patch(cache_dir=str(tmp_path)):
        assert main(["doctor"]) == 0
        # What it tried is not left behind.
        assert all(path.read_bytes().startswith(b"\x7fELF") for path, _ in list_entries())
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith(("ok    ", "none  ", "      ")) for line in lines)
    names = [line[6:].split(":")[0] for line in lines if not line.startswith(" ")]
    gpus = [f"GPU {index}" for index in range(torch.cuda.device_count())] or ["GPU"]
    assert names == ["versions", "launcher", "CPU kernels", "CUDA compiler", *gpus, "kernel cache", "torch.compile"]


def test_doctor_says_what_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def crash() -> str:
        raise OSError("no room")

    monkeypatch.setattr(doctor, "_run_compiled", crash)
    with fuser.config.patch(cxx="/nowhere/g++", disk_cache=False):
        assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "none  CPU kernels: CPU kernels need a C++ compiler" in shown
    assert "      install g++ or clang++" in shown
    assert "none  kernel cache: switched off" in shown
    assert "FAILS torch.compile: no room" in shown
    # A cache that loses what is written to it.
    with fuser.config.patch(cache_dir=str(tmp_path)):
        monkeypatch.setattr(doctor, "read", lambda key: None)
        assert doctor._try("kernel cache", doctor._keep_and_find, "").works is False
        monkeypatch.undo()
    # Other tests may have been warned of it.
    monkeypatch.setattr("fuser.counters._warned", set())
    # A folder that cannot be: the finding says so, and nothing is warned of beside it.
    (tmp_path / "file").touch()
    with fuser.config.patch(cache_dir=str(tmp_path / "file")), warnings.catch_warnings():
        warnings.simplefilter("error")
        found = doctor._try("kernel cache", doctor._keep_and_find, "")
    assert found.works is False
    assert found.what == f"kernels are not kept on disk: Not a directory: {tmp_path / 'file' / 'kernels'}"


@pytest.mark.cpu
@pytest.mark.slow
def test_doctor_compiles_where_that_is_forbidden(tmp_path: Path) -> None:
    with fuser.config.patch(no_compile=True, cache_dir=str(tmp_path)):
        assert all(finding.works is not False for finding in doctor.examine())


@pytest.mark.cpu
def test_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fuser.config.patch(cache_dir=str(tmp_path), disk_cache=True):
        fuser.jit_fn("template <typename T> T for_the_cache(T x) { return x + 42; }").check(device="cpu")
        for action, words in {"path": "kernels", "list": " CPU ", "stats": "1 entries, ", "clear": "1 entries"}.items():
            assert main(["cache", action]) == 0
            shown = capsys.readouterr().out
            assert words in shown
            assert len(shown.splitlines()) == (3 if action == "stats" else 1)
        assert main(["cache", "list"]) == 0
        assert not capsys.readouterr().out
    with fuser.config.patch(disk_cache=False):
        assert main(["cache", "path"]) == 1


def test_a_cache_that_cannot_be_emptied_is_not_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = tmp_path / "kernels" / f"{'0' * 64}-{'0' * 16}"
    entry.parent.mkdir()
    entry.touch()

    with fuser.config.patch(cache_dir=str(tmp_path), disk_cache=True):
        with monkeypatch.context() as patched:
            # What refuses, as a folder that is read-only does to all but root.
            patched.setattr(os, "unlink", os.rmdir)
            assert main(["cache", "clear"]) == 1
        assert capsys.readouterr() == ("", f"{entry}: Not a directory\n")
        assert main(["cache", "clear"]) == 0
    assert ": 1 entries removed" in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, b"\xd0\xff"])
def test_a_file_that_cannot_be_read(content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "functor.h"
    if content is not None:
        path.write_bytes(content)
    assert main(["emit", str(path)]) == 1
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith(f"{path}: ")


def test_emit_several_outputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "split.h"
    path.write_text("template <typename T> void split(T x, T& low, T& high) { low = x - 1; high = x + 1; }")
    assert main(["emit", str(path), "--outputs", "2", "--device", "cpu"]) == 0
    assert "out1" in capsys.readouterr().out
    assert main(["emit", str(path), "--device", "cpu"]) == 1


def test_check_on_a_device(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = []
    monkeypatch.setattr(fuser.JitFunction, "check", lambda self, *, device=None, dtype: devices.append(device))
    for options in ([], ["--device", "cpu"], ["--device", "cuda"]):
        assert main(["check", str(file), "--scalar", "alpha", *options]) == 0
    assert devices == [None, "cpu", "cuda"]


@pytest.mark.cpu
def test_a_functor_of_integers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "odd.h"
    path.write_text("template <typename T> T odd(T n) { return n & 1; }")
    assert main(["check", str(path), "--device", "cpu"]) == 1
    assert "line 1, column " in capsys.readouterr().err
    assert main(["check", str(path), "--device", "cpu", "--dtype", "int16"]) == 0
    assert main(["emit", str(path), "--device", "cuda", "--dtype", "int16"]) == 0
    assert "const int16_t* in0" in capsys.readouterr().out


def test_info_without_a_compiler(capsys: pytest.CaptureFixture[str]) -> None:
    with fuser.config.patch(cxx="/nowhere/g++"):
        assert main(["info"]) == 0
    assert "C++ compiler: CPU kernels need a C++ compiler: CXX='/nowhere/g++' does not run" in capsys.readouterr().out


@pytest.mark.cpu
def test_a_compiler_that_says_nothing_of_its_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compiler = tmp_path / "my compiler"
    real = find_compiler(fuser.config.cxx).command[0]
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] || exec {real} "$@"\n')
    compiler.chmod(0o755)
    with fuser.config.patch(cxx=str(compiler), cache_dir=str(tmp_path / "cache")):
        assert main(["info"]) == 0
        assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert f"C++ compiler: '{compiler}'\n" in shown
    assert f"CPU kernels: '{compiler}': a kernel compiled" in shown


@pytest.mark.parametrize(
    "line",
    [
        "",
        "emit f.h --device tpu",
        "check",
        "bisect",
        "demo --size 0",
        "demo --size 9223372036854775808",
        "bench f.h --sizes -4",
        "bench f.h --seconds 0",
        "bench f.h --seconds soon",
        "show f.h --dtype float31",
        "show f.h --dtype quint8",
        "show f.h --target compute_90",
    ],
)
def test_wrong_arguments(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(line.split())
    assert error.value.code == 2
    assert "usage: python -m fuser" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("bench {file} --json /nowhere/a.json", "/nowhere: no such folder"),
        ("bench {file} --plot /nowhere/a.png", "/nowhere: no such folder"),
        ("bisect /nowhere/a.py", "/nowhere/a.py: no such script"),
        ("demo --device cuda", "torch finds no CUDA device"),
        ("bench {file} --device cuda", "torch finds no CUDA device"),
        ("demo --size 10000000000000", "can't allocate memory"),
        ("show {file} --device cpu --target sm_90", "--target sm_90 is for CUDA kernels, and --device is cpu"),
    ],
)
@pytest.mark.cpu
def test_what_cannot_be_done_is_one_line(
    line: str, told: str, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(line.format(file=file).split()) == 1
    # A torch for CUDA says once in a process that it finds no GPU.
    shown = [item for item in capsys.readouterr().err.splitlines() if "No CUDA runtime is found" not in item]
    assert len(shown) == 1
    assert told in shown[0]


@pytest.mark.parametrize("module", [("-m", "fuser"), ("-mfuser",)])
def test_a_setting_that_makes_no_sense_is_one_line(module: tuple[str, ...]) -> None:
    done = run_python("-X", "utf8", *module, "info", FUSER_NUMERICS="loose")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "FUSER_NUMERICS='loose': must be one of strict, fast\n"


def test_a_setting_that_makes_no_sense_leaves_the_import_of_a_program() -> None:
    done = run_python("-c", "try: import fuser\nexcept ValueError as error: print(error)", "-m", FUSER_NUMERICS="loose")
    assert done.stdout == "FUSER_NUMERICS='loose': must be one of strict, fast\n"


@pytest.mark.cpu
def test_a_command_needs_no_documentation_of_modules(file: Path) -> None:
    done = run_python("-OO", "-m", "fuser", "check", str(file), "--scalar", "alpha", "--device", "cpu")
    assert (done.returncode, done.stdout) == (0, "axpy(x, y, *, alpha) compiles\n")


def test_an_interrupt_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "examine", interrupt)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


# A kernel of tanh that is wrong above 100, and what it is part of.
WRONG = """
import sys, torch
from dataclasses import replace
from torch.utils._pytree import tree_leaves
from fuser.ops import OPS
from fuser.ops.table import parse_entry
right = OPS["tanh"].function
text = parse_entry("tanh", "T x", "return x > T(100) ? x : tanh(x);")
OPS["tanh"] = OPS["tanh"]._replace(make_function=lambda: replace(right, functor=text))
x = torch.linspace(-3, 3, 1000).reshape(10, 100)

def reduces(x):
    return (torch.tanh(((x + 1).relu() @ x.t() * 99).abs()) + 1).amax(1)

def lists(x):
    made = torch._foreach_tanh(torch._foreach_mul([x, x.flatten() + 90], 2.0))
    return (x + 1).cumprod(0), *made

def symbolic(x):
    return ((x + 1).relu() @ x.t() * 2).relu(), torch.tanh(x) * 2

function = globals()[sys.argv[1]]
step = torch.compile(function, backend="fuser", dynamic=function is symbolic)
for given in (x, torch.cat([x, x * 99])):
    for made, wanted in zip(tree_leaves(step(given)), tree_leaves(function(given))):
        assert torch.allclose(made, wanted, atol=1e-3, equal_nan=True)
"""


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.parametrize("case", ["reduces", "lists", "symbolic"])
def test_bisect(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    script, folder = tmp_path / 'wr\\ung """é".py', tmp_path / "it's found"
    script.write_text(WRONG)
    assert main(["bisect", "--folder", str(folder), str(script), case]) == 0
    shown = capsys.readouterr().out
    assert shlex.split(shown.splitlines()[-1]) == ["python", f"{folder}/reproduce.py", "runs", "it", "alone"]
    assert re.search(r"it passes with \d groups, and fails with this one, number \d:", shown)
    assert "tanh(" in shown
    done = subprocess.run([sys.executable, folder / "reproduce.py"], capture_output=True, text=True, check=True)
    found = [(int(count), float(apart)) for count, apart in re.findall(r"(\d+) of .* by (\S+) at most", done.stdout)]
    assert max(found)[1] > 90


# What bisect itself could stumble over on the way to tanh.
ODD = (
    WRONG.partition("def reduces")[0]
    + """
import fuser

own = fuser.jit_fn("template <typename T> T own(T x) { return x * T(60); }", fallback=lambda x: x * 60)
jump = fuser.jit_fn("template <typename T> T jump(T x) { goto end; end: return x; }")

def fallbacks(x):
    return fuser.fuse(lambda x: torch.tanh(own(x)) * 2)(x), torch.tanh(own(x)) * 2

def jumps(x):
    first, last = (lambda x: jump(x) * 60), (lambda x: torch.tanh(x) * 2)
    return fuser.fuse(last)(fuser.fuse(first)(x)), last(first(x))

def warmed(x):
    graph = torch.fx.symbolic_trace(lambda x: torch.tanh(x * 60) * 2)
    return fuser.fx.fuse_graph(graph, [x])(x), torch.tanh(x * 60) * 2

def mapped(x):
    graph = torch.fx.symbolic_trace(lambda x: torch.tanh(x * 60) * 2)
    return torch.vmap(fuser.fx.fuse_graph(graph))(x), torch.tanh(x * 60) * 2

assert torch.allclose(*globals()[sys.argv[1]](x), atol=1e-3)
"""
)


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::fuser.errors.FallbackWarning")
@pytest.mark.parametrize("case", ["fallbacks", "jumps", "warmed", "mapped"])
def test_bisect_stumbles_over_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    script, folder = tmp_path / "odd.py", tmp_path / "found"
    script.write_text(ODD)
    assert main(["bisect", "--folder", str(folder), str(script), case]) == 0
    assert "tanh(" in capsys.readouterr().out
    done = subprocess.run([sys.executable, folder / "reproduce.py"], capture_output=True, text=True, check=False)
    if case == "mapped":
        assert (done.returncode, done.stderr[:18]) == (1, "no call of it had ")
    else:
        assert float(done.stdout.split()[-3]) > 50


# A kernel of tanh that writes where nothing is.
DEADLY = """
import torch
from dataclasses import replace
from fuser.ops import OPS
from fuser.ops.table import parse_entry
right = OPS["tanh"].function
text = parse_entry("tanh", "T x", "*(volatile T*)8 = x; return x;")
OPS["tanh"] = OPS["tanh"]._replace(make_function=lambda: replace(right, functor=text))
x = torch.ones(9, 9)
torch.compile(lambda x: torch.tanh((x + 1).relu() @ x.t()) + 1, backend="fuser")(x)
"""


@pytest.mark.cpu
@pytest.mark.slow
def test_bisect_of_a_kernel_that_ends_the_process_in_another_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script, folder = tmp_path / "deadly.py", Path("found")
    script.write_text(f"import os; os.chdir('/')\n{DEADLY}")
    monkeypatch.chdir(tmp_path)
    assert main(["bisect", "--folder", str(folder), str(script)]) == 0
    shown = capsys.readouterr().out
    assert "tanh(" in shown
    assert shown.endswith("python found/reproduce.py runs it alone\n")
    module, inputs = torch.load(folder / "call.pt", weights_only=False)
    assert torch.equal(inputs[0], torch.full((9, 9), 18.0))
    assert "tanh" in module.node_names


@pytest.mark.cpu
@pytest.mark.slow
def test_bisect_of_what_no_group_makes_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, folder = tmp_path / "wrong.py", tmp_path / "found"
    script.write_text("assert False")
    assert main(["bisect", "--folder", str(folder), str(script)]) == 1
    assert capsys.readouterr().err == "the script fails without any fusion group, too: AssertionError\n"
    script.write_text("")
    assert main(["bisect", "--folder", str(folder), str(script)]) == 1
    assert capsys.readouterr().out == "the script does not fail\n"


@pytest.mark.slow
def test_bisect_leaves_folders_of_modules_where_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script, modules = tmp_path / "script.py", tmp_path / "modules"
    modules.mkdir()
    (modules / "helper.py").touch()
    script.write_text("import helper")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(modules), str(Path(fuser.__file__).parents[1])]))
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    assert main(["bisect", "--folder", str(tmp_path / "found"), str(script)]) == 1
    assert capsys.readouterr() == ("the script does not fail\n", "")


@pytest.mark.cpu
def test_bench(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = f"bench {file} --scalar alpha --device cpu --sizes 64 1000 --seconds 0.001".split()
    assert main([*command, "--dtype", "float32", "int8", "--json", str(tmp_path / "new.json")]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["dtype", "elements", "copy", "fuser", "eager", "jiterator"]
    assert [line for line in lines if "jiterator" in line] == ["  jiterator: needs a GPU"]
    told = [line.split()[:2] for line in lines if "jiterator" not in line]
    assert told == [[dtype, size] for dtype in ("float32", "int8") for size in ("64", "1,000")]
    document = json.loads((tmp_path / "new.json").read_text())
    assert document["functor"].strip() == AXPY
    assert [(row["dtype"], row["elements"], row["moved_bytes"]) for row in document["rows"]] == [
        # Scalars have no say in dtypes.
        *[("float32", size, 12 * size) for size in (64, 1000)],
        *[("int8", size, 3 * size) for size in (64, 1000)],
    ]
    assert all(row["microseconds"].keys() == {"copy", "fuser", "eager"} for row in document["rows"])
    assert all(0 < value < 1e6 for row in document["rows"] for value in row["microseconds"].values())


@pytest.mark.cpu
def test_a_dtype_is_read_as_it_is_printed(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(file), "--scalar", "alpha", "--device", "cpu", "--dtype", "torch.bfloat16"]) == 0
    assert capsys.readouterr().out.startswith("axpy(x, y, *, alpha) on torch.bfloat16, cpu")


@pytest.mark.cpu
def test_bench_has_every_dtype(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["bool", "uint16", "float8_e5m2", "float8_e8m0fnu", "complex32"]
    command = f"bench {file} --scalar alpha --device cpu --sizes 64 --seconds 0.001 --dtype {' '.join(names)}"
    assert main(command.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:] if not line.startswith(" ")] == names


def test_figures_that_cannot_be_written_are_not_measured(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != file.parent)
    for place, told in ((file.parent, "Is a directory"), (file.parent / "new.json", "Permission denied")):
        assert main(["bench", str(file), "--device", "cpu", "--json", str(place)]) == 1
        assert capsys.readouterr() == ("", f"{place}: {told}\n")


@pytest.mark.slow
def test_a_pipe_that_closes_ends_a_command_quietly() -> None:
    command = subprocess.Popen(
        [sys.executable, "-u", "-m", "fuser", "info"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert command.stdout is not None
    command.stdout.close()
    assert command.stderr is not None
    assert command.stderr.read() == b""
    assert command.wait(60) == 0


@pytest.mark.slow
def test_a_command_whose_output_is_closed() -> None:
    line = f'"{sys.executable}" -m fuser info >&-'
    done = subprocess.run(line, shell=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_full_disk_that_the_output_goes_to_is_one_line() -> None:
    # Buffered, it is found out at the end.
    line = f'env -u PYTHONUNBUFFERED "{sys.executable}" -m fuser info > /dev/full'
    done = subprocess.run(line, shell=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (1, b"[Errno 28] No space left on device\n")


@pytest.mark.slow
@pytest.mark.parametrize("locale", [{"PYTHONIOENCODING": "latin-1"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}])
def test_characters_that_the_locale_has_not(locale: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "axpy.h"
    file.write_text(f"// \u03b1x + y\n{AXPY}", encoding="utf-8")
    arguments = ("-m", "fuser", "emit", str(file), "--scalar", "alpha", "--device", "cuda")
    done = run_python(*arguments, **locale)
    assert (done.returncode, done.stderr) == (0, "")
    assert r"// \u03b1x + y" in done.stdout
