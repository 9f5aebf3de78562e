"""Running totals on the CPU: each element of a row is added to what all before it came to, as ATen adds them.

Such sums wait for each other: those of some rows are taken side by side. Along rows, what is added, and what is made of
the totals, is computed in vectors before and after, a stretch of each row at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from fuser.cpu.row_batch import RowBatch
from fuser.kernel_source import Operand, RowLoop, indent
from fuser.kernel_spec import CPU_SHORT_ROW
from fuser.row_pass import RowPart, RowPass

__all__ = ["SIDE_BY_SIDE", "ScannedBatch"]

# Rows whose sums are taken side by side, where a row's elements are neighbours; elements of each at a time, and how far
# one's are from another's: what a power of two lies between looks to a processor as if it were the same place.
SIDE_BY_SIDE, STRETCH, APART = 4, 128, 40
INTEGERS = ("int64_t", "long", "long long")


class ScannedBatch(RowBatch):
    """Walks over the elements of all rows of a tile, all passes of each element."""

    elements = 1 << 62

    def __init__(self, loop: RowLoop) -> None:
        super().__init__(loop)
        self.sums = [item for step in loop.passes for item in step.accumulators]

    @staticmethod
    def as_one_pass(loop: RowLoop) -> RowLoop:
        """Return the loop for who writes what is around batches: one pass, which leaves nothing."""
        return replace(loop, passes=(loop.passes[0]._replace(accumulators=(), combine=None),))

    def capacity(self, step: RowPass) -> int:  # noqa: ARG002 - as others
        """Return how many parts a block holds: none."""
        return 0

    def helpers(self, level: int, step: RowPass) -> list[str]:  # noqa: ARG002 - as others
        """Write nothing."""
        return []

    def walk(self, level: int, step: RowPass, element: RowPart) -> list[str]:  # noqa: ARG002 - it is of all passes
        """Write the walk."""
        if self.loop.rows.is_across:
            return self._across()
        if all(item.type in INTEGERS for item in self.sums):
            return self._one_by_one()
        if self.loop.rows.is_flat:
            return self._flat()
        return self._stretches()

    def _across(self) -> list[str]:
        # An element of each row after another.
        clear = " ".join(f"s{item.name}[c] = {item.identity};" for item in self.sums)
        return [
            *(f"alignas(64) {item.type} s{item.name}[{self.lanes}];" for item in self.sums),
            f"for (int c = 0; c < {self.lanes}; ++c) {{ {clear} }}",
            "for (int64_t i = 0; i < total; ++i) {",
            *indent(self.place("i", self._operands(), "base.{0}")),
            "#pragma GCC ivdep",
            "  for (int64_t c = 0; c < width; ++c) {",
            *indent(self._element("s{0}[c]", self.loop.rows.reduced, "c"), 2),
            "  }",
            "}",
        ]

    def _one_by_one(self) -> list[str]:
        # A row after another.
        return [
            "for (int64_t c = 0; c < width; ++c) {",
            *indent(self._rows(self._operands(), "c")),
            *(f"  {item.type} s{item.name} = {item.identity};" for item in self.sums),
            "  for (int64_t i = 0; i < total; ++i) {",
            *indent(self._element("s{0}", 0, "i"), 2),
            "  }",
            "}",
        ]

    def _flat(self) -> list[str]:
        # A tile's rows are one stretch, whose sums begin anew with each row.
        size = f"[{self.lanes * CPU_SHORT_ROW}]"
        lines = [
            *(f"const auto {item.name} = base.{item.name};" for item in self._operands()),
            *(f"alignas(64) {item.type} b{item.name}{size};" for item in self.sums),
        ]
        for step in self.loop.passes:
            if step.element is None:
                continue
            call = self._call(step, "b{0}[i]", "b{0}[i]", None, "i")
            lines += ["#pragma GCC ivdep", f"for (int64_t i = 0; i < width * total; ++i) {call}"]
            if step.combine is not None:
                for count, begin in ((SIDE_BY_SIDE, "0"), (1, f"width / {SIDE_BY_SIDE} * {SIDE_BY_SIDE}")):
                    sums = self._sum_up(step, count, "(row + c) * total + i", "total")
                    head = f"for (int64_t row = {begin}; row + {count} <= width; row += {count}) {{"
                    lines += [head, *indent(sums), "}"]
        return lines

    def _stretches(self) -> list[str]:
        # Of a few rows, a stretch of each after another: what it adds, then the totals, then what is made of them.
        body: list[str] = []
        for step in self.loop.passes:
            if step.element is None:
                continue
            call = self._call(step, "b{0}[c][i]", "b{0}[c][i]", 0, "i", "first_row + c")
            body += [
                "for (int64_t c = 0; c < count; ++c) {",
                *indent(self._rows(self.loop.full(step.element), "(first_row + c)", "done")),
                "#pragma GCC ivdep",
                f"  for (int64_t i = 0; i < length; ++i) {call}",
                "}",
            ]
            if step.combine is not None:
                body += [
                    f"if (count == {SIDE_BY_SIDE}) {{",
                    *indent(self._sum_up(step, SIDE_BY_SIDE, "c][i", "length", "s{0}[c]")),
                    "} else {",
                    "  for (int64_t row = 0; row < count; ++row) {",
                    *indent(self._sum_up(step, 1, "row][i", "length", "s{0}[row]"), 2),
                    "  }",
                    "}",
                ]
        clear = " ".join(f"s{item.name}[c] = {item.identity};" for item in self.sums)
        size = f"[{SIDE_BY_SIDE}]"
        return [
            f"for (int64_t first_row = 0; first_row < width; first_row += {SIDE_BY_SIDE}) {{",
            f"  const int64_t count = width - first_row < {SIDE_BY_SIDE} ? width - first_row : {SIDE_BY_SIDE};",
            *(f"  {item.type} s{item.name}{size};" for item in self.sums),
            f"  for (int c = 0; c < {SIDE_BY_SIDE}; ++c) {{ {clear} }}",
            *(f"  alignas(64) {item.type} b{item.name}{size}[{STRETCH + APART}];" for item in self.sums),
            f"  for (int64_t done = 0; done < total; done += {STRETCH}) {{",
            f"    const int64_t length = total - done < {STRETCH} ? total - done : {STRETCH};",
            *indent(body, 2),
            "  }",
            "}",
        ]

    def _sum_up(self, step: RowPass, count: int, index: str, length: str, total: str = "") -> list[str]:
        # A stretch of some rows, whose elements c and i are at an index of buffers; sums that no loop numbers stay in
        # registers. They go on from totals, or begin here.
        items = step.accumulators

        def each(lines: Iterable[str]) -> list[str]:
            return [f"#pragma GCC unroll {count}", f"for (int c = 0; c < {count}; ++c) {{ {' '.join(lines)} }}"]

        add = self._add(step, "t{0}[c]", f"b{{0}}[{index}]")
        add += [f"b{item.name}[{index}] = t{item.name}[c];" for item in items]
        return [
            *(f"{item.type} t{item.name}[{count}];" for item in items),
            *each(f"t{item.name}[c] = {total.format(item.name) or item.identity};" for item in items),
            f"for (int64_t i = 0; i < {length}; ++i) {{",
            *indent(each(add)),
            "}",
            *(each(f"{total.format(item.name)} = t{item.name}[c];" for item in items) if total else []),
        ]

    def _operands(self) -> list[Operand]:
        return [
            *dict.fromkeys(item for step in self.loop.passes if step.element for item in self.loop.full(step.element))
        ]

    def _rows(self, operands: Sequence[Operand], row: str, element: str = "0") -> list[str]:
        # Pointers into a row.
        first = self.loop.rows.reduced
        places = [(item, self.address(f"base.{item.name}", item, [first], row)) for item in operands]
        return [f"const auto {item.name} = {text} + {element} * {self.stride(item, 0)};" for item, text in places]

    def _element(self, total: str, dim: int, index: str) -> list[str]:
        # All passes of an element.
        lines: list[str] = []
        for step in self.loop.passes:
            lines += [f"{item.type} m{item.name};" for item in step.accumulators]
            lines += [self._call(step, total, "m{0}", dim, index)] if step.element else []
            lines += self._add(step, total, "m{0}")
        return lines

    def _call(self, step: RowPass, total: str, made: str, dim: int | None, index: str, row: str = "c") -> str:
        # The call of a pass for an element: where totals are, and where it leaves what is to be added; the row in its
        # tile. Without a dimension operands lie densely.
        assert step.element is not None, "passes of running totals have one"
        known = {name: f"state.{own}[{row}]" for name, own in self.row_reads(step.element)}
        for item in self.loop.full(step.element):
            stride = "1" if dim is None else self.stride(item, dim)
            place = f"{item.name}[{'0' if stride == '0' else index if stride == '1' else f'{index} * {stride}'}]"
            known[item.variable] = place if item.is_output else f"fuser_to_compute({place})"
        known |= {f"p{item.name}": total.format(item.name) for own in self.loop.passes for item in own.accumulators}
        known |= {f"m{item.name}": made.format(item.name) for item in step.accumulators}
        return step.element.call(known)

    def _add(self, step: RowPass, to: str, what: str) -> list[str]:
        if step.combine is None:
            return []
        known = {f"{side}{item.name}": to.format(item.name) for side in "lm" for item in step.accumulators}
        return [step.combine.call(known | {f"r{item.name}": what.format(item.name) for item in step.accumulators})]
