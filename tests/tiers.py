"""Three tiers of tests: what ``make check``, ``make test`` and ``make test-all`` run (CONTRIBUTING.md has the table).

A pytest plugin (conftest.py loads it). ``--tier N`` is 2 unless told. A test belongs to the lowest tier that its marks
allow: ``cpu``, ``nvrtc`` and ``cuda`` say what it needs and begin in tier 2, ``slow`` says that it is long, or that it
repeats for more dtypes what a quick one shows, and waits for tier 3, as all but about one in n cases of a test with
``one_in(n)`` do; one without a mark runs in all three.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import pytest
import torch

NEEDS = {
    "cpu": "a host C++ compiler (none found; set CXX)",
    "nvrtc": "NVRTC (wheel nvidia-cuda-nvrtc), which needs no GPU",
    "cuda": "a CUDA device (torch finds none)",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--tier``."""
    parser.addoption("--tier", type=int, choices=(1, 2, 3), default=2, help="1: no compiler; 2: default; 3: all tests")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks, and make sure that the first tier compiles nothing."""
    for name, what in NEEDS.items():
        config.addinivalue_line("markers", f"{name}: needs {what}")
    config.addinivalue_line("markers", "slow: runs in tier 3 only")
    config.addinivalue_line("markers", "one_in(n): of its cases about one in n runs in tier 2, all in tier 3")
    if config.getoption("tier") == 1:
        # Whoever compiles all the same lacks a mark, and fails.
        os.environ["FUSER_NO_COMPILE"] = "1"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what belongs to a later tier, and skip what this machine cannot run; an own ``-m slow`` is obeyed."""
    tier = config.getoption("tier")
    later = {1: {"slow", *NEEDS}, 2: {"slow"}, 3: set()}[tier] - set(config.getoption("markexpr").split())
    groups: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        part = item.get_closest_marker("one_in") if "slow" in later else None
        is_later = part is not None and choose(item.name, part.args[0]) > 0
        groups[is_later or any(item.get_closest_marker(name) for name in later)].append(item)
    if groups[True]:
        config.hook.pytest_deselected(items=groups[True])
        items[:] = groups[False]
    for item in items:
        for name, what in NEEDS.items():
            if item.get_closest_marker(name) and not has(name):
                item.add_marker(pytest.mark.skip(reason=f"needs {what}"))


@pytest.fixture(autouse=True)
def _nothing_is_compiled_without_a_mark(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let a forgotten mark show in each tier, not only in the first: whoever compiles without one fails."""
    if any(request.node.get_closest_marker(name) for name in NEEDS):
        yield
        return
    # Here and not at the top, as below.
    from fuser.config import config

    with config.patch(no_compile=True):
        yield


@pytest.fixture(scope="session")
def tier(request: pytest.FixtureRequest) -> int:
    """Return the tier that runs, for tests that do more of the same in the third."""
    return int(request.config.getoption("tier"))


@cache
def has(need: str) -> bool:
    """Whether this machine has what a mark stands for."""
    return {"cpu": has_host_compiler, "nvrtc": has_nvrtc, "cuda": torch.cuda.is_available}[need]()


def has_host_compiler() -> bool:
    """Whether fuser finds a compiler for CPU kernels."""
    # Here and not at the top: fuser reads its environment when it is imported, after conftest.py has set it.
    from fuser.config import config
    from fuser.cpu.backend import find_compiler
    from fuser.errors import CompilerNotFoundError

    try:
        find_compiler(config.cxx)
    except CompilerNotFoundError:
        return False
    return True


def has_nvrtc() -> bool:
    """Whether cuda.bindings and NVRTC can be loaded."""
    try:
        from cuda.bindings import nvrtc
        from cuda.pathfinder import DynamicLibNotFoundError
    except ImportError:
        return False
    try:
        nvrtc.nvrtcVersion()
    except (DynamicLibNotFoundError, RuntimeError):
        return False
    return True


def choose(text: str, count: int) -> int:
    """Return a number below ``count``, the same for the same text in every run."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) % count


def one_of_each(pairs: Iterable[tuple[Any, Any]], quick: int = 1) -> list[Any]:
    """Return parameters for pairs, of which a few (``quick``) of each first element run in tier 2; others are ``slow``.

    Which ones is chosen by the first element's name: all of them together meet every second element.
    """
    groups: dict[str, list[tuple[Any, Any]]] = {}
    for first, second in pairs:
        groups.setdefault(str(first), []).append((first, second))
    found = []
    for name, group in groups.items():
        begin = choose(name, len(group))
        for place, pair in enumerate(group):
            marks = [] if (place - begin) % len(group) < quick else [SLOW]
            found.append(pytest.param(*pair, id=f"{name}-{str(pair[1]).removeprefix('torch.')}", marks=marks))
    return found


SLOW = pytest.mark.slow
