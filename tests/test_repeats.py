"""Work on a column that a kernel would repeat for each element of its rows: a group of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graph_checks import trace

from fuser.fx import fuse_graph
from fuser.fx.passes import FusionModule

ATEN = torch.ops.aten


def find_names(write: Any, rows: int, width: int) -> list[list[str]]:
    inputs = [torch.empty(shape, device="meta") for shape in ((rows, width), (rows, 1), (rows, 1))]
    module = fuse_graph(trace(write, inputs, "cuda"))
    return [item.group.names() for item in module.modules() if isinstance(item, FusionModule)]


def weigh(call: Any, x: Any, a: Any, b: Any) -> Any:
    # More than hides behind memory: two exponentials and a quotient.
    column = call(ATEN.div.Tensor, call(ATEN.expm1.default, call(ATEN.exp.default, a)), call(ATEN.exp.default, b))
    return call(ATEN.mul.Tensor, x, call(ATEN.add.Tensor, call(ATEN.tanh.default, column), call(ATEN.sin.default, a)))


@pytest.mark.parametrize(("rows", "width", "parts"), [(1 << 17, 128, 2), (1 << 10, 128, 1), (1 << 20, 16, 1)])
def test_what_large_results_repeat(rows: int, width: int, parts: int) -> None:
    found = find_names(weigh, rows, width)
    assert len(found) == parts
    assert parts == 1 or found[1] == ["mul"]


def test_little_work_is_repeated() -> None:
    found = find_names(lambda call, x, a, b: call(ATEN.mul.Tensor, x, call(ATEN.add.Tensor, a, b)), 1 << 17, 128)
    assert found == [["add", "mul"]]


def test_what_reads_it_is_free_for_reductions() -> None:
    def write(call: Any, x: Any, a: Any, b: Any) -> Any:
        # A sum of columns joins no group that looks entries up.
        entries = call(ATEN._to_copy.default, call(ATEN.view.default, a, [1 << 17]), dtype=torch.int64)
        column = call(ATEN.index_select.default, b, 0, entries)
        scaled = call(ATEN.mul.Tensor, x, call(ATEN.div.Tensor, call(ATEN.exp.default, column), b))
        return scaled, call(ATEN.sum.dim_IntList, scaled, [0])

    assert [names[-2:] for names in find_names(write, 1 << 17, 128)] == [["exp", "div"], ["mul", "sum"]]
