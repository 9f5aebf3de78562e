"""A batch across rows on the CPU: neighbouring rows side by side, each in a lane.

Four elements of each row are combined in registers at a time; their part waits on a stack for a partner of the same
size.
"""

from __future__ import annotations

from collections.abc import Sequence

from fuser.combining import BATCH
from fuser.cpu.row_batch import QUARTER, RowBatch
from fuser.kernel_source import RowLoop, indent
from fuser.kernel_spec import CPU_LANES
from fuser.row_pass import RowPart, RowPass

__all__ = ["AcrossBatch"]


class AcrossBatch(RowBatch):
    """Walks over elements, for neighbouring rows side by side."""

    # Parts of a batch wait in as many places as there are sizes; behind them are elements.
    waiting = (BATCH // QUARTER).bit_length() + 1

    def __init__(self, loop: RowLoop) -> None:
        super().__init__(loop)
        # Of what is read once, more: each page of memory that is visited costs time. What is read again stays in the
        # second cache.
        if sum(step.element is not None for step in loop.passes) == 1:
            self.lanes = 4 * CPU_LANES

    def capacity(self, step: RowPass) -> int:  # noqa: ARG002 - the same for all
        """Return how many parts a block holds."""
        return (self.waiting + QUARTER) * self.lanes

    def helpers(self, level: int, step: RowPass) -> list[str]:  # noqa: ARG002 - there are none
        """Write nothing."""
        return []

    def walk(self, level: int, step: RowPass, element: RowPart) -> list[str]:  # noqa: ARG002 - calls no helper
        """Write the walk over one element of all rows after another."""
        known = {name: f"state.{own}[c]" for name, own in self.row_reads(element)}
        if not step.accumulators:
            each = indent(self.one("first + i", element, known))
            return [*self.kept(), "for (int64_t i = 0; i < total; ++i) {", *each, "}"]
        leaf = {
            f"m{item.name}": f"block.m{item.name}[{self._slot(f'{self.waiting} + i')}]" for item in step.accumulators
        }
        return [
            *self.kept(),
            "int depth = 0;",
            f"for (int64_t done = 0; done < total; done += {QUARTER}) {{",
            f"  const int64_t count = total - done < {QUARTER} ? total - done : {QUARTER};",
            "  bool is_whole = false;",
            *([] if step.decides else indent(self._whole(step, element, known))),
            "  if (!is_whole) {",
            "    for (int64_t i = 0; i < count; ++i) {",
            *indent(indent(self.one("first + done + i", element, known | leaf)), 2),
            "    }",
            *indent(self._few(step), 2),
            "  }",
            f"  for (int64_t number = done / {QUARTER}; number & 1; number /= 2) {{",
            "    --depth;",
            *indent(self._combine(step, "depth", "depth + 1", "depth"), 2),
            "  }",
            "  ++depth;",
            "}",
            *self._rest(step),
        ]

    def _whole(self, step: RowPass, element: RowPart, known: dict[str, str]) -> list[str]:
        return [
            "{",
            *indent(self.place("first + done", self.loop.full(element), "base.{0}")),
            f"  is_whole = count == {QUARTER} && length >= {QUARTER};",
            "  if (is_whole) {",
            *indent(self._four(step, element, known), 2),
            "  }",
            "}",
        ]

    def _slot(self, index: str) -> str:
        return f"({index}) * {self.lanes} + c"

    def one(self, number: str, element: RowPart, known: dict[str, str]) -> list[str]:
        """Write what computes one element of each row."""
        return [
            *self.place(number, self.loop.full(element), "base.{0}"),
            *self.fixed(element),
            *self.each_row([self.call(element, "c", self._slot(number), known)]),
        ]

    def four(self, step: RowPass, element: RowPart, known: dict[str, str], number: str) -> tuple[list[str], list[str]]:
        """Write what finds four elements of each row, and what makes of them ``e0_...`` to ``e3_...`` for one row."""
        lines, calls = [], []
        for own in range(QUARTER):
            name = f"{{0}}_{own}"
            for operand in self.loop.full(element):
                move = f" + {own} * {self.stride(operand, 0)}" if own and self.stride(operand, 0) != "0" else ""
                lines.append(f"const auto {name.format(operand.name)} = {operand.name}{move};")
            lines += self.fixed(element, name)
            calls += [f"{item.type} e{own}_{item.name};" for item in step.accumulators]
            to = {f"m{item.name}": f"e{own}_{item.name}" for item in step.accumulators}
            calls.append(self.call(element, "c", self._slot(f"{number} + {own}"), known | to, name))
        return lines, calls

    def combine(self, step: RowPass, left: str, right: str, to: str) -> str:
        """Return the call that combines what there is in two places, for each accumulator."""
        assert step.combine is not None, "it has accumulators"
        sides = zip("lrm", (left, right, to), strict=True)
        known = {f"{side}{item.name}": text.format(item.name) for side, text in sides for item in step.accumulators}
        return step.combine.call(known)

    def _four(self, step: RowPass, element: RowPart, known: dict[str, str]) -> list[str]:
        # Four elements of each row, combined in registers.
        lines, calls = self.four(step, element, known, "first + done")
        to = f"block.m{{0}}[{self._slot('depth')}]"
        for left, right, target in (("e0", "e1", "e0_{0}"), ("e2", "e3", "e2_{0}"), ("e0", "e2", to)):
            calls.append(self.combine(step, f"{left}_{{0}}", f"{right}_{{0}}", target))
        return [*lines, *self.each_row(calls)]

    def _rest(self, step: RowPass) -> list[str]:
        # The last part of each size has no partner, or one that waits for it.
        return [
            "--depth;",
            f"int64_t number = (total + {QUARTER - 1}) / {QUARTER};",
            "while (number % 2 == 0) number /= 2;",
            "while (number > 1) {",
            *indent(self.each_row(self._identities(step, str(self.waiting)))),
            *indent(self._combine(step, "depth", str(self.waiting), "depth")),
            "  for (number = (number + 1) / 2; number % 2 == 0; number /= 2) {",
            "    --depth;",
            *indent(self._combine(step, "depth", "depth + 1", "depth"), 2),
            "  }",
            "}",
        ]

    def _identities(self, step: RowPass, slot: str) -> list[str]:
        return [f"block.m{item.name}[{self._slot(slot)}] = {item.identity};" for item in step.accumulators]

    def _few(self, step: RowPass) -> list[str]:
        # What is missing of the smallest tree is the identity.
        moves = [
            f"block.m{item.name}[{self._slot('depth')}] = block.m{item.name}[{self._slot(str(self.waiting))}];"
            for item in step.accumulators
        ]
        return [
            "int64_t size = 1;",
            f"while (size < total && size < {QUARTER}) size *= 2;",
            "for (int64_t i = count; i < size; ++i) {",
            *indent(self.each_row(self._identities(step, f"{self.waiting} + i"))),
            "}",
            "for (int64_t half = size / 2; half > 0; half /= 2) {",
            "  for (int64_t i = 0; i < half; ++i) {",
            *indent(indent(self._combine(step, *(f"{self.waiting} + {own}" for own in ("2 * i", "2 * i + 1", "i"))))),
            "  }",
            "}",
            *self.each_row(moves),
        ]

    def _combine(self, step: RowPass, left: str, right: str, to: str) -> list[str]:
        places = (f"block.m{{0}}[{self._slot(slot)}]" for slot in (left, right, to))
        return self.each_row([self.combine(step, *places)])

    def each_row(self, lines: Sequence[str]) -> list[str]:
        """Write a loop over the rows of a tile."""
        return ["#pragma GCC ivdep", "for (int64_t c = 0; c < width; ++c) {", *indent(lines), "}"]
