"""A row in the order of torch's own CPU kernels: ``cascade_sum`` of ATen's SumKernel.cpp.

Four vectors side by side are added to four others; what so many of them come to is added to the sums of a second level,
as many of those to a third, and so on, so that numbers of like magnitude meet. Then levels, vectors and lanes are added
in turn. What is no whole vector comes first of all, one after another; rows of less than a vector have four sums of
single elements.
"""

from __future__ import annotations

from fuser.cpu.row_batch import QUARTER
from fuser.cpu.rows_across import AcrossBatch
from fuser.cpu.rows_along import AlongBatch
from fuser.kernel_source import RowLoop, indent
from fuser.row_pass import RowPart, RowPass

__all__ = ["OrderedAcross", "OrderedAlong"]

LEVELS = 4
# As powers of two: how many sums of a level come together at least.
LEAST_POWER = 4


class OrderedAlong(AlongBatch):
    """Walks along rows, a whole one as a batch."""

    elements = 1 << 62

    def __init__(self, loop: RowLoop) -> None:
        super().__init__(loop)
        assert loop.rows.order is not None, "it has one"
        schedule = loop.rows.order.schedule
        # Lanes of one of ATen's vectors of accumulators, and the elements that are added before they meet those.
        self.width, self.halves = schedule.x, schedule.vector

    def capacity(self, step: RowPass) -> int:  # noqa: ARG002 - the same for all
        """Return how many parts a block holds: one of each row."""
        return self.lanes

    def size(self, step: RowPass) -> int:  # noqa: ARG002 - the same for all
        """Return how many elements are computed together: those of four vectors."""
        return QUARTER * self.width * self.halves

    def helpers(self, level: int, step: RowPass) -> list[str]:  # noqa: ARG002 - there are none
        """Write nothing."""
        return []

    def begin(self, step: RowPass) -> list[str]:
        """Write how many sums of a level come together."""
        return [f"const int64_t fours = total / {self.size(step)};", *_write_power("fours")]

    def finish(self, level: int) -> list[str]:  # noqa: ARG002 - nothing is left to do
        """Write nothing."""
        return []

    def units(self, level: int, step: RowPass, element: RowPart, known: dict[str, str]) -> list[str]:  # noqa: ARG002
        """Write the walk over one row."""
        unit, sums = self.size(step), QUARTER * self.width
        vector = self.width * self.halves
        # Where stretches end in the middle of a unit, each goes through buffers.
        is_dense = self.loop.rows.reduced == 1
        here = [*self.place("first + done", self.loop.full(element), "row_{0}"), *self.fixed(element)]
        whole = [*here, *self.unit(step, element, known, "")] if is_dense else self.end(step, element, known)
        upper = "upper{{0}}[{} * {} + c]".format
        above, below = upper("level", sums), upper("(level - 1)", sums)
        first = upper(0, sums)
        names = [(item.name, item.identity) for item in step.accumulators]
        single = self._add(step, f"part{{0}}[i % {QUARTER}]", "own{0}[i]")
        tail = [
            [f"if (end >= {begin + vector}) {{", *indent(self._vector(step, begin)), "}"]
            for begin in range(0, unit - vector, vector)
        ]
        return [
            "// Sums of single vectors, which stay in registers, and apart from them of more and more vectors.",
            *(
                f"alignas(64) {item.type} sum{item.name}[{sums}], part{item.name}[{sums}];"
                for item in step.accumulators
            ),
            *(f"alignas(64) {item.type} upper{item.name}[{(LEVELS - 1) * sums}];" for item in step.accumulators),
            *self._each(sums, [f"sum{name}[c] = {identity};" for name, identity in names]),
            "if (fours >= each) {",
            *indent(self._each((LEVELS - 1) * sums, [f"upper{name}[c] = {identity};" for name, identity in names])),
            "}",
            *(f"{item.type} last{item.name} = {item.identity};" for item in step.accumulators),
            "int64_t done = 0;",
            "for (int64_t i = 0; i < fours;) {",
            "  const int64_t stop = i + each < fours ? i + each : fours;",
            "  const bool is_full = i + each <= fours;",
            f"  for (; i < stop; ++i, done += {unit}) {{",
            *indent([*whole, *self._halve(step)], 2),
            *indent(self._each(sums, [self._add(step, "sum{0}[c]", "own{0}[c]")]), 2),
            "  }",
            "  if (!is_full) break;",
            *indent(self._move(step, sums, first, "sum{0}[c]")),
            f"  for (int level = 1; level < {LEVELS - 1}; ++level) {{",
            "    if (i & ((each - 1) << (level * power))) break;",
            *indent(self._move(step, sums, above, below), 2),
            "  }",
            "}",
            f"for (int level = 0; level < {LEVELS - 1} && fours >= each; ++level) {{",
            *indent(self._each(sums, [self._add(step, "sum{0}[c]", above)])),
            "}",
            *self._each(sums, [f"part{name}[c] = sum{name}[c];" for name, _ in names]),
            "if (done < total) {",
            *indent(self.end(step, element, known)),
            *(line for lines in tail for line in indent(lines)),
            f"  int i = end / {vector} * {vector};",
            f"  if (total < {vector}) {{",
            f"    for (; i < end / {QUARTER} * {QUARTER}; ++i) {single}",
            f"    for (; i < end; ++i) {self._add(step, 'part{0}[0]', 'own{0}[i]')}",
            "  }",
            f"  for (; i < end; ++i) {self._add(step, 'last{0}', 'own{0}[i]')}",
            "}",
            *(
                line
                for begin in range(self.width, sums, self.width)
                for line in self._each(self.width, [self._add(step, "part{0}[c]", f"part{{0}}[c + {begin}]")])
            ),
            *(self._add(step, "last{0}", f"part{{0}}[{lane}]") for lane in range(self.width)),
            *(f"block.m{name}[row] = last{name};" for name, _ in names),
        ]

    def _vector(self, step: RowPass, begin: int) -> list[str]:
        # One vector after the fours, whose halves are added first.
        lines = []
        for half in range(1, self.halves):
            right = f"own{{0}}[c + {begin + half * self.width}]"
            lines += self._each(self.width, [self._add(step, f"own{{0}}[c + {begin}]", right)])
        return [*lines, *self._each(self.width, [self._add(step, "part{0}[c]", f"own{{0}}[c + {begin}]")])]

    def _move(self, step: RowPass, count: int, to: str, what: str) -> list[str]:
        # Sums of a level become part of those of the next one.
        cleared = [f"{what.format(item.name)} = {item.identity};" for item in step.accumulators]
        return self._each(count, [self._add(step, to, what), *cleared])

    def _halve(self, step: RowPass) -> list[str]:
        # What lies in two vectors is added before it meets the sums.
        lines = []
        for four in range(QUARTER if self.halves > 1 else 0):
            begin = four * self.width * self.halves
            left, right = f"own{{0}}[c + {begin}]", f"own{{0}}[c + {begin + self.width}]"
            lines += self._each(self.width, [self.combine(step, left, right, f"own{{0}}[c + {four * self.width}]")])
        return lines

    def _add(self, step: RowPass, to: str, what: str) -> str:
        return self.combine(step, to, what, to)

    def _each(self, count: int, lines: list[str]) -> list[str]:
        # For each lane, in loops of one vector.
        return ["#pragma GCC ivdep", f"for (int c = 0; c < {count}; ++c) {{ {' '.join(lines)} }}"]


