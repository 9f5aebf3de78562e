"""Importing fuser starts nothing, and the package knows its own version."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fuser
from fuser import late

# Runs in a fresh process. Everything after `import torch` is fuser's own doing.
PROBE = """
import json, sys
import torch

before = set(sys.modules)
events = []

def watch(event, args):
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        events.append([event, str(args[0])])
    elif event in ("os.mkdir", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect"):
        events.append([event, str(args[0])])

sys.addaudithook(watch)
import fuser
print(json.dumps({
    "modules": sorted(set(sys.modules) - before),
    "events": events,
    "cuda": torch.cuda.is_initialized(),
    "texts": sys.modules["fuser.cxx.functor"].read_text.cache_info().misses,
}))
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one `import fuser` did, and the files it left."""
    home = tmp_path_factory.mktemp("home")
    cache = home / "fuser"
    places = {"HOME": home, "XDG_CACHE_HOME": home, "TMPDIR": home, "FUSER_CACHE_DIR": cache}
    environment = {**os.environ, **{name: str(path) for name, path in places.items()}, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    return {**json.loads(done.stdout.splitlines()[-1]), "files": sorted(map(str, home.rglob("*")))}


def test_import_touches_no_gpu(imported: dict[str, Any]) -> None:
    assert imported["cuda"] is False


HEAVY = (
    "cuda.core cuda.bindings networkx torch._dynamo torch._inductor torch.distributed.tensor torch.utils.flop_counter"
    # What reads whole texts, and runs them in eager torch.
    " fuser.cxx.nodes fuser.eager html"
    # What calls of functors without a gradient do not need.
    " fuser.fx fuser.debug fuser.ops fuser.autodiff.autograd fuser.reduction fuser._later"
)


@pytest.mark.parametrize("heavy", HEAVY.split())
def test_import_leaves_the_heavy_modules_alone(imported: dict[str, Any], heavy: str) -> None:
    assert [name for name in imported["modules"] if name == heavy or name.startswith(f"{heavy}.")] == []


def test_import_reads_no_text(imported: dict[str, Any]) -> None:
    assert imported["texts"] == 0


def test_import_writes_and_starts_nothing(imported: dict[str, Any]) -> None:
    assert imported["events"] == []
    assert imported["files"] == []


# The text of a first kernel, of functors and torch's functions, for the device that is named.
FIRST = """
import json, sys
import torch, fuser
from torch.overrides import _get_overridable_functions

add = fuser.create_jit_fn("template <typename T> T add(T x, T y) { return x + y; }")
fused = fuser.fuse(lambda x, y: torch.sigmoid(torch.mul(add(x, y), y)))
meta = torch.empty(8, device="meta")
fused(meta, meta)
(group,) = fused.groups
assert fuser.debug_get_fused_kernel_code(group, [meta, meta], device=sys.argv[1])
print(json.dumps([sorted(sys.modules), _get_overridable_functions.cache_info().misses]))
"""


@pytest.mark.parametrize("room", ["cpu", "cuda"])
def test_a_first_kernel_takes_no_more_than_it_needs(room: str) -> None:
    done = subprocess.run([sys.executable, "-c", FIRST, room], capture_output=True, text=True, check=True, timeout=120)
    modules, lists_of_functions = json.loads(done.stdout)
    assert f"fuser.{room}.dialect" in modules
    # What writes reductions, and torch's list of all that can be overridden.
    assert [name for name in modules if name.startswith(f"fuser.{room}.rows")] == []
    assert lists_of_functions == 0


# A call from the disk cache needs nothing of them either.
CALL = """
import sys
import torch, fuser
add = fuser.create_jit_fn("template <typename T> T add(T x, T y) { return x + y; }")
assert add(torch.ones(8), torch.ones(8)).tolist() == [2] * 8
assert not fuser.stats()["fallbacks"]
print(*sorted(sys.modules))
"""


@pytest.mark.cpu
def test_a_call_of_a_functor_loads_nothing_of_what_comes_later() -> None:
    done = subprocess.run([sys.executable, "-c", CALL], capture_output=True, text=True, check=True, timeout=120)
    later = ("fuser.fx", "fuser.ops", "fuser.autodiff.autograd", "fuser._later")
    assert [name for name in done.stdout.split() if name.startswith(later)] == []


# Names that come later, asked for by threads that begin together, while others import parts of the same rooms.
RACE = """
import importlib, sys, threading
import torch, fuser

names = [name for name in fuser.__all__ if name not in vars(fuser)]
assert names and set(names) < set(dir(fuser))
barrier, failures = threading.Barrier(len(names) + 2), []

def look(find, *arguments):
    barrier.wait()
    try:
        find(*arguments)
    except BaseException as error:
        failures.append(error)

threads = [threading.Thread(target=look, args=(getattr, fuser, name)) for name in names]
rooms = ("fuser.fx", "fuser.sharding")
threads += [threading.Thread(target=look, args=(importlib.import_module, name)) for name in rooms]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(60)
assert not failures, failures
from fuser import _later
assert all(getattr(fuser, name) is getattr(_later, name) for name in names)
assert set(names) == set(_later.__all__)
print("done")
"""


def test_threads_may_be_the_first_to_name_what_comes_later() -> None:
    done = subprocess.run([sys.executable, "-c", RACE], capture_output=True, text=True, check=False, timeout=120)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr


def test_what_is_no_name_of_fusers_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'fuser' has no attribute 'bogus'"):
        fuser.bogus  # type: ignore[attr-defined]  # noqa: B018
    namespace: dict[str, Any] = {}
    exec("from fuser import *", namespace)
    assert set(fuser.__all__) <= set(namespace)


def test_version_is_the_same_everywhere() -> None:
    assert importlib.metadata.version("torch-fuser") == fuser.__version__
    changelog = Path(__file__).parents[1] / "CHANGELOG.md"
    assert f"## [{fuser.__version__}]" in changelog.read_text(encoding="utf-8")


def test_torch_compile_finds_the_backend_without_an_import() -> None:
    (entry,) = importlib.metadata.entry_points(group="torch_dynamo_backends", name="fuser")
    assert entry.value == "fuser.fx.backend:fuser_backend"
    assert callable(entry.load())


def test_what_waits_for_a_module_is_done_once_whenever_that_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "waited_for").mkdir()
    (tmp_path / "waited_for" / "__init__.py").write_text("value = 1\n", encoding="utf-8")
    (tmp_path / "waited_for" / "part.py").write_text("value = 2\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[int] = []
    late.when_imported("waited_for.part", lambda: seen.append(sys.modules["waited_for.part"].value))
    # Asking for it is not importing it.
    assert importlib.util.find_spec("waited_for.part") is not None
    assert not seen
    part = importlib.import_module("waited_for.part")
    assert seen == [2]
    assert inspect.getsource(part) == "value = 2\n"
    importlib.reload(part)
    assert seen == [2]
    # Too late to wait for.
    late.when_imported("waited_for", lambda: seen.append(1))
    assert seen == [2, 1]
    late.when_imported("no_such_module_anywhere", lambda: seen.append(3))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module_anywhere")
    assert seen == [2, 1]
