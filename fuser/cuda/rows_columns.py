"""Row loops in CUDA whose threads keep what the columns of their rows come to.

Blocks go from row to row, with teams as in fuser.cuda.rows_along. A thread has the same elements of each of its rows:
what these add to columns stays in its registers, and at the end a block writes what all its rows came to, its piece.
What is read of the next row is on its way while one is computed.
"""

from __future__ import annotations

from fuser.cuda.rows_along import AlongText
from fuser.kernel_source import Operand, indent

__all__ = ["ColumnsText"]

# Rows of a thread that are added one after another: more would take more roundings than a tree does.
FEW_ROWS = 4
# Elements of a vector for which there are registers for two sums: those of float32, whose results show such roundings.
FEW_SUMS = 4


class ColumnsText(AlongText):
    """Writes such a kernel."""

    def kernel(self) -> list[str]:
        """Write the kernel: the rows of a block, all passes of each, then what columns came to."""
        return [
            *self._head(),
            f"  constexpr int TEAMS = {self.teams};",
            *self._own_vectors("threadIdx.x % T"),
            f"  const fuser_index length = {self.length}, rows = {self.product(self.kept)};",
            "  const fuser_index step = static_cast<fuser_index>(gridDim.x) * TEAMS;",
            "  fuser_index first = static_cast<fuser_index>(blockIdx.x) * TEAMS, number = first + threadIdx.x / T;",
            *indent(self._shared()),
            *indent(self._columns()),
            "  // Threads without a row go along: others wait for them.",
            "  fuser_row next = fuser_find(a, number < rows ? number : rows - 1);",
            *(f"  {item.info.storage} next_{item.name};" for item in self.row_inputs()),
            *(f"  {self._vector(item)} next_{item.name}[U];" for item in self._ahead),
            *indent(self._read_once()),
            *indent(self._read_ahead()),
            "  int turn = 0;",
            *(["  unsigned int taken = 0;"] if self._is_folded else []),
            "  for (; first < rows; first += step) {",
            "    const fuser_row row = next;",
            "    const bool is_row = number < rows;",
            *indent(self._all_passes("is_row && t == 0"), 2),
            f"    turn ^= {len(self.loop.combining) % 2};" if self._is_one_batch else "    __syncthreads();",
            *(
                [f"    if (++taken % {FEW_ROWS} == 0) {{", *indent(self._fold(is_last=False), 3), "    }"]
                if self._is_folded
                else []
            ),
            "  }",
            *(indent(self._fold(is_last=True)) if self._is_folded else []),
            *indent(self._pieces()),
            "}",
        ]

    # --- rows --------------------------------------------------------------------------------------------------------
    @property
    def _ahead(self) -> list[Operand]:
        # What is read while the row before is computed.
        return [item for item in self._read_by(self.loop.passes) if self._keeps(item)]

    def _keeps(self, item: Operand) -> bool:
        # What all rows have in common is near: each of several passes reads it anew, where registers are few.
        return not item.access.is_shared

    def _is_late(self, item: Operand) -> bool:  # noqa: ARG002
        return False

    def _forgets(self, item: Operand) -> bool:  # noqa: ARG002
        return True

    def _new_inputs(self, level: int) -> list[Operand]:
        return [item for item in super()._new_inputs(level) if not (self._keeps(item) or item in self._once)]

    @property
    def _once(self) -> list[Operand]:
        # What all rows have in common, where there is one pass.
        is_only = len(self.loop.passes) == 1
        return [item for item in self._read_by(self.loop.passes) if is_only and not self._keeps(item)]

    def _read_once(self) -> list[str]:
        if not self._once:
            return []
        lines = [f"{self._vector(item)} {item.name}[U];" for item in self._once]
        return [*lines, "{", "  constexpr fuser_index begin = 0;", *indent(self._reads(self._once, "next")), "}"]

    def _read_ahead(self) -> list[str]:
        return [
            *(f"next_{item.name} = next.{item.name}[0];" for item in self.row_inputs()),
            "{",
            "  constexpr fuser_index begin = 0;",
            *indent(self._reads(self._ahead, "next", "next_")),
            "}",
        ]

    def _row_variables(self) -> list[str]:
        return [
            *(f"const auto {item.variable} = fuser_to_compute(next_{item.name});" for item in self.row_inputs()),
            *(f"{self.loop.types[name]} {name};" for name in self.loop.row_values),
        ]

    def _kept_vectors(self) -> list[str]:
        return [
            *super()._kept_vectors(),
            "#pragma unroll",
            "for (int u = 0; u < U; ++u) {",
            *(f"  {item.name}[u] = next_{item.name}[u];" for item in self._ahead),
            "}",
            "number += step;",
            "next = fuser_find(a, number < rows ? number : rows - 1);",
            *self._read_ahead(),
        ]

    def _buffer(self, level: int) -> str:
        return f"turn ^ {super()._buffer(level)}" if self._is_one_batch else "0"

    # --- columns -----------------------------------------------------------------------------------------------------
    def _columns(self) -> list[str]:
        # What the columns of a thread come to.
        lines = []
        for level, step in enumerate(self.loop.passes):
            if step.columns:
                lines += [
                    f"const fuser_columns{level} columns{level}{{a}};",
                    f"fuser_columns{level}::part column{level}[U][V];",
                    "#pragma unroll",
                    f"for (int i = 0; i < U * V; ++i) column{level}[i / V][i % V] = columns{level}.identity();",
                ]
                if self._is_folded:
                    lines += [
                        f"fuser_columns{level}::part all_rows{level}[U][V];",
                        "#pragma unroll",
                        f"for (int i = 0; i < U * V; ++i) all_rows{level}[i / V][i % V] = columns{level}.identity();",
                    ]
        return lines

    @property
    def _is_folded(self) -> bool:
        # Whether what a few rows came to is added apart.
        return self.teams > 1 and self.loop.vector <= FEW_SUMS

    def _fold(self, *, is_last: bool) -> list[str]:
        # Add what the last rows came to, and begin anew; at last the total is what columns come to.
        lines: list[str] = []
        for level, step in enumerate(self.loop.passes):
            if step.columns:
                own, total = f"column{level}[i / V][i % V]", f"all_rows{level}[i / V][i % V]"
                lines += [
                    "#pragma unroll",
                    "for (int i = 0; i < U * V; ++i) {",
                    f"  {total} = columns{level}.combine({total}, {own});",
                    f"  {own} = {total if is_last else f'columns{level}.identity()'};",
                    "}",
                ]
        return lines

    def _pieces(self) -> list[str]:
        # The block's piece of each column: what its teams have, combined.
        lines, outputs = [], {item.variable: item for item in self.loop.operands}
        for level, step in enumerate(self.loop.passes):
            if not step.columns:
                continue
            items = [outputs[item.output] for item in step.columns]
            inside = ["constexpr fuser_index begin = 0;", *self._place(items)]
            if self.teams > 1:
                kind, shared = f"fuser_columns{level}::part", f"columns_shared{level}"
                lines.append(f"alignas(16) __shared__ unsigned char {shared}[T * TEAMS * V * sizeof({kind})];")
                fold = f"reinterpret_cast<{kind}*>({shared})"
                inside.append(f"fuser_stack<T, TEAMS>(columns{level}, column{level}[u], {fold});")
            left = f"threadIdx.x < T ? left : {self.signed}(0)" if self.teams > 1 else "left"
            for accumulator, item in zip(step.columns, items, strict=True):
                start = f"a.{item.name} + static_cast<fuser_index>(blockIdx.x) * length"
                place = self.address(start, item, self.reduced)
                inside += [
                    f"{item.info.storage} {item.name}[V];",
                    "#pragma unroll",
                    f"for (int k = 0; k < V; ++k) {item.name}[k] = column{level}[u][k].m{accumulator.name};",
                    f"fuser_store<V, {item.access.width}>({place}, {item.name}, {left});",
                ]
            lines += ["#pragma unroll", "for (int u = 0; u < U; ++u) {", *indent(inside), "}"]
        return lines
