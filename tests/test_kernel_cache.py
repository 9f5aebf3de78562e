"""One compile per kernel whatever the threads do; nobody waits for a stranger's compile; errors and files on disk."""

from __future__ import annotations

import gc
import io
import itertools
import logging
import os
import platform
import re
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fuser
from fuser import compiler, executor
from fuser.config import config
from fuser.cpu.backend import CpuBackend, find_compiler
from fuser.dump import dump
from fuser.errors import CacheWarning, CompileError, FallbackWarning, GroupError, NoCompileError
from fuser.graph import GroupBuilder
from fuser.kernel_cache import KernelStore, Lru, SpecCache
from fuser.ops.reductions import reduction_function
from fuser.planner import plan_texts
from fuser.process import Slots, map_in_threads

ROOT = Path(__file__).parents[1]
WAIT = 30.0
_numbers = itertools.count()


def new_functor(body: str = "return x + T({number});", **options: Any) -> fuser.JitFunction:
    """Return a functor whose text no test had before, also of another worker's."""
    number = next(_numbers)
    text = body.replace("{number}", str(number))
    return fuser.jit_fn(f"template <typename T> T cached{os.getpid()}_{number}(T x) {{ {text} }}", **options)


def compiles() -> tuple[int, int]:
    return fuser.stats()["compiles"], fuser.n_compiled_kernels()


@pytest.fixture
def fresh_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], None]:
    """Use an empty disk cache; return what forgets everything in memory, as a new process would."""

    def forget() -> None:
        monkeypatch.setattr(compiler, "_specs", SpecCache())
        executor._plans.clear()

    monkeypatch.setitem(config.__dict__, "cache_dir", str(tmp_path / "cache"))
    forget()
    return forget


# ---- threads ----


@pytest.mark.cpu
def test_many_threads_compile_once() -> None:
    fn, x = new_functor(), torch.arange(1000.0)
    barrier = threading.Barrier(32)
    before = compiles()

    def call(_: int) -> torch.Tensor:
        barrier.wait(WAIT)
        return fn(x)

    with ThreadPoolExecutor(32) as pool:
        results = list(pool.map(call, range(32)))
    assert tuple(now - then for now, then in zip(compiles(), before, strict=True)) == (1, 1)
    assert all(torch.equal(result, results[0]) for result in results)
    assert torch.equal(results[0], fn(x))


@pytest.mark.cpu
def test_many_threads_compile_different_kernels_at_the_same_time() -> None:
    functors, x = [new_functor() for _ in range(4)], torch.arange(10.0)
    before = compiles()
    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(lambda index: functors[index % 4](x), range(64)))
    assert tuple(now - then for now, then in zip(compiles(), before, strict=True)) == (4, 4)
    assert all(torch.equal(result, functors[index % 4](x)) for index, result in enumerate(results))


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


def test_store_compiles_outside_its_lock(pool: ThreadPoolExecutor) -> None:
    store, started, go = KernelStore(), threading.Event(), threading.Event()

    def slow() -> Any:
        started.set()
        assert go.wait(WAIT)
        return "slow"

    try:
        first = pool.submit(store.get_or_compile, "a", slow)
        assert started.wait(WAIT)
        # While "a" is being compiled, another kernel is made and found.
        assert pool.submit(store.get_or_compile, "b", lambda: "b").result(WAIT) == "b"
        assert pool.submit(store.get_or_compile, "b", lambda: "again").result(WAIT) == "b"
        late = pool.submit(store.get_or_compile, "a", lambda: "twice")
        assert not first.done()
        assert not late.done()
    finally:
        go.set()
    assert first.result(WAIT) == late.result(WAIT) == "slow"


