"""Row loops in CUDA whose threads keep what the columns of their rows come to.

Blocks go from row to row, as in fuser.cuda.rows_along. A thread has the same elements of each of its rows: what it adds
to their columns stays in its registers, and at the end a block writes what all its rows came to, its piece.
"""

from __future__ import annotations

from fuser.codegen import KERNEL_NAME, Operand
from fuser.cuda.row_text import indent
from fuser.cuda.rows_along import AlongText
from fuser.row_parts import RowPart

__all__ = ["ColumnsText"]
import os
PREFETCH = lambda self: os.environ.get("NB_PREFETCH") == "1"


class ColumnsText(AlongText):
    """Writes such a kernel."""

    def kernel(self) -> list[str]:
        """Write the kernel: the rows of a block, all passes of each, then what columns came to."""
        number = "fuser_index number = static_cast<fuser_index>(blockIdx.x) * TEAMS + threadIdx.x / T;"
        step = "static_cast<fuser_index>(gridDim.x) * TEAMS"
        body = [
            "const bool is_row = number < rows;",
            *self._next_row(),
            *self._all_passes("is_row && t == 0"),
        ]
        if self._shares and len(self.combining) % 2:
            body.append("__syncthreads();" if not os.environ.get("NB_TURN") else "turn ^= 1;")
        return [
            *self._head(),
            f"  constexpr int TEAMS = {self.teams};",
            "  const int t = threadIdx.x % T;",
            f"  const fuser_index length = {self.length}, rows = {self.product(self.kept)}, step = {step};",
            *indent(self._shared()),
            *(["  int turn = 0;"] if os.environ.get("NB_TURN") else []),
            *indent(self._columns()),
            f"  {number}",
            *indent(self._first_row()),
            "  // Threads without a row go along: others wait for them.",
            "  for (; number - threadIdx.x / T < rows; number += step) {",
            *indent(body, 2),
            "  }",
            *indent(self._pieces()),
            "}",
        ]

    def _ahead(self) -> list[Operand]:
        # What is read while the row before is computed.
        first = self.loop.passes[0].element
        if first is None or not PREFETCH(self):
            return []
        return [item for item in super()._new_inputs(0, first) if not self._is_again(item)]

    def _new_inputs(self, level: int, element: RowPart) -> list[Operand]:
        return [item for item in super()._new_inputs(level, element) if level or item not in self._ahead()]

    def _first_row(self) -> list[str]:
        if not self._ahead():
            return []
        return [
            "fuser_row next = fuser_find(a, number < rows ? number : rows - 1);",
            *(f"{item.info.storage} next_{item.name};" for item in self.row_inputs()),
            *(f"{self._vector(item)} next_{item.name}[U];" for item in self._ahead()),
            *self._read_ahead(),
        ]

    def _read_ahead(self) -> list[str]:
        loads = [f"next_{item.name}[u] = {self._read(item, 'next')};" for item in self._ahead()]
        inside = [*self._place(self._ahead(), reads=True), *loads]
        return [
            *(f"next_{item.name} = next.{item.name}[0];" for item in self.row_inputs()),
            "{",
            "  constexpr fuser_index begin = 0;",
            "#pragma unroll",
            "  for (int u = 0; u < U; ++u) {",
            *indent(inside, 2),
            "  }",
            "}",
        ]

    def _next_row(self) -> list[str]:
        if not self._ahead():
            return ["const fuser_row row = fuser_find(a, is_row ? number : rows - 1);"]
        return ["const fuser_row row = next;"]

    def _row_variables(self) -> list[str]:
        if not self._ahead():
            return super()._row_variables()
        return [
            *(f"const auto {item.variable} = fuser_to_compute(next_{item.name});" for item in self.row_inputs()),
            *(f"{self.loop.types[name]} {name};" for name in self.loop.row_values),
        ]

    def _kept_vectors(self) -> list[str]:
        if not self._ahead():
            return super()._kept_vectors()
        moves = [f"{item.name}[u] = next_{item.name}[u];" for item in self._ahead()]
        return [
            *super()._kept_vectors(),
            "#pragma unroll",
            "for (int u = 0; u < U; ++u) {",
            *indent(moves),
            "}",
            "next = fuser_find(a, number + step < rows ? number + step : rows - 1);",
            *self._read_ahead(),
        ]

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
        return lines

    def _pieces(self) -> list[str]:
        # The block's piece of each column: what its teams have, combined.
        lines, outputs = [], {item.variable: item for item in self.loop.operands}
        for level, step in enumerate(self.loop.passes):
            if not step.columns:
                continue
            items = [outputs[item.output] for item in step.columns]
            inside = self._place(items)
            if self.teams > 1:
                kind, shared = f"fuser_columns{level}::part", f"columns_shared{level}"
                lines.append(f"alignas(16) __shared__ unsigned char {shared}[T * TEAMS * V * sizeof({kind})];")
                fold = f"reinterpret_cast<{kind}*>({shared})"
                inside.append(f"fuser_stack<T, TEAMS>(columns{level}, column{level}[u], {fold});")
            left = f"threadIdx.x < T ? left : {self.signed}(0)" if self.teams > 1 else "left"
            for accumulator, item in zip(step.columns, items, strict=True):
                start = f"a.{item.name} + static_cast<fuser_index>(blockIdx.x) * length"
                inside += [
                    f"{item.info.storage} {item.name}[V];",
                    "#pragma unroll",
                    f"for (int k = 0; k < V; ++k) {item.name}[k] = column{level}[u][k].m{accumulator.name};",
                    f"fuser_store<V, {item.access.width}>({self.address(start, item, self.reduced)}, {item.name}, {left});",
                ]
            each = ["#pragma unroll", "for (int u = 0; u < U; ++u) {", *indent(inside), "}"]
            lines += ["{", "  constexpr fuser_index begin = 0;", *indent(each), "}"]
        return lines
