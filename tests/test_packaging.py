"""What is shipped: the wheel works where nothing else of the project is, also without compilers; the sdist is whole."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MADE = (".git", ".venv", "build", "dist", "site", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis", "*.so")
BUILD = "from setuptools import build_meta; build_meta.build_sdist('dist'); build_meta.build_wheel('dist')"

SMOKE = """
import pathlib, warnings
import torch
import fuser
assert pathlib.Path(fuser.__file__).is_relative_to(pathlib.Path.cwd()), fuser.__file__
relu = fuser.create_jit_fn("template <typename T> T relu(T x) { return x > T(0) ? x : T(0); }")
x = torch.randn(1000)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        assert torch.equal(relu(x), torch.relu(x))
print(len(caught), fuser.stats()["launches"], "; ".join(fuser.stats()["fallbacks"]))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an sdist and a wheel, built from a copy of the sources."""
    copy = tmp_path_factory.mktemp("built") / "sources"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*MADE))
    subprocess.run([sys.executable, "-c", BUILD], cwd=copy, check=True, capture_output=True, timeout=300)
    return copy / "dist"


def test_the_sdist_has_what_is_kept(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    kept = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    listed = kept.stdout.split() or ["CHANGELOG.md", "docs/tutorial.md", "examples/photo.py", "tests/test_packaging.py"]
    assert [name for name in listed if name not in names and name != ".gitignore"] == []


def test_the_wheel_has_the_package_and_nothing_else(built: Path) -> None:
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        metadata = message_from_bytes(archive.read(next(name for name in names if name.endswith("METADATA"))))
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {"fuser"}
    sources = {str(item.relative_to(ROOT)) for item in (ROOT / "fuser").rglob("*") if item.suffix in {".py", ".h"}}
    assert sources | {"fuser/py.typed"} <= set(names)
    assert metadata["Requires-Python"] == ">=3.11"
    assert "LICENSE" in metadata.get_all("License-File", [])
    # No upper bounds: nobody knows a version yet that does not work.
    assert [item for item in metadata.get_all("Requires-Dist", []) if "<" in item] == []


@pytest.mark.cpu
def test_the_description_stands_alone(built: Path) -> None:
    """A package index shows it far from the repository: no link and no picture may be relative to one."""
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        text = archive.read(next(name for name in archive.namelist() if name.endswith("METADATA"))).decode()
    description = str(message_from_bytes(text.encode()).get_payload())
    links = re.findall(r"\]\(([^)]+)\)", description)
    assert [link for link in links if not link.startswith("https://")] == []
    (example,) = re.findall(r"```python\n(.*?)```", description, re.DOTALL)
    subprocess.run([sys.executable, "-c", example], cwd=ROOT, check=True, timeout=120)


def environment_without_compilers(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FUSER_", "PYTHON", "CXX", "CC"))}
    return {**kept, "PATH": str(folder / "empty"), "HOME": str(folder), "XDG_CACHE_HOME": str(folder)}


def install(package: Path, folder: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--target", str(folder), str(package)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def run_smoke(folder: Path, environment: dict[str, str]) -> None:
    (folder / "smoke.py").write_text(SMOKE)
    done = subprocess.run(
        [sys.executable, "smoke.py"], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    warned, launches, reason = done.stdout.strip().split(" ", 2)
    assert (warned, launches) == ("1", "0")
    assert "C++ compiler" in reason


def test_the_wheel_works_without_compilers(built: Path, tmp_path: Path) -> None:
    (path,) = built.glob("*.whl")
    environment = environment_without_compilers(tmp_path)
    install(path, tmp_path / "site", environment)
    run_smoke(tmp_path / "site", environment)


@pytest.mark.slow
def test_the_sdist_installs_without_compilers(built: Path, tmp_path: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    environment = environment_without_compilers(tmp_path)
    install(path, tmp_path / "site", environment)
    assert not list((tmp_path / "site" / "fuser").glob("_launcher*.so"))
    run_smoke(tmp_path / "site", environment)


@pytest.mark.slow
@pytest.mark.cpu
def test_the_sdist_installs_with_compilers(built: Path, tmp_path: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    environment = {**environment_without_compilers(tmp_path), "PATH": os.environ["PATH"]}
    install(path, tmp_path / "site", environment)
    (launcher,) = (tmp_path / "site" / "fuser").glob("_launcher*.so")
    assert launcher.name.endswith(".abi3.so")
    told = subprocess.run(
        [sys.executable, "-m", "fuser", "info"], cwd=tmp_path / "site", env=environment, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert str(tmp_path) in told.stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_installs_anew_what_is_compiled(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    (tmp_path / ".dev").touch()

    def installs(*options: str) -> bool:
        line = ["make", "-n", *options, "lint", f"VENV={tmp_path}"]
        told = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return "--editable" in told

    assert not installs()
    assert installs("-W", "fuser/_launcher.c")
