"""A fusion node: a registered group as a module of an FX graph, and as a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx

from fuser import counters
from fuser.compiler import register, registered
from fuser.fx.plain_nodes import PlainNodes, answers_for_torch
from fuser.graph import FusionGroup
from fuser.kernel_spec import KernelSpec
from fuser.launcher import Replayer, called_in_c
from fuser.library import split_inputs
from fuser.outputs import unusual_kind
from fuser.route import call_anew
from fuser.tensor_desc import check_count

__all__ = ["FusionCall", "FusionModule", "FusionNode", "Layouts", "find_layouts"]

# Shape, strides and dtype of tensors; None for numbers and for tensors of other kinds.
Layouts: TypeAlias = tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | None, ...]


@called_in_c
class FusionCall(Replayer):
    """A registered group as a function of its inputs; returns a tensor, or a tuple of tensors for several outputs.

    Attributes:
        learns_sizes: whether calls of other sizes may come, for which plans are worth being learnt from one another.
        plain: what the group stands for: runs what is done to numbers alone, to other tensors than those that the group
            is for, and what a tensor's class, a mode or a tracer is to see. None: not known.
        layouts: of the only inputs that the group is for; None: it is for any.
    """

    def __init__(
        self,
        spec: KernelSpec,
        *,
        learns_sizes: bool = True,
        plain: PlainNodes | None = None,
        layouts: Layouts | None = None,
    ) -> None:
        self.spec = spec
        self.text = spec.text
        self.learns_sizes = learns_sizes and layouts is None
        self.plain = plain
        self.layouts = layouts
        super().__init__((), ())

    def __call__(self, *inputs: Any, out: Any = None) -> Any:
        """Run the group; ``out`` is where results are written, a tensor or a tuple of them."""
        if torch.compiler.is_dynamo_compiling() and out is None:
            results = torch.ops.fuser.run(self.text, *split_inputs(inputs))
            return results[0] if len(results) == 1 else tuple(results)
        replayed = self.launch(inputs, None, out)
        return self.call_anew(*inputs, out=out) if replayed is None else replayed

    def call_anew(self, *inputs: Any, out: Any = None) -> Any:
        """Serve a call that is not like an earlier one."""
        check_count(self.spec.group, inputs)
        if self.plain is not None and out is None and self._is_other(inputs, self.plain):
            results = self.plain(*inputs)
            return results[0] if len(results) == 1 else results
        return call_anew(self.spec, inputs, self, inputs, None, out)

    def _is_other(self, inputs: Sequence[Any], plain: PlainNodes) -> bool:
        # Whether the group stands for something else than the nodes with these inputs; counts what takes a kernel away.
        has_tensors = any(isinstance(item, torch.Tensor) for item in inputs)
        if answers_for_torch(inputs):
            if has_tensors:
                counters.count_fallback("a tensor's class or a mode that is to see each of torch's functions")
            return True
        if plain.takes_numbers and _works_on_numbers(self.spec.group, inputs):
            if has_tensors:
                counters.count_fallback("numbers where an FX graph does not say that they are: example_inputs do")
            return True
        if self.layouts is None or self.layouts == find_layouts(inputs):
            return False
        counters.count_fallback("a graph of other sizes, strides or dtypes: trace it with symbols for all")
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        # A spec holds locks and kernels; the text says everything.
        return _load_call, (self.text, self.learns_sizes, self.plain, self.layouts)


def _load_call(text: str, learns_sizes: bool, plain: PlainNodes | None, layouts: Layouts | None) -> FusionCall:
    return FusionCall(registered(text), learns_sizes=learns_sizes, plain=plain, layouts=layouts)


def find_layouts(inputs: Sequence[Any]) -> Layouts:
    """Return shape, strides and dtype of each tensor; None for a number, and for what does not lie in strides."""
    return tuple(
        (tuple(item.shape), item.stride(), item.dtype)
        if isinstance(item, torch.Tensor) and not unusual_kind(item)
        else None
        for item in inputs
    )


def _works_on_numbers(group: FusionGroup, inputs: Sequence[Any]) -> bool:
    # Whether an application has no tensor among what it takes: Python makes a number of numbers, torch does not.
    others = {slot for slot, item in enumerate(inputs) if not isinstance(item, torch.Tensor)}
    return any(item.tensors and others.issuperset(item.tensors) for item in group.applications)


class FusionModule(torch.nn.Module):
    """A fusion node: a registered group as a module, called with the group's inputs.

    Attributes:
        group: the FusionGroup.
        node_names: names of the FX nodes it stands for.
        is_differentiated: whether autograd differentiates it as torch does the nodes.
    """

    is_differentiated = False

    def __init__(
        self,
        group: FusionGroup,
        node_names: Sequence[str] = (),
        plain: PlainNodes | None = None,
        layouts: Layouts | None = None,
    ) -> None:
        super().__init__()
        self.group = group
        self.node_names = tuple(node_names)
        self.run = FusionCall(register(group), plain=plain, layouts=layouts)

    @property
    def spec(self) -> KernelSpec:
        """The group as it is registered."""
        return self.run.spec

    def forward(self, *inputs: Any) -> Any:
        """Run the group; returns a tensor, or a sequence of tensors for several outputs."""
        return self.run(*inputs)

    def extra_repr(self) -> str:
        """One line per application."""
        return str(self.group)

    def __reduce__(self) -> tuple[Any, ...]:
        # A spec holds locks and kernels; the group says everything.
        return FusionModule, (self.group, self.node_names, self.run.plain, self.run.layouts)


# Makes the fusion node of a group, from the names of the nodes that it stands for and those as a graph of its inputs.
FusionNode: TypeAlias = Callable[[FusionGroup, Sequence[str], fx.GraphModule], FusionModule]
