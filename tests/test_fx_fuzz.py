"""Random FX graphs with fusion nodes do what they did without: values, strides, aliases, mutation, effects, draws.

Groups run in eager torch (fusing on the CPU is switched off), whose bits are those of the nodes they stand for: what is
compared is which nodes become groups, when they run, and what others see. On a GPU the kernels themselves run.
"""

from __future__ import annotations

import copy
import operator
import os
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from aten_graphs import AtenWriter
from functors import functor
from graph_checks import compare, fails, fused, shrink
from torch import fx

import fuser

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
Program = tuple[Any, tuple[Any, ...], dict[str, Any]]


class Writer:
    """Writes a random graph, each node of which runs once while it is written: what raises is left out."""

    def __init__(self, seed: int, device: str) -> None:
        self.draw = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.device = device
        self.graph = fx.Graph()
        # What a function does that only its order and its argument show.
        self.log: list[str] = []
        self.note = lambda x: self.log.append(str(x.detach().double().nan_to_num().sum())) or x
        self.has_metadata = self.draw.random() < 0.5
        # Tensors that nodes stand for.
        self.values: dict[fx.Node, torch.Tensor] = {}
        self.inputs = self.make_inputs()
        self.given = copy.deepcopy(self.inputs)
        for number, value in enumerate(self.inputs):
            self.keep(self.graph.placeholder(f"x{number}"), value)
        # Their own: writing must leave ``given`` alone.
        self.axpy = functor("axpy")
        self.pair = fuser.create_multi_output_jit_fn(
            "template <typename T> void pair(T x, T y, T& s, T& d) { s = x + y; d = x - y; }", 2
        )

    def make_inputs(self) -> list[torch.Tensor]:
        """Return tensors of several dtypes and layouts, some of which share memory."""
        found: list[torch.Tensor] = []
        for _ in range(self.draw.randint(2, 5)):
            shape, dtype = self.draw.choice(SHAPES), self.draw.choice(DTYPES)
            value = (torch.randn(shape, generator=self.generator) * 3).to(dtype).to(self.device)
            layout = self.draw.randrange(5)
            if layout == 1 and value.dim() > 1:
                value = value.transpose(0, -1).contiguous().transpose(0, -1)
            elif layout == 2 and value.dim():
                value = value.repeat_interleave(2, -1)[..., ::2]
            elif layout == 3 and found:
                value = self.draw.choice(found)
                value = value.t() if value.dim() == 2 else value[:1] if value.dim() else value.view(1)
            found.append(value)
        return found

    def keep(self, node: fx.Node, value: Any) -> None:
        """Remember what a node stands for."""
        if isinstance(value, torch.Tensor):
            self.values[node] = value
        if self.has_metadata:
            node.meta["val"] = torch.utils._pytree.tree_map_only(torch.Tensor, torch.empty_like, value)

    def write(self, length: int) -> fx.GraphModule:
        """Write nodes and an output."""
        while length:
            target, args, kwargs = self.choose()
            length -= 1
            self.add(target, args, kwargs)
        nodes = list(self.values)
        count = self.draw.randint(1, min(5, len(nodes)))
        self.graph.output(tuple(self.draw.sample(nodes[-12:], min(count, len(nodes[-12:])))))
        return fx.GraphModule(torch.nn.Module(), self.graph)

    def add(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Add a node, and one for each item of a tuple."""
        load: Callable[[Any], Any] = lambda item: fx.node.map_arg(item, self.values.__getitem__)  # noqa: E731
        state, length = torch.random.get_rng_state(), len(self.log)
        try:
            if isinstance(target, str):
                value = getattr(load(args[0]), target)(*load(args[1:]), **load(kwargs))
            else:
                value = target(*load(args), **load(kwargs))
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
            torch.random.set_rng_state(state)
            del self.log[length:]
            return
        kind = "call_method" if isinstance(target, str) else "call_function"
        node = self.graph.create_node(kind, target, args, kwargs)
        self.keep(node, value)
        if isinstance(value, list | tuple):
            for slot, item in enumerate(value):
                if self.draw.random() < 0.8:
                    self.keep(self.graph.call_function(operator.getitem, (node, slot)), item)

    def pick(self) -> fx.Node:
        """Choose a value, more often a late one."""
        nodes = list(self.values)
        return nodes[min(len(nodes) - 1, int(len(nodes) * self.draw.random() ** 0.6))]

    def number(self) -> Any:
        """Choose a number."""
        return self.draw.choice([0, 1, 2, 0.5, -1.5, True, 3])

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


def check(seed: int, device: str = "cpu", writes: type[Writer | AtenWriter] = Writer) -> int:
    """Compare a graph with itself with fusion nodes; return how many there are."""
    with warnings.catch_warnings():
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


@pytest.mark.parametrize("writes", [Writer, AtenWriter])
def test_some_graphs(eager_groups: None, writes: type[Writer | AtenWriter]) -> None:
    assert sum(check(seed, writes=writes) for seed in [*range(12), 1580, 7892]) > 12


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("writes", [Writer, AtenWriter])
def test_many_graphs(eager_groups: None, writes: type[Writer | AtenWriter], part: int) -> None:
    assert sum(check(seed, writes=writes) for seed in range(part, GRAPHS, PARTS)) > GRAPHS // PARTS


@pytest.mark.slow
@pytest.mark.cpu
def test_graphs_with_kernels() -> None:
    """Those of operators that round once, and so have torch's bits on a CPU too."""
    assert sum(check(seed, writes=AtenWriter) for seed in range(20000, 20040)) > 40


@pytest.mark.cuda
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("writes", [Writer, AtenWriter])
def test_graphs_on_a_gpu(writes: type[Writer | AtenWriter], part: int) -> None:
    assert sum(check(seed, "cuda", writes) for seed in range(100 * part, 100 * part + 100)) > 100
