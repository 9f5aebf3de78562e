"""What goes wrong outside of the user's text: a right result, eager torch with its reason or a typed error; no hang."""

from __future__ import annotations

import gc
import itertools
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import timeit
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fuser
from fuser import compiler, disk_cache, planner
from fuser.config import config
from fuser.cpu import backend as cpu_backend
from fuser.cpu import prelude as cpu_prelude
from fuser.cpu.backend import CpuBackend, find_compiler
from fuser.cpu.fused_kernel import CpuKernel
from fuser.cuda.backend import compile_cubin
from fuser.disk_cache import CacheKey
from fuser.errors import (
    CompileError,
    CompilerFailedError,
    CompilerNotFoundError,
    FallbackError,
    FunctorError,
    GradientError,
)
from fuser.fx import backend
from fuser.kernel_source import KernelSource

ROOT = Path(__file__).parents[1]
MACROS = "".join(f"#define A{number + 1} (A{number} + 1)\n" for number in range(2000))
_numbers = itertools.count()

pytestmark = pytest.mark.filterwarnings("ignore::fuser.errors.FallbackWarning")


def new_functor(body: str = "return x + T({number});") -> fuser.JitFunction:
    """Return a functor whose text no test had before."""
    number = next(_numbers)
    return fuser.jit_fn(f"template <typename T> T failing{number}(T x) {{ {body.replace('{number}', str(number))} }}")


def outcome(fn: fuser.JitFunction) -> tuple[int, list[str]]:
    """Call a functor that multiplies by three; return the number of launches and the reasons for eager torch."""
    fuser.reset_stats()
    assert fn(torch.ones(3)).tolist() == [3, 3, 3]
    return fuser.stats()["launches"], list(fuser.stats()["fallbacks"])


@pytest.fixture
def make_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """Return a function that makes a shell script the compiler; it runs as the real one once it is ``repaired``."""
    real = find_compiler(config.cxx).command[0]
    monkeypatch.setitem(config.__dict__, "cache_dir", str(tmp_path / "cache"))

    def make(body: str) -> Path:
        path = write_compiler(tmp_path / "compiler", body, real)
        config.cxx = str(path)
        return path

    before = config.cxx
    yield make
    config.cxx = before


def write_compiler(path: Path, body: str, real: str) -> Path:
    head = f'if [ "$1" = --version ] || [ -e "$0.repaired" ]; then exec {real} "$@"; fi'
    path.write_text(f"#!/bin/sh\n{head}\n{body.replace('REAL', real)}\n")
    path.chmod(0o755)
    return path


def repair(path: Path) -> None:
    path.with_name(f"{path.name}.repaired").touch()


# ---- compilers that fail ----

# What a compiler does, and what the reason says of it.
BROKEN = {
    "killed": ("kill -9 $$", "it was ended by SIGKILL"),
    "interrupted": ("kill -2 $$", "it was ended by SIGINT"),
    "ended by a signal without a name": ("kill -40 $$", "it was ended by signal 40"),
    "silent": ("exit 1", "exit status 1"),
    "no output": ("exit 0", "it wrote none"),
    "no UTF-8": (r"printf 'error: \377\376\n'; exit 1", "exit status 1: error: ��"),
    "no UTF-8 and no output": (r"printf '\377\n'", "it wrote none: �"),
    "garbage": ('while [ "$1" != -o ]; do shift; done; echo garbage > "$2"', "file too short"),
    "for another C library": (
        'REAL "$@"; while [ "$1" != -o ]; do shift; done; sed -i s/GLIBC_2[.]/GLIBC_9./g "$2"',
        "not found (required by it)",
    ),
    "for a library that is gone": (
        'REAL "$@"; while [ "$1" != -o ]; do shift; done; sed -i s/libc[.]so[.]6/libc.so.9/g "$2"',
        "cannot be loaded: libc.so.9: cannot open shared object file",
    ),
    "an empty file": ('while [ "$1" != -o ]; do shift; done; : > "$2"', "it wrote none"),
    "reads stdin": ("cat; exit 1", "exit status 1"),
    "crashes": ("echo 'f:1:1: internal compiler error: Segmentation fault'; exit 4", "internal compiler error"),
    "crashes, and says where": (
        "echo 'f:1:1: error: unrecognizable insn:'; echo 'f:1:1: internal compiler error: in insn'; exit 1",
        "unrecognizable insn",
    ),
    "disk full": (
        "echo 'failing:1:1: error: bad'; echo '/t/ccAb12Cd.s: No space left on device'; exit 1",
        "exit status 1: /t/...: No space left on device",
    ),
    "largest file": ('ulimit -f 1; exec REAL "$@"', "File size limit exceeded"),
    "too many files": ('ulimit -n 5; exec REAL "$@"', "Too many open files"),
    "out of memory": ('ulimit -v 20000; exec REAL "$@"', ""),
    "no assembler": ('PATH=/nonexistent exec "$(command -v REAL)" "$@"', "cannot execute 'as'"),
}


