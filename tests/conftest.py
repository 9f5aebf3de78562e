"""What every test gets: a cache of its own, golden files, hypothesis profiles."""

from __future__ import annotations

import difflib
import gc
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# Which tests run; every generated kernel compiles for CUDA too.
pytest_plugins = ["tiers", "cubins"]

GOLDEN = Path(__file__).parent / "golden"

# Tiers draw the same examples in every run, the third more of them; "fuzz" draws new ones for as long as somebody lets
# it. A test that takes more or fewer than others multiplies ``settings().max_examples``.
for _tier, _count in ((1, 8), (2, 8), (3, 100)):
    hypothesis.settings.register_profile(
        f"tier {_tier}",
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=_count,
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

# Set before torch is imported. Two workers have more threads than there are processors: those that wait must not keep
# one busy.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Set before any test module imports fuser, which reads its environment once: no test may touch the user's own cache.
# The workers of a run inherit the folder, and compile nothing twice.
_IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if not _IS_WORKER:
    os.environ["FUSER_CACHE_DIR"] = tempfile.mkdtemp(prefix="fuser-tests-")
    # Torch keeps compiled graphs for all processes of a user: one of a run whose sources were edited meanwhile, say.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(os.environ["FUSER_CACHE_DIR"], "inductor"))
    # A mistake of fuser's must not pass for a fallback.
    os.environ["FUSER_INTERNAL_ERRORS"] = "raise"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the project's options."""
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files instead of comparing with them")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the hypothesis profile."""
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or f"tier {config.getoption('tier')}")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Keep the garbage collector from torch and ten thousand tests, which stay: each walk through them takes long."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Let torch.compile know nothing of what other tests compiled."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def pytest_unconfigure() -> None:
    """Remove the cache of this run."""
    if not _IS_WORKER:
        shutil.rmtree(os.environ["FUSER_CACHE_DIR"], ignore_errors=True)


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
