"""The kernel cache never breaks a process and never runs what it did not make: faults and locks in real processes."""

from __future__ import annotations

import gc
import itertools
import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_worker import ROOT, Worker, ask_all

import fuser
from fuser import compiler, counters, disk_cache, executor
from fuser.config import config
from fuser.cpu import backend as cpu_backend
from fuser.disk_cache import CacheKey, load_or_make
from fuser.errors import CacheError, CacheWarning, CompilerTimeoutError, FallbackWarning
from fuser.kernel_cache import SpecCache
from fuser.order_check import verdict_key

KINDS = [
    pytest.param("cpu", marks=pytest.mark.cpu),
    pytest.param("cubin", marks=pytest.mark.nvrtc),
    pytest.param("cuda", marks=pytest.mark.cuda),
]
_numbers = itertools.count()

# ---- damaged entries ----


def truncate(entry: Path, dice: random.Random) -> None:
    os.truncate(entry, dice.randrange(entry.stat().st_size))


def lose_last_byte(entry: Path, dice: random.Random) -> None:
    os.truncate(entry, entry.stat().st_size - 1)


def grow(entry: Path, dice: random.Random) -> None:
    entry.write_bytes(entry.read_bytes() + b"\0")


def flip_bit(entry: Path, dice: random.Random) -> None:
    data = bytearray(entry.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    entry.write_bytes(data)


def zero_page(entry: Path, dice: random.Random) -> None:
    data = bytearray(entry.read_bytes())
    begin = dice.choice([begin for begin in range(0, len(data), 4096) if any(data[begin : begin + 4096])])
    size = len(data[begin : begin + 4096])
    data[begin : begin + size] = bytes(size)
    entry.write_bytes(data)


def empty(entry: Path, dice: random.Random) -> None:
    entry.write_bytes(b"")


def fill_randomly(entry: Path, dice: random.Random) -> None:
    entry.write_bytes(dice.randbytes(entry.stat().st_size))


def take_another(entry: Path, dice: random.Random) -> None:
    (other,) = set(entry.parent.glob("*-*")) - {entry, *entry.parent.glob("tmp-*")}
    entry.write_bytes(other.read_bytes())


def make_sparse(entry: Path, dice: random.Random) -> None:
    os.truncate(entry, 1 << 40)


def become(make: Callable[[Path], object]) -> Callable[[Path, random.Random], None]:
    """Return a fault that removes the entry, and makes something else of its name."""

    def damage(entry: Path, dice: random.Random) -> None:
        entry.unlink()
        make(entry)

    return damage


def make_device(entry: Path) -> None:
    try:
        os.mknod(entry, stat.S_IFCHR | 0o600, os.makedev(1, 5))
    except PermissionError:
        # Only root makes devices.
        entry.symlink_to("/dev/zero")


def make_socket(entry: Path) -> None:
    # A socket's path may have a hundred characters.
    with socket.socket(socket.AF_UNIX) as end, working_in(entry.parent):
        end.bind("s")
        Path("s").rename(entry)


def make_folder(entry: Path) -> None:
    entry.mkdir()
    (entry / "file").write_text("not empty")


def link_to_a_copy(entry: Path, dice: random.Random) -> None:
    copy = entry.parent.parent / "copy"
    entry.replace(copy)
    entry.symlink_to(copy)


def give_away(entry: Path, dice: random.Random) -> None:
    entry.chmod(0o644)
    os.chown(entry, 12345, -1)


FAULTS: dict[str, Callable[[Path, random.Random], None]] = {
    "truncated": truncate,
    "last byte lost": lose_last_byte,
    "a byte too many": grow,
    "one bit flipped": flip_bit,
    "a page of zeros": zero_page,
    "empty": empty,
    "random bytes": fill_randomly,
    "another key's entry": take_another,
    "a terabyte, sparse": make_sparse,
    "a folder": become(make_folder),
    "a FIFO": become(os.mkfifo),
    "a socket": become(make_socket),
    "a device": become(make_device),
    "a link to a device": become(lambda entry: entry.symlink_to("/dev/zero")),
    "a link to nowhere": become(lambda entry: entry.symlink_to("nowhere")),
    "a link to itself": become(lambda entry: entry.symlink_to(entry)),
    "a link to a good copy": link_to_a_copy,
    "unreadable": lambda entry, _: entry.chmod(0),
    "writable by the group": lambda entry, _: entry.chmod(0o660),
    "writable by others": lambda entry, _: entry.chmod(0o606),
    "another user's": give_away,
    "removed": lambda entry, _: entry.unlink(),
}
QUICK = [name for name in FAULTS if name not in {"last byte lost", "a link to itself", "writable by others", "removed"}]
if os.geteuid():
    # Nobody but root gives files away.
    del FAULTS["another user's"]
    QUICK.remove("another user's")


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def check_faults(kind: str, workers: list[Worker], faults: list[str], cache: Path) -> list[str]:
    """Damage an entry in each way, and let processes use it at the same time; return a line for each fault."""
    dice, lines, request = random.Random(0), [], {"kind": kind, "cache": str(cache)}
    workers[0].ask(number=1, **request)
    others = set(entries_of(cache))
    wanted = workers[0].ask(number=2, **request)["result"]
    (entry,) = set(entries_of(cache)) - others
    for fault in faults:
        FAULTS[fault](entry, dice)
        found = ask_all(workers, number=2, **request)
        assert [item["result"] for item in found] == [wanted] * len(workers), fault
        # One of them compiles, whatever the others do.
        assert sum(item["compiles"] for item in found) == 1, fault
        said = [item["warnings"] for item in found]
        assert all(len(item) <= 1 for item in said), (fault, said)
        assert all(text.startswith("CacheWarning") for item in said for text in item), (fault, said)
        assert any(said) == (fault != "removed"), (fault, said)
        assert not any(item["fallbacks"] for item in found), fault
        healed = ask_all(workers, number=2, **request)
        shown = [(item["result"], item["compiles"], item["warnings"]) for item in healed]
        assert shown == [(wanted, 0, [])] * len(workers), fault
        assert stat.S_IMODE(entry.lstat().st_mode) == 0o600, fault
        most = max(map(len, said))
        outcome = f"right result, 1 compile, at most {most} warning in a process, healed"
        lines.append(f"{kind:5} | {fault:22} | {len(workers)} | {outcome}")
    return lines


@contextmanager
def working(count: int) -> Iterator[list[Worker]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Worker()) for _ in range(count)]


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Worker]]:
    """Two processes for all tests here: each request names its own cache."""
    with working(2) as found:
        yield found


