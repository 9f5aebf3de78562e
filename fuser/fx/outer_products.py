"""Matrix products whose inner dimension is one: each element of the result is one product, which joins groups.

The gradient of a layer with one output, as a score has or a critic, is such a product: as large as the layer's input,
and cuBLAS writes it by kernels made for long sums. In 16 bits the product of two numbers is exact in float, so that
whichever kernel cuBLAS takes rounds it once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from fuser.fx.nodes import add_call, is_static
from fuser.order_check import find_verdict, verdict_key

__all__ = ["open_outer_products"]

_ATEN = torch.ops.aten
_PRODUCTS = (_ATEN.mm.default, _ATEN.bmm.default)
_DTYPES = (torch.float16, torch.bfloat16)


def open_outer_products(graph: fx.Graph, numerics: str) -> None:
    """Let pointwise ops compute products of columns with rows on a GPU; in strict numerics where bits are the same."""
    for target in _PRODUCTS:
        for node in graph.find_nodes(op="call_function", target=target):
            left, right = (item.meta.get("val") for item in node.args)
            if not (_is_plain(left) and _is_plain(right) and left.shape[-1] == 1):
                continue
            made = left * right
            if made.stride() != node.meta["val"].stride():
                continue
            if numerics == "strict" and not _has_torchs_bits(left.device, left.dtype):
                continue
            with graph.inserting_before(node):
                total = _write(graph, *node.args)
            total.meta = node.meta
            node.replace_all_uses_with(total)
            graph.erase_node(node)


def _write(graph: fx.Graph, *factors: Any) -> fx.Node:
    # In float, and rounded at the end.
    wide = (add_call(graph, _ATEN._to_copy.default, item, dtype=torch.float32) for item in factors)
    # A sum begins with zero, which takes the sign from another one.
    total = add_call(graph, _ATEN.add.Tensor, add_call(graph, _ATEN.mul.Tensor, *wide), 0.0)
    return add_call(graph, _ATEN._to_copy.default, total, dtype=factors[0].meta["val"].dtype)


def _is_plain(value: Any) -> bool:
    return is_static(value) and value.dtype in _DTYPES and value.is_cuda


def _has_torchs_bits(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a product and a sum have the bits of torch's matrix product: compared once, and kept."""
    if not torch.cuda.is_available():
        return False
    key = verdict_key(device, "outer", str(dtype))
    try:
        return find_verdict(key, lambda: _compare(device, dtype))
    except torch.OutOfMemoryError:
        # Nobody knows: torch's kernel serves, this time.
        return False


def _compare(device: torch.device, dtype: torch.dtype) -> bool:
    with _disable_current_modes(), torch.no_grad(), torch.cuda.device(device):
        generator = torch.Generator(device).manual_seed(0)
        for rows, columns in ((4096, 128), (300, 77), (3, 5)):
            column, row = (
                torch.randn(size, device=device, generator=generator).to(dtype) for size in ((rows, 1), (1, columns))
            )
            # Results that have no normal number or none at all, zeros of both signs, and what is no number.
            column[::3] *= torch.finfo(dtype).tiny ** 0.5
            column[1::3] *= torch.finfo(dtype).tiny
            row[:, ::2] *= torch.finfo(dtype).tiny ** 0.5
            column[:3, 0] = torch.tensor([0.0, -0.0, torch.inf], device=device)
            made, wanted = (column.float() * row.float() + 0.0).to(dtype), torch.mm(column, row)
            is_same = (made.view(torch.int16) == wanted.view(torch.int16)) | (made.isnan() & wanted.isnan())
            if not is_same.all():
                return False
    return True
