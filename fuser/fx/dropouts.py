"""Dropouts of AOTAutograd's graphs: what is drawn is what torch draws, and the rest is arithmetic, which joins groups.

On CUDA torch's kernel computes its numbers by Philox: from a key (the seed), how many numbers were drawn before, and an
element's place. A kernel of fuser's computes the same, once for four neighbours, and the generator moves on as it does
for torch's. In its order of elements are the grid and the vectors of torch's kernel, so it is compared with what torch
draws before its first use. Where it differs, and where a CUDA graph is being recorded (in its replays only torch's own
kernels find where the generator is), the whole graph runs as it was. On the CPU torch draws the mask.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fuser.cxx.functor import parse_functor
from fuser.function import Function, Isolation
from fuser.fx.nodes import IS_APART, may_alias
from fuser.jit_function import JitFunction
from fuser.layout import Shape, Strides
from fuser.ops import IS_NUMBER
from fuser.order_check import find_verdict, verdict_key

__all__ = ["Dropout", "Order", "Otherwise", "find_dropouts", "find_obstacle", "open_dropouts"]

_ATEN = torch.ops.aten
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Of torch's kernel: threads of a block, numbers that Philox makes at once, bytes of a vector.
_BLOCK, _NUMBERS, _VECTOR_BYTES = 256, 4, 16
# More are counted with 64 bits, which fuser's kernel does not.
_MAX_ELEMENTS = 1 << 31


@dataclass(frozen=True, slots=True)
class Order:
    """Which number of which thread each element gets from torch's kernel on one GPU."""

    device: int
    dtype: torch.dtype
    # Elements that a thread takes side by side.
    vector: int

    def threads(self, numel: int) -> int:
        """Return how many threads the kernel has."""
        properties = torch.cuda.get_device_properties(self.device)
        most = properties.multi_processor_count * (properties.max_threads_per_multi_processor // _BLOCK)
        return _BLOCK * min(most, -(-numel // _BLOCK))

    def numbers(self, numel: int) -> int:
        """Return by how much the kernel moves the generator on."""
        return ((numel - 1) // (self.threads(numel) * _NUMBERS) + 1) * _NUMBERS


@dataclass(frozen=True, slots=True)
class Dropout:
    """A dropout that is opened."""

    node: fx.Node
    # The probability that an element stays, and what it is multiplied by, as torch's kernels have them.
    chance: float
    scale: float
    # On CUDA.
    order: Order | None


def find_dropouts(graph: fx.Graph) -> list[Dropout]:
    """Return the dropouts of a graph that can be opened."""
    return [
        _read(node)
        for node in graph.find_nodes(op="call_function", target=_ATEN.native_dropout.default)
        if not find_obstacle(node)
    ]


def _read(node: fx.Node) -> Dropout:
    x, p = node.args[:2]
    assert isinstance(x, fx.Node), "there is no obstacle"
    assert isinstance(p, float), "likewise"
    value = x.meta["val"]
    if value.device.type == "cpu":
        return Dropout(node, 1.0 - p, torch.tensor(1.0 / (1.0 - p), dtype=value.dtype).item(), None)
    chance = torch.tensor(1.0 - p, dtype=torch.promote_types(value.dtype, torch.float32)).item()
    vector = _find_vector(value.numel(), value.dtype.itemsize)
    return Dropout(node, chance, 1.0 / chance, Order(value.device.index or 0, value.dtype, vector))


def find_obstacle(node: fx.Node) -> str:
    """Return why a dropout stays torch's; empty if it need not."""
    x, p, train = node.args
    value = x.meta.get("val") if isinstance(x, fx.Node) else None
    if not isinstance(value, torch.Tensor) or any(type(size) is not int for size in (*value.shape, *value.stride())):
        return "its sizes are no numbers here"
    if value.dtype not in _DTYPES or not value.numel() or train is False or type(p) is not float or not 0 < p < 1:
        return "nothing is drawn, or of another dtype"
    if value.device.type == "cpu":
        return ""
    if value.device.type != "cuda" or not value.is_contiguous() or value.numel() >= _MAX_ELEMENTS:
        return "torch draws in an order that kernels do not have"
    # Whether it begins where memory does that the graph allocates.
    owner: Any = x
    while owner.op == "call_function" and may_alias(owner):
        owner = owner.all_input_nodes[0]
    is_aligned = value.storage_offset() * value.dtype.itemsize % _VECTOR_BYTES == 0
    return "" if owner.op == "call_function" and is_aligned else "torch draws as the address says, which is not known"


def _find_vector(numel: int, itemsize: int) -> int:
    vector = _VECTOR_BYTES // itemsize
    while numel % vector:
        vector //= 2
    return vector


def open_dropouts(dropouts: Sequence[Dropout], *, beside_reductions: bool) -> None:
    """Write dropouts as what draws, and arithmetic; say whether kernels with reductions may draw."""
    for item in dropouts:
        node, (x, *_) = item.node, item.node.args
        assert isinstance(x, fx.Node), "find_dropouts says so"
        parts = {user.args[1]: user for user in node.users}
        value = torch.empty_like(x.meta["val"])
        with node.graph.inserting_before(node):
            if item.order is None:
                mask = node.graph.call_function(draw_dropout_mask, (tuple(value.shape), value.stride(), item.chance))
            else:
                mask = _compute_mask(item, item.order, x)
            scaled = node.graph.call_function(_ATEN.native_dropout_backward.default, (x, mask, item.scale))
        mask.meta[IS_APART] = not beside_reductions
        mask.meta["val"], scaled.meta["val"] = torch.empty_like(value, dtype=torch.bool), value
        for slot, made in enumerate((scaled, mask)):
            if slot in parts:
                made.meta = {**parts[slot].meta, **made.meta}
                parts[slot].replace_all_uses_with(made)
                node.graph.erase_node(parts[slot])
        node.graph.erase_node(node)
        # It is what is left of the dropout, also for whoever counts what nodes move.
        scaled.name = node.name


def _compute_mask(item: Dropout, order: Order, x: fx.Node) -> fx.Node:
    graph, numel = item.node.graph, x.meta["val"].numel()
    drawn = graph.call_function(draw_dropout, (order.device, order.numbers(numel)))
    key, first = (graph.call_function(operator.getitem, (drawn, slot)) for slot in (0, 1))
    drawn.meta[IS_NUMBER] = True
    for number in (key, first):
        # Some number, for whoever plans ahead.
        number.meta |= {IS_NUMBER: True, "val": 0}
    numbers: dict[str, Any] = {"key": key, "first": first, "threads": order.threads(numel), "chance": item.chance}
    return graph.call_function(keep_function(order.vector), (x,), numbers)


def draw_dropout_mask(shape: Shape, strides: Strides, chance: float) -> torch.Tensor:
    """Draw a mask on the CPU as torch's dropout does."""
    return torch.empty_strided(shape, strides, dtype=torch.bool).bernoulli_(chance)


def draw_dropout(device: int, numbers: int) -> tuple[int, int]:
    """Move a GPU's generator on by so many numbers; return its key, as int64, and which number is the next."""
    generator = torch.cuda.default_generators[device]
    first, seed = generator.get_offset(), generator.initial_seed()
    generator.set_offset(first + numbers)
    return (seed ^ 1 << 63) - (1 << 63), first


@functools.cache
def keep_function(vector: int) -> JitFunction:
    """Return the functor that says of each element of a contiguous tensor whether torch's dropout keeps it."""
    if vector == 1:
        # A thread's four numbers belong to elements that lie as far apart as there are threads.
        place = "uint32_t thread = place % count, turn = place / count, call = turn / 4, part = turn % 4;"
    else:
        place = f"""uint32_t unit = place / {vector}, thread = unit % count;
  uint32_t call = unit / count * {-(-vector // 4)} + place % {vector} / 4, part = place % {min(vector, 4)};"""
    functor = parse_functor(_KEEP.replace("PLACE", place), ("key", "first", "threads", "chance"))
    function = Function(functor, unpromoted=("i",), out_dtypes=(torch.bool,), isolation=Isolation.NONE)
    return JitFunction(function, {}, "i")


# Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011): Philox-4x32-10. Its counter is the number of the
# call, and the thread; four numbers are one call, so neighbours share it.
_KEEP = """
template <typename T>
bool keep(T x, int64_t i, int64_t key, int64_t first, int64_t threads, double chance) {
  uint32_t place = uint32_t(i), count = uint32_t(threads);
  PLACE
  uint64_t number = uint64_t(first) / 4 + call;
  uint32_t a = uint32_t(number), b = uint32_t(number >> 32), c = thread, d = 0;
  uint32_t k = uint32_t(key), l = uint32_t(uint64_t(key) >> 32);
  for (int round = 0; round < 10; ++round) {
    uint64_t p = uint64_t(0xD2511F53u) * a, q = uint64_t(0xCD9E8D57u) * c;
    a = uint32_t(q >> 32) ^ b ^ k;
    b = uint32_t(q);
    c = uint32_t(p >> 32) ^ d ^ l;
    d = uint32_t(p);
    k += 0x9E3779B9u;
    l += 0xBB67AE85u;
  }
  uint32_t drawn = part == 0 ? a : part == 1 ? b : part == 2 ? c : d;
  return T(float(drawn) * 2.3283064365386963e-10f + 1.1641532182693481e-10f) < T(chance);
}
"""


class Otherwise:
    """Says of each call of a graph whether its dropouts have to be torch's.

    Where some order is not this torch's, and where a CUDA graph is being recorded: for which the kernels that serve
    then have to be there, so that the first call is torch's, too.
    """

    def __init__(self, orders: Sequence[Order]) -> None:
        self.orders = orders
        self.is_first = True

    def __call__(self) -> bool:
        """Look at a call."""
        was_first, self.is_first = self.is_first, False
        return was_first or torch.cuda.is_current_stream_capturing() or not all(map(_is_torchs, self.orders))

    def __reduce__(self) -> tuple[Any, ...]:
        return Otherwise, (self.orders,)


@functools.cache
def _is_torchs(order: Order) -> bool:
    of_kind = replace(order, device=0)
    key = verdict_key(torch.device("cuda", order.device), "dropout", str(of_kind))
    return find_verdict(key, lambda: _is_drawn_as_torch(order))


def _is_drawn_as_torch(order: Order) -> bool:
    # Each thread has several turns, the last of which not all threads have. Sizes with vectors like these, and with the
    # widest: how many elements lie side by side is part of the order.
    numel = (2 * order.threads(_MAX_ELEMENTS) * max(order.vector, _NUMBERS) + _BLOCK + 1) * order.vector
    sizes = (numel, numel // _VECTOR_BYTES * _VECTOR_BYTES)
    return all(_draws_as_torch(replace(order, vector=_find_vector(n, order.dtype.itemsize)), n) for n in sizes)


def _draws_as_torch(order: Order, numel: int) -> bool:
    generator = torch.cuda.default_generators[order.device]
    before, chance = generator.get_offset(), 0.625
    x = torch.ones(numel, dtype=order.dtype, device=f"cuda:{order.device}")
    try:
        wanted = torch.native_dropout(x, 1.0 - chance, True)[1]
        after = generator.get_offset()
        generator.set_offset(before)
        key, first = draw_dropout(order.device, order.numbers(numel))
        made = keep_function(order.vector)(x, key=key, first=first, threads=order.threads(numel), chance=chance)
        return after == generator.get_offset() and torch.equal(made, wanted)
    finally:
        generator.set_offset(before)
