"""A row in the order of torch's own CPU kernels for what is no sum: ``binary_kernel_reduce`` of ATen's Reduce.h.

Each element of a row is added to what all before it came to: neighbouring rows are taken side by side. Where they are
not side by side in memory, a stretch of each is brought there first.
"""

from __future__ import annotations

from fuser.cpu.rows_across import AcrossBatch
from fuser.kernel_source import Operand, RowLoop, indent
from fuser.row_pass import RowPart, RowPass

__all__ = ["SerialBatch"]

# Rows whose elements are brought together, and elements of each at a time.
LANES, STRETCH = 32, 32


class SerialBatch(AcrossBatch):
    """Walks over elements, for neighbouring rows side by side."""

    elements = 1 << 62

    def __init__(self, loop: RowLoop) -> None:
        super().__init__(loop)
        if any(map(self._is_apart, loop.operands)):
            # So few streams that processors fetch ahead.
            self.lanes = LANES

    def capacity(self, step: RowPass) -> int:  # noqa: ARG002 - the same for all
        """Return how many parts a block holds: one of each row."""
        return self.lanes

    def walk(self, level: int, step: RowPass, element: RowPart) -> list[str]:
        """Write the walk over one element of all rows after another."""
        if not step.accumulators:
            return super().walk(level, step, element)
        known = {name: f"state.{own}[c]" for name, own in self.row_reads(element)}
        known |= {f"{side}{item.name}": f"block.m{item.name}[c]" for side in "lm" for item in step.accumulators}
        clear = self.each_row([f"block.m{item.name}[c] = {item.identity};" for item in step.accumulators])
        brought = [item for item in self.loop.full(element) if not item.is_output and self._is_apart(item)]
        if not brought:
            each = indent(self.one("i", element, known))
            return [*self.kept(), *clear, "for (int64_t i = 0; i < total; ++i) {", *each, "}"]
        known |= {item.variable: f"fuser_to_compute(near_{item.name}[k * {self.lanes} + c])" for item in brought}
        return [
            *self.kept(),
            *clear,
            *(f"alignas(64) {item.info.storage} near_{item.name}[{STRETCH * self.lanes}];" for item in brought),
            "int64_t count = 0;",
            "for (int64_t begin = 0; begin < total; begin += count) {",
            *indent(self.place("begin", brought, "base.{0}")),
            f"  count = length < {STRETCH} ? length : {STRETCH};",
            *(line for item in brought for line in indent(self._bring(item))),
            "  for (int64_t k = 0; k < count; ++k) {",
            *indent(self.one("begin + k", element, known), 2),
            "  }",
            "}",
        ]

    def _is_apart(self, item: Operand) -> bool:
        return item.variable not in self.loop.per_row and self.stride(item, self.inner) not in {"0", "1"}

    def _bring(self, item: Operand) -> list[str]:
        to, move = f"near_{item.name}[k * {self.lanes} + c]", self.stride(item, self.inner)
        return [
            "for (int64_t c = 0; c < width; ++c) {",
            f"  const auto from = {item.name} + c * {move};",
            f"  for (int64_t k = 0; k < count; ++k) {to} = from[k * {self.stride(item, 0)}];",
            "}",
        ]
