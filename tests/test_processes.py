"""Interrupts, signal handlers, forks and the end of the interpreter while kernels are compiled: nothing hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from test_failures import BROKEN, repair, write_compiler

from fuser.config import config
from fuser.cpu.backend import find_compiler

ROOT = Path(__file__).parents[1]
# No program takes a tenth of it.
HANG_S = 120.0

HEAD = """
import faulthandler, itertools, os, signal, sys, threading, time, warnings
faulthandler.dump_traceback_later({hang}, exit=True)
warnings.simplefilter("ignore")
import torch, fuser
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
folder = Path({folder!r})
numbers = itertools.count()

def new_functor():
    return fuser.jit_fn(f"template <typename T> T f{{next(numbers)}}(T x) {{{{ return x * T(3); }}}}")

def slow_once():
    # The next compile takes a minute, those after it the usual time; returns what waits until it has begun.
    (folder / "slow").touch()
    (folder / "begun").unlink(missing_ok=True)
    def wait():
        while not (folder / "begun").exists():
            time.sleep(0.01)
    return wait

def is_right(values, factor=3):
    return values.tolist() == [factor] * len(values)

x = torch.ones(3)
"""

# Reads what it can, and takes a minute where it is told to.
COMPILER = """#!/bin/sh
cat > /dev/null
if [ "$1" != --version ] && rm "{folder}/slow" 2> /dev/null; then
  sleep 60 &
  echo "$$ $!" > "{folder}/begun.new"; mv "{folder}/begun.new" "{folder}/begun"
  wait
fi
exec {real} "$@"
"""


def run_program(body: str, folder: Path, **environment: str) -> str:
    """Run a program with a compiler that can be slow; return what it printed."""
    compiler = folder / "compiler"
    compiler.write_text(COMPILER.format(folder=folder, real=find_compiler(config.cxx).command[0]))
    compiler.chmod(0o755)
    settings = {
        "FUSER_CACHE_DIR": str(folder / "cache"),
        "CXX": str(compiler),
        "PYTHONPATH": os.pathsep.join((str(ROOT), *sys.path)),
    } | environment
    program = HEAD.format(hang=HANG_S / 2, folder=str(folder)) + textwrap.dedent(body)
    # Of a group of its own: Ctrl-C is for all of a group. Its input never ends.
    input_end, other_end = os.pipe()
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | settings,
        stdin=input_end,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
        start_new_session=True,
    )
    os.close(input_end)
    os.close(other_end)
    assert done.returncode == 0, done.stderr
    return done.stdout


SIGNALS = """
def interrupt_at(wait, send):
    def work():
        wait()
        time.sleep(0.1)
        send()
    thread = threading.Thread(target=work)
    thread.start()
    return thread

def ctrl_c():
    os.killpg(0, signal.SIGINT)

def expect_interrupt(call, kind=KeyboardInterrupt):
    try:
        call()
    except kind:
        return
    raise AssertionError("not interrupted")

# 1. Ctrl-C in the compiling thread: that thread alone; those that wait get a kernel, made by one of them.
fn, wait = new_functor(), slow_once()
with ThreadPoolExecutor(4) as pool:
    def late():
        wait()
        return fn(x)
    results = [pool.submit(late) for _ in range(4)]
    sender = interrupt_at(wait, ctrl_c)
    began = time.monotonic()
    expect_interrupt(lambda: fn(x))
    compiler, sleeper = map(int, (folder / "begun").read_text().split())
    assert all(is_right(item.result(60)) for item in results)
    assert time.monotonic() - began < 30
sender.join()
assert is_right(fn(x))
assert fuser.stats()["fallbacks"] == {} and fuser.n_compiled_kernels() == 1
for process in (compiler, sleeper):
    # Nothing stays behind: what the compiler started has ended with it.
    for _ in range(500):
        if not Path(f"/proc/{process}").exists() or " Z " in Path(f"/proc/{process}/stat").read_text():
            break
        time.sleep(0.01)
    else:
        raise AssertionError("still running")

# 2. Ctrl-C in a thread that waits: that thread alone; the compiler, a process of another group, goes on.
fn, wait = new_functor(), slow_once()
with ThreadPoolExecutor(1) as pool:
    compiling = pool.submit(fn, x)
    wait()
    sender = interrupt_at(wait, ctrl_c)
    expect_interrupt(lambda: fn(x))
    _, sleeper = map(int, (folder / "begun").read_text().split())
    os.kill(sleeper, signal.SIGKILL)
    assert is_right(compiling.result(60))
sender.join()
assert fuser.stats()["fallbacks"] == {} and fuser.n_compiled_kernels() == 2

# 3. A handler that raises something of its own.
fn, wait = new_functor(), slow_once()
def stop(*_):
    raise TimeoutError
signal.signal(signal.SIGALRM, stop)
sender = interrupt_at(wait, lambda: os.kill(os.getpid(), signal.SIGALRM))
expect_interrupt(lambda: fn(x), TimeoutError)
sender.join()
assert is_right(fn(x)) and fuser.n_compiled_kernels() == 3