@pytest.mark.cpu
@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", BROKEN)
def test_a_compiler_that_fails_is_tried_again(name: str, make_compiler: Callable[[str], Path]) -> None:
    body, reason = BROKEN[name]
    path = make_compiler(body)
    fn, jump, x = new_functor("return x * T(3);"), new_functor("goto end; end: return x;"), torch.ones(3)
    fuser.reset_stats()
    for calls in (1, 2):
        before = fuser.stats()["compiles"]
        assert fn(x).tolist() == [3, 3, 3]
        assert fuser.stats()["compiles"] > before
        ((said, count),) = fuser.stats()["fallbacks"].items()
        assert count == calls
        assert said.startswith((f"{path} made no kernel: ", "the shared object cannot be loaded: "))
        assert reason in said
    with pytest.raises(CompilerFailedError, match=re.escape(said)):
        fn.check()
    with pytest.raises(FallbackError, match=rf"{re.escape(said)}.* has no eager version"):
        jump(x)
    repair(path)
    fuser.reset_stats()
    assert fn(x).tolist() == [3, 3, 3]
    assert jump(x).tolist() == [1, 1, 1]
    assert (fuser.stats()["launches"], fuser.stats()["fallbacks"]) == (2, {})


@pytest.mark.cpu
def test_a_compiler_that_breaks_on_a_right_text_need_not_vectorise(make_compiler: Callable[[str], Path]) -> None:
    make_compiler(
        'case "$*" in *-fno-tree-vectorize*) exec REAL "$@";; esac; '
        "echo 'failing:1:1: internal compiler error: in insn'; exit 1"
    )
    fuser.reset_stats()
    assert new_functor("return x * T(3);")(torch.ones(3)).tolist() == [3, 3, 3]
    assert (fuser.stats()["launches"], fuser.stats()["fallbacks"]) == (1, {})


@pytest.mark.cpu
def test_threads_that_wait_for_a_compiler_get_its_failure(make_compiler: Callable[[str], Path]) -> None:
    make_compiler("sleep 0.5; kill -9 $$")
    fn, x = new_functor("return x * T(3);"), torch.ones(3)
    fuser.reset_stats()
    with ThreadPoolExecutor(8) as pool:
        assert all(item.tolist() == [3, 3, 3] for item in pool.map(fn, [x] * 8))
    assert sum(fuser.stats()["fallbacks"].values()) == 8
    # Not one attempt for each thread.
    assert fuser.stats()["compiles"] <= 2


@pytest.mark.cpu
def test_a_diagnosis_is_remembered_until_failures_are_cleared(make_compiler: Callable[[str], Path]) -> None:
    path = make_compiler("echo 'failing:1:1: error: no such thing' >&2; exit 1")
    fn, x = new_functor(), torch.ones(3)
    messages = set()
    for _ in range(3):
        with pytest.raises(CompileError, match="no such thing") as caught:
            fn(x)
        messages.add(str(caught.value))
    assert len(messages) == 1
    repair(path)
    with pytest.raises(CompileError):
        fn(x)
    fuser.clear_failures()
    expected = new_functor("return x;")(x) + (next(_numbers) - 2)
    assert torch.equal(fn(x), expected)


