"""Random FX graphs with fusion nodes do what they did without: values, strides, aliases, mutation, effects, draws.

Groups run in eager torch (fusing on the CPU is switched off), whose bits are those of the nodes they stand for: what is
compared is which nodes become groups, when they run, and what others see. On a GPU the kernels themselves run.
"""

from __future__ import annotations

import operator
import os
import warnings
from collections.abc import Callable, Iterator
from unittest.mock import patch

import pytest
import torch
from aten_graphs import AtenWriter
from functors import functor
from graph_checks import compare, fails, fused, shrink
from graph_writer import GraphWriter, Program
from table_graphs import TableWriter, every_op
from torch import fx

import fuser
from fuser.fx import reuse

SHAPES = [(2, 3, 4), (3, 4), (4,), (2, 1, 4), (2, 3, 1), (), (4, 3), (1, 4), (0, 4)]
DTYPES = [
    torch.float32,
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.bool,
]
UNARY = ["neg", "abs", "relu", "sigmoid", "tanh", "sin", "exp", "square", "rsqrt", "floor", "sign", "isnan"]
BINARY = ["add", "sub", "mul", "div", "maximum", "lt", "eq", "ne", "atan2", "fmod", "pow"]
IN_PLACE = ["add_", "mul_", "sub_", "copy_", "relu_", "neg_", "zero_", "clamp_"]
# Of each kind of graph in tier 3, in so many tests: 10^4 take some minutes.
GRAPHS, PARTS = int(os.environ.get("FX_FUZZ_GRAPHS", "1000")), 20


class Writer(GraphWriter):
    """Writes calls of torch's functions, methods and Python's operators; some write to what others read."""

    shapes, dtypes, known_share = SHAPES, DTYPES, 0.5

    def __init__(self, seed: int, device: str) -> None:
        super().__init__(seed, device)
        self.note = lambda x: self.log.append(str(x.detach().double().nan_to_num().sum())) or x
        # Their own: writing must leave ``given`` alone.
        self.axpy = functor("axpy")
        self.pair = fuser.create_multi_output_jit_fn(
            "template <typename T> void pair(T x, T y, T& s, T& d) { s = x + y; d = x - y; }", 2
        )

    def choose(self) -> Program:
        """Choose what is called, with what."""
        x, y, draw = self.pick(), self.pick(), self.draw
        dims = max(self.values[x].dim(), 1)
        dim = draw.randrange(dims)
        kinds: dict[str, Callable[[], Program]] = {
            "unary": lambda: (getattr(torch, draw.choice(UNARY)), (x,), {}),
            "method": lambda: (draw.choice(UNARY), (x,), {}),
            "binary": lambda: (getattr(torch, draw.choice(BINARY)), (x, draw.choice([y, y, self.number()])), {}),
            "operator": lambda: (draw.choice([operator.add, operator.mul, operator.sub]), (x, y), {}),
            "aten": lambda: (draw.choice([torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor]), (x, y), {}),
            "functor": lambda: (self.axpy, (x, y), {"alpha": draw.choice([2.0, -0.5])}),
            "pair": lambda: (self.pair, (x, y), {}),
            "where": lambda: (torch.where, (self.pick(), x, y), {}),
            "to": lambda: ("to", (x, draw.choice(DTYPES)), {}),
            "reduce": lambda: (getattr(torch, draw.choice(["sum", "mean", "amax"])), (x, dim, draw.random() < 0.5), {}),
            "view": lambda: draw.choice(
                [
                    ("transpose", (x, 0, dim), {}),
                    ("reshape", (x, -1), {}),
                    ("view", (x, -1), {}),
                    ("unsqueeze", (x, dim), {}),
                    ("squeeze", (x,), {}),
                    ("flip", (x, [dim]), {}),
                    (operator.getitem, (x, 0), {}),
                    (operator.getitem, (x, (Ellipsis, slice(1, None))), {}),
                    ("expand_as", (x, y), {}),
                    ("detach", (x,), {}),
                    ("chunk", (x, 2, dim), {}),
                    ("split", (x, 2, dim), {}),
                ]
            ),
            "join": lambda: (draw.choice([torch.cat, torch.stack]), ([x, draw.choice([x, y])], dim), {}),
            "copy": lambda: (draw.choice(["clone", "contiguous"]), (x,), {}),
            "matrix": lambda: draw.choice([(torch.matmul, (x, y), {}), (torch.cumsum, (x, dim), {})]),
            "in place": lambda: self.choose_write(x, y),
            "set": lambda: (
                operator.setitem,
                (x, draw.choice([0, slice(None, 1)]), draw.choice([y, self.number()])),
                {},
            ),
            "out": lambda: (torch.add, (x, self.number()), {"out": y}),
            "random": lambda: draw.choice(
                [
                    (torch.rand_like, (x,), {}),
                    (torch.nn.functional.dropout, (x, 0.5), {}),
                    (torch.bernoulli, (x, 0.3), {}),
                    ("normal_", (x,), {}),
                ]
            ),
            "effect": lambda: (self.note, (x,), {}),
            # Indices that are numbers would end a GPU's process where they are out of range.
            "data": lambda: draw.choice(
                [(torch.nonzero, (x,), {}), (torch.masked_select, (x, y), {})]
                + [(operator.getitem, (x, y), {})] * (self.values[y].dtype is torch.bool)
            ),
            "made": lambda: draw.choice(
                [(torch.zeros_like, (x,), {}), (torch.full_like, (x, 2), {}), ("new_ones", (x, (3, 4)), {})]
            ),
        }
        weights = {"unary": 4, "binary": 5, "view": 4, "functor": 2, "in place": 2}
        name = draw.choices(list(kinds), [weights.get(kind, 1) for kind in kinds])[0]
        return kinds[name]()

    def choose_write(self, x: fx.Node, y: fx.Node) -> Program:
        """Choose a method that writes to its tensor."""
        name = self.draw.choice(IN_PLACE)
        if name == "clamp_":
            return name, (x, -1, 1), {}
        return name, (x,) if name in {"relu_", "neg_", "zero_"} else (x, self.draw.choice([y, self.number()])), {}


