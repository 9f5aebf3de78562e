"""The kernels of a graph's fusion nodes, planned and compiled before its first call: each once, on all cores."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import fx

from fuser.compiler import backend_for
from fuser.executor import plan_ahead
from fuser.fx.bodies import find_bodies
from fuser.fx.buffers import values_of
from fuser.fx.fusion_node import FusionModule
from fuser.tensor_desc import TensorDesc, describe, lies_for_vectors

__all__ = ["Ahead", "describe_all", "load_compilers"]


# Most of them wait: for a compiler, for torch to be compared with, or for a kernel that another one compiles.
MAX_THREADS = 64


class Ahead:
    """Plans calls of fusion nodes in threads, while other graphs are compiled; at the end of ``with`` all are planned.

    What goes wrong is left to the calls: they plan again, and raise.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._planned: list[Future[None]] = []
        self._seen: set[tuple[int, tuple[TensorDesc, ...], tuple[TensorDesc, ...]]] = set()

    def __enter__(self) -> Ahead:
        """Begin."""
        self._pool = ThreadPoolExecutor(MAX_THREADS, "fuser-ahead")
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        """Wait, or give up what has not begun if there was an exception."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(cancel_futures=kind is not None)
        self._planned.clear()

    def add(self, graph_module: fx.GraphModule) -> None:
        """Plan the calls in a graph whose nodes say what they are (``meta["val"]``); at the end, none any more."""
        for body in find_bodies(graph_module).values():
            self.add(body)
        for node in graph_module.graph.find_nodes(op="call_module"):
            module, described = graph_module.get_submodule(str(node.target)), describe_all(node.args)
            given = describe_all(values_of(node)) if "out" in node.kwargs else ()
            if self._pool is None or not isinstance(module, FusionModule) or described is None or given is None:
                continue
            if (module.spec.key, described, given) not in self._seen:
                self._seen.add((module.spec.key, described, given))
                # Exceptions stay there.
                self._planned.append(self._pool.submit(plan_ahead, module.spec, described, given))

    def wait(self) -> None:
        """Return when all calls that were added are planned."""
        wait(self._planned)


def load_compilers(graph_module: fx.GraphModule) -> None:
    """Load what compiles for the devices of a graph, in whose parts calls are to be planned.

    Not in a thread: that would ask for Python's lock at each of many small files, and be done when others wait for it.
    """
    found = [node.meta.get("val") for node in graph_module.graph.find_nodes(op="placeholder")]
    for device_type in {item.device.type for item in found if isinstance(item, torch.Tensor)} & {"cpu", "cuda"}:
        backend_for(device_type).load_compiler()


def describe_all(arguments: Sequence[Any]) -> tuple[TensorDesc, ...] | None:
    """Describe nodes, values and numbers as a call would have them; None where something is not known yet."""
    found = []
    for item in arguments:
        value = item.meta.get("val") if isinstance(item, fx.Node) else item
        if not isinstance(value, torch.Tensor | bool | int | float | complex):
            return None
        described = describe(value)
        if isinstance(value, torch.Tensor):
            if not all(isinstance(size, int) for size in (*value.shape, *value.stride(), value.storage_offset())):
                return None
            # Memory of its own begins at a multiple of more than that.
            offset_bytes = int(value.storage_offset()) * value.element_size()
            described = described._replace(is_aligned=lies_for_vectors(value.device, offset_bytes))
        found.append(described)
    return tuple(found)