@pytest.mark.cpu
def test_a_ready_kernel_does_not_wait_for_another_compile(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, slow, x = new_functor(), new_functor(), torch.ones(4)
    ready(x)
    started, go = threading.Event(), threading.Event()
    compile_now = CpuBackend.compile

    def compile_late(self: CpuBackend, source: Any, target: str) -> Any:
        if source.functors[0] == slow.function.functor:
            started.set()
            assert go.wait(WAIT)
        return compile_now(self, source, target)

    monkeypatch.setattr(CpuBackend, "compile", compile_late)
    try:
        waiting = pool.submit(slow, x)
        assert started.wait(WAIT)
        assert pool.submit(ready, x).result(WAIT).shape == (4,)
        # A new signature of a known kernel, a new kernel and a new group do not wait either.
        assert pool.submit(ready, torch.ones(2, 3)).result(WAIT).shape == (2, 3)
        assert pool.submit(ready, x.double()).result(WAIT).dtype == torch.float64
        assert pool.submit(new_functor(), x).result(WAIT).shape == (4,)
        assert not waiting.done()
    finally:
        go.set()
    assert waiting.result(WAIT).shape == (4,)


@pytest.mark.cpu
def test_the_kernels_of_a_plan_are_compiled_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = GroupBuilder("fast")
    (sums,) = builder.apply(reduction_function("sum", (1,), True), [builder.add_input("x")])
    (shifted,) = builder.apply(new_functor("return x * T(3);").function, [sums])
    (total,) = builder.apply(reduction_function("sum", (0,)), [shifted])
    group, x = builder.build([total]), torch.randint(0, 9, (300, 70)).float()
    assert len(plan_texts(compiler.register(group), [x], None)) == 2
    both, compile_now = threading.Barrier(2), CpuBackend.compile

    def compile_together(self: CpuBackend, source: Any, target: str) -> Any:
        both.wait(WAIT)
        return compile_now(self, source, target)

    monkeypatch.setattr(CpuBackend, "compile", compile_together)
    monkeypatch.setattr(compiler, "core_count", lambda: 2)
    before = fuser.stats()["cache_hits"]
    (got,) = fuser.run_fusion(fuser.register_fusion(group), [x])
    assert fuser.stats()["cache_hits"] == before
    assert torch.equal(got, (x.sum(1, keepdim=True) * 3).sum(0))


@pytest.mark.parametrize("count", [1, 2, 8])
def test_the_first_item_that_fails_is_whose_error_is_raised(count: int) -> None:
    def halve(number: int) -> int:
        if number % 2:
            time.sleep(0.02 * (5 - number))
            raise ValueError(number)
        return number // 2

    assert map_in_threads(halve, range(0, 20, 2), count) == list(range(10))
    with pytest.raises(ValueError, match="1"):
        map_in_threads(halve, range(5), count)


def test_no_more_threads_than_slots_go_on_at_once(pool: ThreadPoolExecutor) -> None:
    slots, lock, running = Slots(3), threading.Lock(), [0, 0]

    def work(_: int) -> None:
        with slots():
            with lock:
                running[0] += 1
                running[1] = max(running)
            time.sleep(0.005)
            with lock:
                running[0] -= 1

    list(pool.map(work, range(24)))
    assert 1 < running[1] <= 3


# ---- errors ----


def test_store_remembers_compile_errors_and_nothing_else() -> None:
    store, calls = KernelStore(), []

    def fails(error: Exception) -> Callable[[], Any]:
        def compile_kernel() -> Any:
            calls.append(error)
            raise error

        return compile_kernel

    for _ in range(3):
        with pytest.raises(CompileError, match="bad"):
            store.get_or_compile("bad", fails(CompileError("bad")))
    assert len(calls) == 1
    for _ in range(3):
        with pytest.raises(OSError, match="disk full"):
            store.get_or_compile("flaky", fails(OSError("disk full")))
    assert len(calls) == 4
    assert store.get_or_compile("flaky", lambda: "fine") == "fine"  # type: ignore[arg-type, return-value]


def test_threads_that_wait_get_the_error_too(pool: ThreadPoolExecutor) -> None:
    store, started, go = KernelStore(), threading.Event(), threading.Event()

    def fails() -> Any:
        started.set()
        assert go.wait(WAIT)
        raise CompileError("bad")

    first = pool.submit(store.get_or_compile, "a", fails)
    assert started.wait(WAIT)
    second = pool.submit(store.get_or_compile, "a", lambda: "twice")
    go.set()
    assert isinstance(first.exception(WAIT), CompileError)
    assert isinstance(second.exception(WAIT), CompileError)


@pytest.mark.cpu
def test_a_functor_that_does_not_compile_is_compiled_once() -> None:
    fn = new_functor("return undeclared(x);")
    before = compiles()
    texts = set()
    for _ in range(3):
        with pytest.raises(CompileError) as caught:
            fn(torch.ones(3))
        texts.add(str(caught.value))
    assert tuple(now - then for now, then in zip(compiles(), before, strict=True)) == (1, 0)
    assert len(texts) == 1


@pytest.mark.cpu
def test_a_remembered_error_keeps_no_callers_tensors() -> None:
    fn = new_functor("return undeclared(x);")
    tensors = []
    for _ in range(2):
        x = torch.ones(3)
        tensors.append(weakref.ref(x))
        with pytest.raises(CompileError):
            fn(x)
        del x
    gc.collect()
    assert [item() for item in tensors] == [None, None]


def test_unknown_key() -> None:
    with pytest.raises(GroupError, match="no fusion group is registered under key 12"):
        fuser.run_fusion(12, [])
    with pytest.raises(GroupError, match="no JSON of a fusion group"):
        compiler.registered("12")


# ---- what compiles, and what is kept ----


@pytest.mark.cpu
def test_new_scalars_and_shapes_compile_nothing() -> None:
    code = "template <typename T> T scaled(T x, T y, T by, bool up) { return up ? x * by : y; }"
    fn = fuser.create_jit_fn(code, by=1.0, up=True)
    # Linear, one broadcast operand, two dimensions with short rows and with long ones, and one element of each rank:
    # all the classes there are.
    for left, right in (((4, 3), (4, 3)), ((4, 3), ()), ((4, 3), (3,)), ((4, 99), (99,)), ((), ()), ((1,), ())):
        fn(torch.ones(left), torch.ones(right))
    before = compiles()
    for by in (0.5, -1.0, float("nan"), 1e300):
        fn(torch.ones(4, 3), torch.ones(4, 3), by=by, up=by > 0)
    for shape in ((4, 3), (7,), (), (1, 1), (2, 3, 4), (0, 5), (100, 200)):
        assert fn(torch.ones(shape), torch.ones(shape)).shape == shape
        assert fn(torch.ones(shape), torch.ones(())).shape == shape
    for rows, columns in ((5, 6), (2, 1000), (31, 2)):
        assert fn(torch.ones(rows, columns), torch.ones(columns)).shape == (rows, columns)
    for number in (2, True, torch.tensor(2.0)):
        fn(torch.ones(4, 3), torch.ones(4, 3), by=number, up=1)
    assert compiles() == before


@pytest.mark.cpu
def test_a_setting_that_changes_code_makes_another_kernel() -> None:
    fn, x = new_functor(), torch.ones(3)
    fn(x)
    before = compiles()
    with config.patch(numerics="fast"):
        fn(x)
    assert compiles() == (before[0] + 1, before[1] + 1)
    fn(x)
    assert compiles() == (before[0] + 1, before[1] + 1)


def test_lru_drops_the_entry_unused_the_longest() -> None:
    entries: Lru[str] = Lru()
    for key in "abc":
        entries.put(key, key.upper(), 3)
    assert entries.get("a") == "A"
    entries.put("d", "D", 3)
    assert [entries.get(key) for key in "abcd"] == ["A", None, "C", "D"]
    entries.put("e", "E", 1)
    assert len(entries) == 1
    assert entries.get("e") == "E"


@pytest.mark.cpu
def test_plans_are_bounded() -> None:
    fn = new_functor()
    with config.patch(max_plans=3):
        for rank in range(1, 10):
            # Those of one number of dimensions share what is known of their sizes.
            fn(torch.ones((1,) * rank + (2,))[..., :1])
        plans = executor._plans[fn.spec(1).key]
        assert len(plans) == 3
        before = compiles()
        assert fn(torch.ones(1, 2)[..., :1]).shape == (1, 1)
    assert compiles() == before


def test_registering_twice_gives_one_spec() -> None:
    fn = new_functor()
    with ThreadPoolExecutor(8) as threads:
        specs = list(threads.map(lambda _: compiler.register(fn.spec(1).group), range(64)))
    assert len({id(spec) for spec in specs}) == 1


# ---- disk ----


@pytest.mark.cpu
def test_another_compiler_command_is_another_kernel(fresh_caches: Callable[[], None]) -> None:
    text, command = new_functor("return x * 7;").function.functor.source, " ".join(find_compiler(config.cxx).command)
    for cxx, compiled in ((command, 1), (f"{command} -DSOME", 1), (command, 0)):
        fresh_caches()
        before = compiles()
        with config.patch(cxx=cxx):
            fuser.jit_fn(text)(torch.ones(3))
        assert compiles()[0] == before[0] + compiled


def test_compiling_stays_forbidden_where_there_is_no_compiler(fresh_caches: Callable[[], None]) -> None:
    fn, x = new_functor("return x * 7;"), torch.ones(3)
    with config.patch(no_compile=True, cxx="/nonexistent"):
        before = compiles()
        for call in (lambda: fn(x), lambda: fn.check(device="cpu"), lambda: fn(x.requires_grad_())):
            with pytest.raises(NoCompileError, match=f"{fn.__name__}.* FUSER_NO_COMPILE"):
                call()
        assert compiles() == before


@pytest.mark.cpu
def test_no_compile(fresh_caches: Callable[[], None]) -> None:
    fn, x = new_functor("return x * 5;"), torch.ones(3)
    with config.patch(no_compile=True), pytest.raises(NoCompileError, match=fn.__name__):
        fn(x)
    assert fn(x).tolist() == [5, 5, 5]
    with config.patch(no_compile=True):
        assert fn(x).tolist() == [5, 5, 5]
        # In memory nothing is left; the disk has it.
        fresh_caches()
        again = fuser.create_jit_fn(fn.function.functor.source)
        before = compiles()
        assert again(x).tolist() == [5, 5, 5]
        assert compiles() == (before[0], before[1] + 1)
        with pytest.raises(NoCompileError):
            again(x.double())
    assert again(x.double()).dtype == torch.float64


@pytest.mark.cpu
def test_a_program_hears_artifacts_as_they_come(caplog: pytest.LogCaptureFixture) -> None:
    # Calls are recorded, and replayed in silence, unless launches were asked for.
    with caplog.at_level("DEBUG", logger="fuser"), config.patch(logs="launch"):
        function = new_functor()
        for _ in range(2):
            function(torch.ones(8))
    said = [(item.name, item.levelname) for item in caplog.records]
    names = ["functor", "group", "spec", "source", "compile", "launch", "launch"]
    assert said == [(f"fuser.{name}", "DEBUG") for name in names]
    (ready,) = (item.message for item in caplog.records if item.name == "fuser.compile")
    assert re.fullmatch(rf"\w+, for {platform.machine()}: ready after [\d.]+ ms", ready)
    caplog.clear()
    new_functor()(torch.ones(8))
    assert not caplog.records


@pytest.mark.cpu
def test_every_call_in_eager_torch_is_said(caplog: pytest.LogCaptureFixture) -> None:
    # Such calls are replayed, too, unless somebody listens.
    function, x = new_functor(), torch.ones(8)
    was = fuser.override_can_fuse_on_cpu(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            for _ in range(2):
                function(x)
            with caplog.at_level("DEBUG", logger="fuser.fallback"), config.patch(logs="fallback"):
                for _ in range(3):
                    function(x)
    finally:
        fuser.override_can_fuse_on_cpu(was)
    assert [item.message for item in caplog.records] == ["fusion on cpu is switched off"] * 3


@pytest.mark.cpu
def test_artifacts_are_written_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with config.patch(logs="source,launch"):
        function = new_functor()
        function(torch.ones(8))
    function(torch.ones(9, 2))
    written = capsys.readouterr().err.splitlines()
    assert [line for line in written if line.startswith("--- ")] == ["--- fuser.source", "--- fuser.launch"]
    assert any("fuser_kernel" in line for line in written)


@pytest.mark.cpu
def test_what_is_written_to_stderr_leaves_a_programs_loggers_alone(caplog: pytest.LogCaptureFixture) -> None:
    # A handler at the root, which has the level of warnings, is not asked; a logger's level is the program's.
    logger = logging.getLogger("fuser.launch")
    with config.patch(logs="launch"):
        new_functor()(torch.ones(8))
    assert not caplog.records
    with caplog.at_level("DEBUG", logger=logger.name):
        with config.patch(logs="launch"):
            new_functor()(torch.ones(8))
        assert logger.level == logging.DEBUG
    assert [item.name for item in caplog.records] == [logger.name]


@pytest.mark.cpu
def test_a_stderr_that_is_closed_fails_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with config.patch(logs="launch"):
        for _ in range(2):
            stream = io.StringIO()
            monkeypatch.setattr(sys, "stderr", stream)
            new_functor()(torch.ones(8))
            assert stream.getvalue().startswith("--- fuser.launch\n")
            # As whoever put it there may do in the end.
            stream.close()
        new_functor()(torch.ones(8))
        monkeypatch.setattr(sys, "stderr", None)
        new_functor()(torch.ones(8))
        narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        monkeypatch.setattr(sys, "stderr", narrow)
        with config.patch(logs="functor"):
            fuser.create_jit_fn("template <typename T> T wide(T x) { return x; } // \u00e9")


@pytest.mark.cpu
def test_a_folder_for_each_kernel(tmp_path: Path) -> None:
    function = new_functor()
    with config.patch(dump=str(tmp_path / "new" / "dump")):
        function(torch.ones(8))
        function(torch.ones(8, dtype=torch.float64))
    folders = sorted((tmp_path / "new" / "dump").iterdir())
    assert len(folders) == 2
    for folder in folders:
        assert sorted(item.name for item in folder.iterdir()) == ["group.json", "kernel.cpp", "kernel.so", "spec.txt"]
        group = fuser.FusionGroup.from_json((folder / "group.json").read_text())
        assert group.applications[0].function.functor.source == function.function.functor.source
        assert (folder / "kernel.so").read_bytes()[:4] == b"\x7fELF"


@pytest.mark.parametrize(("encoding", "name"), [("utf-8", 20 * "\U00020000"), ("ascii", 80 * "?")])
def test_a_folder_has_a_name_that_files_may_have(
    encoding: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: encoding)
    source: Any = SimpleNamespace(functors=[SimpleNamespace(entry=100 * "\U00020000")], text="")
    with config.patch(dump=str(tmp_path)):
        dump(source, {"kernel.cpp": source.text})
    (folder,) = tmp_path.iterdir()
    assert folder.name.partition("-")[0] == name
    assert (folder / "kernel.cpp").is_file()


@pytest.mark.cpu
def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with config.patch(dump="~/dump"):
        new_functor()(torch.ones(8))
    assert len(list((tmp_path / "dump").iterdir())) == 1
    with config.patch(dump="~nobody-has-this-name/dump"), pytest.warns(CacheWarning, match="FUSER_DUMP"):
        assert new_functor()(torch.ones(8)).shape == (8,)


@pytest.mark.cpu
def test_a_folder_that_cannot_be_written_to_warns_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with config.patch(dump=str(tmp_path / "file")):
        with pytest.warns(CacheWarning, match="FUSER_DUMP"):
            assert new_functor()(torch.ones(8)).shape == (8,)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert new_functor()(torch.ones(8)).shape == (8,)
