"""The kernels of a graph's fusion nodes, planned and compiled before its first call: each once, on all cores."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import fx

from fuser.access import VECTOR_BYTES
from fuser.executor import plan_ahead
from fuser.fx.fusion_node import FusionModule
from fuser.planner import compile_ahead
from fuser.tensor_desc import TensorDesc, describe

__all__ = ["Ahead"]


# Compilers take turns for some of their work: more threads make nothing faster.
MAX_THREADS = 16


class Ahead:
    """Plans calls of fusion nodes in threads, while other graphs are compiled; at the end of ``with`` all are planned.

    What goes wrong is left to the calls: they plan again, and raise.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._planned: list[Future[None]] = []
        self._seen: set[tuple[int, tuple[TensorDesc, ...]]] = set()

    def __enter__(self) -> Ahead:
        """Begin."""
        self._pool = ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_THREADS), "fuser-ahead")
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        """Wait, or give up what has not begun if there was an exception."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(cancel_futures=kind is not None)
        self._planned.clear()

    def add(self, graph_module: fx.GraphModule) -> None:
        """Plan the calls in a graph whose nodes say what they are (``meta["val"]``); at the end, none any more."""
        for node in graph_module.graph.find_nodes(op="call_module"):
            module, described = graph_module.get_submodule(str(node.target)), _describe_all(node.args)
            if self._pool is None or not isinstance(module, FusionModule) or described is None:
                continue
            if (module.spec.key, described) not in self._seen:
                self._seen.add((module.spec.key, described))
                has_order = module.spec.group.has_reduction or module.spec.group.has_composite
                # Side by side: an order is compared by means of other kernels than the call's. Exceptions stay there.
                for work in (compile_ahead, plan_ahead) if has_order else (plan_ahead,):
                    self._planned.append(self._pool.submit(work, module.spec, described))

    def wait(self) -> None:
        """Return when all calls that were added are planned."""
        wait(self._planned)


def _describe_all(arguments: Sequence[Any]) -> tuple[TensorDesc, ...] | None:
    # None where something is not known yet.
    found = []
    for item in arguments:
        value = item.meta.get("val") if isinstance(item, fx.Node) else item
        if not isinstance(value, torch.Tensor | bool | int | float | complex):
            return None
        described = describe(value)
        if isinstance(value, torch.Tensor):
            if not all(isinstance(size, int) for size in (*value.shape, *value.stride(), value.storage_offset())):
                return None
            offset_bytes = value.storage_offset() * value.element_size()
            is_aligned = value.device.type != "cuda" or offset_bytes % VECTOR_BYTES == 0
            described = described._replace(is_aligned=is_aligned)
        found.append(described)
    return tuple(found)