def entries_of(cache: Path) -> list[Path]:
    return [path for path in (cache / "kernels").iterdir() if disk_cache.ENTRY.fullmatch(path.name)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_entry_is_made_anew_by_one_of_two_processes(kind: str, workers: list[Worker], tmp_path: Path) -> None:
    check_faults(kind, workers, QUICK, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_every_fault(kind: str, processes: int, tmp_path: Path) -> None:
    flips = ["one bit flipped"] * 100 if processes == 1 else ["one bit flipped"] * 10
    with working(processes) as workers:
        lines = check_faults(kind, workers, [*FAULTS, *flips, *["truncated"] * 30], tmp_path)
    counts = {line: lines.count(line) for line in lines}
    sys.stdout.write("".join(f"\n{line} ({count} times)" for line, count in counts.items()))


@pytest.mark.slow
@pytest.mark.cpu
def test_results_are_right_while_entries_are_being_damaged(workers: list[Worker], tmp_path: Path) -> None:
    dice, stop, request = random.Random(1), threading.Event(), {"kind": "cpu", "number": 2, "cache": str(tmp_path)}
    faults = [FAULTS[name] for name in ("truncated", "one bit flipped", "a page of zeros", "random bytes", "empty")]
    workers[0].ask(**request)
    (entry,) = entries_of(tmp_path)

    def damage() -> None:
        while not stop.wait(0.003):
            with suppress(OSError, ValueError, IndexError):
                dice.choice(faults)(entry, dice)

    thread = threading.Thread(target=damage)
    thread.start()
    try:
        for _ in range(60):
            assert [item["result"] for item in ask_all(workers, **request)] == ["True"] * 2
    finally:
        stop.set()
        thread.join()


# ---- folders and permissions ----


@pytest.mark.cpu
def test_only_the_user_may_read_what_is_kept_and_a_warm_cache_needs_no_compiler(
    workers: list[Worker], tmp_path: Path
) -> None:
    cache, shipped, worker = tmp_path / "some" / "where" / "cache", tmp_path / "shipped", workers[0]
    for number, umask in ((1, 0), (2, 0o077)):
        assert worker.ask(kind="cpu", number=number, umask=umask, cache=str(cache))["result"] == "True"
    folders = [tmp_path / "some", tmp_path / "some" / "where", cache, cache / "kernels"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}
    assert len(entries_of(cache)) == 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in (cache / "kernels").iterdir()} == {0o600}

    # Copied, not writable, and nothing there that compiles.
    shutil.copytree(cache, shipped)
    for path in (shipped / "kernels", shipped):
        path.chmod(0o500)
    for settings in ({"no_compile": True, "cxx": "g++ -DANOTHER"}, {"cxx": "/nowhere/g++"}, {}):
        found = worker.ask(kind="cpu", number=1, settings=settings, cache=str(shipped))
        assert (found["result"], found["compiles"], found["warnings"]) == ("True", 0, []), settings

    # What it does not have is compiled, and it is said once that this will be so again.
    for number in (3, 4):
        found = worker.ask(kind="cpu", number=number, cache=str(shipped))
        assert (found["result"], found["compiles"], len(found["warnings"])) == ("True", 1, 1)
        assert "kernels are not kept on disk: Permission denied" in found["warnings"][0]
        assert found["files"] == [str(Path(__file__).with_name("cache_worker.py"))]
    assert len(entries_of(shipped)) == 2


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], None]:
    """Use an empty cache; return what forgets all that is in memory, as a new process would."""

    def forget() -> None:
        monkeypatch.setattr(compiler, "_specs", SpecCache())
        executor._plans.clear()
        cpu_backend._find_compiler.cache_clear()

    for name in ("_used", "_shipped"):
        monkeypatch.setattr(disk_cache, name, {})
    monkeypatch.setattr(counters, "_warned", set())
    monkeypatch.setitem(config.__dict__, "cache_dir", str(tmp_path / "cache"))
    forget()
    return forget


