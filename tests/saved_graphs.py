"""Saves programs that call functors, or loads and runs them: ``saved_graphs.py save|load FOLDER [CASE ...]``.

Both print a JSON object: by case, the exception that it raised, or what it found. The process that loads has imported
fuser and knows none of the functors: all their texts stand in ``save``.
"""

from __future__ import annotations

import copy
import json
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import fuser
from fuser import executor

ROWS = torch.linspace(-1, 2, 12).view(3, 4)
MORE_ROWS = torch.linspace(-2, 3, 20).view(5, 4)


class Saver:
    """Programs, and a way to save each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        pair = fuser.create_multi_output_jit_fn(
            "template <typename T> void pair(T x, T y, T& a, T& b) { a = x * y; b = x + y * y; }", 2
        )
        mixed = fuser.create_jit_fn(
            "template <typename T> T mixed(T x, T y, int n, double s, bool b, double low) {"
            " return b && x < T(low) ? y : x * T(n) + y * T(s); }",
            n=3,
            s=0.5,
            b=True,
            low=float("-inf"),
        )
        loop = fuser.create_jit_fn(
            "template <typename T> T grow(T x) { T s = x; while (s < T(3)) { s = s * s + T(1); } return s; }"
        )
        hand = fuser.jit_fn(
            "template <typename T> T step(T x) { return x > T(0) ? T(1) : T(0); }",
            backward=fuser.jit_fn("template <typename T> T slope(T x, T g) { return g * T(3) * x; }"),
        )
        given = fuser.jit_fn("template <typename T> T given(T x) { return x + x; }", fallback=lambda x: x + x)
        self.functor = mixed

        class Model(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 4))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                a, b = pair(x, self.weight)
                return mixed(a, b, n=x.shape[0], s=x.shape[0] / 3)

        class Loop(Model):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return hand(loop(x)) * self.weight

        class Given(Model):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return given(x)

        self.model, self.loop, self.given = Model(), Loop(), Given()

    def export(self, name: str, model: torch.nn.Module | None = None, **options: Any) -> None:
        """Save with torch.export."""
        program = torch.export.export(model or self.model, (ROWS,), **options)
        torch.export.save(program, self.folder / f"{name}.pt2")

    def save(self, case: str) -> Any:
        """Save one case; what it returns is printed."""
        if case in {"strict", "non-strict"}:
            return self.export(case, strict=case == "strict")
        if case in {"dynamic strict", "dynamic"}:
            rows = {0: torch.export.Dim("rows", min=2, max=64)}
            return self.export(case, strict=case == "dynamic strict", dynamic_shapes=(rows,))
        if case == "fused module":
            return self.export(case, fuser.fuse(self.model))
        if case == "loop":
            return self.export(case, self.loop)
        if case == "fallback":
            return self.export(case, self.given)
        if case == "jit.trace":
            return torch.jit.trace(self.model, (ROWS,)).save(self.folder / "jit.trace.pt")
        if case == "graph module":
            fused = fuser.fuse(self.model)
            fused(ROWS)
            return (self.folder / "graph module.pkl").write_bytes(pickle.dumps(fused.graph_module)) and None
        if case == "pickle":
            held = (self.functor, self.functor.spec(2).group)
            return (self.folder / "pickle.pkl").write_bytes(pickle.dumps(held)) and None
        if case == "package":
            program = torch.export.export(self.model, (ROWS,), dynamic_shapes=({0: torch.export.Dim("rows", max=64)},))
            torch._inductor.aoti_compile_and_package(program, package_path=str(self.folder / "package.pt2"))
            return None
        assert case in {"inductor", "fuser"}
        return self.compile(case)

    def compile(self, backend: str) -> dict[str, Any]:
        """Train a step under torch.compile; with a graph that both backends take."""
        from torch._dynamo.utils import counters

        # Without broadcasting Inductor has nothing of its own to compile; other cases have the model as it is.
        model = copy.deepcopy(self.model)
        model.weight = torch.nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4))
        torch._dynamo.reset()
        counters.clear()
        wanted = run(model, ROWS)
        with patch.object(executor, "make_plan", wraps=executor.make_plan) as planner:
            found: dict[str, Any] = check(torch.compile(model, backend=backend, fullgraph=True), wanted)
        found["plans"] = planner.call_count > 0
        return found | {"from cache": counters["aot_autograd"]["autograd_cache_hit"]}


def run(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Return a model's result, and the gradients of it by the input and by the weight."""
    x = x.clone().requires_grad_()
    result = model(x)
    weights = list(model.parameters()) if isinstance(model, torch.nn.Module) else []
    return [result.detach(), *torch.autograd.grad(result.square().sum(), [x, *weights], allow_unused=True)]


def check(model: Any, wanted: list[torch.Tensor], x: torch.Tensor = ROWS) -> dict[str, bool]:
    """Compare a model with what it gave where it was saved."""
    return {"equal": all(map(torch.equal, run(model, x), wanted)), "gradients": len(wanted) > 1}


class Loader:
    """The same programs in another process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.wanted = torch.load(folder / "wanted.pt")

    def load(self, case: str) -> Any:
        """Load and run one case."""
        wanted = self.wanted["loop" if case == "loop" else "model"]
        if case in {"inductor", "fuser"}:
            # The same program, as from another run of a script.
            return Saver(self.folder).compile(case)
        if case == "jit.trace":
            return check(torch.jit.load(self.folder / "jit.trace.pt"), wanted)
        if case == "graph module":
            # The weight of a module that fuse traced is not a parameter of the graph.
            module = pickle.loads((self.folder / "graph module.pkl").read_bytes())
            return check(lambda x: module(x), wanted[:2])
        if case == "pickle":
            functor, group = pickle.loads((self.folder / "pickle.pkl").read_bytes())
            key = fuser.register_fusion(group)
            (result,) = fuser.run_fusion(key, [ROWS, ROWS, 3, 0.5, True, float("-inf")])
            return {"equal": torch.equal(result, functor(ROWS, ROWS)), "same key": key == self.wanted["key"]}
        if case == "package":
            package = torch._inductor.aoti_load_package(str(self.folder / "package.pt2"))
            equal = [
                torch.equal(package(x), self.wanted[name][0]) for x, name in ((ROWS, "model"), (MORE_ROWS, "more"))
            ]
            return {"equal": all(equal)}
        module = torch.export.load(self.folder / f"{case}.pt2").module()
        found = check(module, wanted)
        if case.startswith("dynamic"):
            found["larger"] = check(module, self.wanted["more"], MORE_ROWS)["equal"]
        if case == "strict":
            fuser.reset_stats()
            found["fused"] = check(torch.compile(module, backend="fuser"), wanted)["equal"]
            found["launches"] = fuser.stats()["launches"]
        return found


def main(action: str, folder: Path, cases: list[str]) -> dict[str, Any]:
    """Do all cases."""
    warnings.simplefilter("ignore")
    if action == "save":
        saver = Saver(folder)
        wanted: dict[str, Any] = {"model": run(saver.model, ROWS), "more": run(saver.model, MORE_ROWS)}
        wanted |= {"loop": run(saver.loop, ROWS), "key": saver.functor.spec(2).key}
        torch.save(wanted, folder / "wanted.pt")
        act = saver.save
    else:
        act = Loader(folder).load
    found: dict[str, Any] = {}
    for case in cases:
        try:
            found[case] = act(case)
        except Exception as error:
            found[case] = f"{type(error).__module__}.{type(error).__name__}: {error}"
    return found


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])))