WRITERS: list[type[GraphWriter]] = [Writer, AtenWriter, TableWriter]


def check(seed: int, device: str = "cpu", writes: type[GraphWriter] = Writer) -> int:
    """Compare a graph with itself with fusion nodes; return how many there are."""
    # In graphs as AOTAutograd makes them small results, too, are written over what is read last.
    large = reuse.LARGE_BYTES if writes is Writer else 0
    with warnings.catch_warnings(), patch.object(reuse, "LARGE_BYTES", large):
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        writer = writes(seed, device)
        module = writer.write(writer.draw.randint(3, 30))
        try:
            return compare(module, writer.given, writer.log, seed)
        except Exception as error:
            least = shrink(module, lambda smaller: fails(smaller, writer.given, writer.log, seed))
            raise AssertionError(f"seed {seed}: {error}\n{least.graph}\n{fused(least).graph}") from error


@pytest.fixture
def eager_groups() -> Iterator[None]:
    before = fuser.override_can_fuse_on_cpu(False)
    yield
    fuser.override_can_fuse_on_cpu(before)


@pytest.mark.parametrize("writes", WRITERS)
def test_some_graphs(eager_groups: None, writes: type[GraphWriter]) -> None:
    assert sum(check(seed, writes=writes) for seed in [*range(14)]) > 12


def test_every_op_of_the_table_is_drawn() -> None:
    missing = set(every_op())
    for seed in range(99):
        writer = TableWriter(seed, "cpu")
        missing = {op for op in missing if all(writer.add(*writer.call(op)) is None for _ in range(5))}
    # CUDA alone has these.
    assert {str(op) for op in missing} <= {"aten._fused_rms_norm_backward.default", "aten.batch_norm_elemt.default"}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("writes", WRITERS)
def test_many_graphs(eager_groups: None, writes: type[GraphWriter], part: int) -> None:
    assert sum(check(seed, writes=writes) for seed in range(part, GRAPHS, PARTS)) > GRAPHS // PARTS


@pytest.mark.slow
@pytest.mark.cpu
def test_graphs_with_kernels() -> None:
    """Those of operators that round once, and so have torch's bits on a CPU too."""
    assert sum(check(seed, writes=AtenWriter) for seed in range(20000, 20040)) > 40


@pytest.mark.cuda
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("writes", WRITERS)
def test_graphs_on_a_gpu(writes: type[GraphWriter], part: int) -> None:
    assert sum(check(seed, "cuda", writes) for seed in range(100 * part, 100 * part + 100)) > 100
