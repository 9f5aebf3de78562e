"""Running totals on the CPU: each element of a row is added to what all before it came to, as ATen adds them.

Such sums wait for each other: some rows are walked along side by side.
"""

from __future__ import annotations

from dataclasses import replace

from fuser.codegen import RowLoop
from fuser.cpu.row_batch import RowBatch, indent
from fuser.kernel_spec import CPU_LANES
from fuser.row_parts import RowPart, RowPass

__all__ = ["ScannedBatch"]

# Rows that are walked along side by side, where a row's elements are neighbours.
ALONG_LANES = 8


class ScannedBatch(RowBatch):
    """Walks over the elements of all rows of a tile, all passes of each element."""

    elements = 1 << 62

    def __init__(self, loop: RowLoop) -> None:
        super().__init__(loop)
        self.lanes = CPU_LANES if loop.rows.is_across else ALONG_LANES

    @staticmethod
    def as_one_pass(loop: RowLoop) -> RowLoop:
        """Return the loop for who writes what is around batches: one pass, which leaves nothing."""
        return replace(loop, passes=(replace(loop.passes[0], accumulators=(), combine=None),))

    def capacity(self, step: RowPass) -> int:  # noqa: ARG002 - as others
        """Return how many parts a block holds: none."""
        return 0

    def helpers(self, level: int, step: RowPass) -> list[str]:  # noqa: ARG002 - as others
        """Write nothing."""
        return []

    def walk(self, level: int, step: RowPass, element: RowPart) -> list[str]:  # noqa: ARG002 - it is of all passes
        """Write the walk, over a full tile and over others."""
        sums = [item for own in self.loop.passes for item in own.accumulators]
        lines = [f"alignas(64) {item.type} s{item.name}[{self.lanes}];" for item in sums]
        clear = " ".join(f"s{item.name}[c] = {item.identity};" for item in sums)
        lines.append(f"for (int c = 0; c < {self.lanes}; ++c) {{ {clear} }}")
        if self.loop.rows.is_across:
            return [*lines, *self._elements("width")]
        return [
            *lines,
            f"if (width == {self.lanes}) {{",
            *indent(self._elements(str(self.lanes))),
            "} else {",
            *indent(self._elements("width")),
            "}",
        ]

    def _elements(self, count: str) -> list[str]:
        parts = [step.element for step in self.loop.passes if step.element]
        operands = list(dict.fromkeys(item for part in parts for item in self.full(part)))
        first = self.loop.rows.reduced
        body = []
        for step in self.loop.passes:
            if step.element is None:
                continue
            known = {name: f"state.{own}[c]" for name, own in self.row_reads(step.element)}
            for item in self.full(step.element):
                stride = self.stride(item, first)
                place = f"{item.name}[{'0' if stride == '0' else 'c' if stride == '1' else f'c * {stride}'}]"
                known[item.variable] = place if item.is_output else f"fuser_to_compute({place})"
            known |= {f"p{item.name}": f"s{item.name}[c]" for own in self.loop.passes for item in own.accumulators}
            known |= {f"m{item.name}": f"m{item.name}" for item in step.accumulators}
            body += [f"{item.type} m{item.name};" for item in step.accumulators]
            body.append(step.element.call(known))
            if step.combine is not None:
                sums = {f"{side}{item.name}": f"s{item.name}[c]" for side in "lm" for item in step.accumulators}
                body.append(step.combine.call(sums | {f"r{item.name}": f"m{item.name}" for item in step.accumulators}))
        return [
            "for (int64_t i = 0; i < total; ++i) {",
            *indent(self.place("i", operands, "base.{0}")),
            "#pragma GCC ivdep",
            *([f"#pragma GCC unroll {count}"] if count.isdigit() else []),
            f"  for (int64_t c = 0; c < {count}; ++c) {{",
            *indent(indent(body)),
            "  }",
            "}",
        ]
