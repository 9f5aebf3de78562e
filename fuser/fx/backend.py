"""``torch.compile(model, backend="fuser")``: AOTAutograd, then fusion nodes in the forward and backward graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import partitioners
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import CheckpointPolicy

from fuser import library
from fuser.compiler import registered
from fuser.errors import ArgumentError
from fuser.fx.buffers import copy_together, drop_unread_statistics, write_statistics_in_place
from fuser.fx.cuda_graphs import CudaGraphs
from fuser.fx.flat import flatten
from fuser.fx.passes import FusionPass
from fuser.graph import FusionGroup

__all__ = ["compile_graph", "fuser_backend"]


def compile_graph(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],  # noqa: ARG001 - compilers of AOTAutograd take them
    numerics: str | None = None,
) -> Callable[[list[Any]], Any]:
    """Compile one ATen graph (forward or backward) of AOTAutograd: substitute fusion nodes, run the rest eagerly.

    Returns:
        A function of a list of arguments, which it empties.
    """
    FusionPass(numerics=numerics)(graph_module)
    write_statistics_in_place(graph_module)
    copy_together(graph_module)
    return flatten(graph_module)


def fuser_backend(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Backend for torch.compile, registered under the name "fuser" by an entry point.

    Args:
        graph_module: what Dynamo traced.
        example_inputs: one per placeholder.
        mode: as torch.compile takes it: "default", or "reduce-overhead", which is ``cuda_graphs``.
        options: ``{"cuda_graphs": bool}``: record what a pass launches as a CUDA graph, and replay it;
            ``{"numerics": "strict" or "fast"}``: in place of the setting.

    Raises:
        ArgumentError: an unknown mode or option.
    """
    assert library.LIBRARY is not None, "torch.ops.fuser exists"
    chosen = read_options(mode, options)
    graphs = CudaGraphs() if chosen["cuda_graphs"] else None

    def compile_as(kind: str) -> Callable[..., Any]:
        def compile_pass(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
            if graphs is None or not any(isinstance(item, torch.Tensor) and item.is_cuda for item in inputs):
                return compile_graph(graph, inputs, chosen["numerics"])
            return graphs.wrap(graph, inputs, lambda graph: compile_graph(graph, inputs, chosen["numerics"]), kind)

        return compile_pass

    backend = aot_autograd(
        fw_compiler=compile_as("forward"),
        bw_compiler=compile_as("backward"),
        inference_compiler=compile_as("inference"),
        partition_fn=split_passes,
        # Buffers are written to in the graph.
        keep_inference_input_mutations=True,
    )
    compiled: Callable[..., Any] = backend(graph_module, example_inputs)
    return compiled


MODES: dict[str | None, dict[str, Any]] = {None: {}, "default": {}, "reduce-overhead": {"cuda_graphs": True}}
# Of each option its default, and what it may be.
OPTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "cuda_graphs": (False, (False, True)),
    "numerics": (None, ("strict", "fast", None)),
}


def read_options(mode: str | None, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the value of every option.

    Raises:
        ArgumentError: an unknown mode, option or value.
    """
    if mode not in MODES:
        raise ArgumentError(f"mode={mode!r}: backend 'fuser' has {', '.join(repr(name) for name in MODES if name)}")
    given = {**MODES[mode], **(options or {})}
    for name, value in given.items():
        if name not in OPTIONS:
            raise ArgumentError(f"option {name!r}: backend 'fuser' has {', '.join(OPTIONS)}")
        allowed = OPTIONS[name][1]
        if not any(value is item or (type(value) is type(item) and value == item) for item in allowed):
            raise ArgumentError(f"option {name!r} is {value!r}: must be one of {', '.join(map(repr, allowed))}")
    return {name: default for name, (default, _) in OPTIONS.items()} | given


def split_passes(joint: fx.GraphModule, inputs: Any, **settings: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph into forward and backward: what is cheap to compute again is not kept for the backward pass.

    torch's own partitioner (``min_cut_rematerialization_partition``), which learns here that functors are as cheap as
    torch's pointwise ops, but for those with loops. In an activation checkpoint its policy decides.
    """
    drop_unread_statistics(joint)
    run = torch.ops.fuser.run.default
    for node in joint.graph.nodes:
        if node.target is run and _is_costly(registered(node.args[0]).group):
            node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
    known = partitioners.get_default_op_list()
    cheap = {run.overloadpacket}
    ops = replace(known, recomputable_ops=known.recomputable_ops | cheap, fusible_ops=known.fusible_ops | cheap)
    with patch.object(partitioners, "get_default_op_list", lambda: ops):
        passes: tuple[fx.GraphModule, fx.GraphModule] = min_cut_rematerialization_partition(joint, inputs, **settings)
    return passes


def _is_costly(group: FusionGroup) -> bool:
    functors = [functor for item in group.applications for functor in item.function.functors]
    return group.has_reduction or any(not functor.words.isdisjoint({"for", "while", "do"}) for functor in functors)