class OrderedAcross(AcrossBatch):
    """Walks over elements, for neighbouring columns side by side: each has sums of single elements."""

    elements = 1 << 62

    def capacity(self, step: RowPass) -> int:  # noqa: ARG002 - the same for all
        """Return how many parts a block holds: the sums of all levels."""
        return LEVELS * self.lanes

    def walk(self, level: int, step: RowPass, element: RowPart) -> list[str]:
        """Write the walk over one element of all columns after another."""
        if not step.accumulators:
            return super().walk(level, step, element)
        known = {name: f"state.{own}[c]" for name, own in self.row_reads(element)}
        here, above, below = (
            f"block.m{{0}}[{place}c]" for place in ("", f"level * {self.lanes} + ", f"(level - 1) * {self.lanes} + ")
        )
        find, four = self.four(step, element, known, "i")
        one = [f"{item.type} e{item.name};" for item in step.accumulators]
        to = {f"m{item.name}": f"e{item.name}" for item in step.accumulators}
        one.append(self.call(element, "c", f"i * {self.lanes} + c", known | to))
        place = self.place("i", self.loop.full(element), "base.{0}")
        cleared = [f"{below.format(item.name)} = {item.identity};" for item in step.accumulators]
        return [
            *self.kept(),
            *_write_power("total"),
            f"for (int c = 0; c < {LEVELS * self.lanes}; ++c) {{",
            *indent(f"block.m{item.name}[c] = {item.identity};" for item in step.accumulators),
            "}",
            "for (int64_t i = 0; i < total;) {",
            "  const int64_t stop = i + each < total ? i + each : total;",
            "  const bool is_full = i + each <= total;",
            "  while (i < stop) {",
            *indent(place, 2),
            f"    if (stop - i >= {QUARTER} && length >= {QUARTER}) {{",
            *indent(indent(find), 2),
            *indent(indent(self.each_row([*four, *self._join(step, here)]), 2)),
            f"      i += {QUARTER};",
            "    } else {",
            *indent(indent(self.fixed(element)), 2),
            *indent(indent(self.each_row([*one, self.combine(step, here, "e{0}", here)]), 2)),
            "      ++i;",
            "    }",
            "  }",
            "  if (!is_full) break;",
            f"  for (int level = 1; level < {LEVELS}; ++level) {{",
            *indent(self.each_row([self.combine(step, above, below, above), *cleared]), 2),
            "    if (i & ((each - 1) << (level * power))) break;",
            "  }",
            "}",
            f"for (int level = 1; level < {LEVELS}; ++level) {{",
            *indent(self.each_row([self.combine(step, here, above, here)])),
            "}",
        ]

    def _join(self, step: RowPass, to: str) -> list[str]:
        # Four elements are added one after another, in registers.
        before, calls = to, []
        for own in range(QUARTER):
            target = to if own == QUARTER - 1 else f"e{own}_{{0}}"
            calls.append(self.combine(step, before, f"e{own}_{{0}}", target))
            before = target
        return calls


def _write_power(count: str) -> list[str]:
    # How many sums of a level come together: more of them where a row is so long that levels do not suffice.
    return [
        "int power = 0;",
        f"while ((int64_t(1) << power) < {count}) ++power;",
        f"power = power / {LEVELS} > {LEAST_POWER} ? power / {LEVELS} : {LEAST_POWER};",
        "const int64_t each = int64_t(1) << power;",
    ]