# As near as a machine without clang comes: a compiler that says it is clang, and gets clang's options.
LIKE_CLANG = """#!/bin/bash
[ "$1" = --version ] && exec echo "clang, or what stands in for it"
for word; do case $word in -Wsometimes*|-Wreturn-stack*|-Winteger*|-ferror*) ;; *) words+=("$word") ;; esac; done
exec g++ "${words[@]}"
"""
# Texts, and what the compiler or the linker says of them.
DIAGNOSED = {
    "never defined": (
        "template <typename T> T nowhere(T x);\ntemplate <typename T> T failing(T x) { return nowhere<T>(x); }",
        r"undefined (reference to|symbol).*nowhere",
    ),
    "fatal": (
        "template <int n> struct Deep { static constexpr int v = Deep<n + 1>::v; };\n"
        "template <typename T> T failing(T x) { return x + Deep<0>::v; }",
        r"line 1, column .* instantiation (depth )?exceed",
    ),
}


@pytest.mark.cpu
@pytest.mark.parametrize("name", DIAGNOSED)
@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_what_compiler_and_linker_say_of_the_text_is_remembered(compiler: str, name: str, tmp_path: Path) -> None:
    text, said = DIAGNOSED[name]
    command = shutil.which(compiler) or tmp_path / compiler
    if isinstance(command, Path):
        command.write_text(LIKE_CLANG)
        command.chmod(0o755)
    fn = fuser.jit_fn(text)
    with config.patch(cxx=str(command)):
        before = fuser.stats()["compiles"]
        for _ in range(2):
            with pytest.raises(CompileError, match=said):
                fn(torch.ones(3))
        assert fuser.stats()["compiles"] == before + 1


@pytest.mark.cpu
def test_a_compiler_that_comes_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fn, x, path = new_functor("return x * T(3);"), torch.ones(3), os.environ["PATH"]
    fuser.reset_stats()
    monkeypatch.setitem(config.__dict__, "cxx", None)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert fn(x).tolist() == [3, 3, 3]
    monkeypatch.setenv("PATH", path)
    # Not at once: to look for it takes longer than most calls.
    assert fn(x).tolist() == [3, 3, 3]
    assert list(fuser.stats()["fallbacks"].values()) == [2]
    time.sleep(planner.SEARCH_S)
    assert fn(x).tolist() == [3, 3, 3]
    assert fuser.stats()["launches"] == 1


# ---- how the compiler is named ----


@pytest.mark.cpu
@pytest.mark.parametrize("blank", ["", "   ", "\t\n"])
def test_a_blank_cxx_is_none(blank: str) -> None:
    with config.patch(cxx=blank):
        assert config.cxx is None
        assert find_compiler(config.cxx).version


@pytest.mark.cpu
def test_cxx_is_words_or_a_path(tmp_path: Path) -> None:
    real = find_compiler(None).command[0]
    wrapper = tmp_path / "my cache's wrapper"
    wrapper.write_text('#!/bin/sh\nexec "$@"\n')
    compiler = tmp_path / "-my compiler"
    compiler.write_text(f'#!/bin/sh\nexec {real} "$@"\n')
    for path in (wrapper, compiler):
        path.chmod(0o755)
    quoted = str(wrapper).replace("'", r"\'").replace(" ", r"\ ")
    commands = {
        f"env {real}": ("env", real),
        f"{quoted} {real} -DFAILING='1 2'": (str(wrapper), real, "-DFAILING=1 2"),
        f'"{compiler}" -O1': (str(compiler), "-O1"),
        str(compiler): (str(compiler),),
    }
    for command, words in commands.items():
        with config.patch(cxx=command):
            assert find_compiler(config.cxx).command == words
            assert new_functor("return x * T(3);")(torch.ones(3)).tolist() == [3, 3, 3]


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("g++ '", "No closing quotation"),
        ("/nonexistent/g++ -O2", "CXX='/nonexistent/g\\+\\+ -O2' does not run"),
        ("false", "false --version: exit status 1"),
        ("''", "does not run"),
        ("g++\0", "does not run"),
        ("\ud800", "does not run"),
        (str(ROOT), "does not run"),
    ],
)
def test_a_cxx_that_is_no_compiler(command: str, reason: str) -> None:
    with pytest.raises(CompilerNotFoundError, match=reason):
        find_compiler(command)


