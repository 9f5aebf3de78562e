"""The gradients of a norm in torch's order, from one walk over the elements: rows, and the columns beside them.

Of each column one of torch's threads adds runs of rows, some runs apart; of each row some warps have a part. Here the
blocks of a cluster have all columns of what one of those threads adds, and each block has what one of those warps has
of a row. A block takes a run at a time, a warp for each row. What its warps come to goes to the other blocks; while
theirs is on its way, each thread adds its columns of the run before, whose elements wait in shared memory.
"""

from __future__ import annotations

from fuser.codegen import KERNEL_NAME, Operand
from fuser.cuda.along_elements import AlongElements, each_element
from fuser.cuda.row_text import indent
from fuser.row_parts import RowPart, RowPass

__all__ = ["OrderedColumnsText"]


class OrderedColumnsText(AlongElements):
    """Writes such a kernel."""

    def kernel(self) -> list[str]:
        """Write the kernel: all runs of a cluster, then what columns came to."""
        tuning, (step, last) = self.loop.tuning, self.loop.passes
        assert step.element is not None, "it reduces rows"
        assert step.column is not None, "and columns"
        inputs = self._inputs(step.element, last.element)
        own = [item for item in inputs if not item.access.is_shared]
        rows = tuning.block // 32
        return [
            f'extern "C" __global__ void __cluster_dims__({tuning.cluster}, 1, 1) __launch_bounds__({tuning.block}, 1)',
            f"{KERNEL_NAME}(const __grid_constant__ fuser_args a) {{",
            f"  constexpr int V = {self.loop.vector}, U = {tuning.unroll}, R = {rows}, C = {tuning.cluster};",
            "  constexpr int share = U * 32 * V, own_columns = share / (32 * R), buffers = 3;",
            "  const unsigned int rank = blockIdx.x % C, piece = blockIdx.x / C;",
            "  const int t = threadIdx.x, warp = t / 32, lane = t % 32;",
            f"  const fuser_index length = {self.length}, rows = {self.product(self.kept)};",
            "  const fuser_index lead = (rank * 32 + lane) * V;",
            *indent(self._shared_memory()),
            f"  const fuser_index step = static_cast<fuser_index>({self.loop.rows.pieces}) * R;",
            "  fuser_index number = piece * R + warp;",
            "  fuser_row next = fuser_find(a, number < rows ? number : rows - 1);",
            *(f"  {item.info.storage} next_{item.name};" for item in self.row_inputs()),
            *(f"  {self._vector(item)} {'next_' * (item in own)}{item.name}[U];" for item in inputs),
            *indent(self._read_vectors([item for item in inputs if item not in own], "")),
            *indent(self._read_ahead(own)),
            *indent(self._add_columns(step, step.column)),
            "  int turn = 0;",
            "  // Warps without a row go along: others wait for them.",
            "  for (fuser_index first = piece * R; first < rows; first += step, ++turn) {",
            *indent(self._run(step, step.element, last, own), 2),
            "  }",
            "  __syncthreads();",
            "  if (turn > 0) add_columns(turn - 1);",
            *indent(self._pieces(step)),
            "}",
        ]

    # --- a run -------------------------------------------------------------------------------------------------------
    def _run(self, step: RowPass, element: RowPart, last: RowPass, own: list[Operand]) -> list[str]:
        lines = [
            "const fuser_row row = next;",
            "const bool is_row = number < rows;",
            *(f"const auto {item.variable} = fuser_to_compute(next_{item.name});" for item in self.row_inputs()),
            *(f"{self.loop.types[name]} {name};" for name in self.loop.row_values),
            *(f"{self._vector(item)} {item.name}[U];" for item in own),
            "#pragma unroll",
            "for (int u = 0; u < U; ++u) {",
            *(f"  {item.name}[u] = next_{item.name}[u];" for item in own),
            *(
                f"  held_{item.name}[((turn % buffers * R + warp) * U + u) * 32 + lane] = {item.name}[u];"
                for item in self.loop.held
            ),
            "}",
            *(
                f"if (lane == 0) rows_{item.name}[turn % buffers][warp] = next_{item.name};"
                for item in self.row_inputs()
            ),
            "number += step;",
            "next = fuser_find(a, number < rows ? number : rows - 1);",
            *self._read_ahead(own),
            "const fuser_pass0 pass0{a};",
            "fuser_pass0::part own = pass0.identity();",
            *self._elements(step, element),
            "own = fuser_from_first<32, fuser_pass0>(fuser_halve_lanes<16, 1>(pass0, own));",
            "if (lane < C) fuser_send(&parts[turn % 2][warp][rank], lane, own);",
            "fuser_publish();",
            "if (turn > 0) add_columns(turn - 1);",
            "fuser_wait();",
            "fuser_pass0::part items[C];",
            "#pragma unroll",
            "for (int i = 0; i < C; ++i) items[i] = parts[turn % 2][warp][i];",
            "#pragma unroll",
            "for (int half = C / 2; half > 0; half /= 2) {",
            "#pragma unroll",
            "  for (int i = 0; i < half; ++i) items[i] = pass0.combine(items[i], items[i + half]);",
            "}",
            "const auto total0 = items[0];",
        ]
        assert last.row is not None, "it finishes sums"
        lines.append(last.row.call(self.row_values(last.row)))
        return [*lines, *(self._elements(last, last.element) if last.element else [])]

    def _elements(self, step: RowPass, element: RowPart) -> list[str]:
        outputs = [item for item in self.full(element) if item.is_output]
        known = self.row_values(element) | self._known(self._inputs(element), "[u]")
        known |= {item.variable: f"{item.name}[k]" for item in outputs}
        known |= {f"{side}{item.name}": f"own.m{item.name}" for side in "lm" for item in step.accumulators}
        stores = [
            f"fuser_store<V, {item.access.width}>({self._at(item, 'row')}, {item.name}, is_row ? V : 0);"
            for item in outputs
        ]
        inside = [
            *(f"{item.info.storage} {item.name}[V];" for item in outputs),
            *self.look_up(element, known),
            *self._quickly(step, element, lambda part: each_element(part.call(known))),
            *stores,
        ]
        return [*self._divisors(step), "#pragma unroll", "for (int u = 0; u < U; ++u) {", *indent(inside), "}"]

    # --- columns -----------------------------------------------------------------------------------------------------
    def _add_columns(self, step: RowPass, column: RowPart) -> list[str]:
        # What the columns of a thread come to, and what adds a run to them.
        held = self._inputs(column)
        known = self._known(held, "") | {
            item.variable: f"fuser_to_compute(rows_{item.name}[turn % buffers][i])" for item in self.row_inputs()
        }
        known |= {f"{side}{item.name}": f"column[k].m{item.name}" for side in "lm" for item in step.columns}
        known = {name: text for name, text in known.items() if name in (*column.reads, *column.writes)}
        vectors = [
            f"const auto {item.name} = *reinterpret_cast<const fuser_vector<{item.info.storage}, own_columns>*>("
            f"reinterpret_cast<const {item.info.storage}*>(held_{item.name}) + "
            "(turn % buffers * R + i) * share + t * own_columns);"
            for item in held
        ]
        inside = [
            *vectors,
            *self.look_up(column, known, "own_columns"),
            "#pragma unroll",
            f"for (int k = 0; k < own_columns; ++k) {column.call(known)}",
        ]
        return [
            "const fuser_columns0 columns0{a};",
            "fuser_columns0::part column[own_columns];",
            "#pragma unroll",
            "for (int k = 0; k < own_columns; ++k) column[k] = columns0.identity();",
            "const auto add_columns = [&](int turn) {",
            "#pragma unroll",
            "  for (int i = 0; i < R; ++i) {",
            "    if (turn * step + piece * R + i >= rows) break;",
            *indent(inside, 2),
            "  }",
            "};",
        ]

    def _pieces(self, step: RowPass) -> list[str]:
        # The cluster's piece of each column.
        outputs = {item.variable: item for item in self.loop.operands}
        place = "piece * length + (own / (32 * V) * C + rank) * (32 * V) + own % (32 * V)"
        return [
            "#pragma unroll",
            "for (int k = 0; k < own_columns; ++k) {",
            "  const fuser_index own = t * own_columns + k;",
            *(f"  a.{outputs[item.output].name}[{place}] = column[k].m{item.name};" for item in step.columns),
            "}",
        ]

    # --- memory ------------------------------------------------------------------------------------------------------
    def _shared_memory(self) -> list[str]:
        lines = [
            "constexpr int parts_bytes = (2 * R * C * sizeof(fuser_pass0::part) + 15) / 16 * 16;",
            f"constexpr int all_bytes = parts_bytes + {len(self.row_inputs())} * buffers * R * 8;",
            "alignas(16) __shared__ unsigned char shared[all_bytes];",
            "const auto parts = reinterpret_cast<fuser_pass0::part (*)[R][C]>(shared);",
        ]
        for slot, item in enumerate(self.row_inputs()):
            start = f"shared + parts_bytes + {slot} * buffers * R * 8"
            lines.append(f"const auto rows_{item.name} = reinterpret_cast<{item.info.storage} (*)[R]>({start});")
        lines += ["extern __shared__ uint4 fuser_held[];", "auto after = reinterpret_cast<unsigned char*>(fuser_held);"]
        for item in self.loop.held:
            lines += [
                f"const auto held_{item.name} = reinterpret_cast<{self._vector(item)}*>(after);",
                f"after += buffers * R * share * {item.info.dtype.itemsize};",
            ]
        return lines + self.fill_tables()

    def _inputs(self, *elements: RowPart | None) -> list[Operand]:
        found = [item for element in elements if element for item in self.full(element) if not item.is_output]
        return list(dict.fromkeys(found))

    def _known(self, items: list[Operand], at: str) -> dict[str, str]:
        return {item.variable: f"fuser_to_compute({item.name}{at}[{'k' if item.inner else '0'}])" for item in items}

    def _at(self, item: Operand, row: str) -> str:
        return f"{row}.{item.name} + lead + u * (32 * C * V)" if item.inner else f"{row}.{item.name}"

    def _read_vectors(self, items: list[Operand], to: str) -> list[str]:
        if not items:
            return []
        width = {item: item.access.width if item.inner else 1 for item in items}
        reads = [
            f"  {to}{item.name}[u] = fuser_load<{'V' if item.inner else '1'}, {width[item]}>"
            f"({self._at(item, 'next')}, V);"
            for item in items
        ]
        return ["#pragma unroll", "for (int u = 0; u < U; ++u) {", *reads, "}"]

    def _read_ahead(self, own: list[Operand]) -> list[str]:
        return [
            *(f"next_{item.name} = next.{item.name}[0];" for item in self.row_inputs()),
            *self._read_vectors(own, "next_"),
        ]
