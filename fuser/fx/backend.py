"""``torch.compile(model, backend="fuser")``: AOTAutograd, then fusion nodes in the forward and backward graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

from fuser import library
from fuser.fx.passes import FusionPass

__all__ = ["compile_graph", "fuser_backend"]


def compile_graph(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:  # noqa: ARG001
    """Compile one ATen graph (forward or backward) of AOTAutograd: substitute fusion nodes, run the rest eagerly."""
    FusionPass()(graph_module)
    compiled: Callable[..., Any] = make_boxed_func(graph_module.forward)
    return compiled


def fuser_backend(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Backend for torch.compile, registered under the name "fuser" by an entry point."""
    assert library.LIBRARY is not None, "torch.ops.fuser exists"
    backend: Callable[..., Any] = aot_autograd(fw_compiler=compile_graph, bw_compiler=compile_graph)(
        graph_module, example_inputs
    )
    return backend