def new_functor() -> fuser.JitFunction:
    number = next(_numbers)
    return fuser.jit_fn(f"template <typename T> T stored{number}(T x) {{ return x * T(3) + T({number}); }}")


def new_key(maker: str = "tests") -> CacheKey:
    return CacheKey.build(("test", str(next(_numbers))), (maker,))


def make_entry(key: CacheKey, payload: bytes = b"payload") -> bytes:
    return load_or_make(key, lambda: payload, lambda found: found)


@pytest.mark.parametrize("where", ["below a file", "no home", "relative to nothing"])
def test_a_folder_that_cannot_be_is_said_once(
    where: str, fresh: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    folder = {"below a file": f"{tmp_path}/file/x", "no home": "~nobody_at_all/x", "relative to nothing": "x"}
    with config.patch(cache_dir=folder[where]):
        with pytest.warns(CacheWarning, match="kernels are not kept on disk") as caught:
            assert make_entry(new_key()) == make_entry(new_key()) == b"payload"
        assert len(caught) == 1
    monkeypatch.chdir(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("fault", ["a link to nowhere", "a link to a good copy"])
def test_a_link_is_called_a_link(fault: str, fresh: object, tmp_path: Path) -> None:
    key = new_key()
    make_entry(key)
    FAULTS[fault](entries_of(tmp_path / "cache")[0], random.Random(0))
    with pytest.warns(CacheWarning, match="an entry of the kernel cache was not used: it is a link: "):
        assert make_entry(key) == b"payload"


def test_a_tilde_is_the_home_folder(fresh: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with config.patch(cache_dir="~/kept"):
        make_entry(new_key())
    assert len(entries_of(tmp_path / "kept")) == 1


@pytest.mark.cpu
@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small file system")
def test_a_full_disk_breaks_no_call(fresh: object, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "none", str(disk)], check=False)
    if mounted.returncode:
        pytest.skip("no file systems are mounted here")
    try:
        fuser.reset_stats()
        with config.patch(cache_dir=str(disk)), pytest.warns(CacheWarning, match="No space left on device"):
            assert new_functor()(torch.ones(3)).tolist() == [3.0 + next(_numbers) - 1] * 3
        assert (fuser.stats()["launches"], fuser.stats()["fallbacks"]) == (1, {})
        assert [path.name for path in (disk / "kernels").iterdir()] == ["lock"]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.cpu
def test_where_memory_cannot_be_executed_kernels_load_from_a_file(
    fresh: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Another call of the system that takes a name and fails: without a frame of Python's, as only theirs do.
    monkeypatch.setattr(os, "memfd_create", os.rmdir)
    monkeypatch.setattr(disk_cache.tempfile, "tempdir", str(tmp_path))
    fn = new_functor()
    fuser.reset_stats()
    assert fn(torch.zeros(1)).item() == int(fn.__name__.removeprefix("stored"))
    assert (fuser.stats()["launches"], fuser.stats()["fallbacks"]) == (1, {})
    assert not list(tmp_path.glob(f"{disk_cache.SCRATCH}*"))


# ---- what is kept, and for how long ----


def test_what_was_read_last_stays(fresh: object, tmp_path: Path) -> None:
    keys = [new_key() for _ in range(12)]
    folder = tmp_path / "cache" / "kernels"
    now = time.time()
    for age, key in enumerate(keys[:10]):
        make_entry(key, bytes(1000))
        entry = folder / f"{key.wanted}-{key.maker}"
        os.utime(entry, (now - 10000 - age, now - 10000 - age))
    assert len(entries_of(tmp_path / "cache")) == 10
    # The oldest two are read, and become the youngest.
    assert [disk_cache.read(key) for key in keys[8:10]] == [bytes(1000)] * 2
    orphan, young, foreign = folder / "tmp-old", folder / "tmp-young", folder / "other.txt"
    for path in (orphan, young, foreign):
        path.write_text("x")
    (folder / "tmp-folder").mkdir()
    for path in (orphan, foreign, folder / "tmp-folder"):
        os.utime(path, (now - 10000, now - 10000))
    with config.patch(cache_size=6000):
        make_entry(keys[10], bytes(1000))
        kept = [key for key in keys if disk_cache.read(key)]
        assert kept == [keys[0], keys[1], keys[8], keys[9], keys[10]]
        assert sum(path.stat().st_size for path in entries_of(tmp_path / "cache")) <= 6000
        assert sorted(path.name for path in folder.iterdir() if not disk_cache.ENTRY.fullmatch(path.name)) == [
            "lock", "other.txt", "tmp-young"
        ]  # fmt: skip
        # Never more than the bound, whatever is added.
        for _ in range(20):
            make_entry(new_key(), bytes(900))
            assert sum(path.stat().st_size for path in entries_of(tmp_path / "cache")) <= 6000


def test_a_clock_that_was_ahead_puts_nothing_off(
    fresh: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_cache.tempfile, "tempdir", str(tmp_path))
    read = new_key()
    make_entry(read, bytes(1000))
    folder, scratch = tmp_path / "cache" / "kernels", tmp_path / "fuser-scratch-old"
    scratch.mkdir()
    orphan = folder / "tmp-old"
    orphan.write_text("x")
    years_ahead = time.time() + 1e8
    for path in (*folder.iterdir(), scratch):
        os.utime(path, (years_ahead, years_ahead))
    assert disk_cache.read(read) == bytes(1000)
    assert abs((folder / f"{read.wanted}-{read.maker}").stat().st_mtime - time.time()) < 60
    # Long before this process has written a sixteenth of the cache's size.
    make_entry(new_key(), bytes(1000))
    assert not orphan.exists()
    assert not scratch.exists()
    assert abs((folder / "lock").stat().st_mtime - time.time()) < 60


def test_scratch_folders_of_the_dead_are_removed(
    fresh: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_cache.tempfile, "tempdir", str(tmp_path))
    old, young, foreign = (tmp_path / name for name in ("fuser-scratch-old", "fuser-scratch-young", "other"))
    for folder in (old, young, foreign):
        folder.mkdir()
        (folder / "kernel.cpp").write_text("")
    for folder in (old, foreign):
        os.utime(folder, (0, 0))
    with config.patch(cache_size=1):
        make_entry(new_key())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "fuser-scratch-young", "other"]


@pytest.mark.cpu
def test_all_that_changes_code_is_part_of_the_key(
    fresh: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = shutil.which(cpu_backend.find_compiler(config.cxx).command[0])
    script = tmp_path / "a compiler" / "g++"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {found} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    keys: list[CacheKey] = []

    def note(key: CacheKey, *_: object) -> Any:
        keys.append(key)
        raise CacheError("not now")

    monkeypatch.setattr(cpu_backend, "load_or_make", note)
    text = "template <typename T> T keyed(T x) { return exp(x) * T(7); }"

    def look(text: str = text, dtype: torch.dtype = torch.float32, **settings: Any) -> CacheKey:
        fresh()
        with config.patch(**settings), pytest.raises(CacheError, match="not now"):
            fuser.jit_fn(text)(torch.ones(3, dtype=dtype))
        return keys[-1]

    first = look(cxx="g++")
    assert look(cxx="g++") == first
    # What is wanted.
    others = [look(text.replace("7", "8"), cxx="g++"), look(dtype=torch.float64, cxx="g++")]
    others += [look(cxx="g++", numerics="fast"), look(cxx="g++", cpu_math="precise")]
    with monkeypatch.context() as patch:
        patch.setattr(cpu_backend, "__version__", "0")
        others.append(look(cxx="g++"))
    with monkeypatch.context() as patch:
        patch.setattr(cpu_backend, "host_identity", lambda: "another host")
        others.append(look(cxx="g++"))
    assert len({key.wanted for key in [first, *others]}) == 1 + len(others)
    # Who makes it: the command, the program, when it was changed, its version and its flags.
    others = [look(cxx=found), look(cxx="g++ -DSOME")]
    os.utime(script, (1, 1))
    others.append(look(cxx="g++"))
    script.write_text(script.read_text() + "\n")
    os.utime(script, (1, 1))
    others.append(look(cxx="g++"))
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo x || exec {found} "$@"\n')
    others.append(look(cxx="g++"))
    with monkeypatch.context() as patch:
        patch.setattr(cpu_backend, "compiler_flags", lambda *_: ("-O3",))
        others.append(look(cxx="g++"))
    assert {key.wanted for key in others} == {first.wanted}
    assert len({key.maker for key in [first, *others]}) == 1 + len(others)
    assert look(cxx="/nowhere/g++") == CacheKey(first.wanted, None)
    # What a comparison with torch came to is about one compiler's kernels.
    verdicts = list[CacheKey]()
    for command in ("g++", "g++ -DSOME", "/nowhere/g++"):
        with config.patch(cxx=command):
            verdicts.append(verdict_key(torch.device("cpu"), "sum"))
    assert len({key.wanted for key in verdicts}) == 1
    assert len({key.maker for key in verdicts}) == 3
    assert verdicts[-1].maker is None


@pytest.mark.nvrtc
def test_all_that_changes_a_cubin_is_part_of_its_key(monkeypatch: pytest.MonkeyPatch) -> None:

    from fuser.cuda import backend
    from fuser.debug import kernel_sources

    (source,) = kernel_sources(new_functor().spec(1), [torch.ones(3)], "cuda")
    first = backend._cache_key(source, "sm_90")
    others = [backend._cache_key(source, "sm_80"), backend._cache_key(source._replace(text="x"), "sm_90")]
    others.append(backend._cache_key(source._replace(numerics="fast"), "sm_90"))
    with monkeypatch.context() as patch:
        patch.setattr(backend, "__version__", "0")
        others.append(backend._cache_key(source, "sm_90"))
    assert len({key.wanted for key in [first, *others]}) == 1 + len(others)
    library, size, changed = backend.identify_nvrtc() or ()
    makers = {first.maker}
    for identity in ((f"{library}.1", size, changed), (library, size, "1"), None):
        monkeypatch.setattr(backend, "identify_nvrtc", lambda identity=identity: identity)
        key = backend._cache_key(source, "sm_90")
        assert key.wanted == first.wanted
        makers.add(key.maker)
    assert len(makers) == 4
    assert None in makers


# A torch for CUDA has loaded it before anybody asks.
before_torch_loads_it = pytest.mark.skipif(torch.version.cuda is not None, reason="torch has loaded NVRTC itself")

# Which file NVRTC is, before and after it is loaded.
WHICH_NVRTC = """
from cuda.pathfinder import load_nvidia_dynamic_lib
from fuser.cuda.nvrtc import _NAMES, _is_loaded, find_nvrtc
assert not any(map(_is_loaded, _NAMES))
found = find_nvrtc()
# Not where it is a wheel's.
assert any(map(_is_loaded, _NAMES)) != ("site-packages" in found.parts)
assert found.samefile(load_nvidia_dynamic_lib("nvrtc").abs_path)
assert any(map(_is_loaded, _NAMES))
assert find_nvrtc().samefile(found)
"""


@before_torch_loads_it
@pytest.mark.nvrtc
def test_nvrtc_is_not_loaded_to_learn_which_file_it_is() -> None:
    done = subprocess.run([sys.executable, "-c", WHICH_NVRTC], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# Where wheels are no site's, only on sys.path.
WHERE_NO_WHEEL_COUNTS = """
import site
from pathlib import Path
import fuser.cuda.nvrtc
from cuda.pathfinder import load_nvidia_dynamic_lib
site.getsitepackages, site.ENABLE_USER_SITE = lambda: [], False
found = fuser.cuda.nvrtc.find_nvrtc()
print(found)
assert found == Path(load_nvidia_dynamic_lib("nvrtc").abs_path)
"""


@before_torch_loads_it
@pytest.mark.nvrtc
def test_nvrtc_is_no_wheel_that_is_not_loaded(tmp_path: Path) -> None:
    """The dynamic loader's one is loaded, and kernels in the cache are that one's."""
    from fuser.cuda.nvrtc import find_nvrtc

    own = find_nvrtc()
    (tmp_path / own.name).symlink_to(own)
    done = subprocess.run(
        [sys.executable, "-c", WHERE_NO_WHEEL_COUNTS],
        capture_output=True, text=True, check=False, env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / own.name)


# ---- locks, and a compiler that hangs ----

# Holds the lock of one key, as a process does that stopped in the middle of a compile.
HOLDER = """
import fcntl, struct, sys, time
lock = open(sys.argv[1], "r+b")
fcntl.fcntl(lock, fcntl.F_OFD_SETLK, struct.pack("hhqqi0q", fcntl.F_WRLCK, 0, int(sys.argv[2]), 1, 0))
print("held", flush=True)
time.sleep(600)
"""


@contextmanager
def holding(key: CacheKey, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Let another process hold the key's lock; it is stopped, so that it would not even notice being asked to end."""
    os.close(disk_cache._open_lock(folder))
    command = [sys.executable, "-S", "-c", HOLDER, str(folder / "lock"), str(key.number)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            process.send_signal(signal.SIGSTOP)
            yield process
        finally:
            process.kill()


def raise_timeout(*_: object) -> None:
    raise TimeoutError("an alarm")


def test_a_holder_that_hangs_delays_by_the_timeout_and_one_that_dies_by_nothing(fresh: object, tmp_path: Path) -> None:
    key, other = new_key(), new_key()
    with holding(key, tmp_path / "cache" / "kernels") as holder:
        with config.patch(lock_timeout=1.5):
            began = time.monotonic()
            assert make_entry(other) == b"payload"
            assert time.monotonic() - began < 1.4, "nobody waits for another key"
            began = time.monotonic()
            assert make_entry(key) == b"payload"
            assert 1.5 <= time.monotonic() - began < 20
            # It was kept all the same.
            began = time.monotonic()
            assert make_entry(key, b"made again") == b"payload"
            assert time.monotonic() - began < 1.4
        (tmp_path / "cache" / "kernels" / f"{key.wanted}-{key.maker}").unlink()
        # Whoever waits can be interrupted, by Ctrl-C as by an alarm.
        before = signal.signal(signal.SIGALRM, raise_timeout)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(TimeoutError, match="an alarm"):
            make_entry(key)
        signal.signal(signal.SIGALRM, before)
        began = time.monotonic()
        threading.Timer(0.3, holder.kill).start()
        assert make_entry(key) == b"payload"
        assert 0.3 <= time.monotonic() - began < 20
    assert sorted(path.name for path in (tmp_path / "cache" / "kernels").iterdir()) == sorted(
        ["lock", *(f"{each.wanted}-{each.maker}" for each in (key, other))]
    )


def test_threads_make_an_entry_once_and_one_may_want_what_it_makes(fresh: object) -> None:
    key, made = new_key(), []

    def make() -> bytes:
        made.append(1)
        time.sleep(0.1)
        if len(made) == 1:
            # As a signal handler would while its thread compiles.
            assert make_entry(key, b"inner") == b"inner"
        return b"outer"

    results = []
    threads = [
        threading.Thread(target=lambda: results.append(load_or_make(key, make, lambda found: found))) for _ in range(4)
    ]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - began < 10
    assert (len(made), set(results)) == (1, {b"outer"})


def test_a_fork_keeps_no_lock(fresh: object) -> None:
    key, children = new_key(), []

    def make() -> bytes:
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        children.append(child)
        raise CacheError("nothing was made")

    try:
        with pytest.raises(CacheError, match="nothing was made"):
            load_or_make(key, make, lambda found: found)
        began = time.monotonic()
        assert make_entry(key) == b"payload"
        assert time.monotonic() - began < 5
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


# fcntl as on a file system that has no locks.
NO_LOCKS = """
enum { F_OFD_SETLK = 37, F_OFD_SETLKW = 38 };
#include <errno.h>
int fcntl(int descriptor, int command, ...) {
    errno = command == F_OFD_SETLK || command == F_OFD_SETLKW ? ENOLCK : 0;
    return errno ? -1 : 0;
}
int fcntl64(int descriptor, int command, ...) { return fcntl(descriptor, command); }
"""


@pytest.mark.cpu
def test_a_file_system_without_locks_keeps_kernels(tmp_path: Path) -> None:
    library = tmp_path / "no_locks.so"
    command = [*cpu_backend.find_compiler(config.cxx).command, "-x", "c", "-", "-shared", "-fPIC", "-o", str(library)]
    subprocess.run(command, input=NO_LOCKS, text=True, check=True)
    program = f"""
import os, sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
from cache_worker import answer
for compiles in (1, 0):
    found = answer("cpu", 1, {str(tmp_path / "cache")!r})
    assert (found["result"], found["compiles"], found["warnings"]) == ("True", compiles, []), found
import fcntl
try:
    fcntl.fcntl(0, fcntl.F_OFD_SETLK, bytes(32))
except OSError as error:
    print(error.strerror)
"""
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "No locks available\n"), done.stderr
    assert len(entries_of(tmp_path / "cache")) == 1


@pytest.mark.cpu
def test_a_compiler_that_hangs_is_ended_with_all_it_started(fresh: object, tmp_path: Path) -> None:
    script, started = tmp_path / "g++", tmp_path / "started"
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo 1 && exit\nsleep 600 &\necho $! > {started}\nwait\n')
    script.chmod(0o755)
    fn, x = new_functor(), torch.ones(3)
    with config.patch(cxx=str(script), compile_timeout=1.5):
        with pytest.raises(CompilerTimeoutError, match=r"took longer than 1.5 s \(FUSER_COMPILE_TIMEOUT\)"):
            fn.check(device="cpu")
        # A zombie is gone too: nobody is there to collect it.
        status = Path(f"/proc/{int(started.read_text())}/status")
        deadline = time.monotonic() + 5
        while status.exists() and "State:\tZ" not in status.read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not status.exists() or "State:\tZ" in status.read_text()
        with pytest.warns(FallbackWarning, match="took longer than"):
            assert fn(x).tolist() == [3.0 + int(fn.__name__.removeprefix("stored"))] * 3


# ---- one file for many processes ----


@pytest.mark.cpu
def test_kernels_ship_with_a_model(workers: list[Worker], tmp_path: Path) -> None:
    saved, again, bad = (tmp_path / f"{name}.kernels" for name in ("model", "again", "bad"))
    maker, user = workers
    assert maker.ask(kind="cpu", number=1, cache=str(tmp_path / "cache"), save=str(saved))["saved"] == 1
    request = {"kind": "cpu", "number": 1, "cache": str(tmp_path / "empty"), "load": str(saved)}
    settings = {"cxx": "/nowhere/g++", "no_compile": True}
    found = user.ask(settings=settings, **request)
    assert (found["result"], found["loaded"], found["compiles"], found["warnings"]) == ("True", 1, 0, [])
    # Once more, from a file that was loaded and with no cache at all.
    found = user.ask(settings={**settings, "disk_cache": False}, save=str(again), **request)
    assert (found["result"], found["saved"]) == ("True", 1)
    assert again.read_bytes() == saved.read_bytes()
    # Nothing was written to a cache by loading.
    assert not (tmp_path / "empty").exists()
    dice, data = random.Random(2), saved.read_bytes()
    damaged = [data[:-1], data[:100], data + b"\0", b"", data[:16] + b"../../x".ljust(64) + data[80:]]
    for _ in range(50):
        flipped = bytearray(data)
        flipped[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        damaged.append(bytes(flipped))
    for text in damaged:
        bad.write_bytes(text)
        with pytest.raises(CacheError, match="bad"):
            fuser.load_cache(bad)
    with pytest.raises(FileNotFoundError):
        fuser.load_cache(tmp_path / "missing")


def test_what_is_saved_is_what_the_process_used(fresh: object, tmp_path: Path) -> None:
    kept, other = [new_key() for _ in range(3)], new_key()
    make_entry(other)
    disk_cache._used.clear()
    for key in kept:
        make_entry(key, key.wanted.encode())
    saved = tmp_path / "saved"
    assert fuser.save_cache(saved) == 3
    assert stat.S_IMODE(saved.stat().st_mode) == 0o666 & ~current_umask()
    with config.patch(disk_cache=False):
        assert fuser.load_cache(saved) == 3
        assert [disk_cache.read(key) for key in kept] == [key.wanted.encode() for key in kept]
        # Whoever made it: that is what a file ships for.
        assert disk_cache.read(CacheKey(kept[0].wanted, "0" * 16)) == kept[0].wanted.encode()
        assert disk_cache.read(other) is None
        for wrong, kind in ((tmp_path / "cache", IsADirectoryError), (tmp_path / "no" / "file", FileNotFoundError)):
            with pytest.raises(kind, match=f": '{wrong}'$"):
                fuser.save_cache(wrong)
        # What no file has is kept in memory.
        make_entry(new_key())
        assert fuser.save_cache(saved) == 4
    shutil.rmtree(tmp_path / "cache")
    make_entry(new_key())
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(CacheError, match="not in the cache any more"):
        fuser.save_cache(tmp_path / "more")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_saved_file_that_is_cut_is_refused(fresh: object, tmp_path: Path) -> None:
    disk_cache._used.clear()
    sizes = []
    for count in (1, 2):
        key = new_key()
        make_entry(key, key.wanted.encode())
        assert fuser.save_cache(tmp_path / "saved") == count
        sizes.append((tmp_path / "saved").stat().st_size)
    data, digest_bytes = (tmp_path / "saved").read_bytes(), 32
    # Between two entries, in the head, and anywhere.
    for size in (sizes[0] - digest_bytes, len(disk_cache.SAVED), len(data) - digest_bytes, *range(0, len(data), 7)):
        (tmp_path / "cut").write_bytes(data[:size])
        with pytest.raises(CacheError, match="is not a file of kernels"):
            fuser.load_cache(tmp_path / "cut")


def current_umask() -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.partition("Umask:")[2].split()[0], 8)


RANK = """
import os, torch, torch.distributed, fuser
torch.distributed.init_process_group("gloo")
functors = [fuser.create_jit_fn("template <typename T> T rank%d(T x) { return x * %d; }" % (n, n)) for n in range(5)]
torch.distributed.barrier()
for number, function in enumerate(functors):
    assert function(torch.ones(3)).tolist() == [number] * 3
compiled = torch.tensor(fuser.stats()["compiles"])
torch.distributed.all_reduce(compiled)
assert compiled.item() == 5, compiled
assert fuser.n_compiled_kernels() == 5
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.cpu
def test_the_ranks_of_a_job_compile_each_kernel_once(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = os.pathsep.join(map(str, (ROOT, *sys.path)))
    environment = {**os.environ, "FUSER_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": paths}
    done = subprocess.run(
        [*command, str(tmp_path / "job.py")], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(entries_of(tmp_path / "cache")) == 5


@pytest.mark.cpu
def test_a_first_call_leaves_nothing_to_the_garbage_collector(tmp_path: Path) -> None:
    # A file that is not there is an exception, and its traceback holds the frames that it came through.
    made = fuser.jit_fn("template <typename T> T first_call(T x) { return x * T(3) + T(1); }")
    gc.collect()
    gc.disable()
    try:
        with config.patch(cache_dir=str(tmp_path)):
            x = torch.randn(8, 5)
            seen = weakref.ref(x)
            made(x)
            del x
        assert seen() is None
    finally:
        gc.enable()
