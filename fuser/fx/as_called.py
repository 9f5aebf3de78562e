"""What torch computes otherwise where somebody traces, and how a trace comes to what is called where nobody does."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "DIFFERENTIATED_OTHERWISE",
    "LAID_OUT",
    "VALUES_OF_MATRICES",
    "WARNS",
    "WINDOWS",
    "AsCalled",
    "CountingLaidOut",
    "computes_idle_vectors",
    "count_laid_out",
    "multiply_as_called",
    "writes_into_windows",
]

_ATEN = torch.ops.aten
# The names of functions whose gradient torch computes in another way where it traces: without asking for zeros.
DIFFERENTIATED_OTHERWISE = frozenset("prod cumprod det logdet slogdet linalg_det linalg_slogdet".split())
# Why a trace is not to be used.
WARNS = "torch warns of something"
LAID_OUT = "torch lays out anew what it writes to, where it traces"
WINDOWS = "torch puts windows that are written to back otherwise, where it traces"
VALUES_OF_MATRICES = "torch computes values of matrices otherwise where it traces"
_PRODUCTS = frozenset(("matmul", "__matmul__", "linalg_matmul"))
# Of what computes vectors of a matrix, the item that is its values.
_VALUES = {_ATEN._linalg_svd.default: 1, _ATEN._linalg_eigh.default: 0}


class AsCalled(torch.nn.Module):
    """A graph in which what torch composes of other ops is what its C++ makes of it.

    For symbols torch has decompositions in Python, too, some of which compute otherwise: ``interpolate`` from weights
    that it rounds. What is below those still needs torch's Python to know symbols.
    """

    def __init__(self, graph_module: fx.GraphModule) -> None:
        super().__init__()
        self.graph_module = graph_module

    def forward(self, *inputs: Any) -> Any:
        """Run the graph."""
        with torch._C._DisablePythonDispatcher(), _PythonBelow():  # type: ignore[no-untyped-call]
            # As torch's modules call it, it would print itself with each error.
            return self.graph_module.forward(*inputs)


class _PythonBelow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Turns torch's Python on again, below autograd."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._EnablePythonDispatcher():
            return func(*args, **(kwargs or {}))


class CountingLaidOut(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the ops that lay out anew what they are given, as ``count_laid_out`` does for a graph."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.count += bool(args) and _is_laid_out(func, args[0], made)
        return made


def count_laid_out(graph: fx.Graph, *, is_backward: bool = False) -> int:
    """Count the ops of one pass of a trace that lay out anew what they are given: there also for a write into that."""
    nodes = [node for node in graph.nodes if node.op == "call_function" and node.args]
    return sum(
        _is_laid_out(node.target, getattr(node.args[0], "meta", {}).get("val"), node.meta.get("val"))
        for node in nodes
        if _is_of_backward_pass(node) == is_backward
    )


def writes_into_windows(graph: fx.Graph) -> bool:
    """Whether a trace makes a whole of windows (``unfold``) that the function wrote to.

    It has zeros where there is no window, and sums where there are several: right for gradients of windows alone.
    """
    made = graph.find_nodes(op="call_function", target=_ATEN.unfold_backward.default)
    return not all(map(_is_of_backward_pass, made))


def _is_of_backward_pass(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward"


def _is_laid_out(target: Any, given: Any, made: Any) -> bool:
    # Whether an op's result does not lie as the tensor that an op of that name would write into.
    if getattr(target, "overloadpacket", None) not in _WRITE_BY_PLACE or not isinstance(given, torch.Tensor):
        return False
    return any(given.stride(dim) != made.stride(dim) for dim, size in enumerate(made.shape) if size > 1)


# Those that lie row-major, whatever they are given. Of draws torch has no others.
_WRITE_BY_PLACE = frozenset(
    getattr(_ATEN, name)
    for name in (
        "masked_fill", "masked_scatter", "index_fill", "index_add", "index_copy", "index_put", "scatter", "scatter_add",
        "scatter_reduce", "cumsum", "cumprod", "tril", "triu", "bernoulli", "uniform", "normal_functional", "random",
        "exponential", "geometric", "cauchy", "log_normal",
    )
)  # fmt: skip


def multiply_as_called(graph: fx.Graph) -> None:
    """Let products of matrices in a graph of torch's functions be those that torch makes where nobody traces."""
    for node in graph.nodes:
        if node.op in {"call_function", "call_method"} and getattr(node.target, "__name__", node.target) in _PRODUCTS:
            node.op, node.target = "call_function", _multiply


def _multiply(*args: Any, **kwargs: Any) -> Any:
    # Where one matrix stands for a batch, torch makes one product of many if that requires grad, or if somebody traces,
    # which rounds otherwise.
    if len(args) == 2 and not kwargs and all(item.dim() == 3 for item in args):
        batch = next((item.shape[0] for item in args if item.shape[0] != 1), 1)
        repeats = [item.shape[0] == 1 and batch != 1 and not item.requires_grad for item in args]
        args = tuple(x.expand(batch, -1, -1) if own else x for x, own in zip(args, repeats, strict=True))
    return torch.matmul(*args, **kwargs)


def computes_idle_vectors(graph: fx.Graph) -> bool:
    """Whether a traced graph computes vectors of a matrix of which the values alone are read.

    Where nobody traces torch computes those otherwise.
    """
    found = [node for node in graph.nodes if node.target in _VALUES]
    return any(all(user.args[1] == _VALUES[node.target] for user in node.users) for node in found)
