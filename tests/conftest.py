"""What every test gets: markers by need, a cache of its own, golden files, hypothesis profiles."""

from __future__ import annotations

import difflib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
import torch

# Compiles every generated kernel for CUDA too.
pytest_plugins = ["cubins"]

GOLDEN = Path(__file__).parent / "golden"

# "ci" draws the same examples in every run; "fuzz" draws new ones for as long as somebody lets it.
hypothesis.settings.register_profile(
    "ci",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=25,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "fuzz",
    deadline=None,
    max_examples=2000,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)

# Set before any test module imports fuser, which reads its environment once: no test may touch the user's own cache.
# The workers of a run inherit the folder, and compile nothing twice.
_IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if not _IS_WORKER:
    os.environ["FUSER_CACHE_DIR"] = tempfile.mkdtemp(prefix="fuser-tests-")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the project's options."""
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files instead of comparing with them")


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers and choose the hypothesis profile."""
    config.addinivalue_line("markers", "cuda: needs a CUDA device")
    config.addinivalue_line("markers", "cpu: needs a host C++ compiler")
    config.addinivalue_line("markers", "slow: takes more than 20 s")
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_unconfigure() -> None:
    """Remove the cache of this run."""
    if not _IS_WORKER:
        shutil.rmtree(os.environ["FUSER_CACHE_DIR"], ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, and say what it lacks."""
    lacks = {}
    if not torch.cuda.is_available():
        lacks["cuda"] = pytest.mark.skip(reason="needs a CUDA device (torch finds none)")
    if not has_host_compiler():
        lacks["cpu"] = pytest.mark.skip(reason="needs a C++ compiler (none found; set CXX)")
    for item in items:
        for marker, skip in lacks.items():
            if item.get_closest_marker(marker):
                item.add_marker(skip)


def has_host_compiler() -> bool:
    """Return whether fuser finds a compiler for CPU kernels."""
    # Here and not at the top: fuser reads its environment when it is imported, after the cache above is set.
    from fuser.config import config
    from fuser.cpu.backend import find_compiler
    from fuser.errors import CompilerNotFoundError

    try:
        find_compiler(config.cxx)
    except CompilerNotFoundError:
        return False
    return True


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Return ``check(name, text)``: the text equals ``tests/golden/NAME``, or becomes it under ``--update-golden``."""
    update = request.config.getoption("--update-golden")

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        expected = path.read_text(encoding="utf-8") if path.exists() else ""
        if text != expected:
            diff = difflib.unified_diff(expected.splitlines(), text.splitlines(), f"golden/{name}", "now", lineterm="")
            pytest.fail("\n".join([*diff, "", "if this is right: pytest --update-golden, and read the diff"]))

    return check
