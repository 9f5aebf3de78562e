"""Compiled graphs as CUDA graphs, by torch's own trees of them (torch/_inductor/cudagraph_trees.py).

The trees share one pool of memory between forward and backward graphs, record a graph again where a parameter lies
elsewhere, and copy other inputs into place.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

__all__ = ["CudaGraphs"]

Boxed = Callable[[list[Any]], Any]


class CudaGraphs:
    """What the forward and the backward graph of one compiled function have in common."""

    def __init__(self) -> None:
        # Where the forward graph runs; None: it is no CUDA graph.
        self._device: int | None = None

    def wrap(
        self, graph: fx.GraphModule, inputs: Sequence[Any], compile_flat: Callable[[fx.GraphModule], Boxed], kind: str
    ) -> Boxed:
        """Compile a graph, and record what it runs.

        Args:
            graph: as AOTAutograd gives it.
            inputs: one fake or real tensor or number for each placeholder, one of them on a GPU.
            compile_flat: makes the function that is recorded; it changes the graph.
            kind: "forward", "backward" or "inference".
        """
        from torch._dynamo.backends import cudagraphs  # noqa: PLC0415 - brings Inductor
        from torch._inductor import cudagraph_trees, cudagraph_utils  # noqa: PLC0415

        is_backward = kind == "backward"
        fixed = _fixed_inputs(graph, is_backward=is_backward)
        mutated = cudagraphs.find_input_mutations(graph.graph)
        reason = _find_obstacle(graph, inputs, mutated - {*fixed})
        stack_traces = cudagraphs.get_stack_traces(graph)
        placeholders = cudagraph_utils.get_placeholder_info(graph.graph)
        run = compile_flat(graph)
        if is_backward and self._device is None:
            return run
        if reason:
            warnings.warn(f"fuser: no CUDA graph of the {kind} pass: {reason}", stacklevel=2)
            return self._note_backward(run) if is_backward else run
        self._device = next(item.device.index for item in inputs if isinstance(item, torch.Tensor) and item.is_cuda)
        recorded: Any = cudagraph_trees.cudagraphify_impl(
            run,
            # Which of them are integers: symbols would be none.
            [0 if isinstance(item, torch.SymInt) else item for item in inputs],
            fixed,
            device_index=self._device,
            is_backward=is_backward,
            is_inference=kind == "inference",
            stack_traces=stack_traces,
            placeholders=placeholders,
            mutated_input_idxs=tuple(mutated),
        )
        recorded._boxed_call = True
        boxed: Boxed = recorded
        return boxed

    def _note_backward(self, run: Boxed) -> Boxed:
        # The tree of the forward pass has to know that its results are being used up.
        def run_backward(arguments: list[Any]) -> Any:
            from torch._inductor.cudagraph_trees import get_manager  # noqa: PLC0415

            assert self._device is not None, "the forward pass is a CUDA graph"
            manager = get_manager(self._device, create_if_none_exists=False)
            if manager is not None:
                manager.set_to_running_backward()
            return run(arguments)

        run_backward._boxed_call = True  # type: ignore[attr-defined]
        return run_backward


def _fixed_inputs(graph: fx.GraphModule, *, is_backward: bool) -> list[int]:
    # Those that lie in the same place in each call: parameters, buffers, and what the forward pass saved.
    from torch._inductor.utils import count_tangents  # noqa: PLC0415

    if is_backward:
        return list(range(count_tangents(graph)))
    context = torch._guards.TracingContext.try_get()
    return list(context.fw_metadata.static_input_indices) if context and context.fw_metadata else []


def _find_obstacle(graph: fx.GraphModule, inputs: Sequence[Any], written: set[int]) -> str:
    # Why it cannot be recorded; empty if it can.
    from torch._dynamo.backends.cudagraphs import get_device_node_mapping  # noqa: PLC0415
    from torch._inductor.cudagraph_utils import check_multiple_devices_or_any_cpu_nodes  # noqa: PLC0415
    from torch._inductor.utils import get_first_incompatible_cudagraph_node  # noqa: PLC0415
    from torch.fx.experimental.symbolic_shapes import free_symbols  # noqa: PLC0415

    names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    # There is one for each choice of the integers that a call gives: nothing else that is recorded may change.
    given = free_symbols([item for item in inputs if isinstance(item, torch.SymInt)])
    changing = [
        name
        for name, item in zip(names, inputs, strict=True)
        if not isinstance(item, torch.Tensor | torch.SymInt | int) or not free_symbols(item) <= given
    ]
    if changing:
        return f"it is not told what {', '.join(changing)} will be like in a call"
    if written:
        return f"it writes to {', '.join(names[slot] for slot in sorted(written))}, which is no parameter or buffer"
    reason = check_multiple_devices_or_any_cpu_nodes(get_device_node_mapping(graph))
    if reason:
        return str(reason)
    node = get_first_incompatible_cudagraph_node(graph)
    return f"{node.name} cannot be recorded" if node is not None else ""
