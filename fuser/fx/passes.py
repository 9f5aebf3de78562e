"""The pass that finds groups in an FX graph and puts fusion nodes in their place."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import fx
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from fuser.config import config
from fuser.errors import ArgumentError, GroupError, describe_type, shows_users_frames
from fuser.fx.bodies import find_bodies
from fuser.fx.expansions import drop_expansions
from fuser.fx.fusion_node import FusionModule, FusionNode
from fuser.fx.merged_sums import sum_unviewed
from fuser.fx.partition import Partition, partition
from fuser.fx.splits import open_splits
from fuser.fx.substitution import Substitution, sort_graph
from fuser.fx.whole_tuples import take_tuples_apart
from fuser.ops import IS_NUMBER, bind_for
from fuser.warming.symbolic import warm_up

__all__ = ["Fuel", "FusionPass", "fuse_graph"]


class Fuel:
    """How many groups may still be made: to bisect a wrong result.

    Attributes:
        limit: how many in all; None: as many as ``config.fuel`` says.
        burnt: how many were asked for.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.burnt = 0

    def burn(self) -> bool:
        """Count one more; return whether it may be made."""
        limit = config.fuel if self.limit is None else self.limit
        if limit is not None:
            self.burnt += 1
        return limit is None or self.burnt <= limit

    def see(self, module: FusionModule) -> None:
        """Look at a group that was made."""


# Of the whole process.
process_fuel = Fuel()


class FusionPass(PassBase):
    """Replace maximal convex groups of functor calls and table ops by fusion nodes, in place.

    The result's ``modified`` says whether there was any. Nodes with ``meta["val"]`` (as AOTAutograd gives) are
    grouped by device and shape; without it, what does not fit together at run time is launched apart.

    Args:
        reduces: whether torch's reductions join groups.
        differentiable: makes the fusion node of a group with torch's reductions (in strict numerics of any of torch's
            ops and nothing else), where autograd differentiates the graph: takes the group, the names of its nodes, and
            those as a graph of the group's inputs. None: a node is a FusionModule.
        device_type: where values are that the graph says nothing of, such as "cuda".
        numerics: what the groups run with, whatever the settings say: "strict" or "fast"; None: as the settings say.
        fuel: how many groups it may make, in all graphs together; None: as many as the settings say for the whole
            process.
    """

    def __init__(
        self,
        *,
        reduces: bool = True,
        differentiable: FusionNode | None = None,
        device_type: str = "",
        numerics: str | None = None,
        fuel: int | Fuel | None = None,
    ) -> None:
        super().__init__()
        if numerics not in (None, "strict", "fast"):
            raise GroupError(f"FusionPass: numerics={numerics!r}: must be one of strict, fast")
        limit: Any = fuel.limit if isinstance(fuel, Fuel) else fuel
        if not (limit is None or (isinstance(limit, int) and limit >= 0)):
            raise ArgumentError(f"FusionPass: fuel must be a number of groups, got {fuel!r}")
        self.reduces = reduces
        self.differentiable = differentiable
        self.device_type = device_type
        self.numerics = numerics
        self.fuel = fuel if isinstance(fuel, Fuel | None) else Fuel(fuel)

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        """Run on one graph module."""
        _check_graph_module(graph_module)
        is_modified = self._fuse_bodies(graph_module)
        with bind_for(self.numerics):
            open_splits(graph_module.graph)
            drop_expansions(graph_module.graph)
            take_tuples_apart(graph_module.graph)
            sum_unviewed(graph_module.graph)
            groups = self.find_groups(graph_module.graph)
        fuel = self.fuel or process_fuel
        substitution = Substitution(graph_module, self.numerics, self.differentiable, groups)
        for found in groups:
            if not fuel.burn():
                break
            fuel.see(substitution.add(found))
        if substitution.fused:
            substitution.finish()
            sort_graph(graph_module.graph)
            graph_module.graph.lint()
            graph_module.recompile()
        return PassResult(graph_module, is_modified or bool(substitution.fused))

    def _fuse_bodies(self, graph_module: fx.GraphModule) -> bool:
        is_modified = False
        for name, body in find_bodies(graph_module).items():
            # The program has it, too, whose module torch.export gave.
            own = fx.GraphModule(body, copy.deepcopy(body.graph))
            if self.call(own).modified:
                graph_module.set_submodule(name, own)
                is_modified = True
        return is_modified

    def find_groups(self, graph: fx.Graph) -> list[Partition]:
        """Return what becomes fusion nodes."""
        return partition(graph, reduces=self.reduces, device_type=self.device_type)


def _check_graph_module(graph_module: Any) -> None:
    if not isinstance(graph_module, fx.GraphModule):
        raise ArgumentError(
            f"a torch.fx.GraphModule, as torch.fx.symbolic_trace makes, is wanted; got {describe_type(graph_module)}"
        )


@shows_users_frames
def fuse_graph(graph_module: fx.GraphModule, example_inputs: Sequence[Any] | None = None) -> fx.GraphModule:
    """Substitute fusion nodes into a graph module, in place, and return it.

    Args:
        graph_module: calls functors (JitFunction), torch functions, tensor methods or ATen overloads.
        example_inputs: one per placeholder: real, fake or meta tensors, and numbers where calls bring numbers; where
            given, the kernels are compiled now, but for those of sizes that depend on elements (``x[mask]``).

    Raises:
        ArgumentError: ``graph_module`` is none, or ``example_inputs`` are too many, too few or no list. As calls.
    """
    if example_inputs is None:
        FusionPass()(graph_module)
        return graph_module
    _check_graph_module(graph_module)
    inputs = graph_module.graph.find_nodes(op="placeholder")
    names = [str(node.target) for node in inputs]
    # Those with a default may be left out.
    least = sum(not node.args for node in inputs)
    if not isinstance(example_inputs, list | tuple) or not least <= len(example_inputs) <= len(names):
        got = len(example_inputs) if isinstance(example_inputs, list | tuple) else describe_type(example_inputs)
        raise ArgumentError(f"example_inputs is a list of {len(names)} ({', '.join(names)}), got {got}")
    for node, item in zip(inputs, example_inputs, strict=False):
        if isinstance(item, bool | int | float):
            node.meta[IS_NUMBER] = True
    FusionPass()(graph_module)
    warm_up(graph_module, example_inputs, {}, names=names)
    return graph_module
