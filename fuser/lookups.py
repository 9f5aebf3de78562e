"""Functions that a kernel looks up: a block computes one for all common numbers of bfloat16 first.

Such a function takes several times as many instructions as memory has time for, and most of what it is asked for was
asked before: there are 4096 numbers of bfloat16 from 2^-13 to below 8, signs counted. For others it is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch

from fuser.access import STATIC_SHARED_BYTES, Walk
from fuser.cxx.functor import MATH_FUNCTIONS, Functor
from fuser.graph import FusionGroup
from fuser.kernel_spec import RowSpec
from fuser.row_space import reduction_levels

__all__ = ["Lookup", "find_lookups", "look_up_in"]

# Functions that take no longer than to look something up.
_QUICK = frozenset(
    {"exp", "exp2", "log", "log2", "fabs", "sqrt", "rsqrt", "floor", "ceil", "trunc", "rint", "nearbyint"}
)
_LOOPS = frozenset({"for", "while", "do", "goto"})
# Tables of a block at most, and of what size; elements of a kernel for which they pay; threads of a block that fill
# them, in torch's order and else (measured on an H200); and of a processor, by whether a thread keeps elements of
# several tensors, or more than so many.
MOST_TABLES, TABLE_BYTES = 2, 16 << 10
LARGE, BLOCK, THREADS, LONG_SHARE = 1 << 24, (256, 512), (1024, 512), 32


class Lookup(NamedTuple):
    """An application that is looked up."""

    # The slots of its operand, and of the factor that its function of that is multiplied with; -1 without one.
    operand: int
    factor: int = -1


def find_lookups(
    group: FusionGroup, dtypes: Sequence[torch.dtype], is_row: Sequence[bool], shared_bytes: int = 0
) -> dict[int, Lookup]:
    """Return the applications of a group with reductions that its kernel may look up.

    Args:
        group: the kernel's.
        dtypes: of its values.
        is_row: whether there is one of each of them for a row.
        shared_bytes: of shared memory that the kernel takes for something else.
    """
    most = min((STATIC_SHARED_BYTES - shared_bytes) // TABLE_BYTES, MOST_TABLES)
    found: dict[int, Lookup] = {}
    levels = reduction_levels(group)
    for index, (item, made) in enumerate(zip(group.applications, group.value_offsets(), strict=True)):
        function = item.function
        lookup = None if function.reduction else _read(function.functor, bool(function.op), group.is_strict)
        if lookup is None or len(found) >= most or lookup.operand >= len(item.tensors):
            continue
        operand = item.tensors[lookup.operand]
        is_plain = levels[operand] == 0 and not is_row[operand]
        # Tables hold what has not been rounded yet: a gradient that is passed on in float32 is made of it, too.
        if is_plain and dtypes[operand] is torch.bfloat16 and dtypes[made] in (torch.bfloat16, torch.float32):
            found[index] = lookup
    return found


def look_up_in(walk: Walk, rows: RowSpec, inputs: int, processors: int) -> Walk:
    """Return the walk of a kernel on a GPU that looks functions up, where that pays: few blocks have tables.

    Args:
        walk: as it is without.
        rows: what the kernel reduces.
        inputs: how many tensors of elements it reads.
        processors: of the GPU.
    """
    tuning, space = walk.tuning, walk.space
    is_shared = bool(tuning.piece) or tuning.cluster > 1
    if prod(space.sizes) < LARGE or rows.scans or (rows.is_across and rows.order is None):
        return walk
    if rows.is_across and rows.order is not None:
        # Each block has its rows, and a table.
        blocks = prod(space.sizes[rows.reduced :]) // (tuning.team * walk.vector)
        if prod(space.sizes) < LARGE // 1024 * blocks * max(rows.order.schedule.blocks, tuning.piece):
            return walk
    if not (rows.is_across or rows.pieces):
        if is_shared or not tuning.is_resident:
            return walk
        block = tuning.team * max(BLOCK[rows.order is None] // tuning.team, 1)
        has_much = inputs > 1 or tuning.unroll * walk.vector > LONG_SHARE
        resident = max(THREADS[has_much] // block, 1)
        tuning = tuning._replace(block=block, resident=resident, most_blocks=resident * processors)
    return walk._replace(tuning=tuning._replace(looks=True))


@lru_cache(4096)
def _read(functor: Functor, is_torchs: bool, is_strict: bool) -> Lookup | None:
    # A slow function of one tensor, or that times another one. What a text that is not torch's does with numbers that
    # nobody asked for must end, and read no memory.
    if functor.words.isdisjoint(MATH_FUNCTIONS - _QUICK) and not ("exp" in functor.words and "/" in functor.source):
        return None
    is_plain = functor.source.count("{") == 1 and "[" not in functor.source and _LOOPS.isdisjoint(functor.words)
    if functor.num_outputs > 1 or functor.macros or not (is_torchs or is_plain):
        return None
    names, body = [item.name for item in functor.tensors], functor.source.partition("{")[2]
    if len(names) == 1:
        return Lookup(0)
    _, _, result = body.rpartition(" return ")
    factor = names[0]
    is_product = result.startswith(f"{factor} * (") and body.count(f" {factor} ") == 1
    if len(names) != 2:
        return None
    is_product = is_product and _closes_last(result.removeprefix(f"{factor} * "))
    if is_product:
        return Lookup(1, 0)
    from fuser.linear import is_linear  # noqa: PLC0415 - reads whole texts

    return Lookup(1, 0) if not is_strict and is_linear(functor, 0) else None


def _closes_last(text: str) -> bool:
    # Whether the parenthesis that a text begins with closes at its end: "(a + b); }".
    depth, inside = 0, text.rstrip("}; \n")
    for slot, char in enumerate(inside):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return slot == len(inside) - 1
    return False
