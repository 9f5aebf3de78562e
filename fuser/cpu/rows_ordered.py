"""A row in the order of torch's own CPU kernels: ``cascade_sum`` of ATen's SumKernel.cpp.

Four vectors side by side are added to four others; what so many of them come to is added to the sums of a second level,
as many of those to a third, and so on, so that numbers of like magnitude meet. Then levels, vectors and lanes are added
in turn. What is no whole vector comes first of all, one after another.
"""

from __future__ import annotations

from fuser.codegen import RowLoop
from fuser.cpu.row_batch import QUARTER, indent
from fuser.cpu.rows_along import AlongBatch
from fuser.kernel_spec import CPU_LANES
from fuser.row_parts import RowPart, RowPass

__all__ = ["OrderedBatch"]

LEVELS = 4
# As powers of two: how many sums of a level come together at least.
LEAST_POWER = 4


class OrderedBatch(AlongBatch):
    """Walks along rows, a whole one as a batch."""

    elements = 1 << 62

    def __init__(self, loop: RowLoop) -> None:
        super().__init__(loop)
        assert loop.rows.order is not None, "it has one"
        schedule = loop.rows.order.schedule
        # Lanes of one of ATen's vectors of accumulators, and the elements that are added before they meet those.
        self.lanes, self.halves = schedule.x, schedule.vector

    def capacity(self, step: RowPass) -> int:  # noqa: ARG002 - the same for all
        """Return how many parts a block holds: one of each row."""
        return CPU_LANES

    def size(self, step: RowPass) -> int:  # noqa: ARG002 - the same for all
        """Return how many elements are computed together: those of four vectors."""
        return QUARTER * self.lanes * self.halves

    def helpers(self, level: int, step: RowPass) -> list[str]:  # noqa: ARG002 - there are none
        """Write nothing."""
        return []

    def begin(self, step: RowPass) -> list[str]:
        """Write how many sums of a level come together."""
        return [
            f"const int64_t fours = total / {self.size(step)};",
            "int power = 0;",
            "while ((int64_t(1) << power) < fours) ++power;",
            f"power = power / {LEVELS} > {LEAST_POWER} ? power / {LEVELS} : {LEAST_POWER};",
            "const int64_t each = int64_t(1) << power;",
        ]

    def finish(self, level: int) -> list[str]:  # noqa: ARG002 - nothing is left to do
        """Write nothing."""
        return []

    def units(self, level: int, step: RowPass, element: RowPart, known: dict[str, str]) -> list[str]:  # noqa: ARG002
        """Write the walk over one row."""
        unit, sums = self.size(step), QUARTER * self.lanes
        vector = self.lanes * self.halves
        # Where stretches end in the middle of a unit, each goes through buffers.
        is_dense = self.loop.rows.reduced == 1
        here = [*self.place("first + done", self.full(element), "row_{0}"), *self.fixed(element)]
        whole = [*here, *self.unit(step, element, known, "")] if is_dense else self.end(step, element, known)
        next_level = self.combine(
            step, f"sum{{0}}[level * {sums} + c]", f"sum{{0}}[(level - 1) * {sums} + c]", f"sum{{0}}[level * {sums} + c]"
        )
        cleared = [f"sum{item.name}[(level - 1) * {sums} + c] = {item.identity};" for item in step.accumulators]
        return [
            *(f"alignas(64) {item.type} sum{item.name}[{LEVELS * sums}];" for item in step.accumulators),
            f"for (int level = 1; level <= {LEVELS} && (level == 1 || fours >= each); ++level) {{",
            *indent(self._each(sums, cleared)),
            "}",
            *(f"{item.type} last{item.name} = {item.identity};" for item in step.accumulators),
            "int64_t done = 0;",
            "for (int64_t i = 0; i < fours;) {",
            "  const int64_t stop = i + each < fours ? i + each : fours;",
            "  const bool is_full = i + each <= fours;",
            f"  for (; i < stop; ++i, done += {unit}) {{",
            *indent(indent([*whole, *self._halve(step), *self._each(sums, [self._add(step, "sum{0}[c]", "own{0}[c]")])])),
            "  }",
            "  if (!is_full) break;",
            f"  for (int level = 1; level < {LEVELS}; ++level) {{",
            *indent(indent(self._each(sums, [next_level, *cleared]))),
            "    if (i & ((each - 1) << (level * power))) break;",
            "  }",
            "}",
            f"for (int level = 1; level < {LEVELS} && fours >= each; ++level) {{",
            *indent(self._each(sums, [self._add(step, "sum{0}[c]", f"sum{{0}}[level * {sums} + c]")])),
            "}",
            "if (done < total) {",
            *indent(self.end(step, element, known)),
            "  int i = 0;",
            f"  for (; i + {vector} <= end; i += {vector}) {{",
            *(
                text
                for half in range(1, self.halves)
                for text in indent(
                    indent(self._each(self.lanes, [self._add(step, "own{0}[i + c]", f"own{{0}}[i + c + {half * self.lanes}]")]))
                )
            ),
            *indent(indent(self._each(self.lanes, [self._add(step, "sum{0}[c]", "own{0}[i + c]")]))),
            "  }",
            f"  for (; i < end; ++i) {self._add(step, 'last{0}', 'own{0}[i]')}",
            "}",
            f"for (int i = {self.lanes}; i < {sums}; i += {self.lanes}) {{",
            *indent(self._each(self.lanes, [self._add(step, "sum{0}[c]", "sum{0}[i + c]")])),
            "}",
            f"for (int c = 0; c < {self.lanes}; ++c) {self._add(step, 'last{0}', 'sum{0}[c]')}",
            *(f"block.m{item.name}[row] = last{item.name};" for item in step.accumulators),
        ]

    def _halve(self, step: RowPass) -> list[str]:
        # What lies in two vectors is added before it meets the sums.
        lines = []
        for four in range(QUARTER if self.halves > 1 else 0):
            begin = four * self.lanes * self.halves
            left, right = f"own{{0}}[c + {begin}]", f"own{{0}}[c + {begin + self.lanes}]"
            lines += self._each(self.lanes, [self.combine(step, left, right, f"own{{0}}[c + {four * self.lanes}]")])
        return lines

    def _add(self, step: RowPass, to: str, what: str) -> str:
        return self.combine(step, to, what, to)

    def _each(self, count: int, lines: list[str]) -> list[str]:
        # For each lane, in loops of one vector.
        return ["#pragma GCC ivdep", f"for (int c = 0; c < {count}; ++c) {{ {' '.join(lines)} }}"]
