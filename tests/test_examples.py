"""The examples run, and each meets the criterion that it sets itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
# "photo" makes pictures.
EXAMPLES_THAT_CHECK = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "photo")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute in one thread: where other tests keep the processors busy, threads wait for each other at every op."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def load(name: str) -> ModuleType:
    """Run an example's top level."""
    spec = spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.cpu
@pytest.mark.parametrize("name", EXAMPLES_THAT_CHECK)
def test_example_meets_its_criterion(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "swiglu_digits":
        pytest.importorskip("sklearn")
    code = load(name).main()
    printed = capsys.readouterr()
    assert code == 0, printed.out + printed.err
    assert printed.err == ""


@pytest.mark.cpu
def test_the_criteria_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    field = load("force_field")
    monkeypatch.setattr(field, "fit", lambda positions, charges, wanted: (1.002 * torch.tensor(field.TRUE), 1))
    assert field.main() == 1
    neuron = load("spiking_neuron")
    monkeypatch.setattr(neuron, "train", lambda network, spikes, labels: (1.0, 1.0))
    assert neuron.main() == 1
    rows = load("quantise_rows")
    monkeypatch.setattr(rows, "place_of_largest", lambda x, dim: torch.zeros_like(x, dtype=torch.int64).amax(dim))
    assert rows.main() == 1
    norm = load("rms_norm")
    monkeypatch.setattr(norm, "from_functors", lambda x, weight: 1.01 * norm.as_llama_has_it(x, weight))
    assert norm.main() >= 1
    graph = load("graph_pass")
    monkeypatch.setattr(graph, "put_functors", lambda traced: 0)
    assert graph.main() >= 1
    optimizers = load("optimizers")
    monkeypatch.setattr(optimizers.AdamW, "step", lambda self: None)
    assert optimizers.main() == 1


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert load("swiglu_digits").main() == 1
    assert "pip install 'torch-fuser[demo]'" in capsys.readouterr().err
