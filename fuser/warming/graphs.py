"""Warm-up of what torch.compile made: its graphs are followed when they are compiled, on Dynamo's symbols."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, TypeAlias

import torch

from fuser.plain_torch import unwatched
from fuser.warming.cover import MAX_SIZE, Call, SizedCall, compile_all, find_classes
from fuser.warming.dims import draw_points
from fuser.warming.follow import Follower, alone, following

__all__ = ["Ranges", "follow_graph", "following_graphs"]

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
    symbols, at_hand = _find_symbols(inputs), dict[int, Any]()
    for symbol, own in symbols.items():
        size = int(own.node.hint)
        if size in _thread.now.limits and symbol in bounds:
            least, most = bounds[symbol]
            low, high = _thread.now.limits[size]
            at_hand[size], bounds[symbol] = symbol, (max(least, low), min(most, high))
    ranges_at_hand: Ranges = {}
    if at_hand:
        holds = _find_question(env, symbols)
        ranges_at_hand = {size: _find_range(holds, symbol, size, bounds) for size, symbol in at_hand.items()}
    _thread.now.found.append(ranges_at_hand)

    def follow(sizes: Mapping[Any, int]) -> Sequence[SizedCall]:
        follower = Follower(bounds, sizes)
        # What is asked here is no condition of the graph.
        with mode, nullcontext() if env is None else env.suppress_guards(), following(follower), torch.no_grad():
            run([*inputs])
        return follower.calls

    calls = _find_calls(follow, _find_sizes(env))
    with alone():
        compile_all(calls)


def _find_symbols(inputs: Sequence[Any]) -> dict[Any, torch.SymInt]:
    # Those that are sizes by themselves.
    found = {}
    for item in inputs:
        for size in item.shape if isinstance(item, torch.Tensor) else (item,):
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                found[size.node.expr] = size
    return found


def _find_sizes(env: Any) -> dict[Any, int]:
    # Of each symbol, in the call at hand.
    if env is None:
        return {}
    known = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val
    return {symbol: int(size) for symbol, size in known.items() if size.is_Integer}


def _find_question(env: Any, symbols: Mapping[Any, torch.SymInt]) -> Callable[[Any, int], bool]:
    # Whether all that was asked of sizes has the same answer where a symbol has another one.
    guards = [item for item in env.guards if env.replace(item.expr).free_symbols <= symbols.keys()]
    text = env.produce_guards_expression([*symbols.values()], guards=guards) or "True"
    code, slots = compile(text, "<guards>", "eval"), {symbol: slot for slot, symbol in enumerate(symbols)}
    sizes = [int(item.node.hint) for item in symbols.values()]

    def holds(symbol: Any, size: int) -> bool:
        slot = slots[symbol]
        return bool(env.evaluate_guards_expression(code, [*sizes[:slot], size, *sizes[slot + 1 :]]))

    return holds


@unwatched()
def _find_range(
    holds: Callable[[Any, int], bool], symbol: Any, at_hand: int, bounds: Mapping[Any, tuple[int, int]]
) -> tuple[int, int]:
    # The sizes around the one at hand for which the graph holds; it may hold for others beyond.
    least, most = bounds[symbol]
    sizes = sorted({*draw_points([bounds[symbol]]).flatten().tolist()})
    below = (size for size in reversed(sizes) if size < at_hand and not holds(symbol, size))
    above = (size for size in sizes if size > at_hand and not holds(symbol, size))
    return next(below, least - 1) + 1, next(above, most + 1) - 1


def _find_calls(follow: Callable[[Mapping[Any, int]], Sequence[SizedCall]], at_hand: Mapping[Any, int]) -> list[Call]:
    # One of each layout class of each group that a graph calls.
    known: set[tuple[Any, ...]] = set()
    calls, left = list[Call](), [at_hand]
    while left:
        for found in follow(left.pop()):
            key = (found.spec.key, str(found.inputs), str(found.out))
            if key in known:
                continue
            known.add(key)
            with alone():
                classes = find_classes(found)
            calls += [(found.spec, one.inputs, one.out) for one in classes]
            # Where other obstacles are, other groups run in its place.
            others = (one for one in classes if one.obstacle is not None and one.obstacle != found.obstacle)
            left += [{**at_hand, **one.sizes} for one in others]
    return calls
