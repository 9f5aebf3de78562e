"""Warm-up of what torch.compile made: its graphs are followed when they are compiled, on Dynamo's symbols."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from fuser.warming.cover import compile_all, find_classes
from fuser.warming.follow import Follower, alone, following

__all__ = ["follow_graph", "following_graphs"]

# Of a dimension without bounds.
MAX_SIZE = 1 << 40


class _FollowingGraphs(threading.local):
    is_following = False


_thread = _FollowingGraphs()


@contextmanager
def following_graphs() -> Iterator[None]:
    """Let graphs be followed that are compiled meanwhile: all, none comes from a cache."""
    from torch._functorch import config as functorch_config  # noqa: PLC0415 - brings AOTAutograd

    before, _thread.is_following = _thread.is_following, True
    try:
        with functorch_config.patch(enable_autograd_cache=False):
            yield
    finally:
        _thread.is_following = before


def follow_graph(run: Callable[[list[Any]], Any], inputs: Sequence[Any]) -> None:
    """Compile what a graph needs for all sizes that it is for, inside ``following_graphs``.

    Args:
        run: the graph, a function of a list.
        inputs: its arguments, fake tensors and symbols among them.
    """
    if not _thread.is_following:
        return
    from torch._guards import detect_fake_mode  # noqa: PLC0415 - as above

    mode: Any = detect_fake_mode(inputs)
    env = mode.shape_env
    ranges = {} if env is None else env.var_to_range
    # Infinities, of what no Dim bounds and of floats, are no ints.
    bounds = {symbol: (int(max(found.lower, 0)), int(min(found.upper, MAX_SIZE))) for symbol, found in ranges.items()}
    follower = Follower(bounds)
    # What is asked here is no condition of the graph.
    with mode, nullcontext() if env is None else env.suppress_guards(), following(follower), torch.no_grad():
        run([*inputs])
    calls = {(found.spec.key, str(found.inputs), str(found.out)): found for found in follower.calls}
    with alone():
        compile_all([(found.spec, one.inputs, one.out) for found in calls.values() for one in find_classes(found)])