# 4. A handler that calls the same functor, and another one, while its thread compiles: eager torch, with the reason.
fn, other, wait, seen = new_functor(), new_functor(), slow_once(), []
def call(*_):
    seen.extend([fn(x), other(x)])
    os.kill(int((folder / "begun").read_text().split()[1]), signal.SIGKILL)
signal.signal(signal.SIGALRM, call)
sender = interrupt_at(wait, lambda: os.kill(os.getpid(), signal.SIGALRM))
assert is_right(fn(x))
sender.join()
assert len(seen) == 2 and all(map(is_right, seen))
(reason,) = fuser.stats()["fallbacks"]
assert "signal handler" in reason, reason
fuser.reset_stats()
assert is_right(other(x)) and is_right(fn(x)) and fuser.stats()["fallbacks"] == {}

# 5. A loop without an end: where the text runs in eager torch it is interrupted, and the rest of the program goes on.
endless = fuser.jit_fn("template <typename T> T endless(T x) { while (x > T(0)) { x = x + T(1) - T(1); } return x; }")
fuser.override_can_fuse_on_cpu(False)
sender = interrupt_at(lambda: time.sleep(0.5), ctrl_c)
expect_interrupt(lambda: endless(x))
sender.join()
fuser.override_can_fuse_on_cpu(True)
# A kernel is interrupted when it returns; other threads run meanwhile, also those that end the process.
long = fuser.jit_fn("template <typename T> T slow(T x) { while (x > T(0)) { x = x - T(1); } return x; }")
assert long(x).tolist() == [0.0] * 3
sender = interrupt_at(lambda: time.sleep(0.2), ctrl_c)
began = time.monotonic()
expect_interrupt(lambda: print(long(torch.full((40,), 2.0**24))))
assert time.monotonic() - began > 0.2
sender.join()

# 6. A handler that calls functors wherever the thread is: planning, counting, dropping old plans.
fuser.config.max_plans = 4
calls = 0
def storm(*_):
    global calls
    calls += 1
    assert is_right(fn(torch.ones(1 + calls % 7)))
    fuser.stats()
signal.signal(signal.SIGALRM, storm)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
began = time.monotonic()
while time.monotonic() - began < 1.5:
    for size in range(1, 12):
        assert is_right(fn(torch.ones(size)))
signal.setitimer(signal.ITIMER_REAL, 0)
assert calls > 50, calls
print("done")
"""


@pytest.mark.cpu
def test_signals_while_a_kernel_is_compiled(tmp_path: Path) -> None:
    assert run_program(SIGNALS, tmp_path) == "done\n"


FORKS = """
def fork(work, limit=30):
    # Returns what waits for the child.
    process = os.fork()
    if process == 0:
        status = 1
        try:
            signal.alarm(limit)
            work()
            status = 0
        finally:
            os._exit(status)
    def join():
        assert os.waitpid(process, 0)[1] == 0
    return join

def check(call, *args):
    assert is_right(call(*args)), call
    assert fuser.stats()["fallbacks"] == {}, fuser.stats()

# 0. After torch's own operators alone have used threads.
fuser_before, few = new_functor(), torch.ones(3)
fuser_before(few)
torch.set_num_threads(2)
many = torch.ones(1 << 18)
torch.ones(1 << 22).exp().sin()
fork(lambda: check(fuser_before, many))()

# 1. While another thread compiles the kernel that the child wants, and one that it does not want.
fn, other, wait = new_functor(), new_functor(), slow_once()
with ThreadPoolExecutor(1) as pool:
    compiling = pool.submit(fn, x)
    wait()
    def work():
        check(other, x)
        check(fn, x)
    join = fork(work)
    os.kill(int((folder / "begun").read_text().split()[1]), signal.SIGKILL)
    join()
    assert is_right(compiling.result(60))

# 2. Kernels that have used OpenMP's threads.
large = torch.ones(1 << 20)
for _ in range(6):
    fn(large)
def work():
    for _ in range(6):
        # Of torch's own operators, few elements: they do wait for threads of the parent.
        assert is_right(fn(large)[:: 1 << 16])
fork(work)()

# 3. While other threads hold locks for a moment: plans, counters, tuning.
fuser.config.max_plans = 4
stop = threading.Event()
def hammer():
    for size in itertools.cycle(range(1, 9)):
        if stop.is_set():
            return
        fn(torch.ones(size))
        fuser.stats()
threads = [threading.Thread(target=hammer) for _ in range(3)]
for thread in threads:
    thread.start()
def work():
    for size in range(1, 9):
        check(fn, torch.ones(size))
for _ in range({count}):
    fork(work)()

# 4. While another thread traces: fx has replaced functions of torch's for it.
stop_traces = threading.Event()
def trace_often():
    while not stop_traces.is_set():
        fuser.fuse(lambda x: fn(torch.exp(x) * 2) + 1).graph_module
