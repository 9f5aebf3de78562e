"""Running totals in CUDA: one walk over the elements of each row, all passes of a chunk while a thread has it.

See the prelude's cuda_scans.h for the order. Threads that take neighbouring rows side by side add one element after
another.
"""

from __future__ import annotations

from fuser.cuda.along_elements import WARP, AlongElements
from fuser.cuda.row_text import most_of
from fuser.cuda.rows_across import AcrossText
from fuser.kernel_source import KERNEL_NAME, Operand, indent
from fuser.row_pass import RowPart, RowPass
from fuser.scan_access import CHUNK

__all__ = ["ScannedAcrossText", "ScannedAlongText"]


class ScannedAlongText(AlongElements):
    """Writes a kernel whose threads take neighbouring elements of a row side by side."""

    def kernel(self) -> list[str]:
        """Write the kernel: the rows of a block, chunk by chunk."""
        tuning, rows = self.tuning, self.product(self.kept)
        warps = max(tuning.team // WARP, 1)
        chunk = self.loop.rows.order.schedule.x if self.loop.rows.order else min(CHUNK, self.span)
        most = most_of(f"fuser_scan<C, W, V, U, fuser_pass{level}>::told" for level in self.loop.combining)
        body = [
            f"const fuser_index number = first + threadIdx.x / {tuning.team};",
            "const bool is_row = number < rows;",
            "// Threads without a row go along: others wait for them.",
            "const fuser_row row = fuser_find(a, is_row ? number : rows - 1);",
            *(f"const auto {item.variable} = fuser_to_compute(row.{item.name}[0]);" for item in self.row_inputs()),
            *(f"{self.loop.types[name]} {name};" for name in self.loop.row_values),
            *self._row_part(self.loop.passes[0]),
        ]
        for level in self.loop.combining:
            body += [
                f"const fuser_pass{level} pass{level}{{a}};",
                f"fuser_pass{level}::part total{level} = pass{level}.identity();",
            ]
        body += [
            f"for (fuser_index begin = 0; begin < length; begin += {self.chunk}) {{",
            *indent(self._chunk()),
            "}",
        ]
        return [
            f'extern "C" __global__ void __launch_bounds__({tuning.block})',
            f"{KERNEL_NAME}(const __grid_constant__ fuser_args a) {{",
            f"  constexpr int V = {self.loop.vector}, T = {tuning.team}, U = {tuning.unroll}, W = {self.lanes};",
            f"  constexpr int C = {chunk}, G = {warps};",
            "  const int t = threadIdx.x % T, lead = (t / W * U * W + t % W) * V;",
            f"  const fuser_index length = {self.length}, rows = {rows};",
            f"  alignas(16) __shared__ unsigned char shared[2][{self.teams}][G > 1 ? (G * {most} + 15) / 16 * 16 : 1];",
            "  int turn = 0;",
            *indent(self._each_row(body)),
            "}",
        ]

    def _keeps(self, item: Operand) -> bool:  # noqa: ARG002
        # What a thread has read of a chunk serves all passes.
        return True

    def row_values(self, part: RowPart, suffix: str = "") -> dict[str, str]:
        """Return what stands for the values that a part reads: totals are those of its element."""
        known = super().row_values(part, suffix)
        for level in self.loop.combining:
            names = [item.name for item in self.loop.passes[level].accumulators]
            known |= {f"p{name}": f"running{level}[u][k].m{name}" for name in names}
        return {name: text for name, text in known.items() if name in part.reads}

    def _row_part(self, step: RowPass) -> list[str]:
        if step.row is None:
            return []
        outputs = self.row_outputs(step)
        stores = " ".join(f"*row.{item.name} = {item.name};" for item in outputs)
        return [
            *(f"{item.info.storage} {item.name};" for item in outputs),
            step.row.call(self.row_values(step.row)),
            f"if (is_row && t == 0) {{ {stores} }}",
        ]

    def _chunk(self) -> list[str]:
        lines = self._kept_vectors()
        for level, step in enumerate(self.loop.passes):
            if step.element is None:
                continue
            lines += [f"// Pass {level}.", *self._load(level)]
            if step.accumulators:
                lines += self._compute(level, step, step.element)
                waiting = f"reinterpret_cast<fuser_pass{level}::part*>(shared[turn][threadIdx.x / T])"
                lines += [
                    f"fuser_running<C, W, V, U, G>(pass{level}, running{level}, total{level}, {waiting}, t / 32);",
                    "turn ^= 1;",
                ]
            else:
                lines += ["{", *indent(self._compute(level, step, step.element)), "}"]
        return lines

    def _parts(self, level: int) -> tuple[str, str, str]:
        return (
            f"fuser_pass{level}::part running{level}[U][V];",
            f"fuser_set(running{level}[u], own);",
            f"fuser_clear(pass{level}, running{level}[u]);",
        )


class ScannedAcrossText(AcrossText):
    """Writes a kernel whose threads take neighbouring rows side by side."""

    def _shared(self) -> list[str]:
        return []

    def _pass(self, level: int, step: RowPass, element: RowPart) -> list[str]:  # noqa: ARG002 - all are one
        if level > 0:
            return []
        parts = [own.element for own in self.loop.passes if own.element]
        full = list(dict.fromkeys(item for part in parts for item in self.loop.full(part)))
        read = [item for item in full if not (item.is_output or item.is_counter)]
        counters, outputs = ([item for item in full if getattr(item, kind)] for kind in ("is_counter", "is_output"))
        known = {item.variable: f"{item.name}[k]" for item in outputs}
        known |= {item.variable: f"{item.name}[{'k' if item.inner else '0'}]" for item in counters}
        for item in read:
            known[item.variable] = f"fuser_to_compute({item.name}[u][{'k' if item.inner else '0'}])"
        lines, each = [], []
        for number, own in enumerate(self.loop.passes):
            if own.element is None:
                continue
            names = [item.name for item in own.accumulators]
            if names:
                kind = f"fuser_pass{number}"
                lines += [
                    f"const {kind} pass{number}{{a}};",
                    f"{kind}::part total{number}[V];",
                    "#pragma unroll",
                    f"for (int k = 0; k < V; ++k) total{number}[k] = pass{number}.identity();",
                ]
                each.append(f"{kind}::part own{number};")
            values = self._known(own.element) | known | {f"m{name}": f"own{number}.m{name}" for name in names}
            each.append(own.element.call(values))
            if names:
                each.append(f"total{number}[k] = pass{number}.combine(total{number}[k], own{number});")
                known |= {f"p{name}": f"total{number}[k].m{name}" for name in names}
        kinds = {item: f"fuser_vector<{item.info.storage}, {'V' if item.inner else '1'}>" for item in read}
        return [
            *lines,
            "for (fuser_index batch = 0; batch < length; batch += U) {",
            "  constexpr int at = 0;",
            *(f"  {kinds[item]} {item.name}[U];" for item in read),
            *indent(self._unrolled([f"{item.name}[u] = {self._read(item, self._place_of(item))};" for item in read])),
            *indent(
                self._unrolled(
                    [
                        *(f"const auto {item.name} = {self._read(item, self._place_of(item))};" for item in counters),
                        *(f"{item.info.storage} {item.name}[V];" for item in outputs),
                        "#pragma unroll",
                        "for (int k = 0; k < V; ++k) {",
                        *indent(each),
                        "}",
                        *(self._write(item, self._place_of(item)) for item in outputs),
                    ]
                )
            ),
            "}",
        ]

    def _unrolled(self, lines: list[str]) -> list[str]:
        # For each of some elements, as far as there are any.
        body = ["if (batch + u >= length) break;", *self._place(), *lines]
        return ["#pragma unroll", "for (int u = 0; u < U; ++u) {", *indent(body), "}"]
