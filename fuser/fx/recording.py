"""What ``torch.compile(backend="fuser")`` makes of a function: each graph before and after fusion nodes."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo.eval_frame import OptimizeContext, innermost_fn
from torch._functorch import config as functorch_config
from torch.utils._pytree import tree_leaves

from fuser.fx.backend import build_backend, compile_graph, read_options
from fuser.fx.gains import count_bytes
from fuser.fx.nodes import NUMBERS, UNSAFE_VIEWS
from fuser.fx.passes import Fuel

__all__ = ["RecordedGraph", "record_graphs"]


@dataclass(frozen=True, slots=True)
class RecordedGraph:
    """One graph of AOTAutograd's."""

    # "forward", "backward" or "inference".
    kind: str
    # How many bytes each node reads and writes: of the graph as it was, and as it became.
    traffic: Mapping[str, int]
    # With fusion nodes.
    module: fx.GraphModule


def record_graphs(compiled: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[RecordedGraph]:
    """Compile a function once more, as its options say, run it, and return its graphs in the order of compilation."""
    found: list[RecordedGraph] = []
    context = _find_context(compiled)
    options, dynamic = read_options(**_find_options(context)), getattr(context, "_dynamic", None)
    numerics = options["numerics"]

    def compile_as(kind: str, fuel: Fuel | None) -> Callable[..., Any]:
        def compile_pass(graph: fx.GraphModule, _: Any) -> Callable[[list[Any]], Any]:
            traffic = {node.name: _count_traffic(node) for node in graph.graph.nodes}
            run = compile_graph(graph, numerics, fuel)
            made = {node.name: _count_traffic(node) for node in graph.graph.nodes}
            found.append(RecordedGraph(kind, traffic | made, graph))
            return run

        return compile_pass

    def backend(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        # For each graph of Dynamo's.
        fuel = None if options["fuel"] is None else Fuel(options["fuel"])
        return build_backend(lambda kind: compile_as(kind, fuel), numerics)(graph_module, inputs)

    function: Any = innermost_fn(getattr(compiled, "_orig_mod", getattr(compiled, "__func__", compiled)))
    if isinstance(compiled, types.MethodType):
        # Compiled in its class.
        function = types.MethodType(function, compiled.__self__)
    again: Any = torch.compile(function, backend=backend, dynamic=dynamic)
    # It counts as one more compilation of the same code. The backward pass is compiled at once.
    limits = torch._dynamo.config.patch(recompile_limit=1 << 16, accumulated_recompile_limit=1 << 16)
    with limits, functorch_config.patch(force_non_lazy_backward_lowering=True):
        again(*args, **kwargs)
    return found


def _find_context(compiled: Any) -> Any:
    # What torch.compile was given; of a module it is an attribute, of a function in its closure.
    cells = [cell.cell_contents for cell in getattr(compiled, "__closure__", None) or ()]
    context = getattr(compiled, "dynamo_ctx", None)
    return context or next((item for item in cells if isinstance(item, OptimizeContext)), None)


def _find_options(context: Any) -> dict[str, Any]:
    # They lie several wrappers below.
    found = context
    while found is not None and not isinstance(found, torch._TorchCompileWrapper):
        found = getattr(found, "callback", None) or getattr(found, "_torchdynamo_orig_backend", None)
    given = getattr(found, "kwargs", {})
    return {"mode": given.get("mode"), "options": given.get("options")}


def _count_traffic(node: fx.Node) -> int:
    # 0 for what moves none, as a view, or arithmetic on sizes.
    schema = getattr(node.target, "_schema", None)
    is_view = schema is not None and any(item.alias_info and not item.alias_info.is_write for item in schema.returns)
    is_view = is_view or node.target in UNSAFE_VIEWS
    if (
        node.op not in {"call_function", "call_module"}
        or is_view
        or isinstance(node.meta.get("val"), NUMBERS)
        or getattr(node.target, "__module__", "") == "_operator"
    ):
        return 0
    # What is written to an argument is counted as the result.
    read = tree_leaves((node.args, {name: item for name, item in node.kwargs.items() if name != "out"}))
    sources = dict.fromkeys(item for item in read if isinstance(item, fx.Node))
    return sum(count_bytes(item.meta.get("val")) for item in (*sources, node))