tracing = threading.Thread(target=trace_often)
tracing.start()
def work():
    fused = fuser.fuse(lambda x: fn(x * 2) - 3)
    check(fused, x)
    assert torch.nn.Linear(2, 2)(torch.ones(2)).shape == (2,)
for _ in range({count}):
    fork(work)()
stop.set(), stop_traces.set()
for thread in (*threads, tracing):
    thread.join()

# 5. A user whom the system does not know, and who has no home: no cache, and no folder named "~".
import platformdirs, tempfile
platformdirs.user_cache_dir()
open_folder = Path(tempfile.mkdtemp(dir="/tmp"))
open_folder.chmod(0o777)
def work():
    for name in ("HOME", "XDG_CACHE_HOME"):
        os.environ.pop(name, None)
    os.chdir(open_folder)
    fuser.config.cxx = fuser.config.cache_dir = None
    tempfile.tempdir = str(open_folder)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(54321)
        os.setuid(54321)
    check(new_functor(), x)
fork(work)()
assert list(open_folder.iterdir()) == []
open_folder.rmdir()
print("done")
"""


@pytest.mark.cpu
@pytest.mark.parametrize("count", [5, pytest.param(200, marks=pytest.mark.slow)])
def test_forks_while_kernels_are_compiled_and_called(count: int, tmp_path: Path) -> None:
    assert run_program(FORKS.replace("{count}", str(count)), tmp_path) == "done\n"


EXIT = """
fn, other = new_functor(), new_functor()
other(x)
wait = slow_once()

class Late:
    def __init__(self, *held):
        self.held = held

    def __del__(self):
        fn, other, x, is_finalizing, print = self.held
        assert is_finalizing()
        # A kernel that is there serves new shapes, too.
        print("late", other(x[:2]).tolist(), flush=True)
        try:
            # The thread that compiles this one has stopped for good.
            fn(x)
        except RuntimeError as error:
            print(type(error).__name__, error, flush=True)

late = Late(fn, other, x, sys.is_finalizing, print)
threading.Thread(target=fn, args=(x,), daemon=True).start()
wait()

# A thread that is stopped while it holds a lock. Its frame must not keep this module alive.
begin, ending = threading.Event(), threading.Event()
namespace = {"lock": fuser.counters._lock, "begin": begin, "ending": ending, "sleep": time.sleep}
exec("def hold():\\n begin.wait()\\n with lock():\\n  ending.set()\\n  sleep(60)", namespace)
threading.Thread(target=namespace["hold"], daemon=True).start()

import atexit
@atexit.register
def call():
    print("at exit", other(torch.ones(9)).tolist()[0], flush=True)
    begin.set()
    ending.wait()
print("main")
"""


@pytest.mark.cpu
def test_the_end_of_the_interpreter_while_a_kernel_is_compiled(tmp_path: Path) -> None:
    began = time.monotonic()
    printed = run_program(EXIT, tmp_path)
    os.kill(int((tmp_path / "begun").read_text().split()[1]), signal.SIGKILL)
    assert time.monotonic() - began < HANG_S / 3
    assert printed.splitlines() == [
        "main",
        "at exit 3.0",
        "late [3.0, 3.0]",
        "NoCompileError no kernel is compiled while the interpreter ends",
    ]


BROKEN_COMPILERS = """
import json

def call(fn):
    fuser.reset_stats()
    assert is_right(fn(x))
    (outcome,) = fuser.stats()["fallbacks"] or ["kernel"]
    return outcome

functors, outcomes = {}, {}
for compiler in sorted(folder.glob("*/compiler")):
    fuser.config.cxx = str(compiler)
    name = compiler.parent.name
    functors[name] = new_functor()
    outcomes[name] = [call(functors[name]), call(functors[name])]
(folder / f"ready {os.getpid()}").touch()
while not (folder / "go").exists():
    time.sleep(0.05)
for name, fn in functors.items():
    fuser.config.cxx = str(folder / name / "compiler")
    outcomes[name].append(call(fn))
print(json.dumps(outcomes))
"""


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 8])
def test_processes_whose_compilers_fail(
    count: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    real = find_compiler(config.cxx).command[0]
    for name, (body, _) in BROKEN.items():
        (tmp_path / name).mkdir()
        write_compiler(tmp_path / name / "compiler", body, real)
    with ThreadPoolExecutor(count) as pool:
        running = [pool.submit(run_program, BROKEN_COMPILERS, tmp_path) for _ in range(count)]
        while len(list(tmp_path.glob("ready *"))) < count and not any(item.done() for item in running):
            time.sleep(0.1)
        for name in BROKEN:
            repair(tmp_path / name / "compiler")
        (tmp_path / "go").touch()
        outcomes = [json.loads(item.result()) for item in running]
    for name, (_, reason) in BROKEN.items():
        first, second, repaired = outcomes[0][name]
        record_property(name, f"{first.replace(str(tmp_path), '')} | {repaired}")
        assert all(item[name] == [first, second, "kernel"] for item in outcomes)
        assert first == second
        assert reason in first
