"""Writes a random FX graph node by node; what kinds of nodes there are is for those who inherit to say."""

from __future__ import annotations

import copy
import operator
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

__all__ = ["GraphWriter", "Program", "like"]

# What is called, or a method's name, with what.
Program = tuple[Any, tuple[Any, ...], dict[str, Any]]


def like(value: torch.Tensor) -> torch.Tensor:
    """Return what is known of a tensor before the graph runs."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _is_lost() -> bool:
    # Other errors are of one launch, as one of no blocks.
    try:
        torch.cuda.synchronize()
    except torch.AcceleratorError:
        return True
    return False


class GraphWriter:
    """Writes a graph, each node of which runs once while it is written: what raises is left out.

    Those that inherit have ``choose()``, and may have ``write_ends(chosen)``: nodes after all others, which are results
    too.
    """

    shapes: Sequence[tuple[int, ...]] = ()
    dtypes: Sequence[torch.dtype] = ()
    # Layouts of arguments; with the last of five some share memory.
    layouts = 5
    # How often nodes know what they stand for.
    known_share = 1.0

    def __init__(self, seed: int, device: str) -> None:
        self.draw = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.device = device
        self.graph = fx.Graph()
        # What a function did that only its order and its argument show.
        self.log: list[str] = []
        self.has_metadata = self.draw.random() < self.known_share
        # Tensors that nodes stand for.
        self.values: dict[fx.Node, torch.Tensor] = {}
        self.given: list[torch.Tensor] = []
        for _ in range(self.draw.randint(2, 6)):
            self.given.append(self.make_input())
        for number, value in enumerate(copy.deepcopy(self.given)):
            self.keep(self.graph.placeholder(f"x{number}"), value)
        self.placeholders = list(self.values)

    def make_input(self) -> torch.Tensor:
        """Return a tensor in some layout; floats are small, so that integers are made of them too."""
        shape, dtype = self.draw.choice(self.shapes), self.draw.choice(self.dtypes)
        value = (torch.randn(shape, generator=self.generator) * 3).to(dtype).to(self.device)
        layout = self.draw.randrange(self.layouts)
        if layout == 1 and value.dim() > 1:
            value = value.transpose(0, -1).contiguous().transpose(0, -1)
        elif layout == 2 and value.dim():
            value = value.repeat_interleave(2, -1)[..., ::2]
        elif layout == 3 and value.dim() == 4:
            value = value.contiguous(memory_format=torch.channels_last)
        elif layout == 4 and self.given:
            value = self.draw.choice(self.given)
            value = value.t() if value.dim() == 2 else value[:1] if value.dim() else value.view(1)
        return value

    def choose(self) -> Program:
        """Choose what is called, with what."""
        raise NotImplementedError

    def write_ends(self, chosen: Sequence[fx.Node]) -> list[fx.Node]:
        """Write what stands after all other nodes; return what of it is a result, too."""
        return []

    def write(self, length: int) -> fx.GraphModule:
        """Write nodes, and an output of some of the last ones."""
        for _ in range(length):
            # Most that raise are of arguments that do not fit: of three, one hardly ever does.
            any(self.add(*self.choose()) is not None for _ in range(3))
        nodes = list(self.values)[-14:]
        chosen = self.draw.sample(nodes, min(self.draw.randint(1, 5), len(nodes)))
        self.graph.output((*chosen, *self.write_ends(chosen)))
        return fx.GraphModule(torch.nn.Module(), self.graph)

    def add(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, share: float = 0.8) -> fx.Node | None:
        """Add a node, and one for a share of the items of a tuple; None if it raises."""
        state, length = torch.random.get_rng_state(), len(self.log)
        loaded, named = (fx.node.map_arg(item, self.values.__getitem__) for item in (args, kwargs))
        try:
            function = getattr(type(loaded[0]), target) if isinstance(target, str) else target
            value = function(*loaded, **named)
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, ZeroDivisionError) as error:
            if isinstance(error, torch.AcceleratorError) and _is_lost():
                # No graph is to be blamed for that.
                raise AssertionError(f"what was drawn loses the device: {target} of {args}, {kwargs}") from error
            torch.random.set_rng_state(state)
            del self.log[length:]
            return None
        kind = "call_method" if isinstance(target, str) else "call_function"
        node = self.graph.create_node(kind, target, args, kwargs)
        self.keep(node, value)
        if isinstance(value, list | tuple):
            for slot, item in enumerate(value):
                if self.draw.random() < share:
                    self.keep(self.graph.call_function(operator.getitem, (node, slot)), item)
        return node

    def keep(self, node: fx.Node, value: Any) -> None:
        """Remember what a node stands for, and note what is known of it."""
        if isinstance(value, torch.Tensor):
            self.values[node] = value
        if self.has_metadata:
            node.meta["val"] = torch.utils._pytree.tree_map_only(torch.Tensor, like, value)

    def pick(self, *dtypes: torch.dtype) -> fx.Node:
        """Choose a value, more often a late one; of one of some dtypes, if there is one."""
        nodes = [node for node, value in self.values.items() if value.dtype in dtypes] or list(self.values)
        return nodes[min(len(nodes) - 1, int(len(nodes) * self.draw.random() ** 0.6))]

    def same(self, x: fx.Node, dim: int | None = None) -> fx.Node:
        """Choose a value of another's dtype and shape, but for one dimension."""
        value = self.values[x]
        fits = [
            node
            for node, other in self.values.items()
            if other.dtype is value.dtype
            and other.dim() == value.dim()
            and all(own == dim or a == b for own, (a, b) in enumerate(zip(value.shape, other.shape, strict=True)))
        ]
        return self.draw.choice(fits)

    def number(self) -> Any:
        """Choose a number."""
        return self.draw.choice([0, 1, 2, 0.5, -1.5, True, 3])
