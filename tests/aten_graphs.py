"""Random graphs as AOTAutograd writes them: ATen overloads that write to nothing, copies into arguments at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from graph_writer import GraphWriter, Program
from torch import fx

ATEN: Any = torch.ops.aten
SHAPES = [(4, 6), (6,), (2, 4, 6), (4, 1), (1, 6), (2, 1, 6), (), (6, 4), (2, 4, 3), (0, 6), (2, 2, 6), (2, 4, 2, 3)]
DTYPES = [torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool]
# Of one rounding each, so that kernels on the CPU have torch's bits as well.
UNARY = ["neg", "abs", "relu", "sign", "ceil", "logical_not", "isnan", "square", "trunc", "round"]
BINARY = ["add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "maximum", "minimum", "lt.Tensor", "eq.Tensor"]
BINARY += ["logical_and", "bitwise_and.Tensor"]
LISTS = ["add.List", "mul.List", "mul.Scalar", "add.Scalar", "sub.List", "maximum.List", "neg", "abs"]


def overload(name: str) -> Any:
    """Return an overload of ATen's: "add.Tensor", "neg"."""
    packet, _, rest = name.partition(".")
    return getattr(getattr(ATEN, packet), rest or "default")


class AtenWriter(GraphWriter):
    """Writes such a graph."""

    shapes, dtypes, layouts = SHAPES, DTYPES, 4

    def write_ends(self, chosen: Sequence[fx.Node]) -> list[fx.Node]:
        """Write copies into arguments."""
        written: list[fx.Node] = []
        for target in self.draw.sample(self.placeholders, self.draw.randrange(3)):
            changed = [(ATEN.mul.Tensor, 2), (ATEN.add.Tensor, self.same(target)), (ATEN.copy.default, self.pick())]
            operation, other = self.draw.choice(changed)
            self.add(operation, (target, other), {})
            arguments = [self.values[node] for node in self.placeholders]
            fresh = [
                node
                for node, value in self.values.items()
                if alike(value, self.values[target]) and not shares(value, arguments)
            ]
            # What shows an argument's memory shows what is written there, which is for AOTAutograd to say.
            if fresh and not shares(self.values[target], [self.values[node] for node in chosen]):
                copied = self.graph.call_function(ATEN.copy_.default, (target, self.draw.choice(fresh[-3:])))
                written += [copied] * (self.draw.random() < 0.2)
        for node in self.graph.nodes:
            if node.target is ATEN.copy_.default:
                node.meta["val"] = node.args[0].meta["val"]
        return written

    def choose(self) -> Program:
        """Choose what is called, with what."""
        x, y, draw = self.pick(), self.pick(), self.draw
        value = self.values[x]
        dim = draw.randrange(max(value.dim(), 1))
        size = value.shape[dim] if value.dim() else 1
        start = draw.randint(0, size)
        stop = draw.choice([draw.randint(start, size), (1 << 63) - 1])
        number = draw.choice([0, 1, 2, 0.5, -1.5])
        like_x = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
        kinds: dict[str, Callable[[], Program]] = {
            "unary": lambda: (overload(draw.choice(UNARY)), (x,), {}),
            "binary": lambda: (overload(draw.choice(BINARY)), (x, draw.choice([y, self.same(x)])), {}),
            "number": lambda: (overload(draw.choice(["add.Tensor", "mul.Tensor", "div.Tensor"])), (x, number), {}),
            "where": lambda: (ATEN.where.self, (self.pick(torch.bool), x, y), {}),
            "convert": lambda: (ATEN._to_copy.default, (x,), {"dtype": draw.choice(DTYPES)}),
            "clone": lambda: (
                ATEN.clone.default,
                (x,),
                draw.choice([{}, {"memory_format": torch.contiguous_format}]),
            ),
            "view": lambda: draw.choice(
                [
                    (ATEN.slice.Tensor, (x, dim, start, stop), {}),
                    (ATEN.slice.Tensor, (x, dim, start % 2, stop, 2), {}),
                    (ATEN.select.int, (x, dim, draw.randint(-1, max(size - 1, 0))), {}),
                    (ATEN.transpose.int, (x, 0, dim), {}),
                    (ATEN.permute.default, (x, draw.sample(range(value.dim()), value.dim())), {}),
                    (ATEN.unsqueeze.default, (x, dim), {}),
                    (ATEN.squeeze.dim, (x, dim), {}),
                    (ATEN.view.default, (x, [-1]), {}),
                    (ATEN.view.default, (x, draw.choice([[2, -1], [-1, 2], [2, 2, -1], [4, 6], [24]])), {}),
                    (ATEN._unsafe_view.default, (x, [-1, 2]), {}),
                    (ATEN.expand.default, (x, [draw.choice([2, 3]), *value.shape]), {}),
                    (ATEN.alias.default, (x,), {}),
                    (ATEN.split.Tensor, (x, draw.choice([1, 2, 3]), dim), {}),
                    (ATEN.unbind.int, (x, dim), {}),
                ]
            ),
            "join": lambda: draw.choice(
                [
                    (ATEN.cat.default, ([x, self.same(x, dim), *draw.choice([[], [self.same(x, dim)]])], dim), {}),
                    (ATEN.stack.default, ([x, self.same(x)], dim), {}),
                    (ATEN.roll.default, (x, [draw.randint(-5, 5), 2], [dim, 0]), {}),
                ]
            ),
            "pad": lambda: (
                ATEN.constant_pad_nd.default,
                (x, [0, 0] * (value.dim() - 1 - dim) + draw.choice([[1, 2], [0, 3], [2, 0], [-1, 1]]), number),
                {},
            ),
            "part": lambda: draw.choice(
                [
                    (ATEN.slice_backward.default, (x, *self.whole(x, dim, draw.randint(0, 2))), {}),
                    (ATEN.select_backward.default, (x, [*value.shape[:dim], 3, *value.shape[dim:]], dim, 1), {}),
                    (ATEN.slice_scatter.default, (x, y, dim, start, stop), {}),
                    (ATEN.select_scatter.default, (x, y, dim, max(start - 1, 0)), {}),
                    (ATEN.copy.default, (x, y), {}),
                ]
            ),
            "made": lambda: draw.choice(
                [
                    (ATEN.full.default, ([4, 6], number), like_x),
                    (ATEN.zeros.default, ([6],), like_x),
                    (ATEN.ones_like.default, (x,), {}),
                    (ATEN.full_like.default, (x, number), {}),
                    (ATEN.arange.start_step, (1, 13, 2), {"device": value.device, "pin_memory": False}),
                    (
                        torch.ops.prims.iota.default,
                        (6,),
                        {"start": 0, "step": 1, "dtype": torch.int64, "device": value.device, "requires_grad": False},
                    ),
                    (ATEN.scalar_tensor.default, (number,), like_x),
                ]
            ),
            "mask": lambda: (overload(draw.choice(["tril", "triu"])), (x, draw.randint(-1, 1)), {}),
            "reduce": lambda: draw.choice(
                [
                    (ATEN.amax.default, (x, [dim], draw.random() < 0.5), {}),
                    (ATEN.sum.dim_IntList, (x, [dim], draw.random() < 0.5), {}),
                    (ATEN.mean.dim, (x, [-1], True), {}),
                    (ATEN.any.dim, (x, dim), {}),
                    (ATEN._softmax.default, (x, dim, False), {}),
                    (ATEN.native_layer_norm.default, (x, list(value.shape[-1:]), None, None, 1e-5), {}),
                    (ATEN.var_mean.correction, (x, [dim]), {"correction": 0}),
                ]
            ),
            "read": lambda: self.choose_read(x, dim),
            "drop": lambda: draw.choice(
                [
                    (ATEN.native_dropout.default, (x, draw.choice([0.5, 0.1, 0.0]), True), {}),
                    (ATEN.rand_like.default, (x,), {}),
                    (ATEN.bernoulli.p, (x, 0.3), {}),
                ]
            ),
            "lists": lambda: self.choose_lists(x, number),
            "matrix": lambda: draw.choice([(ATEN.mm.default, (x, y), {}), (ATEN.flip.default, (x, [dim]), {})]),
        }
        weights = {"unary": 4, "binary": 6, "view": 6, "join": 2, "part": 2, "convert": 2}
        name = draw.choices(list(kinds), [weights.get(kind, 1) for kind in kinds])[0]
        return kinds[name]()

    def whole(self, x: fx.Node, dim: int, start: int) -> tuple[Any, ...]:
        """Return what a slice's backward pass takes after the gradient."""
        shape = list(self.values[x].shape) or [1]
        step = self.draw.choice([1, 1, 2])
        shape[dim], stop = start + shape[dim] * step + self.draw.randint(0, 1), start + shape[dim] * step
        return shape, dim, start, stop, step

    def choose_read(self, x: fx.Node, dim: int) -> Program:
        """Choose a read at places, all of which are there: of others there is a test of its own."""
        name, shape, places = (
            self.draw.choice(["embedding", "index", "gather", "index_select"]),
            self.values[x].shape,
            x,
        )
        dim = dim if name in {"gather", "index_select"} else 0
        size = shape[dim] if shape else 1
        if size:
            self.add(ATEN.remainder.Scalar, (self.pick(torch.int64), size), {})
            places = next(reversed(self.values))
        if self.values[places].dtype is not torch.int64:
            return ATEN.neg.default, (x,), {}
        arguments = {"embedding": (x, places), "index": (x, [places])}.get(name, (x, dim, places))
        return overload("index.Tensor" if name == "index" else name), arguments, {}

    def choose_lists(self, x: fx.Node, number: Any) -> Program:
        """Choose an operator of lists."""
        name = self.draw.choice(LISTS)
        first = [x, *(self.pick(self.values[x].dtype) for _ in range(self.draw.randint(1, 3)))]
        same = [self.same(item) for item in first]
        more: dict[str, tuple[Any, ...]] = {"Scalar": (number,), "List": (same,), "": ()}
        return overload(f"_foreach_{name}"), (first, *more[name.partition(".")[2]]), {}


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a tensor can be copied over another as AOTAutograd copies: of the same dtype and shape."""
    return (one.dtype, one.shape) == (other.dtype, other.shape)


def shares(one: torch.Tensor, others: list[torch.Tensor]) -> bool:
    """Whether a tensor lies in the memory of another."""
    storage = one.untyped_storage().data_ptr()
    return any(storage == other.untyped_storage().data_ptr() for other in others)
