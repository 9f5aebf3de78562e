"""Matrix products in 16 bits with odd sizes, padded: cuBLAS has its fast kernels for rows of whole vectors alone.

A vocabulary of 50257 makes the products of a language model's last layer, and of its gradients, three to nine times
slower than one of 50264. What is padded is written by the group that computes it, or copied once for all products that
read it. The sums are another kernel's, with other bits: for fast numerics.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fuser.fx.nodes import add_call, is_static

__all__ = ["pad_products"]

_ATEN = torch.ops.aten
_PRODUCTS = (_ATEN.mm.default, _ATEN.addmm.default)
_DTYPES = (torch.float16, torch.bfloat16)
# Elements of a vector.
VECTOR = 8
# A product that is padded takes, by a GPU's rates, as much time less as copying a byte for each so many operations, and
# the copies' launches are nothing beside so many.
OPERATIONS_PER_BYTE = 200
OPERATIONS = 1 << 31


def pad_products(graph: fx.Graph) -> None:
    """Pad the operands of products to whole vectors, with zeros, where copying them costs less than it gains."""
    known: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if node.target in _PRODUCTS:
            _Product(graph, node, known).pad()


class _Product:
    def __init__(self, graph: fx.Graph, node: fx.Node, known: dict[Any, fx.Node]) -> None:
        self.graph = graph
        self.node = node
        # What has been padded, by how much.
        self.known = known

    def pad(self) -> None:
        """Pad it, if it gains."""
        *bias, one, other = self.node.args
        values: list[Any] = [item.meta.get("val") for item in (*bias, one, other) if isinstance(item, fx.Node)]
        if self.node.kwargs or not all(_is_plain(value) for value in values):
            return
        *vector, left, right = values
        if any(value.dim() != 1 for value in vector):
            return
        (rows, inner), columns = left.shape, right.shape[1]
        # What lies densely in an operand or in the result.
        more = _missing(rows) if left.stride(1) != 1 else 0, _missing(columns)
        more_inner = _missing(inner) if left.stride(1) == 1 or right.stride(1) != 1 else 0
        copied = left.numel() * (more[0] + more_inner > 0) + right.numel() * (more[1] + more_inner > 0)
        copied += rows * columns * (more[1] > 0)
        operations = 2 * rows * inner * columns
        if not copied or operations < max(OPERATIONS, OPERATIONS_PER_BYTE * copied * left.itemsize):
            return
        with self.graph.inserting_before(self.node):
            operands = [self._padded(item, more[1]) for item in bias]
            operands += [self._padded(one, more[0], more_inner), self._padded(other, more_inner, more[1])]
            made = add_call(self.graph, self.node.target, *operands)
            made = made if not more[0] else add_call(self.graph, _ATEN.slice.Tensor, made, 0, 0, rows)
            if more[1]:
                seen = add_call(self.graph, _ATEN.slice.Tensor, made, 1, 0, columns)
                # As it was: others may look at it in another shape.
                made = add_call(self.graph, _ATEN.clone.default, seen, memory_format=torch.contiguous_format)
        self.node.replace_all_uses_with(made)
        self.graph.erase_node(self.node)
        operand: Any
        for operand in {one, other}:
            # Else what it is a view of would be written, too.
            if operand.target is _ATEN.t.default and not operand.users:
                self.graph.erase_node(operand)

    def _padded(self, node: Any, *more: int) -> Any:
        # Elements more in each dimension; what is seen transposed is padded as it lies.
        if not any(more):
            return node
        if node.target is _ATEN.t.default:
            return add_call(self.graph, _ATEN.t.default, self._padded(node.args[0], *reversed(more)))
        key = node, more
        if key not in self.known:
            amounts = [amount for size in reversed(more) for amount in (0, size)]
            self.known[key] = add_call(self.graph, _ATEN.constant_pad_nd.default, node, amounts, 0.0)
        return self.known[key]


def _is_plain(value: Any) -> bool:
    return is_static(value) and value.dtype in _DTYPES and value.is_cuda and 1 in value.stride()


def _missing(size: int) -> int:
    return -size % VECTOR
