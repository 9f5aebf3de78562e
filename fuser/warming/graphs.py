"""Warm-up of what torch.compile made: its graphs are followed when they are compiled, on Dynamo's symbols."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, TypeAlias

import torch

from fuser.warming.cover import compile_all, find_classes
from fuser.warming.follow import Follower, alone, following

__all__ = ["Ranges", "follow_graph", "following_graphs"]

# Of a dimension without bounds.
MAX_SIZE = 1 << 40


# Of a graph, by the size that the call at hand has for a symbol: the sizes that the graph is for.
Ranges: TypeAlias = dict[int, tuple[int, int]]


class _Followed(NamedTuple):
    # By size at hand: the sizes that calls differ in.
    limits: Mapping[int, tuple[int, int]]
    # Of each graph.
    found: list[Ranges]


class _FollowingGraphs(threading.local):
    now: _Followed | None = None


_thread = _FollowingGraphs()


@contextmanager
def following_graphs(limits: Mapping[int, tuple[int, int]]) -> Iterator[list[Ranges]]:
    """Let graphs be followed that are compiled meanwhile: all, none comes from a cache.

    Args:
        limits: by the size that the call at hand has, no two the same, the sizes that other calls have.

    Yields:
        what sizes each graph is for, one that was compiled after the other.
    """
    from torch._functorch import config as functorch_config  # noqa: PLC0415 - brings AOTAutograd

    before, _thread.now = _thread.now, _Followed(limits, [])
    try:
        with functorch_config.patch(enable_autograd_cache=False):
            yield _thread.now.found
    finally:
        _thread.now = before


def follow_graph(run: Callable[[list[Any]], Any], inputs: Sequence[Any]) -> None:
    """Compile what a graph needs for all sizes that it is for, inside ``following_graphs``.

    Args:
        run: the graph, a function of a list.
        inputs: its arguments, fake tensors and symbols among them.
    """
    if _thread.now is None:
        return
    from torch._guards import detect_fake_mode  # noqa: PLC0415 - as above

    mode: Any = detect_fake_mode(inputs)
    env = mode.shape_env
    ranges = {} if env is None else env.var_to_range
    # Infinities, of what no Dim bounds and of floats, are no ints.
    bounds = {symbol: (int(max(found.lower, 0)), int(min(found.upper, MAX_SIZE))) for symbol, found in ranges.items()}
    ranges_at_hand: Ranges = {}
    for symbol, size in _find_symbols(inputs).items():
        if size in _thread.now.limits and symbol in bounds:
            least, most = ranges_at_hand[size] = bounds[symbol]
            low, high = _thread.now.limits[size]
            bounds[symbol] = max(least, low), min(most, high)
    _thread.now.found.append(ranges_at_hand)
    follower = Follower(bounds)
    # What is asked here is no condition of the graph.
    with mode, nullcontext() if env is None else env.suppress_guards(), following(follower), torch.no_grad():
        run([*inputs])
    calls = {(found.spec.key, str(found.inputs), str(found.out)): found for found in follower.calls}
    with alone():
        compile_all([(found.spec, one.inputs, one.out) for found in calls.values() for one in find_classes(found)])


def _find_symbols(inputs: Sequence[Any]) -> dict[Any, int]:
    # Those that are sizes by themselves, with the sizes at hand.
    found = {}
    for item in inputs:
        for size in item.shape if isinstance(item, torch.Tensor) else (item,):
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                found[size.node.expr] = int(size.node.hint)
    return found
