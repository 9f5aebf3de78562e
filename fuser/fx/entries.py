"""What ``fuser.fuse`` keeps of a function: a trace with fusion nodes, for which calls it is, and who replays those."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from fuser.config import config
from fuser.fx.effects import is_random
from fuser.fx.generators import State, gpu_generators
from fuser.fx.joint import JointFunction
from fuser.fx.sized import SizedGraphs
from fuser.fx.tracer import Traced
from fuser.fx.whole import WholeFusion
from fuser.launcher import Replayer
from fuser.record import Recorded, Scalars
from fuser.route import is_transformed

__all__ = [
    "Binding",
    "Entry",
    "Mode",
    "SizedReplayer",
    "bind_alike",
    "copy_nodes",
    "find_held",
    "mode_of",
    "of_its_size",
]

# A launcher's defaults, and its order.
Binding: TypeAlias = tuple[tuple[Any, ...], tuple[int, ...]]


class Mode(NamedTuple):
    """What of a call decides, beside its arguments' kinds, which nodes of its trace are fused and how."""

    numerics: str
    # Whether torch's reductions join groups, and whether autograd differentiates those.
    reduces: bool
    is_differentiated: bool
    # A meta tensor stands for one on the GPU, if there is one.
    device_type: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A trace with fusion nodes."""

    traced: Traced
    # The one fusion node it is, if it is one.
    whole: WholeFusion | None
    # Replays calls of it; the fused function itself where it can look at all that the trace relies on.
    launcher: Replayer
    # The graph as a function of tensors and numbers.
    run: Callable[..., Any]
    # What its groups may hold depends on it.
    mode: Mode
    # For calls of known sizes, where those let more of it fuse; and where autograd differentiates those.
    sized: SizedGraphs[Entry] | None = None
    joint: JointFunction | None = None
    # Whether it is for calls of its own sizes, and of that default dtype.
    is_sized: bool = False
    default_dtype: torch.dtype | None = None
    # Why autograd goes through each of its nodes, where one function could have been.
    apart: str = ""

    def find_sized(self, leaves: tuple[Any, ...]) -> Entry | None:
        """Return the entry for calls of these sizes, if there is one."""
        found = None if self.sized is None else self.sized.find(leaves)
        return None if found is None else found.made

    def find_joint(self, leaves: tuple[Any, ...]) -> Callable[..., Any] | None:
        """Return what runs such calls as one function to autograd, if anything does."""
        return None if self.joint is None else self.joint.find(leaves)

    def run_either(self, *leaves: Any) -> Any:
        """Run a call as one function to autograd, or node by node."""
        return (self.find_joint(leaves) or self.run)(*leaves)

    def call(self, leaves: tuple[Any, ...]) -> Any:
        """Run the graph for a call that is none of an earlier kind."""
        try:
            return self.run(*leaves)
        except Exception:
            # Where both are there, the first one serves who looks at a call.
            calls = self.sized if self.joint is None else self.joint
            if calls is not None:
                calls.forgive(leaves)
            raise

    def remarks(self, leaves: tuple[Any, ...]) -> Iterator[str]:
        """Yield why less of such a call is fused than could be."""
        if self.mode.is_differentiated:
            joint = self.joint
            why = self.apart if joint is None or joint.find(leaves) is not None else joint.why_not(leaves)
            yield from [f"differentiated node by node: {why}"] if why else []
        elif self.sized is not None and self.sized.find(leaves) is None and (why := self.sized.why_not(leaves)):
            yield f"not traced for known sizes: {why}"

    def states(self) -> list[State]:
        """Return the states of the generators that it may draw from."""
        if not any(map(is_random, self.traced.graph_module.graph.nodes)):
            return []
        return [(item, item.get_state()) for item in (*self.traced.guards.find_generators(), *gpu_generators())]


class SizedReplayer(Replayer):
    """Replays calls of the very sizes of those that were recorded."""

    learns_sizes = False

    def __init__(self, default_dtype: torch.dtype | None, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._default_dtype = default_dtype

    def add(self, tensors: tuple[Any, ...], scalars: Scalars | None, out: Any, recorded: Recorded) -> bool:
        """See Launcher."""
        return super().add(tensors, scalars, out, of_its_size(recorded, self._default_dtype))


def of_its_size(recorded: Recorded, default_dtype: torch.dtype | None = None) -> Recorded:
    """Return a record of calls of its own sizes, and under that default dtype."""
    find, check = torch.get_default_dtype, recorded.check
    if default_dtype is not None:
        recorded = recorded._replace(check=lambda *tensors: find() is default_dtype and check(*tensors))
    return recorded._replace(flat=(), resize=None)


def bind_alike(one: Binding, other: Binding) -> bool:
    """Whether a launcher for one serves the other: numbers are the same in type and value."""
    (mine, order), (others, own) = one, other
    return (order, len(mine)) == (own, len(others)) and all(
        x is y or (type(x) is type(y) and not isinstance(x, torch.Tensor) and repr(x) == repr(y))
        for x, y in zip(mine, others, strict=True)
    )


def mode_of(leaves: tuple[Any, ...]) -> Mode:
    """Return the mode of a call with these tensors and numbers."""
    needs_grad, is_cuda = False, False
    for x in leaves:
        if isinstance(x, torch.Tensor):
            needs_grad |= x.requires_grad
            is_cuda |= x.is_cuda or (x.is_meta and torch.cuda.is_available())
    needs_grad &= torch.is_grad_enabled()
    # torch.func's transforms differentiate, and autocast converts, what torch's reductions are made of.
    stays = torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu") or (needs_grad and is_transformed())
    return Mode(config.numerics, not stays, needs_grad and not stays, "cuda" if is_cuda else "cpu")


def find_held(module: fx.GraphModule) -> Iterator[Any]:
    """Yield what a graph reads: parameters, also of modules it calls, may require gradients where no argument does."""
    for node in module.graph.nodes:
        if node.op in {"get_attr", "call_module"}:
            held = operator.attrgetter(str(node.target))(module)
            yield from held.parameters() if isinstance(held, torch.nn.Module) else (held,)


def copy_nodes(module: fx.GraphModule) -> fx.GraphModule:
    """Return a graph that nothing changes any more; its code is written when it is called."""
    return _LazyGraphModule(module, copy.deepcopy(module.graph))