@pytest.mark.cpu
@pytest.mark.parametrize(
    "options", ["-fdiagnostics-color=always", "-fmessage-length=40", "-fvisibility=hidden", "-Wall -Wextra -Werror"]
)
def test_options_in_cxx_that_are_for_people_or_libraries(options: str) -> None:
    unused = new_functor("T unused = x; return x * T(3);")
    broken = new_functor("return not_declared_anywhere;")
    with config.patch(cxx=f"{find_compiler(config.cxx).command[0]} {options}"):
        assert outcome(unused) == (1, [])
        with pytest.raises(CompileError) as caught:
            broken.check()
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.line == 1
    assert "'not_declared_anywhere' was not declared" in diagnostic.message


# ---- folders ----


@pytest.mark.cpu
@pytest.mark.parametrize("name", ["-Wl,-x", "with spaces", "@file", "a:b;$(x)'\"", "\udcff\udcfe", "ü"])
def test_names_of_folders(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Relative, so that the name comes first.
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir()
    monkeypatch.setattr("tempfile.tempdir", name)
    monkeypatch.setenv("TMPDIR", name)
    with config.patch(cache_dir=name):
        assert outcome(new_functor("return x * T(3);")) == (1, [])


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Return a function that mounts a file system in memory with some options."""
    folder = tmp_path / "mounted"
    folder.mkdir()

    def mount(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount: {done.stderr.strip()}")
        return folder

    yield mount
    subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=False)


@pytest.mark.cpu
@pytest.mark.filterwarnings("ignore::fuser.errors.CacheWarning")
def test_a_full_file_system(mount: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = mount("size=64k")
    filler = folder / "filler"
    with pytest.raises(OSError, match="No space left"):
        filler.write_bytes(bytes(1 << 20))
    with config.patch(cache_dir=str(folder / "cache")):
        # The cache alone is full.
        assert outcome(new_functor("return x * T(3);")) == (1, [])
        monkeypatch.setattr("tempfile.tempdir", str(folder))
        fn = new_functor("return x * T(3);")
        launches, (reason,) = outcome(fn)
        assert launches == 0
        assert re.search(r"made no kernel: .*(No space left on device|exit status)", reason)
        filler.unlink()
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        assert outcome(fn) == (1, [])


@pytest.mark.cpu
def test_a_file_system_without_programs(mount: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = mount("noexec")
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    with config.patch(cache_dir=str(folder / "cache")):
        # The checked bytes are loaded, not a file.
        assert outcome(new_functor("return x * T(3);")) == (1, [])
        monkeypatch.delattr("os.memfd_create")
        launches, (reason,) = outcome(new_functor("return x * T(3);"))
        assert launches == 0
        assert reason.startswith("the shared object cannot be loaded: ")


@pytest.mark.cpu
@pytest.mark.filterwarnings("ignore::fuser.errors.CacheWarning")
def test_limits_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    fn = new_functor("return x * T(3);")
    for limit, value, reason in (
        (resource.RLIMIT_FSIZE, 0, "File too large"),
        (resource.RLIMIT_NOFILE, 3, "Too many open files"),
    ):
        soft, hard = resource.getrlimit(limit)
        resource.setrlimit(limit, (value, hard))
        try:
            launches, (said,) = outcome(fn)
        finally:
            resource.setrlimit(limit, (soft, hard))
        assert launches == 0
        assert said.endswith(f"made no kernel: {reason}")
    monkeypatch.setattr("tempfile.tempdir", "/nonexistent")
    launches, (said,) = outcome(fn)
    assert launches == 0
    assert said.endswith("made no kernel: No such file or directory")
    monkeypatch.undo()
    assert outcome(fn) == (1, [])


# ---- texts ----


@pytest.mark.cpu
def test_long_and_deep_texts() -> None:
    x = torch.ones(3)
    total = new_functor(f"return x{' + x' * 2000};")
    assert total(x).tolist() == [2001] * 3
    y = torch.ones(3, requires_grad=True)
    assert torch.autograd.grad(total(y).sum(), y)[0].tolist() == [2001] * 3
    nested = new_functor(f"return {'(' * 2000}x{')' * 2000};")
    assert nested(x).tolist() == [1] * 3
    with pytest.raises(GradientError, match="nested this deeply"):
        nested(y)
    increase = new_functor("return x + T(1);")

    @fuser.fuse
    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2000):
            x = increase(x)
        return x

    fuser.reset_stats()
    assert chain(x).tolist() == [2001] * 3
    assert fuser.stats()["fallbacks"] == {}


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        ("template <typename T> T f(T x) {\n  /* \ud800 */ return x; }", 2, 6),
        ("template <typename T> T f(T \udfff) { return x; }", 1, 29),
        (f"template <typename T> T f(T x) {{ return {'(' * 1500}x +{')' * 1500}; }}", None, None),
        (f"{MACROS}template <typename T> T f(T x) {{ return A2000; }}", None, None),
    ],
    ids=["surrogate", "surrogate in a name", "error inside", "macros"],
)
def test_texts_that_cannot_be_read(text: str, line: int | None, column: int | None) -> None:
    with pytest.raises(FunctorError, match=r"surrogate|too deeply") as caught:
        fuser.create_jit_fn(text)
    assert (caught.value.line, caught.value.column) == (line, column)


@pytest.mark.cpu
def test_words_of_the_text_are_no_words_of_the_machine() -> None:
    wrong = new_functor('static_assert(sizeof(T) == 9, "out of memory"); return x;')
    for _ in range(2):
        with pytest.raises(CompileError, match="out of memory"):
            wrong(torch.ones(2))


def load(source: KernelSource, image: bytes) -> CpuKernel:
    return CpuBackend().load(source, CacheKey.build(("loaded",), ("tests",)), image)


# What catches errors of the system, of the loader or of CUDA: calls that take some milliseconds, made from a kernel and
# its shared object.
CATCHING: dict[str, Callable[[KernelSource, bytes], object]] = {
    "loading": lambda source, image: load(source, image),
    "finding an entry": lambda source, image: disk_cache._find(new_entry(image), partial(load, source)),
    "writing": lambda source, image: disk_cache.write(CacheKey.build(("written",), ("tests",)), image),
    "tidying": lambda source, image: tidy(),
    "waiting for a turn": lambda source, image: take_turn(),
    "running a compiler": lambda source, image: cpu_backend.build_image(source),
    "finding a compiler": lambda source, image: cpu_backend._find_compiler.__wrapped__(config.cxx, os.environ["PATH"]),
    "planning for other sizes": lambda source, image: call_two_sizes(),
    "asking the machine": lambda source, image: ask_often(cpu_backend.host_identity, cpu_prelude._libmvec),
}
# Of Python's library: some others ignore every OSError themselves.
PASSES_ALL_ON = {"contextlib", "ctypes"}


class ExpiredError(ConnectionError):
    """A library's own, without a number."""


@pytest.fixture
def torch_functions() -> Iterator[None]:
    """Torch's overrides as they were: who is interrupted on the way out of a ``with`` leaves them switched off."""
    before = torch._C._get_torch_function_state()
    yield
    # Contexts that were left open end when what holds them is gone.
    gc.collect()
    torch._C._set_torch_function_state(before)


@pytest.mark.cpu
@pytest.mark.usefixtures("torch_functions")
@pytest.mark.parametrize("name", CATCHING)
def test_what_a_signal_handler_raises_is_never_lost(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = itertools.cycle([TimeoutError, OSError, ExpiredError, ProcessLookupError, RuntimeError])
    raised: list[Exception] = []
    # Python loses, and says so, what is raised while it clears a generator away.
    ignored: list[BaseException | None] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: ignored.append(lost.exc_value))

    def handle(_: int, frame: FrameType | None) -> None:
        module = str(frame.f_globals["__name__"]) if frame else ""
        if not module.startswith("fuser.") and module not in PASSES_ALL_ON:
            # Later than this handler ends, also where others are busy: else it would interrupt itself.
            signal.setitimer(signal.ITIMER_REAL, 1e-4)
            return
        raised.append(next(kinds)("mine"))
        raise raised[-1]

    source = kernel_source(new_functor(), "cpu")
    caught: list[Exception] = []
    before = signal.signal(signal.SIGALRM, handle)
    try:
        with config.patch(cache_dir=str(tmp_path)):
            image = cpu_backend.build_image(source)
            usual_s = min(timeit.repeat(lambda: CATCHING[name](source, image), number=1, repeat=5))
            for place in range(600):
                # Where a machine is busy the times differ, and a quick call ends before most of its alarms.
                if place > 59 and len(raised) > 9:
                    break
                try:
                    signal.setitimer(signal.ITIMER_REAL, usual_s * (place % 60 + 1) / 60)
                    CATCHING[name](source, image)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except Exception as error:
                    caught.append(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(raised) > 9
    assert len(caught) >= len(raised) - 1
    assert set(map(id, caught + ignored)) == set(map(id, raised))


class Alarm:
    """A signal handler that raises, and what calls it."""

    def __call__(self, *_: Any) -> None:
        raise TimeoutError("mine")

    def ring(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that is interrupted when it is called first."""
        left = [signal.SIGALRM]

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            if left:
                signal.raise_signal(left.pop())
            return function(*args, **kwargs)

        return interrupted


@pytest.fixture(params=["function", "method", "object"])
def alarm(request: pytest.FixtureRequest) -> Iterator[Alarm]:
    made = Alarm()
    handlers = {"function": lambda *_: made(), "method": made.__call__, "object": made}
    before = signal.signal(signal.SIGALRM, handlers[request.param])
    yield made
    signal.signal(signal.SIGALRM, before)


@pytest.mark.cpu
def test_what_a_signal_handler_raises_leaves_a_trace(alarm: Alarm, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x) * 2
        return y + 3 if y.dtype == torch.float32 else y

    def train(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.sin(x), -1) * 2

    x = torch.randn(3, 4)
    monkeypatch.setattr(FakeTensorMode, "from_tensor", alarm.ring(FakeTensorMode.from_tensor))
    monkeypatch.setattr(backend, "split_passes", alarm.ring(backend.split_passes))
    fuser.reset_stats()
    for function, leaf in ((ask, x), (train, x.clone().requires_grad_())):
        fused = fuser.fuse(function)
        with pytest.raises(TimeoutError, match="mine"):
            fused(leaf)
        torch.testing.assert_close(fused(leaf), function(leaf))
    assert not fuser.stats()["fallbacks"]


@pytest.mark.nvrtc
@pytest.mark.parametrize("error", [TimeoutError, RuntimeError])
def test_what_a_signal_handler_raises_leaves_nvrtc(error: type[Exception]) -> None:
    def handle(*_: object) -> None:
        raise error("mine")

    def compile_many() -> None:
        for _ in range(100):
            source = kernel_source(new_functor())
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            compile_cubin(source, "sm_90")

    before = signal.signal(signal.SIGALRM, handle)
    try:
        with pytest.raises(error, match=r"^mine$") as raised:
            compile_many()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert type(raised.value) is error


def call_two_sizes() -> None:
    # The second is planned on symbols, too.
    config.touch()
    for rows in (2, 3):
        SIZED(torch.ones(rows, 40), torch.ones(40))


SIZED = fuser.create_jit_fn("template <typename T> T sized(T x, T y) { return x * y; }")


def new_entry(image: bytes) -> CacheKey:
    key = CacheKey.build(("found",), ("tests",))
    entry = disk_cache.cache_folder() / f"{key.wanted}-{key.maker}"
    if not entry.exists():
        disk_cache.write(key, image)
    return key


def tidy() -> None:
    folder = disk_cache.cache_folder()
    os.close(disk_cache._open_lock(folder))
    for number in range(50):
        (folder / f"{disk_cache.TEMPORARY}{number}").mkdir(exist_ok=True)
        os.utime(folder / f"{disk_cache.TEMPORARY}{number}", (0, 0))
    os.utime(folder / disk_cache.LOCK, (0, 0))
    disk_cache._tidy(folder, 1)


def ask_often(*questions: Any) -> None:
    for question in questions * 20:
        question.__wrapped__()


def take_turn() -> None:
    for _ in range(50):
        with disk_cache._turn(CacheKey.build(("turn",), ("tests",))):
            pass


def kernel_source(fn: fuser.JitFunction, device: str = "cuda") -> KernelSource:
    ((part, args),) = planner.plan_texts(fn.spec(1), [torch.empty(3, device="meta")], torch.device(device))
    return compiler.build_kernel_source(part, args)
